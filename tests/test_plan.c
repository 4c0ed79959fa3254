/* Measured allocation: recipes, plans against brute force, measurements that survive being cut off. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "quant/plan.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

static x3_checkpoint *open_tiny(const char *dir, const x3_tiny *t)
{
    x3_findings findings = {0};
    x3_checkpoint *c = NULL;
    x3_err err = {0};

    x3_tiny_write(dir, t);
    CHECK_OK(x3_checkpoint_open(&c, dir, NULL, &findings, &err), &err);
    return c;
}

/* ---- recipes ---- */

X3_TEST(recipe_written_is_recipe_read)
{
    const char *path = x3_test_path(x3_test_temp_dir(), "r.yaml");
    char names[3][40] = {"model.layers.0.mlp.up_proj", "odd 'name': #1", "-"};
    x3_recipe_tensor tensors[] = {{names[0], 3}, {names[1], 8}, {names[2], 1}};
    x3_recipe r = {.target_bpw = 3.38, .achieved_bpw = 3.3799, .head_bits = 6, .tensors = tensors, .n_tensors = 3};
    x3_recipe *back = NULL;
    x3_err err = {0};

    CHECK_OK(x3_recipe_save(&r, path, &err), &err);
    CHECK_OK(x3_recipe_load(&back, path, &err), &err);
    CHECK(back->target_bpw == 3.38 && back->achieved_bpw == 3.3799 && back->head_bits == 6 && back->n_tensors == 3);
    for (size_t i = 0; i < 3; i++)
        CHECK(strcmp(back->tensors[i].name, tensors[i].name) == 0 && back->tensors[i].bits == tensors[i].bits);
    x3_recipe_free(back);
}

X3_TEST(recipe_that_is_none_is_refused_with_the_line)
{
    static const struct {
        const char *text, *message;
    } bad[] = {
        {"", "no recipe"},
        {"- 1\n- 2\n", "no recipe"},
        {"head_bits: 6\n", "\"tensors\" is missing"},
        {"tensors: {a: 1}\n", "\"head_bits\" is missing"},
        {"head_bits: 9\ntensors: {a: 1}\n", ":1: \"head_bits\" is 9, expected a whole number from 0 to 8"},
        {"head_bits: 6\ntensors:\n  a: 2.5\n", ":3: \"a\" is 2.5, expected a whole number from 1 to 8"},
        {"head_bits: 6\ntensors:\n  a: 0\n", "\"a\" is 0"},
        {"head_bits: 6\ntensors:\n  a: x\n", "\"a\" is x"},
        {"head_bits: 6\ntensors:\n  a: [1]\n", "\"a\" is not a number"},
        {"head_bits: 6\ntensors:\n  a: 1\n  a: 2\n", "\"a\" stands twice"},
        {"head_bits: 6\nhead_bits: 7\ntensors: {a: 1}\n", "\"head_bits\" stands twice"},
        {"head_bits: 6\ntensors: [a, b]\n", ":2: \"tensors\" is not a list of names and bits"},
        {"head_bits: 6\ntensors: {a: 1\n", "not valid YAML"},
    };
    const char *path = x3_test_path(x3_test_temp_dir(), "r.yaml");
    x3_recipe *r = NULL;
    x3_err err = {0};

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        x3_test_write(path, bad[i].text, strlen(bad[i].text));
        CHECK_FAILS(x3_recipe_load(&r, path, &err), &err, bad[i].message);
    }
}

