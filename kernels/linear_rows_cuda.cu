/* The EXL3 linear for many rows with the bits of x3_cuda_linear: the same tensor-core products, added in the order that
 * linear_cuda.cuh states. Codes and rotated rows are written out as operands first; then it is an ordinary product whose
 * depth goes segment by segment and chain by chain, with a sum for each level.
 *
 * What limits it: tensor cores and shared memory, about equally: a warp loads 6 operands of 512 bytes for 16 products. */
#include "kernels/linear_rows_cuda.cuh"

#define WARPS 8
#define THREADS (WARPS * X3_WARP)
#define BLOCK_ROWS 128
#define ROW_GROUPS (BLOCK_ROWS / 16) /* of 16 rows */
#define STAGE_UNITS 4
#define STAGES 4
#define UNIT_QUADS ((STRIPE_TILES + ROW_GROUPS) * X3_WARP) /* uint4 of a unit in a stage: weights, then rows */
#define SUMS_LD (STRIPE_COLS + 4)

/* A place in the order of units of a stripe: segment, chain, unit of the chain. Units are counted from the stripe's first. */
typedef struct place {
    int unit, chain;
    int begin, end; /* of the segment */
    int block;      /* of x3_cuda_linear whose segment this is */
} place;

static __device__ __forceinline__ int first_unit(const linear_args &a, int b)
{
    return b * a.n_units_each + min(b, a.n_units_more);
}

static __device__ __forceinline__ int block_of(const linear_args &a, int unit)
{
    const int large = a.n_units_more * (a.n_units_each + 1);

    return unit < large ? unit / (a.n_units_each + 1) : a.n_units_more + (unit - large) / a.n_units_each;
}

static __device__ __forceinline__ void enter_segment(place *p, const linear_args &a, int base)
{
    p->begin = max(0, first_unit(a, p->block) - base);
    p->end = min(a.n_units_in, first_unit(a, p->block + 1) - base);
    p->chain = 0;
    p->unit = p->begin;
}

/* What ends with the unit just passed. */
typedef enum ended { ENDED_NOTHING, ENDED_CHAIN, ENDED_SEGMENT } ended;

static __device__ __forceinline__ ended go_on(place *p, const linear_args &a, int base)
{
    p->unit += N_CHAINS;
    if (p->unit < p->end)
        return ENDED_NOTHING;
    p->chain++;
    p->unit = p->begin + p->chain;
    if (p->chain < N_CHAINS && p->unit < p->end)
        return ENDED_CHAIN;
    p->block++;
    enter_segment(p, a, base);
    return ENDED_SEGMENT;
}

typedef struct operands {
    const uint4 *weights, *rows; /* [stripe][unit][tile][lane], [row / 16][unit][lane] */
} operands;

/* Starts copying the next STAGE_UNITS units. */
static __device__ __forceinline__ void fetch(uint4 *stage, const operands &from, place *p, const linear_args &a, int base, int n_left,
                                             int first_group, int last_group)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;

    if (n_left <= 0)
        return;
