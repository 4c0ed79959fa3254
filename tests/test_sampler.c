/* Sampling, and the text of replies. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/utf8.h"
#include "runtime/serve/sampler.h"
#include "runtime/serve/text_stream.h"
#include "tests/test.h"

#define V 8

static const float logits0[V] = {1, 3, 2, 3, -1, 0, 2.5f, -4};

static x3_sampling plain(void)
{
    x3_sampling p;
    x3_err err = {0};

    CHECK_OK(x3_sampling_defaults(&p, NULL, &err), &err);
    return p;
}

/* n draws from logits0, counted; the last one in *last. Counts do not carry penalties: each draw is a new reply. */
static void count_draws(const x3_sampling *p, size_t n, size_t counts[V])
{
    x3_sampler *s;
    x3_sampled out;
    x3_err err = {0};

    memset(counts, 0, V * sizeof counts[0]);
    CHECK_OK(x3_sampler_create(&s, p, V, "r", &err), &err);
    for (size_t i = 0; i < n; i++) {
        float logits[V];
        memcpy(logits, logits0, sizeof logits);
        CHECK_OK(x3_sampler_pick(s, logits, &out, &err), &err);
        CHECK(out.id >= 0 && out.id < V);
        counts[out.id]++;
    }
    x3_sampler_free(s);
}

/* Shares of `counts` against the softmax over the tokens of `kept` at a temperature; 5 standard deviations. */
static void expect_shares(const size_t counts[V], size_t n, const char *kept, double temperature)
{
    double sum = 0;

    for (int i = 0; i < V; i++)
        sum += strchr(kept, '0' + i) != NULL ? exp(logits0[i] / temperature) : 0;
    for (int i = 0; i < V; i++) {
        double p = strchr(kept, '0' + i) != NULL ? exp(logits0[i] / temperature) / sum : 0;
        double sigma = sqrt(p * (1 - p) / (double)n);
        CHECK_MSG(fabs((double)counts[i] / (double)n - p) <= 5 * sigma, "token %d: share %g, expected %g", i,
                  (double)counts[i] / (double)n, p);
    }
}

X3_TEST(sampler_draws_each_token_as_often_as_its_probability_says)
{
    enum { N = 40000 };
    x3_sampling p = plain();
    size_t counts[V];

    p.seed = 5;
    count_draws(&p, N, counts);
    expect_shares(counts, N, "01234567", 1);
    p.temperature = 0.5;
    count_draws(&p, N, counts);
    expect_shares(counts, N, "01234567", 0.5);
    p.temperature = 2;
    p.top_k = 4;
    count_draws(&p, N, counts);
    expect_shares(counts, N, "1326", 2);
    p.top_k = 0;
    p.temperature = 1;
    p.top_p = 0.60; /* 1 and 3 have .31 each */
    count_draws(&p, N, counts);
    expect_shares(counts, N, "13", 1);
    p.top_p = 0.63;
    count_draws(&p, N, counts);
    expect_shares(counts, N, "136", 1);
    p.top_k = 3; /* then top-p is of these three: 1 and 3 have .38 each */
    p.top_p = 0.75;
    count_draws(&p, N, counts);
    expect_shares(counts, N, "13", 1);
    p = plain();
    p.min_p = 0.3; /* logits within 1.2 of the best */
    count_draws(&p, N, counts);
    expect_shares(counts, N, "1263", 1);
    p.top_k = 100; /* more than there are */
    count_draws(&p, N, counts);
    expect_shares(counts, N, "1263", 1);
    p.top_p = 0; /* one is left always, of equal ones the lowest */
    count_draws(&p, 100, counts);
    CHECK(counts[1] == 100);
}

