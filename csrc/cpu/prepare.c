/* Backend function `prepare`: computes the scalars of a call (enum flce_scalar) from its targets,
 * class weights and row factors, and checks the targets. */
#include "cpu/convert.h"
#include "cpu/cpu.h"
#include "divergence.h"

#include <math.h>

/* The power of two u for which u * largest lies in (2^(high - 1), 2^high], limited to 2^127
 * (float32). 1 if `largest` is 0, infinite or NaN. */
static double scale_for(double largest, int high) {
  if (!(largest > 0.0) || isinf(largest)) return 1.0;
  int exponent;
  double fraction = frexp(largest, &exponent);
  int power = (fraction == 0.5 ? high + 1 : high) - exponent;
  return ldexp(1.0, power > 127 ? 127 : power);
}

/* Sums and maxima over the valid rows and over the vocabulary. */
typedef struct totals {
  int64_t valid;        /* rows that are not ignored */
  double target_weight; /* sum of the class weights of the valid rows' targets */
  double class_weight, largest_class_weight; /* sum over the vocabulary; largest magnitude */
  double largest_token_factor; /* largest |token weight| / temperature of a valid row */
} totals;

static totals make_totals(const flce_problem* problem, const flce_tensors* tensors,
                          flce_dtype stat) {
  const void *weight = tensors->class_weight, *token_weight = tensors->token_weight,
             *temperature = tensors->temperature;
  const int64_t* target = problem->has.probabilities ? NULL : tensors->target;
  totals sums = {.class_weight = weight ? 0.0 : (double)problem->shape.vocab,
                 .largest_class_weight = weight ? 0.0 : 1.0};
  if (!token_weight && !temperature) sums.largest_token_factor = 1.0 / problem->loss.temperature;
  for (int64_t i = 0; i < problem->shape.tokens; i++) {
    if (target && target[i] == problem->loss.ignore_index) continue;
    sums.valid++;
    sums.target_weight += target && weight ? flce_load(weight, stat, target[i]) : 1.0;
    double factor = token_weight ? fabs(flce_load(token_weight, stat, i)) : 1.0;
    factor /= problem->loss.temperature * (temperature ? flce_load(temperature, stat, i) : 1.0);
    if (factor > sums.largest_token_factor) sums.largest_token_factor = factor;
  }
  for (int64_t j = 0; weight && j < problem->shape.vocab; j++) {
    double value = flce_load(weight, stat, j);
    sums.class_weight += value;
    if (fabs(value) > sums.largest_class_weight) sums.largest_class_weight = fabs(value);
  }
  return sums;
}

/* The largest |x| of the rows that are not ignored; NaN if one of them holds a NaN. */
static double largest_input(const flce_problem* problem, const flce_tensors* tensors) {
  double largest = 0.0;
  for (int64_t i = 0; i < problem->shape.tokens; i++) {
    if (tensors->target && tensors->target[i] == problem->loss.ignore_index) continue;
    for (int64_t h = 0; h < problem->shape.hidden; h++) {
      double x =
          fabs(flce_load(tensors->input, problem->dtypes.input, i * problem->shape.hidden + h));
      if (x > largest || isnan(x)) largest = x;
    }
  }
  return largest;
}

flce_status flce_cpu_prepare(void* self, const flce_problem* problem, const flce_tensors* tensors,
                             void* order, int dw_fp16_shift, bool may_overlap) {
  (void)may_overlap;
  flce_dtype stat = flce_stat_dtype(problem->dtypes.gemm);
  const flce_row_kernels*
      kernels; /* not used: refuses an unsupported FLCE_CPU_VARIANT before any work */
  FLCE_TRY(flce_cpu_row_kernels(stat, &kernels));
  if (!problem->has.probabilities)
    FLCE_TRY(flce_check_targets(problem, tensors->target, problem->shape.vocab, NULL));
  totals sums = make_totals(problem, tensors, stat);
  if (sums.valid > problem->shape.rows)
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "valid_bound: expected at least as many as the valid rows, %lld, got %lld",
                     (long long)sums.valid, (long long)problem->shape.rows);
  double inverse = 1.0, z_factor = 1.0;
  if (problem->reduction == FLCE_MEAN && tensors->num_items) {
    double items = flce_load(tensors->num_items, stat, 0);
    FLCE_TRY(flce_check_items(items, sums.valid));
    inverse = items == 0.0 ? 0.0 : 1.0 / items;
  } else if (problem->reduction == FLCE_MEAN) {
    inverse = sums.valid == 0 ? 0.0 : 1.0 / sums.target_weight;
    if (sums.valid > 0) z_factor = sums.target_weight / (double)sums.valid;
  }
  double largest = sums.largest_class_weight * sums.largest_token_factor *
                   fabs(problem->loss.logit_scale) *
                   (1.0 + 128.0 * problem->loss.z_loss * z_factor) *
                   flce_largest_gradient(problem->divergence.kind);
  void* scalars = tensors->scalars;
  flce_store(scalars, stat, FLCE_SCALAR_VALID, (double)sums.valid);
  flce_store(scalars, stat, FLCE_SCALAR_INV_DENOM, inverse);
  flce_store(scalars, stat, FLCE_SCALAR_WEIGHT_TOTAL, sums.class_weight);
  double loss_scale = inverse != 0.0 && isfinite(inverse) ? inverse : 1.0;
  double most = ldexp(1.0, FLCE_MAX_SCALE_EXPONENT);
  loss_scale = fmin(fmax(loss_scale * scale_for(largest * fabs(loss_scale), 14), -most), most);
  double input_scale = 1.0, dw_scale = loss_scale;
  if (dw_fp16_shift != 0) {
    input_scale =
        fmin(scale_for(largest_input(problem, tensors), 13), ldexp(1.0, FLCE_MAX_INPUT_EXPONENT));
    dw_scale = ldexp(loss_scale * input_scale, dw_fp16_shift);
  }
  flce_store(scalars, stat, FLCE_SCALAR_LOSS_SCALE, loss_scale);
  flce_store(scalars, stat, FLCE_SCALAR_INPUT_SCALE, input_scale);
  flce_store(scalars, stat, FLCE_SCALAR_DW_SCALE, dw_scale);
  flce_store(scalars, stat, FLCE_SCALAR_Z_FACTOR, z_factor);
  return order ? flce_cpu_order_targets(self, problem, tensors->target, order) : FLCE_OK;
}
