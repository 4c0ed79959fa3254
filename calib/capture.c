#include "calib/capture.h"

#include <stdlib.h>
#include <string.h>

/* ---- statistics ---- */

x3_status x3_layer_stats_create(x3_layer_stats *s, x3_device *dev, const x3_layer_desc *layer,
                                const x3_expert_options *options, bool both_paths, x3_err *err)
{
    x3_status rc;

    *s = (x3_layer_stats){.dev = dev, .layer = layer, .options = *options, .both = both_paths};
    s->n_experts = layer->ffn == X3_FFN_MOE ? layer->moe.rule.n_experts : 0;
    X3_TRY(rc, out, x3_alloc(&s->hessians, layer->n_inputs, sizeof *s->hessians, err));
    X3_TRY(rc, out, x3_alloc(&s->tokens, s->n_experts, sizeof *s->tokens, err));
out:
    if (rc != X3_OK)
        x3_layer_stats_free(s);
    return rc;
}

void x3_layer_stats_free(x3_layer_stats *s)
{
    for (size_t i = 0; s->hessians != NULL && i < s->layer->n_inputs; i++)
        x3_hessian_free(s->hessians[i]);
    free(s->hessians);
    free(s->tokens);
    *s = (x3_layer_stats){0};
}

/* Input that gate and up of all experts read, before it is cut into experts: the router's. */
static int block_input(const x3_layer_desc *l)
{
    return l->linears[l->moe.router].input;
}

/* Gate, up or down (part 0, 1, 2) of an expert. */
static const x3_linear_desc *expert_linear(const x3_layer_desc *l, size_t expert, size_t part)
{
    return &l->linears[(size_t)l->moe.first_expert + 3 * expert + part];
}

/* Whether something is quantized with the second moments of an input that is not an expert's. */
static bool is_calibrated(const x3_layer_desc *l, int input)
{
    if (l->ffn == X3_FFN_MOE && input == block_input(l))
        return true;
    for (size_t i = 0; i < l->n_linears; i++)
        if (l->linears[i].input == input && l->linears[i].quantized)
            return true;
    return false;
}

x3_hessian *x3_layer_stats_hessian(const x3_layer_stats *s, size_t index)
{
    const x3_hessian *own = s->hessians[s->layer->linears[index].input];

    if (own == NULL && x3_layer_expert(s->layer, index) >= 0)
        return s->hessians[block_input(s->layer)];
    return s->hessians[s->layer->linears[index].input];
}

void x3_layer_stats_release_experts(x3_layer_stats *s)
{
    for (size_t e = 0; e < s->n_done; e++)
        for (size_t part = 0; part <= 2; part += 2) {
            x3_hessian **h = &s->hessians[expert_linear(s->layer, e, part)->input];
            x3_hessian_free(*h);
            *h = NULL;
        }
}

size_t x3_expert_full_tokens(size_t n_in)
{
    return 2 * n_in;
}

uint64_t x3_layer_stats_bytes(const x3_layer_desc *layer, const x3_expert_options *options, bool both_paths,
                              uint64_t *of_expert)
{
    const uint64_t bytes = (both_paths ? 2 : 1) * sizeof(float);
    uint64_t others = 0;

    *of_expert = 0;
    for (size_t i = 0; i < layer->n_linears; i++) {
        const uint64_t n = layer->linears[i].n_in;
        if (i > 0 && layer->linears[i].input == layer->linears[i - 1].input)
            continue;
        if (x3_layer_expert(layer, i) < 0)
            others += bytes * n * n;
        else if (x3_layer_expert(layer, i) == 0 && ((i - (size_t)layer->moe.first_expert) == 2 || options->own))
            *of_expert += bytes * n * n;
    }
    if (layer->ffn == X3_FFN_MOE) /* the fallback of one expert's down */
        others += bytes * layer->moe.n_inner * layer->moe.n_inner;
    return others;
}

