/* Causal attention of many rows over BF16 pages with wgmma, whose bits are those of mma.sync when the same sixteen products are added
 * at a time: packed_attention_cuda.cuh says what is computed.
 *
 * A block takes 128 rows that share a KV head, 64 a group of four warps: while one group weighs, the other multiplies. Four warps bring
 * in pages. What they write is the order in which mma.sync's lanes take their numbers, 4 bytes at a time (word_place). */
#include "kernels/hopper_cuda.cuh"
#include "kernels/packed_attention_cuda.cuh"

#include <string.h>

#define GROUPS 2     /* of four warps and 64 rows */
#define GROUP_ROWS 64
#define CARRIERS 128 /* threads that bring in */
#define THREADS (GROUPS * 128 + CARRIERS)
#define MOST_STAGES 4
#define KEY_INNER (PAGE * 16 + 16)      /* bytes from 8 dimensions of all keys to the next; 16 keep the banks apart */
#define VALUE_INNER (V_PART * 16 + 16)  /* from 8 positions of all values to the next */
#define QUERY_INNER (GROUP_ROWS * 16)

typedef struct layout {
    uint32_t queries, stages, keys, stage; /* bytes: of a group's queries, where stages begin, of a page's keys, of a stage */
} layout;

static __host__ __device__ __forceinline__ layout layout_of(int k_dim)
{
    layout l;

    l.queries = (uint32_t)k_dim / 8 * 2 * QUERY_INNER;
    l.stages = 128 + GROUPS * l.queries; /* barriers come first */
    l.keys = (uint32_t)k_dim / 8 * KEY_INNER;
    l.stage = (l.keys + PAGE / 8 * VALUE_INNER + 127) / 128 * 128;
    return l;
}

typedef struct hopper_args {
    attend_args a;
    int n_stages;
} hopper_args;

#ifdef __CUDA_ARCH_FEAT_SM90_ALL

/* Word w of a row of numbers that are multiplied (dimensions of a key, positions of a value), two to a word: which eight numbers of an
 * operand it belongs to, and its place there. */
static __device__ __forceinline__ uint32_t word_eight(int w)
{
    return (uint32_t)(w >> 4 << 2 | (w >> 1 & 1) << 1 | (w & 1));
}

static __device__ __forceinline__ uint32_t word_place(int w)
{
    return (uint32_t)(w >> 2 & 3) * 4;
}

/* The column of scores of a position of the page: position_of the other way. */
static __device__ __forceinline__ uint32_t column_of(int position)
{
    const int j = position >> 5 << 2 | (position >> 1 & 3), n = (position >> 3 & 3) << 1 | (position & 1);

    return (uint32_t)(8 * j + n);
}

/* 4 bytes, of which n come from memory; the others become zero. */
static __device__ __forceinline__ void copy_word(uint32_t to, const char *from, int n)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(n) : "memory");
}

