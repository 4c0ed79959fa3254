/* Causal attention over packed caches with mma.sync: packed_attention_cuda.cuh says what is computed. */

#include "kernels/packed_attention_cuda.cuh"

#define ROWS 16 /* of a warp */
#define WARPS 8
#define THREADS (WARPS * X3_WARP)

/* ---- operands -------------------------------------------------------------------------------------------------------- */

/* As mma_f16 for BF16. */
static __device__ __forceinline__ void mma_bf16(float c[4], const uint32_t a[4], uint32_t b0, uint32_t b1)
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

static __device__ __forceinline__ void int8_words(uint2 v, uint32_t out[4])
{
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const uint32_t w = i < 2 ? v.x : v.y;
        const int low = (int)(int8_t)(w >> (16 * (i & 1))), high = (int)(int8_t)(w >> (16 * (i & 1) + 8));
        out[i] = bf16_pair((float)low, (float)high);
    }
}

/* Dimensions 32 s + 8 q .. of the key at `position`, as pairs. */
template <int TYPE>
static __device__ __forceinline__ void key_words(const rows_of &k, int position, int s, int q, uint32_t out[4])
{
    const char *row = k.numbers + position * k.stride;

    if (TYPE == X3_KV_BF16) {
        const uint4 v = *(const uint4 *)(row + 64 * s + 16 * q);
        out[0] = v.x, out[1] = v.y, out[2] = v.z, out[3] = v.w;
    } else if (TYPE == X3_KV_INT8) {
        int8_words(*(const uint2 *)(row + 32 * s + 8 * q), out);
    } else {
        const uint32_t v = *(const uint32_t *)(row + 16 * s + 4 * q);
        const float scale = __uint_as_float((uint32_t)((const uint16_t *)k.scales)[s * PAGE + position] << 16);
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] = bf16_pair((float)((int)(v >> (8 * i) & 15) - 8) * scale, (float)((int)(v >> (8 * i + 4) & 15) - 8) * scale);
    }
}

/* Dimension d of the values at positions 32 sb + 8 q .., as pairs; beyond `last` zero where memory may hold anything. */
template <int TYPE>
static __device__ __forceinline__ void value_words(const rows_of &v, int d, int sb, int q, int last, uint32_t out[4])
{
    const int first = 32 * sb + 8 * q;

    if (TYPE == X3_KV_BF16) {
        const uint4 w = *(const uint4 *)(v.numbers + d * v.stride + 2 * first);
        out[0] = w.x, out[1] = w.y, out[2] = w.z, out[3] = w.w;
    } else if (TYPE == X3_KV_INT8) {
        int8_words(*(const uint2 *)(v.numbers + d * v.stride + first), out);
    } else {
        const uint2 w = *(const uint2 *)(v.numbers + (d / 32 * 16 + d % 16) * v.stride + first);
        const uint4 s = *(const uint4 *)(v.scales + (d / 32 * PAGE + first) * 2);
        const uint32_t scales[4] = {s.x, s.y, s.z, s.w};
        const int shift = d & 16 ? 4 : 0;
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const uint32_t pair = (i < 2 ? w.x : w.y) >> (16 * (i & 1) + shift);
            out[i] = bf16_pair((float)((int)(pair & 15) - 8) * __uint_as_float(scales[i] << 16),
                               (float)((int)(pair >> 8 & 15) - 8) * __uint_as_float(scales[i] & 0xFFFF0000u));
        }
    }
    if (TYPE != X3_KV_INT8 && last < PAGE - 1) {
#pragma unroll
        for (int i = 0; i < 4; i++)
            out[i] &= (first + 2 * i <= last ? 0xFFFFu : 0) | (first + 2 * i + 1 <= last ? 0xFFFF0000u : 0);
    }
}

/* Queries of 16 rows as operands: [k_dim / 16][high, low][lane], in the order of key_words. row(r) gives the row's numbers or
 * NULL. By one warp. */
