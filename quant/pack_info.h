/* What a pack says of itself. */
#ifndef X3_PACK_INFO_H
#define X3_PACK_INFO_H

#include "runtime/checkpoint.h"

typedef struct x3_pack_info {
    double bits_body;  /* sum K in out / sum in out over the groups but the head's, padded sizes; 0 without groups */
    double bits_head;  /* K of the head's group, or the bits of its dense type */
    double bits_mtp;   /* as bits_body, of the draft layer's groups; 0 without any */
    uint64_t n_bytes;  /* of all shards */
    size_t n_groups, n_padded; /* groups; those whose size is no multiple of 128 */
} x3_pack_info;

x3_status x3_pack_info_read(x3_pack_info *out, const x3_checkpoint *pack, x3_err *err) X3_MUST;

/* exl3_receipt.json of a pack; *out is NULL when it has none. */
x3_status x3_pack_receipt_load(cJSON **out, const char *dir, x3_err *err) X3_MUST;

/* Refuses when a text of the reference's receipt was used to calibrate the pack. */
x3_status x3_pack_check_texts(const x3_checkpoint *pack, const cJSON *reference_receipt, const char *reference_path,
                              x3_err *err) X3_MUST;

/* tool, version, source_id, command; with a pack also its seed and recipe. */
x3_status x3_pack_receipt_head(cJSON *receipt, const char *tool, const char *command, const x3_checkpoint *pack,
                               x3_err *err) X3_MUST;

/* Revision that this program was built from. */
const char *x3_source_id(void);

#endif
