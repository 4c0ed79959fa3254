/* The EXL3 linear for many rows with the bits of x3_cuda_linear: the same products of pairs, added in the order that
 * linear_cuda.cuh states. Codes and rotated rows are written out as operands first; then it is an ordinary product whose
 * depth goes segment by segment and chain by chain, with a sum for each level.
 *
 * What limits it: tensor cores and shared memory, about equally: a warp loads 6 operands of 512 bytes for 16 products. */
#include "kernels/linear_rows_cuda.cuh"

#define WARPS 8
#define THREADS (WARPS * X3_WARP)
#define BLOCK_ROWS 128
#define ROW_GROUPS (BLOCK_ROWS / 16) /* of 16 rows */
#define STAGE_PAIRS 2
#define STAGES 4
#define UNIT_QUADS ((STRIPE_TILES + ROW_GROUPS) * X3_WARP) /* uint4 of a unit in a stage: weights, then rows */
#define PAIR_QUADS (2 * UNIT_QUADS)
#define SUMS_LD (STRIPE_COLS + 4)

/* A place in the order of pairs of a stripe: segment, chain, pair of the chain. Pairs are counted from the stripe's first. */
typedef struct place {
    int pair, chain;
    int begin, end; /* of the segment */
    int block;      /* of x3_cuda_linear whose segment this is */
} place;

static __device__ __forceinline__ void enter_segment(place *p, const linear_args &a, int base)
{
    p->begin = max(0, first_pair(a, p->block) - base);
    p->end = min(a.n_pairs_in, first_pair(a, p->block + 1) - base);
    p->chain = 0;
    p->pair = p->begin;
}

/* What ends with the pair just passed. */
typedef enum ended { ENDED_NOTHING, ENDED_CHAIN, ENDED_SEGMENT } ended;

static __device__ __forceinline__ ended go_on(place *p, const linear_args &a, int base)
{
    p->pair += N_CHAINS;
    if (p->pair < p->end)
        return ENDED_NOTHING;
    p->chain++;
    p->pair = p->begin + p->chain;
    if (p->chain < N_CHAINS && p->pair < p->end)
        return ENDED_CHAIN;
    p->block++;
    enter_segment(p, a, base);
    return ENDED_SEGMENT;
}

typedef struct operands {
    const uint4 *weights, *rows; /* [stripe][unit][tile][lane], [row / 16][unit][lane]; of this block's stripe and part */
    int last_group; /* of rows */
} operands;

/* Starts copying the next STAGE_PAIRS pairs. */
static __device__ __forceinline__ void fetch(uint4 *stage, const operands &from, place *p, const linear_args &a, int base, int n_left,
                                             int first_row)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

    if (n_left <= 0)
        return;
#pragma unroll
    for (int i = 0; i < STAGE_PAIRS; i++, stage += PAIR_QUADS) {
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const int unit = 2 * p->pair + u;
            copy_async_16(stage + u * UNIT_QUADS + warp * X3_WARP + lane,
                          from.weights + ((size_t)unit * STRIPE_TILES + warp) * X3_WARP + lane);
            copy_async_16(stage + u * UNIT_QUADS + (STRIPE_TILES + warp) * X3_WARP + lane,
                          from.rows + ((size_t)min(first_row / 16 + warp, from.last_group) * 2 * a.n_pairs_in + unit) * X3_WARP + lane);
        }
        go_on(p, a, base);
    }
}

/* What a warp multiplies of a unit. */
typedef struct unit_operands {
    uint4 w[2], r[4];
} unit_operands;

/* Warp w: tiles 2 (w % 4) .., groups of rows 4 (w / 4) .. */
static __device__ __forceinline__ void load(unit_operands *o, const uint4 *unit, int warp, int lane)
{
    const uint4 *weights = unit + warp % 4 * 2 * X3_WARP + lane, *rows = unit + (STRIPE_TILES + warp / 4 * 4) * X3_WARP + lane;

    o->w[0] = weights[0];
    o->w[1] = weights[X3_WARP];
#pragma unroll
    for (int g = 0; g < 4; g++)
        o->r[g] = rows[g * X3_WARP];
}

