/* exl3-serve: a pack as an OpenAI-style HTTP server. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "formats/io.h"
#include "runtime/serve/server.h"
#include "tools/options.h"
#include "tools/progress.h"

static struct serve_values {
    const char *pack, *host, *device, *key_file, *chat_template, *name, *kv;
    uint64_t port, ctx, parallel, cache, chunk, queue, threads, memory, grace;
    x3_list ignored;
} values = {.host = "127.0.0.1", .device = "cpu", .port = 8080, .parallel = 8, .chunk = 256, .queue = 256, .grace = 30,
          .kv = "bf16"};

#define AT(field) offsetof(struct serve_values, field)
#define CTX_DEFAULT 8192

static const x3_option options[] = {
    {"host", X3_OPT_TEXT, AT(host), "ADDRESS", "where to listen (127.0.0.1: this machine only)", 0, 0, false},
    {"port", X3_OPT_COUNT, AT(port), "N", "port (8080; 0 takes a free one)", 0, 65535, false},
    {"ctx", X3_OPT_COUNT, AT(ctx), "N", "tokens of a conversation (the model's limit, at most 8192)", 16, 1e8, false},
    {"parallel", X3_OPT_COUNT, AT(parallel), "N", "replies written at once (8)", 1, 4096, false},
    {"cache", X3_OPT_COUNT, AT(cache), "N", "tokens that the cache holds for all of them (ctx times parallel)", 64, 1e10, false},
    {"kv", X3_OPT_TEXT, AT(kv), "TYPE", "numbers of the cache: f32, bf16, int8 or int4 (bf16)", 0, 0, false},
    {"chunk", X3_OPT_COUNT, AT(chunk), "N", "rows a step: prompts go in pieces of what replies leave (256)", 2, 65536, false},
    {"queue", X3_OPT_COUNT, AT(queue), "N", "requests that may wait (256)", 0, 1e6, false},
    {"api-key-file", X3_OPT_TEXT, AT(key_file), "FILE", "API keys, one a line; without it no key is asked for", 0, 0, false},
    {"chat-template", X3_OPT_TEXT, AT(chat_template), "FILE", "a chat template other than the pack's", 0, 0, false},
    {"name", X3_OPT_TEXT, AT(name), "NAME", "the model's name for clients (the folder's)", 0, 0, false},
    {"memory", X3_OPT_SIZE, AT(memory), "SIZE", "take no more than this (what the machine has free)", 1e6, 1e15, false},
    {"grace", X3_OPT_COUNT, AT(grace), "SECONDS", "on SIGTERM, time for replies to end (30)", 0, 86400, false},
    {"device", X3_OPT_TEXT, AT(device), "D", "cpu, cuda or cuda:N (cpu)", 0, 0, false},
    {"threads", X3_OPT_COUNT, AT(threads), "N", "threads (one a processor)", 1, 1024, false},
    {"ignore-option", X3_OPT_LIST, AT(ignored), "KEY", "a config key that changes nothing", 0, 0, false},
};

/* All that is open while the server runs. */
struct service {
    x3_checkpoint *pack;
    x3_tokenizer *tokenizer;
    x3_chat_template *template;
    x3_device *dev;
    x3_engine *engine;
    x3_server *server;
    char **keys, *name;
    size_t n_keys;
    x3_findings findings;
    x3_err err;
};

static void close_service(struct service *s)
{
    if (s->engine != NULL)
        x3_engine_stop(s->engine, 0);
    x3_server_close(s->server);
    x3_engine_close(s->engine);
    x3_device_close(s->dev);
    x3_chat_template_free(s->template);
    x3_tokenizer_free(s->tokenizer);
    x3_checkpoint_close(s->pack);
    x3_server_keys_free(s->keys, s->n_keys);
    x3_findings_free(&s->findings);
    free(s->name);
}

/* ---- opening ---- */

/* Bytes that the machine can still give. 0: not known. */
static uint64_t free_memory(void)
{
    unsigned long long kib = 0;
    char line[256];
    FILE *f = fopen("/proc/meminfo", "r");

    while (f != NULL && fgets(line, sizeof line, f) != NULL && sscanf(line, "MemAvailable: %llu kB", &kib) != 1)
        ;
    if (f != NULL)
        fclose(f);
    return (uint64_t)kib * 1024;
}

