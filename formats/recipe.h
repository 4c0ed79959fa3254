/* Bits per tensor as a readable YAML file, with the fields of exllamav3's recipes:
 *
 *     target_bpw: 3.0          what was asked for
 *     achieved_bpw: 2.9991     mean over the padded weights of the body
 *     head_bits: 6             0: the head is left as it is
 *     tensors:
 *       model.layers.0.self_attn.q_proj: 4
 *
 * The names are those of modules; the head is not among them. Other fields are kept out and ignored when read. */
#ifndef X3_RECIPE_H
#define X3_RECIPE_H

#include "formats/base.h"

typedef struct x3_recipe_tensor {
    char *name;
    int bits;
} x3_recipe_tensor;

typedef struct x3_recipe {
    double target_bpw, achieved_bpw;
    int head_bits;
    x3_recipe_tensor *tensors; /* in the order of the file */
    size_t n_tensors;
} x3_recipe;

/* Every field that is there must have its type and range (bits 1 to 8, head 0 to 8); head_bits and tensors must be
 * there; a name that stands twice is an error. Messages name the file and the line. */
x3_status x3_recipe_load(x3_recipe **out, const char *path, x3_err *err) X3_MUST;
/* Writes atomically. */
x3_status x3_recipe_save(const x3_recipe *recipe, const char *path, x3_err *err) X3_MUST;
void x3_recipe_free(x3_recipe *recipe);

#endif
