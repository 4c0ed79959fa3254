#include "runtime/tokenizer/bpe.h"

#include <stdlib.h>
#include <string.h>

#include "formats/json.h"

#define NONE UINT32_MAX
#define SHORT_MAX 64        /* symbols of a pre-token that is merged by plain search */
#define ALPHABET_MAX 0x143u /* last character of the byte-level alphabet */

struct merge {
    uint32_t left, right; /* left is NONE in a free slot */
    uint32_t rank, id;
};

struct slot {
    uint32_t id;  /* NONE in a free slot */
    uint32_t tag; /* high half of the hash: most other texts are told apart without looking at them */
};

struct token {
    uint32_t at, n_bytes; /* of texts; n_bytes is NONE where no token has the id */
};

struct x3_bpe {
    x3_text texts;
    struct token *tokens; /* [n_ids] */
    uint32_t n_ids;
    size_t n_entries;
    struct slot *slots; /* open addressing by text; n_slots is a power of two */
    size_t n_slots;
    struct merge *merges; /* open addressing by pair; the mask is a power of two less one */
    uint64_t merges_mask;
    uint32_t byte_id[256]; /* id of the token of one byte, or NONE */
    uint32_t unknown_id;   /* or NONE */
    bool fuse_unknown, ignore_merges;
    size_t text_bytes_max; /* longest text of a token */
};

x3_status x3_ids_push(x3_ids *ids, uint32_t id, x3_err *err)
{
    if (ids->n_items == ids->capacity) {
        x3_status rc = x3_grow(&ids->items, &ids->capacity, ids->n_items + 1, sizeof *ids->items, err);
        if (rc != X3_OK)
            return rc;
    }
    ids->items[ids->n_items++] = id;
    return X3_OK;
}

void x3_ids_free(x3_ids *ids)
{
    free(ids->items);
    *ids = (x3_ids){0};
}

/* ---- byte-level alphabet ---- */

/* Bytes that are printable in ISO 8859-1 stand for themselves; the 68 others follow from U+0100 on, in order. */
static bool is_own_character(unsigned byte)
{
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte != 0xAD);
}

static unsigned character_of(unsigned byte)
{
    if (is_own_character(byte))
        return byte;
    if (byte <= 0x20)
        return 0x100 + byte;
    return byte == 0xAD ? ALPHABET_MAX : 0x121 + (byte - 0x7F);
}

/* False when cp is not of the alphabet. */
static bool byte_of(uint32_t cp, unsigned char *byte)
{
    unsigned value;

    if (cp < 0x100)
        value = cp;
    else if (cp <= 0x120)
        value = cp - 0x100;
    else if (cp < ALPHABET_MAX)
        value = cp - 0x121 + 0x7F;
    else
        value = 0xAD;
    *byte = (unsigned char)value;
    return cp <= ALPHABET_MAX && (cp >= 0x100 || is_own_character(cp));
}

x3_status x3_byte_level_encode(const char *bytes, size_t n_bytes, x3_text *out, x3_err *err)
{
    x3_status rc = X3_OK;
    char text[4];

    for (size_t i = 0; i < n_bytes && rc == X3_OK; i++)
        rc = x3_text_put(out, text, x3_utf8_encode(character_of((unsigned char)bytes[i]), text), err);
    return rc;
}

x3_status x3_byte_level_decode(const char *text, size_t n_bytes, x3_text *out, x3_err *err)
{
    size_t before = out->n_items, length;
    x3_status rc = X3_OK;

    for (size_t at = 0; at < n_bytes && rc == X3_OK; at += length) {
        unsigned char byte;
        if (!byte_of(x3_utf8_decode(text + at, n_bytes - at, &length), &byte)) {
            out->n_items = before;
            return x3_text_put(out, text, n_bytes, err);
        }
        rc = x3_text_put(out, &byte, 1, err);
    }
    return rc;
}

/* ---- vocabulary ---- */

/* The slot of a text: the one that holds it, or a free one. */
static struct slot *slot_of(const x3_bpe *bpe, const char *text, size_t n_bytes, uint32_t *tag)
{
    uint64_t hash = x3_hash(text, n_bytes);
    size_t mask = bpe->n_slots - 1, at = (size_t)hash & mask;

