/* The cache in BF16, INT8 and INT4: what a round trip costs, what attention over it gives, and that a row does not
 * depend on the others. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kv_cpu.h"
#include "runtime/serve/engine.h"
#include "runtime/generate.h"
#include "tests/test.h"

#define DIM 64

static const x3_kv_type packed_types[] = {X3_KV_BF16, X3_KV_INT8, X3_KV_INT4};

static void fill_normal(float *x, size_t n, const char *name)
{
    x3_rng rng;

    x3_rng_init(&rng, 5, name);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)x3_rng_normal(&rng);
}

static double error_of(const float *a, const float *b, size_t n)
{
    double error = 0, norm = 0;

    for (size_t i = 0; i < n; i++) {
        error += ((double)a[i] - b[i]) * ((double)a[i] - b[i]);
        norm += (double)b[i] * b[i];
    }
    return sqrt(error / norm);
}

/* ---- blocks ---- */

X3_TEST(kv_blocks_come_back_within_the_rounding_of_their_type)
{
    /* relative error of normal numbers: BF16 2^-9 / sqrt 3 and less; INT8 steps of largest / 127; INT4 of largest / 7 */
    static const double bounds[] = {0.0018, 0.0075, 0.11};
    float x[X3_KV_PAGE * DIM], back[X3_KV_PAGE * DIM], panel[16 * DIM];

    fill_normal(x, X3_KV_PAGE * DIM, "kv blocks");
    for (size_t t = 0; t < 3; t++) {
        const x3_kv_type type = packed_types[t];
        _Alignas(16) char keys[X3_KV_PAGE * DIM * 4], values[X3_KV_PAGE * DIM * 4];
        CHECK(x3_kv_block_bytes(type, DIM) <= sizeof keys);
        for (size_t p = 0; p < X3_KV_PAGE; p++) {
            x3_kv_pack_keys(type, x + p * DIM, DIM, p, keys);
            x3_kv_pack_values(type, x + p * DIM, DIM, p, values);
        }
        x3_kv_unpack_values(type, values, DIM, 0, X3_KV_PAGE, back, DIM);
        const double e = error_of(back, x, X3_KV_PAGE * DIM);
        CHECK_MSG(e < bounds[t] && e > bounds[t] / 4, "type %d: relative error %.4g", (int)type, e);
        for (size_t first = 0; first < X3_KV_PAGE; first += 16) { /* keys hold the same numbers */
            x3_kv_unpack_keys(type, keys, DIM, first, panel);
            for (size_t p = 0; p < 16; p++)
                for (size_t d = 0; d < DIM; d++)
                    CHECK(panel[d * 16 + p] == back[(first + p) * DIM + d]);
        }
    }
}

X3_TEST(kv_blocks_keep_zeros_extremes_and_numbers_that_are_not_finite)
{
    float x[DIM] = {0}, back[DIM];

    for (size_t t = 0; t < 3; t++) {
        const x3_kv_type type = packed_types[t];
        _Alignas(16) char block[X3_KV_PAGE * DIM * 4] = {0};
        memset(x, 0, sizeof x);
        x3_kv_pack_values(type, x, DIM, 3, block);
        x3_kv_unpack_values(type, block, DIM, 3, 4, back, DIM);
        for (size_t d = 0; d < DIM; d++)
            CHECK(back[d] == 0);
        x[0] = 3e38f, x[40] = -3e38f;
        x3_kv_pack_values(type, x, DIM, 3, block);
        x3_kv_unpack_values(type, block, DIM, 3, 4, back, DIM);
        CHECK(isfinite(back[0]) && isfinite(back[40]) && fabsf(back[0] / 3e38f - 1) < 0.07f && back[40] < -2.8e38f && back[1] == 0);
        x[40] = NAN;
        x3_kv_pack_values(type, x, DIM, 3, block);
        x3_kv_unpack_values(type, block, DIM, 3, 4, back, DIM);
        CHECK(isnan(back[40]));
    }
}

