/* Reasoning and tool calls in replies. */
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "formats/json.h"
#include "runtime/serve/reply_parser.h"
#include "tests/test.h"

static const char tools_text[] =
    "[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\"},"
    "\"n\":{\"type\":\"integer\"},\"o\":{\"type\":\"object\"}}}}},{\"type\":\"function\",\"function\":{\"name\":\"noop\"}}]";

/* Puts a reply in pieces of `step` bytes but for the first; returns reasoning, content and calls as "R|C|name(arguments)…". */
static char *parse(x3_tool_format format, x3_reasoning reasoning, const char *text, size_t first, size_t step)
{
    cJSON *tools = cJSON_Parse(tools_text);
    x3_reply_parser *p;
    x3_reply_parts parts = {0};
    x3_text all = {0};
    x3_err err = {0};

    CHECK_OK(x3_reply_parser_create(&p, format, reasoning, tools, &err), &err);
    for (size_t at = 0, n = strlen(text), next; at < n; at += next, first = step) {
        next = x3_min_size(first, n - at);
        CHECK_OK(x3_reply_parser_put(p, text + at, next, &parts, &err), &err);
    }
    CHECK_OK(x3_reply_parser_end(p, &parts, &err), &err);
    CHECK_OK(x3_text_put(&all, parts.reasoning.items, parts.reasoning.n_items, &err), &err);
    CHECK_OK(x3_text_put(&all, "|", 1, &err), &err);
    CHECK_OK(x3_text_put(&all, parts.content.items, parts.content.n_items, &err), &err);
    CHECK_OK(x3_text_put(&all, "|", 1, &err), &err);
    for (size_t i = 0; i < parts.calls.n_items; i++) {
        char line[400];
        int n = snprintf(line, sizeof line, "%s(%s)", parts.calls.items[i].name, parts.calls.items[i].arguments);
        CHECK_OK(x3_text_put(&all, line, (size_t)n, &err), &err);
    }
    CHECK_OK(x3_text_put(&all, "", 1, &err), &err);
    x3_reply_parts_free(&parts);
    x3_reply_parser_free(p);
    cJSON_Delete(tools);
    return all.items;
}

/* In pieces of one to seven bytes, whole, and in two pieces cut at every byte. */
static void expect(x3_tool_format format, x3_reasoning reasoning, const char *text, const char *expected)
{
    static const size_t steps[] = {1, 2, 3, 7, 1000};

    for (size_t i = 0; i < 5 + strlen(text); i++) {
        size_t step = i < 5 ? steps[i] : SIZE_MAX, first = i < 5 ? step : i - 5;
        char *got = parse(format, reasoning, text, first, step);
        CHECK_MSG(strcmp(got, expected) == 0, "%s\nin pieces of %zu, then %zu gives\n%s\nexpected\n%s", text, first, step, got,
                  expected);
        free(got);
    }
}

X3_TEST(reply_parser_splits_reasoning_from_content)
{
    expect(X3_TOOLS_NONE, X3_REASONING_TAGS, "<think>\nhm,\n\nso\n</think>\n\nYes. ", "hm,\n\nso|Yes. |");
    expect(X3_TOOLS_NONE, X3_REASONING_TAGS, "\n<think>a</think>b", "a|b|");
    expect(X3_TOOLS_NONE, X3_REASONING_TAGS, "no <think>a</think>b", "|no <think>a</think>b|");
    expect(X3_TOOLS_NONE, X3_REASONING_TAGS, "  <thin", "|  <thin|");
    expect(X3_TOOLS_NONE, X3_REASONING_TAGS, "<think>never ends </thi", "never ends </thi||");
    expect(X3_TOOLS_NONE, X3_REASONING_OPEN, "\nso</think>b</think>c", "so|b</think>c|");
    expect(X3_TOOLS_NONE, X3_REASONING_OPEN, "only thoughts\n", "only thoughts||");
    expect(X3_TOOLS_NONE, X3_REASONING_NONE, "<think>a</think> ", "|<think>a</think> |");
    expect(X3_TOOLS_TAGGED, X3_REASONING_TAGS, "<think>\n\n</think>\n\nhi \n", "|hi \n|");
    expect(X3_TOOLS_TAGGED, X3_REASONING_OPEN, "a <tool_call> b</think>\n<tool_call>{\"name\": \"f\"}</tool_call>", "a <tool_call> b||f({})");
}

