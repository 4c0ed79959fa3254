#include "quant/pack_plan.h"

#include <stdlib.h>
#include <string.h>

#include "formats/exl3.h"
#include "formats/io.h"
#include "kernels/layout.h"

#define ABSENT SIZE_MAX

static uint64_t padded(size_t n)
{
    return x3_round_up(n, X3_HADAMARD);
}

/* ---- tensors ---- */

struct planner {
    x3_pack_plan *p;
    size_t capacity, copied_capacity, unit;
    bool *taken; /* [source tensors] already in the list */
    x3_err *err;
};

static x3_status add_tensor(struct planner *b, const char *name, x3_dtype dtype, int rank, uint64_t d0, uint64_t d1,
                            uint64_t d2, size_t *index)
{
    x3_pack_tensor t = {.out = {.name = name, .dtype = dtype, .rank = rank, .shape = {d0, d1, d2}}, .unit = b->unit};
    x3_status rc = x3_grow(&b->p->tensors, &b->capacity, b->p->n_tensors + 1, sizeof t, b->err);

    if (rc != X3_OK)
        return rc;
    rc = x3_grow(&b->p->copied, &b->copied_capacity, b->p->n_tensors + 1, sizeof *b->p->copied, b->err);
    if (rc != X3_OK)
        return rc;
    b->p->copied[b->p->n_tensors] = NULL;
    *index = b->p->n_tensors;
    b->p->tensors[b->p->n_tensors++] = t;
    return X3_OK;
}

static x3_status add_part(struct planner *b, const x3_linear_desc *d, const char *suffix, x3_dtype dtype, int rank,
                          uint64_t d0, uint64_t d1, uint64_t d2, size_t *index)
{
    char *name;
    x3_status rc = x3_arena_printf(&b->p->arena, &name, b->err, "%s.%s", d->name, suffix);

    return rc == X3_OK ? add_tensor(b, name, dtype, rank, d0, d1, d2, index) : rc;
}

static x3_status add_group(struct planner *b, const x3_linear_desc *d, int K)
{
    x3_planned_group *g = &b->p->groups[b->p->n_groups++];
    const uint64_t in = padded(d->n_in), out = padded(d->n_out);
    x3_status rc = X3_OK;

    *g = (x3_planned_group){d, K, ABSENT, ABSENT, ABSENT, ABSENT, ABSENT};
    if (K == 0)
        return X3_OK;
    b->unit++;
    X3_TRY(rc, out, add_part(b, d, "trellis", X3_I16, 3, in / 16, out / 16, 16 * (uint64_t)K, &g->trellis));
    X3_TRY(rc, out, add_part(b, d, "suh", X3_F16, 1, in, 0, 0, &g->suh));
    X3_TRY(rc, out, add_part(b, d, "svh", X3_F16, 1, out, 0, 0, &g->svh));
    if (d->has_bias)
        X3_TRY(rc, out, add_part(b, d, "bias", X3_F16, 1, out, 0, 0, &g->bias));
    if (b->p->codebook != X3_CB_3INST)
        X3_TRY(rc, out, add_part(b, d, x3_codebook_name(b->p->codebook), X3_I32, 0, 0, 0, 0, &g->marker));
out:
    return rc;
}

static x3_status add_copy(struct planner *b, const x3_tensor *t)
{
    size_t index;
    x3_status rc;

    if (t == NULL || b->taken[t - b->p->source->st->tensors])
        return X3_OK;
    b->taken[t - b->p->source->st->tensors] = true;
    b->unit++;
    rc = add_tensor(b, t->name, t->dtype, t->rank, 0, 0, 0, &index);
    if (rc != X3_OK)
        return rc;
    memcpy(b->p->tensors[index].out.shape, t->shape, sizeof t->shape);
    b->p->copied[index] = t;
    return X3_OK;
}

static x3_status add_linear(struct planner *b, const x3_linear_desc *d, int K)
{
    x3_status rc = add_group(b, d, K);

    if (rc == X3_OK && K == 0) {
        rc = add_copy(b, x3_checkpoint_weight(b->p->source, d));
        if (rc == X3_OK)
            rc = add_copy(b, x3_checkpoint_bias(b->p->source, d));
    }
    return rc;
}

