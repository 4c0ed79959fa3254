/* The order of work. Kept tensors first, so that a disk or a file that fails does so before hours are spent; then layer
 * after layer, each calibrated on what the quantized layers before it give; then the head, and the draft layer if asked for;
 * then the pack is put in place with config.json last. */
#include "quant/job.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "quant/job_internal.h"

/* ---- scan and kept tensors ---- */

static void scan_progress(void *arg, uint64_t done, uint64_t total)
{
    char what[64];

    snprintf(what, sizeof what, "scan %.0f %%", total == 0 ? 100 : 100 * (double)done / (double)total);
    x3_job_progress(arg, what);
}

/* Hashes of the source, from the earlier run's record or by reading everything once. */
static x3_status scan_source(x3_job *job, x3_err *err)
{
    const x3_safetensors *st = job->source->st;
    x3_findings findings = {0};
    cJSON *record = NULL, *list;
    x3_status rc;

    X3_TRY(rc, out, x3_record_load(job->work, "scan", &record, err));
    if (record != NULL) {
        for (size_t i = 0; i < st->n_tensors; i++) {
            X3_TRY(rc, out, x3_record_hash(record, st->tensors[i].name, "scan.json", &job->source->hashes[i].hash, err));
            job->source->hashes[i].known = true;
        }
        goto out;
    }
    X3_TRY(rc, out, x3_checkpoint_scan(job->source, scan_progress, job, &findings, err));
    X3_TRY(rc, out, x3_findings_status(&findings, err));
    list = record = cJSON_CreateObject();
    for (size_t i = 0; i < st->n_tensors; i++)
        X3_TRY(rc, out, x3_json_add_hash(list, st->tensors[i].name, job->source->hashes[i].hash, err));
    X3_TRY(rc, out, x3_record_save(job->work, "scan", record, err));
out:
    x3_findings_free(&findings);
    cJSON_Delete(record);
    return rc;
}

#define COPY_BYTES ((size_t)1 << 24)

static x3_status copy_tensor(x3_job *job, size_t index, const x3_tensor *t, char *buffer, x3_err *err)
{
    x3_status rc = X3_OK;

    if (t->n_bytes == 0)
        return x3_pack_writer_write(job->writer, index, buffer, err);
    for (uint64_t at = 0; at < t->n_bytes && rc == X3_OK; at += COPY_BYTES) {
        size_t n = x3_min_size(COPY_BYTES, t->n_bytes - at);
        rc = x3_safetensors_read(job->source->st, t, at, n, buffer, err);
        if (rc == X3_OK)
            rc = x3_pack_writer_write_part(job->writer, index, at, buffer, n, err);
    }
    if (rc == X3_OK && job->writer->tensors[index].out.hash != job->source->hashes[t - job->source->st->tensors].hash)
        rc = x3_fail(err, X3_ERR_INPUT, "%s: tensor %s has changed since it was first read",
                     job->source->st->shards[t->shard].path, t->name);
    return rc;
}

static x3_status copy_kept(x3_job *job, x3_err *err)
{
    size_t *indices = NULL, n = 0;
    cJSON *record = NULL;
    char *buffer = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_record_load(job->work, "kept", &record, err));
    if (record != NULL) {
        rc = x3_record_accept_tensors(record, job->writer, err);
        goto out;
    }
    x3_job_progress(job, "copy");
    X3_TRY(rc, out, x3_alloc(&buffer, COPY_BYTES, 1, err));
    X3_TRY(rc, out, x3_alloc(&indices, job->writer->n_tensors, sizeof *indices, err));
    for (size_t i = 0; i < job->writer->n_tensors; i++) {
        if (job->plan->copied[i] == NULL)
            continue;
        X3_TRY(rc, out, copy_tensor(job, i, job->plan->copied[i], buffer, err));
        indices[n++] = i;
    }
    X3_TRY(rc, out, x3_pack_writer_sync(job->writer, err));
    record = cJSON_CreateObject();
    X3_TRY(rc, out, x3_record_add_tensors(record, job->writer, indices, n, err));
    rc = x3_record_save(job->work, "kept", record, err);
out:
    free(indices);
    free(buffer);
    cJSON_Delete(record);
    return rc;
}

/* ---- a layer ---- */

static x3_status add_entries(x3_job *job, const cJSON *entries, x3_err *err)
{
    x3_status rc = X3_OK;

    for (const cJSON *e = entries->child; e != NULL && rc == X3_OK; e = e->next)
        rc = x3_json_add(job->groups, NULL, cJSON_Duplicate(e, true), err);
    return rc;
}

