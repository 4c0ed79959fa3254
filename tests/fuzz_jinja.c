/* libFuzzer target: any bytes as a template. Compiling and rendering must not crash, hang or pass the limits, and must
 * say the same twice. */
#include <stdlib.h>
#include <string.h>

#include "formats/json.h"
#include "runtime/jinja/jinja.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static const char variables_text[] =
    "{\"messages\":[{\"role\":\"system\",\"content\":\"You are.\"},{\"role\":\"user\",\"content\":\"Hi <b> \\u00e9\"},"
    "{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{\"type\":\"function\",\"function\":{\"name\":\"f\","
    "\"arguments\":{\"x\":1,\"y\":[1.5,true]}}}]},{\"role\":\"tool\",\"content\":\"42\"}],\"tools\":[{\"function\":"
    "{\"name\":\"f\",\"parameters\":{\"items\":[]}}}],\"x\":3,\"f\":2.5,\"s\":\"a b\\nc\",\"l\":[3,1,2],\"n\":null,"
    "\"d\":{\"a\":1,\"b\":{\"c\":2}},\"add_generation_prompt\":true,\"bos_token\":\"<s>\"}";

static void must(bool condition)
{
    if (!condition)
        abort();
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    const struct tm now = {.tm_year = 125, .tm_mon = 6, .tm_mday = 9};
    const x3_jinja_options options = {&now, 100000, (uint64_t)64 << 20, 1 << 20, 300};
    char *text[2] = {NULL, NULL};
    size_t n[2] = {0, 0};
    x3_err err[2] = {{0}, {0}};
    x3_status rc[2];
    cJSON *variables = cJSON_Parse(variables_text);

    must(variables != NULL);
    for (int i = 0; i < 2; i++) {
        x3_jinja *jinja = NULL;
        rc[i] = x3_jinja_compile(&jinja, (const char *)data, n_bytes, "fuzz", &err[i]);
        must((rc[i] == X3_OK) == (jinja != NULL));
        if (rc[i] == X3_OK)
            rc[i] = x3_jinja_render(jinja, variables, &options, &text[i], &n[i], &err[i]);
        must((rc[i] == X3_OK) == (text[i] != NULL) && n[i] <= options.max_output);
        must(rc[i] == X3_OK || ((rc[i] == X3_ERR_INPUT || rc[i] == X3_ERR_UNSUPPORTED) && err[i].text[0] != '\0'));
        x3_jinja_free(jinja);
    }
    must(rc[0] == rc[1] && n[0] == n[1] && strcmp(err[0].text, err[1].text) == 0);
    must(n[0] == 0 || memcmp(text[0], text[1], n[0]) == 0);
    free(text[0]);
    free(text[1]);
    cJSON_Delete(variables);
    return 0;
}