X3_TEST(sampler_is_greedy_at_temperature_zero_and_takes_the_lower_of_equals)
{
    x3_sampling p = plain();
    float bad[V] = {1, NAN};
    size_t counts[V];
    x3_sampler *s;
    x3_sampled out;
    x3_err err = {0};

    p.temperature = 0;
    count_draws(&p, 10, counts);
    CHECK(counts[1] == 10);
    CHECK_OK(x3_sampler_create(&s, &p, V, "r", &err), &err);
    CHECK_FAILS(x3_sampler_pick(s, bad, &out, &err), &err, "token 1 is not a number");
    for (int i = 0; i < V; i++)
        bad[i] = -INFINITY;
    CHECK_FAILS(x3_sampler_pick(s, bad, &out, &err), &err, "no logit is finite");
    x3_sampler_free(s);
}

X3_TEST(sampler_is_greedy_where_the_inverse_of_the_temperature_is_infinite)
{
    x3_sampling p = plain();
    size_t counts[V];

    p.temperature = 1e-310;
    for (int k = 0; k < 3; k += 2) {
        p.top_k = k;
        count_draws(&p, 5, counts);
        CHECK(counts[1] == 5);
    }
    p.temperature = 1e-300; /* finite */
    p.top_k = 0;
    count_draws(&p, 50, counts);
    CHECK(counts[1] + counts[3] == 50);
}

X3_TEST(sampler_gives_the_same_for_the_same_seed_only)
{
    x3_sampling p = plain();
    char text[4][65] = {{0}};
    x3_err err = {0};

    for (int run = 0; run < 4; run++) {
        x3_sampler *s;
        x3_sampled out;
        p.seed = run == 2 ? 8 : 7;
        CHECK_OK(x3_sampler_create(&s, &p, V, run == 3 ? "b" : "a", &err), &err);
        for (int i = 0; i < 64; i++) {
            float logits[V];
            memcpy(logits, logits0, sizeof logits);
            CHECK_OK(x3_sampler_pick(s, logits, &out, &err), &err);
            text[run][i] = (char)('0' + out.id);
        }
        x3_sampler_free(s);
    }
    CHECK(strcmp(text[0], text[1]) == 0 && strcmp(text[0], text[2]) != 0 && strcmp(text[0], text[3]) != 0);
}

/* Greedy ids of n picks from logits0. */
static void expect_greedy(x3_sampling p, const int32_t *prompt, size_t n_prompt, const char *expected)
{
    x3_sampler *s;
    x3_sampled out;
    x3_err err = {0};

    p.temperature = 0;
    CHECK_OK(x3_sampler_create(&s, &p, V, "r", &err), &err);
    x3_sampler_prompt(s, prompt, n_prompt);
    for (const char *at = expected; *at != '\0'; at++) {
        float logits[V];
        memcpy(logits, logits0, sizeof logits);
        CHECK_OK(x3_sampler_pick(s, logits, &out, &err), &err);
        CHECK_MSG(out.id == *at - '0', "pick %d of %s is %d", (int)(at - expected), expected, (int)out.id);
    }
    x3_sampler_free(s);
}

X3_TEST(sampler_applies_penalties_and_bias)
{
    static const int32_t prompt[] = {1, 1, 4, 99, -1};
    static const x3_logit_bias bias[] = {{5, 3.5f}, {3, -100}};
    x3_sampling p = plain();

    p.presence_penalty = 0.75; /* once each: 3 -> 2.25, 2.5 -> 1.75, 2 -> 1.25, 1 -> .25 */
    expect_greedy(p, prompt, 5, "136111");
    p = plain();
    p.frequency_penalty = 0.75;
    expect_greedy(p, prompt, 5, "1361326");
    p = plain();
    p.repetition_penalty = 1.25; /* 3 -> 2.4, 2.5 -> 2, 2 -> 1.6; the prompt counts, too */
    expect_greedy(p, prompt, 5, "3611");
    expect_greedy(p, prompt, 0, "1361");
    p = plain();
    p.bias = bias;
    p.n_bias = 2;
    expect_greedy(p, prompt, 5, "5");
    p.n_bias = 0;
    expect_greedy(p, prompt, 5, "1");
}

