/* The operations that exist in more than one form, as one table per instruction set. `x3_kernels_ref` is plain C and
 * defines the answer; the others (AVX2, AVX-512, NEON: one source over simd.h, compiled for each) give the same bits,
 * class EXACT, unless the comment of an operation says otherwise. All of them run in one thread; whoever calls
 * them splits the work.
 *
 * Because every sum has a stated order, a result depends neither on the instruction set, nor on the number of threads,
 * nor on which other rows are computed in the same call (row invariance). */
#ifndef X3_KERNELS_H
#define X3_KERNELS_H

#include "formats/base.h"
#include "kernels/trellis.h"

#define X3_PANEL 16 /* columns of a panel: weights as [k][16] float32, columns past the end zero */

typedef enum x3_isa { X3_ISA_REF, X3_ISA_AVX2, X3_ISA_AVX512, X3_ISA_NEON, X3_N_ISAS } x3_isa;

typedef struct x3_kernels {
    x3_isa isa;
    const char *name;

    /* Best paths of n_tiles tiles: see trellis.h. x [n_tiles][256] in position order, states likewise. */
    void (*trellis_search)(const x3_trellis *t, const float *x, size_t n_tiles, uint16_t *states, void *scratch);

    /* y[r][c] = (accumulate ? y[r][c] : 0) then, for i = 0 .. k-1 in this order, fma(x[r][i], panel[i][c], .)
     * x [n_rows][k] with leading dimension ldx; panel row i at panel + i * ldp; y [n_rows][16] with ldy. */
    void (*panel_matmul)(const float *x, size_t ldx, size_t n_rows, const float *panel, size_t ldp, size_t k, float *y,
                         size_t ldy, bool accumulate);

    /* One tile of an EXL3 trellis to 16 rows of a panel: out[row * 16 + column] = value of its state. */
    void (*tile_decode)(const uint32_t *words, int K, const float *values, float *out);

    /* The same for the values of mul1, which are computed: no table falls out of the first-level cache. */
    void (*tile_decode_mul1)(const uint32_t *words, int K, float *out);

    /* Every 128 floats of x [n_blocks][128] in place: Sylvester-Hadamard over strides 1, 2, .. 64, divided by sqrt(128). */
    void (*hadamard)(float *x, size_t n_blocks);

    /* out[i] = (x[i] * r) * weight[i], r = 1 / sqrt(mean of squares + eps). The squares are summed in 16 lanes, element i
     * in lane i % 16, then halved pairwise. out may be x. */
    void (*rms_norm)(const float *x, const float *weight, size_t n, float eps, float *out);

    /* s[i] = exp(scale * s[i] - m), m the largest of scale * s[i] and *sink (when not NULL); returns the sum of the new
     * s in 16 lanes, then pairwise, then plus exp(*sink - m). */
    float (*softmax)(float *s, size_t n, float scale, const float *sink);

    /* out[i] = gate[i] / (1 + exp(-gate[i])) * up[i]. out may be either. */
    void (*silu_mul)(const float *gate, const float *up, size_t n, float *out);

    /* One position of the gated delta rule for one head, state s [k_dim][v_dim]. For every column j, i = 0 .. k_dim - 1 in
     * this order: s[i][j] *= decay, m = fma(s[i][j], k[i], m); then d = (v[j] - m) * beta; then again s[i][j] = fma(k[i], d,
     * s[i][j]), out[j] = fma(s[i][j], q[i], out[j]), from m = out[j] = 0. */
    void (*delta_step)(float *s, const float *q, const float *k, const float *v, size_t k_dim, size_t v_dim, float decay,
                       float beta, float *out);
} x3_kernels;

extern const x3_kernels x3_kernels_ref;
extern const x3_kernels x3_kernels_avx2;
extern const x3_kernels x3_kernels_avx512;
extern const x3_kernels x3_kernels_neon;

/* The table of `isa`, or NULL where this processor or this build lacks it. */
const x3_kernels *x3_kernels_find(x3_isa isa);
/* The fastest one present. */
const x3_kernels *x3_kernels_best(void);

/* ---- forms without a twin ------------------------------------------------------------------------------- */

/* Dense weights [n_out][n_in] to a panel: out[i * 16 + c] = weight[first_out + c][first_in + i], zero past n_out. */
typedef enum x3_dense_type { X3_DENSE_F32, X3_DENSE_BF16, X3_DENSE_F16 } x3_dense_type;

float x3_dense_value(const void *weight, x3_dense_type type, size_t index);
void x3_panel_pack(const void *weight, x3_dense_type type, size_t n_out, size_t n_in, size_t first_out, size_t first_in,
                   size_t k, float *out);

/* exp as the kernels compute it: within 2 ulp, inputs clamped to [-87.3, 88.7]. */
float x3_exp_ref(float x);

#endif
