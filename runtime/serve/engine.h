/* Replies to many requests at once from one resident model.
 *
 * Every step runs one batch: a row for each reply that is being written, and, in what is left of the rows, pieces of
 * prompts in order of arrival, so that a long prompt holds up nobody. Full pages of the cache are used again by
 * sequences that begin alike. When pages run out, the youngest sequence gives its own back and is computed again later:
 * a sequence always gets the room that it needs as long as it fits the context.
 *
 * A reply does not depend on what runs beside it as long as the device's rows do not depend on each other (device.h).
 *
 * Threads: one thread of the engine owns the model and its device, and calls the callbacks; all functions here may be
 * called from any thread, but not from a callback. */
#ifndef X3_ENGINE_H
#define X3_ENGINE_H

#include "runtime/serve/resident.h"
#include "runtime/serve/sampler.h"

typedef struct x3_engine_options {
    size_t max_sequences; /* replies at once */
    size_t max_positions; /* of a sequence: the context */
    size_t n_pages;       /* of the cache; 0: max_sequences full contexts */
    x3_kv_type kv_type;
    size_t chunk_rows;    /* rows of a step, at least max_sequences + 1 */
    size_t max_queued;    /* requests that wait */
    bool keep_prefixes;   /* use pages of earlier sequences */
} x3_engine_options;

typedef enum x3_finish {
    X3_FINISH_STOP,      /* a stop token, or the callback said so */
    X3_FINISH_LENGTH,    /* max_tokens, or the context is full */
    X3_FINISH_CANCELLED,
    X3_FINISH_ERROR
} x3_finish;

typedef struct x3_reply_stats {
    size_t n_prompt, n_cached, n_reply; /* tokens; cached: of the prompt, not computed; reply: with the stop token */
    double queued, prompt, reply;       /* seconds until started, then until the first token, then until the end */
} x3_reply_stats;

/* Both are called by the engine's thread and should be quick. */
typedef struct x3_reply_callbacks {
    /* A token of the reply, not its stop token. False ends the reply, as a stop. */
    bool (*token)(void *arg, const x3_sampled *token);
    /* The last call of a reply. err is the reason of X3_FINISH_ERROR. */
    void (*end)(void *arg, x3_finish finish, const x3_reply_stats *stats, const x3_err *err);
    void *arg;
} x3_reply_callbacks;

/* Everything but the callbacks' arg is copied. */
typedef struct x3_reply_request {
    const int32_t *prompt; /* ids of the model, at least one */
    size_t n_prompt;
    size_t max_tokens;     /* 0: what the context has room for */
    x3_sampling sampling;
    const char *name;      /* of the stream of random numbers */
    const int32_t *stops;  /* tokens that end the reply */
    size_t n_stops;
    x3_reply_callbacks on;
} x3_reply_request;

typedef struct x3_engine_stats {
    size_t n_running, n_queued, pages_held, pages_cached, n_pages;
    uint64_t n_requests, n_finished, n_cancelled, n_failed, n_preempted, n_steps;
    uint64_t n_prompt, n_cached, n_reply; /* tokens of all requests */
    double prompt_seconds, reply_seconds; /* sums over replies */
    double busy_seconds;                  /* of steps */
} x3_engine_stats;

typedef struct x3_engine x3_engine;

/* Loads the model and starts the thread. `dev` belongs to the engine until it is closed. */
x3_status x3_engine_open(x3_engine **out, x3_device *dev, const x3_checkpoint *c, const x3_engine_options *o,
                         x3_err *err) X3_MUST;
/* No new requests from here on; waits up to `seconds` for the replies that there are, then cancels what is left. All `end`
 * callbacks have been called when it returns. What is stopped can still be asked, but takes no more requests. */
void x3_engine_stop(x3_engine *e, double seconds);
/* Stops at once, if that was not done, and frees. */
void x3_engine_close(x3_engine *e);

/* What the resident model of these options is. */
x3_resident_options x3_engine_resident(const x3_engine_options *o);

/* *id names the reply for cancelling. X3_ERR_INPUT: an empty prompt, an id outside the vocabulary, no room in the
 * context, sampling out of range. X3_ERR_MEMORY: the queue is full. X3_ERR_DEVICE: the engine has failed or is closing.
 * No callback is called for a request that was refused. */
x3_status x3_engine_submit(x3_engine *e, const x3_reply_request *r, uint64_t *id, x3_err *err) X3_MUST;
/* Ends a reply early; its `end` comes soon after. An unknown or finished one is left alone. */
void x3_engine_cancel(x3_engine *e, uint64_t id);

void x3_engine_stats_read(x3_engine *e, x3_engine_stats *out);
/* X3_ERR_DEVICE and the reason when the engine has failed. */
x3_status x3_engine_health(x3_engine *e, x3_err *err) X3_MUST;

#endif
