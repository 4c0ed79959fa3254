/* Device operations of mixers against plain float64 forms, and properties that tie them together. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/kernels.h"
#include "runtime/forward.h"
#include "tests/family_check.h"
#include "tests/test.h"

static float *random_floats(const char *name, size_t n)
{
    x3_err err = {0};
    float *x = NULL;
    x3_rng rng;

    CHECK_OK(x3_alloc(&x, n, sizeof *x, &err), &err);
    x3_rng_init(&rng, 3, name);
    for (size_t i = 0; i < n; i++)
        x[i] = (float)x3_rng_normal(&rng);
    return x;
}

static double largest_difference(const float *a, const float *b, size_t n)
{
    double worst = 0;

    for (size_t i = 0; i < n; i++) {
        CHECK(isfinite(a[i]) && isfinite(b[i]));
        worst = fmax(worst, fabs((double)a[i] - (double)b[i]));
    }
    return worst;
}

/* The CPU device computes in host memory, so tests hand it their arrays. */
static const x3_device_ops *ops_of(const x3_device *dev)
{
    return dev->ops;
}

X3_TEST(linear_heads_is_a_linear_of_each_heads_rows)
{
    enum { HEADS = 3, NOPE = 20, V = 28, RANK = 37, ROWS = 600 };
    x3_device *dev = x3_test_open_device();
    float *w = random_floats("w", HEADS * (NOPE + V) * RANK), *x = random_floats("x", ROWS * HEADS * NOPE);
    float *wide = malloc(ROWS * HEADS * RANK * sizeof *wide), *narrow = malloc(ROWS * HEADS * V * sizeof *narrow);
    float *expected = malloc(ROWS * V * sizeof *expected);
    x3_weight weight = {.kind = X3_WEIGHT_F32, .n_in = RANK, .n_out = HEADS * (NOPE + V), .n_in_padded = RANK,
                        .n_out_padded = HEADS * (NOPE + V), .data = w};
    x3_heads_args in = {.w = &weight, .n_heads = HEADS, .stride = NOPE + V, .n = NOPE, .transposed = true, .d_x = x,
                        .ldx = HEADS * NOPE, .x_stride = NOPE, .n_rows = ROWS, .d_y = wide, .ldy = HEADS * RANK,
                        .y_stride = RANK};
    x3_heads_args out = {.w = &weight, .n_heads = HEADS, .first = NOPE, .stride = NOPE + V, .n = V, .d_x = wide,
                         .ldx = HEADS * RANK, .x_stride = RANK, .n_rows = ROWS, .d_y = narrow, .ldy = HEADS * V,
                         .y_stride = V};
    x3_err err = {0};

    CHECK_OK(ops_of(dev)->linear_heads(dev, &in, &err), &err);
    for (size_t r = 0; r < ROWS; r++)
        for (size_t h = 0; h < HEADS; h++)
            for (size_t c = 0; c < RANK; c++) {
                double sum = 0;
                for (size_t i = 0; i < NOPE; i++)
                    sum += (double)x[r * HEADS * NOPE + h * NOPE + i] * (double)w[(h * (NOPE + V) + i) * RANK + c];
                CHECK(fabs(sum - (double)wide[r * HEADS * RANK + h * RANK + c]) < 2e-5);
            }
    CHECK_OK(ops_of(dev)->linear_heads(dev, &out, &err), &err);
    for (size_t h = 0; h < HEADS; h++) { /* bit for bit the plain linear over the same rows */
        x3_weight one = {.kind = X3_WEIGHT_F32, .n_in = RANK, .n_out = V, .n_in_padded = RANK, .n_out_padded = V,
                         .data = w + (h * (NOPE + V) + NOPE) * RANK};
        CHECK_OK(ops_of(dev)->linear(dev, &one, wide + h * RANK, HEADS * RANK, ROWS, expected, V, &err), &err);
        for (size_t r = 0; r < ROWS; r++)
            CHECK(memcmp(expected + r * V, narrow + (r * HEADS + h) * V, V * sizeof *narrow) == 0);
    }
    weight.kind = X3_WEIGHT_EXL3;
    CHECK_FAILS(ops_of(dev)->linear_heads(dev, &out, &err), &err, "dense");
    free(w);
    free(x);
    free(wide);
    free(narrow);
    free(expected);
    x3_device_close(dev);
}

/* ---- attention over one KV head ---- */

