/* What each linear's error does to the end. Noise of the size and shape that quantizing to noise_bits leaves is put into one
 * linear at a time: first, into a model that is exact otherwise, and last, on top of a model with noise in all linears, there
 * once more to the noise it has (four times the energy: the rise counts a third). What the linear adds to the KL of the logits
 * on a few rows of text, the mean of both, is its cost at noise_bits; it is taken to be proportional to the error of the search
 * at other K, and twice that at K = 1 (allocate.h adds costs up).
 *
 * Neither alone plans well. In an exact model the smallest noise in an early layer sends tokens to other experts, which costs
 * as much as larger noise would; in the noisy model that has happened already, and nothing seems to be gained by less noise in
 * attention, until all of it is better. The mean of what something adds as the first and as the last is the short form of its
 * mean over all orders (Shapley value).
 *
 * Every linear is a path of hidden states of its own, two of them; a pass over the layers carries as many as the
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
