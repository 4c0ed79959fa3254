#include "formats/exl3.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define PAD 128

static const char *const codebook_names[] = {"3inst", "mcg", "mul1"};

const char *x3_codebook_name(x3_codebook codebook)
{
    return codebook_names[codebook];
}

bool x3_codebook_parse(const char *name, x3_codebook *out)
{
    for (int i = 0; i < 3; i++)
        if (strcmp(name, codebook_names[i]) == 0) {
            *out = (x3_codebook)i;
            return true;
        }
    return false;
}

static x3_status part(const x3_safetensors *st, const char *name, const char *suffix, const x3_tensor **out, x3_err *err)
{
    char *full = NULL;
    x3_status rc = x3_asprintf(&full, err, "%s.%s", name, suffix);

    if (rc == X3_OK)
        *out = x3_safetensors_find(st, full);
    free(full);
    return rc;
}

static bool has_shape(const x3_tensor *t, x3_dtype dtype, int rank, uint64_t n)
{
    return t->dtype == dtype && t->rank == rank && (rank == 0 || t->shape[0] == n);
}

static void check_part(const x3_safetensors *st, const x3_group *g, const x3_tensor *t, x3_dtype dtype, int rank,
                       uint64_t n, x3_findings *f)
{
    char shape[128];

    if (t == NULL)
        return;
    if (!has_shape(t, dtype, rank, n))
        x3_findings_add(f, "%s: %s: %s %s, expected %s%s%llu%s", st->shards[t->shard].file, t->name,
                        x3_dtype_name(t->dtype), x3_tensor_shape_text(t, shape), x3_dtype_name(dtype),
                        rank == 0 ? " [] of " : " [", (unsigned long long)n, rank == 0 ? " value" : "]");
    if (t->shard != g->trellis->shard)
        x3_findings_add(f, "%s: in shard %s, but its trellis is in %s: a group must not be split", t->name,
                        st->shards[t->shard].file, st->shards[g->trellis->shard].file);
}

static void check_trellis(const x3_safetensors *st, x3_group *g, x3_findings *f)
{
    const x3_tensor *t = g->trellis;
    const char *file = st->shards[t->shard].file;
    char shape[128];

    if (t->dtype != X3_I16 || t->rank != 3) {
        x3_findings_add(f, "%s: %s: %s %s, expected I16 of rank 3", file, t->name, x3_dtype_name(t->dtype),
                        x3_tensor_shape_text(t, shape));
        return;
    }
    g->n_in = (size_t)t->shape[0] * 16;
    g->n_out = (size_t)t->shape[1] * 16;
    if (t->shape[2] % 16 == 8)
        x3_findings_add(f, "%s: %s: K = %g: half-integer widths (exllamav3 1.5) are not supported", file, t->name,
                        (double)t->shape[2] / 16);
    else if (t->shape[2] % 16 != 0 || t->shape[2] < 16 || t->shape[2] > 128)
        x3_findings_add(f, "%s: %s: last dimension %llu is not 16 K with K from 1 to 8", file, t->name,
                        (unsigned long long)t->shape[2]);
    else
        g->K = (int)t->shape[2] / 16;
    if (t->shape[0] % (PAD / 16) != 0 || t->shape[1] % (PAD / 16) != 0 || t->shape[0] == 0 || t->shape[1] == 0)
        x3_findings_add(f, "%s: %s: %zu x %zu is not padded to multiples of %d", file, t->name, g->n_in, g->n_out, PAD);
}

