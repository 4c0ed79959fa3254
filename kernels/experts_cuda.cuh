/* EXL3 linears of many experts: arguments and shapes of the kernels. Private to experts*.cu. */
#ifndef X3_EXPERTS_CUDA_CUH
#define X3_EXPERTS_CUDA_CUH

#include "kernels/cuda_common.cuh"
#include "kernels/cuda_moe.h"

#define EXPERT_THREADS 256
#define EXPERT_OUTS 128      /* of a block: one block of the Hadamard transform */
#define EXPERT_STAGE_UNITS 4 /* rows of tiles that arrive in shared memory together; divides 8 */
#define EXPERT_STAGES(few) ((few) ? 8 : 3) /* on their way; few rows are limited by the latency of memory */

typedef struct expert_args {
    const x3_cuda_expert *experts;
    const int32_t *list, *first;
    const void *parts; /* x3_cuda_rotated */
    const float *unit;
    int first_slot, end_slot; /* that are rotated */
    int n_list, n_units, n_stripes, n_out;
    uint32_t multiplier, addend; /* of the codebook: struct ones */
    float *y;
    size_t ldy;
    bool reverse, y_whole;
} expert_args;

/* Compiled forms, by the rows that a block takes at a time. Both give a row the same bits. */
typedef enum expert_shape { EXPERT_FEW, EXPERT_MANY, EXPERT_SHAPES } expert_shape;

#define EXPERT_ROWS(s) ((s) == EXPERT_FEW ? 8 : 64)

const void *x3_expert_kernel(x3_codebook codebook, expert_shape s);

/* Shared memory of experts of at most K bits: stages of words and rows, in whose place the sums [rows][132] come at last. */
static inline size_t expert_shared_bytes(int K, expert_shape s)
{
    const size_t stages = (size_t)EXPERT_STAGES(s == EXPERT_FEW) * EXPERT_STAGE_UNITS *
                          (size_t)(EXPERT_OUTS / 16 * 32 * K + EXPERT_ROWS(s) * 64);

    return x3_max_size(stages, (size_t)EXPERT_ROWS(s) * (EXPERT_OUTS + 4) * sizeof(float));
}

#endif
