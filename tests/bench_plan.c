/* A plan for a checkpoint of GLM-5.3's full shape (78 layers, 256 experts, 57,600 expert tensors; shards as sparse files, a
 * generated measurement): seconds and peak memory. bench_plan PROGRAM FOLDER, PROGRAM being exl3-quantize and FOLDER a place
 * for about 40 MB. */
#include <fcntl.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "formats/io.h"
#include "quant/measure.h"

static const char config[] =
    "{\"architectures\": [\"GlmMoeDsaForCausalLM\"], \"model_type\": \"glm_moe_dsa\", \"attention_bias\": false, "
    "\"first_k_dense_replace\": 3, \"head_dim\": 64, \"hidden_act\": \"silu\", \"hidden_size\": 6144, \"index_head_dim\": 128, "
    "\"index_n_heads\": 32, \"index_topk\": 2048, \"intermediate_size\": 12288, \"kv_lora_rank\": 512, "
    "\"max_position_embeddings\": 202752, \"mlp_bias\": false, \"moe_intermediate_size\": 2048, \"n_group\": 1, "
    "\"n_routed_experts\": 256, \"n_shared_experts\": 1, \"norm_topk_prob\": true, \"num_attention_heads\": 64, "
    "\"num_experts_per_tok\": 8, \"num_hidden_layers\": 78, \"num_key_value_heads\": 64, \"q_lora_rank\": 2048, "
    "\"qk_head_dim\": 256, \"qk_nope_head_dim\": 192, \"qk_rope_head_dim\": 64, \"rms_norm_eps\": 1e-05, "
    "\"rope_parameters\": {\"rope_theta\": 1000000.0, \"rope_type\": \"default\"}, \"routed_scaling_factor\": 2.5, "
    "\"scoring_func\": \"sigmoid\", \"tie_word_embeddings\": false, \"topk_group\": 1, \"topk_method\": \"noaux_tc\", "
    "\"v_head_dim\": 256, \"vocab_size\": 154880}\n";

/* A shard with a header and a hole for its data. */
struct shard {
    FILE *header;
    char *text, path[600];
    size_t n_text;
    uint64_t at;
};

static void begin(struct shard *s, const char *folder, size_t i, size_t n)
{
    *s = (struct shard){0};
    snprintf(s->path, sizeof s->path, "%s/model/model-%05zu-of-%05zu.safetensors", folder, i + 1, n);
    s->header = open_memstream(&s->text, &s->n_text);
    fputs("{\"__metadata__\":{\"format\":\"pt\"}", s->header);
}

static void add(struct shard *s, const char *name, const char *suffix, size_t rows, size_t cols, size_t size)
{
    const uint64_t end = s->at + (uint64_t)rows * (cols == 0 ? 1 : cols) * size;

    fprintf(s->header, ",\"%s%s\":{\"dtype\":\"%s\",\"shape\":[%zu", name, suffix, size == 4 ? "F32" : "BF16", rows);
    if (cols > 0)
        fprintf(s->header, ",%zu", cols);
    fprintf(s->header, "],\"data_offsets\":[%llu,%llu]}", (unsigned long long)s->at, (unsigned long long)end);
    s->at = end;
}

static bool end(struct shard *s)
{
    bool ok = false;
    int fd;

    fputc('}', s->header);
    fclose(s->header);
    uint64_t n = s->n_text;
    fd = open(s->path, O_WRONLY | O_CREAT | O_TRUNC, 0666);
    if (fd >= 0)
        ok = write(fd, &n, 8) == 8 && write(fd, s->text, n) == (ssize_t)n && ftruncate(fd, (off_t)(8 + n + s->at)) == 0 &&
             close(fd) == 0;
    free(s->text);
    return ok;
}

static x3_status write_shards(const x3_model *m, const char *folder, x3_err *err)
{
    struct shard s;

    for (size_t i = 0; i <= m->n_layers; i++) {
        begin(&s, folder, i, m->n_layers + 1);
        for (size_t j = 0; i < m->n_layers && j < m->layers[i].n_linears; j++)
            add(&s, m->layers[i].linears[j].name, ".weight", m->layers[i].linears[j].n_out, m->layers[i].linears[j].n_in, 2);
        for (size_t j = 0; i < m->n_layers && j < m->layers[i].n_vectors; j++)
            add(&s, m->layers[i].vectors[j].name, "", m->layers[i].vectors[j].n, 0, 2);
        if (i == m->n_layers) {
            add(&s, m->embed_name, "", m->vocab, m->hidden, 2);
            add(&s, m->head.name, ".weight", m->vocab, m->hidden, 2);
            add(&s, m->final_norm.name, "", m->hidden, 0, 2);
        }
        if (!end(&s))
            return x3_fail(err, X3_ERR_IO, "%s: cannot write", s.path);
    }
    return X3_OK;
}

