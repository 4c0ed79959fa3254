#include "runtime/jinja/jinja_internal.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

#include "runtime/tokenizer/unicode.h"

/* Tests, globals, and the search for filters, tests and globals by name. */

#define TEST(name)                                                                                              \
    static x3_status name(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)

/* ---- tests by type ---- */

#define TYPE_TEST(name, condition)               \
    TEST(name)                                   \
    {                                            \
        (void)run, (void)arg, (void)args;        \
        *out = x3_jval_bool(condition);          \
        return X3_OK;                            \
    }

TYPE_TEST(test_defined, self->type != X3_JUNDEFINED)
TYPE_TEST(test_undefined, self->type == X3_JUNDEFINED)
TYPE_TEST(test_none, self->type == X3_JNONE)
TYPE_TEST(test_boolean, self->type == X3_JBOOL)
TYPE_TEST(test_true, self->type == X3_JBOOL && self->b)
TYPE_TEST(test_false, self->type == X3_JBOOL && !self->b)
TYPE_TEST(test_integer, self->type == X3_JINT)
TYPE_TEST(test_float, self->type == X3_JFLOAT)
TYPE_TEST(test_number, self->type == X3_JINT || self->type == X3_JFLOAT || self->type == X3_JBOOL)
TYPE_TEST(test_string, self->type == X3_JSTR)
TYPE_TEST(test_mapping, self->type == X3_JDICT)
TYPE_TEST(test_iterable, x3_jval_is_iterable(*self))
TYPE_TEST(test_callable, x3_jval_is_callable(*self))
TYPE_TEST(test_escaped, self->type == X3_JSTR && self->s->is_markup)
TYPE_TEST(test_filter, self->type == X3_JSTR && x3_jbuiltin_filter(self->s) != NULL)
TYPE_TEST(test_test, self->type == X3_JSTR && x3_jbuiltin_test(self->s) != NULL)
/* len() and [], which an undefined value has, too */
TYPE_TEST(test_sequence, self->type == X3_JSTR || self->type == X3_JLIST || self->type == X3_JTUPLE ||
                             self->type == X3_JDICT || self->type == X3_JRANGE || self->type == X3_JUNDEFINED)

/* ---- tests by value ---- */

/* self % by == rest */
static x3_status test_rest(x3_jrun *run, const x3_jval *self, x3_jval by, int64_t rest, x3_jval *out)
{
    bool equal;

    TRY(x3_joperate_binary(run, '%', *self, by, out));
    TRY(x3_jval_equal(run, *out, x3_jval_int(rest), &equal));
    *out = x3_jval_bool(equal);
    return X3_OK;
}

TEST(test_odd)
{
    (void)arg, (void)args;
    return test_rest(run, self, x3_jval_int(2), 1, out);
}

TEST(test_even)
{
    (void)arg, (void)args;
    return test_rest(run, self, x3_jval_int(2), 0, out);
}

TEST(test_divisibleby)
{
    (void)args;
    return test_rest(run, self, arg[0], 0, out);
}

TEST(test_eq)
{
    bool equal;

    (void)args;
    TRY(x3_jval_equal(run, *self, arg[0], &equal));
    *out = x3_jval_bool(equal);
    return X3_OK;
}

TEST(test_ne)
{
    TRY(test_eq(run, self, arg, args, out));
    out->b = !out->b;
    return X3_OK;
}

#define ORDER_TEST(name, op)                                     \
    TEST(name)                                                   \
    {                                                            \
        bool holds;                                              \
        (void)args;                                              \
        TRY(x3_jval_compare(run, op, *self, arg[0], &holds));    \
        *out = x3_jval_bool(holds);                              \
        return X3_OK;                                            \
    }

ORDER_TEST(test_lt, '<')
ORDER_TEST(test_gt, '>')
ORDER_TEST(test_le, X3_JOP2('<', '='))
ORDER_TEST(test_ge, X3_JOP2('>', '='))

TEST(test_in)
{
    bool found;

    (void)args;
    TRY(x3_jval_contains(run, arg[0], *self, &found));
    *out = x3_jval_bool(found);
    return X3_OK;
}

