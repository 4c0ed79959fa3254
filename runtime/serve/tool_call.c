#include "runtime/serve/tool_call.h"

#include <stdlib.h>
#include <string.h>

#include "formats/json.h"

#define DS_CALL_BEGIN "<｜tool▁call▁begin｜>"
#define DS_CALL_END "<｜tool▁call▁end｜>"
#define DS_SEPARATOR "<｜tool▁sep｜>"
#define DSML "｜DSML｜"

x3_tool_format x3_tool_format_of(const char *t)
{
    if (strstr(t, "<|channel|>") != NULL && strstr(t, "<|message|>") != NULL)
        return X3_TOOLS_HARMONY;
    if (strstr(t, "<｜tool▁calls▁begin｜>") != NULL)
        return X3_TOOLS_DEEPSEEK;
    if (strstr(t, DSML) != NULL) /* templates put the marks together from parts */
        return strstr(t, "function_calls>") != NULL ? X3_TOOLS_DSML : X3_TOOLS_DSML_V4;
    if (strstr(t, "<tool_call>") != NULL)
        return X3_TOOLS_TAGGED;
    if (strstr(t, "[TOOL_CALLS]") != NULL)
        return X3_TOOLS_MISTRAL;
    if (strstr(t, "<|python_tag|>") != NULL || strstr(t, "\"parameters\": ") != NULL)
        return X3_TOOLS_LLAMA;
    return X3_TOOLS_NONE;
}

/* ---- views ---- */

static x3_view trim(x3_view v)
{
    while (v.n_bytes > 0 && strchr(" \t\r\n", v.data[0]) != NULL && v.data[0] != '\0')
        v = (x3_view){v.data + 1, v.n_bytes - 1};
    while (v.n_bytes > 0 && strchr(" \t\r\n", v.data[v.n_bytes - 1]) != NULL && v.data[v.n_bytes - 1] != '\0')
        v.n_bytes--;
    return v;
}

/* Splits *v at the first `word`: what stands before goes to *before, *v becomes what stands after. */
static bool cut(x3_view *v, const char *word, x3_view *before)
{
    size_t n = strlen(word);
    const char *at = v->n_bytes == 0 ? NULL : memmem(v->data, v->n_bytes, word, n);

    if (at == NULL)
        return false;
    *before = (x3_view){v->data, (size_t)(at - v->data)};
    v->n_bytes -= before->n_bytes + n;
    v->data = at + n;
    return true;
}

static bool skip(x3_view *v, const char *word)
{
    size_t n = strlen(word);

    if (v->n_bytes < n || memcmp(v->data, word, n) != 0)
        return false;
    *v = (x3_view){v->data + n, v->n_bytes - n};
    return true;
}

/* ---- JSON ---- */

static size_t skip_space(x3_view v, size_t at)
{
    while (at < v.n_bytes && (v.data[at] == ' ' || v.data[at] == '\t' || v.data[at] == '\r' || v.data[at] == '\n'))
        at++;
    return at;
}

/* End of the JSON value that begins at `at`, by brackets and quotes; v.n_bytes when it has no end. Not a check. */
static size_t skip_value(x3_view v, size_t at)
{
    size_t depth = 0;

    for (; at < v.n_bytes; at++) {
        char c = v.data[at];
        if (c == '"') {
            for (at++; at < v.n_bytes && v.data[at] != '"'; at++)
                at += v.data[at] == '\\';
        } else if (c == '{' || c == '[') {
            depth++;
        } else if (c == '}' || c == ']') {
            if (depth == 0)
                return at;
            depth--;
        } else if (depth == 0 && (c == ',' || c == ':')) {
            return at;
        }
        if (depth == 0 && (c == '"' || c == '}' || c == ']'))
            return x3_min_size(at + 1, v.n_bytes);
    }
    return x3_min_size(at, v.n_bytes); /* a backslash may be the last byte */
}

