/* Backend function `divergence_rows`: how far the softmax of a row of logits is from that of a
 * teacher's, and the gradient: sums over the classes, then dz. */
#include "cpu/row_pass.h"
#include "divergence.h"

#include <float.h>

typedef struct divergence_pass {
  const flce_divergence_args* call;
  row_pass student, teacher;
  flce_jsd_series series;
} divergence_pass;

/* One row: what belongs to both logits, student first, and one span of them. */
typedef struct divergence_row {
  int64_t r, i; /* row of z, index in the vectors */
  flce_logit_map maps[2];
  double offset[2], inv_sum[2]; /* statistics */
  double base[2];               /* taken from the logits before they are compared */
  double shift; /* lse of the student minus that of the teacher, without the bases */
  double sums[FLCE_DIVERGENCE_SUMS];
  row_part parts[2];
} divergence_row;

static void open_divergence_row(const divergence_pass* pass, int64_t r, int64_t i,
                                divergence_row* row) {
  const row_pass* sides[] = {&pass->student, &pass->teacher};
  row->r = r;
  row->i = i;
  for (int k = 0; k < 2; k++) {
    row->maps[k] = flce_cpu_map_of_row(sides[k], i);
    row->offset[k] = row_stat(sides[k], FLCE_STAT_OFFSET, i);
    row->inv_sum[k] = row_stat(sides[k], FLCE_STAT_INV_SUM, i);
  }
  const double lse[] = {row_stat(sides[0], FLCE_STAT_LSE, i), row_stat(sides[1], FLCE_STAT_LSE, i)};
  for (int k = 0; k < 2; k++) row->base[k] = flce_divergence_base(lse[k], lse[1 - k]);
  /* The difference of two rounded lse would have the error of large lse. Where all l of a rank are
   * -inf INV_SUM is 0. */
  row->shift = row->inv_sum[0] > 0.0 && row->inv_sum[1] > 0.0
                   ? (row->offset[0] - row->base[0]) - (row->offset[1] - row->base[1]) +
                         log(row->inv_sum[1] / row->inv_sum[0])
                   : (lse[0] - row->base[0]) - (lse[1] - row->base[1]);
}

/* l and exp(l - c) of both logits, in columns [begin, end). */
static void load_span(const divergence_pass* pass, divergence_row* row, int64_t begin,
                      int64_t end) {
  const row_pass* sides[] = {&pass->student, &pass->teacher};
  for (int k = 0; k < 2; k++) {
    row_part* part = &row->parts[k];
    flce_cpu_transform(sides[k], &row->maps[k], row_z(sides[k], row->r), begin, end, part);
    sides[k]->l_kernels->exp_sum(&part->e, &part->l, NULL, row->offset[k], part->count);
  }
}

/* The span's part of the sums or, with `writes`, dz in place of the student's e. `own`: the hard
 * label's column in the span, if it is there; `factor`: the row's a k. Subnormal results become 0,
 * as in grad_rows. */
INLINE void divergence_span(flce_dtype stat, const divergence_pass* pass, divergence_row* row,
                            bool writes, int64_t own, double factor) {
  const flce_divergence_args* call = pass->call;
  row_part *s = &row->parts[0], *t = &row->parts[1];
  double hard = call->hard_weight, value = 0.0, sum = 0.0, mass = 0.0;
  double mean = row->sums[FLCE_DIVERGENCE_MEAN];
  double smallest = stat == FLCE_F64 ? DBL_MIN : FLT_MIN;
  bool capped = row->maps[0].curve != FLCE_LINE;
  for (int64_t j = 0; j < s->count; j++) {
    double p = flce_load(&s->e, stat, j) * row->inv_sum[0];
    double q = flce_load(&t->e, stat, j) * row->inv_sum[1];
    double d = flce_load(&s->l, stat, j) - row->base[0];
    d -= flce_load(&t->l, stat, j) - row->base[1];
    d -= row->shift;
    double term, grad_term = flce_divergence_terms(call->divergence, call->beta, pass->series.log_m,
                                                   pass->series.value, p, q, d, &term);
    if (writes) {
      bool is_own = hard > 0.0 && j == own; /* p_y - 1 would cancel where p_y is near 1 */
      double dz = factor * ((1.0 - hard) * (grad_term - mean * p) + (is_own ? 0.0 : hard * p));
      if (capped) dz *= flce_load(&s->slope, stat, j);
      if (is_own) dz += hard * row_coef(&pass->student, FLCE_COEF_TARGET, row->i);
      flce_store(&s->e, stat, j, fabs(dz) < smallest ? 0.0 : dz);
    } else {
      value += term;
      sum += grad_term;
      mass += p;
    }
  }
  if (writes) return;
  row->sums[FLCE_DIVERGENCE_VALUE] += value;
  row->sums[FLCE_DIVERGENCE_MEAN] += sum;
  row->sums[FLCE_DIVERGENCE_MASS] += mass;
}

