#include "runtime/serve/reply_parser.h"

#include <stdlib.h>
#include <string.h>

#include "runtime/serve/harmony.h"
#include "runtime/serve/text_stream.h"

#define THINK "<think>"
#define THINK_END "</think>"
#define PYTHON_TAG "<|python_tag|>"

enum phase { PHASE_START, PHASE_REASONING, PHASE_CONTENT, PHASE_CALL };

struct x3_reply_parser {
    x3_tool_format format;
    x3_reasoning reasoning;
    const cJSON *tools;
    enum phase phase;
    bool skip_space;       /* at the beginning of what comes */
    bool has_calls;
    const char *begin, *end; /* marks of calls; NULL: none; the same: the next call or the reply's end ends a call */
    const char *opened;    /* the mark that the call began with */
    x3_harmony harmony;
    x3_text held;          /* not yet decided about */
    x3_text gap;           /* white space before a call, which comes back when it is none */
};

x3_status x3_reply_parser_create(x3_reply_parser **out, x3_tool_format format, x3_reasoning reasoning, const cJSON *tools,
                                 x3_err *err)
{
    x3_status rc = x3_alloc(out, 1, sizeof **out, err);
    x3_reply_parser *p = *out;

    if (rc != X3_OK)
        return rc;
    p->format = format;
    p->reasoning = reasoning;
    p->tools = tools;
    p->harmony = (x3_harmony){.tools = tools, .keep_marks = reasoning == X3_REASONING_NONE};
    p->phase = reasoning == X3_REASONING_OPEN ? PHASE_REASONING : PHASE_START;
    p->skip_space = reasoning == X3_REASONING_OPEN;
    if (format == X3_TOOLS_TAGGED) {
        p->begin = "<tool_call>";
        p->end = "</tool_call>";
    } else if (format == X3_TOOLS_DEEPSEEK) {
        p->begin = "<｜tool▁calls▁begin｜>";
        p->end = "<｜tool▁calls▁end｜>";
    } else if (format == X3_TOOLS_DSML) {
        p->begin = "<｜DSML｜function_calls>";
        p->end = "</｜DSML｜function_calls>";
    } else if (format == X3_TOOLS_DSML_V4) {
        p->begin = "<｜DSML｜tool_calls>";
        p->end = "</｜DSML｜tool_calls>";
    } else if (format == X3_TOOLS_MISTRAL) {
        p->begin = p->end = "[TOOL_CALLS]";
    }
    return X3_OK;
}

void x3_reply_parser_free(x3_reply_parser *p)
{
    if (p == NULL)
        return;
    x3_text_free(&p->held);
    x3_text_free(&p->gap);
    free(p);
}

void x3_reply_parts_free(x3_reply_parts *parts)
{
    x3_text_free(&parts->content);
    x3_text_free(&parts->reasoning);
    x3_tool_calls_free(&parts->calls);
}

static bool is_text(const char *mark, const char *text, size_t n_bytes)
{
    return strlen(mark) == n_bytes && memcmp(mark, text, n_bytes) == 0;
}

bool x3_reply_parser_wants(const x3_reply_parser *p, const char *text, size_t n_bytes)
{
    /* beside the think tags: tokens that marks are made of */
    static const char *const marks[X3_TOOL_FORMATS][7] = {
        [X3_TOOLS_TAGGED] = {"<tool_call>", "</tool_call>"},
        [X3_TOOLS_DEEPSEEK] = {"<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>",
                               "<｜tool▁sep｜>"},
        [X3_TOOLS_DSML] = {"｜DSML｜"},
        [X3_TOOLS_DSML_V4] = {"｜DSML｜"},
        [X3_TOOLS_MISTRAL] = {"[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"},
        [X3_TOOLS_HARMONY] = {"<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>"},
        [X3_TOOLS_LLAMA] = {PYTHON_TAG},
    };

    if (p->reasoning != X3_REASONING_NONE && (is_text(THINK, text, n_bytes) || is_text(THINK_END, text, n_bytes)))
        return true;
    for (size_t i = 0; i < 7; i++)
        if (marks[p->format][i] != NULL && is_text(marks[p->format][i], text, n_bytes))
            return true;
    return false;
}

/* ---- the text held ---- */

static bool is_white(char c)
{
    return c == ' ' || c == '\n' || c == '\t' || c == '\r';
}

static void drop(x3_reply_parser *p, size_t n)
{
    if (n > 0)
        memmove(p->held.items, p->held.items + n, p->held.n_items - n);
    p->held.n_items -= n;
}

/* Length of the first n bytes held without white space at their end. */
static size_t without_white(const x3_reply_parser *p, size_t n)
{
    while (n > 0 && is_white(p->held.items[n - 1]))
        n--;
    return n;
}

/* Where `mark` begins, or SIZE_MAX. */
static size_t find(const x3_reply_parser *p, const char *mark)
{
    const char *at = p->held.n_items == 0 ? NULL : memmem(p->held.items, p->held.n_items, mark, strlen(mark));

    return at == NULL ? SIZE_MAX : (size_t)(at - p->held.items);
}

/* 1 when what is held, but for white space, begins with `mark`; 0 when it may come to; -1 when not. */
static int begins_with(const x3_reply_parser *p, const char *mark, size_t *end)
{
    size_t at = 0, n = strlen(mark);

    while (at < p->held.n_items && is_white(p->held.items[at]))
        at++;
    *end = at + n;
    size_t there = x3_min_size(n, p->held.n_items - at);
    if (there > 0 && memcmp(p->held.items + at, mark, there) != 0)
        return -1;
    return there == n;
}

/* ---- phases: each returns through *more whether there is something to do in the next one ---- */

