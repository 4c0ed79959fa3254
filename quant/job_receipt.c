/* The receipt of a job: how the pack was made, and an XXH3 of everything in it. */
#include <stdlib.h>
#include <string.h>

#include "quant/job_internal.h"
#include "quant/pack_info.h"

x3_status x3_job_group_entry(cJSON **out, const x3_quant_linear *q, const x3_hessian *h, size_t tokens, bool uncalibrated,
                             x3_err *err)
{
    cJSON *e = cJSON_CreateObject();
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_json_add(e, "name", cJSON_CreateString(q->name), err));
    X3_TRY(rc, out, x3_json_add(e, "K", cJSON_CreateNumber(q->K), err));
    X3_TRY(rc, out, x3_json_add(e, "weights", cJSON_CreateNumber((double)q->n_in * (double)q->n_out), err));
    X3_TRY(rc, out, x3_json_add(e, "error_source", cJSON_CreateNumber(q->error_source), err));
    X3_TRY(rc, out, x3_json_add(e, "error_target", cJSON_CreateNumber(q->error_target), err));
    X3_TRY(rc, out, x3_json_add(e, "error_weight", cJSON_CreateNumber(q->error_weight), err));
    X3_TRY(rc, out, x3_json_add(e, "scale", cJSON_CreateNumber(q->scale), err));
    X3_TRY(rc, out, x3_json_add(e, "positions", cJSON_CreateNumber((double)h->n_rows), err));
    X3_TRY(rc, out, x3_json_add(e, "dropped", cJSON_CreateNumber((double)h->n_dropped), err));
    if (tokens != SIZE_MAX)
        X3_TRY(rc, out, x3_json_add(e, "expert_tokens", cJSON_CreateNumber((double)tokens), err));
    if (h->blended > 0)
        X3_TRY(rc, out, x3_json_add(e, "blended", cJSON_CreateNumber(h->blended), err));
    if (uncalibrated)
        X3_TRY(rc, out, x3_json_add(e, "uncalibrated", cJSON_CreateTrue(), err));
    *out = e;
    e = NULL;
out:
    cJSON_Delete(e);
    return rc;
}

static x3_status add_source(cJSON *j, const x3_job *job, x3_err *err)
{
    cJSON *source = cJSON_CreateObject(), *dropped = cJSON_CreateArray();
    uint64_t hash;
    x3_status rc = x3_json_add(j, "source", source, err);

    X3_TRY(rc, out, rc);
    X3_TRY(rc, out, x3_checkpoint_hash(job->source, &hash, err));
    X3_TRY(rc, out, x3_json_add(source, "path", cJSON_CreateString(job->o.model), err));
    X3_TRY(rc, out, x3_json_add_hash(source, "xxh3", hash, err));
    X3_TRY(rc, out, x3_json_add(source, "bytes", cJSON_CreateNumber((double)job->source->st->total_bytes), err));
    X3_TRY(rc, out, x3_json_add(j, "dropped_tensors", dropped, err));
    for (size_t i = 0; i < job->source->st->n_tensors; i++) {
        cJSON *entry;
        if (job->source->roles[i] != X3_ROLE_DROPPED)
            continue;
        X3_TRY(rc, out, x3_json_add(dropped, NULL, entry = cJSON_CreateObject(), err));
        X3_TRY(rc, out, x3_json_add(entry, "name", cJSON_CreateString(job->source->st->tensors[i].name), err));
        X3_TRY(rc, out, x3_json_add(entry, "reason", cJSON_CreateString(job->source->reasons[i]), err));
    }
out:
    return rc;
}

static x3_status add_texts(cJSON *j, const x3_job *job, x3_err *err)
{
    cJSON *texts = cJSON_CreateArray(), *calibration = cJSON_CreateObject();
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(j, "text", texts, err));
    for (size_t i = 0; i < job->corpus->n_files; i++) {
        cJSON *t = cJSON_CreateObject();
        X3_TRY(rc, out, x3_json_add(texts, NULL, t, err));
        X3_TRY(rc, out, x3_json_add(t, "name", cJSON_CreateString(job->corpus->files[i].name), err));
        X3_TRY(rc, out, x3_json_add_hash(t, "xxh3", job->corpus->files[i].hash, err));
        X3_TRY(rc, out, x3_json_add(t, "bytes", cJSON_CreateNumber((double)job->corpus->files[i].n_bytes), err));
    }
    X3_TRY(rc, out, x3_json_add(j, "calibration", calibration, err));
    X3_TRY(rc, out, x3_json_add(calibration, "rows", cJSON_CreateNumber((double)job->n_rows), err));
    X3_TRY(rc, out, x3_json_add(calibration, "cols", cJSON_CreateNumber((double)job->o.cols), err));
