/* exl3-eval: references, scores and text from packs. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "calib/reference.h"
#include "formats/io.h"
#include "quant/pack_info.h"
#include "quant/score.h"
#include "runtime/jinja/chat_template.h"
#include "runtime/generate.h"
#include "tools/options.h"
#include "tools/progress.h"
#include "tools/replay.h"
#include "tools/report.h"

static void on_step(void *arg, size_t done, size_t total, const char *what)
{
    x3_reporter_progress(arg, (double)done, (double)total, what);
}

/* ---- reference ---- */

static struct eval_values {
    const char *model, *pack, *out, *ref, *against, *json, *device, *prompt, *system, *chat_template, *receipt;
    x3_list texts, ignored, receipts;
    uint64_t ctx, positions, skip, threads, max_tokens;
    double max_kl, min_top1;
    bool json_progress, chat;
} values;

static const struct eval_values defaults = {.device = "cpu", .ctx = 512, .positions = 10240, .max_kl = -1, .min_top1 = -1,
                                            .max_tokens = 128};

#define AT(field) offsetof(struct eval_values, field)
#define DEVICE_OPTIONS                                                                                             \
    {"device", X3_OPT_TEXT, AT(device), "D", "cpu, cuda or cuda:N (cpu)", 0, 0, false},                            \
        {"threads", X3_OPT_COUNT, AT(threads), "N", "threads (one a processor)", 1, 1024, false},                  \
        {"ignore-option", X3_OPT_LIST, AT(ignored), "KEY", "a config key that changes nothing", 0, 0, false}
#define TEXT_OPTIONS                                                                                               \
    {"text", X3_OPT_LIST, AT(texts), "FILE", "held-out text, .txt or .jsonl; may be repeated", 0, 0, true},        \
        {"ctx", X3_OPT_COUNT, AT(ctx), "N", "tokens a row (512)", 2, 1e6, false},                                  \
        {"positions", X3_OPT_COUNT, AT(positions), "N", "positions in all (10240)", 2, 1e9, false},                \
        {"skip", X3_OPT_COUNT, AT(skip), "N", "tokens of the text to skip (0)", 0, 1e12, false}

static const x3_option reference_options[] = {
    TEXT_OPTIONS,
    {"out", X3_OPT_TEXT, AT(out), "FILE", "the reference file, .x3r", 0, 0, true},
    {"json-progress", X3_OPT_FLAG, AT(json_progress), NULL, "progress as JSON lines", 0, 0, false},
    DEVICE_OPTIONS,
};

struct session {
    x3_reporter r;
    x3_progress progress;
    x3_findings findings;
    x3_device *dev;
    x3_err err;
};

static x3_status open_session(struct session *s, const struct eval_values *v)
{
    *s = (struct session){0};
    x3_reporter_open(&s->r, v->json_progress);
    s->progress = (x3_progress){.step = on_step, .arg = &s->r};
    return x3_device_open(&s->dev, v->device, (int)v->threads, &s->err);
}

static void close_session(struct session *s)
{
    x3_reporter_close(&s->r);
    x3_device_close(s->dev);
    x3_findings_free(&s->findings);
}

static x3_status make_reference(struct session *s, const struct eval_values *v, const char *out)
{
    x3_reference_options o = {.texts = v->texts.items, .n_texts = v->texts.n, .ctx = v->ctx, .positions = v->positions,
                              .skip = v->skip};
    x3_checkpoint *model = NULL;
    x3_status rc;

    if (v->positions < v->ctx)
        return x3_fail(&s->err, X3_ERR_INPUT, "--positions %llu is less than one row of --ctx %llu",
                       (unsigned long long)v->positions, (unsigned long long)v->ctx);
    X3_TRY(rc, out, x3_checkpoint_open(&model, v->model, v->ignored.items, &s->findings, &s->err));
    rc = x3_reference_create(out, s->dev, model, &o, &s->progress, &s->err);
out:
    x3_checkpoint_close(model);
    return rc;
}

