#include "runtime/jinja/jinja_internal.h"

#include <stdio.h>
#include <string.h>

/* jinja2.parser, method by method: precedence, what may be assigned to, where a tuple ends. */

static x3_status parse_unary(x3_jparser *p, bool with_filter, x3_jnode **out) X3_MUST;
static x3_status parse_primary(x3_jparser *p, bool with_namespace, x3_jnode **out) X3_MUST;
static x3_status parse_call_args(x3_jparser *p, x3_jcall **out) X3_MUST;

/* A node with two operands, put in place of *left. */
static x3_status wrap(x3_jparser *p, x3_jkind kind, uint32_t op, x3_jnode **left, x3_jnode *right)
{
    x3_jnode *node;

    TRY(x3_jnode_new(p, kind, (*left)->line, &node));
    node->op = op;
    node->a = *left;
    node->b = right;
    *left = node;
    return X3_OK;
}

/* ---- expressions, from the tightest to the loosest ---- */

/* operand op operand …, grouped to the left; ops end with 0. */
static x3_status parse_left(x3_jparser *p, x3_status (*operand)(x3_jparser *, x3_jnode **), const uint32_t *ops,
                            x3_jnode **out)
{
    x3_jnode *right;

    TRY(operand(p, out));
    for (;;) {
        const uint32_t *op = ops;
        while (*op != 0 && !x3_jtok_is_op(p, *op))
            op++;
        if (*op == 0)
            return X3_OK;
        TRY(x3_jtok_next(p));
        TRY(operand(p, &right));
        TRY(wrap(p, X3_JK_BINARY, *op, out, right));
    }
}

static x3_status parse_operand(x3_jparser *p, x3_jnode **out)
{
    return parse_unary(p, true, out);
}

static x3_status parse_pow(x3_jparser *p, x3_jnode **out)
{
    static const uint32_t ops[] = {X3_JOP2('*', '*'), 0};

    return parse_left(p, parse_operand, ops, out);
}

static x3_status parse_product(x3_jparser *p, x3_jnode **out)
{
    static const uint32_t ops[] = {'*', '/', X3_JOP2('/', '/'), '%', 0};

    return parse_left(p, parse_pow, ops, out);
}

static x3_status parse_concat(x3_jparser *p, x3_jnode **out)
{
    x3_jchain parts = {0};
    x3_jnode *part;

    TRY(parse_product(p, out));
    if (!x3_jtok_is_op(p, '~'))
        return X3_OK;
    x3_jchain_put(&parts, *out);
    while (x3_jtok_is_op(p, '~')) {
        TRY(x3_jtok_next(p));
        TRY(parse_product(p, &part));
        x3_jchain_put(&parts, part);
    }
    TRY(x3_jnode_new(p, X3_JK_CONCAT, parts.first->line, out));
    (*out)->list = parts.first;
    return X3_OK;
}

static x3_status parse_sum(x3_jparser *p, x3_jnode **out)
{
    static const uint32_t ops[] = {'+', '-', 0};

    return parse_left(p, parse_concat, ops, out);
}

/* The comparison operator at the current place: its op and how many tokens it takes, or 0. */
static x3_status match_comparison(x3_jparser *p, uint32_t *op, int *n_tokens)
{
    static const uint32_t ops[] = {'<', '>', X3_JOP2('=', '='), X3_JOP2('!', '='), X3_JOP2('<', '='),
                                   X3_JOP2('>', '=')};

    *n_tokens = 0;
    for (size_t i = 0; i < sizeof ops / sizeof ops[0]; i++)
        if (x3_jtok_is_op(p, ops[i])) {
            *op = ops[i];
            *n_tokens = 1;
        }
    if (x3_jtok_is_name(p, "in")) {
        *op = 'i';
        *n_tokens = 1;
    } else if (x3_jtok_is_name(p, "not")) {
        TRY(x3_jtok_look(p));
        if (p->ahead.kind == X3_JT_NAME && x3_jstr_is(&p->ahead.name->text, "in")) {
            *op = 'n';
            *n_tokens = 2;
        }
    }
    return X3_OK;
}

static x3_status parse_compare(x3_jparser *p, x3_jnode **out)
{
    x3_jchain operands = {0};
    x3_jnode *operand, *node;
    uint32_t op = 0;
    int n_tokens;

    TRY(parse_sum(p, out));
    for (;;) {
        TRY(match_comparison(p, &op, &n_tokens));
        if (n_tokens == 0)
            break;
        for (int i = 0; i < n_tokens; i++)
            TRY(x3_jtok_next(p));
        TRY(x3_jnode_new(p, X3_JK_OPERAND, p->token.line, &operand));
        operand->op = op;
        TRY(parse_sum(p, &operand->a));
        x3_jchain_put(&operands, operand);
    }
    if (operands.n == 0)
        return X3_OK;
    TRY(x3_jnode_new(p, X3_JK_COMPARE, (*out)->line, &node));
    node->a = *out;
    node->list = operands.first;
    *out = node;
    return X3_OK;
}

