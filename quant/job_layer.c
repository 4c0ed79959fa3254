/* One layer of a job: statistics, then its linears, then the layer again with the quantized weights.
 *
 * Experts: their Hessians are captured and used a few experts at a time, as many as the memory budget holds; each time
 * the rows run through the layer again, with its original weights. So quantized experts wait beside the layer until all
 * passes are made. Attention and the rest come last. */
#include <stdio.h>
#include <stdlib.h>

#include "quant/job_internal.h"

/* ---- linears of one input ---- */

static x3_status write_bias(x3_job *job, const x3_planned_group *g, x3_err *err)
{
    const x3_tensor *t = x3_checkpoint_bias(job->source, g->linear);
    const size_t n = (size_t)job->writer->tensors[g->bias].out.shape[0];
    float *bias = NULL;
    uint16_t *bits = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&bias, n, sizeof *bias, err));
    X3_TRY(rc, out, x3_alloc(&bits, n, sizeof *bits, err));
    X3_TRY(rc, out, x3_safetensors_read_f32(job->source->st, t, 0, t->n_elements, bias, err));
    for (size_t i = 0; i < n; i++) {
        bits[i] = x3_f32_to_f16(bias[i]);
        if ((bits[i] & 0x7C00) == 0x7C00) {
            rc = x3_fail(err, X3_ERR_UNSUPPORTED, "%s: value %g at %zu does not fit float16, which packs store", t->name,
                         (double)bias[i], i);
            goto out;
        }
    }
    rc = x3_pack_writer_write(job->writer, g->bias, bits, err);
out:
    free(bias);
    free(bits);
    return rc;
}

static x3_status write_group(x3_job *job, const x3_planned_group *g, const x3_quant_linear *q, x3_err *err)
{
    const int32_t marker = (int32_t)(job->plan->codebook == X3_CB_MUL1 ? X3_MUL1_MULTIPLIER : X3_MCG_MULTIPLIER);
    void *words = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&words, q->trellis_bytes, 1, err));
    X3_TRY(rc, out, job->dev->ops->download(job->dev, words, q->weight.data, q->trellis_bytes, err));
    X3_TRY(rc, out, x3_pack_writer_write(job->writer, g->trellis, words, err));
    X3_TRY(rc, out, x3_pack_writer_write(job->writer, g->suh, q->suh, err));
    X3_TRY(rc, out, x3_pack_writer_write(job->writer, g->svh, q->svh, err));
    if (g->marker != SIZE_MAX)
        X3_TRY(rc, out, x3_pack_writer_write(job->writer, g->marker, &marker, err));
    if (g->bias != SIZE_MAX)
        rc = write_bias(job, g, err);
out:
    free(words);
    return rc;
}

static void note_calibration(const x3_job *job, const char *name, const x3_hessian *h, bool uncalibrated)
{
    if (uncalibrated)
        x3_job_note(job, "UNCALIBRATED: %s had no usable calibration positions (%zu, %zu dropped)", name, h->n_rows,
                    h->n_dropped);
    else if (h->n_dropped > 0)
        x3_job_note(job, "%s: %zu of %zu positions were not finite and left out", name, h->n_dropped,
                    h->n_rows + h->n_dropped);
}

x3_status x3_job_quantize(x3_job *job, const x3_planned_group *planned, const x3_weight *dense, x3_quant_linear *linears,
                          size_t n, const char *group, const x3_hessian *h, size_t tokens, cJSON **entries, x3_err *err)
{
    bool uncalibrated = false;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < n; i++) {
        const x3_linear_desc *d = planned[i].linear;
        linears[i] = (x3_quant_linear){.name = d->name, .n_in = d->n_in, .n_out = d->n_out, .K = planned[i].K};
        X3_TIMED(job, X3_STAGE_LOAD, rc, out, x3_dense_floats(&linears[i].d_w, job->dev, &dense[i], err));
    }
    X3_TIMED(job, X3_STAGE_QUANTIZE, rc, out,
             x3_quantize_group(job->dev, &job->o.quant, group, h, linears, n, &uncalibrated, err));
    note_calibration(job, tokens == SIZE_MAX ? group : linears[0].name, h, uncalibrated);
    for (size_t i = 0; i < n; i++) {
        X3_TIMED(job, X3_STAGE_WRITE, rc, out, write_group(job, &planned[i], &linears[i], err));
        X3_TRY(rc, out, x3_job_group_entry(&entries[i], &linears[i], h, tokens, uncalibrated, err));
        job->done += (double)linears[i].weight.n_in_padded * (double)linears[i].weight.n_out_padded;
        x3_job_progress(job, planned[i].linear->name);
    }
