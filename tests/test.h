/* A test is a function with a sentence for a name; it registers itself. A failed CHECK ends the test.
 *
 *     X3_TEST(hadamard_twice_is_the_identity) { ... CHECK(difference < 1e-6f); }
 *
 * Runner: `tests [--list] [--data DIR] [WORD…]` runs the tests whose name contains one of the words. Last line:
 * `N passed, N failed, N skipped`. Exit 1 when a test failed or none ran. */
#ifndef X3_TEST_H
#define X3_TEST_H

#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>

#include "formats/base.h"

void x3_test_register(const char *name, const char *file, void (*run)(void));
_Noreturn void x3_test_fail(const char *file, int line, const char *format, ...) X3_PRINTF(3, 4);
_Noreturn void x3_test_skip(const char *format, ...) X3_PRINTF(1, 2);

/* Skips a test that would take long under an emulator (X3_EMULATED is set: make arm64 under qemu). */
void x3_test_skip_if_emulated(void);

/* The folder of --data (conformance), or NULL. */
const char *x3_test_data_dir(void);
/* --quick: few sizes, for tools that slow a kernel a hundred times. Heeded by the longest tests of tests/cuda. */
bool x3_test_is_quick(void);
/* A fresh empty folder under the system's temporary folder, removed after the run; valid until the test ends. */
const char *x3_test_temp_dir(void);
/* "dir/name" in a ring of static buffers. */
const char *x3_test_path(const char *dir, const char *name);

#define X3_TEST(name)                                                                                          \
    static void name(void);                                                                                    \
    __attribute__((constructor)) static void name##_register(void) { x3_test_register(#name, __FILE__, name); } \
    static void name(void)

#define CHECK(condition)                                                \
    do {                                                                \
        if (!(condition))                                               \
            x3_test_fail(__FILE__, __LINE__, "not true: %s", #condition); \
    } while (0)

#define CHECK_MSG(condition, ...)                         \
    do {                                                  \
        if (!(condition))                                 \
            x3_test_fail(__FILE__, __LINE__, __VA_ARGS__); \
    } while (0)

/* expr must be X3_OK; `error` is the x3_err it was given. */
#define CHECK_OK(expr, error)                                                       \
    do {                                                                            \
        if ((expr) != X3_OK)                                                        \
            x3_test_fail(__FILE__, __LINE__, "%s failed: %s", #expr, (error)->text); \
    } while (0)

/* expr must fail, and its message must contain `part`; the error is cleared for the next call. */
#define CHECK_FAILS(expr, error, part)                                                                      \
    do {                                                                                                    \
        if ((expr) == X3_OK)                                                                                \
            x3_test_fail(__FILE__, __LINE__, "%s did not fail", #expr);                                     \
        if (strstr((error)->text, part) == NULL)                                                            \
            x3_test_fail(__FILE__, __LINE__, "%s: message lacks \"%s\": %s", #expr, part, (error)->text);   \
        *(error) = (x3_err){0};                                                                             \
    } while (0)

#endif
