/* Causal attention over packed caches (kv_types.h) on tensor cores: what its files share.
 *
 * Numbers of the cache are exact in BF16 (INT8: the integers, whose scales join after the product). Queries and weights of
 * positions are split into two BF16 numbers, 16 bits together; sums are float32.
 *
 * A row's answer: for each page in order, scores, their maximum m and sum l of weights, and o, the weights times values
 * from nothing; then (M, L, O) := the same after the page (merge). Every form here does these operations in this order, and a
 * page that a row does not see changes nothing: so a row's bits depend neither on its neighbours nor on the form.
 *
 * Operands without shuffles: the products sum over any order of dimensions and of positions, so a lane takes 8 neighbours at
 * a time, as they lie in memory, and columns of scores are numbered (position_of) so that it has the weights of the
 * positions whose values it loads. */
#ifndef X3_PACKED_ATTENTION_CUDA_CUH
#define X3_PACKED_ATTENTION_CUDA_CUH

#include <cuda_bf16.h>

#include "kernels/cuda_common.cuh"
#include "kernels/cuda_ops.h"

#define PAGE X3_KV_PAGE
#define V_PART 128 /* dimensions of values a block takes */
#define V_GROUPS (V_PART / 8)
#define NONE (-CUDART_INF_F)

typedef struct attend_args {
    const float *q;
    float *out;
    size_t ldq, ldo;
    x3_cuda_kv kv;
    x3_cuda_batch batch;
    float scale;
    const float *sinks;
    int n_repeat, window; /* window 0: none */
    int n_parts;          /* of V_PART dimensions of values */
    int n_groups;         /* of ROWS query heads that share a KV head: decoding */
    int n_pages;          /* of a sequence at most, as the grid has it: decoding in pieces */
    int n_stages;         /* pages in shared memory: many rows */
    float *partial;       /* [sequence][page][head][v_dim + 2] */
} attend_args;

static __device__ __forceinline__ uint32_t bf16_pair(float low, float high)
{
    const __nv_bfloat162 v = __floats2bfloat162_rn(low, high);

    return *(const uint32_t *)&v;
}

/* Two numbers as the high and the low halves of each. */
static __device__ __forceinline__ void split_pair(float x, float y, uint32_t *high, uint32_t *low)
{
    const uint32_t h = bf16_pair(x, y);

    *high = h;
    *low = bf16_pair(x - __uint_as_float(h << 16), y - __uint_as_float(h & 0xFFFF0000u));
}

/* Column n of group j of scores is this position of the page. */
static __device__ __forceinline__ int position_of(int j, int n)
{
    return 32 * (j >> 2) + 8 * (n >> 1) + 2 * (j & 3) + (n & 1);
}

/* Rows of numbers in memory: their distance in bytes, and where the scales are. */
typedef struct rows_of {
    const char *numbers, *scales;
    int stride;
} rows_of;

/* What a page gives rows g and g + 8 of a warp. */
typedef struct page_sums {
    float m[2], l[2];
    uint32_t p_high[4][4], p_low[4][4]; /* weights as operands, 16 positions each */
} page_sums;

/* Weights from a page's scores s[j][e]: column 8 j + 2 q + e % 2 of row g + 8 (e / 2). A row sees positions from[i] .. to[i] of the page; s
 * is overwritten. */
template <int TYPE>
static __device__ __forceinline__ void weigh(float s[8][4], const char *key_scales, const char *value_scales, float scale, const int from[2],
                                             const int to[2], page_sums *out, int lane)
{
    const int q = lane & 3;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        out->m[i] = NONE;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const int at = position_of(j, 2 * q + e);
                float v = s[j][2 * i + e];
                if (TYPE == X3_KV_INT8)
                    v *= ((const float *)key_scales)[at];
                v = at < from[i] || at > to[i] ? NONE : v * scale;
                s[j][2 * i + e] = v;
                out->m[i] = fmaxf(out->m[i], v);
            }
        out->m[i] = fmaxf(out->m[i], __shfl_xor_sync(X3_ALL_LANES, out->m[i], 1));
        out->m[i] = fmaxf(out->m[i], __shfl_xor_sync(X3_ALL_LANES, out->m[i], 2));
        out->l[i] = 0;
#pragma unroll
        for (int j = 0; j < 8; j++)
#pragma unroll
            for (int e = 0; e < 2; e++) {
                const float v = s[j][2 * i + e];
                float p = v == NONE ? 0.0f : expf(v - out->m[i]);
                out->l[i] += p;
                if (TYPE == X3_KV_INT8) {
                    const int at = position_of(j, 2 * q + e);
                    p = p == 0 ? 0.0f : p * ((const float *)value_scales)[at];
                }
                s[j][2 * i + e] = p;
            }
        out->l[i] += __shfl_xor_sync(X3_ALL_LANES, out->l[i], 1);
        out->l[i] += __shfl_xor_sync(X3_ALL_LANES, out->l[i], 2);
    }
#pragma unroll
    for (int t = 0; t < 4; t++) { /* 16 positions: groups 2 t and 2 t + 1 */
        split_pair(s[2 * t][0], s[2 * t][1], &out->p_high[t][0], &out->p_low[t][0]);
        split_pair(s[2 * t][2], s[2 * t][3], &out->p_high[t][1], &out->p_low[t][1]);
        split_pair(s[2 * t + 1][0], s[2 * t + 1][1], &out->p_high[t][2], &out->p_low[t][2]);
        split_pair(s[2 * t + 1][2], s[2 * t + 1][3], &out->p_high[t][3], &out->p_low[t][3]);
    }
}

/* M and L after a page of m and l; what O and o are multiplied with. */
static __device__ __forceinline__ void merge(float *M, float *L, float m, float l, float *of_before, float *of_page)
{
    const float most = fmaxf(*M, m);

    *of_before = *M == most ? 1.0f : expf(*M - most); /* also when both are -infinity: nothing seen yet */
    *of_page = m == most ? 1.0f : expf(m - most);
    *L = *L * *of_before + l * *of_page;
    *M = most;
}

/* Places of one page's keys and values of a KV head in memory, the block's part of the dimensions. */
static __device__ __forceinline__ void page_places(const attend_args &a, size_t page, int kv_head, int part, rows_of *keys, rows_of *values)
{
    const size_t block = page * a.kv.n_kv_heads + kv_head;
    const x3_kv_type type = a.kv.type;
    const char *k = (const char *)a.kv.d_packed_keys + block * x3_kv_block_bytes(type, a.kv.k_dim);
    const char *v = (const char *)a.kv.d_packed_values + block * x3_kv_block_bytes(type, a.kv.v_dim);

    keys->numbers = k;
    keys->scales = k + x3_kv_number_bytes(type, a.kv.k_dim);
    keys->stride = (int)(x3_kv_number_bytes(type, a.kv.k_dim) / PAGE);
    values->numbers = v + x3_kv_number_bytes(type, (size_t)part * V_PART);
    values->scales = v + x3_kv_number_bytes(type, a.kv.v_dim) + (type == X3_KV_INT4 ? part * (V_PART / X3_KV_GROUP) * PAGE * 2 : 0);
    values->stride = PAGE * (type == X3_KV_BF16 ? 2 : 1);
}

/* ---- compute capability 9.0: packed_attention_hopper_cuda.cu ---- */

/* Many rows of sequences over BF16 with the bits of the other forms; false where it cannot be used. */
bool x3_attend_hopper_fits(const x3_cuda_info *info, const attend_args *a);
x3_status x3_attend_hopper(const x3_cuda_info *info, const attend_args *a, x3_cuda_stream stream, x3_err *err);

#endif
