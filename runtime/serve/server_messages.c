#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/serve/server_request.h"

static x3_status no_memory(x3_api_error *e)
{
    return x3_api_fail(e, 500, "server_error", NULL, NULL, "out of memory while reading a request");
}

/* Where a fault is, "messages[3].content", in a ring of two. */
static const char *place(int message, const char *member)
{
    static _Thread_local char text[2][64];
    static _Thread_local int at;

    at = !at;
    snprintf(text[at], sizeof text[at], "messages[%d]%s%s", message, member[0] == '\0' ? "" : ".", member);
    return text[at];
}

/* ---- content ---- */

/* Parts of text become one text, a newline between them. */
static x3_status join_parts(cJSON *message, const cJSON *parts, int index, x3_api_error *e)
{
    const cJSON *part, *type, *text;
    x3_text all = {0};
    x3_status rc = X3_OK;
    cJSON *joined;

    cJSON_ArrayForEach(part, parts) {
        type = x3_json_get(part, "type");
        text = x3_json_get(part, "text");
        if (!cJSON_IsString(type) || strcmp(type->valuestring, "text") != 0 || !cJSON_IsString(text)) {
            rc = x3_api_invalid(e, place(index, "content"), "%s: only parts {\"type\": \"text\", \"text\": \"…\"} are understood",
                                place(index, "content"));
            goto out;
        }
        if (x3_text_put(&all, "\n", part != parts->child, &e->err) != X3_OK ||
            x3_text_put(&all, text->valuestring, strlen(text->valuestring), &e->err) != X3_OK) {
            rc = no_memory(e);
            goto out;
        }
    }
    if (x3_text_put(&all, "", 1, &e->err) != X3_OK || (joined = cJSON_CreateString(all.items)) == NULL) {
        rc = no_memory(e);
    } else if (!cJSON_ReplaceItemInObjectCaseSensitive(message, "content", joined)) {
        cJSON_Delete(joined);
        rc = no_memory(e);
    }
out:
    x3_text_free(&all);
    return rc;
}

static x3_status check_content(cJSON *message, const char *role, int index, x3_api_error *e)
{
    const cJSON *content = x3_json_get(message, "content");

    if (content == NULL && strcmp(role, "assistant") == 0 && x3_json_get(message, "tool_calls") != NULL)
        return X3_OK;
    if (cJSON_IsString(content))
        return X3_OK;
    if (!cJSON_IsArray(content) || content->child == NULL)
        return x3_api_invalid(e, place(index, "content"), "%s must be a text or a list of parts", place(index, "content"));
    return join_parts(message, content, index, e);
}

/* ---- tool calls and tools ---- */

static x3_status check_tool_calls(const cJSON *message, const char *role, int index, x3_api_error *e)
{
    const cJSON *calls = x3_json_get(message, "tool_calls"), *call;

    if (calls == NULL)
        return X3_OK;
    if (strcmp(role, "assistant") != 0 || !cJSON_IsArray(calls))
        return x3_api_invalid(e, place(index, "tool_calls"), "%s must be a list, and in a message of the assistant",
                              place(index, "tool_calls"));
    cJSON_ArrayForEach(call, calls) {
        const cJSON *function = x3_json_get(call, "function"), *arguments = x3_json_get(function, "arguments");
        if (!cJSON_IsString(x3_json_get(function, "name")) || (arguments != NULL && !cJSON_IsString(arguments) && !cJSON_IsObject(arguments)))
            return x3_api_invalid(e, place(index, "tool_calls"), "%s: a call is {\"type\": \"function\", \"function\": {\"name\": "
                                  "a text, \"arguments\": a text}}", place(index, "tool_calls"));
    }
    return X3_OK;
}

static x3_status check_tools(x3_api_request *r, x3_api_error *e)
{
    const cJSON *tools = x3_json_get(r->body, "tools"), *choice = x3_json_get(r->body, "tool_choice"), *tool;
    bool parallel = true;

    if (x3_json_bool(r->body, "parallel_tool_calls", false, &parallel, "request", &e->err) != X3_OK)
        return x3_api_invalid(e, "parallel_tool_calls", "\"parallel_tool_calls\" must be true or false");
    r->one_call = !parallel;
    if (tools == NULL)
        return X3_OK;
    if (!cJSON_IsArray(tools))
        return x3_api_invalid(e, "tools", "\"tools\" must be a list");
    cJSON_ArrayForEach(tool, tools) {
        const cJSON *type = x3_json_get(tool, "type"), *function = x3_json_get(tool, "function");
        const cJSON *parameters = x3_json_get(function, "parameters");
        if (!cJSON_IsString(type) || strcmp(type->valuestring, "function") != 0 || !cJSON_IsString(x3_json_get(function, "name")) ||
            (parameters != NULL && !cJSON_IsObject(parameters)))
            return x3_api_invalid(e, "tools", "a tool is {\"type\": \"function\", \"function\": {\"name\": a text, \"parameters\": an "
                                  "object}}");
    }
    if (tools->child != NULL && (choice == NULL || strcmp(choice->valuestring, "none") != 0))
        r->tools = tools;
    return X3_OK;
}

