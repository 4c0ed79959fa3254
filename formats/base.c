#include "formats/base.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <xxhash.h>

x3_status x3_fail(x3_err *err, x3_status status, const char *format, ...)
{
    if (err != NULL && err->status == X3_OK) {
        va_list args;
        err->status = status;
        va_start(args, format);
        vsnprintf(err->text, sizeof err->text, format, args);
        va_end(args);
    }
    return status;
}

/* ---- findings ---- */

void x3_findings_add(x3_findings *f, const char *format, ...)
{
    char text[1400];
    char *copy = NULL;
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    if (f->n_items >= X3_FINDINGS_MAX || x3_grow(&f->items, &f->capacity, f->n_items + 1, sizeof *f->items, NULL) ||
        x3_strdup(&copy, text, NULL)) {
        f->n_dropped++;
        return;
    }
    f->items[f->n_items++] = copy;
}

x3_status x3_findings_status(const x3_findings *f, x3_err *err)
{
    size_t total = f->n_items + f->n_dropped;

    if (total == 0)
        return X3_OK;
    const char *first = f->n_items > 0 ? f->items[0] : "out of memory while listing problems";
    if (total == 1)
        return x3_fail(err, X3_ERR_INPUT, "%s", first);
    return x3_fail(err, X3_ERR_INPUT, "%s (and %zu more)", first, total - 1);
}

void x3_findings_free(x3_findings *f)
{
    for (size_t i = 0; i < f->n_items; i++)
        free(f->items[i]);
    free(f->items);
    *f = (x3_findings){0};
}

/* ---- memory ---- */

