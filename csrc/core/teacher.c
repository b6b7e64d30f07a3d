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
  execution* own = &call->own;
  *own = *e;
  own->shard = e->shard && flce_is_sharded(&call->problem) ? &call->shard : NULL;
  own->problem = &call->problem;
  own->plan = &call->plan;
  own->tensors = &call->tensors;
  own->stat = flce_stat_dtype(call->plan.dtype);
  if (own->shard) {
    call->shard.comm = e->shard->comm;
    call->shard.local_scalars = caller->scalars;
  }
  call->problem.shape.rows = student->shape.rows;
  call->tensors.target = caller->target;
  call->tensors.scalars = caller->scalars;
  call->tensors.workspace = buffer_ptr(e, FLCE_BUF_TEACHER);
  call->tensors.stats = buffer_ptr(own, FLCE_BUF_STATS);
  own->losses = buffer_ptr(own, FLCE_BUF_ROW_LOSS);
  own->bias = NULL;
  e->teacher = own;
  return flce_open_operands(own, true, true);
}

flce_status flce_teacher_rows(const execution* e, int64_t first, teacher_rows* teacher) {
  const execution* own = e->teacher;
  chunk c = flce_chunk_in_place(own, first);
  FLCE_TRY(flce_logits(own, &c));
  FLCE_TRY(flce_statistics(own, &c));
  FLCE_TRY(flce_exchange_statistics(own, &c));
  teacher->rows = rows_of(own, &c);
  teacher->fused = flce_fused_call_of(own, &c);
  return FLCE_OK;
}

chunk flce_student_chunk(const execution* e, int64_t first, const teacher_rows* teacher) {
  chunk c = flce_chunk_in_place(e, first);
  if (e->plan->packs) c.packed_with = &teacher->fused;
  return c;
}

static flce_status compare(const execution* e, const chunk* c, const teacher_rows* teacher,
                           const flce_rows* student, bool stores_bound) {
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
  return compare(e, c, teacher, &student, false);
}

flce_status flce_divergence_dz(const execution* e, const chunk* c, const teacher_rows* teacher) {
  flce_rows student = rows_of(e, c);
  set_out(&student, &c->out);
  student.coef = c->coef;
  return compare(e, c, teacher, &student, e->plan->draws_from_dz);
}
