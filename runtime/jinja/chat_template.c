#include "runtime/jinja/chat_template.h"

#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "formats/json.h"

struct x3_chat_template {
    x3_jinja *main, *tool_use; /* tool_use: NULL when requests with tools have no template of their own */
    char *sources[2];          /* their texts */
    cJSON *tokens;             /* name to text */
};

/* ---- opening ---- */

/* The template for requests with tools, or for all. */
static x3_status compile(x3_chat_template *t, bool for_tools, const char *text, size_t n_bytes, const char *name, x3_err *err)
{
    x3_status rc = x3_strndup(&t->sources[for_tools], text, n_bytes, err);

    return rc == X3_OK ? x3_jinja_compile(for_tools ? &t->tool_use : &t->main, text, n_bytes, name, err) : rc;
}

static x3_status compile_file(x3_chat_template *t, bool for_tools, const char *path, x3_err *err)
{
    char *text = NULL;
    size_t n_bytes;
    x3_status rc;

    X3_TRY(rc, out, x3_read_file(&text, &n_bytes, path, X3_JINJA_TEXT_MAX, err));
    rc = compile(t, for_tools, text, n_bytes, path, err);
out:
    free(text);
    return rc;
}

/* dir/name, if there is such a file. */
static x3_status compile_in(x3_chat_template *t, bool for_tools, const char *dir, const char *name, x3_err *err)
{
    char *path = NULL;
    x3_status rc = x3_path_join(&path, dir, name, err);

    if (rc == X3_OK && x3_path_exists(path))
        rc = compile_file(t, for_tools, path, err);
    free(path);
    return rc;
}

static x3_status compile_text(x3_chat_template *t, bool for_tools, const char *text, const char *where, const char *name,
                              x3_err *err)
{
    char *label = NULL;
    x3_status rc = x3_asprintf(&label, err, "%s, chat_template%s%s", where, name[0] == '\0' ? "" : " ", name);

    if (rc == X3_OK)
        rc = compile(t, for_tools, text, strlen(text), label, err);
    free(label);
    return rc;
}

/* "chat_template" of tokenizer_config.json. */
static x3_status compile_config(x3_chat_template *t, const cJSON *config, const char *where, x3_err *err)
{
    const cJSON *node = x3_json_get(config, "chat_template"), *item;
    const char *name, *text;
    x3_status rc = X3_OK;

    if (node == NULL || t->main != NULL)
        return X3_OK;
    if (cJSON_IsString(node))
        return compile_text(t, false, node->valuestring, where, "", err);
    if (!cJSON_IsArray(node))
        return x3_fail(err, X3_ERR_INPUT, "%s: \"chat_template\" is neither a text nor a list", where);
    cJSON_ArrayForEach(item, node) {
        X3_TRY(rc, out, x3_json_string(item, "name", true, &name, where, err));
        X3_TRY(rc, out, x3_json_string(item, "template", true, &text, where, err));
        bool for_tools = strcmp(name, "tool_use") == 0;
        if ((for_tools || strcmp(name, "default") == 0) && t->sources[for_tools] == NULL)
            X3_TRY(rc, out, compile_text(t, for_tools, text, where, name, err));
    }
out:
    return rc;
}

static bool is_token_name(const char *key)
{
    size_t n = strlen(key);

    return n > 6 && strcmp(key + n - 6, "_token") == 0;
}

/* Adds the tokens of a JSON object; a later one replaces an earlier one. */
static x3_status add_tokens(cJSON *tokens, const cJSON *object, x3_err *err)
{
    const cJSON *item;

    cJSON_ArrayForEach(item, object) {
        const cJSON *text = cJSON_IsObject(item) ? x3_json_get(item, "content") : item;
        if (!is_token_name(item->string) || !cJSON_IsString(text))
            continue;
        cJSON_DeleteItemFromObjectCaseSensitive(tokens, item->string);
        x3_status rc = x3_json_add(tokens, item->string, cJSON_CreateString(text->valuestring), err);
        if (rc != X3_OK)
            return rc;
    }
    return X3_OK;
}

