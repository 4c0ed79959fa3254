#include "runtime/jinja/jinja_internal.h"

#include <ctype.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/tokenizer/unicode.h"

/* The rules of jinja2.lexer, by hand: what its regular expressions match, in the order in which it tries them. */

static bool starts(const x3_jlexer *l, size_t at, const char *word)
{
    size_t n = strlen(word);

    return l->n_bytes - at >= n && memcmp(l->text + at, word, n) == 0;
}

static char peek(const x3_jlexer *l, size_t at)
{
    return at < l->n_bytes ? l->text[at] : '\0';
}

static bool is_sign(char c)
{
    return c == '-' || c == '+';
}

static size_t skip_space(const x3_jlexer *l, size_t at)
{
    while (at < l->n_bytes) {
        size_t length;
        if (!x3_jtext_is_space(x3_utf8_decode(l->text + at, l->n_bytes - at, &length)))
            break;
        at += length;
    }
    return at;
}

/* Moves on to `at`, counting lines. */
static void advance(x3_jlexer *l, size_t at)
{
    for (; l->at < at; l->at++)
        l->line += l->text[l->at] == '\n';
}

x3_status x3_jlexer_open(x3_jlexer *l, x3_jcompile *c, const char *text, size_t n_bytes)
{
    char *copy;
    size_t n = 0;

    TRY(x3_jcompile_alloc(c, &copy, n_bytes + 1, 1));
    for (size_t i = 0; i < n_bytes; i++) {
        copy[n] = text[i] == '\r' ? '\n' : text[i];
        i += text[i] == '\r' && i + 1 < n_bytes && text[i + 1] == '\n';
        n++;
    }
    n -= n > 0 && copy[n - 1] == '\n'; /* keep_trailing_newline=False */
    *l = (x3_jlexer){.c = c, .text = copy, .n_bytes = n, .line = 1, .mode = 'r', .line_starting = true};
    return X3_OK;
}

/* ---- text between tags ---- */

/* Start of the first tag at or after `at`, or the end. */
static size_t find_tag(const x3_jlexer *l, size_t at)
{
    for (; at + 1 < l->n_bytes; at++)
        if (l->text[at] == '{' && (l->text[at + 1] == '{' || l->text[at + 1] == '%' || l->text[at + 1] == '#'))
            return at;
    return l->n_bytes;
}

/* End of `{% word %}` at `at` with its signs and what they take; 0 when it is something else. */
static size_t match_raw_tag(const x3_jlexer *l, size_t at, const char *word, bool is_end)
{
    if (!starts(l, at, "{%"))
        return 0;
    at += 2;
    at += is_sign(peek(l, at));
    at = skip_space(l, at);
    if (!starts(l, at, word))
        return 0;
    at = skip_space(l, at + strlen(word));
    if (starts(l, at, "-%}"))
        return skip_space(l, at + 3);
    if (is_end && starts(l, at, "+%}"))
        return at + 3;
    if (!starts(l, at, "%}"))
        return 0;
    at += 2;
    return at + (is_end && peek(l, at) == '\n'); /* trim_blocks, but not after {% raw %} */
}

/* Text up to the tag at `end`, without the white space that the tag strips. */
static x3_status take_data(x3_jlexer *l, size_t end, x3_jtoken *token, bool *made)
{
    size_t n = end - l->at, line_start;
    char sign = end < l->n_bytes ? peek(l, end + 2) : '+';
    const char *data = l->text + l->at;

    if (sign == '-') {
        while (n > 0) {
            size_t at = x3_utf8_before(data, n), length;
            if (!x3_jtext_is_space(x3_utf8_decode(data + at, n - at, &length)))
                break;
            n = at;
        }
    } else if (sign != '+' && peek(l, end + 1) != '{') {
        for (line_start = n; line_start > 0 && data[line_start - 1] != '\n'; line_start--)
            ;
        if ((line_start > 0 || l->line_starting) && skip_space(l, l->at + line_start) >= end)
            n = line_start; /* lstrip_blocks */
    }
    *made = n > 0;
    if (n > 0) {
        token->kind = X3_JT_DATA;
        TRY(x3_jcompile_str(l->c, data, n, &token->value));
    }
    advance(l, end);
    return X3_OK;
}

static x3_status skip_comment(x3_jlexer *l)
{
    size_t start = l->at + 2, at;

    start += is_sign(peek(l, start));
    if (start >= l->n_bytes) {
        advance(l, l->n_bytes);
        return X3_OK;
    }
    for (at = start; at < l->n_bytes && !starts(l, at, "#}"); at++)
        ;
    if (at >= l->n_bytes)
        return x3_jcompile_fail(l->c, l->line, "Missing end of comment tag");
    char sign = at > start ? l->text[at - 1] : '\0';
    at += 2;
    if (sign == '-')
        at = skip_space(l, at);
    else if (sign != '+' && peek(l, at) == '\n')
        at++;
    advance(l, at);
    l->line_starting = l->text[at - 1] == '\n';
    return X3_OK;
}

