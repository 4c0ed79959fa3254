#include "formats/safetensors.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/io.h"
#include "formats/json.h"

#define HEADER_BYTES_MAX ((uint64_t)100000000) /* the limit of the official library */
#define INDEX_NAME "model.safetensors.index.json"
#define CHUNK_BYTES ((size_t)1 << 20)

typedef unsigned long long ull; /* for %llu */

/* A tensor of a header. One with a finding keeps its name and shard only: the index is compared with it still. */
struct entry {
    x3_tensor t;
    bool is_valid;
};

/* A line of the index, borrowed from its JSON. file is NULL where the value is not a name. */
struct mapping {
    const char *tensor, *file;
};

struct opening {
    x3_safetensors *st;
    x3_findings *findings;
    struct entry *entries; /* of all shards */
    size_t n_entries, entries_capacity;
    bool *has_names; /* [n_shards]: its header could be parsed, so its names are known */
    cJSON *index;
    struct mapping *mappings; /* sorted by tensor */
    size_t n_mappings;
};

/* ---- findings ---- */

X3_PRINTF(4, 5)
static void tensor_problem(struct opening *o, const x3_shard *shard, const char *tensor, const char *format, ...)
{
    char text[700];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    x3_findings_add(o->findings, "%.300s: tensor \"%.300s\": %s", shard->path, tensor, text);
}

/* A problem of the content becomes a finding and the work goes on; anything else stops it. */
static x3_status content_or_stop(struct opening *o, const x3_err *cause, x3_err *err)
{
    if (cause->status != X3_ERR_INPUT)
        return x3_fail(err, cause->status, "%s", cause->text);
    x3_findings_add(o->findings, "%s", cause->text);
    return X3_OK;
}

/* ---- names and order ---- */

