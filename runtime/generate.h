/* Greedy generation from one prompt, all layers of the model in memory. */
#ifndef X3_GENERATE_H
#define X3_GENERATE_H

#include "runtime/forward.h"
#include "runtime/tokenizer/tokenizer.h"

typedef struct x3_generator {
    x3_device *dev;
    const x3_checkpoint *c;
    x3_forward *f;
    x3_layer_weights *layers;
    x3_kv_layer *kv;
    float *d_norm, *d_x, *d_logits;
    x3_weight head;
    int32_t *pages, *d_positions, *d_selected;
    size_t max_positions, n_positions; /* room; positions in the cache */
} x3_generator;

x3_status x3_generator_create(x3_generator **out, x3_device *dev, const x3_checkpoint *c, size_t max_positions,
                              x3_err *err) X3_MUST;
void x3_generator_free(x3_generator *g);

/* Runs n tokens after those already in the cache; logits [vocab] of the last one in host memory. */
x3_status x3_generator_feed(x3_generator *g, const int32_t *ids, size_t n, float *logits, x3_err *err) X3_MUST;

/* Forgets what comes after the first n positions; returns how many are left. A model with recurrent states cannot go
 * back: it forgets everything then. */
size_t x3_generator_truncate(x3_generator *g, size_t n);

/* Called with every new token; false stops. */
typedef bool (*x3_on_token)(void *arg, int32_t id);
/* Feeds the prompt, then takes the most probable token (ties: the lower id) up to max_tokens times. Stops at a stop
 * token of the checkpoint's config, which is not reported; *stopped tells. */
x3_status x3_generate_greedy(x3_generator *g, const int32_t *prompt, size_t n_prompt, size_t max_tokens,
                             x3_on_token on_token, void *arg, bool *stopped, x3_err *err) X3_MUST;

#endif
