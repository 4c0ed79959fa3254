/* Mixture of experts: routing, the grouped linear, experts on disk, the forward pass. test_moe_job.c has their calibration. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "formats/safetensors_write.h"
#include "runtime/generate.h"
#include "runtime/stream.h"
#include "tests/family_check.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

/* A path that lasts as long as the test. */
static const char *temp_path(const char *name)
{
    static char path[4][400];
    static int next;
    char *p = path[next++ % 4];

    snprintf(p, sizeof path[0], "%s/%s", x3_test_temp_dir(), name);
    return p;
}

/* One of the findings, or the error, says this. */
static void check_refused(const char *dir, const char *what)
{
    x3_findings f = {0};
    x3_checkpoint *c = NULL;
    x3_err err = {0};
    bool found = false;

    CHECK(x3_checkpoint_open(&c, dir, NULL, &f, &err) != X3_OK);
    found = strstr(err.text, what) != NULL;
    for (size_t i = 0; i < f.n_items; i++)
        found = found || strstr(f.items[i], what) != NULL;
    CHECK_MSG(found, "nothing says \"%s\"; the error is %s", what, err.text);
    x3_findings_free(&f);
}

/* ---- routing ---- */

/* The same in float64, by sorting. */
static void route_by_formula(const x3_route_rule *r, const float *logits, const float *correction, int *ids, double *weights)
{
    double score[64], choice[64], group[64], total = 0;
    bool open[64];

    for (size_t e = 0; e < r->n_experts; e++) {
        score[e] = r->scores == X3_ROUTE_SIGMOID ? 1 / (1 + exp(-(double)logits[e])) : exp(logits[e]);
        total += score[e];
    }
    for (size_t e = 0; e < r->n_experts; e++) {
        score[e] /= r->scores == X3_ROUTE_SIGMOID ? 1 : total;
        choice[e] = score[e] + (correction == NULL ? 0 : correction[e]);
    }
    const size_t size = r->n_experts / r->n_groups;
    for (size_t g = 0; g < r->n_groups; g++) {
        double best = -1e300, second = -1e300;
        for (size_t e = g * size; e < (g + 1) * size; e++) {
            if (choice[e] > best) {
                second = best;
                best = choice[e];
            } else if (choice[e] > second) {
                second = choice[e];
            }
        }
        group[g] = best + (size > 1 ? second : 0);
    }
    for (size_t e = 0; e < r->n_experts; e++) {
        size_t better = 0;
        for (size_t g = 0; g < r->n_groups; g++)
            better += group[g] > group[e / size];
        open[e] = better < r->n_chosen_groups;
    }
    double sum = 0;
    for (size_t j = 0; j < r->n_chosen; j++) {
        ids[j] = -1;
        for (size_t e = 0; e < r->n_experts; e++)
            if (open[e] && (ids[j] < 0 || choice[e] > choice[ids[j]]))
                ids[j] = (int)e;
        open[ids[j]] = false;
        sum += weights[j] = score[ids[j]];
    }
    for (size_t j = 0; j < r->n_chosen; j++)
        weights[j] = (r->normalize ? weights[j] / sum : weights[j]) * r->scale;
}

static void check_route(const x3_route_rule *r, bool corrected, uint64_t seed)
{
    float logits[64], correction[64], weights[64], scratch[192];
    int32_t ids[64];
    int expected[64];
    double exact[64];
    x3_rng rng;

    x3_rng_init(&rng, seed, "route");
    for (size_t e = 0; e < r->n_experts; e++) {
        logits[e] = 2 * (float)x3_rng_normal(&rng);
        correction[e] = 0.5f * (float)x3_rng_normal(&rng);
    }
    route_by_formula(r, logits, corrected ? correction : NULL, expected, exact);
    x3_route_row_ref(r, logits, corrected ? correction : NULL, ids, weights, scratch);
    for (size_t j = 0; j < r->n_chosen; j++) {
        CHECK_MSG(ids[j] == expected[j], "choice %zu is %d, expected %d (seed %llu)", j, ids[j], expected[j],
                  (unsigned long long)seed);
        CHECK(fabs(weights[j] - exact[j]) < 1e-6 * fabs(exact[j]) + 1e-9);
    }
}

