/* divergence_rows: sums, loss and dz of rows of two logits, against the definition in double, whose
 * gradient is checked by the sum over the classes of a row. */
#include "cpu/cpu.h"
#include "test.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 6, VOCAB = 2061, PITCH = 2064, IGNORED = 1, WRONG = 4, IGNORE_INDEX = -7 };
/* Row 3 is absent; token 0 comes last. */
static const int64_t kIndex[TOKENS] = {5, 2, 1, -1, 4, 0};

typedef struct setting {
  flce_dtype dtype;
  flce_divergence kind;
  double beta, hard, softcap, near; /* near: distance of the logits, 0 for independent ones */
  bool gathered, bias, split;
} setting;

typedef struct side {
  void *z, *bias, *stats, *loss;
  flce_rows view;
} side;

static side make_side(const setting* s, const int64_t* target, const side* other) {
  flce_dtype stat = flce_stat_dtype(s->dtype);
  side made = {.z = test_fill_normal(s->dtype, TOKENS * PITCH, 2.0),
               .bias = test_fill_normal(stat, VOCAB, 1.0),
               .stats = test_buffer(stat, FLCE_STAT_COUNT * TOKENS),
               .loss = test_buffer(stat, TOKENS)};
  for (int64_t k = 0; other && s->near > 0.0 && k < TOKENS * PITCH; k++)
    flce_store(made.z, s->dtype, k,
               flce_load(other->z, s->dtype, k) + s->near * (k % 3 == 0 ? 1.0 : -0.5));
  if (other && s->near > 0.0) memcpy(made.bias, other->bias, VOCAB * flce_size_of(stat));
  made.view = (flce_rows){.rows = TOKENS,
                          .vocab = VOCAB,
                          .index = s->gathered ? kIndex : NULL,
                          .z = made.z,
                          .z_dtype = s->dtype,
                          .z_pitch = PITCH,
                          .z_columns = VOCAB,
                          .bias = s->bias ? made.bias : NULL,
                          .target = target,
                          .options = {.ignore_index = IGNORE_INDEX,
                                      .logit_scale = 1.0,
                                      .temperature = other ? 0.8 : 1.0,
                                      .softcap = s->softcap},
                          .stats = made.stats,
                          .stat_pitch = TOKENS,
                          .loss = made.loss};
  if (s->near > 0.0) made.view.options.temperature = 1.0;
  return made;
}

/* l, dl/dz and log p of row r. */
static void logs(const setting* s, const flce_rows* view, const void* z, int64_t r, double* log_p,
                 double* slope) {
  double sum = 0.0, top = -INFINITY, cap = view->options.softcap, t = view->options.temperature;
  for (int64_t j = 0; j < VOCAB; j++) {
    double value = flce_load(z, s->dtype, r * PITCH + j);
    if (view->bias) value += flce_load(view->bias, flce_stat_dtype(s->dtype), j);
    double u = cap > 0.0 ? tanh(value / cap) : 0.0;
    log_p[j] = (cap > 0.0 ? cap * u : value) / t;
    slope[j] = (1.0 - u * u) / t;
    top = fmax(top, log_p[j]);
  }
  for (int64_t j = 0; j < VOCAB; j++) sum += exp(log_p[j] - top);
  for (int64_t j = 0; j < VOCAB; j++) log_p[j] -= top + log(sum);
}

/* The definition: value, and derivatives by p_j. */
static double definition(const setting* s, const double* a, const double* b, double* by_p) {
  double value = 0.0;
  for (int64_t j = 0; j < VOCAB; j++) {
    double p = exp(a[j]), q = exp(b[j]), m = s->beta * q + (1.0 - s->beta) * p, d = a[j] - b[j];
    switch (s->kind) {
      case FLCE_FORWARD_KL:
        value += expm1(d) * q - q * d, by_p[j] = -exp(-d);
        break;
      case FLCE_REVERSE_KL:
        value += p * d + q - p, by_p[j] = d;
        break;
      case FLCE_JSD:
        value += s->beta * q * (b[j] - log(m)) + (1.0 - s->beta) * p * (a[j] - log(m));
        by_p[j] = (1.0 - s->beta) * (a[j] - log(m));
        break;
      case FLCE_NO_DIVERGENCE:
        value = by_p[j] = NAN;
    }
  }
  return value;
}

