/* Model descriptors, rope, the forward pass, the cache, references and scores. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

#include "calib/hessian.h"
#include "formats/io.h"
#include "quant/score.h"
#include "runtime/generate.h"
#include "tests/family_check.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

#define BUNDLED "tests/data/models/tiny-qwen3"

/* ---- rope ---- */

X3_TEST(rope_tables_of_every_variant_equal_transformers)
{
    cJSON *json = NULL;
    x3_err err = {0};

    CHECK_OK(x3_json_load(&json, "tests/data/rope.json", &err), &err);
    for (const cJSON *c = x3_json_get(json, "cases")->child; c != NULL; c = c->next) {
        const char *name = x3_json_get(c, "name")->valuestring;
        size_t dim = (size_t)x3_json_get(c, "head_dim")->valueint, n = (size_t)x3_json_get(c, "n_positions")->valueint;
        float *table = malloc(n * dim * sizeof *table);
        x3_rope_desc rope;
        double worst = 0;
        CHECK_OK(x3_rope_read(&rope, x3_json_get(c, "config"), NULL, dim, 1, name, &err), &err);
        CHECK_OK(x3_rope_table(&rope, n, table, &err), &err);
        for (int i = 0; i < cJSON_GetArraySize(x3_json_get(c, "positions")); i++) {
            int p = cJSON_GetArrayItem(x3_json_get(c, "positions"), i)->valueint;
            const cJSON *cosine = cJSON_GetArrayItem(x3_json_get(c, "cos"), i), *sine = cJSON_GetArrayItem(x3_json_get(c, "sin"), i);
            for (size_t j = 0; j < dim / 2; j++) {
                worst = fmax(worst, fabs(table[(size_t)p * dim + j] - cJSON_GetArrayItem(cosine, (int)j)->valuedouble));
                worst = fmax(worst, fabs(table[(size_t)p * dim + dim / 2 + j] - cJSON_GetArrayItem(sine, (int)j)->valuedouble));
            }
        }
        /* angles are float32 there and here: one rounding of 3,000 radians is 1.2e-4 */
        CHECK_MSG(worst < 3e-4, "%s: differs by %g", name, worst);
        free(table);
    }
    cJSON_Delete(json);
}

static void check_rope_refused(const char *config, const char *what)
{
    cJSON *json = NULL;
    x3_rope_desc rope;
    x3_err err = {0};

    CHECK_OK(x3_json_parse(&json, config, strlen(config), "config.json", &err), &err);
    CHECK_FAILS(x3_rope_read(&rope, json, NULL, 64, 1, "config.json", &err), &err, what);
    cJSON_Delete(json);
}

X3_TEST(rope_refuses_what_it_does_not_know)
{
    check_rope_refused("{\"max_position_embeddings\": 10}", "rope_theta is missing");
    check_rope_refused("{\"max_position_embeddings\": 10, \"rope_theta\": 1e4, \"rope_parameters\": {\"rope_theta\": 1e5}}",
                       "10000 at the top and 100000");
    check_rope_refused("{\"max_position_embeddings\": 10, \"rope_theta\": 1e4, \"rope_scaling\": {\"type\": \"ntk\"}}", "\"ntk\"");
    check_rope_refused("{\"max_position_embeddings\": 10, \"rope_theta\": 1e4, \"rope_scaling\": {\"type\": \"linear\"}}", "factor");
    check_rope_refused("{\"max_position_embeddings\": 10, \"rope_theta\": 1e4, \"rope_scaling\": {\"type\": \"linear\", "
                       "\"factor\": 2, \"twist\": 3}}", "\"twist\"");
    check_rope_refused("{\"max_position_embeddings\": 10, \"rope_theta\": 1e4, \"rope_scaling\": {\"type\": \"llama3\", "
                       "\"factor\": 2}}", "low_freq_factor");
    check_rope_refused("{\"max_position_embeddings\": 10, \"rope_theta\": -1}", "rope_theta");
}

