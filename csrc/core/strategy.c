/* flce_choose_strategies: the strategy of a call for any number of rows, from `save` and all of a
 * problem but that number. Pure, as plan.c. */
#include "backend.h"
#include "core/chunks.h"
#include "core/plan.h"

/* Up to this size of the weight, in bytes, gradients are made in the forward even if the logits
 * fit: an H200 scales such a gradient faster than the backward launches a kernel
 * (benchmarks/NOTES.md). */
enum { SMALL_WEIGHT_BYTES = 128 << 20 };

/* FLCE_SCALAR_LOSS_SCALE assumes |lse| <= 64, and |dz| may be 4 times its bound:
 * 1 + 2 z_loss |lse| <= 4 (1 + 128 z_loss), so at this z_loss that holds up to |lse| = 1790. */
static const double F16_Z_LOSS = 0x1p-10;

/* One strategy for any number of rows. */
static flce_strategies always(flce_strategy strategy) {
  return (flce_strategies){
      .ranges = {{INT64_MAX, strategy}, {INT64_MAX, strategy}, {INT64_MAX, strategy}}};
}

/* Bytes of a row of logits, in the dtype in which the logits GEMM writes them. */
static int64_t logits_row_bytes(const flce_problem* problem, const flce_facts* facts,
                                flce_dtype dtype) {
  int64_t size = flce_size_of(facts->gemm_writes_f32 ? problem->dtypes.logits : dtype);
  return round_up(problem->shape.vocab * size, facts->row_alignment);
}

flce_save flce_known_strategy(const flce_problem* problem) {
  if (!problem->wants.grad_input && !problem->wants.grad_weight && !problem->wants.grad_bias)
    return FLCE_SAVE_NOTHING;
  bool automatic = problem->save == FLCE_SAVE_AUTO;
  /* Of a divergence with reduction none or save=stats the caller wants no gradients here: its
   * backward is a second forward with save=grads (flce/composite.py). */
  if (problem->divergence.kind != FLCE_NO_DIVERGENCE)
    return automatic ? FLCE_SAVE_GRADS : problem->save;
  return problem->sampling.wanted && automatic ? FLCE_SAVE_SAMPLES : problem->save;
}

/* The forward must not make gradients in four cases:
 * - the losses of rows are not reduced, so each has a grad_output of its own;
 * - the backward adds dW to the caller's gradient;
 * - in a compiled graph lse, entropy or logits of classes may be differentiated. Its backward gets
 *   zeros, not NULL, as the gradient of one that is not, and would compute all gradients again;
 * - float16, with probabilities, which need not be normalized, or a large z-loss: no bound of the
 *   gradients is known, and without one they may exceed its range. */
static bool may_make_gradients(const flce_problem* problem, flce_dtype dtype) {
  bool unbounded = problem->has.probabilities || problem->loss.z_loss > F16_Z_LOSS;
  bool must_wait = problem->graph.accumulates ||
                   (problem->graph.traced && problem->graph.differentiates_outputs) ||
                   (unbounded && dtype == FLCE_F16);
  return problem->reduction != FLCE_NONE && !must_wait;
}

/* How many rows of `row` bytes fit in `bytes`. */
static int64_t rows_in(int64_t bytes, int64_t row) {
  return row > 0 ? bytes / row : INT64_MAX;
}

/* The strategies where they depend on the number of rows, in ranges (flce_row_range). */
static flce_strategies choose_by_rows(const flce_problem* problem, const flce_facts* facts) {
  flce_plan logits_plan = {.strategy = FLCE_SAVE_LOGITS};
  flce_choose_logits(problem, facts, &logits_plan);
  bool gpu = facts->multiprocessors > 0, may_make = may_make_gradients(problem, logits_plan.dtype);
  /* Gradients of lse or entropy would make save=grads recompute the logits. */
  bool only_loss_differentiable = may_make && !problem->graph.differentiates_outputs;
  if (gpu && only_loss_differentiable && problem->memory.bound_is_default)
    return always(FLCE_SAVE_GRADS);
  int64_t weight_bytes =
      problem->shape.vocab * problem->shape.hidden * flce_size_of(logits_plan.dtype);
  bool makes_for_small = gpu && may_make && weight_bytes <= SMALL_WEIGHT_BYTES;
  int64_t saved_row = logits_plan.saved_pitch * flce_size_of(logits_plan.saved_dtype);
  /* Where the forward cannot make the gradients instead, the larger bound applies, memory.kept. */
  int64_t rows_to_keep =
      rows_in(only_loss_differentiable ? problem->memory.bound : problem->memory.kept, saved_row);
  int64_t rows_of_one_chunk =
      rows_in(problem->memory.bound, logits_row_bytes(problem, facts, logits_plan.dtype));
  /* FLCE_ROWS_OF_ONE_CHUNK: rows that fit one chunk and may be kept. */
  return (flce_strategies){
      .ranges = {[FLCE_ROWS_OF_ONE_CHUNK] = {min64(rows_to_keep, rows_of_one_chunk),
                                             makes_for_small ? FLCE_SAVE_GRADS : FLCE_SAVE_LOGITS},
                 [FLCE_ROWS_TO_KEEP] = {rows_to_keep, FLCE_SAVE_LOGITS},
                 [FLCE_ROWS_BEYOND] = {INT64_MAX, may_make ? FLCE_SAVE_GRADS : FLCE_SAVE_STATS}}};
}

void flce_choose_strategies(const flce_problem* problem, const flce_facts* facts,
                            flce_strategies* strategies) {
  flce_save known = flce_known_strategy(problem);
  *strategies = known == FLCE_SAVE_AUTO ? choose_by_rows(problem, facts) : always(known);
}
