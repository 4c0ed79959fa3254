#include "runtime/serve/sampler.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

struct x3_sampler {
    x3_sampling p;
    x3_logit_bias *bias;
    size_t vocab;
    x3_rng rng;
    bool *in_prompt;      /* [vocab]; NULL without a repetition penalty */
    uint32_t *counts;     /* [vocab] in the reply; NULL without penalties */
    x3_alternative *heap; /* [vocab]: logits; NULL when greedy */
    double *weights;      /* [vocab] */
};

/* ---- parameters ---- */

x3_status x3_sampling_defaults(x3_sampling *s, const x3_hf_config *config, x3_err *err)
{
    const char *where = "generation_config.json";
    const cJSON *g = config == NULL ? NULL : config->generation;
    bool do_sample = true;
    x3_status rc = X3_OK;

    *s = (x3_sampling){.temperature = 1, .top_p = 1, .repetition_penalty = 1, .n_top = -1};
    if (g == NULL)
        return X3_OK;
    X3_TRY(rc, out, x3_json_bool(g, "do_sample", false, &do_sample, where, err));
    X3_TRY(rc, out, x3_json_number(g, "temperature", false, &s->temperature, where, err));
    X3_TRY(rc, out, x3_json_int(g, "top_k", 0, INT32_MAX, false, &s->top_k, where, err));
    X3_TRY(rc, out, x3_json_number(g, "top_p", false, &s->top_p, where, err));
    X3_TRY(rc, out, x3_json_number(g, "min_p", false, &s->min_p, where, err));
    X3_TRY(rc, out, x3_json_number(g, "repetition_penalty", false, &s->repetition_penalty, where, err));
    if (!do_sample)
        s->temperature = 0;
    if (x3_sampling_check(s, INT32_MAX, err) != X3_OK)
        rc = x3_fail(err, X3_ERR_INPUT, "%s: a sampling parameter is out of range", where);
out:
    return rc;
}

static x3_status check_range(const char *name, double value, double min, double max, x3_err *err)
{
    if (value >= min && value <= max)
        return X3_OK;
    return x3_fail(err, X3_ERR_INPUT, "\"%s\" is %g, outside %g to %g", name, value, min, max);
}

x3_status x3_sampling_check(const x3_sampling *s, size_t vocab, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, check_range("temperature", s->temperature, 0, 100, err));
    X3_TRY(rc, out, check_range("top_k", (double)s->top_k, 0, INT32_MAX, err));
    X3_TRY(rc, out, check_range("top_p", s->top_p, 0, 1, err));
    X3_TRY(rc, out, check_range("min_p", s->min_p, 0, 1, err));
    X3_TRY(rc, out, check_range("repetition_penalty", s->repetition_penalty, 0.01, 100, err));
    X3_TRY(rc, out, check_range("presence_penalty", s->presence_penalty, -2, 2, err));
    X3_TRY(rc, out, check_range("frequency_penalty", s->frequency_penalty, -2, 2, err));
    X3_TRY(rc, out, check_range("top_logprobs", s->n_top, -1, X3_TOP_LOGPROBS_MAX, err));
    for (size_t i = 0; i < s->n_bias; i++) {
        if (s->bias[i].id < 0 || (size_t)s->bias[i].id >= vocab)
            return x3_fail(err, X3_ERR_INPUT, "\"logit_bias\": token %d is not in the vocabulary of %zu", (int)s->bias[i].id, vocab);
        X3_TRY(rc, out, check_range("logit_bias", s->bias[i].bias, -100, 100, err));
    }
out:
    return rc;
}

/* ---- life ---- */

x3_status x3_sampler_create(x3_sampler **out, const x3_sampling *p, size_t vocab, const char *name, x3_err *err)
{
    x3_sampler *s = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_sampling_check(p, vocab, err));
    X3_TRY(rc, out, x3_alloc(&s, 1, sizeof *s, err));
    s->p = *p;
    s->vocab = vocab;
    if (p->temperature > 0 && !isfinite(1 / p->temperature))
        s->p.temperature = 0; /* 0 times an infinite inverse is no number */
    X3_TRY(rc, out, x3_alloc(&s->bias, p->n_bias, sizeof *s->bias, err));
    if (p->n_bias > 0)
        memcpy(s->bias, p->bias, p->n_bias * sizeof *s->bias);
    s->p.bias = s->bias;
    x3_rng_init(&s->rng, p->seed, name);
    if (p->repetition_penalty != 1)
        X3_TRY(rc, out, x3_alloc(&s->in_prompt, vocab, sizeof *s->in_prompt, err));
    if (p->repetition_penalty != 1 || p->presence_penalty != 0 || p->frequency_penalty != 0)
        X3_TRY(rc, out, x3_alloc(&s->counts, vocab, sizeof *s->counts, err));
    if (p->temperature > 0) {
        X3_TRY(rc, out, x3_alloc(&s->heap, vocab, sizeof *s->heap, err));
        X3_TRY(rc, out, x3_alloc(&s->weights, vocab, sizeof *s->weights, err));
    }
    *out = s;
    s = NULL;
