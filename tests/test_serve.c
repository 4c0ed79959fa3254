/* The server through a socket: replies, streams, what is refused. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/io.h"
#include "formats/json.h"
#include "tests/http_client.h"

#define MODEL "tests/data/models/tiny-qwen3"
#define CHAT "/v1/chat/completions"
#define TEXT "/v1/completions"
#define SEA "\"messages\":[{\"role\":\"user\",\"content\":\"What is the sea?\"}]"

static x3_test_server at;

static void open_plain(void)
{
    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
}

static void get(const char *path, int status, const char *part)
{
    x3_http_answer a;

    x3_http_request(at.port, "GET", path, "", NULL, &a);
    CHECK_MSG(a.status == status && strstr(a.body, part) != NULL, "%s: %d, %s lacks %s", path, a.status, a.body, part);
    x3_http_answer_free(&a);
}

/* The text of a path in the answer to a request. */
static void expect(const char *path, const char *body, const char *member, const char *expected)
{
    cJSON *json = x3_http_post(at.port, path, body, 200);
    const char *text = x3_json_text_at(json, member);

    CHECK_MSG(strcmp(text, expected) == 0, "%s gives \"%s\", expected \"%s\"", body, text, expected);
    cJSON_Delete(json);
}

X3_TEST(serve_answers_what_needs_no_reply)
{
    open_plain();
    get("/health", 200, "{\"status\":\"ok\"}");
    get("/v1/models", 200, "\"id\":\"tiny\"");
    get("/props", 200, "\"stop_token_ids\":[4093,4095]");
    get("/metrics", 200, "# TYPE exl3_requests_total counter\nexl3_requests_total 0\n");
    get("/", 200, "<title>exl3-serve</title>");
    get("/nope", 404, "\"code\":\"not_found\"");
    get(CHAT, 405, "only takes POST");
    cJSON *json = x3_http_post(at.port, "/tokenize", "{\"content\":\"hi<|im_end|>\"}", 200);
    CHECK(cJSON_GetArraySize(x3_json_at(json, "tokens")) == 3 && x3_json_at(json, "tokens.2")->valueint == 4095);
    cJSON_Delete(json);
    json = x3_http_post(at.port, "/tokenize", "{\"content\":\"hi<|im_end|>\",\"parse_special\":false}", 200);
    CHECK(cJSON_GetArraySize(x3_json_at(json, "tokens")) > 4);
    cJSON_Delete(json);
    expect("/detokenize", "{\"tokens\":[82,1381,4095]}", "content", "system<|im_end|>");
    cJSON_Delete(x3_http_post(at.port, "/detokenize", "{\"tokens\":[4096]}", 400));
    cJSON_Delete(x3_http_post(at.port, "/tokenize", "{\"content\":5}", 400));
    x3_test_server_close(&at);
}

X3_TEST(serve_gives_the_same_text_whole_and_in_events)
{
    char finish[16];

    open_plain();
    cJSON *json = x3_http_post(at.port, CHAT, "{" SEA ",\"temperature\":0,\"model\":\"tiny\"}", 200);
    CHECK(strcmp(x3_json_text_at(json, "object"), "chat.completion") == 0);
    CHECK(strcmp(x3_json_text_at(json, "choices.0.message.role"), "assistant") == 0);
    CHECK(strcmp(x3_json_text_at(json, "choices.0.finish_reason"), "stop") == 0);
    CHECK(x3_json_at(json, "usage.prompt_tokens")->valueint == 16 && x3_json_at(json, "usage.total_tokens")->valueint ==
          16 + x3_json_at(json, "usage.completion_tokens")->valueint);
    CHECK(x3_json_at(json, "timings.predicted_n")->valueint == x3_json_at(json, "usage.completion_tokens")->valueint);
    char *text = x3_http_stream(at.port, CHAT, "{" SEA ",\"temperature\":0,\"stream\":true}", 0, finish);
    CHECK(strcmp(text, x3_json_text_at(json, "choices.0.message.content")) == 0 && text[0] != '\0' && strcmp(finish, "stop") == 0);
    free(text);
    cJSON_Delete(json);
    json = x3_http_post(at.port, TEXT, "{\"prompt\":\"Once upon a\",\"temperature\":0,\"max_tokens\":9}", 200);
    CHECK(strcmp(x3_json_text_at(json, "object"), "text_completion") == 0 && x3_json_at(json, "usage.completion_tokens")->valueint == 9);
    text = x3_http_stream(at.port, TEXT, "{\"prompt\":\"Once upon a\",\"temperature\":0,\"max_tokens\":9,\"stream\":true}", 0, finish);
    CHECK(strcmp(text, x3_json_text_at(json, "choices.0.text")) == 0 && strcmp(finish, "length") == 0);
    free(text);
    cJSON_Delete(json);
    x3_test_server_close(&at);
}

