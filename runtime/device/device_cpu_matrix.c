/* Element-wise operations, Hadamard transforms, LDLQ and decoding of the CPU device. */
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"
#include "kernels/linear_cpu.h"
#include "runtime/device/device_cpu.h"

struct matrix_work {
    const x3_kernels *k;
    const float *x, *y;
    float *out;
    double *sums;
    size_t n_rows, n_cols, n_out, n_in;
    const float *values;
    const x3_weight *w;
};

#define STRIP 64 /* columns of an item where work goes down columns */
#define ROWS 16

static size_t strips(size_t n)
{
    return (n + STRIP - 1) / STRIP;
}

#define FLOATS 65536 /* of a weight, an item */

static void floats_item(void *arg, size_t item, int thread)
{
    const struct matrix_work *t = arg;
    const x3_weight *w = t->w;
    const size_t first = item * FLOATS, end = x3_min_size(w->n_out * w->n_in, first + FLOATS);

    (void)thread;
    if (w->kind == X3_WEIGHT_F32)
        memcpy(t->out + first, (const float *)w->data + first, (end - first) * sizeof(float));
    else if (w->kind == X3_WEIGHT_BF16)
        for (size_t i = first; i < end; i++)
            t->out[i] = x3_bf16_to_f32(((const uint16_t *)w->data)[i]);
    else
        for (size_t i = first; i < end; i++)
            t->out[i] = x3_f16_to_f32(((const uint16_t *)w->data)[i]);
}

x3_status x3_cpu_dense_floats(x3_device *dev, const x3_weight *w, float *out, x3_err *err)
{
    struct matrix_work t = {.w = w, .out = out};

    (void)err;
    x3_pool_run(x3_cpu(dev)->pool, (w->n_out * w->n_in + FLOATS - 1) / FLOATS, floats_item, &t);
    return X3_OK;
}

static void transpose_item(void *arg, size_t item, int thread)
{
    const struct matrix_work *t = arg;
    size_t end = x3_min_size(t->n_cols, (item + 1) * STRIP);

    (void)thread;
    for (size_t i = 0; i < t->n_rows; i++)
        for (size_t o = item * STRIP; o < end; o++)
            t->out[i * t->n_cols + o] = i < t->n_in && o < t->n_out ? t->x[o * t->n_in + i] : 0;
}

x3_status x3_cpu_transpose_pad(x3_device *dev, const float *w, size_t n_out, size_t n_in, float *out,
                               size_t n_out_padded, size_t n_in_padded, x3_err *err)
{
    struct matrix_work t = {.x = w, .n_out = n_out, .n_in = n_in, .out = out, .n_rows = n_in_padded,
                            .n_cols = n_out_padded};

    (void)err;
    x3_pool_run(x3_cpu(dev)->pool, strips(n_out_padded), transpose_item, &t);
    return X3_OK;
}

x3_status x3_cpu_scale_rows(x3_device *dev, float *x, size_t n_rows, size_t n_cols, const float *s, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t r = 0; r < n_rows; r++)
        for (size_t c = 0; c < n_cols; c++)
            x[r * n_cols + c] *= s[r];
    return X3_OK;
}

x3_status x3_cpu_scale_cols(x3_device *dev, float *x, size_t n_rows, size_t n_cols, const float *s, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t r = 0; r < n_rows; r++)
        for (size_t c = 0; c < n_cols; c++)
            x[r * n_cols + c] *= s[c];
    return X3_OK;
}

static void row_dot_item(void *arg, size_t item, int thread)
{
    const struct matrix_work *t = arg;
    size_t end = x3_min_size(t->n_rows, (item + 1) * ROWS);

    (void)thread;
    for (size_t r = item * ROWS; r < end; r++) {
        double sum = 0;
        for (size_t c = 0; c < t->n_cols; c++)
            sum += (double)t->x[r * t->n_cols + c] * t->y[r * t->n_cols + c];
        t->sums[r] = sum;
    }
}

