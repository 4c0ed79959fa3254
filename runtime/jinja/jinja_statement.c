#include "runtime/jinja/jinja_internal.h"

#include <string.h>

/* The statements of jinja2.parser. `ends` are the tags that end a body, separated by spaces; the one found stays the
 * current token. */

static x3_status parse_body(x3_jparser *p, const char *ends, x3_jnode **out) X3_MUST;

/* The rest of the tag, a body, and its end tag's name skipped when `drop`. */
static x3_status parse_statements(x3_jparser *p, const char *ends, bool drop, x3_jnode **out)
{
    bool colon;

    TRY(x3_jtok_skip_op(p, ':', &colon));
    TRY(x3_jtok_expect(p, X3_JT_BLOCK_END, "end of statement block"));
    TRY(parse_body(p, ends, out));
    if (p->token.kind == X3_JT_END)
        return x3_jcompile_fail(p->c, p->token.line, "Unexpected end of template. Jinja was looking for the following "
                                "tags: '%s'.", ends);
    return drop ? x3_jtok_next(p) : X3_OK;
}

/* Makes names and tuples targets (of `with`: parameters); anything else cannot be assigned to. */
static x3_status make_target(x3_jparser *p, bool is_param, x3_jnode *node)
{
    if (node->kind == X3_JK_NSREF)
        return X3_OK;
    if (node->kind != X3_JK_NAME && node->kind != X3_JK_TUPLE)
        return x3_jcompile_fail(p->c, node->line, "can't assign to an expression that is no name");
    node->is_store = !is_param;
    node->is_param = is_param;
    for (x3_jnode *item = node->list; item != NULL; item = item->next)
        TRY(make_target(p, is_param, item));
    return X3_OK;
}

static x3_status parse_target(x3_jparser *p, const char *ends, bool with_namespace, x3_jnode **out)
{
    TRY(x3_jparse_tuple(p, with_namespace ? X3_JPART_TARGET_NS : X3_JPART_TARGET, ends, false, out));
    return make_target(p, false, *out);
}

static x3_status parse_set(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    x3_jnode *target;
    bool has_value;

    TRY(parse_target(p, "", true, &target));
    TRY(x3_jtok_skip_op(p, '=', &has_value));
    TRY(x3_jnode_new(p, has_value ? X3_JK_SET : X3_JK_SET_BLOCK, line, out));
    (*out)->a = target;
    if (has_value)
        return x3_jparse_tuple(p, X3_JPART_FULL, "", false, &(*out)->b);
    TRY(x3_jparse_filters(p, false, &(*out)->b));
    return parse_statements(p, "endset", true, &(*out)->body);
}

static x3_status parse_for(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    bool found;

    TRY(x3_jnode_new(p, X3_JK_FOR, line, out));
    TRY(parse_target(p, "in", false, &(*out)->a));
    TRY(x3_jtok_skip_name(p, "in", &found));
    if (!found)
        return x3_jtok_fail(p, "in");
    TRY(x3_jparse_tuple(p, X3_JPART_NO_COND, "recursive", false, &(*out)->b));
    TRY(x3_jtok_skip_name(p, "if", &found));
    if (found) {
        TRY(x3_jcompile_alloc(p->c, &(*out)->code, 1, sizeof *(*out)->code));
        TRY(x3_jparse_expression(p, &(*out)->code->test));
    }
    if (x3_jtok_is_name(p, "recursive"))
        return x3_jcompile_refuse(p->c, line, "recursive loops are not supported");
    TRY(parse_statements(p, "endfor else", false, &(*out)->body));
    found = x3_jtok_is_name(p, "else");
    TRY(x3_jtok_next(p));
    if (!found)
        return X3_OK;
    TRY(parse_statements(p, "endfor", true, &(*out)->else_));
    return X3_OK;
}

static x3_status parse_if(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    x3_jchain elifs = {0};
    x3_jnode *node;

    TRY(x3_jnode_new(p, X3_JK_IF, line, out));
    for (node = *out;;) {
        TRY(x3_jparse_tuple(p, X3_JPART_NO_COND, "", false, &node->a));
        TRY(parse_statements(p, "elif else endif", false, &node->body));
        if (!x3_jtok_is_name(p, "elif"))
            break;
        TRY(x3_jtok_next(p));
        TRY(x3_jnode_new(p, X3_JK_IF, p->token.line, &node));
        x3_jchain_put(&elifs, node);
        (*out)->list = elifs.first;
    }
    bool has_else = x3_jtok_is_name(p, "else");
    TRY(x3_jtok_next(p));
    return has_else ? parse_statements(p, "endif", true, &(*out)->else_) : X3_OK;
}

