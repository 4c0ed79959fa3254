/* A device: memory and one table of operations, filled by the CPU or by CUDA. Layers, calibration and quantization are
 * written once over this table; they do not know which device they run on.
 *
 * Matrices are float32, row-major, in device memory; `ld` is a row's distance in floats. Operations are ordered as
 * called and may return before they are done; download and sync wait. A function that can fail returns x3_status;
 * after a failure the contents of its outputs are undefined.
 * Results do not depend on the number of threads. On the CPU a row of linear, rms_norm, rope, attention and
 * silu_mul does not depend on the other rows of the call.
 * Threads: a device belongs to one host thread. */
#ifndef X3_DEVICE_H
#define X3_DEVICE_H

#include "formats/base.h"
#include "kernels/codebook.h"
#include "kernels/kv_types.h"
#include "kernels/route.h"
#include "kernels/score.h"

typedef struct x3_device x3_device;

typedef enum x3_weight_kind { X3_WEIGHT_NONE, X3_WEIGHT_F32, X3_WEIGHT_BF16, X3_WEIGHT_F16, X3_WEIGHT_EXL3 } x3_weight_kind;

/* The weight of a linear layer in device memory. Dense: data [n_out][n_in]. EXL3: data is the trellis,
 * [n_in_padded / 16][n_out_padded / 16][8 * K] words of 32 bits. */
typedef struct x3_weight {
    x3_weight_kind kind;
    size_t n_in, n_out;               /* as the model sees them */
    size_t n_in_padded, n_out_padded; /* multiples of 128 for EXL3, else as above */
    int K;
    x3_codebook codebook;
    const void *data;
    bool borrowed;             /* data belongs to a mapping of the checkpoint, which outlives the weight */
    const uint16_t *suh, *svh; /* float16, [n_in_padded] and [n_out_padded] */
    const float *bias;         /* [n_out] or NULL */
} x3_weight;

/* One sequence of a batch: rows [first_row, first_row + n_rows) are its positions position, position + 1, ...;
 * pages[i] is the cache page of its positions [64 * i, 64 * i + 64), slot its recurrent state in layers that have one. */
typedef struct x3_sequence {
    size_t first_row, n_rows, position;
    const int32_t *pages;
    size_t slot;
} x3_sequence;

typedef struct x3_batch {
    size_t n_rows, n_sequences;
    const x3_sequence *sequences; /* host */
    const int32_t *d_positions;   /* device, [n_rows] */
    /* device, [n_rows][x3_model_selected()]: what the last layer with an indexer selected, for the layers that share it;
     * it must be there again when those run on the same rows. NULL where the model hands on nothing. */
    int32_t *d_selected;
} x3_batch;

/* The cache of one layer: what its kind needs of the following, the rest zero.
 * Keys and values: a page holds, for each KV head, its keys as 4 panels [k_dim][16 positions] and its values as
 * [64][v_dim]. A latent cache has no values: they are the first v_dim dimensions of the keys.
 * In a type other than X3_KV_F32 both are blocks of kv_types.h instead; latent caches, index keys and states are float32.
 * Index keys: of a sparse indexer, one head.
 * States: a recurrent state a slot, of the sequence that owns the slot. */
typedef struct x3_kv_layer {
    size_t n_kv_heads, k_dim, v_dim;
    float *d_keys;       /* [page][n_kv_heads][4][k_dim][16] */
    float *d_values;     /* [page][n_kv_heads][64][v_dim], NULL in a latent cache */
    x3_kv_type type;
    void *d_packed_keys, *d_packed_values; /* [page][n_kv_heads] blocks of k_dim and v_dim; NULL for X3_KV_F32 */
    size_t index_dim;
    float *d_index_keys; /* [page][4][index_dim][16] */
    size_t n_slots, state_floats;
    float *d_states;     /* [n_slots][state_floats] */
    size_t *slot_positions; /* host, [n_slots]: positions that a state has seen */
} x3_kv_layer;

typedef struct x3_attention_args {
    const float *d_q; /* [n_rows][n_heads * k_dim] */
    float *d_out;     /* [n_rows][n_heads * v_dim] */
    size_t n_heads;   /* a multiple of kv->n_kv_heads; head h reads KV head h / (n_heads / n_kv_heads) */
    const x3_kv_layer *kv;
    float scale;
    size_t window;       /* 0: all earlier positions; else position p sees p - window + 1 .. p */
    const float *d_sinks; /* [n_heads]: one more logit in the softmax, without a value; or NULL */
    /* [n_rows][n_selected] or NULL. A row at position p > n_selected - 1 sees the positions listed, ascending, and no
     * others; an earlier row sees all of its own. One KV head only, no window, no sinks. */
    const int32_t *d_selected;
    size_t n_selected;
} x3_attention_args;

