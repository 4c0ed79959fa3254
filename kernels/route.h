/* The choice of experts for one row: scores from router logits, the best of them, their weights. */
#ifndef X3_ROUTE_H
#define X3_ROUTE_H

#include "formats/base.h"

typedef enum x3_route_scores {
    X3_ROUTE_SOFTMAX, /* over all experts */
    X3_ROUTE_SIGMOID
} x3_route_scores;

typedef struct x3_route_rule {
    size_t n_experts, n_chosen;
    x3_route_scores scores;
    bool normalize;                   /* weights are divided by the sum of the chosen ones */
    float scale;                      /* then multiplied by this */
    size_t n_groups, n_chosen_groups; /* equal groups of experts; only experts of the best groups can be chosen. 1, 1: none.
                                       * A group's score is the sum of its two best choice scores */
} x3_route_rule;

/* ids, weights [n_chosen], best first, ties to the lower number. The choice is by score + correction (may be NULL), the
 * weights are from scores alone. ids are always n_chosen different experts; with a logit that is not finite the weights
 * are not finite either, so that what is wrong stays visible. scratch [3 * n_experts]. Float32, sums in the order stated. */
void x3_route_row_ref(const x3_route_rule *rule, const float *logits, const float *correction, int32_t *ids, float *weights,
                      float *scratch);

#endif
