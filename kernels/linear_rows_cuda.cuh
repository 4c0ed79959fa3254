/* The EXL3 linear for many rows: what its two files share. */
#ifndef X3_LINEAR_ROWS_CUDA_CUH
#define X3_LINEAR_ROWS_CUDA_CUH

#include "kernels/linear_cuda.cuh"

void x3_fragment_kernels_k1(const void *out[N_DECODERS]);
void x3_fragment_kernels_k2(const void *out[N_DECODERS]);
void x3_fragment_kernels_k3(const void *out[N_DECODERS]);
void x3_fragment_kernels_k4(const void *out[N_DECODERS]);
void x3_fragment_kernels_k5(const void *out[N_DECODERS]);
void x3_fragment_kernels_k6(const void *out[N_DECODERS]);
void x3_fragment_kernels_k7(const void *out[N_DECODERS]);
void x3_fragment_kernels_k8(const void *out[N_DECODERS]);

#endif
