#include "calib/capture.h"

#include <stdlib.h>

x3_status x3_layer_runner_create(x3_layer_runner *r, x3_device *dev, const x3_model *m, size_t n_rows, size_t n_cols,
                                 x3_err *err)
{
    x3_status rc;

    *r = (x3_layer_runner){.dev = dev, .n_rows = n_rows, .n_cols = n_cols, .hidden = m->hidden};
    r->at_once = x3_stream_batch(n_rows, n_cols);
    X3_TRY(rc, out, x3_forward_create(&r->f, dev, m, r->at_once * n_cols, n_cols, err));
    X3_TRY(rc, out, x3_full_batch_create(&r->batch, dev, r->at_once, n_cols, err));
    X3_TRY(rc, out, x3_device_floats(dev, &r->d_x, r->at_once * n_cols * m->hidden, err));
out:
    if (rc != X3_OK)
        x3_layer_runner_free(r);
    return rc;
}

void x3_layer_runner_free(x3_layer_runner *r)
{
    if (r->dev == NULL)
        return;
    x3_kv_layer_free(&r->kv, r->dev);
    x3_full_batch_free(&r->batch);
    x3_forward_free(r->f);
    x3_device_free(r->dev, r->d_x);
    *r = (x3_layer_runner){0};
}

/* Floats of all inputs of a layer, a position. */
static size_t input_floats(const x3_layer_desc *l)
{
    size_t n = 0;

    for (size_t i = 0; i < l->n_linears; i++)
        if (i == 0 || l->linears[i].input != l->linears[i - 1].input)
            n += l->linears[i].n_in;
    return n;
}

size_t x3_layer_runner_bytes(const x3_model *m, size_t n_rows, size_t n_cols, bool both_paths)
{
    const size_t positions = x3_stream_batch(n_rows, n_cols) * n_cols;
    size_t widest = 0, kv = 0;

    for (size_t i = 0; i < m->n_layers; i++) {
        widest = x3_max_size(widest, input_floats(&m->layers[i]));
        kv = x3_max_size(kv, 2 * m->layers[i].gqa.n_kv_heads * m->layers[i].gqa.head_dim);
    }
    return x3_forward_bytes(m, positions, n_cols) +
           sizeof(float) * positions * (2 * m->hidden + kv + (both_paths ? widest : 0));
}

x3_status x3_layer_runner_prepare(x3_layer_runner *r, const x3_layer_desc *layer, x3_err *err)
{
    x3_kv_layer_free(&r->kv, r->dev);
    return x3_kv_layer_create(&r->kv, r->dev, layer, r->batch.n_pages, err);
}

/* ---- capture ---- */

struct capture {
    x3_device *dev;
    bool original;        /* which path runs now */
    float **d_original;   /* [n_inputs], inputs of the batch on the original path; NULL entries: none */
    x3_hessian **hessians;
};

static x3_status on_input(void *arg, const x3_layer_desc *layer, int input, const float *d_x, size_t n_rows, size_t n,
                          x3_err *err)
{
    struct capture *c = arg;

    (void)layer;
    if (c->original)
        return c->dev->ops->copy(c->dev, c->d_original[input], d_x, n_rows * n * sizeof *d_x, err);
    return x3_hessian_add(c->hessians[input], d_x, c->d_original[input], n_rows, err);
}

/* Rows [row, row + n) of a path through the layer; the result stays in r->d_x. */
static x3_status run_rows(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *path, size_t row, size_t n,
                          x3_err *err)
{
    x3_status rc;

    x3_full_batch_limit(&r->batch, n);
    X3_TRY(rc, out, x3_hidden_state_load(path, row, n, r->d_x, err));
    X3_TRY(rc, out, x3_forward_layer(r->f, w, &r->batch.batch, &r->kv, r->d_x, err));
out:
    return rc;
}

static x3_status create_buffers(x3_layer_runner *r, const x3_layer_desc *l, bool both, struct capture *c, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&c->d_original, l->n_inputs, sizeof *c->d_original, err));
    for (size_t i = 0; i < l->n_linears; i++) {
        const x3_linear_desc *d = &l->linears[i];
        if (c->hessians[d->input] != NULL)
            continue;
        X3_TRY(rc, out, x3_hessian_create(&c->hessians[d->input], r->dev, d->n_in, both, err));
        if (both)
            X3_TRY(rc, out, x3_device_floats(r->dev, &c->d_original[d->input], r->at_once * r->n_cols * d->n_in, err));
    }
out:
    return rc;
}

x3_status x3_capture_layer(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *quantized,
                           x3_hidden_state *original, bool first, x3_hessian **hessians, x3_err *err)
{
    const bool both = original != NULL && !first;
    struct capture c = {.dev = r->dev, .hessians = hessians};
    x3_status rc;

    X3_TRY(rc, out, create_buffers(r, w->desc, both, &c, err));
    r->f->capture = on_input;
    r->f->capture_arg = &c;
    for (size_t row = 0; row < r->n_rows; row += r->at_once) {
        size_t n = x3_min_size(r->at_once, r->n_rows - row);
        if (both) {
            c.original = true;
            X3_TRY(rc, out, run_rows(r, w, original, row, n, err));
            X3_TRY(rc, out, x3_hidden_state_store(original, row, n, r->d_x, err));
        }
        c.original = false;
        X3_TRY(rc, out, run_rows(r, w, quantized, row, n, err));
        if (original != NULL && first)
            X3_TRY(rc, out, x3_hidden_state_store(original, row, n, r->d_x, err));
    }
    for (size_t i = 0; i < w->desc->n_inputs; i++)
        X3_TRY(rc, out, x3_hessian_finish(hessians[i], err));
out:
    r->f->capture = NULL;
    for (size_t i = 0; c.d_original != NULL && i < w->desc->n_inputs; i++)
        x3_device_free(r->dev, c.d_original[i]);
    free(c.d_original);
    return rc;
}

x3_status x3_run_layer(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *path, x3_err *err)
{
    x3_status rc = X3_OK;

    for (size_t row = 0; row < r->n_rows && rc == X3_OK; row += r->at_once) {
        size_t n = x3_min_size(r->at_once, r->n_rows - row);
        rc = run_rows(r, w, path, row, n, err);
        if (rc == X3_OK)
            rc = x3_hidden_state_store(path, row, n, r->d_x, err);
    }
    return rc;
}
