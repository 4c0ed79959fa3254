/* Families and layer kinds: small models of tests/data/families against transformers' logits, decoding against one pass,
 * what a checkpoint's tensors become, and configs that are refused. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "runtime/generate.h"
#include "runtime/stream.h"
#include "tests/family_check.h"
#include "tests/test.h"

#define FOLDER "tests/data/families/"
#define TINY_QWEN3 "tests/data/models/tiny-qwen3"

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

X3_TEST(family_mistral_with_a_window_shorter_than_the_text)
{
    check_family("mistral");
}

X3_TEST(family_mixtral_with_a_window_longer_than_the_text)
{
    check_family("mixtral");
}

X3_TEST(family_qwen2_with_a_window_on_some_layers_and_tied_head)
{
    check_family("qwen2");
}

X3_TEST(family_qwen3_moe_with_biases_and_weights_not_normalized)
{
    check_family("qwen3_moe");
}

X3_TEST(family_glm4_moe_with_groups_norms_and_biases)
{
    check_family("glm4_moe");
}

X3_TEST(family_glm4_moe_lite_with_three_groups)
{
    check_family("glm4_moe_lite");
}

X3_TEST(family_qwen3_5_moe)
{
    check_family("qwen3_5_moe");
}

X3_TEST(family_hy_v3)
{
    check_family("hy_v3");
}

X3_TEST(family_dots1)
{
    check_family("dots1");
}

X3_TEST(family_seed_oss)
{
    check_family("seed_oss");
}

X3_TEST(family_qwen3)
{
    x3_test_family_logits(TINY_QWEN3, 4e-5);
    x3_test_family_decoding(TINY_QWEN3, 0);
}

/* A row of families.c without a fixture above is a row that nobody has checked. */
X3_TEST(family_rows_all_have_a_fixture)
{
    char types[1024], found[2048] = ",qwen3,kimi_k2,"; /* the latter is deepseek_v3 by another name */
    x3_names folders = {0};
    x3_err err = {0};
    int n = 0;

    CHECK_OK(x3_list_dir(&folders, FOLDER, &err), &err);
    for (size_t i = 0; i < folders.n_items; i++) {
        x3_hf_config *config = NULL;
        if (!x3_path_is_dir(x3_test_path(FOLDER, folders.items[i])))
            continue;
        CHECK_OK(x3_hf_config_load(&config, x3_test_path(FOLDER, folders.items[i]), &err), &err);
        strcat(strcat(found, config->model_type), ",");
        x3_hf_config_free(config);
    }
    x3_names_free(&folders);
    x3_model_types(types, sizeof types);
    for (char *type = strtok(types, ", "); type != NULL; type = strtok(NULL, ", "), n++) {
        char quoted[128];
        snprintf(quoted, sizeof quoted, ",%s,", type);
        CHECK_MSG(strstr(found, quoted) != NULL, "model_type %s has no fixture", type);
    }
    CHECK(n >= 20);
}

/* Eight sequences in one batch, which is more rows than latent attention takes at a time, and each alone: the same bits. */
X3_TEST(family_sequences_of_a_batch_do_not_touch_each_other)
{
    static const char *const folders[] = {"glm_dsa_shared", "deepseek_yarn", "qwen3_5_nested", "mimo_sizes"};
    enum { N = 8, COLS = 40 };
    int32_t ids[N * COLS];
    x3_device *dev = x3_test_open_device();
    x3_err err = {0};

    for (int i = 0; i < N * COLS; i++)
        ids[i] = 3 + (i * i + 31 * i) % 90;
    for (size_t f = 0; f < sizeof folders / sizeof folders[0]; f++) {
        x3_checkpoint *c = x3_test_open_model(x3_test_path(FOLDER, folders[f]));
        const size_t floats = COLS * c->model->hidden;
        float *together = malloc(N * floats * sizeof *together), *alone = malloc(floats * sizeof *alone);
        CHECK_OK(x3_stream_hidden(dev, c, ids, N, COLS, together, NULL, &err), &err);
        for (size_t i = 0; i < N; i++) {
            CHECK_OK(x3_stream_hidden(dev, c, ids + i * COLS, 1, COLS, alone, NULL, &err), &err);
            CHECK_MSG(memcmp(alone, together + i * floats, floats * sizeof *alone) == 0, "%s: sequence %zu", folders[f], i);
        }
        free(together);
        free(alone);
        x3_checkpoint_close(c);
    }
    x3_device_close(dev);
}

