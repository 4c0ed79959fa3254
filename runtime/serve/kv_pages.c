#include "runtime/serve/kv_pages.h"

#include <stdlib.h>
#include <string.h>

#define NONE (-1)

struct page {
    uint32_t n_holders;
    uint64_t entry, parent; /* entry is 0 when it cannot be found; numbers are never used twice */
    int32_t tokens[X3_KV_PAGE];
    int32_t chain;          /* next of the bucket */
    int32_t before, after;  /* in the list of pages that nobody holds */
};

struct x3_kv_pages {
    struct page *pages;
    size_t n_pages, n_buckets, n_held, n_cached;
    int32_t *buckets;
    int32_t first, last; /* pages that nobody holds: the next one to take is the first */
    uint64_t n_entries;
};

x3_status x3_kv_pages_create(x3_kv_pages **out, size_t n_pages, x3_err *err)
{
    x3_kv_pages *p = NULL;
    x3_status rc;

    *out = NULL;
    if (n_pages == 0 || n_pages > INT32_MAX / 2)
        return x3_fail(err, X3_ERR_INPUT, "a cache of %zu pages", n_pages);
    X3_TRY(rc, out, x3_alloc(&p, 1, sizeof *p, err));
    p->n_pages = n_pages;
    p->n_buckets = 2 * n_pages;
    X3_TRY(rc, out, x3_alloc(&p->pages, n_pages, sizeof *p->pages, err));
    X3_TRY(rc, out, x3_alloc(&p->buckets, p->n_buckets, sizeof *p->buckets, err));
    for (size_t i = 0; i < p->n_buckets; i++)
        p->buckets[i] = NONE;
    for (size_t i = 0; i < n_pages; i++) {
        p->pages[i].before = (int32_t)i - 1;
        p->pages[i].after = i + 1 < n_pages ? (int32_t)i + 1 : NONE;
    }
    p->last = (int32_t)n_pages - 1;
    *out = p;
    p = NULL;
out:
    x3_kv_pages_free(p);
    return rc;
}

void x3_kv_pages_free(x3_kv_pages *p)
{
    if (p == NULL)
        return;
    free(p->pages);
    free(p->buckets);
    free(p);
}

/* ---- the list of pages that nobody holds ---- */

static void unlink_page(x3_kv_pages *p, int32_t i)
{
    struct page *page = &p->pages[i];

    *(page->before == NONE ? &p->first : &p->pages[page->before].after) = page->after;
    *(page->after == NONE ? &p->last : &p->pages[page->after].before) = page->before;
}

/* Pages that can be found go to the end, the others to the front, where they are taken first. */
static void link_page(x3_kv_pages *p, int32_t i)
{
    struct page *page = &p->pages[i];
    bool at_end = page->entry != 0;

    page->before = at_end ? p->last : NONE;
    page->after = at_end ? NONE : p->first;
    *(page->before == NONE ? &p->first : &p->pages[page->before].after) = i;
    *(page->after == NONE ? &p->last : &p->pages[page->after].before) = i;
}

static void hold(x3_kv_pages *p, int32_t i)
{
    struct page *page = &p->pages[i];

    if (page->n_holders++ > 0)
        return;
    unlink_page(p, i);
    p->n_held++;
    p->n_cached -= page->entry != 0;
}

/* ---- entries ---- */

static int32_t *bucket_of(x3_kv_pages *p, uint64_t parent, const int32_t *tokens)
{
    uint64_t key[1 + X3_KV_PAGE / 2];

    key[0] = parent;
    memcpy(key + 1, tokens, X3_KV_PAGE * sizeof *tokens);
    return &p->buckets[x3_hash(key, sizeof key) % p->n_buckets];
}

static int32_t find(x3_kv_pages *p, uint64_t parent, const int32_t *tokens)
{
    int32_t i = *bucket_of(p, parent, tokens);

    while (i != NONE && (p->pages[i].parent != parent || memcmp(p->pages[i].tokens, tokens, sizeof p->pages[i].tokens) != 0))
        i = p->pages[i].chain;
    return i;
}

static void forget(x3_kv_pages *p, int32_t i)
{
    struct page *page = &p->pages[i];
    int32_t *at = bucket_of(p, page->parent, page->tokens);

    if (page->entry == 0)
        return;
    while (*at != i)
        at = &p->pages[*at].chain;
    *at = page->chain;
    page->entry = 0;
    p->n_cached--;
}

bool x3_kv_pages_take(x3_kv_pages *p, int32_t *page)
{
    if (p->first == NONE)
        return false;
    *page = p->first;
    forget(p, *page);
    hold(p, *page);
    return true;
}

bool x3_kv_pages_find(x3_kv_pages *p, uint64_t *chain, const int32_t *tokens, int32_t *page)
{
    int32_t i = find(p, *chain, tokens);

    if (i == NONE)
        return false;
    hold(p, i);
    *chain = p->pages[i].entry;
    *page = i;
    return true;
}

void x3_kv_pages_fill(x3_kv_pages *p, uint64_t *chain, const int32_t *tokens, int32_t page)
{
    int32_t known = find(p, *chain, tokens), *bucket = bucket_of(p, *chain, tokens);
    struct page *new = &p->pages[page];

    if (known == NONE) {
        known = page;
        new->parent = *chain;
        new->entry = ++p->n_entries;
        memcpy(new->tokens, tokens, sizeof new->tokens);
        new->chain = *bucket;
        *bucket = page;
    }
    *chain = p->pages[known].entry;
}

void x3_kv_pages_release(x3_kv_pages *p, const int32_t *pages, size_t n)
{
    /* from the end: a page is of no use without those before it */
    for (size_t i = n; i-- > 0;) {
        struct page *page = &p->pages[pages[i]];
        if (--page->n_holders > 0)
            continue;
        p->n_held--;
        p->n_cached += page->entry != 0;
        link_page(p, pages[i]);
    }
}

size_t x3_kv_pages_n_held(const x3_kv_pages *p)
{
    return p->n_held;
}

size_t x3_kv_pages_n_cached(const x3_kv_pages *p)
{
    return p->n_cached;
}
