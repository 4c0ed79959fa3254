/* Weights that are used where the shards are mapped. */
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "formats/io.h"
#include "runtime/generate.h"
#include "runtime/serve/resident.h"
#include "tests/family_check.h"
#include "tests/family_job.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

#define N 40

/* Logits of the last of N ids; *mapped: bytes of weights in place; *held: what the device holds. align: what it asks of
 * weights in place, 0: maps nothing. */
static float *run(const char *dir, size_t align, x3_resident_memory *announced, size_t *held)
{
    const x3_resident_options o = {.max_positions = 64, .max_rows = 64, .max_outputs = 1, .n_pages = 1, .n_slots = 1};
    const x3_sequence s = {.n_rows = N, .pages = (const int32_t[]){0}};
    const size_t last = N - 1;
    x3_checkpoint *c = x3_test_open_model(dir);
    x3_device *dev = x3_test_open_device();
    float *logits = malloc(c->model->vocab * sizeof *logits);
    x3_resident *r;
    int32_t ids[N];
    x3_err err = {0};

    for (int i = 0; i < N; i++)
        ids[i] = 32 + 11 * i % 60;
    if (align > 0) {
        dev->in_place_align = align;
        CHECK_OK(x3_safetensors_map(c->st, &err), &err);
    }
    CHECK_OK(x3_resident_memory_of(announced, dev, c, &o, &err), &err);
    CHECK_OK(x3_resident_create(&r, dev, c, &o, &err), &err);
    CHECK_OK(x3_resident_step(r, &s, 1, ids, N, &last, 1, logits, &err), &err);
    *held = dev->used_bytes;
    CHECK(announced->mapped + announced->misaligned <= announced->weights);
    x3_resident_free(r);
    CHECK_MSG(dev->used_bytes == 0, "%zu bytes are still held", dev->used_bytes);
    x3_device_close(dev);
    x3_checkpoint_close(c);
    return logits;
}

/* Mapped or not, the same logits; what is mapped is not held, to the byte. */
static x3_resident_memory check_align(const char *dir, size_t align, bool some)
{
    x3_resident_memory none, m;
    size_t all, held;
    x3_checkpoint *c = x3_test_open_model(dir);
    float *x = run(dir, 0, &none, &all), *y = run(dir, align, &m, &held);

    CHECK(none.mapped == 0 && none.misaligned == 0 && memcmp(x, y, c->model->vocab * sizeof *x) == 0);
    CHECK_MSG((m.mapped > 0) == some && all - held == m.mapped, "%s: %zu bytes mapped, held %zu and %zu", dir, m.mapped, all, held);
    free(x);
    free(y);
    x3_checkpoint_close(c);
    return m;
}

static void check_model(const char *dir, bool some)
{
    (void)check_align(dir, 1, some);
}

X3_TEST(mapped_weights_give_the_bits_of_copied_ones)
{
    static const x3_dtype types[] = {X3_BF16, X3_F16, X3_F32};
    char dir[300];
    x3_tiny t = X3_TINY_DEFAULTS;
    x3_err err = {0};

    snprintf(dir, sizeof dir, "%s/model", x3_test_temp_dir());
    for (int i = 0; i < 4; i++) {
        t.dtype = types[i % 3];
        t.tied = i == 3;
        t.shards = i == 1 ? 2 : 1;
        x3_tiny_write(dir, &t);
        check_model(dir, true);
        CHECK_OK(x3_remove_tree(dir, &err), &err);
    }
    for (int i = 0; i < 2; i++) {
        t = X3_TINY_MOE("qwen3_moe");
        t.expert_inner = 32;
        t.stack = i == 0 ? X3_TINY_OUT_IN : X3_TINY_IN_OUT; /* the second has columns of a tensor, which are gathered */
        x3_tiny_write(dir, &t);
        check_model(dir, true);
        CHECK_OK(x3_remove_tree(dir, &err), &err);
    }
}

X3_TEST(mapped_packs_give_the_bits_of_copied_ones)
{
    static const char *const families[] = {"mistral", "qwen3_5_moe"};
    x3_err err = {0};

    for (int i = 0; i < 2; i++) {
        x3_family_job s;
        x3_family_job_setup(&s, families[i], 3);
        CHECK_OK(x3_test_run_job(&s.o, &err), &err);
        check_model(s.out, true);
        CHECK(check_align(s.out, 16, true).misaligned == 0); /* our packs suit GPUs */
    }
}

/* Blanks at the end of the header move every tensor: the first one to `at` more than a multiple of 16. */
static void move_tensors(const char *path, size_t at)
{
    uint64_t n_header;
    char *bytes, *longer;
    size_t n, n_blanks;
    x3_err err = {0};

    CHECK_OK(x3_read_file(&bytes, &n, path, 1 << 24, &err), &err);
    memcpy(&n_header, bytes, 8);
    n_blanks = (16 + at - (8 + n_header) % 16) % 16;
    CHECK_OK(x3_alloc(&longer, n + n_blanks, 1, &err), &err);
    memcpy(longer, bytes, 8 + n_header);
    memset(longer + 8 + n_header, ' ', n_blanks);
    memcpy(longer + 8 + n_header + n_blanks, bytes + 8 + n_header, n - 8 - n_header);
    n_header += n_blanks;
    memcpy(longer, &n_header, 8);
    x3_test_write(path, longer, n + n_blanks);
    free(bytes);
    free(longer);
}

