#include "runtime/serve/engine_internal.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* ---- replies ---- */

static void free_reply(x3_reply *r)
{
    if (r == NULL)
        return;
    free(r->ids);
    free(r->pages);
    free(r->bias);
    free(r->name);
    free(r->stops);
    x3_sampler_free(r->sampler);
    free(r);
}

static x3_status copy_bytes(void *out, const void *from, size_t n, size_t size, x3_err *err)
{
    void *to;
    x3_status rc = x3_alloc(&to, n, size, err);

    if (rc == X3_OK && n > 0)
        memcpy(to, from, n * size);
    memcpy(out, &to, sizeof to);
    return rc;
}

static x3_status make_reply(x3_reply **out, const x3_engine *e, const x3_reply_request *q, x3_err *err)
{
    const size_t room = e->o.max_positions - q->n_prompt;
    x3_reply *r = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&r, 1, sizeof *r, err));
    r->n_ids = r->n_prompt = r->stats.n_prompt = q->n_prompt;
    r->max_reply = q->max_tokens == 0 ? room : x3_min_size(q->max_tokens, room);
    r->chain = X3_KV_ROOT;
    r->sampling = q->sampling;
    r->on = q->on;
    r->n_stops = q->n_stops;
    r->submitted = x3_seconds();
    X3_TRY(rc, out, x3_alloc(&r->ids, r->n_prompt + r->max_reply, sizeof *r->ids, err));
    memcpy(r->ids, q->prompt, q->n_prompt * sizeof *r->ids);
    X3_TRY(rc, out, x3_alloc(&r->pages, (r->n_prompt + r->max_reply) / X3_KV_PAGE + 1, sizeof *r->pages, err));
    X3_TRY(rc, out, copy_bytes(&r->bias, q->sampling.bias, q->sampling.n_bias, sizeof *r->bias, err));
    r->sampling.bias = r->bias;
    X3_TRY(rc, out, copy_bytes(&r->stops, q->stops, q->n_stops, sizeof *r->stops, err));
    X3_TRY(rc, out, x3_strdup(&r->name, q->name == NULL ? "" : q->name, err));
    *out = r;
    r = NULL;
out:
    free_reply(r);
    return rc;
}

/* Tells the client, and counts. The reply is in no list any more. */
static void tell_end(x3_engine *e, x3_reply *r, x3_finish finish, const x3_err *err)
{
    const double now = x3_seconds();

    r->stats.n_reply = r->n_reply;
    r->stats.queued = (r->started > 0 ? r->started : now) - r->submitted;
    r->stats.prompt = r->started > 0 ? (r->first > 0 ? r->first : now) - r->started : 0;
    r->stats.reply = r->first > 0 ? now - r->first : 0;
    pthread_mutex_lock(&e->mutex);
    e->stats.n_finished += finish == X3_FINISH_STOP || finish == X3_FINISH_LENGTH;
    e->stats.n_cancelled += finish == X3_FINISH_CANCELLED;
    e->stats.n_failed += finish == X3_FINISH_ERROR;
    e->stats.n_prompt += r->started > 0 ? r->n_prompt : 0;
    e->stats.n_cached += r->stats.n_cached;
    e->stats.n_reply += r->n_reply;
    e->stats.prompt_seconds += r->stats.prompt;
    e->stats.reply_seconds += r->stats.reply;
    pthread_mutex_unlock(&e->mutex);
    r->on.end(r->on.arg, finish, &r->stats, err);
    free_reply(r);
}

static void count_pages(x3_engine *e)
{
    e->stats.pages_held = x3_kv_pages_n_held(e->pages);
    e->stats.pages_cached = x3_kv_pages_n_cached(e->pages);
    e->stats.n_preempted = e->n_preempted;
}

void x3_engine_end(x3_engine *e, size_t index, x3_finish finish, const x3_err *err)
{
    x3_reply *r = e->running[index];

    x3_engine_drop_pages(e, r);
    pthread_mutex_lock(&e->mutex);
    count_pages(e);
    memmove(e->running + index, e->running + index + 1, (e->n_running - index - 1) * sizeof *e->running);
    e->n_running--;
    e->slots[r->slot] = false;
    pthread_mutex_unlock(&e->mutex);
    tell_end(e, r, finish, err);
}

