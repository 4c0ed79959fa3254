#include "runtime/jinja/jinja_internal.h"

#include <string.h>
#include <utf8proc.h>

#include "runtime/tokenizer/unicode.h"

/* Characters and text as Python's str has them: case with full mappings, white space, searching, splitting. Offsets
 * count bytes in here, code points outside. */

typedef struct range {
    uint32_t first, last;
} range;

static bool is_in(const range *ranges, size_t n, uint32_t cp)
{
    for (size_t i = 0; i < n && ranges[i].first <= cp; i++)
        if (cp <= ranges[i].last)
            return true;
    return false;
}

#define IS_IN(ranges, cp) is_in(ranges, sizeof(ranges) / sizeof(ranges)[0], cp)

/* ---- properties ---- */

bool x3_jtext_is_space(uint32_t cp)
{
    return x3_is_space(cp) || (cp >= 0x1C && cp <= 0x1F);
}

static utf8proc_category_t category(uint32_t cp)
{
    return utf8proc_category((utf8proc_int32_t)cp);
}

bool x3_jtext_is_printable(uint32_t cp)
{
    utf8proc_category_t c;

    if (cp < 0x7F)
        return cp >= 0x20;
    c = category(cp);
    return c != UTF8PROC_CATEGORY_CN && c < UTF8PROC_CATEGORY_ZS;
}

static bool is_letter(utf8proc_category_t c)
{
    return c >= UTF8PROC_CATEGORY_LU && c <= UTF8PROC_CATEGORY_LO;
}

bool x3_jtext_is_name(uint32_t cp, bool first)
{
    utf8proc_category_t c;

    if (cp < 0x80)
        return cp == '_' || ((cp | 0x20) >= 'a' && (cp | 0x20) <= 'z') || (!first && cp >= '0' && cp <= '9');
    c = category(cp);
    return is_letter(c) || c == UTF8PROC_CATEGORY_NL ||
           (!first && (c == UTF8PROC_CATEGORY_MN || c == UTF8PROC_CATEGORY_MC || c == UTF8PROC_CATEGORY_ND ||
                       c == UTF8PROC_CATEGORY_PC));
}

/* Other_Lowercase and Other_Uppercase */
static bool is_lower(uint32_t cp)
{
    static const range other[] = {
        {0xAA, 0xAA}, {0xBA, 0xBA}, {0x2B0, 0x2B8}, {0x2C0, 0x2C1}, {0x2E0, 0x2E4}, {0x345, 0x345}, {0x37A, 0x37A},
        {0x1D2C, 0x1D6A}, {0x1D78, 0x1D78}, {0x1D9B, 0x1DBF}, {0x2071, 0x2071}, {0x207F, 0x207F}, {0x2090, 0x209C},
        {0x2170, 0x217F}, {0x24D0, 0x24E9}, {0x2C7C, 0x2C7D}, {0xA69C, 0xA69D}, {0xA770, 0xA770}, {0xA7F8, 0xA7F9},
        {0xAB5C, 0xAB5F}, {0x10780, 0x10780}, {0x10783, 0x10785}, {0x10787, 0x107B0}, {0x107B2, 0x107BA}};

    if (cp < 0x80)
        return cp >= 'a' && cp <= 'z';
    return category(cp) == UTF8PROC_CATEGORY_LL || IS_IN(other, cp);
}

static bool is_upper(uint32_t cp)
{
    static const range other[] = {
        {0x2160, 0x216F}, {0x24B6, 0x24CF}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}};

    if (cp < 0x80)
        return cp >= 'A' && cp <= 'Z';
    return category(cp) == UTF8PROC_CATEGORY_LU || IS_IN(other, cp);
}

