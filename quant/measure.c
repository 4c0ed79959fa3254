/* Order of a measurement, and its file. measure_layer.c disturbs and runs the layers. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/exl3.h"
#include "formats/io.h"
#include "quant/job_state.h"
#include "quant/measure_internal.h"

#define CHUNK 128    /* positions whose logits are in memory at once */
#define TEXT_PART 32
#define METHOD 3      /* in the file; 1 was noise in one linear of an exact model alone, 2 twice the noise in a noisy one alone */
#define ENERGY_RISE 3 /* by which twice the noise exceeds the noise */
#define ONE_BIT_COST 2 /* times what its error says: linears of one bit cost more beside each other than one at a time (README) */

static void note(const struct x3_measure *s, const char *text)
{
    if (s->events.note != NULL)
        s->events.note(s->events.arg, text);
}

/* ---- text and states ---- */

/* n rows of cols tokens, spread evenly over ids [n_ids]. */
static x3_status spread_rows(struct x3_measured_rows *r, const int32_t *ids, size_t n_ids, size_t n, size_t cols, x3_err *err)
{
    x3_status rc = x3_alloc(&r->ids, n * cols, sizeof *r->ids, err);

    for (size_t i = 0; rc == X3_OK && i < n; i++)
        memcpy(r->ids + i * cols, ids + i * (n_ids / n), cols * sizeof *ids);
    r->n = n;
    r->cols = cols;
    return rc;
}

/* Removes what spread_rows took. */
static size_t remove_spread(int32_t *ids, size_t n_ids, size_t n, size_t cols)
{
    size_t to = 0;

    for (size_t from = 0; from < n_ids; from++)
        if (from / (n_ids / n) >= n || from % (n_ids / n) >= cols)
            ids[to++] = ids[from];
    return to;
}

/* Both kinds of rows are spread over the text (its first TEXT_PART-fold of what is needed), whose kinds differ. The scored
 * ones are others than those that calibrate: noise that avoids what the calibration has seen would look harmless on it.
 * They get at most a quarter of the text. */
static x3_status read_rows(struct x3_measure *s, x3_err *err)
{
    const size_t wanted = s->o.score_rows * X3_MEASURE_COLS + s->o.rows * s->o.cols;
    x3_tokenizer *tokenizer = NULL;
    size_t n = 0, n_scored, n_rows;
    int32_t *ids = NULL;
    char *path = NULL, text[200];
    x3_status rc;

    X3_TRY(rc, out, x3_path_join(&path, s->o.model, "tokenizer.json", err));
    X3_TRY(rc, out, x3_tokenizer_load(&tokenizer, path, err));
    X3_TRY(rc, out, x3_corpus_load(&s->corpus, s->o.texts, s->o.n_texts, X3_USE_CALIBRATION, err));
    X3_TRY(rc, out, x3_corpus_rows(s->corpus, tokenizer, 0, TEXT_PART * wanted, 1, &ids, &n, err));
    for (size_t i = 0; i < n; i++)
        if ((size_t)ids[i] >= s->source->model->vocab) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: token id %d of the text is past the embedding of %zu rows", path, ids[i],
                         s->source->model->vocab);
            goto out;
        }
    n_scored = x3_min_size(s->o.score_rows, n / 4 / X3_MEASURE_COLS);
    n_rows = x3_min_size(s->o.rows, (n - n_scored * X3_MEASURE_COLS) / s->o.cols);
    if (n_scored == 0 || n_rows == 0) {
        rc = x3_fail(err, X3_ERR_INPUT, "the text has %zu tokens; a measurement takes at least %d, and a row of %zu beside "
                     "the quarter that is scored (run --uniform does without)", n, 4 * X3_MEASURE_COLS, s->o.cols);
        goto out;
    }
    if (n < wanted) {
        snprintf(text, sizeof text, "measuring with %zu rows of %zu tokens and %zu of %d, which the text gives", n_rows,
                 s->o.cols, n_scored, X3_MEASURE_COLS);
        note(s, text);
    }
    X3_TRY(rc, out, spread_rows(&s->scored, ids, n, n_scored, X3_MEASURE_COLS, err));
    n = remove_spread(ids, n, n_scored, X3_MEASURE_COLS);
    rc = spread_rows(&s->calibration, ids, n, n_rows, s->o.cols, err);