/* Tensors of the plan that groups [first, first + n) wrote. */
static size_t group_tensors(const x3_job *job, size_t first, size_t n, size_t *out)
{
    size_t count = 0;

    for (size_t i = first; i < first + n; i++) {
        const x3_planned_group *g = &job->plan->groups[i];
        const size_t parts[] = {g->trellis, g->suh, g->svh, g->marker, g->bias};
        for (size_t p = 0; p < sizeof parts / sizeof parts[0]; p++)
            if (parts[p] != SIZE_MAX)
                out[count++] = parts[p];
    }
    return count;
}

/* Syncs what groups [first, first + n) wrote, then leaves the record that says so. */
static x3_status save_record(x3_job *job, const char *step, size_t first, size_t n, cJSON *record, x3_err *err)
{
    size_t *tensors = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&tensors, 5 * n + 1, sizeof *tensors, err));
    X3_TRY(rc, out, x3_pack_writer_sync(job->writer, err));
    X3_TRY(rc, out, x3_record_add_tensors(record, job->writer, tensors, group_tensors(job, first, n, tensors), err));
    rc = x3_record_save(job->work, step, record, err);
out:
    free(tensors);
    return rc;
}

/* Bytes a second that hidden states are taken to be written, hashed and synced with. */
#define SAVE_RATE 5e8

/* Hidden states can be larger than a layer takes to compute: they are left behind only when that costs at most a tenth of the
 * time since they were last, so a kill loses that much at most. On disk they lie anyway. */
static bool worth_saving(const x3_job *job)
{
    const double cost = (double)job->summary.hidden_bytes / SAVE_RATE;

    return job->summary.hidden_place == X3_HIDDEN_DISK || cost < 0.2 || x3_seconds() - job->saved_at > 10 * cost;
}

/* The states after a layer, with their hashes in its record. */
static x3_status save_states(x3_job *job, cJSON *record, x3_err *err)
{
    cJSON *hidden = cJSON_CreateObject();
    uint64_t hash;
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(record, "hidden", hidden, err));
    X3_TRY(rc, out, x3_hidden_state_advance(job->quantized, &hash, err));
    X3_TRY(rc, out, x3_json_add_hash(hidden, "quantized", hash, err));
    if (job->original != NULL) {
        X3_TRY(rc, out, x3_hidden_state_advance(job->original, &hash, err));
        X3_TRY(rc, out, x3_json_add_hash(hidden, "original", hash, err));
    }
out:
    return rc;
}

/* Records of this layer and of those before it that have none yet, the last first: a job that is killed between them finds
 * no record of the first and goes on from the states before it, which go last. */
static x3_status save_pending(x3_job *job, size_t layer, x3_err *err)
{
    char step[32];
    x3_status rc;

    for (size_t i = layer + 1; i-- > 0 && job->pending[i] != NULL;) {
        snprintf(step, sizeof step, "layer-%05zu", i);
        X3_TRY(rc, out, save_record(job, step, x3_job_first_group(job, i), job->source->model->layers[i].n_linears, job->pending[i],
                                    err));
        cJSON_Delete(job->pending[i]);
        job->pending[i] = NULL;
    }
    X3_TRY(rc, out, x3_hidden_state_drop(job->quantized, job->saved_layer, err));
    if (job->original != NULL)
        X3_TRY(rc, out, x3_hidden_state_drop(job->original, job->saved_layer, err));
    job->saved_layer = layer + 1;
    job->saved_at = x3_seconds();
out:
    return rc;
}

static x3_status save_layer(x3_job *job, size_t layer, cJSON *entries, x3_err *err)
{
    cJSON *record = cJSON_CreateObject();
    x3_status rc;

    job->pending[layer] = record;
    X3_TRY(rc, out, x3_json_add(record, "groups", cJSON_Duplicate(entries, true), err));
    if (!worth_saving(job)) {
        x3_hidden_state_pass(job->quantized);
        if (job->original != NULL)
            x3_hidden_state_pass(job->original);
        goto out;
    }
    X3_TRY(rc, out, save_states(job, record, err));
    rc = save_pending(job, layer, err);
out:
    return rc;
}

static x3_status run_layer(x3_job *job, size_t layer, x3_err *err)
{
    cJSON *entries = cJSON_CreateArray();
    x3_status rc;

    X3_TRY(rc, out, x3_job_layer(job, layer, entries, err));
    X3_TIMED(job, X3_STAGE_WRITE, rc, out, save_layer(job, layer, entries, err));
    rc = add_entries(job, entries, err);
out:
    cJSON_Delete(entries);
    return rc;
}

