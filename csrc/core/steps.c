/* Implements steps.h by calls of a backend's functions. */
#include "core/steps.h"

#include "core/gradients.h"
#include "core/plan_rules.h"
#include "core/shards.h"
#include "environment.h"

/* The factor of E where it is stored in float16. c is then the row's largest l, so the largest
 * entry is 2^15, and entries down to 2^-29 of it keep their full precision. */
static const double kF16ExpScale = 32768.0;

static double exp_scale(const flce_plan* plan) {
  return plan->saves_exp && plan->dtype == FLCE_F16 ? kF16ExpScale : 1.0;
}

/* ---- operands ---- */

/* *out = `source` [rows][cols] as [rows][pitch] of `dtype`, zero-padded: `source` itself if it is
 * that, else a copy in buffer `id`. */
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
  int64_t h = problem->hidden, v = problem->vocab;
  if (reads_input)
    FLCE_TRY(convert(e, FLCE_BUF_INPUT_CAST, tensors->input, problem->input_dtype, plan->dtype,
                     problem->tokens, h, plan->hidden, &e->input));
  FLCE_TRY(convert(e, FLCE_BUF_WEIGHT_CAST, tensors->linear_weight, problem->weight_dtype,
                   plan->dtype, v, h, plan->hidden, &e->linear_weight));
  if (!reads_bias) return FLCE_OK;
  return convert(e, FLCE_BUF_BIAS_CAST, tensors->linear_bias, problem->bias_dtype, e->stat, 1, v, v,
                 &e->bias);
}

flce_status flce_gather_rows(const execution* e) {
  if (!e->plan->gathers) return FLCE_OK;
  void* index = buffer_ptr(e, FLCE_BUF_INDEX);
  /* The float poison of the workspace would read as -1, which means an absent row. */
  if (flce_poisons()) CALL(e, fill, index, FLCE_POISON_INT, e->plan->buffers[FLCE_BUF_INDEX].bytes);
  CALL(e, compact_rows, e->problem, e->tensors->target, index);
  return FLCE_OK;
}

/* ---- chunks ---- */

static chunk chunk_of(const execution* e, int64_t first, int64_t most_rows) {
  int64_t left = e->problem->rows - first;
  return (chunk){
      .first = first,
      .rows = left < most_rows ? left : most_rows,
      .index = e->index ? e->index + first : NULL,
      .coef = (void*)optional_ptr(buffer_ptr(e, FLCE_BUF_COEF), e->index ? 0 : first, e->stat)};
}

