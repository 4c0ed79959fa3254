/* The engine: replies batched, cut, cancelled and resumed are the replies that a prompt gets alone. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/serve/engine.h"
#include "runtime/generate.h"
#include "runtime/serve/kv_pages.h"
#include "tests/test.h"

#define MODEL "tests/data/models/tiny-qwen3"

/* ---- pages ---- */

static const int32_t *page_tokens(int32_t which)
{
    static int32_t tokens[X3_KV_PAGE];

    for (int i = 0; i < X3_KV_PAGE; i++)
        tokens[i] = which * 100 + i;
    return tokens;
}

X3_TEST(kv_pages_finds_full_pages_by_their_whole_past)
{
    x3_kv_pages *p;
    x3_err err = {0};
    uint64_t chain = X3_KV_ROOT, other = X3_KV_ROOT;
    int32_t a, b, c, found;

    CHECK_OK(x3_kv_pages_create(&p, 3, &err), &err);
    CHECK(x3_kv_pages_take(p, &a) && x3_kv_pages_take(p, &b));
    x3_kv_pages_fill(p, &chain, page_tokens(1), a);
    x3_kv_pages_fill(p, &chain, page_tokens(2), b);
    CHECK(x3_kv_pages_n_held(p) == 2 && x3_kv_pages_n_cached(p) == 0);
    CHECK(!x3_kv_pages_find(p, &other, page_tokens(2), &found)); /* not at position 0 */
    CHECK(x3_kv_pages_find(p, &other, page_tokens(1), &found) && found == a);
    CHECK(x3_kv_pages_find(p, &other, page_tokens(2), &found) && found == b && other == chain);
    x3_kv_pages_release(p, (int32_t[]){a, b}, 2);
    CHECK(x3_kv_pages_n_held(p) == 2);
    x3_kv_pages_release(p, (int32_t[]){a, b}, 2);
    CHECK(x3_kv_pages_n_held(p) == 0 && x3_kv_pages_n_cached(p) == 2);
    CHECK(x3_kv_pages_take(p, &c) && c != a && c != b); /* an empty page first */
    CHECK(x3_kv_pages_take(p, &c) && c == b);           /* then the end of a chain, which is forgotten */
    other = X3_KV_ROOT;
    CHECK(x3_kv_pages_find(p, &other, page_tokens(1), &found) && found == a);
    CHECK(!x3_kv_pages_find(p, &other, page_tokens(2), &found));
    CHECK(!x3_kv_pages_take(p, &c));
    x3_kv_pages_free(p);
}

X3_TEST(kv_pages_keeps_one_of_two_equal_pages)
{
    x3_kv_pages *p;
    x3_err err = {0};
    uint64_t one = X3_KV_ROOT, two = X3_KV_ROOT;
    int32_t a, b, found;

    CHECK_OK(x3_kv_pages_create(&p, 2, &err), &err);
    CHECK(x3_kv_pages_take(p, &a) && x3_kv_pages_take(p, &b));
    x3_kv_pages_fill(p, &one, page_tokens(1), a);
    x3_kv_pages_fill(p, &two, page_tokens(1), b);
    CHECK(one == two);
    x3_kv_pages_release(p, &b, 1);
    CHECK(x3_kv_pages_n_cached(p) == 0);
    x3_kv_pages_release(p, &a, 1);
    one = X3_KV_ROOT;
    CHECK(x3_kv_pages_find(p, &one, page_tokens(1), &found) && found == a);
    x3_kv_pages_free(p);
}

/* ---- engine ---- */

#define REPLY_MAX 200

/* What a client gathers. */
struct client {
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    int32_t ids[REPLY_MAX];
    size_t n, n_max; /* ends itself after n_max, 0: never */
    bool ended;
    x3_finish finish;
    x3_reply_stats stats;
    char error[200];
};

