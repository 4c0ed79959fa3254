#include "formats/pack_writer.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "formats/io.h"
#include "formats/json.h"

#define CHUNK ((size_t)1 << 22)

/* ---- plan ---- */

/* Units in order, a new shard when the next unit would pass the limit. */
static x3_status assign_shards(x3_pack_writer *w, uint64_t limit, x3_err *err)
{
    uint64_t in_shard = 0;
    size_t shard = 0;

    for (size_t i = 0; i < w->n_tensors;) {
        uint64_t unit_bytes = 0;
        size_t end = i;
        for (; end < w->n_tensors && w->tensors[end].unit == w->tensors[i].unit; end++) {
            uint64_t n = x3_dtype_bytes(w->tensors[end].out.dtype);
            for (int d = 0; d < w->tensors[end].out.rank; d++)
                if (x3_mul_overflows(n, w->tensors[end].out.shape[d], &n))
                    return x3_fail(err, X3_ERR_INPUT, "%s: its size overflows", w->tensors[end].out.name);
            unit_bytes += n;
        }
        if (in_shard > 0 && in_shard + unit_bytes > limit) {
            shard++;
            in_shard = 0;
        }
        for (; i < end; i++)
            w->tensors[i].shard = shard;
        in_shard += unit_bytes;
        w->tensor_bytes += unit_bytes;
    }
    w->n_shards = shard + 1;
    return X3_OK;
}

static x3_status shard_layout(const x3_pack_writer *w, size_t shard, char **header, size_t *header_bytes,
                              uint64_t *file_bytes, x3_err *err)
{
    x3_out_tensor **list = NULL;
    size_t n = 0;
    x3_status rc;

    *header = NULL;
    X3_TRY(rc, out, x3_alloc(&list, w->n_tensors, sizeof *list, err));
    for (size_t i = 0; i < w->n_tensors; i++)
        if (w->tensors[i].shard == shard)
            list[n++] = &w->tensors[i].out;
    rc = x3_safetensors_layout(list, n, header, header_bytes, file_bytes, err);
out:
    free(list);
    return rc;
}

struct name_entry {
    const char *name;
    size_t index;
};

static int compare_entries(const void *a, const void *b)
{
    return strcmp(((const struct name_entry *)a)->name, ((const struct name_entry *)b)->name);
}

static x3_status sort_names(x3_pack_writer *w, x3_err *err)
{
    struct name_entry *entries = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&entries, w->n_tensors, sizeof *entries, err));
    X3_TRY(rc, out, x3_alloc(&w->by_name, w->n_tensors, sizeof *w->by_name, err));
    for (size_t i = 0; i < w->n_tensors; i++)
        entries[i] = (struct name_entry){w->tensors[i].out.name, i};
    qsort(entries, w->n_tensors, sizeof *entries, compare_entries);
    for (size_t i = 0; i < w->n_tensors; i++) {
        w->by_name[i] = entries[i].index;
        if (i > 0 && strcmp(entries[i - 1].name, entries[i].name) == 0) {
            rc = x3_fail(err, X3_ERR_INPUT, "tensor %s would be written twice", entries[i].name);
            break;
        }
    }
out:
    free(entries);
    return rc;
}

x3_status x3_pack_writer_plan(x3_pack_writer **out, const char *dir, const x3_pack_tensor *tensors, size_t n,
                              uint64_t shard_bytes, x3_err *err)
{
    x3_pack_writer *w = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&w, 1, sizeof *w, err));
    X3_TRY(rc, out, x3_strdup(&w->dir, dir, err));
    X3_TRY(rc, out, x3_alloc(&w->tensors, n, sizeof *w->tensors, err));
    memcpy(w->tensors, tensors, n * sizeof *tensors);
    w->n_tensors = n;
    X3_TRY(rc, out, sort_names(w, err));
    X3_TRY(rc, out, assign_shards(w, shard_bytes, err));
    X3_TRY(rc, out, x3_alloc(&w->shards, w->n_shards, sizeof *w->shards, err));
    for (size_t s = 0; s < w->n_shards; s++)
        w->shards[s].fd = -1;
    for (size_t s = 0; s < w->n_shards; s++) {
        char *header = NULL;
        size_t header_bytes = 0;
        X3_TRY(rc, out, x3_asprintf(&w->shards[s].final_name, err, "model-%05zu-of-%05zu.safetensors", s + 1, w->n_shards));
        X3_TRY(rc, out, x3_asprintf(&w->shards[s].part_path, err, "%s/%s.part", dir, w->shards[s].final_name));
        rc = shard_layout(w, s, &header, &header_bytes, &w->shards[s].n_bytes, err);
        free(header);
        X3_TRY(rc, out, rc);
        w->file_bytes += w->shards[s].n_bytes;
    }
    *out = w;
    w = NULL;
