/* Everything about a job that can be known before it computes: inputs, output, plan, memory, disk, time. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

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

/* ---- estimates ---- */

/* Bytes while one input's linears are quantized: copies of the n x n matrices (the damped A, L, the rotated A and a float64
 * factor), and per output column the source, target, regularized weight and codes, with three more of the widest linear
 * for the refit. In a layer with experts quantized ones wait for the others. */
static uint64_t quantize_bytes(const x3_job *job, size_t layer)
{
    const x3_layer_desc *l = &job->source->model->layers[layer];
    const x3_planned_group *planned = job->plan->groups + x3_job_first_group(job, layer);
    uint64_t most = 0, waiting = 0;

    for (size_t i = 0; i < l->n_linears;) {
        const int input = l->linears[i].input;
        uint64_t n = x3_round_up(l->linears[i].n_in, 128), columns = 0, widest = 0;
        for (; i < l->n_linears && l->linears[i].input == input; i++) {
            uint64_t m = x3_round_up(l->linears[i].n_out, 128);
            columns += m;
            widest = x3_max_size(widest, m);
            waiting += n * m * (uint64_t)planned[i].K / 8;
        }
        most = x3_max_size(most, 5 * n * n + n * (4 * columns + 3 * widest));
    }
    return sizeof(float) * most + (l->ffn == X3_FFN_MOE ? waiting : 0);
}

static uint64_t head_bytes(const x3_job *job)
{
    const x3_model *m = job->source->model;
    uint64_t n = x3_round_up(m->hidden, 128), columns = x3_round_up(m->vocab, 128);

    return job->allocation.head_K == 0 ? 0 : sizeof(float) * (7 * n * n + 8 * n * columns);
}

/* Gate and up of experts on their own tokens, unless asked otherwise, or unless that would be too much for one layer. */
static void choose_expert_options(x3_job *job)
{
    const x3_model *m = job->source->model;
    x3_expert_options own = {.own = true, .weighting = job->o.expert_weighting};
    uint64_t most = 0, of_expert;

    for (size_t i = 0; i < m->n_layers; i++)
        if (m->layers[i].ffn == X3_FFN_MOE) {
            (void)x3_layer_stats_bytes(&m->layers[i], &own, true, &of_expert);
            most = x3_max_size(most, of_expert * m->layers[i].moe.rule.n_experts);
            job->summary.n_experts = x3_max_size(job->summary.n_experts, m->layers[i].moe.rule.n_experts);
        }
    job->experts = own;
    job->experts.own = job->o.expert_hessian == X3_EXPERT_HESSIAN_OWN ||
                       (job->o.expert_hessian == X3_EXPERT_HESSIAN_AUTO && most <= X3_OWN_HESSIAN_BYTES);
}

/* Bytes of the layer that needs most, with the Hessians of at_once experts. */
static uint64_t layer_bytes(const x3_job *job, size_t at_once)
{
    const x3_model *m = job->source->model;
    const bool both = job->o.quant.target_blend > 0;
    uint64_t most = 0;

    for (size_t i = 0; i < m->n_layers; i++) {
        uint64_t of_expert, others = x3_layer_stats_bytes(&m->layers[i], &job->experts, both, &of_expert);
        size_t n = m->layers[i].ffn == X3_FFN_MOE ? x3_min_size(at_once, m->layers[i].moe.rule.n_experts) : 0;
        most = x3_max_size(most, x3_layer_weights_bytes(job->source, &m->layers[i]) + quantize_bytes(job, i) + others +
                                     n * of_expert);
    }
    return most;
}

/* Largest number of experts at once that fits, at least 1; bytes of the whole with it. */
static uint64_t fit_experts(const x3_job *job, uint64_t fixed, uint64_t head, uint64_t budget, size_t *at_once)
{
    size_t low = 1, high = x3_max_size(job->summary.n_experts, 1);

    while (low < high) {
        size_t middle = (low + high + 1) / 2;
        if (fixed + x3_max_size(layer_bytes(job, middle), head) <= budget)
            low = middle;
        else
            high = middle - 1;
    }
    *at_once = low;
    return fixed + x3_max_size(layer_bytes(job, low), head);
}

