/* The EXL3 linear of many rows with the tensor-core instructions of compute capability 9.0 (wgmma), which give the bits of mma.sync: the
 * same sixteen products are added at a time. The Makefile compiles this file for sm_90a.
 *
 * A block takes tiles of 128 rows of one stripe. Four warps bring in weights and rows, a pair a stage; two groups of four warps
 * multiply, 64 rows each. While one adds up a chain the other multiplies. The blocks of a cluster have the same stripe and send each
 * other its weights (different stripes have their pairs in different orders, so that rows cannot be shared). */
#include "kernels/hopper_cuda.cuh"
#include "kernels/linear_rows_cuda.cuh"

#include <stddef.h>
#include <string.h>

#define ROWS (16 * HOPPER_GROUPS) /* of a block */
#define SUMS 64    /* numbers of a thread: 16 rows by 128 outputs in a warp */
#define STAGES 8
#define WORKERS 8  /* warps that multiply */
#define CARRIERS 4 /* warps that bring in, every fourth pair each */
#define THREADS ((WORKERS + CARRIERS) * X3_WARP)
#define BAND 16 /* row blocks whose tiles follow each other, so that rows stay in the cache */

typedef struct stage {
    uint4 weights[2][STRIPE_COLS / 8][2 * 8]; /* [unit][output / 8][input / 8] blocks of 128 bytes */
    uint4 rows[ROWS / 8][2][2 * 8];           /* [row / 8][unit][input / 8] */
} stage;

typedef struct block_memory {
    stage stages[STAGES];
    float sums[SUMS][WORKERS * X3_WARP]; /* of segments */
    uint64_t full[STAGES], empty[STAGES];
} block_memory;

#define FULL offsetof(block_memory, full)
#define EMPTY offsetof(block_memory, empty)

typedef struct rows_args {
    linear_args a;
    const uint4 *weights;
    int n_row_blocks;
    int n_cluster;
    int n_columns; /* of n_cluster row blocks each */
} rows_args;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* ---- instructions ------------------------------------------------------------------------------------------------------ */

/* A barrier of block `rank` of the cluster at the place of b in this one. */
static __device__ __forceinline__ uint32_t barrier_of(uint32_t b, int rank)
{
    uint32_t at;

    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(at) : "r"(b), "r"(rank));
    return at;
}

static __device__ __forceinline__ void barrier_arrive(uint32_t at)
{
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(at) : "memory");
}

static __device__ __forceinline__ void cluster_meet(void)
{
    asm volatile("barrier.cluster.arrive.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

/* Bytes to the same place in all blocks of `mask`, counted by `b` in each. */
static __device__ __forceinline__ void send(uint32_t to, const char *from, int n_bytes, uint32_t b, uint32_t mask)
{
    if (mask == 1)
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to), "l"(from),
                     "r"(n_bytes), "r"(b)
                     : "memory");
    else
        asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;" ::"r"(to),
                     "l"(from), "r"(n_bytes), "r"(b), "h"((uint16_t)mask)
                     : "memory");
}

/* c += a pair's 64 rows times its weights, or := if `first`. Begun, not waited for. */
static __device__ __forceinline__ void multiply(float c[SUMS], uint64_t rows, uint64_t weights, bool first)
{
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %68, 0;\nwgmma.fence.sync.aligned;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" PLACES_64 "}, %64, %66, add, 1, 1, 0, 0;\n"
                 "setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.f16.f16 {" PLACES_64 "}, %65, %67, add, 1, 1, 0, 0;\n"
                 "wgmma.commit_group.sync.aligned;\n}"
                 : SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48)
                 : "l"(rows), "l"(rows + 256 / 16), "l"(weights), "l"(weights + 4096 / 16), "r"((int)!first)
                 : "memory");
}

/* All products but the last N begun are there. */
template <int N> static __device__ __forceinline__ void wait_products(float c[SUMS])
{
    asm volatile("wgmma.wait_group.sync.aligned %64;"
                 : SIXTEEN(c, 0), SIXTEEN(c, 16), SIXTEEN(c, 32), SIXTEEN(c, 48)
                 : "n"(N)
                 : "memory");
}

