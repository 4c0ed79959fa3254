/* The CPU device: memory and the forward operations. Every operation is cut into items that one thread computes whole;
 * kernels/ defines the order of each sum, so neither the cut nor the number of threads changes a bit. */
#include "runtime/device/device_cpu.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"
#include "kernels/kv_cpu.h"
#include "kernels/linear_cpu.h"

void openblas_set_num_threads(int n);
char *openblas_get_corename(void);

/* ---- memory ---- */

/* The bytes asked for stand in front of a block, a cache line before the data. */
static x3_status cpu_alloc(x3_device *dev, void **out, size_t n_bytes, x3_err *err)
{
    char *p = NULL;
    x3_status rc = x3_alloc(&p, (uint64_t)n_bytes + 64, 1, err);

    *out = NULL;
    if (rc != X3_OK)
        return rc;
    memcpy(p, &n_bytes, sizeof n_bytes);
    dev->used_bytes += n_bytes;
    dev->peak_bytes = x3_max_size(dev->peak_bytes, dev->used_bytes);
    *out = p + 64;
    return X3_OK;
}

static void cpu_free(x3_device *dev, void *p)
{
    size_t n_bytes;

    memcpy(&n_bytes, (char *)p - 64, sizeof n_bytes);
    dev->used_bytes -= n_bytes;
    free((char *)p - 64);
}

static x3_status cpu_copy(x3_device *dev, void *to, const void *from, size_t n_bytes, x3_err *err)
{
    (void)dev;
    (void)err;
    memcpy(to, from, n_bytes);
    return X3_OK;
}

static x3_status cpu_copy_2d(x3_device *dev, float *to, size_t ld_to, const float *from, size_t ld_from, size_t n_rows,
                             size_t n_cols, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t r = 0; r < n_rows; r++)
        memcpy(to + r * ld_to, from + r * ld_from, n_cols * sizeof *to);
    return X3_OK;
}

static x3_status cpu_zero(x3_device *dev, void *to, size_t n_bytes, x3_err *err)
{
    (void)dev;
    (void)err;
    memset(to, 0, n_bytes);
    return X3_OK;
}

static x3_status cpu_sync(x3_device *dev, x3_err *err)
{
    (void)dev;
    (void)err;
    return X3_OK;
}

x3_status x3_cpu_grow(struct scratch *s, size_t n_bytes, x3_err *err)
{
    if (s->n_bytes >= n_bytes)
        return X3_OK;
    free(s->p);
    *s = (struct scratch){0};
    x3_status rc = x3_alloc(&s->p, n_bytes, 1, err);
    if (rc == X3_OK)
        s->n_bytes = n_bytes;
    return rc;
}

x3_status x3_cpu_reserve(x3_device_cpu *cpu, size_t n_bytes, x3_err *err)
{
    x3_status rc = X3_OK;

    for (int i = 0; i < x3_pool_threads(cpu->pool) && rc == X3_OK; i++)
        rc = x3_cpu_grow(&cpu->thread_scratch[i], n_bytes, err);
    return rc;
}

x3_status x3_cpu_values(x3_device_cpu *cpu, x3_codebook codebook, const float **out, x3_err *err)
{
    x3_status rc = X3_OK;

    if (codebook != X3_CB_MUL1 && cpu->values[codebook] == NULL) {
        rc = x3_alloc(&cpu->values[codebook], X3_STATES, sizeof(float), err);
        if (rc == X3_OK)
            x3_codebook_values(codebook, cpu->values[codebook]);
    }
    *out = cpu->values[codebook];
    return rc;
}

x3_status x3_cpu_trellis(x3_device_cpu *cpu, x3_codebook codebook, int K, const x3_trellis **out, x3_err *err)
{
    x3_trellis **t = &cpu->trellis[codebook][K];
    x3_status rc = *t == NULL ? x3_trellis_create(t, codebook, K, err) : X3_OK;

    *out = *t;
    return rc;
}

/* ---- norm, rope, activation ---- */

struct rows_work {
    x3_device_cpu *cpu;
    const float *x, *weight, *up;
    float *out;
    size_t ldx, ldo, n_rows, n;
    float eps;
    const x3_rope_args *rope;
    const x3_batch *batch;
};

