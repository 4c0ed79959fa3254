/* The order of work for the linears of one input; quantize.h names the file of each step. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"
#include "quant/quantize.h"

double x3_quant_nominal_scale(x3_codebook codebook, int K)
{
    static const double mul1[] = {1.13, 1.003, .933, .915, .887, .852, .824, .812};
    static const double sums[] = {1.43, 1.26, 1.18, 1.125, 1.083, 1.02, .98, .955};

    return codebook == X3_CB_MUL1 ? mul1[K - 1] : sums[K - 1];
}

double x3_quant_tile_error(x3_codebook codebook, int K)
{
    static const double mul1[] = {.2702, .06813, .01729, .00443, 1.146e-3, 3.0e-4, 8.0e-5, 2.05e-5};
    static const double mcg[] = {.2653, .06821, .01738, .00451, 1.186e-3, 3.17e-4, 8.67e-5, 2.71e-5};
    static const double inst3[] = {.2655, .06854, .01767, .00459, 1.198e-3, 3.20e-4, 8.67e-5, 2.65e-5};

    return codebook == X3_CB_MUL1 ? mul1[K - 1] : codebook == X3_CB_MCG ? mcg[K - 1] : inst3[K - 1];
}

void x3_quant_linear_free(x3_device *dev, x3_quant_linear *q)
{
    x3_device_free(dev, (void *)(uintptr_t)q->weight.data);
    x3_device_free(dev, (void *)(uintptr_t)q->weight.suh);
    x3_device_free(dev, (void *)(uintptr_t)q->weight.svh);
    free(q->suh);
    free(q->svh);
    q->weight = (x3_weight){0};
    q->suh = q->svh = NULL;
}

/* What one linear holds on the way. */
struct work {
    x3_regular regular;
    float *d_t;     /* target [n_out][n_in] */
    float *d_q;     /* codes [n_in_padded][n_out_padded], later with Hadamard on both sides */
    float *suh, *svh;
};

static void free_work(x3_device *dev, struct work *w)
{
    x3_regular_free(dev, &w->regular);
    x3_device_free(dev, w->d_t);
    x3_device_free(dev, w->d_q);
    free(w->suh);
    free(w->svh);
}

static x3_status prepare(struct work *w, const x3_quant_input *in, const x3_hessian *h, const x3_quant_options *options,
                         const x3_quant_linear *q, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, x3_device_floats(in->dev, &w->d_t, q->n_out * q->n_in, err));
    X3_TRY(rc, out, x3_quant_target(in, h, options->target_blend, q->d_w, q->n_out, w->d_t, err));
    X3_TRY(rc, out, x3_regular_outputs(&w->regular, in->dev, options, q->name, w->d_t, q->n_out, q->n_in, err));
out:
    return rc;
}

/* Mean over inputs of the squared feedback weights: column sums of L^2 without the unit diagonal. */
static x3_status feedback_energy(const x3_quant_input *in, const float *d_l, double *energy, x3_err *err)
{
    const size_t n = in->n_padded;
    double *d_sums = NULL, *sums = NULL;
    x3_status rc;

    *energy = 0;
    X3_TRY(rc, out, x3_device_alloc(in->dev, &d_sums, n * sizeof *d_sums, err));
    X3_TRY(rc, out, x3_alloc(&sums, n, sizeof *sums, err));
    X3_TRY(rc, out, in->dev->ops->row_dots(in->dev, d_l, d_l, n, n, d_sums, err));
    X3_TRY(rc, out, in->dev->ops->download(in->dev, sums, d_sums, n * sizeof *sums, err));
    for (size_t i = 0; i < n; i++)
        *energy += (sums[i] - 1) / (double)n;
out:
    x3_device_free(in->dev, d_sums);
    free(sums);
    return rc;
}

/* What the search sees is the regularized weight (mean square 1) plus the errors that come back through L; the scale
 * that is best for a unit Gaussian is divided by the root of their mean square. */
static double code_scale(x3_codebook codebook, int K, double energy)
{
    return x3_quant_nominal_scale(codebook, K) / sqrt(1 + 1.1 * exp2(-2 * K) * energy);
}