    *tag = (uint32_t)(hash >> 32);
    for (;; at = (at + 1) & mask) {
        struct slot *slot = &bpe->slots[at];
        if (slot->id == NONE)
            return slot;
        const struct token *t = &bpe->tokens[slot->id];
        if (slot->tag == *tag && t->n_bytes == n_bytes && memcmp(bpe->texts.items + t->at, text, n_bytes) == 0)
            return slot;
    }
}

bool x3_bpe_find(const x3_bpe *bpe, const char *text, size_t n_bytes, uint32_t *id)
{
    uint32_t tag;

    *id = slot_of(bpe, text, n_bytes, &tag)->id;
    return *id != NONE;
}

x3_view x3_bpe_token(const x3_bpe *bpe, uint32_t id)
{
    if (id >= bpe->n_ids || bpe->tokens[id].n_bytes == NONE)
        return (x3_view){NULL, 0};
    return (x3_view){bpe->texts.items + bpe->tokens[id].at, bpe->tokens[id].n_bytes};
}

size_t x3_bpe_n_entries(const x3_bpe *bpe)
{
    return bpe->n_entries;
}

uint32_t x3_bpe_n_ids(const x3_bpe *bpe)
{
    return bpe->n_ids;
}

static size_t power_of_two_above(size_t n)
{
    size_t power = 16;

    while (power < n)
        power *= 2;
    return power;
}

/* Largest id and number of entries, and a first look at the types. */
static x3_status measure_vocabulary(x3_bpe *bpe, const cJSON *vocabulary, const char *where, x3_err *err)
{
    int64_t id, largest = -1;
    char *field = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_asprintf(&field, err, "%s: model.vocab", where));
    for (const cJSON *c = vocabulary->child; c != NULL; c = c->next) {
        X3_TRY(rc, out, x3_json_as_int(c, c->string, 0, X3_TOKEN_IDS_MAX - 1, &id, field, err));
        if (id > largest)
            largest = id;
        bpe->n_entries++;
    }
    if (largest < 0)
        rc = x3_fail(err, X3_ERR_INPUT, "%s: \"model.vocab\" has no entries", where);
    bpe->n_ids = (uint32_t)(largest + 1);
out:
    free(field);
    return rc;
}

static x3_status add_token(x3_bpe *bpe, const char *text, uint32_t id, const char *where, x3_err *err)
{
    struct token *token = &bpe->tokens[id];
    size_t n = strlen(text);
    x3_status rc;

    if (token->n_bytes != NONE)
        return x3_fail(err, X3_ERR_INPUT, "%s: model.vocab: id %u belongs to \"%.*s\" and to \"%.120s\"", where,
                       (unsigned)id, (int)x3_min_size(token->n_bytes, 120), bpe->texts.items + token->at, text);
    if (bpe->texts.n_items + n >= NONE)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: model.vocab: more than 4 GiB of text", where);
    *token = (struct token){(uint32_t)bpe->texts.n_items, (uint32_t)n};
    rc = x3_text_put(&bpe->texts, text, n, err);
    if (rc == X3_OK) {
        uint32_t tag;
        struct slot *slot = slot_of(bpe, text, n, &tag);
        *slot = (struct slot){id, tag};
    }
    bpe->text_bytes_max = x3_max_size(bpe->text_bytes_max, n);
    return rc;
}

static x3_status load_vocabulary(x3_bpe *bpe, const cJSON *model, const char *where, x3_err *err)
{
    const cJSON *vocabulary = x3_json_get(model, "vocab");
    x3_status rc;

    if (!cJSON_IsObject(vocabulary))
        return x3_fail(err, X3_ERR_INPUT, "%s: \"model.vocab\" is missing or no object", where);
    X3_TRY(rc, out, measure_vocabulary(bpe, vocabulary, where, err));
    bpe->n_slots = power_of_two_above(2 * bpe->n_entries);
    X3_TRY(rc, out, x3_alloc(&bpe->tokens, bpe->n_ids, sizeof *bpe->tokens, err));
    X3_TRY(rc, out, x3_alloc(&bpe->slots, bpe->n_slots, sizeof *bpe->slots, err));
    X3_TRY(rc, out, x3_text_put(&bpe->texts, "", 0, err)); /* texts.items is never NULL */
    for (uint32_t i = 0; i < bpe->n_ids; i++)
        bpe->tokens[i].n_bytes = NONE;
    memset(bpe->slots, 0xFF, bpe->n_slots * sizeof *bpe->slots);
    for (const cJSON *c = vocabulary->child; c != NULL; c = c->next)
        X3_TRY(rc, out, add_token(bpe, c->string, (uint32_t)c->valuedouble, where, err));
out:
    return rc;
}

