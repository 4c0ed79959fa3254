#include "kernels/parallel.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <unistd.h>

struct worker {
    x3_pool *pool;
    pthread_t thread;
    int index;
};

struct x3_pool {
    int n_threads;
    struct worker *workers; /* n_threads - 1 of them: the caller is thread 0 */
    int n_started;
    pthread_mutex_t lock;
    pthread_cond_t work, done;
    uint64_t round; /* a new value wakes the workers */
    int n_busy;
    bool stop;
    size_t n_items;
    atomic_size_t next;
    void (*fn)(void *, size_t, int);
    void *arg;
};

static void run_items(x3_pool *pool, int thread)
{
    size_t item;

    while ((item = atomic_fetch_add(&pool->next, 1)) < pool->n_items)
        pool->fn(pool->arg, item, thread);
}

static void *worker_main(void *p)
{
    struct worker *w = p;
    x3_pool *pool = w->pool;
    uint64_t seen = 0;

    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (pool->round == seen && !pool->stop)
            pthread_cond_wait(&pool->work, &pool->lock);
        if (pool->stop)
            break;
        seen = pool->round;
        pthread_mutex_unlock(&pool->lock);
        run_items(pool, w->index);
        pthread_mutex_lock(&pool->lock);
        if (--pool->n_busy == 0)
            pthread_cond_signal(&pool->done);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

x3_status x3_pool_create(x3_pool **out, int n_threads, x3_err *err)
{
    x3_pool *pool = NULL;
    x3_status rc;

    *out = NULL;
    if (n_threads == 0) {
        long n = sysconf(_SC_NPROCESSORS_ONLN);
        n_threads = n < 1 ? 1 : n > 256 ? 256 : (int)n;
    }
    X3_TRY(rc, out, x3_alloc(&pool, 1, sizeof *pool, err));
    pool->n_threads = n_threads;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->work, NULL);
    pthread_cond_init(&pool->done, NULL);
    X3_TRY(rc, out, x3_alloc(&pool->workers, (uint64_t)n_threads, sizeof *pool->workers, err));
    for (int i = 1; i < n_threads; i++) {
        struct worker *w = &pool->workers[i - 1];
        w->pool = pool;
        w->index = i;
        if (pthread_create(&w->thread, NULL, worker_main, w) != 0) {
            rc = x3_fail(err, X3_ERR_MEMORY, "cannot start thread %d of %d", i + 1, n_threads);
            goto out;
        }
        pool->n_started++;
    }
    *out = pool;
    pool = NULL;
out:
    x3_pool_free(pool);
    return rc;
}

void x3_pool_free(x3_pool *pool)
{
    if (pool == NULL)
        return;
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    for (int i = 0; i < pool->n_started; i++)
        pthread_join(pool->workers[i].thread, NULL);
    pthread_cond_destroy(&pool->work);
    pthread_cond_destroy(&pool->done);
    pthread_mutex_destroy(&pool->lock);
    free(pool->workers);
    free(pool);
}

int x3_pool_threads(const x3_pool *pool)
{
    return pool == NULL ? 1 : pool->n_threads;
}

void x3_pool_run(x3_pool *pool, size_t n_items, void (*fn)(void *, size_t, int), void *arg)
{
    if (pool == NULL || pool->n_threads == 1 || n_items <= 1) {
        for (size_t i = 0; i < n_items; i++)
            fn(arg, i, 0);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->n_items = n_items;
    pool->fn = fn;
    pool->arg = arg;
    atomic_store(&pool->next, 0);
    pool->n_busy = pool->n_threads - 1;
    pool->round++;
    pthread_cond_broadcast(&pool->work);
    pthread_mutex_unlock(&pool->lock);
    run_items(pool, 0);
    pthread_mutex_lock(&pool->lock);
    while (pool->n_busy > 0)
        pthread_cond_wait(&pool->done, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}
