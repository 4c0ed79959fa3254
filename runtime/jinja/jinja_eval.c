#include "runtime/jinja/jinja_internal.h"

#include <string.h>

/* Expressions. */

typedef x3_status evaluator(x3_jrun *run, const x3_jnode *node, x3_jval *out);

static x3_status eval_const(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    (void)run;
    *out = node->value;
    return X3_OK;
}

static x3_status eval_name(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    *out = *x3_jscope_at(run->scope, node->address);
    return out->type != X3_JMISSING ? X3_OK : x3_jundefined_name(run, &node->name->text, out);
}

static x3_status eval_list(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    x3_jlist *list;
    x3_jval v;

    TRY(x3_jlist_new(run, 0, &list));
    for (const x3_jnode *item = node->list; item != NULL; item = item->next) {
        TRY(x3_jeval(run, item, &v));
        TRY(x3_jlist_push(run, list, v));
    }
    *out = (x3_jval){.type = node->kind == X3_JK_LIST ? X3_JLIST : X3_JTUPLE, .list = list};
    return X3_OK;
}

static x3_status eval_dict(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    x3_jdict *dict;
    x3_jval key, value;

    TRY(x3_jdict_new(run, &dict));
    for (const x3_jnode *pair = node->list; pair != NULL; pair = pair->next) {
        TRY(x3_jeval(run, pair->a, &key));
        TRY(x3_jeval(run, pair->b, &value));
        TRY(x3_jdict_set(run, dict, key, value));
    }
    *out = x3_jval_dict(dict);
    return X3_OK;
}

static x3_status eval_unary(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    x3_jval v;

    TRY(x3_jeval(run, node->a, &v));
    run->line = node->line;
    return x3_joperate_unary(run, node->op, v, out);
}

static x3_status eval_not(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    TRY(x3_jeval(run, node->a, out));
    *out = x3_jval_bool(!x3_jval_truth(*out));
    return X3_OK;
}

static x3_status eval_binary(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    x3_jval a, b;

    TRY(x3_jeval(run, node->a, &a));
    TRY(x3_jeval(run, node->b, &b));
    run->line = node->line;
    return x3_joperate_binary(run, node->op, a, b, out);
}

static x3_status eval_and(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    TRY(x3_jeval(run, node->a, out));
    return x3_jval_truth(*out) == (node->kind == X3_JK_AND) ? x3_jeval(run, node->b, out) : X3_OK;
}

static x3_status eval_concat(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    x3_jbuf buf = {0};
    x3_jval v;

    for (const x3_jnode *part = node->list; part != NULL; part = part->next) {
        TRY(x3_jeval(run, part, &v));
        TRY(x3_jprint_str(run, &buf, v));
    }
    return x3_jstr_of(run, &buf, out);
}

static x3_status compare(x3_jrun *run, uint32_t op, x3_jval a, x3_jval b, bool *out)
{
    if (op == 'i' || op == 'n') {
        TRY(x3_jval_contains(run, b, a, out));
        *out = *out == (op == 'i');
        return X3_OK;
    }
    if (op != X3_JOP2('=', '=') && op != X3_JOP2('!', '='))
        return x3_jval_compare(run, op, a, b, out);
    TRY(x3_jval_equal(run, a, b, out));
    *out = *out == (op == X3_JOP2('=', '='));
    return X3_OK;
}

static x3_status eval_compare(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    x3_jval left, right;
    bool holds = true;

    TRY(x3_jeval(run, node->a, &left));
    for (const x3_jnode *operand = node->list; operand != NULL && holds; operand = operand->next) {
        TRY(x3_jeval(run, operand->a, &right));
        run->line = node->line;
        TRY(compare(run, operand->op, left, right, &holds));
        left = right;
    }
    *out = x3_jval_bool(holds);
    return X3_OK;
}

static x3_status eval_cond(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    TRY(x3_jeval(run, node->a, out));
    if (x3_jval_truth(*out))
        return x3_jeval(run, node->b, out);
    if (node->c != NULL)
        return x3_jeval(run, node->c, out);
    return x3_jundefined_hint(run, "the inline if-expression evaluated to false and no else section was defined.", out);
}

static x3_status eval_getattr(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    x3_jval object;

    TRY(x3_jeval(run, node->a, &object));
    run->line = node->line;
    return x3_jobject_attribute(run, object, &node->name->text, out);
}

static x3_status eval_getitem(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    x3_jval object, key;

    TRY(x3_jeval(run, node->a, &object));
    TRY(x3_jeval(run, node->b, &key));
    run->line = node->line;
    return x3_jobject_item(run, object, key, out);
}

static x3_status eval_slice(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    x3_jval object, part[3] = {{0}};
    const x3_jnode *const nodes[3] = {node->b, node->c, node->d};

    TRY(x3_jeval(run, node->a, &object));
    for (int i = 0; i < 3; i++)
        if (nodes[i] != NULL)
            TRY(x3_jeval(run, nodes[i], &part[i]));
    run->line = node->line;
    return x3_jobject_slice(run, object, part[0], part[1], part[2], out);
}

/* ---- calls ---- */

static x3_status add_star(x3_jrun *run, const x3_jnode *node, x3_jlist *items)
{
    x3_jval v;
    x3_jlist *more;

    TRY(x3_jeval(run, node, &v));
    TRY(x3_jlist_of(run, v, &more));
    for (size_t i = 0; i < more->n_items; i++)
        TRY(x3_jlist_push(run, items, more->items[i]));
    return X3_OK;
}

