/* Operations of the CUDA device for mixtures of experts.
 *
 * A linear of all experts is one launch for every kind of weight among them (a dense type, or EXL3 of a codebook with any K
 * from 1 to 8: packs have one). How many rows an expert has stays on the device: launches have blocks for as many experts
 * as can have some, and those without leave at once, so their shapes depend on the number of slots alone and they can be
 * recorded.
 * What they need to know of the weights is a table that goes to the device once: experts of a layer keep it while they stay
 * what they are. */
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "kernels/cuda_moe.h"
#include "runtime/device/device_cuda.h"

x3_status x3_cuda_op_sigmoid_scale(x3_device *dev, float *d_x, const float *d_gate, size_t n_rows, size_t n, x3_err *err)
{
    return x3_cuda_sigmoid_mul(d_x, d_gate, n_rows * n, n, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_route(x3_device *dev, const x3_route_rule *rule, const float *d_logits, const float *d_correction,
                           size_t n_rows, int32_t *d_ids, float *d_weights, x3_err *err)
{
    return x3_cuda_route(&x3_cuda(dev)->info, rule, d_logits, d_correction, n_rows, d_ids, d_weights, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_group_rows(x3_device *dev, const int32_t *d_ids, size_t n_rows, size_t n_chosen, size_t n_experts,
                                int32_t *d_first, int32_t *d_rows, int32_t *d_slots, x3_err *err)
{
    return x3_cuda_group_rows(d_ids, n_rows, n_chosen, n_experts, d_first, d_rows, d_slots, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_gather_rows(x3_device *dev, const float *d_x, const int32_t *d_rows, size_t n_rows, size_t n, float *d_out,
                                 x3_err *err)
{
    return x3_cuda_gather_rows(d_x, d_rows, n_rows, n, d_out, x3_cuda(dev)->stream, err);
}

x3_status x3_cuda_op_combine_rows(x3_device *dev, const float *d_y, const int32_t *d_slots, const float *d_weights, size_t n_rows,
                                  size_t n_chosen, size_t n, bool add, float *d_out, x3_err *err)
{
    return x3_cuda_combine_rows(d_y, d_slots, d_weights, n_rows, n_chosen, n, add, d_out, x3_cuda(dev)->stream, err);
}

/* ---- tables of weights --------------------------------------------------------------------------------------------------- */

/* Number of a weight's kind: dense types, then codebooks. */
#define DENSE_KINDS 3
#define KINDS (DENSE_KINDS + 3)

static size_t kind_of(const x3_weight *w)
{
    return w->kind != X3_WEIGHT_EXL3 ? (size_t)x3_cuda_type_of(w) : DENSE_KINDS + (size_t)w->codebook;
}

/* Experts as kernels see them, [n], then their numbers [n] by kind. */
struct x3_cuda_experts {
    uint64_t hash;
    size_t n_bytes;
    void *host, *d;
};

#define TABLES 512 /* kept at most: of a job whose weights come and go, those of former layers too */

static x3_status check_weight(const x3_weight *w, const x3_weight *first, x3_err *err)
{
    const bool exl3 = w->kind == X3_WEIGHT_EXL3;

    if (w->kind == X3_WEIGHT_NONE || w->n_in != first->n_in || w->n_out != first->n_out)
        return x3_fail(err, X3_ERR_INPUT, "an expert's weight is %zu x %zu, the first one's %zu x %zu", w->n_out, w->n_in,
                       first->n_out, first->n_in);
    if (exl3 && (w->K < 1 || w->K > 8 || (unsigned)w->codebook > X3_CB_MUL1))
        return x3_fail(err, X3_ERR_UNSUPPORTED, "an expert's weight has K = %d and codebook %d", w->K, (int)w->codebook);
    if (exl3 && (w->n_in_padded != x3_round_up(w->n_in, 128) || w->n_out_padded != x3_round_up(w->n_out, 128) ||
                 (uintptr_t)w->data % 16 != 0))
        return x3_fail(err, X3_ERR_INPUT, "an expert's weight of %zu x %zu is padded to %zu x %zu, or does not begin on 16 bytes",
                       w->n_out, w->n_in, w->n_out_padded, w->n_in_padded);
    return X3_OK;
}

/* Fills a table; counts [KINDS + 1] becomes where the numbers of a kind begin, most_K [KINDS] their largest K. */
static x3_status fill_table(const x3_expert_args *a, void *table, size_t *counts, int *most_K, bool *aligned, x3_err *err)
{
    x3_cuda_expert *experts = table;
    int32_t *numbers = (int32_t *)(void *)(experts + a->n_experts);
    size_t next[KINDS];
    x3_status rc = X3_OK;

    *aligned = true;
    for (size_t e = 0; e < a->n_experts; e++) {
        const x3_weight *w = &a->weights[e * a->stride];
        const bool exl3 = w->kind == X3_WEIGHT_EXL3;
        X3_TRY(rc, out, check_weight(w, a->weights, err));
        experts[e] = (x3_cuda_expert){.d_w = w->data, .K = exl3 ? (size_t)w->K : 0, .d_suh = exl3 ? w->suh : NULL,
                                      .d_svh = exl3 ? w->svh : NULL, .d_bias = w->bias};
        *aligned = *aligned && (uintptr_t)w->data % 16 == 0;
        counts[kind_of(w) + 1]++;
        if (exl3 && w->K > most_K[kind_of(w)])
            most_K[kind_of(w)] = w->K;
    }
    for (size_t k = 0; k < KINDS; k++) {
        next[k] = counts[k];
        counts[k + 1] += counts[k];
    }
    for (size_t e = 0; e < a->n_experts; e++)
        numbers[next[kind_of(&a->weights[e * a->stride])]++] = (int32_t)e;
out:
    return rc;
}

/* Recordings use tables: those made up to now cannot be repeated any more. */
static void drop_tables(x3_device_cuda *cuda)
{
    cuda->generation++;
    for (size_t i = 0; i < cuda->n_experts; i++) {
        x3_device_free(&cuda->base, cuda->experts[i].d);
        free(cuda->experts[i].host);
    }
    cuda->n_experts = 0;
}

void x3_cuda_experts_free(x3_device_cuda *cuda)
{
    for (size_t i = 0; i < cuda->n_experts; i++)
        free(cuda->experts[i].host);
    free(cuda->experts);
}

/* The table on the device: one that is there already, or a new one. Takes `host`. */
static x3_status place_table(x3_device_cuda *cuda, void *host, size_t n_bytes, void **d, x3_err *err)
{
    struct x3_cuda_experts t = {.hash = x3_hash(host, n_bytes), .n_bytes = n_bytes, .host = host};
    x3_status rc = X3_OK;

    for (size_t i = 0; i < cuda->n_experts; i++) {
        const struct x3_cuda_experts *known = &cuda->experts[i];
        if (known->hash == t.hash && known->n_bytes == n_bytes && memcmp(known->host, host, n_bytes) == 0) {
            *d = known->d;
            goto out;
        }
    }
    if (cuda->recording) {
        rc = x3_fail(err, X3_ERR_DEVICE, "CUDA: experts that were not described are being recorded");
        goto out;
    }
    if (cuda->experts == NULL)
        X3_TRY(rc, out, x3_alloc(&cuda->experts, TABLES, sizeof *cuda->experts, err));
    if (cuda->n_experts == TABLES)
        drop_tables(cuda);
    X3_TRY(rc, out, x3_device_alloc(&cuda->base, &t.d, n_bytes, err));
    cuda->experts[cuda->n_experts++] = t;
    t.host = NULL;
    *d = t.d;
    rc = x3_cuda_result(cudaMemcpyAsync(t.d, host, n_bytes, cudaMemcpyHostToDevice, cuda->stream), "describing experts", err);
out:
    free(t.host);
    return rc;
}

/* ---- the linear ---------------------------------------------------------------------------------------------------------- */

struct experts {
    const x3_expert_args *a;
    x3_cuda_slots slots;
    const x3_cuda_expert *d_experts;
    const int32_t *d_numbers;
    size_t counts[KINDS + 1];
    int most_K[KINDS];
    bool aligned;
};

static x3_status dense_kinds(x3_device_cuda *cuda, const struct experts *t, x3_err *err)
{
    const x3_weight *w = t->a->weights;
    x3_status rc = X3_OK;

    for (size_t k = 0; k < DENSE_KINDS && rc == X3_OK; k++)
        rc = x3_cuda_expert_dense(&t->slots, t->d_experts, t->d_numbers + t->counts[k], t->counts[k + 1] - t->counts[k],
                                  (x3_cuda_dense_type)k, w->n_out, w->n_in, t->aligned, cuda->stream, err);
    return rc;
}

/* Some slots at a time: their rotated rows wait in scratch. */
static x3_status exl3_kinds(x3_device_cuda *cuda, const struct experts *t, x3_err *err)
{
    const x3_weight *w = t->a->weights;
    const size_t n_slots = t->slots.n_slots, in = x3_round_up(w->n_in, 128), bytes = x3_cuda_rotated_bytes(in);
    const size_t at_once = x3_max_size(1, x3_min_size(n_slots, X3_CUDA_PART_BYTES / (bytes + sizeof(float))));
    x3_cuda_rotated rows = {0};
    size_t at = 0;
    x3_status rc = X3_OK;

    if (t->counts[KINDS] == t->counts[DENSE_KINDS])
        return X3_OK;
    X3_TRY(rc, out, x3_cuda_reserve(cuda, &cuda->scratch, at_once * (bytes + sizeof(float)) + 512, err));
    rows.d_parts = x3_cuda_carve(&cuda->scratch, &at, at_once * bytes);
    rows.d_unit = x3_cuda_carve(&cuda->scratch, &at, at_once * sizeof(float));
    for (; rows.first_slot < n_slots; rows.first_slot += at_once) {
        rows.n_slots = x3_min_size(at_once, n_slots - rows.first_slot);
        X3_TRY(rc, out, x3_cuda_expert_rotate(&t->slots, t->d_experts, w->n_in, in, &rows, cuda->stream, err));
        for (size_t k = DENSE_KINDS; k < KINDS; k++) {
            const x3_cuda_shape shape = {.K = t->most_K[k], .codebook = (x3_codebook)(k - DENSE_KINDS),
                                         .n_in_padded = in, .n_out = w->n_out, .n_out_padded = x3_round_up(w->n_out, 128)};
            if (t->counts[k + 1] > t->counts[k])
                X3_TRY(rc, out, x3_cuda_expert_exl3(&cuda->info, &t->slots, t->d_experts, t->d_numbers + t->counts[k],
                                                    t->counts[k + 1] - t->counts[k], &shape, &rows, cuda->stream, err));
        }
    }
out:
    return rc;
}

x3_status x3_cuda_op_expert_linear(x3_device *dev, const x3_expert_args *args, x3_err *err)
{
    x3_device_cuda *cuda = x3_cuda(dev);
    const size_t n_bytes = args->n_experts * (sizeof(x3_cuda_expert) + sizeof(int32_t));
    struct experts t = {.a = args};
    void *host = NULL, *d = NULL;
    x3_status rc;

    if (args->n_experts == 0 || args->n_slots == 0)
        return X3_OK;
    X3_TRY(rc, out, x3_alloc(&host, n_bytes, 1, err));
    rc = fill_table(args, host, t.counts, t.most_K, &t.aligned, err);
    if (rc != X3_OK) {
        free(host);
        goto out;
    }
    X3_TRY(rc, out, place_table(cuda, host, n_bytes, &d, err));
    t.d_experts = d;
    t.d_numbers = (const int32_t *)(const void *)(t.d_experts + args->n_experts);
    t.slots = (x3_cuda_slots){.d_first = args->d_first, .d_rows = args->d_rows, .n_experts = args->n_experts,
                              .n_slots = args->n_slots, .d_x = args->d_x, .ldx = args->ldx, .d_y = args->d_y, .ldy = args->ldy,
                              .reverse = dev->reverse_sums};
    X3_TRY(rc, out, dense_kinds(cuda, &t, err));
    rc = exl3_kinds(cuda, &t, err);
out:
    return rc;
}
