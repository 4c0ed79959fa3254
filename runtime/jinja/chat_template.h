/* The chat template of a model folder: found, compiled once, rendered for a conversation as transformers' (5.x)
 * apply_chat_template does.
 *
 * Ownership: keeps no file open and nothing of a request. Threads: immutable after opening; any number of threads may
 * render at once. */
#ifndef X3_CHAT_TEMPLATE_H
#define X3_CHAT_TEMPLATE_H

#include "runtime/jinja/jinja.h"
#include "runtime/tokenizer/tokenizer.h"

typedef struct x3_chat_template x3_chat_template;

/* Opens the template of `model_dir`:
 *   `file`, when it is not NULL, for every request; else
 *   chat_template.jinja, with additional_chat_templates/tool_use.jinja for requests with tools; else
 *   "chat_template" of tokenizer_config.json: a text, or a list of {name, template} of which "default" is used and
 *   "tool_use" for requests with tools.
 * The tokens (bos_token, eos_token … every "…_token", a text or {"content": text}) come from tokenizer_config.json, and
 * from special_tokens_map.json where the former has no added_tokens_decoder, as transformers reads them.
 * X3_ERR_INPUT: no template, or one that does not compile. *out is NULL on failure. */
x3_status x3_chat_template_open(x3_chat_template **out, const char *model_dir, const char *file, x3_err *err) X3_MUST;
void x3_chat_template_free(x3_chat_template *t);

/* The text of a token by its name ("eos_token"), or NULL. Lives as long as the template. */
const char *x3_chat_template_token(const x3_chat_template *t, const char *name);

/* The text of the template that requests with or without tools are rendered with. Lives as long as the template. */
const char *x3_chat_template_source(const x3_chat_template *t, bool with_tools);

/* All JSON is borrowed for the call and not changed. */
typedef struct x3_chat_request {
    const cJSON *messages;         /* array of objects, not empty */
    const cJSON *tools;            /* array, or NULL: none */
    const cJSON *documents;        /* array, or NULL: none */
    const cJSON *kwargs;           /* object of further names (chat_template_kwargs), before tokens; or NULL */
    bool add_generation_prompt;    /* ends with the header of the assistant's turn */
    bool arguments_as_objects;     /* arguments of tool calls that are JSON text become objects: OpenAI clients send
                                      text, most templates want the object */
    const x3_jinja_options *options; /* NULL: the defaults */
} x3_chat_request;

/* Appends {"role": role, "content": content} to a list of messages. */
x3_status x3_chat_message_add(cJSON *messages, const char *role, const char *content, x3_err *err) X3_MUST;

/* *out: the prompt, a NUL after it, for free(). Members of a message that are null are left out, and its reasoning
 * ("reasoning_content", "thinking", "reasoning": the first there is) goes by the first two names, as transformers does
 * it. X3_ERR_INPUT: a request of another form, or what x3_jinja_render fails with. */
x3_status x3_chat_template_render(const x3_chat_template *t, const x3_chat_request *request, char **out,
                                  size_t *n_bytes, x3_err *err) X3_MUST;

/* Appends the ids of the prompt to *out. Tokens of turns that the template writes are tokens; what looks like one in
 * the request's own texts is text. *text, when asked for, is the prompt as above. */
x3_status x3_chat_template_encode(const x3_chat_template *t, const x3_tokenizer *tokenizer,
                                  const x3_chat_request *request, x3_ids *out, char **text, x3_err *err) X3_MUST;

#endif