/* Shared memory written by ordinary means, before wgmma reads it. */
static __device__ __forceinline__ void show_to_wgmma(void)
{
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

static __device__ __forceinline__ void arrive(uint32_t barrier)
{
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

/* ---- what a block works on ------------------------------------------------------------------------------------------------------ */

typedef struct block_rows {
    x3_cuda_sequence s;
    int kv_head, part, first, n_rows; /* rows: positions times query heads, flattened */
    int begin, end, last;             /* pages; the last position that a row sees */
} block_rows;

static __device__ __forceinline__ block_rows block_rows_of(const attend_args &a)
{
    block_rows b;

    b.s = a.batch.d_sequences[blockIdx.z];
    b.kv_head = (int)blockIdx.y / a.n_parts;
    b.part = (int)blockIdx.y % a.n_parts;
    b.n_rows = b.s.n_rows * a.n_repeat;
    b.first = (int)(gridDim.x - 1 - blockIdx.x) * GROUPS * GROUP_ROWS; /* the longest first */
    b.last = b.s.position + min(b.first + GROUPS * GROUP_ROWS - 1, b.n_rows - 1) / a.n_repeat;
    b.begin = a.window > 0 ? max(0, b.s.position + b.first / a.n_repeat + 1 - a.window) / PAGE : 0;
    b.end = b.last / PAGE + 1;
    return b;
}

/* ---- bringing in ------------------------------------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void copy_page(const attend_args &a, const block_rows &b, const layout &l, uint32_t stage, int page, int warp,
                                                 int lane)
{
    const int k_words = (int)a.kv.k_dim / 2, n_columns = min(V_PART, (int)a.kv.v_dim - b.part * V_PART), last = b.last - page * PAGE;
    rows_of keys, values;

    page_places(a, (size_t)a.batch.d_pages[b.s.first_page + page], b.kv_head, b.part, &keys, &values);
    for (int w = lane; w < k_words; w += X3_WARP) {
        const uint32_t to = stage + word_eight(w) * KEY_INNER + word_place(w);
        const char *from = keys.numbers + 4 * w;
#pragma unroll 8
        for (int position = warp; position < PAGE; position += CARRIERS / X3_WARP)
            copy_word(to + column_of(position) * 16, from + position * keys.stride, 4);
    }
    const uint32_t to = stage + l.keys + word_eight(lane) * VALUE_INNER + word_place(lane);
    const int n = 2 * max(0, min(2, last + 1 - 2 * lane)); /* beyond the last position memory may hold anything */
#pragma unroll 8
    for (int d = warp; d < n_columns; d += CARRIERS / X3_WARP)
        copy_word(to + (uint32_t)d * 16, values.numbers + d * values.stride + 4 * lane, n);
}

static __device__ __forceinline__ void bring_pages(const hopper_args &h, const block_rows &b, const layout &l, uint32_t memory, int warp, int lane)
{
    int stage = 0, before = 0;
    uint32_t parity = 1;

    for (int page = b.begin; page <= b.end; page++) {
        if (page < b.end) {
            barrier_wait(memory + 8 * (uint32_t)(MOST_STAGES + stage), parity);
            copy_page(h.a, b, l, memory + l.stages + (uint32_t)stage * l.stage, page, warp, lane);
        }
        copy_async_commit();
        if (page > b.begin) { /* the page before is here */
            copy_async_wait<1>();
            show_to_wgmma();
            arrive(memory + 8 * (uint32_t)before);
        }
        before = stage;
        if (++stage == h.n_stages) {
            stage = 0;
            parity ^= 1;
        }
    }
}

/* ---- multiplying ------------------------------------------------------------------------------------------------------------------- */

/* s += 64 rows of queries, high and low halves, times 16 dimensions of the keys; := for the first. */
static __device__ __forceinline__ void multiply_keys(float s[32], uint64_t high, uint64_t low, uint64_t keys, bool first)
{
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %35, 0;\nwgmma.fence.sync.aligned;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PLACES_32 "}, %32, %34, add, 1, 1, 0, 0;\n"
                 "setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" PLACES_32 "}, %33, %34, add, 1, 1, 0, 0;\n}"
                 : SIXTEEN(s, 0), SIXTEEN(s, 16)
                 : "l"(high), "l"(low), "l"(keys), "r"((int)!first)
                 : "memory");
}

/* v += weights of 16 positions times their values; := for the first. */
static __device__ __forceinline__ void multiply_values(float v[64], const uint32_t high[4], const uint32_t low[4], uint64_t values, bool first)
{
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, %73, 0;\nwgmma.fence.sync.aligned;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PLACES_64 "}, {%64,%65,%66,%67}, %72, add, 1, 1, 0;\n"
                 "setp.ne.b32 add, 1, 0;\n"
                 "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" PLACES_64 "}, {%68,%69,%70,%71}, %72, add, 1, 1, 0;\n}"
                 : SIXTEEN(v, 0), SIXTEEN(v, 16), SIXTEEN(v, 32), SIXTEEN(v, 48)
                 : "r"(high[0]), "r"(high[1]), "r"(high[2]), "r"(high[3]), "r"(low[0]), "r"(low[1]), "r"(low[2]), "r"(low[3]), "l"(values),
                   "r"((int)!first)
                 : "memory");
}

#define END_PRODUCTS(...) \
    asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" : __VA_ARGS__::"memory")

/* Queries of rows g and g + 8 of a warp, split in two, [dimension / 8][high, low pairs of eights][row][8]. */
static __device__ __forceinline__ void put_queries(uint32_t to, const float *row_g, const float *row_h, int k_dim, int warp, int lane)
{
    const int q = lane & 3;

    for (int s = 0; s < k_dim / 32; s++)
#pragma unroll
        for (int h = 0; h < 2; h++) {
            const float4 *from = (const float4 *)((h == 0 ? row_g : row_h) + 32 * s + 8 * q);
            const uint32_t at = to + (uint32_t)(16 * (warp % 4) + 8 * h + (lane >> 2)) * 16 + (uint32_t)q * 4;
#pragma unroll
            for (int i = 0; i < 2; i++) {
                const float4 f = from[i];
                uint32_t high[2], low[2];
                split_pair(f.x, f.y, &high[0], &low[0]);
                split_pair(f.z, f.w, &high[1], &low[1]);
#pragma unroll
                for (int e = 0; e < 2; e++) {
                    const uint32_t place = at + (uint32_t)((2 * s + i) * 4 + e) * QUERY_INNER;
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(place), "r"(high[e]) : "memory");
                    asm volatile("st.shared.u32 [%0], %1;" ::"r"(place + 2 * QUERY_INNER), "r"(low[e]) : "memory");
                }
            }
        }
}

