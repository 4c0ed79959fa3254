/* Products of many dense weights with rows of their own, on the tensor cores: experts, and linears of one head each.
 *
 * A float32 is the sum of three bfloat16 up to 24 bits: inputs become three, weights as many as their type needs (BF16 one,
 * F16 two, F32 three), and all products of the first kind are summed but those under 2^-24 of the largest. Sums of 32 inputs
 * are added to the total in float32, because the tensor cores cut off what they add to a larger number.
 * What limits it: the products, three and more for one. */
#include "kernels/cuda_moe.h"
#include "kernels/cuda_common.cuh"

#include <cuda_bf16.h>

#define THREADS 256
#define OUTS 128 /* of a block */
#define ROWS 64
#define DEPTH 32 /* inputs at a time */
#define LD (DEPTH + 8)  /* a row in shared memory; 80 bytes: eight rows for ldmatrix lie in different banks */
#define LD_T (OUTS + 8) /* of a transposed weight: 272 bytes, likewise */
#define X_TERMS 3

typedef struct grouped_args {
    const x3_cuda_expert *experts; /* NULL: weights at w + group * w_step bytes, no bias */
    const int32_t *list;           /* the groups' experts; NULL: group g is g */
    const char *w;
    size_t w_step;
    const int32_t *first, *rows; /* first NULL: all groups have rows [0, n_rows) */
    int n_rows, n_out, n_in;
    size_t ldw; /* elements */
    const float *x;
    size_t ldx, x_step;
    float *y;
    size_t ldy, y_step;
    bool reverse, w_whole, x_whole; /* whole: may be read 16 bytes at a time */
} grouped_args;

/* What a block works on. */
typedef struct group {
    const void *w;
    const float *bias, *x;
    float *y;
    int first, end; /* rows or slots */
} group;

static __device__ __forceinline__ group group_of(const grouped_args &a)
{
    const int g = blockIdx.y, e = a.list != NULL ? a.list[g] : g;
    group t;

    t.w = a.experts != NULL ? a.experts[e].d_w : a.w + (size_t)g * a.w_step;
    t.bias = a.experts != NULL ? a.experts[e].d_bias : NULL;
    t.x = a.x + (size_t)g * a.x_step;
    t.y = a.y + (size_t)g * a.y_step;
    t.first = a.first != NULL ? a.first[e] : 0;
    t.end = a.first != NULL ? a.first[e + 1] : a.n_rows;
    return t;
}

/* ---- from global memory, as float32 or the weight's own bits ------------------------------------------------------------ */

template <int TERMS> struct weight_bits {
    uint32_t u[TERMS == 3 ? 16 : 8]; /* 16 weights */
};

template <int TERMS> static __device__ __forceinline__ uint32_t element(const void *w, size_t i)
{
    return TERMS == 3 ? ((const uint32_t *)w)[i] : ((const uint16_t *)w)[i];
}

/* 16 weights from element i on, of which `n` exist. */
template <int TERMS>
static __device__ __forceinline__ void fetch_weights(weight_bits<TERMS> *to, const void *w, size_t i, int n, bool whole)
{
    constexpr int words = sizeof *to / 4;

    if (whole && n >= 16) {
        const uint4 *from = (const uint4 *)((const char *)w + i * (TERMS == 3 ? 4 : 2));
#pragma unroll
        for (int j = 0; j < words / 4; j++)
            *(uint4 *)&to->u[4 * j] = from[j];
        return;
    }
#pragma unroll
    for (int j = 0; j < words; j++)
        if (TERMS == 3)
            to->u[j] = j < n ? element<TERMS>(w, i + j) : 0;
        else
            to->u[j] = (2 * j < n ? element<TERMS>(w, i + 2 * j) : 0) | (2 * j + 1 < n ? element<TERMS>(w, i + 2 * j + 1) : 0) << 16;
}

/* The weights of this thread in the piece of DEPTH inputs from `depth` on. */
template <int TERMS, bool TRANSPOSED>
static __device__ __forceinline__ void fetch_piece(weight_bits<TERMS> *to, const grouped_args &a, const group &t, int first_out,
                                                   int depth)
{
    const int line = TRANSPOSED ? depth + threadIdx.x / 8 : first_out + threadIdx.x / 2;
    const int column = TRANSPOSED ? first_out + threadIdx.x % 8 * 16 : depth + threadIdx.x % 2 * 16;
    const int n_lines = TRANSPOSED ? a.n_in : a.n_out, n_columns = TRANSPOSED ? a.n_out : a.n_in;

    fetch_weights<TERMS>(to, t.w, (size_t)line * a.ldw + column, line < n_lines ? n_columns - column : 0, a.w_whole);
}

