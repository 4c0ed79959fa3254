#include "calib/reference.h"

#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "formats/safetensors_write.h"

/* ---- writing ---- */

static x3_status make_receipt(char **out, const x3_checkpoint *c, const x3_corpus *corpus, const x3_reference_options *o,
                              size_t n_rows, const x3_device *dev, x3_err *err)
{
    cJSON *json = cJSON_CreateObject(), *source = cJSON_CreateObject(), *texts = cJSON_CreateArray();
    uint64_t hash;
    char *printed = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_json_add(json, "source", source, err));
    X3_TRY(rc, out, x3_json_add(json, "text", texts, err));
    X3_TRY(rc, out, x3_checkpoint_hash(c, &hash, err));
    X3_TRY(rc, out, x3_json_add(source, "path", cJSON_CreateString(c->dir), err));
    X3_TRY(rc, out, x3_json_add_hash(source, "xxh3", hash, err));
    X3_TRY(rc, out, x3_json_add(source, "dtype", cJSON_CreateString(x3_dtype_name(x3_checkpoint_weight(
                                    c, &c->model->layers[0].linears[0])->dtype)), err));
    for (size_t i = 0; i < corpus->n_files; i++) {
        cJSON *text = cJSON_CreateObject();
        X3_TRY(rc, out, x3_json_add(texts, NULL, text, err));
        X3_TRY(rc, out, x3_json_add(text, "name", cJSON_CreateString(corpus->files[i].name), err));
        X3_TRY(rc, out, x3_json_add_hash(text, "xxh3", corpus->files[i].hash, err));
        X3_TRY(rc, out, x3_json_add(text, "bytes", cJSON_CreateNumber((double)corpus->files[i].n_bytes), err));
    }
    X3_TRY(rc, out, x3_json_add(json, "ctx", cJSON_CreateNumber((double)o->ctx), err));
    X3_TRY(rc, out, x3_json_add(json, "positions", cJSON_CreateNumber((double)(n_rows * o->ctx)), err));
    X3_TRY(rc, out, x3_json_add(json, "skip", cJSON_CreateNumber((double)o->skip), err));
    X3_TRY(rc, out, x3_json_add(json, "device", cJSON_CreateString(dev->kernel_set), err));
    printed = cJSON_Print(json);
    if (printed == NULL)
        rc = x3_fail(err, X3_ERR_MEMORY, "out of memory: receipt of the reference");
    else
        rc = x3_strdup(out, printed, err);
out:
    cJSON_free(printed);
    cJSON_Delete(json);
    return rc;
}

static x3_status write_reference(const char *path, const x3_checkpoint *c, const int32_t *ids, const float *states,
                                 const char *receipt, size_t n_rows, size_t ctx, x3_err *err)
{
    const x3_tensor *head = x3_checkpoint_weight(c, &c->model->head), *bias = x3_checkpoint_bias(c, &c->model->head);
    const size_t hidden = c->model->hidden, vocab = c->model->vocab;
    x3_out_tensor t[] = {
        {.name = "ids", .dtype = X3_I32, .rank = 2, .shape = {n_rows, ctx}},
        {.name = "hidden", .dtype = X3_F32, .rank = 3, .shape = {n_rows, ctx, hidden}},
        {.name = "head", .dtype = head->dtype, .rank = 2, .shape = {vocab, hidden}},
        {.name = "receipt", .dtype = X3_U8, .rank = 1, .shape = {strlen(receipt)}},
        {.name = "head_bias", .dtype = X3_F32, .rank = 1, .shape = {vocab}},
    };
    x3_out_tensor *list[] = {&t[0], &t[1], &t[2], &t[3], &t[4]};
    const void *data[] = {ids, states, NULL, receipt, NULL};
    void *head_data = NULL;
    float *bias_data = NULL;
    x3_status rc;

    if (head->dtype == X3_F8_E4M3) { /* scales applied */
        t[2].dtype = X3_F32;
        X3_TRY(rc, out, x3_alloc(&head_data, vocab * hidden, sizeof(float), err));
        X3_TRY(rc, out, x3_dense_read(c, &c->model->head, 0, vocab, head_data, err));
    } else {
        X3_TRY(rc, out, x3_safetensors_load(c->st, head, &head_data, err));
    }
    data[2] = head_data;
    if (bias != NULL) {
        X3_TRY(rc, out, x3_alloc(&bias_data, vocab, sizeof *bias_data, err));
        X3_TRY(rc, out, x3_safetensors_read_f32(c->st, bias, 0, vocab, bias_data, err));
        data[4] = bias_data;
    }
    rc = x3_safetensors_save(path, list, data, bias != NULL ? 5 : 4, err);
out:
    free(head_data);
    free(bias_data);
    return rc;
}

