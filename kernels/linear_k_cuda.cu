/* EXL3 linear and reconstruction for one K: compile with -DX3_K=1 .. 8. linear_cuda.cuh says how the work is cut.
 *
 * What limits it: at one row, instructions. Decoding costs about 40 to 45 issue slots for the 8 weights of a lane
 * (shifts and permutations 11 to 15, multiplies 8, byte sums 8, packing 4, float16 fma 4, tensor core 2), while
 * memory would allow twice the pace at K <= 4. Hence no work twice, no synchronization inside a chain, and every
 * address a constant offset. */
#include "kernels/linear_cuda.cuh"

#ifndef X3_K
#error "compile with -DX3_K=1 .. 8"
#endif

#define TILE_WORDS (8 * X3_K)
#define UNIT_WORDS (HALF_TILES * TILE_WORDS)
#define STAGE_UNITS STAGE_UNITS_OF(X3_K)
#define STAGE_WORDS (STAGE_UNITS * UNIT_WORDS)

/* ---- walking over a block's units ------------------------------------------------------------------------------ */

/* Units [begin, end), all in one stripe. */
typedef struct segment {
    int begin, end, stripe;
} segment;

static __device__ __forceinline__ segment segment_first(int first, int last, int n_units_in)
{
    segment s;

    s.stripe = first / n_units_in;
    s.begin = first;
    s.end = min(last, (s.stripe + 1) * n_units_in);
    return s;
}

/* The one after s in a block whose units end at `last`; s.end < last. */
static __device__ __forceinline__ segment segment_next(segment s, int last, int n_units_in)
{
    s.stripe++;
    s.begin = s.end;
    s.end = min(last, s.end + n_units_in);
    return s;
}

/* Units of a chain in a segment. */
static __device__ __forceinline__ int chain_units(segment s, int chain)
{
    return (s.end - s.begin - chain + N_CHAINS - 1) / N_CHAINS; /* may be 0: then (negative + 7) / 8 rounds to it */
}

/* What a warp copies into its ring: the units of its chain, for one half of the columns or for both in turn, segment by
 * segment. A copy instruction moves 16 bytes a lane; at K = 1 and 2 that is 4 and 2 units at once. */
typedef struct feed {
    const uint32_t *from; /* this lane's bytes of the next unit */
    int n_left;           /* units before this half of this segment ends; none at the very end */
    segment s;
    int half;
} feed;

#define COPY_UNITS (X3_K <= 2 ? 4 / X3_K : 1)
#define UNIT_PIECES (UNIT_WORDS / 4)

static __device__ __forceinline__ void feed_point(feed *f, const linear_args &a, int chain, int lane)
{
    const int lane_unit = COPY_UNITS > 1 ? lane / UNIT_PIECES : 0, piece = lane - lane_unit * UNIT_PIECES;
    const int unit = f->s.begin - f->s.stripe * a.n_units_in + chain + N_CHAINS * lane_unit;

    f->n_left = chain_units(f->s, chain);
    f->from = a.words + ((size_t)unit * a.n_stripes * STRIPE_TILES + f->s.stripe * STRIPE_TILES + f->half * HALF_TILES) *
                            TILE_WORDS + piece * 4;
}

/* Goes on to where there is something left. HALVES: of the columns that the warp takes. */
template <int HALVES> static __device__ __forceinline__ void feed_settle(feed *f, const linear_args &a, int last, int chain,
                                                                         int lane)
{
    while (f->n_left <= 0 && (f->s.end < last || (HALVES == 2 && f->half == 0))) {
        if (HALVES == 2)
            f->half ^= 1;
        if (HALVES == 1 || f->half == 0)
            f->s = segment_next(f->s, last, a.n_units_in);
        feed_point(f, a, chain, lane);
    }
}

