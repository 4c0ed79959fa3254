/* A server in this process and a small HTTP client, for the tests of the server. */
#ifndef X3_HTTP_CLIENT_H
#define X3_HTTP_CLIENT_H

#include <cjson/cJSON.h>

#include "runtime/serve/server.h"
#include "tests/test.h"

/* An open server over a model folder. */
typedef struct x3_test_server {
    x3_device *dev;
    x3_checkpoint *c;
    x3_tokenizer *tokenizer;
    x3_chat_template *template;
    x3_engine *engine;
    x3_server *server;
    uint16_t port;
} x3_test_server;

/* Fills what is zero in *engine and *server: 8 replies of 512 tokens on two threads. `template`: a file, or NULL. */
void x3_test_server_open(x3_test_server *t, const char *model, const char *template, x3_engine_options engine,
                         x3_server_options server);
void x3_test_server_close(x3_test_server *t);

/* A connected socket; reads from it end after 30 s. */
int x3_http_connect(uint16_t port);
void x3_http_send(int fd, const char *text, size_t n_bytes);

typedef struct x3_http_answer {
    int status;   /* 0: closed without an answer */
    char *head;
    char *body;   /* chunks joined; "" when there is none */
    size_t n_body;
} x3_http_answer;

/* Reads an answer until the connection is closed. */
void x3_http_read(int fd, x3_http_answer *a);
/* One request, its connection closed after it. body NULL: none. headers: further lines, each with \r\n, or "". */
void x3_http_request(uint16_t port, const char *method, const char *path, const char *headers, const char *body, x3_http_answer *a);
void x3_http_answer_free(x3_http_answer *a);

/* POSTs JSON and returns the JSON of the answer, which must have this status. */
cJSON *x3_http_post(uint16_t port, const char *path, const char *body, int status);
/* The item at a path like "choices.0.message.content", which must be there. */
const cJSON *x3_json_at(const cJSON *json, const char *path);
/* The same as a text; "" where it is null or missing. */
const char *x3_json_text_at(const cJSON *json, const char *path);

/* POSTs with stream on, and joins the texts of one choice: deltas' content, or text. *finish: the last finish_reason, in
 * a static buffer of 16. Every event must be JSON, the last one [DONE]. For free(). */
char *x3_http_stream(uint16_t port, const char *path, const char *body, int choice, char finish[16]);

#endif