/* The text of a raw block, up to its end tag. */
static x3_status lex_raw(x3_jlexer *l, x3_jtoken *token, bool *made)
{
    size_t at, end = 0;

    *made = false;
    l->in_raw = false;
    if (l->at == l->n_bytes)
        return X3_OK;
    for (at = l->at; at < l->n_bytes && (end = match_raw_tag(l, at, "endraw", true)) == 0; at++)
        ;
    if (at >= l->n_bytes)
        return x3_jcompile_fail(l->c, l->line, "Missing end of raw directive");
    TRY(take_data(l, at, token, made));
    advance(l, end);
    l->line_starting = l->text[end - 1] == '\n';
    return X3_OK;
}

/* A piece of text, or the start of a tag, or nothing (a comment). */
static x3_status lex_root(x3_jlexer *l, x3_jtoken *token, bool *made)
{
    size_t tag, raw;

    if (l->in_raw)
        return lex_raw(l, token, made);
    if (!l->data_done) {
        tag = find_tag(l, l->at);
        l->data_done = tag < l->n_bytes;
        return take_data(l, tag, token, made);
    }
    l->data_done = false;
    *made = false;
    raw = match_raw_tag(l, l->at, "raw", false);
    if (raw != 0) {
        advance(l, raw);
        l->line_starting = l->text[raw - 1] == '\n';
        l->in_raw = true;
        return X3_OK;
    }
    if (l->text[l->at + 1] == '#')
        return skip_comment(l);
    l->mode = l->text[l->at + 1] == '{' ? 'v' : 'b';
    token->kind = l->mode == 'v' ? X3_JT_VARIABLE_BEGIN : X3_JT_BLOCK_BEGIN;
    *made = true;
    l->at += 2;
    l->at += is_sign(peek(l, l->at));
    l->line_starting = false;
    return X3_OK;
}

/* ---- inside tags ---- */

/* End of the closing tag at the current place, or 0. */
static size_t match_close(const x3_jlexer *l)
{
    size_t at = l->at;

    if (l->mode == 'v') {
        if (starts(l, at, "-}}"))
            return skip_space(l, at + 3);
        return starts(l, at, "}}") ? at + 2 : 0;
    }
    if (starts(l, at, "+%}"))
        return at + 3;
    if (starts(l, at, "-%}"))
        return skip_space(l, at + 3);
    if (!starts(l, at, "%}"))
        return 0;
    return at + 2 + (peek(l, at + 2) == '\n');
}

static bool is_digit_of(char c, unsigned base)
{
    unsigned v = c >= '0' && c <= '9' ? (unsigned)(c - '0')
                 : c >= 'a' && c <= 'f' ? (unsigned)(c - 'a') + 10
                 : c >= 'A' && c <= 'F' ? (unsigned)(c - 'A') + 10 : 99;

    return v < base;
}

/* End of digits with single underscores between them, `at` when there are none. `lead`: one may come first. */
static size_t match_digits(const x3_jlexer *l, size_t at, unsigned base, bool lead)
{
    size_t end = at;

    for (;;) {
        size_t digit = end + ((end > at || lead) && peek(l, end) == '_');
        if (!is_digit_of(peek(l, digit), base))
            return end;
        end = digit + 1;
    }
}

/* End of a float literal, or 0. Needs a fraction or an exponent, and no dot before it. */
static size_t match_float(const x3_jlexer *l)
{
    size_t at = match_digits(l, l->at, 10, false), fraction, exponent;
    bool has_fraction;

    if (at == l->at || (l->at > 0 && l->text[l->at - 1] == '.'))
        return 0;
    fraction = peek(l, at) == '.' ? match_digits(l, at + 1, 10, false) : at;
    has_fraction = fraction > at + 1;
    if (!has_fraction)
        fraction = at;
    if (peek(l, fraction) == 'e' || peek(l, fraction) == 'E') {
        size_t digits = fraction + 1;
        digits += is_sign(peek(l, digits));
        exponent = match_digits(l, digits, 10, false);
        if (exponent > digits)
            return exponent;
    }
    return has_fraction ? fraction : 0;
}

