#include "quant/verify.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "runtime/weights.h"

/* ---- the pack alone ---- */

static void check_index(x3_verify_report *r)
{
    if (!r->pack->st->has_index)
        x3_findings_add(&r->notes, "%s: model.safetensors.index.json is missing; some readers need it even for one shard",
                        r->pack->dir);
}

/* What the config says against what the groups are. */
static void check_config(x3_verify_report *r)
{
    const cJSON *q = x3_hf_quantization(r->pack->config), *bits = x3_json_get(q, "bits"), *head = x3_json_get(q, "head_bits");
    const char *path = r->pack->config->path;
    size_t n_fp8 = 0;

    if (!cJSON_IsNumber(bits))
        x3_findings_add(&r->findings, "%s: quantization_config.bits is missing", path);
    else if (fabs(bits->valuedouble - r->info.bits_body) > 0.01)
        x3_findings_add(&r->notes, "%s: quantization_config.bits is %g, the groups have %.4f", path, bits->valuedouble,
                        r->info.bits_body);
    if (cJSON_IsNumber(head) && r->info.bits_head <= 8 && head->valuedouble != r->info.bits_head)
        x3_findings_add(&r->findings, "%s: quantization_config.head_bits is %g, the head has %g", path, head->valuedouble,
                        r->info.bits_head);
    if (cJSON_IsNumber(head) && head->valuedouble > 8)
        x3_findings_add(&r->findings, "%s: head_bits %g is refused by readers", path, head->valuedouble);
    if (r->info.n_padded > 0)
        x3_findings_add(&r->notes, "%zu groups are padded to multiples of 128: this pack loads here but not in exllamav3",
                        r->info.n_padded);
    for (size_t i = 0; i < r->pack->st->n_tensors; i++)
        n_fp8 += r->pack->st->tensors[i].dtype == X3_F8_E4M3;
    if (n_fp8 > 0)
        x3_findings_add(&r->notes, "%zu tensors are FP8 with scales beside them, as in the source: read here, other readers may not "
                        "apply the scales", n_fp8);
    if (r->pack->draft_problem != NULL)
        x3_findings_add(&r->notes, "the draft layer has groups and is not whole, so nothing more of it was checked: %s",
                        r->pack->draft_problem);
    if (r->pack->config->n_stop_tokens == 0)
        x3_findings_add(&r->notes, "%s: neither config.json nor generation_config.json names a stop token", r->pack->dir);
}

static x3_status check_storage(x3_verify_report *r, x3_err *err)
{
    char *path = NULL;
    cJSON *json = NULL;
    const cJSON *storage;
    size_t n_listed = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_path_join(&path, r->pack->dir, "quantization_config.json", err));
    if (!x3_path_exists(path)) {
        x3_findings_add(&r->findings, "%s: is missing", path);
        goto out;
    }
    X3_TRY(rc, out, x3_json_load(&json, path, err));
    storage = x3_json_get(json, "tensor_storage");
    if (!cJSON_IsObject(storage)) {
        x3_findings_add(&r->findings, "%s: tensor_storage is missing", path);
        goto out;
    }
    for (const cJSON *module = storage->child; module != NULL; module = module->next) {
        const cJSON *stored = x3_json_get(module, "stored_tensors");
        for (const cJSON *t = cJSON_IsObject(stored) ? stored->child : NULL; t != NULL; t = t->next) {
            const x3_tensor *there = x3_safetensors_find(r->pack->st, t->string);
            const cJSON *n_bytes = x3_json_get(t, "n_bytes");
            n_listed++;
            if (there == NULL)
                x3_findings_add(&r->findings, "%s: lists tensor %s, which no shard has", path, t->string);
            else if (!cJSON_IsNumber(n_bytes) || n_bytes->valuedouble != (double)there->n_bytes)
                x3_findings_add(&r->findings, "%s: says another size for %s than its %llu bytes", path, t->string,
                                (unsigned long long)there->n_bytes);
        }
    }
    if (n_listed != r->pack->st->n_tensors)
        x3_findings_add(&r->findings, "%s: lists %zu tensors, the shards have %zu", path, n_listed, r->pack->st->n_tensors);
out:
    free(path);
    cJSON_Delete(json);
    return rc;
}

