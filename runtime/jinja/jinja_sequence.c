#include "runtime/jinja/jinja_internal.h"

#include <string.h>

#include "runtime/tokenizer/unicode.h"

/* Filters of lists and other things that can be walked. */

#define FILTER(name)                                                                                            \
    static x3_status name(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out)

/* ---- attributes by path ---- */

/* "a.b.0": items, whole numbers for digits. No path: the item itself. */
typedef struct path {
    x3_jlist *parts;
    x3_jval fallback; /* for what is undefined on the way; MISSING or None: left undefined */
} path;

static x3_status push_part(x3_jrun *run, x3_jlist *parts, const char *text, size_t n)
{
    bool digits = n > 0;
    x3_jval part;
    int64_t i;
    bool ok = false;

    for (size_t k = 0; k < n; k++)
        digits = digits && text[k] >= '0' && text[k] <= '9';
    TRY(x3_jstr_view(run, text, n, &part));
    if (digits) {
        TRY(x3_jparse_int(run, part.s, 10, &i, &ok));
        part = x3_jval_int(i);
    }
    return x3_jlist_push(run, parts, part);
}

static x3_status make_path(x3_jrun *run, x3_jval attribute, x3_jval fallback, path *out)
{
    *out = (path){.fallback = fallback};
    TRY(x3_jlist_new(run, 2, &out->parts));
    if (attribute.type == X3_JMISSING || attribute.type == X3_JNONE)
        return X3_OK;
    if (attribute.type != X3_JSTR)
        return x3_jlist_push(run, out->parts, attribute);
    const x3_jstr *s = attribute.s;
    for (size_t at = 0, end; at <= s->n_bytes; at = end + 1) {
        const char *dot = memchr(s->data + at, '.', s->n_bytes - at);
        end = dot == NULL ? s->n_bytes : (size_t)(dot - s->data);
        TRY(push_part(run, out->parts, s->data + at, end - at));
    }
    return X3_OK;
}

static x3_status follow(x3_jrun *run, const path *p, x3_jval item, x3_jval *out)
{
    bool has_fallback = p->fallback.type != X3_JMISSING && p->fallback.type != X3_JNONE;

    for (size_t i = 0; i < p->parts->n_items; i++) {
        TRY(x3_jobject_item(run, item, p->parts->items[i], &item));
        if (has_fallback && item.type == X3_JUNDEFINED)
            item = p->fallback;
    }
    *out = item;
    return X3_OK;
}

/* The value to sort, compare or count by: small letters unless case counts. */
static x3_status key_of(x3_jrun *run, const path *p, bool case_sensitive, x3_jval item, x3_jval *out)
{
    TRY(follow(run, p, item, out));
    return out->type == X3_JSTR && !case_sensitive ? x3_jtext_case(run, out->s, 'l', out) : X3_OK;
}

static x3_status keys_of(x3_jrun *run, const path *p, bool case_sensitive, const x3_jlist *items, x3_jlist **out)
{
    x3_jval key;

    TRY(x3_jlist_new(run, items->n_items, out));
    for (size_t i = 0; i < items->n_items; i++) {
        TRY(key_of(run, p, case_sensitive, items->items[i], &key));
        TRY(x3_jlist_push(run, *out, key));
    }
    return X3_OK;
}

/* ---- sorting ---- */

typedef struct sorter {
    x3_jrun *run;
    x3_jval *items, *keys, *spare_items, *spare_keys; /* keys may be items */
    bool reverse;
} sorter;

static x3_status merge(sorter *s, size_t from, size_t middle, size_t to)
{
    size_t i = from, k = middle, n = 0;
    bool take_right;

    while (i < middle || k < to) {
        take_right = i == middle;
        if (i < middle && k < to) /* the left one stays first when they are equal */
            TRY(x3_jval_compare(s->run, '<', s->keys[s->reverse ? i : k], s->keys[s->reverse ? k : i], &take_right));
        TRY(x3_jrun_steps(s->run, 1));
        size_t pick = take_right ? k++ : i++;
        s->spare_items[n] = s->items[pick];
        s->spare_keys[n++] = s->keys[pick];
    }
    memcpy(s->items + from, s->spare_items, n * sizeof *s->items);
    memcpy(s->keys + from, s->spare_keys, n * sizeof *s->keys);
    return X3_OK;
}

