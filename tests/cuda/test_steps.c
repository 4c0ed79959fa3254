/* What serving needs of the CUDA device: packed caches, linears of any number of rows with the same bits, recorded steps. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/serve/resident.h"
#include "tests/cuda/device_pair.h"
#include "tests/test.h"

/* ---- packed caches ---- */

struct packed_case {
    size_t n_heads, n_kv_heads, k_dim, v_dim, window;
    bool sinks;
};

enum { POSITIONS = 700, PAGES = (POSITIONS + 63) / 64, MANY = 140 };

static x3_kv_layer open_cache(x3_device *dev, const struct packed_case *c, x3_kv_type type)
{
    const x3_layer_desc desc = {.mixer = X3_MIXER_GQA, .gqa = {.n_kv_heads = c->n_kv_heads, .head_dim = c->k_dim, .v_dim = c->v_dim}};
    x3_kv_layer kv;
    x3_err err = {0};

    CHECK_OK(x3_kv_layer_create(&kv, dev, &desc, PAGES, 0, type, &err), &err);
    CHECK(kv.type == type);
    return kv;
}

static void check_block_bytes(const x3_pair *p, const void *cpu, const void *gpu, size_t n_bytes, const char *what)
{
    char *copy = malloc(n_bytes);
    x3_err err = {0};

    CHECK_OK(p->gpu->ops->download(p->gpu, copy, gpu, n_bytes, &err), &err);
    CHECK_MSG(memcmp(copy, cpu, n_bytes) == 0, "packed %s differ", what);
    free(copy);
}

/* Rows of one-row sequences at every `step`-th position from `first`: their bits must be those of the whole pass. */
static void check_rows(const x3_pair *p, const struct packed_case *c, const x3_attention_args *args, const x3_kv_layer *kv,
                       const int32_t *pages, const float *whole, const float *q, size_t first, size_t step, size_t n)
{
    const size_t nq = c->n_heads * c->k_dim, no = c->n_heads * c->v_dim;
    x3_sequence *s = calloc(n, sizeof *s);
    float *rows = malloc(n * nq * sizeof *rows), *out = malloc(n * no * sizeof *out);
    x3_attention_args a = *args;
    void *d_out;
    x3_err err = {0};

    for (size_t i = 0; i < n; i++) {
        s[i] = (x3_sequence){.first_row = i, .n_rows = 1, .position = first + i * step, .pages = pages};
        memcpy(rows + i * nq, q + (first + i * step) * nq, nq * sizeof *q);
    }
    a.kv = kv;
    a.d_q = x3_pair_upload(p, rows, n * nq * sizeof *rows);
    CHECK_OK(x3_device_alloc(p->gpu, &d_out, n * no * sizeof *out, &err), &err);
    a.d_out = d_out;
    CHECK_OK(p->gpu->ops->attention(p->gpu, &a, &(x3_batch){.n_rows = n, .n_sequences = n, .sequences = s}, &err), &err);
    CHECK_OK(p->gpu->ops->download(p->gpu, out, d_out, n * no * sizeof *out, &err), &err);
    for (size_t i = 0; i < n; i++)
        CHECK_MSG(memcmp(out + i * no, whole + (first + i * step) * no, no * sizeof *out) == 0,
                  "%zu heads over %zu of %zu and %zu, window %zu: position %zu of %zu rows differs from the whole pass", c->n_heads,
                  c->n_kv_heads, c->k_dim, c->v_dim, c->window, first + i * step, n);
    x3_device_free(p->gpu, (void *)(uintptr_t)a.d_q);
    x3_device_free(p->gpu, d_out);
    free(s);
    free(rows);
    free(out);
}