#pragma unroll
    for (int u = 0; u < STAGE_UNITS; u++, stage += UNIT_QUADS) {
        copy_async_16(stage + warp * X3_WARP + lane,
                      from.weights + ((size_t)(base + p->unit) * STRIPE_TILES + warp) * X3_WARP + lane);
        copy_async_16(stage + (STRIPE_TILES + warp) * X3_WARP + lane,
                      from.rows + ((size_t)min(first_group + warp, last_group) * a.n_units_in + p->unit) * X3_WARP + lane);
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

static __device__ __forceinline__ void multiply(float acc[8][2][4], const unit_operands &o)
{
    const uint32_t a0[4] = {o.w[0].x, o.w[0].y, o.w[0].z, o.w[0].w}, a1[4] = {o.w[1].x, o.w[1].y, o.w[1].z, o.w[1].w};

#pragma unroll
    for (int g = 0; g < 4; g++) {
        const uint32_t low[2] = {o.r[g].x, o.r[g].y}, high[2] = {o.r[g].z, o.r[g].w};
        mma_f16(acc[2 * g][0], a0, low);
        mma_f16(acc[2 * g][1], a1, low);
        mma_f16(acc[2 * g + 1][0], a0, high);
        mma_f16(acc[2 * g + 1][1], a1, high);
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
    const size_t i = (size_t)stripe * STRIPE_COLS + 4 * lane;

    for (int row = warp; row < min(BLOCK_ROWS, a.n_rows - first_row); row += WARPS) {
        const float4 f = *(const float4 *)(sums + row * SUMS_LD + 4 * lane);
        float v[4] = {f.x, f.y, f.z, f.w};
        hadamard_128(v, lane);
        scale_4(v, a.svh, i);
        if (a.bias != NULL)
            for (int e = 0; e < 4; e++)
                v[e] += i + e < (size_t)a.n_out ? a.bias[i + e] : 0.0f;
        store_4(v, a.y, a.y_type, (size_t)(first_row + row) * a.ldy, i, (size_t)a.n_out, a.y_whole);
    }
}

/* Block (x, y): 128 rows of stripe y. */
static __global__ void __launch_bounds__(THREADS, 1) many_rows(const __grid_constant__ linear_args a, const uint4 *weights)
{
    extern __shared__ __align__(16) uint4 stages[];
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, stripe = blockIdx.y, base = stripe * a.n_units_in;
    const int first_group = blockIdx.x * ROW_GROUPS, last_group = (a.n_rows - 1) / 16;
    const operands from = {weights, a.fragments};
    const int n_stages = a.n_units_in / STAGE_UNITS;
    float *sums = (float *)(stages + STAGES * STAGE_UNITS * UNIT_QUADS);
    float acc[8][2][4] = {}, chains[8][2][4];
    bool first_chain = true, first_segment = true;
    place ahead, now;

    wait_for_previous_kernel();
    ahead.block = block_of(a, base);
    enter_segment(&ahead, a, base);
    now = ahead;
    for (int i = 0; i < STAGES - 1; i++) {
        fetch(stages + i * STAGE_UNITS * UNIT_QUADS, from, &ahead, a, base, a.n_units_in - i * STAGE_UNITS, first_group, last_group);
        copy_async_commit();
    }
    for (int i = 0; i < n_stages; i++) {
        const uint4 *stage = stages + i % STAGES * STAGE_UNITS * UNIT_QUADS;
        copy_async_wait<STAGES - 2>();
        __syncthreads(); /* everyone's copies are here, and the stage that is filled next is read */
        fetch(stages + (i + STAGES - 1) % STAGES * STAGE_UNITS * UNIT_QUADS, from, &ahead, a, base,
              a.n_units_in - (i + STAGES - 1) * STAGE_UNITS, first_group, last_group);
        copy_async_commit();
        /* units come in multiples of 8: all of a stage is there */
        unit_operands o[2];
        load(&o[0], stage, warp, lane);
#pragma unroll
        for (int u = 0; u < STAGE_UNITS; u++) {
            if (u + 1 < STAGE_UNITS)
                load(&o[(u + 1) % 2], stage + (u + 1) * UNIT_QUADS, warp, lane);
            multiply(acc, o[u % 2]);
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
    finish(a, sums, stripe, (int)blockIdx.x * BLOCK_ROWS, warp, lane);
}

/* ---- host ------------------------------------------------------------------------------------------------------------------ */

static size_t weight_bytes(const x3_cuda_group *g)
{
    return g->n_in_padded * g->n_out_padded * 2;
}

size_t x3_cuda_linear_rows_bytes(const x3_cuda_group *g, size_t n_rows)
{
    return weight_bytes(g) + x3_round_up(n_rows, 16) * g->n_in_padded * 2;
}

static const void *fragments_kernel(int K, x3_codebook codebook)
{
    static void (*const fill[])(const void *out[N_DECODERS]) = {
        x3_fragment_kernels_k1, x3_fragment_kernels_k2, x3_fragment_kernels_k3, x3_fragment_kernels_k4,
        x3_fragment_kernels_k5, x3_fragment_kernels_k6, x3_fragment_kernels_k7, x3_fragment_kernels_k8,
    };
    const void *kernels[N_DECODERS];

    fill[K - 1](kernels);
    return kernels[decoder_of(codebook)];
}

#define SHARED_BYTES (STAGES * STAGE_UNITS * UNIT_QUADS * sizeof(uint4) + BLOCK_ROWS * SUMS_LD * sizeof(float))

bool x3_cuda_linear_rows_fits(const x3_cuda_info *info)
{
    return SHARED_BYTES <= info->shared_bytes;
}

x3_status x3_cuda_linear_rows(const x3_cuda_info *info, const x3_cuda_group *g, const x3_cuda_rows *rows, void *d_scratch,
                              x3_cuda_stream stream, x3_err *err)
{
    uint4 *weights = (uint4 *)d_scratch;
    const uint32_t *words = g->d_words;
    linear_args a;

    RETURN_IF_FAILED(x3_linear_check(g, err));
    if (rows->n_rows == 0 || rows->n_rows > INT32_MAX / 2)
        return x3_fail(err, X3_ERR_INPUT, "linear of %zu rows", rows->n_rows);
    x3_linear_fill_args(&a, g, rows);
    x3_linear_cut(info, &a);
    a.fragments = (uint4 *)((char *)d_scratch + weight_bytes(g));
    RETURN_IF_FAILED(x3_linear_rotate(info, &a, true, stream, err));
    void *fragment_args[] = {&words, &weights, &a.n_units_in, &a.n_stripes, &a.multiplier, &a.addend};
    RETURN_IF_FAILED(x3_cuda_launch(info, fragments_kernel(g->K, g->codebook), dim3((unsigned)(a.n_units_in + 7) / 8, (unsigned)a.n_stripes),
                                    8 * X3_WARP, 0, true, stream, fragment_args, "linear, operands", err));
    void *args[] = {&a, &weights};
    return x3_cuda_launch(info, (const void *)many_rows, dim3((unsigned)((rows->n_rows + BLOCK_ROWS - 1) / BLOCK_ROWS), (unsigned)a.n_stripes),
                          THREADS, SHARED_BYTES, true, stream, args, "linear, many rows", err);
}
