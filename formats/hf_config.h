/* config.json and generation_config.json of a Hugging Face model folder. Values stay in their JSON trees; this file
 * knows where they stand: multimodal configs nest the text model in `text_config`. */
#ifndef X3_HF_CONFIG_H
#define X3_HF_CONFIG_H

#include "formats/json.h"

#define X3_STOP_TOKENS_MAX 64

typedef struct x3_hf_config {
    char *path;            /* of config.json, for messages */
    cJSON *config;         /* whole */
    const cJSON *text;     /* text_config when there is one, else config */
    cJSON *generation;     /* NULL when there is no generation_config.json */
    const char *model_type; /* of the text part */
    const char *architecture; /* first of `architectures`, or "" */
    int64_t stop_tokens[X3_STOP_TOKENS_MAX]; /* union of eos_token_id of all three, ascending */
    size_t n_stop_tokens;
} x3_hf_config;

x3_status x3_hf_config_load(x3_hf_config **out, const char *dir, x3_err *err) X3_MUST;
void x3_hf_config_free(x3_hf_config *c);

/* quantization_config of the config, or NULL. */
const cJSON *x3_hf_quantization(const x3_hf_config *c);
/* True when its quant_method is "exl3". */
bool x3_hf_is_exl3(const x3_hf_config *c);

#endif
