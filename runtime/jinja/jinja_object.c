#include "runtime/jinja/jinja_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Attributes, items, slices and calls: environment.getattr and getitem of jinja2's immutable sandbox, and the methods of
 * every type but str. */

typedef x3_status method(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out);

/* ---- methods ---- */

static x3_status dict_view(x3_jrun *run, const x3_jval *self, char kind, x3_jval *out)
{
    x3_jview *view;

    TRY(x3_jrun_alloc(run, &view, 1, sizeof *view));
    *view = (x3_jview){self->dict, kind};
    *out = (x3_jval){.type = X3_JVIEW, .view = view};
    return X3_OK;
}

static x3_status dict_items(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    (void)arg, (void)args;
    return dict_view(run, self, 'i', out);
}

static x3_status dict_keys(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    (void)arg, (void)args;
    return dict_view(run, self, 'k', out);
}

static x3_status dict_values(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    (void)arg, (void)args;
    return dict_view(run, self, 'v', out);
}

static x3_status dict_get(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    (void)args;
    TRY(x3_jdict_get(run, self->dict, arg[0], out));
    if (out->type == X3_JMISSING)
        *out = arg[1].type == X3_JMISSING ? x3_jval_none() : arg[1];
    return X3_OK;
}

/* Nothing that a template holds can be changed, so a copy is the thing itself. */
static x3_status copy(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    (void)run, (void)arg, (void)args;
    *out = *self;
    return X3_OK;
}

static x3_status dict_fromkeys(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args,
                               x3_jval *out)
{
    x3_jlist *keys;
    x3_jdict *dict;

    (void)self, (void)args;
    TRY(x3_jlist_of(run, arg[0], &keys));
    TRY(x3_jdict_new(run, &dict));
    for (size_t i = 0; i < keys->n_items; i++)
        TRY(x3_jdict_set(run, dict, keys->items[i], arg[1].type == X3_JMISSING ? x3_jval_none() : arg[1]));
    *out = x3_jval_dict(dict);
    return X3_OK;
}

static x3_status list_count(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    x3_jlist *items;
    int64_t n = 0;
    bool equal;

    (void)args;
    TRY(x3_jlist_of(run, *self, &items));
    for (size_t i = 0; i < items->n_items; i++) {
        TRY(x3_jval_equal(run, items->items[i], arg[0], &equal));
        n += equal;
    }
    *out = x3_jval_int(n);
    return X3_OK;
}

static x3_status list_index(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    int64_t first, end, stride;
    x3_jlist *items;
    bool equal;
    size_t n;

    (void)args;
    TRY(x3_jlist_of(run, *self, &items));
    TRY(x3_jslice_indices(run, arg[1], arg[2], (x3_jval){0}, items->n_items, &first, &end, &stride, &n));
    for (size_t i = (size_t)first; i < (size_t)first + n; i++) {
        TRY(x3_jval_equal(run, items->items[i], arg[0], &equal));
        *out = x3_jval_int((int64_t)i);
        if (equal)
            return X3_OK;
    }
    return x3_jrun_fail(run, "%s.index(x): x not in %s", x3_jval_type_name(*self), x3_jval_type_name(*self));
}

static x3_status int_bit_length(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args,
                                x3_jval *out)
{
    int64_t i, n = 0;

    (void)run, (void)arg, (void)args;
    x3_jval_as_int(*self, &i);
    for (uint64_t magnitude = i < 0 ? 0 - (uint64_t)i : (uint64_t)i; magnitude > 0; magnitude >>= 1)
        n++;
    *out = x3_jval_int(n);
    return X3_OK;
}

static x3_status float_is_integer(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args,
                                  x3_jval *out)
{
    (void)run, (void)arg, (void)args;
    *out = x3_jval_bool(isfinite(self->f) && self->f == floor(self->f));
    return X3_OK;
}