/* Starts copying the next stage, as one group. `chain_step`: words from a unit of the chain to the next one. */
template <int HALVES> static __device__ __forceinline__ void feed_stage(feed *f, const linear_args &a, uint32_t *stage,
                                                                        size_t chain_step, int last, int chain, int lane)
{
    const int lane_unit = COPY_UNITS > 1 ? lane / UNIT_PIECES : 0;

    if (f->n_left > 0) {
        const uint32_t *from = f->from;
#pragma unroll
        for (int u = 0; u < STAGE_UNITS; u += COPY_UNITS, from += COPY_UNITS * chain_step)
#pragma unroll
            for (int p = 0; p < UNIT_PIECES * COPY_UNITS; p += X3_WARP)
                if (u + lane_unit < f->n_left &&
                    (UNIT_PIECES * COPY_UNITS - p >= X3_WARP || lane < UNIT_PIECES * COPY_UNITS - p))
                    copy_async_16(stage + u * UNIT_WORDS + (p + lane) * 4, from + p * 4);
        f->from = from;
        f->n_left -= STAGE_UNITS;
        if (f->n_left <= 0)
            feed_settle<HALVES>(f, a, last, chain, lane);
    }
    copy_async_commit();
}

/* ---- inputs ------------------------------------------------------------------------------------------------------ */

/* Rotated inputs 4 * lane .. of 128, as two half2: lane l holds inputs 4 (l % 4) .. of unit l / 4. In the A operand,
 * inputs 2q, 2q + 1 and 2q + 8, 2q + 9 of a unit belong to the same thread, so they are kept side by side. */
static __device__ __forceinline__ uint2 rotate_inputs(const linear_args &a, int row, int block, int lane)
{
    const size_t i = (size_t)block * X3_HADAMARD + 4 * lane;
    float v[4];

    load_4(v, a.x, a.x_type, (size_t)row * a.ldx, i, (size_t)a.n_in, a.x_whole);
    scale_4(v, a.suh, i);
    hadamard_128(v, lane);
    return make_uint2(half2_bits(__floats2half2_rn(v[0], v[1])), half2_bits(__floats2half2_rn(v[2], v[3])));
}

/* Folded: the inputs of the block's units, [unit - first][row][q][2] words. */
static __device__ __forceinline__ void rotate_for_block(const linear_args &a, uint32_t *inputs, int first, int last,
                                                        int warp, int n_warps, int lane)
{
    const int q = 2 * (lane & 1), high = (lane >> 1) & 1;

    for (segment s = segment_first(first, last, a.n_units_in);; s = segment_next(s, last, a.n_units_in)) {
        const int base = s.stripe * a.n_units_in;
        const int block0 = (s.begin - base) / 8, n_blocks = (s.end - base + 7) / 8 - block0;
        for (int item = warp; item < n_blocks * a.n_rows; item += n_warps) {
            const int block = block0 + item / a.n_rows, row = item % a.n_rows;
            const int unit = base + block * 8 + (lane >> 2);
            const uint2 h = rotate_inputs(a, row, block, lane);
            if (unit >= s.begin && unit < s.end) {
                uint32_t *to = inputs + ((unit - first) * a.n_rows + row) * 8 + high;
                to[2 * q] = h.x;
                to[2 * q + 2] = h.y;
            }
        }
        if (s.end == last)
            break;
    }
    __syncthreads();
}

/* A operands of one unit: folded, rows 0 .. 7 at most, at `from` in shared memory; else n blocks of 16 rows at `from`, in
 * global memory, `block_step` apart. */
template <int BLOCKS, bool FOLDED>
static __device__ __forceinline__ void inputs_load(const void *from, size_t block_step, bool has_row, uint32_t out[BLOCKS][4])
{
    if (FOLDED) {
        uint2 h = make_uint2(0, 0);
        if (has_row)
            h = *(const uint2 *)from;
        out[0][0] = h.x;
        out[0][1] = 0;
        out[0][2] = h.y;
        out[0][3] = 0;
        return;
    }
#pragma unroll
    for (int b = 0; b < BLOCKS; b++) {
        uint4 f = ((const uint4 *)from)[b * block_step];
        out[b][0] = f.x;
        out[b][1] = f.y;
        out[b][2] = f.z;
        out[b][3] = f.w;
    }
}

/* ---- sums ---------------------------------------------------------------------------------------------------------- */

