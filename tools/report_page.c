/* The page of a report: HTML and SVG with everything in it, no script, nothing loaded from elsewhere. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tools/progress.h"
#include "tools/report.h"

static const char style[] =
    ":root{--ink:#1c2430;--soft:#5c6675;--line:#d7dce3;--paper:#fff;--band:#f5f7fa}"
    "@media(prefers-color-scheme:dark){:root{--ink:#e6e9ee;--soft:#9aa5b4;--line:#39424e;--paper:#14181d;--band:#1c222a}}"
    "body{font:15px/1.5 system-ui,sans-serif;color:var(--ink);background:var(--paper);max-width:1080px;margin:2em auto;"
    "padding:0 1em}h1{font-size:1.6em}h2{font-size:1.25em;margin-top:2.2em;border-top:1px solid var(--line);padding-top:.8em}"
    "h3{font-size:1em;margin:1.6em 0 .4em}p.note{color:var(--soft);margin:.3em 0}table{border-collapse:collapse;"
    "font-variant-numeric:tabular-nums}.scroll{overflow-x:auto}th,td{padding:.25em .7em;text-align:right;white-space:nowrap}"
    "th{color:var(--soft);font-weight:600;border-bottom:1px solid var(--line)}td:first-child,th:first-child{text-align:left}"
    "tbody tr:nth-child(even){background:var(--band)}table.map td{padding:.15em .5em;text-align:center;min-width:2.2em;"
    "border:1px solid var(--paper)}table.map th{writing-mode:vertical-rl;transform:rotate(180deg);text-align:left;"
    "font-weight:400;padding:.4em .2em}table.map th:first-child{writing-mode:horizontal-tb;transform:none}"
    "table.map tbody tr{background:none}svg{display:block;max-width:100%;height:auto}svg text{fill:var(--ink);"
    "font:12px system-ui,sans-serif}svg .axis{stroke:var(--line)}svg .soft{fill:var(--soft)}"
    ".k{display:inline-block;width:1.6em;text-align:center;margin-right:.2em}";

/* K = 1 .. 8, and the text on it; light to dark, so that it reads in grey too. */
static const char *const k_fill[] = {"#fde725", "#a0da39", "#4ac16d", "#1fa187", "#277f8e", "#365c8d", "#46327e", "#440154"};
static const char *const k_ink[] = {"#111", "#111", "#111", "#fff", "#fff", "#fff", "#fff", "#fff"};
static const char *const series_color[] = {"#2e7ebc", "#d9662b", "#3a9a52", "#a24fb5", "#b59a1e", "#c0394b"};

#define N_SERIES (sizeof series_color / sizeof series_color[0])

static void put_text(FILE *f, const char *text)
{
    for (; *text != '\0'; text++)
        switch (*text) {
        case '<': fputs("&lt;", f); break;
        case '>': fputs("&gt;", f); break;
        case '&': fputs("&amp;", f); break;
        case '"': fputs("&quot;", f); break;
        case '\'': fputs("&#39;", f); break;
        default: fputc(*text, f);
        }
}

static void put_cell(FILE *f, const char *text)
{
    fputs("<td>", f);
    put_text(f, text);
    fputs("</td>", f);
}

/* ---- KL against bytes ---- */

struct plot {
    double x0, x1, y0, y1; /* bytes; log10 of KL */
};

enum { PLOT_W = 960, PLOT_H = 440, LEFT = 80, RIGHT = 200, TOP = 20, BOTTOM = 50 };

static double plot_x(const struct plot *p, double bytes)
{
    return LEFT + (bytes - p->x0) / (p->x1 - p->x0) * (PLOT_W - LEFT - RIGHT);
}

static double plot_y(const struct plot *p, double kl)
{
    return TOP + (p->y1 - log10(kl)) / (p->y1 - p->y0) * (PLOT_H - TOP - BOTTOM);
}

static bool same_reference(const x3_report_score *a, const x3_report_score *b)
{
    return strcmp(a->reference, b->reference) == 0;
}

