/* Everything about a job that can be known before it computes: inputs, output, plan. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/exl3.h"
#include "quant/job_internal.h"
#include "quant/plan.h"

/* ---- output ---- */

static x3_status is_empty(const char *dir, bool *empty, x3_err *err)
{
    x3_names names;
    x3_status rc = x3_list_dir(&names, dir, err);

    if (rc == X3_OK) {
        *empty = names.n_items == 0;
        x3_names_free(&names);
    }
    return rc;
}

/* The receipt in the output folder is that of a job with these options. */
static x3_status is_finished(const x3_job *job, const char *const *skipped, bool *finished, x3_err *err)
{
    char *path = NULL, *config = NULL;
    cJSON *receipt = NULL;
    x3_status rc;

    *finished = false;
    X3_TRY(rc, out, x3_path_join(&path, job->o.out, "exl3_receipt.json", err));
    X3_TRY(rc, out, x3_path_join(&config, job->o.out, "config.json", err));
    if (!x3_path_exists(path) || !x3_path_exists(config))
        goto out;
    X3_TRY(rc, out, x3_json_load(&receipt, path, err));
    *finished = x3_job_state_equal(x3_json_get(receipt, "options"), job->identity, skipped);
out:
    free(path);
    free(config);
    cJSON_Delete(receipt);
    return rc;
}

x3_status x3_job_check_output(x3_job *job, x3_err *err)
{
    /* a job that is still to be planned does not know its bits */
    static const char *const bits[] = {"kernel_set", "bits", "head_bits", "allocation", NULL};
    static const char *const kernels[] = {"kernel_set", NULL};
    const bool is_placed = !job->o.planned || job->o.recipe != NULL;
    const char *const *exact = is_placed ? kernels + 1 : bits + 1, *const *other_kernels = is_placed ? kernels : bits;
    const char *out = job->o.out;
    bool empty = true;
    x3_status rc;

    if (x3_path_overlaps(job->o.model, out))
        return x3_fail(err, X3_ERR_INPUT, "%s: the output is, holds, lies in or is linked to the input %s", out, job->o.model);
    if (x3_path_overlaps(job->o.model, job->work))
        return x3_fail(err, X3_ERR_INPUT, "%s: the work folder is, holds, lies in or is linked to the input %s", job->work,
                       job->o.model);
    if (x3_path_overlaps(out, job->work))
        return x3_fail(err, X3_ERR_INPUT, "%s: the work folder is, holds, lies in or is linked to the output %s", job->work, out);
    if (x3_path_exists(out) && !x3_path_is_dir(out))
        return x3_fail(err, X3_ERR_INPUT, "%s: the output exists and is not a folder", out);
    if (x3_job_state_exists(job->work)) {
        if (job->o.resume)
            return x3_job_state_compare(job->work, job->identity, job->o.other_kernels ? other_kernels : exact, err);
        if (!job->o.overwrite)
            return x3_fail(err, X3_ERR_INPUT, "%s: holds an unfinished job; --resume goes on with it, --overwrite drops it",
                           job->work);
    }
    if (x3_path_is_dir(out)) {
        rc = is_empty(out, &empty, err);
        if (rc != X3_OK)
            return rc;
        if (!empty && job->o.resume && !job->o.overwrite) {
            bool finished = false;
            rc = is_finished(job, exact, &finished, err);
            job->is_done = finished && is_placed;
            if (rc == X3_OK && finished && !is_placed)
                return X3_OK;
            if (rc != X3_OK || job->is_done)
                return rc;
        }
        if (!empty && !job->o.overwrite)
            return x3_fail(err, X3_ERR_INPUT, "%s: the output folder is not empty; --overwrite replaces what is in it", out);
    }
    return X3_OK;
}

/* ---- identity ---- */

static x3_status add_shards(cJSON *identity, const x3_job *job, x3_err *err)
{
    cJSON *shards = cJSON_CreateArray(), *texts = cJSON_CreateArray(), *entry;
    uint64_t config;
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(identity, "shards", shards, err));
    for (size_t i = 0; i < job->source->st->n_shards; i++) {
        const x3_shard *s = &job->source->st->shards[i];
        X3_TRY(rc, out, x3_json_add(shards, NULL, entry = cJSON_CreateObject(), err));
        X3_TRY(rc, out, x3_json_add(entry, "file", cJSON_CreateString(s->file), err));
        X3_TRY(rc, out, x3_json_add(entry, "bytes", cJSON_CreateNumber((double)s->n_bytes), err));
        X3_TRY(rc, out, x3_json_add_hash(entry, "header", s->header_hash, err));
    }
    X3_TRY(rc, out, x3_hash_file(job->source->config->path, &config, err));
    X3_TRY(rc, out, x3_json_add_hash(identity, "config", config, err));
    X3_TRY(rc, out, x3_json_add(identity, "texts", texts, err));
    for (size_t i = 0; job->corpus != NULL && i < job->corpus->n_files; i++) {
        char hash[17];
        x3_hash_text(job->corpus->files[i].hash, hash);
        X3_TRY(rc, out, x3_json_add(texts, NULL, cJSON_CreateString(hash), err));
    }
