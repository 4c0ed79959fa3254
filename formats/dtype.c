#include "formats/safetensors.h"

#include <assert.h>
#include <string.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "tensor data is little-endian and used as it stands");

static const struct {
    const char *name;
    size_t n_bytes;
    bool is_float;
} dtypes[X3_N_DTYPES] = {
    [X3_F64] = {"F64", 8, true},         [X3_F32] = {"F32", 4, true},         [X3_F16] = {"F16", 2, true},
    [X3_BF16] = {"BF16", 2, true},       [X3_F8_E4M3] = {"F8_E4M3", 1, true}, [X3_F8_E5M2] = {"F8_E5M2", 1, true},
    [X3_F8_E8M0] = {"F8_E8M0", 1, true}, [X3_I64] = {"I64", 8, false},        [X3_I32] = {"I32", 4, false},
    [X3_I16] = {"I16", 2, false},        [X3_I8] = {"I8", 1, false},          [X3_U64] = {"U64", 8, false},
    [X3_U32] = {"U32", 4, false},        [X3_U16] = {"U16", 2, false},        [X3_U8] = {"U8", 1, false},
    [X3_BOOL] = {"BOOL", 1, false},
};

const char *x3_dtype_name(x3_dtype dtype)
{
    assert(dtype < X3_N_DTYPES);
    return dtypes[dtype].name;
}

size_t x3_dtype_bytes(x3_dtype dtype)
{
    assert(dtype < X3_N_DTYPES);
    return dtypes[dtype].n_bytes;
}

bool x3_dtype_is_float(x3_dtype dtype)
{
    assert(dtype < X3_N_DTYPES);
    return dtypes[dtype].is_float;
}

bool x3_dtype_from_name(const char *name, x3_dtype *out)
{
    for (int i = 0; i < X3_N_DTYPES; i++)
        if (strcmp(name, dtypes[i].name) == 0) {
            *out = (x3_dtype)i;
            return true;
        }
    return false;
}

/* ---- elements ---- */

static float float_of(uint32_t bits)
{
    float x;

    memcpy(&x, &bits, sizeof x);
    return x;
}

static uint32_t bits_of(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

float x3_bf16_to_f32(uint16_t bits)
{
    return float_of((uint32_t)bits << 16);
}

float x3_f16_to_f32(uint16_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x8000) << 16, magnitude = (uint32_t)(bits & 0x7FFF) << 13;
    uint32_t result = magnitude + (112u << 23); /* exponent bias 15 to 127 */

    if (magnitude >= 31u << 23) /* infinity or NaN, payload kept */
        result = magnitude | 0x7F800000;
    else if (magnitude < 1u << 23) /* m * 2^-24 = (1 + m/1024) * 2^-14 - 2^-14: no subnormal float on the way */
        result = bits_of(float_of(magnitude + (113u << 23)) - 0x1p-14f);
    return float_of(sign | result);
}

float x3_f8_e4m3_to_f32(uint8_t bits)
{
    uint32_t sign = (uint32_t)(bits & 0x80) << 24, exponent = (bits >> 3) & 15, mantissa = bits & 7;

    if ((bits & 0x7F) == 0x7F)
        return float_of(sign | 0x7FC00000);
    if (exponent == 0)
        return float_of(sign | bits_of((float)mantissa * 0x1p-9f));
    return float_of(sign | (exponent + 120) << 23 | mantissa << 20);
}

float x3_f8_e5m2_to_f32(uint8_t bits)
{
    return x3_f16_to_f32((uint16_t)(bits << 8));
}

float x3_f8_e8m0_to_f32(uint8_t bits)
{
    if (bits == 0xFF)
        return float_of(0x7FC00000);
    return float_of(bits == 0 ? 1u << 22 : (uint32_t)bits << 23); /* 2^-127 is subnormal */
}

uint16_t x3_f32_to_bf16(float x)
{
    uint32_t bits = bits_of(x);

    if ((bits & 0x7FFFFFFF) > 0x7F800000)
        return (uint16_t)(bits >> 16 | 0x40);
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

uint16_t x3_f32_to_f16(float x)
{
    uint32_t bits = bits_of(x), magnitude = bits & 0x7FFFFFFF, result;

    if (magnitude > 0x7F800000)
        result = 0x7E00 | (magnitude >> 13 & 0x3FF);
    else if (magnitude >= 0x477FF000) /* 65520, half way from the largest half to 2^16 */
        result = 0x7C00;
    else if (magnitude < 113u << 23) /* below 2^-14: floats of [0.5, 1) step by 2^-24, as the halves here do */
        result = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
    else
        result = (magnitude - (112u << 23) + 0xFFF + (magnitude >> 13 & 1)) >> 13;
    return (uint16_t)(bits >> 16 & 0x8000) | (uint16_t)result;
}

/* ---- whole ranges ---- */

/* A loop of its own for every type, so that a compiler can inline and vectorize it. */
#define CONVERT(type, expression)         \
    do {                                  \
        const type *x = data;             \
        for (size_t i = 0; i < n; i++)    \
            out[i] = (float)(expression); \
    } while (0)

void x3_dtype_to_f32(x3_dtype dtype, const void *data, size_t n, float *out)
{
    assert(x3_dtype_is_float(dtype));
    if (dtype == X3_F64)
        CONVERT(double, x[i]); /* past the range of a float: infinity (IEC 60559, C11 annex F) */
    else if (dtype == X3_F32)
        memcpy(out, data, n * sizeof *out);
    else if (dtype == X3_F16)
        CONVERT(uint16_t, x3_f16_to_f32(x[i]));
    else if (dtype == X3_BF16)
        CONVERT(uint16_t, x3_bf16_to_f32(x[i]));
    else if (dtype == X3_F8_E4M3)
        CONVERT(uint8_t, x3_f8_e4m3_to_f32(x[i]));
    else if (dtype == X3_F8_E5M2)
        CONVERT(uint8_t, x3_f8_e5m2_to_f32(x[i]));
    else
        CONVERT(uint8_t, x3_f8_e8m0_to_f32(x[i]));
}
