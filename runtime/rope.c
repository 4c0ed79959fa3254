#include "runtime/rope.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    x3_rope_type type;
} type_names[] = {{"default", X3_ROPE_DEFAULT}, {"linear", X3_ROPE_LINEAR}, {"dynamic", X3_ROPE_DYNAMIC},
                  {"yarn", X3_ROPE_YARN},       {"longrope", X3_ROPE_LONGROPE}, {"su", X3_ROPE_LONGROPE},
                  {"llama3", X3_ROPE_LLAMA3}};

static x3_status read_type(x3_rope_desc *rope, const cJSON *object, const char *where, x3_err *err)
{
    const char *name = NULL, *old = NULL;
    x3_status rc;

    X3_TRY(rc, out, x3_json_string(object, "rope_type", false, &name, where, err));
    X3_TRY(rc, out, x3_json_string(object, "type", false, &old, where, err));
    if (name != NULL && old != NULL && strcmp(name, old) != 0)
        return x3_fail(err, X3_ERR_INPUT, "%s: rope \"rope_type\" is \"%s\" and \"type\" is \"%s\"", where, name, old);
    if (name == NULL)
        name = old;
    if (name == NULL) {
        rope->type = X3_ROPE_DEFAULT;
        return X3_OK;
    }
    for (size_t i = 0; i < sizeof type_names / sizeof type_names[0]; i++)
        if (strcmp(name, type_names[i].name) == 0) {
            rope->type = type_names[i].type;
            return X3_OK;
        }
    rc = x3_fail(err, X3_ERR_UNSUPPORTED, "%s: rope type \"%s\" is unknown", where, name);
out:
    return rc;
}

/* Keys that each type reads; another one in the object would change the angles unseen. */
static x3_status reject_unknown_keys(const cJSON *object, const char *where, x3_err *err)
{
    static const char *const known[] = {
        "rope_type", "type", "rope_theta", "factor", "original_max_position_embeddings", "low_freq_factor",
        "high_freq_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "attention_factor", "truncate",
        "short_factor", "long_factor", "partial_rotary_factor",
        /* positions of images by axis; a text token has the same position on every axis */
        "mrope_section", "mrope_interleaved"};

    for (const cJSON *c = object->child; c != NULL; c = c->next) {
        size_t i = 0, n = sizeof known / sizeof known[0];
        while (i < n && strcmp(c->string, known[i]) != 0)
            i++;
        if (i == n && !cJSON_IsNull(c))
            return x3_fail(err, X3_ERR_UNSUPPORTED, "%s: rope option \"%s\" is unknown", where, c->string);
    }
    return X3_OK;
}

static x3_status read_list(const cJSON *object, const char *key, float *out, size_t *n, const char *where, x3_err *err)
{
    const cJSON *list = x3_json_get(object, key);
    size_t i = 0;

    if (!cJSON_IsArray(list))
        return x3_fail(err, X3_ERR_INPUT, "%s: rope \"%s\" is missing or not a list", where, key);
    for (const cJSON *c = list->child; c != NULL; c = c->next, i++) {
        if (i == X3_ROPE_PAIRS_MAX || !cJSON_IsNumber(c))
            return x3_fail(err, X3_ERR_INPUT, "%s: rope \"%s\" is not a list of at most %d numbers", where, key,
                           X3_ROPE_PAIRS_MAX);
        out[i] = (float)c->valuedouble;
    }
    *n = i;
    return X3_OK;
}

