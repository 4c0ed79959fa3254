/* Regular expressions as tokenizer.json states them, in Oniguruma's default syntax, run by PCRE2.
 *
 * The pattern is translated, not passed on: the two disagree on \s (U+180E), \w, \h, \v, \p{Han}, {n,m}+, {,n}, nested
 * and intersected classes, and where (?i) ends. What has no exact translation is refused (back references,
 * conditionals, absent groups, case folding of one character to several, …). Differences that stay: the Unicode tables
 * (PCRE2 10.42: Unicode 14; Oniguruma 6.9.10: Unicode 16), and counted repetitions of what can match nothing.
 * Threads: a compiled expression is immutable and may be used from several threads, each with its own scratch. */
#ifndef X3_REGEX_H
#define X3_REGEX_H

#include "formats/base.h"

typedef struct x3_regex x3_regex;

/* Compiles n_bytes of pattern; `literal` takes every character as itself. `where` (file and field) goes into
 * messages. X3_ERR_INPUT when the pattern is malformed, X3_ERR_UNSUPPORTED when it cannot be translated. */
x3_status x3_regex_compile(x3_regex **out, const char *pattern, size_t n_bytes, bool literal, const char *where,
                           x3_err *err) X3_MUST;
void x3_regex_free(x3_regex *regex);

/* What one thread needs while it matches; start from {0}. */
typedef struct x3_regex_scratch {
    void *match_data, *match_context, *jit_stack;
} x3_regex_scratch;

void x3_regex_scratch_free(x3_regex_scratch *scratch);

/* Leftmost match in valid UTF-8 that starts at or after `from`, a character boundary <= n_bytes. Text before `from` is
 * seen by look-behind, text before `text` is not. *found false: no match. The steps of one search are limited (ten
 * million and a hundred per byte): past that X3_ERR_INPUT. */
x3_status x3_regex_find(const x3_regex *regex, x3_regex_scratch *scratch, const char *text, size_t n_bytes, size_t from,
                        bool *found, size_t *start, size_t *end, x3_err *err) X3_MUST;

#endif
