/* Rows of hidden states through a layer, a batch at a time. */
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
    X3_TRY(rc, out, x3_alloc(&r->host, r->at_once * n_cols * m->hidden, sizeof(float), err));
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
    free(r->host);
    *r = (x3_layer_runner){0};
}

/* Floats of all inputs that are not an expert's, a position. */
static size_t input_floats(const x3_layer_desc *l)
{
    size_t n = 0;

    for (size_t i = 0; i < l->n_linears; i++)
        if (x3_layer_expert(l, i) < 0 && (i == 0 || l->linears[i].input != l->linears[i - 1].input))
            n += l->linears[i].n_in;
    return n;
}

size_t x3_layer_runner_bytes(const x3_model *m, size_t n_rows, size_t n_cols, bool both_paths)
{
    const size_t positions = x3_stream_batch(n_rows, n_cols) * n_cols;
    size_t widest = 0, kv = 0;

    for (size_t i = 0; i < m->n_layers; i++) {
        const x3_layer_desc *l = &m->layers[i];
        size_t floats = both_paths ? input_floats(l) : 0;
        if (l->ffn == X3_FFN_MOE) /* tokens of the fallback; an expert's on the original path; inner values and copies */
            floats += (both_paths ? 3 : 1) * m->hidden + (both_paths ? 4 : 3) * l->moe.n_inner;
        widest = x3_max_size(widest, floats);
        kv = x3_max_size(kv, 2 * l->gqa.n_kv_heads * l->gqa.head_dim);
    }
    return x3_forward_bytes(m, positions, n_cols) + sizeof(float) * positions * (2 * m->hidden + kv + widest);
}

x3_status x3_layer_runner_prepare(x3_layer_runner *r, const x3_layer_desc *layer, x3_err *err)
{
    x3_kv_layer_free(&r->kv, r->dev);
    return x3_kv_layer_create(&r->kv, r->dev, layer, r->batch.n_pages, err);
}

x3_status x3_run_rows(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *path, size_t row, size_t n, x3_err *err)
{
    const size_t floats = n * r->n_cols * r->hidden;
    x3_status rc;

    x3_full_batch_limit(&r->batch, n);
    X3_TRY(rc, out, x3_hidden_state_read(path, row, n, r->host, err));
    X3_TRY(rc, out, r->dev->ops->upload(r->dev, r->d_x, r->host, floats * sizeof(float), err));
    X3_TRY(rc, out, x3_forward_layer(r->f, w, &r->batch.batch, &r->kv, r->d_x, err));
out:
    return rc;
}

x3_status x3_store_rows(x3_layer_runner *r, x3_hidden_state *path, size_t row, size_t n, x3_err *err)
{
    x3_status rc = r->dev->ops->download(r->dev, r->host, r->d_x, n * r->n_cols * r->hidden * sizeof(float), err);

    return rc == X3_OK ? x3_hidden_state_write(path, row, n, r->host, err) : rc;
}

x3_status x3_run_layer(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *path, x3_err *err)
{
    x3_status rc = X3_OK;

    for (size_t row = 0; row < r->n_rows && rc == X3_OK; row += r->at_once) {
        size_t n = x3_min_size(r->at_once, r->n_rows - row);
        rc = x3_run_rows(r, w, path, row, n, err);
        if (rc == X3_OK)
            rc = x3_store_rows(r, path, row, n, err);
    }
    return rc;
}
