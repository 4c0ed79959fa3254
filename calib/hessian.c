#include "calib/hessian.h"

#include <stdlib.h>

x3_status x3_hessian_create(x3_hessian **out, x3_device *dev, size_t n, bool with_cross, x3_err *err)
{
    x3_hessian *h = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&h, 1, sizeof *h, err));
    h->dev = dev;
    h->n = n;
    X3_TRY(rc, out, x3_device_floats(dev, &h->d_a, n * n, err));
    if (with_cross)
        X3_TRY(rc, out, x3_device_floats(dev, &h->d_c, n * n, err));
    *out = h;
    h = NULL;
out:
    x3_hessian_free(h);
    return rc;
}

void x3_hessian_free(x3_hessian *h)
{
    if (h == NULL)
        return;
    x3_device_free(h->dev, h->d_a);
    x3_device_free(h->dev, h->d_c);
    free(h);
}

static x3_status add_finite(x3_hessian *h, const float *d_xq, const float *d_xf, size_t n_rows, x3_err *err)
{
    const x3_device_ops *ops = h->dev->ops;
    x3_status rc = ops->gram(h->dev, d_xq, d_xq, n_rows, h->n, h->d_a, err);

    if (rc == X3_OK && h->d_c != NULL)
        rc = ops->gram(h->dev, d_xf != NULL ? d_xf : d_xq, d_xq, n_rows, h->n, h->d_c, err);
    return rc;
}

static x3_status copy_rows(x3_hessian *h, float **out, const float *d_x, size_t n_rows, x3_err *err)
{
    x3_status rc = x3_device_floats(h->dev, out, n_rows * h->n, err);

    return rc == X3_OK ? h->dev->ops->copy(h->dev, *out, d_x, n_rows * h->n * sizeof(float), err) : rc;
}

/* Drops what is not finite from copies, then weights them. */
static x3_status add_copies(x3_hessian *h, const float *d_xq, const float *d_xf, const float *weights, size_t n_rows,
                            size_t *n_bad, x3_err *err)
{
    const x3_device_ops *ops = h->dev->ops;
    float *copy_q = NULL, *copy_f = NULL, *d_weights = NULL;
    x3_status rc;

    X3_TRY(rc, out, copy_rows(h, &copy_q, d_xq, n_rows, err));
    if (d_xf != NULL)
        X3_TRY(rc, out, copy_rows(h, &copy_f, d_xf, n_rows, err));
    X3_TRY(rc, out, ops->drop_nonfinite(h->dev, copy_q, copy_f, n_rows, h->n, n_bad, err));
    if (weights != NULL) {
        X3_TRY(rc, out, x3_device_floats(h->dev, &d_weights, n_rows, err));
        X3_TRY(rc, out, ops->upload(h->dev, d_weights, weights, n_rows * sizeof *weights, err));
        X3_TRY(rc, out, ops->scale_rows(h->dev, copy_q, n_rows, h->n, d_weights, err));
        if (copy_f != NULL)
            X3_TRY(rc, out, ops->scale_rows(h->dev, copy_f, n_rows, h->n, d_weights, err));
    }
    X3_TRY(rc, out, add_finite(h, copy_q, copy_f, n_rows, err));
    rc = ops->sync(h->dev, err);
out:
    x3_device_free(h->dev, copy_q);
    x3_device_free(h->dev, copy_f);
    x3_device_free(h->dev, d_weights);
    return rc;
}

x3_status x3_hessian_add_weighted(x3_hessian *h, const float *d_xq, const float *d_xf, const float *weights, size_t n_rows,
                                  x3_err *err)
{
    const x3_device_ops *ops = h->dev->ops;
    bool finite = false, finite_f = true;
    size_t n_bad = 0;
    x3_status rc;

    if (h->d_c == NULL)
        d_xf = NULL;
    X3_TRY(rc, out, ops->all_finite(h->dev, d_xq, n_rows * h->n, &finite, err));
    if (d_xf != NULL)
        X3_TRY(rc, out, ops->all_finite(h->dev, d_xf, n_rows * h->n, &finite_f, err));
    if (finite && finite_f && weights == NULL)
        rc = add_finite(h, d_xq, d_xf, n_rows, err);
    else
        rc = add_copies(h, d_xq, d_xf, weights, n_rows, &n_bad, err);
    h->n_rows += n_rows - n_bad;
    h->n_dropped += n_bad;
    if (weights == NULL)
        h->weight += (double)(n_rows - n_bad);
    for (size_t r = 0; weights != NULL && r < n_rows; r++)
        h->weight += (double)weights[r] * weights[r];
out:
    return rc;
}

x3_status x3_hessian_add(x3_hessian *h, const float *d_xq, const float *d_xf, size_t n_rows, x3_err *err)
{
    return x3_hessian_add_weighted(h, d_xq, d_xf, NULL, n_rows, err);
}

x3_status x3_hessian_finish(x3_hessian *h, x3_err *err)
{
    const x3_device_ops *ops = h->dev->ops;
    const size_t n = h->n;
    const float scale = h->weight > 0 ? 1 / (float)h->weight : 0;
    x3_status rc;

    rc = ops->scale(h->dev, h->d_a, n * n, scale, err);
    if (rc == X3_OK && h->d_c != NULL)
        rc = ops->scale(h->dev, h->d_c, n * n, scale, err);
    if (rc == X3_OK)
        rc = ops->mirror(h->dev, h->d_a, n, err);
    return rc;
}

x3_status x3_hessian_blend(x3_hessian *h, const x3_hessian *other, double part, x3_err *err)
{
    const x3_device_ops *ops = h->dev->ops;
    const size_t n = h->n * h->n;
    x3_status rc;

    X3_TRY(rc, out, ops->scale(h->dev, h->d_a, n, (float)(1 - part), err));
    X3_TRY(rc, out, ops->axpy(h->dev, (float)part, other->d_a, h->d_a, n, err));
    if (h->d_c != NULL) {
        X3_TRY(rc, out, ops->scale(h->dev, h->d_c, n, (float)(1 - part), err));
        X3_TRY(rc, out, ops->axpy(h->dev, (float)part, other->d_c != NULL ? other->d_c : other->d_a, h->d_c, n, err));
    }
    h->blended = part;
out:
    return rc;
}
