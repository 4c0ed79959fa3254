/* The programs as scripts see them: exit codes, messages, gates. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "formats/io.h"
#include "formats/json.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

static struct {
    char dir[256], output[65536];
} at;

/* Runs a program of the build folder that this test runner is in; its output goes to at.output. */
static int run(const char *format, ...) X3_PRINTF(1, 2);

static int run(const char *format, ...)
{
    char self[1024], arguments[3000], command[5000];
    ssize_t n = readlink("/proc/self/exe", self, sizeof self - 1);
    const char *runner = getenv("X3_RUN_WITH");
    va_list args;

    CHECK(n > 0);
    self[n] = '\0';
    *strrchr(self, '/') = '\0'; /* build/x/tests */
    *strrchr(self, '/') = '\0';
    va_start(args, format);
    vsnprintf(arguments, sizeof arguments, format, args);
    va_end(args);
    snprintf(command, sizeof command, "%s %s/%s 2>&1", runner == NULL ? "" : runner, self, arguments);
    FILE *f = popen(command, "r");
    CHECK(f != NULL);
    size_t got = fread(at.output, 1, sizeof at.output - 1, f);
    at.output[got] = '\0';
    int status = pclose(f);
    return WIFEXITED(status) ? WEXITSTATUS(status) : -1;
}

#define EXPECT(code, part, ...)                                                                              \
    do {                                                                                                     \
        int got_ = run(__VA_ARGS__);                                                                         \
        CHECK_MSG(got_ == (code), "exit code %d, expected %d: %s", got_, (code), at.output);                 \
        CHECK_MSG(strstr(at.output, part) != NULL, "the output lacks \"%s\": %s", part, at.output);          \
    } while (0)

X3_TEST(cli_usage_errors_end_with_2_and_help_with_0)
{
    EXPECT(2, "exl3-quantize COMMAND --help", "exl3-quantize");
    EXPECT(2, "is not a command", "exl3-quantize bake");
    EXPECT(0, "--target-blend A", "exl3-quantize run --help");
    EXPECT(0, "0.1.0", "exl3-eval --version");
    EXPECT(2, "MODEL is missing", "exl3-quantize run");
    EXPECT(2, "one of --bits and --recipe", "exl3-quantize run a b --text c");
    EXPECT(2, "--bits 9 is outside 1 to 8", "exl3-quantize run a b --bits 9 --text c");
    EXPECT(2, "--bits three is not a number", "exl3-quantize run a b --bits three --text c");
    EXPECT(2, "--rows -4 is not a whole number", "exl3-quantize run a b --rows -4");
    EXPECT(2, "--memory 3XB is not a size", "exl3-quantize run a b --memory 3XB");
    EXPECT(2, "--codebook is mul1, mcg or 3inst", "exl3-quantize run a b --bits 3 --text c --codebook abc");
    EXPECT(2, "is not an option", "exl3-quantize run a b --speed 3");
    EXPECT(2, "is given twice", "exl3-quantize run a b --bits 3 --bits 4");
    EXPECT(2, "one argument too many", "exl3-quantize run a b c --bits 3");
    EXPECT(2, "exclude each other", "exl3-quantize run a b --bits 3 --text c --resume --overwrite");
    EXPECT(2, "--ref FILE is missing", "exl3-eval score pack");
}

X3_TEST(cli_failures_end_with_1_and_name_the_culprit)
{
    EXPECT(1, "/no/such/model: does not exist", "exl3-quantize check /no/such/model");
    EXPECT(1, "/no/such/pack: does not exist", "exl3-quantize verify /no/such/pack");
    EXPECT(1, "is not an EXL3 pack", "exl3-quantize verify tests/data/models/tiny-qwen3");
    EXPECT(1, "device \"tpu\" is unknown", "exl3-quantize check tests/data/models/tiny-qwen3 --device tpu");
    EXPECT(1, "no.x3r", "exl3-eval score tests/data/models/tiny-qwen3 --ref /no.x3r");
    EXPECT(1, "is listed for calibration", "exl3-eval reference tests/data/models/tiny-qwen3 --text "
           "tests/data/text/calib_prose.txt --out %s/x.x3r", x3_test_temp_dir());
}

