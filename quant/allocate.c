#include "quant/allocate.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char *const tie_names[] = {"default", "fused", "none"};

bool x3_tie_parse(const char *name, x3_tie *out)
{
    for (int i = 0; i < 3; i++)
        if (strcmp(name, tie_names[i]) == 0) {
            *out = (x3_tie)i;
            return true;
        }
    return false;
}

const char *x3_tie_name(x3_tie tie)
{
    return tie_names[tie];
}

static uint64_t padded_weights(const x3_linear_desc *d)
{
    return (uint64_t)x3_round_up(d->n_in, 128) * x3_round_up(d->n_out, 128);
}

uint64_t x3_body_weights(const x3_model *m)
{
    uint64_t total = 0;

    for (size_t i = 0; i < m->n_layers; i++)
        for (size_t j = 0; j < m->layers[i].n_linears; j++)
            if (m->layers[i].linears[j].quantized)
                total += padded_weights(&m->layers[i].linears[j]);
    return total;
}

/* ---- sets of linears that get the same K ---- */

struct set {
    size_t layer, first, n; /* members[first .. first + n) */
    uint64_t weights;
};

struct sets {
    struct set *items; /* layer by layer, in the order of their first linears */
    size_t n_items;
    size_t *members;   /* indices of linears */
    size_t n_linears;  /* quantized or not */
};

static void free_sets(struct sets *s)
{
    free(s->items);
    free(s->members);
}

struct member {
    int tie;
    size_t first, index; /* of the set, to be filled; of the linear */
};