out:
    return rc;
}

/* Everything that the bytes of the pack depend on. */
x3_status x3_job_identity(const x3_job *job, cJSON **out, x3_err *err)
{
    const x3_job_options *o = &job->o;
    cJSON *j = cJSON_CreateObject();
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_json_add(j, "version", cJSON_CreateString(X3_VERSION), err));
    X3_TRY(rc, out, x3_json_add(j, "bits", cJSON_CreateNumber(o->bits), err));
    X3_TRY(rc, out, x3_json_add(j, "head_bits", cJSON_CreateNumber(o->head_bits), err));
    if (o->mtp_bits > 0)
        X3_TRY(rc, out, x3_json_add(j, "mtp_bits", cJSON_CreateNumber(o->mtp_bits), err));
    X3_TRY(rc, out, x3_json_add(j, "tie", cJSON_CreateString(x3_tie_name(o->tie)), err));
    X3_TRY(rc, out, x3_json_add(j, "allocation_from", cJSON_CreateString(o->planned || o->recipe != NULL ? "recipe" : "uniform"),
                                err));
    X3_TRY(rc, out, x3_json_add_hash(j, "allocation", job->allocation.hash, err));
    X3_TRY(rc, out, x3_json_add(j, "codebook", cJSON_CreateString(x3_codebook_name(o->quant.codebook)), err));
    X3_TRY(rc, out, x3_json_add(j, "target_blend", cJSON_CreateNumber(o->quant.target_blend), err));
    X3_TRY(rc, out, x3_json_add(j, "damping", cJSON_CreateNumber(o->quant.damping), err));
    X3_TRY(rc, out, x3_json_add(j, "refit_rounds", cJSON_CreateNumber(o->quant.refit_rounds), err));
    if (job->summary.n_experts > 0) {
        X3_TRY(rc, out, x3_json_add(j, "expert_hessian", cJSON_CreateString(job->experts.own ? "own" : "layer"), err));
        X3_TRY(rc, out, x3_json_add(j, "expert_weights",
                                    cJSON_CreateString(x3_expert_weighting_name(job->experts.weighting)), err));
    }
    X3_TRY(rc, out, x3_json_add(j, "seed", cJSON_CreateNumber((double)o->quant.seed), err));
    X3_TRY(rc, out, x3_json_add(j, "rows", cJSON_CreateNumber((double)job->n_rows), err));
    X3_TRY(rc, out, x3_json_add(j, "cols", cJSON_CreateNumber((double)o->cols), err));
    X3_TRY(rc, out, x3_json_add(j, "kernel_set", cJSON_CreateString(job->dev->kernel_set), err));
    X3_TRY(rc, out, add_shards(j, job, err));
    *out = j;
    j = NULL;
out:
    cJSON_Delete(j);
    return rc;
}

/* ---- opening ---- */

size_t x3_job_layers(const x3_job *job)
{
    return job->source->uses_draft ? x3_model_all_layers(job->source->model) : job->source->model->n_layers;
}

/* Gate and up of experts on their own tokens, unless asked otherwise, or unless that would be too much for one layer. */
static void choose_expert_options(x3_job *job)
{
    const x3_model *m = job->source->model;
    x3_expert_options own = {.own = true, .weighting = job->o.expert_weighting};
    uint64_t most = 0, of_expert;

    for (size_t i = 0; i < x3_job_layers(job); i++)
        if (m->layers[i].ffn == X3_FFN_MOE) {
            (void)x3_layer_stats_bytes(&m->layers[i], &own, true, &of_expert);
            most = x3_max_size(most, of_expert * m->layers[i].moe.rule.n_experts);
            job->summary.n_experts = x3_max_size(job->summary.n_experts, m->layers[i].moe.rule.n_experts);
        }
    job->experts = own;
    job->experts.own = job->o.expert_hessian == X3_EXPERT_HESSIAN_OWN ||
                       (job->o.expert_hessian == X3_EXPERT_HESSIAN_AUTO && most <= X3_OWN_HESSIAN_BYTES);
}