out:
    free(ids);
    free(path);
    x3_tokenizer_free(tokenizer);
    return rc;
}

x3_status x3_measure_states(const struct x3_measure *s, const struct x3_measured_rows *r, x3_hidden_state **out, x3_err *err)
{
    return x3_hidden_state_create(out, s->dev, "", "measured", r->n, x3_state_floats(s->source->model, r->cols), s->place, err);
}

static x3_status embed(const struct x3_measure *s, struct x3_measured_rows *r, x3_err *err)
{
    float *row = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&row, x3_state_floats(s->source->model, r->cols), sizeof *row, err));
    for (size_t i = 0; i < r->n; i++) {
        X3_TRY(rc, out, x3_embed(s->source, r->ids + i * r->cols, r->cols, row, err));
        X3_TRY(rc, out, x3_hidden_state_write(r->clean, i, 1, row, err));
    }
out:
    free(row);
    return rc;
}

/* ---- the end ---- */

struct head {
    x3_weight weight;
    float *d_norm, *d_x, *d_clean, *d_path; /* [CHUNK][hidden], [CHUNK][vocab] twice */
    x3_score_position *positions;           /* [CHUNK] */
    double *row_kl;                         /* [path][alone, added][scored.n], and last the noisy rows' */
};

static x3_status open_head(struct x3_measure *s, struct head *h, x3_err *err)
{
    const x3_model *m = s->source->model;
    x3_status rc;

    X3_TRY(rc, out, x3_linear_load(&h->weight, s->dev, s->source, &m->head, err));
    X3_TRY(rc, out, x3_vector_load(&h->d_norm, s->dev, s->source, &m->final_norm, err));
    X3_TRY(rc, out, x3_device_floats(s->dev, &h->d_x, CHUNK * m->hidden, err));
    X3_TRY(rc, out, x3_device_floats(s->dev, &h->d_clean, CHUNK * m->vocab, err));
    X3_TRY(rc, out, x3_device_floats(s->dev, &h->d_path, CHUNK * m->vocab, err));
    X3_TRY(rc, out, x3_alloc(&h->positions, CHUNK, sizeof *h->positions, err));
    rc = x3_alloc(&h->row_kl, (2 * s->n_paths + 1) * s->scored.n, sizeof *h->row_kl, err);
out:
    return rc;
}

static void close_head(struct x3_measure *s, struct head *h)
{
    x3_linear_free(&h->weight, s->dev);
    x3_device_free(s->dev, h->d_norm);
    x3_device_free(s->dev, h->d_x);
    x3_device_free(s->dev, h->d_clean);
    x3_device_free(s->dev, h->d_path);
    free(h->positions);
    free(h->row_kl);
}

static x3_status logits_of(struct x3_measure *s, struct head *h, x3_hidden_state *states, size_t row, size_t first,
                           float *d_logits, x3_err *err)
{
    const x3_model *m = s->source->model;
    x3_status rc;

    X3_TRY(rc, out, x3_hidden_state_load_part(states, row, 1, first * m->hidden, CHUNK * m->hidden, h->d_x, err));
    X3_TRY(rc, out, s->dev->ops->rms_norm(s->dev, h->d_x, m->hidden, CHUNK, m->hidden, h->d_norm, m->norm_eps, h->d_x,
                                          m->hidden, err));
    rc = s->dev->ops->linear(s->dev, &h->weight, h->d_x, m->hidden, CHUNK, d_logits, m->vocab, err);
out:
    return rc;
}

