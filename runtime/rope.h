/* Rotary position embedding: reading its variant from a config, and its tables.
 * Mathematics as in transformers' modeling_rope_utils.py; Su et al., 2021 (RoPE); Peng et al., 2023 (YaRN). */
#ifndef X3_ROPE_H
#define X3_ROPE_H

#include "formats/json.h"

typedef enum x3_rope_type {
    X3_ROPE_DEFAULT, X3_ROPE_LINEAR, X3_ROPE_DYNAMIC, X3_ROPE_YARN, X3_ROPE_LONGROPE, X3_ROPE_LLAMA3
} x3_rope_type;

#define X3_ROPE_PAIRS_MAX 256

typedef struct x3_rope_desc {
    x3_rope_type type;
    double theta;
    size_t dim;              /* part of a head that the config names; may be odd */
    size_t n_rotated;        /* dimensions that are rotated: dim, or one more when it is odd, as in transformers */
    double factor;
    double original_positions; /* of the model before it was stretched */
    double max_positions;
    double low_freq_factor, high_freq_factor;            /* llama3 */
    double beta_fast, beta_slow, mscale, mscale_all_dim; /* yarn */
    double attention_factor;                             /* 0: derived */
    bool truncate;                                       /* yarn: whole correction range */
    size_t n_factors;                                    /* longrope: pairs in the lists below */
    float short_factor[X3_ROPE_PAIRS_MAX], long_factor[X3_ROPE_PAIRS_MAX];
} x3_rope_desc;

/* Reads the parameters for heads of head_dim from the text config: `rope_parameters` (new; with one object a layer type
 * when layer_type is not NULL and the object has it), or `rope_theta` with `rope_scaling` (old). A base that is named
 * nowhere, an unknown type, or two places that disagree are errors. `partial` is the part of a head that is rotated
 * when the config does not say (1 for most families). */
x3_status x3_rope_read(x3_rope_desc *rope, const cJSON *text, const char *layer_type, size_t head_dim, double partial,
                       const char *where, x3_err *err) X3_MUST;

/* Factor on cos and sin. */
double x3_rope_attention_factor(const x3_rope_desc *rope, size_t n_positions);
/* table[position][0] = cosines, [1] = sines, n_rotated / 2 each, for sequences of n_positions. Angles are float32
 * products as in transformers. X3_ERR_UNSUPPORTED for positions that the variant cannot reach. */
x3_status x3_rope_table(const x3_rope_desc *rope, size_t n_positions, float *table, x3_err *err) X3_MUST;

#endif