static int by_tie(const void *a, const void *b)
{
    const struct member *x = a, *y = b;

    if (x->tie != y->tie)
        return x->tie < y->tie ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

static int by_first(const void *a, const void *b)
{
    const struct member *x = a, *y = b;

    if (x->first != y->first)
        return x->first < y->first ? -1 : 1;
    return (x->index > y->index) - (x->index < y->index);
}

/* Appends the sets of one layer. `scratch` has room for its linears. */
static void add_layer(struct sets *s, const x3_layer_desc *l, size_t layer, x3_tie tie, struct member *scratch,
                      size_t *n_members)
{
    size_t n = 0;

    for (size_t i = 0; i < l->n_linears; i++) {
        const x3_linear_desc *d = &l->linears[i];
        if (d->quantized)
            scratch[n++] = (struct member){.tie = tie == X3_TIE_NONE ? (int)i : tie == X3_TIE_FUSED ? d->tie_fused : d->tie,
                                           .index = i};
    }
    qsort(scratch, n, sizeof *scratch, by_tie);
    for (size_t i = 0; i < n; i++)
        scratch[i].first = i > 0 && scratch[i].tie == scratch[i - 1].tie ? scratch[i - 1].first : scratch[i].index;
    qsort(scratch, n, sizeof *scratch, by_first);
    for (size_t i = 0; i < n; i++) {
        if (i == 0 || scratch[i].first != scratch[i - 1].first)
            s->items[s->n_items++] = (struct set){.layer = layer, .first = *n_members};
        struct set *set = &s->items[s->n_items - 1];
        set->weights += padded_weights(&l->linears[scratch[i].index]);
        set->n++;
        s->members[(*n_members)++] = s->n_linears + scratch[i].index;
    }
    s->n_linears += l->n_linears;
}

static x3_status make_sets(struct sets *s, const x3_model *m, x3_tie tie, x3_err *err)
{
    struct member *scratch = NULL;
    size_t n = 0, longest = 0, n_members = 0;
    x3_status rc;

    *s = (struct sets){0};
    for (size_t i = 0; i < m->n_layers; i++) {
        n += m->layers[i].n_linears;
        longest = m->layers[i].n_linears > longest ? m->layers[i].n_linears : longest;
    }
    X3_TRY(rc, out, x3_alloc(&s->items, n, sizeof *s->items, err));
    X3_TRY(rc, out, x3_alloc(&s->members, n, sizeof *s->members, err));
    X3_TRY(rc, out, x3_alloc(&scratch, longest, sizeof *scratch, err));
    for (size_t i = 0; i < m->n_layers; i++)
        add_layer(s, &m->layers[i], i, tie, scratch, &n_members);
out:
    free(scratch);
    return rc;
}

/* ---- results ---- */

/* Mean bits and hash. */
static void finish(x3_allocation *a, const x3_model *m, uint64_t total)
{
    uint64_t bits = 0;
    char *lines = NULL;
    size_t size = 0, layer;
    FILE *f = open_memstream(&lines, &size);

    for (size_t i = 0; i < a->n; i++) {
        const x3_linear_desc *d = x3_model_linear(m, i, &layer);
        bits += a->K[i] * padded_weights(d);
        if (f != NULL)
            fprintf(f, "%s %d\n", d->name, a->K[i]);
    }
    if (f != NULL) {
        fprintf(f, "%s %d\n", m->head.name, a->head_K);
        fclose(f);
    }
    a->body_bits = total == 0 ? 0 : (double)bits / (double)total;
    a->hash = lines == NULL ? 0 : x3_hash(lines, size);
    free(lines);
}

static void set_K(x3_allocation *a, const struct sets *s, const struct set *set, int K)
{
    for (size_t i = 0; i < set->n; i++)
        a->K[s->members[set->first + i]] = (uint8_t)K;
}

double x3_allocation_cost(const x3_allocation *a, const double (*cost)[8])
{
    double sum = 0;

    for (size_t i = 0; i < a->n; i++)
        if (a->K[i] > 0)
            sum += cost[i][a->K[i] - 1];
    return sum;
}

void x3_allocation_free(x3_allocation *a)
{
    free(a->K);
    *a = (x3_allocation){0};
}

/* ---- uniform ---- */

x3_status x3_allocate_uniform(x3_allocation *out, const x3_model *m, double bits, int head_K, x3_tie tie, x3_err *err)
{
    const uint64_t total = x3_body_weights(m);
    const int base = (int)floor(bits + 1e-9);
    struct sets s = {0};
    size_t *order = NULL;
    uint64_t budget;
    x3_status rc;

    *out = (x3_allocation){.target_bits = bits, .head_K = head_K};
    if (!(bits >= 1 && bits <= 8))
        return x3_fail(err, X3_ERR_INPUT, "bits %g is outside 1 to 8", bits);
    X3_TRY(rc, out, make_sets(&s, m, tie, err));
    X3_TRY(rc, out, x3_alloc(&order, m->n_layers + 1, sizeof *order, err));
    X3_TRY(rc, out, x3_alloc(&out->K, s.n_linears, 1, err));
    out->n = s.n_linears;
    for (size_t i = 0, at = 0; i <= m->n_layers; i++) { /* order[i]: first set of layer i */
        order[i] = at;
        while (at < s.n_items && s.items[at].layer == i)
            at++;
    }
    for (size_t i = 0; i < s.n_items; i++)
        set_K(out, &s, &s.items[i], base);
    budget = (uint64_t)llround((bits - base) * (double)total);
    for (size_t i = 0; i < m->n_layers && base < 8; i++) {
        size_t layer = i % 2 == 0 ? i / 2 : m->n_layers - 1 - i / 2;
        for (size_t j = order[layer]; j < order[layer + 1]; j++)
            if (s.items[j].weights <= budget) {
                budget -= s.items[j].weights;
                set_K(out, &s, &s.items[j], base + 1);
            }
    }
    finish(out, m, total);
out:
    free(order);
    free_sets(&s);
    if (rc != X3_OK)
        x3_allocation_free(out);
    return rc;
}

/* ---- planned ---- */

/* A set while it is planned. */
struct candidate {
    double cost[8]; /* sum over members */
    uint64_t weights;
    int K, min_K, max_K;
    size_t class;   /* of equal weights */
};

/* Best raise of a candidate: to K, saving `gain` a bit, on the lower hull of its costs. */
static bool best_raise(const struct candidate *c, int *K, double *gain)
{
    *gain = -1;
    for (int k = c->K + 1; k <= c->max_K; k++) {
        double g = (c->cost[c->K - 1] - c->cost[k - 1]) / ((double)c->weights * (k - c->K));
        if (g > *gain) {
            *gain = g;
            *K = k;
        }
    }
    return *gain >= 0;
}

struct heap_item {
    double gain;
    size_t candidate;
    int K;
};

static bool is_better(const struct heap_item *a, const struct heap_item *b)
{
    return a->gain != b->gain ? a->gain > b->gain : a->candidate < b->candidate;
}

static void sift_down(struct heap_item *heap, size_t n, size_t i)
{
    for (;;) {
        size_t best = i;
        for (size_t child = 2 * i + 1; child <= 2 * i + 2 && child < n; child++)
            if (is_better(&heap[child], &heap[best]))
                best = child;
        if (best == i)
            return;
        struct heap_item t = heap[i];
        heap[i] = heap[best];
        heap[best] = t;
        i = best;
    }
}

/* Raises while anything fits. A raise over several bits that does not fit gives way to one of a single bit. */
static x3_status raise_greedily(struct candidate *c, size_t n, uint64_t *left, x3_err *err)
{
    struct heap_item *heap = NULL;
    size_t size = 0;
    x3_status rc = x3_alloc(&heap, n, sizeof *heap, err);

    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < n; i++) {
        heap[size].candidate = i;
        if (best_raise(&c[i], &heap[size].K, &heap[size].gain))
            size++;
    }
    for (size_t i = size; i-- > 0;)
        sift_down(heap, size, i);
    while (size > 0) {
        struct candidate *top = &c[heap[0].candidate];
        uint64_t price = top->weights * (uint64_t)(heap[0].K - top->K);
        if (price > *left && heap[0].K > top->K + 1) {
            heap[0].K = top->K + 1;
            heap[0].gain = (top->cost[top->K - 1] - top->cost[top->K]) / (double)top->weights;
        } else if (price <= *left) {
            *left -= price;
            top->K = heap[0].K;
            if (!best_raise(top, &heap[0].K, &heap[0].gain))
                heap[0] = heap[--size];
        } else {
            heap[0] = heap[--size];
        }
        sift_down(heap, size, 0);
    }
    free(heap);
    return X3_OK;
}

