/* Implements teacher.h. */
#include "core/teacher.h"

#include "core/chunk_memory.h"
#include "core/forward_steps.h"
#include "core/plan_call.h"
#include "core/steps.h"

flce_status flce_open_teacher(execution* e, const flce_problem* student, const flce_tensors* caller,
                              teacher_call* call) {
  *call = (teacher_call){.problem = *student->divergence.teacher, .tensors = *caller->teacher};
  FLCE_TRY(flce_plan_teacher(e->backend, student, e->plan->chunk_rows, &call->plan));
  execution* forward = &call->forward;
  *forward = *e;
  forward->shard = e->shard && flce_is_sharded(&call->problem) ? &call->shard : NULL;
  forward->problem = &call->problem;
  forward->plan = &call->plan;
  forward->tensors = &call->tensors;
  forward->stat = flce_stat_dtype(call->plan.dtype);
  if (forward->shard) {
    call->shard.comm = e->shard->comm;
    call->shard.local_scalars = caller->scalars;
  }
  call->problem.shape.rows = student->shape.rows;
  call->tensors.target = caller->target;
  call->tensors.scalars = caller->scalars;
  call->tensors.workspace = buffer_ptr(e, FLCE_BUF_TEACHER);
  call->tensors.stats = buffer_ptr(forward, FLCE_BUF_STATS);
  forward->losses = buffer_ptr(forward, FLCE_BUF_ROW_LOSS);
  forward->bias = NULL;
  e->teacher = forward;
  return flce_open_operands(forward, true, true);
}

flce_status flce_teacher_rows(const execution* e, int64_t first, teacher_rows* teacher) {
  const execution* forward = e->teacher;
  chunk c = flce_chunk_in_place(forward, first);
  FLCE_TRY(flce_logits(forward, &c));
  FLCE_TRY(flce_statistics(forward, &c));
  FLCE_TRY(flce_exchange_statistics(forward, &c));
  teacher->rows = rows_of(forward, &c);
  teacher->fused = flce_fused_call_of(forward, &c);
  return FLCE_OK;
}

chunk flce_student_chunk(const execution* e, int64_t first, const teacher_rows* teacher) {
  chunk c = flce_chunk_in_place(e, first);
  if (e->plan->packs) c.packed_with = &teacher->fused;
  return c;
}

static flce_status run_divergence_rows(const execution* e, const chunk* c,
                                       const teacher_rows* teacher, const flce_rows* student,
                                       bool stores_bound) {
  flce_divergence_args call = {.student = student,
                               .teacher = &teacher->rows,
                               .packing = e->plan->packs ? buffer_ptr(e, FLCE_BUF_FUSED) : NULL,
                               .divergence = e->problem->divergence.kind,
                               .beta = e->problem->divergence.beta,
                               .hard_weight = e->problem->divergence.hard_weight,
                               .sums = true,
                               .stores_bound = stores_bound,
                               .writes = true};
  return flce_divergence_rows(e, c, &call);
}

flce_status flce_divergence_losses(const execution* e, const chunk* c,
                                   const teacher_rows* teacher) {
  flce_rows student = rows_of(e, c);
  return run_divergence_rows(e, c, teacher, &student, false);
}

flce_status flce_divergence_dz(const execution* e, const chunk* c, const teacher_rows* teacher) {
  flce_rows student = rows_of(e, c);
  set_out(&student, &c->out);
  student.coef = c->coef;
  return run_divergence_rows(e, c, teacher, &student, e->plan->draws_from_dz);
}