static int run_reference(void *arg, const char *command_line)
{
    struct eval_values *v = arg;
    x3_reference *r = NULL;
    struct session s;
    int code = 0;

    (void)command_line;
    if (open_session(&s, v) != X3_OK || make_reference(&s, v, v->out) != X3_OK ||
        x3_reference_open(&r, v->out, &s.err) != X3_OK) {
        code = x3_report_error(&s.r, &s.findings, &s.err);
    } else {
        x3_reporter_close(&s.r);
        printf("reference   %s: %zu rows x %zu tokens, vocabulary %zu, XXH3 %016llx\n", v->out, r->n_rows, r->ctx, r->vocab,
               (unsigned long long)r->hash);
    }
    x3_reference_close(r);
    close_session(&s);
    return code;
}

/* ---- score and compare ---- */

static const x3_option score_options[] = {
    {"ref", X3_OPT_TEXT, AT(ref), "FILE", "reference made by exl3-eval reference", 0, 0, true},
    {"against", X3_OPT_TEXT, AT(against), "RECEIPT", "of another pack, for the difference row by row", 0, 0, false},
    {"json", X3_OPT_TEXT, AT(json), "FILE", "write the receipt here", 0, 0, false},
    {"max-kl", X3_OPT_NUMBER, AT(max_kl), "X", "fail when the mean KL is above", 0, 1e9, false},
    {"min-top1", X3_OPT_NUMBER, AT(min_top1), "P", "fail when top-1 agreement (percent) is below", 0, 100, false},
    {"json-progress", X3_OPT_FLAG, AT(json_progress), NULL, "progress as JSON lines", 0, 0, false},
    DEVICE_OPTIONS,
};

static const x3_option compare_options[] = {
    TEXT_OPTIONS,
    {"json", X3_OPT_TEXT, AT(json), "FILE", "write the receipt here", 0, 0, false},
    {"max-kl", X3_OPT_NUMBER, AT(max_kl), "X", "fail when the mean KL is above", 0, 1e9, false},
    {"min-top1", X3_OPT_NUMBER, AT(min_top1), "P", "fail when top-1 agreement (percent) is below", 0, 100, false},
    {"json-progress", X3_OPT_FLAG, AT(json_progress), NULL, "progress as JSON lines", 0, 0, false},
    DEVICE_OPTIONS,
};

static void print_score(const x3_score *s, const x3_pack_info *info, const char *pack)
{
    printf("pack        %s\n", pack);
    printf("bits        body %.4f, head %g; %llu bytes of safetensors\n", info->bits_body, info->bits_head,
           (unsigned long long)info->n_bytes);
    printf("positions   %zu in %zu rows, vocabulary %zu, %zu not finite\n", s->n_positions, s->n_rows, s->vocab,
           s->n_nonfinite);
    printf("KL          %.5f +- %.5f nats (reference||pack, standard error over rows)\n", s->kl_mean, s->kl_stderr);
    printf("KL spread   median %.5f, p90 %.4f, p99 %.4f, max %.4f\n", s->kl_median, s->kl_p90, s->kl_p99, s->kl_max);
    printf("top-1       %.2f %% +- %.2f\n", 100 * s->top1, 100 * s->top1_stderr);
    printf("top-5       %.2f %%\n", 100 * s->top5);
    printf("NLL         reference %.4f, pack %.4f\n", s->nll_reference, s->nll_pack);
    printf("noise floor KL %.2g, top-1 %.2f %% (the pack against itself, sums in another order, %zu positions)\n", s->floor_kl,
           100 * s->floor_top1, s->floor_positions);
}

