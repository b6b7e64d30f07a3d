/* The row passes: softmax statistics, exp and gradient rows, and the rows' coefficients.
 *
 * A thread takes whole rows, and a row's sums run in one order, so no result depends on the number
 * of threads. Row scalars are doubles here, rounded where they are stored. */
#include "convert.h"
#include "cpu.h"

#include <math.h>
#include <string.h>

typedef struct row_pass {
  const flce_rows* rows;
  const flce_row_kernels* kernels;
  flce_dtype dtype, stat;
  bool write_exp; /* of the statistics pass */
  double scale;   /* the rest: of the gradient pass */
  bool hide_target, z_is_exp;
} row_pass;

static const void* z_row(const row_pass* pass, int64_t i) {
  return flce_const_at(pass->rows->z, pass->dtype, i * pass->rows->z_pitch);
}

static void* out_row(const row_pass* pass, int64_t i) {
  return flce_at(pass->rows->out, pass->dtype, i * pass->rows->out_pitch);
}

/* Element j of an optional [V] stat dtype vector, advanced by j. */
static const void* from(const row_pass* pass, const void* vector, int64_t j) {
  return vector ? flce_const_at(vector, pass->stat, j) : NULL;
}

static double class_weight(const flce_rows* rows, flce_dtype stat, int64_t j) {
  return rows->class_weight ? flce_load(rows->class_weight, stat, j) : 1.0;
}

static double logit(const row_pass* pass, const void* z, int64_t j) {
  double value = flce_load(z, pass->dtype, j);
  if (!pass->rows->bias) return value;
  double sum = value + flce_load(pass->rows->bias, pass->stat, j);
  return pass->stat == FLCE_F64 ? sum : (double)(float)sum;
}

static double max_span(const row_pass* pass, const void* z, int64_t begin, int64_t end) {
  return pass->kernels->max(flce_const_at(z, pass->dtype, begin),
                            from(pass, pass->rows->bias, begin), end - begin);
}

static double exp_span(const row_pass* pass, void* out, const void* z, double offset, int64_t begin,
                       int64_t end) {
  if (begin >= end) return 0.0;
  return pass->kernels->exp_sum(out ? flce_at(out, pass->dtype, begin) : NULL,
                                flce_const_at(z, pass->dtype, begin),
                                from(pass, pass->rows->bias, begin), offset, end - begin);
}

/* exp over [begin, end) without column `skip`; returns the sum of what is left. */
static double exp_span_without(const row_pass* pass, void* out, const void* z, double offset,
                               int64_t begin, int64_t end, int64_t skip) {
  if (skip < begin || skip >= end) return exp_span(pass, out, z, offset, begin, end);
  return exp_span(pass, out, z, offset, begin, skip) +
         exp_span(pass, out, z, offset, skip + 1, end);
}

static int64_t span_end(int64_t begin, int64_t vocab) {
  return vocab - begin > FLCE_SPAN ? begin + FLCE_SPAN : vocab;
}

/* One reading of the row from memory: each span is read for its maximum and again, from the cache,
 * for its sum; the sum so far is scaled when the maximum grows. */
static double online_sum(const row_pass* pass, const void* z, int64_t target, double* offset) {
  int64_t vocab = pass->rows->vocab;
  double largest = -INFINITY, sum = 0.0;
  for (int64_t begin = 0, end; begin < vocab; begin = end) {
    end = span_end(begin, vocab);
    double top = max_span(pass, z, begin, end);
    if (top > largest) {
      sum *= exp(largest - top);
      largest = top;
    }
    /* Without a finite logit yet any shift does, but for -inf - -inf, which would be NaN. */
    double shift = largest == -INFINITY ? 0.0 : largest;
    sum += exp_span_without(pass, NULL, z, shift, begin, end, target);
  }
  *offset = largest;
  return sum;
}

/* Two readings; out may be z, so that what is needed of z is read before. */
static double written_sum(const row_pass* pass, void* out, const void* z, int64_t target,
                          double offset) {
  int64_t vocab = pass->rows->vocab;
  double sum = 0.0;
  for (int64_t begin = 0, end; begin < vocab; begin = end) {
    end = span_end(begin, vocab);
    sum += exp_span_without(pass, out, z, offset, begin, end, target);
  }
  flce_store(out, pass->dtype, target, 0.0);
  return sum;
}

/* sum_j w_j (offset - z_j), for smoothing. */
static double gap_sum(const row_pass* pass, const void* z, double offset) {
  int64_t vocab = pass->rows->vocab;
  double sum = 0.0;
  for (int64_t begin = 0, end; begin < vocab; begin = end) {
    end = span_end(begin, vocab);
    sum += pass->kernels->gap(flce_const_at(z, pass->dtype, begin),
                              from(pass, pass->rows->bias, begin),
                              from(pass, pass->rows->class_weight, begin), offset, end - begin);
  }
  return sum;
}

