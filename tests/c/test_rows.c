/* The row passes of every variant compared with a definition in double: statistics, loss, E,
 * gradient rows and coefficients; tails, dtypes, leading dimensions, in place, ignored rows,
 * threads. */
#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* PAD elements separate two rows; a pass writes the first ZEROS of them. */
enum { ROWS = 7, IGNORED_ROW = 2, IGNORE_INDEX = -100, PAD = 3, ZEROS = 2, SENTINEL = 0x5a };

/* Distributions of a row's logits. */
enum { FLAT, PEAKED, EXTREME, MASKED, GAP, KINDS };

typedef struct setting {
  flce_dtype dtype;
  int64_t vocab;
  int kind;
  bool bias, weight, in_place;
  double smoothing;
} setting;

typedef struct data {
  flce_dtype stat;
  int64_t z_count, pitch;
  void *z, *bias, *weight, *scalars, *grad_output;
  int64_t target[ROWS];
} data;

/* The outputs of a pass. */
typedef struct result {
  void *out, *stats, *loss, *coef;
} result;

/* The definition of a row's results, in double. */
typedef struct truth {
  double *logit, *e, c, rest, sum, nll, loss;
  double rest_error; /* relative error of rest: a difference z - c is rounded before exp */
} truth;

static double draw_logit(const setting* s, int64_t row, int64_t j, int64_t target) {
  static const double weighted_gaps[] = {80.0, 90.0, 1000.0};
  switch (s->kind) {
    case PEAKED: /* the target leads in even rows, by more and more */
      return test_normal() + (j == target && row % 2 == 0 ? 5.0 * (double)(row + 1) : 0.0);
    case EXTREME:
      return test_uniform(-1000.0, 1000.0);
    case MASKED:
      return j != target && test_random() % 3 == 0 ? -INFINITY : 4.0 * test_normal();
    case GAP: /* values of z_max - z_y, all representable in float16 */
      return j == target ? -weighted_gaps[row % 3] : 0.25 * (double)(j % 2);
    default:
      return test_normal();
  }
}

static data make_data(const setting* s) {
  int64_t v = s->vocab;
  data d = {.stat = flce_stat_dtype(s->dtype), .pitch = v + PAD};
  d.z_count = ROWS * d.pitch;
  d.z = test_buffer(s->dtype, d.z_count);
  memset(d.z, SENTINEL, (size_t)(d.z_count * flce_size_of(s->dtype)));
  d.bias = test_fill_normal(d.stat, v, 1.0);
  d.weight = test_buffer(d.stat, v);
  for (int64_t j = 0; j < v; j++) flce_store(d.weight, d.stat, j, test_uniform(0.25, 4.0));
  for (int64_t i = 0; i < ROWS; i++) {
    d.target[i] = i == 0 ? v - 1 : i == 1 ? 0 : (int64_t)(test_random() % (uint64_t)v);
    for (int64_t j = 0; j < v; j++) {
      double value = i == IGNORED_ROW ? NAN : draw_logit(s, i, j, d.target[i]);
      flce_store(d.z, s->dtype, i * d.pitch + j, value);
    }
  }
  d.target[IGNORED_ROW] = IGNORE_INDEX;
  d.scalars = test_buffer(d.stat, FLCE_SCALAR_COUNT);
  d.grad_output = test_buffer(d.stat, ROWS);
  for (int64_t i = 0; i < ROWS; i++) flce_store(d.grad_output, d.stat, i, test_uniform(-3.0, 3.0));
  return d;
}

static void free_data(data* d) {
  free(d->z);
  free(d->bias);
  free(d->weight);
  free(d->scalars);
  free(d->grad_output);
}

static double weight_of(const setting* s, const data* d, int64_t j) {
  return s->weight ? flce_load(d->weight, d->stat, j) : 1.0;
}

