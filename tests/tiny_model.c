#include "tests/tiny_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "formats/json.h"
#include "formats/safetensors_write.h"
#include "tests/test.h"

void x3_test_write(const char *path, const void *data, size_t n)
{
    x3_err err = {0};

    CHECK_OK(x3_write_file(path, data, n, &err), &err);
}

void x3_tiny_text(const char *path, size_t n, uint64_t seed)
{
    static const char letters[] = "eeetaoinshrdlu cmfwypvbgk \n.,TAIS0123456789";
    char *text = malloc(n);
    x3_rng rng;

    x3_rng_init(&rng, seed, "text");
    for (size_t i = 0; i < n; i++)
        text[i] = letters[x3_rng_next(&rng) % (sizeof letters - 1)];
    x3_test_write(path, text, n);
    free(text);
}

/* ---- tokenizer: one token a byte ---- */

void x3_tiny_tokenizer(const char *dir)
{
    char *text = NULL;
    size_t size = 0;
    FILE *f = open_memstream(&text, &size);
    int next = 256;

    fprintf(f, "{\"added_tokens\": [], \"normalizer\": null, \"pre_tokenizer\": {\"type\": \"ByteLevel\", "
               "\"add_prefix_space\": false, \"use_regex\": false}, \"decoder\": {\"type\": \"ByteLevel\"}, "
               "\"model\": {\"type\": \"BPE\", \"merges\": [], \"vocab\": {");
    for (int b = 0; b < 256; b++) { /* the printable alphabet of GPT-2 */
        bool printable = (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || b >= 174;
        int code = printable ? b : next++;
        fprintf(f, "%s\"%s", b == 0 ? "" : ", ", code == '"' || code == '\\' ? "\\" : "");
        if (code < 128)
            fputc(code, f);
        else
            fprintf(f, "%c%c", 0xC0 | (code >> 6), 0x80 | (code & 0x3F));
        fprintf(f, "\": %d", b);
    }
    fprintf(f, "}}}\n");
    fclose(f);
    x3_test_write(x3_test_path(dir, "tokenizer.json"), text, size);
    free(text);
}

static bool is_family(const x3_tiny *t, const char *name)
{
    return strcmp(t->model_type, name) == 0;
}

/* Members for the experts. */
static const char *moe_config(const x3_tiny *t)
{
    static char text[512];

    text[0] = '\0';
    if (is_family(t, "qwen3_moe"))
        snprintf(text, sizeof text, "\"num_experts\": %zu, \"num_experts_per_tok\": %zu, \"moe_intermediate_size\": %zu, "
                                    "\"norm_topk_prob\": true, \"decoder_sparse_step\": 1, \"mlp_only_layers\": [%s],",
                 t->experts, t->chosen, t->expert_inner, t->dense > 0 ? "0" : "");
    if (is_family(t, "glm4_moe"))
        snprintf(text, sizeof text, "\"n_routed_experts\": %zu, \"num_experts_per_tok\": %zu, \"moe_intermediate_size\": %zu, "
                                    "\"n_shared_experts\": %zu, \"first_k_dense_replace\": %zu, \"use_qk_norm\": %s, "
                                    "\"routed_scaling_factor\": 1.5,",
                 t->experts, t->chosen, t->expert_inner, t->shared, t->dense, t->qk_norm ? "true" : "false");
    if (is_family(t, "mixtral"))
        snprintf(text, sizeof text, "\"num_local_experts\": %zu, \"num_experts_per_tok\": %zu,", t->experts, t->chosen);
    return text;
}

static void write_config(const char *dir, const x3_tiny *t)
{
    char text[2048];
    int n = snprintf(text, sizeof text,
                     "{%s%s \"architectures\": [\"LlamaForCausalLM\"], \"model_type\": \"%s\", \"hidden_size\": %zu, "
                     "\"intermediate_size\": %zu, \"num_attention_heads\": %zu, \"num_key_value_heads\": %zu, "
                     "\"head_dim\": %zu, \"num_hidden_layers\": %zu, \"vocab_size\": %zu, \"hidden_act\": \"silu\", "
                     "\"max_position_embeddings\": 4096, \"rms_norm_eps\": 1e-6, %s \"tie_word_embeddings\": %s, "
                     "\"attention_bias\": %s, \"eos_token_id\": 10%s}\n",
                     t->more_config == NULL ? "" : t->more_config, moe_config(t), t->model_type, t->hidden,
                     is_family(t, "mixtral") ? t->expert_inner : t->inner, t->heads, t->kv_heads,
                     t->head_dim, t->layers, t->vocab, t->no_rope != NULL ? "" : "\"rope_theta\": 10000.0,",
                     t->tied ? "true" : "false", t->attention_bias ? "true" : "false",
                     t->dtype == X3_F8_E4M3
                         ? ", \"quantization_config\": {\"quant_method\": \"fp8\", \"weight_block_size\": [128, 128]}"
                         : "");
    x3_test_write(x3_test_path(dir, "config.json"), text, (size_t)n);
    x3_test_write(x3_test_path(dir, "generation_config.json"), "{\"eos_token_id\": [10, 7]}\n", 26);
}

/* ---- tensors ---- */

struct list {
    x3_out_tensor t[512];
    char names[512][128];
    void *data[512];
    size_t n;
    const x3_tiny *model;
};

static void *encode(const float *x, size_t n, x3_dtype dtype)
{
    void *out = calloc(n + 1, x3_dtype_bytes(dtype));

    for (size_t i = 0; i < n; i++)
        if (dtype == X3_BF16)
            ((uint16_t *)out)[i] = x3_f32_to_bf16(x[i]);
        else if (dtype == X3_F16)
            ((uint16_t *)out)[i] = x3_f32_to_f16(x[i]);
        else if (dtype == X3_F32)
            ((float *)out)[i] = x[i];
        else /* values that E4M3 has: sign and 1.0 to 1.875, with the block scale below */
            ((uint8_t *)out)[i] = (uint8_t)((x[i] < 0 ? 0x80 : 0) | 0x38 | ((unsigned)(fabsf(x[i]) * 1000) & 7));
    return out;
}

X3_PRINTF(7, 8)
static void add(struct list *l, x3_dtype dtype, size_t rows, size_t cols, float mean, float scale, const char *format, ...)
{
    x3_out_tensor *t = &l->t[l->n];
    size_t n = rows * (cols == 0 ? 1 : cols);
    float *x = malloc((n + 1) * sizeof *x);
    va_list args;
    x3_rng rng;

    va_start(args, format);
    vsnprintf(l->names[l->n], sizeof l->names[0], format, args);
    va_end(args);
    if (l->model->drop != NULL && strcmp(l->model->drop, l->names[l->n]) == 0) {
        free(x);
        return;
    }
    x3_rng_init(&rng, 17, l->names[l->n]);
    for (size_t i = 0; i < n; i++)
        x[i] = mean + scale * (float)x3_rng_normal(&rng);
    if (l->model->poison != NULL && strcmp(l->model->poison, l->names[l->n]) == 0)
        x[5] = NAN;
    *t = (x3_out_tensor){.name = l->names[l->n], .dtype = dtype, .rank = cols == 0 ? 1 : 2, .shape = {rows, cols}};
    l->data[l->n++] = encode(x, n, dtype);
    free(x);
}

/* A linear: weights of unit gain, FP8 with a scale for every 128 x 128 block. */
static void add_linear(struct list *l, const char *name, size_t out, size_t in, bool bias, x3_dtype dtype)
{
    add(l, dtype, out, in, 0, 1 / sqrtf((float)in), "%s.weight", name);
    if (dtype == X3_F8_E4M3)
        add(l, X3_F32, (out + 127) / 128, (in + 127) / 128, 1 / sqrtf((float)in), 0.1f / sqrtf((float)in),
            "%s.weight_scale_inv", name);
    if (bias)
        add(l, l->model->dtype == X3_F8_E4M3 ? X3_BF16 : dtype, out, 0, 0, 0.1f, "%s.bias", name);
}

/* Fills [n] as add() would for a tensor of this name. */
static void fill(float *x, size_t n, float scale, const char *name)
{
    x3_rng rng;

    x3_rng_init(&rng, 17, name);
    for (size_t i = 0; i < n; i++)
        x[i] = scale * (float)x3_rng_normal(&rng);
}

/* One tensor for the `n_parts` linears of all experts, [out][in] each, the same values as tensors of their own have. */
static void add_stack(struct list *l, const char *name, const char *experts, const char *const *parts, size_t n_parts,
                      size_t out, size_t in)
{
    const x3_tiny *t = l->model;
    const size_t all = n_parts * out, matrix = all * in;
    const bool out_in = t->stack == X3_TINY_OUT_IN;
    float *x = malloc(t->experts * matrix * sizeof *x), *one = malloc(out * in * sizeof *one);
    char part[160];

    for (size_t e = 0; e < t->experts; e++)
        for (size_t p = 0; p < n_parts; p++) {
            snprintf(part, sizeof part, "%s.%zu.%s.weight", experts, e, parts[p]);
            fill(one, out * in, 1 / sqrtf((float)in), part);
            for (size_t o = 0; o < out; o++)
                for (size_t i = 0; i < in; i++)
                    x[e * matrix + (out_in ? (p * out + o) * in + i : i * all + p * out + o)] = one[o * in + i];
        }
    snprintf(l->names[l->n], sizeof l->names[0], "%s.%s", experts, name);
    l->t[l->n] = (x3_out_tensor){.name = l->names[l->n], .dtype = t->dtype, .rank = 3,
                                 .shape = {t->experts, out_in ? all : in, out_in ? in : all}};
    l->data[l->n++] = encode(x, t->experts * matrix, t->dtype);
    free(x);
    free(one);
}

static void add_mlp(struct list *l, const char *module, size_t inner)
{
    const x3_tiny *t = l->model;
    char name[96];

    snprintf(name, sizeof name, "%s.gate_proj", module);
    add_linear(l, name, inner, t->hidden, false, t->dtype);
    snprintf(name, sizeof name, "%s.up_proj", module);
    add_linear(l, name, inner, t->hidden, false, t->dtype);
    snprintf(name, sizeof name, "%s.down_proj", module);
    add_linear(l, name, t->hidden, inner, false, t->dtype);
}

static void add_experts(struct list *l, size_t layer)
{
    static const char *const usual[] = {"gate_proj", "up_proj", "down_proj"}, *const mixtral[] = {"w1", "w3", "w2"};
    const x3_tiny *t = l->model;
    const char *const *parts = is_family(t, "mixtral") ? mixtral : usual;
    const char *block = is_family(t, "mixtral") ? "block_sparse_moe" : "mlp";
    char experts[64], name[96];

    snprintf(experts, sizeof experts, "model.layers.%zu.%s.experts", layer, block);
    snprintf(name, sizeof name, "model.layers.%zu.%s.gate", layer, block);
    add(l, t->dtype, t->experts, t->hidden, 0, 1 / sqrtf((float)t->hidden), "%s.weight", name);
    if (is_family(t, "glm4_moe")) {
        size_t at = l->n;
        add(l, X3_F32, t->experts, 0, 0, 0, "%s.e_score_correction_bias", name);
        if (t->correction != NULL && l->n > at)
            memcpy(l->data[at], t->correction, t->experts * sizeof *t->correction);
        snprintf(name, sizeof name, "model.layers.%zu.mlp.shared_experts", layer);
        if (t->shared > 0)
            add_mlp(l, name, t->shared * t->expert_inner);
    }
    if (t->stack != X3_TINY_SEPARATE) {
        add_stack(l, "gate_up_proj", experts, parts, 2, t->expert_inner, t->hidden);
        add_stack(l, "down_proj", experts, parts + 2, 1, t->hidden, t->expert_inner);
        return;
    }
    for (size_t e = 0; e < t->experts; e++)
        for (int p = 0; p < 3; p++) {
            snprintf(name, sizeof name, "%s.%zu.%s", experts, e, parts[p]);
            add_linear(l, name, p == 2 ? t->hidden : t->expert_inner, p == 2 ? t->expert_inner : t->hidden, false, t->dtype);
        }
}

static void add_layer(struct list *l, size_t layer)
{
    const x3_tiny *t = l->model;
    const size_t q = t->heads * t->head_dim, kv = t->kv_heads * t->head_dim;
    const bool bias = t->attention_bias || strcmp(t->model_type, "qwen2") == 0;
    const x3_dtype small = t->dtype == X3_F8_E4M3 ? X3_BF16 : t->dtype;
    char name[64];

#define NAME(part) (snprintf(name, sizeof name, "model.layers.%zu.%s", layer, part), name)
    add_linear(l, NAME("self_attn.q_proj"), q, t->hidden, bias, t->dtype);
    add_linear(l, NAME("self_attn.k_proj"), kv, t->hidden, bias, t->dtype);
    add_linear(l, NAME("self_attn.v_proj"), kv, t->hidden, bias, t->dtype);
    add_linear(l, NAME("self_attn.o_proj"), t->hidden, q, t->attention_bias && !is_family(t, "glm4_moe"), t->dtype);
    if (t->experts > 0 && layer >= t->dense)
        add_experts(l, layer);
    else
        add_mlp(l, NAME("mlp"), t->inner);
    add(l, small, t->hidden, 0, 1, 0.1f, "model.layers.%zu.input_layernorm.weight", layer);
    add(l, small, t->hidden, 0, 1, 0.1f, "model.layers.%zu.post_attention_layernorm.weight", layer);
    if (t->qk_norm && !is_family(t, "mixtral")) {
        add(l, small, t->head_dim, 0, 1, 0.1f, "model.layers.%zu.self_attn.q_norm.weight", layer);
        add(l, small, t->head_dim, 0, 1, 0.1f, "model.layers.%zu.self_attn.k_norm.weight", layer);
    }
#undef NAME
}

static void save_shards(const char *dir, struct list *l, size_t n_shards)
{
    cJSON *index = cJSON_CreateObject(), *map = cJSON_AddObjectToObject(index, "weight_map");
    x3_err err = {0};

    for (size_t s = 0; s < n_shards; s++) {
        x3_out_tensor *tensors[512];
        const void *data[512];
        char file[64];
        size_t n = 0;
        snprintf(file, sizeof file, "model-%05zu-of-%05zu.safetensors", s + 1, n_shards);
        for (size_t i = 0; i < l->n; i++)
            if (i * n_shards / l->n == s) {
                tensors[n] = &l->t[i];
                data[n++] = l->data[i];
                cJSON_AddStringToObject(map, l->t[i].name, file);
            }
        CHECK_OK(x3_safetensors_save(x3_test_path(dir, n_shards == 1 ? "model.safetensors" : file), tensors, data, n, &err),
                 &err);
    }
    if (n_shards > 1)
        CHECK_OK(x3_json_save(index, x3_test_path(dir, "model.safetensors.index.json"), &err), &err);
    cJSON_Delete(index);
}

void x3_tiny_write(const char *dir, const x3_tiny *t)
{
    struct list *l = calloc(1, sizeof *l);
    const x3_dtype small = t->dtype == X3_F8_E4M3 ? X3_BF16 : t->dtype;
    x3_err err = {0};

    CHECK_OK(x3_mkdirs(dir, &err), &err);
    l->model = t;
    add(l, small, t->vocab, t->hidden, 0, 1, "model.embed_tokens.weight");
    for (size_t i = 0; i < t->layers; i++)
        add_layer(l, i);
    add(l, small, t->hidden, 0, 1, 0.1f, "model.norm.weight");
    if (!t->tied)
        add_linear(l, "lm_head", t->vocab, t->hidden, false, small);
    if (t->extra != NULL)
        add(l, X3_BF16, 4, 0, 0, 1, "%s", t->extra);
    write_config(dir, t);
    x3_tiny_tokenizer(dir);
    save_shards(dir, l, t->shards == 0 ? 1 : t->shards);
    for (size_t i = 0; i < l->n; i++)
        free(l->data[i]);
    free(l);
}

uint64_t x3_test_shard_hash(const char *pack)
{
    uint64_t hash = 0;
    x3_err err = {0};

    CHECK_OK(x3_hash_file(x3_test_path(pack, "model-00001-of-00001.safetensors"), &hash, &err), &err);
    return hash;
}