static void store_stats(const row_pass* pass, int64_t i, double lse, double nll, double offset,
                        double inv_sum) {
  void* stats = pass->rows->stats;
  int64_t pitch = pass->rows->stat_pitch;
  flce_store(stats, pass->stat, FLCE_STAT_LSE * pitch + i, lse);
  flce_store(stats, pass->stat, FLCE_STAT_NLL * pitch + i, nll);
  flce_store(stats, pass->stat, FLCE_STAT_OFFSET * pitch + i, offset);
  flce_store(stats, pass->stat, FLCE_STAT_INV_SUM * pitch + i, inv_sum);
}

static double stat_of(const row_pass* pass, int64_t which, int64_t i) {
  return flce_load(pass->rows->stats, pass->stat, which * pass->rows->stat_pitch + i);
}

static void zero_row(const row_pass* pass, int64_t i) {
  memset(out_row(pass, i), 0, (size_t)(pass->rows->vocab * flce_size_of(pass->dtype)));
}

/* A row without a target: ignored (value 0) or out of range (value NaN); z is not read. */
static void blank_row(const row_pass* pass, int64_t i, double value) {
  store_stats(pass, i, value, value, value, value);
  flce_store(pass->rows->loss, pass->stat, i, value);
  if (pass->write_exp) zero_row(pass, i);
}

static void stat_row(const row_pass* pass, int64_t i) {
  const flce_rows* rows = pass->rows;
  int64_t y = rows->target[i];
  if (y == rows->ignore_index || y < 0 || y >= rows->vocab) {
    blank_row(pass, i, y == rows->ignore_index ? 0.0 : NAN);
    return;
  }
  const void* z = z_row(pass, i);
  double smoothing = rows->label_smoothing, z_y = logit(pass, z, y);
  double offset, rest = 0.0, gap = 0.0;
  if (pass->write_exp)
    offset = max_span(pass, z, 0, rows->vocab);
  else
    rest = online_sum(pass, z, y, &offset);
  if (smoothing > 0.0) gap = gap_sum(pass, z, offset);
  if (pass->write_exp) rest = written_sum(pass, out_row(pass, i), z, y, offset);

  double e_y = exp(z_y - offset), sum = rest + e_y, log_sum = log(sum);
  /* Near a certain target ln S - (z_y - c) would cancel; log1p keeps the smallest losses. */
  double nll = rest <= e_y ? log1p(rest / e_y) : log_sum + (offset - z_y);
  store_stats(pass, i, offset + log_sum, nll, offset, 1.0 / sum);
  double loss = (1.0 - smoothing) * class_weight(rows, pass->stat, y) * nll;
  if (smoothing > 0.0) {
    double total = flce_load(rows->scalars, pass->stat, FLCE_SCALAR_WEIGHT_TOTAL);
    loss += smoothing / (double)rows->vocab * (gap + total * log_sum);
  }
  flce_store(rows->loss, pass->stat, i, loss);
}

static void stat_range(int64_t begin, int64_t end, void* context) {
  for (int64_t i = begin; i < end; i++) stat_row(context, i);
}

static flce_status make_pass(const flce_rows* rows, bool writes, row_pass* pass) {
  *pass = (row_pass){.rows = rows, .dtype = rows->z_dtype, .stat = flce_stat_dtype(rows->z_dtype)};
  FLCE_TRY(flce_cpu_row_kernels(rows->z_dtype, &pass->kernels));
  if (!writes) return FLCE_OK;
  if (rows->out_dtype != rows->z_dtype)
    return flce_fail(FLCE_UNSUPPORTED, "CPU row pass: expected out in the logits' %s, got %s",
                     flce_dtype_name(rows->z_dtype), flce_dtype_name(rows->out_dtype));
  if (rows->out == rows->z && rows->out_pitch != rows->z_pitch)
    return flce_fail(FLCE_UNSUPPORTED, "CPU row pass in place: expected out_pitch %lld, got %lld",
                     (long long)rows->z_pitch, (long long)rows->out_pitch);
  return FLCE_OK;
}

flce_status flce_cpu_stat_rows(void* self, const flce_rows* rows) {
  row_pass pass;
  FLCE_TRY(make_pass(rows, false, &pass));
  flce_cpu_parallel(self, rows->rows, rows->vocab, stat_range, &pass);
  return FLCE_OK;
}

