/* What the CUDA tests and the benchmark share: random groups in device memory and float64 products of them. */
#ifndef X3_CUDA_TEST_CUH
#define X3_CUDA_TEST_CUH

#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/cuda_kernels.h"
extern "C" {
#include "kernels/kernels.h"
#include "kernels/parallel.h"
}

/* In tests and benchmarks a CUDA failure ends the program: nothing after it would mean anything. */
#define MUST(expr)                                                                                            \
    do {                                                                                                      \
        cudaError_t error_ = (expr);                                                                          \
        if (error_ != cudaSuccess) {                                                                          \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #expr, cudaGetErrorString(error_));                \
            exit(1);                                                                                          \
        }                                                                                                     \
    } while (0)

#define MUST_X3(expr)                                                             \
    do {                                                                          \
        x3_err err_ = {};                                                         \
        x3_err *err = &err_;                                                      \
        if ((expr) != X3_OK) {                                                    \
            printf("%s:%d: %s: %s\n", __FILE__, __LINE__, #expr, err_.text);     \
            exit(1);                                                              \
        }                                                                         \
    } while (0)

static const char *const codebook_name[] = {"3inst", "mcg", "mul1"};

static inline void *device_alloc(size_t n_bytes)
{
    void *p = NULL;

    MUST(cudaMalloc(&p, n_bytes > 0 ? n_bytes : 1));
    MUST(cudaMemset(p, 0, n_bytes > 0 ? n_bytes : 1));
    return p;
}

static inline void *to_device(const void *from, size_t n_bytes)
{
    void *p = device_alloc(n_bytes);

    MUST(cudaMemcpy(p, from, n_bytes, cudaMemcpyHostToDevice));
    return p;
}

static inline void *to_host(const void *d_from, size_t n_bytes)
{
    void *p = malloc(n_bytes > 0 ? n_bytes : 1);

    if (p == NULL)
        exit(1);
    MUST(cudaMemcpy(p, d_from, n_bytes, cudaMemcpyDeviceToHost));
    return p;
}

/* Cheap noise by position, good enough for words and rows. */
static __host__ __device__ __forceinline__ uint32_t noise(uint64_t i, uint32_t seed)
{
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull + ((uint64_t)seed << 32 | seed);

    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
    return (uint32_t)((z ^ (z >> 31)) >> 32);
}

static __host__ __device__ __forceinline__ float noise_normal(uint64_t i, uint32_t seed)
{
    float u = ((float)(noise(2 * i, seed) >> 8) + 0.5f) / 16777216.0f, v = (float)(noise(2 * i + 1, seed) >> 8) / 16777216.0f;

    return sqrtf(-2.0f * logf(u)) * cosf(6.2831853f * v);
}

static __global__ void fill_noise(uint32_t *out, size_t n, uint32_t seed)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        out[i] = noise(i, seed);
}

static __global__ void fill_normal(float *out, size_t n, uint32_t seed, float scale)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        out[i] = scale * noise_normal(i, seed);
}

static __global__ void halve(const float *from, __half *to, size_t n)
{
    for (size_t i = (size_t)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x)
        to[i] = __float2half_rn(from[i]);
}

/* Random words; scales of about 0.03 and 1 with random signs; a bias. */
static inline x3_cuda_group group_create(int K, x3_codebook codebook, size_t n_in, size_t n_out, bool bias, uint32_t seed)
{
    x3_cuda_group g = {};
    const size_t in = x3_round_up(n_in, 128), out = x3_round_up(n_out, 128), n_words = in / 16 * (out / 16) * 8 * (size_t)K;
    uint16_t *scale = (uint16_t *)malloc((in > out ? in : out) * 2);
    float *b = (float *)malloc(n_out * 4);

    g.K = K;
    g.codebook = codebook;
    g.n_in = n_in;
    g.n_out = n_out;
    g.n_in_padded = in;
    g.n_out_padded = out;
    uint32_t *words = (uint32_t *)device_alloc(n_words * 4);
    fill_noise<<<512, 256>>>(words, n_words, seed);
    g.d_words = words;
    for (size_t i = 0; i < in; i++)
        scale[i] = __half_as_ushort(__float2half((noise(i, seed + 1) & 1 ? -1 : 1) * (0.02f + 0.02f * (float)(noise(i, seed + 2) >> 8) / 16777216.0f)));
    g.d_suh = (const uint16_t *)to_device(scale, in * 2);
    for (size_t i = 0; i < out; i++)
        scale[i] = __half_as_ushort(__float2half((noise(i, seed + 3) & 1 ? -1 : 1) * (0.7f + 0.6f * (float)(noise(i, seed + 4) >> 8) / 16777216.0f)));
    g.d_svh = (const uint16_t *)to_device(scale, out * 2);
    for (size_t i = 0; i < n_out; i++)
        b[i] = noise_normal(i, seed + 5);
    if (bias)
        g.d_bias = (const float *)to_device(b, n_out * 4);
    MUST(cudaDeviceSynchronize());
    free(scale);
    free(b);
    return g;
}

