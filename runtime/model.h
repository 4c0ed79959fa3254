/* A model as data: config.json becomes an array of layer descriptors. The forward pass, calibration, quantization and
 * the pack writer all walk these; none of them knows a family by name.
 *
 * A layer is two blocks, each added to the residual stream: a mixer over positions and a feed-forward block. A linear
 * of a layer is named by its index in `linears`, a vector (norm weight, bias of a router, ...) by its index in
 * `vectors`; a descriptor of a layer kind holds such indices. */
#ifndef X3_MODEL_H
#define X3_MODEL_H

#include "formats/hf_config.h"
#include "kernels/route.h"
#include "runtime/rope.h"

/* How the matrices of a tensor of experts lie: told by the family, or by the shape where that can tell. */
typedef enum x3_stack_order {
    X3_STACK_OUT_IN, /* [n_experts][outputs][inputs] */
    X3_STACK_IN_OUT, /* [n_experts][inputs][outputs] */
    X3_STACK_EITHER  /* by the shape; a square one is refused */
} x3_stack_order;

/* A weight's place in a tensor that holds a matrix for every expert: output o of the linear is output first + o * step
 * of matrix `index`. Checkpoints have either this tensor or <name>.weight. */
typedef struct x3_stack_desc {
    const char *tensor;
    size_t n_stack, index;
    size_t n_outputs, first, step; /* n_outputs: of the whole matrix, gate and up together */
    x3_stack_order order;
} x3_stack_desc;

typedef struct x3_linear_desc {
    const char *name; /* of the module: "model.layers.0.self_attn.q_proj"; its tensor is <name>.weight [n_out][n_in] */
    size_t n_in, n_out;
    bool has_bias;
    bool quantized; /* becomes an EXL3 group in a pack */
    int input;      /* linears of a layer with the same number share their input, so their Hessian and signs */
    int tie;        /* linears of a layer with the same number get the same K */
    int tie_fused;  /* the same under --tie fused */
    const x3_stack_desc *stack; /* or NULL */
} x3_linear_desc;

typedef struct x3_vector_desc {
    const char *name; /* of the tensor */
    size_t n;
    size_t width; /* 0: [n] on disk, else [n / width][width]; dimensions of 1 do not count */
    float add;    /* added when loaded: 1 for norms that store gamma - 1 */
} x3_vector_desc;

typedef enum x3_mixer_kind { X3_MIXER_GQA, X3_MIXER_DELTA_NET, X3_MIXER_MLA } x3_mixer_kind;
typedef enum x3_ffn_kind { X3_FFN_MLP, X3_FFN_MOE } x3_ffn_kind;

/* Attention with keys and values of n_kv_heads heads. */
typedef struct x3_gqa_desc {
    size_t n_heads, n_kv_heads, head_dim, v_dim;
    int q, k, v, o;         /* linears; k and v -1: q gives queries, keys and values, one after the other */
    bool gated;             /* q gives the query and then a gate for each head; sigmoid(gate) scales the output */
    int q_norm, k_norm;     /* vectors, -1: none */
    int sinks;              /* vector [n_heads]: one more logit in the softmax; -1: none */
    int rope;               /* index into the model's ropes, -1: none */
    float scale, value_scale;
    size_t window;          /* 0: all earlier positions */
} x3_gqa_desc;

/* Gated delta net (Yang et al., 2024): a short causal convolution over q, k and v, then a recurrent state
 * [k_dim][v_dim] of each value head. Value head h uses key head h / (n_v_heads / n_k_heads). */
typedef struct x3_delta_net_desc {
    size_t n_k_heads, n_v_heads, k_dim, v_dim, kernel;
    int qkv, z, b, a, o; /* linears; z and a -1: qkv gives q, k, v and z, and b gives b and a, key head by key head */
    int conv;            /* vectors: [channels][kernel] */
    int a_log, dt_bias;  /* [n_v_heads] */
    int norm;            /* [v_dim] */
} x3_delta_net_desc;

/* Selection of the positions that a query attends to (DeepSeek sparse attention). */
typedef struct x3_indexer_desc {
    size_t topk;         /* 0: no selection */
    size_t n_heads, dim; /* n_heads 0: the selection of the last layer that owns an indexer */
    bool interleaved;    /* rope on the first dimensions, pairs (2 i, 2 i + 1) */
    int q, k, weights;   /* linears */
    int k_norm, k_norm_bias; /* vectors [dim] of a layer norm */
} x3_indexer_desc;

/* Multi-head latent attention (DeepSeek-V2, 2024): keys and values of all heads are linear in one latent, which is what
 * the cache holds, beside one rotated key part that the heads share. */
