/* The buffers of a plan: a table of what exists, when it is alive and how many bytes it has, and
 * their places in the workspaces. What each one holds is said at flce_buffer_id (flce.h). Pure, as
 * plan.c, which has decided everything that a row of the table reads. */
#include "core/buffers.h"

#include "backend.h"
#include "core/plan_rules.h"

enum {
  ALIGNMENT = 256, /* bytes, of a buffer in a workspace */

  /* When a buffer is alive: one in the workspace of this pass. both_passes() combines the two for a
   * buffer that the workspace of each pass has. */
  FORWARD = FLCE_IN_FORWARD,
  BACKWARD = FLCE_IN_BACKWARD,
  /* A tensor of the caller's: an output of the forward, alive to the end of the backward; or an
   * output of the backward. */
  FORWARD_OUTPUT = FLCE_OUTPUT | FLCE_IN_FORWARD | FLCE_IN_BACKWARD,
  BACKWARD_OUTPUT = FLCE_OUTPUT | FLCE_IN_BACKWARD,
};

/* A row of the table. A buffer that each pass has in another size has a row for each: both
 * workspaces have it at the same offset, in the larger size. */
typedef struct table_row {
  flce_buffer_id id;
  bool exists;
  unsigned alive;
  int64_t bytes; /* 0: the buffer does not exist either */
} table_row;

static void add_rows(flce_plan* plan, const table_row* rows, size_t count) {
  for (const table_row* row = rows; row < rows + count; row++) {
    if (!row->exists) continue;
    flce_buffer* buffer = &plan->buffers[row->id];
    buffer->offset = -1;
    buffer->bytes = max64(buffer->bytes, row->bytes);
    if (row->bytes > 0) buffer->lifetime |= row->alive;
  }
}
#define ADD_ROWS(plan, rows) add_rows(plan, rows, sizeof(rows) / sizeof *(rows))

static int64_t stat_size(const flce_plan* plan) {
  return flce_size_of(flce_stat_dtype(plan->dtype));
}

/* Bytes of a row of a chunk's logits. */
static int64_t logits_row(const flce_plan* plan) {
  return plan->z_pitch * flce_size_of(plan->z_dtype);
}

static unsigned both_passes(const flce_plan* plan) {
  return FORWARD | (flce_has_backward(plan->strategy) ? BACKWARD : 0);
}

/* The pass that makes the gradients, and the rows of its chunks. */
static unsigned gradient_pass(const flce_plan* plan) {
  return plan->strategy == FLCE_SAVE_GRADS ? FORWARD : BACKWARD;
}
static int64_t gradient_rows(const flce_plan* plan) {
  if (by_blocks(plan)) return plan->block_rows;
  return plan->strategy == FLCE_SAVE_GRADS ? plan->chunk_rows : plan->backward_chunk_rows;
}

/* Rows of a chunk or block whose weights in db are made at a time (row_weights of gradients.c). */
static int64_t weighted_rows(const flce_plan* plan) {
  return uses_dw_memory(plan) ? plan->rows : gradient_rows(plan);
}

/* ---- the caller's tensors ---- */

static void list_results(const flce_problem* problem, flce_plan* plan) {
  const int64_t n = problem->shape.tokens, of_classes = n * problem->wants.row_classes;
  const int64_t stat = stat_size(plan), index = sizeof(int64_t);
  const bool saves = plan->strategy == FLCE_SAVE_LOGITS || plan->strategy == FLCE_SAVE_SAMPLES;
  const int64_t saved_row = plan->saved_pitch * flce_size_of(plan->saved_dtype);
  const unsigned statistics = plan->keeps_statistics ? FORWARD_OUTPUT : FORWARD;
  const table_row rows[] = {
      {FLCE_BUF_LOSS, true, FORWARD_OUTPUT, (problem->reduction == FLCE_NONE ? n : 1) * stat},
      {FLCE_BUF_STATS, true, statistics, FLCE_STAT_COUNT * n * stat},
      {FLCE_BUF_SCALARS, true, statistics, FLCE_SCALAR_COUNT * stat},
      {FLCE_BUF_SAVED, saves, FORWARD_OUTPUT, problem->shape.rows * saved_row},
      {FLCE_BUF_PREDICTIONS, problem->wants.predictions, FORWARD_OUTPUT, n * index},
      {FLCE_BUF_CLASSES, problem->wants.topk > 0, FORWARD_OUTPUT, of_classes * index},
      {FLCE_BUF_CLASS_LOGITS, true, FORWARD_OUTPUT, of_classes * stat},
  };
  ADD_ROWS(plan, rows);
}

