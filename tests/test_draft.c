/* Draft layers (MTP): what they compute against transformers' layer on the inputs that serving engines give it, and jobs that
 * quantize them. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "quant/verify.h"
#include "runtime/draft.h"
#include "runtime/stream.h"
#include "tests/family_check.h"
#include "tests/family_job.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

#define FOLDER "tests/data/families/"

static const char *const with_draft[] = {"deepseek_yarn", "deepseek_v32_long", "qwen3_5_nested", "qwen3_next_mixed"};

/* The checkpoint with its draft layer in use. */
static x3_checkpoint *open_with_draft(const char *dir)
{
    x3_checkpoint *c = x3_test_open_model(dir);
    x3_findings f = {0};
    x3_err err = {0};

    if (!c->uses_draft)
        CHECK_OK(x3_checkpoint_use_draft(c, &f, &err), &err);
    x3_findings_free(&f);
    return c;
}

/* y [n][w's outputs] := x [n][w's inputs] through the linear. */
static void through(x3_device *dev, const x3_checkpoint *c, const x3_linear_desc *d, const float *x, size_t n, float *y)
{
    x3_weight w = {0};
    x3_err err = {0};

    CHECK_OK(x3_linear_load(&w, dev, c, d, &err), &err);
    CHECK_OK(dev->ops->linear(dev, &w, x, d->n_in, n, y, d->n_out, &err), &err);
    x3_linear_free(&w, dev);
}

/* Draft logits [n_ids - 1][vocab] of one sequence; malloc. */
static float *draft_logits(x3_device *dev, const x3_checkpoint *c, const int32_t *ids, size_t n_ids)
{
    const x3_model *m = c->model;
    const size_t hidden = m->hidden, n = n_ids - 1;
    const x3_layer_desc *l = &m->layers[m->n_layers];
    float *states = malloc(n_ids * hidden * sizeof *states), *joined = malloc(n * 2 * hidden * sizeof *joined);
    float *x = malloc(n * hidden * sizeof *x), *logits = malloc(n * m->vocab * sizeof *logits), *norm = NULL;
    x3_layer_weights w = {0};
    x3_full_batch batch = {0};
    x3_forward *f = NULL;
    x3_kv_layer kv = {0};
    x3_draft *draft = NULL;
    x3_err err = {0};

    CHECK_OK(x3_stream_hidden(dev, c, ids, 1, n_ids, states, NULL, &err), &err);
    CHECK_OK(x3_draft_create(&draft, dev, c, 1, n_ids, &err), &err);
    CHECK_OK(x3_draft_inputs(draft, ids, 1, states, joined, &err), &err);
    through(dev, c, &m->draft->join, joined, n, x);
    CHECK_OK(x3_forward_create(&f, dev, m, n, n, &err), &err);
    CHECK_OK(x3_full_batch_create(&batch, dev, 1, n, x3_model_selected(m, n), &err), &err);
    CHECK_OK(x3_layer_weights_load(&w, dev, c, l, &err), &err);
    CHECK_OK(x3_kv_layer_create(&kv, dev, l, batch.n_pages, batch.n_slots, X3_KV_F32, &err), &err);
    CHECK_OK(x3_forward_layer(f, &w, &batch.batch, &kv, x, &err), &err);
    CHECK_OK(x3_vector_load(&norm, dev, c, &m->draft->out_norm, &err), &err);
    CHECK_OK(dev->ops->rms_norm(dev, x, hidden, n, hidden, norm, m->norm_eps, x, hidden, &err), &err);
    through(dev, c, m->draft->head.name != NULL ? &m->draft->head : &m->head, x, n, logits);
    x3_device_free(dev, norm);
    x3_kv_layer_free(&kv, dev);
    x3_layer_weights_free(&w);
    x3_full_batch_free(&batch);
    x3_forward_free(f);
    x3_draft_free(draft);
    free(states);
    free(joined);
    free(x);
    return logits;
}