X3_TEST(cli_check_tells_sizes_and_reports_every_finding)
{
    x3_tiny t = X3_TINY_DEFAULTS;

    EXPECT(0, "whole and known", "exl3-quantize check tests/data/models/tiny-qwen3 --bits 3");
    CHECK(strstr(at.output, "29 quantized") != NULL && strstr(at.output, "memory") != NULL);
    snprintf(at.dir, sizeof at.dir, "%s", x3_test_temp_dir());
    t.drop = "model.norm.weight";
    t.extra = "model.layers.0.mlp.gate.bias";
    x3_tiny_write(at.dir, &t);
    EXPECT(1, "tensor model.norm.weight is missing", "exl3-quantize check %s", at.dir);
    CHECK(strstr(at.output, "tensor model.layers.0.mlp.gate.bias is not part of") != NULL);
}

/* Another receipt is refused before the pack, which is not there, is opened. */
static void check_against(void)
{
    cJSON *receipt = NULL;
    x3_err err = {0};

    CHECK_OK(x3_json_load(&receipt, x3_test_path(at.dir, "receipt.json"), &err), &err);
    cJSON_DeleteItemFromArray(cJSON_GetObjectItem(cJSON_GetObjectItem(receipt, "kl"), "rows"), 9);
    CHECK_OK(x3_json_save(receipt, x3_test_path(at.dir, "cut.json"), &err), &err);
    cJSON_Delete(receipt);
    EXPECT(1, "receipt.json: was scored against reference", "exl3-eval score %s/none --ref %s/short.x3r --against %s/receipt.json", at.dir, at.dir, at.dir);
    EXPECT(1, "cut.json: kl.rows has 9 numbers, the reference 10 rows", "exl3-eval score %s/none --ref %s/ref.x3r --against %s/cut.json", at.dir, at.dir, at.dir);
    EXPECT(1, "config.json", "exl3-eval score %s/none --ref %s/ref.x3r --against %s/model/config.json", at.dir, at.dir, at.dir);
    EXPECT(1, "nowhere.json", "exl3-eval score %s/none --ref %s/ref.x3r --against %s/nowhere.json", at.dir, at.dir, at.dir);
    EXPECT(1, "none", "exl3-eval score %s/none --ref %s/ref.x3r --against %s/receipt.json --json %s/out.json", at.dir, at.dir, at.dir, at.dir);
    CHECK(!x3_path_exists(x3_test_path(at.dir, "out.json")));
}

