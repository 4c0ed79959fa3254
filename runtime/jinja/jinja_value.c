#include "runtime/jinja/jinja_internal.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/tokenizer/unicode.h"

/* ---- the run ---- */

X3_PRINTF(4, 0)
static x3_status fail_at(x3_err *err, x3_status status, const char *name, const char *format, va_list args,
                         uint32_t line)
{
    char text[1200];

    vsnprintf(text, sizeof text, format, args);
    return x3_fail(err, status, "%s:%u: %s", name, (unsigned)line, text);
}

x3_status x3_jrun_fail(x3_jrun *run, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    x3_status rc = fail_at(run->err, X3_ERR_INPUT, run->jinja->name, format, args, run->line);
    va_end(args);
    return rc;
}

x3_status x3_jrun_refuse(x3_jrun *run, const char *format, ...)
{
    va_list args;

    va_start(args, format);
    x3_status rc = fail_at(run->err, X3_ERR_UNSUPPORTED, run->jinja->name, format, args, run->line);
    va_end(args);
    return rc;
}

x3_status x3_jrun_alloc(x3_jrun *run, void *out, size_t n, size_t size)
{
    uint64_t bytes;

    if (x3_mul_overflows(n, size, &bytes) || bytes + 16 > run->bytes_left) {
        memset(out, 0, sizeof(void *));
        return x3_jrun_fail(run, "the template needs more memory than it is allowed");
    }
    run->bytes_left -= x3_round_up(bytes, 16);
    return x3_arena_alloc(&run->arena, out, n, size, run->err);
}

x3_status x3_jrun_steps(x3_jrun *run, uint64_t n)
{
    if (n > run->steps_left)
        return x3_jrun_fail(run, "the template takes more steps than it is allowed");
    run->steps_left -= n;
    return X3_OK;
}

x3_status x3_jrun_enter(x3_jrun *run)
{
    if (run->depth >= run->max_depth)
        return x3_jrun_fail(run, "more than %u levels inside one another", (unsigned)run->max_depth);
    run->depth++;
    return x3_jrun_steps(run, 1);
}

/* ---- text ---- */

static size_t count_chars(const char *data, size_t n)
{
    size_t n_chars = 0;

    for (size_t i = 0; i < n; i++)
        n_chars += ((unsigned char)data[i] & 0xC0) != 0x80;
    return n_chars;
}

static x3_status new_str(x3_jrun *run, const char *data, size_t n, x3_jbuf *tail, x3_jval *out)
{
    x3_jstr *s;

    TRY(x3_jrun_steps(run, n / 64));
    TRY(x3_jrun_alloc(run, &s, 1, sizeof *s));
    *s = (x3_jstr){.data = data, .n_bytes = n, .n_chars = count_chars(data, n), .tail = tail};
    *out = (x3_jval){.type = X3_JSTR, .s = s};
    return X3_OK;
}

x3_status x3_jstr_view(x3_jrun *run, const char *data, size_t n, x3_jval *out)
{
    return new_str(run, data, n, NULL, out);
}

x3_status x3_jstr_copy(x3_jrun *run, const char *data, size_t n, x3_jval *out)
{
    char *copy;

    TRY(x3_jrun_alloc(run, &copy, n, 1));
    memcpy(copy, data, n);
    return new_str(run, copy, n, NULL, out);
}

x3_status x3_jstr_of(x3_jrun *run, x3_jbuf *buf, x3_jval *out)
{
    x3_jbuf *tail;

    TRY(x3_jrun_alloc(run, &tail, 1, sizeof *tail));
    *tail = *buf;
    return new_str(run, buf->data == NULL ? "" : buf->data, buf->n_bytes, tail, out);
}

x3_status x3_jstr_literal(x3_jrun *run, const char *text, x3_jval *out)
{
    return new_str(run, text, strlen(text), NULL, out);
}

x3_status x3_jstr_mark(x3_jrun *run, x3_jval v, bool is_markup, x3_jval *out)
{
    x3_jstr *s;

    *out = v;
    if (v.s->is_markup == is_markup)
        return X3_OK;
    TRY(x3_jrun_alloc(run, &s, 1, sizeof *s));
    *s = *v.s;
    s->is_markup = is_markup;
    s->tail = NULL;
    out->s = s;
    return X3_OK;
}