/* The text of a member of a JSON object that is known to be valid: numbers stay as they were written. */
static bool raw_member(x3_view object, const char *key, x3_view *out)
{
    size_t n = strlen(key), at = skip_space(object, 0) + 1;

    while (at < object.n_bytes) {
        size_t from = skip_space(object, at), to = skip_value(object, from);
        size_t colon = skip_space(object, to);
        if (colon >= object.n_bytes || object.data[colon] != ':')
            return false;
        size_t value = skip_space(object, colon + 1), end = skip_value(object, value);
        if (to - from == n + 2 && memcmp(object.data + from + 1, key, n) == 0) {
            *out = trim((x3_view){object.data + value, end - value});
            return true;
        }
        at = skip_space(object, end) + 1;
    }
    return false;
}

/* ---- calls ---- */

static x3_status add_call(x3_tool_calls *out, x3_view name, x3_view arguments, x3_err *err)
{
    x3_tool_call call = {0};
    x3_status rc;

    X3_TRY(rc, out, x3_grow(&out->items, &out->capacity, out->n_items + 1, sizeof *out->items, err));
    X3_TRY(rc, out, x3_strndup(&call.name, name.data, name.n_bytes, err));
    X3_TRY(rc, out, x3_strndup(&call.arguments, arguments.data, arguments.n_bytes, err));
    out->items[out->n_items++] = call;
    return X3_OK;
out:
    free(call.name);
    free(call.arguments);
    return rc;
}

static void drop_calls(x3_tool_calls *calls, size_t n)
{
    while (calls->n_items > n) {
        x3_tool_call *c = &calls->items[--calls->n_items];
        free(c->name);
        free(c->arguments);
    }
}

void x3_tool_calls_free(x3_tool_calls *calls)
{
    drop_calls(calls, 0);
    free(calls->items);
    *calls = (x3_tool_calls){0};
}

static bool is_object(x3_view text)
{
    cJSON *json = NULL;
    bool yes = x3_json_parse(&json, text.data, text.n_bytes, "", NULL) == X3_OK && cJSON_IsObject(json);

    cJSON_Delete(json);
    return yes;
}

/* {"name": …, "arguments" or "parameters": an object, or its text} */
static x3_status parse_json(x3_view body, x3_tool_calls *out, bool *parsed, x3_err *err)
{
    cJSON *json = NULL;
    x3_view arguments = {"{}", 2};
    x3_status rc = X3_OK;

    *parsed = false;
    if (x3_json_parse(&json, body.data, body.n_bytes, "", NULL) != X3_OK || !cJSON_IsObject(json))
        goto out;
    const cJSON *name = x3_json_get(json, "name"), *value = x3_json_get(json, "arguments");
    const char *key = value != NULL ? "arguments" : "parameters";
    if (value == NULL)
        value = x3_json_get(json, "parameters");
    if (!cJSON_IsString(name) || name->valuestring[0] == '\0')
        goto out;
    if (cJSON_IsString(value))
        arguments = (x3_view){value->valuestring, strlen(value->valuestring)};
    else if (value != NULL && !raw_member(body, key, &arguments))
        goto out;
    if (!is_object(arguments))
        goto out;
    rc = add_call(out, (x3_view){name->valuestring, strlen(name->valuestring)}, arguments, err);
    *parsed = rc == X3_OK;
out:
    cJSON_Delete(json);
    return rc;
}

/* ---- calls whose values are not written as JSON ---- */

static const cJSON *find_tool(const cJSON *tools, x3_view name)
{
    const cJSON *tool;

    cJSON_ArrayForEach(tool, tools) {
        const cJSON *f = x3_json_get(tool, "function"), *other = x3_json_get(f, "name");
        if (cJSON_IsString(other) && strlen(other->valuestring) == name.n_bytes &&
            memcmp(other->valuestring, name.data, name.n_bytes) == 0)
            return f;
    }
    return NULL;
}

/* Whether the "type" of a parameter in the request's tools is "string". */
static bool is_string_parameter(const cJSON *tools, x3_view function, x3_view key)
{
    const cJSON *properties = x3_json_get(x3_json_get(find_tool(tools, function), "parameters"), "properties"), *p;

    cJSON_ArrayForEach(p, properties) {
        const cJSON *type = x3_json_get(p, "type");
        if (p->string != NULL && strlen(p->string) == key.n_bytes && memcmp(p->string, key.data, key.n_bytes) == 0)
            return cJSON_IsString(type) && strcmp(type->valuestring, "string") == 0;
    }
    return false;
}

