/* What each linear's error does to the end: noise of the size and shape that quantizing to noise_bits leaves is put
 * into all linears of the model, and into one at a time twice of it (four times the energy: about a bit less). The rise of
 * the KL of the logits on a few rows of text, by a third, is the linear's cost at noise_bits; it is taken to be
 * proportional to the error of the search at other K (allocate.h adds costs up). The rise is measured in the noisy model
 * because the plan is for one: costs in an otherwise exact model are too high for attention and for early layers, by up to
 * four times, against those of single experts and late layers.
 *
 * Every linear with twice the noise is a path of hidden states of its own; a pass over the layers carries as many as the
 * memory holds, so a model is read once, or a few times. Finished passes are in the file, and a resumed measurement goes
 * on behind them. One measurement serves every size. */
#ifndef X3_MEASURE_H
#define X3_MEASURE_H

#include "quant/allocate.h"
#include "quant/job.h"

#define X3_MEASURE_K 3 /* default of noise_bits */

/* What to do with a file that is there: replace it; go on with it and refuse one of other options; go on with it if its
 * options are these, else replace it. */
typedef enum x3_measure_start { X3_MEASURE_NEW, X3_MEASURE_RESUME, X3_MEASURE_REUSE } x3_measure_start;

typedef struct x3_measure_options {
    const char *model, *out; /* folder; file to write */
    const char *const *texts;
    size_t n_texts, rows, cols; /* rows x cols calibrate the noise */
    size_t score_rows;          /* rows of 256 positions whose logits are compared */
    int noise_bits;             /* 1 to 8: near those of the plan is best */
    x3_codebook codebook;
    uint64_t seed, memory_bytes; /* of the host for hidden states; 0: half of what it has */
    const char *device;
    int n_threads;
    x3_measure_start start;
    bool other_kernels; /* a file of another kernel set may be gone on with */
    const char *const *ignored_options;
    const char *command;
} x3_measure_options;

/* The noise for plans of so many bits. */
static inline int x3_measure_noise_for(double bits)
{
    return bits < 1.5 ? 1 : bits > 7.5 ? 8 : (int)(bits + 0.5);
}

/* Text that datasets.txt lists for evaluation is refused. */
x3_status x3_measure_run(const x3_measure_options *options, const x3_job_events *events, x3_findings *findings,
                         x3_err *err) X3_MUST;

typedef struct x3_measurement {
    x3_codebook codebook;
    int noise_bits;
    size_t n;       /* linears of the layers, in the order of x3_model_linear */
    double *kl;     /* [n] cost in nats at noise_bits; 0 for what is not quantized or did nothing */
    uint64_t hash;  /* of the file */
} x3_measurement;

/* The file must be complete and of this model: same config.json, and the same headers of the shards. */
x3_status x3_measurement_load(x3_measurement *out, const char *path, const x3_checkpoint *source, x3_err *err) X3_MUST;
void x3_measurement_free(x3_measurement *m);

/* The part of the file that says which model it is of. */
x3_status x3_measure_source(cJSON **out, const x3_checkpoint *source, x3_err *err) X3_MUST;
/* cost [n][8] for x3_plan_request. */
x3_status x3_measurement_costs(const x3_measurement *m, double (**cost)[8], x3_err *err) X3_MUST;

#endif