out:
    x3_sampler_free(s);
    return rc;
}

void x3_sampler_free(x3_sampler *s)
{
    if (s == NULL)
        return;
    free(s->bias);
    free(s->in_prompt);
    free(s->counts);
    free(s->heap);
    free(s->weights);
    free(s);
}

void x3_sampler_prompt(x3_sampler *s, const int32_t *ids, size_t n)
{
    for (size_t i = 0; i < n && s->in_prompt != NULL; i++)
        if (ids[i] >= 0 && (size_t)ids[i] < s->vocab)
            s->in_prompt[ids[i]] = true;
}

/* ---- logits ---- */

static bool is_better(x3_alternative a, x3_alternative b)
{
    return a.logprob > b.logprob || (a.logprob == b.logprob && a.id < b.id);
}

#define LANES 16

/* The largest of n numbers, and whether one is a NaN: sixteen lanes, which the compiler makes vectors of. */
static float largest_of(const float *x, size_t n, bool *nan)
{
    float most[LANES];
    uint32_t bad[LANES] = {0}, any = 0;
    size_t i = 0;

    for (size_t j = 0; j < LANES; j++)
        most[j] = -INFINITY;
    for (; i + LANES <= n; i += LANES)
        for (size_t j = 0; j < LANES; j++) {
            most[j] = x[i + j] > most[j] ? x[i + j] : most[j];
            bad[j] |= x[i + j] != x[i + j] ? 1u : 0u;
        }
    for (; i < n; i++) {
        most[0] = x[i] > most[0] ? x[i] : most[0];
        bad[0] |= isnan(x[i]) ? 1u : 0u;
    }
    for (size_t j = 0; j < LANES; j++) {
        most[0] = most[j] > most[0] ? most[j] : most[0];
        any |= bad[j];
    }
    *nan = any != 0;
    return most[0];
}

/* Of equal ones the first. */
static x3_status find_best(const float *logits, size_t vocab, int32_t *best, x3_err *err)
{
    bool nan;
    const float most = largest_of(logits, vocab, &nan);
    size_t i = 0;

    *best = -1;
    while (nan && !isnan(logits[i]))
        i++;
    if (nan)
        return x3_fail(err, X3_ERR_NUMERIC, "the logit of token %zu is not a number", i);
    if (!isfinite(most))
        return x3_fail(err, X3_ERR_NUMERIC, "no logit is finite");
    while (logits[i] != most)
        i++;
    *best = (int32_t)i;
    return X3_OK;
}

/* The alternatives of the model, and the logarithm of the sum that makes them probabilities. */
static double report_top(const x3_sampler *s, const float *logits, int32_t best, x3_sampled *out)
{
    double sum = 0;

    for (size_t i = 0; i < s->vocab; i++) {
        x3_alternative a = {(int32_t)i, logits[i]};
        sum += exp((double)logits[i] - logits[best]);
        if (out->n_top == (size_t)s->p.n_top && (out->n_top == 0 || !is_better(a, out->top[out->n_top - 1])))
            continue;
        size_t at = out->n_top < (size_t)s->p.n_top ? out->n_top++ : out->n_top - 1;
        for (; at > 0 && is_better(a, out->top[at - 1]); at--)
            out->top[at] = out->top[at - 1];
        out->top[at] = a;
    }
    sum = log(sum) + logits[best];
    for (size_t i = 0; i < out->n_top; i++)
        out->top[i].logprob = (float)(out->top[i].logprob - sum);
    return sum;
}

static void adjust(const x3_sampler *s, float *logits)
{
    const float repetition = (float)s->p.repetition_penalty;

    for (size_t i = 0; i < s->p.n_bias; i++)
        logits[s->bias[i].id] += s->bias[i].bias;
    for (size_t i = 0; s->counts != NULL && i < s->vocab; i++) {
        if (s->in_prompt != NULL && (s->in_prompt[i] || s->counts[i] > 0))
            logits[i] = logits[i] > 0 ? logits[i] / repetition : logits[i] * repetition;
        if (s->counts[i] > 0)
            logits[i] -= (float)(s->p.presence_penalty + s->p.frequency_penalty * s->counts[i]);
    }
}

/* ---- drawing ---- */

