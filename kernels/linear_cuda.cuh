/* The EXL3 linear for 1 .. 128 rows: its parts and how the work is cut. Private to linear*.cu.
 *
 * A unit is one row of tiles (16 inputs) of one stripe (128 outputs). Units are numbered stripe by stripe; block b of n
 * takes units [b U / n, (b + 1) U / n), so it sees one or a few segments, each inside one stripe. Inside a segment unit i
 * belongs to chain i % 8. An output is the sum over its stripe's segments, first to last, of the sum over chains 0 .. 7
 * of the tensor-core products of the chain's units, first to last. None of this depends on the number of rows. */
#ifndef X3_LINEAR_CUDA_CUH
#define X3_LINEAR_CUDA_CUH

#include "kernels/cuda_common.cuh"

#define N_CHAINS 8
#define STRIPE_COLS 128
#define STRIPE_TILES (STRIPE_COLS / X3_TILE)
#define HALF_TILES (STRIPE_TILES / 2) /* what one warp multiplies at a time: 64 outputs */
#define STAGE_UNITS_OF(K) ((K) <= 3 ? 4 : 2) /* units of a chain that arrive in shared memory together */
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
    int n_units_in, n_stripes; /* units of a stripe; stripes */
    int n_stages;              /* of a warp's ring in shared memory */
    uint4 *fragments;          /* rotated inputs as A operands: [row / 16][unit][lane]; unused when folded */
    float *partial;            /* [slot][row][128], slot = block + stripe */
    int *counters;             /* [row group][stripe] segments that have arrived; zero between calls */
} linear_args;

/* Rows that one launch (one blockIdx.y) covers, by the 16-row blocks a warp keeps. */
typedef enum linear_shape { LINEAR_FOLDED, LINEAR_16, LINEAR_32, LINEAR_64, LINEAR_SHAPES } linear_shape;

/* The kernels of one K (one object file each): [codebook][shape]. */
typedef struct linear_kernels {
    const void *linear[3][LINEAR_SHAPES];
    const void *reconstruct[3][2]; /* by x3_cuda_type of the output */
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
/* All but the work split and scratch. */
void x3_linear_fill_args(linear_args *a, const x3_cuda_group *g, const x3_cuda_rows *rows);

static inline int linear_warps(linear_shape shape)
{
    return shape == LINEAR_64 ? 8 : 16;
}

static inline int linear_rows(linear_shape shape)
{
    return shape == LINEAR_64 ? 64 : shape == LINEAR_32 ? 32 : shape == LINEAR_16 ? 16 : FOLD_ROWS;
}

/* Shared memory: the warps' rings of weights, the chains' sums of 8 rows, and the rotated inputs when folded. */
static inline size_t linear_ring_bytes(int K, linear_shape shape, int n_stages)
{
    return (size_t)linear_warps(shape) * (size_t)n_stages * STAGE_UNITS_OF(K) * HALF_TILES * 32 * (size_t)K;
}

static inline size_t linear_sums_bytes(linear_shape shape, int n_rows)
{
    const size_t cols = shape == LINEAR_64 ? STRIPE_COLS / 2 : STRIPE_COLS;

    return (size_t)N_CHAINS * (size_t)(shape == LINEAR_FOLDED ? n_rows : 8) * (cols + 8) * sizeof(float);
}

#endif
