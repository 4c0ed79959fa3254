/* Decoding of mul1 tiles without a table: all that a value depends on is computed, eight states at a time. */
#include <string.h>

#include "kernels/kernels.h"
#include "kernels/simd.h"

#define N 8 /* lanes, on every instruction set: the compiler cuts them where its vectors are shorter */

typedef uint32_t x3_words __attribute__((vector_size(4 * N)));
typedef int32_t x3_ints __attribute__((vector_size(4 * N)));
typedef float x3_floats __attribute__((vector_size(4 * N)));

/* x3_codebook_value for mul1. The product and the sum are exact; the values are 0 or normal float16 numbers, so that rounding
 * to even is an addition to the bits that go. */
X3_LANEWISE void store_values(float *out, x3_words states)
{
    const x3_words x = states * X3_MUL1_MULTIPLIER;
    const x3_words pairs = (x & 0x00FF00FFu) + ((x >> 8) & 0x00FF00FFu);
    const x3_ints sum = (x3_ints)((pairs + (pairs >> 16)) & 0xFFFFu) + 1024;
    const x3_floats scaled = __builtin_convertvector(sum, x3_floats) * 0x1.bb8p-8f; /* half 0x1EEE */
    const x3_floats v = scaled + -0x1.4c4p3f;                                       /* half 0xC931 */
    x3_words bits = (x3_words)v;

    bits += 0xFFFu + ((bits >> 13) & 1);
    bits &= 0xFFFFE000u;
    memcpy(out, &bits, sizeof bits);
}

/* Eight columns of a row are positions 32 apart, so K words apart at one shift: column c takes its window from words
 * K c + first and the next. K is a constant where this is inlined. */
X3_LANEWISE void decode_tile(const uint32_t *words, const int K, float *out)
{
    x3_words column[X3_K_MAX + 2]; /* [w + 1]: word K c + w of the ring in lane c, w = -1 .. K */

    for (int w = -1; w <= K; w++)
        for (int c = 0; c < N; c++)
            column[w + 1][c] = words[(K * c + w + 8 * K) % (8 * K)];
    for (int a = 0; a < 4; a++)
        for (int j = 0; j < 8; j++) {
            const int begin = (8 * a + j + 1) * K + 16, first = begin / 32, shift = begin % 32; /* a word early: no sign */
            x3_words states = shift <= 16 ? column[first] >> (16 - shift)
                                          : (column[first] << (shift - 16)) | (column[first + 1] >> (48 - shift));
            store_values(out + (2 * a + (j & 1) + (j & 2) * 4) * X3_TILE + (j >> 2) * N, states & 0xFFFFu);
        }
}

void X3_SIMD_NAME(tile_decode_mul1)(const uint32_t *words, int K, float *out)
{
    switch (K) {
    case 1:
        decode_tile(words, 1, out);
        break;
    case 2:
        decode_tile(words, 2, out);
        break;
    case 3:
        decode_tile(words, 3, out);
        break;
    case 4:
        decode_tile(words, 4, out);
        break;
    case 5:
        decode_tile(words, 5, out);
        break;
    case 6:
        decode_tile(words, 6, out);
        break;
    case 7:
        decode_tile(words, 7, out);
        break;
    default:
        decode_tile(words, 8, out);
        break;
    }
}