static __device__ __forceinline__ void store_queries(uint4 *to, const float *row_g, const float *row_h, int k_dim, int lane)
{
    const int q = lane & 3;

    for (int s = 0; s < k_dim / 32; s++) {
        const float4 zero = make_float4(0, 0, 0, 0);
        const float4 *g = (const float4 *)(row_g + 32 * s + 8 * q), *h = (const float4 *)(row_h + 32 * s + 8 * q);
        const float4 a[2] = {row_g != NULL ? g[0] : zero, row_g != NULL ? g[1] : zero};
        const float4 b[2] = {row_h != NULL ? h[0] : zero, row_h != NULL ? h[1] : zero};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            uint4 high, low;
            split_pair(a[i].x, a[i].y, &high.x, &low.x);
            split_pair(b[i].x, b[i].y, &high.y, &low.y);
            split_pair(a[i].z, a[i].w, &high.z, &low.z);
            split_pair(b[i].z, b[i].w, &high.w, &low.w);
            to[((2 * s + i) * 2) * X3_WARP + lane] = high;
            to[((2 * s + i) * 2 + 1) * X3_WARP + lane] = low;
        }
    }
}

/* ---- a page ---------------------------------------------------------------------------------------------------------- */

/* Scores and weights. A row sees positions from[i] .. to[i] of the page. */
template <int TYPE, int BLOCKS_AT_ONCE>
static __device__ __forceinline__ void page_weights(const uint4 *queries, const rows_of &keys, const char *value_scales, int k_dim,
                                                    float scale, const int from[2], const int to[2], page_sums *out, int lane)
{
    const int q = lane & 3;
    float s[8][4];

#pragma unroll
    for (int j = 0; j < 8; j++)
        s[j][0] = s[j][1] = s[j][2] = s[j][3] = 0;
#pragma unroll(BLOCKS_AT_ONCE)
    for (int block = 0; block < k_dim / 32; block++) {
        const uint4 *a = queries + block * 4 * X3_WARP + lane;
        const uint4 h0 = a[0], l0 = a[X3_WARP], h1 = a[2 * X3_WARP], l1 = a[3 * X3_WARP];
        const uint32_t high0[4] = {h0.x, h0.y, h0.z, h0.w}, low0[4] = {l0.x, l0.y, l0.z, l0.w};
        const uint32_t high1[4] = {h1.x, h1.y, h1.z, h1.w}, low1[4] = {l1.x, l1.y, l1.z, l1.w};
        uint32_t w[8][4];
#pragma unroll
        for (int j = 0; j < 8; j++)
            key_words<TYPE>(keys, position_of(j, lane >> 2), block, q, w[j]);
        /* eight sums side by side: a product waits for the last one of its own sum */
#pragma unroll
        for (int j = 0; j < 8; j++)
            mma_bf16(s[j], high0, w[j][0], w[j][1]);
#pragma unroll
        for (int j = 0; j < 8; j++)
            mma_bf16(s[j], low0, w[j][0], w[j][1]);
#pragma unroll
        for (int j = 0; j < 8; j++)
            mma_bf16(s[j], high1, w[j][2], w[j][3]);
#pragma unroll
        for (int j = 0; j < 8; j++)
            mma_bf16(s[j], low1, w[j][2], w[j][3]);
    }
    weigh<TYPE>(s, keys.scales, value_scales, scale, from, to, out, lane);
}

#define TOGETHER 4 /* groups of dimensions whose sums are made side by side */

/* o[i] = weights times values of dimensions 8 (group + i) .. : o[i][0], [1] of row g, o[i][2], [3] of row g + 8. */
template <int TYPE>
static __device__ __forceinline__ void page_values(const page_sums *p, const rows_of &values, int group, int last, float o[TOGETHER][4],
                                                   int lane)
{
#pragma unroll
    for (int i = 0; i < TOGETHER; i++)
        o[i][0] = o[i][1] = o[i][2] = o[i][3] = 0;
#pragma unroll
    for (int sb = 0; sb < 2; sb++) {
        uint32_t w[TOGETHER][4];
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            value_words<TYPE>(values, 8 * (group + i) + (lane >> 2), sb, lane & 3, last, w[i]);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            mma_bf16(o[i], p->p_high[2 * sb], w[i][0], w[i][1]);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            mma_bf16(o[i], p->p_low[2 * sb], w[i][0], w[i][1]);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            mma_bf16(o[i], p->p_high[2 * sb + 1], w[i][2], w[i][3]);
#pragma unroll
        for (int i = 0; i < TOGETHER; i++)
            mma_bf16(o[i], p->p_low[2 * sb + 1], w[i][2], w[i][3]);
    }
}

