/* Steps of a server that are recorded once and repeated (CUDA graphs): the bits of steps done operation by operation, for
 * every kind of layer that is recorded. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/serve/resident.h"
#include "tests/cuda/device_pair.h"
#include "tests/family_check.h"
#include "tests/test.h"

/* ---- operations of a mixture of experts ---- */

#define EXPERTS 7
#define CHOSEN 3
#define INNER 96

/* Device memory of one pass, on the GPU. */
struct chain {
    const x3_weight *up, *down; /* [EXPERTS] */
    size_t n_rows, n_in;
    float *d_logits, *d_x, *d_weights, *d_inner, *d_y, *d_out;
    int32_t *d_ids, *d_first, *d_rows, *d_slots;
};

static x3_status run_chain(x3_device *dev, const struct chain *c, x3_err *err)
{
    const x3_route_rule rule = {.n_experts = EXPERTS, .n_chosen = CHOSEN, .scores = X3_ROUTE_SIGMOID, .normalize = true, .scale = 1.5f,
                                .n_groups = 1, .n_chosen_groups = 1};
    const size_t n_slots = c->n_rows * CHOSEN;
    const x3_expert_args up = {.weights = c->up, .n_experts = EXPERTS, .stride = 1, .d_first = c->d_first, .d_rows = c->d_rows,
                               .n_slots = n_slots, .d_x = c->d_x, .ldx = c->n_in, .d_y = c->d_inner, .ldy = INNER};
    const x3_expert_args down = {.weights = c->down, .n_experts = EXPERTS, .stride = 1, .d_first = c->d_first, .n_slots = n_slots,
                                 .d_x = c->d_inner, .ldx = INNER, .d_y = c->d_y, .ldy = c->n_in};
    x3_status rc;

    X3_TRY(rc, out, dev->ops->route(dev, &rule, c->d_logits, NULL, c->n_rows, c->d_ids, c->d_weights, err));
    X3_TRY(rc, out, dev->ops->group_rows(dev, c->d_ids, c->n_rows, CHOSEN, EXPERTS, c->d_first, c->d_rows, c->d_slots, err));
    X3_TRY(rc, out, dev->ops->expert_linear(dev, &up, err));
    X3_TRY(rc, out, dev->ops->expert_linear(dev, &down, err));
    rc = dev->ops->combine_rows(dev, c->d_y, c->d_slots, c->d_weights, c->n_rows, CHOSEN, c->n_in, false, c->d_out, err);
out:
    return rc;
}

/* Numbers that differ from round to round: other rows, other experts. Every third round all rows want the same ones. */
static void place_inputs(const x3_pair *p, const struct chain *c, int round)
{
    const size_t n_x = c->n_rows * c->n_in, n_logits = c->n_rows * EXPERTS;
    float *x = malloc((n_x + n_logits) * sizeof *x);
    x3_rng rng;
    x3_err err = {0};

    x3_rng_init(&rng, (uint64_t)round, "round");
    for (size_t i = 0; i < n_x + n_logits; i++)
        x[i] = (float)x3_rng_normal(&rng);
    for (size_t i = 0; round % 3 == 2 && i < n_logits; i++)
        x[n_x + i] = (float)((i % EXPERTS + (size_t)round) % EXPERTS);
    CHECK_OK(p->gpu->ops->upload(p->gpu, c->d_x, x, n_x * sizeof *x, &err), &err);
    CHECK_OK(p->gpu->ops->upload(p->gpu, c->d_logits, x + n_x, n_logits * sizeof *x, &err), &err);
    CHECK_OK(p->gpu->ops->zero(p->gpu, c->d_out, n_x * sizeof *x, &err), &err);
    CHECK_OK(p->gpu->ops->sync(p->gpu, &err), &err);
    free(x);
}

static struct chain open_chain(const x3_pair *p, const x3_weight *up, const x3_weight *down, size_t n_rows, size_t n_in)
{
    const size_t n_slots = n_rows * CHOSEN;
    struct chain c = {.up = up, .down = down, .n_rows = n_rows, .n_in = n_in};
    x3_err err = {0};

