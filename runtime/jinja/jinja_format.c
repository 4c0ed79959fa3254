#include "runtime/jinja/jinja_internal.h"

#include <ctype.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/tokenizer/unicode.h"

/* "%…" % values and "{…}".format(…). */

/* Where a conversion asks for its text: both kinds of formatting fill this. */
typedef struct spec {
    uint32_t fill;
    char align; /* '<' '>' '^' '=', 0: by type */
    char sign;  /* '+' ' ' or 0 */
    bool alternate;
    char group; /* ',' '_' or 0 */
    int64_t width, precision; /* precision -1: none */
    char type;
} spec;

#define WIDTH_MAX 1000000 /* of a field; Python's limit is memory */

/* ---- numbers to digits ---- */

/* Integer digits in groups, from the right. */
static x3_status put_grouped(x3_jrun *run, x3_jbuf *buf, const char *digits, size_t n, const spec *f)
{
    size_t every = f->group == '_' && f->type != 'd' && f->type != 0 && strchr("boxX", f->type) != NULL ? 4 : 3;

    for (size_t i = 0; i < n; i++) {
        if (f->group != 0 && i > 0 && (n - i) % every == 0)
            TRY(x3_jbuf_put(run, buf, &f->group, 1));
        TRY(x3_jbuf_put(run, buf, digits + i, 1));
    }
    return X3_OK;
}

/* sign, prefix and body with the padding between or around them. */
static x3_status put_padded(x3_jrun *run, x3_jbuf *buf, const char *head, const char *body, size_t n_body,
                            size_t n_chars, char align, const spec *f)
{
    int64_t used = (int64_t)(strlen(head) + n_chars), room = f->width > used ? f->width - used : 0;
    int64_t before = align == '>' ? room : align == '^' ? room / 2 : 0;
    int64_t inside = align == '=' ? room : 0, after = room - before - inside;

    TRY(x3_jrun_steps(run, (uint64_t)room));
    for (; before > 0; before--)
        TRY(x3_jbuf_cp(run, buf, f->fill));
    TRY(x3_jbuf_puts(run, buf, head));
    for (; inside > 0; inside--)
        TRY(x3_jbuf_cp(run, buf, f->fill));
    TRY(x3_jbuf_put(run, buf, body, n_body));
    for (; after > 0; after--)
        TRY(x3_jbuf_cp(run, buf, f->fill));
    return X3_OK;
}

static const char *sign_of(bool negative, const spec *f)
{
    return negative ? "-" : f->sign == '+' ? "+" : f->sign == ' ' ? " " : "";
}

static x3_status put_integer(x3_jrun *run, x3_jbuf *buf, int64_t i, const spec *f, int64_t min_digits)
{
    char digits[72], head[8], *end = digits + sizeof digits;
    uint64_t rest = i < 0 ? 0 - (uint64_t)i : (uint64_t)i;
    unsigned base = f->type == 'b' ? 2 : f->type == 'o' ? 8 : f->type == 'x' || f->type == 'X' ? 16 : 10;
    const char *alphabet = f->type == 'X' ? "0123456789ABCDEF" : "0123456789abcdef";
    x3_jbuf body = {0};
    char *at = end;

    do
        *--at = alphabet[rest % base];
    while ((rest /= base) > 0);
    for (int64_t k = end - at; k < min_digits; k++)
        TRY(x3_jbuf_puts(run, &body, "0"));
    TRY(put_grouped(run, &body, at, (size_t)(end - at), f));
    snprintf(head, sizeof head, "%s%s%.1s", sign_of(i < 0, f), f->alternate && base != 10 ? "0" : "",
             f->alternate && base != 10 ? &f->type : "");
    return put_padded(run, buf, head, body.data, body.n_bytes, body.n_bytes, f->align == 0 ? '>' : f->align, f);
}

