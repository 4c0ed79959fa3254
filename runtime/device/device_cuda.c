/* The CUDA device: memory, the table, opening and closing. */
#include "runtime/device/device_cuda.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

x3_status x3_cuda_result(cudaError_t error, const char *what, x3_err *err)
{
    if (error == cudaSuccess)
        return X3_OK;
    return x3_fail(err, error == cudaErrorMemoryAllocation ? X3_ERR_MEMORY : X3_ERR_DEVICE, "CUDA: %s: %s (%s)", what,
                   cudaGetErrorString(error), cudaGetErrorName(error));
}

x3_status x3_cuda_blas_result(cublasStatus_t status, const char *what, x3_err *err)
{
    if (status == CUBLAS_STATUS_SUCCESS)
        return X3_OK;
    return x3_fail(err, status == CUBLAS_STATUS_ALLOC_FAILED ? X3_ERR_MEMORY : X3_ERR_DEVICE, "cuBLAS: %s: %s", what,
                   cublasGetStatusString(status));
}

x3_status x3_cuda_solver_result(cusolverStatus_t status, const char *what, x3_err *err)
{
    if (status == CUSOLVER_STATUS_SUCCESS)
        return X3_OK;
    return x3_fail(err, status == CUSOLVER_STATUS_ALLOC_FAILED ? X3_ERR_MEMORY : X3_ERR_DEVICE, "cuSOLVER: %s: status %d", what,
                   (int)status);
}

/* ---- how long the device is busy ---- */

#define SPANS 512

static x3_status create_spans(x3_device_cuda *cuda, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&cuda->spans, SPANS, sizeof *cuda->spans, err));
    for (size_t i = 0; i < SPANS; i++) {
        X3_TRY(rc, out, x3_cuda_result(cudaEventCreate(&cuda->spans[i].begin), "creating an event", err));
        X3_TRY(rc, out, x3_cuda_result(cudaEventCreate(&cuda->spans[i].end), "creating an event", err));
    }
out:
    return rc;
}

static void free_spans(x3_device_cuda *cuda)
{
    for (size_t i = 0; cuda->spans != NULL && i < SPANS; i++) {
        if (cuda->spans[i].begin != NULL)
            (void)cudaEventDestroy(cuda->spans[i].begin);
        if (cuda->spans[i].end != NULL)
            (void)cudaEventDestroy(cuda->spans[i].end);
    }
    free(cuda->spans);
}

/* Adds up what is measured; all of it has ended but a span that is still open, which moves to the front. */
static void read_spans(x3_device_cuda *cuda)
{
    struct x3_cuda_span open = cuda->spans[cuda->n_spans];
    float ms;

    for (size_t i = 0; i < cuda->n_spans; i++)
        if (cudaEventElapsedTime(&ms, cuda->spans[i].begin, cuda->spans[i].end) == cudaSuccess)
            cuda->base.busy_seconds[cuda->spans[i].work] += (double)ms / 1000;
    cuda->spans[cuda->n_spans] = cuda->spans[0];
    cuda->spans[0] = open;
    cuda->n_spans = 0;
}

static x3_status span_begin(x3_device_cuda *cuda, x3_work work, x3_err *err)
{
    x3_status rc;

    if (cuda->span_depth++ > 0 || cuda->recording)
        return X3_OK;
    if (cuda->n_spans == SPANS - 1) {
        X3_TRY(rc, out, x3_cuda_result(cudaStreamSynchronize(cuda->stream), "waiting for the device", err));
        read_spans(cuda);
    }
    cuda->spans[cuda->n_spans].work = work;
    rc = x3_cuda_result(cudaEventRecord(cuda->spans[cuda->n_spans].begin, cuda->stream), "recording an event", err);
out:
    return rc;
}

static x3_status span_end(x3_device_cuda *cuda, x3_status rc, x3_err *err)
{
    if (--cuda->span_depth > 0 || cuda->recording || rc != X3_OK)
        return rc;
    return x3_cuda_result(cudaEventRecord(cuda->spans[cuda->n_spans++].end, cuda->stream), "recording an event", err);
}

/* ---- memory ---- */