static x3_status read_parameters(x3_rope_desc *rope, const cJSON *object, const cJSON *text, const char *where,
                                 x3_err *err)
{
    const bool stretched = rope->type != X3_ROPE_DEFAULT;
    size_t n_long = 0;
    x3_status rc;

    X3_TRY(rc, out, reject_unknown_keys(object, where, err));
    X3_TRY(rc, out, x3_json_number(object, "factor", stretched && rope->type != X3_ROPE_LONGROPE, &rope->factor, where,
                                   err));
    X3_TRY(rc, out, x3_json_number(object, "low_freq_factor", rope->type == X3_ROPE_LLAMA3, &rope->low_freq_factor, where,
                                   err));
    X3_TRY(rc, out, x3_json_number(object, "high_freq_factor", rope->type == X3_ROPE_LLAMA3, &rope->high_freq_factor,
                                   where, err));
    X3_TRY(rc, out, x3_json_number(object, "beta_fast", false, &rope->beta_fast, where, err));
    X3_TRY(rc, out, x3_json_number(object, "beta_slow", false, &rope->beta_slow, where, err));
    X3_TRY(rc, out, x3_json_number(object, "mscale", false, &rope->mscale, where, err));
    X3_TRY(rc, out, x3_json_number(object, "mscale_all_dim", false, &rope->mscale_all_dim, where, err));
    X3_TRY(rc, out, x3_json_number(object, "attention_factor", false, &rope->attention_factor, where, err));
    X3_TRY(rc, out, x3_json_bool(object, "truncate", false, &rope->truncate, where, err));
    rope->original_positions = rope->max_positions;
    X3_TRY(rc, out, x3_json_number(text, "original_max_position_embeddings", false, &rope->original_positions, where, err));
    X3_TRY(rc, out, x3_json_number(object, "original_max_position_embeddings", rope->type == X3_ROPE_LLAMA3,
                                   &rope->original_positions, where, err));
    if (rope->type == X3_ROPE_LONGROPE) {
        X3_TRY(rc, out, read_list(object, "short_factor", rope->short_factor, &rope->n_factors, where, err));
        X3_TRY(rc, out, read_list(object, "long_factor", rope->long_factor, &n_long, where, err));
        if (n_long != rope->n_factors || n_long != rope->n_rotated / 2)
            rc = x3_fail(err, X3_ERR_INPUT, "%s: rope short_factor has %zu numbers, long_factor %zu, expected %zu", where,
                         rope->n_factors, n_long, rope->n_rotated / 2);
        if (rope->factor == 1 && rope->original_positions > 0)
            rope->factor = rope->max_positions / rope->original_positions;
    }
    if (rc == X3_OK && (!(rope->factor > 0) || !(rope->original_positions >= 0)))
        rc = x3_fail(err, X3_ERR_INPUT, "%s: rope factor is %g, original positions %g", where, rope->factor,
                     rope->original_positions);
out:
    return rc;
}

/* theta and the rotated part, from the parameter object and from the old top-level keys; both must agree. */
static x3_status read_base(x3_rope_desc *rope, const cJSON *object, const cJSON *text, size_t head_dim, double partial,
                           const char *where, x3_err *err)
{
    static const char *const part_keys[] = {"partial_rotary_factor", "rotary_pct"};
    double inner = 0, outer = 0;
    x3_status rc;

    if (object != NULL)
        X3_TRY(rc, out, x3_json_number(object, "rope_theta", false, &inner, where, err));
    X3_TRY(rc, out, x3_json_number(text, "rope_theta", false, &outer, where, err));
    if (inner != 0 && outer != 0 && inner != outer)
        return x3_fail(err, X3_ERR_INPUT, "%s: rope_theta is %g at the top and %g in the rope parameters", where, outer,
                       inner);
    rope->theta = inner != 0 ? inner : outer;
    if (!(rope->theta > 0))
        return x3_fail(err, X3_ERR_INPUT,
                       "%s: rope_theta is missing: neither \"rope_parameters\" nor the top level has it", where);
    double part = 0;
    if (object != NULL)
        X3_TRY(rc, out, x3_json_number(object, part_keys[0], false, &part, where, err));
    for (int i = 0; i < 2 && part == 0; i++)
        X3_TRY(rc, out, x3_json_number(text, part_keys[i], false, &part, where, err));
    if (part == 0)
        part = partial;
    rope->dim = part > 0 && part <= 1 ? (size_t)((double)head_dim * part) : 0;
    rope->n_rotated = rope->dim + rope->dim % 2;
    if (rope->n_rotated < 2 || rope->n_rotated > head_dim || rope->n_rotated / 2 > X3_ROPE_PAIRS_MAX)
        rc = x3_fail(err, X3_ERR_UNSUPPORTED, "%s: %g of a head of %zu gives %zu rotated dimensions", where, part,
                     head_dim, rope->n_rotated);
out:
    return rc;
}

