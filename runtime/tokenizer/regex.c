#include "runtime/tokenizer/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <pcre2.h>
#include <stdlib.h>

#include "runtime/tokenizer/oniguruma.h"

#define STEPS_MIN 10000000u
#define STEPS_PER_BYTE 100u
#define JIT_STACK_MIN ((size_t)1 << 15)
#define JIT_STACK_MAX ((size_t)1 << 28)

struct x3_regex {
    pcre2_code *code;
    char *where;
};

static pcre2_code *compile(const char *pattern, size_t n_bytes, uint32_t options, int *error, size_t *at)
{
    pcre2_compile_context *context = pcre2_compile_context_create(NULL);
    pcre2_code *code = NULL;

    *error = PCRE2_ERROR_NOMEMORY;
    *at = 0;
    if (context == NULL)
        return NULL;
    pcre2_set_newline(context, PCRE2_NEWLINE_LF);
    code = pcre2_compile((PCRE2_SPTR)pattern, n_bytes, options, error, at, context);
    pcre2_compile_context_free(context);
    if (code != NULL)
        (void)pcre2_jit_compile(code, PCRE2_JIT_COMPLETE); /* without it the interpreter matches */
    return code;
}

x3_status x3_regex_compile(x3_regex **out, const char *pattern, size_t n_bytes, bool literal, const char *where,
                           x3_err *err)
{
    uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
    x3_text translated = {0};
    x3_regex *r = NULL;
    size_t at;
    int error;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&r, 1, sizeof *r, err));
    X3_TRY(rc, out, x3_strdup(&r->where, where, err));
    if (literal)
        X3_TRY(rc, out, x3_text_put(&translated, pattern, n_bytes, err));
    else
        X3_TRY(rc, out, x3_oniguruma_translate(&translated, pattern, n_bytes, where, err));
    r->code = compile(translated.items == NULL ? "" : translated.items, translated.n_items, options, &error, &at);
    if (r->code == NULL) {
        char message[200];
        pcre2_get_error_message(error, (PCRE2_UCHAR *)message, sizeof message);
        rc = x3_fail(err, error == PCRE2_ERROR_NOMEMORY ? X3_ERR_MEMORY : X3_ERR_UNSUPPORTED,
                     "%s: pattern \"%.*s\": PCRE2 says: %s", where, (int)x3_min_size(n_bytes, 300), pattern, message);
        goto out;
    }
    *out = r;
    r = NULL;
out:
    x3_text_free(&translated);
    x3_regex_free(r);
    return rc;
}

void x3_regex_free(x3_regex *regex)
{
    if (regex == NULL)
        return;
    pcre2_code_free(regex->code);
    free(regex->where);
    free(regex);
}

void x3_regex_scratch_free(x3_regex_scratch *scratch)
{
    pcre2_match_data_free(scratch->match_data);
    pcre2_match_context_free(scratch->match_context);
    pcre2_jit_stack_free(scratch->jit_stack);
    *scratch = (x3_regex_scratch){0};
}

static x3_status prepare(x3_regex_scratch *s, x3_err *err)
{
    if (s->match_data == NULL)
        s->match_data = pcre2_match_data_create(1, NULL);
    if (s->match_context == NULL)
        s->match_context = pcre2_match_context_create(NULL);
    if (s->match_data == NULL || s->match_context == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory: match data");
    return X3_OK;
}

/* The compiled matcher starts on 32 KiB of stack, then tries a large one, then the interpreter on the heap: a group
 * repeated over a megabyte of letters needs more than a little. */
static int match(const x3_regex *r, x3_regex_scratch *s, const char *text, size_t n_bytes, size_t from)
{
    PCRE2_SPTR subject = (PCRE2_SPTR)text;
    int result = pcre2_match(r->code, subject, n_bytes, from, PCRE2_NO_UTF_CHECK, s->match_data, s->match_context);

    if (result == PCRE2_ERROR_JIT_STACKLIMIT && s->jit_stack == NULL) {
        s->jit_stack = pcre2_jit_stack_create(JIT_STACK_MIN, JIT_STACK_MAX, NULL);
        if (s->jit_stack != NULL) {
            pcre2_jit_stack_assign(s->match_context, NULL, s->jit_stack);
            result = pcre2_match(r->code, subject, n_bytes, from, PCRE2_NO_UTF_CHECK, s->match_data, s->match_context);
        }
    }
    if (result == PCRE2_ERROR_JIT_STACKLIMIT)
        result = pcre2_match(r->code, subject, n_bytes, from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, s->match_data,
                             s->match_context);
    return result;
}

x3_status x3_regex_find(const x3_regex *regex, x3_regex_scratch *scratch, const char *text, size_t n_bytes, size_t from,
                        bool *found, size_t *start, size_t *end, x3_err *err)
{
    uint64_t steps = STEPS_MIN + STEPS_PER_BYTE * (uint64_t)n_bytes;
    x3_status rc = prepare(scratch, err);
    char message[200];

    *found = false;
    *start = *end = 0;
    if (rc != X3_OK)
        return rc;
    pcre2_set_match_limit(scratch->match_context, steps > UINT32_MAX ? UINT32_MAX : (uint32_t)steps);
    pcre2_set_depth_limit(scratch->match_context, UINT32_MAX);
    int result = match(regex, scratch, n_bytes == 0 ? "" : text, n_bytes, from);
    if (result == PCRE2_ERROR_NOMATCH)
        return X3_OK;
    if (result < 0) {
        pcre2_get_error_message(result, (PCRE2_UCHAR *)message, sizeof message);
        bool no_memory = result == PCRE2_ERROR_NOMEMORY || result == PCRE2_ERROR_HEAPLIMIT;
        return x3_fail(err, no_memory ? X3_ERR_MEMORY : X3_ERR_INPUT,
                       "%s: no match could be worked out at byte %zu of %zu: %s", regex->where, from, n_bytes, message);
    }
    const PCRE2_SIZE *extent = pcre2_get_ovector_pointer(scratch->match_data);
    *found = true;
    *start = extent[0];
    *end = extent[1];
    return X3_OK;
}
