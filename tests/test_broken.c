/* Broken input: every row is one checkpoint or text with one fault. The job must fail with a message that names the
 * culprit, and leave no output. tests/test_safetensors.c has the faults inside one file in more detail. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "quant/job.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

static struct {
    char model[300], out[300], text[300];
} at;

static void put(const char *name, const void *data, size_t n)
{
    x3_test_write(x3_test_path(at.model, name), data, n);
}

static void put_text(const char *name, const char *text)
{
    put(name, text, strlen(text));
}

static void remove_file(const char *name)
{
    x3_err err = {0};

    CHECK_OK(x3_remove_tree(x3_test_path(at.model, name), &err), &err);
}

static char *read_file(const char *name, size_t *n)
{
    char *data = NULL;
    x3_err err = {0};

    CHECK_OK(x3_read_file(&data, n, x3_test_path(at.model, name), 1 << 28, &err), &err);
    return data;
}

/* Replaces the first occurrence of a text in a file by one of any length. */
static void edit(const char *name, const char *from, const char *to)
{
    size_t n;
    char *data = read_file(name, &n), *p = memmem(data, n, from, strlen(from)), *out;

    CHECK_MSG(p != NULL, "%s has no \"%s\"", name, from);
    out = malloc(n + strlen(to));
    size_t before = (size_t)(p - data), after = n - before - strlen(from);
    memcpy(out, data, before);
    memcpy(out + before, to, strlen(to));
    memcpy(out + before + strlen(to), p + strlen(from), after);
    put(name, out, before + strlen(to) + after);
    free(out);
    free(data);
}

/* In the header of a shard: the text keeps its length, so the data stays where it is. */
static void edit_shard(const char *from, const char *to)
{
    CHECK(strlen(from) == strlen(to));
    edit("model.safetensors", from, to);
}

static void set_header_length(uint64_t n)
{
    size_t bytes;
    char *data = read_file("model.safetensors", &bytes);

    memcpy(data, &n, 8);
    put("model.safetensors", data, bytes);
    free(data);
}

static void truncate_shard(const char *name, size_t keep)
{
    size_t n;
    char *data = read_file(name, &n);

    put(name, data, x3_min_size(keep, n));
    free(data);
}

#define S1 "model-00001-of-00003.safetensors"
#define S2 "model-00002-of-00003.safetensors"
#define Q0 "model.layers.0.self_attn.q_proj.weight"

/* ---- the faults ---- */

