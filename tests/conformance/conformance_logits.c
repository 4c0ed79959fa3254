/* Logits against transformers (reference_logits.safetensors.ref) and against the peer's packs (golden/packs). */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "runtime/weights.h"
#include "tests/family_check.h"
#include "tests/test.h"

static x3_checkpoint *open_model(const char *name)
{
    return x3_test_open_model(x3_test_path(x3_test_data_dir(), name));
}

/* Logits against transformers, and decoding against the full pass. */
static void check_model(const char *name)
{
    x3_test_family_logits(x3_test_path(x3_test_data_dir(), name), 2e-3);
    x3_test_family_decoding(x3_test_path(x3_test_data_dir(), name), 1e-4);
}

X3_TEST(logits_equal_transformers_tiny_qwen3)
{
    check_model("models/tiny-qwen3");
}

X3_TEST(logits_equal_transformers_llama)
{
    check_model("families/llama");
}

X3_TEST(logits_equal_transformers_qwen2)
{
    check_model("families/qwen2");
}

X3_TEST(logits_equal_transformers_mistral_with_window)
{
    check_model("families/mistral");
}

X3_TEST(logits_equal_transformers_qwen3_next)
{
    check_model("families/qwen3_next");
}

X3_TEST(logits_equal_transformers_qwen3_5_moe_text)
{
    check_model("families/qwen3_5_moe_text");
}

X3_TEST(logits_equal_transformers_mimo_v2_flash)
{
    check_model("families/mimo_v2_flash");
}

X3_TEST(logits_equal_transformers_deepseek_v3)
{
    check_model("families/deepseek_v3");
}

X3_TEST(logits_equal_transformers_glm_moe_dsa)
{
    check_model("families/glm_moe_dsa");
}

X3_TEST(logits_equal_transformers_deepseek_v32)
{
    check_model("families/deepseek_v32");
}

X3_TEST(logits_equal_transformers_glm4_moe_lite)
{
    check_model("families/glm4_moe_lite");
}

X3_TEST(logits_equal_transformers_hy_v3)
{
    check_model("families/hy_v3");
}

X3_TEST(logits_equal_transformers_qwen3_5_text)
{
    check_model("families/qwen3_5_text");
}

X3_TEST(logits_equal_transformers_qwen3_moe)
{
    check_model("families/qwen3_moe");
}

X3_TEST(logits_equal_transformers_glm4_moe)
{
    check_model("families/glm4_moe");
}

X3_TEST(logits_equal_transformers_mixtral)
{
    check_model("families/mixtral");
}

X3_TEST(logits_equal_transformers_tiny_glm_moe)
{
    check_model("models/tiny-glm-moe");
}

X3_TEST(logits_equal_transformers_small_qwen3_moe)
{
    check_model("models/small-qwen3-moe");
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
    reference ids = x3_test_reference(x3_test_path(x3_test_data_dir(), "models/tiny-qwen3/reference_logits.safetensors.ref"),
                                   "input_ids", "logits");
    reference peer = x3_test_reference(x3_test_path(x3_test_data_dir(), "golden/packs.safetensors"), "", tensor);
    x3_checkpoint *c = open_model(name);
    x3_device *dev = x3_test_open_device();
    float *logits = x3_test_logits(dev, c, ids.ids, ids.n_ids, 4, peer.n_logits);
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
    reference golden = x3_test_reference(x3_test_path(x3_test_data_dir(), "golden/packs.safetensors"), "", tensor);
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
        x3_device *dev = x3_test_open_device();
        check_pack_weight(dev, c, packs[i], "model.layers.0.self_attn.q_proj");
        check_pack_weight(dev, c, packs[i], "model.layers.3.mlp.down_proj");
        x3_device_close(dev);
        x3_checkpoint_close(c);
    }
}