X3_TEST(weights_at_odd_addresses_are_copied_and_counted)
{
    const char *dir = x3_test_path(x3_test_temp_dir(), "odd"), *path = x3_test_path(dir, "model.safetensors");
    x3_tiny t = X3_TINY_DEFAULTS;

    x3_tiny_write(dir, &t);
    move_tensors(path, 0);
    const size_t all = check_align(dir, 1, true).mapped;
    CHECK(all > 0);
    move_tensors(path, 1);
    x3_resident_memory m = check_align(dir, 1, false);
    CHECK(m.misaligned == all);
    /* a device that asks for 16 bytes, as a GPU does */
    move_tensors(path, 8);
    CHECK(check_align(dir, 1, true).mapped == all);
    m = check_align(dir, 16, false);
    CHECK(m.misaligned == all);
    move_tensors(path, 0);
    m = check_align(dir, 16, true);
    CHECK(m.mapped == all && m.misaligned == 0);
}

X3_TEST(weights_are_used_in_place_by_gpus_whose_memory_is_the_hosts)
{
    CHECK(x3_device_in_place(true, true) == 16);
    CHECK(x3_device_in_place(true, false) == 0);
    CHECK(x3_device_in_place(false, true) == 0);
    CHECK(x3_device_in_place(false, false) == 0);
}

X3_TEST(mapped_tensors_are_their_bytes_in_the_file)
{
    const char *dir = x3_test_path(x3_test_temp_dir(), "bytes");
    x3_tiny t = X3_TINY_DEFAULTS;
    x3_err err = {0};

    x3_tiny_write(dir, &t);
    x3_checkpoint *c = x3_test_open_model(dir);
    CHECK(x3_safetensors_mapped(c->st, &c->st->tensors[0], 0, 1) == NULL);
    CHECK_OK(x3_safetensors_map(c->st, &err), &err);
    CHECK_OK(x3_safetensors_map(c->st, &err), &err);
    for (size_t i = 0; i < c->st->n_tensors; i++) {
        const x3_tensor *tensor = &c->st->tensors[i];
        void *read;
        CHECK_OK(x3_safetensors_load(c->st, tensor, &read, &err), &err);
        CHECK(memcmp(read, x3_safetensors_mapped(c->st, tensor, 0, 1), tensor->n_bytes) == 0);
        CHECK(x3_safetensors_mapped(c->st, tensor, (tensor->offset & 1) + 1, 2) == NULL);
        CHECK(x3_safetensors_mapped(c->st, tensor, tensor->n_bytes + 1, 1) == NULL);
        free(read);
    }
    x3_checkpoint_close(c);
}

static x3_status one_step(x3_generator *g, float *logits, x3_err *err)
{
    const int32_t id = 65;

    return x3_generator_feed(g, &id, 1, logits, err);
}

/* Written in place: the next step fails and names the file. Cut to nothing: a page past the end is a signal. */
X3_TEST(mapped_files_that_change_are_no_silent_garbage)
{
    const char *dir = x3_test_path(x3_test_temp_dir(), "changed"), *path = x3_test_path(dir, "model.safetensors");
    x3_tiny t = X3_TINY_DEFAULTS;
    x3_generator *g;
    x3_err err = {0}, none = {0};
    int status;

    x3_tiny_write(dir, &t);
    x3_checkpoint *c = x3_test_open_model(dir);
    x3_device *dev = x3_test_open_device();
    float *logits = malloc(c->model->vocab * sizeof *logits);
    CHECK_OK(x3_safetensors_map(c->st, &err), &err);
    CHECK_OK(x3_generator_create(&g, dev, c, 32, &err), &err);
    CHECK_OK(one_step(g, logits, &err), &err);
    CHECK_OK(x3_safetensors_unchanged(c->st, &err), &err);
    const struct timespec times[2] = {{.tv_nsec = UTIME_OMIT}, {.tv_sec = 1}};
    CHECK(utimensat(AT_FDCWD, path, times, 0) == 0);
    CHECK_FAILS(one_step(g, logits, &err), &err, "model.safetensors: was written to");
    CHECK(truncate(path, (off_t)c->st->shards[0].n_bytes - 1) == 0);
    err = none;
    CHECK_FAILS(one_step(g, logits, &err), &err, "the file has changed");
    CHECK(truncate(path, 0) == 0);
    const pid_t child = fork();
    if (child == 0) {
        signal(SIGBUS, SIG_DFL); /* sanitizers have a handler */
        _exit(((const volatile char *)c->st->shards[0].mapped)[0]);
    }
    CHECK(child > 0 && waitpid(child, &status, 0) == child && WIFSIGNALED(status) && WTERMSIG(status) == SIGBUS);
    x3_generator_free(g);
    free(logits);
    x3_device_close(dev);
    x3_checkpoint_close(c);
}
