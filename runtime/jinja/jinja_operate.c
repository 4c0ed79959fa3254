#include "runtime/jinja/jinja_internal.h"

#include <math.h>
#include <string.h>

/* Arithmetic, equality, order and membership of Python's built-in types. */

static bool is_sequence(x3_jval v)
{
    return v.type == X3_JLIST || v.type == X3_JTUPLE;
}

static const char *op_text(uint32_t op, char room[4])
{
    room[0] = (char)(op & 0xFF);
    room[1] = (char)(op >> 8);
    room[2] = '\0';
    return room;
}

static x3_status fail_operands(x3_jrun *run, uint32_t op, x3_jval a, x3_jval b)
{
    char room[4];

    if (a.type == X3_JUNDEFINED || b.type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, a.type == X3_JUNDEFINED ? a : b);
    if (op == '+' && a.type == X3_JSTR)
        return x3_jrun_fail(run, "can only concatenate str (not \"%s\") to str", x3_jval_type_name(b));
    return x3_jrun_fail(run, "unsupported operand type(s) for %s: '%s' and '%s'", op_text(op, room),
                        x3_jval_type_name(a), x3_jval_type_name(b));
}

/* ---- numbers ---- */

static x3_status power_of_ints(x3_jrun *run, int64_t a, int64_t b, x3_jval *out)
{
    int64_t result = 1;
    bool overflow = false;

    if (b < 0) {
        if (a == 0)
            return x3_jrun_fail(run, "0.0 cannot be raised to a negative power");
        *out = x3_jval_float(pow((double)a, (double)b));
        return X3_OK;
    }
    for (; b > 0 && !overflow; b >>= 1) {
        if (b & 1)
            overflow = __builtin_mul_overflow(result, a, &result);
        if (b > 1)
            overflow = __builtin_mul_overflow(a, a, &a) || overflow;
    }
    if (overflow)
        return x3_jrun_fail(run, "a number of more than 64 bits");
    *out = x3_jval_int(result);
    return X3_OK;
}

static x3_status operate_ints(x3_jrun *run, uint32_t op, int64_t a, int64_t b, x3_jval *out)
{
    int64_t result = 0;
    bool overflow = false;

    if (op == X3_JOP2('*', '*'))
        return power_of_ints(run, a, b, out);
    if (op == '+') {
        overflow = __builtin_add_overflow(a, b, &result);
    } else if (op == '-') {
        overflow = __builtin_sub_overflow(a, b, &result);
    } else if (op == '*') {
        overflow = __builtin_mul_overflow(a, b, &result);
    } else {
        if (b == 0)
            return x3_jrun_fail(run, op == '/' ? "division by zero" : "integer division or modulo by zero");
        if (op == '/') { /* exact for the 53 bits that templates can have from JSON */
            *out = x3_jval_float((double)((long double)a / (long double)b));
            return X3_OK;
        }
        if (b == -1) { /* INT64_MIN / -1 traps */
            overflow = op != '%' && a == INT64_MIN;
            result = op == '%' || overflow ? 0 : -a;
        } else {
            int64_t rest = a % b;
            bool down = rest != 0 && (rest < 0) != (b < 0);
            result = op == '%' ? rest + (down ? b : 0) : a / b - down;
        }
    }
    if (overflow)
        return x3_jrun_fail(run, "a number of more than 64 bits");
    *out = x3_jval_int(result);
    return X3_OK;
}

/* floatobject.c of CPython: float_divmod */
static void floor_divide(double a, double b, double *quotient, double *rest)
{
    double mod = fmod(a, b), div = (a - mod) / b;

    if (mod != 0) {
        if ((b < 0) != (mod < 0)) {
            mod += b;
            div -= 1;
        }
    } else {
        mod = copysign(0.0, b);
    }
    *rest = mod;
    *quotient = copysign(0.0, a / b);
    if (div != 0) {
        *quotient = floor(div);
        if (div - *quotient > 0.5)
            *quotient += 1;
    }
}

