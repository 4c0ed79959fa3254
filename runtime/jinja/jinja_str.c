#include "runtime/jinja/jinja_internal.h"

#include <string.h>

#include "runtime/tokenizer/unicode.h"

/* The methods of str. */

#define METHOD(name)                                                                                            \
    static x3_status name(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)

/* Argument i, a str. */
static x3_status need_str(x3_jrun *run, const x3_jval *arg, int i, const x3_jstr **out)
{
    *out = arg[i].type == X3_JSTR ? arg[i].s : NULL;
    if (*out != NULL)
        return X3_OK;
    return x3_jrun_fail(run, "argument %d must be str, not %s", i + 1, x3_jval_type_name(arg[i]));
}

/* Argument i, an int; `missing` when it was not given. */
static x3_status need_int(x3_jrun *run, const x3_jval *arg, int i, int64_t missing, int64_t *out)
{
    *out = missing;
    if (arg[i].type == X3_JMISSING || x3_jval_as_int(arg[i], out))
        return X3_OK;
    return x3_jrun_fail(run, "'%s' object cannot be interpreted as an integer", x3_jval_type_name(arg[i]));
}

/* Methods of Markup give Markup. */
static x3_status like(x3_jrun *run, const x3_jval *self, x3_jval *out)
{
    return self->s->is_markup ? x3_jstr_mark(run, *out, true, out) : X3_OK;
}

/* What goes into a Markup is escaped. */
static x3_status fit(x3_jrun *run, const x3_jval *self, x3_jval v, x3_jval *out)
{
    *out = v;
    return self->s->is_markup ? x3_jprint_escape(run, v, out) : X3_OK;
}

/* ---- case and kinds ---- */

#define CASE_METHOD(name, to)                                \
    METHOD(name)                                             \
    {                                                        \
        (void)arg, (void)args;                               \
        return x3_jtext_case(run, self->s, to, out);         \
    }

CASE_METHOD(str_capitalize, 'c')
CASE_METHOD(str_casefold, 'f')
CASE_METHOD(str_lower, 'l')
CASE_METHOD(str_swapcase, 's')
CASE_METHOD(str_title, 't')
CASE_METHOD(str_upper, 'u')

/* Every character is of the kind, and there is one. */
static bool all_are(const x3_jstr *s, char kind)
{
    size_t length;

    for (size_t at = 0; at < s->n_bytes; at += length) {
        uint32_t cp = x3_utf8_decode(s->data + at, s->n_bytes - at, &length);
        if (kind == 's' ? !x3_jtext_is_space(cp) : !x3_jtext_is(cp, kind))
            return false;
    }
    return s->n_bytes > 0;
}

#define KIND_METHOD(name, kind)                              \
    METHOD(name)                                             \
    {                                                        \
        (void)run, (void)arg, (void)args;                    \
        *out = x3_jval_bool(all_are(self->s, kind));         \
        return x3_jrun_steps(run, self->s->n_bytes / 64);    \
    }

KIND_METHOD(str_isalnum, 'n')
KIND_METHOD(str_isalpha, 'a')
KIND_METHOD(str_isdecimal, 'D')
KIND_METHOD(str_isdigit, 'd')
KIND_METHOD(str_isnumeric, 'N')
KIND_METHOD(str_isspace, 's')

METHOD(str_isascii)
{
    (void)run, (void)arg, (void)args;
    *out = x3_jval_bool(self->s->n_bytes == self->s->n_chars);
    return X3_OK;
}

METHOD(str_isprintable)
{
    size_t length;

    (void)arg, (void)args;
    *out = x3_jval_bool(true);
    for (size_t at = 0; at < self->s->n_bytes && out->b; at += length)
        out->b = x3_jtext_is_printable(x3_utf8_decode(self->s->data + at, self->s->n_bytes - at, &length));
    return x3_jrun_steps(run, self->s->n_bytes / 64);
}

