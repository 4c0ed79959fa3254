/* Element-wise operations, Hadamard transforms, LDLQ and decoding of the CUDA device. */
#include <string.h>

#include "runtime/device/device_cuda.h"

x3_status x3_cuda_op_transpose_pad(x3_device *dev, const float *d_w, size_t n_out, size_t n_in, float *d_out, size_t n_out_padded,
                                   size_t n_in_padded, x3_err *err)
{
    return x3_cuda_transpose_pad(d_w, n_out, n_in, d_out, n_out_padded, n_in_padded, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_scale_rows(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, const float *d_s, x3_err *err)
{
    return x3_cuda_scale_matrix(d_x, n_rows, n_cols, d_s, true, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_scale_cols(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, const float *d_s, x3_err *err)
{
    return x3_cuda_scale_matrix(d_x, n_rows, n_cols, d_s, false, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_row_dots(x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_out,
                              x3_err *err)
{
    return x3_cuda_row_dots(d_x, d_y, n_rows, n_cols, d_out, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_col_dots(x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_out,
                              x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    x3_status rc = x3_cuda_reserve(cuda, &cuda->scratch, x3_cuda_col_dots_bytes(n_rows, n_cols), err);

    return rc == X3_OK ? x3_cuda_col_dots(d_x, d_y, n_rows, n_cols, cuda->scratch.p, d_out, cuda->stream, err) : rc;
}

x3_status x3_cuda_op_multiply(x3_device *dev, float *d_x, const float *d_y, size_t n, x3_err *err)
{
    return x3_cuda_multiply(d_x, d_y, n, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_scale(x3_device *dev, float *d_x, size_t n, float alpha, x3_err *err)
{
    return x3_cuda_scale(d_x, n, alpha, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_add_diagonal(x3_device *dev, float *d_a, size_t n, const float *d_d, x3_err *err)
{
    return x3_cuda_add_diagonal(d_a, n, d_d, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_axpy(x3_device *dev, float alpha, const float *d_x, float *d_y, size_t n, x3_err *err)
{
    return x3_cuda_axpy(alpha, d_x, d_y, n, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_hadamard_rows(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, x3_err *err)
{
    return x3_cuda_hadamard(d_x, n_rows, n_cols, false, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_hadamard_cols(x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, x3_err *err)
{
    return x3_cuda_hadamard(d_x, n_rows, n_cols, true, x3_cuda(dev)->stream, err);
}

/* ---- LDLQ ----
 * Jobs stand side by side: their targets [n_in][n_cols] and, of LAZY rows at a time, the errors. Inside such a block a row of
 * tiles takes the errors of the rows after it by a small product; when the block is done, all rows before it take its errors
 * in one. Nothing waits for the host. */

#define LAZY 128

struct ldlq {
    x3_device_cuda *cuda;
    const float *d_l;
    size_t n_in, n_cols, n_jobs;
    const x3_ldlq_job *jobs;
    float *d_target; /* [n_in][n_cols] */
    float *d_error;  /* [LAZY][n_cols] */
    void *d_search;
};

/* target[to, to + n) += L[from, from + k)[to ..]^T error of rows [from, from + k). */
static x3_status feed_back(const struct ldlq *t, size_t to, size_t n, size_t from, size_t k, size_t block, x3_err *err)
{
    if (t->d_l == NULL || n == 0 || k == 0)
        return X3_OK;
    return x3_cuda_op_gemm(&t->cuda->base, true, false, n, t->n_cols, k, 1, t->d_l + from * t->n_in + to, t->n_in,
                           t->d_error + (from - block) * t->n_cols, t->n_cols, 1, t->d_target + to * t->n_cols, t->n_cols, err);
}

static x3_cuda_strip strip_of(const struct ldlq *t, size_t j, size_t first_col, size_t row, size_t block)
{
    const x3_ldlq_job *job = &t->jobs[j];

    return (x3_cuda_strip){
        .n_out = job->n_out,
        .d_target = t->d_target + row * t->n_cols + first_col,
        .ld_target = t->n_cols,
        .d_q = job->d_q + row * job->n_out,
        .ld_q = job->n_out,
        .d_w = job->d_w + row * job->n_out,
        .ld_w = job->n_out,
        .d_error = t->d_error + (row - block) * t->n_cols + first_col,
        .ld_error = t->n_cols,
        .d_words = job->d_words == NULL ? NULL
                                        : job->d_words + row / X3_TILE * (job->n_out / X3_TILE) * (size_t)(8 * job->K),
    };
}

/* One row of tiles of all jobs: a launch for the jobs of one codebook and K. */
static x3_status search_row(const struct ldlq *t, size_t row, size_t block, x3_err *err)
{
    x3_status rc = X3_OK;

    for (int codebook = 0; codebook < 3; codebook++)
        for (int K = 1; K <= X3_K_MAX; K++) {
            x3_cuda_strip strips[X3_CUDA_STRIPS];
            size_t n = 0, first_col = 0;
            for (size_t j = 0; j < t->n_jobs; first_col += t->jobs[j++].n_out) {
                if (t->jobs[j].K != K || (int)t->jobs[j].codebook != codebook)
                    continue;
                strips[n++] = strip_of(t, j, first_col, row, block);
                if (n < X3_CUDA_STRIPS)
                    continue;
                X3_TRY(rc, out, x3_cuda_search_strips(&t->cuda->info, (x3_codebook)codebook, K, strips, n, t->d_search,
                                                      t->cuda->stream, err));
                n = 0;
            }
            if (n > 0)
                X3_TRY(rc, out, x3_cuda_search_strips(&t->cuda->info, (x3_codebook)codebook, K, strips, n, t->d_search,
                                                      t->cuda->stream, err));
        }
out:
    return rc;
}

uint64_t x3_cuda_ldlq_scratch(const x3_cuda_info *info, size_t n_in, size_t n_out)
{
    size_t search = 0;

    for (int K = 1; K <= X3_K_MAX; K++)
        search = x3_max_size(search, x3_cuda_search_bytes(info, K));
    return (uint64_t)(x3_round_up(n_in, 128) + LAZY) * x3_round_up(n_out, 128) * 4 + search + 1024;
}

static x3_status prepare(struct ldlq *t, x3_err *err)
{
    size_t at = 0, search_bytes = 0, first_col = 0;
    x3_status rc = X3_OK;

    for (size_t j = 0; j < t->n_jobs; j++) {
        t->n_cols += t->jobs[j].n_out;
        search_bytes = x3_max_size(search_bytes, x3_cuda_search_bytes(&t->cuda->info, t->jobs[j].K));
    }
    X3_TRY(rc, out, x3_cuda_reserve(t->cuda, &t->cuda->scratch, (t->n_in + LAZY) * t->n_cols * 4 + search_bytes + 1024, err));
    t->d_target = x3_cuda_carve(&t->cuda->scratch, &at, t->n_in * t->n_cols * 4);
    t->d_error = x3_cuda_carve(&t->cuda->scratch, &at, LAZY * t->n_cols * 4);
    t->d_search = x3_cuda_carve(&t->cuda->scratch, &at, search_bytes);
    for (size_t j = 0; j < t->n_jobs; first_col += t->jobs[j++].n_out)
        X3_TRY(rc, out, t->cuda->base.ops->copy_2d(&t->cuda->base, t->d_target + first_col, t->n_cols, t->jobs[j].d_w,
                                                   t->jobs[j].n_out, t->n_in, t->jobs[j].n_out, err));
out:
    return rc;
}

x3_status x3_cuda_op_ldlq(x3_device *dev, const float *d_l, size_t n_in, const x3_ldlq_job *jobs, size_t n_jobs, x3_err *err)
{
    struct ldlq t = {.cuda = x3_cuda(dev), .d_l = d_l, .n_in = n_in, .jobs = jobs, .n_jobs = n_jobs};
    x3_status rc;

    X3_TRY(rc, out, prepare(&t, err));
    for (size_t end = n_in; end > 0;) {
        const size_t block = end > LAZY ? (end - 1) / LAZY * LAZY : 0;
        for (size_t row = end; row > block;) {
            row -= X3_TILE;
            X3_TRY(rc, out, feed_back(&t, row, X3_TILE, row + X3_TILE, end - row - X3_TILE, block, err));
            X3_TRY(rc, out, search_row(&t, row, block, err));
        }
        X3_TRY(rc, out, feed_back(&t, 0, block, block, end - block, block, err));
        end = block;
    }
out:
    return rc;
}

x3_status x3_cuda_op_decode(x3_device *dev, const x3_weight *w, float *d_out, x3_err *err)
{
    const x3_cuda_group g = {.K = w->K, .codebook = w->codebook, .n_in = w->n_in, .n_out = w->n_out, .n_in_padded = w->n_in_padded,
                             .n_out_padded = w->n_out_padded, .d_words = w->data};

    return x3_cuda_reconstruct(&x3_cuda(dev)->info, &g, d_out, X3_CUDA_F32, x3_cuda(dev)->stream, err);
}
