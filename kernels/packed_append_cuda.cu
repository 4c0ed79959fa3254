/* Writing keys and values into packed caches (kv_types.h), rotated first where they come from the linears: a warp has a head of a row. */
#include "kernels/cuda_common.cuh"
#include "kernels/cuda_ops.h"

#define PAGE X3_KV_PAGE
#define WARPS 8
#define THREADS (WARPS * X3_WARP)

static __device__ __forceinline__ uint32_t warp_largest(uint32_t v)
{
    for (int lanes = X3_WARP / 2; lanes > 0; lanes /= 2)
        v = max(v, __shfl_xor_sync(X3_ALL_LANES, v, lanes));
    return v;
}

/* One position of one block by one warp; as kv_cpu.c, bit for bit. */
template <bool KEYS>
static __device__ __forceinline__ void pack(x3_kv_type type, const float *x, int dim, int in_page, char *block, int lane)
{
    char *scales = block + x3_kv_number_bytes(type, (size_t)dim);
    const int n_groups = dim / X3_KV_GROUP;
    uint32_t largest = 0;

    for (int g = 0; type == X3_KV_INT8 && g < n_groups; g++)
        largest = max(largest, x3_kv_bits(x[g * X3_KV_GROUP + lane]) & 0x7FFFFFFFu);
    float scale = x3_kv_scale(type, warp_largest(largest));
    if (type == X3_KV_INT8 && lane == 0)
        ((float *)scales)[in_page] = scale;
    for (int g = 0; g < n_groups; g++) {
        const int d = g * X3_KV_GROUP + lane;
        const float v = x[d];
        if (type == X3_KV_BF16) {
            ((uint16_t *)block)[KEYS ? in_page * dim + d : d * PAGE + in_page] = x3_kv_bf16(v);
        } else if (type == X3_KV_INT8) {
            ((int8_t *)block)[KEYS ? in_page * dim + d : d * PAGE + in_page] = (int8_t)x3_kv_integer(type, v, scale);
        } else {
            scale = x3_kv_scale(type, warp_largest(x3_kv_bits(v) & 0x7FFFFFFFu));
            const int i = x3_kv_integer(type, v, scale) + 8, other = __shfl_down_sync(X3_ALL_LANES, i, KEYS ? 1 : 16);
            if (lane == 0)
                ((uint16_t *)scales)[g * PAGE + in_page] = x3_kv_bf16(scale);
            if (KEYS && lane % 2 == 0)
                ((uint8_t *)block)[in_page * dim / 2 + d / 2] = (uint8_t)(i | other << 4);
            if (!KEYS && lane < 16)
                ((uint8_t *)block)[(g * 16 + lane) * PAGE + in_page] = (uint8_t)(i | other << 4);
        }
    }
}

/* Where a row goes in the cache; false for rows of no sequence. */
static __device__ __forceinline__ bool place_of_row(const x3_cuda_kv &kv, const x3_cuda_batch &b, size_t row, int *in_page, size_t *page)
{
    if (b.d_row_sequence[row] < 0)
        return false;
    const x3_cuda_sequence s = b.d_sequences[b.d_row_sequence[row]];
    const int position = s.position + ((int)row - s.first_row);
    *in_page = position % PAGE;
    *page = (size_t)b.d_pages[s.first_page + position / PAGE] * kv.n_kv_heads;
    return true;
}

static __device__ __forceinline__ void pack_key(const x3_cuda_kv &kv, const float *k, int head, int in_page, size_t page, int lane)
{
    pack<true>(kv.type, k, (int)kv.k_dim, in_page, (char *)kv.d_packed_keys + (page + head) * x3_kv_block_bytes(kv.type, kv.k_dim), lane);
}

static __device__ __forceinline__ void pack_value(const x3_cuda_kv &kv, const float *v, int head, int in_page, size_t page, int lane)
{
    pack<false>(kv.type, v, (int)kv.v_dim, in_page, (char *)kv.d_packed_values + (page + head) * x3_kv_block_bytes(kv.type, kv.v_dim), lane);
}

