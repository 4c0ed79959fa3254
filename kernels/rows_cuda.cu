/* Norm, rope, SiLU and small dense linears on the GPU: one warp or one block a row. */
#include "kernels/cuda_ops.h"
#include "kernels/cuda_common.cuh"

#include <cuda_bf16.h>

#define FLAT_THREADS 256

static dim3 flat_grid(size_t n)
{
    return dim3((unsigned)((n + FLAT_THREADS - 1) / FLAT_THREADS));
}

/* ---- norm ----------------------------------------------------------------------------------------------------------- */

/* WARPS warps a row, 8 / WARPS rows a block. */
template <int WARPS>
static __global__ void __launch_bounds__(8 * X3_WARP) rms_norm(const float *x, size_t ldx, size_t n_rows, size_t n,
                                                              const float *weight, float eps, float *out, size_t ldo)
{
    __shared__ float sums[8];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, part = warp % WARPS;
    const size_t row = (size_t)blockIdx.x * (8 / WARPS) + warp / WARPS;
    const float *from = x + row * ldx;
    float sum = 0;

    begin_in_turn();
    if (row < n_rows)
        for (size_t i = part * X3_WARP + lane; i < n; i += WARPS * X3_WARP)
            sum = fmaf(from[i], from[i], sum);
    sum = warp_sum(sum);
    if (WARPS > 1) {
        if (lane == 0)
            sums[warp] = sum;
        __syncthreads();
        sum = 0;
        for (int w = 0; w < WARPS; w++)
            sum += sums[w];
    }
    if (row >= n_rows)
        return;
    const float r = 1.0f / sqrtf(sum / (float)n + eps);
    for (size_t i = part * X3_WARP + lane; i < n; i += WARPS * X3_WARP)
        out[row * ldo + i] = from[i] * r * weight[i];
}

x3_status x3_cuda_rms_norm(const float *d_x, size_t ldx, size_t n_rows, size_t n, const float *d_weight, float eps,
                           float *d_out, size_t ldo, x3_cuda_stream stream, x3_err *err)
{
    if (n_rows == 0)
        return X3_OK;
    void *args[] = {&d_x, &ldx, &n_rows, &n, &d_weight, &eps, &d_out, &ldo};
    return x3_cuda_launch_in_turn(n <= 512 ? (const void *)rms_norm<1> : (const void *)rms_norm<8>,
                                  dim3((unsigned)(n <= 512 ? (n_rows + 7) / 8 : n_rows)), 8 * X3_WARP, 0, stream, args, "rms_norm", err);
}

/* x += y and its norm, a block a row; the bits of add and rms_norm. */
static __global__ void __launch_bounds__(8 * X3_WARP) add_norm(float *x, const float *y, size_t n, const float *weight, float eps,
                                                              float *out)
{
    __shared__ float sums[8];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const size_t at = blockIdx.x * n;
    float sum = 0;

    begin_in_turn();
    for (size_t i = threadIdx.x; i < n; i += 8 * X3_WARP) {
        const float v = x[at + i] + y[at + i];
        x[at + i] = v;
        sum = fmaf(v, v, sum);
    }
    sum = warp_sum(sum);
    if (lane == 0)
        sums[warp] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < 8; w++)
        sum += sums[w];
    const float r = 1.0f / sqrtf(sum / (float)n + eps);
    for (size_t i = threadIdx.x; i < n; i += 8 * X3_WARP)
        out[at + i] = x[at + i] * r * weight[i];
}

x3_status x3_cuda_add_norm(float *d_x, const float *d_y, size_t n_rows, size_t n, const float *d_weight, float eps, float *d_out,
                           x3_cuda_stream stream, x3_err *err)
{
    void *args[] = {&d_x, &d_y, &n, &d_weight, &eps, &d_out};

    if (n_rows == 0)
        return X3_OK;
    if (n <= 512) { /* there a norm is summed by one warp */
        RETURN_IF_FAILED(x3_cuda_add(d_x, d_y, n_rows * n, stream, err));
        return x3_cuda_rms_norm(d_x, n, n_rows, n, d_weight, eps, d_out, n, stream, err);
    }
    return x3_cuda_launch_in_turn((const void *)add_norm, dim3((unsigned)n_rows), 8 * X3_WARP, 0, stream, args, "add and norm", err);
}