out:
    x3_pack_writer_free(w);
    return rc;
}

void x3_pack_writer_free(x3_pack_writer *w)
{
    if (w == NULL)
        return;
    for (size_t s = 0; w->shards != NULL && s < w->n_shards; s++) {
        if (w->shards[s].fd >= 0)
            close(w->shards[s].fd);
        free(w->shards[s].part_path);
        free(w->shards[s].final_name);
    }
    free(w->shards);
    free(w->tensors);
    free(w->by_name);
    free(w->dir);
    free(w);
}

/* ---- files ---- */

static x3_status io_error(const struct x3_pack_shard *s, const char *doing, int code, x3_err *err)
{
    return x3_fail(err, X3_ERR_IO, "%s: cannot %s: %s", s->part_path, doing, strerror(code));
}

static x3_status create_part(struct x3_pack_shard *s, const char *header, size_t header_bytes, x3_err *err)
{
    int code;

    s->fd = open(s->part_path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (s->fd < 0)
        return io_error(s, "create", errno, err);
    code = posix_fallocate(s->fd, 0, (off_t)s->n_bytes);
    if (code == EOPNOTSUPP || code == EINVAL) { /* a file system without it: at least the size */
        if (ftruncate(s->fd, (off_t)s->n_bytes) != 0)
            return io_error(s, "size", errno, err);
    } else if (code != 0) {
        return x3_fail(err, X3_ERR_IO, "%s: cannot reserve %llu bytes: %s", s->part_path, (unsigned long long)s->n_bytes,
                       strerror(code));
    }
    return x3_pwrite_all(s->fd, header, header_bytes, 0, s->part_path, err);
}

static x3_status reopen_part(struct x3_pack_shard *s, const char *final_path, const char *header, size_t header_bytes, x3_err *err)
{
    char *there = NULL;
    struct stat st;
    x3_status rc;

    /* an interrupted commit may have given the file its final name already: it still has this header then */
    s->fd = open(s->part_path, O_RDWR | O_CLOEXEC);
    if (s->fd < 0 && errno == ENOENT)
        s->fd = open(final_path, O_RDWR | O_CLOEXEC);
    if (s->fd < 0)
        return io_error(s, "open", errno, err);
    if (fstat(s->fd, &st) != 0)
        return io_error(s, "stat", errno, err);
    if ((uint64_t)st.st_size != s->n_bytes)
        return x3_fail(err, X3_ERR_INPUT, "%s: %llu bytes, this job's shard has %llu", s->part_path,
                       (unsigned long long)st.st_size, (unsigned long long)s->n_bytes);
    X3_TRY(rc, out, x3_alloc(&there, header_bytes, 1, err));
    X3_TRY(rc, out, x3_pread_all(s->fd, there, header_bytes, 0, s->part_path, err));
    if (memcmp(there, header, header_bytes) != 0)
        rc = x3_fail(err, X3_ERR_INPUT, "%s: its header is not that of this job", s->part_path);
out:
    free(there);
    return rc;
}

x3_status x3_pack_writer_open(x3_pack_writer *w, bool resume, x3_err *err)
{
    x3_status rc = X3_OK;

    for (size_t i = 0; i < w->n_shards; i++) {
        char *header = NULL, *final_path = NULL;
        size_t header_bytes = 0;
        uint64_t n_bytes;
        rc = shard_layout(w, i, &header, &header_bytes, &n_bytes, err);
        if (rc == X3_OK)
            rc = x3_path_join(&final_path, w->dir, w->shards[i].final_name, err);
        if (rc == X3_OK)
            rc = resume ? reopen_part(&w->shards[i], final_path, header, header_bytes, err)
                        : create_part(&w->shards[i], header, header_bytes, err);
        free(header);
        free(final_path);
        X3_TRY(rc, out, rc);
    }
    X3_TRY(rc, out, x3_pack_writer_sync(w, err));
    rc = x3_sync_dir(w->dir, err);
out:
    if (rc != X3_OK && !resume)
        x3_pack_writer_discard(w);
    return rc;
}

void x3_pack_writer_discard(x3_pack_writer *w)
{
    for (size_t s = 0; s < w->n_shards; s++)
        if (w->shards[s].fd >= 0) {
            close(w->shards[s].fd);
            w->shards[s].fd = -1;
            unlink(w->shards[s].part_path);
        }
}

size_t x3_pack_writer_find(const x3_pack_writer *w, const char *name)
{
    size_t low = 0, high = w->n_tensors;

    while (low < high) {
        size_t middle = low + (high - low) / 2, i = w->by_name[middle];
        int order = strcmp(name, w->tensors[i].out.name);
        if (order == 0)
            return i;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return w->n_tensors;
}

x3_status x3_pack_writer_write(x3_pack_writer *w, size_t tensor, const void *data, x3_err *err)
{
    x3_pack_tensor *t = &w->tensors[tensor];
    const struct x3_pack_shard *s = &w->shards[t->shard];
    x3_status rc = x3_pwrite_all(s->fd, data, t->out.n_bytes, t->out.offset, s->part_path, err);

    if (rc == X3_OK) {
        t->out.hash = x3_hash(data, t->out.n_bytes);
        t->written = true;
    }
    return rc;
}

/* XXH3 of what lies in the file at the tensor's place. */
static x3_status hash_back(const x3_pack_writer *w, const x3_pack_tensor *t, uint64_t *hash, x3_err *err)
{
    const struct x3_pack_shard *s = &w->shards[t->shard];
    XXH3_state_t *state = XXH3_createState();
    char *buffer = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&buffer, CHUNK, 1, err));
    if (state == NULL) {
        rc = x3_fail(err, X3_ERR_MEMORY, "out of memory: hash state");
        goto out;
    }
    XXH3_64bits_reset(state);
    for (uint64_t at = 0; at < t->out.n_bytes; at += CHUNK) {
        size_t n = x3_min_size(CHUNK, t->out.n_bytes - at);
        X3_TRY(rc, out, x3_pread_all(s->fd, buffer, n, t->out.offset + at, s->part_path, err));
        XXH3_64bits_update(state, buffer, n);
    }
    *hash = XXH3_64bits_digest(state);
out:
    XXH3_freeState(state);
    free(buffer);
    return rc;
}

