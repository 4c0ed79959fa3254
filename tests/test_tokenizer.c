#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "runtime/tokenizer/regex.h"
#include "runtime/tokenizer/tokenizer.h"
#include "tests/test.h"

#define DATA "tests/data/tokenizers"
#define SAME 65535

static x3_tokenizer *load(const char *name)
{
    char path[200];
    x3_tokenizer *t;
    x3_err err = {0};

    snprintf(path, sizeof path, DATA "/%s.json", name);
    CHECK_OK(x3_tokenizer_load(&t, path, &err), &err);
    return t;
}

static x3_ids encode(const x3_tokenizer *t, const char *text, size_t n_bytes, bool parse_special)
{
    x3_ids ids = {0};
    x3_err err = {0};

    CHECK_OK(x3_tokenizer_encode(t, text, n_bytes, parse_special, 0, &ids, &err), &err);
    return ids;
}

static x3_text decode(const x3_tokenizer *t, x3_ids ids, bool skip_special)
{
    x3_text text = {0};
    x3_err err = {0};

    CHECK_OK(x3_tokenizer_decode(t, ids.items, ids.n_items, skip_special, &text.items, &text.n_items, &err), &err);
    CHECK(text.items[text.n_items] == '\0');
    return text;
}

static bool same_ids(x3_ids a, x3_ids b)
{
    return a.n_items == b.n_items && (a.n_items == 0 || memcmp(a.items, b.items, a.n_items * sizeof *a.items) == 0);
}

/* ---- cases.bin: see make_fixtures.py ---- */

#define TEXTS_MAX 400

struct cases {
    char *data;
    size_t n_bytes, at, n_texts;
    x3_view texts[TEXTS_MAX];
};

static unsigned take(struct cases *c, size_t n_bytes)
{
    unsigned value = 0;

    CHECK(c->n_bytes - c->at >= n_bytes);
    for (size_t i = 0; i < n_bytes; i++)
        value |= (unsigned)(unsigned char)c->data[c->at++] << (8 * i);
    return value;
}

static void open_cases(struct cases *c)
{
    x3_err err = {0};

    *c = (struct cases){0};
    CHECK_OK(x3_read_file(&c->data, &c->n_bytes, DATA "/cases.bin", 1 << 24, &err), &err);
    c->n_texts = take(c, 4);
    CHECK(c->n_texts > 100 && c->n_texts <= TEXTS_MAX);
    for (size_t i = 0; i < c->n_texts; i++) {
        c->texts[i].n_bytes = take(c, 4);
        CHECK(c->n_bytes - c->at >= c->texts[i].n_bytes);
        c->texts[i].data = c->data + c->at;
        c->at += c->texts[i].n_bytes;
    }
}

/* The ids of the next text; *before those of the same text in the block before, which they replace. */
static void take_ids(struct cases *c, x3_ids *before)
{
    x3_err err = {0};
    unsigned n = take(c, 2);

    if (n == SAME)
        return;
    before->n_items = 0;
    for (unsigned i = 0; i < n; i++)
        CHECK_OK(x3_ids_push(before, take(c, 2), &err), &err);
}

static void check_block(struct cases *c, x3_ids *expected)
{
    char name[64] = "";
    size_t n_name = take(c, 1);

    CHECK(n_name < sizeof name);
    for (size_t i = 0; i < n_name; i++)
        name[i] = (char)take(c, 1);
    bool parse_special = take(c, 1) == 1;
    x3_tokenizer *t = load(name);
    for (size_t i = 0; i < c->n_texts; i++) {
        take_ids(c, &expected[i]);
        x3_ids ids = encode(t, c->texts[i].data, c->texts[i].n_bytes, parse_special);
        CHECK_MSG(same_ids(ids, expected[i]), "%s, special %d, text %zu \"%.*s\": %zu ids, expected %zu", name,
                  parse_special, i, (int)c->texts[i].n_bytes, c->texts[i].data, ids.n_items, expected[i].n_items);
        x3_ids_free(&ids);
    }
    x3_tokenizer_free(t);
}

