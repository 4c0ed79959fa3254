/* Operations of the CUDA device for mixers: delta nets, latent attention, sparse attention, output gates. */
#include "kernels/cuda_mixers.h"
#include "kernels/cuda_moe.h"
#include "runtime/device/device_cuda.h"

x3_status x3_cuda_op_copy_heads(x3_device *dev, float *d_to, size_t ld_to, size_t stride_to, const float *d_from, size_t ld_from,
                                size_t stride_from, size_t n_rows, size_t n_heads, size_t n_cols, x3_err *err)
{
    const x3_cuda_pieces p = {.d_to = d_to, .ld_to = ld_to, .stride_to = stride_to, .d_from = d_from, .ld_from = ld_from,
                              .stride_from = stride_from, .n_rows = n_rows, .n_heads = n_heads, .n_cols = n_cols};

    return x3_cuda_copy_heads(&p, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_layer_norm(x3_device *dev, float *d_x, size_t n_rows, size_t n, const float *d_weight, const float *d_bias,
                                float eps, x3_err *err)
{
    return x3_cuda_layer_norm(d_x, n_rows, n, d_weight, d_bias, eps, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_sigmoid_mul(x3_device *dev, float *d_x, const float *d_gate, size_t n, x3_err *err)
{
    return x3_cuda_sigmoid_mul(d_x, d_gate, n, 1, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_linear_heads(x3_device *dev, const x3_heads_args *args, x3_err *err)
{
    if (args->w->kind == X3_WEIGHT_EXL3 || args->w->kind == X3_WEIGHT_NONE)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "a linear a head needs a dense weight");
    const x3_cuda_heads h = {.d_w = args->w->data, .type = x3_cuda_type_of(args->w), .n_in = args->w->n_in,
                             .n_heads = args->n_heads, .first = args->first, .stride = args->stride, .n = args->n,
                             .transposed = args->transposed, .d_x = args->d_x, .ldx = args->ldx, .x_stride = args->x_stride,
                             .n_rows = args->n_rows, .d_y = args->d_y, .ldy = args->ldy, .y_stride = args->y_stride};

    return x3_cuda_linear_heads(&h, x3_cuda(dev)->stream, err);
}

/* Scores of some rows at a time: a row has room for one a position of as many pages as batches of this shape may have, so that
 * launches do not depend on positions. */
x3_status x3_cuda_op_select(x3_device *dev, const x3_select_args *args, const x3_batch *batch, x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    x3_cuda_select s = {.d_q = args->d_q, .d_weights = args->d_weights, .n_heads = args->n_heads, .dim = args->kv->index_dim,
                        .n_selected = args->n_selected, .d_keys = args->kv->d_index_keys, .d_selected = args->d_selected};
    size_t longest = 0, at_once;
    x3_cuda_batch b;
    x3_status rc;

    for (size_t i = 0; i < batch->n_sequences; i++)
        longest = x3_max_size(longest, batch->sequences[i].position + batch->sequences[i].n_rows);
    if (batch->n_rows == 0 || longest <= args->n_selected) /* every row sees all of its positions */
        return X3_OK;
    X3_TRY(rc, out, x3_cuda_describe(cuda, batch, &b, err));
    s.n_positions = b.most_pages * X3_KV_PAGE;
    at_once = x3_max_size(1, x3_min_size(batch->n_rows, X3_CUDA_PART_BYTES / (s.n_positions * sizeof(float))));
    X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->scratch, at_once * s.n_positions * sizeof(float), err));
    s.d_scores = cuda->scratch.p;
    for (s.first_row = 0; s.first_row < batch->n_rows; s.first_row += at_once) {
        s.n_rows = x3_min_size(at_once, batch->n_rows - s.first_row);
        X3_TRY(rc, out, x3_cuda_select_positions(&s, &b, cuda->stream, err));
    }
out:
    return rc;
}

x3_status x3_cuda_op_conv_silu(x3_device *dev, const x3_conv_args *args, const x3_batch *batch, x3_err *err)
{
    const x3_cuda_conv c = {.d_x = args->d_x, .d_out = args->d_out, .n = args->n, .kernel = args->kernel,
                            .d_weight = args->d_weight, .d_state = args->d_state, .state_stride = args->state_stride};
    x3_cuda_batch b;
    x3_status rc = x3_cuda_describe(x3_cuda(dev), batch, &b, err);

    return rc == X3_OK ? x3_cuda_conv_silu(&c, &b, x3_cuda(dev)->stream, err) : rc;
}

x3_status x3_cuda_op_delta_rule(x3_device *dev, const x3_delta_args *args, const x3_batch *batch, x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    const x3_cuda_delta d = {.n_k_heads = args->n_k_heads, .n_v_heads = args->n_v_heads, .k_dim = args->k_dim,
                             .v_dim = args->v_dim, .d_qkv = args->d_qkv, .d_b = args->d_b, .d_a = args->d_a,
                             .d_a_log = args->d_a_log, .d_dt_bias = args->d_dt_bias, .d_out = args->d_out,
                             .d_state = args->d_state, .state_stride = args->state_stride};
    x3_cuda_batch b;
    x3_status rc;

    X3_TRY(rc, out, x3_cuda_describe(cuda, batch, &b, err));
    X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->scratch, x3_cuda_delta_bytes(&d, batch->n_rows), err));
    rc = x3_cuda_delta_rule(&d, &b, cuda->scratch.p, cuda->stream, err);
out:
    return rc;
}