static x3_status check_scales(x3_verify_report *r, const x3_linear_desc *d, const x3_group *g, x3_err *err)
{
    uint16_t *scales = NULL;
    x3_status rc = X3_OK;

    for (int side = 0; side < 2; side++) {
        size_t n = side == 0 ? g->n_in : g->n_out, bad = 0, live = 0;
        free(scales);
        scales = NULL;
        X3_TRY(rc, out, x3_group_scales(r->pack->st, g, side == 0, &scales, err));
        for (size_t i = 0; i < n; i++) {
            bad += (scales[i] & 0x7C00) == 0x7C00;
            live += (scales[i] & 0x7FFF) != 0;
        }
        if (bad > 0)
            x3_findings_add(&r->findings, "%s.%s: %zu of %zu scales are not finite", d->name, side == 0 ? "suh" : "svh", bad, n);
        if (live == 0)
            x3_findings_add(&r->notes, "%s.%s: all scales are zero", d->name, side == 0 ? "suh" : "svh");
    }
out:
    free(scales);
    return rc;
}

/* Other readers decode all experts of a layer with one codebook. `first` is that of the layer's first expert, -1 before. */
static void check_expert_codebook(x3_verify_report *r, const x3_layer_desc *l, const x3_linear_desc *d, const x3_group *g,
                                  int *first)
{
    if (x3_layer_expert(l, (size_t)(d - l->linears)) < 0)
        return;
    if (*first < 0)
        *first = (int)g->codebook;
    else if (*first != (int)g->codebook)
        x3_findings_add(&r->findings, "%s: codebook %s, other experts of the layer have %s: readers refuse that", d->name,
                        x3_codebook_name(g->codebook), x3_codebook_name((x3_codebook)*first));
}

/* Linear i of the model, then of the draft layer where the checkpoint uses it: *layer is then NULL for its join and head.
 * NULL past the end. */
static const x3_linear_desc *every_linear(const x3_checkpoint *c, size_t i, const x3_layer_desc **layer)
{
    const x3_model *m = c->model;
    const x3_linear_desc *d;
    size_t number, n = 1;

    for (size_t l = 0; l < m->n_layers; l++)
        n += m->layers[l].n_linears;
    if (i < n) {
        d = x3_model_linear(m, i, &number);
        *layer = number < m->n_layers ? &m->layers[number] : NULL;
        return d;
    }
    d = c->uses_draft ? x3_model_draft_linear(m, i - n) : NULL;
    *layer = d == NULL || d == &m->draft->join || d == &m->draft->head ? NULL : &m->layers[m->n_layers];
    return d;
}

static x3_status check_groups(x3_verify_report *r, x3_err *err)
{
    const x3_linear_desc *d;
    const x3_layer_desc *layer, *last = NULL;
    int codebook = -1;
    x3_status rc = X3_OK;

    for (size_t i = 0; (d = every_linear(r->pack, i, &layer)) != NULL; i++) {
        bool found;
        x3_group g;
        X3_TRY(rc, out, x3_group_find(r->pack->st, d->name, &g, &found, &r->findings, err));
        if (!found) {
            if (d->quantized && d != &r->pack->model->head && x3_checkpoint_weight(r->pack, d) != NULL)
                x3_findings_add(&r->notes, "%s: is not quantized", d->name);
            continue;
        }
        if (g.trellis->offset % 64 != 0)
            x3_findings_add(&r->notes, "%s: starts at byte %llu, not on a 64-byte boundary", g.trellis->name,
                            (unsigned long long)g.trellis->offset);
        X3_TRY(rc, out, check_scales(r, d, &g, err));
        codebook = layer == last ? codebook : -1;
        last = layer;
        if (layer != NULL)
            check_expert_codebook(r, layer, d, &g, &codebook);
    }
out:
    return rc;
}

/* ---- the receipt ---- */

