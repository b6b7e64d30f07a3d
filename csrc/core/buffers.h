/* The buffers of a plan. */
#ifndef FLCE_BUFFERS_H
#define FLCE_BUFFERS_H

#include "flce.h"

/* Sets the plan's buffers, their offsets in the workspaces, and the bytes of both passes: what
 * follows from everything else in it. */
void flce_list_buffers(const flce_problem* problem, const flce_facts* facts, flce_plan* plan);

#endif
