/* The added tokens of a tokenizer.json (chat markers and the like): where they stand in a text.
 *
 * Follows tokenizer/added_vocabulary.rs of `tokenizers` 0.23: the leftmost-longest match wins, first among the tokens
 * looked for in the raw text, then, piece by piece, among those looked for in normalized text.
 * Threads: immutable after loading; an iterator belongs to one thread. */
#ifndef X3_ADDED_TOKENS_H
#define X3_ADDED_TOKENS_H

#include <cjson/cJSON.h>

#include "runtime/tokenizer/bpe.h"
#include "runtime/tokenizer/regex.h"

typedef struct x3_added_token {
    char *content;         /* as the file states it */
    x3_view match;         /* what is looked for: content, or its NFC form; in `content` or `normal_form` */
    x3_text normal_form;
    uint32_t id;
    bool single_word, lstrip, rstrip, normalized, special;
    bool control; /* special, or written <|…|>: what a user types must not become it */
} x3_added_token;

typedef struct x3_added_tokens {
    x3_added_token *items;
    size_t n_items;
    struct x3_trie *tries[2]; /* of the tokens looked for in raw and in normalized text; NULL: there are none */
    x3_regex *word;           /* one word character, for single_word; NULL when no token asks for it */
} x3_added_tokens;

/* Reads the member "added_tokens" of `root`. With `nfc` the tokens marked normalized are looked for in their NFC form.
 * X3_ERR_INPUT: an id that is out of range, taken, or other than the one that the vocabulary or the order of the file
 * gives (readers number added tokens that are not in the vocabulary from its number of entries on). On failure *added
 * is empty. */
x3_status x3_added_tokens_load(x3_added_tokens *added, const cJSON *root, const x3_bpe *bpe, bool nfc,
                               const char *where, x3_err *err) X3_MUST;
void x3_added_tokens_free(x3_added_tokens *added);

/* A walk over one text: begin with text, n_bytes and the choice of tokens set, the rest zero. */
typedef struct x3_added_walk {
    const char *text;
    size_t n_bytes;
    bool normalized;    /* look for the tokens of normalized text */
    bool skip_special;  /* special tokens are plain text */
    x3_view marker;     /* control tokens right after it are plain text; empty: there is none */
    size_t search_at, covered;
    const x3_added_token *pending;
    size_t pending_end;
} x3_added_walk;

/* The next stretch: a token, or text between tokens (*token NULL). *done when there is none. */
x3_status x3_added_tokens_next(const x3_added_tokens *added, x3_added_walk *walk, x3_regex_scratch *scratch,
                               const x3_added_token **token, x3_view *stretch, bool *done, x3_err *err) X3_MUST;

/* Appends a text to *out, `marker` before every place where a control token stands or where the text ends within one
 * (what a template puts after it could complete it). */
x3_status x3_added_tokens_mark(const x3_added_tokens *added, x3_view text, x3_view marker, x3_text *out,
                               x3_err *err) X3_MUST;

#endif