static x3_status check_hashes(x3_verify_report *r, const cJSON *tensors, const x3_progress *progress, x3_err *err)
{
    const x3_safetensors *st = r->pack->st;
    size_t n_listed = 0;
    x3_status rc = X3_OK;

    for (const cJSON *t = tensors->child; t != NULL; t = t->next) {
        const x3_tensor *there = x3_safetensors_find(st, t->string);
        char text[17];
        uint64_t hash;
        n_listed++;
        if (there == NULL) {
            x3_findings_add(&r->findings, "%s: tensor %s of the receipt is missing", r->pack->dir, t->string);
            continue;
        }
        X3_TRY(rc, out, x3_checkpoint_tensor_hash(r->pack, there, &hash, err));
        x3_hash_text(hash, text);
        r->n_hashed++;
        if (!cJSON_IsString(t) || strcmp(t->valuestring, text) != 0)
            x3_findings_add(&r->findings, "%s: tensor %s has XXH3 %s, the receipt says %s", st->shards[there->shard].file,
                            t->string, text, cJSON_IsString(t) ? t->valuestring : "?");
        if (progress != NULL)
            progress->step(progress->arg, n_listed, st->n_tensors, "hashes");
    }
    if (n_listed < st->n_tensors)
        x3_findings_add(&r->findings, "%s: %zu tensors are not in the receipt", r->pack->dir, st->n_tensors - n_listed);
out:
    return rc;
}

static x3_status check_files(x3_verify_report *r, const cJSON *files, x3_err *err)
{
    char *path = NULL;
    x3_status rc = X3_OK;

    for (const cJSON *f = files->child; f != NULL; f = f->next) {
        char text[17];
        uint64_t hash;
        free(path);
        X3_TRY(rc, out, x3_path_join(&path, r->pack->dir, f->string, err));
        if (!x3_path_exists(path)) {
            x3_findings_add(&r->findings, "%s: is in the receipt and not in the pack", path);
            continue;
        }
        X3_TRY(rc, out, x3_hash_file(path, &hash, err));
        x3_hash_text(hash, text);
        if (!cJSON_IsString(f) || strcmp(f->valuestring, text) != 0)
            x3_findings_add(&r->findings, "%s: has XXH3 %s, the receipt says %s", path, text,
                            cJSON_IsString(f) ? f->valuestring : "?");
    }
out:
    free(path);
    return rc;
}

static x3_status check_receipt(x3_verify_report *r, const cJSON *receipt, const x3_progress *progress, x3_err *err)
{
    const cJSON *tensors, *files, *groups;
    x3_status rc = X3_OK;

    if (receipt == NULL) {
        x3_findings_add(&r->notes, "%s: has no exl3_receipt.json: nothing to compare the tensors with", r->pack->dir);
        return X3_OK;
    }
    tensors = x3_json_get(receipt, "tensors");
    files = x3_json_get(receipt, "files");
    groups = x3_json_get(receipt, "groups");
    if (!cJSON_IsObject(tensors) || !cJSON_IsObject(files) || !cJSON_IsArray(groups)) {
        x3_findings_add(&r->findings, "%s/exl3_receipt.json: tensors, files or groups are missing", r->pack->dir);
        return X3_OK;
    }
    for (const cJSON *g = groups->child; g != NULL; g = g->next)
        if (cJSON_IsTrue(x3_json_get(g, "uncalibrated")))
            x3_findings_add(&r->notes, "%s: was quantized without calibration", x3_json_get(g, "name")->valuestring);
    X3_TRY(rc, out, check_hashes(r, tensors, progress, err));
    rc = check_files(r, files, err);
out:
    return rc;
}

/* ---- against the source ---- */

static bool is_named(const cJSON *group, const char *name)
{
    const cJSON *n = group == NULL ? NULL : x3_json_get(group, "name");

    return cJSON_IsString(n) && strcmp(n->valuestring, name) == 0;
}

/* *last is the group found before: the next one is usually the right one. */
static const cJSON *receipt_group(const cJSON *receipt, const char *name, const cJSON **last)
{
    const cJSON *groups = receipt == NULL ? NULL : x3_json_get(receipt, "groups"), *g;

    if (groups == NULL)
        return NULL;
    if (*last != NULL && is_named((*last)->next, name))
        return *last = (*last)->next;
    for (g = groups->child; g != NULL && !is_named(g, name); g = g->next)
        ;
    if (g != NULL)
        *last = g;
    return g;
}