/* ---- merges ---- */

/* The slot of a pair: the one that holds it, or a free one. Multiplicative hashing (Knuth, volume 3, 6.4). */
static struct merge *merge_slot(const x3_bpe *bpe, uint32_t left, uint32_t right)
{
    uint64_t hash = ((uint64_t)left << 32 | right) * 0x9E3779B97F4A7C15u;

    hash ^= hash >> 32;
    for (;; hash++) {
        struct merge *m = &bpe->merges[hash & bpe->merges_mask];
        if (m->left == NONE || (m->left == left && m->right == right))
            return m;
    }
}

/* Both sides of "a b" or ["a", "b"]. */
static x3_status merge_sides(const cJSON *node, size_t index, x3_view side[2], const char *where, x3_err *err)
{
    if (cJSON_IsString(node)) {
        const char *text = node->valuestring, *space = strchr(text, ' ');
        if (space == NULL || strchr(space + 1, ' ') != NULL)
            return x3_fail(err, X3_ERR_INPUT,
                           "%s: model.merges[%zu]: \"%.120s\" is not two tokens with one space between", where, index,
                           text);
        side[0] = (x3_view){text, (size_t)(space - text)};
        side[1] = (x3_view){space + 1, strlen(space + 1)};
        return X3_OK;
    }
    const cJSON *first = cJSON_IsArray(node) ? node->child : NULL, *second = first == NULL ? NULL : first->next;
    if (!cJSON_IsString(first) || !cJSON_IsString(second) || second->next != NULL)
        return x3_fail(err, X3_ERR_INPUT, "%s: model.merges[%zu]: neither a string nor a list of two strings", where,
                       index);
    side[0] = (x3_view){first->valuestring, strlen(first->valuestring)};
    side[1] = (x3_view){second->valuestring, strlen(second->valuestring)};
    return X3_OK;
}

static x3_status find_for_merge(const x3_bpe *bpe, x3_view text, size_t index, uint32_t *id, const char *where,
                                x3_err *err)
{
    if (x3_bpe_find(bpe, text.data, text.n_bytes, id))
        return X3_OK;
    return x3_fail(err, X3_ERR_INPUT, "%s: model.merges[%zu]: token \"%.*s\" is not in model.vocab", where, index,
                   (int)x3_min_size(text.n_bytes, 120), text.data);
}

static x3_status add_merge(x3_bpe *bpe, const cJSON *node, size_t index, uint32_t rank, x3_text *joined,
                           const char *where, x3_err *err)
{
    uint32_t left, right, id;
    x3_view side[2] = {{0}, {0}};
    x3_status rc;

    X3_TRY(rc, out, merge_sides(node, index, side, where, err));
    X3_TRY(rc, out, find_for_merge(bpe, side[0], index, &left, where, err));
    X3_TRY(rc, out, find_for_merge(bpe, side[1], index, &right, where, err));
    joined->n_items = 0;
    X3_TRY(rc, out, x3_text_put(joined, side[0].data, side[0].n_bytes, err));
    X3_TRY(rc, out, x3_text_put(joined, side[1].data, side[1].n_bytes, err));
    X3_TRY(rc, out, find_for_merge(bpe, (x3_view){joined->items, joined->n_items}, index, &id, where, err));
    *merge_slot(bpe, left, right) = (struct merge){left, right, rank, id}; /* of a doubled pair the last one counts */
out:
    return rc;
}

