/* Least squares for the scales once the codes are fixed (design/quality.md, "Refit"). */
#include <math.h>
#include <stdlib.h>

#include "quant/quantize.h"

struct refit {
    const x3_quant_input *in;
    x3_device *dev;
    size_t rows, cols, n_out;
    const float *d_tt, *d_q;
    float *d_at;     /* A Tt */
    float *d_m, *d_am; /* a scaled copy of q, and A times it */
    float *d_normal; /* [rows][rows] */
    float *d_vector; /* scales, or a right side; [max(rows, cols)] */
    double *d_sums, *sums, *more;
};

/* svh_j = (T_j' A M_j) / (M_j' A M_j), M = diag(suh) Q */
static x3_status fit_outputs(struct refit *f, const float *suh, float *svh, x3_err *err)
{
    const x3_device_ops *ops = f->dev->ops;
    x3_status rc;

    X3_TRY(rc, out, ops->copy(f->dev, f->d_m, f->d_q, f->rows * f->cols * sizeof(float), err));
    X3_TRY(rc, out, ops->upload(f->dev, f->d_vector, suh, f->rows * sizeof(float), err));
    X3_TRY(rc, out, ops->scale_rows(f->dev, f->d_m, f->rows, f->cols, f->d_vector, err));
    X3_TRY(rc, out, ops->gemm(f->dev, false, false, f->rows, f->cols, f->rows, 1, f->in->d_a, f->rows, f->d_m, f->cols, 0,
                              f->d_am, f->cols, err));
    X3_TRY(rc, out, ops->col_dots(f->dev, f->d_tt, f->d_am, f->rows, f->cols, f->d_sums, err));
    X3_TRY(rc, out, ops->download(f->dev, f->sums, f->d_sums, f->cols * sizeof(double), err));
    X3_TRY(rc, out, ops->col_dots(f->dev, f->d_m, f->d_am, f->rows, f->cols, f->d_sums, err));
    X3_TRY(rc, out, ops->download(f->dev, f->more, f->d_sums, f->cols * sizeof(double), err));
    for (size_t j = 0; j < f->n_out; j++) {
        double fitted = f->sums[j] / f->more[j];
        if (svh[j] != 0 && isfinite(fitted) && fabs(fitted) >= 1e-8)
            svh[j] = (float)fitted;
    }
out:
    return rc;
}

/* (A o (B B') + eps I) suh = rowsum(B o (A Tt)) + eps suh_old, B = Q diag(svh) */
static x3_status fit_inputs(struct refit *f, float *suh, const float *svh, x3_err *err)
{
    const x3_device_ops *ops = f->dev->ops;
    const size_t n = f->rows;
    float *right = NULL, *diagonal = NULL;
    double eps = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&right, n, sizeof *right, err));
    X3_TRY(rc, out, x3_alloc(&diagonal, n, sizeof *diagonal, err));
    X3_TRY(rc, out, ops->copy(f->dev, f->d_m, f->d_q, n * f->cols * sizeof(float), err));
    X3_TRY(rc, out, ops->upload(f->dev, f->d_vector, svh, f->cols * sizeof(float), err));
    X3_TRY(rc, out, ops->scale_cols(f->dev, f->d_m, n, f->cols, f->d_vector, err));
    X3_TRY(rc, out, ops->gemm(f->dev, false, true, n, n, f->cols, 1, f->d_m, f->cols, f->d_m, f->cols, 0, f->d_normal, n,
                              err));
    X3_TRY(rc, out, ops->multiply(f->dev, f->d_normal, f->in->d_a, n * n, err));
    X3_TRY(rc, out, ops->row_dots(f->dev, f->d_m, f->d_at, n, f->cols, f->d_sums, err));
    X3_TRY(rc, out, ops->download(f->dev, f->sums, f->d_sums, n * sizeof(double), err));
    X3_TRY(rc, out, x3_quant_diagonal(f->dev, f->d_normal, n, diagonal, err));
    for (size_t i = 0; i < n; i++)
        eps += 1e-3 * diagonal[i] / (double)n;
    if (!(eps > 0))
        goto out;
    for (size_t i = 0; i < n; i++) {
        diagonal[i] = (float)eps;
        right[i] = (float)(f->sums[i] + eps * suh[i]);
    }
    X3_TRY(rc, out, ops->upload(f->dev, f->d_vector, diagonal, n * sizeof(float), err));
    X3_TRY(rc, out, ops->add_diagonal(f->dev, f->d_normal, n, f->d_vector, err));
    X3_TRY(rc, out, ops->upload(f->dev, f->d_vector, right, n * sizeof(float), err));
    X3_TRY(rc, out, ops->spd_solve(f->dev, f->d_normal, n, f->d_vector, 1, err));
    X3_TRY(rc, out, ops->download(f->dev, right, f->d_vector, n * sizeof(float), err));
    for (size_t i = 0; i < f->in->n; i++) /* padded inputs keep theirs: nothing depends on them */
        if (suh[i] != 0 && isfinite(right[i]))
            suh[i] = right[i];
out:
    free(right);
    free(diagonal);
    return rc;
}

x3_status x3_quant_refit(const x3_quant_input *in, const float *d_tt, const float *d_q, size_t n_out, size_t n_out_padded,
                         int rounds, float *suh, float *svh, x3_err *err)
{
    struct refit f = {.in = in, .dev = in->dev, .rows = in->n_padded, .cols = n_out_padded, .n_out = n_out, .d_tt = d_tt,
                      .d_q = d_q};
    const size_t longest = x3_max_size(f.rows, f.cols);
    x3_status rc = X3_OK;

    if (rounds == 0)
        return X3_OK;
    X3_TRY(rc, out, x3_device_floats(f.dev, &f.d_at, f.rows * f.cols, err));
    X3_TRY(rc, out, x3_device_floats(f.dev, &f.d_m, f.rows * f.cols, err));
    X3_TRY(rc, out, x3_device_floats(f.dev, &f.d_am, f.rows * f.cols, err));
    X3_TRY(rc, out, x3_device_floats(f.dev, &f.d_normal, f.rows * f.rows, err));
    X3_TRY(rc, out, x3_device_floats(f.dev, &f.d_vector, longest, err));
    X3_TRY(rc, out, x3_device_alloc(f.dev, &f.d_sums, longest * sizeof(double), err));
    X3_TRY(rc, out, x3_alloc(&f.sums, longest, sizeof(double), err));
    X3_TRY(rc, out, x3_alloc(&f.more, longest, sizeof(double), err));
    X3_TRY(rc, out, f.dev->ops->gemm(f.dev, false, false, f.rows, f.cols, f.rows, 1, in->d_a, f.rows, d_tt, f.cols, 0,
                                     f.d_at, f.cols, err));
    for (int i = 0; i < rounds; i++) {
        X3_TRY(rc, out, fit_outputs(&f, suh, svh, err));
        X3_TRY(rc, out, fit_inputs(&f, suh, svh, err));
    }
out:
    x3_device_free(f.dev, f.d_at);
    x3_device_free(f.dev, f.d_m);
    x3_device_free(f.dev, f.d_am);
    x3_device_free(f.dev, f.d_normal);
    x3_device_free(f.dev, f.d_vector);
    x3_device_free(f.dev, f.d_sums);
    free(f.sums);
    free(f.more);
    return rc;
}
