/* class_logits, top_classes and class_gradients of the CPU backend, called one by one, compared
 * with double: dtypes, ids that are none, of other ranks, equal or out of range, an index, threads.
 */
#include "test.h"

#include <stdlib.h>
#include <string.h>

enum { TOKENS = 9, VOCAB = 61, IGNORED_ROW = 3, OUTSIDE_ROW = 5, IGNORE_INDEX = -7, PAD = 3 };
/* Classes of a vocabulary of which this rank has [FIRST, FIRST + VOCAB). */
enum { FIRST = 20, ALL = 10000 };

static const flce_dtype kDtypes[] = {FLCE_F64, FLCE_F32, FLCE_BF16, FLCE_F16};
static const int64_t kCounts[] = {1, 5, 64, 300};
static flce_cpu cpus[2];
static flce_backend backends[2];

#define WHERE "%s count %lld, row %lld"
#define WHERE_VALUES(dtype, count, i) flce_dtype_name(dtype), (long long)(count), (long long)(i)

/* Rows with an index: row r is token index[r]; the last row is absent. */
typedef struct rows_case {
  flce_dtype dtype, stat;
  int64_t count, target[TOKENS], index[TOKENS];
  int64_t* ids;
  void* bias;
} rows_case;

static rows_case make_case(flce_dtype dtype, int64_t count) {
  rows_case c = {.dtype = dtype, .stat = flce_stat_dtype(dtype), .count = count};
  c.ids = malloc(sizeof(int64_t) * (size_t)(TOKENS * count));
  for (int64_t i = 0; i < TOKENS; i++) {
    c.target[i] = (int64_t)(test_random() % VOCAB);
    c.index[i] = i == TOKENS - 1 ? -1 : TOKENS - 1 - i;
  }
  c.target[IGNORED_ROW] = IGNORE_INDEX;
  c.target[OUTSIDE_ROW] = VOCAB;
  for (int64_t k = 0; k < TOKENS * count; k++) {
    c.ids[k] = (int64_t)(test_random() % 100);
    if (k % 4 == 3) c.ids[k] = c.ids[k - 1];
    if (k % 5 == 4) c.ids[k] = c.ids[k - 1] + 4096; /* which a filter by bits may confuse */
    if (k % 7 == 6) c.ids[k] = IGNORE_INDEX;
  }
  c.bias = test_fill_normal(c.stat, VOCAB, 3.0);
  return c;
}

static void free_case(rows_case* c) {
  free(c->ids);
  free(c->bias);
}

static flce_rows view_of(rows_case* c) {
  return (flce_rows){
      .rows = TOKENS,
      .vocab = VOCAB,
      .target = c->target,
      .options = {.ignore_index = IGNORE_INDEX, .logit_scale = 1.0, .temperature = 1.0},
      .classes = {
          .ids = c->ids, .count = c->count, .first = FIRST, .all = ALL, .none = IGNORE_INDEX}};
}

/* The column of an id; -1 if this rank has none. */
static int64_t column_of(int64_t id) {
  bool own = id != IGNORE_INDEX && id >= FIRST && id < FIRST + VOCAB;
  return own ? id - FIRST : -1;
}

static bool is_outside(int64_t id) {
  return id != IGNORE_INDEX && (id < 0 || id >= ALL);
}

/* ---- class_logits ---- */