/* Observed: at most 1e-5, sums of float32 in another order. */
X3_TEST(draft_layers_compute_what_transformers_layers_do_on_their_inputs)
{
    x3_device *dev = x3_test_open_device();

    for (size_t i = 0; i < sizeof with_draft / sizeof with_draft[0]; i++) {
        const char *dir = x3_test_path(FOLDER, with_draft[i]);
        char file[300];
        double worst = 0;
        snprintf(file, sizeof file, FOLDER "%s/reference_logits.safetensors.ref", with_draft[i]);
        x3_checkpoint *c = open_with_draft(dir);
        reference r = x3_test_reference(file, "input_ids", "draft_logits");
        float *logits = draft_logits(dev, c, r.ids, r.n_ids);
        CHECK(r.vocab == c->model->vocab && r.n_logits == 16);
        for (size_t p = 0; p < r.n_logits; p++)
            for (size_t v = 0; v < r.vocab; v++) {
                CHECK(isfinite(logits[3 * p * r.vocab + v]));
                worst = fmax(worst, fabs((double)logits[3 * p * r.vocab + v] - (double)r.logits[p * r.vocab + v]));
            }
        printf("  %s: largest difference of a draft logit %.2g\n", with_draft[i], worst);
        CHECK_MSG(worst < 4e-5, "%s: draft logits differ by %g", with_draft[i], worst);
        free(logits);
        x3_test_reference_free(&r);
        x3_checkpoint_close(c);
    }
    x3_device_close(dev);
}

/* ---- jobs ---- */

/* Mean square difference of the draft logits of two folders on some ids, over the mean square of the first's. Both read the
 * states of their own model. */
