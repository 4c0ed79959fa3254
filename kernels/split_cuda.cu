/* Float32 operands as pairs of float16 for the tensor cores, and what finishes such products. */
#include "kernels/cuda_ops.h"
#include "kernels/cuda_common.cuh"

#include <cuda_bf16.h>

#define SPLIT_WARPS 8
#define FLAT_THREADS 256

static dim3 flat_grid(size_t n)
{
    return dim3((unsigned)((n + FLAT_THREADS - 1) / FLAT_THREADS));
}

/* 4 numbers to two times 8 bytes. */
static __device__ __forceinline__ void split_4(const float v[4], float factor, uint16_t *high, uint16_t *low)
{
    __half h[4], l[4];

#pragma unroll
    for (int e = 0; e < 4; e++)
        split_half(v[e] * factor, &h[e], &l[e]);
    *(uint2 *)high = *(const uint2 *)h;
    if (low != NULL)
        *(uint2 *)low = *(const uint2 *)l;
}

/* ---- rows ------------------------------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void row_block(float v[4], const float *x, size_t row, size_t i, size_t n, bool whole,
                                                 const uint16_t *suh, int lane)
{
    load_4(v, x, X3_CUDA_F32, row, i, n, whole);
    if (suh == NULL)
        return;
    scale_4(v, suh, i);
    hadamard_128(v, lane);
}

static __global__ void __launch_bounds__(SPLIT_WARPS *X3_WARP)
    split_rows(const float *x, size_t ldx, size_t n, const uint16_t *suh, uint16_t *high, uint16_t *low, size_t ld, float *unit,
               bool whole)
{
    __shared__ uint32_t largest;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const size_t row = blockIdx.x, n_blocks = (ld + 127) / 128;
    uint32_t mine = 0;
    float v[4];

    if (threadIdx.x == 0)
        largest = 0;
    __syncthreads();
    for (size_t b = warp; b < n_blocks; b += SPLIT_WARPS) {
        row_block(v, x, row * ldx, b * 128 + 4 * lane, n, whole, suh, lane);
        for (int e = 0; e < 4; e++)
            mine = max(mine, __float_as_uint(v[e]) & 0x7FFFFFFFu);
    }
    atomicMax(&largest, __reduce_max_sync(X3_ALL_LANES, mine));
    __syncthreads();
    const float factor = half_factor(largest);
    for (size_t b = warp; b < n_blocks; b += SPLIT_WARPS) {
        const size_t i = b * 128 + 4 * lane;
        row_block(v, x, row * ldx, i, n, whole, suh, lane);
        if (i < ld)
            split_4(v, factor, high + row * ld + i, low + row * ld + i);
    }
    if (threadIdx.x == 0)
        unit[row] = half_unit(factor);
}

static bool whole_rows(const float *x, size_t ld)
{
    return (uintptr_t)x % 16 == 0 && ld % 4 == 0;
}

x3_status x3_cuda_split_rows(const float *d_x, size_t ldx, size_t n_rows, size_t n, const uint16_t *d_suh, uint16_t *d_high,
                             uint16_t *d_low, size_t ld, float *d_unit, x3_cuda_stream stream, x3_err *err)
{
    if (n_rows == 0)
        return X3_OK;
    split_rows<<<(unsigned)n_rows, SPLIT_WARPS * X3_WARP, 0, stream>>>(d_x, ldx, n, d_suh, d_high, d_low, ld, d_unit,
                                                                       whole_rows(d_x, ldx));
    return x3_cuda_check(cudaGetLastError(), "rows as float16 pairs", err);
}

/* ---- columns ------------------------------------------------------------------------------------------------------------ */

#define MAX_ROWS 128 /* of a block of threads */

static __global__ void __launch_bounds__(FLAT_THREADS) column_largest(const float *x, size_t ldx, size_t n_rows, size_t n,
                                                                      uint32_t *largest)
{
    const size_t i = (size_t)blockIdx.x * FLAT_THREADS + threadIdx.x, first = (size_t)blockIdx.y * MAX_ROWS;
    uint32_t mine = 0;

    if (i >= n)
        return;
    for (size_t r = first; r < first + MAX_ROWS && r < n_rows; r++)
        mine = max(mine, __float_as_uint(x[r * ldx + i]) & 0x7FFFFFFFu);
    atomicMax(largest + i, mine);
}

static __global__ void __launch_bounds__(FLAT_THREADS)
    split_cols(const float *x, size_t ldx, size_t n_rows, size_t n, uint16_t *high, uint16_t *low, size_t ld,
               const uint32_t *largest, float *unit, bool whole)
{
    const size_t at = (size_t)blockIdx.x * FLAT_THREADS + threadIdx.x, row = at / (ld / 4), i = at % (ld / 4) * 4;
    __half h[4], l[4];
    float v[4];

    if (row >= n_rows)
        return;
    load_4(v, x, X3_CUDA_F32, row * ldx, i, n, whole);
#pragma unroll
    for (int e = 0; e < 4; e++) {
        const float factor = half_factor(i + e < n ? largest[i + e] : 0);
        split_half(v[e] * factor, &h[e], &l[e]);
        if (row == 0 && i + e < n)
            unit[i + e] = half_unit(factor);
    }
    *(uint2 *)(high + row * ld + i) = *(const uint2 *)h;
    *(uint2 *)(low + row * ld + i) = *(const uint2 *)l;
}

