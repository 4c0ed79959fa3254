#include "tests/http_client.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#include "formats/io.h"
#include "formats/json.h"

/* ---- a server ---- */

void x3_test_server_open(x3_test_server *t, const char *model, const char *template, x3_engine_options e, x3_server_options s)
{
    x3_findings findings = {0};
    x3_err err = {0};

    *t = (x3_test_server){0};
    CHECK_OK(x3_device_open(&t->dev, "cpu", 2, &err), &err);
    CHECK_OK(x3_checkpoint_open(&t->c, model, NULL, &findings, &err), &err);
    CHECK_OK(x3_tokenizer_load(&t->tokenizer, x3_test_path(model, "tokenizer.json"), &err), &err);
    CHECK_OK(x3_chat_template_open(&t->template, model, template, &err), &err);
    e.max_sequences = e.max_sequences == 0 ? 8 : e.max_sequences;
    e.max_positions = e.max_positions == 0 ? 512 : e.max_positions;
    e.chunk_rows = e.chunk_rows == 0 ? 128 : e.chunk_rows;
    e.max_queued = e.max_queued == 0 ? 64 : e.max_queued;
    e.keep_prefixes = true;
    CHECK_OK(x3_engine_open(&t->engine, t->dev, t->c, &e, &err), &err);
    s.host = "127.0.0.1";
    s.model_name = "tiny";
    s.engine = t->engine;
    s.max_positions = e.max_positions;
    s.checkpoint = t->c;
    s.tokenizer = t->tokenizer;
    s.template = t->template;
    CHECK_OK(x3_server_open(&t->server, &s, &err), &err);
    t->port = x3_server_port(t->server);
    CHECK(t->port != 0);
    x3_findings_free(&findings);
}

void x3_test_server_close(x3_test_server *t)
{
    x3_server_quiesce(t->server);
    x3_engine_stop(t->engine, 0);
    x3_server_close(t->server);
    x3_engine_close(t->engine);
    x3_chat_template_free(t->template);
    x3_tokenizer_free(t->tokenizer);
    x3_checkpoint_close(t->c);
    x3_device_close(t->dev);
}

/* ---- a client ---- */

int x3_http_connect(uint16_t port)
{
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = {htonl(INADDR_LOOPBACK)}};
    const struct timeval limit = {.tv_sec = 60};
    int fd = socket(AF_INET, SOCK_STREAM, 0);

    CHECK(fd >= 0);
    CHECK(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof limit) == 0);
    CHECK(connect(fd, (struct sockaddr *)&address, sizeof address) == 0);
    return fd;
}

void x3_http_send(int fd, const char *text, size_t n_bytes)
{
    while (n_bytes > 0) {
        ssize_t n = send(fd, text, n_bytes, MSG_NOSIGNAL);
        if (n <= 0)
            return; /* the server has closed: reading will tell */
        text += n;
        n_bytes -= (size_t)n;
    }
}

/* Joins the pieces of a chunked body in place. */
static size_t join_chunks(char *body, size_t n_bytes)
{
    size_t at = 0, to = 0;

    while (at < n_bytes) {
        char *end;
        size_t n = strtoul(body + at, &end, 16);
        at = (size_t)(end - body) + 2;
        if (n == 0 || at + n > n_bytes)
            break;
        memmove(body + to, body + at, n);
        to += n;
        at += n + 2;
    }
    return to;
}

void x3_http_read(int fd, x3_http_answer *a)
{
    x3_text all = {0};
    x3_err err = {0};
    char block[16384], *split;
    ssize_t n;

    *a = (x3_http_answer){0};
    while ((n = recv(fd, block, sizeof block, 0)) > 0)
        CHECK_OK(x3_text_put(&all, block, (size_t)n, &err), &err);
    CHECK_OK(x3_text_put(&all, "", 1, &err), &err);
    a->head = all.items;
    split = strstr(all.items, "\r\n\r\n");
    if (split == NULL)
        return;
    *split = '\0';
    a->body = split + 4;
    a->n_body = all.n_items - 1 - (size_t)(a->body - all.items);
    sscanf(all.items, "HTTP/1.1 %d", &a->status);
    if (strstr(all.items, "Transfer-Encoding: chunked") != NULL)
        a->n_body = join_chunks(a->body, a->n_body);
    a->body[a->n_body] = '\0';
}

