/* Mixture of experts: a router chooses experts for every row, the rows are grouped by expert, each linear of all experts
 * runs in one operation, and every row sums the outputs of its experts in the order of choice. */
#include <stdlib.h>

#include "runtime/forward.h"

/* Views of the scratch. */
struct buffers {
    size_t n_rows, n_slots;
    float *d_logits, *d_weights; /* [n_rows][n_experts], [n_rows][n_chosen] */
    int32_t *d_ids, *d_slots;    /* [n_rows][n_chosen] */
    int32_t *d_rows, *d_first;   /* [n_slots], [n_experts + 1] */
    float *d_gate, *d_up;        /* [n_slots][n_inner] */
    float *d_y;                  /* [n_slots][hidden] */
};

static size_t head_floats(const x3_moe_desc *d, size_t n_rows)
{
    return x3_round_up(n_rows * (d->rule.n_experts + 4 * d->rule.n_chosen) + d->rule.n_experts + 1, 16);
}

static size_t shared_floats(const x3_moe_desc *d, size_t n_rows)
{
    return d->has_shared ? x3_mlp_scratch(&d->shared, n_rows) + n_rows : 0;
}

size_t x3_moe_scratch(const x3_moe_desc *d, size_t hidden, size_t n_rows)
{
    size_t routed = n_rows * d->rule.n_chosen * (2 * d->n_inner + hidden);

    return head_floats(d, n_rows) + x3_max_size(routed, shared_floats(d, n_rows));
}

static struct buffers carve(const x3_moe_desc *d, size_t n_rows, float *d_scratch)
{
    const size_t k = d->rule.n_chosen;
    struct buffers b = {.n_rows = n_rows, .n_slots = n_rows * k};

    b.d_logits = d_scratch;
    b.d_weights = b.d_logits + n_rows * d->rule.n_experts;
    b.d_ids = (int32_t *)(void *)(b.d_weights + n_rows * k);
    b.d_slots = b.d_ids + n_rows * k;
    b.d_rows = b.d_slots + n_rows * k;
    b.d_first = b.d_rows + n_rows * k;
    b.d_gate = d_scratch + head_floats(d, n_rows);
    b.d_up = b.d_gate + b.n_slots * d->n_inner;
    b.d_y = b.d_up + b.n_slots * d->n_inner;
    return b;
}

/* The part of the layer that all rows go through. */
static x3_status shared_forward(x3_forward *f, const x3_layer_weights *w, size_t n_rows, const float *d_in, float *d_out,
                                float *d_scratch, x3_err *err)
{
    const x3_moe_desc *d = &w->desc->moe;
    float *d_gate = d_scratch;
    x3_status rc;

    if (d->shared_gate >= 0)
        X3_TRY(rc, out, x3_forward_linear(f, w, d->shared_gate, d_in, n_rows, d_gate, err));
    X3_TRY(rc, out, x3_mlp_forward(f, w, &d->shared, n_rows, d_in, d_out, d_scratch + n_rows, err));
    if (d->shared_gate >= 0)
        rc = f->dev->ops->sigmoid_scale(f->dev, d_out, d_gate, n_rows, f->model->hidden, err);
out:
    return rc;
}

/* Linear `part` (0 gate, 1 up, 2 down) of experts [first, end). */
static x3_status run_experts(x3_forward *f, const x3_layer_weights *w, const struct buffers *b, size_t first, size_t end,
                             size_t part, const int32_t *d_rows, const float *d_x, float *d_y, x3_err *err)
{
    const size_t at = (size_t)w->desc->moe.first_expert + part;
    const x3_linear_desc *l = &w->desc->linears[at];
    x3_expert_args a = {
        .weights = &w->linears[at + 3 * first],
        .n_experts = end - first,
        .stride = 3,
        .d_first = b->d_first + first,
        .d_rows = d_rows,
        .n_slots = b->n_slots,
        .d_x = d_x,
        .ldx = l->n_in,
        .d_y = d_y,
        .ldy = l->n_out,
    };

    return f->dev->ops->expert_linear(f->dev, &a, err);
}

x3_status x3_expert_inner(x3_forward *f, const x3_layer_weights *w, size_t expert, const float *d_x, size_t n_rows,
                          float *d_out, float *d_scratch, x3_err *err)
{
    const x3_moe_desc *d = &w->desc->moe;
    const x3_weight *gate = &w->linears[(size_t)d->first_expert + 3 * expert], *up = gate + 1;
    const size_t hidden = f->model->hidden;
    x3_status rc;

    X3_TRY(rc, out, f->dev->ops->linear(f->dev, gate, d_x, hidden, n_rows, d_out, d->n_inner, err));
    X3_TRY(rc, out, f->dev->ops->linear(f->dev, up, d_x, hidden, n_rows, d_scratch, d->n_inner, err));
    rc = f->dev->ops->silu_mul(f->dev, d_out, d_scratch, n_rows * d->n_inner, d_out, err);
out:
    return rc;
}

/* ---- captures ---- */

/* What the hook is told about experts: host copies of the grouping. */
struct told {
    int32_t *first, *slots; /* [n_experts + 1], [n_rows][n_chosen] */
    float *weights, *of_slot; /* [n_rows][n_chosen], [n_slots] */
};

