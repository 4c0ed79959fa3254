/* Trellis search for one K: compile with -DX3_K=1 .. 8. The search is that of kernels/trellis.h, operation by operation, so
 * the codes are those of the CPU.
 *
 * A block holds all 65,536 values of the codebook in its registers, 64 or 128 states a thread, as float16 (at K = 1 the minima
 * take that room and values are decoded anew). A state then costs: half a conversion or less, subtract, fma, min.
 * Only the minimum that a group is reached with is kept. Every SEGMENT-th row of minima goes to device memory; the walk
 * back, by one warp a tile, computes again the few groups that lead to the known end of a segment, this time with their
 * predecessors.
 *
 * What limits it: instruction issue, 3.6 to 4.5 slots a state, and the walk back, which is latency: about 1 us a segment
 * shared by the tiles that a block works on together. */
#include "kernels/search_cuda.cuh"

#ifndef X3_K
#error "compile with -DX3_K=1 .. 8"
#endif

#define K X3_K
#define N_FROM (1 << K)                                 /* states that lead into a group, and groups that follow one */
#define N_GROUPS (X3_STATES >> K)
#define RUN (N_GROUPS >> K)                             /* groups that share the top K bits */
#define SEGMENT (K == 1 ? 8 : K == 2 ? 4 : K <= 5 ? 2 : 1)
#define N_ROWS (X3_TILE_WEIGHTS / SEGMENT)              /* stored rows; row 0 is never used */

/* A thread takes PER_TO successors of PER_RUN places in a run, each from PER_FROM predecessors. Where 2^K is larger,
 * SPLIT_TO threads share the successors and SPLIT_FROM neighbours the predecessors; these add a min over the lanes.
 * THREADS, 512 or 1024, is a parameter of the kernel. */
#define PER_TO (N_FROM < 8 ? N_FROM : 8)
#define PER_FROM (N_FROM < 16 ? N_FROM : 16)
#define PER_RUN(THREADS) (X3_STATES / (THREADS) / (PER_TO * PER_FROM))
#define SPLIT_TO (N_FROM / PER_TO)
#define SPLIT_FROM (N_FROM / PER_FROM)
#define PLACE_STEP(THREADS) ((THREADS) / (SPLIT_TO * SPLIT_FROM))

/* Minima of neighbouring predecessors lie RUN apart: padding keeps them in different banks. */
#define PAD (K == 5 || K == 6 ? 4 : 0)
#define ROW_FLOATS (N_GROUPS + N_FROM * PAD)

static __device__ __forceinline__ int place_of(int group)
{
    return PAD == 0 ? group : group + group / RUN * PAD;
}

/* What a thread works on. */
typedef struct share {
    int first_from; /* predecessors first_from, first_from + SPLIT_FROM, .. */
    int place;      /* in the run; further ones PLACE_STEP apart */
    int first_to;   /* successors first_to .. first_to + PER_TO - 1 */
} share;

static __device__ __forceinline__ share share_of(int thread)
{
    share s;

    s.first_from = thread % SPLIT_FROM;
    s.first_to = thread / SPLIT_FROM % SPLIT_TO * PER_TO;
    s.place = thread / (SPLIT_FROM * SPLIT_TO);
    return s;
}

template <int THREADS> static __device__ __forceinline__ uint32_t share_state(share s, int run, int from, int to)
{
    return (uint32_t)((s.first_from + from * SPLIT_FROM) << (16 - K) | (s.place + run * PLACE_STEP(THREADS)) << K |
                      (s.first_to + to));
}

/* ---- one position forward ---------------------------------------------------------------------------------------- */