static x3_status add_entry(struct x3_measure *s, const struct x3_measured_member *m, double kl, double stderr_, x3_err *err)
{
    cJSON *entry = cJSON_CreateObject();
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(s->linears, NULL, entry, err));
    X3_TRY(rc, out, x3_json_add(entry, "name", cJSON_CreateString(m->linear->name), err));
    X3_TRY(rc, out, x3_json_add(entry, "kl", cJSON_CreateNumber(kl * m->share), err));
    X3_TRY(rc, out, x3_json_add(entry, "kl_stderr", cJSON_CreateNumber(stderr_ * m->share), err));
    rc = x3_json_add(entry, "error", cJSON_CreateNumber(m->error), err);
out:
    return rc;
}

/* What a path costs on a row. */
static double row_cost(double alone, double added, double noisy)
{
    return (alone + (added - noisy) / ENERGY_RISE) / 2;
}

/* Adds what one path has cost to the file, an entry a linear: the mean of what its noise costs first, in an exact model, and
 * last, where all others have theirs. Chance can make a small cost negative: it is then, and where it is less, a tenth of its
 * standard error. */
static x3_status add_result(struct x3_measure *s, const struct x3_measured_path *p, const double *alone_kl, const double *added_kl,
                            const double *noisy_kl, x3_err *err)
{
    const size_t n = s->scored.n;
    double mean = 0, squares = 0, stderr_;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < n; i++)
        mean += row_cost(alone_kl[i], added_kl[i], noisy_kl[i]) / (double)n;
    for (size_t i = 0; i < n; i++)
        squares += pow(row_cost(alone_kl[i], added_kl[i], noisy_kl[i]) - mean, 2);
    stderr_ = n < 2 ? 0 : sqrt(squares / (double)(n - 1) / (double)n);
    for (size_t i = 0; i < p->n_members && rc == X3_OK; i++)
        rc = add_entry(s, &p->members[i], fmax(mean, stderr_ / 10), stderr_, err);
    return rc;
}

/* Adds the KL of CHUNK positions, whose clean logits are in h->d_clean. `what`: for the message. */
static x3_status score_part(struct x3_measure *s, struct head *h, x3_hidden_state *states, size_t row, size_t first,
                            double *row_kl, const char *what, x3_err *err)
{
    int32_t next[CHUNK];
    x3_status rc;

    memset(next, 0xff, sizeof next); /* -1: none */
    X3_TRY(rc, out, logits_of(s, h, states, row, first, h->d_path, err));
    X3_TRY(rc, out, s->dev->ops->score(s->dev, h->d_clean, h->d_path, CHUNK, s->source->model->vocab, next, h->positions, err));
    for (size_t i = 0; i < CHUNK; i++) {
        if (!h->positions[i].finite)
            return x3_fail(err, X3_ERR_NUMERIC, "%s: logits are not finite with noise in %s", s->o.model, what);
        *row_kl += h->positions[i].kl / X3_MEASURE_COLS;
    }
out:
    return rc;
}

static x3_status score_paths(struct x3_measure *s, x3_err *err)
{
    const size_t n = s->scored.n;
    struct head h = {0};
    double *noisy;
    x3_status rc;

    X3_TRY(rc, out, open_head(s, &h, err));
    noisy = h.row_kl + 2 * s->n_paths * n;
    for (size_t row = 0; row < n; row++)
        for (size_t first = 0; first < X3_MEASURE_COLS; first += CHUNK) {
            X3_TRY(rc, out, logits_of(s, &h, s->scored.clean, row, first, h.d_clean, err));
            X3_TRY(rc, out, score_part(s, &h, s->noisy, row, first, &noisy[row], "all linears", err));
            for (size_t p = 0; p < 2 * s->n_paths; p++) {
                const struct x3_measured_path *path = &s->paths[p / 2];
                X3_TRY(rc, out, score_part(s, &h, p % 2 == 0 ? path->alone : path->added, row, first, &h.row_kl[p * n + row],
                                           path->members[0].linear->name, err));
            }
        }
    for (size_t p = 0; p < s->n_paths; p++)
        X3_TRY(rc, out, add_result(s, &s->paths[p], h.row_kl + 2 * p * n, h.row_kl + (2 * p + 1) * n, noisy, err));
out:
    close_head(s, &h);
    return rc;
}