X3_TEST(route_equals_the_formula_with_groups_correction_and_scale)
{
    for (uint64_t seed = 0; seed < 50; seed++) {
        x3_route_rule r = {.n_experts = 32, .n_chosen = 4, .scores = X3_ROUTE_SOFTMAX, .normalize = true, .scale = 1,
                           .n_groups = 1, .n_chosen_groups = 1};
        check_route(&r, false, seed);
        r.normalize = false;
        check_route(&r, true, seed);
        r = (x3_route_rule){.n_experts = 64, .n_chosen = 6, .scores = X3_ROUTE_SIGMOID, .normalize = true, .scale = 2.5f,
                            .n_groups = 8, .n_chosen_groups = 3};
        check_route(&r, true, seed);
        r.n_groups = 4;
        r.n_chosen_groups = 1;
        check_route(&r, false, seed);
    }
}

X3_TEST(route_takes_the_lower_number_of_equals_and_shows_logits_that_are_not_finite)
{
    x3_route_rule r = {.n_experts = 6, .n_chosen = 3, .scores = X3_ROUTE_SIGMOID, .normalize = true, .scale = 1,
                       .n_groups = 1, .n_chosen_groups = 1};
    float equal[6] = {1, 1, 2, 1, 2, 1}, weights[3], scratch[18];
    int32_t ids[3];

    x3_route_row_ref(&r, equal, NULL, ids, weights, scratch);
    CHECK(ids[0] == 2 && ids[1] == 4 && ids[2] == 0);
    for (int scores = 0; scores < 2; scores++)
        for (int bad = 0; bad < 3; bad++) {
            float logits[6] = {0, 1, 2, 3, 4, 5};
            r.scores = (x3_route_scores)scores;
            logits[bad * 2] = bad == 0 ? NAN : bad == 1 ? INFINITY : -INFINITY;
            x3_route_row_ref(&r, logits, NULL, ids, weights, scratch);
            for (int j = 0; j < 3; j++) {
                CHECK(ids[j] >= 0 && ids[j] < 6 && isnan(weights[j]));
                CHECK(j == 0 || (ids[j] != ids[0] && ids[j] != ids[j - 1]));
            }
        }
    float all_bad[6] = {NAN, NAN, NAN, NAN, NAN, NAN};
    x3_route_row_ref(&r, all_bad, NULL, ids, weights, scratch);
    CHECK(ids[0] == 0 && ids[1] == 1 && ids[2] == 2 && isnan(weights[0]));
}

/* ---- the grouped linear ---- */

enum { G_IN = 128, G_OUT = 256, G_EXPERTS = 9, G_ROWS = 70 };

/* Random EXL3 weights of K = 1 to 8, the last expert dense. */
static void make_weights(x3_weight *w, x3_rng *rng)
{
    for (size_t e = 0; e < G_EXPERTS; e++) {
        const size_t K = e + 1, words = G_IN * G_OUT / 32 * K;
        w[e] = (x3_weight){.kind = X3_WEIGHT_EXL3, .n_in = G_IN, .n_out = G_OUT, .n_in_padded = G_IN, .n_out_padded = G_OUT,
                           .K = (int)K, .codebook = X3_CB_MUL1};
        uint32_t *data = malloc((e < 8 ? words : G_IN * G_OUT) * 4);
        uint16_t *suh = malloc(G_IN * 2), *svh = malloc(G_OUT * 2);
        for (size_t i = 0; i < words && e < 8; i++)
            data[i] = (uint32_t)x3_rng_next(rng);
        for (size_t i = 0; i < G_IN * G_OUT && e == 8; i++)
            ((float *)data)[i] = (float)x3_rng_normal(rng);
        for (size_t i = 0; i < G_IN; i++)
            suh[i] = x3_f32_to_f16((float)x3_rng_normal(rng));
        for (size_t i = 0; i < G_OUT; i++)
            svh[i] = x3_f32_to_f16((float)x3_rng_normal(rng));
        if (e == 8)
            w[e].kind = X3_WEIGHT_F32;
        w[e].data = data;
        w[e].suh = suh;
        w[e].svh = svh;
    }
}