METHOD(str_isidentifier)
{
    size_t length;

    (void)arg, (void)args;
    *out = x3_jval_bool(self->s->n_bytes > 0);
    for (size_t at = 0; at < self->s->n_bytes && out->b; at += length)
        out->b = x3_jtext_is_name(x3_utf8_decode(self->s->data + at, self->s->n_bytes - at, &length), at == 0);
    return x3_jrun_steps(run, self->s->n_bytes / 64);
}

/* islower, isupper: a cased character, and none of the other kind. */
static bool has_case(const x3_jstr *s, char wanted)
{
    bool found = false;
    size_t length;

    for (size_t at = 0; at < s->n_bytes; at += length) {
        uint32_t cp = x3_utf8_decode(s->data + at, s->n_bytes - at, &length);
        if (x3_jtext_is(cp, wanted == 'l' ? 'u' : 'l') || x3_jtext_is(cp, 't'))
            return false;
        found = found || x3_jtext_is(cp, wanted);
    }
    return found;
}

METHOD(str_islower)
{
    (void)arg, (void)args;
    *out = x3_jval_bool(has_case(self->s, 'l'));
    return x3_jrun_steps(run, self->s->n_bytes / 64);
}

METHOD(str_isupper)
{
    (void)arg, (void)args;
    *out = x3_jval_bool(has_case(self->s, 'u'));
    return x3_jrun_steps(run, self->s->n_bytes / 64);
}

METHOD(str_istitle)
{
    bool after_cased = false, found = false, fine = true;
    size_t length;

    (void)arg, (void)args;
    for (size_t at = 0; at < self->s->n_bytes && fine; at += length) {
        uint32_t cp = x3_utf8_decode(self->s->data + at, self->s->n_bytes - at, &length);
        bool is_head = x3_jtext_is(cp, 'u') || x3_jtext_is(cp, 't'), is_tail = x3_jtext_is(cp, 'l');
        fine = is_head ? !after_cased : !is_tail || after_cased;
        after_cased = is_head || is_tail;
        found = found || after_cased;
    }
    *out = x3_jval_bool(fine && found);
    return x3_jrun_steps(run, self->s->n_bytes / 64);
}

/* ---- strip, pad ---- */

static x3_status strip(x3_jrun *run, const x3_jval *self, const x3_jval *arg, bool left, bool right, x3_jval *out)
{
    const x3_jstr *chars = NULL;

    if (arg[0].type != X3_JMISSING && arg[0].type != X3_JNONE)
        TRY(need_str(run, arg, 0, &chars));
    return x3_jtext_strip(run, self->s, chars, left, right, out);
}

METHOD(str_strip)
{
    (void)args;
    return strip(run, self, arg, true, true, out);
}

METHOD(str_lstrip)
{
    (void)args;
    return strip(run, self, arg, true, false, out);
}

METHOD(str_rstrip)
{
    (void)args;
    return strip(run, self, arg, false, true, out);
}

/* arg: width, fill; `left` and `right` say where the fill goes. */
static x3_status pad(x3_jrun *run, const x3_jval *self, const x3_jval *arg, bool left, bool right, x3_jval *out)
{
    int64_t width, n_fill, n_left;
    x3_jval fill, before, after;
    x3_jbuf buf = {0};

    TRY(need_int(run, arg, 0, 0, &width));
    TRY(x3_jstr_literal(run, " ", &fill));
    if (arg[1].type != X3_JMISSING)
        TRY(fit(run, self, arg[1], &fill));
    if (fill.type != X3_JSTR || fill.s->n_chars != 1)
        return x3_jrun_fail(run, "The fill character must be exactly one character long");
    n_fill = width > (int64_t)self->s->n_chars ? width - (int64_t)self->s->n_chars : 0;
    n_left = !left ? 0 : !right ? n_fill : n_fill / 2 + (n_fill & width & 1);
    TRY(x3_jtext_repeat(run, fill.s, n_left, &before));
    TRY(x3_jtext_repeat(run, fill.s, n_fill - n_left, &after));
    TRY(x3_jbuf_put(run, &buf, before.s->data, before.s->n_bytes));
    TRY(x3_jbuf_put(run, &buf, self->s->data, self->s->n_bytes));
    TRY(x3_jbuf_put(run, &buf, after.s->data, after.s->n_bytes));
    TRY(x3_jstr_of(run, &buf, out));
    return like(run, self, out);
}

