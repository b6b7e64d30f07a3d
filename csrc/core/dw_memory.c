/* Implements dw_memory.h. Pure functions. */
#include "core/dw_memory.h"

#include "core/plan_rules.h"

bool flce_dw_is_free(const flce_problem* problem, const flce_plan* plan, flce_dtype accum_dtype) {
  return problem->wants.grad_weight && plan->strategy == FLCE_SAVE_GRADS &&
         accum_dtype == plan->grad_weight_dtype && plan->hidden == problem->shape.hidden;
}

int64_t flce_dx_row_bytes(const flce_problem* problem, const flce_facts* facts,
                          const flce_plan* plan) {
  int64_t bytes = plan->z_pitch * flce_size_of(plan->z_dtype);
  if (has_dx_rows(problem, plan)) bytes += plan->hidden * flce_size_of(plan->dx_gemm_dtype);
  if (copies_logits_input(plan)) bytes += plan->input_pitch * flce_size_of(plan->dtype);
  if (plan->fuses_rows) bytes += facts->fused_row_bytes;
  return bytes;
}

int64_t flce_copies_row_bytes(const flce_problem* problem, const flce_facts* facts,
                              const flce_plan* plan) {
  int64_t bytes = 0, size = flce_size_of(plan->dtype);
  if (copies_weight_input(problem, plan)) bytes += plan->hidden * size;
  if (copies_logits_input(plan)) bytes += plan->input_pitch * size;
  /* Without the copies, whose size is computed here: flce_whole_scratch_row does not read it. */
  dw_memory memory = flce_memory_of_dw(problem, plan);
  if (plan->fuses_blocks) bytes += flce_whole_scratch_row(facts, &memory);
  return bytes;
}

int64_t flce_whole_scratch_row(const flce_facts* facts, const dw_memory* memory) {
  int64_t most = memory->classes * memory->row / (memory->row + memory->logits_class);
  return fused_exp_row_bytes(facts, memory->classes, most);
}

dw_memory flce_memory_of_dw(const flce_problem* problem, const flce_plan* plan) {
  return (dw_memory){.classes = problem->shape.vocab,
                     .row = flce_dw_class_bytes(plan),
                     .copies = problem->shape.rows * plan->copies_row_bytes,
                     .logits_class = problem->shape.rows * flce_size_of(block_dtype(plan))};
}

int64_t flce_whole_block_classes(const dw_memory* memory, int64_t first) {
  int64_t left = (memory->classes - first) * memory->row - memory->copies - FLCE_DW_PADDING;
  int64_t fit = max64(left, 0) / (memory->row + memory->logits_class);
  return fit / FLCE_BLOCK_CLASS_STEP * FLCE_BLOCK_CLASS_STEP;
}
