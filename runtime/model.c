/* Families are rows of a table; the functions below turn a row and a config into descriptors. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/model_internal.h"

static const x3_family families[] = {
    {"llama", X3_BIAS_CONFIG, X3_BIAS_CONFIG, X3_BIAS_CONFIG, X3_NORM_NEVER, X3_WINDOW_NEVER, false, NULL},
    {"mistral", X3_BIAS_NEVER, X3_BIAS_NEVER, X3_BIAS_NEVER, X3_NORM_NEVER, X3_WINDOW_ALL_LAYERS, false, NULL},
    {"qwen2", X3_BIAS_ALWAYS, X3_BIAS_NEVER, X3_BIAS_NEVER, X3_NORM_NEVER, X3_WINDOW_LAYER_TYPES, false, NULL},
    {"qwen3", X3_BIAS_CONFIG, X3_BIAS_CONFIG, X3_BIAS_NEVER, X3_NORM_ALWAYS, X3_WINDOW_LAYER_TYPES, false, NULL},
    {"qwen3_moe", X3_BIAS_CONFIG, X3_BIAS_CONFIG, X3_BIAS_NEVER, X3_NORM_ALWAYS, X3_WINDOW_OPTION, false, &x3_moe_qwen3},
    {"glm4_moe", X3_BIAS_CONFIG, X3_BIAS_NEVER, X3_BIAS_NEVER, X3_NORM_CONFIG, X3_WINDOW_NEVER, true, &x3_moe_glm4},
    {"mixtral", X3_BIAS_NEVER, X3_BIAS_NEVER, X3_BIAS_NEVER, X3_NORM_NEVER, X3_WINDOW_ALL_LAYERS, false, &x3_moe_mixtral},
};

#define N_FAMILIES (sizeof families / sizeof families[0])

const char *x3_model_types(void)
{
    return "llama, mistral, qwen2, qwen3, qwen3_moe, glm4_moe, mixtral";
}

/* Options that this version reads, for any family. */
static const char *const read_keys[] = {
    "hidden_act", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "max_position_embeddings", "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters",
    "partial_rotary_factor", "original_max_position_embeddings", "tie_word_embeddings", "vocab_size", "attention_bias",
    "mlp_bias", "sliding_window", "use_sliding_window", "max_window_layers", "layer_types", "model_type",
    "architectures", "eos_token_id", "text_config", "quantization_config"};

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
    "router_jitter_noise"};

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

/* An option that nobody here has heard of may change the mathematics: it is refused by name. */
static x3_status reject_unknown_options(const x3_hf_config *c, const x3_family *f, const char *const *ignored, x3_err *err)
{
    for (const cJSON *o = c->text->child; o != NULL; o = o->next) {
        bool skip = false;
        for (size_t i = 0; ignored != NULL && ignored[i] != NULL; i++)
            skip = skip || strcmp(o->string, ignored[i]) == 0;
        for (size_t i = 0; f->moe != NULL && f->moe->keys[i] != NULL; i++)
            skip = skip || strcmp(o->string, f->moe->keys[i]) == 0;
        if (skip || is_neutral(o) || is_listed(o->string, read_keys, sizeof read_keys / sizeof *read_keys) ||
            is_listed(o->string, harmless_keys, sizeof harmless_keys / sizeof *harmless_keys))
            continue;
        return x3_fail(err, X3_ERR_UNSUPPORTED,
                       "%s: option \"%s\" is not known for model_type \"%s\" and may change the mathematics "
                       "(--ignore-option %s if it does not)",
                       c->path, o->string, c->model_type, o->string);
    }
    return X3_OK;
}