/* ---- the order of pairs --------------------------------------------------------------------------------------------------- */

typedef struct tile {
    int row_block, stripe;
    bool wanted; /* false: fills a cluster up */
} tile;

static __device__ __forceinline__ int n_tiles(const rows_args &r)
{
    return r.n_columns * r.a.n_stripes;
}

/* The tile of block `rank` of a cluster in the cluster's tile t: bands of row blocks, in each stripe after stripe. */
static __device__ __forceinline__ tile tile_at(const rows_args &r, int t, int rank)
{
    const int band = BAND / r.n_cluster, first = t / (band * r.a.n_stripes) * band, width = min(band, r.n_columns - first);
    const int i = t - first * r.a.n_stripes, row_block = (first + i % width) * r.n_cluster + rank;
    tile at;

    at.stripe = i / width;
    at.wanted = row_block < r.n_row_blocks;
    at.row_block = min(row_block, r.n_row_blocks - 1);
    return at;
}

/* A place in the order of pairs of a stripe, counted from its first. */
typedef struct place {
    int pair, n_left; /* n_left: of the chain, from this pair on */
    int chain, begin, end, block;
} place;

static __device__ __forceinline__ void enter_segment(place *p, const linear_args &a, int base)
{
    p->begin = max(0, first_pair(a, p->block) - base);
    p->end = min(a.n_pairs_in, first_pair(a, p->block + 1) - base);
    p->chain = 0;
    p->pair = p->begin;
    p->n_left = (p->end - p->begin + N_CHAINS - 1) / N_CHAINS;
}

static __device__ __forceinline__ void enter_stripe(place *p, const linear_args &a, int stripe)
{
    const int base = stripe * a.n_pairs_in;

    p->block = block_of(a, base);
    enter_segment(p, a, base);
}

/* To the next pair; false at the end of the stripe. */
static __device__ __forceinline__ bool go_on(place *p, const linear_args &a, int stripe)
{
    p->pair += N_CHAINS;
    if (--p->n_left > 0)
        return true;
    p->chain++;
    p->pair = p->begin + p->chain;
    p->n_left = (p->end - p->pair + N_CHAINS - 1) / N_CHAINS;
    if (p->chain < N_CHAINS && p->n_left > 0)
        return true;
    if (p->end == a.n_pairs_in)
        return false;
    p->block++;
    enter_segment(p, a, stripe * a.n_pairs_in);
    return true;
}

/* ---- bringing in ------------------------------------------------------------------------------------------------------------ */

/* What all pairs of a tile have in common. */
typedef struct load {
    const char *weights, *rows; /* of the stripe's first pair */
} load;

#define WEIGHT_BYTES ((uint32_t)offsetof(stage, rows))
#define ROW_BYTES ((uint32_t)sizeof(((stage *)0)->rows))

static __device__ __forceinline__ load load_of(const rows_args &r, tile t, int rank)
{
    const size_t n_pairs = (size_t)r.a.n_pairs_in;
    load l;

    l.weights = (const char *)r.weights + (size_t)t.stripe * n_pairs * WEIGHT_BYTES + (size_t)rank * (WEIGHT_BYTES / (uint32_t)r.n_cluster);
    l.rows = (const char *)r.a.fragments + ((size_t)part_of(r.a, t.stripe) * r.n_row_blocks + t.row_block) * n_pairs * ROW_BYTES;
    return l;
}

/* The stages that one of the CARRIERS fills, gone round in order. */
typedef struct ring {
    uint32_t at, barrier, parity;
} ring;