static inline void group_free(x3_cuda_group *g)
{
    cudaFree((void *)g->d_words);
    cudaFree((void *)g->d_suh);
    cudaFree((void *)g->d_svh);
    cudaFree((void *)g->d_bias);
    memset(g, 0, sizeof *g);
}

static inline void hadamard_f64(double *x, size_t n)
{
    for (size_t b = 0; b < n; b += 128, x += 128) {
        for (int stride = 1; stride < 128; stride *= 2)
            for (int i = 0; i < 128; i++)
                if ((i & stride) == 0) {
                    double low = x[i], high = x[i + stride];
                    x[i] = low + high;
                    x[i + stride] = low - high;
                }
        for (int i = 0; i < 128; i++)
            x[i] /= sqrt(128.0);
    }
}

static __global__ void product_f64(const double *x, const float *w, double *y, int n_rows, int n_in, int n_out)
{
    const int c = blockIdx.x * blockDim.x + threadIdx.x, r = blockIdx.y;
    double sum = 0;

    for (int i = 0; i < n_in; i++)
        sum += x[(size_t)r * n_in + i] * (double)w[(size_t)i * n_out + c];
    y[(size_t)r * n_out + c] = sum;
}

/* y [n_rows][n_out] on the host, in float64 throughout, from x [n_rows][n_in] on the host. d_wq is the reconstruction. */
static inline double *linear_f64(const x3_cuda_group *g, const float *d_wq, const float *x, size_t n_rows)
{
    const size_t in = g->n_in_padded, out = g->n_out_padded;
    uint16_t *suh = (uint16_t *)to_host(g->d_suh, in * 2), *svh = (uint16_t *)to_host(g->d_svh, out * 2);
    float *bias = g->d_bias != NULL ? (float *)to_host(g->d_bias, g->n_out * 4) : NULL;
    double *xd = (double *)calloc(n_rows * in, 8), *y = (double *)malloc(n_rows * g->n_out * 8);

    for (size_t r = 0; r < n_rows; r++) {
        for (size_t i = 0; i < g->n_in; i++)
            xd[r * in + i] = (double)x[r * g->n_in + i] * (double)__half2float(__ushort_as_half(suh[i]));
        hadamard_f64(xd + r * in, in);
    }
    double *d_x = (double *)to_device(xd, n_rows * in * 8), *d_y = (double *)device_alloc(n_rows * out * 8);
    product_f64<<<dim3((unsigned)(out / 128), (unsigned)n_rows), 128>>>(d_x, d_wq, d_y, (int)n_rows, (int)in, (int)out);
    double *full = (double *)to_host(d_y, n_rows * out * 8);
    for (size_t r = 0; r < n_rows; r++) {
        hadamard_f64(full + r * out, out);
        for (size_t c = 0; c < g->n_out; c++)
            y[r * g->n_out + c] = full[r * out + c] * (double)__half2float(__ushort_as_half(svh[c])) + (bias != NULL ? bias[c] : 0);
    }
    cudaFree(d_x);
    cudaFree(d_y);
    free(suh);
    free(svh);
    free(bias);
    free(xd);
    free(full);
    return y;
}

static inline double relative_error(const float *y, const double *exact, size_t n)
{
    double error = 0, sum = 0;

    for (size_t i = 0; i < n; i++) {
        error += ((double)y[i] - exact[i]) * ((double)y[i] - exact[i]);
        sum += exact[i] * exact[i];
    }
    return isfinite(error) ? sqrt(error / sum) : INFINITY;
}

/* CPU search of many tiles on all cores. */
typedef struct cpu_search {
    const x3_trellis *trellis;
    const float *x;
    size_t n_tiles;
    uint16_t *states;
    char *scratch;
    size_t scratch_bytes;
} cpu_search;

static void cpu_search_item(void *arg, size_t item, int thread)
{
    cpu_search *c = (cpu_search *)arg;
    const size_t first = item * 4, n = x3_min_size(4, c->n_tiles - first);

    x3_kernels_best()->trellis_search(c->trellis, c->x + first * 256, n, c->states + first * 256,
                                      c->scratch + (size_t)thread * c->scratch_bytes);
}

static inline void cpu_search_run(x3_pool *pool, const x3_trellis *t, const float *x, size_t n_tiles, uint16_t *states)
{
    cpu_search c = {t, x, n_tiles, states, NULL, x3_round_up(x3_trellis_scratch_bytes(t->K), 64)};

    MUST_X3(x3_alloc(&c.scratch, (size_t)x3_pool_threads(pool) * c.scratch_bytes, 1, err));
    x3_pool_run(pool, (n_tiles + 3) / 4, cpu_search_item, &c);
    free(c.scratch);
}

/* Input scale at which tiles are encoded: x3_quant_nominal_scale of quant/group.c, which is not linked here. */
static inline double nominal_scale(x3_codebook codebook, int K)
{
    static const double mul1[] = {1.13, 1.003, .933, .915, .887, .852, .824, .812};
    static const double sums[] = {1.43, 1.26, 1.18, 1.125, 1.083, 1.02, .98, .955};

    return (codebook == X3_CB_MUL1 ? mul1 : sums)[K - 1];
}

#endif
