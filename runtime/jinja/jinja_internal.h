/* What the files of the template engine share. Reading order: jinja_lexer, jinja_parser
 * (expressions), jinja_statement, jinja_scope (names become
 * slots), jinja_exec (statements), jinja_eval (expressions), jinja_value, jinja_iter, jinja_print, then the library:
 * jinja_object (attributes), jinja_text and jinja_str (str), jinja_format, jinja_filters, jinja_sequence and
 * jinja_builtins (tests, globals).
 *
 * Memory: a template owns one arena, a render another; nothing in them is freed alone, so a failure just returns. */
#ifndef X3_JINJA_INTERNAL_H
#define X3_JINJA_INTERNAL_H

#include "runtime/jinja/jinja.h"

/* Arenas leave nothing to clean up on the way out. */
#define TRY(expr)                    \
    do {                             \
        x3_status try_rc = (expr);   \
        if (try_rc != X3_OK)         \
            return try_rc;           \
    } while (0)

typedef struct x3_jrun x3_jrun;
typedef struct x3_jnode x3_jnode;
typedef struct x3_jcode x3_jcode;
typedef struct x3_jscope x3_jscope;

/* ---- values ------------------------------------------------------------------------------------------------ */

typedef enum x3_jtype {
    X3_JMISSING, /* a variable without a value yet, an argument not given; templates never see it */
    X3_JUNDEFINED,
    X3_JNONE,
    X3_JBOOL,
    X3_JINT,
    X3_JFLOAT,
    X3_JSTR,
    X3_JLIST,
    X3_JTUPLE,
    X3_JDICT,
    X3_JVIEW,      /* dict.keys(), values(), items() */
    X3_JRANGE,
    X3_JITER,      /* generators, reversed(): walked once */
    X3_JNAMESPACE,
    X3_JMACRO,
    X3_JBOUND,     /* a method of a value */
    X3_JFUNCTION,  /* a global */
    X3_JLOOP,
    X3_JCYCLER,
    X3_JJOINER,
    X3_JN_TYPES
} x3_jtype;

typedef struct x3_jval {
    x3_jtype type;
    union {
        bool b;
        int64_t i;
        double f;
        const struct x3_jundefined *undefined;
        const struct x3_jstr *s;
        struct x3_jlist *list; /* LIST, TUPLE, CYCLER */
        struct x3_jdict *dict; /* DICT, NAMESPACE */
        const struct x3_jview *view;
        const struct x3_jrange *range;
        struct x3_jiter *iter;
        const struct x3_jmacro *macro;
        const struct x3_jbound *bound;
        const struct x3_jfunction *function;
        struct x3_jloop *loop;
        struct x3_jjoiner *joiner;
    };
} x3_jval;

/* Text, immutable; pieces of it are shared. n_chars: code points. is_markup: Markup of markupsafe. */
typedef struct x3_jstr {
    const char *data;
    size_t n_bytes, n_chars;
    bool is_markup;
    struct x3_jbuf *tail; /* the buffer whose bytes it ends with, or NULL: `s = s + t` appends in place */
} x3_jstr;

/* What an undefined value complains about: a hint, or no attribute `name` in `object`, or no variable `name`. */
typedef struct x3_jundefined {
    const char *hint;
    x3_jval object, name;
} x3_jundefined;

typedef struct x3_jlist {
    x3_jval *items;
    size_t n_items, capacity;
    bool is_group;  /* of groupby: .grouper and .list */
    size_t cycle;   /* CYCLER: position */
} x3_jlist;

typedef struct x3_jentry {
    uint64_t hash;
    x3_jval key, value;
} x3_jentry;

/* Insertion order; `index` (open addressing, entry + 1) only past a few entries. */
typedef struct x3_jdict {
    x3_jentry *entries;
    size_t n_items, capacity;
    uint32_t *index;
    size_t n_index;
} x3_jdict;

typedef struct x3_jview {
    x3_jdict *dict;
    char kind; /* 'k', 'v', 'i' */
} x3_jview;

