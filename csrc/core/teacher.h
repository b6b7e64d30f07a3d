/* The teacher of a divergence: its logits are those of a forward of its own problem that saves
 * nothing, in the student's chunks. */
#ifndef FLCE_TEACHER_H
#define FLCE_TEACHER_H

#include "flce.h"

/* The plan of the teacher's logits for the student's chunks of `chunk_rows` rows. */
flce_status flce_plan_teacher(const flce_backend* backend, const flce_problem* student,
                              int64_t chunk_rows, flce_plan* plan);
/* Refuses what a divergence excludes. */
flce_status flce_check_teacher(const flce_problem* problem);

#endif