/* The digits of |x| for a type of e f g and their capitals, or 0: repr, or g with a dot. */
static x3_status float_digits(x3_jrun *run, double x, const spec *f, x3_jbuf *out)
{
    char small[64], *text = small, format[16], *e;
    int64_t precision = f->precision;
    size_t size = sizeof small;
    char type = f->type == 'n' ? 'g' : f->type == '%' ? 'f' : f->type;

    if (!isfinite(x))
        return x3_jbuf_puts(run, out, isupper((unsigned char)type) ? (isnan(x) ? "NAN" : "INF")
                                                                   : (isnan(x) ? "nan" : "inf"));
    if (type == 0 && precision < 0) {
        x3_jprint_float(x, small);
        return x3_jbuf_puts(run, out, small);
    }
    precision = precision < 0 ? 6 : precision;
    if (type == 0) { /* g that shows at least one digit behind the dot, and turns to exponents one digit earlier */
        precision = precision == 0 ? 1 : precision;
        snprintf(small, sizeof small, "%.*e", (int)x3_min_size((size_t)precision - 1, 40), x);
        bool use_exponent = atoi(strchr(small, 'e') + 1) >= precision - 1;
        snprintf(small, sizeof small, "%.*g", (int)x3_min_size((size_t)precision, 40), x);
        if (use_exponent && strchr(small, 'e') == NULL) {
            snprintf(small, sizeof small, "%.*e", (int)x3_min_size((size_t)precision - 1, 40), x);
            e = strchr(small, 'e');
            char *last = e;
            while (strchr(small, '.') != NULL && last > small && (last[-1] == '0' || last[-1] == '.') &&
                   *last != '.')
                last--;
            memmove(last, e, strlen(e) + 1);
        } else if (strpbrk(small, ".e") == NULL) {
            strcat(small, ".0");
        }
        return x3_jbuf_puts(run, out, small);
    }
    size = (size_t)precision + 400;
    TRY(x3_jrun_alloc(run, &text, size, 1));
    snprintf(format, sizeof format, "%%%s.*%c", f->alternate ? "#" : "", type);
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    snprintf(text, size, format, (int)precision, x);
#pragma GCC diagnostic pop
    return x3_jbuf_puts(run, out, text);
}

static x3_status put_float(x3_jrun *run, x3_jbuf *buf, double x, const spec *f)
{
    bool negative = signbit(x) && !isnan(x);
    x3_jbuf digits = {0}, body = {0};
    size_t whole = 0;

    TRY(float_digits(run, fabs(f->type == '%' ? x * 100 : x), f, &digits));
    while (whole < digits.n_bytes && isdigit((unsigned char)digits.data[whole]))
        whole++;
    TRY(put_grouped(run, &body, digits.data, whole, f));
    TRY(x3_jbuf_put(run, &body, digits.data + whole, digits.n_bytes - whole));
    if (f->type == '%')
        TRY(x3_jbuf_puts(run, &body, "%"));
    return put_padded(run, buf, sign_of(negative, f), body.data, body.n_bytes, body.n_bytes,
                      f->align == 0 ? '>' : f->align, f);
}

static x3_status put_text(x3_jrun *run, x3_jbuf *buf, const x3_jstr *s, char align, const spec *f)
{
    size_t n_chars = f->precision >= 0 ? x3_min_size(s->n_chars, (size_t)f->precision) : s->n_chars;

    return put_padded(run, buf, "", s->data, x3_jtext_offset(s, n_chars), n_chars, align, f);
}

/* ---- % ---- */

typedef struct percent {
    x3_jrun *run;
    const x3_jstr *format;
    size_t at, next_arg;
    x3_jval values;
    x3_jbuf out;
} percent;

static x3_status next_value(percent *p, x3_jval *out)
{
    bool is_tuple = p->values.type == X3_JTUPLE;
    size_t n = is_tuple ? p->values.list->n_items : 1;

    if (p->next_arg >= n)
        return x3_jrun_fail(p->run, "not enough arguments for format string");
    *out = is_tuple ? p->values.list->items[p->next_arg] : p->values;
    p->next_arg++;
    return X3_OK;
}

static char peek(const percent *p)
{
    return p->at < p->format->n_bytes ? p->format->data[p->at] : '\0';
}

