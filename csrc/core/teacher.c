/* The plan of a divergence's teacher, and the checks of a divergence. */
#include "core/teacher.h"

#include "backend.h"

flce_status flce_plan_teacher(const flce_backend* backend, const flce_problem* student,
                              int64_t chunk_rows, flce_plan* plan) {
  flce_problem problem = *student->teacher;
  flce_facts facts = {0};
  problem.rows = student->rows;
  flce_problem asked = problem;
  if (asked.vocab == 0) asked.vocab = asked.weight_rows = 1;
  flce_status status = backend->facts(backend->self, &asked, &facts);
  if (status != FLCE_OK) return flce_fail(status, "%s", backend->last_error());
  if (problem.gives_logits) { /* no GEMM reads them */
    facts.hidden_alignment = facts.input_alignment = 1;
    facts.gemm_f16 = true;
    facts.fused_row_bytes = facts.gemm_workspace_bytes = 0;
  }
  problem.chunk_rows = chunk_rows;
  problem.max_memory = INT64_MAX; /* the student's plan has seen to it */
  problem.saves_memory = false;
  return flce_plan_make(&problem, &facts, plan);
}

#define EXPECT(rule, ...) \
  if (!(rule)) return flce_fail(FLCE_INVALID_ARGUMENT, __VA_ARGS__)

flce_status flce_check_teacher(const flce_problem* problem) {
  double beta = problem->beta, hard = problem->hard_weight;
  if (!problem->teacher) return FLCE_OK;
  EXPECT(beta > 0.0 && beta < 1.0, "beta: expected 0 < beta < 1, got %g", beta);
  EXPECT(hard >= 0.0 && hard <= 1.0, "hard_weight: expected 0 <= hard_weight <= 1, got %g", hard);
  EXPECT(!problem->has_probabilities,
         "target: expected class indices with a divergence, got probabilities");
  EXPECT(!problem->sampled, "gradient: expected \"exact\" with a divergence, got \"sampled\"");
  EXPECT(problem->save != FLCE_SAVE_LOGITS,
         "save: expected \"auto\", \"grads\" or \"stats\" with a divergence, got \"logits\"");
  EXPECT(hard == 0.0 || (problem->loss.temperature == 1.0 && !problem->has_temperature),
         "hard_weight: expected 0 with a temperature, which the cross entropy would have too, got "
         "%g",
         hard);
  return FLCE_OK;
}
