#include "runtime/tokenizer/added_tokens.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/json.h"

#define NONE UINT32_MAX

/* Children of a node are a list of siblings: markers share long prefixes and rarely branch widely. */
struct node {
    uint32_t child, sibling; /* indices, 0: none (the root is nobody's child) */
    uint32_t token;          /* index of the token that ends here, or NONE */
    unsigned char byte;
};

struct x3_trie {
    struct node *nodes;
    size_t n_nodes, capacity;
    bool starts[256]; /* first bytes of the tokens */
};

/* ---- trie ---- */

static uint32_t find_child(const struct x3_trie *trie, uint32_t node, unsigned char byte)
{
    uint32_t child = trie->nodes[node].child;

    while (child != 0 && trie->nodes[child].byte != byte)
        child = trie->nodes[child].sibling;
    return child;
}

static x3_status add_node(struct x3_trie *trie, unsigned char byte, uint32_t sibling, x3_err *err)
{
    x3_status rc = x3_grow(&trie->nodes, &trie->capacity, trie->n_nodes + 1, sizeof *trie->nodes, err);

    if (rc == X3_OK)
        trie->nodes[trie->n_nodes++] = (struct node){.sibling = sibling, .token = NONE, .byte = byte};
    return rc;
}

/* *taken is the token that already has this text, or NONE. */
static x3_status trie_add(struct x3_trie *trie, x3_view text, uint32_t token, uint32_t *taken, x3_err *err)
{
    uint32_t node = 0;
    x3_status rc = X3_OK;

    *taken = NONE;
    if (trie->n_nodes == 0)
        X3_TRY(rc, out, add_node(trie, 0, 0, err));
    for (size_t i = 0; i < text.n_bytes; i++) {
        unsigned char byte = (unsigned char)text.data[i];
        uint32_t child = find_child(trie, node, byte);
        if (child == 0) {
            child = (uint32_t)trie->n_nodes;
            X3_TRY(rc, out, add_node(trie, byte, trie->nodes[node].child, err));
            trie->nodes[node].child = child;
        }
        node = child;
    }
    *taken = trie->nodes[node].token;
    trie->nodes[node].token = token;
    trie->starts[(unsigned char)text.data[0]] = true;
out:
    return rc;
}

/* Leftmost-longest match at or after `from`; the token, or NONE. */
static uint32_t trie_find(const struct x3_trie *trie, const char *text, size_t n_bytes, size_t from, size_t *start,
                          size_t *end)
{
    for (size_t at = from; at < n_bytes; at++) {
        uint32_t node = 0, best = NONE;
        if (!trie->starts[(unsigned char)text[at]])
            continue;
        for (size_t i = at; i < n_bytes && (node = find_child(trie, node, (unsigned char)text[i])) != 0; i++)
            if (trie->nodes[node].token != NONE) {
                best = trie->nodes[node].token;
                *end = i + 1;
            }
        if (best != NONE) {
            *start = at;
            return best;
        }
    }
    return NONE;
}

/* ---- loading ---- */

/* The marks of turns are special in most files, but not in all (DeepSeek's <｜User｜> is not). */
static bool looks_like_control(const char *content)
{
    static const char *const pairs[][2] = {{"<|", "|>"}, {"<｜", "｜>"}};
    size_t n = strlen(content);

    for (size_t i = 0; i < 2; i++) {
        size_t length = strlen(pairs[i][0]);
        if (n > 2 * length && strncmp(content, pairs[i][0], length) == 0 && strcmp(content + n - length, pairs[i][1]) == 0)
            return true;
    }
    return false;
}