    CHECK_OK(x3_device_floats(p->gpu, &c.d_logits, n_rows * EXPERTS, &err), &err);
    CHECK_OK(x3_device_floats(p->gpu, &c.d_x, n_rows * n_in, &err), &err);
    CHECK_OK(x3_device_floats(p->gpu, &c.d_weights, n_slots, &err), &err);
    CHECK_OK(x3_device_floats(p->gpu, &c.d_inner, n_slots * INNER, &err), &err);
    CHECK_OK(x3_device_floats(p->gpu, &c.d_y, n_slots * n_in, &err), &err);
    CHECK_OK(x3_device_floats(p->gpu, &c.d_out, n_rows * n_in, &err), &err);
    CHECK_OK(x3_device_alloc(p->gpu, &c.d_ids, n_slots * sizeof(int32_t), &err), &err);
    CHECK_OK(x3_device_alloc(p->gpu, &c.d_first, (EXPERTS + 1) * sizeof(int32_t), &err), &err);
    CHECK_OK(x3_device_alloc(p->gpu, &c.d_rows, n_slots * sizeof(int32_t), &err), &err);
    CHECK_OK(x3_device_alloc(p->gpu, &c.d_slots, n_slots * sizeof(int32_t), &err), &err);
    return c;
}

static void close_chain(const x3_pair *p, struct chain *c)
{
    void *const all[] = {c->d_logits, c->d_x, c->d_weights, c->d_inner, c->d_y, c->d_out, c->d_ids, c->d_first, c->d_rows, c->d_slots};

    for (size_t i = 0; i < sizeof all / sizeof all[0]; i++)
        x3_device_free(p->gpu, all[i]);
}

static float *output_of(const x3_pair *p, const struct chain *c)
{
    const size_t n = c->n_rows * c->n_in;
    float *out = malloc(n * sizeof *out);
    x3_err err = {0};

    CHECK_OK(p->gpu->ops->download(p->gpu, out, c->d_out, n * sizeof *out, &err), &err);
    return out;
}

/* Recorded with the inputs of round 0, repeated with those of others. */
static void check_chain(const x3_pair *p, const x3_weight *up, const x3_weight *down, size_t n_rows, size_t n_in, const char *what)
{
    const x3_device_ops *ops = p->gpu->ops;
    struct chain c = open_chain(p, up, down, n_rows, n_in);
    x3_recording *recording = NULL;
    x3_err err = {0};
    size_t n_other = 0;
    float *first = NULL;

    place_inputs(p, &c, 0);
    CHECK_OK(run_chain(p->gpu, &c, &err), &err);
    const uint64_t generation = ops->generation(p->gpu);
    CHECK_OK(ops->record_begin(p->gpu, &err), &err);
    CHECK_OK(run_chain(p->gpu, &c, &err), &err);
    CHECK_OK(ops->record_end(p->gpu, &recording, &err), &err);
    for (int round = 0; round < 6; round++) {
        place_inputs(p, &c, round);
        CHECK_OK(run_chain(p->gpu, &c, &err), &err);
        float *direct = output_of(p, &c);
        place_inputs(p, &c, round);
        CHECK_OK(ops->repeat(p->gpu, recording, &err), &err);
        float *repeated = output_of(p, &c);
        CHECK_MSG(memcmp(direct, repeated, n_rows * n_in * sizeof *direct) == 0, "%s, %zu rows, round %d: a recording gives other bits",
                  what, n_rows, round);
        n_other += first != NULL && memcmp(first, direct, n_in * sizeof *direct) != 0;
        free(repeated);
        free(first);
        first = direct;
    }
    CHECK(n_other == 5); /* rounds do differ */
    CHECK(ops->generation(p->gpu) == generation);
    free(first);
    ops->record_free(p->gpu, recording);
    close_chain(p, &c);
}

/* kind: -1 BF16, -2 F16, -3 F32, else K. */
static x3_twin_weight make_expert(const x3_pair *p, int kind, x3_codebook codebook, size_t n_out, size_t n_in)
{
    static const x3_weight_kind dense[] = {X3_WEIGHT_NONE, X3_WEIGHT_BF16, X3_WEIGHT_F16, X3_WEIGHT_F32};

    return kind < 0 ? x3_twin_dense(p, dense[-kind], n_out, n_in) : x3_twin_exl3(p, kind, codebook, n_out, n_in);
}