X3_TEST(kv_scales_of_int4_make_products_exact_in_bf16)
{
    x3_rng rng;

    x3_rng_init(&rng, 5, "kv scales");
    for (int i = 0; i < 1000; i++) {
        const float largest = fabsf((float)x3_rng_normal(&rng)) * 3, scale = x3_kv_scale(X3_KV_INT4, x3_kv_bits(largest));
        CHECK(scale * 7 >= largest && scale * 7 <= largest * 1.07f);
        for (int q = -7; q <= 7; q++)
            CHECK(x3_kv_float((uint32_t)x3_kv_bf16((float)q * scale) << 16) == (float)q * scale);
    }
}

/* ---- attention ---- */

#define HEADS 4
#define KV_HEADS 2
#define N 150 /* positions of a sequence */

struct layer {
    x3_kv_layer kv;
    x3_batch batch;
    x3_sequence sequence;
};

static const int32_t pages[] = {2, 0, 1};

static void open_layer(struct layer *l, x3_device *dev, x3_kv_type type)
{
    const x3_layer_desc desc = {.mixer = X3_MIXER_GQA, .gqa = {.n_kv_heads = KV_HEADS, .head_dim = DIM, .v_dim = DIM}};
    x3_err err = {0};

    CHECK_OK(x3_kv_layer_create(&l->kv, dev, &desc, 3, 0, type, &err), &err);
    CHECK(l->kv.type == type);
}

/* Rows [from, to) of a sequence through the cache. */
static void run_rows(struct layer *l, x3_device *dev, const float *q, const float *k, const float *v, size_t from, size_t to, float *out)
{
    x3_attention_args a = {.d_q = q + from * HEADS * DIM, .d_out = out + from * HEADS * DIM, .n_heads = HEADS, .kv = &l->kv, .scale = 0.125f};
    x3_err err = {0};

    l->sequence = (x3_sequence){.n_rows = to - from, .position = from, .pages = pages};
    l->batch = (x3_batch){.n_rows = to - from, .n_sequences = 1, .sequences = &l->sequence};
    CHECK_OK(dev->ops->kv_append(dev, &l->kv, &l->batch, k + from * KV_HEADS * DIM, KV_HEADS * DIM, v + from * KV_HEADS * DIM,
                                 KV_HEADS * DIM, &err), &err);
    CHECK_OK(dev->ops->attention(dev, &a, &l->batch, &err), &err);
}

X3_TEST(attention_over_packed_caches_errs_as_their_types_and_row_by_row_alike)
{
    static const double bounds[] = {0.0032, 0.012, 0.15};
    float *x = malloc((HEADS + 2 * KV_HEADS) * DIM * N * sizeof *x), *q = x, *k = q + HEADS * DIM * N, *v = k + KV_HEADS * DIM * N;
    float *exact = calloc(HEADS * DIM * N, sizeof *x), *whole = calloc(HEADS * DIM * N, sizeof *x), *apart = calloc(HEADS * DIM * N, sizeof *x);
    struct layer l;
    x3_device *dev;
    x3_err err = {0};

    fill_normal(x, (HEADS + 2 * KV_HEADS) * DIM * N, "kv attention");
    CHECK_OK(x3_device_open(&dev, "cpu", 2, &err), &err);
    open_layer(&l, dev, X3_KV_F32);
    run_rows(&l, dev, q, k, v, 0, N, exact);
    x3_kv_layer_free(&l.kv, dev);
    for (size_t t = 0; t < 3; t++) {
        open_layer(&l, dev, packed_types[t]);
        run_rows(&l, dev, q, k, v, 0, N, whole);
        x3_kv_layer_free(&l.kv, dev);
        open_layer(&l, dev, packed_types[t]);
        for (size_t at = 0, n = 1; at < N; at += n, n = n % 7 + 1)
            run_rows(&l, dev, q, k, v, at, x3_min_size(N, at + n), apart);
        x3_kv_layer_free(&l.kv, dev);
        CHECK(memcmp(whole, apart, HEADS * DIM * N * sizeof *x) == 0);
        const double e = error_of(whole, exact, HEADS * DIM * N);
        CHECK_MSG(e < bounds[t] && e > bounds[t] / 4, "type %d: relative error %.4g", (int)packed_types[t], e);
    }
    x3_device_close(dev);
    free(x);
    free(exact);
    free(whole);
    free(apart);
}