static double lost(const char *source, const char *pack)
{
    x3_device *dev = x3_test_open_device();
    x3_checkpoint *a = open_with_draft(source), *b = open_with_draft(pack);
    const size_t n = 47 * a->model->vocab;
    double error = 0, norm = 0;
    int32_t ids[48];

    for (int i = 0; i < 48; i++)
        ids[i] = 32 + 11 * i % 60;
    float *x = draft_logits(dev, a, ids, 48), *y = draft_logits(dev, b, ids, 48);
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

/* The entry of a group in the pack's receipt, or NULL. */
static const cJSON *entry_of(const cJSON *receipt, const char *name)
{
    for (const cJSON *g = x3_json_get(receipt, "groups")->child; g != NULL; g = g->next)
        if (strcmp(x3_json_get(g, "name")->valuestring, name) == 0)
            return g;
    return NULL;
}

/* Every linear of the draft layer is a calibrated group of mtp_bits. */
static void check_draft_groups(const x3_family_job *s)
{
    x3_checkpoint *c = x3_test_open_model(s->out), *source = open_with_draft(s->model);
    const x3_linear_desc *d;
    x3_pack_info info;
    cJSON *receipt;
    x3_err err = {0};

    CHECK(c->uses_draft);
    CHECK_OK(x3_pack_info_read(&info, c, &err), &err);
    CHECK(info.bits_mtp == s->o.mtp_bits && info.bits_body == s->o.bits);
    CHECK_OK(x3_pack_receipt_load(&receipt, s->out, &err), &err);
    CHECK(x3_json_get(receipt, "bits_mtp")->valuedouble == s->o.mtp_bits);
    for (size_t i = 0; (d = x3_model_draft_linear(c->model, i)) != NULL; i++) {
        const cJSON *e = entry_of(receipt, d->name);
        const bool there = x3_checkpoint_weight(source, x3_model_draft_linear(source->model, i)) != NULL;
        CHECK_MSG((e != NULL) == (d->quantized && there), "%s", d->name);
        CHECK_MSG((x3_checkpoint_weight(c, d) == NULL) == d->quantized, "%s", d->name);
        CHECK(e == NULL || x3_json_get(e, "uncalibrated") == NULL);
    }
    const cJSON *e = entry_of(receipt, c->model->draft->join.name);
    CHECK(x3_json_get(e, "positions")->valuedouble == 20 * 47); /* a row's last token has no next one */
    cJSON_Delete(receipt);
    x3_checkpoint_close(c);
    x3_checkpoint_close(source);
}

/* The rest of the pack is that of a job that only carries the draft layer. */
static void check_rest(const char *pack, const char *plain)
{
    x3_checkpoint *c = x3_test_open_model(pack), *other = x3_test_open_model(plain);
    x3_err err = {0};

    CHECK(!other->uses_draft);
    for (size_t i = 0; i < other->st->n_tensors; i++) {
        const x3_tensor *t = &other->st->tensors[i], *same = x3_safetensors_find(c->st, t->name);
        uint64_t a, b;
        if (x3_model_carries(other->model, t->name) != NULL)
            continue;
        CHECK_MSG(same != NULL, "%s is gone", t->name);
        CHECK_OK(x3_checkpoint_tensor_hash(other, t, &a, &err), &err);
        CHECK_OK(x3_checkpoint_tensor_hash(c, same, &b, &err), &err);
        CHECK_MSG(a == b, "%s differs", t->name);
    }
    x3_checkpoint_close(c);
    x3_checkpoint_close(other);
}

X3_TEST(draft_job_quantizes_the_layer_on_what_it_reads_and_nothing_else)
{
    x3_family_job s;
    char plain[320];
    double before = 1;
    x3_err err = {0};

    x3_family_job_setup(&s, "qwen3_5_nested", 4);
    snprintf(plain, sizeof plain, "%s.plain", s.out);
    s.o.out = plain;
    CHECK_OK(x3_test_run_job(&s.o, &err), &err);
    s.o.out = s.out;
    for (int bits = 3; bits <= 6; bits += 3) {
        s.o.mtp_bits = bits;
        s.o.overwrite = true;
        CHECK_OK(x3_test_run_job(&s.o, &err), &err);
        x3_family_job_verifies(&s);
        check_draft_groups(&s);
        check_rest(s.out, plain);
        double now = lost(s.model, s.out);
        printf("  draft layer at %d bits: %.3g of its logits lost\n", bits, now);
        CHECK(now < before);
        before = now;
    }
    CHECK(before < 1.2 * lost(s.model, plain) + 0.01); /* 6 bits add little to what the model's 4 have lost */
}

X3_TEST(draft_job_gives_the_same_bytes_after_a_kill_and_from_states_on_disk)
{
    x3_family_job s;
    x3_findings findings = {0};
    x3_job *job = NULL;
    x3_err err = {0};

    x3_family_job_setup(&s, "deepseek_v32_long", 6);
    s.o.mtp_bits = 5;
    CHECK_OK(x3_test_run_job(&s.o, &err), &err);
    const uint64_t expected = x3_test_shard_hash(s.out);
    x3_family_job_verifies(&s);
    check_draft_groups(&s);
    CHECK_OK(x3_remove_tree(s.out, &err), &err);
    CHECK_OK(x3_job_open(&job, &s.o, NULL, &findings, &err), &err);
    s.o.memory_bytes = x3_job_describe(job)->peak_bytes - 1; /* states do not fit */
    x3_job_close(job);
    s.o.resume = true;
    x3_family_job_kill(&s, "head.json");
    CHECK_OK(x3_test_run_job(&s.o, &err), &err);
    CHECK_MSG(x3_test_shard_hash(s.out) == expected, "other bytes after a kill, with the states on disk");
    x3_family_job_verifies(&s);
    s.o.mtp_bits = 4;
    CHECK_FAILS(x3_test_run_job(&s.o, &err), &err, "is not empty");
}

X3_TEST(draft_job_refuses_by_name_what_it_cannot_quantize)
{
    static const struct {
        const char *family, *message;
    } cases[] = {
        {"glm_dsa_shared", "tensor model.layers.5.self_attn.q_a_proj.weight is missing"}, /* eh_proj is all there is */
        {"mimo_sizes", "the draft layers (MTP) of model_type \"mimo_v2_flash\" cannot be quantized: how draft layers of this family"},
        {"llama3_rope", "how draft layers of this family compute is not known here"},
    };

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        x3_family_job s;
        x3_findings findings = {0};
        x3_job *job = NULL;
        x3_err err = {0};
        bool named = false;
        x3_family_job_setup(&s, cases[i].family, 4);
        s.o.mtp_bits = 4;
        CHECK(x3_job_open(&job, &s.o, NULL, &findings, &err) != X3_OK && job == NULL);
        for (size_t f = 0; f < findings.n_items; f++)
            named = named || strstr(findings.items[f], cases[i].message) != NULL;
        CHECK_MSG(named || strstr(err.text, cases[i].message) != NULL, "%s: %s", cases[i].family, err.text);
        CHECK(!x3_path_exists(s.out) && !x3_path_exists(s.work));
        x3_findings_free(&findings);
        CHECK_OK(x3_remove_tree(s.model, &(x3_err){0}), &err);
    }
}

