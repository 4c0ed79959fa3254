/* Delta nets and small operations of mixers on the GPU. */
#include "kernels/cuda_mixers.h"
#include "kernels/cuda_common.cuh"

#define THREADS 256

static dim3 flat_grid(size_t n)
{
    return dim3((unsigned)((n + THREADS - 1) / THREADS));
}

/* ---- pieces of rows ------------------------------------------------------------------------------------------------------ */

static __global__ void __launch_bounds__(THREADS) copy_heads(const x3_cuda_pieces p)
{
    const size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x, i = at % p.n_cols, head = at / p.n_cols % p.n_heads,
                 row = at / p.n_cols / p.n_heads;

    if (row < p.n_rows)
        p.d_to[row * p.ld_to + head * p.stride_to + i] = p.d_from[row * p.ld_from + head * p.stride_from + i];
}

x3_status x3_cuda_copy_heads(const x3_cuda_pieces *p, x3_cuda_stream stream, x3_err *err)
{
    const size_t n = p->n_rows * p->n_heads * p->n_cols;

    if (n == 0)
        return X3_OK;
    copy_heads<<<flat_grid(n), THREADS, 0, stream>>>(*p);
    return x3_cuda_check(cudaGetLastError(), "copying heads", err);
}

static __device__ __forceinline__ double warp_sum_double(double v)
{
#pragma unroll
    for (int lanes = X3_WARP / 2; lanes > 0; lanes /= 2)
        v += __shfl_xor_sync(X3_ALL_LANES, v, lanes);
    return v;
}

/* A warp a row. */
static __global__ void __launch_bounds__(THREADS) layer_norm(float *x, size_t n_rows, size_t n, const float *weight, const float *bias,
                                                            float eps)
{
    const int lane = threadIdx.x & 31;
    const size_t row = (size_t)blockIdx.x * (THREADS / X3_WARP) + (threadIdx.x >> 5);
    double mean = 0, variance = 0;

    if (row >= n_rows)
        return;
    x += row * n;
    for (size_t i = lane; i < n; i += X3_WARP)
        mean += (double)x[i];
    mean = warp_sum_double(mean) / (double)n;
    for (size_t i = lane; i < n; i += X3_WARP)
        variance += ((double)x[i] - mean) * ((double)x[i] - mean);
    const double scale = 1 / sqrt(warp_sum_double(variance) / (double)n + (double)eps);
    for (size_t i = lane; i < n; i += X3_WARP)
        x[i] = (float)(((double)x[i] - mean) * scale) * weight[i] + bias[i];
}

x3_status x3_cuda_layer_norm(float *d_x, size_t n_rows, size_t n, const float *d_weight, const float *d_bias, float eps,
                             x3_cuda_stream stream, x3_err *err)
{
    if (n_rows == 0)
        return X3_OK;
    layer_norm<<<flat_grid(n_rows * X3_WARP), THREADS, 0, stream>>>(d_x, n_rows, n, d_weight, d_bias, eps);
    return x3_cuda_check(cudaGetLastError(), "layer_norm", err);
}

/* ---- convolution --------------------------------------------------------------------------------------------------------- */

/* Row `at` of a sequence's inputs, counted from the batch's first; before it the state, at position 0 zeros. */
static __device__ __forceinline__ float conv_input(const x3_cuda_conv &c, const x3_cuda_sequence &s, int at, size_t channel)
{
    if (at >= 0)
        return c.d_x[(size_t)(s.first_row + at) * c.n + channel];
    if (s.position == 0)
        return 0;
    return c.d_state[(size_t)s.slot * c.state_stride + (size_t)(at + (int)c.kernel - 1) * c.n + channel];
}

static __global__ void __launch_bounds__(THREADS) conv_silu(const x3_cuda_conv c, const x3_cuda_batch b)
{
    const size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x, row = at / c.n, channel = at % c.n;

    if (row >= b.n_rows || b.d_row_sequence[row] < 0)
        return;
    const x3_cuda_sequence s = b.d_sequences[b.d_row_sequence[row]];
    const int kernel = (int)c.kernel, first = (int)row - s.first_row - kernel + 1;
    float y = c.d_weight[channel * kernel] * conv_input(c, s, first, channel);
    for (int j = 1; j < kernel; j++)
        y = y + c.d_weight[channel * kernel + j] * conv_input(c, s, first + j, channel);
    c.d_out[at] = y / (1.0f + exp_exact(0.0f - y)) * 1.0f;
}