static void empty_shard(void) { put("model.safetensors", "", 0); }
static void seven_bytes(void) { truncate_shard("model.safetensors", 7); }
static void cut_header(void) { truncate_shard("model.safetensors", 100); }
static void cut_data(void) { truncate_shard("model.safetensors", 100000); }
static void header_2_63(void) { set_header_length((uint64_t)1 << 63); }
static void header_max(void) { set_header_length(UINT64_MAX); }
static void header_past_end(void) { set_header_length(1u << 26); }
static void header_zero(void) { set_header_length(0); }
static void text_for_shard(void) { put_text("model.safetensors", "This is not the file you are looking for, and not short either.\n"); }
static void lfs_pointer(void) { put_text("model.safetensors", "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 12345\n"); }
static void bad_json(void) { edit_shard("{\"__metadata__\"", "[\"__metadata__\""); }
static void unknown_dtype(void) { edit_shard("\"BF16\"", "\"BF17\""); }
static void integer_dtype(void) { edit_shard("\"BF16\"", "\"I16\" "); }
static void negative_shape(void) { edit_shard("[300,128]", "[-30,128]"); }
static void fraction_shape(void) { edit_shard("[300,128]", "[3.5,128]"); }
static void shape_and_bytes(void) { edit_shard("[300,128]", "[301,128]"); }
static void reversed_offsets(void) { edit_shard("[0,76800]", "[9,    0]"); }
static void offsets_past_end(void) { edit_shard("[0,76800]", "[0,96800]"); }
static void no_shard(void) { remove_file("model.safetensors"); }
static void only_pytorch(void) { remove_file("model.safetensors"); put_text("pytorch_model.bin", "x"); }
static void doubled_key(void) { edit_shard("\"model.layers.0.self_attn.k_proj.weight\"", "\"model.layers.0.self_attn.q_proj.weight\""); }
static void missing_shard(void) { remove_file(S2); }
static void index_names_lacking(void) { edit("model.safetensors.index.json", "{\n\t\"weight_map\":\t{", "{\"weight_map\": {\"ghost.weight\": \"" S1 "\","); }
static void shard_has_more(void) { edit("model.safetensors.index.json", "\"" Q0 "\"", "\"" Q0 "x\""); }
static void wrong_shard(void) { edit("model.safetensors.index.json", "\"" Q0 "\":\t\"" S1, "\"" Q0 "\":\t\"" S2); }
static void index_path(void) { edit("model.safetensors.index.json", S1, "../" S1); }
static void index_text(void) { put_text("model.safetensors.index.json", "weight_map"); }
static void stray_shard(void) { size_t n; char *d = read_file(S1, &n); put("model-extra.safetensors", d, n); free(d); }
static void no_config(void) { remove_file("config.json"); }
static void config_text(void) { put_text("config.json", "hello"); }
static void config_list(void) { put_text("config.json", "[]"); }
static void config_doubled(void) { edit("config.json", "{ ", "{ \"vocab_size\": 300, "); }
static void unknown_type(void) { edit("config.json", "\"model_type\": \"llama\"", "\"model_type\": \"llamatron\""); }
static void unknown_option(void) { edit("config.json", "{ ", "{ \"attn_logit_softcapping\": 30.0, "); }
static void unknown_act(void) { edit("config.json", "\"silu\"", "\"relu\""); }
static void no_theta(void) { edit("config.json", "\"rope_theta\": 10000.0,", ""); }
static void unknown_rope(void) { edit("config.json", "{ ", "{ \"rope_scaling\": {\"rope_type\": \"spiral\", \"factor\": 2}, "); }
static void no_hidden(void) { edit("config.json", "\"hidden_size\": 128,", ""); }
static void hidden_text(void) { edit("config.json", "\"hidden_size\": 128", "\"hidden_size\": \"128\""); }
static void layers_negative(void) { edit("config.json", "\"num_hidden_layers\": 1", "\"num_hidden_layers\": -1"); }
static void layers_too_many(void) { edit("config.json", "\"num_hidden_layers\": 1", "\"num_hidden_layers\": 2"); }
static void layers_huge(void) { edit("config.json", "\"num_hidden_layers\": 1", "\"num_hidden_layers\": 1e15"); }
static void layer_list_too_long(void) { edit("config.json", "{ ", "{ \"layer_types\": [\"full_attention\", \"full_attention\"], "); }
static void layer_list_unknown(void) { edit("config.json", "{ ", "{ \"layer_types\": [\"mamba\"], "); }
static void heads_uneven(void) { edit("config.json", "\"num_key_value_heads\": 1", "\"num_key_value_heads\": 3"); }
static void vocab_other(void) { edit("config.json", "\"vocab_size\": 300", "\"vocab_size\": 299"); }
static void quantized_source(void) { edit("config.json", "{ ", "{ \"quantization_config\": {\"quant_method\": \"awq\"}, "); }
static void bad_generation(void) { put_text("generation_config.json", "{\"eos_token_id\": \"</s>\"}"); }
static void no_tokenizer(void) { remove_file("tokenizer.json"); }
static void only_sentencepiece(void) { remove_file("tokenizer.json"); put_text("tokenizer.model", "x"); }
static void only_tiktoken(void) { remove_file("tokenizer.json"); put_text("tiktoken.model", "x"); }
static void compressed(void) { edit("config.json", "{ ", "{ \"quantization_config\": {\"quant_method\": \"compressed-tensors\"}, "); }
static void no_method(void) { edit("config.json", "{ ", "{ \"quantization_config\": {\"bits\": 4}, "); }
static void tokenizer_text(void) { put_text("tokenizer.json", "{}"); }
static void token_past_embedding(void) { edit("tokenizer.json", "\": 101,", "\": 9999,"); }
static void empty_text(void) { x3_test_write(at.text, "", 0); }
static void short_text(void) { x3_test_write(at.text, "short", 5); }
static void no_text(void) { x3_err e = {0}; CHECK_OK(x3_remove_tree(at.text, &e), &e); }
static void nothing(void) {}

