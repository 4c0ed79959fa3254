/* What the two halves of the engine share: engine.c has the thread, the queue and the callers' side, engine_step.c what
 * happens in a step. */
#ifndef X3_ENGINE_INTERNAL_H
#define X3_ENGINE_INTERNAL_H

#include <pthread.h>

#include "kernels/parallel.h"
#include "runtime/serve/engine.h"
#include "runtime/serve/kv_pages.h"

/* One reply. Belongs to the engine's thread once it is out of the queue, but for `cancelled`. */
typedef struct x3_reply {
    struct x3_reply *next; /* in the queue */
    uint64_t id;
    int32_t *ids;          /* prompt, then reply; room for all of both */
    size_t n_ids, n_prompt, n_reply, max_reply;
    size_t n_done;         /* positions in the cache */
    int32_t *pages;        /* room for all */
    size_t n_pages, n_filled; /* pages; those of them that are full and known to the cache, up to `chain` */
    uint64_t chain;
    x3_sampling sampling;
    x3_logit_bias *bias;
    x3_sampler *sampler;
    char *name;
    int32_t *stops;
    size_t n_stops;
    x3_reply_callbacks on;
    x3_reply_stats stats;
    double submitted, started, first; /* seconds; 0: not yet */
    bool cancelled;        /* under the mutex */
    bool ends;             /* by this step */
    size_t n_rows;         /* of this step */
    size_t slot;           /* of its recurrent states, while it is running */
} x3_reply;

/* A token that has been drawn, or why not. */
typedef struct x3_drawn {
    x3_reply *reply;
    x3_sampled token;
    x3_status status;
    x3_err err;
} x3_drawn;

struct x3_engine {
    const x3_checkpoint *c;
    x3_device *dev;
    x3_engine_options o;
    x3_resident *resident;
    x3_kv_pages *pages;

    /* of the thread: replies being written, the oldest first, and the arrays of a step */
    x3_reply **running;
    size_t n_running;
    bool *slots; /* [max_sequences]: taken */
    x3_sequence *sequences;
    x3_reply **stepped; /* whose rows sequences[i] are */
    int32_t *ids;
    size_t *outputs;
    float *logits;
    int32_t *best; /* [max_sequences] largest logits, of steps whose replies are all greedy */
    x3_drawn *drawn; /* [max_sequences] */
    x3_pool *pool;   /* draws: with a large vocabulary it takes longer than a step of a fast device */
    uint64_t n_preempted;

    pthread_mutex_t mutex; /* guards what follows */
    pthread_cond_t changed;
    pthread_t thread;
    bool closing;
    bool joined; /* of whoever stops it */
    double deadline; /* of closing */
    x3_reply *first, *last; /* queue */
    uint64_t next_id;
    x3_engine_stats stats;
    x3_err failure; /* status X3_OK: none */
};

/* Called for the replies that a step ends; takes the reply out of `running` and frees it. */
void x3_engine_end(x3_engine *e, size_t index, x3_finish finish, const x3_err *err);
/* One batch over `running`. A failure is one of the device: the engine cannot go on. */
x3_status x3_engine_step(x3_engine *e, x3_err *err) X3_MUST;
/* Gives the pages of a reply back. */
void x3_engine_drop_pages(x3_engine *e, x3_reply *r);

#endif
