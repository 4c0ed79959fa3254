/* Weights a second of a whole linear on the GPU: target, regularization, factorization, LDLQ, refit, errors; and of LDLQ
 * alone. The peer's figure is of its scale search and LDLQ (exllamav3 1.4.1, one H200, ../shared/golden/README.md).
 *
 *     bench_group */
#include <stdio.h>
#include <stdlib.h>

#include "quant/quantize.h"

#define TRY(expr)                                    \
    do {                                             \
        if ((expr) != X3_OK) {                       \
            fprintf(stderr, "%s\n", err.text);       \
            exit(1);                                 \
        }                                            \
    } while (0)

static float *random_floats(x3_device *dev, const char *name, size_t n, float scale)
{
    float *host = NULL, *device = NULL;
    x3_rng rng;
    x3_err err = {0};

    TRY(x3_alloc(&host, n, sizeof *host, &err));
    x3_rng_init(&rng, 1, name);
    for (size_t i = 0; i < n; i++) /* nearly normal, and fast */
        host[i] = scale * 1.732f * ((float)(x3_rng_next(&rng) >> 40) + (float)(x3_rng_next(&rng) >> 40) - 0x1p24f) / 0x1p24f * 1.414f;
    TRY(x3_device_floats(dev, &device, n, &err));
    TRY(dev->ops->upload(dev, device, host, n * sizeof *host, &err));
    TRY(dev->ops->sync(dev, &err));
    free(host);
    return device;
}

static double encode_seconds(const x3_device *dev)
{
    return dev->busy_seconds[X3_WORK_ENCODE];
}

static void bench(x3_device *dev, size_t n_in, size_t n_out)
{
    static const double peer[] = {0, 0, 14.3, 16.1, 16.5};
    const size_t rows = 2048; /* the damping makes up for the rank */
    float *d_x = random_floats(dev, "x", rows * n_in, 1), *d_f = random_floats(dev, "f", rows * n_in, 1);
    float *d_w = random_floats(dev, "w", n_out * n_in, 0.02f);
    x3_quant_options options = X3_QUANT_DEFAULTS;
    x3_hessian *h = NULL;
    x3_err err = {0};

    TRY(dev->ops->axpy(dev, 10, d_x, d_f, rows * n_in, &err)); /* the original path's inputs are nearly the same */
    TRY(dev->ops->scale(dev, d_f, rows * n_in, 0.0995f, &err));
    TRY(x3_hessian_create(&h, dev, n_in, true, &err));
    TRY(x3_hessian_add(h, d_x, d_f, rows, &err));
    TRY(x3_hessian_finish(h, &err));
    for (int K = 2; K <= 4; K++)
        for (int round = 0; round < 2; round++) { /* the first loads kernels and grows scratch */
            x3_quant_linear q = {.name = "bench", .n_in = n_in, .n_out = n_out, .K = K, .d_w = d_w};
            bool uncalibrated;
            TRY(dev->ops->sync(dev, &err));
            const double start = x3_seconds(), encode = encode_seconds(dev), weights = (double)(n_in * n_out) / 1e6;
            TRY(x3_quantize_group(dev, &options, "bench", h, &q, 1, &uncalibrated, &err));
            TRY(dev->ops->sync(dev, &err));
            const double seconds = x3_seconds() - start;
            if (round == 1)
                printf("%zu inputs, %zu outputs, K = %d: %.2f s, %.1f million weights/s (peer %.1f: %.2fx); LDLQ alone %.1f\n", n_in,
                       n_out, K, seconds, weights / seconds, peer[K], weights / seconds / peer[K],
                       weights / (encode_seconds(dev) - encode));
            fflush(stdout);
            x3_quant_linear_free(dev, &q);
        }
    x3_hessian_free(h);
    x3_device_free(dev, d_x);
    x3_device_free(dev, d_f);
    x3_device_free(dev, d_w);
}

int main(void)
{
    x3_device *dev = NULL;
    x3_err err = {0};

    TRY(x3_device_open(&dev, "cuda", 0, &err));
    bench(dev, 4096, 14336);
    bench(dev, 14336, 4096);
    printf("peak %.1f GB of device memory (peer 9.7 GiB)\n", (double)dev->peak_bytes / 1e9);
    x3_device_close(dev);
    return 0;
}
