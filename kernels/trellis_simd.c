/* The search of trellis.h over vectors of groups, two tiles at a time so that one load of a value serves both.
 *
 * Only the minimum a group is reached with is kept, never the predecessor: a forward step is subtract, fma, min. Of
 * these minima every SEGMENT-th position is stored; walking back, the few groups that can lead to the known end of a
 * segment are computed again, with the same operations, and this time with their predecessors. */
#include "kernels/simd.h"
#include "kernels/trellis.h"

#include <math.h>
#include <string.h>

#define BLOCK 32 /* groups a pass of the inner loop, and the innermost dimension of x3_trellis.ordered */
#define N_VECTORS (BLOCK / X3_LANES)
#define POSITIONS_MAX 256

/* Under sanitizers the inner loop would make a tile ten times slower and the suite an hour longer. Its reads and writes
 * are those of `ordered` and of whole rows of minima; everything around it is checked. */
#define UNCHECKED __attribute__((no_sanitize("address", "undefined")))

/* Minima are read at 2^K places a power of two apart, which would share one set of the first-level cache: every run
 * of groups >> K minima is followed by PAD unused ones. */
#define PAD 16

static inline size_t padded(int K, size_t group)
{
    return K <= 5 ? group + PAD * (group >> (16 - 2 * K)) : group;
}

static inline int segment_of(int K)
{
    return K == 1 ? 8 : K == 2 ? 5 : K == 3 ? 3 : K == 4 ? 2 : 1;
}

/* One position for n_tiles tiles: next[g] = min over t of fma(d, d, m[predecessor group]). */
X3_LANEWISE UNCHECKED void step(const int K, const int n_tiles, const float *ordered, const float *const m[2],
                              float *const next[2], const float x[2])
{
    const int n = 1 << K, groups = X3_STATES >> K, stride = (groups >> K) + (K <= 5 ? PAD : 0);
    x3_vec vx[2];

    for (int i = 0; i < n_tiles; i++)
        vx[i] = v_set1(x[i]);
    for (int g = 0; g < groups; g += BLOCK) {
        const float *values = ordered + (size_t)g * (size_t)n;
        x3_vec best[2][N_VECTORS];
        for (int i = 0; i < n_tiles; i++)
            for (int v = 0; v < N_VECTORS; v++)
                best[i][v] = v_set1(INFINITY);
        for (int t = 0; t < n; t++) {
            const int from = t * stride + (g >> K);
            for (int v = 0; v < N_VECTORS; v++) {
                x3_vec value = v_load(values + t * BLOCK + v * X3_LANES);
                for (int i = 0; i < n_tiles; i++) {
                    x3_vec d = v_sub(value, vx[i]);
                    x3_vec base = v_load_repeat(m[i] + from + ((v * X3_LANES) >> K), n);
                    best[i][v] = v_min(best[i][v], v_fma(d, d, base));
                }
            }
        }
        for (int i = 0; i < n_tiles; i++)
            for (int v = 0; v < N_VECTORS; v++)
                v_store(next[i] + padded(K, (size_t)g) + v * X3_LANES, best[i][v]);
    }
}

UNCHECKED static void step_any(int K, int n_tiles, const float *ordered, const float *const m[2], float *const next[2],
                     const float x[2])
{
#define STEP(k)                                      \
    case k:                                          \
        if (n_tiles == 2)                            \
            step(k, 2, ordered, m, next, x);         \
        else                                         \
            step(k, 1, ordered, m, next, x);         \
        break;
    switch (K) {
        STEP(1)
        STEP(2)
        STEP(3)
        STEP(4)
        STEP(5)
        STEP(6)
        STEP(7)
        STEP(8)
    }
#undef STEP
}

/* Minima of one tile: `stored` at positions 0, SEGMENT, 2 * SEGMENT ..., two rows of `passing` between them. */
typedef struct minima {
    float *stored, *passing;
} minima;

static float *minima_at(const minima *m, int K, int p)
{
    const size_t groups = padded(K, X3_STATES >> K);
    const int segment = segment_of(K);

    return p % segment == 0 ? m->stored + groups * (size_t)(p / segment) : m->passing + groups * (size_t)(p & 1);
}

static void forward(const x3_trellis *t, int n_tiles, const minima m[2], const float x[2][POSITIONS_MAX], int n)
{
    for (int p = 0; p < n; p++) {
        const float *from[2] = {minima_at(&m[0], t->K, p), minima_at(&m[n_tiles - 1], t->K, p)};
        float *to[2] = {minima_at(&m[0], t->K, p + 1), minima_at(&m[n_tiles - 1], t->K, p + 1)};
        step_any(t->K, n_tiles, t->ordered, from, to, (const float[2]){x[0][p], x[n_tiles - 1][p]});
    }
}

/* States of positions [first, first + n) of the best path that leaves position first + n - 1 through group `end`,
 * given the minima that enter `first`. Returns the group through which it enters. */
