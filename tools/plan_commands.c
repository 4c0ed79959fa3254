#include "tools/plan_commands.h"

#include <stdio.h>
#include <string.h>

#include "formats/exl3.h"

#define N(a) (sizeof(a) / sizeof(a)[0])

static void on_progress(void *arg, double done, double total, const char *what)
{
    x3_reporter_progress(arg, done, total, what);
}

static void on_note(void *arg, const char *text)
{
    x3_reporter_note(arg, text);
}

static int usage(const char *command, const char *what)
{
    fprintf(stderr, "exl3-quantize %s: %s\n", command, what);
    return 2;
}

/* ---- measure ---- */

static struct measure_values {
    const char *model, *out, *device, *codebook;
    uint64_t rows, cols, score_rows, noise_bits, memory, seed, threads;
    x3_list texts, ignored;
    bool resume, json;
} measure_values = {.device = "cpu", .codebook = "mul1", .rows = 16, .cols = 2048, .score_rows = 16, .noise_bits = X3_MEASURE_K, .seed = 1};

static const x3_option measure_options[] = {
    {"out", X3_OPT_TEXT, offsetof(struct measure_values, out), "FILE", "the measurement", 0, 0, true},
    {"text", X3_OPT_LIST, offsetof(struct measure_values, texts), "FILE", "calibration text, .txt or .jsonl; may be repeated", 0, 0, true},
    {"rows", X3_OPT_COUNT, offsetof(struct measure_values, rows), "N", "calibration rows that shape the noise (16)", 1, 1e9, false},
    {"cols", X3_OPT_COUNT, offsetof(struct measure_values, cols), "N", "tokens of such a row (2048)", 1, 1e6, false},
    {"score-rows", X3_OPT_COUNT, offsetof(struct measure_values, score_rows), "N", "rows of 256 tokens whose KL is read (16)", 1, 1e6, false},
    {"noise-bits", X3_OPT_COUNT, offsetof(struct measure_values, noise_bits), "K", "of the noise; near those of the plan is best (3)", 1, 8, false},
    {"codebook", X3_OPT_TEXT, offsetof(struct measure_values, codebook), "C", "mul1, mcg or 3inst (mul1)", 0, 0, false},
    {"seed", X3_OPT_COUNT, offsetof(struct measure_values, seed), "N", "of the noise (1)", 0, 9e15, false},
    {"memory", X3_OPT_SIZE, offsetof(struct measure_values, memory), "SIZE", "host memory for hidden states (half of what there is)", 0, 0, false},
    {"resume", X3_OPT_FLAG, offsetof(struct measure_values, resume), NULL, "go on with the passes that FILE lacks", 0, 0, false},
    {"device", X3_OPT_TEXT, offsetof(struct measure_values, device), "D", "cpu, cuda or cuda:N (cpu)", 0, 0, false},
    {"threads", X3_OPT_COUNT, offsetof(struct measure_values, threads), "N", "threads (one a processor)", 1, 1024, false},
    {"json", X3_OPT_FLAG, offsetof(struct measure_values, json), NULL, "progress as JSON lines", 0, 0, false},
    {"ignore-option", X3_OPT_LIST, offsetof(struct measure_values, ignored), "KEY", "a config key that changes nothing", 0, 0, false},
};

