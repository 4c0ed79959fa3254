/* Multi-head latent attention. Keys and values of a head are linear in the cached latent, key = W_k c and value = W_v c,
 * so the query is taken through W_k^T and compared with the latent itself, and the weighted mean of latents goes through
 * W_v: the cache holds the latent and the rotated key part, nothing a head.
 * With an indexer a query past the first topk positions sees only the topk that the indexer scores highest. */
#include <stdlib.h>

#include "runtime/forward.h"

#define INDEX_NORM_EPS 1e-6f

static size_t latent_dim(const x3_mla_desc *d)
{
    return d->kv_rank + d->rope_dim;
}

struct parts {
    float *d_latent_q;       /* [n][q_rank] */
    float *d_q;              /* [n][n_heads][nope | rope] */
    float *d_kv;             /* [n][latent | rope] */
    float *d_values;         /* [n][n_heads][v_dim] */
    float *d_block_q;        /* [block][n_heads][latent | rope] */
    float *d_block_out;      /* [block][n_heads][latent] */
    float *d_index_q, *d_index_k, *d_index_w;
    int32_t *d_selected;     /* [n][topk], where nobody else keeps it */
};

/* Carves the scratch up; returns the floats taken. */
static size_t carve(const x3_mla_desc *d, size_t n, float *base, struct parts *p)
{
    const size_t block = x3_min_size(n, X3_MLA_ROWS);
    const bool owns = d->index.n_heads != 0;
    const size_t sizes[] = {n * d->q_rank, n * d->n_heads * (d->nope_dim + d->rope_dim), n * latent_dim(d),
                            n * d->n_heads * d->v_dim, block * d->n_heads * latent_dim(d),
                            block * d->n_heads * d->kv_rank, owns ? n * d->index.n_heads * d->index.dim : 0,
                            owns ? n * d->index.dim : 0, owns ? n * d->index.n_heads : 0, owns ? n * d->index.topk : 0};
    float **parts[] = {&p->d_latent_q, &p->d_q, &p->d_kv, &p->d_values, &p->d_block_q, &p->d_block_out, &p->d_index_q,
                       &p->d_index_k, &p->d_index_w};
    size_t at = 0;

    for (size_t i = 0; i < sizeof sizes / sizeof sizes[0]; i++) {
        if (base != NULL && i < sizeof parts / sizeof parts[0])
            *parts[i] = base + at;
        else if (base != NULL)
            p->d_selected = (int32_t *)(void *)(base + at);
        at += sizes[i];
    }
    return at;
}

size_t x3_mla_scratch(const x3_mla_desc *d, size_t n_rows)
{
    struct parts p;

    return carve(d, n_rows, NULL, &p);
}

static x3_status rotate(x3_forward *f, const x3_mla_desc *d, bool interleaved, float *d_x, size_t ld, size_t first,
                        size_t head_stride, size_t n_heads, const x3_batch *batch, x3_err *err)
{
    x3_rope_args rope = {.d_x = d_x, .ld = ld, .first = first, .head_stride = head_stride, .n_heads = n_heads,
                         .n_rotated = d->rope_dim, .interleaved = interleaved, .d_cos_sin = f->d_ropes[d->rope]};

    return f->dev->ops->rope(f->dev, &rope, batch, err);
}

