/* Cache pages of a layer, and batches of whole sequences. */
#include <stdlib.h>

#include "kernels/kernels.h"
#include "runtime/forward.h"

/* Shape of a layer's cache: everything but the memory. */
static x3_kv_layer shape_of(const x3_layer_desc *l)
{
    switch (l->mixer) {
    case X3_MIXER_GQA:
        return (x3_kv_layer){.n_kv_heads = l->gqa.n_kv_heads, .k_dim = l->gqa.head_dim, .v_dim = l->gqa.v_dim};
    case X3_MIXER_MLA:
        return (x3_kv_layer){.n_kv_heads = 1, .k_dim = l->mla.kv_rank + l->mla.rope_dim, .v_dim = l->mla.kv_rank,
                             .index_dim = l->mla.index.n_heads == 0 ? 0 : l->mla.index.dim};
    case X3_MIXER_DELTA_NET:
        break;
    }
    const x3_delta_net_desc *d = &l->delta;
    return (x3_kv_layer){.state_floats = (d->kernel - 1) * (2 * d->n_k_heads * d->k_dim + d->n_v_heads * d->v_dim) +
                                         d->n_v_heads * d->k_dim * d->v_dim};
}

static bool has_values(const x3_layer_desc *l)
{
    return l->mixer == X3_MIXER_GQA;
}

x3_kv_type x3_kv_layer_type(const x3_layer_desc *layer, x3_kv_type wanted)
{
    const x3_kv_layer s = shape_of(layer);
    const bool fits = s.k_dim % X3_KV_GROUP == 0 && s.v_dim % X3_KV_GROUP == 0 && s.k_dim <= X3_KV_DIM && s.v_dim <= X3_KV_DIM;

    return has_values(layer) && fits ? wanted : X3_KV_F32;
}

size_t x3_kv_layer_bytes(const x3_layer_desc *layer, size_t n_pages, size_t n_slots, x3_kv_type wanted)
{
    const x3_kv_layer s = shape_of(layer);
    const x3_kv_type type = x3_kv_layer_type(layer, wanted);
    const size_t block = x3_kv_block_bytes(type, s.k_dim) + (has_values(layer) ? x3_kv_block_bytes(type, s.v_dim) : 0);

    return n_pages * s.n_kv_heads * block + (n_pages * X3_KV_PAGE * s.index_dim + n_slots * s.state_floats) * sizeof(float);
}

static x3_status create_packed(x3_kv_layer *kv, x3_device *dev, size_t n_pages, x3_err *err)
{
    const size_t n = n_pages * kv->n_kv_heads;
    x3_status rc = x3_device_alloc(dev, &kv->d_packed_keys, n * x3_kv_block_bytes(kv->type, kv->k_dim), err);

    return rc == X3_OK ? x3_device_alloc(dev, &kv->d_packed_values, n * x3_kv_block_bytes(kv->type, kv->v_dim), err) : rc;
}

x3_status x3_kv_layer_create(x3_kv_layer *kv, x3_device *dev, const x3_layer_desc *layer, size_t n_pages, size_t n_slots,
                             x3_kv_type wanted, x3_err *err)
{
    const size_t positions = n_pages * X3_KV_PAGE;
    x3_status rc = X3_OK;

    *kv = shape_of(layer);
    kv->type = x3_kv_layer_type(layer, wanted);
    if (kv->type != X3_KV_F32)
        X3_TRY(rc, out, create_packed(kv, dev, n_pages, err));
    else if (kv->n_kv_heads != 0)
        X3_TRY(rc, out, x3_device_floats(dev, &kv->d_keys, positions * kv->n_kv_heads * kv->k_dim, err));
    /* kernels read whole panels of 16 columns: the last row may be read past its end */
    if (has_values(layer) && kv->type == X3_KV_F32)
        X3_TRY(rc, out, x3_device_floats(dev, &kv->d_values, positions * kv->n_kv_heads * kv->v_dim + X3_PANEL, err));
    if (kv->index_dim != 0)
        X3_TRY(rc, out, x3_device_floats(dev, &kv->d_index_keys, positions * kv->index_dim, err));
    if (kv->state_floats != 0) {
        kv->n_slots = n_slots;
        X3_TRY(rc, out, x3_device_floats(dev, &kv->d_states, n_slots * kv->state_floats, err));
        X3_TRY(rc, out, x3_alloc(&kv->slot_positions, n_slots, sizeof *kv->slot_positions, err));
    }
out:
    if (rc != X3_OK)
        x3_kv_layer_free(kv, dev);
    return rc;
}

