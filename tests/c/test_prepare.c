/* What runs before the logits: scalars and checks of prepare, which rows are computed and the
 * results of the others, and the tokens' order by target. */
#include "test.h"

#include <stdlib.h>
#include <string.h>

enum { TOKENS = 300, VOCAB = 37, IGNORE_INDEX = -1 };

static flce_cpu cpu;
static flce_backend backend;

typedef struct prepare_case {
  flce_reduction reduction;
  int64_t tokens;
  flce_loss loss;
  bool probabilities;
  /* Weights of the 3 classes, factors of the 4 tokens, one num_items; NULL: absent. */
  const double *weight, *token_weight, *temperature, *num_items;
  double expected[5]; /* valid rows, 1 / denominator, sum of class weights, loss scale, z factor */
} prepare_case;

static void* stored(const double* values, flce_dtype stat, int64_t count) {
  if (!values) return NULL;
  void* buffer = test_buffer(stat, count);
  for (int64_t i = 0; i < count; i++) flce_store(buffer, stat, i, values[i]);
  return buffer;
}

static void check_scalars(const prepare_case* c) {
  int64_t target[] = {0, 2, IGNORE_INDEX, 2};
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    flce_dtype stat = flce_stat_dtype((flce_dtype)dtype);
    flce_problem problem = {.shape.tokens = c->tokens,
                            .shape.rows = c->tokens,
                            .shape.vocab = 3,
                            .shape.weight_rows = 4,
                            .dtypes.gemm = (flce_dtype)dtype,
                            .reduction = c->reduction,
                            .has.probabilities = c->probabilities,
                            .loss = c->loss};
    problem.loss.ignore_index = IGNORE_INDEX;
    void* given[] = {stored(c->weight, stat, 3), stored(c->token_weight, stat, 4),
                     stored(c->temperature, stat, 4), stored(c->num_items, stat, 1)};
    flce_tensors tensors = {.target = c->probabilities ? NULL : target,
                            .class_weight = given[0],
                            .token_weight = given[1],
                            .temperature = given[2],
                            .num_items = given[3],
                            .scalars = test_buffer(stat, FLCE_SCALAR_COUNT)};
    CHECK_OK(backend.prepare(backend.self, &problem, &tensors, NULL, 0, false));
    const double* e = c->expected;
    const double all[FLCE_SCALAR_COUNT] = {
        [FLCE_SCALAR_VALID] = e[0],        [FLCE_SCALAR_INV_DENOM] = e[1],
        [FLCE_SCALAR_WEIGHT_TOTAL] = e[2], [FLCE_SCALAR_LOSS_SCALE] = e[3],
        [FLCE_SCALAR_INPUT_SCALE] = 1.0,   [FLCE_SCALAR_DW_SCALE] = e[3],
        [FLCE_SCALAR_Z_FACTOR] = e[4]};
    for (int k = 0; k < FLCE_SCALAR_COUNT; k++) {
      double actual = flce_load(tensors.scalars, stat, k);
      CHECK(test_close(actual, all[k], test_epsilon(stat) * fabs(all[k])),
            "scalar %d is %g, expected %g", k, actual, all[k]);
    }
    for (int k = 0; k < 4; k++) free(given[k]);
    free(tensors.scalars);
  }
}