static x3_status load_merges(x3_bpe *bpe, const cJSON *model, const char *where, x3_err *err)
{
    const cJSON *merges = x3_json_get(model, "merges");
    size_t n = 0, index = 0;
    x3_text joined = {0};
    uint32_t rank = 0;
    x3_status rc;

    if (!cJSON_IsArray(merges))
        return x3_fail(err, X3_ERR_INPUT, "%s: \"model.merges\" is missing or no list", where);
    for (const cJSON *c = merges->child; c != NULL; c = c->next)
        n++;
    if (n >= NONE)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: model.merges: %zu entries", where, n);
    size_t n_slots = power_of_two_above(2 * n);
    X3_TRY(rc, out, x3_alloc(&bpe->merges, n_slots, sizeof *bpe->merges, err));
    bpe->merges_mask = n_slots - 1;
    for (size_t i = 0; i < n_slots; i++)
        bpe->merges[i].left = NONE;
    X3_TRY(rc, out, x3_text_put(&joined, "", 0, err));
    for (const cJSON *c = merges->child; c != NULL; c = c->next, index++) {
        /* The first line of a merges.txt, which some converters carried over. */
        if (cJSON_IsString(c) && strncmp(c->valuestring, "#version", 8) == 0)
            continue;
        X3_TRY(rc, out, add_merge(bpe, c, index, rank++, &joined, where, err));
    }
out:
    x3_text_free(&joined);
    return rc;
}

/* ---- model ---- */

/* Absent, null, false, zero and "" are what these must be. */
static x3_status check_unused(const cJSON *model, const char *key, const char *where, x3_err *err)
{
    const cJSON *node = x3_json_get(model, key);

    if (node == NULL || cJSON_IsFalse(node) || (cJSON_IsNumber(node) && node->valuedouble == 0) ||
        (cJSON_IsString(node) && node->valuestring[0] == '\0'))
        return X3_OK;
    return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: \"model.%s\" is set, which is not supported", where, key);
}

static x3_status load_options(x3_bpe *bpe, const cJSON *model, const char *where, x3_err *err)
{
    static const char *const unused[] = {"dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"};
    const char *type = "BPE", *unknown = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_json_string(model, "type", false, &type, where, err));
    if (strcmp(type, "BPE") != 0) {
        rc = x3_fail(err, X3_ERR_UNSUPPORTED, "%s: \"model.type\" is \"%.60s\", only BPE is supported", where, type);
        goto out;
    }
    for (size_t i = 0; i < sizeof unused / sizeof unused[0]; i++)
        X3_TRY(rc, out, check_unused(model, unused[i], where, err));
    X3_TRY(rc, out, x3_json_bool(model, "fuse_unk", false, &bpe->fuse_unknown, where, err));
    X3_TRY(rc, out, x3_json_bool(model, "ignore_merges", false, &bpe->ignore_merges, where, err));
    X3_TRY(rc, out, x3_json_string(model, "unk_token", false, &unknown, where, err));
    if (unknown != NULL && !x3_bpe_find(bpe, unknown, strlen(unknown), &bpe->unknown_id))
        rc = x3_fail(err, X3_ERR_INPUT, "%s: \"model.unk_token\" is \"%.60s\", which is not in model.vocab", where,
                     unknown);
out:
    return rc;
}

static x3_status load_bytes(x3_bpe *bpe, const char *where, x3_err *err)
{
    for (unsigned byte = 0; byte < 256; byte++) {
        char text[4];
        size_t n = x3_utf8_encode(character_of(byte), text);
        /* Rare bytes may lack a token (SmolLM2 has 21 such); without the common ones this is no byte-level file. */
        if (!x3_bpe_find(bpe, text, n, &bpe->byte_id[byte]) && bpe->unknown_id == NONE &&
            ((byte >= 0x20 && byte <= 0x7E) || byte == '\n'))
            return x3_fail(err, X3_ERR_INPUT,
                           "%s: model.vocab: byte 0x%02X, in the byte-level alphabet \"%.*s\", has no token", where,
                           byte, (int)n, text);
    }
    return X3_OK;
}

