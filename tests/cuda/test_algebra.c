/* Calibration sums, algebra, element-wise operations and LDLQ of the CUDA device against the CPU's. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/trellis.h"
#include "tests/cuda/device_pair.h"
#include "tests/test.h"

/* ---- second moments ---- */

static void check_gram(const x3_pair *p, size_t n, size_t rows, bool both)
{
    x3_twin x = x3_twin_random(p, "x", rows * n), y = x3_twin_random(p, "y", rows * n), a = x3_twin_random(p, "a", n * n);
    double error = 0, sum = 0;
    x3_err err = {0};

    for (size_t r = 0; r < rows; r++) /* columns of very different size, one of them with an outlier */
        for (size_t i = 0; i < n; i++)
            x.cpu[r * n + i] *= (i % 5 == 1 ? 1e-4f : i % 5 == 2 ? 300.0f : 1.0f) * (i == 9 && r == 3 ? 1000.0f : 1.0f);
    memset(a.cpu, 0, n * n * 4);
    x3_twin_upload(p, &x);
    x3_twin_upload(p, &a);
    for (int twice = 0; twice < 2; twice++)
        BOTH(*p, &err, dev->ops->gram(dev, OF(x), both ? OF(y) : OF(x), rows, n, OF(a), &err));
    if (!both)
        BOTH(*p, &err, dev->ops->mirror(dev, OF(a), n, &err));
    float *got = x3_twin_download(p, &a);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < n; j++) {
            double exact = 0, size = 0;
            for (size_t r = 0; r < rows; r++) {
                double u = x.cpu[r * n + i], v = both ? y.cpu[r * n + j] : x.cpu[r * n + j];
                exact += 2 * u * v;
                size += 4 * u * u * v * v;
            }
            error += (got[i * n + j] - exact) * (got[i * n + j] - exact) / size; /* relative to what float32 sums could lose */
            sum += 1;
        }
    CHECK_MSG(sqrt(error / sum) < 2e-6, "%zu inputs, %zu rows, two matrices %d: %.3g", n, rows, both, sqrt(error / sum));
    free(got);
    x3_twin_free(p, &x);
    x3_twin_free(p, &y);
    x3_twin_free(p, &a);
}

X3_TEST(cuda_second_moments_are_as_good_as_float32)
{
    x3_pair p = x3_pair_open();

    check_gram(&p, 128, 400, false);
    check_gram(&p, 128, 400, true);
    check_gram(&p, 77, 1000, false);
    check_gram(&p, 77, 33, true);
    check_gram(&p, 2100, 24, false); /* more than one block of the triangle */
    x3_pair_close(&p);
}

X3_TEST(cuda_finds_and_drops_rows_that_are_not_finite)
{
    enum { ROWS = 600, N = 70 };
    x3_pair p = x3_pair_open();
    x3_twin x = x3_twin_random(&p, "x", ROWS * N), y = x3_twin_random(&p, "y", ROWS * N);
    size_t n_bad[2];
    bool finite[2];
    x3_err err = {0};

    BOTH(p, &err, dev->ops->all_finite(dev, OF(x), ROWS * N, &finite[on_gpu], &err));
    CHECK(finite[0] && finite[1]);
    x.cpu[5] = NAN;
    x.cpu[ROWS * N - 1] = -INFINITY;
    y.cpu[100 * N + 3] = INFINITY;
    y.cpu[0] = NAN;
    x3_twin_upload(&p, &x);
    x3_twin_upload(&p, &y);
    BOTH(p, &err, dev->ops->all_finite(dev, OF(x) + 6, ROWS * N - 7, &finite[on_gpu], &err));
    CHECK(finite[0] && finite[1]);
    BOTH(p, &err, dev->ops->all_finite(dev, OF(x) + 6, ROWS * N - 6, &finite[on_gpu], &err));
    CHECK(!finite[0] && !finite[1]);
    BOTH(p, &err, dev->ops->drop_nonfinite(dev, OF(x), OF(y), ROWS, N, &n_bad[on_gpu], &err));
    CHECK(n_bad[0] == 3 && n_bad[1] == 3);
    CHECK(x3_twin_equal(&p, &x) && x3_twin_equal(&p, &y));
    BOTH(p, &err, dev->ops->drop_nonfinite(dev, OF(x), NULL, ROWS, N, &n_bad[on_gpu], &err));
    CHECK(n_bad[0] == 0 && n_bad[1] == 0);
    x3_twin_free(&p, &x);
    x3_twin_free(&p, &y);
    x3_pair_close(&p);
}