x3_status x3_reference_create(const char *out_path, x3_device *dev, const x3_checkpoint *model,
                              const x3_reference_options *o, const x3_progress *progress, x3_err *err)
{
    x3_tokenizer *tokenizer = NULL;
    x3_corpus *corpus = NULL;
    char *path = NULL, *receipt = NULL;
    int32_t *ids = NULL;
    float *states = NULL;
    size_t n_rows = 0;
    x3_status rc;

    if (model->is_pack)
        return x3_fail(err, X3_ERR_INPUT, "%s: is an EXL3 pack; the reference is made from the original model", model->dir);
    X3_TRY(rc, out, x3_path_join(&path, model->dir, "tokenizer.json", err));
    X3_TRY(rc, out, x3_tokenizer_load(&tokenizer, path, err));
    X3_TRY(rc, out, x3_corpus_load(&corpus, o->texts, o->n_texts, X3_USE_EVALUATION, err));
    X3_TRY(rc, out, x3_corpus_rows(corpus, tokenizer, o->skip, o->positions / o->ctx, o->ctx, &ids, &n_rows, err));
    X3_TRY(rc, out, x3_alloc(&states, n_rows * o->ctx * model->model->hidden, sizeof *states, err));
    X3_TRY(rc, out, x3_stream_hidden(dev, model, ids, n_rows, o->ctx, states, progress, err));
    X3_TRY(rc, out, make_receipt(&receipt, model, corpus, o, n_rows, dev, err));
    rc = write_reference(out_path, model, ids, states, receipt, n_rows, o->ctx, err);
out:
    x3_tokenizer_free(tokenizer);
    x3_corpus_free(corpus);
    free(path);
    free(receipt);
    free(ids);
    free(states);
    return rc;
}

/* ---- reading ---- */

static x3_status find(const x3_reference *r, const char *name, x3_dtype dtype, int rank, const x3_tensor **out, x3_err *err)
{
    char shape[128];

    *out = x3_safetensors_find(r->st, name);
    if (*out == NULL)
        return x3_fail(err, X3_ERR_INPUT, "%s: is not a reference file: tensor \"%s\" is missing", r->path, name);
    if ((*out)->rank != rank || (dtype != X3_N_DTYPES && (*out)->dtype != dtype))
        return x3_fail(err, X3_ERR_INPUT, "%s: tensor \"%s\" is %s %s", r->path, name, x3_dtype_name((*out)->dtype),
                       x3_tensor_shape_text(*out, shape));
    return X3_OK;
}

static x3_status load_parts(x3_reference *r, x3_err *err)
{
    const x3_tensor *ids, *receipt;
    char *text = NULL;
    x3_status rc;

    X3_TRY(rc, out, find(r, "ids", X3_I32, 2, &ids, err));
    X3_TRY(rc, out, find(r, "hidden", X3_F32, 3, &r->states, err));
    X3_TRY(rc, out, find(r, "head", X3_N_DTYPES, 2, &r->head, err));
    X3_TRY(rc, out, find(r, "receipt", X3_U8, 1, &receipt, err));
    r->head_bias = x3_safetensors_find(r->st, "head_bias");
    r->n_rows = (size_t)ids->shape[0];
    r->ctx = (size_t)ids->shape[1];
    r->hidden = (size_t)r->states->shape[2];
    r->vocab = (size_t)r->head->shape[0];
    if (r->states->shape[0] != ids->shape[0] || r->states->shape[1] != ids->shape[1] || r->head->shape[1] != r->hidden ||
        r->n_rows == 0 || r->ctx == 0) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: ids, hidden states and head do not fit together", r->path);
        goto out;
    }
    X3_TRY(rc, out, x3_safetensors_load(r->st, ids, (void **)&r->ids, err));
    for (size_t i = 0; i < r->n_rows * r->ctx; i++)
        if (r->ids[i] < 0 || (size_t)r->ids[i] >= r->vocab) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: token id %d is outside the vocabulary of %zu", r->path, r->ids[i], r->vocab);
            goto out;
        }
    X3_TRY(rc, out, x3_safetensors_load(r->st, receipt, (void **)&text, err));
    X3_TRY(rc, out, x3_json_parse(&r->receipt, text, (size_t)receipt->n_bytes, r->path, err));
