#include "runtime/serve/harmony.h"

#include <string.h>

#include "runtime/serve/text_stream.h"

#define START "<|start|>"
#define CHANNEL "<|channel|>"
#define MESSAGE "<|message|>"
#define N_ENDS 4

/* What a message ends with; the last one is the beginning of the next. */
static const char *const ends[N_ENDS] = {"<|end|>", "<|call|>", "<|return|>", START};

/* ---- the text held ---- */

static bool is_white(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static void drop(x3_text *held, size_t n)
{
    if (n > 0)
        memmove(held->items, held->items + n, held->n_items - n);
    held->n_items -= n;
}

static size_t n_white(const x3_text *held)
{
    size_t n = 0;

    while (n < held->n_items && is_white(held->items[n]))
        n++;
    return n;
}

static size_t without_white(const x3_text *held, size_t n)
{
    while (n > 0 && is_white(held->items[n - 1]))
        n--;
    return n;
}

/* Where `word` begins in the bytes from..to, or SIZE_MAX. */
static size_t find(const x3_text *held, size_t from, size_t to, const char *word)
{
    const char *at = to <= from ? NULL : memmem(held->items + from, to - from, word, strlen(word));

    return at == NULL ? SIZE_MAX : (size_t)(at - held->items);
}

/* Where the first end from `from` on begins, or SIZE_MAX; *n_mark: bytes of it that belong to this message. */
static size_t find_end(const x3_text *held, size_t from, size_t *n_mark)
{
    size_t first = SIZE_MAX;

    *n_mark = 0;
    for (size_t i = 0; i < N_ENDS; i++) {
        size_t at = find(held, from, held->n_items, ends[i]);
        if (at < first) {
            first = at;
            *n_mark = i + 1 < N_ENDS ? strlen(ends[i]) : 0;
        }
    }
    return first;
}

/* Whether what is held, but for white space, begins as a head does: 1, 0 when it may come to, -1 when not. */
static int begins_head(const x3_text *held)
{
    static const char *const words[] = {START, CHANNEL, MESSAGE, "to="};
    size_t at = n_white(held);
    int result = -1;

    for (size_t i = 0; i < 4; i++) {
        size_t n = strlen(words[i]), there = x3_min_size(n, held->n_items - at);
        if (there == 0 || memcmp(held->items + at, words[i], there) == 0)
            result = there == n || result == 1;
    }
    return result;
}

/* ---- phases: each returns through *more whether there is something to do in the next one ---- */

static x3_status put_content(x3_harmony *h, const char *text, size_t n, x3_reply_parts *out, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, x3_text_put(&out->content, "\n\n", n > 0 && !h->begun && h->content && !h->keep_marks ? 2 : 0, err));
    X3_TRY(rc, out, x3_text_put(&out->content, text, n, err));
    h->begun |= n > 0;
    h->content |= n > 0;
out:
    return rc;
}

static enum x3_harmony_phase phase_of(const x3_text *held, size_t n_head)
{
    size_t channel = find(held, 0, n_head, CHANNEL);

    if (find(held, 0, n_head, "to=") != SIZE_MAX)
        return X3_HARMONY_CALL;
    if (channel == SIZE_MAX)
        return X3_HARMONY_CONTENT;
    channel += strlen(CHANNEL);
    while (channel < n_head && is_white(held->items[channel]))
        channel++;
    return find(held, channel, n_head, "analysis") == channel ? X3_HARMONY_REASONING : X3_HARMONY_CONTENT;
}