/* ---- algebra ---- */

X3_TEST(cuda_gemm_equals_the_cpu_for_every_transposition)
{
    enum { M = 130, N = 77, K = 300, LD = 310 };
    x3_pair p = x3_pair_open();
    x3_err err = {0};

    for (int i = 0; i < 4; i++) {
        const bool ta = i & 1, tb = i & 2;
        x3_twin a = x3_twin_random(&p, "a", LD * LD), b = x3_twin_random(&p, "b", LD * LD), c = x3_twin_random(&p, "c", M * LD);
        BOTH(p, &err, dev->ops->gemm(dev, ta, tb, M, N, K, 0.5f, OF(a), LD, OF(b), LD, i == 3 ? 0 : 2, OF(c), LD, &err));
        CHECK_MSG(x3_twin_error(&p, &c) < 1e-6, "transposed %d %d: %.3g", ta, tb, x3_twin_error(&p, &c));
        x3_twin_free(&p, &a);
        x3_twin_free(&p, &b);
        x3_twin_free(&p, &c);
    }
    x3_pair_close(&p);
}

/* a [n][n] symmetric positive definite, from rows with neighbours alike. */
static x3_twin positive_definite(const x3_pair *p, size_t n)
{
    x3_twin x = x3_twin_random(p, "rows", 2 * n * n), a = x3_twin_random(p, "a", n * n);
    x3_err err = {0};

    memset(a.cpu, 0, n * n * 4);
    for (size_t r = 0; r < 2 * n; r++)
        for (size_t i = 1; i < n; i++)
            x.cpu[r * n + i] += x.cpu[r * n + i - 1] / 2;
    CHECK_OK(p->cpu->ops->gram(p->cpu, x.cpu, x.cpu, 2 * n, n, a.cpu, &err), &err);
    CHECK_OK(p->cpu->ops->mirror(p->cpu, a.cpu, n, &err), &err);
    CHECK_OK(p->cpu->ops->scale(p->cpu, a.cpu, n * n, 1 / (2 * (float)n), &err), &err);
    x3_twin_upload(p, &a);
    x3_twin_free(p, &x);
    return a;
}

X3_TEST(cuda_solve_and_block_ldl_equal_the_cpu)
{
    enum { N = 416, M = 1100 };
    x3_pair p = x3_pair_open();
    x3_twin a = positive_definite(&p, N), b = x3_twin_random(&p, "b", M * N);
    x3_err err = {0};

    BOTH(p, &err, dev->ops->spd_solve(dev, OF(a), N, OF(b), M, &err));
    CHECK_MSG(x3_twin_error(&p, &b) < 1e-6, "solve: %.3g", x3_twin_error(&p, &b));
    BOTH(p, &err, dev->ops->block_ldl(dev, OF(a), N, &err));
    CHECK_MSG(x3_twin_error(&p, &a) < 1e-6, "L: %.3g", x3_twin_error(&p, &a));
    x3_twin_free(&p, &a);
    a = positive_definite(&p, N);
    a.cpu[5 * N + 5] = -1;
    x3_twin_upload(&p, &a);
    CHECK(p.gpu->ops->spd_solve(p.gpu, a.gpu, N, b.gpu, M, &err) == X3_ERR_NUMERIC);
    err = (x3_err){0};
    CHECK_FAILS(p.gpu->ops->block_ldl(p.gpu, a.gpu, N, &err), &err, "not positive definite at row 5");
    x3_twin_free(&p, &a);
    x3_twin_free(&p, &b);
    x3_pair_close(&p);
}

