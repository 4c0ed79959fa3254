/* Whether bytes are UTF-8 (RFC 3629: no surrogates, no longer form than needed, nothing past U+10FFFF). Pure functions;
 * lengths are in bytes, a NUL is a character like any other. */
#ifndef X3_UTF8_H
#define X3_UTF8_H

#include <stddef.h>
#include <stdint.h>

/* Length of the longest prefix of `text` that is valid UTF-8. */
size_t x3_utf8_valid(const char *text, size_t n_bytes);
/* Length, 1 to 4, of the well-formed sequence that begins at `text`, n_bytes > 0; or 0, and *skip is the length of the
 * maximal subpart to replace (Unicode 15, section 3.9). */
size_t x3_utf8_sequence(const char *text, size_t n_bytes, size_t *skip);

#endif