x3_status x3_cuda_split_cols(const float *d_x, size_t ldx, size_t n_rows, size_t n, uint16_t *d_high, uint16_t *d_low, size_t ld,
                             uint32_t *d_largest, float *d_unit, x3_cuda_stream stream, x3_err *err)
{
    if (n_rows == 0 || n == 0)
        return X3_OK;
    RETURN_IF_FAILED(x3_cuda_check(cudaMemsetAsync(d_largest, 0, n * sizeof *d_largest, stream), "clearing", err));
    column_largest<<<dim3(flat_grid(n).x, (unsigned)((n_rows + MAX_ROWS - 1) / MAX_ROWS)), FLAT_THREADS, 0, stream>>>(
        d_x, ldx, n_rows, n, d_largest);
    split_cols<<<flat_grid(n_rows * (ld / 4)), FLAT_THREADS, 0, stream>>>(d_x, ldx, n_rows, n, d_high, d_low, ld, d_largest, d_unit,
                                                                          whole_rows(d_x, ldx));
    return x3_cuda_check(cudaGetLastError(), "columns as float16 pairs", err);
}

/* ---- weights ------------------------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float weight_at(const void *w, x3_cuda_dense_type type, size_t i)
{
    return type == X3_CUDA_DENSE_F32    ? ((const float *)w)[i]
           : type == X3_CUDA_DENSE_BF16 ? __bfloat162float(((const __nv_bfloat16 *)w)[i])
                                        : __half2float(((const __half *)w)[i]);
}

/* Four numbers; aligned ones at once. */
static __device__ __forceinline__ void weight_4(float v[4], const void *w, x3_cuda_dense_type type, size_t i, size_t n_left)
{
    if (n_left >= 4 && i % 4 == 0 && type != X3_CUDA_DENSE_F32) {
        const uint2 u = *(const uint2 *)((const uint16_t *)w + i);
        const uint32_t half[4] = {u.x & 0xFFFF, u.x >> 16, u.y & 0xFFFF, u.y >> 16};
#pragma unroll
        for (int e = 0; e < 4; e++)
            v[e] = type == X3_CUDA_DENSE_BF16 ? __uint_as_float(half[e] << 16)
                                              : __half2float(__ushort_as_half((unsigned short)half[e]));
        return;
    }
#pragma unroll
    for (size_t e = 0; e < 4; e++)
        v[e] = e < n_left ? weight_at(w, type, i + e) : 0.0f;
}

