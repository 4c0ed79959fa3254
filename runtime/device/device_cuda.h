/* The CUDA device's own state, shared by its files. C; the kernels and their launchers are in kernels/ (cuda_kernels.h,
 * cuda_ops.h).
 *
 * Everything is queued on one stream. Scratch belongs to the operation that asked last; the next one may overwrite it, in
 * stream order. All device memory, scratch and libraries' workspace included, is counted in used_bytes. */
#ifndef X3_DEVICE_CUDA_H
#define X3_DEVICE_CUDA_H

#include <cublas_v2.h>
#include <cuda_runtime_api.h>
#include <cusolverDn.h>

#include "kernels/cuda_ops.h"
#include "runtime/device/device.h"

typedef struct x3_cuda_buffer {
    void *p;
    size_t n_bytes;
} x3_cuda_buffer;

typedef struct x3_device_cuda {
    x3_device base;
    x3_cuda_info info;
    cudaStream_t stream;
    cudaMemPool_t pool;
    cublasHandle_t blas;
    cusolverDnHandle_t solver;
    x3_cuda_buffer scratch, linear; /* linear: begins with the counters of x3_cuda_linear, zero between calls */
    void *blas_workspace;
    void *d_small; /* a few words that kernels leave for the host */

    /* Pairs of events around work whose time has not been read yet. */
    struct x3_cuda_span {
        cudaEvent_t begin, end;
        x3_work work;
    } *spans;
    size_t n_spans;
    int span_depth; /* operations that are being queued: one may call another */

    bool recording;
    uint64_t generation; /* of scratch and tables of experts: changes when some of them move */

    /* What is allocated: address and bytes, open addressing. */
    x3_cuda_buffer *blocks;
    size_t n_blocks, block_capacity;

    /* The batch last described to the device: sequences, the sequence of every row, pages. */
    int32_t *table;
    size_t table_capacity, table_words;
    x3_cuda_buffer d_table;

    /* Weights of experts as the device knows them, by what they are: device_cuda_moe.c. */
    struct x3_cuda_experts *experts;
    size_t n_experts;
} x3_device_cuda;

static inline x3_device_cuda *x3_cuda(x3_device *dev)
{
    return (x3_device_cuda *)dev;
}

x3_status x3_cuda_result(cudaError_t error, const char *what, x3_err *err);
x3_status x3_cuda_blas_result(cublasStatus_t status, const char *what, x3_err *err);
x3_status x3_cuda_solver_result(cusolverStatus_t status, const char *what, x3_err *err);

/* Scratch of at least n_bytes, contents undefined. Growing it waits for the device. */
x3_status x3_cuda_reserve(x3_device_cuda *cuda, x3_cuda_buffer *buffer, size_t n_bytes, x3_err *err) X3_MUST;

/* Carves a buffer up: returns the place of the next n_bytes and moves *at on, 256-byte steps. */
static inline void *x3_cuda_carve(const x3_cuda_buffer *buffer, size_t *at, size_t n_bytes)
{
    void *p = (char *)buffer->p + *at;

    *at += x3_round_up(n_bytes, 256);
    return p;
}

/* c [m][n] = op(a) b + beta c in row-major terms: a, b float16, c float32, float32 sums on the tensor cores.
 * ta: a is [k][m], else [m][k]; tb: b is [n][k], else [k][n]. */
typedef struct x3_cuda_product {
    bool ta, tb;
    size_t m, n, k;
    const uint16_t *d_a, *d_b;
    size_t lda, ldb, ldc;
    float beta;
    float *d_c;
} x3_cuda_product;

x3_status x3_cuda_multiply_f16(x3_device_cuda *cuda, const x3_cuda_product *p, x3_err *err) X3_MUST;

/* Scratch of an operation that takes its rows in parts, one row at least: rotated inputs of experts, scores of positions. */
#define X3_CUDA_PART_BYTES ((size_t)256 << 20)

/* Scratch at most, for the shapes of x3_device_ops.own_bytes. */
uint64_t x3_cuda_linear_scratch(size_t n_in, size_t n_out, size_t n_rows);
uint64_t x3_cuda_algebra_scratch(x3_device_cuda *cuda, size_t n);
uint64_t x3_cuda_ldlq_scratch(const x3_cuda_info *info, size_t n_in, size_t n_out);

/* Tells the device about a batch; the one it knows already costs nothing. */
x3_status x3_cuda_describe(x3_device_cuda *cuda, const x3_batch *batch, x3_cuda_batch *out, x3_err *err) X3_MUST;
/* Of a dense weight. */
x3_cuda_dense_type x3_cuda_type_of(const x3_weight *w);
/* Host memory of the tables of experts; the device's goes with the device. */
void x3_cuda_experts_free(x3_device_cuda *cuda);