#define ROWS_ITEM 32

static void norm_item(void *arg, size_t item, int thread)
{
    const struct rows_work *t = arg;
    size_t end = x3_min_size(t->n_rows, (item + 1) * ROWS_ITEM);

    (void)thread;
    for (size_t r = item * ROWS_ITEM; r < end; r++)
        t->cpu->k->rms_norm(t->x + r * t->ldx, t->weight, t->n, t->eps, t->out + r * t->ldo);
}

static x3_status cpu_rms_norm(x3_device *dev, const float *x, size_t ldx, size_t n_rows, size_t n, const float *weight,
                              float eps, float *out, size_t ldo, x3_err *err)
{
    struct rows_work t = {.cpu = x3_cpu(dev), .x = x, .ldx = ldx, .n_rows = n_rows, .n = n, .weight = weight,
                          .eps = eps, .out = out, .ldo = ldo};

    (void)err;
    x3_pool_run(t.cpu->pool, (n_rows + ROWS_ITEM - 1) / ROWS_ITEM, norm_item, &t);
    return X3_OK;
}

static void rope_row(const x3_rope_args *a, size_t row, size_t position)
{
    const size_t half = a->n_rotated / 2;
    const float *c = a->d_cos_sin + position * a->n_rotated, *s = c + half;

    for (size_t h = 0; h < a->n_heads; h++) {
        float *x = a->d_x + row * a->ld + a->first + h * a->head_stride;
        for (size_t i = 0; i < half; i++) {
            float *p = a->interleaved ? x + 2 * i : x + i, *q = a->interleaved ? p + 1 : x + i + half;
            float u = *p, v = *q;
            *p = u * c[i] - v * s[i];
            *q = v * c[i] + u * s[i];
        }
    }
}

static void rope_item(void *arg, size_t item, int thread)
{
    const struct rows_work *t = arg;
    size_t end = x3_min_size(t->n_rows, (item + 1) * ROWS_ITEM);

    (void)thread;
    for (size_t r = item * ROWS_ITEM; r < end; r++)
        rope_row(t->rope, r, (size_t)t->batch->d_positions[r]);
}

static x3_status cpu_rope(x3_device *dev, const x3_rope_args *args, const x3_batch *batch, x3_err *err)
{
    struct rows_work t = {.rope = args, .batch = batch, .n_rows = batch->n_rows};

    (void)err;
    x3_pool_run(x3_cpu(dev)->pool, (t.n_rows + ROWS_ITEM - 1) / ROWS_ITEM, rope_item, &t);
    return X3_OK;
}

#define FLAT_ITEM 16384

static void silu_item(void *arg, size_t item, int thread)
{
    const struct rows_work *t = arg;
    size_t at = item * FLAT_ITEM;

    (void)thread;
    t->cpu->k->silu_mul(t->x + at, t->up + at, x3_min_size(FLAT_ITEM, t->n - at), t->out + at);
}

static x3_status cpu_silu_mul(x3_device *dev, const float *gate, const float *up, size_t n, float *out, x3_err *err)
{
    struct rows_work t = {.cpu = x3_cpu(dev), .x = gate, .up = up, .n = n, .out = out};

    (void)err;
    x3_pool_run(t.cpu->pool, (n + FLAT_ITEM - 1) / FLAT_ITEM, silu_item, &t);
    return X3_OK;
}

static x3_status cpu_add(x3_device *dev, float *x, const float *y, size_t n, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t i = 0; i < n; i++)
        x[i] += y[i];
    return X3_OK;
}

struct score_work {
    const float *reference, *pack;
    size_t vocab;
    const int32_t *next;
    x3_score_position *out;
};

static void score_item(void *arg, size_t item, int thread)
{
    const struct score_work *t = arg;

    (void)thread;
    x3_score_row_ref(t->reference + item * t->vocab, t->pack + item * t->vocab, t->vocab, t->next[item], &t->out[item]);
}