static void run(const setting* s, int threads, side* student, side* teacher, void* coef) {
  flce_cpu cpu = test_cpu(threads);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_dtype stat = flce_stat_dtype(s->dtype);
  double one = 1.0;
  void* factor = test_buffer(stat, 1);
  flce_store(factor, stat, 0, one);
  void* partial = s->split ? test_buffer(stat, FLCE_DIVERGENCE_SUMS * TOKENS) : NULL;
  CHECK_OK(b.stat_rows(b.self, &student->view));
  CHECK_OK(b.stat_rows(b.self, &teacher->view));
  CHECK_OK(b.row_coefficients(b.self, &student->view, NULL, &(flce_upstream){0}, factor, coef));
  flce_rows view = student->view;
  view.coef = coef;
  view.out = student->z; /* in place */
  view.out_dtype = s->dtype;
  view.out_pitch = view.out_columns = PITCH;
  flce_divergence_args call = {.student = &view,
                               .teacher = &teacher->view,
                               .divergence = s->kind,
                               .beta = s->beta,
                               .hard_weight = s->hard,
                               .partial = partial,
                               .sums = true,
                               .writes = !s->split,
                               .stores_bound = true};
  CHECK_OK(b.divergence_rows(b.self, &call));
  call.sums = false;
  call.writes = true;
  if (s->split) CHECK_OK(b.divergence_rows(b.self, &call));
  free(partial), free(factor);
}

static void check(const setting* s, int threads) {
  flce_dtype stat = flce_stat_dtype(s->dtype);
  double eps = test_epsilon(s->dtype), wide = test_epsilon(stat), sum, size;
  double *a = test_doubles(VOCAB), *b = test_doubles(VOCAB), *by_p = test_doubles(VOCAB);
  double *slope = test_doubles(VOCAB), *unused = test_doubles(VOCAB);
  int64_t target[TOKENS] = {7, IGNORE_INDEX, VOCAB - 1, 0, VOCAB, 2050};
  side student = make_side(s, target, NULL), teacher = make_side(s, target, &student);
  void *z = test_buffer(s->dtype, TOKENS * PITCH),
       *coef = test_buffer(stat, FLCE_COEF_COUNT * TOKENS);
  memcpy(z, student.z, TOKENS * PITCH * flce_size_of(s->dtype));
  run(s, threads, &student, &teacher, coef);
  for (int64_t r = 0; r < TOKENS; r++) {
    int64_t i = s->gathered ? kIndex[r] : r;
    int64_t wrong = 0;
    for (int64_t j = VOCAB; j < PITCH; j++)
      wrong += flce_load(student.z, s->dtype, r * PITCH + j) != 0.0;
    bool valid = i >= 0 && i != IGNORED && i != WRONG;
    for (int64_t j = 0; !valid && j < VOCAB; j++) {
      double dz = flce_load(student.z, s->dtype, r * PITCH + j);
      wrong += !(i == WRONG ? isnan(dz) : dz == 0.0);
    }
    CHECK(wrong == 0, "%d columns of row %d", (int)wrong, (int)r);
    if (!valid) continue;
    logs(s, &student.view, z, r, a, slope);
    logs(s, &teacher.view, teacher.z, r, b, unused);
    double value = definition(s, a, b, by_p), mean = 0.0, scale = 0.0;
    double loss = (1.0 - s->hard) * value - s->hard * a[target[i]];
    for (int64_t j = 0; j < VOCAB; j++) mean += exp(a[j]) * by_p[j];
    double got = flce_load(student.loss, stat, i), slack = s->near > 0.0 ? 1e3 : 40.0;
    CHECK(test_close(got, loss, slack * wide * fmax(fabs(loss), s->near > 0.0 ? 0.0 : 1.0)),
          "loss %.9g, expected %.9g, %s kind %d near %g", got, loss, flce_dtype_name(s->dtype),
          (int)s->kind, s->near);
    double bounded = 0.0; /* sum |dz| over its stored bound */
    sum = size = 0.0;
    for (int64_t j = 0; j < VOCAB; j++) {
      double p = exp(a[j]), own = j == target[i] ? 1.0 : 0.0;
      double g = (1.0 - s->hard) * p * (by_p[j] - mean) + s->hard * (p - own), dz = slope[j] * g;
      double made = flce_load(student.z, s->dtype, r * PITCH + j), error = made - dz;
      bounded += fabs(made) * flce_load(student.stats, stat, FLCE_STAT_INV_SUM * TOKENS + i);
      sum += error * error;
      size += dz * dz;
      scale += g;
    }
    CHECK(bounded > 0.0 && bounded <= 1.0 + 2.0 * eps + 1e-4,
          "sum |dz| is %g of its bound, kind %d", bounded, (int)s->kind);
    CHECK(fabs(scale) < 1e-9, "the definition's gradient sums to %g", scale);
    CHECK(sqrt(sum) <= (1.5 * eps + 400.0 * wide) * sqrt(size) + 1e-30,
          "dz: error %.3g of %.3g, %s kind %d near %g hard %g cap %g gathered %d split %d",
          sqrt(sum), sqrt(size), flce_dtype_name(s->dtype), (int)s->kind, s->near, s->hard,
          s->softcap, s->gathered, s->split);
  }
  free(a), free(b), free(by_p), free(slope), free(unused), free(z), free(coef);
  for (int k = 0; k < 2; k++) {
    side* one = k ? &teacher : &student;
    free(one->z), free(one->bias), free(one->stats), free(one->loss);
  }
}

