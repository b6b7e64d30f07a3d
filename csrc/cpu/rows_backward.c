/* Backend function `grad_rows`: the gradient with respect to a row's logits, from the logits or
 * from rows of exp(l - c). */
#include "cpu/row_pass.h"

#include "loss.h"

#include <math.h>

static void plain_gradient(const row_pass* pass, int64_t r, int64_t i, int64_t y) {
  const flce_rows* rows = pass->rows;
  double factor = pass->scale, smooth = 0.0;
  if (rows->coef) {
    factor = row_coef(pass, FLCE_COEF_ROW, i) / (pass->z_is_exp ? pass->scale : 1.0);
    smooth = row_coef(pass, FLCE_COEF_SMOOTH, i);
  } else if (pass->z_is_exp) {
    factor = 1.0;
  }
  const void* weight = smooth != 0.0 ? rows->class_weight : NULL;
  const void* z = row_z(pass, r);
  void* out = row_out(pass, r);
  if (pass->z_is_exp)
    pass->kernels->grad_linear(out, z, factor, weight, smooth, rows->vocab);
  else
    pass->kernels->grad_exp(out, z, rows->bias, row_stat(pass, FLCE_STAT_OFFSET, i), factor, weight,
                            smooth, rows->vocab);
  if (rows->coef)
    flce_store(out, pass->dtype, y,
               row_coef(pass, FLCE_COEF_TARGET, i) -
                   smooth * row_factor(rows->class_weight, pass->stat, y));
  else if (pass->hide_target)
    flce_store(out, pass->dtype, y, 0.0);
}

static bool has_entropy(const row_pass* pass, int64_t i) {
  return pass->rows->coef && row_coef(pass, FLCE_COEF_ENTROPY, i) != 0.0;
}

static void grad_row(const row_pass* pass, int64_t r) {
  const flce_rows* rows = pass->rows;
  int64_t i = flce_row_index(rows, r);
  flce_row_kind kind = flce_row_kind_at(rows, i);
  if (kind != FLCE_ROW_VALID) {
    flce_cpu_fill_row(pass, r, kind == FLCE_ROW_OUT_OF_RANGE ? NAN : 0.0);
    return;
  }
  int64_t y = rows->target ? rows->target[i] : -1;
  if (!pass->z_is_exp && (pass->general || has_entropy(pass, i)))
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

/* Refuses the options whose gradient cannot be computed from exp(l - c) alone. */
static flce_status check_exp(const row_pass* pass) {
  const flce_rows* rows = pass->rows;
  if (flce_caps_logits(&rows->options) || rows->probabilities)
    return flce_fail(FLCE_UNSUPPORTED, "grad_rows of exp: expected class targets and no softcap");
  for (int64_t r = 0; r < rows->rows; r++) {
    int64_t i = flce_row_index(rows, r);
    if (flce_row_kind_at(rows, i) == FLCE_ROW_VALID && has_entropy(pass, i))
      return flce_fail(FLCE_UNSUPPORTED, "grad_rows of exp: expected no gradient of the entropy");
  }
  return FLCE_OK;
}

flce_status flce_cpu_grad_rows(void* self, const flce_rows* rows, double scale, bool hide_target,
                               bool z_is_exp) {
  row_pass pass;
  FLCE_TRY(flce_cpu_make_row_pass(rows, true, &pass));
  pass.scale = scale;
  pass.hide_target = hide_target;
  pass.z_is_exp = z_is_exp;
  if (z_is_exp) FLCE_TRY(check_exp(&pass));
  flce_cpu_parallel(self, rows->rows, rows->vocab, grad_range, &pass);
  return FLCE_OK;
}