/* ---- passes ---- */

static void free_paths(struct x3_measure *s)
{
    for (size_t i = 0; i < s->n_paths; i++) {
        x3_hidden_state_free(s->paths[i].alone);
        x3_hidden_state_free(s->paths[i].added);
        free(s->paths[i].members);
    }
    s->n_paths = 0;
}

/* Paths begin at layers [first, first + n); all run to the end. */
static x3_status run_pass(struct x3_measure *s, size_t first, size_t n, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, embed(s, &s->calibration, err));
    X3_TRY(rc, out, embed(s, &s->scored, err));
    X3_TRY(rc, out, x3_hidden_state_copy(s->noisy, s->scored.clean, err));
    for (size_t layer = 0; layer < s->source->model->n_layers; layer++)
        X3_TRY(rc, out, x3_measure_layer(s, layer, layer >= first && layer < first + n, err));
    X3_TRY(rc, out, score_paths(s, err));
    cJSON_ReplaceItemInObject(s->file, "finished_layers", cJSON_CreateNumber((double)(first + n)));
    rc = x3_json_save(s->file, s->o.out, err);
out:
    free_paths(s);
    return rc;
}

/* Layers from `first` whose paths fit into the memory, at least one. */
static size_t layers_at_once(const struct x3_measure *s, size_t first)
{
    const x3_model *m = s->source->model;
    size_t paths = 0, n = 0;

    while (first + n < m->n_layers) {
        paths += x3_measure_paths_of(&m->layers[first + n]);
        if (n > 0 && paths > s->max_paths)
            break;
        n++;
    }
    return n;
}

/* ---- the file ---- */

x3_status x3_measure_source(cJSON **out, const x3_checkpoint *source, x3_err *err)
{
    cJSON *j = cJSON_CreateObject(), *shards = cJSON_CreateArray();
    uint64_t config;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_json_add(j, "shards", shards, err));
    for (size_t i = 0; i < source->st->n_shards; i++) {
        char hash[17];
        x3_hash_text(source->st->shards[i].header_hash, hash);
        X3_TRY(rc, out, x3_json_add(shards, NULL, cJSON_CreateString(hash), err));
    }
    X3_TRY(rc, out, x3_hash_file(source->config->path, &config, err));
    X3_TRY(rc, out, x3_json_add_hash(j, "config", config, err));
    *out = j;
    j = NULL;
out:
    cJSON_Delete(j);
    return rc;
}

