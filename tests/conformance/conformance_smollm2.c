/* SmolLM2-135M against tokenizers and transformers (tests/data/smollm2). The model is not in the repository: its folder is
 * in the environment variable SMOLLM2 (make smollm2 MODEL=folder sets it), and the texts are those of --data. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include <xxhash.h>

#include "calib/corpus.h"
#include "formats/io.h"
#include "runtime/stream.h"
#include "tests/test.h"

#define EXPECTED "tests/data/smollm2/expected.safetensors.ref"

static const char *model_folder(void)
{
    const char *folder = getenv("SMOLLM2");

    if (folder == NULL || folder[0] == '\0')
        x3_test_skip("SMOLLM2 names no folder; see make smollm2");
    return folder;
}

static void *load(const char *name, size_t n_bytes)
{
    x3_findings f = {0};
    x3_err err = {0};
    x3_safetensors *st = NULL;
    void *data = NULL;

    CHECK_OK(x3_safetensors_open(&st, EXPECTED, &f, &err), &err);
    const x3_tensor *t = x3_safetensors_find(st, name);
    CHECK_MSG(t != NULL && t->n_bytes == n_bytes, "%s lacks %s, or its size is not %zu bytes", EXPECTED, name, n_bytes);
    CHECK_OK(x3_safetensors_load(st, t, &data, &err), &err);
    x3_safetensors_close(st);
    return data;
}

static void check_ids(const x3_tokenizer *tok, const char *text)
{
    char name[64], path[512];
    snprintf(name, sizeof name, "%s.ids", text);
    snprintf(path, sizeof path, "%s/text/%s", x3_test_data_dir(), text);
    int64_t *expected = load(name, 16);
    const char *paths[1] = {path};
    x3_corpus *corpus = NULL;
    x3_ids ids = {0};
    x3_err err = {0};

    CHECK_OK(x3_corpus_load(&corpus, paths, 1, X3_USE_EVALUATION, &err), &err);
    CHECK_OK(x3_tokenizer_encode(tok, corpus->text, corpus->n_bytes, false, 0, &ids, &err), &err);
    uint64_t hash = XXH3_64bits(ids.items, ids.n_items * sizeof ids.items[0]);
    printf("  %s: %zu token ids, XXH3 %016llx\n", text, ids.n_items, (unsigned long long)hash);
    CHECK_MSG(ids.n_items == (size_t)expected[0], "%s: %zu ids, tokenizers gives %lld", text, ids.n_items, (long long)expected[0]);
    CHECK_MSG(hash == (uint64_t)expected[1], "%s: other ids than tokenizers gives", text);
    x3_ids_free(&ids);
    x3_corpus_free(corpus);
    free(expected);
}

X3_TEST(smollm2_token_ids_equal_tokenizers)
{
    char path[512];
    snprintf(path, sizeof path, "%s/tokenizer.json", model_folder());
    x3_tokenizer *tok = NULL;
    x3_err err = {0};

    CHECK_OK(x3_tokenizer_load(&tok, path, &err), &err);
    check_ids(tok, "calib.jsonl");
    check_ids(tok, "heldout.jsonl");
    x3_tokenizer_free(tok);
}

#define ROWS 2
#define COLS 96
#define PER_POSITION 32

X3_TEST(smollm2_logits_equal_transformers)
{
    const char *folder = model_folder();
    int32_t *ids = load("input_ids", sizeof(int32_t) * ROWS * COLS);
    int32_t *indices = load("indices", sizeof(int32_t) * ROWS * COLS * PER_POSITION);
    float *expected = load("logits", sizeof(float) * ROWS * COLS * PER_POSITION);
    x3_findings f = {0};
    x3_err err = {0};
    x3_checkpoint *c = NULL;
    x3_device *dev = NULL;
    x3_weight head = {0};
    double worst = 0;

    CHECK_OK(x3_checkpoint_open(&c, folder, NULL, &f, &err), &err);
    CHECK_OK(x3_device_open(&dev, "cpu", 0, &err), &err);
    const size_t hidden = c->model->hidden, vocab = c->model->vocab, n = ROWS * COLS;
    float *states = malloc(n * hidden * sizeof *states), *logits = malloc(n * vocab * sizeof *logits);
    CHECK_OK(x3_stream_hidden(dev, c, ids, ROWS, COLS, states, NULL, &err), &err);
    CHECK_OK(x3_linear_load(&head, dev, c, &c->model->head, &err), &err);
    CHECK_OK(dev->ops->linear(dev, &head, states, hidden, n, logits, vocab, &err), &err);
    for (size_t i = 0; i < n; i++)
        for (size_t j = 0; j < PER_POSITION; j++) {
            size_t token = (size_t)indices[i * PER_POSITION + j];
            CHECK(token < vocab && isfinite(logits[i * vocab + token]));
            worst = fmax(worst, fabs((double)logits[i * vocab + token] - expected[i * PER_POSITION + j]));
        }
    printf("  largest difference of a logit %.2g\n", worst);
    CHECK_MSG(worst <= 2e-3, "logits differ by %g, at most 2e-3", worst);
    x3_linear_free(&head, dev);
    x3_device_close(dev);
    x3_checkpoint_close(c);
    free(states);
    free(logits);
    free(ids);
    free(indices);
    free(expected);
}