enum { POSITIONS = 150, HEADS = 70, K_DIM = 40, V_DIM = 24, PAGES = 3 };

struct cache {
    x3_kv_layer kv;
    int32_t pages[PAGES];
    x3_sequence sequence;
    x3_batch batch;
    float *keys, *values, *q, *out;
};

/* Keys and values of POSITIONS positions in scattered pages; latent: the values are the first dimensions of the keys. */
static void make_cache(struct cache *c, x3_device *dev, bool latent)
{
    x3_err err = {0};

    *c = (struct cache){.pages = {2, 0, 1}};
    c->kv = (x3_kv_layer){.n_kv_heads = 1, .k_dim = K_DIM, .v_dim = V_DIM};
    CHECK_OK(x3_device_floats(dev, &c->kv.d_keys, PAGES * X3_KV_PAGE * K_DIM, &err), &err);
    if (!latent)
        CHECK_OK(x3_device_floats(dev, &c->kv.d_values, PAGES * X3_KV_PAGE * V_DIM + X3_PANEL, &err), &err);
    c->sequence = (x3_sequence){.n_rows = POSITIONS, .pages = c->pages};
    c->batch = (x3_batch){.n_rows = POSITIONS, .n_sequences = 1, .sequences = &c->sequence};
    c->keys = random_floats("keys", POSITIONS * K_DIM);
    c->values = malloc(POSITIONS * V_DIM * sizeof *c->values);
    for (size_t p = 0; p < POSITIONS; p++)
        memcpy(c->values + p * V_DIM, c->keys + p * K_DIM, V_DIM * sizeof *c->values);
    c->q = random_floats("q", POSITIONS * HEADS * K_DIM);
    c->out = malloc(POSITIONS * HEADS * V_DIM * sizeof *c->out);
    CHECK_OK(dev->ops->kv_append(dev, &c->kv, &c->batch, c->keys, K_DIM, c->values, V_DIM, &err), &err);
}

static void free_cache(struct cache *c, x3_device *dev)
{
    x3_kv_layer_free(&c->kv, dev);
    free(c->keys);
    free(c->values);
    free(c->q);
    free(c->out);
}

/* Attention of row p, head h over the positions for which seen[] is set, in float64. */
static double plain_difference(const struct cache *c, size_t p, size_t h, const bool *seen, float scale)
{
    double weight[POSITIONS], most = -INFINITY, sum = 0, worst = 0;

    for (size_t t = 0; t <= p; t++) {
        double dot = 0;
        for (size_t i = 0; i < K_DIM; i++)
            dot += (double)c->q[(p * HEADS + h) * K_DIM + i] * (double)c->keys[t * K_DIM + i];
        weight[t] = dot * (double)scale;
        if (seen[t])
            most = fmax(most, weight[t]);
    }
    for (size_t t = 0; t <= p; t++) {
        weight[t] = seen[t] ? exp(weight[t] - most) : 0;
        sum += weight[t];
    }
    for (size_t i = 0; i < V_DIM; i++) {
        double v = 0;
        for (size_t t = 0; t <= p; t++)
            v += weight[t] / sum * (double)c->keys[t * K_DIM + i];
        worst = fmax(worst, fabs(v - (double)c->out[(p * HEADS + h) * V_DIM + i]));
    }
    return worst;
}

X3_TEST(attention_of_seventy_heads_on_one_kv_head_with_and_without_stored_values)
{
    x3_device *dev = x3_test_open_device();
    struct cache latent, stored;
    bool all[POSITIONS];
    x3_err err = {0};

    make_cache(&latent, dev, true);
    make_cache(&stored, dev, false);
    x3_attention_args a = {.d_q = latent.q, .d_out = latent.out, .n_heads = HEADS, .kv = &latent.kv, .scale = 0.1f};
    CHECK_OK(dev->ops->attention(dev, &a, &latent.batch, &err), &err);
    a.d_out = stored.out;
    a.kv = &stored.kv;
    CHECK_OK(dev->ops->attention(dev, &a, &stored.batch, &err), &err);
    CHECK(memcmp(latent.out, stored.out, POSITIONS * HEADS * V_DIM * sizeof *latent.out) == 0);
    memset(all, 1, sizeof all);
    for (size_t p = 0; p < POSITIONS; p += 29)
        for (size_t h = 0; h < HEADS; h += 23)
            CHECK(plain_difference(&latent, p, h, all, 0.1f) < 2e-6);
    free_cache(&latent, dev);
    free_cache(&stored, dev);
    x3_device_close(dev);
}