/* Bytes of a gradient in the caller's dtype, if the forward makes it in another one, from which the
 * backward rounds it. */
static int64_t rounded_bytes(bool exists, int64_t elements, flce_dtype own, flce_dtype callers) {
  return exists && own != callers ? elements * flce_size_of(callers) : 0;
}

static void list_gradients(const flce_problem* problem, flce_plan* plan) {
  const bool any = plan->strategy != FLCE_SAVE_NOTHING, dx = any && problem->wants.grad_input;
  const bool dw = any && problem->wants.grad_weight && !problem->backward.adds_grad_weight;
  const bool db = any && problem->wants.grad_bias;
  const flce_dtype dx_dtype = plan->grad_input_dtype, dw_dtype = plan->grad_weight_dtype;
  const flce_dtype db_dtype = plan->grad_bias_dtype;
  const int64_t dx_elements = flce_input_rows(problem) * problem->shape.hidden;
  const int64_t dw_elements = problem->shape.weight_rows * flce_grad_weight_cols(problem);
  const int64_t db_elements = problem->shape.weight_rows;
  const int64_t rounded = rounded_bytes(dx, dx_elements, dx_dtype, problem->dtypes.input) +
                          rounded_bytes(dw, dw_elements, dw_dtype, problem->dtypes.weight) +
                          rounded_bytes(db, db_elements, db_dtype, problem->dtypes.bias);
  const unsigned alive = plan->strategy == FLCE_SAVE_GRADS ? FORWARD_OUTPUT : BACKWARD_OUTPUT;
  const table_row rows[] = {
      {FLCE_BUF_GRAD_INPUT, dx, alive, dx_elements * flce_size_of(dx_dtype)},
      {FLCE_BUF_GRAD_WEIGHT, dw, alive, dw_elements * flce_size_of(dw_dtype)},
      {FLCE_BUF_GRAD_BIAS, db, alive, db_elements * flce_size_of(db_dtype)},
      {FLCE_BUF_ROUNDED, true, BACKWARD_OUTPUT, rounded},
  };
  ADD_ROWS(plan, rows);
}

/* ---- what logits and losses need ---- */

static void list_operands(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  const int64_t n = problem->shape.tokens, v = problem->shape.vocab, h = plan->hidden;
  const int64_t size = flce_size_of(plan->dtype), stat = stat_size(plan);
  const unsigned both = both_passes(plan);
  const bool padded = h != problem->shape.hidden, again = plan->strategy == FLCE_SAVE_STATS;
  /* The backward adds the bias where it reads logits that have none yet. */
  const bool stores_z = plan->strategy == FLCE_SAVE_LOGITS && !plan->saves_exp;
  const unsigned bias = again || (stores_z && !plan->gemm_adds_bias) ? both : FORWARD;
  /* A copy of x for the logits GEMM: in the forward, and where the backward runs it again. In both,
   * unless it is in FLCE_BUF_SCALED_X. */
  const bool copies = copies_logits_input(plan);
  const int64_t copied_row = plan->input_pitch * size, of_blocks = plan->block_rows * copied_row;
  const bool first_copy = plan->gathered_x == FLCE_BUF_GATHERED_X;
  const bool second_copy = again && plan->backward_gathered_x == FLCE_BUF_GATHERED_X;
  const table_row rows[] = {
      {FLCE_BUF_INPUT_CAST, padded || problem->dtypes.input != plan->dtype, both, n * h * size},
      {FLCE_BUF_WEIGHT_CAST, padded || problem->dtypes.weight != plan->dtype, both, v * h * size},
      {FLCE_BUF_BIAS_CAST,
       problem->has.bias && problem->dtypes.bias != flce_stat_dtype(plan->dtype), bias, v * stat},
      {FLCE_BUF_INDEX, plan->gathers, both, facts->compact_bytes},
      {FLCE_BUF_GATHERED_X, copies && !makes_dx_first(plan), FORWARD,
       first_copy ? plan->chunk_rows * copied_row : 0},
      {FLCE_BUF_GATHERED_X, copies, BACKWARD,
       second_copy ? plan->backward_chunk_rows * copied_row : 0},
      {FLCE_BUF_GATHERED_X, copies && by_blocks(plan), gradient_pass(plan), of_blocks},
  };
  ADD_ROWS(plan, rows);
}

