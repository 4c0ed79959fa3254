/* Small models of real architectures on the GPU: logits against transformers', decoding against one pass. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "tests/cuda/device_pair.h"
#include "tests/family_check.h"
#include "tests/test.h"

#define BOUND 1e-2 /* of a logit; observed in float32 on the CPU: 1e-5 */

static size_t best_of(const float *x, size_t n)
{
    size_t best = 0;

    for (size_t i = 1; i < n; i++)
        if (x[i] > x[best])
            best = i;
    return best;
}

/* How far the best logit is ahead of the second. */
static double margin_of(const float *x, size_t n)
{
    const size_t best = best_of(x, n);
    double second = -INFINITY;

    for (size_t i = 0; i < n; i++)
        if (i != best)
            second = fmax(second, (double)x[i]);
    return (double)x[best] - second;
}

static void check_logits(x3_device *dev, const char *dir, bool row_invariant)
{
    reference r = x3_test_folder_reference(dir);
    x3_checkpoint *c = x3_test_open_model(dir);
    double worst = 0;

    dev->row_invariant = row_invariant;
    float *logits = x3_test_logits(dev, c, r.ids, r.n_ids, r.step, r.n_logits);
    for (size_t i = 0; i < r.n_logits; i++) {
        const float *got = logits + i * r.vocab, *wanted = r.logits + i * r.vocab;
        for (size_t t = 0; t < r.vocab; t++) {
            CHECK_MSG(isfinite(got[t]), "%s: a logit is not finite", dir);
            worst = fmax(worst, fabs((double)got[t] - (double)wanted[t]));
        }
        if (margin_of(wanted, r.vocab) > BOUND)
            CHECK_MSG(best_of(got, r.vocab) == best_of(wanted, r.vocab), "%s: another best token at %zu", dir, i * r.step);
    }
    printf("    %s: logits within %.2g%s\n", dir, worst, row_invariant ? ", row-invariant" : "");
    CHECK_MSG(worst <= BOUND, "%s: logits differ by %g", dir, worst);
    dev->row_invariant = false;
    free(logits);
    x3_test_reference_free(&r);
    x3_checkpoint_close(c);
}

/* Row-invariant, as the generator has it: a sequence gets the same bits however it is fed. With an indexer a row that sees
 * all of its positions is computed in another way once the batch is long enough for a choice. */
static void check_family(x3_device *dev, const char *dir)
{
    const bool sparse = strstr(dir, "dsa") != NULL || strstr(dir, "v32") != NULL;

    check_logits(dev, dir, false);
    check_logits(dev, dir, true);
    dev->row_invariant = true;
    x3_test_family_decoding_on(dev, dir, sparse ? 1e-4 : 0);
    dev->row_invariant = false;
}

/* The number of folders checked. */
static size_t check_folder(const char *folder, const char *const *names)
{
    x3_pair p = x3_pair_open();
    size_t n = 0;

    for (; *names != NULL; names++) {
        char dir[1000];
        snprintf(dir, sizeof dir, "%s/%s", folder, *names);
        if (!x3_path_is_dir(dir))
            continue;
        check_family(p.gpu, dir);
        n++;
    }
    x3_pair_close(&p);
    return n;
}

X3_TEST(cuda_families_of_the_tests_equal_transformers)
{
    static const char *const names[] = {"llama3_rope", "qwen2_moe", "mimo_sizes", "deepseek_yarn", "glm_dsa_shared",
                                        "deepseek_v32_long", "qwen3_5_nested", "qwen3_next_mixed", NULL};

    CHECK(check_folder("tests/data/families", names) == sizeof names / sizeof names[0] - 1);
}

X3_TEST(cuda_families_of_the_shared_folder_equal_transformers)
{
    static const char *const names[] = {"llama", "qwen2", "qwen3_moe", "glm4_moe", "deepseek_v3", "glm_moe_dsa", "qwen3_next",
                                        "qwen3_5_text", "qwen3_5_moe_text", "mimo_v2_flash", NULL};
    const char *data = x3_test_data_dir();
    char folder[900];

    snprintf(folder, sizeof folder, "%s/families", data == NULL ? "../shared" : data);
    if (check_folder(folder, names) == 0)
        x3_test_skip("no families in %s", folder);
}
