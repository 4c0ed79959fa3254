/* The trellis of one codebook and K, and the search for the best path through it.
 *
 * A path is a ring of 256 states, state(p) = ((state(p-1) << K) | new bits) & 0xFFFF. The states that may follow a
 * state depend on its low 16 - K bits alone, its *group*; the cost of a path is the sum of (value(state(p)) - x(p))^2.
 *
 * The search, the same bits in every form:
 *   1. Joining group. Viterbi over X3_JOIN positions before and after the border of 255 and 0, free at both ends,
 *      gives the group of state(255). Ties go to the lower group.
 *   2. The best path of 256 positions that enters and leaves through this group (Viterbi, all states). Of equal
 *      predecessors the lowest wins.
 * Costs are float32: cost = fma(d, d, cost of the group), d = value - x.
 *
 * Threads: an x3_trellis is read-only after creation; scratch belongs to one thread. */
#ifndef X3_TRELLIS_H
#define X3_TRELLIS_H

#include "formats/base.h"
#include "kernels/codebook.h"

/* Positions on each side of the border that the joining pass sees: all of them. Less is worse: 64 costs 0.4 to 0.9 %
 * of error, 32 costs 1 to 1.7 %; optimizing again around the border after step 2 gains under 0.2 % (200 tiles each of
 * K = 1, 2, 3, 4, 6). */
#define X3_JOIN 128

typedef struct x3_trellis {
    x3_codebook codebook;
    int K;
    float *values;  /* [65536], value of a state */
    float *ordered; /* the same in the order the search reads them: [groups / 32][2^K][32] */
} x3_trellis;

/* Value of a state, a float16 number as float32; and of every state. */
float x3_codebook_value(x3_codebook codebook, uint32_t state);
void x3_codebook_values(x3_codebook codebook, float values[X3_STATES]);

x3_status x3_trellis_create(x3_trellis **out, x3_codebook codebook, int K, x3_err *err) X3_MUST;
void x3_trellis_free(x3_trellis *t);

/* Bytes of scratch that a search needs, any number of tiles. */
size_t x3_trellis_scratch_bytes(int K);
/* x [n_tiles][256] in position order, states [n_tiles][256]. The defining form; kernels.h has the fast ones. */
void x3_trellis_search_ref(const x3_trellis *t, const float *x, size_t n_tiles, uint16_t *states, void *scratch);
/* States of a path to the 8 * K words of a tile and back. Packing takes the K new bits of every state. */
void x3_tile_pack(const uint16_t states[X3_TILE_WEIGHTS], int K, uint32_t *words);
void x3_tile_unpack(const uint32_t *words, int K, uint16_t states[X3_TILE_WEIGHTS]);

#endif
