/* Mixers: their options in a config, and the descriptors of one layer. */
#include <math.h>
#include <string.h>

#include "runtime/model_internal.h"

/* ---- keys ---- */

static const char *const gqa_keys[] = {"head_dim", "sliding_window", "use_sliding_window", "max_window_layers",
                                       "layer_types", NULL};
/* Of models with two kinds of GQA layers. hybrid_block_size and attention_chunk_size stand in releases and are read by
 * no implementation of them. */
static const char *const pattern_keys[] = {
    "hybrid_layer_pattern", "sliding_window_size", "v_head_dim", "swa_num_attention_heads", "swa_num_key_value_heads",
    "swa_head_dim", "swa_v_head_dim", "swa_rope_theta", "add_full_attention_sink_bias", "add_swa_attention_sink_bias",
    "attention_value_scale", "attention_projection_layout", "layernorm_epsilon", "hybrid_block_size",
    "attention_chunk_size", NULL};
static const char *const delta_keys[] = {
    "linear_conv_kernel_dim", "linear_key_head_dim", "linear_value_head_dim", "linear_num_key_heads",
    "linear_num_value_heads", "full_attention_interval", "attn_output_gate",
    "mamba_ssm_dtype" /* states are float32 here */, NULL};
/* head_dim and qk_head_dim follow from the others; releases disagree on what head_dim means. */
static const char *const mla_keys[] = {"q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim",
                                       "qk_head_dim", "head_dim", "rope_interleave", NULL};
static const char *const indexer_keys[] = {
    "index_n_heads", "index_head_dim", "index_topk", "indexer_types", "index_topk_pattern", "index_topk_freq",
    "index_skip_topk_offset", "indexer_rope_interleave", "layer_types",
    "index_share_for_mtp_iteration" /* of draft layers */, NULL};

static bool is_in(const char *const *list, const char *key)
{
    for (; *list != NULL; list++)
        if (strcmp(*list, key) == 0)
            return true;
    return false;
}

bool x3_build_mixer_reads(const x3_family *f, const char *key)
{
    return (f->attention == X3_ATTENTION_GQA && is_in(gqa_keys, key)) ||
           (f->qkv_bias == X3_BIAS_QKV && strcmp(key, "qkv_bias") == 0) ||
           (f->qk_norm == X3_NORM_CONFIG && strcmp(key, "use_qk_norm") == 0) ||
           (f->window == X3_WINDOW_PATTERN && is_in(pattern_keys, key)) ||
           (f->delta_net != X3_DELTA_NONE && is_in(delta_keys, key)) ||
           (f->attention == X3_ATTENTION_MLA && is_in(mla_keys, key)) ||
           (f->indexer != X3_INDEXER_NONE && is_in(indexer_keys, key));
}

/* ---- GQA options ---- */

static x3_status check_heads(x3_builder *b, const x3_gqa_sizes *s, const char *which)
{
    if (s->n_heads % s->n_kv_heads != 0)
        return x3_fail(b->err, X3_ERR_INPUT, "%s: %snum_attention_heads %zu is not a multiple of %snum_key_value_heads %zu",
                       b->c->path, which, s->n_heads, which, s->n_kv_heads);
    return X3_OK;
}

static x3_status read_heads(x3_builder *b)
{
    x3_gqa_sizes *s = &b->full;
    x3_status rc;

    X3_TRY(rc, out, x3_build_size(b, "num_attention_heads", X3_SIZE_OPTION_MAX, true, &s->n_heads));
    s->n_kv_heads = s->n_heads;
    X3_TRY(rc, out, x3_build_size(b, "num_key_value_heads", X3_SIZE_OPTION_MAX, false, &s->n_kv_heads));
    X3_TRY(rc, out, check_heads(b, s, ""));
    X3_TRY(rc, out, x3_build_size(b, "head_dim", X3_SIZE_OPTION_MAX, false, &s->head_dim));
    if (s->head_dim == 0) {
        if (b->m->hidden % s->n_heads != 0) {
            rc = x3_fail(b->err, X3_ERR_INPUT, "%s: hidden_size %zu is not a multiple of num_attention_heads %zu",
                         b->c->path, b->m->hidden, s->n_heads);
            goto out;
        }
        s->head_dim = b->m->hidden / s->n_heads;
    }
    s->v_dim = s->head_dim;
    b->windowed = *s;
out:
    return rc;
}

