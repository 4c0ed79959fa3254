#include "runtime/serve/server_request.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/random.h>

/* ---- errors ---- */

X3_PRINTF(6, 0)
static x3_status fail_args(x3_api_error *e, int status, const char *type, const char *code, const char *param,
                           const char *format, va_list args)
{
    char text[1200];

    vsnprintf(text, sizeof text, format, args);
    e->status = status;
    e->type = type;
    e->code = code;
    snprintf(e->param, sizeof e->param, "%.63s", param == NULL ? "" : param);
    return x3_fail(&e->err, X3_ERR_INPUT, "%s", text);
}

x3_status x3_api_fail(x3_api_error *e, int status, const char *type, const char *code, const char *param, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    x3_status rc = fail_args(e, status, type, code, param, format, args);
    va_end(args);
    return rc;
}

x3_status x3_api_invalid(x3_api_error *e, const char *param, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    x3_status rc = fail_args(e, 400, "invalid_request_error", NULL, param, format, args);
    va_end(args);
    return rc;
}

/* Whatever e->err holds already becomes an answer: what the input caused is a 400, the rest ours. */
static x3_status adopt(x3_api_error *e, const char *param)
{
    bool ours = e->err.status != X3_ERR_INPUT && e->err.status != X3_ERR_UNSUPPORTED;

    e->status = ours ? 500 : 400;
    e->type = ours ? "server_error" : "invalid_request_error";
    e->code = NULL;
    snprintf(e->param, sizeof e->param, "%.63s", param == NULL ? "" : param);
    return e->err.status;
}

/* At most this many values are in valid JSON: every one but the first follows one of these marks. */
static size_t bound_values(const char *body, size_t n_bytes)
{
    size_t n = 1;

    for (size_t i = 0; i < n_bytes; i++) {
        if (body[i] == '"') {
            for (i++; i < n_bytes && body[i] != '"'; i++)
                i += body[i] == '\\';
        } else {
            n += body[i] == ',' || body[i] == '[' || body[i] == '{';
        }
    }
    return n;
}

x3_status x3_api_parse(cJSON **out, const char *body, size_t n_bytes, x3_api_error *e)
{
    *out = NULL;
    if (n_bytes == 0)
        return x3_api_invalid(e, NULL, "the request has no body");
    size_t n_values = bound_values(body, n_bytes);
    if (n_values > X3_API_VALUES_MAX)
        return x3_api_invalid(e, NULL, "the request has %zu values, more than %d: send long prompts as texts", n_values,
                              X3_API_VALUES_MAX);
    if (x3_json_parse(out, body, n_bytes, "request", &e->err) != X3_OK)
        return adopt(e, NULL);
    if (cJSON_IsObject(*out))
        return X3_OK;
    cJSON_Delete(*out);
    *out = NULL;
    return x3_api_invalid(e, NULL, "the body is not a JSON object");
}

/* ---- members ---- */

/* Names that mean something here, then names that change nothing in a reply. Others are refused: a client that asks for
 * more than it gets should know. */
static const char *const known[] = {"model", "stream", "stream_options", "n", "max_tokens", "temperature", "top_k", "top_p",
    "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "seed", "logit_bias", "logprobs", "stop",
    "stop_token_ids", "ignore_eos", "user", "store", "metadata", "service_tier", "prompt_cache_key", "safety_identifier"};
static const char *const known_chat[] = {"messages", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs",
    "max_completion_tokens", "chat_template_kwargs", "reasoning_effort", "reasoning_format", "response_format", "documents"};
static const char *const known_text[] = {"prompt", "echo", "best_of", "suffix"};

#define N(a) (sizeof(a) / sizeof(a)[0])

static bool is_one_of(const char *word, const char *const *words, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (strcmp(word, words[i]) == 0)
            return true;
    return false;
}

