/* Cache append and causal attention on the GPU, float32.
 *
 * A block of threads takes 64 query rows that share a KV head (positions times the query heads of that head, flattened) and
 * walks over the pages they see. Scores, softmax and sums of a row follow one order that depends on its position alone: pages
 * that only other rows of the block see contribute exact zeros. What limits it: float32 multiply-adds, about half of the
 * peak. */
#include "kernels/cuda_ops.h"
#include "kernels/cuda_common.cuh"

#define PAGE 64
#define PANEL 16
#define TILE_ROWS 64 /* query rows of a block */
#define DEPTH 32     /* dimensions of queries and keys in shared memory at a time */
#define V_DEPTH 16   /* positions of values likewise: a panel, of which the values of a latent cache are */
#define LD (TILE_ROWS + 4)
#define THREADS 256

/* ---- cache ---------------------------------------------------------------------------------------------------------------- */

static __global__ void __launch_bounds__(THREADS) kv_append(const x3_cuda_kv kv, const x3_cuda_batch b, const float *k, size_t ldk,
                                                           const float *v, size_t ldv)
{
    const size_t row = blockIdx.x;

    if (b.d_row_sequence[row] < 0)
        return;
    const x3_cuda_sequence s = b.d_sequences[b.d_row_sequence[row]];
    const int position = s.position + ((int)row - s.first_row), in_page = position % PAGE;
    const size_t page = (size_t)b.d_pages[s.first_page + position / PAGE] * kv.n_kv_heads;

    for (size_t i = threadIdx.x; i < kv.n_kv_heads * kv.k_dim; i += THREADS) {
        const size_t head = i / kv.k_dim, d = i % kv.k_dim;
        kv.d_keys[(page + head) * PAGE * kv.k_dim + (size_t)(in_page / PANEL) * PANEL * kv.k_dim + d * PANEL + in_page % PANEL] =
            k[row * ldk + i];
    }
    for (size_t i = threadIdx.x; kv.d_values != NULL && i < kv.n_kv_heads * kv.v_dim; i += THREADS) {
        const size_t head = i / kv.v_dim, d = i % kv.v_dim;
        kv.d_values[((page + head) * PAGE + in_page) * kv.v_dim + d] = v[row * ldv + i];
    }
}

x3_status x3_cuda_kv_append(const x3_cuda_kv *kv, const x3_cuda_batch *batch, const float *d_k, size_t ldk, const float *d_v,
                            size_t ldv, x3_cuda_stream stream, x3_err *err)
{
    if (batch->n_rows == 0)
        return X3_OK;
    kv_append<<<(unsigned)batch->n_rows, THREADS, 0, stream>>>(*kv, *batch, d_k, ldk, d_v, ldv);
    return x3_cuda_check(cudaGetLastError(), "appending to the cache", err);
}

/* ---- attention -------------------------------------------------------------------------------------------------------------- */

typedef struct attend_args {
    const float *q;
    float *out;
    size_t ldq, ldo;
    x3_cuda_kv kv;
    x3_cuda_batch batch;
    float scale;
    const float *sinks;
    int n_repeat, window; /* window 0: none */
} attend_args;

/* What the 64 rows of a block have in common. */
typedef struct tile {
    x3_cuda_sequence s;
    int first, n_rows; /* flattened rows: position first / n_repeat, head first % n_repeat */
    int kv_head;
} tile;

static __device__ __forceinline__ int row_position(const attend_args &a, const tile &t, int r)
{
    return t.s.position + (t.first + r) / a.n_repeat;
}

/* Offset of flattened row r in q or out, for a head size of dim. */
static __device__ __forceinline__ size_t row_offset(const attend_args &a, const tile &t, int r, size_t ld, size_t dim)
{
    const int flat = t.first + r;

    return (size_t)(t.s.first_row + flat / a.n_repeat) * ld + ((size_t)t.kv_head * a.n_repeat + flat % a.n_repeat) * dim;
}