/* Of one class of equal weights: the raise by one bit that saves most, the lowering that costs least. */
struct move {
    double raise, lower;
    size_t raised, lowered;
    uint64_t weights;
};

static void find_moves(const struct candidate *c, size_t n, struct move *moves, size_t n_classes)
{
    for (size_t i = 0; i < n_classes; i++)
        moves[i].raised = moves[i].lowered = SIZE_MAX;
    for (size_t i = 0; i < n; i++) {
        struct move *m = &moves[c[i].class];
        m->weights = c[i].weights;
        if (c[i].K < c[i].max_K) {
            double saved = c[i].cost[c[i].K - 1] - c[i].cost[c[i].K];
            if (m->raised == SIZE_MAX || saved > m->raise) {
                m->raise = saved;
                m->raised = i;
            }
        }
        if (c[i].K > c[i].min_K) {
            double paid = c[i].cost[c[i].K - 2] - c[i].cost[c[i].K - 1];
            if (m->lowered == SIZE_MAX || paid < m->lower) {
                m->lower = paid;
                m->lowered = i;
            }
        }
    }
}

/* One set down, another up, while that saves anything; and up alone where the exchanges have left room. */
static void exchange(struct candidate *c, size_t n, struct move *moves, size_t n_classes, uint64_t *left)
{
    for (size_t round = 0; round < 2 * n + 100 && round < 4000; round++) {
        double best = 0;
        size_t up = SIZE_MAX, down = SIZE_MAX;
        find_moves(c, n, moves, n_classes);
        for (size_t a = 0; a < n_classes; a++) {
            if (moves[a].raised == SIZE_MAX)
                continue;
            if (moves[a].weights <= *left && moves[a].raise > best) {
                best = moves[a].raise;
                up = moves[a].raised;
                down = SIZE_MAX;
            }
            for (size_t b = 0; b < n_classes; b++) {
                if (moves[b].lowered == SIZE_MAX || moves[b].lowered == moves[a].raised ||
                    *left + moves[b].weights < moves[a].weights || moves[a].raise - moves[b].lower <= best * (1 + 1e-12))
                    continue;
                best = moves[a].raise - moves[b].lower;
                up = moves[a].raised;
                down = moves[b].lowered;
            }
        }
        if (up == SIZE_MAX)
            return;
        if (down != SIZE_MAX) {
            c[down].K--;
            *left += c[down].weights;
        }
        c[up].K++;
        *left -= c[up].weights;
    }
}

static x3_status make_candidate(struct candidate *c, const struct sets *s, const struct set *set, const x3_model *m,
                                const x3_plan_request *r, x3_err *err)
{
    bool is_fixed = false;
    size_t layer;

    *c = (struct candidate){.weights = set->weights, .K = r->min_K, .min_K = r->min_K, .max_K = r->max_K};
    for (size_t i = 0; i < set->n; i++) {
        size_t member = s->members[set->first + i];
        for (int k = 0; k < 8; k++)
            c->cost[k] += r->cost[member][k];
        if (r->fixed == NULL || r->fixed[member] == 0)
            continue;
        if (is_fixed && c->K != r->fixed[member])
            return x3_fail(err, X3_ERR_INPUT, "%s is set to %d bits and tied to a linear that is set to %d; --tie none lifts "
                           "ties", x3_model_linear(m, member, &layer)->name, r->fixed[member], c->K);
        c->K = c->min_K = c->max_K = r->fixed[member];
        is_fixed = true;
    }
    return X3_OK;
}

