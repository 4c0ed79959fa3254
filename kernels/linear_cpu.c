#include "kernels/linear_cpu.h"

#include <string.h>

#define N_PANELS (X3_LINEAR_COLS / X3_PANEL)

void x3_dense_linear_cpu(const x3_kernels *k, const x3_dense_item *t, float *scratch)
{
    float *panel = scratch;
    float bias[X3_PANEL];
    size_t n = x3_min_size(X3_LINEAR_COLS, t->n_out - t->first_out);
    const size_t n_blocks = (t->n_in + X3_LINEAR_DEPTH - 1) / X3_LINEAR_DEPTH;

    for (size_t c = 0; c < n; c += X3_PANEL) {
        /* the last panel of a matrix may be narrower than 16: its sums go through scratch */
        bool whole = n - c >= X3_PANEL;
        float *y = whole ? t->y + t->first_out + c : scratch + X3_LINEAR_DEPTH * X3_LINEAR_COLS;
        size_t ldy = whole ? t->ldy : X3_PANEL;
        for (size_t b = 0; b < n_blocks; b++) {
            size_t i = (t->reverse ? n_blocks - 1 - b : b) * X3_LINEAR_DEPTH;
            size_t depth = x3_min_size(X3_LINEAR_DEPTH, t->n_in - i);
            x3_panel_pack(t->weight, t->type, t->n_out, t->n_in, t->first_out + c, i, depth, panel);
            k->panel_matmul(t->x + i, t->ldx, t->n_rows, panel, X3_PANEL, depth, y, ldy, b > 0);
        }
        size_t width = x3_min_size(X3_PANEL, n - c);
        for (size_t j = 0; j < width; j++)
            bias[j] = t->bias != NULL ? t->bias[t->first_out + c + j] : 0;
        if (whole && t->bias == NULL)
            continue;
        for (size_t r = 0; r < t->n_rows; r++)
            for (size_t j = 0; j < width; j++)
                t->y[r * t->ldy + t->first_out + c + j] = y[r * ldy + j] + bias[j];
    }
}

void x3_exl3_input_cpu(const x3_kernels *k, const float *x, size_t ldx, size_t n_rows, size_t n_in, size_t n_in_padded,
                       const float *suh, float *out)
{
    for (size_t r = 0; r < n_rows; r++, x += ldx, out += n_in_padded) {
        for (size_t i = 0; i < n_in; i++)
            out[i] = x[i] * suh[i];
        for (size_t i = n_in; i < n_in_padded; i++)
            out[i] = 0;
        k->hadamard(out, n_in_padded / X3_HADAMARD);
    }
}

void x3_exl3_linear_cpu(const x3_kernels *k, const x3_exl3_item *t, float *scratch)
{
    float *panels = scratch, *sums = scratch + X3_LINEAR_DEPTH * X3_LINEAR_COLS;
    const size_t tiles_out = t->n_out_padded / X3_TILE, words = (size_t)(8 * t->K);
    const size_t n_blocks = (t->n_in_padded + X3_LINEAR_DEPTH - 1) / X3_LINEAR_DEPTH;
    size_t n = x3_min_size(X3_LINEAR_COLS, t->n_out - t->first_out);

    for (size_t b = 0; b < n_blocks; b++) {
        size_t i = (t->reverse ? n_blocks - 1 - b : b) * X3_LINEAR_DEPTH;
        size_t depth = x3_min_size(X3_LINEAR_DEPTH, t->n_in_padded - i);
        for (size_t row = 0; row < depth; row += X3_TILE)
            for (size_t c = 0; c < N_PANELS; c++) {
                size_t tile = (i + row) / X3_TILE * tiles_out + t->first_out / X3_TILE + c;
                x3_tile_decode_cpu(k, t->words + tile * words, t->K, t->values, panels + (c * depth + row) * X3_PANEL);
            }
        for (size_t c = 0; c < N_PANELS; c++)
            k->panel_matmul(t->x + i, t->n_in_padded, t->n_rows, panels + c * depth * X3_PANEL, X3_PANEL, depth,
                            sums + c * X3_PANEL, X3_LINEAR_COLS, b > 0);
    }
    k->hadamard(sums, t->n_rows);
    for (size_t r = 0; r < t->n_rows; r++) {
        float *y = t->y + r * t->ldy + t->first_out;
        const float *s = sums + r * X3_LINEAR_COLS, *svh = t->svh + t->first_out;
        for (size_t j = 0; j < n; j++)
            y[j] = s[j] * svh[j];
        if (t->bias != NULL)
            for (size_t j = 0; j < n; j++)
                y[j] += t->bias[t->first_out + j];
    }
}