/* ---- the messages ---- */

static x3_status check_message(cJSON *message, int index, bool knows_developer, x3_api_error *e)
{
    static const char *const roles[] = {"system", "developer", "user", "assistant", "tool"};
    const cJSON *role = x3_json_get(message, "role");
    bool known = false;
    x3_status rc;

    if (!cJSON_IsObject(message))
        return x3_api_invalid(e, place(index, ""), "%s is not an object", place(index, ""));
    if (!cJSON_IsString(role))
        return x3_api_invalid(e, place(index, "role"), "%s must be a text", place(index, "role"));
    for (size_t i = 0; i < 5; i++)
        known |= strcmp(role->valuestring, roles[i]) == 0;
    if (!known)
        return x3_api_invalid(e, place(index, "role"), "%s is \"%.40s\", not one of system, developer, user, assistant, tool",
                              place(index, "role"), role->valuestring);
    X3_TRY(rc, out, check_content(message, role->valuestring, index, e));
    X3_TRY(rc, out, check_tool_calls(message, role->valuestring, index, e));
    if (strcmp(role->valuestring, "developer") == 0 && !knows_developer) {
        cJSON *system = cJSON_CreateString("system");
        if (system == NULL || !cJSON_ReplaceItemInObjectCaseSensitive(message, "role", system)) {
            cJSON_Delete(system);
            rc = no_memory(e);
        }
    }
out:
    return rc;
}

/* "reasoning_effort" of OpenAI is a variable of templates; "reasoning_format" is llama.cpp's: "none" leaves think tags in
 * the content. */
static x3_status read_reasoning(x3_api_request *r, const char *source, x3_api_error *e)
{
    const cJSON *effort = x3_json_get(r->body, "reasoning_effort"), *format = x3_json_get(r->body, "reasoning_format");
    cJSON *kwargs = cJSON_GetObjectItemCaseSensitive(r->body, "chat_template_kwargs");
    const char *how = "auto";

    if (kwargs != NULL && !cJSON_IsNull(kwargs) && !cJSON_IsObject(kwargs))
        return x3_api_invalid(e, "chat_template_kwargs", "\"chat_template_kwargs\" must be an object");
    if (format != NULL && cJSON_IsString(format))
        how = format->valuestring;
    if ((format != NULL && !cJSON_IsString(format)) || (strcmp(how, "auto") != 0 && strcmp(how, "deepseek") != 0 && strcmp(how, "none") != 0))
        return x3_api_invalid(e, "reasoning_format", "\"reasoning_format\" can be \"auto\", \"deepseek\" or \"none\"");
    bool reasons = strstr(source, "think>") != NULL || r->tool_format == X3_TOOLS_HARMONY;
    r->reasoning = strcmp(how, "none") != 0 && reasons ? X3_REASONING_TAGS : X3_REASONING_NONE;
    if (effort == NULL)
        return X3_OK;
    if (!cJSON_IsString(effort))
        return x3_api_invalid(e, "reasoning_effort", "\"reasoning_effort\" must be a text");
    if (!cJSON_IsObject(kwargs)) {
        cJSON_DeleteItemFromObjectCaseSensitive(r->body, "chat_template_kwargs");
        kwargs = cJSON_AddObjectToObject(r->body, "chat_template_kwargs");
    }
    if (kwargs == NULL || (x3_json_get(kwargs, "reasoning_effort") == NULL &&
                           cJSON_AddStringToObject(kwargs, "reasoning_effort", effort->valuestring) == NULL))
        return no_memory(e);
    return X3_OK;
}

x3_status x3_api_messages(x3_api_request *r, const x3_server_options *o, x3_api_error *e)
{
    cJSON *messages = cJSON_GetObjectItemCaseSensitive(r->body, "messages"), *message;
    int index = 0;
    x3_status rc;

    if (o->template == NULL)
        return x3_api_fail(e, 501, "invalid_request_error", "no_chat_template", NULL, "this model has no chat template: use "
                           "/v1/completions, or start the server with --chat-template");
    if (!cJSON_IsArray(messages) || messages->child == NULL)
        return x3_api_invalid(e, "messages", "\"messages\" must be a list of at least one message");
    X3_TRY(rc, out, check_tools(r, e));
    const char *source = x3_chat_template_source(o->template, r->tools != NULL);
    if (r->tools != NULL && strstr(source, "tools") == NULL)
        return x3_api_invalid(e, "tools", "the chat template of this model does not know tools");
    cJSON_ArrayForEach(message, messages)
        X3_TRY(rc, out, check_message(message, index++, strstr(source, "developer") != NULL, e));
    r->tool_format = x3_tool_format_of(source);
    if (r->tools == NULL && r->tool_format != X3_TOOLS_HARMONY) /* whose channels are there without tools, too */
        r->tool_format = X3_TOOLS_NONE;
    rc = read_reasoning(r, source, e);
out:
    return rc;
}
