#include "formats/hf_config.h"

#include <stdlib.h>
#include <string.h>

#include "formats/io.h"

static x3_status add_stop_token(x3_hf_config *c, const cJSON *node, const char *where, x3_err *err)
{
    int64_t id;
    size_t at = 0;
    x3_status rc = x3_json_as_int(node, "eos_token_id", 0, INT32_MAX, &id, where, err);

    if (rc != X3_OK)
        return rc;
    while (at < c->n_stop_tokens && c->stop_tokens[at] < id)
        at++;
    if (at < c->n_stop_tokens && c->stop_tokens[at] == id)
        return X3_OK;
    if (c->n_stop_tokens == X3_STOP_TOKENS_MAX)
        return x3_fail(err, X3_ERR_INPUT, "%s: more than %d stop tokens", where, X3_STOP_TOKENS_MAX);
    memmove(c->stop_tokens + at + 1, c->stop_tokens + at, (c->n_stop_tokens - at) * sizeof c->stop_tokens[0]);
    c->stop_tokens[at] = id;
    c->n_stop_tokens++;
    return X3_OK;
}

/* eos_token_id is a number, a list of numbers, null or missing. */
static x3_status add_stop_tokens(x3_hf_config *c, const cJSON *object, const char *where, x3_err *err)
{
    const cJSON *node = object == NULL ? NULL : x3_json_get(object, "eos_token_id");
    x3_status rc = X3_OK;

    if (node == NULL)
        return X3_OK;
    if (!cJSON_IsArray(node))
        return add_stop_token(c, node, where, err);
    for (const cJSON *id = node->child; id != NULL && rc == X3_OK; id = id->next)
        rc = add_stop_token(c, id, where, err);
    return rc;
}

static x3_status load_generation(x3_hf_config *c, const char *dir, x3_err *err)
{
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_path_join(&path, dir, "generation_config.json", err));
    if (!x3_path_exists(path))
        goto out;
    X3_TRY(rc, out, x3_json_load(&c->generation, path, err));
    rc = add_stop_tokens(c, c->generation, path, err);
out:
    free(path);
    return rc;
}

x3_status x3_hf_config_load(x3_hf_config **out, const char *dir, x3_err *err)
{
    const cJSON *architectures, *nested;
    x3_hf_config *c = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&c, 1, sizeof *c, err));
    X3_TRY(rc, out, x3_path_join(&c->path, dir, "config.json", err));
    X3_TRY(rc, out, x3_json_load(&c->config, c->path, err));
    nested = x3_json_get(c->config, "text_config");
    if (nested != NULL && !cJSON_IsObject(nested)) {
        rc = x3_fail(err, X3_ERR_INPUT, "%s: \"text_config\" is not an object", c->path);
        goto out;
    }
    c->text = nested != NULL ? nested : c->config;
    X3_TRY(rc, out, x3_json_string(c->text, "model_type", nested == NULL, &c->model_type, c->path, err));
    if (c->model_type == NULL)
        X3_TRY(rc, out, x3_json_string(c->config, "model_type", true, &c->model_type, c->path, err));
    c->architecture = "";
    architectures = x3_json_get(c->config, "architectures");
    if (cJSON_IsArray(architectures) && cJSON_IsString(architectures->child))
        c->architecture = architectures->child->valuestring;
    X3_TRY(rc, out, add_stop_tokens(c, c->config, c->path, err));
    if (nested != NULL)
        X3_TRY(rc, out, add_stop_tokens(c, nested, c->path, err));
    X3_TRY(rc, out, load_generation(c, dir, err));
    *out = c;
    c = NULL;
out:
    x3_hf_config_free(c);
    return rc;
}

void x3_hf_config_free(x3_hf_config *c)
{
    if (c == NULL)
        return;
    cJSON_Delete(c->config);
    cJSON_Delete(c->generation);
    free(c->path);
    free(c);
}

const cJSON *x3_hf_quantization(const x3_hf_config *c)
{
    const cJSON *q = x3_json_get(c->config, "quantization_config");

    return q != NULL ? q : x3_json_get(c->text, "quantization_config");
}

bool x3_hf_is_exl3(const x3_hf_config *c)
{
    const cJSON *q = x3_hf_quantization(c);
    const cJSON *method = q == NULL ? NULL : x3_json_get(q, "quant_method");

    return cJSON_IsString(method) && strcmp(method->valuestring, "exl3") == 0;
}
