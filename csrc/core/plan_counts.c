/* What a plan costs other than memory: its GEMMs, its collectives, and the time of sampled
 * gradients. Pure, as plan.c. */
#include "core/plan_counts.h"

#include "backend.h"
#include "core/dw_memory.h"
#include "core/plan_rules.h"

/* The number of GEMMs whose results have `size` rows in all: one for each block of `block` rows or,
 * unless `piece` is 0, one for each `piece` rows of a block. */
static int64_t gemms_of_rows(int64_t size, int64_t block, int64_t piece) {
  if (piece == 0) return ceil_div(size, block);
  return size / block * ceil_div(block, piece) + ceil_div(size % block, piece);
}

/* GEMMs of dW of the classes [begin, end), which are in blocks of `step` classes from `from` on. */
static int64_t gemms_of_range(int64_t begin, int64_t end, int64_t from, int64_t step,
                              int64_t piece) {
  int64_t next = min64(from + round_up(begin - from, step), end), head = next - begin;
  int64_t of_head = head > 0 ? gemms_of_rows(head, head, piece) : 0;
  return of_head + (end > next ? gemms_of_rows(end - next, step, piece) : 0);
}

/* GEMMs of the blocks in the workspace with FLCE_BLOCKS_IN_DW. `written` and `by_last` are
 * dw_part.written of engine.c's dx_and_free_dw and dw_of_other_classes. */
static int64_t gemms_of_rest(const flce_problem* problem, const flce_plan* plan) {
  int64_t n = problem->shape.rows, v = problem->shape.vocab, whole = plan->whole_classes;
  int64_t step = plan->block_classes, piece = plan->dw_piece_rows;
  int64_t blocks = ceil_div(v - whole, step), written = whole, gemms = 0;
  int64_t last = (n - 1) / plan->block_rows * plan->block_rows;
  if (problem->wants.grad_input)
    gemms += blocks * gemms_of_rows(n, plan->block_rows, plan->dx_piece_rows);
  for (int64_t first = 0; first < n; first += plan->block_rows) {
    int64_t end = flce_free_classes(problem, plan, first);
    int64_t by_last = first > 0 ? v : max64(flce_free_classes(problem, plan, last), end);
    gemms += blocks + gemms_of_range(whole, written, whole, step, piece) +
             gemms_of_range(written, end, whole, step, piece);
    gemms += ceil_div(v - end, step) + gemms_of_range(end, by_last, end, step, piece) +
             gemms_of_range(by_last, v, end, step, piece);
    written = end;
  }
  return gemms;
}

/* GEMMs of the blocks over all rows in the memory of dW, and of those in the workspace. */
static void count_gemms_of_dw_memory(const flce_problem* problem, flce_plan* plan) {
  dw_memory memory = flce_memory_of_dw(problem, plan);
  bool dx_first = makes_dx_first(plan);
  int64_t n = problem->shape.rows, piece = plan->dw_piece_rows, step = plan->block_classes;
  int64_t left = problem->shape.vocab - plan->whole_classes, gemms = 0;
  for (int64_t first = 0; first < plan->whole_classes;) {
    int64_t classes = flce_whole_block_classes(&memory, first);
    gemms += 1 + gemms_of_rows(classes, classes, piece);
    if (!dx_first && problem->wants.grad_input) gemms += gemms_of_rows(n, n, plan->dx_piece_rows);
    first += classes;
  }
  if (dx_first)
    gemms +=
        ceil_div(n, plan->block_rows) * (ceil_div(left, step) + gemms_of_rows(left, step, piece));
  else
    gemms += gemms_of_rest(problem, plan);
  plan->forward_gemms = plan->chunks + (dx_first ? plan->chunks + gemms : 0);
  plan->backward_gemms = dx_first ? 0 : gemms;
}

static void count_gemms_of_blocks(const flce_problem* problem, flce_plan* plan) {
  int64_t n = problem->shape.rows, v = problem->shape.vocab;
  int64_t of_rows = ceil_div(n, plan->block_rows), of_classes = ceil_div(v, plan->block_classes);
  int64_t gemms = of_rows * of_classes; /* of logits */
  if (problem->wants.grad_input)
    gemms += of_classes * gemms_of_rows(n, plan->block_rows, plan->dx_piece_rows);
  if (problem->wants.grad_weight)
    gemms += of_rows * gemms_of_rows(v, plan->block_classes, plan->dw_piece_rows);
  bool grads = plan->strategy == FLCE_SAVE_GRADS;
  plan->forward_gemms = plan->chunks + (grads ? gemms : 0);
  plan->backward_gemms = grads ? 0 : gemms;
}

/* The GEMMs that dw_first_classes adds. */
static int64_t gemms_of_split(const flce_problem* problem, const flce_plan* plan) {
  int64_t first = plan->dw_first_classes, v = problem->shape.vocab, piece = plan->dw_piece_rows;
  if (first == 0) return 0;
  return gemms_of_rows(first, first, piece) + gemms_of_rows(v - first, v - first, piece) -
         gemms_of_rows(v, v, piece);
}