METHOD(str_center)
{
    (void)args;
    return pad(run, self, arg, true, true, out);
}

METHOD(str_ljust)
{
    (void)args;
    return pad(run, self, arg, false, true, out);
}

METHOD(str_rjust)
{
    (void)args;
    return pad(run, self, arg, true, false, out);
}

METHOD(str_zfill)
{
    bool has_sign = self->s->n_bytes > 0 && (self->s->data[0] == '-' || self->s->data[0] == '+');
    x3_jbuf buf = {0};
    int64_t width;

    (void)args;
    TRY(need_int(run, arg, 0, 0, &width));
    TRY(x3_jbuf_put(run, &buf, self->s->data, has_sign));
    for (int64_t i = (int64_t)self->s->n_chars; i < width; i++)
        TRY(x3_jbuf_puts(run, &buf, "0"));
    TRY(x3_jbuf_put(run, &buf, self->s->data + has_sign, self->s->n_bytes - has_sign));
    TRY(x3_jstr_of(run, &buf, out));
    return like(run, self, out);
}

METHOD(str_expandtabs)
{
    int64_t size, column = 0;
    x3_jbuf buf = {0};

    (void)args;
    TRY(need_int(run, arg, 0, 8, &size));
    for (size_t i = 0; i < self->s->n_bytes; i++) {
        char c = self->s->data[i];
        if (c == '\t') {
            int64_t n = size > 0 ? size - column % size : 0;
            column += n;
            for (; n > 0; n--)
                TRY(x3_jbuf_puts(run, &buf, " "));
            continue;
        }
        column += ((unsigned char)c & 0xC0) != 0x80;
        column = c == '\n' || c == '\r' ? 0 : column;
        TRY(x3_jbuf_put(run, &buf, &c, 1));
    }
    TRY(x3_jstr_of(run, &buf, out));
    return like(run, self, out);
}

/* ---- search ---- */

/* Bounds arg[i], arg[i + 1] of a part of the text as bytes. *valid: the start lies within the text. */
static x3_status bounds(x3_jrun *run, const x3_jstr *s, const x3_jval *arg, int i, size_t *from, size_t *to, bool *valid)
{
    int64_t start = 0, stop = INT64_MAX, n = (int64_t)s->n_chars;

    if (arg[i].type != X3_JNONE)
        TRY(need_int(run, arg, i, 0, &start));
    if (arg[i + 1].type != X3_JNONE)
        TRY(need_int(run, arg, i + 1, INT64_MAX, &stop));
    stop = stop > n ? n : stop < 0 ? (stop + n < 0 ? 0 : stop + n) : stop;
    start = start < 0 ? (start + n < 0 ? 0 : start + n) : start;
    *valid = start <= n;
    *from = x3_jtext_offset(s, (size_t)(*valid ? start : n));
    *to = x3_jtext_offset(s, (size_t)stop);
    return x3_jrun_steps(run, s->n_bytes / 64);
}

