/* Safetensors checkpoints: one file or many shards, with or without an index.
 *
 * File: uint64 little-endian header length N; N bytes of JSON {"name": {"dtype", "shape", "data_offsets": [begin,
 * end]}, "__metadata__": {string: string}}; then the data, which the ranges cover without hole or overlap.
 * Source: huggingface/safetensors, README "Format".
 *
 * Opening checks everything that headers can tell: header length against the file, types, shapes against byte
 * ranges, ranges against the file and each other, names doubled within or across shards, index against shards.
 * Nothing is trusted later. Reading uses pread, so that a disk error is a status and not a signal; x3_safetensors_map is
 * the exception that its caller asks for.
 * Threads: an open checkpoint may be read from several threads. */
#ifndef X3_SAFETENSORS_H
#define X3_SAFETENSORS_H

#include "formats/base.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum x3_dtype {
    X3_F64, X3_F32, X3_F16, X3_BF16, X3_F8_E4M3, X3_F8_E5M2, X3_F8_E8M0,
    X3_I64, X3_I32, X3_I16, X3_I8, X3_U64, X3_U32, X3_U16, X3_U8, X3_BOOL,
    X3_N_DTYPES
} x3_dtype;

#define X3_RANK_MAX 8

/* Name in the file ("BF16") and bytes an element. */
const char *x3_dtype_name(x3_dtype dtype);
size_t x3_dtype_bytes(x3_dtype dtype);
/* False, and *out as it was, when no type has this name. */
bool x3_dtype_from_name(const char *name, x3_dtype *out);
bool x3_dtype_is_float(x3_dtype dtype);

typedef struct x3_tensor {
    const char *name; /* lives as long as the checkpoint */
    x3_dtype dtype;
    int rank;
    uint64_t shape[X3_RANK_MAX];
    uint64_t n_elements, n_bytes;
    size_t shard;    /* index into shards */
    uint64_t offset; /* of its first byte, from the start of the file */
} x3_tensor;

typedef struct x3_shard {
    char *file; /* name inside the folder */
    char *path;
    int fd;
    uint64_t n_bytes;      /* of the whole file */
    uint64_t header_bytes; /* N: the data begins at 8 + N */
    uint64_t header_hash;  /* XXH3 of the 8 + N bytes before the data */
    const unsigned char *mapped; /* the whole file, or NULL */
    int64_t modified_s, modified_ns; /* of a mapped file: when it was last written to */
} x3_shard;

typedef struct x3_safetensors {
    char *dir;
    x3_shard *shards; /* sorted by file name */
    size_t n_shards;
    x3_tensor *tensors; /* sorted by name, bytewise */
    size_t n_tensors;
    uint64_t total_bytes; /* of tensor data */
    bool has_index;
    x3_arena arena;
} x3_safetensors;

/* Opens `path`: a folder (its model.safetensors.index.json when there is one, else every *.safetensors in it) or one
 * file, which is then taken by itself, index or not. Files named consolidated*.safetensors are second copies of the
 * weights and are passed over unless the index names them or `path` is one. Without an index, a gap among names like
 * model-00002-of-00005.safetensors is a problem: nothing else tells that a shard is missing.
 * Problems of the content go to `findings`, all of them, each naming file, tensor and numbers; then the status is
 * X3_ERR_INPUT and err holds the first. findings may be NULL: then err and the number of the others is all there is.
 * Every shard keeps a descriptor; the soft limit of the process on open files is raised when they run out.
 * On failure *out is NULL. */
x3_status x3_safetensors_open(x3_safetensors **out, const char *path, x3_findings *findings, x3_err *err) X3_MUST;
void x3_safetensors_close(x3_safetensors *st);

/* NULL when there is none of this name. */
const x3_tensor *x3_safetensors_find(const x3_safetensors *st, const char *name);

/* Bytes [begin, begin + n_bytes) of the tensor's data. */
x3_status x3_safetensors_read(const x3_safetensors *st, const x3_tensor *t, uint64_t begin, size_t n_bytes, void *out,
                              x3_err *err) X3_MUST;
/* The whole tensor on the heap. */
x3_status x3_safetensors_load(const x3_safetensors *st, const x3_tensor *t, void **out, x3_err *err) X3_MUST;
/* Elements [first, first + n) as float32. F64, F32, F16, BF16 and F8 (without scales) are converted; others are
 * X3_ERR_UNSUPPORTED. After a failure the content of `out` is undefined; so it is for x3_safetensors_read. */
x3_status x3_safetensors_read_f32(const x3_safetensors *st, const x3_tensor *t, uint64_t first, size_t n, float *out,
                                  x3_err *err) X3_MUST;
/* Maps every shard read-only, until close; again is nothing. For who keeps weights for long: the page cache is then their
 * only copy. A shard on a file system without mappings stays unmapped and is read as before.
 * What a mapping cannot do: a disk error, or a file cut short while it is mapped, kills the process (SIGBUS) when a page
 * past the new end is touched; there is no handler. A cut inside a page reads as zeros and bytes written in place are
 * seen at once: x3_safetensors_unchanged tells. Not to be called while other threads use `st`. */
x3_status x3_safetensors_map(x3_safetensors *st, x3_err *err) X3_MUST;
/* Byte `begin` of the tensor's data in the mapping; NULL where the shard is not mapped or the address is no multiple of
 * `alignment` (a power of two, at most a page). */
const void *x3_safetensors_mapped(const x3_safetensors *st, const x3_tensor *t, uint64_t begin, size_t alignment);
/* X3_ERR_INPUT, naming the file, when a mapped file was written to or has another size than when it was mapped. A few
 * system calls: for every step of a server, after it. */
x3_status x3_safetensors_unchanged(const x3_safetensors *st, x3_err *err) X3_MUST;
/* "[256, 128]" for messages; cut where it does not fit. Returns out. */
const char *x3_tensor_shape_text(const x3_tensor *t, char out[128]);

/* Element conversions, exact; to_bf16 and to_f16 round to nearest, ties to even (overflow to infinity; a NaN keeps
 * its sign and upper bits and becomes quiet). */
float x3_bf16_to_f32(uint16_t bits);
float x3_f16_to_f32(uint16_t bits);
float x3_f8_e4m3_to_f32(uint8_t bits); /* E4M3FN: no infinity, 0x7F and 0xFF are NaN */
float x3_f8_e5m2_to_f32(uint8_t bits);
float x3_f8_e8m0_to_f32(uint8_t bits); /* 2^(bits - 127), 0xFF is NaN */
uint16_t x3_f32_to_bf16(float x);
uint16_t x3_f32_to_f16(float x);

/* n elements of little-endian data, aligned for their type, as float32 (F64 is rounded, the rest is exact). `dtype`
 * must be a float type. */
void x3_dtype_to_f32(x3_dtype dtype, const void *data, size_t n, float *out);

#ifdef __cplusplus
}
#endif
#endif
