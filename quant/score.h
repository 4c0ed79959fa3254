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

/* What the receipt of another pack says, for a comparison. */
typedef struct x3_other_score {
    uint64_t pack;  /* XXH3 of that pack */
    double *row_kl; /* [n_rows] of the reference */
} x3_other_score;

/* `path`: the receipt. One of another reference, or of other rows, is refused: to be read before the work of a score. */
x3_status x3_other_score_read(x3_other_score *out, const x3_reference *reference, const char *path, x3_err *err) X3_MUST;
void x3_other_score_free(x3_other_score *other);

/* This pack's KL less that of another pack scored against the same reference, row by row: text that is hard for both
 * cancels out, so the standard error is smaller than that of two means. */
typedef struct x3_paired {
    double difference, stderr_; /* nats; below 0: this pack is better */
    uint64_t pack;              /* XXH3 of the other pack */
} x3_paired;

x3_status x3_score_against(x3_paired *out, const x3_score *s, const x3_other_score *other, x3_err *err) X3_MUST;

/* The receipt: stable names (design/architecture.md), and kl.rows, the mean of each row. `against` may be NULL. */
x3_status x3_score_receipt(cJSON **out, const x3_score *s, const x3_checkpoint *pack, const x3_reference *reference,
                           const x3_paired *against, const x3_device *dev, const char *command, double seconds,
                           x3_err *err) X3_MUST;

#endif
