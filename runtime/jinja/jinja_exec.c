#include "runtime/jinja/jinja_internal.h"

#include <stdio.h>
#include <string.h>

/* Statements. */

x3_status x3_jexec_scope(x3_jrun *run, const x3_jcode *code, x3_jscope *parent, x3_jscope **out)
{
    TRY(x3_jrun_alloc(run, out, 1, sizeof **out));
    (*out)->parent = parent;
    return x3_jrun_alloc(run, &(*out)->slots, code->n_slots, sizeof *(*out)->slots); /* zero: MISSING */
}

/* The variable or global of that name, or MISSING. */
static x3_jval look_up(const x3_jrun *run, const x3_jname *name)
{
    x3_jval v = x3_jdict_find(run->variables, &name->text);

    return v.type != X3_JMISSING ? v : x3_jbuiltin_global(&name->text);
}

x3_status x3_jexec_enter(x3_jrun *run, const x3_jframe *frame)
{
    for (size_t i = 0; i < frame->n_loads; i++) {
        const x3_jload *load = &frame->loads[i];
        x3_jval *slot = &run->scope->slots[load->slot];
        if (load->kind == X3_JLOAD_RESOLVE)
            *slot = look_up(run, load->name);
        else if (load->kind == X3_JLOAD_ALIAS)
            *slot = *x3_jscope_at(run->scope, load->from);
        else if (load->kind == X3_JLOAD_UNDEFINED)
            *slot = (x3_jval){0};
    }
    return x3_jrun_steps(run, frame->n_loads);
}

static void leave(x3_jrun *run, const x3_jframe *frame)
{
    for (size_t i = 0; i < frame->n_loads; i++)
        run->scope->slots[frame->loads[i].slot] = (x3_jval){0};
}

/* ---- assignment ---- */

static x3_status assign_tuple(x3_jrun *run, const x3_jnode *target, x3_jval value)
{
    size_t wanted = 0, n = 0;
    x3_jiter *it;
    x3_jval item;
    bool more = true;
    x3_jlist *items;

    for (const x3_jnode *t = target->list; t != NULL; t = t->next)
        wanted++;
    if (value.type != X3_JITER && !x3_jval_is_iterable(value))
        return x3_jrun_fail(run, "cannot unpack non-iterable %s object", x3_jval_type_name(value));
    TRY(x3_jiter_open(run, value, &it));
    TRY(x3_jlist_new(run, wanted, &items));
    for (; n <= wanted; n++) {
        TRY(x3_jiter_next(run, it, &item, &more));
        if (!more)
            break;
        TRY(x3_jlist_push(run, items, item));
    }
    if (n < wanted)
        return x3_jrun_fail(run, "not enough values to unpack (expected %zu, got %zu)", wanted, n);
    if (more)
        return x3_jrun_fail(run, "too many values to unpack (expected %zu)", wanted);
    n = 0;
    for (const x3_jnode *t = target->list; t != NULL; t = t->next)
        TRY(x3_jexec_assign(run, t, items->items[n++]));
    return X3_OK;
}

x3_status x3_jexec_assign(x3_jrun *run, const x3_jnode *target, x3_jval value)
{
    x3_jval *variable;

    if (target->kind == X3_JK_TUPLE) {
        TRY(x3_jrun_enter(run));
        TRY(assign_tuple(run, target, value));
        x3_jrun_leave(run);
        return X3_OK;
    }
    variable = x3_jscope_at(run->scope, target->address);
    if (target->kind == X3_JK_NAME) {
        *variable = value;
        return X3_OK;
    }
    if (variable->type != X3_JNAMESPACE)
        return x3_jrun_fail(run, "cannot assign attribute on non-namespace object");
    if (target->name2->text.data[0] == '_')
        return x3_jrun_fail(run, "Chat templates cannot store underscore-prefixed attributes on a namespace, but got "
                            "'%s'. Please rename the attribute.", target->name2->text.data);
    return x3_jdict_set(run, variable->dict, (x3_jval){.type = X3_JSTR, .s = &target->name2->text}, value);
}

