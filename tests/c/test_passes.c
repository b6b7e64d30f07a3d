/* The passes before and after the GEMMs, called one by one: sums, scaling, finishing dX, dW and db.
 * Every variant, one and three threads, compared with double. */
#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { TOKENS = 300, VOCAB = 37, IGNORE_INDEX = -1 };

/* Below, equal to and above the block size of the passes, and two blocks with a tail. */
static const int64_t kWidths[] = {1, 7, 64, 1024, 1025, 2100};
enum { WIDTHS = sizeof kWidths / sizeof *kWidths };

static flce_cpu cpus[2];
static flce_backend backends[2];

/* Dtype combinations that the engine uses: of the GEMMs, of the sums, of the gradients. */
typedef struct types {
  flce_dtype dtype, accum, grad;
} types;
static const types kTypes[] = {{FLCE_F64, FLCE_F64, FLCE_F64},   {FLCE_F32, FLCE_F32, FLCE_F32},
                               {FLCE_F32, FLCE_F32, FLCE_F16},   {FLCE_BF16, FLCE_BF16, FLCE_BF16},
                               {FLCE_BF16, FLCE_F32, FLCE_BF16}, {FLCE_BF16, FLCE_F32, FLCE_F32},
                               {FLCE_F16, FLCE_F32, FLCE_F16}};
enum { TYPES = sizeof kTypes / sizeof *kTypes };

#define WHERE "%s %s/%s/%s width %lld"
#define WHERE_VALUES(t, width)                                                  \
  flce_cpu_variant(), flce_dtype_name((t)->dtype), flce_dtype_name((t)->accum), \
      flce_dtype_name((t)->grad), (long long)(width)

static void make_targets(int64_t* target) {
  for (int64_t i = 0; i < TOKENS; i++) {
    target[i] = (int64_t)(test_random() % VOCAB);
    if (i % 11 == 3) target[i] = IGNORE_INDEX;
    if (i % 3 == 0) target[i] = 5;     /* one long segment of equal targets */
    if (target[i] == 6) target[i] = 7; /* one class without tokens */
  }
}

static void* copy_of(const void* data, flce_dtype dtype, int64_t count) {
  void* copy = test_buffer(dtype, count);
  memcpy(copy, data, (size_t)(count * flce_size_of(dtype)));
  return copy;
}

static bool all_close(const void* actual, flce_dtype dtype, const double* expected,
                      const double* tolerance, int64_t count) {
  for (int64_t i = 0; i < count; i++)
    if (!test_close(flce_load(actual, dtype, i), expected[i],
                    tolerance[i] + test_epsilon(dtype) * fabs(expected[i]) + test_tiny(dtype)))
      return false;
  return true;
}

/* ---- vectors ---- */

static void test_reduce(void) {
  for (int d = 0; d < 2; d++) {
    flce_dtype stat = d ? FLCE_F32 : FLCE_F64;
    void* values = test_fill_normal(stat, TOKENS, 1.0);
    double out[1], sum = 0.0, magnitude = 0.0;
    for (int64_t i = 0; i < TOKENS; i++) {
      sum += flce_load(values, stat, i);
      magnitude += fabs(flce_load(values, stat, i));
    }
    CHECK_OK(backends[0].reduce(backends[0].self, out, values, TOKENS, values, stat, false));
    double factor = flce_load(values, stat, 0);
    CHECK(test_close(flce_load(out, stat, 0), factor * sum,
                     2.0 * test_epsilon(stat) * fabs(factor) * magnitude),
          "reduce with a factor");
    CHECK_OK(backends[0].reduce(backends[0].self, out, values, 0, NULL, stat, false));
    CHECK(flce_load(out, stat, 0) == 0.0, "reduce of nothing");
    free(values);
  }
}

