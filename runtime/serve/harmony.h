/* Replies of gpt-oss, a row of messages:
 *   <|channel|>analysis<|message|>…<|end|><|start|>assistant<|channel|>final<|message|>…<|return|>
 * A message of the channel analysis is reasoning, one to a function (to=functions.NAME in its head) is a call, any other is
 * content. Between messages of a kind comes an empty line.
 *
 * Threads: belongs to one thread at a time. */
#ifndef X3_HARMONY_H
#define X3_HARMONY_H

#include "runtime/serve/reply_parser.h"

enum x3_harmony_phase { X3_HARMONY_HEAD, X3_HARMONY_REASONING, X3_HARMONY_CONTENT, X3_HARMONY_CALL };

/* Start from {0} with the first two set. */
typedef struct x3_harmony {
    const cJSON *tools; /* of the request, borrowed; NULL: calls are content, marks and all */
    bool keep_marks;    /* so is the channel analysis */
    enum x3_harmony_phase phase;
    bool any;           /* not the first message */
    bool marked;        /* this message is content with its marks */
    bool begun;         /* something of this message has been appended */
    bool reasoning, content; /* something of such a message has been */
} x3_harmony;

/* Takes from *held what is certain, all of it when the reply is over, and appends it to *out. */
x3_status x3_harmony_run(x3_harmony *h, x3_text *held, bool over, x3_reply_parts *out, x3_err *err) X3_MUST;

#endif