/* (name) */
static x3_status named_value(percent *p, x3_jval *out)
{
    size_t start = p->at + 1, depth = 1;
    x3_jval name;

    if (p->values.type != X3_JDICT)
        return x3_jrun_fail(p->run, "format requires a mapping");
    for (p->at++; p->at < p->format->n_bytes; p->at++) {
        depth += p->format->data[p->at] == '(';
        depth -= p->format->data[p->at] == ')';
        if (depth == 0)
            break;
    }
    if (p->at >= p->format->n_bytes)
        return x3_jrun_fail(p->run, "incomplete format key");
    TRY(x3_jstr_view(p->run, p->format->data + start, p->at - start, &name));
    p->at++;
    TRY(x3_jdict_get(p->run, p->values.dict, name, out));
    if (out->type == X3_JMISSING)
        return x3_jrun_fail(p->run, "KeyError: '%.*s'", (int)x3_min_size(name.s->n_bytes, 100), name.s->data);
    return X3_OK;
}

/* A width or precision: digits, or * for the next value. */
static x3_status read_size(percent *p, int64_t *out)
{
    x3_jval v;

    if (peek(p) == '*') {
        p->at++;
        TRY(next_value(p, &v));
        if (!x3_jval_as_int(v, out))
            return x3_jrun_fail(p->run, "* wants int");
    } else {
        for (*out = 0; isdigit((unsigned char)peek(p)) && *out <= WIDTH_MAX; p->at++)
            *out = *out * 10 + (peek(p) - '0');
    }
    return *out <= WIDTH_MAX && *out >= -WIDTH_MAX ? X3_OK : x3_jrun_fail(p->run, "a width of more than %d", WIDTH_MAX);
}

static x3_status read_flags(percent *p, spec *f)
{
    bool zero = false, left = false;

    *f = (spec){.fill = ' ', .precision = -1};
    for (; peek(p) != '\0' && strchr("-+ #0", peek(p)) != NULL; p->at++) {
        char c = peek(p);
        left = left || c == '-';
        zero = zero || c == '0';
        f->alternate = f->alternate || c == '#';
        if (c == '+' || (c == ' ' && f->sign == 0))
            f->sign = c;
    }
    TRY(read_size(p, &f->width));
    if (f->width < 0) {
        left = true;
        f->width = -f->width;
    }
    if (peek(p) == '.') {
        p->at++;
        TRY(read_size(p, &f->precision));
        f->precision = f->precision < 0 ? 0 : f->precision;
    }
    f->align = left ? '<' : zero ? '=' : '>';
    if (peek(p) == 'h' || peek(p) == 'l' || peek(p) == 'L')
        p->at++;
    return X3_OK;
}

static x3_status put_char(percent *p, x3_jval v, const spec *f)
{
    x3_jbuf buf = {0};
    int64_t cp;

    if (v.type == X3_JSTR && v.s->n_chars == 1)
        return put_text(p->run, &p->out, v.s, f->align, f);
    if (!x3_jval_as_int(v, &cp))
        return x3_jrun_fail(p->run, "%%c requires int or char");
    if (cp < 0 || cp > 0x10FFFF || (cp >= 0xD800 && cp <= 0xDFFF))
        return x3_jrun_fail(p->run, "%%c arg not in range(0x110000)");
    TRY(x3_jbuf_cp(p->run, &buf, (uint32_t)cp));
    TRY(x3_jstr_of(p->run, &buf, &v));
    return put_text(p->run, &p->out, v.s, f->align, f);
}

static x3_status put_number(percent *p, x3_jval v, spec *f)
{
    bool is_float = strchr("eEfFgG", f->type) != NULL, is_decimal = strchr("diu", f->type) != NULL;
    double x;
    int64_t i;

    if (f->align == '=')
        f->fill = '0';
    if (is_float) {
        if (!x3_jval_as_float(v, &x))
            return v.type == X3_JUNDEFINED ? x3_jundefined_fail(p->run, v)
                                           : x3_jrun_fail(p->run, "must be real number, not %s", x3_jval_type_name(v));
        return put_float(p->run, &p->out, x, f);
    }
    if (is_decimal && v.type == X3_JFLOAT && fabs(v.f) < 0x1p63)
        i = (int64_t)v.f;
    else if (v.type == X3_JUNDEFINED && is_decimal)
        return x3_jundefined_fail(p->run, v);
    else if (!x3_jval_as_int(v, &i))
        return x3_jrun_fail(p->run, "%%%c format: a number is required, not %s", f->type, x3_jval_type_name(v));
    return put_integer(p->run, &p->out, i, f, f->precision);
}

