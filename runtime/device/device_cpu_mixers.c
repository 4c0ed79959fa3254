/* Operations of the CPU device for mixers: delta nets, latent attention, sparse attention, output gates. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels/linear_cpu.h"
#include "kernels/mixers_cpu.h"
#include "runtime/device/device_cpu.h"

x3_status x3_cpu_copy_heads(x3_device *dev, float *to, size_t ld_to, size_t stride_to, const float *from, size_t ld_from,
                            size_t stride_from, size_t n_rows, size_t n_heads, size_t n_cols, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t r = 0; r < n_rows; r++)
        for (size_t h = 0; h < n_heads; h++)
            memcpy(to + r * ld_to + h * stride_to, from + r * ld_from + h * stride_from, n_cols * sizeof *to);
    return X3_OK;
}

x3_status x3_cpu_layer_norm(x3_device *dev, float *x, size_t n_rows, size_t n, const float *weight, const float *bias,
                            float eps, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t r = 0; r < n_rows; r++, x += n) {
        double mean = 0, variance = 0;
        for (size_t i = 0; i < n; i++)
            mean += (double)x[i];
        mean /= (double)n;
        for (size_t i = 0; i < n; i++)
            variance += ((double)x[i] - mean) * ((double)x[i] - mean);
        double scale = 1 / sqrt(variance / (double)n + (double)eps);
        for (size_t i = 0; i < n; i++)
            x[i] = (float)(((double)x[i] - mean) * scale) * weight[i] + bias[i];
    }
    return X3_OK;
}

struct flat_work {
    float *x;
    const float *gate;
    size_t n;
};

#define FLAT_ITEM 16384

static void sigmoid_item(void *arg, size_t item, int thread)
{
    const struct flat_work *t = arg;
    const size_t end = x3_min_size(t->n, (item + 1) * FLAT_ITEM);

    (void)thread;
    for (size_t i = item * FLAT_ITEM; i < end; i++)
        t->x[i] *= 1.0f / (1.0f + x3_exp_ref(-t->gate[i]));
}

x3_status x3_cpu_sigmoid_mul(x3_device *dev, float *x, const float *gate, size_t n, x3_err *err)
{
    struct flat_work t = {.x = x, .gate = gate, .n = n};

    (void)err;
    x3_pool_run(x3_cpu(dev)->pool, (n + FLAT_ITEM - 1) / FLAT_ITEM, sigmoid_item, &t);
    return X3_OK;
}

/* ---- a linear a head ---- */

struct heads_work {
    x3_device_cpu *cpu;
    const x3_heads_args *a;
};

static void heads_item(void *arg, size_t item, int thread)
{
    const struct heads_work *t = arg;
    const x3_heads_args *a = t->a;
    const size_t head = item % a->n_heads, row = item / a->n_heads * X3_LINEAR_ROWS;
    x3_head_item h = {
        .weight = a->w->data,
        .type = a->w->kind == X3_WEIGHT_BF16 ? X3_DENSE_BF16 : a->w->kind == X3_WEIGHT_F16 ? X3_DENSE_F16 : X3_DENSE_F32,
        .n_in = a->w->n_in,
        .first = a->first + head * a->stride,
        .n = a->n,
        .transposed = a->transposed,
        .x = a->d_x + row * a->ldx + head * a->x_stride,
        .ldx = a->ldx,
        .n_rows = x3_min_size(X3_LINEAR_ROWS, a->n_rows - row),
        .y = a->d_y + row * a->ldy + head * a->y_stride,
        .ldy = a->ldy,
    };

    x3_head_linear_cpu(t->cpu->k, &h, t->cpu->thread_scratch[thread].p);
}

x3_status x3_cpu_linear_heads(x3_device *dev, const x3_heads_args *args, x3_err *err)
{
    struct heads_work t = {.cpu = x3_cpu(dev), .a = args};
    x3_status rc;

    if (args->w->kind == X3_WEIGHT_EXL3 || args->w->kind == X3_WEIGHT_NONE)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "a linear a head needs a dense weight");
    rc = x3_cpu_reserve(t.cpu, x3_head_scratch(args->n) * sizeof(float), err);
    if (rc == X3_OK)
        x3_pool_run(t.cpu->pool, args->n_heads * ((args->n_rows + X3_LINEAR_ROWS - 1) / X3_LINEAR_ROWS), heads_item, &t);
    return rc;
}

/* ---- rows of a batch ---- */