/* The rows of the forward's chunks that have logits in the workspace. */
static int64_t forward_logits_rows(const flce_problem* problem, const flce_plan* plan) {
  bool elsewhere = plan->z_in_saved || problem->has.logits || plan->packs || makes_dx_first(plan);
  bool none = plan->fuses_rows && only_statistics(plan);
  return elsewhere || none ? 0 : plan->chunk_rows;
}

/* Bytes of what the gradient GEMMs of a backward's chunk read, if it is not in what is saved: dz
 * from what is saved, or logits that are computed again and overwritten. */
static int64_t backward_logits_bytes(const flce_plan* plan) {
  bool writes_dz =
      plan->strategy == FLCE_SAVE_LOGITS && plan->form == FLCE_FORM_DZ && !plan->dz_in_saved;
  int64_t dz_row = plan->out_pitch * flce_size_of(plan->dtype);
  if (writes_dz) return plan->backward_chunk_rows * dz_row;
  bool again = plan->strategy == FLCE_SAVE_STATS && !by_blocks(plan);
  return again ? plan->backward_chunk_rows * logits_row(plan) : 0;
}

static void list_logits(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  const bool reduces = problem->reduction != FLCE_NONE;
  const int64_t logits = forward_logits_rows(problem, plan) * logits_row(plan);
  const int64_t block = plan->block_rows * plan->block_classes * flce_size_of(block_dtype(plan));
  const table_row rows[] = {
      {FLCE_BUF_LOGITS, true, FORWARD, logits},
      {FLCE_BUF_LOGITS, true, BACKWARD, backward_logits_bytes(plan)},
      {FLCE_BUF_LOGITS, by_blocks(plan), gradient_pass(plan), block},
      {FLCE_BUF_FUSED, plan->fuses_rows && !makes_dx_first(plan), FORWARD,
       plan->chunk_rows * facts->fused_row_bytes},
      {FLCE_BUF_FUSED, plan->fuses_blocks, gradient_pass(plan),
       plan->block_rows * fused_exp_row_bytes(facts, problem->shape.vocab, plan->block_classes)},
      {FLCE_BUF_ROW_LOSS, reduces, FORWARD, problem->shape.tokens * stat_size(plan)},
      {FLCE_BUF_GEMM_WORKSPACE, true, both_passes(plan), facts->gemm_workspace_bytes},
      {FLCE_BUF_TEACHER, problem->divergence.teacher != NULL, FORWARD,
       problem->derived.teacher_bytes},
  };
  ADD_ROWS(plan, rows);
}

/* ---- what gradients need, in the pass that makes them ---- */

