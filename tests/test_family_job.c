/* Quantization jobs and packs of the small families: what the layer kinds ask of them beyond dense attention. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "formats/safetensors_write.h"
#include "quant/job.h"
#include "quant/score.h"
#include "tests/family_check.h"
#include "tests/family_job.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

#define FOLDER "tests/data/families/"

/* Mean square difference of the logits of two folders on some ids, over the mean square of the first's. */
static double lost(const char *source, const char *pack)
{
    x3_device *dev = x3_test_open_device();
    x3_checkpoint *a = x3_test_open_model(source), *b = x3_test_open_model(pack);
    const size_t n = 48 * a->model->vocab;
    double error = 0, norm = 0;
    int32_t ids[48];

    for (int i = 0; i < 48; i++)
        ids[i] = 32 + 11 * i % 60;
    float *x = x3_test_logits(dev, a, ids, 48, 1, 48), *y = x3_test_logits(dev, b, ids, 48, 1, 48);
    for (size_t i = 0; i < n; i++) {
        error += ((double)x[i] - (double)y[i]) * ((double)x[i] - (double)y[i]);
        norm += (double)x[i] * (double)x[i];
    }
    free(x);
    free(y);
    x3_checkpoint_close(a);
    x3_checkpoint_close(b);
    x3_device_close(dev);
    return error / norm;
}

/* What tools/bench_families.sh shows for all families at 3, 4 and 6 bits, here for two at 3 and 6. */
X3_TEST(family_packs_lose_less_the_more_bits_they_have)
{
    static const char *const families[] = {"mistral", "qwen3_5_moe"};
    x3_device *dev = x3_test_open_device();

    for (size_t i = 0; i < 2; i++) {
        x3_family_job s;
        char x3r[320], heldout[320];
        double before = 1e9;
        x3_reference *r = NULL;
        x3_err err = {0};
        x3_family_job_setup(&s, families[i], 3);
        snprintf(x3r, sizeof x3r, "%s.x3r", s.out);
        snprintf(heldout, sizeof heldout, "%s.txt", s.out);
        x3_family_job_text(heldout, 3);
        const char *text = heldout;
        x3_reference_options o = {.texts = &text, .n_texts = 1, .ctx = 48, .positions = 240};
        x3_checkpoint *source = x3_test_open_model(s.model);
        CHECK_OK(x3_reference_create(x3r, dev, source, &o, NULL, &err), &err);
        CHECK_OK(x3_reference_open(&r, x3r, &err), &err);
        for (int bits = 3; bits <= 6; bits += 3) {
            x3_score score;
            s.o.bits = bits;
            s.o.overwrite = true;
            CHECK_OK(x3_test_run_job(&s.o, &err), &err);
            x3_family_job_verifies(&s);
            x3_checkpoint *pack = x3_test_open_model(s.out);
            CHECK_OK(x3_score_pack(&score, dev, pack, r, NULL, &err), &err);
            printf("  %s at %d bits: KL %.4f\n", families[i], bits, score.kl_mean);
            CHECK(score.n_nonfinite == 0 && score.kl_mean > 0 && score.kl_mean < before);
            before = score.kl_mean;
            x3_score_free(&score);
            x3_checkpoint_close(pack);
        }
        x3_reference_close(r);
        x3_checkpoint_close(source);
        CHECK_OK(x3_remove_tree(s.model, &err), &err);
        CHECK_OK(x3_remove_tree(s.out, &err), &err);
    }
    x3_device_close(dev);
}

/* The selection that layers share is part of the states: killed between the layer that selects and the one that shares, a
 * job must find it again; and it must not matter whether the states lie in memory or on disk. */
X3_TEST(family_job_keeps_the_selection_of_sparse_layers_across_a_kill)
{
    x3_family_job s;
    x3_findings findings = {0};
    x3_job *job = NULL;
    x3_err err = {0};

    x3_family_job_setup(&s, "glm_dsa_shared", 6);
    CHECK_OK(x3_test_run_job(&s.o, &err), &err);
    const uint64_t expected = x3_test_shard_hash(s.out);
    x3_family_job_verifies(&s);
    CHECK(lost(s.model, s.out) < 0.05);
    CHECK_OK(x3_remove_tree(s.out, &err), &err);
    CHECK_OK(x3_job_open(&job, &s.o, NULL, &findings, &err), &err);
    CHECK(x3_job_describe(job)->hidden_bytes == 2 * (uint64_t)x3_job_describe(job)->rows * 48 * (64 + 6) * sizeof(float));
    s.o.memory_bytes = x3_job_describe(job)->peak_bytes - 1; /* states do not fit */
    x3_job_close(job);
    s.o.resume = true;
    x3_family_job_kill(&s, "layer-00001.json"); /* layer 1 selects, layer 2 shares */
    CHECK_OK(x3_test_run_job(&s.o, &err), &err);
    CHECK_MSG(x3_test_shard_hash(s.out) == expected, "other bytes after a kill, with the states on disk");
}