static truth make_truth(const setting* s, const data* d, int64_t i) {
  int64_t v = s->vocab, y = d->target[i];
  truth t = {.logit = malloc(sizeof(double) * (size_t)v), .e = malloc(sizeof(double) * (size_t)v)};
  t.c = -INFINITY;
  for (int64_t j = 0; j < v; j++) {
    double z = flce_load(d->z, s->dtype, i * d->pitch + j);
    if (s->bias) z += flce_load(d->bias, d->stat, j);
    t.logit[j] = d->stat == FLCE_F32 ? (double)(float)z : z;
    t.c = fmax(t.c, t.logit[j]);
  }
  double total = 0.0, weighted_gap = 0.0;
  for (int64_t j = 0; j < v; j++) {
    t.e[j] = exp(t.logit[j] - t.c);
    if (j != y) {
      t.rest += t.e[j];
      if (t.e[j] > 0.0) t.rest_error += t.e[j] * (t.c - t.logit[j] + 4.0);
    }
    total += weight_of(s, d, j);
    weighted_gap += weight_of(s, d, j) * (t.c - t.logit[j]);
  }
  /* The largest number of terms that one accumulator adds. */
  double chain = d->stat == FLCE_F64 ? (double)v : (double)(v < 2048 ? v : 2048) / 32.0;
  t.rest_error = t.rest > 0.0 ? 2.0 * t.rest_error / t.rest : 1.0;
  t.rest_error = test_epsilon(d->stat) * (t.rest_error + chain);
  t.sum = t.rest + t.e[y];
  t.nll = t.rest <= t.e[y] ? log1p(t.rest / t.e[y]) : log(t.sum) + (t.c - t.logit[y]);
  t.loss = (1.0 - s->smoothing) * weight_of(s, d, y) * t.nll;
  if (s->smoothing > 0.0) t.loss += s->smoothing / (double)v * (weighted_gap + total * log(t.sum));
  return t;
}

static void free_truth(truth* t) {
  free(t->logit);
  free(t->e);
}

static result make_result(const setting* s, const data* d) {
  result r = {test_buffer(s->dtype, d->z_count), test_buffer(d->stat, FLCE_STAT_ROWS * ROWS),
              test_buffer(d->stat, ROWS), test_buffer(d->stat, FLCE_COEF_ROWS * ROWS)};
  memset(r.out, SENTINEL, (size_t)(d->z_count * flce_size_of(s->dtype)));
  if (s->in_place) memcpy(r.out, d->z, (size_t)(d->z_count * flce_size_of(s->dtype)));
  return r;
}

static void free_result(result* r) {
  free(r->out);
  free(r->stats);
  free(r->loss);
  free(r->coef);
}

static flce_rows view_of(const setting* s, const data* d, const result* r) {
  return (flce_rows){.rows = ROWS,
                     .vocab = s->vocab,
                     .z = s->in_place ? r->out : d->z,
                     .z_dtype = s->dtype,
                     .z_pitch = d->pitch,
                     .z_columns = s->vocab,
                     .bias = s->bias ? d->bias : NULL,
                     .target = d->target,
                     .class_weight = s->weight ? d->weight : NULL,
                     .options = {.ignore_index = IGNORE_INDEX,
                                 .label_smoothing = s->smoothing,
                                 .logit_scale = 1.0,
                                 .temperature = 1.0},
                     .out = r->out,
                     .out_dtype = s->dtype,
                     .out_pitch = d->pitch,
                     .out_columns = s->vocab + ZEROS,
                     .stats = r->stats,
                     .stat_pitch = ROWS,
                     .loss = r->loss,
                     .scalars = d->scalars};
}

#define WHERE "%s %s vocab %lld kind %d bias %d weight %d smoothing %g in place %d row %lld"
#define WHERE_VALUES(s, i)                                                                      \
  flce_cpu_variant(), flce_dtype_name((s)->dtype), (long long)(s)->vocab, (s)->kind, (s)->bias, \
      (s)->weight, (s)->smoothing, (s)->in_place, (long long)(i)

static double stat_of(const data* d, const result* r, int which, int64_t i) {
  return flce_load(r->stats, d->stat, which * ROWS + i);
}

