/* Selection of positions by an indexer and attention over the selected ones, on the GPU. */
#include "kernels/cuda_mixers.h"
#include "kernels/cuda_common.cuh"

#define PAGE 64
#define PANEL 16

/* ---- scores of positions -------------------------------------------------------------------------------------------------- */

#define SCORE_ROWS 4
#define SCORE_HEADS 8 /* at a time */
#define SCORE_THREADS (SCORE_ROWS * PAGE)

typedef struct score_args {
    x3_cuda_select s;
    x3_cuda_batch batch;
} score_args;

/* Queries of SCORE_ROWS rows and SCORE_HEADS heads to shared memory, [row][dim][head]; zero where there are none. */
static __device__ __forceinline__ void fetch_queries(const x3_cuda_select &s, float *to, int first_row, int n_rows, int head)
{
    const int dim = (int)s.dim, heads = (int)s.n_heads;

    for (int i = threadIdx.x; i < SCORE_ROWS * SCORE_HEADS * dim; i += SCORE_THREADS) {
        const int d = i % dim, h = i / dim % SCORE_HEADS, r = i / dim / SCORE_HEADS;
        to[(r * dim + d) * SCORE_HEADS + h] =
            r < n_rows && head + h < heads ? s.d_q[((size_t)(first_row + r) * heads + head + h) * dim + d] : 0.0f;
    }
}

/* Grid: pages, rows of a sequence four at a time, sequences. A thread: one position for one row. */
static __global__ void __launch_bounds__(SCORE_THREADS) score_positions(const __grid_constant__ score_args a)
{
    extern __shared__ __align__(16) float room[]; /* keys [dim][PAGE], queries */
    const x3_cuda_select &s = a.s;
    const x3_cuda_sequence q = a.batch.d_sequences[blockIdx.z];
    const int dim = (int)s.dim, column = threadIdx.x % PAGE, r = threadIdx.x / PAGE, position = (int)blockIdx.x * PAGE + column;
    /* rows of the sequence that this call is about */
    const int begin = max(q.first_row, (int)s.first_row), end = min(q.first_row + q.n_rows, (int)(s.first_row + s.n_rows));
    const int row = begin + blockIdx.y * SCORE_ROWS, n_rows = min(SCORE_ROWS, end - row);
    float *queries = room + dim * PAGE, total = 0;

    if (n_rows <= 0 || (int)blockIdx.x * PAGE > q.position + (row + n_rows - 1 - q.first_row))
        return;
    const float *keys = s.d_keys + (size_t)a.batch.d_pages[q.first_page + blockIdx.x] * PAGE * dim;
    for (int i = threadIdx.x; i < dim * PAGE; i += SCORE_THREADS) /* panels of [dim][16] */
        room[i / PANEL % dim * PAGE + i / PANEL / dim * PANEL + i % PANEL] = keys[i];
    for (int head = 0; head < (int)s.n_heads; head += SCORE_HEADS) {
        float dot[SCORE_HEADS] = {};
        __syncthreads();
        fetch_queries(s, queries, row, n_rows, head);
        __syncthreads();
        for (int d = 0; d < dim; d++) {
            const float key = room[d * PAGE + column];
            const float4 low = *(const float4 *)(queries + (r * dim + d) * SCORE_HEADS);
            const float4 high = *(const float4 *)(queries + (r * dim + d) * SCORE_HEADS + 4);
            dot[0] = fmaf(low.x, key, dot[0]), dot[1] = fmaf(low.y, key, dot[1]);
            dot[2] = fmaf(low.z, key, dot[2]), dot[3] = fmaf(low.w, key, dot[3]);
            dot[4] = fmaf(high.x, key, dot[4]), dot[5] = fmaf(high.y, key, dot[5]);
            dot[6] = fmaf(high.z, key, dot[6]), dot[7] = fmaf(high.w, key, dot[7]);
        }
#pragma unroll
        for (int h = 0; h < SCORE_HEADS; h++)
            if (r < n_rows && head + h < (int)s.n_heads)
                total += s.d_weights[(size_t)(row + r) * s.n_heads + head + h] * (dot[h] > 0 ? dot[h] : 0.0f);
    }
    if (r < n_rows && position <= q.position + (row + r - q.first_row))
        s.d_scores[(size_t)(row + r - (int)s.first_row) * s.n_positions + position] = total;
}

