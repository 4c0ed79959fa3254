#include "formats/recipe.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

#include "formats/io.h"

#define RECIPE_BYTES_MAX ((uint64_t)1 << 28)

/* ---- reading ---- */

struct reader {
    yaml_document_t document;
    const char *path;
    x3_recipe *recipe;
};

static size_t line_of(const yaml_node_t *node)
{
    return node->start_mark.line + 1;
}

static const char *text_of(const yaml_node_t *node)
{
    return node->type == YAML_SCALAR_NODE ? (const char *)node->data.scalar.value : NULL;
}

static x3_status read_number(const struct reader *r, const char *key, const yaml_node_t *node, double min, double max,
                             bool whole, double *out, x3_err *err)
{
    const char *text = text_of(node);
    char *end = NULL;

    if (text == NULL || *text == '\0')
        return x3_fail(err, X3_ERR_INPUT, "%s:%zu: \"%.200s\" is not a number", r->path, line_of(node), key);
    *out = strtod(text, &end);
    if (*end != '\0' || !(*out >= min && *out <= max) || (whole && *out != floor(*out)))
        return x3_fail(err, X3_ERR_INPUT, "%s:%zu: \"%.200s\" is %.40s, expected a %snumber from %g to %g", r->path,
                       line_of(node), key, text, whole ? "whole " : "", min, max);
    return X3_OK;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp((*(const x3_recipe_tensor *const *)a)->name, (*(const x3_recipe_tensor *const *)b)->name);
}

static x3_status refuse_doubled(const struct reader *r, x3_err *err)
{
    const x3_recipe_tensor **sorted = NULL;
    const size_t n = r->recipe->n_tensors;
    x3_status rc = x3_alloc(&sorted, n, sizeof *sorted, err);

    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < n; i++)
        sorted[i] = &r->recipe->tensors[i];
    qsort(sorted, n, sizeof *sorted, compare_names);
    for (size_t i = 1; i < n && rc == X3_OK; i++)
        if (strcmp(sorted[i - 1]->name, sorted[i]->name) == 0)
            rc = x3_fail(err, X3_ERR_INPUT, "%s: tensor \"%.300s\" stands twice", r->path, sorted[i]->name);
    free(sorted);
    return rc;
}

static x3_status read_tensors(struct reader *r, const yaml_node_t *node, x3_err *err)
{
    const yaml_node_pair_t *pair, *end;
    double bits;
    x3_status rc;

    if (node->type != YAML_MAPPING_NODE)
        return x3_fail(err, X3_ERR_INPUT, "%s:%zu: \"tensors\" is not a list of names and bits", r->path, line_of(node));
    pair = node->data.mapping.pairs.start;
    end = node->data.mapping.pairs.top;
    X3_TRY(rc, out, x3_alloc(&r->recipe->tensors, (uint64_t)(end - pair), sizeof *r->recipe->tensors, err));
    for (; pair < end; pair++) {
        const yaml_node_t *key = yaml_document_get_node(&r->document, pair->key);
        x3_recipe_tensor *t = &r->recipe->tensors[r->recipe->n_tensors];
        if (text_of(key) == NULL) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s:%zu: a name under \"tensors\" is not text", r->path, line_of(key));
            goto out;
        }
        X3_TRY(rc, out, read_number(r, text_of(key), yaml_document_get_node(&r->document, pair->value), 1, 8, true, &bits,
                                    err));
        X3_TRY(rc, out, x3_strdup(&t->name, text_of(key), err));
        t->bits = (int)bits;
        r->recipe->n_tensors++;
    }
    rc = refuse_doubled(r, err);
out:
    return rc;
}

