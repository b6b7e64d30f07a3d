/* Backend functions `stat_rows` and `exp_rows`: the statistics of a row's logits, its loss, and E =
 * exp(l - c). This file holds the plain path (l = z + bias) and the storing of results for both
 * paths; the general path is in rows_general.c.
 *
 * A thread processes whole rows, and the sums of a row run in one order, so no result depends on
 * the number of threads. Row scalars are double and are rounded when they are stored. */
#include "cpu/row_pass.h"

#include <math.h>

static double logit(const row_pass* pass, const void* z, int64_t j) {
  double value = flce_load(z, pass->dtype, j);
  if (!pass->rows->bias) return value;
  double sum = value + flce_load(pass->rows->bias, pass->stat, j);
  return pass->stat == FLCE_F64 ? sum : (double)(float)sum;
}

static double max_span(const row_pass* pass, const void* z, int64_t begin, int64_t end) {
  return pass->kernels->max(flce_const_at(z, pass->dtype, begin),
                            row_from(pass, pass->rows->bias, begin), end - begin);
}

static double exp_span(const row_pass* pass, void* out, const void* z, double offset, int64_t begin,
                       int64_t end) {
  if (begin >= end) return 0.0;
  return pass->kernels->exp_sum(out ? flce_at(out, pass->dtype, begin) : NULL,
                                flce_const_at(z, pass->dtype, begin),
                                row_from(pass, pass->rows->bias, begin), offset, end - begin);
}

/* As exp_span over [begin, end), without column `skip`; returns the sum over the other columns. */
static double exp_span_without(const row_pass* pass, void* out, const void* z, double offset,
                               int64_t begin, int64_t end, int64_t skip) {
  if (skip < begin || skip >= end) return exp_span(pass, out, z, offset, begin, end);
  return exp_span(pass, out, z, offset, begin, skip) +
         exp_span(pass, out, z, offset, skip + 1, end);
}

/* Reads the row from memory once (online softmax): each span is read for its maximum and again,
 * from the cache, for its sum of exp. The sum so far is rescaled when the maximum grows. */
static double online_sum(const row_pass* pass, const void* z, int64_t target, double* offset) {
  int64_t vocab = pass->rows->vocab;
  double largest = -INFINITY, sum = 0.0;
  for (int64_t begin = 0, end; begin < vocab; begin = end) {
    end = row_span_end(begin, vocab);
    double top = max_span(pass, z, begin, end);
    if (top > largest) {
      sum *= exp(largest - top);
      largest = top;
    }
    /* While all logits are -inf any finite shift is correct; the shift -inf would give -inf - -inf
     * = NaN. */
    double shift = largest == -INFINITY ? 0.0 : largest;
    sum += exp_span_without(pass, NULL, z, shift, begin, end, target);
  }
  *offset = largest;
  return sum;
}

/* Reads the row twice and writes exp. `out` may alias z, so everything that is needed of z is read
 * before it is overwritten. */
static double written_sum(const row_pass* pass, void* out, const void* z, int64_t target,
                          double offset) {
  int64_t vocab = pass->rows->vocab;
  double sum = 0.0;
  for (int64_t begin = 0, end; begin < vocab; begin = end) {
    end = row_span_end(begin, vocab);
    sum += exp_span_without(pass, out, z, offset, begin, end, target);
  }
  flce_store(out, pass->dtype, target, 0.0);
  return sum;
}

/* sum_j w_j (offset - z_j) over the columns of [begin, end) whose weight is not 0. */
static double weighted_gap(const row_pass* pass, const void* z, double offset, int64_t begin,
                           int64_t end) {
  double sum = 0.0;
  for (int64_t j = begin; j < end; j++) {
    double weight = flce_load(pass->rows->class_weight, pass->stat, j);
    if (weight != 0.0) sum += weight * (offset - logit(pass, z, j));
  }
  return sum;
}