static size_t place_of(const x3_device_cuda *cuda, const void *p)
{
    return (size_t)((uintptr_t)p / 256 * 0x9E3779B97F4A7C15u >> 20) & (cuda->block_capacity - 1);
}

static void put_block(x3_device_cuda *cuda, x3_cuda_buffer b)
{
    size_t at = place_of(cuda, b.p);

    while (cuda->blocks[at].p != NULL)
        at = (at + 1) & (cuda->block_capacity - 1);
    cuda->blocks[at] = b;
    cuda->n_blocks++;
}

static x3_status grow_blocks(x3_device_cuda *cuda, x3_err *err)
{
    x3_cuda_buffer *old = cuda->blocks, *bigger = NULL;
    const size_t n_old = cuda->block_capacity;
    x3_status rc;

    if (2 * (cuda->n_blocks + 1) <= n_old)
        return X3_OK;
    rc = x3_alloc(&bigger, n_old == 0 ? 1024 : 2 * n_old, sizeof *bigger, err);
    if (rc != X3_OK)
        return rc;
    cuda->blocks = bigger;
    cuda->block_capacity = n_old == 0 ? 1024 : 2 * n_old;
    cuda->n_blocks = 0;
    for (size_t i = 0; i < n_old; i++)
        if (old[i].p != NULL)
            put_block(cuda, old[i]);
    free(old);
    return X3_OK;
}

/* Bytes of a block, which is forgotten. Those behind it in the same run of places are put in again. */
static size_t take_block(x3_device_cuda *cuda, const void *p)
{
    const size_t mask = cuda->block_capacity - 1;
    size_t at = place_of(cuda, p), n_bytes;

    while (cuda->blocks[at].p != p)
        at = (at + 1) & mask;
    n_bytes = cuda->blocks[at].n_bytes;
    cuda->blocks[at].p = NULL;
    cuda->n_blocks--;
    for (at = (at + 1) & mask; cuda->blocks[at].p != NULL; at = (at + 1) & mask) {
        x3_cuda_buffer b = cuda->blocks[at];
        cuda->blocks[at].p = NULL;
        cuda->n_blocks--;
        put_block(cuda, b);
    }
    return n_bytes;
}

static x3_status out_of_memory(x3_device_cuda *cuda, size_t n_bytes, x3_err *err)
{
    size_t n_free = 0, total = 0;

    (void)cudaGetLastError();
    (void)cudaMemGetInfo(&n_free, &total);
    return x3_fail(err, X3_ERR_MEMORY,
                   "%s: out of device memory: %zu bytes are needed, %zu of %zu are free, %zu are in use here of %zu that may be; fewer "
                   "--cols need less, as does --target-blend 0; --device cpu uses the host's memory",
                   cuda->info.name, n_bytes, n_free, total, cuda->base.used_bytes, cuda->base.capacity_bytes);
}

/* From the driver's pool: a job allocates and frees by the ten thousands, and what a layer needed the next one does too. */
static cudaError_t take_from_pool(x3_device_cuda *cuda, void **p, size_t n_bytes)
{
    cudaError_t error = cudaMallocAsync(p, n_bytes == 0 ? 1 : n_bytes, cuda->stream);

    if (error != cudaErrorMemoryAllocation)
        return error;
    (void)cudaGetLastError();
    (void)cudaStreamSynchronize(cuda->stream); /* what is free but in pieces goes back */
    (void)cudaMemPoolTrimTo(cuda->pool, 0);
    return cudaMallocAsync(p, n_bytes == 0 ? 1 : n_bytes, cuda->stream);
}

static x3_status cuda_alloc(x3_device *dev, void **out, size_t n_bytes, x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    x3_cuda_buffer b = {.n_bytes = n_bytes};
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, grow_blocks(cuda, err));
    if (dev->used_bytes + n_bytes > dev->capacity_bytes)
        return out_of_memory(cuda, n_bytes, err);
    cudaError_t error = take_from_pool(cuda, &b.p, n_bytes);
    if (error == cudaErrorMemoryAllocation)
        return out_of_memory(cuda, n_bytes, err);
    X3_TRY(rc, out, x3_cuda_result(error, "allocating memory", err));
    put_block(cuda, b);
    dev->used_bytes += n_bytes;
    dev->peak_bytes = x3_max_size(dev->peak_bytes, dev->used_bytes);
    *out = b.p;
    rc = x3_cuda_result(cudaMemsetAsync(b.p, 0, n_bytes, cuda->stream), "clearing memory", err);