X3_TEST(family_job_carries_towers_and_draft_layers_byte_for_byte)
{
    static const char *const carried[] = {"model.visual.blocks.0.attn.qkv.bias", "mtp.fc.weight",
                                          "model.language_model.layers.0.linear_attn.A_log"};
    x3_family_job s;
    x3_err err = {0};

    x3_family_job_setup(&s, "qwen3_5_nested", 6);
    CHECK_OK(x3_test_run_job(&s.o, &err), &err);
    x3_family_job_verifies(&s);
    CHECK(lost(s.model, s.out) < 0.05);
    x3_checkpoint *a = x3_test_open_model(s.model), *b = x3_test_open_model(s.out);
    CHECK(b->is_pack && b->config->text != b->config->config);
    for (int i = 0; i < 3; i++) {
        uint64_t x, y;
        CHECK_OK(x3_checkpoint_tensor_hash(a, x3_safetensors_find(a->st, carried[i]), &x, &err), &err);
        CHECK_OK(x3_checkpoint_tensor_hash(b, x3_safetensors_find(b->st, carried[i]), &y, &err), &err);
        CHECK(x == y);
    }
    x3_checkpoint_close(a);
    x3_checkpoint_close(b);
}

/* ---- a pack with a quantized kv_b_proj, as others may write it ---- */

#define KV_B "model.layers.1.self_attn.kv_b_proj"

/* The fixture as a pack of plain weights, with KV_B either as a group of random codes or as the given dense weight. */
static void write_pack(const char *dir, const float *dense)
{
    enum { N_IN = 128, N_OUT = 256, K = 3, WORDS = N_IN / 16 * (N_OUT / 16) * 16 * K };
    x3_checkpoint *c = x3_test_open_model(FOLDER "deepseek_yarn");
    const int32_t marker = (int32_t)X3_MUL1_MULTIPLIER;
    static uint16_t words[WORDS], suh[N_IN], svh[N_OUT];
    x3_out_tensor t[256], *list[256];
    const void *data[256];
    void *loaded[256];
    size_t n = 0, n_loaded = 0;
    cJSON *config = cJSON_Duplicate(c->config->config, true), *q = cJSON_AddObjectToObject(config, "quantization_config");
    x3_rng rng;
    x3_err err = {0};

    x3_rng_init(&rng, 4, "codes");
    for (size_t i = 0; i < WORDS; i++)
        words[i] = (uint16_t)x3_rng_next(&rng);
    for (size_t i = 0; i < N_IN; i++)
        suh[i] = x3_f32_to_f16((float)x3_rng_normal(&rng) * 0.05f);
    for (size_t i = 0; i < N_OUT; i++)
        svh[i] = x3_f32_to_f16((float)x3_rng_normal(&rng));
    for (size_t i = 0; i < c->st->n_tensors; i++) {
        const x3_tensor *from = &c->st->tensors[i];
        if (strcmp(from->name, KV_B ".weight") == 0)
            continue;
        t[n] = (x3_out_tensor){.name = from->name, .dtype = from->dtype, .rank = from->rank};
        memcpy(t[n].shape, from->shape, sizeof t[n].shape);
        CHECK_OK(x3_safetensors_load(c->st, from, &loaded[n_loaded], &err), &err);
        data[n++] = loaded[n_loaded++];
    }
    if (dense != NULL) {
        t[n] = (x3_out_tensor){.name = KV_B ".weight", .dtype = X3_F32, .rank = 2, .shape = {132, 40}};
        data[n++] = dense;
    } else {
        t[n] = (x3_out_tensor){.name = KV_B ".trellis", .dtype = X3_I16, .rank = 3, .shape = {N_IN / 16, N_OUT / 16, 16 * K}};
        data[n++] = words;
        t[n] = (x3_out_tensor){.name = KV_B ".suh", .dtype = X3_F16, .rank = 1, .shape = {N_IN}};
        data[n++] = suh;
        t[n] = (x3_out_tensor){.name = KV_B ".svh", .dtype = X3_F16, .rank = 1, .shape = {N_OUT}};
        data[n++] = svh;
        t[n] = (x3_out_tensor){.name = KV_B ".mul1", .dtype = X3_I32, .rank = 0};
        data[n++] = &marker;
    }
    CHECK(n <= 256);
    for (size_t i = 0; i < n; i++)
        list[i] = &t[i];
    CHECK_OK(x3_mkdirs(dir, &err), &err);
    cJSON_AddStringToObject(q, "quant_method", "exl3");
    CHECK_OK(x3_json_save(config, x3_test_path(dir, "config.json"), &err), &err);
    CHECK_OK(x3_safetensors_save(x3_test_path(dir, "model.safetensors"), list, data, n, &err), &err);
    for (size_t i = 0; i < n_loaded; i++)
        free(loaded[i]);
    cJSON_Delete(config);
    x3_checkpoint_close(c);
}

