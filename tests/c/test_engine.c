/* The whole path, from plan to gradients, on the CPU backend with a plain GEMM, compared with a
 * definition in double: strategies, options, chunks, wanted gradients, dtypes, refusals. */
#include "core/dw_memory.h"
#include "engine_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* ---- cases ---- */

static void test_options(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int save = FLCE_SAVE_NOTHING; save <= FLCE_SAVE_STATS; save++) {
      for (int options = 0; options < 24; options++) {
        setting s = make_setting((flce_dtype)dtype, (flce_save)save);
        s.problem.reduction = (flce_reduction)(options % 3);
        if (save == FLCE_SAVE_GRADS && s.problem.reduction == FLCE_NONE) continue;
        s.problem.has.bias = s.problem.wants.grad_bias = options / 3 & 1;
        s.problem.has.class_weight = options / 6 & 1;
        s.problem.loss.label_smoothing = options / 12 & 1 ? 0.1 : 0.0;
        test_setting(&s);
      }
    }
  }
}

/* The options of the loss together, with padding rows of W and gathered rows. */
static void test_loss_options(void) {
  static const flce_loss losses[] = {
      {.logit_scale = 0.5, .temperature = 1.0, .z_loss = 0.125},
      {.logit_scale = 1.0, .temperature = 2.0, .label_smoothing = 0.1},
      {.logit_scale = 1.0, .temperature = 1.0, .softcap = 3.0},
      {.logit_scale = -1.5,
       .temperature = 0.75,
       .softcap = 8.0,
       .label_smoothing = 0.2,
       .z_loss = 0.25},
  };
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int save = FLCE_SAVE_NOTHING; save <= FLCE_SAVE_STATS; save++) {
      for (int k = 0; k < 40; k++) {
        uint64_t bits = test_random();
        setting s = make_setting((flce_dtype)dtype, (flce_save)save);
        s.problem.loss = losses[k % 4];
        s.problem.loss.ignore_index = IGNORE_INDEX;
        s.problem.reduction = (flce_reduction)(k / 4 % 3);
        if (save == FLCE_SAVE_GRADS && s.problem.reduction == FLCE_NONE) continue;
        s.problem.has.class_weight = bits & 1;
        s.problem.wants.entropy = bits & 2;
        s.problem.wants.predictions = bits & 4;
        s.problem.has.probabilities = (bits & 24) == 8;
        s.token_weight = bits & 32;
        s.temperature = bits & 64;
        s.num_items = bits & 128;
        s.upstream = (bits & 256) && save != FLCE_SAVE_GRADS;
        if (bits & 512) s.problem.shape.weight_rows += 5;
        s.problem.wants.statistics = bits & 1024;
        if (!s.problem.has.probabilities) s.problem.shape.rows -= (int64_t)(test_random() % 5);
        if (bits & 1 << 20) s.problem.memory.bound = 9 * 72 * 8;
        if (bits & 1 << 21) s.problem.wants.grad_bias = false;
        s.consumes = bits & 1 << 22;
        test_setting(&s);
      }
    }
  }
}

/* Only the rows that are not ignored are computed, by their exact number or a bound: same
 * results. */