/* ---- forward ---- */

X3_TEST(forward_of_the_bundled_model_equals_transformers)
{
    x3_findings f = {0};
    x3_safetensors *st = NULL;
    x3_checkpoint *c = x3_test_open_model(BUNDLED);
    x3_device *dev = x3_test_open_threads(2);
    const size_t hidden = c->model->hidden, vocab = c->model->vocab;
    int32_t *ids = NULL;
    x3_weight head;
    double worst = 0;
    x3_err err = {0};

    CHECK_OK(x3_safetensors_open(&st, BUNDLED "/reference_logits.safetensors.ref", &f, &err), &err);
    CHECK_OK(x3_safetensors_load(st, x3_safetensors_find(st, "input_ids"), (void **)&ids, &err), &err);
    float *states = malloc(256 * hidden * 4), *logits = malloc(64 * vocab * 4), *expected = malloc(64 * vocab * 4);
    CHECK_OK(x3_safetensors_read_f32(st, x3_safetensors_find(st, "logits"), 0, 64 * vocab, expected, &err), &err);
    CHECK_OK(x3_stream_hidden(dev, c, ids, 1, 256, states, NULL, &err), &err);
    CHECK_OK(x3_linear_load(&head, dev, c, &c->model->head, &err), &err);
    CHECK_OK(dev->ops->linear(dev, &head, states, 4 * hidden, 64, logits, vocab, &err), &err);
    for (size_t i = 0; i < 64 * vocab; i++)
        worst = fmax(worst, fabs(logits[i] - expected[i]));
    CHECK_MSG(worst < 1e-4, "logits differ by %g", worst); /* observed 2.3e-5 */
    x3_linear_free(&head, dev);
    free(ids);
    free(states);
    free(logits);
    free(expected);
    x3_safetensors_close(st);
    x3_checkpoint_close(c);
    x3_device_close(dev);
}

/* Logits of every position, one token at a time or in pieces, against the full forward: the same bits. */
static void check_decoding(const char *model, size_t n, size_t first, size_t step)
{
    x3_checkpoint *c = x3_test_open_model(model);
    x3_device *dev = x3_test_open_threads(1);
    const size_t hidden = c->model->hidden, vocab = c->model->vocab;
    float *states = malloc(n * hidden * 4), *full = malloc(n * vocab * 4), *logits = malloc(vocab * 4);
    int32_t *ids = malloc(n * sizeof *ids);
    x3_generator *g = NULL;
    x3_weight head;
    x3_rng rng;
    x3_err err = {0};

    x3_rng_init(&rng, 5, "ids");
    for (size_t i = 0; i < n; i++)
        ids[i] = (int32_t)(x3_rng_next(&rng) % vocab);
    CHECK_OK(x3_stream_hidden(dev, c, ids, 1, n, states, NULL, &err), &err);
    CHECK_OK(x3_linear_load(&head, dev, c, &c->model->head, &err), &err);
    CHECK_OK(dev->ops->linear(dev, &head, states, hidden, n, full, vocab, &err), &err);
    CHECK_OK(x3_generator_create(&g, dev, c, n, &err), &err);
    for (size_t at = 0; at < n;) {
        size_t take = x3_min_size(at == 0 ? first : step, n - at);
        CHECK_OK(x3_generator_feed(g, ids + at, take, logits, &err), &err);
        at += take;
        CHECK_MSG(memcmp(logits, full + (at - 1) * vocab, vocab * 4) == 0, "logits of position %zu differ", at - 1);
    }
    CHECK_FAILS(x3_generator_feed(g, ids, 1, logits, &err), &err, "do not fit the context");
    x3_generator_free(g);
    x3_linear_free(&head, dev);
    free(states);
    free(full);
    free(logits);
    free(ids);
    x3_checkpoint_close(c);
    x3_device_close(dev);
}

