/* An OpenAI-style HTTP server over an engine, by libmicrohttpd: a thread for each connection.
 *
 *   POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize
 *   GET  /v1/models, /props, /health, /metrics, / (a page to chat on)
 *
 * Ownership: everything in the options is borrowed and must outlive the server.
 * Shutting down: x3_server_quiesce, x3_engine_stop, x3_server_close, x3_engine_close. */
#ifndef X3_SERVER_H
#define X3_SERVER_H

#include "runtime/jinja/chat_template.h"
#include "runtime/serve/engine.h"

typedef struct x3_server_options {
    const char *host; /* an address, "127.0.0.1" */
    uint16_t port;    /* 0: any that is free */
    const char *model_name;
    x3_engine *engine;
    size_t max_positions;             /* the context, for messages */
    const x3_checkpoint *checkpoint;
    const x3_tokenizer *tokenizer;
    const x3_chat_template *template; /* NULL: no chat */
    const char *const *keys;          /* API keys; none: open to all */
    size_t n_keys;
    /* 0 stands for the default in brackets */
    size_t max_body;                  /* bytes of a request [8 MiB] */
    unsigned max_connections;         /* [256] */
    unsigned request_seconds;         /* until a request is whole, headers and body [30] */
    unsigned idle_seconds;            /* between requests, and for a client that does not read [60] */
} x3_server_options;

typedef struct x3_server x3_server;

/* Listens. X3_ERR_IO: the address or the port cannot be had. X3_ERR_INPUT: sampling defaults of the model that are out of
 * range. */
x3_status x3_server_open(x3_server **out, const x3_server_options *o, x3_err *err) X3_MUST;
uint16_t x3_server_port(const x3_server *s);
/* No new connections from here on. */
void x3_server_quiesce(x3_server *s);
/* Ends all connections, up to 5 s later than now when answers are still being sent. Replies being written must have ended:
 * stop the engine first. */
void x3_server_close(x3_server *s);

/* Reads a file of API keys, one a line; blank lines and those with # are skipped. *keys: n texts and the array itself, for
 * x3_server_keys_free. X3_ERR_INPUT: no key in the file, or one with white space in it. */
x3_status x3_server_keys_read(char ***keys, size_t *n, const char *path, x3_err *err) X3_MUST;
void x3_server_keys_free(char **keys, size_t n);

#endif
