/* Operations of mixers on the CUDA device against the CPU device's: delta nets, latent caches, selections. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cuda/device_pair.h"
#include "tests/test.h"

/* ---- batches ---- */

enum { PAGES = 24, LONG = 131, ROWS = 70 + 1 + LONG + 3 + 1 };

static const int32_t pages[4][8] = {{5, 2, 9}, {0, 21, 3, 4, 11, 12}, {23, 6, 7, 8, 1}, {13, 14}};
/* rows 71 + LONG .. the last one belong to no sequence */
static const x3_sequence sequences[4] = {{.first_row = 0, .n_rows = 70, .position = 0, .pages = pages[0], .slot = 3},
                                         {.first_row = 70, .n_rows = 1, .position = 300, .pages = pages[1], .slot = 0},
                                         {.first_row = 71, .n_rows = LONG, .position = 100, .pages = pages[2], .slot = 2},
                                         {.first_row = 71 + LONG, .n_rows = 3, .position = 0, .pages = pages[3], .slot = 1}};

struct batches {
    int32_t positions[ROWS], *d_positions;
    x3_batch cpu, gpu;
};

static void make_batches(const x3_pair *p, struct batches *b)
{
    memset(b, 0, sizeof *b);
    for (int i = 0; i < 4; i++)
        for (size_t r = 0; r < sequences[i].n_rows; r++)
            b->positions[sequences[i].first_row + r] = (int32_t)(sequences[i].position + r);
    b->d_positions = x3_pair_upload(p, b->positions, sizeof b->positions);
    b->cpu = b->gpu = (x3_batch){.n_rows = ROWS, .n_sequences = 4, .sequences = sequences, .d_positions = b->positions};
    b->gpu.d_positions = b->d_positions;
}

#define BATCH(b) (on_gpu ? &(b).gpu : &(b).cpu)

/* Relative error of rows that belong to a sequence; the others must be as they were, which is equal. */
static double rows_error(const x3_pair *p, const x3_twin *t, size_t ld)
{
    float *got = x3_twin_download(p, t);
    double error = 0, sum = 0;

    for (size_t i = 0; i < t->n; i++) {
        const double d = (double)got[i] - t->cpu[i];
        CHECK_MSG(i / ld < ROWS - 1 || d == 0, "a row of no sequence was written");
        error += d * d;
        sum += i / ld < ROWS - 1 ? (double)t->cpu[i] * t->cpu[i] : 0;
    }
    free(got);
    return isfinite(error) ? sqrt(error / sum) : INFINITY;
}

/* ---- small ones ---- */

X3_TEST(cuda_pieces_of_rows_and_layer_norm_equal_the_cpu)
{
    static const size_t sizes[] = {64, 100, 128, 7};
    x3_pair p = x3_pair_open();
    x3_err err = {0};

    for (int s = 0; s < 4; s++) {
        const size_t n = sizes[s], rows = 37;
        x3_twin from = x3_twin_random(&p, "from", rows * (5 * n + 3)), to = x3_twin_random(&p, "to", rows * (3 * (n + 2) + 1));
        x3_twin x = x3_twin_random(&p, "x", rows * n), w = x3_twin_random(&p, "w", n), b = x3_twin_random(&p, "b", n);
        BOTH(p, &err, dev->ops->copy_heads(dev, OF(to) + 1, 3 * (n + 2) + 1, n + 2, OF(from) + 2, 5 * n + 3, n + 1, rows, 3, n, &err));
        CHECK(x3_twin_equal(&p, &to));
        for (size_t i = 0; i < n; i++)
            x.cpu[3 * n + i] += 1000;
        x3_twin_upload(&p, &x);
        BOTH(p, &err, dev->ops->layer_norm(dev, OF(x), rows, n, OF(w), OF(b), 1e-6f, &err));
        CHECK_MSG(x3_twin_error(&p, &x) < 1e-6, "layer norm of %zu: %.3g", n, x3_twin_error(&p, &x));
        x3_twin *all[] = {&from, &to, &x, &w, &b};
        for (int i = 0; i < 5; i++)
            x3_twin_free(&p, all[i]);
    }
    x3_pair_close(&p);
}

