/* The EXL3 linear: its parts, what it computes, and how the work is cut. Private to linear*.cu and fragments_k_cuda.cu.
 *
 * Several weights of one K that read the same inputs (parts) are one product: their stripes of 128 outputs are numbered one
 * part after the other. A pair is two rows of tiles (32 inputs) of one stripe. Pairs are numbered stripe by stripe; every
 * block takes a run of them, all runs equal or one longer, so it sees one or a few segments, each inside one stripe. Inside a
 * segment pair i belongs to chain i % 8. An output is the sum over its stripe's segments, first to last, of the sum over
 * chains 0 .. 7 of the sum over the chain's pairs, first to last. None of this depends on the number of rows.
 *
 * Rotated inputs are rounded to float16; an accumulator is that of the tensor core, unit after unit (a unit is one row of tiles:
 * half a pair). */
#ifndef X3_LINEAR_CUDA_CUH
#define X3_LINEAR_CUDA_CUH

#include "kernels/cuda_common.cuh"

#define N_CHAINS 8
#define STRIPE_COLS 128
#define STRIPE_TILES (STRIPE_COLS / X3_TILE)
#define PAIR_INPUTS 32
#define LINEAR_STAGE_PAIRS(K) ((K) <= 3 ? 2 : 1) /* pairs of a chain that arrive in shared memory together */
#define LINEAR_SUMS_PAD 4                        /* keeps the rows of sums in different banks */
#define FOLD_ROWS 4                   /* up to here every block rotates its own inputs, */
#define FOLD_BLOCKS 256               /* where there are no more blocks than this */

/* One of the weights. */
typedef struct linear_part {
    const uint32_t *words;
    const uint16_t *suh, *svh;
    const float *bias;
    void *y;
    size_t ldy;
    int y_whole; /* rows may be written four numbers at a time */
    int n_out;
    int n_stripes;
} linear_part;

/* Division of 0 .. 2^31 - 1 by a number of at least 2: (n * multiplier >> 32) >> shift. */
typedef struct divider {
    uint32_t multiplier, shift;
} divider;

/* What the kernels read first stands first: it is one or two lines of the constant cache. */
typedef struct linear_args {
    int n_rows, n_in;
    int n_pairs_in, n_stripes;             /* pairs of a stripe; stripes of all parts */
    int n_pairs_each;                      /* of a block, */
    int n_pairs_more;                      /* and this many blocks take one more */
    int n_stages;                          /* of a warp's ring in shared memory */
    int first_stripe[X3_CUDA_LINEAR_PARTS]; /* of each part; INT_MAX where there is none */
    divider by_pairs_in, by_pairs_each, by_pairs_each_1; /* the last: n_pairs_each + 1 */
    uint32_t multiplier, addend;           /* of the codebook: struct ones */
    linear_part parts[X3_CUDA_LINEAR_PARTS];
    int n_parts;
    const void *x, *up; /* up NULL, or the inputs are silu(x) * up */
    size_t ldx;
    x3_cuda_type x_type, y_type;
    int x_whole; /* rows may be read four numbers at a time */
    int n_together;              /* groups of 16 rows whose operands of a pair lie together: 1, for x3_linear_hopper 8 */
    uint4 *fragments;            /* rotated inputs as operands: [part][row / 16][unit][lane]; together, and for wgmma: [part][row / 128][pair]
                                    [row / 8 % 16][unit of the pair][input / 8][row % 8][input % 8]. Unused when folded */
    float *partial;              /* [slot][row][128], slot = block + stripe */
    uint64_t *slots;             /* folded: [block][row][128] sums on their way, the upper half of each word zero between calls */
    int *counters;               /* [row group][stripe] segments that have arrived; zero between calls */
} linear_args;

/* Compiled forms, by the rows that a block keeps: groups of 8 rows, tiles (of 16 outputs) a warp multiplies at a time, warps.
 * Many warps hide latency where few rows leave registers free. */
