#include "runtime/jinja/jinja_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/tokenizer/unicode.h"

/* str(), repr(), json.dumps() and markupsafe.escape(). */

/* ---- numbers ---- */

void x3_jprint_float(double f, char out[40])
{
    char digits[32], *e;
    int precision = 1, exponent, n_digits;

    if (!isfinite(f)) {
        strcpy(out, isnan(f) ? "nan" : f < 0 ? "-inf" : "inf");
        return;
    }
    do /* the shortest that reads back as the same number */
        snprintf(digits, sizeof digits, "%.*e", precision - 1, f);
    while (strtod(digits, NULL) != f && ++precision <= 17);
    e = strchr(digits, 'e');
    exponent = atoi(e + 1);
    *e = '\0';
    if (exponent < -4 || exponent >= 16) {
        snprintf(out, 40, "%.24se%c%02d", digits, exponent < 0 ? '-' : '+', abs(exponent) % 1000);
        return;
    }
    n_digits = precision - 1 - exponent; /* behind the dot */
    snprintf(out, 40, "%.*f", n_digits > 0 ? n_digits : 1, f);
}

static x3_status put_int(x3_jrun *run, x3_jbuf *buf, int64_t i)
{
    char text[24];

    snprintf(text, sizeof text, "%lld", (long long)i);
    return x3_jbuf_puts(run, buf, text);
}

static x3_status put_float(x3_jrun *run, x3_jbuf *buf, double f)
{
    char text[40];

    x3_jprint_float(f, text);
    return x3_jbuf_puts(run, buf, text);
}

/* ---- repr ---- */

static x3_status put_text_repr(x3_jrun *run, x3_jbuf *buf, const x3_jstr *s)
{
    bool has_single = memchr(s->data, '\'', s->n_bytes) != NULL, has_double = memchr(s->data, '"', s->n_bytes) != NULL;
    char quote[2] = {has_single && !has_double ? '"' : '\'', 0}, room[16];
    size_t length, plain = 0;

    if (s->is_markup)
        TRY(x3_jbuf_puts(run, buf, "Markup("));
    TRY(x3_jbuf_puts(run, buf, quote));
    for (size_t at = 0; at < s->n_bytes; at += length) {
        uint32_t cp = x3_utf8_decode(s->data + at, s->n_bytes - at, &length);
        if (cp == '\\' || cp == (unsigned char)quote[0])
            snprintf(room, sizeof room, "\\%c", (char)cp);
        else if (cp == '\n' || cp == '\r' || cp == '\t')
            snprintf(room, sizeof room, "\\%c", cp == '\n' ? 'n' : cp == '\r' ? 'r' : 't');
        else if (x3_jtext_is_printable(cp))
            continue;
        else
            snprintf(room, sizeof room, cp < 0x100 ? "\\x%02x" : cp < 0x10000 ? "\\u%04x" : "\\U%08x", (unsigned)cp);
        TRY(x3_jbuf_put(run, buf, s->data + plain, at - plain));
        TRY(x3_jbuf_puts(run, buf, room));
        plain = at + length;
    }
    TRY(x3_jbuf_put(run, buf, s->data + plain, s->n_bytes - plain));
    TRY(x3_jbuf_puts(run, buf, quote));
    return s->is_markup ? x3_jbuf_puts(run, buf, ")") : X3_OK;
}

static x3_status put_items(x3_jrun *run, x3_jbuf *buf, x3_jval v)
{
    x3_jiter *it;
    x3_jval item;
    bool more, first = true;

    TRY(x3_jiter_open(run, v, &it));
    for (;; first = false) {
        TRY(x3_jiter_next(run, it, &item, &more));
        if (!more)
            return X3_OK;
        if (!first)
            TRY(x3_jbuf_puts(run, buf, ", "));
        TRY(x3_jprint_repr(run, buf, item));
    }
}