static __device__ __forceinline__ void bring(ring *to, uint32_t memory, const rows_args &r, const load &l, int rank, int pair)
{
    const uint32_t share = WEIGHT_BYTES / (uint32_t)r.n_cluster; /* every block sends a share of the weights to all */

    barrier_wait(to->barrier + (uint32_t)(EMPTY - FULL), to->parity ^ 1);
    barrier_expect(to->barrier, (int)(WEIGHT_BYTES + ROW_BYTES));
    send(to->at + (uint32_t)rank * share, l.weights + (size_t)(uint32_t)pair * WEIGHT_BYTES, (int)share, to->barrier,
         (1u << r.n_cluster) - 1);
    send(to->at + (uint32_t)offsetof(stage, rows), l.rows + (size_t)(uint32_t)pair * ROW_BYTES, (int)ROW_BYTES, to->barrier, 1);
    to->at += (uint32_t)sizeof(stage) * CARRIERS;
    to->barrier += (uint32_t)sizeof(uint64_t) * CARRIERS;
    if (to->barrier >= memory + (uint32_t)FULL + STAGES * (uint32_t)sizeof(uint64_t)) {
        to->at -= (uint32_t)sizeof(stage) * STAGES;
        to->barrier -= (uint32_t)sizeof(uint64_t) * STAGES;
        to->parity ^= 1;
    }
}

/* Pairs of a stripe are a multiple of CARRIERS. */
static __device__ __forceinline__ void bring_all(const rows_args &r, uint32_t memory, int first_tile, int step, int rank, int carrier)
{
    ring to = {memory + (uint32_t)carrier * (uint32_t)sizeof(stage), memory + (uint32_t)FULL + (uint32_t)carrier * (uint32_t)sizeof(uint64_t), 0};

    for (int at = first_tile; at < n_tiles(r); at += step) {
        const tile t = tile_at(r, at, rank);
        const load l = load_of(r, t, rank);
        bool more = true;
        place p;
        enter_stripe(&p, r.a, t.stripe);
        for (int i = 0; i < carrier; i++)
            (void)go_on(&p, r.a, t.stripe);
        while (more) {
            bring(&to, memory, r, l, rank, p.pair);
            for (int i = 0; i < CARRIERS && more; i++)
                more = go_on(&p, r.a, t.stripe);
        }
    }
}

/* ---- multiplying ------------------------------------------------------------------------------------------------------------ */

/* ---- outputs ---------------------------------------------------------------------------------------------------------------- */

/* hadamard_128, the same operations. Number 4 j + e: row g + 8 (e / 2), output 8 j + 2 q + e % 2. */
static __device__ __forceinline__ void hadamard_sums(float v[SUMS], int lane)
{
#pragma unroll
    for (int i = 0; i < SUMS; i += 2) {
        const float a = v[i] + v[i + 1], b = v[i] - v[i + 1];
        v[i] = a;
        v[i + 1] = b;
    }
#pragma unroll
    for (int stride = 1; stride <= 2; stride *= 2)
#pragma unroll
        for (int i = 0; i < SUMS; i++) {
            const float other = __shfl_xor_sync(X3_ALL_LANES, v[i], stride);
            v[i] = lane & stride ? other - v[i] : v[i] + other;
        }
#pragma unroll
    for (int stride = 4; stride < SUMS; stride *= 2)
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            if (!(i & stride)) {
                const float a = v[i] + v[i + stride], b = v[i] - v[i + stride];
                v[i] = a;
                v[i + stride] = b;
            }
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        v[i] *= 0.08838834764831845f;
}

template <typename OUT> static __device__ __forceinline__ void write_two(OUT *to, float x, float y, int n, bool whole)
{
    if (sizeof(OUT) == 4 && whole)
        *(float2 *)to = make_float2(x, y);
    else if (whole)
        *(__half2 *)to = __floats2half2_rn(x, y);
    else {
        if (n > 0)
            to[0] = (OUT)x;
        if (n > 1)
            to[1] = (OUT)y;
    }
}