/* ---- what becomes of the tensors ---- */

static const char *reason_of(const x3_checkpoint *c, const char *tensor, x3_tensor_role *role)
{
    const x3_tensor *t = x3_safetensors_find(c->st, tensor);

    CHECK_MSG(t != NULL, "%s is not there", tensor);
    *role = c->roles[t - c->st->tensors];
    return c->reasons[t - c->st->tensors];
}

X3_TEST(family_towers_and_draft_layers_are_carried)
{
    static const struct {
        const char *folder, *tensor, *what;
    } carried[] = {{"qwen3_5_nested", "model.visual.blocks.0.attn.qkv.weight", "vision tower"},
                   {"qwen3_5_nested", "mtp.fc.weight", "draft layers (MTP)"},
                   {"deepseek_yarn", "model.layers.3.self_attn.kv_b_proj.weight", "draft layers (MTP)"},
                   {"glm_dsa_shared", "model.layers.5.eh_proj.weight", "draft layers (MTP)"},
                   {"mimo_sizes", "model.mtp.layers.0.eh_proj.weight", "draft layers (MTP)"}};

    for (size_t i = 0; i < sizeof carried / sizeof carried[0]; i++) {
        x3_checkpoint *c = x3_test_open_model(x3_test_path(FOLDER, carried[i].folder));
        x3_tensor_role role;
        const char *what = reason_of(c, carried[i].tensor, &role);
        CHECK(role == X3_ROLE_KEPT && what != NULL && strcmp(what, carried[i].what) == 0);
        for (size_t t = 0; t < c->st->n_tensors; t++)
            CHECK(c->roles[t] != X3_ROLE_NONE);
        x3_checkpoint_close(c);
    }
}

X3_TEST(family_sensitive_parts_stay_and_projections_are_quantized)
{
    static const struct {
        const char *folder, *tensor;
        x3_tensor_role role;
    } parts[] = {
        {"deepseek_yarn", "model.layers.1.self_attn.kv_b_proj.weight", X3_ROLE_KEPT},
        {"deepseek_yarn", "model.layers.1.self_attn.kv_a_proj_with_mqa.weight", X3_ROLE_WEIGHT},
        {"deepseek_yarn", "model.layers.1.self_attn.kv_a_proj_with_mqa.bias", X3_ROLE_BIAS},
        {"deepseek_yarn", "model.layers.1.mlp.gate.weight", X3_ROLE_KEPT},
        {"glm_dsa_shared", "model.layers.0.self_attn.indexer.weights_proj.weight", X3_ROLE_KEPT},
        {"glm_dsa_shared", "model.layers.0.self_attn.indexer.wq_b.weight", X3_ROLE_WEIGHT},
        {"glm_dsa_shared", "model.layers.0.self_attn.indexer.wk.weight", X3_ROLE_KEPT}, /* 32 wide */
        {"glm_dsa_shared", "model.layers.0.self_attn.indexer.k_norm.bias", X3_ROLE_KEPT},
        {"qwen3_5_nested", "model.language_model.layers.0.linear_attn.in_proj_qkv.weight", X3_ROLE_WEIGHT},
        {"qwen3_5_nested", "model.language_model.layers.0.linear_attn.in_proj_a.weight", X3_ROLE_KEPT},
        {"qwen3_5_nested", "model.language_model.layers.0.linear_attn.conv1d.weight", X3_ROLE_KEPT},
        {"qwen3_5_nested", "model.language_model.layers.0.linear_attn.A_log", X3_ROLE_KEPT},
        {"mimo_sizes", "model.layers.1.self_attn.attention_sink_bias", X3_ROLE_KEPT},
    };

    for (size_t i = 0; i < sizeof parts / sizeof parts[0]; i++) {
        x3_checkpoint *c = x3_test_open_model(x3_test_path(FOLDER, parts[i].folder));
        x3_tensor_role role;
        const char *reason = reason_of(c, parts[i].tensor, &role);
        CHECK_MSG(role == parts[i].role && reason == NULL, "%s: role %d", parts[i].tensor, role);
        x3_checkpoint_close(c);
    }
}

