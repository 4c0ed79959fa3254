#include "runtime/tokenizer/tokenizer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "formats/json.h"
#include "runtime/tokenizer/added_tokens.h"
#include "runtime/tokenizer/pretokenizer.h"

#define NESTING_MAX 8
#define FILE_BYTES_MAX ((uint64_t)1 << 30)

struct span {
    uint64_t at;
    uint32_t n_bytes;
    bool present, special;
};

struct x3_tokenizer {
    x3_bpe *bpe;
    x3_pretokenizer *pretokenizer;
    x3_added_tokens added;
    bool nfc;
    x3_ids before, after; /* of the template */
    x3_text bytes;        /* what the tokens decode to, one after the other */
    struct span *spans;   /* [n_vocab] into bytes */
    uint32_t n_vocab;
};

/* ---- loading ---- */

/* Type of a node of a pipeline; *list becomes the members of a Sequence, or NULL. */
static x3_status node_type(const cJSON *node, const char *name, const char *members, unsigned depth, const char **type,
                           const cJSON **list, const char *where, x3_err *err)
{
    x3_status rc;

    *list = NULL;
    if (!cJSON_IsObject(node))
        return x3_fail(err, X3_ERR_INPUT, "%s: \"%s\" is no object", where, name);
    rc = x3_json_string(node, "type", true, type, where, err);
    if (rc != X3_OK || strcmp(*type, "Sequence") != 0)
        return rc;
    *list = x3_json_get(node, members);
    if (!cJSON_IsArray(*list))
        return x3_fail(err, X3_ERR_INPUT, "%s: %s: \"%s\" is missing or no list", where, name, members);
    if (depth == NESTING_MAX)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: %s: more than %d nested sequences", where, name, NESTING_MAX);
    return X3_OK;
}

static x3_status load_normalizer(x3_tokenizer *t, const cJSON *node, unsigned depth, const char *where, x3_err *err)
{
    const char *type = NULL;
    const cJSON *list;
    x3_status rc = node_type(node, "normalizer", "normalizers", depth, &type, &list, where, err);

    if (rc != X3_OK)
        return rc;
    if (list == NULL && strcmp(type, "NFC") != 0)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: normalizer: \"type\" is \"%.60s\"; supported: Sequence, NFC",
                       where, type);
    t->nfc = t->nfc || list == NULL;
    for (const cJSON *c = list == NULL ? NULL : list->child; c != NULL && rc == X3_OK; c = c->next)
        rc = load_normalizer(t, c, depth + 1, where, err);
    return rc;
}

static x3_status check_decoder(const cJSON *node, unsigned depth, const char *where, x3_err *err)
{
    const char *type = NULL;
    const cJSON *list;
    x3_status rc = node_type(node, "decoder", "decoders", depth, &type, &list, where, err);

    if (rc != X3_OK)
        return rc;
    if (list == NULL && strcmp(type, "ByteLevel") != 0)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: decoder: \"type\" is \"%.60s\"; supported: Sequence, ByteLevel",
                       where, type);
    for (const cJSON *c = list == NULL ? NULL : list->child; c != NULL && rc == X3_OK; c = c->next)
        rc = check_decoder(c, depth + 1, where, err);
    return rc;
}

/* Appends the ids that the template gives to one of its special tokens. */
static x3_status add_template_ids(const x3_tokenizer *t, x3_ids *ids, const cJSON *processor, const cJSON *piece,
                                  const char *where, x3_err *err)
{
    const char *name = NULL;
    const cJSON *list;
    x3_status rc = x3_json_string(piece, "id", true, &name, where, err);

    if (rc != X3_OK)
        return rc;
    list = x3_json_get(x3_json_get(x3_json_get(processor, "special_tokens"), name), "ids");
    if (!cJSON_IsArray(list))
        return x3_fail(err, X3_ERR_INPUT, "%s: post_processor: \"%.60s\" has no ids in \"special_tokens\"", where,
                       name);
    for (const cJSON *c = list->child; c != NULL; c = c->next) {
        int64_t id = 0;
        X3_TRY(rc, out, x3_json_as_int(c, "post_processor.special_tokens.ids", 0, (int64_t)t->n_vocab - 1, &id, where,
                                       err));
        X3_TRY(rc, out, x3_ids_push(ids, (uint32_t)id, err));
    }
out:
    return rc;
}

