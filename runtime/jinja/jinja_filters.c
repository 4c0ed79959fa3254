#include "runtime/jinja/jinja_internal.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "runtime/tokenizer/unicode.h"

/* Filters of text and numbers. */

#define FILTER(name)                                                                                            \
    static x3_status name(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)

/* Argument i as an int, `missing` when it was not given. */
static x3_status need_int(x3_jrun *run, const x3_jval *arg, int i, int64_t missing, int64_t *out)
{
    *out = missing;
    if (arg[i].type == X3_JMISSING || x3_jval_as_int(arg[i], out))
        return X3_OK;
    return x3_jrun_fail(run, "'%s' object cannot be interpreted as an integer", x3_jval_type_name(arg[i]));
}

/* ---- numbers from text ---- */

/* The text without white space around it and without single underscores between digits; empty when these are wrong. */
static x3_status clean_number(x3_jrun *run, const x3_jstr *s, x3_jbuf *out)
{
    x3_jval v;

    TRY(x3_jtext_strip(run, s, NULL, true, true, &v));
    TRY(x3_jbuf_put(run, out, "", 0));
    for (size_t i = 0; i < v.s->n_bytes; i++) {
        bool between = i > 0 && isxdigit((unsigned char)v.s->data[i - 1]) && i + 1 < v.s->n_bytes &&
                       isxdigit((unsigned char)v.s->data[i + 1]);
        if (v.s->data[i] == '_' && between)
            continue;
        if (v.s->data[i] == '_' || v.s->data[i] == '\0') {
            out->n_bytes = 0;
            break;
        }
        TRY(x3_jbuf_put(run, out, v.s->data + i, 1));
    }
    return x3_jbuf_put(run, out, "\0", 1);
}

x3_status x3_jparse_int(x3_jrun *run, const x3_jstr *s, int base, int64_t *out, bool *ok)
{
    static const struct {
        int base;
        char letter;
    } prefixes[] = {{2, 'b'}, {8, 'o'}, {16, 'x'}};
    x3_jbuf clean = {0};
    char *at, *end;
    bool negative;

    TRY(clean_number(run, s, &clean));
    at = clean.data;
    negative = *at == '-';
    at += *at == '-' || *at == '+';
    bool leading_zeros = at[0] == '0' && strspn(at, "0") != strlen(at);
    for (int i = 0; i < 3; i++)
        if (at[0] == '0' && tolower((unsigned char)at[1]) == prefixes[i].letter && (base == 0 || base == prefixes[i].base)) {
            base = prefixes[i].base;
            at += 2;
            leading_zeros = false;
        }
    *ok = isalnum((unsigned char)*at) && !(base == 0 && leading_zeros);
    if (!*ok)
        return X3_OK;
    if (negative) /* so that the smallest one can be read */
        *--at = '-';
    errno = 0;
    *out = strtoll(at, &end, base == 0 ? 10 : base);
    *ok = *end == '\0' && end > at;
    return *ok && errno == ERANGE ? x3_jrun_fail(run, "a number of more than 64 bits") : X3_OK;
}

x3_status x3_jparse_float(x3_jrun *run, const x3_jstr *s, double *out, bool *ok)
{
    static const char *const words[] = {"inf", "infinity", "nan"};
    x3_jbuf clean = {0};
    const char *at;
    char *end;

    TRY(clean_number(run, s, &clean));
    at = clean.data + (clean.data[0] == '-' || clean.data[0] == '+');
    *ok = strspn(at, "0123456789.eE+-") == strlen(at) && (isdigit((unsigned char)at[0]) || at[0] == '.');
    for (size_t i = 0; i < 3; i++)
        *ok = *ok || strcasecmp(at, words[i]) == 0;
    if (!*ok)
        return X3_OK;
    *out = strtod(clean.data, &end);
    *ok = *end == '\0' && end > clean.data;
    return X3_OK;
}

/* ---- numbers ---- */

