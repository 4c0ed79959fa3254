#include "runtime/draft.h"

#include <stdlib.h>

x3_status x3_draft_create(x3_draft **out, x3_device *dev, const x3_checkpoint *c, size_t max_rows, size_t n_cols, x3_err *err)
{
    const x3_model *m = c->model;
    x3_draft *d = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&d, 1, sizeof *d, err));
    d->dev = dev;
    d->c = c;
    d->max_rows = max_rows;
    d->n_cols = n_cols;
    X3_TRY(rc, out, x3_vector_load(&d->d_embed_norm, dev, c, &m->draft->embed_norm, err));
    X3_TRY(rc, out, x3_vector_load(&d->d_hidden_norm, dev, c, &m->draft->hidden_norm, err));
    X3_TRY(rc, out, x3_device_floats(dev, &d->d_short, max_rows * (n_cols - 1) * m->hidden, err));
    X3_TRY(rc, out, x3_alloc(&d->host, max_rows * (n_cols - 1) * m->hidden, sizeof *d->host, err));
    *out = d;
    d = NULL;
out:
    x3_draft_free(d);
    return rc;
}

void x3_draft_free(x3_draft *d)
{
    if (d == NULL)
        return;
    x3_device_free(d->dev, d->d_embed_norm);
    x3_device_free(d->dev, d->d_hidden_norm);
    x3_device_free(d->dev, d->d_short);
    free(d->host);
    free(d);
}

size_t x3_draft_bytes(const x3_model *m, size_t max_rows, size_t n_cols)
{
    return sizeof(float) * m->hidden * (2 + max_rows * (n_cols - 1));
}

x3_status x3_draft_inputs(x3_draft *d, const int32_t *ids, size_t n_rows, const float *d_x, float *d_out, x3_err *err)
{
    const x3_device_ops *ops = d->dev->ops;
    const x3_model *m = d->c->model;
    const size_t hidden = m->hidden, n = d->n_cols - 1, row = n * hidden;
    x3_status rc;

    X3_TRY(rc, out, ops->copy_2d(d->dev, d->d_short, row, d_x, row + hidden, n_rows, row, err));
    X3_TRY(rc, out, ops->rms_norm(d->dev, d->d_short, hidden, n_rows * n, hidden, d->d_hidden_norm, m->norm_eps,
                                  d_out + hidden, 2 * hidden, err));
    for (size_t i = 0; i < n_rows; i++)
        X3_TRY(rc, out, x3_embed(d->c, ids + i * d->n_cols + 1, n, d->host + i * row, err));
    X3_TRY(rc, out, ops->upload(d->dev, d->d_short, d->host, n_rows * row * sizeof *d->host, err));
    X3_TRY(rc, out, ops->rms_norm(d->dev, d->d_short, hidden, n_rows * n, hidden, d->d_embed_norm, m->norm_eps, d_out,
                                  2 * hidden, err));
    rc = ops->sync(d->dev, err); /* the host's buffer is free again */
out:
    return rc;
}
