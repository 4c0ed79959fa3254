/* EXL3 linear and reconstruction for one K: compile with -DX3_K=1 .. 8. linear_cuda.cuh says what is computed and how it is cut.
 *
 * What limits it at one row: issue slots. Decoding a tile costs a lane 31 to 39 instructions for its 8 weights (shifts and permutations 11
 * to 17, multiplies 8, packing and float16 fma 8, loads 2), and three tensor-core instructions that hold the issue port for six slots
 * each; memory would allow twice the pace at K <= 4. Outside the loop it is waiting: for the inputs, and for other blocks' sums. Hence no
 * work twice, no synchronization inside a chain, constant offsets for addresses, and few instructions in front of the inputs. */
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

/* A block's pairs. The last segment comes first: where it is not the end of its stripe another block waits for its sums. */
typedef struct block_pairs {
    int first, last, rest; /* [rest, last) is the last segment */
} block_pairs;

static __device__ __forceinline__ block_pairs block_pairs_of(const linear_args &a, int block)
{
    block_pairs b;

    b.first = first_pair(a, block);
    b.last = first_pair(a, block + 1);
    b.rest = max(b.first, stripe_of(a, b.last - 1) * a.n_pairs_in);
    return b;
}

static __device__ __forceinline__ segment segment_first(const linear_args &a, block_pairs b)
{
    segment s = {b.rest, b.last, stripe_of(a, b.last - 1)};

    return s;
}

/* Where the segment after s begins; none does at b.rest. */
static __device__ __forceinline__ int after_segment(segment s, block_pairs b)
{
    return s.begin == b.rest ? b.first : s.end;
}

static __device__ __forceinline__ segment segment_next(const linear_args &a, segment s, block_pairs b)
{
    segment next;

    next.begin = after_segment(s, b);
    next.stripe = s.begin == b.rest ? stripe_of(a, b.first) : s.stripe + 1;
    next.end = min(b.rest, (next.stripe + 1) * a.n_pairs_in);
    return next;
}

/* Pairs of a chain in a segment. */
static __device__ __forceinline__ int chain_pairs(segment s, int chain)
{
    return (s.end - s.begin - chain + N_CHAINS - 1) / N_CHAINS; /* may be 0: then (negative + 7) / 8 rounds to it */
}

/* What a warp copies into its ring: the pairs of its chain, for each of its column parts in turn, segment by segment. Column
 * part p of a stripe is TILES tiles wide. A stage is the pieces of 16 bytes of its units, one unit after the other; copy c of a
 * stage moves pieces 32 c .. 32 c + 31, one a lane. */
#define UNIT_PIECES(TILES) ((TILES) * TILE_WORDS / 4)
#define STAGE_COPIES(TILES) ((STAGE_UNITS * UNIT_PIECES(TILES) + X3_WARP - 1) / X3_WARP)

template <int TILES, int WARPS> struct feed {
    const char *from;    /* the first unit of the next pair */
    uint32_t unit_bytes; /* from a unit to the next one */
    int n_left;                           /* pairs before this column part of this segment ends; none at the very end */
    segment s;
    int columns;
};

template <int TILES, int WARPS>
static __device__ __forceinline__ void feed_point(feed<TILES, WARPS> *f, const linear_args &a, int chain, int lane)
{
    const int p = part_of(a, f->s.stripe);
    const linear_part &part = a.parts[p];
    const uint32_t unit_bytes = (uint32_t)part.n_stripes * (STRIPE_TILES * TILE_WORDS * 4);
    const int unit = 2 * (f->s.begin - f->s.stripe * a.n_pairs_in + chain);
    const int tile = (f->s.stripe - a.first_stripe[p]) * STRIPE_TILES + f->columns * TILES;

    f->unit_bytes = unit_bytes;
    f->n_left = chain_pairs(f->s, chain);
    f->from = (const char *)part.words + (size_t)unit * unit_bytes + (size_t)tile * (TILE_WORDS * 4);
}

/* Goes on to where there is something left. */
template <int TILES, int WARPS>
static __device__ __forceinline__ void feed_settle(feed<TILES, WARPS> *f, const linear_args &a, block_pairs b, int chain, int lane)
{
    const int beside = WARPS / N_CHAINS; /* column parts that other warps take at the same time */

    while (f->n_left <= 0 && (after_segment(f->s, b) < b.rest || f->columns + beside < STRIPE_TILES / TILES)) {
        f->columns += beside;
        if (f->columns >= STRIPE_TILES / TILES) {
            f->columns %= beside;
            f->s = segment_next(a, f->s, b);
        }
        feed_point<TILES, WARPS>(f, a, chain, lane);
    }
}

