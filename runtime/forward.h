/* The forward pass, one layer at a time over a batch of sequences. The same functions serve calibration, evaluation and
 * generation. */
#ifndef X3_FORWARD_H
#define X3_FORWARD_H

#include "runtime/weights.h"

/* An input of linears, seen before the first linear that reads it (x3_linear_desc.input) runs. */
typedef struct x3_captured {
    const x3_layer_desc *layer;
    int input;
    const float *d_x; /* [n_rows][n], belongs to the forward pass and must not be changed */
    size_t n_rows, n;
    /* of an expert's inputs; else expert is -1 and the rows are all rows of the batch in order */
    int expert;
    const int32_t *d_rows; /* [n_rows]: the row of the batch */
    const float *weights;  /* host [n_rows]: the routing weight, scaling factor included */
} x3_captured;

typedef x3_status (*x3_capture_fn)(void *arg, const x3_captured *input, x3_err *err);

typedef struct x3_forward {
    x3_device *dev;
    const x3_model *model;
    size_t max_rows, max_positions; /* of a batch; of a sequence */
    float **d_ropes;                /* [model->n_ropes], tables for max_positions */
    float *d_scratch;               /* shared by the layer kinds, which carve it up anew each call */
    size_t scratch_floats;
    x3_capture_fn capture; /* NULL: none */
    void *capture_arg;
    size_t first_expert, end_expert; /* only these are computed; anything but all is for captures: the layer's output is
                                      * then not complete */
} x3_forward;

x3_status x3_forward_create(x3_forward **out, x3_device *dev, const x3_model *model, size_t max_rows,
                            size_t max_positions, x3_err *err) X3_MUST;
void x3_forward_free(x3_forward *f);
/* Device bytes that x3_forward_create takes. */
size_t x3_forward_bytes(const x3_model *model, size_t max_rows, size_t max_positions);

/* d_x [n_rows][hidden] := the residual stream after the layer. kv is this layer's cache. */
x3_status x3_forward_layer(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, x3_kv_layer *kv, float *d_x,
                           x3_err *err) X3_MUST;

/* Runs linear `index` of a layer, telling the capture hook about a new input. d_y [n_rows][n_out]. */
x3_status x3_forward_linear(x3_forward *f, const x3_layer_weights *w, int index, const float *d_x, size_t n_rows,
                            float *d_y, x3_err *err) X3_MUST;
/* The same for n linears (at most X3_FORWARD_LINEARS) that share an input, which the device may take together. */
#define X3_FORWARD_LINEARS 4
x3_status x3_forward_linears(x3_forward *f, const x3_layer_weights *w, const int *indices, size_t n, const float *d_x, size_t n_rows,
                             float *const *d_y, x3_err *err) X3_MUST;

/* Layer kinds: d_in [n_rows][hidden] is the normed input, d_out [n_rows][hidden] what is added to the stream. d_scratch
 * holds at least the floats that the kind's _scratch function names. */
x3_status x3_gqa_forward(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, x3_kv_layer *kv,
                         const float *d_in, float *d_out, float *d_scratch, x3_err *err) X3_MUST;
size_t x3_gqa_scratch(const x3_gqa_desc *d, size_t n_rows);
x3_status x3_mlp_forward(x3_forward *f, const x3_layer_weights *w, const x3_mlp_desc *d, size_t n_rows, const float *d_in,
                         float *d_out, float *d_scratch, x3_err *err) X3_MUST;
size_t x3_mlp_scratch(const x3_mlp_desc *d, size_t n_rows);
x3_status x3_delta_net_forward(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, x3_kv_layer *kv,
                               const float *d_in, float *d_out, float *d_scratch, x3_err *err) X3_MUST;
size_t x3_delta_net_scratch(const x3_delta_net_desc *d, size_t n_rows);
/* What x3_delta_net_forward does on the host, for whoever repeats a recording of it: a sequence goes on where its state
 * stands, or from position 0, else an error; afterwards the states stand behind the batch. */
x3_status x3_delta_net_check(const x3_layer_desc *l, const x3_kv_layer *kv, const x3_batch *batch, x3_err *err) X3_MUST;
void x3_delta_net_passed(x3_kv_layer *kv, const x3_batch *batch);
#define X3_MLA_ROWS 256 /* rows that attend at a time: their queries in the latent space are wide */
x3_status x3_mla_forward(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, x3_kv_layer *kv,
                         const float *d_in, float *d_out, float *d_scratch, x3_err *err) X3_MUST;
size_t x3_mla_scratch(const x3_mla_desc *d, size_t n_rows);
x3_status x3_moe_forward(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, const float *d_in, float *d_out,
                         float *d_scratch, x3_err *err) X3_MUST;
size_t x3_moe_scratch(const x3_moe_desc *d, size_t hidden, size_t n_rows);
/* One expert up to the input of its down projection: d_out [n_rows][n_inner] = silu(gate(x)) * up(x). d_scratch likewise.
 * The capture hook does not see it. */
x3_status x3_expert_inner(x3_forward *f, const x3_layer_weights *w, size_t expert, const float *d_x, size_t n_rows,
                          float *d_out, float *d_scratch, x3_err *err) X3_MUST;

/* ---- caches and batches -------------------------------------------------------------------------------- */

/* What a layer keeps keys and values in where `wanted` is asked for: float32 in latent caches, whose values are part of the
 * keys, and where a head is no multiple of 32 or longer than 256. */
x3_kv_type x3_kv_layer_type(const x3_layer_desc *layer, x3_kv_type wanted);
/* The cache that a layer's kind needs: n_pages pages for attention, n_slots recurrent states for a delta net. A state
 * cannot be cut back: a sequence goes on where its state stands, or from position 0. Whoever wants to come back to a
 * position copies the slot there. */
x3_status x3_kv_layer_create(x3_kv_layer *kv, x3_device *dev, const x3_layer_desc *layer, size_t n_pages, size_t n_slots,
                             x3_kv_type wanted, x3_err *err) X3_MUST;
void x3_kv_layer_free(x3_kv_layer *kv, x3_device *dev);
/* Bytes that x3_kv_layer_create takes. */
size_t x3_kv_layer_bytes(const x3_layer_desc *layer, size_t n_pages, size_t n_slots, x3_kv_type wanted);
/* State of slot `to` := that of `from`. Nothing to do for layers without states. */
x3_status x3_kv_slot_copy(x3_kv_layer *kv, x3_device *dev, size_t from, size_t to, x3_err *err) X3_MUST;
/* True when some layer has a recurrent state, so that positions cannot be dropped from the end of a sequence. */
bool x3_model_has_states(const x3_model *m);

/* n_sequences of n_positions each, from position 0, on pages and slots of their own; owns its arrays. n_selected is
 * x3_model_selected(): whoever runs several batches through a layer keeps d_selected of each. */
typedef struct x3_full_batch {
    x3_batch batch;
    x3_device *dev;
    x3_sequence *sequences;
    int32_t *pages;
    size_t n_pages, n_slots; /* of all sequences */
} x3_full_batch;

x3_status x3_full_batch_create(x3_full_batch *b, x3_device *dev, size_t n_sequences, size_t n_positions,
                               size_t n_selected, x3_err *err) X3_MUST;
void x3_full_batch_free(x3_full_batch *b);
/* Uses only the first n of its sequences from here on. */
void x3_full_batch_limit(x3_full_batch *b, size_t n_sequences);

#endif
