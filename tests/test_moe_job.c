/* Experts in jobs: their Hessians, and experts with all, few or no tokens. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "quant/job.h"
#include "quant/verify.h"
#include "tests/family_check.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

/* ---- Hessians ---- */

enum { ROWS = 10, COLS = 64, TOKENS = ROWS * COLS, HIDDEN = 128, INNER = 64, EXPERTS = 4 };

/* What the hook saw on one path. */
struct seen {
    float block[TOKENS][HIDDEN];   /* input of router and experts */
    int rows[EXPERTS][TOKENS];     /* tokens of an expert */
    float weights[EXPERTS][TOKENS];
    size_t n[EXPERTS];
};

static x3_status record(void *arg, const x3_captured *in, x3_err *err)
{
    struct seen *s = arg;
    const int first = in->layer->moe.first_expert;

    (void)err;
    if (in->expert < 0 && in->input == in->layer->linears[in->layer->moe.router].input)
        memcpy(s->block, in->d_x, sizeof s->block);
    if (in->expert >= 0 && in->input == in->layer->linears[first + 3 * in->expert].input) {
        s->n[in->expert] = in->n_rows;
        for (size_t i = 0; i < in->n_rows; i++) {
            s->rows[in->expert][i] = in->d_rows[i];
            s->weights[in->expert][i] = in->weights[i];
        }
    }
    return X3_OK;
}

/* sum of w^2 x_i y_j over the sum of w^2; w NULL: 1. */
static void moments(double *out, const float *x, const float *y, const float *w, size_t n_rows, size_t n)
{
    double total = 0;

    memset(out, 0, n * n * sizeof *out);
    for (size_t r = 0; r < n_rows; r++) {
        const double square = w == NULL ? 1 : (double)w[r] * w[r];
        total += square;
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < n; j++)
                out[i * n + j] += square * x[r * n + i] * y[r * n + j];
    }
    for (size_t i = 0; i < n * n; i++)
        out[i] /= total > 0 ? total : 1;
}

/* a := part * a + (1 - part) * b */
static void blend(double *a, const double *b, double part, size_t n)
{
    for (size_t i = 0; i < n; i++)
        a[i] = part * a[i] + (1 - part) * b[i];
}

static void check_matrix(const float *got, const double *expected, size_t n, const char *what, int expert)
{
    double worst = 0, most = 0;

    for (size_t i = 0; i < n * n; i++) {
        worst = fmax(worst, fabs(got[i] - expected[i]));
        most = fmax(most, fabs(expected[i]));
    }
    CHECK_MSG(most > 0 && worst < 1e-5 * most, "%s of expert %d differs by %g of %g", what, expert, worst, most);
}

/* The input of an expert's down projection, from the definition. */
static void inner_of(const x3_checkpoint *c, const x3_layer_desc *l, int expert, const float *x, size_t n_rows, float *out)
{
    static float gate[INNER * HIDDEN], up[INNER * HIDDEN];
    const x3_linear_desc *d = &l->linears[l->moe.first_expert + 3 * expert];
    x3_err err = {0};

    CHECK_OK(x3_dense_read(c, d, 0, INNER, gate, &err), &err);
    CHECK_OK(x3_dense_read(c, d + 1, 0, INNER, up, &err), &err);
    for (size_t r = 0; r < n_rows; r++)
        for (size_t o = 0; o < INNER; o++) {
            double g = 0, u = 0;
            for (size_t i = 0; i < HIDDEN; i++) {
                g += (double)gate[o * HIDDEN + i] * x[r * HIDDEN + i];
                u += (double)up[o * HIDDEN + i] * x[r * HIDDEN + i];
            }
            out[r * INNER + o] = (float)(g / (1 + exp(-g)) * u);
        }
}

static void gather(float *out, const struct seen *s, const int *rows, size_t n)
{
    for (size_t i = 0; i < n; i++)
        memcpy(out + i * HIDDEN, s->block[rows[i]], HIDDEN * sizeof *out);
}

/* Gate and up, then down, of one expert against the definition. */
static void check_expert(const x3_checkpoint *c, const x3_layer_stats *s, const struct seen *q, const struct seen *f, int e)
{
    static float xq[TOKENS * HIDDEN], xf[TOKENS * HIDDEN], aq[TOKENS * INNER], af[TOKENS * INNER];
    static double a[HIDDEN * HIDDEN], other[HIDDEN * HIDDEN];
    static const int fill_rows[] = {0, 2, 5, 7}; /* 4 * 64 tokens: 4 rows of 10 */
    const size_t n = q->n[e], at = (size_t)s->layer->moe.first_expert + 3 * (size_t)e;
    const float *w = s->options.weighting == X3_EXPERT_WEIGHT_ALL ? q->weights[e] : NULL;
    const x3_hessian *in = x3_layer_stats_hessian(s, at), *down = x3_layer_stats_hessian(s, at + 2);
    int fill[4 * COLS];

    CHECK(s->tokens[e] == n);
    gather(xq, q, q->rows[e], n);
    gather(xf, f, q->rows[e], n); /* the quantized path's routing on both paths */
    inner_of(c, s->layer, e, xq, n, aq);
    inner_of(c, s->layer, e, xf, n, af);
    for (int cross = 0; cross < 2; cross++) {
        moments(a, cross ? xf : xq, xq, w, n, HIDDEN);
        moments(other, cross ? &f->block[0][0] : &q->block[0][0], &q->block[0][0], NULL, TOKENS, HIDDEN);
        blend(a, other, s->options.own ? fmin(1, (double)n / (2 * HIDDEN)) : 0, HIDDEN * HIDDEN);
        check_matrix(cross ? in->d_c : in->d_a, a, HIDDEN, cross ? "C of gate" : "A of gate", e);
    }
    for (int i = 0; i < 4 * COLS; i++)
        fill[i] = fill_rows[i / COLS] * COLS + i % COLS;
    for (int cross = 0; cross < 2; cross++) {
        moments(a, cross ? af : aq, aq, w, n, INNER);
        if (n < 2 * INNER) {
            static float fq[4 * COLS * INNER], ff[4 * COLS * INNER], x[4 * COLS * HIDDEN];
            gather(x, q, fill, 4 * COLS);
            inner_of(c, s->layer, e, x, 4 * COLS, fq);
            gather(x, f, fill, 4 * COLS);
            inner_of(c, s->layer, e, x, 4 * COLS, ff);
            moments(other, cross ? ff : fq, fq, NULL, 4 * COLS, INNER);
            blend(a, other, (double)n / (2 * INNER), INNER * INNER);
        }
        check_matrix(cross ? down->d_c : down->d_a, a, INNER, cross ? "C of down" : "A of down", e);
    }
}