static void free_told(struct told *t)
{
    free(t->first);
    free(t->slots);
    free(t->weights);
    free(t->of_slot);
}

static x3_status download_grouping(x3_forward *f, const x3_moe_desc *d, const struct buffers *b, struct told *t, x3_err *err)
{
    x3_device *dev = f->dev;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&t->first, d->rule.n_experts + 1, sizeof *t->first, err));
    X3_TRY(rc, out, x3_alloc(&t->slots, b->n_slots, sizeof *t->slots, err));
    X3_TRY(rc, out, x3_alloc(&t->weights, b->n_slots, sizeof *t->weights, err));
    X3_TRY(rc, out, x3_alloc(&t->of_slot, b->n_slots, sizeof *t->of_slot, err));
    X3_TRY(rc, out, dev->ops->download(dev, t->first, b->d_first, (d->rule.n_experts + 1) * sizeof *t->first, err));
    X3_TRY(rc, out, dev->ops->download(dev, t->slots, b->d_slots, b->n_slots * sizeof *t->slots, err));
    X3_TRY(rc, out, dev->ops->download(dev, t->weights, b->d_weights, b->n_slots * sizeof *t->weights, err));
    for (size_t i = 0; i < b->n_slots; i++)
        t->of_slot[t->slots[i]] = t->weights[i];
out:
    return rc;
}

/* Shows linear `part`'s input of experts [first, end): d_x is [n_slots][n]. */
static x3_status show(x3_forward *f, const x3_layer_weights *w, const struct buffers *b, const struct told *t, size_t first,
                      size_t end, size_t part, const float *d_x, x3_err *err)
{
    x3_status rc = X3_OK;

    for (size_t e = first; e < end && rc == X3_OK; e++) {
        const x3_linear_desc *l = &w->desc->linears[(size_t)w->desc->moe.first_expert + 3 * e + part];
        const size_t slot = (size_t)t->first[e];
        const x3_captured c = {.layer = w->desc,
                               .input = l->input,
                               .d_x = d_x + slot * l->n_in,
                               .n_rows = (size_t)t->first[e + 1] - slot,
                               .n = l->n_in,
                               .expert = (int)e,
                               .d_rows = b->d_rows + slot,
                               .weights = t->of_slot + slot};
        if (c.n_rows > 0)
            rc = f->capture(f->capture_arg, &c, err);
    }
    return rc;
}

/* ---- the block ---- */

static x3_status routed_forward(x3_forward *f, const x3_layer_weights *w, const struct buffers *b, const float *d_in,
                                float *d_out, x3_err *err)
{
    const x3_device_ops *ops = f->dev->ops;
    const x3_moe_desc *d = &w->desc->moe;
    const size_t end = x3_min_size(f->end_expert, d->rule.n_experts), first = x3_min_size(f->first_expert, end);
    const size_t hidden = f->model->hidden;
    struct told t = {0};
    x3_status rc;

    if (f->capture != NULL && first < end) {
        X3_TRY(rc, out, download_grouping(f, d, b, &t, err));
        X3_TRY(rc, out, ops->gather_rows(f->dev, d_in, b->d_rows, b->n_slots, hidden, b->d_y, err));
        X3_TRY(rc, out, show(f, w, b, &t, first, end, 0, b->d_y, err));
    }
    X3_TRY(rc, out, run_experts(f, w, b, first, end, 0, b->d_rows, d_in, b->d_gate, err));
    X3_TRY(rc, out, run_experts(f, w, b, first, end, 1, b->d_rows, d_in, b->d_up, err));
    X3_TRY(rc, out, ops->silu_mul(f->dev, b->d_gate, b->d_up, b->n_slots * d->n_inner, b->d_gate, err));
    if (t.first != NULL)
        X3_TRY(rc, out, show(f, w, b, &t, first, end, 2, b->d_gate, err));
    X3_TRY(rc, out, run_experts(f, w, b, first, end, 2, NULL, b->d_gate, b->d_y, err));
    rc = ops->combine_rows(f->dev, b->d_y, b->d_slots, b->d_weights, b->n_rows, d->rule.n_chosen, hidden, d->has_shared, d_out,
                           err);
out:
    free_told(&t);
    return rc;
}

x3_status x3_moe_forward(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, const float *d_in, float *d_out,
                         float *d_scratch, x3_err *err)
{
    const x3_device_ops *ops = f->dev->ops;
    const x3_moe_desc *d = &w->desc->moe;
    const struct buffers b = carve(d, batch->n_rows, d_scratch);
    const float *d_correction = d->correction >= 0 ? w->vectors[d->correction] : NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_forward_linear(f, w, d->router, d_in, b.n_rows, b.d_logits, err));
    X3_TRY(rc, out, ops->route(f->dev, &d->rule, b.d_logits, d_correction, b.n_rows, b.d_ids, b.d_weights, err));
    X3_TRY(rc, out, ops->group_rows(f->dev, b.d_ids, b.n_rows, d->rule.n_chosen, d->rule.n_experts, b.d_first, b.d_rows,
                                    b.d_slots, err));
    if (d->has_shared) /* its scratch lies where the experts' will */
        X3_TRY(rc, out, shared_forward(f, w, b.n_rows, d_in, d_out, b.d_gate, err));
    rc = routed_forward(f, w, &b, d_in, d_out, err);
out:
    return rc;
}