X3_TEST(tokenizer_gives_the_ids_of_the_tokenizers_package)
{
    static x3_ids expected[TEXTS_MAX];
    struct cases c;
    size_t n_blocks = 0;

    open_cases(&c);
    for (; c.at < c.n_bytes; n_blocks++)
        check_block(&c, expected);
    CHECK(n_blocks == 22);
    for (size_t i = 0; i < TEXTS_MAX; i++)
        x3_ids_free(&expected[i]);
    free(c.data);
}

X3_TEST(tokenizer_decode_undoes_encode)
{
    /* Those without normalizer and without a space put before the text. */
    static const char *const names[] = {"llama3", "glm4", "o200k", "kimi", "deepseek_v3"};
    struct cases c;
    x3_err err = {0};

    open_cases(&c);
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        x3_tokenizer *t = load(names[k]);
        for (size_t i = 0; i < c.n_texts; i++) {
            x3_text buffer = {0};
            x3_view repaired = c.texts[i];
            x3_ids ids = encode(t, repaired.data, repaired.n_bytes, i % 2 == 0);
            x3_text text = decode(t, ids, false);
            CHECK_OK(x3_utf8_repair(&repaired, &buffer, &err), &err);
            CHECK_MSG(text.n_items == repaired.n_bytes && memcmp(text.items, repaired.data, text.n_items) == 0,
                      "%s: \"%s\" instead of \"%.*s\"", names[k], text.items, (int)repaired.n_bytes, repaired.data);
            x3_ids_free(&ids);
            x3_text_free(&text);
            x3_text_free(&buffer);
        }
        x3_tokenizer_free(t);
    }
    free(c.data);
}

X3_TEST(tokenizer_max_ids_gives_the_first_ids_and_appends_them)
{
    static const char text[] = "The river <|im_start|> turned grey, 12 times; its name wasn't known.";
    x3_tokenizer *t = load("qwen2");
    x3_ids all = encode(t, text, strlen(text), true), some = {0};
    x3_err err = {0};

    CHECK(all.n_items > 10);
    for (size_t n = 1; n <= all.n_items + 1; n++) {
        some.n_items = 0;
        CHECK_OK(x3_ids_push(&some, 7, &err), &err);
        CHECK_OK(x3_tokenizer_encode(t, text, strlen(text), true, n, &some, &err), &err);
        CHECK(some.n_items == 1 + x3_min_size(n, all.n_items) && some.items[0] == 7);
        CHECK(memcmp(some.items + 1, all.items, (some.n_items - 1) * sizeof *all.items) == 0);
    }
    x3_ids_free(&all);
    x3_ids_free(&some);
    x3_tokenizer_free(t);
}

X3_TEST(tokenizer_answers_questions_about_tokens)
{
    x3_tokenizer *t = load("llama3"), *deepseek = load("deepseek_v3");
    const x3_ids *before, *after;
    uint32_t begin, end, space_the;

    CHECK(x3_tokenizer_id(t, "<|begin_of_text|>", &begin) && begin == 560);
    CHECK(x3_tokenizer_id(t, "<|eot_id|>", &end) && x3_tokenizer_n_vocab(t) == end + 1);
    CHECK(x3_tokenizer_is_special(t, begin) && !x3_tokenizer_is_special(t, 0) && !x3_tokenizer_is_special(t, 99999));
    CHECK(x3_tokenizer_id(t, "\xC4\xA0t", &space_the) && !x3_tokenizer_id(t, " t", &end));
    x3_view bytes = x3_tokenizer_token_bytes(t, space_the);
    CHECK(bytes.n_bytes == 2 && memcmp(bytes.data, " t", 2) == 0);
    CHECK(x3_tokenizer_token_bytes(t, x3_tokenizer_n_vocab(t)).data == NULL);
    bytes = x3_tokenizer_token_bytes(deepseek, 0); /* characters outside the byte-level alphabet stand for themselves */
    CHECK(bytes.n_bytes == strlen("<｜begin▁of▁sentence｜>") && memcmp(bytes.data, "<｜begin▁", 12) == 0);
    x3_tokenizer_template(t, &before, &after);
    CHECK(before->n_items == 1 && before->items[0] == begin && after->n_items == 0);
    x3_tokenizer_template(deepseek, &before, &after);
    CHECK(before->n_items == 0 && after->n_items == 0);
    x3_tokenizer_free(t);
    x3_tokenizer_free(deepseek);
}