x3_status x3_jlist_sort(x3_jrun *run, x3_jval *items, x3_jval *keys, size_t n, bool reverse)
{
    sorter s = {.run = run, .items = items, .keys = keys == NULL ? items : keys, .reverse = reverse};

    if (n < 2)
        return X3_OK;
    TRY(x3_jrun_alloc(run, &s.spare_items, n, sizeof *s.spare_items));
    TRY(x3_jrun_alloc(run, &s.spare_keys, n, sizeof *s.spare_keys));
    for (size_t width = 1; width < n; width *= 2)
        for (size_t from = 0; from + width < n; from += 2 * width)
            TRY(merge(&s, from, from + width, x3_min_size(from + 2 * width, n)));
    return X3_OK;
}

/* A list of keys for each item, for "a,b"; of one, for none. Lists, because two that are equal need no order. */
static x3_status multi_keys(x3_jrun *run, x3_jval attribute, bool case_sensitive, const x3_jlist *items, x3_jlist **out)
{
    static const x3_jstr comma = {",", 1, 1, false, NULL};
    x3_jlist *names, *columns[16], *row;

    if (attribute.type == X3_JSTR) {
        TRY(x3_jtext_split(run, attribute.s, &comma, -1, false, &names));
    } else {
        TRY(x3_jlist_new(run, 1, &names));
        TRY(x3_jlist_push(run, names, attribute));
    }
    if (names->n_items > sizeof columns / sizeof columns[0])
        return x3_jrun_fail(run, "sort by more than %zu attributes", sizeof columns / sizeof columns[0]);
    for (size_t i = 0; i < names->n_items; i++) {
        path p;
        TRY(make_path(run, names->items[i], (x3_jval){0}, &p));
        TRY(keys_of(run, &p, case_sensitive, items, &columns[i]));
    }
    TRY(x3_jlist_new(run, items->n_items, out));
    for (size_t k = 0; k < items->n_items; k++) {
        TRY(x3_jlist_new(run, names->n_items, &row));
        for (size_t i = 0; i < names->n_items; i++)
            TRY(x3_jlist_push(run, row, columns[i]->items[k]));
        TRY(x3_jlist_push(run, *out, x3_jval_list(row)));
    }
    return X3_OK;
}

FILTER(filter_sort)
{
    x3_jlist *items, *keys;

    (void)args;
    TRY(x3_jlist_of(run, *self, &items));
    TRY(multi_keys(run, arg[2], x3_jval_truth(arg[1]), items, &keys));
    TRY(x3_jlist_sort(run, items->items, keys->items, items->n_items, x3_jval_truth(arg[0])));
    *out = x3_jval_list(items);
    return X3_OK;
}

FILTER(filter_dictsort)
{
    bool by_value = arg[1].type == X3_JSTR && x3_jstr_is(arg[1].s, "value");
    x3_jlist *items, *keys;
    x3_jval pair;
    path p;

    (void)args;
    if (!by_value && arg[1].type != X3_JMISSING && !(arg[1].type == X3_JSTR && x3_jstr_is(arg[1].s, "key")))
        return x3_jrun_fail(run, "You can only sort by either \"key\" or \"value\"");
    if (self->type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, *self);
    if (self->type != X3_JDICT)
        return x3_jrun_fail(run, "'%s' object has no attribute 'items'", x3_jval_type_name(*self));
    TRY(x3_jlist_new(run, self->dict->n_items, &items));
    for (size_t i = 0; i < self->dict->n_items; i++) {
        TRY(x3_jtuple_pair(run, self->dict->entries[i].key, self->dict->entries[i].value, &pair));
        TRY(x3_jlist_push(run, items, pair));
    }
    TRY(make_path(run, x3_jval_int(by_value), (x3_jval){0}, &p));
    TRY(keys_of(run, &p, x3_jval_truth(arg[0]), items, &keys));
    TRY(x3_jlist_sort(run, items->items, keys->items, items->n_items, x3_jval_truth(arg[2])));
    *out = x3_jval_list(items);
    return X3_OK;
}

/* min and max: the first of the best. */
static x3_status best(x3_jrun *run, const x3_jval *self, const x3_jval *arg, uint32_t op, x3_jval *out)
{
    x3_jlist *items, *keys;
    size_t found = 0;
    bool better;
    path p;

    TRY(x3_jlist_of(run, *self, &items));
    if (items->n_items == 0)
        return x3_jundefined_hint(run, "No aggregated item, sequence was empty.", out);
    TRY(make_path(run, arg[1], (x3_jval){0}, &p));
    TRY(keys_of(run, &p, x3_jval_truth(arg[0]), items, &keys));
    for (size_t i = 1; i < items->n_items; i++) {
        TRY(x3_jval_compare(run, op, keys->items[i], keys->items[found], &better));
        found = better ? i : found;
    }
    *out = items->items[found];
    return X3_OK;
}