out:
    return rc;
}

static void cuda_free(x3_device *dev, void *p)
{
    dev->used_bytes -= take_block(x3_cuda(dev), p);
    (void)cudaFreeAsync(p, x3_cuda(dev)->stream); /* after the work that uses it */
}

x3_status x3_cuda_reserve(x3_device_cuda *cuda, x3_cuda_buffer *buffer, size_t n_bytes, x3_err *err)
{
    x3_status rc;

    if (n_bytes <= buffer->n_bytes)
        return X3_OK;
    if (cuda->recording)
        return x3_fail(err, X3_ERR_DEVICE, "CUDA: %zu bytes of scratch are needed while recording, %zu are there", n_bytes, buffer->n_bytes);
    cuda->generation++;
    x3_device_free(&cuda->base, buffer->p);
    *buffer = (x3_cuda_buffer){0};
    rc = cuda_alloc(&cuda->base, &buffer->p, n_bytes, err);
    if (rc == X3_OK)
        buffer->n_bytes = n_bytes;
    return rc;
}

static x3_status cuda_upload(x3_device *dev, void *d_to, const void *from, size_t n_bytes, x3_err *err)
{
    return x3_cuda_result(cudaMemcpyAsync(d_to, from, n_bytes, cudaMemcpyHostToDevice, x3_cuda(dev)->stream), "upload", err);
}

static x3_status cuda_sync(x3_device *dev, x3_err *err)
{
    x3_status rc = x3_cuda_result(cudaStreamSynchronize(x3_cuda(dev)->stream), "waiting for the device", err);

    if (rc == X3_OK)
        read_spans(x3_cuda(dev));
    return rc;
}

static x3_status cuda_download(x3_device *dev, void *to, const void *d_from, size_t n_bytes, x3_err *err)
{
    x3_status rc = x3_cuda_result(cudaMemcpyAsync(to, d_from, n_bytes, cudaMemcpyDeviceToHost, x3_cuda(dev)->stream), "download",
                                  err);

    return rc == X3_OK ? cuda_sync(dev, err) : rc;
}

static x3_status cuda_copy(x3_device *dev, void *d_to, const void *d_from, size_t n_bytes, x3_err *err)
{
    return x3_cuda_result(cudaMemcpyAsync(d_to, d_from, n_bytes, cudaMemcpyDeviceToDevice, x3_cuda(dev)->stream), "copy", err);
}

static x3_status cuda_copy_2d(x3_device *dev, float *d_to, size_t ld_to, const float *d_from, size_t ld_from, size_t n_rows,
                              size_t n_cols, x3_err *err)
{
    if (n_rows == 0 || n_cols == 0)
        return X3_OK;
    return x3_cuda_result(cudaMemcpy2DAsync(d_to, ld_to * sizeof *d_to, d_from, ld_from * sizeof *d_from, n_cols * sizeof *d_to,
                                            n_rows, cudaMemcpyDeviceToDevice, x3_cuda(dev)->stream),
                          "copy", err);
}

static x3_status cuda_zero(x3_device *dev, void *d_to, size_t n_bytes, x3_err *err)
{
    return x3_cuda_result(cudaMemsetAsync(d_to, 0, n_bytes, x3_cuda(dev)->stream), "clearing memory", err);
}

static uint64_t cuda_own_bytes(const x3_device *dev, size_t n_in, size_t n_out, size_t n_rows)
{
    x3_device_cuda *cuda = x3_cuda((x3_device *)(uintptr_t)dev);
    uint64_t most = x3_cuda_linear_scratch(n_in, n_out, n_rows);

    most = x3_max_size(most, x3_cuda_algebra_scratch(cuda, n_in));
    most = x3_max_size(most, X3_CUDA_PART_BYTES + 4096);
    most = x3_max_size(most, x3_cuda_ldlq_scratch(&cuda->info, n_in, n_out));
    return most + ((uint64_t)64 << 20) + 2 * (uint64_t)n_rows * sizeof(int32_t); /* workspace of cuBLAS; tables of batches */
}

