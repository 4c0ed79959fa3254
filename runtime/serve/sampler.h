/* From logits to a token: bias, penalties, temperature, top-k, top-p, min-p, in this order (that of transformers and
 * vLLM). The same parameters, seed, name and logits give the same tokens on every machine.
 *
 * Threads: a sampler belongs to one thread at a time. */
#ifndef X3_SAMPLER_H
#define X3_SAMPLER_H

#include "formats/hf_config.h"

#define X3_TOP_LOGPROBS_MAX 20

typedef struct x3_logit_bias {
    int32_t id;
    float bias;
} x3_logit_bias;

typedef struct x3_sampling {
    double temperature; /* 0: greedy, the most probable token, of equal ones the lowest id */
    int64_t top_k;      /* 0: all */
    double top_p;       /* smallest set of most probable tokens whose sum reaches it; 1: all */
    double min_p;       /* at least this share of the probability of the most probable one; 0: all */
    double repetition_penalty; /* of tokens in prompt and reply: positive logits divided by it, others multiplied; 1: none */
    double presence_penalty;   /* subtracted from the logits of tokens in the reply */
    double frequency_penalty;  /* the same, times how often they are there */
    uint64_t seed;
    int n_top; /* alternatives reported with each token, 0 to X3_TOP_LOGPROBS_MAX; -1: no log-probabilities at all */
    const x3_logit_bias *bias; /* borrowed */
    size_t n_bias;
} x3_sampling;

/* No penalties and no cuts, temperature 1; with `config`, what its generation_config.json states (do_sample false is
 * temperature 0). X3_ERR_INPUT: a value out of range there, named. */
x3_status x3_sampling_defaults(x3_sampling *s, const x3_hf_config *config, x3_err *err) X3_MUST;
/* X3_ERR_INPUT when a value is out of its range: a message for clients, by the names of the API. */
x3_status x3_sampling_check(const x3_sampling *s, size_t vocab, x3_err *err) X3_MUST;

typedef struct x3_alternative {
    int32_t id;
    float logprob;
} x3_alternative;

/* Log-probabilities are those of the model: natural logarithms of the softmax of the logits as they came in. */
typedef struct x3_sampled {
    int32_t id;
    float logprob; /* 0 when n_top is -1 */
    size_t n_top;
    x3_alternative top[X3_TOP_LOGPROBS_MAX]; /* descending, of equal ones the lowest id first */
} x3_sampled;

typedef struct x3_sampler x3_sampler;

/* `name` tells apart several replies of one seed. Copies the bias. */
x3_status x3_sampler_create(x3_sampler **out, const x3_sampling *s, size_t vocab, const char *name, x3_err *err) X3_MUST;
void x3_sampler_free(x3_sampler *s);
/* Tokens of the prompt, for the repetition penalty; before the first pick. Ids past the vocabulary are ignored. */
void x3_sampler_prompt(x3_sampler *s, const int32_t *ids, size_t n);
/* The pick is the largest logit, whatever came before, and nothing else of the logits is reported. */
bool x3_sampler_is_greedy(const x3_sampler *s);
/* Picks one, and counts it as part of the reply. logits [vocab] are changed. X3_ERR_NUMERIC: a NaN, or no finite logit. */
x3_status x3_sampler_pick(x3_sampler *s, float *logits, x3_sampled *out, x3_err *err) X3_MUST;

#endif