static void list_row_gradients(const flce_problem* problem, const flce_facts* facts,
                               flce_plan* plan) {
  const int64_t h = plan->hidden, stat = stat_size(plan);
  const unsigned pass = gradient_pass(plan);
  const bool exp_form = plan->form == FLCE_FORM_EXP, wants_db = problem->wants.grad_bias;
  const bool smooth = exp_form && problem->loss.label_smoothing > 0.0;
  /* In a forward the loss scale does what FLCE_BUF_DZ_SCALE does here. */
  const bool scales_dz = plan->dtype == FLCE_F16 && !exp_form && pass == BACKWARD;
  const int64_t scale = FLCE_DZ_SCALE_NUMBERS + (wants_db ? weighted_rows(plan) : 0);
  const bool sums_columns = smooth || (wants_db && !gradients_are_sampled(plan));
  const table_row rows[] = {
      {FLCE_BUF_COEF, true, pass, FLCE_COEF_COUNT * problem->shape.tokens * stat},
      {FLCE_BUF_DZ_SCALE, scales_dz, pass, scale * stat},
      {FLCE_BUF_SMOOTH, smooth, pass, (2 * h + 1) * stat},
      {FLCE_BUF_COLUMN_SUM, sums_columns, pass, facts->column_sum_bytes},
  };
  ADD_ROWS(plan, rows);
}

/* Where gradients are gathered by lists. */
static void list_samples(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  const unsigned pass = gradient_pass(plan);
  const bool dw_or_db = problem->wants.grad_weight || problem->wants.grad_bias;
  const int64_t list = flce_sample_pitch(problem->sampling.eps) * (int64_t)sizeof(int32_t);
  const table_row rows[] = {
      {FLCE_BUF_SAMPLES, plan->draws_from_dz, pass, problem->shape.rows * list},
      {FLCE_BUF_SAMPLE_ORDER, dw_or_db, pass, facts->sample_bytes},
  };
  ADD_ROWS(plan, rows);
}

/* Where gradients are GEMMs. */
static void list_gradient_gemms(const flce_problem* problem, const flce_facts* facts,
                                flce_plan* plan) {
  const int64_t v = problem->shape.vocab, chunk = gradient_rows(plan), width = plan->weight_hidden;
  const int64_t size = flce_size_of(plan->dtype), stat = stat_size(plan);
  const int64_t dx_row = plan->hidden * flce_size_of(plan->dx_gemm_dtype);
  const int64_t accum_row = width * flce_size_of(plan->accum_dtype);
  const unsigned pass = gradient_pass(plan);
  const bool dw = problem->wants.grad_weight, db = problem->wants.grad_bias;
  const bool exp_form = plan->form == FLCE_FORM_EXP, padded = plan->hidden != problem->shape.hidden;
  const bool dx_rows = has_dx_rows(problem, plan) && !uses_dw_memory(plan);
  const int64_t dw_piece = plan->dw_piece_rows * width,
                dx_piece = plan->dx_piece_rows * plan->hidden;
  const bool own_dw = plan->accum_dtype != plan->grad_weight_dtype || padded;
  const table_row rows[] = {
      {FLCE_BUF_ORDER, exp_form && (dw || db), pass, facts->order_bytes},
      {FLCE_BUF_DX_ROWS, dx_rows, pass, chunk * dx_row},
      {FLCE_BUF_SCALED_X, dw && copies_weight_input(problem, plan), pass,
       chunk * plan->input_pitch * size},
      {FLCE_BUF_DW_ACCUM, dw && own_dw, pass, v * accum_row},
      {FLCE_BUF_GEMM_PIECE, true, pass, max64(dw ? dw_piece : 0, dx_piece) * size},
      {FLCE_BUF_DB_ACCUM, db, pass, v * stat},
      {FLCE_BUF_DB_PARTS, db, pass, plan->bias_parts * v * stat},
      {FLCE_BUF_GATHERED_COEF, db && plan->gathers && exp_form, pass, weighted_rows(plan) * stat},
  };
  ADD_ROWS(plan, rows);
}

/* ---- what the exchanges of a sharded vocabulary need (shards.c) ---- */

