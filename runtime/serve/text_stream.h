/* The text of a reply as its tokens come in: whole characters only, and nothing of a stop string, not even its
 * beginning, before it is sure that it is none.
 *
 * Threads: belongs to one thread at a time. */
#ifndef X3_TEXT_STREAM_H
#define X3_TEXT_STREAM_H

#include "runtime/tokenizer/unicode.h"

typedef struct x3_text_stream x3_text_stream;

/* Stop strings are copied; none of them is empty. */
x3_status x3_text_stream_create(x3_text_stream **out, const char *const *stops, size_t n_stops, x3_err *err) X3_MUST;
void x3_text_stream_free(x3_text_stream *s);

/* Takes the bytes of one more token and appends to *out what is certain now: valid UTF-8, malformed bytes and U+0000 as U+FFFD.
 * *stopped tells whether a stop string is complete: *out then ends before it (of several that this token completes,
 * before the one that begins first), and no more may be put. */
x3_status x3_text_stream_put(x3_text_stream *s, const char *bytes, size_t n_bytes, x3_text *out, bool *stopped,
                             x3_err *err) X3_MUST;
/* Bytes put, but not yet in any *out. */
size_t x3_text_stream_n_held(const x3_text_stream *s);
/* The reply is over: appends what was held back. */
x3_status x3_text_stream_end(x3_text_stream *s, x3_text *out, x3_err *err) X3_MUST;

/* Length of the longest end of `text` that is a beginning, but not the whole, of `word`. */
size_t x3_text_overlap(const char *text, size_t n_bytes, const char *word, size_t n_word);

#endif