/* ---- delta nets ---- */

X3_TEST(cuda_convolution_and_its_states_equal_the_cpu)
{
    x3_pair p = x3_pair_open();
    struct batches b;
    x3_err err = {0};

    make_batches(&p, &b);
    for (size_t kernel = 2; kernel <= 5; kernel++) {
        const size_t n = kernel == 4 ? 512 : 70, stride = (kernel - 1) * n + 6;
        x3_twin x = x3_twin_random(&p, "x", ROWS * n), out = x3_twin_random(&p, "out", ROWS * n);
        x3_twin weight = x3_twin_random(&p, "weight", n * kernel), state = x3_twin_random(&p, "state", 5 * stride);
        BOTH(p, &err, dev->ops->conv_silu(dev,
                                          &(x3_conv_args){.d_x = OF(x), .d_out = OF(out), .n = n, .kernel = kernel,
                                                          .d_weight = OF(weight), .d_state = OF(state), .state_stride = stride},
                                          BATCH(b), &err));
        CHECK_MSG(x3_twin_equal(&p, &out), "kernel %zu: outputs differ", kernel);
        CHECK_MSG(x3_twin_equal(&p, &state), "kernel %zu: states differ", kernel);
        x3_twin *all[] = {&x, &out, &weight, &state};
        for (int i = 0; i < 4; i++)
            x3_twin_free(&p, all[i]);
    }
    x3_device_free(p.gpu, b.d_positions);
    x3_pair_close(&p);
}

static void check_delta(const x3_pair *p, size_t k_heads, size_t v_heads, size_t k_dim, size_t v_dim, double *most)
{
    const size_t columns = 2 * k_heads * k_dim + v_heads * v_dim, stride = v_heads * k_dim * v_dim + 5;
    x3_twin qkv = x3_twin_random(p, "qkv", ROWS * columns), beta = x3_twin_random(p, "b", ROWS * v_heads);
    x3_twin a = x3_twin_random(p, "a", ROWS * v_heads), a_log = x3_twin_random(p, "a_log", v_heads);
    x3_twin dt = x3_twin_random(p, "dt", v_heads), out = x3_twin_random(p, "out", ROWS * v_heads * v_dim);
    x3_twin state = x3_twin_random(p, "state", 5 * stride);
    struct batches b;
    x3_err err = {0};

    make_batches(p, &b);
    a.cpu[7] = 40; /* softplus is linear there */
    x3_twin_upload(p, &a);
    for (int i = 0; i < 2; i++) { /* a second time: from the states of the first */
        BOTH(*p, &err, dev->ops->delta_rule(dev,
                                            &(x3_delta_args){.n_k_heads = k_heads, .n_v_heads = v_heads, .k_dim = k_dim, .v_dim = v_dim,
                                                             .d_qkv = OF(qkv), .d_b = OF(beta), .d_a = OF(a), .d_a_log = OF(a_log),
                                                             .d_dt_bias = OF(dt), .d_out = OF(out), .d_state = OF(state),
                                                             .state_stride = stride},
                                            BATCH(b), &err));
        const double e = rows_error(p, &out, v_heads * v_dim), s = x3_twin_error(p, &state);
        *most = fmax(*most, fmax(e, s));
        CHECK_MSG(e < 3e-6 && s < 3e-6, "%zu and %zu heads of %zu and %zu: relative error %.3g, of states %.3g", k_heads, v_heads, k_dim,
                  v_dim, e, s);
    }
    x3_twin *all[] = {&qkv, &beta, &a, &a_log, &dt, &out, &state};
    for (int i = 0; i < 7; i++)
        x3_twin_free(p, all[i]);
    x3_device_free(p->gpu, b.d_positions);
}

X3_TEST(cuda_delta_rule_equals_the_cpu)
{
    x3_pair p = x3_pair_open();
    double most = 0;

    check_delta(&p, 2, 4, 128, 128, &most);
    check_delta(&p, 3, 3, 24, 16, &most);
    check_delta(&p, 1, 2, 64, 40, &most);
    check_delta(&p, 1, 1, 16, 100, &most);
    check_delta(&p, 1, 3, 200, 64, &most);
    printf("    relative error at most %.2g\n", most);
    x3_pair_close(&p);
}

