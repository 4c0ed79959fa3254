/* The forward kernels over vectors; forward_ref.c defines what they compute. */
#include <math.h>
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/simd.h"

#define LANES 16 /* of the stated order of sums */
#define N_PARTS (LANES / X3_LANES)
#define ROWS_MAX 6 /* accumulators of a block stay in registers: 6 rows of 16 columns */

X3_LANEWISE void matmul_rows(const int n_rows, const float *x, size_t ldx, const float *panel, size_t ldp, size_t k,
                             float *y, size_t ldy, bool accumulate)
{
    x3_vec sum[ROWS_MAX][N_PARTS];

    for (int r = 0; r < n_rows; r++)
        for (int v = 0; v < N_PARTS; v++)
            sum[r][v] = accumulate ? v_load(y + (size_t)r * ldy + v * X3_LANES) : v_set1(0);
    for (size_t i = 0; i < k; i++, panel += ldp) {
        x3_vec w[N_PARTS];
        for (int v = 0; v < N_PARTS; v++)
            w[v] = v_load(panel + v * X3_LANES);
        for (int r = 0; r < n_rows; r++) {
            x3_vec a = v_set1(x[(size_t)r * ldx + i]);
            for (int v = 0; v < N_PARTS; v++)
                sum[r][v] = v_fma(a, w[v], sum[r][v]);
        }
    }
    for (int r = 0; r < n_rows; r++)
        for (int v = 0; v < N_PARTS; v++)
            v_store(y + (size_t)r * ldy + v * X3_LANES, sum[r][v]);
}

static void panel_matmul(const float *x, size_t ldx, size_t n_rows, const float *panel, size_t ldp, size_t k, float *y,
                         size_t ldy, bool accumulate)
{
    for (; n_rows >= ROWS_MAX; n_rows -= ROWS_MAX, x += ROWS_MAX * ldx, y += ROWS_MAX * ldy)
        matmul_rows(ROWS_MAX, x, ldx, panel, ldp, k, y, ldy, accumulate);
    switch (n_rows) {
    case 5:
        matmul_rows(5, x, ldx, panel, ldp, k, y, ldy, accumulate);
        break;
    case 4:
        matmul_rows(4, x, ldx, panel, ldp, k, y, ldy, accumulate);
        break;
    case 3:
        matmul_rows(3, x, ldx, panel, ldp, k, y, ldy, accumulate);
        break;
    case 2:
        matmul_rows(2, x, ldx, panel, ldp, k, y, ldy, accumulate);
        break;
    case 1:
        matmul_rows(1, x, ldx, panel, ldp, k, y, ldy, accumulate);
        break;
    default:
        break;
    }
}

/* The states of eight positions come out of two 64-bit windows a lane; K is a constant where this is inlined. */
X3_LANEWISE void decode_tile(const uint32_t *words, const int K, const float *values, float *out)
{
    for (int lane = 0; lane < 32; lane++) {
        float *even = out + (lane & 3) * 2 * X3_TILE + (lane >> 2);
        for (int j = 0; j < 8; j++) {
            uint32_t state = x3_tile_state(words, K, lane * 8 + j);
            even[(j & 1) * X3_TILE + ((j >> 1) & 1) * 8 * X3_TILE + (j >> 2) * 8] = values[state];
        }
    }
}

static void tile_decode(const uint32_t *words, int K, const float *values, float *out)
{
    switch (K) {
    case 1:
        decode_tile(words, 1, values, out);
        break;
    case 2:
        decode_tile(words, 2, values, out);
        break;
    case 3:
        decode_tile(words, 3, values, out);
        break;
    case 4:
        decode_tile(words, 4, values, out);
        break;
    case 5:
        decode_tile(words, 5, values, out);
        break;
    case 6:
        decode_tile(words, 6, values, out);
        break;
    case 7:
        decode_tile(words, 7, values, out);
        break;
    default:
        decode_tile(words, 8, values, out);
        break;
    }
}

/* low + high where the bit of `stride` is clear, low - high where it is set: one rounding either way. */
X3_LANEWISE x3_vec butterfly(x3_vec a, const int stride)
{
    float sign[X3_LANES];

    for (int i = 0; i < X3_LANES; i++)
        sign[i] = i & stride ? -1.0f : 1.0f;
    return v_fma(a, v_load(sign), v_swap(a, stride));
}

