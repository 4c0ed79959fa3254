/* exl3-quantize: check a checkpoint, quantize it, verify a pack; measure and plan are in plan_commands.c. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/exl3.h"
#include "formats/io.h"
#include "quant/job.h"
#include "quant/verify.h"
#include "tools/kept.h"
#include "tools/options.h"
#include "tools/plan_commands.h"
#include "tools/progress.h"

/* ---- shared ---- */

static void on_progress(void *arg, double done, double total, const char *what)
{
    x3_reporter_progress(arg, done, total, what);
}

static void on_note(void *arg, const char *text)
{
    x3_reporter_note(arg, text);
}

static void on_step(void *arg, size_t done, size_t total, const char *what)
{
    x3_reporter_progress(arg, (double)done, (double)total, what);
}

static void print_summary(const x3_job *job)
{
    const x3_job_summary *s = x3_job_describe(job);
    const x3_checkpoint *c = x3_job_source(job);

    printf("model       %s, %zu layers, %s of weights\n", c->model->model_type, s->n_layers, x3_bytes_text(s->source_bytes));
    printf("groups      %zu quantized (%zu padded to multiples of 128), %zu tensors kept, %zu dropped\n", s->n_groups,
           s->n_padded_linears, s->n_kept, s->n_dropped);
    printf("bits        body %.4f, head %d%s", s->body_bits, s->head_bits, s->head_bits == 0 ? " (not quantized)" : "");
    if (s->mtp_bits > 0)
        printf(", draft layer (MTP) %d", s->mtp_bits);
    printf("\n");
    printf("pack        %s in %zu shard%s, %zu side files\n", x3_bytes_text(s->pack_bytes), s->n_shards,
           s->n_shards == 1 ? "" : "s", s->n_copied_files);
    if (s->rows > 0)
        printf("calibration %zu rows x %zu tokens; hidden states %s %s\n", s->rows, s->cols, x3_bytes_text(s->hidden_bytes),
               s->hidden_place == X3_HIDDEN_DEVICE ? "on the device" : s->hidden_place == X3_HIDDEN_HOST ? "in memory" : "on disk");
    printf("memory      about %s of %s\n", x3_bytes_text(s->peak_bytes), x3_bytes_text(s->memory_bytes));
    if (s->device_free > 0)
        printf("device      about %s of %s\n", x3_bytes_text(s->device_bytes), x3_bytes_text(s->device_free));
    if (s->n_experts > 0)
        printf("experts     %zu a layer, gate and up on %s; Hessians of %zu at once, %zu pass%s over the text a layer\n",
               s->n_experts, s->own_hessians ? "their own tokens" : "the layer's", s->experts_at_once, s->expert_passes,
               s->expert_passes == 1 ? "" : "es");
    printf("disk        pack %s, work %s\n", x3_bytes_text(s->out_needed), x3_bytes_text(s->work_needed));
    printf("time        about %s\n", x3_seconds_text(s->seconds));
    if (s->n_padded_linears > 0)
        printf("note        padded groups: such a pack loads here but not in exllamav3\n");
}

/* ---- check ---- */

static struct check_values {
    const char *model, *device, *expert_hessian;
    double bits;
    uint64_t mtp_bits, memory, device_memory, rows, cols;
    x3_list ignored;
    bool list;
} check_values = {.device = "cpu", .expert_hessian = "auto", .bits = 4, .rows = 250, .cols = 2048};

static const x3_option check_options[] = {
    {"bits", X3_OPT_NUMBER, offsetof(struct check_values, bits), "X", "body bits that sizes are shown for (4)", 1, 8, false},
    {"mtp-bits", X3_OPT_COUNT, offsetof(struct check_values, mtp_bits), "K", "the same of the draft layer (0: it stays)", 0, 8, false},
    {"device", X3_OPT_TEXT, offsetof(struct check_values, device), "D", "cpu, cuda or cuda:N (cpu)", 0, 0, false},
    {"rows", X3_OPT_COUNT, offsetof(struct check_values, rows), "N", "calibration rows that memory and time are shown for (250)", 1, 1e9, false},
    {"cols", X3_OPT_COUNT, offsetof(struct check_values, cols), "N", "tokens a row (2048)", 1, 1e6, false},
    {"expert-hessian", X3_OPT_TEXT, offsetof(struct check_values, expert_hessian), "H", "of gate and up: layer, own or auto (auto)", 0, 0, false},
    {"memory", X3_OPT_SIZE, offsetof(struct check_values, memory), "SIZE", "host memory budget (4/5 of what there is)", 0, 0, false},
    {"device-memory", X3_OPT_SIZE, offsetof(struct check_values, device_memory), "SIZE", "no more than this of a GPU's (what is free)", 0, 0, false},
    {"list", X3_OPT_FLAG, offsetof(struct check_values, list), NULL, "say what becomes of every tensor", 0, 0, false},
    {"ignore-option", X3_OPT_LIST, offsetof(struct check_values, ignored), "KEY", "a config key that changes nothing", 0, 0, false},
};

