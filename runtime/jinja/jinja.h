/* Templates: the part of Jinja2 that chat templates use, rendered byte for byte as Python's jinja2 3.1 does it with the
 * settings of transformers (an immutable sandbox, trim_blocks, lstrip_blocks, `generation`, `break` and `continue`,
 * transformers' tojson, raise_exception, strftime_now, dict and namespace).
 *
 * Refused when compiled (X3_ERR_UNSUPPORTED): include, import, extends, block, autoescape, recursive loops, `self`.
 * Refused when reached: the filters filesizeformat, pprint, random, urlize, wordwrap and xmlattr; lipsum; str.encode,
 * translate and maketrans; % and format() of a Markup text.
 * Other differences from Python, none of them seen in a published template:
 * - integers have 64 bits, more is an error; the names of Unicode characters ("\N{DASH}") are not known; a lone
 *   surrogate in a literal is an error when compiled, not when the text is encoded; memory addresses print as 0x0;
 * - character properties are those of utf8proc (Debian 12: Unicode 15), and striptags knows numeric references and the
 *   commonest names only.
 *
 * Ownership: a compiled template keeps nothing of its text. A render holds only what it was given, and its own memory
 * until it returns. Threads: a compiled template is immutable; any number of threads may render it at once. */
#ifndef X3_JINJA_H
#define X3_JINJA_H

#include <time.h>

#include <cjson/cJSON.h>

#include "formats/base.h"

typedef struct x3_jinja x3_jinja;

/* A template of more bytes is refused. */
#define X3_JINJA_TEXT_MAX ((size_t)1 << 20)

/* Zero stands for the default in brackets. Past a limit the render ends with X3_ERR_INPUT. */
typedef struct x3_jinja_options {
    const struct tm *now; /* local time for strftime_now; NULL: the clock of the machine */
    uint64_t max_steps;   /* expressions, statements, items walked, and 64 bytes of text each [30 million] */
    uint64_t max_bytes;   /* memory of the render, roughly [512 MiB] */
    uint64_t max_output;  /* bytes of the result [64 MiB] */
    uint32_t max_depth;   /* expressions, blocks and macro calls inside one another [2,000: 1 MiB of stack] */
} x3_jinja_options;

/* Compiles n_bytes of UTF-8. `name` stands for the template in messages: every one starts with "name:line: ".
 * X3_ERR_INPUT: bad syntax or UTF-8; X3_ERR_UNSUPPORTED: see above. *out is NULL on failure. */
x3_status x3_jinja_compile(x3_jinja **out, const char *text, size_t n_bytes, const char *name, x3_err *err) X3_MUST;

/* Renders with the members of the object `variables` as names (NULL: none). cJSON does not keep how a number was
 * written, so a whole one within 64 bits is an integer (2.0 too) and any other a float. Malformed UTF-8 in strings is
 * repaired with U+FFFD. *out: the text, a NUL after it, for free(); NULL on failure.
 * X3_ERR_INPUT: an error that Python would raise, raise_exception (its message is the text), or a limit. */
x3_status x3_jinja_render(const x3_jinja *jinja, const cJSON *variables, const x3_jinja_options *options, char **out,
                          size_t *n_bytes, x3_err *err) X3_MUST;

void x3_jinja_free(x3_jinja *jinja);

#endif
