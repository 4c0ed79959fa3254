#include "runtime/tokenizer/oniguruma.h"

#include <ctype.h>
#include <stdio.h>
#include <string.h>

#define DEPTH_MAX 100   /* groups and classes inside one another */
#define REPEAT_MAX 65535 /* PCRE2's bound */

/* Insides of classes. White_Space: PCRE2's \s also takes U+180E. Word characters: as measured on Oniguruma, which
 * outside a class takes its table of ISO 8859-1 for the first 256 code points, hence the superscripts and fractions. */
#define SPACES \
    "\\x{9}-\\x{D}\\x{20}\\x{85}\\x{A0}\\x{1680}\\x{2000}-\\x{200A}\\x{2028}\\x{2029}\\x{202F}\\x{205F}\\x{3000}"
#define CLASS_WORDS "\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}"
#define WORDS CLASS_WORDS "\\x{B2}\\x{B3}\\x{B9}\\x{BC}-\\x{BE}"
#define HEX_DIGITS "0-9a-fA-F"

struct translator {
    const char *pattern;
    size_t n, at;
    x3_text *out;
    const char *where;
    x3_err *err;
    x3_status rc; /* the first failure; every function is a no-op after it */
    unsigned depth;
    bool caseless;
    int previous_letter; /* lower case, of a literal just written in a caseless group; else 0 */
};

static void bad(struct translator *t, x3_status status, const char *what)
{
    if (t->rc == X3_OK)
        t->rc = x3_fail(t->err, status, "%s: pattern \"%.*s\": %s, at byte %zu", t->where,
                       (int)x3_min_size(t->n, 300), t->pattern, what, t->at);
}

/* For what holds characters that Oniguruma folds to several (ß to "ss") where case is ignored. PCRE2 does not. */
static void refuse_caseless(struct translator *t, const char *what)
{
    if (t->caseless)
        bad(t, X3_ERR_UNSUPPORTED, what);
}

static void put_bytes(struct translator *t, x3_text *out, const char *data, size_t n)
{
    if (t->rc == X3_OK)
        t->rc = x3_text_put(out, data, n, t->err);
}

static void put(struct translator *t, x3_text *out, const char *text)
{
    put_bytes(t, out, text, strlen(text));
}

static void put_code_point(struct translator *t, x3_text *out, uint32_t cp)
{
    char text[16];

    snprintf(text, sizeof text, "\\x{%X}", (unsigned)cp);
    put(t, out, text);
}

/* The byte `ahead` of the current one, or -1 past the end. */
static int peek(const struct translator *t, size_t ahead)
{
    return t->n - t->at > ahead ? (unsigned char)t->pattern[t->at + ahead] : -1;
}

/* Never past the end: after a failure the parser runs on for a few steps, and may be there already. */
static void skip(struct translator *t, size_t n_bytes)
{
    t->at += x3_min_size(n_bytes, t->n - t->at);
}

static bool accept(struct translator *t, const char *text)
{
    size_t n = strlen(text);

    if (t->n - t->at < n || memcmp(t->pattern + t->at, text, n) != 0)
        return false;
    skip(t, n);
    return true;
}

/* ---- escapes ---- */

static const struct {
    const char *name, *pcre;
} long_names[] = {
    {"letter", "L"}, {"mark", "M"}, {"number", "N"}, {"punctuation", "P"}, {"symbol", "S"}, {"separator", "Z"},
    {"uppercaseletter", "Lu"}, {"lowercaseletter", "Ll"}, {"titlecaseletter", "Lt"}, {"modifierletter", "Lm"},
    {"otherletter", "Lo"}, {"nonspacingmark", "Mn"}, {"decimalnumber", "Nd"}, {"any", "Any"},
    {"alphabetic", "Alphabetic"}, {"joincontrol", "Join_Control"},
};

/* PCRE2's name of a property: general categories as they are, anything else as a script. `name` is lower case. */
static void property_name(const char *name, char out[80])
{
    static const char categories[] = " c cc cf cn co cs l ll lm lo lt lu m mc me mn n nd nl no p pc pd pe pf pi po ps "
                                     "s sc sk sm so z zl zp zs ";
    char padded[72];

    for (size_t i = 0; i < sizeof long_names / sizeof long_names[0]; i++)
        if (strcmp(name, long_names[i].name) == 0) {
            snprintf(out, 80, "%s", long_names[i].pcre);
            return;
        }
    snprintf(padded, sizeof padded, " %s ", name);
    if (strlen(name) <= 2 && strstr(categories, padded) != NULL)
        snprintf(out, 80, "%c%s", toupper((unsigned char)name[0]), name + 1);
    else
        snprintf(out, 80, "sc:%s", name); /* plain \p{Han} is Script_Extensions to PCRE2, Script to Oniguruma */
}