static __global__ void __launch_bounds__(FLAT_THREADS) weight_largest(const void *w, x3_cuda_dense_type type, size_t n,
                                                                      uint32_t *largest)
{
    uint32_t mine = 0;
    float v[4];

    for (size_t i = ((size_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4; i < n; i += (size_t)gridDim.x * FLAT_THREADS * 4) {
        weight_4(v, w, type, i, n - i);
        for (int e = 0; e < 4; e++)
            mine = max(mine, __float_as_uint(v[e]) & 0x7FFFFFFFu);
    }
    mine = __reduce_max_sync(X3_ALL_LANES, mine);
    if ((threadIdx.x & 31) == 0)
        atomicMax(largest, mine);
}

static __global__ void __launch_bounds__(FLAT_THREADS)
    split_weight(const void *w, x3_cuda_dense_type type, size_t n_out, size_t n_in, uint16_t *high, uint16_t *low, size_t ld,
                 const uint32_t *largest, float *unit)
{
    const size_t at = (size_t)blockIdx.x * FLAT_THREADS + threadIdx.x, row = at / (ld / 4), i = at % (ld / 4) * 4;
    const float factor = half_factor(*largest);
    float v[4];

    if (at == 0)
        *unit = half_unit(factor);
    if (row >= n_out)
        return;
    weight_4(v, w, type, row * n_in + i, i < n_in ? n_in - i : 0);
    split_4(v, factor, high + row * ld + i, low == NULL ? NULL : low + row * ld + i);
}

x3_status x3_cuda_split_weight(const void *d_w, x3_cuda_dense_type type, size_t n_out, size_t n_in, uint16_t *d_high,
                               uint16_t *d_low, size_t ld, uint32_t *d_largest, float *d_unit, x3_cuda_stream stream, x3_err *err)
{
    const size_t n = n_out * n_in;

    if (n == 0)
        return X3_OK;
    RETURN_IF_FAILED(x3_cuda_check(cudaMemsetAsync(d_largest, 0, sizeof *d_largest, stream), "clearing", err));
    weight_largest<<<(unsigned)x3_min_size(flat_grid(n / 4 + 1).x, 2048), FLAT_THREADS, 0, stream>>>(d_w, type, n, d_largest);
    split_weight<<<flat_grid(n_out * (ld / 4)), FLAT_THREADS, 0, stream>>>(d_w, type, n_out, n_in, d_high, d_low, ld, d_largest,
                                                                           d_unit);
    return x3_cuda_check(cudaGetLastError(), "weight as float16", err);
}

static __global__ void __launch_bounds__(FLAT_THREADS) dense_floats(const void *w, x3_cuda_dense_type type, size_t n, float *out)
{
    const size_t i = ((size_t)blockIdx.x * FLAT_THREADS + threadIdx.x) * 4;
    float v[4];

    if (i >= n)
        return;
    weight_4(v, w, type, i, n - i);
    store_4(v, out, X3_CUDA_F32, 0, i, n, true);
}

x3_status x3_cuda_dense_floats(const void *d_w, x3_cuda_dense_type type, size_t n, float *d_out, x3_cuda_stream stream,
                               x3_err *err)
{
    if (n == 0)
        return X3_OK;
    dense_floats<<<flat_grid((n + 3) / 4), FLAT_THREADS, 0, stream>>>(d_w, type, n, d_out);
    return x3_cuda_check(cudaGetLastError(), "weight as float32", err);
}

/* ---- after the product --------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(FLAT_THREADS) finish_rows(float *y, size_t ldy, size_t n, const float *row_unit,
                                                                   const float *unit, const float *bias)
{
    const size_t i = (size_t)blockIdx.x * FLAT_THREADS + threadIdx.x, row = blockIdx.y;
    float *at = y + row * ldy + i;

    if (i < n)
        *at = *at * row_unit[row] * (unit != NULL ? *unit : 1.0f) + (bias != NULL ? bias[i] : 0.0f);
}

#define GRID_Y 32768

x3_status x3_cuda_finish_rows(float *d_y, size_t ldy, size_t n_rows, size_t n, const float *d_row_unit, const float *d_unit,
                              const float *d_bias, x3_cuda_stream stream, x3_err *err)
{
    for (size_t first = 0; first < n_rows && n > 0; first += GRID_Y)
        finish_rows<<<dim3(flat_grid(n).x, (unsigned)x3_min_size(GRID_Y, n_rows - first)), FLAT_THREADS, 0, stream>>>(
            d_y + first * ldy, ldy, n, d_row_unit + first, d_unit, d_bias);
    return x3_cuda_check(cudaGetLastError(), "scaling a product", err);
}

static __global__ void __launch_bounds__(SPLIT_WARPS *X3_WARP)
    finish_rotated(const float *p, size_t n_rows, size_t n_padded, const float *row_unit, const uint16_t *svh, const float *bias,
                   float *y, size_t ldy, size_t n, bool whole)
{
    const int lane = threadIdx.x & 31;
    const size_t block = (size_t)blockIdx.x * SPLIT_WARPS + (threadIdx.x >> 5), per_row = n_padded / 128;
    const size_t row = block / per_row, i = block % per_row * 128 + 4 * lane;
    float v[4];

    if (row >= n_rows)
        return;
    load_4(v, p, X3_CUDA_F32, row * n_padded, i, n_padded, true);
    hadamard_128(v, lane);
    scale_4(v, svh, i);
    for (int e = 0; e < 4; e++)
        v[e] = v[e] * row_unit[row] + (bias != NULL && i + e < n ? bias[i + e] : 0.0f);
    store_4(v, y, X3_CUDA_F32, row * ldy, i, n, whole);
}

x3_status x3_cuda_finish_rotated(const float *d_p, size_t n_rows, size_t n_padded, const float *d_row_unit, const uint16_t *d_svh,
                                 const float *d_bias, float *d_y, size_t ldy, size_t n, x3_cuda_stream stream, x3_err *err)
{
    const size_t blocks = n_rows * (n_padded / 128);

    if (blocks == 0)
        return X3_OK;
    finish_rotated<<<(unsigned)((blocks + SPLIT_WARPS - 1) / SPLIT_WARPS), SPLIT_WARPS * X3_WARP, 0, stream>>>(
        d_p, n_rows, n_padded, d_row_unit, d_svh, d_bias, d_y, ldy, n, whole_rows(d_y, ldy));
    return x3_cuda_check(cudaGetLastError(), "rotating a product", err);
}

static __global__ void __launch_bounds__(FLAT_THREADS) add_product(float *a, const float *p, size_t n, size_t ldp,
                                                                   const float *row_unit, const float *col_unit, bool lower)
{
    const size_t j = (size_t)blockIdx.x * FLAT_THREADS + threadIdx.x, i = blockIdx.y;

    if (j < n && (!lower || j <= i))
        a[i * n + j] += p[i * ldp + j] * row_unit[i] * col_unit[j];
}

x3_status x3_cuda_add_product(float *d_a, const float *d_p, size_t n, size_t ldp, const float *d_row_unit,
                              const float *d_col_unit, bool lower, x3_cuda_stream stream, x3_err *err)
{
    if (n == 0)
        return X3_OK;
    if (n > 65535)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "second moments of %zu inputs: 65535 at most", n);
    add_product<<<dim3(flat_grid(n).x, (unsigned)n), FLAT_THREADS, 0, stream>>>(d_a, d_p, n, ldp, d_row_unit, d_col_unit, lower);
    return x3_cuda_check(cudaGetLastError(), "adding a product", err);
}
