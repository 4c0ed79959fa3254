#include "tools/options.h"

#include <errno.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void print_usage(FILE *to, const char *program, const x3_command *c)
{
    fprintf(to, "usage: %s%s%s", program, c->name[0] == '\0' ? "" : " ", c->name);
    for (int i = 0; i < X3_POSITIONALS_MAX && c->positionals[i] != NULL; i++)
        fprintf(to, " %s", c->positionals[i]);
    fprintf(to, " [options]\n");
}

static void print_help(const char *program, const x3_command *c)
{
    print_usage(stdout, program, c);
    printf("%s\n\n", c->summary);
    for (size_t i = 0; i < c->n_options; i++) {
        char left[48];
        snprintf(left, sizeof left, "--%s%s%s", c->options[i].name, c->options[i].argument == NULL ? "" : " ",
                 c->options[i].argument == NULL ? "" : c->options[i].argument);
        printf("  %-24s %s%s\n", left, c->options[i].help, c->options[i].required ? " (required)" : "");
    }
}

static const x3_option *find_option(const x3_command *c, const char *name, size_t n)
{
    for (size_t i = 0; i < c->n_options; i++)
        if (strlen(c->options[i].name) == n && strncmp(c->options[i].name, name, n) == 0)
            return &c->options[i];
    return NULL;
}

static bool parse_number(const char *text, double *out)
{
    char *end;

    errno = 0;
    *out = strtod(text, &end);
    return end != text && *end == '\0' && errno == 0 && isfinite(*out);
}

static bool parse_count(const char *text, uint64_t *out)
{
    char *end;

    if (text[0] < '0' || text[0] > '9')
        return false;
    errno = 0;
    *out = strtoull(text, &end, 10);
    return *end == '\0' && errno == 0;
}

/* 16GB is 16e9 bytes, 16GiB 16 * 2^30; a bare K, M, G, T counts as decimal. */
static bool parse_size(const char *text, uint64_t *out)
{
    static const char units[] = "KMGT";
    char *end;
    double v, unit = 1;

    errno = 0;
    v = strtod(text, &end);
    if (end == text || errno != 0 || !(v >= 0))
        return false;
    const char *u = *end == '\0' ? NULL : strchr(units, *end);
    if (u != NULL) {
        bool binary = end[1] == 'i';
        unit = pow(binary ? 1024 : 1000, (double)(u - units) + 1);
        end += binary ? 2 : 1;
    }
    if (*end == 'B')
        end++;
    v *= unit;
    if (*end != '\0' || !(v < 1e18))
        return false;
    *out = (uint64_t)v;
    return true;
}

static bool out_of_range(const x3_option *o, double v)
{
    return (o->min != 0 || o->max != 0) && !(v >= o->min && v <= o->max);
}

/* NULL, or what is wrong with the value. */
static const char *store(const x3_option *o, void *values, const char *text)
{
    static char problem[160];
    void *to = (char *)values + o->offset;
    double number;
    uint64_t count;
    x3_list *list = to;

    switch (o->kind) {
    case X3_OPT_FLAG:
        *(bool *)to = true;
        return NULL;
    case X3_OPT_TEXT:
        *(const char **)to = text;
        return NULL;
    case X3_OPT_COUNT:
        if (!parse_count(text, &count))
            return "is not a whole number";
        if (out_of_range(o, (double)count))
            break;
        *(uint64_t *)to = count;
        return NULL;
    case X3_OPT_NUMBER:
        if (!parse_number(text, &number))
            return "is not a number";
        if (out_of_range(o, number))
            break;
        *(double *)to = number;
        return NULL;
    case X3_OPT_SIZE:
        return parse_size(text, (uint64_t *)to) ? NULL : "is not a size (4096, 500M, 16GB, 2GiB)";
    case X3_OPT_LIST:
        if (list->n == X3_LIST_MAX)
            return "is given too often";
        list->items[list->n++] = text;
        return NULL;
    }
    snprintf(problem, sizeof problem, "is outside %g to %g", o->min, o->max);
    return problem;
}

static int usage_error(const char *program, const x3_command *c, const char *what, const char *value, const char *problem)
{
    fprintf(stderr, "%s: %s%s%s %s\n", program, what, value == NULL ? "" : " ", value == NULL ? "" : value, problem);
    print_usage(stderr, program, c);
    fprintf(stderr, "%s%s%s --help lists the options\n", program, c->name[0] == '\0' ? "" : " ", c->name);
    return 2;
}

static int parse_option(const char *program, const x3_command *c, int argc, char **argv, int *i, bool *seen)
{
    const char *name = argv[*i] + 2, *equals = strchr(name, '='), *value = equals == NULL ? NULL : equals + 1;
    const x3_option *o = find_option(c, name, equals == NULL ? strlen(name) : (size_t)(equals - name));
    const char *problem;

    if (o == NULL)
        return usage_error(program, c, argv[*i], NULL, "is not an option");
    if (seen[o - c->options] && o->kind != X3_OPT_LIST)
        return usage_error(program, c, argv[*i], NULL, "is given twice");
    seen[o - c->options] = true;
    if (o->kind == X3_OPT_FLAG && value != NULL)
        return usage_error(program, c, argv[*i], NULL, "takes no value");
    if (o->kind != X3_OPT_FLAG && value == NULL) {
        if (*i + 1 >= argc)
            return usage_error(program, c, argv[*i], NULL, "needs a value");
        value = argv[++*i];
    }
    problem = store(o, c->values, value);
    if (problem != NULL) {
        char what[64];
        snprintf(what, sizeof what, "--%s", o->name);
        return usage_error(program, c, what, value, problem);
    }
    return 0;
}