/* The regularized weights with noise in the place of the error of codes. */
static x3_status disturb(struct work *w, x3_quant_linear *q, const x3_quant_input *in, const x3_quant_options *options,
                         const float *d_l, x3_err *err)
{
    const x3_regular *g = &w->regular;
    const size_t size = g->n_in_padded * g->n_out_padded;
    x3_status rc;

    q->scale = 1;
    X3_TRY(rc, out, x3_device_floats(in->dev, &w->d_q, size, err));
    X3_TRY(rc, out, in->dev->ops->copy(in->dev, w->d_q, g->d_r, size * sizeof(float), err));
    rc = x3_quant_add_noise(in->dev, d_l, in->n_padded, w->d_q, g->n_out_padded,
                            x3_quant_tile_error(options->codebook, q->K), q->name, options->seed, err);
out:
    return rc;
}

/* Makes the regularized weights of all linears into codes: d_q and the words of the trellis. */
static x3_status encode(struct work *work, x3_quant_linear *linears, size_t n, const x3_quant_input *in,
                        const x3_quant_options *options, x3_err *err)
{
    x3_device *dev = in->dev;
    x3_ldlq_job *jobs = NULL;
    float *d_l = NULL;
    double energy;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&jobs, n, sizeof *jobs, err));
    X3_TRY(rc, out, x3_device_floats(dev, &d_l, in->n_padded * in->n_padded, err));
    X3_TRY(rc, out, x3_quant_factor(in, work[0].regular.input, d_l, err));
    for (size_t i = 0; i < n && options->noise; i++)
        X3_TRY(rc, out, disturb(&work[i], &linears[i], in, options, d_l, err));
    if (options->noise)
        goto out;
    X3_TRY(rc, out, feedback_energy(in, d_l, &energy, err));
    for (size_t i = 0; i < n; i++) {
        const x3_regular *g = &work[i].regular;
        x3_quant_linear *q = &linears[i];
        void *words = NULL;
        q->scale = code_scale(options->codebook, q->K, energy);
        q->trellis_bytes = g->n_in_padded * g->n_out_padded / 8 * (size_t)q->K;
        X3_TRY(rc, out, dev->ops->scale(dev, g->d_r, g->n_in_padded * g->n_out_padded, (float)q->scale, err));
        X3_TRY(rc, out, x3_device_floats(dev, &work[i].d_q, g->n_in_padded * g->n_out_padded, err));
        X3_TRY(rc, out, x3_device_alloc(dev, &words, q->trellis_bytes, err));
        q->weight = (x3_weight){.kind = X3_WEIGHT_EXL3, .n_in = q->n_in, .n_out = q->n_out,
                                .n_in_padded = g->n_in_padded, .n_out_padded = g->n_out_padded, .K = q->K,
                                .codebook = options->codebook, .data = words};
        jobs[i] = (x3_ldlq_job){.codebook = options->codebook, .K = q->K, .n_out = g->n_out_padded, .d_w = g->d_r,
                                .d_q = work[i].d_q, .d_words = words};
    }
    rc = dev->ops->ldlq(dev, d_l, in->n_padded, jobs, n, err);
out:
    x3_device_free(dev, d_l);
    free(jobs);
    return rc;
}

/* float16 of v, kept finite and never rounded from something to nothing. */
static uint16_t to_f16(float v)
{
    if (fabsf(v) > 65504)
        v = v > 0 ? 65504 : -65504;
    uint16_t bits = x3_f32_to_f16(v);
    return (bits & 0x7FFF) == 0 && v != 0 ? (uint16_t)(bits | 1) : bits;
}

/* Scales of the two sides multiply, so a power of two may move between them: far from 1 float16 runs out of digits. */
static void balance(float *suh, size_t n_in, float *svh, size_t n_out)
{
    double in = 0, out = 0;

    for (size_t i = 0; i < n_in; i++)
        in = fmax(in, fabsf(suh[i]));
    for (size_t j = 0; j < n_out; j++)
        out = fmax(out, fabsf(svh[j]));
    if (in == 0 || out == 0 || (in > 0x1p-8 && in < 0x1p8 && out > 0x1p-8 && out < 0x1p8))
        return;
    float shift = (float)exp2(rint((log2(out) - log2(in)) / 2));
    for (size_t i = 0; i < n_in; i++)
        suh[i] *= shift;
    for (size_t j = 0; j < n_out; j++)
        svh[j] /= shift;
}

static x3_status upload_scales(x3_device *dev, const float *scales, size_t n, uint16_t **host, const uint16_t **d_bits,
                               x3_err *err)
{
    void *d = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(host, n, sizeof **host, err));
    for (size_t i = 0; i < n; i++)
        (*host)[i] = to_f16(scales[i]);
    X3_TRY(rc, out, x3_device_alloc(dev, &d, n * sizeof **host, err));
    *d_bits = d;
    X3_TRY(rc, out, dev->ops->upload(dev, d, *host, n * sizeof **host, err));
