/* The families that this version knows, as data. README.md says how to add one. */
#include "runtime/model_internal.h"

/* ---- parts of a checkpoint that the text model does not use ---- */

static const x3_carried qwen_carried[] = {{"mtp.", "draft layers (MTP)"},
                                          {"model.visual.", "vision tower"},
                                          {"visual.", "vision tower"},
                                          {NULL, NULL}};
static const x3_carried mimo_carried[] = {{"model.mtp.", "draft layers (MTP)"}, {NULL, NULL}};

/* ---- options with one known value, and options that change nothing ---- */

static const x3_expected deepseek_expects[] = {
    {"scoring_func", "\"sigmoid\""}, {"topk_method", "\"noaux_tc\""}, {NULL, NULL}};
static const x3_expected qwen3_5_expects[] = {{"output_gate_type", "\"swish\""}, {"output_gate_type", "\"silu\""}, {NULL, NULL}};
static const x3_expected dots1_expects[] = {{"scoring_func", "\"noaux_tc\""}, {NULL, NULL}}; /* its name for sigmoid */
static const x3_expected seed_oss_expects[] = {{"attention_out_bias", "false"}, {NULL, NULL}};
static const x3_expected hy_v3_expects[] = {{"qk_norm", "true"},
                                            {"route_norm", "true"},
                                            {"moe_router_use_sigmoid", "true"},
                                            {"moe_router_enable_expert_bias", "true"},
                                            {NULL, NULL}};
static const char *const seed_oss_harmless[] = {"residual_dropout", NULL};
/* Precision (everything is float32 here), kernels, and a second name of moe_intermediate_size. */
static const char *const hy_v3_harmless[] = {
    "enable_attention_fp32_softmax", "enable_lm_head_fp32", "enable_moe_fp32_combine", "use_grouped_mm", "expert_hidden_dim",
    "eod_token_id", NULL};

/* ---- experts ---- */

static const char *const deepseek_keys[] = {
    "n_routed_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "first_k_dense_replace", "mlp_layer_types", "moe_layer_freq", "n_shared_experts", "n_group", "topk_group",
    "routed_scaling_factor",
    /* how training and serving spread and compute the experts; the sums are the same */
    "ep_size", "moe_router_dtype", NULL};
static const char *const qwen2_moe_keys[] = {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
    "decoder_sparse_step", "mlp_only_layers", "shared_expert_intermediate_size", NULL};
static const char *const hy_v3_keys[] = {
    "num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "mlp_layer_types",
    "first_k_dense_replace", "num_shared_experts", "router_scaling_factor", NULL};

#define EXPERTS_PER_TENSOR .experts = "mlp.experts", .gate = "gate_proj", .up = "up_proj", .down = "down_proj"
#define EXPERTS_STACKED                                                                                        \
    .stacked_gate_up = "mlp.experts.gate_up_proj", .stacked_down = "mlp.experts.down_proj", .stack_order = X3_STACK_OUT_IN

static const x3_moe_family deepseek_moe = {
    .scores = X3_ROUTE_SIGMOID,
    .layers = X3_MOE_AFTER_DENSE,
    .normalize = X3_MOE_NORM_CONFIG_YES,
    .grouped = true,
    .expert_keys = {"n_routed_experts", "num_local_experts"},
    .inner_key = "moe_intermediate_size",
    .router = "mlp.gate",
    .correction = "mlp.gate.e_score_correction_bias",
    EXPERTS_PER_TENSOR,
    EXPERTS_STACKED,
    .shared = "mlp.shared_experts",
    .keys = deepseek_keys,
};

/* GLM-4.7-Flash has one dense layer where the config does not say. */
static const x3_moe_family glm4_lite_moe = {
    .scores = X3_ROUTE_SIGMOID,
    .layers = X3_MOE_AFTER_DENSE,
    .one_dense = true,
    .normalize = X3_MOE_NORM_CONFIG_YES,
    .grouped = true,
    .expert_keys = {"n_routed_experts", "num_local_experts"},
    .inner_key = "moe_intermediate_size",
    .router = "mlp.gate",
    .correction = "mlp.gate.e_score_correction_bias",
    EXPERTS_PER_TENSOR,
    EXPERTS_STACKED,
    .shared = "mlp.shared_experts",
    .keys = deepseek_keys,
};