X3_TEST(attention_over_a_selection_sees_the_selection_alone)
{
    enum { SELECTED = 40 };
    x3_device *dev = x3_test_open_device();
    int32_t *selected = malloc(POSITIONS * SELECTED * sizeof *selected);
    struct cache c;
    bool seen[POSITIONS];
    x3_err err = {0};

    for (int stored = 0; stored < 2; stored++) {
        make_cache(&c, dev, stored == 0);
        for (size_t p = 0; p < POSITIONS; p++)
            for (size_t i = 0; i < SELECTED; i++) /* of an early row: nonsense, which must not be read */
                selected[p * SELECTED + i] = p < SELECTED ? -7 : (int32_t)(i * (p + 1) / SELECTED);
        x3_attention_args a = {.d_q = c.q, .d_out = c.out, .n_heads = HEADS, .kv = &c.kv, .scale = 0.2f,
                               .d_selected = selected, .n_selected = SELECTED};
        CHECK_OK(dev->ops->attention(dev, &a, &c.batch, &err), &err);
        for (size_t p = 0; p < POSITIONS; p += 7) {
            for (size_t t = 0; t <= p; t++)
                seen[t] = p < SELECTED;
            for (size_t i = 0; p >= SELECTED && i < SELECTED; i++)
                seen[selected[p * SELECTED + i]] = true;
            for (size_t h = 0; h < HEADS; h += 31)
                CHECK(plain_difference(&c, p, h, seen, 0.2f) < 2e-6);
        }
        a.window = 5;
        CHECK_FAILS(dev->ops->attention(dev, &a, &c.batch, &err), &err, "no window");
        free_cache(&c, dev);
    }
    free(selected);
    x3_device_close(dev);
}

/* ---- selection ---- */

static int by_value(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return x < y ? 1 : x > y ? -1 : 0;
}

/* Scores are small whole numbers, so there are ties everywhere and float32 has no rounding. */
X3_TEST(selection_takes_the_highest_scores_and_of_equal_ones_the_first)
{
    enum { DIM = 24, INDEX_HEADS = 5, SELECTED = 11 };
    x3_device *dev = x3_test_open_device();
    int32_t pages[PAGES] = {1, 2, 0}, *selected = malloc(POSITIONS * SELECTED * sizeof *selected);
    x3_kv_layer kv = {.index_dim = DIM}, keys = {.n_kv_heads = 1, .k_dim = DIM};
    x3_sequence sequence = {.n_rows = POSITIONS, .pages = pages};
    x3_batch batch = {.n_rows = POSITIONS, .n_sequences = 1, .sequences = &sequence};
    float *k = random_floats("index k", POSITIONS * DIM), *q = random_floats("index q", POSITIONS * INDEX_HEADS * DIM);
    float *w = random_floats("index w", POSITIONS * INDEX_HEADS);
    x3_err err = {0};

    for (size_t i = 0; i < POSITIONS * DIM; i++)
        k[i] = roundf(k[i] * 0.7f);
    for (size_t i = 0; i < POSITIONS * INDEX_HEADS * DIM; i++)
        q[i] = roundf(q[i] * 0.7f);
    for (size_t i = 0; i < POSITIONS * INDEX_HEADS; i++)
        w[i] = roundf(w[i]);
    CHECK_OK(x3_device_floats(dev, &kv.d_index_keys, PAGES * X3_KV_PAGE * DIM, &err), &err);
    keys.d_keys = kv.d_index_keys;
    CHECK_OK(dev->ops->kv_append(dev, &keys, &batch, k, DIM, NULL, 0, &err), &err);
    x3_select_args a = {.d_q = q, .d_weights = w, .n_heads = INDEX_HEADS, .n_selected = SELECTED, .kv = &kv,
                        .d_selected = selected};
    CHECK_OK(dev->ops->select(dev, &a, &batch, &err), &err);
    for (size_t p = SELECTED; p < POSITIONS; p++) {
        double scores[POSITIONS], sorted[POSITIONS];
        size_t above = 0, n = 0;
        for (size_t t = 0; t <= p; t++) {
            scores[t] = 0;
            for (size_t h = 0; h < INDEX_HEADS; h++) {
                double dot = 0;
                for (size_t i = 0; i < DIM; i++)
                    dot += (double)q[(p * INDEX_HEADS + h) * DIM + i] * (double)k[t * DIM + i];
                scores[t] += (double)w[p * INDEX_HEADS + h] * fmax(dot, 0);
            }
            sorted[t] = scores[t];
        }
        qsort(sorted, p + 1, sizeof *sorted, by_value);
        const double last = sorted[SELECTED - 1];
        for (size_t t = 0; t <= p; t++)
            above += scores[t] > last;
        size_t ties = SELECTED - above; /* that many of the first positions with the last score */
        for (size_t t = 0; t <= p; t++)
            if (scores[t] > last || (scores[t] == last && ties-- > 0)) {
                CHECK_MSG(selected[p * SELECTED + n] == (int32_t)t, "row %zu: number %zu is %d, expected %zu", p, n,
                          selected[p * SELECTED + n], t);
                if (++n == SELECTED)
                    break;
            } else if (scores[t] == last) {
                ties = 0;
            }
        CHECK(n == SELECTED);
    }
    x3_device_free(dev, kv.d_index_keys);
    free(selected);
    free(k);
    free(q);
    free(w);
    x3_device_close(dev);
}