typedef struct row_sums {
    float o[64], M[2], L[2];
    int position[2];
} row_sums;

/* One page for a group's 64 rows; `whole`: all of them see all of it. */
static __device__ __forceinline__ void pass_page(row_sums *r, const attend_args &a, uint32_t queries, uint32_t keys, uint32_t values, int base,
                                                 bool whole, int lane)
{
    const int to[2] = {whole ? PAGE : r->position[0] - base, whole ? PAGE : r->position[1] - base};
    const int from[2] = {!whole && a.window > 0 ? to[0] + 1 - a.window : 0, !whole && a.window > 0 ? to[1] + 1 - a.window : 0};
    float s[8][4], v[64], before[2], of_page[2];
    page_sums p;

    for (int i = 0; i < (int)a.kv.k_dim / 16; i++) {
        const uint32_t at = queries + (uint32_t)i * 4 * QUERY_INNER;
        multiply_keys(s[0], operand_at(at, QUERY_INNER, 128), operand_at(at + 2 * QUERY_INNER, QUERY_INNER, 128),
                      operand_at(keys + (uint32_t)i * 2 * KEY_INNER, KEY_INNER, 128), i == 0);
    }
    END_PRODUCTS(SIXTEEN(s[0], 0), SIXTEEN(s[0], 16));
    weigh<X3_KV_BF16>(s, NULL, NULL, a.scale, from, to, &p, lane);
#pragma unroll
    for (int i = 0; i < 2; i++)
        merge(&r->M[i], &r->L[i], p.m[i], p.l[i], &before[i], &of_page[i]);
#pragma unroll
    for (int t = 0; t < 4; t++)
        multiply_values(v, p.p_high[t], p.p_low[t], operand_at(values + (uint32_t)t * 2 * VALUE_INNER, VALUE_INNER, 128), t == 0);
    END_PRODUCTS(SIXTEEN(v, 0), SIXTEEN(v, 16), SIXTEEN(v, 32), SIXTEEN(v, 48));
#pragma unroll
    for (int i = 0; i < 64; i++)
        r->o[i] = r->o[i] * before[i >> 1 & 1] + v[i] * of_page[i >> 1 & 1];
}

static __device__ __forceinline__ void attend(const hopper_args &h, const block_rows &b, const layout &l, uint32_t memory, int warp, int lane)
{
    const attend_args &a = h.a;
    const int group = warp / 4, first = b.first + group * GROUP_ROWS, k_dim = (int)a.kv.k_dim;
    const uint32_t queries = memory + 128 + (uint32_t)group * l.queries;
    const int earliest = b.s.position + min(first, b.n_rows - 1) / a.n_repeat;
    const int latest = b.s.position + min(first + GROUP_ROWS - 1, b.n_rows - 1) / a.n_repeat;
    const float *row[2];
    row_sums r;
    int stage = 0;
    uint32_t parity = 0;

#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int flat = min(first + warp % 4 * 16 + (lane >> 2) + 8 * i, b.n_rows - 1), head = b.kv_head * a.n_repeat + flat % a.n_repeat;
        r.position[i] = b.s.position + flat / a.n_repeat;
        row[i] = a.q + (size_t)(b.s.first_row + flat / a.n_repeat) * a.ldq + (size_t)head * k_dim;
        r.M[i] = a.sinks != NULL ? a.sinks[head] : NONE;
        r.L[i] = a.sinks != NULL ? 1 : 0;
    }