static void check_stats(const setting* s, const data* d, const result* r) {
  for (int64_t i = 0; i < ROWS; i++) {
    double lse = stat_of(d, r, FLCE_STAT_LSE, i), nll = stat_of(d, r, FLCE_STAT_NLL, i);
    double c = stat_of(d, r, FLCE_STAT_OFFSET, i), inv_sum = stat_of(d, r, FLCE_STAT_INV_SUM, i);
    double loss = flce_load(r->loss, d->stat, i);
    if (i == IGNORED_ROW) {
      bool zeros = loss == 0.0;
      for (int k = 0; k < FLCE_STAT_ROWS; k++) zeros &= stat_of(d, r, k, i) == 0.0;
      CHECK(zeros, "ignored, " WHERE, WHERE_VALUES(s, i));
      continue;
    }
    truth t = make_truth(s, d, i);
    double error = t.rest_error + 4.0 * test_epsilon(d->stat);
    double tiny = (double)(s->vocab + 1) * test_tiny(d->stat);
    CHECK(c == t.c, "offset %g, expected %g, " WHERE, c, t.c, WHERE_VALUES(s, i));
    CHECK(test_close(lse, t.c + log(t.sum), error + error * fabs(t.c)),
          "lse %.9g, expected %.9g, " WHERE, lse, t.c + log(t.sum), WHERE_VALUES(s, i));
    CHECK(test_close(nll, t.nll, error * t.nll + tiny), "nll %.9g, expected %.9g, " WHERE, nll,
          t.nll, WHERE_VALUES(s, i));
    CHECK(stat_of(d, r, FLCE_STAT_ENTROPY, i) == 0.0 && stat_of(d, r, FLCE_STAT_SLOPE, i) == 1.0 &&
              stat_of(d, r, FLCE_STAT_WEIGHT_SUM, i) == 0.0,
          "statistics without an option, " WHERE, WHERE_VALUES(s, i));
    CHECK(test_close(inv_sum, 1.0 / t.sum, error / t.sum), "inv_sum %.9g, expected %.9g, " WHERE,
          inv_sum, 1.0 / t.sum, WHERE_VALUES(s, i));
    /* All terms of the loss are positive, so the bound is relative. */
    CHECK(test_close(loss, t.loss, 2.0 * error * t.loss + 8.0 * tiny),
          "loss %.9g, expected %.9g, " WHERE, loss, t.loss, WHERE_VALUES(s, i));
    free_truth(&t);
  }
}

/* Zeros follow a row's columns; the elements after them must be unchanged. */
static bool pad_is_right(const setting* s, const data* d, const result* r) {
  int64_t size = flce_size_of(s->dtype);
  for (int64_t i = 0; i < ROWS; i++) {
    const unsigned char* pad = (const unsigned char*)r->out + (i * d->pitch + s->vocab) * size;
    for (int64_t b = 0; b < PAD * size; b++)
      if (pad[b] != (b < ZEROS * size ? 0 : SENTINEL)) return false;
  }
  return true;
}

static double out_of(const setting* s, const data* d, const result* r, int64_t i, int64_t j) {
  return flce_load(r->out, s->dtype, i * d->pitch + j);
}

/* Whether a value is subnormal and would slow a GEMM down. float16 is excluded: it is widened
 * before its GEMMs. */
static bool denormal(const setting* s, double value) {
  return s->dtype != FLCE_F16 && value != 0.0 && fabs(value) < test_tiny(s->dtype);
}

/* out = scale * exp(z - c), with 0 in the target's column if it is hidden. */
static void check_exp(const setting* s, const data* d, const result* r, double scale, bool hidden) {
  CHECK(pad_is_right(s, d, r), "pad, " WHERE, WHERE_VALUES(s, 0));
  for (int64_t i = 0; i < ROWS; i++) {
    int64_t wrong = -1;
    if (i == IGNORED_ROW) {
      for (int64_t j = 0; j < s->vocab; j++)
        if (!(out_of(s, d, r, i, j) == 0.0)) wrong = j;
      CHECK(wrong < 0, "ignored exp, " WHERE, WHERE_VALUES(s, i));
      continue;
    }
    truth t = make_truth(s, d, i);
    for (int64_t j = 0; j < s->vocab; j++) {
      double expected = hidden && j == d->target[i] ? 0.0 : scale * t.e[j];
      double relative = test_epsilon(s->dtype) +
                        test_epsilon(d->stat) * (4.0 + (t.e[j] > 0.0 ? t.c - t.logit[j] : 0.0));
      double tolerance = relative * expected + (scale + 1.0) * test_tiny(s->dtype);
      if (!test_close(out_of(s, d, r, i, j), expected, tolerance)) wrong = j;
      if (denormal(s, out_of(s, d, r, i, j))) wrong = j;
    }
    CHECK(wrong < 0, "exp[%lld], " WHERE, (long long)wrong, WHERE_VALUES(s, i));
    free_truth(&t);
  }
}

