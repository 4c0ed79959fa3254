/* EXL3 linear for many rows: the effective weight written out as float16, then one cuBLAS product.
 *
 * What limits it: the product itself; before it, writing 2 n_in n_out bytes and the transforms of the weight, about equal. */
#include "kernels/linear_cuda.cuh"

#include <cublas_v2.h>

#define ROW_THREADS 256

/* out [n_rows][ld] = x [n_rows][n] rounded to float16, four at a time; ld is n rounded up to 8. */
static __global__ void __launch_bounds__(ROW_THREADS) round_rows(const __grid_constant__ linear_args a, __half *out, int ld)
{
    const size_t at = ((size_t)blockIdx.x * ROW_THREADS + threadIdx.x) * 4, row = at / ld, i = at % ld;
    float v[4];

    if (row < (size_t)a.n_rows) {
        load_4(v, a.x, a.x_type, row * a.ldx, i, (size_t)a.n_in, a.x_whole);
        store_4(v, out, X3_CUDA_F16, row * ld, i, (size_t)ld, true);
    }
    wait_for_previous_kernel(); /* this kernel is done only when the one before it is */
}

static __global__ void __launch_bounds__(ROW_THREADS) add_bias(const __grid_constant__ linear_args a)
{
    const linear_part &part = a.parts[0];
    const size_t at = (size_t)blockIdx.x * ROW_THREADS + threadIdx.x, row = at / part.n_out, i = at % part.n_out;

    if (row >= (size_t)a.n_rows)
        return;
    if (a.y_type == X3_CUDA_F32) {
        ((float *)part.y)[row * part.ldy + i] += part.bias[i];
    } else {
        __half *y = (__half *)part.y + row * part.ldy + i;
        *y = __float2half_rn(__half2float(*y) + part.bias[i]);
    }
}

size_t x3_cuda_linear_gemm_bytes(const x3_cuda_group *g, size_t n_rows, x3_cuda_type x_type)
{
    return g->n_in_padded * g->n_out_padded * 2 + (x_type == X3_CUDA_F32 ? n_rows * x3_round_up(g->n_in, 8) * 2 : 0);
}

static x3_status check_blas(cublasStatus_t status, const char *what, x3_err *err)
{
    if (status == CUBLAS_STATUS_SUCCESS)
        return X3_OK;
    return x3_fail(err, status == CUBLAS_STATUS_ALLOC_FAILED ? X3_ERR_MEMORY : X3_ERR_DEVICE, "cuBLAS: %s: %s", what,
                   cublasGetStatusString(status));
}

x3_status x3_cuda_linear_gemm(const x3_cuda_info *info, x3_cuda_blas blas, const x3_cuda_group *g, const x3_cuda_rows *rows,
                              void *d_scratch, x3_cuda_stream stream, x3_err *err)
{
    const size_t n_rows = rows->n_rows;
    __half *weight = (__half *)d_scratch, *rounded = weight + g->n_in_padded * g->n_out_padded;
    const void *x = rows->d_x;
    int ldx = (int)rows->ldx;
    const float one = 1, zero = 0;
    linear_args a;

    if (rows->d_up != NULL)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "a linear of many rows by a matrix product takes its inputs as they are");
    if (n_rows == 0 || n_rows > INT32_MAX / 2 || rows->ldx > INT32_MAX || rows->ldy > INT32_MAX)
        return x3_fail(err, X3_ERR_INPUT, "linear of %zu rows, ld %zu and %zu", n_rows, rows->ldx, rows->ldy);
    RETURN_IF_FAILED(x3_cuda_dense(info, g, weight, stream, err)); /* checks the group */
    x3_linear_fill_args(&a, g, rows, 1);
    if (rows->x_type == X3_CUDA_F32) {
        ldx = (int)x3_round_up(g->n_in, 8);
        x = rounded;
        void *args[] = {&a, &rounded, &ldx};
        const size_t n_blocks = (n_rows * (size_t)ldx / 4 + ROW_THREADS - 1) / ROW_THREADS;
        RETURN_IF_FAILED(x3_cuda_launch(info, (const void *)round_rows, dim3((unsigned)n_blocks), ROW_THREADS, 0, true, stream,
                                        args, "linear, rounding inputs", err));
    }
    RETURN_IF_FAILED(check_blas(cublasSetStream(blas, stream), "choosing the stream", err));
    /* row-major y = x w is column-major y' = w' x' */
    RETURN_IF_FAILED(check_blas(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, (int)g->n_out, a.n_rows, a.n_in, &one, weight, CUDA_R_16F,
                                             (int)g->n_out_padded, x, CUDA_R_16F, ldx, &zero, rows->d_y,
                                             rows->y_type == X3_CUDA_F32 ? CUDA_R_32F : CUDA_R_16F, (int)rows->ldy,
                                             CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT), "product", err));
    if (g->d_bias == NULL)
        return X3_OK;
    void *args[] = {&a};
    const size_t n_blocks = (n_rows * g->n_out + ROW_THREADS - 1) / ROW_THREADS;
    return x3_cuda_launch(info, (const void *)add_bias, dim3((unsigned)n_blocks), ROW_THREADS, 0, false, stream, args,
                          "linear, adding the bias", err);
}