/* Operations of the table, by file: device_cuda_forward.c. */
x3_status x3_cuda_op_linear_gated(x3_device *dev, const x3_weight *w, float *d_gate, const float *d_up, size_t n_rows, float *d_y,
                                  x3_err *err);
x3_status x3_cuda_op_linears(x3_device *dev, const x3_weight *const *w, size_t n, const float *d_x, size_t ldx, size_t n_rows,
                             float *const *d_y, x3_err *err);
x3_status x3_cuda_op_linear(x3_device *dev, const x3_weight *w, const float *d_x, size_t ldx, size_t n_rows, float *d_y,
                            size_t ldy, x3_err *err);
x3_status x3_cuda_op_dense_floats(x3_device *dev, const x3_weight *w, float *d_out, x3_err *err);
x3_status x3_cuda_op_rms_norm(x3_device *dev, const float *d_x, size_t ldx, size_t n_rows, size_t n, const float *d_weight,
                              float eps, float *d_out, size_t ldo, x3_err *err);
x3_status x3_cuda_op_rope(x3_device *dev, const x3_rope_args *args, const x3_batch *batch, x3_err *err);
x3_status x3_cuda_op_rope_append(x3_device *dev, const x3_rope_args *q, const x3_rope_args *k, const x3_kv_layer *kv,
                                 const x3_batch *batch, const float *d_v, size_t ldv, x3_err *err);
x3_status x3_cuda_op_kv_append(x3_device *dev, const x3_kv_layer *kv, const x3_batch *batch, const float *d_k, size_t ldk,
                               const float *d_v, size_t ldv, x3_err *err);
x3_status x3_cuda_op_attention(x3_device *dev, const x3_attention_args *args, const x3_batch *batch, x3_err *err);
x3_status x3_cuda_op_silu_mul(x3_device *dev, const float *d_gate, const float *d_up, size_t n, float *d_out, x3_err *err);
x3_status x3_cuda_op_add(x3_device *dev, float *d_x, const float *d_y, size_t n, x3_err *err);
x3_status x3_cuda_op_score(x3_device *dev, const float *d_reference, const float *d_pack, size_t n_rows, size_t vocab,
                           const int32_t *next, x3_score_position *out, x3_err *err);
/* device_cuda_algebra.c */
x3_status x3_cuda_op_gram(x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n, float *d_a, x3_err *err);
x3_status x3_cuda_op_all_finite(x3_device *dev, const float *d_x, size_t n, bool *finite, x3_err *err);
x3_status x3_cuda_op_drop_nonfinite(x3_device *dev, float *d_x, float *d_y, size_t n_rows, size_t n, size_t *n_bad, x3_err *err);
x3_status x3_cuda_op_gemm(x3_device *dev, bool ta, bool tb, size_t m, size_t n, size_t k, float alpha, const float *d_a, size_t lda,
                          const float *d_b, size_t ldb, float beta, float *d_c, size_t ldc, x3_err *err);
x3_status x3_cuda_op_mirror(x3_device *dev, float *d_a, size_t n, x3_err *err);
x3_status x3_cuda_op_spd_solve(x3_device *dev, const float *d_a, size_t n, float *d_b, size_t m, x3_err *err);
x3_status x3_cuda_op_block_ldl(x3_device *dev, float *d_a, size_t n, x3_err *err);
/* device_cuda_matrix.c */
x3_status x3_cuda_op_transpose_pad(x3_device *dev, const float *d_w, size_t n_out, size_t n_in, float *d_out, size_t n_out_padded,
                                   size_t n_in_padded, x3_err *err);
x3_status x3_cuda_op_scale_rows(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, const float *d_s, x3_err *err);
x3_status x3_cuda_op_scale_cols(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, const float *d_s, x3_err *err);
x3_status x3_cuda_op_row_dots(x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_out,
                              x3_err *err);
x3_status x3_cuda_op_col_dots(x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_out,
                              x3_err *err);
