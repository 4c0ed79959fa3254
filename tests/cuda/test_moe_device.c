/* Operations of mixtures of experts on the CUDA device against the CPU device's, on random shapes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/cuda/device_pair.h"
#include "tests/test.h"

/* ---- integers on both ---- */

typedef struct twin_ints {
    int32_t *cpu, *gpu;
    size_t n;
} twin_ints;

static twin_ints make_ints(const x3_pair *p, size_t n)
{
    twin_ints t = {.n = n};
    x3_err err = {0};

    CHECK_OK(x3_alloc(&t.cpu, n, sizeof *t.cpu, &err), &err);
    t.gpu = x3_pair_upload(p, t.cpu, n * sizeof *t.cpu);
    return t;
}

static void upload_ints(const x3_pair *p, const twin_ints *t)
{
    x3_err err = {0};

    CHECK_OK(p->gpu->ops->upload(p->gpu, t->gpu, t->cpu, t->n * sizeof *t->cpu, &err), &err);
    CHECK_OK(p->gpu->ops->sync(p->gpu, &err), &err);
}

/* Says the first that differs. */
static bool equal_ints(const x3_pair *p, const twin_ints *t)
{
    int32_t *got = malloc(t->n * sizeof *got);
    x3_err err = {0};

    CHECK_OK(p->gpu->ops->download(p->gpu, got, t->gpu, t->n * sizeof *got, &err), &err);
    size_t i = 0;
    while (i < t->n && got[i] == t->cpu[i])
        i++;
    if (i < t->n)
        printf("    number %zu is %d, on the CPU %d\n", i, got[i], t->cpu[i]);
    free(got);
    return i == t->n;
}

static void free_ints(const x3_pair *p, twin_ints *t)
{
    free(t->cpu);
    x3_device_free(p->gpu, t->gpu);
}

/* ---- routing ---- */

static void check_route(const x3_pair *p, const x3_route_rule *rule, size_t rows, bool corrected)
{
    const size_t n = rule->n_experts;
    x3_twin logits = x3_twin_random(p, "logits", rows * n), correction = x3_twin_random(p, "correction", n);
    x3_twin weights = x3_twin_random(p, "weights", rows * rule->n_chosen);
    twin_ints ids = make_ints(p, rows * rule->n_chosen);
    x3_err err = {0};

    for (size_t i = 0; i < n && rows > 3; i++)
        logits.cpu[2 * n + i] = i % 3 == 0 ? 1.5f : -0.25f; /* ties */
    if (rows > 9) {
        logits.cpu[5 * n + n / 2] = NAN;
        logits.cpu[6 * n] = INFINITY;
        logits.cpu[7 * n + 1] = -INFINITY;
    }
    x3_twin_upload(p, &logits);
    BOTH(*p, &err, dev->ops->route(dev, rule, OF(logits), corrected ? OF(correction) : NULL, rows, OF(ids), OF(weights), &err));
    CHECK_MSG(equal_ints(p, &ids), "%zu of %zu experts, %zu of %zu groups: other experts", rule->n_chosen, n,
              rule->n_chosen_groups, rule->n_groups);
    float *got = x3_twin_download(p, &weights);
    for (size_t i = 0; i < weights.n; i++)
        CHECK_MSG(memcmp(&got[i], &weights.cpu[i], 4) == 0 || (isnan(got[i]) && isnan(weights.cpu[i])),
                  "weight %zu is %.9g, on the CPU %.9g", i, (double)got[i], (double)weights.cpu[i]);
    free(got);
    x3_twin_free(p, &logits);
    x3_twin_free(p, &correction);
    x3_twin_free(p, &weights);
    free_ints(p, &ids);
}

X3_TEST(cuda_routing_gives_the_cpus_bits)
{
    static const size_t shapes[][4] = {{8, 2, 1, 1}, {60, 4, 1, 1}, {256, 8, 8, 4}, {384, 8, 1, 1}, {96, 6, 3, 1}, {4, 4, 2, 2},
                                       {513, 10, 1, 1}};
    x3_pair p = x3_pair_open();

    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++)
        for (int variant = 0; variant < 8; variant++) {
            const x3_route_rule rule = {.n_experts = shapes[s][0], .n_chosen = shapes[s][1], .n_groups = shapes[s][2],
                                        .n_chosen_groups = shapes[s][3], .scores = variant & 1 ? X3_ROUTE_SIGMOID : X3_ROUTE_SOFTMAX,
                                        .normalize = variant & 2, .scale = variant & 2 ? 2.5f : 1};
            check_route(&p, &rule, s == 0 ? 1 : 201, variant & 4);
        }
    x3_pair_close(&p);
}

