#include "formats/safetensors.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/io.h"
#include "formats/safetensors_opening.h"

#define CHUNK_BYTES ((size_t)1 << 20)

typedef unsigned long long ull; /* for %llu */

/* ---- opening ---- */

/* By name; doubled names by shard, so that findings come in the same order every time. */
static int compare_entries(const void *a, const void *b)
{
    const x3_tensor *x = &((const x3_st_entry *)a)->t, *y = &((const x3_st_entry *)b)->t;
    int by_name = strcmp(x->name, y->name);

    return by_name != 0 ? by_name : (x->shard > y->shard) - (x->shard < y->shard);
}

static x3_status publish(x3_st_opening *o, x3_err *err)
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
    x3_st_opening o = {.findings = findings == NULL ? &own : findings};
    size_t n_before = o.findings->n_items + o.findings->n_dropped;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&o.st, 1, sizeof *o.st, err));
    X3_TRY(rc, out, x3_st_find_shards(&o, path, err));
    for (size_t i = 0; i < o.st->n_shards; i++)
        X3_TRY(rc, out, x3_st_open_shard(&o, i, err));
    if (o.n_entries > 1)
        qsort(o.entries, o.n_entries, sizeof *o.entries, compare_entries);
    x3_st_check_across(&o);
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
        x3_st_unmap(&st->shards[i]);
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

static int compare_name_with_tensor(const void *name, const void *t)
{
    return strcmp(name, ((const x3_tensor *)t)->name);
}

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