FILTER(filter_min)
{
    (void)args;
    return best(run, self, arg, '<', out);
}

FILTER(filter_max)
{
    (void)args;
    return best(run, self, arg, '>', out);
}

FILTER(filter_groupby)
{
    x3_jlist *items, *keys, *groups, *members = NULL;
    bool case_sensitive = x3_jval_truth(arg[2]), same = false;
    x3_jval group, label;
    path p;

    (void)args;
    TRY(x3_jlist_of(run, *self, &items));
    TRY(make_path(run, arg[0], arg[1], &p));
    TRY(keys_of(run, &p, case_sensitive, items, &keys));
    TRY(x3_jlist_sort(run, items->items, keys->items, items->n_items, false));
    TRY(x3_jlist_new(run, 0, &groups));
    for (size_t i = 0; i < items->n_items; i++) {
        if (i > 0)
            TRY(x3_jval_equal(run, keys->items[i], keys->items[i - 1], &same));
        if (!same) {
            TRY(x3_jlist_new(run, 1, &members));
            label = keys->items[i];
            if (!case_sensitive)
                TRY(follow(run, &p, items->items[i], &label));
            TRY(x3_jtuple_pair(run, label, x3_jval_list(members), &group));
            group.list->is_group = true;
            TRY(x3_jlist_push(run, groups, group));
        }
        TRY(x3_jlist_push(run, members, items->items[i]));
    }
    *out = x3_jval_list(groups);
    return X3_OK;
}

/* ---- generators ---- */

/* map, select and their kin: what to do with each item. */
typedef struct worker {
    const x3_jbuiltin *builtin; /* a filter or a test; NULL: the attribute, or its truth */
    x3_jargs args;
    path path;
    bool negate;
    x3_jdict *seen; /* unique */
    bool case_sensitive;
} worker;

/* The next item of what the filter was applied to, which is looked at only now. */
static x3_status next_source(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    if (it->inner == NULL)
        TRY(x3_jiter_open(run, it->source, &it->inner));
    return x3_jiter_next(run, it->inner, out, more);
}

static x3_status next_mapped(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    const worker *w = it->state;
    x3_jval item;

    TRY(next_source(run, it, &item, more));
    if (!*more)
        return X3_OK;
    if (w->builtin == NULL)
        return follow(run, &w->path, item, out);
    return x3_jbuiltin_call(run, w->builtin, &item, &w->args, out);
}

static x3_status next_selected(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    const worker *w = it->state;
    x3_jval value, passes;

    do {
        TRY(next_source(run, it, out, more));
        if (!*more)
            return X3_OK;
        TRY(follow(run, &w->path, *out, &value));
        passes = value;
        if (w->builtin != NULL)
            TRY(x3_jbuiltin_call(run, w->builtin, &value, &w->args, &passes));
    } while (x3_jval_truth(passes) == w->negate);
    return X3_OK;
}

static x3_status next_unique(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    const worker *w = it->state;
    x3_jval key, seen;

    do {
        TRY(next_source(run, it, out, more));
        if (!*more)
            return X3_OK;
        TRY(key_of(run, &w->path, w->case_sensitive, *out, &key));
        TRY(x3_jdict_get(run, w->seen, key, &seen));
    } while (seen.type != X3_JMISSING);
    return x3_jdict_set(run, w->seen, key, x3_jval_none());
}

static x3_status next_of_none(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    (void)run, (void)it, (void)out;
    *more = false;
    return X3_OK;
}

/* A generator over `value`; nothing for what is false, as these filters have it. */
static x3_status generate(x3_jrun *run, x3_jval value, bool skip_false, const worker *from,
                          x3_status (*next)(x3_jrun *, x3_jiter *, x3_jval *, bool *), x3_jval *out)
{
    bool empty = skip_false && !x3_jval_truth(value);
    x3_jiter *it;
    worker *w;

    TRY(x3_jrun_alloc(run, &w, 1, sizeof *w));
    *w = *from;
    TRY(x3_jiter_new(run, "generator", empty ? next_of_none : next, &it));
    it->state = w;
    it->source = value;
    *out = x3_jval_iter(it);
    return X3_OK;
}

