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

static inline bool flce_is_teacher(const flce_problem* problem) {
  return problem->divergence != FLCE_NO_DIVERGENCE && !problem->teacher;
}

/* Whether the row passes read the teacher's given logits in the caller's memory: they are neither
 * gathered nor converted. */
static inline bool flce_reads_given(const flce_problem* teacher, const flce_plan* plan) {
  return teacher->gives_logits && !plan->gathers && flce_size_of(teacher->input_dtype) > 2;
}

#endif
