#include "formats/io.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#define COPY_BYTES ((size_t)1 << 22)

static x3_status io_error(x3_err *err, const char *doing, const char *path)
{
    return x3_fail(err, X3_ERR_IO, "%s: %s: %s", path, doing, strerror(errno));
}

x3_status x3_map_open(x3_map *map, const char *path, x3_err *err)
{
    x3_status rc = X3_OK;
    struct stat st;
    int fd;

    *map = (x3_map){0};
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return io_error(err, "cannot open", path);
    if (fstat(fd, &st) != 0) {
        rc = io_error(err, "cannot stat", path);
    } else if (!S_ISREG(st.st_mode)) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: not a regular file", path);
    } else if (st.st_size > 0) {
        void *p = mmap(NULL, (size_t)st.st_size, PROT_READ, MAP_PRIVATE, fd, 0);
        if (p == MAP_FAILED) {
            rc = io_error(err, "cannot map", path);
        } else {
            map->data = p;
            map->n_bytes = (uint64_t)st.st_size;
        }
    }
    close(fd);
    return rc;
}

void x3_map_close(x3_map *map)
{
    if (map->data != NULL)
        munmap((void *)(uintptr_t)map->data, map->n_bytes);
    *map = (x3_map){0};
}

x3_status x3_path_join(char **out, const char *dir, const char *name, x3_err *err)
{
    size_t n = strlen(dir);

    return x3_asprintf(out, err, "%s%s%s", dir, n > 0 && dir[n - 1] == '/' ? "" : "/", name);
}

bool x3_path_exists(const char *path)
{
    struct stat st;

    return lstat(path, &st) == 0;
}

bool x3_path_is_dir(const char *path)
{
    struct stat st;

    return stat(path, &st) == 0 && S_ISDIR(st.st_mode);
}

static bool is_inside(const char *inner, const char *outer)
{
    size_t n = strlen(outer);

    if (strncmp(inner, outer, n) != 0)
        return false;
    return inner[n] == '\0' || inner[n] == '/' || (n > 0 && outer[n - 1] == '/');
}

/* The resolved path, or that of the nearest parent that exists with the rest appended. */
static bool resolve(const char *path, char out[PATH_MAX])
{
    char head[PATH_MAX], tail[PATH_MAX] = "";
    size_t n = strlen(path);

    if (n == 0 || n >= sizeof head)
        return false;
    memcpy(head, path, n + 1);
    while (realpath(head, out) == NULL) {
        char joined[PATH_MAX];
        char *slash;
        if (errno != ENOENT)
            return false;
        for (n = strlen(head); n > 1 && head[n - 1] == '/'; n--)
            head[n - 1] = '\0';
        slash = strrchr(head, '/');
        const char *last = slash == NULL ? head : slash + 1;
        if (snprintf(joined, sizeof joined, "/%s%s", last, tail) >= (int)sizeof joined)
            return false;
        memcpy(tail, joined, sizeof tail);
        if (slash == NULL)
            memcpy(head, ".", 2);
        else
            slash[slash == head ? 1 : 0] = '\0';
    }
    n = strlen(out);
    if (n + strlen(tail) >= PATH_MAX)
        return false;
    memcpy(out + n, tail, strlen(tail) + 1);
    return true;
}

size_t x3_path_trimmed(const char *path)
{
    size_t n = strlen(path);

    while (n > 1 && path[n - 1] == '/')
        n--;
    return n;
}

bool x3_path_overlaps(const char *a, const char *b)
{
    char real_a[PATH_MAX], real_b[PATH_MAX];
    struct stat st_a, st_b;

    if (stat(a, &st_a) == 0 && stat(b, &st_b) == 0 && st_a.st_dev == st_b.st_dev && st_a.st_ino == st_b.st_ino)
        return true;
    if (!resolve(a, real_a) || !resolve(b, real_b))
        return false;
    return is_inside(real_a, real_b) || is_inside(real_b, real_a);
}

x3_status x3_mkdirs(const char *path, x3_err *err)
{
    char *copy = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_strdup(&copy, path, err));
    for (char *p = copy + 1; *p != '\0'; p++) {
        if (*p != '/')
            continue;
        *p = '\0';
        if (mkdir(copy, 0777) != 0 && errno != EEXIST) {
            rc = io_error(err, "cannot create folder", copy);
            goto out;
        }
        *p = '/';
    }
    if (mkdir(copy, 0777) != 0 && errno != EEXIST)
        rc = io_error(err, "cannot create folder", copy);
    else if (!x3_path_is_dir(copy))
        rc = x3_fail(err, X3_ERR_IO, "%s: exists and is not a folder", copy);