/* A string where `is_text`, or where the text is no JSON; else the JSON. */
static x3_status add_argument(x3_text *object, x3_view key, x3_view value, bool is_text, x3_err *err)
{
    char *name = NULL, *text = NULL, *printed = NULL;
    cJSON *json = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_strndup(&name, key.data, key.n_bytes, err));
    X3_TRY(rc, out, x3_strndup(&text, value.data, value.n_bytes, err));
    for (int i = 0; i < 2; i++) {
        cJSON *string = cJSON_CreateString(i == 0 ? name : text);
        printed = string == NULL ? NULL : cJSON_PrintUnformatted(string);
        cJSON_Delete(string);
        if (printed == NULL) {
            rc = x3_fail(err, X3_ERR_MEMORY, "out of memory while reading a tool call");
            goto out;
        }
        if (i == 1 && !is_text && x3_json_parse(&json, text, value.n_bytes, "", NULL) == X3_OK) {
            X3_TRY(rc, out, x3_text_put(object, value.data, value.n_bytes, err));
            break;
        }
        if (i == 0)
            X3_TRY(rc, out, x3_text_put(object, ", ", object->n_items > 1 ? 2 : 0, err));
        X3_TRY(rc, out, x3_text_put(object, printed, strlen(printed), err));
        if (i == 0)
            X3_TRY(rc, out, x3_text_put(object, ": ", 2, err));
        cJSON_free(printed);
        printed = NULL;
    }
out:
    cJSON_free(printed);
    cJSON_Delete(json);
    free(name);
    free(text);
    return rc;
}

/* Closes an object of arguments and adds the call; *parsed false: a key came twice. */
static x3_status close_call(x3_tool_calls *out, x3_view name, x3_text *object, bool *parsed, x3_err *err)
{
    x3_status rc = x3_text_put(object, "}", 1, err);
    const x3_view arguments = {object->items, object->n_items};

    *parsed = false;
    if (rc != X3_OK || !is_object(arguments))
        return rc;
    rc = add_call(out, name, arguments, err);
    *parsed = rc == X3_OK;
    return rc;
}

/* How the pairs of a call are written. */
struct pair_marks {
    const char *key, *key_end, *value, *value_end;
    bool own_lines; /* the value has a newline before and after it */
};

/* Pairs of KEY and VALUE up to the end of `rest`. */
static x3_status parse_pairs(x3_view name, x3_view rest, const struct pair_marks *m, const cJSON *tools, x3_tool_calls *out,
                             bool *parsed, x3_err *err)
{
    x3_text object = {0};
    x3_view key, value;
    x3_status rc;

    *parsed = false;
    X3_TRY(rc, out, x3_text_put(&object, "{", 1, err));
    for (rest = trim(rest); rest.n_bytes > 0; rest = trim(rest)) {
        if (!skip(&rest, m->key) || !cut(&rest, m->key_end, &key))
            goto out;
        if (!m->own_lines)
            rest = trim(rest);
        if (!skip(&rest, m->value) || !cut(&rest, m->value_end, &value))
            goto out;
        if (m->own_lines) {
            skip(&value, "\n");
            value.n_bytes -= value.n_bytes > 0 && value.data[value.n_bytes - 1] == '\n';
        }
        key = trim(key);
        X3_TRY(rc, out, add_argument(&object, key, value, is_string_parameter(tools, name, key), err));
    }
    rc = close_call(out, name, &object, parsed, err);
out:
    x3_text_free(&object);
    return rc;
}

static x3_status parse_tagged(x3_view body, const cJSON *tools, x3_tool_calls *out, bool *parsed, x3_err *err)
{
    static const struct pair_marks qwen = {"<parameter=", ">", "", "</parameter>", true};
    static const struct pair_marks glm = {"<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", false};
    x3_view name, inner;

    body = trim(body);
    *parsed = false;
    if (body.n_bytes > 0 && body.data[0] == '{')
        return parse_json(body, out, parsed, err);
    if (skip(&body, "<function=")) {
        if (!cut(&body, ">", &name) || trim(name).n_bytes == 0 || !cut(&body, "</function>", &inner) || trim(body).n_bytes > 0)
            return X3_OK;
        return parse_pairs(trim(name), inner, &qwen, tools, out, parsed, err);
    }
    const char *first = body.n_bytes == 0 ? NULL : memmem(body.data, body.n_bytes, glm.key, strlen(glm.key));
    name = body;
    if (first != NULL)
        name.n_bytes = (size_t)(first - body.data);
    inner = (x3_view){body.data + name.n_bytes, body.n_bytes - name.n_bytes};
    name = trim(name);
    if (first == NULL && find_tool(tools, name) == NULL) /* one word would be a call */
        return X3_OK;
    if (name.n_bytes == 0 || memchr(name.data, '\n', name.n_bytes) != NULL || memchr(name.data, '<', name.n_bytes) != NULL)
        return X3_OK;
    return parse_pairs(name, inner, &glm, tools, out, parsed, err);
}