static x3_status put_list(x3_jrun *run, x3_jbuf *buf, x3_jval v)
{
    bool is_list = v.type == X3_JLIST;

    TRY(x3_jbuf_puts(run, buf, is_list ? "[" : "("));
    TRY(put_items(run, buf, v));
    return x3_jbuf_puts(run, buf, is_list ? "]" : v.list->n_items == 1 ? ",)" : ")");
}

static x3_status put_dict(x3_jrun *run, x3_jbuf *buf, const x3_jdict *dict)
{
    TRY(x3_jbuf_puts(run, buf, "{"));
    for (size_t i = 0; i < dict->n_items; i++) {
        if (i > 0)
            TRY(x3_jbuf_puts(run, buf, ", "));
        TRY(x3_jrun_steps(run, 1));
        TRY(x3_jprint_repr(run, buf, dict->entries[i].key));
        TRY(x3_jbuf_puts(run, buf, ": "));
        TRY(x3_jprint_repr(run, buf, dict->entries[i].value));
    }
    return x3_jbuf_puts(run, buf, "}");
}

static x3_status put_view(x3_jrun *run, x3_jbuf *buf, x3_jval v)
{
    TRY(x3_jbuf_puts(run, buf, x3_jval_type_name(v)));
    TRY(x3_jbuf_puts(run, buf, "(["));
    TRY(put_items(run, buf, v));
    return x3_jbuf_puts(run, buf, "])");
}

static x3_status put_range(x3_jrun *run, x3_jbuf *buf, const x3_jrange *r)
{
    char text[100];

    if (r->step == 1)
        snprintf(text, sizeof text, "range(%lld, %lld)", (long long)r->start, (long long)r->stop);
    else
        snprintf(text, sizeof text, "range(%lld, %lld, %lld)", (long long)r->start, (long long)r->stop,
                 (long long)r->step);
    return x3_jbuf_puts(run, buf, text);
}

/* What has no value to show: its kind, and in place of an address 0x0. */
static x3_status put_object(x3_jrun *run, x3_jbuf *buf, x3_jval v)
{
    char text[200];

    if (v.type == X3_JMACRO && v.macro->code->name == NULL)
        return x3_jbuf_puts(run, buf, "<Macro anonymous>");
    if (v.type == X3_JMACRO) {
        TRY(x3_jbuf_puts(run, buf, "<Macro "));
        TRY(put_text_repr(run, buf, &v.macro->code->name->text));
        return x3_jbuf_puts(run, buf, ">");
    }
    if (v.type == X3_JFUNCTION)
        return x3_jbuf_puts(run, buf, v.function->repr);
    if (v.type == X3_JBOUND)
        snprintf(text, sizeof text, "<built-in method %s of %s object at 0x0>", v.bound->method->name,
                 x3_jval_type_name(v.bound->self));
    else if (v.type == X3_JITER)
        snprintf(text, sizeof text, "<%s object at 0x0>", v.iter->name);
    else
        snprintf(text, sizeof text, "<jinja2.utils.%s object at 0x0>", x3_jval_type_name(v));
    return x3_jbuf_puts(run, buf, text);
}

static x3_status put_loop(x3_jrun *run, x3_jbuf *buf, x3_jval v)
{
    char text[80];
    x3_jval length;

    TRY(x3_jobject_attribute(run, v, &(x3_jstr){.data = "length", .n_bytes = 6, .n_chars = 6}, &length));
    snprintf(text, sizeof text, "<LoopContext %lld/%lld>", (long long)v.loop->index0 + 1, (long long)length.i);
    return x3_jbuf_puts(run, buf, text);
}

