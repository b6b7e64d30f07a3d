/* The teacher of a divergence: the steps that engine.c takes for it. The teacher's logits are those
 * of an execution of its own, a forward that saves nothing, whose workspace is a part of the
 * student's. It has the student's chunks, rows and ranks. */
#ifndef FLCE_TEACHER_H
#define FLCE_TEACHER_H

#include "core/shards.h"

/* The memory of that execution: what its records point to. */
typedef struct teacher_call {
  execution forward;
  flce_plan plan;
  flce_problem problem;
  flce_tensors tensors;
  shard_call shard;
} teacher_call;

/* The teacher's rows of a chunk. */
typedef struct teacher_rows {
  flce_rows rows;        /* z and statistics of all classes */
  flce_fused_call fused; /* the call of fused_logits that made them, if one did */
} teacher_rows;

/* Plans the teacher's logits, opens its operands, and sets e->teacher. `student` and `caller` are
 * the problem and the tensors of the caller. */
flce_status flce_open_teacher(execution* e, const flce_problem* student, const flce_tensors* caller,
                              teacher_call* call);
/* Logits and statistics of the teacher's rows of the chunk at `first`. They precede the student's:
 * its logits GEMM may read them. */
flce_status flce_teacher_rows(const execution* e, int64_t first, teacher_rows* teacher);
/* A chunk of the student, whose logits GEMM packs the logits of both if the plan says so. `teacher`
 * has to outlive it. */
chunk flce_student_chunk(const execution* e, int64_t first, const teacher_rows* teacher);
/* Losses of the chunk's rows. */
flce_status flce_divergence_losses(const execution* e, const chunk* c, const teacher_rows* teacher);
/* The same, and dz for grad_output = 1. */
flce_status flce_divergence_dz(const execution* e, const chunk* c, const teacher_rows* teacher);

#endif