/* A kernel that does not know a divergence says so. */
static void test_unknown(void) {
  flce_cpu cpu = test_cpu(1);
  const flce_rows none = {.z_dtype = FLCE_F32, .out_dtype = FLCE_F32};
  flce_divergence_args call = {.student = &none, .teacher = &none, .sums = true, .writes = true};
  CHECK(flce_cpu_divergence_rows(&cpu, &call) == FLCE_INVALID_ARGUMENT, "none is a divergence");
  call.divergence = (flce_divergence)(FLCE_DIVERGENCE_COUNT + 1);
  CHECK(flce_cpu_divergence_rows(&cpu, &call) == FLCE_INVALID_ARGUMENT, "one too many is one");
}

/* dz of two equal logits of which the hard label is one: `factor` / 2 of the other. */
static double dz_of_two_classes(flce_dtype dtype, double factor) {
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  const int64_t target = 0;
  void *z = test_buffer(dtype, 2), *stats = test_buffer(dtype, FLCE_STAT_COUNT);
  void *loss = test_buffer(dtype, 1), *coef = test_buffer(dtype, FLCE_COEF_COUNT);
  void *upstream = test_buffer(dtype, 1), *dz = test_buffer(dtype, 2);
  flce_fill(z, dtype, 0.0, 2);
  flce_store(upstream, dtype, 0, factor);
  flce_rows rows = {
      .rows = 1,
      .vocab = 2,
      .z = z,
      .z_dtype = dtype,
      .z_pitch = 2,
      .z_columns = 2,
      .target = &target,
      .options = {.ignore_index = IGNORE_INDEX, .logit_scale = 1.0, .temperature = 1.0},
      .stats = stats,
      .stat_pitch = 1,
      .loss = loss};
  CHECK_OK(b.stat_rows(b.self, &rows));
  CHECK_OK(b.row_coefficients(b.self, &rows, NULL, &(flce_upstream){0}, upstream, coef));
  flce_rows student = rows;
  student.coef = coef;
  student.out = dz;
  student.out_dtype = dtype;
  student.out_pitch = student.out_columns = 2;
  CHECK_OK(b.divergence_rows(b.self, &(flce_divergence_args){.student = &student,
                                                             .teacher = &rows,
                                                             .divergence = FLCE_FORWARD_KL,
                                                             .hard_weight = 1.0,
                                                             .sums = true,
                                                             .writes = true}));
  double made = flce_load(dz, dtype, 1);
  free(z), free(stats), free(loss), free(coef), free(upstream), free(dz);
  return made;
}

/* Subnormal numbers, which make a GEMM slow, become 0; the smallest normal one stays. */
static void test_smallest(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_F32; dtype++) {
    double smallest = dtype == FLCE_F64 ? DBL_MIN : (double)FLT_MIN;
    double normal = dz_of_two_classes((flce_dtype)dtype, 2.0 * smallest);
    double subnormal = dz_of_two_classes((flce_dtype)dtype, smallest);
    CHECK(normal == smallest && subnormal == 0.0, "%s: dz %g and %g, expected %g and 0",
          flce_dtype_name((flce_dtype)dtype), normal, subnormal, smallest);
  }
}

int main(void) {
  test_unknown();
  test_smallest();
  test_seed(3);
  for (int variant = 0; test_next_variant(&variant);)
    for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++)
      for (int kind = 1; kind <= FLCE_DIVERGENCE_COUNT; kind++)
        for (int k = 0; k < 8; k++) {
          setting s = {.dtype = (flce_dtype)dtype,
                       .kind = (flce_divergence)kind,
                       .beta = k % 2 ? 0.5 : 0.1,
                       .hard = k == 5 ? 0.25 : 0.0,
                       .softcap = k % 3 == 1 ? 3.0 : 0.0,
                       .near = k == 6 && dtype == FLCE_F32 ? 1e-3 : 0.0,
                       .gathered = k % 4 >= 2,
                       .bias = k % 2 == 0 && k != 6, /* which would round l */
                       .split = k >= 3};
          check(&s, 1 + 2 * (k % 2));
        }
  return test_verdict();
}