/* Projections, norms and rope; latents into the cache. */
static x3_status project(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, const float *d_in,
                         const struct parts *p, x3_err *err)
{
    const x3_mla_desc *d = &w->desc->mla;
    const x3_device_ops *ops = f->dev->ops;
    const size_t n = batch->n_rows, head = d->nope_dim + d->rope_dim, latent = latent_dim(d);
    const float *d_from = d_in;
    x3_status rc;

    if (d->q_rank != 0) {
        X3_TRY(rc, out, x3_forward_linear(f, w, d->q_a, d_in, n, p->d_latent_q, err));
        X3_TRY(rc, out, ops->rms_norm(f->dev, p->d_latent_q, d->q_rank, n, d->q_rank, w->vectors[d->q_norm], d->latent_eps,
                                      p->d_latent_q, d->q_rank, err));
        d_from = p->d_latent_q;
    }
    X3_TRY(rc, out, x3_forward_linear(f, w, d->q_b, d_from, n, p->d_q, err));
    X3_TRY(rc, out, x3_forward_linear(f, w, d->kv_a, d_in, n, p->d_kv, err));
    X3_TRY(rc, out, ops->rms_norm(f->dev, p->d_kv, latent, n, d->kv_rank, w->vectors[d->kv_norm], d->latent_eps, p->d_kv,
                                  latent, err));
    X3_TRY(rc, out, rotate(f, d, d->interleaved, p->d_q, d->n_heads * head, d->nope_dim, head, d->n_heads, batch, err));
    rc = rotate(f, d, d->interleaved, p->d_kv, latent, d->kv_rank, 0, 1, batch, err);
out:
    return rc;
}

/* Index keys into their cache, then the selection of every row. */
static x3_status run_indexer(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, const x3_kv_layer *kv,
                             const float *d_in, const struct parts *p, int32_t *d_selected, x3_err *err)
{
    const x3_mla_desc *d = &w->desc->mla;
    const x3_indexer_desc *x = &d->index;
    const x3_device_ops *ops = f->dev->ops;
    const x3_kv_layer keys = {.n_kv_heads = 1, .k_dim = x->dim, .d_keys = kv->d_index_keys};
    x3_select_args select = {.d_q = p->d_index_q, .d_weights = p->d_index_w, .n_heads = x->n_heads, .n_selected = x->topk,
                             .kv = kv, .d_selected = d_selected};
    const size_t n = batch->n_rows;
    x3_status rc;

    X3_TRY(rc, out, x3_forward_linear(f, w, x->k, d_in, n, p->d_index_k, err));
    X3_TRY(rc, out, ops->layer_norm(f->dev, p->d_index_k, n, x->dim, w->vectors[x->k_norm], w->vectors[x->k_norm_bias],
                                    INDEX_NORM_EPS, err));
    X3_TRY(rc, out, rotate(f, d, x->interleaved, p->d_index_k, x->dim, 0, 0, 1, batch, err));
    X3_TRY(rc, out, ops->kv_append(f->dev, &keys, batch, p->d_index_k, x->dim, NULL, 0, err));
    X3_TRY(rc, out, x3_forward_linear(f, w, x->q, p->d_latent_q, n, p->d_index_q, err));
    if (d_selected == NULL) /* nothing to choose yet; the linear ran for whoever captures its input */
        goto out;
    X3_TRY(rc, out, rotate(f, d, x->interleaved, p->d_index_q, x->n_heads * x->dim, 0, x->dim, x->n_heads, batch, err));
    X3_TRY(rc, out, x3_forward_linear(f, w, x->weights, d_in, n, p->d_index_w, err));
    rc = ops->select(f->dev, &select, batch, err);
out:
    return rc;
}

/* Rows [row, row + n) of a batch as a batch; sequences has room for all of its sequences. */
static x3_batch rows_of(const x3_batch *batch, size_t row, size_t n, x3_sequence *sequences)
{
    x3_batch part = {.n_rows = n, .sequences = sequences, .d_positions = batch->d_positions + row};

    for (size_t i = 0; i < batch->n_sequences; i++) {
        x3_sequence s = batch->sequences[i];
        size_t from = x3_max_size(s.first_row, row), to = x3_min_size(s.first_row + s.n_rows, row + n);
        if (from >= to)
            continue;
        s.position += from - s.first_row;
        s.first_row = from - row;
        s.n_rows = to - from;
        sequences[part.n_sequences++] = s;
    }
    return part;
}

