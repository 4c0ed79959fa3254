/* Weights of a checkpoint in device memory, one layer at a time. */
#ifndef X3_WEIGHTS_H
#define X3_WEIGHTS_H

#include "runtime/checkpoint.h"
#include "runtime/device/device.h"

typedef struct x3_layer_weights {
    x3_device *dev;
    const x3_layer_desc *desc;
    x3_weight *linears; /* [desc->n_linears] */
    float **vectors;    /* [desc->n_vectors], device */
} x3_layer_weights;

x3_status x3_layer_weights_load(x3_layer_weights *w, x3_device *dev, const x3_checkpoint *c, const x3_layer_desc *desc,
                                x3_err *err) X3_MUST;
void x3_layer_weights_free(x3_layer_weights *w);
/* Bytes of device memory that a layer takes. */
size_t x3_layer_weights_bytes(const x3_checkpoint *c, const x3_layer_desc *desc);

/* One linear: an EXL3 group where the checkpoint has one, else the dense weight in its own type (FP8 becomes float32
 * with its scales applied). Where the shards are mapped (x3_safetensors_map), the device reads mappings (in_place_align) and
 * the bytes are aligned as it asks, the trellis or the dense weight is used where it lies (w->borrowed) and not read: the
 * checkpoint must then outlive the weight, and the file must not change. Scales, biases, vectors, FP8 and columns of a
 * tensor of experts are converted, so always copied. */
x3_status x3_linear_load(x3_weight *w, x3_device *dev, const x3_checkpoint *c, const x3_linear_desc *desc,
                         x3_err *err) X3_MUST;
void x3_linear_free(x3_weight *w, x3_device *dev);

/* Bytes of weights that x3_linear_load would use in place, and of those that it copies because they lie on an address that
 * the device cannot use. */
typedef struct x3_mapped_bytes {
    uint64_t in_place, misaligned;
} x3_mapped_bytes;

/* Adds those of a linear. */
x3_status x3_linear_mapped(const x3_device *dev, const x3_checkpoint *c, const x3_linear_desc *desc, x3_mapped_bytes *total,
                           x3_err *err) X3_MUST;
/* A vector as float32 in device memory. */
x3_status x3_vector_load(float **d_out, x3_device *dev, const x3_checkpoint *c, const x3_vector_desc *desc,
                         x3_err *err) X3_MUST;

/* Outputs [first, first + n_rows) of a dense weight as float32 in host memory, [n_rows][n_in], FP8 scales applied. */
x3_status x3_dense_read(const x3_checkpoint *c, const x3_linear_desc *desc, size_t first, size_t n_rows, float *out,
                        x3_err *err) X3_MUST;
/* A dense weight as float32 in device memory, [n_out][n_in]; the caller frees it. */
x3_status x3_dense_floats(const float **d_out, x3_device *dev, const x3_weight *w, x3_err *err) X3_MUST;
/* out [n][hidden] = rows of the embedding. An id past the vocabulary is an error. */
x3_status x3_embed(const x3_checkpoint *c, const int32_t *ids, size_t n, float *out, x3_err *err) X3_MUST;

#endif