/* KL of a score as the logarithmic axis can show it. */
static double shown(double kl)
{
    return fmax(kl, 1e-7);
}

static struct plot frame(const x3_report *r, const x3_report_score *of)
{
    struct plot p = {.x0 = of->bytes, .x1 = of->bytes, .y0 = log10(shown(of->kl)), .y1 = log10(shown(of->kl))};

    for (size_t i = 0; i < r->n_scores; i++) {
        const x3_report_score *s = &r->scores[i];
        if (!same_reference(s, of))
            continue;
        p.x0 = fmin(p.x0, s->bytes);
        p.x1 = fmax(p.x1, s->bytes);
        p.y0 = fmin(p.y0, log10(shown(fmax(s->kl - 2 * s->kl_stderr, s->kl / 2))));
        p.y1 = fmax(p.y1, log10(shown(s->kl + 2 * s->kl_stderr)));
    }
    double margin = p.x1 > p.x0 ? 0.06 * (p.x1 - p.x0) : 0.1 * p.x0 + 1;
    p.x0 -= margin;
    p.x1 += margin;
    p.y0 -= 0.08;
    p.y1 += 0.08;
    return p;
}

static double nice_step(double range)
{
    double step = pow(10, floor(log10(range / 4)));

    return range / step > 20 ? 5 * step : range / step > 8 ? 2 * step : step;
}

static void put_axes(FILE *f, const struct plot *p)
{
    const double step = nice_step(p->x1 - p->x0);
    const bool wide = p->y1 - p->y0 > 1; /* then 1, 2 and 5 of a decade will do */

    for (double b = ceil(p->x0 / step) * step; b <= p->x1; b += step)
        fprintf(f, "<line class='axis' x1='%.1f' x2='%.1f' y1='%d' y2='%d'/><text class='soft' text-anchor='middle' x='%.1f' "
                   "y='%d'>%s</text>\n",
                plot_x(p, b), plot_x(p, b), TOP, PLOT_H - BOTTOM, plot_x(p, b), PLOT_H - BOTTOM + 18,
                x3_bytes_text((uint64_t)fmax(b, 0)));
    for (int e = (int)floor(p->y0); e <= (int)ceil(p->y1); e++)
        for (int m = 1; m < 10; m++) {
            const double kl = m * pow(10, e);
            if (log10(kl) < p->y0 || log10(kl) > p->y1 || (wide && m != 1 && m != 2 && m != 5))
                continue;
            fprintf(f, "<line class='axis' x1='%d' x2='%d' y1='%.1f' y2='%.1f'/><text class='soft' text-anchor='end' x='%d' "
                       "y='%.1f'>%g</text>\n",
                    LEFT, PLOT_W - RIGHT, plot_y(p, kl), plot_y(p, kl), LEFT - 8, plot_y(p, kl) + 4, kl);
        }
    fprintf(f, "<text class='soft' x='%d' y='%d'>bytes of safetensors</text>"
               "<text class='soft' x='14' y='%d' transform='rotate(-90 14 %d)' text-anchor='middle'>mean KL, nats</text>\n",
            LEFT, PLOT_H - 8, PLOT_H / 2, PLOT_H / 2);
}

static void put_points(FILE *f, const x3_report *r, const x3_report_score *of, const struct plot *p)
{
    size_t n = 0;

    for (size_t i = 0; i < r->n_scores; i++) {
        const x3_report_score *s = &r->scores[i];
        if (!same_reference(s, of))
            continue;
        const char *color = series_color[n++ % N_SERIES];
        double x = plot_x(p, s->bytes), y = plot_y(p, shown(s->kl));
        double low = plot_y(p, shown(fmax(s->kl - s->kl_stderr, s->kl / 2))), high = plot_y(p, shown(s->kl + s->kl_stderr));
        fprintf(f, "<g stroke='%s' fill='%s'><line x1='%.1f' x2='%.1f' y1='%.1f' y2='%.1f'/><circle cx='%.1f' cy='%.1f' r='5'>"
                   "<title>",
                color, color, x, x, low, high, x, y);
        put_text(f, s->name);
        fprintf(f, ": %.4f bits, %s, KL %.5f +- %.5f</title></circle></g><text x='%.1f' y='%.1f'>", s->bits_body,
                x3_bytes_text((uint64_t)s->bytes), s->kl, s->kl_stderr, x + 9, y + 4);
        put_text(f, s->name);
        fputs("</text>\n", f);
    }
}

