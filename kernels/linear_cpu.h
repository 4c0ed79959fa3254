/* Building blocks of the CPU device: one work item each, single-threaded, over a kernel table. Sums over inputs run
 * from first to last, so the results do not depend on how rows and outputs are cut into items. */
#ifndef X3_LINEAR_CPU_H
#define X3_LINEAR_CPU_H

#include "kernels/kernels.h"
#include "kernels/kv_cpu.h"

#define X3_LINEAR_ROWS 512 /* rows and outputs of an item */
#define X3_LINEAR_COLS 128
#define X3_LINEAR_DEPTH 256 /* inputs decoded at a time */

/* Floats of scratch that an item of either function needs. */
#define X3_LINEAR_SCRATCH (X3_LINEAR_DEPTH * X3_LINEAR_COLS + X3_LINEAR_ROWS * X3_LINEAR_COLS)

/* y[r][first_out ..) = x[r] W^T + bias for at most X3_LINEAR_ROWS rows and X3_LINEAR_COLS outputs. */
typedef struct x3_dense_item {
    const void *weight; /* [n_out][n_in] */
    x3_dense_type type;
    size_t n_out, n_in, first_out;
    const float *bias;
    bool reverse; /* blocks of X3_LINEAR_DEPTH inputs from last to first */
    const float *x;
    size_t ldx, n_rows;
    float *y;
    size_t ldy;
} x3_dense_item;

void x3_dense_linear_cpu(const x3_kernels *k, const x3_dense_item *item, float *scratch);

/* Outputs [first_out, first_out + 128) of an EXL3 group. x is (input * suh) Hadamard, [n_rows][n_in_padded]. */
typedef struct x3_exl3_item {
    const uint32_t *words;
    const float *values; /* of the codebook; NULL: mul1, computed */
    int K;
    size_t n_in_padded, n_out_padded, n_out, first_out;
    const float *svh;  /* [n_out_padded] */
    const float *bias; /* [n_out] or NULL */
    bool reverse;      /* as above */
    const float *x;
    size_t n_rows;
    float *y;
    size_t ldy;
} x3_exl3_item;

static inline void x3_tile_decode_cpu(const x3_kernels *k, const uint32_t *words, int K, const float *values, float *out)
{
    if (values == NULL)
        k->tile_decode_mul1(words, K, out);
    else
        k->tile_decode(words, K, values, out);
}

void x3_exl3_linear_cpu(const x3_kernels *k, const x3_exl3_item *item, float *scratch);

/* out[r] = (x[r] * suh) Hadamard for n_rows rows; x has n_in columns, out n_in_padded. */
void x3_exl3_input_cpu(const x3_kernels *k, const float *x, size_t ldx, size_t n_rows, size_t n_in, size_t n_in_padded,
                       const float *suh, float *out);

/* Attention of some query rows of one sequence that share a KV head. */
typedef struct x3_attention_item {
    size_t n_rows;     /* at most X3_ATTENTION_ROWS; row r is position first_position + r / n_repeat */
    size_t n_repeat;   /* query heads, all of one KV head */
    size_t first_position;
    const float *q;    /* of row 0; the row of position p and repeat i is at p * ldq + i * k_dim */
    size_t ldq;
    float *out;        /* likewise with v_dim */
    size_t ldo;
    size_t k_dim, v_dim;
    const float *keys, *values; /* page 0 of this KV head; pages are *_page floats apart; values NULL: first of the keys */
    size_t keys_page, values_page;
    x3_kv_type type; /* other than X3_KV_F32: blocks of kv_types.h instead, pages *_page bytes apart */
    const char *packed_keys, *packed_values;
    const int32_t *pages;
    float scale;
    size_t window;
    const float *sinks; /* [n_repeat] or NULL */
} x3_attention_item;

#define X3_ATTENTION_ROWS 24

/* Floats of scratch for sequences of n_positions. */
size_t x3_attention_scratch(size_t n_positions, size_t k_dim, size_t v_dim);
void x3_attention_cpu(const x3_kernels *k, const x3_attention_item *item, float *scratch);

/* Strip [first, first + n) of outputs of an LDLQ job, all rows of tiles. n is a multiple of 16, at most 32. */
typedef struct x3_ldlq_item {
    const x3_trellis *trellis;
    const float *l; /* [n_in][n_in] or NULL */
    size_t n_in, n_out, first, n;
    const float *w;  /* [n_in][n_out] */
    float *q;        /* [n_in][n_out] */
    uint32_t *words; /* [n_in / 16][n_out / 16][8 K] or NULL */
} x3_ldlq_item;

#define X3_LDLQ_COLS 32

size_t x3_ldlq_scratch_bytes(size_t n_in, int K);
void x3_ldlq_cpu(const x3_kernels *k, const x3_ldlq_item *item, void *scratch);

#endif
