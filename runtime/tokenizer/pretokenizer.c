#include "runtime/tokenizer/pretokenizer.h"

#include <stdlib.h>
#include <string.h>

#include "formats/json.h"

#define STAGES_MAX 32
#define NESTING_MAX 8

/* The regex of GPT-2 (Radford et al. 2019, encoder.py), built into ByteLevel. */
#define GPT2_REGEX "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

enum kind { SPLIT, DIGITS, BYTE_LEVEL };
enum behavior { REMOVED, ISOLATED, MERGED_WITH_PREVIOUS, MERGED_WITH_NEXT, CONTIGUOUS };

struct stage {
    enum kind kind;
    enum behavior behavior;
    bool invert;
    bool add_prefix_space; /* of BYTE_LEVEL */
    x3_regex *regex;       /* of SPLIT, and of BYTE_LEVEL with use_regex; else NULL */
};

struct x3_pretokenizer {
    struct stage stages[STAGES_MAX];
    size_t n_stages;
};

/* ---- loading ---- */

static x3_status load_behavior(struct stage *stage, const cJSON *node, const char *where, x3_err *err)
{
    static const struct {
        const char *name;
        enum behavior behavior;
    } known[] = {
        {"Removed", REMOVED},
        {"Isolated", ISOLATED},
        {"MergedWithPrevious", MERGED_WITH_PREVIOUS},
        {"MergedWithNext", MERGED_WITH_NEXT},
        {"Contiguous", CONTIGUOUS},
    };
    const char *name = NULL;
    x3_status rc = x3_json_string(node, "behavior", true, &name, where, err);

    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (strcmp(name, known[i].name) == 0) {
            stage->behavior = known[i].behavior;
            return X3_OK;
        }
    return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: \"behavior\" is \"%.60s\", which is not supported", where, name);
}

static x3_status load_split(struct stage *stage, const cJSON *node, const char *where, x3_err *err)
{
    const cJSON *pattern = x3_json_get(node, "pattern");
    const char *regex = NULL, *literal = NULL;
    x3_status rc;

    stage->kind = SPLIT;
    X3_TRY(rc, out, load_behavior(stage, node, where, err));
    X3_TRY(rc, out, x3_json_bool(node, "invert", false, &stage->invert, where, err));
    if (!cJSON_IsObject(pattern)) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: \"pattern\" is missing or no object", where);
        goto out;
    }
    X3_TRY(rc, out, x3_json_string(pattern, "Regex", false, &regex, where, err));
    X3_TRY(rc, out, x3_json_string(pattern, "String", false, &literal, where, err));
    if ((regex == NULL) == (literal == NULL)) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: \"pattern\" must have one of \"Regex\" and \"String\"", where);
        goto out;
    }
    const char *text = regex != NULL ? regex : literal;
    rc = x3_regex_compile(&stage->regex, text, strlen(text), regex == NULL, where, err);
out:
    return rc;
}

static x3_status load_byte_level(struct stage *stage, const cJSON *node, const char *where, x3_err *err)
{
    bool use_regex = true;
    x3_status rc;

    stage->kind = BYTE_LEVEL;
    stage->behavior = ISOLATED;
    stage->add_prefix_space = true;
    X3_TRY(rc, out, x3_json_bool(node, "add_prefix_space", false, &stage->add_prefix_space, where, err));
    X3_TRY(rc, out, x3_json_bool(node, "use_regex", false, &use_regex, where, err));
    if (use_regex)
        rc = x3_regex_compile(&stage->regex, GPT2_REGEX, sizeof GPT2_REGEX - 1, false, where, err);
out:
    return rc;
}

static x3_status load_digits(struct stage *stage, const cJSON *node, const char *where, x3_err *err)
{
    bool individual = false;
    x3_status rc = x3_json_bool(node, "individual_digits", false, &individual, where, err);

    stage->kind = DIGITS;
    stage->behavior = individual ? ISOLATED : CONTIGUOUS;
    return rc;
}

static x3_status load_stage(x3_pretokenizer *p, const cJSON *node, const char *where, unsigned depth, x3_err *err);

static x3_status load_sequence(x3_pretokenizer *p, const cJSON *node, const char *where, unsigned depth, x3_err *err)
{
    const cJSON *list = x3_json_get(node, "pretokenizers");
    x3_status rc = X3_OK;
    char *name = NULL;
    size_t index = 0;

    if (!cJSON_IsArray(list))
        return x3_fail(err, X3_ERR_INPUT, "%s: \"pretokenizers\" is missing or no list", where);
    if (depth == NESTING_MAX)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: more than %d nested sequences", where, NESTING_MAX);
    for (const cJSON *c = list->child; c != NULL; c = c->next, index++) {
        free(name);
        X3_TRY(rc, out, x3_asprintf(&name, err, "%s.pretokenizers[%zu]", where, index));
        X3_TRY(rc, out, load_stage(p, c, name, depth + 1, err));
    }
out:
    free(name);
    return rc;
}

