#include "tools/kept.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/progress.h"

enum fate { UNQUANTIZED, CARRIED, DROPPED, N_FATES };

struct kind {
    char *name; /* with * for numbers; or what the tensors are part of */
    const char *reason;
    enum fate fate;
    size_t n;
    uint64_t n_bytes;
};

struct kinds {
    struct kind *items;
    size_t n, capacity;
};

/* "model.layers.12.mlp" becomes "model.layers.*.mlp". */
static x3_status name_of(const x3_tensor *t, char **out, x3_err *err)
{
    const size_t n = strlen(t->name);
    size_t at = 0, i = 0;
    x3_status rc = x3_alloc(out, n + 2, 1, err);

    while (rc == X3_OK && i < n) {
        size_t digits = strspn(t->name + i, "0123456789");
        bool whole = digits > 0 && (i == 0 || t->name[i - 1] == '.') && (t->name[i + digits] == '.' || i + digits == n);
        if (whole) {
            (*out)[at++] = '*';
            i += digits;
        } else {
            (*out)[at++] = t->name[i++];
        }
    }
    return rc;
}

/* reason: what carried tensors are part of, or why tensors are dropped. */
static x3_status count(struct kinds *k, const x3_tensor *t, enum fate fate, const char *reason, x3_err *err)
{
    char *name = NULL;
    size_t i = 0;
    x3_status rc;

    X3_TRY(rc, out, fate == CARRIED ? x3_strdup(&name, reason, err) : name_of(t, &name, err));
    while (i < k->n && (k->items[i].fate != fate || strcmp(k->items[i].name, name) != 0))
        i++;
    if (i == k->n) {
        X3_TRY(rc, out, x3_grow(&k->items, &k->capacity, k->n + 1, sizeof *k->items, err));
        k->items[k->n++] = (struct kind){.name = name, .fate = fate, .reason = reason};
        name = NULL;
    }
    k->items[i].n++;
    k->items[i].n_bytes += t->n_bytes;
out:
    free(name);
    return rc;
}

x3_status x3_print_kept(const x3_checkpoint *c, x3_err *err)
{
    static const char *const names[N_FATES] = {"unquantized", "carried    ", "dropped    "};
    struct kinds k = {0};
    size_t n_fp8 = 0;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < c->st->n_tensors; i++) {
        const char *reason = c->reasons[i];
        if (c->roles[i] == X3_ROLE_KEPT)
            X3_TRY(rc, out, count(&k, &c->st->tensors[i], reason == NULL ? UNQUANTIZED : CARRIED, reason, err));
        else if (c->roles[i] == X3_ROLE_DROPPED)
            X3_TRY(rc, out, count(&k, &c->st->tensors[i], DROPPED, reason, err));
        n_fp8 += c->roles[i] == X3_ROLE_KEPT && c->st->tensors[i].dtype == X3_F8_E4M3;
    }
    for (int fate = 0; fate < N_FATES; fate++)
        for (size_t i = 0; i < k.n; i++)
            if ((int)k.items[i].fate == fate)
                printf("%s %s%s%s%s: %zu tensor%s, %s\n", names[fate], k.items[i].name, fate == DROPPED ? " (" : "",
                       fate == DROPPED ? k.items[i].reason : "", fate == DROPPED ? ")" : "", k.items[i].n,
                       k.items[i].n == 1 ? "" : "s", x3_bytes_text(k.items[i].n_bytes));
    if (n_fp8 > 0)
        printf("note        %zu tensors stay FP8 beside their scales, as they are: this is read here, other readers may not apply "
               "the scales\n", n_fp8);
out:
    for (size_t i = 0; i < k.n; i++)
        free(k.items[i].name);
    free(k.items);
    return rc;
}
