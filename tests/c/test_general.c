/* The row passes with every option: logit scale, softcap, temperatures, z-loss, token weights,
 * probabilities, entropy, predictions, gathered rows, gradients from lse and entropy. Compared with
 * a definition in double, whose gradient is checked against finite differences of its loss. */
#include "row_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const double kExpScale = 64.0;

/* ---- runs ---- */

enum { STATS, EXP, SCALED_EXP, GRADIENT, PASSES };

static void run_pass(const setting* s, const data* d, int pass, int threads, result* r) {
  flce_cpu cpu = test_cpu(threads);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_rows view = view_of(s, d, r);
  if (pass == EXP) {
    CHECK_OK(b.exp_rows(b.self, &view));
    return;
  }
  CHECK_OK(b.stat_rows(b.self, &view));
  flce_upstream upstream = {.loss = d->g,
                            .loss_stride = 1,
                            .lse = s->upstream ? d->g_lse : NULL,
                            .entropy = s->upstream && s->entropy ? d->g_entropy : NULL};
  CHECK_OK(b.row_coefficients(b.self, &view, NULL, &upstream,
                              flce_const_at(d->scalars, d->stat, FLCE_SCALAR_INV_DENOM), r->coef));
  if (pass == STATS) return;
  if (pass == GRADIENT) view.coef = r->coef;
  double scale = pass == GRADIENT ? 1.0 : kExpScale;
  CHECK_OK(b.grad_rows(b.self, &(flce_grad_rows_args){.rows = &view, .scale = scale}));
}

static result run_both(const setting* s, const data* d, int pass) {
  result serial = make_result(s, d), threaded = make_result(s, d);
  run_pass(s, d, pass, 1, &serial);
  run_pass(s, d, pass, 3, &threaded);
  int64_t stat = flce_size_of(d->stat);
  CHECK(test_same(serial.out, threaded.out, d->z_count * flce_size_of(s->dtype)) &&
            test_same(serial.stats, threaded.stats, FLCE_STAT_COUNT * TOKENS * stat) &&
            test_same(serial.loss, threaded.loss, TOKENS * stat) &&
            test_same(serial.coef, threaded.coef, FLCE_COEF_COUNT * TOKENS * stat),
        "threads change the bits of pass %d, " WHERE, pass, WHERE_VALUES(s, 0));
  free_result(&threaded);
  return serial;
}

/* ---- checks ---- */

static double stat_at(const data* d, const result* r, enum flce_stat_row k, int64_t i) {
  return flce_load(r->stats, d->stat, k * TOKENS + i);
}

static void check_stat(const setting* s, const data* d, const result* r, enum flce_stat_row k,
                       int64_t i, double expected, double tolerance) {
  double actual = stat_at(d, r, k, i);
  CHECK(test_close(actual, expected, tolerance), "statistic %d is %.9g, expected %.9g, " WHERE,
        (int)k, actual, expected, WHERE_VALUES(s, i));
}

/* The computed l of two columns may be equal if the exact ones are not. */
static void check_prediction(const setting* s, const data* d, const result* r, const truth* t,
                             int64_t i) {
  int64_t j = r->predictions[i];
  (void)d;
  CHECK(j >= 0 && j < s->vocab && t->l[j] >= t->c - t->error,
        "prediction %lld, expected %lld, " WHERE, (long long)j, (long long)t->largest,
        WHERE_VALUES(s, i));
  bool lowest = true;
  for (int64_t k = 0; k < j && !s->bias; k++) lowest &= t->z[k] != t->z[j];
  CHECK(lowest, "prediction %lld is not the lowest, " WHERE, (long long)j, WHERE_VALUES(s, i));
}

