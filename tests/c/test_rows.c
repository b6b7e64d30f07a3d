/* The row passes of every variant without options but weights and smoothing, compared with the
 * definition of row_case.h, more closely than test_general.c: statistics, loss, E, gradient rows
 * and coefficients; tails, dtypes, leading dimensions, in place, ignored rows, threads. */
#include "row_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* One more distribution of a row's logits. */
enum { GAP = KINDS, KINDS_HERE };

static double draw_logit(const setting* s, int64_t row, int64_t j, int64_t target) {
  static const double gaps[] = {80.0, 90.0, 1000.0};
  switch (s->kind) {
    case PEAKED: /* the target leads in even rows, by more and more */
      return test_normal() + (j == target && row % 2 == 0 ? 5.0 * (double)(row + 1) : 0.0);
    case EXTREME:
      return test_uniform(-1000.0, 1000.0);
    case MASKED:
      return j != target && test_random() % 3 == 0 ? -INFINITY : 4.0 * test_normal();
    case GAP: /* values of z_max - z_y, all representable in float16 */
      return j == target ? -gaps[row % 3] : 0.25 * (double)(j % 2);
    default:
      return test_normal();
  }
}

static setting make_setting(flce_dtype dtype, int64_t vocab, int kind) {
  return (setting){.dtype = dtype,
                   .vocab = vocab,
                   .kind = kind,
                   .loss = {.ignore_index = IGNORE_INDEX, .logit_scale = 1.0, .temperature = 1.0}};
}

/* The inputs of row_case.h with logits of this file's distributions. No class has weight 0: with
 * one a smoothed loss may be so small that it has no relative bound. */
static data make_rows(const setting* s) {
  data d = make_data(s);
  flce_store(d.class_weight, d.stat, s->vocab / 2, 1.0);
  if (s->class_weight) {
    double total = flce_load(d.scalars, d.stat, FLCE_SCALAR_WEIGHT_TOTAL);
    flce_store(d.scalars, d.stat, FLCE_SCALAR_WEIGHT_TOTAL, total + 1.0);
  }
  for (int64_t i = 0; i < TOKENS; i++) {
    if (is_blank(s, i)) continue;
    d.target[i] = i == 0 ? s->vocab - 1 : i == 1 ? 0 : d.target[i];
    for (int64_t j = 0; j < s->vocab; j++)
      flce_store(d.z, s->dtype, i * d.pitch + j, draw_logit(s, i, j, d.target[i]));
  }
  return d;
}

static double weight_of(const setting* s, const data* d, int64_t j) {
  return optional(s->class_weight, d->class_weight, d->stat, j, 1.0);
}

/* The relative error of the row's sum of E without the target's: of each term that of z - c, which
 * is rounded before exp, and of the sum by the terms that one accumulator adds. */
static double rest_error(const setting* s, const data* d, const truth* t, int64_t y) {
  double rest = 0.0, error = 0.0;
  for (int64_t j = 0; j < s->vocab; j++) {
    double e = exp(t->l[j] - t->c);
    if (j == y || e == 0.0) continue;
    rest += e;
    error += e * (t->c - t->l[j] + 4.0);
  }
  int64_t v = s->vocab;
  double chain = d->stat == FLCE_F64 ? (double)v : (double)(v < 2048 ? v : 2048) / 32.0;
  return test_epsilon(d->stat) * ((rest > 0.0 ? 2.0 * error / rest : 1.0) + chain);
}

/* What a pass takes. Without predictions rows take the plain path. */
static flce_rows plain_view_of(const setting* s, const data* d, result* r) {
  flce_rows view = view_of(s, d, r);
  view.predictions = NULL;
  return view;
}

static double stat_of(const data* d, const result* r, int which, int64_t i) {
  return flce_load(r->stats, d->stat, which * TOKENS + i);
}

/* Of a row that is not computed: 0 where it is ignored, NaN where its target is out of range. */
static bool is_blank_value(int64_t i, double value) {
  return i == IGNORED ? value == 0.0 : isnan(value);
}