X3_TEST(reply_parser_reads_json_calls)
{
    expect(X3_TOOLS_TAGGED, X3_REASONING_NONE,
           "Let me see.\n\n<tool_call>\n{\"name\": \"f\", \"arguments\": {\"s\": \"a, \\\"b\\\": {\", \"n\": 12345678901234567890.10}}\n"
           "</tool_call>\n<tool_call>\n{\"arguments\": {}, \"name\": \"g\"}\n</tool_call>\n",
           "|Let me see.|f({\"s\": \"a, \\\"b\\\": {\", \"n\": 12345678901234567890.10})g({})");
    expect(X3_TOOLS_TAGGED, X3_REASONING_NONE, "<tool_call>{\"name\":\"f\",\"arguments\":\"{\\\"n\\\": 1}\"}</tool_call> and more ",
           "|and more|f({\"n\": 1})");
    /* the end of the reply ends the call */
    expect(X3_TOOLS_TAGGED, X3_REASONING_NONE, "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"n\": 1}}", "||f({\"n\": 1})");
}

X3_TEST(reply_parser_leaves_what_it_cannot_understand_as_text)
{
    static const char *const bad[] = {
        "x \n<tool_call>{\"name\": \"f\", \"arguments\": {}</tool_call> y ",
        "<tool_call>{\"name\": \"\", \"arguments\": {}}</tool_call>",
        "<tool_call>{\"name\": \"f\", \"arguments\": [1]}</tool_call>",
        "<tool_call>{\"name\": 5}</tool_call>",
        "<tool_call>hello world</tool_call>",
        "<tool_call>hello</tool_call>",
        "<tool_call></tool_call>",
        "<tool_call>\n<function=f>\n<parameter=n>\n1\n</function>\n</tool_call>",
        "<tool_call>f\n<arg_key>n</arg_key>\n</tool_call>",
        "<tool_call>f\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
        "<tool_call>never ends",
        "<tool_ca",
    };
    char expected[200];

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        snprintf(expected, sizeof expected, "|%s|", bad[i]);
        expect(X3_TOOLS_TAGGED, X3_REASONING_NONE, bad[i], expected);
    }
    snprintf(expected, sizeof expected, "|%s|", "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>");
    expect(X3_TOOLS_NONE, X3_REASONING_NONE, "<tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", expected);
}

X3_TEST(reply_parser_reads_calls_of_tags_with_the_types_of_the_tool)
{
    expect(X3_TOOLS_TAGGED, X3_REASONING_NONE,
           "<tool_call>\n<function=f>\n<parameter=s>\n12\n</parameter>\n<parameter=n>\n12\n</parameter>\n<parameter=o>\n"
           "{\"a\": [1, 2.50]}\n</parameter>\n<parameter=other>\nline 1\n\"line\" 2\n</parameter>\n</function>\n</tool_call>",
           "||f({\"s\": \"12\", \"n\": 12, \"o\": {\"a\": [1, 2.50]}, \"other\": \"line 1\\n\\\"line\\\" 2\"})");
    expect(X3_TOOLS_TAGGED, X3_REASONING_NONE, "<tool_call>\n<function=noop>\n</function>\n</tool_call>", "||noop({})");
    expect(X3_TOOLS_TAGGED, X3_REASONING_NONE,
           "ok\n<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>true</arg_value>\n<arg_key>n</arg_key>\n<arg_value>-3</arg_value>\n"
           "</tool_call>\n<tool_call>noop</tool_call>", "|ok|f({\"s\": \"true\", \"n\": -3})noop({})");
    expect(X3_TOOLS_TAGGED, X3_REASONING_NONE, "<tool_call>f<arg_key>s</arg_key><arg_value>é 日本</arg_value></tool_call>",
           "||f({\"s\": \"é 日本\"})");
}

X3_TEST(reply_parser_reads_calls_of_deepseek)
{
    expect(X3_TOOLS_DEEPSEEK, X3_REASONING_TAGS,
           "Look:\n<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"n\": 1}\n```<｜tool▁call▁end｜>\n"
           "<｜tool▁call▁begin｜>function<｜tool▁sep｜>g\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
           "|Look:|f({\"n\": 1})g({})");
    expect(X3_TOOLS_DEEPSEEK, X3_REASONING_OPEN,
           "t</think><｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"n\": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
           "t||f({\"n\": 1})");
    expect(X3_TOOLS_DEEPSEEK, X3_REASONING_NONE,
           "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"n\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁calls▁end｜>",
           "|<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"n\": 1}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f"
           "<｜tool▁calls▁end｜>|");
}

