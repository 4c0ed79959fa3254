/* Comparing two rows of logits. */
#ifndef X3_SCORE_H
#define X3_SCORE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct x3_score_position {
    double kl;       /* KL(reference || pack) in nats, float64 sums over the whole vocabulary */
    double nll_reference, nll_pack; /* -log p(next token); 0 where there is none */
    bool finite;     /* both rows of logits are; the rest is meaningless if not */
    bool top1;       /* the most probable token is the same; ties go to the lower id */
    bool top5;       /* the reference's most probable token is among the pack's five */
} x3_score_position;

/* next < 0: no next token. */
void x3_score_row_ref(const float *reference, const float *pack, size_t vocab, int32_t next, x3_score_position *out);

#endif
