/* The damped Hessian of a group and the half-way target (design/quality.md; GPTQ's asymmetric calibration: Li et al.,
 * GPTAQ, 2025; Zhang et al., Qronos, 2025). */
#include <stdlib.h>

#include "kernels/layout.h"
#include "quant/quantize.h"

/* Inputs that padding adds are always zero: an error there costs nothing. Their diagonal only keeps the matrix
 * positive definite, so that the search may push errors of the real inputs of the same 128-block into them. */
#define PADDING_DIAGONAL 1e-3

x3_status x3_quant_diagonal(x3_device *dev, const float *d_a, size_t n, float *out, x3_err *err)
{
    float *d_row = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_device_floats(dev, &d_row, n, err));
    X3_TRY(rc, out, dev->ops->copy_2d(dev, d_row, 1, d_a, n + 1, n, 1, err));
    rc = dev->ops->download(dev, out, d_row, n * sizeof *out, err);
out:
    x3_device_free(dev, d_row);
    return rc;
}

static x3_status mean_diagonal(const x3_hessian *h, double *mean, x3_err *err)
{
    float *row = NULL;
    x3_status rc;

    *mean = 0;
    X3_TRY(rc, out, x3_alloc(&row, h->n, sizeof *row, err));
    X3_TRY(rc, out, x3_quant_diagonal(h->dev, h->d_a, h->n, row, err));
    for (size_t i = 0; i < h->n; i++)
        *mean += row[i] / (double)h->n;
out:
    free(row);
    return rc;
}

x3_status x3_quant_input_create(x3_quant_input *in, x3_device *dev, const x3_quant_options *options, const char *group,
                                const x3_hessian *h, size_t n, x3_err *err)
{
    const x3_device_ops *ops = dev->ops;
    float *d_diagonal = NULL;
    double mean = 0;
    x3_rng rng;
    x3_status rc;

    *in = (x3_quant_input){.dev = dev, .n = n, .n_padded = x3_round_up(n, X3_HADAMARD)};
    X3_TRY(rc, out, x3_device_floats(dev, &in->d_a, in->n_padded * in->n_padded, err));
    X3_TRY(rc, out, x3_alloc(&in->damping, in->n_padded, sizeof(float), err));
    X3_TRY(rc, out, x3_alloc(&in->signs, in->n_padded, sizeof(float), err));
    x3_rng_init(&rng, options->seed, group);
    x3_rng_signs(&rng, in->signs, in->n_padded);
    if (h->n_rows > 0 || h->blended > 0)
        X3_TRY(rc, out, mean_diagonal(h, &mean, err));
    in->uncalibrated = !(mean >= 1e-20);
    if (!in->uncalibrated)
        X3_TRY(rc, out, ops->copy_2d(dev, in->d_a, in->n_padded, h->d_a, n, n, n, err));
    for (size_t i = 0; i < in->n_padded; i++)
        in->damping[i] = in->uncalibrated ? 1.0f : (float)(mean * (i < n ? options->damping : PADDING_DIAGONAL));
    X3_TRY(rc, out, x3_device_floats(dev, &d_diagonal, in->n_padded, err));
    X3_TRY(rc, out, ops->upload(dev, d_diagonal, in->damping, in->n_padded * sizeof(float), err));
    X3_TRY(rc, out, ops->add_diagonal(dev, in->d_a, in->n_padded, d_diagonal, err));
    X3_TRY(rc, out, ops->sync(dev, err));
    if (in->uncalibrated) /* errors are then counted against the identity, not against nothing */
        for (size_t i = 0; i < n; i++)
            in->damping[i] = 0;
out:
    x3_device_free(dev, d_diagonal);
    if (rc != X3_OK)
        x3_quant_input_free(in);
    return rc;
}

void x3_quant_input_free(x3_quant_input *in)
{
    if (in->dev == NULL)
        return;
    x3_device_free(in->dev, in->d_a);
    free(in->damping);
    free(in->signs);
    *in = (x3_quant_input){0};
}

x3_status x3_quant_target(const x3_quant_input *in, const x3_hessian *h, double alpha, const float *d_w, size_t n_out,
                          float *d_t, x3_err *err)
{
    const x3_device_ops *ops = in->dev->ops;
    const size_t n = in->n;
    float *d_difference = NULL, *d_step = NULL, *d_a = NULL;
    x3_status rc;

    X3_TRY(rc, out, ops->copy(in->dev, d_t, d_w, n_out * n * sizeof(float), err));
    if (alpha == 0 || h->d_c == NULL || in->uncalibrated)
        goto out;
    /* C - A without damping: the damping of both cancels */
    X3_TRY(rc, out, x3_device_floats(in->dev, &d_difference, n * n, err));
    X3_TRY(rc, out, x3_device_floats(in->dev, &d_step, n_out * n, err));
    X3_TRY(rc, out, x3_device_floats(in->dev, &d_a, n * n, err));
    X3_TRY(rc, out, ops->copy(in->dev, d_difference, h->d_c, n * n * sizeof(float), err));
    X3_TRY(rc, out, ops->axpy(in->dev, -1, h->d_a, d_difference, n * n, err));
    X3_TRY(rc, out, ops->gemm(in->dev, false, false, n_out, n, n, 1, d_w, n, d_difference, n, 0, d_step, n, err));
    X3_TRY(rc, out, ops->copy_2d(in->dev, d_a, n, in->d_a, in->n_padded, n, n, err));
    X3_TRY(rc, out, ops->spd_solve(in->dev, d_a, n, d_step, n_out, err));
    X3_TRY(rc, out, ops->axpy(in->dev, (float)alpha, d_step, d_t, n_out * n, err));
out:
    x3_device_free(in->dev, d_difference);
    x3_device_free(in->dev, d_step);
    x3_device_free(in->dev, d_a);
    return rc;
}