x3_status x3_pack_writer_write_part(x3_pack_writer *w, size_t tensor, uint64_t begin, const void *data, size_t n, x3_err *err)
{
    x3_pack_tensor *t = &w->tensors[tensor];
    const struct x3_pack_shard *s = &w->shards[t->shard];
    x3_status rc;

    if (begin > t->out.n_bytes || n > t->out.n_bytes - begin)
        return x3_fail(err, X3_ERR_INPUT, "%s: bytes %llu to %llu are past its %llu", t->out.name,
                       (unsigned long long)begin, (unsigned long long)(begin + n), (unsigned long long)t->out.n_bytes);
    rc = x3_pwrite_all(s->fd, data, n, t->out.offset + begin, s->part_path, err);
    if (rc == X3_OK && begin + n == t->out.n_bytes) {
        rc = hash_back(w, t, &t->out.hash, err);
        t->written = rc == X3_OK;
    }
    return rc;
}

x3_status x3_pack_writer_accept(x3_pack_writer *w, size_t tensor, uint64_t hash, x3_err *err)
{
    x3_pack_tensor *t = &w->tensors[tensor];
    uint64_t found;
    x3_status rc = hash_back(w, t, &found, err);

    if (rc != X3_OK)
        return rc;
    if (found != hash)
        return x3_fail(err, X3_ERR_INPUT, "%s: %s holds other bytes than its record says (XXH3 %016llx, expected %016llx)",
                       w->shards[t->shard].part_path, t->out.name, (unsigned long long)found, (unsigned long long)hash);
    t->out.hash = hash;
    t->written = true;
    return X3_OK;
}