typedef enum linear_shape { LINEAR_FOLDED, LINEAR_16, LINEAR_32, LINEAR_64, LINEAR_SHAPES } linear_shape;

#define LINEAR_GROUPS(s) ((s) == LINEAR_64 ? 8 : (s) == LINEAR_32 ? 4 : (s) == LINEAR_16 ? 2 : 1)
#define LINEAR_TILES(s) 4
#define LINEAR_WARPS(s) ((s) == LINEAR_64 ? 8 : 16)

/* The kernels of one K (one object file each), by decoder_of the codebook. */
typedef struct linear_kernels {
    const void *linear[N_DECODERS][LINEAR_SHAPES];
    const void *reconstruct[N_DECODERS][2]; /* by x3_cuda_type of the output */
    const void *dense[N_DECODERS];
} linear_kernels;

void x3_linear_kernels_k1(linear_kernels *out);
void x3_linear_kernels_k2(linear_kernels *out);
void x3_linear_kernels_k3(linear_kernels *out);
void x3_linear_kernels_k4(linear_kernels *out);
void x3_linear_kernels_k5(linear_kernels *out);
void x3_linear_kernels_k6(linear_kernels *out);
void x3_linear_kernels_k7(linear_kernels *out);
void x3_linear_kernels_k8(linear_kernels *out);
x3_status x3_linear_kernels_of(int K, linear_kernels *out, x3_err *err);
/* Fails unless the groups can be one product. */
x3_status x3_linear_check(const x3_cuda_group *g, size_t n_groups, x3_err *err);
/* All but the work split and scratch. rows: one for each group, alike but for y. */
void x3_linear_fill_args(linear_args *a, const x3_cuda_group *g, const x3_cuda_rows *rows, size_t n_groups);
/* The work split; returns the number of blocks. */
int x3_linear_cut(const x3_cuda_info *info, linear_args *a);
/* a->fragments := the rotated inputs. */
x3_status x3_linear_rotate(const x3_cuda_info *info, linear_args *a, bool overlap, x3_cuda_stream stream, x3_err *err);
size_t x3_linear_fragment_bytes(const x3_cuda_group *g, size_t n_groups, size_t n_rows, int n_together);

/* Shared memory: the warps' rings of weights, the chains' sums of 8 rows, and the rotated inputs when folded. */
static inline size_t linear_ring_bytes(int K, linear_shape s, int n_stages)
{
    return (size_t)LINEAR_WARPS(s) * (size_t)n_stages * 2 * LINEAR_STAGE_PAIRS(K) * LINEAR_TILES(s) * 32 * (size_t)K;
}

static inline size_t linear_sums_bytes(linear_shape s, int n_rows)
{
    const size_t cols = (size_t)LINEAR_WARPS(s) / N_CHAINS * LINEAR_TILES(s) * X3_TILE;

    return (size_t)N_CHAINS * (size_t)(n_rows < 8 ? n_rows : 8) * (cols + LINEAR_SUMS_PAD) * sizeof(float);
}

#define LINEAR_PAIR_WORDS 16 /* of a row of a pair, folded */

static __device__ __forceinline__ int linear_row_places(const linear_args &a)
{
    return (a.n_rows + 15) & ~15;
}

static __device__ __forceinline__ int divide(int n, divider d)
{
    return (int)(__umulhi((uint32_t)n, d.multiplier) >> d.shift);
}

static __device__ __forceinline__ int stripe_of(const linear_args &a, int pair)
{
    return divide(pair, a.by_pairs_in);
}

static __device__ __forceinline__ int part_of(const linear_args &a, int stripe)
{
    int p = 0;

#pragma unroll
    for (int i = 1; i < X3_CUDA_LINEAR_PARTS; i++)
        p += stripe >= a.first_stripe[i];
    return p;
}

/* Block b's first pair; that of block b + 1 ends its last segment. */
static __device__ __forceinline__ int first_pair(const linear_args &a, int b)
{
    return b * a.n_pairs_each + min(b, a.n_pairs_more);
}