/* *out = the JSON object dir/name, or NULL when there is no such file; *path for messages. */
static x3_status load_json(cJSON **out, char **path, const char *dir, const char *name, x3_err *err)
{
    x3_status rc = x3_path_join(path, dir, name, err);

    *out = NULL;
    return rc == X3_OK && x3_path_exists(*path) ? x3_json_load(out, *path, err) : rc;
}

static x3_status open_files(x3_chat_template *t, const char *dir, const char *file, x3_err *err)
{
    cJSON *config = NULL, *map = NULL;
    char *config_path = NULL, *map_path = NULL;
    x3_status rc;

    X3_TRY(rc, out, load_json(&config, &config_path, dir, "tokenizer_config.json", err));
    X3_TRY(rc, out, load_json(&map, &map_path, dir, "special_tokens_map.json", err));
    t->tokens = cJSON_CreateObject();
    if (t->tokens == NULL) {
        rc = x3_fail(err, X3_ERR_MEMORY, "out of memory while reading %s", config_path);
        goto out;
    }
    X3_TRY(rc, out, add_tokens(t->tokens, config, err));
    X3_TRY(rc, out, add_tokens(t->tokens, x3_json_get(config, "extra_special_tokens"), err));
    if (x3_json_get(config, "added_tokens_decoder") == NULL)
        X3_TRY(rc, out, add_tokens(t->tokens, map, err));
    if (file != NULL) {
        rc = compile_file(t, false, file, err);
        goto out;
    }
    X3_TRY(rc, out, compile_in(t, false, dir, "chat_template.jinja", err));
    if (t->main != NULL)
        X3_TRY(rc, out, compile_in(t, true, dir, "additional_chat_templates/tool_use.jinja", err));
    X3_TRY(rc, out, compile_config(t, config, config_path, err));
    if (t->main == NULL)
        rc = x3_fail(err, X3_ERR_INPUT, "%s: no chat_template.jinja, and no \"chat_template\" (or no \"default\" among "
                     "several) in tokenizer_config.json", dir);
out:
    cJSON_Delete(config);
    cJSON_Delete(map);
    free(config_path);
    free(map_path);
    return rc;
}

x3_status x3_chat_template_open(x3_chat_template **out, const char *model_dir, const char *file, x3_err *err)
{
    x3_status rc = x3_alloc(out, 1, sizeof **out, err);

    if (rc != X3_OK)
        return rc;
    rc = open_files(*out, model_dir, file, err);
    if (rc != X3_OK) {
        x3_chat_template_free(*out);
        *out = NULL;
    }
    return rc;
}

void x3_chat_template_free(x3_chat_template *t)
{
    if (t == NULL)
        return;
    x3_jinja_free(t->main);
    x3_jinja_free(t->tool_use);
    free(t->sources[0]);
    free(t->sources[1]);
    cJSON_Delete(t->tokens);
    free(t);
}

const char *x3_chat_template_source(const x3_chat_template *t, bool with_tools)
{
    return t->sources[with_tools && t->tool_use != NULL];
}

const char *x3_chat_template_token(const x3_chat_template *t, const char *name)
{
    const cJSON *token = x3_json_get(t->tokens, name);

    return token == NULL ? NULL : token->valuestring;
}

/* ---- the variables of a request ---- */

/* Adds `item` without copying it; NULL becomes null. cJSON does not change what it refers to. */
static x3_status refer(cJSON *object, const char *key, const cJSON *item, x3_err *err)
{
    if (item == NULL)
        return x3_json_add(object, key, cJSON_CreateNull(), err);
    if (cJSON_AddItemReferenceToObject(object, key, (cJSON *)(uintptr_t)item))
        return X3_OK;
    return x3_fail(err, X3_ERR_MEMORY, "out of memory while preparing \"%s\"", key);
}

static const cJSON *find_reasoning(const cJSON *message)
{
    static const char *const names[] = {"reasoning_content", "thinking", "reasoning"};
    const cJSON *found = NULL;

    for (size_t i = 0; i < 3 && found == NULL; i++)
        found = x3_json_get(message, names[i]);
    return found;
}

