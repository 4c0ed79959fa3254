/* One layer of a measurement: noise for its linears, a path for each, all older paths through it. */
#include <stdio.h>
#include <stdlib.h>

#include "quant/measure_internal.h"

static void progress(struct x3_measure *s, double step, const char *what)
{
    s->done += step;
    if (s->events.progress != NULL)
        s->events.progress(s->events.arg, s->done, s->total, what);
}

struct layer_work {
    struct x3_measure *s;
    const x3_layer_desc *l;
    x3_layer_weights w;
    x3_layer_stats stats;
    x3_quant_linear *noisy; /* [l->n_linears] */
    x3_weight *clean;       /* [l->n_linears]: those of w while it holds the noisy ones */
    double *mass;           /* [l->n_linears]: squared routing weights an expert got; 0 for other linears */
};

/* ---- noise ---- */

/* Linears [first, first + n) share an input. */
static x3_status disturb_input(struct layer_work *t, size_t first, size_t n, x3_err *err)
{
    const x3_quant_options options = {.codebook = t->s->o.codebook, .damping = 0.025, .seed = t->s->o.seed, .noise = true};
    const x3_hessian *h = x3_layer_stats_hessian(&t->stats, first);
    bool uncalibrated = false;
    char group[512];
    x3_status rc = X3_OK;

    for (size_t i = first; i < first + n; i++) {
        const x3_linear_desc *d = &t->l->linears[i];
        t->noisy[i] = (x3_quant_linear){.name = d->name, .n_in = d->n_in, .n_out = d->n_out, .K = t->s->o.noise_bits};
        X3_TRY(rc, out, x3_dense_floats(&t->noisy[i].d_w, t->s->dev, &t->w.linears[i], err));
        t->mass[i] = x3_layer_expert(t->l, i) < 0 ? 0 : h->weight;
    }
    snprintf(group, sizeof group, "%s.input%d", t->l->prefix, t->l->linears[first].input);
    X3_TRY(rc, out, x3_quantize_group(t->s->dev, &options, group, h, t->noisy + first, n, &uncalibrated, err));
out:
    for (size_t i = first; i < first + n; i++) {
        x3_device_free(t->s->dev, (void *)(uintptr_t)t->noisy[i].d_w);
        t->noisy[i].d_w = NULL;
    }
    return rc;
}

static x3_status disturb_linears(struct layer_work *t, size_t first, size_t end, x3_err *err)
{
    x3_status rc = X3_OK;

    for (size_t i = first; i < end && rc == X3_OK;) {
        size_t n = 0;
        while (i + n < end && t->l->linears[i + n].input == t->l->linears[i].input && t->l->linears[i + n].quantized)
            n++;
        if (n > 0)
            rc = disturb_input(t, i, n, err);
        i += n > 0 ? n : 1;
    }
    return rc;
}

/* Noise for all linears of the layer; experts a few at a time, so that few Hessians are held. */
static x3_status disturb_layer(struct layer_work *t, x3_err *err)
{
    enum { EXPERTS_AT_ONCE = 16 };
    x3_layer_stats *st = &t->stats;
    x3_status rc;

    do {
        const size_t first = st->n_done, end = x3_min_size(first + EXPERTS_AT_ONCE, st->n_experts);
        X3_TRY(rc, out, x3_capture_layer(&t->s->calibration.runner, &t->w, t->s->calibration.clean, NULL, false, st, end, err));
        if (end > first)
            X3_TRY(rc, out, disturb_linears(t, (size_t)t->l->moe.first_expert + 3 * first,
                                            (size_t)t->l->moe.first_expert + 3 * end, err));
        x3_layer_stats_release_experts(st);
    } while (st->n_done < st->n_experts);
    rc = disturb_linears(t, 0, t->l->ffn == X3_FFN_MOE ? (size_t)t->l->moe.first_expert : t->l->n_linears, err);
out:
    return rc;
}

/* ---- paths ---- */

/* Linears first, first + stride, ...: n of them. */
struct unit {
    size_t first, stride, n;
};

static size_t units_of(const x3_layer_desc *l, struct unit *units)
{
    const size_t n_others = l->ffn == X3_FFN_MOE ? (size_t)l->moe.first_expert : l->n_linears;
    size_t n = 0;

    for (size_t i = 0; i < n_others; i++)
        if (l->linears[i].quantized) {
            if (units != NULL)
                units[n] = (struct unit){i, 1, 1};
            n++;
        }
    for (size_t p = 0; l->ffn == X3_FFN_MOE && p < 3; p++) {
        if (!l->linears[n_others + p].quantized)
            continue;
        if (units != NULL)
            units[n] = (struct unit){n_others + p, 3, l->moe.rule.n_experts};
        n++;
    }
    return n;
}