static x3_status load_stage(x3_pretokenizer *p, const cJSON *node, const char *where, unsigned depth, x3_err *err)
{
    const char *type = NULL;
    x3_status rc;

    if (!cJSON_IsObject(node))
        return x3_fail(err, X3_ERR_INPUT, "%s: missing or no object", where);
    rc = x3_json_string(node, "type", true, &type, where, err);
    if (rc != X3_OK)
        return rc;
    if (strcmp(type, "Sequence") == 0)
        return load_sequence(p, node, where, depth, err);
    if (p->n_stages == STAGES_MAX)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: more than %d stages", where, STAGES_MAX);
    if (p->n_stages > 0 && p->stages[p->n_stages - 1].kind == BYTE_LEVEL)
        return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: %.60s follows ByteLevel, which must be last", where, type);
    struct stage *stage = &p->stages[p->n_stages++];
    if (strcmp(type, "Split") == 0)
        return load_split(stage, node, where, err);
    if (strcmp(type, "ByteLevel") == 0)
        return load_byte_level(stage, node, where, err);
    if (strcmp(type, "Digits") == 0)
        return load_digits(stage, node, where, err);
    return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: \"type\" is \"%.60s\"; supported: Sequence, Split, Digits, ByteLevel",
                   where, type);
}

x3_status x3_pretokenizer_load(x3_pretokenizer **out, const cJSON *root, const char *where, x3_err *err)
{
    const cJSON *node = x3_json_get(root, "pre_tokenizer");
    x3_pretokenizer *p = NULL;
    char *name = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&p, 1, sizeof *p, err));
    X3_TRY(rc, out, x3_asprintf(&name, err, "%s: pre_tokenizer", where));
    if (node != NULL)
        X3_TRY(rc, out, load_stage(p, node, name, 0, err));
    if (p->n_stages == 0 || p->stages[p->n_stages - 1].kind != BYTE_LEVEL) {
        rc = x3_fail(err, X3_ERR_UNSUPPORTED, "%s: no ByteLevel; only byte-level tokenizers are supported", name);
        goto out;
    }
    *out = p;
    p = NULL;
out:
    free(name);
    x3_pretokenizer_free(p);
    return rc;
}

void x3_pretokenizer_free(x3_pretokenizer *pretokenizer)
{
    if (pretokenizer == NULL)
        return;
    for (size_t i = 0; i < pretokenizer->n_stages; i++)
        x3_regex_free(pretokenizer->stages[i].regex);
    free(pretokenizer);
}

/* ---- splitting ---- */

/* Pieces go depth first through the stages: a piece of stage 0 is split to the end before the next one is looked for.
 * So memory does not grow with the text, and a sink that has enough stops the whole walk. */
struct walk {
    const x3_pretokenizer *pretokenizer;
    x3_pretokenizer_scratch *scratch;
    x3_piece_sink sink;
    void *context;
    x3_err *err;
    bool stop;
};

/* One stage over one text, and the piece that the next one may still be merged into. */
struct splitter {
    struct walk *walk;
    size_t stage;
    const char *text;
    bool has_pending, previous_matched;
    size_t pending_start, pending_end;
};

static x3_status run_stage(struct walk *walk, size_t stage, const char *text, size_t n_bytes);

static x3_status emit(struct splitter *s, size_t start, size_t end)
{
    if (start == end || s->walk->stop)
        return X3_OK;
    return run_stage(s->walk, s->stage + 1, s->text + start, end - start);
}

static x3_status emit_pending(struct splitter *s)
{
    bool had = s->has_pending;

    s->has_pending = false;
    return had ? emit(s, s->pending_start, s->pending_end) : X3_OK;
}

static bool merges(const struct splitter *s, enum behavior behavior, bool matched)
{
    switch (behavior) {
    case CONTIGUOUS: return matched == s->previous_matched;
    case MERGED_WITH_PREVIOUS: return matched && !s->previous_matched;
    case MERGED_WITH_NEXT: return !matched && s->previous_matched;
    case REMOVED:
    case ISOLATED: break;
    }
    return false;
}