static void put_score_table(FILE *f, const x3_report *r, const x3_report_score *of)
{
    fputs("<div class='scroll'><table><thead><tr><th>pack</th><th>bits</th><th>head</th><th>bytes</th><th>KL</th><th>s.e.</th>"
          "<th>p99</th><th>top-1 %</th><th>NLL</th><th>NLL reference</th><th>not finite</th></tr></thead><tbody>\n",
          f);
    for (size_t i = 0; i < r->n_scores; i++) {
        const x3_report_score *s = &r->scores[i];
        if (!same_reference(s, of))
            continue;
        fputs("<tr>", f);
        put_cell(f, s->name);
        fprintf(f, "<td>%.4f</td><td>%g</td><td>%.0f</td><td>%.5f</td><td>%.5f</td><td>%.4f</td><td>%.2f</td><td>%.4f</td>"
                   "<td>%.4f</td><td>%g</td></tr>\n",
                s->bits_body, s->bits_head, s->bytes, s->kl, s->kl_stderr, s->kl_p99, 100 * s->top1, s->nll_pack,
                s->nll_reference, s->nonfinite);
    }
    fputs("</tbody></table></div>\n", f);
}

static void put_scores(FILE *f, const x3_report *r)
{
    for (size_t i = 0; i < r->n_scores; i++) {
        const x3_report_score *of = &r->scores[i];
        bool seen = false;
        for (size_t j = 0; j < i; j++)
            seen = seen || same_reference(&r->scores[j], of);
        if (seen)
            continue;
        struct plot p = frame(r, of);
        fputs("<h2>KL against size: ", f);
        put_text(f, of->source);
        fprintf(f, "</h2><p class='note'>KL(reference || pack) in nats, mean over %.0f positions in rows of %.0f; bars are one "
                   "standard error over rows. Text: ",
                of->positions, of->ctx);
        put_text(f, of->text);
        fputs("; reference ", f);
        put_text(f, of->reference);
        fprintf(f, ".</p>\n<svg viewBox='0 0 %d %d' role='img'>\n", PLOT_W, PLOT_H);
        put_axes(f, &p);
        put_points(f, r, of, &p);
        fputs("</svg>\n", f);
        put_score_table(f, r, of);
    }
}

/* ---- a pack ---- */

#define COLUMNS_MAX 64

struct columns {
    const char *names[COLUMNS_MAX];
    size_t n;
    int n_layers, n_experts;
};

static struct columns find_columns(const x3_report_pack *p)
{
    struct columns c = {.n_layers = 0};

    for (size_t i = 0; i < p->n_groups; i++) {
        const x3_report_group *g = &p->groups[i];
        size_t j = 0;
        if (g->layer < 0)
            continue;
        c.n_layers = g->layer >= c.n_layers ? g->layer + 1 : c.n_layers;
        if (g->tokens >= 0)
            c.n_experts = g->expert >= c.n_experts ? g->expert + 1 : c.n_experts;
        while (j < c.n && strcmp(c.names[j], g->projection) != 0)
            j++;
        if (j == c.n && c.n < COLUMNS_MAX)
            c.names[c.n++] = g->projection;
    }
    return c;
}

static size_t column_of(const struct columns *c, const char *projection)
{
    size_t j = 0;

    while (j < c->n && strcmp(c->names[j], projection) != 0)
        j++;
    return j;
}

struct cell {
    double sum;
    int n, least, most;
};

