/* EXL3 linear and reconstruction for one K: compile with -DX3_K=1 .. 8. linear_cuda.cuh says what is computed and how it is cut.
 *
 * What limits it: at one row, instructions. Decoding costs 33 to 39 issue slots for the 8 weights of a lane (shifts and
 * permutations 11 to 17, multiplies 8, packing and float16 fma 8, tensor cores 3, loads 2), while memory would allow
 * twice the pace at K <= 4. Hence no work twice, no synchronization inside a chain, and constant offsets for addresses. */
#include "kernels/linear_cuda.cuh"

#ifndef X3_K
#error "compile with -DX3_K=1 .. 8"
#endif

#define TILE_WORDS (8 * X3_K)
#define STAGE_PAIRS LINEAR_STAGE_PAIRS(X3_K)
#define STAGE_UNITS (2 * STAGE_PAIRS)

/* ---- walking over a block's pairs ------------------------------------------------------------------------------ */

/* Pairs [begin, end), all in one stripe. */
typedef struct segment {
    int begin, end, stripe;
} segment;

static __device__ __forceinline__ segment segment_first(int first, int last, int n_pairs_in)
{
    segment s;

    s.stripe = first / n_pairs_in;
    s.begin = first;
    s.end = min(last, (s.stripe + 1) * n_pairs_in);
    return s;
}

/* The one after s in a block whose pairs end at `last`; s.end < last. */
static __device__ __forceinline__ segment segment_next(segment s, int last, int n_pairs_in)
{
    s.stripe++;
    s.begin = s.end;
    s.end = min(last, s.end + n_pairs_in);
    return s;
}

/* Pairs of a chain in a segment. */
static __device__ __forceinline__ int chain_pairs(segment s, int chain)
{
    return (s.end - s.begin - chain + N_CHAINS - 1) / N_CHAINS; /* may be 0: then (negative + 7) / 8 rounds to it */
}

/* What a warp copies into its ring: the pairs of its chain, for each of its column parts in turn, segment by segment. Column
 * part p of a stripe is TILES tiles wide. A copy instruction moves 16 bytes a lane, and several units where they are small. */
typedef struct feed {
    const uint32_t *from; /* this lane's bytes of the next pair */
    size_t unit_step;     /* words from a unit to the next one */
    int n_left;           /* pairs before this column part of this segment ends; none at the very end */
    segment s;
    int columns;
} feed;

/* In 16-byte pieces; units a copy instruction moves, a divisor of STAGE_UNITS. */
#define UNIT_PIECES(TILES) ((TILES) * TILE_WORDS / 4)
#define COPY_UNITS(TILES) \
    (UNIT_PIECES(TILES) * 4 <= X3_WARP && STAGE_UNITS >= 4 ? 4 : UNIT_PIECES(TILES) * 2 <= X3_WARP ? 2 : 1)

/* Units from the first of a stage to unit u of it. */
static __device__ __forceinline__ int unit_distance(int u)
{
    return 2 * N_CHAINS * (u / 2) + u % 2;
}

template <int TILES> static __device__ __forceinline__ void feed_point(feed *f, const linear_args &a, int chain, int lane)
{
    constexpr int units = COPY_UNITS(TILES), pieces = UNIT_PIECES(TILES);
    const linear_part &part = a.parts[part_of(a, f->s.stripe)];
    const int lane_unit = units > 1 ? lane / pieces : 0, piece = units > 1 ? lane % pieces : lane;
    const int unit = 2 * (f->s.begin - f->s.stripe * a.n_pairs_in + chain) + unit_distance(lane_unit);
    const size_t tile = (size_t)(f->s.stripe - part.first_stripe) * STRIPE_TILES + f->columns * TILES;

    f->unit_step = (size_t)part.n_stripes * STRIPE_TILES * TILE_WORDS;
    f->n_left = chain_pairs(f->s, chain);
    f->from = part.words + unit * f->unit_step + tile * TILE_WORDS + piece * 4;
}

/* Goes on to where there is something left. */
template <int TILES, int WARPS>
static __device__ __forceinline__ void feed_settle(feed *f, const linear_args &a, int last, int chain, int lane)
{
    const int beside = WARPS / N_CHAINS; /* column parts that other warps take at the same time */

    while (f->n_left <= 0 && (f->s.end < last || f->columns + beside < STRIPE_TILES / TILES)) {
        f->columns += beside;
        if (f->columns >= STRIPE_TILES / TILES) {
            f->columns %= beside;
            f->s = segment_next(f->s, last, a.n_pairs_in);
        }
        feed_point<TILES>(f, a, chain, lane);
    }
}

