/* EXL3 linears of many experts, each with rows and a K of its own, in one launch.
 *
 * A block takes 128 outputs of one expert and walks over its rows; tiles are decoded straight into operands, as in
 * linear_k_cuda.cu. Inputs are two float16 each (x3_cuda_expert_rotate), so the result is as good as a float32 product. Sums of
 * 64 inputs are added to the total in float32, because the tensor cores cut off what they add to a larger number.
 * What limits it: at 64 rows the products and decoding, about equal; at few rows the latency of one block's walk. */
#include "kernels/experts_cuda.cuh"

#define UNITS EXPERT_STAGE_UNITS
#define TILE_WORDS(K) (8 * (K))
#define STRIP_WORDS(K) (EXPERT_OUTS / X3_TILE * TILE_WORDS(K)) /* of a unit: a row of tiles */
#define OUT_LD (EXPERT_OUTS + 4)

/* Shared memory of a stage: words [UNITS][STRIP_WORDS(K)], rows [UNITS][ROWS][4] of 16 bytes. */
template <int K, int ROWS, int STAGES> static __device__ __forceinline__ uint4 *stage_at(uint4 *room, int stage)
{
    return room + stage % STAGES * (UNITS * STRIP_WORDS(K) / 4 + UNITS * ROWS * 4);
}

/* Starts copying the units of a stage, as one group. Rows past the end are copies of the last one. */
template <int K, int ROWS>
static __device__ __forceinline__ void fetch_stage(uint4 *to, const expert_args &a, const uint32_t *words, int unit, int row,
                                                   int end)
{
    const uint4 *from = (const uint4 *)a.parts;
    uint4 *rows = to + UNITS * STRIP_WORDS(K) / 4;

    for (int i = threadIdx.x; i < UNITS * STRIP_WORDS(K) / 4; i += EXPERT_THREADS) {
        const int u = i / (STRIP_WORDS(K) / 4), piece = i % (STRIP_WORDS(K) / 4);
        copy_async_16(to + i, words + (size_t)(unit + u) * a.n_stripes * STRIP_WORDS(K) + piece * 4);
    }
    for (int i = threadIdx.x; i < UNITS * ROWS * 4; i += EXPERT_THREADS) {
        const int r = i / (UNITS * 4), u = i / 4 % UNITS, q = i % 4;
        const size_t slot = (size_t)(min(row + r, end - 1) - a.first_slot);
        copy_async_16(rows + (u * ROWS + r) * 4 + q, from + (slot * a.n_units + unit + u) * 4 + q);
    }
    copy_async_commit();
}

/* total += TILES tiles of outputs by NT times eight rows, over the units of a stage. */
template <int K, int CODEBOOK, int TILES, int NT, int ROWS>
static __device__ __forceinline__ void multiply_stage(float total[TILES][NT][4], const uint4 *stage, lane_bits bits, ones o, int tile,
                                                      int part, int lane)
{
    const uint32_t *words = (const uint32_t *)stage + tile * TILE_WORDS(K);
    const uint4 *rows = stage + UNITS * STRIP_WORDS(K) / 4 + (part + (lane >> 2)) * 4 + (lane & 3);
    float c[TILES][NT][4] = {};

#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        uint32_t a[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; t++)
            decode_tile<K, CODEBOOK>(words + u * STRIP_WORDS(K) + t * TILE_WORDS(K), bits, o, a[t]);
#pragma unroll
        for (int n = 0; n < NT; n++) {
            const uint4 b = rows[(u * ROWS + n * 8) * 4];
            const uint32_t high[2] = {b.x, b.y}, low[2] = {b.z, b.w};
#pragma unroll
            for (int t = 0; t < TILES; t++) {
                mma_f16(c[t][n], a[t], low);
                mma_f16(c[t][n], a[t], high);
            }
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int n = 0; n < NT; n++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                total[t][n][i] += c[t][n][i];
}

/* Rows in shared memory [ROWS][OUT_LD] to y, a warp a row: rotated back, scaled. */
template <int ROWS>
static __device__ __forceinline__ void finish(const expert_args &a, const x3_cuda_expert &expert, const float *sums, int row, int end,
                                              int stripe)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const size_t i = (size_t)stripe * EXPERT_OUTS + 4 * lane;

    for (int r = warp; r < ROWS && row + r < end; r += EXPERT_THREADS / X3_WARP) {
        const float unit = a.unit[row + r - a.first_slot];
        const float4 f = *(const float4 *)(sums + r * OUT_LD + 4 * lane);
        float v[4] = {f.x, f.y, f.z, f.w};
        hadamard_128(v, lane);
        scale_4(v, expert.d_svh, i);
#pragma unroll
        for (int e = 0; e < 4; e++)
            v[e] = v[e] * unit + (expert.d_bias != NULL && i + e < (size_t)a.n_out ? expert.d_bias[i + e] : 0.0f);
        store_4(v, a.y, X3_CUDA_F32, (size_t)(row + r) * a.ldy, i, (size_t)a.n_out, a.y_whole);
    }
}