static x3_status parse_with(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    x3_jchain targets = {0}, values = {0};
    x3_jnode *node;

    TRY(x3_jnode_new(p, X3_JK_WITH, line, out));
    while (p->token.kind != X3_JT_BLOCK_END) {
        if (targets.n > 0)
            TRY(x3_jtok_expect_op(p, ','));
        TRY(parse_target(p, "", false, &node));
        TRY(make_target(p, true, node));
        x3_jchain_put(&targets, node);
        TRY(x3_jtok_expect_op(p, '='));
        TRY(x3_jparse_expression(p, &node));
        x3_jchain_put(&values, node);
    }
    (*out)->list = targets.first;
    (*out)->list2 = values.first;
    return parse_statements(p, "endwith", true, &(*out)->body);
}

/* (a, b=1) */
static x3_status parse_signature(x3_jparser *p, x3_jcode *code)
{
    x3_jchain params = {0}, defaults = {0};
    x3_jnode *node;
    bool has_default;

    TRY(x3_jtok_expect_op(p, '('));
    while (!x3_jtok_is_op(p, ')')) {
        if (params.n > 0)
            TRY(x3_jtok_expect_op(p, ','));
        TRY(x3_jnode_new(p, X3_JK_NAME, p->token.line, &node));
        node->is_param = true;
        TRY(x3_jtok_expect_name(p, &node->name));
        for (const x3_jnode *other = params.first; other != NULL; other = other->next)
            if (other->name == node->name)
                return x3_jcompile_fail(p->c, node->line, "duplicate argument '%s' in function definition",
                                        node->name->text.data);
        x3_jchain_put(&params, node);
        TRY(x3_jtok_skip_op(p, '=', &has_default));
        if (has_default) {
            TRY(x3_jparse_expression(p, &node));
            x3_jchain_put(&defaults, node);
        } else if (defaults.n > 0) {
            return x3_jcompile_fail(p->c, node->line, "non-default argument follows default argument");
        }
    }
    code->params = params.first;
    code->n_params = params.n;
    code->defaults = defaults.first;
    code->n_defaults = defaults.n;
    return x3_jtok_next(p);
}

static x3_status parse_macro(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    x3_jcode *code;

    TRY(x3_jnode_new(p, X3_JK_MACRO, line, out));
    TRY(x3_jcompile_alloc(p->c, &(*out)->code, 1, sizeof *code));
    code = (*out)->code;
    TRY(x3_jtok_expect_name(p, &(*out)->name));
    code->name = (*out)->name;
    TRY(parse_signature(p, code));
    return parse_statements(p, "endmacro", true, &code->body);
}

static x3_status parse_call_block(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    TRY(x3_jnode_new(p, X3_JK_CALL_BLOCK, line, out));
    TRY(x3_jcompile_alloc(p->c, &(*out)->code, 1, sizeof *(*out)->code));
    if (x3_jtok_is_op(p, '('))
        TRY(parse_signature(p, (*out)->code));
    TRY(x3_jparse_expression(p, &(*out)->a));
    if ((*out)->a->kind != X3_JK_CALL)
        return x3_jcompile_fail(p->c, line, "expected call");
    return parse_statements(p, "endcall", true, &(*out)->code->body);
}

static x3_status parse_filter_block(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    TRY(x3_jnode_new(p, X3_JK_FILTER_BLOCK, line, out));
    TRY(x3_jparse_filters(p, true, &(*out)->a));
    return parse_statements(p, "endfilter", true, &(*out)->body);
}

static x3_status parse_print(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    x3_jchain items = {0};
    x3_jnode *item;

    TRY(x3_jnode_new(p, X3_JK_OUTPUT, line, out));
    while (p->token.kind != X3_JT_BLOCK_END) {
        if (items.n > 0)
            TRY(x3_jtok_expect_op(p, ','));
        TRY(x3_jparse_expression(p, &item));
        x3_jchain_put(&items, item);
    }
    (*out)->list = items.first;
    return X3_OK;
}

