#include "quant/plan.h"

#include <fnmatch.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "quant/pack_plan.h"

#define RECEIPT_BYTES_A_GROUP 640 /* 616 a group with all else in a pack of 29 groups */

/* ---- bits set by hand ---- */

static x3_status apply_set(const x3_model *m, const char *set, uint8_t *fixed, x3_err *err)
{
    const char *equals = strrchr(set, '=');
    const x3_linear_desc *d;
    size_t layer, matched = 0;
    char pattern[512];

    if (equals == NULL || equals == set || equals[1] < '1' || equals[1] > '8' || equals[2] != '\0' ||
        (size_t)(equals - set) >= sizeof pattern)
        return x3_fail(err, X3_ERR_INPUT, "--set %.200s: expected PATTERN=K with K from 1 to 8", set);
    memcpy(pattern, set, (size_t)(equals - set));
    pattern[equals - set] = '\0';
    for (size_t i = 0; (d = x3_model_linear(m, i, &layer)) != NULL && layer < m->n_layers; i++)
        if (d->quantized && fnmatch(pattern, d->name, 0) == 0) {
            fixed[i] = (uint8_t)(equals[1] - '0');
            matched++;
        }
    if (matched == 0)
        return x3_fail(err, X3_ERR_INPUT, "--set %.200s: no linear that is quantized has a name like \"%s\"", set, pattern);
    return X3_OK;
}

static size_t fix_unmeasured(const x3_model *model, const x3_measurement *m, const x3_plan_options *o, uint8_t *fixed)
{
    const int K = X3_UNMEASURED_K < o->min_bits ? o->min_bits : X3_UNMEASURED_K > o->max_bits ? o->max_bits : X3_UNMEASURED_K;
    size_t n = 0, layer;

    for (size_t i = 0; i < m->n; i++)
        if (m->kl[i] == 0 && fixed[i] == 0 && x3_model_linear(model, i, &layer)->quantized) {
            fixed[i] = (uint8_t)K;
            n++;
        }
    return n;
}

/* ---- sizes ---- */

static x3_status json_bytes(cJSON *json, uint64_t *sum, x3_err *err)
{
    char *text = json == NULL ? NULL : cJSON_Print(json);

    cJSON_Delete(json);
    if (text == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory while printing JSON");
    *sum += strlen(text) + 1;
    cJSON_free(text);
    return X3_OK;
}

/* Bytes of the folder that an allocation makes. */
static x3_status folder_bytes(const x3_checkpoint *source, const x3_allocation *a, x3_codebook codebook, uint64_t *bytes,
                              x3_err *err)
{
    const x3_pack_json info = {.rows = 250, .cols = 2048};
    x3_names copied = {0}, left = {0};
    x3_pack_writer *writer = NULL;
    x3_pack_plan *plan = NULL;
    cJSON *json = NULL;
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_pack_plan_create(&plan, source, a, codebook, err));
    X3_TRY(rc, out, x3_pack_writer_plan(&writer, ".", plan->tensors, plan->n_tensors, X3_SHARD_BYTES, err));
    *bytes = writer->file_bytes + RECEIPT_BYTES_A_GROUP * (uint64_t)plan->n_groups;
    X3_TRY(rc, out, x3_pack_config(&json, plan, &info, err));
    X3_TRY(rc, out, json_bytes(json, bytes, err));
    X3_TRY(rc, out, x3_pack_quantization_config(&json, plan, &info, err));
    X3_TRY(rc, out, json_bytes(json, bytes, err));
    X3_TRY(rc, out, x3_pack_writer_index(writer, &json, err));
    X3_TRY(rc, out, json_bytes(json, bytes, err));
    X3_TRY(rc, out, x3_pack_side_files(source->dir, &copied, &left, err));
    for (size_t i = 0; i < copied.n_items; i++) {
        x3_map map;
        free(path);
        X3_TRY(rc, out, x3_path_join(&path, source->dir, copied.items[i], err));
        X3_TRY(rc, out, x3_map_open(&map, path, err));
        *bytes += map.n_bytes;
        x3_map_close(&map);
    }
out:
    free(path);
    x3_names_free(&copied);
    x3_names_free(&left);
    x3_pack_writer_free(writer);
    x3_pack_plan_free(plan);
    return rc;
}