static x3_status put_repr(x3_jrun *run, x3_jbuf *buf, x3_jval v)
{
    if (v.type == X3_JSTR)
        return put_text_repr(run, buf, v.s);
    if (v.type == X3_JINT)
        return put_int(run, buf, v.i);
    if (v.type == X3_JFLOAT)
        return put_float(run, buf, v.f);
    if (v.type == X3_JBOOL)
        return x3_jbuf_puts(run, buf, v.b ? "True" : "False");
    if (v.type == X3_JNONE)
        return x3_jbuf_puts(run, buf, "None");
    if (v.type == X3_JUNDEFINED)
        return x3_jbuf_puts(run, buf, "Undefined");
    if (v.type == X3_JLIST || v.type == X3_JTUPLE)
        return put_list(run, buf, v);
    if (v.type == X3_JDICT)
        return put_dict(run, buf, v.dict);
    if (v.type == X3_JVIEW)
        return put_view(run, buf, v);
    if (v.type == X3_JRANGE)
        return put_range(run, buf, v.range);
    if (v.type == X3_JLOOP)
        return put_loop(run, buf, v);
    if (v.type != X3_JNAMESPACE)
        return put_object(run, buf, v);
    TRY(x3_jbuf_puts(run, buf, "<Namespace "));
    TRY(put_dict(run, buf, v.dict));
    return x3_jbuf_puts(run, buf, ">");
}

x3_status x3_jprint_repr(x3_jrun *run, x3_jbuf *buf, x3_jval v)
{
    TRY(x3_jrun_enter(run));
    TRY(put_repr(run, buf, v));
    x3_jrun_leave(run);
    return X3_OK;
}

x3_status x3_jprint_str(x3_jrun *run, x3_jbuf *buf, x3_jval v)
{
    if (v.type == X3_JSTR)
        return x3_jbuf_put(run, buf, v.s->data, v.s->n_bytes);
    return v.type == X3_JUNDEFINED ? X3_OK : x3_jprint_repr(run, buf, v);
}

x3_status x3_jprint_to_str(x3_jrun *run, x3_jval v, x3_jval *out)
{
    x3_jbuf buf = {0};

    if (v.type == X3_JSTR)
        return x3_jstr_mark(run, v, false, out);
    TRY(x3_jprint_str(run, &buf, v));
    return x3_jstr_of(run, &buf, out);
}

x3_status x3_jprint_to_soft(x3_jrun *run, x3_jval v, x3_jval *out)
{
    *out = v;
    return v.type == X3_JSTR ? X3_OK : x3_jprint_to_str(run, v, out);
}

/* ---- escape ---- */

x3_status x3_jprint_escape(x3_jrun *run, x3_jval v, x3_jval *out)
{
    static const char from[] = "&<>'\"";
    static const char *const to[] = {"&amp;", "&lt;", "&gt;", "&#39;", "&#34;"};
    x3_jbuf buf = {0};
    size_t plain = 0;

    TRY(x3_jprint_to_soft(run, v, out));
    if (out->s->is_markup)
        return X3_OK;
    const x3_jstr *s = out->s;
    for (size_t i = 0; i < s->n_bytes; i++) {
        const char *special = memchr(from, s->data[i], sizeof from - 1);
        if (special == NULL)
            continue;
        TRY(x3_jbuf_put(run, &buf, s->data + plain, i - plain));
        TRY(x3_jbuf_puts(run, &buf, to[special - from]));
        plain = i + 1;
    }
    if (plain > 0) {
        TRY(x3_jbuf_put(run, &buf, s->data + plain, s->n_bytes - plain));
        TRY(x3_jstr_of(run, &buf, out));
    }
    return x3_jstr_mark(run, *out, true, out);
}

/* ---- JSON ---- */

typedef struct json {
    x3_jrun *run;
    x3_jbuf buf;
    bool ascii, sort_keys, has_indent;
    x3_jval indent; /* a string, once a level */
    const x3_jstr *comma, *colon;
} json;

static x3_status put_json(json *j, x3_jval v, int level) X3_MUST;