static x3_status add_star_star(x3_jrun *run, const x3_jnode *node, x3_jdict *keywords)
{
    x3_jval v;

    TRY(x3_jeval(run, node, &v));
    if (v.type != X3_JDICT)
        return x3_jrun_fail(run, "argument after ** must be a mapping, not %s", x3_jval_type_name(v));
    for (size_t i = 0; i < v.dict->n_items; i++) {
        const x3_jentry *entry = &v.dict->entries[i];
        if (entry->key.type != X3_JSTR)
            return x3_jrun_fail(run, "keywords must be strings");
        if (x3_jdict_find(keywords, entry->key.s).type != X3_JMISSING)
            return x3_jrun_fail(run, "got multiple values for keyword argument '%.*s'",
                                (int)x3_min_size(entry->key.s->n_bytes, 100), entry->key.s->data);
        TRY(x3_jdict_set(run, keywords, entry->key, entry->value));
    }
    return X3_OK;
}

static x3_status eval_args(x3_jrun *run, const x3_jcall *call, x3_jval caller, x3_jargs *out)
{
    static const x3_jstr caller_name = {"caller", 6, 6, false, NULL};
    x3_jlist *items;
    x3_jdict *keywords = NULL;
    x3_jval v;

    TRY(x3_jlist_new(run, call->n_positional, &items));
    for (const x3_jnode *arg = call->positional; arg != NULL; arg = arg->next) {
        TRY(x3_jeval(run, arg, &v));
        TRY(x3_jlist_push(run, items, v));
    }
    if (call->star != NULL)
        TRY(add_star(run, call->star, items));
    if (call->keywords != NULL || call->star_star != NULL || caller.type != X3_JMISSING)
        TRY(x3_jdict_new(run, &keywords));
    for (const x3_jnode *keyword = call->keywords; keyword != NULL; keyword = keyword->next) {
        TRY(x3_jeval(run, keyword->a, &v));
        TRY(x3_jdict_set(run, keywords, (x3_jval){.type = X3_JSTR, .s = &keyword->name->text}, v));
    }
    if (caller.type != X3_JMISSING)
        TRY(x3_jdict_set(run, keywords, (x3_jval){.type = X3_JSTR, .s = &caller_name}, caller));
    if (call->star_star != NULL)
        TRY(add_star_star(run, call->star_star, keywords));
    *out = (x3_jargs){items->items, items->n_items, keywords};
    return X3_OK;
}

x3_status x3_jeval_call(x3_jrun *run, const x3_jnode *node, x3_jval caller, x3_jval *out)
{
    x3_jval callee;
    x3_jargs args;

    TRY(x3_jeval(run, node->a, &callee));
    TRY(eval_args(run, node->args, caller, &args));
    run->line = node->line;
    return x3_jobject_call(run, callee, &args, out);
}

static x3_status eval_call(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    return x3_jeval_call(run, node, (x3_jval){0}, out);
}

static x3_status eval_filter(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    const x3_jbuiltin *filter = x3_jbuiltin_filter(&node->name->text);
    x3_jval value = run->block;
    x3_jargs args;

    if (node->a != NULL)
        TRY(x3_jeval(run, node->a, &value));
    TRY(eval_args(run, node->args, (x3_jval){0}, &args));
    run->line = node->line;
    if (filter == NULL)
        return x3_jrun_fail(run, "No filter named '%s' found.", node->name->text.data);
    return x3_jbuiltin_call(run, filter, &value, &args, out);
}

static x3_status eval_test(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    const x3_jbuiltin *test = x3_jbuiltin_test(&node->name->text);
    x3_jval value;
    x3_jargs args;

    TRY(x3_jeval(run, node->a, &value));
    TRY(eval_args(run, node->args, (x3_jval){0}, &args));
    run->line = node->line;
    if (test == NULL)
        return x3_jrun_fail(run, "No test named '%s' found.", node->name->text.data);
    return x3_jbuiltin_call(run, test, &value, &args, out);
}

x3_status x3_jeval(x3_jrun *run, const x3_jnode *node, x3_jval *out)
{
    static evaluator *const evaluators[X3_JN_KINDS] = {
        [X3_JK_CONST] = eval_const, [X3_JK_NAME] = eval_name, [X3_JK_TUPLE] = eval_list, [X3_JK_LIST] = eval_list,
        [X3_JK_DICT] = eval_dict, [X3_JK_UNARY] = eval_unary, [X3_JK_NOT] = eval_not, [X3_JK_BINARY] = eval_binary,
        [X3_JK_AND] = eval_and, [X3_JK_OR] = eval_and, [X3_JK_CONCAT] = eval_concat, [X3_JK_COMPARE] = eval_compare,
        [X3_JK_COND] = eval_cond, [X3_JK_GETATTR] = eval_getattr, [X3_JK_GETITEM] = eval_getitem,
        [X3_JK_SLICE] = eval_slice, [X3_JK_CALL] = eval_call, [X3_JK_FILTER] = eval_filter, [X3_JK_TEST] = eval_test};

    run->line = node->line;
    TRY(x3_jrun_enter(run));
    TRY(evaluators[node->kind](run, node, out));
    x3_jrun_leave(run);
    return X3_OK;
}
