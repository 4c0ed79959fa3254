#include "runtime/checkpoint.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"

#define NAME_MAX_BYTES 512

static const x3_tensor *find(const x3_checkpoint *c, const char *name, const char *suffix)
{
    char full[NAME_MAX_BYTES];

    if (snprintf(full, sizeof full, "%s%s", name, suffix) >= (int)sizeof full)
        return NULL;
    return x3_safetensors_find(c->st, full);
}

static const x3_tensor *stack_of(const x3_checkpoint *c, const x3_linear_desc *linear)
{
    return linear->stack == NULL ? NULL : x3_safetensors_find(c->st, linear->stack->tensor);
}

const x3_tensor *x3_checkpoint_weight(const x3_checkpoint *c, const x3_linear_desc *linear)
{
    const x3_tensor *own;

    if (linear == &c->model->head && c->model->tied)
        return x3_safetensors_find(c->st, c->model->embed_name);
    own = find(c, linear->name, ".weight");
    return own != NULL ? own : stack_of(c, linear);
}

bool x3_checkpoint_place(const x3_checkpoint *c, const x3_linear_desc *linear, x3_weight_place *place)
{
    const x3_stack_desc *s = linear->stack;
    const x3_tensor *t = x3_checkpoint_weight(c, linear);
    uint64_t matrix;

    *place = (x3_weight_place){.tensor = t, .whole = true, .out_stride = linear->n_in, .in_stride = 1};
    if (t == NULL || s == NULL || t != stack_of(c, linear))
        return t != NULL;
    matrix = (uint64_t)s->index * s->n_outputs * linear->n_in;
    place->whole = false;
    if (s->order == X3_STACK_OUT_IN || (s->order == X3_STACK_EITHER && t->shape[1] == s->n_outputs)) {
        place->first = matrix + (uint64_t)s->first * linear->n_in;
        place->out_stride = (uint64_t)s->step * linear->n_in;
    } else {
        place->first = matrix + s->first;
        place->out_stride = s->step;
        place->in_stride = s->n_outputs;
    }
    return true;
}

const x3_tensor *x3_checkpoint_bias(const x3_checkpoint *c, const x3_linear_desc *linear)
{
    return linear->has_bias ? find(c, linear->name, ".bias") : NULL;
}

const x3_tensor *x3_checkpoint_scale(const x3_checkpoint *c, const x3_tensor *weight)
{
    const x3_tensor *t = find(c, weight->name, "_scale_inv");

    return t != NULL ? t : find(c, weight->name, "_scale");
}

static void set_role(x3_checkpoint *c, const x3_tensor *t, x3_tensor_role role, const char *reason)
{
    if (t == NULL)
        return;
    c->roles[t - c->st->tensors] = role;
    c->reasons[t - c->st->tensors] = reason;
}

static const char *file_of(const x3_checkpoint *c, const x3_tensor *t)
{
    return c->st->shards[t->shard].file;
}

/* A tensor of floats with this shape ([n] when columns is 0). */
static void expect(x3_checkpoint *c, const char *name, const x3_tensor *t, size_t rows, size_t columns, x3_findings *f)
{
    char shape[128];

    if (t == NULL) {
        x3_findings_add(f, "%s: tensor %s is missing", c->dir, name);
        return;
    }
    if (!(columns == 0 ? t->rank == 1 && t->shape[0] == rows
                       : t->rank == 2 && t->shape[0] == rows && t->shape[1] == columns)) {
        if (columns == 0)
            x3_findings_add(f, "%s: %s has shape %s, the config says [%zu]", file_of(c, t), t->name,
                            x3_tensor_shape_text(t, shape), rows);
        else
            x3_findings_add(f, "%s: %s has shape %s, the config says [%zu, %zu]", file_of(c, t), t->name,
                            x3_tensor_shape_text(t, shape), rows, columns);
    }
    if (t->dtype != X3_BF16 && t->dtype != X3_F16 && t->dtype != X3_F32 && t->dtype != X3_F8_E4M3)
        x3_findings_add(f, "%s: %s has type %s, expected BF16, F16, F32 or F8_E4M3", file_of(c, t), t->name,
                        x3_dtype_name(t->dtype));
}