X3_TEST(cuda_rows_are_grouped_gathered_and_combined_as_on_the_cpu)
{
    static const size_t shapes[][4] = {{1, 8, 128, 64}, {700, 3, 16, 100}, {5, 2, 4, 7}, {3000, 4, 257, 24}};
    x3_pair p = x3_pair_open();
    x3_rng rng;
    x3_err err = {0};

    x3_rng_init(&rng, 4, "ids");
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
        const size_t rows = shapes[s][0], k = shapes[s][1], n_experts = shapes[s][2], n = shapes[s][3], slots = rows * k;
        twin_ints ids = make_ints(&p, slots), first = make_ints(&p, n_experts + 1), of = make_ints(&p, slots),
                  at = make_ints(&p, slots);
        x3_twin x = x3_twin_random(&p, "x", rows * n), y = x3_twin_random(&p, "y", slots * n);
        x3_twin weights = x3_twin_random(&p, "w", slots), out = x3_twin_random(&p, "out", rows * n);
        for (size_t i = 0; i < slots; i++) /* some experts get most rows, the first and last none */
            ids.cpu[i] = (int32_t)(1 + (x3_rng_next(&rng) % 3 == 0 ? 0 : x3_rng_next(&rng) % (n_experts - 2)));
        upload_ints(&p, &ids);
        BOTH(p, &err, dev->ops->group_rows(dev, OF(ids), rows, k, n_experts, OF(first), OF(of), OF(at), &err));
        CHECK_MSG(equal_ints(&p, &first) && equal_ints(&p, &of) && equal_ints(&p, &at), "%zu rows to %zu experts", rows, n_experts);
        BOTH(p, &err, dev->ops->gather_rows(dev, OF(x), OF(of), slots, n, OF(y), &err));
        CHECK(x3_twin_equal(&p, &y));
        for (int add = 0; add < 2; add++) {
            BOTH(p, &err, dev->ops->combine_rows(dev, OF(y), OF(at), OF(weights), rows, k, n, add, OF(out), &err));
            CHECK(x3_twin_equal(&p, &out));
        }
        x3_twin *all[] = {&x, &y, &weights, &out};
        for (int i = 0; i < 4; i++)
            x3_twin_free(&p, all[i]);
        free_ints(&p, &ids);
        free_ints(&p, &first);
        free_ints(&p, &of);
        free_ints(&p, &at);
    }
    x3_pair_close(&p);
}

X3_TEST(cuda_gates_equal_the_cpus)
{
    x3_pair p = x3_pair_open();
    x3_twin x = x3_twin_random(&p, "x", 37 * 100), gate = x3_twin_random(&p, "gate", 37 * 100);
    x3_err err = {0};

    BOTH(p, &err, dev->ops->sigmoid_mul(dev, OF(x), OF(gate), 37 * 100, &err));
    CHECK(x3_twin_equal(&p, &x));
    BOTH(p, &err, dev->ops->sigmoid_scale(dev, OF(x), OF(gate), 37, 100, &err));
    CHECK(x3_twin_equal(&p, &x));
    x3_twin_free(&p, &x);
    x3_twin_free(&p, &gate);
    x3_pair_close(&p);
}

/* ---- linears of experts ---- */

#define EXPERTS 7

struct expert_case {
    x3_twin_weight w[2 * EXPERTS]; /* every other one is another linear's */
    x3_weight cpu[2 * EXPERTS], gpu[2 * EXPERTS];
    twin_ints first, rows;
    size_t n_rows, n_slots, n_in, n_out;
};

/* What expert e is: -1 BF16, -2 F16, -3 F32, else K. */
static struct expert_case make_experts(const x3_pair *p, const int *kinds, size_t n_in, size_t n_out, size_t n_rows)
{
    static const size_t shares[EXPERTS] = {0, 1, 20, 3, 70, 0, 6}; /* of 100 rows */
    static const x3_weight_kind dense[] = {X3_WEIGHT_NONE, X3_WEIGHT_BF16, X3_WEIGHT_F16, X3_WEIGHT_F32};
    struct expert_case c = {.n_rows = n_rows, .n_in = n_in, .n_out = n_out, .first = make_ints(p, EXPERTS + 1)};