/* ---- the best of them ------------------------------------------------------------------------------------------------------ */

#define TOP_THREADS 512
#define TOP_WARPS (TOP_THREADS / X3_WARP)

/* Larger numbers have larger keys; -0 and 0 are equal. */
static __device__ __forceinline__ uint32_t order_of(float v)
{
    const uint32_t u = __float_as_uint(v == 0 ? 0.0f : v);

    return u & 0x80000000u ? ~u : u | 0x80000000u;
}

/* The key of which `wanted` or more are as large, found eight bits at a time; *more: how many are larger. */
static __device__ __forceinline__ uint32_t threshold_of(const float *scores, int n, int wanted, int *more)
{
    __shared__ uint32_t counts[256], prefix;
    __shared__ int larger;

    if (threadIdx.x == 0) {
        prefix = 0;
        larger = 0;
    }
    for (int shift = 24; shift >= 0; shift -= 8) {
        if (threadIdx.x < 256)
            counts[threadIdx.x] = 0;
        __syncthreads();
        const uint32_t above = prefix;
        for (int i = threadIdx.x; i < n; i += TOP_THREADS) {
            const uint32_t key = order_of(scores[i]);
            if (shift == 24 || key >> (shift + 8) == above >> (shift + 8))
                atomicAdd(&counts[key >> shift & 255], 1u);
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int digit = 255, sum = larger;
            while (digit > 0 && sum + (int)counts[digit] < wanted)
                sum += (int)counts[digit--];
            larger = sum;
            prefix |= (uint32_t)digit << shift;
        }
        __syncthreads();
    }
    *more = larger;
    return prefix;
}

/* Number of threads before this one, and in all, for which the flag is set. */
static __device__ __forceinline__ int rank_of(bool flag, int counts[TOP_WARPS], int *all)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const uint32_t lanes = __ballot_sync(X3_ALL_LANES, flag);
    int before = __popc(lanes & ((1u << lane) - 1));

    if (lane == 0)
        counts[warp] = __popc(lanes);
    __syncthreads();
    *all = 0;
    for (int w = 0; w < TOP_WARPS; w++) {
        before += w < warp ? counts[w] : 0;
        *all += counts[w];
    }
    __syncthreads();
    return before;
}

/* A block a row: positions above the threshold, and of those at it the first ones, in order. */
static __global__ void __launch_bounds__(TOP_THREADS) select_best(const __grid_constant__ score_args a)
{
    __shared__ int counts[TOP_WARPS];
    const x3_cuda_select &s = a.s;
    const int row = (int)s.first_row + blockIdx.x, wanted = (int)s.n_selected;

    if (a.batch.d_row_sequence[row] < 0)
        return;
    const x3_cuda_sequence q = a.batch.d_sequences[a.batch.d_row_sequence[row]];
    const int n = q.position + (row - q.first_row) + 1;
    const float *scores = s.d_scores + (size_t)blockIdx.x * s.n_positions;
    int32_t *to = s.d_selected + (size_t)row * s.n_selected;
    int more, n_out = 0, n_equal = 0;

    if (n <= wanted)
        return;
    const uint32_t threshold = threshold_of(scores, n, wanted, &more);
    for (int start = 0; start < n; start += TOP_THREADS) {
        const int i = start + threadIdx.x;
        const uint32_t key = i < n ? order_of(scores[i]) : 0;
        int all_equal, all;
        const int equal = n_equal + rank_of(i < n && key == threshold, counts, &all_equal);
        const bool chosen = i < n && (key > threshold || (key == threshold && equal < wanted - more));
        const int at = n_out + rank_of(chosen, counts, &all);
        if (chosen)
            to[at] = i;
        n_equal += all_equal;
        n_out += all;
    }
}

