/* class_logits, top_classes, class_gradients and tail_rows of the CPU backend, called one by one,
 * compared with double: dtypes, ids that are none, of other ranks, equal or out of range, an index,
 * threads.
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
    CHECK_OK(backends[threads].top_classes(backends[threads].self, &view, NULL));
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

/* What a row of dz is made of besides its classes' z and gradients. */
typedef struct gradient_case {
  rows_case rows;
  flce_loss options;
  void *z, *grads; /* [TOKENS][count]; equal ids of a row have equal z */
  void *stats, *coef, *class_weight;
} gradient_case;

static gradient_case make_gradient_case(flce_dtype dtype, int64_t count, bool equal, bool general) {
  gradient_case g = {.rows = make_case(dtype, count)};
  rows_case* c = &g.rows;
  for (int64_t k = 0; equal && k < TOKENS * count; k++) c->ids[k] = FIRST + (k / count) % VOCAB;
  g.options = (flce_loss){.ignore_index = IGNORE_INDEX, .logit_scale = 1.0, .temperature = 1.0};
  if (general) g.options.logit_scale = 0.75, g.options.softcap = 3.0, g.options.temperature = 1.25;
  void* of_class = test_fill_normal(c->stat, 8192, 1.0);
  g.z = test_buffer(c->stat, TOKENS * count);
  g.grads = test_fill_normal(c->stat, TOKENS * count, 1.0);
  for (int64_t k = 0; k < TOKENS * count; k++)
    flce_store(g.z, c->stat, k, flce_load(of_class, c->stat, (uint64_t)c->ids[k] % 8192));
  free(of_class);
  g.stats = test_buffer(c->stat, FLCE_STAT_COUNT * TOKENS);
  for (int64_t k = 0; k < FLCE_STAT_COUNT * TOKENS; k++)
    flce_store(g.stats, c->stat, k, test_uniform(0.25, 1.0));
  g.coef = test_fill_normal(c->stat, FLCE_COEF_COUNT * TOKENS, 1.0);
  for (int64_t i = 0; i < TOKENS; i++) {
    flce_store(g.coef, c->stat, FLCE_COEF_SOFT * TOKENS + i, 0.0);
    if (!general) flce_store(g.coef, c->stat, FLCE_COEF_ENTROPY * TOKENS + i, 0.0);
  }
  g.class_weight = general ? test_fill_normal(c->stat, VOCAB, 1.0) : NULL;
  return g;
}

static void free_gradient_case(gradient_case* g) {
  free(g->z), free(g->grads), free(g->stats), free(g->coef), free(g->class_weight);
  free_case(&g->rows);
}

/* dz of column j by the formula of enum flce_coef_row, and in *size the sum of its terms' sizes;
 * false if the column is none of row i's classes. */
static bool expected_gradient(const gradient_case* g, int64_t i, int64_t j, double* value,
                              double* size) {
  const rows_case* c = &g->rows;
  bool found = false;
  double sum = 0.0, z = 0.0;
  *size = 0.0;
  for (int64_t k = i * c->count; k < (i + 1) * c->count; k++) {
    if (column_of(c->ids[k]) != j) continue;
    found = true;
    z = flce_load(g->z, c->stat, k);
    sum += flce_load(g->grads, c->stat, k);
    *size += fabs(flce_load(g->grads, c->stat, k));
  }
#define STAT(which) flce_load(g->stats, c->stat, (which) * TOKENS + i)
#define COEF(which) flce_load(g->coef, c->stat, (which) * TOKENS + i)
  const flce_loss* o = &g->options;
  double u = o->logit_scale * z, l = u / o->temperature, slope = 1.0;
  if (o->softcap > 0.0) {
    double t = tanh(u / o->softcap);
    l = o->softcap * t / o->temperature, slope = 1.0 - t * t;
  }
  double e = exp(l - STAT(FLCE_STAT_OFFSET));
  double mean = -log(STAT(FLCE_STAT_INV_SUM)) - STAT(FLCE_STAT_ENTROPY) + STAT(FLCE_STAT_OFFSET);
  double weight = g->class_weight ? flce_load(g->class_weight, c->stat, j) : 1.0;
  double entropy = e * COEF(FLCE_COEF_ENTROPY) * (mean - l),
         smooth = weight * COEF(FLCE_COEF_SMOOTH);
  bool own = c->target[i] == j;
  double row = own ? 0.0 : e * COEF(FLCE_COEF_EXP), target = own ? COEF(FLCE_COEF_TARGET) : 0.0;
#undef STAT
#undef COEF
  *value = sum + target + slope * (row + entropy - smooth);
  *size += fabs(target) + fabs(row) + fabs(entropy) * 4.0 + fabs(smooth);
  return found;
}

