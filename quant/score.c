#include "quant/score.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "quant/job_state.h"
#include "quant/pack_info.h"

#define CHUNK 128      /* positions whose logits are in memory at once */
#define FLOOR_ROWS 2 /* rows that the noise floor is measured on */

struct scorer {
    x3_device *dev;
    const x3_checkpoint *pack;
    const x3_reference *r;
    x3_weight head, reference_head;
    float *states, *chunk;                 /* host: the pack's [n_rows][ctx][hidden]; reference's [CHUNK][hidden] */
    float *d_states, *d_reference, *d_pack; /* device */
    x3_score_position *positions;          /* [n_rows][ctx] */
};

static x3_status logits_of(struct scorer *s, const x3_weight *head, const float *states, size_t n, float *d_logits,
                           x3_err *err)
{
    x3_status rc = s->dev->ops->upload(s->dev, s->d_states, states, n * s->r->hidden * sizeof *states, err);

    if (rc == X3_OK)
        rc = s->dev->ops->linear(s->dev, head, s->d_states, s->r->hidden, n, d_logits, s->r->vocab, err);
    return rc;
}

static x3_status score_row(struct scorer *s, size_t row, x3_err *err)
{
    const size_t ctx = s->r->ctx;
    int32_t next[CHUNK];
    x3_status rc = X3_OK;

    for (size_t first = 0; first < ctx; first += CHUNK) {
        size_t n = x3_min_size(CHUNK, ctx - first), at = row * ctx + first;
        for (size_t i = 0; i < n; i++)
            next[i] = first + i + 1 < ctx ? s->r->ids[at + i + 1] : -1;
        X3_TRY(rc, out, x3_reference_states(s->r, row, first, n, s->chunk, err));
        X3_TRY(rc, out, logits_of(s, &s->reference_head, s->chunk, n, s->d_reference, err));
        X3_TRY(rc, out, logits_of(s, &s->head, s->states + at * s->r->hidden, n, s->d_pack, err));
        X3_TRY(rc, out, s->dev->ops->score(s->dev, s->d_reference, s->d_pack, n, s->r->vocab, next, s->positions + at, err));
    }
out:
    return rc;
}

/* The pack's first rows once more, every linear summing in reverse. */
static x3_status noise_floor(struct scorer *s, x3_score *out, x3_err *err)
{
    const size_t n_rows = x3_min_size(FLOOR_ROWS, s->r->n_rows), ctx = s->r->ctx, n = n_rows * ctx;
    float *again = NULL;
    x3_score_position *p = NULL;
    int32_t next[CHUNK];
    x3_status rc;

    memset(next, 0xff, sizeof next); /* -1 */
    X3_TRY(rc, out, x3_alloc(&again, n * s->r->hidden, sizeof *again, err));
    X3_TRY(rc, out, x3_alloc(&p, n, sizeof *p, err));
    s->dev->reverse_sums = true;
    X3_TRY(rc, out, x3_stream_hidden(s->dev, s->pack, s->r->ids, n_rows, ctx, again, NULL, err));
    for (size_t at = 0; at < n; at += CHUNK) {
        size_t m = x3_min_size(CHUNK, n - at);
        s->dev->reverse_sums = false;
        X3_TRY(rc, out, logits_of(s, &s->head, s->states + at * s->r->hidden, m, s->d_reference, err));
        s->dev->reverse_sums = true;
        X3_TRY(rc, out, logits_of(s, &s->head, again + at * s->r->hidden, m, s->d_pack, err));
        X3_TRY(rc, out, s->dev->ops->score(s->dev, s->d_reference, s->d_pack, m, s->r->vocab, next, p + at, err));
    }
    out->floor_positions = n;
    for (size_t i = 0; i < n; i++) {
        out->floor_kl += p[i].kl / (double)n;
        out->floor_top1 += p[i].top1 / (double)n;
    }
out:
    s->dev->reverse_sums = false;
    free(again);
    free(p);
    return rc;
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;

    return (x > y) - (x < y);
}

static double quantile(const double *sorted, size_t n, double q)
{
    double at = q * (double)(n - 1);
    size_t i = (size_t)at;

    return i + 1 < n ? sorted[i] + (at - (double)i) * (sorted[i + 1] - sorted[i]) : sorted[n - 1];
}

static double standard_error(const double *x, size_t n)
{
    double mean = 0, squares = 0;

    for (size_t i = 0; i < n; i++)
        mean += x[i] / (double)n;
    for (size_t i = 0; i < n; i++)
        squares += (x[i] - mean) * (x[i] - mean);
    return n < 2 ? 0 : sqrt(squares / (double)(n - 1) / (double)n);
}