/* Families whose full and window layers differ. */
static x3_status read_pattern(x3_builder *b)
{
    x3_gqa_sizes *s = &b->windowed;
    const char *layout = "split";
    size_t before = 0;
    double scale = 0.707;
    x3_status rc;

    X3_TRY(rc, out, x3_build_size(b, "v_head_dim", X3_SIZE_OPTION_MAX, false, &b->full.v_dim));
    *s = b->full;
    s->n_kv_heads *= x3_max_size(1, b->f->window_kv_factor);
    s->sinks = b->f->window_sinks;
    X3_TRY(rc, out, x3_build_size(b, "swa_num_attention_heads", X3_SIZE_OPTION_MAX, false, &s->n_heads));
    X3_TRY(rc, out, x3_build_size(b, "swa_num_key_value_heads", X3_SIZE_OPTION_MAX, false, &s->n_kv_heads));
    X3_TRY(rc, out, x3_build_size(b, "swa_head_dim", X3_SIZE_OPTION_MAX, false, &s->head_dim));
    X3_TRY(rc, out, x3_build_size(b, "swa_v_head_dim", X3_SIZE_OPTION_MAX, false, &s->v_dim));
    X3_TRY(rc, out, x3_json_bool(b->text, "add_swa_attention_sink_bias", false, &s->sinks, b->c->path, b->err));
    X3_TRY(rc, out, x3_json_bool(b->text, "add_full_attention_sink_bias", false, &b->full.sinks, b->c->path, b->err));
    X3_TRY(rc, out, check_heads(b, s, "swa_"));
    /* as the reference implementation has it: so many positions before the query, and its own */
    X3_TRY(rc, out, x3_build_size(b, "sliding_window_size", X3_SIZE_OPTION_MAX, false, &before));
    if (before != 0)
        b->window = before + 1;
    if (b->f->value_scale) {
        const cJSON *given = cJSON_GetObjectItemCaseSensitive(b->text, "attention_value_scale");
        if (given != NULL && cJSON_IsNull(given))
            scale = 1;
        X3_TRY(rc, out, x3_json_number(b->text, "attention_value_scale", false, &scale, b->c->path, b->err));
        b->value_scale = (float)scale;
    }
    X3_TRY(rc, out, x3_json_string(b->text, "attention_projection_layout", false, &layout, b->c->path, b->err));
    if (strcmp(layout, "split") != 0)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED,
                     "%s: attention_projection_layout \"%s\" is not supported (its row order depends on how the release was "
                     "sharded): split",
                     b->c->path, layout);
out:
    return rc;
}

static x3_status read_window(x3_builder *b)
{
    bool use = b->f->window != X3_WINDOW_OPTION && b->f->window != X3_WINDOW_LAYER_TYPES;
    x3_status rc;

    X3_TRY(rc, out, x3_json_bool(b->text, "use_sliding_window", false, &use, b->c->path, b->err));
    X3_TRY(rc, out, x3_build_size(b, "sliding_window", X3_SIZE_OPTION_MAX, false, &b->window));
    b->max_window_layers = 0;
    X3_TRY(rc, out, x3_json_int(b->text, "max_window_layers", 0, X3_SIZE_OPTION_MAX, false, &b->max_window_layers,
                                b->c->path, b->err));
    if (!use)
        b->window = 0;
    if (b->window != 0 && b->f->window == X3_WINDOW_NEVER)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: sliding_window %zu is not known for model_type \"%s\"", b->c->path,
                     b->window, b->f->model_type);
    if (rc == X3_OK && b->f->window == X3_WINDOW_PATTERN)
        rc = read_pattern(b);