static uint64_t used_bits(const x3_allocation *a, const x3_model *m)
{
    uint64_t bits = 0;
    size_t layer;

    for (size_t i = 0; i < a->n; i++) {
        const x3_linear_desc *d = x3_model_linear(m, i, &layer);
        bits += a->K[i] * (uint64_t)x3_round_up(d->n_in, 128) * x3_round_up(d->n_out, 128);
    }
    return bits;
}

/* ---- the plan ---- */

/* The largest budget of bits whose folder is at most size_bytes: trellises grow with the bits, everything else nearly
 * not at all (numbers in headers), which the second round takes back. */
static x3_status plan_to_size(x3_plan *p, const x3_checkpoint *source, x3_codebook codebook, x3_plan_request *r,
                              uint64_t size_bytes, x3_err *err)
{
    const uint64_t total = x3_body_weights(source->model);
    uint64_t bytes = 0;
    x3_status rc;

    /* a plan of everything at its least says what else there is in the folder */
    r->budget = 8 * total;
    const int max_K = r->max_K;
    r->max_K = r->min_K;
    rc = x3_allocate_planned(&p->allocation, source->model, r, err);
    r->max_K = max_K;
    X3_TRY(rc, out, rc);
    X3_TRY(rc, out, folder_bytes(source, &p->allocation, codebook, &bytes, err));
    if (bytes > size_bytes) {
        rc = x3_fail(err, X3_ERR_INPUT, "--size: %llu bytes are asked for, the smallest pack (all linears at %d bits, but for "
                     "those set by hand) has %llu", (unsigned long long)size_bytes, r->min_K, (unsigned long long)bytes);
        goto out;
    }
    r->budget = used_bits(&p->allocation, source->model) + 8 * (size_bytes - bytes);
    for (int round = 0; round < 8; round++) {
        x3_allocation_free(&p->allocation);
        X3_TRY(rc, out, x3_allocate_planned(&p->allocation, source->model, r, err));
        X3_TRY(rc, out, folder_bytes(source, &p->allocation, codebook, &bytes, err));
        if (bytes <= size_bytes)
            break;
        r->budget -= 8 * (bytes - size_bytes);
    }
    if (bytes > size_bytes)
        rc = x3_fail(err, X3_ERR_INPUT, "--size: no plan of at most %llu bytes was found", (unsigned long long)size_bytes);
out:
    return rc;
}

/* The uniform allocation of the bits asked for (of those that the plan uses, where a size was), unless bits are set by
 * hand, which it does not know. */
static x3_status compare_with_uniform(x3_plan *p, const x3_checkpoint *source, const x3_plan_options *o,
                                      const double (*cost)[8], x3_err *err)
{
    x3_allocation uniform = {0};
    x3_status rc;

    p->predicted_kl = x3_allocation_cost(&p->allocation, cost);
    X3_TRY(rc, out, x3_allocate_uniform(&uniform, source->model, o->bits > 0 ? o->bits : fmin(fmax(p->allocation.body_bits, 1), 8), o->head_bits,
                                        o->tie, err));
    p->uniform_kl = x3_allocation_cost(&uniform, cost);
    if (o->n_sets == 0 && p->n_unmeasured == 0 && o->min_bits == 1 && o->max_bits == 8 && p->uniform_kl <= p->predicted_kl) {
        uniform.target_bits = p->allocation.target_bits;
        x3_allocation_free(&p->allocation);
        p->allocation = uniform;
        p->predicted_kl = p->uniform_kl;
        p->is_uniform = true;
        uniform = (x3_allocation){0};
    }
out:
    x3_allocation_free(&uniform);
    return rc;
}