/* jinja2 checks the namespaces of a target before it evaluates the value. */
static x3_status check_namespaces(x3_jrun *run, const x3_jnode *target)
{
    if (target->kind == X3_JK_NSREF && x3_jscope_at(run->scope, target->address)->type != X3_JNAMESPACE)
        return x3_jrun_fail(run, "cannot assign attribute on non-namespace object");
    for (const x3_jnode *item = target->list; item != NULL; item = item->next)
        TRY(check_namespaces(run, item));
    return X3_OK;
}

static x3_status exec_set(x3_jrun *run, const x3_jnode *node)
{
    x3_jval value;

    TRY(check_namespaces(run, node->a));
    TRY(x3_jeval(run, node->b, &value));
    run->line = node->line;
    return x3_jexec_assign(run, node->a, value);
}

/* Runs a body into a text of its own. */
static x3_status capture(x3_jrun *run, const x3_jnode *body, x3_jval *out)
{
    x3_jbuf *outer = run->out, inner = {0};

    run->out = &inner;
    TRY(x3_jexec_body(run, body));
    run->out = outer;
    return x3_jstr_of(run, &inner, out);
}

/* {% set x %}…{% endset %} and {% filter f %}…{% endfilter %} */
static x3_status exec_capture(x3_jrun *run, const x3_jnode *node)
{
    const x3_jnode *filter = node->kind == X3_JK_FILTER_BLOCK ? node->a : node->b;
    x3_jval text;

    TRY(x3_jexec_enter(run, node->frame));
    TRY(capture(run, node->body, &text));
    if (run->flow != 0) /* a break inside: the text is dropped */
        return X3_OK;
    if (filter != NULL) {
        run->block = text;
        TRY(x3_jeval(run, filter, &text));
    }
    run->line = node->line;
    if (node->kind == X3_JK_FILTER_BLOCK)
        TRY(x3_jprint_str(run, run->out, text));
    else
        TRY(x3_jexec_assign(run, node->a, text));
    leave(run, node->frame);
    return X3_OK;
}

static x3_status exec_with(x3_jrun *run, const x3_jnode *node)
{
    const x3_jnode *value = node->list2;
    x3_jval v;

    TRY(x3_jexec_enter(run, node->frame));
    for (const x3_jnode *target = node->list; target != NULL; target = target->next, value = value->next) {
        TRY(x3_jeval(run, value, &v));
        TRY(x3_jexec_assign(run, target, v));
    }
    TRY(x3_jexec_body(run, node->body));
    leave(run, node->frame);
    return X3_OK;
}

/* ---- loops ---- */

/* What the generator of a loop's test needs. */
typedef struct loop_test {
    const x3_jcode *code;
    x3_jscope *scope;
} loop_test;

/* The generator yields its target: what was unpacked becomes a tuple. */
static x3_status read_target(x3_jrun *run, const x3_jnode *target, x3_jval *out)
{
    x3_jlist *list;
    x3_jval v;

    if (target->kind != X3_JK_TUPLE) {
        *out = *x3_jscope_at(run->scope, target->address);
        return X3_OK;
    }
    TRY(x3_jlist_new(run, 2, &list));
    for (const x3_jnode *item = target->list; item != NULL; item = item->next) {
        TRY(read_target(run, item, &v));
        TRY(x3_jlist_push(run, list, v));
    }
    *out = x3_jval_tuple(list);
    return X3_OK;
}

static x3_status next_passing(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more)
{
    const loop_test *test = it->state;
    x3_jscope *outer = run->scope;
    x3_jval passes;

    do {
        TRY(x3_jiter_next(run, it->inner, out, more));
        if (!*more)
            return X3_OK;
        run->scope = test->scope;
        TRY(x3_jexec_assign(run, test->code->target, *out));
        TRY(x3_jeval(run, test->code->test, &passes));
        TRY(read_target(run, test->code->target, out));
        run->scope = outer;
    } while (!x3_jval_truth(passes));
    return X3_OK;
}