X3_TEST(decoding_in_pieces_equals_the_full_forward_bit_for_bit)
{
    const char *dir = x3_test_path(x3_test_temp_dir(), "window");
    x3_tiny t = X3_TINY_DEFAULTS;

    check_decoding(BUNDLED, 150, 1, 1);
    check_decoding(BUNDLED, 200, 70, 13);
    t.model_type = "mistral";
    t.heads = 6;
    t.kv_heads = 2;
    t.more_config = "\"sliding_window\": 19,";
    x3_tiny_write(dir, &t);
    check_decoding(dir, 130, 40, 1);
    check_decoding(dir, 130, 5, 31);
}

X3_TEST(streaming_more_rows_than_a_batch_gives_the_same_states)
{
    x3_checkpoint *c = x3_test_open_model(BUNDLED);
    x3_device *dev = x3_test_open_threads(2);
    const size_t hidden = c->model->hidden;
    enum { ROWS = 9, COLS = 1024 }; /* a batch holds 8 */
    int32_t *ids = malloc(ROWS * COLS * 4);
    float *all = malloc(ROWS * COLS * hidden * 4), *one = malloc(COLS * hidden * 4);
    x3_err err = {0};

    CHECK(x3_stream_batch(ROWS, COLS) == 8);
    for (int i = 0; i < ROWS * COLS; i++)
        ids[i] = (i * 37 + i / 11) % 4096;
    CHECK_OK(x3_stream_hidden(dev, c, ids, ROWS, COLS, all, NULL, &err), &err);
    for (size_t row = 7; row < ROWS; row++) {
        CHECK_OK(x3_stream_hidden(dev, c, ids + row * COLS, 1, COLS, one, NULL, &err), &err);
        CHECK(memcmp(one, all + row * COLS * hidden, COLS * hidden * 4) == 0);
    }
    free(ids);
    free(all);
    free(one);
    x3_checkpoint_close(c);
    x3_device_close(dev);
}

/* ---- Hessian ---- */

X3_TEST(hessian_is_the_mean_and_leaves_out_rows_that_are_not_finite)
{
    enum { N = 20, ROWS = 50 };
    x3_device *dev = x3_test_open_threads(1);
    float q[ROWS * N], f[ROWS * N];
    x3_hessian *h = NULL;
    x3_rng rng;
    x3_err err = {0};

    x3_rng_init(&rng, 1, "hessian");
    for (int i = 0; i < ROWS * N; i++) {
        q[i] = (float)x3_rng_normal(&rng);
        f[i] = (float)x3_rng_normal(&rng);
    }
    q[3 * N + 2] = NAN;
    f[40 * N + 7] = INFINITY;
    CHECK_OK(x3_hessian_create(&h, dev, N, true, &err), &err);
    CHECK_OK(x3_hessian_add(h, q, f, 30, &err), &err);
    CHECK_OK(x3_hessian_add(h, q + 30 * N, f + 30 * N, 20, &err), &err);
    CHECK_OK(x3_hessian_finish(h, &err), &err);
    CHECK(h->n_rows == 48 && h->n_dropped == 2 && isnan(q[3 * N + 2]));
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            double a = 0, c = 0;
            for (int r = 0; r < ROWS; r++)
                if (r != 3 && r != 40) {
                    a += (double)q[r * N + i] * q[r * N + j] / 48;
                    c += (double)f[r * N + i] * q[r * N + j] / 48;
                }
            CHECK(fabs(h->d_a[i * N + j] - a) < 1e-6 && fabs(h->d_c[i * N + j] - c) < 1e-6);
        }
    x3_hessian_free(h);
    x3_device_close(dev);
}

