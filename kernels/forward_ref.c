/* The defining forms of the forward kernels: one thread, plain C, the order of every sum written out. */
#include <math.h>
#include <string.h>

#include "formats/safetensors.h"
#include "kernels/kernels.h"

#define LANES 16

static void panel_matmul_ref(const float *x, size_t ldx, size_t n_rows, const float *panel, size_t ldp, size_t k,
                             float *y, size_t ldy, bool accumulate)
{
    for (size_t r = 0; r < n_rows; r++)
        for (size_t c = 0; c < X3_PANEL; c++) {
            float sum = accumulate ? y[r * ldy + c] : 0;
            for (size_t i = 0; i < k; i++)
                sum = fmaf(x[r * ldx + i], panel[i * ldp + c], sum);
            y[r * ldy + c] = sum;
        }
}

static void tile_decode_ref(const uint32_t *words, int K, const float *values, float *out)
{
    for (int p = 0; p < X3_TILE_WEIGHTS; p++)
        out[x3_tile_row(p) * X3_TILE + x3_tile_column(p)] = values[x3_tile_state(words, K, p)];
}

static void tile_decode_mul1_ref(const uint32_t *words, int K, float *out)
{
    for (int p = 0; p < X3_TILE_WEIGHTS; p++)
        out[x3_tile_row(p) * X3_TILE + x3_tile_column(p)] = x3_codebook_value(X3_CB_MUL1, x3_tile_state(words, K, p));
}

static void hadamard_ref(float *x, size_t n_blocks)
{
    for (size_t b = 0; b < n_blocks; b++, x += X3_HADAMARD) {
        for (size_t stride = 1; stride < X3_HADAMARD; stride *= 2)
            for (size_t i = 0; i < X3_HADAMARD; i++)
                if ((i & stride) == 0) {
                    float low = x[i], high = x[i + stride];
                    x[i] = low + high;
                    x[i + stride] = low - high;
                }
        for (size_t i = 0; i < X3_HADAMARD; i++)
            x[i] *= 0.08838834764831845f;
    }
}

static float sum_lanes(const float lanes[LANES])
{
    float s[LANES];

    memcpy(s, lanes, sizeof s);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++)
            s[i] += s[i + half];
    return s[0];
}

static void rms_norm_ref(const float *x, const float *weight, size_t n, float eps, float *out)
{
    float lanes[LANES] = {0};

    for (size_t i = 0; i < n; i++)
        lanes[i % LANES] = fmaf(x[i], x[i], lanes[i % LANES]);
    float r = 1.0f / sqrtf(sum_lanes(lanes) / (float)n + eps);
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] * r * weight[i];
}

/* Range reduction by ln 2 in two parts, then a polynomial of degree 6 (Cephes expf, S. Moshier, 1989). */
float x3_exp_ref(float x)
{
    x = x < -87.3f ? -87.3f : x;
    x = x > 88.7f ? 88.7f : x;
    float n = rintf(x * 1.44269504088896341f);
    float r = fmaf(n, -0.693359375f, x);
    r = fmaf(n, 2.12194440e-4f, r);
    float p = 1.9875691500e-4f;
    p = fmaf(p, r, 1.3981999507e-3f);
    p = fmaf(p, r, 8.3334519073e-3f);
    p = fmaf(p, r, 4.1665795894e-2f);
    p = fmaf(p, r, 1.6666665459e-1f);
    p = fmaf(p, r, 5.0000001201e-1f);
    p = fmaf(p, r * r, r) + 1.0f;
    uint32_t bits = (uint32_t)((int32_t)n + 127) << 23;
    float scale;
    memcpy(&scale, &bits, sizeof scale);
    return p * scale;
}

static float softmax_ref(float *s, size_t n, float scale, const float *sink)
{
    float lanes[LANES] = {0};
    float m = sink != NULL ? *sink : -INFINITY;

    for (size_t i = 0; i < n; i++) {
        s[i] *= scale;
        m = s[i] > m ? s[i] : m;
    }
    for (size_t i = 0; i < n; i++) {
        s[i] = x3_exp_ref(s[i] - m);
        lanes[i % LANES] += s[i];
    }
    float sum = sum_lanes(lanes);
    return sink != NULL ? sum + x3_exp_ref(*sink - m) : sum;
}

static void silu_mul_ref(const float *gate, const float *up, size_t n, float *out)
{
    for (size_t i = 0; i < n; i++)
        out[i] = gate[i] / (1.0f + x3_exp_ref(0.0f - gate[i])) * up[i];
}