/* Sequence of every row; host. */
static x3_status rows_of(const x3_batch *batch, const x3_sequence ***out, size_t *longest, x3_err *err)
{
    x3_status rc = x3_alloc(out, batch->n_rows, sizeof **out, err);

    *longest = 0;
    for (size_t i = 0; i < batch->n_sequences && rc == X3_OK; i++) {
        const x3_sequence *s = &batch->sequences[i];
        for (size_t r = 0; r < s->n_rows; r++)
            (*out)[s->first_row + r] = s;
        *longest = x3_max_size(*longest, s->position + s->n_rows);
    }
    return rc;
}

/* ---- selection ---- */

struct select_work {
    x3_device_cpu *cpu;
    const x3_select_args *a;
    const x3_sequence **rows;
};

static void select_item(void *arg, size_t row, int thread)
{
    const struct select_work *t = arg;
    const x3_select_args *a = t->a;
    const x3_sequence *s = t->rows[row];
    x3_select_item q = {
        .q = a->d_q + row * a->n_heads * a->kv->index_dim,
        .weights = a->d_weights + row * a->n_heads,
        .n_heads = a->n_heads,
        .dim = a->kv->index_dim,
        .n_positions = s == NULL ? 0 : s->position + (row - s->first_row) + 1,
        .n_selected = a->n_selected,
        .keys = a->kv->d_index_keys,
        .pages = s == NULL ? NULL : s->pages,
        .selected = a->d_selected + row * a->n_selected,
    };

    if (q.n_positions > q.n_selected)
        x3_select_cpu(t->cpu->k, &q, t->cpu->thread_scratch[thread].p);
}

x3_status x3_cpu_select(x3_device *dev, const x3_select_args *args, const x3_batch *batch, x3_err *err)
{
    struct select_work t = {.cpu = x3_cpu(dev), .a = args};
    size_t longest;
    x3_status rc;

    X3_TRY(rc, out, rows_of(batch, &t.rows, &longest, err));
    X3_TRY(rc, out, x3_cpu_reserve(t.cpu, x3_select_scratch(args->n_heads, longest, args->n_selected) * sizeof(float), err));
    x3_pool_run(t.cpu->pool, batch->n_rows, select_item, &t);
out:
    free(t.rows);
    return rc;
}

struct sparse_work {
    x3_device_cpu *cpu;
    const x3_attention_args *a;
    const x3_sequence **rows;
    const int32_t *all; /* 0, 1, 2, ... for rows that see everything */
};

static void sparse_item(void *arg, size_t row, int thread)
{
    const struct sparse_work *t = arg;
    const x3_attention_args *a = t->a;
    const x3_kv_layer *kv = a->kv;
    const x3_sequence *s = t->rows[row];

    if (s == NULL)
        return;
    const size_t seen = s->position + (row - s->first_row) + 1;
    const bool whole = seen <= a->n_selected;
    x3_sparse_item q = {
        .n_heads = a->n_heads,
        .k_dim = kv->k_dim,
        .v_dim = kv->v_dim,
        .q = a->d_q + row * a->n_heads * kv->k_dim,
        .out = a->d_out + row * a->n_heads * kv->v_dim,
        .keys = kv->d_keys,
        .values = kv->d_values,
        .keys_page = X3_KV_PAGE * kv->k_dim,
        .values_page = X3_KV_PAGE * kv->v_dim,
        .pages = s->pages,
        .selected = whole ? t->all : a->d_selected + row * a->n_selected,
        .n_selected = whole ? seen : a->n_selected,
        .scale = a->scale,
    };

    x3_sparse_attention_cpu(t->cpu->k, &q, t->cpu->thread_scratch[thread].p);
}

x3_status x3_cpu_attention(x3_device *dev, const x3_attention_args *args, const x3_batch *batch, x3_err *err)
{
    struct sparse_work t = {.cpu = x3_cpu(dev), .a = args};
    int32_t *all = NULL;
    size_t longest;
    x3_status rc;

    if (args->d_selected == NULL)
        return x3_cpu_dense_attention(dev, args, batch, err);
    if (args->kv->n_kv_heads != 1 || args->window != 0 || args->d_sinks != NULL)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "attention over a selection has one KV head, no window and no sinks");
    X3_TRY(rc, out, rows_of(batch, &t.rows, &longest, err));
    X3_TRY(rc, out, x3_alloc(&all, args->n_selected, sizeof *all, err));
    for (size_t i = 0; i < args->n_selected; i++)
        all[i] = (int32_t)i;
    t.all = all;
    X3_TRY(rc, out, x3_cpu_reserve(t.cpu, x3_sparse_scratch(args->n_heads, args->kv->k_dim, args->kv->v_dim,
                                                            args->n_selected) * sizeof(float), err));
    x3_pool_run(t.cpu->pool, batch->n_rows, sparse_item, &t);