out:
    return rc;
}

/* error of q against `t` [n_out][n_in] relative to tr(W' A W) and |W|^2. d_effective is the quantized weight,
 * [n_in_padded][n_out_padded], and stays. */
static x3_status relative_error(const x3_quant_input *in, const x3_regular *g, const float *d_t, const float *d_w,
                                const float *d_effective, double *output_error, double *squares, double *energy, x3_err *err)
{
    const size_t size = g->n_in_padded * g->n_out_padded;
    double error, norm, error_squares, norm_squares;
    float *d_e = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_device_floats(in->dev, &d_e, size, err));
    X3_TRY(rc, out, in->dev->ops->transpose_pad(in->dev, d_w, g->n_out, g->n_in, d_e, g->n_out_padded, g->n_in_padded, err));
    X3_TRY(rc, out, x3_quant_error(in, d_e, g->n_out_padded, &norm, &norm_squares, err));
    if (d_t != d_w)
        X3_TRY(rc, out, in->dev->ops->transpose_pad(in->dev, d_t, g->n_out, g->n_in, d_e, g->n_out_padded,
                                                    g->n_in_padded, err));
    X3_TRY(rc, out, in->dev->ops->axpy(in->dev, -1, d_effective, d_e, size, err));
    X3_TRY(rc, out, x3_quant_error(in, d_e, g->n_out_padded, &error, &error_squares, err));
    *output_error = norm > 0 ? error / norm : 0;
    *energy = norm;
    *squares = norm_squares > 0 ? error_squares / norm_squares : 0;
out:
    x3_device_free(in->dev, d_e);
    return rc;
}

/* The effective weight on the real inputs and outputs: padded rows and columns do not count. */
static x3_status effective(const x3_quant_input *in, const x3_regular *g, float *d_q, const x3_quant_linear *q, x3_err *err)
{
    const size_t longest = x3_max_size(g->n_in_padded, g->n_out_padded);
    float *scales = NULL, *d_scales = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&scales, longest, sizeof *scales, err));
    X3_TRY(rc, out, x3_device_floats(in->dev, &d_scales, longest, err));
    for (size_t i = 0; i < g->n_in_padded; i++)
        scales[i] = i < g->n_in ? x3_f16_to_f32(q->suh[i]) : 0;
    X3_TRY(rc, out, in->dev->ops->upload(in->dev, d_scales, scales, g->n_in_padded * sizeof *scales, err));
    X3_TRY(rc, out, in->dev->ops->scale_rows(in->dev, d_q, g->n_in_padded, g->n_out_padded, d_scales, err));
    X3_TRY(rc, out, in->dev->ops->sync(in->dev, err));
    for (size_t j = 0; j < g->n_out_padded; j++)
        scales[j] = j < g->n_out ? x3_f16_to_f32(q->svh[j]) : 0;
    X3_TRY(rc, out, in->dev->ops->upload(in->dev, d_scales, scales, g->n_out_padded * sizeof *scales, err));
    X3_TRY(rc, out, in->dev->ops->scale_cols(in->dev, d_q, g->n_in_padded, g->n_out_padded, d_scales, err));
    X3_TRY(rc, out, in->dev->ops->sync(in->dev, err));
out:
    free(scales);
    x3_device_free(in->dev, d_scales);
    return rc;
}

/* The effective weight [n_in_padded][n_out_padded] as a dense one. */
static x3_status make_dense(struct work *w, x3_quant_linear *q, const x3_quant_input *in, x3_err *err)
{
    const x3_regular *g = &w->regular;
    float *d_weight = NULL;
    x3_status rc;

    X3_TRY(rc, out, in->dev->ops->transpose_pad(in->dev, w->d_q, g->n_in_padded, g->n_out_padded, g->d_r, g->n_in_padded,
                                                g->n_out_padded, err));
    X3_TRY(rc, out, x3_device_floats(in->dev, &d_weight, q->n_out * q->n_in, err));
    q->weight = (x3_weight){.kind = X3_WEIGHT_F32, .n_in = q->n_in, .n_out = q->n_out, .n_in_padded = q->n_in,
                            .n_out_padded = q->n_out, .data = d_weight};
    rc = in->dev->ops->copy_2d(in->dev, d_weight, q->n_in, g->d_r, g->n_in_padded, q->n_out, q->n_in, err);
out:
    return rc;
}

