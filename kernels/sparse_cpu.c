/* Selection of positions by an indexer, and attention over the selected ones. */
#include <string.h>

#include "kernels/linear_cpu.h"
#include "kernels/mixers_cpu.h"

#define PAGE 64

static const float *panel_of(const float *keys, size_t page_floats, const int32_t *pages, size_t position, size_t dim)
{
    return keys + (size_t)pages[position / PAGE] * page_floats + position % PAGE / X3_PANEL * X3_PANEL * dim;
}

/* ---- selection ---- */

size_t x3_select_scratch(size_t n_heads, size_t n_positions, size_t n_selected)
{
    return n_heads * X3_PANEL + x3_round_up(n_positions, X3_PANEL) + n_selected + n_positions / sizeof(float) + 1;
}

/* Sums run over heads from first to last. */
static void score_positions(const x3_kernels *k, const x3_select_item *t, float *dots, float *scores)
{
    for (size_t j = 0; j < t->n_positions; j += X3_PANEL) {
        float *s = scores + j;
        k->panel_matmul(t->q, t->dim, t->n_heads, panel_of(t->keys, PAGE * t->dim, t->pages, j, t->dim), X3_PANEL, t->dim,
                        dots, X3_PANEL, false);
        for (size_t c = 0; c < X3_PANEL; c++)
            s[c] = 0;
        for (size_t h = 0; h < t->n_heads; h++)
            for (size_t c = 0; c < X3_PANEL; c++) {
                float d = dots[h * X3_PANEL + c];
                s[c] += t->weights[h] * (d > 0 ? d : 0);
            }
    }
}

/* Whether position a is chosen before b. */
static bool is_better(const float *scores, int32_t a, int32_t b)
{
    return scores[a] > scores[b] || (scores[a] == scores[b] && a < b);
}

/* Heap of positions, the one to give up first on top. */
static void sift_down(const float *scores, int32_t *heap, size_t n, size_t at)
{
    for (;;) {
        size_t worst = at;
        for (size_t child = 2 * at + 1; child < n && child <= 2 * at + 2; child++)
            if (is_better(scores, heap[worst], heap[child]))
                worst = child;
        if (worst == at)
            return;
        int32_t p = heap[at];
        heap[at] = heap[worst];
        heap[worst] = p;
        at = worst;
    }
}

void x3_select_cpu(const x3_kernels *k, const x3_select_item *t, float *scratch)
{
    float *dots = scratch, *scores = dots + t->n_heads * X3_PANEL;
    int32_t *heap = (int32_t *)(void *)(scores + x3_round_up(t->n_positions, X3_PANEL));
    uint8_t *chosen = (uint8_t *)(heap + t->n_selected);
    size_t n = 0;

    score_positions(k, t, dots, scores);
    for (size_t i = 0; i < t->n_selected; i++)
        heap[i] = (int32_t)i;
    for (size_t i = t->n_selected / 2; i-- > 0;)
        sift_down(scores, heap, t->n_selected, i);
    for (size_t p = t->n_selected; p < t->n_positions; p++)
        if (is_better(scores, (int32_t)p, heap[0])) {
            heap[0] = (int32_t)p;
            sift_down(scores, heap, t->n_selected, 0);
        }
    memset(chosen, 0, t->n_positions);
    for (size_t i = 0; i < t->n_selected; i++)
        chosen[heap[i]] = 1;
    for (size_t p = 0; p < t->n_positions; p++)
        if (chosen[p])
            t->selected[n++] = (int32_t)p;
}

/* ---- attention ---- */

size_t x3_sparse_scratch(size_t n_heads, size_t k_dim, size_t v_dim, size_t n_selected)
{
    const size_t ldo = x3_round_up(v_dim, X3_PANEL);

    return n_heads * (x3_round_up(n_selected, PAGE) + ldo + 1) + PAGE * x3_max_size(k_dim, ldo);
}

/* n positions as whole panels [k_dim][16]; columns past the last one are zero. */
static void gather_keys(const x3_sparse_item *t, const int32_t *positions, size_t n, float *out)
{
    for (size_t i = 0; i < x3_round_up(n, X3_PANEL); i++) {
        float *to = out + i / X3_PANEL * X3_PANEL * t->k_dim + i % X3_PANEL;
        if (i >= n) {
            for (size_t d = 0; d < t->k_dim; d++)
                to[d * X3_PANEL] = 0;
            continue;
        }
        size_t p = (size_t)positions[i];
        const float *from = panel_of(t->keys, t->keys_page, t->pages, p, t->k_dim) + p % X3_PANEL;
        for (size_t d = 0; d < t->k_dim; d++)
            to[d * X3_PANEL] = from[d * X3_PANEL];
    }
}