/* FP8 weights need their scales: one for all, one a row, or one a block. */
static void account_scale(x3_checkpoint *c, const x3_tensor *weight, bool quantized, x3_findings *f)
{
    const x3_tensor *scale, *input;
    char shape[128];

    if (weight == NULL || weight->dtype != X3_F8_E4M3)
        return;
    scale = x3_checkpoint_scale(c, weight);
    if (scale == NULL) {
        x3_findings_add(f, "%s: %s is F8_E4M3 and has no %s_scale_inv or %s_scale", file_of(c, weight), weight->name,
                        weight->name, weight->name);
        return;
    }
    bool is_float = scale->dtype == X3_F32 || scale->dtype == X3_BF16 || scale->dtype == X3_F16;
    bool blocks = scale->rank == 2 && scale->shape[0] > 0 && scale->shape[1] > 0 && scale->shape[0] <= weight->shape[0] &&
                  scale->shape[1] <= weight->shape[1];
    if (!is_float || !(scale->n_elements == 1 || scale->n_elements == weight->shape[0] || blocks))
        x3_findings_add(f, "%s: %s is %s %s, which does not fit its weight", file_of(c, scale), scale->name,
                        x3_dtype_name(scale->dtype), x3_tensor_shape_text(scale, shape));
    input = find(c, weight->name, "_input_scale");
    if (quantized) {
        set_role(c, scale, X3_ROLE_DROPPED, "scale of an FP8 weight, applied");
        set_role(c, input, X3_ROLE_DROPPED, "activation scale of an FP8 weight");
    } else { /* the weight stays FP8, so it needs its scale */
        set_role(c, scale, X3_ROLE_KEPT, NULL);
        set_role(c, input, X3_ROLE_KEPT, NULL);
    }
}

static bool is_stack_shape(const x3_tensor *t, const x3_stack_desc *s, size_t n_in, bool out_in)
{
    return t->rank == 3 && t->shape[0] == s->n_stack && t->shape[1] == (out_in ? s->n_outputs : n_in) &&
           t->shape[2] == (out_in ? n_in : s->n_outputs);
}

/* The tensor of all experts that linear d is a part of. It is looked at once, for the first part of its first matrix;
 * the others only refuse a weight of their own beside it. */
static void account_stack(x3_checkpoint *c, const x3_linear_desc *d, const x3_tensor *t, x3_findings *f)
{
    const x3_stack_desc *s = d->stack;
    const x3_tensor *own = find(c, d->name, ".weight");
    const bool either = s->order == X3_STACK_EITHER;
    char shape[128];

    if (own != NULL)
        x3_findings_add(f, "%s: %s is there, and so is %s, which has it too", file_of(c, own), own->name, t->name);
    if (s->index != 0 || s->first != 0)
        return;
    set_role(c, t, X3_ROLE_WEIGHT, NULL);
    if (t->dtype != X3_BF16 && t->dtype != X3_F16 && t->dtype != X3_F32)
        x3_findings_add(f, "%s: %s has type %s, a tensor of all experts must be BF16, F16 or F32", file_of(c, t), t->name,
                        x3_dtype_name(t->dtype));
    if (!((either || s->order == X3_STACK_OUT_IN) && is_stack_shape(t, s, d->n_in, true)) &&
        !((either || s->order == X3_STACK_IN_OUT) && is_stack_shape(t, s, d->n_in, false)))
        x3_findings_add(f, "%s: %s has shape %s, the config says %zu experts of %zu outputs and %zu inputs", file_of(c, t),
                        t->name, x3_tensor_shape_text(t, shape), s->n_stack, s->n_outputs, d->n_in);
    else if (either && s->n_outputs == d->n_in)
        x3_findings_add(f, "%s: %s has shape %s: a square matrix does not tell which side is the outputs, and neither does "
                           "model_type \"%s\"; store one tensor per expert",
                        file_of(c, t), t->name, x3_tensor_shape_text(t, shape), c->model->model_type);
}

