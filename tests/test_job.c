/* Quantization jobs on small random models: the same bytes whatever happens, nothing lost, refusals. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "formats/io.h"
#include "quant/job.h"
#include "quant/verify.h"
#include "tests/family_job.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

struct setup {
    char root[256], model[300], out[300], work[300], text[300];
    const char *texts[2];
    x3_job_options o;
};

static struct setup make_setup(const x3_tiny *tiny)
{
    struct setup s = {0};

    x3_test_skip_if_emulated();
    snprintf(s.root, sizeof s.root, "%s", x3_test_temp_dir());
    snprintf(s.model, sizeof s.model, "%s/model", s.root);
    snprintf(s.out, sizeof s.out, "%s/pack", s.root);
    snprintf(s.work, sizeof s.work, "%s/pack.work", s.root);
    snprintf(s.text, sizeof s.text, "%s/text.txt", s.root);
    x3_tiny_write(s.model, tiny);
    x3_tiny_text(s.text, 700, 1);
    return s;
}

/* The options point into the struct: call after it has reached its place. */
static x3_job_options *options(struct setup *s)
{
    s->texts[0] = s->text;
    s->o = (x3_job_options){.model = s->model, .out = s->out, .bits = 6, .head_bits = 7, .quant = X3_QUANT_DEFAULTS,
                            .texts = s->texts, .n_texts = 1, .rows = 10, .cols = 64, .device = "cpu", .n_threads = 1,
                            .command = "test"};
    return &s->o;
}

static void check_verifies(const char *pack, const char *source)
{
    x3_verify_report r;
    x3_device *dev = NULL;
    x3_err err = {0};

    CHECK_OK(x3_device_open(&dev, "cpu", 1, &err), &err);
    CHECK_OK(x3_verify_pack(&r, pack, source, dev, NULL, &err), &err);
    CHECK_MSG(r.findings.n_items == 0, "%s", r.findings.items[0]);
    CHECK(r.n_hashed == r.pack->st->n_tensors);
    x3_verify_report_free(&r);
    x3_device_close(dev);
}

/* ---- the same bytes ---- */

X3_TEST(job_gives_the_same_bytes_with_one_and_two_threads_and_with_states_on_disk)
{
    struct setup s = make_setup(&X3_TINY_DEFAULTS);
    x3_job_options *o = options(&s);
    x3_err err = {0};
    uint64_t hash[3];

    CHECK_OK(x3_test_run_job(o, &err), &err);
    hash[0] = x3_test_shard_hash(s.out);
    o->overwrite = true;
    o->n_threads = 2;
    CHECK_OK(x3_test_run_job(o, &err), &err);
    hash[1] = x3_test_shard_hash(s.out);
    CHECK_MSG(hash[0] == hash[1], "other bytes with two threads");
    /* a budget that the states do not fit into */
    x3_findings findings = {0};
    x3_job *job = NULL;
    CHECK_OK(x3_job_open(&job, o, NULL, &findings, &err), &err);
    CHECK(x3_job_describe(job)->hidden_place == X3_HIDDEN_HOST);
    o->memory_bytes = x3_job_describe(job)->peak_bytes - 1;
    x3_job_close(job);
    CHECK_OK(x3_job_open(&job, o, NULL, &findings, &err), &err);
    CHECK(x3_job_describe(job)->hidden_place == X3_HIDDEN_DISK);
    CHECK_OK(x3_job_run(job, &err), &err);
    x3_job_close(job);
    hash[2] = x3_test_shard_hash(s.out);
    CHECK_MSG(hash[0] == hash[2], "other bytes with the states on disk");
    CHECK(!x3_path_exists(s.work));
    check_verifies(s.out, s.model);
}

X3_TEST(job_gives_other_bytes_with_another_seed)
{
    x3_tiny tiny = X3_TINY_DEFAULTS;
    tiny.layers = 1;
    struct setup s = make_setup(&tiny);
    x3_job_options *o = options(&s);
    x3_err err = {0};

    CHECK_OK(x3_test_run_job(o, &err), &err);
    uint64_t first = x3_test_shard_hash(s.out);
    o->overwrite = true;
    o->quant.seed = 2;
    CHECK_OK(x3_test_run_job(o, &err), &err);
    CHECK(first != x3_test_shard_hash(s.out));
}

