/* What the CUDA kernels share: decoding a tile's states straight into tensor-core operands, the 128-point Hadamard, and
 * a few instructions that have no C spelling. Private to the .cu files here. */
#ifndef X3_CUDA_COMMON_CUH
#define X3_CUDA_COMMON_CUH

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math_constants.h>

#include "kernels/codebook.h"
#include "kernels/cuda_kernels.h"

#define X3_WARP 32
#define X3_ALL_LANES 0xFFFFFFFFu

/* For functions that hold nothing: C++ forbids jumping over initializations to a label. */
#define RETURN_IF_FAILED(expr)          \
    do {                                \
        const x3_status status = (expr); \
        if (status != X3_OK)            \
            return status;              \
    } while (0)

/* X3_OK, or a failure that names `what`. */
x3_status x3_cuda_check(cudaError_t error, const char *what, x3_err *err);
/* A launch with `shared_bytes` of dynamic shared memory; overlap: see x3_cuda_linear. */
x3_status x3_cuda_launch(const x3_cuda_info *info, const void *kernel, dim3 grid, int n_threads, size_t shared_bytes,
                         bool overlap, x3_cuda_stream stream, void **args, const char *what, x3_err *err);

/* A launch of one of many small kernels in a row: it may begin, as far as its first two lines, while the kernel before it still
 * runs. It must begin with begin_in_turn(). */
x3_status x3_cuda_launch_in_turn(const void *kernel, dim3 grid, int n_threads, size_t shared_bytes, x3_cuda_stream stream, void **args,
                                 const char *what, x3_err *err);

/* ---- single instructions ----------------------------------------------------------------------------------- */

/* 16 bytes from global to shared memory, not waited for. */
static __device__ __forceinline__ void copy_async_16(void *shared, const void *global)
{
    uint32_t to = (uint32_t)__cvta_generic_to_shared(shared);

    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(global) : "memory");
}

static __device__ __forceinline__ void copy_async_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int N_PENDING> static __device__ __forceinline__ void copy_async_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(N_PENDING) : "memory");
}

