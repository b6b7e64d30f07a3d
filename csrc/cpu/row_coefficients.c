/* Backend functions `row_coefficients`: computes the factors of each row's gradient (enum
 * flce_coef_row) from its statistics and the upstream gradients; `scale_coefficients`. */
#include "cpu/row_pass.h"

#include "merge.h"

typedef struct coef_pass {
  row_pass pass;
  const flce_shard* shard; /* NULL: this rank has all classes */
  const flce_upstream* upstream;
  double factor;
} coef_pass;

static double upstream_of(const void* vector, flce_dtype stat, int64_t i, double absent) {
  return vector ? flce_load(vector, stat, i) : absent;
}

static void valid_coefficients(const coef_pass* job, int64_t i, double* coef) {
  const row_pass* pass = &job->pass;
  const flce_rows* rows = pass->rows;
  const flce_loss* options = &rows->options;
  const flce_upstream* upstream = job->upstream;
  flce_dtype stat = pass->stat;
  double s = options->label_smoothing, per_class = s / (double)rows->vocab;
  double k = row_factor(rows->token_weight, stat, i) * job->factor *
             upstream_of(upstream->loss, stat, i * upstream->loss_stride, 1.0);
  double a = options->logit_scale / (options->temperature * row_factor(rows->temperature, stat, i));
  double inv_sum = row_stat(pass, FLCE_STAT_INV_SUM, i), own = 0.0, other = 0.0;
  if (rows->target)
    own = k * (1.0 - s) * row_factor(rows->class_weight, stat, rows->target[i]);
  else
    other = k * row_stat(pass, FLCE_STAT_WEIGHT_SUM, i);
  if (rows->target && s > 0.0)
    other = k * per_class * flce_load(rows->scalars, stat, FLCE_SCALAR_WEIGHT_TOTAL);
  if (options->z_loss != 0.0)
    other += k * 2.0 * options->z_loss * flce_load(rows->scalars, stat, FLCE_SCALAR_Z_FACTOR) *
             row_stat(pass, FLCE_STAT_LSE, i);
  other += upstream_of(upstream->lse, stat, i, 0.0);
  coef[FLCE_COEF_EXP] = a * (own + other) * inv_sum;
  if (rows->target) {
    /* r p_y - own with p_y = exp(-nll), arranged so that p_y - 1 does not cancel. */
    double nll = row_stat(pass, FLCE_STAT_NLL, i);
    /* Another rank's target: its substitute column has no one-hot term. */
    bool here = !job->shard || flce_holds_class(job->shard, rows->target[i]);
    double p = exp(-nll), target = own * (here ? expm1(-nll) : p) + other * p;
    if (upstream->entropy_in_target && p > 0.0) /* m - l_y = nll - entropy */
      target += upstream_of(upstream->entropy, stat, i, 0.0) * p *
                (nll - row_stat(pass, FLCE_STAT_ENTROPY, i));
    coef[FLCE_COEF_TARGET] = a * row_stat(pass, FLCE_STAT_SLOPE, i) * target;
  } else {
    coef[FLCE_COEF_SOFT] = a * k * (1.0 - s);
  }
  if (upstream->of_dz) {
    coef[FLCE_COEF_EXP] = 1.0;
    coef[FLCE_COEF_TARGET] = 0.0;
  }
  coef[FLCE_COEF_SMOOTH] = a * k * per_class;
  coef[FLCE_COEF_VALID] = row_factor(rows->input_scale, stat, 0);
  coef[FLCE_COEF_ENTROPY] = a * upstream_of(upstream->entropy, stat, i, 0.0) * inv_sum;
  coef[FLCE_COEF_TAIL] = a * upstream_of(upstream->tail, stat, i, 0.0);
}