static void put_k_cell(FILE *f, const struct cell *c)
{
    if (c->n == 0) {
        fputs("<td></td>", f);
        return;
    }
    const double mean = c->sum / c->n;
    const int shade = (int)fmin(fmax(rint(mean), 1), 8) - 1;
    fprintf(f, "<td style='background:%s;color:%s' title='", k_fill[shade], k_ink[shade]);
    if (c->n > 1)
        fprintf(f, "%d tensors, K %d to %d", c->n, c->least, c->most);
    else
        fprintf(f, "K %d", c->least);
    fprintf(f, c->least == c->most ? "'>%.0f</td>" : "'>%.1f</td>", mean);
}

static x3_status put_k_map(FILE *f, const x3_report_pack *p, const struct columns *c, x3_err *err)
{
    struct cell *cells = NULL;
    x3_status rc = x3_alloc(&cells, (uint64_t)c->n_layers * c->n, sizeof *cells, err);

    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < p->n_groups; i++) {
        const x3_report_group *g = &p->groups[i];
        const size_t column = column_of(c, g->projection);
        if (g->layer < 0 || column == c->n)
            continue;
        struct cell *at = &cells[(size_t)g->layer * c->n + column];
        at->sum += g->K;
        at->least = at->n == 0 || g->K < at->least ? g->K : at->least;
        at->most = g->K > at->most ? g->K : at->most;
        at->n++;
    }
    fputs("<h3>K by layer and projection</h3><p class='note'>Of experts: the mean over the layer.</p><p>", f);
    for (int k = 0; k < 8; k++)
        fprintf(f, "<span class='k' style='background:%s;color:%s'>%d</span>", k_fill[k], k_ink[k], k + 1);
    fputs("</p><div class='scroll'><table class='map'><thead><tr><th>layer</th>", f);
    for (size_t j = 0; j < c->n; j++) {
        fputs("<th>", f);
        put_text(f, c->names[j]);
        fputs("</th>", f);
    }
    fputs("</tr></thead><tbody>\n", f);
    for (int layer = 0; layer < c->n_layers; layer++) {
        fprintf(f, "<tr><td>%d</td>", layer);
        for (size_t j = 0; j < c->n; j++)
            put_k_cell(f, &cells[(size_t)layer * c->n + j]);
        fputs("</tr>\n", f);
    }
    fputs("</tbody></table></div>\n", f);
    free(cells);
    return X3_OK;
}

/* A row of experts a layer: neighbours of one color are one rectangle. */
static void put_expert_row(FILE *f, const char *const *colors, int n, double width, int y, int height)
{
    for (int e = 0; e < n;) {
        int end = e + 1;
        while (end < n && strcmp(colors[end], colors[e]) == 0)
            end++;
        fprintf(f, "<rect x='%.2f' y='%d' width='%.2f' height='%d' fill='%s'/>", 40 + e * width, y, (end - e) * width, height,
                colors[e]);
        e = end;
    }
    fprintf(f, "\n");
}

/* Red for none; else ten steps from a sixteenth of an even share (pale) to four times that (dark). */
static const char *token_color(double tokens, double mean)
{
    static const char *const steps[] = {"#fff1a8", "#fde39b", "#d8e3b0", "#b0d8c4", "#86c6d0",
                                        "#5fafd3", "#4293c8", "#2f76b5", "#255a98", "#1c3f75"};

    if (tokens <= 0)
        return "#d7263d";
    return steps[(int)fmin(9, fmax(0, 10 * (log2(tokens / mean) + 4) / 6))];
}

static double mean_tokens(const x3_report_pack *p)
{
    double sum = 0;
    size_t n = 0;

    for (size_t i = 0; i < p->n_groups; i++)
        if (p->groups[i].tokens >= 0) {
            sum += p->groups[i].tokens;
            n++;
        }
    return sum > 0 ? sum / (double)n : 1;
}