/* Starts copying the next stage, as one group. */
template <int TILES, int WARPS>
static __device__ __forceinline__ void feed_stage(feed *f, const linear_args &a, uint32_t *stage, int last, int chain, int lane)
{
    constexpr int units = COPY_UNITS(TILES), pieces = UNIT_PIECES(TILES);
    const int lane_unit = units > 1 ? lane / pieces : 0;

    if (f->n_left > 0) {
#pragma unroll
        for (int u = 0; u < STAGE_UNITS; u += units)
#pragma unroll
            for (int p = 0; p < pieces * units; p += X3_WARP)
                if ((u + lane_unit) / 2 < f->n_left && (pieces * units - p >= X3_WARP || lane < pieces * units - p))
                    copy_async_16(stage + u * TILES * TILE_WORDS + (p + lane) * 4, f->from + unit_distance(u) * f->unit_step + p * 4);
        f->from += 2 * N_CHAINS * STAGE_PAIRS * f->unit_step;
        f->n_left -= STAGE_PAIRS;
        if (f->n_left <= 0)
            feed_settle<TILES, WARPS>(f, a, last, chain, lane);
    }
    copy_async_commit();
}

/* ---- inputs ------------------------------------------------------------------------------------------------------ */

/* Folded: the rotated inputs of the block's pairs, [pair - first][row][unit][q][2] words in the order of operands, behind as many
 * zeros as a row of a pair takes, for lanes without a row. */
#define ROTATED_AT_ONCE 2 /* 128-blocks that a warp has on the way together */

/* Scales of the warp's first 128-blocks: weights, which may be read before the kernel before this one is done. */
typedef struct rotation {
    uint2 scales[ROTATED_AT_ONCE];
} rotation;

/* First and last 128-block of a segment, in its stripe. */
static __device__ __forceinline__ int2 blocks_of(const linear_args &a, segment s)
{
    const int base = s.stripe * a.n_pairs_in;

    return make_int2((s.begin - base) / 4, (s.end - base + 3) / 4);
}

static __device__ __forceinline__ void load_rotation(rotation *r, const linear_args &a, int p, int block, int end, int n_warps, int lane)
{
#pragma unroll
    for (int i = 0; i < ROTATED_AT_ONCE; i++)
        r->scales[i] = load_scales(a, p, min(block + i * n_warps, end - 1), lane);
}

static __device__ __forceinline__ void store_folded(uint32_t *inputs, const linear_args &a, segment s, int first, int row, int block,
                                                    const float v[4], int lane)
{
    const int pair = s.stripe * a.n_pairs_in + block * 4 + (lane >> 3);
    uint32_t words[2];

    operand_words(v, words);
    if (pair >= s.begin && pair < s.end) {
        uint32_t *to = inputs + ((pair - first) * a.n_rows + row) * LINEAR_PAIR_WORDS + (lane >> 2 & 1) * 8;
        to[operand_word(lane, 0)] = words[0];
        to[operand_word(lane, 1)] = words[1];
    }
}

/* r: of segment s. */
static __device__ __forceinline__ void rotate_for_block(const linear_args &a, uint32_t *inputs, rotation r, segment s, int last, int warp,
                                                        int n_warps, int lane)
{
    const int first = s.begin;

    if (threadIdx.x < LINEAR_PAIR_WORDS)
        inputs[threadIdx.x] = 0;
    inputs += LINEAR_PAIR_WORDS;
    for (bool loaded = true;; s = segment_next(s, last, a.n_pairs_in), loaded = false) {
        const int p = part_of(a, s.stripe);
        const int2 blocks = blocks_of(a, s);
        for (int block = blocks.x + warp; block < blocks.y; block += ROTATED_AT_ONCE * n_warps, loaded = false) {
            if (!loaded)
                load_rotation(&r, a, p, block, blocks.y, n_warps, lane);
            for (int row = 0; row < a.n_rows; row++) {
                float v[ROTATED_AT_ONCE][4];
#pragma unroll
                for (int i = 0; i < ROTATED_AT_ONCE; i++)
                    load_inputs(a, row, min(block + i * n_warps, blocks.y - 1), lane, v[i]);
#pragma unroll
                for (int i = 0; i < ROTATED_AT_ONCE; i++) {
                    rotate_loaded(v[i], r.scales[i], lane);
                    if (block + i * n_warps < blocks.y)
                        store_folded(inputs, a, s, first, row, block + i * n_warps, v[i], lane);
                }
            }
        }
        if (s.end == last)
            break;
    }
    __syncthreads();
}