/* Without a text (check) as many as a job may take. */
static size_t planned_rows(const x3_job *job)
{
    return job->n_rows == 0 ? job->o.rows : job->n_rows;
}

/* Sizes of the two short measurements: enough to occupy a device. */
struct probe {
    size_t n_in, n_out; /* of the encoder's */
    size_t rows, dim;   /* of the product's */
    float *d_w, *d_q, *d_x, *d_y;
    double encode, product; /* seconds a weight, seconds an operation */
};

static struct probe probe_for(const x3_device *dev)
{
    const bool large = dev->capacity_bytes > 0;

    return (struct probe){.n_in = 32, .n_out = large ? 8192 : 64, .rows = large ? 4096 : 512, .dim = large ? 2048 : 512};
}

/* What the device's operations need for themselves and keep: the most that any group of linears asks for, or the probe. */
static uint64_t own_bytes(const x3_job *job)
{
    const x3_model *m = job->source->model;
    const size_t rows = x3_stream_batch(planned_rows(job), job->o.cols) * job->o.cols;
    const struct probe t = probe_for(job->dev);
    uint64_t most = 0;

    if (job->dev->ops->own_bytes == NULL)
        return 0;
    most = job->dev->ops->own_bytes(job->dev, m->hidden, m->vocab, rows);
    const uint64_t probe = x3_max_size(job->dev->ops->own_bytes(job->dev, t.n_in, t.n_out, 0),
                                       job->dev->ops->own_bytes(job->dev, t.dim, t.dim, t.rows));
    most = x3_max_size(most, probe + 2 * sizeof(float) * (t.n_in * t.n_out + t.rows * t.dim));
    for (size_t i = 0; i < m->n_layers; i++)
        for (size_t j = 0; j < m->layers[i].n_linears;) {
            const x3_linear_desc *first = &m->layers[i].linears[j];
            size_t n_out = 0;
            for (; j < m->layers[i].n_linears && m->layers[i].linears[j].input == first->input; j++)
                n_out += x3_round_up(m->layers[i].linears[j].n_out, 128);
            most = x3_max_size(most, job->dev->ops->own_bytes(job->dev, first->n_in, n_out, rows));
        }
    return most;
}

/* Host memory beside a device that has its own: float32 of the largest weight, rows on their way, the libraries. */
static uint64_t host_bytes(const x3_job *job)
{
    const x3_model *m = job->source->model;
    uint64_t largest = (uint64_t)m->vocab * m->hidden;

    for (size_t i = 0; i < m->n_layers; i++)
        for (size_t j = 0; j < m->layers[i].n_linears; j++)
            largest = x3_max_size(largest, m->layers[i].linears[j].n_in * m->layers[i].linears[j].n_out);
    return 2 * sizeof(float) * (largest + 8192 * m->hidden) + ((uint64_t)1 << 30);
}

/* Hidden states go further away (device, host, disk) when they do not fit beside an eighth of a layer's experts: every pass
 * over the text for some more experts costs a run through attention. */
static bool fits_with_states(const x3_job *job, uint64_t bytes, uint64_t budget, size_t at_once)
{
    return bytes <= budget && 8 * at_once >= job->summary.n_experts;
}

static void estimate_on_host(x3_job *job, uint64_t fixed, uint64_t head, size_t *at_once)
{
    x3_job_summary *s = &job->summary;

    s->hidden_place = X3_HIDDEN_HOST;
    s->peak_bytes = fit_experts(job, fixed + s->hidden_bytes, head, s->memory_bytes, at_once);
    if (fits_with_states(job, s->peak_bytes, s->memory_bytes, *at_once))
        return;
    s->hidden_place = X3_HIDDEN_DISK;
    s->peak_bytes = fit_experts(job, fixed, head, s->memory_bytes, at_once);
}

