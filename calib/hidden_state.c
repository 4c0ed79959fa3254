#include "calib/hidden_state.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/io.h"

static x3_status file_of(const x3_hidden_state *h, size_t layer, char **path, x3_err *err)
{
    return x3_asprintf(path, err, "%s/hidden-%s-%05zu.f32", h->dir, h->path_name, layer);
}

x3_status x3_hidden_state_create(x3_hidden_state **out, const char *dir, const char *path_name, size_t n_rows,
                                 size_t row_floats, bool in_ram, x3_err *err)
{
    x3_hidden_state *h = NULL;
    uint64_t n;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&h, 1, sizeof *h, err));
    h->fd_from = h->fd_to = -1;
    h->layer = SIZE_MAX;
    h->n_rows = n_rows;
    h->row_floats = row_floats;
    X3_TRY(rc, out, x3_strdup(&h->dir, dir, err));
    X3_TRY(rc, out, x3_strdup(&h->path_name, path_name, err));
    if (x3_mul_overflows(n_rows, row_floats, &n)) {
        rc = x3_fail(err, X3_ERR_MEMORY, "hidden states of %zu x %zu are too many", n_rows, row_floats);
        goto out;
    }
    if (in_ram)
        X3_TRY(rc, out, x3_alloc(&h->ram, n, sizeof(float), err));
    *out = h;
    h = NULL;
out:
    x3_hidden_state_free(h);
    return rc;
}

void x3_hidden_state_free(x3_hidden_state *h)
{
    if (h == NULL)
        return;
    if (h->fd_from >= 0)
        close(h->fd_from);
    if (h->fd_to >= 0)
        close(h->fd_to);
    free(h->ram);
    free(h->dir);
    free(h->path_name);
    free(h);
}

static x3_status open_file(const x3_hidden_state *h, size_t layer, int flags, int *fd, x3_err *err)
{
    char *path = NULL;
    x3_status rc = file_of(h, layer, &path, err);

    if (rc != X3_OK)
        return rc;
    *fd = open(path, flags | O_CLOEXEC, 0666);
    if (*fd < 0)
        rc = x3_fail(err, X3_ERR_IO, "%s: cannot open: %s", path, strerror(errno));
    free(path);
    return rc;
}

x3_status x3_hidden_state_read(x3_hidden_state *h, size_t row, size_t n, float *out, x3_err *err)
{
    if (h->ram != NULL) {
        memcpy(out, h->ram + row * h->row_floats, n * h->row_floats * sizeof *out);
        return X3_OK;
    }
    return x3_pread_all(h->fd_from, out, n * h->row_floats * sizeof *out, (uint64_t)row * h->row_floats * sizeof *out,
                        h->path_name, err);
}

x3_status x3_hidden_state_write(x3_hidden_state *h, size_t row, size_t n, const float *in, x3_err *err)
{
    if (h->ram != NULL) {
        memcpy(h->ram + row * h->row_floats, in, n * h->row_floats * sizeof *in);
        return X3_OK;
    }
    if (h->fd_to < 0) {
        x3_status rc = open_file(h, h->layer + 1, O_RDWR | O_CREAT | O_TRUNC, &h->fd_to, err);
        if (rc != X3_OK)
            return rc;
    }
    return x3_pwrite_all(h->fd_to, in, n * h->row_floats * sizeof *in, (uint64_t)row * h->row_floats * sizeof *in,
                         h->path_name, err);
}

x3_status x3_hidden_state_start(x3_hidden_state *h, x3_err *err)
{
    (void)err;
    h->layer = 0;
    if (h->fd_to >= 0) {
        h->fd_from = h->fd_to;
        h->fd_to = -1;
    }
    return X3_OK;
}

x3_status x3_hidden_state_advance(x3_hidden_state *h, uint64_t *hash, x3_err *err)
{
    const size_t n_bytes = h->n_rows * h->row_floats * sizeof(float);
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, file_of(h, h->layer + 1, &path, err));
    if (h->ram != NULL) {
        *hash = x3_hash(h->ram, n_bytes);
        X3_TRY(rc, out, x3_write_file(path, h->ram, n_bytes, err));
    } else {
        if (fsync(h->fd_to) != 0) {
            rc = x3_fail(err, X3_ERR_IO, "%s: cannot sync: %s", path, strerror(errno));
            goto out;
        }
        X3_TRY(rc, out, x3_hash_file(path, hash, err));
        if (h->fd_from >= 0)
            close(h->fd_from);
        h->fd_from = h->fd_to;
        h->fd_to = -1;
    }
    h->layer++;
    rc = x3_sync_dir(h->dir, err);
out:
    free(path);
    return rc;
}

x3_status x3_hidden_state_restore(x3_hidden_state *h, size_t layer, uint64_t hash, x3_err *err)
{
    char *path = NULL;
    uint64_t found;
    x3_status rc;

    X3_TRY(rc, out, file_of(h, layer, &path, err));
    X3_TRY(rc, out, x3_hash_file(path, &found, err));
    if (found != hash) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: holds other bytes than the record of layer %zu says", path, layer);
        goto out;
    }
    h->layer = layer;
    if (h->fd_from >= 0)
        close(h->fd_from);
    h->fd_from = -1;
    X3_TRY(rc, out, open_file(h, layer, O_RDONLY, &h->fd_from, err));
    if (h->ram != NULL) {
        rc = x3_pread_all(h->fd_from, h->ram, h->n_rows * h->row_floats * sizeof(float), 0, path, err);
        close(h->fd_from);
        h->fd_from = -1;
    }
out:
    free(path);
    return rc;
}

x3_status x3_hidden_state_drop(const x3_hidden_state *h, size_t layer, x3_err *err)
{
    char *path = NULL;
    x3_status rc = file_of(h, layer, &path, err);

    if (rc == X3_OK && unlink(path) != 0 && errno != ENOENT)
        rc = x3_fail(err, X3_ERR_IO, "%s: cannot remove: %s", path, strerror(errno));
    free(path);
    return rc;
}
