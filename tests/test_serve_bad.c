/* What the server must refuse or leave, and still answer the next request. */
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "formats/io.h"
#include "formats/json.h"
#include "runtime/serve/server_json.h"
#include "tests/http_client.h"

#define MODEL "tests/data/models/tiny-qwen3"
#define CHAT "/v1/chat/completions"
#define TEXT "/v1/completions"
#define HI "\"messages\":[{\"role\":\"user\",\"content\":\"hi\"}],\"max_tokens\":2"

static x3_test_server at;
static size_t n_refused;

static void good_request(void)
{
    cJSON_Delete(x3_http_post(at.port, CHAT, "{" HI "}", 200));
}

/* A 4xx with an OpenAI error body. */
static void expect_4xx(const char *path, const char *body)
{
    x3_http_answer a;
    cJSON *json;

    x3_http_request(at.port, "POST", path, "", body, &a);
    CHECK_MSG(a.status >= 400 && a.status < 500, "%s %.300s: status %d: %s", path, body, a.status, a.body == NULL ? "" : a.body);
    json = cJSON_Parse(a.body);
    CHECK_MSG(x3_json_text_at(json, "error.message")[0] != '\0' && x3_json_text_at(json, "error.type")[0] != '\0', "%s", a.body);
    cJSON_Delete(json);
    x3_http_answer_free(&a);
    n_refused++;
}

static void open_plain(void)
{
    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){.request_seconds = 2});
    n_refused = 0;
}

X3_TEST(serve_refuses_bodies_that_are_no_request)
{
    static const char whole[] = "{\"messages\":[{\"role\":\"user\",\"content\":\"h\\u00e9 \\\"x\\\"\"}],\"stop\":[\"a\"],\"temperature\":0.5}";
    static const char *const bodies[] = {
        "[]", "null", "5", "\"x\"", "{}", "{\"messages\":null}", "{\"messages\":[]}", "{\"messages\":{}}", "{\"messages\":\"x\"}",
        "{\"messages\":[null]}", "{\"messages\":[[]]}", "{\"messages\":[{}]}", "{\"messages\":[{\"role\":\"user\"}]}",
        "{\"messages\":[{\"content\":\"x\"}]}", "{\"messages\":[{\"role\":\"user\",\"content\":null}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":5}]}", "{\"messages\":[{\"role\":\"user\",\"content\":{}}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[]}]}", "{\"messages\":[{\"role\":\"user\",\"content\":[5]}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{\"url\":\"u\"}}]}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":[{\"type\":\"text\"}]}]}",
        "{\"messages\":[{\"role\":\"wizard\",\"content\":\"x\"}]}", "{\"messages\":[{\"role\":5,\"content\":\"x\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"x\",\"tool_calls\":[]}]}",
        "{\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":5}]}",
        "{\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":{}}]}]}",
        "{\"messages\":[{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":5}}]}]}",
        "{" HI ",\"messages\":[]}", "{" HI "} {}", "{" HI ",\"x\xFF\":1}", "{" HI ",\"user\":\"\xC3(\"}", "{" HI ",\"user\":\"\xED\xA0\x80\"}",
        "{" HI ",\"user\":\"\\ud800\"}", "{" HI ",\"user\":\"\\u0000\"}", "{" HI ",\"user\":\"a\tb\"}", "{" HI ",\"temperature\":1e999}",
        "{" HI ",\"seed\":1e400}", "{" HI ",\"seed\":99999999999999999999}", "{" HI ",\"unknown_option\":1}", "{" HI ",\"model\":\"other\"}",
        "{" HI ",\"model\":5}", "{" HI ",\"response_format\":{\"type\":\"json_object\"}}", "{" HI ",\"response_format\":5}",
        "{" HI ",\"tool_choice\":\"required\"}", "{" HI ",\"tool_choice\":{\"type\":\"function\"}}", "{" HI ",\"tools\":5}",
        "{" HI ",\"tools\":[{}]}", "{" HI ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]}", /* the template has none */
        "{" HI ",\"stream_options\":{\"include_usage\":true}}", "{" HI ",\"stream\":true,\"stream_options\":5}",
        "{" HI ",\"top_logprobs\":3}", "{" HI ",\"logit_bias\":{\"x\":1}}", "{" HI ",\"logit_bias\":{\"99999\":1}}",
        "{" HI ",\"logit_bias\":{\"-1\":1}}", "{" HI ",\"logit_bias\":{\"5\":\"1\"}}", "{" HI ",\"logit_bias\":{\"5\":1000}}",
        "{" HI ",\"chat_template_kwargs\":[]}", "{" HI ",\"chat_template_kwargs\":{\"messages\":[]}}", "{" HI ",\"reasoning_format\":\"x\"}",
        "{" HI ",\"stop\":[\"\"]}", "{" HI ",\"stop\":[1]}", "{" HI ",\"stop\":{}}", "{" HI ",\"stop_token_ids\":[\"a\"]}",
        "{" HI ",\"stop_token_ids\":5}", "{" HI ",\"stop\":[\"1\",\"2\",\"3\",\"4\",\"5\",\"6\",\"7\",\"8\",\"9\",\"0\",\"a\",\"b\",\"c\",\"d\",\"e\",\"f\",\"g\"]}",
    };
    char part[sizeof whole];

    open_plain();
    for (size_t i = 0; i < sizeof bodies / sizeof bodies[0]; i++)
        expect_4xx(CHAT, bodies[i]);
    for (size_t n = 0; n < sizeof whole - 1; n++) {
        memcpy(part, whole, n);
        part[n] = '\0';
        expect_4xx(CHAT, part);
    }
    CHECK(n_refused > 130);
    good_request();
    x3_test_server_close(&at);
}