FILTER(filter_abs)
{
    int64_t i;

    (void)arg, (void)args;
    if (self->type == X3_JFLOAT) {
        *out = x3_jval_float(fabs(self->f));
        return X3_OK;
    }
    if (!x3_jval_as_int(*self, &i))
        return x3_jrun_fail(run, "bad operand type for abs(): '%s'", x3_jval_type_name(*self));
    if (i < 0)
        return x3_joperate_unary(run, '-', *self, out);
    *out = x3_jval_int(i);
    return X3_OK;
}

static x3_status int_of_float(x3_jrun *run, double f, x3_jval *out)
{
    if (fabs(f) >= 0x1p63)
        return x3_jrun_fail(run, "a number of more than 64 bits");
    *out = x3_jval_int((int64_t)f);
    return X3_OK;
}

FILTER(filter_int)
{
    int64_t i, base;
    bool ok;
    double f;

    (void)args;
    TRY(need_int(run, arg, 1, 10, &base));
    if (self->type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, *self);
    *out = arg[0].type == X3_JMISSING ? x3_jval_int(0) : arg[0];
    if (self->type == X3_JSTR) {
        if (base != 0 && (base < 2 || base > 36))
            return X3_OK;
        TRY(x3_jparse_int(run, self->s, (int)base, &i, &ok));
        if (ok) {
            *out = x3_jval_int(i);
            return X3_OK;
        }
        TRY(x3_jparse_float(run, self->s, &f, &ok));
        return ok && isfinite(f) ? int_of_float(run, f, out) : X3_OK;
    }
    if (self->type == X3_JFLOAT && !isnan(self->f))
        return isinf(self->f) ? x3_jrun_fail(run, "cannot convert float infinity to integer")
                              : int_of_float(run, self->f, out);
    if (x3_jval_as_int(*self, &i))
        *out = x3_jval_int(i);
    return X3_OK;
}

FILTER(filter_float)
{
    bool ok = false;
    double f = 0;

    (void)args;
    if (self->type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, *self);
    if (self->type == X3_JSTR)
        TRY(x3_jparse_float(run, self->s, &f, &ok));
    else
        ok = x3_jval_as_float(*self, &f);
    *out = ok ? x3_jval_float(f) : arg[0].type == X3_JMISSING ? x3_jval_float(0) : arg[0];
    return X3_OK;
}

/* To 10^-digits, halves to even, by the decimal digits of the number as Python does it. */
static double round_float(double f, int64_t digits)
{
    char text[800];
    double unit;

    if (!isfinite(f) || digits > 323)
        return f;
    if (digits < 0) {
        unit = pow(10, (double)-digits);
        return digits < -308 ? copysign(0.0, f) : rint(f / unit) * unit;
    }
    snprintf(text, sizeof text, "%.*f", (int)digits, f);
    return strtod(text, NULL);
}

static x3_status round_int(x3_jrun *run, int64_t i, int64_t digits, x3_jval *out)
{
    int64_t unit = 1, down, rest;

    *out = x3_jval_int(i);
    for (; digits < 0; digits++)
        if (__builtin_mul_overflow(unit, 10, &unit)) {
            *out = x3_jval_int(0);
            return X3_OK;
        }
    if (unit == 1)
        return X3_OK;
    rest = i % unit < 0 ? i % unit + unit : i % unit;
    down = i - rest;
    bool up = rest > unit - rest || (rest == unit - rest && (down / unit) % 2 != 0);
    if (up && __builtin_add_overflow(down, unit, &down))
        return x3_jrun_fail(run, "a number of more than 64 bits");
    *out = x3_jval_int(down);
    return X3_OK;
}