/* B operands of one pair from global memory, 16 rows at a time, `block_step` apart. */
template <int GROUPS> static __device__ __forceinline__ void operands_load(const uint4 *from, size_t block_step, uint32_t out[2][GROUPS][2])
{
#pragma unroll
    for (int b = 0; b < GROUPS; b += 2)
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const uint4 f = from[b / 2 * block_step + u * X3_WARP];
            out[u][b][0] = f.x;
            out[u][b][1] = f.y;
            out[u][b + 1][0] = f.z;
            out[u][b + 1][1] = f.w;
        }
}

/* ---- sums ---------------------------------------------------------------------------------------------------------- */

/* Adds the chains of one pass over a segment and writes rows [0, n_rows) of its columns to `partial` [row][128]. */
template <int GROUPS, int TILES, int WARPS>
static __device__ __forceinline__ void add_chains(float (*acc)[TILES][4], float *sums, float *partial, int n_rows, int chain,
                                                  int beside_column, int pass, int lane)
{
    constexpr int beside = WARPS / N_CHAINS, cols = beside * TILES * X3_TILE, ld = cols + LINEAR_SUMS_PAD;
    const int row = 2 * (lane & 3), column = beside_column % beside * TILES * X3_TILE + (lane >> 2);

#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
        const int n = min(8, n_rows - 8 * group);
        if (n <= 0)
            break;
        float *to = sums + (chain * n + row) * ld + column;
        __syncthreads(); /* the previous sums are read */
#pragma unroll
        for (int t = 0; t < TILES; t++)
#pragma unroll
            for (int i = 0; i < 4; i++)
                if (row + (i & 1) < n)
                    to[(i & 1) * ld + t * X3_TILE + 8 * (i >> 1)] = acc[group][t][i];
        __syncthreads();
        for (int i = threadIdx.x; i < n * cols; i += WARPS * X3_WARP) {
            const int r = i / cols, c = i % cols;
            float sum = sums[r * ld + c];
#pragma unroll
            for (int k = 1; k < N_CHAINS; k++)
                sum += sums[(k * n + r) * ld + c];
            __stcg(partial + (8 * group + r) * STRIPE_COLS + pass * cols + c, sum);
        }
    }
}

/* Brings the scales of a block's first and last stripe near: what finishes a stripe needs them at once. */
static __device__ __forceinline__ void prefetch_scales(const linear_args &a, segment s, int last, int lane)
{
    const int stripe = lane < 16 ? s.stripe : (last - 1) / a.n_pairs_in;
    const linear_part &part = a.parts[part_of(a, stripe)];

    if (threadIdx.x < X3_WARP && lane % 16 < 2)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(part.svh + (size_t)(stripe - part.first_stripe) * STRIPE_COLS + lane % 16 * 64));
}

/* y of one stripe from the partial sums of its n_slots segments. A warp a row. */
static __device__ __forceinline__ void finish_stripe(const linear_args &a, const float *partial, int n_slots,
                                                     size_t slot_floats, int stripe, int first_row, int n_rows, int warp,
                                                     int n_warps, int lane)
{
    for (int row = warp; row < n_rows; row += n_warps) {
        const float4 *from = (const float4 *)(partial + row * STRIPE_COLS) + lane;
        float4 f = __ldcg(from);
        float v[4] = {f.x, f.y, f.z, f.w};
        for (int s = 1; s < n_slots; s++) {
            f = __ldcg(from + s * slot_floats / 4);
            v[0] += f.x, v[1] += f.y, v[2] += f.z, v[3] += f.w;
        }
        finish_row(a, stripe, first_row + row, v, lane);
    }
}

/* True in all threads of the block that is the last to have written its sums of `stripe`; that one leaves the counter at
 * zero. *from and *to: the blocks that share the stripe. */
