/* The EXL3 linear for 1 .. 128 rows: its parts and how the work is cut. Private to linear*.cu.
 *
 * A unit is one row of tiles (16 inputs) of one stripe (128 outputs). Units are numbered stripe by stripe; every
 * block takes a run of them, all runs equal or one longer, so it sees one or a few segments, each inside one stripe. Inside a segment unit i
 * belongs to chain i % 8. An output is the sum over its stripe's segments, first to last, of the sum over chains 0 .. 7
 * of the tensor-core products of the chain's units, first to last. None of this depends on the number of rows. */
#ifndef X3_LINEAR_CUDA_CUH
#define X3_LINEAR_CUDA_CUH

#include "kernels/cuda_common.cuh"

#define N_CHAINS 8
#define STRIPE_COLS 128
#define STRIPE_TILES (STRIPE_COLS / X3_TILE)
#define LINEAR_STAGE_UNITS(K) ((K) <= 3 ? 4 : 2) /* units of a chain that arrive in shared memory together */
#define LINEAR_SUMS_PAD 4                        /* keeps the rows of sums in different banks */
#define FOLD_ROWS 4                   /* up to here every block rotates its own inputs */

typedef struct linear_args {
    const uint32_t *words;
    const uint16_t *suh, *svh;
    const float *bias;
    const void *x;
    void *y;
    size_t ldx, ldy;
    x3_cuda_type x_type, y_type;
    int x_whole, y_whole; /* rows may be read and written four numbers at a time */
    int n_rows, n_in, n_out;
    uint32_t multiplier, addend; /* of the codebook: struct ones */
    int n_units_in, n_stripes; /* units of a stripe; stripes */
    int n_units_each;          /* of a block, */
    int n_units_more;          /* and this many blocks take one more */
    int n_stages;              /* of a warp's ring in shared memory */
    uint4 *fragments;          /* rotated inputs as operands: [row / 16][unit][lane]; unused when folded */
    float *partial;            /* [slot][row][128], slot = block + stripe */
    int *counters;             /* [row group][stripe] segments that have arrived; zero between calls */
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
x3_status x3_linear_check(const x3_cuda_group *g, x3_err *err);
/* All but the work split and scratch. */
void x3_linear_fill_args(linear_args *a, const x3_cuda_group *g, const x3_cuda_rows *rows);
/* The work split; returns the number of blocks. */
int x3_linear_cut(const x3_cuda_info *info, linear_args *a);
/* a->fragments := the rotated inputs. */
x3_status x3_linear_rotate(const x3_cuda_info *info, linear_args *a, bool overlap, x3_cuda_stream stream, x3_err *err);

/* Shared memory: the warps' rings of weights, the chains' sums of 8 rows, and the rotated inputs when folded. */
static inline size_t linear_ring_bytes(int K, linear_shape s, int n_stages)
{
    return (size_t)LINEAR_WARPS(s) * (size_t)n_stages * LINEAR_STAGE_UNITS(K) * LINEAR_TILES(s) * 32 * (size_t)K;
}

static inline size_t linear_sums_bytes(linear_shape s, int n_rows)
{
    const size_t cols = (size_t)LINEAR_WARPS(s) / N_CHAINS * LINEAR_TILES(s) * X3_TILE;

    return (size_t)N_CHAINS * (size_t)(n_rows < 8 ? n_rows : 8) * (cols + LINEAR_SUMS_PAD) * sizeof(float);
}

/* Rotated inputs 128 * block + 4 * lane .. of a row: those two and two that are neighbours in an operand. */
static __device__ __forceinline__ void rotate_inputs(const linear_args &a, int row, int block, int lane, uint32_t words[2])
{
    const size_t i = (size_t)block * X3_HADAMARD + 4 * lane;
    float v[4];

    load_4(v, a.x, a.x_type, (size_t)row * a.ldx, i, (size_t)a.n_in, a.x_whole);
    scale_4(v, a.suh, i);
    hadamard_128(v, lane);
    words[0] = half2_bits(__floats2half2_rn(v[0], v[2]));
    words[1] = half2_bits(__floats2half2_rn(v[1], v[3]));
}

/* Where they belong among the 8 words [q][2] of their unit, unit lane / 4 of the block: rows 0, 2, .. come before rows
 * 1, 3, .. (tile_operand_row), and rows 8 .. 15 are the second word of a lane. */
static __device__ __forceinline__ int operand_word(int lane, int which)
{
    return 2 * (2 * which + (lane & 1)) + (lane >> 1 & 1);
}

#endif
