/* Quantization jobs of the fixtures in tests/data/families. */
#ifndef X3_FAMILY_JOB_H
#define X3_FAMILY_JOB_H

#include "quant/job.h"

typedef struct x3_family_job {
    char model[300], out[300], work[300], text[300];
    const char *texts[2];
    x3_job_options o;
} x3_family_job;

/* 1,200 bytes below 96. */
void x3_family_job_text(const char *path, uint64_t seed);
/* A copy of a fixture with a tokenizer of bytes, and such a text. Skips the test under emulation. */
void x3_family_job_setup(x3_family_job *s, const char *family, int bits);
x3_status x3_test_run_job(const x3_job_options *o, x3_err *err);
/* The pack verifies against the source, without a finding. */
void x3_family_job_verifies(const x3_family_job *s);
/* Runs the job in a child and kills it as soon as `file` is in its work folder. */
void x3_family_job_kill(const x3_family_job *s, const char *file);

#endif
