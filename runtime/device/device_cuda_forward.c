/* Forward operations of the CUDA device.
 *
 * Linears, unless dev->row_invariant asks for otherwise: float32 inputs become two float16 numbers, weights float16 (exact for
 * BF16, F16 and EXL3), and the tensor cores multiply them with float32 sums: 22 bits of the inputs are kept, so the result
 * is as good as a float32 product. */
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda_mixers.h"
#include "runtime/device/device_cuda.h"

#define CHUNK_ROWS 8192 /* of a linear at a time */
#define FEW_ROWS 8      /* up to here a dense linear reads its weight once and is limited by that */

x3_status x3_cuda_multiply_f16(x3_device_cuda *cuda, const x3_cuda_product *p, x3_err *err)
{
    const float one = 1;

    /* row-major c = op(a) op(b) is column-major c' = op(b)' op(a)' */
    return x3_cuda_blas_result(cublasGemmEx(cuda->blas, p->tb ? CUBLAS_OP_T : CUBLAS_OP_N, p->ta ? CUBLAS_OP_T : CUBLAS_OP_N,
                                            (int)p->n, (int)p->m, (int)p->k, &one, p->d_b, CUDA_R_16F, (int)p->ldb, p->d_a,
                                            CUDA_R_16F, (int)p->lda, &p->beta, p->d_c, CUDA_R_32F, (int)p->ldc,
                                            CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT),
                               "product", err);
}

/* ---- linear ---- */

x3_cuda_dense_type x3_cuda_type_of(const x3_weight *w)
{
    return w->kind == X3_WEIGHT_BF16 ? X3_CUDA_DENSE_BF16 : w->kind == X3_WEIGHT_F16 ? X3_CUDA_DENSE_F16 : X3_CUDA_DENSE_F32;
}

/* The parts of one linear as float16, in scratch. */
typedef struct parts {
    bool tb;                     /* weight [n_out][ldw], else [k][ldw] */
    size_t n_out, k, ldw, ldx, ldc;
    const uint16_t *w_high, *w_low; /* w_low NULL: high alone is exact */
    uint16_t *x_high, *x_low;
    float *row_unit;
    float *d_c;
} parts;

/* c = x w over the inputs, or over their second half and then the first: an order as good as the other. */
static x3_status multiply(x3_device_cuda *cuda, const parts *t, size_t n_rows, bool reverse, x3_err *err)
{
    const uint16_t *const x[3] = {t->x_high, t->x_low, t->x_high}, *const w[3] = {t->w_high, t->w_high, t->w_low};
    const size_t half = x3_round_up(t->k / 2, 16), n_terms = t->w_low != NULL ? 3 : 2;
    x3_cuda_product p = {.tb = t->tb, .m = n_rows, .n = t->n_out, .lda = t->ldx, .ldb = t->ldw, .ldc = t->ldc, .d_c = t->d_c};
    x3_status rc = X3_OK;

    for (size_t part = reverse ? 2 : 1; part-- > 0;) {
        const size_t first = part * half;
        p.k = !reverse || part == 1 ? t->k - first : half;
        for (size_t i = 0; i < n_terms; i++) {
            const size_t term = reverse ? n_terms - 1 - i : i;
            p.d_a = x[term] + first;
            p.d_b = w[term] + (t->tb ? first : first * t->ldw);
            if (p.k > 0)
                X3_TRY(rc, out, x3_cuda_multiply_f16(cuda, &p, err));
            p.beta = 1;
        }
    }
out:
    return rc;
}

