/* Small random models written by the tests themselves: config, byte-level tokenizer without merges, safetensors. */
#ifndef X3_TINY_MODEL_H
#define X3_TINY_MODEL_H

#include <stddef.h>
#include <stdint.h>

#include "formats/safetensors.h"

/* How the experts of a layer lie on disk. */
typedef enum x3_tiny_stack { X3_TINY_SEPARATE, X3_TINY_OUT_IN, X3_TINY_IN_OUT } x3_tiny_stack;

typedef struct x3_tiny {
    const char *model_type; /* "llama" */
    size_t hidden, inner, heads, kv_heads, head_dim, layers, vocab;
    bool tied, attention_bias, qk_norm;
    x3_dtype dtype;        /* of the weights: X3_BF16, X3_F16, X3_F32 or X3_F8_E4M3 (with block scales) */
    const char *more_config; /* extra members for config.json: "\"x\": 1," */
    const char *drop;      /* tensor to leave out */
    const char *extra;     /* name of an additional tensor [4] */
    const char *poison;    /* tensor whose element 5 becomes NaN */
    size_t shards;         /* 0 or 1: one file without an index */
    const char *no_rope;   /* anything: leave rope_theta out */
    /* qwen3_moe, glm4_moe, mixtral */
    size_t experts, chosen, expert_inner, shared, dense; /* dense: layers before the first with experts,
                                                                  * qwen3_moe at most 1 */
    x3_tiny_stack stack;
    const float *correction; /* [experts], of every layer; NULL: zeros (glm4_moe) */
} x3_tiny;

#define X3_TINY_DEFAULTS                                                                                        \
    ((x3_tiny){.model_type = "llama", .hidden = 128, .inner = 128, .heads = 2, .kv_heads = 1, .head_dim = 64,   \
               .layers = 2, .vocab = 300, .dtype = X3_BF16})

/* The same with experts: 8 of 64, 2 chosen; glm4_moe with a shared one. */
#define X3_TINY_MOE(type)                                                                                       \
    ((x3_tiny){.model_type = type, .hidden = 128, .inner = 128, .heads = 2, .kv_heads = 1, .head_dim = 64,      \
               .layers = 2, .vocab = 300, .dtype = X3_BF16, .experts = 8, .chosen = 2, .expert_inner = 64,      \
               .shared = 1, .qk_norm = true})

/* Writes the folder (created); fails the test on any error. */
void x3_tiny_write(const char *dir, const x3_tiny *t);
/* tokenizer.json in which every byte is a token, its id the byte. */
void x3_tiny_tokenizer(const char *dir);
/* A text of n random letters, blanks and line ends. */
void x3_tiny_text(const char *path, size_t n, uint64_t seed);
/* XXH3 of a pack's only shard. */
uint64_t x3_test_shard_hash(const char *pack);
/* Writes a file. */
void x3_test_write(const char *path, const void *data, size_t n);

#endif