/* The last rows become the state: row j of the new one is behind row j of the old, so that none is overwritten before it is
 * read. */
static __global__ void __launch_bounds__(THREADS) conv_state(const x3_cuda_conv c, const x3_cuda_batch b)
{
    const size_t channel = (size_t)blockIdx.x * THREADS + threadIdx.x;
    const x3_cuda_sequence s = b.d_sequences[blockIdx.y];

    if (channel >= c.n)
        return;
    for (int j = 0; j < (int)c.kernel - 1; j++)
        c.d_state[(size_t)s.slot * c.state_stride + (size_t)j * c.n + channel] =
            conv_input(c, s, s.n_rows - (int)c.kernel + 1 + j, channel);
}

x3_status x3_cuda_conv_silu(const x3_cuda_conv *c, const x3_cuda_batch *batch, x3_cuda_stream stream, x3_err *err)
{
    if (batch->n_rows == 0 || batch->n_sequences == 0)
        return X3_OK;
    conv_silu<<<flat_grid(batch->n_rows * c->n), THREADS, 0, stream>>>(*c, *batch);
    RETURN_IF_FAILED(x3_cuda_check(cudaGetLastError(), "convolution", err));
    conv_state<<<dim3(flat_grid(c->n).x, (unsigned)batch->n_sequences), THREADS, 0, stream>>>(*c, *batch);
    return x3_cuda_check(cudaGetLastError(), "convolution, states", err);
}

/* ---- delta rule ---------------------------------------------------------------------------------------------------------- */

/* Scratch: queries and keys of every row, normalized, [n_rows][2][n_k_heads * k_dim]; decay and beta [n_rows][n_v_heads][2]. */
typedef struct delta_args {
    x3_cuda_delta d;
    x3_cuda_batch batch;
    float *qk, *gates;
} delta_args;

/* A warp a key head of a row. */
static __global__ void __launch_bounds__(THREADS) delta_normalize(const delta_args a)
{
    const x3_cuda_delta &d = a.d;
    const int lane = threadIdx.x & 31;
    const size_t at = (size_t)blockIdx.x * (THREADS / X3_WARP) + (threadIdx.x >> 5), keys = d.n_k_heads * d.k_dim;
    const size_t row = at / (2 * d.n_k_heads), which = at / d.n_k_heads % 2, head = at % d.n_k_heads;
    float sum = 0, scale;

    if (row >= a.batch.n_rows)
        return;
    const float *from = d.d_qkv + row * (2 * keys + d.n_v_heads * d.v_dim) + which * keys + head * d.k_dim;
    float *to = a.qk + (row * 2 + which) * keys + head * d.k_dim;
    for (size_t i = lane; i < d.k_dim; i += X3_WARP)
        sum += from[i] * from[i];
    sum = warp_sum(sum);
    scale = which == 0 ? (float)(1 / sqrt((double)d.k_dim)) : 1.0f;
    scale /= sqrtf(sum + 1e-6f);
    for (size_t i = lane; i < d.k_dim; i += X3_WARP)
        to[i] = from[i] * scale;
}

static __global__ void __launch_bounds__(THREADS) delta_gates(const delta_args a)
{
    const x3_cuda_delta &d = a.d;
    const size_t at = (size_t)blockIdx.x * THREADS + threadIdx.x, head = at % d.n_v_heads;

    if (at >= a.batch.n_rows * d.n_v_heads)
        return;
    const float x = d.d_a[at] + d.d_dt_bias[head], softplus = x > 20 ? x : (float)log1p(exp((double)x));
    a.gates[2 * at] = exp_exact(-exp_exact(d.d_a_log[head]) * softplus);
    a.gates[2 * at + 1] = 1.0f / (1.0f + exp_exact(-d.d_b[at]));
}