X3_TEST(block_ldl_rebuilds_the_matrix_and_spd_solve_inverts_it)
{
    enum { N = 208, M = 5 }; /* more than one block of the factorization */
    x3_device *dev = x3_test_open_threads(2);
    float *a = calloc(N * N, 4), *l = malloc(N * N * 4), *b = malloc(M * N * 4), *x = malloc(M * N * 4);
    double *d = calloc(N * N, 8);
    x3_rng rng;
    x3_err err = {0};

    x3_rng_init(&rng, 1, "ldl");
    for (int r = 0; r < 2 * N; r++) {
        float row[N];
        for (int i = 0; i < N; i++)
            row[i] = (float)x3_rng_normal(&rng) + (i > 0 ? row[i - 1] / 2 : 0);
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++)
                a[i * N + j] += row[i] * row[j] / (2 * N);
    }
    memcpy(l, a, N * N * 4);
    CHECK_OK(dev->ops->block_ldl(dev, l, N, &err), &err);
    /* D = L^-1 A L^-T by substitution, must be block diagonal */
    for (int i = 0; i < N * N; i++)
        d[i] = a[i];
    for (int i = 0; i < N; i++)
        for (int k = 0; k < i; k++)
            for (int j = 0; j < N; j++)
                d[i * N + j] -= (double)l[i * N + k] * d[k * N + j];
    for (int i = 0; i < N; i++)
        for (int k = 0; k < i; k++)
            for (int j = 0; j < N; j++)
                d[j * N + i] -= (double)l[i * N + k] * d[j * N + k];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < N; j++) {
            CHECK(i / 16 == j / 16 || fabs(d[i * N + j]) < 1e-5);
            CHECK(j / 16 <= i / 16 || l[i * N + j] == 0);
            CHECK(i / 16 != j / 16 || l[i * N + j] == (i == j));
        }
    for (int i = 0; i < M * N; i++)
        b[i] = x[i] = (float)x3_rng_normal(&rng);
    CHECK_OK(dev->ops->spd_solve(dev, a, N, x, M, &err), &err);
    for (int r = 0; r < M; r++)
        for (int j = 0; j < N; j++) {
            double sum = 0;
            for (int k = 0; k < N; k++)
                sum += (double)x[r * N + k] * a[k * N + j];
            CHECK(fabs(sum - b[r * N + j]) < 1e-4);
        }
    a[5 * N + 5] = -1;
    CHECK_FAILS(dev->ops->block_ldl(dev, a, N, &err), &err, "not positive definite");
    free(a);
    free(l);
    free(b);
    free(x);
    free(d);
    x3_device_close(dev);
}

/* ---- text, references, scores ---- */

static void write_datasets(const char *dir, const char *role, const char *file)
{
    char line[400];
    uint64_t hash;
    x3_err err = {0};
    char *text = NULL;
    size_t n;

    CHECK_OK(x3_read_file(&text, &n, file, 1 << 20, &err), &err);
    hash = x3_hash(text, n);
    free(text);
    int length = snprintf(line, sizeof line, "# role path bytes xxh3 licence\n%s text.txt %zu %016llx CC0-1.0\n", role, n,
                          (unsigned long long)hash);
    x3_test_write(x3_test_path(dir, "datasets.txt"), line, (size_t)length);
}