static x3_status add_draft(struct planner *b)
{
    const x3_checkpoint *c = b->p->source;
    const x3_layer_desc *l = &c->model->layers[c->model->n_layers];
    const x3_draft_desc *draft = c->model->draft;
    const x3_linear_desc *d;
    x3_status rc;

    X3_TRY(rc, out, add_copy(b, x3_safetensors_find(c->st, draft->embed_norm.name)));
    X3_TRY(rc, out, add_copy(b, x3_safetensors_find(c->st, draft->hidden_norm.name)));
    for (size_t i = 0; i < l->n_vectors; i++)
        X3_TRY(rc, out, add_copy(b, x3_safetensors_find(c->st, l->vectors[i].name)));
    X3_TRY(rc, out, add_copy(b, x3_safetensors_find(c->st, draft->out_norm.name)));
    for (size_t i = 0; (d = x3_model_draft_linear(c->model, i)) != NULL; i++)
        if (x3_checkpoint_weight(c, d) != NULL) /* it need not have a head */
            X3_TRY(rc, out, add_linear(b, d, d->quantized ? b->p->allocation->draft_K : 0));
out:
    return rc;
}

static x3_status add_everything(struct planner *b)
{
    const x3_checkpoint *c = b->p->source;
    const x3_model *m = c->model;
    size_t index = 0;
    x3_status rc;

    X3_TRY(rc, out, add_copy(b, x3_safetensors_find(c->st, m->embed_name)));
    for (size_t i = 0; i < m->n_layers; i++) {
        for (size_t j = 0; j < m->layers[i].n_vectors; j++)
            X3_TRY(rc, out, add_copy(b, x3_safetensors_find(c->st, m->layers[i].vectors[j].name)));
        for (size_t j = 0; j < m->layers[i].n_linears; j++)
            X3_TRY(rc, out, add_linear(b, &m->layers[i].linears[j], b->p->allocation->K[index++]));
    }
    X3_TRY(rc, out, add_copy(b, x3_safetensors_find(c->st, m->final_norm.name)));
    b->p->head = b->p->n_groups;
    X3_TRY(rc, out, add_linear(b, &m->head, b->p->allocation->head_K));
    if (c->uses_draft)
        X3_TRY(rc, out, add_draft(b));
    for (size_t i = 0; i < c->st->n_tensors; i++)
        if (c->roles[i] == X3_ROLE_KEPT)
            X3_TRY(rc, out, add_copy(b, &c->st->tensors[i]));
out:
    return rc;
}

x3_status x3_pack_plan_create(x3_pack_plan **out, const x3_checkpoint *source, const x3_allocation *allocation,
                              x3_codebook codebook, x3_err *err)
{
    struct planner b = {.err = err};
    size_t n_draft = 0;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&b.p, 1, sizeof *b.p, err));
    b.p->source = source;
    b.p->allocation = allocation;
    b.p->codebook = codebook;
    while (source->uses_draft && x3_model_draft_linear(source->model, n_draft) != NULL)
        n_draft++;
    X3_TRY(rc, out, x3_alloc(&b.p->groups, allocation->n + 1 + n_draft, sizeof *b.p->groups, err));
    X3_TRY(rc, out, x3_alloc(&b.taken, source->st->n_tensors, sizeof *b.taken, err));
    X3_TRY(rc, out, add_everything(&b));
    *out = b.p;
    b.p = NULL;
out:
    free(b.taken);
    x3_pack_plan_free(b.p);
    return rc;
}

void x3_pack_plan_free(x3_pack_plan *p)
{
    if (p == NULL)
        return;
    free(p->tensors);
    free(p->copied);
    free(p->groups);
    x3_arena_free(&p->arena);
    free(p);
}

bool x3_pack_unties_head(const x3_pack_plan *p)
{
    return p->source->model->tied && p->allocation->head_K > 0;
}

/* ---- JSON ---- */