static x3_status summarize(const struct scorer *s, x3_score *out, x3_err *err)
{
    const size_t ctx = s->r->ctx, n_rows = s->r->n_rows;
    double *sorted = NULL, *row_top1 = NULL;
    size_t n = 0, n_next = 0;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&sorted, n_rows * ctx, sizeof *sorted, err));
    X3_TRY(rc, out, x3_alloc(&row_top1, n_rows, sizeof *row_top1, err));
    X3_TRY(rc, out, x3_alloc(&out->row_kl, n_rows, sizeof *out->row_kl, err));
    for (size_t row = 0; row < n_rows; row++) {
        size_t finite = 0;
        for (size_t i = 0; i < ctx; i++) {
            const x3_score_position *p = &s->positions[row * ctx + i];
            if (!p->finite) {
                out->n_nonfinite++;
                continue;
            }
            finite++;
            sorted[n++] = p->kl;
            out->row_kl[row] += p->kl;
            row_top1[row] += p->top1;
            out->top5 += p->top5;
            if (i + 1 < ctx) {
                out->nll_reference += p->nll_reference;
                out->nll_pack += p->nll_pack;
                n_next++;
            }
        }
        out->kl_mean += out->row_kl[row];
        out->top1 += row_top1[row];
        out->row_kl[row] /= finite == 0 ? 1 : (double)finite;
        row_top1[row] /= finite == 0 ? 1 : (double)finite;
    }
    out->n_positions = n_rows * ctx;
    out->n_rows = n_rows;
    out->vocab = s->r->vocab;
    if (n == 0) {
        rc = x3_fail(err, X3_ERR_NUMERIC, "%s: no position gives finite logits", s->pack->dir);
        goto out;
    }
    out->kl_mean /= (double)n;
    out->top1 /= (double)n;
    out->top5 /= (double)n;
    out->nll_reference /= n_next == 0 ? 1 : (double)n_next;
    out->nll_pack /= n_next == 0 ? 1 : (double)n_next;
    out->kl_stderr = standard_error(out->row_kl, n_rows);
    out->top1_stderr = standard_error(row_top1, n_rows);
    qsort(sorted, n, sizeof *sorted, compare_doubles);
    out->kl_median = quantile(sorted, n, .5);
    out->kl_p90 = quantile(sorted, n, .9);
    out->kl_p99 = quantile(sorted, n, .99);
    out->kl_max = sorted[n - 1];
out:
    free(sorted);
    free(row_top1);
    return rc;
}

static x3_status check_fit(const x3_checkpoint *pack, const x3_reference *r, x3_err *err)
{
    if (pack->model->hidden != r->hidden || pack->model->vocab != r->vocab)
        return x3_fail(err, X3_ERR_INPUT, "%s: hidden size %zu and vocabulary %zu, the reference %s has %zu and %zu",
                       pack->dir, pack->model->hidden, pack->model->vocab, r->path, r->hidden, r->vocab);
    return x3_pack_check_texts(pack, r->receipt, r->path, err);
}

x3_status x3_score_pack(x3_score *out, x3_device *dev, const x3_checkpoint *pack, const x3_reference *r,
                        const x3_progress *progress, x3_err *err)
{
    struct scorer s = {.dev = dev, .pack = pack, .r = r};
    x3_status rc;

    *out = (x3_score){0};
    X3_TRY(rc, out, check_fit(pack, r, err));
    X3_TRY(rc, out, x3_alloc(&s.states, r->n_rows * r->ctx * r->hidden, sizeof *s.states, err));
    X3_TRY(rc, out, x3_alloc(&s.chunk, CHUNK * r->hidden, sizeof *s.chunk, err));
    X3_TRY(rc, out, x3_alloc(&s.positions, r->n_rows * r->ctx, sizeof *s.positions, err));
    X3_TRY(rc, out, x3_stream_hidden(dev, pack, r->ids, r->n_rows, r->ctx, s.states, progress, err));
    X3_TRY(rc, out, x3_linear_load(&s.head, dev, pack, &pack->model->head, err));
    X3_TRY(rc, out, x3_reference_head(r, dev, &s.reference_head, err));
    X3_TRY(rc, out, x3_device_floats(dev, &s.d_states, CHUNK * r->hidden, err));
    X3_TRY(rc, out, x3_device_floats(dev, &s.d_reference, CHUNK * r->vocab, err));
    X3_TRY(rc, out, x3_device_floats(dev, &s.d_pack, CHUNK * r->vocab, err));
    for (size_t row = 0; row < r->n_rows; row++)
        X3_TRY(rc, out, score_row(&s, row, err));
    X3_TRY(rc, out, summarize(&s, out, err));
    X3_TRY(rc, out, noise_floor(&s, out, err));
out:
    x3_linear_free(&s.head, dev);
    x3_linear_free(&s.reference_head, dev);
    x3_device_free(dev, s.d_states);
    x3_device_free(dev, s.d_reference);
    x3_device_free(dev, s.d_pack);
    free(s.states);
    free(s.chunk);
    free(s.positions);
    if (rc != X3_OK)
        x3_score_free(out);
    return rc;
}