FILTER(filter_round)
{
    bool is_common = arg[1].type == X3_JMISSING || (arg[1].type == X3_JSTR && x3_jstr_is(arg[1].s, "common"));
    bool is_ceil = arg[1].type == X3_JSTR && x3_jstr_is(arg[1].s, "ceil");
    int64_t digits, i;
    double f, unit;

    (void)args;
    TRY(need_int(run, arg, 0, 0, &digits));
    if (!is_common && !is_ceil && !(arg[1].type == X3_JSTR && x3_jstr_is(arg[1].s, "floor")))
        return x3_jrun_fail(run, "method must be common, ceil or floor");
    if (!x3_jval_as_float(*self, &f))
        return x3_jrun_fail(run, "type %s doesn't define __round__ method", x3_jval_type_name(*self));
    if (is_common && x3_jval_as_int(*self, &i))
        return round_int(run, i, digits, out);
    unit = pow(10, (double)digits);
    if (!is_common && !isfinite(f * unit))
        return x3_jrun_fail(run, "cannot convert float %s to integer", isnan(f) ? "NaN" : "infinity");
    /* + 0: math.ceil gives an int, which has no -0 */
    *out = x3_jval_float(is_common ? round_float(f, digits)
                                   : ((is_ceil ? ceil(f * unit) : floor(f * unit)) + 0.0) / unit);
    return X3_OK;
}

/* ---- text ---- */

/* soft_str(self) through a mapping of case. */
static x3_status cased(x3_jrun *run, const x3_jval *self, char to, x3_jval *out)
{
    x3_jval s;

    TRY(x3_jprint_to_soft(run, *self, &s));
    return x3_jtext_case(run, s.s, to, out);
}

FILTER(filter_capitalize)
{
    (void)arg, (void)args;
    return cased(run, self, 'c', out);
}

FILTER(filter_lower)
{
    (void)arg, (void)args;
    return cased(run, self, 'l', out);
}

FILTER(filter_upper)
{
    (void)arg, (void)args;
    return cased(run, self, 'u', out);
}

static bool splits_title(uint32_t cp)
{
    return x3_jtext_is_space(cp) || (cp < 0x80 && cp > 0 && strchr("-({[<", (int)cp) != NULL);
}

/* Words that start behind white space or -({[<: the first letter a capital, the others small. */
FILTER(filter_title)
{
    x3_jval s, v;
    x3_jbuf buf = {0};
    size_t length, end;

    (void)arg, (void)args;
    TRY(x3_jprint_to_soft(run, *self, &s));
    for (size_t at = 0; at < s.s->n_bytes; at = end) {
        bool splits = splits_title(x3_utf8_decode(s.s->data + at, s.s->n_bytes - at, &length));
        size_t first = length;
        for (end = at + length; end < s.s->n_bytes; end += length)
            if (splits_title(x3_utf8_decode(s.s->data + end, s.s->n_bytes - end, &length)) != splits)
                break;
        for (int part = 0; part < 2; part++) {
            TRY(x3_jstr_view(run, s.s->data + at + (part == 0 ? 0 : first), part == 0 ? first : end - at - first, &v));
            TRY(x3_jtext_case(run, v.s, part == 0 ? 'u' : 'l', &v));
            TRY(x3_jbuf_put(run, &buf, v.s->data, v.s->n_bytes));
        }
    }
    return x3_jstr_of(run, &buf, out);
}

FILTER(filter_trim)
{
    const x3_jstr *chars = arg[0].type == X3_JSTR ? arg[0].s : NULL;
    x3_jval s;

    (void)args;
    if (chars == NULL && arg[0].type != X3_JMISSING && arg[0].type != X3_JNONE)
        return x3_jrun_fail(run, "strip arg must be None or str, not %s", x3_jval_type_name(arg[0]));
    TRY(x3_jprint_to_soft(run, *self, &s));
    return x3_jtext_strip(run, s.s, chars, true, true, out);
}

FILTER(filter_replace)
{
    x3_jval s, old, fresh;
    int64_t count = -1;

    (void)args;
    if (arg[2].type != X3_JNONE)
        TRY(need_int(run, arg, 2, -1, &count));
    TRY(x3_jprint_to_str(run, *self, &s));
    TRY(x3_jprint_to_str(run, arg[0], &old));
    TRY(x3_jprint_to_str(run, arg[1], &fresh));
    return x3_jtext_replace(run, s.s, old.s, fresh.s, count < 0 ? -1 : count, out);
}

