#include "runtime/tokenizer/unicode.h"

#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

x3_status x3_text_put(x3_text *text, const void *data, size_t n_bytes, x3_err *err)
{
    uint64_t need;

    if (x3_add_overflows(text->n_items, n_bytes, &need) || need > PTRDIFF_MAX)
        return x3_fail(err, X3_ERR_MEMORY, "a text of more than %zu bytes", text->n_items);
    x3_status rc = x3_grow(&text->items, &text->capacity, need, 1, err);
    if (rc == X3_OK && n_bytes > 0) {
        memcpy(text->items + text->n_items, data, n_bytes);
        text->n_items = need;
    }
    return rc;
}

void x3_text_free(x3_text *text)
{
    free(text->items);
    *text = (x3_text){0};
}

/* ---- UTF-8 ---- */

uint32_t x3_utf8_decode(const char *text, size_t n_bytes, size_t *length)
{
    const unsigned char *p = (const unsigned char *)text;

    if (p[0] < 0x80 || n_bytes < 2) {
        *length = 1;
        return p[0];
    }
    if (p[0] < 0xE0 || n_bytes < 3) {
        *length = 2;
        return (p[0] & 0x1Fu) << 6 | (p[1] & 0x3Fu);
    }
    if (p[0] < 0xF0 || n_bytes < 4) {
        *length = 3;
        return (p[0] & 0x0Fu) << 12 | (p[1] & 0x3Fu) << 6 | (p[2] & 0x3Fu);
    }
    *length = 4;
    return (p[0] & 0x07u) << 18 | (p[1] & 0x3Fu) << 12 | (p[2] & 0x3Fu) << 6 | (p[3] & 0x3Fu);
}

size_t x3_utf8_before(const char *text, size_t at)
{
    do
        at--;
    while (at > 0 && ((unsigned char)text[at] & 0xC0) == 0x80);
    return at;
}

size_t x3_utf8_encode(uint32_t cp, char out[4])
{
    return (size_t)utf8proc_encode_char((utf8proc_int32_t)cp, (utf8proc_uint8_t *)out);
}

x3_status x3_utf8_repair(x3_view *view, x3_text *buffer, x3_err *err)
{
    x3_status rc = X3_OK;
    size_t at = 0;

    buffer->n_items = 0;
    for (;;) {
        size_t valid = x3_utf8_valid(view->data + at, view->n_bytes - at), skip;
        if (at == 0 && valid == view->n_bytes)
            return X3_OK;
        X3_TRY(rc, out, x3_text_put(buffer, view->data + at, valid, err));
        at += valid;
        if (at == view->n_bytes)
            break;
        x3_utf8_sequence(view->data + at, view->n_bytes - at, &skip);
        X3_TRY(rc, out, x3_text_put(buffer, "\xEF\xBF\xBD", 3, err));
        at += skip;
    }
    *view = (x3_view){buffer->items, buffer->n_items};
out:
    return rc;
}

x3_status x3_utf8_repair_string(x3_view *view, x3_text *buffer, x3_err *err)
{
    x3_text whole = {0};
    x3_status rc;

    X3_TRY(rc, out, x3_utf8_repair(view, buffer, err));
    if (view->n_bytes == 0 || memchr(view->data, '\0', view->n_bytes) == NULL)
        return X3_OK;
    for (size_t at = 0; at < view->n_bytes; at++) {
        bool is_nul = view->data[at] == '\0';
        X3_TRY(rc, out, x3_text_put(&whole, is_nul ? "\xEF\xBF\xBD" : view->data + at, is_nul ? 3 : 1, err));
    }
    x3_text_free(buffer);
    *buffer = whole;
    *view = (x3_view){whole.items, whole.n_items};
    return X3_OK;
out:
    x3_text_free(&whole);
    return rc;
}

bool x3_is_space(uint32_t cp)
{
    return (cp >= 0x9 && cp <= 0xD) || cp == 0x20 || cp == 0x85 || cp == 0xA0 || cp == 0x1680 ||
           (cp >= 0x2000 && cp <= 0x200A) || cp == 0x2028 || cp == 0x2029 || cp == 0x202F || cp == 0x205F ||
           cp == 0x3000;
}

bool x3_is_numeric(uint32_t cp)
{
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)cp);

    return category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL || category == UTF8PROC_CATEGORY_NO;
}

