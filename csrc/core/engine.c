/* The forward and the backward of linear cross entropy: a function for each strategy
 * (flce_strategy), which lists the steps of that strategy from top to bottom.
 *
 * The rows are computed in chunks, because the logits z = x W^T, [N][V], of all rows take too much
 * memory. A row pass makes a chunk's statistics and losses from its z. Then E = exp(l - c) or dz,
 * which the gradient GEMMs read (dX = dz W, dW = dz^T x), usually overwrites z.
 *
 *   strategy    the forward keeps                  the backward
 *   loss only   nothing                            there is none: no gradient is wanted
 *   logits      E or z of all rows                 the two gradient GEMMs of each chunk
 *   grads       dX, dW, db for grad_output = 1     scale_grads alone, which the caller runs
 *   stats       the statistics of the rows         the logits GEMM again, and the gradient GEMMs
 *   samples     some pairs (class, E) of each row  gathers rows of W and x by them, without a GEMM
 *
 * Under a small max_memory a chunk of all classes has few rows, and for each chunk dW is read and
 * written once. Gradients are then made by blocks of rows and classes, from logits that are
 * computed again: the backward of "stats" and the forward of "grads" have a function for that, and
 * each a second one, which uses that the memory of dW is free until dW is written there.
 *
 * A divergence (distillation) computes a teacher's logits before the student's. Its forward makes
 * the losses alone, or the gradients too, by GEMMs or from samples. It has no flce_backward: where
 * its forward has made no gradients, the caller's backward is a second forward with save=grads.
 *
 * The functions called here are declared, by what they do, in
 *
 *   forward_steps.h, backward_steps.h   steps of a forward; of a backward and of blocks
 *   steps.h                             steps of both
 *   gradients.h, samples.h              the gradients, by GEMMs; by sampled entries
 *   teacher.h                           the teacher of a divergence
 *   shards.h                            a vocabulary that ranks share. Without ranks these do
 *                                       nothing, or what the backend's function does
 *   chunk_memory.h                      where the matrices of a chunk are
 *
 * Steps know from the plan whether kernels are fused, where the bias is added and which buffers
 * there are. Form, dtypes and sizes are decided in plan.c, and buffers.c has the table of buffers;
 * the arithmetic is the backend's (backend.h). */
#include "core/backward_steps.h"
#include "core/chunk_memory.h"
#include "core/dw_memory.h"
#include "core/forward_steps.h"
#include "core/gradients.h"
#include "core/plan_rules.h"
#include "core/samples.h"
#include "core/shards.h"
#include "core/steps.h"
#include "core/teacher.h"

/* ---- forward ---- */

static flce_status begin_with_gradients(const execution* e, bool may_overlap) {
  FLCE_TRY(flce_scalars_and_skipped_rows(e, may_overlap));
  return flce_begin_gradients(e);
}

/* Of the strategies whose chunks do not read the statistics of other ranks' classes: one exchange
 * for all rows. Nothing without ranks. */
static flce_status exchange_all_statistics(const execution* e) {
  const chunk all = flce_all_rows(e);
  return all.rows > 0 ? flce_exchange_statistics(e, &all) : FLCE_OK;
}

/* The statistics of all rows; `begin` with the first chunk. */
static flce_status statistics_of_all_rows(const execution* e, flce_beginning begin) {
  for (int64_t first = 0; first < e->problem->shape.rows; first += e->plan->chunk_rows) {
    const chunk c = flce_chunk_in_place(e, first);
    FLCE_TRY(flce_logits_and_begin(e, &c, begin));
    FLCE_TRY(flce_statistics(e, &c));
  }
  return exchange_all_statistics(e);
}

/* save=stats: the statistics are an output. flce_scalars_and_skipped_rows is called once: before or
 * during the first chunk's logits GEMM, or here if there are no rows. */
