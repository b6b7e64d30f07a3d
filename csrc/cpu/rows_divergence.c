/* Backend function `divergence_rows`: how far the softmax p of a row of logits is from q, that of a
 * teacher's, and its gradient. Two passes over a row: the sums over the classes, then dz. */
#include "cpu/row_pass.h"

#include <float.h>
#include <math.h>

typedef struct divergence_pass {
  const flce_divergence_args* call;
  row_pass student, teacher;
} divergence_pass;

/* A row as both passes see it. */
typedef struct divergence_row {
  int64_t r, i; /* row of z, index in the vectors */
  flce_logit_map map, teacher_map;
  double offset, teacher_offset, inv_sum, teacher_inv_sum; /* of the statistics */
  double shift;                                            /* lse of p minus that of q */
  double sums[FLCE_DIVERGENCE_SUMS];
} divergence_row;

/* Up to this |x| differences are made from power series: beyond it p - q has lost at most three
 * bits to cancellation. */
static const double kNear = 0.25;

/* (exp(x) - 1 - x) / x^2 for |x| <= kNear; the first term left out is x^13/15!. */
INLINE double square_part(double x) {
  double sum = 0.0, inverse = 1.0 / 87178291200.0; /* 1/14! */
  for (int k = 14; k >= 2; k--) {
    sum = sum * x + inverse;
    inverse *= k;
  }
  return sum;
}

/* b = log(m / p) and, in *a, log(m / q), from d = log(p / q); the logarithms of numbers in
 * (min(beta, 1 - beta), 1]. */
INLINE double log_mixture(double beta, double d, double* a) {
  double near = expm1(-fabs(d));
  if (d > 0.0) {
    double b = log1p(beta * near);
    *a = b + d;
    return b;
  }
  *a = log1p((1.0 - beta) * near);
  return *a - d;
}

/* The term of VALUE, none of which is negative; their sums over all classes are the divergences, as
 * p, q and m sum to the same. A term of p or q alone is 0 where that is 0. */
INLINE double value_of(flce_divergence kind, double beta, double p, double q, double d) {
  bool near = fabs(d) <= kNear;
  if (kind == FLCE_FORWARD_KL)
    return near ? q * d * d * square_part(d) : p - q - (q > 0.0 ? q * d : 0.0);
  if (kind == FLCE_REVERSE_KL)
    return near ? p * d * d * square_part(-d) : q - p + (p > 0.0 ? p * d : 0.0);
  double a, b = log_mixture(beta, d, &a), rest = 1.0 - beta;
  if (near) return beta * q * a * a * square_part(a) + rest * p * b * b * square_part(b);
  return -(q > 0.0 ? beta * q * a : 0.0) - (p > 0.0 ? rest * p * b : 0.0);
}

/* p times the derivative of the divergence by p, up to a constant; of the forward KL the gradient
 * p - q itself. */
INLINE double pull_of(flce_divergence kind, double beta, double p, double q, double d) {
  if (kind == FLCE_FORWARD_KL) return fabs(d) <= kNear ? q * (d + d * d * square_part(d)) : p - q;
  if (p == 0.0) return 0.0;
  double a;
  return p * (kind == FLCE_REVERSE_KL ? d : -(1.0 - beta) * log_mixture(beta, d, &a));
}

INLINE void sum_span(flce_dtype stat, flce_divergence kind, const divergence_pass* pass,
                     divergence_row* row, const row_part* s, const row_part* t) {
  double beta = pass->call->beta;
  for (int64_t j = 0; j < s->count; j++) {
    double p = flce_load(&s->e, stat, j) * row->inv_sum;
    double q = flce_load(&t->e, stat, j) * row->teacher_inv_sum;
    double d = flce_load(&s->l, stat, j) - flce_load(&t->l, stat, j) - row->shift;
    row->sums[FLCE_DIVERGENCE_VALUE] += value_of(kind, beta, p, q, d);
    if (kind != FLCE_FORWARD_KL)
      row->sums[FLCE_DIVERGENCE_MEAN] += pull_of(kind, beta, p, q, d);
  }
}

