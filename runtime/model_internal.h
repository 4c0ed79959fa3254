/* The inside of model.c, shared with the files that build one layer kind each (model_moe.c, ...). A family is a row of
 * data; a builder turns a row and a config into descriptors. */
#ifndef X3_MODEL_INTERNAL_H
#define X3_MODEL_INTERNAL_H

#include "runtime/model.h"

typedef enum x3_bias_rule { X3_BIAS_NEVER, X3_BIAS_ALWAYS, X3_BIAS_CONFIG } x3_bias_rule;
typedef enum x3_window_rule {
    X3_WINDOW_NEVER,
    X3_WINDOW_ALL_LAYERS,
    X3_WINDOW_OPTION,     /* all layers, where use_sliding_window says so */
    X3_WINDOW_LAYER_TYPES /* layer_types, or from max_window_layers on */
} x3_window_rule;
typedef enum x3_norm_rule { X3_NORM_NEVER, X3_NORM_ALWAYS, X3_NORM_CONFIG } x3_norm_rule; /* CONFIG: use_qk_norm */

/* Which layers have experts. */
typedef enum x3_moe_layers {
    X3_MOE_ALL,
    X3_MOE_STEP,       /* every decoder_sparse_step-th, without mlp_only_layers */
    X3_MOE_AFTER_DENSE /* from first_k_dense_replace on */
} x3_moe_layers;

typedef enum x3_moe_normalize { X3_MOE_NORM_ALWAYS, X3_MOE_NORM_CONFIG_YES, X3_MOE_NORM_CONFIG_NO } x3_moe_normalize;

#define X3_EXPERT_KEYS 3

/* Experts of a family. Names stand below the layer's prefix; NULL: the family has none of it. */
typedef struct x3_moe_family {
    x3_route_scores scores;
    x3_moe_layers layers;
    x3_moe_normalize normalize; /* norm_topk_prob, and what it is when the config leaves it out */
    bool grouped;               /* reads n_group, topk_group and routed_scaling_factor */
    const char *expert_keys[X3_EXPERT_KEYS]; /* config keys of the number of experts; the first one present counts */
    const char *inner_key;                   /* and of an expert's inner size */
    const char *router, *correction;         /* module; tensor */
    const char *experts, *gate, *up, *down;  /* <experts>.<e>.<gate> */
    const char *stacked_gate_up, *stacked_down; /* tensors of all experts, gate and up one after the other */
    x3_stack_order stack_order;
    const char *shared;                      /* module: <shared>.gate_proj, ... */
    const char *shared_key;                  /* config key of its inner size; NULL: n_shared_experts times an expert's */
    const char *shared_gate;                 /* module */
    const char *const *keys;                 /* config keys that this family reads beside the common ones, NULL-terminated */
} x3_moe_family;

typedef struct x3_family {
    const char *model_type;
    x3_bias_rule qkv_bias, o_bias, mlp_bias; /* CONFIG: attention_bias, mlp_bias */
    x3_norm_rule qk_norm;                    /* RMS norm of each query and key head before rope */
    x3_window_rule window;
    bool partial_rope;
    const x3_moe_family *moe;                /* NULL: dense */
} x3_family;

typedef struct x3_builder {
    x3_model *m;
    const x3_hf_config *c;
    const cJSON *text;
    const x3_family *f;
    size_t n_heads, n_kv_heads, head_dim, n_inner, window;
    bool attention_bias, mlp_bias, use_qk_norm;
    int64_t max_window_layers;
    struct x3_moe_options {
        x3_route_rule rule;
        size_t n_inner, n_shared_inner;
        size_t n_dense, step;          /* layers before the first with experts; every step-th of the others */
        const cJSON *mlp_only;         /* array or NULL */
    } moe;
    x3_err *err;
} x3_builder;

#define X3_SIZE_OPTION_MAX (1 << 30)

/* An integer in [1, max]; *out keeps its value when the option is missing and not required. */
x3_status x3_build_size(x3_builder *b, const char *key, int64_t max, bool required, size_t *out) X3_MUST;
/* Adds a linear "<prefix>.<part>", quantized, and gives its index. */
x3_status x3_build_linear(x3_builder *b, x3_layer_desc *l, const char *part, size_t n_in, size_t n_out, bool bias, int input,
                          int tie, int tie_fused, int *index) X3_MUST;
/* Adds a vector, the tensor "<prefix>.<tensor>". */
x3_status x3_build_vector(x3_builder *b, x3_layer_desc *l, const char *tensor, size_t n, int *index) X3_MUST;
/* gate_proj, up_proj and down_proj below a module; gate and up take input and tie, down the next ones. */
x3_status x3_build_mlp(x3_builder *b, x3_layer_desc *l, const char *module, size_t n_inner, bool bias, int input, int tie,
                       x3_mlp_desc *d) X3_MUST;

/* ---- model_moe.c ---- */

x3_status x3_build_moe_options(x3_builder *b) X3_MUST;
bool x3_build_is_moe(const x3_builder *b, size_t layer);
/* Linears and vectors that a layer with experts may have beside its mixer. */
size_t x3_build_moe_linears(const x3_builder *b);
/* Router, shared MLP and experts; the block's input is number `input`. */
x3_status x3_build_moe(x3_builder *b, x3_layer_desc *l, int input, int tie) X3_MUST;

extern const x3_moe_family x3_moe_qwen3, x3_moe_glm4, x3_moe_mixtral;

#endif
