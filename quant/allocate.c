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

/* Linears of one layer that must get the same K. */
static int set_of(const x3_linear_desc *d, int index, x3_tie tie)
{
    return tie == X3_TIE_NONE ? index : tie == X3_TIE_FUSED ? d->tie_fused : d->tie;
}

/* Numbers of sets of a layer are below this. */
static size_t sets_of(const x3_layer_desc *l, x3_tie tie)
{
    size_t n = 0;

    for (size_t i = 0; i < l->n_linears; i++)
        if (l->linears[i].quantized)
            n = x3_max_size(n, (size_t)set_of(&l->linears[i], (int)i, tie) + 1);
    return n;
}

/* Raises whole sets of one layer while the budget lasts, in the order of their numbers. `weights` [sets_of()]. */
static void raise_layer(x3_allocation *a, const x3_layer_desc *l, size_t first, x3_tie tie, uint64_t *budget,
                        uint64_t *weights)
{
    const size_t n_sets = sets_of(l, tie);

    memset(weights, 0, n_sets * sizeof *weights);
    for (size_t i = 0; i < l->n_linears; i++)
        if (a->K[first + i] > 0)
            weights[set_of(&l->linears[i], (int)i, tie)] += padded_weights(&l->linears[i]);
    for (size_t set = 0; set < n_sets; set++) {
        if (weights[set] > *budget)
            weights[set] = 0;
        *budget -= weights[set];
    }
    for (size_t i = 0; i < l->n_linears; i++)
        if (a->K[first + i] > 0 && weights[set_of(&l->linears[i], (int)i, tie)] > 0)
            a->K[first + i]++;
}

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

x3_status x3_allocate_uniform(x3_allocation *out, const x3_model *m, double bits, int head_K, x3_tie tie, x3_err *err)
{
    uint64_t total = 0, budget;
    size_t *first = NULL, n = 0, most = 0;
    uint64_t *weights = NULL;
    int base = (int)floor(bits + 1e-9);
    x3_status rc;

    *out = (x3_allocation){.target_bits = bits, .head_K = head_K};
    if (!(bits >= 1 && bits <= 8))
        return x3_fail(err, X3_ERR_INPUT, "bits %g is outside 1 to 8", bits);
    X3_TRY(rc, out, x3_alloc(&first, m->n_layers, sizeof *first, err));
    for (size_t i = 0; i < m->n_layers; i++) {
        first[i] = n;
        n += m->layers[i].n_linears;
        most = x3_max_size(most, sets_of(&m->layers[i], tie));
    }
    X3_TRY(rc, out, x3_alloc(&weights, most, sizeof *weights, err));
    out->n = n;
    X3_TRY(rc, out, x3_alloc(&out->K, n, 1, err));
    for (size_t i = 0; i < m->n_layers; i++)
        for (size_t j = 0; j < m->layers[i].n_linears; j++)
            if (m->layers[i].linears[j].quantized) {
                out->K[first[i] + j] = (uint8_t)base;
                total += padded_weights(&m->layers[i].linears[j]);
            }
    budget = (uint64_t)llround((bits - base) * (double)total);
    for (size_t i = 0; i < m->n_layers && base < 8; i++) {
        size_t layer = i % 2 == 0 ? i / 2 : m->n_layers - 1 - i / 2;
        raise_layer(out, &m->layers[layer], first[layer], tie, &budget, weights);
    }
    finish(out, m, total);
out:
    free(first);
    free(weights);
    if (rc != X3_OK)
        x3_allocation_free(out);
    return rc;
}

void x3_allocation_free(x3_allocation *a)
{
    free(a->K);
    *a = (x3_allocation){0};
}