static __device__ __forceinline__ void fetch_rows(float v[8], const grouped_args &a, const float *from, int depth)
{
    const int i = depth + threadIdx.x % 4 * 8;

#pragma unroll
    for (int j = 0; j < 8; j += 4) {
        if (from != NULL && a.x_whole && i + j + 3 < a.n_in) {
            const float4 f = *(const float4 *)(from + i + j);
            v[j] = f.x, v[j + 1] = f.y, v[j + 2] = f.z, v[j + 3] = f.w;
            continue;
        }
#pragma unroll
        for (int e = 0; e < 4; e++)
            v[j + e] = from != NULL && i + j + e < a.n_in ? from[i + j + e] : 0.0f;
    }
}

/* ---- into shared memory, as terms ---------------------------------------------------------------------------------------- */

static __device__ __forceinline__ uint32_t pair_bits(__nv_bfloat16 a, __nv_bfloat16 b)
{
    return (uint32_t)__bfloat16_as_ushort(a) | (uint32_t)__bfloat16_as_ushort(b) << 16;
}

/* The next term of two numbers; they keep the rest. */
static __device__ __forceinline__ uint32_t next_term(float *a, float *b)
{
    const __nv_bfloat16 x = __float2bfloat16_rn(*a), y = __float2bfloat16_rn(*b);

    *a -= __bfloat162float(x);
    *b -= __bfloat162float(y);
    return pair_bits(x, y);
}

/* 2 * PAIRS numbers to `TERMS` arrays that lie `step` elements apart. */
template <int TERMS, int PAIRS> static __device__ __forceinline__ void store_terms(__nv_bfloat16 *to, int step, float *v)
{
#pragma unroll
    for (int term = 0; term < TERMS; term++) {
        uint32_t u[PAIRS];
#pragma unroll
        for (int j = 0; j < PAIRS; j++)
            u[j] = next_term(&v[2 * j], &v[2 * j + 1]);
#pragma unroll
        for (int j = 0; j < PAIRS; j += 4)
            *(uint4 *)(to + term * step + 2 * j) = *(const uint4 *)&u[j];
    }
}

template <int TERMS> static __device__ __forceinline__ void store_weights(__nv_bfloat16 *to, int step, const weight_bits<TERMS> &b)
{
    if constexpr (TERMS == 1) {
        *(uint4 *)to = *(const uint4 *)&b.u[0];
        *(uint4 *)(to + 8) = *(const uint4 *)&b.u[4];
    } else {
        float v[16];
#pragma unroll
        for (int j = 0; j < 16; j++)
            v[j] = TERMS == 3 ? __uint_as_float(b.u[j % (sizeof b / 4)])
                              : __half2float(__ushort_as_half((unsigned short)(b.u[j / 2] >> 16 * (j & 1))));
        store_terms<TERMS, 8>(to, step, v);
    }
}

/* ---- products ------------------------------------------------------------------------------------------------------------ */

static __device__ __forceinline__ void mma_bf16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

template <bool TRANSPOSED> static __device__ __forceinline__ void load_matrices(uint32_t m[4], const __nv_bfloat16 *at)
{
    const uint32_t p = (uint32_t)__cvta_generic_to_shared(at);

    if (TRANSPOSED)
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(p) : "memory");
    else
        asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                     : "=r"(m[0]), "=r"(m[1]), "=r"(m[2]), "=r"(m[3]) : "r"(p) : "memory");
}

#define W_STEP(transposed) ((transposed) ? DEPTH * LD_T : OUTS * LD) /* elements of a term */
#define X_STEP (ROWS * LD)

/* 16 outputs by 16 inputs of a weight's term. */
template <bool TRANSPOSED> static __device__ __forceinline__ void load_a(uint32_t a[4], const __nv_bfloat16 *w, int out, int k, int lane)
{
    if (TRANSPOSED)
        load_matrices<true>(a, w + (k + (lane >> 4) * 8 + (lane & 7)) * LD_T + out + (lane >> 3 & 1) * 8);
    else
        load_matrices<false>(a, w + (out + (lane & 15)) * LD + k + (lane >> 4) * 8);
}

/* 16 inputs of 16 rows of a term: b[0], b[1] for the first eight, b[2], b[3] for the others. */
static __device__ __forceinline__ void load_b(uint32_t b[4], const __nv_bfloat16 *x, int row, int k, int lane)
{
    load_matrices<false>(b, x + (row + (lane >> 4) * 8 + (lane & 7)) * LD + k + (lane >> 3 & 1) * 8);
}

