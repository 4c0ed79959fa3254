/* libFuzzer target: any bytes as a safetensors file. Opening must not crash, must say the same twice, and every
 * tensor of a file that opens must be readable.
 *
 *     clang -fsanitize=fuzzer,address,undefined … tests/fuzz_safetensors.c formats/…c -lcjson -lxxhash -lm */
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "formats/io.h"
#include "formats/safetensors.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void must(bool condition)
{
    if (!condition)
        abort();
}

static void read_all(const x3_safetensors *st, size_t n_bytes)
{
    uint64_t total = 0;

    for (size_t i = 0; i < st->n_tensors; i++) {
        const x3_tensor *t = &st->tensors[i];
        void *bytes = NULL;
        float *values = NULL;
        must(x3_safetensors_load(st, t, &bytes, NULL) == X3_OK);
        must(x3_safetensors_find(st, t->name) == t);
        must(x3_alloc(&values, t->n_elements, sizeof *values, NULL) == X3_OK);
        must(x3_safetensors_read_f32(st, t, 0, t->n_elements, values, NULL) ==
             (x3_dtype_is_float(t->dtype) ? X3_OK : X3_ERR_UNSUPPORTED));
        total += t->n_bytes;
        free(values);
        free(bytes);
    }
    must(total == st->total_bytes && 8 + st->shards[0].header_bytes + total == n_bytes);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    x3_findings first = {0}, second = {0};
    x3_safetensors *st = NULL, *again = NULL;
    x3_err err = {0};
    char path[40];
    int fd = memfd_create("fuzz", MFD_CLOEXEC);

    must(fd >= 0 && x3_pwrite_all(fd, data, n_bytes, 0, "memfd", &err) == X3_OK);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    x3_status rc = x3_safetensors_open(&st, path, &first, &err);
    must(rc == X3_OK || (rc == X3_ERR_INPUT && st == NULL && first.n_items > 0));
    must(x3_safetensors_open(&again, path, &second, NULL) == rc);
    must(first.n_items == second.n_items && first.n_dropped == second.n_dropped);
    if (st != NULL)
        read_all(st, n_bytes);
    x3_safetensors_close(st);
    x3_safetensors_close(again);
    x3_findings_free(&first);
    x3_findings_free(&second);
    close(fd);
    return 0;
}