X3_TEST(tokenizer_decode_skips_special_tokens_and_ids_without_token)
{
    static const char text[] = "<|im_start|>a<think>b</think><|im_end|>";
    x3_tokenizer *t = load("qwen2");
    x3_ids ids = encode(t, text, strlen(text), true);
    x3_err err = {0};

    CHECK(ids.n_items == 6);
    CHECK_OK(x3_ids_push(&ids, 4000000000u, &err), &err);
    x3_text with = decode(t, ids, false), without = decode(t, ids, true);
    CHECK(strcmp(with.items, text) == 0 && strcmp(without.items, "a<think>b</think>") == 0);
    x3_text_free(&with);
    x3_text_free(&without);
    x3_ids_free(&ids);
    x3_tokenizer_free(t);
}

X3_TEST(tokenizer_takes_any_bytes)
{
    static const char *const names[] = {"qwen2", "deepseek_v3", "smollm", "gpt2", "flags", "behaviors"};
    x3_tokenizer *t[6];
    x3_rng rng;
    char soup[300];

    x3_rng_init(&rng, 1, "byte soup");
    for (size_t k = 0; k < 6; k++)
        t[k] = load(names[k]);
    for (size_t round = 0; round < 3000; round++) {
        size_t n = x3_rng_next(&rng) % sizeof soup;
        unsigned mask = round % 3 == 0 ? 0xFF : round % 3 == 1 ? 0x7F : 0x9F;
        for (size_t i = 0; i < n; i++)
            soup[i] = (char)(x3_rng_next(&rng) & mask);
        x3_ids ids = encode(t[round % 6], soup, n, true);
        for (size_t i = 0; i < ids.n_items; i++)
            CHECK(x3_tokenizer_token_bytes(t[round % 6], ids.items[i]).data != NULL);
        x3_ids_free(&ids);
    }
    for (size_t k = 0; k < 6; k++)
        x3_tokenizer_free(t[k]);
}

/* One or two characters repeated, a megabyte of the first three: one pre-token, or very many. Seconds in linear time,
 * hours in quadratic. */
X3_TEST(tokenizer_takes_long_runs_in_linear_time)
{
    static const char *const units[] = {"a", "A", " ", "\n", " \t", "7", "!", "\xCC\x81\xCC\xA3", "\xE6\xB2\xB3",
                                        "\xFF", "'s"};
    static const char *const names[] = {"qwen2", "kimi", "deepseek_v3", "smollm", "behaviors"};
    size_t n = (size_t)1 << 20;
    char *text = malloc(n + 1);

    CHECK(text != NULL);
    for (size_t k = 0; k < sizeof names / sizeof names[0]; k++) {
        x3_tokenizer *t = load(names[k]);
        for (size_t u = 0; u < sizeof units / sizeof units[0]; u++) {
            size_t n_unit = strlen(units[u]), n_text = (u < 3 ? n : n / 8) / n_unit * n_unit;
            for (size_t i = 0; i < n_text; i++)
                text[i] = units[u][i % n_unit];
            text[n_text] = 'x'; /* the run does not end the text */
            x3_ids ids = encode(t, text, n_text + 1, true);
            x3_text back = decode(t, ids, true);
            if (k < 3 && (unsigned char)units[u][0] < 0x80)
                CHECK(back.n_items == n_text + 1 && memcmp(back.items, text, n_text + 1) == 0);
            x3_text_free(&back);
            x3_ids_free(&ids);
        }
        x3_tokenizer_free(t);
    }
    free(text);
}

struct job {
    const x3_tokenizer *t;
    const struct cases *c;
    uint64_t hash;
};

