/* One shard: its header, and every tensor that the header describes. */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/io.h"
#include "formats/safetensors_opening.h"

#define HEADER_BYTES_MAX ((uint64_t)100000000) /* the limit of the official library */

typedef unsigned long long ull; /* for %llu */

void x3_st_tensor_problem(x3_st_opening *o, const x3_shard *shard, const char *tensor, const char *format, ...)
{
    char text[700];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    x3_findings_add(o->findings, "%.300s: tensor \"%.300s\": %s", shard->path, tensor, text);
}

x3_status x3_st_content_or_stop(x3_st_opening *o, const x3_err *cause, x3_err *err)
{
    if (cause->status != X3_ERR_INPUT)
        return x3_fail(err, cause->status, "%s", cause->text);
    x3_findings_add(o->findings, "%s", cause->text);
    return X3_OK;
}

static int compare_ranges(const void *a, const void *b)
{
    const x3_tensor *x = *(const x3_tensor *const *)a, *y = *(const x3_tensor *const *)b;

    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    if (x->n_bytes != y->n_bytes)
        return x->n_bytes < y->n_bytes ? -1 : 1;
    return strcmp(x->name, y->name);
}

/* What stands in place of a shard whose header length is absurd, or NULL. */
static const char *impostor(const char *head, size_t n)
{
    static const char lfs[] = "version https://git-lfs";
    size_t at = 0;

    if (n >= sizeof lfs - 1 && memcmp(head, lfs, sizeof lfs - 1) == 0)
        return "a Git LFS pointer, not the weights (\"git lfs pull\" fetches them)";
    if (memcmp(head, "GGUF", 4) == 0)
        return "a GGUF file, not safetensors";
    if (memcmp(head, "PK\3\4", 4) == 0)
        return "a zip archive (as PyTorch writes), not safetensors";
    while (at < n && strchr(" \t\r\n", head[at]) != NULL && head[at] != '\0')
        at++;
    if ((n - at >= 14 && strncasecmp(head + at, "<!doctype html", 14) == 0) ||
        (n - at >= 5 && strncasecmp(head + at, "<html", 5) == 0))
        return "an HTML page, not safetensors";
    for (at = 0; at < n; at++)
        if ((head[at] < ' ' && strchr("\t\r\n", head[at]) == NULL) || head[at] > '~' || head[at] == '\0')
            return NULL;
    return "text, not safetensors";
}

/* ---- one tensor of a header ---- */

/* Below 2^53, where a JSON number read as a double is still exact. */
static bool as_whole(const cJSON *node, uint64_t *out)
{
    if (!cJSON_IsNumber(node) || !(node->valuedouble >= 0 && node->valuedouble < 0x1p53))
        return false;
    *out = (uint64_t)node->valuedouble;
    return (double)*out == node->valuedouble;
}

static bool parse_dtype(x3_st_opening *o, const x3_shard *shard, const cJSON *node, x3_tensor *t)
{
    const cJSON *dtype = x3_json_get(node, "dtype");

    if (!cJSON_IsString(dtype)) {
        x3_st_tensor_problem(o, shard, t->name, "dtype is missing or not a string");
        return false;
    }
    if (!x3_dtype_from_name(dtype->valuestring, &t->dtype)) {
        x3_st_tensor_problem(o, shard, t->name, "unknown dtype \"%.100s\"", dtype->valuestring);
        return false;
    }
    return true;
}

static bool parse_shape(x3_st_opening *o, const x3_shard *shard, const cJSON *node, x3_tensor *t)
{
    const cJSON *shape = x3_json_get(node, "shape"), *c;
    bool overflow = false, has_zero = false;
    uint64_t product = 1, bytes;
    char text[128];

    if (!cJSON_IsArray(shape)) {
        x3_st_tensor_problem(o, shard, t->name, "shape is missing or not a list");
        return false;
    }
    cJSON_ArrayForEach(c, shape)
    {
        uint64_t dim;
        if (t->rank == X3_RANK_MAX) {
            x3_st_tensor_problem(o, shard, t->name, "rank %d, at most %d is read", cJSON_GetArraySize(shape), X3_RANK_MAX);
            return false;
        }
        if (!as_whole(c, &dim)) {
            x3_st_tensor_problem(o, shard, t->name, "shape is not a list of whole numbers >= 0 and < 2^53");
            return false;
        }
        t->shape[t->rank++] = dim;
        has_zero |= dim == 0;
        overflow |= dim != 0 && x3_mul_overflows(product, dim, &product);
    }
    /* Zeros are left out and 8 bytes an element assumed: no product of some of the dimensions, and no size in bytes
     * made of them, can overflow later on. */
    if (overflow || x3_mul_overflows(product, 8, &bytes)) {
        x3_st_tensor_problem(o, shard, t->name, "the product of shape %s overflows", x3_tensor_shape_text(t, text));
        return false;
    }
    t->n_elements = has_zero ? 0 : product;
    return true;
}

