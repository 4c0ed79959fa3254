/* Linear layers on the CPU: one weight over rows, or the weights of many experts, each over rows of its own. Both are a
 * list of parts; items of all parts run in one loop, so that experts with few rows still fill every thread. */
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"
#include "kernels/linear_cpu.h"
#include "runtime/device/device_cpu.h"

/* One weight and its rows. */
struct part {
    const x3_weight *w;
    const float *values, *suh, *svh; /* EXL3: codebook, scales as float32 */
    float *inner;                    /* rows as the items read them, [n_rows][ld]; NULL: x itself */
    size_t ld, first_row, n_rows;    /* rows of y, and of x where they are not gathered */
    size_t n_chunks;                 /* of X3_LINEAR_ROWS */
    size_t first_input, first_item;  /* numbers of its items in the two loops */
};

struct work {
    x3_device_cpu *cpu;
    struct part *parts;
    size_t n_parts, n_inputs, n_items;
    const float *x;
    const int32_t *rows; /* NULL: row r of y reads row r of x */
    float *y;
    size_t ldx, ldy;
};

/* ---- items ---- */

static const struct part *part_of_item(const struct work *t, size_t item)
{
    size_t low = 0, high = t->n_parts - 1;

    while (low < high) {
        size_t middle = (low + high + 1) / 2;
        if (t->parts[middle].first_item <= item)
            low = middle;
        else
            high = middle - 1;
    }
    return &t->parts[low];
}

static void dense_item(const struct work *t, const struct part *p, size_t local, float *scratch)
{
    const x3_weight *w = p->w;
    const size_t first = local % p->n_chunks * X3_LINEAR_ROWS;
    const float *x = p->inner != NULL ? p->inner : t->x + p->first_row * t->ldx;
    x3_dense_item d = {
        .weight = w->data,
        .type = w->kind == X3_WEIGHT_BF16 ? X3_DENSE_BF16 : w->kind == X3_WEIGHT_F16 ? X3_DENSE_F16 : X3_DENSE_F32,
        .n_out = w->n_out,
        .n_in = w->n_in,
        .first_out = local / p->n_chunks * X3_LINEAR_COLS,
        .bias = w->bias,
        .reverse = t->cpu->base.reverse_sums,
        .x = x + first * p->ld,
        .ldx = p->ld,
        .n_rows = x3_min_size(X3_LINEAR_ROWS, p->n_rows - first),
        .y = t->y + (p->first_row + first) * t->ldy,
        .ldy = t->ldy,
    };

    x3_dense_linear_cpu(t->cpu->k, &d, scratch);
}

static void exl3_item(const struct work *t, const struct part *p, size_t local, float *scratch)
{
    const x3_weight *w = p->w;
    const size_t first = local % p->n_chunks * X3_LINEAR_ROWS;
    x3_exl3_item e = {
        .words = w->data,
        .values = p->values,
        .K = w->K,
        .n_in_padded = w->n_in_padded,
        .n_out_padded = w->n_out_padded,
        .n_out = w->n_out,
        .first_out = local / p->n_chunks * X3_LINEAR_COLS,
        .svh = p->svh,
        .bias = w->bias,
        .reverse = t->cpu->base.reverse_sums,
        .x = p->inner + first * p->ld,
        .n_rows = x3_min_size(X3_LINEAR_ROWS, p->n_rows - first),
        .y = t->y + (p->first_row + first) * t->ldy,
        .ldy = t->ldy,
    };

    x3_exl3_linear_cpu(t->cpu->k, &e, scratch);
}

static void linear_item(void *arg, size_t item, int thread)
{
    const struct work *t = arg;
    const struct part *p = part_of_item(t, item);
    float *scratch = t->cpu->thread_scratch[thread].p;

    if (p->w->kind == X3_WEIGHT_EXL3)
        exl3_item(t, p, item - p->first_item, scratch);
    else
        dense_item(t, p, item - p->first_item, scratch);
}

#define INPUT_ROWS 16

/* Brings rows to where the items read them: gathered, for EXL3 scaled and transformed. */
static void input_item(void *arg, size_t item, int thread)
{
    const struct work *t = arg;
    const struct part *p = t->parts;

    (void)thread;
    while (p + 1 < t->parts + t->n_parts && p[1].first_input <= item)
        p++;
    const size_t first = (item - p->first_input) * INPUT_ROWS, end = x3_min_size(p->n_rows, first + INPUT_ROWS);
    for (size_t r = first; r < end; r++) {
        const size_t row = t->rows != NULL ? (size_t)t->rows[p->first_row + r] : p->first_row + r;
        const float *x = t->x + row * t->ldx;
        if (p->w->kind == X3_WEIGHT_EXL3)
            x3_exl3_input_cpu(t->cpu->k, x, t->ldx, 1, p->w->n_in, p->ld, p->suh, p->inner + r * p->ld);
        else
            memcpy(p->inner + r * p->ld, x, p->ld * sizeof *x);
    }
}