static x3_status cpu_score(x3_device *dev, const float *reference, const float *pack, size_t n_rows, size_t vocab,
                           const int32_t *next, x3_score_position *out, x3_err *err)
{
    struct score_work t = {.reference = reference, .pack = pack, .vocab = vocab, .next = next, .out = out};

    (void)err;
    x3_pool_run(x3_cpu(dev)->pool, n_rows, score_item, &t);
    return X3_OK;
}

/* ---- attention ---- */

static void append_packed(const x3_kv_layer *kv, size_t block, size_t in_page, const float *key, const float *value)
{
    x3_kv_pack_keys(kv->type, key, kv->k_dim, in_page,
                    (char *)kv->d_packed_keys + block * x3_kv_block_bytes(kv->type, kv->k_dim));
    x3_kv_pack_values(kv->type, value, kv->v_dim, in_page,
                      (char *)kv->d_packed_values + block * x3_kv_block_bytes(kv->type, kv->v_dim));
}

static x3_status cpu_kv_append(x3_device *dev, const x3_kv_layer *kv, const x3_batch *batch, const float *k, size_t ldk,
                               const float *v, size_t ldv, x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t i = 0; i < batch->n_sequences; i++) {
        const x3_sequence *s = &batch->sequences[i];
        for (size_t r = 0; r < s->n_rows; r++) {
            size_t p = s->position + r, in_page = p % X3_KV_PAGE;
            size_t page = (size_t)s->pages[p / X3_KV_PAGE] * kv->n_kv_heads;
            for (size_t h = 0; h < kv->n_kv_heads; h++) {
                const float *key = k + (s->first_row + r) * ldk + h * kv->k_dim;
                if (kv->type != X3_KV_F32) {
                    append_packed(kv, page + h, in_page, key, v + (s->first_row + r) * ldv + h * kv->v_dim);
                    continue;
                }
                float *panel = kv->d_keys + (page + h) * X3_KV_PAGE * kv->k_dim +
                               in_page / X3_PANEL * X3_PANEL * kv->k_dim + in_page % X3_PANEL;
                for (size_t d = 0; d < kv->k_dim; d++)
                    panel[d * X3_PANEL] = key[d];
                if (kv->d_values == NULL)
                    continue;
                memcpy(kv->d_values + ((page + h) * X3_KV_PAGE + in_page) * kv->v_dim,
                       v + (s->first_row + r) * ldv + h * kv->v_dim, kv->v_dim * sizeof *v);
            }
        }
    }
    return X3_OK;
}

struct attention_work {
    x3_device_cpu *cpu;
    const x3_attention_args *a;
    const x3_batch *batch;
    size_t n_repeat, group; /* query heads a KV head, and of them an item */
    size_t n_groups, positions; /* groups of heads, positions an item */
    size_t *first_item;     /* [n_sequences + 1], items of a sequence: position blocks x groups of heads */
};

static void attention_item(void *arg, size_t item, int thread)
{
    const struct attention_work *t = arg;
    const x3_attention_args *a = t->a;
    const x3_kv_layer *kv = a->kv;
    size_t i = 0;

    while (item >= t->first_item[i + 1])
        i++;
    const x3_sequence *s = &t->batch->sequences[i];
    size_t local = item - t->first_item[i], part = local % t->n_groups, head = part / (t->n_groups / kv->n_kv_heads);
    size_t q_head = head * t->n_repeat + part % (t->n_groups / kv->n_kv_heads) * t->group;
    size_t n_heads = x3_min_size(t->group, (head + 1) * t->n_repeat - q_head);
    /* the last blocks see the most positions: they go first, so that no thread ends with them */
    size_t n_blocks = (s->n_rows + t->positions - 1) / t->positions;
    size_t first = (n_blocks - 1 - local / t->n_groups) * t->positions;
    size_t row = s->first_row + first;
    x3_attention_item q = {
        .n_rows = x3_min_size(t->positions, s->n_rows - first) * n_heads,
        .n_repeat = n_heads,
        .first_position = s->position + first,
        .ldq = a->n_heads * kv->k_dim,
        .ldo = a->n_heads * kv->v_dim,
        .k_dim = kv->k_dim,
        .v_dim = kv->v_dim,
        .type = kv->type,
        .keys_page = kv->n_kv_heads * X3_KV_PAGE * kv->k_dim,
        .values_page = kv->n_kv_heads * X3_KV_PAGE * kv->v_dim,
        .pages = s->pages,
        .scale = a->scale,
        .window = a->window,
        .sinks = a->d_sinks == NULL ? NULL : a->d_sinks + q_head,
    };
    if (kv->type != X3_KV_F32) {
        const size_t key_bytes = x3_kv_block_bytes(kv->type, kv->k_dim), value_bytes = x3_kv_block_bytes(kv->type, kv->v_dim);
        q.packed_keys = (const char *)kv->d_packed_keys + head * key_bytes;
        q.packed_values = (const char *)kv->d_packed_values + head * value_bytes;
        q.keys_page = kv->n_kv_heads * key_bytes;
        q.values_page = kv->n_kv_heads * value_bytes;
    } else {
        q.keys = kv->d_keys + head * X3_KV_PAGE * kv->k_dim;
        q.values = kv->d_values == NULL ? NULL : kv->d_values + head * X3_KV_PAGE * kv->v_dim;
    }
    q.q = a->d_q + row * q.ldq + q_head * kv->k_dim;
    q.out = a->d_out + row * q.ldo + q_head * kv->v_dim;
    x3_attention_cpu(t->cpu->k, &q, t->cpu->thread_scratch[thread].p);
}