static x3_status add_quantization(cJSON *q, const x3_pack_plan *p, const x3_pack_json *info, x3_err *err)
{
    const cJSON *original = x3_hf_quantization(p->source->config);
    cJSON *calibration = cJSON_CreateObject();
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(q, "quant_method", cJSON_CreateString("exl3"), err));
    X3_TRY(rc, out, x3_json_add(q, "version", cJSON_CreateString(X3_VERSION), err));
    X3_TRY(rc, out, x3_json_add(q, "bits", cJSON_CreateNumber(p->allocation->body_bits), err));
    if (p->allocation->head_K > 0)
        X3_TRY(rc, out, x3_json_add(q, "head_bits", cJSON_CreateNumber(p->allocation->head_K), err));
    X3_TRY(rc, out, x3_json_add(q, "calibration", calibration, err));
    X3_TRY(rc, out, x3_json_add(calibration, "rows", cJSON_CreateNumber((double)info->rows), err));
    X3_TRY(rc, out, x3_json_add(calibration, "cols", cJSON_CreateNumber((double)info->cols), err));
    X3_TRY(rc, out, x3_json_add(q, "out_scales", cJSON_CreateString("always"), err));
    X3_TRY(rc, out, x3_json_add(q, "codebook", cJSON_CreateString(x3_codebook_name(p->codebook)), err));
    if (original != NULL)
        X3_TRY(rc, out, x3_json_add(q, "original_quantization_config", cJSON_Duplicate(original, true), err));
out:
    return rc;
}

/* Replaces a member that is there. */
static x3_status untie(cJSON *object, x3_err *err)
{
    cJSON *no = cJSON_CreateFalse();

    if (x3_json_get(object, "tie_word_embeddings") == NULL) {
        cJSON_Delete(no);
        return X3_OK;
    }
    if (no == NULL || !cJSON_ReplaceItemInObjectCaseSensitive(object, "tie_word_embeddings", no)) {
        cJSON_Delete(no);
        return x3_fail(err, X3_ERR_MEMORY, "out of memory: config.json");
    }
    return X3_OK;
}

x3_status x3_pack_config(cJSON **out, const x3_pack_plan *p, const x3_pack_json *info, x3_err *err)
{
    cJSON *config = cJSON_Duplicate(p->source->config->config, true), *q = cJSON_CreateObject(), *text;
    x3_status rc;

    *out = NULL;
    if (config == NULL || q == NULL) {
        cJSON_Delete(q);
        rc = x3_fail(err, X3_ERR_MEMORY, "out of memory: config.json");
        goto out;
    }
    text = cJSON_GetObjectItemCaseSensitive(config, "text_config");
    cJSON_DeleteItemFromObjectCaseSensitive(config, "quantization_config");
    if (text != NULL)
        cJSON_DeleteItemFromObjectCaseSensitive(text, "quantization_config");
    X3_TRY(rc, out, x3_json_add(config, "quantization_config", q, err));
    X3_TRY(rc, out, add_quantization(q, p, info, err));
    if (x3_pack_unties_head(p)) {
        X3_TRY(rc, out, untie(config, err));
        if (text != NULL)
            X3_TRY(rc, out, untie(text, err));
        if (x3_json_get(config, "tie_word_embeddings") == NULL) /* families whose default is tied */
            X3_TRY(rc, out, x3_json_add(config, "tie_word_embeddings", cJSON_CreateFalse(), err));
    }
    *out = config;
    config = NULL;
out:
    cJSON_Delete(config);
    return rc;
}

/* What torch calls a type. */
static const char *torch_name(x3_dtype dtype)
{
    switch (dtype) {
    case X3_F64: return "torch.float64";
    case X3_F32: return "torch.float32";
    case X3_F16: return "torch.float16";
    case X3_BF16: return "torch.bfloat16";
    case X3_F8_E4M3: return "torch.float8_e4m3fn";
    case X3_F8_E5M2: return "torch.float8_e5m2";
    case X3_F8_E8M0: return "torch.float8_e8m0fnu";
    case X3_I64: return "torch.int64";
    case X3_I32: return "torch.int32";
    case X3_I16: return "torch.int16";
    case X3_I8: return "torch.int8";
    case X3_U64: return "torch.uint64";
    case X3_U32: return "torch.uint32";
    case X3_U16: return "torch.uint16";
    case X3_U8: return "torch.uint8";
    case X3_BOOL: return "torch.bool";
    case X3_N_DTYPES: break;
    }
    return "?";
}