/* ---- many rows of a sequence ------------------------------------------------------------------------------------------- */

/* Distance of rows in shared memory: no two lanes that read together meet in a bank. */
static __host__ __device__ __forceinline__ int shared_stride(int type, int row_bytes, bool keys)
{
    const int wanted = type == X3_KV_BF16 ? 64 : type == X3_KV_INT8 || !keys ? 32 : 16; /* bytes beyond a multiple of 128 */

    return (row_bytes - wanted + 127) / 128 * 128 + wanted;
}

typedef struct staged {
    int key_row, value_row, n_value_rows; /* bytes, bytes, rows of the block's part */
    int key_stride, value_stride;
    int key_scales, value_scales;         /* bytes */
    int at_values, at_key_scales, at_value_scales, bytes; /* in a stage */
} staged;

/* v: dimensions of values that a block takes. */
static __host__ __device__ __forceinline__ staged staged_of(x3_kv_type type, int k_dim, int v)
{
    staged s;

    s.key_row = k_dim * (type == X3_KV_BF16 ? 4 : type == X3_KV_INT8 ? 2 : 1) / 2;
    s.value_row = PAGE * (type == X3_KV_BF16 ? 2 : 1);
    s.n_value_rows = type == X3_KV_INT4 ? v / 2 : v;
    s.key_stride = shared_stride(type, s.key_row, true);
    s.value_stride = shared_stride(type, s.value_row, false);
    s.key_scales = (int)(x3_kv_block_bytes(type, (size_t)k_dim) - x3_kv_number_bytes(type, (size_t)k_dim));
    s.value_scales = (int)(x3_kv_block_bytes(type, (size_t)v) - x3_kv_number_bytes(type, (size_t)v));
    s.at_values = PAGE * s.key_stride;
    s.at_key_scales = s.at_values + s.n_value_rows * s.value_stride;
    s.at_value_scales = s.at_key_scales + s.key_scales;
    s.bytes = s.at_value_scales + s.value_scales;
    return s;
}

/* Starts copying n_rows of row_bytes. */
static __device__ __forceinline__ void copy_rows(char *to, int stride, const char *from, int row_bytes, int n_rows)
{
    const int pieces = row_bytes / 16;

    for (int i = threadIdx.x; i < n_rows * pieces; i += blockDim.x)
        copy_async_16(to + i / pieces * stride + i % pieces * 16, from + i * 16);
}

static __device__ __forceinline__ void stage_page(const attend_args &a, const staged &g, char *to, size_t page, int kv_head, int part)
{
    rows_of k, v;

    page_places(a, page, kv_head, part, &k, &v);
    copy_rows(to, g.key_stride, k.numbers, g.key_row, PAGE);
    copy_rows(to + g.at_values, g.value_stride, v.numbers, g.value_row, g.n_value_rows);
    copy_rows(to + g.at_key_scales, 16, k.scales, 16, g.key_scales / 16);
    copy_rows(to + g.at_value_scales, 16, v.scales, 16, g.value_scales / 16);
}