X3_TEST(expert_linear_of_mixed_k_equals_single_linears_bit_for_bit)
{
    static const int32_t first[G_EXPERTS + 1] = {0, 1, 1, 20, 22, 30, 31, 31, 60, 90};
    x3_weight w[G_EXPERTS];
    float *x = malloc(G_ROWS * G_IN * 4), *y = malloc(90 * G_OUT * 4), *one = malloc(G_OUT * 4), *gathered = malloc(90 * G_IN * 4);
    int32_t rows[90];
    x3_rng rng;
    x3_err err = {0};

    x3_rng_init(&rng, 1, "grouped");
    make_weights(w, &rng);
    for (size_t i = 0; i < G_ROWS * G_IN; i++)
        x[i] = (float)x3_rng_normal(&rng);
    for (size_t s = 0; s < 90; s++) {
        rows[s] = (int32_t)(x3_rng_next(&rng) % G_ROWS);
        memcpy(gathered + s * G_IN, x + (size_t)rows[s] * G_IN, G_IN * 4);
    }
    for (int n_threads = 1; n_threads <= 3; n_threads++)
        for (int by_rows = 0; by_rows < 2; by_rows++) {
            x3_device *dev = x3_test_open_threads(n_threads);
            x3_expert_args a = {.weights = w, .n_experts = G_EXPERTS, .stride = 1, .d_first = first,
                                .d_rows = by_rows ? rows : NULL, .n_slots = 90, .d_x = by_rows ? x : gathered, .ldx = G_IN,
                                .d_y = y, .ldy = G_OUT};
            memset(y, 0xff, 90 * G_OUT * 4);
            CHECK_OK(dev->ops->expert_linear(dev, &a, &err), &err);
            for (size_t e = 0; e < G_EXPERTS; e++)
                for (int s = first[e]; s < first[e + 1]; s++) {
                    CHECK_OK(dev->ops->linear(dev, &w[e], x + (size_t)rows[s] * G_IN, G_IN, 1, one, G_OUT, &err), &err);
                    CHECK_MSG(memcmp(one, y + (size_t)s * G_OUT, G_OUT * 4) == 0, "expert %zu, slot %d", e, s);
                }
            x3_device_close(dev);
        }
    for (size_t e = 0; e < G_EXPERTS; e++) {
        free((void *)(uintptr_t)w[e].data);
        free((void *)(uintptr_t)w[e].suh);
        free((void *)(uintptr_t)w[e].svh);
    }
    free(x);
    free(y);
    free(one);
    free(gathered);
}

/* ---- experts on disk ---- */

static float *states_of(const char *dir, size_t n, size_t *floats)
{
    x3_checkpoint *c = x3_test_open_model(dir);
    x3_device *dev = x3_test_open_threads(2);
    int32_t *ids = malloc(n * sizeof *ids);
    float *states = malloc(n * c->model->hidden * sizeof *states);
    x3_err err = {0};

    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)(i * 37 % c->model->vocab);
    CHECK_OK(x3_stream_hidden(dev, c, ids, 1, n, states, NULL, &err), &err);
    *floats = n * c->model->hidden;
    free(ids);
    x3_device_close(dev);
    x3_checkpoint_close(c);
    return states;
}

X3_TEST(experts_in_one_tensor_give_the_same_states_in_either_orientation)
{
    static const char *const types[] = {"qwen3_moe", "glm4_moe", "mixtral"};
    const char *dir = x3_test_temp_dir();

    for (int i = 0; i < 3; i++) {
        float *states[3];
        size_t n = 0;
        for (int stack = 0; stack < 3; stack++) {
            x3_tiny t = X3_TINY_MOE(types[i]);
            char path[400];
            t.expert_inner = 96; /* neither gate_up nor down is square */
            t.stack = (x3_tiny_stack)stack;
            t.dtype = i == 1 ? X3_F32 : X3_BF16;
            snprintf(path, sizeof path, "%s/%s-%d", dir, types[i], stack);
            x3_tiny_write(path, &t);
            states[stack] = states_of(path, 40, &n);
        }
        CHECK(memcmp(states[0], states[1], n * 4) == 0 && memcmp(states[0], states[2], n * 4) == 0);
        for (int stack = 0; stack < 3; stack++)
            free(states[stack]);
    }
}

