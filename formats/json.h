/* Strict reading of JSON on top of cJSON: what RFC 8259 does not allow (raw control characters, numbers like 01, lone
 * surrogates, bytes that are not UTF-8), \u0000, duplicate keys, trailing text, wrong types and numbers out of range are
 * errors that name the file and the place or key. */
#ifndef X3_JSON_H
#define X3_JSON_H

#include <cjson/cJSON.h>

#include "formats/base.h"

/* Parses n_bytes of text; `where` (a file name) goes into messages. The result is freed by cJSON_Delete. */
x3_status x3_json_parse(cJSON **out, const char *text, size_t n_bytes, const char *where, x3_err *err) X3_MUST;
/* Reads and parses a file of at most 1 GiB whose top is an object. */
x3_status x3_json_load(cJSON **out, const char *path, x3_err *err) X3_MUST;
/* Prints and writes atomically, indented, newline at the end. */
x3_status x3_json_save(const cJSON *json, const char *path, x3_err *err) X3_MUST;

/* The member, or NULL when it is missing or null. Exact name. */
const cJSON *x3_json_get(const cJSON *object, const char *key);

/* Typed members of `object`. Whole numbers have no fraction and lie in [min, max]. With `required` false a
 * missing or null member leaves *out as it was; a member of another type is an error either way. */
x3_status x3_json_int(const cJSON *object, const char *key, int64_t min, int64_t max, bool required, int64_t *out,
                      const char *where, x3_err *err) X3_MUST;
x3_status x3_json_number(const cJSON *object, const char *key, bool required, double *out, const char *where,
                         x3_err *err) X3_MUST;
x3_status x3_json_bool(const cJSON *object, const char *key, bool required, bool *out, const char *where,
                       x3_err *err) X3_MUST;
/* *out is borrowed from the tree. */
x3_status x3_json_string(const cJSON *object, const char *key, bool required, const char **out, const char *where,
                         x3_err *err) X3_MUST;

/* The value of one node as a whole number in [min, max]; `name` is the key for the message. */
x3_status x3_json_as_int(const cJSON *node, const char *name, int64_t min, int64_t max, int64_t *out,
                         const char *where, x3_err *err) X3_MUST;

/* Builders that report a failed allocation. */
x3_status x3_json_add(cJSON *object, const char *key, cJSON *value, x3_err *err) X3_MUST;
x3_status x3_json_add_hash(cJSON *object, const char *key, uint64_t hash, x3_err *err) X3_MUST;

#endif
