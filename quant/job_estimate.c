/* What a job will take: memory of host and device, disk, time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include "quant/job_internal.h"
#include "runtime/draft.h"

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

/* Without a text (check) as many as a job may take. */
static size_t planned_rows(const x3_job *job)
{
    return job->n_rows == 0 ? job->o.rows : job->n_rows;
}

static uint64_t alone_bytes(const x3_linear_desc *d)
{
    const uint64_t n = x3_round_up(d->n_in, 128), columns = x3_round_up(d->n_out, 128);

    return sizeof(float) * (7 * n * n + 8 * n * columns);
}

/* Linears that are quantized alone: the head, and the draft layer's join (with what makes its inputs) and head. */
static uint64_t head_bytes(const x3_job *job)
{
    const x3_model *m = job->source->model;
    const size_t rows = x3_stream_batch(planned_rows(job), job->o.cols);
    uint64_t most = job->allocation.head_K == 0 ? 0 : alone_bytes(&m->head);

    if (job->source->uses_draft) {
        most = x3_max_size(most, alone_bytes(&m->draft->join) + x3_draft_bytes(m, rows, job->o.cols) +
                                     4 * sizeof(float) * rows * job->o.cols * m->hidden);
        if (m->draft->head.name != NULL)
            most = x3_max_size(most, alone_bytes(&m->draft->head));
    }
    return most;
}

/* Bytes of the layer that needs most, with the Hessians of at_once experts. */
static uint64_t layer_bytes(const x3_job *job, size_t at_once)
{
    const x3_model *m = job->source->model;
    const bool both = job->o.quant.target_blend > 0;
    uint64_t most = 0;

    for (size_t i = 0; i < x3_job_layers(job); i++) {
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
    uint64_t most = 0, probe;

    if (job->dev->ops->own_bytes == NULL)
        return 0;
    most = job->dev->ops->own_bytes(job->dev, m->hidden, m->vocab, rows);
    probe = x3_max_size(job->dev->ops->own_bytes(job->dev, t.n_in, t.n_out, 0),
                        job->dev->ops->own_bytes(job->dev, t.dim, t.dim, t.rows));
    most = x3_max_size(most, probe + 2 * sizeof(float) * (t.n_in * t.n_out + t.rows * t.dim));
    if (job->source->uses_draft)
        most = x3_max_size(most, job->dev->ops->own_bytes(job->dev, 2 * m->hidden, m->hidden, rows));
    for (size_t i = 0; i < x3_job_layers(job); i++)
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

    for (size_t i = 0; i < x3_job_layers(job); i++)
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
    /* of two layers: the old ones go after the new are synced; a draft layer's stand beside those of the last layer */
    s->work_needed = (job->source->uses_draft ? 4 : 2) * s->hidden_bytes + (16u << 20);
    if (job->o.out != NULL) {
        s->out_free = free_bytes(job->o.out);
        s->work_free = free_bytes(job->work);
    }
out:
    free(path);
    return rc;
}

/* Weights of the layers' linears, those of experts by the part of all tokens that they see if experts share them evenly. */
static double routed_weights(const x3_job *job)
{
    double sum = 0;

    for (size_t i = 0; i < x3_job_layers(job); i++) {
        const x3_layer_desc *l = &job->source->model->layers[i];
        for (size_t j = 0; j < l->n_linears; j++) {
            double n = (double)x3_round_up(l->linears[j].n_in, 128) * (double)x3_round_up(l->linears[j].n_out, 128);
            sum += x3_layer_expert(l, j) < 0 ? n : n * (double)l->moe.rule.n_chosen / (double)l->moe.rule.n_experts;
        }
    }
    return sum;
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
    struct probe t = probe_for(job->dev);
    double weights = 0, layers;
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
    }
    /* three runs of a layer, and second moments about as dear as one */
    layers = 4 * 2 * routed_weights(job) * (double)(planned_rows(job) * job->o.cols);
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
        .mtp_bits = job->allocation.draft_K,
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
