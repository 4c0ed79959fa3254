/* Rows of hidden states through a layer, a batch at a time. */
#include "calib/capture.h"

size_t x3_state_floats(const x3_model *m, size_t n_cols)
{
    return n_cols * (m->hidden + x3_model_selected(m, n_cols));
}

x3_status x3_layer_runner_create(x3_layer_runner *r, x3_device *dev, const x3_model *m, size_t n_rows, size_t n_cols,
                                 x3_err *err)
{
    x3_status rc;

    *r = (x3_layer_runner){.dev = dev, .n_rows = n_rows, .n_cols = n_cols, .hidden = m->hidden,
                           .n_selected = x3_model_selected(m, n_cols)};
    r->at_once = x3_stream_batch(n_rows, n_cols);
    X3_TRY(rc, out, x3_forward_create(&r->f, dev, m, r->at_once * n_cols, n_cols, err));
    X3_TRY(rc, out, x3_full_batch_create(&r->batch, dev, r->at_once, n_cols, r->n_selected, err));
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
    const size_t n_sequences = x3_stream_batch(n_rows, n_cols), positions = n_sequences * n_cols;
    const size_t n_pages = (n_cols + X3_KV_PAGE - 1) / X3_KV_PAGE * n_sequences;
    size_t widest = 0, kv = 0;

    for (size_t i = 0; i < x3_model_all_layers(m); i++) {
        const x3_layer_desc *l = &m->layers[i];
        size_t floats = both_paths ? input_floats(l) : 0;
        if (l->ffn == X3_FFN_MOE) /* tokens of the fallback; an expert's on the original path; inner values and copies */
            floats += (both_paths ? 3 : 1) * m->hidden + (both_paths ? 4 : 3) * l->moe.n_inner;
        widest = x3_max_size(widest, floats);
        kv = x3_max_size(kv, x3_kv_layer_bytes(l, n_pages, n_sequences, X3_KV_F32));
    }
    return x3_forward_bytes(m, positions, n_cols) + kv +
           sizeof(float) * (positions * (2 * (m->hidden + x3_model_selected(m, n_cols)) + widest));
}

x3_status x3_layer_runner_prepare(x3_layer_runner *r, const x3_layer_desc *layer, x3_err *err)
{
    x3_kv_layer_free(&r->kv, r->dev);
    return x3_kv_layer_create(&r->kv, r->dev, layer, r->batch.n_pages, r->batch.n_slots, X3_KV_F32, err);
}

/* A row of states is [n_cols][hidden], then [n_cols][n_selected] numbers of 32 bits. */
x3_status x3_load_rows(x3_layer_runner *r, x3_hidden_state *path, size_t row, size_t n, float *d_x, x3_err *err)
{
    const size_t hidden = r->n_cols * r->hidden, selected = r->n_cols * r->n_selected;
    x3_status rc;

    X3_TRY(rc, out, x3_hidden_state_load_part(path, row, n, 0, hidden, d_x, err));
    if (selected > 0)
        rc = x3_hidden_state_load_part(path, row, n, hidden, selected, (float *)r->batch.batch.d_selected, err);
out:
    return rc;
}

x3_status x3_store_rows(x3_layer_runner *r, x3_hidden_state *path, size_t row, size_t n, x3_err *err)
{
    const size_t hidden = r->n_cols * r->hidden, selected = r->n_cols * r->n_selected;
    x3_status rc;

    X3_TRY(rc, out, x3_hidden_state_store_part(path, row, n, 0, hidden, r->d_x, err));
    if (selected > 0)
        rc = x3_hidden_state_store_part(path, row, n, hidden, selected, (const float *)r->batch.batch.d_selected, err);
out:
    return rc;
}

x3_status x3_run_rows(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *path, size_t row, size_t n, x3_err *err)
{
    x3_status rc;

    x3_full_batch_limit(&r->batch, n);
    X3_TRY(rc, out, x3_load_rows(r, path, row, n, r->d_x, err));
    rc = x3_forward_layer(r->f, w, &r->batch.batch, &r->kv, r->d_x, err);
out:
    return rc;
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