out:
    return rc;
}

/* ---- ropes ---- */

static x3_status read_rope(x3_builder *b, const char *layer_type, size_t head_dim, int *index)
{
    const double part = b->f->rotated_part == 0 ? 1 : b->f->rotated_part;
    x3_rope_desc *r = &b->m->ropes[b->m->n_ropes];
    x3_status rc = x3_rope_read(r, b->text, layer_type, head_dim, part, b->c->path, b->err);

    if (rc == X3_OK && !b->f->partial_rope && r->n_rotated != head_dim)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: rope over %zu of %zu dimensions is not known for model_type \"%s\"",
                     b->c->path, r->n_rotated, head_dim, b->f->model_type);
    if (rc == X3_OK)
        *index = (int)b->m->n_ropes++;
    return rc;
}

static x3_status read_gqa_ropes(x3_builder *b)
{
    double theta = 0;
    x3_status rc;

    X3_TRY(rc, out, read_rope(b, "full_attention", b->full.head_dim, &b->full.rope));
    b->windowed.rope = b->full.rope;
    if (b->f->window != X3_WINDOW_PATTERN)
        goto out;
    X3_TRY(rc, out, read_rope(b, "sliding_attention", b->windowed.head_dim, &b->windowed.rope));
    X3_TRY(rc, out, x3_json_number(b->text, "swa_rope_theta", false, &theta, b->c->path, b->err));
    if (theta < 0)
        rc = x3_fail(b->err, X3_ERR_INPUT, "%s: swa_rope_theta is %g", b->c->path, theta);
    else if (theta > 0)
        b->m->ropes[b->windowed.rope].theta = theta;
out:
    return rc;
}

/* ---- delta net and MLA options ---- */

static x3_status read_delta(x3_builder *b)
{
    x3_delta_net_desc *d = &b->delta;
    bool gated = b->f->gated_attention;
    x3_status rc;

    X3_TRY(rc, out, x3_build_size(b, "linear_num_key_heads", X3_SIZE_OPTION_MAX, true, &d->n_k_heads));
    X3_TRY(rc, out, x3_build_size(b, "linear_num_value_heads", X3_SIZE_OPTION_MAX, true, &d->n_v_heads));
    X3_TRY(rc, out, x3_build_size(b, "linear_key_head_dim", X3_SIZE_OPTION_MAX, true, &d->k_dim));
    X3_TRY(rc, out, x3_build_size(b, "linear_value_head_dim", X3_SIZE_OPTION_MAX, true, &d->v_dim));
    X3_TRY(rc, out, x3_build_size(b, "linear_conv_kernel_dim", X3_SIZE_OPTION_MAX, true, &d->kernel));
    X3_TRY(rc, out, x3_json_bool(b->text, "attn_output_gate", false, &gated, b->c->path, b->err));
    if (gated != b->f->gated_attention)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: attn_output_gate %s is not known for model_type \"%s\"", b->c->path,
                     gated ? "true" : "false", b->f->model_type);
    if (rc == X3_OK && d->n_v_heads % d->n_k_heads != 0)
        rc = x3_fail(b->err, X3_ERR_INPUT, "%s: linear_num_value_heads %zu is not a multiple of linear_num_key_heads %zu",
                     b->c->path, d->n_v_heads, d->n_k_heads);
out:
    return rc;
}