static void test_cast_and_scale(const types* t, int64_t width) {
  flce_dtype pair[2][2] = {{t->accum, t->grad}, {t->dtype, t->accum}};
  for (int p = 0; p < 2; p++) {
    flce_dtype in_dtype = pair[p][0], out_dtype = pair[p][1];
    flce_dtype stat = flce_stat_dtype(in_dtype);
    void *in = test_fill_normal(in_dtype, width, 1.0), *out = test_buffer(out_dtype, width);
    double *same = test_doubles(width), *scaled = test_doubles(width),
           *tolerance = test_doubles(width);
    void *g = test_buffer(stat, 1), *scalars = test_buffer(stat, FLCE_SCALAR_COUNT);
    flce_store(g, stat, 0, -3.0);
    flce_store(scalars, stat, FLCE_SCALAR_INV_DENOM, 0.125);
    flce_store(scalars, stat, FLCE_SCALAR_LOSS_SCALE, 2.0);
    flce_store(scalars, stat, FLCE_SCALAR_DW_SCALE, 8.0);
    double unit = in_dtype == FLCE_F16 ? 8.0 : 2.0;
    for (int64_t i = 0; i < width; i++) {
      same[i] = flce_load(in, in_dtype, i);
      scaled[i] = -3.0 * 0.125 / unit * same[i];
      tolerance[i] = 2.0 * test_epsilon(stat) * fabs(same[i]);
    }
    for (int b = 0; b < 2; b++) {
      const flce_backend* backend = &backends[b];
      CHECK_OK(backend->cast(backend->self, &(flce_cast_args){.out = out,
                                                              .out_dtype = out_dtype,
                                                              .out_pitch = width,
                                                              .in = in,
                                                              .in_dtype = in_dtype,
                                                              .in_pitch = width,
                                                              .rows = 1,
                                                              .cols = width}));
      bool exact = true;
      for (int64_t i = 0; i < width; i++) {
        double one;
        flce_store(&one, out_dtype, 0, same[i]);
        exact &= flce_load(out, out_dtype, i) == flce_load(&one, out_dtype, 0);
      }
      CHECK(exact, "cast, " WHERE, WHERE_VALUES(t, width));
      const flce_scaled apart = {out, in, out_dtype, in_dtype, width};
      CHECK_OK(backend->scale_grads(backend->self, &apart, 1, g, scalars, stat));
      CHECK(all_close(out, out_dtype, scaled, tolerance, width), "scale_grads, " WHERE,
            WHERE_VALUES(t, width));
    }
    flce_store(g, stat, 0, 1.0);
    void* before = copy_of(in, in_dtype, width);
    const flce_scaled in_place = {in, in, in_dtype, in_dtype, width};
    CHECK_OK(backends[0].scale_grads(backends[0].self, &in_place, 1, g, NULL, stat));
    CHECK(test_same(before, in, width * flce_size_of(in_dtype)), "scale_grads by 1 in place");
    free(in), free(out), free(same), free(scaled), free(tolerance), free(g), free(scalars);
    free(before);
  }
}

/* Rows with another leading dimension, and zeros after them. */
static void test_cast_rows(const types* t, int64_t width) {
  enum { ROWS = 5, IN_PAD = 2, OUT_PAD = 3 };
  int64_t in_pitch = width + IN_PAD, out_pitch = width + OUT_PAD;
  void* in = test_fill_normal(t->grad, ROWS * in_pitch, 1.0);
  void* out = test_fill_normal(t->accum, ROWS * out_pitch, 1.0);
  for (int b = 0; b < 2; b++) {
    CHECK_OK(backends[b].cast(backends[b].self, &(flce_cast_args){.out = out,
                                                                  .out_dtype = t->accum,
                                                                  .out_pitch = out_pitch,
                                                                  .in = in,
                                                                  .in_dtype = t->grad,
                                                                  .in_pitch = in_pitch,
                                                                  .rows = ROWS,
                                                                  .cols = width}));
    bool right = true;
    for (int64_t k = 0; k < ROWS * out_pitch; k++) {
      int64_t r = k / out_pitch, j = k % out_pitch;
      double one, given = j < width ? flce_load(in, t->grad, r * in_pitch + j) : 0.0;
      flce_store(&one, t->accum, 0, given);
      right &= flce_load(out, t->accum, k) == flce_load(&one, t->accum, 0);
    }
    CHECK(right, "cast of rows, " WHERE, WHERE_VALUES(t, width));
  }
  free(in), free(out);
}

