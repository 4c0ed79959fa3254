/* Trellis search on the GPU: sizes shared by search_k_cuda.cu (the kernel, one object a K) and search_cuda.cu (the host
 * side). Private to them. */
#ifndef X3_SEARCH_CUDA_CUH
#define X3_SEARCH_CUDA_CUH

#include "kernels/cuda_common.cuh"

#define SEARCH_JOIN 128 /* X3_JOIN of trellis.h, checked by the tests through equal codes */

/* Where the minima of the 2^(16 - K) groups live between two positions. */
typedef enum search_place {
    SEARCH_TWO_BUFFERS, /* shared memory, read from one and written to the other: one barrier a position */
    SEARCH_IN_PLACE,    /* shared memory, results wait in registers until all is read: two barriers, half the memory */
    SEARCH_GLOBAL       /* device memory: K = 1 on devices that share less than 128 KB */
} search_place;

typedef struct search_args {
    int n_tiles, codebook;
    const float *x;      /* [n_tiles][256] in position order, or NULL: strips */
    uint16_t *states;    /* [n_tiles][256], or NULL */
    float *rows;         /* scratch: of every block, stored minima [tile][position / segment][group] */
    size_t block_floats; /* of it that one block owns */
    int n_strips;
    int first_tile[X3_CUDA_STRIPS + 1];
    x3_cuda_strip strips[X3_CUDA_STRIPS];
} search_args;

#define SEARCH_VARIANTS 3

/* One compiled form: tiles a block works on together, shared memory it needs. */
typedef struct search_variant {
    const void *kernel[3]; /* by codebook */
    int n_tiles, n_threads;
    search_place place;
    size_t shared_bytes;
} search_variant;

typedef struct search_kernels {
    int n_variants, segment;
    search_variant variants[SEARCH_VARIANTS];
} search_kernels;

void x3_search_kernels_k1(search_kernels *out);
void x3_search_kernels_k2(search_kernels *out);
void x3_search_kernels_k3(search_kernels *out);
void x3_search_kernels_k4(search_kernels *out);
void x3_search_kernels_k5(search_kernels *out);
void x3_search_kernels_k6(search_kernels *out);
void x3_search_kernels_k7(search_kernels *out);
void x3_search_kernels_k8(search_kernels *out);

#endif