/* ---- refusals ---- */

/* The model of a fixture's config with members replaced (a JSON object; null removes). */
static x3_status edited_model(const char *folder, const char *edit, x3_err *err)
{
    const char *dir = x3_test_temp_dir();
    x3_hf_config *config = NULL;
    x3_model *m = NULL;
    cJSON *json = NULL, *changes = cJSON_Parse(edit);
    char from[256];
    x3_status rc;

    CHECK(changes != NULL);
    snprintf(from, sizeof from, FOLDER "%s/config.json", folder);
    CHECK_OK(x3_json_load(&json, from, err), err);
    cJSON *text = cJSON_GetObjectItem(json, "text_config") != NULL ? cJSON_GetObjectItem(json, "text_config") : json;
    for (const cJSON *c = changes->child; c != NULL; c = c->next) {
        cJSON_DeleteItemFromObject(text, c->string);
        if (!cJSON_IsNull(c))
            cJSON_AddItemToObject(text, c->string, cJSON_Duplicate(c, true));
    }
    CHECK_OK(x3_json_save(json, x3_test_path(dir, "config.json"), err), err);
    cJSON_Delete(json);
    cJSON_Delete(changes);
    CHECK_OK(x3_hf_config_load(&config, dir, err), err);
    rc = x3_model_create(&m, config, NULL, err);
    x3_model_free(m);
    x3_hf_config_free(config);
    return rc;
}

X3_TEST(family_options_that_change_the_mathematics_are_refused_by_name)
{
    static const struct {
        const char *folder, *edit, *message;
    } cases[] = {
        {"glm_dsa_shared", "{\"model_type\": \"glm7\"}", "model_type \"glm7\" is not known"},
        {"glm_dsa_shared", "{\"layer_types\": [\"full_attention\",\"full_attention\",\"full_attention\",\"kda\",\"full_attention\"]}",
         "layer_types[3] \"kda\" is not known"},
        {"glm_dsa_shared", "{\"indexer_types\": [\"full\",\"full\",\"full\",\"full\"]}", "indexer_types has 4 entries"},
        {"glm_dsa_shared", "{\"indexer_types\": [\"full\",\"full\",\"half\",\"full\",\"full\"]}", "indexer type \"half\" of layer 2"},
        {"glm_dsa_shared", "{\"index_topk_pattern\": \"SFFFF\"}", "layer 0 shares the selection"},
        {"glm_dsa_shared", "{\"index_topk_pattern\": \"FF\"}", "index_topk_pattern has 2 letters"},
        {"glm_dsa_shared", "{\"index_head_dim\": 8}", "index_head_dim 8 is smaller than qk_rope_head_dim 16"},
        {"glm_dsa_shared", "{\"index_kpool\": 4}", "option \"index_kpool\" is not known"},
        {"glm_dsa_shared", "{\"q_lora_rank\": null}", "an indexer needs q_lora_rank"},
        {"deepseek_yarn", "{\"scoring_func\": \"softmax\"}", "option \"scoring_func\" is \"softmax\""},
        {"deepseek_yarn", "{\"topk_method\": \"greedy\"}", "option \"topk_method\" is \"greedy\""},
        {"deepseek_yarn", "{\"index_topk\": 16}", "option \"index_topk\" is not known"},
        {"deepseek_yarn", "{\"moe_layer_freq\": 2}", "moe_layer_freq"},
        {"deepseek_yarn", "{\"first_k_dense_replace\": null}", "first_k_dense_replace"},
        {"deepseek_yarn", "{\"kv_lora_rank\": null}", "kv_lora_rank"},
        {"qwen3_5_nested", "{\"output_gate_type\": \"sigmoid\"}", "option \"output_gate_type\" is \"sigmoid\""},
        {"qwen3_5_nested", "{\"attn_output_gate\": false}", "attn_output_gate false"},
        {"qwen3_5_nested", "{\"linear_num_value_heads\": 5}", "linear_num_value_heads 5 is not a multiple"},
        {"qwen3_5_nested", "{\"sliding_window\": 8}", "sliding_window 8 is not known"},
        {"qwen3_5_nested", "{\"ple_layer_ids\": [2]}", "option \"ple_layer_ids\" is not known"},
        {"mimo_sizes", "{\"attention_projection_layout\": \"fused_qkv\"}", "attention_projection_layout \"fused_qkv\""},
        {"mimo_sizes", "{\"hybrid_layer_pattern\": [0, 1, 2, 0]}", "hybrid_layer_pattern"},
        {"mimo_sizes", "{\"sliding_window\": null, \"sliding_window_size\": null}", "sliding_window is missing"},
        {"mimo_sizes", "{\"swa_num_attention_heads\": 5}", "swa_num_attention_heads 5 is not a multiple"},
        {"mimo_sizes", "{\"moe_layer_freq\": [0, 1, 1]}", "moe_layer_freq has 3 entries"},
        {"llama3_rope", "{\"swa_head_dim\": 16}", "option \"swa_head_dim\" is not known"},
        {"llama3_rope", "{\"partial_rotary_factor\": 0.5}", "rope over 16 of 32 dimensions"},
        {"qwen2_moe", "{\"intermediate_size\": null}", "layer 0 is dense"},
        {"seed_oss", "{\"attention_out_bias\": true}", "option \"attention_out_bias\" is true"},
        {"dots1", "{\"scoring_func\": \"softmax\"}", "option \"scoring_func\" is \"softmax\""},
        {"glm4_moe", "{\"topk_group\": 3}", "n_group 2 and topk_group 3 do not fit"},
        {"mistral", "{\"rope_parameters\": {\"rope_type\": \"ntk\", \"rope_theta\": 1e4}}", "ntk"},
    };
    x3_err err = {0};

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        CHECK_MSG(edited_model(cases[i].folder, cases[i].edit, &err) != X3_OK, "%s with %s was accepted", cases[i].folder,
                  cases[i].edit);
        CHECK_MSG(strstr(err.text, cases[i].message) != NULL, "%s: %s", cases[i].edit, err.text);
        err = (x3_err){0};
    }
    CHECK_OK(edited_model("glm_dsa_shared", "{\"index_topk_pattern\": \"FFSFS\"}", &err), &err);
    CHECK_OK(edited_model("qwen3_5_nested", "{\"output_gate_type\": \"silu\"}", &err), &err);
    CHECK_OK(edited_model("qwen2_moe", "{\"qkv_bias\": false}", &err), &err);
    CHECK_OK(edited_model("deepseek_yarn", "{\"model_type\": \"kimi_k2\"}", &err), &err);
}