/* ---- delta net ---- */

X3_TEST(delta_step_has_the_same_bits_in_every_form)
{
    static const size_t sizes[][2] = {{128, 128}, {64, 48}, {24, 17}, {5, 3}, {33, 40}};

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        const size_t k_dim = sizes[i][0], v_dim = sizes[i][1];
        float *s = random_floats("state", k_dim * v_dim), *q = random_floats("q", k_dim), *k = random_floats("k", k_dim);
        float *v = random_floats("v", v_dim), *out = calloc(v_dim, sizeof *out), *again = calloc(v_dim, sizeof *again);
        float *t = malloc(k_dim * v_dim * sizeof *t), *start = malloc(k_dim * v_dim * sizeof *start);
        memcpy(start, s, k_dim * v_dim * sizeof *s);
        x3_kernels_ref.delta_step(s, q, k, v, k_dim, v_dim, 0.93f, 0.4f, out);
        for (int isa = X3_ISA_REF + 1; isa < X3_N_ISAS; isa++) {
            const x3_kernels *kernels = x3_kernels_find((x3_isa)isa);
            if (kernels == NULL)
                continue;
            memcpy(t, start, k_dim * v_dim * sizeof *t);
            kernels->delta_step(t, q, k, v, k_dim, v_dim, 0.93f, 0.4f, again);
            CHECK_MSG(memcmp(s, t, k_dim * v_dim * sizeof *s) == 0 && memcmp(out, again, v_dim * sizeof *out) == 0,
                      "%s: other bits for %zu x %zu", kernels->name, k_dim, v_dim);
        }
        free(s);
        free(q);
        free(k);
        free(v);
        free(out);
        free(again);
        free(t);
        free(start);
    }
}

/* A key of length one and beta = 1: what was written is what the same query reads, whatever was there before. */
X3_TEST(delta_rule_reads_back_what_it_has_just_written)
{
    enum { DIM = 16 };
    float *s = random_floats("memory", DIM * DIM), *k = random_floats("key", DIM), *v = random_floats("value", DIM), out[DIM];
    double length = 0;

    for (size_t i = 0; i < DIM; i++)
        length += (double)k[i] * (double)k[i];
    for (size_t i = 0; i < DIM; i++)
        k[i] = (float)((double)k[i] / sqrt(length));
    x3_kernels_best()->delta_step(s, k, k, v, DIM, DIM, 0.5f, 1, out);
    CHECK(largest_difference(out, v, DIM) < 2e-6);
    free(s);
    free(k);
    free(v);
}