/* 1 when a gate is missed. */
static int check_gates(const x3_score *s, const struct eval_values *v)
{
    int code = 0;

    if (v->max_kl >= 0 && !(s->kl_mean <= v->max_kl)) {
        fprintf(stderr, "gate missed: KL %.5f is above %g\n", s->kl_mean, v->max_kl);
        code = 1;
    }
    if (v->min_top1 >= 0 && !(100 * s->top1 >= v->min_top1)) {
        fprintf(stderr, "gate missed: top-1 %.2f %% is below %g %%\n", 100 * s->top1, v->min_top1);
        code = 1;
    }
    if (s->n_nonfinite > 0) {
        fprintf(stderr, "gate missed: %zu positions are not finite\n", s->n_nonfinite);
        code = 1;
    }
    return code;
}

static int score(struct session *s, const struct eval_values *v, const char *ref, const char *command_line)
{
    double start = x3_seconds();
    x3_checkpoint *pack = NULL;
    x3_reference *r = NULL;
    x3_pack_info info;
    x3_score result = {0};
    x3_other_score other = {0};
    x3_paired paired;
    cJSON *receipt = NULL;
    int code = 1;
    x3_status rc;

    X3_TRY(rc, out, x3_reference_open(&r, ref, &s->err));
    if (v->against != NULL)
        X3_TRY(rc, out, x3_other_score_read(&other, r, v->against, &s->err));
    X3_TRY(rc, out, x3_checkpoint_open(&pack, v->pack, v->ignored.items, &s->findings, &s->err));
    X3_TRY(rc, out, x3_score_pack(&result, s->dev, pack, r, &s->progress, &s->err));
    X3_TRY(rc, out, x3_pack_info_read(&info, pack, &s->err));
    if (v->against != NULL)
        X3_TRY(rc, out, x3_score_against(&paired, &result, &other, &s->err));
    X3_TRY(rc, out, x3_score_receipt(&receipt, &result, pack, r, v->against != NULL ? &paired : NULL, s->dev, command_line,
                                     x3_seconds() - start, &s->err));
    if (v->json != NULL)
        X3_TRY(rc, out, x3_json_save(receipt, v->json, &s->err));
    x3_reporter_close(&s->r);
    print_score(&result, &info, v->pack);
    if (v->against != NULL)
        printf("against     KL %+.5f +- %.5f to the pack of %s, paired by rows\n", paired.difference, paired.stderr_, v->against);
    code = check_gates(&result, v);
out:
    if (rc != X3_OK)
        code = x3_report_error(&s->r, &s->findings, &s->err);
    cJSON_Delete(receipt);
    x3_score_free(&result);
    x3_other_score_free(&other);
    x3_checkpoint_close(pack);
    x3_reference_close(r);
    return code;
}

static int run_score(void *arg, const char *command_line)
{
    struct eval_values *v = arg;
    struct session s;
    int code = open_session(&s, v) != X3_OK ? x3_report_error(&s.r, NULL, &s.err) : score(&s, v, v->ref, command_line);

    close_session(&s);
    return code;
}

static int run_compare(void *arg, const char *command_line)
{
    struct eval_values *v = arg;
    char temporary[] = "/tmp/exl3-eval.XXXXXX";
    struct session s;
    int code, fd = mkstemp(temporary);

    if (fd >= 0)
        close(fd);
    if (open_session(&s, v) != X3_OK || fd < 0 || make_reference(&s, v, temporary) != X3_OK) {
        if (fd < 0)
            (void)!x3_fail(&s.err, X3_ERR_IO, "%s: cannot create", temporary);
        code = x3_report_error(&s.r, &s.findings, &s.err);
    } else {
        code = score(&s, v, temporary, command_line);
    }
    if (fd >= 0)
        unlink(temporary);
    close_session(&s);
    return code;
}

/* ---- generate ---- */

static const x3_option generate_options[] = {
    {"prompt", X3_OPT_TEXT, AT(prompt), "TEXT", "text to go on from; special tokens in it are tokens", 0, 0, true},
    {"chat", X3_OPT_FLAG, AT(chat), NULL, "the prompt is a user's turn, put into the chat template as plain text", 0, 0, false},
    {"system", X3_OPT_TEXT, AT(system), "TEXT", "with --chat: the system's turn before it", 0, 0, false},
    {"chat-template", X3_OPT_TEXT, AT(chat_template), "FILE", "with --chat: a template other than the pack's", 0, 0, false},
    {"max-tokens", X3_OPT_COUNT, AT(max_tokens), "N", "at most so many new tokens (128)", 1, 1e6, false},
    DEVICE_OPTIONS,
};

