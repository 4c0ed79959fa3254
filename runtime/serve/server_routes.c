/* Which path is answered by whom, and the answers that need no reply of the model. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/serve/server_internal.h"

/* An error whose message is both texts. */
static enum MHD_Result fail(x3_http *q, int status, const char *code, const char *text, const char *what)
{
    x3_api_error e = {0};

    if (x3_api_fail(&e, status, status >= 500 ? "server_error" : "invalid_request_error", code, NULL, "%s%.400s", text, what) == X3_OK)
        return MHD_NO;
    return x3_http_error(q, &e);
}

/* The answer when `rc` is good, else an error of ours. */
static enum MHD_Result answer(x3_http *q, x3_status rc, cJSON *json, const x3_err *err)
{
    if (rc == X3_OK)
        return x3_http_json(q, 200, json);
    cJSON_Delete(json);
    return fail(q, 500, NULL, err->text, "");
}

/* ---- what there is ---- */

static enum MHD_Result handle_models(x3_http *q)
{
    const x3_server_options *o = &q->s->o;
    cJSON *json = cJSON_CreateObject(), *data = cJSON_CreateArray(), *model = cJSON_CreateObject();
    x3_status rc = X3_OK;
    x3_err err = {0};

    x3_api_add(&rc, json, "object", cJSON_CreateString("list"), &err);
    x3_api_add(&rc, json, "data", data, &err);
    x3_api_add(&rc, rc == X3_OK ? data : NULL, NULL, model, &err);
    if (rc == X3_OK) {
        x3_api_add(&rc, model, "id", cJSON_CreateString(o->model_name), &err);
        x3_api_add(&rc, model, "object", cJSON_CreateString("model"), &err);
        x3_api_add(&rc, model, "created", cJSON_CreateNumber((double)q->s->created), &err);
        x3_api_add(&rc, model, "owned_by", cJSON_CreateString("exl3-serve"), &err);
        x3_api_add(&rc, model, "max_model_len", cJSON_CreateNumber((double)o->max_positions), &err);
    }
    return answer(q, rc, json, &err);
}

static cJSON *describe_sampling(x3_status *rc, const x3_sampling *s, x3_err *err)
{
    cJSON *json = cJSON_CreateObject();

    x3_api_add(rc, json, "temperature", cJSON_CreateNumber(s->temperature), err);
    x3_api_add(rc, json, "top_k", cJSON_CreateNumber((double)s->top_k), err);
    x3_api_add(rc, json, "top_p", cJSON_CreateNumber(s->top_p), err);
    x3_api_add(rc, json, "min_p", cJSON_CreateNumber(s->min_p), err);
    x3_api_add(rc, json, "repetition_penalty", cJSON_CreateNumber(s->repetition_penalty), err);
    return json;
}

static enum MHD_Result handle_props(x3_http *q)
{
    const x3_server_options *o = &q->s->o;
    const x3_hf_config *config = o->checkpoint->config;
    cJSON *json = cJSON_CreateObject(), *stops = cJSON_CreateArray();
    x3_engine_stats stats;
    x3_status rc = X3_OK;
    x3_err err = {0};

    x3_engine_stats_read(o->engine, &stats);
    x3_api_add(&rc, json, "model", cJSON_CreateString(o->model_name), &err);
    x3_api_add(&rc, json, "model_type", cJSON_CreateString(config->model_type), &err);
    x3_api_add(&rc, json, "version", cJSON_CreateString(X3_VERSION), &err);
    x3_api_add(&rc, json, "n_ctx", cJSON_CreateNumber((double)o->max_positions), &err);
    x3_api_add(&rc, json, "n_vocab", cJSON_CreateNumber((double)o->checkpoint->model->vocab), &err);
    x3_api_add(&rc, json, "kv_pages", cJSON_CreateNumber((double)stats.n_pages), &err);
    x3_api_add(&rc, json, "kv_page_tokens", cJSON_CreateNumber(X3_KV_PAGE), &err);
    x3_api_add(&rc, json, "default_sampling", describe_sampling(&rc, &q->s->defaults, &err), &err);
    x3_api_add(&rc, json, "stop_token_ids", stops, &err);
    for (size_t i = 0; i < config->n_stop_tokens; i++)
        x3_api_add(&rc, rc == X3_OK ? stops : NULL, NULL, cJSON_CreateNumber((double)config->stop_tokens[i]), &err);
    if (o->template != NULL)
        x3_api_add(&rc, json, "chat_template", cJSON_CreateString(x3_chat_template_source(o->template, false)), &err);
    return answer(q, rc, json, &err);
}