static flce_status forward_stats(const execution* e) {
  if (e->problem->shape.rows == 0) FLCE_TRY(flce_scalars_and_skipped_rows(e, false));
  FLCE_TRY(statistics_of_all_rows(e, flce_scalars_and_skipped_rows));
  FLCE_TRY(flce_class_logits(e));
  return flce_reduce_losses(e, false);
}

/* No gradient is wanted: the same steps, with the statistics in the workspace unless they are an
 * output. */
static flce_status forward_loss_only(const execution* e) {
  return forward_stats(e);
}

/* save=logits: E or z of each chunk stays in the caller's `saved`. */
static flce_status forward_logits(const execution* e) {
  if (e->problem->shape.rows == 0) FLCE_TRY(flce_scalars_and_skipped_rows(e, false));
  for (int64_t first = 0; first < e->problem->shape.rows; first += e->plan->chunk_rows) {
    const chunk c = flce_chunk_to_saved(e, first);
    FLCE_TRY(flce_logits_and_begin(e, &c, flce_scalars_and_skipped_rows));
    FLCE_TRY(flce_statistics_and_exp(e, &c));
    FLCE_TRY(flce_save_exp(e, &c));
  }
  FLCE_TRY(exchange_all_statistics(e));
  FLCE_TRY(flce_class_logits(e));
  return flce_reduce_losses(e, false);
}

/* save=grads: the gradients for grad_output = 1, chunk by chunk, while its logits are there. */
static flce_status forward_grads(const execution* e) {
  int64_t rows = e->problem->shape.rows;
  bool exp_form = e->plan->form == FLCE_FORM_EXP;
  /* E W needs no statistics: its GEMM hides the ranks' exchange of them. */
  bool hides_exchange = exp_form && e->shard;
  /* Whether reduce may run concurrently with the kernel queued before it (PDL). That has to be one
   * of the backend's own, which waits for all kernels before it: in form exp it is a pass that
   * finishes the gradients, in form dz it may be a library's GEMM. */
  bool reduce_may_overlap = exp_form && !e->shard && rows > 0;
  FLCE_TRY(flce_sum_w_for_smoothing(e));
  if (rows == 0) FLCE_TRY(begin_with_gradients(e, false));
  for (int64_t first = 0; first < rows; first += e->plan->chunk_rows) {
    const chunk c = flce_chunk_in_place(e, first);
    FLCE_TRY(flce_logits_and_begin(e, &c, begin_with_gradients));
    FLCE_TRY(flce_statistics_and_exp(e, &c));
    FLCE_TRY(flce_begin_all_gather_statistics(e, &c));
    if (hides_exchange) FLCE_TRY(flce_dx_gemm(e, &c));
    FLCE_TRY(flce_wait_all_gather_statistics(e, &c));
    FLCE_TRY(flce_loss_coefficients(e, &c));
    FLCE_TRY(flce_loss_dz(e, &c));
    if (!hides_exchange) FLCE_TRY(flce_dx_gemm(e, &c));
    FLCE_TRY(flce_finish_dx_add_dw_db(e, &c));
  }
  FLCE_TRY(flce_finish_gradients(e));
  FLCE_TRY(flce_class_logits(e));
  return flce_reduce_losses(e, reduce_may_overlap);
}

/* What a loop over blocks does with each of them. */
typedef flce_status block_step(const execution* e, const chunk* block);

/* All gradients of a block of classes. */
static flce_status gradients_of_block(const execution* e, const chunk* block) {
  FLCE_TRY(flce_exp_or_dz_of_block(e, block));
  FLCE_TRY(flce_dx_gemm(e, block));
  return flce_add_dw_db(e, block);
}

/* dW and db of a block of classes, from its logits, which are computed again. */
static flce_status dw_of_block(const execution* e, const chunk* block) {
  FLCE_TRY(flce_exp_or_dz_of_block(e, block));
  return flce_add_dw_db(e, block);
}