x3_status x3_pack_writer_sync(x3_pack_writer *w, x3_err *err)
{
    for (size_t s = 0; s < w->n_shards; s++)
        if (fdatasync(w->shards[s].fd) != 0)
            return io_error(&w->shards[s], "sync", errno, err);
    return X3_OK;
}

/* ---- commit ---- */

x3_status x3_pack_writer_index(const x3_pack_writer *w, cJSON **out, x3_err *err)
{
    cJSON *json = cJSON_CreateObject(), *metadata = cJSON_CreateObject(), *map = cJSON_CreateObject();
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_json_add(json, "metadata", metadata, err));
    X3_TRY(rc, out, x3_json_add(metadata, "total_size", cJSON_CreateNumber((double)w->tensor_bytes), err));
    X3_TRY(rc, out, x3_json_add(json, "weight_map", map, err));
    for (size_t i = 0; i < w->n_tensors; i++)
        X3_TRY(rc, out, x3_json_add(map, w->tensors[i].out.name,
                                    cJSON_CreateString(w->shards[w->tensors[i].shard].final_name), err));
    *out = json;
    json = NULL;
out:
    cJSON_Delete(json);
    return rc;
}

static x3_status write_index(const x3_pack_writer *w, x3_err *err)
{
    cJSON *json = NULL;
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_pack_writer_index(w, &json, err));
    X3_TRY(rc, out, x3_path_join(&path, w->dir, "model.safetensors.index.json", err));
    rc = x3_json_save(json, path, err);
out:
    free(path);
    cJSON_Delete(json);
    return rc;
}

static bool is_ours(const x3_pack_writer *w, const char *name)
{
    for (size_t s = 0; s < w->n_shards; s++)
        if (strcmp(w->shards[s].final_name, name) == 0)
            return true;
    return false;
}

/* Shards and index of an older pack: with them in place a reader would see both. Those with our names are replaced by
 * the rename. */
static x3_status remove_old(const x3_pack_writer *w, x3_err *err)
{
    static const char suffix[] = ".safetensors";
    x3_names names = {0};
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_list_dir(&names, w->dir, err));
    for (size_t i = 0; i < names.n_items; i++) {
        size_t n = strlen(names.items[i]), s = sizeof suffix - 1;
        bool old = strcmp(names.items[i], "model.safetensors.index.json") == 0 ||
                   (n > s && strcmp(names.items[i] + n - s, suffix) == 0);
        if (!old || is_ours(w, names.items[i]))
            continue;
        free(path);
        X3_TRY(rc, out, x3_path_join(&path, w->dir, names.items[i], err));
        X3_TRY(rc, out, x3_remove_tree(path, err));
    }
out:
    free(path);
    x3_names_free(&names);
    return rc;
}

x3_status x3_pack_writer_commit(x3_pack_writer *w, x3_err *err)
{
    char *path = NULL;
    x3_status rc;

    for (size_t i = 0; i < w->n_tensors; i++)
        if (!w->tensors[i].written)
            return x3_fail(err, X3_ERR_INPUT, "%s: tensor %s was never written", w->dir, w->tensors[i].out.name);
    X3_TRY(rc, out, x3_pack_writer_sync(w, err));
    X3_TRY(rc, out, remove_old(w, err));
    for (size_t s = 0; s < w->n_shards; s++) {
        free(path);
        X3_TRY(rc, out, x3_path_join(&path, w->dir, w->shards[s].final_name, err));
        if (x3_path_exists(w->shards[s].part_path)) /* else an interrupted commit has renamed it */
            X3_TRY(rc, out, x3_rename(w->shards[s].part_path, path, err));
    }
    X3_TRY(rc, out, write_index(w, err));
    rc = x3_sync_dir(w->dir, err);
out:
    free(path);
    return rc;
}