typedef struct x3_jrange {
    int64_t start, stop, step;
} x3_jrange;

/* A walk in progress. next sets *more to false at the end; *out then is unchanged. */
typedef struct x3_jiter x3_jiter;
struct x3_jiter {
    x3_status (*next)(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more);
    const char *name; /* for printing */
    x3_jval source;
    x3_jiter *inner;
    void *state;
    size_t at;
    bool is_done;
};

/* Arguments of a call; keywords may be NULL. */
typedef struct x3_jargs {
    const x3_jval *items;
    size_t n_items;
    const x3_jdict *keywords;
} x3_jargs;

typedef struct x3_jmacro {
    const x3_jcode *code;
    x3_jscope *scope;
} x3_jmacro;

/* The parameters of a built-in: names for keywords (NULL: positional only), how many must and may be given;
 * max -1: any number, and any keywords. `call` gets one value a parameter, MISSING where not given (all of `args`
 * when max is -1). */
typedef struct x3_jbuiltin {
    const char *name;
    x3_status (*call)(x3_jrun *run, const x3_jval *self, const x3_jval *arg, const x3_jargs *args, x3_jval *out);
    int min, max;
    const char *parameters; /* "sep maxsplit" */
} x3_jbuiltin;

#define X3_JPARAMETERS_MAX 6

typedef struct x3_jbound {
    const x3_jbuiltin *method;
    x3_jval self;
} x3_jbound;

typedef struct x3_jfunction {
    x3_jbuiltin builtin; /* self is unused */
    const char *repr;
} x3_jfunction;

typedef struct x3_jloop {
    x3_jval iterable, before, current, after, changed;
    x3_jiter *iter;
    int64_t index0, length; /* length -1: not known yet */
} x3_jloop;

typedef struct x3_jjoiner {
    x3_jval separator;
    bool is_used;
} x3_jjoiner;

static inline x3_jval x3_jval_none(void)
{
    return (x3_jval){.type = X3_JNONE};
}

static inline x3_jval x3_jval_bool(bool b)
{
    return (x3_jval){.type = X3_JBOOL, .b = b};
}

static inline x3_jval x3_jval_int(int64_t i)
{
    return (x3_jval){.type = X3_JINT, .i = i};
}

static inline x3_jval x3_jval_float(double f)
{
    return (x3_jval){.type = X3_JFLOAT, .f = f};
}

static inline x3_jval x3_jval_list(x3_jlist *list)
{
    return (x3_jval){.type = X3_JLIST, .list = list};
}

static inline x3_jval x3_jval_tuple(x3_jlist *list)
{
    return (x3_jval){.type = X3_JTUPLE, .list = list};
}

static inline x3_jval x3_jval_dict(x3_jdict *dict)
{
    return (x3_jval){.type = X3_JDICT, .dict = dict};
}

static inline x3_jval x3_jval_iter(x3_jiter *iter)
{
    return (x3_jval){.type = X3_JITER, .iter = iter};
}

/* ---- templates --------------------------------------------------------------------------------------------- */

/* An interned name. `symbol` serves the scope pass only. */
typedef struct x3_jname {
    x3_jstr text;
    struct x3_jsymbol *symbol;
    struct x3_jname *chain;
} x3_jname;