static void print_tensors(const x3_checkpoint *c)
{
    static const char *const roles[] = {"?", "quantized", "quantized", "kept", "group", "dropped"};

    for (size_t i = 0; i < c->st->n_tensors; i++) {
        char shape[128];
        printf("%-9s %s %s %s\n", roles[c->roles[i]], c->st->tensors[i].name, x3_dtype_name(c->st->tensors[i].dtype),
               x3_tensor_shape_text(&c->st->tensors[i], shape));
    }
}

static int run_check(void *values, const char *command_line)
{
    struct check_values *v = values;
    x3_job_options o = {.model = v->model, .bits = v->bits, .head_bits = 6, .mtp_bits = (int)v->mtp_bits, .quant = X3_QUANT_DEFAULTS, .rows = v->rows,
                        .cols = v->cols, .memory_bytes = v->memory,
                        .device_memory_bytes = v->device_memory, .device = v->device,
                        .ignored_options = v->ignored.items, .command = command_line};
    x3_findings findings = {0};
    x3_reporter r;
    x3_job *job = NULL;
    x3_err err = {0};
    int code = 0;

    if (!x3_expert_hessian_parse(v->expert_hessian, &o.expert_hessian)) {
        fprintf(stderr, "exl3-quantize check: --expert-hessian is layer, own or auto\n");
        return 2;
    }
    x3_reporter_open(&r, false);
    if (x3_job_open(&job, &o, NULL, &findings, &err) != X3_OK) {
        code = x3_report_error(&r, &findings, &err);
    } else {
        if (v->list)
            print_tensors(x3_job_source(job));
        print_summary(job);
        if (x3_print_kept(x3_job_source(job), &err) != X3_OK)
            code = x3_report_error(&r, &findings, &err);
        else
            printf("%s: whole and known\n", v->model);
    }
    x3_job_close(job);
    x3_findings_free(&findings);
    return code;
}

/* ---- run ---- */

#define NOT_GIVEN UINT64_MAX

static struct run_values {
    const char *model, *out, *recipe, *codebook, *tie, *work, *device, *expert_hessian, *expert_weights;
    double bits, target_blend;
    uint64_t head_bits, mtp_bits, rows, cols, memory, device_memory, seed, threads, min_expert_tokens;
    x3_list texts, ignored;
    bool uniform, resume, dry_run, overwrite, json, other_kernels;
} run_values = {.codebook = "mul1", .tie = "default", .device = "cpu", .expert_hessian = "auto", .expert_weights = "none",
                .target_blend = 0.5, .head_bits = NOT_GIVEN, .rows = 250, .cols = 2048, .seed = 1};

