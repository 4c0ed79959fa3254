/* Norm, rope, SiLU and small dense linears on the GPU: one warp or one block a row. */
#include "kernels/cuda_ops.h"
#include "kernels/cuda_common.cuh"

#include <cuda_bf16.h>

#define FLAT_THREADS 256
#define PICK_ROWS 32768 /* of one launch */

static dim3 flat_grid(size_t n)
{
    return dim3((unsigned)((n + FLAT_THREADS - 1) / FLAT_THREADS));
}

/* ---- norm ----------------------------------------------------------------------------------------------------------- */

#define NORM_WARPS 8
#define NORM_AT_ONCE 8

/* Numbers that a thread of a norm keeps in registers; longer rows are read twice. */
#define NORM_KEPT(WARPS) ((WARPS) == 1 ? 16 : 32)

/* Sum over the WARPS warps of a row, the same in all their threads. */
template <int WARPS> static __device__ __forceinline__ float sum_of_row(float sum, float *sums)
{
    sum = warp_sum(sum);
    if (WARPS == 1)
        return sum;
    if (threadIdx.x % X3_WARP == 0)
        sums[threadIdx.x / X3_WARP] = sum;
    __syncthreads();
    sum = 0;
    for (int w = 0; w < WARPS; w++)
        sum += sums[w];
    return sum;
}

/* out = norm(x), or norm(x + y) with x += y where ADD. WARPS warps a row, 8 / WARPS rows a block; thread t of a row takes numbers t,
 * t + 32 WARPS, .. The bits do not depend on whether they are kept. All reads are asked for before the first is needed, the weights, which
 * no kernel writes, before the kernel in front is done. */
template <int WARPS, bool ADD, bool KEPT>
static __global__ void __launch_bounds__(NORM_WARPS *X3_WARP) norm_rows(float *x, size_t ldx, const float *y, size_t n_rows, size_t n,
                                                                       const float *weight, float eps, float *out, size_t ldo)
{
    constexpr int threads = WARPS * X3_WARP, kept = NORM_KEPT(WARPS);
    __shared__ float sums[NORM_WARPS];
    const int thread = threadIdx.x % threads;
    const size_t row = (size_t)blockIdx.x * (NORM_WARPS / WARPS) + threadIdx.x / threads;
    const bool is_row = row < n_rows;
    float *from = x + row * ldx, *to = out + row * ldo;
    float sum = 0;

    release_next_kernel();
    if constexpr (!KEPT) {
        wait_for_previous_kernel();
        for (size_t i = thread; is_row && i < n; i += threads) {
            const float one = ADD ? from[i] + y[row * n + i] : from[i];
            if (ADD)
                from[i] = one;
            sum = fmaf(one, one, sum);
        }
        const float r = 1.0f / sqrtf(sum_of_row<WARPS>(sum, sums) / (float)n + eps);
        for (size_t i = thread; is_row && i < n; i += threads)
            to[i] = from[i] * r * weight[i];
    } else {
        float v[kept] = {}, w[kept];
#pragma unroll
        for (int j = 0; j < kept; j++)
            w[j] = (size_t)(thread + j * threads) < n ? weight[thread + j * threads] : 0;
        wait_for_previous_kernel();
#pragma unroll
        for (int first = 0; first < kept; first += NORM_AT_ONCE) {
            float added[NORM_AT_ONCE];
            if (!is_row || (size_t)first * threads >= n)
                break;
#pragma unroll
            for (int j = first; j < first + NORM_AT_ONCE; j++) {
                const size_t i = thread + (size_t)j * threads;
                v[j] = i < n ? from[i] : 0;
                added[j - first] = ADD && i < n ? y[row * n + i] : 0;
            }
#pragma unroll
            for (int j = first; j < first + NORM_AT_ONCE; j++)
                v[j] = ADD ? v[j] + added[j - first] : v[j];
        }
#pragma unroll
        for (int j = 0; j < kept; j++)
            if (is_row && (size_t)(thread + j * threads) < n) {
                if (ADD)
                    from[thread + j * threads] = v[j];
                sum = fmaf(v[j], v[j], sum);
            }
        const float r = 1.0f / sqrtf(sum_of_row<WARPS>(sum, sums) / (float)n + eps);
#pragma unroll
        for (int j = 0; j < kept; j++)
            if (is_row && (size_t)(thread + j * threads) < n)
                to[thread + j * threads] = v[j] * r * w[j];
    }
}

