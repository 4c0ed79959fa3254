/* Every operation of the CUDA device against the CPU device's, on random shapes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"
#include "kernels/trellis.h"
#include "tests/cuda/device_pair.h"
#include "tests/test.h"

/* ---- linear ---- */

/* Largest relative error of a row: `rows` rows of x with 3 floats between them. */
static double linear_error(const x3_pair *p, const x3_twin_weight *w, size_t rows)
{
    const size_t ldx = w->cpu.n_in + 3, ldy = w->cpu.n_out + 5;
    x3_twin x = x3_twin_random(p, "x", rows * ldx), y = x3_twin_random(p, "y", rows * ldy);
    x3_err err = {0};
    double worst = 0;

    for (size_t r = 0; r < rows; r++) /* rows of very different size */
        for (size_t i = 0; i < ldx; i++)
            x.cpu[r * ldx + i] *= r % 3 == 1 ? 1e-5f : r % 3 == 2 ? 3e4f : 1;
    x3_twin_upload(p, &x);
    BOTH(*p, &err, dev->ops->linear(dev, on_gpu ? &w->gpu : &w->cpu, OF(x), ldx, rows, OF(y), ldy, &err));
    float *got = x3_twin_download(p, &y);
    for (size_t r = 0; r < rows; r++) {
        double error = 0, sum = 0;
        for (size_t c = 0; c < ldy; c++) {
            double d = (double)got[r * ldy + c] - y.cpu[r * ldy + c];
            if (c >= w->cpu.n_out) {
                CHECK_MSG(d == 0, "row %zu: written past its end", r);
                continue;
            }
            error += d * d;
            sum += (double)y.cpu[r * ldy + c] * y.cpu[r * ldy + c];
        }
        worst = fmax(worst, isfinite(error) ? sqrt(error / sum) : INFINITY);
    }
    free(got);
    x3_twin_free(p, &x);
    x3_twin_free(p, &y);
    return worst;
}