X3_TEST(reply_parser_reads_calls_of_dsml)
{
    expect(X3_TOOLS_DSML, X3_REASONING_OPEN,
           "hm\n</think>Let me look.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"s\" "
           "string=\"true\"> 12 \"x\"\n</｜DSML｜parameter>\n<｜DSML｜parameter name=\"n\" string=\"false\">1.50</｜DSML｜parameter>\n"
           "<｜DSML｜parameter name=\"o\" string=\"false\">{\"a\": [1, \"b\"]}</｜DSML｜parameter>\n</｜DSML｜invoke>\n"
           "<｜DSML｜invoke name=\"noop\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
           "hm|Let me look.|f({\"s\": \" 12 \\\"x\\\"\\n\", \"n\": 1.50, \"o\": {\"a\": [1, \"b\"]}})noop({})");
    expect(X3_TOOLS_DSML_V4, X3_REASONING_NONE,
           "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n<｜DSML｜parameter name=\"s\" string=\"true\">true</｜DSML｜parameter>\n"
           "</｜DSML｜invoke>\n</｜DSML｜tool_calls>", "||f({\"s\": \"true\"})");
    /* where the mark of a string is missing, the tool says what it is; the end of the reply ends the calls */
    expect(X3_TOOLS_DSML, X3_REASONING_NONE,
           "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"s\">1</｜DSML｜parameter><｜DSML｜parameter "
           "name=\"n\">1</｜DSML｜parameter></｜DSML｜invoke>", "||f({\"s\": \"1\", \"n\": 1})");
}

X3_TEST(reply_parser_leaves_broken_dsml_as_text)
{
    static const char *const bad[] = {
        "a \n\n<｜DSML｜function_calls>\n</｜DSML｜function_calls> b ",
        "<｜DSML｜function_calls>f</｜DSML｜function_calls>",
        "<｜DSML｜function_calls><｜DSML｜invoke name=\"\"></｜DSML｜invoke></｜DSML｜function_calls>",
        "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"></｜DSML｜function_calls>",
        "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"></｜DSML｜invoke>, too</｜DSML｜function_calls>",
        "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"s\" string=\"maybe\">1</｜DSML｜parameter>"
        "</｜DSML｜invoke></｜DSML｜function_calls>",
        "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"s\" string=\"true\">1</｜DSML｜invoke>"
        "</｜DSML｜function_calls>",
        "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"s\" string=\"true\">1</｜DSML｜parameter>"
        "<｜DSML｜parameter name=\"s\" string=\"true\">2</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜function_calls>",
        "<｜DSML｜function_calls><｜DSML｜invoke name=\"f\">",
        "<｜DSML｜function_",
    };
    char expected[400];

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        snprintf(expected, sizeof expected, "|%s|", bad[i]);
        expect(X3_TOOLS_DSML, X3_REASONING_NONE, bad[i], expected);
    }
}

X3_TEST(reply_parser_reads_calls_of_mistral)
{
    expect(X3_TOOLS_MISTRAL, X3_REASONING_NONE,
           "[TOOL_CALLS] [{\"name\": \"f\", \"arguments\": {\"s\": \"],[\", \"n\": 1.50}, \"id\": \"abcdefghi\"} , "
           "{\"arguments\": {}, \"name\": \"noop\"}]", "||f({\"s\": \"],[\", \"n\": 1.50})noop({})");
    expect(X3_TOOLS_MISTRAL, X3_REASONING_NONE, "Let me see.\n[TOOL_CALLS][{\"name\":\"f\",\"arguments\":{}}]\n", "|Let me see.|f({})");
    expect(X3_TOOLS_MISTRAL, X3_REASONING_NONE, "Both: [TOOL_CALLS]f[ARGS]{\"s\": \"[ARGS]\"}[TOOL_CALLS]noop[CALL_ID]abcdefghi[ARGS]{}",
           "|Both:|f({\"s\": \"[ARGS]\"})noop({})");
    expect(X3_TOOLS_MISTRAL, X3_REASONING_NONE, "[TOOL_CALLS]f{\"n\": 1}\n[TOOL_CALLS] g [ARGS]{}", "|[TOOL_CALLS] g [ARGS]{}|f({\"n\": 1})");
    expect(X3_TOOLS_MISTRAL, X3_REASONING_TAGS, "<think>a [TOOL_CALLS]</think>b [1] [TOOL_CALLS]f[ARGS]{}", "a [TOOL_CALLS]|b [1]|f({})");
}