/* *out = a copy of tool_calls, its arguments objects where they are the text of one. */
static x3_status parse_arguments(cJSON **out, const cJSON *tool_calls, x3_err *err)
{
    cJSON *call;

    *out = cJSON_Duplicate(tool_calls, true);
    if (*out == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory while copying tool calls");
    cJSON_ArrayForEach(call, *out) {
        cJSON *function = cJSON_GetObjectItemCaseSensitive(call, "function");
        cJSON *holder = function != NULL ? function : call;
        cJSON *arguments = cJSON_GetObjectItemCaseSensitive(holder, "arguments"), *parsed = NULL;
        if (!cJSON_IsString(arguments))
            continue;
        /* text that is no object stays text */
        if (x3_json_parse(&parsed, arguments->valuestring, strlen(arguments->valuestring), "arguments", NULL) == X3_OK &&
            cJSON_IsObject(parsed) && cJSON_ReplaceItemInObjectCaseSensitive(holder, "arguments", parsed))
            continue;
        cJSON_Delete(parsed);
    }
    return X3_OK;
}

/* What the template sees of a message: {"thinking": r, its members that are not null, "reasoning_content": r}. */
static x3_status add_message(cJSON *messages, const cJSON *message, bool arguments_as_objects, x3_err *err)
{
    const cJSON *reasoning = find_reasoning(message), *item;
    cJSON *copy = cJSON_CreateObject(), *calls = NULL;
    bool has_content = false;
    x3_status rc = x3_json_add(messages, NULL, copy, err);

    if (rc == X3_OK && reasoning != NULL) {
        item = x3_json_get(message, "thinking");
        rc = refer(copy, "thinking", item != NULL ? item : reasoning, err);
    }
    for (item = message->child; item != NULL && rc == X3_OK; item = item->next) {
        bool is_content = strcmp(item->string, "reasoning_content") == 0;
        if (cJSON_IsNull(item) || (reasoning != NULL && strcmp(item->string, "thinking") == 0))
            continue;
        has_content = has_content || is_content;
        if (arguments_as_objects && strcmp(item->string, "tool_calls") == 0 && cJSON_IsArray(item)) {
            rc = parse_arguments(&calls, item, err);
            if (rc == X3_OK)
                rc = x3_json_add(copy, "tool_calls", calls, err);
        } else {
            rc = refer(copy, item->string, item, err);
        }
    }
    if (rc == X3_OK && reasoning != NULL && !has_content)
        rc = refer(copy, "reasoning_content", reasoning, err);
    return rc;
}

static x3_status check_array(const cJSON *array, const char *name, bool required, x3_err *err)
{
    const cJSON *item;
    int at = 0;

    if (array == NULL && !required)
        return X3_OK;
    if (!cJSON_IsArray(array) || (required && array->child == NULL))
        return x3_fail(err, X3_ERR_INPUT, "\"%s\" must be a list%s", name, required ? " of at least one message" : "");
    cJSON_ArrayForEach(item, array) {
        if (!cJSON_IsObject(item))
            return x3_fail(err, X3_ERR_INPUT, "\"%s\"[%d] is not an object", name, at);
        at++;
    }
    return X3_OK;
}

static x3_status add_names(cJSON *variables, const cJSON *object, const cJSON *except, x3_err *err)
{
    const cJSON *item;
    x3_status rc = X3_OK;

    cJSON_ArrayForEach(item, object)
        if (rc == X3_OK && cJSON_GetObjectItemCaseSensitive(except, item->string) == NULL)
            rc = refer(variables, item->string, item, err);
    return rc;
}

/* What the request brings; the tokens of the model are added last. */
static x3_status build_variables(cJSON *variables, const x3_chat_request *r, x3_err *err)
{
    static const char *const own[] = {"messages", "tools", "documents", "add_generation_prompt"};
    cJSON *messages = cJSON_CreateArray();
    const cJSON *message;
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(variables, "messages", messages, err));
    cJSON_ArrayForEach(message, r->messages)
        X3_TRY(rc, out, add_message(messages, message, r->arguments_as_objects, err));
    X3_TRY(rc, out, refer(variables, "tools", r->tools, err));
    X3_TRY(rc, out, refer(variables, "documents", r->documents, err));
    X3_TRY(rc, out, x3_json_add(variables, "add_generation_prompt", cJSON_CreateBool(r->add_generation_prompt), err));
    for (size_t i = 0; i < sizeof own / sizeof own[0]; i++)
        if (cJSON_GetObjectItemCaseSensitive(r->kwargs, own[i]) != NULL) {
            rc = x3_fail(err, X3_ERR_INPUT, "\"chat_template_kwargs\" must not set \"%s\"", own[i]);
            goto out;
        }
    rc = add_names(variables, r->kwargs, NULL, err);
out:
    return rc;
}