static void check_packed(const x3_pair *p, const struct packed_case *c, x3_kv_type type)
{
    const size_t kd = c->n_kv_heads * c->k_dim, vd = c->n_kv_heads * c->v_dim;
    x3_twin k = x3_twin_random(p, "k", POSITIONS * kd), v = x3_twin_random(p, "v", POSITIONS * vd), sinks = x3_twin_random(p, "s", c->n_heads);
    x3_twin q = x3_twin_random(p, "q", POSITIONS * c->n_heads * c->k_dim), out = x3_twin_random(p, "o", POSITIONS * c->n_heads * c->v_dim);
    x3_kv_layer cpu = open_cache(p->cpu, c, type), gpu = open_cache(p->gpu, c, type);
    int32_t pages[PAGES];
    const x3_sequence s = {.n_rows = POSITIONS, .pages = pages};
    const x3_batch batch = {.n_rows = POSITIONS, .n_sequences = 1, .sequences = &s};
    const x3_attention_args args = {.n_heads = c->n_heads, .scale = 1.2f / sqrtf((float)c->k_dim), .window = c->window,
                                    .d_sinks = c->sinks ? sinks.gpu : NULL};
    x3_err err = {0};

    for (int i = 0; i < PAGES; i++)
        pages[i] = (i * 5 + 3) % PAGES;
    BOTH(*p, &err, dev->ops->kv_append(dev, on_gpu ? &gpu : &cpu, &batch, OF(k), kd, OF(v), vd, &err));
    check_block_bytes(p, cpu.d_packed_keys, gpu.d_packed_keys, PAGES * c->n_kv_heads * x3_kv_block_bytes(type, c->k_dim), "keys");
    check_block_bytes(p, cpu.d_packed_values, gpu.d_packed_values, PAGES * c->n_kv_heads * x3_kv_block_bytes(type, c->v_dim), "values");
    BOTH(*p, &err, dev->ops->attention(dev,
                                       &(x3_attention_args){.d_q = OF(q), .d_out = OF(out), .n_heads = c->n_heads, .kv = on_gpu ? &gpu : &cpu,
                                                            .scale = args.scale, .window = c->window, .d_sinks = c->sinks ? OF(sinks) : NULL},
                                       &batch, &err));
    const double e = x3_twin_error(p, &out);
    CHECK_MSG(e < 4e-5, "type %d, %zu heads over %zu of %zu and %zu, window %zu, sinks %d: relative error %.3g", (int)type, c->n_heads,
              c->n_kv_heads, c->k_dim, c->v_dim, c->window, c->sinks, e);
    float *whole = x3_twin_download(p, &out);
    for (size_t at = 0; at < POSITIONS; at += 63)
        check_rows(p, c, &args, &gpu, pages, whole, q.cpu, at, 0, 1);
    check_rows(p, c, &args, &gpu, pages, whole, q.cpu, 3, 5, MANY - 1);
    check_rows(p, c, &args, &gpu, pages, whole, q.cpu, 699, 0, 1);
    free(whole);
    x3_kv_layer_free(&cpu, p->cpu);
    x3_kv_layer_free(&gpu, p->gpu);
    x3_twin *all[] = {&k, &v, &q, &out, &sinks};
    for (int i = 0; i < 5; i++)
        x3_twin_free(p, all[i]);
}

X3_TEST(cuda_attention_over_packed_caches_equals_the_cpu_and_itself_row_by_row)
{
    static const struct packed_case cases[] = {
        {4, 4, 64, 64, 0, false}, {8, 2, 128, 128, 0, true}, {6, 2, 96, 96, 50, false}, {20, 1, 192, 128, 130, true},
        {4, 2, 256, 256, 0, false}, {2, 1, 32, 192, 0, false},
    };
    x3_pair p = x3_pair_open();

    for (size_t i = 0; i < (x3_test_is_quick() ? 1 : sizeof cases / sizeof cases[0]); i++)
        for (x3_kv_type t = X3_KV_BF16; t <= X3_KV_INT4; t++)
            check_packed(&p, &cases[i], t);
    x3_pair_close(&p);
}

/* ---- operations in one launch ---- */

static float *read_floats(const x3_pair *p, const void *d, size_t n)
{
    float *out = malloc(n * sizeof *out);
    x3_err err = {0};

    CHECK_OK(p->gpu->ops->download(p->gpu, out, d, n * sizeof *out, &err), &err);
    return out;
}

static void check_same(const x3_pair *p, const void *d_a, const void *d_b, size_t n, const char *what)
{
    float *a = read_floats(p, d_a, n), *b = read_floats(p, d_b, n);

    CHECK_MSG(memcmp(a, b, n * sizeof *a) == 0, "%s: other bits in one launch", what);
    free(a);
    free(b);
}

