/* Statistics of one layer: runs its original weights over both paths and fills one Hessian for each input that linears
 * of the layer share.
 *
 * Experts: the routing of the quantized path decides which tokens an expert gets, on both paths. For the original path an
 * expert's gate and up see that path's input at the same token, and its down what the original expert makes of it, whether
 * or not the original router chose it. An expert with fewer than 2 * n_in tokens has too few for a Hessian of n_in inputs:
 * its own, A, is blended with a fallback F by count, n / (2 n_in) A + (1 - n / (2 n_in)) F. F is the Hessian of the whole
 * layer for gate and up; for down it is made of tokens spread over the text that are sent through this expert without
 * being routed to it. */
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
    size_t n_selected; /* x3_model_selected(): kept in the states behind the hidden states of a row */
} x3_layer_runner;

/* Floats of a row of states. */
size_t x3_state_floats(const x3_model *m, size_t n_cols);

x3_status x3_layer_runner_create(x3_layer_runner *r, x3_device *dev, const x3_model *m, size_t n_rows, size_t n_cols,
                                 x3_err *err) X3_MUST;
void x3_layer_runner_free(x3_layer_runner *r);
/* Bytes that it and the buffers of x3_capture_layer take, the latter for the widest layer. Hessians are not in it. */
size_t x3_layer_runner_bytes(const x3_model *m, size_t n_rows, size_t n_cols, bool both_paths);
/* Cache pages for a layer of this shape; call before using it. */
x3_status x3_layer_runner_prepare(x3_layer_runner *r, const x3_layer_desc *layer, x3_err *err) X3_MUST;
/* Rows [row, row + n) of a path: hidden states to d_x [n][n_cols][hidden], and what layers share to the batch. */
x3_status x3_load_rows(x3_layer_runner *r, x3_hidden_state *path, size_t row, size_t n, float *d_x, x3_err *err) X3_MUST;
/* Rows [row, row + n) of a path through the layer as it is now; the states after it stay in r->d_x, or are written. */
x3_status x3_run_rows(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *path, size_t row, size_t n,
                      x3_err *err) X3_MUST;
x3_status x3_store_rows(x3_layer_runner *r, x3_hidden_state *path, size_t row, size_t n, x3_err *err) X3_MUST;
/* All rows of a path through the layer as it is now; writes the states after it. */
x3_status x3_run_layer(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *path, x3_err *err) X3_MUST;

/* ---- statistics ---- */

typedef enum x3_expert_weighting {
    X3_EXPERT_WEIGHT_NONE,
    X3_EXPERT_WEIGHT_DOWN, /* tokens of down projections count by the square of their routing weight */
    X3_EXPERT_WEIGHT_ALL   /* those of gate and up too, where they are the expert's own */
} x3_expert_weighting;

typedef struct x3_expert_options {
    bool own; /* gate and up of an expert on its own tokens; else all of a layer share the layer's Hessian */
    x3_expert_weighting weighting;
} x3_expert_options;

typedef struct x3_layer_stats {
    x3_device *dev;
    const x3_layer_desc *layer;
    x3_expert_options options;
    bool both;             /* with an original path that differs */
    x3_hessian **hessians; /* [layer->n_inputs]; NULL: not captured, or released */
    size_t *tokens;        /* [n_experts], of passes that were made */
    size_t n_experts;      /* 0: a layer without */
    size_t n_done;         /* experts of the passes that were made */
    bool dense_done;
} x3_layer_stats;

/* No Hessian is held yet. */
x3_status x3_layer_stats_create(x3_layer_stats *s, x3_device *dev, const x3_layer_desc *layer,
                                const x3_expert_options *options, bool both_paths, x3_err *err) X3_MUST;
void x3_layer_stats_free(x3_layer_stats *s);
/* The finished Hessian that linear `index` is quantized with. */
x3_hessian *x3_layer_stats_hessian(const x3_layer_stats *s, size_t index);
/* Releases the Hessians of the experts captured so far. */
void x3_layer_stats_release_experts(x3_layer_stats *s);
/* Tokens below which an expert's Hessian of n_in inputs is blended. */
size_t x3_expert_full_tokens(size_t n_in);
/* Bytes of the Hessians of one expert, and of the layer's other inputs. */
uint64_t x3_layer_stats_bytes(const x3_layer_desc *layer, const x3_expert_options *options, bool both_paths,
                              uint64_t *of_expert);

/* One pass: the first one captures every input that is not an expert's, every one captures experts
 * [s->n_done, end_expert). The pass with the last expert (the only one in a layer without) writes the states after the
 * layer of the original path. `original` NULL: no original path, then C = A and targets stay W. If it has no states yet
 * because both paths are still equal (layer 0), `first` is set and its states come from the quantized path's run.
 * The quantized path's states are only read. The layer's weights are the original ones in every pass. Sums do not depend
 * on how the experts are cut into passes. */
x3_status x3_capture_layer(x3_layer_runner *r, const x3_layer_weights *w, x3_hidden_state *quantized,
                           x3_hidden_state *original, bool first, x3_layer_stats *s, size_t end_expert, x3_err *err) X3_MUST;

#endif