x3_status x3_cuda_select_positions(const x3_cuda_select *s, const x3_cuda_batch *batch, x3_cuda_stream stream, x3_err *err)
{
    const size_t shared_bytes = s->dim * (PAGE + SCORE_ROWS * SCORE_HEADS) * sizeof(float);
    score_args a = {};

    if (s->n_rows == 0 || batch->n_sequences == 0)
        return X3_OK;
    if (s->dim > X3_CUDA_SELECT_DIM)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "an indexer with heads of %zu: %d at most", s->dim, X3_CUDA_SELECT_DIM);
    a.s = *s;
    a.batch = *batch;
    const size_t longest = x3_min_size(batch->longest, s->n_rows);
    const dim3 grid((unsigned)((s->n_positions + PAGE - 1) / PAGE), (unsigned)((longest + SCORE_ROWS - 1) / SCORE_ROWS),
                    (unsigned)batch->n_sequences);
    RETURN_IF_FAILED(x3_cuda_check(cudaFuncSetAttribute(score_positions, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        (int)shared_bytes), "scoring positions", err));
    score_positions<<<grid, SCORE_THREADS, shared_bytes, stream>>>(a);
    RETURN_IF_FAILED(x3_cuda_check(cudaGetLastError(), "scoring positions", err));
    select_best<<<(unsigned)s->n_rows, TOP_THREADS, 0, stream>>>(a);
    return x3_cuda_check(cudaGetLastError(), "selecting positions", err);
}

/* ---- attention -------------------------------------------------------------------------------------------------------------- */

#define HEADS_EACH 2 /* of a warp */
#define HEADS 16     /* of a block */
#define THREADS (HEADS / HEADS_EACH * X3_WARP)
#define KEY_LD (PANEL + 1)
#define COLS (X3_CUDA_V_DIM / X3_WARP) /* of a lane, at most */

typedef struct sparse_args {
    x3_cuda_attention a;
    x3_cuda_batch batch;
    const int32_t *selected;
    size_t n_selected;
} sparse_args;

/* Keys of 16 positions to [k_dim][KEY_LD], values where there are any to [16][v_dim]. Positions past the end are zero. */
static __device__ __forceinline__ void fetch_positions(const sparse_args &t, const int32_t *pages, const int32_t *list, int first,
                                                       int n, float *keys, float *values)
{
    const int k_dim = (int)t.a.kv.k_dim, v_dim = (int)t.a.kv.v_dim, c = threadIdx.x % PANEL, at = first + c;
    const int position = at >= n ? -1 : list != NULL ? list[at] : at;
    const size_t page = position < 0 ? 0 : (size_t)pages[position / PAGE], in_page = position < 0 ? 0 : position % PAGE;
    const float *from = t.a.kv.d_keys + page * PAGE * k_dim + in_page / PANEL * PANEL * k_dim + in_page % PANEL;

    for (int d = threadIdx.x / PANEL; d < k_dim; d += THREADS / PANEL)
        keys[d * KEY_LD + c] = position < 0 ? 0.0f : from[(size_t)d * PANEL];
    if (t.a.kv.d_values == NULL)
        return;
    for (int d = threadIdx.x / PANEL; d < v_dim; d += THREADS / PANEL)
        values[c * v_dim + d] = position < 0 ? 0.0f : t.a.kv.d_values[(page * PAGE + in_page) * v_dim + d];
}

/* Scores of 16 positions for one head; lane c and lane c + 16 hold that of position c. */
static __device__ __forceinline__ float score_16(const float *q, const float *keys, int k_dim, int lane)
{
    float sum = 0;

    for (int d = lane / PANEL; d < k_dim; d += 2)
        sum = fmaf(q[d], keys[d * KEY_LD + lane % PANEL], sum);
    return sum + __shfl_xor_sync(X3_ALL_LANES, sum, PANEL);
}