static void list_exchanges(const flce_problem* problem, flce_plan* plan) {
  const int64_t n = problem->shape.tokens, ranks = problem->shard.ranks, stat = stat_size(plan);
  const int64_t input_row = problem->shape.hidden * flce_size_of(problem->dtypes.input);
  const bool each_chunk = exchanges_each_chunk(problem, plan);
  const int64_t exchanged = each_chunk ? plan->chunk_rows : problem->shape.rows;
  const int64_t statistics = flce_shard_stat_count(problem) * exchanged * stat;
  const int64_t sums = FLCE_DIVERGENCE_SUMS * plan->chunk_rows * stat;
  const bool sums_dx = makes_gradients(problem, plan) && sums_partial_dx(problem);
  const int64_t block = summed_elements(problem) * flce_size_of(plan->partial_dx_dtype);
  const bool own_dx = problem->shard.input_is_sharded || n % ranks != 0 ||
                      plan->partial_dx_dtype != plan->grad_input_dtype;
  const unsigned both = both_passes(plan), pass = gradient_pass(plan);
  const table_row rows[] = {
      {FLCE_BUF_SHARD_INPUT, problem->shard.input_is_sharded, both, n * input_row},
      {FLCE_BUF_SHARD_TARGET, true, both, n * (int64_t)sizeof(int64_t)},
      {FLCE_BUF_SHARD_SCALARS, true, FORWARD, FLCE_SCALAR_COUNT * stat},
      {FLCE_BUF_SHARD_STATS, true, FORWARD, ranks * statistics},
      {FLCE_BUF_DIVERGENCE, problem->divergence.teacher != NULL, FORWARD, (1 + ranks) * sums},
      {FLCE_BUF_PARTIAL_DX, sums_dx && own_dx, pass, ranks * block},
      {FLCE_BUF_RECEIVED_DX, sums_dx, pass, ranks * block},
  };
  ADD_ROWS(plan, rows);
}

/* ---- the layout ---- */

/* Places the workspace's buffers that are alive in just these passes, from `next` on. Returns the
 * end of the last one. */
static int64_t place(flce_plan* plan, unsigned passes, int64_t next) {
  for (int id = 0; id < FLCE_BUF_COUNT; id++) {
    flce_buffer* buffer = &plan->buffers[id];
    if (buffer->lifetime != passes) continue;
    buffer->offset = next;
    next += round_up(buffer->bytes, ALIGNMENT);
  }
  return next;
}

/* Bytes of the caller's tensors that are alive in a pass. */
static int64_t tensor_bytes(const flce_plan* plan, unsigned pass) {
  int64_t sum = 0;
  for (const flce_buffer* b = plan->buffers; b < plan->buffers + FLCE_BUF_COUNT; b++)
    if ((b->lifetime & FLCE_OUTPUT) && (b->lifetime & pass)) sum += b->bytes;
  return sum;
}

/* Buffers that both passes have come first, so that their offsets are the same in both workspaces.
 */
static void lay_out(flce_plan* plan) {
  int64_t shared = place(plan, FORWARD | BACKWARD, 0);
  int64_t backward = place(plan, BACKWARD, shared);
  plan->forward_workspace_bytes = place(plan, FORWARD, shared);
  plan->backward_workspace_bytes = flce_has_backward(plan->strategy) ? backward : 0;
  plan->forward_peak_bytes = plan->forward_workspace_bytes + tensor_bytes(plan, FORWARD);
  plan->backward_peak_bytes = plan->backward_workspace_bytes + tensor_bytes(plan, BACKWARD);
  if (plan->strategy == FLCE_SAVE_NOTHING) plan->backward_peak_bytes = 0;
  plan->peak_bytes = max64(plan->forward_peak_bytes, plan->backward_peak_bytes);
}

void flce_list_buffers(const flce_problem* problem, const flce_facts* facts, flce_plan* plan) {
  list_results(problem, plan);
  list_gradients(problem, plan);
  list_operands(problem, facts, plan);
  list_logits(problem, facts, plan);
  if (makes_gradients(problem, plan)) {
    list_row_gradients(problem, facts, plan);
    if (gradients_are_sampled(plan))
      list_samples(problem, facts, plan);
    else
      list_gradient_gemms(problem, facts, plan);
  }
  if (flce_is_sharded(problem)) list_exchanges(problem, plan);
  lay_out(plan);
}

/* ---- without a plan ---- */

int64_t flce_cross_entropy_workspace_bytes(const flce_problem* problem) {
  return FLCE_COEF_COUNT * problem->shape.tokens *
         flce_size_of(flce_stat_dtype(problem->dtypes.gemm));
}
