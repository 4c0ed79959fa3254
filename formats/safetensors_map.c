/* Mappings of the shards of an open checkpoint. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include "formats/safetensors.h"
#include "formats/safetensors_opening.h"

typedef unsigned long long ull; /* for %llu */

static x3_status stat_shard(const x3_shard *shard, struct stat *s, x3_err *err)
{
    if (fstat(shard->fd, s) != 0)
        return x3_fail(err, X3_ERR_IO, "%s: cannot stat it: %s", shard->path, strerror(errno));
    if ((uint64_t)s->st_size != shard->n_bytes)
        return x3_fail(err, X3_ERR_INPUT, "%s: has %llu bytes, it had %llu when it was opened: the file has changed", shard->path,
                       (ull)s->st_size, (ull)shard->n_bytes);
    return X3_OK;
}

static x3_status map_shard(x3_shard *shard, x3_err *err)
{
    struct stat s;
    x3_status rc = stat_shard(shard, &s, err);

    if (rc != X3_OK || shard->mapped != NULL || shard->n_bytes == 0 || shard->n_bytes > SIZE_MAX)
        return rc;
    void *p = mmap(NULL, (size_t)shard->n_bytes, PROT_READ, MAP_SHARED, shard->fd, 0);
    if (p == MAP_FAILED && errno == ENODEV)
        return X3_OK;
    if (p == MAP_FAILED)
        return x3_fail(err, X3_ERR_IO, "%s: cannot map %llu bytes: %s", shard->path, (ull)shard->n_bytes, strerror(errno));
    /* advice alone: reading ahead hides the disk from the first step */
    (void)posix_madvise(p, (size_t)shard->n_bytes, POSIX_MADV_WILLNEED);
    shard->mapped = p;
    shard->modified_s = s.st_mtim.tv_sec;
    shard->modified_ns = s.st_mtim.tv_nsec;
    return X3_OK;
}

x3_status x3_safetensors_map(x3_safetensors *st, x3_err *err)
{
    x3_status rc = X3_OK;

    for (size_t i = 0; i < st->n_shards && rc == X3_OK; i++)
        rc = map_shard(&st->shards[i], err);
    return rc;
}

void x3_st_unmap(x3_shard *shard)
{
    if (shard->mapped != NULL)
        munmap((void *)(uintptr_t)shard->mapped, (size_t)shard->n_bytes);
    shard->mapped = NULL;
}

const void *x3_safetensors_mapped(const x3_safetensors *st, const x3_tensor *t, uint64_t begin, size_t alignment)
{
    const x3_shard *shard = &st->shards[t->shard];

    if (shard->mapped == NULL || begin > t->n_bytes || (t->offset + begin) % alignment != 0)
        return NULL;
    return shard->mapped + t->offset + begin;
}

x3_status x3_safetensors_unchanged(const x3_safetensors *st, x3_err *err)
{
    struct stat s;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < st->n_shards && rc == X3_OK; i++) {
        const x3_shard *shard = &st->shards[i];
        if (shard->mapped == NULL)
            continue;
        rc = stat_shard(shard, &s, err);
        if (rc == X3_OK && (s.st_mtim.tv_sec != shard->modified_s || s.st_mtim.tv_nsec != shard->modified_ns))
            rc = x3_fail(err, X3_ERR_INPUT, "%s: was written to while its weights were in use: the file has changed", shard->path);
    }
    return rc;
}
