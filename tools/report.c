#include "tools/report.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- values ---- */

/* Reads "kl.mean"-like paths; the first failure stays in err. */
struct reader {
    const cJSON *json;
    const char *path;
    x3_status rc;
    x3_err *err;
};

static const cJSON *find(struct reader *d, const char *key)
{
    const cJSON *at = d->json;
    char part[64];

    for (const char *p = key; at != NULL && *p != '\0';) {
        size_t n = strcspn(p, ".");
        snprintf(part, sizeof part, "%.*s", (int)n, p);
        at = cJSON_IsObject(at) ? x3_json_get(at, part) : NULL;
        p += n + (p[n] == '.');
    }
    return at;
}

static double number(struct reader *d, const char *key)
{
    const cJSON *v = find(d, key);

    if (cJSON_IsNumber(v))
        return v->valuedouble;
    if (d->rc == X3_OK)
        d->rc = x3_fail(d->err, X3_ERR_INPUT, "%s: \"%s\" is missing or not a number", d->path, key);
    return 0;
}

static double number_or(struct reader *d, const char *key, double missing)
{
    const cJSON *v = find(d, key);

    return cJSON_IsNumber(v) ? v->valuedouble : missing;
}

static const char *text(struct reader *d, const char *key)
{
    const cJSON *v = find(d, key);

    if (cJSON_IsString(v))
        return v->valuestring;
    if (d->rc == X3_OK)
        d->rc = x3_fail(d->err, X3_ERR_INPUT, "%s: \"%s\" is missing or not a text", d->path, key);
    return "";
}

/* The last part of a path. */
static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');

    return slash == NULL || slash[1] == '\0' ? path : slash + 1;
}

/* "a.txt, b.jsonl" */
static x3_status join_names(x3_report *r, const cJSON *texts, const char **out, x3_err *err)
{
    char all[512] = "", *copy;
    x3_status rc;

    for (const cJSON *t = cJSON_IsArray(texts) ? texts->child : NULL; t != NULL; t = t->next) {
        const cJSON *name = x3_json_get(t, "name");
        size_t n = strlen(all);
        if (cJSON_IsString(name))
            snprintf(all + n, sizeof all - n, "%s%s", n == 0 ? "" : ", ", base_name(name->valuestring));
    }
    rc = x3_arena_printf(&r->arena, &copy, err, "%s", all);
    *out = copy;
    return rc;
}

/* ---- receipts ---- */

static x3_status read_score(x3_report *r, struct reader *d)
{
    x3_report_score *s = &r->scores[r->n_scores];

    *s = (x3_report_score){
        .name = base_name(text(d, "pack.path")),
        .source = base_name(text(d, "source.path")),
        .bytes = number(d, "pack.bytes"),
        .bits_body = number(d, "pack.bits_body"),
        .bits_head = number(d, "pack.bits_head"),
        .kl = number(d, "kl.mean"),
        .kl_stderr = number(d, "kl.stderr"),
        .kl_p99 = number(d, "kl.p99"),
        .top1 = number(d, "top1.agree"),
        .nll_reference = number(d, "nll.reference"),
        .nll_pack = number(d, "nll.pack"),
        .positions = number(d, "positions"),
        .ctx = number(d, "ctx"),
        .nonfinite = number(d, "nonfinite"),
    };
    const char *hash = text(d, "reference.xxh3");
    if (d->rc == X3_OK && (strlen(hash) != 16 || strspn(hash, "0123456789abcdefABCDEF") != 16))
        d->rc = x3_fail(d->err, X3_ERR_INPUT, "%s: \"reference.xxh3\" is not 16 hexadecimal digits", d->path);
    snprintf(s->reference, sizeof s->reference, "%.16s", hash);
    if (d->rc == X3_OK)
        d->rc = join_names(r, find(d, "text"), &s->text, d->err);
    r->n_scores += d->rc == X3_OK;
    return d->rc;
}

static bool is_number(const char *p, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (p[i] < '0' || p[i] > '9')
            return false;
    return n > 0 && n < 9;
}

/* "model.layers.3.mlp.experts.12.up_proj": layer 3, expert 12, projection "mlp.experts.*.up_proj". A name without a number
 * is its own projection. */
