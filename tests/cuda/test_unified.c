/* Weights that the GPU reads where a checkpoint's files are mapped. In a file that comes last: a GPU that cannot do what it
 * says takes every later test with it. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/device/device_cuda.h"
#include "runtime/serve/resident.h"
#include "tests/cuda/device_pair.h"
#include "tests/family_check.h"
#include "tests/test.h"

#define N 40
#define STEPS 6 /* of one row after the first one: recorded and repeated */

static int attribute(x3_device *dev, enum cudaDeviceAttr which)
{
    int value = 0;
    x3_err err = {0};

    CHECK_OK(x3_cuda_result(cudaDeviceGetAttribute(&value, which, x3_cuda(dev)->info.device), "attribute", &err), &err);
    return value;
}

X3_TEST(cuda_weights_are_used_in_place_only_where_memory_is_the_hosts)
{
    x3_pair p = x3_pair_open();
    const int integrated = attribute(p.gpu, cudaDevAttrIntegrated), pageable = attribute(p.gpu, cudaDevAttrPageableMemoryAccess);

    printf("    integrated %d, pageable memory access %d, by the host's page tables %d\n", integrated, pageable,
           attribute(p.gpu, cudaDevAttrPageableMemoryAccessUsesHostPageTables));
    CHECK(p.gpu->in_place_align == (integrated && pageable ? 16 : 0));
    x3_pair_close(&p);
}

/* Logits of the steps [1 + STEPS][vocab]. */
static float *run(x3_device *dev, const char *dir, size_t align, x3_resident_memory *announced, size_t *held)
{
    const x3_resident_options o = {.max_positions = 64, .max_rows = 64, .max_outputs = 1, .n_pages = 1, .n_slots = 1};
    x3_sequence s = {.n_rows = N, .pages = (const int32_t[]){0}};
    x3_checkpoint *c = x3_test_open_model(dir);
    const size_t vocab = c->model->vocab, before = dev->used_bytes;
    float *logits = malloc((1 + STEPS) * vocab * sizeof *logits);
    int32_t ids[N];
    x3_resident *r;
    x3_err err = {0};

    dev->in_place_align = align;
    if (align != 0)
        CHECK_OK(x3_safetensors_map(c->st, &err), &err);
    CHECK_OK(x3_resident_memory_of(announced, dev, c, &o, &err), &err);
    CHECK_OK(x3_resident_create(&r, dev, c, &o, &err), &err);
    *held = dev->used_bytes - before;
    for (size_t step = 0; step <= STEPS; step++) {
        const size_t last = s.n_rows - 1;
        for (size_t i = 0; i < s.n_rows; i++)
            ids[i] = (int32_t)(32 + 11 * (s.position + i) % 60);
        CHECK_OK(x3_resident_step(r, &s, 1, ids, s.n_rows, &last, 1, logits + step * vocab, &err), &err);
        s.position += s.n_rows;
        s.n_rows = 1;
    }
    x3_resident_free(r);
    x3_checkpoint_close(c);
    return logits;
}

/* Mapped or not, the same bits; what is mapped is not held. */
static void check_model(const x3_pair *p, const char *dir)
{
    x3_resident_memory none, m;
    size_t all, held;
    x3_checkpoint *c = x3_test_open_model(dir);
    const size_t n = (1 + STEPS) * c->model->vocab;
    float *x = run(p->gpu, dir, 0, &none, &all), *y = run(p->gpu, dir, 16, &m, &held);

    CHECK(none.mapped == 0 && m.mapped > 0);
    CHECK_MSG(memcmp(x, y, n * sizeof *x) == 0, "%s: other logits with weights in place", dir);
    CHECK_MSG(all - held == m.mapped, "%s: %zu bytes mapped, held %zu and %zu", dir, m.mapped, all, held);
    free(x);
    free(y);
    x3_checkpoint_close(c);
}

/* As on a GPU whose memory is the host's: in_place_align is what makes the difference. */
X3_TEST(cuda_weights_in_place_give_the_bits_of_copied_ones)
{
    x3_pair p = x3_pair_open();
    char root[300], dir[360], pack[400];

    if (!attribute(p.gpu, cudaDevAttrPageableMemoryAccess)) {
        x3_pair_close(&p);
        x3_test_skip("this GPU does not read pageable memory");
    }
    snprintf(root, sizeof root, "%s", x3_test_temp_dir());
    snprintf(dir, sizeof dir, "%s/moe", root);
    x3_test_write_moe(dir, "glm4_moe", 1);
    check_model(&p, dir);
    snprintf(pack, sizeof pack, "%s/pack", root);
    x3_test_write_mixed_pack(root, "qwen3_moe", pack);
    check_model(&p, pack);
    x3_pair_close(&p);
}