static x3_status check_names(const x3_api_request *r, x3_api_error *e)
{
    const cJSON *item;

    cJSON_ArrayForEach(item, r->body) {
        bool own = r->chat ? is_one_of(item->string, known_chat, N(known_chat)) : is_one_of(item->string, known_text, N(known_text));
        if (!own && !cJSON_IsNull(item) && !is_one_of(item->string, known, N(known)))
            return x3_api_invalid(e, item->string, "\"%.100s\" is not an option of this server", item->string);
    }
    return X3_OK;
}

static x3_status read_number(const x3_api_request *r, const char *key, double *out, x3_api_error *e)
{
    return x3_json_number(r->body, key, false, out, "request", &e->err) == X3_OK ? X3_OK : adopt(e, key);
}

static x3_status read_int(const x3_api_request *r, const char *key, int64_t min, int64_t max, int64_t *out, x3_api_error *e)
{
    return x3_json_int(r->body, key, min, max, false, out, "request", &e->err) == X3_OK ? X3_OK : adopt(e, key);
}

static x3_status read_bool(const x3_api_request *r, const char *key, bool *out, x3_api_error *e)
{
    return x3_json_bool(r->body, key, false, out, "request", &e->err) == X3_OK ? X3_OK : adopt(e, key);
}

/* Options of OpenAI that would change the reply in ways that are not built. */
static x3_status refuse_unbuilt(const x3_api_request *r, x3_api_error *e)
{
    const cJSON *format = x3_json_get(r->body, "response_format"), *type = x3_json_get(format, "type");
    const cJSON *choice = x3_json_get(r->body, "tool_choice");
    int64_t best_of = 1;
    x3_status rc;

    if (format != NULL && !(cJSON_IsString(type) && strcmp(type->valuestring, "text") == 0))
        return x3_api_invalid(e, "response_format", "only \"response_format\" of type \"text\" is supported");
    if (x3_json_get(r->body, "suffix") != NULL)
        return x3_api_invalid(e, "suffix", "\"suffix\" is not supported");
    if (choice != NULL && !(cJSON_IsString(choice) && (strcmp(choice->valuestring, "auto") == 0 || strcmp(choice->valuestring, "none") == 0)))
        return x3_api_invalid(e, "tool_choice", "\"tool_choice\" can be \"auto\" or \"none\": calls cannot be forced");
    X3_TRY(rc, out, read_int(r, "best_of", 1, 1000, &best_of, e));
    if (best_of > 1 && (size_t)best_of != r->n)
        rc = x3_api_invalid(e, "best_of", "\"best_of\" other than \"n\" is not supported");
out:
    return rc;
}

/* ---- sampling ---- */

static x3_status read_bias(x3_api_request *r, x3_api_error *e)
{
    const cJSON *bias = x3_json_get(r->body, "logit_bias"), *item;
    size_t n = 0;

    if (bias == NULL)
        return X3_OK;
    if (!cJSON_IsObject(bias))
        return x3_api_invalid(e, "logit_bias", "\"logit_bias\" must be an object of token ids and numbers");
    if (x3_alloc(&r->bias, (uint64_t)cJSON_GetArraySize(bias), sizeof *r->bias, &e->err) != X3_OK)
        return adopt(e, NULL);
    cJSON_ArrayForEach(item, bias) {
        char *end;
        long id = strtol(item->string, &end, 10);
        if (item->string[0] < '0' || item->string[0] > '9' || *end != '\0' || id > INT32_MAX || !cJSON_IsNumber(item))
            return x3_api_invalid(e, "logit_bias", "\"logit_bias\": \"%.40s\" must be a token id with a number", item->string);
        r->bias[n++] = (x3_logit_bias){(int32_t)id, (float)item->valuedouble};
    }
    r->sampling.bias = r->bias;
    r->sampling.n_bias = n;
    return X3_OK;
}