/* |E|^2 / |W|^2: the rows of the identity go through the quantized linear, a block at a time. */
static x3_status weight_error(x3_device *dev, const x3_checkpoint *pack, const x3_checkpoint *source,
                              const x3_linear_desc *d, double *error, x3_err *err)
{
    enum { ROWS = 256 };
    float *w = NULL, *eye = NULL, *got = NULL, *d_eye = NULL, *d_got = NULL;
    double squares = 0, norm = 0;
    x3_weight q = {0};
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&w, d->n_out * d->n_in, sizeof *w, err));
    X3_TRY(rc, out, x3_dense_read(source, d, 0, d->n_out, w, err));
    X3_TRY(rc, out, x3_linear_load(&q, dev, pack, d, err));
    x3_device_free(dev, (void *)(uintptr_t)q.bias);
    q.bias = NULL;
    X3_TRY(rc, out, x3_alloc(&eye, ROWS * d->n_in, sizeof *eye, err));
    X3_TRY(rc, out, x3_alloc(&got, ROWS * d->n_out, sizeof *got, err));
    X3_TRY(rc, out, x3_device_floats(dev, &d_eye, ROWS * d->n_in, err));
    X3_TRY(rc, out, x3_device_floats(dev, &d_got, ROWS * d->n_out, err));
    for (size_t first = 0; first < d->n_in; first += ROWS) {
        size_t n = x3_min_size(ROWS, d->n_in - first);
        memset(eye, 0, n * d->n_in * sizeof *eye);
        for (size_t i = 0; i < n; i++)
            eye[i * d->n_in + first + i] = 1;
        X3_TRY(rc, out, dev->ops->upload(dev, d_eye, eye, n * d->n_in * sizeof *eye, err));
        X3_TRY(rc, out, dev->ops->linear(dev, &q, d_eye, d->n_in, n, d_got, d->n_out, err));
        X3_TRY(rc, out, dev->ops->download(dev, got, d_got, n * d->n_out * sizeof *got, err));
        for (size_t i = 0; i < n; i++)
            for (size_t j = 0; j < d->n_out; j++) {
                double x = w[j * d->n_in + first + i];
                squares += (got[i * d->n_out + j] - x) * (got[i * d->n_out + j] - x);
                norm += x * x;
            }
    }
    *error = norm > 0 ? squares / norm : squares;
out:
    x3_linear_free(&q, dev);
    x3_device_free(dev, d_eye);
    x3_device_free(dev, d_got);
    free(w);
    free(eye);
    free(got);
    return rc;
}

static x3_status compare_groups(x3_verify_report *r, const x3_checkpoint *source, const cJSON *receipt, x3_device *dev,
                                const x3_progress *progress, x3_err *err)
{
    const x3_linear_desc *d;
    const x3_layer_desc *layer;
    const cJSON *last = NULL;
    size_t capacity = 0;
    x3_status rc = X3_OK;

    for (size_t i = 0; (d = every_linear(source, i, &layer)) != NULL; i++) {
        const x3_linear_desc *p = every_linear(r->pack, i, &layer);
        const cJSON *entry = receipt_group(receipt, d->name, &last);
        const cJSON *stated = entry == NULL ? NULL : x3_json_get(entry, "error_weight");
        x3_verify_group g = {.receipt_error = cJSON_IsNumber(stated) ? stated->valuedouble : -1};
        x3_weight w;
        if (p == NULL || strcmp(p->name, d->name) != 0) {
            x3_findings_add(&r->findings, "%s: the source has it, the pack's model does not", d->name);
            continue;
        }
        if (x3_checkpoint_weight(source, d) == NULL) /* a draft layer without a head of its own */
            continue;
        X3_TRY(rc, out, x3_linear_load(&w, dev, r->pack, p, err));
        g.name = p->name;
        g.K = w.K;
        x3_linear_free(&w, dev);
        if (g.K == 0)
            continue;
        rc = weight_error(dev, r->pack, source, d, &g.error_weight, err);
        if (rc != X3_OK)
            goto out;
        if (g.receipt_error >= 0 && fabs(g.error_weight - g.receipt_error) > 1e-3 * g.receipt_error + 1e-9)
            x3_findings_add(&r->findings, "%s: |E|^2/|W|^2 is %.6g, the receipt says %.6g", d->name, g.error_weight,
                            g.receipt_error);
        X3_TRY(rc, out, x3_grow(&r->groups, &capacity, r->n_groups + 1, sizeof g, err));
        r->groups[r->n_groups++] = g;
        if (progress != NULL)
            progress->step(progress->arg, i + 1, i + 2, d->name);
    }
out:
    return rc;
}