static x3_status create_file(struct x3_measure *s, cJSON **out, x3_err *err)
{
    cJSON *f = cJSON_CreateObject(), *source = NULL, *options = cJSON_CreateObject(), *texts = cJSON_CreateArray();
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_measure_source(&source, s->source, err));
    X3_TRY(rc, out, x3_json_add(f, "exl3_measurement", cJSON_CreateNumber(METHOD), err));
    X3_TRY(rc, out, x3_json_add(f, "source", source, err));
    X3_TRY(rc, out, x3_json_add(f, "options", options, err));
    X3_TRY(rc, out, x3_json_add(options, "version", cJSON_CreateString(X3_VERSION), err));
    X3_TRY(rc, out, x3_json_add(options, "texts", texts, err));
    for (size_t i = 0; i < s->corpus->n_files; i++) {
        char hash[17];
        x3_hash_text(s->corpus->files[i].hash, hash);
        X3_TRY(rc, out, x3_json_add(texts, NULL, cJSON_CreateString(hash), err));
    }
    X3_TRY(rc, out, x3_json_add(options, "rows", cJSON_CreateNumber((double)s->calibration.n), err));
    X3_TRY(rc, out, x3_json_add(options, "cols", cJSON_CreateNumber((double)s->calibration.cols), err));
    X3_TRY(rc, out, x3_json_add(options, "score_rows", cJSON_CreateNumber((double)s->scored.n), err));
    X3_TRY(rc, out, x3_json_add(options, "score_cols", cJSON_CreateNumber(X3_MEASURE_COLS), err));
    X3_TRY(rc, out, x3_json_add(options, "seed", cJSON_CreateNumber((double)s->o.seed), err));
    X3_TRY(rc, out, x3_json_add(options, "codebook", cJSON_CreateString(x3_codebook_name(s->o.codebook)), err));
    X3_TRY(rc, out, x3_json_add(options, "noise_bits", cJSON_CreateNumber(s->o.noise_bits), err));
    X3_TRY(rc, out, x3_json_add(options, "kernel_set", cJSON_CreateString(s->dev->kernel_set), err));
    X3_TRY(rc, out, x3_json_add(f, "command", cJSON_CreateString(s->o.command == NULL ? "" : s->o.command), err));
    X3_TRY(rc, out, x3_json_add(f, "finished_layers", cJSON_CreateNumber(0), err));
    X3_TRY(rc, out, x3_json_add(f, "linears", cJSON_CreateArray(), err));
    *out = f;
    f = NULL;
out:
    cJSON_Delete(f);
    return rc;
}

/* The difference between a measurement that is there and this one, or NULL. */
static const char *difference(const struct x3_measure *s, const cJSON *old)
{
    static const char *const keys[] = {"source", "options", "exl3_measurement"}, *const kernels[] = {"kernel_set", NULL};

    for (int i = 0; i < 3; i++)
        if (!x3_job_state_equal(x3_json_get(old, keys[i]), x3_json_get(s->file, keys[i]),
                                s->o.other_kernels ? kernels : kernels + 1))
            return keys[i];
    return NULL;
}

static x3_status refuse(const struct x3_measure *s, const cJSON *old, const char *key, x3_err *err)
{
    char *then = cJSON_PrintUnformatted(x3_json_get(old, key)), *now = cJSON_PrintUnformatted(x3_json_get(s->file, key));
    x3_status rc = x3_fail(err, X3_ERR_INPUT, "%s: is a measurement with other %s: %.450s, now %.450s", s->o.out, key,
                           then == NULL ? "?" : then, now == NULL ? "?" : now);

    cJSON_free(then);
    cJSON_free(now);
    return rc;
}

/* A new file, or the old one when it is gone on with; *first is the layer to begin with. */
static x3_status open_file(struct x3_measure *s, size_t *first, x3_err *err)
{
    const char *differs;
    cJSON *old = NULL;
    int64_t finished = 0;
    x3_status rc;

    *first = 0;
    X3_TRY(rc, out, create_file(s, &s->file, err));
    s->linears = cJSON_GetObjectItemCaseSensitive(s->file, "linears");
    if (s->o.start == X3_MEASURE_NEW || !x3_path_exists(s->o.out))
        goto out;
    X3_TRY(rc, out, x3_json_load(&old, s->o.out, err));
    differs = difference(s, old);
    if (differs != NULL) {
        rc = s->o.start == X3_MEASURE_RESUME ? refuse(s, old, differs, err) : X3_OK;
        goto out;
    }
    X3_TRY(rc, out, x3_json_int(old, "finished_layers", 0, (int64_t)s->source->model->n_layers, true, &finished, s->o.out, err));
    if (!cJSON_IsArray(x3_json_get(old, "linears"))) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: \"linears\" is not a list", s->o.out);
        goto out;
    }
    cJSON_Delete(s->file);
    s->file = old;
    old = NULL;
    s->linears = cJSON_GetObjectItemCaseSensitive(s->file, "linears");
    *first = (size_t)finished;