static x3_status read_token(x3_added_token *token, const cJSON *node, size_t index, const char *where, x3_err *err)
{
    const char *content = NULL;
    char field[64], *name = NULL;
    int64_t id = 0;
    x3_status rc;

    snprintf(field, sizeof field, "added_tokens[%zu]", index);
    X3_TRY(rc, out, x3_asprintf(&name, err, "%s: %s", where, field));
    if (!cJSON_IsObject(node)) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: no object", name);
        goto out;
    }
    X3_TRY(rc, out, x3_json_int(node, "id", 0, X3_TOKEN_IDS_MAX - 1, true, &id, name, err));
    X3_TRY(rc, out, x3_json_string(node, "content", true, &content, name, err));
    X3_TRY(rc, out, x3_json_bool(node, "single_word", false, &token->single_word, name, err));
    X3_TRY(rc, out, x3_json_bool(node, "lstrip", false, &token->lstrip, name, err));
    X3_TRY(rc, out, x3_json_bool(node, "rstrip", false, &token->rstrip, name, err));
    X3_TRY(rc, out, x3_json_bool(node, "special", false, &token->special, name, err));
    token->normalized = !token->special;
    X3_TRY(rc, out, x3_json_bool(node, "normalized", false, &token->normalized, name, err));
    if (content[0] == '\0') {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: \"content\" is empty", name);
        goto out;
    }
    token->id = (uint32_t)id;
    token->control = token->special || looks_like_control(content);
    rc = x3_strdup(&token->content, content, err);
out:
    free(name);
    return rc;
}

/* The id must be the one that `tokenizers` would give: that of the vocabulary, or the next after it. */
static x3_status check_id(const x3_added_token *token, const x3_bpe *bpe, uint32_t *next_id, size_t index,
                          const char *where, x3_err *err)
{
    uint32_t expected;

    if (!x3_bpe_find(bpe, token->content, strlen(token->content), &expected)) {
        expected = (*next_id)++;
        x3_view other = x3_bpe_token(bpe, token->id);
        if (other.data != NULL)
            return x3_fail(err, X3_ERR_INPUT,
                           "%s: added_tokens[%zu]: id %u of \"%.120s\" is that of \"%.*s\" in model.vocab", where,
                           index, (unsigned)token->id, token->content, (int)x3_min_size(other.n_bytes, 120), other.data);
    }
    if (token->id != expected)
        return x3_fail(err, X3_ERR_INPUT, "%s: added_tokens[%zu]: \"%.120s\" has id %u, by %s it is %u", where, index,
                       token->content, (unsigned)token->id,
                       expected < x3_bpe_n_entries(bpe) ? "model.vocab" : "the order of the file", (unsigned)expected);
    return X3_OK;
}

static x3_status set_match(x3_added_token *token, bool nfc, x3_err *err)
{
    token->match = (x3_view){token->content, strlen(token->content)};
    return nfc && token->normalized ? x3_nfc(&token->match, &token->normal_form, err) : X3_OK;
}

static x3_status add_to_trie(x3_added_tokens *added, uint32_t index, const char *where, x3_err *err)
{
    x3_added_token *token = &added->items[index];
    struct x3_trie **trie = &added->tries[token->normalized];
    uint32_t taken = NONE;
    x3_status rc = X3_OK;

    if (*trie == NULL)
        X3_TRY(rc, out, x3_alloc(trie, 1, sizeof **trie, err));
    X3_TRY(rc, out, trie_add(*trie, token->match, index, &taken, err));
    if (taken != NONE)
        rc = x3_fail(err, X3_ERR_INPUT, "%s: added_tokens: ids %u and %u are both \"%.120s\"", where,
                     (unsigned)added->items[taken].id, (unsigned)token->id, token->content);
out:
    return rc;
}

static x3_status load_word(x3_added_tokens *added, const char *where, x3_err *err)
{
    /* \w of Rust's regex crate. */
    static const char word[] = "[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\p{Join_Control}]";

    for (size_t i = 0; i < added->n_items; i++)
        if (added->items[i].single_word)
            return x3_regex_compile(&added->word, word, sizeof word - 1, false, where, err);
    return X3_OK;
}

