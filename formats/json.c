#include "formats/json.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "formats/utf8.h"

#define JSON_BYTES_MAX ((uint64_t)1 << 30)

/* ---- what cJSON lets through ---- */

static bool is_digit(const char *p, const char *end)
{
    return p < end && *p >= '0' && *p <= '9';
}

/* The code unit of \uXXXX at p, or -1. */
static int code_unit(const char *p, const char *end)
{
    int unit = 0;

    if (end - p < 6 || p[0] != '\\' || p[1] != 'u')
        return -1;
    for (int i = 2; i < 6; i++) {
        int c = p[i] | 0x20, digit = p[i] >= '0' && p[i] <= '9' ? p[i] - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
        if (digit < 0)
            return -1;
        unit = unit * 16 + digit;
    }
    return unit;
}

/* *p is behind the opening quote; then behind the closing one. */
static const char *string_problem(const char **p, const char *end)
{
    while (*p < end && **p != '"') {
        int unit;
        if ((unsigned char)**p < 0x20)
            return **p == '\0' ? "a NUL byte" : "a control character in a string";
        if (**p != '\\') {
            ++*p;
            continue;
        }
        if (end - *p < 2 || (*p)[1] == '\0' || strchr("\"\\/bfnrtu", (*p)[1]) == NULL)
            return "an escape that JSON does not have";
        if ((*p)[1] != 'u') {
            *p += 2;
            continue;
        }
        unit = code_unit(*p, end);
        if (unit < 0)
            return "\\u without four hexadecimal digits";
        if (unit == 0)
            return "\\u0000, which no name may contain";
        if (unit >= 0xD800 && unit <= 0xDFFF) {
            int low = unit <= 0xDBFF ? code_unit(*p + 6, end) : -1;
            if (low < 0xDC00 || low > 0xDFFF)
                return "half of a surrogate pair";
            *p += 6;
        }
        *p += 6;
    }
    if (*p == end)
        return "a string without an end";
    ++*p;
    return NULL;
}

static const char *number_problem(const char **p, const char *end)
{
    static const char problem[] = "a number that JSON does not write so";

    *p += **p == '-';
    if (!is_digit(*p, end) || (**p == '0' && is_digit(*p + 1, end)))
        return problem;
    while (is_digit(*p, end))
        ++*p;
    if (*p < end && **p == '.') {
        ++*p;
        if (!is_digit(*p, end))
            return problem;
        while (is_digit(*p, end))
            ++*p;
    }
    if (*p < end && (**p | 0x20) == 'e') {
        ++*p;
        *p += *p < end && (**p == '+' || **p == '-');
        if (!is_digit(*p, end))
            return problem;
        while (is_digit(*p, end))
            ++*p;
    }
    return *p < end && **p != '\0' && strchr("+-.", **p) != NULL ? problem : NULL;
}

/* cJSON parses more than JSON, and ends a string at a NUL, so two names could become one. NULL: the tokens are those of
 * JSON (its structure is left to cJSON). *at: where the problem lies. */
static const char *token_problem(const char *text, size_t n_bytes, size_t *at)
{
    const char *p = text, *end = text + n_bytes, *problem = NULL;

    *at = x3_utf8_valid(text, n_bytes);
    if (*at < n_bytes)
        return "a byte that is not UTF-8";
    while (problem == NULL && p < end) {
        const char *begin = p++;
        *at = (size_t)(begin - text);
        if (*begin == '"')
            problem = string_problem(&p, end);
        else if (*begin == '-' || is_digit(begin, end))
            problem = number_problem((p = begin, &p), end);
        else if (*begin == '\0')
            problem = "a NUL byte";
        else if ((unsigned char)*begin < 0x20 && strchr("\t\r\n", *begin) == NULL)
            problem = "a control character";
    }
    return problem;
}

/* ---- reading ---- */

static int compare_keys(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* cJSON keeps both members of a doubled key, readers disagree on which one counts: so neither does. */
static x3_status reject_duplicates(const cJSON *node, const char *where, x3_err *err)
{
    x3_status rc = X3_OK;
    const char **keys = NULL;
    size_t n = 0;

    for (const cJSON *c = node->child; c != NULL; c = c->next, n++)
        if (c->child != NULL)
            X3_TRY(rc, out, reject_duplicates(c, where, err));
    if (!cJSON_IsObject(node) || n < 2)
        goto out;
    X3_TRY(rc, out, x3_alloc(&keys, n, sizeof *keys, err));
    n = 0;
    for (const cJSON *c = node->child; c != NULL; c = c->next)
        keys[n++] = c->string;
    qsort(keys, n, sizeof *keys, compare_keys);
    for (size_t i = 1; i < n; i++)
        if (strcmp(keys[i - 1], keys[i]) == 0) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: key \"%.200s\" stands twice in one object", where, keys[i]);
            break;
        }
out:
    free(keys);
    return rc;
}

x3_status x3_json_parse(cJSON **out, const char *text, size_t n_bytes, const char *where, x3_err *err)
{
    const char *end = NULL;
    x3_status rc;
    cJSON *json;
    size_t problem_at;
    const char *problem = token_problem(text, n_bytes, &problem_at);

    *out = NULL;
    if (problem != NULL)
        return x3_fail(err, X3_ERR_INPUT, "%s: JSON holds %s (token at byte %zu of %zu)", where, problem, problem_at, n_bytes);
    json = cJSON_ParseWithLengthOpts(text, n_bytes, &end, false);
    if (json == NULL) {
        size_t at = end == NULL ? 0 : (size_t)(end - text);
        return x3_fail(err, X3_ERR_INPUT, "%s: not valid JSON near byte %zu of %zu", where, at, n_bytes);
    }
    for (; end < text + n_bytes; end++)
        if (*end != ' ' && *end != '\n' && *end != '\r' && *end != '\t') {
            cJSON_Delete(json);
            return x3_fail(err, X3_ERR_INPUT, "%s: text after the JSON value at byte %zu", where,
                           (size_t)(end - text));
        }
    rc = reject_duplicates(json, where, err);
    if (rc != X3_OK) {
        cJSON_Delete(json);
        return rc;
    }
    *out = json;
    return X3_OK;
}