static __device__ __forceinline__ bool last_to_arrive(const linear_args &a, int *counter, int stripe, int *from, int *to)
{
    __shared__ int is_last;

    *from = block_of(a, stripe * a.n_pairs_in);
    *to = block_of(a, (stripe + 1) * a.n_pairs_in - 1);
    __syncthreads();
    if (threadIdx.x == 0) { /* acquire and release: for all writes of the block before, all its reads after the barriers */
        int arrived;
        asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(arrived) : "l"(counter) : "memory");
        is_last = arrived == *to - *from;
        if (is_last)
            *counter = 0;
    }
    __syncthreads();
    return is_last;
}

/* ---- the kernel ---------------------------------------------------------------------------------------------------- */

/* acc += the inputs of a pair times its tiles. */
template <int CODEBOOK, int GROUPS, int TILES>
static __device__ __forceinline__ void multiply(float (*acc)[TILES][4], const uint32_t in[2][GROUPS][2], const uint32_t *tiles,
                                                lane_bits bits, ones o)
{
    uint32_t w[TILES][2][4];

#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
        for (int t = 0; t < TILES; t++)
            decode_tile<X3_K, CODEBOOK>(tiles + (u * TILES + t) * TILE_WORDS, bits, o, w[t][u]);
#pragma unroll
    for (int g = 0; g < GROUPS; g++)
        multiply_pair<TILES>(acc[g], w, in[0][g], in[1][g]);
}

/* Warp w takes chain w % 8 and column parts w / 8, w / 8 + WARPS / 8, .. of TILES tiles each; a thread keeps GROUPS groups
 * of 8 rows. */