static x3_status read_mla(x3_builder *b)
{
    x3_mla_desc *d = &b->mla;
    x3_status rc;

    d->interleaved = true;
    d->latent_eps = 1e-6f; /* whatever rms_norm_eps says: the released models and transformers agree on this */
    X3_TRY(rc, out, x3_build_size(b, "num_attention_heads", X3_SIZE_OPTION_MAX, true, &d->n_heads));
    X3_TRY(rc, out, x3_build_size(b, "q_lora_rank", X3_SIZE_OPTION_MAX, false, &d->q_rank));
    X3_TRY(rc, out, x3_build_size(b, "kv_lora_rank", X3_SIZE_OPTION_MAX, true, &d->kv_rank));
    X3_TRY(rc, out, x3_build_size(b, "qk_nope_head_dim", X3_SIZE_OPTION_MAX, true, &d->nope_dim));
    X3_TRY(rc, out, x3_build_size(b, "qk_rope_head_dim", X3_SIZE_OPTION_MAX, true, &d->rope_dim));
    X3_TRY(rc, out, x3_build_size(b, "v_head_dim", X3_SIZE_OPTION_MAX, true, &d->v_dim));
    X3_TRY(rc, out, x3_json_bool(b->text, "rope_interleave", false, &d->interleaved, b->c->path, b->err));
    X3_TRY(rc, out, read_rope(b, NULL, d->rope_dim, &d->rope));
    const x3_rope_desc *rope = &b->m->ropes[d->rope];
    double scale = 1 / sqrt((double)(d->nope_dim + d->rope_dim));
    if (rope->type != X3_ROPE_DEFAULT && rope->mscale_all_dim != 0 && rope->factor > 1) {
        double mscale = 0.1 * rope->mscale_all_dim * log(rope->factor) + 1;
        scale *= mscale * mscale;
    }
    d->scale = (float)scale;
out:
    return rc;
}

static x3_status read_indexer(x3_builder *b)
{
    x3_indexer_desc *d = &b->mla.index;
    x3_status rc;

    d->interleaved = b->f->indexer == X3_INDEXER_PAIRS;
    X3_TRY(rc, out, x3_build_size(b, "index_n_heads", X3_SIZE_OPTION_MAX, true, &d->n_heads));
    X3_TRY(rc, out, x3_build_size(b, "index_head_dim", X3_SIZE_OPTION_MAX, true, &d->dim));
    X3_TRY(rc, out, x3_build_size(b, "index_topk", X3_SIZE_OPTION_MAX, true, &d->topk));
    X3_TRY(rc, out, x3_json_bool(b->text, "indexer_rope_interleave", false, &d->interleaved, b->c->path, b->err));
    if (d->dim < b->mla.rope_dim)
        rc = x3_fail(b->err, X3_ERR_INPUT, "%s: index_head_dim %zu is smaller than qk_rope_head_dim %zu", b->c->path, d->dim,
                     b->mla.rope_dim);
    else if (b->mla.q_rank == 0)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: an indexer needs q_lora_rank", b->c->path);
out:
    return rc;
}

x3_status x3_build_mixer_options(x3_builder *b)
{
    x3_status rc;

    b->value_scale = 1;
    X3_TRY(rc, out, x3_arena_alloc(&b->m->arena, &b->m->ropes, 2, sizeof *b->m->ropes, b->err));
    if (b->f->attention == X3_ATTENTION_MLA) {
        X3_TRY(rc, out, read_mla(b));
        if (b->f->indexer != X3_INDEXER_NONE)
            X3_TRY(rc, out, read_indexer(b));
    } else {
        X3_TRY(rc, out, read_heads(b));
        X3_TRY(rc, out, read_window(b));
        X3_TRY(rc, out, read_gqa_ropes(b));
    }
    if (b->f->delta_net != X3_DELTA_NONE)
        rc = read_delta(b);
out:
    return rc;
}

/* ---- what a layer is ---- */

