/* CUDA forms of what a mixture of experts needs, and of products with many weights at once. Conventions: cuda_kernels.h,
 * cuda_ops.h.
 *
 * The products with many weights read how many rows an expert has on the device, so nothing waits for the host. A row's
 * result does not depend on the other rows. */
#ifndef X3_CUDA_MOE_H
#define X3_CUDA_MOE_H

#include "kernels/cuda_ops.h"
#include "kernels/route.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- routing --------------------------------------------------------------------------------------------------------- */

/* x3_route_row_ref for n_rows rows. EXACT. */
x3_status x3_cuda_route(const x3_cuda_info *info, const x3_route_rule *rule, const float *d_logits, const float *d_correction,
                        size_t n_rows, int32_t *d_ids, float *d_weights, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* runtime/device/device.h: group_rows. EXACT. */
x3_status x3_cuda_group_rows(const int32_t *d_ids, size_t n_rows, size_t n_chosen, size_t n_experts, int32_t *d_first,
                             int32_t *d_rows, int32_t *d_slots, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* out[i] = x[rows[i]], n floats each, without gaps. */
x3_status x3_cuda_gather_rows(const float *d_x, const int32_t *d_rows, size_t n_rows, size_t n, float *d_out,
                              x3_cuda_stream stream, x3_err *err) X3_MUST;
/* out[r] = (add ? out[r] : 0) + sum over j of weights[r][j] * y[slots[r][j]], in the order of j. EXACT. */
x3_status x3_cuda_combine_rows(const float *d_y, const int32_t *d_slots, const float *d_weights, size_t n_rows, size_t n_chosen,
                               size_t n, bool add, float *d_out, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* x[i] *= sigmoid(gate[i / per_gate]). EXACT. */
x3_status x3_cuda_sigmoid_mul(float *d_x, const float *d_gate, size_t n, size_t per_gate, x3_cuda_stream stream,
                              x3_err *err) X3_MUST;

/* ---- products with many weights -------------------------------------------------------------------------------------- */

/* The weight of one expert, in device memory. Dense: K 0, suh and svh NULL. */
typedef struct x3_cuda_expert {
    const void *d_w;
    size_t K; /* 1 to 8; as wide as a pointer, so that nothing lies between */
    const uint16_t *d_suh, *d_svh;
    const float *d_bias; /* or NULL */
} x3_cuda_expert;

/* Rows to experts in slots: those of expert e are [d_first[e], d_first[e + 1]). */
typedef struct x3_cuda_slots {
    const int32_t *d_first; /* [n_experts + 1] */
    const int32_t *d_rows;  /* row of x of a slot; NULL: slot s reads row s */
    size_t n_experts, n_slots; /* n_slots: at most */
    const float *d_x;
    size_t ldx;
    float *d_y;
    size_t ldy;
    bool reverse; /* sums over inputs from last to first, some at a time */
} x3_cuda_slots;

/* y = x W^T + bias for the experts d_list[0 .. n_list). All are of one type, [n_out][n_in]; aligned: they begin on 16-byte
 * boundaries, which EXL3 weights always have to.
 * Weights and inputs become sums of up to three bfloat16, tensor cores multiply those with float32 sums.
 * Bound: 1e-6 relative to the row. */
x3_status x3_cuda_expert_dense(const x3_cuda_slots *slots, const x3_cuda_expert *d_experts, const int32_t *d_list, size_t n_list,
                               x3_cuda_dense_type type, size_t n_out, size_t n_in, bool aligned, x3_cuda_stream stream,
                               x3_err *err) X3_MUST;

/* The same for one linear a head: weight of head h at row first + h * stride of w [..][n_in]. */
typedef struct x3_cuda_heads {
    const void *d_w;
    x3_cuda_dense_type type;
    size_t n_in, n_heads, first, stride, n;
    bool transposed; /* x W: x has n columns a head, y n_in */
    const float *d_x;
    size_t ldx, x_stride, n_rows;
    float *d_y;
    size_t ldy, y_stride;
} x3_cuda_heads;

x3_status x3_cuda_linear_heads(const x3_cuda_heads *h, x3_cuda_stream stream, x3_err *err) X3_MUST;

/* EXL3, in two steps for slots [first_slot, first_slot + n_slots): rows are scaled, rotated and split into two float16 with a
 * unit a row; then y = rows Wq, rotated back, for the experts of a list that have one codebook, each its own K, in one launch.
 * Bound: 1e-6 relative to the row. */
typedef struct x3_cuda_rotated {
    size_t first_slot, n_slots;
    void *d_parts; /* [n_slots] times x3_cuda_rotated_bytes */
    float *d_unit;        /* [n_slots] */
} x3_cuda_rotated;

size_t x3_cuda_rotated_bytes(size_t n_in_padded);
x3_status x3_cuda_expert_rotate(const x3_cuda_slots *slots, const x3_cuda_expert *d_experts, size_t n_in, size_t n_in_padded,
                                const x3_cuda_rotated *to, x3_cuda_stream stream, x3_err *err) X3_MUST;

typedef struct x3_cuda_shape {
    int K; /* the largest in the list */
    x3_codebook codebook;
    size_t n_in_padded, n_out, n_out_padded;
} x3_cuda_shape;

x3_status x3_cuda_expert_exl3(const x3_cuda_info *info, const x3_cuda_slots *slots, const x3_cuda_expert *d_experts,
                              const int32_t *d_list, size_t n_list, const x3_cuda_shape *shape, const x3_cuda_rotated *rows,
                              x3_cuda_stream stream, x3_err *err) X3_MUST;

#ifdef __cplusplus
}
#endif
#endif
