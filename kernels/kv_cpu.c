#include "kernels/kv_cpu.h"

#define PANEL 16

static uint32_t largest_of(const float *x, size_t n)
{
    uint32_t largest = 0;

    for (size_t i = 0; i < n; i++) {
        uint32_t bits = x3_kv_bits(x[i]) & 0x7FFFFFFFu;
        largest = bits > largest ? bits : largest;
    }
    return largest;
}

static uint8_t two_integers(float low, float high, float scale)
{
    return (uint8_t)((x3_kv_integer(X3_KV_INT4, low, scale) + 8) | (x3_kv_integer(X3_KV_INT4, high, scale) + 8) << 4);
}

static float *scales_8(void *block, size_t dim)
{
    return (float *)(void *)((char *)block + x3_kv_number_bytes(X3_KV_INT8, dim));
}

static uint16_t *scales_4(void *block, size_t dim)
{
    return (uint16_t *)(void *)((char *)block + x3_kv_number_bytes(X3_KV_INT4, dim));
}

static float scale_4(const void *block, size_t dim, size_t group, size_t position)
{
    const uint16_t *scales = (const uint16_t *)(const void *)((const char *)block + x3_kv_number_bytes(X3_KV_INT4, dim));

    return x3_kv_float((uint32_t)scales[group * X3_KV_PAGE + position] << 16);
}

static const float *const_scales_8(const void *block, size_t dim)
{
    return (const float *)(const void *)((const char *)block + x3_kv_number_bytes(X3_KV_INT8, dim));
}

void x3_kv_pack_keys(x3_kv_type type, const float *x, size_t dim, size_t in_page, void *block)
{
    if (type == X3_KV_BF16) {
        uint16_t *to = (uint16_t *)block + in_page * dim;
        for (size_t d = 0; d < dim; d++)
            to[d] = x3_kv_bf16(x[d]);
    } else if (type == X3_KV_INT8) {
        int8_t *to = (int8_t *)block + in_page * dim;
        const float scale = x3_kv_scale(type, largest_of(x, dim));
        for (size_t d = 0; d < dim; d++)
            to[d] = (int8_t)x3_kv_integer(type, x[d], scale);
        scales_8(block, dim)[in_page] = scale;
    } else {
        uint8_t *to = (uint8_t *)block + in_page * dim / 2;
        for (size_t g = 0; g < dim / X3_KV_GROUP; g++, x += X3_KV_GROUP, to += X3_KV_GROUP / 2) {
            const float scale = x3_kv_scale(type, largest_of(x, X3_KV_GROUP));
            for (size_t i = 0; i < X3_KV_GROUP / 2; i++)
                to[i] = two_integers(x[2 * i], x[2 * i + 1], scale);
            scales_4(block, dim)[g * X3_KV_PAGE + in_page] = x3_kv_bf16(scale);
        }
    }
}

void x3_kv_pack_values(x3_kv_type type, const float *x, size_t dim, size_t in_page, void *block)
{
    if (type == X3_KV_BF16) {
        for (size_t d = 0; d < dim; d++)
            ((uint16_t *)block)[d * X3_KV_PAGE + in_page] = x3_kv_bf16(x[d]);
    } else if (type == X3_KV_INT8) {
        const float scale = x3_kv_scale(type, largest_of(x, dim));
        for (size_t d = 0; d < dim; d++)
            ((int8_t *)block)[d * X3_KV_PAGE + in_page] = (int8_t)x3_kv_integer(type, x[d], scale);
        scales_8(block, dim)[in_page] = scale;
    } else {
        uint8_t *to = (uint8_t *)block + in_page;
        for (size_t g = 0; g < dim / X3_KV_GROUP; g++, x += X3_KV_GROUP) {
            const float scale = x3_kv_scale(type, largest_of(x, X3_KV_GROUP));
            for (size_t i = 0; i < X3_KV_GROUP / 2; i++, to += X3_KV_PAGE)
                *to = two_integers(x[i], x[i + X3_KV_GROUP / 2], scale);
            scales_4(block, dim)[g * X3_KV_PAGE + in_page] = x3_kv_bf16(scale);
        }
    }
}

void x3_kv_unpack_keys(x3_kv_type type, const void *block, size_t dim, size_t first, float *out)
{
    for (size_t j = 0; j < PANEL; j++, out++) {
        const size_t p = first + j;
        if (type == X3_KV_BF16) {
            const uint16_t *from = (const uint16_t *)block + p * dim;
            for (size_t d = 0; d < dim; d++)
                out[d * PANEL] = x3_kv_float((uint32_t)from[d] << 16);
        } else if (type == X3_KV_INT8) {
            const int8_t *from = (const int8_t *)block + p * dim;
            const float scale = const_scales_8(block, dim)[p];
            for (size_t d = 0; d < dim; d++)
                out[d * PANEL] = (float)from[d] * scale;
        } else {
            const uint8_t *from = (const uint8_t *)block + p * dim / 2;
            for (size_t d = 0; d < dim; d += 2) {
                const float scale = scale_4(block, dim, d / X3_KV_GROUP, p);
                out[d * PANEL] = (float)((from[d / 2] & 15) - 8) * scale;
                out[(d + 1) * PANEL] = (float)((from[d / 2] >> 4) - 8) * scale;
            }
        }
    }
}

/* Dimension d of positions [from, to), ld apart. */
static void unpack_dimension(x3_kv_type type, const void *block, size_t dim, size_t d, size_t from, size_t to, float *out, size_t ld)
{
    const size_t group = d / X3_KV_GROUP, i = d % X3_KV_GROUP, half = X3_KV_GROUP / 2;
    const uint8_t *bytes = (const uint8_t *)block + (group * half + i % half) * X3_KV_PAGE;

    for (size_t p = from; p < to; p++, out += ld)
        if (type == X3_KV_BF16)
            *out = x3_kv_float((uint32_t)((const uint16_t *)block)[d * X3_KV_PAGE + p] << 16);
        else if (type == X3_KV_INT8)
            *out = (float)((const int8_t *)block)[d * X3_KV_PAGE + p] * const_scales_8(block, dim)[p];
        else
            *out = (float)((i < half ? bytes[p] & 15 : bytes[p] >> 4) - 8) * scale_4(block, dim, group, p);
}

void x3_kv_unpack_values(x3_kv_type type, const void *block, size_t dim, size_t from, size_t to, float *out, size_t ld)
{
    for (size_t d = 0; d < dim; d++)
        unpack_dimension(type, block, dim, d, from, to, out + d, ld);
    for (size_t d = dim; d < ld; d++)
        for (size_t p = from; p < to; p++)
            out[(p - from) * ld + d] = 0;
}
