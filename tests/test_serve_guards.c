/* The server against silence, hosts of others, large requests, and its own end. */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "formats/io.h"
#include "formats/json.h"
#include "formats/utf8.h"
#include "tests/http_client.h"

#define MODEL "tests/data/models/tiny-qwen3"
#define CHAT "/v1/chat/completions"
#define TEXT "/v1/completions"

static x3_test_server at;

/* ---- a reply beside the others that holds the engine's thread ---- */

static struct brake {
    atomic_bool held, holds; /* is to hold; does */
    unsigned microseconds;   /* for every token when it does not */
} brake;

static bool hold(void *arg, const x3_sampled *token)
{
    (void)arg, (void)token;
    for (; brake.held; usleep(1000))
        brake.holds = true;
    usleep(brake.microseconds);
    return brake.microseconds > 0; /* else it ends when it has been let go */
}

static void let_go(void *arg, x3_finish finish, const x3_reply_stats *stats, const x3_err *err)
{
    (void)arg, (void)finish, (void)stats, (void)err;
}

static void wait_for_running(size_t n)
{
    x3_engine_stats stats = {0};

    for (int i = 0; i < 3000 && stats.n_running != n; i++, usleep(10000))
        x3_engine_stats_read(at.engine, &stats);
    CHECK_MSG(stats.n_running == n, "%zu replies run, not %zu", stats.n_running, n);
}

static void put_brake(bool held, unsigned microseconds)
{
    static const int32_t prompt[] = {82};
    x3_reply_request q = {.prompt = prompt, .n_prompt = 1, .name = "brake", .on = {hold, let_go, NULL}};
    x3_err err = {0};
    uint64_t id;

    brake.held = held;
    brake.holds = false;
    brake.microseconds = microseconds;
    CHECK_OK(x3_sampling_defaults(&q.sampling, NULL, &err), &err);
    q.sampling.temperature = 0;
    CHECK_OK(x3_engine_submit(at.engine, &q, &id, &err), &err);
    if (!held)
        wait_for_running(1);
    for (int i = 0; i < 3000 && held && !brake.holds; i++)
        usleep(10000);
    CHECK(brake.holds == held);
}

/* A connection that has sent a request. host NULL: "localhost". length: of the body that is announced. */
static int begin(const char *method, const char *path, const char *host, const char *body, size_t length)
{
    char head[300];
    int fd = x3_http_connect(at.port);

    snprintf(head, sizeof head, "%s %s HTTP/1.1\r\nHost: %s\r\nConnection: close\r\nContent-Length: %zu\r\n\r\n", method, path,
             host == NULL ? "localhost" : host, length);
    x3_http_send(fd, head, strlen(head));
    x3_http_send(fd, body, strlen(body));
    return fd;
}

static int begin_post(const char *path, const char *body)
{
    return begin("POST", path, NULL, body, strlen(body));
}

static void end(int fd, x3_http_answer *a)
{
    x3_http_read(fd, a);
    close(fd);
}

static void expect_status(int fd, int status, const char *part)
{
    x3_http_answer a;

    end(fd, &a);
    CHECK_MSG(a.status == status && strstr(a.body, part) != NULL, "status %d, expected %d: %s", a.status, status,
              a.status == 0 ? "" : a.body);
    x3_http_answer_free(&a);
}

/* ---- time ---- */

X3_TEST(serve_keeps_replies_that_are_silent_for_longer_than_the_idle_limit)
{
    static const char events[] = "{\"prompt\":\"a\",\"max_tokens\":3,\"ignore_eos\":true,\"stream\":true}";
    static const char whole[] = "{\"prompt\":\"a\",\"max_tokens\":3,\"ignore_eos\":true}";
    x3_http_answer a;

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){.idle_seconds = 2});
    put_brake(true, 0);
    int first = begin_post(TEXT, events), second = begin_post(TEXT, whole);
    sleep(5);
    brake.held = false;
    end(first, &a);
    CHECK_MSG(a.status == 200 && strncmp(a.body, ":\n\n", 3) == 0, "%d: %s", a.status, a.status == 0 ? "" : a.body);
    CHECK_MSG(strstr(a.body, "\"finish_reason\":\"length\"") != NULL && strstr(a.body, "data: [DONE]\n\n") != NULL, "%s", a.body);
    x3_http_answer_free(&a);
    expect_status(second, 200, "\"completion_tokens\":3");
    x3_test_server_close(&at);
}