bool x3_jstr_is(const x3_jstr *s, const char *text)
{
    return s->n_bytes == strlen(text) && memcmp(s->data, text, s->n_bytes) == 0;
}

x3_status x3_jbuf_put(x3_jrun *run, x3_jbuf *buf, const char *data, size_t n)
{
    if (buf == run->result && n > run->max_output - buf->n_bytes)
        return x3_jrun_fail(run, "the text is longer than the %llu bytes it may have",
                            (unsigned long long)run->max_output);
    if (n > buf->capacity - buf->n_bytes) {
        size_t capacity = x3_max_size(buf->n_bytes + n + 64, 2 * buf->capacity);
        char *grown;
        TRY(x3_jrun_alloc(run, &grown, capacity, 1));
        if (buf->n_bytes > 0)
            memcpy(grown, buf->data, buf->n_bytes);
        buf->data = grown;
        buf->capacity = capacity;
    }
    if (n > 0)
        memcpy(buf->data + buf->n_bytes, data, n);
    buf->n_bytes += n;
    return x3_jrun_steps(run, n / 64);
}

x3_status x3_jbuf_puts(x3_jrun *run, x3_jbuf *buf, const char *text)
{
    return x3_jbuf_put(run, buf, text, strlen(text));
}

x3_status x3_jbuf_cp(x3_jrun *run, x3_jbuf *buf, uint32_t cp)
{
    char bytes[4];

    return x3_jbuf_put(run, buf, bytes, x3_utf8_encode(cp, bytes));
}

/* ---- lists ---- */

x3_status x3_jlist_new(x3_jrun *run, size_t capacity, x3_jlist **out)
{
    TRY(x3_jrun_alloc(run, out, 1, sizeof **out));
    (*out)->capacity = capacity;
    return x3_jrun_alloc(run, &(*out)->items, capacity, sizeof *(*out)->items);
}

x3_status x3_jlist_push(x3_jrun *run, x3_jlist *list, x3_jval v)
{
    if (list->n_items == list->capacity) {
        size_t capacity = 2 * list->capacity + 8;
        x3_jval *grown;
        TRY(x3_jrun_alloc(run, &grown, capacity, sizeof *grown));
        if (list->n_items > 0)
            memcpy(grown, list->items, list->n_items * sizeof *grown);
        list->items = grown;
        list->capacity = capacity;
    }
    list->items[list->n_items++] = v;
    return X3_OK;
}

x3_status x3_jtuple_pair(x3_jrun *run, x3_jval a, x3_jval b, x3_jval *out)
{
    x3_jlist *pair;

    TRY(x3_jlist_new(run, 2, &pair));
    TRY(x3_jlist_push(run, pair, a));
    TRY(x3_jlist_push(run, pair, b));
    *out = x3_jval_tuple(pair);
    return X3_OK;
}

/* ---- dicts ---- */

#define INDEX_FROM 8 /* entries; below it a scan is faster */

x3_status x3_jdict_new(x3_jrun *run, x3_jdict **out)
{
    return x3_jrun_alloc(run, out, 1, sizeof **out);
}

static void index_put(x3_jdict *dict, size_t at)
{
    size_t mask = dict->n_index - 1, slot = dict->entries[at].hash & mask;

    while (dict->index[slot] != 0)
        slot = (slot + 1) & mask;
    dict->index[slot] = (uint32_t)at + 1;
}

static x3_status grow_dict(x3_jrun *run, x3_jdict *dict)
{
    size_t capacity = 2 * dict->capacity + 4;
    x3_jentry *entries;

    if (capacity > UINT32_MAX / 4)
        return x3_jrun_fail(run, "a dict of more than %zu items", dict->n_items);
    TRY(x3_jrun_alloc(run, &entries, capacity, sizeof *entries));
    if (dict->n_items > 0)
        memcpy(entries, dict->entries, dict->n_items * sizeof *entries);
    dict->entries = entries;
    dict->capacity = capacity;
    if (capacity <= INDEX_FROM)
        return X3_OK;
    for (dict->n_index = 1; dict->n_index < 2 * capacity; dict->n_index *= 2)
        ;
    TRY(x3_jrun_alloc(run, &dict->index, dict->n_index, sizeof *dict->index));
    for (size_t i = 0; i < dict->n_items; i++)
        index_put(dict, i);
    return X3_OK;
}