/* ---- element-wise ---- */

X3_TEST(cuda_elementwise_operations_equal_the_cpu)
{
    enum { R = 256, C = 384 };
    x3_pair p = x3_pair_open();
    x3_twin x = x3_twin_random(&p, "x", R * C), y = x3_twin_random(&p, "y", R * C), s = x3_twin_random(&p, "s", C);
    x3_twin wide = x3_twin_random(&p, "wide", 400 * 300), out = x3_twin_random(&p, "out", 512 * 384);
    x3_err err = {0};

    BOTH(p, &err, dev->ops->scale_rows(dev, OF(x), R, C, OF(s), &err));
    CHECK(x3_twin_equal(&p, &x));
    BOTH(p, &err, dev->ops->scale_cols(dev, OF(x), R, C, OF(s), &err));
    CHECK(x3_twin_equal(&p, &x));
    BOTH(p, &err, dev->ops->multiply(dev, OF(x), OF(y), R * C, &err));
    CHECK(x3_twin_equal(&p, &x));
    BOTH(p, &err, dev->ops->scale(dev, OF(x), R * C, 1.7f, &err));
    CHECK(x3_twin_equal(&p, &x));
    BOTH(p, &err, dev->ops->axpy(dev, -0.3f, OF(y), OF(x), R * C, &err));
    CHECK(x3_twin_equal(&p, &x));
    BOTH(p, &err, dev->ops->add_diagonal(dev, OF(x), R, OF(s), &err));
    CHECK(x3_twin_equal(&p, &x));
    BOTH(p, &err, dev->ops->mirror(dev, OF(x), R, &err));
    CHECK(x3_twin_equal(&p, &x));
    BOTH(p, &err, dev->ops->hadamard_rows(dev, OF(x), R, C, &err));
    CHECK(x3_twin_equal(&p, &x));
    BOTH(p, &err, dev->ops->hadamard_cols(dev, OF(x), R, C, &err));
    CHECK(x3_twin_equal(&p, &x));
    BOTH(p, &err, dev->ops->transpose_pad(dev, OF(wide), 300, 400, OF(out), 384, 512, &err));
    CHECK(x3_twin_equal(&p, &out));
    BOTH(p, &err, dev->ops->copy_2d(dev, OF(out) + 3, 130, OF(x) + 7, C, 100, 120, &err));
    CHECK(x3_twin_equal(&p, &out));
    BOTH(p, &err, dev->ops->copy(dev, OF(out), OF(y), 1000, &err));
    BOTH(p, &err, dev->ops->zero(dev, OF(out) + 500, 4000, &err));
    CHECK(x3_twin_equal(&p, &out));
    x3_twin *all[] = {&x, &y, &s, &wide, &out};
    for (int i = 0; i < 5; i++)
        x3_twin_free(&p, all[i]);
    x3_pair_close(&p);
}