static void check_row_stats(const setting* s, const data* d, const result* r, int64_t row) {
  int64_t i = token_of(s, row), y = d->target[i];
  truth t = make_truth(s, d, row);
  double tiny = (double)(s->vocab + 1) * test_tiny(d->stat), loss = flce_load(r->loss, d->stat, i);
  double relative = t.error + 4.0 * test_epsilon(d->stat);
  check_stat(s, d, r, FLCE_STAT_LSE, i, t.lse, relative);
  check_stat(s, d, r, FLCE_STAT_OFFSET, i, t.c, relative);
  check_stat(s, d, r, FLCE_STAT_INV_SUM, i, 1.0 / t.sum, 2.0 * relative / t.sum);
  check_stat(s, d, r, FLCE_STAT_NLL, i, has_target(s) ? t.nll : 0.0, relative * t.nll + tiny);
  /* An exp that underflows would be multiplied by c - l, up to 90, in float64 up to 800. */
  check_stat(s, d, r, FLCE_STAT_ENTROPY, i, s->entropy ? t.entropy : 0.0,
             2.0 * relative * t.entropy + 800.0 * tiny);
  check_stat(s, d, r, FLCE_STAT_WEIGHT_SUM, i, s->probabilities ? t.weight_sum : 0.0,
             relative * t.weight_sum);
  double unit = s->loss.logit_scale /
                (s->loss.temperature * optional(s->temperature, d->temperature, d->stat, i, 1.0));
  check_stat(s, d, r, FLCE_STAT_SLOPE, i, has_target(s) ? t.slope[y] / unit : 0.0,
             has_target(s) ? relative * t.slope[y] / unit + tiny : 0.0);
  CHECK(test_close(loss, t.loss, 2.0 * relative * t.loss_size + 8.0 * tiny),
        "loss is %.9g, expected %.9g, " WHERE, loss, t.loss, WHERE_VALUES(s, i));
  check_prediction(s, d, r, &t, i);
  free_truth(&t);
}

static bool is_like(double actual, double expected) {
  return isnan(expected) ? isnan(actual) : actual == expected;
}

/* Rows that are not computed: ignored, out of range, and tokens that the index omits. */
static void check_blank(const setting* s, const data* d, const result* r, int64_t i,
                        double expected, bool coef) {
  bool right = is_like(flce_load(r->loss, d->stat, i), expected);
  for (int k = 0; k < FLCE_STAT_COUNT; k++) right &= is_like(stat_at(d, r, k, i), expected);
  for (int k = 0; coef && k < FLCE_COEF_COUNT; k++)
    right &= is_like(flce_load(r->coef, d->stat, k * TOKENS + i), expected);
  right &= r->predictions[i] == (expected == UNTOUCHED ? UNTOUCHED : -1);
  CHECK(right, "a row that is not computed, " WHERE, WHERE_VALUES(s, i));
}

static void check_stats(const setting* s, const data* d, const result* r, bool coef) {
  bool seen[TOKENS] = {false};
  for (int64_t row = 0; row < d->rows; row++) {
    int64_t i = token_of(s, row);
    if (i >= 0) seen[i] = true;
    if (!is_blank(s, i))
      check_row_stats(s, d, r, row);
    else if (i >= 0)
      check_blank(s, d, r, i, i == IGNORED ? 0.0 : NAN, coef);
  }
  for (int64_t i = 0; i < TOKENS; i++)
    if (!seen[i]) check_blank(s, d, r, i, UNTOUCHED, coef);
}

