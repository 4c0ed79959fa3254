#include "calib/hidden_state.h"

#include <assert.h>
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

/* Host memory for n rows. */
static x3_status reserve(x3_hidden_state *h, size_t n, x3_err *err)
{
    if (n * h->row_floats <= h->buffer_floats)
        return X3_OK;
    free(h->buffer);
    h->buffer_floats = 0;
    x3_status rc = x3_alloc(&h->buffer, n * h->row_floats, sizeof *h->buffer, err);
    if (rc == X3_OK)
        h->buffer_floats = n * h->row_floats;
    return rc;
}

x3_status x3_hidden_state_create(x3_hidden_state **out, x3_device *dev, const char *dir, const char *path_name, size_t n_rows,
                                 size_t row_floats, x3_hidden_place place, x3_err *err)
{
    x3_hidden_state *h = NULL;
    uint64_t n;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&h, 1, sizeof *h, err));
    h->dev = dev;
    h->fd_from = h->fd_to = -1;
    h->layer = SIZE_MAX;
    h->n_rows = n_rows;
    h->row_floats = row_floats;
    h->place = place;
    X3_TRY(rc, out, x3_strdup(&h->dir, dir, err));
    X3_TRY(rc, out, x3_strdup(&h->path_name, path_name, err));
    if (x3_mul_overflows(n_rows, row_floats, &n)) {
        rc = x3_fail(err, X3_ERR_MEMORY, "hidden states of %zu x %zu are too many", n_rows, row_floats);
        goto out;
    }
    if (place == X3_HIDDEN_HOST)
        X3_TRY(rc, out, x3_alloc(&h->states, n, sizeof(float), err));
    if (place == X3_HIDDEN_DEVICE)
        X3_TRY(rc, out, x3_device_floats(dev, &h->states, n, err));
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
    if (h->place == X3_HIDDEN_DEVICE)
        x3_device_free(h->dev, h->states);
    else
        free(h->states);
    free(h->buffer);
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

x3_status x3_hidden_state_load(x3_hidden_state *h, size_t row, size_t n, float *d_out, x3_err *err)
{
    return x3_hidden_state_load_part(h, row, n, 0, h->row_floats, d_out, err);
}

/* Floats [first, first + count) of the rows at `states` in host memory, to the device. */
static x3_status upload_part(x3_hidden_state *h, const float *states, size_t n, size_t first, size_t count, float *d_out,
                             x3_err *err)
{
    const x3_device_ops *ops = h->dev->ops;
    x3_status rc = X3_OK;

    if (count == h->row_floats)
        return ops->upload(h->dev, d_out, states, n * count * sizeof *d_out, err);
    for (size_t i = 0; i < n && rc == X3_OK; i++)
        rc = ops->upload(h->dev, d_out + i * count, states + i * h->row_floats + first, count * sizeof *d_out, err);
    return rc;
}

x3_status x3_hidden_state_load_part(x3_hidden_state *h, size_t row, size_t n, size_t first, size_t count, float *d_out,
                                    x3_err *err)
{
    float *states = h->place == X3_HIDDEN_DISK ? NULL : h->states + row * h->row_floats;
    x3_status rc;

    if (h->place == X3_HIDDEN_DEVICE)
        return h->dev->ops->copy_2d(h->dev, d_out, count, states + first, h->row_floats, n, count, err);
    if (h->place == X3_HIDDEN_HOST)
        return upload_part(h, states, n, first, count, d_out, err);
    X3_TRY(rc, out, reserve(h, n, err));
    X3_TRY(rc, out, x3_pread_all(h->fd_from, h->buffer, n * h->row_floats * sizeof *d_out,
                                 (uint64_t)row * h->row_floats * sizeof *d_out, h->path_name, err));
    X3_TRY(rc, out, upload_part(h, h->buffer, n, first, count, d_out, err));
    rc = h->dev->ops->sync(h->dev, err); /* the buffer is free again */
out:
    return rc;
}

static x3_status open_next(x3_hidden_state *h, x3_err *err)
{
    return h->fd_to >= 0 ? X3_OK : open_file(h, h->layer + 1, O_RDWR | O_CREAT | O_TRUNC, &h->fd_to, err);
}

/* Floats [first, first + count) of rows, from `in` [n][count]. */
static x3_status write_part(x3_hidden_state *h, size_t row, size_t n, size_t first, size_t count, const float *in, x3_err *err)
{
    const size_t step = count == h->row_floats ? n : 1; /* rows a piece without gaps */
    x3_status rc = open_next(h, err);

    for (size_t i = 0; i < n && rc == X3_OK; i += step)
        rc = x3_pwrite_all(h->fd_to, in + i * count, step * count * sizeof *in,
                           ((uint64_t)(row + i) * h->row_floats + first) * sizeof *in, h->path_name, err);
    return rc;
}

static x3_status write_file(x3_hidden_state *h, size_t row, size_t n, const float *in, x3_err *err)
{
    return write_part(h, row, n, 0, h->row_floats, in, err);
}

x3_status x3_hidden_state_store(x3_hidden_state *h, size_t row, size_t n, const float *d_in, x3_err *err)
{
    return x3_hidden_state_store_part(h, row, n, 0, h->row_floats, d_in, err);
}