static x3_status run_head(x3_harmony *h, x3_text *held, bool over, x3_reply_parts *out, bool *more, x3_err *err)
{
    size_t n_mark;
    x3_status rc = X3_OK;

    *more = false;
    h->begun = h->marked = false;
    if (h->any)
        drop(held, n_white(held));
    int head = begins_head(held);
    if (held->n_items == 0 || (head == 0 && !over))
        return X3_OK;
    size_t start = find(held, n_white(held), held->n_items, START), own = start == n_white(held) ? start + strlen(START) : 0;
    size_t end = find_end(held, own, &n_mark), message = find(held, 0, held->n_items, MESSAGE);
    if (head == 1 && message == SIZE_MAX && end == SIZE_MAX && !over)
        return X3_OK;
    h->any = *more = true;
    if (head != 1) {
        h->phase = X3_HARMONY_CONTENT;
    } else if (message == SIZE_MAX || message > end) { /* no head: text */
        h->phase = X3_HARMONY_CONTENT;
        X3_TRY(rc, out, put_content(h, held->items, own, out, err));
        drop(held, own);
    } else {
        size_t n_head = message + strlen(MESSAGE);
        h->phase = phase_of(held, message);
        h->marked = h->phase == X3_HARMONY_REASONING && h->keep_marks;
        if (h->marked) {
            h->phase = X3_HARMONY_CONTENT;
            X3_TRY(rc, out, put_content(h, held->items, n_head, out, err));
        }
        if (h->phase != X3_HARMONY_CALL)
            drop(held, n_head);
    }
out:
    return rc;
}

/* Reasoning or content. White space before an end is dropped, so it waits. */
static x3_status run_body(x3_harmony *h, x3_text *held, bool over, x3_reply_parts *out, bool *more, x3_err *err)
{
    const bool reasoning = h->phase == X3_HARMONY_REASONING;
    size_t n_mark, end, n, keep = 0;
    x3_status rc;

    if (reasoning && !h->begun)
        drop(held, n_white(held));
    end = find_end(held, 0, &n_mark);
    for (size_t i = 0; i < N_ENDS && end == SIZE_MAX && !over && held->n_items > 0; i++)
        keep = x3_max_size(keep, x3_text_overlap(held->items, held->n_items, ends[i], strlen(ends[i])));
    n = end != SIZE_MAX ? end : held->n_items - keep;
    if (!h->marked && (reasoning || end != SIZE_MAX || !over))
        n = without_white(held, n);
    if (reasoning) {
        X3_TRY(rc, out, x3_text_put(&out->reasoning, "\n\n", n > 0 && !h->begun && h->reasoning ? 2 : 0, err));
        X3_TRY(rc, out, x3_text_put(&out->reasoning, held->items, n, err));
        h->begun |= n > 0;
        h->reasoning |= n > 0;
    } else {
        X3_TRY(rc, out, put_content(h, held->items, n, out, err));
    }
    *more = end != SIZE_MAX;
    if (*more) {
        if (h->marked)
            X3_TRY(rc, out, put_content(h, held->items + end, n_mark, out, err));
        h->phase = X3_HARMONY_HEAD;
        n = end + n_mark;
    }
    drop(held, over && !*more ? held->n_items : n);
out:
    return rc;
}

/* A message to a function, with its head: content, marks and all, when it is no call. */
static x3_status run_call(x3_harmony *h, x3_text *held, bool over, x3_reply_parts *out, bool *more, x3_err *err)
{
    size_t n_mark, end = find_end(held, find(held, 0, held->n_items, MESSAGE), &n_mark);
    size_t n = end == SIZE_MAX ? held->n_items : end;
    bool parsed = false;
    x3_status rc = X3_OK;

    *more = false;
    if (end == SIZE_MAX && !over)
        return X3_OK;
    if (h->tools != NULL)
        X3_TRY(rc, out, x3_tool_calls_parse(X3_TOOLS_HARMONY, held->items, n, h->tools, &out->calls, &parsed, err));
    if (!parsed)
        X3_TRY(rc, out, put_content(h, held->items, n + n_mark, out, err));
    drop(held, n + n_mark);
    h->phase = X3_HARMONY_HEAD;
    *more = true;
out:
    return rc;
}

x3_status x3_harmony_run(x3_harmony *h, x3_text *held, bool over, x3_reply_parts *out, x3_err *err)
{
    bool more = true;
    x3_status rc = X3_OK;

    while (more && rc == X3_OK)
        switch (h->phase) {
        case X3_HARMONY_HEAD:
            rc = run_head(h, held, over, out, &more, err);
            break;
        case X3_HARMONY_REASONING:
        case X3_HARMONY_CONTENT:
            rc = run_body(h, held, over, out, &more, err);
            break;
        case X3_HARMONY_CALL:
            rc = run_call(h, held, over, out, &more, err);
            break;
        }
    return rc;
}