X3_TEST(cuda_experts_of_mixed_kinds_recorded_and_repeated_with_other_rows_give_the_bits_of_a_direct_call)
{
    static const int kinds[][EXPERTS] = {{1, 2, 3, 4, 5, 6, 7}, {8, -1, 8, -2, 4, -3, 3}, {-1, -1, -1, -1, -1, -1, -1}};
    static const char *const names[] = {"K from 1 to 7", "mixed kinds", "BF16"};
    static const size_t rows[] = {1, 2, 9, 40, 150}; /* both forms of the kernel */
    const size_t n_in = 200;
    x3_pair p = x3_pair_open();

    for (int k = 0; k < 3; k++) {
        x3_twin_weight twins[2 * EXPERTS];
        x3_weight up[EXPERTS], down[EXPERTS];
        for (int e = 0; e < EXPERTS; e++) {
            const x3_codebook codebook = k == 0 ? X3_CB_MUL1 : (x3_codebook)(e % 3); /* one launch for more experts than slots */
            twins[2 * e] = make_expert(&p, kinds[k][e], codebook, INNER, n_in);
            twins[2 * e + 1] = make_expert(&p, kinds[k][EXPERTS - 1 - e], codebook, n_in, INNER);
            up[e] = twins[2 * e].gpu;
            down[e] = twins[2 * e + 1].gpu;
        }
        for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++)
            check_chain(&p, up, down, rows[i], n_in, names[k]);
        for (int i = 0; i < 2 * EXPERTS; i++)
            x3_twin_weight_free(&p, &twins[i]);
    }
    x3_pair_close(&p);
}

X3_TEST(cuda_experts_that_the_device_has_not_seen_are_refused_while_recording)
{
    x3_pair p = x3_pair_open();
    x3_twin_weight twins[2 * EXPERTS];
    x3_weight up[EXPERTS], down[EXPERTS];
    x3_recording *recording = NULL;
    x3_err err = {0}, end_err = {0};

    for (int e = 0; e < EXPERTS; e++) {
        twins[2 * e] = make_expert(&p, -1, X3_CB_MUL1, INNER, 64);
        twins[2 * e + 1] = make_expert(&p, -1, X3_CB_MUL1, 64, INNER);
        up[e] = twins[2 * e].gpu;
        down[e] = twins[2 * e + 1].gpu;
    }
    struct chain c = open_chain(&p, up, down, 4, 64);
    place_inputs(&p, &c, 0);
    CHECK_OK(p.gpu->ops->record_begin(p.gpu, &err), &err);
    CHECK_FAILS(run_chain(p.gpu, &c, &err), &err, "experts that were not described are being recorded");
    if (p.gpu->ops->record_end(p.gpu, &recording, &end_err) == X3_OK)
        p.gpu->ops->record_free(p.gpu, recording);
    CHECK_OK(run_chain(p.gpu, &c, &err), &err);
    close_chain(&p, &c);
    for (int i = 0; i < 2 * EXPERTS; i++)
        x3_twin_weight_free(&p, &twins[i]);
    x3_pair_close(&p);
}

/* ---- steps of whole models ---- */

#define SEQUENCES 5
#define STEPS 12
#define POSITIONS 128
#define PAGES 2 /* of a sequence */

static x3_resident *open_resident(x3_device *dev, const x3_checkpoint *c, x3_kv_type type)
{
    const x3_resident_options o = {.max_positions = POSITIONS, .max_rows = 300, .max_outputs = SEQUENCES, .n_pages = PAGES * SEQUENCES,
                                   .n_slots = SEQUENCES, .kv_type = type};
    x3_resident *r;
    x3_err err = {0};

    CHECK_OK(x3_resident_create(&r, dev, c, &o, &err), &err);
    return r;
}

/* The token of a sequence at a position: no logit decides, so that all runs see the same. */
static int32_t token_of(const x3_resident *r, size_t number, size_t position)
{
    return (int32_t)((number * 131 + position * position * 7 + position * 3) % r->c->model->vocab);
}

/* Sequences [first, first + n) together: their prompts in one step (the first has one token), then one row each. Logits of
 * every step to out [n][STEPS][vocab]. */