static x3_status read_logprobs(x3_api_request *r, x3_api_error *e)
{
    bool wanted = false;
    int64_t top = -1;
    x3_status rc;

    if (!r->chat) {
        X3_TRY(rc, out, read_int(r, "logprobs", 0, X3_TOP_LOGPROBS_MAX, &top, e));
    } else {
        X3_TRY(rc, out, read_bool(r, "logprobs", &wanted, e));
        X3_TRY(rc, out, read_int(r, "top_logprobs", 0, X3_TOP_LOGPROBS_MAX, &top, e));
        if (top >= 0 && !wanted) {
            rc = x3_api_invalid(e, "top_logprobs", "\"top_logprobs\" goes with \"logprobs\": true");
            goto out;
        }
        if (wanted && top < 0)
            top = 0;
    }
    r->sampling.n_top = (int)top;
out:
    return rc;
}

static x3_status read_seed(x3_api_request *r, x3_api_error *e)
{
    int64_t seed = 0;

    if (x3_json_get(r->body, "seed") == NULL) {
        if (getrandom(&r->sampling.seed, sizeof r->sampling.seed, 0) != (ssize_t)sizeof r->sampling.seed)
            return x3_api_fail(e, 500, "server_error", NULL, NULL, "no random numbers from the system");
        return X3_OK;
    }
    x3_status rc = read_int(r, "seed", -((int64_t)1 << 53), (int64_t)1 << 53, &seed, e);
    r->sampling.seed = (uint64_t)seed;
    return rc;
}

static x3_status read_sampling(x3_api_request *r, size_t vocab, x3_api_error *e)
{
    x3_sampling *s = &r->sampling;
    x3_status rc;

    X3_TRY(rc, out, read_number(r, "temperature", &s->temperature, e));
    X3_TRY(rc, out, read_int(r, "top_k", -1, INT32_MAX, &s->top_k, e));
    X3_TRY(rc, out, read_number(r, "top_p", &s->top_p, e));
    X3_TRY(rc, out, read_number(r, "min_p", &s->min_p, e));
    X3_TRY(rc, out, read_number(r, "repetition_penalty", &s->repetition_penalty, e));
    X3_TRY(rc, out, read_number(r, "presence_penalty", &s->presence_penalty, e));
    X3_TRY(rc, out, read_number(r, "frequency_penalty", &s->frequency_penalty, e));
    if (s->top_k < 0)
        s->top_k = 0; /* vLLM's clients write -1 for all */
    X3_TRY(rc, out, read_seed(r, e));
    X3_TRY(rc, out, read_logprobs(r, e));
    X3_TRY(rc, out, read_bias(r, e));
    if (x3_sampling_check(s, vocab, &e->err) != X3_OK) {
        const char *name = strchr(e->err.text, '"'); /* the message begins with the name */
        char param[64] = "";
        if (name != NULL)
            sscanf(name, "\"%63[a-z_]", param);
        rc = adopt(e, param);
    }
out:
    return rc;
}

/* ---- ends ---- */

static x3_status add_stop(x3_api_request *r, const cJSON *text, x3_api_error *e)
{
    if (!cJSON_IsString(text) || text->valuestring[0] == '\0' || strlen(text->valuestring) > X3_API_STOP_BYTES)
        return x3_api_invalid(e, "stop", "\"stop\" must be a text of 1 to %d bytes, or a list of them", X3_API_STOP_BYTES);
    if (r->n_stops == X3_API_STOPS_MAX)
        return x3_api_invalid(e, "stop", "\"stop\" has more than %d texts", X3_API_STOPS_MAX);
    r->stops[r->n_stops++] = text->valuestring;
    return X3_OK;
}

static x3_status read_stops(x3_api_request *r, x3_api_error *e)
{
    const cJSON *stop = x3_json_get(r->body, "stop"), *item;
    x3_status rc = X3_OK;

    if (stop == NULL || !cJSON_IsArray(stop))
        return stop == NULL ? X3_OK : add_stop(r, stop, e);
    cJSON_ArrayForEach(item, stop)
        X3_TRY(rc, out, add_stop(r, item, e));
out:
    return rc;
}

