/* exl3-quantize measure and plan, and the plan that `run --bits` makes for itself. */
#ifndef X3_PLAN_COMMANDS_H
#define X3_PLAN_COMMANDS_H

#include "quant/plan.h"
#include "tools/options.h"
#include "tools/progress.h"

extern const x3_command x3_measure_command, x3_plan_command;

/* measure and plan in one, for `run --bits X` without --uniform. A finished measurement of the same options at
 * measure_path is used again; with options->resume one of other options is refused. */
x3_status x3_plan_for_run(const x3_job_options *options, const char *measure_path, const char *recipe_path,
                          const x3_job_events *events, x3_findings *findings, x3_err *err) X3_MUST;

#endif