x3_status x3_cuda_op_multiply(x3_device *dev, float *d_x, const float *d_y, size_t n, x3_err *err);
x3_status x3_cuda_op_scale(x3_device *dev, float *d_x, size_t n, float alpha, x3_err *err);
x3_status x3_cuda_op_add_diagonal(x3_device *dev, float *d_a, size_t n, const float *d_d, x3_err *err);
x3_status x3_cuda_op_axpy(x3_device *dev, float alpha, const float *d_x, float *d_y, size_t n, x3_err *err);
x3_status x3_cuda_op_hadamard_rows(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, x3_err *err);
x3_status x3_cuda_op_hadamard_cols(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, x3_err *err);
x3_status x3_cuda_op_ldlq(x3_device *dev, const float *d_l, size_t n_in, const x3_ldlq_job *jobs, size_t n_jobs, x3_err *err);
x3_status x3_cuda_op_decode(x3_device *dev, const x3_weight *w, float *d_out, x3_err *err);

/* device_cuda_moe.c */
x3_status x3_cuda_op_sigmoid_scale(x3_device *dev, float *d_x, const float *d_gate, size_t n_rows, size_t n, x3_err *err);
x3_status x3_cuda_op_route(x3_device *dev, const x3_route_rule *rule, const float *d_logits, const float *d_correction,
                           size_t n_rows, int32_t *d_ids, float *d_weights, x3_err *err);
x3_status x3_cuda_op_group_rows(x3_device *dev, const int32_t *d_ids, size_t n_rows, size_t n_chosen, size_t n_experts,
                                int32_t *d_first, int32_t *d_rows, int32_t *d_slots, x3_err *err);
x3_status x3_cuda_op_gather_rows(x3_device *dev, const float *d_x, const int32_t *d_rows, size_t n_rows, size_t n, float *d_out,
                                 x3_err *err);
x3_status x3_cuda_op_expert_linear(x3_device *dev, const x3_expert_args *args, x3_err *err);
x3_status x3_cuda_op_combine_rows(x3_device *dev, const float *d_y, const int32_t *d_slots, const float *d_weights, size_t n_rows,
                                  size_t n_chosen, size_t n, bool add, float *d_out, x3_err *err);
/* device_cuda_steps.c */
x3_status x3_cuda_op_host_alloc(x3_device *dev, void **out, size_t n_bytes, x3_err *err);
void x3_cuda_op_host_free(x3_device *dev, void *p);
x3_status x3_cuda_op_embed(x3_device *dev, const x3_weight *w, const int32_t *d_ids, size_t n_rows, float *d_out, x3_err *err);
x3_status x3_cuda_op_argmax(x3_device *dev, const float *d_x, size_t n_rows, size_t n, int32_t *d_ids, x3_err *err);
x3_status x3_cuda_op_add_norm(x3_device *dev, float *d_x, const float *d_y, size_t n_rows, size_t n, const float *d_weight,
                              float eps, float *d_out, x3_err *err);
x3_status x3_cuda_op_describe(x3_device *dev, const x3_batch *batch, uint64_t *shape, x3_err *err);
x3_status x3_cuda_op_record_begin(x3_device *dev, x3_err *err);
x3_status x3_cuda_op_record_end(x3_device *dev, x3_recording **out, x3_err *err);
uint64_t x3_cuda_op_generation(const x3_device *dev);
x3_status x3_cuda_op_repeat(x3_device *dev, const x3_recording *r, x3_err *err);
void x3_cuda_op_record_free(x3_device *dev, x3_recording *r);
/* device_cuda_mixers.c */
x3_status x3_cuda_op_copy_heads(x3_device *dev, float *d_to, size_t ld_to, size_t stride_to, const float *d_from, size_t ld_from,
                                size_t stride_from, size_t n_rows, size_t n_heads, size_t n_cols, x3_err *err);
x3_status x3_cuda_op_layer_norm(x3_device *dev, float *d_x, size_t n_rows, size_t n, const float *d_weight, const float *d_bias,
                                float eps, x3_err *err);
x3_status x3_cuda_op_sigmoid_mul(x3_device *dev, float *d_x, const float *d_gate, size_t n, x3_err *err);
x3_status x3_cuda_op_linear_heads(x3_device *dev, const x3_heads_args *args, x3_err *err);
x3_status x3_cuda_op_select(x3_device *dev, const x3_select_args *args, const x3_batch *batch, x3_err *err);
x3_status x3_cuda_op_conv_silu(x3_device *dev, const x3_conv_args *args, const x3_batch *batch, x3_err *err);
x3_status x3_cuda_op_delta_rule(x3_device *dev, const x3_delta_args *args, const x3_batch *batch, x3_err *err);

/* cuda_libraries.c: loads cuBLAS and cuSOLVER; without them X3_ERR_DEVICE that names the file. Every function of theirs
 * that we call is defined there and forwards, so that a program starts on machines that lack them. */
x3_status x3_cuda_libraries_load(x3_err *err) X3_MUST;

#endif