static uint32_t trace_segment(const x3_trellis *t, const float *enter, const float *x, int first, int n, uint32_t end,
                              uint16_t *states)
{
    const int K = t->K, N = 1 << K;
    float cost[1024]; /* level n: 2^(K n) groups that lead to `end`; n <= segment_of(K) */
    uint8_t from[8][512];

    for (uint32_t T = 0; T < 1u << (K * n); T++)
        cost[T] = enter[padded(K, (T << (16 - K - K * n)) | (end >> (K * n)))];
    for (int level = n - 1; level >= 0; level--) {
        const float xp = x[first + n - 1 - level];
        for (uint32_t T = 0; T < 1u << (K * level); T++) {
            const uint32_t group = (T << (16 - K - K * level)) | (end >> (K * level));
            float best = INFINITY;
            uint8_t best_t = 0;
            for (uint32_t i = 0; i < (uint32_t)N; i++) {
                float d = t->values[(i << (16 - K)) | group] - xp;
                float c = __builtin_fmaf(d, d, cost[(i << (K * level)) | T]);
                if (c < best) {
                    best = c;
                    best_t = (uint8_t)i;
                }
            }
            /* in place is safe: level's entry T overwrites only entry (0, T) of level + 1, read by T alone */
            cost[T] = best;
            from[level][T] = best_t;
        }
    }
    uint32_t T = 0, group = end;
    for (int level = 0; level < n; level++) {
        uint32_t i = from[level][T];
        uint32_t state = (i << (16 - K)) | group;
        states[first + n - 1 - level] = (uint16_t)state;
        T |= i << (K * level);
        group = state >> K;
    }
    return group;
}

/* Walks back from position n to `stop`; returns the group that enters `stop`. */
static uint32_t trace(const x3_trellis *t, const minima *m, const float *x, int n, int stop, uint32_t end,
                      uint16_t *states)
{
    const int segment = segment_of(t->K);
    uint16_t rest[POSITIONS_MAX];

    for (int last = n; last > stop;) {
        int first = (last - 1) / segment * segment;
        end = trace_segment(t, minima_at(m, t->K, first), x, first, last - first, end, rest);
        if (first < stop) /* `stop` is inside this segment: the group that enters it is the top of its state */
            end = rest[stop] >> t->K;
        for (int p = first < stop ? stop : first; p < last; p++)
            states[p] = rest[p];
        last = first;
    }
    return end;
}

static uint32_t lowest(const float *m, int K)
{
    size_t best = 0;

    for (size_t g = 1; g < (size_t)(X3_STATES >> K); g++)
        if (m[padded(K, g)] < m[padded(K, best)])
            best = g;
    return (uint32_t)best;
}

static void search_tiles(const x3_trellis *t, int n_tiles, const float *x, uint16_t *states, const minima m[2])
{
    const size_t groups = padded(t->K, X3_STATES >> t->K);
    float around[2][POSITIONS_MAX];

    for (int i = 0; i < n_tiles; i++) {
        for (int p = 0; p < 2 * X3_JOIN; p++)
            around[i][p] = x[i * X3_TILE_WEIGHTS + (p + X3_TILE_WEIGHTS - X3_JOIN) % X3_TILE_WEIGHTS];
        memset(minima_at(&m[i], t->K, 0), 0, groups * sizeof(float));
    }
    forward(t, n_tiles, m, (const float(*)[POSITIONS_MAX])around, 2 * X3_JOIN);
    uint32_t join[2];
    for (int i = 0; i < n_tiles; i++) {
        uint32_t end = lowest(minima_at(&m[i], t->K, 2 * X3_JOIN), t->K);
        join[i] = trace(t, &m[i], around[i], 2 * X3_JOIN, X3_JOIN, end, states + i * X3_TILE_WEIGHTS);
        float *start = minima_at(&m[i], t->K, 0);
        for (size_t g = 0; g < groups; g++)
            start[g] = INFINITY;
        start[padded(t->K, join[i])] = 0;
        memcpy(around[i], x + i * X3_TILE_WEIGHTS, sizeof around[i]);
    }
    forward(t, n_tiles, m, (const float(*)[POSITIONS_MAX])around, X3_TILE_WEIGHTS);
    for (int i = 0; i < n_tiles; i++)
        trace(t, &m[i], around[i], X3_TILE_WEIGHTS, 0, join[i], states + i * X3_TILE_WEIGHTS);
}

void X3_SIMD_NAME(trellis_search)(const x3_trellis *t, const float *x, size_t n_tiles, uint16_t *states, void *scratch)
{
    const size_t groups = padded(t->K, X3_STATES >> t->K);
    const size_t n_stored = (size_t)(X3_TILE_WEIGHTS / segment_of(t->K) + 1);
    float *p = scratch;
    minima m[2];

    for (int i = 0; i < 2; i++) {
        m[i].stored = p;
        m[i].passing = p + n_stored * groups;
        p += (n_stored + 2) * groups;
    }
    for (size_t i = 0; i < n_tiles; i += 2)
        search_tiles(t, n_tiles - i >= 2 ? 2 : 1, x + i * X3_TILE_WEIGHTS, states + i * X3_TILE_WEIGHTS, m);
}