/* acc += a pair. */
static __device__ __forceinline__ void multiply(float acc[8][2][4], const unit_operands o[2])
{
    uint32_t w[2][2][4];

#pragma unroll
    for (int t = 0; t < 2; t++)
#pragma unroll
        for (int u = 0; u < 2; u++)
            w[t][u][0] = o[u].w[t].x, w[t][u][1] = o[u].w[t].y, w[t][u][2] = o[u].w[t].z, w[t][u][3] = o[u].w[t].w;
#pragma unroll
    for (int g = 0; g < 8; g++) {
        uint32_t b[2][2];
#pragma unroll
        for (int u = 0; u < 2; u++) {
            const uint4 r = o[u].r[g / 2];
            b[u][0] = g % 2 == 0 ? r.x : r.z;
            b[u][1] = g % 2 == 0 ? r.y : r.w;
        }
        multiply_pair<2>(acc[g], w, b[0], b[1]);
    }
}

/* to := from, or to += from; from is then zero. */
static __device__ __forceinline__ void add_sums(float to[8][2][4], float from[8][2][4], bool first)
{
#pragma unroll
    for (int g = 0; g < 8; g++)
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                to[g][t][i] = first ? from[g][t][i] : to[g][t][i] + from[g][t][i];
                from[g][t][i] = 0;
            }
}

/* The sums of segments so far, [row][128] in shared memory, := or += a segment's. A thread always has the same places. */
static __device__ __forceinline__ void add_segment(float *sums, const float from[8][2][4], bool first, int warp, int lane)
{
    float *to = sums + (warp / 4 * 64 + 2 * (lane & 3)) * SUMS_LD + warp % 4 * 32 + (lane >> 2);

#pragma unroll
    for (int g = 0; g < 8; g++)
#pragma unroll
        for (int t = 0; t < 2; t++)
#pragma unroll
            for (int e = 0; e < 4; e++) {
                float *at = to + (8 * g + (e & 1)) * SUMS_LD + 16 * t + 8 * (e >> 1);
                *at = first ? from[g][t][e] : *at + from[g][t][e];
            }
}

static __device__ __forceinline__ void finish(const linear_args &a, const float *sums, int stripe, int first_row, int warp, int lane)
{
    for (int row = warp; row < min(BLOCK_ROWS, a.n_rows - first_row); row += WARPS) {
        const float4 f = *(const float4 *)(sums + row * SUMS_LD + 4 * lane);
        float v[4] = {f.x, f.y, f.z, f.w};
        finish_row(a, stripe, first_row + row, v, lane);
    }
}

