#include "runtime/resident.h"

#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"

/* ---- memory ---- */

x3_status x3_resident_memory_of(x3_resident_memory *m, const x3_checkpoint *c, const x3_resident_options *o, x3_err *err)
{
    const x3_model *model = c->model;
    uint64_t weights = 0, cache = 0;
    bool overflow = false;

    *m = (x3_resident_memory){0};
    for (size_t i = 0; i < c->st->n_tensors; i++) {
        const x3_tensor *t = &c->st->tensors[i];
        if (c->roles[i] == X3_ROLE_DROPPED || (strcmp(t->name, model->embed_name) == 0 && !model->tied))
            continue; /* rows of the embedding are read from the file as they are needed */
        overflow |= x3_add_overflows(weights, t->dtype == X3_F8_E4M3 ? 4 * t->n_bytes : t->n_bytes, &weights);
    }
    for (size_t i = 0; i < model->n_layers; i++)
        overflow |= x3_add_overflows(cache, x3_kv_layer_bytes(&model->layers[i], o->n_pages, o->n_slots, o->kv_type), &cache);
    if (overflow)
        return x3_fail(err, X3_ERR_INPUT, "a cache of %zu pages has more bytes than can be counted", o->n_pages);
    m->weights = weights;
    m->cache = cache;
    m->scratch = x3_forward_bytes(model, o->max_rows, o->max_positions) +
                 ((o->max_rows + o->max_outputs) * model->hidden + o->max_outputs * model->vocab) * sizeof(float) +
                 o->max_rows * x3_model_selected(model, o->max_positions) * sizeof(int32_t);
    return X3_OK;
}

/* ---- life ---- */

static x3_status load_model(x3_resident *r, x3_err *err)
{
    const x3_model *m = r->c->model;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&r->layers, m->n_layers, sizeof *r->layers, err));
    X3_TRY(rc, out, x3_alloc(&r->kv, m->n_layers, sizeof *r->kv, err));
    for (size_t i = 0; i < m->n_layers; i++) {
        X3_TRY(rc, out, x3_layer_weights_load(&r->layers[i], r->dev, r->c, &m->layers[i], err));
        X3_TRY(rc, out, x3_kv_layer_create(&r->kv[i], r->dev, &m->layers[i], r->o.n_pages, r->o.n_slots, r->o.kv_type, err));
    }
    X3_TRY(rc, out, x3_vector_load(&r->d_norm, r->dev, r->c, &m->final_norm, err));
    rc = x3_linear_load(&r->head, r->dev, r->c, &m->head, err);
out:
    return rc;
}

x3_status x3_resident_create(x3_resident **out, x3_device *dev, const x3_checkpoint *c, const x3_resident_options *o,
                             x3_err *err)
{
    const x3_model *m = c->model;
    x3_resident *r = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&r, 1, sizeof *r, err));
    r->dev = dev;
    dev->row_invariant = true; /* a sequence gets the same logits whatever others are served with it */
    r->c = c;
    r->o = *o;
    X3_TRY(rc, out, load_model(r, err));
    X3_TRY(rc, out, x3_forward_create(&r->f, dev, m, o->max_rows, o->max_positions, err));
    X3_TRY(rc, out, x3_device_floats(dev, &r->d_x, o->max_rows * m->hidden, err));
    X3_TRY(rc, out, x3_device_floats(dev, &r->d_last, o->max_outputs * m->hidden, err));
    X3_TRY(rc, out, x3_device_floats(dev, &r->d_logits, o->max_outputs * m->vocab, err));
    X3_TRY(rc, out, x3_device_alloc(dev, &r->d_positions, o->max_rows * sizeof *r->d_positions, err));
    if (x3_model_selected(m, o->max_positions) != 0)
        X3_TRY(rc, out, x3_device_alloc(dev, &r->d_selected,
                                        o->max_rows * x3_model_selected(m, o->max_positions) * sizeof *r->d_selected, err));
    X3_TRY(rc, out, x3_alloc(&r->x, o->max_rows * m->hidden, sizeof *r->x, err));
    X3_TRY(rc, out, x3_alloc(&r->positions, o->max_rows, sizeof *r->positions, err));
    *out = r;
    r = NULL;
out:
    x3_resident_free(r);
    return rc;
}