/* Adds the chains of a segment and writes rows [0, n_rows) of its columns to `partial` [row][128]. */
template <int BLOCKS, int HALVES>
static __device__ __forceinline__ void add_chains(float (*acc)[HALF_TILES][2][4], float *sums, float *partial, int n_rows,
                                                  int chain, int half, int lane)
{
    constexpr int cols = HALVES == 2 ? STRIPE_COLS / 2 : STRIPE_COLS, ld = cols + 8;
    const int column0 = HALVES == 2 ? 0 : half * (STRIPE_COLS / 2);

#pragma unroll
    for (int part = 0; part < 2 * BLOCKS; part++) { /* 8 rows: they lie in registers 0, 1 or 2, 3 of a block */
        const int n = min(8, n_rows - 8 * part), row = lane >> 2;
        if (n <= 0)
            break;
        float *to = sums + (chain * n + row) * ld + column0 + 2 * (lane & 3);
        __syncthreads(); /* the previous sums are read */
        if (row < n)
#pragma unroll
            for (int t = 0; t < HALF_TILES; t++)
#pragma unroll
                for (int side = 0; side < 2; side++) {
                    const float *c = acc[part / 2][t][side] + 2 * (part & 1);
                    *(float2 *)(to + t * X3_TILE + side * 8) = make_float2(c[0], c[1]);
                }
        __syncthreads();
        for (int i = threadIdx.x; i < n * cols; i += blockDim.x) {
            const int r = i / cols, column = i % cols;
            float sum = sums[r * ld + column];
#pragma unroll
            for (int k = 1; k < N_CHAINS; k++)
                sum += sums[(k * n + r) * ld + column];
            __stcg(partial + (8 * part + r) * STRIPE_COLS + (HALVES == 2 ? half * cols : 0) + column, sum);
        }
    }
}

/* y of one stripe from the partial sums of its n_slots segments. A warp a row. */
static __device__ __forceinline__ void finish_stripe(const linear_args &a, const float *partial, int n_slots,
                                                     size_t slot_floats, int stripe, int first_row, int n_rows, int warp,
                                                     int n_warps, int lane)
{
    const size_t i = (size_t)stripe * STRIPE_COLS + 4 * lane;

    for (int row = warp; row < n_rows; row += n_warps) {
        const float4 *from = (const float4 *)(partial + row * STRIPE_COLS) + lane;
        float4 f = __ldcg(from);
        float v[4] = {f.x, f.y, f.z, f.w};
        for (int s = 1; s < n_slots; s++) {
            f = __ldcg(from + s * slot_floats / 4);
            v[0] += f.x, v[1] += f.y, v[2] += f.z, v[3] += f.w;
        }
        hadamard_128(v, lane);
        scale_4(v, a.svh, i);
        if (a.bias != NULL)
            for (int e = 0; e < 4; e++)
                v[e] += i + e < (size_t)a.n_out ? a.bias[i + e] : 0.0f;
        store_4(v, a.y, a.y_type, (size_t)(first_row + row) * a.ldy, i, (size_t)a.n_out, a.y_whole);
    }
}

/* True in all threads of the block that is the last of n to arrive; that one leaves the counter at zero. */
static __device__ __forceinline__ bool last_to_arrive(int *counter, int n)
{
    __shared__ int is_last;

    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(counter, 1) == n - 1;
        if (is_last)
            *counter = 0;
        __threadfence();
    }
    __syncthreads();
    return is_last;
}

/* ---- the kernel ---------------------------------------------------------------------------------------------------- */

/* acc += inputs of one unit times its four tiles at `tiles`. */
template <int CODEBOOK, int BLOCKS>
static __device__ __forceinline__ void multiply_unit(float (*acc)[HALF_TILES][2][4], const uint32_t (*in)[4],
                                                     const uint32_t *tiles, lane_bits bits)
{
#pragma unroll
    for (int t = 0; t < HALF_TILES; t++) {
        uint32_t b[4];
        decode_tile<X3_K, CODEBOOK>(tiles + t * TILE_WORDS, bits, b);
#pragma unroll
        for (int m = 0; m < BLOCKS; m++) {
            mma_16x8x16(acc[m][t][0], in[m], b[0], b[1]);
            mma_16x8x16(acc[m][t][1], in[m], b[2], b[3]);
        }
    }
}