X3_TEST(reply_parser_leaves_broken_calls_of_mistral_as_text)
{
    static const char *const bad[] = {
        "a [TOOL_CALLS] [] b ",
        "[TOOL_CALLS]",
        "[TOOL_CALLS][[]]",
        "[TOOL_CALLS][1]",
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, {\"name\": 1}]",
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}",
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}] and more",
        "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": [1]}]",
        "[TOOL_CALLS]f[ARGS]{\"n\": 1",
        "[TOOL_CALLS]f[ARGS][1]",
        "[TOOL_CALLS]f[CALL_ID]abcdefghi{}",
        "[TOOL_CALLS]f",
        "[TOOL_CALLS][ARGS]{}",
        "[TOOL_CALLS]{}",
        "a [TOOL_CALLS]f g[ARGS]{}\n[TOOL_CALLS]h ",
        "[TOOL_CALL",
    };
    char expected[200];

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        snprintf(expected, sizeof expected, "|%s|", bad[i]);
        expect(X3_TOOLS_MISTRAL, X3_REASONING_NONE, bad[i], expected);
    }
}

X3_TEST(reply_parser_reads_channels_of_harmony)
{
    const x3_tool_format f = X3_TOOLS_HARMONY;

    expect(f, X3_REASONING_TAGS, "<|channel|>analysis<|message|> Hm, \n so. \n<|end|><|start|>assistant<|channel|>final<|message|>Yes.\n",
           "Hm, \n so.|Yes.\n|");
    expect(f, X3_REASONING_TAGS, "<|channel|>final<|message|>a <|b|> <|endless<|return|>\n", "|a <|b|> <|endless|");
    expect(f, X3_REASONING_TAGS, "<|channel|>analysis<|message|>one<|end|><|start|>assistant<|channel|>analysis<|message|>two<|end|>",
           "one\n\ntwo||");
    expect(f, X3_REASONING_TAGS, "<|channel|>commentary<|message|>First \n<|end|><|start|>assistant<|channel|>final<|message|>then.",
           "|First\n\nthen.|");
    expect(f, X3_REASONING_TAGS, "<|channel|>analysis<|message|>a<|start|>assistant<|message|>b", "a|b|"); /* an end forgotten */
    expect(f, X3_REASONING_TAGS, "<|channel|>analysis<|message|>never ends <|en", "never ends <|en||");
    expect(f, X3_REASONING_TAGS, " to all: plain <|end|>", "| to all: plain|");
    expect(f, X3_REASONING_TAGS, "", "||");
    expect(f, X3_REASONING_NONE, "<|channel|>analysis<|message|>hm \n<|end|><|start|>assistant<|channel|>final<|message|>Yes.",
           "|<|channel|>analysis<|message|>hm \n<|end|>Yes.|");
}

X3_TEST(reply_parser_reads_calls_of_harmony)
{
    const x3_tool_format f = X3_TOOLS_HARMONY;

    expect(f, X3_REASONING_TAGS,
           "<|channel|>analysis<|message|>Need f.<|end|><|start|>assistant<|channel|>commentary to=functions.f "
           "<|constrain|>json<|message|>{\"s\": \"to=x\", \"n\": 1.50}<|call|>", "Need f.||f({\"s\": \"to=x\", \"n\": 1.50})");
    expect(f, X3_REASONING_TAGS,
           "<|channel|>commentary<|message|>Looking.\n<|end|><|start|>assistant to=functions.f<|channel|>commentary json<|message|>"
           "{}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|> {\"a\": {}} ", "|Looking.|f({})g({\"a\": {}})");
    expect(f, X3_REASONING_NONE, " to=functions.f<|channel|>commentary json<|message|>{}<|call|>", "||f({})");
    expect(f, X3_REASONING_TAGS, "<|channel|>analysis to=noop code<|message|>{}<|end|>", "||noop({})");
}