/* Node kinds, with the fields they use. Expressions first. */
typedef enum x3_jkind {
    X3_JK_CONST,     /* value */
    X3_JK_NAME,      /* name, address */
    X3_JK_NSREF,     /* name.name2 as a target; address */
    X3_JK_TUPLE,     /* list */
    X3_JK_LIST,      /* list */
    X3_JK_DICT,      /* list of PAIR */
    X3_JK_PAIR,      /* a: b */
    X3_JK_UNARY,     /* op '+' '-' on a */
    X3_JK_NOT,       /* a */
    X3_JK_BINARY,    /* a op b */
    X3_JK_AND,       /* a, b */
    X3_JK_OR,        /* a, b */
    X3_JK_CONCAT,    /* list */
    X3_JK_COMPARE,   /* a, list of OPERAND */
    X3_JK_OPERAND,   /* op a; op 'i' is in, 'n' is not in */
    X3_JK_COND,      /* b if a else c */
    X3_JK_GETATTR,   /* a.name */
    X3_JK_GETITEM,   /* a[b] */
    X3_JK_SLICE,     /* a[b:c:d] */
    X3_JK_CALL,      /* a(args) */
    X3_JK_FILTER,    /* a|name(args); a NULL: the text of the block */
    X3_JK_TEST,      /* a is name(args) */
    X3_JK_KEYWORD,   /* name=a */
    X3_JK_OUTPUT,    /* list */
    X3_JK_FOR,       /* for a in b, body, else_; frame, frame2 of else; code: the test with its own a */
    X3_JK_IF,        /* a, body, list of IF (elif), else_ */
    X3_JK_SET,       /* a = b */
    X3_JK_SET_BLOCK, /* a = body, b: filter or NULL; frame */
    X3_JK_MACRO,     /* name, address, code */
    X3_JK_CALL_BLOCK, /* a: CALL, code */
    X3_JK_GENERATION, /* code */
    X3_JK_FILTER_BLOCK, /* a: filter, body; frame */
    X3_JK_WITH,      /* list = list2, body; frame */
    X3_JK_BREAK,
    X3_JK_CONTINUE,
    X3_JN_KINDS
} x3_jkind;

/* A variable: `hops` functions out from the running one. */
typedef struct x3_jaddress {
    uint32_t hops, slot;
} x3_jaddress;

typedef struct x3_jcall {
    x3_jnode *positional, *keywords, *star, *star_star;
    size_t n_positional;
    bool is_explicit; /* written with parentheses */
} x3_jcall;

struct x3_jnode {
    x3_jkind kind;
    uint32_t line;
    uint32_t op;
    bool is_store;    /* NAME, TUPLE: a target */
    bool is_param;    /* NAME: a parameter */
    bool is_extended; /* FOR: the body names `loop`, which is at `address` */
    x3_jaddress address;
    x3_jnode *next; /* the one after it in a list */
    x3_jnode *a, *b, *c, *d, *list, *list2, *body, *else_;
    x3_jname *name, *name2;
    x3_jval value;
    x3_jcall *args;
    struct x3_jframe *frame, *frame2;
    x3_jcode *code;
};

typedef enum x3_jload_kind { X3_JLOAD_PARAMETER, X3_JLOAD_RESOLVE, X3_JLOAD_ALIAS, X3_JLOAD_UNDEFINED } x3_jload_kind;

/* What a variable holds when its frame is entered. */
typedef struct x3_jload {
    x3_jload_kind kind;
    uint32_t slot;
    x3_jaddress from;     /* ALIAS */
    const x3_jname *name; /* RESOLVE: from the variables and globals */
} x3_jload;

typedef struct x3_jframe {
    x3_jload *loads;
    size_t n_loads;
} x3_jframe;

/* One function of the Python module that jinja2 would make: the root, a macro, the body of a call block or of
 * `generation`, the test of a loop. It has slots of its own and sees those of the functions around it. */
struct x3_jcode {
    x3_jframe frame;
    uint32_t n_slots;
    const x3_jname *name; /* NULL: anonymous */
    x3_jnode *params, *defaults, *body; /* params: NAME; defaults belong to the last ones */
    size_t n_params, n_defaults;
    bool takes_caller, takes_kwargs, takes_varargs, has_explicit_caller;
    uint32_t caller, kwargs, varargs; /* slots */
    x3_jnode *target, *test;          /* the test of a loop */
};

struct x3_jinja {
    x3_arena arena;
    char *name;
    x3_jcode root;
};

/* ---- compiling --------------------------------------------------------------------------------------------- */

#define X3_JNAME_BUCKETS 1024

typedef struct x3_jcompile {
    x3_jinja *jinja;
    x3_err *err;
    x3_jname **names; /* X3_JNAME_BUCKETS chains */
} x3_jcompile;