/* ---- parts ---- */

static bool needs_inner(const struct work *t, const x3_weight *w)
{
    return w->kind == X3_WEIGHT_EXL3 || t->rows != NULL;
}

static size_t part_floats(const struct work *t, const struct part *p)
{
    const x3_weight *w = p->w;

    return (needs_inner(t, w) ? p->n_rows * w->n_in_padded : 0) +
           (w->kind == X3_WEIGHT_EXL3 ? w->n_in_padded + w->n_out_padded : 0);
}

static x3_status place_part(struct work *t, struct part *p, float **scratch, x3_err *err)
{
    const x3_weight *w = p->w;
    float *scales;

    p->ld = t->ldx;
    if (needs_inner(t, w)) {
        p->ld = w->n_in_padded;
        p->inner = *scratch;
        *scratch += p->n_rows * p->ld;
    }
    if (w->kind != X3_WEIGHT_EXL3)
        return X3_OK;
    scales = *scratch;
    *scratch += w->n_in_padded + w->n_out_padded;
    p->suh = scales;
    p->svh = scales + w->n_in_padded;
    for (size_t i = 0; i < w->n_in_padded; i++)
        scales[i] = x3_f16_to_f32(w->suh[i]);
    for (size_t i = 0; i < w->n_out_padded; i++)
        scales[w->n_in_padded + i] = x3_f16_to_f32(w->svh[i]);
    return x3_cpu_values(t->cpu, w->codebook, &p->values, err);
}

static x3_status run_parts(struct work *t, x3_err *err)
{
    size_t floats = 0;
    float *scratch;
    x3_status rc;

    if (t->n_parts == 0)
        return X3_OK;
    for (size_t i = 0; i < t->n_parts; i++)
        floats += part_floats(t, &t->parts[i]);
    X3_TRY(rc, out, x3_cpu_grow(&t->cpu->shared, floats * sizeof(float), err));
    X3_TRY(rc, out, x3_cpu_reserve(t->cpu, X3_LINEAR_SCRATCH * sizeof(float), err));
    scratch = t->cpu->shared.p;
    t->n_inputs = t->n_items = 0;
    for (size_t i = 0; i < t->n_parts; i++) {
        struct part *p = &t->parts[i];
        X3_TRY(rc, out, place_part(t, p, &scratch, err));
        p->n_chunks = (p->n_rows + X3_LINEAR_ROWS - 1) / X3_LINEAR_ROWS;
        p->first_input = t->n_inputs;
        p->first_item = t->n_items;
        t->n_inputs += p->inner == NULL ? 0 : (p->n_rows + INPUT_ROWS - 1) / INPUT_ROWS;
        t->n_items += (p->w->n_out + X3_LINEAR_COLS - 1) / X3_LINEAR_COLS * p->n_chunks;
    }
    x3_pool_run(t->cpu->pool, t->n_inputs, input_item, t);
    x3_pool_run(t->cpu->pool, t->n_items, linear_item, t);
out:
    return rc;
}

x3_status x3_cpu_linear(x3_device *dev, const x3_weight *w, const float *x, size_t ldx, size_t n_rows, float *y, size_t ldy,
                        x3_err *err)
{
    struct part part = {.w = w, .n_rows = n_rows};
    struct work t = {.cpu = x3_cpu(dev), .parts = &part, .n_parts = n_rows > 0, .x = x, .ldx = ldx, .y = y, .ldy = ldy};

    return run_parts(&t, err);
}

#define ROWS_AT_ONCE 8192 /* of all experts in one loop: bounds the scratch */

x3_status x3_cpu_expert_linear(x3_device *dev, const x3_expert_args *a, x3_err *err)
{
    struct work t = {.cpu = x3_cpu(dev), .x = a->d_x, .ldx = a->ldx, .rows = a->d_rows, .y = a->d_y, .ldy = a->ldy};
    size_t n_rows = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&t.parts, a->n_experts, sizeof *t.parts, err));
    for (size_t e = 0; e < a->n_experts; e++) {
        const size_t first = (size_t)a->d_first[e], n = (size_t)a->d_first[e + 1] - first;
        if (n == 0)
            continue;
        if (n_rows > 0 && n_rows + n > ROWS_AT_ONCE) {
            X3_TRY(rc, out, run_parts(&t, err));
            t.n_parts = n_rows = 0;
        }
        t.parts[t.n_parts++] = (struct part){.w = &a->weights[e * a->stride], .first_row = first, .n_rows = n};
        n_rows += n;
    }
    rc = run_parts(&t, err);
out:
    free(t.parts);
    return rc;
}