/* ---- rope ------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(FLAT_THREADS) rope(const x3_cuda_rope r)
{
    const size_t half = r.n_rotated / 2, at = (size_t)blockIdx.x * FLAT_THREADS + threadIdx.x;
    const size_t i = at % half, head = at / half % r.n_heads, row = at / half / r.n_heads;

    begin_in_turn();
    if (row >= r.n_rows)
        return;
    const float *c = r.d_cos_sin + (size_t)r.d_positions[row] * r.n_rotated;
    rope_pair(r.d_x + row * r.ld + r.first + head * r.head_stride, c, i, half, r.interleaved);
}

x3_status x3_cuda_rotate(const x3_cuda_rope *r, x3_cuda_stream stream, x3_err *err)
{
    const size_t n = r->n_rows * r->n_heads * (r->n_rotated / 2);

    if (n == 0)
        return X3_OK;
    void *args[] = {(void *)r};
    return x3_cuda_launch_in_turn((const void *)rope, flat_grid(n), FLAT_THREADS, 0, stream, args, "rope", err);
}

/* ---- activation --------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(FLAT_THREADS) silu_mul(const float *gate, const float *up, size_t n, float *out)
{
    const size_t i = (size_t)blockIdx.x * FLAT_THREADS + threadIdx.x;

    begin_in_turn();
    if (i < n)
        out[i] = silu_mul_exact(gate[i], up[i]);
}

x3_status x3_cuda_silu_mul(const float *d_gate, const float *d_up, size_t n, float *d_out, x3_cuda_stream stream, x3_err *err)
{
    if (n == 0)
        return X3_OK;
    void *args[] = {&d_gate, &d_up, &n, &d_out};
    return x3_cuda_launch_in_turn((const void *)silu_mul, flat_grid(n), FLAT_THREADS, 0, stream, args, "silu_mul", err);
}

/* ---- dense linear of few rows ----------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ float to_float(float v)
{
    return v;
}

static __device__ __forceinline__ float to_float(__half v)
{
    return __half2float(v);
}

static __device__ __forceinline__ float to_float(__nv_bfloat16 v)
{
    return __bfloat162float(v);
}

#define DENSE_ROWS 8
#define DENSE_OUTS 4 /* a warp */
#define DENSE_WARPS 4

/* A warp: DENSE_OUTS outputs of DENSE_ROWS rows; a lane takes inputs lane, lane + 32, ... */
template <typename W>
static __global__ void __launch_bounds__(DENSE_WARPS *X3_WARP) dense_rows(const W *w, size_t n_out, size_t n_in, const float *bias,
                                                                         const float *x, size_t ldx, size_t n_rows, float *y,
                                                                         size_t ldy)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const size_t first_out = ((size_t)blockIdx.x * DENSE_WARPS + warp) * DENSE_OUTS, first = (size_t)blockIdx.y * DENSE_ROWS;
    float acc[DENSE_ROWS][DENSE_OUTS] = {};

    if (first_out >= n_out)
        return;
    for (size_t i = lane; i < n_in; i += X3_WARP) {
        float v[DENSE_OUTS];
#pragma unroll
        for (int o = 0; o < DENSE_OUTS; o++)
            v[o] = first_out + o < n_out ? to_float(w[(first_out + o) * n_in + i]) : 0.0f;
#pragma unroll
        for (int r = 0; r < DENSE_ROWS; r++) {
            if (first + r >= n_rows)
                break;
            const float in = x[(first + r) * ldx + i];
#pragma unroll
            for (int o = 0; o < DENSE_OUTS; o++)
                acc[r][o] = fmaf(in, v[o], acc[r][o]);
        }
    }
#pragma unroll
    for (int r = 0; r < DENSE_ROWS; r++)
#pragma unroll
        for (int o = 0; o < DENSE_OUTS; o++) {
            const float sum = warp_sum(acc[r][o]);
            if (lane == 0 && first + r < n_rows && first_out + o < n_out)
                y[(first + r) * ldy + first_out + o] = sum + (bias != NULL ? bias[first_out + o] : 0.0f);
        }
}

x3_status x3_cuda_dense_rows(const void *d_w, x3_cuda_dense_type type, size_t n_out, size_t n_in, const float *d_bias,
                             const float *d_x, size_t ldx, size_t n_rows, float *d_y, size_t ldy, x3_cuda_stream stream,
                             x3_err *err)
{
    const size_t outs = DENSE_WARPS * DENSE_OUTS;
    const dim3 grid((unsigned)((n_out + outs - 1) / outs), (unsigned)((n_rows + DENSE_ROWS - 1) / DENSE_ROWS));

    if (n_rows == 0 || n_out == 0)
        return X3_OK;
    if (type == X3_CUDA_DENSE_F32)
        dense_rows<<<grid, DENSE_WARPS * X3_WARP, 0, stream>>>((const float *)d_w, n_out, n_in, d_bias, d_x, ldx, n_rows, d_y, ldy);
    else if (type == X3_CUDA_DENSE_BF16)
        dense_rows<<<grid, DENSE_WARPS * X3_WARP, 0, stream>>>((const __nv_bfloat16 *)d_w, n_out, n_in, d_bias, d_x, ldx, n_rows,
                                                               d_y, ldy);
    else
        dense_rows<<<grid, DENSE_WARPS * X3_WARP, 0, stream>>>((const __half *)d_w, n_out, n_in, d_bias, d_x, ldx, n_rows, d_y,
                                                               ldy);
    return x3_cuda_check(cudaGetLastError(), "dense linear", err);
}

