/* The inside of a measurement, shared by measure.c (order, text, file) and measure_layer.c (noise, paths). */
#ifndef X3_MEASURE_INTERNAL_H
#define X3_MEASURE_INTERNAL_H

#include "calib/capture.h"
#include "quant/measure.h"

#define X3_MEASURE_COLS 256 /* positions of a row whose logits are compared */

/* A linear of a path, and its share of what the path costs (1 but for experts). */
struct x3_measured_member {
    const x3_linear_desc *linear;
    double share, error; /* error: relative output error of its noise */
};

/* Hidden states of the scored rows with noise in one linear, or in one projection of all experts of a layer: alone, everything
 * else exact, and added, twice of it where all others have theirs once. */
struct x3_measured_path {
    struct x3_measured_member *members;
    size_t n_members;
    x3_hidden_state *alone, *added;
};

/* Rows of one length with their clean states. */
struct x3_measured_rows {
    int32_t *ids;
    size_t n, cols;
    x3_layer_runner runner;
    x3_hidden_state *clean;
};

struct x3_measure {
    x3_measure_options o;
    x3_job_events events;
    x3_device *dev;
    x3_checkpoint *source;
    x3_corpus *corpus;
    struct x3_measured_rows calibration, scored;
    x3_hidden_state *noisy; /* the scored rows with noise in all linears */
    struct x3_measured_path *paths; /* of this pass */
    size_t n_paths, max_paths;
    x3_hidden_place place; /* of all states: the device's memory or the host's */
    cJSON *file, *linears; /* the file and its list, borrowed */
    double done, total;    /* layer runs of states, for progress */
};

x3_status x3_measure_states(const struct x3_measure *s, const struct x3_measured_rows *r, x3_hidden_state **out,
                            x3_err *err) X3_MUST;
/* Paths that begin in a layer. */
size_t x3_measure_paths_of(const x3_layer_desc *l);
/* The clean rows, the noisy ones and all paths through a layer; with `starts`, new paths begin here. */
x3_status x3_measure_layer(struct x3_measure *s, size_t layer, bool starts, x3_err *err) X3_MUST;

#endif