static x3_status read_text(x3_job *job, x3_err *err)
{
    x3_tokenizer *tokenizer = NULL;
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_path_join(&path, job->o.model, "tokenizer.json", err));
    X3_TRY(rc, out, x3_tokenizer_load(&tokenizer, path, err));
    X3_TRY(rc, out, x3_corpus_load(&job->corpus, job->o.texts, job->o.n_texts, X3_USE_CALIBRATION, err));
    X3_TRY(rc, out, x3_corpus_rows(job->corpus, tokenizer, 0, job->o.rows, job->o.cols, &job->ids, &job->n_rows, err));
    for (size_t i = 0; i < job->n_rows * job->o.cols; i++)
        if ((size_t)job->ids[i] >= job->source->model->vocab) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: token id %d of the text is past the embedding of %zu rows", path,
                         job->ids[i], job->source->model->vocab);
            goto out;
        }
    if (job->n_rows < job->o.rows)
        x3_job_note(job, "the text gives %zu rows of %zu tokens, %zu were asked for", job->n_rows, job->o.cols, job->o.rows);
out:
    free(path);
    x3_tokenizer_free(tokenizer);
    return rc;
}

static x3_status check_space(const x3_job *job, x3_err *err)
{
    const x3_job_summary *s = &job->summary;

    if (s->peak_bytes > s->memory_bytes)
        return x3_fail(err, X3_ERR_MEMORY,
                       "memory: %.2f GB are needed with the hidden states on disk, the budget is %.2f GB; fewer --cols, or a "
                       "larger --memory",
                       (double)s->peak_bytes / 1e9, (double)s->memory_bytes / 1e9);
    if (s->device_bytes > s->device_free)
        return x3_fail(err, X3_ERR_MEMORY,
                       "%s: %llu bytes of device memory are needed, %llu may be used; fewer --cols or --target-blend 0 need less; "
                       "--device-memory, where it was given, may be larger; --device cpu uses the host's memory",
                       job->dev->name, (unsigned long long)s->device_bytes, (unsigned long long)s->device_free);
    if (!job->o.resume && s->out_free < s->out_needed)
        return x3_fail(err, X3_ERR_IO, "%s: the pack needs %.2f GB of disk, %.2f GB are free", job->o.out,
                       (double)s->out_needed / 1e9, (double)s->out_free / 1e9);
    if (!job->o.resume && s->work_free < s->work_needed)
        return x3_fail(err, X3_ERR_IO, "%s: the hidden states need %.2f GB of disk, %.2f GB are free; --work DIR puts them "
                       "elsewhere, fewer --rows make them smaller",
                       job->work, (double)s->work_needed / 1e9, (double)s->work_free / 1e9);
    return X3_OK;
}

static const char *const hessian_names[] = {"auto", "layer", "own"}, *const weighting_names[] = {"none", "down", "all"};

bool x3_expert_hessian_parse(const char *name, x3_expert_hessian *out)
{
    for (int i = 0; i < 3; i++)
        if (strcmp(name, hessian_names[i]) == 0) {
            *out = (x3_expert_hessian)i;
            return true;
        }
    return false;
}

bool x3_expert_weighting_parse(const char *name, x3_expert_weighting *out)
{
    for (int i = 0; i < 3; i++)
        if (strcmp(name, weighting_names[i]) == 0) {
            *out = (x3_expert_weighting)i;
            return true;
        }
    return false;
}

const char *x3_expert_weighting_name(x3_expert_weighting weighting)
{
    return weighting_names[weighting];
}