static void test_gathered(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_BF16; dtype++) {
    for (int save = FLCE_SAVE_NOTHING; save <= FLCE_SAVE_STATS; save++) {
      for (int64_t rows = 19; rows <= 22; rows += 3) { /* 19 are valid */
        setting all = make_setting((flce_dtype)dtype, (flce_save)save);
        all.problem.wants.predictions = all.problem.wants.statistics = true;
        all.problem.memory.bound = 9 * 72 * 8;
        setting some = all;
        some.problem.shape.rows = rows;
        model m = make_model(&all);
        run a = run_all(&all, &m, 1), b = run_all(&some, &m, 1);
        check_run(&all, &m, &a);
        check_run(&some, &m, &b);
        int64_t tokens = all.problem.shape.tokens, stat = flce_size_of(stat_of(&all));
        CHECK(test_same(a.t.stats, b.t.stats, FLCE_STAT_COUNT * tokens * stat) &&
                  test_same(a.t.predictions, b.t.predictions, tokens * 8) &&
                  test_same(a.t.loss, b.t.loss, stat),
              "gathering %lld rows changes statistics, dtype %d save %d", (long long)rows, dtype,
              save);
        CHECK(b.t.predictions && ((int64_t*)b.t.predictions)[3] == -1, "prediction when ignored");
        CHECK(b.plan.buffers[FLCE_BUF_SAVED].bytes <= a.plan.buffers[FLCE_BUF_SAVED].bytes,
              "saved bytes");
        free_run(&a);
        free_run(&b);
        free_model(&m);
      }
    }
  }
  setting s = make_setting(FLCE_F32, FLCE_SAVE_STATS);
  s.all_ignored = true;
  for (s.problem.shape.rows = 0; s.problem.shape.rows < 3; s.problem.shape.rows++) test_setting(&s);
}

/* Statistics that are not needed after the forward are workspace; nothing else changes. */
static void test_statistics_that_nobody_reads(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int save = FLCE_SAVE_NOTHING; save <= FLCE_SAVE_STATS; save++) {
      setting with = make_setting((flce_dtype)dtype, (flce_save)save), without = with;
      with.problem.wants.statistics = true;
      model m = make_model(&with);
      run a = run_all(&with, &m, 1), b = run_all(&without, &m, 1);
      bool backward = save == FLCE_SAVE_LOGITS || save == FLCE_SAVE_STATS;
      CHECK(a.t.stats && a.t.scalars && !b.t.stats == !backward && !b.t.scalars == !backward,
            "statistics kept, dtype %d save %d", dtype, save);
      check_run(&without, &m, &b);
      CHECK(test_same(a.t.loss, b.t.loss, flce_size_of(stat_of(&with))),
            "statistics change the loss, dtype %d save %d", dtype, save);
      free_run(&a);
      free_run(&b);
      free_model(&m);
    }
  }
}

/* With save=grads the backward reads the statistics if float16 gradients are scaled. */
static void test_statistics_of_the_backward(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int f16 = 0; f16 < 2; f16++) {
      setting s = make_setting((flce_dtype)dtype, FLCE_SAVE_GRADS);
      const flce_facts facts = {.gemm_writes_f32 = true, .gemm_f16 = f16};
      flce_plan plan;
      CHECK_OK(flce_plan_make(&s.problem, &facts, &plan));
      CHECK(plan.keeps_statistics == (dtype == FLCE_F16 && f16), "dtype %d f16 %d", dtype, f16);
    }
  }
}

/* Memory bounds from one row of logits up: a short last chunk, one chunk, one row. */
static void test_chunks(void) {
  static const int64_t rows[] = {1, 2, 7, 8, 9, 16, 22, 23, 24};
  for (int dtype = FLCE_F64; dtype <= FLCE_BF16; dtype++) {
    for (int save = FLCE_SAVE_LOGITS; save <= FLCE_SAVE_STATS; save++) {
      for (size_t k = 0; k < sizeof rows / sizeof *rows; k++) {
        setting s = make_setting((flce_dtype)dtype, (flce_save)save);
        int64_t align = 64 / flce_size_of(s.problem.dtypes.gemm);
        int64_t pitch = (s.problem.shape.vocab + align - 1) / align * align;
        s.problem.memory.bound = rows[k] * pitch * flce_size_of(s.problem.dtypes.gemm);
        s.problem.loss.label_smoothing = k % 2 ? 0.2 : 0.0;
        s.problem.dtypes.accum =
            k % 2 ? flce_stat_dtype(s.problem.dtypes.gemm) : s.problem.dtypes.gemm;
        test_setting(&s);
      }
    }
  }
}

