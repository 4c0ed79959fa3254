/* A whole model over many rows with one layer's weights on the device at a time. */
#ifndef X3_STREAM_H
#define X3_STREAM_H

#include "runtime/forward.h"

/* Called after every layer (done = 1 .. total). NULL: none. */
typedef struct x3_progress {
    void (*step)(void *arg, size_t done, size_t total, const char *what);
    void *arg;
} x3_progress;

/* Sequences that one batch holds: at most 8,192 positions, at least one sequence. A function of n_cols alone, so that
 * results do not depend on anything else. */
size_t x3_stream_batch(size_t n_rows, size_t n_cols);

/* hidden [n_rows][n_cols][hidden] in host memory := the output of the final norm for ids [n_rows][n_cols], every row a
 * sequence of its own from position 0. */
x3_status x3_stream_hidden(x3_device *dev, const x3_checkpoint *c, const int32_t *ids, size_t n_rows, size_t n_cols,
                           float *hidden, const x3_progress *progress, x3_err *err) X3_MUST;

#endif
