/* A step: who gets how many rows and pages, the batch, and what becomes of its tokens. */
#include <string.h>

#include "runtime/serve/engine_internal.h"

/* ---- pages ---- */

void x3_engine_drop_pages(x3_engine *e, x3_reply *r)
{
    x3_kv_pages_release(e->pages, r->pages, r->n_pages);
    r->n_pages = r->n_filled = r->n_done = 0;
    r->chain = X3_KV_ROOT;
}

/* Takes over full pages that hold the beginning of the sequence; its last token is always computed, for its logits. */
static void find_prefix(x3_engine *e, x3_reply *r)
{
    if (r->n_pages > 0 || !e->o.keep_prefixes)
        return;
    while ((r->n_pages + 1) * X3_KV_PAGE < r->n_ids &&
           x3_kv_pages_find(e->pages, &r->chain, r->ids + r->n_pages * X3_KV_PAGE, &r->pages[r->n_pages]))
        r->n_pages++;
    r->n_filled = r->n_pages;
    r->n_done = r->n_pages * X3_KV_PAGE;
    if (r->started == 0)
        r->stats.n_cached = r->n_done;
}

/* One more page for running[index], if need be that of the youngest of those behind it. */
static bool take_page(x3_engine *e, size_t index)
{
    x3_reply *r = e->running[index];

    while (!x3_kv_pages_take(e->pages, &r->pages[r->n_pages])) {
        size_t victim = e->n_running - 1;
        while (victim > index && e->running[victim]->n_pages == 0)
            victim--;
        if (victim == index)
            return false;
        x3_engine_drop_pages(e, e->running[victim]);
        e->n_preempted++;
    }
    r->n_pages++;
    return true;
}

/* ---- plan ---- */

/* Gives each reply its rows, the oldest first: one to those that wait for their next token, to prompts what is left. */
static size_t plan(x3_engine *e)
{
    size_t left = e->o.chunk_rows, total = 0;

    for (size_t i = 0; i < e->n_running; i++) {
        find_prefix(e, e->running[i]);
        left -= e->running[i]->n_ids - e->running[i]->n_done == 1;
    }
    for (size_t i = 0; i < e->n_running; i++) {
        x3_reply *r = e->running[i];
        find_prefix(e, r); /* those whose pages have just been taken */
        size_t want = r->n_ids - r->n_done;
        bool is_prompt = want > 1;
        r->n_rows = 0;
        if (is_prompt)
            want = x3_min_size(want, left);
        want = x3_min_size(want, e->o.chunk_rows - total); /* a prefix found only now can make a prompt one row */
        while (want > 0 && r->n_pages * X3_KV_PAGE < r->n_done + want && take_page(e, i))
            ;
        r->n_rows = x3_min_size(want, r->n_pages * X3_KV_PAGE - r->n_done);
        if (is_prompt)
            left -= r->n_rows;
        total += r->n_rows;
    }
    return total;
}

/* ---- tokens ---- */

static bool is_stop(const x3_reply *r, int32_t id)
{
    for (size_t i = 0; i < r->n_stops; i++)
        if (r->stops[i] == id)
            return true;
    return false;
}

/* The largest logits alone, where no reply needs more; *greedy false: the logits themselves are in e->logits. */
static x3_status take_outputs(x3_engine *e, size_t n_outputs, bool *greedy, x3_err *err)
{
    x3_status rc;

    if (*greedy) {
        X3_TRY(rc, out, x3_resident_best(e->resident, n_outputs, e->best, err));
        for (size_t i = 0; i < n_outputs; i++)
            *greedy = *greedy && e->best[i] >= 0; /* else the sampler says what is wrong with the logits */
        if (*greedy)
            return X3_OK;
    }
    rc = x3_resident_logits(e->resident, n_outputs, e->logits, err);
out:
    return rc;
}

static void draw(void *arg, size_t item, int thread)
{
    x3_engine *e = arg;
    x3_drawn *d = &e->drawn[item];

    (void)thread;
    d->err = (x3_err){0};
    d->status = x3_sampler_pick(d->reply->sampler, e->logits + item * e->c->model->vocab, &d->token, &d->err);
}

/* True when the reply goes on; else *finish says why not. */
static bool take_token(x3_engine *e, const x3_drawn *d, x3_finish *finish)
{
    x3_reply *r = d->reply;

    if (r->first == 0)
        r->first = x3_seconds();
    *finish = X3_FINISH_ERROR;
    if (d->status != X3_OK)
        return false;
    r->n_reply++;
    *finish = X3_FINISH_STOP;
    if (is_stop(r, d->token.id) || !r->on.token(r->on.arg, &d->token))
        return false;
    r->ids[r->n_ids++] = d->token.id;
    *finish = X3_FINISH_LENGTH;
    return r->n_reply < r->max_reply && r->n_ids < e->o.max_positions;
}

/* Pages that have become full can be found from now on. */
static void advance(x3_engine *e, x3_reply *r)
{
    r->n_done += r->n_rows;
    for (; e->o.keep_prefixes && (r->n_filled + 1) * X3_KV_PAGE <= r->n_done; r->n_filled++)
        x3_kv_pages_fill(e->pages, &r->chain, r->ids + r->n_filled * X3_KV_PAGE, r->pages[r->n_filled]);
}

static size_t index_of(const x3_engine *e, const x3_reply *r)
{
    size_t i = 0;

    while (e->running[i] != r)
        i++;
    return i;
}

x3_status x3_engine_step(x3_engine *e, x3_err *err)
{
    size_t n_rows = 0, n_outputs = 0, n_sequences = 0;
    bool greedy = e->dev->ops->argmax != NULL;
    x3_finish finish;
    x3_status rc;

    if (plan(e) == 0)
        return X3_OK;
    for (size_t i = 0; i < e->n_running; i++) {
        x3_reply *r = e->running[i];
        if (r->n_rows == 0)
            continue;
        if (r->started == 0)
            r->started = x3_seconds();
        memcpy(e->ids + n_rows, r->ids + r->n_done, r->n_rows * sizeof *e->ids);
        e->stepped[n_sequences] = r;
        e->sequences[n_sequences++] = (x3_sequence){.first_row = n_rows, .n_rows = r->n_rows, .position = r->n_done,
                                                    .pages = r->pages, .slot = r->slot};
        n_rows += r->n_rows;
        if (r->n_done + r->n_rows == r->n_ids) {
            greedy = greedy && x3_sampler_is_greedy(r->sampler);
            e->drawn[n_outputs].reply = r;
            e->outputs[n_outputs++] = n_rows - 1;
        }
    }
    rc = x3_resident_step(e->resident, e->sequences, n_sequences, e->ids, n_rows, e->outputs, n_outputs, NULL, err);
    if (rc == X3_OK && n_outputs > 0)
        rc = take_outputs(e, n_outputs, &greedy, err);
    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; greedy && i < n_outputs; i++)
        e->drawn[i] = (x3_drawn){.reply = e->drawn[i].reply, .token = {.id = e->best[i]}};
    if (!greedy)
        x3_pool_run(e->pool, n_outputs, draw, e);
    for (size_t i = 0; i < n_sequences; i++)
        advance(e, e->stepped[i]);
    for (size_t i = 0; i < n_outputs; i++)
        if (!take_token(e, &e->drawn[i], &finish))
            x3_engine_end(e, index_of(e, e->drawn[i].reply), finish, &e->drawn[i].err);
    return X3_OK;
}
