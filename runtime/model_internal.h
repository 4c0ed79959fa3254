/* The inside of model.c, shared with the files that build one layer kind each. A family is a row of data; a builder turns a
 * row and a config into descriptors. */
#ifndef X3_MODEL_INTERNAL_H
#define X3_MODEL_INTERNAL_H

#include "runtime/model.h"

typedef enum x3_bias_rule {
    X3_BIAS_NEVER,
    X3_BIAS_ALWAYS,
    X3_BIAS_CONFIG, /* attention_bias, mlp_bias */
    X3_BIAS_QKV     /* qkv_bias, true where the config does not say */
} x3_bias_rule;
typedef enum x3_norm_rule { X3_NORM_NEVER, X3_NORM_ALWAYS, X3_NORM_CONFIG } x3_norm_rule; /* CONFIG: use_qk_norm */
typedef enum x3_window_rule {
    X3_WINDOW_NEVER,
    X3_WINDOW_ALL_LAYERS,
    X3_WINDOW_OPTION,      /* all layers, where use_sliding_window says so */
    X3_WINDOW_LAYER_TYPES, /* layer_types, or from max_window_layers on */
    X3_WINDOW_PATTERN      /* two kinds of layers that differ in more: layer_types, hybrid_layer_pattern */
} x3_window_rule;
typedef enum x3_attention_rule { X3_ATTENTION_GQA, X3_ATTENTION_MLA } x3_attention_rule;
/* How the projections of linear_attention layers lie on disk. */
typedef enum x3_delta_rule { X3_DELTA_NONE, X3_DELTA_FUSED, X3_DELTA_SPLIT } x3_delta_rule;
/* Rope of a sparse indexer: pairs (i, i + n / 2), or (2 i, 2 i + 1). */
typedef enum x3_indexer_rule { X3_INDEXER_NONE, X3_INDEXER_HALVES, X3_INDEXER_PAIRS } x3_indexer_rule;

/* Names of a draft layer: model.layers.<n_layers>.eh_proj, enorm, hnorm, shared_head; or mtp.fc, pre_fc_norm_*, layers.0. */
typedef enum x3_draft_rule { X3_DRAFT_NONE, X3_DRAFT_NEXTN, X3_DRAFT_MTP } x3_draft_rule;

/* Which layers have experts. */
typedef enum x3_moe_layers {
    X3_MOE_ALL,
    X3_MOE_STEP,       /* every decoder_sparse_step-th, without mlp_only_layers */
    X3_MOE_AFTER_DENSE /* mlp_layer_types, a list moe_layer_freq, or from first_k_dense_replace on */
} x3_moe_layers;

typedef enum x3_moe_normalize { X3_MOE_NORM_ALWAYS, X3_MOE_NORM_CONFIG_YES, X3_MOE_NORM_CONFIG_NO } x3_moe_normalize;

#define X3_EXPERT_KEYS 3

/* Experts of a family. Names stand below the layer's prefix; NULL: the family has none of it. */
typedef struct x3_moe_family {
    x3_route_scores scores;
    x3_moe_layers layers;
    x3_moe_normalize normalize; /* norm_topk_prob, and what it is when the config leaves it out */
    bool one_dense;             /* X3_MOE_AFTER_DENSE: one layer where the config does not say; else it must */
    bool grouped;               /* reads n_group, topk_group and routed_scaling_factor */
    const char *scale_key;      /* of the factor on the weights, for others; NULL: none */
    const char *expert_keys[X3_EXPERT_KEYS]; /* config keys of the number of experts; the first one present counts */
    const char *inner_key;                   /* and of an expert's inner size */
    const char *router, *correction;         /* module; tensor */
    const char *experts, *gate, *up, *down;  /* <experts>.<e>.<gate> */
    const char *stacked_gate_up, *stacked_down; /* tensors of all experts, gate and up one after the other */
    x3_stack_order stack_order;
    const char *shared;                      /* module: <shared>.gate_proj, ... */
    const char *shared_key;                  /* config key of its inner size; NULL: n_shared_key times an expert's */
    const char *n_shared_key;                /* NULL: n_shared_experts */
    const char *shared_gate;                 /* module */
    const char *const *keys;                 /* config keys that this family reads beside the common ones, NULL-terminated */
} x3_moe_family;

/* An option of which one value (or each of several rows) is implemented; absent or null means the same. */
typedef struct x3_expected {
    const char *key, *value; /* value as JSON text */
} x3_expected;

/* A family. What a row does not name is zero: no bias, no window, plain attention, norms as stored. */
typedef struct x3_family {
    const char *model_type;
    x3_bias_rule qkv_bias, o_bias, mlp_bias;
    x3_norm_rule qk_norm;                    /* RMS norm of each query and key head before rope */
    x3_window_rule window;
    x3_attention_rule attention;
    bool centred_norms;      /* norms store gamma - 1 (not the output norm of a delta net) */
    bool gated_attention;    /* q_proj gives query and output gate of each head */
    x3_delta_rule delta_net;
    x3_indexer_rule indexer;
    x3_draft_rule draft;
    bool partial_rope;       /* the config may have less than a whole head rotated, */
    double rotated_part;     /* and this part where it does not say; 0: all */
    size_t window_kv_factor; /* KV heads of window layers over num_key_value_heads, where the config does not say */
    bool window_sinks;       /* sink bias on window layers, where the config does not say */
    bool value_scale;        /* attention_value_scale; 0.707 where the config does not say */
    const x3_moe_family *moe;  /* NULL: dense */
    const x3_expected *expects; /* ends with a NULL key; NULL: none */
    const char *const *harmless; /* keys that change nothing here, beside the common ones; NULL-terminated, or NULL */
    const x3_carried *carried;  /* ends with a NULL prefix; NULL: none */
} x3_family;