static enum MHD_Result handle_health(x3_http *q)
{
    static const char good[] = "{\"status\":\"ok\"}";
    x3_err err = {0};

    if (x3_engine_health(q->s->o.engine, &err) != X3_OK)
        return fail(q, 503, "engine_failed", err.text, "");
    return x3_http_text(q, 200, "application/json", good, sizeof good - 1);
}

static enum MHD_Result handle_page(x3_http *q)
{
    return x3_http_text(q, 200, "text/html; charset=utf-8", x3_status_page, x3_status_page_bytes);
}

/* ---- metrics ---- */

struct metric {
    const char *name, *type, *help;
    double value;
};

/* In the text format of Prometheus. */
static enum MHD_Result handle_metrics(x3_http *q)
{
    x3_engine_stats s;
    x3_text text = {0};
    x3_err err = {0};
    x3_status rc = X3_OK;
    char line[400];
    int n;

    x3_engine_stats_read(q->s->o.engine, &s);
    const struct metric metrics[] = {
        {"requests_total", "counter", "Replies asked for", (double)s.n_requests},
        {"replies_finished_total", "counter", "Replies that ended by themselves", (double)s.n_finished},
        {"replies_cancelled_total", "counter", "Replies ended because the client went away", (double)s.n_cancelled},
        {"replies_failed_total", "counter", "Replies ended by an error", (double)s.n_failed},
        {"preemptions_total", "counter", "Times that a sequence gave its pages back to be computed again", (double)s.n_preempted},
        {"steps_total", "counter", "Batches run", (double)s.n_steps},
        {"prompt_tokens_total", "counter", "Tokens of prompts", (double)s.n_prompt},
        {"prompt_tokens_cached_total", "counter", "Tokens of prompts found in the cache", (double)s.n_cached},
        {"reply_tokens_total", "counter", "Tokens of replies that have ended", (double)s.n_reply},
        {"prompt_seconds_total", "counter", "Time until the first token, summed over replies", s.prompt_seconds},
        {"reply_seconds_total", "counter", "Time from the first token to the end, summed over replies", s.reply_seconds},
        {"busy_seconds_total", "counter", "Time in which batches ran", s.busy_seconds},
        {"running", "gauge", "Replies being written", (double)s.n_running},
        {"queued", "gauge", "Replies waiting", (double)s.n_queued},
        {"kv_pages", "gauge", "Pages of the cache", (double)s.n_pages},
        {"kv_pages_held", "gauge", "Pages of sequences being written", (double)s.pages_held},
        {"kv_pages_cached", "gauge", "Pages of earlier sequences that can be found", (double)s.pages_cached},
        {"uptime_seconds", "gauge", "Time since the server was started", x3_seconds() - q->s->started},
    };
    for (size_t i = 0; i < sizeof metrics / sizeof metrics[0] && rc == X3_OK; i++) {
        n = snprintf(line, sizeof line, "# HELP exl3_%s %s.\n# TYPE exl3_%s %s\nexl3_%s %.17g\n", metrics[i].name, metrics[i].help,
                     metrics[i].name, metrics[i].type, metrics[i].name, metrics[i].value);
        rc = x3_text_put(&text, line, (size_t)n, &err);
    }
    pthread_mutex_lock(&q->s->mutex);
    n = snprintf(line, sizeof line, "# HELP exl3_http_responses_total Responses by class of status.\n# TYPE exl3_http_responses_total "
                 "counter\nexl3_http_responses_total{class=\"2xx\"} %llu\nexl3_http_responses_total{class=\"4xx\"} %llu\n"
                 "exl3_http_responses_total{class=\"5xx\"} %llu\n", (unsigned long long)q->s->responses[2],
                 (unsigned long long)q->s->responses[4], (unsigned long long)q->s->responses[5]);
    pthread_mutex_unlock(&q->s->mutex);
    if (rc == X3_OK)
        rc = x3_text_put(&text, line, (size_t)n, &err);
    enum MHD_Result result = rc == X3_OK ? x3_http_text(q, 200, "text/plain; version=0.0.4; charset=utf-8", text.items, text.n_items)
                                         : fail(q, 500, NULL, err.text, "");
    x3_text_free(&text);
    return result;
}