static const x3_option run_options[] = {
    {"bits", X3_OPT_NUMBER, offsetof(struct run_values, bits), "X", "mean bits of the body, 1 to 8, fractions too", 1, 8, false},
    {"recipe", X3_OPT_TEXT, offsetof(struct run_values, recipe), "FILE", "bits of every linear, in place of --bits", 0, 0, false},
    {"uniform", X3_OPT_FLAG, offsetof(struct run_values, uniform), NULL, "the plain allocation in place of a measured one", 0, 0, false},
    {"head-bits", X3_OPT_COUNT, offsetof(struct run_values, head_bits), "K", "of the output head (6); 0 leaves it as it is", 0, 8, false},
    {"mtp-bits", X3_OPT_COUNT, offsetof(struct run_values, mtp_bits), "K", "of the draft layer, MTP (0: it stays as it is)", 0, 8, false},
    {"codebook", X3_OPT_TEXT, offsetof(struct run_values, codebook), "C", "mul1, mcg or 3inst (mul1)", 0, 0, false},
    {"tie", X3_OPT_TEXT, offsetof(struct run_values, tie), "T", "linears with equal K: default, fused or none", 0, 0, false},
    {"text", X3_OPT_LIST, offsetof(struct run_values, texts), "FILE", "calibration text, .txt or .jsonl; may be repeated", 0, 0, true},
    {"rows", X3_OPT_COUNT, offsetof(struct run_values, rows), "N", "calibration rows (250)", 1, 1e9, false},
    {"cols", X3_OPT_COUNT, offsetof(struct run_values, cols), "N", "tokens a row (2048)", 1, 1e6, false},
    {"target-blend", X3_OPT_NUMBER, offsetof(struct run_values, target_blend), "A", "0: the weight, 1: the original output (0.5)", 0, 1, false},
    {"expert-hessian", X3_OPT_TEXT, offsetof(struct run_values, expert_hessian), "H", "of gate and up: layer, own or auto (auto)", 0, 0, false},
    {"expert-weights", X3_OPT_TEXT, offsetof(struct run_values, expert_weights), "W", "tokens by squared routing weight: none, down or all (none)", 0, 0, false},
    {"min-expert-tokens", X3_OPT_COUNT, offsetof(struct run_values, min_expert_tokens), "N", "refuse an expert with fewer calibration tokens (0)", 0, 1e12, false},
    {"memory", X3_OPT_SIZE, offsetof(struct run_values, memory), "SIZE", "host memory budget (4/5 of what there is)", 0, 0, false},
    {"device-memory", X3_OPT_SIZE, offsetof(struct run_values, device_memory), "SIZE", "no more than this of a GPU's (what is free)", 0, 0, false},
    {"seed", X3_OPT_COUNT, offsetof(struct run_values, seed), "N", "of the random signs (1)", 0, 9e15, false},
    {"work", X3_OPT_TEXT, offsetof(struct run_values, work), "DIR", "work folder (OUT.work)", 0, 0, false},
    {"resume", X3_OPT_FLAG, offsetof(struct run_values, resume), NULL, "go on where a killed job stopped", 0, 0, false},
    {"device", X3_OPT_TEXT, offsetof(struct run_values, device), "D", "cpu, cuda or cuda:N (cpu)", 0, 0, false},
    {"threads", X3_OPT_COUNT, offsetof(struct run_values, threads), "N", "threads (one a processor)", 1, 1024, false},
    {"dry-run", X3_OPT_FLAG, offsetof(struct run_values, dry_run), NULL, "check and plan, write nothing", 0, 0, false},
    {"overwrite", X3_OPT_FLAG, offsetof(struct run_values, overwrite), NULL, "replace what is in OUT", 0, 0, false},
    {"json", X3_OPT_FLAG, offsetof(struct run_values, json), NULL, "progress as JSON lines", 0, 0, false},
    {"other-kernels", X3_OPT_FLAG, offsetof(struct run_values, other_kernels), NULL, "resume on another processor or device", 0, 0, false},
    {"ignore-option", X3_OPT_LIST, offsetof(struct run_values, ignored), "KEY", "a config key that changes nothing", 0, 0, false},
};

static void print_result(const x3_job *job, const char *out)
{
    const cJSON *receipt = x3_job_receipt(job), *g;
    double log_sum = 0, worst = 0;
    const char *worst_name = "";
    size_t n = 0;

    for (g = x3_json_get(receipt, "groups")->child; g != NULL; g = g->next, n++) {
        double e = x3_json_get(g, "error_source")->valuedouble;
        log_sum += e;
        if (e > worst) {
            worst = e;
            worst_name = x3_json_get(g, "name")->valuestring;
        }
    }
    printf("pack        %s, %s\n", out, x3_bytes_text((uint64_t)x3_json_get(receipt, "bytes")->valuedouble));
    printf("bits        body %.4f, head %g", x3_json_get(receipt, "bits_body")->valuedouble,
           x3_json_get(receipt, "bits_head")->valuedouble);
    if (x3_json_get(receipt, "bits_mtp") != NULL)
        printf(", draft layer (MTP) %g", x3_json_get(receipt, "bits_mtp")->valuedouble);
    printf("\n");
    printf("error       mean %.3g of the output's energy, worst %.3g (%s)\n", n == 0 ? 0 : log_sum / (double)n, worst,
           worst_name);
    printf("time        %s", x3_seconds_text(x3_json_get(receipt, "seconds")->valuedouble));
    for (g = x3_json_get(receipt, "stage_seconds")->child; g != NULL; g = g->next)
        printf("%s%s %.1f s", g == x3_json_get(receipt, "stage_seconds")->child ? ": " : ", ", g->string, g->valuedouble);
    const cJSON *busy = x3_json_get(receipt, "device_seconds");
    for (g = busy == NULL ? NULL : busy->child; g != NULL; g = g->next)
        printf("%s%s %.1f s", g == busy->child ? "\ndevice      busy: " : ", ", g->string, g->valuedouble);
    printf("\npeak        %s on the device\n",
           x3_bytes_text((uint64_t)x3_json_get(receipt, "peak_device_bytes")->valuedouble));
}