/* Place of the key, or n_items. */
static x3_status find_key(x3_jrun *run, const x3_jdict *dict, uint64_t hash, x3_jval key, size_t *at)
{
    bool equal = false;

    if (dict->index == NULL) {
        for (*at = 0; *at < dict->n_items; ++*at)
            if (dict->entries[*at].hash == hash) {
                TRY(x3_jval_equal(run, dict->entries[*at].key, key, &equal));
                if (equal)
                    return X3_OK;
            }
        return X3_OK;
    }
    for (size_t slot = hash & (dict->n_index - 1); dict->index[slot] != 0; slot = (slot + 1) & (dict->n_index - 1)) {
        TRY(x3_jrun_steps(run, 1)); /* keys made to collide cost what they cost */
        *at = dict->index[slot] - 1;
        if (dict->entries[*at].hash != hash)
            continue;
        TRY(x3_jval_equal(run, dict->entries[*at].key, key, &equal));
        if (equal)
            return X3_OK;
    }
    *at = dict->n_items;
    return X3_OK;
}

x3_status x3_jdict_set(x3_jrun *run, x3_jdict *dict, x3_jval key, x3_jval value)
{
    uint64_t hash;
    size_t at;

    TRY(x3_jval_hash(run, key, &hash));
    TRY(find_key(run, dict, hash, key, &at));
    if (at < dict->n_items) {
        dict->entries[at].value = value;
        return X3_OK;
    }
    if (dict->n_items == dict->capacity)
        TRY(grow_dict(run, dict));
    dict->entries[dict->n_items] = (x3_jentry){hash, key, value};
    if (dict->index != NULL)
        index_put(dict, dict->n_items);
    dict->n_items++;
    return X3_OK;
}

x3_status x3_jdict_get(x3_jrun *run, const x3_jdict *dict, x3_jval key, x3_jval *out)
{
    uint64_t hash;
    size_t at;

    TRY(x3_jval_hash(run, key, &hash));
    TRY(find_key(run, dict, hash, key, &at));
    *out = at < dict->n_items ? dict->entries[at].value : (x3_jval){0};
    return X3_OK;
}

static uint64_t hash_text(const x3_jstr *s)
{
    return x3_hash(s->data, s->n_bytes);
}

static bool is_key(const x3_jentry *entry, uint64_t hash, const x3_jstr *key)
{
    return entry->hash == hash && entry->key.type == X3_JSTR && entry->key.s->n_bytes == key->n_bytes &&
           memcmp(entry->key.s->data, key->data, key->n_bytes) == 0;
}

x3_jval x3_jdict_find(const x3_jdict *dict, const x3_jstr *key)
{
    uint64_t hash = hash_text(key);

    if (dict->index == NULL) {
        for (size_t i = 0; i < dict->n_items; i++)
            if (is_key(&dict->entries[i], hash, key))
                return dict->entries[i].value;
        return (x3_jval){0};
    }
    for (size_t slot = hash & (dict->n_index - 1); dict->index[slot] != 0; slot = (slot + 1) & (dict->n_index - 1))
        if (is_key(&dict->entries[dict->index[slot] - 1], hash, key))
            return dict->entries[dict->index[slot] - 1].value;
    return (x3_jval){0};
}

/* ---- properties of values ---- */

const char *x3_jval_type_name(x3_jval v)
{
    static const char *const names[X3_JN_TYPES] = {
        [X3_JMISSING] = "MissingType", [X3_JUNDEFINED] = "Undefined", [X3_JNONE] = "NoneType", [X3_JBOOL] = "bool",
        [X3_JINT] = "int", [X3_JFLOAT] = "float", [X3_JSTR] = "str", [X3_JLIST] = "list", [X3_JTUPLE] = "tuple",
        [X3_JDICT] = "dict", [X3_JRANGE] = "range", [X3_JITER] = "generator",
        [X3_JNAMESPACE] = "TemplateNamespace", [X3_JMACRO] = "Macro",
        [X3_JBOUND] = "builtin_function_or_method", [X3_JFUNCTION] = "function", [X3_JLOOP] = "LoopContext",
        [X3_JCYCLER] = "Cycler", [X3_JJOINER] = "Joiner"};

    if (v.type == X3_JVIEW)
        return v.view->kind == 'k' ? "dict_keys" : v.view->kind == 'v' ? "dict_values" : "dict_items";
    if (v.type == X3_JSTR && v.s->is_markup)
        return "Markup";
    return names[v.type];
}

