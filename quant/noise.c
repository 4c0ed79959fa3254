#include "quant/quantize.h"

#include <math.h>
#include <stdlib.h>

#define TILE 16

/* LDLQ leaves an error E with (I + L')E = n, L' = L^T without its diagonal blocks and n the error of the search. So a row
 * of tiles has E = n - sum over later rows of L[later][row]^T E[later]. */
x3_status x3_quant_add_noise(x3_device *dev, const float *d_l, size_t n, float *d_q, size_t n_cols, double variance,
                             const char *name, uint64_t seed, x3_err *err)
{
    const x3_device_ops *ops = dev->ops;
    float *noise = NULL, *d_e = NULL;
    x3_rng rng;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&noise, n * n_cols, sizeof *noise, err));
    X3_TRY(rc, out, x3_device_floats(dev, &d_e, n * n_cols, err));
    x3_rng_init(&rng, seed, name);
    for (size_t i = 0; i < n * n_cols; i++)
        noise[i] = (float)(sqrt(variance) * x3_rng_normal(&rng));
    X3_TRY(rc, out, ops->upload(dev, d_e, noise, n * n_cols * sizeof *noise, err));
    for (size_t row = n - 2 * TILE; row < n; row -= TILE) { /* until it wraps */
        const size_t later = row + TILE;
        X3_TRY(rc, out, ops->gemm(dev, true, false, TILE, n_cols, n - later, -1, d_l + later * n + row, n,
                                  d_e + later * n_cols, n_cols, 1, d_e + row * n_cols, n_cols, err));
    }
    X3_TRY(rc, out, ops->axpy(dev, 1, d_e, d_q, n * n_cols, err));
    rc = ops->sync(dev, err);
out:
    free(noise);
    x3_device_free(dev, d_e);
    return rc;
}
