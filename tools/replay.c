#include "tools/replay.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

x3_status x3_words_split(x3_words *w, const char *command, x3_err *err)
{
    x3_status rc;
    char *p;

    *w = (x3_words){0};
    rc = x3_strdup(&w->text, command, err);
    if (rc != X3_OK)
        return rc;
    for (p = w->text; *p != '\0';) {
        char end = ' ';
        while (*p == ' ')
            p++;
        if (*p == '\0')
            break;
        if (*p == '\'') {
            end = '\'';
            p++;
        }
        if (w->n == X3_WORDS_MAX) {
            x3_words_free(w);
            return x3_fail(err, X3_ERR_INPUT, "the receipt's command has more than %d words", X3_WORDS_MAX);
        }
        w->items[w->n++] = p;
        while (*p != '\0' && *p != end)
            p++;
        if (*p != '\0')
            *p++ = '\0';
    }
    return X3_OK;
}

void x3_words_free(x3_words *w)
{
    free(w->text);
    *w = (x3_words){0};
}

void x3_words_remove(x3_words *w, const char *name, bool has_value)
{
    const size_t length = strlen(name);

    for (size_t i = 0; i < w->n;) {
        size_t take = 0;
        if (strcmp(w->items[i], name) == 0)
            take = has_value && i + 1 < w->n ? 2 : 1;
        else if (has_value && strncmp(w->items[i], name, length) == 0 && w->items[i][length] == '=')
            take = 1;
        if (take == 0) {
            i++;
            continue;
        }
        memmove(w->items + i, w->items + i + take, (w->n - i - take + 1) * sizeof w->items[0]);
        w->n -= take;
    }
}

static const cJSON *part(const cJSON *receipt, const char *object, const char *key)
{
    const cJSON *o = x3_json_get(receipt, object);

    return o == NULL ? NULL : x3_json_get(o, key);
}

static size_t compare_number(const cJSON *before, const cJSON *now, const char *object, const char *key)
{
    const cJSON *a = part(before, object, key), *b = part(now, object, key);

    if (!cJSON_IsNumber(a) || !cJSON_IsNumber(b)) {
        printf("%s.%s is missing\n", object, key);
        return 1;
    }
    bool same = fabs(a->valuedouble - b->valuedouble) <= 1e-6 * fabs(a->valuedouble) + 1e-12;
    printf("\"%s\".%s: %.9g then, %.9g now%s\n", object, key, a->valuedouble, b->valuedouble, same ? "" : "  DIFFERS");
    return !same;
}

static size_t compare_hash(const cJSON *before, const cJSON *now, const char *object)
{
    const cJSON *a = part(before, object, "xxh3"), *b = part(now, object, "xxh3");
    bool same = cJSON_IsString(a) && cJSON_IsString(b) && strcmp(a->valuestring, b->valuestring) == 0;

    printf("\"%s\".xxh3: %s then, %s now%s\n", object, cJSON_IsString(a) ? a->valuestring : "none",
           cJSON_IsString(b) ? b->valuestring : "none", same ? "" : "  DIFFERS");
    return !same;
}

size_t x3_replay_compare_scores(const cJSON *before, const cJSON *now)
{
    static const char *const numbers[][2] = {{"kl", "mean"}, {"kl", "stderr"}, {"kl", "median"}, {"kl", "p99"}, {"kl", "max"},
                                             {"top1", "agree"}, {"top5", "agree"}, {"nll", "reference"}, {"nll", "pack"}};
    size_t n = compare_hash(before, now, "pack");

    for (size_t i = 0; i < sizeof numbers / sizeof numbers[0]; i++)
        n += compare_number(before, now, numbers[i][0], numbers[i][1]);
    return n;
}

size_t x3_replay_compare_packs(const cJSON *before, const cJSON *now)
{
    const cJSON *a = x3_json_get(before, "tensors"), *b = x3_json_get(now, "tensors");
    size_t n = 0, n_tensors = 0;

    if (!cJSON_IsObject(a) || !cJSON_IsObject(b)) {
        printf("a receipt has no tensors\n");
        return 1;
    }
    /* both lists are in the order of the pack */
    const cJSON *y = b->child;
    for (const cJSON *x = a->child; x != NULL; x = x->next, n_tensors++) {
        bool same = y != NULL && strcmp(x->string, y->string) == 0 && cJSON_Compare(x, y, true);
        if (!same && n++ < 10)
            printf("%s: other bytes\n", x->string);
        y = y == NULL ? NULL : y->next;
    }
    n += y != NULL;
    printf("%zu of %zu tensors have the same bytes\n", n_tensors - x3_min_size(n, n_tensors), n_tensors);
    return n;
}
