/* Making a weight look like the Gaussian noise that the trellis is good at: random signs, scales of outputs and
 * inputs, Hadamard on both sides (incoherence processing: Tseng et al., QuIP#, 2024). */
#include <math.h>
#include <stdlib.h>

#include "kernels/layout.h"
#include "quant/quantize.h"

/* A row or column whose norm is under this part of the mean counts as zero. */
#define NEGLIGIBLE 1e-12

void x3_regular_free(x3_device *dev, x3_regular *g)
{
    x3_device_free(dev, g->d_r);
    free(g->input);
    free(g->output);
    *g = (x3_regular){0};
}

/* norms[i] = root of sums[i], from device memory. */
static x3_status download_norms(x3_device *dev, const double *d_sums, double *norms, size_t n, x3_err *err)
{
    x3_status rc = dev->ops->download(dev, norms, d_sums, n * sizeof *norms, err);

    for (size_t i = 0; rc == X3_OK && i < n; i++)
        norms[i] = sqrt(norms[i]);
    return rc;
}

/* scales[i] := 1 / scales[i], zero stays zero. */
static void invert(float *scales, size_t n)
{
    for (size_t i = 0; i < n; i++)
        scales[i] = scales[i] == 0 ? 0 : 1 / scales[i];
}

/* A block that padding (or zeros) fills only in part has less energy after the transform: its scales are raised so that
 * every block comes out with the same mean square. */
static void level_blocks(float *scales, size_t n_padded)
{
    for (size_t b = 0; b < n_padded; b += X3_HADAMARD) {
        size_t n = 0;
        for (size_t i = b; i < b + X3_HADAMARD; i++)
            n += scales[i] != 0;
        for (size_t i = b; i < b + X3_HADAMARD; i++)
            scales[i] *= sqrtf((float)n / X3_HADAMARD);
    }
}

static x3_status upload_scaled(x3_device *dev, float *d_to, const float *scales, size_t n, x3_err *err)
{
    float *inverse = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&inverse, n, sizeof *inverse, err));
    for (size_t i = 0; i < n; i++)
        inverse[i] = scales[i];
    invert(inverse, n);
    X3_TRY(rc, out, dev->ops->upload(dev, d_to, inverse, n * sizeof *inverse, err));
    X3_TRY(rc, out, dev->ops->sync(dev, err));
out:
    free(inverse);
    return rc;
}

x3_status x3_regular_outputs(x3_regular *g, x3_device *dev, const x3_quant_options *options, const char *name,
                             const float *d_t, size_t n_out, size_t n_in, x3_err *err)
{
    const x3_device_ops *ops = dev->ops;
    const size_t rows = x3_round_up(n_in, X3_HADAMARD), cols = x3_round_up(n_out, X3_HADAMARD);
    double *d_sums = NULL, *norms = NULL, mean = 0;
    float *d_scales = NULL, *signs = NULL;
    size_t n_live = 0;
    x3_rng rng;
    x3_status rc;

    *g = (x3_regular){.n_in = n_in, .n_out = n_out, .n_in_padded = rows, .n_out_padded = cols};
    X3_TRY(rc, out, x3_device_floats(dev, &g->d_r, rows * cols, err));
    X3_TRY(rc, out, x3_alloc(&g->input, rows, sizeof(float), err));
    X3_TRY(rc, out, x3_alloc(&g->output, cols, sizeof(float), err));
    X3_TRY(rc, out, x3_alloc(&norms, cols, sizeof *norms, err));
    X3_TRY(rc, out, x3_alloc(&signs, cols, sizeof *signs, err));
    X3_TRY(rc, out, x3_device_alloc(dev, &d_sums, cols * sizeof *d_sums, err));
    X3_TRY(rc, out, x3_device_floats(dev, &d_scales, cols, err));
    X3_TRY(rc, out, ops->transpose_pad(dev, d_t, n_out, n_in, g->d_r, cols, rows, err));
    X3_TRY(rc, out, ops->col_dots(dev, g->d_r, g->d_r, rows, cols, d_sums, err));
    X3_TRY(rc, out, download_norms(dev, d_sums, norms, cols, err));
    for (size_t j = 0; j < n_out; j++) {
        mean += norms[j];
        n_live += norms[j] > 0;
    }
    mean /= n_live == 0 ? 1 : (double)n_live;
    x3_rng_init(&rng, options->seed, name);
    x3_rng_signs(&rng, signs, cols);
    for (size_t j = 0; j < cols; j++)
        g->output[j] = norms[j] <= NEGLIGIBLE * mean ? 0 : signs[j] * (float)(norms[j] / mean);
    level_blocks(g->output, cols);
    X3_TRY(rc, out, upload_scaled(dev, d_scales, g->output, cols, err));
    X3_TRY(rc, out, ops->scale_cols(dev, g->d_r, rows, cols, d_scales, err));
    X3_TRY(rc, out, ops->hadamard_rows(dev, g->d_r, rows, cols, err));
out:
    free(norms);
    free(signs);
    x3_device_free(dev, d_sums);
    x3_device_free(dev, d_scales);
    if (rc != X3_OK)
        x3_regular_free(dev, g);
    return rc;
}