static x3_status parse_not(x3_jparser *p, x3_jnode **out)
{
    uint32_t line = p->token.line;

    if (!x3_jtok_is_name(p, "not"))
        return parse_compare(p, out);
    TRY(x3_jparser_enter(p));
    TRY(x3_jtok_next(p));
    TRY(x3_jnode_new(p, X3_JK_NOT, line, out));
    TRY(parse_not(p, &(*out)->a));
    p->depth--;
    return X3_OK;
}

static x3_status parse_and(x3_jparser *p, x3_jnode **out)
{
    x3_jnode *right;

    TRY(parse_not(p, out));
    while (x3_jtok_is_name(p, "and")) {
        TRY(x3_jtok_next(p));
        TRY(parse_not(p, &right));
        TRY(wrap(p, X3_JK_AND, 0, out, right));
    }
    return X3_OK;
}

static x3_status parse_or(x3_jparser *p, x3_jnode **out)
{
    x3_jnode *right;

    TRY(parse_and(p, out));
    while (x3_jtok_is_name(p, "or")) {
        TRY(x3_jtok_next(p));
        TRY(parse_and(p, &right));
        TRY(wrap(p, X3_JK_OR, 0, out, right));
    }
    return X3_OK;
}

x3_status x3_jparse_expression(x3_jparser *p, x3_jnode **out)
{
    bool has_else;

    TRY(x3_jparser_enter(p));
    TRY(parse_or(p, out));
    while (x3_jtok_is_name(p, "if")) {
        x3_jnode *node;
        TRY(x3_jtok_next(p));
        TRY(x3_jnode_new(p, X3_JK_COND, (*out)->line, &node));
        node->b = *out;
        TRY(parse_or(p, &node->a));
        TRY(x3_jtok_skip_name(p, "else", &has_else));
        if (has_else)
            TRY(x3_jparse_expression(p, &node->c));
        *out = node;
    }
    p->depth--;
    return X3_OK;
}

/* ---- tuples, lists, dicts ---- */

/* `ends` are the names besides the closing tokens that end a tuple. */
static bool is_tuple_end(const x3_jparser *p, const char *ends)
{
    return p->token.kind == X3_JT_VARIABLE_END || p->token.kind == X3_JT_BLOCK_END || x3_jtok_is_op(p, ')') ||
           x3_jtok_is_one_of(p, ends);
}

static x3_status parse_part(x3_jparser *p, x3_jtuple_part part, x3_jnode **out)
{
    if (part == X3_JPART_TARGET || part == X3_JPART_TARGET_NS)
        return parse_primary(p, part == X3_JPART_TARGET_NS, out);
    return part == X3_JPART_FULL ? x3_jparse_expression(p, out) : parse_or(p, out);
}

x3_status x3_jparse_tuple(x3_jparser *p, x3_jtuple_part part, const char *ends, bool in_parentheses, x3_jnode **out)
{
    uint32_t line = p->token.line;
    bool is_tuple = false;
    x3_jchain items = {0};
    x3_jnode *item;
    char room[80];

    for (;;) {
        if (items.n > 0)
            TRY(x3_jtok_expect_op(p, ','));
        if (is_tuple_end(p, ends))
            break;
        TRY(parse_part(p, part, &item));
        x3_jchain_put(&items, item);
        if (!x3_jtok_is_op(p, ','))
            break;
        is_tuple = true;
    }
    if (!is_tuple && items.n > 0) {
        *out = items.first;
        return X3_OK;
    }
    if (!is_tuple && !in_parentheses)
        return x3_jcompile_fail(p->c, p->token.line, "Expected an expression, got '%s'", x3_jtok_describe(p, room));
    TRY(x3_jnode_new(p, X3_JK_TUPLE, line, out));
    (*out)->list = items.first;
    return X3_OK;
}