FILTER(filter_center)
{
    static const x3_jstr name = {"center", 6, 6, false, NULL};
    x3_jval s, method, width = arg[0].type == X3_JMISSING ? x3_jval_int(80) : arg[0];

    (void)args;
    TRY(x3_jprint_to_soft(run, *self, &s));
    TRY(x3_jobject_attribute(run, s, &name, &method));
    return x3_jobject_call(run, method, &(x3_jargs){&width, 1, NULL}, out);
}

FILTER(filter_string)
{
    (void)arg, (void)args;
    return x3_jprint_to_soft(run, *self, out);
}

FILTER(filter_safe)
{
    (void)arg, (void)args;
    TRY(x3_jprint_to_soft(run, *self, out));
    return x3_jstr_mark(run, *out, true, out);
}

FILTER(filter_escape)
{
    (void)arg, (void)args;
    return x3_jprint_escape(run, *self, out);
}

FILTER(filter_forceescape)
{
    x3_jval s;

    (void)arg, (void)args;
    TRY(x3_jprint_to_str(run, *self, &s));
    return x3_jprint_escape(run, s, out);
}

FILTER(filter_format)
{
    x3_jlist *values;
    x3_jval s, v;

    (void)arg;
    if (args->n_items > 0 && args->keywords != NULL && args->keywords->n_items > 0)
        return x3_jrun_fail(run, "can't handle positional and keyword arguments at the same time");
    TRY(x3_jprint_to_soft(run, *self, &s));
    TRY(x3_jlist_new(run, args->n_items, &values));
    for (size_t i = 0; i < args->n_items; i++)
        TRY(x3_jlist_push(run, values, args->items[i]));
    v = x3_jval_tuple(values);
    if (args->keywords != NULL && args->keywords->n_items > 0)
        v = x3_jval_dict((x3_jdict *)(uintptr_t)args->keywords);
    return x3_jformat_percent(run, s.s, v, out);
}

FILTER(filter_indent)
{
    static const x3_jstr space = {" ", 1, 1, false, NULL};
    bool first = x3_jval_truth(arg[1]), blank = x3_jval_truth(arg[2]);
    x3_jval indent = arg[0], text, newline;
    x3_jbuf buf = {0};
    x3_jlist *lines;
    int64_t width;

    (void)args;
    if (indent.type != X3_JSTR) {
        TRY(need_int(run, arg, 0, 4, &width));
        TRY(x3_jtext_repeat(run, &space, width, &indent));
    }
    TRY(x3_jstr_literal(run, "\n", &newline));
    if (self->type != X3_JSTR) /* for the message of a wrong type */
        TRY(x3_joperate_binary(run, '+', *self, newline, &text));
    TRY(x3_jbuf_put(run, &buf, self->s->data, self->s->n_bytes));
    TRY(x3_jbuf_puts(run, &buf, "\n"));
    TRY(x3_jstr_of(run, &buf, &text));
    TRY(x3_jtext_lines(run, text.s, false, &lines));
    buf = (x3_jbuf){0};
    for (size_t i = 0; i < lines->n_items; i++) {
        const x3_jstr *line = lines->items[i].s;
        if (i > 0)
            TRY(x3_jbuf_puts(run, &buf, "\n"));
        if (i == 0 ? first : blank || line->n_bytes > 0)
            TRY(x3_jbuf_put(run, &buf, indent.s->data, indent.s->n_bytes));
        TRY(x3_jbuf_put(run, &buf, line->data, line->n_bytes));
    }
    TRY(x3_jstr_of(run, &buf, out));
    return x3_jstr_mark(run, *out, self->s->is_markup, out);
}

