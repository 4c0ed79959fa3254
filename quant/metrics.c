#include <stdlib.h>

#include "quant/quantize.h"

x3_status x3_quant_error(const x3_quant_input *in, const float *d_e, size_t n_cols, double *output_error,
                         double *squares, x3_err *err)
{
    const x3_device_ops *ops = in->dev->ops;
    const size_t n = in->n_padded;
    float *d_ae = NULL;
    double *d_sums = NULL, *sums = NULL;
    x3_status rc;

    *output_error = *squares = 0;
    X3_TRY(rc, out, x3_device_floats(in->dev, &d_ae, n * n_cols, err));
    X3_TRY(rc, out, x3_device_alloc(in->dev, &d_sums, n * sizeof *d_sums, err));
    X3_TRY(rc, out, x3_alloc(&sums, n, sizeof *sums, err));
    X3_TRY(rc, out, ops->gemm(in->dev, false, false, n, n_cols, n, 1, in->d_a, n, d_e, n_cols, 0, d_ae, n_cols, err));
    X3_TRY(rc, out, ops->row_dots(in->dev, d_e, d_ae, n, n_cols, d_sums, err));
    X3_TRY(rc, out, ops->download(in->dev, sums, d_sums, n * sizeof *sums, err));
    for (size_t i = 0; i < n; i++)
        *output_error += sums[i];
    X3_TRY(rc, out, ops->row_dots(in->dev, d_e, d_e, n, n_cols, d_sums, err));
    X3_TRY(rc, out, ops->download(in->dev, sums, d_sums, n * sizeof *sums, err));
    for (size_t i = 0; i < n; i++) {
        *output_error -= sums[i] * in->damping[i];
        *squares += sums[i];
    }
out:
    x3_device_free(in->dev, d_ae);
    x3_device_free(in->dev, d_sums);
    free(sums);
    return rc;
}