/* [a, b] or {a: b}; the bracket is the current token. */
static x3_status parse_brackets(x3_jparser *p, x3_jnode **out)
{
    bool is_dict = x3_jtok_is_op(p, '{');
    char close = is_dict ? '}' : ']';
    x3_jchain items = {0};
    x3_jnode *item;

    TRY(x3_jnode_new(p, is_dict ? X3_JK_DICT : X3_JK_LIST, p->token.line, out));
    TRY(x3_jtok_next(p));
    while (!x3_jtok_is_op(p, (unsigned char)close)) {
        if (items.n > 0)
            TRY(x3_jtok_expect_op(p, ','));
        if (x3_jtok_is_op(p, (unsigned char)close))
            break;
        if (is_dict) {
            TRY(x3_jnode_new(p, X3_JK_PAIR, p->token.line, &item));
            TRY(x3_jparse_expression(p, &item->a));
            TRY(x3_jtok_expect_op(p, ':'));
            TRY(x3_jparse_expression(p, &item->b));
        } else {
            TRY(x3_jparse_expression(p, &item));
        }
        x3_jchain_put(&items, item);
    }
    (*out)->list = items.first;
    return x3_jtok_next(p);
}

/* ---- primaries and what follows them ---- */

static x3_status parse_name(x3_jparser *p, bool with_namespace, x3_jnode **out)
{
    uint32_t line = p->token.line;
    bool is_true = x3_jtok_is_one_of(p, "true True"), is_false = x3_jtok_is_one_of(p, "false False"), is_none, is_dotted = false;
    x3_jname *name;

    is_none = x3_jtok_is_one_of(p, "none None");
    TRY(x3_jtok_expect_name(p, &name));
    if (is_true || is_false || is_none) {
        TRY(x3_jnode_new(p, X3_JK_CONST, line, out));
        (*out)->value = is_none ? x3_jval_none() : x3_jval_bool(is_true);
        return X3_OK;
    }
    if (with_namespace)
        TRY(x3_jtok_skip_op(p, '.', &is_dotted));
    TRY(x3_jnode_new(p, is_dotted ? X3_JK_NSREF : X3_JK_NAME, line, out));
    (*out)->name = name;
    return is_dotted ? x3_jtok_expect_name(p, &(*out)->name2) : X3_OK;
}

/* Adjacent literals are one. */
static x3_status parse_strings(x3_jparser *p, x3_jnode **out)
{
    uint32_t line = p->token.line;
    x3_jchain parts = {0};
    x3_jnode *part;

    while (p->token.kind == X3_JT_STRING) {
        TRY(x3_jnode_new(p, X3_JK_CONST, p->token.line, &part));
        part->value = p->token.value;
        x3_jchain_put(&parts, part);
        TRY(x3_jtok_next(p));
    }
    *out = parts.first;
    if (parts.n == 1)
        return X3_OK;
    TRY(x3_jnode_new(p, X3_JK_CONCAT, line, out));
    (*out)->list = parts.first;
    return X3_OK;
}

static x3_status parse_primary(x3_jparser *p, bool with_namespace, x3_jnode **out)
{
    char room[80];

    if (p->token.kind == X3_JT_NAME)
        return parse_name(p, with_namespace, out);
    if (p->token.kind == X3_JT_STRING)
        return parse_strings(p, out);
    if (p->token.kind == X3_JT_INTEGER || p->token.kind == X3_JT_FLOAT) {
        TRY(x3_jnode_new(p, X3_JK_CONST, p->token.line, out));
        (*out)->value = p->token.value;
        return x3_jtok_next(p);
    }
    if (x3_jtok_is_op(p, '(')) {
        TRY(x3_jtok_next(p));
        TRY(x3_jparse_tuple(p, X3_JPART_FULL, "", true, out));
        return x3_jtok_expect_op(p, ')');
    }
    if (x3_jtok_is_op(p, '[') || x3_jtok_is_op(p, '{'))
        return parse_brackets(p, out);
    return x3_jcompile_fail(p->c, p->token.line, "unexpected '%s'", x3_jtok_describe(p, room));
}

/* One side of a slice, NULL where it is left out. */
static x3_status parse_slice_part(x3_jparser *p, x3_jnode **out)
{
    *out = NULL;
    if (x3_jtok_is_op(p, ':') || x3_jtok_is_op(p, ']') || x3_jtok_is_op(p, ','))
        return X3_OK;
    return x3_jparse_expression(p, out);
}

