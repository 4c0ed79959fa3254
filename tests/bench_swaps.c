/* Predicted against real: what a plan's costs say that a linear at another K does to the end KL, beside what it does.
 *
 *     bench_swaps MODEL MEASUREMENT PACK OTHER REFERENCE [--swaps N] [--device D] [--threads N]
 *
 * PACK and OTHER are packs of MODEL at different bits, REFERENCE is of `exl3-eval reference`. One linear of PACK at a time is
 * taken from OTHER: N (default 40), half of them in experts where there are any, each half at even steps of the order of
 * predicted change. The KL is over all of the reference, its change paired by rows. Prints a line a swap, and Spearman's
 * correlation of predicted and measured change for both halves and for all. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant/measure.h"
#include "quant/score.h"

struct swap {
    const char *name;
    int K_from, K_to;
    double predicted, measured, stderr_, rank;
};

struct bench {
    const char *model, *measurement, *pack, *other, *reference, *device;
    size_t n_swaps, n_outside;
    int n_threads;
    x3_device *dev;
    x3_checkpoint *source, *a, *b;
    x3_reference *r;
    struct swap *swaps;
    x3_score base;
};

#define N_MEMBERS 7
static const char *const members[N_MEMBERS] = {"trellis", "suh", "svh", "su", "sv", "mul1", "mcg"};

static x3_tensor *member(x3_checkpoint *c, const char *linear, const char *part)
{
    char name[512];

    snprintf(name, sizeof name, "%s.%s", linear, part);
    return (x3_tensor *)(uintptr_t)x3_safetensors_find(c->st, name);
}

static int bits_of(x3_checkpoint *c, const char *linear)
{
    const x3_tensor *t = member(c, linear, "trellis");

    return t == NULL ? 0 : (int)(t->shape[2] / 16);
}

/* The shards of `b` become shards of `a` too, so that a tensor of `b` can stand in for one of `a`. */
static x3_status join_shards(struct bench *s, x3_err *err)
{
    x3_safetensors *a = s->a->st, *b = s->b->st;
    x3_shard *all = realloc(a->shards, (a->n_shards + b->n_shards) * sizeof *all);

    if (all == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory");
    a->shards = all;
    memcpy(all + a->n_shards, b->shards, b->n_shards * sizeof *all);
    return X3_OK; /* n_shards stays: closing closes a's own */
}

/* The group of a linear in `a` becomes that of `b`; `kept` holds what was there, for put_back. */
static void take(struct bench *s, const char *linear, x3_tensor kept[N_MEMBERS])
{
    for (size_t i = 0; i < N_MEMBERS; i++) {
        x3_tensor *a = member(s->a, linear, members[i]), *b = member(s->b, linear, members[i]);

        if (a == NULL || b == NULL)
            continue;
        kept[i] = *a;
        *a = *b;
        a->shard += s->a->st->n_shards;
        s->a->hashes[a - s->a->st->tensors].known = false;
    }
}

static void put_back(struct bench *s, const char *linear, const x3_tensor kept[N_MEMBERS])
{
    for (size_t i = 0; i < N_MEMBERS; i++) {
        x3_tensor *a = member(s->a, linear, members[i]);

        if (a == NULL || kept[i].name == NULL)
            continue;
        *a = kept[i];
        s->a->hashes[a - s->a->st->tensors].known = false;
    }
}

static int by_prediction(const void *a, const void *b)
{
    double x = fabs(((const struct swap *)a)->predicted), y = fabs(((const struct swap *)b)->predicted);

    return (x > y) - (x < y);
}

static int by_measure(const void *a, const void *b)
{
    double x = ((const struct swap *)a)->measured, y = ((const struct swap *)b)->measured;

    return (x > y) - (x < y);
}

static bool in_expert(const struct swap *w)
{
    return strstr(w->name, ".experts.") != NULL;
}

static int experts_last(const void *a, const void *b)
{
    int x = in_expert(a), y = in_expert(b);

    return x != y ? x - y : by_prediction(a, b);
}

static void pick_evenly(struct swap *out, const struct swap *from, size_t n, size_t n_from)
{
    for (size_t i = 0; i < n; i++)
        out[i] = from[n == 1 ? n_from - 1 : i * (n_from - 1) / (n - 1)];
}

/* Of all n, n_swaps stay: those outside experts first. */
static void pick(struct bench *s, size_t n)
{
    size_t outside = 0, half = s->n_swaps / 2;

    qsort(s->swaps, n, sizeof *s->swaps, experts_last);
    while (outside < n && !in_expert(&s->swaps[outside]))
        outside++;
    s->n_outside = outside == n ? s->n_swaps : outside < half ? outside : half;
    if (s->n_swaps - s->n_outside > n - outside)
        s->n_outside = s->n_swaps - (n - outside);
    pick_evenly(s->swaps, s->swaps, s->n_outside, outside);
    pick_evenly(s->swaps + s->n_outside, s->swaps + outside, s->n_swaps - s->n_outside, n - outside);
}

/* All linears that differ, then n_swaps of them. */
static x3_status choose(struct bench *s, x3_err *err)
{
    double(*cost)[8] = NULL;
    x3_measurement m = {0};
    size_t n = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_measurement_load(&m, s->measurement, s->source, err));
    X3_TRY(rc, out, x3_measurement_costs(&m, &cost, err));
    X3_TRY(rc, out, x3_alloc(&s->swaps, m.n, sizeof *s->swaps, err));
    for (size_t i = 0; i < m.n; i++) {
        size_t layer;
        struct swap w = {.name = x3_model_linear(s->source->model, i, &layer)->name};

        w.K_from = bits_of(s->a, w.name);
        w.K_to = bits_of(s->b, w.name);
        if (w.K_from == 0 || w.K_to == 0 || w.K_from == w.K_to)
            continue;
        w.predicted = cost[i][w.K_to - 1] - cost[i][w.K_from - 1];
        s->swaps[n++] = w;
    }
    if (n < s->n_swaps)
        rc = x3_fail(err, X3_ERR_INPUT, "%s and %s: %zu linears differ in K, --swaps %zu", s->pack, s->other, n, s->n_swaps);
    X3_TRY(rc, out, rc);
    pick(s, n);
out:
    free(cost);
    x3_measurement_free(&m);
    return rc;
}

