#include "runtime/serve/server_reply.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

/* ---- the engine's thread ---- */

/* Bytes of a token as clients see them: special tokens are left out, but for the marks that the parser needs. */
static x3_view visible_bytes(const x3_api_choice *c, int32_t id)
{
    const x3_tokenizer *t = c->reply->o->tokenizer;
    x3_view bytes = x3_tokenizer_token_bytes(t, (uint32_t)id);

    if (bytes.data == NULL || (x3_tokenizer_is_special(t, (uint32_t)id) &&
                               (c->parser == NULL || !x3_reply_parser_wants(c->parser, bytes.data, bytes.n_bytes))))
        return (x3_view){"", 0};
    return bytes;
}

static x3_status keep_logprob(x3_api_choice *c, const x3_sampled *token, size_t begin)
{
    x3_status rc = x3_grow(&c->logprobs.items, &c->logprobs.capacity, c->logprobs.n_items + 1, sizeof *c->logprobs.items, &c->err);

    if (rc == X3_OK)
        c->logprobs.items[c->logprobs.n_items++] = (x3_api_logprob){*token, begin, c->n_bytes};
    return rc;
}

static bool on_token(void *arg, const x3_sampled *token)
{
    x3_api_choice *c = arg;
    x3_view bytes = visible_bytes(c, token->id);
    x3_status rc;

    pthread_mutex_lock(&c->reply->mutex);
    size_t open = x3_text_stream_n_held(c->stream) + bytes.n_bytes, before = c->text.n_items;
    c->n_bytes += bytes.n_bytes;
    rc = x3_text_stream_put(c->stream, bytes.data, bytes.n_bytes, &c->text, &c->stopped, &c->err);
    c->n_cut = c->stopped ? open - (c->text.n_items - before) : 0;
    if (rc == X3_OK && c->reply->request.sampling.n_top >= 0 && !c->stopped)
        rc = keep_logprob(c, token, c->n_bytes - bytes.n_bytes);
    pthread_cond_signal(&c->reply->changed);
    pthread_mutex_unlock(&c->reply->mutex);
    return rc == X3_OK && !c->stopped;
}

static void on_end(void *arg, x3_finish finish, const x3_reply_stats *stats, const x3_err *err)
{
    x3_api_choice *c = arg;

    pthread_mutex_lock(&c->reply->mutex);
    c->ended = true;
    c->finish = finish;
    c->stats = *stats;
    if (finish == X3_FINISH_ERROR && c->err.status == X3_OK)
        c->err = *err;
    if (finish == X3_FINISH_CANCELLED) /* by the engine's stop; after x3_api_reply_free nobody looks */
        x3_fail(&c->err, X3_ERR_DEVICE, "the server is shutting down");
    if (!c->stopped && x3_text_stream_end(c->stream, &c->text, &c->err) != X3_OK)
        c->finish = X3_FINISH_ERROR;
    if (c->err.status != X3_OK)
        c->finish = X3_FINISH_ERROR;
    pthread_cond_signal(&c->reply->changed);
    pthread_mutex_unlock(&c->reply->mutex);
}

/* ---- creation ---- */

static void make_id(x3_api_reply *reply)
{
    uint64_t random[2] = {reply->request.sampling.seed, (uint64_t)(uintptr_t)reply};
    struct timespec now;
    char hex[2][17];

    clock_gettime(CLOCK_REALTIME, &now);
    reply->created = now.tv_sec;
    random[1] ^= (uint64_t)now.tv_nsec * 0x9E3779B97F4A7C15u;
    x3_hash_text(x3_hash(random, sizeof random), hex[0]);
    x3_hash_text(x3_hash(random, sizeof random[0]) ^ (uint64_t)now.tv_nsec, hex[1]);
    snprintf(reply->id, sizeof reply->id, "%s-%.16s%.8s", reply->request.chat ? "chatcmpl" : "cmpl", hex[0], hex[1]);
}

