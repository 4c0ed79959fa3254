/* Instructions of compute capability 9.0 that the *_hopper_cuda.cu files share. The Makefile compiles those for sm_90a. */
#ifndef X3_HOPPER_CUDA_CUH
#define X3_HOPPER_CUDA_CUH

#include <stdint.h>

static __device__ __forceinline__ uint32_t shared_address(const void *p)
{
    return (uint32_t)__cvta_generic_to_shared(p);
}

static __device__ __forceinline__ void barrier_init(uint32_t b, int n)
{
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(b), "r"(n) : "memory");
}

static __device__ __forceinline__ void barrier_expect(uint32_t b, int n_bytes)
{
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(b), "r"(n_bytes) : "memory");
}

static __device__ __forceinline__ void barrier_wait(uint32_t b, uint32_t parity)
{
    uint32_t done;

    do
        asm volatile("{\n.reg .pred p;\nmbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}"
                     : "=r"(done)
                     : "r"(b), "r"(parity)
                     : "memory");
    while (!done);
}

/* Operands of wgmma in blocks of 8 rows (or columns) by 8 numbers that are multiplied, 128 bytes each: those of the next numbers are
 * `inner` bytes on, of the next rows `outer`. The address is that within the block of threads, without its place in the cluster. */
static __device__ __forceinline__ uint64_t operand_at(uint32_t at, uint32_t inner, uint32_t outer)
{
    return (uint64_t)((at & 0x3FFFF) >> 4) | (uint64_t)(inner >> 4) << 16 | (uint64_t)(outer >> 4) << 32;
}

/* Registers of sums, for asm, and where they stand in it. */
#define FOUR(c, i) "+f"((c)[i]), "+f"((c)[(i) + 1]), "+f"((c)[(i) + 2]), "+f"((c)[(i) + 3])
#define SIXTEEN(c, i) FOUR(c, i), FOUR(c, (i) + 4), FOUR(c, (i) + 8), FOUR(c, (i) + 12)
#define PLACES_32                                                                                                 \
    "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28," \
    "%29,%30,%31"
#define PLACES_64                                                                                                            \
    PLACES_32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58," \
              "%59,%60,%61,%62,%63"

#endif