static size_t match_integer(const x3_jlexer *l, unsigned *base)
{
    size_t at = l->at, end;
    char kind = (char)(peek(l, at + 1) | 0x20);

    *base = 10;
    if (peek(l, at) != '0')
        return match_digits(l, at, 10, false);
    *base = kind == 'b' ? 2 : kind == 'o' ? 8 : kind == 'x' ? 16 : 10;
    end = *base == 10 ? at : match_digits(l, at + 2, *base, true);
    if (*base != 10 && end > at + 2)
        return end;
    *base = 10;
    return match_digits(l, at, 1, false); /* 0, 00, 0_0 */
}

static x3_status lex_number(x3_jlexer *l, size_t end, bool is_float, unsigned base, x3_jtoken *token)
{
    size_t from = l->at + (base != 10 ? 2 : 0), n = 0;
    char *digits;

    TRY(x3_jcompile_alloc(l->c, &digits, end - from + 1, 1));
    for (size_t i = from; i < end; i++)
        if (l->text[i] != '_')
            digits[n++] = l->text[i];
    token->kind = is_float ? X3_JT_FLOAT : X3_JT_INTEGER;
    if (is_float) {
        token->value = x3_jval_float(strtod(digits, NULL));
    } else {
        errno = 0;
        token->value = x3_jval_int(strtoll(digits, NULL, (int)base));
        if (errno == ERANGE)
            return x3_jcompile_fail(l->c, l->line, "the integer %.40s has more than 64 bits", digits);
    }
    l->at = end;
    return X3_OK;
}

/* ---- string literals ---- */

static x3_status put_cp(x3_jlexer *l, char *out, size_t *n, uint32_t cp)
{
    if (cp > 0x10FFFF)
        return x3_jcompile_fail(l->c, l->line, "illegal Unicode character");
    if (cp >= 0xD800 && cp <= 0xDFFF)
        return x3_jcompile_fail(l->c, l->line, "the surrogate \\u%04x cannot stand in a text", (unsigned)cp);
    *n += x3_utf8_encode(cp, out + *n);
    return X3_OK;
}

/* \xhh, \uhhhh, \Uhhhhhhhh: *at is behind the letter. */
static x3_status unescape_hex(x3_jlexer *l, size_t *at, size_t end, int n_digits, char *out, size_t *n)
{
    uint32_t cp = 0;

    for (int i = 0; i < n_digits; i++, (*at)++) {
        if (*at == end || !isxdigit((unsigned char)l->text[*at]))
            return x3_jcompile_fail(l->c, l->line, "truncated \\%s escape",
                                    n_digits == 2 ? "xXX" : n_digits == 4 ? "uXXXX" : "UXXXXXXXX");
        char digit[2] = {l->text[*at], 0};
        cp = cp << 4 | (uint32_t)strtoul(digit, NULL, 16);
    }
    return put_cp(l, out, n, cp);
}

static x3_status unescape_octal(x3_jlexer *l, size_t *at, size_t end, char *out, size_t *n)
{
    uint32_t cp = 0;

    for (int i = 0; i < 3 && *at < end && l->text[*at] >= '0' && l->text[*at] <= '7'; i++, (*at)++)
        cp = cp << 3 | (uint32_t)(l->text[*at] - '0');
    return put_cp(l, out, n, cp);
}

/* One escape; *at is at the character after the backslash. */
static x3_status unescape(x3_jlexer *l, size_t *at, size_t end, char *out, size_t *n)
{
    static const char from[] = "\\'\"abfnrtv", to[] = "\\'\"\a\b\f\n\r\t\v";
    char c = l->text[*at];
    const char *simple = memchr(from, c, sizeof from - 1);

    if (simple != NULL) {
        out[(*n)++] = to[simple - from];
        (*at)++;
    } else if (c == '\n') {
        (*at)++;
    } else if (c >= '0' && c <= '7') {
        return unescape_octal(l, at, end, out, n);
    } else if (c == 'x' || c == 'u' || c == 'U') {
        (*at)++;
        return unescape_hex(l, at, end, c == 'x' ? 2 : c == 'u' ? 4 : 8, out, n);
    } else if (c == 'N') {
        return x3_jcompile_refuse(l->c, l->line, "character names (\\N{...}) are not supported");
    } else if ((unsigned char)c >= 0x80) {
        /* jinja2 turns the character into \xhh first, whose backslash the one before it then quotes */
        size_t length;
        uint32_t cp = x3_utf8_decode(l->text + *at, end - *at, &length);
        *n += (size_t)sprintf(out + *n, cp < 0x100 ? "\\x%02x" : cp < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)cp);
        *at += length;
    } else {
        out[(*n)++] = '\\';
    }
    return X3_OK;
}

