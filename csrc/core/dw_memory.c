/* Implements dw_memory.h. Pure functions. */
#include "core/dw_memory.h"

#include "core/plan_rules.h"

bool flce_dw_is_free(const flce_problem* problem, const flce_plan* plan, flce_dtype accum_dtype) {
  /* Those for which engine.c has a loop that uses the memory of dW. */
  bool has_loop = plan->strategy == FLCE_SAVE_GRADS || plan->strategy == FLCE_SAVE_STATS;
  return problem->wants.grad_weight && has_loop && !problem->backward.adds_grad_weight &&
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

flce_dx_use flce_use_of_dx(const flce_problem* problem, const flce_plan* plan, bool gathers) {
  if (!problem->wants.grad_input || gathers) return FLCE_DX_UNUSED;
  if (plan->grad_input_dtype == flce_stat_dtype(plan->dtype)) return FLCE_DX_HAS_SUM;
  bool fits = flce_size_of(plan->grad_input_dtype) >= flce_size_of(plan->dtype);
  return fits && copies_weight_input(problem, plan) ? FLCE_DX_HAS_SCALED_X : FLCE_DX_UNUSED;
}

int64_t flce_sum_row_bytes(const flce_problem* problem, const flce_plan* plan, flce_dx_use use) {
  bool in_dw = problem->wants.grad_input && use != FLCE_DX_HAS_SUM;
  return in_dw ? plan->hidden * flce_size_of(flce_stat_dtype(plan->dtype)) : 0;
}

int64_t flce_whole_row_bytes(const flce_problem* problem, const flce_facts* facts,
                             const flce_plan* plan) {
  int64_t bytes = 0, size = flce_size_of(plan->dtype);
  flce_dx_use use = FLCE_DX_UNUSED;
  if (plan->blocks == FLCE_BLOCKS_IN_DW) {
    use = flce_use_of_dx(problem, plan, plan->gathers);
    bytes += flce_sum_row_bytes(problem, plan, use);
  }
  if (copies_weight_input(problem, plan) && use != FLCE_DX_HAS_SCALED_X)
    bytes += plan->hidden * size;
  if (copies_logits_input(plan)) bytes += plan->input_pitch * size;
  /* row_buffers is not valid yet, as it is computed from the result of this function;
   * flce_whole_scratch_row does not read it. */
  dw_memory memory = flce_memory_of_dw(problem, plan);
  if (plan->fuses_blocks) bytes += flce_whole_scratch_row(facts, &memory);
  return bytes;
}

int64_t flce_sum_offset(const flce_problem* problem, const flce_plan* plan) {
  flce_dx_use use = flce_use_of_dx(problem, plan, plan->gathers);
  int64_t sum = problem->shape.rows * flce_sum_row_bytes(problem, plan, use);
  int64_t offset = problem->shape.vocab * flce_dw_class_bytes(plan) - sum;
  return offset / FLCE_DW_ALIGNMENT * FLCE_DW_ALIGNMENT;
}

int64_t flce_free_classes(const flce_problem* problem, const flce_plan* plan, int64_t rows) {
  flce_dx_use use = flce_use_of_dx(problem, plan, plan->gathers);
  int64_t row = flce_sum_row_bytes(problem, plan, use), vocab = problem->shape.vocab;
  if (row == 0 || rows >= problem->shape.rows) return vocab;
  int64_t fit = (flce_sum_offset(problem, plan) + rows * row) / flce_dw_class_bytes(plan);
  return min64(fit / FLCE_BLOCK_CLASS_STEP * FLCE_BLOCK_CLASS_STEP, vocab);
}

int64_t flce_whole_scratch_row(const flce_facts* facts, const dw_memory* memory) {
  int64_t most = memory->classes * memory->row / (memory->row + memory->logits_class);
  return fused_exp_row_bytes(facts, memory->classes, most);
}

dw_memory flce_memory_of_dw(const flce_problem* problem, const flce_plan* plan) {
  return (dw_memory){.classes = problem->shape.vocab,
                     .row = flce_dw_class_bytes(plan),
                     .row_buffers = problem->shape.rows * plan->whole_row_bytes,
                     .logits_class = problem->shape.rows * flce_size_of(block_dtype(plan))};
}

int64_t flce_whole_block_classes(const dw_memory* memory, int64_t first) {
  int64_t left = (memory->classes - first) * memory->row - memory->row_buffers - FLCE_DW_PADDING;
  int64_t fit = max64(left, 0) / (memory->row + memory->logits_class);
  return fit / FLCE_BLOCK_CLASS_STEP * FLCE_BLOCK_CLASS_STEP;
}