/* After \p or \P. */
static void property(struct translator *t, x3_text *out, bool negative)
{
    char name[64], text[80];
    size_t n = 0;

    if (accept(t, "{")) {
        if (accept(t, "^"))
            negative = !negative;
        while (peek(t, 0) != '}') {
            int c = peek(t, 0);
            if (c < 0 || c >= 0x80 || n + 1 == sizeof name || !(isalnum(c) || strchr(" -_", c) != NULL)) {
                bad(t, X3_ERR_INPUT, "a property name is malformed");
                return;
            }
            if (isalnum(c))
                name[n++] = (char)tolower(c);
            skip(t, 1);
        }
        skip(t, 1);
    } else if (peek(t, 0) > 0 && isalpha(peek(t, 0))) {
        name[n++] = (char)tolower(peek(t, 0));
        skip(t, 1);
    }
    name[n] = '\0';
    if (n == 0) {
        bad(t, X3_ERR_INPUT, "a property has no name");
        return;
    }
    property_name(name, text);
    refuse_caseless(t, "a property inside (?i:...)");
    put(t, out, negative ? "\\P{" : "\\p{");
    put(t, out, text);
    put(t, out, "}");
}

static uint32_t hex_number(struct translator *t, size_t n_min, size_t n_max)
{
    uint32_t value = 0;
    size_t n = 0;

    for (; n < n_max && peek(t, 0) >= 0 && isxdigit(peek(t, 0)); n++, skip(t, 1)) {
        int c = tolower(peek(t, 0));
        value = value * 16 + (uint32_t)(c <= '9' ? c - '0' : c - 'a' + 10);
    }
    if (n < n_min || value > 0x10FFFF || (value >= 0xD800 && value < 0xE000))
        bad(t, X3_ERR_INPUT, "a code point is malformed");
    return value;
}

/* After \x or \u. */
static uint32_t escaped_code_point(struct translator *t, int letter)
{
    uint32_t cp;

    if (letter == 'u')
        return hex_number(t, 4, 4);
    if (accept(t, "{")) {
        cp = hex_number(t, 1, 8);
        if (!accept(t, "}"))
            bad(t, X3_ERR_UNSUPPORTED, "a sequence of code points in \\x{...}");
        return cp;
    }
    cp = hex_number(t, 1, 2);
    if (cp >= 0x80)
        bad(t, X3_ERR_UNSUPPORTED, "\\xHH above 7F, which is a byte and no character");
    return cp;
}

/* After a backslash: true when the escape is one character, which is consumed into *cp. */
static bool escaped_literal(struct translator *t, uint32_t *cp)
{
    static const char letters[] = "tvnrfae", values[] = "\t\v\n\r\f\a\x1B";
    int c = peek(t, 0);
    const char *known;
    size_t length;

    if (c < 0) {
        bad(t, X3_ERR_INPUT, "it ends in a backslash");
        return false;
    }
    if (c < 0x80 && !isalnum(c)) {
        *cp = (uint32_t)c;
        skip(t, 1);
        return true;
    }
    if (c >= 0x80) {
        *cp = x3_utf8_decode(t->pattern + t->at, t->n - t->at, &length);
        skip(t, length);
        return true;
    }
    if (c == 'x' || c == 'u') {
        skip(t, 1);
        *cp = escaped_code_point(t, c);
        return true;
    }
    known = strchr(letters, c);
    if (known == NULL)
        return false;
    *cp = (unsigned char)values[known - letters];
    skip(t, 1);
    return true;
}

/* ---- classes ---- */

struct set {
    x3_text plain;  /* inside of a PCRE2 class */
    x3_text nested; /* further sets as alternatives, with | between */
};

static void class_body(struct translator *t, x3_text *out);

static void add_nested(struct translator *t, struct set *s, const char *expression)
{
    if (s->nested.n_items > 0)
        put(t, &s->nested, "|");
    put(t, &s->nested, expression);
}