x3_status x3_cpu_dense_attention(x3_device *dev, const x3_attention_args *args, const x3_batch *batch, x3_err *err)
{
    struct attention_work t = {.cpu = x3_cpu(dev), .a = args, .batch = batch};
    size_t longest = 0;
    x3_status rc;

    t.n_repeat = args->n_heads / args->kv->n_kv_heads;
    /* more heads than an item takes: the fewest groups of about equal size */
    const size_t split = (t.n_repeat + X3_ATTENTION_ROWS - 1) / X3_ATTENTION_ROWS;
    t.group = (t.n_repeat + split - 1) / split;
    t.n_groups = (t.n_repeat + t.group - 1) / t.group * args->kv->n_kv_heads;
    t.positions = X3_ATTENTION_ROWS / t.group;
    X3_TRY(rc, out, x3_alloc(&t.first_item, batch->n_sequences + 1, sizeof *t.first_item, err));
    for (size_t i = 0; i < batch->n_sequences; i++) {
        const x3_sequence *s = &batch->sequences[i];
        t.first_item[i + 1] = t.first_item[i] + (s->n_rows + t.positions - 1) / t.positions * t.n_groups;
        longest = x3_max_size(longest, s->position + s->n_rows);
    }
    X3_TRY(rc, out,
           x3_cpu_reserve(t.cpu, x3_attention_scratch(longest, args->kv->k_dim, args->kv->v_dim) * sizeof(float), err));
    x3_pool_run(t.cpu->pool, t.first_item[batch->n_sequences], attention_item, &t);
out:
    free(t.first_item);
    return rc;
}

/* ---- calibration ---- */

static x3_status cpu_all_finite(x3_device *dev, const float *x, size_t n, bool *finite, x3_err *err)
{
    float sum = 0;

    (void)dev;
    (void)err;
    for (size_t i = 0; i < n; i++)
        sum += x[i] * 0; /* 0, or NaN from a NaN or an infinity on */
    *finite = sum == 0;
    return X3_OK;
}

static x3_status cpu_drop_nonfinite(x3_device *dev, float *x, float *y, size_t n_rows, size_t n, size_t *n_bad,
                                    x3_err *err)
{
    (void)dev;
    (void)err;
    *n_bad = 0;
    for (size_t r = 0; r < n_rows; r++) {
        bool bad = false;
        for (size_t i = 0; i < n && !bad; i++)
            bad = !isfinite(x[r * n + i]) || (y != NULL && !isfinite(y[r * n + i]));
        if (!bad)
            continue;
        memset(x + r * n, 0, n * sizeof *x);
        if (y != NULL)
            memset(y + r * n, 0, n * sizeof *y);
        ++*n_bad;
    }
    return X3_OK;
}

/* ---- open and close ---- */

