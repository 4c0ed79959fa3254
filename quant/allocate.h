/* Bits of every linear. Sizes are padded: K * in * out / 8 bytes a trellis. */
#ifndef X3_ALLOCATE_H
#define X3_ALLOCATE_H

#include "runtime/model.h"

typedef enum x3_tie { X3_TIE_DEFAULT, X3_TIE_FUSED, X3_TIE_NONE } x3_tie;

bool x3_tie_parse(const char *name, x3_tie *out);
const char *x3_tie_name(x3_tie tie);

typedef struct x3_allocation {
    size_t n;       /* linears of the layers, in the order of x3_model_linear; the head is not among them */
    uint8_t *K;     /* [n]; 0: not quantized */
    int head_K;     /* 0: the head stays as it is */
    int draft_K;    /* of all linears of the draft layer; 0, as every allocation is made: it stays as it is */
    double target_bits, body_bits; /* asked for; sum K in out / sum in out */
    uint64_t hash;  /* XXH3 over "name K" lines */
} x3_allocation;

/* Every linear gets floor(bits); the rest goes to whole sets of linears that are tied, from both ends of the stack
 * inwards, so that the mean comes as close to `bits` as a set allows and never above. bits in [1, 8]. */
x3_status x3_allocate_uniform(x3_allocation *out, const x3_model *m, double bits, int head_K, x3_tie tie, x3_err *err) X3_MUST;

/* What a planned allocation weighs. */
typedef struct x3_plan_request {
    x3_tie tie;
    int min_K, max_K, head_K;
    uint64_t budget;         /* sum of K * padded weights, in bits */
    const double (*cost)[8]; /* [n][K - 1]: what linear i adds to the end KL at K bits; finite */
    const uint8_t *fixed;    /* [n]: K that the user has set, 0: free; NULL: all free */
} x3_plan_request;

/* Makes the sum of costs small under the budget: from min_K upwards, always the raise that saves most a bit, until none
 * fits; then single exchanges while they save anything (at most 4,000, and none for models with linears of 256 sizes).
 * Fixed linears of one set must agree; a free one in a set with a fixed one takes its K. Less budget than min_K and the
 * fixed ones need is an error that names both. */
x3_status x3_allocate_planned(x3_allocation *out, const x3_model *m, const x3_plan_request *request, x3_err *err) X3_MUST;
/* The K of a list of names, which must be exactly the quantizable linears of the layers; the first few that are missing,
 * or unknown, are named. `where` is the file for messages. */
x3_status x3_allocate_named(x3_allocation *out, const x3_model *m, const char *const *names, const int *bits, size_t n,
                            int head_K, double target_bits, const char *where, x3_err *err) X3_MUST;

/* Sum of the costs of an allocation. */
double x3_allocation_cost(const x3_allocation *a, const double (*cost)[8]);
/* Weights of all quantizable linears of the layers, padded. */
uint64_t x3_body_weights(const x3_model *m);
void x3_allocation_free(x3_allocation *a);

#endif