/* Writes the new minima of a place to shared memory, and to the stored row when there is one. */
static __device__ __forceinline__ void minima_write(const float best[PER_TO], float *to, float *row, share s, int place_in_run)
{
    const int group = place_in_run << K | s.first_to;
    float *place = to + place_of(group);

    if (SPLIT_FROM > 1 && s.first_from != 0)
        return;
    if constexpr (PER_TO == 2) {
        *(float2 *)place = make_float2(best[0], best[1]);
        if (row != NULL)
            __stcg((float2 *)(row + group), make_float2(best[0], best[1]));
    } else {
#pragma unroll
        for (int j = 0; j < PER_TO; j += 4) {
            const float4 f = make_float4(best[j], best[j + 1], best[j + 2], best[j + 3]);
            *(float4 *)(place + j) = f;
            if (row != NULL)
                __stcg((float4 *)(row + group + j), f);
        }
    }
}

static __device__ __forceinline__ float cost(float value, float x, float before)
{
    const float d = value - x;

    return fmaf(d, d, before);
}

/* Costs are never negative, so their bits are in their order; there is one instruction for three integers. At K = 3 and 5 it was
 * 2 and 7 % slower on an H200 than two of two floats, elsewhere up to 6 % faster. */
static __device__ __forceinline__ float min_3(float a, float b, float c)
{
    if (K == 3 || K == 5)
        return fminf(fminf(a, b), c);
    return __int_as_float(__vimin3_s32(__float_as_int(a), __float_as_int(b), __float_as_int(c)));
}

/* next[group] = min over predecessors of fma(d, d, m[predecessor]), d = value - x, for TILES tiles. `from` and `to` are
 * ROW_FLOATS a tile; `row` is the stored row of the first tile, `row_step` from the next one's, or NULL. */
template <int CODEBOOK, int TILES, int THREADS, search_place PLACE>
static __device__ __forceinline__ void step(const uint32_t (*values)[PER_FROM][PER_TO / 2], const float *from, float *to, const float x[TILES],
                                            float *row, size_t row_step, share s)
{
    constexpr int runs = PER_RUN(THREADS), held = PLACE == SEARCH_IN_PLACE ? runs : 1;
    float best[held][TILES][PER_TO];

    if (K == 1)
        s.place = (int)opaque((uint32_t)s.place);

#pragma unroll
    for (int run = 0; run < runs; run++) {
        float(*b)[PER_TO] = best[run % held];
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int j = 0; j < PER_TO; j++)
                b[t][j] = CUDART_INF_F;
#pragma unroll
        for (int i = 0; i < PER_FROM; i += 2) {
            float m[TILES][2];
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int e = 0; e < 2; e++)
                    m[t][e] = from[t * ROW_FLOATS + (s.first_from + (i + e) * SPLIT_FROM) * (RUN + PAD) + s.place +
                                   run * PLACE_STEP(THREADS)];
#pragma unroll
            for (int j = 0; j < PER_TO; j += 2) {
                float2 value[2];
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const uint32_t v = K == 1 ? decode_pair<CODEBOOK>(share_state<THREADS>(s, run, i + e, j),
                                                                      share_state<THREADS>(s, run, i + e, j + 1))
                                              : values[run][i + e][j / 2];
                    /* opaque: converted ahead of the loop over positions, the values would not fit into registers */
                    value[e] = __half22float2(bits_half2(opaque(v)));
                }
#pragma unroll
                for (int t = 0; t < TILES; t++) {
                    b[t][j] = min_3(b[t][j], cost(value[0].x, x[t], m[t][0]), cost(value[1].x, x[t], m[t][1]));
                    b[t][j + 1] = min_3(b[t][j + 1], cost(value[0].y, x[t], m[t][0]), cost(value[1].y, x[t], m[t][1]));
                }
            }
        }
#pragma unroll
        for (int lanes = 1; lanes < SPLIT_FROM; lanes *= 2)
#pragma unroll
            for (int t = 0; t < TILES; t++)
#pragma unroll
                for (int j = 0; j < PER_TO; j++)
                    b[t][j] = fminf(b[t][j], __shfl_xor_sync(X3_ALL_LANES, b[t][j], lanes));
        if (PLACE != SEARCH_IN_PLACE)