/* scales[i] = root mean square over all linears of row i, each linear counted with mean square 1. */
static x3_status shared_row_scales(const x3_regular *g, size_t n, x3_device *dev, size_t rows, double *scales, x3_err *err)
{
    double *d_sums = NULL, *sums = NULL;
    size_t outputs = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_device_alloc(dev, &d_sums, rows * sizeof *d_sums, err));
    X3_TRY(rc, out, x3_alloc(&sums, rows, sizeof *sums, err));
    for (size_t k = 0; k < n; k++) {
        double total = 0;
        X3_TRY(rc, out, dev->ops->row_dots(dev, g[k].d_r, g[k].d_r, rows, g[k].n_out_padded, d_sums, err));
        X3_TRY(rc, out, dev->ops->download(dev, sums, d_sums, rows * sizeof *sums, err));
        for (size_t i = 0; i < rows; i++)
            total += sums[i];
        for (size_t i = 0; i < rows && total > 0; i++)
            scales[i] += sums[i] * (double)(g[k].n_in * g[k].n_out) / total;
        outputs += total > 0 ? g[k].n_out : 0;
    }
    for (size_t i = 0; i < rows && outputs > 0; i++)
        scales[i] = sqrt(scales[i] / (double)outputs);
out:
    x3_device_free(dev, d_sums);
    free(sums);
    return rc;
}

/* One linear: rows divided by the shared scales, and by one number so that the mean square becomes 1. */
static x3_status apply_inputs(x3_regular *g, x3_device *dev, float *d_scales, double *d_sums, double *sums, x3_err *err)
{
    const size_t rows = g->n_in_padded, cols = g->n_out_padded;
    double total = 0;
    x3_status rc;

    X3_TRY(rc, out, upload_scaled(dev, d_scales, g->input, rows, err));
    X3_TRY(rc, out, dev->ops->scale_rows(dev, g->d_r, rows, cols, d_scales, err));
    X3_TRY(rc, out, dev->ops->row_dots(dev, g->d_r, g->d_r, rows, cols, d_sums, err));
    X3_TRY(rc, out, dev->ops->download(dev, sums, d_sums, rows * sizeof *sums, err));
    for (size_t i = 0; i < rows; i++)
        total += sums[i];
    double rms = sqrt(total / (double)(rows * cols));
    if (rms > 0)
        X3_TRY(rc, out, dev->ops->scale(dev, g->d_r, rows * cols, (float)(1 / rms), err));
    for (size_t i = 0; i < rows; i++)
        g->input[i] = rms > 0 ? (float)(g->input[i] * rms) : g->input[i];
    X3_TRY(rc, out, dev->ops->hadamard_cols(dev, g->d_r, rows, cols, err));
out:
    return rc;
}