static x3_status read_stop_tokens(x3_api_request *r, const x3_hf_config *config, x3_api_error *e)
{
    const cJSON *list = x3_json_get(r->body, "stop_token_ids"), *item;
    bool ignore = false;
    int64_t id = 0;
    x3_status rc;

    X3_TRY(rc, out, read_bool(r, "ignore_eos", &ignore, e));
    if (list != NULL && !cJSON_IsArray(list)) {
        rc = x3_api_invalid(e, "stop_token_ids", "\"stop_token_ids\" must be a list of token ids");
        goto out;
    }
    if (x3_alloc(&r->stop_tokens, config->n_stop_tokens + (uint64_t)cJSON_GetArraySize(list), sizeof *r->stop_tokens, &e->err) != X3_OK)
        return adopt(e, NULL);
    for (size_t i = 0; i < config->n_stop_tokens && !ignore; i++)
        r->stop_tokens[r->n_stop_tokens++] = (int32_t)config->stop_tokens[i];
    cJSON_ArrayForEach(item, list) {
        if (x3_json_as_int(item, "stop_token_ids", 0, INT32_MAX, &id, "request", &e->err) != X3_OK)
            return adopt(e, "stop_token_ids");
        r->stop_tokens[r->n_stop_tokens++] = (int32_t)id;
    }
out:
    return rc;
}

static x3_status read_limits(x3_api_request *r, x3_api_error *e)
{
    const cJSON *options = x3_json_get(r->body, "stream_options");
    int64_t n = 1, most = 0;
    x3_status rc;

    X3_TRY(rc, out, read_int(r, "n", 1, X3_API_CHOICES_MAX, &n, e));
    X3_TRY(rc, out, read_int(r, "max_tokens", 1, INT32_MAX, &most, e));
    X3_TRY(rc, out, read_int(r, "max_completion_tokens", 1, INT32_MAX, &most, e));
    X3_TRY(rc, out, read_bool(r, "stream", &r->stream, e));
    X3_TRY(rc, out, read_bool(r, "echo", &r->echo, e));
    if (options != NULL && (!cJSON_IsObject(options) || !r->stream))
        return x3_api_invalid(e, "stream_options", "\"stream_options\" must be an object, and goes with \"stream\": true");
    if (x3_json_bool(options, "include_usage", false, &r->include_usage, "request", &e->err) != X3_OK)
        return adopt(e, "stream_options");
    if (r->echo && r->sampling.n_top >= 0)
        return x3_api_invalid(e, "echo", "\"echo\" together with \"logprobs\" is not supported");
    r->n = (size_t)n;
    r->max_tokens = (size_t)most;
out:
    return rc;
}

/* ---- prompts ---- */

static x3_status add_text_prompt(x3_api_request *r, const x3_tokenizer *t, const char *text, x3_api_error *e)
{
    x3_ids *ids = &r->prompts[r->n_prompts++];
    const x3_ids *before, *after;

    x3_tokenizer_template(t, &before, &after);
    for (size_t i = 0; i < before->n_items; i++)
        if (x3_ids_push(ids, before->items[i], &e->err) != X3_OK)
            return adopt(e, NULL);
    if (x3_tokenizer_encode(t, text, strlen(text), true, 0, ids, &e->err) != X3_OK)
        return adopt(e, "prompt");
    return X3_OK;
}

static x3_status add_token_prompt(x3_api_request *r, const cJSON *list, x3_api_error *e)
{
    x3_ids *ids = &r->prompts[r->n_prompts++];
    const cJSON *item;
    int64_t id = 0;

    cJSON_ArrayForEach(item, list)
        if (x3_json_as_int(item, "prompt", 0, INT32_MAX, &id, "request", &e->err) != X3_OK ||
            x3_ids_push(ids, (uint32_t)id, &e->err) != X3_OK)
            return adopt(e, "prompt");
    return X3_OK;
}