FILTER(filter_truncate)
{
    bool kill_words = x3_jval_truth(arg[1]);
    int64_t length, leeway = 5;
    x3_jval end = arg[2], head, result;
    x3_jlist *words;
    size_t n;

    (void)args;
    TRY(need_int(run, arg, 0, 255, &length));
    if (arg[3].type != X3_JNONE)
        TRY(need_int(run, arg, 3, 5, &leeway));
    if (end.type == X3_JMISSING)
        TRY(x3_jstr_literal(run, "...", &end));
    *out = *self;
    if (end.type == X3_JSTR && (length < (int64_t)end.s->n_chars || leeway < 0))
        return x3_jrun_fail(run, "expected length >= %zu, got %lld", end.s->n_chars, (long long)length);
    if (end.type == X3_JSTR && x3_jval_length(*self, &n) && n <= (uint64_t)length + (uint64_t)leeway)
        return X3_OK;
    if (self->type != X3_JSTR || end.type != X3_JSTR)
        return x3_jrun_fail(run, "truncate needs text, not %s", x3_jval_type_name(self->type != X3_JSTR ? *self : end));
    TRY(x3_jobject_slice(run, *self, (x3_jval){0}, x3_jval_int(length - (int64_t)end.s->n_chars), (x3_jval){0}, &head));
    if (!kill_words) {
        TRY(x3_jtext_split(run, head.s, &(x3_jstr){.data = " ", .n_bytes = 1, .n_chars = 1}, 1, true, &words));
        head = words->items[0];
    }
    TRY(x3_joperate_binary(run, '+', head, end, &result));
    *out = result;
    return X3_OK;
}

FILTER(filter_wordcount)
{
    bool in_word = false;
    int64_t n = 0;
    size_t length;
    x3_jval s;

    (void)arg, (void)args;
    TRY(x3_jprint_to_soft(run, *self, &s));
    for (size_t at = 0; at < s.s->n_bytes; at += length) {
        bool is_word = x3_jtext_is(x3_utf8_decode(s.s->data + at, s.s->n_bytes - at, &length), 'w');
        n += is_word && !in_word;
        in_word = is_word;
    }
    *out = x3_jval_int(n);
    return x3_jrun_steps(run, s.s->n_bytes / 64);
}

/* ---- markup and URLs ---- */

/* The text of &…; at `at`, whose length becomes *length; 0 when it is none. */
static uint32_t entity(const x3_jstr *s, size_t at, size_t *length)
{
    static const struct {
        const char *name;
        uint32_t cp;
    } names[] = {{"amp;", '&'}, {"lt;", '<'}, {"gt;", '>'}, {"quot;", '"'}, {"apos;", '\''}, {"nbsp;", 0xA0},
                 {"copy;", 0xA9}, {"reg;", 0xAE}, {"raquo;", 0xBB}, {"laquo;", 0xAB}, {"mdash;", 0x2014},
                 {"ndash;", 0x2013}, {"hellip;", 0x2026}, {"bull;", 0x2022}, {"middot;", 0xB7}, {"times;", 0xD7}};
    size_t left = s->n_bytes - at - 1;
    const char *p = s->data + at + 1;
    uint64_t cp = 0;

    for (size_t i = 0; i < sizeof names / sizeof names[0]; i++)
        if (left >= strlen(names[i].name) && memcmp(p, names[i].name, strlen(names[i].name)) == 0) {
            *length = 1 + strlen(names[i].name);
            return names[i].cp;
        }
    if (left < 2 || p[0] != '#')
        return 0;
    bool is_hex = p[1] == 'x' || p[1] == 'X';
    size_t digits = is_hex ? 2 : 1, end = digits;
    for (; end < left && (is_hex ? isxdigit((unsigned char)p[end]) : isdigit((unsigned char)p[end])); end++) {
        int digit = isdigit((unsigned char)p[end]) ? p[end] - '0' : tolower((unsigned char)p[end]) - 'a' + 10;
        cp = cp > 0x110000 ? cp : cp * (is_hex ? 16 : 10) + (uint64_t)digit;
    }
    if (end == digits)
        return 0;
    *length = 1 + end + (end < left && p[end] == ';');
    return cp == 0 || cp > 0x10FFFF || (cp >= 0xD800 && cp <= 0xDFFF) ? 0xFFFD : (uint32_t)cp;
}