static int usage(const char *what)
{
    fprintf(stderr, "exl3-quantize run: %s\n", what);
    return 2;
}

/* What the options say together; 0 or 2. */
static int check_run_options(const struct run_values *v, x3_job_options *o)
{
    if ((v->bits > 0) == (v->recipe != NULL))
        return usage("one of --bits and --recipe");
    if (v->recipe != NULL && (v->head_bits != NOT_GIVEN || v->uniform))
        return usage("--head-bits and --uniform go with --bits; a recipe has its own");
    if (!x3_codebook_parse(v->codebook, &o->quant.codebook))
        return usage("--codebook is mul1, mcg or 3inst");
    if (!x3_tie_parse(v->tie, &o->tie))
        return usage("--tie is default, fused or none");
    if (!x3_expert_hessian_parse(v->expert_hessian, &o->expert_hessian))
        return usage("--expert-hessian is layer, own or auto");
    if (!x3_expert_weighting_parse(v->expert_weights, &o->expert_weighting))
        return usage("--expert-weights is none, down or all");
    if (v->resume && v->overwrite)
        return usage("--resume and --overwrite exclude each other");
    return 0;
}

/* Measures and plans, then opens the job again with the recipe. The first job, uniform, has checked everything. */
static x3_status plan_job(x3_job **job, x3_job_options *o, const x3_job_events *events, char **recipe, x3_findings *findings,
                          x3_err *err)
{
    const char *base = o->work != NULL ? o->work : o->out;
    char *measure = NULL;
    x3_status rc;

    x3_job_close(*job);
    *job = NULL;
    X3_TRY(rc, out, x3_asprintf(&measure, err, "%.*s.measure.json", (int)x3_path_trimmed(base), base));
    X3_TRY(rc, out, x3_asprintf(recipe, err, "%.*s.recipe.yaml", (int)x3_path_trimmed(base), base));
    X3_TRY(rc, out, x3_plan_for_run(o, measure, *recipe, events, findings, err));
    o->recipe = *recipe;
    rc = x3_job_open(job, o, events, findings, err);
out:
    free(measure);
    return rc;
}

static int run_run(void *values, const char *command_line)
{
    struct run_values *v = values;
    x3_job_options o = {
        .model = v->model, .out = v->out, .work = v->work, .recipe = v->recipe, .bits = v->bits,
        .head_bits = v->head_bits == NOT_GIVEN ? 6 : (int)v->head_bits, .mtp_bits = (int)v->mtp_bits, .quant = X3_QUANT_DEFAULTS, .texts = v->texts.items,
        .n_texts = v->texts.n, .rows = v->rows, .cols = v->cols, .memory_bytes = v->memory,
        .device_memory_bytes = v->device_memory, .device = v->device,
        .n_threads = (int)v->threads, .resume = v->resume, .overwrite = v->overwrite, .other_kernels = v->other_kernels,
        .ignored_options = v->ignored.items, .command = command_line};
    x3_findings findings = {0};
    x3_reporter r;
    x3_job_events events = {.progress = on_progress, .note = on_note, .arg = &r};
    char *recipe = NULL;
    x3_job *job = NULL;
    x3_err err = {0};
    int code = check_run_options(v, &o);

    if (code != 0)
        return code;
    o.min_expert_tokens = v->min_expert_tokens;
    o.quant.target_blend = v->target_blend;
    o.quant.seed = v->seed;
    o.planned = v->recipe == NULL && !v->uniform;
    x3_reporter_open(&r, v->json);
    if (x3_job_open(&job, &o, &events, &findings, &err) != X3_OK) {
        code = x3_report_error(&r, &findings, &err);
        goto out;
    }
    if (o.planned && !v->dry_run && plan_job(&job, &o, &events, &recipe, &findings, &err) != X3_OK) {
        code = x3_report_error(&r, &findings, &err);
        goto out;
    }
    print_summary(job);
    if (x3_print_kept(x3_job_source(job), &err) != X3_OK) {
        code = x3_report_error(&r, &findings, &err);
        goto out;
    }
    if (o.planned && v->dry_run)
        printf("plan        sizes are those of the uniform allocation; the run measures and places the bits\n");
    if (recipe != NULL)
        printf("recipe      %s\n", recipe);
    fflush(stdout);
    if (v->dry_run)
        goto out;
    if (x3_job_is_done(job)) {
        printf("%s: is the finished pack of this job; nothing to do\n", v->out);
        goto out;
    }
    if (x3_job_run(job, &err) != X3_OK) {
        code = x3_report_error(&r, &findings, &err);
        goto out;
    }
    x3_reporter_close(&r);
    print_result(job, v->out);
out:
    x3_job_close(job);
    free(recipe);
    x3_findings_free(&findings);
    return code;
}

