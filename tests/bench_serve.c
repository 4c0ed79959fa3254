/* Speed of serving: tokens a second of 1, 8 and 32 greedy replies through the engine, time of one step by its rows, prefill,
 * and what part of the memory's bandwidth decoding uses. Checks on the way that a reply alone is the reply among others.
 *
 *     bench_serve PACK [DEVICE [KV]]        cpu, cuda, cuda:N; f32, bf16, int8, int4
 *
 * On CUDA the peer's figures stand beside ours: exllamav3 1.4.1 on one H200, models/make_bench.py at 3.0 bits
 * (../shared/golden/README.md). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/serve/engine.h"

#define TRY(expr)                              \
    do {                                       \
        if ((expr) != X3_OK) {                 \
            fprintf(stderr, "%s\n", err.text); \
            exit(1);                           \
        }                                      \
    } while (0)

#define MOST 32
#define PROMPT 128

struct bench {
    x3_device *dev;
    x3_checkpoint *c;
    x3_kv_type kv;
    double bandwidth; /* bytes a second, read and written */
    size_t weight_bytes, position_bytes;
    size_t n_reply, most_rows, prefill;
    bool peer;
};

/* ---- replies ---- */

struct reply {
    struct replies *all;
    int32_t *ids;
    size_t n;
};

struct replies {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    size_t n_first, n_ended, n_wanted;
    double all_started, ended;
    size_t n_late; /* tokens after all have begun */
    struct reply replies[MOST];
};

static bool on_token(void *arg, const x3_sampled *token)
{
    struct reply *r = arg;
    struct replies *all = r->all;

    pthread_mutex_lock(&all->mutex);
    r->ids[r->n++] = token->id;
    if (all->n_first == all->n_wanted)
        all->n_late++;
    if (r->n == 1 && ++all->n_first == all->n_wanted)
        all->all_started = x3_seconds();
    pthread_mutex_unlock(&all->mutex);
    return true;
}

static void on_end(void *arg, x3_finish finish, const x3_reply_stats *stats, const x3_err *error)
{
    struct replies *all = ((struct reply *)arg)->all;

    (void)stats;
    if (finish == X3_FINISH_ERROR) {
        fprintf(stderr, "%s\n", error->text);
        exit(1);
    }
    pthread_mutex_lock(&all->mutex);
    all->ended = x3_seconds();
    all->n_ended++;
    pthread_cond_signal(&all->changed);
    pthread_mutex_unlock(&all->mutex);
}

/* n replies at once; returns tokens a second of the time in which all of them are written. */
static double run_replies(const struct bench *b, x3_engine *e, size_t n, int32_t ids[MOST][4096])
{
    struct replies all = {.n_wanted = n};
    int32_t prompt[PROMPT];
    x3_err err = {0};
    uint64_t id;

    pthread_mutex_init(&all.mutex, NULL);
    pthread_cond_init(&all.changed, NULL);
    for (size_t i = 0; i < n; i++) {
        x3_reply_request q = {.prompt = prompt, .n_prompt = PROMPT, .max_tokens = b->n_reply, .name = "bench",
                              .on = {on_token, on_end, &all.replies[i]}};
        for (size_t j = 0; j < PROMPT; j++)
            prompt[j] = (int32_t)((i * 7919 + j * 31 + j * j * 17) % (b->c->model->vocab / 2));
        all.replies[i] = (struct reply){.all = &all, .ids = ids[i]};
        TRY(x3_sampling_defaults(&q.sampling, NULL, &err));
        q.sampling.temperature = 0;
        q.sampling.n_top = -1;
        TRY(x3_engine_submit(e, &q, &id, &err));
    }
    pthread_mutex_lock(&all.mutex);
    while (all.n_ended < n)
        pthread_cond_wait(&all.changed, &all.mutex);
    pthread_mutex_unlock(&all.mutex);
    return (double)all.n_late / (all.ended - all.all_started);
}

static void bench_replies(const struct bench *b)
{
    static int32_t ids[2][MOST][4096];
    static const struct {
        size_t n;
        double peer;
    } cases[] = {{1, 912}, {8, 4367}, {32, 5052}};
    const x3_engine_options o = {.max_sequences = MOST, .max_positions = PROMPT + b->n_reply + 64, .chunk_rows = 512, .max_queued = MOST,
                                 .kv_type = b->kv};
    x3_engine *e;
    x3_err err = {0};

    TRY(x3_engine_open(&e, b->dev, b->c, &o, &err));
    (void)run_replies(b, e, 1, ids[0]); /* warms up; the reply alone */
    (void)run_replies(b, e, 8, ids[1]);
    printf("\n| replies at once | tokens/s |%s tokens/s a reply | of the bandwidth | equal to the reply alone |\n| --- | --- |%s --- | --- | --- |\n",
           b->peer ? " the peer's | ratio |" : "", b->peer ? " --- | --- |" : "");
    for (size_t i = 0; i < 3; i++) {
        const size_t n = cases[i].n, positions = PROMPT + b->n_reply / 2;
        const double speed = run_replies(b, e, n, ids[1]);
        const double bytes = (double)b->weight_bytes + (double)(n * positions * b->position_bytes);
        printf("| %zu | %.0f |", n, speed);
        if (b->peer)
            printf(" %.0f | %.2f |", cases[i].peer, speed / cases[i].peer);
        printf(" %.0f | %.0f %% | %s |\n", speed / (double)n, 100 * speed / (double)n * bytes / b->bandwidth,
               memcmp(ids[0][0], ids[1][0], b->n_reply * sizeof(int32_t)) == 0 ? "yes" : "NO");
        fflush(stdout);
    }
    x3_engine_close(e);
}