static x3_status put_json_escape(json *j, uint32_t cp)
{
    static const char from[] = "\"\\\n\r\t\f\b", to[] = "\"\\nrtfb";
    const char *simple = cp < 0x80 ? memchr(from, (int)cp, sizeof from - 1) : NULL;
    char room[16];

    if (simple != NULL)
        snprintf(room, sizeof room, "\\%c", to[simple - from]);
    else if (cp < 0x10000)
        snprintf(room, sizeof room, "\\u%04x", (unsigned)cp);
    else
        snprintf(room, sizeof room, "\\u%04x\\u%04x", (unsigned)(0xD800 + ((cp - 0x10000) >> 10)),
                 (unsigned)(0xDC00 + ((cp - 0x10000) & 0x3FF)));
    return x3_jbuf_puts(j->run, &j->buf, room);
}

static x3_status put_json_text(json *j, const x3_jstr *s)
{
    size_t plain = 0, length;

    TRY(x3_jbuf_puts(j->run, &j->buf, "\""));
    for (size_t at = 0; at < s->n_bytes; at += length) {
        uint32_t cp = (unsigned char)s->data[at];
        length = 1;
        if (cp >= 0x80)
            cp = x3_utf8_decode(s->data + at, s->n_bytes - at, &length);
        if (cp >= 0x20 && cp != '"' && cp != '\\' && !(j->ascii && cp >= 0x7F))
            continue;
        TRY(x3_jbuf_put(j->run, &j->buf, s->data + plain, at - plain));
        TRY(put_json_escape(j, cp));
        plain = at + length;
    }
    TRY(x3_jbuf_put(j->run, &j->buf, s->data + plain, s->n_bytes - plain));
    return x3_jbuf_puts(j->run, &j->buf, "\"");
}

static x3_status put_json_float(json *j, double f)
{
    if (isfinite(f))
        return put_float(j->run, &j->buf, f);
    return x3_jbuf_puts(j->run, &j->buf, isnan(f) ? "NaN" : f < 0 ? "-Infinity" : "Infinity");
}

static x3_status put_newline(json *j, int level)
{
    if (!j->has_indent)
        return X3_OK;
    TRY(x3_jbuf_puts(j->run, &j->buf, "\n"));
    for (int i = 0; i < level; i++)
        TRY(x3_jbuf_put(j->run, &j->buf, j->indent.s->data, j->indent.s->n_bytes));
    return X3_OK;
}

/* Scalars; a key is quoted. *done is false for anything else. */
static x3_status put_json_scalar(json *j, x3_jval v, bool is_key, bool *done)
{
    const char *quote = is_key && v.type != X3_JSTR ? "\"" : "";

    *done = v.type == X3_JSTR || v.type == X3_JINT || v.type == X3_JFLOAT || v.type == X3_JBOOL || v.type == X3_JNONE;
    if (v.type == X3_JSTR)
        return put_json_text(j, v.s);
    if (*done)
        TRY(x3_jbuf_puts(j->run, &j->buf, quote));
    if (v.type == X3_JINT)
        TRY(put_int(j->run, &j->buf, v.i));
    else if (v.type == X3_JFLOAT)
        TRY(put_json_float(j, v.f));
    else if (v.type == X3_JBOOL || v.type == X3_JNONE)
        TRY(x3_jbuf_puts(j->run, &j->buf, v.type == X3_JNONE ? "null" : v.b ? "true" : "false"));
    return *done ? x3_jbuf_puts(j->run, &j->buf, quote) : X3_OK;
}

static x3_status put_json_list(json *j, const x3_jlist *list, int level)
{
    if (list->n_items == 0)
        return x3_jbuf_puts(j->run, &j->buf, "[]");
    TRY(x3_jbuf_puts(j->run, &j->buf, "["));
    for (size_t i = 0; i < list->n_items; i++) {
        if (i > 0)
            TRY(x3_jbuf_put(j->run, &j->buf, j->comma->data, j->comma->n_bytes));
        TRY(put_newline(j, level + 1));
        TRY(put_json(j, list->items[i], level + 1));
    }
    TRY(put_newline(j, level));
    return x3_jbuf_puts(j->run, &j->buf, "]");
}