    for (int e = 0; e < EXPERTS; e++) {
        c.w[2 * e] = kinds[e] < 0 ? x3_twin_dense(p, dense[-kinds[e]], n_out, n_in)
                                  : x3_twin_exl3(p, kinds[e], (x3_codebook)(e % 3), n_out, n_in);
        c.cpu[2 * e] = c.w[2 * e].cpu;
        c.gpu[2 * e] = c.w[2 * e].gpu;
        if (e % 2 == 0)
            c.cpu[2 * e].bias = c.gpu[2 * e].bias = NULL;
        c.first.cpu[e + 1] = c.first.cpu[e] + (int32_t)(shares[e] == 1 ? 1 : shares[e] * n_rows / 100);
    }
    c.n_slots = (size_t)c.first.cpu[EXPERTS];
    c.rows = make_ints(p, c.n_slots);
    for (size_t i = 0; i < c.n_slots; i++)
        c.rows.cpu[i] = (int32_t)((i * 31 + 5) % n_rows);
    upload_ints(p, &c.first);
    upload_ints(p, &c.rows);
    return c;
}

static void free_experts(const x3_pair *p, struct expert_case *c)
{
    for (int e = 0; e < EXPERTS; e++)
        x3_twin_weight_free(p, &c->w[2 * e]);
    free_ints(p, &c->first);
    free_ints(p, &c->rows);
}

/* Largest relative error of a row; rows of very different size, 4 floats between them, or none and odd addresses. */
static double experts_error(const x3_pair *p, struct expert_case *c, bool gathered, size_t gap)
{
    const size_t ldx = c->n_in + gap, ldy = c->n_out + gap, n_x = gathered ? c->n_rows : c->n_slots;
    x3_twin x = x3_twin_random(p, "x", n_x * ldx), y = x3_twin_random(p, "y", c->n_slots * ldy);
    x3_err err = {0};
    double worst = 0;

    for (size_t i = 0; i < n_x * ldx; i++)
        x.cpu[i] *= i / ldx % 3 == 1 ? 1e-5f : i / ldx % 3 == 2 ? 3e4f : 1;
    x3_twin_upload(p, &x);
    BOTH(*p, &err, dev->ops->expert_linear(dev,
                                           &(x3_expert_args){.weights = on_gpu ? c->gpu : c->cpu, .n_experts = EXPERTS, .stride = 2,
                                                             .d_first = OF(c->first), .d_rows = gathered ? OF(c->rows) : NULL,
                                                             .n_slots = c->n_slots, .d_x = OF(x), .ldx = ldx, .d_y = OF(y), .ldy = ldy},
                                           &err));
    float *got = x3_twin_download(p, &y);
    for (size_t r = 0; r < c->n_slots; r++) {
        double error = 0, sum = 0;
        for (size_t i = 0; i < ldy; i++) {
            const double d = (double)got[r * ldy + i] - y.cpu[r * ldy + i];
            CHECK_MSG(i < c->n_out || d == 0, "slot %zu: written past its end", r);
            error += d * d;
            sum += i < c->n_out ? (double)y.cpu[r * ldy + i] * y.cpu[r * ldy + i] : 0;
        }
        worst = fmax(worst, isfinite(error) ? sqrt(error / sum) : INFINITY);
    }
    free(got);
    x3_twin_free(p, &x);
    x3_twin_free(p, &y);
    return worst;
}

static const int kinds[][EXPERTS] = {{-1, -1, -1, -1, -1, -1, -1}, {3, 3, 3, 3, 3, 3, 3}, {1, 2, 3, 4, 5, 6, 7},
                                     {8, -1, 8, -2, 4, -3, 3},     {-2, -3, -2, -3, -2, -3, -2}};

X3_TEST(cuda_experts_equal_the_cpu_to_float32_rounding)
{
    static const size_t shapes[][4] = {{256, 128, 300, 4}, {500, 300, 90, 3}, {77, 40, 33, 1}, {1024, 512, 9, 0}, {130, 257, 700, 0}};
    x3_pair p = x3_pair_open();
    double most = 0;

    for (size_t k = 0; k < sizeof kinds / sizeof kinds[0]; k++)
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; s++) {
            struct expert_case c = make_experts(&p, kinds[k], shapes[s][0], shapes[s][1], shapes[s][2]);
            for (int variant = 0; variant < 4; variant++) {
                p.gpu->reverse_sums = variant & 2;
                double e = experts_error(&p, &c, variant & 1, shapes[s][3]);
                most = fmax(most, e);
                CHECK_MSG(e < 3e-6, "kinds %zu, %zu x %zu, %zu rows, variant %d: relative error %.3g", k, shapes[s][1], shapes[s][0],
                          shapes[s][2], variant, e);
            }
            p.gpu->reverse_sums = false;
            free_experts(&p, &c);
        }
    printf("    relative error at most %.2g\n", most);
    x3_pair_close(&p);
}

