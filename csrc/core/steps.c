/* The steps that forwards and backwards share. */
#include "core/steps.h"

#include "core/chunk_memory.h"
#include "core/gradients.h"
#include "core/shards.h"
#include "environment.h"

/* ---- operands ---- */

/* *out = `source` [rows][cols] as [rows][pitch] of `dtype`, zero-padded: `source` itself if it has
 * this dtype and pitch, else a copy in buffer `id`. */
static flce_status convert(const execution* e, flce_buffer_id id, const void* source,
                           flce_dtype source_dtype, flce_dtype dtype, int64_t rows, int64_t cols,
                           int64_t pitch, const void** out) {
  *out = source;
  if (source == NULL || (source_dtype == dtype && pitch == cols)) return FLCE_OK;
  *out = buffer_ptr(e, id);
  CALL(e, cast,
       &(flce_cast_args){.out = buffer_ptr(e, id),
                         .out_dtype = dtype,
                         .out_pitch = pitch,
                         .in = source,
                         .in_dtype = source_dtype,
                         .in_pitch = cols,
                         .rows = rows,
                         .cols = cols});
  return FLCE_OK;
}

flce_status flce_open_operands(execution* e, bool reads_input, bool reads_bias) {
  const flce_plan* plan = e->plan;
  FLCE_TRY(flce_open_shard(e, reads_input));
  const flce_problem* problem = e->problem;
  const flce_tensors* tensors = e->tensors;
  int64_t h = problem->shape.hidden, v = problem->shape.vocab;
  if (reads_input)
    FLCE_TRY(convert(e, FLCE_BUF_INPUT_CAST, tensors->input, problem->dtypes.input, plan->dtype,
                     problem->shape.tokens, h, plan->hidden, &e->input));
  FLCE_TRY(convert(e, FLCE_BUF_WEIGHT_CAST, tensors->linear_weight, problem->dtypes.weight,
                   plan->dtype, v, h, plan->hidden, &e->linear_weight));
  if (!reads_bias) return FLCE_OK;
  return convert(e, FLCE_BUF_BIAS_CAST, tensors->linear_bias, problem->dtypes.bias, e->stat, 1, v,
                 v, &e->bias);
}

flce_status flce_index_rows(const execution* e) {
  if (!e->plan->gathers) return FLCE_OK;
  void* index = buffer_ptr(e, FLCE_BUF_INDEX);
  /* The float poison of the workspace would read as -1, which means an absent row. */
  if (flce_poisons()) CALL(e, fill, index, FLCE_POISON_INT, e->plan->buffers[FLCE_BUF_INDEX].bytes);
  CALL(e, compact_rows, e->problem, e->tensors->target, index);
  return FLCE_OK;
}

/* ---- logits ---- */

flce_status flce_copy_input(const execution* e, const chunk* c) {
  if (!c->copied_x) return FLCE_OK;
  CALL(e, scale_rows,
       &(flce_scale_rows_args){.out = c->copied_x,
                               .out_pitch = e->plan->input_pitch,
                               .x = input_of(e, c),
                               .dtype = e->plan->dtype,
                               .index = c->index,
                               .rows = c->rows,
                               .hidden = e->plan->hidden});
  return FLCE_OK;
}

flce_gemm flce_logits_gemm(const execution* e, const chunk* c) {
  int64_t h = e->plan->hidden;
  return (flce_gemm){.m = c->rows,
                     .n = c->classes,
                     .k = h,
                     .transpose_b = true,
                     .a = c->copied_x ? c->copied_x : input_of(e, c),
                     .b = weight_of(e, c),
                     .c = c->z.data,
                     .pitch_a = e->plan->input_pitch,
                     .pitch_b = h,
                     .pitch_c = c->z.pitch,
                     .dtype = e->plan->dtype,
                     .c_dtype = c->z.dtype};
}

flce_status flce_run_logits_gemm(const execution* e, const chunk* c) {
  flce_gemm gemm = flce_logits_gemm(e, c);
  if (e->plan->gemm_adds_bias) gemm.bias = optional_ptr(e->bias, c->first_class, e->stat);
  return flce_run_gemm(e, gemm);
}

/* ---- gradients ---- */

static bool is_last(const execution* e, const chunk* c) {
  return c->first + c->rows == e->problem->shape.rows;
}

flce_status flce_finish_chunk_dx(const execution* e, const chunk* c) {
  FLCE_TRY(flce_finish_dx(e, c));
  return is_last(e, c) ? flce_begin_all_to_all_dx(e) : FLCE_OK;
}

/* dW and db of the last chunk in two parts (plan->dw_first_classes): the first one hides the
 * all-to-all of the ranks' terms of dX, the second the all-gather of their sums. */
static flce_status add_dw_db_in_parts(const execution* e, const chunk* c) {
  int64_t classes = e->plan->dw_first_classes;
  const chunk first_part = flce_classes_of(c, 0, classes);
  const chunk second_part = flce_classes_of(c, classes, c->classes - classes);
  FLCE_TRY(flce_add_dw_db(e, &first_part));
  FLCE_TRY(flce_sum_dx(e));
  return flce_add_dw_db(e, &second_part);
}

flce_status flce_finish_dx_add_dw_db(const execution* e, const chunk* c) {
  FLCE_TRY(flce_finish_chunk_dx(e, c));
  FLCE_TRY(flce_scale_input(e, c));
  bool splits = is_last(e, c) && e->plan->dw_first_classes > 0;
  return splits ? add_dw_db_in_parts(e, c) : flce_add_dw_db(e, c);
}

flce_status flce_finish_gradients(const execution* e) {
  if (e->problem->shape.rows == 0) FLCE_TRY(flce_begin_all_to_all_dx(e));
  bool is_summed = e->plan->dw_first_classes > 0; /* by add_dw_db_in_parts */
  if (!is_summed) FLCE_TRY(flce_sum_dx(e));
  FLCE_TRY(flce_finish_dw_db(e));
  return flce_wait_all_gather_dx(e);
}
