/* One vector type and its operations for AVX-512, AVX2 with FMA, and NEON. A kernel written over it is compiled once
 * for each (Makefile: X3_ISA is avx512, avx2 or neon) and gives the same bits as its _ref form, because it uses only
 * lane-wise operations with one rounding each. X3_LANES floats a vector. */
#ifndef X3_SIMD_H
#define X3_SIMD_H

#include <stdint.h>

#include "kernels/trellis.h"

/* X3_SIMD_NAME(foo) is x3_foo_avx2 and so on. */
#define X3_SIMD_PASTE2(name, isa) x3_##name##_##isa
#define X3_SIMD_PASTE(name, isa) X3_SIMD_PASTE2(name, isa)
#define X3_SIMD_NAME(name) X3_SIMD_PASTE(name, X3_ISA)

#define X3_LANEWISE static inline __attribute__((always_inline))

/* Defined in trellis_simd.c and mul1_simd.c for the table in forward_simd.c. */
void X3_SIMD_NAME(trellis_search)(const x3_trellis *t, const float *x, size_t n_tiles, uint16_t *states, void *scratch);
void X3_SIMD_NAME(tile_decode_mul1)(const uint32_t *words, int K, float *out);

#if defined(__AVX512F__)

#include <immintrin.h>
#define X3_LANES 16
typedef __m512 x3_vec;
typedef __m512i x3_veci;

X3_LANEWISE x3_vec v_load(const float *p) { return _mm512_loadu_ps(p); }
X3_LANEWISE void v_store(float *p, x3_vec a) { _mm512_storeu_ps(p, a); }
X3_LANEWISE x3_vec v_set1(float a) { return _mm512_set1_ps(a); }
X3_LANEWISE x3_vec v_add(x3_vec a, x3_vec b) { return _mm512_add_ps(a, b); }
X3_LANEWISE x3_vec v_sub(x3_vec a, x3_vec b) { return _mm512_sub_ps(a, b); }
X3_LANEWISE x3_vec v_mul(x3_vec a, x3_vec b) { return _mm512_mul_ps(a, b); }
X3_LANEWISE x3_vec v_div(x3_vec a, x3_vec b) { return _mm512_div_ps(a, b); }
X3_LANEWISE x3_vec v_fma(x3_vec a, x3_vec b, x3_vec c) { return _mm512_fmadd_ps(a, b, c); }
X3_LANEWISE x3_vec v_min(x3_vec a, x3_vec b) { return _mm512_min_ps(a, b); }
X3_LANEWISE x3_vec v_max(x3_vec a, x3_vec b) { return _mm512_max_ps(a, b); }
X3_LANEWISE x3_veci vi_set1(int32_t a) { return _mm512_set1_epi32(a); }
X3_LANEWISE x3_veci vi_add(x3_veci a, x3_veci b) { return _mm512_add_epi32(a, b); }
X3_LANEWISE x3_veci vi_shl23(x3_veci a) { return _mm512_slli_epi32(a, 23); }
X3_LANEWISE x3_veci v_round_to_int(x3_vec a) { return _mm512_cvtps_epi32(a); }
X3_LANEWISE x3_vec v_from_int(x3_veci a) { return _mm512_cvtepi32_ps(a); }
X3_LANEWISE x3_vec v_cast(x3_veci a) { return _mm512_castsi512_ps(a); }
/* Lane i takes lane i ^ stride. */
X3_LANEWISE x3_vec v_swap(x3_vec a, int stride)
{
    switch (stride) {
    case 1:
        return _mm512_permute_ps(a, 0xB1);
    case 2:
        return _mm512_permute_ps(a, 0x4E);
    case 4:
        return _mm512_shuffle_f32x4(a, a, 0xB1);
    default:
        return _mm512_shuffle_f32x4(a, a, 0x4E);
    }
}
/* Lanes i take p[i / repeat]: repeat is a power of two, constant where it is inlined. */
X3_LANEWISE x3_vec v_load_repeat(const float *p, int repeat)
{
    if (repeat >= 16)
        return _mm512_set1_ps(p[0]);
    if (repeat == 8)
        return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1),
                                     _mm512_castps128_ps512(_mm_castsi128_ps(_mm_loadl_epi64((const void *)p))));
    if (repeat == 4)
        return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 0, 0, 1, 1, 1, 1, 2, 2, 2, 2, 3, 3, 3, 3),
                                     _mm512_castps128_ps512(_mm_loadu_ps(p)));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7),
                                 _mm512_castps256_ps512(_mm256_loadu_ps(p)));
}

#elif defined(__AVX2__) && defined(__FMA__)

#include <immintrin.h>
#define X3_LANES 8
typedef __m256 x3_vec;
typedef __m256i x3_veci;