static void posix_bracket(struct translator *t, struct set *s)
{
    if (accept(t, "[:space:]"))
        put(t, &s->plain, SPACES);
    else if (accept(t, "[:digit:]"))
        put(t, &s->plain, "\\p{Nd}");
    else
        bad(t, X3_ERR_UNSUPPORTED, "this POSIX bracket");
}

/* After a backslash, a set such as \s. */
static void class_escape(struct translator *t, struct set *s)
{
    int c = peek(t, 0);

    skip(t, 1);
    if (c != 's' && c != 'd' && c != 'h')
        refuse_caseless(t, "this set inside (?i:[...])");
    switch (c) {
    case 's': put(t, &s->plain, SPACES); break;
    case 'S': put(t, &s->plain, "\\S\\x{180E}"); break;
    case 'd': put(t, &s->plain, "\\p{Nd}"); break;
    case 'D': put(t, &s->plain, "\\P{Nd}"); break;
    case 'w': put(t, &s->plain, CLASS_WORDS); break;
    case 'W': add_nested(t, s, "[^" CLASS_WORDS "]"); break;
    case 'h': put(t, &s->plain, HEX_DIGITS); break;
    case 'H': add_nested(t, s, "[^" HEX_DIGITS "]"); break;
    case 'p':
    case 'P': property(t, &s->plain, c == 'P'); break;
    default: bad(t, X3_ERR_UNSUPPORTED, "this escape in a class"); break;
    }
}

/* One character of a class into *cp; false after a set, which is then added. */
static bool class_literal(struct translator *t, struct set *s, uint32_t *cp)
{
    size_t length;

    if (!accept(t, "\\")) {
        *cp = x3_utf8_decode(t->pattern + t->at, t->n - t->at, &length);
        skip(t, length);
        return true;
    }
    if (accept(t, "b")) {
        *cp = '\b';
        return true;
    }
    if (escaped_literal(t, cp))
        return true;
    if (t->rc == X3_OK)
        class_escape(t, s);
    return false;
}

static void class_item(struct translator *t, struct set *s)
{
    uint32_t low, high;

    if (!class_literal(t, s, &low))
        return;
    if (low >= 0x80)
        refuse_caseless(t, "a character beyond ASCII inside (?i:[...])");
    put_code_point(t, &s->plain, low);
    /* A minus before the end, before an intersection or before another set is a plain character. */
    if (peek(t, 0) != '-' || peek(t, 1) == ']' || peek(t, 1) < 0 || peek(t, 1) == '[' ||
        (peek(t, 1) == '&' && peek(t, 2) == '&'))
        return;
    skip(t, 1);
    if (!class_literal(t, s, &high)) {
        bad(t, X3_ERR_UNSUPPORTED, "a range that ends in a set");
        return;
    }
    if (high >= 0x80)
        refuse_caseless(t, "a character beyond ASCII inside (?i:[...])");
    if (high < low)
        bad(t, X3_ERR_INPUT, "a range is empty");
    put(t, &s->plain, "-");
    put_code_point(t, &s->plain, high);
}

/* The set as an expression that matches one character; `negated` only for plain ones. */
static void put_set(struct translator *t, x3_text *out, const struct set *s, bool negated)
{
    bool both = s->plain.n_items > 0 && s->nested.n_items > 0;

    if (s->plain.n_items + s->nested.n_items == 0) {
        bad(t, X3_ERR_INPUT, "a class or one side of && is empty");
        return;
    }
    put(t, out, s->nested.n_items > 0 ? "(?:" : "");
    if (s->plain.n_items > 0) {
        put(t, out, negated ? "[^" : "[");
        put_bytes(t, out, s->plain.items, s->plain.n_items);
        put(t, out, both ? "]|" : "]");
    }
    put_bytes(t, out, s->nested.items, s->nested.n_items);
    put(t, out, s->nested.n_items > 0 ? ")" : "");
}

static void nested_class(struct translator *t, struct set *s)
{
    skip(t, 1);
    if (s->nested.n_items > 0)
        put(t, &s->nested, "|");
    class_body(t, &s->nested);
}