x3_status x3_added_tokens_load(x3_added_tokens *added, const cJSON *root, const x3_bpe *bpe, bool nfc,
                               const char *where, x3_err *err)
{
    const cJSON *list = x3_json_get(root, "added_tokens");
    uint32_t next_id = (uint32_t)x3_bpe_n_entries(bpe);
    x3_status rc = X3_OK;
    size_t n = 0;

    *added = (x3_added_tokens){0};
    if (list == NULL)
        return X3_OK;
    if (!cJSON_IsArray(list))
        return x3_fail(err, X3_ERR_INPUT, "%s: \"added_tokens\" is no list", where);
    for (const cJSON *c = list->child; c != NULL; c = c->next)
        n++;
    X3_TRY(rc, out, x3_alloc(&added->items, n, sizeof *added->items, err));
    for (const cJSON *c = list->child; c != NULL; c = c->next) {
        uint32_t index = (uint32_t)added->n_items++;
        X3_TRY(rc, out, read_token(&added->items[index], c, index, where, err));
        X3_TRY(rc, out, set_match(&added->items[index], nfc, err));
        X3_TRY(rc, out, add_to_trie(added, index, where, err));
        X3_TRY(rc, out, check_id(&added->items[index], bpe, &next_id, index, where, err));
    }
    rc = load_word(added, where, err);
out:
    if (rc != X3_OK)
        x3_added_tokens_free(added);
    return rc;
}

void x3_added_tokens_free(x3_added_tokens *added)
{
    for (size_t i = 0; i < added->n_items; i++) {
        free(added->items[i].content);
        x3_text_free(&added->items[i].normal_form);
    }
    free(added->items);
    for (size_t i = 0; i < 2; i++) {
        if (added->tries[i] != NULL)
            free(added->tries[i]->nodes);
        free(added->tries[i]);
    }
    x3_regex_free(added->word);
    *added = (x3_added_tokens){0};
}

/* ---- matching ---- */

static x3_status is_word(const x3_added_tokens *added, x3_regex_scratch *scratch, const char *text, size_t start,
                         size_t end, bool *yes, x3_err *err)
{
    size_t s, e;

    return x3_regex_find(added->word, scratch, text + start, end - start, 0, yes, &s, &e, err);
}

/* A match of a single_word token counts only where no word character touches it. */
static x3_status touches_word(const x3_added_tokens *added, x3_regex_scratch *scratch, x3_view text, size_t start,
                              size_t end, bool *yes, x3_err *err)
{
    x3_status rc = X3_OK;
    size_t length;

    *yes = false;
    if (start > 0)
        rc = is_word(added, scratch, text.data, x3_utf8_before(text.data, start), start, yes, err);
    if (rc != X3_OK || *yes || end == text.n_bytes)
        return rc;
    x3_utf8_decode(text.data + end, text.n_bytes - end, &length);
    return is_word(added, scratch, text.data, end, end + length, yes, err);
}

static size_t spaces_before(const char *text, size_t at, size_t bound)
{
    size_t length;

    while (at > bound) {
        size_t before = x3_utf8_before(text, at);
        if (before < bound || !x3_is_space(x3_utf8_decode(text + before, at - before, &length)))
            break;
        at = before;
    }
    return at;
}

static size_t spaces_after(const char *text, size_t n_bytes, size_t at)
{
    size_t length;

    while (at < n_bytes && x3_is_space(x3_utf8_decode(text + at, n_bytes - at, &length)))
        at += length;
    return at;
}

static bool is_marked(const x3_added_walk *walk, size_t at)
{
    const x3_view *m = &walk->marker;

    return m->n_bytes > 0 && at >= m->n_bytes && memcmp(walk->text + at - m->n_bytes, m->data, m->n_bytes) == 0;
}

