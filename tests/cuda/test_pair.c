#include "tests/cuda/device_pair.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"
#include "quant/job_internal.h"
#include "quant/plan.h"
#include "tests/family_check.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

x3_pair x3_pair_open(void)
{
    x3_pair p = {0};
    x3_err err = {0};

    if (x3_device_open(&p.gpu, "cuda", 1, &err) != X3_OK) {
        if (strstr(err.text, "no GPU") != NULL)
            x3_test_skip("no GPU");
        x3_test_fail(__FILE__, __LINE__, "%s", err.text);
    }
    CHECK_OK(x3_device_open(&p.cpu, "cpu", 0, &err), &err);
    return p;
}

void x3_pair_close(x3_pair *p)
{
    x3_device_close(p->cpu);
    x3_device_close(p->gpu);
}

void *x3_pair_upload(const x3_pair *p, const void *from, size_t n_bytes)
{
    void *d = NULL;
    x3_err err = {0};

    CHECK_OK(x3_device_alloc(p->gpu, &d, n_bytes, &err), &err);
    CHECK_OK(p->gpu->ops->upload(p->gpu, d, from, n_bytes, &err), &err);
    CHECK_OK(p->gpu->ops->sync(p->gpu, &err), &err);
    return d;
}

x3_twin x3_twin_random(const x3_pair *p, const char *name, size_t n)
{
    x3_twin t = {.n = n};
    x3_rng rng;
    x3_err err = {0};

    CHECK_OK(x3_alloc(&t.cpu, n, sizeof(float), &err), &err);
    x3_rng_init(&rng, 1, name);
    for (size_t i = 0; i < n; i++)
        t.cpu[i] = (float)x3_rng_normal(&rng);
    t.gpu = x3_pair_upload(p, t.cpu, n * sizeof(float));
    return t;
}

void x3_twin_upload(const x3_pair *p, const x3_twin *t)
{
    x3_err err = {0};

    CHECK_OK(p->gpu->ops->upload(p->gpu, t->gpu, t->cpu, t->n * sizeof(float), &err), &err);
    CHECK_OK(p->gpu->ops->sync(p->gpu, &err), &err);
}

float *x3_twin_download(const x3_pair *p, const x3_twin *t)
{
    float *x = NULL;
    x3_err err = {0};

    CHECK_OK(x3_alloc(&x, t->n, sizeof *x, &err), &err);
    CHECK_OK(p->gpu->ops->download(p->gpu, x, t->gpu, t->n * sizeof *x, &err), &err);
    return x;
}

void x3_twin_free(const x3_pair *p, x3_twin *t)
{
    free(t->cpu);
    x3_device_free(p->gpu, t->gpu);
    *t = (x3_twin){0};
}

double x3_twin_error(const x3_pair *p, const x3_twin *t)
{
    float *x = x3_twin_download(p, t);
    double error = 0, sum = 0;

    for (size_t i = 0; i < t->n; i++) {
        error += ((double)x[i] - t->cpu[i]) * ((double)x[i] - t->cpu[i]);
        sum += (double)t->cpu[i] * t->cpu[i];
    }
    free(x);
    return isfinite(error) && isfinite(sum) ? sqrt(error / (sum + 1e-300)) : INFINITY;
}

bool x3_twin_equal(const x3_pair *p, const x3_twin *t)
{
    float *x = x3_twin_download(p, t);
    bool same = memcmp(x, t->cpu, t->n * sizeof *x) == 0;

    free(x);
    return same;
}

/* ---- weights ---- */

static uint16_t bf16_of(float v)
{
    uint32_t u;

    memcpy(&u, &v, sizeof u);
    return (uint16_t)((u + 0x7FFF + (u >> 16 & 1)) >> 16);
}

x3_twin_weight x3_twin_dense(const x3_pair *p, x3_weight_kind kind, size_t n_out, size_t n_in)
{
    x3_twin_weight w = {.bias = x3_twin_random(p, "bias", n_out)};
    const size_t n = n_out * n_in, bytes = n * (kind == X3_WEIGHT_F32 ? 4 : 2);
    x3_rng rng;
    x3_err err = {0};

    CHECK_OK(x3_alloc(&w.host, bytes, 1, &err), &err);
    x3_rng_init(&rng, 2, "weight");
    for (size_t i = 0; i < n; i++) {
        float v = (float)x3_rng_normal(&rng) * (i % 97 == 0 ? 1e-6f : 0.05f); /* some tiny ones: float16 alone would lose them */
        if (kind == X3_WEIGHT_F32)
            ((float *)w.host)[i] = v;
        else
            ((uint16_t *)w.host)[i] = kind == X3_WEIGHT_BF16 ? bf16_of(v) : x3_f32_to_f16(v);
    }
    w.cpu = w.gpu = (x3_weight){.kind = kind, .n_in = n_in, .n_out = n_out, .n_in_padded = n_in, .n_out_padded = n_out};
    w.cpu.data = w.host;
    w.gpu.data = x3_pair_upload(p, w.host, bytes);
    w.cpu.bias = w.bias.cpu;
    w.gpu.bias = w.bias.gpu;
    return w;
}

