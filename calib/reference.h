/* A reference for scoring: token rows, the hidden states of the BF16 model after its final norm, and its head, so that
 * the model itself is not needed again. The file (.x3r) is a safetensors file:
 *   ids       I32  [rows][ctx]
 *   hidden    F32  [rows][ctx][hidden]
 *   head      the head's own type [vocab][hidden]
 *   head_bias F32  [vocab], where the model has one
 *   receipt   U8   JSON: source, texts and how it was made */
#ifndef X3_REFERENCE_H
#define X3_REFERENCE_H

#include "calib/corpus.h"
#include "runtime/stream.h"

typedef struct x3_reference_options {
    const char *const *texts;
    size_t n_texts;
    size_t ctx, positions, skip;
} x3_reference_options;

typedef struct x3_reference {
    char *path;
    x3_safetensors *st;
    cJSON *receipt;
    uint64_t hash; /* XXH3 of the file */
    size_t n_rows, ctx, hidden, vocab;
    int32_t *ids;  /* [n_rows][ctx] */
    const x3_tensor *states, *head, *head_bias;
} x3_reference;

/* Runs the model once and writes the file, atomically. */
x3_status x3_reference_create(const char *out_path, x3_device *dev, const x3_checkpoint *model,
                              const x3_reference_options *options, const x3_progress *progress, x3_err *err) X3_MUST;

/* Opens and checks a file. */
x3_status x3_reference_open(x3_reference **out, const char *path, x3_err *err) X3_MUST;
void x3_reference_close(x3_reference *r);

/* Hidden states of positions [first, first + n) of row `row`, to host memory. */
x3_status x3_reference_states(const x3_reference *r, size_t row, size_t first, size_t n, float *out, x3_err *err) X3_MUST;
/* The head as a weight on a device; free with x3_linear_free. */
x3_status x3_reference_head(const x3_reference *r, x3_device *dev, x3_weight *head, x3_err *err) X3_MUST;

#endif