/* ---- one pass ---- */

struct capture {
    x3_layer_runner *r;
    const x3_layer_weights *w;
    x3_layer_stats *s;
    bool original;         /* which path runs now */
    bool dense;            /* this pass captures inputs that are not an expert's */
    size_t first, end;     /* experts of this pass */
    float **d_original;    /* [n_inputs], inputs of the batch on the original path; NULL entries: none */
    float *d_gathered, *d_inner, *d_inner2; /* one expert's rows on the original path, and what gate and up make of them */
    /* tokens for experts with too few: whole rows spread over the text, both paths' inputs of the block */
    size_t n_fill;         /* rows: number i is row i * n_rows / n_fill of the text */
    float *d_fill, *d_fill_original; /* [n_fill][n_cols][hidden] */
    size_t row, n;         /* rows of the text in the batch */
};

static x3_status on_expert(struct capture *c, const x3_captured *in, x3_err *err)
{
    const x3_device_ops *ops = c->s->dev->ops;
    const size_t e = (size_t)in->expert, hidden = c->r->hidden;
    const bool down = in->input == expert_linear(in->layer, e, 2)->input;
    const float *d_xf = NULL, *weights = NULL;
    x3_status rc;

    if (e < c->first || e >= c->end)
        return X3_OK;
    if (!down)
        c->s->tokens[e] += in->n_rows;
    if (!down && !c->s->options.own)
        return X3_OK;
    if (c->s->both) {
        X3_TRY(rc, out, ops->gather_rows(c->s->dev, c->d_original[block_input(in->layer)], in->d_rows, in->n_rows, hidden,
                                         c->d_gathered, err));
        d_xf = c->d_gathered;
        if (down) {
            X3_TRY(rc, out, x3_expert_inner(c->r->f, c->w, e, c->d_gathered, in->n_rows, c->d_inner, c->d_inner2, err));
            d_xf = c->d_inner;
        }
    }
    if (c->s->options.weighting == X3_EXPERT_WEIGHT_ALL || (down && c->s->options.weighting == X3_EXPERT_WEIGHT_DOWN))
        weights = in->weights;
    rc = x3_hessian_add_weighted(c->s->hessians[in->input], in->d_x, d_xf, weights, in->n_rows, err);
out:
    return rc;
}

/* Keeps the rows of the batch that the fallback uses. */
static x3_status keep_fill(struct capture *c, const float *d_x, float *d_fill, x3_err *err)
{
    const size_t floats = c->r->n_cols * c->r->hidden;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < c->n_fill && rc == X3_OK; i++) {
        const size_t row = i * c->r->n_rows / c->n_fill;
        if (row >= c->row && row < c->row + c->n)
            rc = c->s->dev->ops->copy(c->s->dev, d_fill + i * floats, d_x + (row - c->row) * floats, floats * sizeof(float),
                                      err);
    }
    return rc;
}

static x3_status on_input(void *arg, const x3_captured *in, x3_err *err)
{
    struct capture *c = arg;
    const bool block = c->s->n_experts > 0 && in->expert < 0 && in->input == block_input(in->layer);
    x3_status rc = X3_OK;

    if (in->expert >= 0)
        return c->original ? X3_OK : on_expert(c, in, err);
    if (!is_calibrated(in->layer, in->input))
        return X3_OK;
    if (block)
        rc = keep_fill(c, in->d_x, c->original ? c->d_fill_original : c->d_fill, err);
    if (rc == X3_OK && c->original)
        return c->s->dev->ops->copy(c->s->dev, c->d_original[in->input], in->d_x, in->n_rows * in->n * sizeof *in->d_x, err);
    if (rc == X3_OK && c->dense)
        rc = x3_hessian_add(c->s->hessians[in->input], in->d_x, c->d_original[in->input], in->n_rows, err);
    return rc;
}