static uint64_t cuda_step_bytes(const x3_device *dev, size_t n_in, size_t n_out, size_t n_rows)
{
    const uint64_t operands = (2 * X3_CUDA_LINEAR_PARTS + 1) * (uint64_t)x3_round_up(n_in, 128) * x3_round_up(n_rows + 64, 16);

    (void)dev;
    return x3_cuda_linear_scratch(n_in, n_out, n_rows) + operands + X3_CUDA_COUNTER_BYTES + ((uint64_t)64 << 20); /* workspace of cuBLAS */
}

/* ---- open and close ---- */

static void cuda_destroy(x3_device *dev)
{
    x3_device_cuda *cuda = x3_cuda(dev);

    if (cuda->blas != NULL)
        (void)cublasDestroy(cuda->blas);
    if (cuda->solver != NULL)
        (void)cusolverDnDestroy(cuda->solver);
    free_spans(cuda);
    for (size_t i = 0; i < cuda->block_capacity; i++)
        if (cuda->blocks[i].p != NULL)
            (void)cudaFreeAsync(cuda->blocks[i].p, cuda->stream);
    if (cuda->stream != NULL) {
        (void)cudaStreamSynchronize(cuda->stream);
        if (cuda->pool != NULL)
            (void)cudaMemPoolTrimTo(cuda->pool, 0);
        (void)cudaStreamDestroy(cuda->stream);
    }
    x3_cuda_experts_free(cuda);
    free(cuda->blocks);
    free(cuda->table);
    free(cuda);
}

/* An operation with its time taken. Those that wait for the device in their midst count the wait. */
#define TIMED(name, op, work, parameters, arguments)                \
    static x3_status timed_##name parameters                        \
    {                                                               \
        x3_status rc = span_begin(x3_cuda(dev), work, err);         \
                                                                    \
        if (rc == X3_OK)                                            \
            rc = op arguments;                                      \
        return span_end(x3_cuda(dev), rc, err);                     \
    }

TIMED(upload, cuda_upload, X3_WORK_TRANSFER, (x3_device *dev, void *d_to, const void *from, size_t n, x3_err *err),
      (dev, d_to, from, n, err))
TIMED(download, cuda_download, X3_WORK_TRANSFER, (x3_device *dev, void *to, const void *d_from, size_t n, x3_err *err),
      (dev, to, d_from, n, err))
TIMED(copy, cuda_copy, X3_WORK_TRANSFER, (x3_device *dev, void *d_to, const void *d_from, size_t n, x3_err *err),
      (dev, d_to, d_from, n, err))
TIMED(copy_2d, cuda_copy_2d, X3_WORK_TRANSFER,
      (x3_device *dev, float *d_to, size_t ld_to, const float *d_from, size_t ld_from, size_t n_rows, size_t n_cols, x3_err *err),
      (dev, d_to, ld_to, d_from, ld_from, n_rows, n_cols, err))
TIMED(linear, x3_cuda_op_linear, X3_WORK_LINEAR,
      (x3_device *dev, const x3_weight *w, const float *d_x, size_t ldx, size_t n_rows, float *d_y, size_t ldy, x3_err *err),
      (dev, w, d_x, ldx, n_rows, d_y, ldy, err))
TIMED(linears, x3_cuda_op_linears, X3_WORK_LINEAR,
      (x3_device *dev, const x3_weight *const *w, size_t n, const float *d_x, size_t ldx, size_t n_rows, float *const *d_y, x3_err *err),
      (dev, w, n, d_x, ldx, n_rows, d_y, err))
TIMED(linear_gated, x3_cuda_op_linear_gated, X3_WORK_LINEAR,
      (x3_device *dev, const x3_weight *w, float *d_gate, const float *d_up, size_t n_rows, float *d_y, x3_err *err),
      (dev, w, d_gate, d_up, n_rows, d_y, err))
TIMED(rms_norm, x3_cuda_op_rms_norm, X3_WORK_ROWS,
      (x3_device *dev, const float *d_x, size_t ldx, size_t n_rows, size_t n, const float *d_weight, float eps, float *d_out,
       size_t ldo, x3_err *err),
      (dev, d_x, ldx, n_rows, n, d_weight, eps, d_out, ldo, err))