/* Bytes from a stage's first unit to this lane's piece of copy c. */
template <int TILES> static __device__ __forceinline__ uint32_t piece_offset(int c, int lane, uint32_t unit_bytes)
{
    const int i = c * X3_WARP + lane, u = i / UNIT_PIECES(TILES);

    return (uint32_t)(2 * N_CHAINS * (u / 2) + u % 2) * unit_bytes + (uint32_t)(i % UNIT_PIECES(TILES)) * 16;
}

/* Starts copying the next stage, as one group. to: this lane's 16 bytes of it. */
template <int TILES, int WARPS>
static __device__ __forceinline__ void feed_stage(feed<TILES, WARPS> *f, const linear_args &a, uint32_t *to, block_pairs b, int chain, int lane)
{
    constexpr int pieces = UNIT_PIECES(TILES);

    if (f->n_left > 0) {
#pragma unroll
        for (int c = 0; c < STAGE_COPIES(TILES); c++) {
            const int rest = STAGE_UNITS * pieces - c * X3_WARP, pair = (c * X3_WARP + lane) / (2 * pieces);
            if ((rest >= X3_WARP || lane < rest) && (STAGE_PAIRS == 1 || pair < f->n_left))
                copy_async_16(to + c * X3_WARP * 4, f->from + piece_offset<TILES>(c, lane, f->unit_bytes));
        }
        f->from += 2 * N_CHAINS * STAGE_PAIRS * f->unit_bytes;
        f->n_left -= STAGE_PAIRS;
        if (f->n_left <= 0)
            feed_settle<TILES, WARPS>(f, a, b, chain, lane);
    }
    copy_async_commit();
}

/* Waits for the next stage of a ring of n_stages. */
static __device__ __forceinline__ void feed_wait(int n_stages)
{
    if (n_stages == 4)
        copy_async_wait<2>();
    else if (n_stages == 3)
        copy_async_wait<1>();
    else
        copy_async_wait<0>();
    __syncwarp();
}

/* ---- inputs ------------------------------------------------------------------------------------------------------ */

/* Folded: the rotated inputs of the block's pairs, [pair - first][row][unit][q][2] words in the order of operands, behind as many
 * zeros as a row of a pair takes, for lanes without a row. */
#define ROTATED_AT_ONCE 2 /* 128-blocks that a warp has on the way together */

typedef struct rotation {
    uint2 scales[ROTATED_AT_ONCE]; /* weights, which may be read before the kernel before this one is done */
    float v[ROTATED_AT_ONCE][4];   /* inputs of one row */
} rotation;

/* First and last 128-block of a segment, in its stripe. */
static __device__ __forceinline__ int2 blocks_of(const linear_args &a, segment s)
{
    const int base = s.stripe * a.n_pairs_in;

    return make_int2((s.begin - base) / 4, (s.end - base + 3) / 4);
}

static __device__ __forceinline__ void load_rotation_scales(rotation *r, const linear_args &a, int p, int block, int end, int n_warps, int lane)
{
#pragma unroll
    for (int i = 0; i < ROTATED_AT_ONCE; i++)
        r->scales[i] = load_scales(a, p, min(block + i * n_warps, end - 1), lane);
}

static __device__ __forceinline__ void load_rotation_inputs(rotation *r, const linear_args &a, int row, int block, int end, int n_warps, int lane)
{
#pragma unroll
    for (int i = 0; i < ROTATED_AT_ONCE; i++)
        load_inputs(a, row, min(block + i * n_warps, end - 1), lane, r->v[i]);
}

/* rotate_loaded with half its exchanges between lanes, the same additions: in every step two lanes swap the one half of their numbers
 * that the other one needs. Numbers 2 i + h of lane l are then input 2 i + (l & 1) + 4 (l >> 1) + 64 h of the 128. */
