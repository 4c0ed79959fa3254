#include "runtime/forward.h"

#include <stdlib.h>

static size_t mixer_scratch(const x3_layer_desc *l, size_t n_rows)
{
    switch (l->mixer) {
    case X3_MIXER_GQA: return x3_gqa_scratch(&l->gqa, n_rows);
    case X3_MIXER_DELTA_NET: return x3_delta_net_scratch(&l->delta, n_rows);
    case X3_MIXER_MLA: return x3_mla_scratch(&l->mla, n_rows);
    }
    return 0;
}

static size_t scratch_floats(const x3_model *m, size_t n_rows)
{
    size_t most = 0;

    for (size_t i = 0; i < x3_model_all_layers(m); i++) {
        const x3_layer_desc *l = &m->layers[i];
        most = x3_max_size(most, mixer_scratch(l, n_rows));
        most = x3_max_size(most, l->ffn == X3_FFN_MOE ? x3_moe_scratch(&l->moe, m->hidden, n_rows)
                                                      : x3_mlp_scratch(&l->mlp, n_rows));
    }
    return most + 2 * n_rows * m->hidden; /* normed input and block output */
}

size_t x3_forward_bytes(const x3_model *model, size_t max_rows, size_t max_positions)
{
    size_t floats = scratch_floats(model, max_rows);

    for (size_t i = 0; i < model->n_ropes; i++)
        floats += max_positions * model->ropes[i].n_rotated;
    return floats * sizeof(float);
}

/* d_x += d_y and its norm to d_out. */
static x3_status add_norm(x3_forward *f, float *d_x, const float *d_y, size_t n, const float *d_weight, float *d_out, x3_err *err)
{
    const x3_device_ops *ops = f->dev->ops;
    const size_t hidden = f->model->hidden;
    x3_status rc;

    if (ops->add_norm != NULL)
        return ops->add_norm(f->dev, d_x, d_y, n, hidden, d_weight, f->model->norm_eps, d_out, err);
    rc = ops->add(f->dev, d_x, d_y, n * hidden, err);
    return rc == X3_OK ? ops->rms_norm(f->dev, d_x, hidden, n, hidden, d_weight, f->model->norm_eps, d_out, hidden, err) : rc;
}

/* Operations that a device may not have yet. */
static x3_status check_device(const x3_device *dev, const x3_model *m, x3_err *err)
{
    const x3_device_ops *ops = dev->ops;
    bool missing = false;

    for (size_t i = 0; i < m->n_layers && !missing; i++) {
        const x3_layer_desc *l = &m->layers[i];
        missing = (l->mixer == X3_MIXER_DELTA_NET && (ops->conv_silu == NULL || ops->delta_rule == NULL ||
                                                      ops->copy_heads == NULL)) ||
                  (l->mixer == X3_MIXER_GQA && l->gqa.gated && (ops->sigmoid_mul == NULL || ops->copy_heads == NULL)) ||
                  (l->mixer == X3_MIXER_MLA && (ops->linear_heads == NULL || ops->copy_heads == NULL)) ||
                  (l->mixer == X3_MIXER_MLA && l->mla.index.topk > 0 && (ops->select == NULL || ops->layer_norm == NULL)) ||
                  (l->ffn == X3_FFN_MOE && (ops->route == NULL || ops->group_rows == NULL || ops->gather_rows == NULL ||
                                            ops->expert_linear == NULL || ops->combine_rows == NULL)) ||
                  (l->ffn == X3_FFN_MOE && l->moe.shared_gate >= 0 && ops->sigmoid_scale == NULL);
        if (missing)
            return x3_fail(err, X3_ERR_UNSUPPORTED, "device %s lacks an operation that %s of a %s model needs", dev->name,
                           l->prefix, m->model_type);
    }
    return X3_OK;
}

x3_status x3_forward_create(x3_forward **out, x3_device *dev, const x3_model *model, size_t max_rows,
                            size_t max_positions, x3_err *err)
{
    x3_forward *f = NULL;
    float *table = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, check_device(dev, model, err));
    X3_TRY(rc, out, x3_alloc(&f, 1, sizeof *f, err));
    f->dev = dev;
    f->model = model;
    f->max_rows = max_rows;
    f->max_positions = max_positions;
    f->end_expert = SIZE_MAX;
    f->scratch_floats = scratch_floats(model, max_rows);
    X3_TRY(rc, out, x3_device_floats(dev, &f->d_scratch, f->scratch_floats, err));
    X3_TRY(rc, out, x3_alloc(&f->d_ropes, model->n_ropes, sizeof *f->d_ropes, err));
    for (size_t i = 0; i < model->n_ropes; i++) {
        size_t n = max_positions * model->ropes[i].n_rotated;
        free(table);
        X3_TRY(rc, out, x3_alloc(&table, n, sizeof *table, err));
        X3_TRY(rc, out, x3_rope_table(&model->ropes[i], max_positions, table, err));
        X3_TRY(rc, out, x3_device_floats(dev, &f->d_ropes[i], n, err));
        X3_TRY(rc, out, dev->ops->upload(dev, f->d_ropes[i], table, n * sizeof *table, err));
        X3_TRY(rc, out, dev->ops->sync(dev, err));
    }
    *out = f;
    f = NULL;
