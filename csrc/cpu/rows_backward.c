/* Backend function `grad_rows`: the gradient with respect to a row's logits, from the logits or
 * from rows of exp(l - c). */
#include "cpu/row_terms.h"

#include <float.h>
#include <math.h>

static void plain_gradient(const row_pass* pass, int64_t r, int64_t i, int64_t y) {
  const flce_rows* rows = pass->rows;
  flce_logit_map map = {.curve = FLCE_LINE};
  row_terms terms = flce_cpu_row_terms(pass, &map, i);
  flce_cpu_refer_to_tail(pass, i, &terms);
  const void* weight = terms.smooth != 0.0 ? rows->class_weight : NULL;
  const void* z = row_z(pass, r);
  void* out = row_out(pass, r);
  if (pass->z_is_exp)
    pass->kernels->grad_linear(out, z, terms.row / pass->scale, weight, terms.smooth, rows->vocab);
  else
    pass->kernels->grad_exp(out, z, rows->bias, terms.offset, terms.row, weight, terms.smooth,
                            rows->vocab);
  if (y < 0) return;
  if (rows->coef)
    flce_store(out, pass->dtype, y,
               row_coef(pass, FLCE_COEF_TARGET, i) + terms.tail_of_target -
                   terms.smooth * row_factor(rows->class_weight, pass->stat, y));
  else if (pass->hide_target)
    flce_store(out, pass->dtype, y, 0.0);
}

static bool has_entropy(const row_pass* pass, int64_t i) {
  return pass->rows->coef && row_coef(pass, FLCE_COEF_ENTROPY, i) != 0.0;
}

/* dz from rows of exp(l - c), of which l - c is the logarithm, with the entropy's gradient. */
static void entropy_gradient(const row_pass* pass, int64_t r, int64_t i, int64_t y) {
  const flce_rows* rows = pass->rows;
  double row = row_coef(pass, FLCE_COEF_EXP, i), pull = row_coef(pass, FLCE_COEF_ENTROPY, i);
  double smooth = row_coef(pass, FLCE_COEF_SMOOTH, i),
         entropy = row_stat(pass, FLCE_STAT_ENTROPY, i);
  double inv_sum = row_stat(pass, FLCE_STAT_INV_SUM, i), nll = row_stat(pass, FLCE_STAT_NLL, i);
  double smallest = pass->stat == FLCE_F64 ? DBL_MIN : (double)FLT_MIN;
  double mean = -log(inv_sum) - entropy; /* the mean of l - c */
  /* exp(l_y - c) = exp(-nll) / inv_sum, and m - l_y = nll - entropy. nll may be infinite. */
  double e_y = exp(-nll) / inv_sum, own = e_y == 0.0 ? 0.0 : pull * e_y * (nll - entropy);
  const void* z = row_z(pass, r);
  void* out = row_out(pass, r);
  for (int64_t j = 0; j < rows->vocab; j++) {
    double e = flce_load(z, pass->dtype, j) / pass->scale;
    double value = e == 0.0 ? 0.0 : e * (row + pull * (mean - log(e)));
    if (j == y) value = row_coef(pass, FLCE_COEF_TARGET, i) + own;
    if (smooth != 0.0) value -= smooth * row_factor(rows->class_weight, pass->stat, j);
    flce_store(out, pass->dtype, j, fabs(value) < smallest ? 0.0 : value);
  }
}

static void grad_row(const row_pass* pass, int64_t r) {
  const flce_rows* rows = pass->rows;
  int64_t i = flce_row_index(rows, r);
  flce_row_kind kind = flce_row_kind_at(rows, i);
  if (kind != FLCE_ROW_VALID) {
    flce_cpu_fill_row(pass, r, kind == FLCE_ROW_OUT_OF_RANGE ? NAN : 0.0);
    return;
  }
  int64_t y = flce_target_column(rows, i);
  if (pass->z_is_exp && has_entropy(pass, i))
    entropy_gradient(pass, r, i, y);
  else if (!pass->z_is_exp && (pass->general || has_entropy(pass, i)))
    flce_cpu_general_gradient(pass, r, i, y);
  else
    plain_gradient(pass, r, i, y);
}

static void grad_range(int64_t begin, int64_t end, void* context) {
  const row_pass* pass = context;
  for (int64_t r = begin; r < end; r++) {
    grad_row(pass, r);
    flce_cpu_pad_row(pass, row_out(pass, r), pass->rows->out_columns);
  }
}

flce_status flce_cpu_grad_rows(void* self, const flce_grad_rows_args* call) {
  const flce_rows* rows = call->rows;
  row_pass pass;
  FLCE_TRY(flce_cpu_make_row_pass(rows, true, &pass));
  pass.scale = call->scale;
  pass.hide_target = call->hide_target;
  pass.z_is_exp = call->z_is_exp;
  if (call->z_is_exp &&
      (flce_caps_logits(&rows->options) || rows->probabilities || rows->has_tail_gradient))
    return flce_fail(FLCE_UNSUPPORTED,
                     "grad_rows of exp: expected class targets, no softcap and no tail");
  flce_cpu_parallel(self, rows->rows, rows->vocab, grad_range, &pass);
  return FLCE_OK;
}
