/* A row of families.c and a config become descriptors. */
#include "runtime/model_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Options that this version reads, for any family. */
static const char *const read_keys[] = {
    "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "original_max_position_embeddings", "tie_word_embeddings", "vocab_size", "attention_bias",
    "mlp_bias", "model_type", "architectures", "eos_token_id", "text_config", "quantization_config",
    "num_nextn_predict_layers"};

/* Options that cannot change logits. */
static const char *const harmless_keys[] = {
    "_name_or_path", "_attn_implementation", "_attn_implementation_autoset", "add_cross_attention", "attention_dropout",
    "auto_map", "bos_token_id", "pad_token_id", "unk_token_id", "sep_token_id", "cls_token_id", "dtype", "torch_dtype",
    "transformers_version", "use_cache", "initializer_range", "pretraining_tp", "hidden_dropout", "attn_pdrop",
    "resid_pdrop", "embd_pdrop", "output_attentions", "output_hidden_states", "return_dict", "id2label", "label2id",
    "problem_type", "task_specific_params", "tokenizer_class", "prefix", "finetuning_task", "is_decoder",
    "is_encoder_decoder", "cross_attention_hidden_size", "chunk_size_feed_forward", "tie_encoder_decoder",
    "torchscript", "pruned_heads", "gradient_checkpointing", "is_llama_config", "_flash_attn_2_enabled",
    "unsloth_version", "unsloth_fixed", "language", "license", "router_aux_loss_coef", "output_router_logits",
    "router_jitter_noise", "aux_loss_alpha", "seq_aux"};

static bool is_listed(const char *key, const char *const *list, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(key, list[i]) == 0)
            return true;
    return false;
}

static bool is_neutral(const cJSON *value)
{
    return cJSON_IsNull(value) || cJSON_IsFalse(value) || (cJSON_IsNumber(value) && value->valuedouble == 0) ||
           (cJSON_IsArray(value) && value->child == NULL);
}

static bool is_in(const char *const *list, const char *key)
{
    for (; list != NULL && *list != NULL; list++)
        if (strcmp(*list, key) == 0)
            return true;
    return false;
}

/* *known: the family has rows for this option. A value that none of them has is an error. */
static x3_status check_expected(const x3_hf_config *c, const x3_family *f, const cJSON *o, bool *known, x3_err *err)
{
    const x3_expected *e = f->expects;
    char *text;
    x3_status rc;

    *known = false;
    while (e != NULL && e->key != NULL && strcmp(e->key, o->string) != 0)
        e++;
    if (e == NULL || e->key == NULL || cJSON_IsNull(o))
        return X3_OK;
    *known = true;
    text = cJSON_PrintUnformatted(o);
    if (text == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory: %s", c->path);
    for (const x3_expected *same = e; same->key != NULL; same++)
        if (strcmp(same->key, o->string) == 0 && strcmp(same->value, text) == 0) {
            cJSON_free(text);
            return X3_OK;
        }
    rc = x3_fail(err, X3_ERR_UNSUPPORTED, "%s: option \"%s\" is %s, which is not known for model_type \"%s\": %s", c->path,
                 o->string, text, c->model_type, e->value);
    cJSON_free(text);
    return rc;
}

/* An option that nobody here has heard of may change the mathematics: it is refused by name. */
static x3_status reject_unknown_options(const x3_hf_config *c, const x3_family *f, const char *const *ignored,
                                        x3_err *err)
{
    for (const cJSON *o = c->text->child; o != NULL; o = o->next) {
        bool skip = false;
        for (size_t i = 0; ignored != NULL && ignored[i] != NULL; i++)
            skip = skip || strcmp(o->string, ignored[i]) == 0;
        if (!skip) {
            x3_status rc = check_expected(c, f, o, &skip, err);
            if (rc != X3_OK)
                return rc;
        }
        skip = skip || is_in(f->harmless, o->string) || (f->moe != NULL && is_in(f->moe->keys, o->string));
        if (skip || is_neutral(o) || x3_build_mixer_reads(f, o->string) || x3_build_draft_reads(f, o->string) ||
            is_listed(o->string, read_keys, sizeof read_keys / sizeof *read_keys) ||
            is_listed(o->string, harmless_keys, sizeof harmless_keys / sizeof *harmless_keys))
            continue;
        return x3_fail(err, X3_ERR_UNSUPPORTED,
                       "%s: option \"%s\" is not known for model_type \"%s\" and may change the mathematics "
                       "(--ignore-option %s if it does not)",
                       c->path, o->string, c->model_type, o->string);
    }
    return X3_OK;
}

x3_status x3_build_size(x3_builder *b, const char *key, int64_t max, bool required, size_t *out)
{
    int64_t v = (int64_t)*out;
    x3_status rc = x3_json_int(b->text, key, 1, max, required, &v, b->c->path, b->err);

    *out = (size_t)v;
    return rc;
}

static x3_status read_sizes(x3_builder *b)
{
    x3_model *m = b->m;
    const char *act = NULL;
    double eps = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_build_size(b, "hidden_size", X3_SIZE_OPTION_MAX, true, &m->hidden));
    X3_TRY(rc, out, x3_build_size(b, "vocab_size", X3_SIZE_OPTION_MAX, true, &m->vocab));
    X3_TRY(rc, out, x3_build_size(b, "num_hidden_layers", X3_LAYERS_MAX, true, &m->n_layers));
    X3_TRY(rc, out, x3_build_size(b, "max_position_embeddings", X3_SIZE_OPTION_MAX, true, &m->max_positions));
    X3_TRY(rc, out, x3_build_size(b, "intermediate_size", X3_SIZE_OPTION_MAX, b->f->moe == NULL, &b->n_inner));
    /* MiMo releases call it layernorm_epsilon */
    const bool other_name = x3_build_mixer_reads(b->f, "layernorm_epsilon") && x3_json_get(b->text, "rms_norm_eps") == NULL;
    X3_TRY(rc, out, x3_json_number(b->text, other_name ? "layernorm_epsilon" : "rms_norm_eps", true, &eps, b->c->path,
                                   b->err));
    m->norm_eps = (float)eps;
    X3_TRY(rc, out, x3_json_string(b->text, "hidden_act", true, &act, b->c->path, b->err));
    if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: hidden_act \"%s\" is not supported: silu", b->c->path, act);