/* What is outside of tags and comments. */
static x3_status drop_tags(x3_jrun *run, const x3_jstr *s, x3_jbuf *buf)
{
    static const x3_jstr comment_end = {"-->", 3, 3, false, NULL}, tag_end = {">", 1, 1, false, NULL};
    size_t at = 0, end;

    for (;;) {
        const char *open = memchr(s->data + at, '<', s->n_bytes - at);
        size_t start = open == NULL ? s->n_bytes : (size_t)(open - s->data);
        bool is_comment = s->n_bytes - start >= 4 && memcmp(s->data + start, "<!--", 4) == 0;
        end = x3_jtext_find(s, x3_min_size(start + (is_comment ? 4 : 0), s->n_bytes), s->n_bytes,
                            is_comment ? &comment_end : &tag_end);
        if (start == s->n_bytes || end == SIZE_MAX)
            return x3_jbuf_put(run, buf, s->data + at, s->n_bytes - at);
        TRY(x3_jrun_steps(run, 1));
        TRY(x3_jbuf_put(run, buf, s->data + at, start - at));
        at = end + (is_comment ? 3 : 1);
    }
}

FILTER(filter_striptags)
{
    x3_jval s;
    x3_jbuf buf = {0}, joined = {0};
    x3_jlist *words;

    (void)arg, (void)args;
    TRY(x3_jprint_to_str(run, *self, &s));
    TRY(drop_tags(run, s.s, &buf));
    TRY(x3_jstr_of(run, &buf, &s));
    TRY(x3_jtext_split(run, s.s, NULL, -1, false, &words));
    for (size_t i = 0; i < words->n_items; i++) {
        const x3_jstr *word = words->items[i].s;
        if (i > 0)
            TRY(x3_jbuf_puts(run, &joined, " "));
        for (size_t at = 0, length; at < word->n_bytes; at += length) {
            uint32_t cp = word->data[at] == '&' ? entity(word, at, &length) : 0;
            if (cp == 0) {
                length = 1;
                TRY(x3_jbuf_put(run, &joined, word->data + at, 1));
            } else {
                TRY(x3_jbuf_cp(run, &joined, cp));
            }
        }
    }
    return x3_jstr_of(run, &joined, out);
}

static x3_status quote_url(x3_jrun *run, x3_jval v, bool is_query, x3_jbuf *out)
{
    x3_jval s;

    TRY(x3_jprint_to_str(run, v, &s));
    for (size_t i = 0; i < s.s->n_bytes; i++) {
        unsigned char c = (unsigned char)s.s->data[i];
        char room[4] = {(char)c, 0};
        bool is_plain = c < 0x80 && (isalnum(c) || strchr("_.-~", c) != NULL) && c != 0;
        if (!is_plain && !(c == '/' && !is_query))
            snprintf(room, sizeof room, is_query && c == ' ' ? "+" : "%%%02X", c);
        TRY(x3_jbuf_puts(run, out, room));
    }
    return X3_OK;
}