static x3_status put_conversion(percent *p)
{
    bool is_named = peek(p) == '(';
    x3_jval v = {0}, text;
    x3_jbuf buf = {0};
    spec f;

    if (is_named)
        TRY(named_value(p, &v));
    TRY(read_flags(p, &f));
    f.type = peek(p);
    if (p->at >= p->format->n_bytes)
        return x3_jrun_fail(p->run, "incomplete format");
    p->at++;
    if (f.type == '%')
        return x3_jbuf_puts(p->run, &p->out, "%");
    if (f.type == '\0' || strchr("diuoxXeEfFgGcrsa", f.type) == NULL)
        return x3_jrun_fail(p->run, "unsupported format character '%c' (0x%x)", isprint((unsigned char)f.type) ? f.type : '?',
                            (unsigned)(unsigned char)f.type);
    if (!is_named)
        TRY(next_value(p, &v));
    if (f.type == 's')
        TRY(x3_jprint_to_soft(p->run, v, &text));
    else if (f.type == 'r' || f.type == 'a') {
        TRY(x3_jprint_repr(p->run, &buf, v));
        TRY(x3_jstr_of(p->run, &buf, &text));
    } else {
        return f.type == 'c' ? put_char(p, v, &f) : put_number(p, v, &f);
    }
    return put_text(p->run, &p->out, text.s, f.align == '=' ? '>' : f.align, &f);
}

x3_status x3_jformat_percent(x3_jrun *run, const x3_jstr *format, x3_jval value, x3_jval *out)
{
    percent p = {.run = run, .format = format, .values = value};
    bool is_mapping = value.type == X3_JDICT || value.type == X3_JLIST || value.type == X3_JUNDEFINED ||
                      value.type == X3_JRANGE;

    if (format->is_markup)
        return x3_jrun_refuse(run, "%% on a Markup text is not supported");
    while (p.at < format->n_bytes) {
        size_t start = p.at;
        while (p.at < format->n_bytes && format->data[p.at] != '%')
            p.at++;
        TRY(x3_jbuf_put(run, &p.out, format->data + start, p.at - start));
        if (p.at == format->n_bytes)
            break;
        p.at++;
        TRY(put_conversion(&p));
    }
    if (!is_mapping && p.next_arg < (value.type == X3_JTUPLE ? value.list->n_items : 1))
        return x3_jrun_fail(run, "not all arguments converted during string formatting");
    return x3_jstr_of(run, &p.out, out);
}

/* ---- {} ---- */

typedef struct braces {
    x3_jrun *run;
    const x3_jargs *args;
    int64_t next_auto; /* -1 once a number was given */
    int depth;
} braces;

static x3_status expand(braces *b, const char *text, size_t n, x3_jbuf *out) X3_MUST;

/* [[fill]align][sign][#][0][width][,][.precision][type] */
static x3_status parse_spec(x3_jrun *run, const x3_jstr *s, spec *f)
{
    size_t at = 0, length = 0;
    uint32_t cp = s->n_bytes > 0 ? x3_utf8_decode(s->data, s->n_bytes, &length) : 0;

    *f = (spec){.fill = ' ', .precision = -1};
    bool has_fill = length > 0 && length < s->n_bytes && strchr("<>^=", s->data[length]) != NULL;
    if (has_fill) {
        f->fill = cp;
        f->align = s->data[length];
        at = length + 1;
    } else if (s->n_bytes > 0 && s->data[0] != '\0' && strchr("<>^=", s->data[0]) != NULL) {
        f->align = s->data[0];
        at = 1;
    }
#define SPEC_AT (at < s->n_bytes ? s->data[at] : '\0')
    if (SPEC_AT == '+' || SPEC_AT == '-' || SPEC_AT == ' ') {
        f->sign = SPEC_AT == '-' ? 0 : SPEC_AT;
        at++;
    }
    f->alternate = SPEC_AT == '#';
    at += f->alternate;
    if (SPEC_AT == '0') {
        f->fill = has_fill ? f->fill : '0';
        f->align = f->align == 0 ? '=' : f->align;
        at++;
    }
    for (; isdigit((unsigned char)SPEC_AT) && f->width <= WIDTH_MAX; at++)
        f->width = f->width * 10 + (SPEC_AT - '0');
    if (SPEC_AT == ',' || SPEC_AT == '_')
        f->group = s->data[at++];
    if (SPEC_AT == '.') {
        at++;
        if (!isdigit((unsigned char)SPEC_AT))
            return x3_jrun_fail(run, "Format specifier missing precision");
        for (f->precision = 0; isdigit((unsigned char)SPEC_AT) && f->precision <= WIDTH_MAX; at++)
            f->precision = f->precision * 10 + (SPEC_AT - '0');
    }
    if (f->width > WIDTH_MAX || f->precision > WIDTH_MAX)
        return x3_jrun_fail(run, "a width of more than %d", WIDTH_MAX);
    if (at < s->n_bytes)
        f->type = s->data[at++];
#undef SPEC_AT
    return at == s->n_bytes ? X3_OK : x3_jrun_fail(run, "Invalid format specifier");
}

