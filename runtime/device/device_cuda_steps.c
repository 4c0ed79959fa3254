/* What a server's steps need of the CUDA device: memory for transfers, rows of the embedding, recordings (CUDA graphs). */
#include <stdlib.h>
#include <string.h>

#include "runtime/device/device_cuda.h"

/* ---- host memory ---- */

x3_status x3_cuda_op_host_alloc(x3_device *dev, void **out, size_t n_bytes, x3_err *err)
{
    x3_status rc;

    (void)dev;
    *out = NULL;
    rc = x3_cuda_result(cudaMallocHost(out, n_bytes == 0 ? 1 : n_bytes), "pinning host memory", err);
    if (rc == X3_OK)
        memset(*out, 0, n_bytes);
    return rc;
}

void x3_cuda_op_host_free(x3_device *dev, void *p)
{
    (void)dev;
    (void)cudaFreeHost(p);
}

/* ---- embedding ---- */

x3_status x3_cuda_op_embed(x3_device *dev, const x3_weight *w, const int32_t *d_ids, size_t n_rows, float *d_out, x3_err *err)
{
    return x3_cuda_dense_pick(w->data, x3_cuda_type_of(w), w->n_in, d_ids, n_rows, d_out, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_argmax(x3_device *dev, const float *d_x, size_t n_rows, size_t n, int32_t *d_ids, x3_err *err)
{
    return x3_cuda_argmax(d_x, n_rows, n, d_ids, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_add_norm(x3_device *dev, float *d_x, const float *d_y, size_t n_rows, size_t n, const float *d_weight,
                              float eps, float *d_out, x3_err *err)
{
    return x3_cuda_add_norm(d_x, d_y, n_rows, n, d_weight, eps, d_out, x3_cuda(dev)->stream, err);
}

/* ---- recordings ---- */

struct x3_recording {
    cudaGraph_t graph;
    cudaGraphExec_t exec;
};

x3_status x3_cuda_op_describe(x3_device *dev, const x3_batch *batch, uint64_t *shape, x3_err *err)
{
    x3_cuda_batch b;
    x3_status rc = x3_cuda_describe(x3_cuda(dev), batch, &b, err);

    *shape = 0;
    if (rc == X3_OK && b.longest == 1 && b.n_rows == b.n_sequences)
        *shape = (uint64_t)b.most_pages << 32 | b.n_rows;
    return rc;
}

x3_status x3_cuda_op_record_begin(x3_device *dev, x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    x3_status rc = x3_cuda_result(cudaStreamBeginCapture(cuda->stream, cudaStreamCaptureModeThreadLocal), "recording", err);

    cuda->recording = rc == X3_OK;
    return rc;
}

x3_status x3_cuda_op_record_end(x3_device *dev, x3_recording **out, x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    x3_recording *r = NULL;
    cudaGraph_t graph = NULL;
    x3_status rc;

    *out = NULL;
    cuda->recording = false;
    X3_TRY(rc, out, x3_cuda_result(cudaStreamEndCapture(cuda->stream, &graph), "recording", err));
    X3_TRY(rc, out, x3_alloc(&r, 1, sizeof *r, err));
    r->graph = graph;
    graph = NULL;
    X3_TRY(rc, out, x3_cuda_result(cudaGraphInstantiate(&r->exec, r->graph, 0), "preparing a recording", err));
    *out = r;
    r = NULL;
out:
    if (graph != NULL)
        (void)cudaGraphDestroy(graph);
    x3_cuda_op_record_free(dev, r);
    return rc;
}

uint64_t x3_cuda_op_generation(const x3_device *dev)
{
    return ((const x3_device_cuda *)dev)->generation;
}

x3_status x3_cuda_op_repeat(x3_device *dev, const x3_recording *r, x3_err *err)
{
    return x3_cuda_result(cudaGraphLaunch(r->exec, x3_cuda(dev)->stream), "repeating a recording", err);
}

void x3_cuda_op_record_free(x3_device *dev, x3_recording *r)
{
    (void)dev;
    if (r == NULL)
        return;
    if (r->exec != NULL)
        (void)cudaGraphExecDestroy(r->exec);
    if (r->graph != NULL)
        (void)cudaGraphDestroy(r->graph);
    free(r);
}