/* A measurement as a real one would look: costs over four orders of magnitude, experts small. */
static x3_status write_measurement(const x3_checkpoint *c, const char *path, x3_err *err)
{
    const x3_linear_desc *d;
    cJSON *file = NULL;
    char *source = NULL;
    FILE *f = NULL;
    size_t layer;
    x3_rng rng;
    x3_status rc;

    X3_TRY(rc, out, x3_measure_source(&file, c, err));
    source = cJSON_PrintUnformatted(file);
    f = fopen(path, "w");
    if (source == NULL || f == NULL) {
        rc = x3_fail(err, X3_ERR_IO, "%s: cannot write", path);
        goto out;
    }
    fprintf(f, "{\"exl3_measurement\":3,\"source\":%s,\"options\":{\"codebook\":\"mul1\",\"noise_bits\":3},\"finished_layers\":%zu,\"linears\":[",
            source, c->model->n_layers);
    x3_rng_init(&rng, 1, "costs");
    for (size_t i = 0; (d = x3_model_linear(c->model, i, &layer)) != NULL && layer < c->model->n_layers; i++)
        if (d->quantized)
            fprintf(f, "%s{\"name\":\"%s\",\"kl\":%.6g}", i == 0 ? "" : ",", d->name,
                    (strstr(d->name, "experts") != NULL ? 1e-6 : 1e-4) * exp(2 * x3_rng_normal(&rng)));
    fprintf(f, "]}\n");
out:
    if (f != NULL && fclose(f) != 0 && rc == X3_OK)
        rc = x3_fail(err, X3_ERR_IO, "%s: cannot write", path);
    free(source);
    cJSON_Delete(file);
    return rc;
}

static x3_status prepare(const char *folder, x3_err *err)
{
    char model[600], path[700];
    x3_hf_config *hf = NULL;
    x3_findings findings = {0};
    x3_checkpoint *c = NULL;
    x3_model *m = NULL;
    x3_status rc;

    snprintf(model, sizeof model, "%s/model", folder);
    X3_TRY(rc, out, x3_mkdirs(model, err));
    snprintf(path, sizeof path, "%s/config.json", model);
    X3_TRY(rc, out, x3_write_file(path, config, sizeof config - 1, err));
    X3_TRY(rc, out, x3_hf_config_load(&hf, model, err));
    X3_TRY(rc, out, x3_model_create(&m, hf, NULL, err));
    X3_TRY(rc, out, write_shards(m, folder, err));
    X3_TRY(rc, out, x3_checkpoint_open(&c, model, NULL, &findings, err));
    snprintf(path, sizeof path, "%s/measure.json", folder);
    rc = write_measurement(c, path, err);
out:
    for (size_t i = 0; i < findings.n_items && i < 5; i++)
        fprintf(stderr, "%s\n", findings.items[i]);
    x3_findings_free(&findings);
    x3_checkpoint_close(c);
    x3_model_free(m);
    x3_hf_config_free(hf);
    return rc;
}

int main(int argc, char **argv)
{
    char model[600], measure[600], recipe[600];
    struct rusage usage;
    x3_err err = {0};
    int status;

    if (argc != 3)
        return fprintf(stderr, "usage: %s PROGRAM FOLDER\n", argv[0]), 2;
    if (prepare(argv[2], &err) != X3_OK)
        return fprintf(stderr, "%s\n", err.text), 1;
    snprintf(model, sizeof model, "%s/model", argv[2]);
    snprintf(measure, sizeof measure, "%s/measure.json", argv[2]);
    snprintf(recipe, sizeof recipe, "%s/recipe.yaml", argv[2]);
    double start = x3_seconds();
    pid_t child = fork();
    if (child == 0)
        _exit(execl(argv[1], argv[1], "plan", model, "--measure", measure, "--bits", "3.38", "--out", recipe, (char *)NULL));
    if (child < 0 || wait4(child, &status, 0, &usage) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0)
        return fprintf(stderr, "%s failed\n", argv[1]), 1;
    printf("plan of 57,600 experts: %.1f s, peak memory %.2f GB\n", x3_seconds() - start, (double)usage.ru_maxrss * 1024 / 1e9);
    return 0;
}
