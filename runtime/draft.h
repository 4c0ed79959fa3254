/* What the draft layer of a model (x3_draft_desc) reads, made from what the model's head reads. The layer itself runs
 * through x3_forward_layer like any other; position p of it is the pair of the state at p and the embedding of token p + 1,
 * so a row of n_cols tokens gives n_cols - 1. */
#ifndef X3_DRAFT_H
#define X3_DRAFT_H

#include "runtime/weights.h"

typedef struct x3_draft {
    x3_device *dev;
    const x3_checkpoint *c;
    size_t max_rows, n_cols;
    float *d_embed_norm, *d_hidden_norm; /* weights of norms */
    float *d_short;  /* [max_rows][n_cols - 1][hidden] */
    float *host;     /* the same, for embeddings */
} x3_draft;

/* For up to max_rows rows of n_cols >= 2 tokens. c has a draft layer and uses it. */
x3_status x3_draft_create(x3_draft **out, x3_device *dev, const x3_checkpoint *c, size_t max_rows, size_t n_cols,
                          x3_err *err) X3_MUST;
void x3_draft_free(x3_draft *d);
/* Device bytes that x3_draft_create takes. */
size_t x3_draft_bytes(const x3_model *m, size_t max_rows, size_t n_cols);
/* d_out [n_rows][n_cols - 1][2 hidden]: the input of join. ids [n_rows][n_cols]; d_x [n_rows][n_cols][hidden]: the output of
 * the model's final norm. */
x3_status x3_draft_inputs(x3_draft *d, const int32_t *ids, size_t n_rows, const float *d_x, float *d_out, x3_err *err) X3_MUST;

#endif
