/* LDLQ of one strip of outputs: outputs do not see each other, so a strip runs through all rows of tiles alone.
 * Block LDL feedback as in QuIP# (Tseng et al., 2024, section 4); the trellis search takes the place of the lattice. */
#include <string.h>

#include "kernels/linear_cpu.h"

size_t x3_ldlq_scratch_bytes(size_t n_in, int K)
{
    /* search, error [n_in][32], L^T of one row of tiles [16][n_in], target [16][32], tiles and states of the strip */
    return x3_trellis_scratch_bytes(K) + (n_in * X3_LDLQ_COLS + X3_TILE * n_in + 3 * X3_TILE * X3_LDLQ_COLS) * 4 + 4096;
}

static void gather_tile(const float *target, size_t ld, float *x)
{
    for (int p = 0; p < X3_TILE_WEIGHTS; p++)
        x[p] = target[(size_t)x3_tile_row(p) * ld + (size_t)x3_tile_column(p)];
}

void x3_ldlq_cpu(const x3_kernels *k, const x3_ldlq_item *t, void *scratch)
{
    const size_t n_tiles = t->n / X3_TILE, words = (size_t)(8 * t->trellis->K);
    float *error = scratch, *lt = error + t->n_in * X3_LDLQ_COLS, *target = lt + X3_TILE * t->n_in;
    float *x = target + X3_TILE * X3_LDLQ_COLS;
    uint16_t *states = (uint16_t *)(x + X3_TILE * X3_LDLQ_COLS);
    void *search = (char *)scratch +
                   x3_round_up((size_t)((char *)(states + X3_TILE * X3_LDLQ_COLS) - (char *)scratch), 64);

    for (size_t row = t->n_in; row > 0;) {
        row -= X3_TILE;
        const size_t next = row + X3_TILE, later = t->n_in - next;
        for (size_t r = 0; r < X3_TILE; r++)
            memcpy(target + r * X3_LDLQ_COLS, t->w + (row + r) * t->n_out + t->first, t->n * sizeof *target);
        if (t->l != NULL && later > 0) {
            for (size_t i = 0; i < later; i++)
                for (size_t r = 0; r < X3_TILE; r++)
                    lt[r * later + i] = t->l[(next + i) * t->n_in + row + r];
            for (size_t c = 0; c < t->n; c += X3_PANEL)
                k->panel_matmul(lt, later, X3_TILE, error + next * X3_LDLQ_COLS + c, X3_LDLQ_COLS, later, target + c,
                                X3_LDLQ_COLS, true);
        }
        for (size_t i = 0; i < n_tiles; i++)
            gather_tile(target + i * X3_TILE, X3_LDLQ_COLS, x + i * X3_TILE_WEIGHTS);
        k->trellis_search(t->trellis, x, n_tiles, states, search);
        for (size_t i = 0; i < n_tiles; i++) {
            const uint16_t *s = states + i * X3_TILE_WEIGHTS;
            for (int p = 0; p < X3_TILE_WEIGHTS; p++) {
                size_t r = row + (size_t)x3_tile_row(p), c = i * X3_TILE + (size_t)x3_tile_column(p);
                float value = t->trellis->values[s[p]];
                t->q[r * t->n_out + t->first + c] = value;
                error[r * X3_LDLQ_COLS + c] = t->w[r * t->n_out + t->first + c] - value;
            }
            if (t->words != NULL)
                x3_tile_pack(s, t->trellis->K,
                             t->words + (row / X3_TILE * (t->n_out / X3_TILE) + t->first / X3_TILE + i) * words);
        }
    }
}