/* What a loader would look for. */
static bool looks_complete(const char *dir)
{
    return x3_path_exists(x3_test_path(dir, "config.json"));
}

/* Runs the job in a child and kills it after `microseconds`; true when it had ended before. */
static bool run_and_kill(const x3_job_options *o, long microseconds)
{
    int status;
    pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        x3_err err = {0};
        _exit(x3_test_run_job(o, &err) == X3_OK ? 0 : 9);
    }
    for (long waited = 0; waited < microseconds; waited += 2000) {
        if (waitpid(child, &status, WNOHANG) == child) {
            CHECK_MSG(WIFEXITED(status) && WEXITSTATUS(status) == 0, "the job failed in the child");
            return true;
        }
        usleep(2000);
    }
    kill(child, SIGKILL);
    CHECK(waitpid(child, &status, 0) == child);
    return WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

X3_TEST(job_killed_at_ten_random_moments_and_resumed_gives_the_same_bytes)
{
    struct setup s = make_setup(&X3_TINY_DEFAULTS);
    x3_job_options *o = options(&s);
    double start = x3_seconds();
    x3_err err = {0};
    x3_rng rng;
    int kills = 0;

    CHECK_OK(x3_test_run_job(o, &err), &err);
    long whole = (long)((x3_seconds() - start) * 1e6);
    uint64_t expected = x3_test_shard_hash(s.out);
    CHECK_OK(x3_remove_tree(s.out, &err), &err);
    x3_rng_init(&rng, (uint64_t)getpid(), "kill");
    o->resume = true;
    for (int round = 0; kills < 10; round++) {
        bool done = run_and_kill(o, 1000 + (long)(x3_rng_uniform(&rng) * 0.45 * (double)whole));
        kills += !done;
        CHECK(round < 100);
        if (done) {
            CHECK_MSG(x3_test_shard_hash(s.out) == expected, "other bytes after %d kills", kills);
            check_verifies(s.out, s.model);
            CHECK(!x3_path_exists(s.work));
            CHECK_OK(x3_remove_tree(s.out, &err), &err);
        } else if (looks_complete(s.out)) { /* killed between the last file and its exit */
            CHECK_MSG(x3_test_shard_hash(s.out) == expected, "killed, and the folder looks complete with other bytes");
        }
    }
    CHECK_OK(x3_test_run_job(o, &err), &err);
    CHECK_MSG(x3_test_shard_hash(s.out) == expected, "other bytes after %d kills", kills);
    check_verifies(s.out, s.model);
    x3_findings findings = {0};
    x3_job *job = NULL;
    CHECK_OK(x3_job_open(&job, o, NULL, &findings, &err), &err); /* once more: nothing is left to do */
    CHECK(x3_job_is_done(job));
    x3_job_close(job);
}

/* ---- refusals ---- */

/* Runs the job in a child and kills it once its kept tensors are recorded, which is long before its end. */
static void start_and_kill(const x3_job_options *o, const char *work)
{
    int status;
    pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        x3_err err = {0};
        _exit(x3_test_run_job(o, &err) == X3_OK ? 0 : 9);
    }
    while (!x3_path_exists(x3_test_path(work, "kept.json"))) {
        CHECK_MSG(waitpid(child, &status, WNOHANG) == 0, "the job ended before it could be killed");
        usleep(1000);
    }
    kill(child, SIGKILL);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_MSG(WIFSIGNALED(status), "the job ended before it could be killed");
}

X3_TEST(job_resumed_with_other_options_is_refused_with_the_difference)
{
    struct setup s = make_setup(&X3_TINY_DEFAULTS);
    x3_job_options *o = options(&s);
    x3_err err = {0};

    o->resume = true;
    start_and_kill(o, s.work);
    o->resume = false;
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "unfinished job");
    o->resume = true;
    o->bits = 3;
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "bits: was 6, now 3");
    o->bits = 6;
    o->quant.codebook = X3_CB_MCG;
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "codebook: was \"mul1\", now \"mcg\"");
    o->quant.codebook = X3_CB_MUL1;
    o->quant.seed = 9;
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "seed: was 1, now 9");
    o->quant.seed = 1;
    x3_tiny_text(s.text, 700, 2);
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "texts: was");
    x3_tiny_text(s.text, 700, 1);
    CHECK_OK(x3_test_run_job(o, &err), &err);
    check_verifies(s.out, s.model);
}