/* After '['. All sides of && but the last become look-aheads, which is exact because a set matches one character. */
static void class_body(struct translator *t, x3_text *out)
{
    bool negated = accept(t, "^"), first = true;
    struct set s = {{0}, {0}};
    x3_text ahead = {0};

    if (negated)
        refuse_caseless(t, "a negated class inside (?i:...)");
    if (++t->depth > DEPTH_MAX)
        bad(t, X3_ERR_UNSUPPORTED, "classes are nested too deeply");
    while (t->rc == X3_OK && (first || peek(t, 0) != ']')) {
        if (peek(t, 0) < 0) {
            bad(t, X3_ERR_INPUT, "a class is not closed");
        } else if (accept(t, "&&")) {
            refuse_caseless(t, "an intersection inside (?i:...)"); /* there, folding comes after intersecting */
            put(t, &ahead, "(?=");
            put_set(t, &ahead, &s, false);
            put(t, &ahead, ")");
            s.plain.n_items = s.nested.n_items = 0;
        } else if (peek(t, 0) == '[' && peek(t, 1) == ':') {
            posix_bracket(t, &s);
        } else if (peek(t, 0) == '[') {
            nested_class(t, &s);
        } else {
            class_item(t, &s);
        }
        first = false;
    }
    skip(t, 1);
    if (ahead.n_items + (negated ? s.nested.n_items : 0) == 0) {
        put_set(t, out, &s, negated);
    } else {
        put(t, out, negated ? "(?:(?!" : "(?:");
        put_bytes(t, out, ahead.items, ahead.n_items);
        put_set(t, out, &s, false);
        put(t, out, negated ? ")(?s:.))" : ")");
    }
    x3_text_free(&s.plain);
    x3_text_free(&s.nested);
    x3_text_free(&ahead);
    t->depth--;
}

/* ---- outside classes ---- */

static void alternatives(struct translator *t);

/* A caseless literal that one character folds to, such as "ss", or that may fold to several. */
static void check_folding(struct translator *t, uint32_t cp)
{
    static const char pairs[] = "ss ff fi fl st";
    int letter = cp < 0x80 ? tolower((int)cp) : 0;
    char pair[3] = {(char)t->previous_letter, (char)letter, '\0'};

    if (cp >= 0x80 || (t->previous_letter != 0 && letter != 0 && strstr(pairs, pair) != NULL))
        refuse_caseless(t, "a literal inside (?i:...) whose case folds to or from several characters");
    t->previous_letter = letter;
}

static void literal(struct translator *t, uint32_t cp)
{
    check_folding(t, cp);
    put_code_point(t, t->out, cp);
}

/* After a backslash. True when the element may be repeated. */
static bool escape(struct translator *t)
{
    uint32_t cp;
    int c;

    if (escaped_literal(t, &cp)) {
        literal(t, cp);
        return true;
    }
    if (t->rc != X3_OK)
        return false;
    t->previous_letter = 0;
    c = peek(t, 0);
    skip(t, 1);
    switch (c) {
    case 's': put(t, t->out, "[" SPACES "]"); return true;
    case 'S': put(t, t->out, "[^" SPACES "]"); return true;
    case 'd': put(t, t->out, "\\p{Nd}"); return true;
    case 'D': put(t, t->out, "\\P{Nd}"); return true;
    case 'w': put(t, t->out, "[" WORDS "]"); return true;
    case 'W': put(t, t->out, "[^" WORDS "]"); return true;
    case 'h': put(t, t->out, "[" HEX_DIGITS "]"); return true;
    case 'H': put(t, t->out, "[^" HEX_DIGITS "]"); return true;
    case 'N': put(t, t->out, "[^\\x{A}]"); return true;
    case 'O': put(t, t->out, "(?s:.)"); return true;
    case 'R': put(t, t->out, "(?>\\x{D}\\x{A}|[\\x{A}-\\x{D}\\x{85}\\x{2028}\\x{2029}])"); return true;
    case 'p':
    case 'P': property(t, t->out, c == 'P'); return true;
    case 'b': put(t, t->out, "(?:(?<=[" WORDS "])(?![" WORDS "])|(?<![" WORDS "])(?=[" WORDS "]))"); return false;
    case 'B': put(t, t->out, "(?:(?<=[" WORDS "])(?=[" WORDS "])|(?<![" WORDS "])(?![" WORDS "]))"); return false;
    case 'A': put(t, t->out, "\\A"); return false;
    case 'Z': put(t, t->out, "\\Z"); return false;
    case 'z': put(t, t->out, "\\z"); return false;
    case 'G': put(t, t->out, "\\G"); return false;
    default: bad(t, X3_ERR_UNSUPPORTED, "this escape"); return false;
    }
}