/* ---- rows of a weight ------------------------------------------------------------------------------------------------------- */

template <typename W>
static __global__ void __launch_bounds__(FLAT_THREADS) dense_pick(const W *w, size_t n, const int32_t *ids, float *out)
{
    const size_t row = blockIdx.x, from = (size_t)ids[row] * n;

    for (size_t i = threadIdx.x; i < n; i += FLAT_THREADS)
        out[row * n + i] = to_float(w[from + i]);
}

x3_status x3_cuda_dense_pick(const void *d_w, x3_cuda_dense_type type, size_t n, const int32_t *d_ids, size_t n_rows, float *d_out,
                             x3_cuda_stream stream, x3_err *err)
{
    if (n_rows == 0)
        return X3_OK;
    if (type == X3_CUDA_DENSE_F32)
        dense_pick<<<(unsigned)n_rows, FLAT_THREADS, 0, stream>>>((const float *)d_w, n, d_ids, d_out);
    else if (type == X3_CUDA_DENSE_BF16)
        dense_pick<<<(unsigned)n_rows, FLAT_THREADS, 0, stream>>>((const __nv_bfloat16 *)d_w, n, d_ids, d_out);
    else
        dense_pick<<<(unsigned)n_rows, FLAT_THREADS, 0, stream>>>((const __half *)d_w, n, d_ids, d_out);
    return x3_cuda_check(cudaGetLastError(), "rows of a weight", err);
}

/* ---- the largest of a row ------------------------------------------------------------------------------------------ */

#define ARGMAX_THREADS 1024

/* A number and where it stands; a NaN comes before all numbers. */
typedef struct place_of {
    float value;
    int index;
} place_of;

static __device__ __forceinline__ place_of better(place_of a, place_of b)
{
    if (isnan(a.value) || isnan(b.value))
        return isnan(a.value) ? a : b;
    return b.value > a.value || (b.value == a.value && b.index < a.index) ? b : a;
}

static __device__ __forceinline__ place_of best_of_warp(place_of p)
{
#pragma unroll
    for (int lanes = X3_WARP / 2; lanes > 0; lanes /= 2) {
        const place_of other = {__shfl_xor_sync(X3_ALL_LANES, p.value, lanes), __shfl_xor_sync(X3_ALL_LANES, p.index, lanes)};
        p = better(p, other);
    }
    return p;
}

static __global__ void __launch_bounds__(ARGMAX_THREADS) argmax(const float *x, size_t n, int32_t *ids)
{
    __shared__ place_of warps[ARGMAX_THREADS / X3_WARP];
    const float *row = x + blockIdx.x * n;
    place_of p = {-CUDART_INF_F, 0};

    begin_in_turn();
#pragma unroll 4
    for (size_t i = threadIdx.x; i < n; i += ARGMAX_THREADS) {
        const place_of other = {row[i], (int)i};
        p = better(p, other);
    }
    p = best_of_warp(p);
    if (threadIdx.x % X3_WARP == 0)
        warps[threadIdx.x / X3_WARP] = p;
    __syncthreads();
    if (threadIdx.x < X3_WARP) {
        p = best_of_warp(warps[threadIdx.x]);
        if (threadIdx.x == 0)
            ids[blockIdx.x] = isfinite(p.value) ? p.index : -1;
    }
}

x3_status x3_cuda_argmax(const float *d_x, size_t n_rows, size_t n, int32_t *d_ids, x3_cuda_stream stream, x3_err *err)
{
    void *args[] = {&d_x, &n, &d_ids};

    if (n == 0 || n > INT32_MAX)
        return x3_fail(err, X3_ERR_INPUT, "the largest of %zu numbers", n);
    return n_rows == 0 ? X3_OK : x3_cuda_launch_in_turn((const void *)argmax, dim3((unsigned)n_rows), ARGMAX_THREADS, 0, stream, args,
                                                        "largest of a row", err);
}
