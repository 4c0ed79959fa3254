/* Running a receipt's command again and comparing what comes out. */
#ifndef X3_REPLAY_H
#define X3_REPLAY_H

#include "formats/json.h"

#define X3_WORDS_MAX 256

typedef struct x3_words {
    char *text; /* owned; the words lie in it */
    char *items[X3_WORDS_MAX + 1]; /* NULL-terminated */
    size_t n;
} x3_words;

/* Splits a command line as a receipt holds it: blanks between words, '...' around words with blanks. */
x3_status x3_words_split(x3_words *w, const char *command, x3_err *err) X3_MUST;
void x3_words_free(x3_words *w);
/* Removes "name value" (or "name=value"), or a flag alone. */
void x3_words_remove(x3_words *w, const char *name, bool has_value);

/* Prints a line for every measure of two score receipts; returns how many differ by more than 1e-6 relative. Hashes of
 * pack and reference must be equal. */
size_t x3_replay_compare_scores(const cJSON *before, const cJSON *now);
/* Compares the tensors of two pack receipts; prints the first differences, returns their number. */
size_t x3_replay_compare_packs(const cJSON *before, const cJSON *now);

#endif