X3_TEST(corpus_joins_texts_skips_tokens_and_drops_the_incomplete_row)
{
    const char *dir = x3_test_temp_dir();
    x3_tiny tiny = X3_TINY_DEFAULTS;
    x3_tokenizer *t = NULL;
    x3_corpus *c = NULL;
    int32_t *ids = NULL;
    size_t n_rows = 0;
    x3_err err = {0};

    x3_tiny_write(dir, &tiny);
    CHECK_OK(x3_tokenizer_load(&t, x3_test_path(dir, "tokenizer.json"), &err), &err);
    static const char lines[] = "{\"text\": \"one\", \"x\": 1}\n\n{\"text\": \"t\\u00e9\"}\n";
    x3_test_write(x3_test_path(dir, "a.jsonl"), lines, sizeof lines - 1);
    x3_test_write(x3_test_path(dir, "b.txt"), "three\n", 6);
    const char *paths[] = {x3_test_path(dir, "a.jsonl"), x3_test_path(dir, "b.txt")};
    CHECK_OK(x3_corpus_load(&c, paths, 2, X3_USE_CALIBRATION, &err), &err);
    CHECK(c->n_bytes == 16 && memcmp(c->text, "one\n\nt\xC3\xA9\n\nthree\n", 16) == 0);
    CHECK_OK(x3_corpus_rows(c, t, 0, 100, 5, &ids, &n_rows, &err), &err);
    CHECK(n_rows == 3 && ids[0] == 'o' && ids[5] == 't' && ids[6] == 0xC3);
    free(ids);
    CHECK_OK(x3_corpus_rows(c, t, 5, 1, 4, &ids, &n_rows, &err), &err);
    CHECK(n_rows == 1 && ids[0] == 't');
    free(ids);
    CHECK_FAILS(x3_corpus_rows(c, t, 12, 1, 5, &ids, &n_rows, &err), &err, "4 tokens after those skipped, a row needs 5");
    x3_corpus_free(c);
    x3_test_write(x3_test_path(dir, "bad.jsonl"), "{\"text\": \"one\"}\n{\"no\": 1}\n", 27);
    paths[0] = x3_test_path(dir, "bad.jsonl");
    CHECK_FAILS(x3_corpus_load(&c, paths, 1, X3_USE_CALIBRATION, &err), &err, "line 2: \"text\" is missing");
    paths[0] = paths[1];
    CHECK_FAILS(x3_corpus_load(&c, paths, 2, X3_USE_CALIBRATION, &err), &err, "the same text");
    x3_tokenizer_free(t);
}

X3_TEST(corpus_refuses_a_text_that_is_listed_for_the_other_use)
{
    const char *dir = x3_test_temp_dir(), *path = x3_test_path(dir, "text.txt");
    x3_corpus *c = NULL;
    x3_err err = {0};

    x3_tiny_text(path, 100, 1);
    write_datasets(dir, "calibration", path);
    CHECK_FAILS(x3_corpus_load(&c, &path, 1, X3_USE_EVALUATION, &err), &err, "may not be used for evaluation");
    CHECK_OK(x3_corpus_load(&c, &path, 1, X3_USE_CALIBRATION, &err), &err);
    x3_corpus_free(c);
    write_datasets(dir, "evaluation", path);
    CHECK_FAILS(x3_corpus_load(&c, &path, 1, X3_USE_CALIBRATION, &err), &err, "may not be used for calibration");
    x3_test_write(x3_test_path(dir, "datasets.txt"), "evaluation text.txt\n", 20);
    CHECK_FAILS(x3_corpus_load(&c, &path, 1, X3_USE_EVALUATION, &err), &err, "role path bytes xxh3 licence");
}

X3_TEST(bundled_datasets_are_what_the_list_says)
{
    x3_dataset *sets = NULL;
    size_t n = 0, calibration = 0, evaluation = 0;
    x3_err err = {0};

    CHECK_OK(x3_datasets_load(&sets, &n, "datasets.txt", &err), &err);
    for (size_t i = 0; i < n; i++) {
        char *text = NULL;
        size_t bytes;
        CHECK_OK(x3_read_file(&text, &bytes, sets[i].path, 1 << 24, &err), &err);
        CHECK_MSG(bytes == sets[i].n_bytes && x3_hash(text, bytes) == sets[i].hash, "%s", sets[i].path);
        calibration += strcmp(sets[i].role, "calibration") == 0 ? bytes : 0;
        evaluation += strcmp(sets[i].role, "evaluation") == 0 ? bytes : 0;
        free(text);
    }
    CHECK(calibration >= 60000 && evaluation >= 30000);
    free(sets);
}

