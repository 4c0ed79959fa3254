/* Every form of every kernel against its reference form, bit for bit, and the properties that define them. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "tests/test.h"

static float *random_floats(const char *name, size_t n)
{
    x3_err err = {0};
    float *x = NULL;
    x3_rng rng;

    CHECK_OK(x3_alloc(&x, n, sizeof *x, &err), &err);
    x3_rng_init(&rng, 1, name);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)x3_rng_normal(&rng);
    return x;
}

static bool same_bits(const float *a, const float *b, size_t n)
{
    return memcmp(a, b, n * sizeof *a) == 0;
}

#define FOR_EACH_ISA(k)                                             \
    for (int isa_ = X3_ISA_REF + 1; isa_ < X3_N_ISAS; isa_++)       \
        for (const x3_kernels *k = x3_kernels_find((x3_isa)isa_); k != NULL; k = NULL)

X3_TEST(tile_positions_are_a_permutation_of_rows_and_columns)
{
    bool seen[256] = {false};

    for (int p = 0; p < 256; p++) {
        int row = x3_tile_row(p), column = x3_tile_column(p);
        CHECK(row >= 0 && row < 16 && column >= 0 && column < 16);
        CHECK(!seen[row * 16 + column]);
        seen[row * 16 + column] = true;
        CHECK(x3_tile_position(row, column) == p);
    }
}

X3_TEST(packing_a_path_and_unpacking_it_gives_the_same_states)
{
    x3_rng rng;

    x3_rng_init(&rng, 7, "pack");
    for (int K = 1; K <= X3_K_MAX; K++)
        for (int round = 0; round < 20; round++) {
            uint32_t words[64], again[64];
            uint16_t states[256];
            for (int i = 0; i < 8 * K; i++)
                words[i] = (uint32_t)x3_rng_next(&rng);
            x3_tile_unpack(words, K, states);
            for (int p = 0; p < 256; p++) {
                uint32_t before = states[(p + 255) % 256];
                CHECK((uint32_t)(states[p] >> K) == (before & ((1u << (16 - K)) - 1)));
            }
            x3_tile_pack(states, K, again);
            CHECK(memcmp(words, again, (size_t)(32 * K)) == 0);
        }
}

static void check_search(x3_codebook codebook, int K, size_t n_tiles)
{
    x3_err err = {0};
    x3_trellis *t = NULL;
    void *scratch = NULL;
    float *x = random_floats("search", n_tiles * 256);
    uint16_t *expected = NULL, *got = NULL;

    CHECK_OK(x3_trellis_create(&t, codebook, K, &err), &err);
    CHECK_OK(x3_alloc(&scratch, x3_trellis_scratch_bytes(K), 1, &err), &err);
    CHECK_OK(x3_alloc(&expected, n_tiles * 256, 2, &err), &err);
    CHECK_OK(x3_alloc(&got, n_tiles * 256, 2, &err), &err);
    x3_trellis_search_ref(t, x, n_tiles, expected, scratch);
    for (size_t i = 0; i < n_tiles; i++)
        for (int p = 0; p < 256; p++)
            CHECK_MSG((uint32_t)(expected[i * 256 + (size_t)p] >> K) ==
                          (expected[i * 256 + (size_t)(p + 255) % 256] & ((1u << (16 - K)) - 1)),
                      "K=%d tile %zu: the path breaks at position %d", K, i, p);
    FOR_EACH_ISA (k) {
        memset(got, 0, n_tiles * 512);
        k->trellis_search(t, x, n_tiles, got, scratch);
        CHECK_MSG(memcmp(expected, got, n_tiles * 512) == 0, "%s, K=%d: other codes than the reference", k->name, K);
    }
    x3_trellis_free(t);
    free(scratch);
    free(expected);
    free(got);
    free(x);
}

X3_TEST(trellis_search_gives_the_reference_codes_for_every_k_and_codebook)
{
    for (int K = 1; K <= X3_K_MAX; K++)
        for (int cb = 0; cb < 3; cb++)
            check_search((x3_codebook)cb, K, cb == 2 ? 3 : 1);
}

X3_TEST(trellis_search_recovers_a_tile_that_lies_on_a_path)
{
    for (int K = 1; K <= X3_K_MAX; K++) {
        x3_err err = {0};
        x3_trellis *t = NULL;
        void *scratch = NULL;
        uint32_t words[64];
        uint16_t states[256], got[256];
        float x[256];
        x3_rng rng;
        x3_rng_init(&rng, (uint64_t)K, "lossless");
        CHECK_OK(x3_trellis_create(&t, X3_CB_MUL1, K, &err), &err);
        CHECK_OK(x3_alloc(&scratch, x3_trellis_scratch_bytes(K), 1, &err), &err);
        for (int i = 0; i < 8 * K; i++)
            words[i] = (uint32_t)x3_rng_next(&rng);
        x3_tile_unpack(words, K, states);
        for (int p = 0; p < 256; p++)
            x[p] = t->values[states[p]];
        x3_kernels_best()->trellis_search(t, x, 1, got, scratch);
        for (int p = 0; p < 256; p++)
            CHECK_MSG(t->values[got[p]] == x[p], "K=%d: position %d decodes to another value", K, p);
        x3_trellis_free(t);
        free(scratch);
    }
}

/* Mean squared error at the best scale, design/quality.md (1,536 tiles). Here 24 tiles: standard error 2 %. */
X3_TEST(trellis_search_meets_the_published_error)
{
    static const struct {
        int K;
        double scale, error;
    } known[] = {{2, 1.02, .06813}, {3, .94, .01729}, {4, .90, .00443}, {6, .83, 3.0e-4}};
    const size_t n = 24 * 256;
    x3_test_skip_if_emulated();
    float *x = random_floats("error", n);

    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++) {
        x3_err err = {0};
        x3_trellis *t = NULL;
        void *scratch = NULL;
        uint16_t *states = NULL;
        float *scaled = NULL;
        double sum = 0;
        CHECK_OK(x3_trellis_create(&t, X3_CB_MUL1, known[i].K, &err), &err);
        CHECK_OK(x3_alloc(&scratch, x3_trellis_scratch_bytes(known[i].K), 1, &err), &err);
        CHECK_OK(x3_alloc(&states, n, 2, &err), &err);
        CHECK_OK(x3_alloc(&scaled, n, 4, &err), &err);
        for (size_t j = 0; j < n; j++)
            scaled[j] = x[j] * (float)known[i].scale;
        x3_kernels_best()->trellis_search(t, scaled, n / 256, states, scratch);
        for (size_t j = 0; j < n; j++)
            sum += pow((t->values[states[j]] - scaled[j]) / known[i].scale, 2);
        CHECK_MSG(fabs(sum / (double)n / known[i].error - 1) < 0.05, "K=%d: error %.6g, expected about %.6g",
                  known[i].K, sum / (double)n, known[i].error);
        x3_trellis_free(t);
        free(scratch);
        free(states);
        free(scaled);
    }
    free(x);
}

