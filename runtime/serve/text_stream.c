#include "runtime/serve/text_stream.h"

#include <stdlib.h>
#include <string.h>

#include "formats/utf8.h"

struct x3_text_stream {
    char **stops;
    size_t n_stops;
    x3_text raw;  /* bytes that are not yet characters: fewer than 4 */
    x3_text held; /* valid UTF-8 that may begin a stop string */
    x3_text repaired;
};

x3_status x3_text_stream_create(x3_text_stream **out, const char *const *stops, size_t n_stops, x3_err *err)
{
    x3_text_stream *s = NULL;
    x3_status rc;

    *out = NULL;
    X3_TRY(rc, out, x3_alloc(&s, 1, sizeof *s, err));
    X3_TRY(rc, out, x3_alloc(&s->stops, n_stops, sizeof *s->stops, err));
    for (; s->n_stops < n_stops; s->n_stops++)
        X3_TRY(rc, out, x3_strdup(&s->stops[s->n_stops], stops[s->n_stops], err));
    *out = s;
    s = NULL;
out:
    x3_text_stream_free(s);
    return rc;
}

void x3_text_stream_free(x3_text_stream *s)
{
    if (s == NULL)
        return;
    for (size_t i = 0; i < s->n_stops; i++)
        free(s->stops[i]);
    free(s->stops);
    x3_text_free(&s->raw);
    x3_text_free(&s->held);
    x3_text_free(&s->repaired);
    free(s);
}

size_t x3_text_overlap(const char *text, size_t n_bytes, const char *word, size_t n_word)
{
    for (size_t n = n_word == 0 ? 0 : x3_min_size(n_bytes, n_word - 1); n > 0; n--)
        if (memcmp(text + n_bytes - n, word, n) == 0)
            return n;
    return 0;
}

/* Bytes at the end of `text` that may become one character with bytes to come. */
static size_t unfinished(const char *text, size_t n_bytes)
{
    for (size_t n = 1; n <= 3 && n <= n_bytes; n++) {
        unsigned char c = (unsigned char)text[n_bytes - n];
        if (c < 0x80)
            return 0;
        if (c >= 0xC0) { /* the first byte of a character of so many */
            size_t length = c >= 0xF0 ? 4 : c >= 0xE0 ? 3 : 2;
            char whole[4] = {0};
            if (length <= n || c < 0xC2 || c > 0xF4)
                return 0;
            /* E0 80, ED A0, F0 80, F4 90 begin no character: see what the first two bytes could become */
            memcpy(whole, text + n_bytes - n, n);
            for (size_t i = n; i < length; i++)
                whole[i] = (char)(i == 1 && (c == 0xE0) ? 0xA0 : i == 1 && c == 0xF0 ? 0x90 : 0x80);
            return x3_utf8_valid(whole, length) == length ? n : 0;
        }
    }
    return 0;
}

/* Moves whole characters from raw to held. */
static x3_status take_characters(x3_text_stream *s, size_t n_left, x3_err *err)
{
    x3_view view = {s->raw.items, s->raw.n_items - n_left};
    x3_status rc;

    s->repaired.n_items = 0;
    if (view.n_bytes == 0)
        return X3_OK;
    X3_TRY(rc, out, x3_utf8_repair_string(&view, &s->repaired, err));
    X3_TRY(rc, out, x3_text_put(&s->held, view.data, view.n_bytes, err));
    if (n_left > 0)
        memmove(s->raw.items, s->raw.items + s->raw.n_items - n_left, n_left);
    s->raw.n_items = n_left;
out:
    return rc;
}

x3_status x3_text_stream_put(x3_text_stream *s, const char *bytes, size_t n_bytes, x3_text *out, bool *stopped, x3_err *err)
{
    size_t keep = 0, n;
    x3_status rc;

    *stopped = false;
    X3_TRY(rc, out, x3_text_put(&s->raw, bytes, n_bytes, err));
    X3_TRY(rc, out, take_characters(s, unfinished(s->raw.items, s->raw.n_items), err));
    n = s->held.n_items;
    for (size_t i = 0; i < s->n_stops; i++) {
        const char *found = s->held.n_items == 0 ? NULL : memmem(s->held.items, s->held.n_items, s->stops[i], strlen(s->stops[i]));
        if (found != NULL) {
            n = x3_min_size(n, (size_t)(found - s->held.items));
            *stopped = true;
        }
    }
    for (size_t i = 0; i < s->n_stops && !*stopped && n > 0; i++)
        keep = x3_max_size(keep, x3_text_overlap(s->held.items, n, s->stops[i], strlen(s->stops[i])));
    X3_TRY(rc, out, x3_text_put(out, s->held.items, n - keep, err));
    if (n > keep && keep > 0)
        memmove(s->held.items, s->held.items + n - keep, keep);
    s->held.n_items = keep;
    if (*stopped)
        s->raw.n_items = 0;
out:
    return rc;
}

size_t x3_text_stream_n_held(const x3_text_stream *s)
{
    return s->raw.n_items + s->held.n_items;
}

x3_status x3_text_stream_end(x3_text_stream *s, x3_text *out, x3_err *err)
{
    x3_status rc;

    X3_TRY(rc, out, take_characters(s, 0, err));
    X3_TRY(rc, out, x3_text_put(out, s->held.items, s->held.n_items, err));
    s->held.n_items = 0;
out:
    return rc;
}