static bool parse_range(x3_st_opening *o, const x3_shard *shard, const cJSON *node, x3_tensor *t)
{
    const cJSON *range = x3_json_get(node, "data_offsets");
    uint64_t begin, end, data_bytes = shard->n_bytes - 8 - shard->header_bytes;

    if (!cJSON_IsArray(range) || cJSON_GetArraySize(range) != 2 || !as_whole(range->child, &begin) ||
        !as_whole(range->child->next, &end)) {
        x3_st_tensor_problem(o, shard, t->name, "data_offsets is missing or not two whole numbers >= 0 and < 2^53");
        return false;
    }
    if (begin > end) {
        x3_st_tensor_problem(o, shard, t->name, "data_offsets begin at %llu and end before that, at %llu", (ull)begin,
                       (ull)end);
        return false;
    }
    if (end > data_bytes) {
        x3_st_tensor_problem(o, shard, t->name, "data_offsets [%llu, %llu] reach past the end of the data (%llu bytes)",
                       (ull)begin, (ull)end, (ull)data_bytes);
        return false;
    }
    t->offset = 8 + shard->header_bytes + begin;
    t->n_bytes = end - begin;
    return true;
}

static bool parse_tensor(x3_st_opening *o, const x3_shard *shard, const cJSON *node, x3_tensor *t)
{
    bool ok = true;
    char text[128];

    if (!cJSON_IsObject(node)) {
        x3_st_tensor_problem(o, shard, t->name, "its description is not an object");
        return false;
    }
    ok &= parse_dtype(o, shard, node, t);
    ok &= parse_shape(o, shard, node, t);
    ok &= parse_range(o, shard, node, t);
    if (ok && t->n_elements * x3_dtype_bytes(t->dtype) != t->n_bytes) {
        x3_st_tensor_problem(o, shard, t->name, "shape %s of %s takes %llu bytes, data_offsets span %llu",
                       x3_tensor_shape_text(t, text), x3_dtype_name(t->dtype),
                       (ull)(t->n_elements * x3_dtype_bytes(t->dtype)), (ull)t->n_bytes);
        return false;
    }
    return ok;
}

/* ---- one shard ---- */

static bool raise_descriptor_limit(void)
{
    struct rlimit limit;

    if (getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur == limit.rlim_max)
        return false;
    limit.rlim_cur = limit.rlim_max;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0;
}

/* shard->fd stays -1 after a finding. */
static x3_status open_file(x3_st_opening *o, x3_shard *shard, x3_err *err)
{
    /* A FIFO in place of a file must not hang the open. */
    const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
    struct stat info;
    int fd = open(shard->path, flags);

    if (fd < 0 && errno == EMFILE && raise_descriptor_limit())
        fd = open(shard->path, flags);
    if (fd < 0 && (errno == ENOENT || errno == ELOOP)) {
        x3_findings_add(o->findings, "%s: missing%s%s", shard->path,
                        o->st->has_index ? ", but " X3_ST_INDEX_NAME " names it" : "",
                        x3_path_exists(shard->path) ? " (a broken link)" : "");
        return X3_OK;
    }
    if (fd < 0)
        return x3_fail(err, X3_ERR_IO, "%s: cannot open: %s", shard->path, strerror(errno));
    if (fstat(fd, &info) != 0) {
        x3_status rc = x3_fail(err, X3_ERR_IO, "%s: cannot stat: %s", shard->path, strerror(errno));
        close(fd);
        return rc;
    }
    if (!S_ISREG(info.st_mode)) {
        x3_findings_add(o->findings, "%s: not a regular file", shard->path);
        close(fd);
        return X3_OK;
    }
    shard->fd = fd;
    shard->n_bytes = (uint64_t)info.st_size;
    return X3_OK;
}

/* *header = the 8 + N bytes before the data, on the heap; NULL after a finding. */
static x3_status read_header(x3_st_opening *o, x3_shard *shard, char **header, x3_err *err)
{
    char head[64];
    size_t n_head = x3_min_size(sizeof head, shard->n_bytes);
    uint64_t n;
    x3_status rc;

    *header = NULL;
    if (shard->n_bytes < 8) {
        x3_findings_add(o->findings, "%s: %llu bytes, shorter than the 8 bytes of a header length", shard->path,
                        (ull)shard->n_bytes);
        return X3_OK;
    }
    rc = x3_pread_all(shard->fd, head, n_head, 0, shard->path, err);
    if (rc != X3_OK)
        return rc;
    memcpy(&n, head, sizeof n);
    bool past_end = n > shard->n_bytes - 8;
    if (past_end || n > HEADER_BYTES_MAX) {
        const char *other = impostor(head, n_head);
        if (other != NULL)
            x3_findings_add(o->findings, "%s: %s", shard->path, other);
        else if (past_end)
            x3_findings_add(o->findings, "%s: header of %llu bytes reaches past the end of the file (%llu bytes)",
                            shard->path, (ull)n, (ull)shard->n_bytes);
        else
            x3_findings_add(o->findings, "%s: header of %llu bytes, at most %llu are read", shard->path, (ull)n,
                            (ull)HEADER_BYTES_MAX);
        return X3_OK;
    }
    shard->header_bytes = n;
    rc = x3_alloc(header, 8 + n, 1, err);
    if (rc == X3_OK)
        rc = x3_pread_all(shard->fd, *header, 8 + n, 0, shard->path, err);
    if (rc == X3_OK) {
        shard->header_hash = x3_hash(*header, 8 + n);
    } else {
        free(*header);
        *header = NULL;
    }
    return rc;
}