x3_status x3_bpe_load(x3_bpe **out, const cJSON *root, const char *where, x3_err *err)
{
    const cJSON *model = x3_json_get(root, "model");
    x3_bpe *bpe = NULL;
    x3_status rc;

    *out = NULL;
    if (!cJSON_IsObject(model))
        return x3_fail(err, X3_ERR_INPUT, "%s: \"model\" is missing or no object", where);
    X3_TRY(rc, out, x3_alloc(&bpe, 1, sizeof *bpe, err));
    bpe->unknown_id = NONE;
    X3_TRY(rc, out, load_vocabulary(bpe, model, where, err));
    X3_TRY(rc, out, load_options(bpe, model, where, err));
    X3_TRY(rc, out, load_merges(bpe, model, where, err));
    X3_TRY(rc, out, load_bytes(bpe, where, err));
    *out = bpe;
    bpe = NULL;
out:
    x3_bpe_free(bpe);
    return rc;
}

void x3_bpe_free(x3_bpe *bpe)
{
    if (bpe == NULL)
        return;
    x3_text_free(&bpe->texts);
    free(bpe->tokens);
    free(bpe->slots);
    free(bpe->merges);
    free(bpe);
}

/* ---- encoding ---- */

/* Rank and result of merging a pair; rank NONE when it does not merge. */
static uint32_t rank_of(const x3_bpe *bpe, uint32_t left, uint32_t right, uint32_t *id)
{
    const struct merge *m = merge_slot(bpe, left, right);

    *id = m->id;
    return m->left == NONE ? NONE : m->rank;
}

/* Merges in place and returns the number of symbols left. Quadratic, and the fastest for the few bytes of a word. */
static size_t merge_short(const x3_bpe *bpe, uint32_t *symbols, size_t n)
{
    uint32_t rank[SHORT_MAX], id[SHORT_MAX];

    for (size_t i = 0; i + 1 < n; i++)
        rank[i] = rank_of(bpe, symbols[i], symbols[i + 1], &id[i]);
    while (n > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < n; i++)
            if (rank[i] < rank[best])
                best = i;
        if (rank[best] == NONE)
            break;
        symbols[best] = id[best];
        n--;
        for (size_t i = best + 1; i < n; i++) {
            symbols[i] = symbols[i + 1];
            rank[i - 1] = rank[i];
            id[i - 1] = id[i];
        }
        if (best > 0)
            rank[best - 1] = rank_of(bpe, symbols[best - 1], symbols[best], &id[best - 1]);
        if (best + 1 < n)
            rank[best] = rank_of(bpe, symbols[best], symbols[best + 1], &id[best]);
    }
    return n;
}

/* A binary min-heap of rank << 32 | position. */
static x3_status heap_push(x3_bpe_scratch *s, size_t *n_heap, uint64_t key, x3_err *err)
{
    size_t i = (*n_heap)++;
    x3_status rc = x3_grow(&s->heap, &s->heap_capacity, *n_heap, sizeof *s->heap, err);

    if (rc != X3_OK)
        return rc;
    for (; i > 0 && s->heap[(i - 1) / 2] > key; i = (i - 1) / 2)
        s->heap[i] = s->heap[(i - 1) / 2];
    s->heap[i] = key;
    return X3_OK;
}

static uint64_t heap_pop(uint64_t *heap, size_t *n_heap)
{
    uint64_t top = heap[0], last = heap[--*n_heap];
    size_t i = 0, child;

    while ((child = 2 * i + 1) < *n_heap) {
        if (child + 1 < *n_heap && heap[child + 1] < heap[child])
            child++;
        if (heap[child] >= last)
            break;
        heap[i] = heap[child];
        i = child;
    }
    heap[i] = last;
    return top;
}

/* Puts the pair that starts at `at` on the heap, if it merges. */
static x3_status push_pair(const x3_bpe *bpe, x3_bpe_scratch *s, size_t *n_heap, uint32_t at, x3_err *err)
{
    uint32_t rank, id;

    if (at == NONE || s->next[at] == NONE)
        return X3_OK;
    rank = rank_of(bpe, s->symbols[at], s->symbols[s->next[at]], &id);
    return rank == NONE ? X3_OK : heap_push(s, n_heap, (uint64_t)rank << 32 | at, err);
}

/* As merge_short, over a linked list and a heap. An entry of the heap is stale when the pair at its position no longer
 * has its rank; a symbol swallowed by its left neighbour is NONE. */