static void count_gemms(const flce_problem* problem, flce_plan* plan) {
  int64_t dw = plan->dw_piece_rows ? ceil_div(problem->shape.vocab, plan->dw_piece_rows) : 1;
  int64_t gradients = (problem->wants.grad_input ? 1 : 0) + (problem->wants.grad_weight ? dw : 0);
  if (by_blocks(plan)) {
    if (uses_dw_memory(plan))
      count_gemms_of_dw_memory(problem, plan);
    else
      count_gemms_of_blocks(problem, plan);
    return;
  }
  bool grads = plan->strategy == FLCE_SAVE_GRADS;
  int64_t split_gemms = gemms_of_split(problem, plan);
  int64_t teacher_gemms = problem->divergence.teacher && !problem->divergence.teacher->has.logits;
  plan->forward_gemms =
      plan->chunks * (1 + teacher_gemms + (grads && !plan->draws_from_dz ? gradients : 0)) +
      (grads ? split_gemms : 0);
  int64_t logits = plan->strategy == FLCE_SAVE_STATS && makes_gradients(problem, plan) ? 1 : 0;
  plan->backward_gemms = plan->backward_chunks * (logits + gradients) + (grads ? 0 : split_gemms);
}

/* The calls of shards.c. */
static void count_collectives(const flce_problem* problem, flce_plan* plan) {
  plan->ranks = flce_is_sharded(problem) ? problem->shard.ranks : 1;
  if (plan->ranks == 1) return;
  int64_t other_ranks = problem->shard.ranks - 1;
  bool gradients = makes_gradients(problem, plan), grads = plan->strategy == FLCE_SAVE_GRADS;
  if (problem->shard.input_is_sharded) {
    int64_t backward = flce_has_backward(plan->strategy) && backward_reads_input(problem, plan);
    int64_t x =
        flce_input_rows(problem) * problem->shape.hidden * flce_size_of(problem->dtypes.input);
    const flce_problem* teacher = problem->divergence.teacher; /* its x is gathered, too */
    bool both = teacher && teacher->shard.input_is_sharded;
    int64_t other = both ? x / problem->shape.hidden * teacher->shape.hidden : 0;
    plan->collectives[FLCE_ALL_GATHER_INPUT] =
        (flce_collective){1 + both, backward, other_ranks * ((1 + backward) * x + other)};
  }
  bool each_chunk = exchanges_each_chunk(problem, plan);
  int64_t calls = 1;                                /* of a chunk */
  int64_t numbers = flce_shard_stat_count(problem); /* of a row */
  if (plan->is_divergence) { /* statistics of student and teacher, and the sums of the divergence */
    numbers = 2 * numbers + FLCE_DIVERGENCE_SUMS;
    calls = 3;
  }
  numbers *= flce_size_of(flce_stat_dtype(plan->dtype));
  plan->collectives[FLCE_ALL_GATHER_STATISTICS] =
      (flce_collective){each_chunk ? calls * plan->chunks : problem->shape.rows > 0, 0,
                        other_ranks * problem->shape.rows * numbers};
  if (!gradients || !sums_partial_dx(problem)) return;
  int64_t received = other_ranks * summed_elements(problem);
  plan->collectives[FLCE_ALL_TO_ALL_DX] =
      (flce_collective){grads, !grads, received * flce_size_of(plan->partial_dx_dtype)};
  if (problem->shard.input_is_sharded) return;
  plan->collectives[FLCE_ALL_GATHER_DX] =
      (flce_collective){grads, !grads, received * flce_size_of(plan->grad_input_dtype)};
}

/* The time of the passes of save=samples over that of the GEMMs that they replace, from the bytes
 * that they move. Float32 GEMMs take ten times as long as 16-bit ones on a GPU, and a CPU moves few
 * bytes for each multiply-add. Sampled and exact gradients write dW once. */
static double estimate_sampled_time(const flce_problem* problem, const flce_facts* facts,
                                    const flce_plan* plan) {
  double n = (double)problem->shape.rows, h = (double)plan->hidden,
         v = (double)problem->shape.vocab;
  double gemms = (problem->wants.grad_input ? 1.0 : 0.0) + (problem->wants.grad_weight ? 1.0 : 0.0);
  if (n == 0.0 || gemms == 0.0) return 0.0;
  double size = (double)flce_size_of(plan->dtype),
         entries = (double)flce_most_samples(problem->sampling.eps);
  bool fast = facts->multiprocessors > 0 && size == 2.0;
  double dw = problem->wants.grad_weight ? v * h * size : 0.0;
  double moved = gemms * n * entries * h * size + n * v * (double)flce_size_of(plan->exp_dtype);
  double adds = fast ? kAddsPerByte : kSlowAddsPerByte;
  return (moved + dw) * adds / (gemms * n * v * h + dw * adds);
}

void flce_count_plan(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  count_gemms(problem, plan);
  count_collectives(problem, plan);
  if (gradients_are_sampled(plan)) plan->sampled_time = estimate_sampled_time(problem, facts, plan);
}