template <int CODEBOOK, int GROUPS, int TILES, int WARPS, bool FOLDED>
static __global__ void __launch_bounds__(WARPS *X3_WARP, 1) linear(const __grid_constant__ linear_args a)
{
    constexpr int stage_words = STAGE_UNITS * TILES * TILE_WORDS, passes = STRIPE_TILES / TILES * N_CHAINS / WARPS;
    constexpr int pair_unroll = FOLDED ? STAGE_PAIRS : 1;
    extern __shared__ __align__(16) uint32_t shared[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(X3_ALL_LANES, threadIdx.x >> 5, 0), chain = warp % N_CHAINS;
    const int first = first_pair(a, blockIdx.x), last = first_pair(a, blockIdx.x + 1);
    const int first_row = blockIdx.y * GROUPS * 8, n_rows = min(a.n_rows - first_row, GROUPS * 8), places = linear_row_places(a);
    const size_t slot_floats = (size_t)a.n_rows * STRIPE_COLS, block_step = (size_t)a.n_pairs_in * 2 * X3_WARP;
    lane_bits bits = lane_bits_of<X3_K>(lane);
    ones o = ones_of<CODEBOOK>(lane, a.multiplier, a.addend);
    uint32_t *ring = shared + (size_t)warp * a.n_stages * stage_words;
    float *sums = (float *)(shared + (size_t)WARPS * a.n_stages * stage_words);
    uint32_t *inputs = (uint32_t *)(sums + N_CHAINS * min(n_rows, 8) * (WARPS / N_CHAINS * TILES * X3_TILE + LINEAR_SUMS_PAD)); /* folded alone */

    bits.word = (int)opaque((uint32_t)bits.word);
    bits.before = (int)opaque((uint32_t)bits.before);
    bits.before2 = X3_K >= 5 ? (int)opaque((uint32_t)bits.before2) : 0;
    bits.shift = X3_K % 4 != 0 ? opaque(bits.shift) : 0;
    o.b[0] = opaque(o.b[0]);
    o.b[1] = opaque(o.b[1]);
    release_next_kernel();
    feed f = {};
    segment s = segment_first(first, last, a.n_pairs_in);
    f.s = s;
    f.columns = warp / N_CHAINS;
    feed_point<TILES>(&f, a, chain, lane);
    feed_settle<TILES, WARPS>(&f, a, last, chain, lane);
    for (int i = 0; i < a.n_stages - 1; i++)
        feed_stage<TILES, WARPS>(&f, a, ring + i * stage_words, last, chain, lane);
    rotation r;
    if (FOLDED) {
        const int2 blocks = blocks_of(a, s);
        load_rotation(&r, a, part_of(a, s.stripe), min(blocks.x + warp, blocks.y - 1), blocks.y, WARPS, lane);
        prefetch_scales(a, s, last, lane);
    }
    wait_for_previous_kernel();
    if (FOLDED)
        rotate_for_block(a, inputs, r, s, last, warp, WARPS, lane);

    int now = 0;
    for (;; s = segment_next(s, last, a.n_pairs_in)) {
        float *partial = a.partial + (blockIdx.x + s.stripe) * slot_floats + (size_t)first_row * STRIPE_COLS;
        const int pair = s.begin + chain - s.stripe * a.n_pairs_in, part = part_of(a, s.stripe);
        for (int pass = 0; pass < passes; pass++) {
            const bool has_row = lane >> 2 < a.n_rows;
            float acc[GROUPS][TILES][4] = {};
            const uint32_t *folded = inputs + 2 * (lane & 3) +
                                     (has_row ? (1 + (s.begin + chain - first) * a.n_rows + (lane >> 2)) * LINEAR_PAIR_WORDS : 0);
            const int folded_step = has_row ? N_CHAINS * a.n_rows * LINEAR_PAIR_WORDS : 0;
            const uint4 *operands = a.fragments + (part * (places / 16) + blockIdx.y * (GROUPS / 2)) * block_step + pair * 2 * X3_WARP + lane;
            for (int n_left = chain_pairs(s, chain); n_left > 0; n_left -= STAGE_PAIRS) {
                if (a.n_stages == 4)
                    copy_async_wait<2>();
                else if (a.n_stages == 3)
                    copy_async_wait<1>();
                else
                    copy_async_wait<0>();
                __syncwarp();
                const uint32_t *stage = ring + now * stage_words;
                feed_stage<TILES, WARPS>(&f, a, ring + (now == 0 ? a.n_stages - 1 : now - 1) * stage_words, last, chain, lane);
#pragma unroll(pair_unroll)
                for (int p = 0; p < STAGE_PAIRS; p++) {
                    if (p >= n_left)
                        break;
                    const uint32_t *tiles = stage + p * 2 * TILES * TILE_WORDS;
                    uint32_t in[2][GROUPS][2];
                    if constexpr (FOLDED) {
#pragma unroll
                        for (int u = 0; u < 2; u++) {
                            const uint2 h = *(const uint2 *)(folded + 8 * u);
                            in[u][0][0] = h.x;
                            in[u][0][1] = h.y;
                        }
                        folded += folded_step;
                    } else {
                        operands_load<GROUPS>(operands, block_step, in);
                        operands += 2 * N_CHAINS * X3_WARP;
                    }
                    multiply<CODEBOOK, GROUPS, TILES>(acc, in, tiles, bits, o);
                }
                now = now + 1 == a.n_stages ? 0 : now + 1;
            }
            add_chains<GROUPS, TILES, WARPS>(acc, sums, partial, n_rows, chain, warp / N_CHAINS, pass, lane);
        }
        int from, to;
        if (last_to_arrive(a, a.counters + blockIdx.y * a.n_stripes + s.stripe, s.stripe, &from, &to))
            finish_stripe(a, a.partial + (from + s.stripe) * slot_floats + (size_t)first_row * STRIPE_COLS, to - from + 1,
                          slot_floats, s.stripe, first_row, n_rows, warp, WARPS, lane);
        if (s.end == last)
            break;
    }
}

/* ---- the weight as a matrix ------------------------------------------------------------------------------------------ */

#define MATRIX_WARPS 8
#define MATRIX_LD (STRIPE_COLS + 8) /* float16 a row in shared memory: 16 bytes of padding keep the banks apart */

/* A 16 x 16 operand, columns of the weight across the lanes, to its place in rows of shared memory. ROW gives the row of
 * index i of the operand's second dimension; words as in the A operand of mma_f16. */
template <int (*ROW)(int)> static __device__ __forceinline__ void store_turned(__half *to, const uint32_t w[4], int lane)
{
#if __CUDA_ARCH__ >= 900
    /* lane 8 m + r gives the address of row r of block m, as stored */
    const __half *at = to + ROW((lane & 7) + 8 * (lane >> 4)) * MATRIX_LD + 8 * (lane >> 3 & 1);
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(
                     (uint32_t)__cvta_generic_to_shared(at)),
                 "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3])
                 : "memory");
#else
#pragma unroll
    for (int i = 0; i < 4; i++) {
        uint32_t turned;
        asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(w[i]));
        *(uint32_t *)(to + ROW((lane >> 2) + 8 * (i >> 1)) * MATRIX_LD + 8 * (i & 1) + 2 * (lane & 3)) = turned;
    }
#endif
}