out:
    free(copy);
    return rc;
}

static int compare_names(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

x3_status x3_list_dir(x3_names *names, const char *dir, x3_err *err)
{
    x3_status rc = X3_OK;
    struct dirent *entry;
    DIR *d = opendir(dir);

    *names = (x3_names){0};
    if (d == NULL)
        return io_error(err, "cannot list folder", dir);
    while ((entry = readdir(d)) != NULL) {
        if (strcmp(entry->d_name, ".") == 0 || strcmp(entry->d_name, "..") == 0)
            continue;
        X3_TRY(rc, out, x3_grow(&names->items, &names->capacity, names->n_items + 1, sizeof *names->items, err));
        X3_TRY(rc, out, x3_strdup(&names->items[names->n_items], entry->d_name, err));
        names->n_items++;
    }
    if (names->n_items > 0)
        qsort(names->items, names->n_items, sizeof *names->items, compare_names);
out:
    closedir(d);
    if (rc != X3_OK)
        x3_names_free(names);
    return rc;
}

void x3_names_free(x3_names *names)
{
    for (size_t i = 0; i < names->n_items; i++)
        free(names->items[i]);
    free(names->items);
    *names = (x3_names){0};
}

x3_status x3_remove_tree(const char *path, x3_err *err)
{
    x3_names names = {0};
    struct stat st;
    x3_status rc = X3_OK;
    char *child = NULL;

    if (lstat(path, &st) != 0)
        return errno == ENOENT ? X3_OK : io_error(err, "cannot stat", path);
    if (!S_ISDIR(st.st_mode))
        return unlink(path) == 0 ? X3_OK : io_error(err, "cannot remove", path);
    X3_TRY(rc, out, x3_list_dir(&names, path, err));
    for (size_t i = 0; i < names.n_items; i++) {
        free(child);
        X3_TRY(rc, out, x3_path_join(&child, path, names.items[i], err));
        X3_TRY(rc, out, x3_remove_tree(child, err));
    }
    if (rmdir(path) != 0)
        rc = io_error(err, "cannot remove folder", path);
out:
    free(child);
    x3_names_free(&names);
    return rc;
}

x3_status x3_sync_dir(const char *dir, x3_err *err)
{
    x3_status rc = X3_OK;
    int fd = open(dir, O_RDONLY | O_DIRECTORY | O_CLOEXEC);

    if (fd < 0)
        return io_error(err, "cannot open folder", dir);
    /* Some network file systems cannot sync a folder and say EINVAL: nothing more can be done there. */
    if (fsync(fd) != 0 && errno != EINVAL && errno != ENOTSUP)
        rc = io_error(err, "cannot sync folder", dir);
    close(fd);
    return rc;
}

x3_status x3_rename(const char *from, const char *to, x3_err *err)
{
    if (rename(from, to) != 0)
        return x3_fail(err, X3_ERR_IO, "%s: cannot rename to %s: %s", from, to, strerror(errno));
    return X3_OK;
}

x3_status x3_pread_all(int fd, void *data, size_t n_bytes, uint64_t offset, const char *path, x3_err *err)
{
    unsigned char *p = data;

    while (n_bytes > 0) {
        ssize_t n = pread(fd, p, x3_min_size(n_bytes, (size_t)1 << 30), (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            return io_error(err, "cannot read", path);
        if (n == 0)
            return x3_fail(err, X3_ERR_IO, "%s: ends at byte %llu, %zu more expected", path,
                           (unsigned long long)offset, n_bytes);
        p += n;
        offset += (uint64_t)n;
        n_bytes -= (size_t)n;
    }
    return X3_OK;
}

x3_status x3_pwrite_all(int fd, const void *data, size_t n_bytes, uint64_t offset, const char *path, x3_err *err)
{
    const unsigned char *p = data;

    while (n_bytes > 0) {
        ssize_t n = pwrite(fd, p, x3_min_size(n_bytes, (size_t)1 << 30), (off_t)offset);
        if (n < 0 && errno == EINTR)
            continue;
        if (n <= 0)
            return io_error(err, "cannot write", path);
        p += n;
        offset += (uint64_t)n;
        n_bytes -= (size_t)n;
    }
    return X3_OK;
}

x3_status x3_read_file(char **out, size_t *n_bytes, const char *path, uint64_t max_bytes, x3_err *err)
{
    x3_status rc = X3_OK;
    struct stat st;
    int fd;

    *out = NULL;
    fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return io_error(err, "cannot open", path);
    if (fstat(fd, &st) != 0) {
        rc = io_error(err, "cannot stat", path);
        goto out;
    }
    if (!S_ISREG(st.st_mode)) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: not a regular file", path);
        goto out;
    }
    if ((uint64_t)st.st_size > max_bytes) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: %llu bytes, at most %llu are read", path, (unsigned long long)st.st_size,
                     (unsigned long long)max_bytes);
        goto out;
    }
    X3_TRY(rc, out, x3_alloc(out, (uint64_t)st.st_size + 1, 1, err));
    X3_TRY(rc, out, x3_pread_all(fd, *out, (size_t)st.st_size, 0, path, err));
    *n_bytes = (size_t)st.st_size;
out:
    close(fd);
    if (rc != X3_OK) {
        free(*out);
        *out = NULL;
    }
    return rc;
}

