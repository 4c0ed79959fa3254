/* Statistics of one layer: runs its original weights over both paths and fills one Hessian for each input that linears
 * of the layer share. */
#ifndef X3_CAPTURE_H
#define X3_CAPTURE_H

#include "calib/hessian.h"
#include "calib/hidden_state.h"
#include "runtime/stream.h"

/* Everything that running rows through a layer needs; made once for a job. */
typedef struct x3_layer_runner {
    x3_device *dev;
    x3_forward *f;
    x3_full_batch batch;
    x3_kv_layer kv; /* of the current layer */
    float *d_x;
    size_t n_rows, n_cols, at_once, hidden;
} x3_layer_runner;

x3_status x3_layer_runner_create(x3_layer_runner *r, x3_device *dev, const x3_model *m, size_t n_rows, size_t n_cols,
                                 x3_err *err) X3_MUST;
void x3_layer_runner_free(x3_layer_runner *r);
/* Bytes that it and the buffers of x3_capture_layer take, the latter for the widest layer. */
size_t x3_layer_runner_bytes(const x3_model *m, size_t n_rows, size_t n_cols, bool both_paths);
/* Cache pages for a layer of this shape; call before using it. */
x3_status x3_layer_runner_prepare(x3_layer_runner *r, const x3_layer_desc *layer, x3_err *err) X3_MUST;

/* hessians[i] for input i of the layer, created here, finished. `original` NULL: no original path, then C = A and
 * targets stay W. Of the original path the states after the layer are written; if it has none yet because both paths
 * are still equal (layer 0), `first` is set and its states come from the quantized path's run.
 * The quantized path's states are only read. */
x3_status x3_capture_layer(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *quantized,
                           x3_hidden_state *original, bool first, x3_hessian **hessians, x3_err *err) X3_MUST;
/* Runs the layer as it is now over a path and writes the states after it. */
x3_status x3_run_layer(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *path, x3_err *err) X3_MUST;

#endif
