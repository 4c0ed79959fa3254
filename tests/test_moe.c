/* Mixture of experts: routing, experts on disk, the forward pass, calibration of experts with many, few or no tokens. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "formats/safetensors_write.h"
#include "quant/job.h"
#include "quant/verify.h"
#include "runtime/generate.h"
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

static x3_device *open_device(int n_threads)
{
    x3_device *dev = NULL;
    x3_err err = {0};

    CHECK_OK(x3_device_open(&dev, "cpu", n_threads, &err), &err);
    return dev;
}

static x3_status try_open(const char *dir, x3_checkpoint **c, x3_err *err)
{
    x3_findings f = {0};
    x3_status rc = x3_checkpoint_open(c, dir, NULL, &f, err);

    x3_findings_free(&f);
    return rc;
}

static x3_checkpoint *open_model(const char *dir)
{
    x3_checkpoint *c = NULL;
    x3_err err = {0};

    CHECK_OK(try_open(dir, &c, &err), &err);
    return c;
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
            x3_device *dev = open_device(n_threads);
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
    x3_checkpoint *c = open_model(dir);
    x3_device *dev = open_device(2);
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
    x3_checkpoint_close(open_model(path));
}

X3_TEST(router_that_is_not_finite_is_refused_by_name)
{
    const char *path = temp_path("model");
    static const char *const names[] = {"model.layers.1.mlp.gate.weight", "model.layers.0.mlp.gate.e_score_correction_bias"};

    for (int i = 0; i < 2; i++) {
        x3_tiny t = X3_TINY_MOE("glm4_moe");
        x3_device *dev = open_device(1);
        x3_err err = {0};
        int32_t ids[4] = {1, 2, 3, 4};
        float states[4 * 128];
        t.poison = names[i];
        x3_tiny_write(path, &t);
        x3_checkpoint *c = open_model(path); /* headers do not tell */
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
    x3_checkpoint *c = open_model(path);
    CHECK(c->model->layers[1].ffn == X3_FFN_MLP && c->model->layers[2].ffn == X3_FFN_MOE);
    CHECK(c->model->layers[2].moe.has_shared && c->model->layers[2].moe.rule.scale == 1.5f);
    CHECK(x3_layer_expert(&c->model->layers[2], 7) == -1 && x3_layer_expert(&c->model->layers[2], 8) == 0);
    CHECK(x3_layer_expert(&c->model->layers[2], c->model->layers[2].n_linears - 1) == 7);
    x3_checkpoint_close(c);
}

/* ---- the forward pass ---- */

static void check_decoding(const char *dir, size_t n, size_t step)
{
    x3_checkpoint *c = open_model(dir);
    const size_t hidden = c->model->hidden, vocab = c->model->vocab;
    float *states = malloc(n * hidden * 4), *full = malloc(n * vocab * 4), *logits = malloc(vocab * 4);
    int32_t *ids = malloc(n * sizeof *ids);
    x3_generator *g = NULL;
    x3_weight head;
    x3_err err = {0};

    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)(i * i * 31 % vocab);
    for (int n_threads = 1; n_threads <= 2; n_threads++) {
        x3_device *dev = open_device(n_threads);
        float *again = malloc(n * hidden * 4);
        CHECK_OK(x3_stream_hidden(dev, c, ids, 1, n, again, NULL, &err), &err);
        CHECK(n_threads == 1 || memcmp(again, states, n * hidden * 4) == 0);
        memcpy(states, again, n * hidden * 4);
        free(again);
        x3_device_close(dev);
    }
    x3_device *dev = open_device(1);
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

/* ---- jobs ---- */

struct setup {
    char root[256], model[300], out[300], text[300];
    const char *texts[2];
    x3_job_options o;
    char notes[4096];
};

static void make_setup(struct setup *s, const x3_tiny *tiny)
{
    *s = (struct setup){0};
    x3_test_skip_if_emulated();
    snprintf(s->root, sizeof s->root, "%s", x3_test_temp_dir());
    snprintf(s->model, sizeof s->model, "%s/model", s->root);
    snprintf(s->out, sizeof s->out, "%s/pack", s->root);
    snprintf(s->text, sizeof s->text, "%s/text.txt", s->root);
    x3_tiny_write(s->model, tiny);
    x3_tiny_text(s->text, 700, 1);
    s->texts[0] = s->text;
    s->o = (x3_job_options){.model = s->model, .out = s->out, .bits = 4, .head_bits = 0, .quant = X3_QUANT_DEFAULTS,
                            .texts = s->texts, .n_texts = 1, .rows = 10, .cols = 64, .device = "cpu", .n_threads = 2,
                            .overwrite = true, .command = "test"};
}