static void check_logits(const rows_case* c, const flce_class_logits_args* call) {
  flce_dtype dtype = c->dtype;
  for (int64_t i = 0; i < TOKENS; i++) {
    bool right = true;
    for (int64_t k = i * c->count; k < (i + 1) * c->count; k++) {
      double actual = flce_load(call->out, c->stat, k), expected = 0.0, size = 0.0;
      int64_t column = column_of(c->ids[k]);
      if (i == IGNORED_ROW) {
        right &= actual == 0.0;
        continue;
      }
      if (i == OUTSIDE_ROW || is_outside(c->ids[k])) {
        right &= isnan(actual);
        continue;
      }
      for (int64_t h = 0; column >= 0 && h < call->hidden; h++) {
        double term = flce_load(call->x, dtype, i * call->hidden + h) *
                      flce_load(call->w, dtype, column * call->hidden + h);
        expected += term;
        size += fabs(term);
      }
      double rounding = test_epsilon(c->stat) * (size + 8.0 * fabs(expected));
      if (call->rounded == FLCE_BF16) rounding += 1.01 * test_epsilon(FLCE_BF16) * fabs(expected);
      double bias = column >= 0 && call->bias ? flce_load(call->bias, c->stat, column) : 0.0;
      rounding += test_epsilon(c->stat) * (fabs(bias) + fabs(expected));
      right &= test_close(actual, expected + bias, rounding);
      /* The bias is added to what the GEMM rounds to bfloat16. */
      double product = actual - bias;
      if (call->rounded == FLCE_BF16 && fabs(bias) < fabs(product))
        right &= test_close((double)flce_from_bf16(flce_to_bf16((float)product)), product,
                            4.0 * test_epsilon(c->stat) * (fabs(product) + fabs(bias)));
    }
    CHECK(right, "class_logits, " WHERE, WHERE_VALUES(dtype, c->count, i));
  }
}

static void test_logits(flce_dtype dtype, int64_t count, int64_t hidden, bool rounds, bool biased) {
  rows_case c = make_case(dtype, count);
  c.ids[0] = ALL;
  c.ids[count * (TOKENS - 1)] = -1; /* no class, and not the id of none */
  flce_rows view = view_of(&c);
  void* x = test_fill_normal(dtype, TOKENS * hidden, 1.0);
  void* w = test_fill_normal(dtype, VOCAB * hidden, 1.0);
  void* out[] = {test_buffer(c.stat, TOKENS * count), test_buffer(c.stat, TOKENS * count)};
  for (int threads = 0; threads < 2; threads++) {
    flce_class_logits_args call = {.out = out[threads],
                                   .rows = &view,
                                   .x = x,
                                   .w = w,
                                   .bias = biased ? c.bias : NULL,
                                   .dtype = dtype,
                                   .rounded = rounds ? FLCE_BF16 : c.stat,
                                   .hidden = hidden};
    CHECK_OK(backends[threads].class_logits(backends[threads].self, &call));
    check_logits(&c, &call);
  }
  CHECK(test_same(out[0], out[1], TOKENS * count * flce_size_of(c.stat)), "class_logits, threads");
  free(x), free(w), free(out[0]), free(out[1]);
  free_case(&c);
}

/* ---- top_classes ---- */

static double value_at(const rows_case* c, const flce_rows* view, int64_t r, int64_t j) {
  double z = flce_load(view->z, c->dtype, r * view->z_pitch + j);
  if (view->bias) z += flce_load(view->bias, c->stat, j);
  return view->options.logit_scale < 0.0 ? -z : z;
}

/* Whether the row's ids descend by value, equal ones by class, and no other class is above. */
static bool is_top(const rows_case* c, const flce_rows* view, int64_t r, const int64_t* ids) {
  int64_t used = c->count < VOCAB ? c->count : VOCAB, above = 0;
  for (int64_t k = used; k < c->count; k++)
    if (ids[k] != -1) return false;
  for (int64_t k = 0; k < used; k++) {
    int64_t own = column_of(ids[k]), next = k + 1 < used ? column_of(ids[k + 1]) : -1;
    if (own < 0 || (k + 1 < used && next < 0)) return false;
    if (next < 0) continue;
    double first = value_at(c, view, r, own), second = value_at(c, view, r, next);
    if (!(first > second || (first == second && own < next))) return false;
  }
  int64_t last = column_of(ids[used - 1]);
  double least = value_at(c, view, r, last);
  for (int64_t j = 0; j < VOCAB; j++) {
    double value = value_at(c, view, r, j);
    above += value > least || (value == least && j < last);
  }
  return above == used - 1;
}

