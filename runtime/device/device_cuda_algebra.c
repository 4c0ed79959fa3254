/* Dense algebra of the CUDA device. Second moments: float16 pairs on the tensor cores (three products, so that 2^-22 of the
 * largest value of a column is kept); other products in float32 by cuBLAS, never TF32; factorizations in float64 by cuSOLVER. */
#include "runtime/device/device_cuda.h"

#define GRAM_ROWS 8192
#define GRAM_BLOCK 2048 /* rows of the triangle that are computed at a time, each up to its own diagonal */

typedef struct halves {
    uint16_t *high, *low;
    float *unit;
} halves;

static halves carve_halves(x3_cuda_buffer *scratch, size_t *at, size_t n_rows, size_t ld)
{
    halves h;

    h.high = x3_cuda_carve(scratch, at, n_rows * ld * 2);
    h.low = x3_cuda_carve(scratch, at, n_rows * ld * 2);
    h.unit = x3_cuda_carve(scratch, at, ld * sizeof(float));
    return h;
}

/* Rows [first, first + m) of p [..][ld] = x^T y over n_rows rows, columns [0, n). */
static x3_status gram_block(x3_device_cuda *cuda, const halves *x, const halves *y, size_t n_rows, size_t ld, size_t first, size_t m,
                            size_t n, float *d_p, x3_err *err)
{
    const uint16_t *const a[3] = {x->high, x->low, x->high}, *const b[3] = {y->high, y->high, y->low};
    x3_cuda_product p = {.ta = true, .m = m, .n = n, .k = n_rows, .lda = ld, .ldb = ld, .ldc = ld, .d_c = d_p + first * ld};
    x3_status rc = X3_OK;

    for (int i = 0; i < 3 && rc == X3_OK; i++) {
        p.d_a = a[i] + first;
        p.d_b = b[i];
        rc = x3_cuda_multiply_f16(cuda, &p, err);
        p.beta = 1;
    }
    return rc;
}

static x3_status gram_chunk(x3_device_cuda *cuda, const float *d_x, const float *d_y, size_t n_rows, size_t n, float *d_a,
                            x3_err *err)
{
    const size_t ld = x3_round_up(n, 8);
    const bool lower = d_x == d_y;
    halves x, y;
    uint32_t *largest;
    float *product;
    size_t at = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->scratch, (lower ? 1 : 2) * (n_rows * ld * 4 + ld * 4) + ld * 4 + n * ld * 4 + 4096,
                                    err));
    largest = x3_cuda_carve(&cuda->scratch, &at, ld * sizeof *largest);
    product = x3_cuda_carve(&cuda->scratch, &at, n * ld * sizeof *product);
    x = y = carve_halves(&cuda->scratch, &at, n_rows, ld);
    X3_TRY(rc, out, x3_cuda_split_cols(d_x, n, n_rows, n, x.high, x.low, ld, largest, x.unit, cuda->stream, err));
    if (!lower) {
        y = carve_halves(&cuda->scratch, &at, n_rows, ld);
        X3_TRY(rc, out, x3_cuda_split_cols(d_y, n, n_rows, n, y.high, y.low, ld, largest, y.unit, cuda->stream, err));
    }
    for (size_t first = 0; first < n; first += GRAM_BLOCK) {
        const size_t m = x3_min_size(GRAM_BLOCK, n - first);
        X3_TRY(rc, out, gram_block(cuda, &x, &y, n_rows, ld, first, m, lower ? first + m : n, product, err));
    }
    rc = x3_cuda_add_product(d_a, product, n, ld, x.unit, y.unit, lower, cuda->stream, err);
out:
    return rc;
}

x3_status x3_cuda_op_gram(x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n, float *d_a, x3_err *err)
{
    x3_status rc = X3_OK;

    for (size_t first = 0; first < n_rows && rc == X3_OK; first += GRAM_ROWS)
        rc = gram_chunk(x3_cuda(dev), d_x + first * n, d_y + first * n, x3_min_size(GRAM_ROWS, n_rows - first), n, d_a, err);
    return rc;
}

static x3_status count_bad(x3_device *dev, float *d_x, float *d_y, size_t n_rows, size_t n, bool clear, uint32_t *n_bad, x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    uint32_t *d_bad = cuda->d_small;
    x3_status rc;

    X3_TRY(rc, out, dev->ops->zero(dev, d_bad, sizeof *d_bad, err));
    X3_TRY(rc, out, x3_cuda_bad_rows(d_x, d_y, n_rows, n, clear, d_bad, cuda->stream, err));
    rc = dev->ops->download(dev, n_bad, d_bad, sizeof *d_bad, err);
out:
    return rc;
}

x3_status x3_cuda_op_all_finite(x3_device *dev, const float *d_x, size_t n, bool *finite, x3_err *err)
{
    const size_t row = 16384, whole = n / row;
    uint32_t n_bad = 0, more = 0;
    float *x = (float *)(uintptr_t)d_x; /* nothing is cleared */
    x3_status rc = count_bad(dev, x, NULL, whole, row, false, &n_bad, err);

    if (rc == X3_OK && n % row > 0)
        rc = count_bad(dev, x + whole * row, NULL, 1, n % row, false, &more, err);
    *finite = n_bad + more == 0;
    return rc;
}

