#include "tests/family_check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "formats/io.h"
#include "runtime/generate.h"
#include "runtime/stream.h"
#include "tests/test.h"

x3_checkpoint *x3_test_open_model(const char *dir)
{
    x3_findings f = {0};
    x3_err err = {0};
    x3_checkpoint *c = NULL;
    x3_status rc = x3_checkpoint_open(&c, dir, NULL, &f, &err);

    for (size_t i = 0; i < f.n_items; i++)
        printf("  %s\n", f.items[i]);
    CHECK_OK(rc, &err);
    x3_findings_free(&f);
    return c;
}

x3_device *x3_test_open_threads(int n_threads)
{
    x3_device *dev = NULL;
    x3_err err = {0};

    CHECK_OK(x3_device_open(&dev, "cpu", n_threads, &err), &err);
    return dev;
}

x3_device *x3_test_open_device(void)
{
    return x3_test_open_threads(0);
}

reference x3_test_reference(const char *file, const char *ids_name, const char *logits_name)
{
    x3_findings f = {0};
    x3_err err = {0};
    x3_safetensors *st = NULL;
    reference r = {0};
    void *raw = NULL;

    CHECK_OK(x3_safetensors_open(&st, file, &f, &err), &err);
    const x3_tensor *ids = x3_safetensors_find(st, ids_name), *logits = x3_safetensors_find(st, logits_name);
    CHECK_MSG(logits != NULL, "%s lacks %s", file, logits_name);
    if (ids != NULL) {
        CHECK(ids->dtype == X3_I64 || ids->dtype == X3_I32);
        CHECK_OK(x3_safetensors_load(st, ids, &raw, &err), &err);
        r.n_ids = ids->n_elements;
        r.ids = malloc(r.n_ids * sizeof *r.ids);
        for (size_t i = 0; i < r.n_ids; i++)
            r.ids[i] = ids->dtype == X3_I64 ? (int32_t)((int64_t *)raw)[i] : ((int32_t *)raw)[i];
        free(raw);
    }
    r.vocab = logits->shape[logits->rank - 1];
    r.n_logits = logits->n_elements / r.vocab;
    r.step = r.n_ids == 0 ? 0 : (r.n_ids + r.n_logits - 1) / r.n_logits;
    r.logits = malloc(logits->n_elements * sizeof *r.logits);
    CHECK_OK(x3_safetensors_read_f32(st, logits, 0, logits->n_elements, r.logits, &err), &err);
    x3_safetensors_close(st);
    return r;
}

void x3_test_reference_free(reference *r)
{
    free(r->ids);
    free(r->logits);
}

float *x3_test_logits(x3_device *dev, const x3_checkpoint *c, const int32_t *ids, size_t n_ids, size_t step, size_t n)
{
    const size_t hidden = c->model->hidden, vocab = c->model->vocab;
    float *states = malloc(n_ids * hidden * sizeof *states), *logits = malloc(n * vocab * sizeof *logits);
    float *d_states = NULL, *d_logits = NULL;
    x3_weight head = {0};
    x3_err err = {0};

    CHECK_OK(x3_stream_hidden(dev, c, ids, 1, n_ids, states, NULL, &err), &err);
    CHECK_OK(x3_linear_load(&head, dev, c, &c->model->head, &err), &err);
    CHECK_OK(x3_device_floats(dev, &d_states, n_ids * hidden, &err), &err);
    CHECK_OK(x3_device_floats(dev, &d_logits, n * vocab, &err), &err);
    CHECK_OK(dev->ops->upload(dev, d_states, states, n_ids * hidden * sizeof *states, &err), &err);
    CHECK_OK(dev->ops->linear(dev, &head, d_states, hidden * step, n, d_logits, vocab, &err), &err);
    CHECK_OK(dev->ops->download(dev, logits, d_logits, n * vocab * sizeof *logits, &err), &err);
    x3_linear_free(&head, dev);
    x3_device_free(dev, d_states);
    x3_device_free(dev, d_logits);
    free(states);
    return logits;
}