/* Scales from the regularization, fitted again, rounded; then the errors with the rounded ones. */
static x3_status finish(struct work *w, x3_quant_linear *q, const x3_quant_input *in, const x3_quant_options *options,
                        x3_err *err)
{
    const x3_regular *g = &w->regular;
    const x3_device_ops *ops = in->dev->ops;
    double unused;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&w->suh, g->n_in_padded, sizeof(float), err));
    X3_TRY(rc, out, x3_alloc(&w->svh, g->n_out_padded, sizeof(float), err));
    for (size_t i = 0; i < g->n_in_padded; i++)
        w->suh[i] = (float)(g->input[i] / q->scale);
    memcpy(w->svh, g->output, g->n_out_padded * sizeof(float));
    X3_TRY(rc, out, ops->hadamard_rows(in->dev, w->d_q, g->n_in_padded, g->n_out_padded, err));
    X3_TRY(rc, out, ops->hadamard_cols(in->dev, w->d_q, g->n_in_padded, g->n_out_padded, err));
    /* the regularized weight is no longer needed: its place takes the target, transposed */
    X3_TRY(rc, out, ops->transpose_pad(in->dev, w->d_t, g->n_out, g->n_in, g->d_r, g->n_out_padded, g->n_in_padded, err));
    X3_TRY(rc, out, x3_quant_refit(in, g->d_r, w->d_q, g->n_out, g->n_out_padded, options->refit_rounds, w->suh, w->svh,
                                   err));
    balance(w->suh, g->n_in_padded, w->svh, g->n_out_padded);
    X3_TRY(rc, out, upload_scales(in->dev, w->suh, g->n_in_padded, &q->suh, &q->weight.suh, err));
    X3_TRY(rc, out, upload_scales(in->dev, w->svh, g->n_out_padded, &q->svh, &q->weight.svh, err));
    X3_TRY(rc, out, effective(in, g, w->d_q, q, err));
    X3_TRY(rc, out, relative_error(in, g, q->d_w, q->d_w, w->d_q, &q->error_source, &q->error_weight, &q->energy, err));
    X3_TRY(rc, out, relative_error(in, g, w->d_t, q->d_w, w->d_q, &q->error_target, &unused, &unused, err));
    if (options->noise) {
        x3_device_free(in->dev, (void *)(uintptr_t)q->weight.suh);
        x3_device_free(in->dev, (void *)(uintptr_t)q->weight.svh);
        q->weight.suh = q->weight.svh = NULL;
        X3_TRY(rc, out, make_dense(w, q, in, err));
    }
    if (!isfinite(q->error_source) || !isfinite(q->error_target))
        rc = x3_fail(err, X3_ERR_NUMERIC, "%s: the error of the quantized weight is not finite", q->name);
out:
    return rc;
}

x3_status x3_quantize_group(x3_device *dev, const x3_quant_options *options, const char *group, const x3_hessian *h,
                            x3_quant_linear *linears, size_t n, bool *uncalibrated, x3_err *err)
{
    x3_regular *regular = NULL;
    struct work *work = NULL;
    x3_quant_input in = {0};
    x3_status rc;

    *uncalibrated = false;
    X3_TRY(rc, out, x3_alloc(&work, n, sizeof *work, err));
    X3_TRY(rc, out, x3_alloc(&regular, n, sizeof *regular, err));
    X3_TRY(rc, out, x3_quant_input_create(&in, dev, options, group, h, linears[0].n_in, err));
    *uncalibrated = in.uncalibrated;
    for (size_t i = 0; i < n; i++) {
        X3_TRY(rc, out, prepare(&work[i], &in, h, options, &linears[i], err));
        regular[i] = work[i].regular;
    }
    X3_TRY(rc, out, x3_regular_inputs(regular, n, dev, &in, err));
    X3_TRY(rc, out, encode(work, linears, n, &in, options, err));
    for (size_t i = 0; i < n; i++)
        X3_TRY(rc, out, finish(&work[i], &linears[i], &in, options, err));
out:
    for (size_t i = 0; work != NULL && i < n; i++) {
        free_work(dev, &work[i]);
        if (rc != X3_OK)
            x3_quant_linear_free(dev, &linears[i]);
    }
    x3_quant_input_free(&in);
    free(work);
    free(regular);
    return rc;
}
