/* Quantizing the linears that share one input: from weights and second moments to EXL3 groups.
 *
 * Order of work, a file each:
 *   target.c      T = W + alpha W (C - A) A^-1, the half-way target (design/quality.md)
 *   regularize.c  signs, output and input scales, Hadamard on both sides; A rotated alike
 *   group.c       this order; scale of the codes, block LDL, LDLQ with the trellis search (device.ldlq)
 *   refit.c       svh and suh by least squares under A once the codes are known
 *   metrics.c     relative output errors
 *   noise.c       noise in place of codes, for measurements
 *
 * Sides: a weight is W [n_out][n_in] as on disk until regularize.c transposes it to [n_in][n_out]; sizes with
 * `_padded` are rounded up to 128. */
#ifndef X3_QUANTIZE_H
#define X3_QUANTIZE_H

#include "calib/hessian.h"

typedef struct x3_quant_options {
    x3_codebook codebook;
    double target_blend; /* alpha: 0 aims at W, 1 at the original output */
    double damping;      /* lambda as a part of the mean diagonal of A; the peer's and our default is 0.025 */
    int refit_rounds;    /* 0 leaves the scales as regularize.c made them */
    uint64_t seed;
    bool noise;          /* noise of the size and shape of the error of K bits in place of codes (measure.h): the results
                            are dense weights, with no trellis and no scales */
} x3_quant_options;

#define X3_QUANT_DEFAULTS \
    ((x3_quant_options){.codebook = X3_CB_MUL1, .target_blend = 0.5, .damping = 0.025, .refit_rounds = 2, .seed = 1})

/* One linear in, one EXL3 group out. */
typedef struct x3_quant_linear {
    const char *name; /* of the module; seeds its output signs */
    size_t n_in, n_out;
    int K;
    const float *d_w; /* [n_out][n_in], finite */

    /* results, filled by x3_quantize_group, released by x3_quant_linear_free */
    x3_weight weight;      /* in device memory; no bias */
    uint16_t *suh, *svh;   /* the same scales in host memory */
    size_t trellis_bytes;
    double scale;          /* codes per unit of the regularized weight */
    double error_source;   /* tr(E' A E) / tr(W' A W), undamped A, E of the effective weight against W */
    double error_target;   /* the same with E against T */
    double error_weight;   /* |E|^2 / |W|^2 against W */
    double energy;         /* tr(W' A W) of the mean A: mean square of the output, summed over outputs */
} x3_quant_linear;

void x3_quant_linear_free(x3_device *dev, x3_quant_linear *q);

/* Quantizes n linears of one input. `group` seeds the input signs that they share. h is finished and not changed;
 * with no rows in it, or a mean diagonal under 1e-20, the identity takes its place (uncalibrated) and *uncalibrated is
 * set: the caller says so aloud. On failure no results are held. */
x3_status x3_quantize_group(x3_device *dev, const x3_quant_options *options, const char *group, const x3_hessian *h,
                            x3_quant_linear *linears, size_t n, bool *uncalibrated, x3_err *err) X3_MUST;

/* ---- steps, for group.c and the tests -------------------------------------------------------------------- */

/* A of a group, padded and damped. */
typedef struct x3_quant_input {
    x3_device *dev;
    size_t n, n_padded;
    float *d_a;      /* [n_padded][n_padded], mean + lambda I; the padded inputs have a small diagonal of their own */
    float *damping;  /* host, [n_padded]: what was added to the diagonal */
    float *signs;    /* host, [n_padded] */
    bool uncalibrated;
} x3_quant_input;

x3_status x3_quant_input_create(x3_quant_input *in, x3_device *dev, const x3_quant_options *options, const char *group,
                                const x3_hessian *h, size_t n, x3_err *err) X3_MUST;
void x3_quant_input_free(x3_quant_input *in);

/* d_t [n_out][n_in] := W + alpha W (C - A) A^-1. */
x3_status x3_quant_target(const x3_quant_input *in, const x3_hessian *h, double alpha, const float *d_w, size_t n_out,
                          float *d_t, x3_err *err) X3_MUST;

/* The regularized weight of one linear: d_r = Hd diag(1 / input) Wt diag(1 / output) Hd with unit mean square, where
 * input = sign * scale and output likewise. */
typedef struct x3_regular {
    size_t n_in, n_out, n_in_padded, n_out_padded;
    float *d_r;              /* [n_in_padded][n_out_padded] */
    float *input, *output;   /* host; output is 0 for outputs that are zero in the source and for padding */
} x3_regular;

/* Output scales, then the transform over outputs; d_r is then ready for x3_regular_inputs. */
x3_status x3_regular_outputs(x3_regular *g, x3_device *dev, const x3_quant_options *options, const char *name,
                             const float *d_t, size_t n_out, size_t n_in, x3_err *err) X3_MUST;
/* Input scales shared by n linears, then the transform over inputs. */
x3_status x3_regular_inputs(x3_regular *g, size_t n, x3_device *dev, const x3_quant_input *in, x3_err *err) X3_MUST;
void x3_regular_free(x3_device *dev, x3_regular *g);

/* d_l := L of Hd diag(input) A diag(input) Hd. More damping on failure, ten tries. */
x3_status x3_quant_factor(const x3_quant_input *in, const float *input, float *d_l, x3_err *err) X3_MUST;

/* suh [n_in_padded], svh [n_out_padded] by alternating least squares against Tt [n_in_padded][n_out_padded];
 * d_q = Hd codes Hd. */
x3_status x3_quant_refit(const x3_quant_input *in, const float *d_tt, const float *d_q, size_t n_out, size_t n_out_padded,
                         int rounds, float *suh, float *svh, x3_err *err) X3_MUST;

/* The diagonal of a [n][n], to host memory. */
x3_status x3_quant_diagonal(x3_device *dev, const float *d_a, size_t n, float *out, x3_err *err) X3_MUST;

/* sum over outputs of e_j' (A - damping) e_j, and sum of squares of e; e [n_padded][n_cols] in device memory. */
x3_status x3_quant_error(const x3_quant_input *in, const float *d_e, size_t n_cols, double *output_error,
                         double *squares, x3_err *err) X3_MUST;

/* Best scale of unit Gaussian input for a codebook and K; its mean squared error there (design/quality.md). */
double x3_quant_nominal_scale(x3_codebook codebook, int K);
double x3_quant_tile_error(x3_codebook codebook, int K);

/* noise.c: d_q [n][n_cols] += E, distributed as the error that LDLQ would leave with a search of mean squared error
 * `variance`: white noise fed back through L from the last row of tiles to the first. `name` and seed make the noise. */
x3_status x3_quant_add_noise(x3_device *dev, const float *d_l, size_t n, float *d_q, size_t n_cols, double variance,
                             const char *name, uint64_t seed, x3_err *err) X3_MUST;

#endif
