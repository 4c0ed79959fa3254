#include "kernels/route.h"

#include <math.h>

#include "kernels/kernels.h"

/* Softmax sums its terms from the first expert to the last. */
static void make_scores(const x3_route_rule *r, const float *logits, float *scores)
{
    float max = logits[0], sum = 0;

    if (r->scores == X3_ROUTE_SIGMOID) {
        bool finite = true;
        for (size_t e = 0; e < r->n_experts; e++)
            finite &= isfinite(logits[e]) != 0;
        for (size_t e = 0; e < r->n_experts; e++)
            scores[e] = finite ? 1 / (1 + x3_exp_ref(-logits[e])) : NAN;
        return;
    }
    for (size_t e = 1; e < r->n_experts; e++)
        max = logits[e] > max ? logits[e] : max;
    for (size_t e = 0; e < r->n_experts; e++) {
        scores[e] = isfinite(logits[e]) ? x3_exp_ref(logits[e] - max) : NAN;
        sum += scores[e];
    }
    for (size_t e = 0; e < r->n_experts; e++)
        scores[e] /= sum;
}

/* Below every score that can be chosen with a reason, above what is taken already (minus infinity). */
#define LAST (-1e30f)

/* Index of the largest value, the first of equals; it becomes minus infinity. There is no NaN among them. */
static size_t take_best(float *x, size_t n)
{
    size_t best = 0;

    for (size_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    x[best] = -INFINITY;
    return best;
}

static float two_best(const float *x, size_t n)
{
    float first = LAST, second = LAST;

    for (size_t i = 0; i < n; i++)
        if (x[i] > first) {
            second = first;
            first = x[i];
        } else if (x[i] > second) {
            second = x[i];
        }
    return first + second;
}

/* Experts outside the best groups go to the end of the line. group [n_groups]. */
static void mask_groups(const x3_route_rule *r, float *choice, float *group)
{
    const size_t size = r->n_experts / r->n_groups;

    for (size_t g = 0; g < r->n_groups; g++)
        group[g] = two_best(choice + g * size, size);
    for (size_t n = 0; n < r->n_chosen_groups; n++)
        (void)take_best(group, r->n_groups);
    for (size_t e = 0; e < r->n_experts; e++)
        if (group[e / size] != -INFINITY)
            choice[e] = LAST;
}

void x3_route_row_ref(const x3_route_rule *r, const float *logits, const float *correction, int32_t *ids, float *weights,
                      float *scratch)
{
    float *scores = scratch, *choice = scratch + r->n_experts, sum = 0;

    make_scores(r, logits, scores);
    for (size_t e = 0; e < r->n_experts; e++) {
        choice[e] = correction == NULL ? scores[e] : scores[e] + correction[e];
        if (!(choice[e] > LAST)) /* NaN too */
            choice[e] = LAST;
    }
    if (r->n_groups > 1)
        mask_groups(r, choice, choice + r->n_experts);
    for (size_t j = 0; j < r->n_chosen; j++) {
        ids[j] = (int32_t)take_best(choice, r->n_experts);
        weights[j] = scores[ids[j]];
        sum += weights[j];
    }
    for (size_t j = 0; j < r->n_chosen; j++)
        weights[j] = (r->normalize ? weights[j] / (sum + 1e-20f) : weights[j]) * r->scale;
}