out:
    free(t.rows);
    free(all);
    return rc;
}

/* ---- delta net ---- */

struct conv_work {
    x3_device_cpu *cpu;
    const x3_conv_args *a;
    const x3_batch *batch;
    size_t n_blocks; /* of channels */
};

static void conv_item(void *arg, size_t item, int thread)
{
    const struct conv_work *t = arg;
    const x3_conv_args *a = t->a;
    const x3_sequence *s = &t->batch->sequences[item / t->n_blocks];
    const size_t c = item % t->n_blocks * X3_CONV_CHANNELS;
    x3_conv_item q = {
        .n = x3_min_size(X3_CONV_CHANNELS, a->n - c),
        .kernel = a->kernel,
        .n_rows = s->n_rows,
        .x = a->d_x + s->first_row * a->n + c,
        .y = a->d_out + s->first_row * a->n + c,
        .ld = a->n,
        .weight = a->d_weight + c * a->kernel,
        .fresh = s->position == 0,
        .state = a->d_state + s->slot * a->state_stride + c,
        .ld_state = a->n,
    };

    x3_conv_cpu(t->cpu->k, &q, t->cpu->thread_scratch[thread].p);
}

x3_status x3_cpu_conv_silu(x3_device *dev, const x3_conv_args *args, const x3_batch *batch, x3_err *err)
{
    struct conv_work t = {.cpu = x3_cpu(dev), .a = args, .batch = batch};
    x3_status rc = x3_cpu_reserve(t.cpu, x3_conv_scratch(args->kernel) * sizeof(float), err);

    t.n_blocks = (args->n + X3_CONV_CHANNELS - 1) / X3_CONV_CHANNELS;
    if (rc == X3_OK)
        x3_pool_run(t.cpu->pool, batch->n_sequences * t.n_blocks, conv_item, &t);
    return rc;
}

struct delta_work {
    x3_device_cpu *cpu;
    const x3_delta_args *a;
    const x3_batch *batch;
};

static void delta_item(void *arg, size_t item, int thread)
{
    const struct delta_work *t = arg;
    const x3_delta_args *a = t->a;
    const x3_sequence *s = &t->batch->sequences[item / a->n_v_heads];
    const size_t v_head = item % a->n_v_heads, k_head = v_head / (a->n_v_heads / a->n_k_heads);
    const size_t key_dim = a->n_k_heads * a->k_dim, value_dim = a->n_v_heads * a->v_dim;
    const float *x = a->d_qkv + s->first_row * (2 * key_dim + value_dim);
    x3_delta_item q = {
        .k_dim = a->k_dim,
        .v_dim = a->v_dim,
        .n_rows = s->n_rows,
        .q = x + k_head * a->k_dim,
        .k = x + key_dim + k_head * a->k_dim,
        .v = x + 2 * key_dim + v_head * a->v_dim,
        .ld = 2 * key_dim + value_dim,
        .b = a->d_b + s->first_row * a->n_v_heads + v_head,
        .a = a->d_a + s->first_row * a->n_v_heads + v_head,
        .ld_ba = a->n_v_heads,
        .a_log = a->d_a_log[v_head],
        .dt_bias = a->d_dt_bias[v_head],
        .out = a->d_out + s->first_row * value_dim + v_head * a->v_dim,
        .ld_out = value_dim,
        .fresh = s->position == 0,
        .state = a->d_state + s->slot * a->state_stride + v_head * a->k_dim * a->v_dim,
    };

    x3_delta_cpu(t->cpu->k, &q, t->cpu->thread_scratch[thread].p);
}

x3_status x3_cpu_delta_rule(x3_device *dev, const x3_delta_args *args, const x3_batch *batch, x3_err *err)
{
    struct delta_work t = {.cpu = x3_cpu(dev), .a = args, .batch = batch};
    x3_status rc = x3_cpu_reserve(t.cpu, 2 * args->k_dim * sizeof(float), err);

    if (rc == X3_OK)
        x3_pool_run(t.cpu->pool, batch->n_sequences * args->n_v_heads, delta_item, &t);
    return rc;
}