static x3_status loop_cycle(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    (void)arg;
    if (args->n_items == 0)
        return x3_jrun_fail(run, "no items for cycling given");
    *out = args->items[(size_t)self->loop->index0 % args->n_items];
    return X3_OK;
}

static x3_status loop_changed(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args,
                              x3_jval *out)
{
    x3_jlist *now;
    bool equal = false;

    (void)arg;
    TRY(x3_jlist_new(run, args->n_items, &now));
    for (size_t i = 0; i < args->n_items; i++)
        TRY(x3_jlist_push(run, now, args->items[i]));
    if (self->loop->changed.type != X3_JMISSING)
        TRY(x3_jval_equal(run, self->loop->changed, x3_jval_tuple(now), &equal));
    self->loop->changed = x3_jval_tuple(now);
    *out = x3_jval_bool(!equal);
    return X3_OK;
}

static x3_status cycler_next(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    (void)run, (void)arg, (void)args;
    *out = self->list->items[self->list->cycle];
    self->list->cycle = (self->list->cycle + 1) % self->list->n_items;
    return X3_OK;
}

static x3_status cycler_reset(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    (void)run, (void)arg, (void)args;
    self->list->cycle = 0;
    *out = x3_jval_none();
    return X3_OK;
}

static x3_status not_supported(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)
{
    (void)arg, (void)args, (void)out;
    return x3_jrun_refuse(run, "this method of a %s is not supported", x3_jval_type_name(*self));
}

#define COUNT(a) (sizeof(a) / sizeof(a)[0])

static const x3_jbuiltin dict_methods[] = {
    {"copy", copy, 0, 0, NULL},          {"fromkeys", dict_fromkeys, 1, 2, NULL}, {"get", dict_get, 1, 2, NULL},
    {"items", dict_items, 0, 0, NULL},   {"keys", dict_keys, 0, 0, NULL},         {"values", dict_values, 0, 0, NULL},
};
static const x3_jbuiltin list_methods[] = {
    {"copy", copy, 0, 0, NULL}, {"count", list_count, 1, 1, NULL}, {"index", list_index, 1, 3, NULL}};
static const x3_jbuiltin tuple_methods[] = {{"count", list_count, 1, 1, NULL}, {"index", list_index, 1, 3, NULL}};
static const x3_jbuiltin view_methods[] = {{"isdisjoint", not_supported, 0, -1, NULL}};
static const x3_jbuiltin int_methods[] = {
    {"as_integer_ratio", not_supported, 0, -1, NULL}, {"bit_count", not_supported, 0, -1, NULL},
    {"bit_length", int_bit_length, 0, 0, NULL},       {"conjugate", copy, 0, 0, NULL},
    {"from_bytes", not_supported, 0, -1, NULL},       {"to_bytes", not_supported, 0, -1, NULL}};
static const x3_jbuiltin float_methods[] = {
    {"as_integer_ratio", not_supported, 0, -1, NULL}, {"conjugate", copy, 0, 0, NULL},
    {"fromhex", not_supported, 0, -1, NULL},          {"hex", not_supported, 0, -1, NULL},
    {"is_integer", float_is_integer, 0, 0, NULL}};
static const x3_jbuiltin loop_methods[] = {{"changed", loop_changed, 0, -1, NULL}, {"cycle", loop_cycle, 0, -1, NULL}};
static const x3_jbuiltin cycler_methods[] = {{"next", cycler_next, 0, 0, NULL}, {"reset", cycler_reset, 0, 0, NULL}};
static const x3_jbuiltin iter_methods[] = {{"close", not_supported, 0, -1, NULL}, {"send", not_supported, 0, -1, NULL},
                                           {"throw", not_supported, 0, -1, NULL}};