static void test_prepare(void) {
  static const double weight[] = {0.5, 8.0, 3.0}, heavy[] = {1.0, -0x1.8p127, 1.0},
                      none[] = {0.0, 0.0, 0.0}, items[] = {10.0}, no_items[] = {0.0};
  /* The third token is ignored: its weight and temperature must have no effect. */
  static const double token_weight[] = {1.0, -6.0, 1e6, 2.0}, temperature[] = {0.5, 4.0, 1e-6, 4.0};
  flce_loss plain = {.logit_scale = 1.0, .temperature = 1.0};
  flce_loss scaled = {.logit_scale = -3.0, .temperature = 2.0, .z_loss = 0.25};
  const prepare_case cases[] = {
      {FLCE_MEAN, 4, plain, .expected = {3.0, 1.0 / 3.0, 3.0, 32768.0 / 3.0, 1.0}},
      {FLCE_SUM, 4, plain, .expected = {3.0, 1.0, 3.0, 16384.0, 1.0}},
      {FLCE_MEAN, 0, plain, .expected = {0.0, 0.0, 3.0, 16384.0, 1.0}},
      {FLCE_MEAN, 4, plain, .weight = weight,
       .expected = {3.0, 1.0 / 6.5, 11.5, 8192.0 / 6.5, 6.5 / 3.0}},
      {FLCE_SUM, 4, plain, .weight = heavy, .expected = {3.0, 1.0, 2.0 - 0x1.8p127, 0x1p-114, 1.0}},
      {FLCE_NONE, 4, plain, .weight = none, .expected = {3.0, 1.0, 0.0, 1.0, 1.0}},
      {FLCE_MEAN, 4, plain, .weight = weight, .num_items = items,
       .expected = {3.0, 0.1, 11.5, 1638.4, 1.0}},
      {FLCE_MEAN, 0, plain, .num_items = no_items, .expected = {0.0, 0.0, 3.0, 16384.0, 1.0}},
      {FLCE_SUM, 4, plain, .num_items = no_items, .expected = {3.0, 1.0, 3.0, 16384.0, 1.0}},
      {FLCE_SUM, 4, plain, .num_items = items, .expected = {3.0, 1.0, 3.0, 16384.0, 1.0}},
      {FLCE_MEAN, 4, plain, .probabilities = true, .weight = weight,
       .expected = {4.0, 0.25, 11.5, 2048.0, 1.0}},
      /* 1 / 2 * 3 * (1 + 32) = 49.5 */
      {FLCE_MEAN, 4, scaled, .expected = {3.0, 1.0 / 3.0, 3.0, 512.0 / 3.0, 1.0}},
      /* max |-6| / (2 * 4) and 1 / (2 * 0.5): 1 * 3 * 33 = 99 */
      {FLCE_SUM, 4, scaled, .token_weight = token_weight, .temperature = temperature,
       .expected = {3.0, 1.0, 3.0, 128.0, 1.0}},
      /* 8 * (6 / 2) * 3 * (1 + 32 * 6.5 / 3) = 5064 */
      {FLCE_MEAN, 4, scaled, .weight = weight, .token_weight = token_weight,
       .expected = {3.0, 1.0 / 6.5, 11.5, 16.0 / 6.5, 6.5 / 3.0}},
  };
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) check_scalars(&cases[k]);
}

static void test_prepare_refusals(void) {
  int64_t target[TOKENS] = {0};
  double scalars[FLCE_SCALAR_COUNT];
  flce_problem problem = {.shape.tokens = TOKENS,
                          .shape.rows = TOKENS,
                          .shape.vocab = 50257,
                          .loss = {.ignore_index = -100, .logit_scale = 1.0, .temperature = 1.0}};
  flce_tensors tensors = {.target = target, .scalars = scalars};
  target[4] = -100;
  target[5] = 50300;
  flce_status status = backend.prepare(backend.self, &problem, &tensors, NULL, 0, false);
  CHECK(status == FLCE_TARGET_OUT_OF_RANGE, "status: %s", flce_status_name(status));
  const char* sentence = "target[5] is 50300: expected 0 <= target < 50257 or ignore_index -100";
  CHECK(strcmp(flce_last_error(), sentence) == 0, "sentence: %s", flce_last_error());
  problem.shape.first_token = 1000;
  CHECK(backend.prepare(backend.self, &problem, &tensors, NULL, 0, false) ==
                FLCE_TARGET_OUT_OF_RANGE &&
            strstr(flce_last_error(), "target[1005] is 50300: "),
        "sentence: %s", flce_last_error());
  target[5] = -1;
  CHECK(
      backend.prepare(backend.self, &problem, &tensors, NULL, 0, false) == FLCE_TARGET_OUT_OF_RANGE,
      "target -1 is let through");
  target[5] = 0;
  problem.shape.rows = TOKENS - 1;
  CHECK_OK(backend.prepare(backend.self, &problem, &tensors, NULL, 0, false));
  problem.shape.rows = 7;
  CHECK(
      backend.prepare(backend.self, &problem, &tensors, NULL, 0, false) == FLCE_INVALID_ARGUMENT &&
          strcmp(flce_last_error(),
                 "valid_bound: expected at least as many as the valid rows, "
                 "299, got 7") == 0,
      "sentence: %s", flce_last_error());
  const double no_items = 0.0;
  problem.shape.rows = TOKENS;
  problem.reduction = FLCE_MEAN;
  tensors.num_items = &no_items;
  CHECK(
      backend.prepare(backend.self, &problem, &tensors, NULL, 0, false) == FLCE_INVALID_ARGUMENT &&
          strstr(flce_last_error(), "num_items: expected a number other than 0 for 299 rows"),
      "sentence: %s", flce_last_error());
}

