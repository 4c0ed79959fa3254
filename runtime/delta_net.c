/* Gated delta net: projections, short causal convolution over q, k and v, the delta rule, a norm of each head's output
 * times silu(z), output projection. The cache is one state a sequence: the last rows before the convolution, then the
 * matrices of the delta rule. */
#include "runtime/forward.h"

static size_t channels(const x3_delta_net_desc *d)
{
    return 2 * d->n_k_heads * d->k_dim + d->n_v_heads * d->v_dim;
}

size_t x3_delta_net_scratch(const x3_delta_net_desc *d, size_t n_rows)
{
    const size_t value = d->n_v_heads * d->v_dim, joined = d->z < 0 ? channels(d) + value + 2 * d->n_v_heads : 0;

    return n_rows * (2 * channels(d) + 2 * value + 2 * d->n_v_heads + joined);
}

struct parts {
    float *d_qkv, *d_mixed, *d_z, *d_out, *d_b, *d_a, *d_joined;
};

/* One key head after the other: its q, k, the v and z of its value heads; b and a likewise. */
static x3_status split(x3_forward *f, const x3_delta_net_desc *d, size_t n, const struct parts *p, x3_err *err)
{
    const x3_device_ops *ops = f->dev->ops;
    const size_t repeat = d->n_v_heads / d->n_k_heads, v = repeat * d->v_dim, heads = d->n_k_heads;
    const size_t stride = 2 * d->k_dim + 2 * v, ld = heads * stride, ld_to = channels(d), k = heads * d->k_dim;
    const float *d_from = p->d_joined, *d_ba = p->d_joined + n * ld;
    x3_status rc;

    X3_TRY(rc, out, ops->copy_heads(f->dev, p->d_qkv, ld_to, d->k_dim, d_from, ld, stride, n, heads, d->k_dim, err));
    X3_TRY(rc, out, ops->copy_heads(f->dev, p->d_qkv + k, ld_to, d->k_dim, d_from + d->k_dim, ld, stride, n, heads, d->k_dim,
                                    err));
    X3_TRY(rc, out, ops->copy_heads(f->dev, p->d_qkv + 2 * k, ld_to, v, d_from + 2 * d->k_dim, ld, stride, n, heads, v, err));
    X3_TRY(rc, out, ops->copy_heads(f->dev, p->d_z, heads * v, v, d_from + 2 * d->k_dim + v, ld, stride, n, heads, v, err));
    X3_TRY(rc, out, ops->copy_2d(f->dev, p->d_b, repeat, d_ba, 2 * repeat, n * heads, repeat, err));
    rc = ops->copy_2d(f->dev, p->d_a, repeat, d_ba + repeat, 2 * repeat, n * heads, repeat, err);
out:
    return rc;
}

static x3_status project(x3_forward *f, const x3_layer_weights *w, const float *d_in, size_t n, const struct parts *p,
                         x3_err *err)
{
    const x3_delta_net_desc *d = &w->desc->delta;
    const int linears[] = {d->qkv, d->z};
    float *const d_y[] = {p->d_qkv, p->d_z};
    x3_status rc;

    if (d->z < 0) {
        const size_t columns = channels(d) + d->n_v_heads * d->v_dim;
        X3_TRY(rc, out, x3_forward_linear(f, w, d->qkv, d_in, n, p->d_joined, err));
        X3_TRY(rc, out, x3_forward_linear(f, w, d->b, d_in, n, p->d_joined + n * columns, err));
        return split(f, d, n, p, err);
    }
    X3_TRY(rc, out, x3_forward_linears(f, w, linears, 2, d_in, n, d_y, err));
    X3_TRY(rc, out, x3_forward_linear(f, w, d->b, d_in, n, p->d_b, err));
    rc = x3_forward_linear(f, w, d->a, d_in, n, p->d_a, err);
out:
    return rc;
}

x3_status x3_delta_net_check(const x3_layer_desc *l, const x3_kv_layer *kv, const x3_batch *batch, x3_err *err)
{
    for (size_t i = 0; i < batch->n_sequences; i++) {
        const x3_sequence *s = &batch->sequences[i];
        if (s->slot >= kv->n_slots)
            return x3_fail(err, X3_ERR_INPUT, "%s: slot %zu of %zu recurrent states", l->prefix, s->slot, kv->n_slots);
        if (s->position != 0 && kv->slot_positions[s->slot] != s->position)
            return x3_fail(err, X3_ERR_INPUT,
                           "%s: the recurrent state of slot %zu stands at position %zu, the sequence goes on at %zu", l->prefix,
                           s->slot, kv->slot_positions[s->slot], s->position);
    }
    return X3_OK;
}

void x3_delta_net_passed(x3_kv_layer *kv, const x3_batch *batch)
{
    for (size_t i = 0; i < batch->n_sequences; i++)
        kv->slot_positions[batch->sequences[i].slot] = batch->sequences[i].position + batch->sequences[i].n_rows;
}

x3_status x3_delta_net_forward(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, x3_kv_layer *kv,
                               const float *d_in, float *d_out, float *d_scratch, x3_err *err)
{
    const x3_delta_net_desc *d = &w->desc->delta;
    const x3_device_ops *ops = f->dev->ops;
    const size_t n = batch->n_rows, c = channels(d), value = d->n_v_heads * d->v_dim;
    struct parts p = {.d_qkv = d_scratch};
    x3_status rc;

    p.d_mixed = p.d_qkv + n * c;
    p.d_z = p.d_mixed + n * c;
    p.d_out = p.d_z + n * value;
    p.d_b = p.d_out + n * value;
    p.d_a = p.d_b + n * d->n_v_heads;
    p.d_joined = p.d_a + n * d->n_v_heads;
    x3_conv_args conv = {.d_x = p.d_qkv, .d_out = p.d_mixed, .n = c, .kernel = d->kernel, .d_weight = w->vectors[d->conv],
                         .d_state = kv->d_states, .state_stride = kv->state_floats};
    x3_delta_args rule = {.n_k_heads = d->n_k_heads, .n_v_heads = d->n_v_heads, .k_dim = d->k_dim, .v_dim = d->v_dim,
                          .d_qkv = p.d_mixed, .d_b = p.d_b, .d_a = p.d_a, .d_a_log = w->vectors[d->a_log],
                          .d_dt_bias = w->vectors[d->dt_bias], .d_out = p.d_out,
                          .d_state = kv->d_states + (d->kernel - 1) * c, .state_stride = kv->state_floats};
    X3_TRY(rc, out, x3_delta_net_check(w->desc, kv, batch, err));
    X3_TRY(rc, out, project(f, w, d_in, n, &p, err));
    for (size_t i = 0; i < batch->n_sequences; i++) /* until both operations are done the states are neither here nor there */
        kv->slot_positions[batch->sequences[i].slot] = SIZE_MAX;
    X3_TRY(rc, out, ops->conv_silu(f->dev, &conv, batch, err));
    X3_TRY(rc, out, ops->delta_rule(f->dev, &rule, batch, err));
    x3_delta_net_passed(kv, batch);
    X3_TRY(rc, out, ops->rms_norm(f->dev, p.d_out, d->v_dim, n * d->n_v_heads, d->v_dim, w->vectors[d->norm],
                                  f->model->norm_eps, p.d_out, d->v_dim, err));
    X3_TRY(rc, out, ops->silu_mul(f->dev, p.d_z, p.d_out, n * value, p.d_out, err));
    rc = x3_forward_linear(f, w, d->o, p.d_out, n, d_out, err);
out:
    return rc;
}