/* ---- the thread ---- */

/* Takes cancelled replies out of the queue, and all of them when `all`. Under the mutex. */
static x3_reply *pick_cancelled(x3_engine *e, bool all)
{
    x3_reply *picked = NULL, **at = &e->first;

    e->last = NULL;
    while (*at != NULL) {
        x3_reply *r = *at;
        if (all || r->cancelled) {
            *at = r->next;
            r->next = picked;
            picked = r;
            e->stats.n_queued--;
        } else {
            e->last = r;
            at = &r->next;
        }
    }
    return picked;
}

/* Queued replies join those that run while there is room. Under the mutex. */
static void start_queued(x3_engine *e)
{
    while (e->first != NULL && e->n_running < e->o.max_sequences) {
        x3_reply *r = e->first;
        e->first = r->next;
        if (e->first == NULL)
            e->last = NULL;
        r->next = NULL;
        e->stats.n_queued--;
        for (r->slot = 0; e->slots[r->slot]; r->slot++)
            ;
        e->slots[r->slot] = true;
        e->running[e->n_running++] = r;
    }
}

static x3_status make_sampler(x3_engine *e, x3_reply *r, x3_err *err)
{
    x3_status rc = X3_OK;

    if (r->sampler != NULL)
        return X3_OK;
    rc = x3_sampler_create(&r->sampler, &r->sampling, e->c->model->vocab, r->name, err);
    if (rc == X3_OK)
        x3_sampler_prompt(r->sampler, r->ids, r->n_prompt);
    return rc;
}

/* Cancelled replies end, queued ones start. After a failure, or when closing took too long, all end. */
static void sort_out(x3_engine *e)
{
    bool failed = e->failure.status != X3_OK, cut; /* failure: only this thread writes it */
    x3_finish finish = failed ? X3_FINISH_ERROR : X3_FINISH_CANCELLED;
    x3_reply *gone;

    pthread_mutex_lock(&e->mutex);
    cut = failed || (e->closing && x3_seconds() >= e->deadline);
    gone = pick_cancelled(e, cut);
    start_queued(e);
    for (size_t i = 0; i < e->n_running; i++)
        e->running[i]->ends = cut || e->running[i]->cancelled;
    pthread_mutex_unlock(&e->mutex);
    while (gone != NULL) {
        x3_reply *next = gone->next;
        tell_end(e, gone, finish, &e->failure);
        gone = next;
    }
    for (size_t i = e->n_running; i-- > 0;) {
        x3_err err = {0};
        if (e->running[i]->ends)
            x3_engine_end(e, i, finish, &e->failure);
        else if (make_sampler(e, e->running[i], &err) != X3_OK)
            x3_engine_end(e, i, X3_FINISH_ERROR, &err);
    }
}

static void run_step(x3_engine *e)
{
    double start = x3_seconds();
    x3_err err = {0};
    x3_status rc = x3_engine_step(e, &err);

    pthread_mutex_lock(&e->mutex);
    e->stats.n_steps++;
    e->stats.busy_seconds += x3_seconds() - start;
    if (rc != X3_OK && e->failure.status == X3_OK)
        e->failure = err;
    pthread_mutex_unlock(&e->mutex);
}

/* Waits for work; false when the engine is closing and there is none left. */
static bool wait_for_work(x3_engine *e)
{
    bool more;

    pthread_mutex_lock(&e->mutex);
    count_pages(e);
    while (!e->closing && e->first == NULL && e->n_running == 0)
        pthread_cond_wait(&e->changed, &e->mutex);
    more = e->first != NULL || e->n_running > 0;
    pthread_mutex_unlock(&e->mutex);
    return more;
}

static void *run_thread(void *arg)
{
    x3_engine *e = arg;

    while (wait_for_work(e)) {
        sort_out(e);
        if (e->n_running > 0)
            run_step(e);
    }
    return NULL;
}

/* ---- opening and closing ---- */

