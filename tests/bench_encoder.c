/* Weights a second of the trellis search, each form that this processor runs, every K; and the error on unit Gaussian
 * tiles at the nominal scale beside design/quality.md. bench_encoder [--tiles N] [--threads N] */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/exl3.h"
#include "kernels/kernels.h"
#include "kernels/parallel.h"
#include "quant/quantize.h"

struct work {
    const x3_kernels *k;
    const x3_trellis *t;
    const float *x;
    uint16_t *states;
    void **scratch;
};

#define TILES_AN_ITEM 4

static void encode_item(void *arg, size_t item, int thread)
{
    const struct work *w = arg;
    size_t at = item * TILES_AN_ITEM * 256;

    w->k->trellis_search(w->t, w->x + at, TILES_AN_ITEM, w->states + at, w->scratch[thread]);
}

/* design/quality.md, mul1 */
static const double known_error[] = {.2702, .06813, .01729, .00443, 1.146e-3, 3.0e-4, 8.0e-5, 2.05e-5};

static x3_status bench(const x3_kernels *k, x3_pool *pool, int K, size_t n_tiles, const float *gauss, x3_err *err)
{
    const double scale = x3_quant_nominal_scale(X3_CB_MUL1, K);
    const size_t n = n_tiles * 256;
    struct work w = {.k = k};
    x3_trellis *t = NULL;
    float *x = NULL;
    double error = 0, seconds;
    x3_status rc;

    X3_TRY(rc, out, x3_trellis_create(&t, X3_CB_MUL1, K, err));
    X3_TRY(rc, out, x3_alloc(&x, n, sizeof *x, err));
    X3_TRY(rc, out, x3_alloc(&w.states, n, sizeof *w.states, err));
    X3_TRY(rc, out, x3_alloc(&w.scratch, (uint64_t)x3_pool_threads(pool), sizeof *w.scratch, err));
    for (int i = 0; i < x3_pool_threads(pool); i++)
        X3_TRY(rc, out, x3_alloc(&w.scratch[i], x3_trellis_scratch_bytes(K), 1, err));
    for (size_t i = 0; i < n; i++)
        x[i] = (float)(gauss[i] * scale);
    w.t = t;
    w.x = x;
    seconds = x3_seconds();
    x3_pool_run(pool, n_tiles / TILES_AN_ITEM, encode_item, &w);
    seconds = x3_seconds() - seconds;
    for (size_t i = 0; i < n; i++)
        error += pow((t->values[w.states[i]] - x[i]) / scale, 2) / (double)n;
    printf("| %s | %d | %d | %.0f | %.5g | %.5g |\n", k->name, K, x3_pool_threads(pool), (double)n / seconds, error,
           known_error[K - 1]);
    fflush(stdout);
out:
    for (int i = 0; w.scratch != NULL && i < x3_pool_threads(pool); i++)
        free(w.scratch[i]);
    free(w.scratch);
    free(w.states);
    free(x);
    x3_trellis_free(t);
    return rc;
}

int main(int argc, char **argv)
{
    size_t n_tiles = 256;
    int n_threads = 0;
    float *gauss = NULL;
    x3_pool *pool = NULL;
    x3_rng rng;
    x3_err err = {0};
    x3_status rc;

    for (int i = 1; i + 1 < argc; i += 2)
        if (strcmp(argv[i], "--tiles") == 0)
            n_tiles = (size_t)atoi(argv[i + 1]) / TILES_AN_ITEM * TILES_AN_ITEM;
        else if (strcmp(argv[i], "--threads") == 0)
            n_threads = atoi(argv[i + 1]);
    X3_TRY(rc, out, x3_pool_create(&pool, n_threads, &err));
    X3_TRY(rc, out, x3_alloc(&gauss, n_tiles * 256, sizeof *gauss, &err));
    x3_rng_init(&rng, 1, "bench");
    for (size_t i = 0; i < n_tiles * 256; i++)
        gauss[i] = (float)x3_rng_normal(&rng);
    printf("| form | K | threads | weights/s | error, %zu tiles | quality.md |\n| --- | --- | --- | --- | --- | --- |\n", n_tiles);
    for (int isa = X3_ISA_REF + 1; isa < X3_N_ISAS; isa++)
        for (int K = 1; K <= X3_K_MAX && x3_kernels_find((x3_isa)isa) != NULL; K++)
            X3_TRY(rc, out, bench(x3_kernels_find((x3_isa)isa), pool, K, n_tiles, gauss, &err));
out:
    if (rc != X3_OK)
        fprintf(stderr, "error: %s\n", err.text);
    free(gauss);
    x3_pool_free(pool);
    return rc != X3_OK;
}