enum { NORMAL, EQUAL, IMPOSSIBLE, NO_CLASS, KINDS }; /* IMPOSSIBLE: most are -inf; NO_CLASS: all */

static void* draw_logits(flce_dtype dtype, int kind) {
  void* z = test_fill_normal(dtype, TOKENS * (VOCAB + PAD), 4.0);
  for (int64_t k = 0; k < TOKENS * (VOCAB + PAD); k++) {
    if (kind == EQUAL) flce_store(z, dtype, k, (double)(test_random() % 3));
    if (kind == NO_CLASS || (kind == IMPOSSIBLE && test_random() % 4))
      flce_store(z, dtype, k, -INFINITY);
  }
  return z;
}

static void test_top(flce_dtype dtype, int64_t count, int kind, bool biased, double scale) {
  rows_case c = make_case(dtype, count);
  flce_rows view = view_of(&c);
  view.z = draw_logits(dtype, kind);
  view.z_dtype = dtype;
  view.z_pitch = VOCAB + PAD;
  view.bias = biased ? c.bias : NULL;
  view.options.logit_scale = scale;
  view.index = c.index;
  int64_t bytes = (int64_t)sizeof(int64_t) * TOKENS * count;
  int64_t* found[] = {malloc((size_t)bytes), malloc((size_t)bytes)};
  for (int threads = 0; threads < 2; threads++) {
    memset(found[threads], 0x5a, (size_t)bytes);
    view.classes.ids = found[threads];
    CHECK_OK(backends[threads].top_classes(backends[threads].self, &view, false));
  }
  CHECK(test_same(found[0], found[1], bytes), "top_classes, threads");
  for (int64_t r = 0; r < TOKENS; r++) {
    int64_t i = c.index[r];
    const int64_t* ids = found[0] + (i < 0 ? 0 : i) * count;
    bool right = true;
    if (i < 0) { /* absent: the rows of no index, of which 0 is one, are not written */
      for (int64_t k = 0; k < count; k++) right &= ids[k] == 0x5a5a5a5a5a5a5a5a;
    } else if (i == IGNORED_ROW || i == OUTSIDE_ROW) {
      for (int64_t k = 0; k < count; k++) right &= ids[k] == -1;
    } else {
      right = is_top(&c, &view, r, ids);
    }
    CHECK(right, "top_classes kind %d bias %d scale %g, " WHERE, kind, biased, scale,
          WHERE_VALUES(dtype, count, r));
  }
  free((void*)view.z), free(found[0]), free(found[1]);
  free_case(&c);
}

/* ---- class_gradients ---- */

/* A row of dz plus the sums of its gradients, rounded once. */
static bool is_sum(const rows_case* c, int64_t i, const void* before, const void* after,
                   const void* grads) {
  for (int64_t j = 0; j < VOCAB; j++) {
    double sum = 0.0, size = 0.0, own = flce_load(before, c->dtype, j);
    for (int64_t k = i * c->count; k < (i + 1) * c->count; k++) {
      if (i == IGNORED_ROW || i == OUTSIDE_ROW || column_of(c->ids[k]) != j) continue;
      sum += flce_load(grads, c->stat, k);
      size += fabs(flce_load(grads, c->stat, k));
    }
    double tolerance = test_epsilon(c->dtype) * fabs(own + sum) + test_tiny(c->dtype) +
                       (size > 0.0 ? 2.0 * test_epsilon(FLCE_F64) * (double)c->count * size : 0.0);
    if (!test_close(flce_load(after, c->dtype, j), own + sum, tolerance)) return false;
  }
  return test_same(flce_const_at(before, c->dtype, VOCAB), flce_const_at(after, c->dtype, VOCAB),
                   PAD * flce_size_of(c->dtype));
}