/* Selection of the positions that a row sees: the n_selected largest of
 *   score(t) = sum over heads h of weights[row][h] * max(0, q[row][h] . key[t]),  t <= position,
 * of equal ones the earlier. */
typedef struct x3_select_args {
    const float *d_q;       /* [n_rows][n_heads * kv->index_dim] */
    const float *d_weights; /* [n_rows][n_heads] */
    size_t n_heads, n_selected;
    const x3_kv_layer *kv;  /* its index keys, those of the batch's rows already there */
    int32_t *d_selected; /* [n_rows][n_selected], ascending; undefined for rows at positions below n_selected */
} x3_select_args;

/* One dense linear a head: y[r][h] = x[r][h] W_h^T, or x[r][h] W_h, where W_h is rows [first + h * stride, + n) of w. */
typedef struct x3_heads_args {
    const x3_weight *w; /* dense */
    size_t n_heads, first, stride, n;
    bool transposed;    /* x W_h: x has n columns a head, y has w->n_in; else the other way round */
    const float *d_x;   /* head h of row r at r * ldx + h * x_stride */
    size_t ldx, x_stride, n_rows;
    float *d_y;
    size_t ldy, y_stride;
} x3_heads_args;

/* Causal depthwise convolution and SiLU: out[r][c] = silu(sum over j of weight[c][j] * x[r - kernel + 1 + j][c]). Rows
 * before the batch come from the sequence's state, which is brought up to date; before position 0 they are zero. */
typedef struct x3_conv_args {
    const float *d_x; /* [n_rows][n] */
    float *d_out;     /* [n_rows][n], not d_x */
    size_t n, kernel;
    const float *d_weight; /* [n][kernel] */
    float *d_state;        /* slot s at s * state_stride: [kernel - 1][n], the oldest row first */
    size_t state_stride;
} x3_conv_args;

/* Gated delta rule (Yang et al., 2024, eq. 10), position after position, for each value head with state S [k_dim][v_dim]:
 *   q, k = q / |q| / sqrt(k_dim), k / |k| (squares summed, plus 1e-6)
 *   S = exp(-exp(a_log) * softplus(a + dt_bias)) S;  S += k (sigmoid(b) (v - S^T k))^T;  out = S^T q
 * States as in x3_conv_args. */
typedef struct x3_delta_args {
    size_t n_k_heads, n_v_heads, k_dim, v_dim;
    const float *d_qkv; /* [n_rows][q n_k_heads * k_dim, k likewise, v n_v_heads * v_dim] */
    const float *d_b, *d_a; /* [n_rows][n_v_heads] */
    const float *d_a_log, *d_dt_bias; /* [n_v_heads] */
    float *d_out;       /* [n_rows][n_v_heads * v_dim] */
    float *d_state;     /* slot s at s * state_stride: [n_v_heads][k_dim][v_dim] */
    size_t state_stride;
} x3_delta_args;

typedef struct x3_rope_args {
    float *d_x; /* [n_rows][ld], heads at first, first + head_stride, ... */
    size_t ld, first, head_stride, n_heads;
    size_t n_rotated;         /* even; pairs (i, i + n_rotated / 2), or (2 i, 2 i + 1) when interleaved */
    bool interleaved;
    const float *d_cos_sin; /* [position][2][n_rotated / 2] */
} x3_rope_args;

/* A linear of every expert at once. Rows of the input go to experts in slots: those of expert e are
 * [first[e], first[e + 1]). */
typedef struct x3_expert_args {
    const x3_weight *weights; /* host; expert e's is weights[e * stride]. They have one shape, any kind and K */
    size_t n_experts, stride;
    const int32_t *d_first; /* device, [n_experts + 1] */
    const int32_t *d_rows;  /* device, [slots]: the row of x of every slot; NULL: slot s reads row s */
    size_t n_slots;         /* at most d_first[n_experts] */
    const float *d_x;
    size_t ldx;
    float *d_y; /* row s is slot s */
    size_t ldy;
} x3_expert_args;

/* Operations that were recorded; belongs to the device. */
typedef struct x3_recording x3_recording;