/* Shared memory of a block. */
typedef struct room {
    float q[DEPTH][LD];  /* dimension by row */
    float k[DEPTH][PAGE]; /* dimension by position */
    float p[PAGE][LD];   /* position by row */
} room;

/* s[i][j] = q row 4 ty + i . key of position 4 tx + j */
static __device__ __forceinline__ void page_scores(const attend_args &a, const tile &t, room *m, size_t page, float s[4][4], int tx,
                                                   int ty)
{
    const int k_dim = (int)a.kv.k_dim;
    const float *keys = a.kv.d_keys + (page * a.kv.n_kv_heads + t.kv_head) * PAGE * k_dim;

    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++)
            s[i][j] = 0;
    for (int d0 = 0; d0 < k_dim; d0 += DEPTH) {
        const int depth = min(DEPTH, k_dim - d0);
        __syncthreads();
        for (int i = threadIdx.x; i < TILE_ROWS * DEPTH / 4; i += THREADS) { /* 8 neighbours read 128 bytes of a row */
            const int r = i / (DEPTH / 4), d = i % (DEPTH / 4) * 4;
            float4 f = make_float4(0, 0, 0, 0);
            if (r < t.n_rows && d < depth)
                f = *(const float4 *)(a.q + row_offset(a, t, r, a.ldq, a.kv.k_dim) + d0 + d);
            m->q[d][r] = f.x, m->q[d + 1][r] = f.y, m->q[d + 2][r] = f.z, m->q[d + 3][r] = f.w;
        }
        for (int i = threadIdx.x; i < DEPTH * PAGE / 4; i += THREADS) { /* panels of [k_dim][16] */
            const int panel = i / (DEPTH * 4), d = i / 4 % DEPTH, c = i % 4 * 4;
            if (d < depth)
                *(float4 *)&m->k[d][panel * PANEL + c] =
                    *(const float4 *)(keys + (size_t)panel * PANEL * k_dim + (size_t)(d0 + d) * PANEL + c);
        }
        __syncthreads();
#pragma unroll 8
        for (int d = 0; d < depth; d++) {
            const float4 x = *(const float4 *)&m->q[d][4 * ty], y = *(const float4 *)&m->k[d][4 * tx];
            const float row[4] = {x.x, x.y, x.z, x.w}, column[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    s[i][j] = fmaf(row[i], column[j], s[i][j]);
        }
    }
}

/* out[i][c] += weight of row 4 ty + i times value, column 4 tx + 64 (c / 4) + c % 4. With masked, a weight of zero leaves the
 * sum as it is whatever the value: positions that a row does not see may hold anything. */
template <int COLS, bool MASKED>
static __device__ __forceinline__ void add_values(const room *m, const float *v, int first, float out[4][COLS], int tx, int ty)
{
#pragma unroll 4
    for (int p = 0; p < V_DEPTH; p++) {
        const float4 w = *(const float4 *)&m->p[first + p][4 * ty];
        const float weight[4] = {w.x, w.y, w.z, w.w};
#pragma unroll
        for (int c = 0; c < COLS; c += 4) {
            const float4 f = *(const float4 *)(v + p * COLS * 16 + 4 * tx + 16 * c);
            const float value[4] = {f.x, f.y, f.z, f.w};
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int j = 0; j < 4; j++)
                    if (!MASKED || weight[i] != 0)
                        out[i][c + j] = fmaf(weight[i], value[j], out[i][c + j]);
        }
    }
}