static x3_status find(x3_jrun *run, const x3_jval *self, const x3_jval *arg, bool from_right, bool must, x3_jval *out)
{
    size_t from, to, at = SIZE_MAX;
    const x3_jstr *part;
    x3_jval before;
    bool valid;

    TRY(need_str(run, arg, 0, &part));
    TRY(bounds(run, self->s, arg, 1, &from, &to, &valid));
    if (valid && from_right)
        TRY(x3_jtext_rfind(run, self->s, from, to, part, &at));
    else if (valid)
        at = x3_jtext_find(self->s, from, to, part);
    if (at == SIZE_MAX && must)
        return x3_jrun_fail(run, "substring not found");
    *out = x3_jval_int(-1);
    if (at == SIZE_MAX)
        return X3_OK;
    TRY(x3_jstr_view(run, self->s->data, at, &before));
    *out = x3_jval_int((int64_t)before.s->n_chars);
    return X3_OK;
}

METHOD(str_find)
{
    (void)args;
    return find(run, self, arg, false, false, out);
}

METHOD(str_rfind)
{
    (void)args;
    return find(run, self, arg, true, false, out);
}

METHOD(str_index)
{
    (void)args;
    return find(run, self, arg, false, true, out);
}

METHOD(str_rindex)
{
    (void)args;
    return find(run, self, arg, true, true, out);
}

METHOD(str_count)
{
    size_t from, to, at;
    const x3_jstr *part;
    int64_t n = 0;
    bool valid;

    (void)args;
    TRY(need_str(run, arg, 0, &part));
    TRY(bounds(run, self->s, arg, 1, &from, &to, &valid));
    if (valid && part->n_bytes == 0 && from <= to) {
        x3_jval within;
        TRY(x3_jstr_view(run, self->s->data + from, to - from, &within));
        n = (int64_t)within.s->n_chars + 1;
    }
    for (; valid && part->n_bytes > 0 && (at = x3_jtext_find(self->s, from, to, part)) != SIZE_MAX; n++) {
        TRY(x3_jrun_steps(run, 1));
        from = at + part->n_bytes;
    }
    *out = x3_jval_int(n);
    return X3_OK;
}

static bool has_affix(const x3_jstr *s, size_t from, size_t to, const x3_jstr *affix, bool at_end)
{
    return to >= from && to - from >= affix->n_bytes &&
           memcmp(s->data + (at_end ? to - affix->n_bytes : from), affix->data, affix->n_bytes) == 0;
}

/* startswith, endswith: a str or a tuple of them. */
static x3_status check_affix(x3_jrun *run, const x3_jval *self, const x3_jval *arg, bool at_end, x3_jval *out)
{
    size_t from, to, n = arg[0].type == X3_JTUPLE ? arg[0].list->n_items : 1;
    const x3_jval *options = arg[0].type == X3_JTUPLE ? arg[0].list->items : arg;
    bool valid, found = false;

    TRY(bounds(run, self->s, arg, 1, &from, &to, &valid));
    for (size_t i = 0; i < n && !found; i++) {
        if (options[i].type != X3_JSTR)
            return x3_jrun_fail(run, "%s first arg must be str or a tuple of str, not %s",
                                at_end ? "endswith" : "startswith", x3_jval_type_name(options[i]));
        found = valid && has_affix(self->s, from, to, options[i].s, at_end);
    }
    *out = x3_jval_bool(found);
    return X3_OK;
}

METHOD(str_startswith)
{
    (void)args;
    return check_affix(run, self, arg, false, out);
}

METHOD(str_endswith)
{
    (void)args;
    return check_affix(run, self, arg, true, out);
}

/* ---- pieces ---- */

static x3_status cut(x3_jrun *run, const x3_jval *self, size_t from, size_t to, x3_jval *out)
{
    TRY(x3_jstr_view(run, self->s->data + from, to - from, out));
    return like(run, self, out);
}

METHOD(str_removeprefix)
{
    const x3_jstr *affix;
    size_t n = self->s->n_bytes;

    (void)args;
    TRY(need_str(run, arg, 0, &affix));
    return cut(run, self, has_affix(self->s, 0, n, affix, false) ? affix->n_bytes : 0, n, out);
}