static x3_status operate_floats(x3_jrun *run, uint32_t op, double a, double b, x3_jval *out)
{
    double result, rest;

    if ((op == '/' || op == '%' || op == X3_JOP2('/', '/')) && b == 0)
        return x3_jrun_fail(run, op == '/' ? "float division by zero" : op == '%' ? "float modulo"
                                                                                  : "float floor division by zero");
    if (op == X3_JOP2('*', '*')) {
        result = pow(a, b);
        if (a == 0 && b < 0)
            return x3_jrun_fail(run, "0.0 cannot be raised to a negative power");
        if (a < 0 && isfinite(a) && isfinite(b) && b != floor(b))
            return x3_jrun_fail(run, "a root of a negative number: complex numbers are not supported");
        if (isinf(result) && isfinite(a) && isfinite(b))
            return x3_jrun_fail(run, "(34, 'Numerical result out of range')");
    } else if (op == '%' || op == X3_JOP2('/', '/')) {
        floor_divide(a, b, &result, &rest);
        result = op == '%' ? rest : result;
    } else {
        result = op == '+' ? a + b : op == '-' ? a - b : op == '*' ? a * b : a / b;
    }
    *out = x3_jval_float(result);
    return X3_OK;
}

/* ---- text and lists ---- */

static x3_status concat_text(x3_jrun *run, x3_jval a, x3_jval b, x3_jval *out)
{
    bool is_markup = a.s->is_markup || b.s->is_markup;
    x3_jbuf *tail;
    x3_jstr *s;

    if (is_markup) {
        TRY(x3_jprint_escape(run, a, &a));
        TRY(x3_jprint_escape(run, b, &b));
    }
    tail = a.s->tail;
    if (tail == NULL || a.s->data != tail->data || a.s->n_bytes != tail->n_bytes) { /* not the newest of its buffer */
        TRY(x3_jrun_alloc(run, &tail, 1, sizeof *tail));
        TRY(x3_jbuf_put(run, tail, a.s->data, a.s->n_bytes));
    }
    TRY(x3_jbuf_put(run, tail, b.s->data, b.s->n_bytes));
    TRY(x3_jrun_alloc(run, &s, 1, sizeof *s));
    *s = (x3_jstr){tail->data == NULL ? "" : tail->data, tail->n_bytes, a.s->n_chars + b.s->n_chars, is_markup, tail};
    *out = (x3_jval){.type = X3_JSTR, .s = s};
    return X3_OK;
}

static x3_status concat_lists(x3_jrun *run, x3_jval a, x3_jval b, x3_jval *out)
{
    size_t n = a.list->n_items + b.list->n_items;
    x3_jlist *list;

    TRY(x3_jrun_steps(run, n));
    TRY(x3_jlist_new(run, n, &list));
    if (a.list->n_items > 0)
        memcpy(list->items, a.list->items, a.list->n_items * sizeof *list->items);
    if (b.list->n_items > 0)
        memcpy(list->items + a.list->n_items, b.list->items, b.list->n_items * sizeof *list->items);
    list->n_items = n;
    *out = (x3_jval){.type = a.type, .list = list};
    return X3_OK;
}

static x3_status repeat_list(x3_jrun *run, x3_jval v, int64_t times, x3_jval *out)
{
    uint64_t n;
    x3_jlist *list;

    times = times < 0 ? 0 : times;
    if (x3_mul_overflows(v.list->n_items, (uint64_t)times, &n) || n > run->steps_left)
        return x3_jrun_fail(run, "the template takes more steps than it is allowed");
    TRY(x3_jrun_steps(run, n));
    TRY(x3_jlist_new(run, n, &list));
    for (size_t i = 0; i < n; i++)
        list->items[i] = v.list->items[i % v.list->n_items];
    list->n_items = n;
    *out = (x3_jval){.type = v.type, .list = list};
    return X3_OK;
}

static x3_status multiply(x3_jrun *run, x3_jval v, int64_t times, x3_jval *out)
{
    return v.type == X3_JSTR ? x3_jtext_repeat(run, v.s, times, out) : repeat_list(run, v, times, out);
}

x3_status x3_joperate_binary(x3_jrun *run, uint32_t op, x3_jval a, x3_jval b, x3_jval *out)
{
    int64_t i, k;
    double f, g;

    if (x3_jval_as_int(a, &i) && x3_jval_as_int(b, &k))
        return operate_ints(run, op, i, k, out);
    if (x3_jval_as_float(a, &f) && x3_jval_as_float(b, &g))
        return operate_floats(run, op, f, g, out);
    if (op == '%' && a.type == X3_JSTR)
        return x3_jformat_percent(run, a.s, b, out);
    if (op == '+' && a.type == X3_JSTR && b.type == X3_JSTR)
        return concat_text(run, a, b, out);
    if (op == '+' && is_sequence(a) && a.type == b.type)
        return concat_lists(run, a, b, out);
    if (op == '*' && (a.type == X3_JSTR || is_sequence(a)) && x3_jval_as_int(b, &i))
        return multiply(run, a, i, out);
    if (op == '*' && (b.type == X3_JSTR || is_sequence(b)) && x3_jval_as_int(a, &i))
        return multiply(run, b, i, out);
    return fail_operands(run, op, a, b);
}