/* A model scored against itself has lost nothing; a disturbed one has, and the receipt says all of it. */
X3_TEST(score_of_the_model_itself_is_zero_and_the_receipt_has_the_stable_names)
{
    static const char *const names[] = {"tool", "version", "source_id", "command", "seed", "source", "recipe", "pack",
                                        "reference", "text", "ctx", "positions", "vocab", "kl", "top1", "top5", "nll",
                                        "noise_floor", "nonfinite", "device", "seconds"};
    const char *dir = x3_test_temp_dir(), *text = x3_test_path(dir, "text.txt"), *x3r = x3_test_path(dir, "ref.x3r");
    x3_reference_options o = {.texts = &text, .n_texts = 1, .ctx = 50, .positions = 300, .skip = 7};
    x3_checkpoint *c = x3_test_open_model(BUNDLED);
    x3_device *dev = x3_test_open_threads(2);
    x3_reference *r = NULL;
    x3_score s;
    cJSON *receipt = NULL;
    x3_err err = {0};

    x3_tiny_text(text, 2000, 3);
    CHECK_OK(x3_reference_create(x3r, dev, c, &o, NULL, &err), &err);
    CHECK_OK(x3_reference_open(&r, x3r, &err), &err);
    CHECK(r->n_rows == 6 && r->ctx == 50);
    CHECK_OK(x3_score_pack(&s, dev, c, r, NULL, &err), &err);
    CHECK(fabs(s.kl_mean) < 1e-9 && s.top1 == 1 && s.top5 == 1 && s.n_nonfinite == 0 && s.n_positions == 300);
    CHECK(fabs(s.nll_reference - s.nll_pack) < 1e-6 && s.nll_pack > 0.5);
    CHECK(s.floor_kl < 1e-8 && s.floor_kl > -1e-12 && s.floor_positions == 100);
    CHECK_OK(x3_score_receipt(&receipt, &s, c, r, NULL, dev, "test", 1.5, &err), &err);
    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        CHECK_MSG(cJSON_GetObjectItemCaseSensitive(receipt, names[i]) != NULL, "receipt lacks \"%s\"", names[i]);
    CHECK(strcmp(x3_json_get(x3_json_get(receipt, "kl"), "direction")->valuestring, "reference||pack") == 0);
    cJSON_Delete(receipt);
    x3_score_free(&s);
    x3_reference_close(r);
    x3_checkpoint_close(c);
    x3_device_close(dev);
}

X3_TEST(score_row_equals_the_formula)
{
    enum { N = 50 };
    float p[N], q[N];
    double sp = 0, sq = 0, kl = 0;
    x3_score_position out;
    x3_rng rng;

    x3_rng_init(&rng, 1, "score");
    for (int i = 0; i < N; i++) {
        p[i] = 3 * (float)x3_rng_normal(&rng);
        q[i] = p[i] + (float)x3_rng_normal(&rng);
        sp += exp(p[i]);
        sq += exp(q[i]);
    }
    for (int i = 0; i < N; i++)
        kl += exp(p[i]) / sp * (p[i] - log(sp) - q[i] + log(sq));
    x3_score_row_ref(p, q, N, 7, &out);
    CHECK(out.finite && fabs(out.kl - kl) < 1e-12);
    CHECK(fabs(out.nll_reference - (log(sp) - p[7])) < 1e-12 && fabs(out.nll_pack - (log(sq) - q[7])) < 1e-12);
    q[3] = NAN;
    x3_score_row_ref(p, q, N, -1, &out);
    CHECK(!out.finite);
}

X3_TEST(reference_file_that_is_something_else_is_refused)
{
    const char *dir = x3_test_temp_dir();
    x3_reference *r = NULL;
    x3_err err = {0};

    x3_test_write(x3_test_path(dir, "text.x3r"), "some text, rather long", 22);
    CHECK_FAILS(x3_reference_open(&r, x3_test_path(dir, "text.x3r"), &err), &err, "text.x3r");
    CHECK_FAILS(x3_reference_open(&r, BUNDLED "/model.safetensors", &err), &err, "is not a reference file");
    CHECK_FAILS(x3_reference_open(&r, BUNDLED, &err), &err, "is a folder");
    CHECK_FAILS(x3_reference_open(&r, x3_test_path(dir, "none.x3r"), &err), &err, "none.x3r");
}