static x3_status merge_long(const x3_bpe *bpe, x3_bpe_scratch *s, size_t *n, x3_err *err)
{
    size_t n_heap = 0, n_left = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_grow(&s->previous, &s->previous_capacity, *n, sizeof *s->previous, err));
    X3_TRY(rc, out, x3_grow(&s->next, &s->next_capacity, *n, sizeof *s->next, err));
    for (size_t i = 0; i < *n; i++) {
        s->previous[i] = i == 0 ? NONE : (uint32_t)(i - 1);
        s->next[i] = i + 1 == *n ? NONE : (uint32_t)(i + 1);
    }
    for (size_t i = 0; i + 1 < *n; i++)
        X3_TRY(rc, out, push_pair(bpe, s, &n_heap, (uint32_t)i, err));
    while (n_heap > 0) {
        uint64_t key = heap_pop(s->heap, &n_heap);
        uint32_t at = (uint32_t)key, right = s->next[at], id;
        if (s->symbols[at] == NONE || right == NONE)
            continue;
        if (rank_of(bpe, s->symbols[at], s->symbols[right], &id) != key >> 32)
            continue;
        s->symbols[at] = id;
        s->symbols[right] = NONE;
        s->next[at] = s->next[right];
        if (s->next[at] != NONE)
            s->previous[s->next[at]] = at;
        X3_TRY(rc, out, push_pair(bpe, s, &n_heap, s->previous[at], err));
        X3_TRY(rc, out, push_pair(bpe, s, &n_heap, at, err));
    }
    for (uint32_t i = 0; i != NONE; i = s->next[i])
        s->symbols[n_left++] = s->symbols[i];
    *n = n_left;
out:
    return rc;
}

/* The bytes as symbols; how many there are. */
static size_t first_symbols(const x3_bpe *bpe, const char *bytes, size_t n_bytes, uint32_t *symbols)
{
    bool after_unknown = false;
    size_t n = 0;

    for (size_t i = 0; i < n_bytes; i++) {
        uint32_t id = bpe->byte_id[(unsigned char)bytes[i]];
        if (id != NONE)
            symbols[n++] = id;
        else if (bpe->unknown_id != NONE && !(after_unknown && bpe->fuse_unknown))
            symbols[n++] = bpe->unknown_id;
        after_unknown = id == NONE && bpe->unknown_id != NONE;
    }
    return n;
}

x3_status x3_bpe_encode(const x3_bpe *bpe, x3_bpe_scratch *s, const char *bytes, size_t n_bytes, x3_ids *out,
                        x3_err *err)
{
    uint32_t few[SHORT_MAX], *symbols = few, id;
    size_t n;
    x3_status rc = X3_OK;

    if (n_bytes >= NONE)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "a pre-token of %zu bytes", n_bytes);
    if (bpe->ignore_merges && n_bytes <= bpe->text_bytes_max) {
        s->text.n_items = 0;
        X3_TRY(rc, out, x3_byte_level_encode(bytes, n_bytes, &s->text, err));
        if (s->text.n_items > 0 && x3_bpe_find(bpe, s->text.items, s->text.n_items, &id))
            return x3_ids_push(out, id, err);
    }
    if (n_bytes > SHORT_MAX) {
        X3_TRY(rc, out, x3_grow(&s->symbols, &s->symbols_capacity, n_bytes, sizeof *s->symbols, err));
        symbols = s->symbols;
    }
    n = first_symbols(bpe, bytes, n_bytes, symbols);
    if (n_bytes <= SHORT_MAX)
        n = merge_short(bpe, symbols, n);
    else if (n > 0)
        X3_TRY(rc, out, merge_long(bpe, s, &n, err));
    if (n == 0)
        goto out;
    X3_TRY(rc, out, x3_grow(&out->items, &out->capacity, out->n_items + n, sizeof *out->items, err));
    memcpy(out->items + out->n_items, symbols, n * sizeof *symbols);
    out->n_items += n;
out:
    return rc;
}

void x3_bpe_scratch_free(x3_bpe_scratch *scratch)
{
    x3_text_free(&scratch->text);
    free(scratch->symbols);
    free(scratch->previous);
    free(scratch->next);
    free(scratch->heap);
    *scratch = (x3_bpe_scratch){0};
}