static __global__ void __launch_bounds__(THREADS) append(const x3_cuda_kv kv, const x3_cuda_batch b, const float *k, size_t ldk,
                                                        const float *v, size_t ldv)
{
    const size_t row = blockIdx.x;
    const int lane = threadIdx.x % X3_WARP, n_heads = (int)kv.n_kv_heads;
    size_t page;
    int in_page;

    begin_in_turn();
    if (!place_of_row(kv, b, row, &in_page, &page))
        return;
    for (int i = threadIdx.x / X3_WARP; i < 2 * n_heads; i += WARPS) {
        const int head = i % n_heads;
        if (i < n_heads)
            pack_key(kv, k + row * ldk + (size_t)head * kv.k_dim, head, in_page, page, lane);
        else
            pack_value(kv, v + row * ldv + (size_t)head * kv.v_dim, head, in_page, page, lane);
    }
}

static __device__ __forceinline__ void rope_head(const x3_cuda_rope &r, size_t row, size_t head, int lane)
{
    const float *table = r.d_cos_sin + (size_t)r.d_positions[row] * r.n_rotated;

    for (size_t i = lane; i < r.n_rotated / 2; i += X3_WARP)
        rope_pair(r.d_x + row * r.ld + r.first + head * r.head_stride, table, i, r.n_rotated / 2, r.interleaved);
    __syncwarp();
}

/* Block (row, y): heads 8 y .. of queries, keys, values, in this order. */
static __global__ void __launch_bounds__(THREADS) rope_append(const x3_cuda_rope q, const x3_cuda_rope k, const x3_cuda_kv kv,
                                                              const x3_cuda_batch b, const float *v, size_t ldv)
{
    const size_t row = blockIdx.x;
    const int lane = threadIdx.x % X3_WARP, n_heads = (int)kv.n_kv_heads;
    int i = blockIdx.y * WARPS + threadIdx.x / X3_WARP;
    size_t page;
    int in_page;

    begin_in_turn();
    if (i < (int)q.n_heads) {
        rope_head(q, row, i, lane);
        return;
    }
    i -= (int)q.n_heads;
    if (i < n_heads)
        rope_head(k, row, i, lane);
    if (i >= 2 * n_heads || !place_of_row(kv, b, row, &in_page, &page))
        return;
    if (i < n_heads)
        pack_key(kv, k.d_x + row * k.ld + (size_t)i * k.head_stride, i, in_page, page, lane);
    else
        pack_value(kv, v + row * ldv + (size_t)(i - n_heads) * kv.v_dim, i - n_heads, in_page, page, lane);
}

x3_status x3_cuda_append_packed(const x3_cuda_kv *kv, const x3_cuda_batch *batch, const float *d_k, size_t ldk, const float *d_v,
                                size_t ldv, x3_cuda_stream stream, x3_err *err)
{
    if (batch->n_rows == 0)
        return X3_OK;
    void *args[] = {(void *)kv, (void *)batch, &d_k, &ldk, &d_v, &ldv};
    return x3_cuda_launch_in_turn((const void *)append, dim3((unsigned)batch->n_rows), THREADS, 0, stream, args,
                                  "appending to the cache", err);
}

x3_status x3_cuda_rope_append_packed(const x3_cuda_rope *q, const x3_cuda_rope *k, const x3_cuda_kv *kv, const x3_cuda_batch *batch,
                                     const float *d_v, size_t ldv, x3_cuda_stream stream, x3_err *err)
{
    const size_t n_heads = q->n_heads + 2 * kv->n_kv_heads;

    if (batch->n_rows == 0)
        return X3_OK;
    void *args[] = {(void *)q, (void *)k, (void *)kv, (void *)batch, &d_v, &ldv};
    return x3_cuda_launch_in_turn((const void *)rope_append, dim3((unsigned)batch->n_rows, (unsigned)((n_heads + WARPS - 1) / WARPS)), THREADS,
                                  0, stream, args, "rope and appending to the cache", err);
}