static x3_status read_fields(struct reader *r, x3_err *err)
{
    const yaml_node_t *root = yaml_document_get_root_node(&r->document);
    bool has_head = false, has_tensors = false;
    double head;
    x3_status rc = X3_OK;

    if (root == NULL || root->type != YAML_MAPPING_NODE)
        return x3_fail(err, X3_ERR_INPUT, "%s: no recipe: the top is not a list of fields", r->path);
    for (const yaml_node_pair_t *p = root->data.mapping.pairs.start; p < root->data.mapping.pairs.top; p++) {
        const char *key = text_of(yaml_document_get_node(&r->document, p->key));
        const yaml_node_t *value = yaml_document_get_node(&r->document, p->value);
        if (key == NULL)
            continue;
        if (strcmp(key, "target_bpw") == 0)
            X3_TRY(rc, out, read_number(r, key, value, 0, 16, false, &r->recipe->target_bpw, err));
        else if (strcmp(key, "achieved_bpw") == 0)
            X3_TRY(rc, out, read_number(r, key, value, 0, 16, false, &r->recipe->achieved_bpw, err));
        else if (strcmp(key, "head_bits") == 0 && !has_head)
            X3_TRY(rc, out, read_number(r, key, value, 0, 8, true, &head, err));
        else if (strcmp(key, "tensors") == 0 && !has_tensors)
            X3_TRY(rc, out, read_tensors(r, value, err));
        else if (strcmp(key, "head_bits") == 0 || strcmp(key, "tensors") == 0) {
            rc = x3_fail(err, X3_ERR_INPUT, "%s:%zu: \"%s\" stands twice", r->path, line_of(value), key);
            goto out;
        }
        if (strcmp(key, "head_bits") == 0) {
            r->recipe->head_bits = (int)head;
            has_head = true;
        }
        has_tensors |= strcmp(key, "tensors") == 0;
    }
    if (!has_head || !has_tensors)
        rc = x3_fail(err, X3_ERR_INPUT, "%s: \"%s\" is missing", r->path, has_head ? "tensors" : "head_bits");
out:
    return rc;
}

x3_status x3_recipe_load(x3_recipe **out, const char *path, x3_err *err)
{
    struct reader r = {.path = path};
    yaml_parser_t parser = {0};
    bool has_parser = false, has_document = false;
    char *text = NULL;
    size_t n_bytes = 0;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_read_file(&text, &n_bytes, path, RECIPE_BYTES_MAX, err));
    X3_TRY(rc, out, x3_alloc(&r.recipe, 1, sizeof *r.recipe, err));
    if (yaml_parser_initialize(&parser) == 0) {
        rc = x3_fail(err, X3_ERR_MEMORY, "%s: out of memory", path);
        goto out;
    }
    has_parser = true;
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, n_bytes);
    if (yaml_parser_load(&parser, &r.document) == 0) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s:%zu: not valid YAML: %s", path, parser.problem_mark.line + 1,
                     parser.problem == NULL ? "?" : parser.problem);
        goto out;
    }
    has_document = true;
    X3_TRY(rc, out, read_fields(&r, err));
    *out = r.recipe;
    r.recipe = NULL;
out:
    if (has_document)
        yaml_document_delete(&r.document);
    if (has_parser)
        yaml_parser_delete(&parser);
    x3_recipe_free(r.recipe);
    free(text);
    return rc;
}

/* ---- writing ---- */

/* Names of modules are plain YAML scalars; anything else is quoted. */
static bool is_plain(const char *name)
{
    static const char letters[] = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_";

    return name[0] != '\0' && strchr(letters, name[0]) != NULL &&
           strspn(name, "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_0123456789.-") == strlen(name);
}

static void print_name(FILE *f, const char *name)
{
    if (is_plain(name)) {
        fputs(name, f);
        return;
    }
    putc('\'', f);
    for (; *name != '\0'; name++) {
        if (*name == '\'')
            putc('\'', f);
        putc(*name, f);
    }
    putc('\'', f);
}

x3_status x3_recipe_save(const x3_recipe *recipe, const char *path, x3_err *err)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    x3_status rc;

    if (f == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "%s: out of memory", path);
    fprintf(f, "target_bpw: %.6g\nachieved_bpw: %.6g\nhead_bits: %d\ntensors:\n", recipe->target_bpw, recipe->achieved_bpw,
            recipe->head_bits);
    for (size_t i = 0; i < recipe->n_tensors; i++) {
        fputs("  ", f);
        print_name(f, recipe->tensors[i].name);
        fprintf(f, ": %d\n", recipe->tensors[i].bits);
    }
    rc = fclose(f) == 0 ? x3_write_file(path, text, size, err) : x3_fail(err, X3_ERR_MEMORY, "%s: out of memory", path);
    free(text);
    return rc;
}

void x3_recipe_free(x3_recipe *recipe)
{
    if (recipe == NULL)
        return;
    for (size_t i = 0; recipe->tensors != NULL && i < recipe->n_tensors; i++)
        free(recipe->tensors[i].name);
    free(recipe->tensors);
    free(recipe);
}