X3_TEST(cli_quantize_verify_score_generate_from_end_to_end)
{
    x3_tiny t = X3_TINY_DEFAULTS;
    cJSON *receipt = NULL;
    x3_err err = {0};

    x3_test_skip_if_emulated();
    snprintf(at.dir, sizeof at.dir, "%s", x3_test_temp_dir());
    t.layers = 1;
    x3_tiny_write(x3_test_path(at.dir, "model"), &t);
    x3_tiny_text(x3_test_path(at.dir, "calib.txt"), 1600, 1);
    x3_tiny_text(x3_test_path(at.dir, "heldout.txt"), 600, 2);
    EXPECT(0, "memory", "exl3-quantize run %s/model %s/pack --bits 6 --text %s/calib.txt --cols 100 --dry-run", at.dir, at.dir, at.dir);
    CHECK(!x3_path_exists(x3_test_path(at.dir, "pack")) && !x3_path_exists(x3_test_path(at.dir, "pack.work")));
    EXPECT(0, "\"event\":\"progress\"", "exl3-quantize run %s/model %s/pack --bits 6 --text %s/calib.txt --cols 100 --threads 1 --json", at.dir, at.dir, at.dir);
    EXPECT(0, "nothing to do", "exl3-quantize run %s/model %s/pack --bits 6 --text %s/calib.txt --cols 100 --threads 1 --resume", at.dir, at.dir, at.dir);
    EXPECT(0, "whole", "exl3-quantize verify %s/pack --source %s/model", at.dir, at.dir);
    EXPECT(0, "reference", "exl3-eval reference %s/model --text %s/heldout.txt --ctx 50 --positions 500 --out %s/ref.x3r", at.dir, at.dir, at.dir);
    EXPECT(0, "noise floor", "exl3-eval score %s/pack --ref %s/ref.x3r --json %s/receipt.json --max-kl 1 --min-top1 50", at.dir, at.dir, at.dir);
    EXPECT(1, "gate missed: KL", "exl3-eval score %s/pack --ref %s/ref.x3r --max-kl 0", at.dir, at.dir);
    EXPECT(0, "KL +0.00000 +- 0.00000 to the pack", "exl3-eval score %s/pack --ref %s/ref.x3r --against %s/receipt.json", at.dir, at.dir, at.dir);
    EXPECT(0, "reference", "exl3-eval reference %s/model --text %s/heldout.txt --ctx 50 --positions 400 --out %s/short.x3r", at.dir, at.dir, at.dir);
    check_against();
    EXPECT(1, "gate missed: top-1", "exl3-eval score %s/pack --ref %s/ref.x3r --min-top1 100", at.dir, at.dir);
    EXPECT(0, "top-1", "exl3-eval compare %s/model %s/pack --text %s/heldout.txt --ctx 50 --positions 100", at.dir, at.dir, at.dir);
    EXPECT(1, "was calibrated on its text calib.txt", "exl3-eval compare %s/model %s/pack --text %s/calib.txt --ctx 50", at.dir, at.dir, at.dir);
    EXPECT(0, "prompt tokens", "exl3-eval generate %s/pack --prompt 'the sea' --max-tokens 5", at.dir);
    CHECK_OK(x3_json_load(&receipt, x3_test_path(at.dir, "receipt.json"), &err), &err);
    CHECK(x3_json_get(x3_json_get(receipt, "pack"), "bits_body")->valuedouble == 6);
    CHECK(x3_json_get(receipt, "seed")->valuedouble == 1);
    CHECK(cJSON_GetArraySize(x3_json_get(x3_json_get(receipt, "kl"), "rows")) == 10);
    cJSON_Delete(receipt);
    EXPECT(0, "\"kl\"", "exl3-eval replay %s/receipt.json", at.dir);
    EXPECT(0, "1 scores, 1 packs", "exl3-eval report %s/receipt.json %s/pack/exl3_receipt.json --out %s/page.html", at.dir, at.dir, at.dir);
    EXPECT(0, "in 1 pass over the model; at most", "exl3-quantize measure %s/model --out %s/m.json --text %s/calib.txt --rows 2 --cols 100 --score-rows 2 --memory 1GB", at.dir, at.dir, at.dir);
    EXPECT(0, "predicted", "exl3-quantize plan %s/model --measure %s/pack.measure.json --bits 2.5 --set *q_proj=4 --out %s/r.yaml", at.dir, at.dir, at.dir);
    EXPECT(0, "body 2.", "exl3-quantize run %s/model %s/mixed --recipe %s/r.yaml --text %s/calib.txt --cols 100 --rows 2", at.dir, at.dir, at.dir, at.dir);
    EXPECT(0, "model.layers.0.self_attn.q_proj K=4", "exl3-quantize verify %s/mixed --source %s/model", at.dir, at.dir);
    EXPECT(2, "--head-bits and --uniform go with --bits", "exl3-quantize run %s/model %s/x --recipe %s/r.yaml --head-bits 6 --text %s/calib.txt", at.dir, at.dir, at.dir, at.dir);
    EXPECT(2, "one of --bits and --recipe", "exl3-quantize run %s/model %s/x --text %s/calib.txt", at.dir, at.dir, at.dir);
    EXPECT(1, "the output folder is not empty", "exl3-quantize run %s/model %s/mixed --bits 3 --text %s/calib.txt --cols 100 --resume", at.dir, at.dir, at.dir);
    EXPECT(0, "body 5", "exl3-quantize run %s/model %s/slashed// --bits 5 --uniform --text %s/calib.txt --cols 100 --rows 1", at.dir, at.dir, at.dir);
    CHECK(x3_path_exists(x3_test_path(at.dir, "slashed/config.json")) && !x3_path_exists(x3_test_path(at.dir, "slashed.work")));
    EXPECT(0, "measured", "exl3-quantize measure %s/model --out %s/m.json --text %s/calib.txt --cols 100 --rows 2", at.dir, at.dir, at.dir);
}

X3_TEST(cli_generate_chat_ends_the_assistants_turn)
{
    x3_test_skip_if_emulated();
    EXPECT(0, "25 prompt tokens", "exl3-eval generate tests/data/models/tiny-qwen3 --chat --system 'Be brief' --prompt 'What is the sea?'");
    CHECK(strstr(at.output, "ended at a stop token") != NULL && strstr(at.output, "<|im_end|>") == NULL);
    EXPECT(1, "/no.jinja", "exl3-eval generate tests/data/models/tiny-qwen3 --chat --prompt x --chat-template /no.jinja");
    EXPECT(2, "go with --chat", "exl3-eval generate tests/data/models/tiny-qwen3 --prompt x --system y");
}

