/* The steps of a forward, in the order of a call. flce_prepare, flce_local_rows and
 * flce_row_coefficients are in shards.h; without ranks they call the backend's function. */
#include "core/forward_steps.h"

#include "core/plan_rules.h"
#include "core/shards.h"
#include "core/steps.h"

/* ---- logits ---- */

flce_status flce_scalars_and_skipped_rows(const execution* e, bool may_overlap) {
  FLCE_TRY(flce_prepare(e, buffer_ptr(e, FLCE_BUF_ORDER), may_overlap));
  if (e->plan->gathers) {
    flce_rows all = open_rows(e, 0, e->problem->shape.tokens);
    CALL(e, blank_rows, &all, e->problem->shape.rows, NULL, e->plan->dtype, 0);
  }
  if (e->plan->finds_classes) /* -1, in the rows of no chunk */
    CALL(e, fill, e->tensors->classes, 0xff, e->plan->buffers[FLCE_BUF_CLASSES].bytes);
  return FLCE_OK;
}

static bool fuses(const execution* e) {
  return e->plan->fuses_rows && e->problem->shape.vocab > 0;
}

flce_fused_call flce_fused_call_of(const execution* e, const chunk* c) {
  flce_fused_call call = {
      .gemm = flce_logits_gemm(e, c), .rows = flce_local_rows(e, c), .scratch = c->fused_scratch};
  if (e->plan->form == FLCE_FORM_EXP) set_out(&call.rows, &c->out);
  call.rows.bias = e->bias;
  call.rows.teacher = c->packed_with;
  call.rows.finds_classes = e->plan->finds_classes;
  /* Where the forward makes dX, flce_sum_w_for_smoothing has computed this sum (else the buffer is
   * NULL). The label-smoothing sums that follow from it are cheaper than those that the GEMM's
   * epilogue would compute. */
  if (e->problem->wants.grad_input && !e->bias) call.rows.wsum = buffer_ptr(e, FLCE_BUF_SMOOTH);
  return call;
}

flce_status flce_logits(const execution* e, const chunk* c) {
  if (e->problem->shape.vocab == 0) return FLCE_OK;
  FLCE_TRY(flce_copy_input(e, c));
  if (e->problem->has.logits) return FLCE_OK;
  if (fuses(e)) {
    flce_fused_call call = flce_fused_call_of(e, c);
    flce_count_gemm();
    CALL(e, fused_logits, &call.gemm, &call.rows, call.scratch);
    return FLCE_OK;
  }
  return flce_run_logits_gemm(e, c);
}

flce_status flce_logits_and_begin(const execution* e, const chunk* c, flce_beginning begin) {
  if (c->first > 0) return flce_logits(e, c);
  if (!fuses(e)) {
    FLCE_TRY(begin(e, false));
    return flce_logits(e, c);
  }
  FLCE_TRY(flce_logits(e, c));
  return begin(e, true);
}

/* ---- statistics ---- */

/* The factor of the loss's gradient for grad_output = 1. In float16 it includes a power of two (see
 * FLCE_SCALAR_LOSS_SCALE), which scale_grads divides out. */
static const void* loss_factor(const execution* e) {
  bool scales = e->plan->dtype == FLCE_F16;
  return scalar(e, scales ? FLCE_SCALAR_LOSS_SCALE : FLCE_SCALAR_INV_DENOM);
}

/* Whether fused_statistics computes coef, too, where the forward makes gradients (else c->coef is
 * NULL). Not with ranks: coef needs the statistics of all classes. */
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

/* The top-k classes of the rows, from their logits. */
static flce_status find_classes(const execution* e, const chunk* c) {
  if (!e->plan->finds_classes) return FLCE_OK;
  flce_rows rows = flce_local_rows(e, c);
  CALL(e, top_classes, &rows, NULL);
  return FLCE_OK;
}

/* The same after fused_statistics, from E where the GEMM has written that. */
static flce_status find_classes_fused(const execution* e, const chunk* c) {
  if (!e->plan->finds_classes || e->plan->form != FLCE_FORM_EXP) return find_classes(e, c);
  flce_fused_call call = flce_fused_call_of(e, c);
  CALL(e, top_classes, &call.rows, call.scratch);
  return FLCE_OK;
}

static flce_status sum_tail(const execution* e, const chunk* c) {
  if (!e->plan->sums_tail) return FLCE_OK;
  flce_rows rows = flce_local_rows(e, c);
  CALL(e, tail_rows, &rows);
  return FLCE_OK;
}

flce_status flce_statistics(const execution* e, const chunk* c) {
  if (e->problem->shape.vocab == 0) return FLCE_OK;
  if (fuses(e)) {
    FLCE_TRY(fused_statistics(e, c));
    FLCE_TRY(find_classes_fused(e, c));
    return sum_tail(e, c);
  }
  flce_rows rows = flce_local_rows(e, c);
  FLCE_TRY(find_classes(e, c));
  CALL(e, stat_rows, &rows);
  return sum_tail(e, c);
}

flce_status flce_statistics_and_exp(const execution* e, const chunk* c) {
  bool by_row_pass = e->plan->form == FLCE_FORM_EXP && !e->plan->fuses_rows;
  if (!by_row_pass || e->problem->shape.vocab == 0) return flce_statistics(e, c);
  flce_rows rows = flce_local_rows(e, c);
  set_out(&rows, &c->out);
  FLCE_TRY(find_classes(e, c)); /* before E overwrites the logits */
  CALL(e, exp_rows, &rows);
  return FLCE_OK;
}

flce_status flce_save_exp(const execution* e, const chunk* c) {
  const flce_plan* plan = e->plan;
  if (plan->form == FLCE_FORM_EXP || !plan->saves_exp || e->problem->shape.vocab == 0)
    return FLCE_OK;
  flce_rows rows = flce_local_rows(e, c);
  set_out(&rows, &c->out);
  /* Without rows.coef grad_rows writes E. */
  CALL(e, grad_rows, &(flce_grad_rows_args){.rows = &rows, .scale = saved_exp_scale(plan)});
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

flce_status flce_loss_dz(const execution* e, const chunk* c) {
  if (e->plan->form == FLCE_FORM_EXP || e->problem->shape.vocab == 0) return FLCE_OK;
  flce_rows rows = rows_of(e, c);
  set_out(&rows, &c->out);
  rows.coef = c->coef;
  CALL(e, grad_rows, &(flce_grad_rows_args){.rows = &rows, .scale = 1.0});
  return FLCE_OK;
}

/* ---- outputs ---- */

flce_status flce_class_logits(const execution* e) {
  const flce_plan* plan = e->plan;
  if (e->problem->wants.row_classes == 0) return FLCE_OK;
  if (e->problem->shape.vocab == 0) {
    /* A rank without a class, to which all targets are out of range. */
    CALL(e, fill, e->tensors->class_logits, 0, plan->buffers[FLCE_BUF_CLASS_LOGITS].bytes);
    return FLCE_OK;
  }
  flce_rows all = open_rows(e, 0, e->problem->shape.tokens);
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

flce_status flce_reduce_losses(const execution* e, bool may_overlap) {
  if (e->problem->reduction == FLCE_NONE) return FLCE_OK;
  CALL(e, reduce, e->tensors->loss, e->losses, e->problem->shape.tokens,
       scalar(e, FLCE_SCALAR_INV_DENOM), e->stat, may_overlap);
  return FLCE_OK;
}