static void check_out(const setting* s, const data* d, const result* r, int pass) {
  for (int64_t row = 0; row < d->rows; row++) {
    int64_t i = token_of(s, row), wrong = -1;
    bool blank = is_blank(s, i);
    truth t = {0};
    if (!blank) t = make_truth(s, d, row);
    double unit =
        blank ? 1.0
              : s->loss.logit_scale / (s->loss.temperature *
                                       optional(s->temperature, d->temperature, d->stat, i, 1.0));
    for (int64_t j = 0; j < s->vocab; j++) {
      double actual = flce_load(r->out, s->dtype, row * d->pitch + j), size = 0.0;
      double expected = i == WRONG ? NAN : 0.0;
      if (!blank && pass == GRADIENT) {
        expected = t.dz[j], size = t.size[j];
      } else if (!blank && !(pass == EXP && j == d->target[i])) {
        expected = (pass == EXP ? 1.0 : kExpScale) * t.p[j] * t.sum * t.slope[j] / unit;
        size = 2.0 * expected;
      }
      /* An exp that underflows would be multiplied by up to this factor, and by c - l. */
      double floor = 2e5 * test_tiny(d->stat) + test_tiny(s->dtype);
      double tolerance = 2.0 * t.error * size + test_epsilon(s->dtype) * fabs(expected) + floor;
      bool right = blank ? is_like(actual, expected) : test_close(actual, expected, tolerance);
      bool denormal = s->dtype != FLCE_F16 && actual != 0.0 && fabs(actual) < test_tiny(s->dtype);
      if (!right || (denormal && j != d->target[i < 0 ? 0 : i])) wrong = j;
    }
    CHECK(wrong < 0, "pass %d [%lld], " WHERE, pass, (long long)wrong, WHERE_VALUES(s, i));
    if (!blank) free_truth(&t);
  }
  bool right = true;
  int64_t size = flce_size_of(s->dtype), zeros = (s->vocab + ZEROS) * size;
  for (int64_t k = s->vocab * size; k < d->pitch * size; k++)
    right &= ((const unsigned char*)r->out)[k] == (k < zeros ? 0 : SENTINEL);
  CHECK(right, "the pad is not zeros and the caller's, " WHERE, WHERE_VALUES(s, 0));
}

static void test_setting(const setting* s) {
  data d = make_data(s);
  if (s->dtype == FLCE_F64 && s->kind == FLAT) check_truth(s, &d);
  for (int pass = STATS; pass < PASSES; pass++) {
    if (pass == EXP && s->probabilities) continue;
    result r = run_both(s, &d, pass);
    check_stats(s, &d, &r, pass != EXP);
    if (pass != STATS) check_out(s, &d, &r, pass);
    free_result(&r);
  }
  free_data(&d);
}

/* ---- cases ---- */

static const flce_loss kLosses[] = {
    {.logit_scale = 1.0, .temperature = 1.0},
    {.logit_scale = 0.25, .temperature = 1.0, .z_loss = 0.125},
    {.logit_scale = 1.0, .temperature = 0.75, .label_smoothing = 0.125},
    {.logit_scale = 1.0, .temperature = 1.0, .softcap = 5.0},
    {.logit_scale = -0.5,
     .temperature = 2.0,
     .softcap = 20.0,
     .label_smoothing = 0.25,
     .z_loss = 0.5},
};
enum { LOSSES = sizeof kLosses / sizeof *kLosses };

static setting make_setting(int dtype, int64_t vocab, int kind, int loss, uint64_t bits) {
  setting s = {.dtype = (flce_dtype)dtype,
               .vocab = vocab,
               .kind = kind,
               .loss = kLosses[loss],
               .bias = bits & 1,
               .class_weight = bits & 2,
               .token_weight = bits & 4,
               .temperature = bits & 8,
               .probabilities = bits & 16,
               .entropy = bits & 32,
               .gathered = bits & 64,
               .in_place = bits & 128,
               .upstream = bits & 256,
               .probabilities_dtype = (flce_dtype)(bits >> 9 & 3)};
  s.loss.ignore_index = IGNORE_INDEX;
  /* With a masked logit the loss of a smoothed target is infinite. */
  if (kind == MASKED && s.loss.softcap == 0.0) s.loss.label_smoothing = 0.0;
  return s;
}