/* ---- rows to compute ---- */

/* ignore_index may be a class, which then is never a target. */
static void test_compact_rows(int64_t ignore_index) {
  int64_t target[TOKENS], valid = 0;
  for (int64_t i = 0; i < TOKENS; i++)
    target[i] = i % 11 == 3 ? ignore_index : (int64_t)(test_random() % VOCAB);
  target[20] = VOCAB; /* out of range: not ignored */
  for (int64_t i = 0; i < TOKENS; i++) valid += target[i] != ignore_index;
  CHECK(valid > 9 && valid < TOKENS - 9, "%lld valid rows", (long long)valid);
  for (int64_t rows = 0; rows <= TOKENS; rows += rows == valid ? TOKENS - valid : valid) {
    flce_problem problem = {.shape.tokens = TOKENS,
                            .shape.rows = rows,
                            .shape.vocab = VOCAB,
                            .loss = {.ignore_index = ignore_index}};
    flce_facts facts;
    CHECK_OK(backend.facts(backend.self, &problem, &facts));
    CHECK(facts.compact_bytes == 8 * TOKENS, "%lld bytes", (long long)facts.compact_bytes);
    int64_t* index = malloc((size_t)(rows + 1) * sizeof *index);
    index[rows] = 77;
    CHECK_OK(backend.compact_rows(backend.self, &problem, target, index));
    int64_t wrong = 0, r = 0;
    for (int64_t i = 0; i < TOKENS && r < rows; i++)
      if (target[i] != ignore_index) wrong += index[r++] != i;
    while (r < rows) wrong += index[r++] != -1;
    CHECK(wrong == 0 && index[rows] == 77, "index of %lld rows", (long long)rows);
    free(index);
  }
}

static double blank_stat(const flce_rows* rows, int k, int64_t i) {
  return flce_load(rows->stats, FLCE_F32, k * rows->stat_pitch + i);
}