static void *encode_all(void *argument)
{
    struct job *job = argument;
    x3_ids ids = {0};

    for (size_t i = 0; i < 20 * job->c->n_texts; i++) {
        x3_view text = job->c->texts[i % job->c->n_texts];
        if (x3_tokenizer_encode(job->t, text.data, text.n_bytes, true, 0, &ids, NULL) != X3_OK)
            return NULL;
    }
    job->hash = x3_hash(ids.items, ids.n_items * sizeof *ids.items);
    x3_ids_free(&ids);
    return NULL;
}

X3_TEST(tokenizer_serves_two_threads_at_once)
{
    x3_tokenizer *t = load("flags");
    struct cases c;
    struct job jobs[2];
    pthread_t threads[2];

    open_cases(&c);
    for (size_t i = 0; i < 2; i++) {
        jobs[i] = (struct job){t, &c, 0};
        CHECK(pthread_create(&threads[i], NULL, encode_all, &jobs[i]) == 0);
    }
    for (size_t i = 0; i < 2; i++)
        CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(jobs[0].hash != 0 && jobs[0].hash == jobs[1].hash);
    x3_tokenizer_free(t);
    free(c.data);
}

/* ---- files that are refused ---- */

struct parts {
    const char *added, *normalizer, *pre, *post, *decoder, *options, *vocab, *merges;
};

static const struct parts good = {
    .added = "[{\"id\":97,\"content\":\"<s>\",\"special\":true}]",
    .normalizer = "{\"type\":\"NFC\"}",
    .pre = "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}",
    .post = "null",
    .decoder = "{\"type\":\"ByteLevel\"}",
    .options = "\"type\":\"BPE\",",
    .vocab = "",
    .merges = "[\"a b\"]",
};

/* A tokenizer.json whose vocabulary is printable ASCII, space, newline and "ab" (ids 0 to 96), and parts.vocab. */
static char *write_json(struct parts p)
{
    const char *text[] = {p.added, p.normalizer, p.pre, p.post, p.decoder, p.options};
    const char *defaults[] = {good.added, good.normalizer, good.pre, good.post, good.decoder, good.options};
    char vocab[2000] = "\"\xC4\xA0\":94,\"\xC4\x8A\":95,\"ab\":96", *json = NULL;
    x3_err err = {0};

    for (int c = '!'; c <= '~'; c++) {
        size_t n = strlen(vocab);
        snprintf(vocab + n, sizeof vocab - n, ",\"%s%c\":%d", c == '"' || c == '\\' ? "\\" : "", c, c - '!');
    }
    for (size_t i = 0; i < 6; i++)
        if (text[i] == NULL)
            text[i] = defaults[i];
    CHECK_OK(x3_asprintf(&json, &err,
                         "{\"version\":\"1.0\",\"added_tokens\":%s,\"normalizer\":%s,\"pre_tokenizer\":%s,"
                         "\"post_processor\":%s,\"decoder\":%s,\"model\":{%s\"vocab\":{%s%s},\"merges\":%s}}",
                         text[0], text[1], text[2], text[3], text[4], text[5], vocab, p.vocab == NULL ? "" : p.vocab,
                         p.merges == NULL ? good.merges : p.merges), &err);
    return json;
}

