#include "calib/corpus.h"

#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/io.h"
#include "formats/json.h"

#define TEXT_BYTES_MAX ((uint64_t)8 << 30)

/* ---- datasets.txt ---- */

x3_status x3_datasets_load(x3_dataset **out, size_t *n, const char *path, x3_err *err)
{
    size_t n_bytes, capacity = 0, line = 0;
    char *text = NULL, *rest = NULL;
    x3_status rc;

    *out = NULL;
    *n = 0;
    X3_TRY(rc, out, x3_read_file(&text, &n_bytes, path, 1 << 20, err));
    for (char *l = strtok_r(text, "\n", &rest); l != NULL; l = strtok_r(NULL, "\n", &rest)) {
        x3_dataset d = {0};
        line++;
        if (l[0] == '#' || l[0] == '\0')
            continue;
        if (sscanf(l, "%15s %255s %" SCNu64 " %" SCNx64 " %63s", d.role, d.path, &d.n_bytes, &d.hash, d.licence) != 5) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: entry %zu is not: role path bytes xxh3 licence", path, line);
            goto out;
        }
        X3_TRY(rc, out, x3_grow(out, &capacity, *n + 1, sizeof **out, err));
        (*out)[(*n)++] = d;
    }
out:
    free(text);
    if (rc != X3_OK) {
        free(*out);
        *out = NULL;
    }
    return rc;
}

static x3_status check_list(const char *list, const x3_corpus_file *f, x3_corpus_use use, x3_err *err)
{
    x3_dataset *sets = NULL;
    size_t n = 0;
    x3_status rc;

    if (!x3_path_exists(list))
        return X3_OK;
    X3_TRY(rc, out, x3_datasets_load(&sets, &n, list, err));
    for (size_t i = 0; i < n; i++) {
        bool calibration = strcmp(sets[i].role, "calibration") == 0;
        bool evaluation = strcmp(sets[i].role, "evaluation") == 0;
        if (sets[i].hash != f->hash || sets[i].n_bytes != f->n_bytes)
            continue;
        if (use == X3_USE_EVALUATION ? calibration : evaluation) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s: is listed for %s in %s, and may not be used for %s", f->path, sets[i].role,
                         list, use == X3_USE_EVALUATION ? "evaluation" : "calibration");
            break;
        }
    }
out:
    free(sets);
    return rc;
}

/* The list of the working folder and every list above the file. */
static x3_status check_datasets(const x3_corpus_file *f, x3_corpus_use use, x3_err *err)
{
    char real[PATH_MAX], list[PATH_MAX + 16];
    x3_status rc = check_list("datasets.txt", f, use, err);

    if (rc != X3_OK || realpath(f->path, real) == NULL)
        return rc;
    for (char *slash = strrchr(real, '/'); slash != NULL && rc == X3_OK; slash = strrchr(real, '/')) {
        *slash = '\0';
        snprintf(list, sizeof list, "%s/datasets.txt", real);
        rc = check_list(list, f, use, err);
    }
    return rc;
}

/* ---- reading ---- */

static x3_status append(x3_corpus *c, const char *text, size_t n, x3_err *err)
{
    size_t gap = c->n_bytes > 0 ? 2 : 0;
    x3_status rc = x3_grow(&c->text, &c->capacity, c->n_bytes + gap + n + 1, 1, err);

    if (rc != X3_OK)
        return rc;
    memcpy(c->text + c->n_bytes, "\n\n", gap);
    memcpy(c->text + c->n_bytes + gap, text, n);
    c->n_bytes += gap + n;
    c->text[c->n_bytes] = '\0';
    return X3_OK;
}

static x3_status append_jsonl(x3_corpus *c, x3_corpus_file *f, const char *text, size_t n_bytes, x3_err *err)
{
    size_t line = 0;
    x3_status rc = X3_OK;

    for (const char *p = text, *end = text + n_bytes; p < end;) {
        const char *stop = memchr(p, '\n', (size_t)(end - p)), *value = NULL;
        size_t n = (size_t)((stop == NULL ? end : stop) - p);
        char where[PATH_MAX + 32];
        cJSON *json = NULL;
        line++;
        snprintf(where, sizeof where, "%s line %zu", f->path, line);
        if (n > 0 && !(n == 1 && *p == '\r')) {
            rc = x3_json_parse(&json, p, n, where, err);
            if (rc == X3_OK && !cJSON_IsObject(json))
                rc = x3_fail(err, X3_ERR_INPUT, "%s: not an object", where);
            if (rc == X3_OK)
                rc = x3_json_string(json, "text", true, &value, where, err);
            if (rc == X3_OK)
                rc = append(c, value, strlen(value), err);
            f->n_texts++;
            cJSON_Delete(json);
        }
        if (rc != X3_OK)
            return rc;
        p += n + 1;
    }
    return X3_OK;
}