out:
    free(table);
    x3_forward_free(f);
    return rc;
}

void x3_forward_free(x3_forward *f)
{
    if (f == NULL)
        return;
    for (size_t i = 0; f->d_ropes != NULL && i < f->model->n_ropes; i++)
        x3_device_free(f->dev, f->d_ropes[i]);
    free(f->d_ropes);
    x3_device_free(f->dev, f->d_scratch);
    free(f);
}

/* Tells the capture hook about an input that is new. */
static x3_status tell(x3_forward *f, const x3_layer_weights *w, int index, const float *d_x, size_t n_rows, x3_err *err)
{
    const x3_linear_desc *d = &w->desc->linears[index];
    const x3_captured c = {.layer = w->desc, .input = d->input, .d_x = d_x, .n_rows = n_rows, .n = d->n_in, .expert = -1};

    if (f->capture == NULL || (index > 0 && w->desc->linears[index - 1].input == d->input))
        return X3_OK;
    return f->capture(f->capture_arg, &c, err);
}

x3_status x3_forward_linear(x3_forward *f, const x3_layer_weights *w, int index, const float *d_x, size_t n_rows,
                            float *d_y, x3_err *err)
{
    const x3_linear_desc *d = &w->desc->linears[index];
    x3_status rc = tell(f, w, index, d_x, n_rows, err);

    if (rc == X3_OK)
        rc = f->dev->ops->linear(f->dev, &w->linears[index], d_x, d->n_in, n_rows, d_y, d->n_out, err);
    return rc;
}

x3_status x3_forward_linears(x3_forward *f, const x3_layer_weights *w, const int *indices, size_t n, const float *d_x, size_t n_rows,
                             float *const *d_y, x3_err *err)
{
    const x3_weight *weights[X3_FORWARD_LINEARS];
    x3_status rc = X3_OK;

    if (f->dev->ops->linears == NULL) {
        for (size_t i = 0; i < n && rc == X3_OK; i++)
            rc = x3_forward_linear(f, w, indices[i], d_x, n_rows, d_y[i], err);
        return rc;
    }
    for (size_t i = 0; i < n && rc == X3_OK; i++) {
        weights[i] = &w->linears[indices[i]];
        rc = tell(f, w, indices[i], d_x, n_rows, err);
    }
    return rc == X3_OK ? f->dev->ops->linears(f->dev, weights, n, d_x, w->desc->linears[indices[0]].n_in, n_rows, d_y, err) : rc;
}

x3_status x3_forward_layer(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, x3_kv_layer *kv, float *d_x,
                           x3_err *err)
{
    const x3_device_ops *ops = f->dev->ops;
    const x3_layer_desc *l = w->desc;
    const size_t n = batch->n_rows, hidden = f->model->hidden;
    float *d_in = f->d_scratch, *d_out = d_in + n * hidden, *d_rest = d_out + n * hidden;
    x3_status rc;

    if (n > f->max_rows)
        return x3_fail(err, X3_ERR_INPUT, "batch of %zu rows, the forward pass was made for %zu", n, f->max_rows);
    X3_TRY(rc, out, ops->rms_norm(f->dev, d_x, hidden, n, hidden, w->vectors[l->mixer_norm], f->model->norm_eps, d_in,
                                  hidden, err));
    switch (l->mixer) {
    case X3_MIXER_GQA:
        X3_TRY(rc, out, x3_gqa_forward(f, w, batch, kv, d_in, d_out, d_rest, err));
        break;
    case X3_MIXER_DELTA_NET:
        X3_TRY(rc, out, x3_delta_net_forward(f, w, batch, kv, d_in, d_out, d_rest, err));
        break;
    case X3_MIXER_MLA:
        X3_TRY(rc, out, x3_mla_forward(f, w, batch, kv, d_in, d_out, d_rest, err));
        break;
    }
    X3_TRY(rc, out, add_norm(f, d_x, d_out, n, w->vectors[l->ffn_norm], d_in, err));
    switch (l->ffn) {
    case X3_FFN_MLP:
        X3_TRY(rc, out, x3_mlp_forward(f, w, &l->mlp, n, d_in, d_out, d_rest, err));
        break;
    case X3_FFN_MOE:
        X3_TRY(rc, out, x3_moe_forward(f, w, batch, d_in, d_out, d_rest, err));
        break;
    }
    X3_TRY(rc, out, ops->add(f->dev, d_x, d_out, n * hidden, err));
out:
    return rc;
}