static const struct {
    struct parts parts;
    x3_status status;
    const char *message;
} refused[] = {
    {{.options = "\"type\":\"Unigram\","}, X3_ERR_UNSUPPORTED, "F: \"model.type\" is \"Unigram\""},
    {{.options = "\"dropout\":0.1,"}, X3_ERR_UNSUPPORTED, "model.dropout"},
    {{.options = "\"byte_fallback\":true,"}, X3_ERR_UNSUPPORTED, "model.byte_fallback"},
    {{.options = "\"end_of_word_suffix\":\"</w>\","}, X3_ERR_UNSUPPORTED, "model.end_of_word_suffix"},
    {{.options = "\"ignore_merges\":1,"}, X3_ERR_INPUT, "\"ignore_merges\" is a number, expected true or false"},
    {{.options = "\"unk_token\":\"<unk>\","}, X3_ERR_INPUT, "\"model.unk_token\" is \"<unk>\""},
    {{.merges = "[\"a b\",\"a xy\"]"}, X3_ERR_INPUT, "model.merges[1]: token \"xy\" is not in model.vocab"},
    {{.merges = "[[\"a\",\"c\"]]"}, X3_ERR_INPUT, "model.merges[0]: token \"ac\" is not in model.vocab"},
    {{.merges = "[\"ab\"]"}, X3_ERR_INPUT, "model.merges[0]: \"ab\" is not two tokens"},
    {{.merges = "[\"a b c\"]"}, X3_ERR_INPUT, "model.merges[0]: \"a b c\" is not two tokens"},
    {{.merges = "[[\"a\",\"b\",\"c\"]]"}, X3_ERR_INPUT, "model.merges[0]: neither a string nor"},
    {{.merges = "[7]"}, X3_ERR_INPUT, "model.merges[0]: neither a string nor"},
    {{.merges = "null"}, X3_ERR_INPUT, "\"model.merges\" is missing"},
    {{.vocab = ",\"abc\":96"}, X3_ERR_INPUT, "id 96 belongs to \"ab\" and to \"abc\""},
    {{.vocab = ",\"abc\":-1"}, X3_ERR_INPUT, "model.vocab: \"abc\" is -1, expected 0 to 4194303"},
    {{.vocab = ",\"abc\":4194304"}, X3_ERR_INPUT, "\"abc\" is 4194304, expected 0 to 4194303"},
    {{.vocab = ",\"abc\":\"97\""}, X3_ERR_INPUT, "\"abc\" is a string, expected a whole number"},
    {{.vocab = ",\"ab\":97"}, X3_ERR_INPUT, "key \"ab\" stands twice"},
    {{.vocab = ",\"\xFF\":97"}, X3_ERR_INPUT, "a byte that is not UTF-8"},
    {{.added = "{}"}, X3_ERR_INPUT, "\"added_tokens\" is no list"},
    {{.added = "[5]"}, X3_ERR_INPUT, "added_tokens[0]: no object"},
    {{.added = "[{\"id\":97}]"}, X3_ERR_INPUT, "added_tokens[0]: \"content\" is missing"},
    {{.added = "[{\"id\":97,\"content\":\"\"}]"}, X3_ERR_INPUT, "added_tokens[0]: \"content\" is empty"},
    {{.added = "[{\"id\":98,\"content\":\"<s>\"}]"}, X3_ERR_INPUT, "has id 98, by the order of the file it is 97"},
    {{.added = "[{\"id\":5,\"content\":\"<s>\"}]"}, X3_ERR_INPUT, "id 5 of \"<s>\" is that of \"&\" in model.vocab"},
    {{.added = "[{\"id\":97,\"content\":\"ab\"}]"}, X3_ERR_INPUT, "\"ab\" has id 97, by model.vocab it is 96"},
    {{.added = "[{\"id\":97,\"content\":\"<s>\"},{\"id\":98,\"content\":\"<s>\"}]"}, X3_ERR_INPUT,
     "ids 97 and 98 are both \"<s>\""},
    {{.added = "[{\"id\":97,\"content\":\"<s>\",\"lstrip\":\"no\"}]"}, X3_ERR_INPUT, "\"lstrip\" is a string"},
    {{.normalizer = "{\"type\":\"NFKC\"}"}, X3_ERR_UNSUPPORTED, "normalizer: \"type\" is \"NFKC\""},
    {{.normalizer = "{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Lowercase\"}]}"}, X3_ERR_UNSUPPORTED,
     "normalizer: \"type\" is \"Lowercase\""},
    {{.normalizer = "{\"type\":\"Sequence\"}"}, X3_ERR_INPUT, "normalizer: \"normalizers\" is missing"},
    {{.normalizer = "\"NFC\""}, X3_ERR_INPUT, "\"normalizer\" is no object"},
    {{.pre = "null"}, X3_ERR_UNSUPPORTED, "pre_tokenizer: no ByteLevel"},
    {{.pre = "{\"type\":\"Metaspace\"}"}, X3_ERR_UNSUPPORTED, "pre_tokenizer: \"type\" is \"Metaspace\""},
    {{.pre = "{\"type\":\"Digits\"}"}, X3_ERR_UNSUPPORTED, "no ByteLevel"},
    {{.pre = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"ByteLevel\"},{\"type\":\"Digits\"}]}"},
     X3_ERR_UNSUPPORTED, "pre_tokenizer.pretokenizers[1]: Digits follows ByteLevel"},
    {{.pre = "{\"type\":\"Sequence\",\"pretokenizers\":[{\"type\":\"Split\",\"pattern\":{\"Regex\":\"(a\"},"
             "\"behavior\":\"Isolated\"},{\"type\":\"ByteLevel\"}]}"}, X3_ERR_INPUT,
     "F: pre_tokenizer.pretokenizers[0]: pattern \"(a\": a group is not closed, at byte 2"},
    {{.pre = "{\"type\":\"Split\",\"pattern\":{},\"behavior\":\"Isolated\"}"}, X3_ERR_INPUT,
     "one of \"Regex\" and \"String\""},
    {{.pre = "{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":\"Sideways\"}"}, X3_ERR_UNSUPPORTED,
     "\"behavior\" is \"Sideways\""},
    {{.post = "{\"type\":\"BertProcessing\"}"}, X3_ERR_UNSUPPORTED, "post_processor: \"type\" is \"BertProcessing\""},
    {{.post = "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<x>\"}}],"
              "\"special_tokens\":{}}"}, X3_ERR_INPUT, "\"<x>\" has no ids"},
    {{.post = "{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":\"<x>\"}}],"
              "\"special_tokens\":{\"<x>\":{\"ids\":[98]}}}"}, X3_ERR_INPUT,
     "special_tokens.ids\" is 98, expected 0 to 97"},
    {{.post = "{\"type\":\"TemplateProcessing\",\"single\":[],\"special_tokens\":{}}"}, X3_ERR_UNSUPPORTED, "0 times"},
    {{.decoder = "{\"type\":\"Metaspace\"}"}, X3_ERR_UNSUPPORTED, "decoder: \"type\" is \"Metaspace\""},
};