x3_status x3_rope_read(x3_rope_desc *rope, const cJSON *text, const char *layer_type, size_t head_dim, double partial,
                       const char *where, x3_err *err)
{
    const cJSON *fresh = x3_json_get(text, "rope_parameters"), *old = x3_json_get(text, "rope_scaling");
    const cJSON *object;
    x3_status rc;

    *rope = (x3_rope_desc){.factor = 1, .beta_fast = 32, .beta_slow = 1, .truncate = true};
    if ((fresh != NULL && !cJSON_IsObject(fresh)) || (old != NULL && !cJSON_IsObject(old)))
        return x3_fail(err, X3_ERR_INPUT, "%s: rope_parameters or rope_scaling is not an object", where);
    if (fresh != NULL && old != NULL && !cJSON_Compare(fresh, old, true) && x3_json_get(old, "rope_theta") == NULL &&
        cJSON_GetArraySize(old) > 0) {
        /* transformers 5 writes rope_parameters; a rope_scaling beside it counts only when it says the same */
        x3_rope_desc a = *rope, b = *rope;
        X3_TRY(rc, out, read_type(&a, fresh, where, err));
        X3_TRY(rc, out, read_type(&b, old, where, err));
        if (a.type != b.type)
            return x3_fail(err, X3_ERR_INPUT, "%s: rope_parameters and rope_scaling name different types", where);
    }
    object = fresh != NULL ? fresh : old;
    if (fresh != NULL && layer_type != NULL && cJSON_IsObject(x3_json_get(fresh, layer_type)))
        object = x3_json_get(fresh, layer_type);
    X3_TRY(rc, out, x3_json_number(text, "max_position_embeddings", true, &rope->max_positions, where, err));
    X3_TRY(rc, out, read_base(rope, object, text, head_dim, partial, where, err));
    if (object != NULL) {
        X3_TRY(rc, out, read_type(rope, object, where, err));
        X3_TRY(rc, out, read_parameters(rope, object, text, where, err));
    }
out:
    return rc;
}

static double yarn_mscale(double factor, double mscale)
{
    return factor <= 1 ? 1 : 0.1 * mscale * log(factor) + 1;
}

double x3_rope_attention_factor(const x3_rope_desc *rope, size_t n_positions)
{
    (void)n_positions;
    if (rope->type != X3_ROPE_YARN && rope->type != X3_ROPE_LONGROPE)
        return 1;
    if (rope->attention_factor != 0)
        return rope->attention_factor;
    if (rope->type == X3_ROPE_LONGROPE)
        return rope->factor <= 1 ? 1 : sqrt(1 + log(rope->factor) / log(rope->original_positions));
    if (rope->mscale != 0 && rope->mscale_all_dim != 0)
        return yarn_mscale(rope->factor, rope->mscale) / yarn_mscale(rope->factor, rope->mscale_all_dim);
    return yarn_mscale(rope->factor, 1);
}

/* Dimension pair whose wavelength fits `rotations` turns into the original length. */
static double yarn_correction(const x3_rope_desc *rope, double rotations)
{
    return (double)rope->dim * log(rope->original_positions / (rotations * 2 * M_PI)) / (2 * log(rope->theta));
}

static double yarn_frequency(const x3_rope_desc *rope, size_t i, double f)
{
    double low = yarn_correction(rope, rope->beta_fast), high = yarn_correction(rope, rope->beta_slow);

    if (rope->truncate) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0);
    high = fmin(high, (double)rope->dim - 1);
    if (low == high)
        high += 0.001;
    double ramp = fmin(fmax(((double)i - low) / (high - low), 0), 1);
    return f / rope->factor * ramp + f * (1 - ramp);
}

static double llama3_frequency(const x3_rope_desc *rope, double f)
{
    double wavelength = 2 * M_PI / f;

    if (wavelength < rope->original_positions / rope->high_freq_factor)
        return f;
    if (wavelength > rope->original_positions / rope->low_freq_factor)
        return f / rope->factor;
    double smooth = (rope->original_positions / wavelength - rope->low_freq_factor) /
                    (rope->high_freq_factor - rope->low_freq_factor);
    return (1 - smooth) * f / rope->factor + smooth * f;
}

x3_status x3_rope_table(const x3_rope_desc *rope, size_t n_positions, float *table, x3_err *err)
{
    const size_t half = rope->n_rotated / 2;
    const double scale = x3_rope_attention_factor(rope, n_positions);

    if (rope->type == X3_ROPE_DYNAMIC && (double)n_positions > rope->max_positions)
        return x3_fail(err, X3_ERR_UNSUPPORTED,
                       "dynamic rope is only known up to max_position_embeddings: %zu positions asked for, %g there",
                       n_positions, rope->max_positions);
    for (size_t i = 0; i < half; i++) {
        double f = (double)(float)(1 / pow(rope->theta, 2 * (double)i / (double)rope->dim));
        if (rope->type == X3_ROPE_LINEAR)
            f /= rope->factor;
        else if (rope->type == X3_ROPE_YARN)
            f = yarn_frequency(rope, i, f);
        else if (rope->type == X3_ROPE_LLAMA3)
            f = llama3_frequency(rope, f);
        else if (rope->type == X3_ROPE_LONGROPE)
            f /= (double)n_positions > rope->original_positions ? rope->long_factor[i] : rope->short_factor[i];
        for (size_t p = 0; p < n_positions; p++) {
            float angle = (float)p * (float)f;
            table[p * rope->n_rotated + i] = (float)(cos((double)angle) * scale);
            table[p * rope->n_rotated + half + i] = (float)(sin((double)angle) * scale);
        }
    }
    return X3_OK;
}