static void on_note(void *arg, const char *text)
{
    struct setup *s = arg;
    size_t n = strlen(s->notes);

    snprintf(s->notes + n, sizeof s->notes - n, "%s\n", text);
}

static x3_status run_job(struct setup *s, cJSON **receipt, x3_err *err)
{
    const x3_job_events events = {.note = on_note, .arg = s};
    x3_findings findings = {0};
    x3_job *job = NULL;
    x3_status rc = x3_job_open(&job, &s->o, &events, &findings, err);

    s->notes[0] = '\0';
    if (rc == X3_OK)
        rc = x3_job_run(job, err);
    if (rc == X3_OK && receipt != NULL)
        *receipt = cJSON_Duplicate(x3_job_receipt(job), true);
    x3_job_close(job);
    x3_findings_free(&findings);
    return rc;
}

static uint64_t shard_hash(const char *dir)
{
    uint64_t hash = 0;
    x3_err err = {0};

    CHECK_OK(x3_hash_file(x3_test_path(dir, "model-00001-of-00001.safetensors"), &hash, &err), &err);
    return hash;
}

static void check_verifies(const struct setup *s)
{
    x3_verify_report r;
    x3_device *dev = open_device(1);
    x3_err err = {0};

    CHECK_OK(x3_verify_pack(&r, s->out, s->model, dev, NULL, &err), &err);
    CHECK_MSG(r.findings.n_items == 0, "%s", r.findings.items[0]);
    CHECK(r.n_hashed == r.pack->st->n_tensors);
    x3_verify_report_free(&r);
    x3_device_close(dev);
}

static const cJSON *entry_of(const cJSON *receipt, const char *name)
{
    for (const cJSON *g = x3_json_get(receipt, "groups")->child; g != NULL; g = g->next)
        if (strcmp(x3_json_get(g, "name")->valuestring, name) == 0)
            return g;
    x3_test_fail(__FILE__, __LINE__, "the receipt has no %s", name);
}

static double number_of(const cJSON *receipt, const char *name, const char *key)
{
    const cJSON *v = x3_json_get(entry_of(receipt, name), key);

    return v == NULL ? 0 : v->valuedouble;
}

/* Number of experts whose Hessians are held at once is a matter of memory, not of the result. */
X3_TEST(job_with_experts_gives_the_same_bytes_with_any_threads_and_passes)
{
    for (int own = 0; own < 2; own++) {
        x3_tiny t = X3_TINY_MOE(own ? "qwen3_moe" : "glm4_moe");
        struct setup s;
        x3_findings findings = {0};
        x3_job *job = NULL;
        x3_err err = {0};
        t.dense = 1;
        t.experts = 3;
        t.expert_inner = 256;
        t.shared = 0;
        make_setup(&s, &t);
        s.o.bits = 1;
        s.o.expert_hessian = own ? X3_EXPERT_HESSIAN_OWN : X3_EXPERT_HESSIAN_LAYER;
        CHECK_OK(run_job(&s, NULL, &err), &err);
        uint64_t hash = shard_hash(s.out);
        check_verifies(&s);
        CHECK_OK(x3_job_open(&job, &s.o, NULL, &findings, &err), &err);
        CHECK(x3_job_describe(job)->expert_passes == 1 && x3_job_describe(job)->own_hessians == (own == 1));
        s.o.memory_bytes = x3_job_describe(job)->peak_bytes - 700000; /* of 1.6 or 2 MB for Hessians of experts */
        x3_job_close(job);
        CHECK_OK(x3_job_open(&job, &s.o, NULL, &findings, &err), &err);
        CHECK(x3_job_describe(job)->expert_passes > 1 && x3_job_describe(job)->expert_passes <= 3);
        x3_job_close(job);
        s.o.n_threads = 1;
        CHECK_OK(run_job(&s, NULL, &err), &err);
        CHECK_MSG(hash == shard_hash(s.out), "other bytes with one thread and several passes");
    }
}