/* s->e becomes dz; `factor`: the row's a k. Subnormal results become 0, as in grad_rows. */
INLINE void grad_span(flce_dtype stat, flce_divergence kind, const divergence_pass* pass,
                      const divergence_row* row, double factor, row_part* s, const row_part* t) {
  double beta = pass->call->beta, hard = pass->call->hard_weight;
  double mean = row->sums[FLCE_DIVERGENCE_MEAN], smallest = stat == FLCE_F64 ? DBL_MIN : FLT_MIN;
  bool capped = row->map.curve != FLCE_LINE;
  for (int64_t j = 0; j < s->count; j++) {
    double p = flce_load(&s->e, stat, j) * row->inv_sum;
    double q = flce_load(&t->e, stat, j) * row->teacher_inv_sum;
    double d = flce_load(&s->l, stat, j) - flce_load(&t->l, stat, j) - row->shift;
    double g = pull_of(kind, beta, p, q, d) - (kind == FLCE_FORWARD_KL ? 0.0 : p * mean);
    double value = factor * ((1.0 - hard) * g + hard * p);
    if (capped) value *= flce_load(&s->slope, stat, j);
    flce_store(&s->e, stat, j, fabs(value) < smallest ? 0.0 : value);
  }
}

#define BY_KIND(kind, function, stat, ...)                                               \
  ((kind) == FLCE_FORWARD_KL   ? function(stat, FLCE_FORWARD_KL, __VA_ARGS__)            \
   : (kind) == FLCE_REVERSE_KL ? function(stat, FLCE_REVERSE_KL, __VA_ARGS__)            \
                               : function(stat, FLCE_JSD, __VA_ARGS__))

static void sum_of(flce_dtype stat, const divergence_pass* pass, divergence_row* row,
                   const row_part* s, const row_part* t) {
  if (stat == FLCE_F64)
    BY_KIND(pass->call->divergence, sum_span, FLCE_F64, pass, row, s, t);
  else
    BY_KIND(pass->call->divergence, sum_span, FLCE_F32, pass, row, s, t);
}

static void grad_of(flce_dtype stat, const divergence_pass* pass, const divergence_row* row,
                    double factor, row_part* s, const row_part* t) {
  if (stat == FLCE_F64)
    BY_KIND(pass->call->divergence, grad_span, FLCE_F64, pass, row, factor, s, t);
  else
    BY_KIND(pass->call->divergence, grad_span, FLCE_F32, pass, row, factor, s, t);
}

/* l and exp(l - c) of both logits, in columns [begin, end). */
static void load_span(const divergence_pass* pass, const divergence_row* row, int64_t begin,
                      int64_t end, row_part* s, row_part* t) {
  flce_cpu_transform(&pass->student, &row->map, row_z(&pass->student, row->r), begin, end, s);
  flce_cpu_transform(&pass->teacher, &row->teacher_map, row_z(&pass->teacher, row->r), begin, end,
                     t);
  pass->student.l_kernels->exp_sum(&s->e, &s->l, NULL, row->offset, s->count);
  pass->teacher.l_kernels->exp_sum(&t->e, &t->l, NULL, row->teacher_offset, t->count);
}

static divergence_row open_divergence_row(const divergence_pass* pass, int64_t r, int64_t i) {
  const row_pass *s = &pass->student, *t = &pass->teacher;
  divergence_row row = {.r = r,
                        .i = i,
                        .map = flce_cpu_map_of_row(s, i),
                        .teacher_map = flce_cpu_map_of_row(t, i),
                        .offset = row_stat(s, FLCE_STAT_OFFSET, i),
                        .teacher_offset = row_stat(t, FLCE_STAT_OFFSET, i),
                        .inv_sum = row_stat(s, FLCE_STAT_INV_SUM, i),
                        .teacher_inv_sum = row_stat(t, FLCE_STAT_INV_SUM, i)};
  /* The difference of two rounded lse would have the error of large lse. A rank of a sharded
   * vocabulary whose l are all -inf has INV_SUM 0. */
  row.shift = row.inv_sum > 0.0 && row.teacher_inv_sum > 0.0
                  ? row.offset - row.teacher_offset + log(row.teacher_inv_sum / row.inv_sum)
                  : row_stat(s, FLCE_STAT_LSE, i) - row_stat(t, FLCE_STAT_LSE, i);
  return row;
}

