/* CUDA forms of the heavy operations: EXL3 linear, reconstruction, trellis search. C11 and C++17 alike; no CUDA header
 * is needed to include this.
 *
 * Memory: every d_ pointer is device memory of the current device and belongs to the caller; nothing is allocated here.
 * Scratch is passed in; its size comes from the matching ..._bytes function.
 * Streams: work is queued on `stream` and not waited for, so a returned X3_OK means "queued". All functions can be
 * captured in a CUDA graph, except that x3_cuda_linear_gemm needs a cuBLAS handle prepared for capture.
 * Errors: a refused launch is X3_ERR_DEVICE; wrong shapes are X3_ERR_INPUT. Faults inside a kernel appear at the caller's
 * next synchronization, as always in CUDA.
 * Threads: no state of its own; scratch belongs to one stream at a time. */
#ifndef X3_CUDA_KERNELS_H
#define X3_CUDA_KERNELS_H

#include "formats/base.h"
#include "formats/codebook_kind.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct CUstream_st *x3_cuda_stream;      /* a cudaStream_t */
typedef struct cublasContext *x3_cuda_blas;      /* a cublasHandle_t */
typedef enum x3_cuda_type { X3_CUDA_F32, X3_CUDA_F16 } x3_cuda_type;

/* What the launches need to know of the device; read once. */
typedef struct x3_cuda_info {
    int device;
    int compute_capability; /* 10 * major + minor */
    int n_multiprocessors;
    size_t shared_bytes;    /* that one block may ask for */
    size_t memory_bytes;
    char name[96];
} x3_cuda_info;

/* Number of devices; 0 (and X3_OK) on a machine without a GPU or driver. */
x3_status x3_cuda_count(int *n, x3_err *err) X3_MUST;
/* Makes `device` current and describes it. */
x3_status x3_cuda_open(int device, x3_cuda_info *out, x3_err *err) X3_MUST;

/* ---- EXL3 linear ----------------------------------------------------------------------------------------- */

/* The weight of one linear in device memory. */
typedef struct x3_cuda_group {
    int K;
    x3_codebook codebook;
    size_t n_in, n_out;               /* columns of x and y */
    size_t n_in_padded, n_out_padded; /* multiples of 128 */
    const uint32_t *d_words;          /* [n_in_padded / 16][n_out_padded / 16][8 * K], on a 16-byte boundary */
    const uint16_t *d_suh, *d_svh;    /* float16 [n_in_padded], [n_out_padded] */
    const float *d_bias;              /* [n_out] or NULL */
} x3_cuda_group;

/* Rows in and out. `ld` is a row's distance in elements. */
typedef struct x3_cuda_rows {
    size_t n_rows;
    const void *d_x; /* [n_rows][n_in] */
    x3_cuda_type x_type;
    size_t ldx;
    void *d_y; /* [n_rows][n_out] */
    x3_cuda_type y_type;
    size_t ldy;
    const void *d_up; /* NULL, or as x: the inputs are then silu(x) * up; not for x3_cuda_linear_gemm */
} x3_cuda_rows;

#define X3_CUDA_LINEAR_ROWS 128
#define X3_CUDA_LINEAR_PARTS 4

/* y[r] = ((x[r] * suh) Hd  Wq  Hd) * svh + bias for 1 .. X3_CUDA_LINEAR_ROWS rows, decoding fused with the product:
 * (x * suh) Hd rounded to float16, Wq exact, float32 sums. A row's result is the same bits whatever rows come with it: the
 * inputs are split, and partial sums added, in an order that depends on the shape and the device alone.
 *
 * scratch: x3_cuda_linear_bytes for one group, on a 256-byte boundary, of which the first X3_CUDA_COUNTER_BYTES must be zero before
 * the first call; every call leaves them zero. After a device fault, zero them again.
 *
 * overlap: the group was in memory before the operation that precedes on this stream began (true in any forward pass), so
 * that reading weights may start while that operation still runs (compute capability 9.0 up; ignored below). x, y and
 * scratch are ordered as always.
 * Bound: relative error against a float64 product under 4e-4 on Gaussian rows. */
x3_status x3_cuda_linear(const x3_cuda_info *info, const x3_cuda_group *g, const x3_cuda_rows *rows, bool overlap,
                         void *d_scratch, x3_cuda_stream stream, x3_err *err) X3_MUST;
/* The same for n_groups (1 .. X3_CUDA_LINEAR_PARTS) weights of one K and codebook that read the same rows, in one launch; rows differ
 * in y alone. The bits are those of the groups together: other ones than each alone gives. */