size_t x3_measure_paths_of(const x3_layer_desc *l)
{
    return units_of(l, NULL);
}

/* Experts share what a projection of theirs costs by the energy of the error that each puts into the layer's output:
 * relative error of the projection, times the energy of the expert's output, which is its squared routing weights times
 * the mean energy of its down projection. One that got no token is counted as if it had a tenth of the mean. */
static void share(const struct layer_work *t, struct x3_measured_path *p, const struct unit *u)
{
    double sum = 0, mass = 0;

    for (size_t i = 0; i < u->n; i++)
        mass += t->mass[(size_t)t->l->moe.first_expert + 3 * i + 2] / (double)u->n;
    for (size_t i = 0; i < u->n; i++) {
        const size_t down = (size_t)t->l->moe.first_expert + 3 * i + 2;
        p->members[i].share = p->members[i].error * t->noisy[down].energy * (t->mass[down] + 0.1 * mass);
        sum += p->members[i].share;
    }
    for (size_t i = 0; i < u->n; i++)
        p->members[i].share = sum > 0 ? p->members[i].share / sum : 1 / (double)u->n;
}

/* w's linears become the noisy ones, or the clean ones again. */
static void exchange(struct layer_work *t, bool to_noisy)
{
    for (size_t i = 0; i < t->l->n_linears; i++) {
        if (!t->l->linears[i].quantized)
            continue;
        if (to_noisy)
            t->clean[i] = t->w.linears[i];
        t->w.linears[i] = to_noisy ? t->noisy[i].weight : t->clean[i];
        t->w.linears[i].bias = t->clean[i].bias;
    }
}

/* Clean weights and twice the noise: 2 (W + E) - W, in *out. */
static x3_status double_noise(struct layer_work *t, size_t linear, x3_weight *out, x3_err *err)
{
    const size_t n = t->l->linears[linear].n_in * t->l->linears[linear].n_out;
    const float *d_sum = NULL, *d_noisy = NULL, *d_clean = NULL;
    x3_device *dev = t->s->dev;
    x3_status rc;

    X3_TRY(rc, out, x3_dense_floats(&d_sum, dev, &t->noisy[linear].weight, err));
    X3_TRY(rc, out, x3_dense_floats(&d_noisy, dev, &t->noisy[linear].weight, err));
    X3_TRY(rc, out, dev->ops->axpy(dev, 1, d_noisy, (float *)(uintptr_t)d_sum, n, err));
    X3_TRY(rc, out, x3_dense_floats(&d_clean, dev, &t->clean[linear], err));
    X3_TRY(rc, out, dev->ops->axpy(dev, -1, d_clean, (float *)(uintptr_t)d_sum, n, err));
    *out = t->noisy[linear].weight;
    out->data = d_sum;
    out->bias = t->clean[linear].bias;
    d_sum = NULL;
out:
    x3_device_free(dev, (void *)(uintptr_t)d_sum);
    x3_device_free(dev, (void *)(uintptr_t)d_noisy);
    x3_device_free(dev, (void *)(uintptr_t)d_clean);
    return rc;
}

/* A new path, whose states are those before the layer. */
static x3_status open_path(struct layer_work *t, const struct unit *u, x3_err *err)
{
    struct x3_measure *s = t->s;
    struct x3_measured_path *p = &s->paths[s->n_paths];
    x3_status rc;

    *p = (struct x3_measured_path){.n_members = u->n};
    X3_TRY(rc, out, x3_alloc(&p->members, u->n, sizeof *p->members, err));
    s->n_paths++;
    for (size_t i = 0; i < u->n; i++) {
        const size_t at = u->first + i * u->stride;
        p->members[i] = (struct x3_measured_member){&t->l->linears[at], 1, t->noisy[at].error_source};
    }
    if (u->n > 1)
        share(t, p, u);
    X3_TRY(rc, out, x3_measure_states(s, &s->scored, &p->alone, err));
    X3_TRY(rc, out, x3_measure_states(s, &s->scored, &p->added, err));
    X3_TRY(rc, out, x3_hidden_state_copy(p->alone, s->scored.clean, err));
    rc = x3_hidden_state_copy(p->added, s->noisy, err);
out:
    return rc;
}