static void test_add_block(const types* t, int64_t width) {
  enum { ROWS = 3, PAD = 2 };
  int64_t count = ROWS * width, pitch = width + PAD;
  void* accum = test_fill_normal(t->accum, count, 1.0);
  void* block = test_fill_normal(t->dtype, ROWS * pitch, 1.0);
  double *expected = test_doubles(count), *tolerance = test_doubles(count);
  for (int64_t i = 0; i < count; i++) {
    int64_t k = i / width * pitch + i % width;
    expected[i] = flce_load(accum, t->accum, i) + flce_load(block, t->dtype, k);
    tolerance[i] = test_epsilon(flce_stat_dtype(t->accum)) * fabs(expected[i]);
  }
  for (int b = 0; b < 2; b++) {
    void* sum = copy_of(accum, t->accum, count);
    CHECK_OK(backends[b].add_block(backends[b].self, &(flce_add_block_args){.accum = sum,
                                                                            .accum_dtype = t->accum,
                                                                            .block = block,
                                                                            .dtype = t->dtype,
                                                                            .pitch = pitch,
                                                                            .rows = ROWS,
                                                                            .cols = width}));
    CHECK(all_close(sum, t->accum, expected, tolerance, count), "add_block, " WHERE,
          WHERE_VALUES(t, width));
    free(sum);
  }
  free(accum), free(block), free(expected), free(tolerance);
}

static void test_column_sum(const types* t, int64_t width, bool weighted, bool accumulate) {
  flce_dtype stat = flce_stat_dtype(t->dtype);
  int64_t pitch = width + 5,
          rows = TOKENS; /* more rows than are summed on their own (GROUP_ROWS) */
  void* a = test_fill_normal(t->dtype, (rows - 1) * pitch + width, 1.0);
  void *weights = test_fill_normal(stat, rows, 1.0), *start = test_fill_normal(stat, width, 1.0);
  flce_store(weights, stat, 9, 0.0);
  if (weighted)
    flce_store(a, t->dtype, 9 * pitch, NAN); /* in a row of weight 0, which adds nothing */
  double *expected = test_doubles(width), *tolerance = test_doubles(width);
  for (int64_t h = 0; h < width; h++) {
    expected[h] = accumulate ? flce_load(start, stat, h) : 0.0;
    tolerance[h] = fabs(expected[h]);
    for (int64_t i = 0; i < rows; i++) {
      double w = weighted ? flce_load(weights, stat, i) : 1.0;
      if (w == 0.0) continue;
      expected[h] += w * flce_load(a, t->dtype, i * pitch + h);
      tolerance[h] += fabs(w * flce_load(a, t->dtype, i * pitch + h));
    }
    tolerance[h] *= 32.0 * test_epsilon(stat);
  }
  void* out[2];
  for (int b = 0; b < 2; b++) {
    out[b] = copy_of(start, stat, width);
    CHECK_OK(backends[b].column_sum(backends[b].self,
                                    &(flce_column_sum_args){.out = out[b],
                                                            .a = a,
                                                            .a_dtype = t->dtype,
                                                            .pitch = pitch,
                                                            .rows = rows,
                                                            .cols = width,
                                                            .weights = weighted ? weights : NULL,
                                                            .accumulate = accumulate}));
    CHECK(all_close(out[b], stat, expected, tolerance, width), "column_sum, " WHERE,
          WHERE_VALUES(t, width));
  }
  CHECK(test_same(out[0], out[1], width * flce_size_of(stat)), "threads change column_sum");
  free(a), free(weights), free(start), free(expected), free(tolerance), free(out[0]), free(out[1]);
}

/* ---- rows of x, dX, dW ---- */

static void test_scale_rows(const types* t, int64_t width, bool scaled, bool gathered) {
  enum { ROWS = 5, PICKED = 4, PAD = 3 };
  static const int64_t index[PICKED] = {4, -1, 3, 1};
  flce_dtype stat = flce_stat_dtype(t->dtype);
  int64_t rows = gathered ? PICKED : ROWS, pitch = width + PAD, count = rows * pitch;
  void* x = test_fill_normal(t->dtype, ROWS * width, 1.0);
  void* coef = test_fill_normal(stat, ROWS, 1.0);
  flce_store(coef, stat, 3, 0.0);
  if (scaled) flce_store(x, t->dtype, 3 * width, NAN);
  double *expected = test_doubles(count), *tolerance = test_doubles(count);
  for (int64_t k = 0; k < count; k++) {
    int64_t i = gathered ? index[k / pitch] : k / pitch, h = k % pitch;
    double c = i < 0 || h >= width ? 0.0 : scaled ? flce_load(coef, stat, i) : 1.0;
    expected[k] = c == 0.0 ? 0.0 : c * flce_load(x, t->dtype, i * width + h);
    tolerance[k] = test_epsilon(stat) * fabs(expected[k]);
  }
  void* out = test_fill_normal(t->dtype, count, 1.0);
  for (int b = 0; b < 2; b++) {
    CHECK_OK(backends[b].scale_rows(backends[b].self,
                                    &(flce_scale_rows_args){.out = out,
                                                            .out_pitch = pitch,
                                                            .x = x,
                                                            .dtype = t->dtype,
                                                            .coef = scaled ? coef : NULL,
                                                            .index = gathered ? index : NULL,
                                                            .rows = rows,
                                                            .hidden = width}));
    CHECK(all_close(out, t->dtype, expected, tolerance, count),
          "scale_rows scaled %d gathered %d, " WHERE, scaled, gathered, WHERE_VALUES(t, width));
  }
  free(x), free(coef), free(expected), free(tolerance), free(out);
}