static const x3_moe_family dots1_moe = {
    .scores = X3_ROUTE_SIGMOID,
    .layers = X3_MOE_AFTER_DENSE,
    .normalize = X3_MOE_NORM_CONFIG_NO,
    .grouped = true,
    .expert_keys = {"n_routed_experts", "num_local_experts"},
    .inner_key = "moe_intermediate_size",
    .router = "mlp.gate",
    .correction = "mlp.gate.e_score_correction_bias",
    EXPERTS_PER_TENSOR,
    EXPERTS_STACKED,
    .shared = "mlp.shared_experts",
    .keys = deepseek_keys,
};

static const x3_moe_family mimo_moe = {
    .scores = X3_ROUTE_SIGMOID,
    .layers = X3_MOE_AFTER_DENSE,
    .one_dense = true,
    .normalize = X3_MOE_NORM_CONFIG_YES,
    .grouped = true,
    .expert_keys = {"n_routed_experts", "num_local_experts"},
    .inner_key = "moe_intermediate_size",
    .router = "mlp.gate",
    .correction = "mlp.gate.e_score_correction_bias",
    EXPERTS_PER_TENSOR,
    EXPERTS_STACKED,
    .keys = deepseek_keys,
};

static const x3_moe_family qwen3_next_moe = {
    .scores = X3_ROUTE_SOFTMAX,
    .layers = X3_MOE_STEP,
    .normalize = X3_MOE_NORM_CONFIG_YES,
    .expert_keys = {"num_experts", "num_local_experts"},
    .inner_key = "moe_intermediate_size",
    .router = "mlp.gate",
    EXPERTS_PER_TENSOR,
    EXPERTS_STACKED,
    .shared = "mlp.shared_expert",
    .shared_key = "shared_expert_intermediate_size",
    .shared_gate = "mlp.shared_expert_gate",
    .keys = qwen2_moe_keys,
};

static const x3_moe_family qwen2_moe = {
    .scores = X3_ROUTE_SOFTMAX,
    .layers = X3_MOE_STEP,
    .normalize = X3_MOE_NORM_CONFIG_NO,
    .expert_keys = {"num_experts", "num_local_experts"},
    .inner_key = "moe_intermediate_size",
    .router = "mlp.gate",
    EXPERTS_PER_TENSOR,
    EXPERTS_STACKED,
    .shared = "mlp.shared_expert",
    .shared_key = "shared_expert_intermediate_size",
    .shared_gate = "mlp.shared_expert_gate",
    .keys = qwen2_moe_keys,
};

static const x3_moe_family hy_v3_moe = {
    .scores = X3_ROUTE_SIGMOID,
    .layers = X3_MOE_AFTER_DENSE,
    .one_dense = true,
    .normalize = X3_MOE_NORM_ALWAYS,
    .scale_key = "router_scaling_factor",
    .expert_keys = {"num_experts", "num_local_experts"},
    .inner_key = "moe_intermediate_size",
    .router = "mlp.router.gate",
    .correction = "mlp.expert_bias",
    EXPERTS_PER_TENSOR,
    EXPERTS_STACKED,
    .shared = "mlp.shared_mlp",
    .n_shared_key = "num_shared_experts",
    .keys = hy_v3_keys,
};

/* ---- families ---- */

#define BIASES_CONFIG .qkv_bias = X3_BIAS_CONFIG, .o_bias = X3_BIAS_CONFIG
#define QWEN3_NEXT_MIXERS                                                                                     \
    BIASES_CONFIG, .qk_norm = X3_NORM_ALWAYS, .centred_norms = true, .gated_attention = true, .partial_rope = true, \
    .rotated_part = 0.25, .draft = X3_DRAFT_MTP, .carried = qwen_carried