#pragma unroll
    for (int i = 0; i < 64; i++)
        r.o[i] = 0;
    put_queries(queries, row[0], row[1], k_dim, warp, lane);
    show_to_wgmma();
    asm volatile("bar.sync %0, 128;" ::"r"(1 + group) : "memory");
    for (int page = b.begin; page < b.end; page++) {
        const uint32_t at = memory + l.stages + (uint32_t)stage * l.stage;
        const int base = page * PAGE;
        barrier_wait(memory + 8 * (uint32_t)stage, parity);
        if (base <= latest && (a.window == 0 || base + PAGE > earliest + 1 - a.window))
            pass_page(&r, a, queries, at, at + l.keys, base,
                      base + PAGE - 1 <= earliest && (a.window == 0 || base >= latest + 1 - a.window), lane);
        if (lane == 0)
            arrive(memory + 8 * (uint32_t)(MOST_STAGES + stage));
        if (++stage == h.n_stages) {
            stage = 0;
            parity ^= 1;
        }
    }
    const int n_columns = min(V_PART, (int)a.kv.v_dim - b.part * V_PART);
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int flat = first + warp % 4 * 16 + (lane >> 2) + 8 * i;
        if (flat >= b.n_rows)
            continue;
        float *to = a.out + (size_t)(b.s.first_row + flat / a.n_repeat) * a.ldo +
                    ((size_t)b.kv_head * a.n_repeat + flat % a.n_repeat) * a.kv.v_dim + b.part * V_PART;
#pragma unroll
        for (int c = 0; c < V_GROUPS; c++)
            if (8 * c < n_columns)
                *(float2 *)(to + 8 * c + 2 * (lane & 3)) = make_float2(r.o[4 * c + 2 * i] / r.L[i], r.o[4 * c + 2 * i + 1] / r.L[i]);
    }
}
#endif

/* Block (x, y, z): 128 rows from the end, KV head and part of the dimensions, sequence. */
static __global__ void __launch_bounds__(THREADS, 1) attend_rows_hopper(const __grid_constant__ hopper_args h)
{
#ifdef __CUDA_ARCH_FEAT_SM90_ALL
    extern __shared__ __align__(128) char shared[];
    const int lane = threadIdx.x % X3_WARP, warp = __shfl_sync(X3_ALL_LANES, threadIdx.x / X3_WARP, 0);
    const uint32_t memory = opaque(shared_address(shared)); /* barriers `full`, `empty`; queries; stages */
    const layout l = layout_of((int)h.a.kv.k_dim);

    if (threadIdx.x == 0)
        for (uint32_t i = 0; i < MOST_STAGES; i++) {
            barrier_init(memory + 8 * i, CARRIERS);
            barrier_init(memory + 8 * (MOST_STAGES + i), GROUPS * 4);
        }
    __syncthreads();
    begin_in_turn();
    const block_rows b = block_rows_of(h.a);
    if (b.first >= b.n_rows)
        return;
    if (warp >= GROUPS * 4) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        bring_pages(h, b, l, memory, warp - GROUPS * 4, lane);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        attend(h, b, l, memory, warp, lane);
    }
#endif
}

/* ---- host ---------------------------------------------------------------------------------------------------------------------------- */

static int stages_of(const x3_cuda_info *info, const attend_args *a)
{
    const layout l = layout_of((int)a->kv.k_dim);

    return l.stages >= info->shared_bytes ? 0 : (int)x3_min_size((info->shared_bytes - l.stages) / l.stage, MOST_STAGES);
}

bool x3_attend_hopper_fits(const x3_cuda_info *info, const attend_args *a)
{
#ifdef X3_SM90A
    return info->compute_capability / 10 == 9 && a->kv.type == X3_KV_BF16 && a->batch.longest * (size_t)a->n_repeat >= GROUPS * GROUP_ROWS &&
           stages_of(info, a) >= 2;
#else
    (void)info;
    (void)a;
    return false;
#endif
}

x3_status x3_attend_hopper(const x3_cuda_info *info, const attend_args *a, x3_cuda_stream stream, x3_err *err)
{
    const size_t rows = a->batch.longest * (size_t)a->n_repeat, tile = GROUPS * GROUP_ROWS;
    const layout l = layout_of((int)a->kv.k_dim);
    hopper_args h;
    void *args[] = {&h};

    memset(&h, 0, sizeof h);
    h.a = *a;
    h.n_stages = stages_of(info, a);
    return x3_cuda_launch(info, (const void *)attend_rows_hopper,
                          dim3((unsigned)((rows + tile - 1) / tile), (unsigned)a->kv.n_kv_heads * (unsigned)a->n_parts,
                               (unsigned)a->batch.n_sequences),
                          THREADS, l.stages + (size_t)h.n_stages * l.stage, true, stream, args, "attention", err);
}