X3_TEST(cuda_sums_of_rows_and_columns_equal_the_cpu)
{
    enum { R = 700, C = 333 };
    x3_pair p = x3_pair_open();
    x3_twin x = x3_twin_random(&p, "x", R * C), y = x3_twin_random(&p, "y", R * C);
    double *cpu = malloc(R * sizeof *cpu), *got = malloc(R * sizeof *got), *gpu = x3_pair_upload(&p, cpu, R * sizeof *cpu);
    x3_err err = {0};

    for (int by_row = 0; by_row < 2; by_row++) {
        const size_t n = by_row ? R : C;
        if (by_row)
            BOTH(p, &err, dev->ops->row_dots(dev, OF(x), OF(y), R, C, on_gpu ? gpu : cpu, &err));
        else
            BOTH(p, &err, dev->ops->col_dots(dev, OF(x), OF(y), R, C, on_gpu ? gpu : cpu, &err));
        CHECK_OK(p.gpu->ops->download(p.gpu, got, gpu, n * sizeof *got, &err), &err);
        for (size_t i = 0; i < n; i++)
            CHECK_MSG(fabs(got[i] - cpu[i]) < 1e-10, "%s %zu: %.17g and %.17g", by_row ? "row" : "column", i, got[i], cpu[i]);
    }
    x3_device_free(p.gpu, gpu);
    free(cpu);
    free(got);
    x3_twin_free(&p, &x);
    x3_twin_free(&p, &y);
    x3_pair_close(&p);
}

/* ---- LDLQ ---- */

enum { N_IN = 288, N_JOBS = 3 }; /* more than two blocks of rows, the last not whole */

struct jobs {
    x3_twin w[N_JOBS], q[N_JOBS];
    uint32_t *words[N_JOBS], *d_words[N_JOBS];
    x3_ldlq_job cpu[N_JOBS], gpu[N_JOBS];
};

static struct jobs make_jobs(const x3_pair *p, int K)
{
    static const size_t cols[N_JOBS] = {128, 48, 160};
    struct jobs j = {0};
    x3_err err = {0};

    for (int i = 0; i < N_JOBS; i++) {
        const int k = i == 1 ? K % 8 + 1 : K; /* one of another K between */
        const size_t n_words = N_IN / 16 * (cols[i] / 16) * 8 * (size_t)k;
        char name[8] = {'w', (char)('0' + i)};
        j.w[i] = x3_twin_random(p, name, N_IN * cols[i]);
        j.q[i] = x3_twin_random(p, "q", N_IN * cols[i]);
        CHECK_OK(x3_alloc(&j.words[i], n_words, 4, &err), &err);
        j.d_words[i] = x3_pair_upload(p, j.words[i], n_words * 4);
        j.cpu[i] = (x3_ldlq_job){.codebook = X3_CB_MUL1, .K = k, .n_out = cols[i], .d_w = j.w[i].cpu, .d_q = j.q[i].cpu,
                                 .d_words = j.words[i]};
        j.gpu[i] = j.cpu[i];
        j.gpu[i].d_w = j.w[i].gpu;
        j.gpu[i].d_q = j.q[i].gpu;
        j.gpu[i].d_words = j.d_words[i];
    }
    return j;
}

static void free_jobs(const x3_pair *p, struct jobs *j)
{
    for (int i = 0; i < N_JOBS; i++) {
        x3_twin_free(p, &j->w[i]);
        x3_twin_free(p, &j->q[i]);
        x3_device_free(p->gpu, j->d_words[i]);
        free(j->words[i]);
    }
}

/* tr(E' A E), E = w - q. */
static double proxy_error(const float *a, const float *w, const float *q, size_t n_cols)
{
    double sum = 0;

    for (size_t c = 0; c < n_cols; c++)
        for (size_t i = 0; i < N_IN; i++) {
            double row = 0;
            for (size_t k = 0; k < N_IN; k++)
                row += (double)a[i * N_IN + k] * (w[k * n_cols + c] - q[k * n_cols + c]);
            sum += row * (w[i * n_cols + c] - q[i * n_cols + c]);
        }
    return sum;
}