X3_TEST(job_output_that_is_in_or_linked_to_the_input_is_refused)
{
    struct setup s = make_setup(&X3_TINY_DEFAULTS);
    x3_job_options *o = options(&s);
    char inside[400], link_path[400];
    x3_err err = {0};

    o->out = s.model;
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "the output is, holds, lies in or is linked to the input");
    snprintf(inside, sizeof inside, "%s/new/pack", s.model);
    o->out = inside;
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "the output is, holds, lies in or is linked to the input");
    o->out = s.root;
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "the output is, holds, lies in or is linked to the input");
    snprintf(link_path, sizeof link_path, "%s/link", s.root);
    CHECK(symlink(s.model, link_path) == 0);
    o->out = link_path;
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "the output is, holds, lies in or is linked to the input");
    o->out = s.out;
    o->work = inside;
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "the work folder is, holds, lies in or is linked to the input");
    CHECK(!x3_path_exists(s.out) && !x3_path_exists(x3_test_path(s.model, "new")));
}

X3_TEST(job_keeps_the_files_of_a_folder_that_is_not_empty)
{
    x3_tiny tiny = X3_TINY_DEFAULTS;
    tiny.layers = 1;
    struct setup s = make_setup(&tiny);
    x3_job_options *o = options(&s);
    x3_err err = {0};

    CHECK_OK(x3_mkdirs(s.out, &err), &err);
    x3_test_write(x3_test_path(s.out, "diary.txt"), "dear diary", 10);
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "is not empty");
    CHECK(x3_path_exists(x3_test_path(s.out, "diary.txt")) && !x3_path_exists(s.work));
    x3_test_write(s.work, "a file", 6);
    CHECK_OK(x3_remove_tree(x3_test_path(s.out, "diary.txt"), &err), &err);
    CHECK_OK(x3_remove_tree(s.work, &err), &err);
    CHECK_OK(x3_test_run_job(o, &err), &err);
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "is not empty");
    o->overwrite = true;
    o->bits = 5;
    CHECK_OK(x3_test_run_job(o, &err), &err);
    check_verifies(s.out, s.model);
}

X3_TEST(job_needs_memory_and_says_how_much)
{
    struct setup s = make_setup(&X3_TINY_DEFAULTS);
    x3_job_options *o = options(&s);
    x3_err err = {0};

    o->memory_bytes = 1 << 20;
    CHECK_FAILS(x3_test_run_job(o, &err), &err, "the budget is 0.00 GB");
    CHECK(!x3_path_exists(s.out));
}

