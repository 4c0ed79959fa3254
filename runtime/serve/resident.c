#include "runtime/serve/resident.h"

#include <stdlib.h>
#include <string.h>

#include "formats/safetensors.h"

/* ---- memory ---- */

/* The embedding as a linear. *name, which is its name, goes on the heap; NULL: the device does not look rows up. */
static x3_status embed_of(x3_linear_desc *desc, char **name, const x3_device *dev, const x3_model *m, x3_err *err)
{
    const size_t length = strlen(m->embed_name), end = length - strlen(".weight");
    x3_status rc;

    *name = NULL;
    if (dev->ops->embed == NULL || length < strlen(".weight") || strcmp(m->embed_name + end, ".weight") != 0)
        return X3_OK;
    rc = x3_strndup(name, m->embed_name, end, err);
    *desc = (x3_linear_desc){.name = *name, .n_in = m->hidden, .n_out = m->vocab};
    return rc;
}

/* Bytes of weights that are used where the files are mapped. kv_b of latent attention is made float32 when it is EXL3. */
static x3_status mapped_bytes(const x3_device *dev, const x3_checkpoint *c, x3_mapped_bytes *total, x3_err *err)
{
    const x3_model *m = c->model;
    const x3_linear_desc *l;
    x3_linear_desc embed;
    char *name;
    x3_status rc = embed_of(&embed, &name, dev, m, err);

    *total = (x3_mapped_bytes){0};
    if (name != NULL && !(m->tied && x3_checkpoint_weight(c, &m->head) != NULL)) /* else it is the head's */
        rc = x3_linear_mapped(dev, c, &embed, total, err);
    free(name);
    for (size_t i = 0, layer; (l = x3_model_linear(m, i, &layer)) != NULL && rc == X3_OK; i++) {
        const x3_layer_desc *of = layer < m->n_layers ? &m->layers[layer] : NULL;
        if (of != NULL && of->mixer == X3_MIXER_MLA && l == &of->linears[of->mla.kv_b] && x3_checkpoint_weight(c, l) == NULL)
            continue;
        rc = x3_linear_mapped(dev, c, l, total, err);
    }
    return rc;
}

x3_status x3_resident_memory_of(x3_resident_memory *m, const x3_device *dev, const x3_checkpoint *c, const x3_resident_options *o,
                                x3_err *err)
{
    const x3_model *model = c->model;
    x3_mapped_bytes mapped;
    uint64_t weights = 0, cache = 0;
    bool overflow = false;
    x3_status rc = mapped_bytes(dev, c, &mapped, err);

    *m = (x3_resident_memory){0};
    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < c->st->n_tensors; i++) {
        const x3_tensor *t = &c->st->tensors[i];
        if (c->roles[i] == X3_ROLE_DROPPED || (strcmp(t->name, model->embed_name) == 0 && !model->tied &&
                                                 dev->ops->embed == NULL))
            continue; /* rows of the embedding are read from the file as they are needed */
        overflow |= x3_add_overflows(weights, t->dtype == X3_F8_E4M3 ? 4 * t->n_bytes : t->n_bytes, &weights);
    }
    for (size_t i = 0; i < model->n_layers; i++)
        overflow |= x3_add_overflows(cache, x3_kv_layer_bytes(&model->layers[i], o->n_pages, o->n_slots, o->kv_type), &cache);
    if (overflow)
        return x3_fail(err, X3_ERR_INPUT, "a cache of %zu pages has more bytes than can be counted", o->n_pages);
    for (size_t i = 0, layer; dev->ops->step_bytes != NULL && x3_model_linear(model, i, &layer) != NULL; i++) {
        const x3_linear_desc *l = x3_model_linear(model, i, &layer);
        m->scratch = x3_max_size(m->scratch, dev->ops->step_bytes(dev, l->n_in, l->n_out, o->max_rows));
    }
    m->weights = weights;
    m->mapped = mapped.in_place;
    m->misaligned = mapped.misaligned;
    m->cache = cache;
    m->scratch += x3_forward_bytes(model, o->max_rows, o->max_positions) +
                 ((o->max_rows + o->max_outputs) * model->hidden + o->max_outputs * model->vocab) * sizeof(float) +
                 o->max_rows * x3_model_selected(model, o->max_positions) * sizeof(int32_t);
    return X3_OK;
}