static __device__ __forceinline__ void rotate_swapping(float v[4], uint2 scale, int lane)
{
    scale_by(v, scale);
    hadamard_4(v);
#pragma unroll
    for (int stride = 1; stride < X3_WARP; stride *= 2)
#pragma unroll
        for (int e = 0; e < 4; e += 2) {
            const bool upper = lane & stride;
            const float kept = upper ? v[e + 1] : v[e], given = __shfl_xor_sync(X3_ALL_LANES, upper ? v[e] : v[e + 1], stride);
            v[e] = kept + given;
            v[e + 1] = upper ? given - kept : kept - given;
        }
#pragma unroll
    for (int e = 0; e < 4; e++)
        v[e] *= 0.08838834764831845f;
}

/* v: of rotate_swapping. Words lie as operand_word says. */
static __device__ __forceinline__ void store_folded(uint32_t *inputs, const linear_args &a, segment s, int first, int row, int block,
                                                    const float v[4], int lane)
{
    const int pair = s.stripe * a.n_pairs_in + block * 4 + (lane >> 4);
    uint32_t *to = inputs + ((pair - first) * a.n_rows + row) * LINEAR_PAIR_WORDS + (lane >> 3 & 1) * 8 + 4 * (lane & 1) + (lane & 2) +
                   (lane >> 2 & 1);

#pragma unroll
    for (int h = 0; h < 2; h++)
        if (pair + 2 * h >= s.begin && pair + 2 * h < s.end)
            to[2 * h * a.n_rows * LINEAR_PAIR_WORDS] = half2_bits(__floats2half2_rn(v[h], v[2 + h]));
}

/* r: scales and row 0 of the warp's first blocks of segment s. */
static __device__ __forceinline__ void rotate_for_block(const linear_args &a, uint32_t *inputs, rotation r, segment s, block_pairs b, int warp,
                                                        int n_warps, int lane)
{
    if (threadIdx.x < LINEAR_PAIR_WORDS)
        inputs[threadIdx.x] = 0;
    inputs += LINEAR_PAIR_WORDS;
    for (bool loaded = true;; s = segment_next(a, s, b), loaded = false) {
        const int p = part_of(a, s.stripe);
        const int2 blocks = blocks_of(a, s);
        for (int block = blocks.x + warp; block < blocks.y; block += ROTATED_AT_ONCE * n_warps, loaded = false) {
            if (!loaded)
                load_rotation_scales(&r, a, p, block, blocks.y, n_warps, lane);
            for (int row = 0; row < a.n_rows; row++) {
                if (!loaded || row > 0)
                    load_rotation_inputs(&r, a, row, block, blocks.y, n_warps, lane);
#pragma unroll
                for (int i = 0; i < ROTATED_AT_ONCE; i++) {
                    rotate_swapping(r.v[i], r.scales[i], lane);
                    if (block + i * n_warps < blocks.y)
                        store_folded(inputs, a, s, b.first, row, block + i * n_warps, r.v[i], lane);
                }
            }
        }
        if (after_segment(s, b) == b.rest)
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

/* A warp's sums of 8 rows, of which n count, to shared memory. to: the lane's first row and column. */
template <int TILES> static __device__ __forceinline__ void store_sums(float *to, int ld, const float acc[TILES][4], int row, int n)
{
#pragma unroll
    for (int t = 0; t < TILES; t++)
#pragma unroll
        for (int i = 0; i < 4; i++)
            if (row + (i & 1) < n)
                to[(i & 1) * ld + t * X3_TILE + 8 * (i >> 1)] = acc[t][i];
}

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
        store_sums<TILES>(to, ld, acc[group], row, n);
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

/* Folded: a segment's sums go to the block that has the last segment of the stripe, each with a mark beside it in one store of 8 bytes, so
 * that the other one need not wait for a fence and a counter. It waits for blocks before it alone, which are started before it. */
static __device__ __forceinline__ void send_sum(uint64_t *slot, float sum)
{
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(slot), "l"((uint64_t)1 << 32 | __float_as_uint(sum)) : "memory");
}

static __device__ __forceinline__ float receive_sum(uint64_t *slot)
{
    uint64_t word;

    do {
        asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(word) : "l"(slot) : "memory");
    } while (word >> 32 == 0);
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(slot), "l"((uint64_t)0) : "memory");
    return __uint_as_float((uint32_t)word);
}