static const x3_report_group *expert_group(const x3_report_group *const *at, int n_experts, int layer, int expert, int part)
{
    return at[((size_t)layer * (size_t)n_experts + (size_t)expert) * 3 + (size_t)part];
}

/* Groups of experts by [layer][expert][part], part in order of the receipt. */
static x3_status index_experts(const x3_report_pack *p, const struct columns *c, const x3_report_group ***out, x3_err *err)
{
    const x3_report_group **at = NULL;
    x3_status rc = x3_alloc(&at, (uint64_t)c->n_layers * (uint64_t)c->n_experts * 3, sizeof *at, err);

    for (size_t i = 0; rc == X3_OK && i < p->n_groups; i++) {
        const x3_report_group *g = &p->groups[i];
        if (g->tokens < 0 || g->layer < 0 || g->expert < 0)
            continue;
        const x3_report_group **slot = &at[((size_t)g->layer * (size_t)c->n_experts + (size_t)g->expert) * 3];
        for (int part = 0; part < 3; part++)
            if (slot[part] == NULL) {
                slot[part] = g;
                break;
            }
    }
    *out = at;
    return rc;
}

static void put_token_summary(FILE *f, const x3_report_pack *p)
{
    double least = -1, most = 0;
    size_t n = 0, empty = 0, blended = 0;

    for (size_t i = 0; i < p->n_groups; i++) {
        const x3_report_group *g = &p->groups[i];
        if (g->tokens < 0)
            continue;
        n++;
        least = least < 0 || g->tokens < least ? g->tokens : least;
        most = fmax(most, g->tokens);
        empty += g->tokens == 0;
        blended += g->blended > 0;
    }
    fprintf(f, "<p class='note'>Least %.0f, mean %.0f, most %.0f. Tensors of experts without a token: %zu; with a Hessian that is "
               "blended with the layer's: %zu of %zu. Red is none, pale is few, dark is many: from a sixteenth of the mean to four times it, logarithmic.</p>\n",
            least, mean_tokens(p), most, empty, blended, n);
}

static x3_status put_experts(FILE *f, const x3_report_pack *p, const struct columns *c, x3_err *err)
{
    enum { ROW = 14 };
    static const char *const parts[] = {"gate", "up", "down"};
    const double width = fmin(24, 900.0 / c->n_experts), mean = mean_tokens(p);
    const x3_report_group **at = NULL;
    const char **colors = NULL;
    x3_status rc;

    X3_TRY(rc, out, index_experts(p, c, &at, err));
    X3_TRY(rc, out, x3_alloc(&colors, (uint64_t)c->n_experts, sizeof *colors, err));
    for (int map = -1; map < 3; map++) { /* tokens, then K of each part */
        fprintf(f, map < 0 ? "<h3>Calibration tokens of experts%s</h3>" : "<h3>K of experts, %s projection</h3>",
                map < 0 ? "" : parts[map]);
        if (map < 0)
            put_token_summary(f, p);
        fprintf(f, "<p class='note'>A row is a layer, a column an expert (0 to %d).</p><svg viewBox='0 0 %.0f %d' "
                   "style='width:%.0fpx' role='img' shape-rendering='crispEdges'>\n",
                c->n_experts - 1, 44 + width * c->n_experts, (ROW + 1) * c->n_layers, 44 + width * c->n_experts);
        for (int layer = 0; layer < c->n_layers; layer++) {
            bool any = false;
            for (int e = 0; e < c->n_experts; e++) {
                const x3_report_group *g = expert_group(at, c->n_experts, layer, e, map < 0 ? 0 : map);
                any = any || g != NULL;
                colors[e] = g == NULL ? "none" : map < 0 ? token_color(g->tokens, mean) : k_fill[g->K - 1];
            }
            if (!any)
                continue;
            fprintf(f, "<text class='soft' x='32' y='%d' text-anchor='end'>%d</text>", layer * (ROW + 1) + 11, layer);
            put_expert_row(f, colors, c->n_experts, width, layer * (ROW + 1), ROW);
        }
        fputs("</svg>\n", f);
    }
out:
    free(at);
    free(colors);
    return rc;
}

