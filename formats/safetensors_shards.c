/* Which files make up a checkpoint, and whether shards and index agree. */
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "formats/io.h"
#include "formats/safetensors_opening.h"

static int compare_texts(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static int compare_mappings(const void *a, const void *b)
{
    return strcmp(((const x3_st_mapping *)a)->tensor, ((const x3_st_mapping *)b)->tensor);
}

static int compare_file_with_shard(const void *file, const void *shard)
{
    return strcmp(file, ((const x3_shard *)shard)->file);
}

static const x3_shard *find_shard(const x3_safetensors *st, const char *file)
{
    return bsearch(file, st->shards, st->n_shards, sizeof *st->shards, compare_file_with_shard);
}

static bool ends_in(const char *name, const char *suffix)
{
    size_t n = strlen(name), m = strlen(suffix);

    return n >= m && strcmp(name + n - m, suffix) == 0;
}

static bool is_consolidated(const char *file)
{
    return strncmp(file, "consolidated", 12) == 0;
}

/* ---- which shards ---- */

/* `files` are sorted and differ. */
static x3_status set_shards(x3_st_opening *o, const char *const *files, size_t n, x3_err *err)
{
    x3_safetensors *st = o->st;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&o->has_names, n, sizeof *o->has_names, err));
    X3_TRY(rc, out, x3_alloc(&st->shards, n, sizeof *st->shards, err));
    for (size_t i = 0; i < n; i++)
        st->shards[i].fd = -1;
    st->n_shards = n;
    for (size_t i = 0; i < n; i++) {
        X3_TRY(rc, out, x3_strdup(&st->shards[i].file, files[i], err));
        X3_TRY(rc, out, x3_path_join(&st->shards[i].path, st->dir, files[i], err));
    }
out:
    return rc;
}

/* Keeps one of each and only plain names: an index must not lead out of its folder. */
static size_t sort_index_files(x3_st_opening *o, const char **files, size_t n)
{
    size_t kept = 0;

    qsort(files, n, sizeof *files, compare_texts);
    for (size_t i = 0; i < n; i++) {
        if (i > 0 && strcmp(files[i - 1], files[i]) == 0)
            continue;
        if (strchr(files[i], '/') != NULL || strstr(files[i], "..") != NULL || strlen(files[i]) > NAME_MAX ||
            !ends_in(files[i], ".safetensors"))
            x3_findings_add(o->findings, "%s/" X3_ST_INDEX_NAME ": \"%.200s\" is not the plain name of a .safetensors file",
                            o->st->dir, files[i]);
        else
            files[kept++] = files[i];
    }
    return kept;
}

static x3_status shards_of_index(x3_st_opening *o, const x3_names *names, x3_err *err)
{
    const cJSON *map, *c;
    const char **files = NULL;
    size_t n = 0, n_files = 0;
    char *path = NULL;
    x3_err cause = {0};
    x3_status rc;

    X3_TRY(rc, out, x3_path_join(&path, o->st->dir, X3_ST_INDEX_NAME, err));
    if (x3_json_load(&o->index, path, &cause) != X3_OK) {
        rc = x3_st_content_or_stop(o, &cause, err);
        goto out;
    }
    map = x3_json_get(o->index, "weight_map");
    if (!cJSON_IsObject(map) || map->child == NULL) {
        x3_findings_add(o->findings, "%s: weight_map is missing, empty or not an object", path);
        goto out;
    }
    for (c = map->child; c != NULL; c = c->next)
        n++;
    X3_TRY(rc, out, x3_alloc(&o->mappings, n, sizeof *o->mappings, err));
    X3_TRY(rc, out, x3_alloc(&files, n, sizeof *files, err));
    cJSON_ArrayForEach(c, map)
    {
        if (cJSON_IsString(c))
            files[n_files++] = c->valuestring;
        else
            x3_findings_add(o->findings, "%s: tensor \"%.300s\": its file is not a string", path, c->string);
        o->mappings[o->n_mappings++] = (x3_st_mapping){c->string, cJSON_IsString(c) ? c->valuestring : NULL};
    }
    qsort(o->mappings, n, sizeof *o->mappings, compare_mappings);
    n_files = sort_index_files(o, files, n_files);
    X3_TRY(rc, out, set_shards(o, files, n_files, err));
    for (size_t i = 0; i < names->n_items; i++)
        if (ends_in(names->items[i], ".safetensors") && !is_consolidated(names->items[i]) &&
            find_shard(o->st, names->items[i]) == NULL)
            x3_findings_add(o->findings, "%s/%s: not named by " X3_ST_INDEX_NAME, o->st->dir, names->items[i]);
out:
    free(files);
    free(path);
    return rc;
}

