/* Grouped-query attention: q, k, v projections, norms of heads where the family has them, rope, causal attention over
 * the cache, output projection. */
#include "runtime/forward.h"

size_t x3_gqa_scratch(const x3_gqa_desc *d, size_t n_rows)
{
    return n_rows * d->head_dim * (2 * d->n_heads + 2 * d->n_kv_heads);
}

static x3_status norm_heads(x3_forward *f, float *d_x, size_t n_heads, size_t n_rows, size_t head_dim,
                            const float *d_weight, x3_err *err)
{
    return f->dev->ops->rms_norm(f->dev, d_x, head_dim, n_rows * n_heads, head_dim, d_weight, f->model->norm_eps, d_x,
                                 head_dim, err);
}

static x3_status rotate(x3_forward *f, const x3_gqa_desc *d, float *d_x, size_t n_heads, const x3_batch *batch, x3_err *err)
{
    x3_rope_args rope = {
        .d_x = d_x,
        .ld = n_heads * d->head_dim,
        .head_stride = d->head_dim,
        .n_heads = n_heads,
        .n_rotated = f->model->ropes[d->rope].n_rotated,
        .d_cos_sin = f->d_ropes[d->rope],
    };

    return f->dev->ops->rope(f->dev, &rope, batch, err);
}

x3_status x3_gqa_forward(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, x3_kv_layer *kv,
                         const float *d_in, float *d_out, float *d_scratch, x3_err *err)
{
    const x3_gqa_desc *d = &w->desc->gqa;
    const size_t n = batch->n_rows, q_dim = d->n_heads * d->head_dim, kv_dim = d->n_kv_heads * d->head_dim;
    float *d_q = d_scratch, *d_k = d_q + n * q_dim, *d_v = d_k + n * kv_dim, *d_mixed = d_v + n * kv_dim;
    x3_attention_args attention = {.d_q = d_q, .d_out = d_mixed, .n_heads = d->n_heads, .kv = kv, .scale = d->scale,
                                   .window = d->window};
    x3_status rc;

    X3_TRY(rc, out, x3_forward_linear(f, w, d->q, d_in, n, d_q, err));
    X3_TRY(rc, out, x3_forward_linear(f, w, d->k, d_in, n, d_k, err));
    X3_TRY(rc, out, x3_forward_linear(f, w, d->v, d_in, n, d_v, err));
    if (d->q_norm >= 0)
        X3_TRY(rc, out, norm_heads(f, d_q, d->n_heads, n, d->head_dim, w->vectors[d->q_norm], err));
    if (d->k_norm >= 0)
        X3_TRY(rc, out, norm_heads(f, d_k, d->n_kv_heads, n, d->head_dim, w->vectors[d->k_norm], err));
    if (d->rope >= 0) {
        X3_TRY(rc, out, rotate(f, d, d_q, d->n_heads, batch, err));
        X3_TRY(rc, out, rotate(f, d, d_k, d->n_kv_heads, batch, err));
    }
    X3_TRY(rc, out, f->dev->ops->kv_append(f->dev, kv, batch, d_k, kv_dim, d_v, kv_dim, err));
    X3_TRY(rc, out, f->dev->ops->attention(f->dev, &attention, batch, err));
    X3_TRY(rc, out, x3_forward_linear(f, w, d->o, d_mixed, n, d_out, err));
out:
    return rc;
}
