#include "runtime/weights.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* ---- dense weights on the host ---- */

/* Multiplies rows of an FP8 weight by their scales: one for all, one a row, or one a block of equal size. */
static x3_status apply_scale(const x3_checkpoint *c, const x3_tensor *t, const x3_tensor *scale, size_t first,
                             size_t n_rows, float *out, x3_err *err)
{
    const size_t rows = (size_t)t->shape[0], cols = (size_t)t->shape[1];
    const size_t s_rows = scale->rank == 2 ? (size_t)scale->shape[0] : (size_t)scale->n_elements;
    const size_t s_cols = scale->rank == 2 ? (size_t)scale->shape[1] : 1;
    const size_t block_rows = (rows + s_rows - 1) / s_rows, block_cols = (cols + s_cols - 1) / s_cols;
    float *s = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&s, scale->n_elements, sizeof *s, err));
    X3_TRY(rc, out, x3_safetensors_read_f32(c->st, scale, 0, scale->n_elements, s, err));
    /* a block size that is not a power of two is rounded up wrong where the last block is short: use the usual 128 */
    size_t br = s_rows == (rows + 127) / 128 && s_rows > 1 ? 128 : block_rows;
    size_t bc = s_cols == (cols + 127) / 128 && s_cols > 1 ? 128 : block_cols;
    for (size_t r = 0; r < n_rows; r++)
        for (size_t i = 0; i < cols; i++)
            out[r * cols + i] *= s[(first + r) / br * s_cols + i / bc];
out:
    free(s);
    return rc;
}

/* Outputs [first, first + n_rows) of a weight that is part of a tensor, [n_rows][n_in] in the tensor's type. */
static x3_status read_part(const x3_checkpoint *c, const x3_weight_place *p, size_t n_in, size_t first, size_t n_rows,
                           char *out, x3_err *err)
{
    const size_t size = x3_dtype_bytes(p->tensor->dtype), span = (n_rows - 1) * (size_t)p->out_stride + 1;
    const uint64_t at = p->first + first * p->out_stride;
    char *column = NULL;
    x3_status rc = X3_OK;

    if (p->in_stride == 1 && p->out_stride == n_in)
        return x3_safetensors_read(c->st, p->tensor, at * size, n_rows * n_in * size, out, err);
    if (p->in_stride == 1) {
        for (size_t r = 0; r < n_rows && rc == X3_OK; r++)
            rc = x3_safetensors_read(c->st, p->tensor, (at + r * p->out_stride) * size, n_in * size, out + r * n_in * size, err);
        return rc;
    }
    X3_TRY(rc, out, x3_alloc(&column, span, size, err));
    for (size_t i = 0; i < n_in; i++) {
        X3_TRY(rc, out, x3_safetensors_read(c->st, p->tensor, (at + i * p->in_stride) * size, span * size, column, err));
        for (size_t r = 0; r < n_rows; r++)
            memcpy(out + (r * n_in + i) * size, column + r * p->out_stride * size, size);
    }
out:
    free(column);
    return rc;
}

x3_status x3_dense_read(const x3_checkpoint *c, const x3_linear_desc *desc, size_t first, size_t n_rows, float *out,
                        x3_err *err)
{
    const x3_tensor *scale = NULL;
    x3_weight_place p;
    char *part = NULL;
    x3_status rc;

    if (!x3_checkpoint_place(c, desc, &p))
        return x3_fail(err, X3_ERR_INPUT, "%s: tensor %s.weight is missing", c->dir, desc->name);
    if (p.whole) {
        scale = p.tensor->dtype == X3_F8_E4M3 ? x3_checkpoint_scale(c, p.tensor) : NULL;
        rc = x3_safetensors_read_f32(c->st, p.tensor, (uint64_t)first * desc->n_in, n_rows * desc->n_in, out, err);
        return rc == X3_OK && scale != NULL ? apply_scale(c, p.tensor, scale, first, n_rows, out, err) : rc;
    }
    X3_TRY(rc, out, x3_alloc(&part, n_rows * desc->n_in, x3_dtype_bytes(p.tensor->dtype), err));
    X3_TRY(rc, out, read_part(c, &p, desc->n_in, first, n_rows, part, err));
    x3_dtype_to_f32(p.tensor->dtype, part, n_rows * desc->n_in, out);
out:
    free(part);
    return rc;
}

