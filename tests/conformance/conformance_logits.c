/* Logits against transformers (reference_logits.safetensors.ref) and against the peer's packs (golden/packs). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/stream.h"
#include "tests/test.h"

static x3_checkpoint *open_model(const char *name)
{
    x3_findings f = {0};
    x3_err err = {0};
    x3_checkpoint *c = NULL;

    CHECK_OK(x3_checkpoint_open(&c, x3_test_path(x3_test_data_dir(), name), NULL, &f, &err), &err);
    return c;
}

static x3_device *open_device(void)
{
    x3_device *dev = NULL;
    x3_err err = {0};

    CHECK_OK(x3_device_open(&dev, "cpu", 0, &err), &err);
    return dev;
}

/* Reference: ids of one sequence and logits at every `step`-th position. */
typedef struct reference {
    int32_t *ids;
    size_t n_ids, n_logits, vocab, step;
    float *logits;
} reference;

static reference load_reference(const char *file, const char *ids_name, const char *logits_name)
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

/* Logits of our forward pass at every step-th position. */
static float *our_logits(x3_device *dev, const x3_checkpoint *c, const int32_t *ids, size_t n_ids, size_t step, size_t n)
{
    const size_t hidden = c->model->hidden, vocab = c->model->vocab;
    float *states = malloc(n_ids * hidden * sizeof *states), *logits = malloc(n * vocab * sizeof *logits);
    x3_weight head = {0};
    x3_err err = {0};

    CHECK_OK(x3_stream_hidden(dev, c, ids, 1, n_ids, states, NULL, &err), &err);
    CHECK_OK(x3_linear_load(&head, dev, c, &c->model->head, &err), &err);
    CHECK_OK(dev->ops->linear(dev, &head, states, hidden * step, n, logits, vocab, &err), &err);
    x3_linear_free(&head, dev);
    free(states);
    return logits;
}

static void check_model(const char *name, double bound)
{
    char file[64];
    snprintf(file, sizeof file, "%s/reference_logits.safetensors.ref", name);
    reference r = load_reference(x3_test_path(x3_test_data_dir(), file), "input_ids", "logits");
    x3_checkpoint *c = open_model(name);
    x3_device *dev = open_device();
    float *logits = our_logits(dev, c, r.ids, r.n_ids, r.step, r.n_logits);
    double worst = 0;

    CHECK(r.vocab == c->model->vocab);
    for (size_t i = 0; i < r.n_logits * r.vocab; i++) {
        CHECK(isfinite(logits[i]));
        worst = fmax(worst, fabs((double)logits[i] - r.logits[i]));
    }
    printf("  %s: largest difference of a logit %.2g\n", name, worst);
    CHECK_MSG(worst <= bound, "%s: logits differ by %g, at most %g", name, worst, bound);
    free(logits);
    free(r.ids);
    free(r.logits);
    x3_device_close(dev);
    x3_checkpoint_close(c);
}

X3_TEST(logits_equal_transformers_tiny_qwen3)
{
    check_model("models/tiny-qwen3", 2e-3);
}

X3_TEST(logits_equal_transformers_llama)
{
    check_model("families/llama", 2e-3);
}

X3_TEST(logits_equal_transformers_qwen2)
{
    check_model("families/qwen2", 2e-3);
}

X3_TEST(logits_equal_transformers_mistral_with_window)
{
    check_model("families/mistral", 2e-3);
}

X3_TEST(logits_equal_transformers_qwen3_moe)
{
    check_model("families/qwen3_moe", 2e-3);
}

X3_TEST(logits_equal_transformers_glm4_moe)
{
    check_model("families/glm4_moe", 2e-3);
}

X3_TEST(logits_equal_transformers_mixtral)
{
    check_model("families/mixtral", 2e-3);
}

X3_TEST(logits_equal_transformers_tiny_glm_moe)
{
    check_model("models/tiny-glm-moe", 2e-3);
}

X3_TEST(logits_equal_transformers_small_qwen3_moe)
{
    check_model("models/small-qwen3-moe", 2e-3);
}