out:
    for (size_t i = 0; i < n; i++) {
        x3_device_free(job->dev, (void *)(uintptr_t)linears[i].d_w);
        linears[i].d_w = NULL;
    }
    return rc;
}

/* ---- a layer ---- */

size_t x3_job_first_group(const x3_job *job, size_t layer)
{
    size_t n = 0;

    if (layer == job->source->model->n_layers) /* the draft's, behind the head and its join */
        return job->plan->head + 2;
    for (size_t i = 0; i < layer; i++)
        n += job->source->model->layers[i].n_linears;
    return n;
}

struct layer_work {
    x3_job *job;
    const x3_layer_desc *l;
    const x3_planned_group *planned;
    x3_layer_weights w;
    x3_layer_stats stats;
    x3_quant_linear *linears; /* [l->n_linears], results that wait for their place in w */
    cJSON **entries;          /* [l->n_linears] */
};

static bool same_set(const struct layer_work *t, size_t i, size_t j)
{
    return t->l->linears[i].input == t->l->linears[j].input && t->planned[j].K > 0;
}

/* Linears [first, end), set by set of those that share an input. The random signs of an expert's inputs are those of the
 * block: linears that share an input share them. */
static x3_status quantize_linears(struct layer_work *t, size_t first, size_t end, x3_err *err)
{
    char group[512];
    x3_status rc = X3_OK;

    for (size_t i = first; i < end && rc == X3_OK;) {
        const int e = x3_layer_expert(t->l, i);
        int input = t->l->linears[i].input;
        size_t n = 0;
        while (i + n < end && same_set(t, i, i + n))
            n++;
        if (n == 0) {
            i++;
            continue;
        }
        if (e >= 0 && (i - (size_t)t->l->moe.first_expert) % 3 != 2)
            input = t->l->linears[t->l->moe.router].input;
        snprintf(group, sizeof group, "%s.input%d", t->l->prefix, input);
        rc = x3_job_quantize(t->job, t->planned + i, t->w.linears + i, t->linears + i, n, group, x3_layer_stats_hessian(&t->stats, i),
                             e < 0 ? SIZE_MAX : t->stats.tokens[e], t->entries + i, err);
        i += n;
    }
    return rc;
}

#define LISTED 10

/* " 3 (0 tokens), 17 (35), and 4 more" for experts [first, end) with fewer than `least`; the number of them. */
static size_t list_experts(const x3_layer_stats *s, size_t first, size_t end, size_t least, char *text, size_t size)
{
    size_t n = 0, at = 0;

    text[0] = '\0';
    for (size_t e = first; e < end; e++) {
        if (s->tokens[e] >= least)
            continue;
        if (n < LISTED && at < size)
            at += (size_t)snprintf(text + at, size - at, "%s%zu (%zu%s)", n == 0 ? "" : ", ", e, s->tokens[e],
                                   n == 0 ? " tokens" : "");
        n++;
    }
    if (n > LISTED && at < size)
        snprintf(text + at, size - at, " and %zu more", n - LISTED);
    return n;
}

/* Says which experts of this pass had too few tokens, or refuses. */
static x3_status check_tokens(const struct layer_work *t, size_t first, size_t end, x3_err *err)
{
    const x3_job *job = t->job;
    char text[512];
    size_t n = list_experts(&t->stats, first, end, job->o.min_expert_tokens, text, sizeof text);

    if (n > 0)
        return x3_fail(err, X3_ERR_INPUT, "%s: %zu experts have fewer calibration tokens than --min-expert-tokens %zu: %s; "
                                          "more or other text, or more --rows",
                       t->l->prefix, n, job->o.min_expert_tokens, text);
    /* gate and up have the hidden state as input, where they have Hessians of their own; down the inner one */
    const size_t widest = job->experts.own ? x3_max_size(job->source->model->hidden, t->l->moe.n_inner) : t->l->moe.n_inner;
    n = list_experts(&t->stats, first, end, x3_expert_full_tokens(widest), text, sizeof text);
    if (n > 0)
        x3_job_note(job, "%s: %zu of %zu experts had few calibration tokens; their Hessians are blended by count, with that of "
                    "the layer (gate, up) or of tokens sent there on purpose (down): %s",
                    t->l->prefix, n, t->stats.n_experts, text);
    return X3_OK;
}

