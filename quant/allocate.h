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
    double target_bits, body_bits; /* asked for; sum K in out / sum in out */
    uint64_t hash;  /* XXH3 over "name K" lines */
} x3_allocation;

/* Every linear gets floor(bits); the rest goes to whole sets of linears that are tied, from both ends of the stack
 * inwards, so that the mean comes as close to `bits` as a set allows and never above. bits in [1, 8]. */
x3_status x3_allocate_uniform(x3_allocation *out, const x3_model *m, double bits, int head_K, x3_tie tie, x3_err *err) X3_MUST;
void x3_allocation_free(x3_allocation *a);

#endif