void x3_score_free(x3_score *s)
{
    free(s->row_kl);
    *s = (x3_score){0};
}

/* ---- two packs ---- */

static x3_status read_rows(x3_other_score *out, const cJSON *rows, size_t n_rows, const char *path, x3_err *err)
{
    const cJSON *row;
    size_t i = 0;
    x3_status rc;

    if (!cJSON_IsArray(rows) || (size_t)cJSON_GetArraySize(rows) != n_rows)
        return x3_fail(err, X3_ERR_INPUT, "%s: kl.rows has %d numbers, the reference %zu rows", path,
                       cJSON_IsArray(rows) ? cJSON_GetArraySize(rows) : 0, n_rows);
    rc = x3_alloc(&out->row_kl, n_rows, sizeof *out->row_kl, err);
    if (rc != X3_OK)
        return rc;
    cJSON_ArrayForEach(row, rows) {
        if (!cJSON_IsNumber(row))
            return x3_fail(err, X3_ERR_INPUT, "%s: kl.rows[%zu] is not a number", path, i);
        out->row_kl[i++] = row->valuedouble;
    }
    return X3_OK;
}

x3_status x3_other_score_read(x3_other_score *out, const x3_reference *r, const char *path, x3_err *err)
{
    const cJSON *kl;
    cJSON *receipt = NULL;
    uint64_t reference = 0;
    x3_status rc;

    *out = (x3_other_score){0};
    X3_TRY(rc, out, x3_json_load(&receipt, path, err));
    X3_TRY(rc, out, x3_record_hash(x3_json_get(receipt, "reference"), "xxh3", path, &reference, err));
    X3_TRY(rc, out, x3_record_hash(x3_json_get(receipt, "pack"), "xxh3", path, &out->pack, err));
    if (reference != r->hash) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: was scored against reference %016llx, this is %016llx (%s)", path,
                     (unsigned long long)reference, (unsigned long long)r->hash, r->path);
        goto out;
    }
    kl = x3_json_get(receipt, "kl");
    rc = read_rows(out, kl == NULL ? NULL : x3_json_get(kl, "rows"), r->n_rows, path, err);
out:
    if (rc != X3_OK)
        x3_other_score_free(out);
    cJSON_Delete(receipt);
    return rc;
}

void x3_other_score_free(x3_other_score *other)
{
    free(other->row_kl);
    *other = (x3_other_score){0};
}

x3_status x3_score_against(x3_paired *out, const x3_score *s, const x3_other_score *other, x3_err *err)
{
    double *difference = NULL;
    x3_status rc = x3_alloc(&difference, s->n_rows, sizeof *difference, err);

    *out = (x3_paired){.pack = other->pack};
    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < s->n_rows; i++) {
        difference[i] = s->row_kl[i] - other->row_kl[i];
        out->difference += difference[i] / (double)s->n_rows;
    }
    out->stderr_ = standard_error(difference, s->n_rows);
    free(difference);
    return X3_OK;
}

/* ---- receipt ---- */

static x3_status add_numbers(cJSON *receipt, const char *name, const char *const *keys, const double *values, size_t n,
                             cJSON **out, x3_err *err)
{
    cJSON *o = cJSON_CreateObject();
    x3_status rc = x3_json_add(receipt, name, o, err);

    for (size_t i = 0; i < n && rc == X3_OK; i++)
        rc = x3_json_add(o, keys[i], cJSON_CreateNumber(values[i]), err);
    if (out != NULL)
        *out = o;
    return rc;
}

