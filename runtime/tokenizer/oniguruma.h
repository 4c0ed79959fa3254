/* Translation of a regular expression from Oniguruma's default syntax to PCRE2's (UTF, UCP, MULTILINE, newline LF),
 * for expressions of which only the extent of the match counts.
 *
 * Source: Oniguruma 6.9.10, doc/RE and regparse.c; PCRE2 10.42, pcre2pattern(3). */
#ifndef X3_ONIGURUMA_H
#define X3_ONIGURUMA_H

#include "runtime/tokenizer/unicode.h"

/* Appends the translation to *out. X3_ERR_INPUT: malformed. X3_ERR_UNSUPPORTED: no exact translation. */
x3_status x3_oniguruma_translate(x3_text *out, const char *pattern, size_t n_bytes, const char *where,
                                 x3_err *err) X3_MUST;

#endif
