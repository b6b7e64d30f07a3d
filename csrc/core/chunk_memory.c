/* Where the matrices of a chunk are: buffers of the workspace, what is saved, the caller's logits.
 * No work is done here. */
#include "core/chunk_memory.h"

#include "core/dw_memory.h"
#include "core/plan_rules.h"

static chunk chunk_of(const execution* e, int64_t first, int64_t most_rows) {
  int64_t left = e->problem->shape.rows - first;
  return (chunk){
      .first = first,
      .adds_dw = first > 0,
      .rows = left < most_rows ? left : most_rows,
      .classes = e->problem->shape.vocab,
      .scaled_x = buffer_ptr(e, FLCE_BUF_SCALED_X),
      .dx_rows = buffer_ptr(e, FLCE_BUF_DX_ROWS),
      .fused_scratch = buffer_ptr(e, FLCE_BUF_FUSED),
      .index = e->index ? e->index + first : NULL,
      .coef = (void*)optional_ptr(buffer_ptr(e, FLCE_BUF_COEF), e->index ? 0 : first, e->stat)};
}

chunk flce_all_rows(const execution* e) {
  return chunk_of(e, 0, e->problem->shape.rows);
}

/* The buffer for a chunk's rows of x, if they have to be copied for the logits GEMM because they
 * are gathered or need another leading dimension; else NULL. */
static void* input_copy(const execution* e, flce_buffer_id id) {
  return copies_logits_input(e->plan) ? buffer_ptr(e, id) : NULL;
}

static chunk_matrix logits_in(const execution* e, void* data) {
  const flce_plan* plan = e->plan;
  return (chunk_matrix){data, plan->z_dtype, plan->z_pitch, plan->z_pitch};
}

/* E or dz in place of z: each row starts at the address of its row of z. */
static chunk_matrix in_place_of(const execution* e, const chunk_matrix* z) {
  flce_dtype dtype = e->plan->exp_dtype;
  int64_t ratio = flce_size_of(z->dtype) / flce_size_of(dtype);
  return (chunk_matrix){z->data, dtype, z->pitch * ratio, e->plan->out_pitch};
}

static chunk_matrix saved_rows(const execution* e, int64_t first) {
  const flce_plan* plan = e->plan;
  void* data = element_ptr(e->tensors->saved, first * plan->saved_pitch, plan->saved_dtype);
  return (chunk_matrix){data, plan->saved_dtype, plan->saved_pitch, plan->saved_pitch};
}

/* ---- forward ---- */

/* The chunk's rows of logits that the caller gives. */
static chunk_matrix callers_logits(const execution* e, const chunk* c) {
  const flce_plan* plan = e->plan;
  const void* rows = c->copied_x ? c->copied_x : input_of(e, c);
  void* data = element_ptr(rows, e->problem->shape.first_logit, plan->dtype);
  int64_t columns =
      e->problem->shape.vocab; /* the others are not of this rank, and are not written */
  return (chunk_matrix){data, plan->dtype, plan->input_pitch, columns};
}

/* Whether the logits GEMM writes z: fused_logits writes E instead in form exp, and neither where
 * only statistics are wanted. */
static bool writes_logits(const flce_plan* plan) {
  return !plan->fuses_rows || (plan->form == FLCE_FORM_DZ && !only_statistics(plan));
}

chunk flce_chunk_in_place(const execution* e, int64_t first) {
  const flce_plan* plan = e->plan;
  chunk c = chunk_of(e, first, plan->chunk_rows);
  c.copied_x = input_copy(e, plan->gathered_x);
  if (e->problem->has.logits) {
    c.z = callers_logits(e, &c);
    return c;
  }
  if (plan->fuses_rows && only_statistics(plan)) return c;
  /* A student's GEMM packs the logits of both where its teacher's are. */
  const execution* owner = plan->packs ? e->teacher : e;
  const chunk_matrix z = logits_in(e, buffer_ptr(owner, FLCE_BUF_LOGITS));
  if (writes_logits(plan)) c.z = z;
  c.out = in_place_of(e, &z);
  return c;
}

chunk flce_chunk_to_saved(const execution* e, int64_t first) {
  const flce_plan* plan = e->plan;
  chunk c = chunk_of(e, first, plan->chunk_rows);
  c.copied_x = input_copy(e, plan->gathered_x);
  const chunk_matrix saved = saved_rows(e, first);
  if (plan->saves_exp) c.out = saved;
  if (writes_logits(plan))
    c.z = plan->z_in_saved ? saved : logits_in(e, buffer_ptr(e, FLCE_BUF_LOGITS));
  return c;
}

/* ---- backward ---- */

chunk flce_chunk_recomputed(const execution* e, int64_t first) {
  const flce_plan* plan = e->plan;
  chunk c = chunk_of(e, first, plan->backward_chunk_rows);
  c.copied_x = input_copy(e, plan->backward_gathered_x);
  c.z = logits_in(e, buffer_ptr(e, FLCE_BUF_LOGITS));
  c.out = in_place_of(e, &c.z);
  return c;
}

chunk flce_chunk_from_saved(const execution* e, int64_t first) {
  const flce_plan* plan = e->plan;
  chunk c = chunk_of(e, first, plan->backward_chunk_rows);
  const chunk_matrix saved = saved_rows(e, first);
  if (plan->form == FLCE_FORM_EXP) {
    c.out = saved;
    return c;
  }
  void* dz = buffer_ptr(e, FLCE_BUF_LOGITS);
  c.z = saved; /* z, or E if plan->saves_exp: flce_dz_of_saved() tells grad_rows which */
  c.out = plan->dz_in_saved ? in_place_of(e, &saved)
                            : (chunk_matrix){dz, plan->dtype, plan->out_pitch, plan->out_pitch};
  return c;
}

