/* EXL3 linear for many rows: the codes written out as float16 once, then one cuBLAS product. The Hadamard transforms are
 * applied to the rows, which are fewer numbers than the weights up to about n_in + n_out rows.
 *
 * What limits it: the product itself, and under it about 2 n_in n_out bytes written and read again for the codes. */
#include "kernels/linear_cuda.cuh"

#include <cublas_v2.h>

#define ROW_WARPS 8

/* out [n_rows][n_blocks * 128] float16 = (x * suh) Hd; a warp a block of 128. */
static __global__ void __launch_bounds__(ROW_WARPS *X3_WARP) rotate_rows(const __grid_constant__ linear_args a, __half *out)
{
    const int lane = threadIdx.x & 31, n_blocks = a.n_units_in / 8;
    const int64_t item = (int64_t)blockIdx.x * ROW_WARPS + (threadIdx.x >> 5);
    const size_t row = (size_t)(item / n_blocks), i = (size_t)(item % n_blocks) * X3_HADAMARD + 4 * lane;
    float v[4];

    if (row >= (size_t)a.n_rows)
        return;
    load_4(v, a.x, a.x_type, row * a.ldx, i, (size_t)a.n_in, a.x_whole);
    scale_4(v, a.suh, i);
    hadamard_128(v, lane);
    store_4(v, out, X3_CUDA_F16, row * n_blocks * X3_HADAMARD, i, (size_t)n_blocks * X3_HADAMARD, true);
}

/* y = product Hd * svh + bias; the product may lie where y goes. */
static __global__ void __launch_bounds__(ROW_WARPS *X3_WARP)
    finish_rows(const __grid_constant__ linear_args a, const void *product, x3_cuda_type type, size_t ld)
{
    const int lane = threadIdx.x & 31;
    const int64_t item = (int64_t)blockIdx.x * ROW_WARPS + (threadIdx.x >> 5);
    const size_t row = (size_t)(item / a.n_stripes), i = (size_t)(item % a.n_stripes) * STRIPE_COLS + 4 * lane;
    float v[4];

    if (row >= (size_t)a.n_rows)
        return;
    load_4(v, product, type, row * ld, i, (size_t)a.n_stripes * STRIPE_COLS, true);
    hadamard_128(v, lane);
    scale_4(v, a.svh, i);
    if (a.bias != NULL)
        for (int e = 0; e < 4; e++)
            v[e] += i + e < (size_t)a.n_out ? a.bias[i + e] : 0.0f;
    store_4(v, a.y, a.y_type, row * a.ldy, i, (size_t)a.n_out, a.y_whole);
}

static size_t value_bytes(x3_cuda_type type)
{
    return type == X3_CUDA_F32 ? 4 : 2;
}

size_t x3_cuda_linear_gemm_bytes(const x3_cuda_group *g, size_t n_rows, x3_cuda_type y_type)
{
    return g->n_in_padded * g->n_out_padded * 2 + n_rows * g->n_in_padded * 2 + n_rows * g->n_out_padded * value_bytes(y_type);
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
    const size_t n_rows = rows->n_rows, n_in = g->n_in_padded, n_out = g->n_out_padded;
    __half *weight = (__half *)d_scratch, *inputs = weight + n_in * n_out;
    cudaDataType_t type = rows->y_type == X3_CUDA_F32 ? CUDA_R_32F : CUDA_R_16F;
    const float one = 1, zero = 0;
    x3_cuda_type product_type = rows->y_type;
    linear_args a;

    if (n_rows == 0 || n_rows > INT32_MAX / 2 || n_in > INT32_MAX || n_out > INT32_MAX)
        return x3_fail(err, X3_ERR_INPUT, "linear of %zu rows, %zu x %zu", n_rows, n_in, n_out);
    RETURN_IF_FAILED(x3_cuda_reconstruct(info, g, weight, X3_CUDA_F16, stream, err)); /* checks the group */
    x3_linear_fill_args(&a, g, rows);
    /* straight into y where y has room for the padding and rows can be read four at a time */
    const bool in_place = g->n_out == n_out && a.y_whole;
    const void *product = in_place ? rows->d_y : inputs + n_rows * n_in;
    size_t ld = in_place ? rows->ldy : n_out;
    void *rotate_args[] = {&a, &inputs}, *finish_args[] = {&a, &product, &product_type, &ld};
    const unsigned rotate_grid = (unsigned)((n_rows * (n_in / X3_HADAMARD) + ROW_WARPS - 1) / ROW_WARPS);
    const unsigned finish_grid = (unsigned)((n_rows * (n_out / STRIPE_COLS) + ROW_WARPS - 1) / ROW_WARPS);
    RETURN_IF_FAILED(x3_cuda_launch(info, (const void *)rotate_rows, dim3(rotate_grid), ROW_WARPS * X3_WARP, 0, false, stream,
                                   rotate_args, "linear, rotating inputs", err));
    RETURN_IF_FAILED(check_blas(cublasSetStream(blas, stream), "choosing the stream", err));
    /* row-major y = x w is column-major y' = w' x' */
    RETURN_IF_FAILED(check_blas(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, (int)n_out, (int)n_rows, (int)n_in, &one, weight,
                                            CUDA_R_16F, (int)n_out, inputs, CUDA_R_16F, (int)n_in, &zero, (void *)product,
                                            type, (int)ld, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT), "product", err));
    return x3_cuda_launch(info, (const void *)finish_rows, dim3(finish_grid), ROW_WARPS * X3_WARP, 0, false, stream, finish_args,
                        "linear, rotating outputs", err);
}