static x3_status put_json_dict(json *j, const x3_jdict *dict, int level)
{
    x3_jlist *keys;
    x3_jval value;
    bool done;

    if (dict->n_items == 0)
        return x3_jbuf_puts(j->run, &j->buf, "{}");
    TRY(x3_jlist_new(j->run, dict->n_items, &keys));
    for (size_t i = 0; i < dict->n_items; i++)
        TRY(x3_jlist_push(j->run, keys, dict->entries[i].key));
    if (j->sort_keys)
        TRY(x3_jlist_sort(j->run, keys->items, NULL, keys->n_items, false));
    TRY(x3_jbuf_puts(j->run, &j->buf, "{"));
    for (size_t i = 0; i < keys->n_items; i++) {
        if (i > 0)
            TRY(x3_jbuf_put(j->run, &j->buf, j->comma->data, j->comma->n_bytes));
        TRY(put_newline(j, level + 1));
        TRY(put_json_scalar(j, keys->items[i], true, &done));
        if (!done)
            return x3_jrun_fail(j->run, "keys must be str, int, float, bool or None, not %s",
                                x3_jval_type_name(keys->items[i]));
        TRY(x3_jbuf_put(j->run, &j->buf, j->colon->data, j->colon->n_bytes));
        TRY(x3_jdict_get(j->run, dict, keys->items[i], &value));
        TRY(put_json(j, value, level + 1));
    }
    TRY(put_newline(j, level));
    return x3_jbuf_puts(j->run, &j->buf, "}");
}

static x3_status put_json(json *j, x3_jval v, int level)
{
    bool done;

    TRY(x3_jrun_enter(j->run));
    TRY(put_json_scalar(j, v, false, &done));
    if (!done && v.type == X3_JDICT)
        TRY(put_json_dict(j, v.dict, level));
    else if (!done && (v.type == X3_JLIST || v.type == X3_JTUPLE))
        TRY(put_json_list(j, v.list, level));
    else if (!done)
        return x3_jrun_fail(j->run, "Object of type %s is not JSON serializable", x3_jval_type_name(v));
    x3_jrun_leave(j->run);
    return X3_OK;
}

/* separators=(comma, colon) */
static x3_status set_separators(json *j, x3_jval v)
{
    x3_jlist *pair;

    if (v.type == X3_JMISSING || v.type == X3_JNONE)
        return X3_OK;
    TRY(x3_jlist_of(j->run, v, &pair));
    if (pair->n_items != 2 || pair->items[0].type != X3_JSTR || pair->items[1].type != X3_JSTR)
        return x3_jrun_fail(j->run, "separators must be two strings");
    j->comma = pair->items[0].s;
    j->colon = pair->items[1].s;
    return X3_OK;
}

/* arg: ensure_ascii, indent, separators, sort_keys */
x3_status x3_jprint_json(x3_jrun *run, const x3_jval arg[4], x3_jval v, x3_jval *out)
{
    static const x3_jstr comma_space = {", ", 2, 2, false, NULL}, comma = {",", 1, 1, false, NULL};
    static const x3_jstr colon = {": ", 2, 2, false, NULL}, space = {" ", 1, 1, false, NULL};
    json j = {.run = run, .ascii = x3_jval_truth(arg[0]), .sort_keys = x3_jval_truth(arg[3]), .colon = &colon};
    int64_t width;

    j.has_indent = arg[1].type != X3_JMISSING && arg[1].type != X3_JNONE;
    j.comma = j.has_indent ? &comma : &comma_space;
    j.indent = arg[1];
    if (j.has_indent && x3_jval_as_int(arg[1], &width))
        TRY(x3_jtext_repeat(run, &space, width, &j.indent));
    else if (j.has_indent && arg[1].type != X3_JSTR)
        return x3_jrun_fail(run, "can't multiply sequence by non-int of type '%s'", x3_jval_type_name(arg[1]));
    TRY(set_separators(&j, arg[2]));
    TRY(put_json(&j, v, 0));
    return x3_jstr_of(run, &j.buf, out);
}