/* Fails with "name:line: …". */
x3_status x3_jcompile_fail(x3_jcompile *c, uint32_t line, const char *format, ...) X3_MUST X3_PRINTF(3, 4);
x3_status x3_jcompile_refuse(x3_jcompile *c, uint32_t line, const char *format, ...) X3_MUST X3_PRINTF(3, 4);
x3_status x3_jcompile_alloc(x3_jcompile *c, void *out, size_t n, size_t size) X3_MUST;
/* A string in the template's arena; data is copied. */
x3_status x3_jcompile_str(x3_jcompile *c, const char *data, size_t n, x3_jval *out) X3_MUST;
x3_status x3_jcompile_name(x3_jcompile *c, const char *data, size_t n, x3_jname **out) X3_MUST;

typedef enum x3_jtoken_kind {
    X3_JT_END,
    X3_JT_DATA,
    X3_JT_VARIABLE_BEGIN,
    X3_JT_VARIABLE_END,
    X3_JT_BLOCK_BEGIN,
    X3_JT_BLOCK_END,
    X3_JT_NAME,
    X3_JT_STRING,
    X3_JT_INTEGER,
    X3_JT_FLOAT,
    X3_JT_OPERATOR
} x3_jtoken_kind;

/* Two characters of an operator as one number. */
#define X3_JOP2(a, b) ((uint32_t)(a) | (uint32_t)(b) << 8)

typedef struct x3_jtoken {
    x3_jtoken_kind kind;
    uint32_t line;
    uint32_t op;     /* OPERATOR: its characters, the first in the low byte */
    x3_jname *name;  /* NAME */
    x3_jval value;   /* DATA, STRING, INTEGER, FLOAT */
} x3_jtoken;

#define X3_JNEST_MAX 200

typedef struct x3_jlexer {
    x3_jcompile *c;
    const char *text; /* newlines are \n, one at the end dropped */
    size_t n_bytes, at;
    uint32_t line;
    char mode;          /* 'r' root, 'b' block, 'v' variable */
    bool line_starting; /* the last match ended a line */
    bool data_done;     /* the text before the tag at `at` is out */
    bool in_raw;
    char brackets[X3_JNEST_MAX];
    size_t n_brackets;
} x3_jlexer;

x3_status x3_jlexer_open(x3_jlexer *lexer, x3_jcompile *c, const char *text, size_t n_bytes) X3_MUST;
x3_status x3_jlexer_next(x3_jlexer *lexer, x3_jtoken *token) X3_MUST;

/* The lexer with the current token and one of look-ahead. */
typedef struct x3_jparser {
    x3_jcompile *c;
    x3_jlexer lexer;
    x3_jtoken token, ahead;
    bool has_ahead;
    uint32_t depth;
} x3_jparser;

/* Nodes in order. */
typedef struct x3_jchain {
    x3_jnode *first, **end;
    size_t n;
} x3_jchain;

void x3_jchain_put(x3_jchain *list, x3_jnode *node);
x3_status x3_jnode_new(x3_jparser *p, x3_jkind kind, uint32_t line, x3_jnode **out) X3_MUST;
/* One level deeper; leave by depth--. */
x3_status x3_jparser_enter(x3_jparser *p) X3_MUST;
x3_status x3_jtok_next(x3_jparser *p) X3_MUST;
/* Fills p->ahead. */
x3_status x3_jtok_look(x3_jparser *p) X3_MUST;
bool x3_jtok_is_op(const x3_jparser *p, uint32_t op);
bool x3_jtok_is_name(const x3_jparser *p, const char *name);
/* A name out of a list separated by spaces. */
bool x3_jtok_is_one_of(const x3_jparser *p, const char *words);
const char *x3_jtok_describe(const x3_jparser *p, char room[80]);
x3_status x3_jtok_fail(x3_jparser *p, const char *wanted) X3_MUST;
x3_status x3_jtok_expect_op(x3_jparser *p, char op) X3_MUST;
x3_status x3_jtok_expect(x3_jparser *p, x3_jtoken_kind kind, const char *wanted) X3_MUST;
x3_status x3_jtok_expect_name(x3_jparser *p, x3_jname **out) X3_MUST;
x3_status x3_jtok_skip_name(x3_jparser *p, const char *name, bool *skipped) X3_MUST;
x3_status x3_jtok_skip_op(x3_jparser *p, uint32_t op, bool *skipped) X3_MUST;

