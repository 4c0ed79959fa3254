/* CUDA forms of the smaller operations: what the CUDA device calls beside cuda_kernels.h, whose conventions (memory, streams,
 * errors) hold here too. Matrices are float32, row-major, `ld` a row's distance in floats.
 *
 * No atomic sums and no order that depends on what else runs: the same call on the same device gives the same bits. */
#ifndef X3_CUDA_OPS_H
#define X3_CUDA_OPS_H

#include "kernels/cuda_kernels.h"
#include "kernels/kv_types.h"
#include "kernels/score.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- rows; a row's result does not depend on the others ------------------------------------------------------------ */

/* As x3_kernels.rms_norm, the squares summed in another order. Bound: 1e-6 relative. */
x3_status x3_cuda_rms_norm(const float *d_x, size_t ldx, size_t n_rows, size_t n, const float *d_weight, float eps,
                           float *d_out, size_t ldo, x3_cuda_stream stream, x3_err *err) X3_MUST;

/* x [n_rows][n] += y; out [n_rows][n] = norm of x: the bits of add and rms_norm. */
x3_status x3_cuda_add_norm(float *d_x, const float *d_y, size_t n_rows, size_t n, const float *d_weight, float eps, float *d_out,
                           x3_cuda_stream stream, x3_err *err) X3_MUST;

typedef struct x3_cuda_rope {
    float *d_x;
    size_t ld, first, head_stride, n_heads, n_rotated, n_rows;
    bool interleaved;
    const float *d_cos_sin;     /* [position][2][n_rotated / 2] */
    const int32_t *d_positions; /* [n_rows] */
} x3_cuda_rope;