static int compare_texts(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int compare_mappings(const void *a, const void *b)
{
    return strcmp(((const struct mapping *)a)->tensor, ((const struct mapping *)b)->tensor);
}

/* By name; doubled names by shard, so that findings come in the same order every time. */
static int compare_entries(const void *a, const void *b)
{
    const x3_tensor *x = &((const struct entry *)a)->t, *y = &((const struct entry *)b)->t;
    int by_name = strcmp(x->name, y->name);

    return by_name != 0 ? by_name : (x->shard > y->shard) - (x->shard < y->shard);
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

static int compare_name_with_tensor(const void *name, const void *t)
{
    return strcmp(name, ((const x3_tensor *)t)->name);
}

static int compare_file_with_shard(const void *file, const void *shard)
{
    return strcmp(file, ((const x3_shard *)shard)->file);
}

static const x3_shard *find_shard(const x3_safetensors *st, const char *file)
{
    return bsearch(file, st->shards, st->n_shards, sizeof *st->shards, compare_file_with_shard);
}

static bool ends_in(const char *name, const char *suffix)
{
    size_t n = strlen(name), m = strlen(suffix);

    return n >= m && strcmp(name + n - m, suffix) == 0;
}

static bool is_consolidated(const char *file)
{
    return strncmp(file, "consolidated", 12) == 0;
}

/* ---- header text ---- */

static bool is_utf8(const char *text, size_t n)
{
    const unsigned char *s = (const unsigned char *)text;

    for (size_t i = 0; i < n; i++) {
        unsigned char c = s[i], low = 0x80, high = 0xBF;
        size_t more = c < 0x80 ? 0 : c < 0xE0 ? 1 : c < 0xF0 ? 2 : 3;
        if ((c >= 0x80 && c < 0xC2) || c > 0xF4 || n - i <= more)
            return false;
        if (c == 0xE0 || c == 0xF0) /* what a shorter form would hold */
            low = c == 0xE0 ? 0xA0 : 0x90;
        if (c == 0xED || c == 0xF4) /* surrogates; past U+10FFFF */
            high = c == 0xED ? 0x9F : 0x8F;
        for (; more > 0; more--, low = 0x80, high = 0xBF)
            if (s[++i] < low || s[i] > high)
                return false;
    }
    return true;
}

/* What the JSON parser would let through, or NULL. It ends a string at a NUL, so two names could become one. */
static const char *header_text_problem(const char *text, size_t n)
{
    const char *end = text + n;

    if (n == 0 || text[0] != '{')
        return "does not begin with '{'";
    if (memchr(text, '\0', n) != NULL)
        return "holds a NUL byte";
    if (!is_utf8(text, n))
        return "is not UTF-8";
    for (const char *p = text; p < end && (p = memchr(p, '\\', (size_t)(end - p))) != NULL; p += 2)
        if (end - p >= 6 && memcmp(p, "\\u0000", 6) == 0)
            return "holds \\u0000, which no name may contain";
    return NULL;
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

static bool parse_dtype(struct opening *o, const x3_shard *shard, const cJSON *node, x3_tensor *t)
{
    const cJSON *dtype = x3_json_get(node, "dtype");

    if (!cJSON_IsString(dtype)) {
        tensor_problem(o, shard, t->name, "dtype is missing or not a string");
        return false;
    }
    if (!x3_dtype_from_name(dtype->valuestring, &t->dtype)) {
        tensor_problem(o, shard, t->name, "unknown dtype \"%.100s\"", dtype->valuestring);
        return false;
    }
    return true;
}

static bool parse_shape(struct opening *o, const x3_shard *shard, const cJSON *node, x3_tensor *t)
{
    const cJSON *shape = x3_json_get(node, "shape"), *c;
    bool overflow = false, has_zero = false;
    uint64_t product = 1, bytes;
    char text[128];

    if (!cJSON_IsArray(shape)) {
        tensor_problem(o, shard, t->name, "shape is missing or not a list");
        return false;
    }
    cJSON_ArrayForEach(c, shape)
    {
        uint64_t dim;
        if (t->rank == X3_RANK_MAX) {
            tensor_problem(o, shard, t->name, "rank %d, at most %d is read", cJSON_GetArraySize(shape), X3_RANK_MAX);
            return false;
        }
        if (!as_whole(c, &dim)) {
            tensor_problem(o, shard, t->name, "shape is not a list of whole numbers >= 0 and < 2^53");
            return false;
        }
        t->shape[t->rank++] = dim;
        has_zero |= dim == 0;
        overflow |= dim != 0 && x3_mul_overflows(product, dim, &product);
    }
    /* Zeros are left out and 8 bytes an element assumed: no product of some of the dimensions, and no size in bytes
     * made of them, can overflow later on. */
    if (overflow || x3_mul_overflows(product, 8, &bytes)) {
        tensor_problem(o, shard, t->name, "the product of shape %s overflows", x3_tensor_shape_text(t, text));
        return false;
    }
    t->n_elements = has_zero ? 0 : product;
    return true;
}

static bool parse_range(struct opening *o, const x3_shard *shard, const cJSON *node, x3_tensor *t)
{
    const cJSON *range = x3_json_get(node, "data_offsets");
    uint64_t begin, end, data_bytes = shard->n_bytes - 8 - shard->header_bytes;

    if (!cJSON_IsArray(range) || cJSON_GetArraySize(range) != 2 || !as_whole(range->child, &begin) ||
        !as_whole(range->child->next, &end)) {
        tensor_problem(o, shard, t->name, "data_offsets is missing or not two whole numbers >= 0 and < 2^53");
        return false;
    }
    if (begin > end) {
        tensor_problem(o, shard, t->name, "data_offsets begin at %llu and end before that, at %llu", (ull)begin,
                       (ull)end);
        return false;
    }
    if (end > data_bytes) {
        tensor_problem(o, shard, t->name, "data_offsets [%llu, %llu] reach past the end of the data (%llu bytes)",
                       (ull)begin, (ull)end, (ull)data_bytes);
        return false;
    }
    t->offset = 8 + shard->header_bytes + begin;
    t->n_bytes = end - begin;
    return true;
}

static bool parse_tensor(struct opening *o, const x3_shard *shard, const cJSON *node, x3_tensor *t)
{
    bool ok = true;
    char text[128];

    if (!cJSON_IsObject(node)) {
        tensor_problem(o, shard, t->name, "its description is not an object");
        return false;
    }
    ok &= parse_dtype(o, shard, node, t);
    ok &= parse_shape(o, shard, node, t);
    ok &= parse_range(o, shard, node, t);
    if (ok && t->n_elements * x3_dtype_bytes(t->dtype) != t->n_bytes) {
        tensor_problem(o, shard, t->name, "shape %s of %s takes %llu bytes, data_offsets span %llu",
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
static x3_status open_file(struct opening *o, x3_shard *shard, x3_err *err)
{
    /* A FIFO in place of a file must not hang the open. */
    const int flags = O_RDONLY | O_CLOEXEC | O_NONBLOCK;
    struct stat info;
    int fd = open(shard->path, flags);

    if (fd < 0 && errno == EMFILE && raise_descriptor_limit())
        fd = open(shard->path, flags);
    if (fd < 0 && (errno == ENOENT || errno == ELOOP)) {
        x3_findings_add(o->findings, "%s: missing%s%s", shard->path,
                        o->st->has_index ? ", but " INDEX_NAME " names it" : "",
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
static x3_status read_header(struct opening *o, x3_shard *shard, char **header, x3_err *err)
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

static void check_metadata(struct opening *o, const x3_shard *shard, const cJSON *metadata)
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

static x3_status add_entry(struct opening *o, size_t shard, const cJSON *node, x3_err *err)
{
    size_t n = strlen(node->string) + 1;
    struct entry *e;
    char *name;
    x3_status rc;

    X3_TRY(rc, out, x3_grow(&o->entries, &o->entries_capacity, o->n_entries + 1, sizeof *o->entries, err));
    X3_TRY(rc, out, x3_arena_alloc(&o->st->arena, &name, n, 1, err));
    memcpy(name, node->string, n);
    e = &o->entries[o->n_entries++];
    *e = (struct entry){.t = {.name = name, .shard = shard}};
    e->is_valid = parse_tensor(o, &o->st->shards[shard], node, &e->t);
out:
    return rc;
}

/* The ranges of the tensors from `first` on must cover the data of their shard, each byte once. A tensor without
 * elements has no bytes to overlap with. */
static x3_status check_cover(struct opening *o, const x3_shard *shard, size_t first, x3_err *err)
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
            tensor_problem(o, shard, t->name, "bytes [%llu, %llu] overlap [%llu, %llu] of tensor \"%.300s\"",
                           (ull)(t->offset - data), (ull)(end - data), (ull)(last->offset - data), (ull)(at - data),
                           last->name);
        else if (t->offset > at && is_whole)
            tensor_problem(o, shard, t->name, "begins at byte %llu of the data, but the bytes from %llu on belong to "
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

static x3_status open_shard(struct opening *o, size_t i, x3_err *err)
{
    x3_shard *shard = &o->st->shards[i];
    size_t first = o->n_entries;
    char *header = NULL;
    const char *problem;
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
    problem = header_text_problem(header + 8, shard->header_bytes);
    if (problem != NULL) {
        x3_findings_add(o->findings, "%s: header of %llu bytes %s", shard->path, (ull)shard->header_bytes, problem);
        goto out;
    }
    if (x3_json_parse(&json, header + 8, shard->header_bytes, shard->path, &cause) != X3_OK) {
        rc = content_or_stop(o, &cause, err);
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

/* ---- which shards ---- */

/* `files` are sorted and differ. */
static x3_status set_shards(struct opening *o, const char *const *files, size_t n, x3_err *err)
{
    x3_safetensors *st = o->st;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&o->has_names, n, sizeof *o->has_names, err));
    X3_TRY(rc, out, x3_alloc(&st->shards, n, sizeof *st->shards, err));
    for (size_t i = 0; i < n; i++)
        st->shards[i].fd = -1;
    st->n_shards = n;
    for (size_t i = 0; i < n; i++) {
        X3_TRY(rc, out, x3_strdup(&st->shards[i].file, files[i], err));
        X3_TRY(rc, out, x3_path_join(&st->shards[i].path, st->dir, files[i], err));
    }
out:
    return rc;
}

/* Keeps one of each and only plain names: an index must not lead out of its folder. */
static size_t sort_index_files(struct opening *o, const char **files, size_t n)
{
    size_t kept = 0;

    qsort(files, n, sizeof *files, compare_texts);
    for (size_t i = 0; i < n; i++) {
        if (i > 0 && strcmp(files[i - 1], files[i]) == 0)
            continue;
        if (strchr(files[i], '/') != NULL || strstr(files[i], "..") != NULL || strlen(files[i]) > NAME_MAX ||
            !ends_in(files[i], ".safetensors"))
            x3_findings_add(o->findings, "%s/" INDEX_NAME ": \"%.200s\" is not the plain name of a .safetensors file",
                            o->st->dir, files[i]);
        else
            files[kept++] = files[i];
    }
    return kept;
}

static x3_status shards_of_index(struct opening *o, const x3_names *names, x3_err *err)
{
    const cJSON *map, *c;
    const char **files = NULL;
    size_t n = 0, n_files = 0;
    char *path = NULL;
    x3_err cause = {0};
    x3_status rc;

    X3_TRY(rc, out, x3_path_join(&path, o->st->dir, INDEX_NAME, err));
    if (x3_json_load(&o->index, path, &cause) != X3_OK) {
        rc = content_or_stop(o, &cause, err);
        goto out;
    }
    map = x3_json_get(o->index, "weight_map");
    if (!cJSON_IsObject(map) || map->child == NULL) {
        x3_findings_add(o->findings, "%s: weight_map is missing, empty or not an object", path);
        goto out;
    }
    for (c = map->child; c != NULL; c = c->next)
        n++;
    X3_TRY(rc, out, x3_alloc(&o->mappings, n, sizeof *o->mappings, err));
    X3_TRY(rc, out, x3_alloc(&files, n, sizeof *files, err));
    cJSON_ArrayForEach(c, map)
    {
        if (cJSON_IsString(c))
            files[n_files++] = c->valuestring;
        else
            x3_findings_add(o->findings, "%s: tensor \"%.300s\": its file is not a string", path, c->string);
        o->mappings[o->n_mappings++] = (struct mapping){c->string, cJSON_IsString(c) ? c->valuestring : NULL};
    }
    qsort(o->mappings, n, sizeof *o->mappings, compare_mappings);
    n_files = sort_index_files(o, files, n_files);
    X3_TRY(rc, out, set_shards(o, files, n_files, err));
    for (size_t i = 0; i < names->n_items; i++)
        if (ends_in(names->items[i], ".safetensors") && !is_consolidated(names->items[i]) &&
            find_shard(o->st, names->items[i]) == NULL)
            x3_findings_add(o->findings, "%s/%s: not named by " INDEX_NAME, o->st->dir, names->items[i]);
out:
    free(files);
    free(path);
    return rc;
}

static void report_no_shards(struct opening *o, const x3_names *names)
{
    static const char *const others[] = {".bin", ".gguf", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack", ".npz"};
    char text[600];
    size_t at = 0;
    bool is_other = false, is_copy = false;

    for (size_t i = 0; i < names->n_items; i++) {
        for (size_t k = 0; k < sizeof others / sizeof others[0]; k++)
            is_other |= ends_in(names->items[i], others[k]);
        is_copy |= is_consolidated(names->items[i]) && ends_in(names->items[i], ".safetensors");
        if (at < sizeof text)
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%s", i == 0 ? "" : ", ", names->items[i]);
    }
    if (at >= sizeof text)
        memcpy(text + sizeof text - 4, "...", 4);
    x3_findings_add(o->findings, "%s: no *.safetensors file; %s%s%s%s", o->st->dir,
                    names->n_items == 0 ? "the folder is empty" : "it has ", names->n_items == 0 ? "" : text,
                    is_other ? " (weights that are not safetensors must be converted first)" : "",
                    is_copy ? " (consolidated*.safetensors is read only when given as the path)" : "");
}

/* For "…-00002-of-00005.safetensors" the length of "…" and 5; false for other names. */
static bool is_numbered(const char *file, size_t *prefix, unsigned long *total)
{
    const char *of = NULL, *digits;
    char *end;

    for (const char *p = file; (p = strstr(p, "-of-")) != NULL; p++)
        of = p;
    if (of == NULL || of[4] < '0' || of[4] > '9')
        return false;
    *total = strtoul(of + 4, &end, 10);
    for (digits = of; digits > file && digits[-1] >= '0' && digits[-1] <= '9'; digits--)
        ;
    if (strcmp(end, ".safetensors") != 0 || digits == of || digits == file || digits[-1] != '-')
        return false;
    *prefix = (size_t)(digits - 1 - file);
    return true;
}

/* Without an index only the file names tell that a shard is missing. */
static void check_numbering(struct opening *o)
{
    const x3_safetensors *st = o->st;
    size_t prefix, other_prefix, end;
    unsigned long total, other_total;

    for (size_t i = 0; i < st->n_shards; i = end) {
        end = i + 1;
        if (!is_numbered(st->shards[i].file, &prefix, &total))
            continue;
        while (end < st->n_shards && is_numbered(st->shards[end].file, &other_prefix, &other_total) &&
               other_total == total && other_prefix == prefix &&
               memcmp(st->shards[i].file, st->shards[end].file, prefix) == 0)
            end++;
        if (end - i != total)
            x3_findings_add(o->findings, "%s: %zu of the %lu shards that its name speaks of are there",
                            st->shards[i].path, end - i, total);
    }
}

static x3_status shards_of_folder(struct opening *o, const x3_names *names, x3_err *err)
{
    const char **files = NULL;
    size_t n = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&files, names->n_items, sizeof *files, err));
    for (size_t i = 0; i < names->n_items; i++)
        if (ends_in(names->items[i], ".safetensors") && !is_consolidated(names->items[i]))
            files[n++] = names->items[i];
    if (n == 0)
        report_no_shards(o, names);
    X3_TRY(rc, out, set_shards(o, files, n, err));
    check_numbering(o);
out:
    free(files);
    return rc;
}

static x3_status find_shards(struct opening *o, const char *path, x3_err *err)
{
    x3_safetensors *st = o->st;
    const char *slash = strrchr(path, '/'), *file = slash == NULL ? path : slash + 1;
    x3_names names = {0};
    struct stat info;
    x3_status rc = X3_OK;

    if (stat(path, &info) != 0)
        return x3_fail(err, X3_ERR_IO, "%s: %s", path, strerror(errno));
    if (S_ISREG(info.st_mode)) {
        X3_TRY(rc, out, slash == NULL ? x3_strdup(&st->dir, ".", err)
                                      : x3_strndup(&st->dir, path, (size_t)(slash - path) + (slash == path), err));
        X3_TRY(rc, out, set_shards(o, &file, 1, err));
    } else if (S_ISDIR(info.st_mode)) {
        X3_TRY(rc, out, x3_strdup(&st->dir, path, err));
        X3_TRY(rc, out, x3_list_dir(&names, path, err));
        for (size_t i = 0; i < names.n_items; i++)
            st->has_index |= strcmp(names.items[i], INDEX_NAME) == 0;
        rc = st->has_index ? shards_of_index(o, &names, err) : shards_of_folder(o, &names, err);
    } else {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: neither a folder nor a regular file", path);
    }
out:
    x3_names_free(&names);
    return rc;
}

/* ---- across shards ---- */

static void check_doubled_names(struct opening *o)
{
    const x3_shard *shards = o->st->shards;

    for (size_t i = 1; i < o->n_entries; i++) {
        const x3_tensor *t = &o->entries[i].t, *before = &o->entries[i - 1].t;
        if (strcmp(t->name, before->name) == 0)
            tensor_problem(o, &shards[t->shard], t->name, "stands in %s too", shards[before->shard].file);
    }
}

/* One line of the index against the n entries of the same name, from `first` on. */
static void check_mapping(struct opening *o, const struct mapping *m, size_t first, size_t n)
{
    const x3_shard *shards = o->st->shards, *shard;

    if (m->file == NULL)
        return;
    for (size_t i = 0; i < n; i++)
        if (strcmp(shards[o->entries[first + i].t.shard].file, m->file) == 0)
            return;
    shard = find_shard(o->st, m->file);
    if (n > 0)
        tensor_problem(o, &shards[o->entries[first].t.shard], m->tensor, INDEX_NAME " puts it in %.200s", m->file);
    else if (shard != NULL && o->has_names[shard - shards]) /* else there is a finding for the whole shard */
        tensor_problem(o, shard, m->tensor, "missing, but " INDEX_NAME " puts it there");
}

static void check_index(struct opening *o)
{
    size_t i = 0, j = 0;

    while (i < o->n_entries || j < o->n_mappings) {
        const x3_tensor *t = i < o->n_entries ? &o->entries[i].t : NULL;
        const struct mapping *m = j < o->n_mappings ? &o->mappings[j] : NULL;
        int order = t == NULL ? 1 : m == NULL ? -1 : strcmp(t->name, m->tensor);
        size_t n = 0;
        if (order < 0) {
            tensor_problem(o, &o->st->shards[t->shard], t->name, "not named by " INDEX_NAME);
            i++;
            continue;
        }
        while (order == 0 && i + n < o->n_entries && strcmp(o->entries[i + n].t.name, m->tensor) == 0)
            n++;
        check_mapping(o, m, i, n);
        i += n;
        j++;
    }
}

static x3_status publish(struct opening *o, x3_err *err)
{
    x3_safetensors *st = o->st;
    x3_status rc = x3_alloc(&st->tensors, o->n_entries, sizeof *st->tensors, err);

    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < o->n_entries; i++) {
        st->tensors[i] = o->entries[i].t;
        st->total_bytes += o->entries[i].t.n_bytes;
    }
    st->n_tensors = o->n_entries;
    return X3_OK;
}

x3_status x3_safetensors_open(x3_safetensors **out, const char *path, x3_findings *findings, x3_err *err)
{
    x3_findings own = {0};
    struct opening o = {.findings = findings == NULL ? &own : findings};
    size_t n_before = o.findings->n_items + o.findings->n_dropped;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&o.st, 1, sizeof *o.st, err));
    X3_TRY(rc, out, find_shards(&o, path, err));
    for (size_t i = 0; i < o.st->n_shards; i++)
        X3_TRY(rc, out, open_shard(&o, i, err));
    if (o.n_entries > 1)
        qsort(o.entries, o.n_entries, sizeof *o.entries, compare_entries);
    check_doubled_names(&o);
    if (o.index != NULL)
        check_index(&o);
    if (o.findings->n_items + o.findings->n_dropped > n_before)
        X3_TRY(rc, out, x3_findings_status(o.findings, err));
    X3_TRY(rc, out, publish(&o, err));
    *out = o.st;
out:
    if (rc != X3_OK)
        x3_safetensors_close(o.st);
    cJSON_Delete(o.index);
    free(o.mappings);
    free(o.has_names);
    free(o.entries);
    x3_findings_free(&own);
    return rc;
}

void x3_safetensors_close(x3_safetensors *st)
{
    if (st == NULL)
        return;
    for (size_t i = 0; i < st->n_shards; i++) {
        if (st->shards[i].fd >= 0)
            close(st->shards[i].fd);
        free(st->shards[i].file);
        free(st->shards[i].path);
    }
    free(st->shards);
    free(st->tensors);
    free(st->dir);
    x3_arena_free(&st->arena);
    free(st);
}

/* ---- reading ---- */

const x3_tensor *x3_safetensors_find(const x3_safetensors *st, const char *name)
{
    return bsearch(name, st->tensors, st->n_tensors, sizeof *st->tensors, compare_name_with_tensor);
}

x3_status x3_safetensors_read(const x3_safetensors *st, const x3_tensor *t, uint64_t begin, size_t n_bytes, void *out,
                              x3_err *err)
{
    const x3_shard *shard = &st->shards[t->shard];

    if (begin > t->n_bytes || n_bytes > t->n_bytes - begin)
        return x3_fail(err, X3_ERR_INPUT, "%s: tensor \"%.300s\": %zu bytes from %llu on asked for, it has %llu",
                       shard->path, t->name, n_bytes, (ull)begin, (ull)t->n_bytes);
    return x3_pread_all(shard->fd, out, n_bytes, t->offset + begin, shard->path, err);
}

x3_status x3_safetensors_load(const x3_safetensors *st, const x3_tensor *t, void **out, x3_err *err)
{
    x3_status rc = x3_alloc(out, t->n_bytes, 1, err);

    if (rc == X3_OK)
        rc = x3_safetensors_read(st, t, 0, t->n_bytes, *out, err);
    if (rc != X3_OK) {
        free(*out);
        *out = NULL;
    }
    return rc;
}

x3_status x3_safetensors_read_f32(const x3_safetensors *st, const x3_tensor *t, uint64_t first, size_t n, float *out,
                                  x3_err *err)
{
    const char *path = st->shards[t->shard].path;
    size_t size = x3_dtype_bytes(t->dtype), step = x3_min_size(n, CHUNK_BYTES / size);
    void *chunk = NULL;
    x3_status rc;

    if (!x3_dtype_is_float(t->dtype))
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: tensor \"%.300s\": %s is not read as float32", path, t->name,
                       x3_dtype_name(t->dtype));
    if (first > t->n_elements || n > t->n_elements - first)
        return x3_fail(err, X3_ERR_INPUT, "%s: tensor \"%.300s\": %zu elements from %llu on asked for, it has %llu",
                       path, t->name, n, (ull)first, (ull)t->n_elements);
    if (t->dtype == X3_F32)
        return x3_safetensors_read(st, t, first * size, n * size, out, err);
    X3_TRY(rc, out, x3_alloc(&chunk, step, size, err));
    for (size_t done = 0; done < n; done += step) {
        step = x3_min_size(step, n - done);
        X3_TRY(rc, out, x3_safetensors_read(st, t, (first + done) * size, step * size, chunk, err));
        x3_dtype_to_f32(t->dtype, chunk, step, out + done);
    }
out:
    free(chunk);
    return rc;
}

const char *x3_tensor_shape_text(const x3_tensor *t, char out[128])
{
    size_t at = 1;

    strcpy(out, "[");
    for (int i = 0; i < t->rank && at < 126; i++)
        at += (size_t)snprintf(out + at, 127 - at, "%s%llu", i == 0 ? "" : ", ", (ull)t->shape[i]);
    at = x3_min_size(at, 126);
    memcpy(out + at, "]", 2);
    return out;
}