/* One matrix of several that are encoded against the same L. */
typedef struct x3_ldlq_job {
    x3_codebook codebook;
    int K;
    size_t n_out;
    const float *d_w;  /* [n_in][n_out], in units of the codebook */
    float *d_q;        /* [n_in][n_out]: the decoded codes */
    uint32_t *d_words; /* [n_in / 16][n_out / 16][8 * K], or NULL */
} x3_ldlq_job;

/* What a device spends its time on. */
typedef enum x3_work {
    X3_WORK_TRANSFER,  /* uploads, downloads, copies */
    X3_WORK_LINEAR,
    X3_WORK_ATTENTION,
    X3_WORK_ROWS,      /* norms, rope, activations, sums */
    X3_WORK_MOMENTS,   /* gram, checks for values that are not finite */
    X3_WORK_PRODUCT,   /* gemm */
    X3_WORK_FACTOR,    /* spd_solve, block_ldl */
    X3_WORK_MATRIX,    /* element-wise, transposes, Hadamard, sums */
    X3_WORK_ENCODE,    /* ldlq */
    X3_WORK_SCORE,
    X3_N_WORKS
} x3_work;

const char *x3_work_name(x3_work work);

typedef struct x3_device_ops {
    void (*destroy)(x3_device *dev);

    /* Device memory that the operations need for themselves, at most, on linears that share an input of n_in numbers and
     * have n_out outputs together, with n_rows rows at a time. NULL: little. */
    uint64_t (*own_bytes)(const x3_device *dev, size_t n_in, size_t n_out, size_t n_rows);

    /* The same for linears of a step alone. */
    uint64_t (*step_bytes)(const x3_device *dev, size_t n_in, size_t n_out, size_t n_rows);

    /* ---- memory ---- */
    x3_status (*alloc)(x3_device *dev, void **out, size_t n_bytes, x3_err *err); /* zeroed */
    void (*free)(x3_device *dev, void *p);
    x3_status (*upload)(x3_device *dev, void *d_to, const void *from, size_t n_bytes, x3_err *err);
    x3_status (*download)(x3_device *dev, void *to, const void *d_from, size_t n_bytes, x3_err *err);
    x3_status (*copy)(x3_device *dev, void *d_to, const void *d_from, size_t n_bytes, x3_err *err);
    /* n_rows pieces of n_cols floats. */
    x3_status (*copy_2d)(x3_device *dev, float *d_to, size_t ld_to, const float *d_from, size_t ld_from, size_t n_rows,
                         size_t n_cols, x3_err *err);
    /* n_heads pieces of n_cols floats in each of n_rows rows. */
    x3_status (*copy_heads)(x3_device *dev, float *d_to, size_t ld_to, size_t stride_to, const float *d_from,
                            size_t ld_from, size_t stride_from, size_t n_rows, size_t n_heads, size_t n_cols,
                            x3_err *err);
    x3_status (*zero)(x3_device *dev, void *d_to, size_t n_bytes, x3_err *err);
    x3_status (*sync)(x3_device *dev, x3_err *err);

    /* ---- forward ---- */
    /* y[r] = x[r] W^T + bias, W the effective weight. x [n_rows][n_in], y [n_rows][n_out]. */
    x3_status (*linear)(x3_device *dev, const x3_weight *w, const float *d_x, size_t ldx, size_t n_rows, float *d_y,
                        size_t ldy, x3_err *err);
    /* The same for n linears of one input, d_y[i] [n_rows][w[i].n_out] without gaps; a device may make one product of them. NULL: linear,
     * one after the other. */
    x3_status (*linears)(x3_device *dev, const x3_weight *const *w, size_t n, const float *d_x, size_t ldx, size_t n_rows,
                         float *const *d_y, x3_err *err);
    /* y = linear of silu(gate) * up; gate may be overwritten. NULL: silu_mul, then linear. */
    x3_status (*linear_gated)(x3_device *dev, const x3_weight *w, float *d_gate, const float *d_up, size_t n_rows, float *d_y, x3_err *err);
    /* Rows of n floats; kernels.h. out may be x with the same ld. */
    x3_status (*rms_norm)(x3_device *dev, const float *d_x, size_t ldx, size_t n_rows, size_t n, const float *d_weight,
                          float eps, float *d_out, size_t ldo, x3_err *err);
    x3_status (*rope)(x3_device *dev, const x3_rope_args *args, const x3_batch *batch, x3_err *err);
    /* Writes keys [n_rows][n_kv_heads * k_dim] and values of the batch's rows into the cache. A cache without d_values
     * takes no values. */
    x3_status (*kv_append)(x3_device *dev, const x3_kv_layer *kv, const x3_batch *batch, const float *d_k, size_t ldk,
                           const float *d_v, size_t ldv, x3_err *err);
    /* rope of q and of k, then kv_append of k and v: the bits of the three. NULL: these. */
    x3_status (*rope_append)(x3_device *dev, const x3_rope_args *q, const x3_rope_args *k, const x3_kv_layer *kv, const x3_batch *batch,
                             const float *d_v, size_t ldv, x3_err *err);
    /* Causal attention over the cache, rows of the batch already appended. */
    x3_status (*attention)(x3_device *dev, const x3_attention_args *args, const x3_batch *batch, x3_err *err);
    /* out[i] = silu(gate[i]) * up[i] */
    x3_status (*silu_mul)(x3_device *dev, const float *d_gate, const float *d_up, size_t n, float *d_out, x3_err *err);
    /* Rows of n floats: (x - mean) / sqrt(variance + eps) * weight + bias, in place. */
    x3_status (*layer_norm)(x3_device *dev, float *d_x, size_t n_rows, size_t n, const float *d_weight,
                            const float *d_bias, float eps, x3_err *err);
    /* x[i] *= 1 / (1 + exp(-gate[i])) */
    x3_status (*sigmoid_mul)(x3_device *dev, float *d_x, const float *d_gate, size_t n, x3_err *err);
    x3_status (*linear_heads)(x3_device *dev, const x3_heads_args *args, x3_err *err);
    x3_status (*select)(x3_device *dev, const x3_select_args *args, const x3_batch *batch, x3_err *err);
    x3_status (*conv_silu)(x3_device *dev, const x3_conv_args *args, const x3_batch *batch, x3_err *err);
    x3_status (*delta_rule)(x3_device *dev, const x3_delta_args *args, const x3_batch *batch, x3_err *err);
    /* x[r][i] *= 1 / (1 + exp(-gate[r])), x [n_rows][n] without gaps */
    x3_status (*sigmoid_scale)(x3_device *dev, float *d_x, const float *d_gate, size_t n_rows, size_t n, x3_err *err);

    /* ---- mixture of experts; a row's results do not depend on the other rows ---- */
    /* logits [n_rows][n_experts], correction [n_experts] or NULL, ids and weights [n_rows][n_chosen]: route.h. */
    x3_status (*route)(x3_device *dev, const x3_route_rule *rule, const float *d_logits, const float *d_correction,
                       size_t n_rows, int32_t *d_ids, float *d_weights, x3_err *err);
    /* Slots by expert, and inside an expert by row: first [n_experts + 1], rows [n_rows * n_chosen] the row of a slot,
     * slots [n_rows][n_chosen] the slot of a choice. */
    x3_status (*group_rows)(x3_device *dev, const int32_t *d_ids, size_t n_rows, size_t n_chosen, size_t n_experts,
                            int32_t *d_first, int32_t *d_rows, int32_t *d_slots, x3_err *err);
    /* out[i] = x[rows[i]], n floats each, without gaps. */
    x3_status (*gather_rows)(x3_device *dev, const float *d_x, const int32_t *d_rows, size_t n_rows, size_t n, float *d_out,
                             x3_err *err);
    x3_status (*expert_linear)(x3_device *dev, const x3_expert_args *args, x3_err *err);
    /* out[r] = (add ? out[r] : 0) + weights[r][0] * y[slots[r][0]] + weights[r][1] * y[slots[r][1]] + ..., in this order. */
    x3_status (*combine_rows)(x3_device *dev, const float *d_y, const int32_t *d_slots, const float *d_weights, size_t n_rows,
                              size_t n_chosen, size_t n, bool add, float *d_out, x3_err *err);
    /* x[i] += y[i] */
    x3_status (*add)(x3_device *dev, float *d_x, const float *d_y, size_t n, x3_err *err);

    /* ---- steps of a server; NULL where a device has no use for them ---- */
    /* Host memory that transfers are fast with, zeroed: x3_device_host_alloc. */
    x3_status (*host_alloc)(x3_device *dev, void **out, size_t n_bytes, x3_err *err);
    void (*host_free)(x3_device *dev, void *p);
    /* out [n_rows][n_in] = rows d_ids of a dense weight, as float32. */
    x3_status (*embed)(x3_device *dev, const x3_weight *w, const int32_t *d_ids, size_t n_rows, float *d_out, x3_err *err);
    /* ids[r]: the index of the largest of row r's n floats, of equal ones the lowest; -1: one is a NaN, or none is finite. */
    x3_status (*argmax)(x3_device *dev, const float *d_x, size_t n_rows, size_t n, int32_t *d_ids, x3_err *err);
    /* add, then rms_norm of rows without gaps, in one: x += y, out = norm of x. The bits of the two. */
    x3_status (*add_norm)(x3_device *dev, float *d_x, const float *d_y, size_t n_rows, size_t n, const float *d_weight, float eps,
                          float *d_out, x3_err *err);
    /* Tells the device about a batch before its operations, which may then be recorded. *shape: of two batches of one shape
     * all forward operations are the same but for what describe tells the device and what lies in device memory; select where
     * both have rows at positions past n_selected, or both have none. Below 2^52. 0: such a batch cannot be recorded. */
    x3_status (*describe)(x3_device *dev, const x3_batch *batch, uint64_t *shape, x3_err *err);
    /* Operations from record_begin on are kept and not done; none may wait or move data to or from the host. The same
     * operations have been done before: scratch cannot grow meanwhile. record_end after a failure too. */
    x3_status (*record_begin)(x3_device *dev, x3_err *err);
    x3_status (*record_end)(x3_device *dev, x3_recording **out, x3_err *err);
    /* Of what recordings use (scratch, what is known of experts); another number means that earlier ones cannot be repeated
     * any more. */
    uint64_t (*generation)(const x3_device *dev);
    x3_status (*repeat)(x3_device *dev, const x3_recording *r, x3_err *err);
    void (*record_free)(x3_device *dev, x3_recording *r);

    /* Compares rows of logits [n_rows][vocab] (score.h); next [n_rows] and out [n_rows] in host memory. Waits. */
    x3_status (*score)(x3_device *dev, const float *d_reference, const float *d_pack, size_t n_rows, size_t vocab,
                       const int32_t *next, x3_score_position *out, x3_err *err);

    /* ---- calibration ---- */
    /* a [n][n] += x^T y, float32 accumulation or better. x, y [n_rows][n]; when x == y only the lower triangle
     * (row >= column) need be right: see mirror. */
    x3_status (*gram)(x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n, float *d_a, x3_err *err);
    /* *finite = all n values are. Waits. */
    x3_status (*all_finite)(x3_device *dev, const float *d_x, size_t n, bool *finite, x3_err *err);
    /* *n_bad = rows of x [n_rows][n] with a value that is not finite; they, and the same rows of y (may be NULL), are
     * set to zero. Waits. */
    x3_status (*drop_nonfinite)(x3_device *dev, float *d_x, float *d_y, size_t n_rows, size_t n, size_t *n_bad, x3_err *err);

    /* ---- dense algebra ---- */
    /* c = alpha op(a) op(b) + beta c; op(a) is m x k, op(b) is k x n. */
    x3_status (*gemm)(x3_device *dev, bool ta, bool tb, size_t m, size_t n, size_t k, float alpha, const float *d_a,
                      size_t lda, const float *d_b, size_t ldb, float beta, float *d_c, size_t ldc, x3_err *err);
    /* Upper triangle := lower triangle. */
    x3_status (*mirror)(x3_device *dev, float *d_a, size_t n, x3_err *err);
    /* b [m][n] := b a^-1 for a symmetric positive definite a [n][n], which is kept. X3_ERR_NUMERIC when it is not. */
    x3_status (*spd_solve)(x3_device *dev, const float *d_a, size_t n, float *d_b, size_t m, x3_err *err);
    /* a = L D L^T with 16 x 16 blocks, L unit block lower triangular: a is replaced by L (upper part zero).
     * X3_ERR_NUMERIC when a is not positive definite. */
    x3_status (*block_ldl)(x3_device *dev, float *d_a, size_t n, x3_err *err);

    /* out [n_out][n_in] = a dense weight as float32. */
    x3_status (*dense_floats)(x3_device *dev, const x3_weight *w, float *d_out, x3_err *err);

    /* ---- element-wise and per row or column; x [n_rows][n_cols] without gaps ---- */
    /* out [n_in_padded][n_out_padded] = transpose of w [n_out][n_in], zero outside. */
    x3_status (*transpose_pad)(x3_device *dev, const float *d_w, size_t n_out, size_t n_in, float *d_out,
                               size_t n_out_padded, size_t n_in_padded, x3_err *err);
    x3_status (*scale_rows)(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, const float *d_s, x3_err *err);
    x3_status (*scale_cols)(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, const float *d_s, x3_err *err);
    /* out[row] or out[column] = sum of x * y over the other index, float64. */
    x3_status (*row_dots)(x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_out,
                          x3_err *err);
    x3_status (*col_dots)(x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_out,
                          x3_err *err);
    /* x[i] *= y[i] */
    x3_status (*multiply)(x3_device *dev, float *d_x, const float *d_y, size_t n, x3_err *err);
    /* x[i] *= alpha */
    x3_status (*scale)(x3_device *dev, float *d_x, size_t n, float alpha, x3_err *err);
    /* a[i][i] += d[i], a [n][n] */
    x3_status (*add_diagonal)(x3_device *dev, float *d_a, size_t n, const float *d_d, x3_err *err);
    /* y[i] += alpha x[i] */
    x3_status (*axpy)(x3_device *dev, float alpha, const float *d_x, float *d_y, size_t n, x3_err *err);
    /* 128-blocks along a row, or down a column. */
    x3_status (*hadamard_rows)(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, x3_err *err);
    x3_status (*hadamard_cols)(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, x3_err *err);

    /* ---- quantization ---- */
    /* Rows of tiles from last to first: target = w + sum over later rows L[later][row]^T (w - q), each 16 x 16 tile
     * encoded by the trellis search. d_l [n_in][n_in]; NULL means no feedback. */
    x3_status (*ldlq)(x3_device *dev, const float *d_l, size_t n_in, const x3_ldlq_job *jobs, size_t n_jobs, x3_err *err);
    /* out [n_in_padded][n_out_padded] = decoded codes, without suh, svh and Hadamard. */
    x3_status (*decode)(x3_device *dev, const x3_weight *w, float *d_out, x3_err *err);
} x3_device_ops;