/* Arguments behind the first `n`. */
static x3_jargs rest_of(const x3_jargs *args, size_t n)
{
    return (x3_jargs){args->items + n, args->n_items - n, args->keywords};
}

static x3_status find_builtin(x3_jrun *run, x3_jval name, bool is_filter, const x3_jbuiltin **out)
{
    *out = name.type != X3_JSTR ? NULL : is_filter ? x3_jbuiltin_filter(name.s) : x3_jbuiltin_test(name.s);
    if (*out != NULL)
        return X3_OK;
    return x3_jrun_fail(run, "No %s named '%.*s'.", is_filter ? "filter" : "test",
                        name.type != X3_JSTR ? 1 : (int)x3_min_size(name.s->n_bytes, 100),
                        name.type != X3_JSTR ? "?" : name.s->data);
}

FILTER(filter_map)
{
    static const x3_jstr attribute = {"attribute", 9, 9, false, NULL}, fallback = {"default", 7, 7, false, NULL};
    worker w = {.args = *args};
    x3_jval path_value = {0}, default_value = {0};

    (void)arg;
    if (args->keywords != NULL && args->n_items == 0) {
        path_value = x3_jdict_find(args->keywords, &attribute);
        default_value = x3_jdict_find(args->keywords, &fallback);
    }
    if (path_value.type != X3_JMISSING) {
        if (args->keywords->n_items > (default_value.type != X3_JMISSING ? 2u : 1u))
            return x3_jrun_fail(run, "map(attribute=...) got an unexpected keyword argument");
        TRY(make_path(run, path_value, default_value, &w.path));
    } else {
        if (args->n_items == 0)
            return x3_jrun_fail(run, "map requires a filter argument");
        TRY(find_builtin(run, args->items[0], true, &w.builtin));
        w.args = rest_of(args, 1);
    }
    return generate(run, *self, true, &w, next_mapped, out);
}

static x3_status select_items(x3_jrun *run, const x3_jval *self, const x3_jargs *args, bool by_attribute, bool negate,
                              x3_jval *out)
{
    size_t n_used = by_attribute;
    worker w = {.negate = negate};

    if (args->n_items < n_used)
        return x3_jrun_fail(run, "Missing parameter for attribute name");
    TRY(make_path(run, by_attribute ? args->items[0] : (x3_jval){0}, (x3_jval){0}, &w.path));
    if (args->n_items > n_used) {
        TRY(find_builtin(run, args->items[n_used], false, &w.builtin));
        w.args = rest_of(args, n_used + 1);
    }
    return generate(run, *self, true, &w, next_selected, out);
}

FILTER(filter_select)
{
    (void)arg;
    return select_items(run, self, args, false, false, out);
}

FILTER(filter_reject)
{
    (void)arg;
    return select_items(run, self, args, false, true, out);
}

FILTER(filter_selectattr)
{
    (void)arg;
    return select_items(run, self, args, true, false, out);
}

FILTER(filter_rejectattr)
{
    (void)arg;
    return select_items(run, self, args, true, true, out);
}

FILTER(filter_unique)
{
    worker w = {.case_sensitive = x3_jval_truth(arg[0])};

    (void)args;
    TRY(make_path(run, arg[1], (x3_jval){0}, &w.path));
    TRY(x3_jdict_new(run, &w.seen));
    return generate(run, *self, false, &w, next_unique, out);
}

static x3_status next_of_items(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    x3_jview *view;

    if (it->source.type == X3_JDICT) {
        TRY(x3_jrun_alloc(run, &view, 1, sizeof *view));
        *view = (x3_jview){it->source.dict, 'i'};
        it->source = (x3_jval){.type = X3_JVIEW, .view = view};
    } else if (it->inner == NULL && it->source.type != X3_JUNDEFINED) {
        return x3_jrun_fail(run, "Can only get item pairs from a mapping.");
    }
    return next_source(run, it, out, more);
}

FILTER(filter_items)
{
    (void)arg, (void)args;
    return generate(run, *self, false, &(worker){0}, next_of_items, out);
}

/* ---- lists of lists ---- */

/* batch and slice make all rows when the first one is asked for; `args` holds their two arguments. */
static x3_status next_row(x3_jrun *run, x3_jiter *it, x3_status (*make)(x3_jrun *, x3_jval, const x3_jval *, x3_jlist *),
                          x3_jval *out, bool *more)
{
    const worker *w = it->state;
    x3_jlist *rows;

    if (it->inner == NULL) {
        TRY(x3_jlist_new(run, 0, &rows));
        TRY(make(run, it->source, w->args.items, rows));
        TRY(x3_jiter_open(run, x3_jval_list(rows), &it->inner));
    }
    return x3_jiter_next(run, it->inner, out, more);
}