/* Rows that share a KV head (positions times its query heads, flattened), 16 a warp; pages come by way of shared memory. */
template <int TYPE> static __global__ void __launch_bounds__(THREADS, 1) attend_rows(const __grid_constant__ attend_args a)
{
    extern __shared__ __align__(16) char shared[];
    const int lane = threadIdx.x % X3_WARP, warp = threadIdx.x / X3_WARP, k_dim = (int)a.kv.k_dim, n_repeat = a.n_repeat;
    const int kv_head = blockIdx.y / a.n_parts, part = blockIdx.y % a.n_parts;
    const int n_columns = min(V_PART, (int)a.kv.v_dim - part * V_PART);
    begin_in_turn();
    const x3_cuda_sequence s = a.batch.d_sequences[blockIdx.z];
    const int n_block = (int)blockDim.x / X3_WARP * ROWS, n_rows = s.n_rows * n_repeat;
    const int first = (int)(gridDim.x - 1 - blockIdx.x) * n_block; /* the longest first */
    const staged g = staged_of((x3_kv_type)TYPE, k_dim, n_columns);
    uint4 *queries = (uint4 *)shared + warp * (k_dim / 16) * 2 * X3_WARP;
    char *stages = shared + n_block / ROWS * (k_dim / 16) * 2 * X3_WARP * 16;
    float o[V_GROUPS][4], M[2], L[2];
    int position[2];
    const float *row[2];

    if (first >= n_rows)
        return;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int flat = min(first + warp * ROWS + (lane >> 2) + 8 * i, n_rows - 1);
        position[i] = s.position + flat / n_repeat;
        row[i] = a.q + (size_t)(s.first_row + flat / n_repeat) * a.ldq + ((size_t)kv_head * n_repeat + flat % n_repeat) * k_dim;
        M[i] = a.sinks != NULL ? a.sinks[kv_head * n_repeat + flat % n_repeat] : NONE;
        L[i] = a.sinks != NULL ? 1 : 0;
    }
#pragma unroll
    for (int c = 0; c < V_GROUPS; c++)
        o[c][0] = o[c][1] = o[c][2] = o[c][3] = 0;
    const int warp_first = s.position + min(first + warp * ROWS, n_rows - 1) / n_repeat;
    const int warp_last = s.position + min(first + warp * ROWS + ROWS - 1, n_rows - 1) / n_repeat;
    const int last = s.position + min(first + n_block - 1, n_rows - 1) / n_repeat;
    const int earliest = s.position + first / n_repeat;
    const int begin = a.window > 0 ? max(0, earliest + 1 - a.window) / PAGE : 0, end = last / PAGE + 1;
    stage_page(a, g, stages, (size_t)a.batch.d_pages[s.first_page + begin], kv_head, part);
    copy_async_commit();
    store_queries(queries, row[0], row[1], k_dim, lane);
    for (int page = begin; page < end; page++) {
        char *stage = stages + (page - begin) % a.n_stages * g.bytes;
        if (a.n_stages == 1 && page > begin)
            stage_page(a, g, stage, (size_t)a.batch.d_pages[s.first_page + page], kv_head, part);
        if (a.n_stages == 2 && page + 1 < end)
            stage_page(a, g, stages + (page + 1 - begin) % 2 * g.bytes, (size_t)a.batch.d_pages[s.first_page + page + 1], kv_head, part);
        copy_async_commit();
        if (a.n_stages == 2)
            copy_async_wait<1>();
        else
            copy_async_wait<0>();
        __syncthreads();
        const int base = page * PAGE;
        if (base <= warp_last && (a.window == 0 || base + PAGE > warp_first + 1 - a.window)) {
            const rows_of keys = {stage, stage + g.at_key_scales, g.key_stride};
            const rows_of values = {stage + g.at_values, stage + g.at_value_scales, g.value_stride};
            const int to[2] = {position[0] - base, position[1] - base};
            const int from[2] = {a.window > 0 ? to[0] + 1 - a.window : 0, a.window > 0 ? to[1] + 1 - a.window : 0};
            float before[2], of_page[2];
            page_sums p;
            page_weights<TYPE, 1>(queries, keys, values.scales, k_dim, a.scale, from, to, &p, lane);
            for (int i = 0; i < 2; i++)
                merge(&M[i], &L[i], p.m[i], p.l[i], &before[i], &of_page[i]);
#pragma unroll
            for (int c = 0; c < V_GROUPS; c += TOGETHER) {
                float v[TOGETHER][4];
                if (8 * c >= n_columns)
                    break;
                page_values<TYPE>(&p, values, c, last - base, v, lane);
#pragma unroll
                for (int i = 0; i < 4 * TOGETHER; i++)
                    o[c + i / 4][i % 4] = o[c + i / 4][i % 4] * before[i % 4 >> 1] + v[i / 4][i % 4] * of_page[i % 4 >> 1];
            }
        }
        __syncthreads(); /* the stage is read */
    }
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int flat = first + warp * ROWS + (lane >> 2) + 8 * i;
        if (flat >= n_rows)
            continue;
        float *to = a.out + (size_t)(s.first_row + flat / n_repeat) * a.ldo +
                    ((size_t)kv_head * n_repeat + flat % n_repeat) * a.kv.v_dim + part * V_PART;