X3_TEST(family_sparse_layers_without_a_kept_selection_are_refused)
{
    x3_checkpoint *c = x3_test_open_model(x3_test_path(FOLDER, "glm_dsa_shared"));
    x3_device *dev = x3_test_open_device();
    const x3_model *m = c->model;
    x3_layer_weights w = {0};
    x3_full_batch batch;
    x3_forward *f = NULL;
    x3_kv_layer kv = {0};
    float *d_x = NULL;
    x3_err err = {0};

    CHECK(x3_model_selected(m, 6) == 0 && x3_model_selected(m, 7) == 6);
    for (size_t n = 6; n <= 7; n++) { /* exact up to index_topk, then a selection is needed */
        CHECK_OK(x3_forward_create(&f, dev, m, n, n, &err), &err);
        CHECK_OK(x3_full_batch_create(&batch, dev, 1, n, 0, &err), &err);
        CHECK_OK(x3_layer_weights_load(&w, dev, c, &m->layers[2], &err), &err);
        CHECK_OK(x3_kv_layer_create(&kv, dev, &m->layers[2], batch.n_pages, 0, X3_KV_F32, &err), &err);
        CHECK_OK(x3_device_floats(dev, &d_x, n * m->hidden, &err), &err);
        if (n == 6)
            CHECK_OK(x3_forward_layer(f, &w, &batch.batch, &kv, d_x, &err), &err);
        else
            CHECK_FAILS(x3_forward_layer(f, &w, &batch.batch, &kv, d_x, &err), &err, "keeps no selection");
        x3_device_free(dev, d_x);
        x3_kv_layer_free(&kv, dev);
        x3_layer_weights_free(&w);
        x3_full_batch_free(&batch);
        x3_forward_free(f);
    }
    x3_device_close(dev);
    x3_checkpoint_close(c);
}