X3_TEST(sampler_reports_log_probabilities_of_the_model)
{
    x3_sampling p = plain();
    static const x3_logit_bias bias[] = {{7, 100}};
    static const int32_t order[] = {1, 3, 6, 2};
    float logits[V];
    x3_sampler *s;
    x3_sampled out;
    x3_err err = {0};
    double sum = 0;

    for (int i = 0; i < V; i++)
        sum += exp(logits0[i]);
    p.n_top = 4;
    p.temperature = 0;
    p.bias = bias;
    p.n_bias = 1;
    memcpy(logits, logits0, sizeof logits);
    CHECK_OK(x3_sampler_create(&s, &p, V, "r", &err), &err);
    CHECK_OK(x3_sampler_pick(s, logits, &out, &err), &err);
    CHECK(out.id == 7 && fabs(out.logprob - (logits0[7] - log(sum))) < 1e-6);
    CHECK(out.n_top == 4);
    for (int i = 0; i < 4; i++)
        CHECK(out.top[i].id == order[i] && fabs(out.top[i].logprob - (logits0[order[i]] - log(sum))) < 1e-6);
    x3_sampler_free(s);
}

X3_TEST(sampler_takes_defaults_from_generation_config_and_checks_ranges)
{
    x3_hf_config *c;
    x3_sampling p;
    x3_err err = {0};

    CHECK_OK(x3_hf_config_load(&c, "tests/data/models/tiny-qwen3", &err), &err);
    CHECK_OK(x3_sampling_defaults(&p, c, &err), &err);
    CHECK(p.temperature == 0.7 && p.top_p == 0.9 && p.top_k == 40 && p.min_p == 0 && p.repetition_penalty == 1);
    cJSON_ReplaceItemInObject(c->generation, "do_sample", cJSON_CreateFalse());
    CHECK_OK(x3_sampling_defaults(&p, c, &err), &err);
    CHECK(p.temperature == 0);
    cJSON_ReplaceItemInObject(c->generation, "top_p", cJSON_CreateNumber(1.5));
    CHECK_FAILS(x3_sampling_defaults(&p, c, &err), &err, "\"top_p\" is 1.5");
    x3_hf_config_free(c);
    p = plain();
    p.temperature = -1;
    CHECK_FAILS(x3_sampling_check(&p, V, &err), &err, "\"temperature\" is -1");
    p.temperature = NAN;
    CHECK_FAILS(x3_sampling_check(&p, V, &err), &err, "\"temperature\"");
    p = plain();
    p.bias = &(const x3_logit_bias){V, 1};
    p.n_bias = 1;
    CHECK_FAILS(x3_sampling_check(&p, V, &err), &err, "token 8 is not in the vocabulary of 8");
}

/* ---- text ---- */

/* Puts `text` in pieces of the lengths that `seed` gives, and returns all output; checks each step. */
static char *streamed(const char *text, size_t n, const char *const *stops, size_t n_stops, uint64_t seed, bool *stopped)
{
    x3_text_stream *s;
    x3_text out = {0};
    x3_err err = {0};
    x3_rng rng;

    x3_rng_init(&rng, seed, "pieces");
    *stopped = false;
    CHECK_OK(x3_text_stream_create(&s, stops, n_stops, &err), &err);
    for (size_t at = 0; at < n && !*stopped;) {
        size_t length = x3_min_size(n - at, 1 + x3_rng_next(&rng) % 4);
        CHECK_OK(x3_text_stream_put(s, text + at, length, &out, stopped, &err), &err);
        CHECK_MSG(x3_utf8_valid(out.items, out.n_items) == out.n_items, "a character is split after byte %zu", at);
        at += length;
    }
    if (!*stopped)
        CHECK_OK(x3_text_stream_end(s, &out, &err), &err);
    CHECK_OK(x3_text_put(&out, "", 1, &err), &err);
    x3_text_stream_free(s);
    return out.items;
}