/* Captures, and quantizes the experts of each pass. */
static x3_status run_passes(struct layer_work *t, size_t layer, x3_err *err)
{
    x3_job *job = t->job;
    const size_t at_once = x3_max_size(job->summary.experts_at_once, 1);
    x3_layer_stats *s = &t->stats;
    x3_status rc;

    do {
        const size_t first = s->n_done, end = x3_min_size(first + at_once, s->n_experts);
        X3_TIMED(job, X3_STAGE_CAPTURE, rc, out,
                 x3_capture_layer(&job->runner, &t->w, job->quantized, job->original, layer == 0, s, end, err));
        X3_TRY(rc, out, check_tokens(t, first, end, err));
        if (end > first)
            X3_TRY(rc, out, quantize_linears(t, (size_t)t->l->moe.first_expert + 3 * first,
                                             (size_t)t->l->moe.first_expert + 3 * end, err));
        x3_layer_stats_release_experts(s);
    } while (s->n_done < s->n_experts);
out:
    return rc;
}

/* Puts quantized weights in the place of the dense ones; biases stay. */
static void replace_weights(struct layer_work *t)
{
    for (size_t i = 0; i < t->l->n_linears; i++) {
        x3_weight *old = &t->w.linears[i], *now = &t->linears[i].weight;
        if (now->kind == X3_WEIGHT_NONE)
            continue;
        now->bias = old->bias;
        old->bias = NULL;
        x3_linear_free(old, t->job->dev);
        *old = *now;
        *now = (x3_weight){0};
    }
}

x3_status x3_job_layer(x3_job *job, size_t layer, cJSON *entries, x3_err *err)
{
    const x3_layer_desc *l = &job->source->model->layers[layer];
    struct layer_work t = {.job = job, .l = l, .planned = job->plan->groups + x3_job_first_group(job, layer)};
    const bool both = job->original != NULL && layer > 0;
    const size_t n_others = l->ffn == X3_FFN_MOE ? (size_t)l->moe.first_expert : l->n_linears;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&t.linears, l->n_linears, sizeof *t.linears, err));
    X3_TRY(rc, out, x3_alloc(&t.entries, l->n_linears, sizeof *t.entries, err));
    X3_TIMED(job, X3_STAGE_LOAD, rc, out, x3_layer_weights_load(&t.w, job->dev, job->source, l, err));
    X3_TRY(rc, out, x3_layer_runner_prepare(&job->runner, l, err));
    X3_TRY(rc, out, x3_layer_stats_create(&t.stats, job->dev, l, &job->experts, both, err));
    X3_TRY(rc, out, run_passes(&t, layer, err));
    X3_TRY(rc, out, quantize_linears(&t, 0, n_others, err));
    replace_weights(&t);
    X3_TIMED(job, X3_STAGE_FORWARD, rc, out, x3_run_layer(&job->runner, &t.w, job->quantized, err));
    for (size_t i = 0; i < l->n_linears; i++)
        if (t.entries[i] != NULL) {
            cJSON *entry = t.entries[i];
            t.entries[i] = NULL;
            X3_TRY(rc, out, x3_json_add(entries, NULL, entry, err));
        }
out:
    for (size_t i = 0; i < l->n_linears; i++) {
        if (t.linears != NULL)
            x3_quant_linear_free(job->dev, &t.linears[i]);
        if (t.entries != NULL)
            cJSON_Delete(t.entries[i]);
    }
    free(t.linears);
    free(t.entries);
    x3_layer_stats_free(&t.stats);
    x3_layer_weights_free(&t.w);
    return rc;
}