out:
    free(text);
    return rc;
}

x3_status x3_reference_open(x3_reference **out, const char *path, x3_err *err)
{
    x3_findings findings = {0};
    x3_reference *r = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&r, 1, sizeof *r, err));
    X3_TRY(rc, out, x3_strdup(&r->path, path, err));
    if (x3_path_is_dir(path)) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: is a folder, expected a reference file", path);
        goto out;
    }
    X3_TRY(rc, out, x3_safetensors_open(&r->st, path, &findings, err));
    X3_TRY(rc, out, x3_findings_status(&findings, err));
    X3_TRY(rc, out, load_parts(r, err));
    X3_TRY(rc, out, x3_hash_file(path, &r->hash, err));
    *out = r;
    r = NULL;
out:
    x3_findings_free(&findings);
    x3_reference_close(r);
    return rc;
}

void x3_reference_close(x3_reference *r)
{
    if (r == NULL)
        return;
    x3_safetensors_close(r->st);
    cJSON_Delete(r->receipt);
    free(r->ids);
    free(r->path);
    free(r);
}

x3_status x3_reference_states(const x3_reference *r, size_t row, size_t first, size_t n, float *out, x3_err *err)
{
    return x3_safetensors_read_f32(r->st, r->states, ((uint64_t)row * r->ctx + first) * r->hidden, n * r->hidden, out, err);
}

x3_status x3_reference_head(const x3_reference *r, x3_device *dev, x3_weight *head, x3_err *err)
{
    void *data = NULL, *d_data = NULL, *d_bias = NULL;
    float *bias = NULL;
    x3_status rc;

    *head = (x3_weight){.n_in = r->hidden, .n_out = r->vocab, .n_in_padded = r->hidden, .n_out_padded = r->vocab};
    head->kind = r->head->dtype == X3_BF16 ? X3_WEIGHT_BF16 : r->head->dtype == X3_F16 ? X3_WEIGHT_F16 : X3_WEIGHT_F32;
    if (head->kind == X3_WEIGHT_F32 && r->head->dtype != X3_F32)
        return x3_fail(err, X3_ERR_INPUT, "%s: head of type %s", r->path, x3_dtype_name(r->head->dtype));
    X3_TRY(rc, out, x3_safetensors_load(r->st, r->head, &data, err));
    X3_TRY(rc, out, x3_device_alloc(dev, &d_data, (size_t)r->head->n_bytes, err));
    head->data = d_data;
    X3_TRY(rc, out, dev->ops->upload(dev, d_data, data, (size_t)r->head->n_bytes, err));
    if (r->head_bias != NULL) {
        X3_TRY(rc, out, x3_alloc(&bias, r->vocab, sizeof *bias, err));
        X3_TRY(rc, out, x3_safetensors_read_f32(r->st, r->head_bias, 0, r->vocab, bias, err));
        X3_TRY(rc, out, x3_device_alloc(dev, &d_bias, r->vocab * sizeof *bias, err));
        head->bias = d_bias;
        X3_TRY(rc, out, dev->ops->upload(dev, d_bias, bias, r->vocab * sizeof *bias, err));
    }
    rc = dev->ops->sync(dev, err);
out:
    free(data);
    free(bias);
    if (rc != X3_OK)
        x3_linear_free(head, dev);
    return rc;
}