x3_status x3_cuda_linears(const x3_cuda_info *info, const x3_cuda_group *g, const x3_cuda_rows *rows, size_t n_groups, bool overlap,
                          void *d_scratch, x3_cuda_stream stream, x3_err *err) X3_MUST;
#define X3_CUDA_COUNTER_BYTES (65536 + (1 << 20))
size_t x3_cuda_linear_bytes(const x3_cuda_info *info, const x3_cuda_group *g, size_t n_groups, size_t n_rows);

/* The same bits for any number of rows, faster from about 128: codes and rows are first written out as operands.
 * d_scratch: x3_cuda_linear_rows_bytes, contents of no meaning. Only where x3_cuda_linear_rows_fits. */
x3_status x3_cuda_linear_rows(const x3_cuda_info *info, const x3_cuda_group *g, const x3_cuda_rows *rows, size_t n_groups, void *d_scratch,
                              x3_cuda_stream stream, x3_err *err) X3_MUST;
size_t x3_cuda_linear_rows_bytes(const x3_cuda_group *g, size_t n_groups, size_t n_rows);
bool x3_cuda_linear_rows_fits(const x3_cuda_info *info);

/* The same for any number of rows, but not the bits: the effective weight is written out as float16 (x3_cuda_dense), then one cuBLAS product
 * with float16 rows (rounded when they are float32: values past 65,504 become infinite) and float32 sums. Pays from about
 * 256 rows. Not row-invariant (cuBLAS chooses its split by the shape). */
x3_status x3_cuda_linear_gemm(const x3_cuda_info *info, x3_cuda_blas blas, const x3_cuda_group *g, const x3_cuda_rows *rows,
                              void *d_scratch, x3_cuda_stream stream, x3_err *err) X3_MUST;
size_t x3_cuda_linear_gemm_bytes(const x3_cuda_group *g, size_t n_rows, x3_cuda_type x_type);

/* out [n_in_padded][n_out_padded] = Wq, the decoded codes without suh, svh and Hadamard. EXACT. */
x3_status x3_cuda_reconstruct(const x3_cuda_info *info, const x3_cuda_group *g, void *d_out, x3_cuda_type type,
                              x3_cuda_stream stream, x3_err *err) X3_MUST;
/* out [n_in_padded][n_out_padded] float16 = diag(suh) Hd Wq Hd diag(svh). Bound: relative error 3e-4 (two roundings). */
x3_status x3_cuda_dense(const x3_cuda_info *info, const x3_cuda_group *g, void *d_out, x3_cuda_stream stream,
                        x3_err *err) X3_MUST;

/* ---- trellis search ---------------------------------------------------------------------------------------- */

/* The search of kernels/trellis.h: the same states as its CPU forms, bit for bit (EXACT), in any number of tiles a call.
 *
 * scratch: x3_cuda_search_bytes, contents of no meaning between calls. */
x3_status x3_cuda_search(const x3_cuda_info *info, x3_codebook codebook, int K, const float *d_x, size_t n_tiles,
                         uint16_t *d_states, void *d_scratch, x3_cuda_stream stream, x3_err *err) X3_MUST;
size_t x3_cuda_search_bytes(const x3_cuda_info *info, int K);

/* One row of tiles of an LDLQ job: 16 rows of n_out columns. */
typedef struct x3_cuda_strip {
    size_t n_out;          /* a multiple of 16 */
    const float *d_target; /* [16][ld_target] what is encoded */
    size_t ld_target;
    float *d_q; /* [16][ld_q] values of the codes, or NULL */
    size_t ld_q;
    const float *d_w; /* [16][ld_w] and, when not NULL, d_error [16][ld_error] = w - q */
    size_t ld_w;
    float *d_error;
    size_t ld_error;
    uint32_t *d_words; /* [n_out / 16][8 * K], or NULL */
} x3_cuda_strip;

#define X3_CUDA_STRIPS 32

/* Searches all tiles of 1 .. X3_CUDA_STRIPS strips (host array, read before the return) of one codebook and K, in one
 * launch. Strips must not overlap in what they write. */
x3_status x3_cuda_search_strips(const x3_cuda_info *info, x3_codebook codebook, int K, const x3_cuda_strip *strips,
                                size_t n_strips, void *d_scratch, x3_cuda_stream stream, x3_err *err) X3_MUST;

#ifdef __cplusplus
}
#endif
#endif