x3_resident_options x3_engine_resident(const x3_engine_options *o)
{
    const size_t per_sequence = (o->max_positions + X3_KV_PAGE - 1) / X3_KV_PAGE;

    return (x3_resident_options){.max_positions = o->max_positions, .max_rows = o->chunk_rows, .max_outputs = o->max_sequences,
                                 .n_pages = o->n_pages == 0 ? per_sequence * o->max_sequences : o->n_pages,
                                 .n_slots = o->max_sequences, .kv_type = o->kv_type};
}

static int draw_threads(size_t max_sequences)
{
    long n = sysconf(_SC_NPROCESSORS_ONLN);

    return (int)x3_min_size(x3_min_size(n < 1 ? 1 : (size_t)n, max_sequences), 16);
}

static x3_status check_options(const x3_engine_options *o, x3_err *err)
{
    if (o->max_sequences == 0 || o->max_positions < 2 || o->chunk_rows <= o->max_sequences)
        return x3_fail(err, X3_ERR_INPUT, "%zu replies at once in a context of %zu with %zu rows a step", o->max_sequences,
                       o->max_positions, o->chunk_rows);
    if (o->n_pages > 0 && o->n_pages * X3_KV_PAGE < o->max_positions)
        return x3_fail(err, X3_ERR_INPUT, "a cache of %zu positions is less than one context of %zu", o->n_pages * X3_KV_PAGE,
                       o->max_positions);
    return X3_OK;
}

static void free_engine(x3_engine *e)
{
    if (e == NULL)
        return;
    x3_resident_free(e->resident);
    x3_kv_pages_free(e->pages);
    free(e->running);
    free(e->slots);
    free(e->sequences);
    free(e->stepped);
    free(e->ids);
    free(e->outputs);
    if (e->dev != NULL) {
        x3_device_host_free(e->dev, e->logits);
        x3_device_host_free(e->dev, e->best);
    }
    free(e->drawn);
    x3_pool_free(e->pool);
    pthread_cond_destroy(&e->changed);
    pthread_mutex_destroy(&e->mutex);
    free(e);
}

x3_status x3_engine_open(x3_engine **out, x3_device *dev, const x3_checkpoint *c, const x3_engine_options *o, x3_err *err)
{
    const x3_resident_options ro = x3_engine_resident(o);
    x3_engine *e = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, check_options(o, err));
    X3_TRY(rc, out, x3_alloc(&e, 1, sizeof *e, err));
    e->c = c;
    e->o = *o;
    /* a recurrent state stands at the end of its sequence alone: the pages before it are no prefix to go on from */
    e->o.keep_prefixes = o->keep_prefixes && !x3_model_has_states(c->model);
    e->stats.n_pages = ro.n_pages;
    pthread_mutex_init(&e->mutex, NULL);
    pthread_cond_init(&e->changed, NULL);
    X3_TRY(rc, out, x3_resident_create(&e->resident, dev, c, &ro, err));
    X3_TRY(rc, out, x3_kv_pages_create(&e->pages, ro.n_pages, err));
    X3_TRY(rc, out, x3_alloc(&e->running, o->max_sequences, sizeof *e->running, err));
    X3_TRY(rc, out, x3_alloc(&e->slots, o->max_sequences, sizeof *e->slots, err));
    X3_TRY(rc, out, x3_alloc(&e->sequences, o->max_sequences, sizeof *e->sequences, err));
    X3_TRY(rc, out, x3_alloc(&e->stepped, o->max_sequences, sizeof *e->stepped, err));
    X3_TRY(rc, out, x3_alloc(&e->ids, o->chunk_rows, sizeof *e->ids, err));
    X3_TRY(rc, out, x3_alloc(&e->outputs, o->max_sequences, sizeof *e->outputs, err));
    X3_TRY(rc, out, x3_alloc(&e->drawn, o->max_sequences, sizeof *e->drawn, err));
    X3_TRY(rc, out, x3_pool_create(&e->pool, draw_threads(o->max_sequences), err));
    e->dev = dev;
    X3_TRY(rc, out, x3_device_host_alloc(dev, &e->logits, o->max_sequences * c->model->vocab * sizeof *e->logits, err));
    X3_TRY(rc, out, x3_device_host_alloc(dev, &e->best, o->max_sequences * sizeof *e->best, err));
    if (pthread_create(&e->thread, NULL, run_thread, e) != 0) {
        rc = x3_fail(err, X3_ERR_MEMORY, "the engine's thread cannot be started");
        goto out;
    }
    *out = e;
    e = NULL;
