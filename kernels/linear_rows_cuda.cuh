/* The EXL3 linear for many rows: what its files share. */
#ifndef X3_LINEAR_ROWS_CUDA_CUH
#define X3_LINEAR_ROWS_CUDA_CUH

#include "kernels/linear_cuda.cuh"

/* Weights as operands: of mma.sync, of x3_linear_hopper. */
typedef enum fragments_form { FRAGMENTS_MMA, FRAGMENTS_HOPPER, N_FRAGMENTS } fragments_form;

void x3_fragment_kernels_k1(const void *out[N_DECODERS][N_FRAGMENTS]);
void x3_fragment_kernels_k2(const void *out[N_DECODERS][N_FRAGMENTS]);
void x3_fragment_kernels_k3(const void *out[N_DECODERS][N_FRAGMENTS]);
void x3_fragment_kernels_k4(const void *out[N_DECODERS][N_FRAGMENTS]);
void x3_fragment_kernels_k5(const void *out[N_DECODERS][N_FRAGMENTS]);
void x3_fragment_kernels_k6(const void *out[N_DECODERS][N_FRAGMENTS]);
void x3_fragment_kernels_k7(const void *out[N_DECODERS][N_FRAGMENTS]);
void x3_fragment_kernels_k8(const void *out[N_DECODERS][N_FRAGMENTS]);

/* ---- compute capability 9.0: linear_hopper_cuda.cu ---- */

#define HOPPER_GROUPS 8 /* linear_args.n_together: the rows of a block, 16 each */

/* Whether x3_linear_hopper can be used on this device, by this build. */
bool x3_linear_hopper_fits(const x3_cuda_info *info);
/* y of a->n_rows rows: a is cut, its fragments are there, and so are the weights, [stripe][unit] in 4,096 bytes: [output / 8][input / 8]
 * blocks of 8 outputs by 8 inputs, inputs in the order of tile_operand_row. n_cluster: blocks that share the weights they read, of
 * different rows: 1 or 2. */
x3_status x3_linear_hopper(const x3_cuda_info *info, const linear_args *a, const uint4 *d_weights, int n_cluster, x3_cuda_stream stream,
                           x3_err *err);

#endif