out:
    return rc;
}

static x3_status read_options(x3_builder *b)
{
    bool tied_here = false;
    x3_status rc;

    X3_TRY(rc, out, x3_json_bool(b->text, "attention_bias", false, &b->attention_bias, b->c->path, b->err));
    X3_TRY(rc, out, x3_json_bool(b->text, "use_qk_norm", false, &b->use_qk_norm, b->c->path, b->err));
    X3_TRY(rc, out, x3_json_bool(b->text, "mlp_bias", false, &b->mlp_bias, b->c->path, b->err));
    X3_TRY(rc, out, x3_json_bool(b->text, "tie_word_embeddings", false, &tied_here, b->c->path, b->err));
    X3_TRY(rc, out, x3_json_bool(b->c->config, "tie_word_embeddings", false, &tied_here, b->c->path, b->err));
    b->m->tied = tied_here;
    if (b->f->qkv_bias == X3_BIAS_QKV) {
        b->attention_bias = true;
        X3_TRY(rc, out, x3_json_bool(b->text, "qkv_bias", false, &b->attention_bias, b->c->path, b->err));
    }
    if (b->attention_bias && b->f->qkv_bias == X3_BIAS_NEVER)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: attention_bias is not known for model_type \"%s\"", b->c->path,
                     b->f->model_type);
    if (b->mlp_bias && b->f->mlp_bias == X3_BIAS_NEVER)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: mlp_bias is not known for model_type \"%s\"", b->c->path,
                     b->f->model_type);
out:
    return rc;
}

/* ---- descriptors of one layer ---- */

static x3_status add_linear(x3_builder *b, x3_layer_desc *l, const char *part, x3_linear_desc desc, int *index)
{
    char *name;
    x3_status rc = x3_arena_printf(&b->m->arena, &name, b->err, "%s.%s", l->prefix, part);

    if (rc != X3_OK)
        return rc;
    desc.name = name;
    l->linears[l->n_linears] = desc;
    *index = (int)l->n_linears++;
    l->n_inputs = x3_max_size(l->n_inputs, (size_t)desc.input + 1);
    return X3_OK;
}

x3_status x3_build_linear(x3_builder *b, x3_layer_desc *l, const char *part, size_t n_in, size_t n_out, bool bias, int input,
                          int tie, int tie_fused, int *index)
{
    x3_linear_desc d = {.n_in = n_in, .n_out = n_out, .has_bias = bias, .quantized = true, .input = input, .tie = tie,
                        .tie_fused = tie_fused};

    return add_linear(b, l, part, d, index);
}

x3_status x3_build_kept_linear(x3_builder *b, x3_layer_desc *l, const char *part, size_t n_in, size_t n_out, bool bias,
                               int input, int *index)
{
    x3_linear_desc d = {.n_in = n_in, .n_out = n_out, .has_bias = bias, .input = input, .tie = -1, .tie_fused = -1};

    return add_linear(b, l, part, d, index);
}