out:
    free_engine(e);
    return rc;
}

void x3_engine_stop(x3_engine *e, double seconds)
{
    pthread_mutex_lock(&e->mutex);
    e->closing = true;
    e->deadline = x3_seconds() + seconds;
    pthread_cond_signal(&e->changed);
    pthread_mutex_unlock(&e->mutex);
    if (!e->joined)
        pthread_join(e->thread, NULL);
    e->joined = true;
}

void x3_engine_close(x3_engine *e)
{
    if (e == NULL)
        return;
    x3_engine_stop(e, 0);
    free_engine(e);
}

/* ---- the callers' side ---- */

static x3_status check_request(const x3_engine *e, const x3_reply_request *q, x3_err *err)
{
    if (q->n_prompt == 0)
        return x3_fail(err, X3_ERR_INPUT, "the prompt has no tokens");
    if (q->n_prompt >= e->o.max_positions)
        return x3_fail(err, X3_ERR_INPUT, "the prompt has %zu tokens, which leaves no room for a reply in the context of %zu",
                       q->n_prompt, e->o.max_positions);
    for (size_t i = 0; i < q->n_prompt; i++)
        if (q->prompt[i] < 0 || (size_t)q->prompt[i] >= e->c->model->vocab)
            return x3_fail(err, X3_ERR_INPUT, "token %d is not in the vocabulary of %zu", (int)q->prompt[i], e->c->model->vocab);
    return x3_sampling_check(&q->sampling, e->c->model->vocab, err);
}

x3_status x3_engine_submit(x3_engine *e, const x3_reply_request *q, uint64_t *id, x3_err *err)
{
    x3_reply *r = NULL;
    x3_status rc;

    X3_TRY(rc, out, check_request(e, q, err));
    X3_TRY(rc, out, make_reply(&r, e, q, err));
    pthread_mutex_lock(&e->mutex);
    if (e->closing || e->failure.status != X3_OK) {
        rc = x3_fail(err, X3_ERR_DEVICE, "%s", e->failure.status == X3_OK ? "shutting down" : e->failure.text);
    } else if (e->stats.n_queued >= e->o.max_queued) {
        rc = x3_fail(err, X3_ERR_MEMORY, "%zu requests are waiting already", e->stats.n_queued);
    } else {
        *id = r->id = ++e->next_id;
        *(e->last == NULL ? &e->first : &e->last->next) = r;
        e->last = r;
        r = NULL;
        e->stats.n_queued++;
        e->stats.n_requests++;
        pthread_cond_signal(&e->changed);
    }
    pthread_mutex_unlock(&e->mutex);
out:
    free_reply(r);
    return rc;
}

void x3_engine_cancel(x3_engine *e, uint64_t id)
{
    pthread_mutex_lock(&e->mutex);
    for (x3_reply *r = e->first; r != NULL; r = r->next)
        r->cancelled |= r->id == id;
    for (size_t i = 0; i < e->n_running; i++)
        e->running[i]->cancelled |= e->running[i]->id == id;
    pthread_cond_signal(&e->changed);
    pthread_mutex_unlock(&e->mutex);
}

void x3_engine_stats_read(x3_engine *e, x3_engine_stats *out)
{
    pthread_mutex_lock(&e->mutex);
    *out = e->stats;
    out->n_running = e->n_running;
    pthread_mutex_unlock(&e->mutex);
}

x3_status x3_engine_health(x3_engine *e, x3_err *err)
{
    x3_status rc = X3_OK;

    pthread_mutex_lock(&e->mutex);
    if (e->failure.status != X3_OK)
        rc = x3_fail(err, X3_ERR_DEVICE, "%s", e->failure.text);
    pthread_mutex_unlock(&e->mutex);
    return rc;
}