struct printer {
    const x3_tokenizer *t;
    size_t n;
};

static bool print_token(void *arg, int32_t id)
{
    struct printer *p = arg;
    x3_view bytes = x3_tokenizer_token_bytes(p->t, (uint32_t)id);

    if (bytes.data != NULL)
        fwrite(bytes.data, 1, bytes.n_bytes, stdout);
    fflush(stdout);
    p->n++;
    return true;
}

/* The ids of a conversation of one user's turn, up to where the assistant's begins. */
static x3_status encode_chat(const struct eval_values *v, const x3_tokenizer *tokenizer, x3_ids *ids, x3_err *err)
{
    x3_chat_request request = {.add_generation_prompt = true};
    cJSON *messages = cJSON_CreateArray();
    x3_chat_template *template = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_chat_template_open(&template, v->pack, v->chat_template, err));
    if (v->system != NULL)
        X3_TRY(rc, out, x3_chat_message_add(messages, "system", v->system, err));
    X3_TRY(rc, out, x3_chat_message_add(messages, "user", v->prompt, err));
    request.messages = messages;
    rc = x3_chat_template_encode(template, tokenizer, &request, ids, NULL, err);
out:
    cJSON_Delete(messages);
    x3_chat_template_free(template);
    return rc;
}

static x3_status generate(struct session *s, const struct eval_values *v)
{
    x3_checkpoint *pack = NULL;
    x3_tokenizer *tokenizer = NULL;
    x3_generator *g = NULL;
    x3_ids ids = {0};
    char *path = NULL;
    bool stopped;
    x3_status rc;

    X3_TRY(rc, out, x3_checkpoint_open(&pack, v->pack, v->ignored.items, &s->findings, &s->err));
    X3_TRY(rc, out, x3_path_join(&path, v->pack, "tokenizer.json", &s->err));
    X3_TRY(rc, out, x3_tokenizer_load(&tokenizer, path, &s->err));
    if (v->chat)
        X3_TRY(rc, out, encode_chat(v, tokenizer, &ids, &s->err));
    else
        X3_TRY(rc, out, x3_tokenizer_encode(tokenizer, v->prompt, strlen(v->prompt), true, 0, &ids, &s->err));
    if (s->dev->in_place_align != 0)
        X3_TRY(rc, out, x3_safetensors_map(pack->st, &s->err));
    X3_TRY(rc, out, x3_generator_create(&g, s->dev, pack, ids.n_items + v->max_tokens, &s->err));
    struct printer p = {.t = tokenizer};
    double start = x3_seconds();
    X3_TRY(rc, out, x3_generate_greedy(g, (const int32_t *)ids.items, ids.n_items, v->max_tokens, print_token, &p, &stopped,
                                       &s->err));
    printf("\n");
    fprintf(stderr, "%zu prompt tokens, %zu new, %s, %.1f s\n", ids.n_items, p.n,
            stopped ? "ended at a stop token" : "ended at --max-tokens", x3_seconds() - start);
out:
    x3_generator_free(g);
    x3_tokenizer_free(tokenizer);
    x3_checkpoint_close(pack);
    x3_ids_free(&ids);
    free(path);
    return rc;
}

static int run_generate(void *arg, const char *command_line)
{
    struct eval_values *v = arg;
    struct session s;
    int code = 0;

    (void)command_line;
    if (!v->chat && (v->system != NULL || v->chat_template != NULL)) {
        fprintf(stderr, "exl3-eval generate: --system and --chat-template go with --chat\n");
        return 2;
    }
    if (open_session(&s, v) != X3_OK || generate(&s, v) != X3_OK)
        code = x3_report_error(&s.r, &s.findings, &s.err);
    close_session(&s);
    return code;
}