static bool on_token(void *arg, const x3_sampled *token)
{
    struct client *c = arg;

    pthread_mutex_lock(&c->mutex);
    CHECK(!c->ended && c->n < REPLY_MAX);
    c->ids[c->n++] = token->id;
    bool more = c->n_max == 0 || c->n < c->n_max;
    pthread_cond_signal(&c->changed);
    pthread_mutex_unlock(&c->mutex);
    return more;
}

static void on_end(void *arg, x3_finish finish, const x3_reply_stats *stats, const x3_err *err)
{
    struct client *c = arg;

    pthread_mutex_lock(&c->mutex);
    c->ended = true;
    c->finish = finish;
    c->stats = *stats;
    snprintf(c->error, sizeof c->error, "%.199s", err->text);
    pthread_cond_signal(&c->changed);
    pthread_mutex_unlock(&c->mutex);
}

static struct {
    x3_device *dev;
    x3_checkpoint *c;
    x3_tokenizer *t;
    x3_engine *e;
} at;

static void open_engine(size_t max_sequences, size_t ctx, size_t n_pages, size_t chunk)
{
    const x3_engine_options o = {.max_sequences = max_sequences, .max_positions = ctx, .n_pages = n_pages, .chunk_rows = chunk,
                                 .max_queued = 64, .keep_prefixes = true};
    x3_findings findings = {0};
    x3_err err = {0};

    CHECK_OK(x3_device_open(&at.dev, "cpu", 2, &err), &err);
    CHECK_OK(x3_checkpoint_open(&at.c, MODEL, NULL, &findings, &err), &err);
    CHECK_OK(x3_tokenizer_load(&at.t, MODEL "/tokenizer.json", &err), &err);
    CHECK_OK(x3_engine_open(&at.e, at.dev, at.c, &o, &err), &err);
    x3_findings_free(&findings);
}

static void close_engine(void)
{
    x3_engine_close(at.e);
    x3_tokenizer_free(at.t);
    x3_checkpoint_close(at.c);
    x3_device_close(at.dev);
}

static const int32_t stop_tokens[] = {4093, 4095};

/* A prompt of some length of its own for every number; in 3 of 4 the first `shared` tokens are the same. */
static void make_prompt(x3_ids *ids, int number, size_t shared)
{
    char text[4096] = "";
    x3_err err = {0};
    size_t n = 0;

    ids->n_items = 0;
    for (int i = 0; i < 4 + number * 37 % 24 && n < sizeof text - 80; i++)
        n += (size_t)snprintf(text + n, sizeof text - n, "%s %d the %s ", i % 3 == 0 ? "sea" : "hill", number * i % 91,
                              number % 2 == 0 ? "old" : "red");
    if (number % 4 != 0)
        for (size_t i = 0; i < shared; i++)
            CHECK_OK(x3_ids_push(ids, (uint32_t)(100 + i % 700), &err), &err);
    CHECK_OK(x3_tokenizer_encode(at.t, text, n, false, 0, ids, &err), &err);
}

static x3_status submit(struct client *c, const x3_ids *prompt, size_t max_tokens, double temperature, uint64_t *id, x3_err *err)
{
    x3_reply_request q = {.prompt = (const int32_t *)prompt->items, .n_prompt = prompt->n_items, .max_tokens = max_tokens,
                          .name = "r", .stops = stop_tokens, .n_stops = 2, .on = {on_token, on_end, c}};

    CHECK_OK(x3_sampling_defaults(&q.sampling, NULL, err), err);
    q.sampling.temperature = temperature;
    q.sampling.seed = prompt->n_items;
    c->n = 0;
    c->ended = false;
    pthread_mutex_init(&c->mutex, NULL);
    pthread_cond_init(&c->changed, NULL);
    return x3_engine_submit(at.e, &q, id, err);
}

static void wait_end(struct client *c)
{
    pthread_mutex_lock(&c->mutex);
    while (!c->ended)
        pthread_cond_wait(&c->changed, &c->mutex);
    pthread_mutex_unlock(&c->mutex);
}