/* The extension of transformers that marks what the assistant says; its body is a function of its own. */
static x3_status parse_generation(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    TRY(x3_jnode_new(p, X3_JK_GENERATION, line, out));
    TRY(x3_jcompile_alloc(p->c, &(*out)->code, 1, sizeof *(*out)->code));
    return parse_statements(p, "endgeneration", true, &(*out)->code->body);
}

static x3_status parse_break(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    return x3_jnode_new(p, X3_JK_BREAK, line, out);
}

static x3_status parse_continue(x3_jparser *p, uint32_t line, x3_jnode **out)
{
    return x3_jnode_new(p, X3_JK_CONTINUE, line, out);
}

/* What follows `{%`; the parsers begin behind the name of the tag. */
static x3_status parse_statement(x3_jparser *p, const char *ends, x3_jnode **out)
{
    static const struct {
        const char *tag;
        x3_status (*parse)(x3_jparser *p, uint32_t line, x3_jnode **out); /* NULL: known to jinja2, not here */
    } tags[] = {
        {"for", parse_for},           {"if", parse_if},       {"set", parse_set},
        {"macro", parse_macro},       {"with", parse_with},   {"call", parse_call_block},
        {"filter", parse_filter_block}, {"print", parse_print}, {"generation", parse_generation},
        {"break", parse_break},       {"continue", parse_continue},
        {"block", NULL}, {"extends", NULL}, {"include", NULL}, {"import", NULL}, {"from", NULL}, {"autoescape", NULL},
    };
    uint32_t line = p->token.line;

    if (p->token.kind != X3_JT_NAME)
        return x3_jcompile_fail(p->c, line, "tag name expected");
    for (size_t i = 0; i < sizeof tags / sizeof tags[0]; i++) {
        if (!x3_jtok_is_name(p, tags[i].tag))
            continue;
        if (tags[i].parse == NULL)
            return x3_jcompile_refuse(p->c, line, "{%% %s %%} is not supported", tags[i].tag);
        TRY(x3_jparser_enter(p));
        TRY(x3_jtok_next(p));
        TRY(tags[i].parse(p, line, out));
        p->depth--;
        return X3_OK;
    }
    if (ends[0] == '\0')
        return x3_jcompile_fail(p->c, line, "Encountered unknown tag '%s'.", p->token.name->text.data);
    return x3_jcompile_fail(p->c, line, "Encountered unknown tag '%s'. Jinja was looking for the following tags: '%s'.",
                            p->token.name->text.data, ends);
}

/* Text and {{ }} go into one OUTPUT as long as no statement comes between. */
static x3_status parse_body(x3_jparser *p, const char *ends, x3_jnode **out)
{
    x3_jchain body = {0}, output = {0};
    x3_jnode *node = NULL, *item;

    *out = NULL;
    while (p->token.kind != X3_JT_END) {
        uint32_t line = p->token.line;
        if (p->token.kind == X3_JT_BLOCK_BEGIN) {
            output = (x3_jchain){0};
            TRY(x3_jtok_next(p));
            if (x3_jtok_is_one_of(p, ends))
                break;
            TRY(parse_statement(p, ends, &node));
            x3_jchain_put(&body, node);
            TRY(x3_jtok_expect(p, X3_JT_BLOCK_END, "end of statement block"));
            *out = body.first;
            continue;
        }
        if (output.n == 0) {
            TRY(x3_jnode_new(p, X3_JK_OUTPUT, line, &node));
            x3_jchain_put(&body, node);
        }
        if (p->token.kind == X3_JT_DATA) {
            TRY(x3_jnode_new(p, X3_JK_CONST, line, &item));
            item->value = p->token.value;
            TRY(x3_jtok_next(p));
        } else {
            TRY(x3_jtok_next(p)); /* behind {{ */
            TRY(x3_jparse_tuple(p, X3_JPART_FULL, "", false, &item));
            TRY(x3_jtok_expect(p, X3_JT_VARIABLE_END, "end of print statement"));
        }
        x3_jchain_put(&output, item);
        node->list = output.first;
        *out = body.first;
    }
    return X3_OK;
}

x3_status x3_jparser_parse(x3_jcompile *c, const char *text, size_t n_bytes, x3_jnode **body)
{
    x3_jparser p = {.c = c};

    TRY(x3_jlexer_open(&p.lexer, c, text, n_bytes));
    TRY(x3_jtok_next(&p));
    return parse_body(&p, "", body);
}