X3_TEST(cuda_dense_linears_equal_the_cpu_to_float32_rounding)
{
    static const size_t shapes[][3] = {{64, 128, 9}, {301, 77, 20}, {512, 1024, 300}, {40, 1000, 1}, {1030, 264, 5}, {96, 4096, 64}};
    static const x3_weight_kind kinds[] = {X3_WEIGHT_BF16, X3_WEIGHT_F16, X3_WEIGHT_F32};
    x3_pair p = x3_pair_open();
    double most = 0;

    for (int k = 0; k < 3; k++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
            for (int reverse = 0; reverse < 2; reverse++) {
                x3_twin_weight w = x3_twin_dense(&p, kinds[k], shapes[s][0], shapes[s][1]);
                p.gpu->reverse_sums = reverse;
                double e = linear_error(&p, &w, shapes[s][2]);
                most = fmax(most, e);
                CHECK_MSG(e < 3e-6, "kind %d, %zu x %zu, %zu rows, reverse %d: relative error %.3g", (int)kinds[k], shapes[s][0],
                          shapes[s][1], shapes[s][2], reverse, e);
                x3_twin_weight_free(&p, &w);
            }
    printf("    relative error at most %.2g\n", most);
    x3_pair_close(&p);
}

X3_TEST(cuda_exl3_linears_equal_the_cpu_to_float32_rounding)
{
    x3_pair p = x3_pair_open();
    double most = 0, most_invariant = 0;

    for (int K = 1; K <= 8; K++)
        for (int cb = 0; cb < 3; cb++) {
            static const size_t rows[] = {1, 7, 130};
            x3_twin_weight w = x3_twin_exl3(&p, K, (x3_codebook)cb, 300 + 128 * (size_t)(K % 3), K % 2 == 0 ? 512 : 500);
            for (int i = 0; i < 3; i++) {
                p.gpu->reverse_sums = i == 1;
                double e = linear_error(&p, &w, rows[i]);
                most = fmax(most, e);
                CHECK_MSG(e < 3e-6, "K = %d, codebook %d, %zu rows: relative error %.3g", K, cb, rows[i], e);
                p.gpu->reverse_sums = false;
                p.gpu->row_invariant = true;
                e = linear_error(&p, &w, rows[i]);
                most_invariant = fmax(most_invariant, e);
                CHECK_MSG(e < 1e-3, "K = %d, codebook %d, %zu rows, row-invariant: relative error %.3g", K, cb, rows[i], e);
                p.gpu->row_invariant = false;
            }
            x3_twin_weight_free(&p, &w);
        }
    printf("    relative error at most %.2g, row-invariant %.2g\n", most, most_invariant);
    x3_pair_close(&p);
}

static void check_invariance(x3_pair *p, const x3_twin_weight *w, const char *what)
{
    enum { ROWS = 300 };
    const size_t n_in = w->cpu.n_in, n_out = w->cpu.n_out;
    x3_twin x = x3_twin_random(p, "x", ROWS * n_in), y = x3_twin_random(p, "y", ROWS * n_out);
    float *one;
    x3_err err = {0};

    CHECK_OK(p->gpu->ops->linear(p->gpu, &w->gpu, x.gpu, n_in, ROWS, y.gpu, n_out, &err), &err);
    float *all = x3_twin_download(p, &y);
    for (size_t first = 0; first < ROWS; first += 37)
        for (size_t n = 1; n < 140 && first + n <= ROWS; n = 2 * n + 1) {
            CHECK_OK(p->gpu->ops->linear(p->gpu, &w->gpu, x.gpu + first * n_in, n_in, n, y.gpu, n_out, &err), &err);
            one = x3_twin_download(p, &y);
            CHECK_MSG(memcmp(one, all + first * n_out, n * n_out * 4) == 0, "%s: rows %zu .. %zu differ alone", what, first,
                      first + n - 1);
            free(one);
        }
    free(all);
    x3_twin_free(p, &x);
    x3_twin_free(p, &y);
}

X3_TEST(cuda_linears_are_row_invariant_when_asked)
{
    x3_pair p = x3_pair_open();
    x3_twin_weight w = x3_twin_dense(&p, X3_WEIGHT_BF16, 200, 333);

    p.gpu->row_invariant = true;
    check_invariance(&p, &w, "BF16");
    x3_twin_weight_free(&p, &w);
    w = x3_twin_exl3(&p, 3, X3_CB_MUL1, 384, 1024);
    check_invariance(&p, &w, "EXL3");
    x3_twin_weight_free(&p, &w);
    x3_pair_close(&p);
}

X3_TEST(cuda_linear_keeps_rows_that_are_not_finite_to_themselves)
{
    x3_pair p = x3_pair_open();
    x3_twin_weight w[2] = {x3_twin_dense(&p, X3_WEIGHT_BF16, 256, 512), x3_twin_exl3(&p, 4, X3_CB_MCG, 256, 512)};
    x3_twin x = x3_twin_random(&p, "x", 40 * 512), y = x3_twin_random(&p, "y", 40 * 256);
    x3_err err = {0};

    x.cpu[3 * 512 + 9] = INFINITY;
    x.cpu[30 * 512] = NAN;
    x3_twin_upload(&p, &x);
    for (int i = 0; i < 2; i++) {
        CHECK_OK(p.gpu->ops->linear(p.gpu, &w[i].gpu, x.gpu, 512, 40, y.gpu, 256, &err), &err);
        float *got = x3_twin_download(&p, &y);
        for (int r = 0; r < 40; r++)
            for (int c = 0; c < 256; c++)
                CHECK(isfinite(got[r * 256 + c]) != (r == 3 || r == 30));
        free(got);
        x3_twin_weight_free(&p, &w[i]);
    }
    x3_twin_free(&p, &x);
    x3_twin_free(&p, &y);
    x3_pair_close(&p);
}

X3_TEST(cuda_dense_weights_as_float32_equal_the_cpu)
{
    static const x3_weight_kind kinds[] = {X3_WEIGHT_BF16, X3_WEIGHT_F16, X3_WEIGHT_F32};
    x3_pair p = x3_pair_open();
    x3_err err = {0};

    for (int k = 0; k < 3; k++) {
        x3_twin_weight w = x3_twin_dense(&p, kinds[k], 301, 67);
        x3_twin out = x3_twin_random(&p, "out", 301 * 67);
        BOTH(p, &err, dev->ops->dense_floats(dev, on_gpu ? &w.gpu : &w.cpu, OF(out), &err));
        CHECK(x3_twin_equal(&p, &out));
        x3_twin_free(&p, &out);
        x3_twin_weight_free(&p, &w);
    }
    x3_pair_close(&p);
}

/* ---- rows ---- */

X3_TEST(cuda_norm_rope_silu_and_add_equal_the_cpu)
{
    static const size_t sizes[] = {64, 128, 576, 4096, 100, 8192, 8200}; /* the last is too long to keep */
    x3_pair p = x3_pair_open();
    x3_err err = {0};

    for (int s = 0; s < 7; s++) {
        const size_t n = sizes[s], rows = 37, ld = n + 2;
        x3_twin x = x3_twin_random(&p, "x", rows * ld), w = x3_twin_random(&p, "w", n), out = x3_twin_random(&p, "out", rows * ld);
        BOTH(p, &err, dev->ops->rms_norm(dev, OF(x), ld, rows, n, OF(w), 1e-5f, OF(out), ld, &err));
        CHECK_MSG(x3_twin_error(&p, &out) < 3e-7, "norm of %zu: %.3g", n, x3_twin_error(&p, &out));
        BOTH(p, &err, dev->ops->silu_mul(dev, OF(x), OF(out), rows * ld, OF(out), &err));
        x3_twin_upload(&p, &out);
        BOTH(p, &err, dev->ops->silu_mul(dev, OF(x), OF(out), rows * ld, OF(out), &err));
        CHECK(x3_twin_equal(&p, &out));
        BOTH(p, &err, dev->ops->add(dev, OF(out), OF(x), rows * ld, &err));
        CHECK(x3_twin_equal(&p, &out));
        x3_twin_free(&p, &x);
        x3_twin_free(&p, &w);
        x3_twin_free(&p, &out);
    }
    x3_pair_close(&p);
}

X3_TEST(cuda_add_with_norm_has_the_bits_of_both)
{
    enum { ROWS = 19 };
    static const size_t sizes[] = {96, 512, 513, 4096, 8192, 8200};
    x3_pair p = x3_pair_open();
    const x3_device_ops *ops = p.gpu->ops;
    x3_err err = {0};

    for (int s = 0; s < 6; s++) {
        const size_t n = sizes[s], bytes = ROWS * n * sizeof(float);
        x3_twin x = x3_twin_random(&p, "x", ROWS * n), sum = x3_twin_random(&p, "x", ROWS * n), y = x3_twin_random(&p, "y", ROWS * n);
        x3_twin w = x3_twin_random(&p, "w", n), out = x3_twin_random(&p, "out", ROWS * n), norm = x3_twin_random(&p, "norm", ROWS * n);
        CHECK_OK(ops->add_norm(p.gpu, x.gpu, y.gpu, ROWS, n, w.gpu, 1e-6f, out.gpu, &err), &err);
        CHECK_OK(ops->add(p.gpu, sum.gpu, y.gpu, ROWS * n, &err), &err);
        CHECK_OK(ops->rms_norm(p.gpu, sum.gpu, n, ROWS, n, w.gpu, 1e-6f, norm.gpu, n, &err), &err);
        float *got[4] = {x3_twin_download(&p, &x), x3_twin_download(&p, &sum), x3_twin_download(&p, &out), x3_twin_download(&p, &norm)};
        CHECK_MSG(memcmp(got[0], got[1], bytes) == 0, "sums of %zu", n);
        CHECK_MSG(memcmp(got[2], got[3], bytes) == 0, "norms of %zu", n);
        for (int i = 0; i < 4; i++)
            free(got[i]);
        x3_twin *all[] = {&x, &sum, &y, &w, &out, &norm};
        for (int i = 0; i < 6; i++)
            x3_twin_free(&p, all[i]);
    }
    x3_pair_close(&p);
}

X3_TEST(cuda_rope_equals_the_cpu)
{
    enum { ROWS = 21, HEADS = 3, DIM = 40, LD = HEADS * DIM + 7, POSITIONS = 300 };
    x3_pair p = x3_pair_open();
    x3_twin table = x3_twin_random(&p, "table", POSITIONS * 32);
    int32_t positions[ROWS];
    x3_err err = {0};

    for (int i = 0; i < ROWS; i++)
        positions[i] = (i * 71) % POSITIONS;
    int32_t *d_positions = x3_pair_upload(&p, positions, sizeof positions);
    for (int interleaved = 0; interleaved < 2; interleaved++) {
        x3_twin x = x3_twin_random(&p, "x", ROWS * LD);
        BOTH(p, &err, dev->ops->rope(dev,
                                     &(x3_rope_args){.d_x = OF(x), .ld = LD, .first = 5, .head_stride = DIM, .n_heads = HEADS,
                                                     .n_rotated = 32, .interleaved = interleaved, .d_cos_sin = OF(table)},
                                     &(x3_batch){.n_rows = ROWS, .d_positions = on_gpu ? d_positions : positions}, &err));
        CHECK(x3_twin_equal(&p, &x));
        x3_twin_free(&p, &x);
    }
    x3_device_free(p.gpu, d_positions);
    x3_twin_free(&p, &table);
    x3_pair_close(&p);
}

/* ---- attention ---- */

struct attention_case {
    size_t n_heads, n_kv_heads, k_dim, v_dim, window;
    bool sinks;
};

static void check_attention(const x3_pair *p, const struct attention_case *c)
{
    enum { PAGES = 24, ROWS = 70 + 1 + 131 };
    static const int32_t pages[3][8] = {{5, 2, 9}, {0, 21, 3, 4, 11, 12}, {23, 6, 7, 8, 1}};
    const x3_sequence s[3] = {{.first_row = 0, .n_rows = 70, .position = 0, .pages = pages[0]},
                              {.first_row = 70, .n_rows = 1, .position = 300, .pages = pages[1]},
                              {.first_row = 71, .n_rows = 131, .position = 100, .pages = pages[2]}};
    const size_t kd = c->n_kv_heads * c->k_dim, vd = c->n_kv_heads * c->v_dim;
    x3_twin keys = x3_twin_random(p, "keys", PAGES * 64 * kd), values = x3_twin_random(p, "values", PAGES * 64 * vd + 16);
    x3_twin k = x3_twin_random(p, "k", ROWS * kd), v = x3_twin_random(p, "v", ROWS * vd);
    x3_twin q = x3_twin_random(p, "q", ROWS * c->n_heads * c->k_dim), out = x3_twin_random(p, "o", ROWS * c->n_heads * c->v_dim);
    x3_twin sinks = x3_twin_random(p, "sinks", c->n_heads);
    int32_t positions[ROWS];
    x3_err err = {0};

    for (int i = 0; i < 3; i++)
        for (size_t r = 0; r < s[i].n_rows; r++)
            positions[s[i].first_row + r] = (int32_t)(s[i].position + r);
    int32_t *d_positions = x3_pair_upload(p, positions, sizeof positions);
    BOTH(*p, &err, dev->ops->kv_append(dev,
                                       &(x3_kv_layer){.n_kv_heads = c->n_kv_heads, .k_dim = c->k_dim, .v_dim = c->v_dim,
                                                      .d_keys = OF(keys), .d_values = OF(values)},
                                       &(x3_batch){.n_rows = ROWS, .n_sequences = 3, .sequences = s,
                                                   .d_positions = on_gpu ? d_positions : positions},
                                       OF(k), kd, OF(v), vd, &err));
    CHECK_MSG(x3_twin_equal(p, &keys) && x3_twin_equal(p, &values), "the cache differs");
    /* positions that no row sees may hold anything: behind the end of a sequence */
    for (size_t i = 0; i < PAGES * 64 * vd; i++)
        if (i / (64 * vd) == 22)
            keys.cpu[i % (64 * kd) + 22 * 64 * kd] = values.cpu[i] = NAN;
    for (size_t h = 0; h < c->n_kv_heads; h++)
        for (size_t d = 0; d < c->v_dim; d++)
            values.cpu[((1 * c->n_kv_heads + h) * 64 + 50) * c->v_dim + d] = NAN; /* page 4 of sequence 2: position 306 */
    x3_twin_upload(p, &keys);
    x3_twin_upload(p, &values);
    BOTH(*p, &err, dev->ops->attention(dev,
                                       &(x3_attention_args){.d_q = OF(q), .d_out = OF(out), .n_heads = c->n_heads,
                                                            .kv = &(x3_kv_layer){.n_kv_heads = c->n_kv_heads, .k_dim = c->k_dim,
                                                                                 .v_dim = c->v_dim, .d_keys = OF(keys),
                                                                                 .d_values = OF(values)},
                                                            .scale = 0.4f, .window = c->window,
                                                            .d_sinks = c->sinks ? OF(sinks) : NULL},
                                       &(x3_batch){.n_rows = ROWS, .n_sequences = 3, .sequences = s,
                                                   .d_positions = on_gpu ? d_positions : positions},
                                       &err));
    double e = x3_twin_error(p, &out);
    CHECK_MSG(e < 2e-6, "%zu heads over %zu of %zu and %zu, window %zu, sinks %d: relative error %.3g", c->n_heads, c->n_kv_heads,
              c->k_dim, c->v_dim, c->window, c->sinks, e);
    x3_device_free(p->gpu, d_positions);
    x3_twin *all[] = {&keys, &values, &k, &v, &q, &out, &sinks};
    for (int i = 0; i < 7; i++)
        x3_twin_free(p, all[i]);
}

X3_TEST(cuda_attention_equals_the_cpu_with_window_sinks_and_shared_heads)
{
    static const struct attention_case cases[] = {
        {4, 4, 64, 64, 0, false}, {8, 2, 128, 128, 0, true}, {6, 2, 96, 96, 50, false}, {5, 1, 128, 64, 7, true},
        {2, 1, 256, 256, 0, false}, {4, 1, 192, 512, 200, true}, {3, 3, 40, 80, 0, false},
    };
    x3_pair p = x3_pair_open();

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        check_attention(&p, &cases[i]);
    x3_pair_close(&p);
}

/* ---- score ---- */

X3_TEST(cuda_score_equals_the_cpu)
{
    enum { ROWS = 40, VOCAB = 5003 };
    x3_pair p = x3_pair_open();
    x3_twin reference = x3_twin_random(&p, "reference", ROWS * VOCAB), pack = x3_twin_random(&p, "pack", ROWS * VOCAB);
    x3_score_position got[2][ROWS];
    int32_t next[ROWS];
    x3_err err = {0};

    for (int i = 0; i < ROWS * VOCAB; i++)
        pack.cpu[i] = reference.cpu[i] + 0.3f * pack.cpu[i];
    for (int i = 0; i < ROWS; i++)
        next[i] = i % 5 == 0 ? -1 : i * 113 % VOCAB;
    for (int i = 0; i < VOCAB; i++)
        pack.cpu[7 * VOCAB + i] = reference.cpu[8 * VOCAB + i] = 1; /* ties */
    pack.cpu[3 * VOCAB + 4000] = NAN;
    reference.cpu[9 * VOCAB] = INFINITY;
    x3_twin_upload(&p, &reference);
    x3_twin_upload(&p, &pack);
    BOTH(p, &err, dev->ops->score(dev, OF(reference), OF(pack), ROWS, VOCAB, next, got[on_gpu], &err));
    for (int i = 0; i < ROWS; i++) {
        const x3_score_position *a = &got[0][i], *b = &got[1][i];
        CHECK_MSG(a->finite == b->finite && a->top1 == b->top1 && a->top5 == b->top5, "row %d", i);
        CHECK_MSG(fabs(a->kl - b->kl) < 1e-12 && fabs(a->nll_pack - b->nll_pack) < 1e-11 &&
                      fabs(a->nll_reference - b->nll_reference) < 1e-11, "row %d: KL %.17g and %.17g", i, a->kl, b->kl);
    }
    CHECK(!got[1][3].finite && !got[1][9].finite);
    x3_twin_free(&p, &reference);
    x3_twin_free(&p, &pack);
    x3_pair_close(&p);
}

/* ---- memory ---- */

X3_TEST(cuda_memory_is_counted_and_running_out_of_it_is_said)
{
    x3_pair p = x3_pair_open();
    const size_t before = p.gpu->used_bytes;
    void *blocks[300];
    x3_err err = {0};

    for (size_t i = 0; i < 300; i++)
        CHECK_OK(x3_device_alloc(p.gpu, &blocks[i], 1000 + i, &err), &err);
    CHECK(p.gpu->used_bytes == before + 300 * 1000 + 299 * 150);
    for (size_t i = 0; i < 300; i++)
        x3_device_free(p.gpu, blocks[i * 7 % 300]);
    CHECK(p.gpu->used_bytes == before && p.gpu->peak_bytes >= before + 300000);
    const size_t capacity = p.gpu->capacity_bytes;
    for (int i = 0; i < 2; i++) { /* past the limit; then past what the driver has */
        CHECK(x3_device_alloc(p.gpu, &blocks[0], (size_t)1 << 44, &err) == X3_ERR_MEMORY && blocks[0] == NULL);
        CHECK_MSG(strstr(err.text, "17592186044416 bytes are needed") != NULL && strstr(err.text, "--device cpu") != NULL, "%s", err.text);
        err = (x3_err){0};
        CHECK(p.gpu->used_bytes == before);
        p.gpu->capacity_bytes = SIZE_MAX;
    }
    p.gpu->capacity_bytes = capacity;
    x3_twin x = x3_twin_random(&p, "after", 1000); /* still of use */
    BOTH(p, &err, dev->ops->scale(dev, OF(x), 1000, 2, &err));
    CHECK(x3_twin_equal(&p, &x));
    x3_twin_free(&p, &x);
    x3_pair_close(&p);
}

X3_TEST(cuda_device_that_does_not_exist_is_refused)
{
    x3_pair p = x3_pair_open();
    x3_device *dev = NULL;
    x3_err err = {0};

    CHECK_FAILS(x3_device_open(&dev, "cuda:77", 1, &err), &err, "numbered from 0");
    CHECK_FAILS(x3_device_open(&dev, "cuda:x", 1, &err), &err, "unknown");
    x3_pair_close(&p);
}