/* Layers that keep float32 whatever was asked for. */
static void print_unpacked(const x3_model *m, const struct serve_values *v, x3_kv_type wanted)
{
    size_t n_float = 0, n_states = 0;

    for (size_t i = 0; i < m->n_layers; i++) {
        n_states += m->layers[i].mixer == X3_MIXER_DELTA_NET;
        n_float += m->layers[i].mixer != X3_MIXER_DELTA_NET && x3_kv_layer_type(&m->layers[i], wanted) != wanted;
    }
    if (n_float > 0)
        printf("cache       %zu of %zu layers keep float32, not %s: latent attention, or heads that are no multiple of %d up to %d\n",
               n_float, m->n_layers, v->kv, X3_KV_GROUP, X3_KV_DIM);
    if (n_states > 0)
        printf("cache       %zu of %zu layers have a recurrent state, which is float32\n", n_states, m->n_layers);
}

static x3_status read_kv_type(x3_kv_type *out, const char *name, x3_err *err)
{
    static const char *const names[] = {[X3_KV_F32] = "f32", [X3_KV_BF16] = "bf16", [X3_KV_INT8] = "int8", [X3_KV_INT4] = "int4"};

    for (int i = 0; i < 4; i++)
        if (strcmp(name, names[i]) == 0) {
            *out = (x3_kv_type)i;
            return X3_OK;
        }
    return x3_fail(err, X3_ERR_INPUT, "--kv %s: f32, bf16, int8 and int4 are known", name);
}

/* Says what it will take, and refuses when there is less. */
static x3_status check_memory(const struct service *s, const x3_engine_options *o, const struct serve_values *v, x3_err *err)
{
    const x3_resident_options r = x3_engine_resident(o);
    x3_resident_memory m;
    const bool is_device = v->memory == 0 && s->dev->capacity_bytes > 0;
    uint64_t room = v->memory > 0 ? v->memory : is_device ? s->dev->capacity_bytes : free_memory(), all;
    x3_status rc = x3_resident_memory_of(&m, s->dev, s->pack, &r, err);

    if (rc != X3_OK)
        return rc;
    if (x3_add_overflows(m.weights, m.cache, &all) || x3_add_overflows(all, m.scratch, &all))
        all = UINT64_MAX;
    printf("memory      weights %s", x3_bytes_text(m.weights));
    if (s->dev->in_place_align != 0)
        printf(" (%s mapped from the files, %s copied)", x3_bytes_text(m.mapped), x3_bytes_text(m.weights - m.mapped));
    if (m.misaligned > 0)
        printf(" (%s of them because they begin on no multiple of %zu bytes)", x3_bytes_text(m.misaligned), s->dev->in_place_align);
    printf(", cache %s (%zu tokens, %s), scratch %s\n", x3_bytes_text(m.cache), r.n_pages * X3_KV_PAGE, v->kv,
           x3_bytes_text(m.scratch));
    print_unpacked(s->pack->model, v, o->kv_type);
    if (room == 0)
        printf("memory      what %s has free is not known, and was not checked: --memory SIZE sets a limit\n", v->device);
    if (is_device) /* what is mapped lies in the page cache, which a GPU that shares it does not count as free */
        all -= x3_min_size(m.mapped, all);
    if (room > 0 && all > room)
        return x3_fail(err, X3_ERR_MEMORY, "%s are needed and %s are there: a smaller --ctx, --parallel or --cache takes less",
                       x3_bytes_text(all), x3_bytes_text(room));
    return X3_OK;
}

static x3_status make_name(struct service *s, const struct serve_values *v)
{
    const char *end = v->pack + strlen(v->pack), *begin;

    if (v->name != NULL)
        return x3_strdup(&s->name, v->name, &s->err);
    while (end > v->pack + 1 && end[-1] == '/')
        end--;
    for (begin = end; begin > v->pack && begin[-1] != '/'; begin--)
        ;
    return x3_strndup(&s->name, begin, (size_t)(end - begin), &s->err);
}

/* A model without a template can still complete texts. */
static x3_status open_template(struct service *s, const struct serve_values *v)
{
    x3_err err = {0};
    x3_status rc = x3_chat_template_open(&s->template, v->pack, v->chat_template, &err);

    if (rc == X3_OK)
        return X3_OK;
    if (v->chat_template == NULL && strstr(err.text, "no chat_template.jinja") != NULL) {
        printf("template    none: /v1/chat/completions will refuse\n");
        return X3_OK;
    }
    return x3_fail(&s->err, rc, "%s", err.text);
}