static void cpu_destroy(x3_device *dev)
{
    x3_device_cpu *cpu = x3_cpu(dev);

    for (int i = 0; cpu->thread_scratch != NULL && i < x3_pool_threads(cpu->pool); i++)
        free(cpu->thread_scratch[i].p);
    free(cpu->thread_scratch);
    free(cpu->shared.p);
    for (int c = 0; c < 3; c++) {
        free(cpu->values[c]);
        for (int K = 0; K <= X3_K_MAX; K++)
            x3_trellis_free(cpu->trellis[c][K]);
    }
    x3_pool_free(cpu->pool);
    free(cpu);
}

static const x3_device_ops cpu_ops = {
    .destroy = cpu_destroy,
    .alloc = cpu_alloc,
    .free = cpu_free,
    .upload = cpu_copy,
    .download = cpu_copy,
    .copy = cpu_copy,
    .copy_2d = cpu_copy_2d,
    .copy_heads = x3_cpu_copy_heads,
    .zero = cpu_zero,
    .sync = cpu_sync,
    .linear = x3_cpu_linear,
    .rms_norm = cpu_rms_norm,
    .rope = cpu_rope,
    .kv_append = cpu_kv_append,
    .attention = x3_cpu_attention,
    .silu_mul = cpu_silu_mul,
    .layer_norm = x3_cpu_layer_norm,
    .sigmoid_mul = x3_cpu_sigmoid_mul,
    .linear_heads = x3_cpu_linear_heads,
    .select = x3_cpu_select,
    .conv_silu = x3_cpu_conv_silu,
    .delta_rule = x3_cpu_delta_rule,
    .sigmoid_scale = x3_cpu_sigmoid_scale,
    .route = x3_cpu_route,
    .group_rows = x3_cpu_group_rows,
    .gather_rows = x3_cpu_gather_rows,
    .expert_linear = x3_cpu_expert_linear,
    .combine_rows = x3_cpu_combine_rows,
    .add = cpu_add,
    .score = cpu_score,
    .gram = x3_cpu_gram,
    .all_finite = cpu_all_finite,
    .drop_nonfinite = cpu_drop_nonfinite,
    .gemm = x3_cpu_gemm,
    .mirror = x3_cpu_mirror,
    .spd_solve = x3_cpu_spd_solve,
    .block_ldl = x3_cpu_block_ldl,
    .dense_floats = x3_cpu_dense_floats,
    .transpose_pad = x3_cpu_transpose_pad,
    .scale_rows = x3_cpu_scale_rows,
    .scale_cols = x3_cpu_scale_cols,
    .row_dots = x3_cpu_row_dots,
    .col_dots = x3_cpu_col_dots,
    .multiply = x3_cpu_multiply,
    .scale = x3_cpu_scale,
    .add_diagonal = x3_cpu_add_diagonal,
    .axpy = x3_cpu_axpy,
    .hadamard_rows = x3_cpu_hadamard_rows,
    .hadamard_cols = x3_cpu_hadamard_cols,
    .ldlq = x3_cpu_ldlq,
    .decode = x3_cpu_decode,
};

x3_status x3_device_open_cpu(x3_device **out, int n_threads, x3_err *err)
{
    x3_device_cpu *cpu = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&cpu, 1, sizeof *cpu, err));
    cpu->base.ops = &cpu_ops;
    cpu->base.in_place_align = 1;
    cpu->k = x3_kernels_best();
    X3_TRY(rc, out, x3_pool_create(&cpu->pool, n_threads, err));
    X3_TRY(rc, out, x3_alloc(&cpu->thread_scratch, (uint64_t)x3_pool_threads(cpu->pool), sizeof *cpu->thread_scratch, err));
    /* BLAS may sum differently with more threads: it gets one, and we cut the work ourselves. */
    openblas_set_num_threads(1);
    snprintf(cpu->base.name, sizeof cpu->base.name, "cpu %s, %d threads", cpu->k->name, x3_pool_threads(cpu->pool));
    snprintf(cpu->base.kernel_set, sizeof cpu->base.kernel_set, "cpu %s, OpenBLAS %s", cpu->k->name,
             openblas_get_corename());
    *out = &cpu->base;
    cpu = NULL;
out:
    if (cpu != NULL)
        cpu_destroy(&cpu->base);
    return rc;
}