/* The row's classes have their gradients, rounded once; the other columns are as before. */
static bool is_row_of_gradients(const gradient_case* g, int64_t i, const void* before,
                                const void* after) {
  const rows_case* c = &g->rows;
  double stat = test_epsilon(c->stat);
  for (int64_t j = 0; j < VOCAB; j++) {
    double made = flce_load(after, c->dtype, j), value, size;
    if (i == IGNORED_ROW || i == OUTSIDE_ROW || !expected_gradient(g, i, j, &value, &size)) {
      if (made != flce_load(before, c->dtype, j)) return false;
      continue;
    }
    double tolerance = test_epsilon(c->dtype) * fabs(value) + test_tiny(c->dtype) +
                       (16.0 * stat + 2.0 * test_epsilon(FLCE_F64) * (double)c->count) * size;
    if (!test_close(made, value, tolerance)) return false;
  }
  return test_same(flce_const_at(before, c->dtype, VOCAB), flce_const_at(after, c->dtype, VOCAB),
                   PAD * flce_size_of(c->dtype));
}

static void test_gradients(flce_dtype dtype, int64_t count, bool indexed, bool equal) {
  gradient_case g = make_gradient_case(dtype, count, equal, indexed);
  rows_case* c = &g.rows;
  flce_rows view = view_of(c);
  int64_t pitch = VOCAB + PAD, elements = TOKENS * pitch;
  void* before = test_fill_normal(dtype, elements, 1.0);
  void* after[] = {test_buffer(dtype, elements), test_buffer(dtype, elements)};
  view.options = g.options;
  view.out_dtype = dtype;
  view.out_pitch = pitch;
  view.stats = g.stats, view.coef = g.coef, view.stat_pitch = TOKENS;
  view.class_weight = g.class_weight;
  view.classes.z = g.z, view.classes.grads = g.grads;
  view.index = indexed ? c->index : NULL;
  for (int threads = 0; threads < 2; threads++) {
    memcpy(after[threads], before, (size_t)(elements * flce_size_of(dtype)));
    view.out = after[threads];
    CHECK_OK(backends[threads].class_gradients(backends[threads].self, &view, NULL));
  }
  CHECK(test_same(after[0], after[1], elements * flce_size_of(dtype)), "class_gradients, threads");
  for (int64_t r = 0; r < TOKENS; r++) {
    int64_t i = indexed ? c->index[r] : r;
    const void* own = flce_const_at(before, dtype, r * pitch);
    const void* made = flce_const_at(after[0], dtype, r * pitch);
    bool right = i < 0 ? test_same(own, made, pitch * flce_size_of(dtype))
                       : is_row_of_gradients(&g, i, own, made);
    CHECK(right, "class_gradients index %d equal %d, " WHERE, indexed, equal,
          WHERE_VALUES(dtype, count, r));
  }
  c->ids[count - 1] = ALL; /* of token 0 */
  view.index = NULL;
  CHECK_OK(backends[0].class_gradients(backends[0].self, &view, NULL));
  CHECK(isnan(flce_load(view.out, dtype, 0)) && !isnan(flce_load(view.out, dtype, pitch)),
        "class_gradients of a class that does not exist, " WHERE, WHERE_VALUES(dtype, count, 0));
  free(before), free(after[0]), free(after[1]);
  free_gradient_case(&g);
}