template <int COLS>
static __device__ __forceinline__ void page_values(const attend_args &a, const tile &t, const room *m, float *v, size_t page,
                                                   bool masked, float out[4][COLS], int tx, int ty)
{
    const int v_dim = (int)a.kv.v_dim;
    const bool latent = a.kv.d_values == NULL;
    const float *values = latent ? a.kv.d_keys + (page * a.kv.n_kv_heads + t.kv_head) * PAGE * a.kv.k_dim
                                 : a.kv.d_values + (page * a.kv.n_kv_heads + t.kv_head) * PAGE * v_dim;

    for (int first = 0; first < PAGE; first += V_DEPTH) {
        __syncthreads();
        for (int i = threadIdx.x; latent && i < COLS * 16 * V_DEPTH / 4; i += THREADS) { /* a panel, [k_dim][16] */
            const int c = i % (COLS * 16), p = i / (COLS * 16) * 4;
            float4 f = make_float4(0, 0, 0, 0);
            if (c < v_dim)
                f = *(const float4 *)(values + (size_t)first * a.kv.k_dim + c * PANEL + p);
            v[p * COLS * 16 + c] = f.x, v[(p + 1) * COLS * 16 + c] = f.y;
            v[(p + 2) * COLS * 16 + c] = f.z, v[(p + 3) * COLS * 16 + c] = f.w;
        }
        for (int i = threadIdx.x; !latent && i < V_DEPTH * COLS * 16 / 4; i += THREADS) {
            const int p = i / (COLS * 4), c = i % (COLS * 4) * 4;
            float4 f = make_float4(0, 0, 0, 0);
            if (c < v_dim)
                f = *(const float4 *)(values + (size_t)(first + p) * v_dim + c);
            *(float4 *)(v + p * COLS * 16 + c) = f;
        }
        __syncthreads();
        if (masked)
            add_values<COLS, true>(m, v, first, out, tx, ty);
        else
            add_values<COLS, false>(m, v, first, out, tx, ty);
    }
}

/* Row r's running maximum and sum, held by the 16 threads of its ty. */
static __device__ __forceinline__ void page_softmax(const float s[4], float *top, float *sum, float *rescale, float p[4])
{
    float m = fmaxf(fmaxf(s[0], s[1]), fmaxf(s[2], s[3])), total;

    for (int lanes = 1; lanes < 16; lanes *= 2)
        m = fmaxf(m, __shfl_xor_sync(X3_ALL_LANES, m, lanes));
    m = fmaxf(m, *top);
    for (int j = 0; j < 4; j++)
        p[j] = s[j] == -CUDART_INF_F ? 0 : expf(s[j] - m);
    total = (p[0] + p[1]) + (p[2] + p[3]);
    for (int lanes = 1; lanes < 16; lanes *= 2)
        total += __shfl_xor_sync(X3_ALL_LANES, total, lanes);
    *rescale = *top == m ? 1.0f : expf(*top - m); /* also when both are -infinity: nothing seen yet */
    *sum = *sum * *rescale + total;
    *top = m;
}

static __device__ __forceinline__ tile tile_of(const attend_args &a)
{
    tile t;

    t.s = a.batch.d_sequences[blockIdx.z];
    t.kv_head = blockIdx.y;
    t.first = (int)(gridDim.x - 1 - blockIdx.x) * TILE_ROWS; /* the longest rows first */
    t.n_rows = min(TILE_ROWS, t.s.n_rows * a.n_repeat - t.first);
    return t;
}

