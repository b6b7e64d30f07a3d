/* The general path of the row passes: rows whose final logit l is not z + bias (logit scale,
 * softcap, temperature), whose targets are probabilities, or for which entropy or predictions are
 * wanted.
 *
 * A row is processed span by span: l is written to a buffer of the stat dtype that stays in L1, and
 * the row kernels of that dtype then run on the buffer as they would on logits. As in the plain
 * path, the sums leave out the target's column. */
#include "cpu/row_terms.h"

#include <float.h>
#include <math.h>
#include <string.h>

flce_logit_map flce_cpu_map_of_row(const row_pass* pass, int64_t i) {
  const flce_rows* rows = pass->rows;
  double own = row_factor(rows->temperature, pass->stat, i);
  return flce_logit_map_of(&rows->options, rows->options.temperature * own);
}

/* ---- curves: l, which holds z + bias, becomes outer_scale * curve(inner_scale * l) ---- */

/* Computes tanh and 1 - tanh^2 from exp(-2 |u|): 1 - tanh^2 taken directly would cancel where
 * tanh^2 is near 1. Near u = 0 the formula for tanh itself cancels, so float64 uses libm's tanh
 * there. */
static void tanh_doubles(double* l, double* slope, const flce_logit_map* map, int64_t count) {
  for (int64_t j = 0; j < count; j++) {
    double u = map->inner_scale * l[j], e = exp(-2.0 * fabs(u));
    double tanh_u = fabs(u) < 0.5 ? tanh(u) : copysign(1.0 - 2.0 * e / (1.0 + e), u);
    l[j] = map->outer_scale * tanh_u;
    slope[j] = 4.0 * e / ((1.0 + e) * (1.0 + e));
  }
}

/* The float32 version, vectorized: exp is the row kernel's, and for |tanh u| below tanh(1/4) tanh
 * is its power series, truncated with a relative error below 3e-10. No loop has a branch, so that
 * the compiler can vectorize it. */
static void tanh_floats(const flce_row_kernels* kernels, float* restrict l, float* restrict slope,
                        float* restrict e, const flce_logit_map* map, int64_t count) {
  float inner_scale = (float)map->inner_scale, outer_scale = (float)map->outer_scale;
  for (int64_t j = 0; j < count; j++) {
    l[j] *= inner_scale;
    slope[j] = -2.0f * fabsf(l[j]);
  }
  kernels->exp_sum(e, slope, NULL, 0.0, count);
  for (int64_t j = 0; j < count; j++) {
    float u = l[j], square = u * u, inverse = 1.0f / (1.0f + e[j]);
    float series = -1382.0f / 155925.0f;
    series = series * square + 62.0f / 2835.0f;
    series = series * square - 17.0f / 315.0f;
    series = series * square + 2.0f / 15.0f;
    series = series * square - 1.0f / 3.0f;
    l[j] = u + u * square * series;
    slope[j] = 4.0f * e[j] * inverse * inverse;
    e[j] = copysignf(1.0f - 2.0f * e[j] * inverse, u);
  }
  for (int64_t j = 0; j < count; j++) {
    uint32_t near = -(uint32_t)(fabsf(e[j]) < 0.245f); /* tanh(1/4); the mask is all ones or 0 */
    l[j] = outer_scale * flce_float_of((flce_bits_of(l[j]) & near) | (flce_bits_of(e[j]) & ~near));
  }
}

static void cap_logits(const row_pass* pass, const flce_logit_map* map, row_part* part) {
  switch (map->curve) {
    case FLCE_LINE:
      return;
    case FLCE_TANH:
      if (pass->stat == FLCE_F64)
        tanh_doubles(part->l.wide, part->slope.wide, map, part->count);
      else
        tanh_floats(pass->l_kernels, part->l.narrow, part->slope.narrow, part->e.narrow, map,
                    part->count);
      return;
  }
}

void flce_cpu_transform(const row_pass* pass, const flce_logit_map* map, const void* z,
                        int64_t begin, int64_t end, row_part* part) {
  const void* bias = row_from(pass, pass->rows->bias, begin);
  double outer_scale = map->curve == FLCE_LINE ? map->outer_scale : 1.0;
  part->begin = begin;
  part->count = end - begin;
  pass->z_blocks->scaled(&part->l, bias ? 1.0 : outer_scale, flce_const_at(z, pass->dtype, begin),
                         part->count);
  if (bias) {
    pass->l_blocks->axpy(&part->l, 1.0, bias, part->count);
    if (outer_scale != 1.0) pass->l_blocks->scaled(&part->l, outer_scale, &part->l, part->count);
  }
  cap_logits(pass, map, part);
}

