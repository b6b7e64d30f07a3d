/* What plan.c, buffers.c, plan_counts.c and the files that execute the plan have to agree on. */
#ifndef FLCE_PLAN_RULES_H
#define FLCE_PLAN_RULES_H

#include "core/chunks.h"

/* In either pass. */
static inline bool makes_gradients(const flce_problem* problem, const flce_plan* plan) {
  return plan->strategy != FLCE_SAVE_NOTHING &&
         (problem->wants.grad_input || problem->wants.grad_weight || problem->wants.grad_bias);
}
/* True if gradients are made by blocks of rows and classes, from logits that are computed again. */
static inline bool by_blocks(const flce_plan* plan) {
  return plan->blocks != FLCE_BLOCKS_NONE;
}
/* True if the forward makes dX by chunks of all classes, then dW by blocks. */
static inline bool makes_dx_first(const flce_plan* plan) {
  return plan->blocks == FLCE_BLOCKS_DX_FIRST;
}
/* True if the memory of dW holds logits until dW is written there. */
static inline bool uses_dw_memory(const flce_plan* plan) {
  return makes_dx_first(plan) || plan->blocks == FLCE_BLOCKS_IN_DW;
}
/* True if fused_exp can make the E of blocks. */
static inline bool may_fuse_blocks(const flce_facts* facts, const flce_plan* plan) {
  return facts->fused_row_bytes > 0 && plan->form == FLCE_FORM_EXP && plan->dtype == FLCE_BF16;
}
/* Classes of a block are a multiple: rows of its logits, E and dz then start at multiples of every
 * device's row_alignment. */
enum { FLCE_BLOCK_CLASS_STEP = 64 };
/* Of a block's logits, or of its E if that is what is written. */
static inline flce_dtype block_dtype(const flce_plan* plan) {
  return plan->fuses_blocks ? plan->exp_dtype : plan->z_dtype;
}
/* True if the pass that makes the gradients computes the logits again: for all gradients or,
 * with dX first, for dW and db. */
static inline bool recomputes_logits(const flce_plan* plan) {
  return plan->strategy == FLCE_SAVE_STATS || by_blocks(plan);
}
/* Bytes of fused_exp's scratch for each row of a block of so many classes: numbers of each tile, in
 * proportion to the classes, and at most OF_ROW bytes: offset, scale, target, column, top, flags,
 * and a tile for the remainder. */
static inline int64_t fused_exp_row_bytes(const flce_facts* facts, int64_t vocab, int64_t classes) {
  enum { OF_ROW = 48 };
  if (vocab == 0) return 0; /* a rank without a class */
  return round_up(facts->fused_row_bytes * classes / vocab, sizeof(float)) + OF_ROW;
}
/* True if the forward's loop over chunks needs only statistics: nothing reads its logits or E. */
static inline bool only_statistics(const flce_plan* plan) {
  bool computed_again = recomputes_logits(plan) && !makes_dx_first(plan); /* for the gradients */
  bool keeps_no_logits = plan->strategy == FLCE_SAVE_NOTHING || computed_again;
  return keeps_no_logits && !plan->finds_classes && !plan->sums_tail && !plan->is_divergence;
}
/* True if gradients are gathered by the rows' lists of samples, not made by GEMMs: of E, with
 * save=samples, or of a sampled divergence's dz. */
static inline bool gradients_are_sampled(const flce_plan* plan) {
  return plan->strategy == FLCE_SAVE_SAMPLES || plan->draws_from_dz;
}
/* True if the ranks exchange the statistics of each chunk, because its next step reads those of all
 * classes; else those of all rows are exchanged at once. */
static inline bool exchanges_each_chunk(const flce_problem* problem, const flce_plan* plan) {
  bool gradients = plan->strategy == FLCE_SAVE_GRADS && makes_gradients(problem, plan);
  return plan->strategy == FLCE_SAVE_SAMPLES || plan->is_divergence ||
         (gradients && !by_blocks(plan));
}
/* The dtype in which dW is summed over few chunks; over many it may be wider. */
static inline flce_dtype narrow_sum_dtype(const flce_problem* problem, const flce_plan* plan) {
  flce_dtype stat = flce_stat_dtype(plan->dtype);
  bool wide = problem->dtypes.accum == stat || plan->grad_weight_dtype == stat;
  return wide ? stat : plan->dtype;
}
/* True if a chunk's rows of x are copied before the logits GEMM reads them. */
static inline bool copies_logits_input(const flce_plan* plan) {
  return plan->gathers || plan->input_pitch != plan->hidden;
}
/* True if the result of dX's GEMM is not dX yet: it is a part of a sum, has another dtype, or has
 * rows or columns in other places. */
static inline bool has_dx_rows(const flce_problem* problem, const flce_plan* plan) {
  bool is_summed = by_blocks(plan) && !makes_dx_first(plan),
       padded = plan->hidden != problem->shape.hidden;
  bool other_dtype = plan->dx_gemm_dtype != plan->partial_dx_dtype;
  return problem->wants.grad_input && (is_summed || other_dtype || plan->gathers || padded);
}
/* True if the B operand of dW's GEMM is a copy of x: scaled, gathered, with zeros in ignored rows,
 * or aligned. */
static inline bool copies_weight_input(const flce_problem* problem, const flce_plan* plan) {
  return plan->form == FLCE_FORM_EXP || plan->gathers || !problem->has.probabilities ||
         problem->has.unaligned_operand || plan->dw_fp16_shift != 0;
}
/* Whether the ranks' partial dX is exchanged and summed. */
static inline bool sums_partial_dx(const flce_problem* problem) {
  return flce_is_sharded(problem) && problem->wants.grad_input &&
         !problem->shard.partial_grad_input && problem->shape.tokens > 0;
}
/* Elements of the rows of dX that one rank sums. */
static inline int64_t summed_elements(const flce_problem* problem) {
  return ceil_div(problem->shape.tokens, problem->shard.ranks) * problem->shape.hidden;
}
/* Whether a backward reads x: for dW and db, or to compute the logits again. */
static inline bool backward_reads_input(const flce_problem* problem, const flce_plan* plan) {
  return problem->wants.grad_weight || plan->strategy == FLCE_SAVE_STATS;
}
/* The factor of E where it is saved in float16. c is then the row's largest l, so the largest entry
 * is 2^15, and entries down to 2^-29 of it keep their full precision. */
static inline double saved_exp_scale(const flce_plan* plan) {
  return plan->saves_exp && plan->dtype == FLCE_F16 ? 0x1p15 : 1.0;
}

#endif