static void expect_stream(const char *text, const char *const *stops, size_t n_stops, const char *expected, bool stops_there)
{
    for (uint64_t seed = 0; seed < 60; seed++) {
        bool stopped;
        char *got = streamed(text, strlen(text), stops, n_stops, seed, &stopped);
        CHECK_MSG(strcmp(got, expected) == 0 && stopped == stops_there, "\"%s\", expected \"%s\" (pieces %d)", got, expected,
                  (int)seed);
        free(got);
    }
}

X3_TEST(text_stream_stops_across_borders_and_leaks_nothing_of_the_stop)
{
    static const char *const one[] = {"STOP"}, *const several[] = {"\n\nUser:", "<end>", "€uro"};

    expect_stream("abc STO", one, 1, "abc STO", false);
    expect_stream("abc STSTOP def", one, 1, "abc ST", true);
    expect_stream("STOP", one, 1, "", true);
    expect_stream("SSTOSTOSTOPS", one, 1, "SSTOSTO", true);
    expect_stream("Grüße 日本 😀\n\nUse\n\nUser: x", several, 3, "Grüße 日本 😀\n\nUse", true);
    expect_stream("10 €ur €uro", several, 3, "10 €ur ", true);
    expect_stream("a <en <end", several, 3, "a <en <end", false);
    expect_stream("plain é", NULL, 0, "plain é", false);
}

X3_TEST(text_stream_holds_back_no_more_than_the_beginning_of_a_stop)
{
    static const char *const stops[] = {"STOP"};
    x3_text_stream *s;
    x3_text out = {0};
    x3_err err = {0};
    bool stopped;

    CHECK_OK(x3_text_stream_create(&s, stops, 1, &err), &err);
    CHECK_OK(x3_text_stream_put(s, "one S", 5, &out, &stopped, &err), &err);
    CHECK(out.n_items == 4 && !stopped);
    CHECK_OK(x3_text_stream_put(s, "TO", 2, &out, &stopped, &err), &err);
    CHECK(out.n_items == 4 && !stopped);
    CHECK_OK(x3_text_stream_put(s, "X\xE2\x82", 3, &out, &stopped, &err), &err);
    CHECK(out.n_items == 8 && memcmp(out.items, "one STOX", 8) == 0 && !stopped);
    CHECK_OK(x3_text_stream_put(s, "\xAC", 1, &out, &stopped, &err), &err);
    CHECK(out.n_items == 11 && memcmp(out.items + 8, "€", 3) == 0);
    x3_text_stream_free(s);
    x3_text_free(&out);
}

X3_TEST(text_stream_repairs_what_is_no_utf8_as_the_whole_text_would_be)
{
    static const char bad[] = "a\xFF\xE0\x80z\xF0\x90\xED\xA0\x80\xC3(\xF4\x90\x80\x80é\xE2\x82";
    x3_text room = {0};
    x3_err err = {0};
    x3_view view = {bad, sizeof bad - 1};

    CHECK_OK(x3_utf8_repair(&view, &room, &err), &err);
    CHECK_OK(x3_text_put(&room, "", 1, &err), &err);
    expect_stream(bad, NULL, 0, room.items, false);
    x3_text_free(&room);
}

X3_TEST(text_stream_replaces_nul_which_would_end_a_c_string)
{
    x3_text_stream *s;
    x3_text out = {0};
    x3_err err = {0};
    bool stopped;

    CHECK_OK(x3_text_stream_create(&s, NULL, 0, &err), &err);
    CHECK_OK(x3_text_stream_put(s, "a\0b\xFF\0", 5, &out, &stopped, &err), &err);
    CHECK_OK(x3_text_stream_end(s, &out, &err), &err);
    CHECK(out.n_items == 11 && memcmp(out.items, "a\xEF\xBF\xBD" "b\xEF\xBF\xBD\xEF\xBF\xBD", 11) == 0);
    x3_text_stream_free(s);
    x3_text_free(&out);
}