static const struct {
    const x3_jbuiltin *items;
    size_t n_items;
    const char *unsafe; /* methods that change the value: the sandbox gives an undefined in their place */
} methods_of[X3_JN_TYPES] = {
    [X3_JDICT] = {dict_methods, COUNT(dict_methods), " clear pop popitem setdefault update "},
    [X3_JLIST] = {list_methods, COUNT(list_methods), " append clear extend insert pop remove reverse sort "},
    [X3_JTUPLE] = {tuple_methods, COUNT(tuple_methods), NULL},
    [X3_JRANGE] = {tuple_methods, COUNT(tuple_methods), NULL},
    [X3_JVIEW] = {view_methods, COUNT(view_methods), NULL},
    [X3_JINT] = {int_methods, COUNT(int_methods), NULL},
    [X3_JBOOL] = {int_methods, COUNT(int_methods), NULL},
    [X3_JFLOAT] = {float_methods, COUNT(float_methods), NULL},
    [X3_JLOOP] = {loop_methods, COUNT(loop_methods), NULL},
    [X3_JCYCLER] = {cycler_methods, COUNT(cycler_methods), NULL},
    [X3_JITER] = {iter_methods, COUNT(iter_methods), NULL},
};

static const x3_jbuiltin *find_method(x3_jval v, const x3_jstr *name)
{
    const x3_jbuiltin *items = v.type == X3_JSTR ? x3_jstr_methods : methods_of[v.type].items;
    size_t n = v.type == X3_JSTR ? x3_jn_str_methods : methods_of[v.type].n_items;

    for (size_t i = 0; i < n; i++)
        if (x3_jstr_is(name, items[i].name))
            return &items[i];
    return NULL;
}

/* ---- attributes that are no methods ---- */

static x3_status loop_length(x3_jrun *run, x3_jloop *loop, int64_t *out)
{
    x3_jlist *rest;
    size_t n;

    if (loop->length < 0 && x3_jval_length(loop->iterable, &n))
        loop->length = (int64_t)n;
    if (loop->length < 0) { /* a generator: walked to its end */
        TRY(x3_jlist_of(run, x3_jval_iter(loop->iter), &rest));
        TRY(x3_jiter_open(run, x3_jval_list(rest), &loop->iter));
        loop->length = (int64_t)rest->n_items + loop->index0 + 1 + (loop->after.type != X3_JMISSING);
    }
    *out = loop->length;
    return X3_OK;
}

static x3_status loop_peek(x3_jrun *run, x3_jloop *loop)
{
    x3_jval next;
    bool more;

    if (loop->after.type != X3_JMISSING)
        return X3_OK;
    TRY(x3_jiter_next(run, loop->iter, &next, &more));
    if (more)
        loop->after = next;
    return X3_OK;
}

static x3_status loop_attribute(x3_jrun *run, x3_jloop *loop, const x3_jstr *name, x3_jval *out)
{
    static const char *const numbers[] = {"index", "index0", "depth", "depth0", "length", "revindex", "revindex0"};
    int64_t length = 0, value[7];
    size_t i = 0;

    while (i < 7 && !x3_jstr_is(name, numbers[i]))
        i++;
    if (i < 7) {
        if (i >= 4)
            TRY(loop_length(run, loop, &length));
        value[0] = loop->index0 + 1;
        value[1] = loop->index0;
        value[2] = 1;
        value[3] = 0;
        value[4] = length;
        value[5] = length - loop->index0;
        value[6] = length - loop->index0 - 1;
        *out = x3_jval_int(value[i]);
    } else if (x3_jstr_is(name, "first")) {
        *out = x3_jval_bool(loop->index0 == 0);
    } else if (x3_jstr_is(name, "last")) {
        TRY(loop_peek(run, loop));
        *out = x3_jval_bool(loop->after.type == X3_JMISSING);
    } else if (x3_jstr_is(name, "previtem")) {
        *out = loop->before;
        if (loop->index0 == 0)
            return x3_jundefined_hint(run, "there is no previous item", out);
    } else if (x3_jstr_is(name, "nextitem")) {
        TRY(loop_peek(run, loop));
        *out = loop->after;
        if (out->type == X3_JMISSING)
            return x3_jundefined_hint(run, "there is no next item", out);
    }
    return X3_OK;
}