/* Any expression; a tuple without its parentheses, one without an inline if, a target, a target that may be ns.attr;
 * |filters after *out (`bare`: the first has no bar). */
typedef enum x3_jtuple_part { X3_JPART_FULL, X3_JPART_NO_COND, X3_JPART_TARGET, X3_JPART_TARGET_NS } x3_jtuple_part;

x3_status x3_jparse_expression(x3_jparser *p, x3_jnode **out) X3_MUST;
/* `ends`: names that end it, separated by spaces. */
x3_status x3_jparse_tuple(x3_jparser *p, x3_jtuple_part part, const char *ends, bool in_parentheses,
                          x3_jnode **out) X3_MUST;
x3_status x3_jparse_filters(x3_jparser *p, bool bare, x3_jnode **out) X3_MUST;
/* The statements of the template. */
x3_status x3_jparser_parse(x3_jcompile *c, const char *text, size_t n_bytes, x3_jnode **body) X3_MUST;
/* Gives every name its slot, every frame its loads; checks filters, tests, break and continue. */
x3_status x3_jscope_resolve(x3_jcompile *c, x3_jnode *body, x3_jcode *root) X3_MUST;

/* ---- rendering --------------------------------------------------------------------------------------------- */

/* The slots of a function being run. */
struct x3_jscope {
    x3_jscope *parent;
    x3_jval *slots;
};

/* Growing text in the arena of a render. */
typedef struct x3_jbuf {
    char *data;
    size_t n_bytes, capacity;
} x3_jbuf;

struct x3_jrun {
    const x3_jinja *jinja;
    x3_err *err;
    x3_arena arena;
    uint64_t steps_left, bytes_left, max_output;
    uint32_t depth, max_depth;
    uint32_t line;
    const struct tm *now;
    x3_jdict *variables;
    x3_jscope *scope;
    x3_jbuf *out, *result; /* where text goes now; the result, whose size is limited */
    char flow;             /* 0, or 'b' or 'c': leaving the body of a loop */
    x3_jval block;         /* text of a filter or set block, for its filter */
};

/* Fails with "name:line: …" and X3_ERR_INPUT (refuse: X3_ERR_UNSUPPORTED). */
x3_status x3_jrun_fail(x3_jrun *run, const char *format, ...) X3_MUST X3_PRINTF(2, 3);
x3_status x3_jrun_refuse(x3_jrun *run, const char *format, ...) X3_MUST X3_PRINTF(2, 3);
/* *out = zeroed memory of the render. */
x3_status x3_jrun_alloc(x3_jrun *run, void *out, size_t n, size_t size) X3_MUST;
/* Pays for n steps. */
x3_status x3_jrun_steps(x3_jrun *run, uint64_t n) X3_MUST;
x3_status x3_jrun_enter(x3_jrun *run) X3_MUST;
static inline void x3_jrun_leave(x3_jrun *run)
{
    run->depth--;
}

/* jinja_exec.c */
x3_status x3_jexec_body(x3_jrun *run, const x3_jnode *body) X3_MUST;
x3_status x3_jexec_macro(x3_jrun *run, const x3_jmacro *macro, const x3_jargs *args, x3_jval *out) X3_MUST;
x3_status x3_jexec_enter(x3_jrun *run, const x3_jframe *frame) X3_MUST;
x3_status x3_jexec_assign(x3_jrun *run, const x3_jnode *target, x3_jval value) X3_MUST;
x3_status x3_jexec_scope(x3_jrun *run, const x3_jcode *code, x3_jscope *parent, x3_jscope **out) X3_MUST;

