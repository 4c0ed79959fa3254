/* Cache pages of a layer, and batches of whole sequences. */
#include <stdlib.h>

#include "kernels/kernels.h"
#include "runtime/forward.h"

x3_status x3_kv_layer_create(x3_kv_layer *kv, x3_device *dev, const x3_layer_desc *layer, size_t n_pages, x3_err *err)
{
    const size_t positions = n_pages * X3_KV_PAGE * layer->gqa.n_kv_heads;
    x3_status rc;

    *kv = (x3_kv_layer){.n_kv_heads = layer->gqa.n_kv_heads, .k_dim = layer->gqa.head_dim, .v_dim = layer->gqa.head_dim};
    X3_TRY(rc, out, x3_device_floats(dev, &kv->d_keys, positions * kv->k_dim, err));
    /* kernels read whole panels of 16 columns: the last row may be read past its end */
    X3_TRY(rc, out, x3_device_floats(dev, &kv->d_values, positions * kv->v_dim + X3_PANEL, err));
out:
    if (rc != X3_OK)
        x3_kv_layer_free(kv, dev);
    return rc;
}

void x3_kv_layer_free(x3_kv_layer *kv, x3_device *dev)
{
    x3_device_free(dev, kv->d_keys);
    x3_device_free(dev, kv->d_values);
    *kv = (x3_kv_layer){0};
}

x3_status x3_full_batch_create(x3_full_batch *b, x3_device *dev, size_t n_sequences, size_t n_positions, x3_err *err)
{
    const size_t per_sequence = (n_positions + X3_KV_PAGE - 1) / X3_KV_PAGE;
    int32_t *positions = NULL;
    void *d_positions = NULL;
    x3_status rc;

    *b = (x3_full_batch){.dev = dev, .n_pages = per_sequence * n_sequences};
    X3_TRY(rc, out, x3_alloc(&b->sequences, n_sequences, sizeof *b->sequences, err));
    X3_TRY(rc, out, x3_alloc(&b->pages, b->n_pages, sizeof *b->pages, err));
    X3_TRY(rc, out, x3_alloc(&positions, n_sequences * n_positions, sizeof *positions, err));
    for (size_t i = 0; i < b->n_pages; i++)
        b->pages[i] = (int32_t)i;
    for (size_t i = 0; i < n_sequences; i++) {
        b->sequences[i] = (x3_sequence){.first_row = i * n_positions, .n_rows = n_positions,
                                        .pages = b->pages + i * per_sequence};
        for (size_t p = 0; p < n_positions; p++)
            positions[i * n_positions + p] = (int32_t)p;
    }
    X3_TRY(rc, out, x3_device_alloc(dev, &d_positions, n_sequences * n_positions * sizeof *positions, err));
    b->batch = (x3_batch){.n_rows = n_sequences * n_positions, .n_sequences = n_sequences, .sequences = b->sequences,
                          .d_positions = d_positions};
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
    free(b->sequences);
    free(b->pages);
    *b = (x3_full_batch){0};
}

void x3_full_batch_limit(x3_full_batch *b, size_t n_sequences)
{
    b->batch.n_sequences = n_sequences;
    b->batch.n_rows = n_sequences == 0 ? 0 : n_sequences * b->sequences[0].n_rows;
}