/* ---- report ---- */

static const x3_option report_options[] = {
    {"out", X3_OPT_TEXT, AT(out), "FILE", "the page, .html", 0, 0, true},
};

static int run_report(void *arg, const char *command_line)
{
    struct eval_values *v = arg;
    x3_reporter r;
    x3_report report;
    char *html = NULL;
    size_t n_bytes = 0;
    x3_err err = {0};
    int code = 0;

    (void)command_line;
    x3_reporter_open(&r, false);
    if (x3_report_read(&report, v->receipts.items, v->receipts.n, &err) != X3_OK ||
        x3_report_page(&report, &html, &n_bytes, &err) != X3_OK || x3_write_file(v->out, html, n_bytes, &err) != X3_OK)
        code = x3_report_error(&r, NULL, &err);
    else
        printf("report      %s: %zu scores, %zu packs, %s\n", v->out, report.n_scores, report.n_packs, x3_bytes_text(n_bytes));
    free(html);
    x3_report_free(&report);
    return code;
}

/* ---- replay ---- */

static int run_replay(void *arg, const char *command_line);

#define N(a) (sizeof(a) / sizeof(a)[0])

static const x3_command commands[] = {
    {"reference", "run the original model once and keep what scoring needs", {"MODEL"}, {AT(model)}, reference_options,
     N(reference_options), run_reference, &values},
    {"score", "what a pack lost against a reference", {"PACK"}, {AT(pack)}, score_options, N(score_options), run_score, &values},
    {"compare", "reference and score in one go", {"MODEL", "PACK"}, {AT(model), AT(pack)}, compare_options, N(compare_options),
     run_compare, &values},
    {"generate", "greedy text from a pack", {"PACK"}, {AT(pack)}, generate_options, N(generate_options), run_generate, &values},
    {"report", "a page from receipts of scores and packs", {"RECEIPT..."}, {AT(receipts)}, report_options, N(report_options),
     run_report, &values},
    {"replay", "run a receipt's command again and compare", {"RECEIPT"}, {AT(receipt)}, NULL, 0, run_replay, &values},
};

/* A score or compare again, its receipt into a temporary file. */
static x3_status replay_score(const cJSON *receipt, x3_words *w, size_t *n_different, x3_err *err)
{
    char temporary[] = "/tmp/exl3-replay.XXXXXX";
    const x3_command *c = strcmp(w->items[1], "score") == 0 ? &commands[1] : &commands[2];
    int fd = mkstemp(temporary);
    cJSON *now = NULL;
    x3_status rc = X3_OK;

    if (fd < 0)
        return x3_fail(err, X3_ERR_IO, "%s: cannot create", temporary);
    close(fd);
    x3_words_remove(w, "--json", true);
    x3_words_remove(w, "--max-kl", true); /* gates were passed or not: here only the figures count */
    x3_words_remove(w, "--min-top1", true);
    values = defaults;
    if (x3_parse("exl3-eval", c, (int)w->n - 2, w->items + 2) != 0) {
        rc = x3_fail(err, X3_ERR_INPUT, "the receipt's command is not understood");
        goto out;
    }
    values.json = temporary;
    if (c->run(&values, "replay") != 0) {
        rc = x3_fail(err, X3_ERR_INPUT, "the receipt's command failed");
        goto out;
    }
    X3_TRY(rc, out, x3_json_load(&now, temporary, err));
    printf("\n");
    *n_different = x3_replay_compare_scores(receipt, now);
out:
    unlink(temporary);
    cJSON_Delete(now);
    return rc;
}