static x3_status add_stored(cJSON *stored, const x3_pack_tensor *t, x3_err *err)
{
    cJSON *entry = cJSON_CreateObject(), *shape;
    uint64_t n_bytes = x3_dtype_bytes(t->out.dtype);
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(stored, t->out.name, entry, err));
    X3_TRY(rc, out, x3_json_add(entry, "shape", shape = cJSON_CreateArray(), err));
    for (int i = 0; i < t->out.rank; i++) {
        X3_TRY(rc, out, x3_json_add(shape, NULL, cJSON_CreateNumber((double)t->out.shape[i]), err));
        n_bytes *= t->out.shape[i];
    }
    X3_TRY(rc, out, x3_json_add(entry, "n_bytes", cJSON_CreateNumber((double)n_bytes), err));
    X3_TRY(rc, out, x3_json_add(entry, "dtype", cJSON_CreateString(torch_name(t->out.dtype)), err));
out:
    return rc;
}

static x3_status add_group_facts(cJSON *module, const x3_pack_plan *p, const x3_planned_group *g, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(module, "quant_format", cJSON_CreateString("exl3"), err));
    X3_TRY(rc, out, x3_json_add(module, "bits_per_weight", cJSON_CreateNumber(g->K), err));
    if (p->codebook == X3_CB_MUL1)
        rc = x3_json_add(module, "mul1_multiplier", cJSON_CreateNumber((double)X3_MUL1_MULTIPLIER), err);
    else if (p->codebook == X3_CB_MCG)
        rc = x3_json_add(module, "mcg_multiplier", cJSON_CreateNumber((double)X3_MCG_MULTIPLIER), err);
out:
    return rc;
}

/* A tensor with its module: the name up to the last dot. */
struct stored {
    const x3_pack_tensor *tensor;
    size_t module_bytes;
    const x3_planned_group *group; /* where the tensor is the group's trellis */
};

static int compare_modules(const struct stored *x, const struct stored *y)
{
    int order = memcmp(x->tensor->out.name, y->tensor->out.name, x3_min_size(x->module_bytes, y->module_bytes));

    return order != 0 ? order : (x->module_bytes > y->module_bytes) - (x->module_bytes < y->module_bytes);
}

static int compare_stored(const void *a, const void *b)
{
    const struct stored *x = a, *y = b;
    int order = compare_modules(x, y);

    return order != 0 ? order : strcmp(x->tensor->out.name, y->tensor->out.name);
}

static x3_status sort_by_module(const x3_pack_plan *p, struct stored **out, x3_err *err)
{
    x3_status rc = x3_alloc(out, p->n_tensors, sizeof **out, err);

    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < p->n_tensors; i++) {
        const char *name = p->tensors[i].out.name, *dot = strrchr(name, '.');
        (*out)[i].tensor = &p->tensors[i];
        (*out)[i].module_bytes = dot == NULL ? strlen(name) : (size_t)(dot - name);
    }
    for (size_t i = 0; i < p->n_groups; i++)
        if (p->groups[i].trellis != ABSENT)
            (*out)[p->groups[i].trellis].group = &p->groups[i];
    qsort(*out, p->n_tensors, sizeof **out, compare_stored);
    return X3_OK;
}

static x3_status add_storage(cJSON *storage, const x3_pack_plan *p, x3_err *err)
{
    struct stored *list = NULL;
    cJSON *module = NULL, *stored = NULL;
    char *name = NULL;
    x3_status rc;

    X3_TRY(rc, out, sort_by_module(p, &list, err));
    for (size_t i = 0; i < p->n_tensors; i++) {
        if (i == 0 || compare_modules(&list[i - 1], &list[i]) != 0) {
            free(name);
            X3_TRY(rc, out, x3_strndup(&name, list[i].tensor->out.name, list[i].module_bytes, err));
            X3_TRY(rc, out, x3_json_add(storage, name, module = cJSON_CreateObject(), err));
            X3_TRY(rc, out, x3_json_add(module, "stored_tensors", stored = cJSON_CreateObject(), err));
        }
        X3_TRY(rc, out, add_stored(stored, list[i].tensor, err));
        if (list[i].group != NULL)
            X3_TRY(rc, out, add_group_facts(module, p, list[i].group, err));
    }
out:
    free(name);
    free(list);
    return rc;
}