static void close_group(struct translator *t)
{
    if (!accept(t, ")"))
        bad(t, X3_ERR_INPUT, "a group is not closed");
    put(t, t->out, ")");
}

/* After "(?" and before option letters. An isolated (?i) is, in Oniguruma, a group up to the end of the one around. */
static void option_group(struct translator *t)
{
    bool on = true, caseless = t->caseless, isolated;

    put(t, t->out, "(?");
    for (; peek(t, 0) != ':' && peek(t, 0) != ')' && t->rc == X3_OK; skip(t, 1)) {
        switch (peek(t, 0)) {
        case 'i':
            t->caseless = on;
            put(t, t->out, "i");
            break;
        case 'm': put(t, t->out, "s"); break; /* the dot takes newlines, too */
        case '-':
            if (!on)
                bad(t, X3_ERR_INPUT, "options are malformed");
            on = false;
            put(t, t->out, "-");
            break;
        default: bad(t, X3_ERR_UNSUPPORTED, "this kind of group"); break;
        }
    }
    isolated = peek(t, 0) == ')';
    skip(t, 1);
    put(t, t->out, ":");
    alternatives(t);
    if (isolated)
        put(t, t->out, ")");
    else
        close_group(t);
    t->caseless = caseless;
}

/* After "(?<": a name. Nothing refers to it, so it is dropped. */
static void skip_name(struct translator *t)
{
    while (peek(t, 0) >= 0 && peek(t, 0) != '>' && peek(t, 0) != ')')
        skip(t, 1);
    if (!accept(t, ">"))
        bad(t, X3_ERR_INPUT, "the name of a group is not closed");
}

/* After '('. True when the group may be repeated. */
static bool group(struct translator *t)
{
    static const char *const openings[] = {"?:", "?>", "?=", "?!", "?<=", "?<!"};

    t->previous_letter = 0;
    if (accept(t, "?#")) {
        while (peek(t, 0) >= 0 && peek(t, 0) != ')')
            skip(t, peek(t, 0) == '\\' ? 2 : 1);
        if (!accept(t, ")"))
            bad(t, X3_ERR_INPUT, "a comment is not closed");
        return false;
    }
    if (peek(t, 0) == '*') {
        bad(t, X3_ERR_UNSUPPORTED, "a callout");
        return false;
    }
    for (size_t i = 0; i < sizeof openings / sizeof openings[0]; i++) {
        if (!accept(t, openings[i]))
            continue;
        put(t, t->out, "(");
        put(t, t->out, openings[i]);
        alternatives(t);
        close_group(t);
        return i < 2;
    }
    if (accept(t, "?<") || peek(t, 0) != '?') {
        if (t->at >= 2 && t->pattern[t->at - 1] == '<' && t->pattern[t->at - 2] == '?')
            skip_name(t);
        put(t, t->out, "(?:");
        alternatives(t);
        close_group(t);
        return true;
    }
    skip(t, 1);
    option_group(t);
    return true;
}

/* {n}, {n,}, {n,m} or {,m} at the current place, *length bytes long. Anything else is a literal brace. */
static bool interval(struct translator *t, unsigned *low, unsigned *high, bool *has_high, size_t *length)
{
    unsigned value[2] = {0, 0};
    size_t n_digits[2] = {0, 0}, i = 1, side = 0;

    for (; peek(t, i) >= 0 && peek(t, i) != '}'; i++) {
        int c = peek(t, i);
        if (c == ',' && side == 0) {
            side = 1;
        } else if (c >= '0' && c <= '9') {
            value[side] = value[side] > REPEAT_MAX ? value[side] : value[side] * 10 + (unsigned)(c - '0');
            n_digits[side]++;
        } else {
            return false;
        }
    }
    if (peek(t, i) != '}' || n_digits[0] + n_digits[1] == 0)
        return false;
    *low = value[0];
    *has_high = side == 0 || n_digits[1] > 0;
    *high = side == 0 ? value[0] : value[1];
    *length = i + 1;
    return true;
}