X3_TEST(cuda_ldlq_without_feedback_gives_the_codes_of_the_cpu)
{
    x3_pair p = x3_pair_open();
    x3_err err = {0};

    for (int K = 1; K <= 8; K += 2) {
        struct jobs j = make_jobs(&p, K);
        BOTH(p, &err, dev->ops->ldlq(dev, NULL, N_IN, on_gpu ? j.gpu : j.cpu, N_JOBS, &err));
        for (int i = 0; i < N_JOBS; i++) {
            const size_t n_words = N_IN / 16 * (j.cpu[i].n_out / 16) * 8 * (size_t)j.cpu[i].K;
            uint32_t *got = malloc(n_words * 4);
            CHECK_OK(p.gpu->ops->download(p.gpu, got, j.d_words[i], n_words * 4, &err), &err);
            CHECK_MSG(memcmp(got, j.words[i], n_words * 4) == 0, "K = %d, job %d: other words", K, i);
            CHECK_MSG(x3_twin_equal(&p, &j.q[i]), "K = %d, job %d: other values", K, i);
            free(got);
        }
        free_jobs(&p, &j);
    }
    x3_pair_close(&p);
}

X3_TEST(cuda_ldlq_is_as_good_as_the_cpus_and_the_same_twice)
{
    x3_pair p = x3_pair_open();
    x3_twin a = positive_definite(&p, N_IN), l = positive_definite(&p, N_IN);
    x3_err err = {0};

    CHECK_OK(p.cpu->ops->block_ldl(p.cpu, l.cpu, N_IN, &err), &err);
    x3_twin_upload(&p, &l);
    for (int K = 2; K <= 6; K += 2) {
        struct jobs j = make_jobs(&p, K);
        double sums[2] = {0, 0};
        BOTH(p, &err, dev->ops->ldlq(dev, OF(l), N_IN, on_gpu ? j.gpu : j.cpu, N_JOBS, &err));
        for (int i = 0; i < N_JOBS; i++) {
            const size_t n_out = j.cpu[i].n_out, last = (N_IN - 16) * n_out;
            float *q = x3_twin_download(&p, &j.q[i]);
            CHECK_MSG(memcmp(q + last, j.q[i].cpu + last, 16 * n_out * 4) == 0, "K = %d: the first row of tiles differs", K);
            sums[0] += proxy_error(a.cpu, j.w[i].cpu, j.q[i].cpu, n_out);
            sums[1] += proxy_error(a.cpu, j.w[i].cpu, q, n_out);
            CHECK_OK(p.gpu->ops->ldlq(p.gpu, l.gpu, N_IN, j.gpu, N_JOBS, &err), &err);
            float *again = x3_twin_download(&p, &j.q[i]);
            CHECK_MSG(memcmp(q, again, N_IN * n_out * 4) == 0, "K = %d: a second run gives other codes", K);
            free(again);
            free(q);
        }
        printf("    K = %d: error over the CPU's %.4f\n", K, sums[1] / sums[0]);
        CHECK_MSG(fabs(sums[1] / sums[0] - 1) < 0.02, "K = %d: error %.6g, the CPU's %.6g", K, sums[1], sums[0]);
        free_jobs(&p, &j);
    }
    x3_twin_free(&p, &a);
    x3_twin_free(&p, &l);
    x3_pair_close(&p);
}

X3_TEST(cuda_decode_equals_the_cpu)
{
    enum { IN = 256, OUT = 384 };
    x3_pair p = x3_pair_open();
    x3_err err = {0};

    for (int K = 1; K <= 8; K++)
        for (int cb = 0; cb < 3; cb++) {
            x3_twin words = x3_twin_random(&p, "words", IN / 16 * (OUT / 16) * 8 * (size_t)K), out = x3_twin_random(&p, "o", IN * OUT);
            BOTH(p, &err, dev->ops->decode(dev,
                                           &(x3_weight){.kind = X3_WEIGHT_EXL3, .n_in = IN, .n_out = OUT, .n_in_padded = IN,
                                                        .n_out_padded = OUT, .K = K, .codebook = (x3_codebook)cb, .data = OF(words)},
                                           OF(out), &err));
            CHECK_MSG(x3_twin_equal(&p, &out), "K = %d, codebook %d", K, cb);
            x3_twin_free(&p, &words);
            x3_twin_free(&p, &out);
        }
    x3_pair_close(&p);
}
