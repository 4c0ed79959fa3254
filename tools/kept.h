/* What a pack takes over from its source unquantized, and what it leaves out, in a few lines. */
#ifndef X3_KEPT_H
#define X3_KEPT_H

#include "runtime/checkpoint.h"

/* Prints kept and dropped tensors by kind: numbers in names become *, tensors with the same name then are one line; tensors that the
 * text model does not use are one line for each part they belong to. */
x3_status x3_print_kept(const x3_checkpoint *c, x3_err *err) X3_MUST;

#endif