/* Heads of queries and keys rotated, keys and values appended: one call against three. */
static void check_rope_append(const x3_pair *p, x3_kv_type type, size_t n_rotated, bool interleaved)
{
    enum { ROWS = 70, HEADS = 6, KV_HEADS = 2, DIM = 96, V_DIM = 64, PAGE_COUNT = 2 };
    const struct packed_case c = {HEADS, KV_HEADS, DIM, V_DIM, 0, false};
    x3_twin q[2], k[2], v = x3_twin_random(p, "v", ROWS * KV_HEADS * V_DIM), table = x3_twin_random(p, "table", PAGE_COUNT * 64 * n_rotated);
    x3_kv_layer kv[2];
    int32_t positions[ROWS], pages[PAGE_COUNT] = {1, 0};
    const x3_sequence s = {.n_rows = 60, .position = 9, .pages = pages}; /* the last rows are of none */
    x3_err err = {0};

    for (int i = 0; i < ROWS; i++)
        positions[i] = i < 60 ? i + 9 : 0;
    const x3_batch batch = {.n_rows = ROWS, .n_sequences = 1, .sequences = &s, .d_positions = x3_pair_upload(p, positions, sizeof positions)};
    for (int i = 0; i < 2; i++) {
        q[i] = x3_twin_random(p, "q", ROWS * HEADS * DIM);
        k[i] = x3_twin_random(p, "k", ROWS * KV_HEADS * DIM);
        kv[i] = (x3_kv_layer){0};
        const x3_layer_desc desc = {.mixer = X3_MIXER_GQA, .gqa = {.n_kv_heads = c.n_kv_heads, .head_dim = c.k_dim, .v_dim = c.v_dim}};
        CHECK_OK(x3_kv_layer_create(&kv[i], p->gpu, &desc, PAGE_COUNT, 0, type, &err), &err);
        const x3_rope_args q_rope = {.d_x = q[i].gpu, .ld = HEADS * DIM, .head_stride = DIM, .n_heads = HEADS, .n_rotated = n_rotated,
                                     .interleaved = interleaved, .d_cos_sin = table.gpu};
        x3_rope_args k_rope = q_rope;
        k_rope.d_x = k[i].gpu, k_rope.ld = KV_HEADS * DIM, k_rope.n_heads = KV_HEADS;
        if (i == 1) {
            CHECK_OK(p->gpu->ops->rope_append(p->gpu, &q_rope, &k_rope, &kv[i], &batch, v.gpu, KV_HEADS * V_DIM, &err), &err);
        } else {
            CHECK_OK(p->gpu->ops->rope(p->gpu, &q_rope, &batch, &err), &err);
            CHECK_OK(p->gpu->ops->rope(p->gpu, &k_rope, &batch, &err), &err);
            CHECK_OK(p->gpu->ops->kv_append(p->gpu, &kv[i], &batch, k[i].gpu, KV_HEADS * DIM, v.gpu, KV_HEADS * V_DIM, &err), &err);
        }
    }
    const bool packed = type != X3_KV_F32;
    check_same(p, q[0].gpu, q[1].gpu, q[0].n, "queries");
    check_same(p, k[0].gpu, k[1].gpu, k[0].n, "keys");
    check_same(p, packed ? kv[0].d_packed_keys : kv[0].d_keys, packed ? kv[1].d_packed_keys : kv[1].d_keys,
               PAGE_COUNT * KV_HEADS * (packed ? x3_kv_block_bytes(type, DIM) / 4 : 64 * DIM), "cached keys");
    check_same(p, packed ? kv[0].d_packed_values : kv[0].d_values, packed ? kv[1].d_packed_values : kv[1].d_values,
               PAGE_COUNT * KV_HEADS * (packed ? x3_kv_block_bytes(type, V_DIM) / 4 : 64 * V_DIM), "cached values");
    for (int i = 0; i < 2; i++) {
        x3_kv_layer_free(&kv[i], p->gpu);
        x3_twin_free(p, &q[i]);
        x3_twin_free(p, &k[i]);
    }
    x3_twin_free(p, &v);
    x3_twin_free(p, &table);
    x3_device_free(p->gpu, (void *)(uintptr_t)batch.d_positions);
}

X3_TEST(cuda_rope_and_append_in_one_launch_give_the_bits_of_three)
{
    x3_pair p = x3_pair_open();

    for (x3_kv_type t = X3_KV_F32; t <= X3_KV_INT4; t++) {
        check_rope_append(&p, t, 96, false);
        check_rope_append(&p, t, 40, true);
    }
    x3_pair_close(&p);
}