X3_TEST(tokenizer_refuses_files_that_contradict_themselves)
{
    x3_tokenizer *t;
    x3_err err = {0};
    char *json = write_json(good);

    CHECK_OK(x3_tokenizer_parse(&t, json, strlen(json), "F", &err), &err);
    CHECK(x3_tokenizer_n_vocab(t) == 98);
    x3_tokenizer_free(t);
    free(json);
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; i++) {
        json = write_json(refused[i].parts);
        x3_status rc = x3_tokenizer_parse(&t, json, strlen(json), "F", &err);
        CHECK_MSG(rc == refused[i].status && t == NULL, "case %zu: status %d, %s", i, rc, err.text);
        CHECK_FAILS(rc, &err, refused[i].message);
        free(json);
    }
    CHECK_FAILS(x3_tokenizer_parse(&t, "{}", 2, "F", &err), &err, "no ByteLevel");
    CHECK_FAILS(x3_tokenizer_parse(&t, "[]", 2, "F", &err), &err, "not a JSON object");
    CHECK_FAILS(x3_tokenizer_load(&t, DATA "/none.json", &err), &err, "none.json");
}

X3_TEST(tokenizer_refuses_a_vocabulary_without_printable_ascii)
{
    static const char json[] =
        "{\"pre_tokenizer\":{\"type\":\"ByteLevel\"},\"model\":{\"vocab\":{\"a\":0},\"merges\":[]}}";
    static const char bare[] = "{\"pre_tokenizer\":{\"type\":\"ByteLevel\"}}";
    x3_tokenizer *t;
    x3_err err = {0};

    CHECK_FAILS(x3_tokenizer_parse(&t, json, strlen(json), "F", &err), &err, "byte 0x0A, in the byte-level alphabet");
    CHECK_FAILS(x3_tokenizer_parse(&t, bare, strlen(bare), "F", &err), &err, "\"model\" is missing");
}

