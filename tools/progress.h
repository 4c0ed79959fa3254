/* Progress on stderr: one line that is rewritten on a terminal, a plain line a step otherwise (at most
 * one a second), JSON lines with --json. */
#ifndef X3_PROGRESS_H
#define X3_PROGRESS_H

#include "formats/base.h"

typedef enum x3_progress_mode { X3_PROGRESS_TERMINAL, X3_PROGRESS_PLAIN, X3_PROGRESS_JSON } x3_progress_mode;

typedef struct x3_reporter {
    x3_progress_mode mode;
    double started, first_done, first_time; /* of the work: a resumed job starts above zero */
    double last_time;
    bool line_open;
} x3_reporter;

void x3_reporter_open(x3_reporter *r, bool json);
/* done of total, in any unit; `what` is going on now. */
void x3_reporter_progress(x3_reporter *r, double done, double total, const char *what);
void x3_reporter_note(x3_reporter *r, const char *text);
/* Ends an open line. */
void x3_reporter_close(x3_reporter *r);
/* "error: ..." or a JSON line; all findings first. Returns the exit code 1. */
int x3_report_error(x3_reporter *r, const x3_findings *findings, const x3_err *err);

/* "1.25 GB", "12.3 MB" into a static ring. */
const char *x3_bytes_text(uint64_t n);
/* "1:02:03" or "2:03". */
const char *x3_seconds_text(double s);

#endif
