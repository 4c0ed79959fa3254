/* Command lines. One table of options is the parser and the help; a command is a name, its positional arguments, its
 * options and a function. Values are stored into a struct of the command through offsets.
 *
 * Exit codes of the programs: 0 done, 1 failed (also a failed check or gate), 2 usage. */
#ifndef X3_OPTIONS_H
#define X3_OPTIONS_H

#include "formats/base.h"

#define X3_LIST_MAX 256

typedef struct x3_list {
    const char *items[X3_LIST_MAX + 1]; /* NULL-terminated */
    size_t n;
} x3_list;

typedef enum x3_option_kind {
    X3_OPT_FLAG,   /* bool */
    X3_OPT_TEXT,   /* const char * */
    X3_OPT_COUNT,  /* uint64_t in [min, max] */
    X3_OPT_NUMBER, /* double in [min, max] */
    X3_OPT_SIZE,   /* uint64_t bytes: 4096, 16GB, 2GiB, 500M */
    X3_OPT_LIST    /* x3_list, may be repeated */
} x3_option_kind;

typedef struct x3_option {
    const char *name;     /* without "--" */
    x3_option_kind kind;
    size_t offset;        /* into the command's struct */
    const char *argument; /* "FILE"; NULL for flags */
    const char *help;
    double min, max;
    bool required;
} x3_option;

#define X3_POSITIONALS_MAX 2

typedef struct x3_command {
    const char *name, *summary;
    const char *positionals[X3_POSITIONALS_MAX]; /* "MODEL"; one ending in "..." takes the rest, as an x3_list */
    size_t positional_offsets[X3_POSITIONALS_MAX]; /* const char *, or x3_list for "..." */
    const x3_option *options;
    size_t n_options;
    /* 0, 1 or 2. `values` is the struct, defaults overwritten; command_line the whole of it as text. */
    int (*run)(void *values, const char *command_line);
    void *values;
} x3_command;

/* Parses arguments (after the command's name) into command->values; 0, or 2 with the problem printed. */
int x3_parse(const char *program, const x3_command *c, int argc, char **argv);

/* Parses and runs. Usage problems and --help are printed here. */
int x3_main(const char *program, const char *summary, const x3_command *commands, size_t n, int argc, char **argv);
/* The same for a program that is one command, whose name is "". */
int x3_main_single(const char *program, const x3_command *command, int argc, char **argv);

#endif