typedef struct x3_mla_desc {
    size_t n_heads, q_rank, kv_rank, nope_dim, rope_dim, v_dim; /* q_rank 0: queries straight from the hidden state */
    int q_a, q_b, kv_a, kv_b, o; /* linears; q_a -1 when q_rank is 0 */
    int q_norm, kv_norm;         /* vectors; q_norm -1 likewise */
    int rope;
    bool interleaved;
    float scale, latent_eps;     /* eps of the two norms */
    x3_indexer_desc index;
} x3_mla_desc;

typedef struct x3_mlp_desc {
    size_t n_inner;
    int gate, up, down;
} x3_mlp_desc;

/* Experts of which a router chooses some for every row, and an MLP for all rows beside them where the family has one. */
typedef struct x3_moe_desc {
    x3_route_rule rule;
    size_t n_inner;   /* of an expert */
    int router;       /* linear, never quantized */
    int correction;   /* vector [n_experts], -1: none */
    int first_expert; /* linear: gate, up and down of expert e are first_expert + 3 e, + 1, + 2 */
    bool has_shared;
    x3_mlp_desc shared;
    int shared_gate;  /* linear with one output, never quantized: its sigmoid scales the shared MLP; -1: none */
} x3_moe_desc;

typedef struct x3_layer_desc {
    const char *prefix; /* "model.layers.0" */
    x3_linear_desc *linears;
    size_t n_linears, n_inputs;
    x3_vector_desc *vectors;
    size_t n_vectors;
    int mixer_norm, ffn_norm; /* vectors */
    x3_mixer_kind mixer;
    x3_gqa_desc gqa;
    x3_delta_net_desc delta;
    x3_mla_desc mla;
    x3_ffn_kind ffn;
    x3_mlp_desc mlp;
    x3_moe_desc moe;
} x3_layer_desc;

/* Tensors that the text model does not use (towers, draft layers): a pack carries them byte for byte, but for a draft layer
 * that it is told to quantize. */
typedef struct x3_carried {
    const char *prefix, *what;
} x3_carried;

/* A layer that guesses one token further (multi-token prediction, DeepSeek-V3, 2024, section 2.2). Its input at a position is
 * join([embed_norm(embedding of the next token), hidden_norm(output of the final norm)]); out_norm and a head follow it. */
typedef struct x3_draft_desc {
    x3_linear_desc join; /* [hidden][2 hidden] */
    x3_linear_desc head; /* its own head; name NULL: it has none, the model's serves it. A checkpoint may leave it out */
    x3_vector_desc embed_norm, hidden_norm, out_norm;
} x3_draft_desc;

typedef struct x3_model {
    const char *model_type;
    size_t hidden, vocab, max_positions;
    float norm_eps;
    x3_layer_desc *layers;    /* [n_layers], and one more, the draft's, where there is one */
    size_t n_layers;
    x3_draft_desc *draft;     /* NULL: none, or none that this version knows */
    const char *no_draft;     /* why */
    x3_rope_desc *ropes;
    size_t n_ropes;
    const char *embed_name;   /* tensor [vocab][hidden] */
    x3_vector_desc final_norm;
    x3_linear_desc head;      /* "lm_head" */
    bool tied;                /* the head's weight is the embedding */
    size_t shared_topk;       /* positions a query that layers without an indexer take over from one with it; 0: none */
    x3_carried *carried;
    size_t n_carried;
    x3_arena arena;
} x3_model;

/* Builds the descriptors. An unknown model_type, an option that changes the mathematics in a way that is not
 * implemented, a missing or impossible value is an error that names the key and the value.
 * `ignored` (NULL-terminated, may be NULL) lists config keys that the user takes responsibility for. */
x3_status x3_model_create(x3_model **out, const x3_hf_config *config, const char *const *ignored, x3_err *err) X3_MUST;
void x3_model_free(x3_model *m);

/* Names of the supported model types, separated by commas, cut to size. */
void x3_model_types(char *out, size_t size);

/* What a tensor that no descriptor names is carried as, or NULL when it is not part of such a model. */
const char *x3_model_carries(const x3_model *m, const char *tensor);

/* Positions (int32) a row that layers hand to later layers beside the residual stream, for sequences of n_positions:
 * see x3_batch.d_selected. 0 for most models, and for sequences that an indexer would select whole. */
size_t x3_model_selected(const x3_model *m, size_t n_positions);

/* The expert that linear `index` of a layer belongs to, or -1. */
int x3_layer_expert(const x3_layer_desc *l, size_t index);

/* Every linear of the model, layer by layer, the head last: *layer is n_layers for the head. NULL past the end. The draft
 * layer's are not among them. */
const x3_linear_desc *x3_model_linear(const x3_model *m, size_t index, size_t *layer);
/* Those of the draft layer: join, the layer's, its own head where it may have one. NULL past the end. */
const x3_linear_desc *x3_model_draft_linear(const x3_model *m, size_t index);
/* Layers with the draft's. */
static inline size_t x3_model_all_layers(const x3_model *m)
{
    return m->n_layers + (m->draft != NULL);
}

#endif