#define LAYERS_MAX 10000

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
    X3_TRY(rc, out, x3_build_size(b, "num_hidden_layers", LAYERS_MAX, true, &m->n_layers));
    X3_TRY(rc, out, x3_build_size(b, "max_position_embeddings", X3_SIZE_OPTION_MAX, true, &m->max_positions));
    X3_TRY(rc, out, x3_build_size(b, "intermediate_size", X3_SIZE_OPTION_MAX, true, &b->n_inner));
    X3_TRY(rc, out, x3_build_size(b, "num_attention_heads", X3_SIZE_OPTION_MAX, true, &b->n_heads));
    b->n_kv_heads = b->n_heads;
    X3_TRY(rc, out, x3_build_size(b, "num_key_value_heads", X3_SIZE_OPTION_MAX, false, &b->n_kv_heads));
    if (b->n_heads % b->n_kv_heads != 0) {
        rc = x3_fail(b->err, X3_ERR_INPUT, "%s: num_attention_heads %zu is not a multiple of num_key_value_heads %zu",
                     b->c->path, b->n_heads, b->n_kv_heads);
        goto out;
    }
    X3_TRY(rc, out, x3_build_size(b, "head_dim", X3_SIZE_OPTION_MAX, false, &b->head_dim));
    if (b->head_dim == 0) {
        if (m->hidden % b->n_heads != 0) {
            rc = x3_fail(b->err, X3_ERR_INPUT, "%s: hidden_size %zu is not a multiple of num_attention_heads %zu",
                         b->c->path, m->hidden, b->n_heads);
            goto out;
        }
        b->head_dim = m->hidden / b->n_heads;
    }
    X3_TRY(rc, out, x3_json_number(b->text, "rms_norm_eps", true, &eps, b->c->path, b->err));
    m->norm_eps = (float)eps;
    X3_TRY(rc, out, x3_json_string(b->text, "hidden_act", true, &act, b->c->path, b->err));
    if (strcmp(act, "silu") != 0 && strcmp(act, "swish") != 0)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: hidden_act \"%s\" is not supported: silu", b->c->path, act);
out:
    return rc;
}

static x3_status read_options(x3_builder *b)
{
    bool use_window = b->f->window == X3_WINDOW_ALL_LAYERS, tied_here = false;
    int64_t n_draft = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_json_bool(b->text, "attention_bias", false, &b->attention_bias, b->c->path, b->err));
    X3_TRY(rc, out, x3_json_bool(b->text, "mlp_bias", false, &b->mlp_bias, b->c->path, b->err));
    X3_TRY(rc, out, x3_json_bool(b->text, "tie_word_embeddings", false, &tied_here, b->c->path, b->err));
    X3_TRY(rc, out, x3_json_bool(b->c->config, "tie_word_embeddings", false, &tied_here, b->c->path, b->err));
    b->m->tied = tied_here;
    X3_TRY(rc, out, x3_json_bool(b->text, "use_sliding_window", false, &use_window, b->c->path, b->err));
    X3_TRY(rc, out, x3_build_size(b, "sliding_window", X3_SIZE_OPTION_MAX, false, &b->window));
    if (b->f->qk_norm == X3_NORM_CONFIG)
        X3_TRY(rc, out, x3_json_bool(b->text, "use_qk_norm", false, &b->use_qk_norm, b->c->path, b->err));
    X3_TRY(rc, out, x3_json_int(b->text, "num_nextn_predict_layers", 0, LAYERS_MAX, false, &n_draft, b->c->path, b->err));
    b->m->n_draft_layers = (size_t)n_draft;
    b->max_window_layers = 0;
    X3_TRY(rc, out, x3_json_int(b->text, "max_window_layers", 0, 1 << 30, false, &b->max_window_layers, b->c->path,
                                b->err));
    if (!use_window)
        b->window = 0;
    if (b->window != 0 && b->f->window == X3_WINDOW_NEVER)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: sliding_window %zu is not known for model_type \"%s\"", b->c->path,
                     b->window, b->f->model_type);
    if (b->attention_bias && b->f->qkv_bias == X3_BIAS_NEVER)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: attention_bias is not known for model_type \"%s\"", b->c->path,
                     b->f->model_type);
    if (b->mlp_bias && b->f->mlp_bias == X3_BIAS_NEVER)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: mlp_bias is not known for model_type \"%s\"", b->c->path,
                     b->f->model_type);
out:
    return rc;
}