/* ---- steps ---- */

static int by_size(const void *a, const void *b)
{
    const double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

#define TIMES 9

/* The median of several times of one step, the first two not counted: n sequences of n_rows rows from `position`. */
static double time_step(x3_resident *r, size_t n, size_t n_rows, size_t position, const int32_t *ids, float *logits)
{
    const size_t per_sequence = (position + n_rows + X3_KV_PAGE - 1) / X3_KV_PAGE;
    x3_sequence *sequences = calloc(n, sizeof *sequences);
    size_t *outputs = calloc(n, sizeof *outputs);
    int32_t *pages = calloc(n * per_sequence, sizeof *pages);
    double seconds[TIMES];
    x3_err err = {0};

    for (size_t i = 0; i < n * per_sequence; i++)
        pages[i] = (int32_t)i;
    for (size_t i = 0; i < n; i++) {
        sequences[i] = (x3_sequence){.first_row = i * n_rows, .n_rows = n_rows, .position = position, .pages = pages + i * per_sequence};
        outputs[i] = (i + 1) * n_rows - 1;
    }
    for (int i = -2; i < TIMES; i++) {
        const double start = x3_seconds();
        TRY(x3_resident_step(r, sequences, n, ids, n * n_rows, outputs, n, logits, &err));
        if (i >= 0)
            seconds[i] = x3_seconds() - start;
    }
    free(sequences);
    free(outputs);
    free(pages);
    qsort(seconds, TIMES, sizeof *seconds, by_size);
    return 1000 * seconds[TIMES / 2];
}

/* Where the time of a step goes, operation by operation, not recorded. */
static void print_parts(const struct bench *b, x3_resident *r, const char *what, size_t n, size_t n_rows, size_t position,
                        const int32_t *ids, float *logits)
{
    double before[X3_N_WORKS];
    const size_t recorded_rows = r->recorded_rows;

    if (b->dev->capacity_bytes == 0)
        return;
    r->recorded_rows = 0;
    memcpy(before, b->dev->busy_seconds, sizeof before);
    (void)time_step(r, n, n_rows, position, ids, logits);
    printf("%s, ms by kind of operation:", what);
    for (int w = 0; w < X3_N_WORKS; w++)
        if (b->dev->busy_seconds[w] > before[w])
            printf(" %s %.3f", x3_work_name((x3_work)w), 1000 * (b->dev->busy_seconds[w] - before[w]) / (TIMES + 2));
    printf("\n");
    r->recorded_rows = recorded_rows;
}

#define DECODE_AT 255 /* the row of a sequence: its cache is full pages */

static void bench_steps(const struct bench *b)
{
    static const struct {
        size_t n;
        double peer;
    } cases[] = {{1, 1.55}, {2, 1.57}, {4, 1.67}, {8, 2.10}, {16, 2.20}, {32, 2.33}, {64, 4.34}, {128, 8.27}, {256, 0}, {512, 5.75}};
    const size_t longest = x3_max_size(b->prefill, b->most_rows);
    const x3_resident_options o = {.max_positions = longest + 64, .max_rows = longest, .max_outputs = b->most_rows,
                                   .n_pages = x3_max_size(b->most_rows * (DECODE_AT / X3_KV_PAGE + 1), longest / X3_KV_PAGE + 1), .n_slots = b->most_rows,
                                   .kv_type = b->kv};
    int32_t *ids = calloc(longest, sizeof *ids);
    float *logits;
    x3_resident *r;
    x3_err err = {0};

    for (size_t i = 0; i < longest; i++)
        ids[i] = (int32_t)(i * 31 % (b->c->model->vocab / 2));
    TRY(x3_resident_create(&r, b->dev, b->c, &o, &err));
    TRY(x3_device_host_alloc(b->dev, &logits, b->most_rows * b->c->model->vocab * sizeof *logits, &err));
    printf("\n| rows of a step | one a sequence, 256 positions each, ms | one sequence from its start, ms |%s\n| --- | --- | --- |%s\n",
           b->peer ? " the peer, ms |" : "", b->peer ? " --- |" : "");
    for (size_t i = 0; i < sizeof cases / sizeof *cases && cases[i].n <= b->most_rows; i++) {
        const double batch = time_step(r, cases[i].n, 1, DECODE_AT, ids, logits);
        printf("| %zu | %.3f | %.3f |", cases[i].n, batch, time_step(r, 1, cases[i].n, 0, ids, logits));
        if (b->peer && cases[i].peer > 0)
            printf(" %.2f |", cases[i].peer);
        printf("\n");
        fflush(stdout);
    }
    const double prefill = time_step(r, 1, b->prefill, 0, ids, logits);
    printf("\nprefill of %zu tokens in one step: %.2f ms, %.0f tokens/s%s\n", b->prefill, prefill, 1000 * (double)b->prefill / prefill,
           b->peer ? "; the peer 31.1 ms" : "");
    const double long_ms = time_step(r, 1, 1, b->prefill - 1, ids, logits);
    printf("one row after %zu positions: %.3f ms\n", b->prefill - 1, long_ms);
    print_parts(b, r, "prefill", 1, b->prefill, 0, ids, logits);
    print_parts(b, r, "one row", 1, 1, DECODE_AT, ids, logits);
    print_parts(b, r, "32 rows", 32, 1, DECODE_AT, ids, logits);
    x3_device_host_free(b->dev, logits);
    x3_resident_free(r);
    free(ids);
}

/* ---- what the memory gives ---- */

static double measure_bandwidth(x3_device *dev, bool big)
{
    const size_t n = (big ? (size_t)1 << 30 : (size_t)64 << 20);
    void *a, *b;
    double best = 0;
    x3_err err = {0};

    TRY(x3_device_alloc(dev, &a, n, &err));
    TRY(x3_device_alloc(dev, &b, n, &err));
    for (int i = 0; i < 6; i++) {
        double start = x3_seconds();
        for (int j = 0; j < 4; j++)
            TRY(dev->ops->copy(dev, b, a, n, &err));
        TRY(dev->ops->sync(dev, &err));
        const double rate = 8.0 * (double)n / (x3_seconds() - start);
        best = rate > best ? rate : best;
    }
    x3_device_free(dev, a);
    x3_device_free(dev, b);
    return best;
}

/* Bytes that a step reads of the weights: all but the embedding. */
static size_t weight_bytes(const x3_checkpoint *c)
{
    uint64_t n = 0;

    for (size_t i = 0; i < c->st->n_tensors; i++)
        if (c->roles[i] != X3_ROLE_DROPPED && (c->model->tied || strcmp(c->st->tensors[i].name, c->model->embed_name) != 0))
            n += c->st->tensors[i].n_bytes;
    return n;
}

int main(int argc, char **argv)
{
    static const char *const types[] = {"f32", "bf16", "int8", "int4"};
    const char *device = argc > 2 ? argv[2] : "cpu", *type = argc > 3 ? argv[3] : "bf16";
    struct bench b = {.n_reply = 64, .most_rows = 64, .prefill = 512};
    x3_findings findings = {0};
    x3_err err = {0};

    if (argc < 2 || argc > 4) {
        fprintf(stderr, "usage: bench_serve PACK [DEVICE [f32|bf16|int8|int4]]\n");
        return 2;
    }
    while (b.kv < 4 && strcmp(types[b.kv], type) != 0)
        b.kv++;
    if (b.kv == 4) {
        fprintf(stderr, "bench_serve: %s is not f32, bf16, int8 or int4\n", type);
        return 2;
    }
    TRY(x3_device_open(&b.dev, device, 0, &err));
    TRY(x3_checkpoint_open(&b.c, argv[1], NULL, &findings, &err));
    b.peer = b.dev->capacity_bytes > 0;
    if (b.peer)
        b.n_reply = 512, b.most_rows = 512, b.prefill = 4096;
    b.bandwidth = measure_bandwidth(b.dev, b.peer);
    b.weight_bytes = weight_bytes(b.c);
    for (size_t i = 0; i < b.c->model->n_layers; i++)
        b.position_bytes += x3_kv_layer_bytes(&b.c->model->layers[i], 1, 0, b.kv) / X3_KV_PAGE;
    printf("%s, %s, cache %s\n%.1f MB of weights a step, %.2f KB of cache a position, copies at %.0f GB/s (read and written)\n", argv[1],
           b.dev->name, type, (double)b.weight_bytes / 1e6, (double)b.position_bytes / 1e3, b.bandwidth / 1e9);
    bench_replies(&b);
    bench_steps(&b);
    x3_checkpoint_close(b.c);
    x3_device_close(b.dev);
    x3_findings_free(&findings);
    return 0;
}