/* The same object: equal where Python has one object a value, else the same thing here. */
TEST(test_sameas)
{
    bool same = self->type == arg[0].type;

    (void)run, (void)args;
    if (same && self->type == X3_JBOOL)
        same = self->b == arg[0].b;
    else if (same && self->type == X3_JINT)
        same = self->i == arg[0].i;
    else if (same && self->type == X3_JFLOAT)
        same = false;
    else if (same && self->type == X3_JSTR)
        same = self->s->n_bytes == arg[0].s->n_bytes && memcmp(self->s->data, arg[0].s->data, self->s->n_bytes) == 0;
    else if (same && self->type != X3_JNONE)
        same = self->list == arg[0].list;
    *out = x3_jval_bool(same);
    return X3_OK;
}

/* str(self).islower() or isupper() */
static x3_status test_case(x3_jrun *run, const x3_jval *self, const char *method, x3_jval *out)
{
    x3_jstr name = {.data = method, .n_bytes = strlen(method), .n_chars = strlen(method)};
    x3_jval s, bound;

    TRY(x3_jprint_to_str(run, *self, &s));
    TRY(x3_jobject_attribute(run, s, &name, &bound));
    return x3_jobject_call(run, bound, &(x3_jargs){0}, out);
}

TEST(test_lower)
{
    (void)arg, (void)args;
    return test_case(run, self, "islower", out);
}

TEST(test_upper)
{
    (void)arg, (void)args;
    return test_case(run, self, "isupper", out);
}

static const x3_jbuiltin tests[] = {
    {"!=", test_ne, 1, 1, NULL},
    {"<", test_lt, 1, 1, NULL},
    {"<=", test_le, 1, 1, NULL},
    {"==", test_eq, 1, 1, NULL},
    {">", test_gt, 1, 1, NULL},
    {">=", test_ge, 1, 1, NULL},
    {"boolean", test_boolean, 0, 0, NULL},
    {"callable", test_callable, 0, 0, NULL},
    {"defined", test_defined, 0, 0, NULL},
    {"divisibleby", test_divisibleby, 1, 1, "num"},
    {"eq", test_eq, 1, 1, NULL},
    {"equalto", test_eq, 1, 1, NULL},
    {"escaped", test_escaped, 0, 0, NULL},
    {"even", test_even, 0, 0, NULL},
    {"false", test_false, 0, 0, NULL},
    {"filter", test_filter, 0, 0, NULL},
    {"float", test_float, 0, 0, NULL},
    {"ge", test_ge, 1, 1, NULL},
    {"greaterthan", test_gt, 1, 1, NULL},
    {"gt", test_gt, 1, 1, NULL},
    {"in", test_in, 1, 1, "seq"},
    {"integer", test_integer, 0, 0, NULL},
    {"iterable", test_iterable, 0, 0, NULL},
    {"le", test_le, 1, 1, NULL},
    {"lessthan", test_lt, 1, 1, NULL},
    {"lower", test_lower, 0, 0, NULL},
    {"lt", test_lt, 1, 1, NULL},
    {"mapping", test_mapping, 0, 0, NULL},
    {"ne", test_ne, 1, 1, NULL},
    {"none", test_none, 0, 0, NULL},
    {"number", test_number, 0, 0, NULL},
    {"odd", test_odd, 0, 0, NULL},
    {"sameas", test_sameas, 1, 1, "other"},
    {"sequence", test_sequence, 0, 0, NULL},
    {"string", test_string, 0, 0, NULL},
    {"test", test_test, 0, 0, NULL},
    {"true", test_true, 0, 0, NULL},
    {"undefined", test_undefined, 0, 0, NULL},
    {"upper", test_upper, 0, 0, NULL},
};

/* ---- globals ---- */

#define RANGE_MAX 100000 /* the sandbox's */

