#include "runtime/jinja/jinja_internal.h"

#include "runtime/tokenizer/unicode.h"

/* Walks, ranges and slices. Generators are lazy as Python's are: what a template does not look at is not computed, and
 * what was walked once is empty the second time. */

x3_status x3_jiter_new(x3_jrun *run, const char *name,
                       x3_status (*next)(x3_jrun *, x3_jiter *, x3_jval *, bool *), x3_jiter **out)
{
    TRY(x3_jrun_alloc(run, out, 1, sizeof **out));
    (*out)->name = name;
    (*out)->next = next;
    return X3_OK;
}

x3_status x3_jiter_next(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    TRY(x3_jrun_enter(run)); /* generators over generators: a template can chain any number of them */
    *more = !it->is_done;
    if (*more)
        TRY(it->next(run, it, out, more));
    it->is_done = !*more;
    x3_jrun_leave(run);
    return X3_OK;
}

static x3_status next_of_list(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    const x3_jlist *list = it->source.list;

    (void)run;
    *more = it->at < list->n_items;
    if (*more)
        *out = list->items[it->at++];
    return X3_OK;
}

static x3_status next_of_list_reversed(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    const x3_jlist *list = it->source.list;

    (void)run;
    *more = it->at < list->n_items;
    if (*more)
        *out = list->items[list->n_items - ++it->at];
    return X3_OK;
}

static x3_status next_of_text(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    const x3_jstr *s = it->source.s;
    size_t length;

    *more = it->at < s->n_bytes;
    if (!*more)
        return X3_OK;
    x3_utf8_decode(s->data + it->at, s->n_bytes - it->at, &length);
    it->at += length;
    return x3_jstr_view(run, s->data + it->at - length, length, out);
}

/* Keys of a dict, or what a view of it shows. `state` non-NULL: backwards. */
static x3_status next_of_dict(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    bool is_view = it->source.type == X3_JVIEW;
    const x3_jdict *dict = is_view ? it->source.view->dict : it->source.dict;
    char kind = is_view ? it->source.view->kind : 'k';

    *more = it->at < dict->n_items;
    if (!*more)
        return X3_OK;
    const x3_jentry *entry = &dict->entries[it->state != NULL ? dict->n_items - 1 - it->at : it->at];
    it->at++;
    *out = kind == 'v' ? entry->value : entry->key;
    return kind == 'i' ? x3_jtuple_pair(run, entry->key, entry->value, out) : X3_OK;
}

uint64_t x3_jrange_length(const x3_jrange *r)
{
    if (r->step > 0)
        return r->start < r->stop ? ((uint64_t)r->stop - (uint64_t)r->start - 1) / (uint64_t)r->step + 1 : 0;
    return r->start > r->stop ? ((uint64_t)r->start - (uint64_t)r->stop - 1) / (0 - (uint64_t)r->step) + 1 : 0;
}

static x3_status next_of_range(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    const x3_jrange *r = it->source.range;
    uint64_t n = x3_jrange_length(r), at = it->state != NULL ? n - 1 - it->at : it->at;

    (void)run;
    *more = it->at < n;
    if (*more) {
        *out = x3_jval_int((int64_t)((uint64_t)r->start + at * (uint64_t)r->step));
        it->at++;
    }
    return X3_OK;
}

static x3_status next_of_nothing(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    (void)run, (void)it, (void)out;
    *more = false;
    return X3_OK;
}

static x3_status next_of_loop(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    (void)it, (void)out, (void)more;
    return x3_jrun_refuse(run, "walking over `loop` is not supported");
}

bool x3_jval_is_iterable(x3_jval v)
{
    static const bool is[X3_JN_TYPES] = {
        [X3_JUNDEFINED] = true, [X3_JSTR] = true, [X3_JLIST] = true, [X3_JTUPLE] = true, [X3_JDICT] = true,
        [X3_JVIEW] = true, [X3_JRANGE] = true, [X3_JITER] = true, [X3_JLOOP] = true};

    return is[v.type];
}