static x3_status compare_kept(x3_verify_report *r, const x3_checkpoint *source, x3_err *err)
{
    x3_status rc = X3_OK;

    for (size_t i = 0; i < source->st->n_tensors; i++) {
        const x3_tensor *t = &source->st->tensors[i], *p = x3_safetensors_find(r->pack->st, t->name);
        uint64_t a, b;
        /* a weight that is still there was left as it is */
        if (source->roles[i] != X3_ROLE_KEPT && !(source->roles[i] == X3_ROLE_WEIGHT && p != NULL))
            continue;
        if (p == NULL) {
            x3_findings_add(&r->findings, "%s: tensor %s of the source is missing", r->pack->dir, t->name);
            continue;
        }
        X3_TRY(rc, out, x3_checkpoint_tensor_hash(source, t, &a, err));
        X3_TRY(rc, out, x3_checkpoint_tensor_hash(r->pack, p, &b, err));
        if (a != b || p->dtype != t->dtype)
            x3_findings_add(&r->notes, "%s: is not the source's bytes (%s there, %s here)", t->name, x3_dtype_name(t->dtype),
                            x3_dtype_name(p->dtype));
    }
out:
    return rc;
}

static x3_status compare_stop_tokens(x3_verify_report *r, const x3_checkpoint *source)
{
    for (size_t i = 0; i < source->config->n_stop_tokens; i++) {
        bool found = false;
        for (size_t j = 0; j < r->pack->config->n_stop_tokens; j++)
            found = found || r->pack->config->stop_tokens[j] == source->config->stop_tokens[i];
        if (!found)
            x3_findings_add(&r->findings, "%s: stop token %lld of the source is missing (generation_config.json?)",
                            r->pack->dir, (long long)source->config->stop_tokens[i]);
    }
    return X3_OK;
}

static x3_status compare_source(x3_verify_report *r, const char *source_dir, const cJSON *receipt, x3_device *dev,
                                const x3_progress *progress, x3_err *err)
{
    const cJSON *stated = receipt == NULL ? NULL : x3_json_get(receipt, "source");
    x3_findings of_source = {0}; /* its own: what is wrong with the pack does not keep the source from opening */
    x3_checkpoint *source = NULL;
    uint64_t hash;
    char text[17];
    x3_status rc;

    X3_TRY(rc, out, x3_checkpoint_open(&source, source_dir, NULL, &of_source, err));
    if (r->pack->uses_draft)
        X3_TRY(rc, out, x3_checkpoint_use_draft(source, &of_source, err));
    X3_TRY(rc, out, x3_checkpoint_hash(source, &hash, err));
    x3_hash_text(hash, text);
    stated = stated == NULL ? NULL : x3_json_get(stated, "xxh3");
    if (cJSON_IsString(stated) && strcmp(stated->valuestring, text) != 0)
        x3_findings_add(&r->findings, "%s: has XXH3 %s, the pack was made from %s", source_dir, text, stated->valuestring);
    X3_TRY(rc, out, compare_kept(r, source, err));
    X3_TRY(rc, out, compare_stop_tokens(r, source));
    rc = compare_groups(r, source, receipt, dev, progress, err);
out:
    x3_findings_free(&of_source);
    x3_checkpoint_close(source);
    return rc;
}

x3_status x3_verify_pack(x3_verify_report *r, const char *pack_dir, const char *source_dir, x3_device *dev,
                         const x3_progress *progress, x3_err *err)
{
    cJSON *receipt = NULL;
    x3_status rc;

    *r = (x3_verify_report){0};
    X3_TRY(rc, out, x3_checkpoint_open(&r->pack, pack_dir, NULL, &r->findings, err));
    if (!r->pack->is_pack) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: is not an EXL3 pack: config.json has no quantization_config of quant_method exl3",
                     pack_dir);
        goto out;
    }
    X3_TRY(rc, out, x3_pack_info_read(&r->info, r->pack, err));
    X3_TRY(rc, out, x3_pack_receipt_load(&receipt, pack_dir, err));
    check_index(r);
    check_config(r);
    X3_TRY(rc, out, check_storage(r, err));
    X3_TRY(rc, out, check_groups(r, err));
    X3_TRY(rc, out, check_receipt(r, receipt, progress, err));
    if (source_dir != NULL)
        rc = compare_source(r, source_dir, receipt, dev, progress, err);
out:
    cJSON_Delete(receipt);
    return rc;
}

void x3_verify_report_free(x3_verify_report *r)
{
    x3_findings_free(&r->findings);
    x3_findings_free(&r->notes);
    free(r->groups);
    x3_checkpoint_close(r->pack);
    *r = (x3_verify_report){0};
}
