/* flce_teacher_problem and its plan, and the checks of a divergence. */
#include "core/teacher.h"

#include "backend.h"

#include <math.h>

flce_problem flce_teacher_problem(const flce_problem* problem) {
  const flce_teacher* teacher = &problem->teacher;
  flce_problem own = *problem;
  own.teacher.is_own = true;
  own.hidden = teacher->hidden;
  own.frozen_hidden = 0;
  own.weight_rows = teacher->weight_rows;
  own.input_dtype = teacher->input_dtype;
  own.weight_dtype = teacher->weight_dtype;
  own.bias_dtype = teacher->bias_dtype;
  own.has_bias = teacher->has_bias;
  own.has_temperature = teacher->has_temperature;
  own.unaligned = teacher->unaligned;
  own.loss.softcap = teacher->teacher_softcap;
  own.loss.logit_scale = teacher->teacher_logit_scale;
  own.loss.temperature = teacher->teacher_temperature;
  if (teacher->gives_logits) own.dtype = own.weight_dtype = teacher->input_dtype;
  own.logits_dtype = flce_stat_dtype(own.dtype);
  own.accum_dtype = own.dtype;
  own.save = FLCE_SAVE_NOTHING;
  own.want_grad_input = own.want_grad_weight = own.want_grad_bias = false;
  own.reduction = FLCE_SUM;
  own.wants_predictions = own.wants_statistics = own.accumulates = false;
  return own;
}

flce_status flce_plan_teacher(const flce_backend* backend, const flce_problem* teacher,
                              int64_t chunk_rows, flce_plan* plan) {
  flce_problem problem = *teacher, asked = *teacher;
  flce_facts facts = {0};
  problem.chunk_rows = chunk_rows;
  problem.max_memory = INT64_MAX; /* the student's plan has seen to it */
  if (asked.vocab == 0) asked.vocab = asked.weight_rows = 1;
  flce_status status = backend->facts(backend->self, &asked, &facts);
  if (status != FLCE_OK) return flce_fail(status, "%s", backend->last_error());
  if (problem.teacher.gives_logits) { /* no GEMM reads them */
    facts.hidden_alignment = facts.input_alignment = 1;
    facts.gemm_f16 = facts.gemm_writes_f32 = true;
    facts.fused_row_bytes = facts.gemm_workspace_bytes = 0;
  }
  return flce_plan_make(&problem, &facts, plan);
}

#define EXPECT(rule, ...) \
  if (!(rule)) return flce_fail(FLCE_INVALID_ARGUMENT, __VA_ARGS__)

flce_status flce_check_teacher(const flce_problem* problem) {
  const flce_teacher* teacher = &problem->teacher;
  if (teacher->divergence == FLCE_NO_DIVERGENCE || teacher->is_own) return FLCE_OK;
  double value;
#define FLCE_CHECK(name, in_range, expected) \
  value = teacher->name;                     \
  EXPECT(isfinite(value) && (in_range), #name ": expected " expected ", got %g", value);
  FLCE_TEACHER_NUMBERS(FLCE_CHECK)
#undef FLCE_CHECK
  EXPECT(!problem->has_probabilities,
         "target: expected class indices with a divergence, got probabilities");
  EXPECT(!problem->sampled, "gradient: expected \"exact\" with a divergence, got \"sampled\"");
  EXPECT(problem->save != FLCE_SAVE_LOGITS,
         "save: expected \"auto\", \"grads\" or \"stats\" with a divergence, got \"logits\"");
  bool warm = problem->loss.temperature != 1.0 || problem->has_temperature;
  EXPECT(teacher->hard_weight == 0.0 || !warm,
         "hard_weight: expected 0 with a temperature, which the cross entropy of the target would "
         "have too, got %g",
         teacher->hard_weight);
  /* Beyond valid_vocab the numbers of rows may differ; a rank may read its columns of all. */
  bool fits = teacher->weight_rows == problem->weight_rows ||
              problem->vocab < problem->weight_rows ||
              (flce_is_sharded(problem) && teacher->gives_logits);
  EXPECT(fits && teacher->weight_rows >= problem->vocab,
         "%s: expected %lld classes, those of linear_weight, got %lld",
         teacher->gives_logits ? "teacher_logits" : "teacher_weight",
         (long long)problem->weight_rows, (long long)teacher->weight_rows);
  return FLCE_OK;
}
