/* The inside of model.c, shared with the files that build one layer kind each. A family is a row of data; a builder turns a
 * row and a config into descriptors. */
#ifndef X3_MODEL_INTERNAL_H
#define X3_MODEL_INTERNAL_H

#include "runtime/model.h"

typedef enum x3_bias_rule { X3_BIAS_NEVER, X3_BIAS_ALWAYS, X3_BIAS_CONFIG } x3_bias_rule;
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

/* A family. What a row does not name is zero: no bias, no window, plain attention, norms as stored. */
typedef struct x3_family {
    const char *model_type;
    x3_bias_rule qkv_bias, o_bias, mlp_bias; /* X3_BIAS_CONFIG: attention_bias, mlp_bias */
    x3_norm_rule qk_norm;                    /* RMS norm of each query and key head before rope */
    x3_window_rule window;
    x3_attention_rule attention;
    bool centred_norms;      /* norms store gamma - 1 (not the output norm of a delta net) */
    bool gated_attention;    /* q_proj gives query and output gate of each head */
    x3_delta_rule delta_net;
    x3_indexer_rule indexer;
    bool partial_rope;       /* the config may have less than a whole head rotated, */
    double rotated_part;     /* and this part where it does not say; 0: all */
    size_t window_kv_factor; /* KV heads of window layers over num_key_value_heads, where the config does not say */
    bool window_sinks;       /* sink bias on window layers, where the config does not say */
    bool value_scale;        /* attention_value_scale; 0.707 where the config does not say */
    const x3_carried *carried; /* ends with a NULL prefix; NULL: none */
} x3_family;

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
/* gate_proj, up_proj and down_proj below a module; gate and up take input and tie, down the next ones. */
x3_status x3_build_mlp(x3_builder *b, x3_layer_desc *l, const char *module, size_t n_inner, bool bias, int input, int tie,
                       x3_mlp_desc *d) X3_MUST;
static inline bool x3_build_has_bias(x3_bias_rule rule, bool config)
{
    return rule == X3_BIAS_ALWAYS || (rule == X3_BIAS_CONFIG && config);
}

/* ---- model_attention.c ---- */

#define X3_MIXER_LINEARS 9 /* and vectors, at most */
#define X3_MIXER_VECTORS 4
#define X3_MIXER_TIES 10   /* tie numbers of a mixer are smaller */

/* Options of all mixers of the family, ropes included. */
x3_status x3_build_mixer_options(x3_builder *b) X3_MUST;
/* The mixer of one layer; its inputs are numbered from 0. */
x3_status x3_build_mixer(x3_builder *b, x3_layer_desc *l, size_t layer) X3_MUST;
/* Whether x3_build_mixer_options or x3_build_mixer reads this key for this family. */
bool x3_build_mixer_reads(const x3_family *f, const char *key);

#endif