/* ---- states ---- */

static x3_status embed_rows(x3_job *job, x3_err *err)
{
    const size_t cols = job->o.cols;
    float *row = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&row, x3_state_floats(job->source->model, cols), sizeof *row, err));
    for (size_t i = 0; i < job->n_rows; i++) {
        X3_TRY(rc, out, x3_embed(job->source, job->ids + i * cols, cols, row, err));
        X3_TRY(rc, out, x3_hidden_state_write(job->quantized, i, 1, row, err));
    }
    X3_TRY(rc, out, x3_hidden_state_start(job->quantized, err));
    if (job->original != NULL)
        rc = x3_hidden_state_start(job->original, err);
out:
    free(row);
    return rc;
}

static x3_status create_states(x3_job *job, x3_err *err)
{
    const size_t floats = x3_state_floats(job->source->model, job->o.cols);
    const x3_hidden_place place = job->summary.hidden_place;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&job->pending, job->source->model->n_layers, sizeof *job->pending, err));
    X3_TRY(rc, out, x3_hidden_state_create(&job->quantized, job->dev, job->work, "quantized", job->n_rows, floats, place, err));
    if (job->o.quant.target_blend > 0)
        rc = x3_hidden_state_create(&job->original, job->dev, job->work, "original", job->n_rows, floats, place, err);
out:
    return rc;
}

/* Accepts finished layers; *next is the first one to compute. Hidden states are restored from the last. */
static x3_status restore_layers(x3_job *job, size_t *next, x3_err *err)
{
    cJSON *record = NULL, *last = NULL;
    uint64_t hash;
    x3_status rc = X3_OK;

    for (*next = 0; *next < job->source->model->n_layers; ++*next) {
        char step[32];
        snprintf(step, sizeof step, "layer-%05zu", *next);
        X3_TRY(rc, out, x3_record_load(job->work, step, &record, err));
        if (record == NULL)
            break;
        X3_TRY(rc, out, x3_record_accept_tensors(record, job->writer, err));
        X3_TRY(rc, out, add_entries(job, x3_json_get(record, "groups"), err));
        size_t first = x3_job_first_group(job, *next);
        for (size_t i = first; i < first + job->source->model->layers[*next].n_linears; i++)
            if (job->plan->groups[i].K > 0)
                job->done += (double)x3_round_up(job->plan->groups[i].linear->n_in, 128) *
                             (double)x3_round_up(job->plan->groups[i].linear->n_out, 128);
        cJSON_Delete(last);
        last = record;
        record = NULL;
    }
    if (*next == 0) {
        rc = embed_rows(job, err);
        goto out;
    }
    x3_job_note(job, "going on after %zu finished layers", *next);
    job->saved_layer = *next;
    const cJSON *hidden = x3_json_get(last, "hidden");
    X3_TRY(rc, out, x3_record_hash(hidden, "quantized", job->work, &hash, err));
    X3_TRY(rc, out, x3_hidden_state_restore(job->quantized, *next, hash, err));
    if (job->original != NULL) {
        X3_TRY(rc, out, x3_record_hash(hidden, "original", job->work, &hash, err));
        X3_TRY(rc, out, x3_hidden_state_restore(job->original, *next, hash, err));
    }
out:
    cJSON_Delete(record);
    cJSON_Delete(last);
    return rc;
}

/* ---- head ---- */

/* Second moments of the output of a norm. */
static x3_status capture_head(x3_job *job, const x3_vector_desc *norm, x3_hessian **h, x3_err *err)
{
    const x3_model *m = job->source->model;
    x3_layer_runner *r = &job->runner;
    const bool both = job->original != NULL;
    float *d_norm = NULL, *d_original = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_hessian_create(h, job->dev, m->hidden, both, err));
    X3_TRY(rc, out, x3_vector_load(&d_norm, job->dev, job->source, norm, err));
    if (both)
        X3_TRY(rc, out, x3_device_floats(job->dev, &d_original, r->at_once * r->n_cols * m->hidden, err));
    for (size_t row = 0; row < r->n_rows; row += r->at_once) {
        size_t n = x3_min_size(r->at_once, r->n_rows - row), positions = n * r->n_cols;
        for (int path = both ? 1 : 0; path >= 0; path--) {
            float *d_x = path == 1 ? d_original : r->d_x;
            X3_TRY(rc, out, x3_load_rows(r, path == 1 ? job->original : job->quantized, row, n, d_x, err));
            X3_TRY(rc, out, job->dev->ops->rms_norm(job->dev, d_x, m->hidden, positions, m->hidden, d_norm, m->norm_eps, d_x,
                                                    m->hidden, err));
        }
        X3_TRY(rc, out, x3_hessian_add(*h, r->d_x, d_original, positions, err));
    }
    rc = x3_hessian_finish(*h, err);