static void test_wanted(void) {
  for (int save = FLCE_SAVE_LOGITS; save <= FLCE_SAVE_STATS; save++) {
    for (int wanted = 0; wanted < 8; wanted++) {
      setting s = make_setting(FLCE_F32, (flce_save)save);
      s.problem.wants.grad_input = wanted & 1;
      s.problem.wants.grad_weight = wanted & 2;
      s.problem.wants.grad_bias = wanted & 4;
      s.problem.loss.label_smoothing = wanted == 7 ? 0.1 : 0.0;
      s.problem.memory.bound = 8 * 80 * 4;
      model m = make_model(&s);
      run r = run_all(&s, &m, 1);
      check_run(&s, &m, &r);
      int64_t gradients = (wanted & 1) + (wanted >> 1 & 1);
      int64_t again = save == FLCE_SAVE_STATS && wanted ? 1 : 0;
      int64_t forward = save == FLCE_SAVE_LOGITS && wanted ? 1 : 3,
              backward = forward * (again + gradients);
      if (save == FLCE_SAVE_GRADS) forward *= 1 + gradients, backward = 0;
      CHECK(r.forward_gemms == forward && r.backward_gemms == backward,
            "GEMMs of save %s wanted %d: %lld and %lld, expected %lld and %lld",
            flce_save_name((flce_save)save), wanted, (long long)r.forward_gemms,
            (long long)r.backward_gemms, (long long)forward, (long long)backward);
      CHECK(!(wanted & 1) == !r.t.grad_input && !(wanted & 2) == !r.t.grad_weight,
            "a gradient that is not wanted has a buffer");
      free_run(&r);
      free_model(&m);
    }
  }
}

/* dW is added to the caller's tensor: GEMMs sum into it, blocks of dW are added to it, or a
 * separate sum is added at the end. */
static void test_added(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int save = FLCE_SAVE_LOGITS; save <= FLCE_SAVE_STATS; save++) {
      if (save == FLCE_SAVE_GRADS) continue;
      for (int k = 0; k < 64; k++) {
        setting s = make_setting((flce_dtype)dtype, (flce_save)save);
        flce_problem* p = &s.problem;
        p->backward.adds_grad_weight = true;
        p->backward.added_dtype = k & 1 ? flce_stat_dtype(p->dtypes.gemm) : p->dtypes.gemm;
        if (k & 2) p->dtypes.accum = flce_stat_dtype(p->dtypes.gemm);
        if (k & 4) p->loss.label_smoothing = 0.1;
        p->has.class_weight = k & 8;
        if (k & 16) p->shape.weight_rows += 5;
        if (k & 32) p->shape.rows = 19 + (k & 1);
        p->reduction = (flce_reduction)(k % 3);
        p->has.probabilities = k % 7 == 6 && !(k & 32);
        if (k % 5) p->memory.bound = 9 * 72 * 8;
        test_setting(&s);
      }
      setting s = make_setting((flce_dtype)dtype, (flce_save)save);
      s.problem.backward.adds_grad_weight = s.all_ignored = true;
      s.problem.backward.added_dtype = flce_stat_dtype(s.problem.dtypes.gemm);
      for (s.problem.shape.rows = 0; s.problem.shape.rows < 3; s.problem.shape.rows++)
        test_setting(&s);
    }
  }
  /* Autocast: bfloat16 GEMMs into a float32 gradient. */
  setting s = make_setting(FLCE_BF16, FLCE_SAVE_STATS);
  s.problem.dtypes.input = s.problem.dtypes.weight = s.problem.dtypes.bias = FLCE_F32;
  s.problem.backward.adds_grad_weight = true;
  s.problem.backward.added_dtype = FLCE_F32;
  s.problem.memory.bound = 9 * 72 * 2;
  test_setting(&s);
}

static void test_edges(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_BF16; dtype++) {
    for (int save = FLCE_SAVE_NOTHING; save <= FLCE_SAVE_STATS; save++) {
      setting base = make_setting((flce_dtype)dtype, (flce_save)save), s = base;
      s.problem.shape.tokens = s.problem.shape.rows = 0;
      test_setting(&s);
      s = base;
      s.problem.shape.vocab = s.problem.shape.weight_rows = 1;
      test_setting(&s);
      s = base;
      s.problem.shape.hidden = 1;
      test_setting(&s);
      s = base;
      s.all_ignored = true;
      test_setting(&s);
      s = base;
      s.problem.shape.vocab = s.problem.shape.weight_rows = 300;
      s.problem.shape.hidden = 40;
      s.std = 4.0;
      s.peaked = true;
      test_setting(&s);
    }
  }
}