X3_TEST(family_recurrent_states_go_on_only_where_they_stand)
{
    x3_checkpoint *c = x3_test_open_model(x3_test_path(FOLDER, "qwen3_5_nested"));
    x3_device *dev = x3_test_open_device();
    float *full = NULL, *logits = malloc(c->model->vocab * sizeof *logits);
    int32_t ids[20];
    x3_generator *g = NULL;
    x3_err err = {0};

    for (int i = 0; i < 20; i++)
        ids[i] = 3 + 7 * i % 90;
    full = x3_test_logits(dev, c, ids, 20, 1, 20);
    CHECK_OK(x3_generator_create(&g, dev, c, 32, &err), &err);
    CHECK_OK(x3_generator_feed(g, ids, 12, logits, &err), &err);
    g->n_positions = 9; /* as if positions could be dropped */
    CHECK_FAILS(x3_generator_feed(g, ids + 9, 3, logits, &err), &err, "stands at position 12, the sequence goes on at 9");
    CHECK(x3_generator_truncate(g, 5) == 0);
    CHECK_OK(x3_generator_feed(g, ids, 20, logits, &err), &err);
    CHECK(memcmp(logits, full + 19 * c->model->vocab, c->model->vocab * sizeof *logits) == 0);
    x3_generator_free(g);
    free(full);
    free(logits);
    x3_device_close(dev);
    x3_checkpoint_close(c);
}

/* A copy of a state is where one comes back to: the prompt's end, kept while one continuation runs on. */
X3_TEST(family_recurrent_states_can_be_copied_to_come_back)
{
    x3_checkpoint *c = x3_test_open_model(x3_test_path(FOLDER, "qwen3_next_mixed"));
    x3_device *dev = x3_test_open_device();
    const x3_layer_desc *l = &c->model->layers[0];
    const size_t hidden = c->model->hidden;
    x3_layer_weights w = {0};
    x3_kv_layer kv = {0};
    x3_forward *f = NULL;
    float *x = malloc(8 * hidden * sizeof *x), *first = malloc(8 * hidden * sizeof *first);
    int32_t positions[8] = {4, 5, 6, 7, 8, 9, 10, 11};
    x3_sequence s = {.n_rows = 4};
    x3_batch batch = {.n_rows = 4, .n_sequences = 1, .sequences = &s, .d_positions = positions};
    x3_rng rng;
    x3_err err = {0};

    CHECK(l->mixer == X3_MIXER_DELTA_NET);
    CHECK_OK(x3_layer_weights_load(&w, dev, c, l, &err), &err);
    CHECK_OK(x3_kv_layer_create(&kv, dev, l, 1, 2, X3_KV_F32, &err), &err);
    CHECK_OK(x3_forward_create(&f, dev, c->model, 8, 32, &err), &err);
    x3_rng_init(&rng, 1, "rows");
    for (size_t i = 0; i < 8 * hidden; i++)
        first[i] = (float)x3_rng_normal(&rng);
    memcpy(x, first, 4 * hidden * sizeof *x);
    CHECK_OK(x3_forward_layer(f, &w, &batch, &kv, x, &err), &err);
    CHECK_OK(x3_kv_slot_copy(&kv, dev, 0, 1, &err), &err);
    float *after[2] = {malloc(4 * hidden * sizeof *x), malloc(4 * hidden * sizeof *x)};
    for (int slot = 0; slot < 2; slot++) { /* slot 0 goes on, then slot 1 from the copy */
        s = (x3_sequence){.n_rows = 4, .position = 4, .slot = (size_t)slot};
        memcpy(after[slot], first + 4 * hidden, 4 * hidden * sizeof *x);
        CHECK_OK(x3_forward_layer(f, &w, &batch, &kv, after[slot], &err), &err);
    }
    CHECK(memcmp(after[0], after[1], 4 * hidden * sizeof *x) == 0);
    s.slot = 2;
    CHECK_FAILS(x3_forward_layer(f, &w, &batch, &kv, x, &err), &err, "slot 2 of 2");
    for (int i = 0; i < 2; i++)
        free(after[i]);
    free(x);
    free(first);
    x3_kv_layer_free(&kv, dev);
    x3_layer_weights_free(&w);
    x3_forward_free(f);
    x3_device_close(dev);
    x3_checkpoint_close(c);
}