static int run_measure(void *values, const char *command_line)
{
    struct measure_values *v = values;
    x3_measure_options o = {.model = v->model, .out = v->out, .texts = v->texts.items, .n_texts = v->texts.n,
                            .rows = v->rows, .cols = v->cols, .score_rows = v->score_rows, .noise_bits = (int)v->noise_bits, .seed = v->seed,
                            .memory_bytes = v->memory, .device = v->device, .n_threads = (int)v->threads,
                            .start = v->resume ? X3_MEASURE_RESUME : X3_MEASURE_NEW, .ignored_options = v->ignored.items, .command = command_line};
    x3_findings findings = {0};
    x3_reporter r;
    x3_job_events events = {.progress = on_progress, .note = on_note, .arg = &r};
    x3_err err = {0};
    int code = 0;

    if (!x3_codebook_parse(v->codebook, &o.codebook))
        return usage("measure", "--codebook is mul1, mcg or 3inst");
    x3_reporter_open(&r, v->json);
    if (x3_measure_run(&o, &events, &findings, &err) != X3_OK) {
        code = x3_report_error(&r, &findings, &err);
    } else {
        x3_reporter_close(&r);
        printf("measured    %s\n", v->out);
    }
    x3_findings_free(&findings);
    return code;
}

const x3_command x3_measure_command = {
    "measure", "what the error of each linear does to the end KL", {"MODEL"}, {offsetof(struct measure_values, model)},
    measure_options, N(measure_options), run_measure, &measure_values};

/* ---- plan ---- */

static struct plan_values {
    const char *model, *measure, *out, *tie;
    double bits;
    uint64_t size, head_bits, min_bits, max_bits;
    x3_list sets, ignored;
} plan_values = {.tie = "default", .head_bits = 6, .min_bits = 1, .max_bits = 8};

static const x3_option plan_options[] = {
    {"measure", X3_OPT_TEXT, offsetof(struct plan_values, measure), "FILE", "what `measure` wrote", 0, 0, true},
    {"bits", X3_OPT_NUMBER, offsetof(struct plan_values, bits), "X", "mean bits of the body, 1 to 8", 1, 8, false},
    {"size", X3_OPT_SIZE, offsetof(struct plan_values, size), "SIZE", "bytes of the pack's folder, in place of --bits", 0, 0, false},
    {"head-bits", X3_OPT_COUNT, offsetof(struct plan_values, head_bits), "K", "of the output head (6); 0 leaves it as it is", 0, 8, false},
    {"tie", X3_OPT_TEXT, offsetof(struct plan_values, tie), "T", "linears with equal K: default, fused or none", 0, 0, false},
    {"min-bits", X3_OPT_COUNT, offsetof(struct plan_values, min_bits), "K", "least bits of a linear (1)", 1, 8, false},
    {"max-bits", X3_OPT_COUNT, offsetof(struct plan_values, max_bits), "K", "most bits of a linear (8)", 1, 8, false},
    {"set", X3_OPT_LIST, offsetof(struct plan_values, sets), "PATTERN=K", "bits of linears whose names match a glob; may be repeated", 0, 0, false},
    {"out", X3_OPT_TEXT, offsetof(struct plan_values, out), "FILE", "the recipe, YAML", 0, 0, true},
    {"ignore-option", X3_OPT_LIST, offsetof(struct plan_values, ignored), "KEY", "a config key that changes nothing", 0, 0, false},
};

static void print_plan(const x3_plan *p, const x3_model *m)
{
    size_t count[9] = {0}, layer;
    uint64_t weights[9] = {0}, total = x3_body_weights(m);

    for (size_t i = 0; i < p->allocation.n; i++) {
        const x3_linear_desc *d = x3_model_linear(m, i, &layer);
        count[p->allocation.K[i]]++;
        weights[p->allocation.K[i]] += x3_round_up(d->n_in, 128) * x3_round_up(d->n_out, 128);
    }
    printf("bits        body %.4f (asked for %.4f), head %d\n", p->allocation.body_bits, p->allocation.target_bits,
           p->allocation.head_K);
    for (int K = 1; K <= 8; K++)
        if (count[K] > 0)
            printf("K = %d       %zu linears, %.1f %% of the weights\n", K, count[K], 100 * (double)weights[K] / (double)total);
    printf("predicted   KL %.4g without the head's part, uniform %.4g%s\n", p->predicted_kl, p->uniform_kl,
           p->is_uniform ? "; the uniform allocation is the plan" : "");
    if (p->n_unmeasured > 0)
        printf("unmeasured  %zu linears did nothing to the scored rows (an indexer below its top-k); they get %d bits\n",
               p->n_unmeasured, X3_UNMEASURED_K);
    printf("folder      about %s\n", x3_bytes_text(p->folder_bytes));
}