x3_status x3_cuda_op_drop_nonfinite(x3_device *dev, float *d_x, float *d_y, size_t n_rows, size_t n, size_t *n_bad, x3_err *err)
{
    uint32_t bad = 0;
    x3_status rc = count_bad(dev, d_x, d_y, n_rows, n, true, &bad, err);

    *n_bad = bad;
    return rc;
}

x3_status x3_cuda_op_gemm(x3_device *dev, bool ta, bool tb, size_t m, size_t n, size_t k, float alpha, const float *d_a, size_t lda,
                          const float *d_b, size_t ldb, float beta, float *d_c, size_t ldc, x3_err *err)
{
    if (m == 0 || n == 0)
        return X3_OK;
    return x3_cuda_blas_result(cublasSgemm(x3_cuda(dev)->blas, tb ? CUBLAS_OP_T : CUBLAS_OP_N, ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                                           (int)n, (int)m, (int)k, &alpha, d_b, (int)ldb, d_a, (int)lda, &beta, d_c, (int)ldc),
                               "float32 product", err);
}

x3_status x3_cuda_op_mirror(x3_device *dev, float *d_a, size_t n, x3_err *err)
{
    return x3_cuda_mirror(d_a, n, x3_cuda(dev)->stream, err);
}

/* ---- Cholesky ---- */

/* A row-major lower triangle is a column-major upper one. Carves *g [n][n] and whatever the factorization needs; `more` bytes
 * are reserved behind. */
static x3_status factor(x3_device_cuda *cuda, const float *d_a, size_t n, size_t more, size_t *at, double **g, x3_err *err)
{
    int n_work = 0, info = 0, *d_info = cuda->d_small;
    double *work;
    x3_status rc;

    if (n > 46340)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "matrix of %zu: 46340 at most on this device", n);
    X3_TRY(rc, out, x3_cuda_solver_result(cusolverDnDpotrf_bufferSize(cuda->solver, CUBLAS_FILL_MODE_UPPER, (int)n, NULL, (int)n,
                                                                      &n_work), "Cholesky", err));
    X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->scratch, n * n * 8 + (size_t)n_work * 8 + more + 1024, err));
    *g = x3_cuda_carve(&cuda->scratch, at, n * n * 8);
    work = x3_cuda_carve(&cuda->scratch, at, (size_t)n_work * 8);
    X3_TRY(rc, out, x3_cuda_widen(d_a, n * n, *g, cuda->stream, err));
    X3_TRY(rc, out, x3_cuda_solver_result(cusolverDnDpotrf(cuda->solver, CUBLAS_FILL_MODE_UPPER, (int)n, *g, (int)n, work, n_work,
                                                           d_info), "Cholesky", err));
    X3_TRY(rc, out, cuda->base.ops->download(&cuda->base, &info, d_info, sizeof info, err));
    if (info != 0)
        rc = x3_fail(err, X3_ERR_NUMERIC, "matrix of %zu is not positive definite at row %d", n, info > 0 ? info - 1 : 0);
out:
    return rc;
}

#define SOLVE_ROWS 1024

x3_status x3_cuda_op_spd_solve(x3_device *dev, const float *d_a, size_t n, float *d_b, size_t m, x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    const size_t at_once = x3_min_size(m, SOLVE_ROWS);
    double *g, *right;
    size_t at = 0;
    x3_status rc;

    X3_TRY(rc, out, factor(cuda, d_a, n, at_once * n * 8, &at, &g, err));
    right = x3_cuda_carve(&cuda->scratch, &at, at_once * n * 8);
    for (size_t first = 0; first < m; first += at_once) {
        const size_t rows = x3_min_size(at_once, m - first);
        X3_TRY(rc, out, x3_cuda_widen(d_b + first * n, rows * n, right, cuda->stream, err));
        X3_TRY(rc, out, x3_cuda_solver_result(cusolverDnDpotrs(cuda->solver, CUBLAS_FILL_MODE_UPPER, (int)n, (int)rows, g, (int)n,
                                                               right, (int)n, cuda->d_small), "solving", err));
        X3_TRY(rc, out, x3_cuda_narrow(right, rows * n, d_b + first * n, cuda->stream, err));
    }
out:
    return rc;
}

x3_status x3_cuda_op_block_ldl(x3_device *dev, float *d_a, size_t n, x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    size_t at = 0;
    double *g;
    x3_status rc = factor(cuda, d_a, n, 0, &at, &g, err);

    return rc == X3_OK ? x3_cuda_block_unit(g, n, d_a, cuda->stream, err) : rc;
}

uint64_t x3_cuda_algebra_scratch(x3_device_cuda *cuda, size_t n)
{
    const uint64_t ld = x3_round_up(n, 128);
    int n_work = 0;

    if (cusolverDnDpotrf_bufferSize(cuda->solver, CUBLAS_FILL_MODE_UPPER, (int)ld, NULL, (int)ld, &n_work) != CUSOLVER_STATUS_SUCCESS)
        n_work = 0;
    const uint64_t factor = ld * ld * 8 + (uint64_t)n_work * 8 + SOLVE_ROWS * ld * 8 + 4096;
    const uint64_t gram = 2 * (GRAM_ROWS * ld * 4 + ld * 4) + ld * 4 + ld * ld * 4 + 4096;
    return factor > gram ? factor : gram;
}