static void reply_alone(struct client *c, const x3_ids *prompt, size_t max_tokens, double temperature)
{
    x3_err err = {0};
    uint64_t id;

    CHECK_OK(submit(c, prompt, max_tokens, temperature, &id, &err), &err);
    wait_end(c);
}

struct greedy {
    int32_t ids[REPLY_MAX];
    size_t n;
};

static bool collect(void *arg, int32_t id)
{
    struct greedy *g = arg;

    g->ids[g->n++] = id;
    return true;
}

X3_TEST(engine_writes_what_the_greedy_generator_writes)
{
    static struct client client;
    x3_generator *g;
    x3_ids prompt = {0};
    x3_err err = {0};
    bool stopped;

    open_engine(2, 2048, 0, 17);
    for (int i = 0; i < 4; i++) {
        struct greedy expected = {.n = 0};
        make_prompt(&prompt, i, 70);
        CHECK_OK(x3_generator_create(&g, at.dev, at.c, prompt.n_items + 40, &err), &err);
        CHECK_OK(x3_generate_greedy(g, (const int32_t *)prompt.items, prompt.n_items, 40, collect, &expected, &stopped, &err), &err);
        x3_generator_free(g);
        reply_alone(&client, &prompt, 40, 0);
        CHECK(client.n == expected.n && memcmp(client.ids, expected.ids, expected.n * sizeof expected.ids[0]) == 0);
        CHECK(client.finish == (stopped ? X3_FINISH_STOP : X3_FINISH_LENGTH));
        CHECK(client.stats.n_prompt == prompt.n_items && client.stats.n_reply == expected.n + stopped);
    }
    x3_ids_free(&prompt);
    close_engine();
}

#define N_CLIENTS 32

/* All replies together, some cancelled, against the same alone. */
static void expect_alone_equals_batched(size_t n_pages, size_t chunk, double temperature, size_t max_tokens)
{
    static struct client alone[N_CLIENTS], together[N_CLIENTS];
    x3_ids prompts[N_CLIENTS] = {{0}};
    uint64_t ids[N_CLIENTS];
    x3_err err = {0};
    x3_engine_stats stats;

    open_engine(1, 1024, 0, 256);
    for (int i = 0; i < N_CLIENTS; i++) {
        make_prompt(&prompts[i], i, 130);
        reply_alone(&alone[i], &prompts[i], max_tokens, temperature);
    }
    close_engine();
    open_engine(N_CLIENTS, 1024, n_pages, chunk);
    for (int i = 0; i < N_CLIENTS; i++)
        CHECK_OK(submit(&together[i], &prompts[i], max_tokens, temperature, &ids[i], &err), &err);
    for (int i = 5; i < N_CLIENTS; i += 8)
        x3_engine_cancel(at.e, ids[i]);
    for (int i = 0; i < N_CLIENTS; i++) {
        wait_end(&together[i]);
        x3_ids_free(&prompts[i]);
        CHECK(together[i].finish == alone[i].finish || (i % 8 == 5 && together[i].finish == X3_FINISH_CANCELLED));
        CHECK(i % 8 == 5 ? together[i].n <= alone[i].n : together[i].n == alone[i].n);
        CHECK_MSG(memcmp(together[i].ids, alone[i].ids, together[i].n * sizeof alone[i].ids[0]) == 0, "reply %d differs", i);
    }
    x3_engine_stats_read(at.e, &stats);
    CHECK(stats.n_requests == N_CLIENTS && stats.n_finished + stats.n_cancelled == N_CLIENTS && stats.n_cached > 0);
    CHECK((stats.n_preempted > 0) == (n_pages > 0)); /* few pages: sequences had to be computed again */
    CHECK(stats.pages_held == 0 && stats.n_running == 0 && stats.n_queued == 0);
    close_engine();
}