struct x3_device {
    const x3_device_ops *ops;
    char name[96];        /* for people and receipts: "cpu avx2, 2 threads" */
    char kernel_set[96];  /* what the bytes may depend on: "cpu OpenBLAS Zen avx2" */
    size_t used_bytes, peak_bytes;
    double busy_seconds[X3_N_WORKS]; /* up to the last sync, where the device measures it (CUDA) */
    size_t capacity_bytes; /* of its own memory what may be in use at a time: what was free when it was opened, or less where a
                            * caller lowers it; 0: it uses the host's */
    /* weights may be used where the files of a checkpoint are mapped, on multiples of so many bytes (1: aligned for their
     * type); 0: they may not. x3_device_in_place */
    size_t in_place_align;
    /* linear sums over inputs in another, equally valid order: what this changes is the noise floor of a score */
    bool reverse_sums;
    /* linears give a row the same bits whatever rows come with it. Always so on the CPU; on CUDA it costs speed beyond 128
     * rows, and EXL3 linears then round their rotated inputs to float16 */
    bool row_invariant;
};

/* spec is "cpu", "cuda" or "cuda:N". n_threads is for host work; 0 means one a processor. */
x3_status x3_device_open(x3_device **out, const char *spec, int n_threads, x3_err *err) X3_MUST;
void x3_device_close(x3_device *dev);

/* in_place_align of a GPU with these properties: 16, which its kernels ask of a weight, where its memory is the host's
 * (integrated) and it reads pageable memory; else 0. A GPU with memory of its own may read pageable memory, too, but over
 * a link that is slower than a copy that is made once. */
size_t x3_device_in_place(bool integrated, bool pageable_access);

/* Typed shorthand: floats on the device. */
x3_status x3_device_floats(x3_device *dev, float **out, size_t n, x3_err *err) X3_MUST;
x3_status x3_device_alloc(x3_device *dev, void *out, size_t n_bytes, x3_err *err) X3_MUST;
void x3_device_free(x3_device *dev, void *p);

/* Host memory for transfers, zeroed; plain memory where the device has no better. */
x3_status x3_device_host_alloc(x3_device *dev, void *out, size_t n_bytes, x3_err *err) X3_MUST;
void x3_device_host_free(x3_device *dev, void *p);

/* Used by x3_device_open. */
x3_status x3_device_open_cpu(x3_device **out, int n_threads, x3_err *err) X3_MUST;
/* GPU number `index`; present in builds with CUDA (X3_CUDA). */
x3_status x3_device_open_cuda(x3_device **out, int index, x3_err *err) X3_MUST;

#endif