static x3_status account_linear(x3_checkpoint *c, const x3_linear_desc *d, x3_findings *f, x3_err *err)
{
    const x3_tensor *weight = x3_checkpoint_weight(c, d), *bias = find(c, d->name, ".bias");
    const bool tied = d == &c->model->head && c->model->tied;
    x3_group g;
    bool found = false;
    x3_status rc = X3_OK;

    if (c->is_pack) {
        X3_TRY(rc, out, x3_group_find(c->st, d->name, &g, &found, f, err));
        if (found) {
            const x3_tensor *parts[] = {g.trellis, g.suh, g.svh, g.su, g.sv, g.marker, g.bias};
            for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++)
                set_role(c, parts[i], X3_ROLE_GROUP, NULL);
            if (g.n_in != x3_round_up(d->n_in, 128) || g.n_out != x3_round_up(d->n_out, 128))
                x3_findings_add(f, "%s: %s is %zu x %zu (in x out), the config says %zu x %zu, padded %zu x %zu",
                                file_of(c, g.trellis), g.trellis->name, g.n_in, g.n_out, d->n_in, d->n_out,
                                x3_round_up(d->n_in, 128), x3_round_up(d->n_out, 128));
            if (!tied && weight != NULL)
                x3_findings_add(f, "%s: has a group and a plain weight too", d->name);
        }
    }
    if (!found && stack_of(c, d) != NULL) {
        account_stack(c, d, stack_of(c, d), f);
    } else if (!found) {
        char name[NAME_MAX_BYTES];
        snprintf(name, sizeof name, "%s.weight", d->name);
        if (weight == NULL && d == &c->model->head)
            x3_findings_add(f, "%s: tensor %s is missing, and the config does not say tie_word_embeddings", c->dir, name);
        else
            expect(c, tied ? c->model->embed_name : name, weight, d->n_out, d->n_in, f);
        account_scale(c, weight, d->quantized, f);
        if (!tied)
            set_role(c, weight, d->quantized ? X3_ROLE_WEIGHT : X3_ROLE_KEPT, NULL);
    }
    if (tied && !found)
        set_role(c, find(c, d->name, ".weight"), X3_ROLE_DROPPED, "the head is tied to the embedding");
    if (d->has_bias) {
        char name[NAME_MAX_BYTES];
        snprintf(name, sizeof name, "%s.bias", d->name);
        expect(c, name, bias, found && bias != NULL && bias->n_elements == g.n_out ? g.n_out : d->n_out, 0, f);
        set_role(c, bias, found ? X3_ROLE_GROUP : d->quantized ? X3_ROLE_BIAS : X3_ROLE_KEPT, NULL);
    } else if (found && bias != NULL) {
        x3_findings_add(f, "%s: the model has no bias here", bias->name);
    }
out:
    return rc;
}

/* Dimensions of 1 do not count: A_log is [heads] or [1, 1, heads, 1], a convolution [channels, 1, kernel]. */
static bool is_vector(const x3_tensor *t, const x3_vector_desc *v)
{
    const size_t want[] = {v->width == 0 ? v->n : v->n / v->width, v->width == 0 ? 1 : v->width};
    size_t at = 0;

    for (int i = 0; i < t->rank; i++) {
        if (t->shape[i] == 1)
            continue;
        while (at < 2 && want[at] == 1)
            at++;
        if (at == 2 || t->shape[i] != want[at++])
            return false;
    }
    return t->n_elements == v->n;
}

static void account_vector(x3_checkpoint *c, const x3_vector_desc *v, x3_findings *f)
{
    const x3_tensor *t = x3_safetensors_find(c->st, v->name);
    char shape[128];

    set_role(c, t, X3_ROLE_KEPT, NULL);
    if (t == NULL || t->dtype == X3_F8_E4M3 || (v->width == 0 && t->rank == 1)) {
        expect(c, v->name, t, v->n, 0, f);
        if (t != NULL && t->dtype == X3_F8_E4M3)
            x3_findings_add(f, "%s: %s: type F8_E4M3 is not supported here", file_of(c, t), t->name);
        return;
    }
    if (!is_vector(t, v))
        x3_findings_add(f, "%s: %s has shape %s, the config says [%zu, %zu] (dimensions of 1 aside)", file_of(c, t), t->name,
                        x3_tensor_shape_text(t, shape), v->width == 0 ? v->n : v->n / v->width,
                        v->width == 0 ? (size_t)1 : v->width);
    if (t->dtype != X3_BF16 && t->dtype != X3_F16 && t->dtype != X3_F32)
        x3_findings_add(f, "%s: %s has type %s, expected BF16, F16 or F32", file_of(c, t), t->name, x3_dtype_name(t->dtype));
}

