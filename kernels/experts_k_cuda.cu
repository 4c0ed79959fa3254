/* EXL3 linears of many experts, each with rows of its own, for one K: compile with -DX3_K=1 .. 8.
 *
 * A block takes 128 outputs of one expert and walks over its rows; tiles are decoded straight into operands, as in
 * linear_k_cuda.cu. Inputs are two float16 each (x3_cuda_expert_rotate), so the result is as good as a float32 product. Sums of
 * 64 inputs are added to the total in float32, because the tensor cores cut off what they add to a larger number.
 * What limits it: at 64 rows the products and decoding, about equal; at few rows the latency of one block's walk. */
#include "kernels/experts_cuda.cuh"

#ifndef X3_K
#error "compile with -DX3_K=1 .. 8"
#endif

#define TILE_WORDS (8 * X3_K)
#define UNITS EXPERT_STAGE_UNITS
#define STRIP_WORDS (EXPERT_OUTS / X3_TILE * TILE_WORDS) /* of a unit: a row of tiles */
#define OUT_LD (EXPERT_OUTS + 4)

/* Shared memory of a stage: words [UNITS][STRIP_WORDS], rows [UNITS][ROWS][4] of 16 bytes. */
template <int ROWS, int STAGES> static __device__ __forceinline__ uint4 *stage_at(uint4 *room, int stage)
{
    return room + stage % STAGES * (UNITS * STRIP_WORDS / 4 + UNITS * ROWS * 4);
}

/* Starts copying the units of a stage, as one group. Rows past the end are copies of the last one. */
template <int ROWS>
static __device__ __forceinline__ void fetch_stage(uint4 *to, const expert_args &a, const uint32_t *words, int unit, int row,
                                                   int end)
{
    const uint4 *from = (const uint4 *)a.parts;
    uint4 *rows = to + UNITS * STRIP_WORDS / 4;

    for (int i = threadIdx.x; i < UNITS * STRIP_WORDS / 4; i += EXPERT_THREADS) {
        const int u = i / (STRIP_WORDS / 4), piece = i % (STRIP_WORDS / 4);
        copy_async_16(to + i, words + (size_t)(unit + u) * a.n_stripes * STRIP_WORDS + piece * 4);
    }
    for (int i = threadIdx.x; i < UNITS * ROWS * 4; i += EXPERT_THREADS) {
        const int r = i / (UNITS * 4), u = i / 4 % UNITS, q = i % 4;
        const size_t slot = (size_t)(min(row + r, end - 1) - a.first_slot);
        copy_async_16(rows + (u * ROWS + r) * 4 + q, from + (slot * a.n_units + unit + u) * 4 + q);
    }
    copy_async_commit();
}

/* total += TILES tiles of outputs by NT times eight rows, over the units of a stage. */
template <int CODEBOOK, int TILES, int NT, int ROWS>
static __device__ __forceinline__ void multiply_stage(float total[TILES][NT][4], const uint4 *stage, lane_bits bits, ones o, int tile,
                                                      int part, int lane)
{
    const uint32_t *words = (const uint32_t *)stage + tile * TILE_WORDS;
    const uint4 *rows = stage + UNITS * STRIP_WORDS / 4 + (part + (lane >> 2)) * 4 + (lane & 3);
    float c[TILES][NT][4] = {};

#pragma unroll
    for (int u = 0; u < UNITS; u++) {
        uint32_t a[TILES][4];
#pragma unroll
        for (int t = 0; t < TILES; t++)
            decode_tile<X3_K, CODEBOOK>(words + u * STRIP_WORDS + t * TILE_WORDS, bits, o, a[t]);
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

/* 8 warps: each TILES tiles by NT times eight rows. */
template <int CODEBOOK, int TILES, int NT>
static __global__ void __launch_bounds__(EXPERT_THREADS, NT > 1 ? 2 : 4) experts(const __grid_constant__ expert_args a)
{
    constexpr int along = EXPERT_OUTS / X3_TILE / TILES, ROWS = 8 / along * NT * 8; /* warps along the outputs */
    constexpr int STAGES = EXPERT_STAGES(NT == 1);
    extern __shared__ __align__(16) uint4 room[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, tile = warp % along * TILES, part = warp / along * NT * 8;
    const int e = a.list[blockIdx.y], stripe = blockIdx.x, n_stages = a.n_units / UNITS;
    const int first = max(a.first[e], a.first_slot), end = min(a.first[e + 1], a.end_slot);
    const x3_cuda_expert expert = a.experts[e];
    const uint32_t *words = (const uint32_t *)expert.d_w + (size_t)stripe * STRIP_WORDS;
    const lane_bits bits = lane_bits_of<X3_K>(lane);
    const ones o = ones_of<CODEBOOK>(lane, a.multiplier, a.addend);

    for (int row = first + blockIdx.z * ROWS; row < end; row += gridDim.z * ROWS) {
        float total[TILES][NT][4] = {}, *sums = (float *)room;
        __syncthreads(); /* the sums of the rows before have been read */
        for (int s = 0; s < STAGES - 1; s++)
            if (s < n_stages)
                fetch_stage<ROWS>(stage_at<ROWS, STAGES>(room, s), a, words, (a.reverse ? n_stages - 1 - s : s) * UNITS, row, end);
            else
                copy_async_commit();
        for (int s = 0; s < n_stages; s++) {
            const int next = s + STAGES - 1;
            copy_async_wait<STAGES - 2>();
            __syncthreads();
            if (next < n_stages)
                fetch_stage<ROWS>(stage_at<ROWS, STAGES>(room, next), a, words, (a.reverse ? n_stages - 1 - next : next) * UNITS, row, end);
            else
                copy_async_commit();
            multiply_stage<CODEBOOK, TILES, NT, ROWS>(total, stage_at<ROWS, STAGES>(room, s), bits, o, tile, part, lane);
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

#define NAME_OF(k) x3_expert_kernels_k##k
#define NAME(k) NAME_OF(k)

void NAME(X3_K)(expert_kernels *out)
{
    out->kernel[decoder_of(X3_CB_MCG)][EXPERT_FEW] = (const void *)experts<CODEBOOK_SUM, 1, 1>;
    out->kernel[decoder_of(X3_CB_MCG)][EXPERT_MANY] = (const void *)experts<CODEBOOK_SUM, 2, 4>;
    out->kernel[decoder_of(X3_CB_MUL1)][EXPERT_FEW] = (const void *)experts<X3_CB_MUL1, 1, 1>;
    out->kernel[decoder_of(X3_CB_MUL1)][EXPERT_MANY] = (const void *)experts<X3_CB_MUL1, 2, 4>;
}
