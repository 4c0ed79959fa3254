#include "tools/progress.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "formats/json.h"

void x3_reporter_open(x3_reporter *r, bool json)
{
    *r = (x3_reporter){.started = x3_seconds(), .first_done = -1};
    r->mode = json ? X3_PROGRESS_JSON : isatty(STDERR_FILENO) ? X3_PROGRESS_TERMINAL : X3_PROGRESS_PLAIN;
}

static char *next_text(void)
{
    static char ring[8][32];
    static unsigned at;

    return ring[at++ % 8];
}

const char *x3_bytes_text(uint64_t n)
{
    char *text = next_text();

    if (n >= 1000000000)
        snprintf(text, 32, "%.2f GB", (double)n / 1e9);
    else if (n >= 1000000)
        snprintf(text, 32, "%.1f MB", (double)n / 1e6);
    else
        snprintf(text, 32, "%llu bytes", (unsigned long long)n);
    return text;
}

const char *x3_seconds_text(double s)
{
    char *text = next_text();
    long n = (long)(s + 0.5);

    if (n >= 3600)
        snprintf(text, 32, "%ld:%02ld:%02ld", n / 3600, n / 60 % 60, n % 60);
    else
        snprintf(text, 32, "%ld:%02ld", n / 60, n % 60);
    return text;
}

static void json_line(cJSON *j)
{
    char *text = cJSON_PrintUnformatted(j);

    if (text != NULL)
        fprintf(stderr, "%s\n", text);
    cJSON_free(text);
    cJSON_Delete(j);
}

/* Seconds that are left at the pace since the first progress above the starting point; negative: unknown. */
static double eta(x3_reporter *r, double done, double total, double now)
{
    if (r->first_done < 0) {
        r->first_done = done;
        r->first_time = now;
    }
    return done > r->first_done ? (total - done) * (now - r->first_time) / (done - r->first_done) : -1;
}

void x3_reporter_progress(x3_reporter *r, double done, double total, const char *what)
{
    double now = x3_seconds(), left = eta(r, done, total, now), part = total > 0 ? 100 * done / total : 0;

    if (r->mode == X3_PROGRESS_JSON) {
        cJSON *j = cJSON_CreateObject();
        cJSON_AddStringToObject(j, "event", "progress");
        cJSON_AddStringToObject(j, "what", what);
        cJSON_AddNumberToObject(j, "percent", part);
        cJSON_AddNumberToObject(j, "seconds", now - r->started);
        if (left >= 0)
            cJSON_AddNumberToObject(j, "eta_seconds", left);
        json_line(j);
    } else if (r->mode == X3_PROGRESS_TERMINAL) {
        if (now - r->last_time < 0.1 && done < total)
            return;
        r->last_time = now;
        fprintf(stderr, "\r\033[K%5.1f %%  %s  %s%s  %.60s", part, x3_seconds_text(now - r->started),
                left >= 0 ? "ETA " : "", left >= 0 ? x3_seconds_text(left) : "", what);
        r->line_open = true;
        fflush(stderr);
    } else {
        if (now - r->last_time < 1 && done < total)
            return;
        r->last_time = now;
        fprintf(stderr, "%5.1f %%  %s  %s%s  %s\n", part, x3_seconds_text(now - r->started), left >= 0 ? "ETA " : "",
                left >= 0 ? x3_seconds_text(left) : "", what);
    }
}

void x3_reporter_close(x3_reporter *r)
{
    if (r->line_open)
        fprintf(stderr, "\r\033[K");
    r->line_open = false;
}

void x3_reporter_note(x3_reporter *r, const char *text)
{
    if (r->mode == X3_PROGRESS_JSON) {
        cJSON *j = cJSON_CreateObject();
        cJSON_AddStringToObject(j, "event", "note");
        cJSON_AddStringToObject(j, "text", text);
        json_line(j);
        return;
    }
    x3_reporter_close(r);
    fprintf(stderr, "note: %s\n", text);
}

int x3_report_error(x3_reporter *r, const x3_findings *findings, const x3_err *err)
{
    x3_reporter_close(r);
    if (r->mode == X3_PROGRESS_JSON) {
        cJSON *j = cJSON_CreateObject(), *list = cJSON_AddArrayToObject(j, "findings");
        cJSON_AddStringToObject(j, "event", "error");
        cJSON_AddStringToObject(j, "text", err->text);
        for (size_t i = 0; findings != NULL && i < findings->n_items; i++)
            cJSON_AddItemToArray(list, cJSON_CreateString(findings->items[i]));
        json_line(j);
        return 1;
    }
    if (findings != NULL && findings->n_items > 0) {
        for (size_t i = 0; i < findings->n_items; i++)
            fprintf(stderr, "error: %s\n", findings->items[i]);
        if (findings->n_dropped > 0)
            fprintf(stderr, "error: and %zu more\n", findings->n_dropped);
        if (err->status != X3_ERR_INPUT || strncmp(err->text, findings->items[0], strlen(findings->items[0])) != 0)
            fprintf(stderr, "error: %s\n", err->text);
        return 1;
    }
    fprintf(stderr, "error: %s\n", err->text);
    return 1;
}