static x3_status split_name(x3_report *r, x3_report_group *g, x3_err *err)
{
    char rest[512] = "", *copy;
    size_t at = 0, n;
    x3_status rc;

    g->layer = g->expert = -1;
    for (const char *p = g->name; *p != '\0'; p += n + (p[n] == '.')) {
        n = strcspn(p, ".");
        if (is_number(p, n) && g->layer < 0) {
            g->layer = atoi(p);
            at = 0; /* what stood before the layer is the same for all */
            rest[0] = '\0';
            continue;
        }
        if (is_number(p, n) && g->expert < 0)
            g->expert = atoi(p);
        if (at + n + 2 < sizeof rest)
            at += (size_t)snprintf(rest + at, sizeof rest - at, "%s%.*s", at == 0 ? "" : ".", is_number(p, n) ? 1 : (int)n,
                                   is_number(p, n) ? "*" : p);
    }
    rc = x3_arena_printf(&r->arena, &copy, err, "%s", rest);
    g->projection = copy;
    return rc;
}

static x3_status read_groups(x3_report *r, x3_report_pack *p, const cJSON *groups, const char *path, x3_err *err)
{
    x3_status rc = x3_alloc(&p->groups, (uint64_t)cJSON_GetArraySize(groups), sizeof *p->groups, err);

    for (const cJSON *e = groups->child; e != NULL && rc == X3_OK; e = e->next) {
        struct reader d = {.json = e, .path = path, .err = err};
        x3_report_group *g = &p->groups[p->n_groups++];
        *g = (x3_report_group){
            .name = text(&d, "name"),
            .K = (int)number(&d, "K"),
            .weights = number(&d, "weights"),
            .error_source = number(&d, "error_source"),
            .error_target = number(&d, "error_target"),
            .blended = number_or(&d, "blended", 0),
            .tokens = number_or(&d, "expert_tokens", -1),
        };
        rc = d.rc;
        if (rc == X3_OK && (g->K < 1 || g->K > 8))
            rc = x3_fail(err, X3_ERR_INPUT, "%s: K of %s is %d", path, g->name, g->K);
        if (rc == X3_OK)
            rc = split_name(r, g, err);
    }
    return rc;
}

/* The folder that the receipt lies in names the pack. */
static x3_status folder_name(x3_report *r, const char *path, const char **out, x3_err *err)
{
    const char *slash = strrchr(path, '/'), *start;
    char *copy;
    x3_status rc;

    if (slash == NULL || slash == path) {
        *out = path;
        return X3_OK;
    }
    for (start = slash; start > path && start[-1] != '/'; start--)
        ;
    rc = x3_arena_printf(&r->arena, &copy, err, "%.*s", (int)(slash - start), start);
    *out = copy;
    return rc;
}

static x3_status read_pack(x3_report *r, struct reader *d)
{
    x3_report_pack *p = &r->packs[r->n_packs++];

    *p = (x3_report_pack){
        .source = base_name(text(d, "source.path")),
        .bytes = number(d, "bytes"),
        .bits_body = number(d, "bits_body"),
        .bits_head = number(d, "bits_head"),
        .rows = number(d, "calibration.rows"),
        .cols = number(d, "calibration.cols"),
    };
    if (d->rc == X3_OK)
        d->rc = folder_name(r, d->path, &p->name, d->err);
    if (d->rc == X3_OK)
        d->rc = read_groups(r, p, find(d, "groups"), d->path, d->err);
    return d->rc;
}

x3_status x3_report_read(x3_report *r, const char *const *paths, size_t n, x3_err *err)
{
    x3_status rc;

    *r = (x3_report){0};
    X3_TRY(rc, out, x3_alloc(&r->receipts, n, sizeof *r->receipts, err));
    X3_TRY(rc, out, x3_alloc(&r->scores, n, sizeof *r->scores, err));
    X3_TRY(rc, out, x3_alloc(&r->packs, n, sizeof *r->packs, err));
    for (size_t i = 0; i < n; i++) {
        struct reader d = {.path = paths[i], .err = err};
        X3_TRY(rc, out, x3_json_load(&r->receipts[i], paths[i], err));
        r->n_receipts++;
        d.json = r->receipts[i];
        if (cJSON_IsObject(find(&d, "kl")))
            rc = read_score(r, &d);
        else if (cJSON_IsArray(find(&d, "groups")))
            rc = read_pack(r, &d);
        else
            rc = x3_fail(err, X3_ERR_INPUT, "%s: is neither the receipt of a score nor that of a pack", paths[i]);
        if (rc != X3_OK)
            break;
    }
out:
    if (rc != X3_OK)
        x3_report_free(r);
    return rc;
}

void x3_report_free(x3_report *r)
{
    for (size_t i = 0; i < r->n_receipts; i++)
        cJSON_Delete(r->receipts[i]);
    for (size_t i = 0; i < r->n_packs; i++)
        free(r->packs[i].groups);
    free(r->receipts);
    free(r->scores);
    free(r->packs);
    x3_arena_free(&r->arena);
    *r = (x3_report){0};
}
