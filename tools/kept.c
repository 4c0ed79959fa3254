#include "tools/kept.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/progress.h"

struct kind {
    char *name; /* with * for numbers; or what the tensors are part of */
    bool carried;
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

static x3_status count(struct kinds *k, const x3_tensor *t, const char *part, x3_err *err)
{
    char *name = NULL;
    size_t i = 0;
    x3_status rc;

    X3_TRY(rc, out, part != NULL ? x3_strdup(&name, part, err) : name_of(t, &name, err));
    while (i < k->n && (k->items[i].carried != (part != NULL) || strcmp(k->items[i].name, name) != 0))
        i++;
    if (i == k->n) {
        X3_TRY(rc, out, x3_grow(&k->items, &k->capacity, k->n + 1, sizeof *k->items, err));
        k->items[k->n++] = (struct kind){.name = name, .carried = part != NULL};
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
    struct kinds k = {0};
    x3_status rc = X3_OK;

    for (size_t i = 0; i < c->st->n_tensors; i++)
        if (c->roles[i] == X3_ROLE_KEPT)
            X3_TRY(rc, out, count(&k, &c->st->tensors[i], c->reasons[i], err));
    for (int carried = 0; carried < 2; carried++)
        for (size_t i = 0; i < k.n; i++)
            if (k.items[i].carried == (carried == 1))
                printf("%s %s: %zu tensor%s, %s\n", carried ? "carried    " : "unquantized", k.items[i].name, k.items[i].n,
                       k.items[i].n == 1 ? "" : "s", x3_bytes_text(k.items[i].n_bytes));
out:
    for (size_t i = 0; i < k.n; i++)
        free(k.items[i].name);
    free(k.items);
    return rc;
}