X3_TEST(panel_matmul_equals_the_reference_and_does_not_depend_on_other_rows)
{
    enum { ROWS = 23, K = 77, LDX = 80, LDY = 24 };
    float *x = random_floats("x", ROWS * LDX), *w = random_floats("w", K * X3_PANEL), *y0 = random_floats("y", ROWS * LDY);
    float expected[ROWS * LDY], got[ROWS * LDY];

    for (int accumulate = 0; accumulate < 2; accumulate++) {
        memcpy(expected, y0, sizeof expected);
        x3_kernels_ref.panel_matmul(x, LDX, ROWS, w, X3_PANEL, K, expected, LDY, accumulate);
        FOR_EACH_ISA (k) {
            memcpy(got, y0, sizeof got);
            k->panel_matmul(x, LDX, ROWS, w, X3_PANEL, K, got, LDY, accumulate);
            CHECK_MSG(same_bits(expected, got, ROWS * LDY), "%s", k->name);
            for (size_t first = 0; first < ROWS; first++)
                for (size_t n = 1; first + n <= ROWS; n += 3) {
                    memcpy(got, y0, sizeof got);
                    k->panel_matmul(x + first * LDX, LDX, n, w, X3_PANEL, K, got + first * LDY, LDY, accumulate);
                    for (size_t r = first; r < first + n; r++)
                        CHECK(same_bits(expected + r * LDY, got + r * LDY, X3_PANEL));
                }
            memcpy(got, y0, sizeof got); /* the sum over k may be cut anywhere */
            k->panel_matmul(x, LDX, ROWS, w, X3_PANEL, 30, got, LDY, accumulate);
            k->panel_matmul(x + 30, LDX, ROWS, w + 30 * X3_PANEL, X3_PANEL, K - 30, got, LDY, true);
            CHECK(same_bits(expected, got, ROWS * LDY));
        }
    }
    free(x);
    free(w);
    free(y0);
}

X3_TEST(tile_decode_equals_the_reference)
{
    float *values = random_floats("values", X3_STATES);
    float expected[256], got[256];
    uint32_t words[64];
    x3_rng rng;

    x3_rng_init(&rng, 3, "decode");
    for (int K = 1; K <= X3_K_MAX; K++)
        for (int round = 0; round < 10; round++) {
            for (int i = 0; i < 8 * K; i++)
                words[i] = (uint32_t)x3_rng_next(&rng);
            x3_kernels_ref.tile_decode(words, K, values, expected);
            FOR_EACH_ISA (k) {
                k->tile_decode(words, K, values, got);
                CHECK_MSG(same_bits(expected, got, 256), "%s, K=%d", k->name, K);
            }
        }
    free(values);
}