/* Autocast: x and W in float32, GEMMs in bfloat16; dW in float32 from a float32 sum. */
static void test_autocast(void) {
  for (int save = FLCE_SAVE_LOGITS; save <= FLCE_SAVE_STATS; save++) {
    setting s = make_setting(FLCE_BF16, (flce_save)save);
    s.problem.dtypes.input = s.problem.dtypes.weight = s.problem.dtypes.bias = FLCE_F32;
    s.problem.dtypes.accum = FLCE_F32;
    s.problem.memory.bound = 9 * 72 * 2;
    test_setting(&s);
    s.problem.loss.label_smoothing = 0.1;
    s.problem.dtypes.gemm = FLCE_F16;
    test_setting(&s);
  }
}

/* The first 8 or 16 columns of W are frozen. */
static void test_frozen_columns(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int save = FLCE_SAVE_LOGITS; save <= FLCE_SAVE_STATS; save++) {
      setting s = make_setting((flce_dtype)dtype, (flce_save)save);
      s.problem.memory.bound = 9 * 72 * 2;
      for (s.problem.shape.frozen_hidden = 8; s.problem.shape.frozen_hidden <= 16;
           s.problem.shape.frozen_hidden += 8) {
        s.problem.loss.label_smoothing = s.problem.shape.frozen_hidden == 8 ? 0.0 : 0.1;
        s.problem.dtypes.accum = s.problem.shape.frozen_hidden == 8
                                     ? s.problem.dtypes.gemm
                                     : flce_stat_dtype(s.problem.dtypes.gemm);
        test_setting(&s);
      }
    }
  }
  setting s = make_setting(FLCE_F32, FLCE_SAVE_STATS);
  flce_facts facts = {0};
  flce_plan plan;
  const int64_t refused[] = {-8, 4, 24};
  for (size_t k = 0; k < sizeof refused / sizeof *refused; k++) {
    s.problem.shape.frozen_hidden = refused[k];
    CHECK(flce_plan_make(&s.problem, &facts, &plan) == FLCE_INVALID_ARGUMENT,
          "frozen_hidden %lld is accepted", (long long)refused[k]);
  }
}

/* A loss far below the resolution of 1 - p, and its gradient, which p - 1 in 16 bits would lose. */
static void test_tiny_loss(void) {
  float x[] = {1.0f}, w[] = {0.0f, 40.0f}, loss, dx, dw[2], one = 1.0f;
  int64_t target[] = {1};
  setting s = make_setting(FLCE_F32, FLCE_SAVE_LOGITS);
  s.problem.shape.tokens = s.problem.shape.rows = s.problem.shape.hidden = 1;
  s.problem.shape.vocab = s.problem.shape.weight_rows = 2;
  s.problem.has.bias = s.problem.wants.grad_bias = false;
  model m = {.x = x, .w = w, .target = target, .grad_output = &one};
  run r = run_all(&s, &m, 1);
  memcpy(&loss, r.t.loss, sizeof loss);
  memcpy(&dx, r.t.grad_input, sizeof dx);
  memcpy(dw, r.t.grad_weight, sizeof dw);
  double p = exp(-40.0), tolerance = 1e-5 * p;
  CHECK(test_close(loss, p, tolerance), "loss is %g, expected %g", loss, p);
  CHECK(test_close(dw[0], p, tolerance) && test_close(dw[1], -p, tolerance), "dW is %g, %g", dw[0],
        dw[1]);
  CHECK(test_close(dx, -40.0 * p, 40.0 * tolerance), "dX is %g, expected %g", dx, -40.0 * p);
  free_run(&r);
}

