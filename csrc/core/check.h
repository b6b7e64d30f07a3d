/* The checks of a problem; that of its loss is flce_check_loss (flce.h). */
#ifndef FLCE_CHECK_H
#define FLCE_CHECK_H

#include "flce.h"

/* FLCE_INVALID_ARGUMENT if a size, dtype or option is out of its range. */
flce_status flce_check_problem(const flce_problem* problem);
flce_status flce_check_shard(const flce_problem* problem); /* called by flce_check_problem too */

#endif