/* A whole quantization again, next to the pack, which must be the receipt's folder. */
static x3_status replay_pack(const cJSON *receipt, const char *receipt_path, x3_words *w, size_t *n_different, x3_err *err)
{
    static const char *const dropped[] = {"--resume", "--overwrite", "--json", "--dry-run"};
    char *folder = NULL, *again = NULL, *path = NULL, program[4096];
    ssize_t n = readlink("/proc/self/exe", program, sizeof program - 32);
    bool replaced = false;
    cJSON *now = NULL;
    int status;
    x3_status rc;

    X3_TRY(rc, out, x3_strdup(&folder, receipt_path, err));
    char *slash = strrchr(folder, '/');
    if (slash == NULL || n <= 0) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: give the receipt with its folder, PACK/exl3_receipt.json", receipt_path);
        goto out;
    }
    *slash = '\0';
    program[n] = '\0';
    memcpy(strrchr(program, '/') + 1, "exl3-quantize", sizeof "exl3-quantize");
    X3_TRY(rc, out, x3_asprintf(&again, err, "%s.replay", folder));
    X3_TRY(rc, out, x3_remove_tree(again, err));
    for (size_t i = 0; i < 4; i++)
        x3_words_remove(w, dropped[i], false);
    x3_words_remove(w, "--work", true);
    for (size_t i = 2; i < w->n; i++)
        if (w->items[i][0] != '-' && x3_path_overlaps(w->items[i], folder)) {
            w->items[i] = again;
            replaced = true;
        }
    if (!replaced) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: no word of the command is the folder %s; start it where it was started then",
                     receipt_path, folder);
        goto out;
    }
    pid_t child = fork();
    if (child == 0) {
        execv(program, w->items);
        _exit(127);
    }
    if (child < 0 || waitpid(child, &status, 0) != child || !WIFEXITED(status) || WEXITSTATUS(status) != 0) {
        rc = x3_fail(err, X3_ERR_INPUT, "the receipt's command failed");
        goto out;
    }
    X3_TRY(rc, out, x3_path_join(&path, again, "exl3_receipt.json", err));
    X3_TRY(rc, out, x3_json_load(&now, path, err));
    *n_different = x3_replay_compare_packs(receipt, now);
    rc = x3_remove_tree(again, err);
out:
    free(folder);
    free(again);
    free(path);
    cJSON_Delete(now);
    return rc;
}

static x3_status replay(const char *path, size_t *n_different, x3_err *err)
{
    const char *command = NULL;
    cJSON *receipt = NULL;
    x3_words w = {0};
    x3_status rc;

    X3_TRY(rc, out, x3_json_load(&receipt, path, err));
    X3_TRY(rc, out, x3_json_string(receipt, "command", true, &command, path, err));
    X3_TRY(rc, out, x3_words_split(&w, command, err));
    if (w.n > 2 && strcmp(w.items[0], "exl3-eval") == 0 &&
        (strcmp(w.items[1], "score") == 0 || strcmp(w.items[1], "compare") == 0))
        rc = replay_score(receipt, &w, n_different, err);
    else if (w.n > 2 && strcmp(w.items[0], "exl3-quantize") == 0 && strcmp(w.items[1], "run") == 0)
        rc = replay_pack(receipt, path, &w, n_different, err);
    else
        rc = x3_fail(err, X3_ERR_UNSUPPORTED, "%s: the command \"%s\" cannot be replayed", path, command);
out:
    x3_words_free(&w);
    cJSON_Delete(receipt);
    return rc;
}

static int run_replay(void *arg, const char *command_line)
{
    const char *path = ((struct eval_values *)arg)->receipt;
    size_t n_different = 0;
    x3_reporter r;
    x3_err err = {0};

    (void)command_line;
    x3_reporter_open(&r, false);
    if (replay(path, &n_different, &err) != X3_OK)
        return x3_report_error(&r, NULL, &err);
    if (n_different == 0)
        printf("the same\n");
    else
        printf("%zu differences\n", n_different);
    return n_different > 0;
}

int main(int argc, char **argv)
{
    values = defaults;
    return x3_main("exl3-eval", "what an EXL3 pack lost", commands, N(commands), argc, argv);
}
