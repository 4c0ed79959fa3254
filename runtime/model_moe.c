/* Descriptors of layers with experts: families, options, linears. */
#include <stdio.h>
#include <string.h>

#include "runtime/model_internal.h"

static const char *const qwen3_keys[] = {"num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size",
                                         "norm_topk_prob", "decoder_sparse_step", "mlp_only_layers", NULL};
static const char *const glm4_keys[] = {"n_routed_experts", "num_local_experts", "num_experts_per_tok",
                                        "moe_intermediate_size", "norm_topk_prob", "first_k_dense_replace",
                                        "n_shared_experts", "n_group", "topk_group", "routed_scaling_factor",
                                        "num_nextn_predict_layers", "use_qk_norm", NULL};
static const char *const mixtral_keys[] = {"num_local_experts", "num_experts_per_tok", NULL};

const x3_moe_family x3_moe_qwen3 = {
    .scores = X3_ROUTE_SOFTMAX,
    .layers = X3_MOE_STEP,
    .normalize = X3_MOE_NORM_CONFIG_NO,
    .expert_keys = {"num_experts", "num_local_experts"},
    .inner_key = "moe_intermediate_size",
    .router = "mlp.gate",
    .experts = "mlp.experts",
    .gate = "gate_proj",
    .up = "up_proj",
    .down = "down_proj",
    .stacked_gate_up = "mlp.experts.gate_up_proj",
    .stacked_down = "mlp.experts.down_proj",
    .stack_order = X3_STACK_EITHER,
    .keys = qwen3_keys,
};

const x3_moe_family x3_moe_glm4 = {
    .scores = X3_ROUTE_SIGMOID,
    .layers = X3_MOE_AFTER_DENSE,
    .normalize = X3_MOE_NORM_CONFIG_YES,
    .grouped = true,
    .expert_keys = {"n_routed_experts", "num_local_experts"},
    .inner_key = "moe_intermediate_size",
    .router = "mlp.gate",
    .correction = "mlp.gate.e_score_correction_bias",
    .experts = "mlp.experts",
    .gate = "gate_proj",
    .up = "up_proj",
    .down = "down_proj",
    .stacked_gate_up = "mlp.experts.gate_up_proj",
    .stacked_down = "mlp.experts.down_proj",
    .stack_order = X3_STACK_EITHER,
    .shared = "mlp.shared_experts",
    .keys = glm4_keys,
};

const x3_moe_family x3_moe_mixtral = {
    .scores = X3_ROUTE_SOFTMAX,
    .layers = X3_MOE_ALL,
    .normalize = X3_MOE_NORM_ALWAYS,
    .expert_keys = {"num_local_experts"},
    .inner_key = "intermediate_size",
    .router = "block_sparse_moe.gate",
    .experts = "block_sparse_moe.experts",
    .gate = "w1",
    .up = "w3",
    .down = "w2",
    .stacked_gate_up = "block_sparse_moe.experts.gate_up_proj",
    .stacked_down = "block_sparse_moe.experts.down_proj",
    .stack_order = X3_STACK_EITHER,
    .keys = mixtral_keys,
};

/* ---- options ---- */

#define EXPERTS_MAX 65536
#define EXPERTS_OF_ALL_LAYERS_MAX ((size_t)1 << 20) /* descriptors are made before any header is read */

static x3_status read_groups(x3_builder *b, x3_route_rule *r)
{
    double scale = 1;
    x3_status rc;

    X3_TRY(rc, out, x3_build_size(b, "n_group", EXPERTS_MAX, false, &r->n_groups));
    X3_TRY(rc, out, x3_build_size(b, "topk_group", EXPERTS_MAX, false, &r->n_chosen_groups));
    X3_TRY(rc, out, x3_json_number(b->text, "routed_scaling_factor", false, &scale, b->c->path, b->err));
    r->scale = (float)scale;
    if (r->n_chosen_groups > r->n_groups || r->n_experts % r->n_groups != 0 ||
        (r->n_groups > 1 && r->n_experts / r->n_groups < 2) ||
        r->n_chosen > r->n_chosen_groups * (r->n_experts / r->n_groups))
        rc = x3_fail(b->err, X3_ERR_INPUT, "%s: n_group %zu and topk_group %zu do not fit %zu experts, %zu of them chosen",
                     b->c->path, r->n_groups, r->n_chosen_groups, r->n_experts, r->n_chosen);
out:
    return rc;
}