/* What stands in brackets after `object`: an item, a tuple of items, or a slice. */
static x3_status parse_subscript(x3_jparser *p, x3_jnode *object, uint32_t line, x3_jnode **out)
{
    x3_jchain items = {0};
    x3_jnode *item, *start = NULL;

    while (!x3_jtok_is_op(p, ']')) {
        bool more;
        if (items.n > 0)
            TRY(x3_jtok_expect_op(p, ','));
        TRY(parse_slice_part(p, &start));
        if (!x3_jtok_is_op(p, ':')) {
            if (start == NULL)
                return x3_jtok_fail(p, "]");
            x3_jchain_put(&items, start);
            continue;
        }
        TRY(x3_jtok_next(p));
        TRY(x3_jnode_new(p, X3_JK_SLICE, line, &item));
        item->a = object;
        item->b = start;
        TRY(parse_slice_part(p, &item->c));
        TRY(x3_jtok_skip_op(p, ':', &more));
        if (more)
            TRY(parse_slice_part(p, &item->d));
        if (items.n > 0 || !x3_jtok_is_op(p, ']'))
            return x3_jcompile_fail(p->c, line, "a slice cannot stand in a tuple of subscripts");
        *out = item;
        return x3_jtok_next(p);
    }
    TRY(x3_jnode_new(p, X3_JK_GETITEM, line, out));
    (*out)->a = object;
    (*out)->b = items.first;
    if (items.n != 1) {
        TRY(x3_jnode_new(p, X3_JK_TUPLE, line, &(*out)->b));
        (*out)->b->list = items.first;
    }
    return x3_jtok_next(p);
}

/* .name, .0, [...], (...) */
static x3_status parse_postfix(x3_jparser *p, x3_jnode **out)
{
    for (;;) {
        x3_jnode *node;
        uint32_t line = p->token.line;
        if (x3_jtok_is_op(p, '.')) {
            TRY(x3_jtok_next(p));
            TRY(x3_jnode_new(p, p->token.kind == X3_JT_NAME ? X3_JK_GETATTR : X3_JK_GETITEM, line, &node));
            node->a = *out;
            node->name = p->token.name;
            if (node->kind == X3_JK_GETITEM) {
                if (p->token.kind != X3_JT_INTEGER)
                    return x3_jcompile_fail(p->c, p->token.line, "expected name or number");
                TRY(x3_jnode_new(p, X3_JK_CONST, p->token.line, &node->b));
                node->b->value = p->token.value;
            }
            *out = node;
            TRY(x3_jtok_next(p));
        } else if (x3_jtok_is_op(p, '[')) {
            TRY(x3_jtok_next(p));
            TRY(parse_subscript(p, *out, line, out));
        } else if (x3_jtok_is_op(p, '(')) {
            TRY(x3_jnode_new(p, X3_JK_CALL, line, &node));
            node->a = *out;
            TRY(parse_call_args(p, &node->args));
            *out = node;
        } else {
            return X3_OK;
        }
    }
}

static x3_status parse_keyword(x3_jparser *p, x3_jchain *keywords)
{
    x3_jnode *node;

    TRY(x3_jnode_new(p, X3_JK_KEYWORD, p->token.line, &node));
    node->name = p->token.name;
    TRY(x3_jtok_next(p));
    TRY(x3_jtok_next(p));
    for (x3_jnode *k = keywords->first; k != NULL; k = k->next)
        if (k->name == node->name)
            return x3_jcompile_fail(p->c, node->line, "keyword argument repeated: %s", node->name->text.data);
    TRY(x3_jparse_expression(p, &node->a));
    x3_jchain_put(keywords, node);
    return X3_OK;
}

static x3_status parse_call_args(x3_jparser *p, x3_jcall **out)
{
    uint32_t line = p->token.line;
    x3_jchain positional = {0}, keywords = {0};
    bool fine = true, need_comma = false;
    x3_jcall *call;
    x3_jnode *node;

    TRY(x3_jcompile_alloc(p->c, out, 1, sizeof **out));
    call = *out;
    TRY(x3_jtok_expect_op(p, '('));
    for (; fine && !x3_jtok_is_op(p, ')'); need_comma = true) {
        if (need_comma)
            TRY(x3_jtok_expect_op(p, ','));
        if (x3_jtok_is_op(p, ')'))
            break;
        bool is_star = x3_jtok_is_op(p, '*'), is_star_star = x3_jtok_is_op(p, X3_JOP2('*', '*'));
        if (p->token.kind == X3_JT_NAME)
            TRY(x3_jtok_look(p));
        if (is_star || is_star_star) {
            fine = call->star_star == NULL && (is_star_star || call->star == NULL);
            TRY(x3_jtok_next(p));
            TRY(x3_jparse_expression(p, is_star ? &call->star : &call->star_star));
        } else if (p->token.kind == X3_JT_NAME && p->ahead.kind == X3_JT_OPERATOR && p->ahead.op == '=') {
            fine = call->star_star == NULL;
            TRY(parse_keyword(p, &keywords));
        } else {
            fine = call->star == NULL && call->star_star == NULL && keywords.n == 0;
            TRY(x3_jparse_expression(p, &node));
            x3_jchain_put(&positional, node);
        }
    }
    if (!fine)
        return x3_jcompile_fail(p->c, line, "invalid syntax for function call expression");
    call->positional = positional.first;
    call->n_positional = positional.n;
    call->keywords = keywords.first;
    call->is_explicit = true;
    return x3_jtok_next(p);
}