static void load_probabilities(const row_pass* pass, int64_t i, row_part* part) {
  const flce_rows* rows = pass->rows;
  int64_t first = i * rows->probabilities_pitch + part->begin;
  for (int64_t j = 0; j < part->count; j++)
    flce_store(&part->t, pass->stat, j,
               flce_load(rows->probabilities, rows->probabilities_dtype, first + j));
}

static bool has_column(const row_part* part, int64_t j) {
  return j >= part->begin && j < part->begin + part->count;
}

/* ---- statistics ---- */

enum { NO_COLUMN = -2 }; /* different from -1, the missing class target */

/* Rescales sums taken relative to the offset c so that they are relative to `top`. Before the first
 * logit above -inf the offset used was 0 and the sums hold no exp. The previous largest column,
 * which had been left out of the tail, is added to it. */
static void raise_offset(row_sums* sums, double top, int64_t y) {
  bool first = sums->offset == -INFINITY;
  double rise = top - (first ? 0.0 : sums->offset), factor = first ? 0.0 : exp(-rise);
  if (!first && sums->largest != y) sums->tail += 1.0;
  sums->entropy_sum = factor * (sums->entropy_sum - rise * sums->tail);
  sums->tail *= factor;
  sums->rest *= factor;
  sums->weighted_gap += rise * sums->weight_sum;
  sums->offset = top;
}

static int64_t find_column(const row_pass* pass, const row_part* part, double top) {
  int64_t j = 0;
  while (j < part->count && flce_load(&part->l, pass->stat, j) != top) j++;
  return part->begin + j;
}

static double exp_sum(const row_pass* pass, const row_part* part, double shift, int64_t first,
                      int64_t end) {
  if (first >= end) return 0.0;
  return pass->l_kernels->exp_sum(NULL, flce_const_at(&part->l, pass->stat, first), NULL, shift,
                                  end - first);
}

/* Accumulates in double, because a small entropy is a sum of small terms and much larger ones. A
 * term with e = 0 is skipped: there l may be -inf, and 0 * -inf is NaN. */
INLINE void add_entropy_sum(flce_dtype stat, const row_part* part, double shift, row_sums* sums) {
  for (int64_t j = 0; j < part->count; j++) {
    double e = flce_load(&part->e, stat, j);
    if (e == 0.0) continue;
    sums->tail += e;
    sums->entropy_sum += e * (flce_load(&part->l, stat, j) - shift);
  }
}

static void add_exp(const row_pass* pass, int64_t y, double shift, row_part* part, row_sums* sums) {
  int64_t own = y - part->begin;
  if (pass->rows->wants_entropy) {
    pass->l_kernels->exp_sum(&part->e, &part->l, NULL, shift, part->count);
    if (has_column(part, y)) flce_store(&part->e, pass->stat, own, 0.0);
    if (has_column(part, sums->largest))
      flce_store(&part->e, pass->stat, sums->largest - part->begin, 0.0);
    BY_STAT(pass->stat, add_entropy_sum, part, shift, sums);
  } else if (has_column(part, y)) {
    sums->rest += exp_sum(pass, part, shift, 0, own);
    sums->rest += exp_sum(pass, part, shift, own + 1, part->count);
  } else {
    sums->rest += exp_sum(pass, part, shift, 0, part->count);
  }
}

/* Columns of target weight 0 are skipped: there l may be -inf, and 0 * -inf is NaN. */
INLINE void add_weighted_gap(flce_dtype stat, const row_pass* pass, const row_part* part,
                             double shift, row_sums* sums) {
  const flce_rows* rows = pass->rows;
  double smoothing = rows->options.label_smoothing, uniform = smoothing / (double)rows->vocab;
  const void* weight = row_from(pass, rows->class_weight, part->begin);
  for (int64_t j = 0; j < part->count; j++) {
    double q = uniform;
    if (rows->probabilities) q += (1.0 - smoothing) * flce_load(&part->t, stat, j);
    if (weight) q *= flce_load(weight, stat, j);
    if (q == 0.0) continue;
    sums->weight_sum += q;
    sums->weighted_gap += q * (shift - flce_load(&part->l, stat, j));
  }
}