X3_TEST(tokenizer_survives_damaged_files)
{
    x3_rng rng;
    char *json = NULL, *copy = NULL;
    size_t n, n_accepted = 0;
    x3_err err = {0};

    CHECK_OK(x3_read_file(&json, &n, DATA "/flags.json", 1 << 24, &err), &err);
    copy = malloc(n);
    CHECK(copy != NULL);
    x3_rng_init(&rng, 2, "damage");
    for (size_t round = 0; round < 400; round++) {
        x3_tokenizer *t;
        memcpy(copy, json, n);
        for (size_t k = 0; k <= round % 3; k++)
            copy[x3_rng_next(&rng) % n] = "\"\\[]{},:01a-\xC3"[x3_rng_next(&rng) % 13];
        if (x3_tokenizer_parse(&t, copy, n, "F", &err) == X3_OK) {
            x3_ids ids = encode(t, "a <|end|> caf\xC3\xA9", 15, true);
            x3_ids_free(&ids);
            x3_tokenizer_free(t);
            n_accepted++;
        } else {
            CHECK(t == NULL && err.text[0] != '\0');
            err = (x3_err){0};
        }
    }
    CHECK(n_accepted > 0 && n_accepted < 400);
    free(copy);
    free(json);
}

/* ---- regular expressions and Unicode ---- */

static const struct {
    const char *pattern, *text;
    int start, end; /* of the first match; start -1: none */
} matches[] = {
    {"\\s+", "a\xE1\xA0\x8E\xC2\x85z", 4, 6},             /* U+180E is no space, U+0085 is */
    {"[^\\S\\n]+", "a\xE1\xA0\x8E \n", 4, 5},
    {"\\h+", "x \tbeef", 3, 7},                            /* hexadecimal digits */
    {"\\v", "\n\x0B", 1, 2},                               /* the one character */
    {"\\w+", "-\xC2\xB2", 1, 3},                           /* superscript two, outside a class only */
    {"[\\w]+", "-\xC2\xB2", -1, -1},
    {"\\p{Han}+", "\xE3\x80\x81\xE6\xB2\xB3", 3, 6},      /* U+3001 has Han in its extensions only */
    {"\\p{^L}", "ab1", 2, 3},
    {"\\p{N}{1,2}+", "12345", 0, 5},                       /* repeated, not possessive */
    {"a{,2}b", "aaab", 1, 4},
    {"a{2}?b", "aab", 0, 3},
    {"x{1,y", "x{1,y", 0, 5},
    {"[a-z&&[^aeiou]]+", "aeixyzo", 3, 6},
    {"[^a&&[ab]]", "ab", 1, 2},
    {"[\\p{Lu}\\p{Lo}&&[^\\p{Han}]]+", "\xE6\xB2\xB3" "AB", 3, 5},
    {"[a[b-d]\\H]+", "e-f", 1, 2},
    {"[]a]+", "x]a", 1, 3},
    {"a(?i)b|c", "C", -1, -1},                             /* (?i) takes the alternation with it */
    {"a(?i)b|c", "aC", 0, 2},
    {"(?i:'s|'LL)", "x'\xC5\xBF", 1, 4},                   /* long s */
    {"(?m:.)", "\n", 0, 1},
    {"^b$", "a\nb\nc", 2, 3},
    {"\\u00e9\\x{65}", "\xC3\xA9" "e", 0, 3},
    {"\\bfoo\\b", "xfoo foo", 5, 8},
    {"(?<n>a)(?#note)b", "ab", 0, 2},
    {"\\R", "\r\n", 0, 2},
    {"(?<=a)b++|\\Ac\\z", "abb", 1, 3},
};

static const struct {
    const char *pattern, *message;
} bad_patterns[] = {
    {"(a", "a group is not closed, at byte 2"},
    {"a)", "a closing parenthesis has no partner"},
    {"[a", "a class is not closed"},
    {"[b-a]", "a range is empty"},
    {"a|*", "there is nothing to repeat"},
    {"a{3,2}", "bounds of a repetition"},
    {"(a)\\1", "this escape"},
    {"\\K", "this escape"},
    {"(?~a)", "this kind of group"},
    {"(*FAIL)", "a callout"},
    {"[[:alpha:]]", "this POSIX bracket"},
    {"\\p{Nonsense}", "PCRE2 says"},
    {"\\p{", "a property name is malformed"},
    {"(?i:ss)", "whose case folds"},
    {"(?i:[^a])", "a negated class inside"},
    {"(?<=a*)b", "PCRE2 says"},
    {"\\", "ends in a backslash"},
    {"((?", "this kind of group"},      /* these two: libFuzzer, read past the end of the pattern */
    {"(?i:a", "a group is not closed"},
    {"\xFF", "not valid UTF-8"},
};