static const struct fault {
    const char *name, *message;
    void (*apply)(void);
    const char *drop, *poison, *extra;
    size_t shards;
} faults[] = {
    {"empty shard", "model.safetensors", empty_shard, NULL, NULL, NULL, 1},
    {"shard of seven bytes", "model.safetensors", seven_bytes, NULL, NULL, NULL, 1},
    {"header cut off", "model.safetensors", cut_header, NULL, NULL, NULL, 1},
    {"data cut off", "model.safetensors", cut_data, NULL, NULL, NULL, 1},
    {"header length 2^63", "9223372036854775808", header_2_63, NULL, NULL, NULL, 1},
    {"header length 2^64-1", "18446744073709551615", header_max, NULL, NULL, NULL, 1},
    {"header past the end", "67108864", header_past_end, NULL, NULL, NULL, 1},
    {"header length 0", "model.safetensors", header_zero, NULL, NULL, NULL, 1},
    {"text in place of a shard", "model.safetensors", text_for_shard, NULL, NULL, NULL, 1},
    {"Git LFS pointer", "Git LFS pointer", lfs_pointer, NULL, NULL, NULL, 1},
    {"header is no object", "model.safetensors", bad_json, NULL, NULL, NULL, 1},
    {"unknown dtype", "BF17", unknown_dtype, NULL, NULL, NULL, 1},
    {"integer weights", "I16", integer_dtype, NULL, NULL, NULL, 1},
    {"negative shape", "model.embed_tokens.weight", negative_shape, NULL, NULL, NULL, 1},
    {"fractional shape", "model.embed_tokens.weight", fraction_shape, NULL, NULL, NULL, 1},
    {"shape and bytes disagree", "77056", shape_and_bytes, NULL, NULL, NULL, 1},
    {"offsets reversed", "model.embed_tokens.weight", reversed_offsets, NULL, NULL, NULL, 1},
    {"ranges overlap", "model.embed_tokens.weight", offsets_past_end, NULL, NULL, NULL, 1},
    {"no shard at all", "safetensors", no_shard, NULL, NULL, NULL, 1},
    {"only a PyTorch file", "pytorch_model.bin", only_pytorch, NULL, NULL, NULL, 1},
    {"doubled tensor name", Q0, doubled_key, NULL, NULL, NULL, 1},
    {"missing shard", S2, missing_shard, NULL, NULL, NULL, 3},
    {"index names a tensor its shard lacks", "ghost.weight", index_names_lacking, NULL, NULL, NULL, 3},
    {"shard holds a tensor the index lacks", Q0, shard_has_more, NULL, NULL, NULL, 3},
    {"index names another shard", Q0, wrong_shard, NULL, NULL, NULL, 3},
    {"index leads out of the folder", "../" S1, index_path, NULL, NULL, NULL, 3},
    {"index is no JSON", "model.safetensors.index.json", index_text, NULL, NULL, NULL, 3},
    {"shard in no index", "model-extra.safetensors", stray_shard, NULL, NULL, NULL, 3},
    {"no config", "config.json", no_config, NULL, NULL, NULL, 1},
    {"config is no JSON", "config.json", config_text, NULL, NULL, NULL, 1},
    {"config is a list", "config.json", config_list, NULL, NULL, NULL, 1},
    {"config doubles a key", "vocab_size", config_doubled, NULL, NULL, NULL, 1},
    {"unknown architecture", "llamatron", unknown_type, NULL, NULL, NULL, 1},
    {"option that changes the mathematics", "attn_logit_softcapping", unknown_option, NULL, NULL, NULL, 1},
    {"unknown activation", "relu", unknown_act, NULL, NULL, NULL, 1},
    {"rope theta missing", "rope_theta", no_theta, NULL, NULL, NULL, 1},
    {"unknown rope", "spiral", unknown_rope, NULL, NULL, NULL, 1},
    {"hidden size missing", "hidden_size", no_hidden, NULL, NULL, NULL, 1},
    {"hidden size is text", "hidden_size", hidden_text, NULL, NULL, NULL, 1},
    {"negative layers", "num_hidden_layers", layers_negative, NULL, NULL, NULL, 1},
    {"more layers than tensors", "model.layers.1.", layers_too_many, NULL, NULL, NULL, 1},
    {"a million billion layers", "num_hidden_layers", layers_huge, NULL, NULL, NULL, 1},
    {"layer list one too long", "layer_types has 2 entries", layer_list_too_long, NULL, NULL, NULL, 1},
    {"layer list with an unknown kind", "mamba", layer_list_unknown, NULL, NULL, NULL, 1},
    {"heads do not divide", "num_key_value_heads 3", heads_uneven, NULL, NULL, NULL, 1},
    {"vocabulary differs", "[299, 128]", vocab_other, NULL, NULL, NULL, 1},
    {"source is quantized already", "awq", quantized_source, NULL, NULL, NULL, 1},
    {"source of compressed tensors", "\"compressed-tensors\" is not supported: BF16, F16, F32 or fp8", compressed, NULL, NULL, NULL, 1},
    {"source quantized somehow", "no quant_method", no_method, NULL, NULL, NULL, 1},
    {"stop token is text", "eos_token_id", bad_generation, NULL, NULL, NULL, 1},
    {"no tokenizer", "tokenizer.json", no_tokenizer, NULL, NULL, NULL, 1},
    {"only a SentencePiece model", "tokenizer.model is not read; transformers writes", only_sentencepiece, NULL, NULL, NULL, 1},
    {"only a tiktoken model", "tiktoken.model is not read", only_tiktoken, NULL, NULL, NULL, 1},
    {"empty tokenizer", "tokenizer.json", tokenizer_text, NULL, NULL, NULL, 1},
    {"token id past the embedding", "9999", token_past_embedding, NULL, NULL, NULL, 1},
    {"empty text", "text file is empty", empty_text, NULL, NULL, NULL, 1},
    {"text shorter than a row", "a row needs 64", short_text, NULL, NULL, NULL, 1},
    {"missing text", "text.txt", no_text, NULL, NULL, NULL, 1},
    {"missing norm", "model.norm.weight is missing", nothing, "model.norm.weight", NULL, NULL, 1},
    {"missing weight", Q0 " is missing", nothing, Q0, NULL, NULL, 1},
    {"missing head", "lm_head.weight is missing, and the config does not say tie_word_embeddings", nothing, "lm_head.weight", NULL, NULL, 1},
    {"missing embedding", "model.embed_tokens.weight is missing", nothing, "model.embed_tokens.weight", NULL, NULL, 1},
    {"tensor that belongs nowhere", "model.layers.0.mlp.router.bias", nothing, NULL, NULL, "model.layers.0.mlp.router.bias", 1},
    {"bias the model does not have", "model.layers.0.self_attn.q_proj.bias", nothing, NULL, NULL, "model.layers.0.self_attn.q_proj.bias", 1},
    {"NaN in a weight", Q0 " has 1 values that are not finite, the first at element 5", nothing, NULL, Q0, NULL, 1},
    {"NaN in a norm", "model.layers.0.input_layernorm.weight has 1 values", nothing, NULL, "model.layers.0.input_layernorm.weight", NULL, 1},
};