X3_TEST(experts_whose_orientation_nothing_tells_are_refused)
{
    const char *path = temp_path("square");
    x3_tiny t = X3_TINY_MOE("qwen3_moe"); /* gate and up together are 128 x 128 */

    t.stack = X3_TINY_OUT_IN;
    x3_tiny_write(path, &t);
    check_refused(path, "model.layers.0.mlp.experts.gate_up_proj has shape [8, 128, 128]: a square matrix does not tell");
    t.expert_inner = 128;
    x3_tiny_write(path, &t);
    check_refused(path, "model.layers.0.mlp.experts.down_proj has shape [8, 128, 128]: a square matrix does not tell");
    t.expert_inner = 96;
    t.experts = 7;
    x3_tiny_write(path, &t);
    t.experts = 8;
    t.stack = X3_TINY_SEPARATE;
    char other[400], to[400];
    snprintf(other, sizeof other, "%s", temp_path("other"));
    x3_tiny_write(other, &t);
    x3_err err = {0};
    snprintf(to, sizeof to, "%s/config.json", path);
    CHECK_OK(x3_copy_file(x3_test_path(other, "config.json"), to, NULL, &err), &err);
    check_refused(path, "gate_up_proj has shape [7, 192, 128], the config says 8 experts of 192 outputs and 128 inputs");
}

X3_TEST(router_weight_or_correction_that_is_missing_is_refused)
{
    const char *path = temp_path("model");
    x3_tiny t = X3_TINY_MOE("glm4_moe");

    t.drop = "model.layers.1.mlp.gate.weight";
    x3_tiny_write(path, &t);
    check_refused(path, "tensor model.layers.1.mlp.gate.weight is missing");
    t.drop = "model.layers.0.mlp.gate.e_score_correction_bias";
    x3_tiny_write(path, &t);
    check_refused(path, "tensor model.layers.0.mlp.gate.e_score_correction_bias is missing");
    t.drop = "model.layers.1.mlp.experts.5.up_proj.weight";
    x3_tiny_write(path, &t);
    check_refused(path, "tensor model.layers.1.mlp.experts.5.up_proj.weight is missing");
    t.drop = NULL;
    t.extra = "model.layers.1.mlp.experts.8.up_proj.weight";
    x3_tiny_write(path, &t);
    check_refused(path, "model.layers.1.mlp.experts.8.up_proj.weight is not part of");
    t.extra = "model.layers.2.eh_proj.weight"; /* of a layer that predicts ahead */
    t.more_config = "\"num_nextn_predict_layers\": 1,";
    x3_tiny_write(path, &t);
    x3_checkpoint_close(x3_test_open_model(path));
}

X3_TEST(router_that_is_not_finite_is_refused_by_name)
{
    const char *path = temp_path("model");
    static const char *const names[] = {"model.layers.1.mlp.gate.weight", "model.layers.0.mlp.gate.e_score_correction_bias"};

    for (int i = 0; i < 2; i++) {
        x3_tiny t = X3_TINY_MOE("glm4_moe");
        x3_device *dev = x3_test_open_threads(1);
        x3_err err = {0};
        int32_t ids[4] = {1, 2, 3, 4};
        float states[4 * 128];
        t.poison = names[i];
        x3_tiny_write(path, &t);
        x3_checkpoint *c = x3_test_open_model(path); /* headers do not tell */
        CHECK_FAILS(x3_stream_hidden(dev, c, ids, 1, 4, states, NULL, &err), &err, i == 0 ? "router model.layers.1.mlp.gate:"
                                                                                          : "e_score_correction_bias: value 5");
        x3_checkpoint_close(c);
        x3_device_close(dev);
    }
}