static void check_metadata(x3_st_opening *o, const x3_shard *shard, const cJSON *metadata)
{
    const cJSON *c;

    if (!cJSON_IsObject(metadata)) {
        x3_findings_add(o->findings, "%s: __metadata__ is not an object", shard->path);
        return;
    }
    cJSON_ArrayForEach(c, metadata)
    {
        if (!cJSON_IsString(c))
            x3_findings_add(o->findings, "%s: __metadata__ \"%.200s\" is not a string", shard->path, c->string);
    }
}

static x3_status add_entry(x3_st_opening *o, size_t shard, const cJSON *node, x3_err *err)
{
    size_t n = strlen(node->string) + 1;
    x3_st_entry *e;
    char *name;
    x3_status rc;

    X3_TRY(rc, out, x3_grow(&o->entries, &o->entries_capacity, o->n_entries + 1, sizeof *o->entries, err));
    X3_TRY(rc, out, x3_arena_alloc(&o->st->arena, &name, n, 1, err));
    memcpy(name, node->string, n);
    e = &o->entries[o->n_entries++];
    *e = (x3_st_entry){.t = {.name = name, .shard = shard}};
    e->is_valid = parse_tensor(o, &o->st->shards[shard], node, &e->t);
out:
    return rc;
}

/* The ranges of the tensors from `first` on must cover the data of their shard, each byte once. A tensor without
 * elements has no bytes to overlap with. */
static x3_status check_cover(x3_st_opening *o, const x3_shard *shard, size_t first, x3_err *err)
{
    uint64_t data = 8 + shard->header_bytes, at = data;
    const x3_tensor **ranges = NULL, *last = NULL;
    bool is_whole = true; /* a tensor with a finding leaves a hole that means nothing */
    size_t n = 0;
    x3_status rc = x3_alloc(&ranges, o->n_entries - first, sizeof *ranges, err);

    if (rc != X3_OK)
        return rc;
    for (size_t i = first; i < o->n_entries; i++) {
        is_whole &= o->entries[i].is_valid;
        if (o->entries[i].is_valid && o->entries[i].t.n_bytes > 0)
            ranges[n++] = &o->entries[i].t;
    }
    qsort(ranges, n, sizeof *ranges, compare_ranges);
    for (size_t i = 0; i < n; i++) {
        const x3_tensor *t = ranges[i];
        uint64_t end = t->offset + t->n_bytes;
        if (t->offset < at)
            x3_st_tensor_problem(o, shard, t->name, "bytes [%llu, %llu] overlap [%llu, %llu] of tensor \"%.300s\"",
                           (ull)(t->offset - data), (ull)(end - data), (ull)(last->offset - data), (ull)(at - data),
                           last->name);
        else if (t->offset > at && is_whole)
            x3_st_tensor_problem(o, shard, t->name, "begins at byte %llu of the data, but the bytes from %llu on belong to "
                           "no tensor", (ull)(t->offset - data), (ull)(at - data));
        if (end > at) {
            at = end;
            last = t;
        }
    }
    if (at < shard->n_bytes && is_whole)
        x3_findings_add(o->findings, "%s: the last %llu of %llu bytes belong to no tensor", shard->path,
                        (ull)(shard->n_bytes - at), (ull)shard->n_bytes);
    free(ranges);
    return X3_OK;
}

x3_status x3_st_open_shard(x3_st_opening *o, size_t i, x3_err *err)
{
    x3_shard *shard = &o->st->shards[i];
    size_t first = o->n_entries;
    char *header = NULL;
    cJSON *json = NULL;
    const cJSON *c;
    x3_err cause = {0};
    x3_status rc;

    X3_TRY(rc, out, open_file(o, shard, err));
    if (shard->fd < 0)
        goto out;
    X3_TRY(rc, out, read_header(o, shard, &header, err));
    if (header == NULL)
        goto out;
    if (shard->header_bytes == 0 || header[8] != '{') {
        x3_findings_add(o->findings, "%s: header of %llu bytes does not begin with '{'", shard->path,
                        (ull)shard->header_bytes);
        goto out;
    }
    if (x3_json_parse(&json, header + 8, shard->header_bytes, shard->path, &cause) != X3_OK) {
        rc = x3_st_content_or_stop(o, &cause, err);
        goto out;
    }
    cJSON_ArrayForEach(c, json)
    {
        if (strcmp(c->string, "__metadata__") == 0)
            check_metadata(o, shard, c);
        else
            X3_TRY(rc, out, add_entry(o, i, c, err));
    }
    o->has_names[i] = true;
    rc = check_cover(o, shard, first, err);
out:
    cJSON_Delete(json);
    free(header);
    return rc;
}