/* ---- normalization form C ---- */

/* Everything below U+0300 is a starter, composed already, and never the second of a composing pair. */
#define FIRST_ACTIVE_LEAD 0xCC /* the lead byte of U+0300 */

/* Code points that take part in normalization (a combining class, or a composition) since Unicode 10 to 15. The crate
 * unicode-normalization-alignments 0.1.12 does not know them: to it they are starters that compose with nothing. */
static const uint32_t newer[][2] = {
    {0x7FD, 0x7FD},     {0x898, 0x89F},     {0x8CA, 0x8D3},     {0x9FE, 0x9FE},     {0xC3C, 0xC3C},
    {0xD3B, 0xD3C},     {0xEBA, 0xEBA},     {0x1715, 0x1715},   {0x1ABF, 0x1ACE},   {0x1DF6, 0x1DFA},
    {0xA82C, 0xA82C},   {0x10D24, 0x10D27}, {0x10EAB, 0x10EAC}, {0x10EFD, 0x10EFF}, {0x10F46, 0x10F50},
    {0x10F82, 0x10F85}, {0x11070, 0x11070}, {0x1133B, 0x1133B}, {0x1145E, 0x1145E}, {0x11839, 0x1183A},
    {0x11930, 0x11930}, {0x11935, 0x11935}, {0x11938, 0x11938}, {0x1193D, 0x1193E}, {0x11943, 0x11943},
    {0x119E0, 0x119E0}, {0x11A34, 0x11A34}, {0x11A47, 0x11A47}, {0x11A99, 0x11A99}, {0x11D42, 0x11D42},
    {0x11D44, 0x11D45}, {0x11D97, 0x11D97}, {0x11F41, 0x11F42}, {0x16FF0, 0x16FF1}, {0x1E08F, 0x1E08F},
    {0x1E130, 0x1E136}, {0x1E2AE, 0x1E2AE}, {0x1E2EC, 0x1E2EF}, {0x1E4EC, 0x1E4EF},
};

/* A starter that composes with nothing, whatever utf8proc thinks of it. */
static bool is_barrier(uint32_t cp)
{
    size_t low = 0, high = sizeof newer / sizeof newer[0];

    if (cp == 0x11A7) /* utf8proc 2.8 takes the code point before the first trailing jamo for one of them */
        return true;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (cp > newer[middle][1])
            low = middle + 1;
        else
            high = middle;
    }
    return low < sizeof newer / sizeof newer[0] && cp >= newer[low][0];
}

/* Sure to stand in a normalized text whatever its neighbours are. A false "no" only costs time. */
static bool is_inert(uint32_t cp)
{
    const utf8proc_property_t *p = utf8proc_get_property((utf8proc_int32_t)cp);
    bool composes_with_previous = p->comb_index != UINT16_MAX && p->comb_index >= 0x8000;
    bool is_jamo = cp >= 0x1160 && cp <= 0x11FF;

    return p->combining_class == 0 && !composes_with_previous && !is_jamo &&
           (p->decomp_seqindex == UINT16_MAX || p->decomp_type != 0);
}

struct composer {
    utf8proc_int32_t *cps, *sorted; /* decomposed text of one stretch; room for sorting */
    size_t n_cps, cps_capacity, sorted_capacity;
    x3_text *out;
    x3_err *err;
};

static unsigned class_of(utf8proc_int32_t cp)
{
    return utf8proc_get_property(cp)->combining_class;
}

/* Canonical ordering of the marks cps[0 .. n): stable, by combining class. Counting, because utf8proc's own ordering
 * is quadratic in a run of marks. */
static x3_status order_marks(struct composer *c, utf8proc_int32_t *cps, size_t n)
{
    size_t start[257] = {0};
    x3_status rc = x3_grow(&c->sorted, &c->sorted_capacity, n, sizeof *c->sorted, c->err);

    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < n; i++)
        start[class_of(cps[i]) + 1]++;
    for (size_t k = 1; k < 257; k++)
        start[k] += start[k - 1];
    for (size_t i = 0; i < n; i++)
        c->sorted[start[class_of(cps[i])]++] = cps[i];
    memcpy(cps, c->sorted, n * sizeof *cps);
    return X3_OK;
}