/* The element just written, out[start ..], becomes a group of its own, so that it can be repeated once more. */
static void wrap(struct translator *t, size_t start)
{
    put(t, t->out, "(?:)");
    if (t->rc != X3_OK)
        return;
    memmove(t->out->items + start + 3, t->out->items + start, t->out->n_items - start - 4);
    memcpy(t->out->items + start, "(?:", 3);
    t->out->items[t->out->n_items - 1] = ')';
}

enum repeatable { NOTHING, ELEMENT, REPEATED };

/* A quantifier of `length` bytes at the current place; 'interval' ones are not possessive with a plus. */
static void quantifier(struct translator *t, size_t start, enum repeatable *what)
{
    unsigned low = 0, high = 0;
    bool has_high = false, is_interval = peek(t, 0) == '{', is_fixed;
    size_t length = 1;
    char text[40];

    if (*what == NOTHING) {
        bad(t, X3_ERR_INPUT, "there is nothing to repeat");
        return;
    }
    if (*what == REPEATED)
        wrap(t, start);
    *what = REPEATED;
    t->previous_letter = 0;
    snprintf(text, sizeof text, "%c", peek(t, 0));
    if (is_interval && interval(t, &low, &high, &has_high, &length)) {
        if (low > REPEAT_MAX || high > REPEAT_MAX || (has_high && high < low)) {
            bad(t, X3_ERR_UNSUPPORTED, "these bounds of a repetition");
            return;
        }
        if (has_high)
            snprintf(text, sizeof text, "{%u,%u}", low, high);
        else
            snprintf(text, sizeof text, "{%u,}", low);
    }
    is_fixed = is_interval && memchr(t->pattern + t->at, ',', length) == NULL;
    skip(t, length);
    put(t, t->out, text);
    if (peek(t, 0) == '?' && !is_fixed)
        put(t, t->out, "?"), skip(t, 1);
    else if (peek(t, 0) == '+' && !is_interval)
        put(t, t->out, "+"), skip(t, 1);
}

static bool is_quantifier(struct translator *t)
{
    unsigned low, high;
    bool has_high;
    size_t length;
    int c = peek(t, 0);

    return c == '*' || c == '+' || c == '?' || (c == '{' && interval(t, &low, &high, &has_high, &length));
}

/* True when the element may be repeated. */
static bool element(struct translator *t)
{
    size_t length;
    uint32_t cp;

    if (accept(t, "\\"))
        return escape(t);
    if (accept(t, "("))
        return group(t);
    if (accept(t, "[")) {
        t->previous_letter = 0;
        class_body(t, t->out);
        return true;
    }
    if (peek(t, 0) == '^' || peek(t, 0) == '$' || peek(t, 0) == '.') {
        bool is_dot = peek(t, 0) == '.';
        t->previous_letter = 0;
        put_bytes(t, t->out, t->pattern + t->at, 1);
        skip(t, 1);
        return is_dot;
    }
    cp = x3_utf8_decode(t->pattern + t->at, t->n - t->at, &length);
    skip(t, length);
    literal(t, cp);
    return true;
}

/* Up to the end of the pattern or to a ')' that it leaves. */
static void alternatives(struct translator *t)
{
    enum repeatable what = NOTHING;
    size_t start = t->out->n_items;

    if (++t->depth > DEPTH_MAX)
        bad(t, X3_ERR_UNSUPPORTED, "groups are nested too deeply");
    t->previous_letter = 0;
    while (t->rc == X3_OK && t->at < t->n && peek(t, 0) != ')') {
        if (accept(t, "|")) {
            put(t, t->out, "|");
            t->previous_letter = 0;
            what = NOTHING;
        } else if (is_quantifier(t)) {
            quantifier(t, start, &what);
        } else {
            start = t->out->n_items;
            what = element(t) ? ELEMENT : NOTHING;
        }
    }
    t->previous_letter = 0;
    t->depth--;
}

x3_status x3_oniguruma_translate(x3_text *out, const char *pattern, size_t n_bytes, const char *where, x3_err *err)
{
    struct translator t = {.pattern = pattern, .n = n_bytes, .out = out, .where = where, .err = err};

    if (x3_utf8_valid(pattern, n_bytes) != n_bytes)
        return x3_fail(err, X3_ERR_INPUT, "%s: a pattern is not valid UTF-8", where);
    alternatives(&t);
    if (t.at < t.n)
        bad(&t, X3_ERR_INPUT, "a closing parenthesis has no partner");
    return t.rc;
}
