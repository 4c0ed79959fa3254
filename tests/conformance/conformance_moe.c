/* The peer's packs with experts reach the KL that golden/README.md states for them. */
#include <math.h>
#include <stdio.h>

#include "quant/score.h"
#include "tests/test.h"

static x3_checkpoint *open_folder(const char *name)
{
    x3_findings f = {0};
    x3_checkpoint *c = NULL;
    x3_err err = {0};

    CHECK_OK(x3_checkpoint_open(&c, x3_test_path(x3_test_data_dir(), name), NULL, &f, &err), &err);
    return c;
}

static void make_reference(x3_device *dev, const char *model, const char *path)
{
    char text[400];
    const char *texts[] = {text};
    x3_reference_options o = {.texts = texts, .n_texts = 1, .ctx = 512, .positions = 10240};
    x3_checkpoint *c = open_folder(model);
    x3_err err = {0};

    snprintf(text, sizeof text, "%s/text/heldout.jsonl", x3_test_data_dir());
    CHECK_OK(x3_reference_create(path, dev, c, &o, NULL, &err), &err);
    x3_checkpoint_close(c);
}

static void check_kl(x3_device *dev, const char *reference, const char *pack, double expected)
{
    x3_checkpoint *c = open_folder(pack);
    x3_reference *r = NULL;
    x3_score s;
    x3_err err = {0};

    CHECK_OK(x3_reference_open(&r, reference, &err), &err);
    CHECK_OK(x3_score_pack(&s, dev, c, r, NULL, &err), &err);
    printf("  %s: KL %.4f, the peer's evaluator says %.4f\n", pack, s.kl_mean, expected);
    CHECK_MSG(fabs(s.kl_mean - expected) < 2e-3 * expected, "%s: KL %g, expected %g", pack, s.kl_mean, expected);
    x3_score_free(&s);
    x3_reference_close(r);
    x3_checkpoint_close(c);
}

X3_TEST(packs_of_the_peer_with_experts_reach_their_kl)
{
    char path[400];
    x3_device *dev = NULL;
    x3_err err = {0};

    snprintf(path, sizeof path, "%s/ref.x3r", x3_test_temp_dir());
    CHECK_OK(x3_device_open(&dev, "cpu", 0, &err), &err);
    make_reference(dev, "models/tiny-glm-moe", path);
    check_kl(dev, path, "golden/packs/tiny-glm-moe-2.5-mul1", .3307);
    check_kl(dev, path, "golden/packs/tiny-glm-moe-3.0-mul1", .1794);
    make_reference(dev, "models/small-qwen3-moe", path);
    check_kl(dev, path, "golden/packs/small-qwen3-moe-2.5-mul1", .7171);
    x3_device_close(dev);
}
