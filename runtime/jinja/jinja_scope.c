#include "runtime/jinja/jinja_internal.h"

#include <string.h>

/* jinja2.idtracking and the scopes of jinja2.compiler. jinja2 compiles a template to Python functions whose local
 * variables are the template's names; what a name means is decided per frame before anything runs:
 *   read first, not known around it    the variable or global of that name, looked up when the frame is entered
 *   set, known around it               a copy of the outer one, made when the frame is entered
 *   set, not known around it           nothing yet; but if only set in a branch of an `if`, looked up
 * A for body is entered once an iteration, which is why a set inside it is lost. Macros see the variables of the
 * functions around them as they are when the macro runs. */

typedef struct x3_jsymbol symbol;
typedef struct frame frame;

typedef struct function {
    struct function *parent;
    uint32_t n_slots;
    int n_loops; /* loops around the current place, for break and continue */
} function;

/* A name in a frame. */
struct x3_jsymbol {
    x3_jname *name;
    frame *frame;
    symbol *below; /* the same name in a frame around it */
    symbol *next;  /* in the frame */
    x3_jload load;
    bool is_stored;
    symbol *next_stored;
};

struct frame {
    frame *parent;
    function *function;
    symbol *symbols, **end, *stored; /* stored: the newest first */
    size_t n_symbols;
    bool is_soft; /* inside an if, where unknown filters only fail when reached */
};

typedef struct pass {
    x3_jcompile *c;
    frame *frame;
    uint32_t depth;
} pass;

static x3_status analyze(pass *s, const x3_jnode *list) X3_MUST;
static x3_status resolve(pass *s, x3_jnode *node) X3_MUST;

/* ---- symbols of a frame ---- */

static x3_status define(pass *s, x3_jname *name, x3_jload_kind kind, symbol **out)
{
    frame *f = s->frame;
    symbol *symbol_, *below = name->symbol;

    TRY(x3_jcompile_alloc(s->c, &symbol_, 1, sizeof *symbol_));
    symbol_->name = name;
    symbol_->frame = f;
    symbol_->below = below;
    symbol_->load.kind = kind;
    symbol_->load.slot = f->function->n_slots++;
    symbol_->load.name = name;
    name->symbol = symbol_;
    *f->end = symbol_;
    f->end = &symbol_->next;
    f->n_symbols++;
    *out = symbol_;
    return X3_OK;
}

/* Where a symbol is, seen from the running function. */
static x3_jaddress address_of(const pass *s, const symbol *symbol_)
{
    x3_jaddress address = {0, symbol_->load.slot};

    for (const function *f = s->frame->function; f != symbol_->frame->function; f = f->parent)
        address.hops++;
    return address;
}

static void mark_stored(pass *s, symbol *symbol_)
{
    if (symbol_->is_stored)
        return;
    symbol_->is_stored = true;
    symbol_->next_stored = s->frame->stored;
    s->frame->stored = symbol_;
}

static x3_status load(pass *s, x3_jnode *node)
{
    symbol *made;

    if (node->name->symbol != NULL)
        return X3_OK;
    if (x3_jstr_is(&node->name->text, "self"))
        return x3_jcompile_refuse(s->c, node->line, "`self` is not supported");
    return define(s, node->name, X3_JLOAD_RESOLVE, &made);
}

static x3_status store(pass *s, x3_jname *name)
{
    symbol *outer = name->symbol, *made = outer;

    if (outer == NULL || outer->frame != s->frame) {
        TRY(define(s, name, outer == NULL ? X3_JLOAD_UNDEFINED : X3_JLOAD_ALIAS, &made));
        if (outer != NULL)
            made->load.from = address_of(s, outer);
    }
    mark_stored(s, made);
    return X3_OK;
}

static x3_status declare(pass *s, x3_jname *name, symbol **out)
{
    *out = name->symbol;
    if (*out == NULL || (*out)->frame != s->frame)
        TRY(define(s, name, X3_JLOAD_PARAMETER, out));
    (*out)->load.kind = X3_JLOAD_PARAMETER;
    mark_stored(s, *out);
    return X3_OK;
}

