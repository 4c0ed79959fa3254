/* Writing safetensors files: a plan of tensors and their places, a header, then data at those places.
 *
 * Tensors whose size is a multiple of 64 bytes come first, in the order given, so that with the header padded they all
 * start on 64-byte boundaries; the others follow. Names must be unique. */
#ifndef X3_SAFETENSORS_WRITE_H
#define X3_SAFETENSORS_WRITE_H

#include "formats/safetensors.h"

typedef struct x3_out_tensor {
    const char *name; /* borrowed */
    x3_dtype dtype;
    int rank;
    uint64_t shape[X3_RANK_MAX];
    uint64_t n_bytes; /* set by x3_layout */
    uint64_t offset;  /* from the start of the file; set by x3_layout */
    uint64_t hash;    /* XXH3 of the data, set by the writer */
} x3_out_tensor;

/* Places n tensors and makes the file's first bytes: *header (heap, *header_bytes long) covers everything before the
 * data. *file_bytes is the size of the whole file. */
x3_status x3_safetensors_layout(x3_out_tensor *const *tensors, size_t n, char **header, size_t *header_bytes,
                                uint64_t *file_bytes, x3_err *err) X3_MUST;

/* Whole file at once, atomically: data[i] are the bytes of tensors[i]. */
x3_status x3_safetensors_save(const char *path, x3_out_tensor *const *tensors, const void *const *data, size_t n,
                              x3_err *err) X3_MUST;

#endif
