#include "runtime/jinja/jinja_internal.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/tokenizer/unicode.h"

/* The entry points, and what compiling needs of memory and messages. */

x3_status x3_jcompile_fail(x3_jcompile *c, uint32_t line, const char *format, ...)
{
    char text[1200];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return x3_fail(c->err, X3_ERR_INPUT, "%s:%u: %s", c->jinja->name, (unsigned)line, text);
}

x3_status x3_jcompile_refuse(x3_jcompile *c, uint32_t line, const char *format, ...)
{
    char text[1200];
    va_list args;

    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    return x3_fail(c->err, X3_ERR_UNSUPPORTED, "%s:%u: %s", c->jinja->name, (unsigned)line, text);
}

x3_status x3_jcompile_alloc(x3_jcompile *c, void *out, size_t n, size_t size)
{
    return x3_arena_alloc(&c->jinja->arena, out, n, size, c->err);
}

/* A NUL follows the bytes, for messages. */
static x3_status fill_str(x3_jcompile *c, const char *data, size_t n, x3_jstr *s)
{
    char *copy;

    TRY(x3_jcompile_alloc(c, &copy, n + 1, 1));
    memcpy(copy, data, n);
    *s = (x3_jstr){.data = copy, .n_bytes = n};
    for (size_t i = 0; i < n; i++)
        s->n_chars += ((unsigned char)copy[i] & 0xC0) != 0x80;
    return X3_OK;
}

x3_status x3_jcompile_str(x3_jcompile *c, const char *data, size_t n, x3_jval *out)
{
    x3_jstr *s;

    TRY(x3_jcompile_alloc(c, &s, 1, sizeof *s));
    *out = (x3_jval){.type = X3_JSTR, .s = s};
    return fill_str(c, data, n, s);
}

x3_status x3_jcompile_name(x3_jcompile *c, const char *data, size_t n, x3_jname **out)
{
    x3_jname **bucket = &c->names[x3_hash(data, n) % X3_JNAME_BUCKETS];

    for (*out = *bucket; *out != NULL; *out = (*out)->chain)
        if ((*out)->text.n_bytes == n && memcmp((*out)->text.data, data, n) == 0)
            return X3_OK;
    TRY(x3_jcompile_alloc(c, out, 1, sizeof **out));
    (*out)->chain = *bucket;
    *bucket = *out;
    return fill_str(c, data, n, &(*out)->text);
}

/* ---- compile, render, free ---- */

x3_status x3_jinja_compile(x3_jinja **out, const char *text, size_t n_bytes, const char *name, x3_err *err)
{
    x3_jcompile c = {.err = err};
    x3_status rc = X3_OK;
    x3_jnode *body;

    *out = NULL;
    if (n_bytes > X3_JINJA_TEXT_MAX)
        return x3_fail(err, X3_ERR_INPUT, "%s: a template of %zu bytes, more than %zu", name, n_bytes,
                       X3_JINJA_TEXT_MAX);
    if (x3_utf8_valid(text, n_bytes) != n_bytes)
        return x3_fail(err, X3_ERR_INPUT, "%s: not UTF-8 at byte %zu of %zu", name, x3_utf8_valid(text, n_bytes),
                       n_bytes);
    X3_TRY(rc, out, x3_alloc(&c.jinja, 1, sizeof *c.jinja, err));
    X3_TRY(rc, out, x3_alloc(&c.names, X3_JNAME_BUCKETS, sizeof *c.names, err));
    X3_TRY(rc, out, x3_strdup(&c.jinja->name, name, err));
    X3_TRY(rc, out, x3_jparser_parse(&c, text, n_bytes, &body));
    X3_TRY(rc, out, x3_jscope_resolve(&c, body, &c.jinja->root));
    *out = c.jinja;
    c.jinja = NULL;
out:
    x3_jinja_free(c.jinja);
    free(c.names);
    return rc;
}

void x3_jinja_free(x3_jinja *jinja)
{
    if (jinja == NULL)
        return;
    x3_arena_free(&jinja->arena);
    free(jinja->name);
    free(jinja);
}

static uint64_t or_default(uint64_t value, uint64_t fallback)
{
    return value != 0 ? value : fallback;
}

static x3_status run_root(x3_jrun *run, const cJSON *variables)
{
    x3_jval v;

    TRY(x3_jdict_new(run, &run->variables));
    if (variables != NULL && !cJSON_IsObject(variables))
        return x3_jrun_fail(run, "the variables of a template must be a JSON object");
    if (variables != NULL) {
        TRY(x3_jval_from_json(run, variables, &v));
        run->variables = v.dict;
    }
    TRY(x3_jexec_scope(run, &run->jinja->root, NULL, &run->scope));
    TRY(x3_jexec_enter(run, &run->jinja->root.frame));
    return x3_jexec_body(run, run->jinja->root.body);
}

x3_status x3_jinja_render(const x3_jinja *jinja, const cJSON *variables, const x3_jinja_options *options, char **out,
                          size_t *n_bytes, x3_err *err)
{
    x3_jinja_options o = options == NULL ? (x3_jinja_options){0} : *options;
    x3_jbuf result = {0};
    x3_jrun run = {.jinja = jinja, .err = err, .line = 1, .now = o.now, .out = &result, .result = &result};
    x3_status rc;

    *out = NULL;
    *n_bytes = 0;
    run.steps_left = or_default(o.max_steps, 30000000);
    run.bytes_left = or_default(o.max_bytes, (uint64_t)512 << 20);
    run.max_output = or_default(o.max_output, (uint64_t)64 << 20);
    run.max_depth = (uint32_t)or_default(o.max_depth, 2000);
    X3_TRY(rc, out, run_root(&run, variables));
    X3_TRY(rc, out, x3_strndup(out, result.data == NULL ? "" : result.data, result.n_bytes, err));
    *n_bytes = result.n_bytes;
out:
    x3_arena_free(&run.arena);
    return rc;
}