/* c = the piece in shared memory, 32 outputs by 32 rows of this warp: of 16 inputs the small terms first. */
template <int TERMS, bool TRANSPOSED>
static __device__ __forceinline__ void multiply_piece(float c[2][4][4], const __nv_bfloat16 *w, const __nv_bfloat16 *x, int out,
                                                      int row, int lane)
{
#pragma unroll
    for (int i = 0; i < 32; i++)
        c[i / 16][i / 4 % 4][i % 4] = 0;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 16) {
        uint32_t a[TERMS][2][4], b[X_TERMS][2][4];
#pragma unroll
        for (int term = 0; term < TERMS; term++)
#pragma unroll
            for (int o = 0; o < 2; o++)
                load_a<TRANSPOSED>(a[term][o], w + term * W_STEP(TRANSPOSED), out + 16 * o, k, lane);
#pragma unroll
        for (int term = 0; term < X_TERMS; term++)
#pragma unroll
            for (int r = 0; r < 2; r++)
                load_b(b[term][r], x + term * X_STEP, row + 16 * r, k, lane);
#pragma unroll
        for (int sum = X_TERMS - 1; sum >= 0; sum--)
#pragma unroll
            for (int term = 0; term < TERMS && term <= sum; term++)
#pragma unroll
                for (int o = 0; o < 2; o++)
#pragma unroll
                    for (int r = 0; r < 4; r++)
                        mma_bf16(c[o][r], a[term][o], b[sum - term][r / 2] + 2 * (r % 2));
    }
}

/* Rows [row, row + ROWS) of a group by OUTS outputs from first_out on: 8 warps, 4 along the outputs by 2 along the rows. */
template <int TERMS, bool TRANSPOSED>
static __device__ __forceinline__ void multiply_rows(const grouped_args &a, const group &t, int row, int first_out,
                                                     __nv_bfloat16 *w, __nv_bfloat16 *x)
{
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, out = warp % 4 * 32, part = warp / 4 * 32;
    const int mine = row + threadIdx.x / 4, n_pieces = (a.n_in + DEPTH - 1) / DEPTH;
    const float *from = mine < t.end ? t.x + (size_t)(a.rows != NULL ? a.rows[mine] : mine) * a.ldx : NULL;
    __nv_bfloat16 *to_x = x + threadIdx.x / 4 * LD + threadIdx.x % 4 * 8;
    __nv_bfloat16 *to_w = w + (TRANSPOSED ? threadIdx.x / 8 * LD_T + threadIdx.x % 8 * 16 : threadIdx.x / 2 * LD + threadIdx.x % 2 * 16);
    float total[2][4][4] = {}, v[8];
    weight_bits<TERMS> bits;

    fetch_piece<TERMS, TRANSPOSED>(&bits, a, t, first_out, (a.reverse ? n_pieces - 1 : 0) * DEPTH);
    fetch_rows(v, a, from, (a.reverse ? n_pieces - 1 : 0) * DEPTH);
    for (int p = 0; p < n_pieces; p++) {
        float c[2][4][4];
        __syncthreads(); /* the last piece has been read */
        store_weights<TERMS>(to_w, W_STEP(TRANSPOSED), bits);
        store_terms<X_TERMS, 4>(to_x, X_STEP, v);
        __syncthreads();
        if (p + 1 < n_pieces) {
            const int next = (a.reverse ? n_pieces - 2 - p : p + 1) * DEPTH;
            fetch_piece<TERMS, TRANSPOSED>(&bits, a, t, first_out, next);
            fetch_rows(v, a, from, next);
        }
        multiply_piece<TERMS, TRANSPOSED>(c, w, x, out, part, lane);
#pragma unroll
        for (int o = 0; o < 2; o++)
#pragma unroll
            for (int r = 0; r < 4; r++)
#pragma unroll
                for (int i = 0; i < 4; i++)
                    total[o][r][i] += c[o][r][i];
    }
#pragma unroll
    for (int o = 0; o < 2; o++)
#pragma unroll
        for (int r = 0; r < 4; r++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int to = first_out + out + 16 * o + (lane >> 2) + 8 * (i >> 1);
                const int at = row + part + 8 * r + 2 * (lane & 3) + (i & 1);
                if (to < a.n_out && at < t.end)
                    t.y[(size_t)at * a.ldy + to] = total[o][r][i] + (t.bias != NULL ? t.bias[to] : 0.0f);
            }
}

/* Grid: outputs, groups, shares of a group's rows. */
template <int TERMS, bool TRANSPOSED>
static __global__ void __launch_bounds__(THREADS, 2) grouped(const __grid_constant__ grouped_args a)
{
    extern __shared__ __align__(16) __nv_bfloat16 room[]; /* weights [TERMS], rows [X_TERMS] */
    __nv_bfloat16 *x = room + TERMS * W_STEP(TRANSPOSED);
    const group t = group_of(a);

    for (int row = t.first + blockIdx.z * ROWS; row < t.end; row += gridDim.z * ROWS)
        multiply_rows<TERMS, TRANSPOSED>(a, t, row, blockIdx.x * OUTS, room, x);
}