/* Hessians and buffers of this pass. */
static x3_status create_buffers(struct capture *c, x3_err *err)
{
    const x3_layer_desc *l = c->s->layer;
    const size_t positions = c->r->at_once * c->r->n_cols, hidden = c->r->hidden;
    x3_device *dev = c->s->dev;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&c->d_original, l->n_inputs, sizeof *c->d_original, err));
    for (size_t i = 0; i < l->n_linears; i++) {
        const x3_linear_desc *d = &l->linears[i];
        const int e = x3_layer_expert(l, i);
        bool wanted = e < 0 ? c->dense : (size_t)e >= c->first && (size_t)e < c->end;
        if (e >= 0 && !c->s->options.own && d->input != expert_linear(l, (size_t)e, 2)->input)
            wanted = false;
        if (e < 0 && !is_calibrated(l, d->input))
            continue;
        if (wanted && c->s->hessians[d->input] == NULL)
            X3_TRY(rc, out, x3_hessian_create(&c->s->hessians[d->input], dev, d->n_in, c->s->both, err));
        if (c->s->both && e < 0 && c->d_original[d->input] == NULL)
            X3_TRY(rc, out, x3_device_floats(dev, &c->d_original[d->input], positions * d->n_in, err));
    }
    if (c->s->n_experts == 0)
        goto out;
    c->n_fill = (4 * l->moe.n_inner + c->r->n_cols - 1) / c->r->n_cols;
    c->n_fill = x3_min_size(c->n_fill, c->r->at_once);
    X3_TRY(rc, out, x3_device_floats(dev, &c->d_fill, c->n_fill * c->r->n_cols * hidden, err));
    X3_TRY(rc, out, x3_device_floats(dev, &c->d_inner, positions * l->moe.n_inner, err));
    X3_TRY(rc, out, x3_device_floats(dev, &c->d_inner2, positions * l->moe.n_inner, err));
    if (c->s->both) {
        X3_TRY(rc, out, x3_device_floats(dev, &c->d_fill_original, c->n_fill * c->r->n_cols * hidden, err));
        X3_TRY(rc, out, x3_device_floats(dev, &c->d_gathered, positions * hidden, err));
    }
out:
    return rc;
}

static void free_buffers(struct capture *c)
{
    x3_device *dev = c->s->dev;

    for (size_t i = 0; c->d_original != NULL && i < c->s->layer->n_inputs; i++)
        x3_device_free(dev, c->d_original[i]);
    free(c->d_original);
    x3_device_free(dev, c->d_gathered);
    x3_device_free(dev, c->d_inner);
    x3_device_free(dev, c->d_inner2);
    x3_device_free(dev, c->d_fill);
    x3_device_free(dev, c->d_fill_original);
}

/* ---- experts with too few tokens ---- */

/* Second moments of an expert's down input over the fallback's tokens. */
static x3_status fill_down(struct capture *c, size_t e, x3_hessian **out, x3_err *err)
{
    const size_t n_inner = c->s->layer->moe.n_inner, hidden = c->r->hidden, tokens = c->n_fill * c->r->n_cols;
    const size_t step = c->r->at_once * c->r->n_cols; /* what the buffers hold */
    float *d_original = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_hessian_create(out, c->s->dev, n_inner, c->s->both, err));
    if (c->s->both)
        X3_TRY(rc, out, x3_device_floats(c->s->dev, &d_original, x3_min_size(step, tokens) * n_inner, err));
    for (size_t at = 0; at < tokens; at += step) {
        const size_t n = x3_min_size(step, tokens - at);
        if (c->s->both)
            X3_TRY(rc, out, x3_expert_inner(c->r->f, c->w, e, c->d_fill_original + at * hidden, n, d_original, c->d_inner2,
                                            err));
        X3_TRY(rc, out, x3_expert_inner(c->r->f, c->w, e, c->d_fill + at * hidden, n, c->d_inner, c->d_inner2, err));
        X3_TRY(rc, out, x3_hessian_add(*out, c->d_inner, d_original, n, err));
    }
    rc = x3_hessian_finish(*out, err);