/* Window of one layer: layer_types where the config has it, else the older max_window_layers rule. */
static x3_status layer_window(x3_builder *b, size_t layer, size_t *window)
{
    const cJSON *types = x3_json_get(b->text, "layer_types"), *type;

    *window = b->window;
    if (types != NULL) {
        if (!cJSON_IsArray(types) || (size_t)cJSON_GetArraySize(types) != b->m->n_layers)
            return x3_fail(b->err, X3_ERR_INPUT, "%s: layer_types has %d entries, num_hidden_layers is %zu", b->c->path,
                           cJSON_GetArraySize(types), b->m->n_layers);
        type = cJSON_GetArrayItem(types, (int)layer);
        if (cJSON_IsString(type) && strcmp(type->valuestring, "full_attention") == 0) {
            *window = 0;
        } else if (!cJSON_IsString(type) || strcmp(type->valuestring, "sliding_attention") != 0 ||
                   b->f->window == X3_WINDOW_NEVER) {
            return x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: layer_types[%zu] \"%s\" is not known for model_type \"%s\"",
                           b->c->path, layer, cJSON_IsString(type) ? type->valuestring : "?", b->f->model_type);
        } else if (b->window == 0) {
            return x3_fail(b->err, X3_ERR_INPUT, "%s: layer_types[%zu] is sliding_attention without a sliding_window",
                           b->c->path, layer);
        }
    } else if (b->f->window == X3_WINDOW_LAYER_TYPES && (int64_t)layer < b->max_window_layers) {
        *window = 0;
    }
    return X3_OK;
}

/* ---- descriptors of one layer ---- */

x3_status x3_build_linear(x3_builder *b, x3_layer_desc *l, const char *part, size_t n_in, size_t n_out, bool bias, int input,
                          int tie, int tie_fused, int *index)
{
    x3_linear_desc *d = &l->linears[l->n_linears];
    char *name;
    x3_status rc = x3_arena_printf(&b->m->arena, &name, b->err, "%s.%s", l->prefix, part);

    if (rc != X3_OK)
        return rc;
    *d = (x3_linear_desc){.name = name, .n_in = n_in, .n_out = n_out, .has_bias = bias, .quantized = true,
                          .input = input, .tie = tie, .tie_fused = tie_fused};
    *index = (int)l->n_linears++;
    l->n_inputs = x3_max_size(l->n_inputs, (size_t)input + 1);
    return X3_OK;
}

x3_status x3_build_vector(x3_builder *b, x3_layer_desc *l, const char *tensor, size_t n, int *index)
{
    char *name;
    x3_status rc = x3_arena_printf(&b->m->arena, &name, b->err, "%s.%s", l->prefix, tensor);

    if (rc != X3_OK)
        return rc;
    l->vectors[l->n_vectors] = (x3_vector_desc){.name = name, .n = n};
    *index = (int)l->n_vectors++;
    return X3_OK;
}

static bool has_bias(x3_bias_rule rule, bool config)
{
    return rule == X3_BIAS_ALWAYS || (rule == X3_BIAS_CONFIG && config);
}

static x3_status build_gqa(x3_builder *b, x3_layer_desc *l, size_t layer)
{
    x3_gqa_desc *g = &l->gqa;
    const size_t h = b->m->hidden, q = b->n_heads * b->head_dim, kv = b->n_kv_heads * b->head_dim;
    const bool bias = has_bias(b->f->qkv_bias, b->attention_bias);
    x3_status rc;

    *g = (x3_gqa_desc){.n_heads = b->n_heads, .n_kv_heads = b->n_kv_heads, .head_dim = b->head_dim, .q_norm = -1,
                       .k_norm = -1, .rope = 0, .scale = (float)(1 / sqrt((double)b->head_dim))};
    X3_TRY(rc, out, layer_window(b, layer, &g->window));
    X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.q_proj", h, q, bias, 0, 0, 0, &g->q));
    X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.k_proj", h, kv, bias, 0, 1, 0, &g->k));
    X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.v_proj", h, kv, bias, 0, 1, 0, &g->v));
    X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.o_proj", q, h, has_bias(b->f->o_bias, b->attention_bias), 1, 2, 2,
                                    &g->o));
    if (b->f->qk_norm == X3_NORM_ALWAYS || (b->f->qk_norm == X3_NORM_CONFIG && b->use_qk_norm)) {
        X3_TRY(rc, out, x3_build_vector(b, l, "self_attn.q_norm.weight", b->head_dim, &g->q_norm));
        X3_TRY(rc, out, x3_build_vector(b, l, "self_attn.k_norm.weight", b->head_dim, &g->k_norm));
    }
out:
    return rc;
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

/* Input and tie numbers of attention end before these. */
#define FFN_INPUT 2
#define FFN_TIE 3
#define MIXER_LINEARS 4
#define MLP_LINEARS 3
#define LAYER_VECTORS 5