out:
    x3_device_free(job->dev, d_norm);
    x3_device_free(job->dev, d_original);
    return rc;
}

x3_status x3_job_head(x3_job *job, const x3_planned_group *planned, const x3_vector_desc *norm, cJSON *entries, x3_err *err)
{
    x3_quant_linear linear = {0};
    x3_weight dense = {0};
    cJSON *entry = NULL;
    x3_hessian *h = NULL;
    char group[512];
    x3_status rc;

    snprintf(group, sizeof group, "%s.input", planned->linear->name);
    X3_TIMED(job, X3_STAGE_CAPTURE, rc, out, capture_head(job, norm, &h, err));
    X3_TIMED(job, X3_STAGE_LOAD, rc, out, x3_linear_load(&dense, job->dev, job->source, planned->linear, err));
    X3_TRY(rc, out, x3_job_quantize(job, planned, &dense, &linear, 1, group, h, SIZE_MAX, &entry, err));
    rc = x3_json_add(entries, NULL, entry, err);
out:
    x3_quant_linear_free(job->dev, &linear);
    x3_linear_free(&dense, job->dev);
    x3_hessian_free(h);
    return rc;
}

/* A step behind the layers, which writes groups [first, first + n): from the record of an earlier run, or now. */
static x3_status run_last(x3_job *job, const char *step, size_t first, size_t n, x3_err *err)
{
    const x3_model *m = job->source->model;
    cJSON *record = NULL, *entries = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_record_load(job->work, step, &record, err));
    if (record != NULL) {
        X3_TRY(rc, out, x3_record_accept_tensors(record, job->writer, err));
        rc = add_entries(job, x3_json_get(record, "groups"), err);
        goto out;
    }
    record = cJSON_CreateObject();
    X3_TRY(rc, out, x3_json_add(record, "groups", entries = cJSON_CreateArray(), err));
    X3_TRY(rc, out, first == job->plan->head ? x3_job_head(job, &job->plan->groups[first], &m->final_norm, entries, err)
                                             : x3_job_draft(job, entries, err));
    X3_TRY(rc, out, save_record(job, step, first, n, record, err));
    rc = add_entries(job, entries, err);
out:
    cJSON_Delete(record);
    return rc;
}

/* ---- putting the pack in place ---- */

static bool is_part(const x3_job *job, const char *name)
{
    const size_t n = strlen(name);

    if (n > 5 && strcmp(name + n - 5, ".part") == 0)
        return true;
    for (size_t s = 0; s < job->writer->n_shards; s++) /* renamed by an interrupted commit, or to be replaced by one */
        if (strcmp(name, job->writer->shards[s].final_name) == 0)
            return true;
    return false;
}

/* config.json first: from then on the folder is no pack until the new one is complete. */
static x3_status clear_output(x3_job *job, x3_err *err)
{
    x3_names names = {0};
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_path_join(&path, job->o.out, "config.json", err));
    X3_TRY(rc, out, x3_remove_tree(path, err));
    X3_TRY(rc, out, x3_sync_dir(job->o.out, err));
    X3_TRY(rc, out, x3_list_dir(&names, job->o.out, err));
    for (size_t i = 0; i < names.n_items; i++) {
        if (is_part(job, names.items[i]))
            continue;
        free(path);
        X3_TRY(rc, out, x3_path_join(&path, job->o.out, names.items[i], err));
        X3_TRY(rc, out, x3_remove_tree(path, err));
    }
out:
    free(path);
    x3_names_free(&names);
    return rc;
}

static x3_status copy_side_files(x3_job *job, x3_err *err)
{
    char *from = NULL, *to = NULL;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < job->copied.n_items; i++) {
        char *slash;
        free(from);
        free(to);
        to = NULL;
        X3_TRY(rc, out, x3_path_join(&from, job->o.model, job->copied.items[i], err));
        X3_TRY(rc, out, x3_path_join(&to, job->o.out, job->copied.items[i], err));
        slash = strrchr(to, '/');
        *slash = '\0';
        X3_TRY(rc, out, x3_mkdirs(to, err));
        *slash = '/';
        X3_TRY(rc, out, x3_copy_file(from, to, NULL, err));
    }