static void test_cross_entropy(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int options = 0; options < 12; options++) {
      setting s = make_setting((flce_dtype)dtype, FLCE_SAVE_NOTHING);
      s.problem.shape.hidden = s.problem.shape.vocab;
      s.identity = true;
      s.problem.has.bias = false;
      s.problem.reduction = (flce_reduction)(options % 3);
      s.problem.has.class_weight = options / 3 & 1;
      s.problem.loss.label_smoothing = options / 6 & 1 ? 0.1 : 0.0;
      model m = make_model(&s);
      int64_t n = s.problem.shape.tokens, v = s.problem.shape.vocab,
              stat = flce_size_of(stat_of(&s));
      flce_cpu cpu = test_cpu(1);
      flce_backend b;
      flce_cpu_backend(&cpu, &b);
      run r = {.plan = {.dtype = s.problem.dtypes.gemm, .strategy = FLCE_SAVE_NOTHING}};
      size_t scratch = (size_t)flce_cross_entropy_workspace_bytes(&s.problem);
      r.t = (flce_tensors){.input = m.x,
                           .target = m.target,
                           .class_weight = s.problem.has.class_weight ? m.class_weight : NULL,
                           .loss = malloc((size_t)(n * stat)),
                           .stats = malloc((size_t)(FLCE_STAT_COUNT * n * stat)),
                           .scalars = malloc((size_t)(FLCE_SCALAR_COUNT * stat)),
                           .grad_input = test_buffer(s.problem.dtypes.gemm, n * v),
                           .grad_output = m.grad_output,
                           .workspace = malloc(scratch)};
      CHECK_OK(flce_cross_entropy_forward(&b, &s.problem, &r.t));
      CHECK_OK(flce_cross_entropy_backward(&b, &s.problem, &r.t));
      compare(&s, &r, "cross entropy", r.t.loss, stat_of(&s), m.loss, m.loss_size,
              s.problem.reduction == FLCE_NONE ? n : 1);
      compare(&s, &r, "dz", r.t.grad_input, s.problem.dtypes.gemm, m.dx, m.dx_size, n * v);
      free_run(&r);
      free_model(&m);
    }
  }
}

static void expect_refusal(const setting* s, const char* part) {
  flce_plan plan;
  flce_status status = plan_on_cpu(s, &plan);
  CHECK(status == FLCE_INVALID_ARGUMENT, "status %s for %s", flce_status_name(status), part);
  CHECK(strstr(flce_last_error(), part), "the sentence: %s; expected %s", flce_last_error(), part);
}