static void test_grid(void) {
  static const int64_t vocabs[] = {1, 2, 17, 129, 2048, 4099};
  for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++)
    for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++)
      for (int kind = 0; kind < KINDS; kind++)
        for (int loss = 0; loss < LOSSES; loss++)
          for (int draw = 0; draw < (vocabs[v] < 1000 ? 4 : 1); draw++) {
            setting s = make_setting(dtype, vocabs[v], kind, loss, test_random());
            test_setting(&s);
          }
}

/* Options one by one, so that none conceals an error of another. */
static void test_single_options(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_BF16; dtype++)
    for (int loss = 0; loss < LOSSES; loss++)
      for (int bit = 0; bit < 9; bit++)
        for (int kind = FLAT; kind <= PEAKED; kind++) {
          uint64_t upstream = bit == 5 ? 256 : 0; /* with the entropy also its gradient */
          setting s = make_setting(dtype, 67, kind, loss, (uint64_t)1 << bit | upstream);
          test_setting(&s);
        }
}

/* The lowest column of several equal largest logits, at every position in a span and beyond it. */
static void test_predictions(void) {
  enum { V = 5000 };
  static const int64_t columns[] = {0, 1, 15, 16, 2047, 2048, 4095, 4096, 4999};
  float* z = test_buffer(FLCE_F32, V);
  float stats[FLCE_STAT_COUNT], loss, scalars[FLCE_SCALAR_COUNT] = {0};
  int64_t target = 3, prediction;
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_rows rows = {.rows = 1,
                    .vocab = V,
                    .z = z,
                    .z_dtype = FLCE_F32,
                    .z_pitch = V,
                    .target = &target,
                    .options = {.ignore_index = -100, .logit_scale = 1.0, .temperature = 1.0},
                    .stats = stats,
                    .stat_pitch = 1,
                    .loss = &loss,
                    .predictions = &prediction,
                    .scalars = scalars};
  for (size_t a = 0; a < sizeof columns / sizeof *columns; a++)
    for (size_t c = a; c < sizeof columns / sizeof *columns; c++) {
      flce_fill(z, FLCE_F32, -3.0, V);
      z[columns[a]] = z[columns[c]] = -2.5f;
      CHECK_OK(b.stat_rows(b.self, &rows));
      CHECK(prediction == columns[a], "prediction %lld, expected %lld", (long long)prediction,
            (long long)columns[a]);
    }
  flce_fill(z, FLCE_F32, -INFINITY, V);
  CHECK_OK(b.stat_rows(b.self, &rows));
  CHECK(prediction == 0, "prediction of nothing: %lld", (long long)prediction);
  free(z);
}

static void test_refusals(void) {
  setting s = make_setting(FLCE_F32, 5, FLAT, 0, 16),
          capped = make_setting(FLCE_F32, 5, FLAT, 3, 0);
  const setting* all[] = {&s, &capped};
  static const char* const parts[] = {"class targets", "no softcap"};
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  for (int k = 0; k < 2; k++) {
    data d = make_data(all[k]);
    result r = make_result(all[k], &d);
    run_pass(all[k], &d, STATS, 1, &r);
    flce_rows view = view_of(all[k], &d, &r);
    view.coef = r.coef;
    flce_grad_rows_args call = {.rows = &view, .scale = 1.0, .z_is_exp = true};
    CHECK(b.grad_rows(b.self, &call) == FLCE_UNSUPPORTED && strstr(flce_last_error(), parts[k]),
          "grad_rows of exp: %s", flce_last_error());
    if (k == 0)
      CHECK(b.exp_rows(b.self, &view) == FLCE_UNSUPPORTED &&
                strstr(flce_last_error(), "exp_rows: expected class targets"),
            "exp_rows: %s", flce_last_error());
    free_result(&r);
    free_data(&d);
  }
}

int main(void) {
  for (int index = 0; test_next_variant(&index);) {
    test_seed(5); /* the same cases for every variant */
    test_grid();
    test_single_options();
    test_predictions();
  }
  test_refusals();
  return test_verdict();
}