x3_status x3_plan_create(x3_plan *out, const x3_checkpoint *source, const x3_measurement *m, const x3_plan_options *o,
                         x3_err *err)
{
    const x3_model *model = source->model;
    x3_plan_request r = {.tie = o->tie, .min_K = o->min_bits, .max_K = o->max_bits, .head_K = o->head_bits};
    double (*cost)[8] = NULL;
    uint8_t *fixed = NULL;
    x3_status rc;

    *out = (x3_plan){0};
    if (o->min_bits > o->max_bits)
        return x3_fail(err, X3_ERR_INPUT, "--min-bits %d is more than --max-bits %d", o->min_bits, o->max_bits);
    X3_TRY(rc, out, x3_measurement_costs(m, &cost, err));
    X3_TRY(rc, out, x3_alloc(&fixed, m->n, 1, err));
    for (size_t i = 0; i < o->n_sets; i++)
        X3_TRY(rc, out, apply_set(model, o->sets[i], fixed, err));
    out->n_unmeasured = fix_unmeasured(model, m, o, fixed);
    r.cost = (const double(*)[8])cost;
    r.fixed = fixed;
    if (o->size_bytes > 0) {
        X3_TRY(rc, out, plan_to_size(out, source, m->codebook, &r, o->size_bytes, err));
    } else {
        r.budget = (uint64_t)floor(o->bits * (double)x3_body_weights(model) + 1e-6);
        X3_TRY(rc, out, x3_allocate_planned(&out->allocation, model, &r, err));
    }
    X3_TRY(rc, out, compare_with_uniform(out, source, o, r.cost, err));
    rc = folder_bytes(source, &out->allocation, m->codebook, &out->folder_bytes, err);
out:
    free(cost);
    free(fixed);
    if (rc != X3_OK)
        x3_plan_free(out);
    return rc;
}

void x3_plan_free(x3_plan *p)
{
    x3_allocation_free(&p->allocation);
    *p = (x3_plan){0};
}

/* ---- recipes ---- */

x3_status x3_recipe_of(x3_recipe **out, const x3_model *m, const x3_allocation *a, x3_err *err)
{
    x3_recipe *r = NULL;
    size_t layer;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&r, 1, sizeof *r, err));
    r->target_bpw = a->target_bits;
    r->achieved_bpw = a->body_bits;
    r->head_bits = a->head_K;
    X3_TRY(rc, out, x3_alloc(&r->tensors, a->n, sizeof *r->tensors, err));
    for (size_t i = 0; i < a->n; i++) {
        if (a->K[i] == 0)
            continue;
        X3_TRY(rc, out, x3_strdup(&r->tensors[r->n_tensors].name, x3_model_linear(m, i, &layer)->name, err));
        r->tensors[r->n_tensors++].bits = a->K[i];
    }
    *out = r;
    r = NULL;
out:
    x3_recipe_free(r);
    return rc;
}

x3_status x3_allocation_of_recipe(x3_allocation *out, const x3_model *m, const char *path, x3_err *err)
{
    const char **names = NULL;
    int *bits = NULL;
    x3_recipe *r = NULL;
    x3_status rc;

    *out = (x3_allocation){0};
    X3_TRY(rc, out, x3_recipe_load(&r, path, err));
    X3_TRY(rc, out, x3_alloc(&names, r->n_tensors, sizeof *names, err));
    X3_TRY(rc, out, x3_alloc(&bits, r->n_tensors, sizeof *bits, err));
    for (size_t i = 0; i < r->n_tensors; i++) {
        names[i] = r->tensors[i].name;
        bits[i] = r->tensors[i].bits;
    }
    rc = x3_allocate_named(out, m, names, bits, r->n_tensors, r->head_bits, r->target_bpw, path, err);
out:
    free(names);
    free(bits);
    x3_recipe_free(r);
    return rc;
}
