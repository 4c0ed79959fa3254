#include "kernels/mixers_cpu.h"

#include <math.h>
#include <string.h>

/* ---- convolution ---- */

size_t x3_conv_scratch(size_t kernel)
{
    return 2 * kernel * X3_CONV_CHANNELS + X3_CONV_CHANNELS;
}

void x3_conv_cpu(const x3_kernels *k, const x3_conv_item *t, float *scratch)
{
    const size_t n = t->n, kernel = t->kernel;
    float *weight = scratch, *window = weight + kernel * n, *ones = window + kernel * n;

    for (size_t c = 0; c < n; c++) {
        for (size_t j = 0; j < kernel; j++)
            weight[j * n + c] = t->weight[c * kernel + j];
        ones[c] = 1;
    }
    if (t->fresh)
        memset(window, 0, (kernel - 1) * n * sizeof *window);
    for (size_t j = 0; j + 1 < kernel && !t->fresh; j++)
        memcpy(window + j * n, t->state + j * t->ld_state, n * sizeof *window);
    for (size_t r = 0; r < t->n_rows; r++) {
        float *y = t->y + r * t->ld;
        memcpy(window + (kernel - 1) * n, t->x + r * t->ld, n * sizeof *window);
        for (size_t c = 0; c < n; c++)
            y[c] = weight[c] * window[c];
        for (size_t j = 1; j < kernel; j++)
            for (size_t c = 0; c < n; c++)
                y[c] = y[c] + weight[j * n + c] * window[j * n + c];
        k->silu_mul(y, ones, n, y);
        memmove(window, window + n, (kernel - 1) * n * sizeof *window);
    }
    for (size_t j = 0; j + 1 < kernel; j++)
        memcpy(t->state + j * t->ld_state, window + j * n, n * sizeof *window);
}

/* ---- delta rule ---- */

/* x / |x| * scale */
static void normalize(const float *x, size_t n, float scale, float *out)
{
    float sum = 0;

    for (size_t i = 0; i < n; i++)
        sum += x[i] * x[i];
    scale /= sqrtf(sum + 1e-6f);
    for (size_t i = 0; i < n; i++)
        out[i] = x[i] * scale;
}

static float softplus(float x)
{
    return x > 20 ? x : (float)log1p(exp((double)x));
}

void x3_delta_cpu(const x3_kernels *k, const x3_delta_item *t, float *scratch)
{
    const float scale = (float)(1 / sqrt((double)t->k_dim)), rate = x3_exp_ref(t->a_log);
    float *q = scratch, *key = q + t->k_dim;

    if (t->fresh)
        memset(t->state, 0, t->k_dim * t->v_dim * sizeof *t->state);
    for (size_t r = 0; r < t->n_rows; r++) {
        float decay = x3_exp_ref(-rate * softplus(t->a[r * t->ld_ba] + t->dt_bias));
        float beta = 1.0f / (1.0f + x3_exp_ref(-t->b[r * t->ld_ba]));
        normalize(t->q + r * t->ld, t->k_dim, scale, q);
        normalize(t->k + r * t->ld, t->k_dim, 1, key);
        k->delta_step(t->state, q, key, t->v + r * t->ld, t->k_dim, t->v_dim, decay, beta, t->out + r * t->ld_out);
    }
}