/* Tensors that old conversions left behind and every loader recomputes. */
static const char *drop_reason(const char *name)
{
    static const char suffix[] = ".rotary_emb.inv_freq";
    size_t n = strlen(name), s = sizeof suffix - 1;

    return n > s && strcmp(name + n - s, suffix) == 0 ? "recomputed from the config" : NULL;
}

static x3_status account(x3_checkpoint *c, x3_findings *f, x3_err *err)
{
    const x3_model *m = c->model;
    const x3_tensor *embed = x3_safetensors_find(c->st, m->embed_name);
    x3_status rc = X3_OK;

    expect(c, m->embed_name, embed, m->vocab, m->hidden, f);
    if (embed != NULL && embed->dtype == X3_F8_E4M3)
        x3_findings_add(f, "%s: %s: an FP8 embedding is not supported", file_of(c, embed), embed->name);
    set_role(c, embed, X3_ROLE_KEPT, NULL);
    for (size_t i = 0; i < m->n_layers; i++) {
        for (size_t j = 0; j < m->layers[i].n_linears; j++)
            X3_TRY(rc, out, account_linear(c, &m->layers[i].linears[j], f, err));
        for (size_t j = 0; j < m->layers[i].n_vectors; j++)
            account_vector(c, &m->layers[i].vectors[j], f);
    }
    account_vector(c, &m->final_norm, f);
    X3_TRY(rc, out, account_linear(c, &m->head, f, err));
    set_role(c, embed, X3_ROLE_KEPT, NULL); /* a tied head has just claimed it */
    for (size_t i = 0; i < c->st->n_tensors; i++) {
        const x3_tensor *t = &c->st->tensors[i];
        if (c->roles[i] == X3_ROLE_NONE && drop_reason(t->name) != NULL)
            set_role(c, t, X3_ROLE_DROPPED, drop_reason(t->name));
        if (c->roles[i] == X3_ROLE_NONE && x3_model_carries(m, t->name) != NULL)
            set_role(c, t, X3_ROLE_KEPT, x3_model_carries(m, t->name));
        if (c->roles[i] == X3_ROLE_NONE)
            x3_findings_add(f, "%s: tensor %s is not part of a %s model with %zu layers", file_of(c, t), t->name,
                            m->model_type, m->n_layers);
    }
out:
    return rc;
}

static x3_status account_draft(x3_checkpoint *c, x3_findings *f, x3_err *err)
{
    const x3_draft_desc *draft = c->model->draft;
    const x3_layer_desc *l = &c->model->layers[c->model->n_layers];
    const x3_linear_desc *d;
    x3_status rc = X3_OK;

    for (size_t i = 0; (d = x3_model_draft_linear(c->model, i)) != NULL; i++)
        if (d != &draft->head || find(c, d->name, ".weight") != NULL || find(c, d->name, ".trellis") != NULL)
            X3_TRY(rc, out, account_linear(c, d, f, err));
    for (size_t i = 0; i < l->n_vectors; i++)
        account_vector(c, &l->vectors[i], f);
    account_vector(c, &draft->embed_norm, f);
    account_vector(c, &draft->hidden_norm, f);
    account_vector(c, &draft->out_norm, f);
    c->uses_draft = true;
out:
    return rc;
}

x3_status x3_checkpoint_use_draft(x3_checkpoint *c, x3_findings *findings, x3_err *err)
{
    x3_status rc;

    if (c->model->draft == NULL)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: the draft layers (MTP) of model_type \"%s\" cannot be quantized: %s", c->dir,
                       c->model->model_type, c->model->no_draft);
    rc = account_draft(c, findings, err);
    return rc == X3_OK ? x3_findings_status(findings, err) : rc;
}