#define DELTA_COLS 32 /* columns of a state in a block, four threads each */
#define DELTA_THREADS (4 * DELTA_COLS)
#define DELTA_ROWS 8 /* positions in shared memory at a time */

typedef struct delta_room {
    float v[DELTA_ROWS][DELTA_COLS], gates[DELTA_ROWS][2];
} delta_room;

/* Positions [first, first + n) of the batch's rows to shared memory; q and k [DELTA_ROWS][16 * I], zero past k_dim. */
template <int I>
static __device__ __forceinline__ void delta_fetch(const delta_args &a, float *q, float *k, delta_room *m, size_t first, int n,
                                                   int head)
{
    const x3_cuda_delta &d = a.d;
    const size_t keys = d.n_k_heads * d.k_dim, k_head = head / (d.n_v_heads / d.n_k_heads), values = d.n_v_heads * d.v_dim;

    for (int i = threadIdx.x; i < n * 16 * I; i += DELTA_THREADS) {
        const int r = i / (16 * I), c = i % (16 * I);
        const float *from = a.qk + (first + r) * 2 * keys + k_head * d.k_dim + c;
        q[i] = c < (int)d.k_dim ? from[0] : 0.0f;
        k[i] = c < (int)d.k_dim ? from[keys] : 0.0f;
    }
    for (int i = threadIdx.x; i < n * DELTA_COLS; i += DELTA_THREADS) {
        const int r = i / DELTA_COLS, c = blockIdx.x * DELTA_COLS + i % DELTA_COLS;
        m->v[r][i % DELTA_COLS] =
            c < (int)d.v_dim ? d.d_qkv[(first + r) * (2 * keys + values) + 2 * keys + head * d.v_dim + c] : 0.0f;
    }
    if ((int)threadIdx.x < 2 * n)
        m->gates[threadIdx.x / 2][threadIdx.x % 2] = a.gates[2 * ((first + threadIdx.x / 2) * d.n_v_heads + head) + threadIdx.x % 2];
}

/* Sum over the four threads of a column, the same in all. */
static __device__ __forceinline__ float quad_sum(float v)
{
    v += __shfl_xor_sync(X3_ALL_LANES, v, 1);
    return v + __shfl_xor_sync(X3_ALL_LANES, v, 2);
}

/* One position: s is this thread's part of a column, rows 16 i + 4 (thread % 4) + e. Returns the output. */
template <int I>
static __device__ __forceinline__ float delta_step(float4 s[I], const float4 *q, const float4 *k, float v, float decay, float beta)
{
    float4 sum = make_float4(0, 0, 0, 0);

#pragma unroll
    for (int i = 0; i < I; i++) {
        const float4 key = k[4 * i];
        s[i].x *= decay, s[i].y *= decay, s[i].z *= decay, s[i].w *= decay;
        sum.x = fmaf(s[i].x, key.x, sum.x), sum.y = fmaf(s[i].y, key.y, sum.y);
        sum.z = fmaf(s[i].z, key.z, sum.z), sum.w = fmaf(s[i].w, key.w, sum.w);
    }
    const float delta = beta * (v - quad_sum((sum.x + sum.y) + (sum.z + sum.w)));
    sum = make_float4(0, 0, 0, 0);
#pragma unroll
    for (int i = 0; i < I; i++) {
        const float4 key = k[4 * i], query = q[4 * i];
        s[i].x = fmaf(key.x, delta, s[i].x), s[i].y = fmaf(key.y, delta, s[i].y);
        s[i].z = fmaf(key.z, delta, s[i].z), s[i].w = fmaf(key.w, delta, s[i].w);
        sum.x = fmaf(s[i].x, query.x, sum.x), sum.y = fmaf(s[i].y, query.y, sum.y);
        sum.z = fmaf(s[i].z, query.z, sum.z), sum.w = fmaf(s[i].w, query.w, sum.w);
    }
    return quad_sum((sum.x + sum.y) + (sum.z + sum.w));
}

