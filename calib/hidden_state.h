/* Hidden states of all calibration rows between two layers, for one path (quantized or original). They stay in the memory
 * of the device, else of the host, while that has room; else the file is the store: reads come from the file of the last
 * layer, writes go to that of the next.
 *
 * File: float32 [n_rows][row_floats], nothing else; its XXH3 stands in the record of the layer, from which a killed job goes
 * on. */
#ifndef X3_HIDDEN_STATE_H
#define X3_HIDDEN_STATE_H

#include "runtime/device/device.h"

typedef enum x3_hidden_place { X3_HIDDEN_HOST, X3_HIDDEN_DEVICE, X3_HIDDEN_DISK } x3_hidden_place;

typedef struct x3_hidden_state {
    x3_device *dev;
    char *dir, *path_name; /* "quantized" or "original" */
    size_t n_rows, row_floats;
    x3_hidden_place place;
    float *states;         /* [n_rows][row_floats] in memory of the host or the device; NULL on disk */
    float *buffer;         /* host, for what is on its way; grows */
    size_t buffer_floats;
    int fd_from, fd_to;    /* files when on disk */
    size_t layer;          /* layers that the states have passed; SIZE_MAX before x3_hidden_state_start */
} x3_hidden_state;

x3_status x3_hidden_state_create(x3_hidden_state **out, x3_device *dev, const char *dir, const char *path_name, size_t n_rows,
                                 size_t row_floats, x3_hidden_place place, x3_err *err) X3_MUST;
void x3_hidden_state_free(x3_hidden_state *h);

/* Rows [row, row + n) to or from device memory; x3_hidden_state_write from host memory. A row is written after it was read;
 * until x3_hidden_state_advance or _pass a read after a write of the same row is not allowed. */
x3_status x3_hidden_state_load(x3_hidden_state *h, size_t row, size_t n, float *d_out, x3_err *err) X3_MUST;
x3_status x3_hidden_state_store(x3_hidden_state *h, size_t row, size_t n, const float *d_in, x3_err *err) X3_MUST;
/* The same for floats [first, first + count) of each row; d_out, d_in [n][count]. */
x3_status x3_hidden_state_load_part(x3_hidden_state *h, size_t row, size_t n, size_t first, size_t count, float *d_out,
                                    x3_err *err) X3_MUST;
x3_status x3_hidden_state_store_part(x3_hidden_state *h, size_t row, size_t n, size_t first, size_t count, const float *d_in,
                                     x3_err *err) X3_MUST;
/* All rows of `from`, which has the same shape and place, in memory. */
x3_status x3_hidden_state_copy(x3_hidden_state *h, const x3_hidden_state *from, x3_err *err) X3_MUST;
x3_status x3_hidden_state_write(x3_hidden_state *h, size_t row, size_t n, const float *in, x3_err *err) X3_MUST;

/* The first states, those before layer 0: write all rows, then start. A path that has none of its own yet is started
 * empty. */
x3_status x3_hidden_state_start(x3_hidden_state *h, x3_err *err) X3_MUST;

/* All rows have been written, and nothing is to be left (not on disk). */
void x3_hidden_state_pass(x3_hidden_state *h);
/* All rows have been written: leaves the file of the next layer, synced, and its hash. */
x3_status x3_hidden_state_advance(x3_hidden_state *h, uint64_t *hash, x3_err *err) X3_MUST;
/* Loads the file that a finished layer left; its hash must be this. */
x3_status x3_hidden_state_restore(x3_hidden_state *h, size_t layer, uint64_t hash, x3_err *err) X3_MUST;
/* Removes the file of a layer; a missing one is fine. */
x3_status x3_hidden_state_drop(const x3_hidden_state *h, size_t layer, x3_err *err) X3_MUST;

#endif