static x3_status check_marker(const x3_safetensors *st, x3_group *g, const x3_tensor *mcg, const x3_tensor *mul1,
                              const char *name, x3_findings *f, x3_err *err)
{
    const uint32_t wanted = mcg != NULL ? X3_MCG_MULTIPLIER : X3_MUL1_MULTIPLIER;
    int32_t value = 0;
    x3_status rc;

    if (mcg != NULL && mul1 != NULL)
        x3_findings_add(f, "%s: has both markers, .mcg and .mul1", name);
    g->marker = mcg != NULL ? mcg : mul1;
    g->codebook = mcg != NULL ? X3_CB_MCG : mul1 != NULL ? X3_CB_MUL1 : X3_CB_3INST;
    if (g->marker == NULL)
        return X3_OK;
    if (g->marker->dtype != X3_I32 || g->marker->n_elements != 1) {
        x3_findings_add(f, "%s: %s with %llu elements, expected one I32", g->marker->name,
                        x3_dtype_name(g->marker->dtype), (unsigned long long)g->marker->n_elements);
        return X3_OK;
    }
    rc = x3_safetensors_read(st, g->marker, 0, sizeof value, &value, err);
    if (rc == X3_OK && (uint32_t)value != wanted)
        x3_findings_add(f, "%s: multiplier 0x%08X, expected 0x%08X", g->marker->name, (unsigned)value,
                        (unsigned)wanted);
    return rc;
}

x3_status x3_group_find(const x3_safetensors *st, const char *name, x3_group *g, bool *found, x3_findings *f, x3_err *err)
{
    const x3_tensor *mcg = NULL, *mul1 = NULL;
    x3_status rc;

    *g = (x3_group){0};
    X3_TRY(rc, out, part(st, name, "trellis", &g->trellis, err));
    X3_TRY(rc, out, part(st, name, "suh", &g->suh, err));
    X3_TRY(rc, out, part(st, name, "svh", &g->svh, err));
    X3_TRY(rc, out, part(st, name, "su", &g->su, err));
    X3_TRY(rc, out, part(st, name, "sv", &g->sv, err));
    X3_TRY(rc, out, part(st, name, "bias", &g->bias, err));
    X3_TRY(rc, out, part(st, name, "mcg", &mcg, err));
    X3_TRY(rc, out, part(st, name, "mul1", &mul1, err));
    *found = g->trellis != NULL;
    if (!*found) {
        if (g->suh != NULL || g->svh != NULL || mcg != NULL || mul1 != NULL)
            x3_findings_add(f, "%s: has parts of a group, but no %s.trellis", name, name);
        goto out;
    }
    check_trellis(st, g, f);
    if (g->suh == NULL && g->su == NULL)
        x3_findings_add(f, "%s: has neither %s.suh nor %s.su", name, name, name);
    if (g->svh == NULL && g->sv == NULL)
        x3_findings_add(f, "%s: has neither %s.svh nor %s.sv", name, name, name);
    check_part(st, g, g->suh, X3_F16, 1, g->n_in, f);
    check_part(st, g, g->svh, X3_F16, 1, g->n_out, f);
    check_part(st, g, g->su, X3_I16, 1, g->n_in / 16, f);
    check_part(st, g, g->sv, X3_I16, 1, g->n_out / 16, f);
    X3_TRY(rc, out, check_marker(st, g, mcg, mul1, name, f, err));
    if (g->marker != NULL && g->marker->shard != g->trellis->shard)
        x3_findings_add(f, "%s: in another shard than its trellis: a group must not be split", g->marker->name);
out:
    return rc;
}

x3_status x3_group_scales(const x3_safetensors *st, const x3_group *g, bool input, uint16_t **out, x3_err *err)
{
    const x3_tensor *full = input ? g->suh : g->svh, *signs = input ? g->su : g->sv;
    uint16_t *bits = NULL;
    x3_status rc;

    *out = NULL;
    if (full != NULL)
        return x3_safetensors_load(st, full, (void **)out, err);
    X3_TRY(rc, out, x3_safetensors_load(st, signs, (void **)&bits, err));
    X3_TRY(rc, out, x3_alloc(out, signs->n_elements * 16, sizeof **out, err));
    for (size_t i = 0; i < signs->n_elements * 16; i++)
        (*out)[i] = (bits[i / 16] >> (i % 16)) & 1 ? 0xBC00 : 0x3C00; /* -1 or 1 */
out:
    free(bits);
    return rc;
}