X3_TEST(family_mla_takes_a_quantized_kv_b_proj_as_its_effective_weight)
{
    char group[300], plain[300];
    x3_device *dev = x3_test_open_device();
    float identity[40 * 40] = {0}, rows[40 * 132], dense[132 * 40];
    const x3_linear_desc *d;
    x3_weight w;
    x3_err err = {0};

    snprintf(group, sizeof group, "%s/group", x3_test_temp_dir());
    snprintf(plain, sizeof plain, "%s/plain", x3_test_temp_dir());
    write_pack(group, NULL);
    x3_checkpoint *c = x3_test_open_model(group);
    d = &c->model->layers[1].linears[c->model->layers[1].mla.kv_b];
    CHECK(strcmp(d->name, KV_B) == 0);
    CHECK_OK(x3_linear_load(&w, dev, c, d, &err), &err);
    CHECK(w.kind == X3_WEIGHT_EXL3);
    for (int i = 0; i < 40; i++)
        identity[i * 40 + i] = 1;
    CHECK_OK(dev->ops->linear(dev, &w, identity, 40, 40, rows, 132, &err), &err);
    for (int o = 0; o < 132; o++)
        for (int i = 0; i < 40; i++)
            dense[o * 40 + i] = rows[i * 132 + o];
    write_pack(plain, dense);
    CHECK(lost(plain, group) == 0);
    CHECK(lost(FOLDER "deepseek_yarn", group) > 0.1); /* random codes: it does use them */
    x3_linear_free(&w, dev);
    x3_checkpoint_close(c);
    x3_device_close(dev);
}

/* ---- a published checkpoint's quirks at once ---- */

static bool is_fp8(const x3_tensor *t)
{
    return t->rank == 2 && strstr(t->name, "_proj") != NULL && strstr(t->name, "eh_proj") == NULL;
}

/* A random FP8 weight in units of 2^-9 .. 2^-3 with a scale every 128 x 128, and the same as F32. */
static void make_fp8(const x3_tensor *t, x3_rng *rng, uint8_t *bytes, float *scales, float *floats)
{
    const size_t rows = t->shape[0], cols = t->shape[1], s_cols = (cols + 127) / 128;

    for (size_t i = 0; i < (rows + 127) / 128 * s_cols; i++)
        scales[i] = 0.1f + (float)x3_rng_uniform(rng);
    for (size_t i = 0; i < rows * cols; i++)
        bytes[i] = (uint8_t)(x3_rng_next(rng) % 40 | (x3_rng_next(rng) & 0x80));
    x3_dtype_to_f32(X3_F8_E4M3, bytes, rows * cols, floats);
    for (size_t i = 0; i < rows * cols; i++)
        floats[i] *= scales[i / cols / 128 * s_cols + i % cols / 128];
}