static x3_status filter_loop(x3_jrun *run, const x3_jcode *code, x3_jval *iterable)
{
    x3_jscope *outer = run->scope;
    loop_test *test;
    x3_jiter *it;

    TRY(x3_jrun_alloc(run, &test, 1, sizeof *test));
    test->code = code;
    TRY(x3_jexec_scope(run, code, run->scope, &test->scope));
    run->scope = test->scope;
    TRY(x3_jexec_enter(run, &code->frame));
    run->scope = outer;
    TRY(x3_jiter_new(run, "generator", next_passing, &it));
    it->state = test;
    TRY(x3_jiter_open(run, *iterable, &it->inner));
    *iterable = x3_jval_iter(it);
    return X3_OK;
}

/* The next item, also for the `loop` of the body, which may have looked ahead. */
static x3_status next_item(x3_jrun *run, x3_jloop *loop, x3_jval *item, bool *more)
{
    *more = loop->after.type != X3_JMISSING;
    *item = loop->after;
    loop->after = (x3_jval){0};
    if (!*more)
        TRY(x3_jiter_next(run, loop->iter, item, more));
    if (!*more)
        return X3_OK;
    loop->index0++;
    loop->before = loop->current;
    loop->current = *item;
    return X3_OK;
}

static x3_status exec_else(x3_jrun *run, const x3_jnode *node)
{
    TRY(x3_jexec_enter(run, node->frame2));
    TRY(x3_jexec_body(run, node->else_));
    leave(run, node->frame2);
    return X3_OK;
}

static x3_status exec_for(x3_jrun *run, const x3_jnode *node)
{
    bool more, finished_once = false;
    x3_jval item;
    x3_jloop *loop;

    TRY(x3_jrun_alloc(run, &loop, 1, sizeof *loop));
    loop->index0 = loop->length = -1;
    TRY(x3_jeval(run, node->b, &loop->iterable));
    run->line = node->line;
    if (node->code != NULL)
        TRY(filter_loop(run, node->code, &loop->iterable));
    TRY(x3_jiter_open(run, loop->iterable, &loop->iter));
    for (;;) {
        TRY(next_item(run, loop, &item, &more));
        if (!more)
            break;
        TRY(x3_jexec_assign(run, node->a, item));
        if (node->is_extended)
            *x3_jscope_at(run->scope, node->address) = (x3_jval){.type = X3_JLOOP, .loop = loop};
        TRY(x3_jexec_enter(run, node->frame));
        TRY(x3_jexec_body(run, node->body));
        char flow = run->flow;
        run->flow = 0;
        if (flow == 'b')
            break;
        /* the flag that suppresses `else` is at the end of the body, where `continue` does not come by */
        finished_once = finished_once || flow == 0;
    }
    leave(run, node->frame);
    return node->else_ != NULL && !finished_once ? exec_else(run, node) : X3_OK;
}

/* ---- macros ---- */

/* Takes the value of a keyword out of *keywords, or leaves MISSING. */
static x3_status take_keyword(x3_jrun *run, x3_jdict **keywords, const x3_jstr *name, x3_jval *out)
{
    x3_jdict *rest;

    *out = *keywords == NULL ? (x3_jval){0} : x3_jdict_find(*keywords, name);
    if (out->type == X3_JMISSING)
        return X3_OK;
    TRY(x3_jdict_new(run, &rest));
    for (size_t i = 0; i < (*keywords)->n_items; i++) {
        const x3_jentry *entry = &(*keywords)->entries[i];
        if (!(entry->key.s->n_bytes == name->n_bytes && memcmp(entry->key.s->data, name->data, name->n_bytes) == 0))
            TRY(x3_jdict_set(run, rest, entry->key, entry->value));
    }
    *keywords = rest;
    return X3_OK;
}

