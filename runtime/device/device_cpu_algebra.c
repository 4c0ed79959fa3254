/* Dense algebra of the CPU device on OpenBLAS, one thread a call, cut into blocks that depend on the sizes alone. The
 * factorizations are in float64. */
#include <cblas.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/device_cpu.h"

#define BLOCK 256 /* rows and columns of a result that one call computes */
#define FACTOR 192

void dpotrf_(const char *uplo, const int *n, double *a, const int *lda, int *info);

struct gemm_work {
    bool ta, tb, lower_only;
    size_t m, n, k, lda, ldb, ldc, n_cols;
    float alpha, beta;
    const float *a, *b;
    float *c;
};

static void gemm_item(void *arg, size_t item, int thread)
{
    const struct gemm_work *t = arg;
    size_t i = item / t->n_cols * BLOCK, j = item % t->n_cols * BLOCK;

    (void)thread;
    if (t->lower_only && j > i)
        return;
    cblas_sgemm(CblasRowMajor, t->ta ? CblasTrans : CblasNoTrans, t->tb ? CblasTrans : CblasNoTrans,
                (int)x3_min_size(BLOCK, t->m - i), (int)x3_min_size(BLOCK, t->n - j), (int)t->k, t->alpha,
                t->ta ? t->a + i : t->a + i * t->lda, (int)t->lda, t->tb ? t->b + j * t->ldb : t->b + j, (int)t->ldb,
                t->beta, t->c + i * t->ldc + j, (int)t->ldc);
}

static void run_gemm(x3_device *dev, struct gemm_work *t)
{
    t->n_cols = (t->n + BLOCK - 1) / BLOCK;
    x3_pool_run(x3_cpu(dev)->pool, (t->m + BLOCK - 1) / BLOCK * t->n_cols, gemm_item, t);
}

x3_status x3_cpu_gemm(x3_device *dev, bool ta, bool tb, size_t m, size_t n, size_t k, float alpha, const float *a,
                      size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc, x3_err *err)
{
    struct gemm_work t = {.ta = ta, .tb = tb, .m = m, .n = n, .k = k, .alpha = alpha, .a = a, .lda = lda,
                          .b = b, .ldb = ldb, .beta = beta, .c = c, .ldc = ldc};

    (void)err;
    run_gemm(dev, &t);
    return X3_OK;
}

x3_status x3_cpu_gram(x3_device *dev, const float *x, const float *y, size_t n_rows, size_t n, float *a, x3_err *err)
{
    struct gemm_work t = {.ta = true, .lower_only = x == y, .m = n, .n = n, .k = n_rows, .alpha = 1, .a = x, .lda = n,
                          .b = y, .ldb = n, .beta = 1, .c = a, .ldc = n};

    (void)err;
    run_gemm(dev, &t);
    return X3_OK;
}

x3_status x3_cpu_mirror(x3_device *dev, float *a, size_t n, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < i; j++)
            a[j * n + i] = a[i * n + j];
    return X3_OK;
}

/* ---- Cholesky: a = G G^T, right-looking over FACTOR x FACTOR blocks of the lower triangle ---- */

struct factor_work {
    double *g;
    size_t n, at; /* first row of the current diagonal block */
    const float *a;
    float *l;
    float *b;
    size_t m;
    double **rows; /* scratch of a thread */
};

static void panel_item(void *arg, size_t item, int thread)
{
    const struct factor_work *t = arg;
    size_t width = x3_min_size(FACTOR, t->n - t->at), row = t->at + width + item * FACTOR;

    (void)thread;
    cblas_dtrsm(CblasRowMajor, CblasRight, CblasLower, CblasTrans, CblasNonUnit, (int)x3_min_size(FACTOR, t->n - row),
                (int)width, 1, t->g + t->at * t->n + t->at, (int)t->n, t->g + row * t->n + t->at, (int)t->n);
}

static void update_item(void *arg, size_t item, int thread)
{
    const struct factor_work *t = arg;
    size_t i = 0;

    (void)thread;
    while ((i + 1) * (i + 2) / 2 <= item)
        i++;
    size_t j = item - i * (i + 1) / 2, first = t->at + FACTOR;
    size_t row = first + i * FACTOR, column = first + j * FACTOR;
    cblas_dgemm(CblasRowMajor, CblasNoTrans, CblasTrans, (int)x3_min_size(FACTOR, t->n - row),
                (int)x3_min_size(FACTOR, t->n - column), FACTOR, -1, t->g + row * t->n + t->at, (int)t->n,
                t->g + column * t->n + t->at, (int)t->n, 1, t->g + row * t->n + column, (int)t->n);
}