static bool has_fill(const x3_jval *arg)
{
    return arg[1].type != X3_JMISSING && arg[1].type != X3_JNONE;
}

static x3_status make_batches(x3_jrun *run, x3_jval source, const x3_jval *arg, x3_jlist *rows)
{
    x3_jlist *items, *row;
    int64_t size;

    if (!x3_jval_as_int(arg[0], &size))
        return x3_jrun_fail(run, "batch needs a number of items, not %s", x3_jval_type_name(arg[0]));
    TRY(x3_jlist_of(run, source, &items));
    TRY(x3_jlist_new(run, 0, &row));
    for (size_t i = 0; i < items->n_items; i++) {
        if ((int64_t)row->n_items == size) {
            TRY(x3_jlist_push(run, rows, x3_jval_list(row)));
            TRY(x3_jlist_new(run, 0, &row));
        }
        TRY(x3_jlist_push(run, row, items->items[i]));
    }
    while (row->n_items > 0 && has_fill(arg) && (int64_t)row->n_items < size) {
        TRY(x3_jrun_steps(run, 1));
        TRY(x3_jlist_push(run, row, arg[1]));
    }
    return row->n_items > 0 ? x3_jlist_push(run, rows, x3_jval_list(row)) : X3_OK;
}

static x3_status make_slices(x3_jrun *run, x3_jval source, const x3_jval *arg, x3_jlist *rows)
{
    x3_jlist *items, *row;
    int64_t n;
    size_t at = 0;

    TRY(x3_jlist_of(run, source, &items));
    if (!x3_jval_as_int(arg[0], &n) || n == 0)
        return x3_jrun_fail(run, "slice needs a number of slices");
    for (int64_t i = 0; i < n; i++) {
        size_t extra = items->n_items % (size_t)n, size = items->n_items / (size_t)n + ((size_t)i < extra);
        TRY(x3_jrun_steps(run, 1));
        TRY(x3_jlist_new(run, size, &row));
        for (; size > 0; size--)
            TRY(x3_jlist_push(run, row, items->items[at++]));
        if (has_fill(arg) && (size_t)i >= extra)
            TRY(x3_jlist_push(run, row, arg[1]));
        TRY(x3_jlist_push(run, rows, x3_jval_list(row)));
    }
    return X3_OK;
}

static x3_status next_batch(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    return next_row(run, it, make_batches, out, more);
}

static x3_status next_slice(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    return next_row(run, it, make_slices, out, more);
}

static x3_status rows_of(x3_jrun *run, const x3_jval *self, const x3_jval *arg,
                         x3_status (*next)(x3_jrun *, x3_jiter *, x3_jval *, bool *), x3_jval *out)
{
    x3_jval *kept;

    TRY(x3_jrun_alloc(run, &kept, 2, sizeof *kept));
    memcpy(kept, arg, 2 * sizeof *kept);
    return generate(run, *self, false, &(worker){.args = {kept, 2, NULL}}, next, out);
}

FILTER(filter_batch)
{
    (void)args;
    return rows_of(run, self, arg, next_batch, out);
}

FILTER(filter_slice)
{
    (void)args;
    return rows_of(run, self, arg, next_slice, out);
}

/* ---- the rest ---- */

FILTER(filter_first)
{
    x3_jiter *it;
    bool more;

    (void)arg, (void)args;
    TRY(x3_jiter_open(run, *self, &it));
    TRY(x3_jiter_next(run, it, out, &more));
    return more ? X3_OK : x3_jundefined_hint(run, "No first item, sequence was empty.", out);
}

FILTER(filter_last)
{
    bool known, more;

    (void)arg, (void)args;
    TRY(x3_jiter_reversed(run, *self, &known, out));
    if (!known)
        return x3_jrun_fail(run, "'%s' object is not reversible", x3_jval_type_name(*self));
    TRY(x3_jiter_next(run, out->iter, out, &more));
    return more ? X3_OK : x3_jundefined_hint(run, "No last item, sequence was empty.", out);
}