/* A target of a loop. */
static x3_status declare_target(pass *s, const x3_jnode *target)
{
    symbol *made;

    if (target->kind == X3_JK_NAME)
        return declare(s, target->name, &made);
    for (const x3_jnode *item = target->list; item != NULL; item = item->next)
        TRY(declare_target(s, item));
    return X3_OK;
}

static void open_frame(pass *s, frame *f, function *owner)
{
    *f = (frame){.parent = s->frame, .function = owner};
    f->end = &f->symbols;
    s->frame = f;
}

/* Writes down the loads of the frame, whose symbols must be complete. */
static x3_status fix_frame(pass *s, x3_jframe *out)
{
    size_t n = 0;

    TRY(x3_jcompile_alloc(s->c, &out->loads, s->frame->n_symbols, sizeof *out->loads));
    for (const symbol *i = s->frame->symbols; i != NULL; i = i->next)
        out->loads[n++] = i->load;
    out->n_loads = n;
    return X3_OK;
}

static void close_frame(pass *s)
{
    for (symbol *i = s->frame->symbols; i != NULL; i = i->next)
        i->name->symbol = i->below;
    s->frame = s->frame->parent;
}

/* ---- walking the tree ---- */

static x3_status enter(pass *s, const x3_jnode *node)
{
    if (++s->depth > 5 * X3_JNEST_MAX)
        return x3_jcompile_fail(s->c, node->line, "an expression of more than %d levels", 5 * X3_JNEST_MAX);
    return X3_OK;
}

/* Calls visit on the children of a node in the order of jinja2's fields, parameters and defaults included. */
static x3_status visit_children(const x3_jnode *node, x3_status (*visit)(void *state, const x3_jnode *list),
                                void *state)
{
    const x3_jnode *const ordinary[] = {node->a, node->b, node->c, node->d, node->list, node->list2, node->body,
                                        node->else_};
    const x3_jnode *const of_if[] = {node->a, node->body, node->list, node->else_};
    const x3_jnode *const of_filter_block[] = {node->body, node->a};
    const x3_jnode *const *children = ordinary;
    size_t n = sizeof ordinary / sizeof ordinary[0];

    if (node->kind == X3_JK_IF || node->kind == X3_JK_FILTER_BLOCK) {
        children = node->kind == X3_JK_IF ? of_if : of_filter_block;
        n = node->kind == X3_JK_IF ? 4 : 2;
    }
    for (size_t i = 0; i < n; i++)
        TRY(visit(state, children[i]));
    if (node->code != NULL) {
        const x3_jcode *code = node->code;
        TRY(visit(state, code->params));
        TRY(visit(state, code->defaults));
        TRY(visit(state, code->body));
        TRY(visit(state, code->test));
    }
    if (node->args != NULL) {
        TRY(visit(state, node->args->positional));
        TRY(visit(state, node->args->keywords));
        TRY(visit(state, node->args->star));
        TRY(visit(state, node->args->star_star));
    }
    return X3_OK;
}

/* find_undeclared: which of `names` are read before they are set, whatever the frame. */
typedef struct search {
    pass *pass;
    const char *names[3]; /* NULL when no longer looked for */
    bool found[3];
} search;

static x3_status find_undeclared(void *state, const x3_jnode *list)
{
    search *look = state;

    for (const x3_jnode *node = list; node != NULL; node = node->next) {
        for (int i = 0; i < 3 && node->kind == X3_JK_NAME; i++) {
            if (look->names[i] == NULL || !x3_jstr_is(&node->name->text, look->names[i]))
                continue;
            if (node->is_store || node->is_param)
                look->names[i] = NULL;
            else
                look->found[i] = true;
        }
        TRY(enter(look->pass, node));
        TRY(visit_children(node, find_undeclared, look));
        look->pass->depth--;
    }
    return X3_OK;
}

