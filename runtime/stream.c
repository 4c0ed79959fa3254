#include "runtime/stream.h"

#include <stdlib.h>

size_t x3_stream_batch(size_t n_rows, size_t n_cols)
{
    size_t n = 8192 / n_cols;

    return x3_min_size(n == 0 ? 1 : n, n_rows);
}

/* One layer, or the final norm when w is NULL, over all rows. */
struct pass {
    x3_device *dev;
    const x3_checkpoint *c;
    x3_forward *f;
    x3_full_batch batch;
    float *d_x;
    size_t n_rows, n_cols, at_once;
    float *hidden;
    size_t n_selected; /* a position */
    int32_t *selected; /* host, [n_rows][n_cols][n_selected]: what layers hand to later ones beside hidden */
};

static x3_status run_layer(struct pass *p, const x3_layer_weights *w, x3_kv_layer *kv, const float *d_norm, x3_err *err)
{
    const size_t dim = p->c->model->hidden;
    int32_t *d_selected = p->batch.batch.d_selected;
    x3_status rc = X3_OK;

    for (size_t row = 0; row < p->n_rows; row += p->at_once) {
        size_t n = x3_min_size(p->at_once, p->n_rows - row) * p->n_cols;
        float *host = p->hidden + row * p->n_cols * dim;
        const size_t selected_bytes = n * p->n_selected * sizeof *p->selected;
        int32_t *selected = d_selected == NULL ? NULL : p->selected + row * p->n_cols * p->n_selected;
        x3_full_batch_limit(&p->batch, n / p->n_cols);
        X3_TRY(rc, out, p->dev->ops->upload(p->dev, p->d_x, host, n * dim * sizeof *host, err));
        if (selected != NULL && w != NULL)
            X3_TRY(rc, out, p->dev->ops->upload(p->dev, d_selected, selected, selected_bytes, err));
        if (w != NULL)
            X3_TRY(rc, out, x3_forward_layer(p->f, w, &p->batch.batch, kv, p->d_x, err));
        else
            X3_TRY(rc, out, p->dev->ops->rms_norm(p->dev, p->d_x, dim, n, dim, d_norm, p->c->model->norm_eps, p->d_x, dim,
                                                  err));
        if (selected != NULL && w != NULL)
            X3_TRY(rc, out, p->dev->ops->download(p->dev, selected, d_selected, selected_bytes, err));
        X3_TRY(rc, out, p->dev->ops->download(p->dev, host, p->d_x, n * dim * sizeof *host, err));
    }
out:
    return rc;
}

x3_status x3_stream_hidden(x3_device *dev, const x3_checkpoint *c, const int32_t *ids, size_t n_rows, size_t n_cols,
                           float *hidden, const x3_progress *progress, x3_err *err)
{
    struct pass p = {.dev = dev, .c = c, .n_rows = n_rows, .n_cols = n_cols, .hidden = hidden};
    const x3_model *m = c->model;
    x3_layer_weights w = {0};
    x3_kv_layer kv = {0};
    float *d_norm = NULL;
    x3_status rc;

    p.at_once = x3_stream_batch(n_rows, n_cols);
    X3_TRY(rc, out, x3_embed(c, ids, n_rows * n_cols, hidden, err));
    X3_TRY(rc, out, x3_forward_create(&p.f, dev, m, p.at_once * n_cols, n_cols, err));
    X3_TRY(rc, out, x3_full_batch_create(&p.batch, dev, p.at_once, n_cols, x3_model_selected(m, n_cols), err));
    p.n_selected = x3_model_selected(m, n_cols);
    if (p.n_selected != 0)
        X3_TRY(rc, out, x3_alloc(&p.selected, n_rows * n_cols * p.n_selected, sizeof *p.selected, err));
    X3_TRY(rc, out, x3_device_floats(dev, &p.d_x, p.at_once * n_cols * m->hidden, err));
    for (size_t i = 0; i < m->n_layers; i++) {
        X3_TRY(rc, out, x3_layer_weights_load(&w, dev, c, &m->layers[i], err));
        X3_TRY(rc, out, x3_kv_layer_create(&kv, dev, &m->layers[i], p.batch.n_pages, p.batch.n_slots, X3_KV_F32, err));
        X3_TRY(rc, out, run_layer(&p, &w, &kv, NULL, err));
        x3_layer_weights_free(&w);
        x3_kv_layer_free(&kv, dev);
        if (progress != NULL)
            progress->step(progress->arg, i + 1, m->n_layers, m->layers[i].prefix);
    }
    X3_TRY(rc, out, x3_vector_load(&d_norm, dev, c, &m->final_norm, err));
    X3_TRY(rc, out, run_layer(&p, NULL, NULL, d_norm, err));
out:
    x3_layer_weights_free(&w);
    x3_kv_layer_free(&kv, dev);
    x3_device_free(dev, d_norm);
    x3_device_free(dev, p.d_x);
    free(p.selected);
    x3_full_batch_free(&p.batch);
    x3_forward_free(p.f);
    return rc;
}