/* mlp_layer_types or a list moe_layer_freq, one entry a layer. */
static x3_status read_kinds(x3_builder *b, const char *key)
{
    const cJSON *list = x3_json_get(b->text, key);
    size_t n = 0;

    if (list == NULL || b->moe.layer_kinds != NULL)
        return X3_OK;
    for (const cJSON *i = list->child; i != NULL; i = i->next, n++)
        if (!(cJSON_IsString(i) && (strcmp(i->valuestring, "dense") == 0 || strcmp(i->valuestring, "sparse") == 0)) &&
            !(cJSON_IsNumber(i) && (i->valuedouble == 0 || i->valuedouble == 1)))
            return x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: %s[%zu] is not \"dense\", \"sparse\", 0 or 1", b->c->path, key, n);
    if (!cJSON_IsArray(list) || n != b->m->n_layers)
        return x3_fail(b->err, X3_ERR_INPUT, "%s: %s has %zu entries, num_hidden_layers is %zu", b->c->path, key, n,
                       b->m->n_layers);
    b->moe.layer_kinds = list;
    return X3_OK;
}

static x3_status read_after_dense(x3_builder *b)
{
    int64_t n_dense = 1, step = 1;
    x3_status rc;

    X3_TRY(rc, out, read_kinds(b, "mlp_layer_types"));
    if (cJSON_IsArray(x3_json_get(b->text, "moe_layer_freq")))
        X3_TRY(rc, out, read_kinds(b, "moe_layer_freq"));
    else
        X3_TRY(rc, out, x3_json_int(b->text, "moe_layer_freq", 1, 1, false, &step, b->c->path, b->err));
    if (b->moe.layer_kinds == NULL)
        rc = x3_json_int(b->text, "first_k_dense_replace", 0, X3_SIZE_OPTION_MAX, !b->f->moe->one_dense, &n_dense, b->c->path,
                         b->err);
    b->moe.n_dense = (size_t)n_dense;
out:
    return rc;
}

static x3_status read_layers(x3_builder *b)
{
    const x3_moe_family *f = b->f->moe;
    x3_status rc = X3_OK;

    b->moe.step = 1;
    if (f->layers == X3_MOE_AFTER_DENSE) {
        rc = read_after_dense(b);
    } else if (f->layers == X3_MOE_STEP) {
        X3_TRY(rc, out, x3_build_size(b, "decoder_sparse_step", X3_SIZE_OPTION_MAX, false, &b->moe.step));
        b->moe.mlp_only = x3_json_get(b->text, "mlp_only_layers");
        if (b->moe.mlp_only != NULL && !cJSON_IsArray(b->moe.mlp_only))
            return x3_fail(b->err, X3_ERR_INPUT, "%s: mlp_only_layers is not a list", b->c->path);
        for (const cJSON *i = b->moe.mlp_only == NULL ? NULL : b->moe.mlp_only->child; i != NULL; i = i->next) {
            int64_t layer;
            X3_TRY(rc, out, x3_json_as_int(i, "mlp_only_layers", 0, X3_SIZE_OPTION_MAX, &layer, b->c->path, b->err));
        }
    }
out:
    return rc;
}