static x3_status refuse_loop_store(void *state, const x3_jnode *list)
{
    pass *s = state;

    for (const x3_jnode *node = list; node != NULL; node = node->next) {
        if (node->kind == X3_JK_NAME && node->is_store && x3_jstr_is(&node->name->text, "loop"))
            return x3_jcompile_fail(s->c, node->line, "Can't assign to special loop variable in for-loop target");
        TRY(enter(s, node));
        TRY(visit_children(node, refuse_loop_store, s));
        s->depth--;
    }
    return X3_OK;
}

/* ---- first: which names the frame has ---- */

static x3_status analyze_visitor(void *state, const x3_jnode *list)
{
    return analyze(state, list);
}

/* The branches of an if. A name that only some branch sets is looked up, or copied, when the frame is entered. */
static x3_status analyze_if(pass *s, const x3_jnode *node)
{
    symbol *before = s->frame->stored;

    TRY(analyze(s, node->a));
    TRY(analyze(s, node->body));
    TRY(analyze(s, node->list));
    TRY(analyze(s, node->else_));
    for (symbol *i = s->frame->stored; i != before; i = i->next_stored) {
        i->load.kind = i->below != NULL ? X3_JLOAD_ALIAS : X3_JLOAD_RESOLVE;
        if (i->below != NULL)
            i->load.from = address_of(s, i->below);
    }
    return X3_OK;
}

static x3_status analyze_node(pass *s, const x3_jnode *node)
{
    switch ((int)node->kind) {
    case X3_JK_NAME:
        return node->is_store || node->is_param ? store(s, node->name) : load(s, (x3_jnode *)(uintptr_t)node);
    case X3_JK_NSREF:
        return load(s, (x3_jnode *)(uintptr_t)node);
    case X3_JK_IF:
        return analyze_if(s, node);
    case X3_JK_FOR:
        return analyze(s, node->b);
    case X3_JK_SET:
        TRY(analyze(s, node->b));
        return analyze(s, node->a);
    case X3_JK_MACRO:
        return store(s, node->name);
    case X3_JK_SET_BLOCK:
    case X3_JK_CALL_BLOCK:
    case X3_JK_FILTER_BLOCK:
        return analyze(s, node->a);
    case X3_JK_WITH:
        return analyze(s, node->list2);
    case X3_JK_GENERATION:
        return X3_OK;
    default:
        return visit_children(node, analyze_visitor, s);
    }
}

static x3_status analyze(pass *s, const x3_jnode *list)
{
    for (const x3_jnode *node = list; node != NULL; node = node->next) {
        TRY(enter(s, node));
        TRY(analyze_node(s, node));
        s->depth--;
    }
    return X3_OK;
}

/* ---- then: where each name is ---- */

static x3_status resolve_list(pass *s, x3_jnode *list)
{
    for (x3_jnode *node = list; node != NULL; node = node->next) {
        TRY(enter(s, node));
        TRY(resolve(s, node));
        s->depth--;
    }
    return X3_OK;
}

static x3_status resolve_soft(pass *s, x3_jnode *list)
{
    bool was_soft = s->frame->is_soft;

    s->frame->is_soft = true;
    TRY(resolve_list(s, list));
    s->frame->is_soft = was_soft;
    return X3_OK;
}

/* A name that the frame of a macro has besides its parameters. */
static x3_status declare_special(pass *s, const char *text, uint32_t *slot)
{
    x3_jname *name;
    symbol *made;

    TRY(x3_jcompile_name(s->c, text, strlen(text), &name));
    TRY(declare(s, name, &made));
    *slot = made->load.slot;
    return X3_OK;
}