TIMED(rope, x3_cuda_op_rope, X3_WORK_ROWS, (x3_device *dev, const x3_rope_args *args, const x3_batch *batch, x3_err *err),
      (dev, args, batch, err))
TIMED(rope_append, x3_cuda_op_rope_append, X3_WORK_ROWS,
      (x3_device *dev, const x3_rope_args *q, const x3_rope_args *k, const x3_kv_layer *kv, const x3_batch *batch, const float *d_v,
       size_t ldv, x3_err *err), (dev, q, k, kv, batch, d_v, ldv, err))
TIMED(kv_append, x3_cuda_op_kv_append, X3_WORK_ROWS,
      (x3_device *dev, const x3_kv_layer *kv, const x3_batch *batch, const float *d_k, size_t ldk, const float *d_v, size_t ldv,
       x3_err *err),
      (dev, kv, batch, d_k, ldk, d_v, ldv, err))
TIMED(attention, x3_cuda_op_attention, X3_WORK_ATTENTION,
      (x3_device *dev, const x3_attention_args *args, const x3_batch *batch, x3_err *err), (dev, args, batch, err))
TIMED(silu_mul, x3_cuda_op_silu_mul, X3_WORK_ROWS,
      (x3_device *dev, const float *d_gate, const float *d_up, size_t n, float *d_out, x3_err *err), (dev, d_gate, d_up, n, d_out, err))
TIMED(copy_heads, x3_cuda_op_copy_heads, X3_WORK_ROWS,
      (x3_device *dev, float *d_to, size_t ld_to, size_t stride_to, const float *d_from, size_t ld_from, size_t stride_from,
       size_t n_rows, size_t n_heads, size_t n_cols, x3_err *err),
      (dev, d_to, ld_to, stride_to, d_from, ld_from, stride_from, n_rows, n_heads, n_cols, err))
TIMED(layer_norm, x3_cuda_op_layer_norm, X3_WORK_ROWS,
      (x3_device *dev, float *d_x, size_t n_rows, size_t n, const float *d_weight, const float *d_bias, float eps, x3_err *err),
      (dev, d_x, n_rows, n, d_weight, d_bias, eps, err))
TIMED(sigmoid_mul, x3_cuda_op_sigmoid_mul, X3_WORK_ROWS, (x3_device *dev, float *d_x, const float *d_gate, size_t n, x3_err *err),
      (dev, d_x, d_gate, n, err))
TIMED(sigmoid_scale, x3_cuda_op_sigmoid_scale, X3_WORK_ROWS,
      (x3_device *dev, float *d_x, const float *d_gate, size_t n_rows, size_t n, x3_err *err), (dev, d_x, d_gate, n_rows, n, err))
TIMED(linear_heads, x3_cuda_op_linear_heads, X3_WORK_LINEAR, (x3_device *dev, const x3_heads_args *args, x3_err *err),
      (dev, args, err))
TIMED(select, x3_cuda_op_select, X3_WORK_ATTENTION,
      (x3_device *dev, const x3_select_args *args, const x3_batch *batch, x3_err *err), (dev, args, batch, err))
TIMED(conv_silu, x3_cuda_op_conv_silu, X3_WORK_ROWS,
      (x3_device *dev, const x3_conv_args *args, const x3_batch *batch, x3_err *err), (dev, args, batch, err))
TIMED(delta_rule, x3_cuda_op_delta_rule, X3_WORK_ATTENTION,
      (x3_device *dev, const x3_delta_args *args, const x3_batch *batch, x3_err *err), (dev, args, batch, err))
TIMED(route, x3_cuda_op_route, X3_WORK_ROWS,
      (x3_device *dev, const x3_route_rule *rule, const float *d_logits, const float *d_correction, size_t n_rows, int32_t *d_ids,
       float *d_weights, x3_err *err),
      (dev, rule, d_logits, d_correction, n_rows, d_ids, d_weights, err))
TIMED(group_rows, x3_cuda_op_group_rows, X3_WORK_ROWS,
      (x3_device *dev, const int32_t *d_ids, size_t n_rows, size_t n_chosen, size_t n_experts, int32_t *d_first, int32_t *d_rows,
       int32_t *d_slots, x3_err *err),
      (dev, d_ids, n_rows, n_chosen, n_experts, d_first, d_rows, d_slots, err))