template <int COLS> static __global__ void __launch_bounds__(THREADS) attend(const __grid_constant__ attend_args a)
{
    extern __shared__ __align__(16) float shared[];
    room *m = (room *)shared;
    float *v = shared + sizeof(room) / sizeof(float); /* [V_DEPTH][COLS * 16] */
    const int tx = threadIdx.x % 16, ty = threadIdx.x / 16;
    const tile t = tile_of(a);
    float out[4][COLS] = {}, top[4], sum[4];
    int position[4], from[4];

    if (t.n_rows <= 0)
        return;
    for (int i = 0; i < 4; i++) {
        const int r = min(4 * ty + i, t.n_rows - 1);
        position[i] = row_position(a, t, r);
        from[i] = a.window > 0 ? position[i] + 1 - a.window : 0;
        top[i] = a.sinks != NULL ? a.sinks[t.kv_head * a.n_repeat + (t.first + r) % a.n_repeat] : -CUDART_INF_F;
        sum[i] = a.sinks != NULL ? 1 : 0;
    }
    const int last = row_position(a, t, t.n_rows - 1), first_position = row_position(a, t, 0);
    const int begin = a.window > 0 ? max(0, first_position + 1 - a.window) / PAGE * PAGE : 0;
    for (int base = begin; base <= last; base += PAGE) {
        const size_t page = (size_t)a.batch.d_pages[t.s.first_page + base / PAGE];
        const bool masked = base + PAGE - 1 > first_position || (a.window > 0 && base < last + 1 - a.window);
        float s[4][4], p[4], rescale;
        page_scores(a, t, m, page, s, tx, ty);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            for (int j = 0; j < 4; j++) {
                const int at = base + 4 * tx + j;
                s[i][j] = masked && (at > position[i] || at < from[i]) ? -CUDART_INF_F : s[i][j] * a.scale;
            }
            page_softmax(s[i], &top[i], &sum[i], &rescale, p);
#pragma unroll
            for (int c = 0; c < COLS; c++)
                out[i][c] *= rescale;
            for (int j = 0; j < 4; j++)
                m->p[4 * tx + j][4 * ty + i] = p[j];
        }
        page_values<COLS>(a, t, m, v, page, masked, out, tx, ty);
    }
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if (4 * ty + i >= t.n_rows)
            break;
        float *to = a.out + row_offset(a, t, 4 * ty + i, a.ldo, a.kv.v_dim);
#pragma unroll
        for (int c = 0; c < COLS; c++) {
            const int column = 4 * tx + 16 * (c / 4 * 4) + c % 4;
            if (column < (int)a.kv.v_dim)
                to[column] = out[i][c] / sum[i];
        }
    }
}

x3_status x3_cuda_attend(const x3_cuda_attention *args, const x3_cuda_batch *batch, x3_cuda_stream stream, x3_err *err)
{
    const size_t v_dim = args->kv.v_dim, k_dim = args->kv.k_dim;
    const int cols = v_dim <= 64 ? 4 : v_dim <= 128 ? 8 : v_dim <= 256 ? 16 : 32;
    const void *kernel = cols == 4 ? (const void *)attend<4> : cols == 8 ? (const void *)attend<8>
                         : cols == 16 ? (const void *)attend<16> : (const void *)attend<32>;
    const size_t shared_bytes = sizeof(room) + (size_t)V_DEPTH * (size_t)cols * 16 * sizeof(float);
    attend_args a = {};

    if (v_dim > X3_CUDA_V_DIM || v_dim % 4 != 0 || k_dim % 4 != 0)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "attention with heads of %zu and %zu: multiples of 4 up to %d are known", k_dim,
                       v_dim, X3_CUDA_V_DIM);
    if (batch->n_rows == 0)
        return X3_OK;
    a.q = args->d_q;
    a.out = args->d_out;
    a.ldq = args->n_heads * k_dim;
    a.ldo = args->n_heads * v_dim;
    a.kv = args->kv;
    a.batch = *batch;
    a.scale = args->scale;
    a.sinks = args->d_sinks;
    a.n_repeat = (int)(args->n_heads / args->kv.n_kv_heads);
    a.window = (int)x3_min_size(args->window, INT32_MAX);
    const size_t n_tiles = (batch->longest * (size_t)a.n_repeat + TILE_ROWS - 1) / TILE_ROWS;
    RETURN_IF_FAILED(x3_cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)shared_bytes),
                                   "attention", err));
    void *pointers[] = {&a};
    return x3_cuda_check(cudaLaunchKernel(kernel, dim3((unsigned)n_tiles, (unsigned)args->kv.n_kv_heads,
                                                       (unsigned)batch->n_sequences), dim3(THREADS), pointers, shared_bytes, stream),
                         "attention", err);
}