METHOD(str_removesuffix)
{
    const x3_jstr *affix;
    size_t n = self->s->n_bytes;

    (void)args;
    TRY(need_str(run, arg, 0, &affix));
    return cut(run, self, 0, has_affix(self->s, 0, n, affix, true) ? n - affix->n_bytes : n, out);
}

static x3_status partition(x3_jrun *run, const x3_jval *self, const x3_jval *arg, bool from_right, x3_jval *out)
{
    size_t n = self->s->n_bytes, at;
    const x3_jstr *separator;
    x3_jlist *list;
    x3_jval part;

    TRY(need_str(run, arg, 0, &separator));
    if (separator->n_bytes == 0)
        return x3_jrun_fail(run, "empty separator");
    at = x3_jtext_find(self->s, 0, n, separator);
    if (from_right)
        TRY(x3_jtext_rfind(run, self->s, 0, n, separator, &at));
    bool found = at != SIZE_MAX;
    size_t head = found ? at : from_right ? 0 : n, tail = found ? at + separator->n_bytes : head;
    const size_t ends[] = {0, head, tail, n};
    TRY(x3_jlist_new(run, 3, &list));
    for (int i = 0; i < 3; i++) {
        TRY(cut(run, self, ends[i], ends[i + 1], &part));
        TRY(x3_jlist_push(run, list, part));
    }
    *out = x3_jval_tuple(list);
    return x3_jrun_steps(run, n / 64);
}

METHOD(str_partition)
{
    (void)args;
    return partition(run, self, arg, false, out);
}

METHOD(str_rpartition)
{
    (void)args;
    return partition(run, self, arg, true, out);
}

static x3_status split(x3_jrun *run, const x3_jval *self, const x3_jval *arg, bool from_right, x3_jval *out)
{
    const x3_jstr *separator = NULL;
    x3_jlist *list;
    int64_t max;

    if (arg[0].type != X3_JMISSING && arg[0].type != X3_JNONE)
        TRY(need_str(run, arg, 0, &separator));
    TRY(need_int(run, arg, 1, -1, &max));
    TRY(x3_jtext_split(run, self->s, separator, max < 0 ? -1 : max, from_right, &list));
    *out = x3_jval_list(list);
    return X3_OK;
}

METHOD(str_split)
{
    (void)args;
    return split(run, self, arg, false, out);
}

METHOD(str_rsplit)
{
    (void)args;
    return split(run, self, arg, true, out);
}

METHOD(str_splitlines)
{
    x3_jlist *list;
    int64_t keep;

    (void)args;
    TRY(need_int(run, arg, 0, 0, &keep));
    TRY(x3_jtext_lines(run, self->s, keep != 0, &list));
    *out = x3_jval_list(list);
    return X3_OK;
}

METHOD(str_replace)
{
    const x3_jstr *old;
    x3_jval fresh;
    int64_t count;

    (void)args;
    TRY(need_str(run, arg, 0, &old));
    TRY(fit(run, self, arg[1], &fresh));
    if (fresh.type != X3_JSTR)
        return x3_jrun_fail(run, "replace() argument 2 must be str, not %s", x3_jval_type_name(fresh));
    TRY(need_int(run, arg, 2, -1, &count));
    return x3_jtext_replace(run, self->s, old, fresh.s, count < 0 ? -1 : count, out);
}

METHOD(str_join)
{
    x3_jbuf buf = {0};
    x3_jlist *items;
    x3_jval item;

    (void)args;
    TRY(x3_jlist_of(run, arg[0], &items));
    for (size_t i = 0; i < items->n_items; i++) {
        TRY(fit(run, self, items->items[i], &item));
        if (item.type != X3_JSTR)
            return x3_jrun_fail(run, "sequence item %zu: expected str instance, %s found", i, x3_jval_type_name(item));
        if (i > 0)
            TRY(x3_jbuf_put(run, &buf, self->s->data, self->s->n_bytes));
        TRY(x3_jbuf_put(run, &buf, item.s->data, item.s->n_bytes));
    }
    TRY(x3_jstr_of(run, &buf, out));
    return like(run, self, out);
}

