/* EXL3 groups inside a checkpoint, and what a pack's JSON files say of them. The bytes are described in
 * design/format.md: <name>.trellis I16 [in/16][out/16][16 K], <name>.suh F16 [in], <name>.svh F16 [out], a marker
 * <name>.mcg or <name>.mul1 I32 [], optionally <name>.bias F16 [out]; old packs have <name>.su and <name>.sv, I16
 * sign bits, in place of suh and svh. */
#ifndef X3_EXL3_H
#define X3_EXL3_H

#include "formats/codebook_kind.h"
#include "formats/json.h"
#include "formats/safetensors.h"

/* "3inst", "mcg", "mul1". */
const char *x3_codebook_name(x3_codebook codebook);
bool x3_codebook_parse(const char *name, x3_codebook *out);

typedef struct x3_group {
    const x3_tensor *trellis, *suh, *svh; /* suh, svh: NULL in old packs */
    const x3_tensor *su, *sv;             /* old packs */
    const x3_tensor *marker;              /* NULL: 3inst */
    const x3_tensor *bias;                /* or NULL */
    x3_codebook codebook;
    int K;
    size_t n_in, n_out; /* padded */
} x3_group;

/* Looks for a group of this module name. *found is false when there is no <name>.trellis. What a reader must refuse
 * (two markers, a wrong multiplier, sizes that are no multiples of 128, K out of range or half, parts in several
 * shards, a wrong shape or type) goes to findings, each with the tensor's name. */
x3_status x3_group_find(const x3_safetensors *st, const char *name, x3_group *g, bool *found, x3_findings *findings,
                        x3_err *err) X3_MUST;

/* suh or svh as float16 bits on the heap, made from sign bits for old packs. */
x3_status x3_group_scales(const x3_safetensors *st, const x3_group *g, bool input, uint16_t **out, x3_err *err) X3_MUST;

#endif
