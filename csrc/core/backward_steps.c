/* The steps of a backward, in the order of a call; and that of a block of classes.
 * flce_row_coefficients is in shards.h; without ranks it calls the backend's function. */
#include "core/backward_steps.h"

#include "core/plan_rules.h"
#include "core/shards.h"
#include "core/steps.h"

flce_status flce_upstream_coefficients(const execution* e, const chunk* c) {
  flce_upstream upstream = upstream_of(e);
  if (!e->index) { /* else the vectors are indexed from token 0 on */
    upstream.loss = optional_ptr(upstream.loss, upstream.loss_stride * c->first, e->stat);
    upstream.lse = optional_ptr(upstream.lse, c->first, e->stat);
    upstream.entropy = optional_ptr(upstream.entropy, c->first, e->stat);
    upstream.tail = optional_ptr(upstream.tail, c->first, e->stat);
  }
  FLCE_TRY(flce_row_coefficients(e, c, &upstream, scalar(e, FLCE_SCALAR_INV_DENOM)));
  /* In form dz and float16: coef is scaled up, and 1/u is db's weight of each row. */
  float* scale = buffer_ptr(e, FLCE_BUF_DZ_SCALE);
  if (!scale) return FLCE_OK;
  flce_rows rows = rows_of(e, c);
  CALL(e, scale_coefficients, &rows, c->coef, scale, e->problem->wants.grad_bias ? c->rows : 0);
  return FLCE_OK;
}

flce_status flce_recompute_logits(const execution* e, const chunk* c) {
  if (e->problem->shape.vocab == 0) return FLCE_OK;
  FLCE_TRY(flce_copy_input(e, c));
  return flce_run_logits_gemm(e, c);
}

/* Writes c->out. Form exp: E alone. A row's factor with all its upstream gradients is in coef, by
 * which x and the result of dX's GEMM are multiplied (enum flce_form), so what is stored does not
 * depend on them. Form dz: dz itself, by coef. `call` says what c->z holds. */
static flce_status write_exp_or_dz(const execution* e, const chunk* c, flce_grad_rows_args call) {
  flce_rows rows = rows_of(e, c);
  set_out(&rows, &c->out);
  rows.coef = e->plan->form == FLCE_FORM_EXP ? NULL : c->coef;
  rows.wants_entropy = e->tensors->grad_entropy != NULL;
  rows.has_tail_gradient = e->tensors->grad_tail != NULL;
  call.rows = &rows;
  call.hide_target = true; /* E is 0 there: FLCE_COEF_TARGET has that term */
  CALL(e, grad_rows, &call);
  if (e->problem->backward.has_grad_classes)
    CALL(e, class_gradients, &rows, buffer_ptr(e, FLCE_BUF_DZ_SCALE));
  return FLCE_OK;
}

flce_status flce_exp_or_dz(const execution* e, const chunk* c) {
  if (e->problem->shape.vocab == 0) return FLCE_OK;
  return write_exp_or_dz(e, c, (flce_grad_rows_args){.scale = 1.0});
}

flce_status flce_dz_of_saved(const execution* e, const chunk* c) {
  const flce_plan* plan = e->plan;
  if (plan->form == FLCE_FORM_EXP || e->problem->shape.vocab == 0) return FLCE_OK;
  return write_exp_or_dz(
      e, c, (flce_grad_rows_args){.scale = saved_exp_scale(plan), .z_is_exp = plan->saves_exp});
}

flce_status flce_order_targets(const execution* e) {
  void* order = buffer_ptr(e, FLCE_BUF_ORDER);
  if (order && e->problem->shape.vocab > 0)
    CALL(e, order_targets, e->problem, e->tensors->target, order);
  return FLCE_OK;
}

/* ---- blocks, in a backward or in a forward with save=grads ---- */

/* E of a block of classes, by the logits GEMM's epilogue. */
static flce_status fused_exp(const execution* e, const chunk* c) {
  const flce_gemm gemm = flce_logits_gemm(e, c);
  flce_rows rows = rows_of(e, c);
  set_out(&rows, &c->out);
  rows.bias = optional_ptr(e->bias, c->first_class, e->stat);
  /* E is all that is made. */
  rows.options.label_smoothing = 0.0;
  rows.wants_entropy = false;
  rows.predictions = NULL;
  flce_count_gemm();
  CALL(e, fused_exp, &gemm, &rows, c->fused_scratch);
  return FLCE_OK;
}

flce_status flce_exp_or_dz_of_block(const execution* e, const chunk* c) {
  if (e->plan->fuses_blocks) return fused_exp(e, c);
  FLCE_TRY(flce_run_logits_gemm(e, c));
  return flce_exp_or_dz(e, c);
}
