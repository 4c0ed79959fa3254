/* Text files for calibration and evaluation: plain UTF-8 (one text) or .jsonl (the `text` field of every line). The
 * texts of all files, in the order given, are joined by a blank line. */
#ifndef X3_CORPUS_H
#define X3_CORPUS_H

#include "runtime/tokenizer/tokenizer.h"

typedef struct x3_corpus_file {
    char *path;
    const char *name; /* last part of the path */
    uint64_t n_bytes, hash;
    size_t n_texts;
} x3_corpus_file;

typedef struct x3_corpus {
    x3_corpus_file *files;
    size_t n_files;
    char *text; /* joined, a NUL after it */
    size_t n_bytes, capacity;
} x3_corpus;

typedef enum x3_corpus_use { X3_USE_CALIBRATION, X3_USE_EVALUATION } x3_corpus_use;

/* Reads the files. A file that `datasets.txt` (in the working folder, or above the file) lists for the other use is
 * refused: what a model was calibrated on says nothing about what it lost. Empty texts are errors. */
x3_status x3_corpus_load(x3_corpus **out, const char *const *paths, size_t n_paths, x3_corpus_use use, x3_err *err) X3_MUST;
void x3_corpus_free(x3_corpus *c);

/* Token rows: ids [n_rows][n_cols] of the joined text without special tokens, after skipping `skip` tokens; an
 * incomplete last row is dropped. At most max_rows; *n_rows tells how many there were. Less than one row is an error. */
x3_status x3_corpus_rows(const x3_corpus *c, const x3_tokenizer *tokenizer, size_t skip, size_t max_rows, size_t n_cols,
                         int32_t **ids, size_t *n_rows, x3_err *err) X3_MUST;

/* A line of datasets.txt: role, path relative to the file, bytes, XXH3 and licence, separated by blanks. */
typedef struct x3_dataset {
    char role[16], path[256], licence[64];
    uint64_t n_bytes, hash;
} x3_dataset;

x3_status x3_datasets_load(x3_dataset **out, size_t *n, const char *path, x3_err *err) X3_MUST;

#endif