/* ---- tokens ---- */

static enum MHD_Result refuse(x3_http *q, x3_api_error *e, cJSON *body)
{
    cJSON_Delete(body);
    return x3_http_error(q, e);
}

static cJSON *list_tokens(x3_status *rc, const x3_ids *ids, x3_err *err)
{
    cJSON *list = cJSON_CreateArray();

    for (size_t i = 0; i < ids->n_items && *rc == X3_OK; i++)
        x3_api_add(rc, list, NULL, cJSON_CreateNumber(ids->items[i]), err);
    return list;
}

/* {"content": text, "add_special": false, "parse_special": true} to {"tokens": […], "count": n} */
static enum MHD_Result handle_tokenize(x3_http *q)
{
    const x3_tokenizer *t = q->s->o.tokenizer;
    const x3_ids *before, *after;
    bool add_special = false, parse_special = true;
    const char *text = NULL;
    x3_api_error e = {0};
    x3_ids ids = {0};
    cJSON *body, *json;
    x3_status rc;

    if (x3_api_parse(&body, q->body.items, q->body.n_items, &e) != X3_OK)
        return refuse(q, &e, NULL);
    if (x3_json_string(body, "content", true, &text, "request", &e.err) != X3_OK ||
        x3_json_bool(body, "add_special", false, &add_special, "request", &e.err) != X3_OK ||
        x3_json_bool(body, "parse_special", false, &parse_special, "request", &e.err) != X3_OK)
        rc = x3_api_invalid(&e, NULL, "the request cannot be read"); /* e.err says why */
    else
        rc = X3_OK;
    if (rc != X3_OK)
        return refuse(q, &e, body);
    x3_tokenizer_template(t, &before, &after);
    for (size_t i = 0; i < before->n_items && add_special && rc == X3_OK; i++)
        rc = x3_ids_push(&ids, before->items[i], &e.err);
    if (rc == X3_OK)
        rc = x3_tokenizer_encode(t, text, strlen(text), parse_special, 0, &ids, &e.err);
    for (size_t i = 0; i < after->n_items && add_special && rc == X3_OK; i++)
        rc = x3_ids_push(&ids, after->items[i], &e.err);
    cJSON_Delete(body);
    json = cJSON_CreateObject();
    x3_api_add(&rc, json, "tokens", list_tokens(&rc, &ids, &e.err), &e.err);
    x3_api_add(&rc, json, "count", cJSON_CreateNumber((double)ids.n_items), &e.err);
    x3_ids_free(&ids);
    return answer(q, rc, json, &e.err);
}

static x3_status read_tokens(const cJSON *body, const x3_tokenizer *t, x3_ids *ids, x3_api_error *e)
{
    const cJSON *list = x3_json_get(body, "tokens"), *item;
    int64_t id = 0;

    if (!cJSON_IsArray(list))
        return x3_api_invalid(e, "tokens", "\"tokens\" must be a list of token ids");
    cJSON_ArrayForEach(item, list) {
        if (x3_json_as_int(item, "tokens", 0, INT32_MAX, &id, "request", &e->err) != X3_OK)
            return x3_api_invalid(e, "tokens", "\"tokens\" must be a list of token ids"); /* e->err says which is not */
        if (x3_tokenizer_token_bytes(t, (uint32_t)id).data == NULL)
            return x3_api_invalid(e, "tokens", "%lld is no token", (long long)id);
        if (x3_ids_push(ids, (uint32_t)id, &e->err) != X3_OK)
            return x3_api_fail(e, 500, "server_error", NULL, NULL, "out of memory");
    }
    return X3_OK;
}