/* A device with memory of its own, of which a tenth is left: allocations take more than they ask for. */
static void estimate_on_device(x3_job *job, uint64_t fixed, uint64_t head, size_t *at_once)
{
    x3_job_summary *s = &job->summary;
    const uint64_t budget = job->dev->capacity_bytes / 10 * 9;

    s->device_free = job->dev->capacity_bytes;
    s->peak_bytes = host_bytes(job);
    s->hidden_place = X3_HIDDEN_DEVICE;
    s->device_bytes = fit_experts(job, fixed + s->hidden_bytes, head, budget, at_once);
    if (fits_with_states(job, s->device_bytes, budget, *at_once))
        return;
    s->device_bytes = fit_experts(job, fixed, head, budget, at_once);
    s->hidden_place = s->peak_bytes + s->hidden_bytes <= s->memory_bytes ? X3_HIDDEN_HOST : X3_HIDDEN_DISK;
    if (s->hidden_place == X3_HIDDEN_HOST)
        s->peak_bytes += s->hidden_bytes;
}

static void estimate_memory(x3_job *job)
{
    const x3_model *m = job->source->model;
    x3_job_summary *s = &job->summary;
    const bool both = job->o.quant.target_blend > 0;
    const uint64_t fixed = (64u << 20) + own_bytes(job) + x3_layer_runner_bytes(m, planned_rows(job), job->o.cols, both);
    size_t at_once;

    s->hidden_bytes = (both ? 2 : 1) * (uint64_t)planned_rows(job) * x3_state_floats(m, job->o.cols) * sizeof(float);
    s->memory_bytes = job->o.memory_bytes;
    if (s->memory_bytes == 0)
        s->memory_bytes = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGE_SIZE) / 5 * 4;
    if (job->dev->capacity_bytes > 0)
        estimate_on_device(job, fixed, head_bytes(job), &at_once);
    else
        estimate_on_host(job, fixed, head_bytes(job), &at_once);
    s->experts_at_once = s->n_experts == 0 ? 0 : at_once;
    s->expert_passes = s->n_experts == 0 ? 0 : (s->n_experts + at_once - 1) / at_once;
    s->own_hessians = job->experts.own;
}

/* Free bytes of the file system that will hold `path`, which need not exist yet. */
static uint64_t free_bytes(const char *path)
{
    char copy[4096];
    struct statvfs fs;

    snprintf(copy, sizeof copy, "%s", path);
    while (statvfs(copy, &fs) != 0) {
        char *slash = strrchr(copy, '/');
        if (slash == NULL || slash == copy)
            return statvfs(slash == copy ? "/" : ".", &fs) == 0 ? (uint64_t)fs.f_bavail * fs.f_frsize : 0;
        *slash = '\0';
    }
    return (uint64_t)fs.f_bavail * fs.f_frsize;
}

static x3_status estimate_disk(x3_job *job, x3_err *err)
{
    x3_job_summary *s = &job->summary;
    uint64_t side = 0;
    char *path = NULL;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < job->copied.n_items; i++) {
        x3_map map;
        free(path);
        X3_TRY(rc, out, x3_path_join(&path, job->o.model, job->copied.items[i], err));
        X3_TRY(rc, out, x3_map_open(&map, path, err));
        side += map.n_bytes;
        x3_map_close(&map);
    }
    s->pack_bytes = job->writer->file_bytes;
    s->out_needed = s->pack_bytes + side + (16u << 20);
    s->work_needed = 2 * s->hidden_bytes + (16u << 20); /* of two layers: the old ones go after the new are synced */
    if (job->o.out != NULL) {
        s->out_free = free_bytes(job->o.out);
        s->work_free = free_bytes(job->work);
    }
out:
    free(path);
    return rc;
}

/* Part of all tokens that linear `index` of the model sees, taken that experts share them evenly. */
static double routed_part(const x3_model *m, size_t index)
{
    size_t layer;
    const x3_linear_desc *d = x3_model_linear(m, index, &layer);
    const x3_layer_desc *l = layer < m->n_layers ? &m->layers[layer] : NULL;

    if (l == NULL || x3_layer_expert(l, (size_t)(d - l->linears)) < 0)
        return 1;
    return (double)l->moe.rule.n_chosen / (double)l->moe.rule.n_experts;
}