X3_TEST(recipe_must_cover_the_linears_exactly)
{
    const char *dir = x3_test_temp_dir(), *path = x3_test_path(dir, "r.yaml");
    x3_tiny t = X3_TINY_DEFAULTS;
    t.layers = 1;
    x3_checkpoint *c = open_tiny(x3_test_path(dir, "model"), &t);
    x3_allocation uniform, a;
    x3_recipe *r = NULL;
    x3_err err = {0};

    CHECK_OK(x3_allocate_uniform(&uniform, c->model, 2.6, 5, X3_TIE_NONE, &err), &err);
    CHECK_OK(x3_recipe_of(&r, c->model, &uniform, &err), &err);
    CHECK_OK(x3_recipe_save(r, path, &err), &err);
    CHECK_OK(x3_allocation_of_recipe(&a, c->model, path, &err), &err);
    CHECK(a.n == uniform.n && memcmp(a.K, uniform.K, a.n) == 0 && a.head_K == 5 && a.hash == uniform.hash);
    x3_allocation_free(&a);
    r->n_tensors--;
    CHECK_OK(x3_recipe_save(r, path, &err), &err);
    CHECK_FAILS(x3_allocation_of_recipe(&a, c->model, path, &err), &err, "has no bits for model.layers.0.mlp.down_proj");
    r->n_tensors++;
    r->tensors[0].name[0] = 'M';
    CHECK_OK(x3_recipe_save(r, path, &err), &err);
    CHECK_FAILS(x3_allocation_of_recipe(&a, c->model, path, &err), &err, "has no bits for model.layers.0.self_attn.q_proj");
    r->tensors[0].name[0] = 'm';
    r->tensors = realloc(r->tensors, (r->n_tensors + 1) * sizeof *r->tensors);
    r->tensors[r->n_tensors++] = (x3_recipe_tensor){strdup("lm_head"), 6};
    CHECK_OK(x3_recipe_save(r, path, &err), &err);
    CHECK_FAILS(x3_allocation_of_recipe(&a, c->model, path, &err), &err, "\"lm_head\" is no linear");
    x3_recipe_free(r);
    x3_allocation_free(&uniform);
    x3_checkpoint_close(c);
}

/* ---- plans ---- */

struct problem {
    x3_checkpoint *c;
    double cost[64][8];
    uint64_t weights[64];
    size_t n;
};

/* Costs that fall by about a quarter a bit, of very different sizes. */
static void make_problem(struct problem *p, const char *dir, size_t layers, uint64_t seed)
{
    x3_tiny t = X3_TINY_DEFAULTS;
    const x3_linear_desc *d;
    size_t layer;
    x3_rng rng;

    t.layers = layers;
    t.inner = 256;
    p->c = open_tiny(dir, &t);
    x3_rng_init(&rng, seed, "costs");
    for (p->n = 0; (d = x3_model_linear(p->c->model, p->n, &layer)) != NULL && layer < layers; p->n++) {
        double cost = exp(3 * x3_rng_normal(&rng));
        p->weights[p->n] = x3_round_up(d->n_in, 128) * x3_round_up(d->n_out, 128);
        for (int k = 0; k < 8; k++, cost *= .2 + .1 * x3_rng_uniform(&rng))
            p->cost[p->n][k] = cost;
    }
}

/* Least cost of all allocations with K from 1 to max_K and q free of k = v, gate = up. */
static double best_of_all(const struct problem *p, int max_K, uint64_t budget)
{
    static const int set_of[7] = {0, 1, 1, 2, 3, 3, 4};
    int K[5] = {1, 1, 1, 1, 1};
    double best = INFINITY;

    for (int at = 0; at < 5;) {
        uint64_t bits = 0;
        double cost = 0;
        for (size_t i = 0; i < 7; i++) {
            bits += p->weights[i] * (uint64_t)K[set_of[i]];
            cost += p->cost[i][K[set_of[i]] - 1];
        }
        if (bits <= budget && cost < best)
            best = cost;
        for (at = 0; at < 5 && ++K[at] > max_K; at++)
            K[at] = 1;
    }
    return best;
}