X3_TEST(serve_ends_a_stream_with_usage_only_when_asked)
{
    x3_http_answer a;

    open_plain();
    x3_http_request(at.port, "POST", CHAT, "", "{" SEA ",\"stream\":true,\"max_tokens\":3}", &a);
    CHECK(a.status == 200 && strstr(a.body, "usage") == NULL && strstr(a.body, "\"role\":\"assistant\"") != NULL);
    x3_http_answer_free(&a);
    x3_http_request(at.port, "POST", CHAT, "", "{" SEA ",\"stream\":true,\"max_tokens\":3,\"stream_options\":{\"include_usage\":true}}", &a);
    CHECK(strstr(a.body, "\"choices\":[],\"usage\":{\"prompt_tokens\":16,\"completion_tokens\":3,\"total_tokens\":19") != NULL);
    CHECK(strstr(a.body, "\"usage\":null") != NULL);
    x3_http_answer_free(&a);
    x3_test_server_close(&at);
}

/* A copy of the demo model whose generation_config.json names other stop tokens. */
static void copy_model(const char *dir, const char *generation_config)
{
    static const char *const files[] = {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"};
    x3_err err = {0};

    for (size_t i = 0; i < 4; i++)
        CHECK_OK(x3_copy_file(x3_test_path(MODEL, files[i]), x3_test_path(dir, files[i]), NULL, &err), &err);
    CHECK_OK(x3_write_file(x3_test_path(dir, "generation_config.json"), generation_config, strlen(generation_config), &err), &err);
}

X3_TEST(serve_ends_a_turn_at_a_token_that_only_generation_config_names)
{
    char dir[256];

    snprintf(dir, sizeof dir, "%s", x3_test_temp_dir());
    open_plain();
    cJSON *with = x3_http_post(at.port, CHAT, "{" SEA ",\"temperature\":0,\"max_tokens\":60}", 200);
    x3_test_server_close(&at);
    copy_model(dir, "{\"eos_token_id\":[4093]}");
    x3_test_server_open(&at, dir, NULL, (x3_engine_options){0}, (x3_server_options){0});
    cJSON *without = x3_http_post(at.port, CHAT, "{" SEA ",\"temperature\":0,\"max_tokens\":60}", 200);
    x3_test_server_close(&at);
    int n_with = x3_json_at(with, "usage.completion_tokens")->valueint, n_without = x3_json_at(without, "usage.completion_tokens")->valueint;
    CHECK_MSG(strcmp(x3_json_text_at(with, "choices.0.finish_reason"), "stop") == 0 && n_with < n_without, "%d and %d tokens", n_with,
              n_without);
    const char *text = x3_json_text_at(with, "choices.0.message.content"), *longer = x3_json_text_at(without, "choices.0.message.content");
    CHECK_MSG(strncmp(longer, text, strlen(text)) == 0 && strlen(longer) > strlen(text), "\"%s\" and \"%s\"", text, longer);
    cJSON_Delete(with);
    cJSON_Delete(without);
}

X3_TEST(serve_stop_strings_end_a_reply_before_them)
{
    char finish[16], body[400];

    open_plain();
    cJSON *json = x3_http_post(at.port, TEXT, "{\"prompt\":\"Once upon a\",\"temperature\":0,\"max_tokens\":24}", 200);
    const char *whole = x3_json_text_at(json, "choices.0.text");
    size_t n = strlen(whole), from = n / 2, length = 7; /* in the middle of tokens, over their borders */
    CHECK(n > 30);
    while ((whole[from] & 0xC0) == 0x80 || whole[from] == '"' || whole[from] == '\\')
        from++;
    char stop[8] = {0};
    memcpy(stop, whole + from, length);
    CHECK(strpbrk(stop, "\"\\\n") == NULL);
    size_t expected = (size_t)(strstr(whole, stop) - whole);
    snprintf(body, sizeof body, "{\"prompt\":\"Once upon a\",\"temperature\":0,\"max_tokens\":24,\"stop\":[\"%s\",\"@@\"],\"stream\":true}", stop);
    char *text = x3_http_stream(at.port, TEXT, body, 0, finish);
    CHECK_MSG(strlen(text) == expected && strncmp(text, whole, expected) == 0 && strcmp(finish, "stop") == 0, "\"%s\" of \"%s\" at \"%s\"",
              text, whole, stop);
    free(text);
    cJSON_Delete(json);
    x3_test_server_close(&at);
}

X3_TEST(serve_samples_n_replies_that_the_seed_repeats)
{
    static const char body[] = "{\"prompt\":\"The old man\",\"n\":3,\"seed\":11,\"temperature\":1.5,\"top_k\":0,\"max_tokens\":12,\"top_p\":1}";

    open_plain();
    cJSON *a = x3_http_post(at.port, TEXT, body, 200), *b = x3_http_post(at.port, TEXT, body, 200);
    CHECK(cJSON_GetArraySize(x3_json_at(a, "choices")) == 3 && x3_json_at(a, "usage.completion_tokens")->valueint == 36);
    for (int i = 0; i < 3; i++) {
        char path[32];
        snprintf(path, sizeof path, "choices.%d.text", i);
        CHECK(strcmp(x3_json_text_at(a, path), x3_json_text_at(b, path)) == 0);
        CHECK(i == 0 || strcmp(x3_json_text_at(a, "choices.0.text"), x3_json_text_at(a, path)) != 0);
    }
    cJSON_Delete(a);
    cJSON_Delete(b);
    expect(TEXT, "{\"prompt\":[\"a\",\"Once upon a\"],\"temperature\":0,\"max_tokens\":1,\"echo\":true,\"logit_bias\":{\"70\":100}}", "choices.1.text", "Once upon ag");
    expect(TEXT, "{\"prompt\":[79,78],\"temperature\":0,\"max_tokens\":2,\"echo\":true,\"logit_bias\":{\"70\":100}}", "choices.0.text", "pogg");
    x3_test_server_close(&at);
}

X3_TEST(serve_reports_log_probabilities)
{
    open_plain();
    cJSON *json = x3_http_post(at.port, CHAT, "{" SEA ",\"temperature\":0,\"max_tokens\":3,\"logprobs\":true,\"top_logprobs\":2}", 200);
    CHECK(cJSON_GetArraySize(x3_json_at(json, "choices.0.logprobs.content")) == 3);
    CHECK(strcmp(x3_json_text_at(json, "choices.0.logprobs.content.0.token"), "What") == 0);
    double first = x3_json_at(json, "choices.0.logprobs.content.0.logprob")->valuedouble;
    CHECK(first < 0 && first == x3_json_at(json, "choices.0.logprobs.content.0.top_logprobs.0.logprob")->valuedouble);
    CHECK(first >= x3_json_at(json, "choices.0.logprobs.content.0.top_logprobs.1.logprob")->valuedouble);
    CHECK(x3_json_at(json, "choices.0.logprobs.content.0.bytes.0")->valueint == 'W');
    cJSON_Delete(json);
    json = x3_http_post(at.port, TEXT, "{\"prompt\":\"Once upon a\",\"temperature\":0,\"max_tokens\":4,\"logprobs\":1}", 200);
    CHECK(cJSON_GetArraySize(x3_json_at(json, "choices.0.logprobs.tokens")) == 4);
    size_t offset = (size_t)x3_json_at(json, "choices.0.logprobs.text_offset.3")->valuedouble;
    const char *text = x3_json_text_at(json, "choices.0.text"), *last = x3_json_text_at(json, "choices.0.logprobs.tokens.3");
    CHECK(strcmp(text + offset, last) == 0);
    CHECK(x3_json_at(json, "choices.0.logprobs.token_logprobs.3")->valuedouble < 0);
    cJSON_Delete(json);
    x3_test_server_close(&at);
}

X3_TEST(serve_tells_what_is_too_long_too_large_and_too_much)
{
    char *body;
    x3_http_answer a;
    x3_err err = {0};

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){.max_positions = 64}, (x3_server_options){.max_body = 4000});
    CHECK_OK(x3_asprintf(&body, &err, "{\"prompt\":\"%01000d\"}", 7), &err);
    cJSON *json = x3_http_post(at.port, TEXT, body, 400);
    CHECK(strcmp(x3_json_text_at(json, "error.code"), "context_length_exceeded") == 0 && strcmp(x3_json_text_at(json, "error.param"), "prompt") == 0);
    cJSON_Delete(json);
    free(body);
    CHECK_OK(x3_asprintf(&body, &err, "{\"prompt\":\"%05000d\"}", 7), &err);
    x3_http_request(at.port, "POST", TEXT, "", body, &a);
    CHECK(a.status == 413 || a.status == 0); /* the answer may be lost when the server closes on what it has not read */
    x3_http_answer_free(&a);
    free(body);
    json = x3_http_post(at.port, TEXT, "{\"prompt\":\"a b c d\",\"temperature\":0,\"max_tokens\":1000,\"ignore_eos\":true}", 200);
    CHECK(x3_json_at(json, "usage.total_tokens")->valueint == 64 && strcmp(x3_json_text_at(json, "choices.0.finish_reason"), "length") == 0);
    cJSON_Delete(json);
    x3_test_server_close(&at);
    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){.max_queued = 1, .max_sequences = 1}, (x3_server_options){0});
    json = x3_http_post(at.port, TEXT, "{\"prompt\":\"a\",\"n\":30,\"max_tokens\":400}", 503);
    CHECK(strcmp(x3_json_text_at(json, "error.code"), "overloaded") == 0);
    cJSON_Delete(json);
    cJSON_Delete(x3_http_post(at.port, TEXT, "{\"prompt\":\"a\",\"max_tokens\":2}", 200));
    x3_test_server_close(&at);
}