/* Puts the ids of a later processor around those of the earlier ones. */
static x3_status wrap_template(x3_tokenizer *t, x3_ids *before, const x3_ids *after, x3_err *err)
{
    x3_status rc = X3_OK;

    for (size_t i = 0; i < t->before.n_items; i++)
        X3_TRY(rc, out, x3_ids_push(before, t->before.items[i], err));
    for (size_t i = 0; i < after->n_items; i++)
        X3_TRY(rc, out, x3_ids_push(&t->after, after->items[i], err));
    x3_ids swapped = t->before;
    t->before = *before;
    *before = swapped;
out:
    return rc;
}

static x3_status load_template(x3_tokenizer *t, const cJSON *processor, const char *where, x3_err *err)
{
    const cJSON *single = x3_json_get(processor, "single");
    x3_ids side[2] = {{0}, {0}};
    size_t n_texts = 0;
    x3_status rc = X3_OK;

    if (!cJSON_IsArray(single))
        return x3_fail(err, X3_ERR_INPUT, "%s: post_processor: \"single\" is missing or no list", where);
    for (const cJSON *c = single->child; c != NULL; c = c->next) {
        const cJSON *special = x3_json_get(c, "SpecialToken"), *sequence = x3_json_get(c, "Sequence");
        const char *name = "";
        if (special != NULL) {
            X3_TRY(rc, out, add_template_ids(t, &side[n_texts > 0], processor, special, where, err));
            continue;
        }
        X3_TRY(rc, out, x3_json_string(sequence, "id", true, &name, where, err));
        if (strcmp(name, "A") != 0) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: post_processor: \"single\" names the text \"%.60s\", expected \"A\"",
                         where, name);
            goto out;
        }
        n_texts++;
    }
    if (n_texts != 1)
        rc = x3_fail(err, X3_ERR_UNSUPPORTED, "%s: post_processor: \"single\" has the text %zu times, expected 1",
                     where, n_texts);
    else
        rc = wrap_template(t, &side[0], &side[1], err);
out:
    x3_ids_free(&side[0]);
    x3_ids_free(&side[1]);
    return rc;
}

static x3_status load_post_processor(x3_tokenizer *t, const cJSON *node, unsigned depth, const char *where, x3_err *err)
{
    const char *type = NULL;
    const cJSON *list;
    x3_status rc = node_type(node, "post_processor", "processors", depth, &type, &list, where, err);

    if (rc != X3_OK)
        return rc;
    if (strcmp(type, "TemplateProcessing") == 0)
        return load_template(t, node, where, err);
    if (list == NULL && strcmp(type, "ByteLevel") != 0)
        return x3_fail(err, X3_ERR_UNSUPPORTED,
                       "%s: post_processor: \"type\" is \"%.60s\"; supported: Sequence, ByteLevel, TemplateProcessing",
                       where, type);
    for (const cJSON *c = list == NULL ? NULL : list->child; c != NULL && rc == X3_OK; c = c->next)
        rc = load_post_processor(t, c, depth + 1, where, err);
    return rc;
}

static x3_status add_span(x3_tokenizer *t, uint32_t id, x3_view text, bool special, x3_err *err)
{
    struct span *span = &t->spans[id];
    size_t at = t->bytes.n_items;
    x3_status rc = x3_byte_level_decode(text.data, text.n_bytes, &t->bytes, err);

    if (rc == X3_OK)
        *span = (struct span){at, (uint32_t)(t->bytes.n_items - at), true, special};
    return rc;
}

