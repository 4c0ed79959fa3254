/* Relative output error of single linears beside the peer's: golden/hessian.safetensors, golden/linear_anchor.json.
 *
 *     bench_anchor DATA [--seeds N] [--threads N] [K ...]
 *
 * Mean over seeds 1..N (default 8); target W (no blending); tr(E' H E) / tr(W' H W) with the undamped H. Exit 1 when the
 * geometric mean over the peer's 48 cells is above 1.00 or a cell above 1.03. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/exl3.h"
#include "formats/io.h"
#include "formats/json.h"
#include "formats/safetensors.h"
#include "quant/quantize.h"

static const char *const linears[] = {"model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj",
                                      "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.down_proj"};

struct anchor {
    x3_device *dev;
    x3_safetensors *st;
    cJSON *peer;
    int n_seeds;
};

static x3_status load(struct anchor *a, const char *linear, const char *part, float **d_out, const x3_tensor **t, x3_err *err)
{
    char name[128];
    float *host = NULL;
    x3_status rc;

    snprintf(name, sizeof name, "%s.%s", linear, part);
    *t = x3_safetensors_find(a->st, name);
    if (*t == NULL)
        return x3_fail(err, X3_ERR_INPUT, "golden/hessian.safetensors lacks %s", name);
    X3_TRY(rc, out, x3_alloc(&host, (*t)->n_elements, sizeof *host, err));
    X3_TRY(rc, out, x3_safetensors_read_f32(a->st, *t, 0, (*t)->n_elements, host, err));
    X3_TRY(rc, out, x3_device_floats(a->dev, d_out, (*t)->n_elements, err));
    X3_TRY(rc, out, a->dev->ops->upload(a->dev, *d_out, host, (*t)->n_elements * sizeof *host, err));
out:
    free(host);
    return rc;
}

/* The peer's error, or 0 where it has none. */
static double peer_error(const struct anchor *a, const char *linear, x3_codebook codebook, int K)
{
    for (const cJSON *c = a->peer->child; c != NULL; c = c->next)
        if (strcmp(cJSON_GetObjectItem(c, "key")->valuestring, linear) == 0 &&
            strcmp(cJSON_GetObjectItem(c, "cb")->valuestring, x3_codebook_name(codebook)) == 0 &&
            cJSON_GetObjectItem(c, "K")->valueint == K)
            return cJSON_GetObjectItem(c, "rel_output_err")->valuedouble;
    return 0;
}

static x3_status our_error(struct anchor *a, const char *linear, x3_codebook codebook, int K, double *mean, x3_err *err)
{
    x3_hessian *h = NULL;
    x3_quant_linear q = {.name = linear, .K = K};
    x3_quant_options options = X3_QUANT_DEFAULTS;
    const x3_tensor *t;
    float *d_w = NULL, *d_h = NULL;
    bool uncalibrated;
    x3_status rc;

    *mean = 0;
    options.codebook = codebook;
    X3_TRY(rc, out, load(a, linear, "W", &d_w, &t, err));
    q.n_out = t->shape[0];
    q.n_in = t->shape[1];
    q.d_w = d_w;
    X3_TRY(rc, out, load(a, linear, "H", &d_h, &t, err));
    X3_TRY(rc, out, x3_hessian_create(&h, a->dev, q.n_in, false, err));
    X3_TRY(rc, out, a->dev->ops->copy(a->dev, h->d_a, d_h, q.n_in * q.n_in * sizeof(float), err));
    h->n_rows = 32768;
    for (int seed = 1; seed <= a->n_seeds; seed++) {
        options.seed = (uint64_t)seed;
        X3_TRY(rc, out, x3_quantize_group(a->dev, &options, linear, h, &q, 1, &uncalibrated, err));
        *mean += q.error_source / a->n_seeds;
        x3_quant_linear_free(a->dev, &q);
    }
out:
    x3_hessian_free(h);
    x3_device_free(a->dev, d_w);
    x3_device_free(a->dev, d_h);
    return rc;
}

static x3_status run(struct anchor *a, int only_K, bool *passed, x3_err *err)
{
    double log_sum = 0, worst = 0;
    int n_cells = 0;
    x3_status rc = X3_OK;

    printf("| linear | codebook | K | ours | peer | ratio |\n| --- | --- | --- | --- | --- | --- |\n");
    for (size_t i = 0; i < sizeof linears / sizeof linears[0]; i++)
        for (int cb = 2; cb >= 0; cb--)
            for (int K = 1; K <= 8; K++) {
                double ours, peer = peer_error(a, linears[i], (x3_codebook)cb, K);
                if (only_K != 0 && K != only_K)
                    continue;
                X3_TRY(rc, out, our_error(a, linears[i], (x3_codebook)cb, K, &ours, err));
                printf("| %s | %s | %d | %.5g |", linears[i] + strlen("model.layers."), x3_codebook_name((x3_codebook)cb),
                       K, ours);
                if (peer == 0) {
                    printf(" | |\n");
                    continue;
                }
                printf(" %.5g | %.4f |\n", peer, ours / peer);
                fflush(stdout);
                log_sum += log(ours / peer);
                worst = fmax(worst, ours / peer);
                n_cells++;
            }
    printf("\ngeometric mean of %d ratios %.4f (at most 1.00), worst %.4f (at most 1.03), seeds 1..%d\n", n_cells,
           exp(log_sum / n_cells), worst, a->n_seeds);
    *passed = exp(log_sum / n_cells) <= 1 && worst <= 1.03;
out:
    return rc;
}

int main(int argc, char **argv)
{
    struct anchor a = {.n_seeds = 8};
    x3_findings findings = {0};
    char path[1024], *text = NULL;
    int n_threads = 0, only_K = 0;
    bool passed = false;
    size_t n_bytes;
    x3_err err = {0};
    x3_status rc;

    if (argc < 2)
        return fprintf(stderr, "usage: %s DATA [--seeds N] [--threads N] [K]\n", argv[0]), 2;
    for (int i = 2; i < argc; i++)
        if (strcmp(argv[i], "--seeds") == 0 && i + 1 < argc)
            a.n_seeds = atoi(argv[++i]);
        else if (strcmp(argv[i], "--threads") == 0 && i + 1 < argc)
            n_threads = atoi(argv[++i]);
        else
            only_K = atoi(argv[i]);
    snprintf(path, sizeof path, "%s/golden/hessian.safetensors", argv[1]);
    X3_TRY(rc, out, x3_safetensors_open(&a.st, path, &findings, &err));
    snprintf(path, sizeof path, "%s/golden/linear_anchor.json", argv[1]);
    X3_TRY(rc, out, x3_read_file(&text, &n_bytes, path, 1 << 20, &err));
    X3_TRY(rc, out, x3_json_parse(&a.peer, text, n_bytes, path, &err));
    X3_TRY(rc, out, x3_device_open(&a.dev, "cpu", n_threads, &err));
    rc = run(&a, only_K, &passed, &err);
out:
    if (rc != X3_OK)
        fprintf(stderr, "error: %s\n", err.text);
    free(text);
    cJSON_Delete(a.peer);
    x3_safetensors_close(a.st);
    x3_findings_free(&findings);
    x3_device_close(a.dev);
    return rc == X3_OK && passed ? 0 : 1;
}