static void test_refusals(void) {
  setting base = make_setting(FLCE_F32, FLCE_SAVE_STATS), s = base;
  s.problem.memory.bound = 80 * 4 - 1;
  expect_refusal(&s, "max_memory: expected at least one row of logits, 320 bytes, got 319");
  s = base;
  s.problem.save = FLCE_SAVE_GRADS;
  s.problem.reduction = FLCE_NONE;
  expect_refusal(&s, "save: expected");
  s = base;
  s.problem.loss.label_smoothing = 1.5;
  expect_refusal(&s, "label_smoothing: expected 0 <= label_smoothing <= 1, got 1.5");
  s = base;
  s.problem.shape.vocab = 0;
  expect_refusal(&s, "linear_weight: expected at least one row and column, got shape (0, 19)");

  s = base;
  s.problem.backward.adds_grad_weight = true;
  s.problem.backward.added_dtype = FLCE_BF16;
  expect_refusal(&s, "grad_weight_into: expected dtype float32, got bfloat16");
  s.problem.backward.added_dtype = FLCE_F32;
  s.problem.save = FLCE_SAVE_GRADS;
  expect_refusal(&s, "save: expected \"logits\" or \"stats\" where the weight's gradient is added");

  s = base;
  s.problem.shape.rows = 24;
  expect_refusal(&s, "rows: expected 0 to 23");
  s = base;
  const flce_problem teacher = s.problem;
  s.problem.divergence.teacher = &teacher;
  expect_refusal(&s, "divergence: expected one of flce_divergence, got 0");
  s.problem.divergence.kind = (flce_divergence)7;
  expect_refusal(&s, "divergence: expected one of flce_divergence, got 7");
  s = base;
  s.problem.shape.tokens = s.problem.shape.rows = INT64_C(1) << 40;
  s.problem.shape.hidden = INT64_C(1) << 20;
  expect_refusal(&s, "tokens, hidden: expected a product of at most 2^54, got 1099511627776 and");
  s = base;
  s.problem.shape.weight_rows = 66;
  expect_refusal(&s, "valid_vocab: expected at most 66, got 67");
  s = base;
  model m = make_model(&s);
  m.target[4] = s.problem.shape.vocab;
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_plan plan;
  CHECK_OK(plan_on_cpu(&s, &plan));
  flce_tensors t = {.input = m.x,
                    .linear_weight = m.w,
                    .linear_bias = m.bias,
                    .target = m.target,
                    .scalars = plan_buffer(&plan, FLCE_BUF_SCALARS),
                    .workspace = workspace(&plan, FLCE_IN_FORWARD)};
  int64_t before = flce_gemm_count();
  flce_status status = flce_forward(&b, NULL, &s.problem, &plan, &t);
  CHECK(status == FLCE_TARGET_OUT_OF_RANGE && flce_gemm_count() == before,
        "a target out of range gives %s", flce_status_name(status));
  CHECK(strstr(flce_last_error(), "target[4] is 67: expected 0 <= target < 67"), "the sentence: %s",
        flce_last_error());
  plan.strategy = FLCE_SAVE_AUTO;
  CHECK(flce_forward(&b, NULL, &s.problem, &plan, &t) == FLCE_INVALID_ARGUMENT &&
            strstr(flce_last_error(), "plan: expected a strategy in save, got 5"),
        "a plan without a strategy: %s", flce_last_error());
  free(t.scalars), free(t.workspace);
  free_model(&m);
}

/* The same cases with gradients by blocks: of fewer rows and classes than there are, and of more.
 */
static void test_blocks(void) {
  static const char* const shapes[] = {"8x64", "9x128", "in_dw:8x64"};
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  for (size_t k = 0; k < sizeof shapes / sizeof *shapes; k++) {
    test_set_variable("FLCE_BLOCKS", shapes[k]);
    setting s = make_setting(FLCE_F32, FLCE_SAVE_GRADS);
    flce_plan plan;
    CHECK_OK(flce_plan_call(&b, &s.problem, &plan));
    CHECK(plan.block_rows == (k == 1 ? 9 : 8) && plan.block_classes == (k == 1 ? 128 : 64),
          "blocks of %lld rows and %lld classes", (long long)plan.block_rows,
          (long long)plan.block_classes);
    test_options();
    test_loss_options();
    test_gathered();
    test_added();
    test_edges();
    test_autocast();
    test_frozen_columns();
  }
  setting s = make_setting(FLCE_F32, FLCE_SAVE_GRADS);
  static const char* const wrong[] = {"", "8", "8x", "8x63", "0x64", "8x64x2", "x64", "-8x64"};
  for (size_t k = 0; k < sizeof wrong / sizeof *wrong; k++) {
    test_set_variable("FLCE_BLOCKS", wrong[k]);
    flce_plan plan;
    CHECK(flce_plan_call(&b, &s.problem, &plan) == FLCE_INVALID_ARGUMENT &&
              strstr(flce_last_error(), "FLCE_BLOCKS: expected \"0\" or rows and a multiple of 64"),
          "FLCE_BLOCKS=%s: %s", wrong[k], flce_last_error());
  }
  test_set_variable("FLCE_BLOCKS", NULL);
}

/* In the memory of dW: chunks of dX or its sum, one or more blocks over all rows, and those after
 * them; or of a sum of dW of its own where accum_dtype is wider. */
