#include "tests/family_job.h"

#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "formats/io.h"
#include "quant/verify.h"
#include "tests/family_check.h"
#include "tests/test.h"
#include "tests/tiny_model.h"

void x3_family_job_text(const char *path, uint64_t seed)
{
    char text[1200];
    x3_rng rng;

    x3_rng_init(&rng, seed, "text");
    for (size_t i = 0; i < sizeof text; i++)
        text[i] = "ABCDEFGHIJKLMNOPQRSTUVWXYZ  \n.,:;0123456789"[x3_rng_next(&rng) % 43];
    x3_test_write(path, text, sizeof text);
}

void x3_family_job_setup(x3_family_job *s, const char *family, int bits)
{
    const char *root = x3_test_temp_dir();
    static const char *const files[] = {"config.json", "model.safetensors"};
    char from[300];
    x3_err err = {0};

    x3_test_skip_if_emulated();
    *s = (x3_family_job){0};
    snprintf(s->model, sizeof s->model, "%s/model", root);
    snprintf(s->out, sizeof s->out, "%s/pack", root);
    snprintf(s->work, sizeof s->work, "%s/pack.work", root);
    snprintf(s->text, sizeof s->text, "%s/text.txt", root);
    CHECK_OK(x3_mkdirs(s->model, &err), &err);
    for (int i = 0; i < 2; i++) {
        snprintf(from, sizeof from, "tests/data/families/%s/%s", family, files[i]);
        CHECK_OK(x3_copy_file(from, x3_test_path(s->model, files[i]), NULL, &err), &err);
    }
    x3_tiny_tokenizer(s->model);
    x3_family_job_text(s->text, 2);
    s->texts[0] = s->text;
    s->o = (x3_job_options){.model = s->model, .out = s->out, .bits = bits, .head_bits = 5, .quant = X3_QUANT_DEFAULTS,
                            .texts = s->texts, .n_texts = 1, .rows = 20, .cols = 48, .device = "cpu", .command = "test"};
}

x3_status x3_test_run_job(const x3_job_options *o, x3_err *err)
{
    x3_findings findings = {0};
    x3_job *job = NULL;
    x3_status rc = x3_job_open(&job, o, NULL, &findings, err);

    if (rc == X3_OK)
        rc = x3_job_run(job, err);
    x3_job_close(job);
    x3_findings_free(&findings);
    return rc;
}

void x3_family_job_verifies(const x3_family_job *s)
{
    x3_device *dev = x3_test_open_device();
    x3_verify_report r;
    x3_err err = {0};

    CHECK_OK(x3_verify_pack(&r, s->out, s->model, dev, NULL, &err), &err);
    CHECK_MSG(r.findings.n_items == 0, "%s", r.findings.items[0]);
    x3_verify_report_free(&r);
    x3_device_close(dev);
}

void x3_family_job_kill(const x3_family_job *s, const char *file)
{
    int status;
    pid_t child = fork();

    CHECK(child >= 0);
    if (child == 0) {
        x3_err err = {0};
        _exit(x3_test_run_job(&s->o, &err) == X3_OK ? 0 : 9);
    }
    while (!x3_path_exists(x3_test_path(s->work, file))) {
        CHECK_MSG(waitpid(child, &status, WNOHANG) == 0, "the job ended before it could be killed");
        usleep(1000);
    }
    kill(child, SIGKILL);
    CHECK(waitpid(child, &status, 0) == child);
    CHECK_MSG(WIFSIGNALED(status), "the job ended before it could be killed");
}