/* The clean layer, but for noise in the linears of a unit. */
static x3_status run_alone(struct layer_work *t, const struct unit *u, x3_hidden_state *states, x3_err *err)
{
    x3_weight *clean = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&clean, u->n, sizeof *clean, err));
    for (size_t i = 0; i < u->n; i++) {
        const size_t at = u->first + i * u->stride;
        clean[i] = t->w.linears[at];
        t->w.linears[at] = t->noisy[at].weight;
        t->w.linears[at].bias = clean[i].bias;
    }
    rc = x3_run_layer(&t->s->scored.runner, &t->w, states, err);
    for (size_t i = 0; i < u->n; i++)
        t->w.linears[u->first + i * u->stride] = clean[i];
out:
    free(clean);
    return rc;
}

/* The noisy layer with twice the noise in the linears of a unit. */
static x3_status run_added(struct layer_work *t, const struct unit *u, x3_hidden_state *states, x3_err *err)
{
    x3_weight *doubled = NULL;
    size_t n = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&doubled, u->n, sizeof *doubled, err));
    for (; n < u->n; n++) {
        const size_t at = u->first + n * u->stride;
        X3_TRY(rc, out, double_noise(t, at, &doubled[n], err));
        t->w.linears[at] = doubled[n];
    }
    rc = x3_run_layer(&t->s->scored.runner, &t->w, states, err);
out:
    for (size_t i = 0; i < n; i++) {
        const size_t at = u->first + i * u->stride;
        t->w.linears[at] = t->noisy[at].weight;
        t->w.linears[at].bias = t->clean[at].bias;
        x3_device_free(t->s->dev, (void *)(uintptr_t)doubled[i].data);
    }
    free(doubled);
    return rc;
}

/* ---- the layer ---- */

/* Paths [0, n_older) began in earlier layers, the others begin here, one a unit. The layer is clean, or with `noisy` the noisy one. */
static x3_status run_paths(struct layer_work *t, const struct unit *units, size_t n_older, bool noisy, x3_err *err)
{
    struct x3_measure *s = t->s;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < s->n_paths && rc == X3_OK; i++) {
        x3_hidden_state *states = noisy ? s->paths[i].added : s->paths[i].alone;
        const struct unit *u = i < n_older ? NULL : &units[i - n_older];
        rc = u == NULL ? x3_run_layer(&s->scored.runner, &t->w, states, err)
             : noisy   ? run_added(t, u, states, err)
                       : run_alone(t, u, states, err);
        progress(s, 1, u == NULL ? t->l->prefix : t->l->linears[u->first].name);
    }
    return rc;
}

x3_status x3_measure_layer(struct x3_measure *s, size_t layer, bool starts, x3_err *err)
{
    const x3_layer_desc *l = &s->source->model->layers[layer];
    const x3_expert_options experts = {.own = false, .weighting = X3_EXPERT_WEIGHT_DOWN};
    const size_t n_older = s->n_paths;
    struct layer_work t = {.s = s, .l = l};
    struct unit *units = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&t.noisy, l->n_linears, sizeof *t.noisy, err));
    X3_TRY(rc, out, x3_alloc(&t.clean, l->n_linears, sizeof *t.clean, err));
    X3_TRY(rc, out, x3_alloc(&t.mass, l->n_linears, sizeof *t.mass, err));
    X3_TRY(rc, out, x3_layer_weights_load(&t.w, s->dev, s->source, l, err));
    X3_TRY(rc, out, x3_layer_runner_prepare(&s->calibration.runner, l, err));
    X3_TRY(rc, out, x3_layer_runner_prepare(&s->scored.runner, l, err));
    X3_TRY(rc, out, x3_layer_stats_create(&t.stats, s->dev, l, &experts, false, err));
    X3_TRY(rc, out, disturb_layer(&t, err));
    X3_TRY(rc, out, x3_run_layer(&s->calibration.runner, &t.w, s->calibration.clean, err));
    X3_TRY(rc, out, x3_alloc(&units, l->n_linears, sizeof *units, err));
    for (size_t i = 0, n = starts ? units_of(l, units) : 0; i < n; i++)
        X3_TRY(rc, out, open_path(&t, &units[i], err));
    X3_TRY(rc, out, run_paths(&t, units, n_older, false, err));
    X3_TRY(rc, out, x3_run_layer(&s->scored.runner, &t.w, s->scored.clean, err));
    exchange(&t, true);
    rc = run_paths(&t, units, n_older, true, err);
    if (rc == X3_OK)
        rc = x3_run_layer(&s->scored.runner, &t.w, s->noisy, err);
    exchange(&t, false);
out:
    free(units);
    for (size_t i = 0; t.noisy != NULL && i < l->n_linears; i++)
        x3_quant_linear_free(s->dev, &t.noisy[i]);
    free(t.noisy);
    free(t.clean);
    free(t.mass);
    x3_layer_stats_free(&t.stats);
    x3_layer_weights_free(&t.w);
    return rc;
}