X3_TEST(reply_parser_leaves_broken_harmony_as_text)
{
    static const char *const bad[] = {
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"n\": <|call|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>[1]<|call|>",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>{\"n\": ",
        "<|channel|>commentary to=functions.f <|constrain|>json<|message|>",
        "<|channel|>commentary to=functions. json<|message|>{}<|call|>",
        "<|channel|>analysis to=python code<|message|>{}<|call|>",
        "<|channel|>commentary to= json<|message|>{}<|call|>",
        "<|channel|>commentary to=functions.f",
        "<|start|>assistant",
        "<|channel|>fin",
        "<|chan",
        "to=",
        " to=all of it",
        " ",
    };
    char expected[200];

    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; i++) {
        snprintf(expected, sizeof expected, "|%s|", bad[i]);
        expect(X3_TOOLS_HARMONY, X3_REASONING_TAGS, bad[i], expected);
    }
    /* the head of nothing is text; the next message is read */
    expect(X3_TOOLS_HARMONY, X3_REASONING_TAGS, "<|start|>assistant<|start|>assistant<|channel|>analysis<|message|>hm",
           "hm|<|start|>assistant|");
    expect(X3_TOOLS_HARMONY, X3_REASONING_TAGS, "\rto=fun<|return|> .", "|\rto=fun\n\n.|"); /* found by the fuzzer */
    expect(X3_TOOLS_HARMONY, X3_REASONING_TAGS, "<|channel|>final<|end|><|start|>assistant<|channel|>final<|message|>x",
           "|<|channel|>final\n\nx|");
}

X3_TEST(reply_parser_leaves_calls_of_harmony_as_text_without_tools)
{
    static const char text[] = "<|channel|>commentary to=functions.f json<|message|>{}<|call|>";
    x3_reply_parser *p;
    x3_reply_parts parts = {0};
    x3_err err = {0};

    CHECK_OK(x3_reply_parser_create(&p, X3_TOOLS_HARMONY, X3_REASONING_TAGS, NULL, &err), &err);
    CHECK_OK(x3_reply_parser_put(p, text, sizeof text - 1, &parts, &err), &err);
    CHECK(parts.calls.n_items == 0 && parts.content.n_items == sizeof text - 1);
    CHECK(memcmp(parts.content.items, text, sizeof text - 1) == 0);
    x3_reply_parts_free(&parts);
    x3_reply_parser_free(p);
}

/* What is out after every byte is a beginning of what is out in the end. */
X3_TEST(reply_parser_streams_content_of_harmony_without_marks)
{
    static const char text[] = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes <|x|> no.<|return|>";
    x3_reply_parser *p;
    x3_reply_parts parts = {0};
    x3_err err = {0};

    CHECK_OK(x3_reply_parser_create(&p, X3_TOOLS_HARMONY, X3_REASONING_TAGS, NULL, &err), &err);
    for (size_t i = 0; i + 1 < sizeof text; i++) {
        CHECK_OK(x3_reply_parser_put(p, text + i, 1, &parts, &err), &err);
        CHECK(parts.reasoning.n_items <= 2 && memcmp("hm", parts.reasoning.items == NULL ? "" : parts.reasoning.items, parts.reasoning.n_items) == 0);
        CHECK(parts.content.n_items <= 13 && memcmp("Yes <|x|> no.", parts.content.items == NULL ? "" : parts.content.items, parts.content.n_items) == 0);
        if (strncmp(text + i, "o.<|return|>", 12) == 0) /* all but what white space and marks may follow is out at once */
            CHECK(parts.content.n_items == 12);
    }
    x3_reply_parts_free(&parts);
    x3_reply_parser_free(p);
}

X3_TEST(reply_parser_reads_calls_of_llama)
{
    expect(X3_TOOLS_LLAMA, X3_REASONING_NONE, "{\"name\": \"f\", \"parameters\": {\"n\": 1}}", "||f({\"n\": 1})");
    expect(X3_TOOLS_LLAMA, X3_REASONING_NONE,
           "<|python_tag|>{\"name\": \"f\", \"parameters\": {}}; {\"name\": \"g\", \"parameters\": {\"s\": \";\"}}",
           "||f({})g({\"s\": \";\"})");
    expect(X3_TOOLS_LLAMA, X3_REASONING_NONE, " {\"a\": 1} is JSON", "| {\"a\": 1} is JSON|");
    expect(X3_TOOLS_LLAMA, X3_REASONING_NONE, "Hello {", "|Hello {|");
}

X3_TEST(reply_parser_knows_formats_by_their_template)
{
    CHECK(x3_tool_format_of("a <tool_call> b") == X3_TOOLS_TAGGED);
    CHECK(x3_tool_format_of("a <｜tool▁calls▁begin｜> b") == X3_TOOLS_DEEPSEEK);
    CHECK(x3_tool_format_of("{%- set d = '｜DSML｜' %}'<' + d + 'function_calls>'") == X3_TOOLS_DSML);
    CHECK(x3_tool_format_of("{%- set d = '｜DSML｜' %}'<' + d + 'tool_calls>'") == X3_TOOLS_DSML_V4);
    CHECK(x3_tool_format_of("{{- '[TOOL_CALLS]' + name + '[ARGS]' }}") == X3_TOOLS_MISTRAL);
    CHECK(x3_tool_format_of("<|start|>assistant<|channel|>final<|message|> + content") == X3_TOOLS_HARMONY);
    CHECK(x3_tool_format_of("{\"name\": function name, \"parameters\": dictionary}") == X3_TOOLS_LLAMA);
    CHECK(x3_tool_format_of("{{ messages }}") == X3_TOOLS_NONE);
}

