/* A whole model on a device: all layers, the head, and a paged cache for many sequences. One call runs a batch of rows
 * of several sequences through it. Where the device records (CUDA graphs), steps of one row a sequence are recorded, once a
 * shape, and repeated, with the same bits, for all layer kinds; of models with latent attention up to 256 rows.
 *
 * Weights of a checkpoint that was mapped before (x3_safetensors_map) are used in place where the device can (weights.h). A
 * step fails with the file's name when a mapped file has changed meanwhile; a file cut short under a step may kill the process
 * (SIGBUS).
 *
 * Threads: belongs to one thread at a time, like its device. */
#ifndef X3_RESIDENT_H
#define X3_RESIDENT_H

#include "runtime/forward.h"

typedef struct x3_resident_options {
    size_t max_positions; /* of a sequence */
    size_t max_rows;      /* of a step */
    size_t max_outputs;   /* rows of a step whose logits are wanted */
    size_t n_pages;       /* of the cache */
    size_t n_slots;       /* sequences at once, each with a recurrent state in layers that have one */
    x3_kv_type kv_type;   /* of the cache; x3_kv_layer_type says which layers keep float32 */
} x3_resident_options;

/* A step of one row a sequence that is recorded, or will be when it comes again. */
typedef struct x3_recorded {
    uint64_t shape, generation;
    x3_recording *recording; /* NULL: done once so far */
} x3_recorded;

#define X3_RECORDINGS 64

typedef struct x3_resident {
    x3_device *dev;
    const x3_checkpoint *c;
    x3_resident_options o;
    x3_forward *f;
    x3_layer_weights *layers;
    x3_kv_layer *kv;
    x3_weight head, embed; /* embed: where the device looks rows up itself; may be the head's */
    float *d_norm, *d_x, *d_last, *d_logits;
    int32_t *d_best; /* [max_outputs] */
    int32_t *d_positions, *d_selected; /* positions: of a step, then its ids; selected: see x3_batch */
    float *x;           /* host: embedded rows of a step, where the device does not look them up */
    int32_t *numbers;   /* host: positions, then ids */
    size_t recorded_rows; /* steps of at most so many are recorded; 0: none */
    x3_recorded recorded[X3_RECORDINGS];
    size_t n_recorded;
} x3_resident;

/* What it takes on the device. */
typedef struct x3_resident_memory {
    size_t weights, cache, scratch; /* bytes */
    size_t mapped;                  /* of weights: used in place from the mapped files, in the page cache */
    size_t misaligned;              /* of weights: copied, because the device cannot use them at their address in the file */
} x3_resident_memory;

x3_status x3_resident_memory_of(x3_resident_memory *m, const x3_device *dev, const x3_checkpoint *c,
                                const x3_resident_options *o, x3_err *err) X3_MUST;

x3_status x3_resident_create(x3_resident **out, x3_device *dev, const x3_checkpoint *c, const x3_resident_options *o,
                             x3_err *err) X3_MUST;
void x3_resident_free(x3_resident *r);

/* Runs ids [n_rows], the rows of the sequences in order, and writes their keys and values into the cache.
 * logits [n_outputs][vocab] in host memory (best from x3_device_host_alloc): those of rows outputs[i]. NULL: they stay on the device
 * for x3_resident_best or x3_resident_logits of the same n_outputs, which must come before the next step and wait for this one. */
x3_status x3_resident_step(x3_resident *r, const x3_sequence *sequences, size_t n_sequences, const int32_t *ids, size_t n_rows,
                           const size_t *outputs, size_t n_outputs, float *logits, x3_err *err) X3_MUST;
x3_status x3_resident_logits(x3_resident *r, size_t n_outputs, float *logits, x3_err *err) X3_MUST;
/* Of each output the id of its largest logit, of equal ones the lowest; -1: one is a NaN, or none is finite. Only where
 * dev->ops->argmax is. */
x3_status x3_resident_best(x3_resident *r, size_t n_outputs, int32_t *ids, x3_err *err) X3_MUST;

#endif
