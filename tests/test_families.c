/* Families and layer kinds: small models of tests/data/families against transformers' logits, decoding against one pass,
 * what a checkpoint's tensors become, and configs that are refused. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "runtime/generate.h"
#include "tests/family_check.h"
#include "tests/test.h"

#define FOLDER "tests/data/families/"

/* Observed: at most 1.1e-5 (logits are sums of float32 in another order), decoding bitwise. */
static void check_family(const char *name)
{
    const char *dir = x3_test_path(FOLDER, name);

    x3_test_family_logits(dir, 4e-5);
    x3_test_family_decoding(dir, 0);
}

X3_TEST(family_llama_with_llama3_rope_biases_and_tied_head)
{
    check_family("llama3_rope");
}

X3_TEST(family_deepseek_v3_with_yarn_groups_biases_and_no_query_latent)
{
    check_family("deepseek_yarn");
}

X3_TEST(family_glm_moe_dsa_with_shared_selections)
{
    check_family("glm_dsa_shared");
}

X3_TEST(family_deepseek_v32_from_exact_to_sparse)
{
    check_family("deepseek_v32_long");
}

X3_TEST(family_qwen3_5_nested_beside_a_tower)
{
    check_family("qwen3_5_nested");
}

X3_TEST(family_qwen3_next_with_dense_layers_and_biases)
{
    check_family("qwen3_next_mixed");
}

X3_TEST(family_mimo_with_sizes_of_window_layers_and_a_long_window)
{
    check_family("mimo_sizes");
}

X3_TEST(family_qwen2_moe)
{
    check_family("qwen2_moe");
}