X3_TEST(cli_serve_says_what_it_cannot_do_before_it_loads_anything)
{
    snprintf(at.dir, sizeof at.dir, "%s", x3_test_temp_dir());
    EXPECT(0, "--api-key-file FILE", "exl3-serve --help");
    EXPECT(0, "0.1.0", "exl3-serve --version");
    EXPECT(2, "PACK is missing", "exl3-serve");
    EXPECT(2, "--port 70000 is outside", "exl3-serve x --port 70000");
    EXPECT(1, "/no/such/pack", "exl3-serve /no/such/pack");
    EXPECT(1, "--ctx 5000 is more than the model's 4096", "exl3-serve tests/data/models/tiny-qwen3 --ctx 5000");
    EXPECT(1, "are needed and", "exl3-serve tests/data/models/tiny-qwen3 --memory 1MB");
    EXPECT(1, "/no.keys", "exl3-serve tests/data/models/tiny-qwen3 --api-key-file /no.keys");
    EXPECT(1, "/no.jinja", "exl3-serve tests/data/models/tiny-qwen3 --chat-template /no.jinja");
    EXPECT(1, "\"nowhere\" is not an address", "exl3-serve tests/data/models/tiny-qwen3 --ctx 64 --parallel 1 --host nowhere");
}

X3_TEST(cli_an_output_that_cannot_be_created_is_said_before_any_work)
{
    x3_tiny t = X3_TINY_DEFAULTS;

    snprintf(at.dir, sizeof at.dir, "%s", x3_test_temp_dir());
    x3_tiny_write(x3_test_path(at.dir, "model"), &t);
    x3_tiny_text(x3_test_path(at.dir, "calib.txt"), 600, 1);
    EXPECT(1, "/proc/pack: the pack needs", "exl3-quantize run %s/model /proc/pack --bits 6 --text %s/calib.txt --cols 100", at.dir, at.dir);
}

/* ---- report ---- */

static const char score_receipt[] =
    "{\"tool\": \"exl3-eval score\", \"source\": {\"path\": \"models/a<b\"}, \"pack\": {\"path\": \"packs/p&q\", "
    "\"bytes\": 4000000, \"bits_body\": 3.0, \"bits_head\": 6}, \"reference\": {\"xxh3\": \"%s\"}, \"text\": [{\"name\": "
    "\"x/held.txt\"}], \"ctx\": 512, \"positions\": 10240, \"kl\": {\"mean\": %s, \"stderr\": 0.01, \"p99\": 1.5}, \"top1\": "
    "{\"agree\": 0.8}, \"nll\": {\"reference\": 2.0, \"pack\": 2.2}, \"nonfinite\": 0}";

static void write_score(const char *name, const char *reference, const char *kl)
{
    char text[1024];
    int n = snprintf(text, sizeof text, score_receipt, reference, kl);

    x3_test_write(x3_test_path(at.dir, name), text, (size_t)n);
}

static size_t count(const char *text, const char *part)
{
    size_t n = 0;

    for (const char *p = text; (p = strstr(p, part)) != NULL; p++)
        n++;
    return n;
}

