#include "runtime/generate.h"

#include <stdlib.h>

#define CHUNK 512 /* prompt tokens a batch */

x3_status x3_generator_create(x3_generator **out, x3_device *dev, const x3_checkpoint *c, size_t max_positions, x3_err *err)
{
    const x3_model *m = c->model;
    const size_t n_pages = (max_positions + X3_KV_PAGE - 1) / X3_KV_PAGE;
    x3_generator *g = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&g, 1, sizeof *g, err));
    g->dev = dev;
    g->c = c;
    g->max_positions = max_positions;
    dev->row_invariant = true; /* a sequence gets the same logits however it is fed */
    X3_TRY(rc, out, x3_alloc(&g->layers, m->n_layers, sizeof *g->layers, err));
    X3_TRY(rc, out, x3_alloc(&g->kv, m->n_layers, sizeof *g->kv, err));
    X3_TRY(rc, out, x3_alloc(&g->pages, n_pages, sizeof *g->pages, err));
    for (size_t i = 0; i < n_pages; i++)
        g->pages[i] = (int32_t)i;
    for (size_t i = 0; i < m->n_layers; i++) {
        X3_TRY(rc, out, x3_layer_weights_load(&g->layers[i], dev, c, &m->layers[i], err));
        X3_TRY(rc, out, x3_kv_layer_create(&g->kv[i], dev, &m->layers[i], n_pages, 1, X3_KV_F32, err));
    }
    X3_TRY(rc, out, x3_forward_create(&g->f, dev, m, CHUNK, max_positions, err));
    X3_TRY(rc, out, x3_vector_load(&g->d_norm, dev, c, &m->final_norm, err));
    X3_TRY(rc, out, x3_linear_load(&g->head, dev, c, &m->head, err));
    X3_TRY(rc, out, x3_device_floats(dev, &g->d_x, CHUNK * m->hidden, err));
    X3_TRY(rc, out, x3_device_floats(dev, &g->d_logits, m->vocab, err));
    if (x3_model_selected(m, max_positions) != 0)
        X3_TRY(rc, out, x3_device_alloc(dev, &g->d_selected,
                                        CHUNK * x3_model_selected(m, max_positions) * sizeof *g->d_selected, err));
    X3_TRY(rc, out, x3_device_alloc(dev, &g->d_positions, CHUNK * sizeof *g->d_positions, err));
    *out = g;
    g = NULL;
out:
    x3_generator_free(g);
    return rc;
}

void x3_generator_free(x3_generator *g)
{
    if (g == NULL)
        return;
    for (size_t i = 0; i < g->c->model->n_layers; i++) {
        if (g->layers != NULL)
            x3_layer_weights_free(&g->layers[i]);
        if (g->kv != NULL)
            x3_kv_layer_free(&g->kv[i], g->dev);
    }
    free(g->layers);
    free(g->kv);
    free(g->pages);
    x3_forward_free(g->f);
    x3_linear_free(&g->head, g->dev);
    x3_device_free(g->dev, g->d_norm);
    x3_device_free(g->dev, g->d_x);
    x3_device_free(g->dev, g->d_logits);
    x3_device_free(g->dev, g->d_positions);
    x3_device_free(g->dev, g->d_selected);
    free(g);
}

static x3_status feed_chunk(x3_generator *g, const int32_t *ids, size_t n, x3_err *err)
{
    const size_t hidden = g->c->model->hidden;
    x3_sequence sequence = {.n_rows = n, .position = g->n_positions, .pages = g->pages};
    x3_batch batch = {.n_rows = n, .n_sequences = 1, .sequences = &sequence, .d_positions = g->d_positions,
                      .d_selected = g->d_selected};
    int32_t positions[CHUNK];
    float *x = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&x, n * hidden, sizeof *x, err));
    X3_TRY(rc, out, x3_embed(g->c, ids, n, x, err));
    for (size_t i = 0; i < n; i++)
        positions[i] = (int32_t)(g->n_positions + i);
    X3_TRY(rc, out, g->dev->ops->upload(g->dev, g->d_x, x, n * hidden * sizeof *x, err));
    X3_TRY(rc, out, g->dev->ops->upload(g->dev, g->d_positions, positions, n * sizeof *positions, err));
    for (size_t i = 0; i < g->c->model->n_layers; i++)
        X3_TRY(rc, out, x3_forward_layer(g->f, &g->layers[i], &batch, &g->kv[i], g->d_x, err));
    X3_TRY(rc, out, g->dev->ops->sync(g->dev, err));
    g->n_positions += n;
out:
    free(x);
    return rc;
}

x3_status x3_generator_feed(x3_generator *g, const int32_t *ids, size_t n, float *logits, x3_err *err)
{
    const x3_model *m = g->c->model;
    size_t last = 0;
    x3_status rc = X3_OK;

    if (n > g->max_positions - g->n_positions)
        return x3_fail(err, X3_ERR_INPUT, "%zu tokens after %zu do not fit the context of %zu", n, g->n_positions,
                       g->max_positions);
    for (size_t at = 0; at < n; at += CHUNK) {
        last = x3_min_size(CHUNK, n - at);
        X3_TRY(rc, out, feed_chunk(g, ids + at, last, err));
    }
    float *d_last = g->d_x + (last - 1) * m->hidden;
    X3_TRY(rc, out, g->dev->ops->rms_norm(g->dev, d_last, m->hidden, 1, m->hidden, g->d_norm, m->norm_eps, d_last, m->hidden,
                                          err));
    X3_TRY(rc, out, g->dev->ops->linear(g->dev, &g->head, d_last, m->hidden, 1, g->d_logits, m->vocab, err));
    X3_TRY(rc, out, g->dev->ops->download(g->dev, logits, g->d_logits, m->vocab * sizeof *logits, err));
    rc = x3_safetensors_unchanged(g->c->st, err);
out:
    return rc;
}

size_t x3_generator_truncate(x3_generator *g, size_t n)
{
    if (n < g->n_positions)
        g->n_positions = x3_model_has_states(g->c->model) ? 0 : n;
    return g->n_positions;
}

static bool is_stop_token(const x3_checkpoint *c, int32_t id)
{
    for (size_t i = 0; i < c->config->n_stop_tokens; i++)
        if (c->config->stop_tokens[i] == id)
            return true;
    return false;
}

x3_status x3_generate_greedy(x3_generator *g, const int32_t *prompt, size_t n_prompt, size_t max_tokens,
                             x3_on_token on_token, void *arg, bool *stopped, x3_err *err)
{
    float *logits = NULL;
    x3_status rc;

    *stopped = false;
    if (n_prompt == 0)
        return x3_fail(err, X3_ERR_INPUT, "the prompt has no tokens");
    X3_TRY(rc, out, x3_alloc(&logits, g->c->model->vocab, sizeof *logits, err));
    X3_TRY(rc, out, x3_generator_feed(g, prompt, n_prompt, logits, err));
    for (size_t i = 0; i < max_tokens && g->n_positions < g->max_positions; i++) {
        int32_t best = 0;
        for (size_t j = 1; j < g->c->model->vocab; j++)
            if (logits[j] > logits[best])
                best = (int32_t)j;
        *stopped = is_stop_token(g->c, best);
        if (*stopped || !on_token(arg, best))
            break;
        X3_TRY(rc, out, x3_generator_feed(g, &best, 1, logits, err));
    }
out:
    free(logits);
    return rc;
}