/* Checks that `scaled`, written by finish_grad_input, is coef x. */
static void check_scaled(const types* t, const void* scaled, const void* x, const flce_rows* rows,
                         int64_t width) {
  int64_t count = rows->rows * width;
  double *expected = test_doubles(count), *tolerance = test_doubles(count);
  for (int64_t k = 0; k < count; k++) {
    int64_t row = k / width, i = rows->index ? rows->index[row] : row;
    double c = i < 0 ? 0.0 : flce_load(rows->coef, flce_stat_dtype(t->dtype), i);
    expected[k] = c == 0.0 ? 0.0 : c * flce_load(x, t->dtype, i * width + k % width);
    tolerance[k] = test_epsilon(flce_stat_dtype(t->dtype)) * fabs(expected[k]);
  }
  CHECK(all_close(scaled, t->dtype, expected, tolerance, count), "scaled_x, " WHERE,
        WHERE_VALUES(t, width));
  free(expected), free(tolerance);
}

static void test_finish_grad_input(const types* t, int64_t width, bool smooth) {
  enum { ROWS = 6 };
  flce_dtype stat = flce_stat_dtype(t->dtype);
  int64_t count = ROWS * width, target[ROWS] = {0, VOCAB - 1, IGNORE_INDEX, 3, VOCAB, 3};
  void *d = test_fill_normal(t->accum, count, 1.0), *wsum = test_fill_normal(stat, width, 3.0);
  void* w = test_fill_normal(t->dtype, VOCAB * width, 1.0);
  void* coef = test_fill_normal(stat, FLCE_COEF_COUNT * ROWS, 1.0);
  double *expected = test_doubles(count), *tolerance = test_doubles(count);
  for (int64_t i = 0; i < ROWS; i++) {
    for (int64_t h = 0; h < width; h++) {
      if (target[i] < 0 || target[i] >= VOCAB) continue;
      double a = flce_load(coef, stat, i) * flce_load(d, t->accum, i * width + h);
      double b = flce_load(coef, stat, ROWS + i) * flce_load(w, t->dtype, target[i] * width + h);
      double c = smooth ? flce_load(coef, stat, 2 * ROWS + i) * flce_load(wsum, stat, h) : 0.0;
      expected[i * width + h] = a + b - c;
      tolerance[i * width + h] = 4.0 * test_epsilon(stat) * (fabs(a) + fabs(b) + fabs(c));
    }
  }
  flce_store(d, t->accum, 2 * width, NAN); /* in the ignored row */
  void *x = test_fill_normal(t->dtype, count, 1.0), *scaled = test_buffer(t->dtype, count);
  flce_store(x, t->dtype, 2 * width, NAN);
  flce_store(coef, stat, 2, 0.0);
  flce_rows rows = {.rows = ROWS,
                    .vocab = VOCAB,
                    .target = target,
                    .options = {.ignore_index = IGNORE_INDEX},
                    .stat_pitch = ROWS,
                    .coef = coef};
  for (int run = 0; run < 4; run++) { /* 1 and 3 threads; in place or not */
    const flce_backend* backend = &backends[run & 1];
    if (run >= 2 && t->accum != t->grad) break;
    void* dx = run >= 2 ? copy_of(d, t->accum, count) : test_buffer(t->grad, count);
    CHECK_OK(backend->finish_grad_input(backend->self,
                                        &(flce_grad_input_args){.dx = dx,
                                                                .dx_dtype = t->grad,
                                                                .d = run >= 2 ? dx : d,
                                                                .d_dtype = t->accum,
                                                                .w = w,
                                                                .dtype = t->dtype,
                                                                .rows = &rows,
                                                                .wsum = smooth ? wsum : NULL,
                                                                .x = x,
                                                                .scaled_x = scaled,
                                                                .hidden = width,
                                                                .cols = width}));
    bool nan = true;
    for (int64_t h = 0; h < width; h++) {
      nan &= isnan(flce_load(dx, t->grad, 4 * width + h));
      flce_store(dx, t->grad, 4 * width + h, 0.0);
    }
    CHECK(nan, "dX of a row out of range is NaN, " WHERE, WHERE_VALUES(t, width));
    CHECK(all_close(dx, t->grad, expected, tolerance, count), "finish_grad_input, " WHERE,
          WHERE_VALUES(t, width));
    check_scaled(t, scaled, x, &rows, width);
    free(dx);
  }
  free(d), free(wsum), free(w), free(coef), free(x), free(scaled);
  free(expected), free(tolerance);
}