/* The block whose pair this is. */
static __device__ __forceinline__ int block_of(const linear_args &a, int pair)
{
    const int large = a.n_pairs_more * (a.n_pairs_each + 1); /* pairs of the blocks that have one more */

    return pair < large ? divide(pair, a.by_pairs_each_1) : a.n_pairs_more + divide(pair - large, a.by_pairs_each);
}

/* ---- inputs ------------------------------------------------------------------------------------------------------ */

/* Rotated inputs 128 * block + 4 * lane .. of a row; scale: suh there. */
static __device__ __forceinline__ void rotate_loaded(float v[4], uint2 scale, int lane)
{
    scale_by(v, scale);
    hadamard_128(v, lane);
}

static __device__ __forceinline__ void load_inputs(const linear_args &a, int row, int block, int lane, float v[4])
{
    const size_t at = (size_t)row * a.ldx, i = (size_t)block * X3_HADAMARD + 4 * lane;

    load_4(v, a.x, a.x_type, at, i, (size_t)a.n_in, a.x_whole);
    if (a.up != NULL) {
        float u[4];
        load_4(u, a.up, a.x_type, at, i, (size_t)a.n_in, a.x_whole);
#pragma unroll
        for (int e = 0; e < 4; e++)
            v[e] = silu_mul_exact(v[e], u[e]);
    }
}

static __device__ __forceinline__ uint2 load_scales(const linear_args &a, int p, int block, int lane)
{
    return *(const uint2 *)(a.parts[p].suh + (size_t)block * X3_HADAMARD + 4 * lane);
}

/* Two neighbours in an operand each. */
static __device__ __forceinline__ void operand_words(const float v[4], uint32_t words[2])
{
    words[0] = half2_bits(__floats2half2_rn(v[0], v[2]));
    words[1] = half2_bits(__floats2half2_rn(v[1], v[3]));
}

/* Where they belong among the 8 words [q][2] of their unit, unit lane / 4 of the block: rows 0, 2, .. come before rows
 * 1, 3, .. (tile_operand_row), and rows 8 .. 15 are the second word of a lane. */
static __device__ __forceinline__ int operand_word(int lane, int which)
{
    return 2 * (2 * which + (lane & 1)) + (lane >> 1 & 1);
}

/* acc += weights (two units of TILES tiles) times rows, for one group of 8 rows. */
template <int TILES>
static __device__ __forceinline__ void multiply_pair(float (*acc)[4], const uint32_t w[TILES][2][4], const uint32_t b0[2],
                                                     const uint32_t b1[2])
{
#pragma unroll
    for (int t = 0; t < TILES; t++)
        mma_f16(acc[t], w[t][0], b0);
#pragma unroll
    for (int t = 0; t < TILES; t++)
        mma_f16(acc[t], w[t][1], b1);
}

/* ---- outputs ----------------------------------------------------------------------------------------------------- */

/* v: a row's sums for outputs 128 stripe + 4 lane .., which become y. */
static __device__ __forceinline__ void finish_row(const linear_args &a, int stripe, int row, float v[4], int lane)
{
    const int p = part_of(a, stripe);
    const linear_part &part = a.parts[p];
    const size_t i = (size_t)(stripe - a.first_stripe[p]) * STRIPE_COLS + 4 * lane;

    const uint2 scale = *(const uint2 *)(part.svh + i); /* asked for, and converted, before it is needed */
    const float2 low = __half22float2(bits_half2(scale.x)), high = __half22float2(bits_half2(scale.y));
    hadamard_128(v, lane);
    v[0] *= low.x, v[1] *= low.y, v[2] *= high.x, v[3] *= high.y;
    if (part.bias != NULL)
        for (int e = 0; e < 4; e++)
            v[e] += i + e < (size_t)part.n_out ? part.bias[i + e] : 0.0f;
    store_4(v, part.y, a.y_type, (size_t)row * part.ldy, i, (size_t)part.n_out, part.y_whole);
}

#endif
