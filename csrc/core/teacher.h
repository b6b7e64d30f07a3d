/* The teacher of a divergence as a problem of its own: its logits are those of a forward that saves
 * nothing, with the student's rows and chunks. */
#ifndef FLCE_TEACHER_H
#define FLCE_TEACHER_H

#include "flce.h"

/* The problem of the teacher's logits. With given logits these are its input, of their own dtype.
 */
flce_problem flce_teacher_problem(const flce_problem* problem);
/* Its plan, for chunks of `chunk_rows` rows; a part of the student's workspace is its workspace. */
flce_status flce_plan_teacher(const flce_backend* backend, const flce_problem* teacher,
                              int64_t chunk_rows, flce_plan* plan);
/* Refuses a divergence that the options of `problem` exclude, and numbers out of range. */
flce_status flce_check_teacher(const flce_problem* problem);

/* Whether the row pass reads given logits where they are: neither gathered nor converted. */
static inline bool flce_reads_given(const flce_problem* problem, const flce_plan* plan) {
  return problem->teacher.gives_logits && !plan->gathers &&
         problem->teacher.input_dtype == flce_stat_dtype(problem->dtype);
}

#endif