/* Macro, call block, generation: compiler.macro_body. */
static x3_status resolve_code(pass *s, x3_jcode *code, uint32_t line)
{
    search look = {.pass = s, .names = {"caller", "kwargs", "varargs"}};
    function owner = {.parent = s->frame->function};
    bool own[3] = {false};
    size_t caller_at = 0, i = 0;
    symbol *made;
    frame f;

    open_frame(s, &f, &owner);
    for (x3_jnode *param = code->params; param != NULL; param = param->next, i++) {
        TRY(declare(s, param->name, &made));
        for (int k = 0; k < 3; k++)
            own[k] = own[k] || x3_jstr_is(&param->name->text, look.names[k]);
        if (x3_jstr_is(&param->name->text, "caller"))
            caller_at = i;
    }
    TRY(analyze(s, code->defaults));
    TRY(analyze(s, code->body));
    TRY(find_undeclared(&look, code->body));
    code->has_explicit_caller = own[0];
    code->takes_caller = look.found[0];
    code->takes_kwargs = look.found[1] && !own[1];
    code->takes_varargs = look.found[2] && !own[2];
    if (look.found[0] && own[0] && code->n_params - caller_at > code->n_defaults)
        return x3_jcompile_fail(s->c, line, "When defining macros or call blocks the special \"caller\" argument must "
                                "be omitted or be given a default.");
    if (code->takes_caller && !own[0])
        TRY(declare_special(s, "caller", &code->caller));
    if (code->takes_kwargs)
        TRY(declare_special(s, "kwargs", &code->kwargs));
    if (code->takes_varargs)
        TRY(declare_special(s, "varargs", &code->varargs));
    TRY(fix_frame(s, &code->frame));
    TRY(resolve_list(s, code->params));
    TRY(resolve_list(s, code->defaults));
    TRY(resolve_list(s, code->body));
    close_frame(s);
    code->n_slots = owner.n_slots;
    return X3_OK;
}

/* The test of a loop is a generator function; its target is its own. */
static x3_status resolve_loop_test(pass *s, x3_jnode *node)
{
    function owner = {.parent = s->frame->function};
    frame f;

    open_frame(s, &f, &owner);
    TRY(declare_target(s, node->a));
    TRY(analyze(s, node->code->test));
    TRY(fix_frame(s, &node->code->frame));
    TRY(resolve_list(s, node->code->test));
    TRY(resolve_list(s, node->code->target));
    close_frame(s);
    node->code->n_slots = owner.n_slots;
    return X3_OK;
}

static x3_status copy_target(pass *s, const x3_jnode *from, x3_jnode **out)
{
    x3_jnode **end;

    TRY(x3_jcompile_alloc(s->c, out, 1, sizeof **out));
    **out = *from;
    (*out)->next = (*out)->list = NULL;
    end = &(*out)->list;
    for (const x3_jnode *item = from->list; item != NULL; item = item->next, end = &(*end)->next)
        TRY(copy_target(s, item, end));
    return X3_OK;
}

static x3_status resolve_for(pass *s, x3_jnode *node)
{
    search look = {.pass = s, .names = {"loop"}};
    symbol *loop = NULL;
    x3_jname *name;
    frame f;

    TRY(find_undeclared(&look, node->body));
    node->is_extended = look.found[0];
    TRY(refuse_loop_store(s, node->a));
    TRY(visit_children(node, refuse_loop_store, s));
    TRY(resolve_list(s, node->b));
    if (node->code != NULL) {
        TRY(copy_target(s, node->a, &node->code->target));
        TRY(resolve_loop_test(s, node));
    }
    TRY(x3_jcompile_alloc(s->c, &node->frame, 1, sizeof *node->frame));
    open_frame(s, &f, s->frame->function);
    if (node->is_extended) {
        TRY(x3_jcompile_name(s->c, "loop", 4, &name));
        TRY(declare(s, name, &loop));
        node->address = address_of(s, loop);
    }
    TRY(declare_target(s, node->a));
    TRY(analyze(s, node->body));
    TRY(fix_frame(s, node->frame));
    TRY(resolve_list(s, node->a));
    f.function->n_loops++;
    TRY(resolve_list(s, node->body));
    f.function->n_loops--;
    close_frame(s);
    if (node->else_ == NULL)
        return X3_OK;
    TRY(x3_jcompile_alloc(s->c, &node->frame2, 1, sizeof *node->frame2));
    open_frame(s, &f, s->frame->function);
    TRY(analyze(s, node->else_));
    TRY(fix_frame(s, node->frame2));
    TRY(resolve_list(s, node->else_));
    close_frame(s);
    return X3_OK;
}