/* Folded: adds the chains of segment s; its sums are sent on, or y is finished. */
template <int TILES, int WARPS>
static __device__ __forceinline__ void hand_over(const linear_args &a, const float (*acc)[4], float *sums, segment s, int chain, int warp,
                                                 int lane)
{
    constexpr int ld = STRIPE_COLS + LINEAR_SUMS_PAD, row_slots = FOLD_ROWS * STRIPE_COLS;
    static_assert(WARPS / N_CHAINS * TILES == STRIPE_TILES, "a stripe in one pass");
    const int row = 2 * (lane & 3), column = warp / N_CHAINS * TILES * X3_TILE + (lane >> 2), n = a.n_rows;
    const bool is_last = s.end == (s.stripe + 1) * a.n_pairs_in;
    const int block = (int)blockIdx.x, from = is_last ? block_of(a, s.stripe * a.n_pairs_in) : block;
    float *to = sums + (chain * n + row) * ld + column;

    __syncthreads(); /* the previous sums are read */
    store_sums<TILES>(to, ld, acc, row, n);
    __syncthreads();
    for (int i = threadIdx.x; i < n * STRIPE_COLS; i += WARPS * X3_WARP) {
        float *mine = sums + i / STRIPE_COLS * ld + i % STRIPE_COLS;
        float sum = mine[0];
#pragma unroll
        for (int k = 1; k < N_CHAINS; k++)
            sum += mine[k * n * ld];
        if (!is_last) {
            send_sum(a.slots + (size_t)block * row_slots + i, sum);
        } else if (from < block) {
            float before = receive_sum(a.slots + (size_t)from * row_slots + i);
            for (int b = from + 1; b < block; b++)
                before += receive_sum(a.slots + (size_t)b * row_slots + i);
            sum = before + sum;
        }
        mine[0] = sum;
    }
    if (!is_last)
        return;
    __syncthreads();
    for (int r = warp; r < n; r += WARPS) {
        const float4 f = *(const float4 *)(sums + r * ld + 4 * lane);
        float v[4] = {f.x, f.y, f.z, f.w};
        finish_row(a, s.stripe, r, v, lane);
    }
}