/* ---- life ---- */

static x3_status load_embed(x3_resident *r, x3_err *err)
{
    x3_linear_desc desc;
    char *name;
    x3_status rc = embed_of(&desc, &name, r->dev, r->c->model, err);

    if (name != NULL && r->c->model->tied && r->head.kind != X3_WEIGHT_EXL3)
        r->embed = r->head;
    else if (name != NULL)
        rc = x3_linear_load(&r->embed, r->dev, r->c, &desc, err);
    free(name);
    return rc;
}

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
    X3_TRY(rc, out, x3_linear_load(&r->head, r->dev, r->c, &m->head, err));
    rc = load_embed(r, err);
out:
    return rc;
}

/* Rows of a step that can be recorded, at most. Latent attention of more takes its batch in parts, which the device would have
 * to be told of one by one. */
static size_t recorded_rows(const x3_device *dev, const x3_model *m)
{
    if (dev->ops->record_begin == NULL)
        return 0;
    for (size_t i = 0; i < m->n_layers; i++)
        if (m->layers[i].mixer == X3_MIXER_MLA)
            return X3_MLA_ROWS;
    return SIZE_MAX;
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
    X3_TRY(rc, out, x3_device_alloc(dev, &r->d_best, o->max_outputs * sizeof *r->d_best, err));
    X3_TRY(rc, out, x3_device_alloc(dev, &r->d_positions, 2 * o->max_rows * sizeof *r->d_positions, err));
    r->recorded_rows = r->embed.kind != X3_WEIGHT_NONE ? recorded_rows(dev, m) : 0;
    if (x3_model_selected(m, o->max_positions) != 0)
        X3_TRY(rc, out, x3_device_alloc(dev, &r->d_selected,
                                        o->max_rows * x3_model_selected(m, o->max_positions) * sizeof *r->d_selected, err));
    if (r->embed.kind == X3_WEIGHT_NONE)
        X3_TRY(rc, out, x3_device_host_alloc(dev, &r->x, o->max_rows * m->hidden * sizeof *r->x, err));
    X3_TRY(rc, out, x3_device_host_alloc(dev, &r->numbers, 2 * o->max_rows * sizeof *r->numbers, err));
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
    for (size_t i = 0; i < r->n_recorded; i++)
        r->dev->ops->record_free(r->dev, r->recorded[i].recording);
    free(r->layers);
    free(r->kv);
    x3_forward_free(r->f);
    if (r->embed.data != r->head.data)
        x3_linear_free(&r->embed, r->dev);
    x3_linear_free(&r->head, r->dev);
    x3_device_free(r->dev, r->d_norm);
    x3_device_free(r->dev, r->d_x);
    x3_device_free(r->dev, r->d_last);
    x3_device_free(r->dev, r->d_best);
    x3_device_free(r->dev, r->d_logits);
    x3_device_free(r->dev, r->d_positions);
    x3_device_free(r->dev, r->d_selected);
    x3_device_host_free(r->dev, r->x);
    x3_device_host_free(r->dev, r->numbers);
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

static x3_status check_ids(const x3_resident *r, const int32_t *ids, size_t n, x3_err *err)
{
    for (size_t i = 0; i < n; i++)
        if (ids[i] < 0 || (size_t)ids[i] >= r->c->model->vocab)
            return x3_fail(err, X3_ERR_INPUT, "%s: token id %d is outside the embedding of %zu rows", r->c->dir, (int)ids[i],
                           r->c->model->vocab);
    return X3_OK;
}

/* Positions and embedded rows, or ids to look up, to the device. */
static x3_status place_rows(x3_resident *r, const x3_batch *batch, const int32_t *ids, x3_err *err)
{
    const x3_device_ops *ops = r->dev->ops;
    const size_t n = batch->n_rows;
    x3_status rc;

    for (size_t i = 0; i < batch->n_sequences; i++)
        for (size_t j = 0; j < batch->sequences[i].n_rows; j++)
            r->numbers[batch->sequences[i].first_row + j] = (int32_t)(batch->sequences[i].position + j);
    X3_TRY(rc, out, check_ids(r, ids, n, err));
    memcpy(r->numbers + n, ids, n * sizeof *ids);
    X3_TRY(rc, out, ops->upload(r->dev, r->d_positions, r->numbers, 2 * n * sizeof *r->numbers, err));
    if (r->embed.kind == X3_WEIGHT_NONE) {
        X3_TRY(rc, out, x3_embed(r->c, ids, n, r->x, err));
        rc = ops->upload(r->dev, r->d_x, r->x, n * r->c->model->hidden * sizeof *r->x, err);
    }
out:
    return rc;
}

static x3_status run_head(x3_resident *r, const size_t *outputs, size_t n, x3_err *err)
{
    const x3_device_ops *ops = r->dev->ops;
    const x3_model *m = r->c->model;
    const size_t hidden = m->hidden;
    const float *d_from = r->d_last;
    bool together = true;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < n; i++)
        together &= outputs[i] == outputs[0] + i;
    if (together)
        d_from = r->d_x + outputs[0] * hidden;
    for (size_t i = 0; i < n && !together; i++)
        X3_TRY(rc, out, ops->copy(r->dev, r->d_last + i * hidden, r->d_x + outputs[i] * hidden, hidden * sizeof(float), err));
    X3_TRY(rc, out, ops->rms_norm(r->dev, d_from, hidden, n, hidden, r->d_norm, m->norm_eps, r->d_last, hidden, err));
    rc = ops->linear(r->dev, &r->head, r->d_last, hidden, n, r->d_logits, m->vocab, err);
out:
    return rc;
}