static x3_status macro_attribute(x3_jrun *run, const x3_jcode *code, const x3_jstr *name, x3_jval *out)
{
    x3_jlist *names;

    if (x3_jstr_is(name, "name")) {
        *out = code->name == NULL ? x3_jval_none() : (x3_jval){.type = X3_JSTR, .s = &code->name->text};
    } else if (x3_jstr_is(name, "arguments")) {
        TRY(x3_jlist_new(run, code->n_params, &names));
        for (const x3_jnode *param = code->params; param != NULL; param = param->next)
            TRY(x3_jlist_push(run, names, (x3_jval){.type = X3_JSTR, .s = &param->name->text}));
        *out = x3_jval_tuple(names);
    } else if (x3_jstr_is(name, "catch_kwargs")) {
        *out = x3_jval_bool(code->takes_kwargs);
    } else if (x3_jstr_is(name, "catch_varargs")) {
        *out = x3_jval_bool(code->takes_varargs);
    } else if (x3_jstr_is(name, "caller")) {
        *out = x3_jval_bool(code->takes_caller);
    } else if (x3_jstr_is(name, "explicit_caller")) {
        *out = x3_jval_bool(code->has_explicit_caller);
    }
    return X3_OK;
}

static void number_attribute(x3_jval v, const x3_jstr *name, x3_jval *out)
{
    bool is_float = v.type == X3_JFLOAT;
    int64_t i = 0;

    x3_jval_as_int(v, &i);
    if (x3_jstr_is(name, "real") || (!is_float && x3_jstr_is(name, "numerator")))
        *out = is_float ? v : x3_jval_int(i);
    else if (x3_jstr_is(name, "imag"))
        *out = is_float ? x3_jval_float(0) : x3_jval_int(0);
    else if (!is_float && x3_jstr_is(name, "denominator"))
        *out = x3_jval_int(1);
}

/* getattr(v, name): *out stays MISSING when there is none. */
static x3_status get_attribute(x3_jrun *run, x3_jval v, const x3_jstr *name, x3_jval *out)
{
    const x3_jbuiltin *found;
    x3_jbound *bound;

    *out = (x3_jval){0};
    if (v.type == X3_JNAMESPACE) {
        *out = x3_jdict_find(v.dict, name);
        return X3_OK;
    }
    if (v.type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, v);
    found = find_method(v, name);
    if (found != NULL) {
        TRY(x3_jrun_alloc(run, &bound, 1, sizeof *bound));
        *bound = (x3_jbound){found, v};
        *out = (x3_jval){.type = X3_JBOUND, .bound = bound};
    } else if (v.type == X3_JLOOP) {
        return loop_attribute(run, v.loop, name, out);
    } else if (v.type == X3_JMACRO) {
        return macro_attribute(run, v.macro->code, name, out);
    } else if (v.type == X3_JINT || v.type == X3_JBOOL || v.type == X3_JFLOAT) {
        number_attribute(v, name, out);
    } else if (v.type == X3_JTUPLE && v.list->is_group) {
        if (x3_jstr_is(name, "grouper") || x3_jstr_is(name, "list"))
            *out = v.list->items[x3_jstr_is(name, "list")];
    } else if (v.type == X3_JCYCLER && x3_jstr_is(name, "current")) {
        *out = v.list->items[v.list->cycle];
    } else if (v.type == X3_JCYCLER && (x3_jstr_is(name, "pos") || x3_jstr_is(name, "items"))) {
        *out = name->data[0] == 'p' ? x3_jval_int((int64_t)v.list->cycle) : x3_jval_tuple(v.list);
    } else if (v.type == X3_JRANGE && (x3_jstr_is(name, "start") || x3_jstr_is(name, "stop"))) {
        *out = x3_jval_int(name->n_bytes == 5 ? v.range->start : v.range->stop);
    } else if (v.type == X3_JRANGE && x3_jstr_is(name, "step")) {
        *out = x3_jval_int(v.range->step);
    } else if (v.type == X3_JJOINER && (x3_jstr_is(name, "sep") || x3_jstr_is(name, "used"))) {
        *out = name->data[0] == 's' ? v.joiner->separator : x3_jval_bool(v.joiner->is_used);
    } else if (v.type == X3_JFUNCTION && x3_jstr_is(name, "fromkeys") &&
               strcmp(v.function->builtin.name, "dict") == 0) {
        static const x3_jbuiltin fromkeys = {"fromkeys", dict_fromkeys, 1, 2, NULL};
        TRY(x3_jrun_alloc(run, &bound, 1, sizeof *bound));
        *bound = (x3_jbound){&fromkeys, v};
        *out = (x3_jval){.type = X3_JBOUND, .bound = bound};
    }
    return X3_OK;
}