/* ---- latent caches and selections ---- */

struct latent {
    size_t n_heads, k_dim, v_dim, n_selected;
    bool values; /* a cache with values of its own */
};

/* Every position of 0 .. p once in some order, the first n of them sorted. */
static void random_selection(x3_rng *rng, int32_t *to, size_t n, size_t n_positions)
{
    size_t left = n;

    for (size_t i = 0; i < n_positions && left > 0; i++)
        if (x3_rng_next(rng) % (n_positions - i) < left) {
            *to++ = (int32_t)i;
            left--;
        }
}

static void check_latent(const x3_pair *p, const struct latent *c, double *most)
{
    const size_t kd = c->k_dim, vd = c->v_dim;
    x3_twin keys = x3_twin_random(p, "keys", PAGES * 64 * kd), values = x3_twin_random(p, "values", PAGES * 64 * vd + 16);
    x3_twin k = x3_twin_random(p, "k", ROWS * kd), v = x3_twin_random(p, "v", ROWS * vd);
    x3_twin q = x3_twin_random(p, "q", ROWS * c->n_heads * kd), out = x3_twin_random(p, "o", ROWS * c->n_heads * vd);
    int32_t *selected = calloc(ROWS * (c->n_selected + 1), sizeof *selected), *d_selected;
    struct batches b;
    x3_rng rng;
    x3_err err = {0};

    make_batches(p, &b);
    x3_rng_init(&rng, 3, "selected");
    for (size_t r = 0; r < ROWS; r++)
        random_selection(&rng, selected + r * c->n_selected, x3_min_size(c->n_selected, (size_t)b.positions[r] + 1),
                         (size_t)b.positions[r] + 1);
    d_selected = x3_pair_upload(p, selected, ROWS * (c->n_selected + 1) * sizeof *selected);
    const x3_kv_layer cpu = {.n_kv_heads = 1, .k_dim = kd, .v_dim = vd, .d_keys = keys.cpu, .d_values = c->values ? values.cpu : NULL};
    x3_kv_layer gpu = cpu;
    gpu.d_keys = keys.gpu;
    gpu.d_values = c->values ? values.gpu : NULL;
    BOTH(*p, &err, dev->ops->kv_append(dev, on_gpu ? &gpu : &cpu, BATCH(b), OF(k), kd, c->values ? OF(v) : NULL, vd, &err));
    CHECK_MSG(x3_twin_equal(p, &keys) && x3_twin_equal(p, &values), "the cache differs");
    for (size_t d = 0; d < kd; d++) /* what no row sees may hold anything: position 240 of sequence 2 */
        keys.cpu[8 * 64 * kd + 48 / 16 * 16 * kd + d * 16 + 48 % 16] = NAN;
    x3_twin_upload(p, &keys);
    BOTH(*p, &err, dev->ops->attention(dev,
                                       &(x3_attention_args){.d_q = OF(q), .d_out = OF(out), .n_heads = c->n_heads,
                                                            .kv = on_gpu ? &gpu : &cpu, .scale = 0.1f, .n_selected = c->n_selected,
                                                            .d_selected = c->n_selected == 0 ? NULL : on_gpu ? d_selected : selected},
                                       BATCH(b), &err));
    const double e = rows_error(p, &out, c->n_heads * vd);
    *most = fmax(*most, e);
    CHECK_MSG(e < 2e-6, "%zu heads of %zu and %zu, %zu selected: relative error %.3g", c->n_heads, kd, vd, c->n_selected, e);
    free(selected);
    x3_device_free(p->gpu, d_selected);
    x3_device_free(p->gpu, b.d_positions);
    x3_twin *all[] = {&keys, &values, &k, &v, &q, &out};
    for (int i = 0; i < 6; i++)
        x3_twin_free(p, all[i]);
}