x3_status x3_jiter_open(x3_jrun *run, x3_jval v, x3_jiter **out)
{
    static x3_status (*const next[X3_JN_TYPES])(x3_jrun *, x3_jiter *, x3_jval *, bool *) = {
        [X3_JUNDEFINED] = next_of_nothing, [X3_JSTR] = next_of_text, [X3_JLIST] = next_of_list,
        [X3_JTUPLE] = next_of_list, [X3_JDICT] = next_of_dict, [X3_JVIEW] = next_of_dict,
        [X3_JRANGE] = next_of_range, [X3_JLOOP] = next_of_loop};

    if (v.type == X3_JITER) {
        *out = v.iter;
        return X3_OK;
    }
    if (!x3_jval_is_iterable(v))
        return x3_jrun_fail(run, "'%s' object is not iterable", x3_jval_type_name(v));
    TRY(x3_jiter_new(run, "iterator", next[v.type], out));
    (*out)->source = v;
    return X3_OK;
}

x3_status x3_jiter_reversed(x3_jrun *run, x3_jval v, bool *known, x3_jval *out)
{
    x3_jlist *list;
    x3_jiter *it;

    *known = v.type != X3_JITER && v.type != X3_JLOOP && x3_jval_is_iterable(v);
    if (!*known)
        return X3_OK;
    if (v.type == X3_JSTR) {
        TRY(x3_jlist_of(run, v, &list));
        v = x3_jval_list(list);
    }
    TRY(x3_jiter_open(run, v, &it));
    it->name = v.type == X3_JLIST ? "list_reverseiterator" : v.type == X3_JTUPLE ? "reversed" : "iterator";
    it->state = it; /* backwards */
    if (it->next == next_of_list)
        it->next = next_of_list_reversed;
    *out = x3_jval_iter(it);
    return X3_OK;
}

x3_status x3_jlist_of(x3_jrun *run, x3_jval iterable, x3_jlist **out)
{
    x3_jiter *it;
    x3_jval item;
    size_t n;
    bool more;

    TRY(x3_jiter_open(run, iterable, &it));
    if (iterable.type == X3_JITER || !x3_jval_length(iterable, &n))
        n = 0;
    TRY(x3_jlist_new(run, n, out));
    for (;;) {
        TRY(x3_jiter_next(run, it, &item, &more));
        if (!more)
            return X3_OK;
        TRY(x3_jlist_push(run, *out, item));
    }
}

/* ---- slices ---- */

static x3_status slice_part(x3_jrun *run, x3_jval v, int64_t missing, int64_t *out)
{
    *out = missing;
    if (v.type == X3_JNONE || v.type == X3_JMISSING || x3_jval_as_int(v, out))
        return X3_OK;
    return x3_jrun_fail(run, "slice indices must be integers or None or have an __index__ method");
}

/* An end of a slice brought into [low, high]. */
static int64_t clip(int64_t at, int64_t n, int64_t low, int64_t high)
{
    if (at < 0)
        at += n;
    return at < low ? low : at > high ? high : at;
}

x3_status x3_jslice_indices(x3_jrun *run, x3_jval start, x3_jval stop, x3_jval step, size_t n, int64_t *first,
                            int64_t *end, int64_t *stride, size_t *n_out)
{
    int64_t from, to, size = (int64_t)n;

    TRY(slice_part(run, step, 1, stride));
    if (*stride == 0)
        return x3_jrun_fail(run, "slice step cannot be zero");
    if (*stride < -INT64_MAX)
        *stride = -INT64_MAX;
    bool back = *stride < 0;
    TRY(slice_part(run, start, back ? INT64_MAX : 0, &from));
    TRY(slice_part(run, stop, back ? INT64_MIN : INT64_MAX, &to));
    bool open_stop = stop.type == X3_JNONE || stop.type == X3_JMISSING;
    from = back ? clip(from, size, -1, size - 1) : clip(from, size, 0, size);
    to = open_stop ? (back ? -1 : size) : back ? clip(to, size, -1, size - 1) : clip(to, size, 0, size);
    *first = from;
    *end = to;
    *n_out = (size_t)x3_jrange_length(&(x3_jrange){from, to, *stride});
    return X3_OK;
}