/* silu(gate) * up as the input of a linear, against the two operations, for every way a linear takes its rows. */
X3_TEST(cuda_gated_linear_gives_the_bits_of_two_operations)
{
    enum { N_IN = 500, N_OUT = 300, ROWS = 200 };
    static const size_t counts[] = {1, 4, 5, 40, ROWS};
    x3_pair p = x3_pair_open();
    x3_err err = {0};

    for (int invariant = 0; invariant < 2; invariant++)
        for (int kind = 0; kind < 2; kind++) {
            x3_twin_weight w = kind == 0 ? x3_twin_exl3(&p, 3, X3_CB_MUL1, N_OUT, N_IN) : x3_twin_dense(&p, X3_WEIGHT_BF16, N_OUT, N_IN);
            p.gpu->row_invariant = invariant == 1;
            for (size_t i = 0; i < sizeof counts / sizeof counts[0]; i++) {
                const size_t n = counts[i];
                x3_twin gate = x3_twin_random(&p, "gate", n * N_IN), same = x3_twin_random(&p, "gate", n * N_IN);
                x3_twin up = x3_twin_random(&p, "up", n * N_IN), a = x3_twin_random(&p, "a", n * N_OUT), b = x3_twin_random(&p, "b", n * N_OUT);
                CHECK_OK(p.gpu->ops->linear_gated(p.gpu, &w.gpu, gate.gpu, up.gpu, n, a.gpu, &err), &err);
                CHECK_OK(p.gpu->ops->silu_mul(p.gpu, same.gpu, up.gpu, n * N_IN, same.gpu, &err), &err);
                CHECK_OK(p.gpu->ops->linear(p.gpu, &w.gpu, same.gpu, N_IN, n, b.gpu, N_OUT, &err), &err);
                check_same(&p, a.gpu, b.gpu, n * N_OUT, "gated linear");
                x3_twin *all[] = {&gate, &same, &up, &a, &b};
                for (int t = 0; t < 5; t++)
                    x3_twin_free(&p, all[t]);
            }
            x3_twin_weight_free(&p, &w);
        }
    p.gpu->row_invariant = false;
    x3_pair_close(&p);
}

/* ---- linears of many rows ---- */

static void check_linear_rows(const x3_pair *p, int K, x3_codebook codebook, size_t n_out, size_t n_in, size_t n_rows)
{
    x3_twin_weight w = x3_twin_exl3(p, K, codebook, n_out, n_in);
    x3_twin x = x3_twin_random(p, "x", n_rows * n_in);
    float *whole, *parts;
    void *d_y;
    x3_err err = {0};

    p->gpu->row_invariant = true;
    CHECK_OK(x3_device_alloc(p->gpu, &d_y, n_rows * n_out * sizeof *whole, &err), &err);
    CHECK_OK(x3_alloc(&whole, n_rows * n_out, sizeof *whole, &err), &err);
    CHECK_OK(x3_alloc(&parts, n_rows * n_out, sizeof *parts, &err), &err);
    CHECK_OK(p->gpu->ops->linear(p->gpu, &w.gpu, x.gpu, n_in, n_rows, d_y, n_out, &err), &err);
    CHECK_OK(p->gpu->ops->download(p->gpu, whole, d_y, n_rows * n_out * sizeof *whole, &err), &err);
    CHECK_OK(p->gpu->ops->zero(p->gpu, d_y, n_rows * n_out * sizeof *whole, &err), &err);
    for (size_t at = 0, n = 1; at < n_rows; at += n, n = n * 3 % 101 + 1) {
        n = x3_min_size(n, n_rows - at);
        CHECK_OK(p->gpu->ops->linear(p->gpu, &w.gpu, x.gpu + at * n_in, n_in, n, (float *)d_y + at * n_out, n_out, &err), &err);
    }
    CHECK_OK(p->gpu->ops->download(p->gpu, parts, d_y, n_rows * n_out * sizeof *whole, &err), &err);
    size_t n_different = 0;
    for (size_t i = 0; i < n_rows * n_out; i++)
        n_different += whole[i] != parts[i];
    CHECK_MSG(n_different == 0, "K = %d, %zu x %zu, %zu rows: %zu of %zu numbers differ from those of few rows", K, n_out, n_in, n_rows,
              n_different, n_rows * n_out);
    p->gpu->row_invariant = false;
    x3_device_free(p->gpu, d_y);
    free(whole);
    free(parts);
    x3_twin_free(p, &x);
    x3_twin_weight_free(p, &w);
}