X3_TEST(serve_refuses_options_of_wrong_types_and_ranges)
{
    static const char *const numbers[] = {"temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty",
                                          "top_k", "n", "max_tokens", "seed", "logprobs"};
    static const char *const bad[] = {"\"1\"", "[]", "{}", "true", "-1000", "1e300"};
    static const char *const flags[] = {"stream", "echo", "ignore_eos"};
    char body[200];

    open_plain();
    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        for (size_t j = 0; j < sizeof bad / sizeof bad[0]; j++) {
            if (strcmp(numbers[i], "seed") == 0 && j == 4) /* any whole number is a seed */
                continue;
            snprintf(body, sizeof body, "{\"prompt\":\"a\",\"%s\":%s}", numbers[i], bad[j]);
            expect_4xx(TEXT, body);
        }
    for (size_t i = 0; i < 3; i++)
        for (size_t j = 0; j < 5; j++) {
            snprintf(body, sizeof body, "{\"prompt\":\"a\",\"%s\":%s}", flags[i], j == 3 ? "1" : bad[j]);
            expect_4xx(TEXT, body);
        }
    static const char *const prompts[] = {"null", "5", "{}", "[]", "\"\"", "[\"a\",5]", "[\"\"]", "[-1]", "[1.5]", "[4096]", "[99999999999]",
                                          "[[]]", "[[1],[\"x\"]]", "[null]", "true"};
    for (size_t i = 0; i < sizeof prompts / sizeof prompts[0]; i++) {
        snprintf(body, sizeof body, "{\"prompt\":%s}", prompts[i]);
        expect_4xx(TEXT, body);
    }
    expect_4xx(TEXT, "{\"prompt\":\"a\",\"max_tokens\":0}");
    expect_4xx(TEXT, "{\"prompt\":\"a\",\"n\":200}");
    expect_4xx(TEXT, "{\"prompt\":[\"a\",\"b\"],\"n\":100}");
    expect_4xx(TEXT, "{\"prompt\":\"a\",\"suffix\":\"b\"}");
    expect_4xx(TEXT, "{\"prompt\":\"a\",\"best_of\":5}");
    expect_4xx(TEXT, "{\"prompt\":\"a\",\"echo\":true,\"logprobs\":1}");
    expect_4xx(TEXT, "{\"prompt\":\"a\",\"messages\":[]}");
    CHECK(n_refused > 90);
    good_request();
    x3_test_server_close(&at);
}