/* deepseek_yarn with random FP8 weights in two shards (fp8), and with the same numbers as F32 in one file (plain). */
static void write_fp8_twins(const char *fp8, const char *plain)
{
    enum { MAX = 256 };
    x3_checkpoint *c = x3_test_open_model(FOLDER "deepseek_yarn");
    static x3_out_tensor a[2 * MAX], b[MAX];
    static char names[MAX][128];
    x3_out_tensor *list_a[2 * MAX], *list_b[MAX];
    const void *data_a[2 * MAX], *data_b[MAX];
    void *owned[3 * MAX];
    size_t n_a = 0, n_b = 0, n_owned = 0;
    cJSON *index = cJSON_CreateObject(), *map = cJSON_AddObjectToObject(index, "weight_map");
    x3_rng rng;
    x3_err err = {0};

    CHECK(c->st->n_tensors <= MAX);
    x3_rng_init(&rng, 9, "fp8");
    for (size_t i = 0; i < c->st->n_tensors; i++) {
        const x3_tensor *t = &c->st->tensors[i];
        a[n_a] = b[n_b] = (x3_out_tensor){.name = t->name, .dtype = t->dtype, .rank = t->rank};
        memcpy(a[n_a].shape, t->shape, sizeof t->shape);
        memcpy(b[n_b].shape, t->shape, sizeof t->shape);
        if (!is_fp8(t)) {
            CHECK_OK(x3_safetensors_load(c->st, t, &owned[n_owned], &err), &err);
            data_a[n_a++] = data_b[n_b++] = owned[n_owned++];
            continue;
        }
        const size_t blocks[] = {(t->shape[0] + 127) / 128, (t->shape[1] + 127) / 128};
        uint8_t *bytes = malloc(t->n_elements);
        float *scales = malloc(blocks[0] * blocks[1] * sizeof *scales), *floats = malloc(t->n_elements * sizeof *floats);
        make_fp8(t, &rng, bytes, scales, floats);
        owned[n_owned++] = bytes;
        owned[n_owned++] = scales;
        owned[n_owned++] = floats;
        a[n_a].dtype = X3_F8_E4M3;
        data_a[n_a++] = bytes;
        snprintf(names[i], sizeof names[i], "%s_scale_inv", t->name);
        a[n_a] = (x3_out_tensor){.name = names[i], .dtype = X3_F32, .rank = 2, .shape = {blocks[0], blocks[1]}};
        data_a[n_a++] = scales;
        b[n_b].dtype = X3_F32;
        data_b[n_b++] = floats;
    }
    for (size_t i = 0; i < n_a; i++) {
        list_a[i] = &a[i];
        cJSON_AddStringToObject(map, a[i].name, i < n_a / 2 ? "model-00001-of-00002.safetensors" : "model-00002-of-00002.safetensors");
    }
    for (size_t i = 0; i < n_b; i++)
        list_b[i] = &b[i];
    CHECK_OK(x3_mkdirs(plain, &err), &err);
    CHECK_OK(x3_json_save(c->config->config, x3_test_path(plain, "config.json"), &err), &err);
    CHECK_OK(x3_safetensors_save(x3_test_path(plain, "model.safetensors"), list_b, data_b, n_b, &err), &err);
    cJSON *q = cJSON_AddObjectToObject(c->config->config, "quantization_config");
    cJSON_AddStringToObject(q, "quant_method", "fp8");
    cJSON_AddStringToObject(q, "fmt", "e4m3");
    CHECK_OK(x3_json_save(c->config->config, x3_test_path(fp8, "config.json"), &err), &err);
    CHECK_OK(x3_json_save(index, x3_test_path(fp8, "model.safetensors.index.json"), &err), &err);
    CHECK_OK(x3_safetensors_save(x3_test_path(fp8, "model-00001-of-00002.safetensors"), list_a, data_a, n_a / 2, &err), &err);
    CHECK_OK(x3_safetensors_save(x3_test_path(fp8, "model-00002-of-00002.safetensors"), list_a + n_a / 2, data_a + n_a / 2,
                                 n_a - n_a / 2, &err), &err);
    for (size_t i = 0; i < n_owned; i++)
        free(owned[i]);
    cJSON_Delete(index);
    x3_checkpoint_close(c);
}

/* As DeepSeek publishes: FP8 blocks in shards, a draft layer, second copies of the weights beside them, no
 * generation_config.json. */
X3_TEST(family_job_takes_fp8_shards_beside_other_copies)
{
    x3_family_job s;
    char plain[320];
    x3_err err = {0};

    x3_family_job_setup(&s, "deepseek_yarn", 6);
    snprintf(plain, sizeof plain, "%s.plain", s.out);
    CHECK_OK(x3_remove_tree(x3_test_path(s.model, "model.safetensors"), &err), &err);
    write_fp8_twins(s.model, plain);
    x3_test_write(x3_test_path(s.model, "consolidated.safetensors"), "x", 1);
    CHECK_OK(x3_mkdirs(x3_test_path(s.model, "original"), &err), &err);
    x3_test_write(x3_test_path(s.model, "original/consolidated.00.pth"), "x", 1);
    CHECK(lost(plain, s.model) == 0); /* to the bit what the F32 twin computes */
    s.o.mtp_bits = 6;
    CHECK_OK(x3_test_run_job(&s.o, &err), &err);
    x3_family_job_verifies(&s);
    CHECK(lost(plain, s.out) < 0.02);
    CHECK(!x3_path_exists(x3_test_path(s.out, "consolidated.safetensors")));
    CHECK(!x3_path_exists(x3_test_path(s.out, "original/consolidated.00.pth")));
    x3_checkpoint *c = x3_test_open_model(s.out);
    for (size_t i = 0; i < c->st->n_tensors; i++) /* what is not quantized stays FP8, with its scales */
        CHECK(c->st->tensors[i].dtype != X3_F8_E4M3 || strstr(c->st->tensors[i].name, ".kv_b_proj.weight") != NULL);
    CHECK(x3_safetensors_find(c->st, "model.layers.2.self_attn.kv_b_proj.weight_scale_inv") != NULL);
    CHECK(x3_safetensors_find(c->st, "model.layers.2.self_attn.o_proj.weight_scale_inv") == NULL);
    x3_checkpoint_close(c);
}