/* In the shard and in its index; names of one length. */
static void rename_tensor(const x3_family_job *s, const char *from, const char *to)
{
    static const char *const files[] = {"model-00001-of-00001.safetensors", "model.safetensors.index.json"};

    for (int i = 0; i < 2; i++) {
        char *data = NULL, *at;
        size_t n;
        x3_err err = {0};
        CHECK_OK(x3_read_file(&data, &n, x3_test_path(s->out, files[i]), 1 << 28, &err), &err);
        CHECK((at = memmem(data, n, from, strlen(from))) != NULL);
        memcpy(at, to, strlen(to));
        x3_test_write(x3_test_path(s->out, files[i]), data, n);
        free(data);
    }
}

X3_TEST(draft_groups_are_verified_against_source_and_receipt)
{
    x3_device *dev = x3_test_open_device();
    x3_family_job s;
    x3_verify_report r;
    cJSON *receipt = NULL;
    x3_err err = {0};

    x3_family_job_setup(&s, "qwen3_next_mixed", 6);
    s.o.mtp_bits = 6;
    CHECK_OK(x3_test_run_job(&s.o, &err), &err);
    CHECK_OK(x3_pack_receipt_load(&receipt, s.out, &err), &err);
    CHECK_OK(x3_verify_pack(&r, s.out, s.model, dev, NULL, &err), &err);
    CHECK(r.findings.n_items == 0 && r.n_groups == (size_t)cJSON_GetArraySize(x3_json_get(receipt, "groups")));
    x3_verify_report_free(&r);
    cJSON *entry = (cJSON *)(uintptr_t)entry_of(receipt, "mtp.layers.0.mlp.experts.1.up_proj");
    cJSON_SetNumberValue(cJSON_GetObjectItem(entry, "error_weight"), 0.5);
    CHECK_OK(x3_json_save(receipt, x3_test_path(s.out, "exl3_receipt.json"), &err), &err);
    CHECK_OK(x3_verify_pack(&r, s.out, s.model, dev, NULL, &err), &err);
    CHECK(r.findings.n_items == 1 && strstr(r.findings.items[0], "mtp.layers.0.mlp.experts.1.up_proj: |E|^2/|W|^2 is") != NULL);
    x3_verify_report_free(&r);
    cJSON_Delete(receipt);
    /* without a part of it the pack still serves, and verify misses the part */
    x3_checkpoint *c = x3_test_open_model(s.out);
    CHECK(c->uses_draft && c->draft_problem == NULL);
    x3_checkpoint_close(c);
    rename_tensor(&s, "mtp.layers.0.mlp.experts.1.up_proj.suh", "mtp.layers.0.mlp.experts.1.up_proj.sux");
    c = x3_test_open_model(s.out);
    CHECK(!c->uses_draft && strstr(c->draft_problem, "mtp.layers.0.mlp.experts.1.up_proj") != NULL);
    x3_checkpoint_close(c);
    CHECK_OK(x3_verify_pack(&r, s.out, NULL, dev, NULL, &err), &err);
    bool missed = false;
    for (size_t i = 0; i < r.findings.n_items; i++)
        missed = missed || strstr(r.findings.items[i], "up_proj.suh of the receipt is missing") != NULL;
    CHECK(missed);
    x3_verify_report_free(&r);
    x3_device_close(dev);
}