static x3_status lex_string(x3_jlexer *l, x3_jtoken *token)
{
    size_t start = l->at + 1, end = start, n = 0;
    char quote = l->text[l->at], *out;

    while (end < l->n_bytes && l->text[end] != quote)
        end += l->text[end] == '\\' ? 2 : 1;
    if (end >= l->n_bytes)
        return x3_jcompile_fail(l->c, l->line, "unexpected char %s at %zu: the string has no end",
                                quote == '"' ? "'\"'" : "\"'\"", l->at);
    /* an escape of two bytes may become ten: \ and a character of 4 bytes */
    TRY(x3_jcompile_alloc(l->c, &out, 3 * (end - start) + 16, 1));
    for (size_t at = start; at < end;) {
        if (l->text[at] == '\\') {
            at++;
            TRY(unescape(l, &at, end, out, &n));
        } else {
            out[n++] = l->text[at++];
        }
    }
    token->kind = X3_JT_STRING;
    TRY(x3_jcompile_str(l->c, out, n, &token->value));
    advance(l, end + 1);
    return X3_OK;
}

/* ---- names, operators, the tag ---- */

static x3_status lex_name(x3_jlexer *l, x3_jtoken *token, bool *made)
{
    size_t at = l->at, length;

    while (at < l->n_bytes &&
           x3_jtext_is_name(x3_utf8_decode(l->text + at, l->n_bytes - at, &length), at == l->at))
        at += length;
    *made = at > l->at;
    if (!*made)
        return X3_OK;
    token->kind = X3_JT_NAME;
    TRY(x3_jcompile_name(l->c, l->text + l->at, at - l->at, &token->name));
    l->at = at;
    return X3_OK;
}

static x3_status lex_operator(x3_jlexer *l, x3_jtoken *token)
{
    static const char *const doubles[] = {"//", "**", "==", "!=", ">=", "<="};
    char c = l->text[l->at];

    token->kind = X3_JT_OPERATOR;
    for (size_t i = 0; i < sizeof doubles / sizeof doubles[0]; i++)
        if (starts(l, l->at, doubles[i])) {
            token->op = X3_JOP2(doubles[i][0], doubles[i][1]);
            l->at += 2;
            return X3_OK;
        }
    if (c == '\0' || strchr("+-/*%~[](){}><=.:|,;", c) == NULL)
        return x3_jcompile_fail(l->c, l->line, "unexpected char %s%c%s at %zu", c > ' ' ? "'" : "(code) ",
                                c > ' ' ? c : '?', c > ' ' ? "'" : "", l->at);
    if (strchr("([{", c) != NULL) {
        if (l->n_brackets == X3_JNEST_MAX)
            return x3_jcompile_fail(l->c, l->line, "more than %d brackets inside one another", X3_JNEST_MAX);
        l->brackets[l->n_brackets++] = c == '(' ? ')' : (char)(c + 2);
    } else if (strchr(")]}", c) != NULL) {
        if (l->n_brackets == 0)
            return x3_jcompile_fail(l->c, l->line, "unexpected '%c'", c);
        if (l->brackets[--l->n_brackets] != c)
            return x3_jcompile_fail(l->c, l->line, "unexpected '%c', expected '%c'", c, l->brackets[l->n_brackets]);
    }
    token->op = (unsigned char)c;
    l->at++;
    return X3_OK;
}

static x3_status lex_tag(x3_jlexer *l, x3_jtoken *token)
{
    size_t end = l->n_brackets == 0 ? match_close(l) : 0;
    unsigned base = 10;
    bool made;

    if (end != 0) {
        token->kind = l->mode == 'v' ? X3_JT_VARIABLE_END : X3_JT_BLOCK_END;
        advance(l, end);
        l->line_starting = l->text[end - 1] == '\n';
        l->mode = 'r';
        return X3_OK;
    }
    if ((end = match_float(l)) != 0)
        return lex_number(l, end, true, 10, token);
    if ((end = match_integer(l, &base)) != l->at)
        return lex_number(l, end, false, base, token);
    TRY(lex_name(l, token, &made));
    if (made)
        return X3_OK;
    if (l->text[l->at] == '"' || l->text[l->at] == '\'')
        return lex_string(l, token);
    return lex_operator(l, token);
}

x3_status x3_jlexer_next(x3_jlexer *l, x3_jtoken *token)
{
    bool made = false;

    while (l->mode == 'r' && l->at < l->n_bytes) {
        *token = (x3_jtoken){.line = l->line};
        TRY(lex_root(l, token, &made));
        if (made)
            return X3_OK;
    }
    *token = (x3_jtoken){.line = l->line};
    if (l->mode == 'r')
        return X3_OK;
    if (l->n_brackets > 0 || match_close(l) == 0)
        advance(l, skip_space(l, l->at));
    *token = (x3_jtoken){.line = l->line};
    return l->at < l->n_bytes ? lex_tag(l, token) : X3_OK;
}