out:
    free(from);
    free(to);
    return rc;
}

static x3_status save_json(x3_job *job, const char *name, cJSON *json, x3_err *err)
{
    char *path = NULL;
    x3_status rc = x3_path_join(&path, job->o.out, name, err);

    if (rc == X3_OK)
        rc = x3_json_save(json, path, err);
    free(path);
    return rc;
}

static x3_status commit(x3_job *job, x3_err *err)
{
    const x3_pack_json info = {.rows = job->n_rows, .cols = job->o.cols};
    cJSON *config = NULL, *quantization = NULL;
    x3_status rc;

    x3_job_progress(job, "commit");
    X3_TRY(rc, out, x3_pack_config(&config, job->plan, &info, err));
    X3_TRY(rc, out, x3_pack_quantization_config(&quantization, job->plan, &info, err));
    X3_TRY(rc, out, clear_output(job, err));
    X3_TRY(rc, out, copy_side_files(job, err));
    X3_TRY(rc, out, x3_pack_writer_commit(job->writer, err));
    X3_TRY(rc, out, save_json(job, "quantization_config.json", quantization, err));
    X3_TRY(rc, out, x3_job_write_receipt(job, err));
    X3_TRY(rc, out, x3_sync_dir(job->o.out, err));
    X3_TRY(rc, out, save_json(job, "config.json", config, err));
    X3_TRY(rc, out, x3_sync_dir(job->o.out, err));
    /* job.json goes first: a work folder without it is no unfinished job, whatever else is left in it */
    X3_TRY(rc, out, x3_job_state_end(job->work, err));
    rc = x3_remove_tree(job->work, err);
out:
    cJSON_Delete(config);
    cJSON_Delete(quantization);
    return rc;
}

/* ---- the whole ---- */

static x3_status begin(x3_job *job, x3_err *err)
{
    const bool goes_on = job->o.resume && x3_job_state_exists(job->work), out_was_there = x3_path_exists(job->o.out);
    cJSON *kept = NULL;
    x3_status rc;

    if (!goes_on) {
        X3_TRY(rc, out, x3_remove_tree(job->work, err));
        X3_TRY(rc, out, x3_mkdirs(job->work, err));
        X3_TRY(rc, out, x3_job_state_begin(job->work, job->identity, err));
    }
    X3_TIMED(job, X3_STAGE_SCAN, rc, out, scan_source(job, err));
    X3_TRY(rc, out, x3_mkdirs(job->o.out, err));
    /* part files are complete (in size and header) once the first record about them exists */
    X3_TRY(rc, out, x3_record_load(job->work, "kept", &kept, err));
    rc = x3_pack_writer_open(job->writer, kept != NULL, err);
out:
    cJSON_Delete(kept);
    if (rc != X3_OK && !goes_on) { /* nothing was computed yet: leave nothing */
        (void)!x3_remove_tree(job->work, NULL);
        if (!out_was_there)
            (void)!x3_remove_tree(job->o.out, NULL);
    }
    return rc;
}

x3_status x3_job_run(x3_job *job, x3_err *err)
{
    size_t next;
    x3_status rc;

    if (job->is_done)
        return X3_OK;
    if (job->n_rows == 0)
        return x3_fail(err, X3_ERR_INPUT, "a job without calibration text cannot run");
    job->started = x3_seconds();
    job->groups = cJSON_CreateArray();
    X3_TRY(rc, out, begin(job, err));
    X3_TIMED(job, X3_STAGE_COPY, rc, out, copy_kept(job, err));
    X3_TRY(rc, out, create_states(job, err));
    X3_TRY(rc, out, restore_layers(job, &next, err));
    job->saved_at = x3_seconds();
    X3_TRY(rc, out, x3_layer_runner_create(&job->runner, job->dev, job->source->model, job->n_rows, job->o.cols, err));
    for (; next < job->source->model->n_layers; next++)
        X3_TRY(rc, out, run_layer(job, next, err));
    if (job->allocation.head_K > 0)
        X3_TRY(rc, out, run_last(job, "head", job->plan->head, 1, err));
    if (job->allocation.draft_K > 0)
        X3_TRY(rc, out, run_last(job, "draft", job->plan->head + 1, job->plan->n_groups - job->plan->head - 1, err));
    rc = commit(job, err);
out:
    return rc;
}