/* `depth` lists within lists as the value of a member. */
static char *nested(const char *begin, const char *open, const char *close, size_t depth, const char *end)
{
    x3_text text = {0};
    x3_err err = {0};

    CHECK_OK(x3_text_put(&text, begin, strlen(begin), &err), &err);
    for (size_t i = 0; i < depth; i++)
        CHECK_OK(x3_text_put(&text, open, strlen(open), &err), &err);
    for (size_t i = 0; i < depth; i++)
        CHECK_OK(x3_text_put(&text, close, strlen(close), &err), &err);
    CHECK_OK(x3_text_put(&text, end, strlen(end) + 1, &err), &err);
    return text.items;
}

X3_TEST(serve_survives_deep_nesting_and_long_texts)
{
    static const char *const ends[][4] = {
        {"{" HI ",\"metadata\":", "[", "]", "}"},
        {"{" HI ",\"metadata\":", "{\"a\":", "}", "}"}, /* no value at the bottom */
        {"{" HI ",\"chat_template_kwargs\":{\"x\":", "[", "]", "}}"},
        {"{\"messages\":[{\"role\":\"user\",\"content\":", "[", "]", "}]}"},
    };
    x3_http_answer a;

    open_plain();
    for (size_t i = 0; i < 4; i++)
        for (size_t depth = 900; depth < 2000000; depth *= 12) {
            char *body = nested(ends[i][0], ends[i][1], ends[i][2], depth, ends[i][3]);
            x3_http_request(at.port, "POST", CHAT, "", body, &a);
            CHECK_MSG(a.status == 200 || (a.status >= 400 && a.status < 500) || a.status == 0, "%d", a.status);
            CHECK(depth < 2000 || a.status != 200);
            x3_http_answer_free(&a);
            free(body);
        }
    char *body = nested("{\"messages\":[{\"role\":\"user\",\"content\":\"", "<|im_end|>", "<|im_", 20000, "\"}]}");
    expect_4xx(CHAT, body); /* long, and marked at every token */
    free(body);
    good_request();
    x3_test_server_close(&at);
}

/* ---- below JSON ---- */

/* Sends bytes and reads what comes: a 4xx, or nothing. */
static void expect_closed(const char *bytes, size_t n, bool half_close)
{
    x3_http_answer a;
    int fd = x3_http_connect(at.port);

    x3_http_send(fd, bytes, n);
    if (half_close)
        shutdown(fd, SHUT_WR);
    x3_http_read(fd, &a);
    CHECK_MSG(a.status == 0 || (a.status >= 400 && a.status < 500) || a.status == 501 || a.status == 505, "%.60s: %d", bytes, a.status);
    x3_http_answer_free(&a);
    close(fd);
    n_refused++;
}

X3_TEST(serve_closes_on_what_is_no_http)
{
    static const char *const raw[] = {
        "\r\n\r\n\r\n\r\n", "GET\r\n\r\n", "nonsense\r\n\r\n", "GET / HTTP/9.9\r\n\r\n", "GET / HTTP/1.1\r\nHost\r\n\r\n",
        "POST " CHAT " HTTP/1.1\r\nHost: localhost\r\nContent-Length: -5\r\n\r\n{}", "POST " CHAT " HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n{}",
        "POST " CHAT " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99999999999999999999999\r\n\r\n{}",
        "POST " CHAT " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 9000000000\r\n\r\n{}",
        "POST " CHAT " HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
        "POST " CHAT " HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{}",
        "\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03", "\xff\xfe\xfd",
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", "DELETE /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n",
        "POST " CHAT " HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Length: 2\r\nContent-Type: application/json\r\n\r\n{}",
    };
    char *long_header = nested("GET / HTTP/1.1\r\nHost: localhost\r\nX: ", "xxxxxxxxxxxxxxxxxxxx", "", 10000, "\r\n\r\n");

    open_plain();
    for (size_t i = 0; i < sizeof raw / sizeof raw[0]; i++)
        expect_closed(raw[i], strlen(raw[i]), true);
    expect_closed(long_header, strlen(long_header), true);
    free(long_header);
    good_request();
    x3_test_server_close(&at);
}