/* A list with one entry a layer; NULL when the config has none. */
static x3_status layer_list(x3_builder *b, const char *key, const cJSON **out)
{
    *out = x3_json_get(b->text, key);
    if (*out == NULL || (cJSON_IsArray(*out) && (size_t)cJSON_GetArraySize(*out) == b->m->n_layers))
        return X3_OK;
    return x3_fail(b->err, X3_ERR_INPUT, "%s: %s has %d entries, num_hidden_layers is %zu", b->c->path, key,
                   cJSON_GetArraySize(*out), b->m->n_layers);
}

static x3_status named_type(x3_builder *b, const char *name, size_t layer, x3_layer_type *out)
{
    if (strcmp(name, "full_attention") == 0) {
        *out = X3_LAYER_FULL;
    } else if (strcmp(name, "sliding_attention") == 0 && b->f->window != X3_WINDOW_NEVER) {
        *out = X3_LAYER_WINDOW;
        if (b->window == 0)
            return x3_fail(b->err, X3_ERR_INPUT, "%s: layer_types[%zu] is sliding_attention without a sliding_window",
                           b->c->path, layer);
    } else if (strcmp(name, "linear_attention") == 0 && b->f->delta_net != X3_DELTA_NONE) {
        *out = X3_LAYER_LINEAR;
    } else if ((strcmp(name, "deepseek_sparse_attention") == 0 || strcmp(name, "indexed_attention") == 0) &&
               b->f->indexer != X3_INDEXER_NONE) {
        *out = X3_LAYER_SPARSE;
    } else {
        return x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: layer_types[%zu] \"%s\" is not known for model_type \"%s\"",
                       b->c->path, layer, name, b->f->model_type);
    }
    return X3_OK;
}

/* hybrid_layer_pattern: 1 is a window layer. Without it every sixth layer and the first one are full. */
static x3_status pattern_type(x3_builder *b, size_t layer, x3_layer_type *out)
{
    const cJSON *pattern;
    int64_t is_window = layer != 0 && (layer + 1) % 6 != 0;
    x3_status rc = layer_list(b, "hybrid_layer_pattern", &pattern);

    if (rc == X3_OK && pattern != NULL)
        rc = x3_json_as_int(cJSON_GetArrayItem(pattern, (int)layer), "hybrid_layer_pattern", 0, 1, &is_window, b->c->path,
                            b->err);
    *out = is_window ? X3_LAYER_WINDOW : X3_LAYER_FULL;
    if (rc == X3_OK && is_window && b->window == 0)
        rc = x3_fail(b->err, X3_ERR_INPUT, "%s: layer %zu has a window, but sliding_window is missing", b->c->path, layer);
    return rc;
}

static x3_status layer_type(x3_builder *b, size_t layer, x3_layer_type *out)
{
    const cJSON *types, *type;
    int64_t interval = 4;
    x3_status rc = layer_list(b, "layer_types", &types);

    if (rc != X3_OK)
        return rc;
    if (types != NULL) {
        type = cJSON_GetArrayItem(types, (int)layer);
        return named_type(b, cJSON_IsString(type) ? type->valuestring : "?", layer, out);
    }
    if (b->f->window == X3_WINDOW_PATTERN)
        return pattern_type(b, layer, out);
    if (b->f->delta_net != X3_DELTA_NONE) {
        rc = x3_json_int(b->text, "full_attention_interval", 1, X3_LAYERS_MAX, false, &interval, b->c->path, b->err);
        *out = (layer + 1) % (size_t)interval != 0 ? X3_LAYER_LINEAR : X3_LAYER_FULL;
    } else if (b->f->indexer != X3_INDEXER_NONE) {
        *out = X3_LAYER_SPARSE;
    } else {
        *out = b->window == 0 || (b->f->window == X3_WINDOW_LAYER_TYPES && (int64_t)layer < b->max_window_layers)
                   ? X3_LAYER_FULL
                   : X3_LAYER_WINDOW;
    }
    return rc;
}

