/* UTF-8 text on its way into the tokenizer: repair of malformed bytes, normalization form C, white space.
 *
 * Threads: pure functions; buffers belong to the caller. Lengths are in bytes, a NUL is a character like any other. */
#ifndef X3_UNICODE_H
#define X3_UNICODE_H

#include "formats/base.h"
#include "formats/utf8.h"

/* A growing run of bytes; start from {0}, free with x3_text_free. */
typedef struct x3_text {
    char *items;
    size_t n_items, capacity;
} x3_text;

x3_status x3_text_put(x3_text *text, const void *data, size_t n_bytes, x3_err *err) X3_MUST;
void x3_text_free(x3_text *text);

/* One view of borrowed bytes. */
typedef struct x3_view {
    const char *data;
    size_t n_bytes;
} x3_view;

/* Code point at `text` in valid UTF-8, n_bytes > 0; *length is its 1 to 4 bytes. */
uint32_t x3_utf8_decode(const char *text, size_t n_bytes, size_t *length);
/* Start of the character that ends just before text + at, at > 0. */
size_t x3_utf8_before(const char *text, size_t at);
/* Writes 1 to 4 bytes of UTF-8 and returns their number; cp is a Unicode scalar value. */
size_t x3_utf8_encode(uint32_t cp, char out[4]);

/* The Unicode property White_Space: what \s means to Oniguruma and to Rust's regex crate. */
bool x3_is_space(uint32_t cp);
/* General category N, by utf8proc's tables. */
bool x3_is_numeric(uint32_t cp);

/* Replaces every maximal subpart of an ill-formed sequence by U+FFFD (Unicode 15, section 3.9, "U+FFFD Substitution
 * of Maximal Subparts"), as bytes.decode("utf-8", errors="replace") of Python does. *view stays what it was when the
 * bytes are valid, otherwise it becomes a view of `buffer`. */
x3_status x3_utf8_repair(x3_view *view, x3_text *buffer, x3_err *err) X3_MUST;
/* The same for text that will be a C string: U+0000, which would end it, becomes U+FFFD, too. */
x3_status x3_utf8_repair_string(x3_view *view, x3_text *buffer, x3_err *err) X3_MUST;

/* Normalization form C (UAX #15) of valid UTF-8, with the tables that the `tokenizers` package normalizes with, those
 * of Unicode 9: combining marks added later are left where they stand. *view as in x3_utf8_repair. Time is linear in
 * the text, whatever its marks. */
x3_status x3_nfc(x3_view *view, x3_text *buffer, x3_err *err) X3_MUST;

#endif