/* 16 rows of 128 float16 from shared memory to `to` [..][n_out], by one warp: two rows at a time, 8 numbers a lane. */
template <typename OUT> static __device__ __forceinline__ void rows_out(const __half *rows, OUT *to, size_t n_out, int lane)
{
#pragma unroll
    for (int i = 0; i < X3_TILE / 2; i++) {
        const int row = 2 * i + (lane >> 4), column = 8 * (lane & 15);
        const uint4 h = *(const uint4 *)(rows + row * MATRIX_LD + column);
        if (sizeof(OUT) == 2) {
            *(uint4 *)(to + row * n_out + column) = h;
        } else {
            const float2 p = __half22float2(bits_half2(h.x)), q = __half22float2(bits_half2(h.y));
            const float2 r = __half22float2(bits_half2(h.z)), s = __half22float2(bits_half2(h.w));
            float4 *f = (float4 *)(to + row * n_out + column);
            f[0] = make_float4(p.x, p.y, q.x, q.y);
            f[1] = make_float4(r.x, r.y, s.x, s.y);
        }
    }
}

/* Pieces of 16 or 128 rows by 128 columns in the order of memory, every n-th one. */
typedef struct piece_walk {
    int row, stripe; /* in pieces */
    int row_step, stripe_step, n_stripes;
} piece_walk;

static __device__ __forceinline__ piece_walk piece_start(int first, int step, int n_stripes)
{
    piece_walk w;

    w.row = first / n_stripes;
    w.stripe = first % n_stripes;
    w.row_step = step / n_stripes;
    w.stripe_step = step % n_stripes;
    w.n_stripes = n_stripes;
    return w;
}

static __device__ __forceinline__ piece_walk piece_next(piece_walk w)
{
    w.row += w.row_step;
    w.stripe += w.stripe_step;
    if (w.stripe >= w.n_stripes) {
        w.stripe -= w.n_stripes;
        w.row++;
    }
    return w;
}

#define STRIP_WORDS (STRIPE_TILES * TILE_WORDS) /* a row of tiles, 128 columns */

/* Starts copying one row of tiles to shared memory, by one warp, as one group. `unit` may be past the end. */
static __device__ __forceinline__ void fetch_strip(uint32_t *to, const uint32_t *words, int unit, int stripe, int n_units,
                                                   int n_stripes, int lane)
{
    const uint32_t *from = words + ((size_t)unit * n_stripes + stripe) * STRIP_WORDS;

#pragma unroll
    for (int i = 0; i < STRIP_WORDS / 4; i += X3_WARP)
        if (unit < n_units && (STRIP_WORDS / 4 - i >= X3_WARP || lane < STRIP_WORDS / 4 - i))
            copy_async_16(to + (i + lane) * 4, from + (i + lane) * 4);
    copy_async_commit();
}

/* Wq [n_units * 16][n_stripes * 128], a warp 16 x 128 at a time, the next one's words on the way meanwhile. */
template <int CODEBOOK, typename OUT>
static __global__ void __launch_bounds__(MATRIX_WARPS *X3_WARP) reconstruct(const uint32_t *words, OUT *out, int n_units,
                                                                            int n_stripes, uint32_t multiplier,
                                                                            uint32_t addend)
{
    extern __shared__ __align__(16) uint32_t strips[]; /* [warp][2][STRIP_WORDS] */
    __shared__ __align__(16) __half rows[MATRIX_WARPS][X3_TILE * MATRIX_LD];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const lane_bits bits = lane_bits_of<X3_K>(lane);
    const ones o = ones_of<CODEBOOK>(lane, multiplier, addend);
    const size_t n_out = (size_t)n_stripes * STRIPE_COLS;
    uint32_t *mine = strips + warp * 2 * STRIP_WORDS;
    int now = 0;

    release_next_kernel();
    piece_walk p = piece_start(blockIdx.x * MATRIX_WARPS + warp, gridDim.x * MATRIX_WARPS, n_stripes);
    fetch_strip(mine, words, p.row, p.stripe, n_units, n_stripes, lane);
    for (; p.row < n_units; now ^= 1) {
        const piece_walk next = piece_next(p);
        fetch_strip(mine + (now ^ 1) * STRIP_WORDS, words, next.row, next.stripe, n_units, n_stripes, lane);
        copy_async_wait<1>();
        __syncwarp();
#pragma unroll
        for (int t = 0; t < STRIPE_TILES; t++) {
            uint32_t w[4];
            decode_tile<X3_K, CODEBOOK>(mine + now * STRIP_WORDS + t * TILE_WORDS, bits, o, w);
            store_turned<tile_operand_row>(rows[warp] + t * X3_TILE, w, lane);
        }
        __syncwarp();
        rows_out(rows[warp], out + (size_t)p.row * X3_TILE * n_out + p.stripe * STRIPE_COLS, n_out, lane);
        __syncwarp();
        p = next;
    }
}