static void test_blank_rows(void) {
  enum { ROWS = 4, HIDDEN = 3 };
  int64_t target[ROWS] = {2, IGNORE_INDEX, VOCAB, 0};
  for (int run = 0; run < 4; run++) { /* too many valid rows; with and without dx */
    bool spoilt = run & 1, with_dx = run & 2;
    float stats[FLCE_STAT_COUNT * ROWS], loss[ROWS], dx[ROWS * HIDDEN], scalars[FLCE_SCALAR_COUNT];
    int64_t predictions[ROWS];
    flce_fill(stats, FLCE_F32, 5.0, FLCE_STAT_COUNT * ROWS);
    flce_fill(dx, FLCE_F32, 5.0, ROWS * HIDDEN);
    for (int64_t i = 0; i < ROWS; i++) loss[i] = 5.0f, predictions[i] = 5;
    scalars[FLCE_SCALAR_VALID] = 3.0f;
    flce_rows rows = {.rows = ROWS,
                      .vocab = VOCAB,
                      .z_dtype = FLCE_F32,
                      .target = target,
                      .options = {.ignore_index = IGNORE_INDEX},
                      .stats = stats,
                      .stat_pitch = ROWS,
                      .loss = run == 0 ? NULL : loss,
                      .predictions = run == 0 ? NULL : predictions,
                      .scalars = scalars};
    CHECK_OK(backend.blank_rows(backend.self, &rows, spoilt ? 2 : 3, with_dx ? dx : NULL, FLCE_F32,
                                HIDDEN));
    for (int64_t i = 0; i < ROWS; i++) {
      double left = spoilt ? NAN : 5.0, expected = target[i] == IGNORE_INDEX ? 0.0 : left;
      double vectors = with_dx ? 5.0 : expected, row = with_dx ? expected : 5.0;
      bool right = true;
#define SAME(actual, wanted) (isnan(wanted) ? isnan(actual) : (actual) == (wanted))
      for (int k = 0; k < FLCE_STAT_COUNT; k++) right &= SAME(blank_stat(&rows, k, i), vectors);
      for (int h = 0; h < HIDDEN; h++) right &= SAME(dx[i * HIDDEN + h], row);
      right &= SAME(loss[i], run == 0 ? 5.0 : vectors);
#undef SAME
      right &= predictions[i] == (run == 0 || vectors == 5.0 ? 5 : -1);
      CHECK(right, "blank row %lld, run %d", (long long)i, run);
    }
  }
}

static void test_order(void) {
  static const int64_t vocabs[] = {1, 2, 37, 2048, 2049, 128256, 5000000};
  for (size_t v = 0; v < sizeof vocabs / sizeof *vocabs; v++) {
    flce_problem problem = {.shape.tokens = TOKENS,
                            .shape.vocab = vocabs[v],
                            .loss = {.ignore_index = IGNORE_INDEX},
                            .dtypes.gemm = FLCE_F32};
    flce_facts facts;
    CHECK_OK(backend.facts(backend.self, &problem, &facts));
    int64_t target[TOKENS], valid = 0;
    int64_t* order = malloc((size_t)facts.order_bytes);
    for (int64_t i = 0; i < TOKENS; i++) {
      target[i] = (int64_t)(test_random() % (uint64_t)vocabs[v]);
      if (i % 7 == 2) target[i] = i % 2 ? IGNORE_INDEX : vocabs[v]; /* ignored, out of range */
      valid += target[i] >= 0 && target[i] < vocabs[v];
    }
    CHECK_OK(backend.order_targets(backend.self, &problem, target, order));
    CHECK(order[0] == valid, "%lld keys, expected %lld", (long long)order[0], (long long)valid);
    bool sorted = true;
    for (int64_t k = 1; k <= order[0]; k++) {
      sorted &= k == 1 || order[k - 1] < order[k];
      sorted &= target[order[k] & UINT32_MAX] == order[k] >> 32;
    }
    CHECK(sorted, "order of vocab %lld", (long long)vocabs[v]);
    int64_t* again = malloc((size_t)facts.order_bytes); /* prepare requires valid targets: it orders
                                                           those of an unchanged problem */
    double scalars[FLCE_SCALAR_COUNT];
    for (int64_t i = 0; i < TOKENS; i++)
      if (target[i] == vocabs[v]) target[i] = IGNORE_INDEX;
    flce_tensors tensors = {.target = target, .scalars = scalars};
    problem.shape.rows = TOKENS;
    problem.loss.logit_scale = problem.loss.temperature = 1.0;
    CHECK_OK(backend.prepare(backend.self, &problem, &tensors, again, 0, true));
    CHECK(test_same(again, order, (order[0] + 1) * (int64_t)sizeof *order), "prepare's order");
    free(order), free(again);
  }
}

int main(void) {
  test_seed(6);
  cpu = test_cpu(1);
  flce_cpu_backend(&cpu, &backend);
  test_prepare();
  test_prepare_refusals();
  test_compact_rows(IGNORE_INDEX);
  test_compact_rows(5);
  test_blank_rows();
  test_order();
  return test_verdict();
}