#pragma unroll
        for (int c = 0; c < V_GROUPS; c++)
            if (8 * c < n_columns)
                *(float2 *)(to + 8 * c + 2 * (lane & 3)) = make_float2(o[c][2 * i] / L[i], o[c][2 * i + 1] / L[i]);
    }
}

/* ---- one row a sequence -------------------------------------------------------------------------------------------------- */

/* One page for up to 16 query heads of a KV head, by one warp: sums to `to` [head][V_PART + 2]. */
template <int TYPE>
static __device__ __forceinline__ void decode_page(const attend_args &a, const uint4 *queries, size_t page, int base, int position,
                                                   int kv_head, int part, int n_heads, float *to, size_t ld, int lane)
{
    const int seen = position - base, before = a.window > 0 ? seen + 1 - a.window : 0;
    const int from[2] = {before, before}, last[2] = {seen, seen};
    const int n_columns = min(V_PART, (int)a.kv.v_dim - part * V_PART);
    rows_of keys, values;
    page_sums p;

    page_places(a, page, kv_head, part, &keys, &values);
    page_weights<TYPE, 4>(queries, keys, values.scales, (int)a.kv.k_dim, a.scale, from, last, &p, lane);
#pragma unroll
    for (int c = 0; c < V_GROUPS; c += TOGETHER) { /* columns are a multiple of 32 */
        float v[TOGETHER][4];
        if (8 * c >= n_columns)
            break;
        page_values<TYPE>(&p, values, c, seen, v, lane);
#pragma unroll
        for (int i = 0; i < 2 * TOGETHER; i++)
            if ((lane >> 2) + 8 * (i % 2) < n_heads)
                *(float2 *)(to + ((lane >> 2) + 8 * (i % 2)) * ld + 8 * (c + i / 2) + 2 * (lane & 3)) =
                    make_float2(v[i / 2][2 * (i % 2)], v[i / 2][2 * (i % 2) + 1]);
    }
#pragma unroll
    for (int i = 0; i < 2; i++)
        if ((lane >> 2) + 8 * i < n_heads && (lane & 3) == 0)
            *(float2 *)(to + ((lane >> 2) + 8 * i) * ld + n_columns) = make_float2(p.m[i], p.l[i]);
}

/* Brings a page near. The row that the kernel in front may still be writing is read again from there. */
template <int TYPE> static __device__ __forceinline__ void prefetch_page(const attend_args &a, size_t page, int kv_head, int part, int lane)
{
    rows_of keys, values;
    const staged g = staged_of((x3_kv_type)TYPE, (int)a.kv.k_dim, min(V_PART, (int)a.kv.v_dim - part * V_PART));

    page_places(a, page, kv_head, part, &keys, &values);
    for (int i = lane * 128; i < PAGE * g.key_row; i += X3_WARP * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(keys.numbers + i));
    for (int i = lane * 128; i < g.n_value_rows * g.value_row; i += X3_WARP * 128)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(values.numbers + i));
}

/* A block: one sequence, KV head, part, up to 16 of its heads. In pieces (PIECES): WARPS pages, whose sums go to memory. Else
 * all pages, WARPS at a time, merged in shared memory. */