/* By blocks of a chunk's rows in the workspace, of the classes from first_class on. */
static flce_status each_block(const execution* e, const chunk* rows, int64_t first_class,
                              block_step* step) {
  FLCE_TRY(flce_copy_input(e, rows));
  FLCE_TRY(flce_scale_input(e, rows));
  for (int64_t first = first_class; first < rows->classes; first += e->plan->block_classes) {
    const chunk block = flce_block_of(e, rows, first);
    FLCE_TRY(step(e, &block));
  }
  return FLCE_OK;
}

/* By blocks over all rows in the memory of dW, of the first classes. */
static flce_status each_whole_block(const execution* e, block_step* step) {
  if (e->plan->whole_classes == 0) return FLCE_OK; /* the copies of all rows need not fit either */
  const chunk rows = flce_all_rows_in_dw(e);
  FLCE_TRY(flce_copy_input(e, &rows));
  FLCE_TRY(flce_scale_input(e, &rows));
  for (int64_t first = 0; first < e->plan->whole_classes;) {
    const chunk block = flce_block_in_dw(e, &rows, first);
    FLCE_TRY(step(e, &block));
    first += block.classes;
  }
  return FLCE_OK;
}

/* The gradients of a chunk's rows, of all of which the statistics are known: from the logits of a
 * block of classes at a time, which are computed again. dX is summed over the blocks in the stat
 * dtype; dW of a block is one GEMM over the chunk's rows. */
static flce_status gradients_of_blocks(const execution* e, const chunk* rows) {
  FLCE_TRY(each_block(e, rows, 0, gradients_of_block));
  return flce_finish_chunk_dx(e, rows);
}

/* save=grads under a small max_memory: the statistics of all rows first, then the gradients by
 * blocks of rows and classes. There is at least one row (flce_may_use_blocks). */
static flce_status forward_grads_by_blocks(const execution* e) {
  int64_t rows = e->problem->shape.rows;
  FLCE_TRY(flce_sum_w_for_smoothing(e));
  FLCE_TRY(statistics_of_all_rows(e, begin_with_gradients));
  for (int64_t first = 0; first < rows; first += e->plan->block_rows) {
    const chunk c = flce_rows_of_blocks(e, first);
    FLCE_TRY(flce_loss_coefficients(e, &c));
    FLCE_TRY(gradients_of_blocks(e, &c));
  }
  FLCE_TRY(flce_finish_gradients(e));
  FLCE_TRY(flce_class_logits(e));
  return flce_reduce_losses(e, false);
}

/* save=grads under a small max_memory, if the memory of dW is free until dW is written there
 * (core/dw_memory.h): it holds the chunks of all classes that make the statistics and dX, then the
 * blocks that make dW. */
static flce_status forward_grads_dx_first(const execution* e) {
  int64_t rows = e->problem->shape.rows;
  FLCE_TRY(flce_sum_w_for_smoothing(e));
  for (int64_t first = 0; first < rows; first += e->plan->chunk_rows) {
    const chunk c = flce_chunk_in_dw(e, first);
    FLCE_TRY(flce_logits_and_begin(e, &c, begin_with_gradients));
    FLCE_TRY(flce_statistics_and_exp(e, &c));
    FLCE_TRY(flce_loss_coefficients(e, &c));
    FLCE_TRY(flce_loss_dz(e, &c));
    FLCE_TRY(flce_dx_gemm(e, &c));
    FLCE_TRY(flce_finish_chunk_dx(e, &c));
  }
  FLCE_TRY(each_whole_block(e, dw_of_block));
  for (int64_t first = 0; first < rows; first += e->plan->block_rows) {
    const chunk c = flce_rows_of_blocks(e, first);
    FLCE_TRY(each_block(e, &c, e->plan->whole_classes, dw_of_block));
  }
  FLCE_TRY(flce_finish_gradients(e));
  FLCE_TRY(flce_class_logits(e));
  return flce_reduce_losses(e, false);
}