X3_TEST(cuda_linear_of_many_rows_has_the_bits_of_few)
{
    x3_pair p = x3_pair_open();

    for (int K = 1; K <= 8; K++)
        check_linear_rows(&p, K, (x3_codebook)(K % 3), 300 + (size_t)K * 128, x3_test_is_quick() ? 256 : 2048, 300);
    if (x3_test_is_quick()) {
        x3_pair_close(&p);
        return;
    }
    check_linear_rows(&p, 3, X3_CB_MUL1, 4096, 4096, 200);
    check_linear_rows(&p, 3, X3_CB_MUL1, 1000, 4000, 515);
    check_linear_rows(&p, 2, X3_CB_MCG, 128, 128, 129);
    check_linear_rows(&p, 4, X3_CB_3INST, 14336, 1024, 140);
    x3_pair_close(&p);
}

/* ---- the largest of a row ---- */

X3_TEST(cuda_largest_of_a_row_is_the_first_of_equal_ones_and_none_with_a_nan)
{
    enum { ROWS = 8, N = 5003 };
    x3_pair p = x3_pair_open();
    x3_twin x = x3_twin_random(&p, "argmax", ROWS * N);
    int32_t expected[ROWS], got[ROWS];
    void *d_ids;
    x3_err err = {0};

    for (size_t i = 0; i < N; i++)
        x.cpu[1 * N + i] = -3, x.cpu[2 * N + i] = -INFINITY, x.cpu[3 * N + i] = i == N - 1 ? -1e30f : -INFINITY;
    x.cpu[4 * N + 4097] = x.cpu[4 * N + 77] = x.cpu[4 * N + 4999] = 100; /* equal ones */
    x.cpu[5 * N + 5001] = NAN;
    x.cpu[6 * N] = INFINITY;
    x.cpu[7 * N + N - 1] = 100;
    for (size_t r = 0; r < ROWS; r++) {
        expected[r] = 0;
        for (size_t i = 1; i < N; i++)
            if (x.cpu[r * N + i] > x.cpu[r * N + (size_t)expected[r]])
                expected[r] = (int32_t)i;
    }
    expected[2] = expected[5] = expected[6] = -1;
    x3_twin_upload(&p, &x);
    CHECK_OK(x3_device_alloc(p.gpu, &d_ids, sizeof got, &err), &err);
    CHECK_OK(p.gpu->ops->argmax(p.gpu, x.gpu, ROWS, N, d_ids, &err), &err);
    CHECK_OK(p.gpu->ops->download(p.gpu, got, d_ids, sizeof got, &err), &err);
    for (size_t r = 0; r < ROWS; r++)
        CHECK_MSG(got[r] == expected[r], "row %zu: %d, expected %d", r, got[r], expected[r]);
    x3_device_free(p.gpu, d_ids);
    x3_twin_free(&p, &x);
    x3_pair_close(&p);
}

/* ---- recorded steps ---- */

#define MODEL "tests/data/models/tiny-qwen3"
#define SEQUENCES 5
#define STEPS 40

static x3_resident *open_resident(x3_device *dev, const x3_checkpoint *c, x3_kv_type type)
{
    const x3_resident_options o = {.max_positions = 256, .max_rows = 300, .max_outputs = SEQUENCES, .n_pages = 4 * SEQUENCES,
                                   .n_slots = SEQUENCES, .kv_type = type};
    x3_resident *r;
    x3_err err = {0};

    CHECK_OK(x3_resident_create(&r, dev, c, &o, &err), &err);
    return r;
}