static void write_gradient(const divergence_pass* pass, const divergence_row* row) {
  const row_pass* student = &pass->student;
  const flce_rows* rows = student->rows;
  void* out = row_out(student, row->r);
  int64_t y = rows->target[row->i];
  double factor = row_coef(student, FLCE_COEF_ROW, row->i) / row->inv_sum;
  row_part s, t;
  if (!(row->inv_sum > 0.0)) factor = 0.0;
  for (int64_t begin = 0, end; begin < rows->vocab; begin = end) {
    end = row_span_end(begin, rows->vocab);
    load_span(pass, row, begin, end, &s, &t);
    double hard = pass->call->hard_weight;
    bool has_target = hard > 0.0 && y >= begin && y < end;
    if (has_target) { /* p_y - 1 would cancel where p_y is near 1 */
      double own = flce_load(&s.e, student->stat, y - begin) * row->inv_sum;
      double slope = row->map.curve != FLCE_LINE ? flce_load(&s.slope, student->stat, y - begin) : 1;
      grad_of(student->stat, pass, row, factor, &s, &t);
      double value = flce_load(&s.e, student->stat, y - begin) - factor * slope * hard * own;
      flce_store(&s.e, student->stat, y - begin,
                 value + hard * row_coef(student, FLCE_COEF_TARGET, row->i));
    } else {
      grad_of(student->stat, pass, row, factor, &s, &t);
    }
    student->z_blocks->narrow(flce_at(out, student->dtype, begin), &s.e, s.count);
  }
}

static void write_loss(const divergence_pass* pass, const divergence_row* row) {
  const flce_rows* rows = pass->student.rows;
  flce_dtype stat = pass->student.stat;
  double hard = pass->call->hard_weight, token = row_factor(rows->token_weight, stat, row->i);
  double loss = (1.0 - hard) * token * row->sums[FLCE_DIVERGENCE_VALUE];
  if (hard > 0.0) loss += hard * flce_load(rows->loss, stat, row->i);
  flce_store(rows->loss, stat, row->i, loss);
}

static void divergence_range(int64_t begin, int64_t end, void* context) {
  const divergence_pass* pass = context;
  const flce_divergence_args* call = pass->call;
  const flce_rows* rows = call->student;
  flce_dtype stat = pass->student.stat;
  for (int64_t r = begin; r < end; r++) {
    int64_t i = flce_row_index(rows, r);
    flce_row_kind kind = flce_row_kind_at(rows, i);
    bool valid = kind == FLCE_ROW_VALID;
    double blank = kind == FLCE_ROW_OUT_OF_RANGE ? NAN : 0.0;
    divergence_row row = {0};
    if (valid) row = open_divergence_row(pass, r, i);
    if (!valid) flce_fill(row.sums, FLCE_F64, blank, FLCE_DIVERGENCE_SUMS);
    for (int64_t j = 0, next; call->sums && valid && j < rows->vocab; j = next) {
      row_part s, t;
      next = row_span_end(j, rows->vocab);
      load_span(pass, &row, j, next, &s, &t);
      sum_of(stat, pass, &row, &s, &t);
    }
    for (int k = 0; call->partial && kind != FLCE_ROW_ABSENT && k < FLCE_DIVERGENCE_SUMS; k++) {
      int64_t at = k * rows->stat_pitch + i;
      if (call->sums) flce_store(call->partial, stat, at, row.sums[k]);
      if (!call->sums) row.sums[k] = flce_load(call->partial, stat, at);
    }
    if (!call->writes) continue;
    if (valid) write_loss(pass, &row);
    if (!rows->out) continue;
    if (valid) write_gradient(pass, &row);
    if (!valid) flce_cpu_fill_row(&pass->student, r, blank);
    flce_cpu_pad_row(&pass->student, row_out(&pass->student, r), rows->out_columns);
  }
}

flce_status flce_cpu_divergence_rows(void* self, const flce_divergence_args* call) {
  divergence_pass pass = {.call = call};
  FLCE_TRY(flce_cpu_make_row_pass(call->student, call->student->out != NULL, &pass.student));
  FLCE_TRY(flce_cpu_make_row_pass(call->teacher, false, &pass.teacher));
  if (pass.student.stat != pass.teacher.stat)
    return flce_fail(FLCE_UNSUPPORTED, "divergence_rows: expected logits of one stat dtype");
  flce_cpu_parallel(self, call->student->rows, call->student->vocab, divergence_range, &pass);
  return FLCE_OK;
}
