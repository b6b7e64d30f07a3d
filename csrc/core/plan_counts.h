/* What a plan costs other than memory. */
#ifndef FLCE_PLAN_COUNTS_H
#define FLCE_PLAN_COUNTS_H

#include "flce.h"

/* The numbers of GEMMs and collectives of a plan whose chunks are chosen, and its sampled_time. */
void flce_count_plan(const flce_problem* problem, const flce_facts* facts, flce_plan* plan);

#endif