template <int TYPE, bool PIECES> static __global__ void __launch_bounds__(THREADS) attend_one(const __grid_constant__ attend_args a)
{
    extern __shared__ __align__(16) char shared[];
    const int lane = threadIdx.x % X3_WARP, warp = threadIdx.x / X3_WARP, k_dim = (int)a.kv.k_dim;
    const int group = blockIdx.y % a.n_groups, part = blockIdx.y / a.n_groups % a.n_parts, kv_head = blockIdx.y / a.n_groups / a.n_parts;
    const int n_heads = min(ROWS, a.n_repeat - group * ROWS), head = kv_head * a.n_repeat + group * ROWS;
    const int n_columns = min(V_PART, (int)a.kv.v_dim - part * V_PART), ld = n_columns + 2;
    release_next_kernel();
    const x3_cuda_sequence s = a.batch.d_sequences[blockIdx.z]; /* no kernel writes it */
    const int first = a.window > 0 ? max(0, s.position + 1 - a.window) / PAGE : 0, end = s.position / PAGE + 1;
    const int begin = PIECES ? (int)blockIdx.x * WARPS : first, stop = PIECES ? min(end, begin + WARPS) : end;
    uint4 *queries = (uint4 *)shared;
    float *sums = (float *)(queries + (k_dim / 16) * 2 * X3_WARP); /* [WARPS][n_heads][ld] */

    if (s.n_rows != 0 && begin + warp < stop)
        prefetch_page<TYPE>(a, (size_t)a.batch.d_pages[s.first_page + begin + warp], kv_head, part, lane);
    wait_for_previous_kernel();
    if (s.n_rows == 0 || begin >= stop)
        return;
    const float *q = a.q + (size_t)s.first_row * a.ldq + (size_t)head * k_dim;
    if (warp == 0)
        store_queries(queries, lane >> 2 < n_heads ? q + (size_t)(lane >> 2) * k_dim : NULL,
                      (lane >> 2) + 8 < n_heads ? q + (size_t)((lane >> 2) + 8) * k_dim : NULL, k_dim, lane);
    __syncthreads();
    if (PIECES) {
        const int page = begin + warp;
        const size_t v_room = a.kv.v_dim + 2 * a.n_parts, n_q = a.kv.n_kv_heads * a.n_repeat;
        if (page >= first && page < stop)
            decode_page<TYPE>(a, queries, (size_t)a.batch.d_pages[s.first_page + page], page * PAGE, s.position, kv_head, part, n_heads,
                              a.partial + ((blockIdx.z * (size_t)a.n_pages + page) * n_q + head) * v_room + part * (V_PART + 2), v_room, lane);
        return;
    }
    /* thread t keeps column t % V_PART of heads t / V_PART, + 2, .. */
    const int column = threadIdx.x % V_PART;
    float o[ROWS / 2], M[ROWS / 2], L[ROWS / 2];
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int h = threadIdx.x / V_PART + 2 * i;
        o[i] = 0;
        M[i] = a.sinks != NULL && h < n_heads ? a.sinks[head + h] : NONE;
        L[i] = a.sinks != NULL ? 1 : 0;
    }
    for (int base = begin; base < stop; base += WARPS) {
        if (base + warp < stop)
            decode_page<TYPE>(a, queries, (size_t)a.batch.d_pages[s.first_page + base + warp], (base + warp) * PAGE, s.position, kv_head,
                              part, n_heads, sums + warp * n_heads * ld, (size_t)ld, lane);
        __syncthreads();
        for (int w = 0; w < min(WARPS, stop - base); w++)
#pragma unroll
            for (int i = 0; i < ROWS / 2; i++) {
                const int h = threadIdx.x / V_PART + 2 * i;
                if (h >= n_heads || column >= n_columns)
                    continue;
                const float *from = sums + (w * n_heads + h) * ld;
                float before, of_page;
                merge(&M[i], &L[i], from[n_columns], from[n_columns + 1], &before, &of_page);
                o[i] = o[i] * before + from[column] * of_page;
            }
        __syncthreads();
    }