/* jinja_eval.c */
x3_status x3_jeval(x3_jrun *run, const x3_jnode *node, x3_jval *out) X3_MUST;
/* A call node, with `caller` as one more keyword unless it is MISSING. */
x3_status x3_jeval_call(x3_jrun *run, const x3_jnode *node, x3_jval caller, x3_jval *out) X3_MUST;
static inline x3_jval *x3_jscope_at(x3_jscope *scope, x3_jaddress address)
{
    for (uint32_t i = 0; i < address.hops; i++)
        scope = scope->parent;
    return &scope->slots[address.slot];
}

/* jinja_operate.c: arithmetic and order as Python has them */
x3_status x3_joperate_binary(x3_jrun *run, uint32_t op, x3_jval a, x3_jval b, x3_jval *out) X3_MUST;
x3_status x3_joperate_unary(x3_jrun *run, uint32_t op, x3_jval a, x3_jval *out) X3_MUST;
x3_status x3_jval_equal(x3_jrun *run, x3_jval a, x3_jval b, bool *out) X3_MUST;
/* a op b for op '<', '>', "<=", ">=". */
x3_status x3_jval_compare(x3_jrun *run, uint32_t op, x3_jval a, x3_jval b, bool *out) X3_MUST;
x3_status x3_jval_contains(x3_jrun *run, x3_jval container, x3_jval item, bool *out) X3_MUST;

/* jinja_value.c */
const char *x3_jval_type_name(x3_jval v);
bool x3_jval_truth(x3_jval v);
/* int or bool as an int. */
bool x3_jval_as_int(x3_jval v, int64_t *out);
/* int, bool or float as a double. */
bool x3_jval_as_float(x3_jval v, double *out);
/* len(v), or false when it has none. */
bool x3_jval_length(x3_jval v, size_t *out);
x3_status x3_jval_hash(x3_jrun *run, x3_jval v, uint64_t *out) X3_MUST;
x3_status x3_jval_from_json(x3_jrun *run, const cJSON *json, x3_jval *out) X3_MUST;
/* `name` without a value; `object` without an attribute or element `name`; with a message of its own. */
x3_status x3_jundefined_name(x3_jrun *run, const x3_jstr *name, x3_jval *out) X3_MUST;
x3_status x3_jundefined_member(x3_jrun *run, x3_jval object, x3_jval name, x3_jval *out) X3_MUST;
x3_status x3_jundefined_hint(x3_jrun *run, const char *hint, x3_jval *out) X3_MUST;
/* Fails with the message of an undefined value. */
x3_status x3_jundefined_fail(x3_jrun *run, x3_jval v) X3_MUST;
/* Strings: of borrowed bytes, of copied bytes, of a buffer, of a C string that lives long enough. */
x3_status x3_jstr_view(x3_jrun *run, const char *data, size_t n, x3_jval *out) X3_MUST;
x3_status x3_jstr_copy(x3_jrun *run, const char *data, size_t n, x3_jval *out) X3_MUST;
x3_status x3_jstr_of(x3_jrun *run, x3_jbuf *buf, x3_jval *out) X3_MUST;
x3_status x3_jstr_literal(x3_jrun *run, const char *text, x3_jval *out) X3_MUST;
/* *out = v marked (or not) as Markup. */
x3_status x3_jstr_mark(x3_jrun *run, x3_jval v, bool is_markup, x3_jval *out) X3_MUST;
bool x3_jstr_is(const x3_jstr *s, const char *text);
x3_status x3_jbuf_put(x3_jrun *run, x3_jbuf *buf, const char *data, size_t n) X3_MUST;
x3_status x3_jbuf_puts(x3_jrun *run, x3_jbuf *buf, const char *text) X3_MUST;
x3_status x3_jbuf_cp(x3_jrun *run, x3_jbuf *buf, uint32_t cp) X3_MUST;
x3_status x3_jlist_new(x3_jrun *run, size_t capacity, x3_jlist **out) X3_MUST;
x3_status x3_jlist_push(x3_jrun *run, x3_jlist *list, x3_jval v) X3_MUST;
/* A tuple of two. */
x3_status x3_jtuple_pair(x3_jrun *run, x3_jval a, x3_jval b, x3_jval *out) X3_MUST;
x3_status x3_jdict_new(x3_jrun *run, x3_jdict **out) X3_MUST;
x3_status x3_jdict_set(x3_jrun *run, x3_jdict *dict, x3_jval key, x3_jval value) X3_MUST;
/* *out = the value, or MISSING. Fails for keys that cannot be hashed. */
x3_status x3_jdict_get(x3_jrun *run, const x3_jdict *dict, x3_jval key, x3_jval *out) X3_MUST;
x3_jval x3_jdict_find(const x3_jdict *dict, const x3_jstr *key);