static void delta_step_ref(float *s, const float *q, const float *k, const float *v, size_t k_dim, size_t v_dim, float decay,
                           float beta, float *out)
{
    for (size_t j = 0; j < v_dim; j++) {
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

float x3_dense_value(const void *weight, x3_dense_type type, size_t index)
{
    return type == X3_DENSE_F32    ? ((const float *)weight)[index]
           : type == X3_DENSE_BF16 ? x3_bf16_to_f32(((const uint16_t *)weight)[index])
                                   : x3_f16_to_f32(((const uint16_t *)weight)[index]);
}

typedef uint16_t eight __attribute__((vector_size(16)));

#define MIX(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#define LOW(a, b) MIX(a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define HIGH(a, b) MIX(a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define LOW_PAIRS(a, b) MIX(a, b, 0, 1, 8, 9, 2, 3, 10, 11)
#define HIGH_PAIRS(a, b) MIX(a, b, 4, 5, 12, 13, 6, 7, 14, 15)
#define LOW_HALVES(a, b) MIX(a, b, 0, 1, 2, 3, 8, 9, 10, 11)
#define HIGH_HALVES(a, b) MIX(a, b, 4, 5, 6, 7, 12, 13, 14, 15)

/* Eight BF16 as float32: zeros below them. */
static void widen_8(eight v, float *out)
{
    const eight zero = {0}, low = LOW(zero, v), high = HIGH(zero, v);

    memcpy(out, &low, sizeof low);
    memcpy(out + 4, &high, sizeof high);
}

/* Eight inputs of eight outputs of a BF16 weight, turned: out[i * 16 + c]. A step of one row spends its time here. */
static void turn_8x8(const uint16_t *w, size_t n_in, float *out)
{
    eight r[8], pairs[8], fours[8];

    for (size_t c = 0; c < 8; c++)
        memcpy(&r[c], w + c * n_in, sizeof r[c]);
    for (size_t c = 0; c < 8; c += 2) { /* inputs 0 .. 3, 4 .. 7 of two outputs */
        pairs[c] = LOW(r[c], r[c + 1]);
        pairs[c + 1] = HIGH(r[c], r[c + 1]);
    }
    for (size_t c = 0; c < 8; c += 4) { /* inputs 0, 1 | 2, 3 | 4, 5 | 6, 7 of four outputs */
        fours[c] = LOW_PAIRS(pairs[c], pairs[c + 2]);
        fours[c + 1] = HIGH_PAIRS(pairs[c], pairs[c + 2]);
        fours[c + 2] = LOW_PAIRS(pairs[c + 1], pairs[c + 3]);
        fours[c + 3] = HIGH_PAIRS(pairs[c + 1], pairs[c + 3]);
    }
    for (size_t i = 0; i < 8; i += 2) {
        widen_8(LOW_HALVES(fours[i / 2], fours[i / 2 + 4]), out + i * X3_PANEL);
        widen_8(HIGH_HALVES(fours[i / 2], fours[i / 2 + 4]), out + (i + 1) * X3_PANEL);
    }
}

void x3_panel_pack(const void *weight, x3_dense_type type, size_t n_out, size_t n_in, size_t first_out, size_t first_in,
                   size_t k, float *out)
{
    const size_t whole = type == X3_DENSE_BF16 && first_out + X3_PANEL <= n_out ? k / 8 * 8 : 0;

    for (size_t i = 0; i < whole; i += 8)
        for (size_t c = 0; c < X3_PANEL; c += 8)
            turn_8x8((const uint16_t *)weight + (first_out + c) * n_in + first_in + i, n_in, out + i * X3_PANEL + c);
    for (size_t c = 0; c < X3_PANEL; c++) {
        size_t at = (first_out + c) * n_in + first_in;
        if (first_out + c >= n_out) {
            for (size_t i = 0; i < k; i++)
                out[i * X3_PANEL + c] = 0;
        } else if (type == X3_DENSE_BF16) {
            const uint16_t *w = (const uint16_t *)weight + at;
            for (size_t i = whole; i < k; i++)
                out[i * X3_PANEL + c] = x3_bf16_to_f32(w[i]);
        } else if (type == X3_DENSE_F16) {
            const uint16_t *w = (const uint16_t *)weight + at;
            for (size_t i = 0; i < k; i++)
                out[i * X3_PANEL + c] = x3_f16_to_f32(w[i]);
        } else {
            const float *w = (const float *)weight + at;
            for (size_t i = 0; i < k; i++)
                out[i * X3_PANEL + c] = w[i];
        }
    }
}

const x3_kernels x3_kernels_ref = {
    .isa = X3_ISA_REF,
    .name = "ref",
    .trellis_search = x3_trellis_search_ref,
    .panel_matmul = panel_matmul_ref,
    .tile_decode = tile_decode_ref,
    .tile_decode_mul1 = tile_decode_mul1_ref,
    .hadamard = hadamard_ref,
    .rms_norm = rms_norm_ref,
    .softmax = softmax_ref,
    .silu_mul = silu_mul_ref,
    .delta_step = delta_step_ref,
};
