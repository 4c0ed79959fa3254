/* The safetensors shards of a pack. All sizes are known before the first byte is computed, so the shards are laid out,
 * created at full size under temporary names (model-0000i-of-0000n.safetensors.part) and filled in place as tensors
 * come; a disk that is too small says so before any work. x3_pack_writer_commit syncs, renames and writes the index.
 *
 * State after failure or a kill: part files, which no loader takes for a pack. They are found again by
 * x3_pack_writer_open with `resume`. */
#ifndef X3_PACK_WRITER_H
#define X3_PACK_WRITER_H

#include "formats/json.h"
#include "formats/safetensors_write.h"

#define X3_SHARD_BYTES ((uint64_t)8 << 30)

typedef struct x3_pack_tensor {
    x3_out_tensor out; /* name, type, shape given by the caller */
    size_t unit;       /* tensors of one unit share a shard; units are ascending in the list */
    size_t shard;      /* set by the writer */
    bool written;
} x3_pack_tensor;

typedef struct x3_pack_writer {
    char *dir;
    x3_pack_tensor *tensors; /* owned array; names are borrowed */
    size_t n_tensors;
    size_t *by_name; /* tensor indices in order of name */
    struct x3_pack_shard {
        char *part_path, *final_name;
        int fd;
        uint64_t n_bytes;
    } *shards;
    size_t n_shards;
    uint64_t tensor_bytes, file_bytes; /* of data; of all shards */
} x3_pack_writer;

/* Plans only: shards, places, sizes. Takes a copy of the list. */
x3_status x3_pack_writer_plan(x3_pack_writer **out, const char *dir, const x3_pack_tensor *tensors, size_t n,
                              uint64_t shard_bytes, x3_err *err) X3_MUST;
/* Creates the part files at full size, or with `resume` opens those of an earlier run and checks size and header. */
x3_status x3_pack_writer_open(x3_pack_writer *w, bool resume, x3_err *err) X3_MUST;
/* Index of a tensor by name, or n_tensors. */
size_t x3_pack_writer_find(const x3_pack_writer *w, const char *name);
/* Writes a tensor's bytes at its place and notes their XXH3. */
x3_status x3_pack_writer_write(x3_pack_writer *w, size_t tensor, const void *data, x3_err *err) X3_MUST;
/* Bytes [begin, begin + n) of a tensor; the caller writes all of them in order, the last call completes it. */
x3_status x3_pack_writer_write_part(x3_pack_writer *w, size_t tensor, uint64_t begin, const void *data, size_t n,
                                    x3_err *err) X3_MUST;
/* Reads a tensor back and compares its XXH3; marks it written. A difference is X3_ERR_INPUT. */
x3_status x3_pack_writer_accept(x3_pack_writer *w, size_t tensor, uint64_t hash, x3_err *err) X3_MUST;
x3_status x3_pack_writer_sync(x3_pack_writer *w, x3_err *err) X3_MUST;
/* Every tensor written: syncs, removes the shards and index of an older pack in the folder, renames the parts, writes
 * model.safetensors.index.json. config.json must not be there yet. */
x3_status x3_pack_writer_commit(x3_pack_writer *w, x3_err *err) X3_MUST;
/* Removes the part files. */
void x3_pack_writer_discard(x3_pack_writer *w);
/* What model.safetensors.index.json will hold. */
x3_status x3_pack_writer_index(const x3_pack_writer *w, cJSON **out, x3_err *err) X3_MUST;
void x3_pack_writer_free(x3_pack_writer *w);

#endif
