#include "runtime/serve/server_json.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void x3_api_add(x3_status *rc, cJSON *object, const char *key, cJSON *value, x3_err *err)
{
    if (*rc == X3_OK && object != NULL)
        *rc = x3_json_add(object, key, value, err);
    else
        cJSON_Delete(value);
    if (*rc == X3_OK && object == NULL)
        *rc = x3_fail(err, X3_ERR_MEMORY, "out of memory while building a response");
}

/* A list or object that has been added to its parent, or NULL. */
static cJSON *add_new(x3_status *rc, cJSON *object, const char *key, bool is_list, x3_err *err)
{
    cJSON *value = is_list ? cJSON_CreateArray() : cJSON_CreateObject();

    x3_api_add(rc, object, key, value, err);
    return *rc == X3_OK ? value : NULL;
}

static void add_text(x3_status *rc, cJSON *object, const char *key, const char *text, x3_err *err)
{
    x3_api_add(rc, object, key, cJSON_CreateString(text), err);
}

static void add_number(x3_status *rc, cJSON *object, const char *key, double number, x3_err *err)
{
    x3_api_add(rc, object, key, cJSON_CreateNumber(number), err);
}

static void add_buffer(x3_status *rc, cJSON *object, const char *key, const x3_text *text, x3_err *err)
{
    char *copy = NULL;

    if (*rc == X3_OK)
        *rc = x3_strndup(&copy, text->n_items == 0 ? "" : text->items, text->n_items, err);
    if (*rc == X3_OK)
        add_text(rc, object, key, copy, err);
    free(copy);
}

/* ---- log-probabilities ---- */

/* JSON has no infinity; OpenAI's own servers write this for what cannot come. */
static double json_number(float logprob)
{
    return isfinite(logprob) ? logprob : -9999;
}

/* "token" as text, "logprob", "bytes" */
static void add_token(x3_status *rc, cJSON *entry, const x3_tokenizer *t, int32_t id, float logprob, x3_err *err)
{
    x3_view bytes = x3_tokenizer_token_bytes(t, (uint32_t)id), text = bytes;
    x3_text room = {0};
    cJSON *list;

    if (*rc == X3_OK && text.data != NULL)
        *rc = x3_utf8_repair_string(&text, &room, err);
    const x3_text view = {(char *)(uintptr_t)text.data, text.n_bytes, 0};
    add_buffer(rc, entry, "token", &view, err);
    add_number(rc, entry, "logprob", json_number(logprob), err);
    list = add_new(rc, entry, "bytes", true, err);
    for (size_t i = 0; i < bytes.n_bytes && list != NULL; i++)
        add_number(rc, list, NULL, (unsigned char)bytes.data[i], err);
    x3_text_free(&room);
}

/* {"content": [{…, "top_logprobs": […]}]} */
static void add_chat_logprobs(x3_status *rc, cJSON *choice, const x3_api_choice *c, x3_err *err)
{
    const x3_tokenizer *t = c->reply->o->tokenizer;
    cJSON *all = add_new(rc, choice, "logprobs", false, err), *content = add_new(rc, all, "content", true, err);

    for (size_t i = 0; i < c->ready.n_items && *rc == X3_OK; i++) {
        const x3_sampled *s = &c->ready.items[i].sampled;
        cJSON *entry = add_new(rc, content, NULL, false, err);
        add_token(rc, entry, t, s->id, s->logprob, err);
        cJSON *top = add_new(rc, entry, "top_logprobs", true, err);
        for (size_t j = 0; j < s->n_top && *rc == X3_OK; j++)
            add_token(rc, add_new(rc, top, NULL, false, err), t, s->top[j].id, s->top[j].logprob, err);
    }
}

static void add_token_text(x3_status *rc, cJSON *list, cJSON *object, const x3_tokenizer *t, int32_t id, float logprob, x3_err *err)
{
    x3_view text = x3_tokenizer_token_bytes(t, (uint32_t)id);
    x3_text room = {0};
    char *name = NULL;

    if (*rc == X3_OK && text.data != NULL)
        *rc = x3_utf8_repair_string(&text, &room, err);
    if (*rc == X3_OK)
        *rc = x3_strndup(&name, text.data == NULL ? "" : text.data, text.n_bytes, err);
    if (list != NULL && *rc == X3_OK)
        add_text(rc, list, NULL, name, err);
    if (object != NULL && *rc == X3_OK && cJSON_GetObjectItemCaseSensitive(object, name) == NULL)
        add_number(rc, object, name, json_number(logprob), err);
    x3_text_free(&room);
    free(name);
}