TEST(global_range)
{
    int64_t part[3] = {0};
    x3_jrange *range;

    (void)self, (void)args;
    for (int i = 0; i < 3; i++)
        if (arg[i].type != X3_JMISSING && !x3_jval_as_int(arg[i], &part[i]))
            return x3_jrun_fail(run, "'%s' object cannot be interpreted as an integer", x3_jval_type_name(arg[i]));
    TRY(x3_jrun_alloc(run, &range, 1, sizeof *range));
    *range = (x3_jrange){0, part[0], 1};
    if (arg[1].type != X3_JMISSING)
        *range = (x3_jrange){part[0], part[1], arg[2].type == X3_JMISSING ? 1 : part[2]};
    if (range->step == 0)
        return x3_jrun_fail(run, "range() arg 3 must not be zero");
    if (x3_jrange_length(range) > RANGE_MAX)
        return x3_jrun_fail(run, "Range too big. The sandbox blocks ranges larger than MAX_RANGE (%d).", RANGE_MAX);
    *out = (x3_jval){.type = X3_JRANGE, .range = range};
    return X3_OK;
}

/* dict(mapping or pairs, **keywords) */
static x3_status make_dict(x3_jrun *run, const x3_jargs *args, x3_jdict **out)
{
    x3_jlist *items, *pair;

    TRY(x3_jdict_new(run, out));
    if (args->n_items > 1)
        return x3_jrun_fail(run, "dict expected at most 1 argument, got %zu", args->n_items);
    if (args->n_items == 1 && args->items[0].type == X3_JDICT) {
        const x3_jdict *from = args->items[0].dict;
        for (size_t i = 0; i < from->n_items; i++)
            TRY(x3_jdict_set(run, *out, from->entries[i].key, from->entries[i].value));
    } else if (args->n_items == 1) {
        TRY(x3_jlist_of(run, args->items[0], &items));
        for (size_t i = 0; i < items->n_items; i++) {
            TRY(x3_jlist_of(run, items->items[i], &pair));
            if (pair->n_items != 2)
                return x3_jrun_fail(run, "dictionary update sequence element #%zu has length %zu; 2 is required", i,
                                    pair->n_items);
            TRY(x3_jdict_set(run, *out, pair->items[0], pair->items[1]));
        }
    }
    for (size_t i = 0; args->keywords != NULL && i < args->keywords->n_items; i++)
        TRY(x3_jdict_set(run, *out, args->keywords->entries[i].key, args->keywords->entries[i].value));
    return X3_OK;
}

TEST(global_dict)
{
    (void)self, (void)arg;
    out->type = X3_JDICT;
    return make_dict(run, args, &out->dict);
}

TEST(global_namespace)
{
    (void)self, (void)arg;
    TRY(make_dict(run, args, &out->dict));
    out->type = X3_JNAMESPACE;
    for (size_t i = 0; i < out->dict->n_items; i++) {
        x3_jval name = out->dict->entries[i].key;
        if (name.type == X3_JSTR && name.s->n_bytes > 0 && name.s->data[0] == '_')
            return x3_jrun_fail(run, "Chat templates cannot store underscore-prefixed attributes on a namespace, but "
                                "got '%.*s'. Please rename the attribute.", (int)x3_min_size(name.s->n_bytes, 100),
                                name.s->data);
    }
    return X3_OK;
}

TEST(global_cycler)
{
    x3_jlist *items;

    (void)self, (void)arg;
    if (args->n_items == 0)
        return x3_jrun_fail(run, "at least one item has to be provided");
    TRY(x3_jlist_new(run, args->n_items, &items));
    for (size_t i = 0; i < args->n_items; i++)
        TRY(x3_jlist_push(run, items, args->items[i]));
    *out = (x3_jval){.type = X3_JCYCLER, .list = items};
    return X3_OK;
}

TEST(global_joiner)
{
    x3_jjoiner *joiner;

    (void)self, (void)args;
    TRY(x3_jrun_alloc(run, &joiner, 1, sizeof *joiner));
    joiner->separator = arg[0];
    if (arg[0].type == X3_JMISSING)
        TRY(x3_jstr_literal(run, ", ", &joiner->separator));
    *out = (x3_jval){.type = X3_JJOINER, .joiner = joiner};
    return X3_OK;
}

TEST(global_lipsum)
{
    (void)self, (void)arg, (void)args, (void)out;
    return x3_jrun_refuse(run, "lipsum is not supported");
}