static x3_status put_field(braces *b, x3_jval v, const x3_jstr *format, x3_jbuf *out)
{
    bool is_int, zero_padded;
    double x;
    int64_t i;
    spec f;

    if (format->n_bytes == 0)
        return x3_jprint_str(b->run, out, v);
    TRY(parse_spec(b->run, format, &f));
    zero_padded = f.align == '=' && f.fill == '0';
    if (v.type == X3_JSTR && (f.type == 0 || f.type == 's') && f.sign == 0 && f.group == 0 &&
        (f.align != '=' || zero_padded))
        return put_text(b->run, out, v.s, f.align == 0 || f.align == '=' ? '<' : f.align, &f);
    is_int = x3_jval_as_int(v, &i);
    if (is_int && f.type == 'c' && f.precision < 0 && f.sign == 0 && f.group == 0 && i >= 0 && i <= 0x10FFFF &&
        (i < 0xD800 || i > 0xDFFF)) {
        x3_jbuf c = {0};
        TRY(x3_jbuf_cp(b->run, &c, (uint32_t)i));
        TRY(x3_jstr_of(b->run, &c, &v));
        return put_text(b->run, out, v.s, f.align == 0 ? '<' : f.align, &f);
    }
    if (is_int && f.precision < 0 && (f.type == 0 || strchr("bdoxXn", f.type) != NULL) &&
        !(zero_padded && f.group != 0))
        return put_integer(b->run, out, i, &f, -1);
    if (x3_jval_as_float(v, &x) && (f.type == 0 ? !is_int : strchr("eEfFgGn%", f.type) != NULL) &&
        !(zero_padded && f.group != 0))
        return put_float(b->run, out, x, &f);
    return x3_jrun_fail(b->run, "unsupported format string '%.*s' for a %s", (int)x3_min_size(format->n_bytes, 100),
                        format->data, x3_jval_type_name(v));
}

static bool is_number(const char *text, size_t n, int64_t *out)
{
    *out = 0;
    for (size_t i = 0; i < n; i++) {
        if (!isdigit((unsigned char)text[i]) || *out > WIDTH_MAX)
            return false;
        *out = *out * 10 + (text[i] - '0');
    }
    return n > 0;
}

/* The first part of a field: nothing, a number, or a name. */
static x3_status find_argument(braces *b, const char *text, size_t n, x3_jval *out)
{
    int64_t at;
    x3_jval name;

    if (n == 0 && b->next_auto < 0)
        return x3_jrun_fail(b->run, "cannot switch from manual field specification to automatic field numbering");
    if (n == 0 || is_number(text, n, &at)) {
        if (n > 0 && b->next_auto > 0)
            return x3_jrun_fail(b->run, "cannot switch from manual field specification to automatic field numbering");
        if (n == 0)
            at = b->next_auto++;
        else
            b->next_auto = -1;
        if ((size_t)at >= b->args->n_items)
            return x3_jrun_fail(b->run, "Replacement index %lld out of range for positional args tuple", (long long)at);
        *out = b->args->items[at];
        return X3_OK;
    }
    TRY(x3_jstr_view(b->run, text, n, &name));
    *out = b->args->keywords == NULL ? (x3_jval){0} : x3_jdict_find(b->args->keywords, name.s);
    if (out->type == X3_JMISSING)
        return x3_jrun_fail(b->run, "KeyError: '%.*s'", (int)x3_min_size(n, 100), text);
    return X3_OK;
}