X3_TEST(serve_closes_slow_and_half_open_connections)
{
    static const char head[] = "POST " CHAT " HTTP/1.1\r\nHost: localhost\r\nContent-Length: 1000\r\n\r\n{\"messages\":";
    double start = x3_seconds();
    static const char line[] = "GET /health HTTP/1.1\r\nX: aaaaaaaaaaaaaaaaaa";
    int silent[8], slow = -1;
    char byte;

    open_plain(); /* 2 s for a request */
    for (int i = 0; i < 8; i++)
        silent[i] = x3_http_connect(at.port);
    slow = x3_http_connect(at.port);
    good_request();
    for (size_t i = 0; i < sizeof line - 1 && send(slow, line + i, 1, MSG_NOSIGNAL) == 1; i++)
        usleep(100000); /* a byte now and then */
    CHECK(recv(slow, &byte, 1, 0) <= 0);
    x3_http_send(silent[0], head, 10);
    for (int i = 0; i < 8; i++) {
        CHECK(recv(silent[i], &byte, 1, 0) <= 0);
        close(silent[i]);
    }
    CHECK_MSG(x3_seconds() - start < 30, "%g s", x3_seconds() - start);
    close(slow);
    slow = x3_http_connect(at.port);
    x3_http_send(slow, head, sizeof head - 1); /* a body that does not come */
    CHECK(recv(slow, &byte, 1, 0) <= 0);
    close(slow);
    good_request();
    x3_test_server_close(&at);
}

X3_TEST(serve_keeps_a_connection_for_several_requests)
{
    static const char request[] = "GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n";
    char block[4000];
    int fd;

    open_plain();
    fd = x3_http_connect(at.port);
    for (int i = 0; i < 3; i++) {
        x3_http_send(fd, request, sizeof request - 1);
        size_t n = 0;
        block[0] = '\0';
        while (strstr(block, "{\"status\":\"ok\"}") == NULL) {
            ssize_t got = recv(fd, block + n, sizeof block - 1 - n, 0);
            CHECK(got > 0);
            n += (size_t)got;
            block[n] = '\0';
        }
    }
    close(fd);
    x3_test_server_close(&at);
}

/* ---- what a request looks for in its reply ---- */

static void check_format(const char *template, const char *body, x3_tool_format format, x3_reasoning reasoning)
{
    const char *path = x3_test_path(x3_test_temp_dir(), "t.jinja");
    x3_chat_template *t;
    x3_server_options o = {0};
    x3_api_request r = {.chat = true};
    x3_api_error e = {0};

    CHECK_OK(x3_write_file(path, template, strlen(template), &e.err), &e.err);
    CHECK_OK(x3_chat_template_open(&t, MODEL, path, &e.err), &e.err);
    o.template = t;
    r.body = cJSON_Parse(body);
    CHECK_OK(x3_api_messages(&r, &o, &e), &e.err);
    CHECK_MSG(r.tool_format == format && r.reasoning == reasoning, "%s: %d, %d", body, (int)r.tool_format, (int)r.reasoning);
    x3_api_request_free(&r);
    x3_chat_template_free(t);
}

