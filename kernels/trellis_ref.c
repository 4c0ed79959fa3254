/* Codebook values, tile packing and the defining form of the search of trellis.h: every state, every predecessor
 * written down. */
#include "kernels/trellis.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"

float x3_codebook_value(x3_codebook codebook, uint32_t state)
{
    float v;

    if (codebook == X3_CB_MUL1) {
        /* 22 bits at most in the product and in the sum: exact in float32, then one rounding to half */
        v = (float)(1024 + x3_codebook_sum_mul1(state)) * x3_f16_to_f32(0x1EEE) + x3_f16_to_f32(0xC931);
    } else {
        uint32_t x = codebook == X3_CB_MCG ? x3_codebook_mix_mcg(state) : x3_codebook_mix_3inst(state);
        v = x3_f16_to_f32((uint16_t)x) + x3_f16_to_f32((uint16_t)(x >> 16));
    }
    return x3_f16_to_f32(x3_f32_to_f16(v));
}

void x3_codebook_values(x3_codebook codebook, float values[X3_STATES])
{
    for (uint32_t s = 0; s < X3_STATES; s++)
        values[s] = x3_codebook_value(codebook, s);
}

x3_status x3_trellis_create(x3_trellis **out, x3_codebook codebook, int K, x3_err *err)
{
    const size_t n = (size_t)1 << K, groups = X3_STATES >> K;
    x3_trellis *t = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&t, 1, sizeof *t, err));
    t->codebook = codebook;
    t->K = K;
    X3_TRY(rc, out, x3_alloc(&t->values, X3_STATES, sizeof(float), err));
    X3_TRY(rc, out, x3_alloc(&t->ordered, X3_STATES, sizeof(float), err));
    x3_codebook_values(codebook, t->values);
    for (size_t s = 0; s < X3_STATES; s++) {
        size_t group = s % groups, from = s / groups;
        t->ordered[(group / 32 * n + from) * 32 + group % 32] = t->values[s];
    }
    *out = t;
    t = NULL;
out:
    x3_trellis_free(t);
    return rc;
}

void x3_trellis_free(x3_trellis *t)
{
    if (t == NULL)
        return;
    free(t->values);
    free(t->ordered);
    free(t);
}

size_t x3_trellis_scratch_bytes(int K)
{
    const size_t groups = X3_STATES >> K;
    const int segment = K == 1 ? 8 : K == 2 ? 5 : K == 3 ? 3 : K == 4 ? 2 : 1;
    size_t fast = 2 * ((size_t)(X3_TILE_WEIGHTS / segment) + 3) * (groups + 16 * 32) * sizeof(float);
    size_t plain = 2 * groups * sizeof(float) + X3_TILE_WEIGHTS * groups;

    return x3_max_size(fast, plain);
}

/* Back pointers from[p][g]: which of the 2^K predecessors wins group g after position p. Leaves the minima after
 * the last position in m. */
static void forward(const x3_trellis *t, const float *x, int n, float *m, float *next, uint8_t *from)
{
    const int K = t->K;
    const uint32_t groups = X3_STATES >> K;

    for (int p = 0; p < n; p++) {
        for (uint32_t g = 0; g < groups; g++) {
            next[g] = INFINITY;
            from[(size_t)p * groups + g] = 0;
            for (uint32_t i = 0; i < 1u << K; i++) {
                uint32_t state = (i << (16 - K)) | g;
                float d = t->values[state] - x[p];
                float cost = fmaf(d, d, m[state >> K]);
                if (cost < next[g]) {
                    next[g] = cost;
                    from[(size_t)p * groups + g] = (uint8_t)i;
                }
            }
        }
        memcpy(m, next, groups * sizeof(float));
    }
}

static uint32_t trace(int K, const uint8_t *from, int n, int stop, uint32_t group, uint16_t *states)
{
    const uint32_t groups = X3_STATES >> K;

    for (int p = n - 1; p >= stop; p--) {
        uint32_t state = ((uint32_t)from[(size_t)p * groups + group] << (16 - K)) | group;
        states[p] = (uint16_t)state;
        group = state >> K;
    }
    return group;
}

void x3_trellis_search_ref(const x3_trellis *t, const float *x, size_t n_tiles, uint16_t *states, void *scratch)
{
    const uint32_t groups = X3_STATES >> t->K;
    float *m = scratch, *next = m + groups;
    uint8_t *from = (uint8_t *)(next + groups);
    float around[2 * X3_JOIN];

    for (size_t i = 0; i < n_tiles; i++, x += X3_TILE_WEIGHTS, states += X3_TILE_WEIGHTS) {
        uint32_t end = 0;
        for (int p = 0; p < 2 * X3_JOIN; p++)
            around[p] = x[(p + X3_TILE_WEIGHTS - X3_JOIN) % X3_TILE_WEIGHTS];
        memset(m, 0, groups * sizeof(float));
        forward(t, around, 2 * X3_JOIN, m, next, from);
        for (uint32_t g = 1; g < groups; g++)
            if (m[g] < m[end])
                end = g;
        uint32_t join = trace(t->K, from, 2 * X3_JOIN, X3_JOIN, end, states);
        for (uint32_t g = 0; g < groups; g++)
            m[g] = INFINITY;
        m[join] = 0;
        forward(t, x, X3_TILE_WEIGHTS, m, next, from);
        trace(t->K, from, X3_TILE_WEIGHTS, 0, join, states);
    }
}

void x3_tile_pack(const uint16_t states[X3_TILE_WEIGHTS], int K, uint32_t *words)
{
    memset(words, 0, (size_t)(8 * K) * sizeof *words);
    for (int p = 0; p < X3_TILE_WEIGHTS; p++) {
        uint32_t bits = states[p] & ((1u << K) - 1);
        for (int b = 0; b < K; b++) {
            int at = p * K + b;
            words[at >> 5] |= ((bits >> (K - 1 - b)) & 1) << (31 - (at & 31));
        }
    }
}

void x3_tile_unpack(const uint32_t *words, int K, uint16_t states[X3_TILE_WEIGHTS])
{
    for (int p = 0; p < X3_TILE_WEIGHTS; p++)
        states[p] = (uint16_t)x3_tile_state(words, K, p);
}