static x3_status open_files(struct service *s, const struct serve_values *v)
{
    char *path = NULL;
    x3_status rc;

    X3_TRY(rc, out, make_name(s, v));
    if (v->key_file != NULL)
        X3_TRY(rc, out, x3_server_keys_read(&s->keys, &s->n_keys, v->key_file, &s->err));
    X3_TRY(rc, out, x3_checkpoint_open(&s->pack, v->pack, v->ignored.items, &s->findings, &s->err));
    X3_TRY(rc, out, x3_path_join(&path, v->pack, "tokenizer.json", &s->err));
    X3_TRY(rc, out, x3_tokenizer_load(&s->tokenizer, path, &s->err));
    rc = open_template(s, v);
out:
    free(path);
    return rc;
}

static x3_status open_service(struct service *s, const struct serve_values *v)
{
    x3_engine_options o = {.max_sequences = v->parallel, .chunk_rows = v->chunk, .max_queued = v->queue, .keep_prefixes = true};
    x3_status rc;

    X3_TRY(rc, out, read_kv_type(&o.kv_type, v->kv, &s->err));
    X3_TRY(rc, out, open_files(s, v));
    o.max_positions = v->ctx > 0 ? v->ctx : x3_min_size(s->pack->model->max_positions, CTX_DEFAULT);
    o.n_pages = (v->cache + X3_KV_PAGE - 1) / X3_KV_PAGE;
    o.chunk_rows = x3_max_size(o.chunk_rows, o.max_sequences + 1);
    if (o.max_positions > s->pack->model->max_positions) {
        rc = x3_fail(&s->err, X3_ERR_INPUT, "--ctx %zu is more than the model's %zu", o.max_positions, s->pack->model->max_positions);
        goto out;
    }
    X3_TRY(rc, out, x3_device_open(&s->dev, v->device, (int)v->threads, &s->err));
    printf("device      %s\n", s->dev->name);
    if (s->dev->in_place_align != 0)
        X3_TRY(rc, out, x3_safetensors_map(s->pack->st, &s->err));
    X3_TRY(rc, out, check_memory(s, &o, v, &s->err));
    fflush(stdout);
    X3_TRY(rc, out, x3_engine_open(&s->engine, s->dev, s->pack, &o, &s->err));
    const x3_server_options so = {.host = v->host, .port = (uint16_t)v->port, .model_name = s->name, .engine = s->engine,
                                  .max_positions = o.max_positions, .checkpoint = s->pack, .tokenizer = s->tokenizer,
                                  .template = s->template, .keys = (const char *const *)s->keys, .n_keys = s->n_keys};
    rc = x3_server_open(&s->server, &so, &s->err);
out:
    return rc;
}

/* ---- running ---- */

static int run_serve(void *arg, const char *command_line)
{
    struct serve_values *v = arg;
    struct service s = {0};
    x3_reporter r;
    sigset_t signals;
    int code = 0, which;

    (void)command_line;
    x3_reporter_open(&r, false);
    signal(SIGPIPE, SIG_IGN);
    sigemptyset(&signals);
    sigaddset(&signals, SIGINT);
    sigaddset(&signals, SIGTERM);
    pthread_sigmask(SIG_BLOCK, &signals, NULL); /* before there are threads: they inherit it */
    if (open_service(&s, v) != X3_OK) {
        code = x3_report_error(&r, &s.findings, &s.err);
    } else {
        printf("serving     %s at http://%s%s%s:%u/\n", s.name, strchr(v->host, ':') != NULL ? "[" : "", v->host,
               strchr(v->host, ':') != NULL ? "]" : "", (unsigned)x3_server_port(s.server));
        fflush(stdout);
        sigwait(&signals, &which);
        printf("stopping    up to %llu s for replies being written\n", (unsigned long long)v->grace);
        fflush(stdout);
        pthread_sigmask(SIG_UNBLOCK, &signals, NULL); /* a second signal ends at once */
        x3_server_quiesce(s.server);
        x3_engine_stop(s.engine, (double)v->grace);
    }
    close_service(&s);
    return code;
}

static const x3_command command = {"", "an OpenAI-style HTTP server for an EXL3 pack or a BF16 checkpoint", {"PACK"}, {AT(pack)}, options,
                                   sizeof options / sizeof options[0], run_serve, &values};

int main(int argc, char **argv)
{
    return x3_main_single("exl3-serve", &command, argc, argv);
}