/* {"tokens", "token_logprobs", "top_logprobs", "text_offset"} */
static void add_text_logprobs(x3_status *rc, cJSON *choice, const x3_api_choice *c, x3_err *err)
{
    const x3_tokenizer *t = c->reply->o->tokenizer;
    cJSON *all = add_new(rc, choice, "logprobs", false, err), *tokens = add_new(rc, all, "tokens", true, err);
    cJSON *values = add_new(rc, all, "token_logprobs", true, err), *tops = add_new(rc, all, "top_logprobs", true, err);
    cJSON *offsets = add_new(rc, all, "text_offset", true, err);

    for (size_t i = 0; i < c->ready.n_items && *rc == X3_OK; i++) {
        const x3_api_logprob *l = &c->ready.items[i];
        add_token_text(rc, tokens, NULL, t, l->sampled.id, 0, err);
        add_number(rc, values, NULL, json_number(l->sampled.logprob), err);
        add_number(rc, offsets, NULL, (double)l->begin, err);
        cJSON *top = add_new(rc, tops, NULL, false, err);
        for (size_t j = 0; j < l->sampled.n_top && *rc == X3_OK; j++)
            add_token_text(rc, NULL, top, t, l->sampled.top[j].id, l->sampled.top[j].logprob, err);
    }
}

static void add_logprobs(x3_status *rc, cJSON *choice, const x3_api_choice *c, x3_err *err)
{
    if (c->reply->request.sampling.n_top < 0)
        x3_api_add(rc, choice, "logprobs", cJSON_CreateNull(), err);
    else if (c->reply->request.chat)
        add_chat_logprobs(rc, choice, c, err);
    else
        add_text_logprobs(rc, choice, c, err);
}

/* ---- parts ---- */

/* Templates of Mistral refuse an id that has not just 9 letters and digits. */
static void make_call_id(char *id, size_t room, const x3_api_choice *c, size_t index)
{
    char hex[17];

    snprintf(id, room, "call_%.30s_%zu_%zu", strchr(c->reply->id, '-') + 1, (size_t)(c - c->reply->choices), index);
    if (c->reply->request.tool_format != X3_TOOLS_MISTRAL)
        return;
    x3_hash_text(x3_hash(id, strlen(id)), hex);
    snprintf(id, room, "%.9s", hex);
}

static void add_calls(x3_status *rc, cJSON *message, const x3_api_choice *c, bool numbered, x3_err *err)
{
    cJSON *list = add_new(rc, message, "tool_calls", true, err);

    for (size_t i = 0; i < c->parts.calls.n_items && *rc == X3_OK; i++) {
        char id[64];
        size_t index = numbered ? c->n_calls + i : i;
        if (c->reply->request.one_call && index > 0)
            break;
        cJSON *call = add_new(rc, list, NULL, false, err);
        make_call_id(id, sizeof id, c, index);
        if (numbered)
            add_number(rc, call, "index", (double)index, err);
        add_text(rc, call, "id", id, err);
        add_text(rc, call, "type", "function", err);
        cJSON *function = add_new(rc, call, "function", false, err);
        add_text(rc, function, "name", c->parts.calls.items[i].name, err);
        add_text(rc, function, "arguments", c->parts.calls.items[i].arguments, err);
    }
}

static void add_usage(x3_status *rc, cJSON *object, const x3_api_reply *reply, x3_err *err)
{
    size_t n_prompt = 0, n_reply = 0, n_cached = 0;
    cJSON *usage = add_new(rc, object, "usage", false, err);

    for (size_t i = 0; i < reply->n_choices; i++) {
        const x3_api_choice *c = &reply->choices[i];
        if (i % reply->request.n == 0) {
            n_prompt += c->stats.n_prompt;
            n_cached += c->stats.n_cached;
        }
        n_reply += c->stats.n_reply;
    }
    add_number(rc, usage, "prompt_tokens", (double)n_prompt, err);
    add_number(rc, usage, "completion_tokens", (double)n_reply, err);
    add_number(rc, usage, "total_tokens", (double)(n_prompt + n_reply), err);
    cJSON *details = add_new(rc, usage, "prompt_tokens_details", false, err);
    add_number(rc, details, "cached_tokens", (double)n_cached, err);
}

static double rate(double n, double seconds)
{
    return seconds > 0 ? n / seconds : 0;
}