#pragma unroll
    for (int i = 0; i < ROWS / 2; i++) {
        const int h = threadIdx.x / V_PART + 2 * i;
        if (h < n_heads && column < n_columns)
            a.out[(size_t)s.first_row * a.ldo + (size_t)(head + h) * a.kv.v_dim + part * V_PART + column] = o[i] / L[i];
    }
}

/* The pieces together: a block a head and part of a sequence. */
static __global__ void __launch_bounds__(V_PART) attend_together(const __grid_constant__ attend_args a)
{
    const int part = blockIdx.x % a.n_parts, head = blockIdx.x / a.n_parts, column = threadIdx.x;
    const int n_columns = min(V_PART, (int)a.kv.v_dim - part * V_PART);
    begin_in_turn();
    const x3_cuda_sequence s = a.batch.d_sequences[blockIdx.y];
    const int first = a.window > 0 ? max(0, s.position + 1 - a.window) / PAGE : 0, end = s.position / PAGE + 1;
    const size_t v_room = a.kv.v_dim + 2 * a.n_parts, step = a.kv.n_kv_heads * a.n_repeat * v_room;
    const float *from = a.partial + ((blockIdx.y * (size_t)a.n_pages + first) * a.kv.n_kv_heads * a.n_repeat + head) * v_room +
                        part * (V_PART + 2);
    float o = 0, M = a.sinks != NULL ? a.sinks[head] : NONE, L = a.sinks != NULL ? 1 : 0;

    if (s.n_rows == 0 || column >= n_columns)
        return;
#pragma unroll 4
    for (int page = first; page < end; page++, from += step) {
        float before, of_page;
        merge(&M, &L, from[n_columns], from[n_columns + 1], &before, &of_page);
        o = o * before + from[column] * of_page;
    }
    a.out[(size_t)s.first_row * a.ldo + (size_t)head * a.kv.v_dim + part * V_PART + column] = o / L;
}

/* ---- launches -------------------------------------------------------------------------------------------------------------- */

/* Pieces pay where there are fewer blocks than multiprocessors and a sequence is longer than one. */
static bool in_pieces(const x3_cuda_info *info, const attend_args *a)
{
    return a->batch.longest == 1 && a->n_pages > WARPS &&
           a->batch.n_sequences * a->kv.n_kv_heads * (size_t)(a->n_parts * a->n_groups) < (size_t)info->n_multiprocessors;
}

static attend_args args_of(const x3_cuda_attention *args, const x3_cuda_batch *batch)
{
    attend_args a = {};

    a.q = args->d_q;
    a.out = args->d_out;
    a.ldq = args->n_heads * args->kv.k_dim;
    a.ldo = args->n_heads * args->kv.v_dim;
    a.kv = args->kv;
    a.batch = *batch;
    a.scale = args->scale;
    a.sinks = args->d_sinks;
    a.n_repeat = (int)(args->n_heads / args->kv.n_kv_heads);
    a.window = (int)x3_min_size(args->window, INT32_MAX);
    a.n_parts = (int)((args->kv.v_dim + V_PART - 1) / V_PART);
    a.n_groups = (a.n_repeat + ROWS - 1) / ROWS;
    a.n_pages = (int)batch->most_pages;
    return a;
}

size_t x3_cuda_packed_bytes(const x3_cuda_info *info, const x3_cuda_attention *args, const x3_cuda_batch *batch)
{
    const attend_args a = args_of(args, batch);

    return !in_pieces(info, &a) ? 0
                                : batch->n_sequences * batch->most_pages * args->n_heads * (args->kv.v_dim + 2 * (size_t)a.n_parts) * sizeof(float);
}