FILTER(filter_urlencode)
{
    x3_jbuf buf = {0};
    x3_jiter *it;
    x3_jval item = *self;
    x3_jlist *pair;
    x3_jview view;
    bool more, first = true;

    (void)arg, (void)args;
    if (self->type == X3_JSTR || !x3_jval_is_iterable(*self)) {
        TRY(quote_url(run, *self, false, &buf));
        return x3_jstr_of(run, &buf, out);
    }
    view = (x3_jview){self->dict, 'i'};
    if (self->type == X3_JDICT)
        item = (x3_jval){.type = X3_JVIEW, .view = &view};
    TRY(x3_jiter_open(run, item, &it));
    for (;; first = false) {
        TRY(x3_jiter_next(run, it, &item, &more));
        if (!more)
            return x3_jstr_of(run, &buf, out);
        TRY(x3_jlist_of(run, item, &pair));
        if (pair->n_items != 2)
            return x3_jrun_fail(run, "not enough values to unpack (expected 2, got %zu)", pair->n_items);
        if (!first)
            TRY(x3_jbuf_puts(run, &buf, "&"));
        TRY(quote_url(run, pair->items[0], true, &buf));
        TRY(x3_jbuf_puts(run, &buf, "="));
        TRY(quote_url(run, pair->items[1], true, &buf));
    }
}

FILTER(filter_tojson)
{
    (void)args;
    return x3_jprint_json(run, arg, *self, out);
}

/* ---- any value ---- */

FILTER(filter_default)
{
    bool use = self->type == X3_JUNDEFINED || (x3_jval_truth(arg[1]) && !x3_jval_truth(*self));

    (void)args;
    *out = use ? arg[0] : *self;
    return use && arg[0].type == X3_JMISSING ? x3_jstr_literal(run, "", out) : X3_OK;
}

FILTER(filter_attr)
{
    (void)args;
    if (arg[0].type != X3_JSTR)
        return x3_jrun_fail(run, "attribute name must be string, not '%s'", x3_jval_type_name(arg[0]));
    return x3_jobject_only_attribute(run, *self, arg[0].s, out);
}

FILTER(not_supported)
{
    (void)self, (void)arg, (void)args, (void)out;
    return x3_jrun_refuse(run, "this filter of jinja2 is not supported: filesizeformat, pprint, random, urlize, wordwrap "
                          "and xmlattr are not");
}

const x3_jbuiltin x3_jfilters_text[] = {
    {"abs", filter_abs, 0, 0, NULL},
    {"attr", filter_attr, 1, 1, "name"},
    {"capitalize", filter_capitalize, 0, 0, NULL},
    {"center", filter_center, 0, 1, "width"},
    {"d", filter_default, 0, 2, "default_value boolean"},
    {"default", filter_default, 0, 2, "default_value boolean"},
    {"e", filter_escape, 0, 0, NULL},
    {"escape", filter_escape, 0, 0, NULL},
    {"filesizeformat", not_supported, 0, -1, NULL},
    {"float", filter_float, 0, 1, "default"},
    {"forceescape", filter_forceescape, 0, 0, NULL},
    {"format", filter_format, 0, -1, NULL},
    {"indent", filter_indent, 0, 3, "width first blank"},
    {"int", filter_int, 0, 2, "default base"},
    {"lower", filter_lower, 0, 0, NULL},
    {"pprint", not_supported, 0, -1, NULL},
    {"random", not_supported, 0, -1, NULL},
    {"replace", filter_replace, 2, 3, "old new count"},
    {"round", filter_round, 0, 2, "precision method"},
    {"safe", filter_safe, 0, 0, NULL},
    {"string", filter_string, 0, 0, NULL},
    {"striptags", filter_striptags, 0, 0, NULL},
    {"title", filter_title, 0, 0, NULL},
    {"tojson", filter_tojson, 0, 4, "ensure_ascii indent separators sort_keys"},
    {"trim", filter_trim, 0, 1, "chars"},
    {"truncate", filter_truncate, 0, 4, "length killwords end leeway"},
    {"upper", filter_upper, 0, 0, NULL},
    {"urlencode", filter_urlencode, 0, 0, NULL},
    {"urlize", not_supported, 0, -1, NULL},
    {"wordcount", filter_wordcount, 0, 0, NULL},
    {"wordwrap", not_supported, 0, -1, NULL},
    {"xmlattr", not_supported, 0, -1, NULL},
};

const size_t x3_jn_filters_text = sizeof x3_jfilters_text / sizeof x3_jfilters_text[0];