/* Gathered rows, and rows that are only reordered and converted (coef NULL). dX has fewer columns
 * than D. */
static void test_grad_input_of_rows(const types* t, int64_t width, bool with_coef, bool gathered) {
  enum { ROWS = 6, PICKED = 4, UNTOUCHED = 7 };
  static const int64_t index[PICKED] = {5, -1, 0, 4}, own[ROWS] = {0, 1, 2, 3, 4, 5};
  flce_dtype stat = flce_stat_dtype(t->dtype);
  int64_t cols = width > 1 ? width - 1 : width, count = ROWS * cols;
  int64_t target[ROWS] = {0, 2, IGNORE_INDEX, 3, VOCAB, 3};
  int64_t picked = gathered ? PICKED : ROWS;
  const int64_t* tokens = gathered ? index : own;
  void *d = test_fill_normal(t->accum, picked * width, 1.0), *dx = test_buffer(t->grad, count);
  void* w = test_fill_normal(t->dtype, VOCAB * width, 1.0);
  void* coef = test_fill_normal(stat, FLCE_COEF_COUNT * ROWS, 1.0);
  void* x = test_fill_normal(t->dtype, ROWS * width, 1.0);
  void* scaled = test_buffer(t->dtype, ROWS * width);
  double *expected = test_doubles(count), *tolerance = test_doubles(count);
  flce_fill(expected, FLCE_F64, UNTOUCHED, count);
  flce_fill(dx, t->grad, UNTOUCHED, count);
  for (int64_t k = 0; k < picked * width; k++) {
    int64_t i = tokens[k / width], h = k % width;
    if (i < 0 || h >= cols) continue;
    double a = flce_load(d, t->accum, k), b = 0.0;
    if (with_coef) {
      a *= flce_load(coef, stat, FLCE_COEF_EXP * ROWS + i);
      b = flce_load(coef, stat, FLCE_COEF_TARGET * ROWS + i) *
          flce_load(w, t->dtype, target[i] >= 0 && target[i] < VOCAB ? target[i] * width + h : 0);
    }
    expected[i * cols + h] = target[i] == IGNORE_INDEX ? 0.0 : a + b;
    tolerance[i * cols + h] = 4.0 * test_epsilon(stat) * (fabs(a) + fabs(b));
  }
  flce_rows rows = {.rows = picked,
                    .vocab = VOCAB,
                    .index = gathered ? index : NULL,
                    .target = target,
                    .options = {.ignore_index = IGNORE_INDEX},
                    .stat_pitch = ROWS,
                    .coef = with_coef ? coef : NULL};
  for (int b = 0; b < 2; b++) {
    CHECK_OK(backends[b].finish_grad_input(
        backends[b].self, &(flce_grad_input_args){.dx = dx,
                                                  .dx_dtype = t->grad,
                                                  .d = d,
                                                  .d_dtype = t->accum,
                                                  .w = with_coef ? w : NULL,
                                                  .dtype = t->dtype,
                                                  .rows = &rows,
                                                  .x = x,
                                                  .scaled_x = with_coef ? scaled : NULL,
                                                  .hidden = width,
                                                  .cols = cols}));
    bool nan = true; /* the row out of range is NaN */
    for (int64_t h = 0; h < cols; h++) {
      nan &= isnan(flce_load(dx, t->grad, 4 * cols + h));
      flce_store(dx, t->grad, 4 * cols + h, expected[4 * cols + h]);
    }
    CHECK(nan, "dX of a row out of range is NaN, " WHERE, WHERE_VALUES(t, width));
    CHECK(all_close(dx, t->grad, expected, tolerance, count),
          "finish_grad_input coef %d gathered %d, " WHERE, with_coef, gathered,
          WHERE_VALUES(t, width));
    if (with_coef) check_scaled(t, scaled, x, &rows, width);
  }
  free(d), free(dx), free(w), free(coef), free(x), free(scaled);
  free(expected), free(tolerance);
}