/* y of a warp's 16 rows from their sums: finish_row in another order of numbers. */
template <typename OUT>
static __device__ __forceinline__ void finish(const rows_args &r, float v[SUMS], int first_row, int stripe, int lane)
{
    const int p = part_of(r.a, stripe);
    const linear_part &part = r.a.parts[p];
    const int local = stripe - r.a.first_stripe[p], first = local * STRIPE_COLS + 2 * (lane & 3);
    const bool whole = part.y_whole && (local + 1) * STRIPE_COLS <= part.n_out;
    __half2 svh[SUMS / 4];

#pragma unroll
    for (int j = 0; j < SUMS / 4; j++)
        svh[j] = *(const __half2 *)(part.svh + first + 8 * j);
    hadamard_sums(v, lane);
#pragma unroll
    for (int j = 0; j < SUMS / 4; j++) {
        const float2 scale = __half22float2(svh[j]);
        const int column = first + 8 * j;
#pragma unroll
        for (int h = 0; h < 2; h++) {
            v[4 * j + 2 * h] *= scale.x;
            v[4 * j + 2 * h + 1] *= scale.y;
            if (part.bias != NULL) {
                v[4 * j + 2 * h] += column < part.n_out ? part.bias[column] : 0.0f;
                v[4 * j + 2 * h + 1] += column + 1 < part.n_out ? part.bias[column + 1] : 0.0f;
            }
        }
    }
#pragma unroll
    for (int h = 0; h < 2; h++) {
        const int row = first_row + (lane >> 2) + 8 * h;
        OUT *to = (OUT *)part.y + (size_t)row * part.ldy + (size_t)first;
        if (row >= r.a.n_rows)
            continue;
#pragma unroll
        for (int j = 0; j < SUMS / 4; j++)
            write_two(to + 8 * j, v[4 * j + 2 * h], v[4 * j + 2 * h + 1], part.n_out - first - 8 * j, whole);
    }
}

/* ---- multiplying ------------------------------------------------------------------------------------------------------------ */

/* The sums of segments so far := or += a segment's. A thread always has the same places. */
static __device__ __forceinline__ void add_segment(float (*sums)[WORKERS * X3_WARP], const float from[SUMS], bool first)
{
#pragma unroll
    for (int i = 0; i < SUMS; i++)
        sums[i][threadIdx.x] = first ? from[i] : sums[i][threadIdx.x] + from[i];
}

/* The stage that is multiplied next, as in ring. */
typedef struct turn {
    uint32_t i, parity;
} turn;

static __device__ __forceinline__ uint32_t stage_of(uint32_t memory, uint32_t i)
{
    return memory + i * (uint32_t)sizeof(stage);
}

/* acc := the sum of a chain of n pairs. release: the barriers `empty` of a block, in the lanes that tell one. */
static __device__ __forceinline__ void multiply_chain(float acc[SUMS], int n, turn *at, uint32_t memory, uint32_t release, int warp)
{
    const uint32_t rows = (uint32_t)offsetof(stage, rows) + (uint32_t)(warp / 4) * (ROW_BYTES / 2);
    uint32_t before = 0;

    for (int k = 0; k < n; k++) {
        const uint32_t now = at->i, stage_at = stage_of(memory, now);
        barrier_wait(memory + (uint32_t)FULL + now * (uint32_t)sizeof(uint64_t), at->parity);
        multiply(acc, operand_at(stage_at + rows, 128, 512), operand_at(stage_at, 128, 256), k == 0);
        if (++at->i == STAGES) {
            at->i = 0;
            at->parity ^= 1;
        }
        if (k > 0) {
            wait_products<1>(acc);
            if (release != 0)
                barrier_arrive(release + before * (uint32_t)sizeof(uint64_t));
        }
        before = now;
    }
    wait_products<0>(acc);
    if (release != 0)
        barrier_arrive(release + before * (uint32_t)sizeof(uint64_t));
}

/* sums := those of a stripe. */
static __device__ __forceinline__ void multiply_stripe(float sums[SUMS], const rows_args &r, block_memory *m, int stripe, turn *at,
                                                       uint32_t memory, uint32_t release, int warp)
{
    bool first = true;
    place p;

    for (enter_stripe(&p, r.a, stripe);; p.block++, enter_segment(&p, r.a, stripe * r.a.n_pairs_in)) {
        const int n = p.end - p.begin;
        for (int chain = 0; chain < min(n, N_CHAINS); chain++) {
            float acc[SUMS];
            multiply_chain(acc, (n - chain + N_CHAINS - 1) / N_CHAINS, at, memory, release, warp);
#pragma unroll
            for (int i = 0; i < SUMS; i++)
                sums[i] = chain == 0 ? acc[i] : sums[i] + acc[i];
        }
        if (p.end == r.a.n_pairs_in)
            break;
        add_segment(m->sums, sums, first);
        first = false;
    }
    if (!first)
#pragma unroll
        for (int i = 0; i < SUMS; i++)
            sums[i] = m->sums[i][threadIdx.x] + sums[i];
}