out:
    x3_device_free(c->s->dev, d_original);
    return rc;
}

static double missing_part(size_t tokens, size_t n_in)
{
    const size_t full = x3_expert_full_tokens(n_in);

    return tokens >= full ? 0 : 1 - (double)tokens / (double)full;
}

static x3_status finish_expert(struct capture *c, size_t e, x3_err *err)
{
    const x3_layer_desc *l = c->s->layer;
    x3_hessian *in = c->s->hessians[expert_linear(l, e, 0)->input], *down = c->s->hessians[expert_linear(l, e, 2)->input];
    x3_hessian *fill = NULL;
    double part;
    x3_status rc = X3_OK;

    if (in != NULL) {
        X3_TRY(rc, out, x3_hessian_finish(in, err));
        part = missing_part(in->n_rows, in->n);
        if (part > 0)
            X3_TRY(rc, out, x3_hessian_blend(in, c->s->hessians[block_input(l)], part, err));
    }
    X3_TRY(rc, out, x3_hessian_finish(down, err));
    part = missing_part(down->n_rows, down->n);
    if (part > 0) {
        X3_TRY(rc, out, fill_down(c, e, &fill, err));
        rc = x3_hessian_blend(down, fill, part, err);
    }
out:
    x3_hessian_free(fill);
    return rc;
}

static x3_status finish_pass(struct capture *c, x3_err *err)
{
    const x3_layer_desc *l = c->s->layer;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < l->n_linears && c->dense; i++)
        if (x3_layer_expert(l, i) < 0 && (i == 0 || l->linears[i].input != l->linears[i - 1].input) &&
            is_calibrated(l, l->linears[i].input))
            X3_TRY(rc, out, x3_hessian_finish(c->s->hessians[l->linears[i].input], err));
    for (size_t e = c->first; e < c->end; e++)
        X3_TRY(rc, out, finish_expert(c, e, err));
    c->s->dense_done = true;
    c->s->n_done = c->end;
out:
    return rc;
}

/* ---- the pass ---- */

/* Experts that a run of the layer needs: all when its output is kept, else those of the pass, else none. */
static void select_experts(struct capture *c, bool all, bool some)
{
    c->r->f->first_expert = all || !some ? 0 : c->first;
    c->r->f->end_expert = all ? SIZE_MAX : some ? c->end : 0;
}

x3_status x3_capture_layer(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *quantized,
                           x3_hidden_state *original, bool first, x3_layer_stats *s, size_t end_expert, x3_err *err)
{
    struct capture c = {.r = r, .w = w, .s = s, .dense = !s->dense_done, .first = s->n_done, .end = end_expert};
    const bool last = end_expert == s->n_experts;
    x3_status rc;

    X3_TRY(rc, out, create_buffers(&c, err));
    r->f->capture = on_input;
    r->f->capture_arg = &c;
    for (c.row = 0; c.row < r->n_rows; c.row += r->at_once) {
        c.n = x3_min_size(r->at_once, r->n_rows - c.row);
        if (s->both) {
            c.original = true;
            select_experts(&c, last, false);
            X3_TRY(rc, out, x3_run_rows(r, w, original, c.row, c.n, err));
            if (last)
                X3_TRY(rc, out, x3_store_rows(r, original, c.row, c.n, err));
        }
        c.original = false;
        select_experts(&c, last && original != NULL && first, true);
        X3_TRY(rc, out, x3_run_rows(r, w, quantized, c.row, c.n, err));
        if (last && original != NULL && first)
            X3_TRY(rc, out, x3_store_rows(r, original, c.row, c.n, err));
    }
    rc = finish_pass(&c, err);
out:
    r->f->capture = NULL;
    r->f->first_expert = 0;
    r->f->end_expert = SIZE_MAX;
    free_buffers(&c);
    return rc;
}