/* Attributes that the sandbox hides. */
static bool is_unsafe(x3_jval v, const x3_jstr *name)
{
    static const char dunders[] = " __class__ __delattr__ __dir__ __doc__ __eq__ __format__ __ge__ __getattribute__ "
                                  "__gt__ __hash__ __init__ __init_subclass__ __le__ __lt__ __ne__ __new__ __reduce__ "
                                  "__reduce_ex__ __repr__ __setattr__ __sizeof__ __str__ __subclasshook__ ";
    char word[40];

    if (name->n_bytes > 30 || v.type == X3_JNAMESPACE)
        return false;
    memcpy(word + 1, name->data, name->n_bytes);
    word[0] = word[name->n_bytes + 1] = ' ';
    word[name->n_bytes + 2] = '\0';
    if (strncmp(word, " __", 3) == 0)
        return strstr(dunders, word) != NULL;
    return methods_of[v.type].unsafe != NULL && strstr(methods_of[v.type].unsafe, word) != NULL;
}

static x3_status unsafe_undefined(x3_jrun *run, x3_jval v, const x3_jstr *name, x3_jval *out)
{
    char *hint;

    TRY(x3_jrun_alloc(run, &hint, name->n_bytes + 100, 1));
    sprintf(hint, "access to attribute '%.*s' of '%s' object is unsafe.", (int)name->n_bytes, name->data,
            x3_jval_type_name(v));
    return x3_jundefined_hint(run, hint, out);
}

/* ---- items ---- */

/* v[key]: *out stays MISSING where Python raises TypeError or LookupError. */
static x3_status get_item(x3_jrun *run, x3_jval v, x3_jval key, x3_jval *out)
{
    int64_t at;
    size_t n;

    *out = (x3_jval){0};
    if (v.type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, v);
    if (v.type == X3_JDICT) {
        if (key.type == X3_JSTR)
            *out = x3_jdict_find(v.dict, key.s);
        else if (key.type != X3_JLIST && key.type != X3_JDICT && key.type != X3_JVIEW && key.type != X3_JTUPLE)
            TRY(x3_jdict_get(run, v.dict, key, out));
        return X3_OK;
    }
    if ((v.type != X3_JSTR && v.type != X3_JLIST && v.type != X3_JTUPLE && v.type != X3_JRANGE) ||
        !x3_jval_as_int(key, &at) || !x3_jval_length(v, &n))
        return X3_OK;
    at += at < 0 ? (int64_t)n : 0;
    if (at < 0 || (uint64_t)at >= n)
        return X3_OK;
    if (v.type == X3_JSTR)
        return x3_jobject_slice(run, v, x3_jval_int(at), x3_jval_int(at + 1), (x3_jval){0}, out);
    *out = v.type == X3_JRANGE ? x3_jval_int(v.range->start + at * v.range->step) : v.list->items[at];
    return X3_OK;
}