/* The rows of one expert; not inlined, so that a K's registers are its own. 8 warps: each TILES tiles by NT times eight rows. */
template <int K, int CODEBOOK, int TILES, int NT>
static __device__ __noinline__ void run_expert(const expert_args &a, const x3_cuda_expert &expert, int e)
{
    extern __shared__ __align__(16) uint4 room[];
    constexpr int along = EXPERT_OUTS / X3_TILE / TILES, ROWS = 8 / along * NT * 8; /* warps along the outputs */
    constexpr int STAGES = EXPERT_STAGES(NT == 1);
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tile = warp % along * TILES, part = warp / along * NT * 8;
    const int stripe = blockIdx.x, n_stages = a.n_units / UNITS;
    const int first = max(a.first[e], a.first_slot), end = min(a.first[e + 1], a.end_slot);
    const uint32_t *words = (const uint32_t *)expert.d_w + (size_t)stripe * STRIP_WORDS(K);
    const lane_bits bits = lane_bits_of<K>(lane);
    const ones o = ones_of<CODEBOOK>(lane, a.multiplier, a.addend);

    for (int row = first + blockIdx.z * ROWS; row < end; row += gridDim.z * ROWS) {
        float total[TILES][NT][4] = {}, *sums = (float *)room;
        __syncthreads(); /* the sums of the rows before have been read */
        for (int s = 0; s < STAGES - 1; s++)
            if (s < n_stages)
                fetch_stage<K, ROWS>(stage_at<K, ROWS, STAGES>(room, s), a, words, (a.reverse ? n_stages - 1 - s : s) * UNITS, row, end);
            else
                copy_async_commit();
        for (int s = 0; s < n_stages; s++) {
            const int next = s + STAGES - 1;
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            if (next < n_stages)
                fetch_stage<K, ROWS>(stage_at<K, ROWS, STAGES>(room, next), a, words,
                                     (a.reverse ? n_stages - 1 - next : next) * UNITS, row, end);
            else
                copy_async_commit();
            multiply_stage<K, CODEBOOK, TILES, NT, ROWS>(total, stage_at<K, ROWS, STAGES>(room, s), bits, o, tile, part, lane);
        }
        __syncthreads();
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int n = 0; n < NT; n++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    sums[(part + 8 * n + 2 * (lane & 3) + (i & 1)) * OUT_LD + (tile + t) * X3_TILE + (lane >> 2) + 8 * (i >> 1)] =
                        total[t][n][i];
        __syncthreads();
        finish<ROWS>(a, expert, sums, row, end, stripe);
    }
}

/* The expert of this block. There are blocks for all of the list, or for as many as can have rows: block n is then for the nth
 * that has some, -1: there are fewer. */
static __device__ __forceinline__ int expert_of_block(const expert_args &a)
{
    __shared__ int counts[EXPERT_THREADS / X3_WARP], found;
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    int before = 0;

    if ((int)gridDim.y == a.n_list)
        return a.list[blockIdx.y];
    if (threadIdx.x == 0)
        found = -1;
    for (int base = 0; base < a.n_list && before <= (int)blockIdx.y; base += EXPERT_THREADS) {
        const int i = base + threadIdx.x, e = i < a.n_list ? a.list[i] : -1;
        const bool has = e >= 0 && min(a.first[e + 1], a.end_slot) > max(a.first[e], a.first_slot);
        const uint32_t lanes = __ballot_sync(X3_ALL_LANES, has);
        int rank = before + __popc(lanes & ((1u << lane) - 1));
        if (lane == 0)
            counts[warp] = __popc(lanes);
        __syncthreads();
        for (int w = 0; w < EXPERT_THREADS / X3_WARP; w++) {
            rank += w < warp ? counts[w] : 0;
            before += counts[w];
        }
        if (has && rank == (int)blockIdx.y)
            found = e;
        __syncthreads();
    }
    return found;
}

template <int CODEBOOK, int TILES, int NT>
static __global__ void __launch_bounds__(EXPERT_THREADS, NT > 1 ? 2 : 4) experts(const __grid_constant__ expert_args a)
{
    const int e = expert_of_block(a);

    if (e < 0)
        return;
    const x3_cuda_expert expert = a.experts[e];
    switch (expert.K) { /* the same for the whole block */
    case 1: run_expert<1, CODEBOOK, TILES, NT>(a, expert, e); break;
    case 2: run_expert<2, CODEBOOK, TILES, NT>(a, expert, e); break;
    case 3: run_expert<3, CODEBOOK, TILES, NT>(a, expert, e); break;
    case 4: run_expert<4, CODEBOOK, TILES, NT>(a, expert, e); break;
    case 5: run_expert<5, CODEBOOK, TILES, NT>(a, expert, e); break;
    case 6: run_expert<6, CODEBOOK, TILES, NT>(a, expert, e); break;
    case 7: run_expert<7, CODEBOOK, TILES, NT>(a, expert, e); break;
    case 8: run_expert<8, CODEBOOK, TILES, NT>(a, expert, e); break;
    default: break; /* the host has checked */
    }
}

const void *x3_expert_kernel(x3_codebook codebook, expert_shape s)
{
    if (decoder_of(codebook) == decoder_of(X3_CB_MUL1))
        return s == EXPERT_FEW ? (const void *)experts<X3_CB_MUL1, 1, 1> : (const void *)experts<X3_CB_MUL1, 2, 4>;
    return s == EXPERT_FEW ? (const void *)experts<CODEBOOK_SUM, 1, 1> : (const void *)experts<CODEBOOK_SUM, 2, 4>;
}