/* Brings the scales of a block's first and last stripe near: what finishes a stripe needs them at once. */
static __device__ __forceinline__ void prefetch_scales(const linear_args &a, block_pairs b, int lane)
{
    const int stripe = stripe_of(a, lane < 16 ? b.first : b.last - 1);
    const int p = part_of(a, stripe);

    if (threadIdx.x < X3_WARP && lane % 16 < 2)
        asm volatile("prefetch.global.L2 [%0];" ::"l"(a.parts[p].svh + (size_t)(stripe - a.first_stripe[p]) * STRIPE_COLS + lane % 16 * 64));
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

/* The weights of a pair. */
template <int CODEBOOK, int TILES>
static __device__ __forceinline__ void decode_pair_tiles(uint32_t w[TILES][2][4], const uint32_t *tiles, lane_bits bits, ones o)
{
#pragma unroll
    for (int u = 0; u < 2; u++)
#pragma unroll
        for (int t = 0; t < TILES; t++)
            decode_tile<X3_K, CODEBOOK>(tiles + (u * TILES + t) * TILE_WORDS, bits, o, w[t][u]);
}

#define EARLY_STAGES 1 /* on their way before the inputs: as much as is needed first */

/* What a lane reads with does not change: it is computed once, not every time round a loop. */
static __device__ __forceinline__ void keep_in_registers(lane_bits *bits, ones *o)
{
    bits->word = (int)opaque((uint32_t)bits->word);
    bits->before = (int)opaque((uint32_t)bits->before);
    bits->before2 = X3_K >= 5 ? (int)opaque((uint32_t)bits->before2) : 0;
    bits->shift = X3_K % 4 != 0 ? opaque(bits->shift) : 0;
    o->b[0] = opaque(o->b[0]);
    o->b[1] = opaque(o->b[1]);
}

/* Up to FOLD_ROWS rows. Warp w takes chain w % 8 and column part w / 8, of TILES tiles. */
template <int CODEBOOK, int TILES, int WARPS>
static __global__ void __launch_bounds__(WARPS *X3_WARP, 1) linear_folded(const __grid_constant__ linear_args a)
{
    constexpr int stage_words = STAGE_UNITS * TILES * TILE_WORDS;
    extern __shared__ __align__(16) uint32_t shared[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(X3_ALL_LANES, threadIdx.x >> 5, 0), chain = warp % N_CHAINS;
    const block_pairs b = block_pairs_of(a, (int)blockIdx.x);
    const int n_stages = a.n_stages, ring_end = n_stages * stage_words;
    lane_bits bits = lane_bits_of<X3_K>(lane);
    ones o = ones_of<CODEBOOK>(lane, a.multiplier, a.addend);
    uint32_t *ring = shared + warp * ring_end;
    float *sums = (float *)(shared + WARPS * ring_end);
    uint32_t *inputs = (uint32_t *)(sums + N_CHAINS * a.n_rows * (STRIPE_COLS + LINEAR_SUMS_PAD));

    keep_in_registers(&bits, &o);
    release_next_kernel();
    segment s = segment_first(a, b);
    rotation r;
    const int2 blocks = blocks_of(a, s);
    const int block = min(blocks.x + warp, blocks.y - 1);
    load_rotation_scales(&r, a, part_of(a, s.stripe), block, blocks.y, WARPS, lane);
    feed<TILES, WARPS> f;
    f.s = s;
    f.columns = warp / N_CHAINS;
    feed_point<TILES, WARPS>(&f, a, chain, lane);
    feed_settle<TILES, WARPS>(&f, a, b, chain, lane);
    for (int i = 0; i < EARLY_STAGES; i++)
        feed_stage<TILES, WARPS>(&f, a, ring + i * stage_words + lane * 4, b, chain, lane);
    prefetch_scales(a, b, lane);
    wait_for_previous_kernel();
    load_rotation_inputs(&r, a, 0, block, blocks.y, WARPS, lane); /* ahead of most stages in the queues of memory */
    for (int i = EARLY_STAGES; i < n_stages - 1; i++)
        feed_stage<TILES, WARPS>(&f, a, ring + i * stage_words + lane * 4, b, chain, lane);
    rotate_for_block(a, inputs, r, s, b, warp, WARPS, lane);

    int now = 0, before = ring_end - stage_words; /* the stage that is used, and the one used before it, in words */
    for (;; s = segment_next(a, s, b)) {
        const bool has_row = lane >> 2 < a.n_rows;
        float acc[TILES][4] = {};
        const uint32_t *folded = inputs + 2 * (lane & 3) +
                                 (has_row ? (1 + (s.begin + chain - b.first) * a.n_rows + (lane >> 2)) * LINEAR_PAIR_WORDS : 0);
        const int folded_step = has_row ? N_CHAINS * a.n_rows * LINEAR_PAIR_WORDS : 0;
        auto multiply_pair_of_stage = [&](int p) {
            const uint2 in[2] = {*(const uint2 *)folded, *(const uint2 *)(folded + 8)};
            const uint32_t in0[2] = {in[0].x, in[0].y}, in1[2] = {in[1].x, in[1].y};
            uint32_t w[TILES][2][4];
            folded += folded_step;
            decode_pair_tiles<CODEBOOK, TILES>(w, ring + now + p * 2 * TILES * TILE_WORDS, bits, o);
            multiply_pair<TILES>(acc, w, in0, in1);
        };
        for (int n_left = chain_pairs(s, chain); n_left > 0; n_left -= STAGE_PAIRS) {
            feed_wait(n_stages);
            feed_stage<TILES, WARPS>(&f, a, ring + before + lane * 4, b, chain, lane);
            if (n_left >= STAGE_PAIRS) {
#pragma unroll
                for (int p = 0; p < STAGE_PAIRS; p++)
                    multiply_pair_of_stage(p);
            } else {
                multiply_pair_of_stage(0);
            }
            before = now;
            now = now + stage_words == ring_end ? 0 : now + stage_words;
        }
        hand_over<TILES, WARPS>(a, acc, sums, s, chain, warp, lane);
        if (after_segment(s, b) == b.rest)
            break;
    }
}

/* More rows: a thread keeps GROUPS groups of 8. Warp w takes chain w % 8 and column parts w / 8, w / 8 + WARPS / 8, .. of TILES tiles
 * each. */
template <int CODEBOOK, int GROUPS, int TILES, int WARPS>
static __global__ void __launch_bounds__(WARPS *X3_WARP, 1) linear(const __grid_constant__ linear_args a)
{
    constexpr int stage_words = STAGE_UNITS * TILES * TILE_WORDS, passes = STRIPE_TILES / TILES * N_CHAINS / WARPS;
    extern __shared__ __align__(16) uint32_t shared[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(X3_ALL_LANES, threadIdx.x >> 5, 0), chain = warp % N_CHAINS;
    const block_pairs b = block_pairs_of(a, (int)blockIdx.x);
    const int first_row = blockIdx.y * GROUPS * 8, n_rows = min(a.n_rows - first_row, GROUPS * 8), places = linear_row_places(a);
    const size_t slot_floats = (size_t)a.n_rows * STRIPE_COLS, block_step = (size_t)a.n_pairs_in * 2 * X3_WARP;
    lane_bits bits = lane_bits_of<X3_K>(lane);
    ones o = ones_of<CODEBOOK>(lane, a.multiplier, a.addend);
    uint32_t *ring = shared + (size_t)warp * a.n_stages * stage_words;
    float *sums = (float *)(shared + (size_t)WARPS * a.n_stages * stage_words);

    keep_in_registers(&bits, &o);
    release_next_kernel();
    segment s = segment_first(a, b);
    feed<TILES, WARPS> f;
    f.s = s;
    f.columns = warp / N_CHAINS;
    feed_point<TILES, WARPS>(&f, a, chain, lane);
    feed_settle<TILES, WARPS>(&f, a, b, chain, lane);
    for (int i = 0; i < a.n_stages - 1; i++)
        feed_stage<TILES, WARPS>(&f, a, ring + i * stage_words + lane * 4, b, chain, lane);
    wait_for_previous_kernel();

    int now = 0;
    for (;; s = segment_next(a, s, b)) {
        float *partial = a.partial + (blockIdx.x + s.stripe) * slot_floats + (size_t)first_row * STRIPE_COLS;
        const int pair = s.begin + chain - s.stripe * a.n_pairs_in, part = part_of(a, s.stripe);
        for (int pass = 0; pass < passes; pass++) {
            float acc[GROUPS][TILES][4] = {};
            const uint4 *operands = a.fragments + (part * (places / 16) + blockIdx.y * (GROUPS / 2)) * block_step + pair * 2 * X3_WARP + lane;
            for (int n_left = chain_pairs(s, chain); n_left > 0; n_left -= STAGE_PAIRS) {
                feed_wait(a.n_stages);
                const uint32_t *stage = ring + now * stage_words;
                feed_stage<TILES, WARPS>(&f, a, ring + (now == 0 ? a.n_stages - 1 : now - 1) * stage_words + lane * 4, b, chain, lane);
#pragma unroll 1
                for (int p = 0; p < STAGE_PAIRS; p++) {
                    if (p >= n_left)
                        break;
                    uint32_t in[2][GROUPS][2], w[TILES][2][4];
                    operands_load<GROUPS>(operands, block_step, in);
                    operands += 2 * N_CHAINS * X3_WARP;
                    decode_pair_tiles<CODEBOOK, TILES>(w, stage + p * 2 * TILES * TILE_WORDS, bits, o);
#pragma unroll
                    for (int g = 0; g < GROUPS; g++)
                        multiply_pair<TILES>(acc[g], w, in[0][g], in[1][g]);
                }
                now = now + 1 == a.n_stages ? 0 : now + 1;
            }
            add_chains<GROUPS, TILES, WARPS>(acc, sums, partial, n_rows, chain, warp / N_CHAINS, pass, lane);
        }
        int from, to;
        if (last_to_arrive(a, a.counters + blockIdx.y * a.n_stripes + s.stripe, s.stripe, &from, &to))
            finish_stripe(a, a.partial + (from + s.stripe) * slot_floats + (size_t)first_row * STRIPE_COLS, to - from + 1,
                          slot_floats, s.stripe, first_row, n_rows, warp, WARPS, lane);
        if (after_segment(s, b) == b.rest)
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

#define SHAPE(s) (const void *)linear<CODEBOOK, LINEAR_GROUPS(s), LINEAR_TILES(s), LINEAR_WARPS(s)>
    k->linear[d][LINEAR_FOLDED] = (const void *)linear_folded<CODEBOOK, LINEAR_TILES(LINEAR_FOLDED), LINEAR_WARPS(LINEAR_FOLDED)>;
    k->linear[d][LINEAR_16] = SHAPE(LINEAR_16);
    k->linear[d][LINEAR_32] = SHAPE(LINEAR_32);
    k->linear[d][LINEAR_64] = SHAPE(LINEAR_64);
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