/* The name of a filter or test, dots included, and its arguments if it has any. */
static x3_status parse_callee(x3_jparser *p, x3_jnode *node)
{
    char name[200];
    x3_jname *part;
    int n;

    TRY(x3_jtok_expect_name(p, &node->name));
    n = snprintf(name, sizeof name, "%.190s", node->name->text.data);
    while (x3_jtok_is_op(p, '.')) {
        TRY(x3_jtok_next(p));
        TRY(x3_jtok_expect_name(p, &part));
        n += snprintf(name + n, sizeof name - (size_t)n, ".%s", part->text.data);
        if ((size_t)n >= sizeof name)
            return x3_jcompile_fail(p->c, node->line, "the name %.40s... is too long", name);
        TRY(x3_jcompile_name(p->c, name, (size_t)n, &node->name));
    }
    if (x3_jtok_is_op(p, '('))
        return parse_call_args(p, &node->args);
    return x3_jcompile_alloc(p->c, &node->args, 1, sizeof *node->args);
}

/* |filter|filter…; with `bare` the first one needs no bar (filter blocks). *out is what it is applied to. */
x3_status x3_jparse_filters(x3_jparser *p, bool bare, x3_jnode **out)
{
    while (bare || x3_jtok_is_op(p, '|')) {
        x3_jnode *node;
        if (!bare)
            TRY(x3_jtok_next(p));
        bare = false;
        TRY(x3_jnode_new(p, X3_JK_FILTER, p->token.line, &node));
        node->a = *out;
        TRY(parse_callee(p, node));
        *out = node;
    }
    return X3_OK;
}

static x3_status parse_test(x3_jparser *p, x3_jnode **out)
{
    x3_jnode *node, *negation;
    uint32_t line = p->token.line;
    bool is_negated;

    TRY(x3_jtok_next(p));
    TRY(x3_jtok_skip_name(p, "not", &is_negated));
    TRY(x3_jnode_new(p, X3_JK_TEST, line, &node));
    node->a = *out;
    TRY(parse_callee(p, node));
    bool starts_value = p->token.kind == X3_JT_NAME || p->token.kind == X3_JT_STRING ||
                        p->token.kind == X3_JT_INTEGER || p->token.kind == X3_JT_FLOAT || x3_jtok_is_op(p, '[') ||
                        x3_jtok_is_op(p, '{');
    if (!node->args->is_explicit && starts_value && !x3_jtok_is_one_of(p, "else or and")) {
        if (x3_jtok_is_name(p, "is"))
            return x3_jcompile_fail(p->c, p->token.line, "You cannot chain multiple tests with is");
        TRY(parse_primary(p, false, &node->args->positional));
        TRY(parse_postfix(p, &node->args->positional));
        node->args->n_positional = 1;
    }
    *out = node;
    if (!is_negated)
        return X3_OK;
    TRY(x3_jnode_new(p, X3_JK_NOT, line, &negation));
    negation->a = node;
    *out = negation;
    return X3_OK;
}

static x3_status parse_unary(x3_jparser *p, bool with_filter, x3_jnode **out)
{
    bool is_minus = x3_jtok_is_op(p, '-');

    TRY(x3_jparser_enter(p));
    if (is_minus || x3_jtok_is_op(p, '+')) {
        TRY(x3_jnode_new(p, X3_JK_UNARY, p->token.line, out));
        TRY(x3_jtok_next(p));
        (*out)->op = is_minus ? '-' : '+';
        TRY(parse_unary(p, false, &(*out)->a));
    } else {
        TRY(parse_primary(p, false, out));
    }
    TRY(parse_postfix(p, out));
    while (with_filter) {
        x3_jnode *call;
        if (x3_jtok_is_op(p, '|')) {
            TRY(x3_jparse_filters(p, false, out));
        } else if (x3_jtok_is_name(p, "is")) {
            TRY(parse_test(p, out));
        } else if (x3_jtok_is_op(p, '(')) {
            TRY(x3_jnode_new(p, X3_JK_CALL, p->token.line, &call));
            call->a = *out;
            TRY(parse_call_args(p, &call->args));
            *out = call;
        } else {
            break;
        }
    }
    p->depth--;
    return X3_OK;
}