x3_status x3_jobject_attribute(x3_jrun *run, x3_jval v, const x3_jstr *name, x3_jval *out)
{
    x3_jval key = {.type = X3_JSTR, .s = name};

    if (v.type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, v);
    if (is_unsafe(v, name))
        return unsafe_undefined(run, v, name, out);
    TRY(get_attribute(run, v, name, out));
    if (out->type == X3_JMISSING)
        TRY(get_item(run, v, key, out));
    return out->type != X3_JMISSING ? X3_OK : x3_jundefined_member(run, v, key, out);
}

x3_status x3_jobject_only_attribute(x3_jrun *run, x3_jval v, const x3_jstr *name, x3_jval *out)
{
    if (is_unsafe(v, name))
        return unsafe_undefined(run, v, name, out);
    TRY(get_attribute(run, v, name, out));
    return out->type != X3_JMISSING ? X3_OK
                                    : x3_jundefined_member(run, v, (x3_jval){.type = X3_JSTR, .s = name}, out);
}

x3_status x3_jobject_item(x3_jrun *run, x3_jval v, x3_jval key, x3_jval *out)
{
    TRY(get_item(run, v, key, out));
    if (out->type == X3_JMISSING && key.type == X3_JSTR) {
        if (is_unsafe(v, key.s))
            return unsafe_undefined(run, v, key.s, out);
        TRY(get_attribute(run, v, key.s, out));
    }
    return out->type != X3_JMISSING ? X3_OK : x3_jundefined_member(run, v, key, out);
}

static x3_status slice_range(x3_jrun *run, const x3_jrange *r, int64_t first, int64_t end, int64_t stride, x3_jval *out)
{
    x3_jrange *range;

    TRY(x3_jrun_alloc(run, &range, 1, sizeof *range));
    *range = (x3_jrange){.start = r->start + first * r->step, .stop = r->start + end * r->step};
    if (__builtin_mul_overflow(stride, r->step, &range->step))
        return x3_jrun_fail(run, "a number of more than 64 bits");
    *out = (x3_jval){.type = X3_JRANGE, .range = range};
    return X3_OK;
}

static x3_status slice_text(x3_jrun *run, const x3_jstr *s, int64_t first, int64_t stride, size_t n, x3_jval *out)
{
    x3_jbuf buf = {0};

    if (n == 0 || stride == 1) {
        size_t from = x3_jtext_offset(s, n == 0 ? 0 : (size_t)first);
        size_t to = n == 0 ? from : x3_jtext_offset(s, (size_t)first + n);
        TRY(x3_jrun_steps(run, to / 64));
        TRY(x3_jstr_view(run, s->data + from, to - from, out));
    } else {
        x3_jlist *chars;
        TRY(x3_jlist_of(run, (x3_jval){.type = X3_JSTR, .s = s}, &chars));
        for (size_t i = 0; i < n; i++) {
            const x3_jstr *c = chars->items[first + (int64_t)i * stride].s;
            TRY(x3_jbuf_put(run, &buf, c->data, c->n_bytes));
        }
        TRY(x3_jstr_of(run, &buf, out));
    }
    return s->is_markup ? x3_jstr_mark(run, *out, true, out) : X3_OK;
}

x3_status x3_jobject_slice(x3_jrun *run, x3_jval v, x3_jval start, x3_jval stop, x3_jval step, x3_jval *out)
{
    int64_t first, end, stride;
    size_t length, n;
    x3_jlist *list;

    if (v.type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, v);
    if (v.type == X3_JDICT)
        return x3_jrun_fail(run, "unhashable type: 'slice'");
    if ((v.type != X3_JSTR && v.type != X3_JLIST && v.type != X3_JTUPLE && v.type != X3_JRANGE) ||
        !x3_jval_length(v, &length))
        return x3_jrun_fail(run, "'%s' object is not subscriptable", x3_jval_type_name(v));
    TRY(x3_jslice_indices(run, start, stop, step, length, &first, &end, &stride, &n));
    if (v.type == X3_JSTR)
        return slice_text(run, v.s, first, stride, n, out);
    if (v.type == X3_JRANGE)
        return slice_range(run, v.range, first, end, stride, out);
    TRY(x3_jrun_steps(run, n));
    TRY(x3_jlist_new(run, n, &list));
    for (size_t i = 0; i < n; i++)
        TRY(x3_jlist_push(run, list, v.list->items[first + (int64_t)i * stride]));
    *out = (x3_jval){.type = v.type, .list = list};
    return X3_OK;
}

