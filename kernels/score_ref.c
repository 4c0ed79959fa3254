#include "kernels/score.h"

#include <math.h>

struct distribution {
    double max, log_sum; /* log of the sum of exp(logit - max) */
    size_t best;
};

static bool describe(const float *x, size_t n, struct distribution *d)
{
    double sum = 0;

    d->best = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isfinite(x[i]))
            return false;
        if (x[i] > x[d->best])
            d->best = i;
    }
    d->max = x[d->best];
    for (size_t i = 0; i < n; i++)
        sum += exp(x[i] - d->max);
    d->log_sum = log(sum);
    return true;
}

static double log_p(const struct distribution *d, float logit)
{
    return logit - d->max - d->log_sum;
}

void x3_score_row_ref(const float *reference, const float *pack, size_t vocab, int32_t next, x3_score_position *out)
{
    struct distribution p, q;
    size_t better = 0;
    double kl = 0;

    *out = (x3_score_position){0};
    if (!describe(reference, vocab, &p) || !describe(pack, vocab, &q))
        return;
    for (size_t i = 0; i < vocab; i++) {
        double a = log_p(&p, reference[i]);
        kl += exp(a) * (a - log_p(&q, pack[i]));
    }
    for (size_t i = 0; i < vocab; i++)
        better += pack[i] > pack[p.best] || (pack[i] == pack[p.best] && i < p.best);
    out->finite = true;
    out->kl = kl;
    out->top1 = p.best == q.best;
    out->top5 = better < 5;
    if (next >= 0) {
        out->nll_reference = -log_p(&p, reference[next]);
        out->nll_pack = -log_p(&q, pack[next]);
    }
}