static void run_steps(x3_resident *r, size_t first, size_t n, float *out)
{
    const size_t vocab = r->c->model->vocab;
    float *logits = malloc(SEQUENCES * vocab * sizeof *logits);
    int32_t pages[SEQUENCES][PAGES], ids[300];
    x3_sequence s[SEQUENCES];
    size_t outputs[SEQUENCES];
    x3_err err = {0};

    for (size_t i = 0; i < n; i++) {
        for (size_t j = 0; j < PAGES; j++)
            pages[i][j] = (int32_t)(j * SEQUENCES + i);
        s[i] = (x3_sequence){.n_rows = 1 + 14 * (first + i), .pages = pages[i], .slot = i};
    }
    for (size_t step = 0; step < STEPS; step++) {
        size_t n_rows = 0;
        for (size_t i = 0; i < n; i++) {
            s[i].first_row = n_rows;
            for (size_t j = 0; j < s[i].n_rows; j++)
                ids[n_rows++] = token_of(r, first + i, s[i].position + j);
            outputs[i] = n_rows - 1;
        }
        CHECK_OK(x3_resident_step(r, s, n, ids, n_rows, outputs, n, logits, &err), &err);
        for (size_t i = 0; i < n; i++) {
            memcpy(out + (i * STEPS + step) * vocab, logits + i * vocab, vocab * sizeof *logits);
            s[i].position += s[i].n_rows;
            s[i].n_rows = 1;
        }
    }
    free(logits);
}

static size_t n_recordings(const x3_resident *r)
{
    size_t n = 0;

    for (size_t i = 0; i < r->n_recorded; i++)
        n += r->recorded[i].recording != NULL;
    return n;
}

/* First number of `each` in which two runs differ; `n` when none does. */
static size_t first_difference(const float *a, const float *b, size_t n, size_t each)
{
    size_t i = 0;

    while (i < n && memcmp(a + i * each, b + i * each, each * sizeof *a) == 0)
        i++;
    return i;
}

static void check_same(const float *a, const float *b, size_t n, size_t each, const char *what, const char *how)
{
    const size_t at = first_difference(a, b, n, each);

    CHECK_MSG(at == n, "%s, %s: other logits at step %zu of sequence %zu", what, how, at % STEPS, at / STEPS);
}

/* n sequences together, recorded, against the same done operation by operation, and against each one alone, recorded. Where
 * an indexer chooses (`sparse`) a row has other bits beside a longer one: each alone is compared with itself. */
static void check_rows(x3_resident *r, const char *what, size_t n, bool sparse)
{
    const size_t vocab = r->c->model->vocab, rows = r->recorded_rows;
    float *plain = malloc(n * STEPS * vocab * sizeof *plain), *recorded = malloc(n * STEPS * vocab * sizeof *recorded);

    r->recorded_rows = 0;
    run_steps(r, 0, n, plain);
    r->recorded_rows = rows;
    run_steps(r, 0, n, recorded);
    check_same(plain, recorded, n * STEPS, vocab, what, "together");
    for (size_t i = 0; i < n; i++) {
        float *expected = plain + i * STEPS * vocab;
        r->recorded_rows = 0;
        if (sparse)
            run_steps(r, i, 1, expected);
        r->recorded_rows = rows;
        run_steps(r, i, 1, recorded);
        check_same(expected, recorded, STEPS, vocab, what, "alone");
    }
    free(plain);
    free(recorded);
}

static void check_steps(x3_device *dev, const char *dir, x3_kv_type type)
{
    x3_checkpoint *c = x3_test_open_model(dir);
    const bool sparse = c->model->layers[0].mixer == X3_MIXER_MLA && c->model->layers[0].mla.index.topk != 0;
    x3_resident *r = open_resident(dev, c, type);

    CHECK_MSG(r->recorded_rows > 0, "%s is not recorded", dir);
    check_rows(r, dir, 2, sparse);
    check_rows(r, dir, SEQUENCES, sparse);
    if (sparse) /* steps that choose and steps that do not, of one row at least */
        CHECK_MSG(n_recordings(r) >= 3, "%s: %zu recordings", dir, n_recordings(r));
    else
        CHECK_MSG(n_recordings(r) == 3, "%s: %zu recordings of 1, 2 and %d rows", dir, n_recordings(r), SEQUENCES);
    x3_resident_free(r);
    x3_checkpoint_close(c);
}

