/* The codes of an EXL3 group of one K as operands of the tensor cores, for products with many rows: linear_rows_cuda.cu.
 * Compile with -DX3_K=1 .. 8. */
#include "kernels/linear_rows_cuda.cuh"

#ifndef X3_K
#error "compile with -DX3_K=1 .. 8"
#endif

#define TILE_WORDS (8 * X3_K)
#define WARPS 8

/* A warp a row of tiles of a stripe (a unit): [stripe][unit][tile][lane], or as x3_linear_hopper has them. What limits it:
 * writing. */
template <int CODEBOOK, bool HOPPER>
static __global__ void __launch_bounds__(WARPS *X3_WARP) write_fragments(const uint32_t *words, uint4 *out, int n_units, int n_stripes,
                                                                        uint32_t multiplier, uint32_t addend)
{
    __shared__ __align__(16) uint32_t tiles[WARPS][STRIPE_TILES * TILE_WORDS];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, stripe = blockIdx.y, unit = blockIdx.x * WARPS + warp;
    const lane_bits bits = lane_bits_of<X3_K>(lane);
    const ones o = ones_of<CODEBOOK>(lane, multiplier, addend);

    release_next_kernel();
    wait_for_previous_kernel(); /* its readers of `out` */
    if (unit >= n_units)
        return;
    const uint4 *from = (const uint4 *)(words + ((size_t)unit * n_stripes + stripe) * STRIPE_TILES * TILE_WORDS);
    for (int i = lane; i < STRIPE_TILES * TILE_WORDS / 4; i += X3_WARP)
        ((uint4 *)tiles[warp])[i] = from[i];
    __syncwarp();
    out += ((size_t)stripe * n_units + unit) * STRIPE_TILES * X3_WARP;
#pragma unroll
    for (int t = 0; t < STRIPE_TILES; t++) {
        uint32_t w[4];
        decode_tile<X3_K, CODEBOOK>(tiles[warp] + t * TILE_WORDS, bits, o, w);
        if (HOPPER) /* word i: outputs 8 (i % 2) .. of the tile, inputs 8 (i / 2) .. */
#pragma unroll
            for (int i = 0; i < 4; i++)
                ((uint32_t *)out)[(2 * (2 * t + i % 2) + i / 2) * X3_WARP + lane] = w[i];
        else
            out[t * X3_WARP + lane] = make_uint4(w[0], w[1], w[2], w[3]);
    }
}

#define NAME_OF(k) x3_fragment_kernels_k##k
#define NAME(k) NAME_OF(k)

void NAME(X3_K)(const void *out[N_DECODERS][N_FRAGMENTS])
{
    const int sum = decoder_of((x3_codebook)CODEBOOK_SUM), mul1 = decoder_of(X3_CB_MUL1);

    out[sum][FRAGMENTS_MMA] = (const void *)write_fragments<CODEBOOK_SUM, false>;
    out[sum][FRAGMENTS_HOPPER] = (const void *)write_fragments<CODEBOOK_SUM, true>;
    out[mul1][FRAGMENTS_MMA] = (const void *)write_fragments<X3_CB_MUL1, false>;
    out[mul1][FRAGMENTS_HOPPER] = (const void *)write_fragments<X3_CB_MUL1, true>;
}
