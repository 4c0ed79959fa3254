/* Grouped-query attention: q, k, v projections (apart, or in one linear), norms of heads where the family has them, rope
 * on the first dimensions of a head, causal attention over the cache, an output gate where the family has one, output
 * projection. */
#include "runtime/forward.h"

/* Outputs of the q linear. */
static size_t q_columns(const x3_gqa_desc *d)
{
    const size_t q = d->n_heads * d->head_dim, kv = d->n_kv_heads * (d->head_dim + d->v_dim);

    return d->k < 0 ? q + kv : d->gated ? 2 * q : q;
}

static size_t value_columns(const x3_gqa_desc *d)
{
    return d->n_heads * x3_max_size(d->head_dim, d->v_dim);
}

size_t x3_gqa_scratch(const x3_gqa_desc *d, size_t n_rows)
{
    const size_t q = d->n_heads * d->head_dim, kv = d->n_kv_heads * (d->head_dim + d->v_dim);
    const size_t split = d->gated || d->k < 0 ? q_columns(d) : 0;

    return n_rows * (q + kv + value_columns(d) + split + (d->gated ? q : 0));
}

static x3_status norm_heads(x3_forward *f, float *d_x, size_t n_heads, size_t n_rows, size_t head_dim,
                            const float *d_weight, x3_err *err)
{
    return f->dev->ops->rms_norm(f->dev, d_x, head_dim, n_rows * n_heads, head_dim, d_weight, f->model->norm_eps, d_x,
                                 head_dim, err);
}

static x3_rope_args rope_of(const x3_forward *f, const x3_gqa_desc *d, float *d_x, size_t n_heads)
{
    return (x3_rope_args){
        .d_x = d_x,
        .ld = n_heads * d->head_dim,
        .head_stride = d->head_dim,
        .n_heads = n_heads,
        .n_rotated = f->model->ropes[d->rope].n_rotated,
        .d_cos_sin = f->d_ropes[d->rope],
    };
}

/* Rope of queries and keys, keys and values into the cache. */
static x3_status append(x3_forward *f, const x3_gqa_desc *d, const x3_batch *batch, const x3_kv_layer *kv, float *d_q, float *d_k,
                        const float *d_v, x3_err *err)
{
    const size_t k_dim = d->n_kv_heads * d->head_dim, v_dim = d->n_kv_heads * d->v_dim;
    const x3_device_ops *ops = f->dev->ops;
    x3_rope_args q, k;
    x3_status rc;

    if (d->rope < 0)
        return ops->kv_append(f->dev, kv, batch, d_k, k_dim, d_v, v_dim, err);
    q = rope_of(f, d, d_q, d->n_heads);
    k = rope_of(f, d, d_k, d->n_kv_heads);
    if (ops->rope_append != NULL)
        return ops->rope_append(f->dev, &q, &k, kv, batch, d_v, v_dim, err);
    X3_TRY(rc, out, ops->rope(f->dev, &q, batch, err));
    X3_TRY(rc, out, ops->rope(f->dev, &k, batch, err));
    rc = ops->kv_append(f->dev, kv, batch, d_k, k_dim, d_v, v_dim, err);
out:
    return rc;
}

struct parts {
    float *d_q, *d_k, *d_v, *d_gate, *d_joined; /* d_gate, d_joined: NULL when the kind has none */
};

static x3_status project(x3_forward *f, const x3_layer_weights *w, const float *d_in, size_t n, const struct parts *p,
                         x3_err *err)
{
    const x3_gqa_desc *d = &w->desc->gqa;
    const x3_device_ops *ops = f->dev->ops;
    const size_t q = d->n_heads * d->head_dim, k = d->n_kv_heads * d->head_dim, v = d->n_kv_heads * d->v_dim;
    const size_t columns = q_columns(d);
    const int linears[] = {d->q, d->k, d->v};
    float *const d_y[] = {p->d_joined != NULL ? p->d_joined : p->d_q, p->d_k, p->d_v};
    x3_status rc;

    X3_TRY(rc, out, x3_forward_linears(f, w, linears, d->k < 0 ? 1 : 3, d_in, n, d_y, err));
    if (d->k < 0) {
        X3_TRY(rc, out, ops->copy_2d(f->dev, p->d_q, q, p->d_joined, columns, n, q, err));
        X3_TRY(rc, out, ops->copy_2d(f->dev, p->d_k, k, p->d_joined + q, columns, n, k, err));
        X3_TRY(rc, out, ops->copy_2d(f->dev, p->d_v, v, p->d_joined + q + k, columns, n, v, err));
    }
    if (d->gated) {
        const size_t h = d->head_dim;
        X3_TRY(rc, out, ops->copy_2d(f->dev, p->d_q, h, p->d_joined, 2 * h, n * d->n_heads, h, err));
        X3_TRY(rc, out, ops->copy_2d(f->dev, p->d_gate, h, p->d_joined + h, 2 * h, n * d->n_heads, h, err));
    }
    if (d->value_scale != 1)
        rc = ops->scale(f->dev, p->d_v, n * v, d->value_scale, err);
out:
    return rc;
}

x3_status x3_gqa_forward(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, x3_kv_layer *kv,
                         const float *d_in, float *d_out, float *d_scratch, x3_err *err)
{
    const x3_gqa_desc *d = &w->desc->gqa;
    const x3_device_ops *ops = f->dev->ops;
    const size_t n = batch->n_rows, q_dim = d->n_heads * d->head_dim;
    const size_t k_dim = d->n_kv_heads * d->head_dim, v_dim = d->n_kv_heads * d->v_dim;
    struct parts p = {.d_q = d_scratch, .d_k = d_scratch + n * q_dim, .d_v = d_scratch + n * (q_dim + k_dim)};
    float *d_mixed = p.d_v + n * v_dim, *d_rest = d_mixed + n * value_columns(d);
    x3_attention_args attention = {.d_q = p.d_q, .d_out = d_mixed, .n_heads = d->n_heads, .kv = kv, .scale = d->scale,
                                   .window = d->window, .d_sinks = d->sinks < 0 ? NULL : w->vectors[d->sinks]};
    x3_status rc;

    if (d->gated || d->k < 0)
        p.d_joined = d_rest;
    if (d->gated)
        p.d_gate = d_rest + n * q_columns(d);
    X3_TRY(rc, out, project(f, w, d_in, n, &p, err));
    if (d->q_norm >= 0)
        X3_TRY(rc, out, norm_heads(f, p.d_q, d->n_heads, n, d->head_dim, w->vectors[d->q_norm], err));
    if (d->k_norm >= 0)
        X3_TRY(rc, out, norm_heads(f, p.d_k, d->n_kv_heads, n, d->head_dim, w->vectors[d->k_norm], err));
    X3_TRY(rc, out, append(f, d, batch, kv, p.d_q, p.d_k, p.d_v, err));
    X3_TRY(rc, out, ops->attention(f->dev, &attention, batch, err));
    if (d->gated)
        X3_TRY(rc, out, ops->sigmoid_mul(f->dev, d_mixed, p.d_gate, n * q_dim, err));
    X3_TRY(rc, out, x3_forward_linear(f, w, d->o, d_mixed, n, d_out, err));
out:
    return rc;
}
