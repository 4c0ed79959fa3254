/* Second moments of the inputs of linears that share an input: A = sum x_q x_q^T over positions of the quantized path,
 * C = sum x_f x_q^T with x_f the input at the same position of the original path. Float32 or better (device.gram).
 * A position with a value that is not finite, on either path, is left out and counted. */
#ifndef X3_HESSIAN_H
#define X3_HESSIAN_H

#include "runtime/device/device.h"

typedef struct x3_hessian {
    x3_device *dev;
    size_t n;
    float *d_a; /* [n][n], lower triangle right until x3_hessian_finish */
    float *d_c; /* [n][n], or NULL when there is no original path (then C = A) */
    size_t n_rows, n_dropped;
    double weight; /* sum of the squared weights of the rows */
    double blended; /* part that came from another Hessian, x3_hessian_blend */
} x3_hessian;

x3_status x3_hessian_create(x3_hessian **out, x3_device *dev, size_t n, bool with_cross, x3_err *err) X3_MUST;
void x3_hessian_free(x3_hessian *h);
/* Adds positions: x_q, x_f [n_rows][n] (x_f may be NULL: taken equal to x_q). The inputs are not changed. */
x3_status x3_hessian_add(x3_hessian *h, const float *d_xq, const float *d_xf, size_t n_rows, x3_err *err) X3_MUST;
/* The same, row r counted weights[r]^2 times; weights [n_rows] in host memory, finite, or NULL: 1. A row that is left out
 * for a value that is not finite still counts in `weight`. */
x3_status x3_hessian_add_weighted(x3_hessian *h, const float *d_xq, const float *d_xf, const float *weights, size_t n_rows,
                                  x3_err *err) X3_MUST;
/* Divides by the count (the weight): A becomes the mean, both triangles; C likewise. With no rows everything stays zero. */
x3_status x3_hessian_finish(x3_hessian *h, x3_err *err) X3_MUST;
/* Both finished: A := (1 - part) A + part of other's, C likewise. */
x3_status x3_hessian_blend(x3_hessian *h, const x3_hessian *other, double part, x3_err *err) X3_MUST;

#endif