X3_TEST(engine_reply_is_the_same_alone_or_among_32)
{
    x3_test_skip_if_emulated();
    expect_alone_equals_batched(0, 64, 0, 12);
}

X3_TEST(engine_reply_is_the_same_when_pages_run_out_and_when_sampled)
{
    x3_test_skip_if_emulated();
    expect_alone_equals_batched(24, 300, 1, 12);
}

X3_TEST(engine_uses_pages_of_earlier_sequences)
{
    static struct client first, second;
    x3_ids prompt = {0};
    x3_err err = {0};

    open_engine(2, 1024, 0, 64);
    make_prompt(&prompt, 3, 200);
    reply_alone(&first, &prompt, 20, 0);
    CHECK(first.stats.n_cached == 0);
    reply_alone(&second, &prompt, 20, 0);
    CHECK(second.stats.n_cached == (prompt.n_items - 1) / X3_KV_PAGE * X3_KV_PAGE && second.n == first.n);
    CHECK(memcmp(first.ids, second.ids, first.n * sizeof first.ids[0]) == 0);
    prompt.n_items = 128; /* whole pages: the last token is computed again, for its logits */
    reply_alone(&first, &prompt, 5, 0);
    CHECK(first.stats.n_cached == 64);
    CHECK_OK(x3_ids_push(&prompt, 7, &err), &err);
    reply_alone(&first, &prompt, 5, 0);
    CHECK(first.stats.n_cached == 128);
    x3_ids_free(&prompt);
    close_engine();
}

X3_TEST(engine_keeps_limits_and_refuses_what_cannot_be_done)
{
    static struct client c;
    x3_ids prompt = {0};
    x3_err err = {0};
    uint64_t id;

    open_engine(1, 256, 4, 64);
    CHECK_FAILS(submit(&c, &prompt, 5, 0, &id, &err), &err, "the prompt has no tokens");
    for (uint32_t i = 0; i < 255; i++)
        CHECK_OK(x3_ids_push(&prompt, 100 + i % 7, &err), &err);
    reply_alone(&c, &prompt, 0, 0);
    CHECK(c.n == 1 && c.finish == X3_FINISH_LENGTH);
    CHECK_OK(x3_ids_push(&prompt, 100, &err), &err);
    CHECK_FAILS(submit(&c, &prompt, 5, 0, &id, &err), &err, "256 tokens, which leaves no room");
    prompt.n_items = 3;
    prompt.items[1] = 4096;
    CHECK_FAILS(submit(&c, &prompt, 5, 0, &id, &err), &err, "token 4096 is not in the vocabulary");
    prompt.items[1] = 100;
    CHECK_FAILS(submit(&c, &prompt, 5, -1, &id, &err), &err, "\"temperature\" is -1");
    c.n_max = 2; /* the client has enough */
    reply_alone(&c, &prompt, 5, 0);
    CHECK(c.n == 2 && c.finish == X3_FINISH_STOP);
    c.n_max = 0;
    reply_alone(&c, &prompt, 3, 0);
    CHECK(c.n == 3 && c.finish == X3_FINISH_LENGTH);
    CHECK_OK(x3_engine_health(at.e, &err), &err);
    x3_ids_free(&prompt);
    close_engine();
}

X3_TEST(engine_closes_with_replies_running_and_queued)
{
    static struct client c[8];
    x3_ids prompt = {0};
    x3_err err = {0};
    uint64_t id;

    open_engine(2, 2048, 0, 64);
    make_prompt(&prompt, 5, 0);
    for (int i = 0; i < 8; i++)
        CHECK_OK(submit(&c[i], &prompt, 190, 1, &id, &err), &err);
    close_engine();
    for (int i = 0; i < 8; i++)
        CHECK(c[i].ended && (c[i].finish == X3_FINISH_CANCELLED || c[i].finish == X3_FINISH_STOP));
    x3_ids_free(&prompt);
}