/* Numbers the distinct weights. */
static size_t number_classes(struct candidate *c, size_t n, uint64_t *weights, size_t max)
{
    size_t n_classes = 0;

    for (size_t i = 0; i < n; i++) {
        size_t k = 0;
        while (k < n_classes && weights[k] != c[i].weights)
            k++;
        if (k == n_classes && n_classes < max)
            weights[n_classes++] = c[i].weights;
        c[i].class = k < max ? k : max - 1;
    }
    return n_classes;
}

#define CLASSES_MAX 256

x3_status x3_allocate_planned(x3_allocation *out, const x3_model *m, const x3_plan_request *r, x3_err *err)
{
    const uint64_t total = x3_body_weights(m);
    uint64_t weights[CLASSES_MAX], left = r->budget, needed = 0;
    struct candidate *c = NULL;
    struct move *moves = NULL;
    struct sets s = {0};
    size_t n_classes;
    x3_status rc;

    *out = (x3_allocation){.target_bits = total == 0 ? 0 : (double)r->budget / (double)total, .head_K = r->head_K};
    X3_TRY(rc, out, make_sets(&s, m, r->tie, err));
    X3_TRY(rc, out, x3_alloc(&out->K, s.n_linears, 1, err));
    out->n = s.n_linears;
    X3_TRY(rc, out, x3_alloc(&c, s.n_items, sizeof *c, err));
    for (size_t i = 0; i < s.n_items; i++) {
        X3_TRY(rc, out, make_candidate(&c[i], &s, &s.items[i], m, r, err));
        needed += c[i].weights * (uint64_t)c[i].K;
    }
    if (needed > left) {
        rc = x3_fail(err, X3_ERR_INPUT, "the budget is %.4f bits a weight, %d bits for all and what is set by hand need %.4f",
                     (double)left / (double)total, r->min_K, (double)needed / (double)total);
        goto out;
    }
    left -= needed;
    X3_TRY(rc, out, raise_greedily(c, s.n_items, &left, err));
    n_classes = number_classes(c, s.n_items, weights, CLASSES_MAX);
    X3_TRY(rc, out, x3_alloc(&moves, n_classes, sizeof *moves, err));
    if (n_classes < CLASSES_MAX)
        exchange(c, s.n_items, moves, n_classes, &left);
    for (size_t i = 0; i < s.n_items; i++)
        set_K(out, &s, &s.items[i], c[i].K);
    finish(out, m, total);
out:
    free(c);
    free(moves);
    free_sets(&s);
    if (rc != X3_OK)
        x3_allocation_free(out);
    return rc;
}

/* ---- by name ---- */

struct named {
    const char *name;
    int bits;
};

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct named *)a)->name, ((const struct named *)b)->name);
}

x3_status x3_allocate_named(x3_allocation *out, const x3_model *m, const char *const *names, const int *bits, size_t n,
                            int head_K, double target_bits, const char *where, x3_err *err)
{
    struct named *sorted = NULL;
    const x3_linear_desc *d;
    size_t layer, n_linears = 0, used = 0;
    x3_status rc;

    *out = (x3_allocation){.target_bits = target_bits, .head_K = head_K};
    while (x3_model_linear(m, n_linears, &layer) != NULL && layer < m->n_layers)
        n_linears++;
    X3_TRY(rc, out, x3_alloc(&out->K, n_linears, 1, err));
    out->n = n_linears;
    X3_TRY(rc, out, x3_alloc(&sorted, n, sizeof *sorted, err));
    for (size_t i = 0; i < n; i++)
        sorted[i] = (struct named){names[i], bits[i]};
    if (n > 1)
        qsort(sorted, n, sizeof *sorted, by_name);
    for (size_t i = 0; i < n_linears; i++) {
        d = x3_model_linear(m, i, &layer);
        const struct named *found = n == 0 ? NULL : bsearch(&(struct named){.name = d->name}, sorted, n, sizeof *sorted, by_name);
        if (found != NULL && d->quantized) {
            out->K[i] = (uint8_t)found->bits;
            sorted[found - sorted].bits = 0; /* used */
            used++;
        } else if (d->quantized) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: has no bits for %s", where, d->name);
            goto out;
        }
    }
    for (size_t i = 0; used < n && i < n; i++)
        if (sorted[i].bits != 0) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: \"%.300s\" is no linear of this model that is quantized (%zu such names)",
                         where, sorted[i].name, n - used);
            goto out;
        }
    finish(out, m, x3_body_weights(m));
out:
    free(sorted);
    if (rc != X3_OK)
        x3_allocation_free(out);
    return rc;
}