/* All that happens on the device. */
static x3_status run_device(x3_resident *r, const x3_batch *batch, const size_t *outputs, size_t n_outputs, x3_err *err)
{
    const x3_model *m = r->c->model;
    x3_status rc = X3_OK;

    if (r->embed.kind != X3_WEIGHT_NONE)
        X3_TRY(rc, out, r->dev->ops->embed(r->dev, &r->embed, r->d_positions + batch->n_rows, batch->n_rows, r->d_x, err));
    for (size_t i = 0; i < m->n_layers; i++)
        X3_TRY(rc, out, x3_forward_layer(r->f, &r->layers[i], batch, &r->kv[i], r->d_x, err));
    if (n_outputs > 0)
        rc = run_head(r, outputs, n_outputs, err);
out:
    return rc;
}

/* The entry of a shape, made if need be: the oldest one goes when there are too many. One of another generation begins anew. */
static x3_recorded *recorded_of(x3_resident *r, uint64_t shape, bool *is_new)
{
    const x3_device_ops *ops = r->dev->ops;
    const uint64_t generation = ops->generation(r->dev);
    x3_recorded *e = r->recorded;

    while (e < r->recorded + r->n_recorded && e->shape != shape)
        e++;
    *is_new = e == r->recorded + r->n_recorded || e->generation != generation;
    if (!*is_new)
        return e;
    if (e == r->recorded + r->n_recorded && r->n_recorded == X3_RECORDINGS) {
        ops->record_free(r->dev, r->recorded[0].recording);
        memmove(r->recorded, r->recorded + 1, (X3_RECORDINGS - 1) * sizeof *r->recorded);
        e--;
    } else if (e == r->recorded + r->n_recorded) {
        r->n_recorded++;
    } else {
        ops->record_free(r->dev, e->recording);
    }
    *e = (x3_recorded){.shape = shape, .generation = generation};
    return e;
}

/* A recording holds what happens on the device; delta nets keep on the host, too, where their states stand. */
static x3_status repeat(x3_resident *r, const x3_recording *recording, const x3_batch *batch, x3_err *err)
{
    const x3_model *m = r->c->model;
    x3_status rc = X3_OK;

    for (size_t i = 0; i < m->n_layers; i++)
        if (m->layers[i].mixer == X3_MIXER_DELTA_NET)
            X3_TRY(rc, out, x3_delta_net_check(&m->layers[i], &r->kv[i], batch, err));
    X3_TRY(rc, out, r->dev->ops->repeat(r->dev, recording, err));
    for (size_t i = 0; i < m->n_layers; i++)
        if (m->layers[i].mixer == X3_MIXER_DELTA_NET)
            x3_delta_net_passed(&r->kv[i], batch);
out:
    return rc;
}

/* The first time done as it is, and again while what recordings use still moves (scratch grows), then recorded, then
 * repeated. */
