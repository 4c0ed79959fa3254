#include "tests/cuda/device_pair.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "tests/test.h"

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