static x3_status prepare_choice(x3_api_reply *reply, size_t index, x3_err *err)
{
    const x3_api_request *r = &reply->request;
    x3_api_choice *c = &reply->choices[index];
    x3_status rc;

    c->reply = reply;
    X3_TRY(rc, out, x3_text_stream_create(&c->stream, r->stops, r->n_stops, err));
    if (r->chat)
        X3_TRY(rc, out, x3_reply_parser_create(&c->parser, r->tool_format, r->reasoning, r->tools, err));
    if (r->echo) {
        const char *text = r->prompt_texts[index / r->n];
        rc = x3_text_put(&c->text, text, strlen(text), err);
    }
out:
    return rc;
}

static x3_status submit_choice(x3_api_reply *reply, size_t index, x3_err *err)
{
    const x3_api_request *r = &reply->request;
    x3_api_choice *c = &reply->choices[index];
    const x3_ids *prompt = &r->prompts[index / r->n];
    char name[32];
    x3_reply_request q = {.prompt = (const int32_t *)prompt->items, .n_prompt = prompt->n_items, .max_tokens = r->max_tokens,
                          .sampling = r->sampling, .name = name, .stops = r->stop_tokens, .n_stops = r->n_stop_tokens,
                          .on = {on_token, on_end, c}};

    snprintf(name, sizeof name, "choice %zu", index % r->n);
    x3_status rc = x3_engine_submit(reply->o->engine, &q, &c->id, err);
    c->submitted = rc == X3_OK;
    return rc;
}

static x3_status create(x3_api_reply *reply, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&reply->choices, reply->request.n_prompts * reply->request.n, sizeof *reply->choices, err));
    while (reply->n_choices < reply->request.n_prompts * reply->request.n) {
        reply->n_choices++; /* before: what is half prepared is freed, too */
        X3_TRY(rc, out, prepare_choice(reply, reply->n_choices - 1, err));
    }
    for (size_t i = 0; i < reply->n_choices; i++)
        X3_TRY(rc, out, submit_choice(reply, i, err));
out:
    return rc;
}