static bool is_digit(uint32_t cp)
{
    static const range other[] = {
        {0xB2, 0xB3}, {0xB9, 0xB9}, {0x1369, 0x1371}, {0x19DA, 0x19DA}, {0x2070, 0x2070}, {0x2074, 0x2079},
        {0x2080, 0x2089}, {0x2460, 0x2468}, {0x2474, 0x247C}, {0x2488, 0x2490}, {0x24EA, 0x24EA}, {0x24F5, 0x24FD},
        {0x24FF, 0x24FF}, {0x2776, 0x277E}, {0x2780, 0x2788}, {0x278A, 0x2792}, {0x10A40, 0x10A43},
        {0x10E60, 0x10E68}, {0x11052, 0x1105A}, {0x1F100, 0x1F10A}};

    return category(cp) == UTF8PROC_CATEGORY_ND || IS_IN(other, cp);
}

bool x3_jtext_is(uint32_t cp, char is)
{
    utf8proc_category_t c = category(cp);

    if (is == 'l')
        return is_lower(cp);
    if (is == 'u')
        return is_upper(cp);
    if (is == 't')
        return c == UTF8PROC_CATEGORY_LT;
    if (is == 'd')
        return is_digit(cp);
    if (is == 'D')
        return c == UTF8PROC_CATEGORY_ND;
    if (is == 'N')
        return x3_is_numeric(cp);
    if (is == 'w' && cp == '_')
        return true;
    return is_letter(c) || (is != 'a' && x3_is_numeric(cp));
}

static bool is_cased(uint32_t cp)
{
    return is_lower(cp) || is_upper(cp) || category(cp) == UTF8PROC_CATEGORY_LT;
}

static bool is_case_ignorable(uint32_t cp)
{
    static const range punctuation[] = {
        {0x27, 0x27}, {0x2E, 0x2E}, {0x3A, 0x3A}, {0xB7, 0xB7}, {0x387, 0x387}, {0x55F, 0x55F}, {0x5F4, 0x5F4},
        {0x2018, 0x2019}, {0x2024, 0x2024}, {0x2027, 0x2027}, {0xFE13, 0xFE13}, {0xFE52, 0xFE52}, {0xFE55, 0xFE55},
        {0xFF07, 0xFF07}, {0xFF0E, 0xFF0E}, {0xFF1A, 0xFF1A}};
    utf8proc_category_t c = category(cp);

    return c == UTF8PROC_CATEGORY_MN || c == UTF8PROC_CATEGORY_ME || c == UTF8PROC_CATEGORY_CF ||
           c == UTF8PROC_CATEGORY_LM || c == UTF8PROC_CATEGORY_SK || IS_IN(punctuation, cp);
}

/* ---- case ---- */

/* SpecialCasing of Unicode: capitals of more than one letter, which utf8proc lacks. simple_title: its title form is the
 * one letter that utf8proc knows. */