X3_TEST(plan_is_close_to_the_best_of_all_allocations_and_never_over_the_budget)
{
    const char *dir = x3_test_temp_dir();
    double excess = 0;
    int n = 0;
    x3_err err = {0};

    for (uint64_t seed = 1; seed <= 6; seed++) {
        struct problem p;
        make_problem(&p, x3_test_path(dir, "model"), 1, seed);
        const uint64_t total = x3_body_weights(p.c->model);
        for (double bits = 1; bits <= 6; bits += 0.37, n++) {
            x3_plan_request r = {.tie = X3_TIE_DEFAULT, .min_K = 1, .max_K = 6, .head_K = 6,
                                 .budget = (uint64_t)(bits * (double)total), .cost = (const double(*)[8])p.cost};
            x3_allocation a;
            uint64_t used = 0, smallest = UINT64_MAX;
            CHECK_OK(x3_allocate_planned(&a, p.c->model, &r, &err), &err);
            CHECK(a.K[1] == a.K[2] && a.K[4] == a.K[5]);
            for (size_t i = 0; i < 7; i++) {
                used += a.K[i] * p.weights[i];
                if (a.K[i] < 6)
                    smallest = p.weights[i] * (i == 1 || i == 2 || i == 4 || i == 5 ? 2 : 1) < smallest
                                   ? p.weights[i] * (i == 1 || i == 2 || i == 4 || i == 5 ? 2 : 1) : smallest;
            }
            CHECK_MSG(used <= r.budget, "over the budget at %g bits", bits);
            CHECK_MSG(smallest == UINT64_MAX || r.budget - used < smallest, "room for a raise left at %g bits", bits);
            double cost = x3_allocation_cost(&a, r.cost), best = best_of_all(&p, 6, r.budget);
            CHECK_MSG(cost >= best * (1 - 1e-12) && cost <= 1.6 * best, "cost %g, the best of all has %g", cost, best);
            excess += log(cost / best);
            x3_allocation_free(&a);
        }
        x3_checkpoint_close(p.c);
    }
    CHECK_MSG(exp(excess / n) < 1.05, "mean cost %g of the best", exp(excess / n)); /* five sets: steps are coarse */
}

X3_TEST(plan_keeps_bits_set_by_hand_limits_and_ties)
{
    const char *dir = x3_test_temp_dir();
    struct problem p;
    uint8_t fixed[64] = {0};
    x3_allocation a;
    x3_err err = {0};

    make_problem(&p, x3_test_path(dir, "model"), 4, 1);
    x3_plan_request r = {.tie = X3_TIE_FUSED, .min_K = 2, .max_K = 5, .head_K = 6, .fixed = fixed,
                         .budget = 3 * x3_body_weights(p.c->model), .cost = (const double(*)[8])p.cost};
    fixed[0] = 8; /* q, tied to k and v */
    CHECK_OK(x3_allocate_planned(&a, p.c->model, &r, &err), &err);
    CHECK(a.K[0] == 8 && a.K[1] == 8 && a.K[2] == 8 && a.head_K == 6);
    for (size_t i = 3; i < p.n; i++)
        CHECK(a.K[i] >= 2 && a.K[i] <= 5);
    for (size_t i = 0; i < p.n; i += 7)
        CHECK(a.K[i] == a.K[i + 1] && a.K[i] == a.K[i + 2] && a.K[i + 4] == a.K[i + 5]);
    x3_allocation_free(&a);
    fixed[1] = 7;
    CHECK_FAILS(x3_allocate_planned(&a, p.c->model, &r, &err), &err, "k_proj is set to 7 bits and tied");
    fixed[1] = 0;
    r.budget = 2 * x3_body_weights(p.c->model);
    CHECK_FAILS(x3_allocate_planned(&a, p.c->model, &r, &err), &err, "the budget is 2.0000 bits a weight");
    x3_checkpoint_close(p.c);
}