x3_status x3_api_reply_create(x3_api_reply **out, const x3_server_options *o, x3_api_request *r, x3_api_error *e)
{
    x3_api_reply *reply = NULL;
    pthread_condattr_t attributes;
    x3_status rc;

    *out = NULL;
    if (x3_alloc(&reply, 1, sizeof *reply, &e->err) != X3_OK) {
        x3_api_request_free(r);
        return x3_api_fail(e, 500, "server_error", NULL, NULL, "out of memory");
    }
    reply->o = o;
    reply->request = *r;
    *r = (x3_api_request){0};
    pthread_mutex_init(&reply->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&reply->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    make_id(reply);
    rc = create(reply, &e->err);
    if (rc == X3_OK) {
        *out = reply;
        return X3_OK;
    }
    x3_api_reply_free(reply);
    bool busy = rc == X3_ERR_MEMORY || rc == X3_ERR_DEVICE;
    return x3_api_fail(e, busy ? 503 : 400, busy ? "server_error" : "invalid_request_error", busy ? "overloaded" : NULL, NULL,
                       "the request cannot be taken"); /* e->err keeps the engine's reason */
}

void x3_api_reply_free(x3_api_reply *reply)
{
    if (reply == NULL)
        return;
    for (size_t i = 0; i < reply->n_choices; i++)
        if (reply->choices[i].submitted)
            x3_engine_cancel(reply->o->engine, reply->choices[i].id);
    pthread_mutex_lock(&reply->mutex);
    for (size_t i = 0; i < reply->n_choices; i++)
        while (reply->choices[i].submitted && !reply->choices[i].ended)
            pthread_cond_wait(&reply->changed, &reply->mutex);
    pthread_mutex_unlock(&reply->mutex);
    for (size_t i = 0; i < reply->n_choices; i++) {
        x3_api_choice *c = &reply->choices[i];
        x3_reply_parser_free(c->parser);
        x3_text_stream_free(c->stream);
        x3_text_free(&c->text);
        x3_reply_parts_free(&c->parts);
        free(c->logprobs.items);
        free(c->ready.items);
    }
    free(reply->choices);
    x3_api_request_free(&reply->request);
    pthread_cond_destroy(&reply->changed);
    pthread_mutex_destroy(&reply->mutex);
    free(reply);
}

/* ---- the connection's thread ---- */

/* Log-probabilities of tokens whose text is out: those of a beginning of a stop string wait with it. */
static size_t n_ready(const x3_api_choice *c)
{
    size_t shown = c->n_bytes - (c->ended ? 0 : x3_text_stream_n_held(c->stream)), n = 0;

    if (c->stopped)
        shown = c->n_bytes - c->n_cut;
    while (n < c->logprobs.n_items && c->logprobs.items[n].end <= shown)
        n++;
    return n;
}

static bool has_news(const x3_api_choice *c)
{
    return !c->over && (c->ended || c->text.n_items > 0 || n_ready(c) > 0);
}

static bool any_news(const x3_api_reply *reply)
{
    for (size_t i = 0; i < reply->n_choices; i++)
        if (has_news(&reply->choices[i]))
            return true;
    return false;
}

bool x3_api_reply_wait(x3_api_reply *reply, double seconds)
{
    struct timespec until;
    bool news;

    clock_gettime(CLOCK_MONOTONIC, &until);
    uint64_t nanoseconds = (uint64_t)until.tv_nsec + (uint64_t)(seconds * 1e9);
    until.tv_sec += (time_t)(nanoseconds / 1000000000u);
    until.tv_nsec = (long)(nanoseconds % 1000000000u);
    pthread_mutex_lock(&reply->mutex);
    while (!(news = any_news(reply)) && pthread_cond_timedwait(&reply->changed, &reply->mutex, &until) != ETIMEDOUT)
        ;
    pthread_mutex_unlock(&reply->mutex);
    return news;
}

static x3_status take_logprobs(x3_api_choice *c, x3_err *err)
{
    size_t n = n_ready(c);
    x3_status rc;

    if (n == 0)
        return X3_OK;
    rc = x3_grow(&c->ready.items, &c->ready.capacity, c->ready.n_items + n, sizeof *c->ready.items, err);
    if (rc != X3_OK)
        return rc;
    memcpy(c->ready.items + c->ready.n_items, c->logprobs.items, n * sizeof *c->ready.items);
    c->ready.n_items += n;
    c->logprobs.n_items -= n;
    memmove(c->logprobs.items, c->logprobs.items + n, c->logprobs.n_items * sizeof *c->logprobs.items);
    return X3_OK;
}

x3_status x3_api_choice_take(x3_api_choice *c, x3_err *err)
{
    x3_text text;
    bool over;
    x3_status rc;

    pthread_mutex_lock(&c->reply->mutex);
    text = c->text;
    c->text = (x3_text){0};
    over = c->ended;
    rc = take_logprobs(c, err);
    pthread_mutex_unlock(&c->reply->mutex);
    if (rc == X3_OK && c->parser != NULL)
        rc = x3_reply_parser_put(c->parser, text.items, text.n_items, &c->parts, err);
    else if (rc == X3_OK)
        rc = x3_text_put(&c->parts.content, text.items, text.n_items, err);
    if (rc == X3_OK && over && !c->over && c->parser != NULL)
        rc = x3_reply_parser_end(c->parser, &c->parts, err);
    c->over |= over;
    x3_text_free(&text);
    return rc;
}

const char *x3_api_choice_finish(const x3_api_choice *c)
{
    if (c->n_calls > 0 && c->finish == X3_FINISH_STOP)
        return "tool_calls";
    return c->finish == X3_FINISH_LENGTH ? "length" : "stop";
}

const x3_err *x3_api_reply_failure(const x3_api_reply *reply)
{
    for (size_t i = 0; i < reply->n_choices; i++)
        if (reply->choices[i].finish == X3_FINISH_ERROR)
            return &reply->choices[i].err;
    return NULL;
}