void x3_http_answer_free(x3_http_answer *a)
{
    free(a->head);
    *a = (x3_http_answer){0};
}

void x3_http_request(uint16_t port, const char *method, const char *path, const char *headers, const char *body, x3_http_answer *a)
{
    char head[2000];
    size_t n = body == NULL ? 0 : strlen(body);
    int fd = x3_http_connect(port);

    snprintf(head, sizeof head, "%s %s HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n%sContent-Length: %zu\r\n\r\n", method, path,
             headers, n);
    x3_http_send(fd, head, strlen(head));
    x3_http_send(fd, body == NULL ? "" : body, n);
    x3_http_read(fd, a);
    close(fd);
}

cJSON *x3_http_post(uint16_t port, const char *path, const char *body, int status)
{
    x3_http_answer a;
    cJSON *json;

    x3_http_request(port, "POST", path, "", body, &a);
    CHECK_MSG(a.status == status, "%s %s: status %d, expected %d: %s", path, body, a.status, status, a.body);
    json = cJSON_Parse(a.body);
    CHECK_MSG(json != NULL, "no JSON: %s", a.body);
    x3_http_answer_free(&a);
    return json;
}

const cJSON *x3_json_at(const cJSON *json, const char *path)
{
    char word[64];
    int n;

    for (const char *at = path; *at != '\0'; at += n + (at[n] == '.')) {
        n = (int)strcspn(at, ".");
        snprintf(word, sizeof word, "%.*s", n, at);
        json = cJSON_IsArray(json) ? cJSON_GetArrayItem(json, atoi(word)) : cJSON_GetObjectItemCaseSensitive(json, word);
        CHECK_MSG(json != NULL, "no \"%s\" of \"%s\"", word, path);
    }
    return json;
}

const char *x3_json_text_at(const cJSON *json, const char *path)
{
    const cJSON *item = x3_json_at(json, path);

    return cJSON_IsString(item) ? item->valuestring : "";
}

/* Adds the text of one event to *all. */
static void add_event(const char *data, int choice, x3_text *all, char finish[16], bool *done)
{
    cJSON *json = cJSON_Parse(data);
    const cJSON *item;
    x3_err err = {0};

    CHECK_MSG(!*done, "an event after [DONE]: %s", data);
    *done = strcmp(data, "[DONE]") == 0;
    CHECK_MSG(json != NULL || *done, "no JSON: %s", data);
    cJSON_ArrayForEach(item, x3_json_get(json, "choices")) {
        const cJSON *delta = x3_json_get(item, "delta"), *text = x3_json_get(delta != NULL ? delta : item, delta != NULL ? "content" : "text");
        const cJSON *reason = x3_json_get(item, "finish_reason");
        if ((int)x3_json_get(item, "index")->valuedouble != choice)
            continue;
        CHECK_MSG(finish[0] == '\0', "text after finish_reason: %s", data);
        if (text != NULL)
            CHECK_OK(x3_text_put(all, text->valuestring, strlen(text->valuestring), &err), &err);
        if (reason != NULL)
            snprintf(finish, 16, "%.15s", reason->valuestring);
    }
    cJSON_Delete(json);
}

char *x3_http_stream(uint16_t port, const char *path, const char *body, int choice, char finish[16])
{
    x3_http_answer a;
    x3_text all = {0};
    x3_err err = {0};
    bool done = false;

    finish[0] = '\0';
    x3_http_request(port, "POST", path, "", body, &a);
    CHECK_MSG(a.status == 200 && strstr(a.head, "text/event-stream") != NULL, "%d: %s", a.status, a.body);
    for (char *line = a.body, *end; (end = strstr(line, "\n\n")) != NULL; line = end + 2) {
        *end = '\0';
        if (line[0] == ':') /* a comment, where the machine is slow */
            continue;
        CHECK_MSG(strncmp(line, "data: ", 6) == 0, "no event: %s", line);
        add_event(line + 6, choice, &all, finish, &done);
    }
    CHECK_MSG(done, "the stream does not end with [DONE]");
    CHECK_OK(x3_text_put(&all, "", 1, &err), &err);
    x3_http_answer_free(&a);
    return all.items;
}