x3_status x3_chat_message_add(cJSON *messages, const char *role, const char *content, x3_err *err)
{
    cJSON *message = cJSON_CreateObject();
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(messages, NULL, message, err));
    X3_TRY(rc, out, x3_json_add(message, "role", cJSON_CreateString(role), err));
    rc = x3_json_add(message, "content", cJSON_CreateString(content), err);
out:
    return rc;
}

/* ---- marking what users wrote ---- */

/* Noncharacters, U+FDD0 to U+FDEF, as UTF-8: for use inside of programs, and in no text. */
#define N_MARKERS 32

struct marking {
    const x3_tokenizer *tokenizer;
    char marker[4];
    x3_text room;
    uint32_t used; /* bit i: U+FDD0 + i stands in the request */
};

static void find_used(struct marking *m, const char *text)
{
    for (const char *at = text; at != NULL && (at = strstr(at, "\xEF\xB7")) != NULL; at += 2) {
        unsigned char last = (unsigned char)at[2];
        if (last >= 0x90 && last < 0x90 + N_MARKERS)
            m->used |= (uint32_t)1 << (last - 0x90);
    }
}

static x3_status mark_text(struct marking *m, char **text, x3_err *err)
{
    x3_status rc;

    if (*text == NULL)
        return X3_OK;
    m->room.n_items = 0;
    X3_TRY(rc, out, x3_tokenizer_mark(m->tokenizer, *text, strlen(*text), m->marker, &m->room, err));
    X3_TRY(rc, out, x3_text_put(&m->room, "", 1, err));
    if (strcmp(*text, m->room.items) == 0)
        return X3_OK;
    char *copy = cJSON_malloc(m->room.n_items);
    if (copy == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory while reading a request");
    memcpy(copy, m->room.items, m->room.n_items);
    cJSON_free(*text);
    *text = copy;
out:
    return rc;
}

/* Over every text and key below `node`, depth first without recursion: nesting is the client's. With `mark` false the
 * markers that stand there are found, else the texts are marked. */
static x3_status walk_texts(struct marking *m, cJSON *node, cJSON **stack, size_t room, bool mark, x3_err *err)
{
    size_t depth = 0;
    x3_status rc = X3_OK;

    for (cJSON *at = node->child; at != NULL || depth > 0;) {
        if (at == NULL) {
            at = stack[--depth]->next;
            continue;
        }
        bool has_key = at->string != NULL && (at->type & cJSON_StringIsConst) == 0;
        if (!mark) {
            find_used(m, at->string);
            find_used(m, at->valuestring);
        } else {
            if (has_key)
                X3_TRY(rc, out, mark_text(m, &at->string, err));
            X3_TRY(rc, out, mark_text(m, &at->valuestring, err));
        }
        if (at->child != NULL && depth == room)
            return x3_fail(err, X3_ERR_INPUT, "the request is nested deeper than %zu levels", room);
        if (at->child != NULL) {
            stack[depth++] = at;
            at = at->child;
        } else {
            at = at->next;
        }
    }
out:
    return rc;
}

/* Replaces *variables by a copy whose texts are marked. */
static x3_status mark_variables(struct marking *m, cJSON **variables, x3_err *err)
{
    enum { DEPTH = 2 * CJSON_NESTING_LIMIT + 8 }; /* a request, and within it arguments that were text */
    cJSON *copy = cJSON_Duplicate(*variables, true), **stack = NULL;
    unsigned at = 0;
    x3_status rc = X3_OK;

    if (copy == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory while copying a request");
    cJSON_Delete(*variables);
    *variables = copy;
    X3_TRY(rc, out, x3_alloc(&stack, DEPTH, sizeof *stack, err));
    X3_TRY(rc, out, walk_texts(m, copy, stack, DEPTH, false, err));
    while (at < N_MARKERS && (m->used >> at & 1) != 0)
        at++;
    if (at == N_MARKERS) {
        rc = x3_fail(err, X3_ERR_INPUT, "the request uses all noncharacters from U+FDD0 to U+FDEF");
        goto out;
    }
    memcpy(m->marker, "\xEF\xB7", 2);
    m->marker[2] = (char)(0x90 + at);
    rc = walk_texts(m, copy, stack, DEPTH, true, err);
out:
    free(stack);
    return rc;
}

/* ---- rendering ---- */

static x3_status check_request(const x3_chat_request *r, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, check_array(r->messages, "messages", true, err));
    X3_TRY(rc, out, check_array(r->tools, "tools", false, err));
    X3_TRY(rc, out, check_array(r->documents, "documents", false, err));
    if (r->kwargs != NULL && !cJSON_IsObject(r->kwargs))
        rc = x3_fail(err, X3_ERR_INPUT, "\"chat_template_kwargs\" must be an object");
out:
    return rc;
}

/* `marking`: NULL, or to be used on what the request brings. */
static x3_status render(const x3_chat_template *t, const x3_chat_request *r, struct marking *marking, char **out,
                        size_t *n_bytes, x3_err *err)
{
    const x3_jinja *jinja = r->tools != NULL && t->tool_use != NULL ? t->tool_use : t->main;
    cJSON *variables = NULL;
    x3_status rc;

    *out = NULL;
    *n_bytes = 0;
    X3_TRY(rc, out, check_request(r, err));
    variables = cJSON_CreateObject();
    if (variables == NULL) {
        rc = x3_fail(err, X3_ERR_MEMORY, "out of memory while preparing the variables of a template");
        goto out;
    }
    X3_TRY(rc, out, build_variables(variables, r, err));
    if (marking != NULL)
        X3_TRY(rc, out, mark_variables(marking, &variables, err));
    X3_TRY(rc, out, add_names(variables, t->tokens, r->kwargs, err));
    rc = x3_jinja_render(jinja, variables, r->options, out, n_bytes, err);
out:
    cJSON_Delete(variables);
    return rc;
}

x3_status x3_chat_template_render(const x3_chat_template *t, const x3_chat_request *r, char **out, size_t *n_bytes,
                                  x3_err *err)
{
    return render(t, r, NULL, out, n_bytes, err);
}

/* Takes the marker out of a text, in place. */
static void drop_marker(char *text, const char *marker)
{
    size_t n = strlen(marker);
    char *to = text, *from = text, *next;

    while (n > 0 && (next = strstr(from, marker)) != NULL) {
        memmove(to, from, (size_t)(next - from));
        to += next - from;
        from = next + n;
    }
    memmove(to, from, strlen(from) + 1);
}

x3_status x3_chat_template_encode(const x3_chat_template *t, const x3_tokenizer *tokenizer, const x3_chat_request *r,
                                  x3_ids *out, char **text, x3_err *err)
{
    struct marking marking = {.tokenizer = tokenizer};
    char *rendered = NULL;
    size_t n_bytes;
    x3_status rc;

    if (text != NULL)
        *text = NULL;
    X3_TRY(rc, out, render(t, r, &marking, &rendered, &n_bytes, err));
    X3_TRY(rc, out, x3_tokenizer_encode_marked(tokenizer, rendered, n_bytes, marking.marker, out, err));
    drop_marker(rendered, marking.marker);
    if (text != NULL) {
        *text = rendered;
        rendered = NULL;
    }
out:
    if (rc != X3_OK && err != NULL)
        drop_marker(err->text, marking.marker);
    free(rendered);
    x3_text_free(&marking.room);
    return rc;
}
