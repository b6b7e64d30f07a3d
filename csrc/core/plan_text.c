/* flce_plan_text: the plan as text, for people; flce_plan_json: the same for flce/plan.py.
 * CONTRIBUTING.md has an example. */
#include "flce.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/* The buffers' names, X(flce_buffer_id without FLCE_BUF_, its name). */
#define FLCE_BUFFER_NAMES(X)                                                                       \
  X(LOSS, loss), X(ROW_LOSS, row_loss), X(STATS, stats), X(SCALARS, scalars), X(SAVED, saved),     \
      X(PREDICTIONS, predictions), X(CLASSES, classes), X(CLASS_LOGITS, class_logits),             \
      X(GRAD_INPUT, grad_input), X(GRAD_WEIGHT, grad_weight), X(GRAD_BIAS, grad_bias),             \
      X(ROUNDED, rounded), X(INPUT_CAST, input_cast), X(WEIGHT_CAST, weight_cast),                 \
      X(BIAS_CAST, bias_cast), X(LOGITS, logits), X(DZ_SCALE, dz_scale), X(COEF, coef),            \
      X(INDEX, index), X(GATHERED_X, gathered_x), X(GATHERED_COEF, gathered_coef),                 \
      X(DX_ROWS, dx_rows), X(SCALED_X, scaled_x), X(DW_ACCUM, dw_accum),                           \
      X(GEMM_PIECE, gemm_piece), X(DB_ACCUM, db_accum), X(DB_PARTS, db_parts), X(SMOOTH, smooth),  \
      X(ORDER, order), X(SAMPLES, samples), X(SAMPLE_ORDER, sample_order),                         \
      X(COLUMN_SUM, column_sum), X(FUSED, fused), X(GEMM_WORKSPACE, gemm_workspace),               \
      X(TEACHER, teacher), X(DIVERGENCE, divergence), X(SHARD_INPUT, shard_input),                 \
      X(SHARD_TARGET, shard_target), X(SHARD_SCALARS, shard_scalars), X(SHARD_STATS, shard_stats), \
      X(PARTIAL_DX, partial_dx), X(RECEIVED_DX, received_dx)
#define FLCE_NAME(id, name) [FLCE_BUF_##id] = #name
static const char* const kBuffers[FLCE_BUF_COUNT] = {FLCE_BUFFER_NAMES(FLCE_NAME)};
#undef FLCE_NAME

static const struct {
  const char *name, *kind;
} kCollectives[FLCE_COLLECTIVES] = {
    [FLCE_ALL_GATHER_INPUT] = {"input", "all-gather"},
    [FLCE_ALL_GATHER_STATISTICS] = {"statistics", "all-gather"},
    [FLCE_ALL_TO_ALL_DX] = {"partial_dx", "all-to-all"},
    [FLCE_ALL_GATHER_DX] = {"summed_dx", "all-gather"},
};

