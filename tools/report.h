/* exl3-eval report: one self-contained HTML page from receipts. Receipts of scores (exl3-eval score, compare) give KL
 * against bytes, a chart for every reference, since figures against different texts do not compare. Receipts of packs
 * (exl3_receipt.json) give a map of K by layer and projection, tokens and K of experts, and the worst tensors.
 *
 * report.c reads, report_page.c writes. */
#ifndef X3_REPORT_H
#define X3_REPORT_H

#include "formats/json.h"

typedef struct x3_report_score {
    const char *name, *source, *text; /* of the pack's folder, the model, the texts; live as long as the report */
    char reference[17];               /* hash */
    double bytes, bits_body, bits_head, kl, kl_stderr, kl_p99, top1, nll_reference, nll_pack, positions, ctx, nonfinite;
} x3_report_score;

typedef struct x3_report_group {
    const char *name;
    const char *projection; /* name without layer and expert: "mlp.experts.*.gate_proj" */
    int layer, expert;      /* -1: none */
    int K;
    double weights, error_source, error_target, blended;
    double tokens;          /* of its expert; -1: not an expert */
} x3_report_group;

typedef struct x3_report_pack {
    const char *name, *source;
    double bytes, bits_body, bits_head, rows, cols;
    x3_report_group *groups; /* in the order of the model */
    size_t n_groups;
} x3_report_pack;

typedef struct x3_report {
    cJSON **receipts; /* what the texts above point into */
    size_t n_receipts;
    x3_report_score *scores;
    size_t n_scores;
    x3_report_pack *packs;
    size_t n_packs;
    x3_arena arena;
} x3_report;

/* A file that is no receipt of these kinds, or lacks a value, is an error that names file and key. */
x3_status x3_report_read(x3_report *r, const char *const *paths, size_t n, x3_err *err) X3_MUST;
void x3_report_free(x3_report *r);

/* *html on the heap. */
x3_status x3_report_page(const x3_report *r, char **html, size_t *n_bytes, x3_err *err) X3_MUST;

#endif