X3_TEST(plan_for_a_size_fills_it_and_says_when_it_cannot)
{
    const char *dir = x3_test_temp_dir();
    struct problem p;
    const char *sets[] = {"*.layers.1.mlp.*=7", "*down_proj=2"}, *none[] = {"*.q_projx=3"}, *bad[] = {"*=9"};
    x3_plan plan;
    x3_err err = {0};

    make_problem(&p, x3_test_path(dir, "model"), 3, 2);
    double kl[64];
    for (size_t i = 0; i < p.n; i++)
        kl[i] = p.cost[i][2];
    x3_measurement m = {.codebook = X3_CB_MUL1, .noise_bits = 3, .n = p.n, .kl = kl};
    x3_plan_options o = {.bits = 3, .head_bits = 6, .min_bits = 1, .max_bits = 8};
    CHECK_OK(x3_plan_create(&plan, p.c, &m, &o, &err), &err);
    CHECK(plan.predicted_kl <= plan.uniform_kl && plan.allocation.body_bits <= 3);
    uint64_t bytes = plan.folder_bytes;
    x3_plan_free(&plan);
    o.bits = 0;
    o.size_bytes = bytes + 40000;
    CHECK_OK(x3_plan_create(&plan, p.c, &m, &o, &err), &err);
    CHECK_MSG(plan.folder_bytes <= o.size_bytes && plan.folder_bytes + 16384 > o.size_bytes, "%llu bytes for %llu",
              (unsigned long long)plan.folder_bytes, (unsigned long long)o.size_bytes); /* a set is 4096 to 8192 bytes a bit */
    x3_plan_free(&plan);
    o.size_bytes = 1000;
    CHECK_FAILS(x3_plan_create(&plan, p.c, &m, &o, &err), &err, "1000 bytes are asked for, the smallest pack");
    o.size_bytes = 0;
    o.bits = 4;
    o.sets = sets;
    o.n_sets = 2;
    CHECK_OK(x3_plan_create(&plan, p.c, &m, &o, &err), &err);
    CHECK(plan.allocation.K[7 + 4] == 7 && plan.allocation.K[7 + 5] == 7); /* gate and up */
    for (size_t i = 6; i < p.n; i += 7)
        CHECK(plan.allocation.K[i] == 2);
    x3_plan_free(&plan);
    o.bits = 0;
    o.size_bytes = bytes + 80000; /* the plan of a size begins with everything at its least */
    CHECK_OK(x3_plan_create(&plan, p.c, &m, &o, &err), &err);
    CHECK(plan.allocation.K[7 + 4] == 7 && plan.allocation.K[6] == 2 && plan.folder_bytes <= o.size_bytes);
    x3_plan_free(&plan);
    o.size_bytes = 0;
    o.bits = 4;
    kl[0] = 0; /* nothing was seen of it */
    o.n_sets = 0;
    CHECK_OK(x3_plan_create(&plan, p.c, &m, &o, &err), &err);
    CHECK(plan.allocation.K[0] == X3_UNMEASURED_K && plan.n_unmeasured == 1);
    x3_plan_free(&plan);
    o.sets = none;
    o.n_sets = 1;
    CHECK_FAILS(x3_plan_create(&plan, p.c, &m, &o, &err), &err, "no linear that is quantized has a name like \"*.q_projx\"");
    o.sets = bad;
    CHECK_FAILS(x3_plan_create(&plan, p.c, &m, &o, &err), &err, "--set *=9: expected PATTERN=K");
    x3_checkpoint_close(p.c);
}

/* ---- measurements ---- */

static char *read_text(const char *path)
{
    char *text = NULL;
    size_t n;
    x3_err err = {0};

    CHECK_OK(x3_read_file(&text, &n, path, 1u << 24, &err), &err);
    return text;
}

