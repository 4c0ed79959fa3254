/* Checking a pack: is it whole, is it what its receipt says, would every known reader load it. */
#ifndef X3_VERIFY_H
#define X3_VERIFY_H

#include "quant/pack_info.h"
#include "runtime/device/device.h"
#include "runtime/stream.h"

typedef struct x3_verify_group {
    const char *name;         /* lives as long as the report */
    int K;
    double error_weight;      /* |E|^2 / |W|^2 recomputed; < 0 without a source */
    double receipt_error;     /* the receipt's; < 0 when it has none */
} x3_verify_group;

typedef struct x3_verify_report {
    x3_pack_info info;
    x3_findings findings;  /* problems: the pack fails */
    x3_findings notes;     /* things to know: the pack passes */
    x3_verify_group *groups; /* with a source */
    size_t n_groups;
    size_t n_hashed;       /* tensors whose XXH3 was compared with the receipt */
    x3_checkpoint *pack;
} x3_verify_report;

/* All problems go to report->findings; the status is X3_OK when the checks could be made at all. `source_dir` may be
 * NULL. */
x3_status x3_verify_pack(x3_verify_report *report, const char *pack_dir, const char *source_dir, x3_device *dev,
                         const x3_progress *progress, x3_err *err) X3_MUST;
void x3_verify_report_free(x3_verify_report *r);

#endif