template <int TERMS, bool TRANSPOSED>
static x3_status launch_as(grouped_args *a, dim3 grid, x3_cuda_stream stream, x3_err *err)
{
    const int shared_bytes = (int)((TERMS * W_STEP(TRANSPOSED) + X_TERMS * X_STEP) * sizeof(__nv_bfloat16));
    void *args[] = {a};

    RETURN_IF_FAILED(x3_cuda_check(cudaFuncSetAttribute(grouped<TERMS, TRANSPOSED>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        shared_bytes), "grouped product", err));
    return x3_cuda_check(cudaLaunchKernel((const void *)grouped<TERMS, TRANSPOSED>, grid, dim3(THREADS), args, shared_bytes, stream),
                         "grouped product", err);
}

static x3_status launch(grouped_args *a, x3_cuda_dense_type type, bool transposed, dim3 grid, x3_cuda_stream stream, x3_err *err)
{
    if (type == X3_CUDA_DENSE_BF16)
        return transposed ? launch_as<1, true>(a, grid, stream, err) : launch_as<1, false>(a, grid, stream, err);
    if (type == X3_CUDA_DENSE_F16)
        return transposed ? launch_as<2, true>(a, grid, stream, err) : launch_as<2, false>(a, grid, stream, err);
    return transposed ? launch_as<3, true>(a, grid, stream, err) : launch_as<3, false>(a, grid, stream, err);
}

static bool whole_rows(const float *x, size_t ld)
{
    return (uintptr_t)x % 16 == 0 && ld % 4 == 0;
}

/* Blocks that share a group's rows: enough for twice the mean; more rows are walked through. */
static unsigned row_shares(size_t n_rows, size_t n_groups)
{
    const size_t most = (n_rows + ROWS - 1) / ROWS, mean = (2 * n_rows + n_groups * ROWS - 1) / (n_groups * ROWS);

    return (unsigned)x3_max_size(1, x3_min_size(most, mean));
}

x3_status x3_cuda_expert_dense(const x3_cuda_slots *slots, const x3_cuda_expert *d_experts, const int32_t *d_list, size_t n_list,
                               x3_cuda_dense_type type, size_t n_out, size_t n_in, bool aligned, x3_cuda_stream stream, x3_err *err)
{
    grouped_args a = {};

    if (n_list == 0 || slots->n_slots == 0)
        return X3_OK;
    a.experts = d_experts;
    a.list = d_list;
    a.first = slots->d_first;
    a.rows = slots->d_rows;
    a.n_out = (int)n_out;
    a.n_in = (int)n_in;
    a.ldw = n_in;
    a.x = slots->d_x;
    a.ldx = slots->ldx;
    a.y = slots->d_y;
    a.ldy = slots->ldy;
    a.reverse = slots->reverse;
    a.w_whole = n_in % 8 == 0 && aligned;
    a.x_whole = whole_rows(slots->d_x, slots->ldx);
    return launch(&a, type, false, dim3((unsigned)((n_out + OUTS - 1) / OUTS), (unsigned)n_list, row_shares(slots->n_slots, n_list)),
                  stream, err);
}

x3_status x3_cuda_linear_heads(const x3_cuda_heads *h, x3_cuda_stream stream, x3_err *err)
{
    const size_t element = h->type == X3_CUDA_DENSE_F32 ? 4 : 2, n_out = h->transposed ? h->n_in : h->n;
    grouped_args a = {};

    if (h->n_rows == 0 || h->n_heads == 0)
        return X3_OK;
    a.w = (const char *)h->d_w + h->first * h->n_in * element;
    a.w_step = h->stride * h->n_in * element;
    a.n_rows = (int)h->n_rows;
    a.n_out = (int)n_out;
    a.n_in = (int)(h->transposed ? h->n : h->n_in);
    a.ldw = h->n_in;
    a.x = h->d_x;
    a.ldx = h->ldx;
    a.x_step = h->x_stride;
    a.y = h->d_y;
    a.ldy = h->ldy;
    a.y_step = h->y_stride;
    a.w_whole = h->n_in % 8 == 0 && (uintptr_t)h->d_w % 16 == 0;
    a.x_whole = whole_rows(h->d_x, h->ldx) && h->x_stride % 4 == 0;
    const dim3 grid((unsigned)((n_out + OUTS - 1) / OUTS), (unsigned)h->n_heads, (unsigned)x3_min_size(4096, (h->n_rows + ROWS - 1) / ROWS));
    return launch(&a, h->type, h->transposed, grid, stream, err);
}