/* A limit on the size of files stands in for a full disk: reserving the shard fails. */
X3_TEST(job_on_a_full_disk_fails_before_any_work_and_leaves_nothing)
{
    struct setup s = make_setup(&X3_TINY_DEFAULTS);
    x3_job_options *o = options(&s);
    struct rlimit before, small = {.rlim_cur = 150000};
    x3_err err = {0};
    x3_status rc;

    CHECK(getrlimit(RLIMIT_FSIZE, &before) == 0);
    small.rlim_max = before.rlim_max;
    signal(SIGXFSZ, SIG_IGN);
    CHECK(setrlimit(RLIMIT_FSIZE, &small) == 0);
    rc = x3_test_run_job(o, &err);
    CHECK(setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(rc == X3_ERR_IO && strstr(err.text, "model-00001-of-00001.safetensors.part: cannot reserve") != NULL);
    CHECK(!x3_path_exists(s.out) && !x3_path_exists(s.work));
}

/* ---- shapes, types, families ---- */

/* Quantizes, verifies against the source, and loads the pack. */
static void check_model(const x3_tiny *tiny, int head_bits, double bits)
{
    struct setup s = make_setup(tiny);
    x3_job_options *o = options(&s);
    x3_err err = {0};

    o->head_bits = head_bits;
    o->bits = bits;
    CHECK_OK(x3_test_run_job(o, &err), &err);
    check_verifies(s.out, s.model);
}

X3_TEST(job_pads_sizes_that_are_no_multiples_of_128)
{
    x3_tiny t = X3_TINY_DEFAULTS;

    t.hidden = 320;
    t.inner = 200;
    t.heads = 5;
    t.vocab = 601;
    t.layers = 1;
    check_model(&t, 4, 3);
}

X3_TEST(job_gives_a_tied_head_a_group_of_its_own_or_leaves_it)
{
    x3_tiny t = X3_TINY_DEFAULTS;
    t.tied = true;
    t.layers = 1;
    struct setup s = make_setup(&t);
    x3_job_options *o = options(&s);
    x3_findings findings = {0};
    x3_checkpoint *pack = NULL;
    x3_err err = {0};

    CHECK_OK(x3_test_run_job(o, &err), &err);
    CHECK_OK(x3_checkpoint_open(&pack, s.out, NULL, &findings, &err), &err);
    CHECK(!pack->model->tied && x3_safetensors_find(pack->st, "lm_head.trellis") != NULL);
    x3_checkpoint_close(pack);
    check_verifies(s.out, s.model);
    o->overwrite = true;
    o->head_bits = 0;
    CHECK_OK(x3_test_run_job(o, &err), &err);
    CHECK_OK(x3_checkpoint_open(&pack, s.out, NULL, &findings, &err), &err);
    CHECK(pack->model->tied && x3_safetensors_find(pack->st, "lm_head.trellis") == NULL);
    CHECK(x3_json_get(x3_hf_quantization(pack->config), "head_bits") == NULL);
    x3_checkpoint_close(pack);
    check_verifies(s.out, s.model);
}

X3_TEST(job_takes_biases_norms_shards_and_every_float_type)
{
    x3_tiny t = X3_TINY_DEFAULTS;

    t.layers = 1;
    t.attention_bias = true;
    t.shards = 3;
    check_model(&t, 7, 6);
    t.attention_bias = false;
    t.model_type = "qwen2";
    t.dtype = X3_F16;
    check_model(&t, 7, 6);
    t.model_type = "qwen3";
    t.qk_norm = true;
    t.dtype = X3_F32;
    check_model(&t, 7, 6);
    t.model_type = "llama";
    t.qk_norm = false;
    t.dtype = X3_F8_E4M3;
    check_model(&t, 7, 6);
}

X3_TEST(job_takes_every_k_and_codebook)
{
    x3_tiny t = X3_TINY_DEFAULTS;
    t.layers = 1;
    struct setup s = make_setup(&t);
    x3_job_options *o = options(&s);
    double last = 8; /* the sum over seven linears */
    x3_err err = {0};

    o->overwrite = true;
    for (int K = 1; K <= 8; K++) {
        x3_findings findings = {0};
        x3_job *job = NULL;
        double error = 0;
        o->bits = K;
        o->quant.codebook = (x3_codebook)(K % 3);
        CHECK_OK(x3_job_open(&job, o, NULL, &findings, &err), &err);
        CHECK_OK(x3_job_run(job, &err), &err);
        for (const cJSON *g = x3_json_get(x3_job_receipt(job), "groups")->child; g->next != NULL; g = g->next)
            error += x3_json_get(g, "error_weight")->valuedouble;
        CHECK_MSG(error < 0.5 * last, "K=%d: error %g after %g", K, error, last);
        last = error;
        x3_job_close(job);
        check_verifies(s.out, s.model);
    }
}

X3_TEST(job_copies_the_side_files_and_lists_what_it_left)
{
    x3_tiny t = X3_TINY_DEFAULTS;
    t.layers = 1;
    struct setup s = make_setup(&t);
    x3_job_options *o = options(&s);
    x3_err err = {0};
    cJSON *receipt = NULL, *config = NULL;

    x3_test_write(x3_test_path(s.model, "chat_template.jinja"), "{{ messages }}", 14);
    x3_test_write(x3_test_path(s.model, "side.pt"), "tensor", 6);
    x3_test_write(x3_test_path(s.model, "model.gguf"), "GGUF", 4);
    x3_test_write(x3_test_path(s.model, "pytorch_model.bin"), "x", 1);
    CHECK_OK(x3_mkdirs(x3_test_path(s.model, "assets"), &err), &err);
    x3_test_write(x3_test_path(s.model, "assets/logo.svg"), "<svg/>", 6);
    CHECK(symlink("chat_template.jinja", x3_test_path(s.model, "linked.jinja")) == 0);
    CHECK_OK(x3_test_run_job(o, &err), &err);
    CHECK(x3_path_exists(x3_test_path(s.out, "chat_template.jinja")) && x3_path_exists(x3_test_path(s.out, "side.pt")));
    CHECK(x3_path_exists(x3_test_path(s.out, "assets/logo.svg")) && x3_path_exists(x3_test_path(s.out, "linked.jinja")));
    CHECK(x3_path_exists(x3_test_path(s.out, "generation_config.json")));
    CHECK(!x3_path_exists(x3_test_path(s.out, "model.gguf")) && !x3_path_exists(x3_test_path(s.out, "pytorch_model.bin")));
    CHECK_OK(x3_json_load(&receipt, x3_test_path(s.out, "exl3_receipt.json"), &err), &err);
    CHECK(cJSON_GetArraySize(x3_json_get(receipt, "files_not_copied")) == 3);
    CHECK_OK(x3_json_load(&config, x3_test_path(s.out, "config.json"), &err), &err);
    CHECK(strcmp(x3_json_get(x3_json_get(config, "quantization_config"), "codebook")->valuestring, "mul1") == 0);
    cJSON_Delete(receipt);
    cJSON_Delete(config);
}

/* ---- allocation ---- */

X3_TEST(uniform_allocation_comes_within_a_set_of_the_target_and_keeps_ties)
{
    x3_tiny t = X3_TINY_DEFAULTS;
    t.layers = 6;
    struct setup s = make_setup(&t);
    x3_findings findings = {0};
    x3_checkpoint *c = NULL;
    x3_err err = {0};

    CHECK_OK(x3_checkpoint_open(&c, s.model, NULL, &findings, &err), &err);
    for (double bits = 1; bits <= 8; bits += 0.17)
        for (int tie = 0; tie < 3; tie++) {
            x3_allocation a;
            CHECK_OK(x3_allocate_uniform(&a, c->model, bits, 6, (x3_tie)tie, &err), &err);
            CHECK(a.n == 42 && a.body_bits <= bits + 1e-9 && a.body_bits > bits - 0.06);
            for (size_t i = 0; i < 6 && tie != X3_TIE_NONE; i++) {
                CHECK(a.K[7 * i + 1] == a.K[7 * i + 2] && a.K[7 * i + 4] == a.K[7 * i + 5]);
                CHECK(tie != X3_TIE_FUSED || a.K[7 * i] == a.K[7 * i + 1]);
            }
            x3_allocation_free(&a);
        }
    x3_allocation a;
    CHECK_FAILS(x3_allocate_uniform(&a, c->model, 8.5, 6, X3_TIE_DEFAULT, &err), &err, "8.5");
    x3_checkpoint_close(c);
}

/* ---- verify ---- */

static void flip_byte(const char *path, long offset)
{
    FILE *f = fopen(path, "r+b");
    int c;

    CHECK(f != NULL && fseek(f, offset, offset < 0 ? SEEK_END : SEEK_SET) == 0);
    c = fgetc(f);
    CHECK(fseek(f, offset, offset < 0 ? SEEK_END : SEEK_SET) == 0 && fputc(c ^ 0x10, f) != EOF);
    fclose(f);
}

static void check_verify_finds(const char *pack, const char *source, const char *what)
{
    x3_verify_report r;
    x3_device *dev = NULL;
    x3_err err = {0};
    bool found = false;

    CHECK_OK(x3_device_open(&dev, "cpu", 1, &err), &err);
    if (x3_verify_pack(&r, pack, source, dev, NULL, &err) != X3_OK)
        found = strstr(err.text, what) != NULL;
    for (size_t i = 0; i < r.findings.n_items; i++)
        found = found || strstr(r.findings.items[i], what) != NULL;
    CHECK_MSG(found, "verify does not find \"%s\"; first finding: %s", what,
              r.findings.n_items > 0 ? r.findings.items[0] : err.text);
    x3_verify_report_free(&r);
    x3_device_close(dev);
}

X3_TEST(verify_finds_flipped_bits_missing_files_and_lost_stop_tokens)
{
    x3_tiny t = X3_TINY_DEFAULTS;
    t.layers = 1;
    struct setup s = make_setup(&t);
    char shard[400], stop[400];
    x3_err err = {0};

    CHECK_OK(x3_test_run_job(options(&s), &err), &err);
    snprintf(shard, sizeof shard, "%s/model-00001-of-00001.safetensors", s.out);
    flip_byte(shard, -5000);
    check_verify_finds(s.out, NULL, "the receipt says");
    flip_byte(shard, -5000);
    check_verifies(s.out, s.model);
    snprintf(stop, sizeof stop, "%s/generation_config.json", s.out);
    x3_test_write(stop, "{}", 2);
    check_verify_finds(s.out, NULL, "generation_config.json: has XXH3");
    check_verify_finds(s.out, s.model, "stop token 7 of the source is missing");
    CHECK_OK(x3_remove_tree(stop, &err), &err);
    check_verify_finds(s.out, NULL, "is in the receipt and not in the pack");
    x3_test_write(stop, "{\"eos_token_id\": [10, 7]}\n", 26);
    check_verifies(s.out, s.model);
    t.layers = 2;
    x3_tiny_write(s.model, &t);
    check_verify_finds(s.out, s.model, "the pack was made from");
    CHECK_OK(x3_remove_tree(x3_test_path(s.out, "quantization_config.json"), &err), &err);
    check_verify_finds(s.out, NULL, "quantization_config.json: is missing");
}

/* Rows of 7 + 3 numbers, loaded and stored in two parts, then left behind and restored. */
static void check_states(x3_device *dev, x3_hidden_place place)
{
    enum { ROWS = 5, A = 7, B = 3 };
    const char *dir = x3_test_temp_dir();
    x3_hidden_state *h = NULL, *again = NULL;
    float row[A + B], a[2 * A], b[2 * B];
    uint64_t hash;
    x3_err err = {0};

    CHECK_OK(x3_hidden_state_create(&h, dev, dir, "quantized", ROWS, A + B, place, &err), &err);
    for (size_t r = 0; r < ROWS; r++) {
        for (size_t i = 0; i < A + B; i++)
            row[i] = (float)(100 * r + i);
        CHECK_OK(x3_hidden_state_write(h, r, 1, row, &err), &err);
    }
    CHECK_OK(x3_hidden_state_start(h, &err), &err);
    for (size_t r = 0; r < ROWS; r += 2) {
        const size_t n = x3_min_size(2, ROWS - r);
        CHECK_OK(x3_hidden_state_load_part(h, r, n, 0, A, a, &err), &err);
        CHECK_OK(x3_hidden_state_load_part(h, r, n, A, B, b, &err), &err);
        for (size_t i = 0; i < n; i++)
            CHECK(a[i * A + 2] == (float)(100 * (r + i) + 2) && b[i * B + 1] == (float)(100 * (r + i) + A + 1));
        for (size_t i = 0; i < n * A; i++)
            a[i] += 0.5f;
        CHECK_OK(x3_hidden_state_store_part(h, r, n, 0, A, a, &err), &err);
        CHECK_OK(x3_hidden_state_store_part(h, r, n, A, B, b, &err), &err);
    }
    CHECK_OK(x3_hidden_state_advance(h, &hash, &err), &err);
    CHECK_OK(x3_hidden_state_create(&again, dev, dir, "quantized", ROWS, A + B, place, &err), &err);
    CHECK_OK(x3_hidden_state_restore(again, 1, hash, &err), &err);
    for (size_t r = 0; r < ROWS; r++) {
        CHECK_OK(x3_hidden_state_load(again, r, 1, row, &err), &err);
        for (size_t i = 0; i < A + B; i++)
            CHECK(row[i] == (float)(100 * r + i) + (i < A ? 0.5f : 0));
    }
    x3_hidden_state_free(h);
    x3_hidden_state_free(again);
}

X3_TEST(hidden_states_are_loaded_and_stored_in_parts_wherever_they_lie)
{
    x3_device *dev = NULL;
    x3_err err = {0};

    CHECK_OK(x3_device_open(&dev, "cpu", 1, &err), &err);
    check_states(dev, X3_HIDDEN_HOST);
    check_states(dev, X3_HIDDEN_DISK);
    check_states(dev, X3_HIDDEN_DEVICE);
    x3_device_close(dev);
}
