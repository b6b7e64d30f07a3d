/* The plan of a call. The logits of a divergence's teacher are those of a forward of its own
 * problem that saves nothing, in the student's chunks. */
#ifndef FLCE_PLAN_CALL_H
#define FLCE_PLAN_CALL_H

#include "flce.h"

/* The plan of the teacher's logits for the student's chunks of `chunk_rows` rows. */
flce_status flce_plan_teacher(const flce_backend* backend, const flce_problem* student,
                              int64_t chunk_rows, flce_plan* plan);

#endif