/* A text, a list of texts, a list of ids, or a list of such lists. */
static x3_status read_prompts(x3_api_request *r, const x3_tokenizer *t, x3_api_error *e)
{
    const cJSON *prompt = x3_json_get(r->body, "prompt"), *item;
    size_t n = cJSON_IsArray(prompt) && !cJSON_IsNumber(prompt->child) ? (size_t)cJSON_GetArraySize(prompt) : 1;
    x3_status rc = X3_OK;

    if (!cJSON_IsString(prompt) && (!cJSON_IsArray(prompt) || prompt->child == NULL))
        return x3_api_invalid(e, "prompt", "\"prompt\" must be a text, a list of texts, or token ids");
    if (n * r->n > X3_API_CHOICES_MAX)
        return x3_api_invalid(e, "prompt", "%zu prompts with %zu replies each are more than %d", n, r->n, X3_API_CHOICES_MAX);
    if (x3_alloc(&r->prompts, n, sizeof *r->prompts, &e->err) != X3_OK)
        return adopt(e, NULL);
    if (cJSON_IsString(prompt))
        return add_text_prompt(r, t, prompt->valuestring, e);
    if (cJSON_IsNumber(prompt->child))
        return add_token_prompt(r, prompt, e);
    cJSON_ArrayForEach(item, prompt) {
        if (cJSON_IsString(item))
            rc = add_text_prompt(r, t, item->valuestring, e);
        else if (cJSON_IsArray(item))
            rc = add_token_prompt(r, item, e);
        else
            rc = x3_api_invalid(e, "prompt", "\"prompt\" must be a text, a list of texts, or token ids");
        if (rc != X3_OK)
            break;
    }
    return rc;
}

/* Texts of the prompts, to begin replies with. */
static x3_status keep_prompt_texts(x3_api_request *r, const x3_tokenizer *t, x3_api_error *e)
{
    size_t n_bytes;

    if (!r->echo)
        return X3_OK;
    if (x3_alloc(&r->prompt_texts, r->n_prompts, sizeof *r->prompt_texts, &e->err) != X3_OK)
        return adopt(e, NULL);
    for (size_t i = 0; i < r->n_prompts; i++) {
        x3_text room = {0};
        x3_view view;
        x3_status rc = x3_tokenizer_decode(t, r->prompts[i].items, r->prompts[i].n_items, true, &r->prompt_texts[i], &n_bytes, &e->err);
        view = (x3_view){r->prompt_texts[i], n_bytes};
        if (rc == X3_OK)
            rc = x3_utf8_repair(&view, &room, &e->err);
        if (rc == X3_OK && view.data != r->prompt_texts[i]) {
            free(r->prompt_texts[i]);
            rc = x3_strndup(&r->prompt_texts[i], view.data, view.n_bytes, &e->err);
        }
        x3_text_free(&room);
        if (rc != X3_OK)
            return adopt(e, NULL);
    }
    return X3_OK;
}

static x3_status encode_chat(x3_api_request *r, const x3_server_options *o, x3_api_error *e)
{
    x3_chat_request q = {.messages = x3_json_get(r->body, "messages"), .tools = r->tools,
                         .documents = x3_json_get(r->body, "documents"), .kwargs = x3_json_get(r->body, "chat_template_kwargs"),
                         .add_generation_prompt = true, .arguments_as_objects = true};
    char *text = NULL;

    if (x3_alloc(&r->prompts, 1, sizeof *r->prompts, &e->err) != X3_OK)
        return adopt(e, NULL);
    r->n_prompts = 1;
    if (x3_chat_template_encode(o->template, o->tokenizer, &q, &r->prompts[0], &text, &e->err) != X3_OK)
        return adopt(e, "messages");
    size_t n = strlen(text);
    while (n > 0 && (text[n - 1] == '\n' || text[n - 1] == ' '))
        n--;
    if (r->reasoning == X3_REASONING_TAGS && n >= 7 && memcmp(text + n - 7, "<think>", 7) == 0)
        r->reasoning = X3_REASONING_OPEN;
    free(text);
    return X3_OK;
}