X3_TEST(serve_asks_for_an_api_key)
{
    static const char *const keys[] = {"sk-first", "sk-second"};
    static const char *const wrong[] = {"", "Authorization: Bearer \r\n", "Authorization: Bearer sk-firs\r\n",
                                        "Authorization: Bearer sk-firstt\r\n", "Authorization: sk-first\r\n", "Authorization: Basic sk-first\r\n"};
    x3_http_answer a;

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){.keys = keys, .n_keys = 2});
    for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
        x3_http_request(at.port, "GET", "/v1/models", wrong[i], NULL, &a);
        CHECK_MSG(a.status == 401 && strstr(a.body, "invalid_api_key") != NULL, "%s: %d", wrong[i], a.status);
        x3_http_answer_free(&a);
    }
    x3_http_request(at.port, "GET", "/v1/models", "Authorization: Bearer sk-second\r\n", NULL, &a);
    CHECK(a.status == 200);
    x3_http_answer_free(&a);
    get("/health", 200, "ok");
    get("/metrics", 401, "invalid_api_key");
    x3_test_server_close(&at);
}

X3_TEST(serve_reads_api_keys_from_a_file)
{
    static const char text[] = "# keys\n\nsk-one\r\nsk-two\n";
    char path[300], **keys;
    x3_err err = {0};
    size_t n;

    snprintf(path, sizeof path, "%s", x3_test_path(x3_test_temp_dir(), "keys"));
    CHECK_OK(x3_write_file(path, text, sizeof text - 1, &err), &err);
    CHECK_OK(x3_server_keys_read(&keys, &n, path, &err), &err);
    CHECK(n == 2 && strcmp(keys[0], "sk-one") == 0 && strcmp(keys[1], "sk-two") == 0);
    x3_server_keys_free(keys, n);
    CHECK_OK(x3_write_file(path, "a b\n", 4, &err), &err);
    CHECK_FAILS(x3_server_keys_read(&keys, &n, path, &err), &err, "key 1 has white space");
    CHECK_OK(x3_write_file(path, "# none\n", 7, &err), &err);
    CHECK_FAILS(x3_server_keys_read(&keys, &n, path, &err), &err, "no API key in it");
}