X3_TEST(convolution_and_delta_rule_go_on_where_their_states_stand)
{
    enum { K_HEADS = 2, V_HEADS = 4, D = 12, KERNEL = 4, ROWS = 40, C = 2 * K_HEADS * D + V_HEADS * D, VALUE = V_HEADS * D };
    static const size_t cuts[] = {0, 1, 2, 3, 17, 18, ROWS};
    x3_device *dev = x3_test_open_device();
    const size_t state = (KERNEL - 1) * C + V_HEADS * D * D;
    float *x = random_floats("rows", ROWS * C), *w = random_floats("kernel", C * KERNEL), *b = random_floats("b", ROWS * V_HEADS);
    float *a = random_floats("a", ROWS * V_HEADS), *a_log = random_floats("A", V_HEADS), *dt = random_floats("dt", V_HEADS);
    float *mixed = malloc(ROWS * C * sizeof *mixed), *once = malloc(ROWS * VALUE * sizeof *once);
    float *pieces = malloc(ROWS * VALUE * sizeof *pieces), *states = random_floats("left over", 2 * state);
    x3_err err = {0};

    for (int pass = 0; pass < 2; pass++)
        for (size_t i = 0; i + 1 < (pass == 0 ? 2 : sizeof cuts / sizeof cuts[0]); i++) {
            const size_t from = pass == 0 ? 0 : cuts[i], to = pass == 0 ? ROWS : cuts[i + 1];
            x3_sequence s = {.n_rows = to - from, .position = from, .slot = (size_t)pass};
            x3_batch batch = {.n_rows = to - from, .n_sequences = 1, .sequences = &s};
            x3_conv_args conv = {.d_x = x + from * C, .d_out = mixed + from * C, .n = C, .kernel = KERNEL, .d_weight = w,
                                 .d_state = states, .state_stride = state};
            x3_delta_args rule = {.n_k_heads = K_HEADS, .n_v_heads = V_HEADS, .k_dim = D, .v_dim = D, .d_qkv = mixed + from * C,
                                  .d_b = b + from * V_HEADS, .d_a = a + from * V_HEADS, .d_a_log = a_log, .d_dt_bias = dt,
                                  .d_out = (pass == 0 ? once : pieces) + from * VALUE, .d_state = states + (KERNEL - 1) * C,
                                  .state_stride = state};
            CHECK_OK(dev->ops->conv_silu(dev, &conv, &batch, &err), &err);
            CHECK_OK(dev->ops->delta_rule(dev, &rule, &batch, &err), &err);
        }
    CHECK(memcmp(once, pieces, ROWS * VALUE * sizeof *once) == 0);
    CHECK(memcmp(states, states + state, state * sizeof *states) == 0);
    double worst = 0;
    for (size_t r = 0; r < ROWS; r++) /* the convolution in float64 */
        for (size_t c = 0; c < C; c++) {
            double sum = 0;
            for (size_t j = 0; j < KERNEL; j++)
                if (r + j + 1 >= KERNEL)
                    sum += (double)w[c * KERNEL + j] * (double)x[(r + j + 1 - KERNEL) * C + c];
            worst = fmax(worst, fabs(sum / (1 + exp(-sum)) - (double)mixed[r * C + c]));
        }
    CHECK(worst < 3e-6);
    free(x);
    free(w);
    free(b);
    free(a);
    free(a_log);
    free(dt);
    free(mixed);
    free(once);
    free(pieces);
    free(states);
    x3_device_close(dev);
}

X3_TEST(layer_norm_and_sigmoid_gate_are_what_they_are_called)
{
    enum { N = 50, ROWS = 3 };
    x3_device *dev = x3_test_open_device();
    float *x = random_floats("x", ROWS * N), *w = random_floats("w", N), *b = random_floats("b", N);
    float *y = malloc(ROWS * N * sizeof *y), *g = random_floats("g", ROWS * N), *z = malloc(ROWS * N * sizeof *z);
    x3_err err = {0};

    memcpy(y, x, ROWS * N * sizeof *y);
    memcpy(z, x, ROWS * N * sizeof *z);
    CHECK_OK(dev->ops->layer_norm(dev, y, ROWS, N, w, b, 1e-6f, &err), &err);
    CHECK_OK(dev->ops->sigmoid_mul(dev, z, g, ROWS * N, &err), &err);
    for (size_t r = 0; r < ROWS; r++) {
        double mean = 0, variance = 0;
        for (size_t i = 0; i < N; i++)
            mean += (double)x[r * N + i] / N;
        for (size_t i = 0; i < N; i++)
            variance += ((double)x[r * N + i] - mean) * ((double)x[r * N + i] - mean) / N;
        for (size_t i = 0; i < N; i++) {
            const size_t at = r * N + i;
            CHECK(fabs(((double)x[at] - mean) / sqrt(variance + 1e-6) * (double)w[i] + (double)b[i] - (double)y[at]) < 1e-6);
            CHECK(fabs((double)x[at] / (1 + exp(-(double)g[at])) - (double)z[at]) < 1e-6);
        }
    }
    free(x);
    free(w);
    free(b);
    free(y);
    free(g);
    free(z);
    x3_device_close(dev);
}