X3_LANEWISE x3_vec v_load(const float *p) { return _mm256_loadu_ps(p); }
X3_LANEWISE void v_store(float *p, x3_vec a) { _mm256_storeu_ps(p, a); }
X3_LANEWISE x3_vec v_set1(float a) { return _mm256_set1_ps(a); }
X3_LANEWISE x3_vec v_add(x3_vec a, x3_vec b) { return _mm256_add_ps(a, b); }
X3_LANEWISE x3_vec v_sub(x3_vec a, x3_vec b) { return _mm256_sub_ps(a, b); }
X3_LANEWISE x3_vec v_mul(x3_vec a, x3_vec b) { return _mm256_mul_ps(a, b); }
X3_LANEWISE x3_vec v_div(x3_vec a, x3_vec b) { return _mm256_div_ps(a, b); }
X3_LANEWISE x3_vec v_fma(x3_vec a, x3_vec b, x3_vec c) { return _mm256_fmadd_ps(a, b, c); }
X3_LANEWISE x3_vec v_min(x3_vec a, x3_vec b) { return _mm256_min_ps(a, b); }
X3_LANEWISE x3_vec v_max(x3_vec a, x3_vec b) { return _mm256_max_ps(a, b); }
X3_LANEWISE x3_veci vi_set1(int32_t a) { return _mm256_set1_epi32(a); }
X3_LANEWISE x3_veci vi_add(x3_veci a, x3_veci b) { return _mm256_add_epi32(a, b); }
X3_LANEWISE x3_veci vi_shl23(x3_veci a) { return _mm256_slli_epi32(a, 23); }
X3_LANEWISE x3_veci v_round_to_int(x3_vec a) { return _mm256_cvtps_epi32(a); }
X3_LANEWISE x3_vec v_from_int(x3_veci a) { return _mm256_cvtepi32_ps(a); }
X3_LANEWISE x3_vec v_cast(x3_veci a) { return _mm256_castsi256_ps(a); }
X3_LANEWISE x3_vec v_swap(x3_vec a, int stride)
{
    if (stride == 1)
        return _mm256_permute_ps(a, 0xB1);
    return stride == 2 ? _mm256_permute_ps(a, 0x4E) : _mm256_permute2f128_ps(a, a, 1);
}
X3_LANEWISE x3_vec v_load_repeat(const float *p, int repeat)
{
    if (repeat >= 8)
        return _mm256_broadcast_ss(p);
    if (repeat == 4)
        return _mm256_set_m128(_mm_broadcast_ss(p + 1), _mm_broadcast_ss(p));
    return _mm256_permutevar_ps(_mm256_broadcast_ps((const void *)p), _mm256_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3));
}

#elif defined(__aarch64__)

#include <arm_neon.h>
#define X3_LANES 4
typedef float32x4_t x3_vec;
typedef int32x4_t x3_veci;

X3_LANEWISE x3_vec v_load(const float *p) { return vld1q_f32(p); }
X3_LANEWISE void v_store(float *p, x3_vec a) { vst1q_f32(p, a); }
X3_LANEWISE x3_vec v_set1(float a) { return vdupq_n_f32(a); }
X3_LANEWISE x3_vec v_add(x3_vec a, x3_vec b) { return vaddq_f32(a, b); }
X3_LANEWISE x3_vec v_sub(x3_vec a, x3_vec b) { return vsubq_f32(a, b); }
X3_LANEWISE x3_vec v_mul(x3_vec a, x3_vec b) { return vmulq_f32(a, b); }
X3_LANEWISE x3_vec v_div(x3_vec a, x3_vec b) { return vdivq_f32(a, b); }
X3_LANEWISE x3_vec v_fma(x3_vec a, x3_vec b, x3_vec c) { return vfmaq_f32(c, a, b); }
X3_LANEWISE x3_vec v_min(x3_vec a, x3_vec b) { return vminq_f32(a, b); }
X3_LANEWISE x3_vec v_max(x3_vec a, x3_vec b) { return vmaxq_f32(a, b); }
X3_LANEWISE x3_veci vi_set1(int32_t a) { return vdupq_n_s32(a); }
X3_LANEWISE x3_veci vi_add(x3_veci a, x3_veci b) { return vaddq_s32(a, b); }
X3_LANEWISE x3_veci vi_shl23(x3_veci a) { return vshlq_n_s32(a, 23); }
X3_LANEWISE x3_veci v_round_to_int(x3_vec a) { return vcvtnq_s32_f32(a); }
X3_LANEWISE x3_vec v_from_int(x3_veci a) { return vcvtq_f32_s32(a); }
X3_LANEWISE x3_vec v_cast(x3_veci a) { return vreinterpretq_f32_s32(a); }
X3_LANEWISE x3_vec v_swap(x3_vec a, int stride)
{
    return stride == 1 ? vrev64q_f32(a) : vextq_f32(a, a, 2);
}
X3_LANEWISE x3_vec v_load_repeat(const float *p, int repeat)
{
    if (repeat >= 4)
        return vld1q_dup_f32(p);
    float32x2_t two = vld1_f32(p);
    return vcombine_f32(vdup_lane_f32(two, 0), vdup_lane_f32(two, 1));
}

#else
#error "simd.h needs AVX-512F, AVX2 with FMA, or NEON"
#endif

#endif