static x3_status add_measures(cJSON *j, const x3_score *s, x3_err *err)
{
    cJSON *kl;
    x3_status rc;

    X3_TRY(rc, out, add_numbers(j, "kl", (const char *const[]){"mean", "stderr", "median", "p90", "p99", "max"},
                                (const double[]){s->kl_mean, s->kl_stderr, s->kl_median, s->kl_p90, s->kl_p99, s->kl_max},
                                6, &kl, err));
    X3_TRY(rc, out, x3_json_add(kl, "direction", cJSON_CreateString("reference||pack"), err));
    X3_TRY(rc, out, x3_json_add(kl, "unit", cJSON_CreateString("nats"), err));
    X3_TRY(rc, out, x3_json_add(kl, "rows", cJSON_CreateDoubleArray(s->row_kl, (int)s->n_rows), err));
    X3_TRY(rc, out, add_numbers(j, "top1", (const char *const[]){"agree", "stderr"},
                                (const double[]){s->top1, s->top1_stderr}, 2, NULL, err));
    X3_TRY(rc, out, add_numbers(j, "top5", (const char *const[]){"agree"}, &s->top5, 1, NULL, err));
    X3_TRY(rc, out, add_numbers(j, "nll", (const char *const[]){"reference", "pack"},
                                (const double[]){s->nll_reference, s->nll_pack}, 2, NULL, err));
    X3_TRY(rc, out, add_numbers(j, "noise_floor", (const char *const[]){"kl", "top1", "positions"},
                                (const double[]){s->floor_kl, s->floor_top1, (double)s->floor_positions}, 3, NULL, err));
    X3_TRY(rc, out, x3_json_add(j, "nonfinite", cJSON_CreateNumber((double)s->n_nonfinite), err));
out:
    return rc;
}

static x3_status add_against(cJSON *j, const x3_paired *a, x3_err *err)
{
    cJSON *o;
    x3_status rc = add_numbers(j, "against", (const char *const[]){"kl_difference", "stderr"},
                               (const double[]){a->difference, a->stderr_}, 2, &o, err);

    return rc == X3_OK ? x3_json_add_hash(o, "pack", a->pack, err) : rc;
}

static x3_status add_pack(cJSON *j, const x3_checkpoint *pack, x3_err *err)
{
    cJSON *o = cJSON_CreateObject();
    x3_pack_info info;
    uint64_t hash;
    x3_status rc = x3_json_add(j, "pack", o, err);

    X3_TRY(rc, out, rc);
    X3_TRY(rc, out, x3_checkpoint_hash(pack, &hash, err));
    X3_TRY(rc, out, x3_pack_info_read(&info, pack, err));
    X3_TRY(rc, out, x3_json_add(o, "path", cJSON_CreateString(pack->dir), err));
    X3_TRY(rc, out, x3_json_add_hash(o, "xxh3", hash, err));
    X3_TRY(rc, out, x3_json_add(o, "bits_body", cJSON_CreateNumber(info.bits_body), err));
    X3_TRY(rc, out, x3_json_add(o, "bits_head", cJSON_CreateNumber(info.bits_head), err));
    X3_TRY(rc, out, x3_json_add(o, "bytes", cJSON_CreateNumber((double)info.n_bytes), err));
out:
    return rc;
}

x3_status x3_score_receipt(cJSON **out, const x3_score *s, const x3_checkpoint *pack, const x3_reference *r,
                           const x3_paired *against, const x3_device *dev, const char *command, double seconds, x3_err *err)
{
    const cJSON *source = x3_json_get(r->receipt, "source"), *text = x3_json_get(r->receipt, "text");
    const cJSON *dtype = source == NULL ? NULL : x3_json_get(source, "dtype");
    cJSON *j = cJSON_CreateObject(), *reference = cJSON_CreateObject();
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_pack_receipt_head(j, "exl3-eval score", command, pack, err));
    X3_TRY(rc, out, x3_json_add(j, "source", source == NULL ? cJSON_CreateNull() : cJSON_Duplicate(source, true), err));
    X3_TRY(rc, out, add_pack(j, pack, err));
    X3_TRY(rc, out, x3_json_add(j, "reference", reference, err));
    X3_TRY(rc, out, x3_json_add_hash(reference, "xxh3", r->hash, err));
    X3_TRY(rc, out, x3_json_add(reference, "dtype",
                                cJSON_IsString(dtype) ? cJSON_CreateString(dtype->valuestring) : cJSON_CreateNull(), err));
    X3_TRY(rc, out, x3_json_add(j, "text", text == NULL ? cJSON_CreateArray() : cJSON_Duplicate(text, true), err));
    X3_TRY(rc, out, x3_json_add(j, "ctx", cJSON_CreateNumber((double)r->ctx), err));
    X3_TRY(rc, out, x3_json_add(j, "positions", cJSON_CreateNumber((double)s->n_positions), err));
    X3_TRY(rc, out, x3_json_add(j, "vocab", cJSON_CreateNumber((double)s->vocab), err));
    X3_TRY(rc, out, add_measures(j, s, err));
    if (against != NULL)
        X3_TRY(rc, out, add_against(j, against, err));
    X3_TRY(rc, out, x3_json_add(j, "device", cJSON_CreateString(dev->name), err));
    X3_TRY(rc, out, x3_json_add(j, "seconds", cJSON_CreateNumber(seconds), err));
    *out = j;
    j = NULL;
out:
    cJSON_Delete(j);
    return rc;
}