static void check_fault(const struct fault *f)
{
    const char *dir = x3_test_temp_dir(), *texts[] = {at.text};
    x3_tiny tiny = X3_TINY_DEFAULTS;
    x3_findings findings = {0};
    x3_job *job = NULL;
    x3_err err = {0};

    snprintf(at.model, sizeof at.model, "%s/model", dir);
    snprintf(at.out, sizeof at.out, "%s/pack", dir);
    snprintf(at.text, sizeof at.text, "%s/text.txt", dir);
    tiny.layers = 1;
    tiny.drop = f->drop;
    tiny.poison = f->poison;
    tiny.extra = f->extra;
    tiny.shards = f->shards;
    x3_tiny_write(at.model, &tiny);
    x3_tiny_text(at.text, 500, 1);
    f->apply();
    x3_job_options o = {.model = at.model, .out = at.out, .bits = 2, .head_bits = 2, .quant = X3_QUANT_DEFAULTS,
                        .texts = texts, .n_texts = 1, .rows = 4, .cols = 64, .device = "cpu", .n_threads = 1,
                        .command = "test"};
    x3_status rc = x3_job_open(&job, &o, NULL, &findings, &err);
    if (rc == X3_OK)
        rc = x3_job_run(job, &err);
    CHECK_MSG(rc != X3_OK, "\"%s\" was not noticed", f->name);
    bool named = strstr(err.text, f->message) != NULL;
    for (size_t i = 0; i < findings.n_items; i++)
        named = named || strstr(findings.items[i], f->message) != NULL;
    CHECK_MSG(named, "\"%s\": the message lacks \"%s\": %s", f->name, f->message, err.text);
    CHECK_MSG(!x3_path_exists(at.out), "\"%s\" left an output folder", f->name);
    CHECK_MSG(!x3_path_exists(x3_test_path(dir, "pack.work")), "\"%s\" left a work folder", f->name);
    x3_job_close(job);
    x3_findings_free(&findings);
}

X3_TEST(broken_input_is_refused_by_name_and_leaves_nothing)
{
    for (size_t i = 0; i < sizeof faults / sizeof faults[0]; i++)
        check_fault(&faults[i]);
    printf("  %zu broken inputs\n", sizeof faults / sizeof faults[0]);
}

X3_TEST(infinite_weights_of_every_float_type_are_found)
{
    static const struct {
        x3_dtype dtype;
        const char *tensor;
    } cases[] = {{X3_BF16, "lm_head.weight"}, {X3_F16, "lm_head.weight"}, {X3_F32, "model.norm.weight"}};

    for (size_t i = 0; i < 3; i++) {
        struct fault f = {"infinite", "not finite", nothing, NULL, cases[i].tensor, NULL, 1};
        check_fault(&f);
    }
}
