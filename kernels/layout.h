/* Where the 256 weights and the 256*K bits of a 16x16 tile lie. C11 and CUDA C++ alike.
 * Source: the EXL3 format as exllamav3 1.4 writes it (design/format.md). */
#ifndef X3_LAYOUT_H
#define X3_LAYOUT_H

#include <stdint.h>

#ifdef __CUDACC__
#define X3_INLINE static __host__ __device__ __forceinline__
#else
#define X3_INLINE static inline
#endif

#define X3_TILE 16          /* rows (inputs) and columns (outputs) of a tile */
#define X3_TILE_WEIGHTS 256 /* positions 0..255 of its trellis path */
#define X3_STATES 65536     /* 16-bit states */
#define X3_K_MAX 8
#define X3_HADAMARD 128     /* block of the Hadamard transform; groups are padded to multiples of it */

/* Position p sits at lane p / 8 and register p % 8 of a tensor-core operand. */
X3_INLINE int x3_tile_row(int p)
{
    int lane = p >> 3, j = p & 7;

    return 2 * (lane & 3) + (j & 1) + 8 * ((j >> 1) & 1);
}

X3_INLINE int x3_tile_column(int p)
{
    return (p >> 5) + 8 * ((p & 7) >> 2);
}

/* The inverse: position of (row, column). */
X3_INLINE int x3_tile_position(int row, int column)
{
    int lane = ((row & 7) >> 1) + 4 * (column & 7);

    return lane * 8 + (row & 1) + 2 * (row >> 3) + 4 * (column >> 3);
}

/* State at position p of a tile held as 8*K words of 32 bits. The tile is a ring of 256*K bits, word 0 first, most
 * significant bit first; the state is the 16 bits that end, exclusively, at bit (p + 1) * K. K divides 256*K, so the
 * window crosses at most one word border. */
X3_INLINE uint32_t x3_tile_state(const uint32_t *words, int K, int p)
{
    int n_bits = X3_TILE_WEIGHTS * K;
    int begin = (p + 1) * K - 16 + n_bits;
    int first = (begin >> 5) % (8 * K), shift = begin & 31;
    uint32_t high = words[first], low = words[(first + 1) % (8 * K)];
    uint64_t window = ((uint64_t)high << 32) | low;

    return (uint32_t)(window >> (48 - shift)) & 0xFFFFu;
}

#endif