TIMED(gather_rows, x3_cuda_op_gather_rows, X3_WORK_ROWS,
      (x3_device *dev, const float *d_x, const int32_t *d_rows, size_t n_rows, size_t n, float *d_out, x3_err *err),
      (dev, d_x, d_rows, n_rows, n, d_out, err))
TIMED(expert_linear, x3_cuda_op_expert_linear, X3_WORK_LINEAR, (x3_device *dev, const x3_expert_args *args, x3_err *err),
      (dev, args, err))
TIMED(combine_rows, x3_cuda_op_combine_rows, X3_WORK_ROWS,
      (x3_device *dev, const float *d_y, const int32_t *d_slots, const float *d_weights, size_t n_rows, size_t n_chosen, size_t n,
       bool add, float *d_out, x3_err *err),
      (dev, d_y, d_slots, d_weights, n_rows, n_chosen, n, add, d_out, err))
TIMED(argmax, x3_cuda_op_argmax, X3_WORK_ROWS,
      (x3_device *dev, const float *d_x, size_t n_rows, size_t n, int32_t *d_ids, x3_err *err), (dev, d_x, n_rows, n, d_ids, err))
TIMED(add_norm, x3_cuda_op_add_norm, X3_WORK_ROWS,
      (x3_device *dev, float *d_x, const float *d_y, size_t n_rows, size_t n, const float *d_weight, float eps, float *d_out, x3_err *err),
      (dev, d_x, d_y, n_rows, n, d_weight, eps, d_out, err))
TIMED(add, x3_cuda_op_add, X3_WORK_ROWS, (x3_device *dev, float *d_x, const float *d_y, size_t n, x3_err *err),
      (dev, d_x, d_y, n, err))
TIMED(score, x3_cuda_op_score, X3_WORK_SCORE,
      (x3_device *dev, const float *d_reference, const float *d_pack, size_t n_rows, size_t vocab, const int32_t *next,
       x3_score_position *out, x3_err *err),
      (dev, d_reference, d_pack, n_rows, vocab, next, out, err))
TIMED(gram, x3_cuda_op_gram, X3_WORK_MOMENTS,
      (x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n, float *d_a, x3_err *err),
      (dev, d_x, d_y, n_rows, n, d_a, err))
TIMED(all_finite, x3_cuda_op_all_finite, X3_WORK_MOMENTS,
      (x3_device *dev, const float *d_x, size_t n, bool *finite, x3_err *err), (dev, d_x, n, finite, err))
TIMED(gemm, x3_cuda_op_gemm, X3_WORK_PRODUCT,
      (x3_device *dev, bool ta, bool tb, size_t m, size_t n, size_t k, float alpha, const float *d_a, size_t lda, const float *d_b,
       size_t ldb, float beta, float *d_c, size_t ldc, x3_err *err),
      (dev, ta, tb, m, n, k, alpha, d_a, lda, d_b, ldb, beta, d_c, ldc, err))
TIMED(spd_solve, x3_cuda_op_spd_solve, X3_WORK_FACTOR,
      (x3_device *dev, const float *d_a, size_t n, float *d_b, size_t m, x3_err *err), (dev, d_a, n, d_b, m, err))
TIMED(block_ldl, x3_cuda_op_block_ldl, X3_WORK_FACTOR, (x3_device *dev, float *d_a, size_t n, x3_err *err), (dev, d_a, n, err))
TIMED(row_dots, x3_cuda_op_row_dots, X3_WORK_MATRIX,
      (x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_out, x3_err *err),
      (dev, d_x, d_y, n_rows, n_cols, d_out, err))
TIMED(col_dots, x3_cuda_op_col_dots, X3_WORK_MATRIX,
      (x3_device *dev, const float *d_x, const float *d_y, size_t n_rows, size_t n_cols, double *d_out, x3_err *err),
      (dev, d_x, d_y, n_rows, n_cols, d_out, err))
TIMED(transpose_pad, x3_cuda_op_transpose_pad, X3_WORK_MATRIX,
      (x3_device *dev, const float *d_w, size_t n_out, size_t n_in, float *d_out, size_t n_out_padded, size_t n_in_padded,
       x3_err *err),
      (dev, d_w, n_out, n_in, d_out, n_out_padded, n_in_padded, err))