bool x3_jval_truth(x3_jval v)
{
    size_t n;

    if (v.type == X3_JBOOL)
        return v.b;
    if (v.type == X3_JINT)
        return v.i != 0;
    if (v.type == X3_JFLOAT)
        return v.f != 0;
    if (v.type == X3_JNONE || v.type == X3_JUNDEFINED || v.type == X3_JMISSING)
        return false;
    if (v.type == X3_JLOOP) /* its length is at least one while it can be seen */
        return true;
    return !x3_jval_length(v, &n) || n > 0;
}

bool x3_jval_as_int(x3_jval v, int64_t *out)
{
    *out = v.type == X3_JBOOL ? v.b : v.type == X3_JINT ? v.i : 0;
    return v.type == X3_JBOOL || v.type == X3_JINT;
}

bool x3_jval_as_float(x3_jval v, double *out)
{
    int64_t i;

    if (v.type == X3_JFLOAT) {
        *out = v.f;
        return true;
    }
    if (!x3_jval_as_int(v, &i))
        return false;
    *out = (double)i;
    return true;
}

bool x3_jval_length(x3_jval v, size_t *out)
{
    *out = 0;
    if (v.type == X3_JSTR)
        *out = v.s->n_chars;
    else if (v.type == X3_JLIST || v.type == X3_JTUPLE)
        *out = v.list->n_items;
    else if (v.type == X3_JDICT)
        *out = v.dict->n_items;
    else if (v.type == X3_JVIEW)
        *out = v.view->dict->n_items;
    else if (v.type == X3_JRANGE)
        *out = x3_jrange_length(v.range);
    else
        return v.type == X3_JUNDEFINED;
    return true;
}

static uint64_t mix(uint64_t x)
{
    x = (x ^ (x >> 32)) * 0x9E3779B97F4A7C15u;
    return x ^ (x >> 29);
}

x3_status x3_jval_hash(x3_jrun *run, x3_jval v, uint64_t *out)
{
    int64_t i;

    TRY(x3_jrun_steps(run, 1));
    if (v.type == X3_JSTR) {
        TRY(x3_jrun_steps(run, v.s->n_bytes / 64));
        *out = hash_text(v.s);
    } else if (x3_jval_as_int(v, &i)) {
        *out = mix((uint64_t)i);
    } else if (v.type == X3_JFLOAT) { /* equal to the hash of an equal int */
        bool whole = v.f == floor(v.f) && fabs(v.f) < 0x1p63;
        uint64_t bits;
        memcpy(&bits, &v.f, sizeof bits);
        *out = mix(whole ? (uint64_t)(int64_t)v.f : bits);
    } else if (v.type == X3_JTUPLE) {
        uint64_t hash = 0x345678, one;
        TRY(x3_jrun_enter(run));
        for (size_t k = 0; k < v.list->n_items; k++) {
            TRY(x3_jval_hash(run, v.list->items[k], &one));
            hash = mix(hash ^ one) + 1;
        }
        x3_jrun_leave(run);
        *out = hash;
    } else if (v.type == X3_JLIST || v.type == X3_JDICT || (v.type == X3_JVIEW && v.view->kind != 'v')) {
        return x3_jrun_fail(run, "unhashable type: '%s'", x3_jval_type_name(v));
    } else if (v.type == X3_JRANGE) {
        *out = mix(x3_jrange_length(v.range));
    } else {
        *out = mix(v.type + ((v.type == X3_JNONE || v.type == X3_JUNDEFINED) ? 0 : (uint64_t)(uintptr_t)v.list));
    }
    return X3_OK;
}

/* ---- undefined ---- */