X3_TEST(expert_hessians_equal_the_definition_with_the_quantized_paths_routing)
{
    static const float correction[EXPERTS] = {0.3f, 0, -0.35f, -9}; /* the third gets few tokens, the last none */
    static struct seen q, f;
    static float first[TOKENS * HIDDEN], second[TOKENS * HIDDEN], after[TOKENS * HIDDEN];
    const char *dir = x3_test_temp_dir();
    x3_tiny t = X3_TINY_MOE("glm4_moe");
    x3_layer_runner r;
    x3_layer_weights w;
    x3_hidden_state *path[2] = {NULL, NULL};
    x3_rng rng;
    x3_err err = {0};

    t.layers = 1;
    t.experts = EXPERTS;
    t.correction = correction;
    x3_tiny_write(dir, &t);
    x3_checkpoint *c = x3_test_open_model(dir);
    x3_device *dev = x3_test_open_threads(2);
    const x3_layer_desc *l = &c->model->layers[0];
    x3_rng_init(&rng, 1, "states");
    for (int i = 0; i < TOKENS * HIDDEN; i++) {
        first[i] = (float)x3_rng_normal(&rng);
        second[i] = first[i] + 0.2f * (float)x3_rng_normal(&rng);
    }
    CHECK_OK(x3_layer_runner_create(&r, dev, c->model, ROWS, COLS, &err), &err);
    CHECK_OK(x3_layer_runner_prepare(&r, l, &err), &err);
    CHECK_OK(x3_layer_weights_load(&w, dev, c, l, &err), &err);
    for (int round = 0; round < 3; round++) { /* the layer's Hessian; own; own and weighted */
        const x3_expert_options options = {.own = round > 0,
                                           .weighting = round == 2 ? X3_EXPERT_WEIGHT_ALL : X3_EXPERT_WEIGHT_NONE};
        x3_layer_stats s;
        for (int p = 0; p < 2; p++) {
            CHECK_OK(x3_hidden_state_create(&path[p], dev, dir, p == 0 ? "quantized" : "original", ROWS, COLS * HIDDEN,
                                            X3_HIDDEN_HOST, &err), &err);
            CHECK_OK(x3_hidden_state_write(path[p], 0, ROWS, p == 0 ? first : second, &err), &err);
            CHECK_OK(x3_hidden_state_start(path[p], &err), &err);
            r.f->capture = record;
            r.f->capture_arg = p == 0 ? &q : &f;
            CHECK_OK(x3_run_rows(&r, &w, path[p], 0, ROWS, &err), &err);
        }
        CHECK_OK(dev->ops->download(dev, after, r.d_x, sizeof after, &err), &err);
        CHECK(q.n[3] == 0 && q.n[2] > 0 && q.n[2] < 2 * INNER && q.n[0] > 2 * HIDDEN);
        CHECK(memcmp(q.rows[1], f.rows[1], sizeof q.rows[1]) != 0); /* the paths route differently */
        CHECK_OK(x3_layer_stats_create(&s, dev, l, &options, true, &err), &err);
        CHECK_OK(x3_capture_layer(&r, &w, path[0], path[1], false, &s, 3, &err), &err);
        CHECK_OK(x3_capture_layer(&r, &w, path[0], path[1], false, &s, EXPERTS, &err), &err);
        for (int e = 0; e < EXPERTS; e++)
            check_expert(c, &s, &q, &f, e);
        x3_layer_stats_free(&s);
        /* the last pass has left the original path's states after the layer, and the other path as it was */
        CHECK(memcmp(path[1]->states, after, sizeof after) == 0 && memcmp(path[0]->states, first, sizeof first) == 0);
        for (int p = 0; p < 2; p++)
            x3_hidden_state_free(path[p]);
    }
    x3_layer_weights_free(&w);
    x3_layer_runner_free(&r);
    x3_device_close(dev);
    x3_checkpoint_close(c);
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

static void check_verifies(const struct setup *s)
{
    x3_verify_report r;
    x3_device *dev = x3_test_open_threads(1);
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
        uint64_t hash = x3_test_shard_hash(s.out);
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
        CHECK_MSG(hash == x3_test_shard_hash(s.out), "other bytes with one thread and several passes");
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
    struct margins m = {.c = x3_test_open_model(s->model), .best = -9, .second = -9};
    x3_device *dev = x3_test_open_threads(1);
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
    CHECK_OK(x3_kv_layer_create(&kv, dev, l, b.n_pages, b.n_slots, X3_KV_F32, &err), &err);
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
        x3_checkpoint *pack = x3_test_open_model(s.out);
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