/* ---- many at once ---- */

#define N_STREAMS 32

struct caller {
    pthread_t thread;
    char body[300], expected[2000], error[200];
    bool leaves; /* in the middle */
};

static void *call(void *arg)
{
    struct caller *c = arg;
    char finish[16], head[300], block[300];

    if (c->leaves) {
        int fd = x3_http_connect(at.port);
        snprintf(head, sizeof head, "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %zu\r\n\r\n", CHAT, strlen(c->body));
        x3_http_send(fd, head, strlen(head));
        x3_http_send(fd, c->body, strlen(c->body));
        if (read(fd, block, sizeof block) < 0)
            snprintf(c->error, sizeof c->error, "no answer");
        close(fd);
        return NULL;
    }
    char *text = x3_http_stream(at.port, CHAT, c->body, 0, finish);
    if (strcmp(text, c->expected) != 0)
        snprintf(c->error, sizeof c->error, "\"%.80s\", alone \"%.80s\"", text, c->expected);
    free(text);
    return NULL;
}

X3_TEST(serve_32_streams_with_clients_that_leave_equal_lone_replies)
{
    static struct caller callers[N_STREAMS];
    static const char *const things[] = {"sea", "old house", "winter", "machine", "river", "letter", "stars"};
    x3_engine_stats stats;
    char finish[16];

    x3_test_skip_if_emulated();
    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){.max_sequences = 12}, (x3_server_options){0});
    for (int i = 0; i < N_STREAMS; i++) {
        struct caller *c = &callers[i];
        memset(c, 0, sizeof *c);
        snprintf(c->body, sizeof c->body, "{\"messages\":[{\"role\":\"user\",\"content\":\"Tell me %d things about the %s.\"}],\"temperature\":0,"
                 "\"max_tokens\":%d,\"stream\":true}", i, things[i % 7], 8 + i % 20);
        char *text = x3_http_stream(at.port, CHAT, c->body, 0, finish);
        CHECK(strlen(text) < sizeof c->expected);
        memcpy(c->expected, text, strlen(text) + 1);
        free(text);
        c->leaves = i % 5 == 2;
    }
    for (int i = 0; i < N_STREAMS; i++)
        CHECK(pthread_create(&callers[i].thread, NULL, call, &callers[i]) == 0);
    for (int i = 0; i < N_STREAMS; i++)
        pthread_join(callers[i].thread, NULL);
    for (int i = 0; i < N_STREAMS; i++)
        CHECK_MSG(callers[i].error[0] == '\0', "stream %d: %s", i, callers[i].error);
    for (int i = 0; i < 200; i++) { /* the last to leave is noticed at its next token */
        x3_engine_stats_read(at.engine, &stats);
        if (stats.n_running == 0 && stats.n_queued == 0)
            break;
        usleep(50000);
    }
    CHECK(stats.n_running == 0 && stats.n_queued == 0 && stats.pages_held == 0 && stats.n_failed == 0);
    x3_test_server_close(&at);
}

X3_TEST(serve_shuts_down_in_the_middle_of_streams)
{
    static const char body[] = "{" SEA ",\"stream\":true,\"ignore_eos\":true,\"max_tokens\":450}";
    char head[300], block[300];
    int fds[4];

    open_plain();
    for (int i = 0; i < 4; i++) {
        fds[i] = x3_http_connect(at.port);
        snprintf(head, sizeof head, "POST %s HTTP/1.1\r\nHost: localhost\r\nContent-Length: %zu\r\n\r\n", CHAT, strlen(body));
        x3_http_send(fds[i], head, strlen(head));
        x3_http_send(fds[i], body, strlen(body));
        CHECK(read(fds[i], block, sizeof block) > 0);
    }
    x3_test_server_close(&at);
    for (int i = 0; i < 4; i++)
        close(fds[i]);
}