/* A stretch of the text: a match of the stage's pattern, or what lies between two matches. */
static x3_status add(struct splitter *s, size_t start, size_t end, bool matched)
{
    const struct stage *stage = &s->walk->pretokenizer->stages[s->stage];
    x3_status rc = X3_OK;

    matched = matched != stage->invert;
    if (stage->behavior == REMOVED || stage->behavior == ISOLATED)
        return matched && stage->behavior == REMOVED ? X3_OK : emit(s, start, end);
    if (s->has_pending && merges(s, stage->behavior, matched)) {
        s->pending_end = end;
    } else {
        rc = emit_pending(s);
        s->has_pending = true;
        s->pending_start = start;
        s->pending_end = end;
    }
    s->previous_matched = matched;
    return rc;
}

/* Matches as onig's find_iter gives them: an empty one is passed over where the last match ended. */
static x3_status split_by_regex(struct splitter *s, const x3_regex *regex, size_t n_bytes)
{
    size_t from = 0, covered = 0, last_end = 0, start, end, length;
    bool has_last = false, found = true;
    x3_status rc = X3_OK;

    while (from <= n_bytes && !s->walk->stop) {
        X3_TRY(rc, out, x3_regex_find(regex, &s->walk->scratch->regex, s->text, n_bytes, from, &found, &start, &end,
                                      s->walk->err));
        if (!found)
            break;
        if (start == end && has_last && end == last_end) {
            length = 1;
            if (from < n_bytes)
                x3_utf8_decode(s->text + from, n_bytes - from, &length);
            from += length;
            continue;
        }
        if (start > covered)
            X3_TRY(rc, out, add(s, covered, start, false));
        X3_TRY(rc, out, add(s, start, end, true));
        covered = from = last_end = end;
        has_last = true;
    }
    if (covered < n_bytes && !s->walk->stop)
        rc = add(s, covered, n_bytes, false);
out:
    return rc;
}

static x3_status split_by_digits(struct splitter *s, size_t n_bytes)
{
    size_t covered = 0, length;
    x3_status rc = X3_OK;

    for (size_t at = 0; at < n_bytes && !s->walk->stop; at += length) {
        if (!x3_is_numeric(x3_utf8_decode(s->text + at, n_bytes - at, &length)))
            continue;
        if (covered < at)
            X3_TRY(rc, out, add(s, covered, at, false));
        X3_TRY(rc, out, add(s, at, at + length, true));
        covered = at + length;
    }
    if (covered < n_bytes && !s->walk->stop)
        rc = add(s, covered, n_bytes, false);
out:
    return rc;
}

/* Puts a space before the text, in scratch. ByteLevel is the last stage, so nothing else uses the buffer meanwhile. */
static x3_status prefix_space(struct walk *walk, const char **text, size_t *n_bytes)
{
    x3_text *prefixed = &walk->scratch->prefixed;
    x3_status rc;

    prefixed->n_items = 0;
    X3_TRY(rc, out, x3_text_put(prefixed, " ", 1, walk->err));
    X3_TRY(rc, out, x3_text_put(prefixed, *text, *n_bytes, walk->err));
    *text = prefixed->items;
    *n_bytes = prefixed->n_items;
out:
    return rc;
}

static x3_status run_stage(struct walk *walk, size_t stage, const char *text, size_t n_bytes)
{
    struct splitter s = {.walk = walk, .stage = stage, .text = text};
    x3_status rc = X3_OK;

    if (stage == walk->pretokenizer->n_stages)
        return walk->sink(walk->context, text, n_bytes, &walk->stop, walk->err);
    const struct stage *what = &walk->pretokenizer->stages[stage];
    if (what->add_prefix_space && text[0] != ' ') {
        X3_TRY(rc, out, prefix_space(walk, &text, &n_bytes));
        s.text = text;
    }
    if (what->kind == DIGITS)
        X3_TRY(rc, out, split_by_digits(&s, n_bytes));
    else if (what->regex != NULL)
        X3_TRY(rc, out, split_by_regex(&s, what->regex, n_bytes));
    else
        X3_TRY(rc, out, add(&s, 0, n_bytes, false));
    rc = emit_pending(&s);
out:
    return rc;
}

x3_status x3_pretokenizer_run(const x3_pretokenizer *pretokenizer, x3_pretokenizer_scratch *scratch, const char *text,
                              size_t n_bytes, x3_piece_sink sink, void *context, x3_err *err)
{
    struct walk walk = {pretokenizer, scratch, sink, context, err, false};

    return n_bytes == 0 ? X3_OK : run_stage(&walk, 0, text, n_bytes);
}

void x3_pretokenizer_scratch_free(x3_pretokenizer_scratch *scratch)
{
    x3_regex_scratch_free(&scratch->regex);
    x3_text_free(&scratch->prefixed);
}