/* Those of llama.cpp, of one choice. The first token comes with the prompt's time. */
static void add_timings(x3_status *rc, cJSON *object, const x3_reply_stats *s, x3_err *err)
{
    cJSON *t = add_new(rc, object, "timings", false, err);
    double n_prompt = (double)(s->n_prompt - s->n_cached), n_reply = s->n_reply > 0 ? (double)s->n_reply - 1 : 0;

    add_number(rc, t, "cache_n", (double)s->n_cached, err);
    add_number(rc, t, "prompt_n", n_prompt, err);
    add_number(rc, t, "prompt_ms", 1e3 * s->prompt, err);
    add_number(rc, t, "prompt_per_token_ms", n_prompt > 0 ? 1e3 * s->prompt / n_prompt : 0, err);
    add_number(rc, t, "prompt_per_second", rate(n_prompt, s->prompt), err);
    add_number(rc, t, "predicted_n", (double)s->n_reply, err);
    add_number(rc, t, "predicted_ms", 1e3 * s->reply, err);
    add_number(rc, t, "predicted_per_token_ms", n_reply > 0 ? 1e3 * s->reply / n_reply : 0, err);
    add_number(rc, t, "predicted_per_second", rate(n_reply, s->reply), err);
    add_number(rc, t, "queued_ms", 1e3 * s->queued, err);
}

/* {"id", "object", "created", "model"} */
static cJSON *begin(x3_status *rc, const x3_api_reply *reply, bool chunk, x3_err *err)
{
    cJSON *json = cJSON_CreateObject();

    add_text(rc, json, "id", reply->id, err);
    add_text(rc, json, "object", !reply->request.chat ? "text_completion" : chunk ? "chat.completion.chunk" : "chat.completion", err);
    add_number(rc, json, "created", (double)reply->created, err);
    add_text(rc, json, "model", reply->o->model_name, err);
    return json;
}

/* ---- whole responses ---- */

static void add_message(x3_status *rc, cJSON *choice, const x3_api_choice *c, x3_err *err)
{
    cJSON *message = add_new(rc, choice, "message", false, err);

    add_text(rc, message, "role", "assistant", err);
    if (c->parts.calls.n_items > 0 && c->parts.content.n_items == 0)
        x3_api_add(rc, message, "content", cJSON_CreateNull(), err);
    else
        add_buffer(rc, message, "content", &c->parts.content, err);
    if (c->parts.reasoning.n_items > 0)
        add_buffer(rc, message, "reasoning_content", &c->parts.reasoning, err);
    if (c->parts.calls.n_items > 0)
        add_calls(rc, message, c, false, err);
}

x3_status x3_api_response(const x3_api_reply *reply, cJSON **out, x3_err *err)
{
    x3_status rc = X3_OK;
    cJSON *json = begin(&rc, reply, false, err), *choices = add_new(&rc, json, "choices", true, err);

    for (size_t i = 0; i < reply->n_choices && rc == X3_OK; i++) {
        x3_api_choice *c = &reply->choices[i];
        cJSON *choice = add_new(&rc, choices, NULL, false, err);
        c->n_calls = c->parts.calls.n_items;
        add_number(&rc, choice, "index", (double)i, err);
        if (reply->request.chat)
            add_message(&rc, choice, c, err);
        else
            add_buffer(&rc, choice, "text", &c->parts.content, err);
        add_logprobs(&rc, choice, c, err);
        add_text(&rc, choice, "finish_reason", x3_api_choice_finish(c), err);
    }
    add_usage(&rc, json, reply, err);
    add_timings(&rc, json, &reply->choices[0].stats, err);
    if (rc != X3_OK) {
        cJSON_Delete(json);
        json = NULL;
    }
    *out = json;
    return rc;
}

/* ---- streams ---- */

static x3_status put_event(x3_text *out, x3_status rc, cJSON *json, x3_err *err)
{
    char *text = rc == X3_OK ? cJSON_PrintUnformatted(json) : NULL;

    cJSON_Delete(json);
    if (rc == X3_OK && text == NULL)
        rc = x3_fail(err, X3_ERR_MEMORY, "out of memory while writing an event");
    if (rc == X3_OK)
        rc = x3_text_put(out, "data: ", 6, err);
    if (rc == X3_OK)
        rc = x3_text_put(out, text, strlen(text), err);
    if (rc == X3_OK)
        rc = x3_text_put(out, "\n\n", 2, err);
    cJSON_free(text);
    return rc;
}

typedef enum chunk_kind { CHUNK_FIRST, CHUNK_PARTS, CHUNK_LAST } chunk_kind;

/* The delta of a chat, or the text of a completion. */
static void add_delta(x3_status *rc, cJSON *choice, const x3_api_choice *c, chunk_kind kind, x3_err *err)
{
    const x3_reply_parts *p = &c->parts;

    if (!c->reply->request.chat) {
        add_buffer(rc, choice, "text", kind == CHUNK_PARTS ? &p->content : &(x3_text){0}, err);
        return;
    }
    cJSON *delta = add_new(rc, choice, "delta", false, err);
    if (kind == CHUNK_FIRST) {
        add_text(rc, delta, "role", "assistant", err);
        add_text(rc, delta, "content", "", err);
    }
    if (kind != CHUNK_PARTS)
        return;
    if (p->reasoning.n_items > 0)
        add_buffer(rc, delta, "reasoning_content", &p->reasoning, err);
    if (p->content.n_items > 0)
        add_buffer(rc, delta, "content", &p->content, err);
    if (p->calls.n_items > 0)
        add_calls(rc, delta, c, true, err);
}