/* ---- verify ---- */

static struct verify_values {
    const char *pack, *source, *device;
    uint64_t threads;
    bool json;
} verify_values = {.device = "cpu"};

static const x3_option verify_options[] = {
    {"source", X3_OPT_TEXT, offsetof(struct verify_values, source), "MODEL", "compare with the original model", 0, 0, false},
    {"device", X3_OPT_TEXT, offsetof(struct verify_values, device), "D", "cpu, cuda or cuda:N (cpu)", 0, 0, false},
    {"threads", X3_OPT_COUNT, offsetof(struct verify_values, threads), "N", "threads (one a processor)", 1, 1024, false},
    {"json", X3_OPT_FLAG, offsetof(struct verify_values, json), NULL, "progress as JSON lines", 0, 0, false},
};

static int print_report(const x3_verify_report *report, x3_reporter *r, const char *pack)
{
    x3_reporter_close(r);
    for (size_t i = 0; i < report->n_groups; i++)
        printf("%s K=%d |E|^2/|W|^2 %.6g\n", report->groups[i].name, report->groups[i].K, report->groups[i].error_weight);
    for (size_t i = 0; i < report->notes.n_items; i++)
        printf("note: %s\n", report->notes.items[i]);
    for (size_t i = 0; i < report->findings.n_items; i++)
        fprintf(stderr, "error: %s\n", report->findings.items[i]);
    if (report->findings.n_items + report->findings.n_dropped > 0) {
        printf("%s: FAILED, %zu problems\n", pack, report->findings.n_items + report->findings.n_dropped);
        return 1;
    }
    printf("%s: whole; %zu groups, body %.4f bits, head %g bits, ", pack, report->info.n_groups, report->info.bits_body,
           report->info.bits_head);
    if (report->info.bits_mtp > 0)
        printf("draft layer %.4f bits, ", report->info.bits_mtp);
    printf("%s; %zu of %zu tensors compared with the receipt\n", x3_bytes_text(report->info.n_bytes), report->n_hashed,
           report->pack->st->n_tensors);
    return 0;
}

static int run_verify(void *values, const char *command_line)
{
    struct verify_values *v = values;
    x3_verify_report report = {0};
    x3_device *dev = NULL;
    x3_reporter r;
    x3_progress progress = {.step = on_step, .arg = &r};
    x3_err err = {0};
    int code;

    (void)command_line;
    x3_reporter_open(&r, v->json);
    if (x3_device_open(&dev, v->device, (int)v->threads, &err) != X3_OK ||
        x3_verify_pack(&report, v->pack, v->source, dev, &progress, &err) != X3_OK)
        code = x3_report_error(&r, &report.findings, &err);
    else
        code = print_report(&report, &r, v->pack);
    x3_verify_report_free(&report);
    x3_device_close(dev);
    return code;
}

#define N(a) (sizeof(a) / sizeof(a)[0])

int main(int argc, char **argv)
{
    const x3_command commands[] = {
        {"check", "is this checkpoint whole and known; sizes, memory, disk and time", {"MODEL"},
         {offsetof(struct check_values, model)}, check_options, N(check_options), run_check, &check_values},
        {"run", "quantize MODEL into the pack OUT", {"MODEL", "OUT"},
         {offsetof(struct run_values, model), offsetof(struct run_values, out)}, run_options, N(run_options), run_run, &run_values},
        {"verify", "is this pack whole and what its receipt says", {"PACK"}, {offsetof(struct verify_values, pack)},
         verify_options, N(verify_options), run_verify, &verify_values},
        x3_measure_command,
        x3_plan_command,
    };

    return x3_main("exl3-quantize", "BF16 checkpoints to EXL3 packs", commands, N(commands), argc, argv);
}