void x3_kv_layer_free(x3_kv_layer *kv, x3_device *dev)
{
    x3_device_free(dev, kv->d_keys);
    x3_device_free(dev, kv->d_values);
    x3_device_free(dev, kv->d_packed_keys);
    x3_device_free(dev, kv->d_packed_values);
    x3_device_free(dev, kv->d_index_keys);
    x3_device_free(dev, kv->d_states);
    free(kv->slot_positions);
    *kv = (x3_kv_layer){0};
}

x3_status x3_kv_slot_copy(x3_kv_layer *kv, x3_device *dev, size_t from, size_t to, x3_err *err)
{
    if (kv->d_states == NULL || from == to)
        return X3_OK;
    kv->slot_positions[to] = kv->slot_positions[from];
    return dev->ops->copy(dev, kv->d_states + to * kv->state_floats, kv->d_states + from * kv->state_floats,
                          kv->state_floats * sizeof(float), err);
}

bool x3_model_has_states(const x3_model *m)
{
    for (size_t i = 0; i < m->n_layers; i++)
        if (m->layers[i].mixer == X3_MIXER_DELTA_NET)
            return true;
    return false;
}

x3_status x3_full_batch_create(x3_full_batch *b, x3_device *dev, size_t n_sequences, size_t n_positions, size_t n_selected,
                               x3_err *err)
{
    const size_t per_sequence = (n_positions + X3_KV_PAGE - 1) / X3_KV_PAGE;
    int32_t *positions = NULL;
    void *d_positions = NULL, *d_selected = NULL;
    x3_status rc;

    *b = (x3_full_batch){.dev = dev, .n_pages = per_sequence * n_sequences, .n_slots = n_sequences};
    X3_TRY(rc, out, x3_alloc(&b->sequences, n_sequences, sizeof *b->sequences, err));
    X3_TRY(rc, out, x3_alloc(&b->pages, b->n_pages, sizeof *b->pages, err));
    X3_TRY(rc, out, x3_alloc(&positions, n_sequences * n_positions, sizeof *positions, err));
    for (size_t i = 0; i < b->n_pages; i++)
        b->pages[i] = (int32_t)i;
    for (size_t i = 0; i < n_sequences; i++) {
        b->sequences[i] = (x3_sequence){.first_row = i * n_positions, .n_rows = n_positions,
                                        .pages = b->pages + i * per_sequence, .slot = i};
        for (size_t p = 0; p < n_positions; p++)
            positions[i * n_positions + p] = (int32_t)p;
    }
    X3_TRY(rc, out, x3_device_alloc(dev, &d_positions, n_sequences * n_positions * sizeof *positions, err));
    b->batch = (x3_batch){.n_rows = n_sequences * n_positions, .n_sequences = n_sequences, .sequences = b->sequences,
                          .d_positions = d_positions};
    if (n_selected != 0)
        X3_TRY(rc, out, x3_device_alloc(dev, &d_selected, n_sequences * n_positions * n_selected * sizeof(int32_t), err));
    b->batch.d_selected = d_selected;
    X3_TRY(rc, out, dev->ops->upload(dev, d_positions, positions, n_sequences * n_positions * sizeof *positions, err));
    X3_TRY(rc, out, dev->ops->sync(dev, err));
out:
    free(positions);
    if (rc != X3_OK)
        x3_full_batch_free(b);
    return rc;
}

void x3_full_batch_free(x3_full_batch *b)
{
    if (b->dev == NULL)
        return;
    x3_device_free(b->dev, (void *)(uintptr_t)b->batch.d_positions);
    x3_device_free(b->dev, b->batch.d_selected);
    free(b->sequences);
    free(b->pages);
    *b = (x3_full_batch){0};
}

void x3_full_batch_limit(x3_full_batch *b, size_t n_sequences)
{
    b->batch.n_sequences = n_sequences;
    b->batch.n_rows = n_sequences == 0 ? 0 : n_sequences * b->sequences[0].n_rows;
}