out:
    cJSON_Delete(old);
    return rc;
}

/* ---- the whole ---- */

/* Hidden states of the scored rows. */
static uint64_t state_bytes(const struct x3_measure *s)
{
    return sizeof(float) * s->scored.n * x3_state_floats(s->source->model, X3_MEASURE_COLS);
}

/* Those that are there beside the paths: the calibration rows, the scored ones clean and noisy. */
static uint64_t always_bytes(const struct x3_measure *s)
{
    return 2 * state_bytes(s) + sizeof(float) * s->calibration.n * x3_state_floats(s->source->model, s->calibration.cols);
}

/* Where states stay, and how many paths that holds: half of the device's memory, the rest is for a layer; else the budget of
 * the host, when the device cannot hold the paths of one layer or uses the host's memory. */
static void place_states(struct x3_measure *s)
{
    const x3_model *m = s->source->model;
    const uint64_t path = 2 * state_bytes(s), always = always_bytes(s);
    uint64_t budget = s->o.memory_bytes;
    size_t most = 0;

    for (size_t i = 0; i < m->n_layers; i++)
        most = x3_max_size(most, x3_measure_paths_of(&m->layers[i]));
    s->place = always + most * path <= s->dev->capacity_bytes / 2 ? X3_HIDDEN_DEVICE : X3_HIDDEN_HOST;
    if (budget == 0)
        budget = (uint64_t)sysconf(_SC_PHYS_PAGES) * (uint64_t)sysconf(_SC_PAGE_SIZE) / 2;
    s->max_paths = s->place == X3_HIDDEN_DEVICE ? (s->dev->capacity_bytes / 2 - always) / path : budget / path + 1;
}

static x3_status prepare(struct x3_measure *s, x3_findings *findings, x3_err *err)
{
    const x3_model *m;
    x3_status rc;

    X3_TRY(rc, out, x3_device_open(&s->dev, s->o.device, s->o.n_threads, err));
    X3_TRY(rc, out, x3_checkpoint_open(&s->source, s->o.model, s->o.ignored_options, findings, err));
    if (s->source->is_pack) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: is already an EXL3 pack", s->o.model);
        goto out;
    }
    m = s->source->model;
    X3_TRY(rc, out, read_rows(s, err));
    place_states(s);
    X3_TRY(rc, out, x3_measure_states(s, &s->calibration, &s->calibration.clean, err));
    X3_TRY(rc, out, x3_measure_states(s, &s->scored, &s->scored.clean, err));
    X3_TRY(rc, out, x3_measure_states(s, &s->scored, &s->noisy, err));
    X3_TRY(rc, out, x3_layer_runner_create(&s->calibration.runner, s->dev, m, s->calibration.n, s->calibration.cols, err));
    X3_TRY(rc, out, x3_layer_runner_create(&s->scored.runner, s->dev, m, s->scored.n, X3_MEASURE_COLS, err));
    size_t most = 0;
    for (size_t i = 0; i < m->n_layers; i++)
        most += x3_measure_paths_of(&m->layers[i]);
    X3_TRY(rc, out, x3_alloc(&s->paths, most, sizeof *s->paths, err));
out:
    return rc;
}

/* Layer runs of paths from `first` on. */
static double work_left(const struct x3_measure *s, size_t first)
{
    const x3_model *m = s->source->model;
    double n = 0;

    for (size_t i = first; i < m->n_layers; i++)
        n += 2 * (double)x3_measure_paths_of(&m->layers[i]) * (double)(m->n_layers - i);
    return n;
}