out:
    return rc;
}

static x3_status add_hashes(cJSON *j, const x3_job *job, x3_err *err)
{
    cJSON *tensors = cJSON_CreateObject(), *files = cJSON_CreateObject(), *left = cJSON_CreateArray();
    char *path = NULL;
    uint64_t hash;
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(j, "tensors", tensors, err));
    for (size_t i = 0; i < job->writer->n_tensors; i++)
        X3_TRY(rc, out, x3_json_add_hash(tensors, job->writer->tensors[i].out.name, job->writer->tensors[i].out.hash, err));
    X3_TRY(rc, out, x3_json_add(j, "files", files, err));
    for (size_t i = 0; i < job->copied.n_items; i++) {
        free(path);
        X3_TRY(rc, out, x3_path_join(&path, job->o.out, job->copied.items[i], err));
        X3_TRY(rc, out, x3_hash_file(path, &hash, err));
        X3_TRY(rc, out, x3_json_add_hash(files, job->copied.items[i], hash, err));
    }
    X3_TRY(rc, out, x3_json_add(j, "files_not_copied", left, err));
    for (size_t i = 0; i < job->left.n_items; i++)
        X3_TRY(rc, out, x3_json_add(left, NULL, cJSON_CreateString(job->left.items[i]), err));
out:
    free(path);
    return rc;
}

static x3_status add_seconds(cJSON *j, const x3_job *job, x3_err *err)
{
    static const char *const names[X3_N_STAGES] = {"scan", "copy", "load", "capture", "quantize", "forward", "write"};
    cJSON *stages = cJSON_CreateObject();
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(j, "seconds", cJSON_CreateNumber(x3_seconds() - job->started), err));
    X3_TRY(rc, out, x3_json_add(j, "stage_seconds", stages, err));
    for (int i = 0; i < X3_N_STAGES; i++)
        X3_TRY(rc, out, x3_json_add(stages, names[i], cJSON_CreateNumber(job->stage_seconds[i]), err));
    if (job->dev->capacity_bytes > 0) { /* a device that measures its time */
        cJSON *busy = cJSON_CreateObject();
        X3_TRY(rc, out, x3_json_add(j, "device_seconds", busy, err));
        for (int i = 0; i < X3_N_WORKS; i++)
            X3_TRY(rc, out, x3_json_add(busy, x3_work_name((x3_work)i), cJSON_CreateNumber(job->dev->busy_seconds[i]), err));
    }
out:
    return rc;
}

x3_status x3_job_write_receipt(x3_job *job, x3_err *err)
{
    cJSON *j = cJSON_CreateObject(), *recipe = cJSON_CreateObject();
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_pack_receipt_head(j, "exl3-quantize run", job->o.command, NULL, err));
    X3_TRY(rc, out, x3_json_add(j, "seed", cJSON_CreateNumber((double)job->o.quant.seed), err));
    X3_TRY(rc, out, add_source(j, job, err));
    X3_TRY(rc, out, x3_json_add(j, "recipe", recipe, err));
    X3_TRY(rc, out, x3_json_add_hash(recipe, "xxh3", job->allocation.hash, err));
    X3_TRY(rc, out, x3_json_add(j, "options", cJSON_Duplicate(job->identity, true), err));
    X3_TRY(rc, out, add_texts(j, job, err));
    X3_TRY(rc, out, x3_json_add(j, "bits_body", cJSON_CreateNumber(job->allocation.body_bits), err));
    X3_TRY(rc, out, x3_json_add(j, "bits_head", cJSON_CreateNumber(job->allocation.head_K), err));
    if (job->allocation.draft_K > 0)
        X3_TRY(rc, out, x3_json_add(j, "bits_mtp", cJSON_CreateNumber(job->allocation.draft_K), err));
    X3_TRY(rc, out, x3_json_add(j, "bytes", cJSON_CreateNumber((double)job->writer->file_bytes), err));
    X3_TRY(rc, out, x3_json_add(j, "groups", cJSON_Duplicate(job->groups, true), err));
    X3_TRY(rc, out, add_hashes(j, job, err));
    X3_TRY(rc, out, x3_json_add(j, "device", cJSON_CreateString(job->dev->name), err));
    X3_TRY(rc, out, x3_json_add(j, "peak_device_bytes", cJSON_CreateNumber((double)job->dev->peak_bytes), err));
    X3_TRY(rc, out, add_seconds(j, job, err));
    X3_TRY(rc, out, x3_path_join(&path, job->o.out, "exl3_receipt.json", err));
    X3_TRY(rc, out, x3_json_save(j, path, err));
    job->receipt = j;
    j = NULL;
out:
    free(path);
    cJSON_Delete(j);
    return rc;
}