/* Block (x, y): 128 rows of stripe y. */
static __global__ void __launch_bounds__(THREADS, 1) many_rows(const __grid_constant__ linear_args a, const uint4 *weights)
{
    extern __shared__ __align__(16) uint4 stages[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, stripe = blockIdx.y, base = stripe * a.n_pairs_in;
    const int first_row = blockIdx.x * BLOCK_ROWS, places = linear_row_places(a), part = part_of(a, stripe);
    const operands from = {weights + (size_t)base * 2 * STRIPE_TILES * X3_WARP,
                           a.fragments + (size_t)part * (places / 16) * 2 * a.n_pairs_in * X3_WARP, places / 16 - 1};
    const int n_stages = a.n_pairs_in / STAGE_PAIRS;
    float *sums = (float *)(stages + STAGES * STAGE_PAIRS * PAIR_QUADS);
    float acc[8][2][4] = {}, chains[8][2][4];
    bool first_chain = true, first_segment = true;
    place ahead, now;

    wait_for_previous_kernel();
    ahead.block = block_of(a, base);
    enter_segment(&ahead, a, base);
    now = ahead;
    for (int i = 0; i < STAGES - 1; i++) {
        fetch(stages + i * STAGE_PAIRS * PAIR_QUADS, from, &ahead, a, base, a.n_pairs_in - i * STAGE_PAIRS, first_row);
        copy_async_commit();
    }
    for (int i = 0; i < n_stages; i++) {
        const uint4 *stage = stages + i % STAGES * STAGE_PAIRS * PAIR_QUADS;
        copy_async_wait<STAGES - 2>();
        __syncthreads(); /* everyone's copies are here, and the stage that is filled next is read */
        fetch(stages + (i + STAGES - 1) % STAGES * STAGE_PAIRS * PAIR_QUADS, from, &ahead, a, base,
              a.n_pairs_in - (i + STAGES - 1) * STAGE_PAIRS, first_row);
        copy_async_commit();
        /* pairs come in multiples of 4: all of a stage is there */
#pragma unroll
        for (int p = 0; p < STAGE_PAIRS; p++, stage += PAIR_QUADS) {
            unit_operands o[2];
            load(&o[0], stage, warp, lane);
            load(&o[1], stage + UNIT_QUADS, warp, lane);
            multiply(acc, o);
            const ended e = go_on(&now, a, base);
            if (e == ENDED_NOTHING)
                continue;
            add_sums(chains, acc, first_chain);
            first_chain = e == ENDED_SEGMENT;
            if (e == ENDED_SEGMENT) {
                add_segment(sums, chains, first_segment, warp, lane);
                first_segment = false;
            }
        }
    }
    __syncthreads();
    finish(a, sums, stripe, first_row, warp, lane);
}

/* ---- host ------------------------------------------------------------------------------------------------------------------ */

static size_t weight_bytes(const x3_cuda_group *g, size_t n_groups)
{
    size_t n = 0;

    for (size_t i = 0; i < n_groups; i++)
        n += g[i].n_in_padded * g[i].n_out_padded * 2;
    return n;
}

size_t x3_cuda_linear_rows_bytes(const x3_cuda_group *g, size_t n_groups, size_t n_rows)
{
    return weight_bytes(g, n_groups) + x3_linear_fragment_bytes(g, n_groups, n_rows, HOPPER_GROUPS);
}

static const void *fragments_kernel(int K, x3_codebook codebook, fragments_form form)
{
    static void (*const fill[])(const void *out[N_DECODERS][N_FRAGMENTS]) = {
        x3_fragment_kernels_k1, x3_fragment_kernels_k2, x3_fragment_kernels_k3, x3_fragment_kernels_k4,
        x3_fragment_kernels_k5, x3_fragment_kernels_k6, x3_fragment_kernels_k7, x3_fragment_kernels_k8,
    };
    const void *kernels[N_DECODERS][N_FRAGMENTS];

    fill[K - 1](kernels);
    return kernels[decoder_of(codebook)][form];
}

#define SHARED_BYTES (STAGES * STAGE_PAIRS * PAIR_QUADS * sizeof(uint4) + BLOCK_ROWS * SUMS_LD * sizeof(float))

bool x3_cuda_linear_rows_fits(const x3_cuda_info *info)
{
    return SHARED_BYTES <= info->shared_bytes;
}

x3_status x3_cuda_linear_rows(const x3_cuda_info *info, const x3_cuda_group *g, const x3_cuda_rows *rows, size_t n_groups, void *d_scratch,
                              x3_cuda_stream stream, x3_err *err)
{
    const fragments_form form = x3_linear_hopper_fits(info) ? FRAGMENTS_HOPPER : FRAGMENTS_MMA;
    uint4 *weights = (uint4 *)d_scratch, *part_weights = weights;
    linear_args a;

    RETURN_IF_FAILED(x3_linear_check(g, n_groups, err));
    if (rows->n_rows == 0 || rows->n_rows > INT32_MAX / 2)
        return x3_fail(err, X3_ERR_INPUT, "linear of %zu rows", rows->n_rows);
    x3_linear_fill_args(&a, g, rows, n_groups);
    x3_linear_cut(info, &a);
    a.n_together = form == FRAGMENTS_HOPPER ? HOPPER_GROUPS : 1;
    a.fragments = (uint4 *)((char *)d_scratch + weight_bytes(g, n_groups));
    RETURN_IF_FAILED(x3_linear_rotate(info, &a, true, stream, err));
    for (size_t i = 0; i < n_groups; i++) {
        const linear_part *p = &a.parts[i];
        int n_units = 2 * a.n_pairs_in, n_stripes = p->n_stripes;
        const uint32_t *words = p->words;
        void *args[] = {&words, &part_weights, &n_units, &n_stripes, &a.multiplier, &a.addend};
        RETURN_IF_FAILED(x3_cuda_launch(info, fragments_kernel(g->K, g->codebook, form), dim3((unsigned)(n_units + 7) / 8, (unsigned)n_stripes),
                                        8 * X3_WARP, 0, true, stream, args, "linear, operands", err));
        part_weights += (size_t)n_stripes * (size_t)n_units * STRIPE_TILES * X3_WARP;
    }
    const int n_row_blocks = (a.n_rows + HOPPER_GROUPS * 16 - 1) / (HOPPER_GROUPS * 16);
    if (form == FRAGMENTS_HOPPER) /* a cluster that is not full takes as long as one that is */
        return x3_linear_hopper(info, &a, weights, n_row_blocks % 2 == 0 || n_row_blocks > 6 ? 2 : 1, stream, err);
    void *args[] = {&a, &weights};
    return x3_cuda_launch(info, (const void *)many_rows, dim3((unsigned)((rows->n_rows + BLOCK_ROWS - 1) / BLOCK_ROWS), (unsigned)a.n_stripes),
                          THREADS, SHARED_BYTES, true, stream, args, "linear, many rows", err);
}
