/* flce_choose_strategies: what save=auto is, from what is known of a problem before its rows are.
 * Pure, as plan.c. */
#include "backend.h"
#include "core/chunks.h"
#include "core/plan.h"

/* Up to this size of the weight, in bytes, gradients are made in the forward even if the logits
 * fit: an H200 scales such a gradient faster than the backward launches a kernel
 * (benchmarks/NOTES.md). */
enum { SMALL_WEIGHT_BYTES = 128 << 20 };

/* FLCE_SCALAR_LOSS_SCALE assumes |lse| <= 64, and |dz| may be 4 times its bound:
 * 1 + 2 z |lse| <= 4 (1 + 128 z), so at this z_loss |lse| < 1790. */
static const double F16_Z_LOSS = 0x1p-10;

static flce_strategies always(flce_strategy strategy) {
  return (flce_strategies){.few = strategy, .some = strategy, .many = strategy};
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
  if (problem->divergence.kind != FLCE_NO_DIVERGENCE)
    return automatic ? FLCE_SAVE_GRADS : problem->save;
  return problem->sampling.wanted && automatic ? FLCE_SAVE_SAMPLES : problem->save;
}

void flce_choose_strategies(const flce_problem* problem, const flce_facts* facts,
                            flce_strategies* strategies) {
  *strategies = always(flce_known_strategy(problem));
  if (strategies->few != FLCE_SAVE_AUTO) return;
  flce_plan logits = {.strategy = FLCE_SAVE_LOGITS};
  flce_choose_logits(problem, facts, &logits);
  bool gpu = facts->multiprocessors > 0;
  /* The forward must not make gradients in three cases: the backward adds to the caller's; a
   * compiled backward gets zeros in place of no gradient of lse or entropy, and would compute all
   * again; float16 cannot hold gradients whose size is not known before, of probabilities that are
   * not normalized and of a large z-loss. */
  bool unbounded = problem->has.probabilities || problem->loss.z_loss > F16_Z_LOSS;
  bool late = problem->graph.accumulates ||
              (problem->graph.traced && problem->graph.differentiates_outputs) ||
              (unbounded && logits.dtype == FLCE_F16);
  bool may_make_gradients = problem->reduction != FLCE_NONE && !late;
  if (gpu && may_make_gradients && problem->memory.bound_is_default &&
      !problem->graph.differentiates_outputs) {
    /* Gradients of lse or entropy would make save=grads recompute the logits. */
    *strategies = always(FLCE_SAVE_GRADS);
    return;
  }
  int64_t saved_row = logits.saved_pitch * flce_size_of(logits.saved_dtype);
  int64_t weight_bytes = problem->shape.vocab * problem->shape.hidden * flce_size_of(logits.dtype);
  bool small = gpu && may_make_gradients && weight_bytes <= SMALL_WEIGHT_BYTES;
  strategies->few = small ? FLCE_SAVE_GRADS : FLCE_SAVE_LOGITS;
  strategies->some = FLCE_SAVE_LOGITS;
  strategies->many = may_make_gradients ? FLCE_SAVE_GRADS : FLCE_SAVE_STATS;
  int64_t kept_memory =
      strategies->many == FLCE_SAVE_GRADS && !problem->graph.differentiates_outputs
          ? problem->memory.bound
          : problem->memory.kept;
  strategies->some_rows = saved_row > 0 ? kept_memory / saved_row : INT64_MAX;
  int64_t row = logits_row_bytes(problem, facts, logits.dtype);
  strategies->few_rows =
      min64(strategies->some_rows, row > 0 ? problem->memory.bound / row : INT64_MAX);
}