/* ---- a model ---- */

#define MODEL "tests/data/models/tiny-qwen3"
#define TOKENS 200

/* Logits of the last token of one sequence, in two pieces. */
static void run_model(x3_device *dev, const x3_checkpoint *c, x3_kv_type type, size_t first, float *logits, size_t *cache_bytes)
{
    const x3_resident_options o = {.max_positions = 256, .max_rows = 256, .max_outputs = 1, .n_pages = 4, .n_slots = 1, .kv_type = type};
    const size_t last = TOKENS - first - 1;
    x3_sequence s = {.n_rows = first, .pages = (const int32_t[]){0, 1, 2, 3}};
    x3_resident_memory m;
    x3_resident *r;
    int32_t ids[TOKENS];
    x3_err err = {0};

    for (int i = 0; i < TOKENS; i++)
        ids[i] = 300 + i * i * 37 % 3000;
    CHECK_OK(x3_resident_memory_of(&m, dev, c, &o, &err), &err);
    *cache_bytes = m.cache;
    CHECK_OK(x3_resident_create(&r, dev, c, &o, &err), &err);
    CHECK_OK(x3_resident_step(r, &s, 1, ids, first, NULL, 0, NULL, &err), &err);
    s = (x3_sequence){.n_rows = TOKENS - first, .position = first, .pages = s.pages};
    CHECK_OK(x3_resident_step(r, &s, 1, ids + first, TOKENS - first, &last, 1, logits, &err), &err);
    x3_resident_free(r);
}

X3_TEST(packed_caches_move_the_logits_of_a_model_by_their_rounding)
{
    static const double bounds[] = {0.004, 0.012, 0.12};
    x3_findings findings = {0};
    x3_checkpoint *c;
    x3_device *dev;
    x3_err err = {0};
    size_t exact_bytes, bytes;

    CHECK_OK(x3_device_open(&dev, "cpu", 2, &err), &err);
    CHECK_OK(x3_checkpoint_open(&c, MODEL, NULL, &findings, &err), &err);
    const size_t vocab = c->model->vocab;
    float *exact = malloc(vocab * sizeof *exact), *logits = malloc(vocab * sizeof *exact), *again = malloc(vocab * sizeof *exact);
    run_model(dev, c, X3_KV_F32, 100, exact, &exact_bytes);
    for (size_t t = 0; t < 3; t++) {
        run_model(dev, c, packed_types[t], 100, logits, &bytes);
        run_model(dev, c, packed_types[t], 199, again, &bytes);
        CHECK(memcmp(logits, again, vocab * sizeof *logits) == 0);
        const double e = error_of(logits, exact, vocab), part = (double)bytes / (double)exact_bytes;
        CHECK_MSG(e < bounds[t] && e > bounds[t] / 4, "type %d: relative error of the logits %.4g", (int)packed_types[t], e);
        CHECK_MSG(t == 0 ? part == 0.5 : t == 1 ? part > 0.25 && part < 0.29 : part == 9.0 / 64, "cache of %.3f", part);
    }
    free(exact);
    free(logits);
    free(again);
    x3_checkpoint_close(c);
    x3_device_close(dev);
    x3_findings_free(&findings);
}

X3_TEST(latent_caches_and_odd_heads_keep_float32)
{
    x3_layer_desc l = {.mixer = X3_MIXER_MLA, .mla = {.kv_rank = 512, .rope_dim = 64}};

    CHECK(x3_kv_layer_type(&l, X3_KV_INT8) == X3_KV_F32);
    l = (x3_layer_desc){.mixer = X3_MIXER_GQA, .gqa = {.n_kv_heads = 2, .head_dim = 80, .v_dim = 80}};
    CHECK(x3_kv_layer_type(&l, X3_KV_BF16) == X3_KV_F32);
    l.gqa.head_dim = 192, l.gqa.v_dim = 128, l.gqa.window = 100;
    CHECK(x3_kv_layer_type(&l, X3_KV_BF16) == X3_KV_BF16);
}