X3_TEST(serve_notices_that_a_client_has_gone_while_tokens_come)
{
    static const char body[] = "{\"prompt\":\"a\",\"max_tokens\":500,\"ignore_eos\":true}";
    x3_engine_stats stats = {0};

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
    put_brake(false, 20000); /* a token of each reply every 20 ms */
    int fd = begin_post(TEXT, body);
    wait_for_running(2);
    close(fd);
    for (int i = 0; i < 600 && stats.n_cancelled == 0; i++, usleep(10000))
        x3_engine_stats_read(at.engine, &stats);
    CHECK_MSG(stats.n_cancelled == 1, "%zu tokens of replies that have ended", (size_t)stats.n_reply);
    x3_test_server_close(&at);
}

/* ---- the end ---- */

X3_TEST(serve_tells_replies_that_shutting_down_cuts)
{
    static const char events[] = "{\"prompt\":\"a\",\"max_tokens\":500,\"ignore_eos\":true,\"stream\":true}";
    static const char whole[] = "{\"prompt\":\"a\",\"max_tokens\":500,\"ignore_eos\":true}";
    x3_http_answer a;

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
    put_brake(false, 20000);
    int first = begin_post(TEXT, events), second = begin_post(TEXT, whole);
    wait_for_running(3);
    x3_test_server_close(&at);
    end(first, &a);
    CHECK_MSG(a.status == 200 && strstr(a.body, "\"message\":\"the server is shutting down\"") != NULL, "%d: %s", a.status, a.body);
    CHECK(strstr(a.body, "\"finish_reason\":\"") == NULL && strstr(a.body, "[DONE]") == NULL);
    x3_http_answer_free(&a);
    expect_status(second, 503, "\"message\":\"the server is shutting down\"");
}

X3_TEST(serve_ends_a_reply_whole_when_there_is_time)
{
    static const char body[] = "{\"prompt\":\"a\",\"max_tokens\":40,\"ignore_eos\":true,\"logprobs\":5}";

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
    int fd = begin_post(TEXT, body);
    wait_for_running(1);
    x3_server_quiesce(at.server);
    x3_engine_stop(at.engine, 60);
    x3_test_server_close(&at);
    expect_status(fd, 200, "\"completion_tokens\":40");
}

static void *read_late(void *arg)
{
    x3_http_answer *a = arg;
    int fd = a->status;

    sleep(1);
    end(fd, a);
    return NULL;
}

X3_TEST(serve_sends_an_answer_to_its_end_before_it_closes)
{
    const size_t n = 120000; /* tokens of 96 bytes: an answer too large for the buffers of sockets */
    x3_http_answer a;
    pthread_t reader;
    x3_text body = {0};
    char byte;
    x3_err err = {0};

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
    CHECK_OK(x3_text_put(&body, "{\"tokens\":[3047", 15, &err), &err);
    for (size_t i = 1; i < n; i++)
        CHECK_OK(x3_text_put(&body, ",3047", 5, &err), &err);
    CHECK_OK(x3_text_put(&body, "]}", 3, &err), &err);
    a.status = begin_post("/detokenize", body.items);
    x3_text_free(&body);
    CHECK(recv(a.status, &byte, 1, MSG_PEEK) == 1);
    CHECK(pthread_create(&reader, NULL, read_late, &a) == 0);
    x3_test_server_close(&at);
    pthread_join(reader, NULL);
    CHECK_MSG(a.status == 200 && a.n_body > 96 * n && a.body[a.n_body - 1] == '}', "%zu bytes", a.n_body);
    x3_http_answer_free(&a);
}

X3_TEST(serve_refuses_to_connect_once_quiet)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_addr = {htonl(INADDR_LOOPBACK)}};
    bool refused = false;

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
    address.sin_port = htons(at.port);
    close(x3_http_connect(at.port));
    x3_server_quiesce(at.server);
    for (int i = 0; i < 200 && !refused; i++, usleep(10000)) { /* a moment until the listening thread has let go */
        int fd = socket(AF_INET, SOCK_STREAM, 0);
        refused = connect(fd, (struct sockaddr *)&address, sizeof address) != 0;
        close(fd);
    }
    CHECK(refused);
    x3_test_server_close(&at);
}

/* ---- whose requests ---- */

X3_TEST(serve_without_keys_answers_local_hosts_only)
{
    static const char *const ours[] = {"localhost", "LOCALHOST:8080", "127.0.0.1", "127.9.8.7:1", "[::1]", "[::1]:80"};
    static const char *const others[] = {"a", "example.com:8080", "localhost.example.com", "127.0.0.1.example.com",
                                         "127.example.com", "10.0.0.1", "[::1]x", "[::1", "[::2]", "localhost:80x", "[",
                                         "a-name-that-is-longer-than-32-bytes"};
    static const char *const keys[] = {"sk-1"};

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
    for (size_t i = 0; i < sizeof ours / sizeof ours[0]; i++)
        expect_status(begin("GET", "/health", ours[i], "", 0), 200, "ok");
    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++)
        expect_status(begin("GET", "/health", others[i], "", 0), 403, "\"code\":\"wrong_host\"");
    expect_status(begin("POST", TEXT, "example.com", "{\"prompt\":\"a\",\"max_tokens\":1}", 29), 403, "wrong_host");
    x3_test_server_close(&at);
    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){.keys = keys, .n_keys = 1});
    expect_status(begin("GET", "/health", "example.com", "", 0), 200, "ok");
    x3_test_server_close(&at);
}

