/* Work items of the CPU device for mixers other than attention over pages, single-threaded, over a kernel table. The
 * device cuts the work; neither the cut nor the number of threads changes a result. */
#ifndef X3_MIXERS_CPU_H
#define X3_MIXERS_CPU_H

#include "kernels/kernels.h"

/* Causal convolution and SiLU of at most X3_CONV_CHANNELS channels over the rows of one sequence. Products are summed
 * from the oldest row to the newest. */
typedef struct x3_conv_item {
    size_t n, kernel, n_rows;
    const float *x; /* row r at r * ld */
    float *y;
    size_t ld;
    const float *weight; /* [n][kernel] */
    bool fresh;          /* the state is not read: zeros */
    float *state;        /* [kernel - 1] rows at ld_state, the oldest first */
    size_t ld_state;
} x3_conv_item;

#define X3_CONV_CHANNELS 256

/* Floats of scratch. */
size_t x3_conv_scratch(size_t kernel);
void x3_conv_cpu(const x3_kernels *k, const x3_conv_item *item, float *scratch);

/* The gated delta rule (device.h, x3_delta_args) of one value head over the rows of one sequence. */
typedef struct x3_delta_item {
    size_t k_dim, v_dim, n_rows;
    const float *q, *k, *v; /* row r at r * ld */
    size_t ld;
    const float *b, *a;     /* row r at r * ld_ba */
    size_t ld_ba;
    float a_log, dt_bias;
    float *out;
    size_t ld_out;
    bool fresh;
    float *state; /* [k_dim][v_dim] */
} x3_delta_item;

/* Scratch: 2 * k_dim floats. */
void x3_delta_cpu(const x3_kernels *k, const x3_delta_item *item, float *scratch);

/* One head of a linear: y[r] = x[r] W^T with W rows [first, first + n) of a dense weight, or y[r] = x[r] W. */
typedef struct x3_head_item {
    const void *weight; /* [..][n_in] */
    x3_dense_type type;
    size_t n_in, first, n;
    bool transposed; /* x W */
    const float *x;
    size_t ldx, n_rows;
    float *y;
    size_t ldy;
} x3_head_item;

/* Floats of scratch for at most X3_LINEAR_ROWS rows and n up to n_most. */
size_t x3_head_scratch(size_t n_most);
void x3_head_linear_cpu(const x3_kernels *k, const x3_head_item *item, float *scratch);

/* The positions that one row selects: device.h, x3_select_args. */
typedef struct x3_select_item {
    const float *q;       /* [n_heads][dim] */
    const float *weights; /* [n_heads] */
    size_t n_heads, dim, n_positions, n_selected; /* n_positions > n_selected */
    const float *keys;    /* [page][4][dim][16] */
    const int32_t *pages;
    int32_t *selected;
} x3_select_item;

/* Floats of scratch. */
size_t x3_select_scratch(size_t n_heads, size_t n_positions, size_t n_selected);
void x3_select_cpu(const x3_kernels *k, const x3_select_item *item, float *scratch);

/* Attention of one row over listed positions, all heads of one KV head. */
typedef struct x3_sparse_item {
    size_t n_heads, k_dim, v_dim;
    const float *q; /* [n_heads][k_dim] */
    float *out;     /* [n_heads][v_dim] */
    const float *keys, *values; /* as in x3_attention_item; values NULL: the first v_dim of the keys */
    size_t keys_page, values_page;
    const int32_t *pages;
    const int32_t *selected; /* ascending */
    size_t n_selected;
    float scale;
} x3_sparse_item;

size_t x3_sparse_scratch(size_t n_heads, size_t k_dim, size_t v_dim, size_t n_selected);
void x3_sparse_attention_cpu(const x3_kernels *k, const x3_sparse_item *item, float *scratch);

#endif