static x3_status make_plan(const char *model, const char *const *ignored, const char *measure, const x3_plan_options *o,
                           const char *recipe_path, bool print, x3_findings *findings, x3_err *err)
{
    x3_checkpoint *source = NULL;
    x3_measurement m = {0};
    x3_recipe *recipe = NULL;
    x3_plan plan = {0};
    x3_status rc;

    X3_TRY(rc, out, x3_checkpoint_open(&source, model, ignored, findings, err));
    X3_TRY(rc, out, x3_measurement_load(&m, measure, source, err));
    X3_TRY(rc, out, x3_plan_create(&plan, source, &m, o, err));
    X3_TRY(rc, out, x3_recipe_of(&recipe, source->model, &plan.allocation, err));
    X3_TRY(rc, out, x3_recipe_save(recipe, recipe_path, err));
    if (print)
        print_plan(&plan, source->model);
out:
    x3_recipe_free(recipe);
    x3_plan_free(&plan);
    x3_measurement_free(&m);
    x3_checkpoint_close(source);
    return rc;
}

static int run_plan(void *values, const char *command_line)
{
    struct plan_values *v = values;
    x3_plan_options o = {.bits = v->bits, .size_bytes = v->size, .head_bits = (int)v->head_bits,
                         .min_bits = (int)v->min_bits, .max_bits = (int)v->max_bits, .sets = v->sets.items,
                         .n_sets = v->sets.n};
    x3_findings findings = {0};
    x3_reporter r;
    x3_err err = {0};
    int code = 0;

    (void)command_line;
    if ((v->bits > 0) == (v->size > 0))
        return usage("plan", "one of --bits and --size");
    if (!x3_tie_parse(v->tie, &o.tie))
        return usage("plan", "--tie is default, fused or none");
    x3_reporter_open(&r, false);
    if (make_plan(v->model, v->ignored.items, v->measure, &o, v->out, true, &findings, &err) != X3_OK)
        code = x3_report_error(&r, &findings, &err);
    x3_findings_free(&findings);
    return code;
}

const x3_command x3_plan_command = {
    "plan", "bits of every linear for a budget, as a recipe", {"MODEL"}, {offsetof(struct plan_values, model)}, plan_options,
    N(plan_options), run_plan, &plan_values};

/* ---- in one ---- */

x3_status x3_plan_for_run(const x3_job_options *options, const char *measure_path, const char *recipe_path,
                          const x3_job_events *events, x3_findings *findings, x3_err *err)
{
    const x3_measure_options m = {
        .model = options->model, .out = measure_path, .texts = options->texts, .n_texts = options->n_texts,
        .rows = measure_values.rows < options->rows ? measure_values.rows : options->rows, .cols = options->cols,
        .score_rows = measure_values.score_rows, .noise_bits = x3_measure_noise_for(options->bits),
        .codebook = options->quant.codebook, .seed = options->quant.seed,
        .memory_bytes = options->memory_bytes, .device = options->device, .n_threads = options->n_threads,
        .start = options->resume ? X3_MEASURE_RESUME : X3_MEASURE_REUSE,
        .other_kernels = options->other_kernels, .ignored_options = options->ignored_options, .command = options->command};
    const x3_plan_options p = {.bits = options->bits, .head_bits = options->head_bits, .min_bits = 1, .max_bits = 8,
                               .tie = options->tie};
    x3_status rc = x3_measure_run(&m, events, findings, err);

    if (rc == X3_OK)
        rc = make_plan(options->model, options->ignored_options, measure_path, &p, recipe_path, false, findings, err);
    return rc;
}