/* Waits until the kernels before this one on its stream are done and their writes visible. */
static __device__ __forceinline__ void wait_for_previous_kernel(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

/* The next kernel may begin its prologue. */
static __device__ __forceinline__ void release_next_kernel(void)
{
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

/* Lets the next kernel come and waits for the one before: what kernels launched in turn begin with. All of them wait, so what
 * is done before the previous kernel is done too. */
static __device__ __forceinline__ void begin_in_turn(void)
{
    release_next_kernel();
    wait_for_previous_kernel();
}

/* c += a b, float16 with float32 sums. a is 16 x 16, b 16 x 8, c 16 x 8; a column of c depends on the same column of b
 * alone. Lane 4 g + q holds a[g | g + 8][2q, 2q + 1 | + 8], b[2q, 2q + 1 | + 8][g] and c[g | g + 8][2q, 2q + 1]. */
static __device__ __forceinline__ void mma_f16(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Hides where v comes from: the compiler then keeps it in a register, where it would rather compute it again every time
 * round a loop, or keeps what is computed from it inside the loop. No instruction. */
static __device__ __forceinline__ uint32_t opaque(uint32_t v)
{
    asm volatile("" : "+r"(v));
    return v;
}

static __device__ __forceinline__ uint32_t half2_bits(__half2 h)
{
    return *(const uint32_t *)&h;
}

static __device__ __forceinline__ __half2 bits_half2(uint32_t u)
{
    return *(const __half2 *)&u;
}

/* ---- decoding ------------------------------------------------------------------------------------------------ */

/* Values of two states, as two float16 (first in the low half). Equal to x3_codebook_values for every state. */
template <int CODEBOOK> static __device__ __forceinline__ uint32_t decode_pair(uint32_t first, uint32_t second)
{
    if (CODEBOOK == X3_CB_MUL1) {
        /* the byte sums land behind 0x6400: each half is then the number 1024 + sum, exactly */
        uint32_t a = __dp4a(first * X3_MUL1_MULTIPLIER, 0x01010101u, 0x64006400u);
        uint32_t b = __dp4a(second * X3_MUL1_MULTIPLIER, 0x01010101u, 0u);
        return half2_bits(__hfma2(bits_half2(b * 65536u + a), bits_half2(0x1EEE1EEEu), bits_half2(0xC931C931u)));
    }
    uint32_t x = CODEBOOK == X3_CB_MCG ? x3_codebook_mix_mcg(first) : x3_codebook_mix_3inst(first);
    uint32_t y = CODEBOOK == X3_CB_MCG ? x3_codebook_mix_mcg(second) : x3_codebook_mix_3inst(second);
    __half2 hx = bits_half2(x), hy = bits_half2(y);
    return half2_bits(__halves2half2(__hadd(__low2half(hx), __high2half(hx)), __hadd(__low2half(hy), __high2half(hy))));
}

template <int CODEBOOK> static __device__ __forceinline__ float decode_value(uint32_t state)
{
    return __low2float(bits_half2(decode_pair<CODEBOOK>(state, state)));
}

static __device__ __forceinline__ float decode_value_of(int codebook, uint32_t state)
{
    return codebook == X3_CB_MUL1  ? decode_value<X3_CB_MUL1>(state)
           : codebook == X3_CB_MCG ? decode_value<X3_CB_MCG>(state)
                                   : decode_value<X3_CB_3INST>(state);
}

/* The 16 + 7 K bits that hold the eight states of a lane, the last bit of the last state lowest. They end at bit
 * 8 K (lane + 1) of the tile, inside `word`; `shift` bits of that word come after them. */
typedef struct lane_bits {
    int word, before, before2; /* indices into the tile's 8 K words, which are a ring */
    uint32_t shift;
} lane_bits;

template <int K> static __device__ __forceinline__ lane_bits lane_bits_of(int lane)
{
    const int end = 8 * K * (lane + 1), n_words = 8 * K;
    lane_bits l;

    l.word = (end - 1) >> 5;
    l.before = (l.word + n_words - 1) % n_words;
    l.before2 = (l.word + n_words - 2) % n_words;
    l.shift = (uint32_t)(-end & 31);
    return l;
}

typedef struct window {
    uint32_t low, high, top; /* bits 0 .., 32 .., 64 .. */
    uint32_t from_5, from_8, from_12;
} window;

template <int K> static __device__ __forceinline__ window window_load(const uint32_t *tile, lane_bits l)
{
    const bool aligned = K % 4 == 0; /* shift is zero in every lane */
    uint32_t a = tile[l.word], b = tile[l.before], c = K >= 5 ? tile[l.before2] : 0;
    window w;

    w.low = aligned ? a : __funnelshift_r(a, b, l.shift);
    w.high = aligned ? b : K >= 5 ? __funnelshift_r(b, c, l.shift) : b >> l.shift;
    w.top = aligned ? c : c >> l.shift;
    w.from_5 = K == 3 ? __funnelshift_r(a, b, l.shift + 5) : 0; /* shift is 24 at most */
    w.from_8 = K == 4 ? __funnelshift_r(a, b, 8) : 0;
    w.from_12 = K == 4 ? __funnelshift_r(a, b, 12) : 0;
    return w;
}

/* 32 bits of the window from bit T up; at K <= 2 the window has no more than 30. */
template <int K, int T> static __device__ __forceinline__ uint32_t window_from(window w)
{
    if (T == 0)
        return w.low;
    if (T == 32)
        return w.high;
    if (K <= 2)
        return w.low >> (T & 31);
    if (T < 32)
        return __funnelshift_r(w.low, w.high, T & 31);
    return T + 16 <= 64 ? w.high >> (T & 31) : __funnelshift_r(w.high, w.top, T & 31);
}

/* State j of the window lies at bit (7 - j) K. A byte permutation takes any 16 bits on a byte border. What is not on one is
 * shifted: to the left where that is possible, since such shifts can be multiplications and the units that shift and
 * permute are the busiest; states 8 bits apart share a shift. At K = 3 and 4 no state crosses the end of all the words below. */
template <int K, int J> static __device__ __forceinline__ uint32_t window_state(window w)
{
    constexpr int t = (7 - J) * K, begin = K == 3 && t >= 5 ? 5 : K == 4 && t % 8 == 4 && t > 4 ? 12 : K == 4 && t == 24 ? 8 : t / 32 * 32;
    constexpr int in_word = t - begin, left = (8 - in_word % 8) % 8;

    if constexpr (in_word + left <= 16) {
        const uint32_t word = begin == 0 ? w.low : begin == 5 ? w.from_5 : begin == 8 ? w.from_8 : begin == 12 ? w.from_12 : w.high;
        return __byte_perm(word << left, 0, 0x4410 + 0x11 * ((in_word + left) / 8));
    } else {
        return __byte_perm(window_from<K, t>(w), 0, 0x4410);
    }
}

/* Decoding on the tensor cores, which a small product leaves idle: what has to be summed within a lane's word (the four
 * bytes of mul1, the two float16 of the others) is a product with a matrix of ones, four words of a lane at a time.
 * The sums of neighbouring words come out in one lane, those of words 2 i and 2 i + 1 of a quad of lanes where
 * words 0 .. 3 are the first words of its lanes and 4 .. 7 the second ones. */
typedef struct ones {
    uint32_t b[2];               /* column g of the matrix sums word g */
    uint32_t multiplier, addend; /* 3inst and mcg, which differ in them alone */
} ones;

/* The kernels that decode whole tiles are compiled for mul1 and for the sum of two float16 numbers, which is 3inst or mcg by
 * what a state is multiplied with. */
#define CODEBOOK_SUM X3_CB_MCG
#define N_DECODERS 2

static inline int decoder_of(x3_codebook codebook)
{
    return codebook == X3_CB_MUL1 ? 1 : 0;
}

static inline uint32_t multiplier_of(x3_codebook codebook)
{
    return codebook == X3_CB_3INST ? 89226354u : X3_MCG_MULTIPLIER;
}

static inline uint32_t addend_of(x3_codebook codebook)
{
    return codebook == X3_CB_3INST ? 64248484u : 0;
}

template <int CODEBOOK> static __device__ __forceinline__ ones ones_of(int lane, uint32_t multiplier, uint32_t addend)
{
    const uint32_t one = CODEBOOK == X3_CB_MUL1 ? 0x01010101u : 0x3C003C00u;
    ones o;

    o.b[0] = (lane & 3) == lane >> 2 ? one : 0;
    o.b[1] = (lane & 3) + 4 == lane >> 2 ? one : 0;
    o.multiplier = multiplier;
    o.addend = addend;
    return o;
}

/* out[0] and out[1]: values of the words w[0], w[2] and w[1], w[3] of the quad's lanes, two float16 each. */
template <int CODEBOOK> static __device__ __forceinline__ void decode_quad(const uint32_t w[4], ones o, uint32_t out[2])
{
    if (CODEBOOK == X3_CB_MUL1) {
        uint32_t s[4]; /* 0x6400 + sum: as a float16, 1024 + sum exactly */
        asm("mma.sync.aligned.m16n8k32.row.col.s32.u8.u8.s32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
            : "=r"(s[0]), "=r"(s[1]), "=r"(s[2]), "=r"(s[3])
            : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(o.b[0]), "r"(o.b[1]), "r"(0x6400));
        const __half2 a = bits_half2(0x1EEE1EEEu), b = bits_half2(0xC931C931u);
        out[0] = half2_bits(__hfma2(bits_half2(__byte_perm(s[0], s[1], 0x5410)), a, b));
        out[1] = half2_bits(__hfma2(bits_half2(__byte_perm(s[2], s[3], 0x5410)), a, b));
    } else {
        asm("mma.sync.aligned.m16n8k16.row.col.f16.f16.f16.f16 {%0,%1}, {%2,%3,%4,%5}, {%6,%7}, {%8,%8};"
            : "=r"(out[0]), "=r"(out[1])
            : "r"(w[0]), "r"(w[1]), "r"(w[2]), "r"(w[3]), "r"(o.b[0]), "r"(o.b[1]), "r"(0));
    }
}

template <int K, int CODEBOOK, int J> static __device__ __forceinline__ uint32_t window_mixed(window w, ones o)
{
    const uint32_t state = window_state<K, J>(w);

    return CODEBOOK == X3_CB_MUL1 ? state * X3_MUL1_MULTIPLIER
                                  : ((state * o.multiplier + o.addend) & 0x8FFF8FFFu) ^ 0x3B603B60u;
}

/* A tile as the A operand of mma_f16: its 16 columns (outputs) by its 16 rows (inputs). The sums above have moved rows
 * between lanes: index i of the operand's second dimension is row tile_operand_row(i). */
template <int K, int CODEBOOK>
static __device__ __forceinline__ void decode_tile(const uint32_t *tile, lane_bits l, ones o, uint32_t a[4])
{
    const window w = window_load<K>(tile, l);
    const uint32_t low[4] = {window_mixed<K, CODEBOOK, 0>(w, o), window_mixed<K, CODEBOOK, 4>(w, o),
                             window_mixed<K, CODEBOOK, 1>(w, o), window_mixed<K, CODEBOOK, 5>(w, o)};
    const uint32_t high[4] = {window_mixed<K, CODEBOOK, 2>(w, o), window_mixed<K, CODEBOOK, 6>(w, o),
                              window_mixed<K, CODEBOOK, 3>(w, o), window_mixed<K, CODEBOOK, 7>(w, o)};

    decode_quad<CODEBOOK>(low, o, a);
    decode_quad<CODEBOOK>(high, o, a + 2);
}

/* 0, 2, 4, 6, 1, 3, 5, 7 and the same + 8. */
static __device__ __forceinline__ int tile_operand_row(int i)
{
    return (i & 8) | (i & 3) << 1 | (i >> 2 & 1);
}

/* ---- floats -------------------------------------------------------------------------------------------------- */

/* x3_exp_ref, operation by operation. */
static __device__ __forceinline__ float exp_exact(float x)
{
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.7f ? 88.7f : x;
    const float n = rintf(x * 1.44269504088896341f);
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r) + 1.0f;
    return p * __uint_as_float((uint32_t)((int)n + 127) << 23);
}

/* silu(gate) * up, as x3_kernels.silu_mul. */
static __device__ __forceinline__ float silu_mul_exact(float gate, float up)
{
    return gate / (1.0f + exp_exact(0.0f - gate)) * up;
}

/* Dimensions i of the rotated ones of a head: x[2 i], x[2 i + 1], or x[i], x[half + i]. table: cosines, then sines of the position. */
static __device__ __forceinline__ void rope_pair(float *x, const float *table, size_t i, size_t half, bool interleaved)
{
    float *p = interleaved ? x + 2 * i : x + i, *q = interleaved ? p + 1 : p + half;
    const float u = *p, v = *q, cosine = table[i], sine = table[half + i];

    *p = u * cosine - v * sine;
    *q = v * cosine + u * sine;
}

/* Same result in all lanes, whatever the number of active terms. */
static __device__ __forceinline__ float warp_sum(float v)
{
#pragma unroll
    for (int lanes = X3_WARP / 2; lanes > 0; lanes /= 2)
        v += __shfl_xor_sync(X3_ALL_LANES, v, lanes);
    return v;
}

/* What values of at most `largest` (bits of a float, sign off) are multiplied by: they then lie under 2^15. */
static __device__ __forceinline__ float half_factor(uint32_t largest)
{
    const int exponent = (int)(largest >> 23) - 126; /* largest < 2^exponent */

    if (largest == 0 || largest >= 0x7F800000u)
        return 1;
    return __int_as_float((min(15 - exponent, 126) + 127) << 23);
}

/* The inverse of a power of two. */
static __device__ __forceinline__ float half_unit(float factor)
{
    return __int_as_float((254 << 23) - __float_as_int(factor));
}

static __device__ __forceinline__ void split_half(float v, __half *high, __half *low)
{
    *high = __float2half_rn(v);
    *low = __float2half_rn(v - __half2float(*high));
}

/* ---- rows ---------------------------------------------------------------------------------------------------- */

/* The steps of hadamard_128 with strides 1 and 2. */
static __device__ __forceinline__ void hadamard_4(float v[4])
{
    const float a = v[0] + v[1], b = v[0] - v[1], c = v[2] + v[3], d = v[2] - v[3];

    v[0] = a + c;
    v[1] = b + d;
    v[2] = a - c;
    v[3] = b - d;
}

/* A warp holds 128 numbers, 4 * lane + e in v[e]: Sylvester-Hadamard over strides 1, 2, .. 64, divided by sqrt(128).
 * The same operations in the same order as x3_kernels.hadamard. */
static __device__ __forceinline__ void hadamard_128(float v[4], int lane)
{
    hadamard_4(v);
#pragma unroll
    for (int stride = 1; stride < X3_WARP; stride *= 2)
#pragma unroll
        for (int e = 0; e < 4; e++) {
            float other = __shfl_xor_sync(X3_ALL_LANES, v[e], stride);
            v[e] = lane & stride ? other - v[e] : v[e] + other;
        }
#pragma unroll
    for (int e = 0; e < 4; e++)
        v[e] *= 0.08838834764831845f;
}

/* x[i .. i + 3] of n, zero past the end. `whole`: the row may be read four at a time. */
static __device__ __forceinline__ void load_4(float v[4], const void *x, x3_cuda_type type, size_t row, size_t i, size_t n,
                                              bool whole)
{
    if (whole && i + 3 < n) {
        if (type == X3_CUDA_F32) {
            float4 f = *(const float4 *)((const float *)x + row + i);
            v[0] = f.x, v[1] = f.y, v[2] = f.z, v[3] = f.w;
        } else {
            uint2 h = *(const uint2 *)((const __half *)x + row + i);
            float2 p = __half22float2(bits_half2(h.x)), q = __half22float2(bits_half2(h.y));
            v[0] = p.x, v[1] = p.y, v[2] = q.x, v[3] = q.y;
        }
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++)
        v[e] = i + e >= n               ? 0.0f
               : type == X3_CUDA_F32 ? ((const float *)x)[row + i + e]
                                        : __half2float(((const __half *)x)[row + i + e]);
}

static __device__ __forceinline__ void store_4(const float v[4], void *y, x3_cuda_type type, size_t row, size_t i, size_t n,
                                               bool whole)
{
    if (whole && i + 3 < n) {
        if (type == X3_CUDA_F32)
            *(float4 *)((float *)y + row + i) = make_float4(v[0], v[1], v[2], v[3]);
        else
            *(uint2 *)((__half *)y + row + i) = make_uint2(half2_bits(__floats2half2_rn(v[0], v[1])),
                                                           half2_bits(__floats2half2_rn(v[2], v[3])));
        return;
    }
#pragma unroll
    for (int e = 0; e < 4; e++) {
        if (i + e >= n)
            continue;
        if (type == X3_CUDA_F32)
            ((float *)y)[row + i + e] = v[e];
        else
            ((__half *)y)[row + i + e] = __float2half_rn(v[e]);
    }
}

/* v *= four float16. */
static __device__ __forceinline__ void scale_by(float v[4], uint2 scale)
{
    const float2 p = __half22float2(bits_half2(scale.x)), q = __half22float2(bits_half2(scale.y));

    v[0] *= p.x, v[1] *= p.y, v[2] *= q.x, v[3] *= q.y;
}

/* v *= scale[i .. i + 3], float16. */
static __device__ __forceinline__ void scale_4(float v[4], const uint16_t *scale, size_t i)
{
    scale_by(v, *(const uint2 *)(scale + i));
}

#endif