/* ---- DSML ---- */

/* One call, from its name to its end, which *body is moved behind. */
static x3_status parse_dsml_call(x3_view *body, const cJSON *tools, x3_tool_calls *out, bool *parsed, x3_err *err)
{
    x3_text object = {0};
    x3_view name, key, value, rest = *body;
    x3_status rc = X3_OK;

    *parsed = false;
    if (!skip(&rest, "<" DSML "invoke name=\"") || !cut(&rest, "\">", &name) || name.n_bytes == 0)
        return X3_OK;
    X3_TRY(rc, out, x3_text_put(&object, "{", 1, err));
    for (rest = trim(rest); !skip(&rest, "</" DSML "invoke>"); rest = trim(rest)) {
        if (!skip(&rest, "<" DSML "parameter name=\"") || !cut(&rest, "\"", &key))
            goto out;
        bool is_text = skip(&rest, " string=\"true\"");
        if (!is_text && !skip(&rest, " string=\"false\"")) /* the mark may be forgotten */
            is_text = is_string_parameter(tools, name, key);
        if (!skip(&rest, ">") || !cut(&rest, "</" DSML "parameter>", &value))
            goto out;
        X3_TRY(rc, out, add_argument(&object, key, value, is_text, err));
    }
    rc = close_call(out, name, &object, parsed, err);
    if (*parsed)
        *body = rest;
out:
    x3_text_free(&object);
    return rc;
}

static x3_status parse_dsml(x3_view body, const cJSON *tools, x3_tool_calls *out, bool *parsed, x3_err *err)
{
    x3_status rc = X3_OK;

    *parsed = false;
    for (body = trim(body); body.n_bytes > 0; body = trim(body)) {
        X3_TRY(rc, out, parse_dsml_call(&body, tools, out, parsed, err));
        if (!*parsed)
            break;
    }
out:
    return rc;
}

/* ---- Mistral ---- */

static x3_status parse_array(x3_view body, x3_tool_calls *out, bool *parsed, x3_err *err)
{
    cJSON *json = NULL;
    x3_status rc = X3_OK;

    *parsed = false;
    if (x3_json_parse(&json, body.data, body.n_bytes, "", NULL) != X3_OK || !cJSON_IsArray(json))
        goto out;
    for (int i = 0, n = cJSON_GetArraySize(json); i < n; i++) {
        size_t begin = skip_space(body, 1), end = skip_value(body, begin); /* 1: the bracket, or the comma */
        X3_TRY(rc, out, parse_json((x3_view){body.data + begin, end - begin}, out, parsed, err));
        if (!*parsed)
            goto out;
        end = skip_space(body, end);
        body = (x3_view){body.data + end, body.n_bytes - end};
    }
out:
    cJSON_Delete(json);
    return rc;
}

static x3_status parse_mistral(x3_view body, x3_tool_calls *out, bool *parsed, x3_err *err)
{
    x3_view name, id;

    *parsed = false;
    body = trim(body);
    if (body.n_bytes > 0 && body.data[0] == '[')
        return parse_array(body, out, parsed, err);
    name = (x3_view){body.data, 0};
    while (name.n_bytes < body.n_bytes && strchr("[{< \t\r\n", body.data[name.n_bytes]) == NULL)
        name.n_bytes++;
    body = (x3_view){body.data + name.n_bytes, body.n_bytes - name.n_bytes};
    if (skip(&body, "[CALL_ID]")) {
        if (!cut(&body, "[ARGS]", &id))
            return X3_OK;
    } else {
        skip(&body, "[ARGS]"); /* some leave it out */
    }
    body = trim(body);
    if (name.n_bytes == 0 || !is_object(body))
        return X3_OK;
    *parsed = true;
    return add_call(out, name, body, err);
}