x3_status x3_json_load(cJSON **out, const char *path, x3_err *err)
{
    char *text = NULL;
    size_t n_bytes = 0;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_read_file(&text, &n_bytes, path, JSON_BYTES_MAX, err));
    X3_TRY(rc, out, x3_json_parse(out, text, n_bytes, path, err));
    if (!cJSON_IsObject(*out)) {
        cJSON_Delete(*out);
        *out = NULL;
        rc = x3_fail(err, X3_ERR_INPUT, "%s: the top of the file is not a JSON object", path);
    }
out:
    free(text);
    return rc;
}

x3_status x3_json_save(const cJSON *json, const char *path, x3_err *err)
{
    char *text = cJSON_Print(json);
    size_t n;
    x3_status rc;

    if (text == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "%s: out of memory while printing JSON", path);
    n = strlen(text);
    text[n] = '\n'; /* in place of the NUL: the length is passed on */
    rc = x3_write_file(path, text, n + 1, err);
    cJSON_free(text);
    return rc;
}

const cJSON *x3_json_get(const cJSON *object, const char *key)
{
    const cJSON *node = cJSON_GetObjectItemCaseSensitive(object, key);

    return node == NULL || cJSON_IsNull(node) ? NULL : node;
}

static const char *type_name(const cJSON *node)
{
    if (cJSON_IsString(node))
        return "a string";
    if (cJSON_IsNumber(node))
        return "a number";
    if (cJSON_IsBool(node))
        return "true or false";
    if (cJSON_IsArray(node))
        return "a list";
    return cJSON_IsObject(node) ? "an object" : "null";
}

static x3_status missing(const char *key, const char *where, x3_err *err)
{
    return x3_fail(err, X3_ERR_INPUT, "%s: \"%s\" is missing", where, key);
}

static x3_status wrong_type(const cJSON *node, const char *key, const char *wanted, const char *where, x3_err *err)
{
    return x3_fail(err, X3_ERR_INPUT, "%s: \"%s\" is %s, expected %s", where, key, type_name(node), wanted);
}

x3_status x3_json_as_int(const cJSON *node, const char *name, int64_t min, int64_t max, int64_t *out,
                         const char *where, x3_err *err)
{
    double v;

    if (!cJSON_IsNumber(node))
        return wrong_type(node, name, "a whole number", where, err);
    v = node->valuedouble;
    if (!(fabs(v) <= 9007199254740992.0) || v != floor(v))
        return x3_fail(err, X3_ERR_INPUT, "%s: \"%s\" is %.17g, expected a whole number", where, name, v);
    if (v < (double)min || v > (double)max)
        return x3_fail(err, X3_ERR_INPUT, "%s: \"%s\" is %.17g, expected %lld to %lld", where, name, v,
                       (long long)min, (long long)max);
    *out = (int64_t)v;
    return X3_OK;
}

x3_status x3_json_int(const cJSON *object, const char *key, int64_t min, int64_t max, bool required, int64_t *out,
                      const char *where, x3_err *err)
{
    const cJSON *node = x3_json_get(object, key);

    if (node == NULL)
        return required ? missing(key, where, err) : X3_OK;
    return x3_json_as_int(node, key, min, max, out, where, err);
}

x3_status x3_json_number(const cJSON *object, const char *key, bool required, double *out, const char *where,
                         x3_err *err)
{
    const cJSON *node = x3_json_get(object, key);

    if (node == NULL)
        return required ? missing(key, where, err) : X3_OK;
    if (!cJSON_IsNumber(node))
        return wrong_type(node, key, "a number", where, err);
    if (!isfinite(node->valuedouble))
        return x3_fail(err, X3_ERR_INPUT, "%s: \"%s\" is not finite", where, key);
    *out = node->valuedouble;
    return X3_OK;
}

x3_status x3_json_bool(const cJSON *object, const char *key, bool required, bool *out, const char *where, x3_err *err)
{
    const cJSON *node = x3_json_get(object, key);

    if (node == NULL)
        return required ? missing(key, where, err) : X3_OK;
    if (!cJSON_IsBool(node))
        return wrong_type(node, key, "true or false", where, err);
    *out = cJSON_IsTrue(node);
    return X3_OK;
}

x3_status x3_json_string(const cJSON *object, const char *key, bool required, const char **out, const char *where,
                         x3_err *err)
{
    const cJSON *node = x3_json_get(object, key);

    if (node == NULL)
        return required ? missing(key, where, err) : X3_OK;
    if (!cJSON_IsString(node))
        return wrong_type(node, key, "a string", where, err);
    *out = node->valuestring;
    return X3_OK;
}

x3_status x3_json_add(cJSON *object, const char *key, cJSON *value, x3_err *err)
{
    if (value != NULL && (cJSON_IsArray(object) ? cJSON_AddItemToArray(object, value)
                                                : cJSON_AddItemToObject(object, key, value)))
        return X3_OK;
    cJSON_Delete(value);
    return x3_fail(err, X3_ERR_MEMORY, "out of memory while building JSON \"%s\"", key == NULL ? "" : key);
}

x3_status x3_json_add_hash(cJSON *object, const char *key, uint64_t hash, x3_err *err)
{
    char text[17];

    x3_hash_text(hash, text);
    return x3_json_add(object, key, cJSON_CreateString(text), err);
}