static void report_no_shards(x3_st_opening *o, const x3_names *names)
{
    static const char *const others[] = {".bin", ".gguf", ".pt", ".pth", ".ckpt", ".onnx", ".h5", ".msgpack", ".npz"};
    char text[600];
    size_t at = 0;
    bool is_other = false, is_copy = false;

    for (size_t i = 0; i < names->n_items; i++) {
        for (size_t k = 0; k < sizeof others / sizeof others[0]; k++)
            is_other |= ends_in(names->items[i], others[k]);
        is_copy |= is_consolidated(names->items[i]) && ends_in(names->items[i], ".safetensors");
        if (at < sizeof text)
            at += (size_t)snprintf(text + at, sizeof text - at, "%s%s", i == 0 ? "" : ", ", names->items[i]);
    }
    if (at >= sizeof text)
        memcpy(text + sizeof text - 4, "...", 4);
    x3_findings_add(o->findings, "%s: no *.safetensors file; %s%s%s%s", o->st->dir,
                    names->n_items == 0 ? "the folder is empty" : "it has ", names->n_items == 0 ? "" : text,
                    is_other ? " (weights that are not safetensors must be converted first)" : "",
                    is_copy ? " (consolidated*.safetensors is read only when given as the path)" : "");
}

/* For "…-00002-of-00005.safetensors" the length of "…" and 5; false for other names. */
static bool is_numbered(const char *file, size_t *prefix, unsigned long *total)
{
    const char *of = NULL, *digits;
    char *end;

    for (const char *p = file; (p = strstr(p, "-of-")) != NULL; p++)
        of = p;
    if (of == NULL || of[4] < '0' || of[4] > '9')
        return false;
    *total = strtoul(of + 4, &end, 10);
    for (digits = of; digits > file && digits[-1] >= '0' && digits[-1] <= '9'; digits--)
        ;
    if (strcmp(end, ".safetensors") != 0 || digits == of || digits == file || digits[-1] != '-')
        return false;
    *prefix = (size_t)(digits - 1 - file);
    return true;
}

/* Without an index only the file names tell that a shard is missing. */
static void check_numbering(x3_st_opening *o)
{
    const x3_safetensors *st = o->st;
    size_t prefix, other_prefix, end;
    unsigned long total, other_total;

    for (size_t i = 0; i < st->n_shards; i = end) {
        end = i + 1;
        if (!is_numbered(st->shards[i].file, &prefix, &total))
            continue;
        while (end < st->n_shards && is_numbered(st->shards[end].file, &other_prefix, &other_total) &&
               other_total == total && other_prefix == prefix &&
               memcmp(st->shards[i].file, st->shards[end].file, prefix) == 0)
            end++;
        if (end - i != total)
            x3_findings_add(o->findings, "%s: %zu of the %lu shards that its name speaks of are there",
                            st->shards[i].path, end - i, total);
    }
}

static x3_status shards_of_folder(x3_st_opening *o, const x3_names *names, x3_err *err)
{
    const char **files = NULL;
    size_t n = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&files, names->n_items, sizeof *files, err));
    for (size_t i = 0; i < names->n_items; i++)
        if (ends_in(names->items[i], ".safetensors") && !is_consolidated(names->items[i]))
            files[n++] = names->items[i];
    if (n == 0)
        report_no_shards(o, names);
    X3_TRY(rc, out, set_shards(o, files, n, err));
    check_numbering(o);