static x3_status dense_linear(x3_device_cuda *cuda, const x3_weight *w, const float *d_x, size_t ldx, size_t n_rows, float *d_y,
                              size_t ldy, x3_err *err)
{
    const size_t ld = x3_round_up(w->n_in, 8), rows = x3_min_size(n_rows, CHUNK_ROWS);
    const bool direct = w->kind == X3_WEIGHT_F16 && ld == w->n_in, both = w->kind == X3_WEIGHT_F32;
    const size_t w_bytes = direct ? 0 : w->n_out * ld * 2, x_bytes = rows * ld * 2;
    parts t = {.tb = true, .n_out = w->n_out, .k = ld, .ldw = ld, .ldx = ld, .ldc = ldy, .w_high = w->data};
    float *unit = NULL;
    size_t at = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->scratch, (both ? 2 : 1) * w_bytes + 2 * x_bytes + rows * 4 + 2048, err));
    t.x_high = x3_cuda_carve(&cuda->scratch, &at, x_bytes);
    t.x_low = x3_cuda_carve(&cuda->scratch, &at, x_bytes);
    t.row_unit = x3_cuda_carve(&cuda->scratch, &at, rows * sizeof(float));
    if (!direct) {
        uint32_t *largest = x3_cuda_carve(&cuda->scratch, &at, 4);
        uint16_t *high, *low = NULL;
        unit = x3_cuda_carve(&cuda->scratch, &at, 4);
        high = x3_cuda_carve(&cuda->scratch, &at, w_bytes);
        if (both)
            low = x3_cuda_carve(&cuda->scratch, &at, w_bytes);
        X3_TRY(rc, out, x3_cuda_split_weight(w->data, x3_cuda_type_of(w), w->n_out, w->n_in, high, low, ld, largest, unit, cuda->stream,
                                             err));
        t.w_high = high;
        t.w_low = low;
    }
    for (size_t first = 0; first < n_rows; first += rows) {
        const size_t n = x3_min_size(rows, n_rows - first);
        t.d_c = d_y + first * ldy;
        X3_TRY(rc, out, x3_cuda_split_rows(d_x + first * ldx, ldx, n, w->n_in, NULL, t.x_high, t.x_low, ld, t.row_unit,
                                           cuda->stream, err));
        X3_TRY(rc, out, multiply(cuda, &t, n, cuda->base.reverse_sums, err));
        X3_TRY(rc, out, x3_cuda_finish_rows(t.d_c, ldy, n, w->n_out, t.row_unit, unit, w->bias, cuda->stream, err));
    }
out:
    return rc;
}

static x3_cuda_group group_of(const x3_weight *w)
{
    return (x3_cuda_group){.K = w->K, .codebook = w->codebook, .n_in = w->n_in, .n_out = w->n_out, .n_in_padded = w->n_in_padded,
                           .n_out_padded = w->n_out_padded, .d_words = w->data, .d_suh = w->suh, .d_svh = w->svh,
                           .d_bias = w->bias};
}

static x3_status exl3_linear(x3_device_cuda *cuda, const x3_weight *w, const float *d_x, size_t ldx, size_t n_rows, float *d_y,
                             size_t ldy, x3_err *err)
{
    const x3_cuda_group g = group_of(w);
    const size_t in = w->n_in_padded, out_padded = w->n_out_padded, rows = x3_min_size(n_rows, CHUNK_ROWS);
    parts t = {.n_out = out_padded, .k = in, .ldw = out_padded, .ldx = in, .ldc = out_padded};
    uint16_t *wq;
    size_t at = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->scratch, in * out_padded * 2 + rows * (4 * in + 4 * out_padded + 4) + 2048, err));
    wq = x3_cuda_carve(&cuda->scratch, &at, in * out_padded * 2);
    t.x_high = x3_cuda_carve(&cuda->scratch, &at, rows * in * 2);
    t.x_low = x3_cuda_carve(&cuda->scratch, &at, rows * in * 2);
    t.d_c = x3_cuda_carve(&cuda->scratch, &at, rows * out_padded * sizeof(float));
    t.row_unit = x3_cuda_carve(&cuda->scratch, &at, rows * sizeof(float));
    t.w_high = wq;
    X3_TRY(rc, out, x3_cuda_reconstruct(&cuda->info, &g, wq, X3_CUDA_F16, cuda->stream, err));
    for (size_t first = 0; first < n_rows; first += rows) {
        const size_t n = x3_min_size(rows, n_rows - first);
        X3_TRY(rc, out, x3_cuda_split_rows(d_x + first * ldx, ldx, n, w->n_in, w->suh, t.x_high, t.x_low, in, t.row_unit,
                                           cuda->stream, err));
        X3_TRY(rc, out, multiply(cuda, &t, n, cuda->base.reverse_sums, err));
        X3_TRY(rc, out, x3_cuda_finish_rotated(t.d_c, n, out_padded, t.row_unit, w->svh, w->bias, d_y + first * ldy, ldy, w->n_out,
                                               cuda->stream, err));
    }
out:
    return rc;
}