/* ---- blocks, in a backward or in a forward with save=grads ---- */

/* FLCE_BLOCKS_IN_DW: the sum of dX over blocks from row `first` on, or NULL if dX is not wanted. */
static void* sum_of_dx(const execution* e, int64_t first) {
  const flce_plan* plan = e->plan;
  if (!e->problem->wants.grad_input) return NULL;
  int64_t row = plan->hidden * flce_size_of(plan->dx_gemm_dtype);
  bool in_dx = flce_use_of_dx(e->problem, plan, plan->gathers) == FLCE_DX_HAS_SUM;
  char* sum = in_dx ? e->tensors->grad_input
                    : (char*)e->tensors->grad_weight + flce_sum_offset(e->problem, plan);
  return sum + first * row;
}

chunk flce_rows_of_blocks(const execution* e, int64_t first) {
  const flce_plan* plan = e->plan;
  chunk c = chunk_of(e, first, plan->block_rows);
  c.copied_x = input_copy(e, FLCE_BUF_GATHERED_X);
  if (plan->blocks == FLCE_BLOCKS_IN_DW) c.dx_rows = sum_of_dx(e, first);
  return c;
}

/* The classes of `rows` from first_class on, at most as many as a row of `memory` has elements. */
static chunk block_in(const execution* e, const chunk* rows, int64_t first_class, void* memory,
                      int64_t pitch) {
  const flce_plan* plan = e->plan;
  chunk c = *rows;
  c.first_class = first_class;
  c.classes = min64(rows->classes - first_class, pitch);
  if (plan->fuses_blocks) {
    c.out = (chunk_matrix){memory, plan->exp_dtype, pitch, pitch};
    return c;
  }
  c.z = (chunk_matrix){memory, plan->z_dtype, pitch, pitch};
  c.out = in_place_of(e, &c.z);
  c.out.columns = pitch;
  return c;
}

chunk flce_block_of(const execution* e, const chunk* rows, int64_t first_class) {
  return block_in(e, rows, first_class, buffer_ptr(e, FLCE_BUF_LOGITS), e->plan->block_classes);
}

chunk flce_classes_of(const chunk* c, int64_t first, int64_t classes) {
  chunk part = *c;
  part.first_class = c->first_class + first;
  part.classes = classes;
  part.z.data = NULL;
  part.out.data = element_ptr(c->out.data, first, c->out.dtype);
  part.out.columns = classes;
  return part;
}

/* ---- in the memory of dW ---- */

/* Takes `bytes` of dW's memory, or NULL for 0, from *next on. */
static void* take(const execution* e, int64_t* next, int64_t bytes) {
  if (bytes == 0) return NULL;
  int64_t offset = round_up(*next, FLCE_DW_ALIGNMENT);
  *next = offset + bytes;
  return (char*)e->tensors->grad_weight + offset;
}

static int64_t bytes_of_copied_x(const flce_plan* plan) {
  return copies_logits_input(plan) ? plan->input_pitch * flce_size_of(plan->dtype) : 0;
}

chunk flce_chunk_in_dw(const execution* e, int64_t first) {
  const flce_plan* plan = e->plan;
  chunk c = chunk_of(e, first, plan->chunk_rows);
  int64_t rows = plan->chunk_rows, next = 0, dx_row = 0;
  if (has_dx_rows(e->problem, plan)) dx_row = plan->hidden * flce_size_of(plan->dx_gemm_dtype);
  const chunk_matrix z =
      logits_in(e, take(e, &next, rows * plan->z_pitch * flce_size_of(plan->z_dtype)));
  c.dx_rows = take(e, &next, rows * dx_row);
  c.copied_x = take(e, &next, rows * bytes_of_copied_x(plan));
  c.scaled_x = NULL;                   /* these chunks make no dW */
  c.fused_scratch = take(e, &next, 1); /* its address alone: nothing follows it */
  if (writes_logits(plan)) c.z = z;
  c.out = in_place_of(e, &z);
  return c;
}

chunk flce_all_rows_in_dw(const execution* e) {
  const flce_plan* plan = e->plan;
  const flce_problem* problem = e->problem;
  chunk c = flce_all_rows(e);
  /* Half of the padding aligns these matrices, the other half a block's logits. */
  int64_t next =
      c.classes * flce_dw_class_bytes(plan) - c.rows * plan->whole_row_bytes - FLCE_DW_PADDING / 2;
  int64_t scaled = copies_weight_input(problem, plan) ? plan->hidden : 0;
  bool sums = plan->blocks == FLCE_BLOCKS_IN_DW;
  flce_dx_use use = sums ? flce_use_of_dx(problem, plan, plan->gathers) : FLCE_DX_UNUSED;
  c.scaled_x = use == FLCE_DX_HAS_SCALED_X
                   ? e->tensors->grad_input
                   : take(e, &next, c.rows * scaled * flce_size_of(plan->dtype));
  c.copied_x = take(e, &next, c.rows * bytes_of_copied_x(plan));
  c.fused_scratch = take(e, &next, 1);
  if (sums) c.dx_rows = sum_of_dx(e, 0);
  return c;
}

chunk flce_block_in_dw(const execution* e, const chunk* rows, int64_t first_class) {
  dw_memory memory = flce_memory_of_dw(e->problem, e->plan);
  int64_t classes = flce_whole_block_classes(&memory, first_class);
  int64_t next = (first_class + classes) * memory.row;
  void* logits = take(e, &next, classes * memory.logits_class);
  return block_in(e, rows, first_class, logits, classes);
}