x3_status x3_cpu_row_dots(x3_device *dev, const float *x, const float *y, size_t n_rows, size_t n_cols, double *out,
                          x3_err *err)
{
    struct matrix_work t = {.x = x, .y = y, .n_rows = n_rows, .n_cols = n_cols, .sums = out};

    (void)err;
    x3_pool_run(x3_cpu(dev)->pool, (n_rows + ROWS - 1) / ROWS, row_dot_item, &t);
    return X3_OK;
}

static void col_dot_item(void *arg, size_t item, int thread)
{
    const struct matrix_work *t = arg;
    size_t first = item * STRIP, end = x3_min_size(t->n_cols, first + STRIP);

    (void)thread;
    for (size_t c = first; c < end; c++)
        t->sums[c] = 0;
    for (size_t r = 0; r < t->n_rows; r++)
        for (size_t c = first; c < end; c++)
            t->sums[c] += (double)t->x[r * t->n_cols + c] * t->y[r * t->n_cols + c];
}

x3_status x3_cpu_col_dots(x3_device *dev, const float *x, const float *y, size_t n_rows, size_t n_cols, double *out,
                          x3_err *err)
{
    struct matrix_work t = {.x = x, .y = y, .n_rows = n_rows, .n_cols = n_cols, .sums = out};

    (void)err;
    x3_pool_run(x3_cpu(dev)->pool, strips(n_cols), col_dot_item, &t);
    return X3_OK;
}

x3_status x3_cpu_multiply(x3_device *dev, float *x, const float *y, size_t n, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t i = 0; i < n; i++)
        x[i] *= y[i];
    return X3_OK;
}

x3_status x3_cpu_scale(x3_device *dev, float *x, size_t n, float alpha, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t i = 0; i < n; i++)
        x[i] *= alpha;
    return X3_OK;
}

x3_status x3_cpu_add_diagonal(x3_device *dev, float *a, size_t n, const float *d, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t i = 0; i < n; i++)
        a[i * n + i] += d[i];
    return X3_OK;
}

x3_status x3_cpu_axpy(x3_device *dev, float alpha, const float *x, float *y, size_t n, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t i = 0; i < n; i++)
        y[i] += alpha * x[i];
    return X3_OK;
}

static void hadamard_row_item(void *arg, size_t item, int thread)
{
    const struct matrix_work *t = arg;
    size_t end = x3_min_size(t->n_rows, (item + 1) * ROWS);

    (void)thread;
    for (size_t r = item * ROWS; r < end; r++)
        t->k->hadamard(t->out + r * t->n_cols, t->n_cols / X3_HADAMARD);
}

x3_status x3_cpu_hadamard_rows(x3_device *dev, float *x, size_t n_rows, size_t n_cols, x3_err *err)
{
    struct matrix_work t = {.k = x3_cpu(dev)->k, .out = x, .n_rows = n_rows, .n_cols = n_cols};

    (void)err;
    x3_pool_run(x3_cpu(dev)->pool, (n_rows + ROWS - 1) / ROWS, hadamard_row_item, &t);
    return X3_OK;
}

static void hadamard_col_item(void *arg, size_t item, int thread)
{
    const struct matrix_work *t = arg;
    size_t block = item / strips(t->n_cols), first = item % strips(t->n_cols) * STRIP;
    size_t n = x3_min_size(STRIP, t->n_cols - first);
    float *x = t->out + block * X3_HADAMARD * t->n_cols + first;

    (void)thread;
    for (size_t stride = 1; stride < X3_HADAMARD; stride *= 2)
        for (size_t i = 0; i < X3_HADAMARD; i++) {
            if ((i & stride) != 0)
                continue;
            float *low = x + i * t->n_cols, *high = x + (i + stride) * t->n_cols;
            for (size_t c = 0; c < n; c++) {
                float a = low[c], b = high[c];
                low[c] = a + b;
                high[c] = a - b;
            }
        }
    for (size_t i = 0; i < X3_HADAMARD; i++)
        for (size_t c = 0; c < n; c++)
            x[i * t->n_cols + c] *= 0.08838834764831845f;
}