/* jinja_iter.c */
/* A walk over v; fails when it is not iterable. */
x3_status x3_jiter_open(x3_jrun *run, x3_jval v, x3_jiter **out) X3_MUST;
x3_status x3_jiter_next(x3_jrun *run, x3_jiter *it, x3_jval *out, bool *more) X3_MUST;
x3_status x3_jiter_reversed(x3_jrun *run, x3_jval v, bool *known, x3_jval *out) X3_MUST;
/* An iterator of one's own over `inner`. */
x3_status x3_jiter_new(x3_jrun *run, const char *name,
                       x3_status (*next)(x3_jrun *, x3_jiter *, x3_jval *, bool *), x3_jiter **out) X3_MUST;
x3_status x3_jlist_of(x3_jrun *run, x3_jval iterable, x3_jlist **out) X3_MUST;
/* Sorts items by keys (NULL: by themselves), stable, as sorted(reverse=…). Both arrays are reordered. */
x3_status x3_jlist_sort(x3_jrun *run, x3_jval *items, x3_jval *keys, size_t n, bool reverse) X3_MUST;
bool x3_jval_is_iterable(x3_jval v);
/* Number of items of a range. */
uint64_t x3_jrange_length(const x3_jrange *range);
/* Indices of v[start:stop:step] over n items, as slice.indices: first, first + stride … before end, n_out of them. */
x3_status x3_jslice_indices(x3_jrun *run, x3_jval start, x3_jval stop, x3_jval step, size_t n, int64_t *first,
                            int64_t *end, int64_t *stride, size_t *n_out) X3_MUST;

/* jinja_print.c */
x3_status x3_jprint_str(x3_jrun *run, x3_jbuf *buf, x3_jval v) X3_MUST;
x3_status x3_jprint_repr(x3_jrun *run, x3_jbuf *buf, x3_jval v) X3_MUST;
/* *out = str(v); a plain string is returned as it is. */
x3_status x3_jprint_to_str(x3_jrun *run, x3_jval v, x3_jval *out) X3_MUST;
/* soft_str of markupsafe: like str(v), but Markup stays Markup. */
x3_status x3_jprint_to_soft(x3_jrun *run, x3_jval v, x3_jval *out) X3_MUST;
/* repr(f) as Python writes it. */
void x3_jprint_float(double f, char out[40]);
x3_status x3_jprint_json(x3_jrun *run, const x3_jval arg[4], x3_jval v, x3_jval *out) X3_MUST;
/* The text with & < > ' " escaped, marked. */
x3_status x3_jprint_escape(x3_jrun *run, x3_jval v, x3_jval *out) X3_MUST;

/* jinja_object.c */
/* a.name and a[key] with the order of lookups and the sandbox of jinja2; what is not there is undefined. */
x3_status x3_jobject_attribute(x3_jrun *run, x3_jval v, const x3_jstr *name, x3_jval *out) X3_MUST;
/* a.name without the fallback to a["name"] */
x3_status x3_jobject_only_attribute(x3_jrun *run, x3_jval v, const x3_jstr *name, x3_jval *out) X3_MUST;
x3_status x3_jobject_item(x3_jrun *run, x3_jval v, x3_jval key, x3_jval *out) X3_MUST;
x3_status x3_jobject_slice(x3_jrun *run, x3_jval v, x3_jval start, x3_jval stop, x3_jval step, x3_jval *out) X3_MUST;
x3_status x3_jobject_call(x3_jrun *run, x3_jval callee, const x3_jargs *args, x3_jval *out) X3_MUST;
/* Binds args to the parameters of a built-in and calls it. */
x3_status x3_jbuiltin_call(x3_jrun *run, const x3_jbuiltin *builtin, const x3_jval *self, const x3_jargs *args,
                           x3_jval *out) X3_MUST;