flce_status flce_cpu_exp_rows(void* self, const flce_rows* rows) {
  row_pass pass;
  FLCE_TRY(make_pass(rows, true, &pass));
  pass.write_exp = true;
  flce_cpu_parallel(self, rows->rows, rows->vocab, stat_range, &pass);
  return FLCE_OK;
}

static double coef_of(const row_pass* pass, int64_t which, int64_t i) {
  return flce_load(pass->rows->coef, pass->stat, which * pass->rows->stat_pitch + i);
}

static void grad_row(const row_pass* pass, int64_t i) {
  const flce_rows* rows = pass->rows;
  int64_t y = rows->target[i];
  if (y == rows->ignore_index) {
    zero_row(pass, i);
    return;
  }
  double factor = pass->scale, smooth = 0.0;
  if (rows->coef) {
    factor = coef_of(pass, FLCE_COEF_ROW, i) / (pass->z_is_exp ? pass->scale : 1.0);
    smooth = coef_of(pass, FLCE_COEF_SMOOTH, i);
  } else if (pass->z_is_exp) {
    factor = 1.0;
  }
  const void* weight = smooth != 0.0 ? rows->class_weight : NULL;
  const void* z = z_row(pass, i);
  void* out = out_row(pass, i);
  if (pass->z_is_exp)
    pass->kernels->grad_linear(out, z, factor, weight, smooth, rows->vocab);
  else
    pass->kernels->grad_exp(out, z, rows->bias, stat_of(pass, FLCE_STAT_OFFSET, i), factor, weight,
                            smooth, rows->vocab);
  if (y < 0 || y >= rows->vocab) return; /* the row is NaN by its statistics and coefficients */
  if (rows->coef)
    flce_store(out, pass->dtype, y,
               coef_of(pass, FLCE_COEF_TARGET, i) - smooth * class_weight(rows, pass->stat, y));
  else if (pass->hide_target)
    flce_store(out, pass->dtype, y, 0.0);
}

static void grad_range(int64_t begin, int64_t end, void* context) {
  for (int64_t i = begin; i < end; i++) grad_row(context, i);
}

flce_status flce_cpu_grad_rows(void* self, const flce_rows* rows, double scale, bool hide_target,
                               bool z_is_exp) {
  row_pass pass;
  FLCE_TRY(make_pass(rows, true, &pass));
  pass.scale = scale;
  pass.hide_target = hide_target;
  pass.z_is_exp = z_is_exp;
  flce_cpu_parallel(self, rows->rows, rows->vocab, grad_range, &pass);
  return FLCE_OK;
}

flce_status flce_cpu_row_coefficients(void* self, const flce_rows* rows, const void* grad_output,
                                      int64_t grad_stride, const void* factor, void* coef) {
  (void)self;
  flce_dtype stat = flce_stat_dtype(rows->z_dtype);
  row_pass pass = {.rows = rows, .dtype = rows->z_dtype, .stat = stat};
  double smoothing = rows->label_smoothing, smooth_share = smoothing / (double)rows->vocab;
  double smooth_total =
      smoothing > 0.0 ? smooth_share * flce_load(rows->scalars, stat, FLCE_SCALAR_WEIGHT_TOTAL)
                      : 0.0;
  for (int64_t i = 0; i < rows->rows; i++) {
    int64_t y = rows->target[i];
    double row = 0.0, target = 0.0, smooth = 0.0, valid = 0.0;
    if (y != rows->ignore_index && (y < 0 || y >= rows->vocab)) {
      row = target = smooth = valid = NAN;
    } else if (y != rows->ignore_index) {
      double g = grad_output ? flce_load(grad_output, stat, i * grad_stride) : 1.0;
      if (factor) g *= flce_load(factor, stat, 0);
      double own = (1.0 - smoothing) * class_weight(rows, stat, y);
      double nll = stat_of(&pass, FLCE_STAT_NLL, i);
      row = g * (own + smooth_total) * stat_of(&pass, FLCE_STAT_INV_SUM, i);
      /* a p_y - own with p_y = exp(-nll), arranged so that p_y - 1 does not cancel. */
      target = g * (own * expm1(-nll) + smooth_total * exp(-nll));
      smooth = g * smooth_share;
      valid = 1.0;
    }
    flce_store(coef, stat, FLCE_COEF_ROW * rows->stat_pitch + i, row);
    flce_store(coef, stat, FLCE_COEF_TARGET * rows->stat_pitch + i, target);
    flce_store(coef, stat, FLCE_COEF_SMOOTH * rows->stat_pitch + i, smooth);
    flce_store(coef, stat, FLCE_COEF_VALID * rows->stat_pitch + i, valid);
  }
  return FLCE_OK;
}