x3_twin_weight x3_twin_exl3(const x3_pair *p, int K, x3_codebook codebook, size_t n_out, size_t n_in)
{
    x3_twin_weight w = {.bias = x3_twin_random(p, "bias", n_out)};
    const size_t in = x3_round_up(n_in, 128), out = x3_round_up(n_out, 128), n_words = in / 16 * (out / 16) * 8 * (size_t)K;
    x3_rng rng;
    x3_err err = {0};

    CHECK_OK(x3_alloc(&w.host, n_words, 4, &err), &err);
    CHECK_OK(x3_alloc(&w.scales, in + out, 2, &err), &err);
    x3_rng_init(&rng, (uint64_t)K, "words");
    for (size_t i = 0; i < n_words; i++)
        ((uint32_t *)w.host)[i] = (uint32_t)x3_rng_next(&rng);
    for (size_t i = 0; i < in + out; i++)
        w.scales[i] = x3_f32_to_f16((float)((x3_rng_uniform(&rng) + 0.5) * (x3_rng_next(&rng) & 1 ? 1 : -1)) * (i < in ? 0.02f : 1));
    w.cpu = w.gpu = (x3_weight){.kind = X3_WEIGHT_EXL3, .n_in = n_in, .n_out = n_out, .n_in_padded = in, .n_out_padded = out, .K = K,
                                .codebook = codebook};
    w.cpu.data = w.host;
    w.cpu.suh = w.scales;
    w.cpu.svh = w.scales + in;
    w.cpu.bias = w.bias.cpu;
    w.gpu.data = x3_pair_upload(p, w.host, n_words * 4);
    w.gpu.suh = x3_pair_upload(p, w.cpu.suh, in * 2);
    w.gpu.svh = x3_pair_upload(p, w.cpu.svh, out * 2);
    w.gpu.bias = w.bias.gpu;
    return w;
}

void x3_twin_weight_free(const x3_pair *p, x3_twin_weight *w)
{
    x3_device_free(p->gpu, (void *)(uintptr_t)w->gpu.data);
    x3_device_free(p->gpu, (void *)(uintptr_t)w->gpu.suh);
    x3_device_free(p->gpu, (void *)(uintptr_t)w->gpu.svh);
    x3_twin_free(p, &w->bias);
    free(w->host);
    free(w->scales);
}

/* ---- models with experts ---- */

void x3_test_write_moe(const char *dir, const char *type, size_t dense)
{
    const float correction[8] = {0.4f, -0.3f, 0.1f, 0, 0.2f, -0.1f, 0.3f, 0};
    x3_tiny t = X3_TINY_MOE(type);

    t.dense = dense;
    t.correction = correction;
    x3_tiny_write(dir, &t);
}

void x3_test_write_mixed_pack(const char *root, const char *type, const char *pack)
{
    static const char *const texts[] = {"tests/data/text/calib_prose.txt"};
    char model[400], recipe[400];
    x3_job_options o = {.model = model, .out = pack, .recipe = recipe, .quant = X3_QUANT_DEFAULTS, .texts = texts, .n_texts = 1, .rows = 4,
                        .cols = 64, .device = "cpu", .command = "test"};
    x3_findings findings = {0};
    x3_allocation uniform;
    x3_recipe *r = NULL;
    x3_job *job = NULL;
    x3_err err = {0};

    snprintf(model, sizeof model, "%s/model", root);
    snprintf(recipe, sizeof recipe, "%s/recipe.yaml", root);
    x3_test_write_moe(model, type, 0);
    x3_checkpoint *c = x3_test_open_model(model);
    CHECK_OK(x3_allocate_uniform(&uniform, c->model, 4, 6, X3_TIE_NONE, &err), &err);
    CHECK_OK(x3_recipe_of(&r, c->model, &uniform, &err), &err);
    for (size_t i = 0; i < r->n_tensors; i++)
        if (strstr(r->tensors[i].name, ".experts.") != NULL)
            r->tensors[i].bits = 1 + (int)(i * 5 % 8);
    CHECK_OK(x3_recipe_save(r, recipe, &err), &err);
    x3_recipe_free(r);
    x3_allocation_free(&uniform);
    x3_checkpoint_close(c);
    CHECK_OK(x3_job_open(&job, &o, NULL, &findings, &err), &err);
    CHECK_OK(x3_job_run(job, &err), &err);
    x3_job_close(job);
    x3_findings_free(&findings);
}
