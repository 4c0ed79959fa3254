/* The CPU device's own state, shared by its files. */
#ifndef X3_DEVICE_CPU_H
#define X3_DEVICE_CPU_H

#include "kernels/kernels.h"
#include "kernels/parallel.h"
#include "runtime/device/device.h"

typedef struct x3_device_cpu {
    x3_device base;
    x3_pool *pool;
    const x3_kernels *k;
    float *values[3];                            /* of the codebooks, made when first needed */
    x3_trellis *trellis[3][X3_K_MAX + 1];        /* likewise */
    struct scratch {
        void *p;
        size_t n_bytes;
    } *thread_scratch;                           /* one a thread */
    struct scratch shared;                       /* inputs after the Hadamard transform */
} x3_device_cpu;

static inline x3_device_cpu *x3_cpu(x3_device *dev)
{
    return (x3_device_cpu *)dev;
}

/* Grows every thread's scratch to n_bytes; contents are lost. */
x3_status x3_cpu_reserve(x3_device_cpu *cpu, size_t n_bytes, x3_err *err) X3_MUST;
/* The same for one piece of scratch. */
x3_status x3_cpu_grow(struct scratch *s, size_t n_bytes, x3_err *err) X3_MUST;
/* The codebook's table; NULL for mul1, which is computed (x3_tile_decode_cpu). */
x3_status x3_cpu_values(x3_device_cpu *cpu, x3_codebook codebook, const float **out, x3_err *err) X3_MUST;
x3_status x3_cpu_trellis(x3_device_cpu *cpu, x3_codebook codebook, int K, const x3_trellis **out, x3_err *err) X3_MUST;

/* Without a selection: device_cpu.c. */
x3_status x3_cpu_dense_attention(x3_device *dev, const x3_attention_args *args, const x3_batch *batch, x3_err *err) X3_MUST;

/* Operations of the table, by file: device_cpu_mixers.c. */
x3_status x3_cpu_copy_heads(x3_device *dev, float *to, size_t ld_to, size_t stride_to, const float *from, size_t ld_from,
                            size_t stride_from, size_t n_rows, size_t n_heads, size_t n_cols, x3_err *err);
x3_status x3_cpu_layer_norm(x3_device *dev, float *x, size_t n_rows, size_t n, const float *weight, const float *bias,
                            float eps, x3_err *err);
x3_status x3_cpu_sigmoid_mul(x3_device *dev, float *x, const float *gate, size_t n, x3_err *err);
x3_status x3_cpu_linear_heads(x3_device *dev, const x3_heads_args *args, x3_err *err);
x3_status x3_cpu_select(x3_device *dev, const x3_select_args *args, const x3_batch *batch, x3_err *err);
x3_status x3_cpu_attention(x3_device *dev, const x3_attention_args *args, const x3_batch *batch, x3_err *err);
x3_status x3_cpu_conv_silu(x3_device *dev, const x3_conv_args *args, const x3_batch *batch, x3_err *err);
x3_status x3_cpu_delta_rule(x3_device *dev, const x3_delta_args *args, const x3_batch *batch, x3_err *err);
/* device_cpu_linear.c */
x3_status x3_cpu_linear(x3_device *dev, const x3_weight *w, const float *x, size_t ldx, size_t n_rows, float *y, size_t ldy,
                        x3_err *err);
x3_status x3_cpu_expert_linear(x3_device *dev, const x3_expert_args *args, x3_err *err);
/* device_cpu_moe.c */
x3_status x3_cpu_sigmoid_scale(x3_device *dev, float *x, const float *gate, size_t n_rows, size_t n, x3_err *err);
x3_status x3_cpu_route(x3_device *dev, const x3_route_rule *rule, const float *logits, const float *correction,
                       size_t n_rows, int32_t *ids, float *weights, x3_err *err);
x3_status x3_cpu_group_rows(x3_device *dev, const int32_t *ids, size_t n_rows, size_t n_chosen, size_t n_experts,
                            int32_t *first, int32_t *rows, int32_t *slots, x3_err *err);
x3_status x3_cpu_gather_rows(x3_device *dev, const float *x, const int32_t *rows, size_t n_rows, size_t n, float *out,
                             x3_err *err);
x3_status x3_cpu_combine_rows(x3_device *dev, const float *y, const int32_t *slots, const float *weights, size_t n_rows,
                              size_t n_chosen, size_t n, bool add, float *out, x3_err *err);
/* device_cpu_algebra.c */
x3_status x3_cpu_gram(x3_device *dev, const float *x, const float *y, size_t n_rows, size_t n, float *a, x3_err *err);
x3_status x3_cpu_gemm(x3_device *dev, bool ta, bool tb, size_t m, size_t n, size_t k, float alpha, const float *a,
                      size_t lda, const float *b, size_t ldb, float beta, float *c, size_t ldc, x3_err *err);
x3_status x3_cpu_mirror(x3_device *dev, float *a, size_t n, x3_err *err);
x3_status x3_cpu_spd_solve(x3_device *dev, const float *a, size_t n, float *b, size_t m, x3_err *err);
x3_status x3_cpu_block_ldl(x3_device *dev, float *a, size_t n, x3_err *err);
/* device_cpu_matrix.c */
x3_status x3_cpu_dense_floats(x3_device *dev, const x3_weight *w, float *out, x3_err *err);
x3_status x3_cpu_transpose_pad(x3_device *dev, const float *w, size_t n_out, size_t n_in, float *out,
                               size_t n_out_padded, size_t n_in_padded, x3_err *err);
x3_status x3_cpu_scale_rows(x3_device *dev, float *x, size_t n_rows, size_t n_cols, const float *s, x3_err *err);
x3_status x3_cpu_scale_cols(x3_device *dev, float *x, size_t n_rows, size_t n_cols, const float *s, x3_err *err);
x3_status x3_cpu_row_dots(x3_device *dev, const float *x, const float *y, size_t n_rows, size_t n_cols, double *out,
                          x3_err *err);
x3_status x3_cpu_col_dots(x3_device *dev, const float *x, const float *y, size_t n_rows, size_t n_cols, double *out,
                          x3_err *err);
x3_status x3_cpu_multiply(x3_device *dev, float *x, const float *y, size_t n, x3_err *err);
x3_status x3_cpu_scale(x3_device *dev, float *x, size_t n, float alpha, x3_err *err);
x3_status x3_cpu_add_diagonal(x3_device *dev, float *a, size_t n, const float *d, x3_err *err);
x3_status x3_cpu_axpy(x3_device *dev, float alpha, const float *x, float *y, size_t n, x3_err *err);
x3_status x3_cpu_hadamard_rows(x3_device *dev, float *x, size_t n_rows, size_t n_cols, x3_err *err);
x3_status x3_cpu_hadamard_cols(x3_device *dev, float *x, size_t n_rows, size_t n_cols, x3_err *err);
x3_status x3_cpu_ldlq(x3_device *dev, const float *l, size_t n_in, const x3_ldlq_job *jobs, size_t n_jobs, x3_err *err);
x3_status x3_cpu_decode(x3_device *dev, const x3_weight *w, float *out, x3_err *err);

#endif