/* Greedy tokens of sequences [first, first + n) together: prompts in one step, then one row each. */
static void run_sequences(x3_resident *r, size_t first, size_t n, int32_t out[SEQUENCES][STEPS], float *last)
{
    const size_t vocab = r->c->model->vocab;
    float *logits = malloc(SEQUENCES * vocab * sizeof *logits);
    int32_t pages[SEQUENCES][4], ids[300];
    x3_sequence s[SEQUENCES];
    size_t outputs[SEQUENCES], n_rows = 0;
    int32_t device_best[SEQUENCES];
    x3_err err = {0};

    for (size_t i = 0; i < n; i++) {
        const size_t number = first + i, n_prompt = 5 + 13 * number;
        for (size_t j = 0; j < 4; j++)
            pages[i][j] = (int32_t)(j * SEQUENCES + i);
        s[i] = (x3_sequence){.first_row = n_rows, .n_rows = n_prompt, .pages = pages[i], .slot = i};
        for (size_t j = 0; j < n_prompt; j++)
            ids[n_rows++] = (int32_t)(300 + (number * 131 + j * j * 7) % 3000);
        outputs[i] = n_rows - 1;
    }
    for (size_t step = 0; step < STEPS; step++) {
        CHECK_OK(x3_resident_step(r, s, n, ids, n_rows, outputs, n, step % 2 == 0 ? logits : NULL, &err), &err);
        if (step % 2 != 0)
            CHECK_OK(x3_resident_logits(r, n, logits, &err), &err);
        if (r->dev->ops->argmax != NULL)
            CHECK_OK(x3_resident_best(r, n, device_best, &err), &err);
        for (size_t i = 0; i < n; i++) {
            int32_t best = 0;
            for (size_t t = 1; t < vocab; t++)
                if (logits[i * vocab + t] > logits[i * vocab + (size_t)best])
                    best = (int32_t)t;
            CHECK(r->dev->ops->argmax == NULL || device_best[i] == best);
            out[first + i][step] = ids[i] = best;
            s[i] = (x3_sequence){.first_row = i, .n_rows = 1, .position = s[i].position + s[i].n_rows, .pages = pages[i], .slot = i};
            outputs[i] = i;
        }
        n_rows = n;
    }
    memcpy(last, logits, n * vocab * sizeof *logits);
    free(logits);
}

X3_TEST(cuda_steps_recorded_and_batched_give_the_tokens_and_logits_of_a_sequence_alone)
{
    static int32_t together[SEQUENCES][STEPS], alone[SEQUENCES][STEPS];
    x3_pair p = x3_pair_open();
    x3_findings findings = {0};
    x3_checkpoint *c;
    x3_err err = {0};

    CHECK_OK(x3_checkpoint_open(&c, MODEL, NULL, &findings, &err), &err);
    const size_t vocab = c->model->vocab;
    float *a = malloc(SEQUENCES * vocab * sizeof *a), *b = malloc(vocab * sizeof *b);
    for (x3_kv_type t = X3_KV_F32; t <= X3_KV_INT4; t++) {
        x3_resident *r = open_resident(p.gpu, c, t);
        CHECK(r->recorded_rows > 0);
        run_sequences(r, 0, SEQUENCES, together, a);
        CHECK(r->n_recorded == 1 && r->recorded[0].recording != NULL);
        for (size_t i = 0; i < SEQUENCES; i++) {
            run_sequences(r, i, 1, alone, b);
            CHECK_MSG(memcmp(together[i], alone[i], sizeof alone[i]) == 0, "cache %d: sequence %zu alone has other tokens", (int)t, i);
            CHECK_MSG(memcmp(a + i * vocab, b, vocab * sizeof *b) == 0, "cache %d: sequence %zu alone has other logits", (int)t, i);
        }
        x3_resident_free(r);
        if (t == X3_KV_F32) { /* and those of the CPU, as far as logits are apart */
            float *on_cpu = malloc(SEQUENCES * vocab * sizeof *on_cpu);
            r = open_resident(p.cpu, c, t);
            run_sequences(r, 0, SEQUENCES, alone, on_cpu);
            CHECK(memcmp(together, alone, sizeof alone) == 0);
            for (size_t i = 0; i < SEQUENCES * vocab; i++)
                CHECK_MSG(fabsf(a[i] - on_cpu[i]) < 1e-3f, "logit %zu: %g, on the CPU %g", i, (double)a[i], (double)on_cpu[i]);
            x3_resident_free(r);
            free(on_cpu);
        }
    }
    free(a);
    free(b);
    x3_checkpoint_close(c);
    x3_findings_free(&findings);
    x3_pair_close(&p);
}