chunk flce_all_rows(const execution* e) {
  return chunk_of(e, 0, e->problem->rows);
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

/* The chunk's rows of logits that the caller gives. */
static chunk_matrix given_logits(const execution* e, const chunk* c) {
  const flce_plan* plan = e->plan;
  const void* rows = c->copied_x ? c->copied_x : input_of(e, c);
  void* data = element_ptr(rows, e->problem->first_logit, plan->dtype);
  int64_t columns = e->problem->vocab; /* the others are not of this rank, and are not written */
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
  if (e->problem->gives_logits) {
    c.z = given_logits(e, &c);
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
  c.z = saved;
  c.out = plan->dz_in_saved ? in_place_of(e, &saved)
                            : (chunk_matrix){dz, plan->dtype, plan->out_pitch, plan->out_pitch};
  return c;
}

/* ---- logits and statistics ---- */

flce_status flce_begin_loss(const execution* e, bool overlaps) {
  FLCE_TRY(flce_prepare(e, buffer_ptr(e, FLCE_BUF_ORDER), overlaps));
  if (e->plan->gathers) {
    flce_rows all = open_rows(e, 0, e->problem->tokens);
    CALL(e, blank_rows, &all, e->problem->rows, NULL, e->plan->dtype, 0);
  }
  if (e->plan->finds_classes) /* -1, in the rows of no chunk */
    CALL(e, fill, e->tensors->classes, 0xff, e->plan->buffers[FLCE_BUF_CLASSES].bytes);
  return FLCE_OK;
}

static bool fuses(const execution* e) {
  return e->plan->fuses_rows && e->problem->vocab > 0;
}

static flce_status copy_input(const execution* e, const chunk* c) {
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

/* z = x W^T of the chunk, without a bias. */
static flce_gemm logits_gemm(const execution* e, const chunk* c) {
  int64_t h = e->plan->hidden;
  return (flce_gemm){.m = c->rows,
                     .n = e->problem->vocab,
                     .k = h,
                     .transpose_b = true,
                     .a = c->copied_x ? c->copied_x : input_of(e, c),
                     .b = e->linear_weight,
                     .c = c->z.data,
                     .pitch_a = e->plan->input_pitch,
                     .pitch_b = h,
                     .pitch_c = c->z.pitch,
                     .dtype = e->plan->dtype,
                     .c_dtype = c->z.dtype};
}

static flce_status run_logits_gemm(const execution* e, const chunk* c) {
  flce_gemm gemm = logits_gemm(e, c);
  gemm.bias = e->plan->gemm_adds_bias ? e->bias : NULL;
  return flce_run_gemm(e, gemm);
}

flce_fused_call flce_fused_call_of(const execution* e, const chunk* c) {
  flce_fused_call call = {.gemm = logits_gemm(e, c),
                          .rows = flce_local_rows(e, c),
                          .scratch = buffer_ptr(e, FLCE_BUF_FUSED)};
  if (e->plan->form == FLCE_FORM_EXP) set_out(&call.rows, &c->out);
  call.rows.bias = e->bias;
  call.rows.teacher = c->packed_with;
  /* flce_sum_weight has computed this sum for dX. The label-smoothing sums that follow from it are
   * cheaper than those that the GEMM's epilogue would compute. */
  if (e->problem->want_grad_input && !e->bias) call.rows.wsum = buffer_ptr(e, FLCE_BUF_SMOOTH);
  return call;
}

flce_status flce_logits(const execution* e, const chunk* c) {
  if (e->problem->vocab == 0) return FLCE_OK;
  FLCE_TRY(copy_input(e, c));
  if (e->problem->gives_logits) return FLCE_OK;
  if (fuses(e)) {
    flce_fused_call call = flce_fused_call_of(e, c);
    flce_count_gemm();
    CALL(e, fused_logits, &call.gemm, &call.rows, call.scratch);
    return FLCE_OK;
  }
  return run_logits_gemm(e, c);
}

flce_status flce_recompute_logits(const execution* e, const chunk* c) {
  if (e->problem->vocab == 0) return FLCE_OK;
  FLCE_TRY(copy_input(e, c));
  return run_logits_gemm(e, c);
}

flce_status flce_logits_with(const execution* e, const chunk* c, flce_beginning begin) {
  if (c->first > 0) return flce_logits(e, c);
  if (!fuses(e)) {
    FLCE_TRY(begin(e, false));
    return flce_logits(e, c);
  }
  FLCE_TRY(flce_logits(e, c));
  return begin(e, true);
}

/* The factor of the loss's gradient for grad_output = 1. In float16 it includes a power of two (see
 * FLCE_SCALAR_LOSS_SCALE), which scale_grads divides out. */
static const void* loss_factor(const execution* e) {
  bool scales = e->plan->dtype == FLCE_F16;
  return scalar(e, scales ? FLCE_SCALAR_LOSS_SCALE : FLCE_SCALAR_INV_DENOM);
}

/* Whether fused_statistics computes coef, too: they do not follow from statistics of this rank's
 * classes alone. */
static bool fuses_coefficients(const execution* e) {
  return e->plan->fuses_rows && !e->shard;
}

/* What fused_logits has begun. */
static flce_status fused_statistics(const execution* e, const chunk* c) {
  flce_fused_call call = flce_fused_call_of(e, c);
  CALL(e, fused_statistics, &call.gemm, &call.rows, loss_factor(e),
       fuses_coefficients(e) ? c->coef : NULL, call.scratch);
  return FLCE_OK;
}

/* The top-k classes of the rows, from their logits or, `from_exp`, from their E. */
static flce_status find_classes(const execution* e, const chunk* c, bool from_exp) {
  if (!e->plan->finds_classes) return FLCE_OK;
  flce_rows rows = flce_local_rows(e, c);
  if (from_exp) set_out(&rows, &c->out);
  CALL(e, top_classes, &rows, from_exp);
  return FLCE_OK;
}

static flce_status sum_tail(const execution* e, const chunk* c) {
  if (!e->plan->sums_tail) return FLCE_OK;
  flce_rows rows = flce_local_rows(e, c);
  CALL(e, tail_rows, &rows);
  return FLCE_OK;
}

flce_status flce_statistics(const execution* e, const chunk* c) {
  if (e->problem->vocab == 0) return FLCE_OK;
  if (fuses(e)) {
    FLCE_TRY(fused_statistics(e, c));
    FLCE_TRY(find_classes(e, c, e->plan->form == FLCE_FORM_EXP));
    return sum_tail(e, c);
  }
  flce_rows rows = flce_local_rows(e, c);
  FLCE_TRY(find_classes(e, c, false));
  CALL(e, stat_rows, &rows);
  return sum_tail(e, c);
}

flce_status flce_statistics_and_exp(const execution* e, const chunk* c) {
  bool by_row_pass = e->plan->form == FLCE_FORM_EXP && !e->plan->fuses_rows;
  if (!by_row_pass || e->problem->vocab == 0) return flce_statistics(e, c);
  flce_rows rows = flce_local_rows(e, c);
  set_out(&rows, &c->out);
  FLCE_TRY(find_classes(e, c, false)); /* before E overwrites the logits */
  CALL(e, exp_rows, &rows);
  return FLCE_OK;
}

flce_status flce_save_exp(const execution* e, const chunk* c) {
  const flce_plan* plan = e->plan;
  if (plan->form == FLCE_FORM_EXP || !plan->saves_exp || e->problem->vocab == 0) return FLCE_OK;
  flce_rows rows = flce_local_rows(e, c);
  set_out(&rows, &c->out);
  CALL(e, grad_rows, &rows, exp_scale(plan), false, false);
  return FLCE_OK;
}

flce_status flce_exchange_statistics(const execution* e, const chunk* c) {
  FLCE_TRY(flce_begin_all_gather_statistics(e, c));
  return flce_wait_all_gather_statistics(e, c);
}

/* ---- what the gradient GEMMs read ---- */

flce_status flce_loss_coefficients(const execution* e, const chunk* c) {
  if (fuses_coefficients(e)) return FLCE_OK;
  return flce_row_coefficients(e, c, &(flce_upstream){0}, loss_factor(e));
}

flce_status flce_upstream_coefficients(const execution* e, const chunk* c) {
  flce_upstream upstream = upstream_of(e);
  if (!e->index) { /* else the vectors are indexed from token 0 on */
    upstream.loss = optional_ptr(upstream.loss, upstream.loss_stride * c->first, e->stat);
    upstream.lse = optional_ptr(upstream.lse, c->first, e->stat);
    upstream.entropy = optional_ptr(upstream.entropy, c->first, e->stat);
    upstream.tail = optional_ptr(upstream.tail, c->first, e->stat);
  }
  FLCE_TRY(flce_row_coefficients(e, c, &upstream, scalar(e, FLCE_SCALAR_INV_DENOM)));
  float* scale = buffer_ptr(e, FLCE_BUF_DZ_SCALE);
  if (!scale) return FLCE_OK;
  flce_rows rows = rows_of(e, c);
  CALL(e, scale_coefficients, &rows, c->coef, scale, e->problem->want_grad_bias ? c->rows : 0);
  return FLCE_OK;
}

flce_status flce_loss_dz(const execution* e, const chunk* c) {
  if (e->plan->form == FLCE_FORM_EXP || e->problem->vocab == 0) return FLCE_OK;
  flce_rows rows = rows_of(e, c);
  set_out(&rows, &c->out);
  rows.coef = c->coef;
  CALL(e, grad_rows, &rows, 1.0, false, false);
  return FLCE_OK;
}

/* E or dz into c->out, from z or, `from_exp`, from `scale` times E. */
static flce_status write_gradient(const execution* e, const chunk* c, double scale, bool from_exp) {
  flce_rows rows = rows_of(e, c);
  set_out(&rows, &c->out);
  rows.coef = e->plan->form == FLCE_FORM_EXP ? NULL : c->coef;
  rows.wants_entropy = e->tensors->grad_entropy != NULL;
  rows.has_tail_gradient = e->tensors->grad_tail != NULL;
  CALL(e, grad_rows, &rows, scale, true, from_exp);
  if (e->problem->has_grad_classes)
    CALL(e, class_gradients, &rows, buffer_ptr(e, FLCE_BUF_DZ_SCALE));
  return FLCE_OK;
}

flce_status flce_upstream_dz(const execution* e, const chunk* c) {
  return e->problem->vocab == 0 ? FLCE_OK : write_gradient(e, c, 1.0, false);
}

flce_status flce_upstream_dz_of_saved(const execution* e, const chunk* c) {
  const flce_plan* plan = e->plan;
  if (plan->form == FLCE_FORM_EXP || e->problem->vocab == 0) return FLCE_OK;
  return write_gradient(e, c, exp_scale(plan), plan->saves_exp);
}

/* ---- gradients and outputs ---- */

/* The exchange of dX begins as soon as its last chunk is complete. */
flce_status flce_add_gradients(const execution* e, const chunk* c) {
  FLCE_TRY(flce_finish_dx(e, c));
  if (c->first + c->rows == e->problem->rows) FLCE_TRY(flce_begin_all_to_all_dx(e));
  return flce_add_class_gradients(e, c);
}

flce_status flce_order_targets(const execution* e) {
  void* order = buffer_ptr(e, FLCE_BUF_ORDER);
  if (order && e->problem->vocab > 0) CALL(e, order_targets, e->problem, e->tensors->target, order);
  return FLCE_OK;
}

flce_status flce_finish_gradients(const execution* e) {
  if (e->problem->rows == 0) FLCE_TRY(flce_begin_all_to_all_dx(e));
  FLCE_TRY(flce_begin_all_gather_dx(e));
  FLCE_TRY(flce_finish_class_gradients(e));
  return flce_wait_all_gather_dx(e);
}

flce_status flce_class_logits(const execution* e) {
  const flce_plan* plan = e->plan;
  if (e->problem->row_classes == 0) return FLCE_OK;
  if (e->problem->vocab == 0) { /* a rank without a class, to which all targets are out of range */
    CALL(e, fill, e->tensors->class_logits, 0, plan->buffers[FLCE_BUF_CLASS_LOGITS].bytes);
    return FLCE_OK;
  }
  flce_rows all = open_rows(e, 0, e->problem->tokens);
  /* Where the logits are rounded, so are these: by the GEMM, so before the bias is added
   * (gemm_adds_bias is for float32 logits). */
  bool rounds = !plan->fuses_rows && plan->z_dtype == plan->dtype;
  CALL(e, class_logits,
       &(flce_class_logits_args){.out = e->tensors->class_logits,
                                 .rows = &all,
                                 .x = e->input,
                                 .w = e->linear_weight,
                                 .bias = e->bias,
                                 .dtype = plan->dtype,
                                 .rounded = rounds ? plan->dtype : e->stat,
                                 .hidden = plan->hidden});
  return FLCE_OK;
}

flce_status flce_reduce_losses(const execution* e, bool overlaps) {
  if (e->problem->reduction == FLCE_NONE) return FLCE_OK;
  CALL(e, reduce, e->tensors->loss, e->losses, e->problem->tokens, scalar(e, FLCE_SCALAR_INV_DENOM),
       e->stat, overlaps);
  return FLCE_OK;
}