static x3_status cholesky(x3_device *dev, double *g, size_t n, x3_err *err)
{
    struct factor_work t = {.g = g, .n = n};

    for (t.at = 0; t.at < n; t.at += FACTOR) {
        int width = (int)x3_min_size(FACTOR, n - t.at), ld = (int)n, info = 0;
        /* row-major lower is column-major upper */
        dpotrf_("U", &width, g + t.at * n + t.at, &ld, &info);
        if (info != 0)
            return x3_fail(err, X3_ERR_NUMERIC, "matrix of %zu is not positive definite at row %zu", n,
                           t.at + (size_t)(info > 0 ? info - 1 : 0));
        if (t.at + (size_t)width == n)
            break;
        size_t blocks = (n - t.at - FACTOR + FACTOR - 1) / FACTOR;
        x3_pool_run(x3_cpu(dev)->pool, blocks, panel_item, &t);
        x3_pool_run(x3_cpu(dev)->pool, blocks * (blocks + 1) / 2, update_item, &t);
    }
    return X3_OK;
}

static x3_status factor(x3_device *dev, const float *a, size_t n, double **g, x3_err *err)
{
    x3_status rc = x3_alloc(g, n * n, sizeof **g, err);

    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j <= i; j++)
            (*g)[i * n + j] = a[i * n + j];
    return cholesky(dev, *g, n, err);
}

#define SOLVE_ROWS 32

static void solve_item(void *arg, size_t item, int thread)
{
    const struct factor_work *t = arg;
    size_t first = item * SOLVE_ROWS, n_rows = x3_min_size(SOLVE_ROWS, t->m - first);
    double *x = t->rows[thread];
    float *b = t->b + first * t->n;

    for (size_t i = 0; i < n_rows * t->n; i++)
        x[i] = b[i];
    cblas_dtrsm(CblasRowMajor, CblasRight, CblasLower, CblasTrans, CblasNonUnit, (int)n_rows, (int)t->n, 1, t->g,
                (int)t->n, x, (int)t->n);
    cblas_dtrsm(CblasRowMajor, CblasRight, CblasLower, CblasNoTrans, CblasNonUnit, (int)n_rows, (int)t->n, 1, t->g,
                (int)t->n, x, (int)t->n);
    for (size_t i = 0; i < n_rows * t->n; i++)
        b[i] = (float)x[i];
}

x3_status x3_cpu_spd_solve(x3_device *dev, const float *a, size_t n, float *b, size_t m, x3_err *err)
{
    struct factor_work t = {.n = n, .b = b, .m = m};
    int n_threads = x3_pool_threads(x3_cpu(dev)->pool);
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&t.rows, (uint64_t)n_threads, sizeof *t.rows, err));
    for (int i = 0; i < n_threads; i++)
        X3_TRY(rc, out, x3_alloc(&t.rows[i], SOLVE_ROWS * n, sizeof(double), err));
    X3_TRY(rc, out, factor(dev, a, n, &t.g, err));
    x3_pool_run(x3_cpu(dev)->pool, (m + SOLVE_ROWS - 1) / SOLVE_ROWS, solve_item, &t);
out:
    for (int i = 0; t.rows != NULL && i < n_threads; i++)
        free(t.rows[i]);
    free(t.rows);
    free(t.g);
    return rc;
}

/* L of column block j = G of column block j times the inverse of its diagonal block. */
static void ldl_item(void *arg, size_t item, int thread)
{
    const struct factor_work *t = arg;
    size_t at = item * X3_TILE, below = at + X3_TILE, n = t->n;

    (void)thread;
    if (below < n)
        cblas_dtrsm(CblasRowMajor, CblasRight, CblasLower, CblasNoTrans, CblasNonUnit, (int)(n - below), X3_TILE, 1,
                    t->g + at * n + at, (int)n, t->g + below * n + at, (int)n);
    for (size_t r = 0; r < n; r++)
        for (size_t c = at; c < below; c++)
            t->l[r * n + c] = r >= below ? (float)t->g[r * n + c] : r == c ? 1.0f : 0.0f;
}

x3_status x3_cpu_block_ldl(x3_device *dev, float *a, size_t n, x3_err *err)
{
    struct factor_work t = {.n = n, .l = a};
    x3_status rc = factor(dev, a, n, &t.g, err);

    if (rc == X3_OK)
        x3_pool_run(x3_cpu(dev)->pool, n / X3_TILE, ldl_item, &t);
    free(t.g);
    return rc;
}
