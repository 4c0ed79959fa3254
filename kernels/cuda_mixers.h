/* CUDA forms of the mixers beside plain attention: delta nets, selection of positions, attention over a selection. Conventions:
 * cuda_kernels.h, cuda_ops.h. */
#ifndef X3_CUDA_MIXERS_H
#define X3_CUDA_MIXERS_H

#include "kernels/cuda_ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* n_heads pieces of n_cols floats in each of n_rows rows. */
typedef struct x3_cuda_pieces {
    float *d_to;
    size_t ld_to, stride_to;
    const float *d_from;
    size_t ld_from, stride_from;
    size_t n_rows, n_heads, n_cols;
} x3_cuda_pieces;

x3_status x3_cuda_copy_heads(const x3_cuda_pieces *p, x3_cuda_stream stream, x3_err *err) X3_MUST;

/* Rows of n floats, in place; mean and variance in float64. Bound: 1e-6 relative to the row. */
x3_status x3_cuda_layer_norm(float *d_x, size_t n_rows, size_t n, const float *d_weight, const float *d_bias, float eps,
                             x3_cuda_stream stream, x3_err *err) X3_MUST;

/* runtime/device/device.h, x3_conv_args; slot s of a sequence is in x3_cuda_sequence. EXACT. */
typedef struct x3_cuda_conv {
    const float *d_x;
    float *d_out;
    size_t n, kernel;
    const float *d_weight;
    float *d_state;
    size_t state_stride;
} x3_cuda_conv;

x3_status x3_cuda_conv_silu(const x3_cuda_conv *c, const x3_cuda_batch *batch, x3_cuda_stream stream, x3_err *err) X3_MUST;

/* runtime/device/device.h, x3_delta_args. k_dim at most X3_CUDA_DELTA_DIM. d_scratch: x3_cuda_delta_bytes.
 * Bound: 1e-5 relative over a few thousand positions. */
typedef struct x3_cuda_delta {
    size_t n_k_heads, n_v_heads, k_dim, v_dim;
    const float *d_qkv, *d_b, *d_a, *d_a_log, *d_dt_bias;
    float *d_out, *d_state;
    size_t state_stride;
} x3_cuda_delta;

#define X3_CUDA_DELTA_DIM 256

size_t x3_cuda_delta_bytes(const x3_cuda_delta *d, size_t n_rows);
x3_status x3_cuda_delta_rule(const x3_cuda_delta *d, const x3_cuda_batch *batch, void *d_scratch, x3_cuda_stream stream,
                             x3_err *err) X3_MUST;

/* runtime/device/device.h, x3_select_args, for rows [first_row, first_row + n_rows) of the batch. Scores are sums over dimensions,
 * then over heads, from first to last. d_scores [n_rows][n_positions]; n_positions: as many as the longest sequence has, or
 * more. */
typedef struct x3_cuda_select {
    const float *d_q, *d_weights;
    size_t n_heads, dim, n_selected;
    const float *d_keys; /* [page][4][dim][16] */
    int32_t *d_selected;
    size_t first_row, n_rows, n_positions;
    float *d_scores;
} x3_cuda_select;

#define X3_CUDA_SELECT_DIM 256 /* at most */

x3_status x3_cuda_select_positions(const x3_cuda_select *s, const x3_cuda_batch *batch, x3_cuda_stream stream,
                                   x3_err *err) X3_MUST;

/* Attention of every row over its positions in d_selected [n_rows][n_selected]; rows at positions below n_selected see all of
 * their own. One KV head. Float32, softmax carried along 16 positions at a time. */
x3_status x3_cuda_attend_selected(const x3_cuda_attention *a, const int32_t *d_selected, size_t n_selected,
                                  const x3_cuda_batch *batch, x3_cuda_stream stream, x3_err *err) X3_MUST;

#ifdef __cplusplus
}
#endif
#endif