static const struct special {
    uint16_t cp, upper[3];
    bool simple_title;
} specials[] = {
    {0x00DF, {0x53, 0x53}, 0}, {0x0149, {0x2BC, 0x4E}, 0}, {0x01F0, {0x4A, 0x30C}, 0},
    {0x0390, {0x399, 0x308, 0x301}, 0}, {0x03B0, {0x3A5, 0x308, 0x301}, 0}, {0x0587, {0x535, 0x552}, 0},
    {0x1E96, {0x48, 0x331}, 0}, {0x1E97, {0x54, 0x308}, 0}, {0x1E98, {0x57, 0x30A}, 0}, {0x1E99, {0x59, 0x30A}, 0},
    {0x1E9A, {0x41, 0x2BE}, 0}, {0x1F50, {0x3A5, 0x313}, 0}, {0x1F52, {0x3A5, 0x313, 0x300}, 0},
    {0x1F54, {0x3A5, 0x313, 0x301}, 0}, {0x1F56, {0x3A5, 0x313, 0x342}, 0}, {0x1FB2, {0x1FBA, 0x399}, 0},
    {0x1FB3, {0x391, 0x399}, 1}, {0x1FB4, {0x386, 0x399}, 0}, {0x1FB6, {0x391, 0x342}, 0},
    {0x1FB7, {0x391, 0x342, 0x399}, 0}, {0x1FBC, {0x391, 0x399}, 1}, {0x1FC2, {0x1FCA, 0x399}, 0},
    {0x1FC3, {0x397, 0x399}, 1}, {0x1FC4, {0x389, 0x399}, 0}, {0x1FC6, {0x397, 0x342}, 0},
    {0x1FC7, {0x397, 0x342, 0x399}, 0}, {0x1FCC, {0x397, 0x399}, 1}, {0x1FD2, {0x399, 0x308, 0x300}, 0},
    {0x1FD3, {0x399, 0x308, 0x301}, 0}, {0x1FD6, {0x399, 0x342}, 0}, {0x1FD7, {0x399, 0x308, 0x342}, 0},
    {0x1FE2, {0x3A5, 0x308, 0x300}, 0}, {0x1FE3, {0x3A5, 0x308, 0x301}, 0}, {0x1FE4, {0x3A1, 0x313}, 0},
    {0x1FE6, {0x3A5, 0x342}, 0}, {0x1FE7, {0x3A5, 0x308, 0x342}, 0}, {0x1FF2, {0x1FFA, 0x399}, 0},
    {0x1FF3, {0x3A9, 0x399}, 1}, {0x1FF4, {0x38F, 0x399}, 0}, {0x1FF6, {0x3A9, 0x342}, 0},
    {0x1FF7, {0x3A9, 0x342, 0x399}, 0}, {0x1FFC, {0x3A9, 0x399}, 1}, {0xFB00, {0x46, 0x46}, 0},
    {0xFB01, {0x46, 0x49}, 0}, {0xFB02, {0x46, 0x4C}, 0}, {0xFB03, {0x46, 0x46, 0x49}, 0},
    {0xFB04, {0x46, 0x46, 0x4C}, 0}, {0xFB05, {0x53, 0x54}, 0}, {0xFB06, {0x53, 0x54}, 0},
    {0xFB13, {0x544, 0x546}, 0}, {0xFB14, {0x544, 0x535}, 0}, {0xFB15, {0x544, 0x53B}, 0},
    {0xFB16, {0x54E, 0x546}, 0}, {0xFB17, {0x544, 0x53D}, 0},
};

/* Full capital or title form; returns the number of code points. */
static int to_upper(uint32_t cp, bool title, uint32_t out[3])
{
    const struct special *s = specials, *end = specials + sizeof specials / sizeof specials[0];
    int n = 0;

    if (cp < 0x80) {
        out[0] = cp >= 'a' && cp <= 'z' ? cp - 0x20 : cp;
        return 1;
    }
    while (s < end && s->cp < cp)
        s++;
    bool is_special = s < end && s->cp == cp && !(title && s->simple_title);
    for (; is_special && n < 3 && s->upper[n] != 0; n++) {
        out[n] = s->upper[n];
        if (title && n > 0 && cp != 0x149)
            out[n] = out[n] == 0x399 ? 0x345 : (uint32_t)utf8proc_tolower((utf8proc_int32_t)out[n]);
    }
    if (n > 0)
        return n;
    if (!title && cp >= 0x1F80 && cp <= 0x1FAF) { /* Greek with iota subscript, in rows of eight */
        static const uint16_t row[] = {0x1F08, 0x1F28, 0x1F68};
        out[0] = row[(cp - 0x1F80) >> 4] + (cp & 7);
        out[1] = 0x399;
        return 2;
    }
    out[0] = (uint32_t)(title ? utf8proc_totitle((utf8proc_int32_t)cp) : utf8proc_toupper((utf8proc_int32_t)cp));
    return 1;
}

/* A capital sigma that ends a word. */
static bool is_final_sigma(const x3_jstr *s, size_t at)
{
    size_t i = at, length;
    uint32_t cp = 0;
    bool found = false;

    while (i > 0 && !found) {
        i = x3_utf8_before(s->data, i);
        cp = x3_utf8_decode(s->data + i, s->n_bytes - i, &length);
        found = !is_case_ignorable(cp);
    }
    if (!found || !is_cased(cp))
        return false;
    for (i = at + 2; i < s->n_bytes; i += length) {
        cp = x3_utf8_decode(s->data + i, s->n_bytes - i, &length);
        if (!is_case_ignorable(cp))
            return !is_cased(cp);
    }
    return true;
}