/* Orders, composes and writes what has been collected. */
static x3_status flush_composer(struct composer *c)
{
    x3_status rc = X3_OK;
    utf8proc_ssize_t n;

    for (size_t i = 0, end; i < c->n_cps; i = end) {
        bool sorted = true;
        for (end = i; end < c->n_cps && class_of(c->cps[end]) != 0; end++)
            sorted = sorted && (end == i || class_of(c->cps[end - 1]) <= class_of(c->cps[end]));
        if (!sorted)
            X3_TRY(rc, out, order_marks(c, c->cps + i, end - i));
        end += end == i;
    }
    n = utf8proc_normalize_utf32(c->cps, (utf8proc_ssize_t)c->n_cps, UTF8PROC_STABLE | UTF8PROC_COMPOSE);
    for (utf8proc_ssize_t i = 0; i < n; i++) {
        char bytes[4];
        X3_TRY(rc, out, x3_text_put(c->out, bytes, x3_utf8_encode((uint32_t)c->cps[i], bytes), c->err));
    }
    c->n_cps = 0;
out:
    return rc;
}

static x3_status add_decomposed(struct composer *c, uint32_t cp)
{
    int last_boundclass = 0;
    x3_status rc;

    for (size_t room = 4;; room *= 2) {
        rc = x3_grow(&c->cps, &c->cps_capacity, c->n_cps + room, sizeof *c->cps, c->err);
        if (rc != X3_OK)
            return rc;
        utf8proc_ssize_t n = utf8proc_decompose_char((utf8proc_int32_t)cp, c->cps + c->n_cps, (utf8proc_ssize_t)room,
                                                     UTF8PROC_STABLE | UTF8PROC_DECOMPOSE, &last_boundclass);
        if (n < 0)
            return x3_fail(c->err, X3_ERR_INPUT, "U+%04X cannot be decomposed", (unsigned)cp);
        if ((size_t)n <= room) {
            c->n_cps += (size_t)n;
            return X3_OK;
        }
    }
}

static x3_status compose_stretch(struct composer *c, const char *text, size_t n_bytes)
{
    x3_status rc = X3_OK;
    bool inert = true;
    size_t length;

    for (size_t at = 0; at < n_bytes && inert; at += length)
        inert = is_inert(x3_utf8_decode(text + at, n_bytes - at, &length));
    if (inert)
        return x3_text_put(c->out, text, n_bytes, c->err);
    for (size_t at = 0; at < n_bytes; at += length) {
        uint32_t cp = x3_utf8_decode(text + at, n_bytes - at, &length);
        if (!is_barrier(cp)) {
            X3_TRY(rc, out, add_decomposed(c, cp));
            continue;
        }
        X3_TRY(rc, out, flush_composer(c));
        X3_TRY(rc, out, x3_text_put(c->out, text + at, length, c->err));
    }
    rc = flush_composer(c);
out:
    return rc;
}

/* First byte at or after `at` of a character of U+0300 or above. */
static size_t find_active(const char *text, size_t n_bytes, size_t at)
{
    while (at < n_bytes && (unsigned char)text[at] < FIRST_ACTIVE_LEAD)
        at++;
    return at;
}

x3_status x3_nfc(x3_view *view, x3_text *buffer, x3_err *err)
{
    struct composer c = {.out = buffer, .err = err};
    const char *text = view->data;
    size_t n = view->n_bytes, at = 0, active = find_active(text, n, 0);
    x3_status rc = X3_OK;

    if (active == n)
        return X3_OK;
    buffer->n_items = 0;
    while (active < n) {
        /* The character before may compose with the first active one; the next inactive one begins anew. */
        size_t start = active > at ? x3_utf8_before(text, active) : active, end = active;
        while (end < n && ((unsigned char)text[end] >= FIRST_ACTIVE_LEAD || ((unsigned char)text[end] & 0xC0) == 0x80))
            end++;
        X3_TRY(rc, out, x3_text_put(buffer, text + at, start - at, err));
        X3_TRY(rc, out, compose_stretch(&c, text + start, end - start));
        at = end;
        active = find_active(text, n, at);
    }
    X3_TRY(rc, out, x3_text_put(buffer, text + at, n - at, err));
    *view = (x3_view){buffer->items, buffer->n_items};
out:
    free(c.cps);
    free(c.sorted);
    return rc;
}