/* ---- gpt-oss ---- */

static x3_status parse_harmony(x3_view body, const cJSON *tools, x3_tool_calls *out, bool *parsed, x3_err *err)
{
    x3_view head, before, name;

    *parsed = false;
    if (!cut(&body, "<|message|>", &head) || !cut(&head, "to=", &before))
        return X3_OK;
    name = (x3_view){head.data, 0};
    while (name.n_bytes < head.n_bytes && strchr("< \t\r\n", head.data[name.n_bytes]) == NULL)
        name.n_bytes++;
    if (!skip(&name, "functions.") && find_tool(tools, name) == NULL) /* python, browser.search */
        return X3_OK;
    body = trim(body);
    if (name.n_bytes == 0 || !is_object(body))
        return X3_OK;
    *parsed = true;
    return add_call(out, name, body, err);
}

/* ---- DeepSeek, Llama ---- */

/* One call without its marks; false when it is none. */
static bool split_deepseek(x3_view call, x3_view *name, x3_view *arguments)
{
    x3_view block;

    if (!cut(&call, DS_SEPARATOR, name))
        return false;
    *name = trim(*name);
    *arguments = trim(call);
    if (name->n_bytes == 8 && memcmp(name->data, "function", 8) == 0 && cut(&call, "```json", name)) {
        *arguments = trim(call);
        if (cut(&call, "```", &block))
            *arguments = trim(block);
        *name = trim(*name);
    }
    return name->n_bytes > 0 && is_object(*arguments);
}

static x3_status parse_deepseek(x3_view body, x3_tool_calls *out, bool *parsed, x3_err *err)
{
    x3_view call, name, arguments;
    x3_status rc = X3_OK;

    *parsed = false;
    for (body = trim(body); body.n_bytes > 0; body = trim(body)) {
        *parsed = skip(&body, DS_CALL_BEGIN);
        if (!*parsed)
            break;
        if (!cut(&body, DS_CALL_END, &call)) { /* the reply may end before the last mark */
            call = body;
            body.n_bytes = 0;
        }
        *parsed = split_deepseek(call, &name, &arguments);
        if (!*parsed)
            break;
        X3_TRY(rc, out, add_call(out, name, arguments, err));
    }
out:
    return rc;
}

static x3_status parse_llama(x3_view body, x3_tool_calls *out, bool *parsed, x3_err *err)
{
    x3_status rc = X3_OK;

    *parsed = false;
    for (body = trim(body); body.n_bytes > 0; body = trim(body)) {
        size_t end = skip_value(body, 0);
        X3_TRY(rc, out, parse_json((x3_view){body.data, end}, out, parsed, err));
        if (!*parsed)
            break;
        body = trim((x3_view){body.data + end, body.n_bytes - end});
        skip(&body, ";");
    }
out:
    return rc;
}

x3_status x3_tool_calls_parse(x3_tool_format format, const char *body, size_t n_bytes, const cJSON *tools, x3_tool_calls *out,
                              bool *parsed, x3_err *err)
{
    const size_t before = out->n_items;
    x3_view view = {body, n_bytes};
    x3_status rc = X3_OK;

    *parsed = false;
    switch (format) {
    case X3_TOOLS_TAGGED:
        rc = parse_tagged(view, tools, out, parsed, err);
        break;
    case X3_TOOLS_DEEPSEEK:
        rc = parse_deepseek(view, out, parsed, err);
        break;
    case X3_TOOLS_DSML:
    case X3_TOOLS_DSML_V4:
        rc = parse_dsml(view, tools, out, parsed, err);
        break;
    case X3_TOOLS_MISTRAL:
        rc = parse_mistral(view, out, parsed, err);
        break;
    case X3_TOOLS_HARMONY:
        rc = parse_harmony(view, tools, out, parsed, err);
        break;
    case X3_TOOLS_LLAMA:
        rc = parse_llama(view, out, parsed, err);
        break;
    case X3_TOOLS_NONE:
        break;
    }
    if (rc != X3_OK || !*parsed) {
        *parsed = false;
        drop_calls(out, before);
    }
    return rc;
}