static x3_status new_undefined(x3_jrun *run, x3_jundefined from, x3_jval *out)
{
    x3_jundefined *u;

    TRY(x3_jrun_alloc(run, &u, 1, sizeof *u));
    *u = from;
    *out = (x3_jval){.type = X3_JUNDEFINED, .undefined = u};
    return X3_OK;
}

x3_status x3_jundefined_name(x3_jrun *run, const x3_jstr *name, x3_jval *out)
{
    return new_undefined(run, (x3_jundefined){.name = {.type = X3_JSTR, .s = name}}, out);
}

x3_status x3_jundefined_member(x3_jrun *run, x3_jval object, x3_jval name, x3_jval *out)
{
    return new_undefined(run, (x3_jundefined){.object = object, .name = name}, out);
}

x3_status x3_jundefined_hint(x3_jrun *run, const char *hint, x3_jval *out)
{
    return new_undefined(run, (x3_jundefined){.hint = hint}, out);
}

x3_status x3_jundefined_fail(x3_jrun *run, x3_jval v)
{
    const x3_jundefined *u = v.undefined;
    x3_jbuf name = {0};

    if (u->hint != NULL)
        return x3_jrun_fail(run, "%s", u->hint);
    TRY(x3_jprint_repr(run, &name, u->name));
    if (u->object.type == X3_JMISSING)
        return x3_jrun_fail(run, "%.*s is undefined", (int)x3_min_size(name.n_bytes, 200), name.data);
    return x3_jrun_fail(run, u->name.type == X3_JSTR ? "'%s%s' has no attribute %.*s" : "%s%s has no element %.*s",
                        u->object.type == X3_JNONE ? "None" : x3_jval_type_name(u->object),
                        u->object.type == X3_JNONE ? "" : " object", (int)x3_min_size(name.n_bytes, 200), name.data);
}

/* ---- from JSON ---- */

static x3_status str_from_json(x3_jrun *run, const char *text, x3_jval *out)
{
    x3_view view = {text, strlen(text)};
    x3_text repaired = {0};
    x3_status rc;

    if (x3_utf8_valid(view.data, view.n_bytes) == view.n_bytes)
        return x3_jstr_view(run, view.data, view.n_bytes, out);
    rc = x3_utf8_repair(&view, &repaired, run->err);
    if (rc == X3_OK)
        rc = x3_jstr_copy(run, view.data, view.n_bytes, out);
    x3_text_free(&repaired);
    return rc;
}

static x3_status members_from_json(x3_jrun *run, const cJSON *json, x3_jval *out)
{
    bool is_object = cJSON_IsObject(json);
    x3_jdict *dict = NULL;
    x3_jlist *list = NULL;
    x3_jval key, value;

    TRY(x3_jrun_enter(run));
    if (is_object)
        TRY(x3_jdict_new(run, &dict));
    else
        TRY(x3_jlist_new(run, 0, &list));
    for (const cJSON *item = json->child; item != NULL; item = item->next) {
        TRY(x3_jval_from_json(run, item, &value));
        if (is_object) {
            TRY(str_from_json(run, item->string == NULL ? "" : item->string, &key));
            TRY(x3_jdict_set(run, dict, key, value));
        } else {
            TRY(x3_jlist_push(run, list, value));
        }
    }
    x3_jrun_leave(run);
    *out = is_object ? x3_jval_dict(dict) : x3_jval_list(list);
    return X3_OK;
}

x3_status x3_jval_from_json(x3_jrun *run, const cJSON *json, x3_jval *out)
{
    double f = json->valuedouble;

    TRY(x3_jrun_steps(run, 1));
    if (cJSON_IsString(json))
        return str_from_json(run, json->valuestring, out);
    if (cJSON_IsObject(json) || cJSON_IsArray(json))
        return members_from_json(run, json, out);
    if (cJSON_IsNumber(json))
        *out = f == floor(f) && f >= -0x1p63 && f < 0x1p63 ? x3_jval_int((int64_t)f) : x3_jval_float(f);
    else if (cJSON_IsBool(json))
        *out = x3_jval_bool(cJSON_IsTrue(json));
    else if (cJSON_IsNull(json))
        *out = x3_jval_none();
    else
        return x3_jrun_fail(run, "a variable is not a JSON value (cJSON type %d)", json->type);
    return X3_OK;
}
