/* Templates: stored text of Python's jinja2, errors, limits. */
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "formats/json.h"
#include "runtime/jinja/jinja.h"
#include "tests/test.h"

static const struct tm now = {.tm_year = 125, .tm_mon = 6, .tm_mday = 9, .tm_hour = 14, .tm_min = 5, .tm_sec = 3, .tm_wday = 3,
                              .tm_yday = 189};

static x3_status render(const char *template, const cJSON *vars, x3_jinja_options o, char **out, x3_err *err)
{
    x3_jinja *jinja;
    size_t n;

    *out = NULL;
    o.now = &now;
    x3_status rc = x3_jinja_compile(&jinja, template, strlen(template), "t", err);
    if (rc == X3_OK)
        rc = x3_jinja_render(jinja, vars, &o, out, &n, err);
    x3_jinja_free(jinja);
    return rc;
}

static void check_case(const cJSON *item)
{
    const char *name = x3_json_get(item, "name")->valuestring, *template = x3_json_get(item, "template")->valuestring;
    const cJSON *vars = x3_json_get(item, "vars"), *text = x3_json_get(item, "text"), *error = x3_json_get(item, "error");
    x3_err err = {0};
    char *got;
    x3_status rc = render(template, vars, (x3_jinja_options){0}, &got, &err);

    if (text != NULL) {
        CHECK_MSG(rc == X3_OK, "%s: %s", name, err.text);
        CHECK_MSG(strcmp(got, text->valuestring) == 0, "%s: expected\n%s\ngot\n%s", name, text->valuestring, got);
    } else {
        CHECK_MSG(rc != X3_OK, "%s: %s renders", name, template);
        CHECK_MSG(strncmp(err.text, "t:", 2) == 0 && strstr(err.text, error->valuestring) != NULL, "%s: \"%s\" lacks \"%s\"",
                  name, err.text, error->valuestring);
    }
    free(got);
}

X3_TEST(jinja_renders_every_stored_case_as_python_does)
{
    char *text = NULL;
    size_t n_bytes, n = 0;
    cJSON *cases;
    const cJSON *item;
    x3_err err = {0};

    CHECK_OK(x3_read_file(&text, &n_bytes, "tests/data/jinja/cases.json", 1 << 24, &err), &err);
    CHECK_OK(x3_json_parse(&cases, text, n_bytes, "cases.json", &err), &err);
    cJSON_ArrayForEach(item, cases) {
        check_case(item);
        n++;
    }
    CHECK(n > 100);
    cJSON_Delete(cases);
    free(text);
}

static void expect_limit(const char *template, x3_jinja_options o, const char *part)
{
    x3_err err = {0};
    char *got;

    CHECK_FAILS(render(template, NULL, o, &got, &err), &err, part);
    CHECK(got == NULL);
}

X3_TEST(jinja_ends_hostile_templates_at_its_limits)
{
    char deep[4001], *nest = NULL;
    x3_err err = {0};

    expect_limit("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", (x3_jinja_options){0}, "steps");
    expect_limit("{% for a in range(99999) %}{{ 'x' * 9999 }}{% endfor %}", (x3_jinja_options){.max_output = 1 << 20}, "t:1: ");
    expect_limit("{{ 'x' * 9999999999 }}", (x3_jinja_options){0}, "t:1: ");
    expect_limit("{% set ns = namespace(s='xxxxxxxx') %}{% for a in range(99) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
                 (x3_jinja_options){0}, "t:1: ");
    expect_limit("{{ '%999999999999d' % 1 }}", (x3_jinja_options){0}, "t:1: ");
    expect_limit("{{ 'a'.center(99999999999) }}", (x3_jinja_options){0}, "t:1: ");
    expect_limit("{% macro m(n) %}{{ m(n + 1) }}{% endmacro %}\n{{ m(0) }}", (x3_jinja_options){0}, "t:");
    expect_limit("{% set l = [] %}{{ 10 ** 10 ** 10 }}", (x3_jinja_options){0}, "t:1: ");
    expect_limit("{% set ns = namespace(x=[1]) %}{% for i in range(99999) %}{% set ns.x = ns.x|select %}{% endfor %}{{ ns.x|first }}",
                 (x3_jinja_options){0}, "levels inside one another");
    memset(deep, '(', sizeof deep - 1);
    deep[sizeof deep - 1] = '\0';
    CHECK_OK(x3_asprintf(&nest, &err, "{{ %s", deep), &err);
    expect_limit(nest, (x3_jinja_options){0}, "t:1: ");
    free(nest);
}

X3_TEST(jinja_output_keeps_a_render_of_untrusted_values_whole)
{
    cJSON *vars = cJSON_Parse("{\"s\":\"{{ x }}{% raw %}\\u0000\",\"n\":1e300}");
    x3_err err = {0};
    char *got;

    CHECK(vars != NULL);
    CHECK_OK(render("{{ s }}|{{ n }}", vars, (x3_jinja_options){0}, &got, &err), &err);
    CHECK_MSG(strcmp(got, "{{ x }}{% raw %}|1e+300") == 0, "%s", got);
    free(got);
    cJSON_Delete(vars);
}