x3_status x3_hidden_state_store_part(x3_hidden_state *h, size_t row, size_t n, size_t first, size_t count, const float *d_in,
                                     x3_err *err)
{
    const x3_device_ops *ops = h->dev->ops;
    float *states = h->place == X3_HIDDEN_DISK ? NULL : h->states + row * h->row_floats;
    x3_status rc = X3_OK;

    if (h->place == X3_HIDDEN_DEVICE)
        return ops->copy_2d(h->dev, states + first, h->row_floats, d_in, count, n, count, err);
    if (h->place == X3_HIDDEN_HOST) {
        const size_t step = count == h->row_floats ? n : 1;
        for (size_t i = 0; i < n && rc == X3_OK; i += step)
            rc = ops->download(h->dev, states + i * h->row_floats + first, d_in + i * count, step * count * sizeof *d_in, err);
        return rc;
    }
    X3_TRY(rc, out, reserve(h, n, err));
    X3_TRY(rc, out, ops->download(h->dev, h->buffer, d_in, n * count * sizeof *d_in, err));
    rc = write_part(h, row, n, first, count, h->buffer, err);
out:
    return rc;
}

x3_status x3_hidden_state_copy(x3_hidden_state *h, const x3_hidden_state *from, x3_err *err)
{
    const size_t bytes = h->n_rows * h->row_floats * sizeof(float);

    assert(h->place == from->place && h->place != X3_HIDDEN_DISK);
    if (h->place == X3_HIDDEN_DEVICE)
        return h->dev->ops->copy(h->dev, h->states, from->states, bytes, err);
    memcpy(h->states, from->states, bytes);
    return X3_OK;
}

x3_status x3_hidden_state_write(x3_hidden_state *h, size_t row, size_t n, const float *in, x3_err *err)
{
    const size_t bytes = n * h->row_floats * sizeof *in;
    x3_status rc;

    if (h->place == X3_HIDDEN_DISK)
        return write_file(h, row, n, in, err);
    if (h->place == X3_HIDDEN_HOST) {
        memcpy(h->states + row * h->row_floats, in, bytes);
        return X3_OK;
    }
    rc = h->dev->ops->upload(h->dev, h->states + row * h->row_floats, in, bytes, err);
    return rc == X3_OK ? h->dev->ops->sync(h->dev, err) : rc;
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

void x3_hidden_state_pass(x3_hidden_state *h)
{
    h->layer++;
}

#define CHUNK ((size_t)64 << 20) /* bytes on their way between device and file */

static size_t chunk_rows(const x3_hidden_state *h)
{
    return x3_max_size(1, x3_min_size(h->n_rows, CHUNK / (h->row_floats * sizeof(float))));
}

/* The device's states to the file of the next layer, synced. */
static x3_status save_from_device(x3_hidden_state *h, x3_err *err)
{
    const size_t at_once = chunk_rows(h);
    x3_status rc = reserve(h, at_once, err);

    for (size_t row = 0; row < h->n_rows && rc == X3_OK; row += at_once) {
        const size_t n = x3_min_size(at_once, h->n_rows - row);
        rc = h->dev->ops->download(h->dev, h->buffer, h->states + row * h->row_floats, n * h->row_floats * sizeof(float), err);
        if (rc == X3_OK)
            rc = write_file(h, row, n, h->buffer, err);
    }
    if (rc == X3_OK && fsync(h->fd_to) != 0)
        rc = x3_fail(err, X3_ERR_IO, "%s: cannot sync hidden states: %s", h->dir, strerror(errno));
    if (h->fd_to >= 0)
        close(h->fd_to);
    h->fd_to = -1;
    return rc;
}

x3_status x3_hidden_state_advance(x3_hidden_state *h, uint64_t *hash, x3_err *err)
{
    const size_t n_bytes = h->n_rows * h->row_floats * sizeof(float);
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, file_of(h, h->layer + 1, &path, err));
    if (h->place == X3_HIDDEN_HOST) {
        *hash = x3_hash(h->states, n_bytes);
        X3_TRY(rc, out, x3_write_file(path, h->states, n_bytes, err));
    } else if (h->place == X3_HIDDEN_DEVICE) {
        X3_TRY(rc, out, save_from_device(h, err));
        X3_TRY(rc, out, x3_hash_file(path, hash, err));
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

/* The open file to the device. */
static x3_status load_to_device(x3_hidden_state *h, const char *path, x3_err *err)
{
    const size_t at_once = chunk_rows(h);
    x3_status rc = reserve(h, at_once, err);

    for (size_t row = 0; row < h->n_rows && rc == X3_OK; row += at_once) {
        const size_t n = x3_min_size(at_once, h->n_rows - row), bytes = n * h->row_floats * sizeof(float);
        rc = x3_pread_all(h->fd_from, h->buffer, bytes, (uint64_t)row * h->row_floats * sizeof(float), path, err);
        if (rc == X3_OK)
            rc = x3_hidden_state_write(h, row, n, h->buffer, err);
    }
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
    if (h->place == X3_HIDDEN_DISK)
        goto out;
    if (h->place == X3_HIDDEN_HOST)
        rc = x3_pread_all(h->fd_from, h->states, h->n_rows * h->row_floats * sizeof(float), 0, path, err);
    else
        rc = load_to_device(h, path, err);
    close(h->fd_from);
    h->fd_from = -1;
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