/* ---- calls ---- */

/* Place of `name` among the space-separated parameters, or -1. */
static int parameter_at(const char *parameters, const x3_jstr *name)
{
    int at = 0;

    for (const char *p = parameters; p != NULL && *p != '\0'; p += strspn(p, " "), at++) {
        size_t n = strcspn(p, " ");
        if (n == name->n_bytes && memcmp(p, name->data, n) == 0)
            return at;
        p += n;
    }
    return -1;
}

x3_status x3_jbuiltin_call(x3_jrun *run, const x3_jbuiltin *b, const x3_jval *self, const x3_jargs *args, x3_jval *out)
{
    x3_jval arg[X3_JPARAMETERS_MAX] = {{0}};
    size_t n_keywords = args->keywords == NULL ? 0 : args->keywords->n_items;

    if (b->max < 0)
        return b->call(run, self, arg, args, out);
    if (args->n_items > (size_t)b->max)
        return x3_jrun_fail(run, "%s() takes at most %d argument%s (%zu given)", b->name, b->max, b->max == 1 ? "" : "s",
                            args->n_items);
    for (size_t i = 0; i < args->n_items; i++)
        arg[i] = args->items[i];
    for (size_t i = 0; i < n_keywords; i++) {
        const x3_jstr *name = args->keywords->entries[i].key.s;
        int at = parameter_at(b->parameters, name);
        if (at < 0 || arg[at].type != X3_JMISSING)
            return x3_jrun_fail(run, "%s() got %s argument '%.*s'", b->name,
                                at < 0 ? "an unexpected keyword" : "multiple values for",
                                (int)x3_min_size(name->n_bytes, 100), name->data);
        arg[at] = args->keywords->entries[i].value;
    }
    for (int i = 0; i < b->min; i++)
        if (arg[i].type == X3_JMISSING)
            return x3_jrun_fail(run, "%s() needs %d argument%s", b->name, b->min, b->min == 1 ? "" : "s");
    return b->call(run, self, arg, args, out);
}

bool x3_jval_is_callable(x3_jval v)
{
    return v.type == X3_JMACRO || v.type == X3_JBOUND || v.type == X3_JFUNCTION || v.type == X3_JUNDEFINED ||
           v.type == X3_JLOOP || v.type == X3_JJOINER;
}

x3_status x3_jobject_call(x3_jrun *run, x3_jval callee, const x3_jargs *args, x3_jval *out)
{
    if (callee.type == X3_JMACRO)
        return x3_jexec_macro(run, callee.macro, args, out);
    if (callee.type == X3_JBOUND)
        return x3_jbuiltin_call(run, callee.bound->method, &callee.bound->self, args, out);
    if (callee.type == X3_JFUNCTION)
        return x3_jbuiltin_call(run, &callee.function->builtin, NULL, args, out);
    if (callee.type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, callee);
    if (callee.type == X3_JLOOP)
        return x3_jrun_fail(run, "The loop must have the 'recursive' marker to be called recursively.");
    if (callee.type == X3_JJOINER && args->n_items == 0 && args->keywords == NULL) {
        *out = callee.joiner->separator;
        if (!callee.joiner->is_used)
            TRY(x3_jstr_literal(run, "", out));
        callee.joiner->is_used = true;
        return X3_OK;
    }
    return x3_jrun_fail(run, "'%s' object is not callable", x3_jval_type_name(callee));
}
