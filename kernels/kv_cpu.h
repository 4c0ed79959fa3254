/* Packed blocks of the cache (kv_types.h) on the CPU. */
#ifndef X3_KV_CPU_H
#define X3_KV_CPU_H

#include "kernels/kv_types.h"

/* Position in_page of a block := x [dim]. */
void x3_kv_pack_keys(x3_kv_type type, const float *x, size_t dim, size_t in_page, void *block);
void x3_kv_pack_values(x3_kv_type type, const float *x, size_t dim, size_t in_page, void *block);

/* out [dim][16] = keys of positions [first, first + 16). */
void x3_kv_unpack_keys(x3_kv_type type, const void *block, size_t dim, size_t first, float *out);
/* out [to - from][ld] = values of positions [from, to), zero from dim to ld. */
void x3_kv_unpack_values(x3_kv_type type, const void *block, size_t dim, size_t from, size_t to, float *out, size_t ld);

#endif
