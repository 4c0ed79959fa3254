/* libFuzzer target: any bytes as a reply, through the text stream and the parser of reasoning and calls. The pieces that
 * it comes in must not matter, and every call must have a name and a JSON object. */
#include <stdlib.h>
#include <string.h>

#include "formats/json.h"
#include "runtime/serve/reply_parser.h"
#include "runtime/serve/text_stream.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes);

static void must(bool condition)
{
    if (!condition)
        abort();
}

/* All parts as one text; the first byte of the input chooses what is looked for. */
static x3_text parse(const char *text, size_t n_bytes, uint8_t kind, size_t step)
{
    static const char *const stops[] = {"stop", "</"};
    x3_reply_parts parts = {0};
    x3_reply_parser *p;
    x3_text_stream *s;
    x3_text ready = {0}, all = {0};
    bool stopped = false;
    cJSON *tools = cJSON_Parse("[{\"function\":{\"name\":\"f\",\"parameters\":{\"properties\":{\"s\":{\"type\":\"string\"}}}}}]");
    x3_err err = {0};

    must(x3_text_stream_create(&s, stops, kind >> 5 & 1, &err) == X3_OK);
    must(x3_reply_parser_create(&p, (kind & 7) % X3_TOOL_FORMATS, (kind >> 3 & 3) % 3, kind >> 6 & 1 ? tools : NULL, &err) == X3_OK);
    for (size_t at = 0; at < n_bytes && !stopped; at += step) {
        size_t n = n_bytes - at < step ? n_bytes - at : step;
        ready.n_items = 0;
        must(x3_text_stream_put(s, text + at, n, &ready, &stopped, &err) == X3_OK);
        must(x3_reply_parser_put(p, ready.items, ready.n_items, &parts, &err) == X3_OK);
    }
    ready.n_items = 0;
    if (!stopped)
        must(x3_text_stream_end(s, &ready, &err) == X3_OK);
    must(x3_reply_parser_put(p, ready.items, ready.n_items, &parts, &err) == X3_OK);
    must(x3_reply_parser_end(p, &parts, &err) == X3_OK);
    must(x3_text_put(&all, parts.reasoning.items, parts.reasoning.n_items, &err) == X3_OK);
    must(x3_text_put(&all, "|", 1, &err) == X3_OK);
    must(x3_text_put(&all, parts.content.items, parts.content.n_items, &err) == X3_OK);
    for (size_t i = 0; i < parts.calls.n_items; i++) {
        const x3_tool_call *c = &parts.calls.items[i];
        cJSON *json = NULL;
        must(c->name[0] != '\0' && x3_json_parse(&json, c->arguments, strlen(c->arguments), "", NULL) == X3_OK && cJSON_IsObject(json));
        cJSON_Delete(json);
        must(x3_text_put(&all, c->name, strlen(c->name), &err) == X3_OK);
        must(x3_text_put(&all, c->arguments, strlen(c->arguments), &err) == X3_OK);
    }
    x3_reply_parts_free(&parts);
    x3_reply_parser_free(p);
    x3_text_stream_free(s);
    x3_text_free(&ready);
    cJSON_Delete(tools);
    return all;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t n_bytes)
{
    if (n_bytes == 0)
        return 0;
    x3_text whole = parse((const char *)data + 1, n_bytes - 1, data[0], n_bytes);

    for (size_t step = 1; step < 9; step += 3) {
        x3_text pieces = parse((const char *)data + 1, n_bytes - 1, data[0], step);
        must(whole.n_items == pieces.n_items && memcmp(whole.items, pieces.items, whole.n_items) == 0);
        x3_text_free(&pieces);
    }
    x3_text_free(&whole);
    return 0;
}