static void hadamard(float *x, size_t n_blocks)
{
    enum { N = X3_HADAMARD / X3_LANES };

    for (size_t b = 0; b < n_blocks; b++, x += X3_HADAMARD) {
        x3_vec a[N];
        for (int i = 0; i < N; i++) {
            a[i] = v_load(x + i * X3_LANES);
            a[i] = butterfly(a[i], 1);
            a[i] = butterfly(a[i], 2);
            if (X3_LANES > 4)
                a[i] = butterfly(a[i], 4);
            if (X3_LANES > 8)
                a[i] = butterfly(a[i], 8);
        }
        for (int stride = 1; stride < N; stride *= 2)
            for (int i = 0; i < N; i++)
                if ((i & stride) == 0) {
                    x3_vec low = a[i], high = a[i + stride];
                    a[i] = v_add(low, high);
                    a[i + stride] = v_sub(low, high);
                }
        for (int i = 0; i < N; i++)
            v_store(x + i * X3_LANES, v_mul(a[i], v_set1(0.08838834764831845f)));
    }
}

static float sum_lanes(float s[LANES])
{
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            s[i] += s[i + half];
    return s[0];
}

static void rms_norm(const float *x, const float *weight, size_t n, float eps, float *out)
{
    size_t whole = n / LANES * LANES, i;
    float lanes[LANES];
    x3_vec sum[N_PARTS];

    for (int v = 0; v < N_PARTS; v++)
        sum[v] = v_set1(0);
    for (i = 0; i < whole; i += LANES)
        for (int v = 0; v < N_PARTS; v++) {
            x3_vec a = v_load(x + i + (size_t)v * X3_LANES);
            sum[v] = v_fma(a, a, sum[v]);
        }
    for (int v = 0; v < N_PARTS; v++)
        v_store(lanes + v * X3_LANES, sum[v]);
    for (; i < n; i++)
        lanes[i - whole] = fmaf(x[i], x[i], lanes[i - whole]);
    float r = 1.0f / sqrtf(sum_lanes(lanes) / (float)n + eps);
    for (i = 0; i < whole; i += X3_LANES)
        v_store(out + i, v_mul(v_mul(v_load(x + i), v_set1(r)), v_load(weight + i)));
    for (; i < n; i++)
        out[i] = x[i] * r * weight[i];
}

static inline x3_vec v_exp(x3_vec x)
{
    x = v_min(v_max(x, v_set1(-87.3f)), v_set1(88.7f));
    x3_veci n = v_round_to_int(v_mul(x, v_set1(1.44269504088896341f)));
    x3_vec nf = v_from_int(n);
    x3_vec r = v_fma(nf, v_set1(-0.693359375f), x);
    r = v_fma(nf, v_set1(2.12194440e-4f), r);
    x3_vec p = v_set1(1.9875691500e-4f);
    p = v_fma(p, r, v_set1(1.3981999507e-3f));
    p = v_fma(p, r, v_set1(8.3334519073e-3f));
    p = v_fma(p, r, v_set1(4.1665795894e-2f));
    p = v_fma(p, r, v_set1(1.6666665459e-1f));
    p = v_fma(p, r, v_set1(5.0000001201e-1f));
    p = v_add(v_fma(p, v_mul(r, r), r), v_set1(1.0f));
    return v_mul(p, v_cast(vi_shl23(vi_add(n, vi_set1(127)))));
}

static float largest(const float *s, size_t whole, size_t n, float m)
{
    float lanes[X3_LANES];
    x3_vec best = v_set1(m);

    for (size_t i = 0; i < whole; i += X3_LANES)
        best = v_max(best, v_load(s + i));
    v_store(lanes, best);
    for (int i = 0; i < X3_LANES; i++)
        m = lanes[i] > m ? lanes[i] : m;
    for (size_t i = whole; i < n; i++)
        m = s[i] > m ? s[i] : m;
    return m;
}

static float softmax(float *s, size_t n, float scale, const float *sink)
{
    size_t whole = n / LANES * LANES, i;
    float lanes[LANES];
    x3_vec sum[N_PARTS];

    for (i = 0; i < whole; i += X3_LANES)
        v_store(s + i, v_mul(v_load(s + i), v_set1(scale)));
    for (; i < n; i++)
        s[i] *= scale;
    float m = largest(s, whole, n, sink != NULL ? *sink : -INFINITY);
    for (int v = 0; v < N_PARTS; v++)
        sum[v] = v_set1(0);
    for (i = 0; i < whole; i += LANES)
        for (int v = 0; v < N_PARTS; v++) {
            x3_vec e = v_exp(v_sub(v_load(s + i + (size_t)v * X3_LANES), v_set1(m)));
            v_store(s + i + (size_t)v * X3_LANES, e);
            sum[v] = v_add(sum[v], e);
        }
    for (int v = 0; v < N_PARTS; v++)
        v_store(lanes + v * X3_LANES, sum[v]);
    for (; i < n; i++) {
        s[i] = x3_exp_ref(s[i] - m);
        lanes[i - whole] += s[i];
    }
    float total = sum_lanes(lanes);
    return sink != NULL ? total + x3_exp_ref(*sink - m) : total;
}

