#include "quant/pack_info.h"

#include <stdlib.h>
#include <string.h>

#include "formats/io.h"

/* A group adds to sums of its kind. */
static x3_status add_group(x3_pack_info *info, const x3_checkpoint *pack, const x3_linear_desc *d, double *bits, double *weights,
                           int *K, x3_err *err)
{
    x3_findings findings = {0};
    bool found = false;
    x3_group g;
    x3_status rc;

    *K = 0;
    X3_TRY(rc, out, x3_group_find(pack->st, d->name, &g, &found, &findings, err));
    X3_TRY(rc, out, x3_findings_status(&findings, err));
    if (!found)
        goto out;
    info->n_groups++;
    info->n_padded += d->n_in != g.n_in || d->n_out != g.n_out;
    *bits += (double)g.K * (double)g.n_in * (double)g.n_out;
    *weights += (double)g.n_in * (double)g.n_out;
    *K = g.K;
out:
    x3_findings_free(&findings);
    return rc;
}

x3_status x3_pack_info_read(x3_pack_info *out, const x3_checkpoint *pack, x3_err *err)
{
    const x3_linear_desc *d;
    double bits[3] = {0}, weights[3] = {0}; /* body, head, draft layer */
    size_t layer;
    int K;
    x3_status rc = X3_OK;

    *out = (x3_pack_info){0};
    for (size_t i = 0; (d = x3_model_linear(pack->model, i, &layer)) != NULL; i++) {
        const x3_tensor *weight = x3_checkpoint_weight(pack, d);
        const int kind = d == &pack->model->head;
        X3_TRY(rc, out, add_group(out, pack, d, &bits[kind], &weights[kind], &K, err));
        if (kind == 1)
            out->bits_head = K > 0 ? K : weight != NULL ? 8 * (double)x3_dtype_bytes(weight->dtype) : 0;
    }
    for (size_t i = 0; pack->uses_draft && (d = x3_model_draft_linear(pack->model, i)) != NULL; i++)
        X3_TRY(rc, out, add_group(out, pack, d, &bits[2], &weights[2], &K, err));
    out->bits_body = weights[0] > 0 ? bits[0] / weights[0] : 0;
    out->bits_mtp = weights[2] > 0 ? bits[2] / weights[2] : 0;
    for (size_t i = 0; i < pack->st->n_shards; i++)
        out->n_bytes += pack->st->shards[i].n_bytes;
out:
    return rc;
}

x3_status x3_pack_receipt_load(cJSON **out, const char *dir, x3_err *err)
{
    char *path = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_path_join(&path, dir, "exl3_receipt.json", err));
    if (x3_path_exists(path))
        rc = x3_json_load(out, path, err);
out:
    free(path);
    return rc;
}

x3_status x3_pack_check_texts(const x3_checkpoint *pack, const cJSON *reference_receipt, const char *reference_path,
                              x3_err *err)
{
    const cJSON *scored = x3_json_get(reference_receipt, "text"), *calibrated;
    cJSON *receipt = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_pack_receipt_load(&receipt, pack->dir, err));
    calibrated = receipt == NULL ? NULL : x3_json_get(receipt, "text");
    if (!cJSON_IsArray(scored) || !cJSON_IsArray(calibrated))
        goto out;
    for (const cJSON *a = scored->child; a != NULL; a = a->next)
        for (const cJSON *b = calibrated->child; b != NULL; b = b->next) {
            const cJSON *x = x3_json_get(a, "xxh3"), *y = x3_json_get(b, "xxh3"), *name = x3_json_get(a, "name");
            if (!cJSON_IsString(x) || !cJSON_IsString(y) || strcmp(x->valuestring, y->valuestring) != 0)
                continue;
            rc = x3_fail(err, X3_ERR_INPUT, "%s: %s was calibrated on its text %s; score it on another", reference_path,
                         pack->dir, cJSON_IsString(name) ? name->valuestring : x->valuestring);
            goto out;
        }
out:
    cJSON_Delete(receipt);
    return rc;
}

x3_status x3_pack_receipt_head(cJSON *j, const char *tool, const char *command, const x3_checkpoint *pack, x3_err *err)
{
    static const char *const copied[] = {"seed", "recipe"};
    cJSON *receipt = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(j, "tool", cJSON_CreateString(tool), err));
    X3_TRY(rc, out, x3_json_add(j, "version", cJSON_CreateString(X3_VERSION), err));
    X3_TRY(rc, out, x3_json_add(j, "source_id", cJSON_CreateString(x3_source_id()), err));
    X3_TRY(rc, out, x3_json_add(j, "command", cJSON_CreateString(command), err));
    if (pack == NULL)
        goto out;
    X3_TRY(rc, out, x3_pack_receipt_load(&receipt, pack->dir, err));
    for (int i = 0; i < 2; i++) {
        const cJSON *value = receipt == NULL ? NULL : x3_json_get(receipt, copied[i]);
        X3_TRY(rc, out, x3_json_add(j, copied[i], value == NULL ? cJSON_CreateNull() : cJSON_Duplicate(value, true), err));
    }
out:
    cJSON_Delete(receipt);
    return rc;
}
