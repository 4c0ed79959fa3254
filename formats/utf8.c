#include "formats/utf8.h"

#include <string.h>

size_t x3_utf8_sequence(const char *text, size_t n, size_t *skip)
{
    const unsigned char *p = (const unsigned char *)text;
    unsigned lead = p[0], low = 0x80, high = 0xBF;
    size_t length, i;

    *skip = 1;
    if (lead < 0x80)
        return 1;
    if (lead < 0xC2 || lead > 0xF4)
        return 0;
    length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
    if (lead == 0xE0)
        low = 0xA0; /* shorter forms exist */
    else if (lead == 0xED)
        high = 0x9F; /* surrogates */
    else if (lead == 0xF0)
        low = 0x90;
    else if (lead == 0xF4)
        high = 0x8F; /* above U+10FFFF */
    for (i = 1; i < length; i++) {
        if (i == n || p[i] < low || p[i] > high) {
            *skip = i;
            return 0;
        }
        low = 0x80;
        high = 0xBF;
    }
    return length;
}

size_t x3_utf8_valid(const char *text, size_t n_bytes)
{
    size_t at = 0, skip;

    while (at < n_bytes) {
        uint64_t word;
        if (n_bytes - at >= 8 && (memcpy(&word, text + at, 8), (word & 0x8080808080808080u) == 0)) {
            at += 8;
            continue;
        }
        size_t length = x3_utf8_sequence(text + at, n_bytes - at, &skip);
        if (length == 0)
            break;
        at += length;
    }
    return at;
}