flce_status flce_cpu_row_coefficients(void* self, const flce_rows* rows, const flce_shard* shard,
                                      const flce_upstream* upstream, const void* factor,
                                      void* coef) {
  (void)self;
  flce_dtype stat = flce_stat_dtype(rows->z_dtype);
  coef_pass job = {.pass = {.rows = rows, .dtype = rows->z_dtype, .stat = stat},
                   .shard = shard,
                   .upstream = upstream,
                   .factor = row_factor(factor, stat, 0)};
  for (int64_t r = 0; r < rows->rows; r++) {
    int64_t i = flce_row_index(rows, r);
    flce_row_kind kind = flce_row_kind_at(rows, i);
    if (kind == FLCE_ROW_ABSENT) continue;
    double values[FLCE_COEF_COUNT] = {0};
    if (kind == FLCE_ROW_VALID)
      valid_coefficients(&job, i, values);
    else if (kind == FLCE_ROW_OUT_OF_RANGE)
      flce_fill(values, FLCE_F64, NAN, FLCE_COEF_COUNT);
    for (int64_t c = 0; c < FLCE_COEF_COUNT; c++)
      flce_store(coef, stat, c * rows->stat_pitch + i, values[c]);
  }
  return FLCE_OK;
}

/* A bound of |dz| in row i. The entropy's term p (m - l) is at most about the entropy where it is
 * negative, and 1/e where it is positive. The gradients of all classes may be of one column. */
static double bound_of_dz(const row_pass* pass, const float* coef, int64_t i, double top_weight) {
  const flce_rows* rows = pass->rows;
  const flce_row_classes* classes = &rows->classes;
  double size[FLCE_COEF_COUNT], of_classes = 0.0;
  for (int64_t k = 0; classes->grads && k < classes->count; k++)
    of_classes += fabs((double)((const float*)classes->grads)[i * classes->count + k]);
  for (int64_t c = 0; c < FLCE_COEF_COUNT; c++)
    size[c] = fabs((double)coef[c * rows->stat_pitch + i]);
  double factor = size[FLCE_COEF_EXP];
  if (rows->wants_entropy)
    factor += size[FLCE_COEF_ENTROPY] * (1.0 + row_stat(pass, FLCE_STAT_ENTROPY, i));
  return factor / row_stat(pass, FLCE_STAT_INV_SUM, i) + size[FLCE_COEF_TARGET] +
         size[FLCE_COEF_TAIL] + of_classes + size[FLCE_COEF_SMOOTH] * top_weight +
         size[FLCE_COEF_SOFT] * row_stat(pass, FLCE_STAT_WEIGHT_SUM, i);
}

flce_status flce_cpu_scale_coefficients(void* self, const flce_rows* rows, void* coef, float* scale,
                                        int64_t weights) {
  (void)self;
  const int kLargest = 12, kMostBits = 100;
  row_pass pass = {.rows = rows, .dtype = rows->z_dtype, .stat = FLCE_F32};
  float* values = coef;
  float top_weight = rows->class_weight ? 0.0f : 1.0f;  // gcc 12 for aarch64 fails on a double here
  double top = 0.0;
  for (int64_t j = 0; rows->class_weight && j < rows->vocab; j++)
    top_weight = fmaxf(top_weight, fabsf(((const float*)rows->class_weight)[j]));
  for (int64_t r = 0; r < rows->rows; r++) {
    int64_t i = flce_row_index(rows, r);
    if (flce_row_kind_at(rows, i) == FLCE_ROW_VALID)
      top = fmax(top, bound_of_dz(&pass, values, i, top_weight));
  }
  int bits = 0;
  if (top > 0.0 && isfinite(top)) bits = kLargest - (int)ceil(log2(top));
  double u = ldexp(1.0, bits < kMostBits ? bits : kMostBits);
  for (int64_t r = 0; r < rows->rows; r++) {
    int64_t i = flce_row_index(rows, r);
    for (int64_t c = 0; i >= 0 && c < FLCE_COEF_COUNT; c++)
      if (c != FLCE_COEF_VALID) values[c * rows->stat_pitch + i] *= (float)u;
  }
  for (int64_t k = 0; k < FLCE_DZ_SCALE_NUMBERS + weights; k++) scale[k] = (float)(1.0 / u);
  scale[1] = scale[3] = 0.0f;
  scale[2] = 1.0f;
  return FLCE_OK;
}