/* One slot of one expert: the same bits as among all. */
static void check_slot(const x3_pair *p, const struct expert_case *c, const x3_twin *x, const float *all, size_t slot)
{
    size_t e = 0;
    x3_twin y = x3_twin_random(p, "one", c->n_out);
    x3_err err = {0};

    while ((size_t)c->first.cpu[e + 1] <= slot)
        e++;
    const int32_t first[2] = {0, 1};
    int32_t *d_first = x3_pair_upload(p, first, sizeof first);
    CHECK_OK(p->gpu->ops->expert_linear(p->gpu,
                                        &(x3_expert_args){.weights = &c->gpu[2 * e], .n_experts = 1, .stride = 2, .d_first = d_first,
                                                          .d_rows = c->rows.gpu + slot, .n_slots = 1, .d_x = x->gpu, .ldx = c->n_in,
                                                          .d_y = y.gpu, .ldy = c->n_out},
                                        &err), &err);
    float *one = x3_twin_download(p, &y);
    CHECK_MSG(memcmp(one, all + slot * c->n_out, c->n_out * sizeof *one) == 0, "slot %zu of expert %zu differs alone", slot, e);
    free(one);
    x3_device_free(p->gpu, d_first);
    x3_twin_free(p, &y);
}

X3_TEST(cuda_experts_give_a_row_the_same_bits_whatever_comes_with_it)
{
    x3_pair p = x3_pair_open();
    x3_err err = {0};

    for (size_t k = 0; k < 4; k++) {
        struct expert_case c = make_experts(&p, kinds[k], 384, 256, 400);
        x3_twin x = x3_twin_random(&p, "x", c.n_rows * c.n_in), y = x3_twin_random(&p, "y", c.n_slots * c.n_out);
        CHECK_OK(p.gpu->ops->expert_linear(p.gpu,
                                           &(x3_expert_args){.weights = c.gpu, .n_experts = EXPERTS, .stride = 2,
                                                             .d_first = c.first.gpu, .d_rows = c.rows.gpu, .n_slots = c.n_slots,
                                                             .d_x = x.gpu, .ldx = c.n_in, .d_y = y.gpu, .ldy = c.n_out},
                                           &err), &err);
        float *all = x3_twin_download(&p, &y);
        for (size_t slot = 0; slot < c.n_slots; slot += 29)
            check_slot(&p, &c, &x, all, slot);
        free(all);
        x3_twin_free(&p, &x);
        x3_twin_free(&p, &y);
        free_experts(&p, &c);
    }
    x3_pair_close(&p);
}

/* More experts than rows: blocks look for those that have some, 256 at a time. */
X3_TEST(cuda_few_rows_among_many_experts_equal_the_cpu)
{
    enum { MANY = 600, SLOTS = 7, N = 128 };
    static const int of_slot[SLOTS] = {0, 254, 255, 256, 256, 511, 599};
    x3_pair p = x3_pair_open();
    x3_weight *cpu = calloc(MANY, sizeof *cpu), *gpu = calloc(MANY, sizeof *gpu);
    x3_twin x = x3_twin_random(&p, "x", SLOTS * N), y = x3_twin_random(&p, "y", SLOTS * N);
    twin_ints first = make_ints(&p, MANY + 1);
    x3_twin_weight w[8];
    x3_err err = {0};

    for (int K = 1; K <= 8; K++)
        w[K - 1] = x3_twin_exl3(&p, K, X3_CB_MUL1, N, N);
    for (int e = 0; e < MANY; e++) {
        cpu[e] = w[e * 5 % 8].cpu;
        gpu[e] = w[e * 5 % 8].gpu;
        for (int s = 0; s < SLOTS; s++)
            first.cpu[e + 1] += of_slot[s] <= e;
    }
    upload_ints(&p, &first);
    BOTH(p, &err, dev->ops->expert_linear(dev,
                                          &(x3_expert_args){.weights = on_gpu ? gpu : cpu, .n_experts = MANY, .stride = 1,
                                                            .d_first = OF(first), .n_slots = SLOTS, .d_x = OF(x), .ldx = N,
                                                            .d_y = OF(y), .ldy = N},
                                          &err));
    const double e = x3_twin_error(&p, &y);
    CHECK_MSG(e < 3e-6, "relative error %.3g", e);
    for (int K = 1; K <= 8; K++)
        x3_twin_weight_free(&p, &w[K - 1]);
    free_ints(&p, &first);
    x3_twin_free(&p, &x);
    x3_twin_free(&p, &y);
    free(cpu);
    free(gpu);
    x3_pair_close(&p);
}

