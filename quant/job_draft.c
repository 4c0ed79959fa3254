/* The draft layer (MTP) of a job with mtp_bits, after everything else: its Hessians come from what it really reads on both
 * paths, the states after the last layer and the embedding of the next token, through its norms and join. Every row has one
 * position less: the last one has no next token. The states of the model make room for those of the draft layer. */
#include <stdio.h>
#include <string.h>

#include "quant/job_internal.h"
#include "runtime/draft.h"

struct draft_work {
    x3_job *job;
    x3_draft *draft;
    float *d_norm;    /* of the model's final norm */
    float *d_q, *d_f; /* inputs of join on both paths; d_f NULL without an original path */
    x3_weight join;
    x3_quant_linear linear; /* join quantized */
};

/* Rows [row, row + n) of a path as join reads them. */
static x3_status load_inputs(struct draft_work *t, x3_hidden_state *path, size_t row, size_t n, float *d_out, x3_err *err)
{
    x3_layer_runner *r = &t->job->runner;
    const x3_model *m = t->job->source->model;
    x3_status rc;

    X3_TRY(rc, out, x3_load_rows(r, path, row, n, r->d_x, err));
    X3_TRY(rc, out, r->dev->ops->rms_norm(r->dev, r->d_x, m->hidden, n * r->n_cols, m->hidden, t->d_norm, m->norm_eps, r->d_x,
                                          m->hidden, err));
    rc = x3_draft_inputs(t->draft, t->job->ids + row * r->n_cols, n, r->d_x, d_out, err);
out:
    return rc;
}

static x3_status capture_join(struct draft_work *t, x3_hessian **h, x3_err *err)
{
    x3_layer_runner *r = &t->job->runner;
    x3_status rc;

    X3_TRY(rc, out, x3_hessian_create(h, t->job->dev, 2 * r->hidden, t->d_f != NULL, err));
    for (size_t row = 0; row < r->n_rows; row += r->at_once) {
        const size_t n = x3_min_size(r->at_once, r->n_rows - row);
        X3_TRY(rc, out, load_inputs(t, t->job->quantized, row, n, t->d_q, err));
        if (t->d_f != NULL)
            X3_TRY(rc, out, load_inputs(t, t->job->original, row, n, t->d_f, err));
        X3_TRY(rc, out, x3_hessian_add(*h, t->d_q, t->d_f, n * (r->n_cols - 1), err));
    }
    rc = x3_hessian_finish(*h, err);
out:
    return rc;
}

/* All rows of a path through join; its outputs take the place of the states. */
static x3_status run_join(struct draft_work *t, const x3_weight *w, x3_hidden_state *path, x3_err *err)
{
    x3_layer_runner *r = &t->job->runner;
    const size_t floats = (r->n_cols - 1) * r->hidden;
    x3_status rc = X3_OK;

    for (size_t row = 0; row < r->n_rows; row += r->at_once) {
        const size_t n = x3_min_size(r->at_once, r->n_rows - row);
        X3_TRY(rc, out, load_inputs(t, path, row, n, t->d_q, err));
        X3_TRY(rc, out, t->job->dev->ops->linear(t->job->dev, w, t->d_q, 2 * r->hidden, n * (r->n_cols - 1), r->d_x, r->hidden,
                                                 err));
        X3_TRY(rc, out, x3_hidden_state_store_part(path, row, n, 0, floats, r->d_x, err));
    }
out:
    return rc;
}

/* The states have been written; on disk they move on to the next file. */
static x3_status pass_states(x3_job *job, x3_err *err)
{
    x3_hidden_state *paths[] = {job->quantized, job->original};
    uint64_t hash;
    x3_status rc = X3_OK;

    for (int i = 0; i < 2 && rc == X3_OK; i++)
        if (paths[i] != NULL && job->summary.hidden_place == X3_HIDDEN_DISK)
            rc = x3_hidden_state_advance(paths[i], &hash, err);
        else if (paths[i] != NULL)
            x3_hidden_state_pass(paths[i]);
    return rc;
}

static x3_status quantize_join(struct draft_work *t, cJSON *entries, x3_err *err)
{
    x3_job *job = t->job;
    const x3_planned_group *planned = &job->plan->groups[job->plan->head + 1];
    x3_hessian *h = NULL;
    cJSON *entry = NULL;
    char group[512];
    x3_status rc;

    snprintf(group, sizeof group, "%s.input", planned->linear->name);
    X3_TIMED(job, X3_STAGE_CAPTURE, rc, out, capture_join(t, &h, err));
    X3_TIMED(job, X3_STAGE_LOAD, rc, out, x3_linear_load(&t->join, job->dev, job->source, planned->linear, err));
    X3_TRY(rc, out, x3_job_quantize(job, planned, &t->join, &t->linear, 1, group, h, SIZE_MAX, &entry, err));
    rc = x3_json_add(entries, NULL, entry, err);
out:
    x3_hessian_free(h);
    return rc;
}

static x3_status join_states(x3_job *job, cJSON *entries, x3_err *err)
{
    const x3_layer_runner *r = &job->runner;
    const size_t floats = r->at_once * (r->n_cols - 1) * 2 * r->hidden;
    struct draft_work t = {.job = job};
    x3_status rc;

    X3_TRY(rc, out, x3_draft_create(&t.draft, job->dev, job->source, r->at_once, r->n_cols, err));
    X3_TRY(rc, out, x3_vector_load(&t.d_norm, job->dev, job->source, &job->source->model->final_norm, err));
    X3_TRY(rc, out, x3_device_floats(job->dev, &t.d_q, floats, err));
    if (job->original != NULL)
        X3_TRY(rc, out, x3_device_floats(job->dev, &t.d_f, floats, err));
    X3_TRY(rc, out, quantize_join(&t, entries, err));
    X3_TIMED(job, X3_STAGE_FORWARD, rc, out, run_join(&t, &t.linear.weight, job->quantized, err));
    if (job->original != NULL)
        X3_TIMED(job, X3_STAGE_FORWARD, rc, out, run_join(&t, &t.join, job->original, err));
    rc = pass_states(job, err);
out:
    x3_quant_linear_free(job->dev, &t.linear);
    x3_linear_free(&t.join, job->dev);
    x3_device_free(job->dev, t.d_norm);
    x3_device_free(job->dev, t.d_q);
    x3_device_free(job->dev, t.d_f);
    x3_draft_free(t.draft);
    return rc;
}

x3_status x3_job_draft(x3_job *job, cJSON *entries, x3_err *err)
{
    const x3_model *m = job->source->model;
    const size_t n_cols = job->o.cols - 1, first = job->plan->head + 1, last = job->plan->n_groups - 1;
    x3_status rc;

    X3_TRY(rc, out, join_states(job, entries, err));
    x3_layer_runner_free(&job->runner);
    X3_TRY(rc, out, x3_layer_runner_create(&job->runner, job->dev, m, job->n_rows, n_cols, err));
    X3_TRY(rc, out, x3_job_layer(job, m->n_layers, entries, err));
    if (last == first + m->layers[m->n_layers].n_linears || job->plan->groups[last].K == 0)
        goto out; /* no head of its own */
    X3_TRY(rc, out, pass_states(job, err));
    rc = x3_job_head(job, &job->plan->groups[last], &m->draft->out_norm, entries, err);
out:
    return rc;
}
