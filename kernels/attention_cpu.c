/* Scores of a block of query rows against all keys, softmax over a row, then the weighted sum of values: sums over
 * dimensions and over positions run from first to last. */
#include <string.h>

#include "kernels/linear_cpu.h"

#define PAGE 64

size_t x3_attention_scratch(size_t n_positions, size_t k_dim, size_t v_dim)
{
    const size_t ldo = x3_round_up(v_dim, X3_PANEL);

    return X3_ATTENTION_ROWS * (k_dim + ldo + x3_round_up(n_positions, PAGE)) + x3_max_size(PAGE * ldo, X3_PANEL * k_dim);
}

/* Values of positions [from, to) of one page, rows of round_up(v_dim): unpacked, or the first dimensions of the keys. */
static const float *other_values(const x3_attention_item *t, size_t from, size_t to, float *out)
{
    const size_t ld = x3_round_up(t->v_dim, X3_PANEL);

    if (t->type != X3_KV_F32) {
        x3_kv_unpack_values(t->type, t->packed_values + (size_t)t->pages[from / PAGE] * t->values_page, t->v_dim, from % PAGE,
                            (to - 1) % PAGE + 1, out, ld);
        return out;
    }
    const float *page = t->keys + (size_t)t->pages[from / PAGE] * t->keys_page;

    for (size_t j = from; j < to; j++) {
        const float *key = page + j % PAGE / X3_PANEL * X3_PANEL * t->k_dim + j % X3_PANEL;
        float *row = out + (j - from) * ld;
        for (size_t d = 0; d < t->v_dim; d++)
            row[d] = key[d * X3_PANEL];
        for (size_t d = t->v_dim; d < ld; d++)
            row[d] = 0;
    }
    return out;
}

/* out[n_rows] += (or =) weights [n_rows][from, to) times values of those positions; to > from. `block` is scratch for
 * the values of a page. */
static void add_values(const x3_kernels *k, const x3_attention_item *t, const float *weights, size_t ldw, size_t n_rows,
                       size_t from, size_t to, float *out, size_t ldo, bool accumulate, float *block)
{
    const bool other = t->values == NULL;
    const size_t ldv = other ? x3_round_up(t->v_dim, X3_PANEL) : t->v_dim;

    for (size_t j = from; j < to;) {
        size_t end = x3_min_size(to, (j / PAGE + 1) * PAGE);
        const float *values = other ? other_values(t, j, end, block)
                                    : t->values + (size_t)t->pages[j / PAGE] * t->values_page + j % PAGE * t->v_dim;
        for (size_t c = 0; c < t->v_dim; c += X3_PANEL)
            k->panel_matmul(weights + j, ldw, n_rows, values + c, ldv, end - j, out + c, ldo, accumulate);
        accumulate = true;
        j = end;
    }
}

static size_t first_visible(const x3_attention_item *t, size_t position)
{
    return t->window > 0 && position + 1 > t->window ? position + 1 - t->window : 0;
}

void x3_attention_cpu(const x3_kernels *k, const x3_attention_item *t, float *scratch)
{
    const size_t last = t->first_position + (t->n_rows - 1) / t->n_repeat;
    const size_t lds = x3_round_up(last + 1, PAGE), ldo = x3_round_up(t->v_dim, X3_PANEL);
    const size_t begin = first_visible(t, t->first_position);
    float *q = scratch, *out = q + X3_ATTENTION_ROWS * t->k_dim, *s = out + X3_ATTENTION_ROWS * ldo;
    float *block = s + X3_ATTENTION_ROWS * lds;
    float sum[X3_ATTENTION_ROWS];

    for (size_t r = 0; r < t->n_rows; r++)
        memcpy(q + r * t->k_dim, t->q + r / t->n_repeat * t->ldq + r % t->n_repeat * t->k_dim, t->k_dim * sizeof *q);
    for (size_t j = begin / X3_PANEL * X3_PANEL; j <= last; j += X3_PANEL) {
        const float *panel = block;
        if (t->type == X3_KV_F32)
            panel = t->keys + (size_t)t->pages[j / PAGE] * t->keys_page + j % PAGE * t->k_dim;
        else
            x3_kv_unpack_keys(t->type, t->packed_keys + (size_t)t->pages[j / PAGE] * t->keys_page, t->k_dim, j % PAGE, block);
        k->panel_matmul(q, t->k_dim, t->n_rows, panel, X3_PANEL, t->k_dim, s + j, lds, false);
    }
    for (size_t r = 0; r < t->n_rows; r++) {
        size_t p = t->first_position + r / t->n_repeat, from = first_visible(t, p);
        sum[r] = k->softmax(s + r * lds + from, p + 1 - from, t->scale,
                            t->sinks != NULL ? t->sinks + r % t->n_repeat : NULL);
    }
    /* positions that all rows see go through one product; before and after it every position's rows have their own */
    const size_t common_from = first_visible(t, last), common_to = t->first_position + 1;
    const bool shared = common_from < common_to;
    for (size_t r = 0; r < t->n_rows; r += t->n_repeat) {
        size_t p = t->first_position + r / t->n_repeat, from = first_visible(t, p);
        size_t n = x3_min_size(t->n_repeat, t->n_rows - r), to = shared ? common_from : p + 1;
        if (from < to)
            add_values(k, t, s + r * lds, lds, n, from, to, out + r * ldo, ldo, false, block);
    }
    if (shared) {
        /* rows whose own part was empty start at zero here: with accumulate they would read stale sums */
        for (size_t r = 0; r < t->n_rows; r++)
            if (first_visible(t, t->first_position + r / t->n_repeat) >= common_from)
                memset(out + r * ldo, 0, ldo * sizeof *out);
        add_values(k, t, s, lds, t->n_rows, common_from, common_to, out, ldo, true, block);
        for (size_t r = t->n_repeat; r < t->n_rows; r += t->n_repeat) {
            size_t p = t->first_position + r / t->n_repeat, n = x3_min_size(t->n_repeat, t->n_rows - r);
            add_values(k, t, s + r * lds, lds, n, common_to, p + 1, out + r * ldo, ldo, true, block);
        }
    }
    for (size_t r = 0; r < t->n_rows; r++) {
        float *y = t->out + r / t->n_repeat * t->ldo + r % t->n_repeat * t->v_dim;
        for (size_t c = 0; c < t->v_dim; c++)
            y[c] = out[r * ldo + c] / sum[r];
    }
}