/* Grid: columns, value heads, sequences. The columns of a state do not meet. */
template <int I> static __global__ void __launch_bounds__(DELTA_THREADS) delta_rule(const __grid_constant__ delta_args a)
{
    __shared__ __align__(16) float q[DELTA_ROWS * 16 * I], k[DELTA_ROWS * 16 * I];
    __shared__ delta_room m;
    const x3_cuda_delta &d = a.d;
    const x3_cuda_sequence sequence = a.batch.d_sequences[blockIdx.z];
    const int head = blockIdx.y, in_block = threadIdx.x / 4, quarter = threadIdx.x % 4;
    const int column = blockIdx.x * DELTA_COLS + in_block, k_dim = (int)d.k_dim, v_dim = (int)d.v_dim;
    float *state = d.d_state + (size_t)sequence.slot * d.state_stride + (size_t)head * d.k_dim * d.v_dim;
    float4 s[I];

#pragma unroll
    for (int i = 0; i < 4 * I; i++) {
        const int row = i / 4 * 16 + quarter * 4 + i % 4;
        ((float *)s)[i] = sequence.position > 0 && row < k_dim && column < v_dim ? state[(size_t)row * v_dim + column] : 0.0f;
    }
    for (int at = 0; at < sequence.n_rows; at += DELTA_ROWS) {
        const int n = min(DELTA_ROWS, sequence.n_rows - at);
        const size_t first = (size_t)(sequence.first_row + at);
        __syncthreads();
        delta_fetch<I>(a, q, k, &m, first, n, head);
        __syncthreads();
        for (int r = 0; r < n; r++) {
            const float out = delta_step<I>(s, (const float4 *)(q + r * 16 * I) + quarter, (const float4 *)(k + r * 16 * I) + quarter,
                                            m.v[r][in_block], m.gates[r][0], m.gates[r][1]);
            if (quarter == 0 && column < v_dim)
                d.d_out[(first + r) * d.n_v_heads * d.v_dim + (size_t)head * v_dim + column] = out;
        }
    }
#pragma unroll
    for (int i = 0; i < 4 * I; i++) {
        const int row = i / 4 * 16 + quarter * 4 + i % 4;
        if (row < k_dim && column < v_dim)
            state[(size_t)row * v_dim + column] = ((float *)s)[i];
    }
}

size_t x3_cuda_delta_bytes(const x3_cuda_delta *d, size_t n_rows)
{
    return n_rows * (2 * d->n_k_heads * d->k_dim + 2 * d->n_v_heads) * sizeof(float);
}

x3_status x3_cuda_delta_rule(const x3_cuda_delta *d, const x3_cuda_batch *batch, void *d_scratch, x3_cuda_stream stream,
                             x3_err *err)
{
    const size_t n_rows = batch->n_rows;
    const dim3 grid((unsigned)((d->v_dim + DELTA_COLS - 1) / DELTA_COLS), (unsigned)d->n_v_heads, (unsigned)batch->n_sequences);
    delta_args a = {};

    if (n_rows == 0 || batch->n_sequences == 0)
        return X3_OK;
    if (d->k_dim > X3_CUDA_DELTA_DIM || d->n_v_heads % d->n_k_heads != 0)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "delta rule with %zu key heads of %zu and %zu value heads: %d at most, a multiple",
                       d->n_k_heads, d->k_dim, d->n_v_heads, X3_CUDA_DELTA_DIM);
    a.d = *d;
    a.batch = *batch;
    a.qk = (float *)d_scratch;
    a.gates = a.qk + n_rows * 2 * d->n_k_heads * d->k_dim;
    delta_normalize<<<flat_grid(n_rows * 2 * d->n_k_heads * X3_WARP), THREADS, 0, stream>>>(a);
    delta_gates<<<flat_grid(n_rows * d->n_v_heads), THREADS, 0, stream>>>(a);
    if (d->k_dim <= 32)
        delta_rule<2><<<grid, DELTA_THREADS, 0, stream>>>(a);
    else if (d->k_dim <= 64)
        delta_rule<4><<<grid, DELTA_THREADS, 0, stream>>>(a);
    else if (d->k_dim <= 128)
        delta_rule<8><<<grid, DELTA_THREADS, 0, stream>>>(a);
    else
        delta_rule<16><<<grid, DELTA_THREADS, 0, stream>>>(a);
    return x3_cuda_check(cudaGetLastError(), "delta rule", err);
}