/* Two float16 of +-1: entries [row][column] and [row][next] of the 16 x 16 Sylvester-Hadamard matrix. */
static __device__ __forceinline__ uint32_t signs_of(int row, int column, int next)
{
    return (__popc(row & column) & 1 ? 0xBC00u : 0x3C00u) | (__popc(row & next) & 1 ? 0xBC000000u : 0x3C000000u);
}

/* x[0 .. 7] times the 8 x 8 Hadamard matrix, for n numbers each. */
template <int N> static __device__ __forceinline__ void hadamard_8(float x[8][N])
{
#pragma unroll
    for (int stride = 1; stride < 8; stride *= 2)
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < N; j++)
                if ((i & stride) == 0) {
                    const float low = x[i][j], high = x[i + stride][j];
                    x[i][j] = low + high;
                    x[i + stride][j] = low - high;
                }
}

static __device__ __forceinline__ int same_row(int i)
{
    return i;
}

/* A 16 x 16 float32 tile [column g | g + 8][row 2 q, 2 q + 1 | + 8] of the registers of two products, rounded, to shared memory. */
static __device__ __forceinline__ void store_tile(__half *to, const float d[8], int lane)
{
    uint32_t w[4];

#pragma unroll
    for (int i = 0; i < 4; i++)
        w[i] = half2_bits(__floats2half2_rn(d[2 * i], d[2 * i + 1]));
    store_turned<same_row>(to, w, lane);
}

/* diag(suh) Hd Wq Hd diag(svh), rounded to float16, [n_units * 16][n_stripes * 128]; a block of threads 128 x 128 at a time.
 * A 128-point transform is a 16-point one inside the tiles, a product with a matrix of signs on the tensor cores, and an
 * 8-point one between tiles, in registers. First a warp has 16 rows: rows inside tiles, columns between tiles. Then, by way
 * of shared memory and rounded once, it has 16 columns: columns inside tiles, rows between tiles. */
template <int CODEBOOK>
static __global__ void __launch_bounds__(MATRIX_WARPS *X3_WARP, 2)
    dense(const uint32_t *words, const uint16_t *suh, const uint16_t *svh, __half *out, int n_units, int n_stripes,
          uint32_t multiplier, uint32_t addend)
{
    extern __shared__ __align__(16) uint32_t strips[]; /* [warp][2][STRIP_WORDS] */
    __shared__ __align__(16) __half rows[X3_HADAMARD * MATRIX_LD];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, g = lane >> 2, q = lane & 3;
    const lane_bits bits = lane_bits_of<X3_K>(lane);
    const ones o = ones_of<CODEBOOK>(lane, multiplier, addend);
    const size_t n_out = (size_t)n_stripes * STRIPE_COLS;
    uint32_t *mine = strips + warp * 2 * STRIP_WORDS;
    uint32_t signs[2][2]; /* rows in the order of decode_tile, by new rows g and g + 8 */
    int now = 0;

#pragma unroll
    for (int i = 0; i < 4; i++)
        signs[i >> 1][i & 1] = signs_of(g + 8 * (i >> 1), tile_operand_row(2 * q + 8 * (i & 1)),
                                        tile_operand_row(2 * q + 8 * (i & 1) + 1));
    release_next_kernel();
    piece_walk p = piece_start(blockIdx.x, gridDim.x, n_stripes);
    fetch_strip(mine, words, p.row * 8 + warp, p.stripe, n_units, n_stripes, lane);
    for (; p.row * 8 < n_units; now ^= 1) {
        const piece_walk next = piece_next(p);
        fetch_strip(mine + (now ^ 1) * STRIP_WORDS, words, next.row * 8 + warp, next.stripe, n_units, n_stripes, lane);
        const uint16_t *out_scale = svh + p.stripe * STRIPE_COLS + warp * X3_TILE + g;
        const uint16_t *in_scale = suh + p.row * X3_HADAMARD + 2 * q;
        const __half2 scale[2] = {__half2half2(__ushort_as_half(out_scale[0])), __half2half2(__ushort_as_half(out_scale[8]))};
        float d[8][8] = {};
        copy_async_wait<1>();
        __syncwarp();
#pragma unroll
        for (int t = 0; t < STRIPE_TILES; t++) {
            uint32_t w[4];
            decode_tile<X3_K, CODEBOOK>(mine + now * STRIP_WORDS + t * TILE_WORDS, bits, o, w);
            mma_f16(d[t], w, signs[0]);
            mma_f16(d[t] + 4, w, signs[1]);
        }
        hadamard_8<8>(d);
        __syncthreads(); /* the rows of the last piece are out */
#pragma unroll
        for (int t = 0; t < STRIPE_TILES; t++)
            store_tile(rows + warp * X3_TILE * MATRIX_LD + t * X3_TILE, d[t], lane);
        __syncthreads();
        uint32_t a[4]; /* signs with the output scale: exact in float16 */
#pragma unroll
        for (int i = 0; i < 4; i++)
            a[i] = half2_bits(__hmul2(bits_half2(signs_of(g + 8 * (i & 1), 2 * q + 8 * (i >> 1), 2 * q + 8 * (i >> 1) + 1)),
                                      scale[i & 1]));
#pragma unroll
        for (int t = 0; t < 8; t++) {
            uint32_t b[4];
            const __half *at = rows + (t * X3_TILE + (lane & 7) + 8 * (lane >> 4)) * MATRIX_LD + warp * X3_TILE + 8 * (lane >> 3 & 1);
            asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                         : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3])
                         : "r"((uint32_t)__cvta_generic_to_shared(at))
                         : "memory");