x3_status x3_pack_quantization_config(cJSON **out, const x3_pack_plan *p, const x3_pack_json *info, x3_err *err)
{
    cJSON *q = cJSON_CreateObject(), *storage = cJSON_CreateObject();
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, add_quantization(q, p, info, err));
    X3_TRY(rc, out, x3_json_add(q, "tensor_storage", storage, err));
    X3_TRY(rc, out, add_storage(storage, p, err));
    *out = q;
    q = NULL;
out:
    cJSON_Delete(q);
    return rc;
}

/* ---- side files ---- */

static bool starts_with(const char *s, const char *prefix)
{
    return strncmp(s, prefix, strlen(prefix)) == 0;
}

static bool ends_with(const char *s, const char *suffix)
{
    size_t n = strlen(s), m = strlen(suffix);

    return n >= m && strcmp(s + n - m, suffix) == 0;
}

/* Second copies of the weights, and what the pack writes itself. */
static bool is_weights(const char *name)
{
    return ends_with(name, ".safetensors") || ends_with(name, ".safetensors.index.json") || ends_with(name, ".gguf") ||
           starts_with(name, "pytorch_model") || starts_with(name, "consolidated") || starts_with(name, "tf_model") ||
           starts_with(name, "flax_model") || ends_with(name, ".pth") || ends_with(name, ".onnx");
}

static bool is_ours(const char *path)
{
    return strcmp(path, "config.json") == 0 || strcmp(path, "quantization_config.json") == 0 ||
           strcmp(path, "exl3_receipt.json") == 0;
}

static x3_status add_name(x3_names *names, const char *path, x3_err *err)
{
    x3_status rc = x3_grow(&names->items, &names->capacity, names->n_items + 1, sizeof *names->items, err);

    if (rc == X3_OK)
        rc = x3_strdup(&names->items[names->n_items], path, err);
    if (rc == X3_OK)
        names->n_items++;
    return rc;
}

static x3_status walk(const char *root, const char *below, x3_names *copied, x3_names *left, int depth, x3_err *err)
{
    char *dir = NULL, *path = NULL, *full = NULL;
    x3_names names = {0};
    x3_status rc;

    X3_TRY(rc, out, below[0] == '\0' ? x3_strdup(&dir, root, err) : x3_path_join(&dir, root, below, err));
    X3_TRY(rc, out, x3_list_dir(&names, dir, err));
    for (size_t i = 0; i < names.n_items; i++) {
        const char *name = names.items[i];
        free(path);
        free(full);
        full = NULL;
        path = NULL;
        X3_TRY(rc, out, x3_asprintf(&path, err, "%s%s%s", below, below[0] == '\0' ? "" : "/", name));
        X3_TRY(rc, out, x3_path_join(&full, root, path, err));
        if (x3_path_is_dir(full)) {
            if (name[0] == '.' || depth >= 8)
                X3_TRY(rc, out, add_name(left, path, err));
            else
                X3_TRY(rc, out, walk(root, path, copied, left, depth + 1, err));
        } else if (is_weights(name)) {
            X3_TRY(rc, out, add_name(left, path, err));
        } else if (!is_ours(path)) {
            X3_TRY(rc, out, add_name(copied, path, err));
        }
    }
out:
    free(dir);
    free(path);
    free(full);
    x3_names_free(&names);
    return rc;
}

x3_status x3_pack_side_files(const char *source_dir, x3_names *copied, x3_names *left, x3_err *err)
{
    *copied = *left = (x3_names){0};
    x3_status rc = walk(source_dir, "", copied, left, 0, err);

    if (rc != X3_OK) {
        x3_names_free(copied);
        x3_names_free(left);
    }
    return rc;
}