/* Whether a sparse layer selects for itself: a list, a pattern of letters, or every freq-th layer from offset - 1 on. */
static x3_status owns_indexer(x3_builder *b, size_t layer, bool *owns)
{
    const cJSON *types, *pattern = x3_json_get(b->text, "index_topk_pattern"), *type;
    int64_t freq = 1, offset = 2, past;
    const char *name = "?";
    x3_status rc;

    X3_TRY(rc, out, layer_list(b, "indexer_types", &types));
    if (types == NULL && pattern != NULL && !cJSON_IsString(pattern))
        X3_TRY(rc, out, layer_list(b, "index_topk_pattern", &types));
    if (types != NULL) {
        type = cJSON_GetArrayItem(types, (int)layer);
        name = cJSON_IsString(type) ? type->valuestring : "?";
    } else if (pattern != NULL) {
        if (strlen(pattern->valuestring) != b->m->n_layers) {
            rc = x3_fail(b->err, X3_ERR_INPUT, "%s: index_topk_pattern has %zu letters, num_hidden_layers is %zu",
                         b->c->path, strlen(pattern->valuestring), b->m->n_layers);
            goto out;
        }
        name = pattern->valuestring[layer] == 'F' ? "full" : pattern->valuestring[layer] == 'S' ? "shared" : "?";
    } else {
        X3_TRY(rc, out, x3_json_int(b->text, "index_topk_freq", 0, X3_LAYERS_MAX, false, &freq, b->c->path, b->err));
        X3_TRY(rc, out, x3_json_int(b->text, "index_skip_topk_offset", 0, X3_LAYERS_MAX, false, &offset, b->c->path, b->err));
        past = (int64_t)layer - offset + 1;
        name = past <= 0 || freq <= 1 || past % freq == 0 ? "full" : "shared";
    }
    *owns = strcmp(name, "full") == 0;
    if (!*owns && strcmp(name, "shared") != 0)
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: indexer type \"%s\" of layer %zu is not known: full, shared", b->c->path,
                     name, layer);
out:
    return rc;
}

/* ---- descriptors ---- */

static x3_status build_gqa(x3_builder *b, x3_layer_desc *l, const x3_gqa_sizes *s, size_t window)
{
    x3_gqa_desc *g = &l->gqa;
    const size_t h = b->m->hidden, q = s->n_heads * s->head_dim;
    const bool bias = x3_build_has_bias(b->f->qkv_bias, b->attention_bias);
    x3_status rc;

    l->mixer = X3_MIXER_GQA;
    *g = (x3_gqa_desc){.n_heads = s->n_heads, .n_kv_heads = s->n_kv_heads, .head_dim = s->head_dim, .v_dim = s->v_dim,
                       .gated = b->f->gated_attention, .q_norm = -1, .k_norm = -1, .sinks = -1, .rope = s->rope,
                       .scale = (float)(1 / sqrt((double)s->head_dim)), .value_scale = b->value_scale, .window = window};
    X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.q_proj", h, g->gated ? 2 * q : q, bias, 0, 0, 0, &g->q));
    X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.k_proj", h, s->n_kv_heads * s->head_dim, bias, 0, 1, 0, &g->k));
    X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.v_proj", h, s->n_kv_heads * s->v_dim, bias, 0, 1, 0, &g->v));
    X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.o_proj", s->n_heads * s->v_dim, h,
                                        x3_build_has_bias(b->f->o_bias, b->attention_bias), 1, 2, 2, &g->o));
    if (b->f->qk_norm == X3_NORM_ALWAYS || (b->f->qk_norm == X3_NORM_CONFIG && b->use_qk_norm)) {
        X3_TRY(rc, out, x3_build_norm(b, l, "self_attn.q_norm.weight", s->head_dim, &g->q_norm));
        X3_TRY(rc, out, x3_build_norm(b, l, "self_attn.k_norm.weight", s->head_dim, &g->k_norm));
    }
    if (s->sinks)
        rc = x3_build_vector(b, l, "self_attn.attention_sink_bias", s->n_heads, &g->sinks);