#pragma unroll
            for (int i = 0; i < 8; i++)
                d[t][i] = 0;
            mma_f16(d[t], a, b);
            mma_f16(d[t] + 4, a, b + 2);
        }
        uint32_t in_scales[8][2];
#pragma unroll
        for (int t = 0; t < 16; t++)
            in_scales[t / 2][t % 2] = *(const uint32_t *)(in_scale + t * 8);
        hadamard_8<8>(d);
        __syncthreads(); /* all is read */
#pragma unroll
        for (int t = 0; t < 8; t++) {
            const float2 low = __half22float2(bits_half2(in_scales[t][0])), high = __half22float2(bits_half2(in_scales[t][1]));
#pragma unroll
            for (int i = 0; i < 8; i++)
                d[t][i] *= (i < 4 ? (i & 1 ? low.y : low.x) : (i & 1 ? high.y : high.x)) * (1.0f / X3_HADAMARD);
            store_tile(rows + t * X3_TILE * MATRIX_LD + warp * X3_TILE, d[t], lane);
        }
        __syncthreads();
        rows_out(rows + warp * X3_TILE * MATRIX_LD, out + ((size_t)p.row * X3_HADAMARD + warp * X3_TILE) * n_out + p.stripe * STRIPE_COLS,
                 n_out, lane);
        p = next;
    }
}

/* ---- the table of this K --------------------------------------------------------------------------------------------- */

template <int CODEBOOK> static void fill(linear_kernels *k)
{
    const int d = decoder_of((x3_codebook)CODEBOOK);

#define SHAPE(s, folded) \
    (const void *)linear<CODEBOOK, LINEAR_GROUPS(s), LINEAR_TILES(s), LINEAR_WARPS(s), folded>
    k->linear[d][LINEAR_FOLDED] = SHAPE(LINEAR_FOLDED, true);
    k->linear[d][LINEAR_16] = SHAPE(LINEAR_16, false);
    k->linear[d][LINEAR_32] = SHAPE(LINEAR_32, false);
    k->linear[d][LINEAR_64] = SHAPE(LINEAR_64, false);
#undef SHAPE
    k->reconstruct[d][X3_CUDA_F32] = (const void *)reconstruct<CODEBOOK, float>;
    k->reconstruct[d][X3_CUDA_F16] = (const void *)reconstruct<CODEBOOK, __half>;
    k->dense[d] = (const void *)dense<CODEBOOK>;
}

#define NAME_OF(k) x3_linear_kernels_k##k
#define NAME(k) NAME_OF(k)

void NAME(X3_K)(linear_kernels *out)
{
    fill<CODEBOOK_SUM>(out);
    fill<X3_CB_MUL1>(out);
}