static void gather_values(const x3_sparse_item *t, const int32_t *positions, size_t n, size_t ld, float *out)
{
    for (size_t i = 0; i < n; i++, out += ld) {
        size_t p = (size_t)positions[i];
        if (t->values != NULL) {
            memcpy(out, t->values + (size_t)t->pages[p / PAGE] * t->values_page + p % PAGE * t->v_dim,
                   t->v_dim * sizeof *out);
        } else {
            const float *from = panel_of(t->keys, t->keys_page, t->pages, p, t->k_dim) + p % X3_PANEL;
            for (size_t d = 0; d < t->v_dim; d++)
                out[d] = from[d * X3_PANEL];
        }
        for (size_t d = t->v_dim; d < ld; d++)
            out[d] = 0;
    }
}

void x3_sparse_attention_cpu(const x3_kernels *k, const x3_sparse_item *t, float *scratch)
{
    const size_t lds = x3_round_up(t->n_selected, PAGE), ldo = x3_round_up(t->v_dim, X3_PANEL);
    float *s = scratch, *out = s + t->n_heads * lds, *sum = out + t->n_heads * ldo, *block = sum + t->n_heads;

    for (size_t j = 0; j < t->n_selected; j += PAGE) {
        size_t n = x3_min_size(PAGE, t->n_selected - j);
        gather_keys(t, t->selected + j, n, block);
        for (size_t c = 0; c < n; c += X3_PANEL)
            k->panel_matmul(t->q, t->k_dim, t->n_heads, block + c * t->k_dim, X3_PANEL, t->k_dim, s + j + c, lds, false);
    }
    for (size_t h = 0; h < t->n_heads; h++)
        sum[h] = k->softmax(s + h * lds, t->n_selected, t->scale, NULL);
    for (size_t j = 0; j < t->n_selected; j += PAGE) {
        size_t n = x3_min_size(PAGE, t->n_selected - j);
        gather_values(t, t->selected + j, n, ldo, block);
        for (size_t c = 0; c < ldo; c += X3_PANEL)
            k->panel_matmul(s + j, lds, t->n_heads, block + c, ldo, n, out + c, ldo, j > 0);
    }
    for (size_t h = 0; h < t->n_heads; h++)
        for (size_t d = 0; d < t->v_dim; d++)
            t->out[h * t->v_dim + d] = out[h * ldo + d] / sum[h];
}

/* ---- a linear a head ---- */

size_t x3_head_scratch(size_t n_most)
{
    return x3_max_size(X3_LINEAR_SCRATCH, n_most * X3_PANEL + X3_LINEAR_ROWS * X3_PANEL);
}

/* Columns [c, c + 16) of rows [first, first + n), zero past the last column. */
static void pack_columns(const x3_head_item *t, size_t c, float *out)
{
    const size_t width = x3_min_size(X3_PANEL, t->n_in - c);

    for (size_t i = 0; i < t->n; i++, out += X3_PANEL) {
        size_t at = (t->first + i) * t->n_in + c;
        for (size_t j = 0; j < X3_PANEL; j++)
            out[j] = 0;
        for (size_t j = 0; j < width; j++)
            out[j] = x3_dense_value(t->weight, t->type, at + j);
    }
}

void x3_head_linear_cpu(const x3_kernels *k, const x3_head_item *t, float *scratch)
{
    const size_t element = t->type == X3_DENSE_F32 ? 4 : 2;
    float *panel = scratch, *y = panel + t->n * X3_PANEL;

    if (!t->transposed) {
        x3_dense_item d = {.weight = (const char *)t->weight + t->first * t->n_in * element, .type = t->type, .n_out = t->n,
                           .n_in = t->n_in, .x = t->x, .ldx = t->ldx, .n_rows = t->n_rows, .y = t->y, .ldy = t->ldy};
        for (; d.first_out < t->n; d.first_out += X3_LINEAR_COLS)
            x3_dense_linear_cpu(k, &d, scratch);
        return;
    }
    for (size_t c = 0; c < t->n_in; c += X3_PANEL) {
        const size_t width = x3_min_size(X3_PANEL, t->n_in - c);
        pack_columns(t, c, panel);
        if (width == X3_PANEL) {
            k->panel_matmul(t->x, t->ldx, t->n_rows, panel, X3_PANEL, t->n, t->y + c, t->ldy, false);
            continue;
        }
        k->panel_matmul(t->x, t->ldx, t->n_rows, panel, X3_PANEL, t->n, y, X3_PANEL, false);
        for (size_t r = 0; r < t->n_rows; r++)
            memcpy(t->y + r * t->ldy + c, y + r * X3_PANEL, width * sizeof *y);
    }
}