static x3_status put_chunk(x3_text *out, const x3_api_choice *c, chunk_kind kind, x3_err *err)
{
    const x3_api_reply *reply = c->reply;
    x3_status rc = X3_OK;
    cJSON *json = begin(&rc, reply, true, err), *choices = add_new(&rc, json, "choices", true, err);
    cJSON *choice = add_new(&rc, choices, NULL, false, err);

    add_number(&rc, choice, "index", (double)(c - reply->choices), err);
    add_delta(&rc, choice, c, kind, err);
    if (kind == CHUNK_PARTS)
        add_logprobs(&rc, choice, c, err);
    else
        x3_api_add(&rc, choice, "logprobs", cJSON_CreateNull(), err);
    if (kind == CHUNK_LAST)
        add_text(&rc, choice, "finish_reason", x3_api_choice_finish(c), err);
    else
        x3_api_add(&rc, choice, "finish_reason", cJSON_CreateNull(), err);
    if (reply->request.include_usage)
        x3_api_add(&rc, json, "usage", cJSON_CreateNull(), err);
    if (kind == CHUNK_LAST)
        add_timings(&rc, json, &c->stats, err);
    return put_event(out, rc, json, err);
}

x3_status x3_api_events(x3_api_choice *c, x3_text *out, x3_err *err)
{
    x3_reply_parts *p = &c->parts;
    x3_status rc = X3_OK;

    if (!c->begun && c->reply->request.chat)
        X3_TRY(rc, out, put_chunk(out, c, CHUNK_FIRST, err));
    c->begun = true;
    if (p->content.n_items > 0 || p->reasoning.n_items > 0 || p->calls.n_items > 0 || c->ready.n_items > 0)
        X3_TRY(rc, out, put_chunk(out, c, CHUNK_PARTS, err));
    c->n_calls += p->calls.n_items;
    x3_reply_parts_free(p);
    c->ready.n_items = 0;
    if (c->over && !c->finished && c->finish != X3_FINISH_ERROR) {
        X3_TRY(rc, out, put_chunk(out, c, CHUNK_LAST, err));
        c->finished = true;
    }
out:
    return rc;
}

x3_status x3_api_last_events(const x3_api_reply *reply, x3_text *out, x3_err *err)
{
    x3_status rc = X3_OK;

    if (reply->request.include_usage) {
        cJSON *json = begin(&rc, reply, true, err);
        add_new(&rc, json, "choices", true, err);
        add_usage(&rc, json, reply, err);
        rc = put_event(out, rc, json, err);
    }
    return rc == X3_OK ? x3_text_put(out, "data: [DONE]\n\n", 14, err) : rc;
}

/* ---- errors ---- */

/* Messages quote what clients have sent, and are cut at a number of bytes. */
static void add_repaired(x3_status *rc, cJSON *object, const char *key, const char *text, x3_err *err)
{
    x3_view view = {text, strlen(text)};
    x3_text room = {0};

    if (*rc == X3_OK)
        *rc = x3_utf8_repair(&view, &room, err);
    const x3_text repaired = {(char *)(uintptr_t)view.data, view.n_bytes, 0};
    add_buffer(rc, object, key, &repaired, err);
    x3_text_free(&room);
}

x3_status x3_api_error_json(const x3_api_error *e, cJSON **out, x3_err *err)
{
    x3_status rc = X3_OK;
    cJSON *json = cJSON_CreateObject(), *error = add_new(&rc, json, "error", false, err);

    add_repaired(&rc, error, "message", e->err.text, err);
    add_text(&rc, error, "type", e->type, err);
    if (e->param[0] == '\0')
        x3_api_add(&rc, error, "param", cJSON_CreateNull(), err);
    else
        add_repaired(&rc, error, "param", e->param, err);
    x3_api_add(&rc, error, "code", e->code == NULL ? cJSON_CreateNull() : cJSON_CreateString(e->code), err);
    if (rc != X3_OK) {
        cJSON_Delete(json);
        json = NULL;
    }
    *out = json;
    return rc;
}

x3_status x3_api_error_event(const x3_err *failure, x3_text *out, x3_err *err)
{
    x3_api_error e = {.status = 500, .type = "server_error", .err = *failure};
    cJSON *json = NULL;
    x3_status rc = x3_api_error_json(&e, &json, err);

    return put_event(out, rc, json, err);
}