TEST(global_raise_exception)
{
    x3_jval message;

    (void)self, (void)args, (void)out;
    TRY(x3_jprint_to_str(run, arg[0], &message));
    return x3_jrun_fail(run, "%.*s", (int)x3_min_size(message.s->n_bytes, 1100), message.s->data);
}

/* The format as Python's datetime has it: no time zone, and %f for microseconds, which a struct tm does not have. */
static x3_status adapt_format(x3_jrun *run, const x3_jstr *s, x3_jbuf *out)
{
    for (size_t i = 0; i < s->n_bytes; i++) {
        char c = s->data[i], next = i + 1 < s->n_bytes ? s->data[i + 1] : '\0';
        if (c == '%' && (next == 'z' || next == 'Z' || next == 'f')) {
            TRY(x3_jbuf_puts(run, out, next == 'f' ? "000000" : ""));
            i++;
        } else {
            bool is_pair = c == '%' && next != '\0';
            TRY(x3_jbuf_put(run, out, s->data + i, is_pair ? 2 : 1));
            i += is_pair;
        }
    }
    return x3_jbuf_put(run, out, " ", 2); /* a blank that tells no text from a failure; and the NUL */
}

TEST(global_strftime_now)
{
    time_t clock = time(NULL);
    struct tm now;
    x3_jbuf format = {0};
    char *text;
    size_t size, n;

    (void)self, (void)args;
    if (arg[0].type != X3_JSTR)
        return x3_jrun_fail(run, "strftime() argument 1 must be str, not %s", x3_jval_type_name(arg[0]));
    if (run->now != NULL)
        now = *run->now;
    else if (localtime_r(&clock, &now) == NULL)
        return x3_jrun_fail(run, "the clock of this machine cannot be read");
    TRY(adapt_format(run, arg[0].s, &format));
    size = 64 * format.n_bytes + 64; /* no conversion of the C locale is longer */
    TRY(x3_jrun_alloc(run, &text, size, 1));
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
    n = strftime(text, size, format.data, &now);
#pragma GCC diagnostic pop
    if (n == 0)
        return x3_jrun_fail(run, "strftime_now: the format cannot be used");
    return x3_jstr_view(run, text, n - 1, out);
}

static const x3_jfunction functions[] = {
    {{"range", global_range, 1, 3, NULL}, "<function safe_range at 0x0>"},
    {{"dict", global_dict, 0, -1, NULL}, "<TemplateDict object at 0x0>"},
    {{"namespace", global_namespace, 0, -1, NULL}, "<class 'TemplateNamespace'>"},
    {{"raise_exception", global_raise_exception, 1, 1, "message"}, "<function raise_exception at 0x0>"},
    {{"strftime_now", global_strftime_now, 1, 1, "format"}, "<function strftime_now at 0x0>"},
    {{"cycler", global_cycler, 0, -1, NULL}, "<class 'jinja2.utils.Cycler'>"},
    {{"joiner", global_joiner, 0, 1, "sep"}, "<class 'jinja2.utils.Joiner'>"},
    {{"lipsum", global_lipsum, 0, -1, NULL}, "<function generate_lorem_ipsum at 0x0>"},
};

/* ---- search ---- */

static const x3_jbuiltin *search(const x3_jbuiltin *items, size_t n, const x3_jstr *name)
{
    for (size_t i = 0; i < n; i++)
        if (x3_jstr_is(name, items[i].name))
            return &items[i];
    return NULL;
}

const x3_jbuiltin *x3_jbuiltin_filter(const x3_jstr *name)
{
    const x3_jbuiltin *found = search(x3_jfilters_text, x3_jn_filters_text, name);

    return found != NULL ? found : search(x3_jfilters_sequence, x3_jn_filters_sequence, name);
}

const x3_jbuiltin *x3_jbuiltin_test(const x3_jstr *name)
{
    return search(tests, sizeof tests / sizeof tests[0], name);
}

x3_jval x3_jbuiltin_global(const x3_jstr *name)
{
    for (size_t i = 0; i < sizeof functions / sizeof functions[0]; i++)
        if (x3_jstr_is(name, functions[i].builtin.name))
            return (x3_jval){.type = X3_JFUNCTION, .function = &functions[i]};
    return (x3_jval){0};
}