static bool wants(x3_tool_format format, x3_reasoning reasoning, const char *token)
{
    x3_reply_parser *p;
    x3_err err = {0};

    CHECK_OK(x3_reply_parser_create(&p, format, reasoning, NULL, &err), &err);
    bool yes = x3_reply_parser_wants(p, token, strlen(token));
    x3_reply_parser_free(p);
    return yes;
}

X3_TEST(reply_parser_wants_the_special_tokens_of_its_marks)
{
    CHECK(wants(X3_TOOLS_TAGGED, X3_REASONING_TAGS, "<think>") && wants(X3_TOOLS_TAGGED, X3_REASONING_OPEN, "</think>"));
    CHECK(!wants(X3_TOOLS_TAGGED, X3_REASONING_NONE, "<think>") && !wants(X3_TOOLS_TAGGED, X3_REASONING_TAGS, "<|im_end|>"));
    CHECK(wants(X3_TOOLS_TAGGED, X3_REASONING_NONE, "<tool_call>") && wants(X3_TOOLS_TAGGED, X3_REASONING_NONE, "</tool_call>"));
    CHECK(!wants(X3_TOOLS_NONE, X3_REASONING_NONE, "<tool_call>") && !wants(X3_TOOLS_TAGGED, X3_REASONING_NONE, "<tool_call"));
    CHECK(wants(X3_TOOLS_DEEPSEEK, X3_REASONING_NONE, "<｜tool▁sep｜>"));
    CHECK(wants(X3_TOOLS_DSML, X3_REASONING_NONE, "｜DSML｜") && wants(X3_TOOLS_DSML_V4, X3_REASONING_NONE, "｜DSML｜"));
    CHECK(wants(X3_TOOLS_MISTRAL, X3_REASONING_NONE, "[TOOL_CALLS]") && wants(X3_TOOLS_MISTRAL, X3_REASONING_NONE, "[ARGS]"));
    CHECK(wants(X3_TOOLS_MISTRAL, X3_REASONING_NONE, "[CALL_ID]") && !wants(X3_TOOLS_MISTRAL, X3_REASONING_NONE, "[INST]"));
    CHECK(wants(X3_TOOLS_HARMONY, X3_REASONING_NONE, "<|channel|>") && wants(X3_TOOLS_HARMONY, X3_REASONING_NONE, "<|return|>"));
    CHECK(wants(X3_TOOLS_HARMONY, X3_REASONING_NONE, "<|constrain|>") && !wants(X3_TOOLS_HARMONY, X3_REASONING_NONE, "<|endoftext|>"));
    CHECK(wants(X3_TOOLS_LLAMA, X3_REASONING_NONE, "<|python_tag|>") && !wants(X3_TOOLS_LLAMA, X3_REASONING_NONE, "<|eot_id|>"));
}

/* The body ends where readable memory does. */
X3_TEST(tool_calls_that_end_in_a_backslash_are_not_read_past_their_end)
{
    static const char *const bodies[] = {"{\"name\": \"f\\", "\"\\", "{\"name\":\"f\",\"parameters\":{}}\"\\", "[\"\\"};
    const size_t page = (size_t)sysconf(_SC_PAGESIZE);
    char *memory = mmap(NULL, 2 * page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    CHECK(memory != MAP_FAILED && mprotect(memory + page, page, PROT_NONE) == 0);
    for (size_t i = 0; i < 4; i++) {
        x3_tool_calls calls = {0};
        size_t n = strlen(bodies[i]);
        bool parsed;
        x3_err err = {0};
        char *body = memcpy(memory + page - n, bodies[i], n);
        CHECK_OK(x3_tool_calls_parse(X3_TOOLS_LLAMA, body, n, NULL, &calls, &parsed, &err), &err);
        CHECK(!parsed && calls.n_items == 0);
        x3_tool_calls_free(&calls);
    }
    munmap(memory, 2 * page);
}