/* From here on decoding once for all rows pays. */
#define MANY_ROWS (X3_CUDA_LINEAR_ROWS + 1)
#define MANY_ROWS_AT_ONCE 4096

/* Rows [first, first + n_rows) of an input and, for each weight, of its output. */
static void rows_of(const x3_weight *const *w, size_t n, const float *d_x, const float *d_up, size_t ldx, size_t first, size_t n_rows,
                    float *const *d_y, const size_t *ldy, x3_cuda_rows *out)
{
    for (size_t i = 0; i < n; i++) {
        const size_t ld = ldy == NULL ? w[i]->n_out : ldy[i];
        out[i] = (x3_cuda_rows){.n_rows = n_rows, .d_x = d_x + first * ldx, .x_type = X3_CUDA_F32, .ldx = ldx,
                                .d_up = d_up == NULL ? NULL : d_up + first * ldx, .d_y = d_y[i] + first * ld, .y_type = X3_CUDA_F32,
                                .ldy = ld};
    }
}

/* EXL3 weights of one K and codebook as one product; ldy NULL: without gaps. d_up: NULL, or see x3_cuda_rows. */
static x3_status invariant_product(x3_device_cuda *cuda, const x3_weight *const *w, size_t n, const float *d_x, const float *d_up,
                                   size_t ldx, size_t n_rows, float *const *d_y, const size_t *ldy, x3_err *err)
{
    const bool many = n_rows >= MANY_ROWS && x3_cuda_linear_rows_fits(&cuda->info);
    const size_t at_once = x3_min_size(n_rows, many ? MANY_ROWS_AT_ONCE : X3_CUDA_LINEAR_ROWS), before = cuda->linear.n_bytes;
    x3_cuda_group g[X3_CUDA_LINEAR_PARTS];
    x3_cuda_rows rows[X3_CUDA_LINEAR_PARTS];
    x3_status rc;

    for (size_t i = 0; i < n; i++)
        g[i] = group_of(w[i]);
    if (many) {
        X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->scratch, x3_cuda_linear_rows_bytes(g, n, at_once), err));
    } else {
        X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->linear, x3_cuda_linear_bytes(&cuda->info, g, n, at_once), err));
        if (cuda->linear.n_bytes != before) /* the clearing of new memory was queued on this stream */
            X3_TRY(rc, out, x3_cuda_result(cudaStreamSynchronize(cuda->stream), "waiting for the device", err));
    }
    for (size_t first = 0; first < n_rows; first += at_once) {
        rows_of(w, n, d_x, d_up, ldx, first, x3_min_size(at_once, n_rows - first), d_y, ldy, rows);
        if (many)
            X3_TRY(rc, out, x3_cuda_linear_rows(&cuda->info, g, rows, n, cuda->scratch.p, cuda->stream, err));
        else
            X3_TRY(rc, out, x3_cuda_linears(&cuda->info, g, rows, n, true, cuda->linear.p, cuda->stream, err));
    }
out:
    return rc;
}

static x3_status invariant_linear(x3_device_cuda *cuda, const x3_weight *w, const float *d_x, size_t ldx, size_t n_rows,
                                  float *d_y, size_t ldy, x3_err *err)
{
    if (w->kind != X3_WEIGHT_EXL3)
        return x3_cuda_dense_rows(w->data, x3_cuda_type_of(w), w->n_out, w->n_in, w->bias, d_x, ldx, n_rows, d_y, ldy, cuda->stream, err);
    return invariant_product(cuda, &w, 1, d_x, NULL, ldx, n_rows, &d_y, &ldy, err);
}

/* Weights from w[0] on that make one product with it. */
static size_t n_alike(const x3_weight *const *w, size_t n)
{
    size_t i = 1;

    while (i < n && i < X3_CUDA_LINEAR_PARTS && w[i]->kind == X3_WEIGHT_EXL3 && w[i]->K == w[0]->K && w[i]->codebook == w[0]->codebook &&
           w[i]->n_in == w[0]->n_in)
        i++;
    return w[0]->kind == X3_WEIGHT_EXL3 ? i : 1;
}

