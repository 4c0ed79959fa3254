/* The body of a request for replies: checked, with defaults, as prompts and sampling. Knows nothing of HTTP. */
#ifndef X3_SERVER_REQUEST_H
#define X3_SERVER_REQUEST_H

#include "runtime/serve/reply_parser.h"
#include "runtime/serve/server.h"

#define X3_API_STOPS_MAX 16
#define X3_API_STOP_BYTES 1024
#define X3_API_CHOICES_MAX 128 /* n times prompts */
#define X3_API_VALUES_MAX (1 << 18) /* of the JSON of a request: each takes about 80 bytes while it is answered */

/* What a client is told. */
typedef struct x3_api_error {
    int status;       /* of HTTP */
    const char *type, *code; /* of OpenAI; code may be NULL */
    char param[64];   /* the member at fault, or "" */
    x3_err err;
} x3_api_error;

typedef struct x3_api_request {
    cJSON *body;
    bool chat, stream, include_usage, echo, one_call;
    size_t n;          /* replies to each prompt */
    size_t max_tokens; /* 0: what there is room for */
    x3_sampling sampling;
    x3_logit_bias *bias;
    const char *stops[X3_API_STOPS_MAX]; /* of body */
    size_t n_stops;
    int32_t *stop_tokens; /* those of the model, too */
    size_t n_stop_tokens;
    x3_ids *prompts;
    size_t n_prompts;
    char **prompt_texts; /* for echo, else NULL */
    x3_tool_format tool_format;
    x3_reasoning reasoning;
    const cJSON *tools;  /* of body, NULL: none */
} x3_api_request;

/* Parses and checks n_bytes of JSON. On failure *e is filled in, and *r empty. */
x3_status x3_api_request_read(x3_api_request *r, const x3_server_options *o, const x3_sampling *defaults, bool chat,
                              const char *body, size_t n_bytes, x3_api_error *e) X3_MUST;
void x3_api_request_free(x3_api_request *r);

/* Fills in *e: status, type, code, the member (or NULL) and the message, and returns X3_ERR_INPUT. */
x3_status x3_api_fail(x3_api_error *e, int status, const char *type, const char *code, const char *param, const char *format,
                      ...) X3_MUST X3_PRINTF(6, 7);
/* 400 invalid_request_error. */
x3_status x3_api_invalid(x3_api_error *e, const char *param, const char *format, ...) X3_MUST X3_PRINTF(3, 4);
/* The body as a JSON object. */
x3_status x3_api_parse(cJSON **out, const char *body, size_t n_bytes, x3_api_error *e) X3_MUST;

/* server_messages.c: checks messages and tools, and makes of them what templates expect: one text a content, role
 * "developer" as "system" where the template does not know it. Changes r->body. */
x3_status x3_api_messages(x3_api_request *r, const x3_server_options *o, x3_api_error *e) X3_MUST;

#endif