FILTER(filter_reverse)
{
    x3_jlist *list;
    bool known;

    (void)arg, (void)args;
    if (self->type == X3_JSTR)
        return x3_jobject_slice(run, *self, (x3_jval){0}, (x3_jval){0}, x3_jval_int(-1), out);
    TRY(x3_jiter_reversed(run, *self, &known, out));
    if (known)
        return X3_OK;
    if (!x3_jval_is_iterable(*self))
        return x3_jrun_fail(run, "argument must be iterable");
    TRY(x3_jlist_of(run, *self, &list));
    return x3_jobject_slice(run, x3_jval_list(list), (x3_jval){0}, (x3_jval){0}, x3_jval_int(-1), out);
}

FILTER(filter_list)
{
    x3_jlist *list;

    (void)arg, (void)args;
    TRY(x3_jlist_of(run, *self, &list));
    *out = x3_jval_list(list);
    return X3_OK;
}

FILTER(filter_length)
{
    static const x3_jstr name = {"length", 6, 6, false, NULL};
    size_t n;

    (void)arg, (void)args;
    if (self->type == X3_JLOOP)
        return x3_jobject_attribute(run, *self, &name, out);
    if (!x3_jval_length(*self, &n))
        return x3_jrun_fail(run, "object of type '%s' has no len()", x3_jval_type_name(*self));
    *out = x3_jval_int((int64_t)n);
    return X3_OK;
}

FILTER(filter_join)
{
    x3_jval separator, item;
    x3_jbuf buf = {0};
    x3_jiter *it;
    bool more, first = true;
    path p;

    (void)args;
    TRY(make_path(run, arg[1], (x3_jval){0}, &p));
    if (arg[0].type == X3_JMISSING)
        TRY(x3_jstr_literal(run, "", &separator));
    else
        TRY(x3_jprint_to_str(run, arg[0], &separator));
    TRY(x3_jiter_open(run, *self, &it));
    for (;; first = false) {
        TRY(x3_jiter_next(run, it, &item, &more));
        if (!more)
            return x3_jstr_of(run, &buf, out);
        TRY(follow(run, &p, item, &item));
        if (!first)
            TRY(x3_jbuf_put(run, &buf, separator.s->data, separator.s->n_bytes));
        TRY(x3_jprint_str(run, &buf, item));
    }
}

FILTER(filter_sum)
{
    x3_jval sum = arg[1].type == X3_JMISSING ? x3_jval_int(0) : arg[1], item;
    x3_jiter *it;
    bool more;
    path p;

    (void)args;
    TRY(make_path(run, arg[0], (x3_jval){0}, &p));
    if (sum.type == X3_JSTR)
        return x3_jrun_fail(run, "sum() can't sum strings [use ''.join(seq) instead]");
    TRY(x3_jiter_open(run, *self, &it));
    for (;;) {
        TRY(x3_jiter_next(run, it, &item, &more));
        *out = sum;
        if (!more)
            return X3_OK;
        TRY(follow(run, &p, item, &item));
        TRY(x3_joperate_binary(run, '+', sum, item, &sum));
    }
}

const x3_jbuiltin x3_jfilters_sequence[] = {
    {"batch", filter_batch, 1, 2, "linecount fill_with"},
    {"count", filter_length, 0, 0, NULL},
    {"dictsort", filter_dictsort, 0, 3, "case_sensitive by reverse"},
    {"first", filter_first, 0, 0, NULL},
    {"groupby", filter_groupby, 1, 3, "attribute default case_sensitive"},
    {"items", filter_items, 0, 0, NULL},
    {"join", filter_join, 0, 2, "d attribute"},
    {"last", filter_last, 0, 0, NULL},
    {"length", filter_length, 0, 0, NULL},
    {"list", filter_list, 0, 0, NULL},
    {"map", filter_map, 0, -1, NULL},
    {"max", filter_max, 0, 2, "case_sensitive attribute"},
    {"min", filter_min, 0, 2, "case_sensitive attribute"},
    {"reject", filter_reject, 0, -1, NULL},
    {"rejectattr", filter_rejectattr, 0, -1, NULL},
    {"reverse", filter_reverse, 0, 0, NULL},
    {"select", filter_select, 0, -1, NULL},
    {"selectattr", filter_selectattr, 0, -1, NULL},
    {"slice", filter_slice, 1, 2, "slices fill_with"},
    {"sort", filter_sort, 0, 3, "reverse case_sensitive attribute"},
    {"sum", filter_sum, 0, 2, "attribute start"},
    {"unique", filter_unique, 0, 2, "case_sensitive attribute"},
};

const size_t x3_jn_filters_sequence = sizeof x3_jfilters_sequence / sizeof x3_jfilters_sequence[0];