/* Attention of all rows, blocks of them at a time: out [n][n_heads][v_dim]. */
static x3_status attend(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, const x3_kv_layer *kv,
                        const struct parts *p, const int32_t *d_selected, x3_err *err)
{
    const x3_mla_desc *d = &w->desc->mla;
    const x3_device_ops *ops = f->dev->ops;
    const size_t head = d->nope_dim + d->rope_dim, latent = latent_dim(d), topk = d->index.topk;
    x3_heads_args in = {.w = &w->linears[d->kv_b], .n_heads = d->n_heads, .stride = d->nope_dim + d->v_dim, .n = d->nope_dim,
                        .transposed = true, .ldx = d->n_heads * head, .x_stride = head, .d_y = p->d_block_q,
                        .ldy = d->n_heads * latent, .y_stride = latent};
    x3_heads_args out_heads = {.w = in.w, .n_heads = d->n_heads, .first = d->nope_dim, .stride = in.stride, .n = d->v_dim,
                               .d_x = p->d_block_out, .ldx = d->n_heads * d->kv_rank, .x_stride = d->kv_rank,
                               .ldy = d->n_heads * d->v_dim, .y_stride = d->v_dim};
    x3_sequence *sequences = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_alloc(&sequences, batch->n_sequences, sizeof *sequences, err));
    for (size_t row = 0; row < batch->n_rows; row += X3_MLA_ROWS) {
        x3_batch part = rows_of(batch, row, x3_min_size(X3_MLA_ROWS, batch->n_rows - row), sequences);
        x3_attention_args attention = {.d_q = p->d_block_q, .d_out = p->d_block_out, .n_heads = d->n_heads, .kv = kv,
                                       .scale = d->scale, .n_selected = topk,
                                       .d_selected = d_selected == NULL ? NULL : d_selected + row * topk};
        in.n_rows = out_heads.n_rows = part.n_rows;
        in.d_x = p->d_q + row * d->n_heads * head;
        out_heads.d_y = p->d_values + row * d->n_heads * d->v_dim;
        X3_TRY(rc, out, ops->linear_heads(f->dev, &in, err));
        X3_TRY(rc, out, ops->copy_heads(f->dev, p->d_block_q + d->kv_rank, in.ldy, latent, in.d_x + d->nope_dim, in.ldx, head,
                                        part.n_rows, d->n_heads, d->rope_dim, err));
        X3_TRY(rc, out, ops->attention(f->dev, &attention, &part, err));
        X3_TRY(rc, out, ops->linear_heads(f->dev, &out_heads, err));
    }
out:
    free(sequences);
    return rc;
}

static size_t longest(const x3_batch *batch)
{
    size_t n = 0;

    for (size_t i = 0; i < batch->n_sequences; i++)
        n = x3_max_size(n, batch->sequences[i].position + batch->sequences[i].n_rows);
    return n;
}

x3_status x3_mla_forward(x3_forward *f, const x3_layer_weights *w, const x3_batch *batch, x3_kv_layer *kv,
                         const float *d_in, float *d_out, float *d_scratch, x3_err *err)
{
    const x3_mla_desc *d = &w->desc->mla;
    const bool sparse = d->index.topk != 0 && longest(batch) > d->index.topk, owns = d->index.n_heads != 0;
    int32_t *d_selected = NULL;
    struct parts p = {0};
    x3_status rc;

    carve(d, batch->n_rows, d_scratch, &p);
    if (sparse)
        d_selected = batch->d_selected != NULL ? batch->d_selected : owns ? p.d_selected : NULL;
    if (sparse && batch->d_selected == NULL && f->model->shared_topk != 0)
        return x3_fail(err, X3_ERR_INPUT, "%s: %zu positions, more than the %zu that an indexer selects, and the batch keeps no "
                                          "selection for the layers that share it",
                       w->desc->prefix, longest(batch), d->index.topk);
    X3_TRY(rc, out, project(f, w, batch, d_in, &p, err));
    X3_TRY(rc, out, f->dev->ops->kv_append(f->dev, kv, batch, p.d_kv, latent_dim(d), NULL, 0, err));
    if (owns)
        X3_TRY(rc, out, run_indexer(f, w, batch, kv, d_in, &p, d_selected, err));
    X3_TRY(rc, out, attend(f, w, batch, kv, &p, d_selected, err));
    rc = x3_forward_linear(f, w, d->o, p.d_values, batch->n_rows, d_out, err);
out:
    return rc;
}
