#include "tests/test.h"

#include <setjmp.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/io.h"

#define TESTS_MAX 2000

static struct {
    struct entry {
        const char *name, *file;
        void (*run)(void);
    } tests[TESTS_MAX];
    size_t n_tests;
    jmp_buf escape;
    const char *data_dir;
    bool quick;
    char temp_root[64], temp_dir[96];
    unsigned n_temp;
    char message[2048];
} suite;

enum outcome { PASSED, FAILED, SKIPPED };

void x3_test_register(const char *name, const char *file, void (*run)(void))
{
    if (suite.n_tests == TESTS_MAX)
        abort();
    suite.tests[suite.n_tests++] = (struct entry){name, file, run};
}

_Noreturn void x3_test_fail(const char *file, int line, const char *format, ...)
{
    va_list args;
    int n = snprintf(suite.message, sizeof suite.message, "%s:%d: ", file, line);

    va_start(args, format);
    vsnprintf(suite.message + n, sizeof suite.message - (size_t)n, format, args);
    va_end(args);
    longjmp(suite.escape, 1 + FAILED);
}

_Noreturn void x3_test_skip(const char *format, ...)
{
    va_list args;

    va_start(args, format);
    vsnprintf(suite.message, sizeof suite.message, format, args);
    va_end(args);
    longjmp(suite.escape, 1 + SKIPPED);
}

void x3_test_skip_if_emulated(void)
{
    if (getenv("X3_EMULATED") != NULL)
        x3_test_skip("too slow under an emulator");
}

bool x3_test_is_quick(void)
{
    return suite.quick;
}

const char *x3_test_data_dir(void)
{
    return suite.data_dir;
}

const char *x3_test_path(const char *dir, const char *name)
{
    static char ring[16][1024];
    static unsigned at;
    char *out = ring[at++ % 16];

    snprintf(out, sizeof ring[0], "%s/%s", dir, name);
    return out;
}

const char *x3_test_temp_dir(void)
{
    x3_err err = {0};

    if (suite.temp_root[0] == '\0') {
        snprintf(suite.temp_root, sizeof suite.temp_root, "/tmp/x3test.XXXXXX");
        if (mkdtemp(suite.temp_root) == NULL)
            x3_test_fail(__FILE__, __LINE__, "cannot create %s", suite.temp_root);
    }
    snprintf(suite.temp_dir, sizeof suite.temp_dir, "%s/%u", suite.temp_root, suite.n_temp++);
    if (x3_mkdirs(suite.temp_dir, &err) != X3_OK)
        x3_test_fail(__FILE__, __LINE__, "%s", err.text);
    return suite.temp_dir;
}

static bool is_wanted(const char *name, char **words, int n_words)
{
    for (int i = 0; i < n_words; i++)
        if (strstr(name, words[i]) != NULL)
            return true;
    return n_words == 0;
}

static int compare_entries(const void *a, const void *b)
{
    const struct entry *x = a, *y = b;
    int by_file = strcmp(x->file, y->file);

    return by_file != 0 ? by_file : strcmp(x->name, y->name);
}

static enum outcome run_one(const struct entry *t)
{
    volatile enum outcome result = PASSED;
    double start = x3_seconds();
    int jumped = setjmp(suite.escape);

    if (jumped == 0)
        t->run();
    else
        result = (enum outcome)(jumped - 1);
    double seconds = x3_seconds() - start;
    if (result == PASSED)
        printf("PASS %s (%.2f s)\n", t->name, seconds);
    else
        printf("%s %s: %s\n", result == FAILED ? "FAIL" : "SKIP", t->name, suite.message);
    fflush(stdout);
    return result;
}

int main(int argc, char **argv)
{
    size_t count[3] = {0};
    bool list = false;
    int i = 1;

    for (; i < argc && strncmp(argv[i], "--", 2) == 0; i++) {
        if (strcmp(argv[i], "--list") == 0)
            list = true;
        else if (strcmp(argv[i], "--quick") == 0)
            suite.quick = true;
        else if (strcmp(argv[i], "--data") == 0 && i + 1 < argc)
            suite.data_dir = argv[++i];
        else
            return fprintf(stderr, "usage: %s [--list] [--quick] [--data DIR] [WORD...]\n", argv[0]), 2;
    }
    qsort(suite.tests, suite.n_tests, sizeof suite.tests[0], compare_entries);
    for (size_t t = 0; t < suite.n_tests; t++) {
        if (!is_wanted(suite.tests[t].name, argv + i, argc - i))
            continue;
        if (list)
            printf("%s %s\n", suite.tests[t].file, suite.tests[t].name);
        else
            count[run_one(&suite.tests[t])]++;
    }
    if (suite.temp_root[0] != '\0' && x3_remove_tree(suite.temp_root, NULL) != X3_OK)
        fprintf(stderr, "cannot remove %s\n", suite.temp_root);
    if (list)
        return 0;
    printf("%zu passed, %zu failed, %zu skipped\n", count[PASSED], count[FAILED], count[SKIPPED]);
    return count[FAILED] > 0 || count[PASSED] + count[SKIPPED] == 0;
}