x3_status x3_alloc(void *out, uint64_t n, uint64_t size, x3_err *err)
{
    uint64_t bytes;
    void *p = NULL;

    memcpy(out, &p, sizeof p);
    if (x3_mul_overflows(n, size, &bytes) || bytes > PTRDIFF_MAX - 64)
        return x3_fail(err, X3_ERR_MEMORY, "allocation of %llu x %llu bytes is too large", (unsigned long long)n,
                       (unsigned long long)size);
    bytes = x3_round_up(bytes + (bytes == 0), 64);
    p = aligned_alloc(64, bytes);
    if (p == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory: %llu bytes asked for", (unsigned long long)bytes);
    memset(p, 0, bytes);
    memcpy(out, &p, sizeof p);
    return X3_OK;
}

x3_status x3_strndup(char **out, const char *text, size_t n, x3_err *err)
{
    x3_status rc = x3_alloc(out, n + 1, 1, err);

    if (rc == X3_OK)
        memcpy(*out, text, n);
    return rc;
}

x3_status x3_strdup(char **out, const char *text, x3_err *err)
{
    return x3_strndup(out, text, strlen(text), err);
}

X3_PRINTF(2, 0)
static x3_status format_heap(char **out, const char *format, va_list args, x3_err *err)
{
    va_list again;
    x3_status rc;
    int n;

    *out = NULL;
    va_copy(again, args);
    n = vsnprintf(NULL, 0, format, args);
    if (n < 0) {
        rc = x3_fail(err, X3_ERR_INPUT, "text cannot be formatted");
    } else {
        rc = x3_alloc(out, (uint64_t)n + 1, 1, err);
        if (rc == X3_OK)
            vsnprintf(*out, (size_t)n + 1, format, again);
    }
    va_end(again);
    return rc;
}

x3_status x3_asprintf(char **out, x3_err *err, const char *format, ...)
{
    va_list args;
    x3_status rc;

    va_start(args, format);
    rc = format_heap(out, format, args, err);
    va_end(args);
    return rc;
}

x3_status x3_grow(void *items, size_t *capacity, size_t need, size_t size, x3_err *err)
{
    size_t wanted = *capacity < 16 ? 16 : *capacity;
    uint64_t bytes;
    void *old, *grown;

    if (need <= *capacity)
        return X3_OK;
    while (wanted < need)
        wanted *= 2;
    memcpy(&old, items, sizeof old);
    if (x3_mul_overflows(wanted, size, &bytes) || (grown = realloc(old, bytes)) == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory: a list of %zu elements", wanted);
    memcpy(items, &grown, sizeof grown);
    *capacity = wanted;
    return X3_OK;
}

struct x3_arena_block {
    struct x3_arena_block *next;
    size_t used, size;
    _Alignas(16) unsigned char data[];
};

x3_status x3_arena_alloc(x3_arena *arena, void *out, uint64_t n, uint64_t size, x3_err *err)
{
    struct x3_arena_block *b = arena->blocks;
    uint64_t bytes;
    void *p = NULL;

    memcpy(out, &p, sizeof p);
    if (x3_mul_overflows(n, size, &bytes) || bytes > PTRDIFF_MAX / 2)
        return x3_fail(err, X3_ERR_MEMORY, "allocation of %llu x %llu bytes is too large", (unsigned long long)n,
                       (unsigned long long)size);
    bytes = x3_round_up(bytes, 16);
    if (b == NULL || b->size - b->used < bytes) {
        size_t block = x3_max_size(bytes, 1u << 16);
        x3_status rc = x3_alloc(&b, 1, sizeof *b + block, err);
        if (rc != X3_OK)
            return rc;
        b->next = arena->blocks;
        b->size = block;
        arena->blocks = b;
    }
    p = b->data + b->used;
    b->used += bytes;
    memcpy(out, &p, sizeof p);
    return X3_OK;
}

x3_status x3_arena_printf(x3_arena *arena, char **out, x3_err *err, const char *format, ...)
{
    char *text = NULL;
    va_list args;
    x3_status rc;

    *out = NULL;
    va_start(args, format);
    rc = format_heap(&text, format, args, err);
    va_end(args);
    if (rc == X3_OK)
        rc = x3_arena_alloc(arena, out, strlen(text) + 1, 1, err);
    if (rc == X3_OK)
        strcpy(*out, text);
    free(text);
    return rc;
}

void x3_arena_free(x3_arena *arena)
{
    while (arena->blocks != NULL) {
        struct x3_arena_block *next = arena->blocks->next;
        free(arena->blocks);
        arena->blocks = next;
    }
}

/* ---- hashing and random numbers ---- */

uint64_t x3_hash(const void *data, size_t n_bytes)
{
    return XXH3_64bits(data, n_bytes);
}

void x3_hash_text(uint64_t hash, char out[17])
{
    snprintf(out, 17, "%016llx", (unsigned long long)hash);
}

static uint64_t splitmix64(uint64_t *state)
{
    uint64_t z = (*state += 0x9E3779B97F4A7C15u);

    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

void x3_rng_init(x3_rng *rng, uint64_t seed, const char *name)
{
    uint64_t state = XXH3_64bits_withSeed(name, strlen(name), seed);

    for (int i = 0; i < 4; i++)
        rng->s[i] = splitmix64(&state);
}

static uint64_t rotate_left(uint64_t x, int k)
{
    return (x << k) | (x >> (64 - k));
}

uint64_t x3_rng_next(x3_rng *rng)
{
    uint64_t *s = rng->s;
    uint64_t result = rotate_left(s[1] * 5, 7) * 9;
    uint64_t t = s[1] << 17;

    s[2] ^= s[0];
    s[3] ^= s[1];
    s[1] ^= s[2];
    s[0] ^= s[3];
    s[2] ^= t;
    s[3] = rotate_left(s[3], 45);
    return result;
}

double x3_rng_uniform(x3_rng *rng)
{
    return (double)(x3_rng_next(rng) >> 11) * 0x1p-53;
}

double x3_rng_normal(x3_rng *rng)
{
    double u, v, r;

    do {
        u = 2 * x3_rng_uniform(rng) - 1;
        v = 2 * x3_rng_uniform(rng) - 1;
        r = u * u + v * v;
    } while (r >= 1 || r == 0);
    return u * sqrt(-2 * log(r) / r);
}

void x3_rng_signs(x3_rng *rng, float *out, size_t n)
{
    uint64_t bits = 0;

    for (size_t i = 0; i < n; i++) {
        if (i % 64 == 0)
            bits = x3_rng_next(rng);
        out[i] = (bits >> (i % 64)) & 1 ? -1.0f : 1.0f;
    }
}

double x3_seconds(void)
{
    struct timespec t;

    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}