static void sift_down(x3_alternative *heap, size_t n, size_t at)
{
    for (size_t child; (child = 2 * at + 1) < n; at = child) {
        if (child + 1 < n && is_better(heap[child + 1], heap[child]))
            child++;
        if (!is_better(heap[child], heap[at]))
            return;
        x3_alternative swap = heap[at];
        heap[at] = heap[child];
        heap[child] = swap;
    }
}

static void make_heap(x3_sampler *s, const float *logits)
{
    for (size_t i = 0; i < s->vocab; i++)
        s->heap[i] = (x3_alternative){(int32_t)i, logits[i]};
    for (size_t i = s->vocab / 2; i-- > 0;)
        sift_down(s->heap, s->vocab, i);
}

/* Moves the best n of the heap behind it, the best last; returns where they start. */
static x3_alternative pop(x3_sampler *s, size_t *n)
{
    x3_alternative top = s->heap[0];

    s->heap[0] = s->heap[--*n];
    s->heap[*n] = top;
    sift_down(s->heap, *n, 0);
    return top;
}

/* One of n weights with the probability of its share. */
static size_t draw(x3_sampler *s, size_t n)
{
    double total = 0, at;
    size_t last = 0;

    for (size_t i = 0; i < n; i++)
        total += s->weights[i];
    at = x3_rng_uniform(&s->rng) * total;
    for (size_t i = 0; i < n; i++) {
        if (s->weights[i] > 0)
            last = i;
        at -= s->weights[i];
        if (at < 0)
            return i;
    }
    return last; /* rounding left a little of `at` */
}

/* A token after top-k, top-p and min-p: the heap gives them in order, so only as many as needed are sorted. */
static int32_t draw_from_best(x3_sampler *s, const float *logits, int32_t best)
{
    const double inverse = 1 / s->p.temperature, most = logits[best];
    const size_t k = s->p.top_k > 0 ? x3_min_size((size_t)s->p.top_k, s->vocab) : s->vocab;
    size_t n_heap = s->vocab, n_kept = 0, n_counted = 0;
    double total = 0, sum = 0;

    make_heap(s, logits);
    if (k == s->vocab)
        for (size_t i = 0; i < s->vocab; i++)
            total += exp((logits[i] - most) * inverse);
    else
        for (; n_counted < k; n_counted++) {
            s->weights[n_counted] = exp((pop(s, &n_heap).logprob - most) * inverse);
            total += s->weights[n_counted];
        }
    while (n_kept < k && (n_kept == 0 || sum < s->p.top_p * total)) {
        if (n_kept == n_counted)
            s->weights[n_counted++] = exp((pop(s, &n_heap).logprob - most) * inverse);
        if (n_kept > 0 && s->weights[n_kept] < s->p.min_p)
            break;
        sum += s->weights[n_kept++];
    }
    return s->heap[s->vocab - 1 - draw(s, n_kept)].id;
}

static int32_t draw_from_all(x3_sampler *s, const float *logits, int32_t best)
{
    const double inverse = 1 / s->p.temperature, most = logits[best];

    for (size_t i = 0; i < s->vocab; i++) {
        double w = exp((logits[i] - most) * inverse);
        s->weights[i] = w < s->p.min_p ? 0 : w;
    }
    return (int32_t)draw(s, s->vocab);
}

bool x3_sampler_is_greedy(const x3_sampler *s)
{
    return s->p.temperature == 0 && s->p.n_top < 0 && s->p.n_bias == 0 && s->counts == NULL;
}

x3_status x3_sampler_pick(x3_sampler *s, float *logits, x3_sampled *out, x3_err *err)
{
    double log_sum = 0;
    float *raw = NULL;
    int32_t best;
    x3_status rc;

    *out = (x3_sampled){0};
    X3_TRY(rc, out, find_best(logits, s->vocab, &best, err));
    if (s->p.n_top >= 0) {
        log_sum = report_top(s, logits, best, out);
        X3_TRY(rc, out, x3_alloc(&raw, s->vocab, sizeof *raw, err));
        memcpy(raw, logits, s->vocab * sizeof *raw);
    }
    if (s->p.n_bias > 0 || s->counts != NULL) {
        adjust(s, logits);
        X3_TRY(rc, out, find_best(logits, s->vocab, &best, err));
    }
    if (s->p.temperature == 0)
        out->id = best;
    else if (s->p.top_k > 0 || s->p.top_p < 1)
        out->id = draw_from_best(s, logits, best);
    else
        out->id = draw_from_all(s, logits, best);
    if (raw != NULL)
        out->logprob = (float)(raw[out->id] - log_sum);
    if (s->counts != NULL)
        s->counts[out->id]++;
out:
    free(raw);
    return rc;
}