/* At K = 8 a state is two neighbouring bytes: all 65,536 stand somewhere. Then every K, over random words. */
X3_TEST(mul1_is_computed_to_the_bits_of_its_table)
{
    float *values = malloc(X3_STATES * sizeof *values), expected[256], got[256];
    bool *seen = calloc(X3_STATES, sizeof *seen);
    uint32_t words[64];
    size_t n = 0;
    x3_rng rng;

    x3_rng_init(&rng, 7, "mul1");
    x3_codebook_values(X3_CB_MUL1, values);
    for (int tile = 0; tile < 1024; tile++) {
        const int K = tile < 512 ? 8 : 1 + tile % 8;
        for (int i = 0; i < 8 * K; i++) {
            const uint32_t x = (uint32_t)tile / 2, y = 2 * (uint32_t)i + (uint32_t)tile % 2 * 128; /* bytes x y x y+1 */
            words[i] = tile >= 512 ? (uint32_t)x3_rng_next(&rng) : x * 0x01000100u | y << 16 | (y + 1);
        }
        for (int p = 0; p < 256; p++)
            seen[x3_tile_state(words, K, p)] = true;
        x3_kernels_ref.tile_decode(words, K, values, expected);
        x3_kernels_ref.tile_decode_mul1(words, K, got);
        CHECK(same_bits(expected, got, 256));
        FOR_EACH_ISA (k) {
            k->tile_decode_mul1(words, K, got);
            CHECK_MSG(same_bits(expected, got, 256), "%s, K=%d", k->name, K);
        }
    }
    for (size_t s = 0; s < X3_STATES; s++)
        n += seen[s];
    CHECK_MSG(n == X3_STATES, "%zu states of %d were decoded", n, X3_STATES);
    free(values);
    free(seen);
}

X3_TEST(hadamard_equals_the_reference_and_twice_is_the_identity)
{
    enum { N = 5 * X3_HADAMARD };
    float *x = random_floats("hadamard", N);
    float expected[N], got[N];

    memcpy(expected, x, sizeof expected);
    x3_kernels_ref.hadamard(expected, 5);
    for (int i = 0; i < X3_HADAMARD; i++) { /* row of the matrix: sign (-1)^popcount(i & j) */
        double sum = 0;
        for (int j = 0; j < X3_HADAMARD; j++)
            sum += __builtin_parity((unsigned)(i & j)) ? -x[j] : x[j];
        CHECK(fabs(sum / sqrt(128) - expected[i]) < 2e-6);
    }
    FOR_EACH_ISA (k) {
        memcpy(got, x, sizeof got);
        k->hadamard(got, 5);
        CHECK_MSG(same_bits(expected, got, N), "%s", k->name);
        k->hadamard(got, 5);
        for (int i = 0; i < N; i++)
            CHECK(fabsf(got[i] - x[i]) < 2e-6f);
    }
    free(x);
}

X3_TEST(norms_softmax_and_silu_equal_the_reference_at_every_length)
{
    float *x = random_floats("x", 600), *w = random_floats("w", 600);
    float expected[600], got[600];
    const float sink = 0.7f;

    for (size_t n = 1; n < 600; n = n < 70 ? n + 1 : n * 2 - 13) {
        FOR_EACH_ISA (k) {
            x3_kernels_ref.rms_norm(x, w, n, 1e-6f, expected);
            k->rms_norm(x, w, n, 1e-6f, got);
            CHECK_MSG(same_bits(expected, got, n), "%s rms_norm of %zu", k->name, n);
            x3_kernels_ref.silu_mul(x, w, n, expected);
            k->silu_mul(x, w, n, got);
            CHECK_MSG(same_bits(expected, got, n), "%s silu_mul of %zu", k->name, n);
            for (int with_sink = 0; with_sink < 2; with_sink++) {
                memcpy(expected, x, n * sizeof *x);
                memcpy(got, x, n * sizeof *x);
                float a = x3_kernels_ref.softmax(expected, n, 3.5f, with_sink ? &sink : NULL);
                float b = k->softmax(got, n, 3.5f, with_sink ? &sink : NULL);
                CHECK_MSG(same_bits(expected, got, n) && a == b, "%s softmax of %zu", k->name, n);
            }
        }
        double sum = 0, squares = 0;
        memcpy(expected, x, n * sizeof *x);
        float total = x3_kernels_ref.softmax(expected, n, 1, NULL);
        for (size_t i = 0; i < n; i++) {
            sum += expected[i];
            squares += (double)x[i] * x[i];
        }
        CHECK(fabs(sum / total - 1) < 1e-5);
        x3_kernels_ref.rms_norm(x, w, n, 1e-6f, expected);
        for (size_t i = 0; i < n; i++)
            CHECK(fabs(expected[i] - x[i] * w[i] / sqrt(squares / (double)n + 1e-6)) < 1e-5 * (1 + fabsf(expected[i])));
    }
    free(x);
    free(w);
}

X3_TEST(exp_is_within_two_ulp)
{
    for (float x = -87; x < 88; x += 0.0137f) {
        double exact = exp((double)x);
        CHECK_MSG(fabs(x3_exp_ref(x) / exact - 1) < 2.5e-7, "exp(%g) = %.9g, expected %.9g", (double)x,
                  (double)x3_exp_ref(x), exact);
    }
}