METHOD(str_format)
{
    (void)arg;
    TRY(x3_jformat_braces(run, self->s, args, out));
    return like(run, self, out);
}

METHOD(str_format_map)
{
    (void)args;
    if (arg[0].type != X3_JDICT)
        return x3_jrun_fail(run, "format_map() takes a dict, not %s", x3_jval_type_name(arg[0]));
    TRY(x3_jformat_braces(run, self->s, &(x3_jargs){.keywords = arg[0].dict}, out));
    return like(run, self, out);
}

METHOD(not_supported)
{
    (void)self, (void)arg, (void)args, (void)out;
    return x3_jrun_refuse(run, "str.encode, str.maketrans and str.translate are not supported");
}

const x3_jbuiltin x3_jstr_methods[] = {
    {"strip", str_strip, 0, 1, NULL},
    {"lstrip", str_lstrip, 0, 1, NULL},
    {"rstrip", str_rstrip, 0, 1, NULL},
    {"split", str_split, 0, 2, "sep maxsplit"},
    {"startswith", str_startswith, 1, 3, NULL},
    {"endswith", str_endswith, 1, 3, NULL},
    {"replace", str_replace, 2, 3, NULL},
    {"upper", str_upper, 0, 0, NULL},
    {"lower", str_lower, 0, 0, NULL},
    {"title", str_title, 0, 0, NULL},
    {"capitalize", str_capitalize, 0, 0, NULL},
    {"join", str_join, 1, 1, NULL},
    {"find", str_find, 1, 3, NULL},
    {"rfind", str_rfind, 1, 3, NULL},
    {"index", str_index, 1, 3, NULL},
    {"rindex", str_rindex, 1, 3, NULL},
    {"count", str_count, 1, 3, NULL},
    {"format", str_format, 0, -1, NULL},
    {"format_map", str_format_map, 1, 1, NULL},
    {"rsplit", str_rsplit, 0, 2, "sep maxsplit"},
    {"splitlines", str_splitlines, 0, 1, "keepends"},
    {"partition", str_partition, 1, 1, NULL},
    {"rpartition", str_rpartition, 1, 1, NULL},
    {"removeprefix", str_removeprefix, 1, 1, NULL},
    {"removesuffix", str_removesuffix, 1, 1, NULL},
    {"casefold", str_casefold, 0, 0, NULL},
    {"swapcase", str_swapcase, 0, 0, NULL},
    {"center", str_center, 1, 2, NULL},
    {"ljust", str_ljust, 1, 2, NULL},
    {"rjust", str_rjust, 1, 2, NULL},
    {"zfill", str_zfill, 1, 1, NULL},
    {"expandtabs", str_expandtabs, 0, 1, "tabsize"},
    {"isalnum", str_isalnum, 0, 0, NULL},
    {"isalpha", str_isalpha, 0, 0, NULL},
    {"isascii", str_isascii, 0, 0, NULL},
    {"isdecimal", str_isdecimal, 0, 0, NULL},
    {"isdigit", str_isdigit, 0, 0, NULL},
    {"isidentifier", str_isidentifier, 0, 0, NULL},
    {"islower", str_islower, 0, 0, NULL},
    {"isnumeric", str_isnumeric, 0, 0, NULL},
    {"isprintable", str_isprintable, 0, 0, NULL},
    {"isspace", str_isspace, 0, 0, NULL},
    {"istitle", str_istitle, 0, 0, NULL},
    {"isupper", str_isupper, 0, 0, NULL},
    {"encode", not_supported, 0, -1, NULL},
    {"maketrans", not_supported, 0, -1, NULL},
    {"translate", not_supported, 0, -1, NULL},
};

const size_t x3_jn_str_methods = sizeof x3_jstr_methods / sizeof x3_jstr_methods[0];
