/* Which sequence owns which page of the cache, and which full pages can be used again by sequences that begin with the
 * same tokens. Knows nothing of what pages hold.
 *
 * A full page is known by its 64 tokens and the page before it (a chain from position 0); it stays findable after its
 * sequences are gone, until its room is needed: the page released first goes first.
 * Threads: belongs to one thread at a time. */
#ifndef X3_KV_PAGES_H
#define X3_KV_PAGES_H

#include "runtime/device/device.h"

typedef struct x3_kv_pages x3_kv_pages;

/* The start of every chain. */
#define X3_KV_ROOT ((uint64_t)0)

x3_status x3_kv_pages_create(x3_kv_pages **out, size_t n_pages, x3_err *err) X3_MUST;
void x3_kv_pages_free(x3_kv_pages *p);

/* *page = an unused page, held once. False when every page is held. */
bool x3_kv_pages_take(x3_kv_pages *p, int32_t *page);
/* The full page of `tokens` [64] after *chain: holds it once more, moves *chain on. False when there is none. */
bool x3_kv_pages_find(x3_kv_pages *p, uint64_t *chain, const int32_t *tokens, int32_t *page);
/* Makes a held page findable, now that all its positions are computed, and moves *chain on. Where another page has the
 * same tokens already that one stays the known one. */
void x3_kv_pages_fill(x3_kv_pages *p, uint64_t *chain, const int32_t *tokens, int32_t page);
/* Lets go of n pages of one sequence, in order of positions. */
void x3_kv_pages_release(x3_kv_pages *p, const int32_t *pages, size_t n);

/* Pages that are held; pages that are not, but can still be found. */
size_t x3_kv_pages_n_held(const x3_kv_pages *p);
size_t x3_kv_pages_n_cached(const x3_kv_pages *p);

#endif