X3_TEST(options_of_experts_that_do_not_fit_are_refused)
{
    const char *path = temp_path("model");
    static const struct {
        const char *config, *what;
    } cases[] = {
        {"\"n_group\": 3,", "n_group 3 and topk_group 1 do not fit 8 experts"},
        {"\"n_group\": 8,", "n_group 8 and topk_group 1 do not fit 8 experts"},
        {"\"n_group\": 2, \"topk_group\": 4,", "n_group 2 and topk_group 4"},
        {"\"scoring_func\": \"softmax\",", "option \"scoring_func\" is not known for model_type \"glm4_moe\""},
        {"\"decoder_sparse_step\": 2,", "option \"decoder_sparse_step\" is not known"},
    };
    x3_tiny t = X3_TINY_MOE("glm4_moe");

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        t.more_config = cases[i].config;
        x3_tiny_write(path, &t);
        check_refused(path, cases[i].what);
    }
    t.more_config = NULL;
    t.chosen = 9;
    x3_tiny_write(path, &t);
    check_refused(path, "num_experts_per_tok 9 of 8 experts");
    t = X3_TINY_DEFAULTS;
    t.more_config = "\"num_experts\": 8,";
    x3_tiny_write(path, &t);
    check_refused(path, "option \"num_experts\" is not known for model_type \"llama\"");
}

X3_TEST(layers_without_experts_stand_where_the_config_says)
{
    const char *path = temp_path("model");
    x3_tiny t = X3_TINY_MOE("glm4_moe");

    t.layers = 3;
    t.dense = 2;
    x3_tiny_write(path, &t);
    x3_checkpoint *c = x3_test_open_model(path);
    CHECK(c->model->layers[1].ffn == X3_FFN_MLP && c->model->layers[2].ffn == X3_FFN_MOE);
    CHECK(c->model->layers[2].moe.has_shared && c->model->layers[2].moe.rule.scale == 1.5f);
    CHECK(x3_layer_expert(&c->model->layers[2], 7) == -1 && x3_layer_expert(&c->model->layers[2], 8) == 0);
    CHECK(x3_layer_expert(&c->model->layers[2], c->model->layers[2].n_linears - 1) == 7);
    x3_checkpoint_close(c);
}

/* ---- the forward pass ---- */

static void check_decoding(const char *dir, size_t n, size_t step)
{
    x3_checkpoint *c = x3_test_open_model(dir);
    const size_t hidden = c->model->hidden, vocab = c->model->vocab;
    float *states = malloc(n * hidden * 4), *full = malloc(n * vocab * 4), *logits = malloc(vocab * 4);
    int32_t *ids = malloc(n * sizeof *ids);
    x3_generator *g = NULL;
    x3_weight head;
    x3_err err = {0};

    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)(i * i * 31 % vocab);
    for (int n_threads = 1; n_threads <= 2; n_threads++) {
        x3_device *dev = x3_test_open_threads(n_threads);
        float *again = malloc(n * hidden * 4);
        CHECK_OK(x3_stream_hidden(dev, c, ids, 1, n, again, NULL, &err), &err);
        CHECK(n_threads == 1 || memcmp(again, states, n * hidden * 4) == 0);
        memcpy(states, again, n * hidden * 4);
        free(again);
        x3_device_close(dev);
    }
    x3_device *dev = x3_test_open_threads(1);
    CHECK_OK(x3_linear_load(&head, dev, c, &c->model->head, &err), &err);
    CHECK_OK(dev->ops->linear(dev, &head, states, hidden, n, full, vocab, &err), &err);
    CHECK_OK(x3_generator_create(&g, dev, c, n, &err), &err);
    for (size_t at = 0; at < n;) {
        size_t take = x3_min_size(step, n - at);
        CHECK_OK(x3_generator_feed(g, ids + at, take, logits, &err), &err);
        at += take;
        CHECK_MSG(memcmp(logits, full + (at - 1) * vocab, vocab * 4) == 0, "logits of position %zu differ", at - 1);
    }
    x3_generator_free(g);
    x3_linear_free(&head, dev);
    free(states);
    free(full);
    free(logits);
    free(ids);
    x3_device_close(dev);
    x3_checkpoint_close(c);
}

X3_TEST(decoding_with_experts_equals_the_full_forward_bit_for_bit)
{
    static const char *const types[] = {"qwen3_moe", "glm4_moe", "mixtral"};
    const char *dir = x3_test_temp_dir();

    for (int i = 0; i < 3; i++) {
        x3_tiny t = X3_TINY_MOE(types[i]);
        char path[400];
        t.more_config = i == 1 ? "\"n_group\": 4, \"topk_group\": 2," : NULL;
        snprintf(path, sizeof path, "%s/%s", dir, types[i]);
        x3_tiny_write(path, &t);
        check_decoding(path, 60, 1);
        check_decoding(path, 60, 13);
    }
}