static int to_lower(const x3_jstr *s, size_t at, uint32_t cp, uint32_t out[3])
{
    out[0] = cp < 0x80 ? (cp >= 'A' && cp <= 'Z' ? cp + 0x20 : cp) : (uint32_t)utf8proc_tolower((utf8proc_int32_t)cp);
    if (cp == 0x3A3)
        out[0] = is_final_sigma(s, at) ? 0x3C2 : 0x3C3;
    if (cp != 0x130)
        return 1;
    out[0] = 'i';
    out[1] = 0x307;
    return 2;
}

static int to_fold(uint32_t cp, uint32_t out[4])
{
    utf8proc_int32_t folded[8];
    int last = 0;
    utf8proc_ssize_t n = utf8proc_decompose_char((utf8proc_int32_t)cp, folded, 8, UTF8PROC_CASEFOLD, &last);

    for (int i = 0; i < (int)n && i < 4; i++)
        out[i] = (uint32_t)folded[i];
    return n < 4 ? (int)n : 4;
}

x3_status x3_jtext_case(x3_jrun *run, const x3_jstr *s, char to, x3_jval *out)
{
    bool first = true, after_cased = false;
    x3_jbuf buf = {0};
    size_t length;

    TRY(x3_jrun_steps(run, s->n_bytes / 16));
    for (size_t at = 0; at < s->n_bytes; at += length, first = false) {
        uint32_t cp = x3_utf8_decode(s->data + at, s->n_bytes - at, &length), made[4];
        int n;
        if (to == 'f')
            n = to_fold(cp, made);
        else if (to == 'u' || (to == 's' && is_lower(cp)))
            n = to_upper(cp, false, made);
        else if ((to == 't' && !after_cased) || (to == 'c' && first))
            n = to_upper(cp, true, made);
        else if (to == 's' && !is_upper(cp))
            n = (made[0] = cp, 1);
        else
            n = to_lower(s, at, cp, made);
        after_cased = to == 't' && is_cased(cp);
        for (int i = 0; i < n; i++)
            TRY(x3_jbuf_cp(run, &buf, made[i]));
    }
    TRY(x3_jstr_of(run, &buf, out));
    return s->is_markup ? x3_jstr_mark(run, *out, true, out) : X3_OK;
}

/* ---- places ---- */

size_t x3_jtext_offset(const x3_jstr *s, size_t at)
{
    size_t offset = 0;

    if (s->n_bytes == s->n_chars || at == 0)
        return at;
    if (at >= s->n_chars)
        return s->n_bytes;
    while (at > 0) {
        offset++;
        at -= ((unsigned char)s->data[offset] & 0xC0) != 0x80;
    }
    return offset;
}

size_t x3_jtext_find(const x3_jstr *s, size_t from, size_t to, const x3_jstr *part)
{
    const char *at;

    if (part->n_bytes == 0)
        return from <= to ? from : SIZE_MAX;
    if (from >= to)
        return SIZE_MAX;
    at = memmem(s->data + from, to - from, part->data, part->n_bytes);
    return at == NULL ? SIZE_MAX : (size_t)(at - s->data);
}

x3_status x3_jtext_rfind(x3_jrun *run, const x3_jstr *s, size_t from, size_t to, const x3_jstr *part, size_t *out)
{
    size_t n = part->n_bytes;

    *out = SIZE_MAX;
    if (from > to || to - from < n)
        return X3_OK;
    TRY(x3_jrun_steps(run, (to - from) / 64));
    for (size_t at = to - n + 1; at-- > from && *out == SIZE_MAX;) {
        if (n > 0 && (s->data[at] != part->data[0] || s->data[at + n - 1] != part->data[n - 1]))
            continue;
        TRY(x3_jrun_steps(run, n / 64)); /* texts made to nearly match cost what they cost */
        if (n == 0 || memcmp(s->data + at, part->data, n) == 0)
            *out = at;
    }
    return X3_OK;
}

/* ---- strip, replace, split ---- */