/* A draft layer that is not whole does not keep a pack from being used. */
static x3_status try_draft(x3_checkpoint *c, x3_err *err)
{
    x3_findings f = {0};
    x3_tensor_role *roles = NULL;
    const char **reasons = NULL;
    const size_t n = c->st->n_tensors;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&roles, n, sizeof *roles, err));
    X3_TRY(rc, out, x3_alloc(&reasons, n, sizeof *reasons, err));
    memcpy(roles, c->roles, n * sizeof *roles);
    memcpy(reasons, c->reasons, n * sizeof *reasons);
    X3_TRY(rc, out, account_draft(c, &f, err));
    if (f.n_items + f.n_dropped == 0)
        goto out;
    memcpy(c->roles, roles, n * sizeof *roles);
    memcpy(c->reasons, reasons, n * sizeof *reasons);
    c->uses_draft = false;
    rc = x3_strdup(&c->draft_problem, f.n_items > 0 ? f.items[0] : "out of memory", err);
out:
    x3_findings_free(&f);
    free(roles);
    free(reasons);
    return rc;
}

static bool has_draft_groups(const x3_checkpoint *c)
{
    const x3_linear_desc *d;

    for (size_t i = 0; c->is_pack && (d = x3_model_draft_linear(c->model, i)) != NULL; i++)
        if (find(c, d->name, ".trellis") != NULL)
            return true;
    return false;
}

/* A source may be BF16 with no quantization_config, or FP8; a pack says exl3. */
static x3_status check_quantization(x3_checkpoint *c, x3_err *err)
{
    const cJSON *q = x3_hf_quantization(c->config), *method;

    if (q == NULL)
        return X3_OK;
    method = x3_json_get(q, "quant_method");
    if (!cJSON_IsString(method))
        return x3_fail(err, X3_ERR_INPUT, "%s: quantization_config has no quant_method", c->config->path);
    c->is_pack = strcmp(method->valuestring, "exl3") == 0;
    if (!c->is_pack && strcmp(method->valuestring, "fp8") != 0)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: a checkpoint with quant_method \"%s\" is not supported: BF16, F16, F32 "
                                                "or fp8; take the one it was made from",
                       c->config->path, method->valuestring);
    return X3_OK;
}

x3_status x3_checkpoint_open(x3_checkpoint **out, const char *dir, const char *const *ignored_options,
                             x3_findings *findings, x3_err *err)
{
    x3_checkpoint *c = NULL;
    x3_status rc;

    *out = NULL;
    if (!x3_path_is_dir(dir))
        return x3_fail(err, X3_ERR_INPUT, "%s: %s", dir, x3_path_exists(dir) ? "is not a folder" : "does not exist");
    X3_TRY(rc, out, x3_alloc(&c, 1, sizeof *c, err));
    X3_TRY(rc, out, x3_strdup(&c->dir, dir, err));
    X3_TRY(rc, out, x3_hf_config_load(&c->config, dir, err));
    X3_TRY(rc, out, check_quantization(c, err));
    X3_TRY(rc, out, x3_model_create(&c->model, c->config, ignored_options, err));
    X3_TRY(rc, out, x3_safetensors_open(&c->st, dir, findings, err));
    X3_TRY(rc, out, x3_alloc(&c->roles, c->st->n_tensors, sizeof *c->roles, err));
    X3_TRY(rc, out, x3_alloc(&c->hashes, c->st->n_tensors, sizeof *c->hashes, err));
    X3_TRY(rc, out, x3_alloc(&c->reasons, c->st->n_tensors, sizeof *c->reasons, err));
    X3_TRY(rc, out, account(c, findings, err));
    if (has_draft_groups(c))
        X3_TRY(rc, out, try_draft(c, err));
    X3_TRY(rc, out, x3_findings_status(findings, err));
    *out = c;
    c = NULL;
out:
    x3_checkpoint_close(c);
    return rc;
}

void x3_checkpoint_close(x3_checkpoint *c)
{
    if (c == NULL)
        return;
    x3_safetensors_close(c->st);
    x3_model_free(c->model);
    x3_hf_config_free(c->config);
    free(c->roles);
    free(c->reasons);
    free(c->draft_problem);
    free(c->hashes);
    free(c->dir);
    free(c);
}