#pragma unroll
            for (int t = 0; t < TILES; t++)
                minima_write(b[t], to + t * ROW_FLOATS, row == NULL ? NULL : row + t * row_step, s,
                             s.place + run * PLACE_STEP(THREADS));
    }
    if (PLACE == SEARCH_IN_PLACE) {
        __syncthreads();
#pragma unroll
        for (int run = 0; run < runs; run++)
#pragma unroll
            for (int t = 0; t < TILES; t++)
                minima_write(best[run % held][t], to + t * ROW_FLOATS, row == NULL ? NULL : row + t * row_step, s,
                             s.place + run * PLACE_STEP(THREADS));
    }
    __syncthreads();
}

/* ---- walking back ------------------------------------------------------------------------------------------------- */

#define LEVEL_COSTS (1 << (K * (SEGMENT - 1)))

/* What the warp of one tile needs on its way back. */
typedef struct trace_room {
    float cost[LEVEL_COSTS];
    uint8_t from[SEGMENT][LEVEL_COSTS];
} trace_room;

/* One level of a segment: the 2^(K LEVEL) groups that lead to `end` in LEVEL positions get their cost and predecessor.
 * Costs before it come from the stored row at the first level, else from `room`. The warp splits groups, and where these
 * are fewer than its lanes, predecessors. */
template <int LEVEL>
static __device__ __forceinline__ void trace_level(trace_room *room, const float *row, int only, int codebook, float x,
                                                   uint32_t end, int lane)
{
    constexpr int n = 1 << (K * LEVEL), per_group = n >= X3_WARP ? 1 : X3_WARP / n < N_FROM ? X3_WARP / n : N_FROM;
    constexpr int n_rounds = n >= X3_WARP ? n / X3_WARP : 1, n_from = N_FROM / per_group;
    const int sub = lane % per_group;
    float before[n_rounds][n_from];

#pragma unroll
    for (int r = 0; r < n_rounds; r++)
#pragma unroll
        for (int k = 0; k < n_from; k++) {
            const uint32_t which = (uint32_t)(lane / per_group + r * X3_WARP) % n, from = (uint32_t)(sub + k * per_group);
            const uint32_t leaf = from << (K * LEVEL) | which;
            const uint32_t group = leaf << (16 - K - K * (LEVEL + 1)) | end >> (K * (LEVEL + 1));
            before[r][k] = LEVEL < SEGMENT - 1 ? room->cost[leaf]
                           : row != NULL       ? __ldcg(row + group)
                           : (int)group == only ? 0.0f
                                                : CUDART_INF_F;
        }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < n_rounds; r++) {
        const uint32_t which = (uint32_t)(lane / per_group + r * X3_WARP) % n;
        const uint32_t group = which << (16 - K - K * LEVEL) | end >> (K * LEVEL);
        float best = CUDART_INF_F;
        int best_from = sub; /* the lowest of equal ones, infinite ones too */
#pragma unroll
        for (int k = 0; k < n_from; k++) {
            const int from = sub + k * per_group;
            const float d = decode_value_of(codebook, (uint32_t)from << (16 - K) | group) - x;
            const float c = fmaf(d, d, before[r][k]);
            if (c < best) {
                best = c;
                best_from = from;
            }
        }
#pragma unroll
        for (int lanes = 1; lanes < per_group; lanes *= 2) {
            const float c = __shfl_xor_sync(X3_ALL_LANES, best, lanes);
            const int from = __shfl_xor_sync(X3_ALL_LANES, best_from, lanes);
            if (c < best || (c == best && from < best_from)) {
                best = c;
                best_from = from;
            }
        }
        if (sub == 0 && (n >= X3_WARP || lane < n * per_group)) {
            if (LEVEL > 0)
                room->cost[which] = best;
            room->from[LEVEL][which] = (uint8_t)best_from;
        }
    }
    __syncwarp();
}