x3_status x3_joperate_unary(x3_jrun *run, uint32_t op, x3_jval a, x3_jval *out)
{
    int64_t i;

    if (a.type == X3_JFLOAT) {
        *out = x3_jval_float(op == '-' ? -a.f : a.f);
        return X3_OK;
    }
    if (x3_jval_as_int(a, &i))
        return operate_ints(run, op, 0, i, out);
    if (a.type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, a);
    return x3_jrun_fail(run, "bad operand type for unary %c: '%s'", (char)op, x3_jval_type_name(a));
}

/* ---- equality and order ---- */

/* -1, 0, 1, or 2 when one is not a number. Exact, also where an int has more bits than a double. */
static int compare_numbers(x3_jval a, x3_jval b)
{
    int64_t i, k;
    double f, g;
    bool a_int = x3_jval_as_int(a, &i), b_int = x3_jval_as_int(b, &k);

    if (a_int && b_int)
        return (i > k) - (i < k);
    x3_jval_as_float(a, &f);
    x3_jval_as_float(b, &g);
    if (isnan(f) || isnan(g))
        return 2;
    if (f != g || (!a_int && !b_int))
        return (f > g) - (f < g);
    /* equal as doubles, so the float is whole; 2^63 is the one that no int64_t reaches */
    double whole = a_int ? g : f;
    if (whole >= 0x1p63)
        return a_int ? -1 : 1;
    if (a_int)
        k = (int64_t)whole;
    else
        i = (int64_t)whole;
    return (i > k) - (i < k);
}

static bool is_number(x3_jval v)
{
    return v.type == X3_JBOOL || v.type == X3_JINT || v.type == X3_JFLOAT;
}

static int compare_text(const x3_jstr *a, const x3_jstr *b)
{
    size_t n = x3_min_size(a->n_bytes, b->n_bytes);
    int order = n == 0 ? 0 : memcmp(a->data, b->data, n);

    return order != 0 ? order : (a->n_bytes > b->n_bytes) - (a->n_bytes < b->n_bytes);
}

static x3_status equal_lists(x3_jrun *run, const x3_jlist *a, const x3_jlist *b, bool *out)
{
    *out = a->n_items == b->n_items;
    for (size_t i = 0; *out && i < a->n_items; i++)
        TRY(x3_jval_equal(run, a->items[i], b->items[i], out));
    return X3_OK;
}

static x3_status equal_dicts(x3_jrun *run, const x3_jdict *a, const x3_jdict *b, bool *out)
{
    x3_jval other;

    *out = a->n_items == b->n_items;
    for (size_t i = 0; *out && i < a->n_items; i++) {
        TRY(x3_jdict_get(run, b, a->entries[i].key, &other));
        *out = other.type != X3_JMISSING;
        if (*out)
            TRY(x3_jval_equal(run, a->entries[i].value, other, out));
    }
    return X3_OK;
}

static bool equal_ranges(const x3_jrange *a, const x3_jrange *b)
{
    uint64_t n = x3_jrange_length(a);

    return n == x3_jrange_length(b) && (n == 0 || (a->start == b->start && (n == 1 || a->step == b->step)));
}

/* keys() and items() are sets to Python. */
static x3_status equal_views(x3_jrun *run, x3_jval a, x3_jval b, bool *out)
{
    x3_jiter *it;
    x3_jval item;
    bool more;

    *out = a.view == b.view;
    if (a.view->kind == 'v' || b.view->kind == 'v' || *out)
        return X3_OK;
    *out = a.view->dict->n_items == b.view->dict->n_items;
    TRY(x3_jiter_open(run, a, &it));
    while (*out) {
        TRY(x3_jiter_next(run, it, &item, &more));
        if (!more)
            return X3_OK;
        TRY(x3_jval_contains(run, b, item, out));
    }
    return X3_OK;
}