template <int WARPS, bool ADD>
static x3_status launch_norm(float *d_x, size_t ldx, const float *d_y, size_t n_rows, size_t n, const float *d_weight, float eps,
                             float *d_out, size_t ldo, x3_cuda_stream stream, x3_err *err)
{
    constexpr int rows = NORM_WARPS / WARPS;
    const bool kept = n <= (size_t)NORM_KEPT(WARPS) * WARPS * X3_WARP;
    void *args[] = {&d_x, &ldx, &d_y, &n_rows, &n, &d_weight, &eps, &d_out, &ldo};

    return x3_cuda_launch_in_turn(kept ? (const void *)norm_rows<WARPS, ADD, true> : (const void *)norm_rows<WARPS, ADD, false>,
                                  dim3((unsigned)((n_rows + rows - 1) / rows)), NORM_WARPS * X3_WARP, 0, stream, args,
                                  ADD ? "add and norm" : "rms_norm", err);
}

x3_status x3_cuda_rms_norm(const float *d_x, size_t ldx, size_t n_rows, size_t n, const float *d_weight, float eps,
                           float *d_out, size_t ldo, x3_cuda_stream stream, x3_err *err)
{
    if (n_rows == 0)
        return X3_OK;
    return n <= 512 ? launch_norm<1, false>((float *)d_x, ldx, NULL, n_rows, n, d_weight, eps, d_out, ldo, stream, err)
                    : launch_norm<NORM_WARPS, false>((float *)d_x, ldx, NULL, n_rows, n, d_weight, eps, d_out, ldo, stream, err);
}

x3_status x3_cuda_add_norm(float *d_x, const float *d_y, size_t n_rows, size_t n, const float *d_weight, float eps, float *d_out,
                           x3_cuda_stream stream, x3_err *err)
{
    if (n_rows == 0)
        return X3_OK;
    return n <= 512 ? launch_norm<1, true>(d_x, n, d_y, n_rows, n, d_weight, eps, d_out, n, stream, err)
                    : launch_norm<NORM_WARPS, true>(d_x, n, d_y, n_rows, n, d_weight, eps, d_out, n, stream, err);
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
    const size_t row = blockIdx.y, i = (size_t)blockIdx.x * FLAT_THREADS + threadIdx.x;

    begin_in_turn();
    if (i < n)
        out[row * n + i] = to_float(w[(size_t)ids[row] * n + i]);
}

x3_status x3_cuda_dense_pick(const void *d_w, x3_cuda_dense_type type, size_t n, const int32_t *d_ids, size_t n_rows, float *d_out,
                             x3_cuda_stream stream, x3_err *err)
{
    const void *kernel = type == X3_CUDA_DENSE_F32    ? (const void *)dense_pick<float>
                         : type == X3_CUDA_DENSE_BF16 ? (const void *)dense_pick<__nv_bfloat16>
                                                      : (const void *)dense_pick<__half>;
    void *args[] = {&d_w, &n, &d_ids, &d_out};

    for (size_t row = 0; row < n_rows; row += PICK_ROWS) {
        const size_t rows = x3_min_size(n_rows - row, PICK_ROWS);
        RETURN_IF_FAILED(x3_cuda_launch_in_turn(kernel, dim3(flat_grid(n).x, (unsigned)rows), FLAT_THREADS, 0, stream, args,
                                                "rows of a weight", err));
        d_ids += rows;
        d_out += rows * n;
    }
    return X3_OK;
}

/* ---- the largest of a row ------------------------------------------------------------------------------------------ */

#define ARGMAX_THREADS 1024
#define ARGMAX_AT_ONCE 16 /* numbers that a thread asks for together */

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
    for (size_t first = threadIdx.x; first < n; first += ARGMAX_AT_ONCE * ARGMAX_THREADS) {
        float v[ARGMAX_AT_ONCE];
#pragma unroll
        for (int j = 0; j < ARGMAX_AT_ONCE; j++)
            v[j] = first + j * ARGMAX_THREADS < n ? row[first + j * ARGMAX_THREADS] : -CUDART_INF_F;
#pragma unroll
        for (int j = 0; j < ARGMAX_AT_ONCE; j++) {
            const place_of other = {v[j], (int)(first + j * ARGMAX_THREADS)};
            p = better(p, other);
        }
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