static int by_error(const void *a, const void *b)
{
    const x3_report_group *x = *(const x3_report_group *const *)a, *y = *(const x3_report_group *const *)b;

    return (x->error_source < y->error_source) - (x->error_source > y->error_source);
}

static x3_status put_worst(FILE *f, const x3_report_pack *p, x3_err *err)
{
    enum { SHOWN = 20 };
    const x3_report_group **order = NULL;
    x3_status rc = x3_alloc(&order, p->n_groups, sizeof *order, err);

    if (rc != X3_OK)
        return rc;
    for (size_t i = 0; i < p->n_groups; i++)
        order[i] = &p->groups[i];
    qsort(order, p->n_groups, sizeof *order, by_error);
    fputs("<h3>The worst tensors</h3><p class='note'>Error: lost part of the output's energy on the calibration text, against "
          "the source's weight and against the target of the encoder.</p><div class='scroll'><table><thead><tr><th>tensor</th>"
          "<th>K</th><th>error</th><th>against target</th><th>weights</th><th>tokens</th><th>blended</th></tr></thead><tbody>\n",
          f);
    for (size_t i = 0; i < x3_min_size(SHOWN, p->n_groups); i++) {
        const x3_report_group *g = order[i];
        fputs("<tr>", f);
        put_cell(f, g->name);
        fprintf(f, "<td>%d</td><td>%.4g</td><td>%.4g</td><td>%.0f</td>", g->K, g->error_source, g->error_target, g->weights);
        if (g->tokens >= 0)
            fprintf(f, "<td>%.0f</td><td>%.0f %%</td></tr>\n", g->tokens, 100 * g->blended);
        else
            fputs("<td></td><td></td></tr>\n", f);
    }
    fputs("</tbody></table></div>\n", f);
    free(order);
    return X3_OK;
}

static x3_status put_pack(FILE *f, const x3_report_pack *p, x3_err *err)
{
    const struct columns c = find_columns(p);
    x3_status rc;

    fputs("<h2>Pack: ", f);
    put_text(f, p->name);
    fputs("</h2><p class='note'>Made of ", f);
    put_text(f, p->source);
    fprintf(f, "; %.4f bits, head %g, %.0f bytes, %zu groups; calibrated on %.0f rows of %.0f tokens.</p>\n", p->bits_body,
            p->bits_head, p->bytes, p->n_groups, p->rows, p->cols);
    X3_TRY(rc, out, put_k_map(f, p, &c, err));
    if (c.n_experts > 0)
        X3_TRY(rc, out, put_experts(f, p, &c, err));
    rc = put_worst(f, p, err);
out:
    return rc;
}

x3_status x3_report_page(const x3_report *r, char **html, size_t *n_bytes, x3_err *err)
{
    FILE *f = open_memstream(html, n_bytes);
    x3_status rc = X3_OK;

    if (f == NULL)
        return x3_fail(err, X3_ERR_MEMORY, "out of memory: report");
    fprintf(f, "<!doctype html>\n<html lang='en'><head><meta charset='utf-8'><meta name='viewport' "
               "content='width=device-width'><title>EXL3 packs</title><style>%s</style></head><body>\n<h1>EXL3 packs</h1>"
               "<p class='note'>%zu scores, %zu packs; exl3-eval %s.</p>\n",
            style, r->n_scores, r->n_packs, X3_VERSION);
    put_scores(f, r);
    for (size_t i = 0; i < r->n_packs && rc == X3_OK; i++)
        rc = put_pack(f, &r->packs[i], err);
    fputs("</body></html>\n", f);
    if (fclose(f) != 0 && rc == X3_OK)
        rc = x3_fail(err, X3_ERR_MEMORY, "out of memory: report");
    if (rc != X3_OK) {
        free(*html);
        *html = NULL;
    }
    return rc;
}