static void test_gradients(flce_dtype dtype, int64_t count, bool indexed, bool equal) {
  rows_case c = make_case(dtype, count);
  for (int64_t k = 0; equal && k < TOKENS * count; k++) c.ids[k] = FIRST + (k / count) % VOCAB;
  flce_rows view = view_of(&c);
  void* grads = test_buffer(c.stat, TOKENS * count);
  for (int64_t k = 0; k < TOKENS * count; k++)
    flce_store(grads, c.stat, k, equal ? 1.0 : test_normal());
  int64_t pitch = VOCAB + PAD, elements = TOKENS * pitch;
  void* before = test_fill_normal(dtype, elements, 1.0);
  void* after[] = {test_buffer(dtype, elements), test_buffer(dtype, elements)};
  view.out_dtype = dtype;
  view.out_pitch = pitch;
  view.classes.grads = grads;
  view.index = indexed ? c.index : NULL;
  for (int threads = 0; threads < 2; threads++) {
    memcpy(after[threads], before, (size_t)(elements * flce_size_of(dtype)));
    view.out = after[threads];
    CHECK_OK(backends[threads].class_gradients(backends[threads].self, &view, NULL));
  }
  CHECK(test_same(after[0], after[1], elements * flce_size_of(dtype)), "class_gradients, threads");
  for (int64_t r = 0; r < TOKENS; r++) {
    int64_t i = indexed ? c.index[r] : r;
    const void* own = flce_const_at(before, dtype, r * pitch);
    const void* made = flce_const_at(after[0], dtype, r * pitch);
    bool right =
        i < 0 ? test_same(own, made, pitch * flce_size_of(dtype)) : is_sum(&c, i, own, made, grads);
    CHECK(right, "class_gradients index %d equal %d, " WHERE, indexed, equal,
          WHERE_VALUES(dtype, count, r));
  }
  c.ids[count - 1] = ALL; /* of token 0 */
  view.index = NULL;
  CHECK_OK(backends[0].class_gradients(backends[0].self, &view, NULL));
  CHECK(isnan(flce_load(view.out, dtype, 0)) && !isnan(flce_load(view.out, dtype, pitch)),
        "class_gradients of a class that does not exist, " WHERE, WHERE_VALUES(dtype, count, 0));
  free(grads), free(before), free(after[0]), free(after[1]);
  free_case(&c);
}

static void test_refusals(void) {
  rows_case c = make_case(FLCE_F16, 1);
  flce_rows view = view_of(&c);
  float scale[4] = {1.0f, 0.0f, 1.0f, 0.0f};
  flce_class_logits_args call = {.rows = &view, .dtype = FLCE_F16, .rounded = FLCE_F16};
  const flce_backend* b = &backends[0];
  CHECK(b->class_logits(b->self, &call) == FLCE_UNSUPPORTED, "class_logits rounded to float16");
  CHECK(b->class_gradients(b->self, &view, scale) == FLCE_UNSUPPORTED,
        "class_gradients with scale");
  CHECK(b->top_classes(b->self, &view, true) == FLCE_UNSUPPORTED, "top_classes of exp rows");
  free_case(&c);
}

static void test_all(flce_dtype dtype, int64_t count, bool first, bool second) {
  test_logits(dtype, count, second ? 7 : 300, first && dtype == FLCE_BF16, second);
  test_gradients(dtype, count, first, second);
  for (int kind = 0; kind < KINDS; kind++) test_top(dtype, count, kind, first, second ? -0.5 : 2.0);
}

int main(void) {
  test_seed(11);
  for (int threads = 0; threads < 2; threads++) {
    cpus[threads] = test_cpu(threads ? 3 : 1);
    flce_cpu_backend(&cpus[threads], &backends[threads]);
  }
  test_refusals();
  for (int index = 0; test_next_variant(&index);) {
    for (size_t d = 0; d < sizeof kDtypes / sizeof *kDtypes; d++)
      for (size_t k = 0; k < sizeof kCounts / sizeof *kCounts; k++)
        for (int options = 0; options < 4; options++)
          test_all(kDtypes[d], kCounts[k], options & 1, options & 2);
  }
  return test_verdict();
}