/* save=samples: a list of (class, E) of each row, drawn from its E. */
static flce_status forward_samples(const execution* e) {
  if (e->problem->shape.rows == 0) FLCE_TRY(flce_scalars_and_skipped_rows(e, false));
  for (int64_t first = 0; first < e->problem->shape.rows; first += e->plan->chunk_rows) {
    const chunk c = flce_chunk_in_place(e, first);
    FLCE_TRY(flce_logits_and_begin(e, &c, flce_scalars_and_skipped_rows));
    FLCE_TRY(flce_statistics_and_exp(e, &c));
    FLCE_TRY(flce_exchange_statistics(e, &c));
    FLCE_TRY(flce_sample_chunk(e, &c));
  }
  FLCE_TRY(flce_class_logits(e));
  return flce_reduce_losses(e, false);
}

/* The logits and statistics of a chunk's rows, the teacher's before the student's. */
static flce_status logits_of_both(const execution* e, int64_t first, chunk* c,
                                  teacher_rows* teacher) {
  FLCE_TRY(flce_teacher_rows(e, first, teacher));
  *c = flce_student_chunk(e, first, teacher);
  FLCE_TRY(flce_logits(e, c));
  FLCE_TRY(flce_statistics(e, c));
  return flce_exchange_statistics(e, c);
}

/* The losses of a divergence. */
static flce_status forward_divergence(const execution* e) {
  FLCE_TRY(flce_scalars_and_skipped_rows(e, false));
  for (int64_t first = 0; first < e->problem->shape.rows; first += e->plan->chunk_rows) {
    chunk c;
    teacher_rows teacher;
    FLCE_TRY(logits_of_both(e, first, &c, &teacher));
    FLCE_TRY(flce_divergence_losses(e, &c, &teacher));
  }
  return flce_reduce_losses(e, false);
}

/* save=grads of a divergence. */
static flce_status forward_divergence_grads(const execution* e) {
  FLCE_TRY(begin_with_gradients(e, false));
  for (int64_t first = 0; first < e->problem->shape.rows; first += e->plan->chunk_rows) {
    chunk c;
    teacher_rows teacher;
    FLCE_TRY(logits_of_both(e, first, &c, &teacher));
    FLCE_TRY(flce_loss_coefficients(e, &c));
    FLCE_TRY(flce_divergence_dz(e, &c, &teacher));
    FLCE_TRY(flce_dx_gemm(e, &c));
    FLCE_TRY(flce_finish_dx_add_dw_db(e, &c));
  }
  FLCE_TRY(flce_finish_gradients(e));
  return flce_reduce_losses(e, false);
}

/* save=grads of a sampled divergence: dz of each row becomes a list of its entries, from which the
 * gradients of all rows are gathered. */
static flce_status forward_divergence_samples(const execution* e) {
  FLCE_TRY(begin_with_gradients(e, false));
  for (int64_t first = 0; first < e->problem->shape.rows; first += e->plan->chunk_rows) {
    chunk c;
    teacher_rows teacher;
    FLCE_TRY(logits_of_both(e, first, &c, &teacher));
    FLCE_TRY(flce_loss_coefficients(e, &c));
    FLCE_TRY(flce_divergence_dz(e, &c, &teacher));
    FLCE_TRY(flce_sample_chunk(e, &c));
  }
  const chunk all = flce_all_rows(e);
  FLCE_TRY(flce_row_coefficients(e, &all, &(flce_upstream){.of_dz = true}, NULL));
  FLCE_TRY(flce_sampled_gradients(e, &all));
  return flce_reduce_losses(e, false);
}

static flce_status no_strategy(const flce_plan* plan) {
  return flce_fail(FLCE_INVALID_ARGUMENT, "plan: expected a strategy in save, got %d",
                   (int)plan->strategy);
}