typedef struct weight_case {
  const types* t;
  int64_t width;
  bool targets, smooth, weighted;
  flce_dtype stat;
  int64_t target[TOKENS];
  void *accum, *x, *coef, *xsum, *weight, *order;
  double *expected, *tolerance;
} weight_case;

static void expect_weight(weight_case* c) {
  int64_t width = c->width;
  for (int64_t k = 0; k < VOCAB * width; k++) {
    double w = c->weighted ? flce_load(c->weight, c->stat, k / width) : 1.0;
    double smooth = c->smooth ? w * flce_load(c->xsum, c->stat, k % width) : 0.0;
    c->expected[k] = flce_load(c->accum, c->t->accum, k) - smooth;
    c->tolerance[k] = fabs(c->expected[k]) + 2.0 * fabs(smooth);
  }
  for (int64_t i = 0; c->targets && i < TOKENS; i++) {
    for (int64_t h = 0; c->target[i] >= 0 && h < width; h++) {
      double term = flce_load(c->coef, c->stat, i) * flce_load(c->x, c->t->dtype, i * width + h);
      c->expected[c->target[i] * width + h] += term;
      c->tolerance[c->target[i] * width + h] += fabs(term);
    }
  }
  for (int64_t k = 0; k < VOCAB * width; k++) c->tolerance[k] *= 16.0 * test_epsilon(c->stat);
}

static void run_weight(const weight_case* c, bool in_place) {
  const types* t = c->t;
  int64_t count = VOCAB * c->width;
  void* dw[2];
  for (int b = 0; b < 2; b++) {
    dw[b] = in_place ? copy_of(c->accum, t->accum, count) : test_buffer(t->grad, count);
    CHECK_OK(backends[b].finish_grad_weight(
        backends[b].self, &(flce_grad_weight_args){.dw = dw[b],
                                                   .dw_dtype = t->grad,
                                                   .accum = in_place ? dw[b] : c->accum,
                                                   .accum_dtype = t->accum,
                                                   .x = c->x,
                                                   .dtype = t->dtype,
                                                   .coef_target = c->targets ? c->coef : NULL,
                                                   .order = c->targets ? c->order : NULL,
                                                   .tokens = TOKENS,
                                                   .xsum = c->smooth ? c->xsum : NULL,
                                                   .class_weight = c->weighted ? c->weight : NULL,
                                                   .vocab = VOCAB,
                                                   .hidden = c->width,
                                                   .x_pitch = c->width}));
    CHECK(all_close(dw[b], t->grad, c->expected, c->tolerance, count),
          "finish_grad_weight in place %d targets %d smooth %d, " WHERE, in_place, c->targets,
          c->smooth, WHERE_VALUES(t, c->width));
  }
  CHECK(test_same(dw[0], dw[1], count * flce_size_of(t->grad)), "threads change dW, " WHERE,
        WHERE_VALUES(t, c->width));
  free(dw[0]), free(dw[1]);
}