X3_TEST(cli_report_is_one_page_with_everything_in_it)
{
    static const char pack[] =
        "{\"source\": {\"path\": \"m\"}, \"bytes\": 1000, \"bits_body\": 2.5, \"bits_head\": 6, \"calibration\": {\"rows\": 3, "
        "\"cols\": 64}, \"groups\": ["
        "{\"name\": \"model.layers.0.self_attn.q_proj\", \"K\": 5, \"weights\": 128, \"error_source\": 0.01, \"error_target\": 0.02},"
        "{\"name\": \"model.layers.1.mlp.experts.0.gate_proj\", \"K\": 2, \"weights\": 128, \"error_source\": 0.3, \"error_target\": "
        "0.2, \"expert_tokens\": 0, \"blended\": 1},"
        "{\"name\": \"model.layers.1.mlp.experts.1.gate_proj\", \"K\": 3, \"weights\": 128, \"error_source\": 0.2, \"error_target\": "
        "0.2, \"expert_tokens\": 70},"
        "{\"name\": \"lm_head\", \"K\": 6, \"weights\": 128, \"error_source\": 0.001, \"error_target\": 0.002}]}";
    char *html = NULL;
    size_t n;
    x3_err err = {0};

    snprintf(at.dir, sizeof at.dir, "%s", x3_test_temp_dir());
    write_score("one.json", "00000000000000aa", "0.25");
    write_score("two.json", "00000000000000aa", "0.125");
    write_score("other.json", "00000000000000bb", "0.5");
    CHECK_OK(x3_mkdirs(x3_test_path(at.dir, "packed"), &err), &err);
    x3_test_write(x3_test_path(at.dir, "packed/exl3_receipt.json"), pack, sizeof pack - 1);
    EXPECT(0, "3 scores, 1 packs", "exl3-eval report %s/one.json %s/packed/exl3_receipt.json %s/two.json %s/other.json "
                                   "--out %s/page.html", at.dir, at.dir, at.dir, at.dir, at.dir);
    CHECK_OK(x3_read_file(&html, &n, x3_test_path(at.dir, "page.html"), 1 << 20, &err), &err);
    CHECK(count(html, "<h2>KL against size") == 2 && count(html, "<circle") == 3); /* a chart for every reference */
    CHECK(strstr(html, "a&lt;b") != NULL && strstr(html, "p&amp;q") != NULL && strstr(html, "p&q") == NULL);
    CHECK(strstr(html, "<h2>Pack: packed</h2>") != NULL && strstr(html, "mlp.experts.*.gate_proj") != NULL);
    CHECK(strstr(html, "2 tensors, K 2 to 3'>2.5</td>") != NULL);
    CHECK(strstr(html, "#d7263d") != NULL && strstr(html, "Least 0, mean 35, most 70. Tensors of experts without a token: 1; ") != NULL);
    const char *worst = strstr(html, "The worst tensors");
    CHECK(worst != NULL && strstr(worst, "experts.0.gate_proj") < strstr(worst, "experts.1.gate_proj"));
    CHECK(strstr(worst, "experts.1.gate_proj") < strstr(worst, "self_attn.q_proj") && strstr(worst, "lm_head") != NULL);
    CHECK(strstr(html, "<script") == NULL && strstr(html, "http") == NULL && strstr(html, "url(") == NULL);
    CHECK(strstr(html, "nan") == NULL && strstr(html, "</html>") != NULL);
    free(html);
}

X3_TEST(cli_report_names_what_a_receipt_lacks_and_writes_nothing)
{
    snprintf(at.dir, sizeof at.dir, "%s", x3_test_temp_dir());
    write_score("bad.json", "00000000000000aa", "\"low\"");
    EXPECT(1, "bad.json: \"kl.mean\" is missing or not a number", "exl3-eval report %s/bad.json --out %s/page.html", at.dir, at.dir);
    write_score("hash.json", "<script src=//a>", "0.25"); /* 16 bytes, too */
    EXPECT(1, "hash.json: \"reference.xxh3\" is not 16 hexadecimal digits", "exl3-eval report %s/hash.json --out %s/page.html", at.dir,
           at.dir);
    x3_test_write(x3_test_path(at.dir, "none.json"), "{\"a\": 1}", 8);
    EXPECT(1, "none.json: is neither the receipt of a score nor that of a pack", "exl3-eval report %s/none.json --out %s/page.html",
           at.dir, at.dir);
    static const char k9[] = "{\"source\": {\"path\": \"m\"}, \"bytes\": 1, \"bits_body\": 2, \"bits_head\": 6, \"calibration\": "
                             "{\"rows\": 3, \"cols\": 64}, \"groups\": [{\"name\": \"x\", \"K\": 9, \"weights\": 1, \"error_source\": 0, "
                             "\"error_target\": 0}]}";
    x3_test_write(x3_test_path(at.dir, "k.json"), k9, sizeof k9 - 1);
    EXPECT(1, "k.json: K of x is 9", "exl3-eval report %s/k.json --out %s/page.html", at.dir, at.dir);
    CHECK(!x3_path_exists(x3_test_path(at.dir, "page.html")));
    EXPECT(2, "--out FILE is missing", "exl3-eval report a.json");
}