static const char *macro_name(const x3_jcode *code)
{
    return code->name == NULL ? "None" : code->name->text.data;
}

/* runtime.Macro.__call__: arguments into the slots of `scope`. */
static x3_status bind_macro(x3_jrun *run, const x3_jcode *code, const x3_jargs *args, x3_jscope *scope)
{
    static const x3_jstr caller_name = {"caller", 6, 6, false, NULL};
    x3_jdict *keywords = (x3_jdict *)(uintptr_t)args->keywords;
    bool found_caller = args->n_items >= code->n_params && code->has_explicit_caller;
    size_t i = 0;

    for (const x3_jnode *param = code->params; param != NULL; param = param->next, i++) {
        x3_jval *slot = &scope->slots[param->address.slot];
        if (i < args->n_items) {
            *slot = args->items[i];
            continue;
        }
        TRY(take_keyword(run, &keywords, &param->name->text, slot));
        found_caller = found_caller || x3_jstr_is(&param->name->text, "caller");
    }
    if (code->takes_caller && !found_caller) {
        x3_jval *slot = &scope->slots[code->caller];
        TRY(take_keyword(run, &keywords, &caller_name, slot));
        if (slot->type == X3_JMISSING || slot->type == X3_JNONE)
            TRY(x3_jundefined_hint(run, "No caller defined", slot));
    }
    if (code->takes_kwargs) {
        if (keywords == NULL)
            TRY(x3_jdict_new(run, &keywords));
        scope->slots[code->kwargs] = x3_jval_dict(keywords);
    } else if (keywords != NULL && keywords->n_items > 0) {
        if (x3_jdict_find(keywords, &caller_name).type != X3_JMISSING)
            return x3_jrun_fail(run, "macro '%s' was invoked with two values for the special caller argument. This is "
                                "most likely a bug.", macro_name(code));
        const x3_jstr *extra = keywords->entries[0].key.s;
        return x3_jrun_fail(run, "macro '%s' takes no keyword argument '%.*s'", macro_name(code),
                            (int)x3_min_size(extra->n_bytes, 100), extra->data);
    }
    if (code->takes_varargs) {
        x3_jlist *rest;
        TRY(x3_jlist_new(run, 0, &rest));
        for (i = code->n_params; i < args->n_items; i++)
            TRY(x3_jlist_push(run, rest, args->items[i]));
        scope->slots[code->varargs] = x3_jval_tuple(rest);
    } else if (args->n_items > code->n_params) {
        return x3_jrun_fail(run, "macro '%s' takes not more than %zu argument(s)", macro_name(code), code->n_params);
    }
    return X3_OK;
}

/* Defaults of the parameters that got nothing, in order: each may use those before it. */
static x3_status fill_defaults(x3_jrun *run, const x3_jcode *code)
{
    const x3_jnode *default_ = code->defaults;
    size_t i = 0;

    for (const x3_jnode *param = code->params; param != NULL; param = param->next, i++) {
        x3_jval *slot = &run->scope->slots[param->address.slot];
        bool has_default = i >= code->n_params - code->n_defaults;
        if (slot->type == X3_JMISSING && has_default) {
            x3_jval value;
            TRY(x3_jeval(run, default_, &value));
            run->scope->slots[param->address.slot] = value;
        } else if (slot->type == X3_JMISSING) {
            char *hint;
            size_t size = param->name->text.n_bytes + 40;
            TRY(x3_jrun_alloc(run, &hint, size, 1));
            snprintf(hint, size, "parameter '%s' was not provided", param->name->text.data);
            TRY(x3_jundefined_hint(run, hint, slot));
        }
        if (has_default)
            default_ = default_->next;
    }
    return X3_OK;
}

