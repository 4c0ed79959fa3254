#include "formats/safetensors.h"

#include <fcntl.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include "formats/io.h"
#include "tests/test.h"

#define INDEX "model.safetensors.index.json"

/* ---- files and expectations ---- */

/* A file of a header length, the header and n_data bytes 0, 1, 2, …, 255, 0, … */
static const char *write_shard(const char *dir, const char *name, const char *header, size_t n_data)
{
    const char *path = x3_test_path(dir, name);
    uint64_t n = strlen(header);
    unsigned char *bytes;
    x3_err err = {0};

    CHECK_OK(x3_alloc(&bytes, 8 + n + n_data, 1, &err), &err);
    memcpy(bytes, &n, 8);
    memcpy(bytes + 8, header, n);
    for (size_t i = 0; i < n_data; i++)
        bytes[8 + n + i] = (unsigned char)i;
    CHECK_OK(x3_write_file(path, bytes, 8 + n + n_data, &err), &err);
    free(bytes);
    return path;
}

static const char *write_text(const char *dir, const char *name, const char *text)
{
    const char *path = x3_test_path(dir, name);
    x3_err err = {0};

    CHECK_OK(x3_write_file(path, text, strlen(text), &err), &err);
    return path;
}

/* Opening `path` must fail for its content, with a finding that contains all of the parts (NULL: no part). */
static void expect_finding(const char *path, const char *a, const char *b, const char *c)
{
    x3_findings f = {0};
    x3_safetensors *st = NULL;
    x3_err err = {0};
    bool found = false;
    x3_status rc = x3_safetensors_open(&st, path, &f, &err);

    CHECK_MSG(rc == X3_ERR_INPUT && st == NULL, "%s: status %d, expected a finding with \"%s\": %s", path, (int)rc, a,
              err.text);
    CHECK(f.n_items > 0 && strncmp(err.text, f.items[0], strlen(f.items[0])) == 0);
    for (size_t i = 0; i < f.n_items; i++)
        found |= strstr(f.items[i], a) != NULL && (b == NULL || strstr(f.items[i], b) != NULL) &&
                 (c == NULL || strstr(f.items[i], c) != NULL);
    CHECK_MSG(found, "no finding with \"%s\", \"%s\" and \"%s\"; the first of %zu: %s", a, b == NULL ? "" : b,
              c == NULL ? "" : c, f.n_items, f.items[0]);
    x3_findings_free(&f);
}

static x3_safetensors *open_good(const char *path)
{
    x3_safetensors *st = NULL;
    x3_findings f = {0};
    x3_err err = {0};

    CHECK_OK(x3_safetensors_open(&st, path, &f, &err), &err);
    CHECK(f.n_items == 0 && f.n_dropped == 0);
    return st;
}

/* ---- good files ---- */

X3_TEST(safetensors_opens_one_file_sorts_names_and_reads_ranges)
{
    const char *dir = x3_test_temp_dir();
    const char *path = write_shard(dir, "one.safetensors",
                                   "{\"__metadata__\":{\"format\":\"pt\"},"
                                   "\"b\":{\"dtype\":\"U8\",\"shape\":[2,3],\"data_offsets\":[4,10]},"
                                   "\"a\":{\"dtype\":\"I16\",\"shape\":[2],\"data_offsets\":[0,4]}}   ",
                                   10);
    x3_safetensors *st = open_good(path);
    unsigned char bytes[8] = {0};
    void *whole = NULL;
    char text[128];
    x3_err err = {0};

    CHECK(st->n_shards == 1 && st->n_tensors == 2 && st->total_bytes == 10 && !st->has_index);
    CHECK(strcmp(st->dir, dir) == 0 && strcmp(st->shards[0].file, "one.safetensors") == 0);
    CHECK(strcmp(st->tensors[0].name, "a") == 0 && strcmp(st->tensors[1].name, "b") == 0);
    const x3_tensor *b = x3_safetensors_find(st, "b");
    CHECK(b == &st->tensors[1] && b->dtype == X3_U8 && b->rank == 2 && b->n_elements == 6 && b->n_bytes == 6);
    CHECK(b->offset == 8 + st->shards[0].header_bytes + 4 && st->shards[0].n_bytes == b->offset + 6);
    CHECK(strcmp(x3_tensor_shape_text(b, text), "[2, 3]") == 0);
    CHECK(x3_safetensors_find(st, "c") == NULL && x3_safetensors_find(st, "") == NULL);

    CHECK_OK(x3_safetensors_read(st, b, 2, 3, bytes, &err), &err);
    CHECK(bytes[0] == 6 && bytes[1] == 7 && bytes[2] == 8 && bytes[3] == 0);
    CHECK_OK(x3_safetensors_read(st, b, 6, 0, bytes, &err), &err);
    CHECK_FAILS(x3_safetensors_read(st, b, 2, 5, bytes, &err), &err, "\"b\": 5 bytes from 2 on asked for, it has 6");
    CHECK_FAILS(x3_safetensors_read(st, b, 7, 0, bytes, &err), &err, "one.safetensors");
    CHECK_FAILS(x3_safetensors_read(st, b, UINT64_MAX, 2, bytes, &err), &err, "it has 6");
    CHECK_OK(x3_safetensors_load(st, b, &whole, &err), &err);
    CHECK(memcmp(whole, "\4\5\6\7\10\11", 6) == 0);
    free(whole);
    x3_safetensors_close(st);
}

X3_TEST(safetensors_hashes_the_bytes_before_the_data)
{
    const char *dir = x3_test_temp_dir();
    const char *path = write_shard(dir, "h.safetensors",
                                   "{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]}}", 2);
    x3_safetensors *st = open_good(path);
    size_t n = 0;
    char *bytes = NULL;
    x3_err err = {0};

    CHECK_OK(x3_read_file(&bytes, &n, path, 1000, &err), &err);
    CHECK(st->shards[0].header_bytes == n - 10 && st->shards[0].header_hash == x3_hash(bytes, n - 2));
    free(bytes);
    x3_safetensors_close(st);
}

