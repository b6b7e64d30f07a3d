/* flce_plan_call: the plan of a call on a backend: its facts, the strategy, one size of chunks for
 * all ranks, and the workspace of a divergence's teacher. */
#include "core/plan_call.h"

#include "backend.h"
#include "core/chunks.h"

/* The facts of the backend for the problem. A rank without a class asks for one
 * class: backends refuse vocab 0. */
static flce_status ask_facts(const flce_backend* backend, const flce_problem* problem,
                             flce_facts* facts) {
  flce_problem asked = *problem;
  if (asked.vocab == 0) asked.vocab = asked.weight_rows = 1;
  flce_status status = backend->facts(backend->self, &asked, facts);
  return status == FLCE_OK ? status : flce_fail(status, "%s", backend->last_error());
}

flce_problem flce_equal_share(const flce_problem* problem) {
  flce_problem equal = *problem;
  if (!flce_is_sharded(problem)) return equal;
  equal.vocab = equal.weight_rows = ceil_div(problem->classes, problem->ranks);
  equal.rank = equal.first_class = 0;
  equal.unaligned = equal.weight_unaligned = false;
  return equal;
}

flce_status flce_plan_teacher(const flce_backend* backend, const flce_problem* student,
                              int64_t chunk_rows, flce_plan* plan) {
  flce_problem problem = *student->teacher;
  flce_facts facts = {0};
  problem.rows = student->rows;
  FLCE_TRY(ask_facts(backend, &problem, &facts));
  if (problem.gives_logits) { /* no GEMM reads them */
    facts.hidden_alignment = facts.input_alignment = 1;
    facts.gemm_f16 = true;
    facts.fused_row_bytes = facts.gemm_workspace_bytes = 0;
  }
  problem.chunk_rows = chunk_rows;
  problem.max_memory = INT64_MAX; /* the student's plan has seen to it */
  return flce_plan_make(&problem, &facts, plan);
}

/* The plan; that of a divergence has the workspace of its teacher, whose chunks follow from it. */
static flce_status make_with_teacher(const flce_backend* backend, const flce_problem* given,
                                     const flce_facts* facts, flce_plan* plan) {
  flce_problem problem = *given;
  flce_plan teacher;
  FLCE_TRY(flce_plan_make(&problem, facts, plan));
  if (!problem.teacher) return FLCE_OK;
  FLCE_TRY(flce_plan_teacher(backend, &problem, plan->chunk_rows, &teacher));
  problem.teacher_bytes = teacher.forward_workspace_bytes;
  return flce_plan_make(&problem, facts, plan);
}

flce_status flce_plan_call(const flce_backend* backend, const flce_problem* given,
                           flce_plan* plan) {
  FLCE_TRY(flce_check_problem(given));
  flce_problem problem = *given, equal = flce_equal_share(given);
  flce_facts facts = {0};
  flce_strategy strategy;
  equal.save = flce_known_strategy(given);
  FLCE_TRY(ask_facts(backend, &equal, &facts));
  flce_choose_strategy(&equal, &facts, &strategy);
  problem.save = equal.save = flce_strategy_of(&strategy, problem.rows);
  if (!flce_is_sharded(given)) return make_with_teacher(backend, &problem, &facts, plan);
  equal.gathers = facts.skips_rows;
  FLCE_TRY(flce_plan_make(&equal, &facts, plan));
  problem.gathers = plan->gathers;
  problem.chunk_rows = plan->chunk_rows;
  FLCE_TRY(ask_facts(backend, &problem, &facts));
  return make_with_teacher(backend, &problem, &facts, plan);
}