extern const x3_family x3_families[];
extern const size_t x3_n_families;

typedef enum x3_layer_type { X3_LAYER_FULL, X3_LAYER_WINDOW, X3_LAYER_LINEAR, X3_LAYER_SPARSE } x3_layer_type;

/* Sizes of GQA, once for full and once for window layers. */
typedef struct x3_gqa_sizes {
    size_t n_heads, n_kv_heads, head_dim, v_dim;
    int rope;
    bool sinks;
} x3_gqa_sizes;

typedef struct x3_builder {
    x3_model *m;
    const x3_hf_config *c;
    const cJSON *text;
    const x3_family *f;
    const char *prefix; /* of the text model's tensors: "model", "model.language_model" */
    x3_gqa_sizes full, windowed;
    size_t n_inner, window;
    bool attention_bias, mlp_bias;
    float value_scale;
    x3_delta_net_desc delta; /* sizes only */
    x3_mla_desc mla;         /* sizes, scale and the indexer's sizes */
    bool use_qk_norm;
    int64_t max_window_layers;
    struct x3_moe_options {
        x3_route_rule rule;
        size_t n_inner, n_shared_inner;
        size_t n_dense, step;          /* layers before the first with experts; every step-th of the others */
        const cJSON *mlp_only;         /* array or NULL */
        const cJSON *layer_kinds;      /* array of "dense" and "sparse", or of 0 and 1, or NULL */
    } moe;
    x3_err *err;
} x3_builder;

#define X3_LAYERS_MAX 10000
#define X3_SIZE_OPTION_MAX (1 << 30)

/* ---- model.c ---- */

/* An integer in [1, max]; *out keeps its value when the option is missing and not required. */
x3_status x3_build_size(x3_builder *b, const char *key, int64_t max, bool required, size_t *out) X3_MUST;
/* Adds a linear "<prefix>.<part>", quantized, and gives its index. */
x3_status x3_build_linear(x3_builder *b, x3_layer_desc *l, const char *part, size_t n_in, size_t n_out, bool bias, int input,
                          int tie, int tie_fused, int *index) X3_MUST;
/* The same for one that stays as it is in a pack. */
x3_status x3_build_kept_linear(x3_builder *b, x3_layer_desc *l, const char *part, size_t n_in, size_t n_out, bool bias,
                               int input, int *index) X3_MUST;
/* Adds a vector, the tensor "<prefix>.<tensor>". */
x3_status x3_build_vector(x3_builder *b, x3_layer_desc *l, const char *tensor, size_t n, int *index) X3_MUST;
/* [n / width][width] on disk. */
x3_status x3_build_matrix(x3_builder *b, x3_layer_desc *l, const char *tensor, size_t n, size_t width, int *index) X3_MUST;
/* The weight of a norm, centred where the family's norms are. */
x3_status x3_build_norm(x3_builder *b, x3_layer_desc *l, const char *tensor, size_t n, int *index) X3_MUST;
/* Norms, mixer and feed-forward block of number `layer`, or of a draft layer. */
x3_status x3_build_layer(x3_builder *b, x3_layer_desc *l, const char *prefix, size_t layer, bool moe, bool draft) X3_MUST;
/* gate_proj, up_proj and down_proj below a module; gate and up take input and tie, down the next ones. */
x3_status x3_build_mlp(x3_builder *b, x3_layer_desc *l, const char *module, size_t n_inner, bool bias, int input, int tie,
                       x3_mlp_desc *d) X3_MUST;
static inline bool x3_build_has_bias(x3_bias_rule rule, bool config)
{
    return rule == X3_BIAS_ALWAYS || (rule != X3_BIAS_NEVER && config);
}

/* ---- model_attention.c ---- */

#define X3_MIXER_LINEARS 9 /* and vectors, at most */
#define X3_MIXER_VECTORS 4
#define X3_MIXER_TIES 10   /* tie numbers of a mixer are smaller */

/* Options of all mixers of the family, ropes included. */
x3_status x3_build_mixer_options(x3_builder *b) X3_MUST;
/* The mixer of one layer; its inputs are numbered from 0. */
x3_status x3_build_mixer(x3_builder *b, x3_layer_desc *l, size_t layer) X3_MUST;
/* That of a draft layer: full attention, with an indexer of its own where the family has any. */
x3_status x3_build_draft_mixer(x3_builder *b, x3_layer_desc *l) X3_MUST;
/* Whether x3_build_mixer_options or x3_build_mixer reads this key for this family. */
bool x3_build_mixer_reads(const x3_family *f, const char *key);

/* ---- model_moe.c ---- */

x3_status x3_build_moe_options(x3_builder *b) X3_MUST;
bool x3_build_is_moe(const x3_builder *b, size_t layer);
/* Linears and vectors that a layer with experts may have beside its mixer. */
size_t x3_build_moe_linears(const x3_builder *b);
/* Router, shared MLP and experts; the block's input is number `input`. */
x3_status x3_build_moe(x3_builder *b, x3_layer_desc *l, int input, int tie) X3_MUST;

/* ---- model_draft.c ---- */

/* m->draft and the layer behind the last one, or m->no_draft. */
x3_status x3_build_draft(x3_builder *b) X3_MUST;
/* Config keys that say something about draft layers alone. */
bool x3_build_draft_reads(const x3_family *f, const char *key);

extern const x3_moe_family x3_moe_qwen3, x3_moe_glm4, x3_moe_mixtral;

#endif