/* ---- sizes ---- */

X3_TEST(serve_reads_no_body_where_there_is_none_to_read)
{
    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
    expect_status(begin("POST", "/health", NULL, "", 1000000), 405, "only takes GET"); /* the body never comes */
    expect_status(begin("POST", "/nope", NULL, "", 1000000), 404, "not_found");
    expect_status(begin("GET", "/health", NULL, "hello", 5), 200, "ok");
    expect_status(begin("GET", "/health", NULL, "", 0), 200, "ok");
    x3_test_server_close(&at);
}

X3_TEST(serve_bounds_the_values_of_a_request_before_parsing_it)
{
    const size_t n = 300000;
    char *body;
    x3_err err = {0};

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
    CHECK_OK(x3_alloc(&body, 2 * n + 100, 1, &err), &err);
    size_t at_byte = (size_t)sprintf(body, "{\"prompt\":\"a\",\"max_tokens\":1,\"metadata\":[");
    for (size_t i = 0; i < n; i++)
        at_byte += (size_t)sprintf(body + at_byte, "%s1", i == 0 ? "" : ",");
    memcpy(body + at_byte, "]}", 3);
    expect_status(begin_post(TEXT, body), 400, "300004 values");
    free(body);
    CHECK_OK(x3_asprintf(&body, &err, "{\"content\":\"%0300000d\"}", 7), &err);
    memset(body + 12, ',', n); /* marks within texts do not count */
    body[100] = '\\';
    body[101] = '"';
    expect_status(begin_post("/tokenize", body), 200, "\"count\":");
    free(body);
    x3_test_server_close(&at);
}

/* ---- text ---- */

static void expect_utf8(int fd, int status)
{
    x3_http_answer a;
    cJSON *json;

    end(fd, &a);
    CHECK_MSG(a.status == status, "%d: %s", a.status, a.status == 0 ? "" : a.body);
    CHECK_MSG(x3_utf8_valid(a.body, a.n_body) == a.n_body, "%s", a.body);
    json = cJSON_Parse(a.body);
    CHECK(x3_json_text_at(json, "error.message")[0] != '\0');
    cJSON_Delete(json);
    x3_http_answer_free(&a);
}

X3_TEST(serve_errors_are_utf8_wherever_they_are_cut)
{
    char body[2000] = "", name[1000] = "";

    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
    expect_utf8(begin("GET", "/%ff%C3", NULL, "", 0), 404);
    for (size_t shift = 0; shift < 2; shift++) {
        snprintf(name, sizeof name, "%s", shift == 0 ? "" : "x");
        for (size_t i = 0; i < 300; i++)
            memcpy(name + shift + 2 * i, "é", 3);
        snprintf(body, sizeof body, "{\"messages\":[{\"role\":\"%s\",\"content\":\"hi\"}]}", name);
        expect_utf8(begin_post(CHAT, body), 400);
        snprintf(body, sizeof body, "{\"prompt\":\"a\",\"%s\":1}", name); /* also the "param" */
        expect_utf8(begin_post(TEXT, body), 400);
    }
    x3_test_server_close(&at);
}

X3_TEST(serve_keeps_the_text_after_a_nul)
{
    x3_test_server_open(&at, MODEL, NULL, (x3_engine_options){0}, (x3_server_options){0});
    cJSON *json = x3_http_post(at.port, "/detokenize", "{\"tokens\":[82,188,82]}", 200); /* 188 is the byte 0 */
    CHECK_MSG(strcmp(x3_json_text_at(json, "content"), "s\xEF\xBF\xBDs") == 0, "\"%s\"", x3_json_text_at(json, "content"));
    cJSON_Delete(json);
    json = x3_http_post(at.port, TEXT, "{\"prompt\":\"a\",\"temperature\":0,\"max_tokens\":2,\"logprobs\":1,\"logit_bias\":{\"188\":100}}",
                        200);
    CHECK_MSG(strcmp(x3_json_text_at(json, "choices.0.text"), "\xEF\xBF\xBD\xEF\xBF\xBD") == 0, "\"%s\"",
              x3_json_text_at(json, "choices.0.text"));
    CHECK(strcmp(x3_json_text_at(json, "choices.0.logprobs.tokens.0"), "\xEF\xBF\xBD") == 0);
    cJSON_Delete(json);
    x3_test_server_close(&at);
}