/* Grid: heads 16 at a time, rows. Softmax as in attention_cuda.cu. */
static __global__ void __launch_bounds__(THREADS) attend_selected(const __grid_constant__ sparse_args t)
{
    extern __shared__ float room[]; /* queries [HEADS][k_dim], keys [k_dim][KEY_LD], values [16][v_dim] */
    const int k_dim = (int)t.a.kv.k_dim, v_dim = (int)t.a.kv.v_dim, lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int row = blockIdx.y, head = blockIdx.x * HEADS, n_heads = (int)t.a.n_heads;
    float *keys = room + HEADS * k_dim, *values = keys + k_dim * KEY_LD;
    const bool latent = t.a.kv.d_values == NULL;
    float out[HEADS_EACH][COLS] = {}, top[HEADS_EACH], sum[HEADS_EACH] = {};

    if (t.batch.d_row_sequence[row] < 0)
        return;
    const x3_cuda_sequence s = t.batch.d_sequences[t.batch.d_row_sequence[row]];
    const int seen = s.position + (row - s.first_row) + 1;
    const bool all = seen <= (int)t.n_selected;
    const int n = all ? seen : (int)t.n_selected;
    const int32_t *list = all ? NULL : t.selected + (size_t)row * t.n_selected, *pages = t.batch.d_pages + s.first_page;
    for (int i = threadIdx.x; i < HEADS * k_dim; i += THREADS)
        room[i] = head + i / k_dim < n_heads ? t.a.d_q[((size_t)row * n_heads + head) * k_dim + i] : 0.0f;
    for (int h = 0; h < HEADS_EACH; h++)
        top[h] = -CUDART_INF_F;
    for (int first = 0; first < n; first += PANEL) {
        __syncthreads();
        fetch_positions(t, pages, list, first, n, keys, values);
        __syncthreads();
#pragma unroll
        for (int h = 0; h < HEADS_EACH; h++) {
            float score = score_16(room + (warp * HEADS_EACH + h) * k_dim, keys, k_dim, lane) * t.a.scale, m, p, total;
            score = first + lane % PANEL < n ? score : -CUDART_INF_F;
            m = score;
            for (int lanes = 1; lanes < PANEL; lanes *= 2)
                m = fmaxf(m, __shfl_xor_sync(X3_ALL_LANES, m, lanes));
            m = fmaxf(m, top[h]);
            p = score == -CUDART_INF_F ? 0.0f : expf(score - m);
            total = p;
            for (int lanes = 1; lanes < PANEL; lanes *= 2)
                total += __shfl_xor_sync(X3_ALL_LANES, total, lanes);
            const float rescale = top[h] == m ? 1.0f : expf(top[h] - m);
            sum[h] = sum[h] * rescale + total;
            top[h] = m;
#pragma unroll
            for (int c = 0; c < COLS; c++)
                out[h][c] *= rescale;
            for (int j = 0; j < PANEL; j++) {
                const float weight = __shfl_sync(X3_ALL_LANES, p, j);
#pragma unroll
                for (int c = 0; c < COLS; c++) {
                    const int column = c * X3_WARP + lane;
                    if (column < v_dim)
                        out[h][c] = fmaf(weight, latent ? keys[column * KEY_LD + j] : values[j * v_dim + column], out[h][c]);
                }
            }
        }
    }
#pragma unroll
    for (int h = 0; h < HEADS_EACH; h++)
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            const int column = c * X3_WARP + lane, to = head + warp * HEADS_EACH + h;
            if (column < v_dim && to < n_heads)
                t.a.d_out[((size_t)row * n_heads + to) * v_dim + column] = out[h][c] / sum[h];
        }
}

x3_status x3_cuda_attend_selected(const x3_cuda_attention *a, const int32_t *d_selected, size_t n_selected,
                                  const x3_cuda_batch *batch, x3_cuda_stream stream, x3_err *err)
{
    const size_t k_dim = a->kv.k_dim, v_dim = a->kv.v_dim;
    const size_t shared_bytes = (HEADS * k_dim + k_dim * KEY_LD + (a->kv.d_values == NULL ? 0 : PANEL * v_dim)) * sizeof(float);
    sparse_args t = {};

    if (a->kv.n_kv_heads != 1 || a->window != 0 || a->d_sinks != NULL)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "attention over a selection has one KV head, no window and no sinks");
    if (v_dim > X3_CUDA_V_DIM || shared_bytes > 99 * 1024)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "attention over a selection with heads of %zu and %zu: %d at most", k_dim, v_dim,
                       X3_CUDA_V_DIM);
    t.a = *a;
    t.batch = *batch;
    t.selected = d_selected;
    t.n_selected = n_selected;
    RETURN_IF_FAILED(x3_cuda_check(cudaFuncSetAttribute(attend_selected, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        (int)shared_bytes), "attention over a selection", err));
    if (batch->n_rows > 65535)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "attention over a selection of %zu rows: 65535 at once", batch->n_rows);
    if (batch->n_rows == 0)
        return X3_OK;
    attend_selected<<<dim3((unsigned)((a->n_heads + HEADS - 1) / HEADS), (unsigned)batch->n_rows), THREADS, shared_bytes, stream>>>(t);
    return x3_cuda_check(cudaGetLastError(), "attention over a selection", err);
}