out:
    free(files);
    return rc;
}

x3_status x3_st_find_shards(x3_st_opening *o, const char *path, x3_err *err)
{
    x3_safetensors *st = o->st;
    const char *slash = strrchr(path, '/'), *file = slash == NULL ? path : slash + 1;
    x3_names names = {0};
    struct stat info;
    x3_status rc = X3_OK;

    if (stat(path, &info) != 0)
        return x3_fail(err, X3_ERR_IO, "%s: %s", path, strerror(errno));
    if (S_ISREG(info.st_mode)) {
        X3_TRY(rc, out, slash == NULL ? x3_strdup(&st->dir, ".", err)
                                      : x3_strndup(&st->dir, path, (size_t)(slash - path) + (slash == path), err));
        X3_TRY(rc, out, set_shards(o, &file, 1, err));
    } else if (S_ISDIR(info.st_mode)) {
        X3_TRY(rc, out, x3_strdup(&st->dir, path, err));
        X3_TRY(rc, out, x3_list_dir(&names, path, err));
        for (size_t i = 0; i < names.n_items; i++)
            st->has_index |= strcmp(names.items[i], X3_ST_INDEX_NAME) == 0;
        rc = st->has_index ? shards_of_index(o, &names, err) : shards_of_folder(o, &names, err);
    } else {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: neither a folder nor a regular file", path);
    }
out:
    x3_names_free(&names);
    return rc;
}

/* ---- across shards ---- */

static void check_doubled_names(x3_st_opening *o)
{
    const x3_shard *shards = o->st->shards;

    for (size_t i = 1; i < o->n_entries; i++) {
        const x3_tensor *t = &o->entries[i].t, *before = &o->entries[i - 1].t;
        if (strcmp(t->name, before->name) == 0)
            x3_st_tensor_problem(o, &shards[t->shard], t->name, "stands in %s too", shards[before->shard].file);
    }
}

/* One line of the index against the n entries of the same name, from `first` on. */
static void check_mapping(x3_st_opening *o, const x3_st_mapping *m, size_t first, size_t n)
{
    const x3_shard *shards = o->st->shards, *shard;

    if (m->file == NULL)
        return;
    for (size_t i = 0; i < n; i++)
        if (strcmp(shards[o->entries[first + i].t.shard].file, m->file) == 0)
            return;
    shard = find_shard(o->st, m->file);
    if (n > 0)
        x3_st_tensor_problem(o, &shards[o->entries[first].t.shard], m->tensor, X3_ST_INDEX_NAME " puts it in %.200s", m->file);
    else if (shard != NULL && o->has_names[shard - shards]) /* else there is a finding for the whole shard */
        x3_st_tensor_problem(o, shard, m->tensor, "missing, but " X3_ST_INDEX_NAME " puts it there");
}

static void check_index(x3_st_opening *o)
{
    size_t i = 0, j = 0;

    while (i < o->n_entries || j < o->n_mappings) {
        const x3_tensor *t = i < o->n_entries ? &o->entries[i].t : NULL;
        const x3_st_mapping *m = j < o->n_mappings ? &o->mappings[j] : NULL;
        int order = t == NULL ? 1 : m == NULL ? -1 : strcmp(t->name, m->tensor);
        size_t n = 0;
        if (order < 0) {
            x3_st_tensor_problem(o, &o->st->shards[t->shard], t->name, "not named by " X3_ST_INDEX_NAME);
            i++;
            continue;
        }
        while (order == 0 && i + n < o->n_entries && strcmp(o->entries[i + n].t.name, m->tensor) == 0)
            n++;
        check_mapping(o, m, i, n);
        i += n;
        j++;
    }
}

void x3_st_check_across(x3_st_opening *o)
{
    check_doubled_names(o);
    if (o->index != NULL)
        check_index(o);
}