X3_TEST(serve_reads_channels_without_tools_but_calls_only_with_them)
{
    static const char harmony[] = "{{ tools }}<|start|>assistant<|channel|>final<|message|>", mistral[] = "{{ tools }}[TOOL_CALLS]";
    static const char tools[] = "{" HI ",\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\"}}]}";

    check_format(harmony, "{" HI "}", X3_TOOLS_HARMONY, X3_REASONING_TAGS);
    check_format(harmony, tools, X3_TOOLS_HARMONY, X3_REASONING_TAGS);
    check_format(harmony, "{" HI ",\"reasoning_format\":\"none\"}", X3_TOOLS_HARMONY, X3_REASONING_NONE);
    check_format(mistral, "{" HI "}", X3_TOOLS_NONE, X3_REASONING_NONE);
    check_format(mistral, tools, X3_TOOLS_MISTRAL, X3_REASONING_NONE);
}

/* ---- the shape of replies that the demo model does not write ---- */

X3_TEST(serve_json_of_calls_and_reasoning_is_that_of_openai)
{
    const x3_server_options o = {.model_name = "tiny"};
    x3_api_reply reply = {.o = &o, .request = {.chat = true, .n = 1, .sampling = {.n_top = -1}}, .id = "chatcmpl-0123456789"};
    x3_api_choice choice = {.reply = &reply, .over = true, .finish = X3_FINISH_STOP, .stats = {.n_prompt = 5, .n_reply = 7}};
    x3_reply_parser *p;
    x3_text events = {0};
    x3_err err = {0};
    cJSON *json;
    static const char text[] = "<think>hm</think><tool_call>{\"name\": \"f\", \"arguments\": {\"n\": 1}}</tool_call>"
                               "<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool_call>";

    reply.choices = &choice;
    reply.n_choices = 1;
    CHECK_OK(x3_reply_parser_create(&p, X3_TOOLS_TAGGED, X3_REASONING_TAGS, NULL, &err), &err);
    CHECK_OK(x3_reply_parser_put(p, text, sizeof text - 1, &choice.parts, &err), &err);
    CHECK_OK(x3_reply_parser_end(p, &choice.parts, &err), &err);
    CHECK_OK(x3_api_response(&reply, &json, &err), &err);
    CHECK(strcmp(x3_json_text_at(json, "choices.0.finish_reason"), "tool_calls") == 0);
    CHECK(cJSON_IsNull(x3_json_at(json, "choices.0.message.content")));
    CHECK(strcmp(x3_json_text_at(json, "choices.0.message.reasoning_content"), "hm") == 0);
    CHECK(strcmp(x3_json_text_at(json, "choices.0.message.tool_calls.0.function.arguments"), "{\"n\": 1}") == 0);
    CHECK(strcmp(x3_json_text_at(json, "choices.0.message.tool_calls.1.function.name"), "g") == 0);
    CHECK(strcmp(x3_json_text_at(json, "choices.0.message.tool_calls.1.id"), "call_0123456789_0_1") == 0);
    cJSON_Delete(json);
    reply.request.tool_format = X3_TOOLS_MISTRAL;
    CHECK_OK(x3_api_response(&reply, &json, &err), &err);
    const char *first = x3_json_text_at(json, "choices.0.message.tool_calls.0.id");
    const char *second = x3_json_text_at(json, "choices.0.message.tool_calls.1.id");
    CHECK(strlen(first) == 9 && strlen(second) == 9 && strcmp(first, second) != 0);
    CHECK(strspn(first, "0123456789abcdef") == 9);
    cJSON_Delete(json);
    reply.request.tool_format = X3_TOOLS_TAGGED;
    choice.n_calls = 0;
    CHECK_OK(x3_api_events(&choice, &events, &err), &err);
    CHECK_OK(x3_text_put(&events, "", 1, &err), &err);
    CHECK_MSG(strstr(events.items, "\"delta\":{\"reasoning_content\":\"hm\",\"tool_calls\":[{\"index\":0,\"id\":\"call_0123456789_0_0\",\"type\":"
                     "\"function\",\"function\":{\"name\":\"f\",\"arguments\":\"{\\\"n\\\": 1}\"}},{\"index\":1,") != NULL, "%s", events.items);
    CHECK(strstr(events.items, "\"finish_reason\":\"tool_calls\"") != NULL);
    x3_text_free(&events);
    x3_reply_parser_free(p);
}