static x3_status build_layer(x3_builder *b, size_t layer)
{
    x3_layer_desc *l = &b->m->layers[layer];
    const bool moe = x3_build_is_moe(b, layer);
    const size_t n_linears = MIXER_LINEARS + (moe ? x3_build_moe_linears(b) : MLP_LINEARS);
    char *prefix;
    x3_status rc;

    X3_TRY(rc, out, x3_arena_printf(&b->m->arena, &prefix, b->err, "model.layers.%zu", layer));
    l->prefix = prefix;
    X3_TRY(rc, out, x3_arena_alloc(&b->m->arena, &l->linears, n_linears, sizeof *l->linears, b->err));
    X3_TRY(rc, out, x3_arena_alloc(&b->m->arena, &l->vectors, LAYER_VECTORS, sizeof *l->vectors, b->err));
    X3_TRY(rc, out, x3_build_vector(b, l, "input_layernorm.weight", b->m->hidden, &l->mixer_norm));
    X3_TRY(rc, out, build_gqa(b, l, layer));
    X3_TRY(rc, out, x3_build_vector(b, l, "post_attention_layernorm.weight", b->m->hidden, &l->ffn_norm));
    l->ffn = moe ? X3_FFN_MOE : X3_FFN_MLP;
    if (moe)
        rc = x3_build_moe(b, l, FFN_INPUT, FFN_TIE);
    else
        rc = x3_build_mlp(b, l, "mlp", b->n_inner, has_bias(b->f->mlp_bias, b->mlp_bias), FFN_INPUT, FFN_TIE, &l->mlp);
out:
    return rc;
}

static x3_status build(x3_builder *b)
{
    x3_model *m = b->m;
    x3_status rc;

    m->model_type = b->f->model_type;
    X3_TRY(rc, out, read_sizes(b));
    X3_TRY(rc, out, read_options(b));
    if (b->f->moe != NULL)
        X3_TRY(rc, out, x3_build_moe_options(b));
    X3_TRY(rc, out, x3_arena_alloc(&m->arena, &m->ropes, 1, sizeof *m->ropes, b->err));
    X3_TRY(rc, out, x3_rope_read(&m->ropes[0], b->text, NULL, b->head_dim, 1, b->c->path, b->err));
    m->n_ropes = 1;
    if (m->ropes[0].n_rotated != b->head_dim && !b->f->partial_rope) {
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: rope over %zu of %zu dimensions is not known for model_type \"%s\"",
                     b->c->path, m->ropes[0].n_rotated, b->head_dim, b->f->model_type);
        goto out;
    }
    X3_TRY(rc, out, x3_arena_alloc(&m->arena, &m->layers, m->n_layers, sizeof *m->layers, b->err));
    for (size_t i = 0; i < m->n_layers; i++)
        X3_TRY(rc, out, build_layer(b, i));
    m->embed_name = "model.embed_tokens.weight";
    m->final_norm = (x3_vector_desc){.name = "model.norm.weight", .n = m->hidden};
    m->head = (x3_linear_desc){.name = "lm_head", .n_in = m->hidden, .n_out = m->vocab, .quantized = true};
out:
    return rc;
}

x3_status x3_model_create(x3_model **out, const x3_hf_config *config, const char *const *ignored, x3_err *err)
{
    x3_builder b = {.c = config, .text = config->text, .err = err};
    x3_status rc;

    *out = NULL;
    for (size_t i = 0; i < N_FAMILIES; i++)
        if (strcmp(config->model_type, families[i].model_type) == 0)
            b.f = &families[i];
    if (b.f == NULL)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: model_type \"%s\" is not known to this version: %s", config->path,
                       config->model_type, x3_model_types());
    X3_TRY(rc, out, reject_unknown_options(config, b.f, ignored, err));
    X3_TRY(rc, out, x3_alloc(&b.m, 1, sizeof *b.m, err));
    X3_TRY(rc, out, build(&b));
    *out = b.m;
    b.m = NULL;
out:
    x3_model_free(b.m);
    return rc;
}

void x3_model_free(x3_model *m)
{
    if (m == NULL)
        return;
    x3_arena_free(&m->arena);
    free(m);
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