/* ---- the stream of tokens that the parser reads, and its nodes ---- */

x3_status x3_jtok_next(x3_jparser *p)
{
    if (p->has_ahead) {
        p->token = p->ahead;
        p->has_ahead = false;
        return X3_OK;
    }
    return x3_jlexer_next(&p->lexer, &p->token);
}

x3_status x3_jtok_look(x3_jparser *p)
{
    if (p->has_ahead)
        return X3_OK;
    p->has_ahead = true;
    return x3_jlexer_next(&p->lexer, &p->ahead);
}

bool x3_jtok_is_op(const x3_jparser *p, uint32_t op)
{
    return p->token.kind == X3_JT_OPERATOR && p->token.op == op;
}

bool x3_jtok_is_name(const x3_jparser *p, const char *name)
{
    return p->token.kind == X3_JT_NAME && x3_jstr_is(&p->token.name->text, name);
}

/* Words of a space-separated list. */
bool x3_jtok_is_one_of(const x3_jparser *p, const char *words)
{
    const x3_jstr *s = p->token.kind == X3_JT_NAME ? &p->token.name->text : NULL;

    for (const char *w = words; s != NULL && *w != '\0'; w += strspn(w, " ")) {
        size_t n = strcspn(w, " ");
        if (n == s->n_bytes && memcmp(w, s->data, n) == 0)
            return true;
        w += n;
    }
    return false;
}

const char *x3_jtok_describe(const x3_jparser *p, char room[80])
{
    static const char *const names[] = {"end of template", "template data / text", "begin of print statement",
                                        "end of print statement", "begin of statement block",
                                        "end of statement block", "name", "string", "integer", "float"};

    if (p->token.kind == X3_JT_NAME)
        snprintf(room, 80, "%.60s", p->token.name->text.data);
    else if (p->token.kind == X3_JT_OPERATOR)
        snprintf(room, 80, "%c%.1s", (char)(p->token.op & 0xFF), (const char[2]){(char)(p->token.op >> 8), 0});
    else
        snprintf(room, 80, "%s", names[p->token.kind]);
    return room;
}

x3_status x3_jtok_fail(x3_jparser *p, const char *wanted)
{
    char room[80];

    if (p->token.kind == X3_JT_END)
        return x3_jcompile_fail(p->c, p->token.line, "unexpected end of template, expected '%s'", wanted);
    return x3_jcompile_fail(p->c, p->token.line, "expected token '%s', got '%s'", wanted, x3_jtok_describe(p, room));
}

x3_status x3_jtok_expect_op(x3_jparser *p, char op)
{
    char wanted[2] = {op, 0};

    return x3_jtok_is_op(p, (unsigned char)op) ? x3_jtok_next(p) : x3_jtok_fail(p, wanted);
}

x3_status x3_jtok_expect(x3_jparser *p, x3_jtoken_kind kind, const char *wanted)
{
    return p->token.kind == kind ? x3_jtok_next(p) : x3_jtok_fail(p, wanted);
}

x3_status x3_jtok_expect_name(x3_jparser *p, x3_jname **out)
{
    *out = p->token.name;
    return x3_jtok_expect(p, X3_JT_NAME, "name");
}

x3_status x3_jtok_skip_name(x3_jparser *p, const char *name, bool *skipped)
{
    *skipped = x3_jtok_is_name(p, name);
    return *skipped ? x3_jtok_next(p) : X3_OK;
}

x3_status x3_jtok_skip_op(x3_jparser *p, uint32_t op, bool *skipped)
{
    *skipped = x3_jtok_is_op(p, op);
    return *skipped ? x3_jtok_next(p) : X3_OK;
}

x3_status x3_jparser_enter(x3_jparser *p)
{
    if (++p->depth > X3_JNEST_MAX)
        return x3_jcompile_fail(p->c, p->token.line, "more than %d levels inside one another", X3_JNEST_MAX);
    return X3_OK;
}

void x3_jchain_put(x3_jchain *list, x3_jnode *node)
{
    if (list->end == NULL)
        list->end = &list->first;
    *list->end = node;
    list->end = &node->next;
    list->n++;
}

x3_status x3_jnode_new(x3_jparser *p, x3_jkind kind, uint32_t line, x3_jnode **out)
{
    TRY(x3_jcompile_alloc(p->c, out, 1, sizeof **out));
    (*out)->kind = kind;
    (*out)->line = line;
    return X3_OK;
}
