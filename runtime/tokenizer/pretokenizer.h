/* Pre-tokenization: the splits of a text that tokenizer.json describes, down to the pieces that BPE works on.
 *
 * Stages: Split (Regex or String, every behavior, invert), Digits, ByteLevel (as the last stage: pieces come out as raw
 * bytes, the byte-level alphabet is BPE's business), Sequence of these. Follows pre_tokenizers/ of `tokenizers` 0.23.
 * Threads: immutable after loading; every thread brings its own scratch. */
#ifndef X3_PRETOKENIZER_H
#define X3_PRETOKENIZER_H

#include <cjson/cJSON.h>

#include "runtime/tokenizer/regex.h"
#include "runtime/tokenizer/unicode.h"

typedef struct x3_pretokenizer x3_pretokenizer;

/* Reads the member "pre_tokenizer" of `root`. X3_ERR_UNSUPPORTED names the kind of stage that is not known, or says
 * that ByteLevel is missing or not last. */
x3_status x3_pretokenizer_load(x3_pretokenizer **out, const cJSON *root, const char *where, x3_err *err) X3_MUST;
void x3_pretokenizer_free(x3_pretokenizer *pretokenizer);

/* What one thread needs while it splits; start from {0}. */
typedef struct x3_pretokenizer_scratch {
    x3_regex_scratch regex;
    x3_text prefixed;
} x3_pretokenizer_scratch;

void x3_pretokenizer_scratch_free(x3_pretokenizer_scratch *scratch);

/* Receives a piece, never empty; sets *stop to end the walk early. The bytes last until it returns. */
typedef x3_status (*x3_piece_sink)(void *context, const char *piece, size_t n_bytes, bool *stop, x3_err *err);

/* Gives the pieces of valid UTF-8 to `sink`, in order. */
x3_status x3_pretokenizer_run(const x3_pretokenizer *pretokenizer, x3_pretokenizer_scratch *scratch, const char *text,
                              size_t n_bytes, x3_piece_sink sink, void *context, x3_err *err) X3_MUST;

#endif