static x3_status add_vector(x3_builder *b, x3_layer_desc *l, const char *tensor, x3_vector_desc desc, int *index)
{
    char *name;
    x3_status rc = x3_arena_printf(&b->m->arena, &name, b->err, "%s.%s", l->prefix, tensor);

    if (rc != X3_OK)
        return rc;
    desc.name = name;
    l->vectors[l->n_vectors] = desc;
    *index = (int)l->n_vectors++;
    return X3_OK;
}

x3_status x3_build_vector(x3_builder *b, x3_layer_desc *l, const char *tensor, size_t n, int *index)
{
    return add_vector(b, l, tensor, (x3_vector_desc){.n = n}, index);
}

x3_status x3_build_matrix(x3_builder *b, x3_layer_desc *l, const char *tensor, size_t n, size_t width, int *index)
{
    return add_vector(b, l, tensor, (x3_vector_desc){.n = n, .width = width}, index);
}

x3_status x3_build_norm(x3_builder *b, x3_layer_desc *l, const char *tensor, size_t n, int *index)
{
    return add_vector(b, l, tensor, (x3_vector_desc){.n = n, .add = b->f->centred_norms ? 1 : 0}, index);
}

x3_status x3_build_mlp(x3_builder *b, x3_layer_desc *l, const char *module, size_t n_inner, bool bias, int input, int tie,
                       x3_mlp_desc *d)
{
    const size_t hidden = b->m->hidden;
    char part[256];
    x3_status rc;

#define PART(name) (snprintf(part, sizeof part, "%s.%s", module, name), part)
    d->n_inner = n_inner;
    X3_TRY(rc, out, x3_build_linear(b, l, PART("gate_proj"), hidden, n_inner, bias, input, tie, tie, &d->gate));
    X3_TRY(rc, out, x3_build_linear(b, l, PART("up_proj"), hidden, n_inner, bias, input, tie, tie, &d->up));
    X3_TRY(rc, out, x3_build_linear(b, l, PART("down_proj"), n_inner, hidden, bias, input + 1, tie + 1, tie + 1, &d->down));
#undef PART
out:
    return rc;
}

#define MLP_LINEARS 3
#define OTHER_VECTORS 3 /* two norms, and the correction of a router */

x3_status x3_build_layer(x3_builder *b, x3_layer_desc *l, const char *prefix, size_t layer, bool moe, bool draft)
{
    const size_t n_linears = X3_MIXER_LINEARS + (moe ? x3_build_moe_linears(b) : MLP_LINEARS);
    const bool bias = x3_build_has_bias(b->f->mlp_bias, b->mlp_bias);
    x3_status rc;

    l->prefix = prefix;
    X3_TRY(rc, out, x3_arena_alloc(&b->m->arena, &l->linears, n_linears, sizeof *l->linears, b->err));
    X3_TRY(rc, out, x3_arena_alloc(&b->m->arena, &l->vectors, X3_MIXER_VECTORS + OTHER_VECTORS, sizeof *l->vectors, b->err));
    X3_TRY(rc, out, x3_build_norm(b, l, "input_layernorm.weight", b->m->hidden, &l->mixer_norm));
    X3_TRY(rc, out, draft ? x3_build_draft_mixer(b, l) : x3_build_mixer(b, l, layer));
    X3_TRY(rc, out, x3_build_norm(b, l, "post_attention_layernorm.weight", b->m->hidden, &l->ffn_norm));
    l->ffn = moe ? X3_FFN_MOE : X3_FFN_MLP;
    if (!moe && b->n_inner == 0)
        rc = x3_fail(b->err, X3_ERR_INPUT, "%s: layer %zu is dense, and \"intermediate_size\" is missing", b->c->path, layer);
    else if (moe)
        rc = x3_build_moe(b, l, (int)l->n_inputs, X3_MIXER_TIES);
    else
        rc = x3_build_mlp(b, l, "mlp", b->n_inner, bias, (int)l->n_inputs, X3_MIXER_TIES, &l->mlp);
out:
    return rc;
}

static x3_status build_layers(x3_builder *b)
{
    x3_model *m = b->m;
    x3_status rc;

    X3_TRY(rc, out, x3_arena_alloc(&m->arena, &m->layers, m->n_layers + 1, sizeof *m->layers, b->err));
    for (size_t i = 0; i < m->n_layers; i++) {
        char *prefix;
        X3_TRY(rc, out, x3_arena_printf(&m->arena, &prefix, b->err, "%s.layers.%zu", b->prefix, i));
        X3_TRY(rc, out, x3_build_layer(b, &m->layers[i], prefix, i, x3_build_is_moe(b, i), false));
    }
    rc = x3_build_draft(b);
out:
    return rc;
}