/* Warp w: chain w % 8; with 16 warps each takes one half of the columns, with 8 each takes both, one after the other. */
template <int CODEBOOK, int BLOCKS, int WARPS, bool FOLDED>
static __global__ void __launch_bounds__(WARPS *X3_WARP, 1) linear(const __grid_constant__ linear_args a)
{
    constexpr int halves = 2 * N_CHAINS / WARPS;
    extern __shared__ __align__(16) uint32_t shared[];
    const int lane = threadIdx.x & 31, warp = __shfl_sync(X3_ALL_LANES, threadIdx.x >> 5, 0), chain = warp % N_CHAINS;
    const int n_blocks = gridDim.x, n_units = a.n_units_in * a.n_stripes;
    const int first = (int)((int64_t)blockIdx.x * n_units / n_blocks);
    const int last = (int)((int64_t)(blockIdx.x + 1) * n_units / n_blocks);
    const int first_row = blockIdx.y * BLOCKS * 16, n_rows = min(a.n_rows - first_row, FOLDED ? 8 : BLOCKS * 16);
    const size_t chain_step = (size_t)N_CHAINS * a.n_stripes * STRIPE_TILES * TILE_WORDS;
    const size_t slot_floats = (size_t)a.n_rows * STRIPE_COLS, block_step = (size_t)a.n_units_in * X3_WARP;
    const lane_bits bits = lane_bits_of<X3_K>(lane);
    uint32_t *ring = shared + (size_t)warp * a.n_stages * STAGE_WORDS;
    float *sums = (float *)(shared + (size_t)WARPS * a.n_stages * STAGE_WORDS);
    uint32_t *inputs = (uint32_t *)(sums + N_CHAINS * n_rows * (STRIPE_COLS + 8)); /* folded alone */

    release_next_kernel();
    feed f = {};
    f.s = segment_first(first, last, a.n_units_in);
    f.half = halves == 2 ? 0 : warp / N_CHAINS;
    feed_point(&f, a, chain, lane);
    feed_settle<halves>(&f, a, last, chain, lane);
    for (int s = 0; s < a.n_stages - 1; s++)
        feed_stage<halves>(&f, a, ring + s * STAGE_WORDS, chain_step, last, chain, lane);
    wait_for_previous_kernel();
    if (FOLDED)
        rotate_for_block(a, inputs, first, last, warp, WARPS, lane);

    int now = 0;
    for (segment s = segment_first(first, last, a.n_units_in);; s = segment_next(s, last, a.n_units_in)) {
        float *partial = a.partial + (blockIdx.x + s.stripe) * slot_floats + (size_t)first_row * STRIPE_COLS;
        for (int pass = 0; pass < halves; pass++) {
            float acc[BLOCKS][HALF_TILES][2][4] = {};
            uint32_t in[BLOCKS][4];
            const bool has_row = lane >> 2 < a.n_rows;
            const size_t in_step = FOLDED ? (size_t)N_CHAINS * a.n_rows * 32 : (size_t)N_CHAINS * X3_WARP * 16;
            const char *from = FOLDED ? (const char *)(inputs + ((s.begin + chain - first) * a.n_rows + (lane >> 2)) * 8 +
                                                       2 * (lane & 3))
                                      : (const char *)(a.fragments + (size_t)blockIdx.y * BLOCKS * block_step +
                                                       (s.begin + chain - s.stripe * a.n_units_in) * X3_WARP + lane);
            for (int n_left = chain_units(s, chain); n_left > 0; n_left -= STAGE_UNITS) {
                if (a.n_stages == 4)
                    copy_async_wait<2>();
                else
                    copy_async_wait<0>();
                __syncwarp();
                const uint32_t *stage = ring + now * STAGE_WORDS;
                feed_stage<halves>(&f, a, ring + (now == 0 ? a.n_stages - 1 : now - 1) * STAGE_WORDS, chain_step, last,
                                   chain, lane);
#pragma unroll
                for (int u = 0; u < STAGE_UNITS; u++) {
                    if (u >= n_left)
                        break;
                    inputs_load<BLOCKS, FOLDED>(from, block_step, has_row, in);
                    from += in_step;
                    multiply_unit<CODEBOOK, BLOCKS>(acc, in, stage + u * UNIT_WORDS, bits);
                }
                now = now + 1 == a.n_stages ? 0 : now + 1;
            }
            add_chains<BLOCKS, halves>(acc, sums, partial, n_rows, chain, halves == 2 ? pass : warp / N_CHAINS, lane);
        }
        const int base = s.stripe * a.n_units_in; /* blocks that hold the first and the last unit of this stripe */
        const int from = (int)((((int64_t)base + 1) * n_blocks - 1) / n_units);
        const int to = (int)((((int64_t)base + a.n_units_in) * n_blocks - 1) / n_units);
        if (last_to_arrive(a.counters + blockIdx.y * a.n_stripes + s.stripe, to - from + 1))
            finish_stripe(a, a.partial + (from + s.stripe) * slot_floats + (size_t)first_row * STRIPE_COLS, to - from + 1,
                          slot_floats, s.stripe, first_row, n_rows, warp, WARPS, lane);
        if (s.end == last)
            break;
    }
}