X3_TEST(cuda_attention_over_latents_and_selections_equals_the_cpu)
{
    static const struct latent cases[] = {
        {4, 48, 32, 0, false}, {3, 56, 40, 0, false}, {16, 576, 512, 0, false}, {5, 160, 128, 0, false},
        {4, 48, 32, 30, false}, {17, 576, 512, 48, false}, {3, 56, 40, 16, false}, {2, 64, 48, 7, true}, {40, 160, 128, 400, false},
    };
    x3_pair p = x3_pair_open();
    double most = 0;

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_latent(&p, &cases[i], &most);
    printf("    relative error at most %.2g\n", most);
    x3_pair_close(&p);
}

/* Small integers: sums are exact in any order, and many scores are equal. */
static void make_small(x3_twin *t, const x3_pair *p, int range)
{
    for (size_t i = 0; i < t->n; i++)
        t->cpu[i] = (float)((int)(fabsf(t->cpu[i]) * 1000) % (2 * range + 1) - range);
    x3_twin_upload(p, t);
}

static void check_select(const x3_pair *p, size_t n_heads, size_t dim, size_t n_selected, bool exact)
{
    x3_twin keys = x3_twin_random(p, "keys", PAGES * 64 * dim), q = x3_twin_random(p, "q", ROWS * n_heads * dim);
    x3_twin weights = x3_twin_random(p, "weights", ROWS * n_heads);
    int32_t *selected = calloc(ROWS * n_selected, sizeof *selected), *got = calloc(ROWS * n_selected, sizeof *got);
    int32_t *d_selected = x3_pair_upload(p, selected, ROWS * n_selected * sizeof *selected);
    struct batches b;
    size_t n_other = 0, n = 0;
    x3_err err = {0};

    make_batches(p, &b);
    if (exact) {
        make_small(&keys, p, 2);
        make_small(&q, p, 2);
        make_small(&weights, p, 3);
    }
    const x3_kv_layer cpu = {.index_dim = dim, .d_index_keys = keys.cpu}, gpu = {.index_dim = dim, .d_index_keys = keys.gpu};
    BOTH(*p, &err, dev->ops->select(dev,
                                    &(x3_select_args){.d_q = OF(q), .d_weights = OF(weights), .n_heads = n_heads,
                                                      .n_selected = n_selected, .kv = on_gpu ? &gpu : &cpu,
                                                      .d_selected = on_gpu ? d_selected : selected},
                                    BATCH(b), &err));
    CHECK_OK(p->gpu->ops->download(p->gpu, got, d_selected, ROWS * n_selected * sizeof *got, &err), &err);
    for (size_t r = 0; r < ROWS; r++)
        if ((size_t)b.positions[r] >= n_selected)
            for (size_t i = 0; i < n_selected; i++, n++) {
                n_other += got[r * n_selected + i] != selected[r * n_selected + i];
                CHECK_MSG(got[r * n_selected + i] <= b.positions[r] && (i == 0 || got[r * n_selected + i] > got[r * n_selected + i - 1]),
                          "row %zu: not in order", r);
            }
    CHECK(n > 0);
    /* random scores that differ by a rounding can change places, which moves what lies between them */
    CHECK_MSG(n_other <= (exact ? 0 : n / 50), "%zu heads of %zu: %zu of %zu positions differ", n_heads, dim, n_other, n);
    free(selected);
    free(got);
    x3_device_free(p->gpu, d_selected);
    x3_device_free(p->gpu, b.d_positions);
    x3_twin_free(p, &keys);
    x3_twin_free(p, &q);
    x3_twin_free(p, &weights);
}

X3_TEST(cuda_selection_of_positions_equals_the_cpu)
{
    x3_pair p = x3_pair_open();

    for (int exact = 0; exact < 2; exact++) {
        check_select(&p, 8, 64, 16, exact);
        check_select(&p, 64, 128, 100, exact);
        check_select(&p, 3, 32, 1, exact);
        check_select(&p, 9, 200, 64, exact);
        check_select(&p, 1, 20, 7, exact);
    }
    x3_pair_close(&p);
}
