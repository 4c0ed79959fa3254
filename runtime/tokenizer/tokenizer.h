/* Text to token ids and back, by a Hugging Face tokenizer.json with byte-level BPE (Qwen, Llama 3, GLM, DeepSeek,
 * SmolLM, GPT-2 and their kin).
 *
 * Ids equal those of the `tokenizers` package 0.23, except for code points newer than the Unicode tables of PCRE2 and
 * utf8proc (Debian 12: Unicode 14 and 15).
 * Ownership: a tokenizer keeps nothing of the file open. Threads: immutable after loading, no cache inside; any number
 * of threads may encode and decode with one tokenizer at the same time. */
#ifndef X3_TOKENIZER_H
#define X3_TOKENIZER_H

#include "runtime/tokenizer/bpe.h"

typedef struct x3_tokenizer x3_tokenizer;

/* Reads a tokenizer.json. Understood: model BPE (merges as strings or pairs, ignore_merges, unk_token); added tokens
 * with their flags; normalizer null, NFC; pre-tokenizers Split, Digits, ByteLevel; post-processors ByteLevel,
 * TemplateProcessing; decoder ByteLevel (null is taken as that, too); Sequence of each. "truncation" and "padding" are
 * settings of a caller, and ignored.
 * X3_ERR_UNSUPPORTED: a kind that is not in this list. X3_ERR_INPUT: a file that contradicts itself. Messages name the
 * file, the field and the values. *out is NULL on failure. */
x3_status x3_tokenizer_load(x3_tokenizer **out, const char *path, x3_err *err) X3_MUST;
/* The same from n_bytes of JSON; `where` stands for the path in messages. */
x3_status x3_tokenizer_parse(x3_tokenizer **out, const char *json, size_t n_bytes, const char *where,
                             x3_err *err) X3_MUST;
void x3_tokenizer_free(x3_tokenizer *tokenizer);

/* Appends the ids of a text to *out, without those of the template. Malformed UTF-8 is first repaired with U+FFFD as
 * Python's errors="replace" does; NUL is a character. With parse_special false the special added tokens are plain text
 * (what a user types must not become a control token); added tokens that are not special are tokens either way.
 * max_ids: append no more than the first so many, 0 is all; the work ends there. After a failure *out holds what it
 * held before. X3_ERR_INPUT only when a hostile pattern backtracks without end. */
x3_status x3_tokenizer_encode(const x3_tokenizer *tokenizer, const char *text, size_t n_bytes, bool parse_special,
                              size_t max_ids, x3_ids *out, x3_err *err) X3_MUST;

/* Text of users within the text of a template: x3_tokenizer_mark appends a user's text to *out with `marker` (one code
 * point that the text does not have) before every control token in it, and x3_tokenizer_encode_marked encodes what a
 * template made of it: special tokens are tokens, but not those after a marker; the markers themselves vanish.
 * Control tokens are the special ones and those written <|…|>. */
x3_status x3_tokenizer_mark(const x3_tokenizer *tokenizer, const char *text, size_t n_bytes, const char *marker,
                            x3_text *out, x3_err *err) X3_MUST;
x3_status x3_tokenizer_encode_marked(const x3_tokenizer *tokenizer, const char *text, size_t n_bytes,
                                     const char *marker, x3_ids *out, x3_err *err) X3_MUST;

/* *out: the bytes of the ids joined, a NUL after them, for free(). They may be no valid UTF-8 where ids end inside a
 * character. Ids without a token (padding of the model's embedding) give nothing; with skip_special, so do special
 * tokens. */
x3_status x3_tokenizer_decode(const x3_tokenizer *tokenizer, const uint32_t *ids, size_t n_ids, bool skip_special,
                              char **out, size_t *n_bytes, x3_err *err) X3_MUST;

/* The id of a token by its text as tokenizer.json states it (added tokens first, then the vocabulary). */
bool x3_tokenizer_id(const x3_tokenizer *tokenizer, const char *content, uint32_t *id);
/* The raw bytes that the id decodes to; data is NULL when it has no token. Lives as long as the tokenizer. */
x3_view x3_tokenizer_token_bytes(const x3_tokenizer *tokenizer, uint32_t id);
/* Largest id + 1. The model's own vocabulary may be larger. */
uint32_t x3_tokenizer_n_vocab(const x3_tokenizer *tokenizer);
/* True for an added token marked special. */
bool x3_tokenizer_is_special(const x3_tokenizer *tokenizer, uint32_t id);
/* The ids that the post-processor puts before and after a single text (a BOS, say); none for most files. */
void x3_tokenizer_template(const x3_tokenizer *tokenizer, const x3_ids **before, const x3_ids **after);

#endif
