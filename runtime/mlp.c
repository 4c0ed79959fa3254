/* Gated feed-forward block: down(silu(gate(x)) * up(x)). */
#include "runtime/forward.h"

size_t x3_mlp_scratch(const x3_mlp_desc *d, size_t n_rows)
{
    return 2 * n_rows * d->n_inner;
}

x3_status x3_mlp_forward(x3_forward *f, const x3_layer_weights *w, const x3_mlp_desc *d, size_t n_rows, const float *d_in,
                         float *d_out, float *d_scratch, x3_err *err)
{
    float *d_gate = d_scratch, *d_up = d_gate + n_rows * d->n_inner;
    const int linears[] = {d->gate, d->up};
    float *const d_y[] = {d_gate, d_up};
    x3_status rc;

    X3_TRY(rc, out, x3_forward_linears(f, w, linears, 2, d_in, n_rows, d_y, err));
    if (f->dev->ops->linear_gated != NULL && f->capture == NULL)
        return f->dev->ops->linear_gated(f->dev, &w->linears[d->down], d_gate, d_up, n_rows, d_out, err);
    X3_TRY(rc, out, f->dev->ops->silu_mul(f->dev, d_gate, d_up, n_rows * d->n_inner, d_gate, err));
    X3_TRY(rc, out, x3_forward_linear(f, w, d->down, d_gate, n_rows, d_out, err));
out:
    return rc;
}