#define MLA .attention = X3_ATTENTION_MLA, .draft = X3_DRAFT_NEXTN, BIASES_CONFIG

const x3_family x3_families[] = {
    {.model_type = "llama", BIASES_CONFIG, .mlp_bias = X3_BIAS_CONFIG},
    {.model_type = "mistral", .window = X3_WINDOW_ALL_LAYERS},
    {.model_type = "mixtral", .window = X3_WINDOW_ALL_LAYERS, .moe = &x3_moe_mixtral},
    {.model_type = "qwen2", .qkv_bias = X3_BIAS_ALWAYS, .window = X3_WINDOW_LAYER_TYPES},
    {.model_type = "qwen2_moe", .qkv_bias = X3_BIAS_QKV, .window = X3_WINDOW_LAYER_TYPES, .moe = &qwen2_moe},
    {.model_type = "qwen3", BIASES_CONFIG, .qk_norm = X3_NORM_ALWAYS, .window = X3_WINDOW_LAYER_TYPES},
    {.model_type = "qwen3_moe", BIASES_CONFIG, .qk_norm = X3_NORM_ALWAYS, .window = X3_WINDOW_OPTION, .moe = &x3_moe_qwen3},
    {.model_type = "qwen3_next", QWEN3_NEXT_MIXERS, .delta_net = X3_DELTA_FUSED, .moe = &qwen3_next_moe},
    {.model_type = "qwen3_5_text", QWEN3_NEXT_MIXERS, .delta_net = X3_DELTA_SPLIT, .expects = qwen3_5_expects},
    {.model_type = "qwen3_5_moe_text", QWEN3_NEXT_MIXERS, .delta_net = X3_DELTA_SPLIT, .moe = &qwen3_next_moe,
     .expects = qwen3_5_expects},
    {.model_type = "glm4_moe", .qkv_bias = X3_BIAS_CONFIG, .qk_norm = X3_NORM_CONFIG, .partial_rope = true,
     .draft = X3_DRAFT_NEXTN, .moe = &x3_moe_glm4},
    {.model_type = "glm4_moe_lite", MLA, .moe = &glm4_lite_moe, .expects = deepseek_expects},
    {.model_type = "glm_moe_dsa", MLA, .indexer = X3_INDEXER_PAIRS, .moe = &deepseek_moe, .expects = deepseek_expects},
    {.model_type = "deepseek_v3", MLA, .moe = &deepseek_moe, .expects = deepseek_expects},
    {.model_type = "kimi_k2", MLA, .moe = &deepseek_moe, .expects = deepseek_expects}, /* deepseek_v3 by another name */
    {.model_type = "deepseek_v32", MLA, .indexer = X3_INDEXER_HALVES, .moe = &deepseek_moe, .expects = deepseek_expects},
    {.model_type = "mimo_v2_flash", .qkv_bias = X3_BIAS_CONFIG, .window = X3_WINDOW_PATTERN, .partial_rope = true,
     .rotated_part = 0.334, .window_kv_factor = 2, .window_sinks = true, .value_scale = true, .moe = &mimo_moe,
     .expects = deepseek_expects, .carried = mimo_carried},
    {.model_type = "dots1", BIASES_CONFIG, .qk_norm = X3_NORM_ALWAYS, .window = X3_WINDOW_LAYER_TYPES, .moe = &dots1_moe,
     .expects = dots1_expects},
    {.model_type = "seed_oss", .qkv_bias = X3_BIAS_CONFIG, .mlp_bias = X3_BIAS_CONFIG, .expects = seed_oss_expects,
     .harmless = seed_oss_harmless},
    {.model_type = "hy_v3", BIASES_CONFIG, .mlp_bias = X3_BIAS_CONFIG, .qk_norm = X3_NORM_ALWAYS, .moe = &hy_v3_moe,
     .expects = hy_v3_expects, .harmless = hy_v3_harmless},
};

const size_t x3_n_families = sizeof x3_families / sizeof x3_families[0];