static x3_status piece(x3_jrun *run, const x3_jstr *s, size_t from, size_t to, x3_jval *out)
{
    TRY(x3_jstr_view(run, s->data + from, to - from, out));
    return s->is_markup ? x3_jstr_mark(run, *out, true, out) : X3_OK;
}

static bool is_stripped(const x3_jstr *chars, const char *c, size_t length, uint32_t cp)
{
    /* UTF-8 is self-synchronizing: a character found in `chars` is one of them */
    return chars == NULL ? x3_jtext_is_space(cp) : memmem(chars->data, chars->n_bytes, c, length) != NULL;
}

x3_status x3_jtext_strip(x3_jrun *run, const x3_jstr *s, const x3_jstr *chars, bool left, bool right, x3_jval *out)
{
    size_t from = 0, to = s->n_bytes, length, cost = chars == NULL ? 0 : chars->n_bytes / 64;

    while (left && from < to) {
        uint32_t cp = x3_utf8_decode(s->data + from, to - from, &length);
        TRY(x3_jrun_steps(run, cost));
        if (!is_stripped(chars, s->data + from, length, cp))
            break;
        from += length;
    }
    while (right && from < to) {
        size_t at = x3_utf8_before(s->data, to);
        uint32_t cp = x3_utf8_decode(s->data + at, to - at, &length);
        TRY(x3_jrun_steps(run, cost));
        if (!is_stripped(chars, s->data + at, length, cp))
            break;
        to = at;
    }
    return piece(run, s, from, to, out);
}

x3_status x3_jtext_replace(x3_jrun *run, const x3_jstr *s, const x3_jstr *old, const x3_jstr *fresh, int64_t count,
                           x3_jval *out)
{
    size_t at = 0, found, length;
    x3_jbuf buf = {0};

    TRY(x3_jrun_steps(run, s->n_bytes / 64));
    for (; count != 0; count -= count > 0) {
        if (old->n_bytes == 0) { /* before every character, and at the end */
            TRY(x3_jbuf_put(run, &buf, fresh->data, fresh->n_bytes));
            if (at == s->n_bytes)
                break;
            x3_utf8_decode(s->data + at, s->n_bytes - at, &length);
            TRY(x3_jbuf_put(run, &buf, s->data + at, length));
            at += length;
            TRY(x3_jrun_steps(run, 1));
            continue;
        }
        found = x3_jtext_find(s, at, s->n_bytes, old);
        if (found == SIZE_MAX)
            break;
        TRY(x3_jbuf_put(run, &buf, s->data + at, found - at));
        TRY(x3_jbuf_put(run, &buf, fresh->data, fresh->n_bytes));
        TRY(x3_jrun_steps(run, 1));
        at = found + old->n_bytes;
    }
    if (at == 0 && buf.n_bytes == 0)
        return piece(run, s, 0, s->n_bytes, out);
    TRY(x3_jbuf_put(run, &buf, s->data + at, s->n_bytes - at));
    TRY(x3_jstr_of(run, &buf, out));
    return s->is_markup ? x3_jstr_mark(run, *out, true, out) : X3_OK;
}

static x3_status push_piece(x3_jrun *run, x3_jlist *list, const x3_jstr *s, size_t from, size_t to)
{
    x3_jval v;

    TRY(piece(run, s, from, to, &v));
    return x3_jlist_push(run, list, v);
}

/* From `at` over characters that are (not) white space, forwards or backwards. */
static size_t skip(const x3_jstr *s, size_t at, bool space, bool backwards)
{
    size_t length;

    while (backwards ? at > 0 : at < s->n_bytes) {
        size_t c = backwards ? x3_utf8_before(s->data, at) : at;
        if (x3_jtext_is_space(x3_utf8_decode(s->data + c, s->n_bytes - c, &length)) != space)
            break;
        at = backwards ? c : c + length;
    }
    return at;
}

static void reverse(x3_jlist *list)
{
    for (size_t i = 0, k = list->n_items; i + 1 < k; i++) {
        x3_jval v = list->items[i];
        list->items[i] = list->items[--k];
        list->items[k] = v;
    }
}