x3_status x3_cpu_hadamard_cols(x3_device *dev, float *x, size_t n_rows, size_t n_cols, x3_err *err)
{
    struct matrix_work t = {.out = x, .n_rows = n_rows, .n_cols = n_cols};

    (void)err;
    x3_pool_run(x3_cpu(dev)->pool, n_rows / X3_HADAMARD * strips(n_cols), hadamard_col_item, &t);
    return X3_OK;
}

/* ---- LDLQ ---- */

struct ldlq_work {
    x3_device_cpu *cpu;
    const float *l;
    size_t n_in, n_jobs;
    const x3_ldlq_job *jobs;
    const x3_trellis **trellis;
    size_t *first_item; /* [n_jobs + 1] */
};

static void ldlq_item(void *arg, size_t item, int thread)
{
    const struct ldlq_work *t = arg;
    size_t j = 0;

    while (item >= t->first_item[j + 1])
        j++;
    const x3_ldlq_job *job = &t->jobs[j];
    x3_ldlq_item strip = {
        .trellis = t->trellis[j],
        .l = t->l,
        .n_in = t->n_in,
        .n_out = job->n_out,
        .first = (item - t->first_item[j]) * X3_LDLQ_COLS,
        .w = job->d_w,
        .q = job->d_q,
        .words = job->d_words,
    };
    strip.n = x3_min_size(X3_LDLQ_COLS, job->n_out - strip.first);
    x3_ldlq_cpu(t->cpu->k, &strip, t->cpu->thread_scratch[thread].p);
}

x3_status x3_cpu_ldlq(x3_device *dev, const float *l, size_t n_in, const x3_ldlq_job *jobs, size_t n_jobs, x3_err *err)
{
    struct ldlq_work t = {.cpu = x3_cpu(dev), .l = l, .n_in = n_in, .jobs = jobs, .n_jobs = n_jobs};
    size_t scratch = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&t.trellis, n_jobs, sizeof *t.trellis, err));
    X3_TRY(rc, out, x3_alloc(&t.first_item, n_jobs + 1, sizeof *t.first_item, err));
    for (size_t j = 0; j < n_jobs; j++) {
        X3_TRY(rc, out, x3_cpu_trellis(t.cpu, jobs[j].codebook, jobs[j].K, &t.trellis[j], err));
        t.first_item[j + 1] = t.first_item[j] + (jobs[j].n_out + X3_LDLQ_COLS - 1) / X3_LDLQ_COLS;
        scratch = x3_max_size(scratch, x3_ldlq_scratch_bytes(n_in, jobs[j].K));
    }
    X3_TRY(rc, out, x3_cpu_reserve(t.cpu, scratch, err));
    x3_pool_run(t.cpu->pool, t.first_item[n_jobs], ldlq_item, &t);
out:
    free(t.trellis);
    free(t.first_item);
    return rc;
}

static void decode_item(void *arg, size_t item, int thread)
{
    const struct matrix_work *t = arg;
    const x3_weight *w = t->w;
    const size_t tiles = w->n_out_padded / X3_TILE;

    (void)thread;
    for (size_t j = 0; j < tiles; j++) {
        float tile[X3_TILE_WEIGHTS];
        x3_tile_decode_cpu(t->k, (const uint32_t *)w->data + (item * tiles + j) * (size_t)(8 * w->K), w->K, t->values, tile);
        for (size_t r = 0; r < X3_TILE; r++)
            memcpy(t->out + (item * X3_TILE + r) * w->n_out_padded + j * X3_TILE, tile + r * X3_TILE,
                   X3_TILE * sizeof *tile);
    }
}

x3_status x3_cpu_decode(x3_device *dev, const x3_weight *w, float *out, x3_err *err)
{
    struct matrix_work t = {.k = x3_cpu(dev)->k, .w = w, .out = out};
    x3_status rc = x3_cpu_values(x3_cpu(dev), w->codebook, &t.values, err);

    if (rc == X3_OK)
        x3_pool_run(x3_cpu(dev)->pool, w->n_in_padded / X3_TILE, decode_item, &t);
    return rc;
}