TIMED(hadamard_rows, x3_cuda_op_hadamard_rows, X3_WORK_MATRIX,
      (x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, x3_err *err), (dev, d_x, n_rows, n_cols, err))
TIMED(hadamard_cols, x3_cuda_op_hadamard_cols, X3_WORK_MATRIX,
      (x3_device *dev, float *d_x, size_t n_rows, size_t n_cols, x3_err *err), (dev, d_x, n_rows, n_cols, err))
TIMED(ldlq, x3_cuda_op_ldlq, X3_WORK_ENCODE,
      (x3_device *dev, const float *d_l, size_t n_in, const x3_ldlq_job *jobs, size_t n_jobs, x3_err *err),
      (dev, d_l, n_in, jobs, n_jobs, err))

static const x3_device_ops cuda_ops = {
    .destroy = cuda_destroy,
    .own_bytes = cuda_own_bytes,
    .step_bytes = cuda_step_bytes,
    .alloc = cuda_alloc,
    .free = cuda_free,
    .upload = timed_upload,
    .download = timed_download,
    .copy = timed_copy,
    .copy_2d = timed_copy_2d,
    .copy_heads = timed_copy_heads,
    .zero = cuda_zero,
    .sync = cuda_sync,
    .linear = timed_linear,
    .linears = timed_linears,
    .linear_gated = timed_linear_gated,
    .rms_norm = timed_rms_norm,
    .rope = timed_rope,
    .kv_append = timed_kv_append,
    .rope_append = timed_rope_append,
    .attention = timed_attention,
    .silu_mul = timed_silu_mul,
    .layer_norm = timed_layer_norm,
    .sigmoid_mul = timed_sigmoid_mul,
    .linear_heads = timed_linear_heads,
    .select = timed_select,
    .conv_silu = timed_conv_silu,
    .delta_rule = timed_delta_rule,
    .sigmoid_scale = timed_sigmoid_scale,
    .route = timed_route,
    .group_rows = timed_group_rows,
    .gather_rows = timed_gather_rows,
    .expert_linear = timed_expert_linear,
    .combine_rows = timed_combine_rows,
    .add = timed_add,
    .host_alloc = x3_cuda_op_host_alloc,
    .host_free = x3_cuda_op_host_free,
    .embed = x3_cuda_op_embed,
    .argmax = timed_argmax,
    .add_norm = timed_add_norm,
    .describe = x3_cuda_op_describe,
    .record_begin = x3_cuda_op_record_begin,
    .record_end = x3_cuda_op_record_end,
    .generation = x3_cuda_op_generation,
    .repeat = x3_cuda_op_repeat,
    .record_free = x3_cuda_op_record_free,
    .score = timed_score,
    .gram = timed_gram,
    .all_finite = timed_all_finite,
    .drop_nonfinite = x3_cuda_op_drop_nonfinite,
    .gemm = timed_gemm,
    .mirror = x3_cuda_op_mirror,
    .spd_solve = timed_spd_solve,
    .block_ldl = timed_block_ldl,
    .dense_floats = x3_cuda_op_dense_floats,
    .transpose_pad = timed_transpose_pad,
    .scale_rows = x3_cuda_op_scale_rows,
    .scale_cols = x3_cuda_op_scale_cols,
    .row_dots = timed_row_dots,
    .col_dots = timed_col_dots,
    .multiply = x3_cuda_op_multiply,
    .scale = x3_cuda_op_scale,
    .add_diagonal = x3_cuda_op_add_diagonal,
    .axpy = x3_cuda_op_axpy,
    .hadamard_rows = timed_hadamard_rows,
    .hadamard_cols = timed_hadamard_cols,
    .ldlq = timed_ldlq,
    .decode = x3_cuda_op_decode,
};

static x3_status read_memory_kind(x3_device_cuda *cuda, x3_err *err)
{
    int integrated = 0, pageable = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_cuda_result(cudaDeviceGetAttribute(&integrated, cudaDevAttrIntegrated, cuda->info.device), "attribute", err));
    X3_TRY(rc, out, x3_cuda_result(cudaDeviceGetAttribute(&pageable, cudaDevAttrPageableMemoryAccess, cuda->info.device), "attribute",
                                   err));
    cuda->base.in_place_align = x3_device_in_place(integrated != 0, pageable != 0);
