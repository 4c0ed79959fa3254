/* Tool calls as models write them, as names and JSON arguments.
 *
 * Tagged: what stands between <tool_call> and </tool_call>: {"name": …, "arguments": {…}} (Hermes, Qwen);
 *   <function=NAME><parameter=KEY>value</parameter></function> (Qwen3-Coder);
 *   NAME<arg_key>KEY</arg_key><arg_value>value</arg_value> (GLM).
 * DeepSeek: what stands between <｜tool▁calls▁begin｜> and <｜tool▁calls▁end｜>, for each call
 *   <｜tool▁call▁begin｜>function<｜tool▁sep｜>NAME, a code block of JSON (V3, R1), or NAME<｜tool▁sep｜>{…} (V3.1),
 *   then <｜tool▁call▁end｜>.
 * DSML: what stands between <｜DSML｜function_calls> (DeepSeek V3.2) or <｜DSML｜tool_calls> (V4) and its end, for each call
 *   <｜DSML｜invoke name="NAME"><｜DSML｜parameter name="KEY" string="true|false">value</｜DSML｜parameter></｜DSML｜invoke>;
 *   values that are no strings are JSON.
 * Mistral: what follows [TOOL_CALLS]: [{"name": …, "arguments": {…}}, …], or NAME[ARGS]{…} or NAME[CALL_ID]ID[ARGS]{…} up to
 *   the next [TOOL_CALLS].
 * Harmony (gpt-oss): a message before its <|call|>: a head with to=functions.NAME, then <|message|>{…}.
 * Llama: the whole reply, {"name": …, "parameters": {…}}, several with ";" between them.
 * Threads: pure functions. */
#ifndef X3_TOOL_CALL_H
#define X3_TOOL_CALL_H

#include <cjson/cJSON.h>

#include "runtime/tokenizer/unicode.h"

typedef enum x3_tool_format {
    X3_TOOLS_NONE,
    X3_TOOLS_TAGGED,
    X3_TOOLS_DEEPSEEK,
    X3_TOOLS_DSML,
    X3_TOOLS_DSML_V4,
    X3_TOOLS_MISTRAL,
    X3_TOOLS_HARMONY,
    X3_TOOLS_LLAMA
} x3_tool_format;
#define X3_TOOL_FORMATS 8

typedef struct x3_tool_call {
    char *name, *arguments; /* arguments: the text of a JSON object */
} x3_tool_call;

typedef struct x3_tool_calls {
    x3_tool_call *items;
    size_t n_items, capacity;
} x3_tool_calls;

/* The format that a template of this text asks for. */
x3_tool_format x3_tool_format_of(const char *chat_template);

/* Appends the calls of a body (see above; without its outer tags). `tools` is the request's list: the types of
 * parameters, where values are not written as JSON; may be NULL. *parsed is false when the body is not of the format:
 * nothing is appended then. */
x3_status x3_tool_calls_parse(x3_tool_format format, const char *body, size_t n_bytes, const cJSON *tools,
                              x3_tool_calls *out, bool *parsed, x3_err *err) X3_MUST;
void x3_tool_calls_free(x3_tool_calls *calls);

#endif