void x3_resident_free(x3_resident *r)
{
    if (r == NULL)
        return;
    for (size_t i = 0; i < r->c->model->n_layers; i++) {
        if (r->layers != NULL)
            x3_layer_weights_free(&r->layers[i]);
        if (r->kv != NULL)
            x3_kv_layer_free(&r->kv[i], r->dev);
    }
    free(r->layers);
    free(r->kv);
    x3_forward_free(r->f);
    x3_linear_free(&r->head, r->dev);
    x3_device_free(r->dev, r->d_norm);
    x3_device_free(r->dev, r->d_x);
    x3_device_free(r->dev, r->d_last);
    x3_device_free(r->dev, r->d_logits);
    x3_device_free(r->dev, r->d_positions);
    x3_device_free(r->dev, r->d_selected);
    free(r->x);
    free(r->positions);
    free(r);
}

/* ---- a step ---- */

static x3_status check_step(const x3_resident *r, const x3_sequence *sequences, size_t n_sequences, size_t n_rows,
                            size_t n_outputs, x3_err *err)
{
    size_t n = 0;

    for (size_t i = 0; i < n_sequences; i++) {
        const x3_sequence *s = &sequences[i];
        if (s->first_row != n || s->n_rows == 0 || s->position + s->n_rows > r->o.max_positions)
            return x3_fail(err, X3_ERR_INPUT, "sequence %zu of a step: rows %zu + %zu at position %zu of at most %zu", i,
                           s->first_row, s->n_rows, s->position, r->o.max_positions);
        n += s->n_rows;
    }
    if (n != n_rows || n_rows > r->o.max_rows || n_outputs > r->o.max_outputs)
        return x3_fail(err, X3_ERR_INPUT, "a step of %zu rows (%zu in sequences), %zu outputs; room for %zu and %zu", n_rows, n,
                       n_outputs, r->o.max_rows, r->o.max_outputs);
    return X3_OK;
}

static x3_status run_head(x3_resident *r, const size_t *outputs, size_t n, float *logits, x3_err *err)
{
    const x3_device_ops *ops = r->dev->ops;
    const x3_model *m = r->c->model;
    const size_t hidden = m->hidden;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < n; i++)
        X3_TRY(rc, out, ops->copy(r->dev, r->d_last + i * hidden, r->d_x + outputs[i] * hidden, hidden * sizeof(float), err));
    X3_TRY(rc, out, ops->rms_norm(r->dev, r->d_last, hidden, n, hidden, r->d_norm, m->norm_eps, r->d_last, hidden, err));
    X3_TRY(rc, out, ops->linear(r->dev, &r->head, r->d_last, hidden, n, r->d_logits, m->vocab, err));
    rc = ops->download(r->dev, logits, r->d_logits, n * m->vocab * sizeof *logits, err);
out:
    return rc;
}

x3_status x3_resident_step(x3_resident *r, const x3_sequence *sequences, size_t n_sequences, const int32_t *ids, size_t n_rows,
                           const size_t *outputs, size_t n_outputs, float *logits, x3_err *err)
{
    const x3_device_ops *ops = r->dev->ops;
    const x3_model *m = r->c->model;
    x3_batch batch = {.n_rows = n_rows, .n_sequences = n_sequences, .sequences = sequences, .d_positions = r->d_positions,
                      .d_selected = r->d_selected};
    x3_status rc;

    X3_TRY(rc, out, check_step(r, sequences, n_sequences, n_rows, n_outputs, err));
    X3_TRY(rc, out, x3_embed(r->c, ids, n_rows, r->x, err));
    for (size_t i = 0; i < n_sequences; i++)
        for (size_t j = 0; j < sequences[i].n_rows; j++)
            r->positions[sequences[i].first_row + j] = (int32_t)(sequences[i].position + j);
    X3_TRY(rc, out, ops->upload(r->dev, r->d_x, r->x, n_rows * m->hidden * sizeof *r->x, err));
    X3_TRY(rc, out, ops->upload(r->dev, r->d_positions, r->positions, n_rows * sizeof *r->positions, err));
    for (size_t i = 0; i < m->n_layers; i++)
        X3_TRY(rc, out, x3_forward_layer(r->f, &r->layers[i], &batch, &r->kv[i], r->d_x, err));
    if (n_outputs > 0)
        rc = run_head(r, outputs, n_outputs, logits, err);
    else
        rc = ops->sync(r->dev, err);
out:
    return rc;
}