/* The bytes of every id, added tokens over the vocabulary. */
static x3_status load_spans(x3_tokenizer *t, x3_err *err)
{
    x3_status rc;

    t->n_vocab = x3_bpe_n_ids(t->bpe);
    for (size_t i = 0; i < t->added.n_items; i++)
        if (t->added.items[i].id >= t->n_vocab)
            t->n_vocab = t->added.items[i].id + 1;
    X3_TRY(rc, out, x3_alloc(&t->spans, t->n_vocab, sizeof *t->spans, err));
    X3_TRY(rc, out, x3_text_put(&t->bytes, "", 0, err));
    for (uint32_t id = 0; id < x3_bpe_n_ids(t->bpe); id++) {
        x3_view text = x3_bpe_token(t->bpe, id);
        if (text.data != NULL)
            X3_TRY(rc, out, add_span(t, id, text, false, err));
    }
    for (size_t i = 0; i < t->added.n_items; i++)
        X3_TRY(rc, out, add_span(t, t->added.items[i].id, t->added.items[i].match, t->added.items[i].special, err));
out:
    return rc;
}

static x3_status load_parts(x3_tokenizer *t, const cJSON *root, const char *where, x3_err *err)
{
    const cJSON *normalizer = x3_json_get(root, "normalizer"), *decoder = x3_json_get(root, "decoder");
    const cJSON *post_processor = x3_json_get(root, "post_processor");
    const char *version = "1.0";
    x3_status rc;

    X3_TRY(rc, out, x3_json_string(root, "version", false, &version, where, err));
    if (strcmp(version, "1.0") != 0) {
        rc = x3_fail(err, X3_ERR_UNSUPPORTED, "%s: \"version\" is \"%.60s\", expected 1.0", where, version);
        goto out;
    }
    if (normalizer != NULL)
        X3_TRY(rc, out, load_normalizer(t, normalizer, 0, where, err));
    X3_TRY(rc, out, x3_pretokenizer_load(&t->pretokenizer, root, where, err));
    if (decoder != NULL)
        X3_TRY(rc, out, check_decoder(decoder, 0, where, err));
    X3_TRY(rc, out, x3_bpe_load(&t->bpe, root, where, err));
    X3_TRY(rc, out, x3_added_tokens_load(&t->added, root, t->bpe, t->nfc, where, err));
    X3_TRY(rc, out, load_spans(t, err));
    if (post_processor != NULL)
        X3_TRY(rc, out, load_post_processor(t, post_processor, 0, where, err));
out:
    return rc;
}

static x3_status load_json(x3_tokenizer **out, const cJSON *root, const char *where, x3_err *err)
{
    x3_tokenizer *t = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&t, 1, sizeof *t, err));
    X3_TRY(rc, out, load_parts(t, root, where, err));
    *out = t;
    t = NULL;
out:
    x3_tokenizer_free(t);
    return rc;
}

x3_status x3_tokenizer_parse(x3_tokenizer **out, const char *json, size_t n_bytes, const char *where, x3_err *err)
{
    cJSON *root = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_json_parse(&root, json, n_bytes, where, err));
    if (cJSON_IsObject(root))
        rc = load_json(out, root, where, err);
    else
        rc = x3_fail(err, X3_ERR_INPUT, "%s: the top of the file is not a JSON object", where);
out:
    cJSON_Delete(root);
    return rc;
}

/* Folders with a tokenizer of another kind are common; say what to do with them. */
static x3_status say_missing(const char *path, x3_err *err)
{
    static const char *const others[] = {"tokenizer.model", "tiktoken.model", "vocab.json", "tekken.json"};
    const char *slash = strrchr(path, '/');
    const int dir = slash == NULL ? 0 : (int)(slash - path + 1);
    char other[4096];

    for (size_t i = 0; i < sizeof others / sizeof others[0]; i++) {
        snprintf(other, sizeof other, "%.*s%s", dir, path, others[i]);
        if (x3_path_exists(other))
            return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: does not exist, and %s is not read; transformers writes the former from the "
                           "latter: AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)",
                           path, others[i]);
    }
    return X3_OK;
}

x3_status x3_tokenizer_load(x3_tokenizer **out, const char *path, x3_err *err)
{
    char *json = NULL;
    size_t n_bytes = 0;
    x3_status rc;

    *out = NULL;
    if (!x3_path_exists(path))
        X3_TRY(rc, out, say_missing(path, err));
    X3_TRY(rc, out, x3_read_file(&json, &n_bytes, path, FILE_BYTES_MAX, err));
    rc = x3_tokenizer_parse(out, json, n_bytes, path, err);
out:
    free(json);
    return rc;
}