x3_status x3_cuda_op_linears(x3_device *dev, const x3_weight *const *w, size_t n, const float *d_x, size_t ldx, size_t n_rows,
                             float *const *d_y, x3_err *err)
{
    x3_status rc = X3_OK;

    for (size_t i = 0, together; i < n && rc == X3_OK; i += together) {
        together = dev->row_invariant && n_rows > 0 ? n_alike(w + i, n - i) : 1;
        if (together > 1)
            rc = invariant_product(x3_cuda(dev), w + i, together, d_x, NULL, ldx, n_rows, d_y + i, NULL, err);
        else
            rc = x3_cuda_op_linear(dev, w[i], d_x, ldx, n_rows, d_y[i], w[i]->n_out, err);
    }
    return rc;
}

uint64_t x3_cuda_linear_scratch(size_t n_in, size_t n_out, size_t n_rows)
{
    const uint64_t in = x3_round_up(n_in, 128), out = x3_round_up(n_out, 128), rows = x3_min_size(n_rows, CHUNK_ROWS);

    /* two float16 of a float32 weight, or decoded codes with the product of rotated rows */
    return 4 * in * out + rows * (4 * in + 4 * out + 4) + 4096;
}

x3_status x3_cuda_op_linear(x3_device *dev, const x3_weight *w, const float *d_x, size_t ldx, size_t n_rows, float *d_y, size_t ldy,
                            x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    const bool dense = w->kind != X3_WEIGHT_EXL3;

    if (n_rows == 0)
        return X3_OK;
    if (dev->row_invariant || (dense && n_rows <= FEW_ROWS && !dev->reverse_sums))
        return invariant_linear(cuda, w, d_x, ldx, n_rows, d_y, ldy, err);
    return dense ? dense_linear(cuda, w, d_x, ldx, n_rows, d_y, ldy, err) : exl3_linear(cuda, w, d_x, ldx, n_rows, d_y, ldy, err);
}

x3_status x3_cuda_op_linear_gated(x3_device *dev, const x3_weight *w, float *d_gate, const float *d_up, size_t n_rows, float *d_y,
                                  x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    x3_status rc;

    if (n_rows == 0)
        return X3_OK;
    if (dev->row_invariant && w->kind == X3_WEIGHT_EXL3)
        return invariant_product(cuda, &w, 1, d_gate, d_up, w->n_in, n_rows, &d_y, &w->n_out, err);
    rc = x3_cuda_silu_mul(d_gate, d_up, n_rows * w->n_in, d_gate, cuda->stream, err);
    return rc == X3_OK ? x3_cuda_op_linear(dev, w, d_gate, w->n_in, n_rows, d_y, w->n_out, err) : rc;
}

x3_status x3_cuda_op_dense_floats(x3_device *dev, const x3_weight *w, float *d_out, x3_err *err)
{
    return x3_cuda_dense_floats(w->data, x3_cuda_type_of(w), w->n_out * w->n_in, d_out, x3_cuda(dev)->stream, err);
}

/* ---- rows ---- */

x3_status x3_cuda_op_rms_norm(x3_device *dev, const float *d_x, size_t ldx, size_t n_rows, size_t n, const float *d_weight,
                              float eps, float *d_out, size_t ldo, x3_err *err)
{
    return x3_cuda_rms_norm(d_x, ldx, n_rows, n, d_weight, eps, d_out, ldo, x3_cuda(dev)->stream, err);
}

static x3_cuda_rope rope_of(const x3_rope_args *args, const x3_batch *batch)
{
    return (x3_cuda_rope){.d_x = args->d_x, .ld = args->ld, .first = args->first, .head_stride = args->head_stride,
                          .n_heads = args->n_heads, .n_rotated = args->n_rotated, .n_rows = batch->n_rows,
                          .interleaved = args->interleaved, .d_cos_sin = args->d_cos_sin, .d_positions = batch->d_positions};
}

