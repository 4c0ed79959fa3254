/* Replies as JSON: whole, or as the chunks of a stream. Knows nothing of HTTP. */
#ifndef X3_SERVER_JSON_H
#define X3_SERVER_JSON_H

#include "runtime/serve/server_reply.h"

/* The whole response; all choices are over. */
x3_status x3_api_response(const x3_api_reply *reply, cJSON **out, x3_err *err) X3_MUST;
/* Appends events for what a choice has taken since the last call, and empties it: its first chunk (with the role), text,
 * calls, and, when it is over, its last chunk. */
x3_status x3_api_events(x3_api_choice *c, x3_text *out, x3_err *err) X3_MUST;
/* Appends what ends a stream: usage when it was asked for, and [DONE]. */
x3_status x3_api_last_events(const x3_api_reply *reply, x3_text *out, x3_err *err) X3_MUST;
/* Appends the event of an error in the middle of a stream. */
x3_status x3_api_error_event(const x3_err *failure, x3_text *out, x3_err *err) X3_MUST;

/* {"error": {"message", "type", "param", "code"}} */
x3_status x3_api_error_json(const x3_api_error *e, cJSON **out, x3_err *err) X3_MUST;

/* Adds to an object or (key NULL) to a list unless *rc is a failure already; takes over `value`. */
void x3_api_add(x3_status *rc, cJSON *object, const char *key, cJSON *value, x3_err *err);

#endif