/* name.attribute[item]… */
static x3_status find_value(braces *b, const char *text, size_t n, x3_jval *out)
{
    size_t end = 0;

    while (end < n && text[end] != '.' && text[end] != '[')
        end++;
    TRY(find_argument(b, text, end, out));
    while (end < n) {
        bool is_item = text[end] == '[';
        size_t start = ++end;
        x3_jval key;
        int64_t at;
        while (end < n && (is_item ? text[end] != ']' : text[end] != '.' && text[end] != '['))
            end++;
        if (end == start || (is_item && end == n))
            return x3_jrun_fail(b->run, "Empty attribute in format string");
        TRY(x3_jstr_view(b->run, text + start, end - start, &key));
        if (is_item && is_number(text + start, end - start, &at))
            key = x3_jval_int(at);
        TRY(is_item ? x3_jobject_item(b->run, *out, key, out) : x3_jobject_attribute(b->run, *out, key.s, out));
        end += is_item;
    }
    return X3_OK;
}

/* What stands between { and }. */
static x3_status put_replacement(braces *b, const char *text, size_t n, x3_jbuf *out)
{
    size_t name = 0;
    char conversion = 0;
    x3_jbuf format = {0}, shown = {0};
    x3_jval v, f;

    while (name < n && text[name] != ':' && text[name] != '!')
        name += text[name] == '[' && memchr(text + name, ']', n - name) != NULL
                    ? (size_t)((const char *)memchr(text + name, ']', n - name) - (text + name)) : 1;
    TRY(find_value(b, text, name, &v));
    if (name < n && text[name] == '!') {
        conversion = name + 1 < n ? text[name + 1] : '\0';
        name += 2;
        if (conversion == '\0' || strchr("rsa", conversion) == NULL || (name < n && text[name] != ':'))
            return x3_jrun_fail(b->run, "expected ':' after conversion specifier");
    }
    if (name < n)
        TRY(expand(b, text + name + 1, n - name - 1, &format));
    if (conversion == 's') {
        TRY(x3_jprint_to_str(b->run, v, &v));
    } else if (conversion != 0) {
        TRY(x3_jprint_repr(b->run, &shown, v));
        TRY(x3_jstr_of(b->run, &shown, &v));
    }
    TRY(x3_jstr_of(b->run, &format, &f));
    return put_field(b, v, f.s, out);
}

static x3_status expand(braces *b, const char *text, size_t n, x3_jbuf *out)
{
    if (++b->depth > 3)
        return x3_jrun_fail(b->run, "Max string recursion exceeded");
    for (size_t at = 0; at < n; at++) {
        bool is_double = at + 1 < n && text[at + 1] == text[at];
        if (text[at] != '{' && text[at] != '}') {
            TRY(x3_jbuf_put(b->run, out, text + at, 1));
            continue;
        }
        if (is_double && b->depth == 1) {
            TRY(x3_jbuf_put(b->run, out, text + at++, 1));
            continue;
        }
        size_t end = at + 1, depth = 1;
        for (; text[at] == '{' && end < n; end++) {
            depth += text[end] == '{';
            depth -= text[end] == '}';
            if (depth == 0)
                break;
        }
        if (text[at] == '}' || end >= n)
            return x3_jrun_fail(b->run, "Single '%c' encountered in format string", text[at]);
        TRY(put_replacement(b, text + at + 1, end - at - 1, out));
        at = end;
    }
    b->depth--;
    return X3_OK;
}

x3_status x3_jformat_braces(x3_jrun *run, const x3_jstr *format, const x3_jargs *args, x3_jval *out)
{
    braces b = {.run = run, .args = args};
    x3_jbuf buf = {0};

    if (format->is_markup)
        return x3_jrun_refuse(run, "format() of a Markup text is not supported");
    TRY(expand(&b, format->data, format->n_bytes, &buf));
    return x3_jstr_of(run, &buf, out);
}