X3_TEST(cuda_experts_keep_rows_that_are_not_finite_to_themselves)
{
    x3_pair p = x3_pair_open();
    x3_err err = {0};

    for (size_t k = 0; k < 2; k++) {
        struct expert_case c = make_experts(&p, kinds[k], 256, 128, 100);
        x3_twin x = x3_twin_random(&p, "x", c.n_slots * 256), y = x3_twin_random(&p, "y", c.n_slots * 128);
        x.cpu[3 * 256 + 9] = INFINITY;
        x.cpu[30 * 256] = NAN;
        x3_twin_upload(&p, &x);
        CHECK_OK(p.gpu->ops->expert_linear(p.gpu,
                                           &(x3_expert_args){.weights = c.gpu, .n_experts = EXPERTS, .stride = 2,
                                                             .d_first = c.first.gpu, .n_slots = c.n_slots, .d_x = x.gpu, .ldx = 256,
                                                             .d_y = y.gpu, .ldy = 128},
                                           &err), &err);
        float *got = x3_twin_download(&p, &y);
        for (size_t i = 0; i < c.n_slots * 128; i++)
            CHECK(isfinite(got[i]) != (i / 128 == 3 || i / 128 == 30));
        free(got);
        x3_twin_free(&p, &x);
        x3_twin_free(&p, &y);
        free_experts(&p, &c);
    }
    x3_pair_close(&p);
}

X3_TEST(cuda_experts_of_other_shapes_are_refused)
{
    x3_pair p = x3_pair_open();
    struct expert_case c = make_experts(&p, kinds[0], 64, 32, 50);
    x3_twin x = x3_twin_random(&p, "x", c.n_slots * 64);
    x3_expert_args a = {.weights = c.gpu, .n_experts = EXPERTS, .stride = 2, .d_first = c.first.gpu, .n_slots = c.n_slots,
                        .d_x = x.gpu, .ldx = 64, .d_y = x.gpu, .ldy = 32};
    x3_err err = {0};

    c.gpu[6].n_out = 33;
    CHECK_FAILS(p.gpu->ops->expert_linear(p.gpu, &a, &err), &err, "33 x 64");
    x3_twin_free(&p, &x);
    free_experts(&p, &c);
    x3_pair_close(&p);
}

/* ---- a linear a head ---- */

X3_TEST(cuda_linears_of_heads_equal_the_cpu_to_float32_rounding)
{
    static const x3_weight_kind types[] = {X3_WEIGHT_BF16, X3_WEIGHT_F16, X3_WEIGHT_F32};
    static const size_t shapes[][5] = {{4, 128, 64, 64, 100}, {3, 40, 24, 20, 65}, {16, 512, 128, 128, 3}, {2, 77, 13, 30, 1}};
    x3_pair p = x3_pair_open();
    x3_err err = {0};
    double most = 0;

    for (int type = 0; type < 3; type++)
        for (int s = 0; s < 4; s++)
            for (int transposed = 0; transposed < 2; transposed++) {
                const size_t heads = shapes[s][0], n_in = shapes[s][1], n = shapes[s][2], stride = n + shapes[s][3], rows = shapes[s][4];
                const size_t from = transposed ? n : n_in, to = transposed ? n_in : n;
                x3_twin_weight w = x3_twin_dense(&p, types[type], heads * stride, n_in);
                x3_twin x = x3_twin_random(&p, "x", rows * (heads * (from + 4) + 4));
                x3_twin y = x3_twin_random(&p, "y", rows * (heads * (to + 3) + 1));
                BOTH(p, &err, dev->ops->linear_heads(dev,
                                                     &(x3_heads_args){.w = on_gpu ? &w.gpu : &w.cpu, .n_heads = heads,
                                                                      .first = transposed ? 0 : shapes[s][3], .stride = stride, .n = n,
                                                                      .transposed = transposed, .d_x = OF(x),
                                                                      .ldx = heads * (from + 4) + 4, .x_stride = from + 4,
                                                                      .n_rows = rows, .d_y = OF(y), .ldy = heads * (to + 3) + 1,
                                                                      .y_stride = to + 3},
                                                     &err));
                const double e = x3_twin_error(&p, &y);
                most = fmax(most, e);
                CHECK_MSG(e < 2e-6, "type %d, %zu heads of %zu x %zu, transposed %d: relative error %.3g", type, heads, n, n_in,
                          transposed, e);
                x3_twin_free(&p, &x);
                x3_twin_free(&p, &y);
                x3_twin_weight_free(&p, &w);
            }
    printf("    relative error at most %.2g\n", most);
    x3_pair_close(&p);
}
