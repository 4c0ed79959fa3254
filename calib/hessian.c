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

x3_status x3_hessian_add(x3_hessian *h, const float *d_xq, const float *d_xf, size_t n_rows, x3_err *err)
{
    const x3_device_ops *ops = h->dev->ops;
    float *copy_q = NULL, *copy_f = NULL;
    bool finite = false, finite_f = true;
    size_t n_bad = 0;
    x3_status rc;

    if (h->d_c == NULL)
        d_xf = NULL;
    X3_TRY(rc, out, ops->all_finite(h->dev, d_xq, n_rows * h->n, &finite, err));
    if (d_xf != NULL)
        X3_TRY(rc, out, ops->all_finite(h->dev, d_xf, n_rows * h->n, &finite_f, err));
    if (finite && finite_f) {
        rc = add_finite(h, d_xq, d_xf, n_rows, err);
    } else {
        X3_TRY(rc, out, x3_device_floats(h->dev, &copy_q, n_rows * h->n, err));
        X3_TRY(rc, out, ops->copy(h->dev, copy_q, d_xq, n_rows * h->n * sizeof(float), err));
        if (d_xf != NULL) {
            X3_TRY(rc, out, x3_device_floats(h->dev, &copy_f, n_rows * h->n, err));
            X3_TRY(rc, out, ops->copy(h->dev, copy_f, d_xf, n_rows * h->n * sizeof(float), err));
        }
        X3_TRY(rc, out, ops->drop_nonfinite(h->dev, copy_q, copy_f, n_rows, h->n, &n_bad, err));
        rc = add_finite(h, copy_q, copy_f, n_rows, err);
    }
    h->n_rows += n_rows - n_bad;
    h->n_dropped += n_bad;
out:
    x3_device_free(h->dev, copy_q);
    x3_device_free(h->dev, copy_f);
    return rc;
}

x3_status x3_hessian_finish(x3_hessian *h, x3_err *err)
{
    const x3_device_ops *ops = h->dev->ops;
    const size_t n = h->n;
    const float scale = h->n_rows == 0 ? 0 : 1 / (float)h->n_rows;
    x3_status rc;

    rc = ops->scale(h->dev, h->d_a, n * n, scale, err);
    if (rc == X3_OK && h->d_c != NULL)
        rc = ops->scale(h->dev, h->d_c, n * n, scale, err);
    if (rc == X3_OK)
        rc = ops->mirror(h->dev, h->d_a, n, err);
    return rc;
}