/* a k: EXP without INV_SUM; 0 where all l of a rank are -inf. */
static double row_gradient_factor(const divergence_pass* pass, const divergence_row* row) {
  double inv_sum = row->inv_sum[0];
  return inv_sum > 0.0 ? row_coef(&pass->student, FLCE_COEF_EXP, row->i) / inv_sum : 0.0;
}

/* The sums of a row over its classes or, with `writes`, its dz. */
static void pass_over(const divergence_pass* pass, divergence_row* row, bool writes) {
  const row_pass* student = &pass->student;
  const flce_rows* rows = student->rows;
  int64_t y = rows->target[row->i];
  double factor = writes ? row_gradient_factor(pass, row) : 0.0;
  for (int64_t begin = 0, end; begin < rows->vocab; begin = end) {
    end = row_span_end(begin, rows->vocab);
    load_span(pass, row, begin, end);
    BY_STAT(student->stat, divergence_span, pass, row, writes, y - begin, factor);
    if (writes)
      student->z_blocks->narrow(flce_at(row_out(student, row->r), student->dtype, begin),
                                &row->parts[0].e, end - begin);
  }
}

/* Replaces INV_SUM by 1 / an upper bound of the row's sum of |dz|. */
static void store_inverse_bound(const divergence_pass* pass, const divergence_row* row) {
  const flce_divergence_args* call = pass->call;
  const row_pass* student = &pass->student;
  const double* sums = row->sums;
  double hard = call->hard_weight, factor = row_gradient_factor(pass, row);
  double rest = hard > 0.0 ? -expm1(-row_stat(student, FLCE_STAT_NLL, row->i)) : 0.0; /* 1 - p_y */
  double bound = flce_gradient_bound(call->divergence, call->beta, sums[FLCE_DIVERGENCE_VALUE],
                                     sums[FLCE_DIVERGENCE_MEAN]);
  bound = fabs(factor) * ((1.0 - hard) * bound + 2.0 * hard * rest);
  flce_store(student->rows->stats, student->stat,
             FLCE_STAT_INV_SUM * student->rows->stat_pitch + row->i,
             bound > 0.0 ? 1.0 / bound : 0.0);
}

static void divergence_range(int64_t begin, int64_t end, void* context) {
  const divergence_pass* pass = context;
  const flce_divergence_args* call = pass->call;
  const flce_rows* rows = call->student;
  flce_dtype stat = pass->student.stat;
  divergence_row row;
  for (int64_t r = begin; r < end; r++) {
    int64_t i = flce_row_index(rows, r);
    flce_row_kind kind = flce_row_kind_at(rows, i);
    bool valid = kind == FLCE_ROW_VALID, writes = call->writes && rows->out;
    if (valid) open_divergence_row(pass, r, i, &row);
    flce_fill(row.sums, FLCE_F64, 0.0, FLCE_DIVERGENCE_SUMS);
    if (valid && call->sums) pass_over(pass, &row, false);
    for (int k = 0; valid && call->partial && k < FLCE_DIVERGENCE_SUMS; k++) {
      int64_t at = k * rows->rows + r;
      if (call->sums) flce_store(call->partial, stat, at, row.sums[k]);
      if (!call->sums) row.sums[k] = flce_load(call->partial, stat, at);
    }
    if (valid && call->writes) {
      row.sums[FLCE_DIVERGENCE_MEAN] = flce_divergence_mean(
          call->divergence, row.sums[FLCE_DIVERGENCE_MEAN], row.sums[FLCE_DIVERGENCE_MASS]);
      double hard = call->hard_weight, token = row_factor(rows->token_weight, stat, i);
      double loss = (1.0 - hard) * token * row.sums[FLCE_DIVERGENCE_VALUE];
      if (hard > 0.0) loss += hard * flce_load(rows->loss, stat, i);
      flce_store(rows->loss, stat, i, loss);
    }
    if (!writes) continue;
    if (valid)
      pass_over(pass, &row, true);
    else
      flce_cpu_fill_row(&pass->student, r, kind == FLCE_ROW_OUT_OF_RANGE ? NAN : 0.0);
    flce_cpu_pad_row(&pass->student, row_out(&pass->student, r), rows->out_columns);
    if (valid && call->stores_bound) store_inverse_bound(pass, &row);
  }
}

flce_status flce_cpu_divergence_rows(void* self, const flce_divergence_args* call) {
  divergence_pass pass = {.call = call, .series = flce_jsd_series_of(call->beta)};
  FLCE_TRY(flce_check_divergence(call->divergence));
  FLCE_TRY(flce_cpu_make_row_pass(call->student, call->student->out != NULL, &pass.student));
  FLCE_TRY(flce_cpu_make_row_pass(call->teacher, false, &pass.teacher));
  flce_cpu_parallel(self, call->student->rows, call->student->vocab, divergence_range, &pass);
  return FLCE_OK;
}
