/* EXL3 linear for many rows: the codes written out as float16 once, then one cuBLAS product. The Hadamard transforms are
 * applied to the rows, which are fewer numbers than the weights up to about n_in + n_out rows.
 *
 * What limits it: the product itself, and under it about 2 n_in n_out bytes written and read again for the codes. */
#include "kernels/linear_cuda.cuh"

#include <cublas_v2.h>

#define ROW_WARPS 8
#define WARP_BLOCKS 4                       /* blocks of 128 numbers a warp takes, 8 lanes each */
#define LANE_NUMBERS (X3_HADAMARD * WARP_BLOCKS / X3_WARP)

/* The same as hadamard_128 with 16 * (lane % 8) + e in v[e]: fewer lanes a block exchange less. */
static __device__ __forceinline__ void hadamard_128_by_8(float v[LANE_NUMBERS], int lane)
{
#pragma unroll
    for (int stride = 1; stride < LANE_NUMBERS; stride *= 2)
#pragma unroll
        for (int i = 0; i < LANE_NUMBERS; i++)
            if ((i & stride) == 0) {
                const float low = v[i], high = v[i + stride];
                v[i] = low + high;
                v[i + stride] = low - high;
            }
#pragma unroll
    for (int stride = 1; stride < 8; stride *= 2)
#pragma unroll
        for (int i = 0; i < LANE_NUMBERS; i++) {
            const float other = __shfl_xor_sync(X3_ALL_LANES, v[i], stride);
            v[i] = lane & stride ? other - v[i] : v[i] + other;
        }
#pragma unroll
    for (int i = 0; i < LANE_NUMBERS; i++)
        v[i] *= 0.08838834764831845f;
}

/* The row and first column of what this lane does, when rows have n_blocks blocks of 128. */
static __device__ __forceinline__ size_t lane_place(int n_blocks, size_t *column)
{
    const int lane = threadIdx.x & 31;
    const size_t item = ((size_t)blockIdx.x * ROW_WARPS + (threadIdx.x >> 5)) * WARP_BLOCKS + (lane >> 3);

    *column = item % n_blocks * X3_HADAMARD + (lane & 7) * LANE_NUMBERS;
    return item / n_blocks;
}

/* out [n_rows][n_blocks * 128] float16 = (x * suh) Hd. */
static __global__ void __launch_bounds__(ROW_WARPS *X3_WARP) rotate_rows(const __grid_constant__ linear_args a, __half *out)
{
    const int n_blocks = a.n_units_in / 8;
    size_t i, row = lane_place(n_blocks, &i);
    const bool some = row < (size_t)a.n_rows; /* all lanes take part in the exchanges */
    float v[LANE_NUMBERS] = {};

#pragma unroll
    for (int e = 0; e < LANE_NUMBERS && some; e += 4) {
        load_4(v + e, a.x, a.x_type, row * a.ldx, i + e, (size_t)a.n_in, a.x_whole);
        scale_4(v + e, a.suh, i + e);
    }
    hadamard_128_by_8(v, threadIdx.x & 31);
#pragma unroll
    for (int e = 0; e < LANE_NUMBERS && some; e += 4)
        store_4(v + e, out, X3_CUDA_F16, row * n_blocks * X3_HADAMARD, i + e, (size_t)n_blocks * X3_HADAMARD, true);
    wait_for_previous_kernel(); /* this kernel is done only when the reconstruction before it is */
}

/* y = product Hd * svh + bias; the product may lie where y goes. */
static __global__ void __launch_bounds__(ROW_WARPS *X3_WARP)
    finish_rows(const __grid_constant__ linear_args a, const void *product, x3_cuda_type type, size_t ld)
{
    size_t i, row = lane_place(a.n_stripes, &i);
    const bool some = row < (size_t)a.n_rows;
    float v[LANE_NUMBERS] = {};

#pragma unroll
    for (int e = 0; e < LANE_NUMBERS && some; e += 4)
        load_4(v + e, product, type, row * ld, i + e, (size_t)a.n_stripes * STRIPE_COLS, true);
    hadamard_128_by_8(v, threadIdx.x & 31);
#pragma unroll
    for (int e = 0; e < LANE_NUMBERS && some; e += 4) {
        scale_4(v + e, a.svh, i + e);
        for (int j = 0; j < 4 && a.bias != NULL; j++)
            v[e + j] += i + e + j < (size_t)a.n_out ? a.bias[i + e + j] : 0.0f;
        store_4(v + e, a.y, a.y_type, row * a.ldy, i + e, (size_t)a.n_out, a.y_whole);
    }
}

/* Blocks of threads for n_rows rows of n columns. */
static unsigned row_grid(size_t n_rows, size_t n)
{
    const size_t a_block = ROW_WARPS * WARP_BLOCKS;

    return (unsigned)((n_rows * (n / X3_HADAMARD) + a_block - 1) / a_block);
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
    RETURN_IF_FAILED(x3_cuda_launch(info, (const void *)rotate_rows, dim3(row_grid(n_rows, n_in)), ROW_WARPS * X3_WARP, 0, true, stream,
                                   rotate_args, "linear, rotating inputs", err));
    RETURN_IF_FAILED(check_blas(cublasSetStream(blas, stream), "choosing the stream", err));
    /* row-major y = x w is column-major y' = w' x' */
    RETURN_IF_FAILED(check_blas(cublasGemmEx(blas, CUBLAS_OP_N, CUBLAS_OP_N, (int)n_out, (int)n_rows, (int)n_in, &one, weight,
                                            CUDA_R_16F, (int)n_out, inputs, CUDA_R_16F, (int)n_in, &zero, (void *)product,
                                            type, (int)ld, CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT), "product", err));
    return x3_cuda_launch(info, (const void *)finish_rows, dim3(row_grid(n_rows, n_out)), ROW_WARPS * X3_WARP, 0, false, stream, finish_args,
                        "linear, rotating outputs", err);
}
