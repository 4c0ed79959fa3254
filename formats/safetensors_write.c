#include "formats/safetensors_write.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "formats/io.h"
#include "formats/json.h"

#define ALIGNMENT 64

static x3_status size_of(x3_out_tensor *t, x3_err *err)
{
    uint64_t n = x3_dtype_bytes(t->dtype);

    for (int i = 0; i < t->rank; i++)
        if (x3_mul_overflows(n, t->shape[i], &n))
            return x3_fail(err, X3_ERR_INPUT, "%s: its size overflows", t->name);
    t->n_bytes = n;
    return X3_OK;
}

static x3_status describe(const x3_out_tensor *t, uint64_t data_offset, cJSON *header, x3_err *err)
{
    cJSON *entry = cJSON_CreateObject(), *shape, *offsets;
    x3_status rc;

    X3_TRY(rc, out, x3_json_add(header, t->name, entry, err));
    X3_TRY(rc, out, x3_json_add(entry, "dtype", cJSON_CreateString(x3_dtype_name(t->dtype)), err));
    X3_TRY(rc, out, x3_json_add(entry, "shape", shape = cJSON_CreateArray(), err));
    for (int i = 0; i < t->rank; i++)
        X3_TRY(rc, out, x3_json_add(shape, NULL, cJSON_CreateNumber((double)t->shape[i]), err));
    X3_TRY(rc, out, x3_json_add(entry, "data_offsets", offsets = cJSON_CreateArray(), err));
    X3_TRY(rc, out, x3_json_add(offsets, NULL, cJSON_CreateNumber((double)data_offset), err));
    X3_TRY(rc, out, x3_json_add(offsets, NULL, cJSON_CreateNumber((double)(data_offset + t->n_bytes)), err));
out:
    return rc;
}

x3_status x3_safetensors_layout(x3_out_tensor *const *tensors, size_t n, char **header, size_t *header_bytes,
                                uint64_t *file_bytes, x3_err *err)
{
    cJSON *json = cJSON_CreateObject(), *metadata = cJSON_CreateObject();
    char *text = NULL;
    uint64_t at = 0;
    x3_status rc;

    *header = NULL;
    X3_TRY(rc, out, x3_json_add(json, "__metadata__", metadata, err));
    X3_TRY(rc, out, x3_json_add(metadata, "format", cJSON_CreateString("pt"), err));
    for (size_t i = 0; i < n; i++)
        X3_TRY(rc, out, size_of(tensors[i], err));
    for (int odd = 0; odd < 2; odd++)
        for (size_t i = 0; i < n; i++) {
            x3_out_tensor *t = tensors[i];
            if ((t->n_bytes % ALIGNMENT != 0) != odd)
                continue;
            t->offset = at;
            X3_TRY(rc, out, describe(t, at, json, err));
            if (x3_add_overflows(at, t->n_bytes, &at)) {
                rc = x3_fail(err, X3_ERR_INPUT, "%s: the file's size overflows", t->name);
                goto out;
            }
        }
    text = cJSON_PrintUnformatted(json);
    if (text == NULL) {
        rc = x3_fail(err, X3_ERR_MEMORY, "out of memory: safetensors header");
        goto out;
    }
    size_t used = strlen(text);
    uint64_t padded = x3_round_up(used + 8, ALIGNMENT) - 8;
    X3_TRY(rc, out, x3_alloc(header, padded + 8, 1, err));
    memset(*header, ' ', padded + 8);
    for (int i = 0; i < 8; i++)
        (*header)[i] = (char)(padded >> (8 * i));
    memcpy(*header + 8, text, used);
    *header_bytes = padded + 8;
    *file_bytes = *header_bytes + at;
    for (size_t i = 0; i < n; i++)
        tensors[i]->offset += *header_bytes;
out:
    cJSON_free(text);
    cJSON_Delete(json);
    return rc;
}

x3_status x3_safetensors_save(const char *path, x3_out_tensor *const *tensors, const void *const *data, size_t n, x3_err *err)
{
    char *header = NULL, *temporary = NULL;
    size_t header_bytes = 0;
    uint64_t file_bytes = 0;
    x3_status rc;
    int fd = -1;

    X3_TRY(rc, out, x3_safetensors_layout(tensors, n, &header, &header_bytes, &file_bytes, err));
    X3_TRY(rc, out, x3_asprintf(&temporary, err, "%s.tmp", path));
    fd = open(temporary, O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
    if (fd < 0) {
        rc = x3_fail(err, X3_ERR_IO, "%s: cannot create", temporary);
        goto out;
    }
    X3_TRY(rc, out, x3_pwrite_all(fd, header, header_bytes, 0, temporary, err));
    for (size_t i = 0; i < n; i++) {
        tensors[i]->hash = x3_hash(data[i], tensors[i]->n_bytes);
        X3_TRY(rc, out, x3_pwrite_all(fd, data[i], tensors[i]->n_bytes, tensors[i]->offset, temporary, err));
    }
    if (fsync(fd) != 0) {
        rc = x3_fail(err, X3_ERR_IO, "%s: cannot sync", temporary);
        goto out;
    }
    rc = x3_rename(temporary, path, err);
out:
    if (fd >= 0)
        close(fd);
    if (rc != X3_OK && temporary != NULL)
        unlink(temporary);
    free(temporary);
    free(header);
    return rc;
}