static x3_status measure(struct bench *s, struct swap *w, x3_err *err)
{
    x3_tensor kept[N_MEMBERS] = {{0}};
    double squares = 0;
    x3_score score = {0};
    x3_status rc;

    take(s, w->name, kept);
    rc = x3_score_pack(&score, s->dev, s->a, s->r, NULL, err);
    put_back(s, w->name, kept);
    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < score.n_rows; i++)
        w->measured += (score.row_kl[i] - s->base.row_kl[i]) / (double)score.n_rows;
    for (size_t i = 0; i < score.n_rows; i++)
        squares += pow(score.row_kl[i] - s->base.row_kl[i] - w->measured, 2);
    w->stderr_ = sqrt(squares / (double)score.n_rows / (double)(score.n_rows - 1));
    x3_score_free(&score);
    return X3_OK;
}

/* Correlation of the ranks; both orders are without ties. */
static double spearman(struct swap *w, size_t n)
{
    double squares = 0;

    qsort(w, n, sizeof *w, by_measure);
    for (size_t i = 0; i < n; i++)
        w[i].rank = (double)i;
    for (size_t i = 0; i < n; i++) {
        double rank = 0;

        for (size_t j = 0; j < n; j++)
            rank += w[j].predicted < w[i].predicted;
        squares += (rank - w[i].rank) * (rank - w[i].rank);
    }
    return 1 - 6 * squares / ((double)n * ((double)n * (double)n - 1));
}

static x3_status run(struct bench *s, x3_err *err)
{
    x3_findings findings = {0};
    x3_status rc;

    X3_TRY(rc, out, x3_device_open(&s->dev, s->device, s->n_threads, err));
    X3_TRY(rc, out, x3_checkpoint_open(&s->source, s->model, NULL, &findings, err));
    X3_TRY(rc, out, x3_checkpoint_open(&s->a, s->pack, NULL, &findings, err));
    X3_TRY(rc, out, x3_checkpoint_open(&s->b, s->other, NULL, &findings, err));
    X3_TRY(rc, out, x3_reference_open(&s->r, s->reference, err));
    X3_TRY(rc, out, choose(s, err));
    X3_TRY(rc, out, join_shards(s, err));
    X3_TRY(rc, out, x3_score_pack(&s->base, s->dev, s->a, s->r, NULL, err));
    printf("%s: KL %.5f\n", s->pack, s->base.kl_mean);
    for (size_t i = 0; i < s->n_swaps; i++) {
        struct swap *w = &s->swaps[i];

        X3_TRY(rc, out, measure(s, w, err));
        printf("%-48s K %d to %d: predicted %+.6f, measured %+.6f +- %.6f\n", w->name, w->K_from, w->K_to, w->predicted,
               w->measured, w->stderr_);
        fflush(stdout);
    }
    if (s->n_outside > 1)
        printf("Spearman's correlation outside experts, %zu swaps: %.3f\n", s->n_outside, spearman(s->swaps, s->n_outside));
    if (s->n_swaps - s->n_outside > 1)
        printf("Spearman's correlation in experts, %zu swaps: %.3f\n", s->n_swaps - s->n_outside,
               spearman(s->swaps + s->n_outside, s->n_swaps - s->n_outside));
    printf("Spearman's correlation of all %zu swaps: %.3f\n", s->n_swaps, spearman(s->swaps, s->n_swaps));
out:
    x3_findings_free(&findings);
    return rc;
}

static void close_all(struct bench *s)
{
    x3_score_free(&s->base);
    free(s->swaps);
    x3_reference_close(s->r);
    x3_checkpoint_close(s->b);
    x3_checkpoint_close(s->a);
    x3_checkpoint_close(s->source);
    x3_device_close(s->dev);
}

int main(int argc, char **argv)
{
    struct bench s = {.device = "cpu", .n_swaps = 40};
    x3_err err = {0};
    int code = 0;

    if (argc < 6) {
        fprintf(stderr, "usage: bench_swaps MODEL MEASUREMENT PACK OTHER REFERENCE [--swaps N] [--device D] [--threads N]\n");
        return 2;
    }
    s.model = argv[1], s.measurement = argv[2], s.pack = argv[3], s.other = argv[4], s.reference = argv[5];
    for (int i = 6; i + 1 < argc; i += 2) {
        if (strcmp(argv[i], "--swaps") == 0)
            s.n_swaps = (size_t)atoi(argv[i + 1]);
        else if (strcmp(argv[i], "--device") == 0)
            s.device = argv[i + 1];
        else if (strcmp(argv[i], "--threads") == 0)
            s.n_threads = atoi(argv[i + 1]);
    }
    if (s.n_swaps == 0 || run(&s, &err) != X3_OK) {
        fprintf(stderr, "bench_swaps: %s\n", s.n_swaps == 0 ? "--swaps 0" : err.text);
        code = 1;
    }
    close_all(&s);
    return code;
}
