/* Byte-level BPE: the vocabulary and the merges of a tokenizer.json, and the encoding of one pre-token.
 *
 * Ownership: x3_bpe_load copies what it keeps; the JSON may go away. Threads: immutable after loading; every thread
 * brings its own scratch. */
#ifndef X3_BPE_H
#define X3_BPE_H

#include <cjson/cJSON.h>

#include "runtime/tokenizer/unicode.h"

#define X3_TOKEN_IDS_MAX ((uint32_t)1 << 22) /* ids are below it; the largest published vocabulary has 2^18 */

/* A growing list of token ids; start from {0}. */
typedef struct x3_ids {
    uint32_t *items;
    size_t n_items, capacity;
} x3_ids;

x3_status x3_ids_push(x3_ids *ids, uint32_t id, x3_err *err) X3_MUST;
void x3_ids_free(x3_ids *ids);

/* The byte-level alphabet of GPT-2: every byte as a printable character, U+0021 to U+0143.
 * Source: Radford et al. 2019, encoder.py, bytes_to_unicode(). Appends to *out. */
x3_status x3_byte_level_encode(const char *bytes, size_t n_bytes, x3_text *out, x3_err *err) X3_MUST;
/* Appends the bytes of a token's text; a text with a character outside the alphabet is taken as it is, which is how
 * added tokens and their like are decoded. */
x3_status x3_byte_level_decode(const char *text, size_t n_bytes, x3_text *out, x3_err *err) X3_MUST;

typedef struct x3_bpe x3_bpe;

/* Reads the member "model" of `root`, a tokenizer.json. Names in messages: `where` (the file) and the field.
 * X3_ERR_INPUT: no model, an id that is out of range or stands twice, a merge of something not in the vocabulary, a
 * printable ASCII character without a token. X3_ERR_UNSUPPORTED: not BPE, dropout, prefixes, byte_fallback. */
x3_status x3_bpe_load(x3_bpe **out, const cJSON *root, const char *where, x3_err *err) X3_MUST;
void x3_bpe_free(x3_bpe *bpe);

/* Entries of the vocabulary, and largest id + 1. */
size_t x3_bpe_n_entries(const x3_bpe *bpe);
uint32_t x3_bpe_n_ids(const x3_bpe *bpe);
/* The id of a token by its text in the byte-level alphabet. */
bool x3_bpe_find(const x3_bpe *bpe, const char *text, size_t n_bytes, uint32_t *id);
/* The text of a token; data is NULL when the id has none. Lives as long as bpe. */
x3_view x3_bpe_token(const x3_bpe *bpe, uint32_t id);

/* What one thread needs while it encodes; start from {0}. */
typedef struct x3_bpe_scratch {
    x3_text text;
    uint32_t *symbols, *previous, *next;
    uint64_t *heap;
    size_t symbols_capacity, previous_capacity, next_capacity, heap_capacity;
} x3_bpe_scratch;

void x3_bpe_scratch_free(x3_bpe_scratch *scratch);

/* Appends the ids of one pre-token of raw bytes. The pair of lowest rank is merged first, the leftmost among equals
 * (Sennrich et al. 2016); time is O(n log n). A byte without a token gives the unknown token or, where the file names
 * none, nothing: as in the `tokenizers` package. */
x3_status x3_bpe_encode(const x3_bpe *bpe, x3_bpe_scratch *scratch, const char *bytes, size_t n_bytes, x3_ids *out,
                        x3_err *err) X3_MUST;

#endif