out:
    return rc;
}

#define BLAS_WORKSPACE ((size_t)64 << 20)

/* Freed memory stays with the pool until the device is closed, or until something does not fit. */
static x3_status open_pool(x3_device_cuda *cuda, x3_err *err)
{
    uint64_t keep = UINT64_MAX;
    x3_status rc;

    X3_TRY(rc, out, x3_cuda_result(cudaDeviceGetDefaultMemPool(&cuda->pool, cuda->info.device), "opening the memory pool", err));
    rc = x3_cuda_result(cudaMemPoolSetAttribute(cuda->pool, cudaMemPoolAttrReleaseThreshold, &keep), "keeping memory", err);
out:
    return rc;
}

/* Stream, handles and the workspace of cuBLAS, fixed so that its choices do not depend on what is free. */
static x3_status open_libraries(x3_device_cuda *cuda, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, x3_cuda_libraries_load(err));
    X3_TRY(rc, out, x3_cuda_result(cudaStreamCreateWithFlags(&cuda->stream, cudaStreamNonBlocking), "creating a stream", err));
    X3_TRY(rc, out, open_pool(cuda, err));
    X3_TRY(rc, out, x3_cuda_blas_result(cublasCreate(&cuda->blas), "opening", err));
    X3_TRY(rc, out, x3_cuda_blas_result(cublasSetStream(cuda->blas, cuda->stream), "choosing the stream", err));
    X3_TRY(rc, out, cuda_alloc(&cuda->base, &cuda->blas_workspace, BLAS_WORKSPACE, err));
    X3_TRY(rc, out, x3_cuda_blas_result(cublasSetWorkspace(cuda->blas, cuda->blas_workspace, BLAS_WORKSPACE), "workspace", err));
    X3_TRY(rc, out, x3_cuda_solver_result(cusolverDnCreate(&cuda->solver), "opening", err));
    X3_TRY(rc, out, x3_cuda_solver_result(cusolverDnSetStream(cuda->solver, cuda->stream), "choosing the stream", err));
    X3_TRY(rc, out, cuda_alloc(&cuda->base, &cuda->d_small, 256, err));
    rc = create_spans(cuda, err);
out:
    return rc;
}

x3_status x3_device_open_cuda(x3_device **out, int index, x3_err *err)
{
    x3_device_cuda *cuda = NULL;
    int n = 0, blas_version = 0;
    size_t total;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_cuda_count(&n, err));
    if (n == 0)
        return x3_fail(err, X3_ERR_DEVICE, "device cuda: this program has CUDA, but the machine has no GPU that it can use (no "
                       "NVIDIA driver, or one too old for CUDA %d); --device cpu", CUDART_VERSION / 1000);
    if (index >= n)
        return x3_fail(err, X3_ERR_INPUT, "device cuda:%d: this machine has %d GPU%s, numbered from 0", index, n, n == 1 ? "" : "s");
    X3_TRY(rc, out, x3_alloc(&cuda, 1, sizeof *cuda, err));
    cuda->base.ops = &cuda_ops;
    X3_TRY(rc, out, x3_cuda_open(index, &cuda->info, err));
    X3_TRY(rc, out, x3_cuda_result(cudaMemGetInfo(&cuda->base.capacity_bytes, &total), "reading free memory", err));
    X3_TRY(rc, out, read_memory_kind(cuda, err));
    X3_TRY(rc, out, open_libraries(cuda, err));
    X3_TRY(rc, out, x3_cuda_blas_result(cublasGetVersion(cuda->blas, &blas_version), "version", err));
    snprintf(cuda->base.name, sizeof cuda->base.name, "cuda:%d %.70s", index, cuda->info.name);
    snprintf(cuda->base.kernel_set, sizeof cuda->base.kernel_set, "cuda sm_%d x %d, cuBLAS %d", cuda->info.compute_capability,
             cuda->info.n_multiprocessors, blas_version);
    *out = &cuda->base;
    cuda = NULL;
out:
    if (cuda != NULL)
        cuda_destroy(&cuda->base);
    return rc;
}