/* sum_j w_j (offset - z_j) over the row, for label smoothing. */
static double weighted_gap_sum(const row_pass* pass, const void* z, double offset) {
  const flce_rows* rows = pass->rows;
  double sum = 0.0;
  for (int64_t begin = 0, end; begin < rows->vocab; begin = end) {
    end = row_span_end(begin, rows->vocab);
    double part = pass->kernels->weighted_gap(
        flce_const_at(z, pass->dtype, begin), row_from(pass, rows->bias, begin),
        row_from(pass, rows->class_weight, begin), offset, end - begin);
    /* A class of weight 0 adds nothing, also if its logit is -inf: a NaN sum is computed again
     * without such classes. */
    sum += isnan(part) && rows->class_weight ? weighted_gap(pass, z, offset, begin, end) : part;
  }
  return sum;
}

/* ---- statistics ---- */

static void store_stats(const flce_rows* rows, flce_dtype stat, int64_t i,
                        const double values[FLCE_STAT_COUNT]) {
  for (int64_t k = 0; k < FLCE_STAT_COUNT; k++)
    flce_store(rows->stats, stat, k * rows->stat_pitch + i, values[k]);
}

/* Stores the statistics of a row that is ignored (value 0) or whose target is out of range (value
 * NaN). */
void flce_cpu_blank_stats(const flce_rows* rows, flce_dtype stat, int64_t i, double value) {
  double values[FLCE_STAT_COUNT];
  flce_fill(values, FLCE_F64, value, FLCE_STAT_COUNT);
  store_stats(rows, stat, i, values);
  if (rows->loss) flce_store(rows->loss, stat, i, value);
  if (rows->predictions) rows->predictions[i] = -1;
}

/* The plain path: l = z + bias and a class target; runs the row kernels of z's own dtype. */
static void plain_sums(const row_pass* pass, int64_t r, int64_t y, row_sums* sums) {
  const flce_rows* rows = pass->rows;
  const void* z = row_z(pass, r);
  double smoothing = rows->options.label_smoothing;
  *sums = (row_sums){.l_y = logit(pass, z, y), .slope_y = 1.0};
  if (pass->write_exp)
    sums->offset = max_span(pass, z, 0, rows->vocab);
  else
    sums->rest = online_sum(pass, z, y, &sums->offset);
  flce_cpu_bound_offset(sums);
  if (smoothing > 0.0) {
    double per_class = smoothing / (double)rows->vocab;
    sums->weighted_gap = per_class * weighted_gap_sum(pass, z, sums->offset);
    sums->weight_sum = per_class * flce_load(rows->scalars, pass->stat, FLCE_SCALAR_WEIGHT_TOTAL);
  }
  if (pass->write_exp) sums->rest = written_sum(pass, row_out(pass, r), z, y, sums->offset);
}

/* A class of weight 0 gives the loss 0, also if its logit is -inf; a NaN is kept. */
static double hard_loss(double factor, double nll) {
  return factor == 0.0 && nll == (double)INFINITY ? 0.0 : factor * nll;
}

/* Computes and stores the results of row i. y: the class target, -1 if the target is
 * probabilities. */
