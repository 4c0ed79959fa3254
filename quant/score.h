/* What a pack lost: KL divergence, top-1 agreement and NLL against a reference, as the receipt of `exl3-eval score`. */
#ifndef X3_SCORE_PACK_H
#define X3_SCORE_PACK_H

#include "calib/reference.h"

typedef struct x3_score {
    size_t n_positions, n_rows, vocab, n_nonfinite;
    double kl_mean, kl_stderr, kl_median, kl_p90, kl_p99, kl_max;
    double top1, top1_stderr, top5;          /* parts of 1 */
    double nll_reference, nll_pack;          /* nats, over positions with a next token */
    double floor_kl, floor_top1;             /* the pack against itself with another order of sums */
    size_t floor_positions;
    double *row_kl;                          /* [n_rows], means */
} x3_score;

/* Scores a pack (or any checkpoint) against a reference. Standard errors are over rows. */
x3_status x3_score_pack(x3_score *out, x3_device *dev, const x3_checkpoint *pack, const x3_reference *reference,
                        const x3_progress *progress, x3_err *err) X3_MUST;
void x3_score_free(x3_score *s);

/* The receipt: stable names (design/architecture.md). */
x3_status x3_score_receipt(cJSON **out, const x3_score *s, const x3_checkpoint *pack, const x3_reference *reference,
                           const x3_device *dev, const char *command, double seconds, x3_err *err) X3_MUST;

#endif