template <int TYPE> static x3_status launch_rows(const x3_cuda_info *info, attend_args *a, x3_cuda_stream stream, x3_err *err)
{
    const size_t query_bytes = a->kv.k_dim / 16 * 2 * X3_WARP * 16, rows = a->batch.longest * (size_t)a->n_repeat;
    const size_t stage = (size_t)staged_of((x3_kv_type)TYPE, (int)a->kv.k_dim, (int)x3_min_size(V_PART, a->kv.v_dim)).bytes;
    void *args[] = {a};

    for (unsigned n_warps = WARPS; n_warps >= 2; n_warps /= 2)
        for (a->n_stages = 2; a->n_stages >= 1; a->n_stages--) {
            const size_t bytes = n_warps * query_bytes + (size_t)a->n_stages * stage, tile = n_warps * ROWS;
            if (bytes > info->shared_bytes)
                continue;
            return x3_cuda_launch(info, (const void *)attend_rows<TYPE>,
                                  dim3((unsigned)((rows + tile - 1) / tile), (unsigned)a->kv.n_kv_heads * (unsigned)a->n_parts,
                                       (unsigned)a->batch.n_sequences),
                                  (int)n_warps * X3_WARP, bytes, true, stream, args, "attention", err);
        }
    return x3_fail(err, X3_ERR_UNSUPPORTED, "attention with heads of %zu does not fit into %zu bytes of shared memory", a->kv.k_dim,
                   info->shared_bytes);
}

template <int TYPE> static x3_status launch(const x3_cuda_info *info, attend_args *a, x3_cuda_stream stream, x3_err *err)
{
    const size_t query_bytes = a->kv.k_dim / 16 * 2 * X3_WARP * 16;
    const unsigned n_sequences = (unsigned)a->batch.n_sequences, n_kv_heads = (unsigned)a->kv.n_kv_heads;
    void *args[] = {a};

    if (a->batch.longest > 1)
        return TYPE == X3_KV_BF16 && x3_attend_hopper_fits(info, a) ? x3_attend_hopper(info, a, stream, err)
                                                                   : launch_rows<TYPE>(info, a, stream, err);
    const int n_heads = a->n_repeat < ROWS ? a->n_repeat : ROWS;
    const size_t sums = (size_t)WARPS * (size_t)n_heads * (x3_min_size(V_PART, a->kv.v_dim) + 2) * sizeof(float);
    const unsigned heads = n_kv_heads * (unsigned)(a->n_parts * a->n_groups);
    if (!in_pieces(info, a))
        return x3_cuda_launch(info, (const void *)attend_one<TYPE, false>, dim3(1, heads, n_sequences), THREADS, query_bytes + sums, true,
                              stream, args, "attention", err);
    RETURN_IF_FAILED(x3_cuda_launch(info, (const void *)attend_one<TYPE, true>,
                                    dim3((unsigned)((a->n_pages + WARPS - 1) / WARPS), heads, n_sequences), THREADS, query_bytes, true,
                                    stream, args, "attention", err));
    return x3_cuda_launch(info, (const void *)attend_together,
                          dim3((unsigned)(a->kv.n_kv_heads * (size_t)(a->n_repeat * a->n_parts)), n_sequences), V_PART, 0, true, stream,
                          args, "attention", err);
}

x3_status x3_cuda_attend_packed(const x3_cuda_info *info, const x3_cuda_attention *args, const x3_cuda_batch *batch, float *d_partial,
                                x3_cuda_stream stream, x3_err *err)
{
    attend_args a = args_of(args, batch);

    a.partial = d_partial;
    if (args->kv.k_dim % X3_KV_GROUP != 0 || args->kv.v_dim % X3_KV_GROUP != 0 || args->kv.k_dim > X3_KV_DIM ||
        args->kv.v_dim > X3_KV_DIM)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "attention over a packed cache with heads of %zu and %zu: multiples of %d up to %d are known",
                       args->kv.k_dim, args->kv.v_dim, X3_KV_GROUP, X3_KV_DIM);
    if (batch->n_rows == 0)
        return X3_OK;
    return args->kv.type == X3_KV_BF16   ? launch<X3_KV_BF16>(info, &a, stream, err)
           : args->kv.type == X3_KV_INT8 ? launch<X3_KV_INT8>(info, &a, stream, err)
                                         : launch<X3_KV_INT4>(info, &a, stream, err);
}