x3_status x3_cuda_op_rope(x3_device *dev, const x3_rope_args *args, const x3_batch *batch, x3_err *err)
{
    const x3_cuda_rope r = rope_of(args, batch);

    return x3_cuda_rotate(&r, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_silu_mul(x3_device *dev, const float *d_gate, const float *d_up, size_t n, float *d_out, x3_err *err)
{
    return x3_cuda_silu_mul(d_gate, d_up, n, d_out, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_add(x3_device *dev, float *d_x, const float *d_y, size_t n, x3_err *err)
{
    return x3_cuda_add(d_x, d_y, n, x3_cuda(dev)->stream, err);
}

/* ---- attention ---- */

/* A layer without a cache of keys needs no pages. */
static size_t pages_of(const x3_sequence *s)
{
    return s->pages == NULL ? 0 : (s->position + s->n_rows + X3_KV_PAGE - 1) / X3_KV_PAGE;
}

#define SEQUENCE_WORDS (sizeof(x3_cuda_sequence) / sizeof(int32_t))

static size_t table_words(const x3_batch *batch)
{
    size_t n = batch->n_rows + SEQUENCE_WORDS * batch->n_sequences;

    for (size_t i = 0; i < batch->n_sequences; i++)
        n += pages_of(&batch->sequences[i]);
    return n;
}

/* Sequences, the sequence of every row, pages: one array of words. */
static void fill_table(int32_t *to, const x3_batch *batch)
{
    x3_cuda_sequence *sequences = (x3_cuda_sequence *)to;
    int32_t *row_sequence = to + SEQUENCE_WORDS * batch->n_sequences, *pages = row_sequence + batch->n_rows;
    size_t n_pages = 0;

    for (size_t r = 0; r < batch->n_rows; r++)
        row_sequence[r] = -1;
    for (size_t i = 0; i < batch->n_sequences; i++) {
        const x3_sequence *s = &batch->sequences[i];
        sequences[i] = (x3_cuda_sequence){(int32_t)s->first_row, (int32_t)s->n_rows, (int32_t)s->position, (int32_t)n_pages,
                                          (int32_t)s->slot};
        for (size_t r = 0; r < s->n_rows; r++)
            row_sequence[s->first_row + r] = (int32_t)i;
        if (s->pages != NULL)
            memcpy(pages + n_pages, s->pages, pages_of(s) * sizeof *pages);
        n_pages += pages_of(s);
    }
}

/* The power of two from n up, 8 at least: few sizes, few recordings. */
static size_t at_least_power(size_t n)
{
    size_t power = 8;

    while (power < n)
        power *= 2;
    return power;
}

x3_status x3_cuda_describe(x3_device_cuda *cuda, const x3_batch *batch, x3_cuda_batch *out, x3_err *err)
{
    const size_t n = table_words(batch);
    int32_t *table = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&table, n, sizeof *table, err));
    fill_table(table, batch);
    if (n != cuda->table_words || memcmp(table, cuda->table, n * sizeof *table) != 0) {
        cuda->table_words = 0;
        if (cuda->recording) {
            rc = x3_fail(err, X3_ERR_DEVICE, "CUDA: a batch that was not described is being recorded");
            goto out;
        }
        X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->d_table, at_least_power(n) * sizeof *table, err));
        /* from plain memory: what is copied has been read when the call returns */
        X3_TRY(rc, out, x3_cuda_result(cudaMemcpyAsync(cuda->d_table.p, table, n * sizeof *table, cudaMemcpyHostToDevice,
                                                       cuda->stream), "describing a batch", err));
        free(cuda->table);
        cuda->table = table;
        cuda->table_words = n;
        table = NULL;
    }
    const int32_t *d = cuda->d_table.p;
    *out = (x3_cuda_batch){.n_rows = batch->n_rows, .n_sequences = batch->n_sequences,
                           .d_sequences = (const x3_cuda_sequence *)d, .d_row_sequence = d + SEQUENCE_WORDS * batch->n_sequences,
                           .d_positions = batch->d_positions,
                           .d_pages = d + SEQUENCE_WORDS * batch->n_sequences + batch->n_rows};
    for (size_t i = 0; i < batch->n_sequences; i++) {
        out->longest = x3_max_size(out->longest, batch->sequences[i].n_rows);
        out->most_pages = x3_max_size(out->most_pages, pages_of(&batch->sequences[i]));
    }
    out->most_pages = at_least_power(out->most_pages);
out:
    free(table);
    return rc;
}

static x3_cuda_kv kv_of(const x3_kv_layer *kv)
{
    return (x3_cuda_kv){.n_kv_heads = kv->n_kv_heads, .k_dim = kv->k_dim, .v_dim = kv->v_dim, .d_keys = kv->d_keys,
                        .d_values = kv->d_values, .type = kv->type, .d_packed_keys = kv->d_packed_keys,
                        .d_packed_values = kv->d_packed_values};
}