x3_status x3_dense_floats(const float **d_out, x3_device *dev, const x3_weight *w, x3_err *err)
{
    float *d = NULL;
    x3_status rc = x3_device_floats(dev, &d, w->n_out * w->n_in, err);

    *d_out = d;
    return rc == X3_OK ? dev->ops->dense_floats(dev, w, d, err) : rc;
}

x3_status x3_embed(const x3_checkpoint *c, const int32_t *ids, size_t n, float *out, x3_err *err)
{
    const x3_tensor *t = x3_safetensors_find(c->st, c->model->embed_name);
    const size_t hidden = c->model->hidden;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < n && rc == X3_OK; i++) {
        if (ids[i] < 0 || (size_t)ids[i] >= c->model->vocab)
            return x3_fail(err, X3_ERR_INPUT, "%s: token id %d is outside the embedding of %zu rows", c->dir, ids[i],
                           c->model->vocab);
        rc = x3_safetensors_read_f32(c->st, t, (uint64_t)ids[i] * hidden, hidden, out + i * hidden, err);
    }
    return rc;
}

/* ---- device ---- */

static x3_status upload_bytes(x3_device *dev, const void **d_out, const void *host, size_t n_bytes, x3_err *err)
{
    void *d = NULL;
    x3_status rc = x3_device_alloc(dev, &d, n_bytes, err);

    *d_out = d;
    if (rc == X3_OK)
        rc = dev->ops->upload(dev, d, host, n_bytes, err);
    if (rc == X3_OK)
        rc = dev->ops->sync(dev, err);
    return rc;
}

static x3_status load_floats(x3_device *dev, const x3_checkpoint *c, const x3_tensor *t, float add, const float **d_out,
                             x3_err *err)
{
    float *host = NULL;
    const void *d = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&host, t->n_elements, sizeof *host, err));
    X3_TRY(rc, out, x3_safetensors_read_f32(c->st, t, 0, t->n_elements, host, err));
    for (size_t i = 0; add != 0 && i < t->n_elements; i++)
        host[i] += add;
    rc = upload_bytes(dev, &d, host, t->n_elements * sizeof *host, err);
    *d_out = d;
out:
    free(host);
    return rc;
}

/* Where a device that reads mappings finds a tensor's data from byte `begin` on, aligned for elements of `size` and as the
 * device asks; NULL: it must be copied. */
static const void *in_place(const x3_device *dev, const x3_checkpoint *c, const x3_tensor *t, uint64_t begin, size_t size)
{
    return dev->in_place_align == 0 ? NULL : x3_safetensors_mapped(c->st, t, begin, x3_max_size(size, dev->in_place_align));
}

/* Whether a dense weight is one piece of its tensor that needs no conversion. */
static bool is_one_piece(const x3_weight_place *p, size_t n_in)
{
    return p->tensor->dtype != X3_F8_E4M3 && p->in_stride == 1 && p->out_stride == n_in;
}

static const void *dense_in_place(const x3_device *dev, const x3_checkpoint *c, const x3_weight_place *p, size_t n_in)
{
    const size_t size = x3_dtype_bytes(p->tensor->dtype);

    return is_one_piece(p, n_in) ? in_place(dev, c, p->tensor, p->first * size, size) : NULL;
}