X3_TEST(safetensors_opens_every_dtype)
{
    static const struct {
        const char *name;
        size_t n_bytes;
        bool is_float;
    } types[] = {{"F64", 8, true},     {"F32", 4, true},     {"F16", 2, true},  {"BF16", 2, true},
                 {"F8_E4M3", 1, true}, {"F8_E5M2", 1, true}, {"F8_E8M0", 1, true}, {"I64", 8, false},
                 {"I32", 4, false},    {"I16", 2, false},    {"I8", 1, false},  {"U64", 8, false},
                 {"U32", 4, false},    {"U16", 2, false},    {"U8", 1, false},  {"BOOL", 1, false}};
    const char *dir = x3_test_temp_dir();
    x3_dtype dtype = X3_N_DTYPES;
    float values[3];
    char header[200];
    x3_err err = {0};

    CHECK(sizeof types / sizeof types[0] == X3_N_DTYPES);
    for (size_t i = 0; i < X3_N_DTYPES; i++) {
        snprintf(header, sizeof header, "{\"t\":{\"dtype\":\"%s\",\"shape\":[3],\"data_offsets\":[0,%zu]}}",
                 types[i].name, 3 * types[i].n_bytes);
        x3_safetensors *st = open_good(write_shard(dir, "t.safetensors", header, 3 * types[i].n_bytes));
        const x3_tensor *t = &st->tensors[0];
        CHECK(strcmp(x3_dtype_name(t->dtype), types[i].name) == 0 && t->n_elements == 3);
        CHECK(x3_dtype_bytes(t->dtype) == types[i].n_bytes && x3_dtype_is_float(t->dtype) == types[i].is_float);
        CHECK(x3_dtype_from_name(types[i].name, &dtype) && dtype == t->dtype);
        if (types[i].is_float)
            CHECK_OK(x3_safetensors_read_f32(st, t, 0, 3, values, &err), &err);
        else
            CHECK_FAILS(x3_safetensors_read_f32(st, t, 0, 3, values, &err), &err, types[i].name);
        x3_safetensors_close(st);
    }
    CHECK(!x3_dtype_from_name("bf16", &dtype) && !x3_dtype_from_name("", &dtype));
}

X3_TEST(safetensors_accepts_scalars_empty_tensors_and_an_empty_file)
{
    const char *dir = x3_test_temp_dir();
    /* Empty tensors inside the range of another one, at its borders and at the end: none has a byte to share. */
    const char *path = write_shard(dir, "e.safetensors",
                                   "{\"e0\":{\"dtype\":\"F32\",\"shape\":[0],\"data_offsets\":[0,0]},"
                                   "\"e2\":{\"dtype\":\"F32\",\"shape\":[4,0,2],\"data_offsets\":[2,2]},"
                                   "\"e2b\":{\"dtype\":\"F32\",\"shape\":[0,9007199254740991],\"data_offsets\":[2,2]},"
                                   "\"s\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]},"
                                   "\"e4\":{\"dtype\":\"I8\",\"shape\":[0,0,0,0,0,0,0,0],\"data_offsets\":[4,4]}}",
                                   4);
    x3_safetensors *st = open_good(path);
    const x3_tensor *s = x3_safetensors_find(st, "s"), *e = x3_safetensors_find(st, "e2");
    void *data = NULL;
    float value = 1;
    char text[128];
    x3_err err = {0};

    CHECK(st->n_tensors == 5 && s->rank == 0 && s->n_elements == 1 && s->n_bytes == 4);
    CHECK(strcmp(x3_tensor_shape_text(s, text), "[]") == 0);
    CHECK(e->n_elements == 0 && e->n_bytes == 0 && e->rank == 3);
    CHECK_OK(x3_safetensors_load(st, e, &data, &err), &err);
    CHECK(data != NULL);
    free(data);
    CHECK_OK(x3_safetensors_read_f32(st, e, 0, 0, &value, &err), &err);
    CHECK(value == 1);
    x3_safetensors_close(st);

    st = open_good(write_shard(dir, "none.safetensors", "{}", 0));
    CHECK(st->n_tensors == 0 && st->total_bytes == 0 && x3_safetensors_find(st, "a") == NULL);
    x3_safetensors_close(st);
}