/* EXACT. */
x3_status x3_cuda_rotate(const x3_cuda_rope *r, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* As x3_kernels.silu_mul, EXACT. */
x3_status x3_cuda_silu_mul(const float *d_gate, const float *d_up, size_t n, float *d_out, x3_cuda_stream stream,
                           x3_err *err) X3_MUST;

/* A dense weight [n_out][n_in] in device memory. */
typedef enum x3_cuda_dense_type { X3_CUDA_DENSE_F32, X3_CUDA_DENSE_BF16, X3_CUDA_DENSE_F16 } x3_cuda_dense_type;

/* y = x W^T + bias in float32, row-invariant for any number of rows; meant for few. */
x3_status x3_cuda_dense_rows(const void *d_w, x3_cuda_dense_type type, size_t n_out, size_t n_in, const float *d_bias,
                             const float *d_x, size_t ldx, size_t n_rows, float *d_y, size_t ldy, x3_cuda_stream stream,
                             x3_err *err) X3_MUST;

/* ids[r]: the index of the largest of x[r][0 .. n - 1], of equal ones the lowest; -1: one is a NaN, or none is finite. EXACT. */
x3_status x3_cuda_argmax(const float *d_x, size_t n_rows, size_t n, int32_t *d_ids, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* out [n_rows][n] = rows ids of a dense weight [..][n], as float32. EXACT. */
x3_status x3_cuda_dense_pick(const void *d_w, x3_cuda_dense_type type, size_t n, const int32_t *d_ids, size_t n_rows, float *d_out,
                             x3_cuda_stream stream, x3_err *err) X3_MUST;

/* ---- cache and attention --------------------------------------------------------------------------------------------- */

/* One sequence: rows [first_row, first_row + n_rows) are its positions from `position`; its pages begin at
 * d_pages + first_page; slot: of its recurrent state. */
typedef struct x3_cuda_sequence {
    int32_t first_row, n_rows, position, first_page, slot;
} x3_cuda_sequence;

typedef struct x3_cuda_batch {
    size_t n_rows, n_sequences, longest; /* longest: rows of a sequence at most */
    size_t most_pages;                   /* of a sequence, or somewhat more */
    const x3_cuda_sequence *d_sequences;
    const int32_t *d_row_sequence; /* [n_rows]; -1: a row of no sequence, which is left alone */
    const int32_t *d_positions;    /* [n_rows] */
    const int32_t *d_pages;
} x3_cuda_batch;

/* Layout of a page: runtime/device/device.h. d_values NULL: values are the first v_dim dimensions of the keys, or there are none. */
typedef struct x3_cuda_kv {
    size_t n_kv_heads, k_dim, v_dim;
    float *d_keys, *d_values;
    x3_kv_type type;
    void *d_packed_keys, *d_packed_values; /* other than X3_KV_F32: blocks of kv_types.h */
} x3_cuda_kv;

x3_status x3_cuda_kv_append(const x3_cuda_kv *kv, const x3_cuda_batch *batch, const float *d_k, size_t ldk,
                            const float *d_v, size_t ldv, x3_cuda_stream stream, x3_err *err) X3_MUST;

typedef struct x3_cuda_attention {
    const float *d_q;
    float *d_out;
    size_t n_heads;
    x3_cuda_kv kv;
    float scale;
    size_t window;
    const float *d_sinks;
} x3_cuda_attention;

#define X3_CUDA_V_DIM 512 /* at most; a multiple of 4, as k_dim */

/* Causal attention, float32 throughout, softmax carried along page by page. A row does not depend on the other rows. */
x3_status x3_cuda_attend(const x3_cuda_attention *a, const x3_cuda_batch *batch, x3_cuda_stream stream, x3_err *err) X3_MUST;

/* The same for packed caches: attention within 2^-16 of float32 over the same numbers. A row does not depend on the other
 * rows. d_partial: x3_cuda_packed_bytes, contents of no meaning. */
x3_status x3_cuda_append_packed(const x3_cuda_kv *kv, const x3_cuda_batch *batch, const float *d_k, size_t ldk,
                                const float *d_v, size_t ldv, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* Rotates q and k in place, then appends k (its d_x, ld and head_stride) and v: the bits of the three calls. */
x3_status x3_cuda_rope_append_packed(const x3_cuda_rope *q, const x3_cuda_rope *k, const x3_cuda_kv *kv, const x3_cuda_batch *batch,
                                     const float *d_v, size_t ldv, x3_cuda_stream stream, x3_err *err) X3_MUST;
x3_status x3_cuda_attend_packed(const x3_cuda_info *info, const x3_cuda_attention *a, const x3_cuda_batch *batch, float *d_partial,
                                x3_cuda_stream stream, x3_err *err) X3_MUST;
size_t x3_cuda_packed_bytes(const x3_cuda_info *info, const x3_cuda_attention *a, const x3_cuda_batch *batch);

/* ---- comparing logits ------------------------------------------------------------------------------------------------- */

/* x3_score_row_ref for n_rows rows, sums in float64. d_next [n_rows], d_out [n_rows] in device memory. */
x3_status x3_cuda_score(const float *d_reference, const float *d_pack, size_t n_rows, size_t vocab, const int32_t *d_next,
                        x3_score_position *d_out, x3_cuda_stream stream, x3_err *err) X3_MUST;

/* ---- float32 operands as two float16 ------------------------------------------------------------------------------------
 * v = (high + low) * unit with a power of two as unit, chosen so that the largest value comes near float16's end: 22 bits of
 * the largest and more than enough of the others. Products of such halves are exact in float32. Numbers that are not
 * finite stay so. */

/* Rows of n floats to high and low [n_rows][ld], zero from n to ld; unit [n_rows]. With suh (float16 [ld]), the row is first
 * multiplied by it and put through the Hadamard transform; ld is then a multiple of 128. */
x3_status x3_cuda_split_rows(const float *d_x, size_t ldx, size_t n_rows, size_t n, const uint16_t *d_suh, uint16_t *d_high,
                             uint16_t *d_low, size_t ld, float *d_unit, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* The same with a unit a column: unit [n]. d_largest [n] is scratch. */
x3_status x3_cuda_split_cols(const float *d_x, size_t ldx, size_t n_rows, size_t n, uint16_t *d_high, uint16_t *d_low, size_t ld,
                             uint32_t *d_largest, float *d_unit, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* A weight [n_out][n_in] with one unit for all; d_low may be NULL: high alone is then exact for BF16 (down to 2^-32 of the
 * largest) and F16. d_largest [1] is scratch. */
x3_status x3_cuda_split_weight(const void *d_w, x3_cuda_dense_type type, size_t n_out, size_t n_in, uint16_t *d_high,
                               uint16_t *d_low, size_t ld, uint32_t *d_largest, float *d_unit, x3_cuda_stream stream,
                               x3_err *err) X3_MUST;
/* out [n] = a dense weight of n numbers as float32. */
x3_status x3_cuda_dense_floats(const void *d_w, x3_cuda_dense_type type, size_t n, float *d_out, x3_cuda_stream stream,
                               x3_err *err) X3_MUST;
/* y[r][c] = y[r][c] * row_unit[r] * *unit + bias[c]; unit and bias may be NULL. */
x3_status x3_cuda_finish_rows(float *d_y, size_t ldy, size_t n_rows, size_t n, const float *d_row_unit, const float *d_unit,
                              const float *d_bias, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* y[r] = (p[r] Hadamard) * svh * row_unit[r] + bias; p [n_rows][n_padded] without gaps. */
x3_status x3_cuda_finish_rotated(const float *d_p, size_t n_rows, size_t n_padded, const float *d_row_unit,
                                 const uint16_t *d_svh, const float *d_bias, float *d_y, size_t ldy, size_t n,
                                 x3_cuda_stream stream, x3_err *err) X3_MUST;
/* a[i][j] += p[i][j] * row_unit[i] * col_unit[j]; only j <= i when lower. */
x3_status x3_cuda_add_product(float *d_a, const float *d_p, size_t n, size_t ldp, const float *d_row_unit,
                              const float *d_col_unit, bool lower, x3_cuda_stream stream, x3_err *err) X3_MUST;

/* ---- matrices ---------------------------------------------------------------------------------------------------------- */

x3_status x3_cuda_transpose_pad(const float *d_w, size_t n_out, size_t n_in, float *d_out, size_t n_out_padded,
                                size_t n_in_padded, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* x[r][c] *= s[r], or s[c]. */
x3_status x3_cuda_scale_matrix(float *d_x, size_t n_rows, size_t n_cols, const float *d_s, bool by_row,
                               x3_cuda_stream stream, x3_err *err) X3_MUST;
/* Sums of x * y along rows, or down columns, float64. d_partial: x3_cuda_dots_bytes. */
x3_status x3_cuda_row_dots(const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_out,
                           x3_cuda_stream stream, x3_err *err) X3_MUST;
x3_status x3_cuda_col_dots(const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_partial, double *d_out,
                           x3_cuda_stream stream, x3_err *err) X3_MUST;
size_t x3_cuda_col_dots_bytes(size_t n_rows, size_t n_cols);
/* x[i] += y[i]; x[i] *= y[i]; x[i] *= alpha; y[i] += alpha * x[i]; a[i][i] += d[i] */
x3_status x3_cuda_add(float *d_x, const float *d_y, size_t n, x3_cuda_stream stream, x3_err *err) X3_MUST;
x3_status x3_cuda_multiply(float *d_x, const float *d_y, size_t n, x3_cuda_stream stream, x3_err *err) X3_MUST;
x3_status x3_cuda_scale(float *d_x, size_t n, float alpha, x3_cuda_stream stream, x3_err *err) X3_MUST;
x3_status x3_cuda_axpy(float alpha, const float *d_x, float *d_y, size_t n, x3_cuda_stream stream, x3_err *err) X3_MUST;
x3_status x3_cuda_add_diagonal(float *d_a, size_t n, const float *d_d, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* Upper triangle := lower triangle. */
x3_status x3_cuda_mirror(float *d_a, size_t n, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* 128-blocks along rows, or down columns; EXACT. */
x3_status x3_cuda_hadamard(float *d_x, size_t n_rows, size_t n_cols, bool down, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* *d_bad += rows that hold a number that is not finite, in x or y (may be NULL); with clear, they become zero. */
x3_status x3_cuda_bad_rows(float *d_x, float *d_y, size_t n_rows, size_t n, bool clear, uint32_t *d_bad, x3_cuda_stream stream,
                           x3_err *err) X3_MUST;
x3_status x3_cuda_widen(const float *d_x, size_t n, double *d_out, x3_cuda_stream stream, x3_err *err) X3_MUST;
x3_status x3_cuda_narrow(const double *d_x, size_t n, float *d_out, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* L of a = L D L^T with 16 x 16 blocks from the Cholesky factor g (row-major lower): block column j of g times the inverse of
 * its diagonal block, ones on the diagonal, zeros above. */
x3_status x3_cuda_block_unit(const double *d_g, size_t n, float *d_l, x3_cuda_stream stream, x3_err *err) X3_MUST;

#ifdef __cplusplus
}
#endif
#endif