static x3_status load_dense(x3_weight *w, x3_device *dev, const x3_checkpoint *c, const x3_linear_desc *desc, x3_err *err)
{
    void *host = NULL;
    x3_weight_place p;
    size_t n_bytes;
    x3_status rc;

    if (!x3_checkpoint_place(c, desc, &p))
        return x3_fail(err, X3_ERR_INPUT, "%s: tensor %s.weight is missing", c->dir, desc->name);
    const x3_tensor *t = p.tensor;
    n_bytes = w->n_in * w->n_out * x3_dtype_bytes(t->dtype);
    w->n_in_padded = w->n_in;
    w->n_out_padded = w->n_out;
    if (t->dtype == X3_F8_E4M3) {
        w->kind = X3_WEIGHT_F32;
        n_bytes = w->n_in * w->n_out * sizeof(float);
        X3_TRY(rc, out, x3_alloc(&host, n_bytes, 1, err));
        X3_TRY(rc, out, x3_dense_read(c, desc, 0, w->n_out, host, err));
    } else {
        w->kind = t->dtype == X3_BF16 ? X3_WEIGHT_BF16 : t->dtype == X3_F16 ? X3_WEIGHT_F16 : X3_WEIGHT_F32;
        w->data = dense_in_place(dev, c, &p, w->n_in);
        w->borrowed = w->data != NULL;
        if (w->borrowed)
            return X3_OK;
        if (p.whole) {
            X3_TRY(rc, out, x3_checkpoint_load(c, t, &host, err));
        } else {
            X3_TRY(rc, out, x3_alloc(&host, n_bytes, 1, err));
            X3_TRY(rc, out, read_part(c, &p, w->n_in, 0, w->n_out, host, err));
        }
    }
    rc = upload_bytes(dev, &w->data, host, n_bytes, err);
out:
    free(host);
    return rc;
}

static x3_status load_group(x3_weight *w, x3_device *dev, const x3_checkpoint *c, const x3_group *g, x3_err *err)
{
    void *words = NULL;
    uint16_t *suh = NULL, *svh = NULL;
    const void *d_suh = NULL, *d_svh = NULL;
    x3_status rc;

    w->kind = X3_WEIGHT_EXL3;
    w->n_in_padded = g->n_in;
    w->n_out_padded = g->n_out;
    w->K = g->K;
    w->codebook = g->codebook;
    w->data = in_place(dev, c, g->trellis, 0, sizeof(uint32_t));
    w->borrowed = w->data != NULL;
    if (!w->borrowed) {
        X3_TRY(rc, out, x3_checkpoint_load(c, g->trellis, &words, err));
        X3_TRY(rc, out, upload_bytes(dev, &w->data, words, (size_t)g->trellis->n_bytes, err));
    }
    X3_TRY(rc, out, x3_group_scales(c->st, g, true, &suh, err));
    X3_TRY(rc, out, x3_group_scales(c->st, g, false, &svh, err));
    rc = upload_bytes(dev, &d_suh, suh, g->n_in * sizeof *suh, err);
    w->suh = d_suh;
    if (rc != X3_OK)
        goto out;
    rc = upload_bytes(dev, &d_svh, svh, g->n_out * sizeof *svh, err);
    w->svh = d_svh;
out:
    free(words);
    free(suh);
    free(svh);
    return rc;
}

x3_status x3_linear_load(x3_weight *w, x3_device *dev, const x3_checkpoint *c, const x3_linear_desc *desc, x3_err *err)
{
    const x3_tensor *bias = x3_checkpoint_bias(c, desc);
    x3_findings findings = {0};
    x3_group g;
    bool found = false;
    x3_status rc;

    *w = (x3_weight){.n_in = desc->n_in, .n_out = desc->n_out};
    if (c->is_pack) {
        X3_TRY(rc, out, x3_group_find(c->st, desc->name, &g, &found, &findings, err));
        X3_TRY(rc, out, x3_findings_status(&findings, err));
    }
    if (found)
        X3_TRY(rc, out, load_group(w, dev, c, &g, err));
    else
        X3_TRY(rc, out, load_dense(w, dev, c, desc, err));
    if (bias != NULL)
        rc = load_floats(dev, c, bias, 0, &w->bias, err);
out:
    x3_findings_free(&findings);
    if (rc != X3_OK)
        x3_linear_free(w, dev);
    return rc;
}