out:
    return rc;
}

/* The projections of b and a are too narrow to quantize, and the decay is sensitive: they stay. */
static x3_status build_delta(x3_builder *b, x3_layer_desc *l)
{
    x3_delta_net_desc *d = &l->delta;
    const size_t h = b->m->hidden, k = b->delta.n_k_heads * b->delta.k_dim, v = b->delta.n_v_heads * b->delta.v_dim;
    const size_t heads = b->delta.n_v_heads;
    x3_status rc;

    l->mixer = X3_MIXER_DELTA_NET;
    *d = b->delta;
    d->z = d->a = -1;
    if (b->f->delta_net == X3_DELTA_FUSED) {
        X3_TRY(rc, out, x3_build_linear(b, l, "linear_attn.in_proj_qkvz", h, 2 * (k + v), false, 0, 0, 0, &d->qkv));
        X3_TRY(rc, out, x3_build_kept_linear(b, l, "linear_attn.in_proj_ba", h, 2 * heads, false, 0, &d->b));
    } else {
        X3_TRY(rc, out, x3_build_linear(b, l, "linear_attn.in_proj_qkv", h, 2 * k + v, false, 0, 0, 0, &d->qkv));
        X3_TRY(rc, out, x3_build_linear(b, l, "linear_attn.in_proj_z", h, v, false, 0, 1, 0, &d->z));
        X3_TRY(rc, out, x3_build_kept_linear(b, l, "linear_attn.in_proj_b", h, heads, false, 0, &d->b));
        X3_TRY(rc, out, x3_build_kept_linear(b, l, "linear_attn.in_proj_a", h, heads, false, 0, &d->a));
    }
    X3_TRY(rc, out, x3_build_linear(b, l, "linear_attn.out_proj", v, h, false, 1, 2, 2, &d->o));
    X3_TRY(rc, out, x3_build_matrix(b, l, "linear_attn.conv1d.weight", (2 * k + v) * d->kernel, d->kernel, &d->conv));
    X3_TRY(rc, out, x3_build_vector(b, l, "linear_attn.A_log", heads, &d->a_log));
    X3_TRY(rc, out, x3_build_vector(b, l, "linear_attn.dt_bias", heads, &d->dt_bias));
    rc = x3_build_vector(b, l, "linear_attn.norm.weight", d->v_dim, &d->norm);
out:
    return rc;
}

/* Linears of input 0, the hidden state, first; those that stay after the ones that are quantized. */
static x3_status build_mla_inputs(x3_builder *b, x3_layer_desc *l, bool indexer)
{
    x3_mla_desc *d = &l->mla;
    const size_t h = b->m->hidden, q = d->n_heads * (d->nope_dim + d->rope_dim);
    const bool bias = x3_build_has_bias(b->f->qkv_bias, b->attention_bias);
    const bool key_is_quantized = d->index.dim % 128 == 0; /* a narrower one would mostly be padding */
    x3_status rc;

    if (d->q_rank == 0)
        X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.q_proj", h, q, false, 0, 0, 0, &d->q_b));
    else
        X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.q_a_proj", h, d->q_rank, bias, 0, 0, 0, &d->q_a));
    X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.kv_a_proj_with_mqa", h, d->kv_rank + d->rope_dim, bias, 0, 1, 0,
                                        &d->kv_a));
    if (!indexer)
        goto out;
    if (key_is_quantized)
        X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.indexer.wk", h, d->index.dim, false, 0, 4, 4, &d->index.k));
    else
        X3_TRY(rc, out, x3_build_kept_linear(b, l, "self_attn.indexer.wk", h, d->index.dim, false, 0, &d->index.k));
    rc = x3_build_kept_linear(b, l, "self_attn.indexer.weights_proj", h, d->index.n_heads, false, 0,
                                  &d->index.weights);
out:
    return rc;
}