static x3_status read_shared(x3_builder *b)
{
    const x3_moe_family *f = b->f->moe;
    int64_t n = 0;
    x3_status rc;

    if (f->shared == NULL)
        return X3_OK;
    if (f->shared_key != NULL)
        return x3_build_size(b, f->shared_key, X3_SIZE_OPTION_MAX, true, &b->moe.n_shared_inner);
    rc = x3_json_int(b->text, f->n_shared_key != NULL ? f->n_shared_key : "n_shared_experts", 0, EXPERTS_MAX, true, &n,
                     b->c->path, b->err);
    b->moe.n_shared_inner = (size_t)n * b->moe.n_inner;
    return rc;
}

x3_status x3_build_moe_options(x3_builder *b)
{
    const x3_moe_family *f = b->f->moe;
    x3_route_rule *r = &b->moe.rule;
    bool normalize = f->normalize != X3_MOE_NORM_CONFIG_NO;
    int key = 0;
    x3_status rc;

    *r = (x3_route_rule){.scores = f->scores, .scale = 1, .n_groups = 1, .n_chosen_groups = 1};
    while (key + 1 < X3_EXPERT_KEYS && f->expert_keys[key + 1] != NULL && x3_json_get(b->text, f->expert_keys[key]) == NULL)
        key++;
    if (x3_json_get(b->text, f->expert_keys[key]) == NULL)
        key = 0;
    X3_TRY(rc, out, x3_build_size(b, f->expert_keys[key], EXPERTS_MAX, true, &r->n_experts));
    X3_TRY(rc, out, x3_build_size(b, "num_experts_per_tok", EXPERTS_MAX, true, &r->n_chosen));
    X3_TRY(rc, out, x3_build_size(b, f->inner_key, X3_SIZE_OPTION_MAX, true, &b->moe.n_inner));
    if (r->n_experts > EXPERTS_OF_ALL_LAYERS_MAX / (b->m->n_layers + 1)) {
        rc = x3_fail(b->err, X3_ERR_UNSUPPORTED, "%s: %zu experts in each of %zu layers are more than a model has", b->c->path,
                     r->n_experts, b->m->n_layers);
        goto out;
    }
    if (r->n_chosen > r->n_experts) {
        rc = x3_fail(b->err, X3_ERR_INPUT, "%s: num_experts_per_tok %zu of %zu experts", b->c->path, r->n_chosen,
                     r->n_experts);
        goto out;
    }
    if (f->normalize != X3_MOE_NORM_ALWAYS)
        X3_TRY(rc, out, x3_json_bool(b->text, "norm_topk_prob", false, &normalize, b->c->path, b->err));
    r->normalize = normalize;
    if (f->grouped)
        X3_TRY(rc, out, read_groups(b, r));
    if (f->scale_key != NULL) {
        double scale = 1;
        X3_TRY(rc, out, x3_json_number(b->text, f->scale_key, true, &scale, b->c->path, b->err));
        r->scale = (float)scale;
    }
    X3_TRY(rc, out, read_layers(b));
    rc = read_shared(b);
out:
    return rc;
}

bool x3_build_is_moe(const x3_builder *b, size_t layer)
{
    if (b->f->moe != NULL && b->moe.layer_kinds != NULL) {
        const cJSON *kind = cJSON_GetArrayItem(b->moe.layer_kinds, (int)layer);
        return cJSON_IsString(kind) ? strcmp(kind->valuestring, "sparse") == 0 : kind->valuedouble == 1;
    }
    if (b->f->moe == NULL || layer < b->moe.n_dense || (layer + 1) % b->moe.step != 0)
        return false;
    for (const cJSON *i = b->moe.mlp_only == NULL ? NULL : b->moe.mlp_only->child; i != NULL; i = i->next)
        if (i->valuedouble == (double)layer)
            return false;
    return true;
}

/* ---- linears ---- */

size_t x3_build_moe_linears(const x3_builder *b)
{
    return 5 + 3 * b->moe.rule.n_experts; /* router, shared gate, the shared MLP */
}