/* With, set block, filter block: a frame in the same function around the body. */
static x3_status resolve_inner(pass *s, x3_jnode *node)
{
    x3_jnode *filter = node->kind == X3_JK_FILTER_BLOCK ? node->a : node->kind == X3_JK_SET_BLOCK ? node->b : NULL;
    frame f;

    if (node->kind == X3_JK_SET_BLOCK)
        TRY(resolve_list(s, node->a));
    TRY(resolve_list(s, node->list2));
    TRY(x3_jcompile_alloc(s->c, &node->frame, 1, sizeof *node->frame));
    open_frame(s, &f, s->frame->function);
    for (const x3_jnode *target = node->list; target != NULL; target = target->next)
        TRY(declare_target(s, target));
    TRY(analyze(s, node->body));
    TRY(analyze(s, filter));
    TRY(fix_frame(s, node->frame));
    TRY(resolve_list(s, node->list));
    TRY(resolve_list(s, node->body));
    TRY(resolve_list(s, filter));
    close_frame(s);
    return X3_OK;
}

/* A filter or test must be known when compiling, unless it may never be reached. */
static x3_status check_callee(pass *s, const x3_jnode *node)
{
    bool is_filter = node->kind == X3_JK_FILTER;
    const x3_jbuiltin *callee = is_filter ? x3_jbuiltin_filter(&node->name->text)
                                          : x3_jbuiltin_test(&node->name->text);

    if (callee != NULL || s->frame->is_soft)
        return X3_OK;
    return x3_jcompile_fail(s->c, node->line, "No %s named '%s'.", is_filter ? "filter" : "test",
                            node->name->text.data);
}

static x3_status resolve_visitor(void *state, const x3_jnode *list)
{
    return resolve_list(state, (x3_jnode *)(uintptr_t)list);
}

static x3_status resolve(pass *s, x3_jnode *node)
{
    switch ((int)node->kind) {
    case X3_JK_NAME:
    case X3_JK_NSREF:
        node->address = address_of(s, node->name->symbol);
        return X3_OK;
    case X3_JK_FILTER:
    case X3_JK_TEST:
        TRY(check_callee(s, node));
        return visit_children(node, resolve_visitor, s);
    case X3_JK_IF:
    case X3_JK_COND:
        TRY(resolve_soft(s, node->a));
        TRY(resolve_soft(s, node->b));
        TRY(resolve_soft(s, node->c));
        TRY(resolve_soft(s, node->body));
        TRY(resolve_soft(s, node->list));
        return resolve_soft(s, node->else_);
    case X3_JK_FOR:
        return resolve_for(s, node);
    case X3_JK_MACRO:
        node->address = address_of(s, node->name->symbol);
        return resolve_code(s, node->code, node->line);
    case X3_JK_CALL_BLOCK:
        TRY(resolve_list(s, node->a));
        return resolve_code(s, node->code, node->line);
    case X3_JK_GENERATION:
        return resolve_code(s, node->code, node->line);
    case X3_JK_SET_BLOCK:
    case X3_JK_FILTER_BLOCK:
    case X3_JK_WITH:
        return resolve_inner(s, node);
    case X3_JK_BREAK:
    case X3_JK_CONTINUE:
        if (s->frame->function->n_loops == 0)
            return x3_jcompile_fail(s->c, node->line, node->kind == X3_JK_BREAK ? "'break' outside loop"
                                                                                : "'continue' not properly in loop");
        return X3_OK;
    default:
        return visit_children(node, resolve_visitor, s);
    }
}

x3_status x3_jscope_resolve(x3_jcompile *c, x3_jnode *body, x3_jcode *root)
{
    pass s = {.c = c};
    function owner = {0};
    frame f;

    open_frame(&s, &f, &owner);
    TRY(analyze(&s, body));
    TRY(fix_frame(&s, &root->frame));
    TRY(resolve_list(&s, body));
    root->body = body;
    root->n_slots = owner.n_slots;
    return X3_OK;
}
