/* Keys and values of the cache in fewer bits than float32: types, layout of a block, rounding. C11 and C++17 alike.
 *
 * A block holds the 64 positions of a page for one KV head: its keys, or its values, dim numbers a position (a multiple of
 * 32), then scales.
 *   X3_KV_BF16  keys uint16 [64][dim], values uint16 [dim][64]
 *   X3_KV_INT8  keys int8 [64][dim], values int8 [dim][64]; float scales [64]: number = integer * scale of the position
 *   X3_KV_INT4  keys bytes [64][dim / 2], dimension 2 i in the low half of byte i; values bytes [dim / 2][64], where
 *               byte row 16 g + i has dimensions 32 g + i (low half) and 32 g + i + 16; a half is the integer + 8;
 *               BF16 scales [dim / 32][64]: number = integer * scale of the position and of its 32 dimensions.
 *               Scales have five significant bits, so that the product is exact in BF16. */
#ifndef X3_KV_TYPES_H
#define X3_KV_TYPES_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef enum x3_kv_type { X3_KV_F32, X3_KV_BF16, X3_KV_INT8, X3_KV_INT4 } x3_kv_type;

#define X3_KV_PAGE 64  /* positions a page */
#define X3_KV_GROUP 32 /* dimensions of a scale of X3_KV_INT4 */
#define X3_KV_DIM 256  /* of a packed block, at most */

#ifdef __CUDACC__
#define X3_KV_FN static __host__ __device__ __forceinline__
#else
#define X3_KV_FN static inline
#endif

/* Bytes of the numbers of a block, without scales. */
X3_KV_FN size_t x3_kv_number_bytes(x3_kv_type type, size_t dim)
{
    return X3_KV_PAGE * dim * (type == X3_KV_F32 ? 8 : type == X3_KV_BF16 ? 4 : type == X3_KV_INT8 ? 2 : 1) / 2;
}

X3_KV_FN size_t x3_kv_block_bytes(x3_kv_type type, size_t dim)
{
    return x3_kv_number_bytes(type, dim) + (type == X3_KV_INT8   ? X3_KV_PAGE * sizeof(float)
                                            : type == X3_KV_INT4 ? X3_KV_PAGE * (dim / X3_KV_GROUP) * sizeof(uint16_t)
                                                                 : 0);
}

X3_KV_FN uint32_t x3_kv_bits(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

X3_KV_FN float x3_kv_float(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

/* The scale of numbers whose largest magnitude has these bits; NaN where one is not finite, 0 where all are next to
 * nothing. */
X3_KV_FN float x3_kv_scale(x3_kv_type type, uint32_t largest)
{
    if (largest >= 0x7F800000u)
        return x3_kv_float(0x7FC00000u);
    if (largest < 0x0D800000u) /* 2^-100 */
        return 0;
    if (type == X3_KV_INT8)
        return x3_kv_float(largest) / 127.0f;
    return x3_kv_float((x3_kv_bits(x3_kv_float(largest) / 7.0f) + 0x7FFFFu) & ~0x7FFFFu);
}

/* The integer of x, to nearest, ties to even. */
X3_KV_FN int x3_kv_integer(x3_kv_type type, float x, float scale)
{
    const int most = type == X3_KV_INT8 ? 127 : 7;

    if (!(scale > 0))
        return 0;
    const int i = (int)rintf(x / scale);
    return i > most ? most : i < -most ? -most : i;
}

/* To nearest, ties to even; a NaN stays one. */
X3_KV_FN uint16_t x3_kv_bf16(float x)
{
    const uint32_t bits = x3_kv_bits(x);

    if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFFu + (bits >> 16 & 1)) >> 16);
}

#endif