static x3_status add_stack(x3_builder *b, x3_layer_desc *l, int linear, const char *tensor, size_t expert, size_t n_outputs,
                           size_t first)
{
    x3_stack_desc *s;
    char *name;
    x3_status rc;

    if (tensor == NULL)
        return X3_OK;
    X3_TRY(rc, out, x3_arena_alloc(&b->m->arena, &s, 1, sizeof *s, b->err));
    X3_TRY(rc, out, x3_arena_printf(&b->m->arena, &name, b->err, "%s.%s", l->prefix, tensor));
    *s = (x3_stack_desc){.tensor = name, .n_stack = b->moe.rule.n_experts, .index = expert, .n_outputs = n_outputs,
                         .first = first, .step = 1, .order = b->f->moe->stack_order};
    l->linears[linear].stack = s;
out:
    return rc;
}

/* Gate and up share an input of their own, the tokens of this expert, as down does. */
static x3_status add_expert(x3_builder *b, x3_layer_desc *l, size_t e, int input, int tie)
{
    const x3_moe_family *f = b->f->moe;
    const size_t hidden = b->m->hidden, inner = b->moe.n_inner;
    char part[256];
    int gate, up, down;
    x3_status rc;

#define PART(name) (snprintf(part, sizeof part, "%s.%zu.%s", f->experts, e, name), part)
    X3_TRY(rc, out, x3_build_linear(b, l, PART(f->gate), hidden, inner, false, input, tie, tie, &gate));
    X3_TRY(rc, out, add_stack(b, l, gate, f->stacked_gate_up, e, 2 * inner, 0));
    X3_TRY(rc, out, x3_build_linear(b, l, PART(f->up), hidden, inner, false, input, tie, tie, &up));
    X3_TRY(rc, out, add_stack(b, l, up, f->stacked_gate_up, e, 2 * inner, inner));
    X3_TRY(rc, out, x3_build_linear(b, l, PART(f->down), inner, hidden, false, input + 1, tie + 1, tie + 1, &down));
    rc = add_stack(b, l, down, f->stacked_down, e, hidden, 0);
#undef PART
out:
    return rc;
}

x3_status x3_build_moe(x3_builder *b, x3_layer_desc *l, int input, int tie)
{
    const x3_moe_family *f = b->f->moe;
    x3_moe_desc *d = &l->moe;
    x3_status rc;

    *d = (x3_moe_desc){.rule = b->moe.rule, .n_inner = b->moe.n_inner, .correction = -1, .shared_gate = -1};
    X3_TRY(rc, out, x3_build_linear(b, l, f->router, b->m->hidden, d->rule.n_experts, false, input, -1, -1, &d->router));
    l->linears[d->router].quantized = false;
    if (f->correction != NULL)
        X3_TRY(rc, out, x3_build_vector(b, l, f->correction, d->rule.n_experts, &d->correction));
    if (b->moe.n_shared_inner > 0) {
        if (f->shared_gate != NULL) {
            X3_TRY(rc, out, x3_build_linear(b, l, f->shared_gate, b->m->hidden, 1, false, input, -1, -1, &d->shared_gate));
            l->linears[d->shared_gate].quantized = false;
        }
        d->has_shared = true;
        X3_TRY(rc, out, x3_build_mlp(b, l, f->shared, b->moe.n_shared_inner, false, input, tie, &d->shared));
    }
    d->first_expert = (int)l->n_linears;
    for (size_t e = 0; e < d->rule.n_experts; e++)
        X3_TRY(rc, out, add_expert(b, l, e, input + 2 + 2 * (int)e, tie + 2 + 2 * (int)e));
out:
    return rc;
}

int x3_layer_expert(const x3_layer_desc *l, size_t index)
{
    if (l->ffn != X3_FFN_MOE || index < (size_t)l->moe.first_expert)
        return -1;
    return (int)(index - (size_t)l->moe.first_expert) / 3;
}