static void add_mapped(const x3_device *dev, const x3_checkpoint *c, const x3_tensor *t, uint64_t begin, size_t size, uint64_t n_bytes,
                       x3_mapped_bytes *total)
{
    if (in_place(dev, c, t, begin, size) != NULL)
        total->in_place += n_bytes;
    else if (dev->in_place_align != 0 && x3_safetensors_mapped(c->st, t, begin, 1) != NULL)
        total->misaligned += n_bytes;
}

x3_status x3_linear_mapped(const x3_device *dev, const x3_checkpoint *c, const x3_linear_desc *desc, x3_mapped_bytes *total,
                           x3_err *err)
{
    x3_findings findings = {0};
    x3_weight_place p;
    x3_group g;
    bool found = false;
    x3_status rc = X3_OK;

    if (c->is_pack) {
        X3_TRY(rc, out, x3_group_find(c->st, desc->name, &g, &found, &findings, err));
        X3_TRY(rc, out, x3_findings_status(&findings, err));
    }
    if (found) {
        add_mapped(dev, c, g.trellis, 0, sizeof(uint32_t), g.trellis->n_bytes, total);
    } else if (x3_checkpoint_place(c, desc, &p) && is_one_piece(&p, desc->n_in)) {
        const size_t size = x3_dtype_bytes(p.tensor->dtype);
        add_mapped(dev, c, p.tensor, p.first * size, size, (uint64_t)desc->n_in * desc->n_out * size, total);
    }
out:
    x3_findings_free(&findings);
    return rc;
}

/* An EXL3 weight as float32 [n_out][n_in]: the identity goes through it. For uses that a linear cannot serve. */
static x3_status densify(x3_weight *w, x3_device *dev, x3_err *err)
{
    const size_t n = w->n_in;
    float *identity = NULL, *d_identity = NULL, *d_rows = NULL, *d_dense = NULL;
    x3_weight dense = {.kind = X3_WEIGHT_F32, .n_in = n, .n_out = w->n_out, .n_in_padded = n, .n_out_padded = w->n_out};
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&identity, n * n, sizeof *identity, err));
    for (size_t i = 0; i < n; i++)
        identity[i * n + i] = 1;
    X3_TRY(rc, out, x3_device_floats(dev, &d_identity, n * n, err));
    X3_TRY(rc, out, x3_device_floats(dev, &d_rows, n * w->n_out, err));
    X3_TRY(rc, out, x3_device_floats(dev, &d_dense, n * w->n_out, err));
    X3_TRY(rc, out, dev->ops->upload(dev, d_identity, identity, n * n * sizeof *identity, err));
    X3_TRY(rc, out, dev->ops->linear(dev, w, d_identity, n, n, d_rows, w->n_out, err));
    X3_TRY(rc, out, dev->ops->transpose_pad(dev, d_rows, n, w->n_out, d_dense, n, w->n_out, err));
    X3_TRY(rc, out, dev->ops->sync(dev, err));
    dense.data = d_dense;
    d_dense = NULL;
    x3_linear_free(w, dev);
    *w = dense;
out:
    free(identity);
    x3_device_free(dev, d_identity);
    x3_device_free(dev, d_rows);
    x3_device_free(dev, d_dense);
    return rc;
}

void x3_linear_free(x3_weight *w, x3_device *dev)
{
    x3_err ignored = {0};

    if (w->borrowed) /* the mapping may go next: what still reads it ends before */
        (void)dev->ops->sync(dev, &ignored);
    else
        x3_device_free(dev, (void *)(uintptr_t)w->data);
    x3_device_free(dev, (void *)(uintptr_t)w->suh);
    x3_device_free(dev, (void *)(uintptr_t)w->svh);
    x3_device_free(dev, (void *)(uintptr_t)w->bias);
    *w = (x3_weight){0};
}