static void test_dw_memory(flce_save save) {
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int bits = 0; bits < 128; bits++) {
      test_set_variable("FLCE_BLOCKS", bits & 1 ? "in_dw:2x64" : "in_dw:100x128");
      setting s = make_setting((flce_dtype)dtype, save);
      flce_problem* p = &s.problem;
      p->shape.hidden = bits & 2 ? 136 : 24;
      p->shape.vocab = bits & 2 ? 331 : 140;
      p->shape.weight_rows = p->shape.vocab + (bits & 4 ? 3 : 0);
      p->shape.frozen_hidden = bits & 8 ? 8 : 0;
      p->shape.rows = bits & 16 ? 19 : 23;
      p->loss.label_smoothing = bits & 32 ? 0.2 : 0.0;
      p->loss.softcap = bits & 64 ? 4.0 : 0.0;
      p->dtypes.widens_accum = true;
      flce_plan plan;
      CHECK_OK(flce_plan_call(&b, p, &plan));
      /* This backend sums a float16 dW in float32, so a backward has a sum of its own. */
      bool sums_elsewhere = dtype == FLCE_F16 && save == FLCE_SAVE_STATS;
      bool whole = (bits & 2) && !sums_elsewhere;
      flce_block_mode expected = save == FLCE_SAVE_GRADS ? FLCE_BLOCKS_DX_FIRST
                                 : whole                 ? FLCE_BLOCKS_IN_DW
                                                         : FLCE_BLOCKS_IN_WORKSPACE;
      CHECK(plan.blocks == expected && (plan.whole_classes > 0) == whole,
            "%d: blocks %d, %lld whole classes", bits, plan.blocks, (long long)plan.whole_classes);
      test_setting(&s);
    }
  }
  test_set_variable("FLCE_BLOCKS", NULL);
}

/* What a backward with save=stats can have and a forward with save=grads cannot: losses of rows,
 * gradients of lse and entropy; float32 gradients of 16-bit GEMMs, in whose memory dX is summed;
 * some gradients alone. */
static void test_upstream_in_dw(void) {
  int64_t in_dw = 0, again = 0;
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int bits = 0; bits < 256; bits++) {
      test_set_variable("FLCE_BLOCKS", bits & 1 ? "in_dw:7x64" : "in_dw:12x128");
      setting s = make_setting((flce_dtype)dtype, FLCE_SAVE_STATS);
      flce_problem* p = &s.problem;
      p->shape.tokens = p->shape.rows = 37;
      p->shape.hidden = 72;
      p->shape.vocab = p->shape.weight_rows = 500;
      p->reduction = bits & 2 ? FLCE_NONE : FLCE_MEAN;
      p->wants.entropy = bits & 4;
      s.upstream = bits & 8;
      if (bits & 16) p->dtypes.input = flce_stat_dtype(p->dtypes.gemm);
      if (bits & 32) p->dtypes.weight = p->dtypes.accum = flce_stat_dtype(p->dtypes.gemm);
      p->wants.grad_bias = bits & 64;
      p->has.probabilities = bits & 128;
      if (bits % 7 == 0) p->wants.grad_input = false;
      if (bits % 5 == 0 && !p->has.probabilities) p->shape.rows = 30;
      flce_plan plan;
      CHECK_OK(flce_plan_call(&b, p, &plan));
      if (plan.blocks == FLCE_BLOCKS_IN_DW) {
        in_dw++;
        again += flce_free_classes(p, &plan, plan.rows - 1) < p->shape.vocab;
      }
      test_setting(&s);
    }
  }
  CHECK(in_dw > 500 && again > 200, "%lld in the memory of dW, %lld with logits once more",
        (long long)in_dw, (long long)again);
  test_set_variable("FLCE_BLOCKS", NULL);
}

int main(void) {
  test_seed(4);
  for (int index = 0; test_next_variant(&index);) {
    test_options();
    test_loss_options();
    test_gathered();
    test_statistics_that_nobody_reads();
    test_statistics_of_the_backward();
    test_chunks();
    test_wanted();
    test_added();
    test_edges();
    test_autocast();
    test_frozen_columns();
    test_tiny_loss();
    test_cross_entropy();
  }
  test_blocks();
  test_dw_memory(FLCE_SAVE_GRADS);
  test_dw_memory(FLCE_SAVE_STATS);
  test_upstream_in_dw();
  test_refusals();
  return test_verdict();
}
