/* Routing of rows to experts and back, on the CPU. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/device_cpu.h"

#define ROWS_ITEM 32

struct rows_work {
    x3_device_cpu *cpu;
    const x3_route_rule *rule;
    const float *x, *correction, *weights, *gate;
    const int32_t *slots;
    int32_t *ids;
    float *out, *chosen;
    size_t n_rows, n_chosen, n;
    bool add;
};

static void run_rows(x3_device *dev, struct rows_work *t, void (*item)(void *, size_t, int))
{
    x3_pool_run(x3_cpu(dev)->pool, (t->n_rows + ROWS_ITEM - 1) / ROWS_ITEM, item, t);
}

static void scale_item(void *arg, size_t item, int thread)
{
    const struct rows_work *t = arg;
    const size_t end = x3_min_size(t->n_rows, (item + 1) * ROWS_ITEM);

    (void)thread;
    for (size_t r = item * ROWS_ITEM; r < end; r++) {
        const float s = 1 / (1 + x3_exp_ref(-t->gate[r]));
        for (size_t i = 0; i < t->n; i++)
            t->out[r * t->n + i] *= s;
    }
}

x3_status x3_cpu_sigmoid_scale(x3_device *dev, float *x, const float *gate, size_t n_rows, size_t n, x3_err *err)
{
    struct rows_work t = {.gate = gate, .out = x, .n_rows = n_rows, .n = n};

    (void)err;
    run_rows(dev, &t, scale_item);
    return X3_OK;
}

static void route_item(void *arg, size_t item, int thread)
{
    const struct rows_work *t = arg;
    const size_t end = x3_min_size(t->n_rows, (item + 1) * ROWS_ITEM);
    const x3_route_rule *rule = t->rule;

    for (size_t r = item * ROWS_ITEM; r < end; r++)
        x3_route_row_ref(rule, t->x + r * rule->n_experts, t->correction, t->ids + r * rule->n_chosen,
                         t->chosen + r * rule->n_chosen, t->cpu->thread_scratch[thread].p);
}

x3_status x3_cpu_route(x3_device *dev, const x3_route_rule *rule, const float *logits, const float *correction, size_t n_rows,
                       int32_t *ids, float *weights, x3_err *err)
{
    struct rows_work t = {.cpu = x3_cpu(dev), .rule = rule, .x = logits, .correction = correction, .ids = ids,
                          .chosen = weights, .n_rows = n_rows};
    x3_status rc = x3_cpu_reserve(t.cpu, 3 * rule->n_experts * sizeof(float), err);

    if (rc == X3_OK)
        run_rows(dev, &t, route_item);
    return rc;
}

x3_status x3_cpu_group_rows(x3_device *dev, const int32_t *ids, size_t n_rows, size_t n_chosen, size_t n_experts,
                            int32_t *first, int32_t *rows, int32_t *slots, x3_err *err)
{
    const size_t n_slots = n_rows * n_chosen;
    int32_t *next = NULL;
    x3_status rc = x3_alloc(&next, n_experts, sizeof *next, err);

    (void)dev;
    if (rc != X3_OK)
        return rc;
    memset(first, 0, (n_experts + 1) * sizeof *first);
    for (size_t i = 0; i < n_slots; i++)
        first[ids[i] + 1]++;
    for (size_t e = 0; e < n_experts; e++) {
        next[e] = first[e];
        first[e + 1] += first[e];
    }
    for (size_t i = 0; i < n_slots; i++) {
        slots[i] = next[ids[i]]++;
        rows[slots[i]] = (int32_t)(i / n_chosen);
    }
    free(next);
    return X3_OK;
}

x3_status x3_cpu_gather_rows(x3_device *dev, const float *x, const int32_t *rows, size_t n_rows, size_t n, float *out,
                             x3_err *err)
{
    (void)dev;
    (void)err;
    for (size_t i = 0; i < n_rows; i++)
        memcpy(out + i * n, x + (size_t)rows[i] * n, n * sizeof *x);
    return X3_OK;
}

static void combine_item(void *arg, size_t item, int thread)
{
    const struct rows_work *t = arg;
    const size_t end = x3_min_size(t->n_rows, (item + 1) * ROWS_ITEM);

    (void)thread;
    for (size_t r = item * ROWS_ITEM; r < end; r++) {
        float *out = t->out + r * t->n;
        if (!t->add)
            memset(out, 0, t->n * sizeof *out);
        for (size_t j = 0; j < t->n_chosen; j++) {
            const float weight = t->weights[r * t->n_chosen + j];
            const float *y = t->x + (size_t)t->slots[r * t->n_chosen + j] * t->n;
            for (size_t i = 0; i < t->n; i++)
                out[i] += weight * y[i];
        }
    }
}

x3_status x3_cpu_combine_rows(x3_device *dev, const float *y, const int32_t *slots, const float *weights, size_t n_rows,
                              size_t n_chosen, size_t n, bool add, float *out, x3_err *err)
{
    struct rows_work t = {.x = y, .slots = slots, .weights = weights, .n_rows = n_rows, .n_chosen = n_chosen, .n = n,
                          .add = add, .out = out};

    (void)err;
    run_rows(dev, &t, combine_item);
    return X3_OK;
}