static x3_status open_job(x3_job *job, x3_findings *findings, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, x3_device_open(&job->dev, job->o.device, job->o.n_threads, err));
    if (job->o.device_memory_bytes > 0)
        job->dev->capacity_bytes = x3_min_size(job->dev->capacity_bytes, job->o.device_memory_bytes);
    X3_TRY(rc, out, x3_checkpoint_open(&job->source, job->o.model, job->o.ignored_options, findings, err));
    if (job->source->is_pack) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: is already an EXL3 pack", job->o.model);
        goto out;
    }
    if (job->o.mtp_bits > 0 && job->o.cols < 2) {
        rc = x3_fail(err, X3_ERR_INPUT, "--mtp-bits: a draft layer reads the next token, rows of one token have none");
        goto out;
    }
    if (job->o.mtp_bits > 0)
        X3_TRY(rc, out, x3_checkpoint_use_draft(job->source, findings, err));
    choose_expert_options(job);
    if (job->o.n_texts > 0)
        X3_TRY(rc, out, read_text(job, err));
    if (job->o.recipe != NULL)
        X3_TRY(rc, out, x3_allocation_of_recipe(&job->allocation, job->source->model, job->o.recipe, err));
    else
        X3_TRY(rc, out, x3_allocate_uniform(&job->allocation, job->source->model, job->o.bits, job->o.head_bits, job->o.tie,
                                            err));
    const x3_tensor *head = x3_checkpoint_weight(job->source, &job->source->model->head);
    if (job->allocation.head_K == 0 && !job->source->model->tied && head != NULL && head->dtype == X3_F8_E4M3) {
        rc = x3_fail(err, X3_ERR_UNSUPPORTED, "%s: an FP8 head is not left as it is (--head-bits 0): its scales belong to no "
                     "pack", head->name);
        goto out;
    }
    job->o.bits = job->allocation.target_bits;
    job->o.head_bits = job->allocation.head_K;
    job->allocation.draft_K = job->o.mtp_bits;
    X3_TRY(rc, out, x3_pack_plan_create(&job->plan, job->source, &job->allocation, job->o.quant.codebook, err));
    X3_TRY(rc, out, x3_pack_writer_plan(&job->writer, job->o.out == NULL ? "." : job->o.out, job->plan->tensors,
                                        job->plan->n_tensors, X3_SHARD_BYTES, err));
    X3_TRY(rc, out, x3_pack_side_files(job->o.model, &job->copied, &job->left, err));
    X3_TRY(rc, out, x3_job_identity(job, &job->identity, err));
    if (job->o.out != NULL)
        X3_TRY(rc, out, x3_job_check_output(job, err));
    X3_TRY(rc, out, x3_job_estimate(job, err));
    if (job->o.out != NULL)
        rc = check_space(job, err);
out:
    return rc;
}

x3_status x3_job_open(x3_job **out, const x3_job_options *options, const x3_job_events *events, x3_findings *findings,
                      x3_err *err)
{
    x3_job *job = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&job, 1, sizeof *job, err));
    job->o = *options;
    if (events != NULL)
        job->events = *events;
    if (options->work != NULL)
        X3_TRY(rc, out, x3_strdup(&job->work, options->work, err));
    else
        X3_TRY(rc, out, x3_asprintf(&job->work, err, "%.*s.work", (int)(options->out == NULL ? 0 : x3_path_trimmed(options->out)),
                                    options->out == NULL ? "" : options->out));
    X3_TRY(rc, out, open_job(job, findings, err));
    *out = job;
    job = NULL;
out:
    x3_job_close(job);
    return rc;
}

void x3_job_close(x3_job *job)
{
    if (job == NULL)
        return;
    x3_layer_runner_free(&job->runner);
    x3_hidden_state_free(job->quantized);
    x3_hidden_state_free(job->original);
    for (size_t i = 0; job->pending != NULL && i < job->source->model->n_layers; i++)
        cJSON_Delete(job->pending[i]);
    free(job->pending);
    x3_pack_writer_free(job->writer);
    x3_pack_plan_free(job->plan);
    x3_allocation_free(&job->allocation);
    x3_names_free(&job->copied);
    x3_names_free(&job->left);
    x3_corpus_free(job->corpus);
    x3_checkpoint_close(job->source);
    x3_device_close(job->dev);
    cJSON_Delete(job->identity);
    cJSON_Delete(job->groups);
    cJSON_Delete(job->receipt);
    free(job->ids);
    free(job->work);
    free(job);
}

const x3_job_summary *x3_job_describe(const x3_job *job)
{
    return &job->summary;
}

const x3_checkpoint *x3_job_source(const x3_job *job)
{
    return job->source;
}

const x3_allocation *x3_job_allocation(const x3_job *job)
{
    return &job->allocation;
}

bool x3_job_is_done(const x3_job *job)
{
    return job->is_done;
}

const cJSON *x3_job_receipt(const x3_job *job)
{
    return job->receipt;
}

void x3_job_note(const x3_job *job, const char *format, ...)
{
    char text[1024];
    va_list args;

    if (job->events.note == NULL)
        return;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    job->events.note(job->events.arg, text);
}

void x3_job_progress(const x3_job *job, const char *what)
{
    if (job->events.progress != NULL)
        job->events.progress(job->events.arg, job->done, (double)job->summary.n_weights, what);
}