static void test_finish_grad_weight(const types* t, int64_t width, int options) {
  weight_case c = {.t = t,
                   .width = width,
                   .targets = options != 2,
                   .smooth = options >= 1,
                   .weighted = options == 1,
                   .stat = flce_stat_dtype(t->dtype)};
  make_targets(c.target);
  c.accum = test_fill_normal(t->accum, VOCAB * width, 1.0);
  c.x = test_fill_normal(t->dtype, TOKENS * width, 1.0);
  c.coef = test_fill_normal(c.stat, TOKENS, 1.0);
  c.xsum = test_fill_normal(c.stat, width, 1.0);
  c.weight = test_fill_normal(c.stat, VOCAB, 1.0);
  c.expected = test_doubles(VOCAB * width);
  c.tolerance = test_doubles(VOCAB * width);
  flce_problem problem = {
      .shape.tokens = TOKENS, .shape.vocab = VOCAB, .loss = {.ignore_index = IGNORE_INDEX}};
  flce_facts facts;
  CHECK_OK(backends[0].facts(backends[0].self, &problem, &facts));
  c.order = malloc((size_t)facts.order_bytes);
  CHECK_OK(backends[0].order_targets(backends[0].self, &problem, c.target, c.order));
  expect_weight(&c);
  run_weight(&c, false);
  if (t->accum == t->grad) run_weight(&c, true);

  /* db equals a dW with one column and x = 1. */
  if (width == 1 && t->accum == c.stat) {
    for (int64_t i = 0; i < TOKENS; i++) flce_store(c.x, t->dtype, i, 1.0);
    expect_weight(&c);
    void* db = test_buffer(t->grad, VOCAB);
    CHECK_OK(backends[0].finish_grad_bias(
        backends[0].self, &(flce_grad_bias_args){.db = db,
                                                 .db_dtype = t->grad,
                                                 .accum = c.accum,
                                                 .stat = c.stat,
                                                 .coef_target = c.targets ? c.coef : NULL,
                                                 .order = c.order,
                                                 .tokens = TOKENS,
                                                 .smooth_total = c.smooth ? c.xsum : NULL,
                                                 .class_weight = c.weighted ? c.weight : NULL,
                                                 .vocab = VOCAB}));
    CHECK(all_close(db, t->grad, c.expected, c.tolerance, VOCAB), "finish_grad_bias, " WHERE,
          WHERE_VALUES(t, width));
    free(db);
  }
  free(c.accum), free(c.x), free(c.coef), free(c.xsum), free(c.weight), free(c.order);
  free(c.expected), free(c.tolerance);
}

static void test_refusals(void) {
  double a[4] = {0};
  const flce_backend* b = &backends[0];
  CHECK(b->cast(b->self, &(flce_cast_args){.out = a,
                                           .out_dtype = FLCE_F32,
                                           .out_pitch = 2,
                                           .in = a,
                                           .in_dtype = FLCE_F64,
                                           .in_pitch = 2,
                                           .rows = 1,
                                           .cols = 2}) == FLCE_UNSUPPORTED &&
            strstr(flce_last_error(), "in place, got float32 for float64"),
        "cast in place: %s", flce_last_error());
  CHECK(b->add_block(b->self, &(flce_add_block_args){.accum = a,
                                                     .accum_dtype = FLCE_F32,
                                                     .block = a + 2,
                                                     .dtype = FLCE_F64,
                                                     .pitch = 1,
                                                     .rows = 1,
                                                     .cols = 1}) == FLCE_UNSUPPORTED,
        "float64 added to float32");
  CHECK_OK(b->cast(b->self, &(flce_cast_args){.out = a,
                                              .out_dtype = FLCE_F32,
                                              .out_pitch = 0,
                                              .in = a + 1,
                                              .in_dtype = FLCE_F64,
                                              .in_pitch = 0,
                                              .rows = 1,
                                              .cols = 0}));
  CHECK_OK(b->fill(b->self, a, 0, 0));
}

int main(void) {
  test_seed(3);
  for (int threads = 0; threads < 2; threads++) {
    cpus[threads] = test_cpu(threads ? 3 : 1);
    flce_cpu_backend(&cpus[threads], &backends[threads]);
  }
  test_reduce();
  test_refusals();
  for (int index = 0; test_next_variant(&index);) {
    for (int k = 0; k < TYPES; k++) {
      for (int w = 0; w < WIDTHS; w++) {
        const types* t = &kTypes[k];
        test_cast_and_scale(t, kWidths[w]);
        test_cast_rows(t, kWidths[w]);
        test_add_block(t, kWidths[w]);
        for (int options = 0; options < 4; options++)
          test_column_sum(t, kWidths[w], options & 1, options & 2);
        for (int options = 0; options < 4; options++)
          test_scale_rows(t, kWidths[w], options & 1, options & 2);
        for (int smooth = 0; smooth < 2; smooth++) test_finish_grad_input(t, kWidths[w], smooth);
        for (int options = 0; options < 4; options++)
          test_grad_input_of_rows(t, kWidths[w], options & 1, options & 2);
        for (int options = 0; options < 3; options++)
          test_finish_grad_weight(t, kWidths[w], options);
      }
    }
  }
  return test_verdict();
}