/* The next match that counts, with the white space it swallows. *token NULL: none. */
static x3_status next_match(const x3_added_tokens *added, x3_added_walk *walk, x3_regex_scratch *scratch,
                            const x3_added_token **token, size_t *start, size_t *end, x3_err *err)
{
    const struct x3_trie *trie = added->tries[walk->normalized];
    x3_view text = {walk->text, walk->n_bytes};

    for (;;) {
        uint32_t index = trie == NULL ? NONE : trie_find(trie, walk->text, walk->n_bytes, walk->search_at, start, end);
        *token = NULL;
        if (index == NONE)
            return X3_OK;
        const x3_added_token *t = &added->items[index];
        walk->search_at = *end; /* a match that does not count is passed over whole, too */
        if (walk->skip_special && t->special)
            continue;
        if (t->control && is_marked(walk, *start))
            continue;
        if (t->single_word) {
            bool touches;
            x3_status rc = touches_word(added, scratch, text, *start, *end, &touches, err);
            if (rc != X3_OK)
                return rc;
            if (touches)
                continue;
        }
        if (t->lstrip)
            *start = *start < walk->covered ? walk->covered : spaces_before(walk->text, *start, walk->covered);
        if (t->rstrip)
            *end = spaces_after(walk->text, walk->n_bytes, *end);
        if (*start >= *end) /* all of it swallowed by the token before: `tokenizers` drops it */
            continue;
        *token = t;
        return X3_OK;
    }
}

x3_status x3_added_tokens_next(const x3_added_tokens *added, x3_added_walk *walk, x3_regex_scratch *scratch,
                               const x3_added_token **token, x3_view *stretch, bool *done, x3_err *err)
{
    size_t start = 0, end = 0;
    x3_status rc = X3_OK;

    *done = false;
    if (walk->pending != NULL) {
        *token = walk->pending;
        *stretch = (x3_view){walk->text + walk->covered, walk->pending_end - walk->covered};
        walk->covered = walk->pending_end;
        walk->pending = NULL;
        return X3_OK;
    }
    if (walk->covered < walk->n_bytes || walk->search_at < walk->n_bytes)
        rc = next_match(added, walk, scratch, token, &start, &end, err);
    else
        *token = NULL;
    if (rc != X3_OK)
        return rc;
    if (*token == NULL) {
        *done = walk->covered >= walk->n_bytes;
        walk->search_at = walk->n_bytes;
        *stretch = (x3_view){walk->text + walk->covered, walk->n_bytes - walk->covered};
        walk->covered = walk->n_bytes;
        return X3_OK;
    }
    if (start > walk->covered) {
        walk->pending = *token;
        walk->pending_end = end;
        *token = NULL;
        *stretch = (x3_view){walk->text + walk->covered, start - walk->covered};
        walk->covered = start;
        return X3_OK;
    }
    /* After white space that the token before swallowed, a match may end before `covered`, and `tokenizers` then goes
     * on from there: so do we. */
    *stretch = (x3_view){walk->text + start, end - start};
    walk->covered = end;
    return X3_OK;
}

/* ---- marking ---- */

/* Does a control token start at `at`, or could one that goes on after the end? */
static bool may_be_control(const x3_added_tokens *added, const struct x3_trie *trie, x3_view text, size_t at)
{
    uint32_t node = 0;

    if (trie == NULL || !trie->starts[(unsigned char)text.data[at]])
        return false;
    for (size_t i = at; i < text.n_bytes; i++) {
        node = find_child(trie, node, (unsigned char)text.data[i]);
        if (node == 0)
            return false;
        uint32_t token = trie->nodes[node].token;
        if (token != NONE && added->items[token].control)
            return true;
    }
    return trie->nodes[node].child != 0;
}

x3_status x3_added_tokens_mark(const x3_added_tokens *added, x3_view text, x3_view marker, x3_text *out, x3_err *err)
{
    size_t done = 0;
    x3_status rc = X3_OK;

    for (size_t at = 0; at < text.n_bytes; at++) {
        if (!may_be_control(added, added->tries[0], text, at) && !may_be_control(added, added->tries[1], text, at))
            continue;
        X3_TRY(rc, out, x3_text_put(out, text.data + done, at - done, err));
        X3_TRY(rc, out, x3_text_put(out, marker.data, marker.n_bytes, err));
        done = at;
    }
    rc = x3_text_put(out, text.data + done, text.n_bytes - done, err);
out:
    return rc;
}