x3_status x3_jval_equal(x3_jrun *run, x3_jval a, x3_jval b, bool *out)
{
    TRY(x3_jrun_enter(run));
    if (is_number(a) && is_number(b)) {
        *out = compare_numbers(a, b) == 0;
    } else if (a.type != b.type) {
        *out = false;
    } else if (a.type == X3_JSTR) {
        *out = a.s == b.s || (a.s->n_bytes == b.s->n_bytes && compare_text(a.s, b.s) == 0);
        TRY(x3_jrun_steps(run, *out ? a.s->n_bytes / 64 : 0));
    } else if (is_sequence(a)) {
        *out = a.list == b.list;
        if (!*out)
            TRY(equal_lists(run, a.list, b.list, out));
    } else if (a.type == X3_JDICT) {
        *out = a.dict == b.dict;
        if (!*out)
            TRY(equal_dicts(run, a.dict, b.dict, out));
    } else if (a.type == X3_JRANGE) {
        *out = equal_ranges(a.range, b.range);
    } else if (a.type == X3_JVIEW) {
        TRY(equal_views(run, a, b, out));
    } else if (a.type == X3_JBOUND) { /* two looks at one method are equal */
        *out = a.bound == b.bound || (a.bound->method == b.bound->method && a.bound->self.type == b.bound->self.type &&
                                      a.bound->self.list == b.bound->self.list);
    } else {
        *out = a.type == X3_JNONE || a.type == X3_JUNDEFINED || a.list == b.list;
    }
    x3_jrun_leave(run);
    return X3_OK;
}

static bool holds(uint32_t op, int order)
{
    bool or_equal = op > 0xFF;

    if (order == 2)
        return false;
    if (order == 0)
        return or_equal;
    return (op & 0xFF) == '<' ? order < 0 : order > 0;
}

x3_status x3_jval_compare(x3_jrun *run, uint32_t op, x3_jval a, x3_jval b, bool *out)
{
    char room[4];

    if (is_number(a) && is_number(b)) {
        *out = holds(op, compare_numbers(a, b));
        return X3_OK;
    }
    if (a.type == X3_JSTR && b.type == X3_JSTR) {
        int order = compare_text(a.s, b.s);
        *out = holds(op, (order > 0) - (order < 0));
        return X3_OK;
    }
    if (a.type == X3_JUNDEFINED || b.type == X3_JUNDEFINED)
        return x3_jundefined_fail(run, a.type == X3_JUNDEFINED ? a : b);
    if (!is_sequence(a) || a.type != b.type)
        return x3_jrun_fail(run, "'%s' not supported between instances of '%s' and '%s'", op_text(op, room),
                            x3_jval_type_name(a), x3_jval_type_name(b));
    size_t n = x3_min_size(a.list->n_items, b.list->n_items);
    TRY(x3_jrun_enter(run));
    for (size_t i = 0; i < n; i++) {
        bool equal;
        TRY(x3_jval_equal(run, a.list->items[i], b.list->items[i], &equal));
        if (!equal) {
            TRY(x3_jval_compare(run, op, a.list->items[i], b.list->items[i], out));
            x3_jrun_leave(run);
            return X3_OK;
        }
    }
    x3_jrun_leave(run);
    *out = holds(op, (a.list->n_items > b.list->n_items) - (a.list->n_items < b.list->n_items));
    return X3_OK;
}

x3_status x3_jval_contains(x3_jrun *run, x3_jval container, x3_jval item, bool *out)
{
    bool more = true;
    x3_jval found;
    x3_jiter *it;

    *out = false;
    if (container.type == X3_JSTR) {
        if (item.type != X3_JSTR)
            return x3_jrun_fail(run, "'in <string>' requires string as left operand, not %s", x3_jval_type_name(item));
        *out = x3_jtext_find(container.s, 0, container.s->n_bytes, item.s) != SIZE_MAX;
        return x3_jrun_steps(run, container.s->n_bytes / 64);
    }
    if (container.type == X3_JDICT || (container.type == X3_JVIEW && container.view->kind == 'k')) {
        TRY(x3_jdict_get(run, container.type == X3_JDICT ? container.dict : container.view->dict, item, &found));
        *out = found.type != X3_JMISSING;
        return X3_OK;
    }
    if (!x3_jval_is_iterable(container))
        return x3_jrun_fail(run, "argument of type '%s' is not iterable", x3_jval_type_name(container));
    TRY(x3_jiter_open(run, container, &it));
    while (!*out) {
        TRY(x3_jiter_next(run, it, &found, &more));
        if (!more)
            break;
        TRY(x3_jval_equal(run, found, item, out));
    }
    return X3_OK;
}