static x3_status check_prompts(const x3_api_request *r, const x3_server_options *o, x3_api_error *e)
{
    const char *param = r->chat ? "messages" : "prompt";

    for (size_t i = 0; i < r->n_prompts; i++) {
        const x3_ids *ids = &r->prompts[i];
        if (ids->n_items == 0)
            return x3_api_invalid(e, param, "the prompt has no tokens");
        if (ids->n_items >= o->max_positions)
            return x3_api_fail(e, 400, "invalid_request_error", "context_length_exceeded", param,
                               "the prompt has %zu tokens, which leaves no room for a reply in the context of %zu", ids->n_items,
                               o->max_positions);
        for (size_t j = 0; j < ids->n_items; j++)
            if (ids->items[j] >= o->checkpoint->model->vocab)
                return x3_api_invalid(e, param, "token %u is not in the vocabulary of %zu", (unsigned)ids->items[j],
                                      o->checkpoint->model->vocab);
    }
    return X3_OK;
}

/* ---- the whole ---- */

static x3_status check_model(const x3_api_request *r, const x3_server_options *o, x3_api_error *e)
{
    const char *name = o->model_name;

    if (x3_json_string(r->body, "model", false, &name, "request", &e->err) != X3_OK)
        return adopt(e, "model");
    if (strcmp(name, o->model_name) == 0)
        return X3_OK;
    return x3_api_fail(e, 404, "invalid_request_error", "model_not_found", "model", "the model \"%.200s\" is not here, only \"%s\"",
                       name, o->model_name);
}

static x3_status read_all(x3_api_request *r, const x3_server_options *o, x3_api_error *e)
{
    x3_status rc;

    X3_TRY(rc, out, check_names(r, e));
    X3_TRY(rc, out, check_model(r, o, e));
    X3_TRY(rc, out, read_sampling(r, o->checkpoint->model->vocab, e));
    X3_TRY(rc, out, read_limits(r, e));
    X3_TRY(rc, out, read_stops(r, e));
    X3_TRY(rc, out, read_stop_tokens(r, o->checkpoint->config, e));
    X3_TRY(rc, out, refuse_unbuilt(r, e));
    if (r->chat) {
        X3_TRY(rc, out, x3_api_messages(r, o, e));
        X3_TRY(rc, out, encode_chat(r, o, e));
    } else {
        X3_TRY(rc, out, read_prompts(r, o->tokenizer, e));
        X3_TRY(rc, out, keep_prompt_texts(r, o->tokenizer, e));
    }
    rc = check_prompts(r, o, e);
out:
    return rc;
}

x3_status x3_api_request_read(x3_api_request *r, const x3_server_options *o, const x3_sampling *defaults, bool chat,
                              const char *body, size_t n_bytes, x3_api_error *e)
{
    x3_status rc;

    *r = (x3_api_request){.chat = chat, .sampling = *defaults};
    X3_TRY(rc, out, x3_api_parse(&r->body, body, n_bytes, e));
    rc = read_all(r, o, e);
out:
    if (rc != X3_OK)
        x3_api_request_free(r);
    return rc;
}

void x3_api_request_free(x3_api_request *r)
{
    for (size_t i = 0; i < r->n_prompts; i++) {
        x3_ids_free(&r->prompts[i]);
        if (r->prompt_texts != NULL)
            free(r->prompt_texts[i]);
    }
    free(r->prompts);
    free(r->prompt_texts);
    free(r->bias);
    free(r->stop_tokens);
    cJSON_Delete(r->body);
    *r = (x3_api_request){0};
}