static void check_stats(const setting* s, const data* d, const result* r) {
  for (int64_t i = 0; i < TOKENS; i++) {
    double lse = stat_of(d, r, FLCE_STAT_LSE, i), nll = stat_of(d, r, FLCE_STAT_NLL, i);
    double c = stat_of(d, r, FLCE_STAT_OFFSET, i), inv_sum = stat_of(d, r, FLCE_STAT_INV_SUM, i);
    double loss = flce_load(r->loss, d->stat, i);
    if (is_blank(s, i)) {
      bool right = is_blank_value(i, loss);
      for (int k = 0; k < FLCE_STAT_COUNT; k++) right &= is_blank_value(i, stat_of(d, r, k, i));
      CHECK(right, "not computed, " WHERE, WHERE_VALUES(s, i));
      continue;
    }
    truth t = make_truth(s, d, i);
    double error = rest_error(s, d, &t, d->target[i]) + 4.0 * test_epsilon(d->stat);
    double tiny = (double)(s->vocab + 1) * test_tiny(d->stat);
    CHECK(c == t.c, "offset %g, expected %g, " WHERE, c, t.c, WHERE_VALUES(s, i));
    CHECK(test_close(lse, t.lse, error + error * fabs(t.c)), "lse %.9g, expected %.9g, " WHERE, lse,
          t.lse, WHERE_VALUES(s, i));
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
  for (int64_t i = 0; i < TOKENS; i++) {
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

/* Row i of out, of a row that is not computed. */
static void check_blank_row(const setting* s, const data* d, const result* r, int64_t i) {
  int64_t wrong = -1;
  for (int64_t j = 0; j < s->vocab; j++)
    if (!is_blank_value(i, out_of(s, d, r, i, j))) wrong = j;
  CHECK(wrong < 0, "[%lld] of a row that is not computed, " WHERE, (long long)wrong,
        WHERE_VALUES(s, i));
}

/* out = scale * exp(z - c), with 0 in the target's column if it is hidden. */
static void check_exp(const setting* s, const data* d, const result* r, double scale, bool hidden) {
  CHECK(pad_is_right(s, d, r), "pad, " WHERE, WHERE_VALUES(s, 0));
  for (int64_t i = 0; i < TOKENS; i++) {
    int64_t wrong = -1;
    if (is_blank(s, i)) {
      check_blank_row(s, d, r, i);
      continue;
    }
    truth t = make_truth(s, d, i);
    for (int64_t j = 0; j < s->vocab; j++) {
      double e = exp(t.l[j] - t.c);
      double expected = hidden && j == d->target[i] ? 0.0 : scale * e;
      double relative =
          test_epsilon(s->dtype) + test_epsilon(d->stat) * (4.0 + (e > 0.0 ? t.c - t.l[j] : 0.0));
      double tolerance = relative * expected + (scale + 1.0) * test_tiny(s->dtype);
      if (!test_close(out_of(s, d, r, i, j), expected, tolerance)) wrong = j;
      if (denormal(s, out_of(s, d, r, i, j))) wrong = j;
    }
    CHECK(wrong < 0, "exp[%lld], " WHERE, (long long)wrong, WHERE_VALUES(s, i));
    free_truth(&t);
  }
}

/* out = dz of the definition. */
static void check_gradient(const setting* s, const data* d, const result* r) {
  CHECK(pad_is_right(s, d, r), "pad, " WHERE, WHERE_VALUES(s, 0));
  for (int64_t i = 0; i < TOKENS; i++) {
    int64_t wrong = -1, y = d->target[i];
    if (is_blank(s, i)) {
      check_blank_row(s, d, r, i);
      continue;
    }
    truth t = make_truth(s, d, i);
    double k = fabs(kFactor * flce_load(d->g, d->stat, i)), of_rest = rest_error(s, d, &t, y);
    double own = (1.0 - s->loss.label_smoothing) * t.w[y];
    for (int64_t j = 0; j < s->vocab; j++) {
      double actual = out_of(s, d, r, i, j);
      double error = of_rest + test_epsilon(d->stat) * (16.0 + (t.p[j] > 0.0 ? t.c - t.l[j] : 0.0));
      /* t.size has the term of weight_sum twice, once as its part of `push`. */
      double size = t.size[j] - k * t.weight_sum * t.p[j];
      double tolerance = error * size + test_epsilon(s->dtype) * fabs(t.dz[j]) +
                         (k * (double)s->vocab * own + 2.0) * test_tiny(s->dtype);
      if (!test_close(actual, t.dz[j], tolerance)) wrong = j;
      if (j != y && denormal(s, actual)) wrong = j;
    }
    CHECK(wrong < 0, "gradient[%lld], " WHERE, (long long)wrong, WHERE_VALUES(s, i));
    free_truth(&t);
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
  flce_rows view = plain_view_of(s, d, r);
  if (pass == EXP) {
    CHECK_OK(b.exp_rows(b.self, &view));
    return;
  }
  CHECK_OK(b.stat_rows(b.self, &view));
  if (pass == STATS) return;
  const void* unit = flce_const_at(d->scalars, d->stat, FLCE_SCALAR_INV_DENOM);
  flce_upstream upstream = {.loss = d->g, .loss_stride = 1};
  CHECK_OK(b.row_coefficients(b.self, &view, NULL, &upstream, unit, r->coef));
  flce_grad_rows_args call = {.rows = &view, .scale = kScale};
  if (pass == SCALED_EXP) {
    CHECK_OK(b.grad_rows(b.self, &call));
    return;
  }
  if (pass == GRADIENT_OF_EXP) {
    CHECK_OK(b.grad_rows(b.self, &call));
    view.z = view.out;
    call.z_is_exp = true;
  }
  view.coef = r->coef;
  CHECK_OK(b.grad_rows(b.self, &call));
}

static result run_both(const setting* s, const data* d, int pass) {
  result serial = make_result(s, d), threaded = make_result(s, d);
  run_pass(s, d, pass, 1, &serial);
  run_pass(s, d, pass, 3, &threaded);
  int64_t stat = flce_size_of(d->stat);
  CHECK(test_same(serial.out, threaded.out, d->z_count * flce_size_of(s->dtype)) &&
            test_same(serial.stats, threaded.stats, FLCE_STAT_COUNT * TOKENS * stat) &&
            test_same(serial.loss, threaded.loss, TOKENS * stat),
        "threads change the bits of pass %d, " WHERE, pass, WHERE_VALUES(s, 0));
  free_result(&threaded);
  return serial;
}

static void test_setting(const setting* s) {
  data d = make_rows(s);
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
  setting s = make_setting(dtype, 77, FLAT);
  s.class_weight = true;
  s.loss.label_smoothing = 0.25;
  data d = make_rows(&s);
  result held = run_both(&s, &d, SCALED_EXP), r = run_both(&s, &d, GRADIENT_OF_EXP);
  for (int64_t i = 0; i < TOKENS; i++) {
    if (is_blank(&s, i)) continue;
    double row = flce_load(r.coef, d.stat, FLCE_COEF_EXP * TOKENS + i);
    double target = flce_load(r.coef, d.stat, FLCE_COEF_TARGET * TOKENS + i);
    double smooth = flce_load(r.coef, d.stat, FLCE_COEF_SMOOTH * TOKENS + i);
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
  setting s = make_setting(dtype, 5000, FLAT);
  data d = make_rows(&s);
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
    flce_rows view = plain_view_of(&s, &d, &r);
    CHECK_OK(pass ? b.exp_rows(b.self, &view) : b.stat_rows(b.self, &view));
    for (int64_t i = 0; i < TOKENS; i++) {
      double nll = stat_of(&d, &r, FLCE_STAT_NLL, i);
      bool finite = i == IGNORED || i == 3 || i == 7;
      CHECK(finite ? isfinite(nll) : isnan(nll), "nll is %g, pass %d, " WHERE, nll, pass,
            WHERE_VALUES(&s, i));
    }
    double c = stat_of(&d, &r, FLCE_STAT_OFFSET, 3);
    CHECK(isfinite(c) && c > 0.0, "offset is %g, pass %d, " WHERE, c, pass, WHERE_VALUES(&s, 3));
    flce_store(d.scalars, d.stat, FLCE_SCALAR_WEIGHT_TOTAL, (double)s.vocab);
    CHECK_OK(b.row_coefficients(b.self, &view, NULL, &(flce_upstream){0}, NULL, r.coef));
    CHECK(isnan(flce_load(r.coef, d.stat, 5)) && isnan(flce_load(r.coef, d.stat, 6)) &&
              flce_load(r.coef, d.stat, IGNORED) == 0.0,
          "coefficients of rows out of range");
    view.coef = r.coef;
    CHECK_OK(b.grad_rows(b.self, &(flce_grad_rows_args){.rows = &view, .scale = 1.0}));
    CHECK(isnan(out_of(&s, &d, &r, 5, 0)) && isnan(out_of(&s, &d, &r, 6, 4999)) &&
              out_of(&s, &d, &r, IGNORED, 0) == 0.0,
          "gradient of rows out of range, pass %d, " WHERE, pass, WHERE_VALUES(&s, 5));
    free_result(&r);
  }
  free_data(&d);
}

static void test_refusals(void) {
  setting s = make_setting(FLCE_F32, 4, FLAT);
  data d = make_rows(&s);
  result r = make_result(&s, &d);
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_rows view = plain_view_of(&s, &d, &r);
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
        for (int kind = 0; kind < KINDS_HERE; kind++)
          for (int options = 0; options < 4; options++) {
            /* An infinite logit makes the smoothed loss infinite, which cannot be compared
             * numerically. */
            bool smooth = (options & 2) && kind != MASKED;
            setting s = make_setting((flce_dtype)dtype, vocabs[v], kind);
            s.bias = options & 1;
            s.class_weight = options & 2;
            s.in_place = (options + kind) % 2;
            s.loss.label_smoothing = smooth ? 0.125 : 0.0;
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