X3_TEST(safetensors_reads_float_ranges_across_chunks)
{
    enum { N = 1200000 }; /* more than the 2^20 bytes of a chunk for every type */
    const char *dir = x3_test_temp_dir();
    static const char *const types[] = {"F64", "F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "F8_E8M0"};
    float *all = NULL, *direct = NULL;
    void *raw = NULL;
    char header[200];
    x3_err err = {0};

    CHECK_OK(x3_alloc(&all, N, sizeof *all, &err), &err);
    CHECK_OK(x3_alloc(&direct, N, sizeof *direct, &err), &err);
    for (size_t k = 0; k < sizeof types / sizeof types[0]; k++) {
        x3_dtype dtype;
        CHECK(x3_dtype_from_name(types[k], &dtype));
        size_t size = x3_dtype_bytes(dtype);
        snprintf(header, sizeof header, "{\"t\":{\"dtype\":\"%s\",\"shape\":[%d],\"data_offsets\":[0,%zu]}}", types[k],
                 N, N * size);
        x3_safetensors *st = open_good(write_shard(dir, "t.safetensors", header, N * size));
        const x3_tensor *t = &st->tensors[0];
        CHECK_OK(x3_safetensors_load(st, t, &raw, &err), &err);
        x3_dtype_to_f32(dtype, raw, N, direct);
        CHECK_OK(x3_safetensors_read_f32(st, t, 0, N, all, &err), &err);
        CHECK(memcmp(all, direct, N * sizeof *all) == 0);
        CHECK_OK(x3_safetensors_read_f32(st, t, 7, N - 9, all, &err), &err);
        CHECK(memcmp(all, direct + 7, (N - 9) * sizeof *all) == 0);
        CHECK_FAILS(x3_safetensors_read_f32(st, t, 1, N, all, &err), &err, "\"t\": 1200000 elements from 1 on");
        CHECK_FAILS(x3_safetensors_read_f32(st, t, UINT64_MAX, 2, all, &err), &err, "it has 1200000");
        free(raw);
        x3_safetensors_close(st);
    }
    free(all);
    free(direct);
}

X3_TEST(safetensors_reports_a_file_that_shrinks_after_opening)
{
    const char *dir = x3_test_temp_dir();
    const char *path = write_shard(dir, "s.safetensors",
                                   "{\"a\":{\"dtype\":\"U8\",\"shape\":[9],\"data_offsets\":[0,9]}}", 9);
    x3_safetensors *st = open_good(path);
    void *data = NULL;
    x3_err err = {0};

    CHECK(truncate(path, (off_t)st->tensors[0].offset + 4) == 0);
    CHECK(x3_safetensors_load(st, &st->tensors[0], &data, &err) == X3_ERR_IO && data == NULL);
    CHECK(strstr(err.text, "s.safetensors") != NULL);
    x3_safetensors_close(st);
}

/* ---- malformed files ---- */

#define U8(name, n, begin, end) "\"" name "\":{\"dtype\":\"U8\",\"shape\":[" n "],\"data_offsets\":[" begin "," end "]}"

static const struct bad_header {
    const char *header;
    size_t n_data;
    const char *a, *b; /* parts of the finding besides the file name */
} bad_headers[] = {
    {"", 0, "header of 0 bytes", "does not begin with '{'"},
    {" {}", 0, "does not begin with '{'", NULL},
    {"[]", 0, "does not begin with '{'", NULL},
    {"{\"a\":", 0, "not valid JSON", NULL},
    {"{\"a", 0, "a string without an end", NULL},
    {"{\"a\tb\":1}", 0, "a control character in a string", NULL},
    {"{\"a\\x41\":1}", 0, "an escape that JSON does not have", NULL},
    {"{\"a\\u12G4\":1}", 0, "without four hexadecimal digits", NULL},
    {"{\"a\\ud83d\":1}", 0, "half of a surrogate pair", NULL},
    {"{\"a\\ude00\\ud83d\":1}", 0, "half of a surrogate pair", NULL},
    {"{\"a\":01}", 0, "a number that JSON does not write so", NULL},
    {"{\"a\":1.}", 0, "a number that JSON does not write so", NULL},
    {"{\"a\":-}", 0, "a number that JSON does not write so", NULL},
    {"{\"a\":1e+}", 0, "a number that JSON does not write so", NULL},
    {"{\"a\":1.2.3}", 0, "a number that JSON does not write so", NULL},
    {"{\f\"a\":1}", 0, "a control character", NULL},
    {"{nothing", 0, "not valid JSON", NULL},
    {"{} x", 0, "text after the JSON value", NULL},
    {"{\"a\\u0000b\":1}", 0, "\\u0000", NULL},
    {"{\"\\\\\\u0000b\":1}", 0, "\\u0000", NULL},
    {"{\"a\xC3\":1}", 0, "not UTF-8", NULL},
    {"{\"\xED\xA0\x80\":1}", 0, "not UTF-8", NULL},
    {"{\"\xC0\x80\":1}", 0, "not UTF-8", NULL},
    {"{\"\xF4\x90\x80\x80\":1}", 0, "not UTF-8", NULL},
    {"{\"w\":3}", 0, "\"w\"", "not an object"},
    /* dtype */
    {"{\"w\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "\"w\"", "dtype is missing"},
    {"{\"w\":{\"dtype\":8,\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "\"w\"", "dtype is missing or not a string"},
    {"{\"w\":{\"dtype\":\"F8_E3M4\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "\"w\"", "unknown dtype \"F8_E3M4\""},
    {"{\"w\":{\"dtype\":\"bf16\",\"shape\":[1],\"data_offsets\":[0,2]}}", 2, "\"w\"", "unknown dtype \"bf16\""},
    /* shape */
    {"{\"w\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "\"w\"", "shape is missing"},
    {"{\"w\":{\"dtype\":\"U8\",\"shape\":1,\"data_offsets\":[0,1]}}", 1, "\"w\"", "shape is missing or not a list"},
    {"{" U8("w", "\"1\"", "0", "1") "}", 1, "\"w\"", "not a list of whole numbers"},
    {"{" U8("w", "-1", "0", "1") "}", 1, "\"w\"", "not a list of whole numbers"},
    {"{" U8("w", "1.5", "0", "1") "}", 1, "\"w\"", "not a list of whole numbers"},
    {"{" U8("w", "1e400", "0", "1") "}", 1, "\"w\"", "not a list of whole numbers"},
    {"{" U8("w", "18446744073709551617", "0", "1") "}", 1, "\"w\"", "not a list of whole numbers"},
    {"{" U8("w", "9007199254740993", "0", "1") "}", 1, "\"w\"", "not a list of whole numbers"},
    {"{" U8("w", "[1]", "0", "1") "}", 1, "\"w\"", "not a list of whole numbers"},
    {"{" U8("w", "1,1,1,1,1,1,1,1,1", "0", "1") "}", 1, "\"w\"", "rank 9, at most 8"},
    {"{" U8("w", "4294967296,4294967296", "0", "0") "}", 0, "\"w\"", "[4294967296, 4294967296] overflows"},
    {"{" U8("w", "0,4294967296,4294967296", "0", "0") "}", 0, "\"w\"", "overflows"},
    {"{\"w\":{\"dtype\":\"F64\",\"shape\":[2147483648,1073741824],\"data_offsets\":[0,0]}}", 0, "\"w\"", "overflows"},
    /* range of one tensor */
    {"{\"w\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1, "\"w\"", "data_offsets is missing"},
    {"{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0]}}", 1, "\"w\"", "not two whole numbers"},
    {"{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,1]}}", 1, "\"w\"", "not two whole numbers"},
    {"{\"w\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":{\"a\":0,\"b\":1}}}", 1, "\"w\"", "not two whole numbers"},
    {"{" U8("w", "1", "0.5", "1.5") "}", 1, "\"w\"", "not two whole numbers"},
    {"{" U8("w", "1", "-1", "0") "}", 1, "\"w\"", "not two whole numbers"},
    {"{" U8("w", "1", "null", "1") "}", 1, "\"w\"", "not two whole numbers"},
    {"{" U8("w", "1", "0", "18446744073709551615") "}", 1, "\"w\"", "not two whole numbers"},
    {"{" U8("w", "1", "2", "1") "}", 2, "\"w\"", "begin at 2 and end before that, at 1"},
    {"{" U8("w", "5", "0", "5") "}", 4, "\"w\"", "[0, 5] reach past the end of the data (4 bytes)"},
    {"{" U8("w", "0", "5", "5") "}", 4, "\"w\"", "[5, 5] reach past the end of the data (4 bytes)"},
    {"{\"w\":{\"dtype\":\"F32\",\"shape\":[2,3],\"data_offsets\":[0,23]}}", 23, "\"w\"",
     "shape [2, 3] of F32 takes 24 bytes, data_offsets span 23"},
    {"{" U8("w", "", "0", "0") "}", 0, "\"w\"", "shape [] of U8 takes 1 bytes, data_offsets span 0"},
    {"{" U8("w", "0", "0", "1") "}", 1, "\"w\"", "shape [0] of U8 takes 0 bytes, data_offsets span 1"},
    /* ranges against each other and the file */
    {"{" U8("v", "4", "0", "4") "," U8("w", "4", "3", "7") "}", 7, "\"w\": bytes [3, 7]", "overlap [0, 4] of tensor \"v\""},
    {"{" U8("w", "4", "0", "4") "," U8("v", "4", "0", "4") "}", 4, "\"w\": bytes [0, 4]", "overlap [0, 4] of tensor \"v\""},
    {"{" U8("v", "9", "0", "9") "," U8("u", "1", "1", "2") "," U8("w", "1", "5", "6") "}", 9, "\"w\": bytes [5, 6]",
     "overlap [0, 9] of tensor \"v\""},
    {"{" U8("v", "2", "0", "2") "," U8("w", "2", "3", "5") "}", 5, "\"w\": begins at byte 3", "from 2 on belong to no tensor"},
    {"{" U8("w", "2", "1", "3") "}", 3, "\"w\": begins at byte 1", "from 0 on belong to no tensor"},
    {"{" U8("w", "2", "0", "2") "}", 5, "the last 3 of", "belong to no tensor"},
    {"{}", 5, "the last 5 of 15 bytes belong to no tensor", NULL},
    {"{" U8("w", "1", "0", "1") "," U8("w", "1", "1", "2") "}", 2, "\"w\"", "twice"},
    /* metadata */
    {"{\"__metadata__\":[],\"w\":{}}", 0, "__metadata__ is not an object", NULL},
    {"{\"__metadata__\":{\"format\":1}}", 0, "__metadata__ \"format\" is not a string", NULL},
    {"{\"__metadata__\":{\"f\":\"1\"},\"__metadata__\":{}}", 0, "\"__metadata__\"", "twice"},
};

X3_TEST(safetensors_rejects_malformed_headers)
{
    const char *dir = x3_test_temp_dir();

    for (size_t i = 0; i < sizeof bad_headers / sizeof bad_headers[0]; i++) {
        const struct bad_header *b = &bad_headers[i];
        expect_finding(write_shard(dir, "bad.safetensors", b->header, b->n_data), "bad.safetensors", b->a, b->b);
    }
}

X3_TEST(safetensors_accepts_an_escaped_backslash_before_u0000)
{
    const char *dir = x3_test_temp_dir();
    x3_safetensors *st = open_good(write_shard(dir, "a.safetensors", "{" U8("\\\\u0000\xC3\xA9", "1", "0", "1") "}", 1));

    CHECK(x3_safetensors_find(st, "\\u0000\xC3\xA9") != NULL);
    x3_safetensors_close(st);
}

X3_TEST(safetensors_accepts_every_escape_and_number_of_json)
{
    const char *dir = x3_test_temp_dir();
    x3_safetensors *st = open_good(write_shard(
        dir, "a.safetensors", "{" U8("\\ud83d\\ude00\\t\\u00E9", "1", "0", "1.0") "," U8("b", "0, 1e1", "1E0", "10e-1") "}", 1));

    CHECK(x3_safetensors_find(st, "\xF0\x9F\x98\x80\t\xC3\xA9") != NULL);
    x3_safetensors_close(st);
}

X3_TEST(safetensors_rejects_a_nul_byte_in_the_header)
{
    const char *dir = x3_test_temp_dir();
    const char *path = x3_test_path(dir, "nul.safetensors");
    x3_err err = {0};

    CHECK_OK(x3_write_file(path, "\12\0\0\0\0\0\0\0{\"a\0b\":1} ", 18, &err), &err);
    expect_finding(path, "nul.safetensors", "a NUL byte", NULL);
}

X3_TEST(safetensors_rejects_header_lengths_past_the_end_of_the_file)
{
    const char *dir = x3_test_temp_dir();
    const uint64_t lengths[] = {3, UINT64_C(1) << 63, UINT64_MAX, UINT64_MAX - 7};
    unsigned char bytes[10];
    const char *path = x3_test_path(dir, "length.safetensors");
    x3_err err = {0};

    memcpy(bytes + 8, "{}", 2);
    for (size_t i = 0; i < sizeof lengths / sizeof lengths[0]; i++) {
        char part[80];
        memcpy(bytes, &lengths[i], 8);
        CHECK_OK(x3_write_file(path, bytes, sizeof bytes, &err), &err);
        snprintf(part, sizeof part, "header of %llu bytes reaches past the end", (unsigned long long)lengths[i]);
        expect_finding(path, "length.safetensors", part, "(10 bytes)");
    }
}

X3_TEST(safetensors_rejects_files_without_a_header_length)
{
    const char *dir = x3_test_temp_dir();

    expect_finding(write_text(dir, "none.safetensors", ""), "none.safetensors", "0 bytes, shorter than the 8", NULL);
    expect_finding(write_text(dir, "seven.safetensors", "1234567"), "seven.safetensors", "7 bytes, shorter than the 8",
                   NULL);
}

X3_TEST(safetensors_rejects_a_header_over_the_limit)
{
    const char *path = x3_test_path(x3_test_temp_dir(), "big.safetensors");
    const uint64_t n = 100000001;
    x3_err err = {0};

    CHECK_OK(x3_write_file(path, &n, 8, &err), &err);
    CHECK(truncate(path, 8 + (off_t)n) == 0);
    expect_finding(path, "big.safetensors", "header of 100000001 bytes, at most 100000000", NULL);
}

X3_TEST(safetensors_says_what_stands_in_place_of_a_shard)
{
    static const struct {
        const char *text, *what;
    } cases[] = {
        {"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 4976698672\n", "Git LFS pointer"},
        {"<!DOCTYPE html>\n<html><head><title>404</title></head></html>", "HTML page"},
        {"\n  <HTML lang=\"en\">", "HTML page"},
        {"{\n  \"metadata\": {}, \"weight_map\": {}\n}\n", "text, not safetensors"},
        {"Entry not found", "text, not safetensors"},
        {"GGUF\3\1\1\1\1\1\1", "GGUF"},
        {"PK\3\4\10\10\10\10", "zip archive"},
    };
    const char *dir = x3_test_temp_dir();

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_finding(write_text(dir, "model.safetensors", cases[i].text), "model.safetensors: ", cases[i].what, NULL);
    expect_finding(dir, "model.safetensors: ", cases[6].what, NULL);
}

X3_TEST(safetensors_lists_every_problem_and_works_without_a_list)
{
    const char *dir = x3_test_temp_dir();
    x3_safetensors *st = NULL;
    x3_findings f = {0};
    x3_err err = {0};

    write_shard(dir, "a.safetensors", "{" U8("x", "1", "0", "9") ",\"y\":{\"dtype\":\"Q4\",\"shape\":[-1]}}", 9);
    write_shard(dir, "b.safetensors", "nonsense", 0);
    write_shard(dir, "c.safetensors", "{" U8("x", "1", "0", "1") "}", 2);
    CHECK(x3_safetensors_open(&st, dir, &f, &err) == X3_ERR_INPUT && st == NULL);
    CHECK_MSG(f.n_items == 7, "%zu findings", f.n_items); /* x size; y dtype, shape, range; b; c tail; x twice */
    CHECK(strstr(err.text, "(and 6 more)") != NULL);
    x3_findings_free(&f);
    err = (x3_err){0};
    CHECK_FAILS(x3_safetensors_open(&st, dir, NULL, &err), &err, "(and 6 more)");
    CHECK(st == NULL);
}

/* ---- folders ---- */

#define MAP(pairs) "{\"metadata\":{\"total_size\":3},\"weight_map\":{" pairs "}}"
#define S1 "model-00001-of-00002.safetensors"
#define LONG "a_name_of_fifty_characters_five_of_them_are_over_250"
#define S2 "model-00002-of-00002.safetensors"

/* Shard 1 has a and c, shard 2 has b. */
static const char *two_shards(void)
{
    const char *dir = x3_test_temp_dir();

    write_shard(dir, S1, "{" U8("c", "1", "0", "1") "," U8("a", "1", "1", "2") "}", 2);
    write_shard(dir, S2, "{" U8("b", "1", "0", "1") "}", 1);
    write_text(dir, "config.json", "{}");
    return dir;
}

static void check_two_shards(const char *dir, bool has_index)
{
    x3_safetensors *st = open_good(dir);
    unsigned char byte = 9;
    x3_err err = {0};

    CHECK(st->n_shards == 2 && st->n_tensors == 3 && st->total_bytes == 3 && st->has_index == has_index);
    CHECK(strcmp(st->shards[0].file, S1) == 0 && strcmp(st->shards[1].file, S2) == 0);
    CHECK(strcmp(st->shards[1].path, x3_test_path(dir, S2)) == 0);
    for (size_t i = 0; i < 3; i++) {
        const char name[] = {(char)('a' + i), '\0'};
        CHECK(strcmp(st->tensors[i].name, name) == 0 && st->tensors[i].shard == (i == 1));
        CHECK(x3_safetensors_find(st, name) == &st->tensors[i]);
        CHECK_OK(x3_safetensors_read(st, &st->tensors[i], 0, 1, &byte, &err), &err);
        CHECK(byte == (i == 0));
    }
    x3_safetensors_close(st);
}

X3_TEST(safetensors_opens_shards_with_and_without_an_index)
{
    const char *dir = two_shards();

    check_two_shards(dir, false);
    write_text(dir, INDEX, MAP("\"a\":\"" S1 "\",\"b\":\"" S2 "\",\"c\":\"" S1 "\""));
    check_two_shards(dir, true);
    write_text(dir, "consolidated.00.safetensors", "a second copy");
    check_two_shards(dir, true);
    CHECK(unlink(x3_test_path(dir, INDEX)) == 0);
    check_two_shards(dir, false);
    x3_safetensors *one = open_good(x3_test_path(dir, S2)); /* a shard by itself is a file like any other */
    CHECK(one->n_tensors == 1 && !one->has_index);
    x3_safetensors_close(one);
}

X3_TEST(safetensors_rejects_an_index_that_differs_from_the_shards)
{
    static const struct {
        const char *index, *a, *b, *c;
    } cases[] = {
        {"[]", INDEX, "not a JSON object", NULL},
        {"{\"weight_map\":", INDEX, "not valid JSON", NULL},
        {"{}", INDEX, "weight_map is missing", NULL},
        {MAP(""), INDEX, "weight_map is missing, empty", NULL},
        {"{\"weight_map\":[\"a\"]}", INDEX, "not an object", NULL},
        {MAP("\"a\":1"), INDEX, "\"a\"", "not a string"},
        {MAP("\"a\":\"" S1 "\",\"a\":\"" S1 "\""), INDEX, "\"a\"", "twice"},
        {MAP("\"a\":\"../" S1 "\""), INDEX, "../" S1, "plain name"},
        {MAP("\"a\":\"/etc/x.safetensors\""), INDEX, "/etc/x.safetensors", "plain name"},
        {MAP("\"a\":\"sub/x.safetensors\""), INDEX, "sub/x.safetensors", "plain name"},
        {MAP("\"a\":\"..\""), INDEX, "\"..\"", "plain name"},
        /* fuzz find: no file can have a name so long, and the system's refusal is not an error of reading */
        {MAP("\"a\":\"" LONG LONG LONG LONG LONG ".safetensors\""), INDEX, LONG, "plain name"},
        {MAP("\"a\":\"pytorch_model.bin\""), INDEX, "pytorch_model.bin", "plain name"},
        {MAP("\"a\":\"" S1 "\",\"c\":\"" S1 "\",\"b\":\"" S2 "\",\"d\":\"x.safetensors\""), "x.safetensors",
         "missing, but " INDEX " names it", NULL},
        {MAP("\"a\":\"" S1 "\",\"c\":\"" S1 "\",\"b\":\"" S2 "\",\"d\":\"" S2 "\""), S2, "\"d\"", "missing, but"},
        {MAP("\"a\":\"" S1 "\",\"b\":\"" S2 "\""), S1, "\"c\"", "not named by " INDEX},
        {MAP("\"a\":\"" S1 "\",\"b\":\"" S2 "\",\"c\":\"" S2 "\""), S1 ": tensor \"c\"", "puts it in " S2, NULL},
        {MAP("\"a\":\"" S1 "\",\"c\":\"" S1 "\""), S2, "not named by " INDEX, NULL},
    };
    const char *dir = two_shards();

    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        write_text(dir, INDEX, cases[i].index);
        expect_finding(dir, cases[i].a, cases[i].b, cases[i].c);
    }
}

X3_TEST(safetensors_says_once_that_a_shard_of_the_index_is_missing)
{
    const char *dir = two_shards();
    x3_findings f = {0};
    x3_safetensors *st = NULL;
    x3_err err = {0};

    write_text(dir, INDEX, MAP("\"a\":\"" S1 "\",\"b\":\"" S2 "\",\"c\":\"" S1 "\""));
    CHECK(unlink(x3_test_path(dir, S1)) == 0);
    CHECK(x3_safetensors_open(&st, dir, &f, &err) == X3_ERR_INPUT && st == NULL);
    CHECK_MSG(f.n_items == 1 && strstr(f.items[0], S1 ": missing") != NULL, "%zu findings: %s", f.n_items, err.text);
    x3_findings_free(&f);
    CHECK(symlink("nowhere", x3_test_path(dir, S1)) == 0);
    expect_finding(dir, S1, "missing", "broken link");
}

X3_TEST(safetensors_rejects_a_single_file_beside_an_index)
{
    const char *dir = two_shards();

    write_text(dir, INDEX, MAP("\"a\":\"" S1 "\",\"b\":\"" S2 "\",\"c\":\"" S1 "\""));
    write_shard(dir, "model.safetensors", "{" U8("a", "1", "0", "1") "}", 1);
    expect_finding(dir, "/model.safetensors: not named by", INDEX, NULL);
}

X3_TEST(safetensors_rejects_names_doubled_across_shards)
{
    const char *dir = two_shards();

    write_shard(dir, S2, "{" U8("b", "1", "0", "1") "," U8("a", "1", "1", "2") "}", 2);
    expect_finding(dir, S2 ": tensor \"a\"", "stands in " S1, NULL);
    write_text(dir, INDEX, MAP("\"a\":\"" S1 "\",\"b\":\"" S2 "\",\"c\":\"" S1 "\""));
    expect_finding(dir, S2 ": tensor \"a\"", "stands in " S1, NULL);
}

X3_TEST(safetensors_misses_a_numbered_shard_without_an_index)
{
    const char *dir = two_shards();

    CHECK(rename(x3_test_path(dir, S2), x3_test_path(dir, "model-00002-of-00009.safetensors")) == 0);
    expect_finding(dir, S1, "1 of the 2 shards", NULL);
    expect_finding(dir, "model-00002-of-00009.safetensors", "1 of the 9 shards", NULL);
    CHECK(unlink(x3_test_path(dir, S1)) == 0);
    CHECK(rename(x3_test_path(dir, "model-00002-of-00009.safetensors"), x3_test_path(dir, "x-of-9.safetensors")) == 0);
    x3_safetensors_close(open_good(dir));
}

X3_TEST(safetensors_lists_what_a_folder_has_instead)
{
    const char *dir = x3_test_temp_dir();
    char name[64];

    expect_finding(dir, dir, "no *.safetensors file", "the folder is empty");
    write_text(dir, "pytorch_model.bin", "x");
    expect_finding(dir, dir, "it has pytorch_model.bin", "not safetensors");
    write_text(dir, "consolidated.safetensors", "x");
    expect_finding(dir, "consolidated.safetensors, pytorch_model.bin", "only when given as the path", NULL);
    for (int i = 0; i < 100; i++) {
        snprintf(name, sizeof name, "a-file-with-a-long-name-%d.gguf", i);
        write_text(dir, name, "x");
    }
    expect_finding(dir, "a-file-with-a-long-name-0.gguf, ", "... (weights that are not safetensors", NULL);
}

X3_TEST(safetensors_names_a_path_that_is_no_checkpoint)
{
    const char *dir = x3_test_temp_dir();
    x3_safetensors *st = NULL;
    x3_err err = {0};

    CHECK(x3_safetensors_open(&st, x3_test_path(dir, "nothing"), NULL, &err) == X3_ERR_IO && st == NULL);
    CHECK(strstr(err.text, "/nothing: No such file") != NULL);
    err = (x3_err){0};
    CHECK_FAILS(x3_safetensors_open(&st, "/dev/null", NULL, &err), &err, "/dev/null: neither a folder nor a");
    CHECK(mkfifo(x3_test_path(dir, "fifo.safetensors"), 0600) == 0); /* must not wait for a writer */
    expect_finding(dir, "fifo.safetensors", "not a regular file", NULL);
    CHECK_FAILS(x3_safetensors_open(&st, x3_test_path(dir, "fifo.safetensors"), NULL, &err), &err, "neither a folder");
    CHECK(st == NULL);
}

/* One shard of n tensors "t.<i>" of a byte each, and their lines of the index. */
static void write_numbered(const char *dir, const char *file, size_t first, size_t n, FILE *index)
{
    char *header = NULL;
    size_t n_bytes = 0;
    FILE *f = open_memstream(&header, &n_bytes);

    CHECK(f != NULL);
    for (size_t i = 0; i < n; i++) {
        fprintf(f, "%c\"t.%zu\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[%zu,%zu]}", i == 0 ? '{' : ',',
                first + i, i, i + 1);
        fprintf(index, "%s\"t.%zu\":\"%s\"", first + i == 0 ? "" : ",", first + i, file);
    }
    fprintf(f, "}");
    CHECK(fclose(f) == 0);
    write_shard(dir, file, header, n);
    free(header);
}

X3_TEST(safetensors_opens_many_tensors_and_shards_with_few_descriptors)
{
    enum { SHARDS = 130, EACH = 500 };
    const char *dir = x3_test_temp_dir();
    FILE *index = fopen(x3_test_path(dir, INDEX), "w");
    struct rlimit before, low;
    x3_safetensors *st = NULL;
    x3_err err = {0};
    char name[40];

    CHECK(index != NULL && fprintf(index, "{\"weight_map\":{") > 0);
    for (size_t i = 0; i < SHARDS; i++) {
        snprintf(name, sizeof name, "model-%05zu-of-%05d.safetensors", i + 1, SHARDS);
        write_numbered(dir, name, i * EACH, EACH, index);
    }
    CHECK(fprintf(index, "}}") == 2 && fclose(index) == 0);

    CHECK(getrlimit(RLIMIT_NOFILE, &before) == 0);
    if (before.rlim_max < SHARDS + 50)
        x3_test_skip("at most %llu open files are allowed here", (unsigned long long)before.rlim_max);
    low = (struct rlimit){60, before.rlim_max};
    CHECK(setrlimit(RLIMIT_NOFILE, &low) == 0);
    x3_status rc = x3_safetensors_open(&st, dir, NULL, &err);
    CHECK(setrlimit(RLIMIT_NOFILE, &before) == 0);
    CHECK_MSG(rc == X3_OK, "%s", err.text);
    CHECK(st->n_shards == SHARDS && st->n_tensors == SHARDS * EACH);
    CHECK((fcntl(st->shards[SHARDS - 1].fd, F_GETFD) & FD_CLOEXEC) != 0);
    for (size_t i = 0; i < SHARDS * EACH; i += 997) {
        snprintf(name, sizeof name, "t.%zu", i);
        const x3_tensor *t = x3_safetensors_find(st, name);
        unsigned char byte = 0;
        CHECK(t != NULL && t->shard == i / EACH);
        CHECK_OK(x3_safetensors_read(st, t, 0, 1, &byte, &err), &err);
        CHECK(byte == i % EACH % 256);
    }
    x3_safetensors_close(st);
}

X3_TEST(safetensors_shape_text_is_cut_and_not_overrun)
{
    x3_tensor t = {.rank = X3_RANK_MAX};
    char text[128];

    for (int i = 0; i < X3_RANK_MAX; i++)
        t.shape[i] = UINT64_MAX;
    x3_tensor_shape_text(&t, text);
    CHECK(strlen(text) == 127 && text[126] == ']' && strncmp(text, "[18446744073709551615, 184", 26) == 0);
}

/* ---- element conversions ---- */

static uint32_t bits_of(float x)
{
    uint32_t bits;

    memcpy(&bits, &x, sizeof bits);
    return bits;
}

/* sign * 2^(exponent - bias) * 1.mantissa, with the subnormals of IEEE 754; no infinity or NaN here. */
static double value_of(unsigned bits, int n_exponent, int n_mantissa, int bias)
{
    unsigned mantissa = bits & ((1u << n_mantissa) - 1);
    int exponent = (int)(bits >> n_mantissa & ((1u << n_exponent) - 1));
    double sign = bits >> (n_exponent + n_mantissa) & 1 ? -1 : 1;

    if (exponent == 0)
        return sign * ldexp(mantissa, 1 - bias - n_mantissa);
    return sign * ldexp(mantissa + (1u << n_mantissa), exponent - bias - n_mantissa);
}

X3_TEST(f16_to_f32_equals_the_formula_and_comes_back_for_all_65536)
{
    for (unsigned bits = 0; bits < 65536; bits++) {
        float x = x3_f16_to_f32((uint16_t)bits);
        uint16_t back = x3_f32_to_f16(x);
        bool negative = bits >> 15;
        CHECK_MSG((signbit(x) != 0) == negative, "%04x: sign", bits);
        if ((bits & 0x7C00) != 0x7C00)
            CHECK_MSG((double)x == value_of(bits, 5, 10, 15) && back == bits, "%04x: %a, back %04x", bits, (double)x, back);
        else if ((bits & 0x3FF) == 0)
            CHECK_MSG(isinf(x) && back == bits, "%04x: %a, back %04x", bits, (double)x, back);
        else
            CHECK_MSG(isnan(x) && back == (bits | 0x200), "%04x: NaN, back %04x", bits, back);
    }
}

X3_TEST(bf16_to_f32_equals_the_formula_and_comes_back_for_all_65536)
{
    for (unsigned bits = 0; bits < 65536; bits++) {
        float x = x3_bf16_to_f32((uint16_t)bits);
        uint16_t back = x3_f32_to_bf16(x);
        CHECK(bits_of(x) >> 16 == bits || isnan(x));
        if ((bits & 0x7F80) != 0x7F80)
            CHECK_MSG((double)x == value_of(bits, 8, 7, 127) && back == bits, "%04x: %a", bits, (double)x);
        else if ((bits & 0x7F) == 0)
            CHECK_MSG(isinf(x) && back == bits, "%04x: %a", bits, (double)x);
        else
            CHECK_MSG(isnan(x) && back == (bits | 0x40), "%04x: NaN, back %04x", bits, back);
    }
}

/* Between two neighbours everything below the middle goes down, all above it up, the middle to the even one. For all
 * neighbours up to `largest`, the largest finite value, and from there on to infinity. */
static void check_rounding(uint16_t (*narrow)(float), float (*widen)(uint16_t), unsigned largest)
{
    for (unsigned bits = 0; bits <= largest; bits++) {
        float low = widen((uint16_t)bits);
        /* past the largest the step stays as it was */
        float step = bits < largest ? widen((uint16_t)(bits + 1)) - low : low - widen((uint16_t)(bits - 1));
        float middle = low + step / 2;
        unsigned even = bits + (bits & 1), sign = 0x8000;
        CHECK_MSG(narrow(middle) == even && narrow(-middle) == (even | sign), "middle above %04x: %04x", bits,
                  narrow(middle));
        CHECK_MSG(narrow(nextafterf(middle, 0)) == bits, "below the middle above %04x", bits);
        CHECK_MSG(narrow(nextafterf(middle, INFINITY)) == bits + 1, "above the middle above %04x", bits);
        CHECK_MSG(narrow(-nextafterf(middle, INFINITY)) == ((bits + 1) | sign), "above the middle above -%04x", bits);
    }
    CHECK(narrow(INFINITY) == largest + 1 && narrow(-INFINITY) == ((largest + 1) | 0x8000));
}

X3_TEST(f32_to_f16_rounds_to_nearest_even_between_all_neighbours)
{
    check_rounding(x3_f32_to_f16, x3_f16_to_f32, 0x7BFF);
    CHECK(x3_f32_to_f16(0x1p-25f) == 0 && x3_f32_to_f16(0x1.000002p-25f) == 1 && x3_f32_to_f16(-0x1p-149f) == 0x8000);
    CHECK(x3_f32_to_f16(3.4e38f) == 0x7C00);
}

X3_TEST(f32_to_bf16_rounds_to_nearest_even_between_all_neighbours)
{
    check_rounding(x3_f32_to_bf16, x3_bf16_to_f32, 0x7F7F);
    CHECK(x3_f32_to_bf16(0x1.fffffep127f) == 0x7F80);
}

X3_TEST(f8_values_equal_the_formula_for_all_256)
{
    for (unsigned bits = 0; bits < 256; bits++) {
        uint8_t b = (uint8_t)bits;
        float e4m3 = x3_f8_e4m3_to_f32(b), e5m2 = x3_f8_e5m2_to_f32(b), e8m0 = x3_f8_e8m0_to_f32(b);
        CHECK((bits & 0x7F) == 0x7F ? isnan(e4m3) : (double)e4m3 == value_of(bits, 4, 3, 7));
        CHECK((signbit(e4m3) != 0) == (bits >= 128) && (signbit(e5m2) != 0) == (bits >= 128));
        if ((bits & 0x7C) == 0x7C)
            CHECK((bits & 3) == 0 ? isinf(e5m2) : isnan(e5m2));
        else
            CHECK((double)e5m2 == value_of(bits, 5, 2, 15));
        CHECK(bits == 255 ? isnan(e8m0) : (double)e8m0 == ldexp(1, (int)bits - 127));
    }
    CHECK(x3_f8_e4m3_to_f32(0x7E) == 448 && x3_f8_e4m3_to_f32(1) == 0x1p-9f && x3_f8_e5m2_to_f32(0x7B) == 57344);
}

X3_TEST(f64_becomes_the_nearest_f32)
{
    const double x[] = {1.0 + 0x1p-24, 1.0 + 0x1.8p-23, 1e300, -0.0, 0x1p-149};
    float y[5];

    x3_dtype_to_f32(X3_F64, x, 5, y);
    CHECK(y[0] == 1 && y[1] == 1 + 0x1p-22f && isinf(y[2]) && y[3] == 0 && signbit(y[3]) && y[4] == 0x1p-149f);
}