static x3_status split_words(x3_jrun *run, const x3_jstr *s, int64_t max, x3_jlist *out)
{
    size_t at = skip(s, 0, true, false);

    for (; at < s->n_bytes && max != 0; max -= max > 0) {
        size_t end = skip(s, at, false, false);
        TRY(push_piece(run, out, s, at, end));
        at = skip(s, end, true, false);
    }
    if (at < s->n_bytes) /* the rest keeps its white space at the end */
        TRY(push_piece(run, out, s, at, s->n_bytes));
    return X3_OK;
}

static x3_status rsplit_words(x3_jrun *run, const x3_jstr *s, int64_t max, x3_jlist *out)
{
    size_t end = skip(s, s->n_bytes, true, true);

    for (; end > 0 && max != 0; max -= max > 0) {
        size_t start = skip(s, end, false, true);
        TRY(push_piece(run, out, s, start, end));
        end = skip(s, start, true, true);
    }
    if (end > 0)
        TRY(push_piece(run, out, s, 0, end));
    reverse(out);
    return X3_OK;
}

x3_status x3_jtext_split(x3_jrun *run, const x3_jstr *s, const x3_jstr *separator, int64_t max, bool from_right,
                         x3_jlist **out)
{
    size_t at = 0, end = s->n_bytes, found;

    TRY(x3_jlist_new(run, 0, out));
    TRY(x3_jrun_steps(run, s->n_bytes / 16));
    if (separator == NULL)
        return from_right ? rsplit_words(run, s, max, *out) : split_words(run, s, max, *out);
    if (separator->n_bytes == 0)
        return x3_jrun_fail(run, "empty separator");
    for (; max != 0; max -= max > 0) {
        TRY(x3_jrun_steps(run, 1));
        found = from_right ? 0 : x3_jtext_find(s, at, s->n_bytes, separator);
        if (from_right)
            TRY(x3_jtext_rfind(run, s, 0, end, separator, &found));
        if (found == SIZE_MAX)
            break;
        TRY(push_piece(run, *out, s, from_right ? found + separator->n_bytes : at, from_right ? end : found));
        at = found + separator->n_bytes;
        end = found;
    }
    TRY(push_piece(run, *out, s, from_right ? 0 : at, from_right ? end : s->n_bytes));
    if (from_right)
        reverse(*out);
    return X3_OK;
}

static bool is_line_end(uint32_t cp)
{
    return (cp >= '\n' && cp <= '\r') || (cp >= 0x1C && cp <= 0x1E) || cp == 0x85 || cp == 0x2028 || cp == 0x2029;
}

x3_status x3_jtext_lines(x3_jrun *run, const x3_jstr *s, bool keep_ends, x3_jlist **out)
{
    size_t start = 0, length;

    TRY(x3_jlist_new(run, 0, out));
    TRY(x3_jrun_steps(run, s->n_bytes / 16));
    for (size_t at = 0; at < s->n_bytes; at += length) {
        uint32_t cp = x3_utf8_decode(s->data + at, s->n_bytes - at, &length);
        if (!is_line_end(cp))
            continue;
        length += cp == '\r' && at + 1 < s->n_bytes && s->data[at + 1] == '\n';
        TRY(push_piece(run, *out, s, start, keep_ends ? at + length : at));
        start = at + length;
    }
    return start < s->n_bytes ? push_piece(run, *out, s, start, s->n_bytes) : X3_OK;
}

x3_status x3_jtext_repeat(x3_jrun *run, const x3_jstr *s, int64_t n, x3_jval *out)
{
    x3_jbuf buf = {0};
    uint64_t bytes;

    if (x3_mul_overflows(s->n_bytes, n < 0 ? 0 : (uint64_t)n, &bytes) || bytes > run->bytes_left)
        return x3_jrun_fail(run, "the template needs more memory than it is allowed");
    for (int64_t i = 0; i < n && s->n_bytes > 0; i++)
        TRY(x3_jbuf_put(run, &buf, s->data, s->n_bytes));
    TRY(x3_jstr_of(run, &buf, out));
    return s->is_markup ? x3_jstr_mark(run, *out, true, out) : X3_OK;
}