/* Opens "path.tmp" for writing; the caller fills it and calls commit_temporary. */
static x3_status open_temporary(int *fd, char **name, const char *path, x3_err *err)
{
    x3_status rc = x3_asprintf(name, err, "%s.tmp", path);

    if (rc != X3_OK)
        return rc;
    *fd = open(*name, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    return *fd < 0 ? io_error(err, "cannot create", *name) : X3_OK;
}

static x3_status commit_temporary(int *fd, const char *name, const char *path, x3_err *err)
{
    if (fsync(*fd) != 0)
        return io_error(err, "cannot sync", name);
    if (close(*fd) != 0) {
        *fd = -1;
        return io_error(err, "cannot close", name);
    }
    *fd = -1;
    return x3_rename(name, path, err);
}

static void drop_temporary(int fd, char *name, x3_status rc)
{
    if (fd >= 0)
        close(fd);
    if (rc != X3_OK && name != NULL)
        unlink(name);
    free(name);
}

x3_status x3_write_file(const char *path, const void *data, size_t n_bytes, x3_err *err)
{
    char *name = NULL;
    x3_status rc;
    int fd = -1;

    X3_TRY(rc, out, open_temporary(&fd, &name, path, err));
    X3_TRY(rc, out, x3_pwrite_all(fd, data, n_bytes, 0, name, err));
    X3_TRY(rc, out, commit_temporary(&fd, name, path, err));
out:
    drop_temporary(fd, name, rc);
    return rc;
}

/* Feeds a file to a hash and, when to_fd >= 0, to another file. */
static x3_status stream_file(const char *from, int to_fd, const char *to, uint64_t *hash, x3_err *err)
{
    XXH3_state_t *state = XXH3_createState();
    unsigned char *buffer = NULL;
    uint64_t at = 0;
    x3_status rc;
    int fd = -1;

    X3_TRY(rc, out, x3_alloc(&buffer, COPY_BYTES, 1, err));
    if (state == NULL) {
        rc = x3_fail(err, X3_ERR_MEMORY, "out of memory: hash state");
        goto out;
    }
    XXH3_64bits_reset(state);
    fd = open(from, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        rc = io_error(err, "cannot open", from);
        goto out;
    }
    for (;;) {
        ssize_t n = read(fd, buffer, COPY_BYTES);
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0) {
            rc = io_error(err, "cannot read", from);
            goto out;
        }
        if (n == 0)
            break;
        XXH3_64bits_update(state, buffer, (size_t)n);
        if (to_fd >= 0)
            X3_TRY(rc, out, x3_pwrite_all(to_fd, buffer, (size_t)n, at, to, err));
        at += (uint64_t)n;
    }
    if (hash != NULL)
        *hash = XXH3_64bits_digest(state);
out:
    if (fd >= 0)
        close(fd);
    XXH3_freeState(state);
    free(buffer);
    return rc;
}

x3_status x3_copy_file(const char *from, const char *to, uint64_t *hash, x3_err *err)
{
    char *name = NULL;
    x3_status rc;
    int fd = -1;

    X3_TRY(rc, out, open_temporary(&fd, &name, to, err));
    X3_TRY(rc, out, stream_file(from, fd, name, hash, err));
    X3_TRY(rc, out, commit_temporary(&fd, name, to, err));
out:
    drop_temporary(fd, name, rc);
    return rc;
}

x3_status x3_hash_file(const char *path, uint64_t *hash, x3_err *err)
{
    return stream_file(path, -1, NULL, hash, err);
}