/* Appends to `text` as snprintf does. *used counts the whole text, also what did not fit. */
static void append(char* text, int64_t size, int64_t* used, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
static void append(char* text, int64_t size, int64_t* used, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  bool room = *used < size;
  int written =
      vsnprintf(room ? text + *used : NULL, room ? (size_t)(size - *used) : 0, format, arguments);
  va_end(arguments);
  if (written > 0) *used += written;
}

/* By flce_block_mode. */
static const char* const kBlocks[] = {"none", "workspace", "dx_first", "in_dw"};

/* The strategy and the dtypes, six texts. */
#define FLCE_PLAN_WORDS(plan)                                                 \
  flce_save_name(plan->strategy), plan->form == FLCE_FORM_EXP ? "exp" : "dz", \
      plan->fuses_rows ? "fused" : "gemm", flce_dtype_name(plan->dtype),      \
      flce_dtype_name(plan->z_dtype), flce_dtype_name(plan->accum_dtype)

int64_t flce_plan_text(const flce_plan* plan, char* text, int64_t size) {
  int64_t used = 0;
  append(text, size, &used, "save=%s form=%s kernel=%s dtype=%s logits_dtype=%s accum_dtype=%s\n",
         FLCE_PLAN_WORDS(plan));
  append(text, size, &used,
         "rows=%lld chunk_rows=%lld chunks=%lld backward_chunk_rows=%lld backward_chunks=%lld\n",
         (long long)plan->rows, (long long)plan->chunk_rows, (long long)plan->chunks,
         (long long)plan->backward_chunk_rows, (long long)plan->backward_chunks);
  if (plan->block_classes > 0)
    append(text, size, &used, "gradients by blocks: block_rows=%lld block_classes=%lld\n",
           (long long)plan->block_rows, (long long)plan->block_classes);
  if (plan->blocks == FLCE_BLOCKS_DX_FIRST)
    append(text, size, &used, "dX first, in the memory of dW; whole_classes=%lld\n",
           (long long)plan->whole_classes);
  if (plan->blocks == FLCE_BLOCKS_IN_DW)
    append(text, size, &used, "dX and dW in the memory of dW; whole_classes=%lld\n",
           (long long)plan->whole_classes);
  append(text, size, &used, "forward_gemms=%lld backward_gemms=%lld sampled_time=%.3g\n",
         (long long)plan->forward_gemms, (long long)plan->backward_gemms, plan->sampled_time);
  if (plan->dw_first_classes > 0)
    append(text, size, &used,
           "dW of the last chunk in two GEMMs: the first %lld classes, then the others\n",
           (long long)plan->dw_first_classes);
  if (plan->strategy == FLCE_SAVE_STATS)
    append(text, size, &used, "the backward computes the logits again\n");
  append(text, size, &used, "forward_peak_bytes=%lld backward_peak_bytes=%lld peak_bytes=%lld\n",
         (long long)plan->forward_peak_bytes, (long long)plan->backward_peak_bytes,
         (long long)plan->peak_bytes);
  for (int id = 0; id < FLCE_BUF_COUNT; id++) {
    const flce_buffer* buffer = &plan->buffers[id];
    if (buffer->bytes == 0) continue;
    append(text, size, &used, "  %-15s %15lld bytes %s%s%s\n", kBuffers[id],
           (long long)buffer->bytes, buffer->lifetime & FLCE_OUTPUT ? "tensor" : "workspace",
           buffer->lifetime & FLCE_IN_FORWARD ? " forward" : "",
           buffer->lifetime & FLCE_IN_BACKWARD ? " backward" : "");
  }
  if (plan->ranks > 1) append(text, size, &used, "ranks=%lld\n", (long long)plan->ranks);
  for (int id = 0; id < FLCE_COLLECTIVES; id++) {
    const flce_collective* collective = &plan->collectives[id];
    if (collective->forward + collective->backward == 0) continue;
    append(text, size, &used, "  %-12s %-10s %3lld forward %3lld backward %15lld bytes received\n",
           kCollectives[id].name, kCollectives[id].kind, (long long)collective->forward,
           (long long)collective->backward, (long long)collective->bytes);
  }
  return used;
}

#define FLCE_PLAN_SIZES(X)                                                                      \
  X(rows), X(chunk_rows), X(chunks), X(backward_chunk_rows), X(backward_chunks), X(block_rows), \
      X(block_classes), X(whole_classes), X(forward_gemms), X(backward_gemms),                  \
      X(forward_peak_bytes), X(backward_peak_bytes), X(peak_bytes), X(ranks)

int64_t flce_plan_json(const flce_plan* plan, char* text, int64_t size) {
  int64_t used = 0;
  append(text, size, &used,
         "{\"save\": \"%s\", \"form\": \"%s\", \"kernel\": \"%s\", \"dtype\": \"%s\", "
         "\"logits_dtype\": \"%s\", \"accum_dtype\": \"%s\", \"blocks\": \"%s\"",
         FLCE_PLAN_WORDS(plan), kBlocks[plan->blocks]);
#define FLCE_SIZE(name) append(text, size, &used, ", \"" #name "\": %lld", (long long)plan->name)
  FLCE_PLAN_SIZES(FLCE_SIZE);
#undef FLCE_SIZE
  append(text, size, &used, ", \"buffers\": {");
  const char* comma = "";
  for (int id = 0; id < FLCE_BUF_COUNT; id++) {
    if (plan->buffers[id].bytes == 0) continue;
    append(text, size, &used, "%s\"%s\": %lld", comma, kBuffers[id],
           (long long)plan->buffers[id].bytes);
    comma = ", ";
  }
  append(text, size, &used, "}, \"collectives\": {");
  comma = "";
  for (int id = 0; id < FLCE_COLLECTIVES; id++) {
    const flce_collective* one = &plan->collectives[id];
    if (one->forward + one->backward == 0) continue;
    append(text, size, &used, "%s\"%s\": [\"%s\", %lld, %lld, %lld]", comma, kCollectives[id].name,
           kCollectives[id].kind, (long long)one->forward, (long long)one->backward,
           (long long)one->bytes);
    comma = ", ";
  }
  append(text, size, &used, "}}");
  return used;
}