void flce_cpu_general_sums(const row_pass* pass, int64_t r, int64_t i, int64_t y, row_sums* sums) {
  const flce_rows* rows = pass->rows;
  const void* z = row_z(pass, r);
  bool soft = rows->probabilities || rows->options.label_smoothing > 0.0;
  flce_logit_map map = flce_cpu_map_of_row(pass, i);
  row_part part;
  *sums = (row_sums){.offset = -INFINITY, .slope_y = 1.0, .largest = NO_COLUMN};
  for (int64_t begin = 0, end; begin < rows->vocab; begin = end) {
    end = row_span_end(begin, rows->vocab);
    flce_cpu_transform(pass, &map, z, begin, end, &part);
    double top = pass->l_kernels->max(&part.l, NULL, part.count);
    if (top > sums->offset) {
      raise_offset(sums, top, y);
      if (rows->predictions || rows->wants_entropy) sums->largest = find_column(pass, &part, top);
    }
    if (has_column(&part, y)) {
      sums->l_y = flce_load(&part.l, pass->stat, y - begin);
      if (map.curve != FLCE_LINE) sums->slope_y = flce_load(&part.slope, pass->stat, y - begin);
    }
    double shift = sums->offset == -INFINITY ? 0.0 : sums->offset;
    add_exp(pass, y, shift, &part, sums);
    if (!soft) continue;
    if (rows->probabilities) load_probabilities(pass, i, &part);
    BY_STAT(pass->stat, add_weighted_gap, pass, &part, shift, sums);
  }
  bool no_largest = sums->largest == y || sums->offset == -INFINITY;
  if (rows->wants_entropy) sums->rest = sums->tail + (no_largest ? 0.0 : 1.0);
  flce_cpu_bound_offset(sums);
}

/* ---- gradient ---- */

/* Overwrites part->e with the gradient. Subnormal results become 0, because they make a GEMM many
 * times slower. */
INLINE void combine(flce_dtype stat, const row_pass* pass, const row_terms* terms, row_part* part) {
  const void* weight = row_from(pass, pass->rows->class_weight, part->begin);
  double smallest = stat == FLCE_F64 ? DBL_MIN : (double)FLT_MIN;
  bool pulls = terms->smooth != 0.0 || terms->soft != 0.0;
  for (int64_t j = 0; j < part->count; j++) {
    double e = flce_load(&part->e, stat, j);
    double value = terms->entropy == 0.0 ? e * terms->row
                                         : flce_cpu_pushed(terms, e, flce_load(&part->l, stat, j));
    if (pulls) {
      double q = terms->smooth;
      if (terms->soft != 0.0) q += terms->soft * flce_load(&part->t, stat, j);
      value -= weight ? q * flce_load(weight, stat, j) : q;
    }
    if (terms->capped) value *= flce_load(&part->slope, stat, j);
    flce_store(&part->e, stat, j, fabs(value) < smallest ? 0.0 : value);
  }
}

/* The gradient of the target's own column, which starts from the coefficient FLCE_COEF_TARGET,
 * because p - 1 would cancel. */
static double own_gradient(const row_pass* pass, const row_terms* terms, const row_part* part,
                           int64_t i, int64_t y) {
  double l = flce_load(&part->l, pass->stat, y - part->begin);
  double slope = terms->capped ? flce_load(&part->slope, pass->stat, y - part->begin) : 1.0;
  double other = -terms->smooth * row_factor(pass->rows->class_weight, pass->stat, y);
  if (terms->entropy != 0.0) {
    row_terms entropy = *terms;
    entropy.row = 0.0;
    other += flce_cpu_pushed(&entropy, exp(l - terms->offset), l);
  }
  return row_coef(pass, FLCE_COEF_TARGET, i) + terms->tail_of_target + slope * other;
}

void flce_cpu_general_gradient(const row_pass* pass, int64_t r, int64_t i, int64_t y) {
  const flce_rows* rows = pass->rows;
  const void* z = row_z(pass, r);
  void* out = row_out(pass, r);
  flce_logit_map map = flce_cpu_map_of_row(pass, i);
  row_terms terms = flce_cpu_row_terms(pass, &map, i);
  flce_cpu_refer_to_tail(pass, i, &terms);
  bool linear = !terms.capped && terms.entropy == 0.0 && terms.soft == 0.0;
  row_part part;
  for (int64_t begin = 0, end; begin < rows->vocab; begin = end) {
    end = row_span_end(begin, rows->vocab);
    flce_cpu_transform(pass, &map, z, begin, end, &part);
    if (linear) {
      const void* weight = terms.smooth != 0.0 ? row_from(pass, rows->class_weight, begin) : NULL;
      pass->l_kernels->grad_exp(&part.e, &part.l, NULL, terms.offset, terms.row, weight,
                                terms.smooth, part.count);
    } else {
      pass->l_kernels->exp_sum(&part.e, &part.l, NULL, terms.offset, part.count);
      if (terms.soft != 0.0) load_probabilities(pass, i, &part);
      BY_STAT(pass->stat, combine, pass, &terms, &part);
    }
    pass->z_blocks->narrow(flce_at(out, pass->dtype, begin), &part.e, part.count);
    if (!has_column(&part, y)) continue;
    if (rows->coef)
      flce_store(out, pass->dtype, y, own_gradient(pass, &terms, &part, i, y));
    else if (pass->hide_target)
      flce_store(out, pass->dtype, y, 0.0);
  }
}