/* ---- reconstruction -------------------------------------------------------------------------------------------------- */

#define RECONSTRUCT_WARPS 8
#define RECONSTRUCT_LD (STRIPE_COLS + 8) /* float16 a row: 16 bytes of padding keep the banks apart */

/* A warp writes 16 x 128 numbers of out [n_units * 16][n_stripes * 128]. An 8x8 block comes out of the decoder with
 * its columns across the lanes; movmatrix turns it so that rows can be written. */
template <int CODEBOOK, typename OUT>
static __global__ void __launch_bounds__(RECONSTRUCT_WARPS *X3_WARP)
    reconstruct(const uint32_t *words, OUT *out, int n_units, int n_stripes)
{
    __shared__ __align__(16) __half rows[RECONSTRUCT_WARPS][X3_TILE * RECONSTRUCT_LD];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const lane_bits bits = lane_bits_of<X3_K>(lane);
    const int64_t n_pieces = (int64_t)n_units * n_stripes, step = (int64_t)gridDim.x * RECONSTRUCT_WARPS;
    const size_t n_out = (size_t)n_stripes * STRIPE_COLS;

    for (int64_t piece = (int64_t)blockIdx.x * RECONSTRUCT_WARPS + warp; piece < n_pieces; piece += step) {
        const uint32_t *tiles = words + piece * STRIPE_TILES * TILE_WORDS;
#pragma unroll
        for (int t = 0; t < STRIPE_TILES; t++) {
            uint32_t b[4];
            decode_tile<X3_K, CODEBOOK>(tiles + t * TILE_WORDS, bits, b);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                uint32_t turned;
                asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(turned) : "r"(b[i]));
                *(uint32_t *)(rows[warp] + ((lane >> 2) + 8 * (i & 1)) * RECONSTRUCT_LD + t * X3_TILE + 8 * (i >> 1) +
                              2 * (lane & 3)) = turned;
            }
        }
        __syncwarp();
        OUT *to = out + (piece / n_stripes) * X3_TILE * n_out + (piece % n_stripes) * STRIPE_COLS;
#pragma unroll
        for (int i = 0; i < 8; i++) { /* two rows at a time, 8 numbers a lane */
            const int row = 2 * i + (lane >> 4), column = 8 * (lane & 15);
            uint4 h = *(const uint4 *)(rows[warp] + row * RECONSTRUCT_LD + column);
            if (sizeof(OUT) == 2) {
                *(uint4 *)(to + row * n_out + column) = h;
            } else {
                float2 p = __half22float2(bits_half2(h.x)), q = __half22float2(bits_half2(h.y));
                float2 r = __half22float2(bits_half2(h.z)), s = __half22float2(bits_half2(h.w));
                float4 *f = (float4 *)(to + row * n_out + column);
                f[0] = make_float4(p.x, p.y, q.x, q.y);
                f[1] = make_float4(r.x, r.y, s.x, s.y);
            }
        }
        __syncwarp();
    }
}

/* ---- the table of this K --------------------------------------------------------------------------------------------- */

template <int CODEBOOK> static void fill(linear_kernels *k)
{
    k->linear[CODEBOOK][LINEAR_FOLDED] = (const void *)linear<CODEBOOK, 1, 16, true>;
    k->linear[CODEBOOK][LINEAR_16] = (const void *)linear<CODEBOOK, 1, 16, false>;
    k->linear[CODEBOOK][LINEAR_32] = (const void *)linear<CODEBOOK, 2, 16, false>;
    k->linear[CODEBOOK][LINEAR_64] = (const void *)linear<CODEBOOK, 4, 8, false>;
    k->reconstruct[CODEBOOK][X3_CUDA_F32] = (const void *)reconstruct<CODEBOOK, float>;
    k->reconstruct[CODEBOOK][X3_CUDA_F16] = (const void *)reconstruct<CODEBOOK, __half>;
}

#define NAME_OF(k) x3_linear_kernels_k##k
#define NAME(k) NAME_OF(k)

void NAME(X3_K)(linear_kernels *out)
{
    fill<X3_CB_3INST>(out);
    fill<X3_CB_MCG>(out);
    fill<X3_CB_MUL1>(out);
}
