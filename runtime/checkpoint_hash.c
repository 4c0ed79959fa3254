/* Hashes of a checkpoint's tensors, and the scan that finds broken values before any work is spent. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <xxhash.h>

#include "runtime/checkpoint.h"

#define CHUNK ((size_t)1 << 24)

x3_status x3_checkpoint_load(const x3_checkpoint *c, const x3_tensor *t, void **out, x3_err *err)
{
    struct x3_tensor_hash *h = &c->hashes[t - c->st->tensors];
    x3_status rc = x3_safetensors_load(c->st, t, out, err);
    uint64_t hash;

    if (rc != X3_OK)
        return rc;
    hash = x3_hash(*out, t->n_bytes);
    if (h->known && h->hash != hash) {
        free(*out);
        *out = NULL;
        return x3_fail(err, X3_ERR_INPUT, "%s: tensor %s has changed since it was first read",
                       c->st->shards[t->shard].path, t->name);
    }
    h->hash = hash;
    h->known = true;
    return X3_OK;
}

/* ---- scan ---- */

/* Exponent bits all ones: infinity or NaN. Written so that the loops vectorize. */
static size_t count_bad16(const uint16_t *x, size_t n, uint16_t mask)
{
    size_t bad = 0;

    for (size_t i = 0; i < n; i++)
        bad += (x[i] & mask) == mask;
    return bad;
}

static size_t count_bad(const void *data, size_t n_bytes, x3_dtype dtype)
{
    const uint32_t *w = data;
    const uint8_t *b = data;
    size_t bad = 0;

    switch (dtype) {
    case X3_BF16:
        return count_bad16(data, n_bytes / 2, 0x7F80);
    case X3_F16:
        return count_bad16(data, n_bytes / 2, 0x7C00);
    case X3_F32:
        for (size_t i = 0; i < n_bytes / 4; i++)
            bad += (w[i] & 0x7F800000u) == 0x7F800000u;
        return bad;
    case X3_F8_E4M3:
        for (size_t i = 0; i < n_bytes; i++)
            bad += (b[i] & 0x7F) == 0x7F;
        return bad;
    case X3_F64:
    case X3_F8_E5M2:
    case X3_F8_E8M0:
    case X3_I64:
    case X3_I32:
    case X3_I16:
    case X3_I8:
    case X3_U64:
    case X3_U32:
    case X3_U16:
    case X3_U8:
    case X3_BOOL:
    case X3_N_DTYPES:
        break;
    }
    return 0;
}

static size_t first_bad(const char *data, size_t n_bytes, x3_dtype dtype)
{
    const size_t size = x3_dtype_bytes(dtype);

    for (size_t i = 0; i + size <= n_bytes; i += size)
        if (count_bad(data + i, size, dtype) > 0)
            return i / size;
    return 0;
}

struct scan {
    const x3_checkpoint *c;
    char *buffer;
    XXH3_state_t *state;
    size_t n_bad, first_bad;
};

/* Hash, and where `check` is set the number of bad values, of one tensor. */
static x3_status scan_tensor(struct scan *s, const x3_tensor *t, bool check, uint64_t *hash, x3_err *err)
{
    XXH3_64bits_reset(s->state);
    s->n_bad = 0;
    for (uint64_t at = 0; at < t->n_bytes; at += CHUNK) {
        size_t n = x3_min_size(CHUNK, t->n_bytes - at);
        x3_status rc = x3_safetensors_read(s->c->st, t, at, n, s->buffer, err);
        if (rc != X3_OK)
            return rc;
        XXH3_64bits_update(s->state, s->buffer, n);
        size_t bad = check ? count_bad(s->buffer, n, t->dtype) : 0;
        if (bad > 0 && s->n_bad == 0)
            s->first_bad = (size_t)at / x3_dtype_bytes(t->dtype) + first_bad(s->buffer, n, t->dtype);
        s->n_bad += bad;
    }
    *hash = XXH3_64bits_digest(s->state);
    return X3_OK;
}

static x3_status open_scan(struct scan *s, const x3_checkpoint *c, x3_err *err)
{
    *s = (struct scan){.c = c, .state = XXH3_createState()};
    if (s->state == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory: hash state");
    return x3_alloc(&s->buffer, CHUNK, 1, err);
}

static void close_scan(struct scan *s)
{
    XXH3_freeState(s->state);
    free(s->buffer);
}

x3_status x3_checkpoint_scan(const x3_checkpoint *c, void (*step)(void *arg, uint64_t done, uint64_t total), void *arg,
                             x3_findings *findings, x3_err *err)
{
    uint64_t done = 0;
    struct scan s;
    x3_status rc;

    X3_TRY(rc, out, open_scan(&s, c, err));
    for (size_t i = 0; i < c->st->n_tensors; i++) {
        const x3_tensor *t = &c->st->tensors[i];
        X3_TRY(rc, out, scan_tensor(&s, t, true, &c->hashes[i].hash, err));
        c->hashes[i].known = true;
        if (s.n_bad > 0)
            x3_findings_add(findings, "%s: tensor %s has %zu values that are not finite, the first at element %zu",
                            c->st->shards[t->shard].file, t->name, s.n_bad, s.first_bad);
        done += t->n_bytes;
        if (step != NULL)
            step(arg, done, c->st->total_bytes);
    }
out:
    close_scan(&s);
    return rc;
}

x3_status x3_checkpoint_tensor_hash(const x3_checkpoint *c, const x3_tensor *t, uint64_t *hash, x3_err *err)
{
    struct x3_tensor_hash *h = &c->hashes[t - c->st->tensors];
    struct scan s;
    x3_status rc = X3_OK;

    if (!h->known) {
        rc = open_scan(&s, c, err);
        if (rc == X3_OK)
            rc = scan_tensor(&s, t, false, &h->hash, err);
        h->known = rc == X3_OK;
        close_scan(&s);
    }
    *hash = h->hash;
    return rc;
}

x3_status x3_checkpoint_hash(const x3_checkpoint *c, uint64_t *hash, x3_err *err)
{
    XXH3_state_t *state = XXH3_createState();
    x3_status rc = X3_OK;

    if (state == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory: hash state");
    XXH3_64bits_reset(state);
    for (size_t i = 0; i < c->st->n_tensors; i++) {
        const x3_tensor *t = &c->st->tensors[i];
        char shape[128], rest[160];
        uint64_t h;
        X3_TRY(rc, out, x3_checkpoint_tensor_hash(c, t, &h, err));
        snprintf(rest, sizeof rest, " %s %s %016llx\n", x3_dtype_name(t->dtype), x3_tensor_shape_text(t, shape),
                 (unsigned long long)h);
        XXH3_64bits_update(state, t->name, strlen(t->name));
        XXH3_64bits_update(state, rest, strlen(rest));
    }
    *hash = XXH3_64bits_digest(state);
out:
    XXH3_freeState(state);
    return rc;
}
