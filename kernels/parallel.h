/* A pool of threads for loops whose items are independent. Which thread runs an item is free, so an item must not
 * depend on it; the partition into items belongs to the caller and never to the number of threads. */
#ifndef X3_PARALLEL_H
#define X3_PARALLEL_H

#include "formats/base.h"

typedef struct x3_pool x3_pool;

/* n_threads includes the caller; 0 means one a processor. */
x3_status x3_pool_create(x3_pool **out, int n_threads, x3_err *err) X3_MUST;
void x3_pool_free(x3_pool *pool);
int x3_pool_threads(const x3_pool *pool);

/* Runs fn(arg, item, thread) for item = 0 .. n_items - 1; thread < x3_pool_threads() names scratch. Returns when all
 * are done. Not reentrant. pool NULL runs them in the caller. */
void x3_pool_run(x3_pool *pool, size_t n_items, void (*fn)(void *arg, size_t item, int thread), void *arg);

#endif
