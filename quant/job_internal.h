/* The inside of a job, shared by job.c (the order of work), job_plan.c (checks), job_estimate.c and job_receipt.c. */
#ifndef X3_JOB_INTERNAL_H
#define X3_JOB_INTERNAL_H

#include "calib/capture.h"
#include "quant/job.h"
#include "quant/job_state.h"
#include "quant/pack_plan.h"

typedef enum x3_stage {
    X3_STAGE_SCAN, X3_STAGE_COPY, X3_STAGE_LOAD, X3_STAGE_CAPTURE, X3_STAGE_QUANTIZE, X3_STAGE_FORWARD, X3_STAGE_WRITE,
    X3_N_STAGES
} x3_stage;

struct x3_job {
    x3_job_options o;
    x3_job_events events;
    char *work;
    x3_device *dev;
    x3_checkpoint *source;
    x3_corpus *corpus;
    int32_t *ids;
    size_t n_rows;
    x3_allocation allocation;
    x3_pack_plan *plan;
    x3_pack_writer *writer;
    x3_names copied, left; /* side files */
    x3_job_summary summary;
    cJSON *identity;
    bool is_done;
    x3_expert_options experts; /* what the options come to for this model */

    /* while running */
    x3_layer_runner runner;
    x3_hidden_state *quantized, *original;
    cJSON **pending;       /* [n_layers], records of finished layers whose states have not been left behind yet */
    size_t saved_layer;    /* layers before the states that were */
    double saved_at;
    cJSON *groups;  /* entries of the receipt, in order of the model */
    double done;    /* weights encoded */
    double started, stage_seconds[X3_N_STAGES];
    cJSON *receipt;
};

void x3_job_note(const x3_job *job, const char *format, ...) X3_PRINTF(2, 3);
void x3_job_progress(const x3_job *job, const char *what);

/* job_estimate.c */
x3_status x3_job_estimate(x3_job *job, x3_err *err) X3_MUST;

/* job_plan.c */
x3_status x3_job_identity(const x3_job *job, cJSON **out, x3_err *err) X3_MUST;
/* Layers that this job runs: the model's, and the draft's when it is quantized. */
size_t x3_job_layers(const x3_job *job);
/* Refuses an output that is, holds, lies in or is linked to the input, that is not empty, or that another job left. */
x3_status x3_job_check_output(x3_job *job, x3_err *err) X3_MUST;

/* job_layer.c: quantizes linears that share the input of h, writes them, puts their receipt entries into entries[0 .. n).
 * dense [n]: the source weights in device memory. The quantized weights stay in `linears` for the caller. */
x3_status x3_job_quantize(x3_job *job, const x3_planned_group *planned, const x3_weight *dense, x3_quant_linear *linears,
                          size_t n, const char *group, const x3_hessian *h, size_t tokens, cJSON **entries, x3_err *err) X3_MUST;
/* Quantizes a head: a linear on the states after the last layer run so far, through this norm. */
x3_status x3_job_head(x3_job *job, const x3_planned_group *planned, const x3_vector_desc *norm, cJSON *entries,
                      x3_err *err) X3_MUST;
/* job_draft.c: the draft layer, after everything else; its states take the place of the model's. */
x3_status x3_job_draft(x3_job *job, cJSON *entries, x3_err *err) X3_MUST;
/* A layer (n_layers: the draft's) from statistics to quantized weights, its states on the quantized path included; entries (an array) in the order
 * of the model. */
x3_status x3_job_layer(x3_job *job, size_t layer, cJSON *entries, x3_err *err) X3_MUST;
/* Number of the layer's first linear in the plan. */
size_t x3_job_first_group(const x3_job *job, size_t layer);

/* Runs expr and adds its seconds to a stage. */
#define X3_TIMED(job, stage, rc, label, expr)                        \
    do {                                                             \
        double start_ = x3_seconds();                                \
        x3_status timed_ = (expr);                                   \
        (job)->stage_seconds[stage] += x3_seconds() - start_;        \
        X3_TRY(rc, label, timed_);                                   \
    } while (0)

/* job_receipt.c */
/* tokens: of the expert that the linear belongs to; SIZE_MAX: of none. */
x3_status x3_job_group_entry(cJSON **out, const x3_quant_linear *q, const x3_hessian *h, size_t tokens, bool uncalibrated,
                             x3_err *err) X3_MUST;
x3_status x3_job_write_receipt(x3_job *job, x3_err *err) X3_MUST;

#endif
