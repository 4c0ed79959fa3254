/* From a measurement and a budget to bits per tensor. */
#ifndef X3_PLAN_H
#define X3_PLAN_H

#include "formats/recipe.h"
#include "quant/measure.h"

typedef struct x3_plan_options {
    double bits;         /* mean of the body, or 0 */
    uint64_t size_bytes; /* of the pack folder, or 0; one of the two is set */
    int head_bits, min_bits, max_bits;
    x3_tie tie;
    const char *const *sets; /* "PATTERN=K": linears whose names match the glob get K; later ones win */
    size_t n_sets;
} x3_plan_options;

#define X3_UNMEASURED_K 6

typedef struct x3_plan {
    x3_allocation allocation;
    double predicted_kl, uniform_kl; /* sums of costs: the plan, and the uniform allocation of the same target */
    bool is_uniform;                 /* the uniform allocation was no worse, so it is the plan */
    size_t n_unmeasured;             /* linears that did nothing on the rows that were scored, as a sparse indexer below its
                                        top-k: they get X3_UNMEASURED_K, within the limits */
    uint64_t folder_bytes;           /* weights, side files, descriptions; the receipt at an estimate */
} x3_plan;

/* Errors name the option: a budget too small for min_bits, a pattern that matches nothing, K outside 1 to 8. */
x3_status x3_plan_create(x3_plan *out, const x3_checkpoint *source, const x3_measurement *m, const x3_plan_options *options,
                         x3_err *err) X3_MUST;
void x3_plan_free(x3_plan *p);

/* The recipe of an allocation, in the order of the model. */
x3_status x3_recipe_of(x3_recipe **out, const x3_model *m, const x3_allocation *a, x3_err *err) X3_MUST;
/* The allocation that a recipe file names; it must cover the linears of the model exactly. */
x3_status x3_allocation_of_recipe(x3_allocation *out, const x3_model *m, const char *path, x3_err *err) X3_MUST;

#endif