static size_t largest(const float *x, size_t n)
{
    size_t best = 0;

    for (size_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

static void check_pack_logits(const char *pack)
{
    char name[128], tensor[128];
    snprintf(name, sizeof name, "golden/packs/%s", pack);
    snprintf(tensor, sizeof tensor, "%s.logits", pack);
    reference ids = load_reference(x3_test_path(x3_test_data_dir(), "models/tiny-qwen3/reference_logits.safetensors.ref"),
                                   "input_ids", "logits");
    reference peer = load_reference(x3_test_path(x3_test_data_dir(), "golden/packs.safetensors"), "", tensor);
    x3_checkpoint *c = open_model(name);
    x3_device *dev = open_device();
    float *logits = our_logits(dev, c, ids.ids, ids.n_ids, 4, peer.n_logits);
    size_t agree = 0;

    for (size_t i = 0; i < peer.n_logits; i++)
        agree += largest(logits + i * peer.vocab, peer.vocab) == largest(peer.logits + i * peer.vocab, peer.vocab);
    printf("  %s: top-1 agreement with the peer's logits %zu of %zu\n", pack, agree, peer.n_logits);
    CHECK((double)agree >= 0.98 * (double)peer.n_logits);
    free(logits);
    free(ids.ids);
    free(ids.logits);
    free(peer.logits);
    x3_device_close(dev);
    x3_checkpoint_close(c);
}

X3_TEST(packs_of_the_peer_give_its_logits)
{
    check_pack_logits("tiny-qwen3-3.0-mul1");
    check_pack_logits("tiny-qwen3-3.0-mcg");
    check_pack_logits("tiny-qwen3-3.0-3inst");
}

/* The effective weight, by sending the identity through the linear: row i of the result is input i. */
static void check_pack_weight(x3_device *dev, const x3_checkpoint *c, const char *pack, const char *linear)
{
    char tensor[160];
    snprintf(tensor, sizeof tensor, "%s.%s.weight", pack, linear);
    reference golden = load_reference(x3_test_path(x3_test_data_dir(), "golden/packs.safetensors"), "", tensor);
    const x3_linear_desc *d = NULL;
    x3_err err = {0};
    x3_weight w = {0};
    size_t layer, i = 0;

    while ((d = x3_model_linear(c->model, i++, &layer)) != NULL && strcmp(d->name, linear) != 0)
        ;
    CHECK(d != NULL);
    float *identity = calloc(d->n_in * d->n_in, sizeof *identity), *weight = malloc(d->n_in * d->n_out * sizeof *weight);
    for (size_t j = 0; j < d->n_in; j++)
        identity[j * d->n_in + j] = 1;
    CHECK_OK(x3_linear_load(&w, dev, c, d, &err), &err);
    CHECK_OK(dev->ops->linear(dev, &w, identity, d->n_in, d->n_in, weight, d->n_out, &err), &err);
    double error = 0, norm = 0, worst = 0;
    for (size_t in = 0; in < d->n_in; in++)
        for (size_t out = 0; out < d->n_out; out++) {
            double expected = golden.logits[out * d->n_in + in], difference = weight[in * d->n_out + out] - expected;
            error += difference * difference;
            norm += expected * expected;
            worst = fmax(worst, fabs(difference));
        }
    printf("  %s %s: relative Frobenius %.2g, largest %.2g\n", pack, linear, sqrt(error / norm), worst);
    CHECK(sqrt(error / norm) <= 1e-3 && worst <= 2e-3);
    x3_linear_free(&w, dev);
    free(identity);
    free(weight);
    free(golden.logits);
}

X3_TEST(packs_of_the_peer_give_its_dequantized_weights)
{
    static const char *const packs[] = {"tiny-qwen3-3.0-mul1", "tiny-qwen3-3.0-mcg", "tiny-qwen3-3.0-3inst"};

    for (int i = 0; i < 3; i++) {
        char name[64];
        snprintf(name, sizeof name, "golden/packs/%s", packs[i]);
        x3_checkpoint *c = open_model(name);
        x3_device *dev = open_device();
        check_pack_weight(dev, c, packs[i], "model.layers.0.self_attn.q_proj");
        check_pack_weight(dev, c, packs[i], "model.layers.3.mlp.down_proj");
        x3_device_close(dev);
        x3_checkpoint_close(c);
    }
}
