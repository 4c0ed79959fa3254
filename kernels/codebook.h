/* The three EXL3 codebooks: 16-bit state to float16 value. C11 and CUDA C++ alike; every form is EXACT.
 * Source: design/format.md; checked against all 65,536 values of golden/codec.safetensors. */
#ifndef X3_CODEBOOK_H
#define X3_CODEBOOK_H

#include <stdint.h>

#include "formats/codebook_kind.h"
#include "kernels/layout.h"

/* 3inst and mcg: the mixed 32 bits are two float16 numbers whose sum is the value. */
X3_INLINE uint32_t x3_codebook_mix_3inst(uint32_t state)
{
    uint32_t x = state * 89226354u + 64248484u;

    return (x & 0x8FFF8FFFu) ^ 0x3B603B60u;
}

X3_INLINE uint32_t x3_codebook_mix_mcg(uint32_t state)
{
    uint32_t x = state * X3_MCG_MULTIPLIER;

    return (x & 0x8FFF8FFFu) ^ 0x3B603B60u;
}

/* mul1: the sum of four bytes, 0..1020; value = (1024 + sum) * half(0x1EEE) + half(0xC931). */
X3_INLINE uint32_t x3_codebook_sum_mul1(uint32_t state)
{
    uint32_t x = state * X3_MUL1_MULTIPLIER;

    return (x & 0xFF) + ((x >> 8) & 0xFF) + ((x >> 16) & 0xFF) + (x >> 24);
}

#endif