X3_TEST(cuda_steps_of_experts_recorded_give_the_bits_of_steps_that_are_not)
{
    static const char *const types[] = {"qwen3_moe", "glm4_moe", "mixtral"};
    x3_pair p = x3_pair_open();
    char root[300], dir[400];

    snprintf(root, sizeof root, "%s", x3_test_temp_dir());
    for (size_t i = 0; i < 3; i++) {
        snprintf(dir, sizeof dir, "%s/%s", root, types[i]);
        x3_test_write_moe(dir, types[i], i == 1);
        check_steps(p.gpu, dir, X3_KV_F32);
        check_steps(p.gpu, dir, X3_KV_INT8);
    }
    check_steps(p.gpu, "tests/data/families/qwen2_moe", X3_KV_F32); /* a gate on the shared expert */
    check_steps(p.gpu, "tests/data/families/mimo_sizes", X3_KV_F32);
    x3_pair_close(&p);
}

X3_TEST(cuda_steps_of_latent_attention_and_delta_nets_recorded_give_the_bits_of_steps_that_are_not)
{
    x3_pair p = x3_pair_open();

    check_steps(p.gpu, "tests/data/families/deepseek_yarn", X3_KV_F32);
    check_steps(p.gpu, "tests/data/families/glm4_moe_lite", X3_KV_F32);
    check_steps(p.gpu, "tests/data/families/qwen3_5_nested", X3_KV_F32);
    check_steps(p.gpu, "tests/data/families/qwen3_next_mixed", X3_KV_F32);
    x3_pair_close(&p);
}

/* Indexers that choose 6 and 30 positions: steps before and after. */
X3_TEST(cuda_steps_of_indexers_recorded_give_the_bits_of_steps_that_are_not)
{
    x3_pair p = x3_pair_open();

    check_steps(p.gpu, "tests/data/families/glm_dsa_shared", X3_KV_F32);
    check_steps(p.gpu, "tests/data/families/deepseek_v32_long", X3_KV_F32);
    x3_pair_close(&p);
}

X3_TEST(cuda_a_recorded_step_of_a_delta_net_at_a_position_that_its_state_has_not_reached_is_refused)
{
    x3_pair p = x3_pair_open();
    x3_checkpoint *c = x3_test_open_model("tests/data/families/qwen3_5_nested");
    x3_resident *r = open_resident(p.gpu, c, X3_KV_F32);
    const size_t vocab = c->model->vocab, output = 0;
    float *all = malloc(STEPS * vocab * sizeof *all);
    const int32_t pages[PAGES] = {0, SEQUENCES}, id = 3;
    x3_sequence s = {.n_rows = 1, .position = STEPS + 1, .pages = pages};
    x3_err err = {0};

    run_steps(r, 0, 1, all);
    CHECK(n_recordings(r) == 1);
    CHECK_FAILS(x3_resident_step(r, &s, 1, &id, 1, &output, 1, all, &err), &err, "stands at position 12");
    s.position = STEPS;
    CHECK_OK(x3_resident_step(r, &s, 1, &id, 1, &output, 1, all, &err), &err);
    free(all);
    x3_resident_free(r);
    x3_checkpoint_close(c);
    x3_pair_close(&p);
}

X3_TEST(cuda_steps_of_a_pack_with_experts_of_every_k_recorded_give_the_bits_of_steps_that_are_not)
{
    static const char *const types[] = {"qwen3_moe", "glm4_moe"};
    x3_pair p = x3_pair_open();
    char root[300], dir[360], pack[400];

    snprintf(root, sizeof root, "%s", x3_test_temp_dir());
    for (size_t i = 0; i < 2; i++) {
        snprintf(dir, sizeof dir, "%s/%zu", root, i);
        snprintf(pack, sizeof pack, "%s/pack", dir);
        x3_test_write_mixed_pack(dir, types[i], pack);
        check_steps(p.gpu, pack, X3_KV_F32);
        check_steps(p.gpu, pack, X3_KV_BF16);
    }
    x3_pair_close(&p);
}