x3_status x3_cuda_op_kv_append(x3_device *dev, const x3_kv_layer *kv, const x3_batch *batch, const float *d_k, size_t ldk,
                               const float *d_v, size_t ldv, x3_err *err)
{
    const x3_cuda_kv cache = kv_of(kv);
    x3_cuda_batch b;
    x3_status rc = x3_cuda_describe(x3_cuda(dev), batch, &b, err);

    if (rc != X3_OK)
        return rc;
    return kv->type == X3_KV_F32 ? x3_cuda_kv_append(&cache, &b, d_k, ldk, d_v, ldv, x3_cuda(dev)->stream, err)
                                 : x3_cuda_append_packed(&cache, &b, d_k, ldk, d_v, ldv, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_rope_append(x3_device *dev, const x3_rope_args *q, const x3_rope_args *k, const x3_kv_layer *kv,
                                 const x3_batch *batch, const float *d_v, size_t ldv, x3_err *err)
{
    const x3_cuda_rope q_rope = rope_of(q, batch), k_rope = rope_of(k, batch);
    const x3_cuda_kv cache = kv_of(kv);
    x3_cuda_batch b;
    x3_status rc;

    if (kv->type != X3_KV_F32) {
        X3_TRY(rc, out, x3_cuda_describe(x3_cuda(dev), batch, &b, err));
        return x3_cuda_rope_append_packed(&q_rope, &k_rope, &cache, &b, d_v, ldv, x3_cuda(dev)->stream, err);
    }
    X3_TRY(rc, out, x3_cuda_op_rope(dev, q, batch, err));
    X3_TRY(rc, out, x3_cuda_op_rope(dev, k, batch, err));
    rc = x3_cuda_op_kv_append(dev, kv, batch, k->d_x, k->ld, d_v, ldv, err);
out:
    return rc;
}

static x3_status attend_packed(x3_device_cuda *cuda, const x3_cuda_attention *a, const x3_cuda_batch *b, x3_err *err)
{
    x3_status rc = x3_cuda_reserve(cuda, &cuda->scratch, x3_cuda_packed_bytes(&cuda->info, a, b), err);

    return rc == X3_OK ? x3_cuda_attend_packed(&cuda->info, a, b, cuda->scratch.p, cuda->stream, err) : rc;
}

x3_status x3_cuda_op_attention(x3_device *dev, const x3_attention_args *args, const x3_batch *batch, x3_err *err)
{
    const x3_cuda_attention a = {.d_q = args->d_q, .d_out = args->d_out, .n_heads = args->n_heads, .kv = kv_of(args->kv),
                                 .scale = args->scale, .window = args->window, .d_sinks = args->d_sinks};
    x3_cuda_batch b;
    x3_status rc = x3_cuda_describe(x3_cuda(dev), batch, &b, err);

    if (rc != X3_OK)
        return rc;
    if (args->d_selected != NULL)
        return x3_cuda_attend_selected(&a, args->d_selected, args->n_selected, &b, x3_cuda(dev)->stream, err);
    if (args->kv->type != X3_KV_F32)
        return attend_packed(x3_cuda(dev), &a, &b, err);
    return x3_cuda_attend(&a, &b, x3_cuda(dev)->stream, err);
}

/* ---- score ---- */

x3_status x3_cuda_op_score(x3_device *dev, const float *d_reference, const float *d_pack, size_t n_rows, size_t vocab,
                           const int32_t *next, x3_score_position *out, x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    x3_score_position *d_out;
    int32_t *d_next;
    size_t at = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->scratch, n_rows * (sizeof *d_out + sizeof *d_next) + 512, err));
    d_out = x3_cuda_carve(&cuda->scratch, &at, n_rows * sizeof *d_out);
    d_next = x3_cuda_carve(&cuda->scratch, &at, n_rows * sizeof *d_next);
    X3_TRY(rc, out, dev->ops->upload(dev, d_next, next, n_rows * sizeof *d_next, err));
    X3_TRY(rc, out, x3_cuda_score(d_reference, d_pack, n_rows, vocab, d_next, d_out, cuda->stream, err));
    rc = dev->ops->download(dev, out, d_out, n_rows * sizeof *d_out, err);
out:
    return rc;
}