static flce_status forward(const execution* e) {
  const flce_plan* plan = e->plan;
  switch (plan->strategy) {
    case FLCE_SAVE_NOTHING:
      return plan->is_divergence ? forward_divergence(e) : forward_loss_only(e);
    case FLCE_SAVE_STATS: /* a divergence with it makes no gradients, as with FLCE_SAVE_NOTHING */
      return plan->is_divergence ? forward_divergence(e) : forward_stats(e);
    case FLCE_SAVE_LOGITS:
      return forward_logits(e);
    case FLCE_SAVE_GRADS:
      if (!wants_gradients(e)) /* only with flce_plan_make: flce_plan_call plans SAVE_NOTHING */
        return plan->is_divergence ? forward_divergence(e) : forward_loss_only(e);
      if (plan->draws_from_dz) return forward_divergence_samples(e);
      if (plan->is_divergence) return forward_divergence_grads(e);
      if (makes_dx_first(plan)) return forward_grads_dx_first(e);
      return by_blocks(plan) ? forward_grads_by_blocks(e) : forward_grads(e);
    case FLCE_SAVE_SAMPLES:
      return forward_samples(e);
    case FLCE_SAVE_AUTO:
      break;
  }
  return no_strategy(plan);
}

/* ---- backward ---- */

static flce_status begin_backward(const execution* e) {
  FLCE_TRY(flce_index_rows(e));
  FLCE_TRY(flce_sum_w_for_smoothing(e));
  return flce_begin_gradients(e);
}

/* save=logits: the gradient GEMMs read the saved E, or dz from it or from z. */
static flce_status backward_logits(execution* e) {
  const flce_plan* plan = e->plan;
  bool reads_bias = !plan->saves_exp && !plan->gemm_adds_bias; /* z is saved without it */
  FLCE_TRY(flce_open_operands(e, e->problem->wants.grad_weight, reads_bias));
  FLCE_TRY(begin_backward(e));
  for (int64_t first = 0; first < e->problem->shape.rows; first += plan->backward_chunk_rows) {
    const chunk c = flce_chunk_from_saved(e, first);
    FLCE_TRY(flce_upstream_coefficients(e, &c));
    FLCE_TRY(flce_dz_of_saved(e, &c));
    FLCE_TRY(flce_dx_gemm(e, &c));
    FLCE_TRY(flce_finish_dx_add_dw_db(e, &c));
  }
  FLCE_TRY(flce_order_targets(e));
  return flce_finish_gradients(e);
}

/* save=stats: one GEMM more than save=logits, to compute the logits again. */
static flce_status backward_stats(execution* e) {
  FLCE_TRY(flce_open_operands(e, true, true));
  FLCE_TRY(begin_backward(e));
  for (int64_t first = 0; first < e->problem->shape.rows; first += e->plan->backward_chunk_rows) {
    const chunk c = flce_chunk_recomputed(e, first);
    FLCE_TRY(flce_upstream_coefficients(e, &c));
    FLCE_TRY(flce_recompute_logits(e, &c));
    FLCE_TRY(flce_exp_or_dz(e, &c));
    FLCE_TRY(flce_dx_gemm(e, &c));
    FLCE_TRY(flce_finish_dx_add_dw_db(e, &c));
  }
  FLCE_TRY(flce_order_targets(e));
  return flce_finish_gradients(e);
}

/* save=stats under a small max_memory: by blocks of rows and classes. */
static flce_status backward_stats_by_blocks(execution* e) {
  FLCE_TRY(flce_open_operands(e, true, true));
  FLCE_TRY(begin_backward(e));
  for (int64_t first = 0; first < e->problem->shape.rows; first += e->plan->block_rows) {
    const chunk c = flce_rows_of_blocks(e, first);
    FLCE_TRY(flce_upstream_coefficients(e, &c));
    FLCE_TRY(gradients_of_blocks(e, &c));
  }
  FLCE_TRY(flce_order_targets(e));
  return flce_finish_gradients(e);
}