static __device__ __forceinline__ void work(const rows_args &r, block_memory *m, uint32_t memory, int first_tile, int step, int rank, int warp, int lane)
{
    const uint32_t release = lane < r.n_cluster ? barrier_of(memory + (uint32_t)EMPTY, lane) : 0;
    turn at = {0, 0};

    for (int i = first_tile; i < n_tiles(r); i += step) {
        const tile t = tile_at(r, i, rank);
        const int first_row = t.row_block * ROWS + warp * 16;
        float sums[SUMS];
        multiply_stripe(sums, r, m, t.stripe, &at, memory, release, warp);
        if (!t.wanted)
            continue;
        if (r.a.y_type == X3_CUDA_F32)
            finish<float>(r, sums, first_row, t.stripe, lane);
        else
            finish<__half>(r, sums, first_row, t.stripe, lane);
    }
}

/* ---- the kernel ------------------------------------------------------------------------------------------------------------- */

#endif

static __global__ void __launch_bounds__(THREADS, 1) many_rows_hopper(const __grid_constant__ rows_args r)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) char shared[];
    block_memory *m = (block_memory *)shared;
    const int lane = threadIdx.x & 31, warp = __shfl_sync(X3_ALL_LANES, threadIdx.x >> 5, 0), rank = (int)blockIdx.x % r.n_cluster;
    const uint32_t memory = opaque(shared_address(m)); /* which is slow to find out */
    const int first_tile = (int)blockIdx.x / r.n_cluster, step = (int)gridDim.x / r.n_cluster;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(memory + (uint32_t)(FULL + i * sizeof(uint64_t)), 1);
            barrier_init(memory + (uint32_t)(EMPTY + i * sizeof(uint64_t)), WORKERS * r.n_cluster);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    cluster_meet();
    wait_for_previous_kernel();
    if (warp >= WORKERS) {
        if (lane == 0 && first_tile < n_tiles(r))
            bring_all(r, memory, first_tile, step, rank, warp - WORKERS);
        __syncwarp();
    } else
        work(r, m, memory, first_tile, step, rank, warp, lane);
    cluster_meet(); /* nothing is sent to a block that is gone */
#endif
}

/* ---- host ------------------------------------------------------------------------------------------------------------------- */

bool x3_linear_hopper_fits(const x3_cuda_info *info)
{
#ifdef X3_SM90A
    return info->compute_capability / 10 == 9 && sizeof(block_memory) <= info->shared_bytes;
#else
    (void)info;
    return false;
#endif
}

x3_status x3_linear_hopper(const x3_cuda_info *info, const linear_args *a, const uint4 *d_weights, int n_cluster, x3_cuda_stream stream,
                           x3_err *err)
{
    const void *kernel = (const void *)many_rows_hopper;
    const char *what = "linear, many rows";
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = {};
    int n_clusters = info->n_multiprocessors / n_cluster;
    rows_args r;
    void *args[] = {&r};

    memset(&r, 0, sizeof r);
    memset(attributes, 0, sizeof attributes);
    r.a = *a;
    r.weights = d_weights;
    r.n_row_blocks = (a->n_rows + ROWS - 1) / ROWS;
    r.n_cluster = n_cluster;
    r.n_columns = (r.n_row_blocks + n_cluster - 1) / n_cluster;
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim.x = (unsigned)n_cluster;
    attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = sizeof(block_memory);
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    RETURN_IF_FAILED(x3_cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)sizeof(block_memory)), what, err));
    if (n_clusters > r.n_columns * a->n_stripes)
        n_clusters = r.n_columns * a->n_stripes;
    config.gridDim = dim3((unsigned)(n_clusters * n_cluster));
    return x3_cuda_check(cudaLaunchKernelExC(&config, kernel, args), what, err);
}
