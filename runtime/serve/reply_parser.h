/* The parts of an assistant's reply as its text comes in: reasoning between think tags, tool calls, and the rest.
 *
 * Threads: belongs to one thread at a time. */
#ifndef X3_REPLY_PARSER_H
#define X3_REPLY_PARSER_H

#include "runtime/serve/tool_call.h"

typedef struct x3_reply_parser x3_reply_parser;

typedef enum x3_reasoning {
    X3_REASONING_NONE, /* think tags are text */
    X3_REASONING_TAGS, /* the reply may begin with <think> */
    X3_REASONING_OPEN  /* the prompt has ended with <think> */
} x3_reasoning;

/* What has been found so far; whoever reads it may empty it. Start from {0}. */
typedef struct x3_reply_parts {
    x3_text content, reasoning;
    x3_tool_calls calls;
} x3_reply_parts;

/* `tools` is the request's list, borrowed; X3_TOOLS_NONE leaves calls in the text. X3_TOOLS_HARMONY is for requests without
 * tools, too: all that such a model writes is in channels, which X3_REASONING_NONE does not look for reasoning in. */
x3_status x3_reply_parser_create(x3_reply_parser **out, x3_tool_format format, x3_reasoning reasoning, const cJSON *tools,
                                 x3_err *err) X3_MUST;
void x3_reply_parser_free(x3_reply_parser *p);

/* Appends what is certain now. A call is there when it is whole; one that cannot be understood is content, tags and all.
 * White space at the borders of reasoning and around calls is dropped. */
x3_status x3_reply_parser_put(x3_reply_parser *p, const char *text, size_t n_bytes, x3_reply_parts *out, x3_err *err) X3_MUST;
/* The reply is over: appends what was held back. */
x3_status x3_reply_parser_end(x3_reply_parser *p, x3_reply_parts *out, x3_err *err) X3_MUST;

/* True for the marks that it looks for: special tokens of these texts must not be left out of the reply. */
bool x3_reply_parser_wants(const x3_reply_parser *p, const char *text, size_t n_bytes);

void x3_reply_parts_free(x3_reply_parts *parts);

#endif