/* Weights of the layer that needs most: as they are, and in float32 with noise, and one unit of experts with twice of it. */
static uint64_t layer_bytes(const struct x3_measure *s)
{
    const x3_model *m = s->source->model;
    uint64_t most = 0;

    for (size_t i = 0; i < m->n_layers; i++) {
        uint64_t noisy = 0, of_experts = 0;
        for (size_t j = 0; j < m->layers[i].n_linears; j++) {
            const x3_linear_desc *d = &m->layers[i].linears[j];
            const uint64_t bytes = d->quantized ? sizeof(float) * d->n_in * d->n_out : 0;
            noisy += bytes;
            of_experts += x3_layer_expert(&m->layers[i], j) < 0 ? 0 : bytes / 3;
        }
        most = x3_max_size(most, x3_layer_weights_bytes(s->source, &m->layers[i]) + noisy + of_experts);
    }
    return most;
}

/* Said before the work: what it holds in memory, and how often the model is read. */
static void announce(const struct x3_measure *s, size_t first)
{
    const x3_model *m = s->source->model;
    const uint64_t path = 2 * state_bytes(s), always = always_bytes(s);
    size_t n_passes = 0, n_paths = 0, most = 0;
    char text[256];

    for (size_t n; first < m->n_layers; first += n) {
        size_t paths = 0;

        n = layers_at_once(s, first);
        for (size_t i = first; i < first + n; i++)
            paths += x3_measure_paths_of(&m->layers[i]);
        most = x3_max_size(most, paths);
        n_paths += paths;
        n_passes++;
    }
    snprintf(text, sizeof text, "measuring %zu linears and groups of experts, each alone and among all noise, in %zu pass%s over the model; at most %zu at once: %.3f GB of hidden states %s, "
             "and %.3f GB of weights of a layer",
             n_paths, n_passes, n_passes == 1 ? "" : "es", most, (double)(always + most * path) / 1e9,
             s->place == X3_HIDDEN_DEVICE ? "on the device" : "of the host", (double)layer_bytes(s) / 1e9);
    note(s, text);
}

x3_status x3_measure_run(const x3_measure_options *options, const x3_job_events *events, x3_findings *findings, x3_err *err)
{
    struct x3_measure s = {.o = *options};
    size_t first = 0;
    x3_status rc;

    if (events != NULL)
        s.events = *events;
    X3_TRY(rc, out, prepare(&s, findings, err));
    X3_TRY(rc, out, open_file(&s, &first, err));
    s.total = work_left(&s, first);
    announce(&s, first);
    if (first == 0)
        X3_TRY(rc, out, x3_json_save(s.file, s.o.out, err)); /* a file that cannot be written is said before any work */
    while (first < s.source->model->n_layers) {
        size_t n = layers_at_once(&s, first);
        X3_TRY(rc, out, run_pass(&s, first, n, err));
        first += n;
    }
out:
    x3_layer_runner_free(&s.calibration.runner);
    x3_layer_runner_free(&s.scored.runner);
    x3_hidden_state_free(s.calibration.clean);
    x3_hidden_state_free(s.scored.clean);
    x3_hidden_state_free(s.noisy);
    free(s.calibration.ids);
    free(s.scored.ids);
    free(s.paths);
    cJSON_Delete(s.file);
    x3_corpus_free(s.corpus);
    x3_checkpoint_close(s.source);
    x3_device_close(s.dev);
    return rc;
}

/* ---- reading ---- */

struct known {
    const char *name;
    double kl;
};

static int by_name(const void *a, const void *b)
{
    return strcmp(((const struct known *)a)->name, ((const struct known *)b)->name);
}

