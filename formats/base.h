/* Base of the whole tree: status codes, error text, findings, checked sizes, memory, PRNG.
 *
 * Errors: every function that can fail returns x3_status, 0 on success, and takes an x3_err as its last
 * argument. The first failure written into an x3_err wins, so clean-up code cannot hide the cause.
 * Threads: no state of its own; an object belongs to one thread at a time unless its header says otherwise. */
#ifndef X3_BASE_H
#define X3_BASE_H

#include <stdbool.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define X3_VERSION "0.1.0"

typedef enum x3_status {
    X3_OK = 0,
    X3_ERR_INPUT,       /* a file, a checkpoint or an option is not what it must be */
    X3_ERR_UNSUPPORTED, /* well formed, but something this version does not do */
    X3_ERR_IO,          /* the operating system refused a read, write or rename */
    X3_ERR_MEMORY,      /* an allocation failed, or would pass the budget */
    X3_ERR_DEVICE,      /* a CUDA call failed, or there is no such device */
    X3_ERR_NUMERIC,     /* a factorization broke down or a result is not finite */
    X3_ERR_GATE         /* everything worked, and a threshold asked for was missed */
} x3_status;

typedef struct x3_err {
    x3_status status;
    char text[1400];
} x3_err;

#define X3_MUST __attribute__((warn_unused_result))
#define X3_PRINTF(f, a) __attribute__((format(printf, f, a)))

/* rc = expr; on failure jump to label. */
#define X3_TRY(rc, label, expr) \
    do {                        \
        (rc) = (expr);          \
        if ((rc) != X3_OK)      \
            goto label;         \
    } while (0)

/* Records a failure and returns `status`. Keeps what err already holds. err may be NULL. */
x3_status x3_fail(x3_err *err, x3_status status, const char *format, ...) X3_PRINTF(3, 4);

/* ---- findings: several problems of one input, all reported at once --------------------------------- */

typedef struct x3_findings {
    char **items;
    size_t n_items, capacity;
    size_t n_dropped; /* past X3_FINDINGS_MAX, or lost to a failed allocation: counted, never silent */
} x3_findings;

#define X3_FINDINGS_MAX 200

void x3_findings_add(x3_findings *f, const char *format, ...) X3_PRINTF(2, 3);
/* X3_OK when there are none; else X3_ERR_INPUT with the first one and the number of the others. */
x3_status x3_findings_status(const x3_findings *f, x3_err *err) X3_MUST;
void x3_findings_free(x3_findings *f);

/* ---- sizes -------------------------------------------------------------------------------------------- */

static inline bool x3_mul_overflows(uint64_t a, uint64_t b, uint64_t *out)
{
    return __builtin_mul_overflow(a, b, out);
}

static inline bool x3_add_overflows(uint64_t a, uint64_t b, uint64_t *out)
{
    return __builtin_add_overflow(a, b, out);
}

static inline size_t x3_round_up(size_t n, size_t multiple)
{
    return (n + multiple - 1) / multiple * multiple;
}

static inline size_t x3_min_size(size_t a, size_t b)
{
    return a < b ? a : b;
}

static inline size_t x3_max_size(size_t a, size_t b)
{
    return a > b ? a : b;
}

/* ---- memory -------------------------------------------------------------------------------------------- */

/* *out = n zeroed elements of `size` bytes on a 64-byte boundary, for free(). n * size is checked; zero
 * elements give a valid pointer. On failure *out is NULL. */
x3_status x3_alloc(void *out, uint64_t n, uint64_t size, x3_err *err) X3_MUST;
/* *out = heap copy of `text`, or of its first n bytes. */
x3_status x3_strdup(char **out, const char *text, x3_err *err) X3_MUST;
x3_status x3_strndup(char **out, const char *text, size_t n, x3_err *err) X3_MUST;
/* *out = formatted text on the heap. */
x3_status x3_asprintf(char **out, x3_err *err, const char *format, ...) X3_MUST X3_PRINTF(3, 4);
/* Grows *items (elements of `size` bytes) so that it holds at least `need`; *capacity doubles. */
x3_status x3_grow(void *items, size_t *capacity, size_t need, size_t size, x3_err *err) X3_MUST;

/* Many small allocations with one lifetime: names, descriptors. */
typedef struct x3_arena {
    struct x3_arena_block *blocks;
} x3_arena;

x3_status x3_arena_alloc(x3_arena *arena, void *out, uint64_t n, uint64_t size, x3_err *err) X3_MUST;
x3_status x3_arena_printf(x3_arena *arena, char **out, x3_err *err, const char *format, ...) X3_MUST X3_PRINTF(4, 5);
void x3_arena_free(x3_arena *arena);

/* ---- hashing and random numbers ------------------------------------------------------------------------- */

/* XXH3, 64 bits, of a buffer; `x3_hash_text` writes 16 hex digits and a NUL. */
uint64_t x3_hash(const void *data, size_t n_bytes);
void x3_hash_text(uint64_t hash, char out[17]);

/* xoshiro256** (Blackman and Vigna, 2018), seeded by splitmix64. The same stream on every machine. */
typedef struct x3_rng {
    uint64_t s[4];
} x3_rng;

/* A stream of its own for every pair of job seed and name. */
void x3_rng_init(x3_rng *rng, uint64_t seed, const char *name);
uint64_t x3_rng_next(x3_rng *rng);
/* Uniform in [0, 1), 53 bits. */
double x3_rng_uniform(x3_rng *rng);
/* Standard normal (Marsaglia's polar method). */
double x3_rng_normal(x3_rng *rng);
/* n random signs, +1 or -1. */
void x3_rng_signs(x3_rng *rng, float *out, size_t n);

/* Seconds of a clock that only goes forward. */
double x3_seconds(void);

#ifdef __cplusplus
}
#endif
#endif
