/* Requests for replies: all at once, or as a stream of events. */
#include <stdlib.h>
#include <string.h>

#include "runtime/serve/server_internal.h"

#define POLL_SECONDS 0.2  /* how soon a client that has gone is noticed */
#define SILENCE_SECONDS 10 /* after which a stream says that it is alive: libmicrohttpd cuts it after idle_seconds */

/* Asks by the clock, not only when there is no news: tokens may come faster than every POLL_SECONDS. */
static bool has_gone(const x3_http *q, double *asked)
{
    double now = x3_seconds();

    if (now - *asked < POLL_SECONDS)
        return false;
    *asked = now;
    return x3_http_is_gone(q);
}

/* ---- all at once ---- */

/* Takes until every choice is over; false when the client has gone or *err says why not. */
static bool gather(x3_http *q, x3_api_reply *reply, x3_err *err)
{
    double asked = x3_seconds();

    for (;;) {
        size_t n_over = 0;
        x3_api_reply_wait(reply, POLL_SECONDS);
        if (has_gone(q, &asked))
            return false;
        for (size_t i = 0; i < reply->n_choices; i++) {
            x3_api_choice *c = &reply->choices[i];
            if (!c->over && x3_api_choice_take(c, err) != X3_OK)
                return false;
            n_over += c->over;
        }
        if (n_over == reply->n_choices)
            return true;
    }
}

static enum MHD_Result answer_whole(x3_http *q, x3_api_reply *reply)
{
    enum MHD_Result result = MHD_NO;
    cJSON *json = NULL;
    x3_api_error e = {0};
    x3_err err = {0};

    if (gather(q, reply, &err)) {
        const x3_err *failure = x3_api_reply_failure(reply);
        if (failure == NULL && x3_api_response(reply, &json, &err) == X3_OK)
            result = x3_http_json(q, 200, json);
        else if (x3_api_fail(&e, failure != NULL && failure->status == X3_ERR_DEVICE ? 503 : 500, "server_error", NULL, NULL, "%s",
                             failure != NULL ? failure->text : err.text) != X3_OK)
            result = x3_http_error(q, &e);
    } else if (err.status != X3_OK && x3_api_fail(&e, 500, "server_error", NULL, NULL, "%s", err.text) != X3_OK) {
        result = x3_http_error(q, &e);
    }
    x3_api_reply_free(reply);
    return result;
}

/* ---- streams ---- */

struct stream {
    x3_http *q;
    x3_api_reply *reply;
    x3_text out;
    size_t n_sent;
    double asked, spoke; /* when the client was last looked for; when it was last sent something */
    bool ended;
};

/* Events for all there is to take; the last ones when every choice is over. */
static x3_status fill(struct stream *t, x3_err *err)
{
    size_t n_over = 0;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < t->reply->n_choices; i++) {
        x3_api_choice *c = &t->reply->choices[i];
        if (!c->over) {
            X3_TRY(rc, out, x3_api_choice_take(c, err));
            X3_TRY(rc, out, x3_api_events(c, &t->out, err));
        }
        n_over += c->over;
    }
    if (n_over < t->reply->n_choices)
        return X3_OK;
    t->ended = true;
    const x3_err *failure = x3_api_reply_failure(t->reply);
    rc = failure != NULL ? x3_api_error_event(failure, &t->out, err) : x3_api_last_events(t->reply, &t->out, err);
out:
    return rc;
}

static ssize_t on_read(void *arg, uint64_t at, char *to, size_t room)
{
    struct stream *t = arg;
    const double idle = t->q->s->o.idle_seconds, silence = idle < 3 * SILENCE_SECONDS ? idle / 3 : SILENCE_SECONDS;
    x3_err err = {0};

    (void)at;
    while (t->n_sent == t->out.n_items) {
        if (t->ended)
            return MHD_CONTENT_READER_END_OF_STREAM;
        t->out.n_items = t->n_sent = 0;
        x3_api_reply_wait(t->reply, POLL_SECONDS);
        if (has_gone(t->q, &t->asked) || fill(t, &err) != X3_OK)
            return MHD_CONTENT_READER_END_WITH_ERROR;
        if (t->out.n_items == 0 && x3_seconds() - t->spoke > silence && x3_text_put(&t->out, ":\n\n", 3, &err) != X3_OK)
            return MHD_CONTENT_READER_END_WITH_ERROR; /* a comment to clients */
    }
    t->spoke = x3_seconds();
    size_t n = x3_min_size(room, t->out.n_items - t->n_sent);
    memcpy(to, t->out.items + t->n_sent, n);
    t->n_sent += n;
    return (ssize_t)n;
}

static void free_stream(void *arg)
{
    struct stream *t = arg;

    x3_api_reply_free(t->reply);
    x3_text_free(&t->out);
    free(t);
}

static enum MHD_Result answer_stream(x3_http *q, x3_api_reply *reply)
{
    struct MHD_Response *response;
    struct stream *t;

    if (x3_alloc(&t, 1, sizeof *t, NULL) != X3_OK) {
        x3_api_reply_free(reply);
        return MHD_NO;
    }
    t->q = q;
    t->reply = reply;
    t->asked = t->spoke = x3_seconds();
    response = MHD_create_response_from_callback(MHD_SIZE_UNKNOWN, 16384, on_read, t, free_stream);
    if (response == NULL) {
        free_stream(t);
        return MHD_NO;
    }
    MHD_add_response_header(response, "Content-Type", "text/event-stream; charset=utf-8");
    MHD_add_response_header(response, "Cache-Control", "no-cache");
    return x3_http_queue(q, 200, response);
}

/* ---- handlers ---- */

static enum MHD_Result handle(x3_http *q, bool chat)
{
    x3_api_request r;
    x3_api_reply *reply;
    x3_api_error e = {0};

    sem_wait(&q->s->readers);
    x3_status rc = x3_api_request_read(&r, &q->s->o, &q->s->defaults, chat, q->body.items, q->body.n_items, &e);
    sem_post(&q->s->readers);
    x3_text_free(&q->body);
    if (rc != X3_OK)
        return x3_http_error(q, &e);
    bool stream = r.stream;
    if (x3_api_reply_create(&reply, &q->s->o, &r, &e) != X3_OK)
        return x3_http_error(q, &e);
    return stream ? answer_stream(q, reply) : answer_whole(q, reply);
}

enum MHD_Result x3_handle_chat(x3_http *q)
{
    return handle(q, true);
}

enum MHD_Result x3_handle_completion(x3_http *q)
{
    return handle(q, false);
}