static void store_row(const row_pass* pass, int64_t i, int64_t y, const row_sums* sums) {
  const flce_rows* rows = pass->rows;
  const flce_loss* options = &rows->options;
  double e_y = y >= 0 ? exp(sums->l_y - sums->offset) : 0.0, sum = sums->rest + e_y;
  double log_sum = log(sum), nll = 0.0, loss = sums->weighted_gap + sums->weight_sum * log_sum;
  if (y >= 0) {
    /* If the target's probability is near 1, ln S - (l_y - c) cancels; log1p keeps small losses
     * accurate. */
    nll = sums->rest <= e_y ? log1p(sums->rest / e_y) : log_sum + (sums->offset - sums->l_y);
    double factor = row_factor(rows->class_weight, pass->stat, y);
    loss += hard_loss((1.0 - options->label_smoothing) * factor, nll);
  }
  double lse = sums->offset + log_sum, entropy = 0.0;
  if (options->z_loss != 0.0)
    loss +=
        options->z_loss * flce_load(rows->scalars, pass->stat, FLCE_SCALAR_Z_FACTOR) * lse * lse;
  if (rows->wants_entropy) { /* both terms are positive: no cancellation */
    double others = sums->largest == y ? sums->tail : sums->tail + e_y;
    double entropy_sum =
        e_y == 0.0 ? sums->entropy_sum : sums->entropy_sum + e_y * (sums->l_y - sums->offset);
    entropy = log1p(others) - entropy_sum / sum;
  }
  store_stats(rows, pass->stat, i,
              (double[]){[FLCE_STAT_LSE] = lse,
                         [FLCE_STAT_NLL] = nll,
                         [FLCE_STAT_OFFSET] = sums->offset,
                         [FLCE_STAT_INV_SUM] = 1.0 / sum,
                         [FLCE_STAT_ENTROPY] = entropy,
                         [FLCE_STAT_SLOPE] = y >= 0 ? sums->slope_y : 0.0,
                         [FLCE_STAT_WEIGHT_SUM] = y >= 0 ? 0.0 : sums->weight_sum,
                         [FLCE_STAT_TAIL_LSE] = 0.0}); /* tail_rows writes it */
  flce_store(rows->loss, pass->stat, i, row_factor(rows->token_weight, pass->stat, i) * loss);
  if (rows->predictions) rows->predictions[i] = sums->largest > 0 ? sums->largest : 0;
}

static void stat_row(const row_pass* pass, int64_t r) {
  const flce_rows* rows = pass->rows;
  int64_t i = flce_row_index(rows, r);
  flce_row_kind kind = flce_row_kind_at(rows, i);
  if (kind != FLCE_ROW_VALID) { /* the logits of such a row are not read */
    double value = kind == FLCE_ROW_OUT_OF_RANGE ? NAN : 0.0;
    if (kind != FLCE_ROW_ABSENT) flce_cpu_blank_stats(rows, pass->stat, i, value);
    if (pass->write_exp) flce_cpu_fill_row(pass, r, value);
    return;
  }
  int64_t y = rows->target ? rows->target[i] : -1;
  row_sums sums;
  if (pass->general)
    flce_cpu_general_sums(pass, r, i, y, &sums);
  else
    plain_sums(pass, r, y, &sums);
  store_row(pass, i, y, &sums);
  if (pass->general && pass->write_exp) flce_cpu_general_gradient(pass, r, i, y);
}

static void stat_range(int64_t begin, int64_t end, void* context) {
  const row_pass* pass = context;
  const flce_rows* rows = pass->rows;
  for (int64_t r = begin; r < end; r++) {
    stat_row(pass, r);
    if (pass->write_exp)
      flce_cpu_pad_row(pass, row_out(pass, r), rows->out_columns);
    else
      flce_cpu_pad_row(pass, (void*)row_z(pass, r), rows->z_columns);
  }
}

static flce_status make_stat_pass(const flce_rows* rows, bool writes, row_pass* pass) {
  FLCE_TRY(flce_cpu_make_row_pass(rows, writes, pass));
  pass->general |= rows->wants_entropy || rows->predictions;
  pass->write_exp = writes;
  pass->scale = 1.0;
  pass->hide_target = true;
  return FLCE_OK;
}

flce_status flce_cpu_stat_rows(void* self, const flce_rows* rows) {
  row_pass pass;
  FLCE_TRY(make_stat_pass(rows, false, &pass));
  flce_cpu_parallel(self, rows->rows, rows->vocab, stat_range, &pass);
  return FLCE_OK;
}

flce_status flce_cpu_exp_rows(void* self, const flce_rows* rows) {
  flce_rows exp_view = *rows;
  exp_view.coef =
      NULL; /* exp_rows writes exp, even if the caller's view has coefficients for a gradient */
  row_pass pass;
  FLCE_TRY(make_stat_pass(&exp_view, true, &pass));
  if (rows->probabilities)
    return flce_fail(FLCE_UNSUPPORTED, "exp_rows: expected class targets, got probabilities");
  flce_cpu_parallel(self, rows->rows, rows->vocab, stat_range, &pass);
  return FLCE_OK;
}