reference x3_test_folder_reference(const char *dir)
{
    char file[1024];

    snprintf(file, sizeof file, "%s/reference_logits.safetensors.ref", dir);
    return x3_test_reference(file, "input_ids", "logits");
}

void x3_test_family_logits(const char *dir, double bound)
{
    reference r = x3_test_folder_reference(dir);
    x3_checkpoint *c = x3_test_open_model(dir);
    x3_device *dev = x3_test_open_device();
    float *logits = x3_test_logits(dev, c, r.ids, r.n_ids, r.step, r.n_logits);
    double worst = 0;

    CHECK(r.vocab == c->model->vocab);
    for (size_t i = 0; i < r.n_logits * r.vocab; i++) {
        CHECK(isfinite(logits[i]));
        worst = fmax(worst, fabs((double)logits[i] - (double)r.logits[i]));
    }
    printf("  %s: largest difference of a logit %.2g\n", dir, worst);
    CHECK_MSG(worst <= bound, "%s: logits differ by %g, at most %g", dir, worst, bound);
    free(logits);
    x3_test_reference_free(&r);
    x3_device_close(dev);
    x3_checkpoint_close(c);
}

/* Feeds ids [from, from + n) and compares the logits of the last with the full pass. */
static double feed(x3_generator *g, const int32_t *ids, size_t from, size_t n, const float *full, float *logits)
{
    const size_t vocab = g->c->model->vocab;
    x3_err err = {0};
    double worst = 0;

    CHECK(g->n_positions == from);
    CHECK_OK(x3_generator_feed(g, ids + from, n, logits, &err), &err);
    for (size_t i = 0; i < vocab; i++) {
        CHECK(isfinite(logits[i]));
        worst = fmax(worst, fabs((double)logits[i] - (double)full[(from + n - 1) * vocab + i]));
    }
    return worst;
}

void x3_test_family_decoding_on(x3_device *dev, const char *dir, double bound)
{
    static const size_t pieces[] = {1, 7, 2, 19, 3};
    reference r = x3_test_folder_reference(dir);
    x3_checkpoint *c = x3_test_open_model(dir);
    float *full = x3_test_logits(dev, c, r.ids, r.n_ids, 1, r.n_ids), *logits = malloc(r.vocab * sizeof *logits);
    const size_t kept = r.n_ids / 2 - 5;
    x3_generator *g = NULL;
    x3_err err = {0};
    double worst = 0;

    CHECK_OK(x3_generator_create(&g, dev, c, r.n_ids, &err), &err);
    for (size_t p = 0; p < r.n_ids; p++)
        worst = fmax(worst, feed(g, r.ids, p, 1, full, logits));
    size_t at = x3_generator_truncate(g, kept);
    CHECK(at == (x3_model_has_states(c->model) ? 0 : kept));
    /* another continuation in between must leave nothing behind */
    CHECK_OK(x3_generator_feed(g, r.ids, 11, logits, &err), &err);
    at = x3_generator_truncate(g, at);
    for (size_t i = 0; at < r.n_ids; i++) {
        size_t n = x3_min_size(pieces[i % 5], r.n_ids - at);
        worst = fmax(worst, feed(g, r.ids, at, n, full, logits));
        at += n;
    }
    printf("  %s: token by token and in pieces within %.2g of one pass\n", dir, worst);
    CHECK_MSG(worst <= bound, "%s: decoding differs by %g from one pass, at most %g", dir, worst, bound);
    x3_generator_free(g);
    free(full);
    free(logits);
    x3_test_reference_free(&r);
    x3_checkpoint_close(c);
}

void x3_test_family_decoding(const char *dir, double bound)
{
    x3_device *dev = x3_test_open_device();

    x3_test_family_decoding_on(dev, dir, bound);
    x3_device_close(dev);
}