/* out = d loss_i / d z_i times grad_output_i. */
static void check_gradient(const setting* s, const data* d, const result* r) {
  CHECK(pad_is_right(s, d, r), "pad, " WHERE, WHERE_VALUES(s, 0));
  double share = s->smoothing / (double)s->vocab, total = 0.0;
  for (int64_t j = 0; j < s->vocab; j++) total += weight_of(s, d, j);
  for (int64_t i = 0; i < ROWS; i++) {
    int64_t wrong = -1, y = d->target[i];
    truth t = {0};
    if (i != IGNORED_ROW) t = make_truth(s, d, i);
    double g = flce_load(d->grad_output, d->stat, i);
    for (int64_t j = 0; j < s->vocab; j++) {
      double actual = out_of(s, d, r, i, j), expected = 0.0, tolerance = 0.0;
      if (i != IGNORED_ROW) {
        double own = (1.0 - s->smoothing) * weight_of(s, d, y), smooth = share * weight_of(s, d, j);
        double p = t.e[j] / t.sum, away = j == y ? own * expm1(-t.nll) : own * p;
        double error =
            t.rest_error + test_epsilon(d->stat) * (16.0 + (t.e[j] > 0.0 ? t.c - t.logit[j] : 0.0));
        expected = g * (away + share * total * p - smooth);
        tolerance = fabs(g) * error * (fabs(away) + share * total * p + smooth) +
                    test_epsilon(s->dtype) * fabs(expected) +
                    (fabs(g) * (double)s->vocab * own + 2.0) * test_tiny(s->dtype);
      }
      if (!test_close(actual, expected, tolerance)) wrong = j;
      if (j != y && denormal(s, actual)) wrong = j;
    }
    CHECK(wrong < 0, "gradient[%lld], " WHERE, (long long)wrong, WHERE_VALUES(s, i));
    if (i != IGNORED_ROW) free_truth(&t);
  }
}

/* Runs a pass serially and on three threads; the results must be bitwise equal. Returns the serial
 * result. */
enum { STATS, EXP, SCALED_EXP, GRADIENT, GRADIENT_OF_EXP };
static const double kScale = 64.0;

static void run_pass(const setting* s, const data* d, int pass, int threads, result* r) {
  flce_cpu cpu = test_cpu(threads);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_rows view = view_of(s, d, r);
  flce_problem problem = {.shape.tokens = ROWS,
                          .shape.vocab = s->vocab,
                          .dtypes.gemm = s->dtype,
                          .shape.rows = ROWS,
                          .reduction = FLCE_SUM,
                          .loss = view.options};
  flce_tensors tensors = {
      .target = d->target, .class_weight = view.class_weight, .scalars = d->scalars};
  CHECK_OK(b.prepare(b.self, &problem, &tensors, NULL, 0, false));
  if (pass == EXP) {
    CHECK_OK(b.exp_rows(b.self, &view));
    return;
  }
  CHECK_OK(b.stat_rows(b.self, &view));
  if (pass == STATS) return;
  const void* unit = flce_const_at(d->scalars, d->stat, FLCE_SCALAR_INV_DENOM);
  flce_upstream upstream = {.loss = d->grad_output, .loss_stride = 1};
  CHECK_OK(b.row_coefficients(b.self, &view, NULL, &upstream, unit, r->coef));
  if (pass == SCALED_EXP) {
    CHECK_OK(b.grad_rows(b.self, &view, kScale, false, false));
    return;
  }
  if (pass == GRADIENT_OF_EXP) {
    CHECK_OK(b.grad_rows(b.self, &view, kScale, false, false));
    view.z = view.out;
  }
  view.coef = r->coef;
  CHECK_OK(b.grad_rows(b.self, &view, kScale, false, pass == GRADIENT_OF_EXP));
}