static void silu_mul(const float *gate, const float *up, size_t n, float *out)
{
    size_t whole = n / X3_LANES * X3_LANES, i;

    for (i = 0; i < whole; i += X3_LANES) {
        x3_vec g = v_load(gate + i);
        x3_vec e = v_exp(v_sub(v_set1(0), g));
        v_store(out + i, v_mul(v_div(g, v_add(v_set1(1), e)), v_load(up + i)));
    }
    for (; i < n; i++)
        out[i] = gate[i] / (1.0f + x3_exp_ref(0.0f - gate[i])) * up[i];
}

/* n_parts vectors of columns at a time: the state is read twice and written twice, whole cache lines of it. */
static inline __attribute__((always_inline)) void delta_columns(const int n_parts, float *s, const float *q, const float *k,
                                                                const float *v, size_t k_dim, size_t v_dim, float decay,
                                                                float beta, float *out)
{
    x3_vec m[8], o[8];

    for (int p = 0; p < n_parts; p++)
        m[p] = o[p] = v_set1(0);
    for (size_t i = 0; i < k_dim; i++)
        for (int p = 0; p < n_parts; p++) {
            float *at = s + i * v_dim + (size_t)p * X3_LANES;
            x3_vec a = v_mul(v_load(at), v_set1(decay));
            v_store(at, a);
            m[p] = v_fma(a, v_set1(k[i]), m[p]);
        }
    for (int p = 0; p < n_parts; p++)
        m[p] = v_mul(v_sub(v_load(v + (size_t)p * X3_LANES), m[p]), v_set1(beta));
    for (size_t i = 0; i < k_dim; i++)
        for (int p = 0; p < n_parts; p++) {
            float *at = s + i * v_dim + (size_t)p * X3_LANES;
            x3_vec a = v_fma(v_set1(k[i]), m[p], v_load(at));
            v_store(at, a);
            o[p] = v_fma(a, v_set1(q[i]), o[p]);
        }
    for (int p = 0; p < n_parts; p++)
        v_store(out + (size_t)p * X3_LANES, o[p]);
}

static void delta_step(float *s, const float *q, const float *k, const float *v, size_t k_dim, size_t v_dim, float decay,
                       float beta, float *out)
{
    enum { PARTS = 32 / X3_LANES };
    size_t j = 0;

    for (; j + 32 <= v_dim; j += 32)
        delta_columns(PARTS, s + j, q, k, v + j, k_dim, v_dim, decay, beta, out + j);
    for (; j + X3_LANES <= v_dim; j += X3_LANES)
        delta_columns(1, s + j, q, k, v + j, k_dim, v_dim, decay, beta, out + j);
    for (; j < v_dim; j++) {
        float m = 0, o = 0;
        for (size_t i = 0; i < k_dim; i++) {
            s[i * v_dim + j] *= decay;
            m = fmaf(s[i * v_dim + j], k[i], m);
        }
        float d = (v[j] - m) * beta;
        for (size_t i = 0; i < k_dim; i++) {
            s[i * v_dim + j] = fmaf(k[i], d, s[i * v_dim + j]);
            o = fmaf(s[i * v_dim + j], q[i], o);
        }
        out[j] = o;
    }
}

#define QUOTE2(x) #x
#define QUOTE(x) QUOTE2(x)
#define ISA_avx2 X3_ISA_AVX2
#define ISA_avx512 X3_ISA_AVX512
#define ISA_neon X3_ISA_NEON
#define ISA_PASTE2(isa) ISA_##isa
#define ISA_PASTE(isa) ISA_PASTE2(isa)

const x3_kernels X3_SIMD_NAME(kernels) = {
    .isa = ISA_PASTE(X3_ISA),
    .name = QUOTE(X3_ISA),
    .trellis_search = X3_SIMD_NAME(trellis_search),
    .panel_matmul = panel_matmul,
    .tile_decode = tile_decode,
    .tile_decode_mul1 = X3_SIMD_NAME(tile_decode_mul1),
    .hadamard = hadamard,
    .rms_norm = rms_norm,
    .softmax = softmax,
    .silu_mul = silu_mul,
    .delta_step = delta_step,
};