static x3_status run_recorded(x3_resident *r, const x3_batch *batch, uint64_t shape, const size_t *outputs, x3_err *err)
{
    const x3_device_ops *ops = r->dev->ops;
    x3_err recording_err = {0};
    bool is_new;
    x3_recorded *e = recorded_of(r, shape, &is_new);
    x3_status rc;

    if (is_new)
        return run_device(r, batch, outputs, batch->n_rows, err);
    if (e->recording == NULL) {
        X3_TRY(rc, out, ops->record_begin(r->dev, err));
        const x3_status run = run_device(r, batch, outputs, batch->n_rows, err);
        rc = ops->record_end(r->dev, &e->recording, run == X3_OK ? err : &recording_err);
        if (run != X3_OK)
            rc = run;
        if (rc != X3_OK)
            goto out;
        return ops->repeat(r->dev, e->recording, err); /* what the host keeps has been seen to above */
    }
    rc = repeat(r, e->recording, batch, err);
out:
    return rc;
}

/* The device's shape, and beside it in how many layers an indexer chooses among positions: those run other operations. */
static x3_status describe(const x3_resident *r, const x3_batch *batch, uint64_t *shape, x3_err *err)
{
    const x3_model *m = r->c->model;
    size_t longest = 0;
    uint64_t n_chosen = 0;
    x3_status rc = r->dev->ops->describe(r->dev, batch, shape, err);

    for (size_t i = 0; i < batch->n_sequences; i++)
        longest = x3_max_size(longest, batch->sequences[i].position + batch->sequences[i].n_rows);
    for (size_t i = 0; i < m->n_layers; i++)
        n_chosen += m->layers[i].mixer == X3_MIXER_MLA && m->layers[i].mla.index.topk != 0 && longest > m->layers[i].mla.index.topk;
    if (*shape != 0)
        *shape |= n_chosen << 52;
    return rc;
}

static bool outputs_are_rows(const size_t *outputs, size_t n_outputs, size_t n_rows)
{
    for (size_t i = 0; i < n_outputs; i++)
        if (outputs[i] != i)
            return false;
    return n_outputs == n_rows;
}

/* After the work of a step: what was read up to now was whole. */
static x3_status finished(x3_resident *r, x3_status rc, x3_err *err)
{
    return rc == X3_OK ? x3_safetensors_unchanged(r->c->st, err) : rc;
}

x3_status x3_resident_logits(x3_resident *r, size_t n_outputs, float *logits, x3_err *err)
{
    return finished(r, r->dev->ops->download(r->dev, logits, r->d_logits, n_outputs * r->c->model->vocab * sizeof *logits, err), err);
}

x3_status x3_resident_best(x3_resident *r, size_t n_outputs, int32_t *ids, x3_err *err)
{
    const x3_device_ops *ops = r->dev->ops;
    x3_status rc = ops->argmax(r->dev, r->d_logits, n_outputs, r->c->model->vocab, r->d_best, err);

    return finished(r, rc == X3_OK ? ops->download(r->dev, ids, r->d_best, n_outputs * sizeof *ids, err) : rc, err);
}

x3_status x3_resident_step(x3_resident *r, const x3_sequence *sequences, size_t n_sequences, const int32_t *ids, size_t n_rows,
                           const size_t *outputs, size_t n_outputs, float *logits, x3_err *err)
{
    const x3_device_ops *ops = r->dev->ops;
    const x3_batch batch = {.n_rows = n_rows, .n_sequences = n_sequences, .sequences = sequences, .d_positions = r->d_positions,
                            .d_selected = r->d_selected};
    uint64_t shape = 0;
    x3_status rc;

    X3_TRY(rc, out, check_step(r, sequences, n_sequences, n_rows, n_outputs, err));
    X3_TRY(rc, out, place_rows(r, &batch, ids, err));
    if (n_rows <= r->recorded_rows && outputs_are_rows(outputs, n_outputs, n_rows))
        X3_TRY(rc, out, describe(r, &batch, &shape, err));
    if (shape != 0)
        X3_TRY(rc, out, run_recorded(r, &batch, shape, outputs, err));
    else
        X3_TRY(rc, out, run_device(r, &batch, outputs, n_outputs, err));
    if (n_outputs == 0)
        rc = finished(r, ops->sync(r->dev, err), err);
    else if (logits != NULL)
        rc = x3_resident_logits(r, n_outputs, logits, err);
out:
    return rc;
}
