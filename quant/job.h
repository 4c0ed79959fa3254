/* A quantization job, from options to a finished pack. job.c tells the order of work; it survives being killed at any
 * moment (job_state.h) and computes the same bytes whether or not it was.
 *
 *     x3_job_open    reads and checks everything that can be checked without computing, plans pack, memory, disk, time
 *     x3_job_run     computes and writes
 *     x3_job_close
 *
 * State after a failure of x3_job_run: no pack; finished layers stay in the work folder and the part files, and a job
 * with the same options and `resume` goes on from there. */
#ifndef X3_JOB_H
#define X3_JOB_H

#include "calib/capture.h"
#include "calib/corpus.h"
#include "calib/hidden_state.h"
#include "quant/allocate.h"
#include "quant/quantize.h"
#include "runtime/checkpoint.h"

/* Which Hessian gate and up of experts get. AUTO is OWN where those of all experts of a layer take at most
 * X3_OWN_HESSIAN_BYTES, else LAYER: a rule of the model alone, since the bytes of the pack depend on it. */
typedef enum x3_expert_hessian { X3_EXPERT_HESSIAN_AUTO, X3_EXPERT_HESSIAN_LAYER, X3_EXPERT_HESSIAN_OWN } x3_expert_hessian;

#define X3_OWN_HESSIAN_BYTES ((uint64_t)8 << 30)

bool x3_expert_hessian_parse(const char *name, x3_expert_hessian *out);
bool x3_expert_weighting_parse(const char *name, x3_expert_weighting *out);
const char *x3_expert_weighting_name(x3_expert_weighting weighting);

typedef struct x3_job_options {
    const char *model, *out;
    const char *work; /* NULL: "<out>.work" */
    const char *recipe; /* file; NULL: `bits` uniformly */
    bool planned;       /* with no recipe yet: the job is only opened for its checks, a recipe is to come */
    double bits;        /* with a recipe these two are the recipe's */
    int head_bits;      /* 0: the head stays as it is */
    int mtp_bits;       /* of the draft layer's linears; 0: draft layers are carried as they are */
    x3_tie tie;
    x3_quant_options quant;
    x3_expert_hessian expert_hessian;
    x3_expert_weighting expert_weighting;
    size_t min_expert_tokens; /* an expert with fewer calibration tokens is refused; 0: none is */
    const char *const *texts;
    size_t n_texts, rows, cols;
    uint64_t memory_bytes; /* of the host; 0: four fifths of what it has */
    uint64_t device_memory_bytes; /* of a device with memory of its own; 0, or more than is free: what is free */
    const char *device;
    int n_threads;
    bool resume, overwrite;
    bool other_kernels;               /* resume on another kernel set */
    const char *const *ignored_options; /* config keys, NULL-terminated; may be NULL */
    const char *command;              /* for the receipt */
} x3_job_options;

typedef struct x3_job_events {
    /* done of total are weights to encode; what: "scan", "copy", "model.layers.3", "lm_head", "commit". May be NULL. */
    void (*progress)(void *arg, double done, double total, const char *what);
    /* Something a user must hear: an uncalibrated group, dropped positions, fewer rows than asked for. */
    void (*note)(void *arg, const char *text);
    void *arg;
} x3_job_events;

typedef struct x3_job_summary {
    size_t n_layers, n_groups, n_kept, n_dropped, n_copied_files, n_left_files;
    uint64_t source_bytes, pack_bytes, n_weights; /* weights: padded, head included */
    double body_bits;
    int head_bits, mtp_bits;
    size_t n_shards, rows, cols, n_padded_linears;
    uint64_t hidden_bytes, peak_bytes, memory_bytes; /* states of all paths; estimate of the whole; budget, of the host */
    uint64_t device_bytes, device_free; /* estimate, and what is free, on a device with memory of its own; else 0 */
    x3_hidden_place hidden_place;
    size_t n_experts, experts_at_once, expert_passes; /* of the layer with most; 0: none. Experts whose Hessians are held
                                                       * together, and runs over the text a layer that follow from it */
    bool own_hessians;
    uint64_t out_needed, out_free, work_needed, work_free; /* disk */
    double seconds; /* estimate, from a short measurement; 0: none was made */
} x3_job_summary;

typedef struct x3_job x3_job;

/* True when `resume` was asked for and the output already is the finished pack of this very job. */
bool x3_job_is_done(const x3_job *job);
/* With n_texts 0 nothing is tokenized and the job cannot be run (check). */
x3_status x3_job_open(x3_job **out, const x3_job_options *options, const x3_job_events *events, x3_findings *findings,
                      x3_err *err) X3_MUST;
const x3_job_summary *x3_job_describe(const x3_job *job);
/* Borrowed views for printing. */
const x3_checkpoint *x3_job_source(const x3_job *job);
const x3_allocation *x3_job_allocation(const x3_job *job);
x3_status x3_job_run(x3_job *job, x3_err *err) X3_MUST;
/* The pack's receipt after x3_job_run. */
const cJSON *x3_job_receipt(const x3_job *job);
void x3_job_close(x3_job *job);

#endif