static result run_both(const setting* s, const data* d, int pass) {
  result serial = make_result(s, d), threaded = make_result(s, d);
  run_pass(s, d, pass, 1, &serial);
  run_pass(s, d, pass, 3, &threaded);
  int64_t stat = flce_size_of(d->stat);
  CHECK(test_same(serial.out, threaded.out, d->z_count * flce_size_of(s->dtype)) &&
            test_same(serial.stats, threaded.stats, FLCE_STAT_ROWS * ROWS * stat) &&
            test_same(serial.loss, threaded.loss, ROWS * stat),
        "threads change the bits of pass %d, " WHERE, pass, WHERE_VALUES(s, 0));
  free_result(&threaded);
  return serial;
}

static void test_setting(const setting* s) {
  data d = make_data(s);
  for (int pass = STATS; pass <= GRADIENT_OF_EXP; pass++) {
    /* exp saved in 16 bits has two more roundings than the tolerance of one pass. */
    if (pass == GRADIENT_OF_EXP && flce_size_of(s->dtype) == 2) continue;
    if (pass == GRADIENT_OF_EXP && s->kind != FLAT)
      continue; /* exp that underflows cannot be recovered */
    result r = run_both(s, &d, pass);
    check_stats(s, &d, &r);
    if (pass == EXP) check_exp(s, &d, &r, 1.0, true);
    if (pass == SCALED_EXP) check_exp(s, &d, &r, kScale, false);
    if (pass >= GRADIENT) check_gradient(s, &d, &r);
    free_result(&r);
  }
  free_data(&d);
}

/* Reads back 16-bit rows of exp times kScale: each entry must follow the formula for that entry. */
static void test_linear(flce_dtype dtype) {
  setting s = {.dtype = dtype, .vocab = 77, .kind = FLAT, .weight = true, .smoothing = 0.25};
  data d = make_data(&s);
  result held = run_both(&s, &d, SCALED_EXP), r = run_both(&s, &d, GRADIENT_OF_EXP);
  for (int64_t i = 0; i < ROWS; i++) {
    if (i == IGNORED_ROW) continue;
    double row = flce_load(r.coef, d.stat, FLCE_COEF_ROW * ROWS + i);
    double target = flce_load(r.coef, d.stat, FLCE_COEF_TARGET * ROWS + i);
    double smooth = flce_load(r.coef, d.stat, FLCE_COEF_SMOOTH * ROWS + i);
    bool right = true;
    for (int64_t j = 0; j < s.vocab; j++) {
      double first = j == d.target[i] ? target : row / kScale * out_of(&s, &d, &held, i, j);
      double second = smooth * weight_of(&s, &d, j), expected = first - second;
      double tolerance = 4.0 * test_epsilon(d.stat) * (fabs(first) + fabs(second)) +
                         test_epsilon(dtype) * fabs(expected) + test_tiny(dtype);
      right &= test_close(out_of(&s, &d, &r, i, j), expected, tolerance);
    }
    CHECK(right, "gradient from held exp, " WHERE, WHERE_VALUES(&s, i));
  }
  free_result(&held);
  free_result(&r);
  free_data(&d);
}