static bool ends_with(const char *path, const char *suffix)
{
    size_t n = strlen(path), s = strlen(suffix);

    return n > s && strcmp(path + n - s, suffix) == 0;
}

static x3_status load_file(x3_corpus *c, x3_corpus_file *f, const char *path, x3_corpus_use use, x3_err *err)
{
    char *text = NULL;
    size_t n_bytes = 0;
    const char *slash;
    x3_status rc;

    X3_TRY(rc, out, x3_strdup(&f->path, path, err));
    slash = strrchr(f->path, '/');
    f->name = slash == NULL ? f->path : slash + 1;
    X3_TRY(rc, out, x3_read_file(&text, &n_bytes, path, TEXT_BYTES_MAX, err));
    f->n_bytes = n_bytes;
    f->hash = x3_hash(text, n_bytes);
    if (n_bytes == 0) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: the text file is empty", path);
        goto out;
    }
    X3_TRY(rc, out, check_datasets(f, use, err));
    if (ends_with(path, ".jsonl")) {
        rc = append_jsonl(c, f, text, n_bytes, err);
    } else {
        f->n_texts = 1;
        rc = append(c, text, n_bytes, err);
    }
out:
    free(text);
    return rc;
}

x3_status x3_corpus_load(x3_corpus **out, const char *const *paths, size_t n_paths, x3_corpus_use use, x3_err *err)
{
    x3_corpus *c = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&c, 1, sizeof *c, err));
    X3_TRY(rc, out, x3_alloc(&c->files, n_paths, sizeof *c->files, err));
    for (size_t i = 0; i < n_paths; i++) {
        c->n_files++;
        X3_TRY(rc, out, load_file(c, &c->files[i], paths[i], use, err));
        for (size_t j = 0; j < i; j++)
            if (c->files[j].hash == c->files[i].hash && c->files[j].n_bytes == c->files[i].n_bytes) {
                rc = x3_fail(err, X3_ERR_INPUT, "%s: the same text as %s", paths[i], paths[j]);
                goto out;
            }
    }
    *out = c;
    c = NULL;
out:
    x3_corpus_free(c);
    return rc;
}

void x3_corpus_free(x3_corpus *c)
{
    if (c == NULL)
        return;
    for (size_t i = 0; i < c->n_files; i++)
        free(c->files[i].path);
    free(c->files);
    free(c->text);
    free(c);
}

x3_status x3_corpus_rows(const x3_corpus *c, const x3_tokenizer *tokenizer, size_t skip, size_t max_rows, size_t n_cols,
                         int32_t **ids, size_t *n_rows, x3_err *err)
{
    uint64_t wanted = 0;
    x3_ids all = {0};
    x3_status rc;

    *ids = NULL;
    *n_rows = 0;
    if (x3_mul_overflows(max_rows, n_cols, &wanted) || x3_add_overflows(wanted, skip, &wanted))
        return x3_fail(err, X3_ERR_INPUT, "%zu rows of %zu tokens are too many", max_rows, n_cols);
    X3_TRY(rc, out, x3_tokenizer_encode(tokenizer, c->text == NULL ? "" : c->text, c->n_bytes, true, wanted, &all, err));
    *n_rows = all.n_items <= skip ? 0 : (all.n_items - skip) / n_cols;
    if (*n_rows == 0) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s%s: %zu tokens%s, a row needs %zu", c->files[0].path,
                     c->n_files > 1 ? " and the other texts" : "", all.n_items <= skip ? 0 : all.n_items - skip,
                     skip > 0 ? " after those skipped" : "", n_cols);
        goto out;
    }
    *n_rows = x3_min_size(*n_rows, max_rows);
    X3_TRY(rc, out, x3_alloc(ids, *n_rows * n_cols, sizeof **ids, err));
    for (size_t i = 0; i < *n_rows * n_cols; i++)
        (*ids)[i] = (int32_t)all.items[skip + i];
out:
    x3_ids_free(&all);
    return rc;
}
