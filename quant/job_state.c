#include "quant/job_state.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"

static x3_status step_path(const char *work, const char *step, char **path, x3_err *err)
{
    return x3_asprintf(path, err, "%s/%s.json", work, step);
}

x3_status x3_record_save(const char *work, const char *step, const cJSON *record, x3_err *err)
{
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, step_path(work, step, &path, err));
    X3_TRY(rc, out, x3_json_save(record, path, err));
    rc = x3_sync_dir(work, err);
out:
    free(path);
    return rc;
}

x3_status x3_record_load(const char *work, const char *step, cJSON **out, x3_err *err)
{
    char *path = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, step_path(work, step, &path, err));
    if (x3_path_exists(path))
        rc = x3_json_load(out, path, err);
out:
    free(path);
    return rc;
}

x3_status x3_job_state_begin(const char *work, const cJSON *identity, x3_err *err)
{
    return x3_record_save(work, "job", identity, err);
}

x3_status x3_job_state_end(const char *work, x3_err *err)
{
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, step_path(work, "job", &path, err));
    X3_TRY(rc, out, x3_remove_tree(path, err));
    rc = x3_sync_dir(work, err);
out:
    free(path);
    return rc;
}

bool x3_job_state_exists(const char *work)
{
    char path[4096];

    snprintf(path, sizeof path, "%s/job.json", work);
    return x3_path_exists(path);
}

/* Adds "key: was X, now Y" to the text. */
static void add_difference(char *text, size_t size, const char *key, const cJSON *was, const cJSON *now)
{
    char *a = was == NULL ? NULL : cJSON_PrintUnformatted(was), *b = now == NULL ? NULL : cJSON_PrintUnformatted(now);
    size_t n = strlen(text);

    snprintf(text + n, size - n, "%s%s: was %.200s, now %.200s", n == 0 ? "" : "; ", key, a == NULL ? "not set" : a,
             b == NULL ? "not set" : b);
    cJSON_free(a);
    cJSON_free(b);
}

static bool is_skipped(const char *key, const char *const *skipped)
{
    for (; *skipped != NULL; skipped++)
        if (strcmp(key, *skipped) == 0)
            return true;
    return false;
}

/* Keys of `now` that `was` lacks or has otherwise; with `lacking_only`, the former alone. */
static void find_differences(const cJSON *now, const cJSON *was, bool lacking_only, const char *const *skipped, char *text,
                             size_t size)
{
    for (const cJSON *n = now == NULL ? NULL : now->child; n != NULL; n = n->next) {
        const cJSON *w = cJSON_GetObjectItemCaseSensitive(was, n->string);
        if (is_skipped(n->string, skipped) || (w != NULL && (lacking_only || cJSON_Compare(w, n, true))))
            continue;
        if (lacking_only)
            add_difference(text, size, n->string, n, NULL);
        else
            add_difference(text, size, n->string, w, n);
    }
}

bool x3_job_state_equal(const cJSON *a, const cJSON *b, const char *const *skipped)
{
    char text[1100] = "";

    find_differences(a, b, false, skipped, text, sizeof text);
    find_differences(b, a, true, skipped, text, sizeof text);
    return text[0] == '\0';
}

x3_status x3_job_state_compare(const char *work, const cJSON *identity, const char *const *skipped, x3_err *err)
{
    char differences[1100] = "";
    cJSON *earlier = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_record_load(work, "job", &earlier, err));
    if (earlier == NULL) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: has no job.json to resume from", work);
        goto out;
    }
    find_differences(identity, earlier, false, skipped, differences, sizeof differences);
    find_differences(earlier, identity, true, skipped, differences, sizeof differences);
    if (differences[0] != '\0')
        rc = x3_fail(err, X3_ERR_INPUT, "%s: the job there had other options: %s", work, differences);
out:
    cJSON_Delete(earlier);
    return rc;
}

x3_status x3_record_add_tensors(cJSON *record, const x3_pack_writer *w, const size_t *tensors, size_t n, x3_err *err)
{
    cJSON *list = cJSON_CreateObject();
    x3_status rc = x3_json_add(record, "tensors", list, err);

    for (size_t i = 0; i < n && rc == X3_OK; i++)
        rc = x3_json_add_hash(list, w->tensors[tensors[i]].out.name, w->tensors[tensors[i]].out.hash, err);
    return rc;
}

x3_status x3_record_hash(const cJSON *object, const char *key, const char *where, uint64_t *hash, x3_err *err)
{
    const char *text = NULL;
    char *end;
    x3_status rc = x3_json_string(object, key, true, &text, where, err);

    if (rc != X3_OK)
        return rc;
    *hash = strtoull(text, &end, 16);
    if (strlen(text) != 16 || *end != '\0')
        return x3_fail(err, X3_ERR_INPUT, "%s: \"%s\" is \"%.40s\", expected 16 hex digits", where, key, text);
    return X3_OK;
}

x3_status x3_record_accept_tensors(const cJSON *record, x3_pack_writer *w, x3_err *err)
{
    const cJSON *list = x3_json_get(record, "tensors");
    x3_status rc = X3_OK;

    if (!cJSON_IsObject(list))
        return x3_fail(err, X3_ERR_INPUT, "%s: a record of the work folder has no \"tensors\"", w->dir);
    for (const cJSON *t = list->child; t != NULL && rc == X3_OK; t = t->next) {
        size_t i = x3_pack_writer_find(w, t->string);
        uint64_t hash;
        if (i == w->n_tensors)
            return x3_fail(err, X3_ERR_INPUT, "%s: a record names tensor %s, which this job does not write", w->dir, t->string);
        rc = x3_record_hash(list, t->string, w->dir, &hash, err);
        if (rc == X3_OK)
            rc = x3_pack_writer_accept(w, i, hash, err);
    }
    return rc;
}