static x3_status read_list(x3_measurement *out, const cJSON *list, const char *path, const x3_model *m, x3_err *err)
{
    struct known *known = NULL;
    const x3_linear_desc *d;
    size_t n = (size_t)cJSON_GetArraySize(list), i = 0, layer;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&known, n, sizeof *known, err));
    for (const cJSON *e = list->child; e != NULL; e = e->next, i++) {
        X3_TRY(rc, out, x3_json_string(e, "name", true, &known[i].name, path, err));
        X3_TRY(rc, out, x3_json_number(e, "kl", true, &known[i].kl, path, err));
    }
    if (n > 1)
        qsort(known, n, sizeof *known, by_name);
    for (i = 0; (d = x3_model_linear(m, i, &layer)) != NULL && layer < m->n_layers; i++)
        ;
    out->n = i;
    X3_TRY(rc, out, x3_alloc(&out->kl, out->n, sizeof *out->kl, err));
    for (i = 0; i < out->n; i++) {
        d = x3_model_linear(m, i, &layer);
        if (!d->quantized)
            continue;
        const struct known *found = n == 0 ? NULL : bsearch(&(struct known){.name = d->name}, known, n, sizeof *known, by_name);
        if (found == NULL) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: has no measurement of %s", path, d->name);
            goto out;
        }
        out->kl[i] = found->kl > 0 ? found->kl : 0;
    }
out:
    free(known);
    return rc;
}

x3_status x3_measurement_load(x3_measurement *out, const char *path, const x3_checkpoint *source, x3_err *err)
{
    const x3_model *m = source->model;
    cJSON *file = NULL, *expected = NULL;
    const char *codebook = NULL;
    int64_t finished = 0, method = 0, noise_bits = 0;
    x3_status rc;

    *out = (x3_measurement){0};
    X3_TRY(rc, out, x3_json_load(&file, path, err));
    X3_TRY(rc, out, x3_measure_source(&expected, source, err));
    if (x3_json_get(file, "exl3_measurement") == NULL || !cJSON_IsArray(x3_json_get(file, "linears"))) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: is no measurement of exl3-quantize", path);
        goto out;
    }
    X3_TRY(rc, out, x3_json_int(file, "exl3_measurement", 0, 1000, true, &method, path, err));
    if (method != METHOD) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: was measured by method %lld, this program reads method %d: measure again", path,
                     (long long)method, METHOD);
        goto out;
    }
    if (!cJSON_Compare(x3_json_get(file, "source"), expected, true)) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: is the measurement of another model than %s (config.json or headers differ)", path,
                     source->dir);
        goto out;
    }
    X3_TRY(rc, out, x3_json_int(file, "finished_layers", 0, (int64_t)m->n_layers, true, &finished, path, err));
    if ((size_t)finished < m->n_layers) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: %lld of %zu layers are measured; measure --resume goes on", path,
                     (long long)finished, m->n_layers);
        goto out;
    }
    X3_TRY(rc, out, x3_json_string(x3_json_get(file, "options"), "codebook", true, &codebook, path, err));
    if (!x3_codebook_parse(codebook, &out->codebook)) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: codebook \"%.60s\" is unknown", path, codebook);
        goto out;
    }
    X3_TRY(rc, out, x3_json_int(x3_json_get(file, "options"), "noise_bits", 1, 8, true, &noise_bits, path, err));
    out->noise_bits = (int)noise_bits;
    X3_TRY(rc, out, x3_hash_file(path, &out->hash, err));
    rc = read_list(out, x3_json_get(file, "linears"), path, m, err);
out:
    cJSON_Delete(file);
    cJSON_Delete(expected);
    if (rc != X3_OK)
        x3_measurement_free(out);
    return rc;
}

void x3_measurement_free(x3_measurement *m)
{
    free(m->kl);
    *m = (x3_measurement){0};
}

x3_status x3_measurement_costs(const x3_measurement *m, double (**cost)[8], x3_err *err)
{
    x3_status rc = x3_alloc(cost, m->n, sizeof **cost, err);

    for (size_t i = 0; rc == X3_OK && i < m->n; i++)
        for (int K = 1; K <= 8; K++)
            (*cost)[i][K - 1] = (K == 1 ? ONE_BIT_COST : 1) * m->kl[i] * x3_quant_tile_error(m->codebook, K) / x3_quant_tile_error(m->codebook, m->noise_bits);
    return rc;
}