void x3_tokenizer_free(x3_tokenizer *tokenizer)
{
    if (tokenizer == NULL)
        return;
    x3_bpe_free(tokenizer->bpe);
    x3_pretokenizer_free(tokenizer->pretokenizer);
    x3_added_tokens_free(&tokenizer->added);
    x3_ids_free(&tokenizer->before);
    x3_ids_free(&tokenizer->after);
    x3_text_free(&tokenizer->bytes);
    free(tokenizer->spans);
    free(tokenizer);
}

/* ---- encoding ---- */

/* One call of encode. */
struct encoder {
    const x3_tokenizer *t;
    bool parse_special;
    x3_ids *out;
    size_t end; /* out is full at so many */
    x3_view marker;
    x3_text repaired, normalized, unmarked;
    x3_pretokenizer_scratch pretokenizer;
    x3_regex_scratch regex;
    x3_bpe_scratch bpe;
};

static x3_status encode_piece(void *context, const char *piece, size_t n_bytes, bool *stop, x3_err *err)
{
    struct encoder *e = context;
    x3_status rc = x3_bpe_encode(e->t->bpe, &e->bpe, piece, n_bytes, e->out, err);

    *stop = e->out->n_items >= e->end;
    return rc;
}

/* Text in which no token of raw text stands (`raw`), or in which no added token at all does. */
static x3_status encode_text(struct encoder *e, x3_view text, bool raw, x3_err *err);

/* Walks the stretches of a text: ids of added tokens, and the text between them. */
static x3_status encode_around_tokens(struct encoder *e, x3_view text, bool normalized, x3_err *err)
{
    x3_added_walk walk = {.text = text.data, .n_bytes = text.n_bytes, .normalized = normalized,
                          .skip_special = !e->parse_special, .marker = e->marker};
    x3_status rc = X3_OK;

    while (e->out->n_items < e->end) {
        const x3_added_token *token;
        x3_view stretch;
        bool done;
        X3_TRY(rc, out, x3_added_tokens_next(&e->t->added, &walk, &e->regex, &token, &stretch, &done, err));
        if (done)
            break;
        if (token != NULL)
            X3_TRY(rc, out, x3_ids_push(e->out, token->id, err));
        else
            X3_TRY(rc, out, encode_text(e, stretch, !normalized, err));
    }
out:
    return rc;
}

/* *text without markers, which have done their work. */
static x3_status drop_markers(struct encoder *e, x3_view *text, x3_err *err)
{
    const char *at = text->data, *end = at + text->n_bytes, *next;
    x3_status rc;

    e->unmarked.n_items = 0;
    while (e->marker.n_bytes > 0 && (next = memmem(at, (size_t)(end - at), e->marker.data, e->marker.n_bytes)) != NULL) {
        X3_TRY(rc, out, x3_text_put(&e->unmarked, at, (size_t)(next - at), err));
        at = next + e->marker.n_bytes;
    }
    if (at == text->data)
        return X3_OK;
    X3_TRY(rc, out, x3_text_put(&e->unmarked, at, (size_t)(end - at), err));
    *text = (x3_view){e->unmarked.n_items == 0 ? "" : e->unmarked.items, e->unmarked.n_items};
out:
    return rc;
}

static x3_status encode_text(struct encoder *e, x3_view text, bool raw, x3_err *err)
{
    x3_status rc;

    if (!raw)
        X3_TRY(rc, out, drop_markers(e, &text, err));
    if (!raw)
        return x3_pretokenizer_run(e->t->pretokenizer, &e->pretokenizer, text.data, text.n_bytes, encode_piece, e, err);
    if (e->t->nfc)
        X3_TRY(rc, out, x3_nfc(&text, &e->normalized, err));
    rc = encode_around_tokens(e, text, true, err);
out:
    return rc;
}

