/* A model folder, source or pack: config, descriptors, tensors, and an account of every tensor. */
#ifndef X3_CHECKPOINT_H
#define X3_CHECKPOINT_H

#include "formats/exl3.h"
#include "runtime/model.h"

/* What becomes of a tensor. */
typedef enum x3_tensor_role {
    X3_ROLE_NONE,    /* in no list: an error */
    X3_ROLE_WEIGHT,  /* of a linear that is quantized: replaced by a group */
    X3_ROLE_BIAS,    /* of such a linear: becomes part of the group, as F16 */
    X3_ROLE_KEPT,    /* copied byte for byte */
    X3_ROLE_GROUP,   /* part of an EXL3 group (packs) */
    X3_ROLE_DROPPED  /* left out of a pack, with a reason */
} x3_tensor_role;

typedef struct x3_checkpoint {
    char *dir;
    x3_hf_config *config;
    x3_model *model;
    x3_safetensors *st;
    bool is_pack;
    bool uses_draft;           /* the draft layer is accounted for like the others; else it is only carried */
    char *draft_problem;       /* why not, of a pack with groups in it; or NULL */
    x3_tensor_role *roles;     /* [st->n_tensors] */
    const char **reasons;      /* [st->n_tensors], for X3_ROLE_DROPPED; for X3_ROLE_KEPT what a tensor that the text model
                                  does not use is part of, else NULL */
    struct x3_tensor_hash {
        uint64_t hash;
        bool known;
    } *hashes; /* [st->n_tensors], XXH3 of the data of tensors that were read whole */
} x3_checkpoint;

/* Opens a folder and checks it from headers and JSON alone: every tensor that the model needs is there with the right
 * shape and type, every other tensor is accounted for. All problems go to findings; then the status is
 * X3_ERR_INPUT. */
x3_status x3_checkpoint_open(x3_checkpoint **out, const char *dir, const char *const *ignored_options,
                             x3_findings *findings, x3_err *err) X3_MUST;
void x3_checkpoint_close(x3_checkpoint *c);
/* Accounts for the draft layer like for the others, so that its linears may be quantized; what is missing goes to findings.
 * A model without one that is known is X3_ERR_UNSUPPORTED. Packs with groups in it are
 * opened so, unless something is missing: serving does without. */
x3_status x3_checkpoint_use_draft(x3_checkpoint *c, x3_findings *findings, x3_err *err) X3_MUST;

/* The tensor that holds the weight of a linear: <name>.weight, the embedding for a tied head, or the tensor of all experts
 * that it is a part of. NULL when there is none (a pack). */
const x3_tensor *x3_checkpoint_weight(const x3_checkpoint *c, const x3_linear_desc *linear);

/* Where in that tensor: element (output o, input i) is number first + o * out_stride + i * in_stride. */
typedef struct x3_weight_place {
    const x3_tensor *tensor;
    bool whole; /* nothing else is in the tensor: first 0, out_stride n_in, in_stride 1 */
    uint64_t first, out_stride, in_stride;
} x3_weight_place;

/* False when there is no such tensor. */
bool x3_checkpoint_place(const x3_checkpoint *c, const x3_linear_desc *linear, x3_weight_place *place);
/* <name>.bias or NULL. */
const x3_tensor *x3_checkpoint_bias(const x3_checkpoint *c, const x3_linear_desc *linear);
/* Scale tensor of an FP8 weight: <weight>_scale_inv or <weight>_scale; NULL when there is none. */
const x3_tensor *x3_checkpoint_scale(const x3_checkpoint *c, const x3_tensor *weight);

/* Reads a tensor whole, to the heap, and remembers the XXH3 of its bytes; when it was known already it must be the same,
 * else the file has changed under us (X3_ERR_INPUT). */
x3_status x3_checkpoint_load(const x3_checkpoint *c, const x3_tensor *t, void **out, x3_err *err) X3_MUST;
/* XXH3 of one tensor's bytes, read now if it was not before. */
x3_status x3_checkpoint_tensor_hash(const x3_checkpoint *c, const x3_tensor *t, uint64_t *hash, x3_err *err) X3_MUST;
/* Reads every tensor once: fills the hashes, and reports every tensor of floats with NaN or infinite values (how many,
 * where the first one is). `step`, which may be NULL, is told bytes done and in all. */
x3_status x3_checkpoint_scan(const x3_checkpoint *c, void (*step)(void *arg, uint64_t done, uint64_t total), void *arg,
                             x3_findings *findings, x3_err *err) X3_MUST;
/* Identity of the weights: XXH3 over name, type, shape and XXH3 of every tensor in order of name. It does not depend on
 * how they are cut into shards. */
x3_status x3_checkpoint_hash(const x3_checkpoint *c, uint64_t *hash, x3_err *err) X3_MUST;

#endif