X3_TEST(regex_means_what_oniguruma_means)
{
    x3_regex_scratch scratch = {0};
    x3_regex *regex;
    x3_err err = {0};
    size_t start, end;
    bool found;

    for (size_t i = 0; i < sizeof matches / sizeof matches[0]; i++) {
        const char *pattern = matches[i].pattern, *text = matches[i].text;
        CHECK_OK(x3_regex_compile(&regex, pattern, strlen(pattern), false, "F", &err), &err);
        CHECK_OK(x3_regex_find(regex, &scratch, text, strlen(text), 0, &found, &start, &end, &err), &err);
        CHECK_MSG(found == (matches[i].start >= 0), "%s: found %d", pattern, found);
        CHECK_MSG(!found || (start == (size_t)matches[i].start && end == (size_t)matches[i].end),
                  "%s: %zu to %zu, expected %d to %d", pattern, start, end, matches[i].start, matches[i].end);
        x3_regex_free(regex);
    }
    for (size_t i = 0; i < sizeof bad_patterns / sizeof bad_patterns[0]; i++) {
        const char *pattern = bad_patterns[i].pattern;
        CHECK_FAILS(x3_regex_compile(&regex, pattern, strlen(pattern), false, "F", &err), &err,
                    bad_patterns[i].message);
        CHECK(regex == NULL);
    }
    x3_regex_scratch_free(&scratch);
}

X3_TEST(regex_gives_up_on_endless_backtracking)
{
    static const char pattern[] = "(?:(?:a|aa)+)+[bd]";
    static const char text[] = "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaac";
    x3_regex_scratch scratch = {0};
    x3_regex *regex;
    x3_err err = {0};
    size_t start, end;
    bool found;

    CHECK_OK(x3_regex_compile(&regex, pattern, strlen(pattern), false, "F", &err), &err);
    CHECK_FAILS(x3_regex_find(regex, &scratch, text, strlen(text), 0, &found, &start, &end, &err), &err, "match limit");
    x3_regex_free(regex);
    x3_regex_scratch_free(&scratch);
}

X3_TEST(unicode_repair_and_composition)
{
    static const struct {
        const char *text, *expected;
    } cases[] = {
        {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", "\uFFFD\uFFFD\uFFFD\uFFFDA"}, /* Unicode 15, table 3-11 */
        {"\xED\xA0\x80", "\uFFFD\uFFFD\uFFFD"},
        {"e\u0323\u0301 e\u0301\u0323", "\u1EB9\u0301 \u1EB9\u0301"},
        {"\u212B\u1E9B\u0323\u0958", "\u00C5\u1E9B\u0323\u0915\u093C"},
        {"\u1112\u1161\u11AB\uC384\u11A7", "\uD55C\uC384\u11A7"},
        {"a\u07FD\u0334", "a\u07FD\u0334"}, /* no mark yet in Unicode 9 */
        {"plain", "plain"},
    };
    x3_err err = {0};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        x3_view view = {cases[i].text, strlen(cases[i].text)};
        x3_text repaired = {0}, composed = {0};
        CHECK_OK(x3_utf8_repair(&view, &repaired, &err), &err);
        CHECK_OK(x3_nfc(&view, &composed, &err), &err);
        CHECK_MSG(view.n_bytes == strlen(cases[i].expected) && memcmp(view.data, cases[i].expected, view.n_bytes) == 0,
                  "case %zu: \"%.*s\"", i, (int)view.n_bytes, view.data);
        x3_text_free(&repaired);
        x3_text_free(&composed);
    }
}