x3_status x3_regular_inputs(x3_regular *g, size_t n, x3_device *dev, const x3_quant_input *in, x3_err *err)
{
    const size_t rows = in->n_padded;
    double *scales = NULL, *d_sums = NULL, *sums = NULL, mean = 0;
    float *d_scales = NULL, *shared = NULL;
    size_t n_live = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&scales, rows, sizeof *scales, err));
    X3_TRY(rc, out, x3_alloc(&sums, rows, sizeof *sums, err));
    X3_TRY(rc, out, x3_alloc(&shared, rows, sizeof *shared, err));
    X3_TRY(rc, out, x3_device_alloc(dev, &d_sums, rows * sizeof *d_sums, err));
    X3_TRY(rc, out, x3_device_floats(dev, &d_scales, rows, err));
    X3_TRY(rc, out, shared_row_scales(g, n, dev, rows, scales, err));
    for (size_t i = 0; i < in->n; i++) {
        mean += scales[i];
        n_live += scales[i] > 0;
    }
    mean = n_live == 0 ? 1 : mean / (double)n_live;
    /* A zero scale would make the rotated Hessian singular. An input whose weights are all zero gets a small one, so
     * that the codes there say next to nothing. */
    for (size_t i = 0; i < in->n; i++)
        shared[i] = in->signs[i] * (float)(scales[i] > 1e-3 * mean ? scales[i] : 1e-3 * mean);
    level_blocks(shared, rows);
    for (size_t i = in->n; i < rows; i++)
        shared[i] = in->signs[i] * (float)mean;
    for (size_t k = 0; k < n; k++) {
        for (size_t i = 0; i < rows; i++)
            g[k].input[i] = shared[i];
        X3_TRY(rc, out, apply_inputs(&g[k], dev, d_scales, d_sums, sums, err));
    }
out:
    free(scales);
    free(sums);
    free(shared);
    x3_device_free(dev, d_sums);
    x3_device_free(dev, d_scales);
    return rc;
}

x3_status x3_quant_factor(const x3_quant_input *in, const float *input, float *d_l, x3_err *err)
{
    const x3_device_ops *ops = in->dev->ops;
    const size_t n = in->n_padded;
    float *d_scales = NULL, *d_h = NULL, *extra = NULL;
    double mean = 0;
    x3_err failed = {0};
    x3_status rc;

    X3_TRY(rc, out, x3_device_floats(in->dev, &d_scales, n, err));
    X3_TRY(rc, out, x3_device_floats(in->dev, &d_h, n * n, err));
    X3_TRY(rc, out, x3_alloc(&extra, n, sizeof *extra, err));
    X3_TRY(rc, out, ops->upload(in->dev, d_scales, input, n * sizeof(float), err));
    X3_TRY(rc, out, ops->copy(in->dev, d_h, in->d_a, n * n * sizeof(float), err));
    X3_TRY(rc, out, ops->scale_rows(in->dev, d_h, n, n, d_scales, err));
    X3_TRY(rc, out, ops->scale_cols(in->dev, d_h, n, n, d_scales, err));
    X3_TRY(rc, out, ops->hadamard_rows(in->dev, d_h, n, n, err));
    X3_TRY(rc, out, ops->hadamard_cols(in->dev, d_h, n, n, err));
    for (size_t i = 0; i < in->n; i++)
        mean += (double)in->damping[i] * input[i] * input[i] / (double)in->n;
    for (int attempt = 0; attempt < 10; attempt++) {
        if (attempt > 0) {
            for (size_t i = 0; i < n; i++)
                extra[i] = (float)(mean * (1 << attempt));
            X3_TRY(rc, out, ops->upload(in->dev, d_scales, extra, n * sizeof(float), err));
            X3_TRY(rc, out, ops->add_diagonal(in->dev, d_h, n, d_scales, err));
        }
        X3_TRY(rc, out, ops->copy(in->dev, d_l, d_h, n * n * sizeof(float), err));
        failed = (x3_err){0};
        rc = ops->block_ldl(in->dev, d_l, n, &failed);
        if (rc != X3_ERR_NUMERIC)
            break;
    }
    if (rc != X3_OK)
        rc = x3_fail(err, rc, "Hessian: %s", failed.text);
out:
    x3_device_free(in->dev, d_scales);
    x3_device_free(in->dev, d_h);
    free(extra);
    return rc;
}