static x3_status build_mla(x3_builder *b, x3_layer_desc *l, bool sparse, bool indexer)
{
    x3_mla_desc *d = &l->mla;
    const size_t q = b->mla.n_heads * (b->mla.nope_dim + b->mla.rope_dim);
    x3_indexer_desc *x = &d->index;
    int input = 1;
    x3_status rc;

    l->mixer = X3_MIXER_MLA;
    *d = b->mla;
    d->q_a = d->q_norm = -1;
    if (!sparse)
        x->topk = 0;
    if (!indexer)
        x->n_heads = 0;
    X3_TRY(rc, out, build_mla_inputs(b, l, indexer));
    if (d->q_rank != 0)
        X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.q_b_proj", d->q_rank, q, false, input, 2, 2, &d->q_b));
    if (indexer)
        X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.indexer.wq_b", d->q_rank, x->n_heads * x->dim, false, input, 3,
                                            3, &x->q));
    input = (int)l->n_inputs;
    X3_TRY(rc, out, x3_build_linear(b, l, "self_attn.o_proj", d->n_heads * d->v_dim, b->m->hidden,
                                        x3_build_has_bias(b->f->o_bias, b->attention_bias), input, 5, 5, &d->o));
    X3_TRY(rc, out, x3_build_kept_linear(b, l, "self_attn.kv_b_proj", d->kv_rank,
                                             d->n_heads * (d->nope_dim + d->v_dim), false, input + 1, &d->kv_b));
    if (d->q_rank != 0)
        X3_TRY(rc, out, x3_build_vector(b, l, "self_attn.q_a_layernorm.weight", d->q_rank, &d->q_norm));
    X3_TRY(rc, out, x3_build_vector(b, l, "self_attn.kv_a_layernorm.weight", d->kv_rank, &d->kv_norm));
    if (indexer) {
        X3_TRY(rc, out, x3_build_vector(b, l, "self_attn.indexer.k_norm.weight", x->dim, &x->k_norm));
        rc = x3_build_vector(b, l, "self_attn.indexer.k_norm.bias", x->dim, &x->k_norm_bias);
    }
out:
    return rc;
}

static x3_status build_sparse(x3_builder *b, x3_layer_desc *l, size_t layer)
{
    bool owns = true, before = false;
    x3_status rc = owns_indexer(b, layer, &owns);

    for (size_t i = 0; i < layer; i++)
        before = before || b->m->layers[i].mla.index.n_heads != 0;
    if (rc == X3_OK && !owns && !before)
        rc = x3_fail(b->err, X3_ERR_INPUT, "%s: layer %zu shares the selection of an earlier layer, and none makes one",
                     b->c->path, layer);
    if (!owns)
        b->m->shared_topk = b->mla.index.topk;
    return rc == X3_OK ? build_mla(b, l, true, owns) : rc;
}

x3_status x3_build_draft_mixer(x3_builder *b, x3_layer_desc *l)
{
    const bool sparse = b->f->indexer != X3_INDEXER_NONE;

    return b->f->attention == X3_ATTENTION_MLA ? build_mla(b, l, sparse, sparse) : build_gqa(b, l, &b->full, 0);
}

x3_status x3_build_mixer(x3_builder *b, x3_layer_desc *l, size_t layer)
{
    x3_layer_type type = X3_LAYER_FULL;
    x3_status rc = layer_type(b, layer, &type);

    if (rc != X3_OK)
        return rc;
    switch (type) {
    case X3_LAYER_FULL:
        return b->f->attention == X3_ATTENTION_MLA ? build_mla(b, l, false, false) : build_gqa(b, l, &b->full, 0);
    case X3_LAYER_WINDOW:
        return build_gqa(b, l, &b->windowed, b->window);
    case X3_LAYER_LINEAR:
        return build_delta(b, l);
    case X3_LAYER_SPARSE:
        return build_sparse(b, l, layer);
    }
    return X3_OK;
}