/* {"tokens": […]} to {"content": text} */
static enum MHD_Result handle_detokenize(x3_http *q)
{
    x3_api_error e = {0};
    x3_ids ids = {0};
    x3_text repaired = {0};
    cJSON *body, *json = NULL;
    char *text = NULL, *copy = NULL;
    size_t n_bytes = 0;
    x3_status rc;

    if (x3_api_parse(&body, q->body.items, q->body.n_items, &e) != X3_OK)
        return refuse(q, &e, NULL);
    if (read_tokens(body, q->s->o.tokenizer, &ids, &e) != X3_OK) {
        x3_ids_free(&ids);
        return refuse(q, &e, body);
    }
    cJSON_Delete(body);
    rc = x3_tokenizer_decode(q->s->o.tokenizer, ids.items, ids.n_items, false, &text, &n_bytes, &e.err);
    x3_view view = {text, n_bytes};
    if (rc == X3_OK)
        rc = x3_utf8_repair_string(&view, &repaired, &e.err);
    if (rc == X3_OK)
        rc = x3_strndup(&copy, view.n_bytes == 0 ? "" : view.data, view.n_bytes, &e.err);
    if (rc == X3_OK) {
        json = cJSON_CreateObject();
        x3_api_add(&rc, json, "content", cJSON_CreateString(copy), &e.err);
    }
    x3_ids_free(&ids);
    x3_text_free(&repaired);
    free(text);
    free(copy);
    return answer(q, rc, json, &e.err);
}

static enum MHD_Result read_tokenize(x3_http *q)
{
    sem_wait(&q->s->readers);
    enum MHD_Result result = handle_tokenize(q);
    sem_post(&q->s->readers);
    return result;
}

static enum MHD_Result read_detokenize(x3_http *q)
{
    sem_wait(&q->s->readers);
    enum MHD_Result result = handle_detokenize(q);
    sem_post(&q->s->readers);
    return result;
}

/* ---- routes ---- */

static const struct route {
    const char *path, *method;
    bool open; /* needs no key */
    x3_http_handler handle;
} routes[] = {
    {"/", "GET", true, handle_page},
    {"/health", "GET", true, handle_health},
    {"/v1/models", "GET", false, handle_models},
    {"/props", "GET", false, handle_props},
    {"/metrics", "GET", false, handle_metrics},
    {"/v1/chat/completions", "POST", false, x3_handle_chat},
    {"/v1/completions", "POST", false, x3_handle_completion},
    {"/tokenize", "POST", false, read_tokenize},
    {"/detokenize", "POST", false, read_detokenize},
};

static const struct route *find_route(const char *path)
{
    for (size_t i = 0; i < sizeof routes / sizeof routes[0]; i++)
        if (strcmp(routes[i].path, path) == 0)
            return &routes[i];
    return NULL;
}

bool x3_route_takes_body(const char *path)
{
    const struct route *r = find_route(path);

    return r != NULL && strcmp(r->method, "POST") == 0;
}

bool x3_route_is_open(const char *path)
{
    const struct route *r = find_route(path);

    return r != NULL && r->open;
}

enum MHD_Result x3_route(x3_http *q, const char *method, const char *path)
{
    const struct route *r = find_route(path);

    if (r == NULL)
        return fail(q, 404, "not_found", "there is nothing at ", path);
    if (strcmp(method, r->method) != 0 && !(strcmp(method, "HEAD") == 0 && strcmp(r->method, "GET") == 0))
        return fail(q, 405, "method_not_allowed", "this path only takes ", r->method);
    return r->handle(q);
}