/* Levels LEVEL .. 0; `last` is the position after the segment, in x's order. */
template <int LEVEL>
static __device__ __forceinline__ void trace_levels(trace_room *room, const float *row, int only, int codebook, const float *x,
                                                    int last, uint32_t end, int lane)
{
    trace_level<LEVEL>(room, row, only, codebook, x[(last - 1 - LEVEL) & 255], end, lane);
    if constexpr (LEVEL > 0)
        trace_levels<LEVEL - 1>(room, row, only, codebook, x, last, end, lane);
}

/* Walks back from position 256 of a pass, left through group `end`, to `stop`; returns the group that enters there. A pass
 * sees x[(position + shift) % 256]. Without row 0 the pass began in group `only`. States are written when not NULL. */
static __device__ __forceinline__ uint32_t trace(trace_room *room, const float *rows, int only, int codebook, const float *x,
                                                 int shift, int stop, uint32_t end, uint16_t *states, int lane)
{
    for (int last = X3_TILE_WEIGHTS; last > stop; last -= SEGMENT) {
        const int first = last - SEGMENT;
        const float *row = first == 0 ? NULL : rows + (size_t)(first / SEGMENT) * N_GROUPS;
        trace_levels<SEGMENT - 1>(room, row, only, codebook, x, last + shift, end, lane);
        uint32_t which = 0;
#pragma unroll
        for (int level = 0; level < SEGMENT; level++) {
            const uint32_t from = room->from[level][which], state = from << (16 - K) | end;
            if (states != NULL && lane == 0)
                states[last - 1 - level] = (uint16_t)state;
            which |= from << (K * level);
            end = state >> K;
        }
        __syncwarp();
    }
    return end;
}

/* ---- tiles in and out ---------------------------------------------------------------------------------------------- */

static __device__ __forceinline__ int strip_of(const search_args &a, int tile)
{
    int s = 0;

    while (tile >= a.first_tile[s + 1])
        s++;
    return s;
}

static __device__ __forceinline__ float tile_input(const search_args &a, int tile, int p)
{
    if (tile >= a.n_tiles)
        return 0;
    if (a.x != NULL)
        return a.x[(size_t)tile * X3_TILE_WEIGHTS + p];
    const int s = strip_of(a, tile), column = (tile - a.first_tile[s]) * X3_TILE + x3_tile_column(p);
    return a.strips[s].d_target[x3_tile_row(p) * a.strips[s].ld_target + column];
}

/* Word w of the packed tile: the K new bits of every state, first position first. */
static __device__ __forceinline__ uint32_t pack_word(const uint16_t *states, int w)
{
    uint32_t word = 0;

    for (int p = 32 * w / K; p * K < 32 * (w + 1); p++) {
        const uint32_t bits = states[p] & (N_FROM - 1);
        const int shift = 32 * (w + 1) - (p + 1) * K; /* from the word's last bit; the ends of a state may stick out */
        word |= shift >= 0 ? bits << shift : bits >> -shift;
    }
    return word;
}

