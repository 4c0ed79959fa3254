/* What a pack consists of: the tensors (groups in place of linears, the rest copied), the side files, and the JSON that
 * describes them (design/format.md). */
#ifndef X3_PACK_PLAN_H
#define X3_PACK_PLAN_H

#include "formats/io.h"
#include "formats/pack_writer.h"
#include "quant/allocate.h"
#include "runtime/checkpoint.h"

/* The parts of a group in the list of tensors; each is an index, and `bias` and `marker` may be absent (SIZE_MAX). */
typedef struct x3_planned_group {
    const x3_linear_desc *linear;
    int K;
    size_t trellis, suh, svh, marker, bias;
} x3_planned_group;

typedef struct x3_pack_plan {
    const x3_checkpoint *source;
    const x3_allocation *allocation;
    x3_codebook codebook;
    x3_pack_tensor *tensors;
    size_t n_tensors;
    const x3_tensor **copied; /* [n_tensors]: the source's tensor that is copied, or NULL for a part of a group */
    x3_planned_group *groups; /* K = 0: not quantized. Those of the layers, of the head, then of a draft layer in use */
    size_t n_groups, head;    /* head: its number */
    x3_arena arena;           /* names */
} x3_pack_plan;

x3_status x3_pack_plan_create(x3_pack_plan **out, const x3_checkpoint *source, const x3_allocation *allocation,
                              x3_codebook codebook, x3_err *err) X3_MUST;
void x3_pack_plan_free(x3_pack_plan *p);

/* True when a tied head gets a group of its own. */
bool x3_pack_unties_head(const x3_pack_plan *p);

typedef struct x3_pack_json {
    size_t rows, cols; /* of calibration */
} x3_pack_json;

/* config.json of the pack: the source's with quantization_config. */
x3_status x3_pack_config(cJSON **out, const x3_pack_plan *p, const x3_pack_json *info, x3_err *err) X3_MUST;
/* quantization_config.json: the same and tensor_storage. */
x3_status x3_pack_quantization_config(cJSON **out, const x3_pack_plan *p, const x3_pack_json *info, x3_err *err) X3_MUST;

/* Side files of the source, by their path below it, sorted. `copied`: into the pack byte for byte; `left`: weights in
 * another form and hidden folders, which are not copied. */
x3_status x3_pack_side_files(const char *source_dir, x3_names *copied, x3_names *left, x3_err *err) X3_MUST;

#endif