static x3_status measure(struct probe *t, const x3_job *job, x3_err *err)
{
    const x3_ldlq_job one = {.codebook = job->o.quant.codebook, .K = 4, .n_out = t->n_out, .d_w = t->d_w, .d_q = t->d_q};
    const x3_weight w = {.kind = X3_WEIGHT_F32, .n_in = t->dim, .n_out = t->dim, .n_in_padded = t->dim, .n_out_padded = t->dim,
                         .data = t->d_x};
    const x3_device_ops *ops = job->dev->ops;
    double start = x3_seconds();
    x3_status rc;

    X3_TRY(rc, out, ops->ldlq(job->dev, NULL, t->n_in, &one, 1, err));
    X3_TRY(rc, out, ops->sync(job->dev, err));
    t->encode = (x3_seconds() - start) / (double)(t->n_in * t->n_out);
    start = x3_seconds();
    X3_TRY(rc, out, ops->linear(job->dev, &w, t->d_x, t->dim, t->rows, t->d_y, t->dim, err));
    X3_TRY(rc, out, ops->sync(job->dev, err));
    t->product = (x3_seconds() - start) / (2.0 * (double)(t->rows * t->dim * t->dim));
out:
    return rc;
}

static x3_status estimate_seconds(x3_job *job, x3_err *err)
{
    const x3_model *m = job->source->model;
    struct probe t = probe_for(job->dev);
    double weights = 0, layers = 0;
    x3_status rc;

    if (job->summary.device_bytes > job->summary.device_free)
        return X3_OK; /* the job is refused; this might not fit either */
    X3_TRY(rc, out, x3_device_floats(job->dev, &t.d_w, t.n_in * t.n_out, err));
    X3_TRY(rc, out, x3_device_floats(job->dev, &t.d_q, t.n_in * t.n_out, err));
    X3_TRY(rc, out, x3_device_floats(job->dev, &t.d_x, t.rows * t.dim, err));
    X3_TRY(rc, out, x3_device_floats(job->dev, &t.d_y, t.rows * t.dim, err));
    for (int i = 0; i < (job->dev->capacity_bytes > 0 ? 2 : 1); i++) /* a GPU loads its kernels the first time */
        X3_TRY(rc, out, measure(&t, job, err));
    for (size_t i = 0; i < job->plan->n_groups; i++) {
        const x3_linear_desc *d = job->plan->groups[i].linear;
        double n = (double)x3_round_up(d->n_in, 128) * (double)x3_round_up(d->n_out, 128);
        if (job->plan->groups[i].K > 0)
            weights += n;
        if (d != &m->head) /* three runs of the layer, and second moments about as dear as one */
            layers += 4 * 2 * n * routed_part(m, i) * (double)(planned_rows(job) * job->o.cols);
    }
    job->summary.seconds = t.encode * weights + t.product * layers;
out:
    x3_device_free(job->dev, t.d_w);
    x3_device_free(job->dev, t.d_q);
    x3_device_free(job->dev, t.d_x);
    x3_device_free(job->dev, t.d_y);
    job->dev->peak_bytes = job->dev->used_bytes; /* the peak that counts is the job's */
    return rc;
}

x3_status x3_job_estimate(x3_job *job, x3_err *err)
{
    x3_job_summary *s = &job->summary;
    x3_status rc;

    *s = (x3_job_summary){
        .n_experts = s->n_experts,
        .n_layers = job->source->model->n_layers,
        .source_bytes = job->source->st->total_bytes,
        .body_bits = job->allocation.body_bits,
        .head_bits = job->allocation.head_K,
        .n_shards = job->writer->n_shards,
        .rows = job->n_rows,
        .cols = job->o.cols,
        .n_copied_files = job->copied.n_items,
        .n_left_files = job->left.n_items,
    };
    for (size_t i = 0; i < job->plan->n_groups; i++) {
        const x3_linear_desc *d = job->plan->groups[i].linear;
        if (job->plan->groups[i].K == 0)
            continue;
        s->n_groups++;
        s->n_weights += (uint64_t)x3_round_up(d->n_in, 128) * x3_round_up(d->n_out, 128);
        s->n_padded_linears += d->n_in % 128 != 0 || d->n_out % 128 != 0;
    }
    for (size_t i = 0; i < job->source->st->n_tensors; i++) {
        s->n_kept += job->source->roles[i] == X3_ROLE_KEPT;
        s->n_dropped += job->source->roles[i] == X3_ROLE_DROPPED;
    }
    estimate_memory(job);
    X3_TRY(rc, out, estimate_disk(job, err));
    rc = estimate_seconds(job, err);
out:
    return rc;
}

/* ---- opening ---- */

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