static __device__ __forceinline__ void tile_output(const search_args &a, int tile, const uint16_t *states, int thread)
{
    if (a.states != NULL && thread < X3_TILE_WEIGHTS)
        a.states[(size_t)tile * X3_TILE_WEIGHTS + thread] = states[thread];
    if (a.n_strips == 0)
        return;
    const int s = strip_of(a, tile), first = (tile - a.first_tile[s]) * X3_TILE;
    const x3_cuda_strip &strip = a.strips[s];
    if (thread < X3_TILE_WEIGHTS) { /* in matrix order: 16 neighbours write 64 bytes */
        const int row = thread / X3_TILE, column = first + thread % X3_TILE;
        const float value = decode_value_of(a.codebook, states[x3_tile_position(row, thread % X3_TILE)]);
        if (strip.d_q != NULL)
            strip.d_q[row * strip.ld_q + column] = value;
        if (strip.d_error != NULL)
            strip.d_error[row * strip.ld_error + column] = strip.d_w[row * strip.ld_w + column] - value;
    } else if (strip.d_words != NULL && thread - X3_TILE_WEIGHTS < 8 * K) {
        const int w = thread - X3_TILE_WEIGHTS;
        strip.d_words[(size_t)(first / X3_TILE) * (8 * K) + w] = pack_word(states, w);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------------------------------ */

/* Group of the lowest minimum, the lower group of equal ones. Same result in all threads. */
template <int THREADS> static __device__ __forceinline__ int lowest_group(const float *minima, float *room_cost, int *room_group)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    float best = CUDART_INF_F;
    int group = N_GROUPS;

    for (int g = threadIdx.x; g < N_GROUPS; g += THREADS) {
        const float c = minima[place_of(g)];
        if (c < best) {
            best = c;
            group = g;
        }
    }
    for (int round = 0; round < 2; round++) {
        for (int lanes = 1; lanes < X3_WARP; lanes *= 2) {
            const float c = __shfl_xor_sync(X3_ALL_LANES, best, lanes);
            const int g = __shfl_xor_sync(X3_ALL_LANES, group, lanes);
            if (c < best || (c == best && g < group)) {
                best = c;
                group = g;
            }
        }
        if (round == 1)
            break;
        __syncthreads();
        if (lane == 0) {
            room_cost[warp] = best;
            room_group[warp] = group;
        }
        __syncthreads();
        best = room_cost[lane % (THREADS / X3_WARP)];
        group = room_group[lane % (THREADS / X3_WARP)];
    }
    return group;
}

template <int CODEBOOK, int TILES, int THREADS, search_place PLACE>
static __global__ void __launch_bounds__(THREADS, 1) search(const __grid_constant__ search_args a)
{
    extern __shared__ __align__(16) float shared[];
    __shared__ float xs[TILES][X3_TILE_WEIGHTS], room_cost[THREADS / X3_WARP];
    __shared__ int room_group[THREADS / X3_WARP], ends[TILES];
    __shared__ uint16_t states[TILES][X3_TILE_WEIGHTS];
    __shared__ trace_room rooms[TILES];
    const int thread = threadIdx.x, lane = thread & 31, warp = thread >> 5;
    const share s = share_of(thread);
    const size_t tile_floats = (size_t)N_ROWS * N_GROUPS; /* stored rows of a tile */
    float *rows = a.rows + blockIdx.x * a.block_floats;
    float *minima = PLACE == SEARCH_GLOBAL ? rows + TILES * tile_floats : shared;
    uint32_t values[PER_RUN(THREADS)][PER_FROM][PER_TO / 2];

    if (K > 1)
#pragma unroll
        for (int i = 0; i < PER_RUN(THREADS) * PER_FROM * PER_TO; i++) {
            const int run = i / (PER_FROM * PER_TO), from = i / PER_TO % PER_FROM, to = i % PER_TO;
            const uint32_t state = share_state<THREADS>(s, run, from, to);
            if (to % 2 == 0)
                values[run][from][to / 2] = a.codebook == X3_CB_MUL1  ? decode_pair<X3_CB_MUL1>(state, state + 1)
                                            : a.codebook == X3_CB_MCG ? decode_pair<X3_CB_MCG>(state, state + 1)
                                                                      : decode_pair<X3_CB_3INST>(state, state + 1);
        }
    for (int tile = blockIdx.x * TILES; tile < a.n_tiles; tile += gridDim.x * TILES) {
        for (int i = thread; i < TILES * X3_TILE_WEIGHTS; i += THREADS)
            xs[i / X3_TILE_WEIGHTS][i % X3_TILE_WEIGHTS] = tile_input(a, tile + i / X3_TILE_WEIGHTS, i % X3_TILE_WEIGHTS);
        for (int pass = 0; pass < 2; pass++) { /* joining, then constrained */
            const int shift = pass == 0 ? X3_TILE_WEIGHTS - SEARCH_JOIN : 0, stop = pass == 0 ? SEARCH_JOIN : 0;
            for (int i = thread; i < TILES * ROW_FLOATS; i += THREADS)
                minima[i] = pass == 0 || i % ROW_FLOATS == place_of(ends[i / ROW_FLOATS]) ? 0 : CUDART_INF_F;
            __syncthreads();
            for (int p = 0; p < X3_TILE_WEIGHTS; p++) {
                const bool two = PLACE != SEARCH_IN_PLACE;
                const bool store = (p + 1) % SEGMENT == 0 && p + 1 < X3_TILE_WEIGHTS && p + 1 >= stop;
                float x[TILES];
                for (int t = 0; t < TILES; t++)
                    x[t] = xs[t][(p + shift) & 255];
                step<CODEBOOK, TILES, THREADS, PLACE>(values, minima + (two && p % 2 == 1 ? TILES * ROW_FLOATS : 0),
                                             minima + (two && p % 2 == 0 ? TILES * ROW_FLOATS : 0), x,
                                             store ? rows + (size_t)((p + 1) / SEGMENT) * N_GROUPS : NULL, tile_floats, s);
            }
            if (pass == 0)
                for (int t = 0; t < TILES; t++) {
                    const int group = lowest_group<THREADS>(minima + t * ROW_FLOATS, room_cost, room_group);
                    if (thread == 0)
                        ends[t] = group;
                }
            __syncthreads();
            if (warp < TILES) {
                uint32_t end = (uint32_t)ends[warp];
                end = trace(&rooms[warp], rows + warp * tile_floats, (int)end, a.codebook, xs[warp], shift, stop, end,
                            pass == 0 ? NULL : states[warp], lane);
                if (pass == 0 && lane == 0)
                    ends[warp] = (int)end;
            }
            __syncthreads();
        }
        for (int t = 0; t < TILES && tile + t < a.n_tiles; t++)
            tile_output(a, tile + t, states[t], thread);
        __syncthreads();
    }
}

/* ---- the table of this K ----------------------------------------------------------------------------------------------- */

/* At K > 1 the codebook is looked at only once a launch: one kernel serves all three. */
template <int TILES, int THREADS, search_place PLACE> static void add(search_kernels *k)
{
    search_variant *v = &k->variants[k->n_variants++];

    v->kernel[X3_CB_3INST] = (const void *)search<K == 1 ? X3_CB_3INST : 0, TILES, THREADS, PLACE>;
    v->kernel[X3_CB_MCG] = (const void *)search<K == 1 ? X3_CB_MCG : 0, TILES, THREADS, PLACE>;
    v->kernel[X3_CB_MUL1] = (const void *)search<K == 1 ? X3_CB_MUL1 : 0, TILES, THREADS, PLACE>;
    v->n_tiles = TILES;
    v->n_threads = THREADS;
    v->place = PLACE;
    v->shared_bytes = PLACE == SEARCH_GLOBAL ? 0 : (PLACE == SEARCH_TWO_BUFFERS ? 2 : 1) * TILES * ROW_FLOATS * sizeof(float);
}

#define NAME_OF(k) x3_search_kernels_k##k
#define NAME(k) NAME_OF(k)

void NAME(X3_K)(search_kernels *out)
{
    out->n_variants = 0;
    out->segment = SEGMENT;
#if X3_K == 1
    add<1, 1024, SEARCH_IN_PLACE>(out);
    add<1, 1024, SEARCH_GLOBAL>(out);
#elif X3_K == 2
    add<1, 1024, SEARCH_TWO_BUFFERS>(out);
    add<1, 512, SEARCH_IN_PLACE>(out);
#elif X3_K == 3
    add<2, 512, SEARCH_TWO_BUFFERS>(out);
    add<1, 512, SEARCH_TWO_BUFFERS>(out);
#else
    add<4, 512, SEARCH_TWO_BUFFERS>(out);
    add<2, 512, SEARCH_TWO_BUFFERS>(out);
    add<1, 512, SEARCH_TWO_BUFFERS>(out);
#endif
}