x3_status x3_jexec_macro(x3_jrun *run, const x3_jmacro *macro, const x3_jargs *args, x3_jval *out)
{
    x3_jscope *outer = run->scope, *scope;
    x3_jval block = run->block;

    TRY(x3_jrun_enter(run));
    TRY(x3_jexec_scope(run, macro->code, macro->scope, &scope));
    TRY(bind_macro(run, macro->code, args, scope));
    run->scope = scope;
    TRY(x3_jexec_enter(run, &macro->code->frame));
    TRY(fill_defaults(run, macro->code));
    TRY(capture(run, macro->code->body, out));
    run->scope = outer;
    run->block = block;
    x3_jrun_leave(run);
    return X3_OK;
}

static x3_status make_macro(x3_jrun *run, const x3_jcode *code, x3_jval *out)
{
    x3_jmacro *macro;

    TRY(x3_jrun_alloc(run, &macro, 1, sizeof *macro));
    *macro = (x3_jmacro){code, run->scope};
    *out = (x3_jval){.type = X3_JMACRO, .macro = macro};
    return X3_OK;
}

static x3_status exec_macro(x3_jrun *run, const x3_jnode *node)
{
    x3_jval macro;

    TRY(make_macro(run, node->code, &macro));
    *x3_jscope_at(run->scope, node->address) = macro;
    return X3_OK;
}

static x3_status exec_call_block(x3_jrun *run, const x3_jnode *node)
{
    x3_jval caller, result;

    TRY(make_macro(run, node->code, &caller));
    TRY(x3_jeval_call(run, node->a, caller, &result));
    return x3_jprint_str(run, run->out, result);
}

static x3_status exec_generation(x3_jrun *run, const x3_jnode *node)
{
    x3_jval macro, result;

    TRY(make_macro(run, node->code, &macro));
    TRY(x3_jexec_macro(run, macro.macro, &(x3_jargs){0}, &result));
    return x3_jprint_str(run, run->out, result);
}

/* ---- the rest ---- */

static x3_status exec_output(x3_jrun *run, const x3_jnode *node)
{
    x3_jval v;

    for (const x3_jnode *item = node->list; item != NULL; item = item->next) {
        TRY(x3_jeval(run, item, &v));
        TRY(x3_jprint_str(run, run->out, v));
    }
    return X3_OK;
}

static x3_status exec_if(x3_jrun *run, const x3_jnode *node)
{
    const x3_jnode *branch = node;
    x3_jval test;

    while (branch != NULL) {
        TRY(x3_jeval(run, branch->a, &test));
        if (x3_jval_truth(test))
            return x3_jexec_body(run, branch->body);
        branch = branch == node ? node->list : branch->next;
    }
    return x3_jexec_body(run, node->else_);
}

static x3_status exec_break(x3_jrun *run, const x3_jnode *node)
{
    run->flow = node->kind == X3_JK_BREAK ? 'b' : 'c';
    return X3_OK;
}

x3_status x3_jexec_body(x3_jrun *run, const x3_jnode *body)
{
    static x3_status (*const exec[X3_JN_KINDS])(x3_jrun *, const x3_jnode *) = {
        [X3_JK_OUTPUT] = exec_output, [X3_JK_FOR] = exec_for, [X3_JK_IF] = exec_if, [X3_JK_SET] = exec_set,
        [X3_JK_SET_BLOCK] = exec_capture, [X3_JK_MACRO] = exec_macro, [X3_JK_CALL_BLOCK] = exec_call_block,
        [X3_JK_GENERATION] = exec_generation, [X3_JK_FILTER_BLOCK] = exec_capture, [X3_JK_WITH] = exec_with,
        [X3_JK_BREAK] = exec_break, [X3_JK_CONTINUE] = exec_break};

    TRY(x3_jrun_enter(run));
    for (const x3_jnode *node = body; node != NULL && run->flow == 0; node = node->next) {
        run->line = node->line;
        TRY(x3_jrun_steps(run, 1));
        TRY(exec[node->kind](run, node));
    }
    x3_jrun_leave(run);
    return X3_OK;
}