/* Prefixes of the family, and the draft layers that stand behind the others under their own layer numbers. */
static x3_status list_carried(x3_builder *b)
{
    x3_model *m = b->m;
    int64_t n_next = 0;
    size_t n = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_json_int(b->text, "num_nextn_predict_layers", 0, X3_LAYERS_MAX, false, &n_next, b->c->path,
                                b->err));
    while (b->f->carried != NULL && b->f->carried[n].prefix != NULL)
        n++;
    X3_TRY(rc, out, x3_arena_alloc(&m->arena, &m->carried, n + (size_t)n_next + 1, sizeof *m->carried, b->err));
    for (size_t i = 0; i < n; i++)
        m->carried[m->n_carried++] = b->f->carried[i];
    for (size_t i = 0; i < (size_t)n_next; i++) {
        char *prefix;
        X3_TRY(rc, out, x3_arena_printf(&m->arena, &prefix, b->err, "%s.layers.%zu.", b->prefix, m->n_layers + i));
        m->carried[m->n_carried++] = (x3_carried){prefix, "draft layers (MTP)"};
    }
out:
    return rc;
}

static x3_status build(x3_builder *b)
{
    x3_model *m = b->m;
    char *name;
    x3_status rc;

    m->model_type = b->f->model_type;
    b->prefix = b->text == b->c->config ? "model" : "model.language_model";
    X3_TRY(rc, out, read_sizes(b));
    X3_TRY(rc, out, read_options(b));
    X3_TRY(rc, out, x3_build_mixer_options(b));
    if (b->f->moe != NULL)
        X3_TRY(rc, out, x3_build_moe_options(b));
    X3_TRY(rc, out, build_layers(b));
    X3_TRY(rc, out, x3_arena_printf(&m->arena, &name, b->err, "%s.embed_tokens.weight", b->prefix));
    m->embed_name = name;
    X3_TRY(rc, out, x3_arena_printf(&m->arena, &name, b->err, "%s.norm.weight", b->prefix));
    m->final_norm = (x3_vector_desc){.name = name, .n = m->hidden, .add = b->f->centred_norms ? 1 : 0};
    m->head = (x3_linear_desc){.name = "lm_head", .n_in = m->hidden, .n_out = m->vocab, .quantized = true};
    rc = list_carried(b);
out:
    return rc;
}

x3_status x3_model_create(x3_model **out, const x3_hf_config *config, const char *const *ignored, x3_err *err)
{
    x3_builder b = {.c = config, .text = config->text, .err = err};
    x3_status rc;

    *out = NULL;
    for (size_t i = 0; i < x3_n_families; i++)
        if (strcmp(config->model_type, x3_families[i].model_type) == 0)
            b.f = &x3_families[i];
    if (b.f == NULL) {
        char types[512];
        x3_model_types(types, sizeof types);
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: model_type \"%s\" is not known to this version: %s", config->path,
                       config->model_type, types);
    }
    X3_TRY(rc, out, reject_unknown_options(config, b.f, ignored, err));
    X3_TRY(rc, out, x3_alloc(&b.m, 1, sizeof *b.m, err));
    X3_TRY(rc, out, build(&b));
    *out = b.m;
    b.m = NULL;
out:
    x3_model_free(b.m);
    return rc;
}

void x3_model_types(char *out, size_t size)
{
    size_t at = 0;

    out[0] = '\0';
    for (size_t i = 0; i < x3_n_families && at < size; i++)
        at += (size_t)snprintf(out + at, size - at, "%s%s", i == 0 ? "" : ", ", x3_families[i].model_type);
}

void x3_model_free(x3_model *m)
{
    if (m == NULL)
        return;
    x3_arena_free(&m->arena);
    free(m);
}

const char *x3_model_carries(const x3_model *m, const char *tensor)
{
    for (size_t i = 0; i < m->n_carried; i++)
        if (strncmp(tensor, m->carried[i].prefix, strlen(m->carried[i].prefix)) == 0)
            return m->carried[i].what;
    return NULL;
}

size_t x3_model_selected(const x3_model *m, size_t n_positions)
{
    return n_positions > m->shared_topk ? m->shared_topk : 0;
}

const x3_linear_desc *x3_model_linear(const x3_model *m, size_t index, size_t *layer)
{
    for (*layer = 0; *layer < m->n_layers; ++*layer) {
        if (index < m->layers[*layer].n_linears)
            return &m->layers[*layer].linears[index];
        index -= m->layers[*layer].n_linears;
    }
    return index == 0 ? &m->head : NULL;
}

const x3_linear_desc *x3_model_draft_linear(const x3_model *m, size_t index)
{
    const x3_layer_desc *l = &m->layers[m->n_layers];

    if (m->draft == NULL || index > l->n_linears + 1)
        return NULL;
    if (index == 0)
        return &m->draft->join;
    if (index <= l->n_linears)
        return &l->linears[index - 1];
    return m->draft->head.name != NULL ? &m->draft->head : NULL;
}