static bool takes_rest(const char *positional)
{
    size_t n = strlen(positional);

    return n > 3 && strcmp(positional + n - 3, "...") == 0;
}

int x3_parse(const char *program, const x3_command *c, int argc, char **argv)
{
    bool seen[64] = {false};
    size_t n_positionals = 0, given = 0;

    while (n_positionals < X3_POSITIONALS_MAX && c->positionals[n_positionals] != NULL)
        n_positionals++;
    for (int i = 0; i < argc; i++) {
        if (strncmp(argv[i], "--", 2) == 0 && argv[i][2] != '\0') {
            int rc = parse_option(program, c, argc, argv, &i, seen);
            if (rc != 0)
                return rc;
            continue;
        }
        size_t at = given < n_positionals ? given : n_positionals == 0 ? 0 : n_positionals - 1;
        bool rest = n_positionals > 0 && takes_rest(c->positionals[at]);
        if (given >= n_positionals && !rest)
            return usage_error(program, c, argv[i], NULL, "is one argument too many");
        void *to = (char *)c->values + c->positional_offsets[at];
        if (rest) {
            x3_list *list = to;
            if (list->n < X3_LIST_MAX)
                list->items[list->n++] = argv[i];
        } else {
            *(const char **)to = argv[i];
        }
        given++;
    }
    if (given < n_positionals)
        return usage_error(program, c, c->positionals[given], NULL, "is missing");
    for (size_t i = 0; i < c->n_options; i++)
        if (c->options[i].required && !seen[i]) {
            char what[64];
            snprintf(what, sizeof what, "--%s %s", c->options[i].name,
                     c->options[i].argument == NULL ? "" : c->options[i].argument);
            return usage_error(program, c, what, NULL, "is missing");
        }
    return 0;
}

static void print_commands(FILE *to, const char *program, const char *summary, const x3_command *commands, size_t n)
{
    fprintf(to, "%s %s: %s\n\n", program, X3_VERSION, summary);
    for (size_t i = 0; i < n; i++)
        fprintf(to, "  %-10s %s\n", commands[i].name, commands[i].summary);
    fprintf(to, "\n%s COMMAND --help lists the options of a command\n", program);
}

/* The command line as one text, words with blanks in quotes. */
static char *join_command_line(const char *program, int argc, char **argv)
{
    size_t n = strlen(program) + 1;
    char *text, *p;

    for (int i = 1; i < argc; i++)
        n += strlen(argv[i]) + 3;
    text = malloc(n + 1);
    if (text == NULL)
        return NULL;
    p = text + sprintf(text, "%s", program);
    for (int i = 1; i < argc; i++) {
        const char *quote = argv[i][0] == '\0' || strpbrk(argv[i], " \t\n\"\\$") != NULL ? "'" : "";
        p += sprintf(p, " %s%s%s", quote, argv[i], quote);
    }
    return text;
}

static bool wants_help(int argc, char **argv)
{
    for (int i = 0; i < argc; i++)
        if (strcmp(argv[i], "--help") == 0 || strcmp(argv[i], "-h") == 0)
            return true;
    return false;
}

static int run_command(const char *program, const x3_command *c, int skipped, int argc, char **argv)
{
    if (wants_help(argc - skipped, argv + skipped)) {
        print_help(program, c);
        return 0;
    }
    int rc = x3_parse(program, c, argc - skipped, argv + skipped);
    if (rc != 0)
        return rc;
    char *line = join_command_line(program, argc, argv);
    rc = c->run(c->values, line == NULL ? "" : line);
    free(line);
    return rc;
}

int x3_main_single(const char *program, const x3_command *c, int argc, char **argv)
{
    if (argc > 1 && strcmp(argv[1], "--version") == 0) {
        printf("%s %s\n", program, X3_VERSION);
        return 0;
    }
    return run_command(program, c, 1, argc, argv);
}

int x3_main(const char *program, const char *summary, const x3_command *commands, size_t n, int argc, char **argv)
{
    if (argc < 2) {
        print_commands(stderr, program, summary, commands, n);
        return 2;
    }
    if (strcmp(argv[1], "--version") == 0) {
        printf("%s %s\n", program, X3_VERSION);
        return 0;
    }
    for (size_t i = 0; i < n; i++)
        if (strcmp(argv[1], commands[i].name) == 0)
            return run_command(program, &commands[i], 2, argc, argv);
    bool help = strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 || strcmp(argv[1], "help") == 0;
    if (!help)
        fprintf(stderr, "%s: %s is not a command\n", program, argv[1]);
    print_commands(help ? stdout : stderr, program, summary, commands, n);
    return help ? 0 : 2;
}