/* Correction biases that send every token of layer 0 to expert 0. */
X3_TEST(job_with_all_tokens_at_one_expert_blends_the_others_and_lists_them)
{
    static const float correction[4] = {9, 0, 0, 0};
    x3_tiny t = X3_TINY_MOE("glm4_moe");
    struct setup s;
    cJSON *receipt = NULL;
    x3_err err = {0};

    t.experts = 4;
    t.chosen = 1;
    t.layers = 1;
    t.correction = correction;
    for (int own = 0; own < 2; own++) {
        make_setup(&s, &t);
        s.o.expert_hessian = own ? X3_EXPERT_HESSIAN_OWN : X3_EXPERT_HESSIAN_LAYER;
        CHECK_OK(run_job(&s, &receipt, &err), &err);
        check_verifies(&s);
        CHECK(number_of(receipt, "model.layers.0.mlp.experts.0.gate_proj", "expert_tokens") == 640);
        CHECK(number_of(receipt, "model.layers.0.mlp.experts.0.down_proj", "blended") == 0);
        for (int e = 1; e < 4; e++) {
            char name[100];
            snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.down_proj", e);
            CHECK(number_of(receipt, name, "expert_tokens") == 0 && number_of(receipt, name, "blended") == 1);
            CHECK(x3_json_get(entry_of(receipt, name), "uncalibrated") == NULL);
            CHECK(number_of(receipt, name, "error_source") < 0.02);
            snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.up_proj", e);
            CHECK(number_of(receipt, name, "blended") == own && number_of(receipt, name, "error_source") < 0.02);
        }
        CHECK_MSG(strstr(s.notes, "model.layers.0: 3 of 4 experts had few calibration tokens; their Hessians are blended by "
                                  "count, with that of the layer (gate, up) or of tokens sent there on purpose (down): 1 (0 "
                                  "tokens), 2 (0), 3 (0)") != NULL, "%s", s.notes);
        cJSON_Delete(receipt);
    }
    s.o.min_expert_tokens = 5;
    CHECK_FAILS(run_job(&s, NULL, &err), &err, "model.layers.0: 3 experts have fewer calibration tokens than "
                                               "--min-expert-tokens 5: 1 (0 tokens), 2 (0)");
}

struct margins {
    const x3_checkpoint *c;
    double best, second; /* of expert 1's score over the best of the others, over all rows */
};

static x3_status find_margins(void *arg, const x3_captured *in, x3_err *err)
{
    struct margins *m = arg;
    const x3_linear_desc *router = &in->layer->linears[in->layer->moe.router];
    float weight[4 * 128];

    if (in->expert >= 0 || in->input != router->input)
        return X3_OK;
    x3_status rc = x3_dense_read(m->c, router, 0, 4, weight, err);
    for (size_t r = 0; r < in->n_rows && rc == X3_OK; r++) {
        double score[4], other = 0;
        for (int e = 0; e < 4; e++) {
            double logit = 0;
            for (int i = 0; i < 128; i++)
                logit += (double)weight[e * 128 + i] * in->d_x[r * 128 + (size_t)i];
            score[e] = 1 / (1 + exp(-logit));
            other = e != 1 && score[e] > other ? score[e] : other;
        }
        double margin = score[1] - other;
        m->second = fmax(m->second, fmin(margin, m->best));
        m->best = fmax(m->best, margin);
    }
    return rc;
}

/* The correction of expert 1 that lets exactly one of the calibration tokens go to it. */
static float correction_for_one_token(const struct setup *s)
{
    struct margins m = {.c = open_model(s->model), .best = -9, .second = -9};
    x3_device *dev = open_device(1);
    const x3_layer_desc *l = &m.c->model->layers[0];
    x3_forward *f = NULL;
    x3_layer_weights w;
    x3_kv_layer kv;
    x3_full_batch b;
    int32_t ids[640];
    float *x = malloc(640 * 128 * 4);
    char *text = NULL;
    size_t n;
    x3_err err = {0};

    CHECK_OK(x3_read_file(&text, &n, s->text, 1 << 20, &err), &err);
    for (int i = 0; i < 640; i++)
        ids[i] = (unsigned char)text[i]; /* a token is a byte */
    CHECK_OK(x3_embed(m.c, ids, 640, x, &err), &err);
    CHECK_OK(x3_forward_create(&f, dev, m.c->model, 640, 64, &err), &err);
    CHECK_OK(x3_full_batch_create(&b, dev, 10, 64, 0, &err), &err);
    CHECK_OK(x3_layer_weights_load(&w, dev, m.c, l, &err), &err);
    CHECK_OK(x3_kv_layer_create(&kv, dev, l, b.n_pages, b.n_slots, &err), &err);
    f->capture = find_margins;
    f->capture_arg = &m;
    CHECK_OK(x3_forward_layer(f, &w, &b.batch, &kv, x, &err), &err);
    x3_kv_layer_free(&kv, dev);
    x3_layer_weights_free(&w);
    x3_full_batch_free(&b);
    x3_forward_free(f);
    x3_checkpoint_close((x3_checkpoint *)(uintptr_t)m.c);
    x3_device_close(dev);
    free(x);
    free(text);
    CHECK(m.best > m.second + 1e-5);
    return (float)(-(m.best + m.second) / 2);
}

