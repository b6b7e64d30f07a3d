/* The parts of flce_plan_make and flce_choose_dtypes that strategy.c and plan_call.c need. */
#ifndef FLCE_PLAN_H
#define FLCE_PLAN_H

#include "flce.h"

/* The part of flce_choose_dtypes that concerns the logits and what is saved of them. plan->strategy
 * is set. */
void flce_choose_logits(const flce_problem* problem, const flce_facts* facts, flce_plan* plan);
/* flce_plan_make of a problem that flce_check_problem has accepted. */
flce_status flce_plan_checked(const flce_problem* problem, const flce_facts* facts,
                              flce_plan* plan);

#endif