/* dW and db of those classes of a block that are in [begin, end); `adds` as chunk.adds_dw. */
static flce_status dw_of_range(const execution* e, const chunk* block, int64_t begin, int64_t end,
                               bool adds) {
  int64_t first = max64(begin - block->first_class, 0);
  int64_t classes = min64(end - block->first_class, block->classes) - first;
  if (classes <= 0) return FLCE_OK;
  chunk part = flce_classes_of(block, first, classes);
  part.adds_dw = adds;
  return flce_add_dw_db(e, &part);
}

/* Which part of dW a chunk's blocks make: that of the classes before `end`. The chunks before have
 * written the classes before `written`, to which it is added; of the others this chunk is the
 * first.
 */
typedef struct dw_part {
  int64_t written, end;
} dw_part;

/* A part of dW, and dX if `makes_dx`, by blocks of a chunk's rows in the workspace, of the classes
 * from first_class on. */
static flce_status dw_part_of_blocks(const execution* e, const chunk* rows, int64_t first_class,
                                     dw_part part, bool makes_dx) {
  FLCE_TRY(flce_copy_input(e, rows));
  FLCE_TRY(flce_scale_input(e, rows));
  for (int64_t first = first_class; first < rows->classes; first += e->plan->block_classes) {
    const chunk block = flce_block_of(e, rows, first);
    FLCE_TRY(flce_exp_or_dz_of_block(e, &block));
    if (makes_dx) FLCE_TRY(flce_dx_gemm(e, &block));
    FLCE_TRY(dw_of_range(e, &block, 0, part.written, true));
    FLCE_TRY(dw_of_range(e, &block, part.written, part.end, false));
  }
  return FLCE_OK;
}

/* dX of a chunk's rows, by blocks of the classes after those of blocks over all rows, and dW of
 * those of them whose memory has no sum of dX any more. */
static flce_status dx_and_free_dw(const execution* e, const chunk* rows) {
  dw_part part = {.end = flce_free_classes(e->problem, e->plan, rows->first)};
  if (rows->first > 0)
    part.written = flce_free_classes(e->problem, e->plan, rows->first - e->plan->block_rows);
  FLCE_TRY(dw_part_of_blocks(e, rows, e->plan->whole_classes, part, true));
  return flce_finish_chunk_dx(e, rows);
}

/* A chunk's part of dW of the classes whose memory was not free in its dx_and_free_dw. */
static flce_status dw_of_other_classes(const execution* e, const chunk* rows, int64_t written) {
  int64_t begin = flce_free_classes(e->problem, e->plan, rows->first), vocab = rows->classes;
  if (begin == vocab) return FLCE_OK;
  return dw_part_of_blocks(e, rows, begin, (dw_part){.written = written, .end = vocab}, false);
}

/* save=stats under a small max_memory, if the memory of dW is free until dW is written there
 * (core/dw_memory.h): it holds blocks over all rows and, until dX is finished, its sum. */
static flce_status backward_stats_in_dw(execution* e) {
  FLCE_TRY(flce_open_operands(e, true, true));
  FLCE_TRY(begin_backward(e));
  const chunk all = flce_all_rows(e);
  FLCE_TRY(flce_upstream_coefficients(e, &all));
  FLCE_TRY(each_whole_block(e, gradients_of_block)); /* dX remains a sum */
  int64_t step = e->plan->block_rows, last = (all.rows - 1) / step * step;
  /* By dx_and_free_dw of all chunks. The first chunk of the second loop writes the others. */
  int64_t written = flce_free_classes(e->problem, e->plan, last);
  for (int64_t first = 0; first < all.rows; first += step) {
    const chunk c = flce_rows_of_blocks(e, first);
    FLCE_TRY(dx_and_free_dw(e, &c));
  }
  for (int64_t first = 0; first < all.rows; first += step) {
    const chunk c = flce_rows_of_blocks(e, first);
    FLCE_TRY(dw_of_other_classes(e, &c, first > 0 ? c.classes : written));
  }
  FLCE_TRY(flce_order_targets(e));
  return flce_finish_gradients(e);
}