X3_TEST(job_with_one_token_at_an_expert_counts_it_and_blends_by_count)
{
    float correction[4] = {0};
    x3_tiny t = X3_TINY_MOE("glm4_moe");
    struct setup s;
    cJSON *receipt = NULL;
    x3_err err = {0};

    t.experts = 4;
    t.chosen = 1;
    t.layers = 1;
    make_setup(&s, &t);
    correction[1] = correction_for_one_token(&s);
    t.correction = correction;
    x3_tiny_write(s.model, &t);
    s.o.expert_hessian = X3_EXPERT_HESSIAN_OWN;
    CHECK_OK(run_job(&s, &receipt, &err), &err);
    check_verifies(&s);
    CHECK(number_of(receipt, "model.layers.0.mlp.experts.1.gate_proj", "expert_tokens") == 1);
    CHECK(number_of(receipt, "model.layers.0.mlp.experts.1.gate_proj", "positions") == 1);
    CHECK(number_of(receipt, "model.layers.0.mlp.experts.1.gate_proj", "blended") == 1 - 1 / 256.0);
    CHECK(number_of(receipt, "model.layers.0.mlp.experts.1.down_proj", "blended") == 1 - 1 / 128.0);
    CHECK(number_of(receipt, "model.layers.0.mlp.experts.1.down_proj", "error_source") < 0.02);
    CHECK(strstr(s.notes, "1 (1 tokens)") != NULL || strstr(s.notes, ", 1 (1)") != NULL);
    double total = 0;
    for (int e = 0; e < 4; e++) {
        char name[100];
        snprintf(name, sizeof name, "model.layers.0.mlp.experts.%d.up_proj", e);
        total += number_of(receipt, name, "expert_tokens");
    }
    CHECK(total == 640);
    cJSON_Delete(receipt);
    s.o.min_expert_tokens = 1;
    CHECK_OK(run_job(&s, NULL, &err), &err);
    s.o.min_expert_tokens = 2;
    CHECK_FAILS(run_job(&s, NULL, &err), &err, "1 experts have fewer calibration tokens than --min-expert-tokens 2: 1 (1 tokens)");
}

X3_TEST(job_refuses_a_router_weight_that_is_not_finite_by_name)
{
    x3_tiny t = X3_TINY_MOE("qwen3_moe");
    struct setup s;
    x3_err err = {0};

    t.poison = "model.layers.1.mlp.gate.weight";
    make_setup(&s, &t);
    CHECK_FAILS(run_job(&s, NULL, &err), &err, "tensor model.layers.1.mlp.gate.weight has 1 values that are not finite");
    CHECK(!x3_path_exists(s.out));
}

X3_TEST(job_takes_experts_of_every_family_layout_and_weighting)
{
    static const char *const types[] = {"qwen3_moe", "glm4_moe", "mixtral"};

    for (int i = 0; i < 3; i++) {
        x3_tiny t = X3_TINY_MOE(types[i]);
        struct setup s;
        cJSON *receipt = NULL;
        x3_err err = {0};
        t.layers = 1;
        t.experts = 4;
        t.expert_inner = 96;
        t.stack = (x3_tiny_stack)i;
        make_setup(&s, &t);
        s.o.expert_weighting = (x3_expert_weighting)i;
        s.o.bits = 3.5;
        CHECK_OK(run_job(&s, &receipt, &err), &err);
        check_verifies(&s);
        x3_checkpoint *pack = open_model(s.out);
        for (size_t j = 0; j < pack->model->layers[0].n_linears; j++) {
            const x3_linear_desc *d = &pack->model->layers[0].linears[j];
            if (x3_layer_expert(&pack->model->layers[0], j) >= 0) {
                CHECK(x3_checkpoint_weight(pack, d) == NULL);
                CHECK(number_of(receipt, d->name, "error_source") < 0.05);
            }
        }
        x3_checkpoint_close(pack);
        cJSON_Delete(receipt);
    }
}
