/* The replies to one request: submitted to the engine, gathered from its thread, taken by the connection's. */
#ifndef X3_SERVER_REPLY_H
#define X3_SERVER_REPLY_H

#include <pthread.h>

#include "runtime/serve/server_request.h"
#include "runtime/serve/text_stream.h"

/* A token with its probabilities. */
typedef struct x3_api_logprob {
    x3_sampled sampled;
    size_t begin, end; /* bytes of the reply before it; with it */
} x3_api_logprob;

typedef struct x3_api_logprobs {
    x3_api_logprob *items;
    size_t n_items, capacity;
} x3_api_logprobs;

typedef struct x3_api_choice {
    struct x3_api_reply *reply;
    uint64_t id; /* of the engine */
    bool submitted;
    x3_reply_parser *parser; /* chat only */

    /* under the reply's mutex, written by the engine's thread */
    x3_text_stream *stream;
    x3_text text;             /* not taken yet */
    x3_api_logprobs logprobs; /* likewise */
    size_t n_bytes;           /* of all tokens */
    bool stopped;             /* by a stop string */
    size_t n_cut;             /* then: bytes from its beginning on */
    bool ended;
    x3_finish finish;
    x3_reply_stats stats;
    x3_err err;

    /* of the connection's thread */
    bool begun, finished; /* first and last chunk are out */
    bool over;            /* all has been taken */
    x3_reply_parts parts; /* taken: text completions use content only */
    x3_api_logprobs ready; /* taken */
    size_t n_calls;
    size_t text_offset;
} x3_api_choice;

typedef struct x3_api_reply {
    const x3_server_options *o;
    x3_api_request request; /* owned */
    char id[48];
    int64_t created;
    pthread_mutex_t mutex;
    pthread_cond_t changed;
    x3_api_choice *choices; /* prompt after prompt, n each */
    size_t n_choices;
} x3_api_reply;

/* Takes over *r, also on failure, and submits all of it. On failure *e says why: 503 when the queue is full. */
x3_status x3_api_reply_create(x3_api_reply **out, const x3_server_options *o, x3_api_request *r, x3_api_error *e) X3_MUST;
/* Cancels what still runs, and waits for it. */
void x3_api_reply_free(x3_api_reply *reply);

/* Waits up to `seconds` until some choice has something to take; true when one has. */
bool x3_api_reply_wait(x3_api_reply *reply, double seconds);
/* Moves what is there into parts and ready; *over when that was the last of it. */
x3_status x3_api_choice_take(x3_api_choice *c, x3_err *err) X3_MUST;
/* "stop", "length", "tool_calls" */
const char *x3_api_choice_finish(const x3_api_choice *c);
/* The reason when a choice has failed (X3_ERR_DEVICE: the engine has failed, or is shutting down), or NULL. All choices
 * must be over. */
const x3_err *x3_api_reply_failure(const x3_api_reply *reply);

#endif