static x3_status run_start(x3_reply_parser *p, bool over, bool *more)
{
    size_t end;
    int think = p->reasoning == X3_REASONING_TAGS ? begins_with(p, THINK, &end) : -1;

    *more = true;
    if (think == 1) {
        drop(p, end);
        p->phase = PHASE_REASONING;
        p->skip_space = true;
        return X3_OK;
    }
    int tag = p->format == X3_TOOLS_LLAMA ? begins_with(p, PYTHON_TAG, &end) : -1;
    if (tag == 1) {
        drop(p, end);
        p->opened = PYTHON_TAG;
        p->phase = PHASE_CALL;
    } else if (p->format == X3_TOOLS_LLAMA && begins_with(p, "{", &end) == 1) {
        p->opened = "";
        p->phase = PHASE_CALL;
    } else if ((think == 0 || tag == 0) && !over) {
        *more = false;
    } else {
        p->phase = PHASE_CONTENT;
    }
    return X3_OK;
}

/* White space is dropped where it is not wanted; true when something is left. */
static bool skip_space(x3_reply_parser *p)
{
    size_t n = 0;

    while (p->skip_space && n < p->held.n_items && is_white(p->held.items[n]))
        n++;
    drop(p, n);
    p->skip_space = p->skip_space && p->held.n_items == 0;
    return p->held.n_items > 0;
}

static x3_status run_reasoning(x3_reply_parser *p, bool over, x3_reply_parts *out, bool *more, x3_err *err)
{
    size_t end, n;
    x3_status rc;

    *more = false;
    if (!skip_space(p))
        return X3_OK;
    end = find(p, THINK_END);
    n = end != SIZE_MAX ? end : p->held.n_items - x3_text_overlap(p->held.items, p->held.n_items, THINK_END, strlen(THINK_END));
    if (over && end == SIZE_MAX)
        n = p->held.n_items;
    n = without_white(p, n);
    X3_TRY(rc, out, x3_text_put(&out->reasoning, p->held.items, n, err));
    if (end != SIZE_MAX) {
        drop(p, end + strlen(THINK_END));
        p->phase = PHASE_CONTENT;
        p->skip_space = *more = true;
    } else {
        drop(p, over ? p->held.n_items : n);
    }
out:
    return rc;
}

static x3_status run_content(x3_reply_parser *p, bool over, x3_reply_parts *out, bool *more, x3_err *err)
{
    size_t at = SIZE_MAX, n;
    x3_status rc = X3_OK;

    *more = false;
    if (!skip_space(p))
        return X3_OK;
    n = p->held.n_items;
    if (p->begin != NULL) {
        at = find(p, p->begin);
        if (at != SIZE_MAX)
            n = without_white(p, at);
        else if (!over)
            n = without_white(p, n - x3_text_overlap(p->held.items, n, p->begin, strlen(p->begin)));
        else if (p->has_calls)
            n = without_white(p, n);
    }
    X3_TRY(rc, out, x3_text_put(&out->content, p->held.items, n, err));
    if (at != SIZE_MAX) {
        p->gap.n_items = 0;
        X3_TRY(rc, out, x3_text_put(&p->gap, p->held.items + n, at - n, err));
        drop(p, at + strlen(p->begin));
        p->opened = p->begin;
        p->phase = PHASE_CALL;
        *more = true;
    } else {
        drop(p, over ? p->held.n_items : n);
    }
out:
    return rc;
}

static x3_status run_call(x3_reply_parser *p, bool over, x3_reply_parts *out, bool *more, x3_err *err)
{
    size_t end = p->end == NULL ? SIZE_MAX : find(p, p->end), n = end == SIZE_MAX ? p->held.n_items : end;
    bool parsed;
    x3_status rc = X3_OK;

    *more = false;
    if (end == SIZE_MAX && !over)
        return X3_OK;
    X3_TRY(rc, out, x3_tool_calls_parse(p->format, p->held.items, n, p->tools, &out->calls, &parsed, err));
    n += end == SIZE_MAX || p->end == p->begin ? 0 : strlen(p->end);
    if (!parsed) {
        X3_TRY(rc, out, x3_text_put(&out->content, p->gap.items, p->gap.n_items, err));
        X3_TRY(rc, out, x3_text_put(&out->content, p->opened, strlen(p->opened), err));
        X3_TRY(rc, out, x3_text_put(&out->content, p->held.items, n, err));
    }
    p->gap.n_items = 0;
    p->has_calls |= parsed;
    p->skip_space = parsed;
    p->phase = PHASE_CONTENT;
    drop(p, n);
    *more = true;
out:
    return rc;
}

static x3_status run(x3_reply_parser *p, bool over, x3_reply_parts *out, x3_err *err)
{
    bool more = true;
    x3_status rc = X3_OK;

    if (p->format == X3_TOOLS_HARMONY)
        return x3_harmony_run(&p->harmony, &p->held, over, out, err);
    while (more && rc == X3_OK)
        switch (p->phase) {
        case PHASE_START:
            rc = run_start(p, over, &more);
            break;
        case PHASE_REASONING:
            rc = run_reasoning(p, over, out, &more, err);
            break;
        case PHASE_CONTENT:
            rc = run_content(p, over, out, &more, err);
            break;
        case PHASE_CALL:
            rc = run_call(p, over, out, &more, err);
            break;
        }
    return rc;
}

x3_status x3_reply_parser_put(x3_reply_parser *p, const char *text, size_t n_bytes, x3_reply_parts *out, x3_err *err)
{
    x3_status rc = x3_text_put(&p->held, text, n_bytes, err);

    return rc == X3_OK ? run(p, false, out, err) : rc;
}

x3_status x3_reply_parser_end(x3_reply_parser *p, x3_reply_parts *out, x3_err *err)
{
    return run(p, true, out, err);
}