/* ---- tail_rows ---- */

static double expected_tail(const rows_case* c, const flce_rows* view, int64_t i, const void* z) {
  double top = -INFINITY, sum = 0.0;
  if (c->target[i] == IGNORE_INDEX) return 0.0;
  if (c->target[i] >= VOCAB) return NAN;
  for (int pass = 0; pass < 2; pass++)
    for (int64_t j = 0; j < VOCAB; j++) {
      bool own = false;
      for (int64_t k = i * c->count; k < (i + 1) * c->count; k++) own |= column_of(c->ids[k]) == j;
      double l =
          (flce_load(z, c->dtype, j) + flce_load(c->bias, c->stat, j)) * view->options.logit_scale;
      if (own) continue;
      if (pass == 0)
        top = fmax(top, l);
      else
        sum += exp(l - top);
    }
  return top == -INFINITY ? top : top + log(sum);
}

/* `all`: every class is the row's own. */
static void test_tail(flce_dtype dtype, int64_t count, bool indexed, bool all) {
  if (all && count < VOCAB) return;
  rows_case c = make_case(dtype, count);
  flce_rows view = view_of(&c);
  for (int64_t k = 0; all && k < TOKENS * count; k++) c.ids[k] = FIRST + k % count % VOCAB;
  view.options.logit_scale = indexed ? -0.5 : 1.0;
  view.bias = c.bias;
  view.z = test_fill_normal(dtype, TOKENS * (VOCAB + PAD), 20.0);
  view.z_dtype = dtype, view.z_pitch = VOCAB + PAD;
  view.index = indexed ? c.index : NULL;
  view.stat_pitch = TOKENS;
  void* stats[] = {test_fill_normal(c.stat, FLCE_STAT_COUNT * TOKENS, 1.0), NULL};
  int64_t bytes = FLCE_STAT_COUNT * TOKENS * flce_size_of(c.stat);
  stats[1] = test_buffer(c.stat, FLCE_STAT_COUNT * TOKENS);
  memcpy(stats[1], stats[0], (size_t)bytes);
  for (int threads = 0; threads < 2; threads++) {
    view.stats = stats[threads];
    CHECK_OK(backends[threads].tail_rows(backends[threads].self, &view));
  }
  CHECK(test_same(stats[0], stats[1], bytes), "tail_rows, threads");
  for (int64_t r = 0; r < TOKENS; r++) {
    int64_t i = indexed ? c.index[r] : r;
    if (i < 0) continue;
    double made = flce_load(stats[0], c.stat, FLCE_STAT_TAIL_LSE * TOKENS + i);
    double value = expected_tail(&c, &view, i, flce_const_at(view.z, dtype, r * (VOCAB + PAD)));
    bool right = isnan(value)
                     ? isnan(made)
                     : test_close(made, value, 64.0 * test_epsilon(c.stat) * (1.0 + fabs(value)));
    CHECK(right, "tail_rows index %d all %d, " WHERE, indexed, all, WHERE_VALUES(dtype, count, r));
  }
  c.ids[0] = ALL;
  view.index = NULL;
  CHECK_OK(backends[0].tail_rows(backends[0].self, &view));
  CHECK(isnan(flce_load(view.stats, c.stat, FLCE_STAT_TAIL_LSE * TOKENS)),
        "tail_rows of a class that does not exist, " WHERE, WHERE_VALUES(dtype, count, 0));
  free((void*)view.z), free(stats[0]), free(stats[1]);
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
  CHECK(b->top_classes(b->self, &view, scale) == FLCE_UNSUPPORTED, "top_classes of exp rows");
  free_case(&c);
}

static void test_all(flce_dtype dtype, int64_t count, bool first, bool second) {
  test_logits(dtype, count, second ? 7 : 300, first && dtype == FLCE_BF16, second);
  test_gradients(dtype, count, first, second);
  test_tail(dtype, count, first, second);
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