X3_TEST(measurement_in_one_pass_and_in_many_is_the_same)
{
    const char *root = x3_test_temp_dir(), *one = x3_test_path(root, "one.json"), *many = x3_test_path(root, "many.json");
    char model[300], text[300];
    x3_tiny t = X3_TINY_DEFAULTS;
    x3_findings findings = {0};
    x3_measurement a, b;
    x3_err err = {0};

    x3_test_skip_if_emulated();
    snprintf(model, sizeof model, "%s", x3_test_path(root, "model"));
    snprintf(text, sizeof text, "%s", x3_test_path(root, "text.txt"));
    x3_checkpoint *c = open_tiny(model, &t);
    x3_tiny_text(text, 2200, 1);
    x3_measure_options o = {.model = model, .out = one, .texts = (const char *const[]){text}, .n_texts = 1, .rows = 4,
                            .cols = 128, .score_rows = 2, .noise_bits = 3, .codebook = X3_CB_MUL1, .seed = 1, .device = "cpu", .n_threads = 2};
    CHECK_OK(x3_measure_run(&o, NULL, &findings, &err), &err);
    CHECK_OK(x3_measurement_load(&a, one, c, &err), &err);
    o.out = many;
    o.memory_bytes = 1; /* a layer a pass */
    o.n_threads = 1;
    CHECK_OK(x3_measure_run(&o, NULL, &findings, &err), &err);
    CHECK_OK(x3_measurement_load(&b, many, c, &err), &err);
    CHECK(a.n == 14 && b.n == 14);
    for (size_t i = 0; i < a.n; i++)
        CHECK_MSG(a.kl[i] > 0 && a.kl[i] == b.kl[i], "linear %zu: %g and %g", i, a.kl[i], b.kl[i]);
    x3_measurement_free(&b);

    /* cut off after its first pass, then gone on with */
    char *whole = read_text(many), *cut = strdup(whole), *at = strstr(cut, "\"finished_layers\":\t2");
    CHECK(at != NULL);
    at[strlen("\"finished_layers\":\t")] = '1';
    x3_test_write(many, cut, strlen(cut));
    CHECK_FAILS(x3_measurement_load(&b, many, c, &err), &err, "1 of 2 layers are measured");
    cJSON *file = cJSON_Parse(cut), *list = cJSON_GetObjectItem(file, "linears");
    for (int i = 0; i < 7; i++)
        cJSON_DeleteItemFromArray(list, 7);
    char *text_of_cut = cJSON_Print(file);
    x3_test_write(many, text_of_cut, strlen(text_of_cut));
    o.start = X3_MEASURE_RESUME;
    CHECK_OK(x3_measure_run(&o, NULL, &findings, &err), &err);
    char *again = read_text(many);
    CHECK_MSG(strcmp(again, whole) == 0, "the resumed file differs");

    o.seed = 2;
    CHECK_FAILS(x3_measure_run(&o, NULL, &findings, &err), &err, "is a measurement with other options");
    CHECK((at = strstr(again, "\"exl3_measurement\":\t3")) != NULL);
    at[strlen("\"exl3_measurement\":\t")] = '1';
    x3_test_write(many, again, strlen(again));
    CHECK_FAILS(x3_measurement_load(&b, many, c, &err), &err, "was measured by method 1, this program reads method 3");
    x3_checkpoint_close(c);
    t.hidden = 256;
    c = open_tiny(x3_test_path(root, "other"), &t);
    CHECK_FAILS(x3_measurement_load(&b, one, c, &err), &err, "the measurement of another model");
    x3_checkpoint_close(c);
    x3_measurement_free(&a);
    cJSON_Delete(file);
    free(text_of_cut);
    free(again);
    free(cut);
    free(whole);
}

X3_TEST(measurement_of_experts_shares_what_they_cost_and_does_not_depend_on_passes)
{
    const char *root = x3_test_temp_dir(), *out = x3_test_path(root, "m.json");
    char model[300], text[300];
    x3_tiny t = X3_TINY_MOE("glm4_moe");
    x3_findings findings = {0};
    x3_measurement a, b;
    x3_err err = {0};
    size_t layer, n = 0;

    x3_test_skip_if_emulated();
    t.experts = 18; /* more than are disturbed at a time */
    t.chosen = 3;
    t.dense = 1;
    snprintf(model, sizeof model, "%s", x3_test_path(root, "model"));
    snprintf(text, sizeof text, "%s", x3_test_path(root, "text.txt"));
    x3_checkpoint *c = open_tiny(model, &t);
    x3_tiny_text(text, 2200, 1);
    x3_measure_options o = {.model = model, .out = out, .texts = (const char *const[]){text}, .n_texts = 1, .rows = 4,
                            .cols = 128, .score_rows = 2, .noise_bits = 3, .codebook = X3_CB_MUL1, .seed = 1, .device = "cpu", .n_threads = 2};
    CHECK_OK(x3_measure_run(&o, NULL, &findings, &err), &err);
    CHECK_OK(x3_measurement_load(&a, out, c, &err), &err);
    o.memory_bytes = 1; /* a layer a pass */
    CHECK_OK(x3_measure_run(&o, NULL, &findings, &err), &err);
    CHECK_OK(x3_measurement_load(&b, out, c, &err), &err);
    double least = INFINITY, most = 0;
    for (size_t i = 0; i < a.n; i++) {
        const x3_linear_desc *d = x3_model_linear(c->model, i, &layer);
        CHECK_MSG(a.kl[i] == b.kl[i] && (a.kl[i] > 0) == d->quantized, "%s: %g and %g", d->name, a.kl[i], b.kl[i]);
        if (strstr(d->name, ".experts.") != NULL && strstr(d->name, "down_proj") != NULL) {
            least = fmin(least, a.kl[i]);
            most = fmax(most, a.kl[i]);
            n++;
        }
    }
    CHECK(n == 18 && least < most && most < 18 * least * 100);
    x3_measurement_free(&a);
    x3_measurement_free(&b);
    x3_checkpoint_close(c);
}