/* Rows longer than the span that is summed at a time, and a row without a finite logit. */
static void test_bad_rows(flce_dtype dtype) {
  setting s = {.dtype = dtype, .vocab = 5000, .kind = FLAT};
  data d = make_data(&s);
  for (int64_t j = 0; j < s.vocab; j++) {
    flce_store(d.z, dtype, 0 * d.pitch + j, -INFINITY);
    flce_store(d.z, dtype, 1 * d.pitch + j, NAN);
    if (j < 4500) flce_store(d.z, dtype, 3 * d.pitch + j, -INFINITY);
  }
  flce_store(d.z, dtype, 4 * d.pitch + 4999, NAN);
  d.target[3] = 4700;
  d.target[5] =
      s.vocab; /* not checked by prepare here: the row must be NaN, without reads out of bounds */
  d.target[6] = -1;
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  for (int pass = 0; pass < 2; pass++) {
    result r = make_result(&s, &d);
    flce_rows view = view_of(&s, &d, &r);
    CHECK_OK(pass ? b.exp_rows(b.self, &view) : b.stat_rows(b.self, &view));
    for (int64_t i = 0; i < ROWS; i++) {
      double nll = stat_of(&d, &r, FLCE_STAT_NLL, i);
      bool finite = i == IGNORED_ROW || i == 3;
      CHECK(finite ? isfinite(nll) : isnan(nll), "nll is %g, pass %d, " WHERE, nll, pass,
            WHERE_VALUES(&s, i));
    }
    double c = stat_of(&d, &r, FLCE_STAT_OFFSET, 3);
    CHECK(isfinite(c) && c > 0.0, "offset is %g, pass %d, " WHERE, c, pass, WHERE_VALUES(&s, 3));
    flce_store(d.scalars, d.stat, FLCE_SCALAR_WEIGHT_TOTAL, (double)s.vocab);
    CHECK_OK(b.row_coefficients(b.self, &view, NULL, &(flce_upstream){0}, NULL, r.coef));
    CHECK(isnan(flce_load(r.coef, d.stat, 5)) && isnan(flce_load(r.coef, d.stat, 6)) &&
              flce_load(r.coef, d.stat, IGNORED_ROW) == 0.0,
          "coefficients of rows out of range");
    view.coef = r.coef;
    CHECK_OK(b.grad_rows(b.self, &view, 1.0, false, false));
    CHECK(isnan(out_of(&s, &d, &r, 5, 0)) && isnan(out_of(&s, &d, &r, 6, 4999)) &&
              out_of(&s, &d, &r, IGNORED_ROW, 0) == 0.0,
          "gradient of rows out of range, pass %d, " WHERE, pass, WHERE_VALUES(&s, 5));
    free_result(&r);
  }
  free_data(&d);
}

static void test_refusals(void) {
  setting s = {.dtype = FLCE_F32, .vocab = 4, .kind = FLAT};
  data d = make_data(&s);
  result r = make_result(&s, &d);
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_rows view = view_of(&s, &d, &r);
  view.out_dtype = FLCE_BF16;
  CHECK(b.exp_rows(b.self, &view) == FLCE_UNSUPPORTED &&
            strstr(flce_last_error(), "expected out in the logits' float32, got bfloat16"),
        "another dtype: %s", flce_last_error());
  view.out_dtype = FLCE_F32;
  view.out = (void*)view.z;
  view.out_pitch++;
  CHECK(b.exp_rows(b.self, &view) == FLCE_UNSUPPORTED && strstr(flce_last_error(), "in place"),
        "another pitch in place: %s", flce_last_error());
  view.rows = 0;
  view.out_pitch--;
  CHECK_OK(b.exp_rows(b.self, &view));
  free_result(&r);
  free_data(&d);
}

int main(void) {
  static const int64_t vocabs[] = {1,  2,  3,  7,  8,   15,  16,  17,   31,
                                   33, 63, 64, 65, 127, 128, 129, 1000, 4099};
  test_seed(2);
  for (int index = 0; test_next_variant(&index);) {
    for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++)
      for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++)
        for (int kind = 0; kind < KINDS; kind++)
          for (int options = 0; options < 4; options++) {
            /* An infinite logit makes the smoothed loss infinite, which cannot be compared
             * numerically. */
            bool smooth = (options & 2) && kind != MASKED;
            setting s = {.dtype = (flce_dtype)dtype,
                         .vocab = vocabs[v],
                         .kind = kind,
                         .bias = options & 1,
                         .weight = options & 2,
                         .in_place = (options + kind) % 2,
                         .smoothing = smooth ? 0.125 : 0.0};
            test_setting(&s);
          }
    for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
      test_bad_rows((flce_dtype)dtype);
      test_linear((flce_dtype)dtype);
    }
  }
  test_refusals();
  return test_verdict();
}