bool x3_jval_is_callable(x3_jval v);
extern const x3_jbuiltin x3_jstr_methods[];
extern const size_t x3_jn_str_methods;

/* jinja_text.c: characters as Python sees them */
bool x3_jtext_is_space(uint32_t cp);
bool x3_jtext_is_printable(uint32_t cp);
bool x3_jtext_is_name(uint32_t cp, bool first);
/* is: 'a' alpha, 'n' alnum, 'd' digit, 'D' decimal, 'N' numeric, 'l' lower, 'u' upper, 't' title, 'w' word (\w). */
bool x3_jtext_is(uint32_t cp, char is);
/* to: 'u' upper, 'l' lower, 't' title of the whole text with full mappings, 'c' capitalize, 's' swapcase,
 * 'f' casefold. */
x3_status x3_jtext_case(x3_jrun *run, const x3_jstr *s, char to, x3_jval *out) X3_MUST;
/* Byte offset of the code point `at`, which may be n_chars. */
size_t x3_jtext_offset(const x3_jstr *s, size_t at);
/* First or last place of `part` in s[from .. to) in bytes, or SIZE_MAX. */
size_t x3_jtext_find(const x3_jstr *s, size_t from, size_t to, const x3_jstr *part);
x3_status x3_jtext_rfind(x3_jrun *run, const x3_jstr *s, size_t from, size_t to, const x3_jstr *part,
                         size_t *out) X3_MUST;
/* s without white space (chars NULL) or the characters of `chars` at the sides asked for. */
x3_status x3_jtext_strip(x3_jrun *run, const x3_jstr *s, const x3_jstr *chars, bool left, bool right,
                         x3_jval *out) X3_MUST;
x3_status x3_jtext_replace(x3_jrun *run, const x3_jstr *s, const x3_jstr *old, const x3_jstr *fresh, int64_t count,
                           x3_jval *out) X3_MUST;
x3_status x3_jtext_split(x3_jrun *run, const x3_jstr *s, const x3_jstr *separator, int64_t max, bool from_right,
                         x3_jlist **out) X3_MUST;
x3_status x3_jtext_lines(x3_jrun *run, const x3_jstr *s, bool keep_ends, x3_jlist **out) X3_MUST;
x3_status x3_jtext_repeat(x3_jrun *run, const x3_jstr *s, int64_t n, x3_jval *out) X3_MUST;

/* jinja_format.c */
/* format % value and format.format(args) */
x3_status x3_jformat_percent(x3_jrun *run, const x3_jstr *format, x3_jval value, x3_jval *out) X3_MUST;
x3_status x3_jformat_braces(x3_jrun *run, const x3_jstr *format, const x3_jargs *args, x3_jval *out) X3_MUST;

/* jinja_filters.c: filters of text and numbers */
/* int(text, base) and float(text); *ok is false when Python raises ValueError. */
x3_status x3_jparse_int(x3_jrun *run, const x3_jstr *s, int base, int64_t *out, bool *ok) X3_MUST;
x3_status x3_jparse_float(x3_jrun *run, const x3_jstr *s, double *out, bool *ok) X3_MUST;

/* jinja_builtins.c: tests, globals, and the tables */
const x3_jbuiltin *x3_jbuiltin_filter(const x3_jstr *name);
const x3_jbuiltin *x3_jbuiltin_test(const x3_jstr *name);
/* The global `name`, or MISSING. */
x3_jval x3_jbuiltin_global(const x3_jstr *name);

/* jinja_filters.c and jinja_sequence.c (filters of lists): the tables that jinja_builtins.c searches */
extern const x3_jbuiltin x3_jfilters_text[], x3_jfilters_sequence[];
extern const size_t x3_jn_filters_text, x3_jn_filters_sequence;

#endif