/* save=samples: gathers by the lists, of all rows at once. */
static flce_status backward_samples(execution* e) {
  FLCE_TRY(flce_open_operands(e, e->problem->wants.grad_weight, false));
  FLCE_TRY(begin_backward(e));
  const chunk all = flce_all_rows(e);
  FLCE_TRY(flce_upstream_coefficients(e, &all));
  return flce_sampled_gradients(e, &all);
}

static flce_status backward(execution* e) {
  switch (e->plan->strategy) {
    case FLCE_SAVE_LOGITS:
      return backward_logits(e);
    case FLCE_SAVE_STATS:
      if (e->plan->blocks == FLCE_BLOCKS_IN_DW) return backward_stats_in_dw(e);
      return by_blocks(e->plan) ? backward_stats_by_blocks(e) : backward_stats(e);
    case FLCE_SAVE_SAMPLES:
      return backward_samples(e);
    case FLCE_SAVE_NOTHING: /* flce_check_backward() has refused these three */
    case FLCE_SAVE_GRADS:
    case FLCE_SAVE_AUTO:
      break;
  }
  return no_strategy(e->plan);
}

/* ---- a call ---- */

static execution open_execution(const flce_backend* backend, shard_call* shard,
                                const flce_problem* problem, const flce_plan* plan,
                                const flce_tensors* tensors, unsigned pass) {
  execution e = {.backend = backend,
                 .pass = pass,
                 .shard = flce_is_sharded(problem) ? shard : NULL,
                 .problem = problem,
                 .plan = plan,
                 .tensors = tensors,
                 .stat = flce_stat_dtype(plan->dtype),
                 .no_class = flce_no_class(problem)};
  if (plan->gathers) e.index = buffer_ptr(&e, FLCE_BUF_INDEX);
  return e;
}

static flce_status open_and_run_forward(execution* e, teacher_call* teacher) {
  const flce_problem* problem = e->problem;
  const flce_tensors* tensors = e->tensors;
  bool reduces = problem->reduction != FLCE_NONE;
  FLCE_TRY(flce_open_operands(e, true, true));
  if (e->plan->is_divergence) FLCE_TRY(flce_open_teacher(e, problem, tensors, teacher));
  e->losses = reduces ? buffer_ptr(e, FLCE_BUF_ROW_LOSS) : tensors->loss;
  FLCE_TRY(flce_index_rows(e));
  return forward(e);
}

flce_status flce_forward(const flce_backend* backend, const flce_comm* comm,
                         const flce_problem* problem, const flce_plan* plan,
                         const flce_tensors* caller) {
  flce_tensors tensors = *caller;
  shard_call shard = {.comm = comm};
  teacher_call teacher = {0};
  execution e = open_execution(backend, &shard, problem, plan, &tensors, FLCE_IN_FORWARD);
  if (!plan->keeps_statistics) {
    tensors.stats = buffer_ptr(&e, FLCE_BUF_STATS);
    tensors.scalars = buffer_ptr(&e, FLCE_BUF_SCALARS);
  }
  flce_status status = flce_close_shard(&e, open_and_run_forward(&e, &teacher));
  return flce_close_shard(&teacher.forward, status); /* without a teacher nothing is open there */
}

flce_status flce_check_backward(const flce_plan* plan) {
  if (flce_has_backward(plan->strategy)) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "save: expected \"logits\", \"stats\" or \"samples\" in a backward, got \"%s\"",
                   flce_save_name(plan->strategy));
}

flce_status flce_backward(const flce_backend* backend, const flce_comm* comm,
                          const flce_problem* problem, const flce_plan* plan,
                          const flce_tensors* tensors) {
  FLCE_TRY(flce_check_backward(plan));
  shard_call shard = {.comm = comm};
  execution e = open_execution(backend, &shard, problem, plan, tensors, FLCE_IN_BACKWARD);
  if (!wants_gradients(&e)) return FLCE_OK;
  return flce_close_shard(&e, backward(&e));
}