x3_status x3_vector_load(float **d_out, x3_device *dev, const x3_checkpoint *c, const x3_vector_desc *desc, x3_err *err)
{
    const float *d = NULL;
    x3_status rc = load_floats(dev, c, x3_safetensors_find(c->st, desc->name), desc->add, &d, err);

    *d_out = (float *)(uintptr_t)d;
    return rc;
}

static x3_status refuse_bad_router(const x3_checkpoint *c, const char *name, const float *x, size_t n, x3_err *err)
{
    for (size_t i = 0; i < n; i++)
        if (!isfinite(x[i]))
            return x3_fail(err, X3_ERR_INPUT, "%s: router %s: value %zu is not finite, no expert can be chosen by it", c->dir,
                           name, i);
    return X3_OK;
}

/* A router that is not finite would still choose experts, always the same ones. */
static x3_status check_router(const x3_checkpoint *c, const x3_layer_desc *l, x3_err *err)
{
    const x3_linear_desc *d = &l->linears[l->moe.router];
    float *x = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&x, d->n_in * d->n_out, sizeof *x, err));
    X3_TRY(rc, out, x3_dense_read(c, d, 0, d->n_out, x, err));
    X3_TRY(rc, out, refuse_bad_router(c, d->name, x, d->n_in * d->n_out, err));
    if (l->moe.correction >= 0) {
        const x3_vector_desc *v = &l->vectors[l->moe.correction];
        X3_TRY(rc, out, x3_safetensors_read_f32(c->st, x3_safetensors_find(c->st, v->name), 0, v->n, x, err));
        rc = refuse_bad_router(c, v->name, x, v->n, err);
    }
out:
    free(x);
    return rc;
}

x3_status x3_layer_weights_load(x3_layer_weights *w, x3_device *dev, const x3_checkpoint *c, const x3_layer_desc *desc,
                                x3_err *err)
{
    x3_status rc;

    *w = (x3_layer_weights){.dev = dev, .desc = desc};
    X3_TRY(rc, out, x3_alloc(&w->linears, desc->n_linears, sizeof *w->linears, err));
    X3_TRY(rc, out, x3_alloc(&w->vectors, desc->n_vectors, sizeof *w->vectors, err));
    for (size_t i = 0; i < desc->n_linears; i++)
        X3_TRY(rc, out, x3_linear_load(&w->linears[i], dev, c, &desc->linears[i], err));
    for (size_t i = 0; i < desc->n_vectors; i++)
        X3_TRY(rc, out, x3_vector_load(&w->vectors[i], dev, c, &desc->vectors[i], err));
    if (desc->mixer == X3_MIXER_MLA && w->linears[desc->mla.kv_b].kind == X3_WEIGHT_EXL3)
        X3_TRY(rc, out, densify(&w->linears[desc->mla.kv_b], dev, err));
    if (desc->ffn == X3_FFN_MOE)
        rc = check_router(c, desc, err);
out:
    if (rc != X3_OK)
        x3_layer_weights_free(w);
    return rc;
}

void x3_layer_weights_free(x3_layer_weights *w)
{
    if (w->desc == NULL)
        return;
    for (size_t i = 0; w->linears != NULL && i < w->desc->n_linears; i++)
        x3_linear_free(&w->linears[i], w->dev);
    for (size_t i = 0; w->vectors != NULL && i < w->desc->n_vectors; i++)
        x3_device_free(w->dev, w->vectors[i]);
    free(w->linears);
    free(w->vectors);
    *w = (x3_layer_weights){0};
}

size_t x3_layer_weights_bytes(const x3_checkpoint *c, const x3_layer_desc *desc)
{
    size_t total = 0;

    for (size_t i = 0; i < desc->n_linears; i++) {
        const x3_tensor *t = x3_checkpoint_weight(c, &desc->linears[i]);
        size_t weights = desc->linears[i].n_in * desc->linears[i].n_out;
        total += t == NULL ? weights : weights * (t->dtype == X3_F8_E4M3 ? 4 : x3_dtype_bytes(t->dtype));
    }
    return total;
}