/* Runs an encoder and frees what it holds. */
static x3_status encode(struct encoder *e, const char *text, size_t n_bytes, x3_err *err)
{
    size_t before = e->out->n_items;
    x3_view view = {n_bytes == 0 ? "" : text, n_bytes};
    x3_status rc;

    X3_TRY(rc, out, x3_utf8_repair(&view, &e->repaired, err));
    X3_TRY(rc, out, encode_around_tokens(e, view, false, err));
    e->out->n_items = x3_min_size(e->out->n_items, e->end);
out:
    if (rc != X3_OK)
        e->out->n_items = before;
    x3_text_free(&e->repaired);
    x3_text_free(&e->normalized);
    x3_text_free(&e->unmarked);
    x3_pretokenizer_scratch_free(&e->pretokenizer);
    x3_regex_scratch_free(&e->regex);
    x3_bpe_scratch_free(&e->bpe);
    return rc;
}

x3_status x3_tokenizer_encode(const x3_tokenizer *tokenizer, const char *text, size_t n_bytes, bool parse_special,
                              size_t max_ids, x3_ids *out, x3_err *err)
{
    struct encoder e = {.t = tokenizer, .parse_special = parse_special, .out = out, .end = SIZE_MAX};

    if (max_ids > 0 && max_ids < SIZE_MAX - out->n_items)
        e.end = out->n_items + max_ids;
    return encode(&e, text, n_bytes, err);
}

x3_status x3_tokenizer_mark(const x3_tokenizer *tokenizer, const char *text, size_t n_bytes, const char *marker,
                            x3_text *out, x3_err *err)
{
    return x3_added_tokens_mark(&tokenizer->added, (x3_view){text, n_bytes}, (x3_view){marker, strlen(marker)}, out, err);
}

x3_status x3_tokenizer_encode_marked(const x3_tokenizer *tokenizer, const char *text, size_t n_bytes,
                                     const char *marker, x3_ids *out, x3_err *err)
{
    struct encoder e = {.t = tokenizer, .parse_special = true, .out = out, .end = SIZE_MAX,
                        .marker = {marker, strlen(marker)}};

    return encode(&e, text, n_bytes, err);
}

/* ---- decoding and questions ---- */

x3_view x3_tokenizer_token_bytes(const x3_tokenizer *tokenizer, uint32_t id)
{
    if (id >= tokenizer->n_vocab || !tokenizer->spans[id].present)
        return (x3_view){NULL, 0};
    return (x3_view){tokenizer->bytes.items + tokenizer->spans[id].at, tokenizer->spans[id].n_bytes};
}

bool x3_tokenizer_is_special(const x3_tokenizer *tokenizer, uint32_t id)
{
    return id < tokenizer->n_vocab && tokenizer->spans[id].special;
}

x3_status x3_tokenizer_decode(const x3_tokenizer *tokenizer, const uint32_t *ids, size_t n_ids, bool skip_special,
                              char **out, size_t *n_bytes, x3_err *err)
{
    x3_text text = {0};
    x3_status rc = X3_OK;

    *out = NULL;
    *n_bytes = 0;
    for (size_t i = 0; i < n_ids; i++) {
        x3_view token = x3_tokenizer_token_bytes(tokenizer, ids[i]);
        if (token.data != NULL && !(skip_special && x3_tokenizer_is_special(tokenizer, ids[i])))
            X3_TRY(rc, out, x3_text_put(&text, token.data, token.n_bytes, err));
    }
    X3_TRY(rc, out, x3_text_put(&text, "", 1, err));
    *out = text.items;
    *n_bytes = text.n_items - 1;
    text = (x3_text){0};
out:
    x3_text_free(&text);
    return rc;
}

bool x3_tokenizer_id(const x3_tokenizer *tokenizer, const char *content, uint32_t *id)
{
    for (size_t i = 0; i < tokenizer->added.n_items; i++)
        if (strcmp(tokenizer->added.items[i].content, content) == 0) {
            *id = tokenizer->added.items[i].id;
            return true;
        }
    return x3_bpe_find(tokenizer->bpe, content, strlen(content), id);
}

uint32_t x3_tokenizer_n_vocab(const x3_tokenizer *tokenizer)
{
    return tokenizer->n_vocab;
}

void x3_tokenizer_template(const x3_tokenizer *tokenizer, const x3_ids **before, const x3_ids **after)
{
    *before = &tokenizer->before;
    *after = &tokenizer->after;
}
