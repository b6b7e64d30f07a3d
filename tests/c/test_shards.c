/* A sharded vocabulary: ranks are threads, their collectives copy memory. Every rank's results
 * against the definition of the whole vocabulary, and the bits of the ranks against each other. */
#include "cpu/cpu.h"
#include "rank_threads.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* dX of a rank; with partial_grad_input it is a term of the sum. */
static void check_input(const rank_call* calls, int rank, int ranks, const model* m) {
  const rank_call* call = &calls[rank];
  const flce_problem* p = &call->s.problem;
  flce_dtype dtype = call->r.plan.grad_input_dtype;
  int64_t count = flce_input_rows(p) * p->shape.hidden;
  if (!p->shard.partial_grad_input) {
    compare(&call->s, &call->r, "dX", call->r.t.grad_input, dtype, call->m.dx, call->m.dx_size,
            count);
    return;
  }
  if (rank > 0) return;
  void* sum = test_buffer(FLCE_F64, count);
  for (int64_t k = 0; k < count; k++) {
    double value = 0.0;
    for (int r = 0; r < ranks; r++) value += flce_load(calls[r].r.t.grad_input, dtype, k);
    flce_store(sum, FLCE_F64, k, value);
  }
  compare(&call->s, &call->r, "dX", sum, FLCE_F64, m->dx, m->dx_size, count);
  free(sum);
}

static void check_rank(const rank_call* calls, int rank, int ranks, const model* m) {
  const rank_call* call = &calls[rank];
  const setting* s = &call->s;
  const flce_problem* p = &s->problem;
  const run* r = &call->r;
  const flce_plan* plan = &r->plan;
  char text[700];
  describe(s, r, text, sizeof text);
  CHECK(r->status == FLCE_OK, "rank %d of %d: status %s, %s", rank, ranks,
        flce_status_name(r->status), text);
  if (r->status != FLCE_OK) return;
  CHECK(call->own.collectives == calls[0].own.collectives, "rank %d ran %d collectives, 0 %d, %s",
        rank, call->own.collectives, calls[0].own.collectives, text);
  int64_t rows = p->reduction == FLCE_NONE ? p->shape.tokens : 1;
  int64_t cols = flce_grad_weight_cols(p);
  compare(s, r, "loss", r->t.loss, stat_of(s), m->loss, m->loss_size, rows);
  CHECK(test_same(r->t.loss, calls[0].r.t.loss, rows * flce_size_of(stat_of(s))),
        "rank %d has other bits of the loss, %s", rank, text);
  if (r->t.predictions)
    CHECK(test_same(r->t.predictions, calls[0].r.t.predictions, p->shape.tokens * 8),
          "rank %d has other predictions, %s", rank, text);
  if (p->wants.grad_input && p->shape.tokens > 0) check_input(calls, rank, ranks, m);
  int64_t classes = p->backward.adds_grad_weight ? p->shape.vocab : p->shape.weight_rows;
  if (p->wants.grad_weight && classes > 0)
    compare(s, r, "dW", r->t.grad_weight, plan->grad_weight_dtype, call->m.dw, call->m.dw_size,
            classes * cols);
  if (p->wants.grad_bias && p->shape.weight_rows > 0)
    compare(s, r, "db", r->t.grad_bias, plan->grad_bias_dtype, call->m.db, call->m.db_size,
            p->shape.weight_rows);
}

static void run_ranks(const setting* s, const model* m, int ranks, const int64_t* ends) {
  group all;
  rank_call calls[MOST_RANKS];
  int64_t planned = 0, before = flce_gemm_count();
  run_threads(s, m, ranks, ends, &all, calls);
  int64_t counted = flce_gemm_count() - before;
  for (int r = 0; r < ranks; r++) {
    const flce_plan* plan = &calls[r].r.plan;
    if (calls[r].s.problem.shape.vocab > 0) planned += plan->forward_gemms + plan->backward_gemms;
    check_rank(calls, r, ranks, m);
  }
  CHECK(counted == planned, "GEMMs of %d ranks %lld, planned %lld", ranks, (long long)counted,
        (long long)planned);
  for (int r = 0; r < ranks; r++) free_rank(&calls[r]);
}

/* Equal shards, as torch.chunk makes them, and uneven ones with empty ranks. */
static void test_ranks(const setting* s) {
  int64_t rows = s->problem.shape.weight_rows;
  model m = make_model(s);
  for (int kind = 0; kind < 3; kind++) {
    setting kernel = *s;
    kernel.fused = kind > 0, kernel.skips = kind > 1;
    for (int k = 0; k < 4; k++) {
      int ranks = (int[]){2, 3, 4, MOST_RANKS}[k];
      int64_t ends[MOST_RANKS], share = (rows + ranks - 1) / ranks;
      if (s->problem.shard.input_is_sharded && s->problem.shape.tokens % ranks != 0) continue;
      for (int r = 0; r < ranks; r++) ends[r] = (r + 1) * share < rows ? (r + 1) * share : rows;
      run_ranks(&kernel, &m, ranks, ends);
      for (int r = 0; r < ranks; r++) /* the first rank has no class, nor the last of eight */
        ends[r] = r == ranks - 1 || 5 * r * r > rows ? rows : 5 * r * r;
      run_ranks(&kernel, &m, ranks, ends);
    }
  }
  free_model(&m);
}

static void test_saves(void) {
  const flce_dtype dtypes[] = {FLCE_F64, FLCE_F32, FLCE_BF16, FLCE_F16};
  const flce_save saves[] = {FLCE_SAVE_NOTHING, FLCE_SAVE_LOGITS, FLCE_SAVE_GRADS, FLCE_SAVE_STATS};
  for (int d = 0; d < 4; d++)
    for (int k = 0; k < 4; k++) {
      setting s = make_setting(dtypes[d], saves[k]);
      s.problem.has.class_weight = k % 2 == d % 2;
      if (saves[k] == FLCE_SAVE_NOTHING)
        s.problem.wants.grad_input = s.problem.wants.grad_weight = s.problem.wants.grad_bias =
            false;
      test_ranks(&s);
      s.problem.memory.bound = 6 * 64 * 8; /* several chunks */
      test_ranks(&s);
    }
}

/* dW of the last chunk in two GEMMs, and of a rank with too few classes in one. */
static void test_split_dw(void) {
  const flce_dtype dtypes[] = {FLCE_F64, FLCE_F32, FLCE_BF16, FLCE_F16};
  const flce_save saves[] = {FLCE_SAVE_LOGITS, FLCE_SAVE_GRADS, FLCE_SAVE_STATS};
  test_set_variable("FLCE_BLOCKS", "0");
  for (int k = 0; k < 12; k++) {
    setting s = make_setting(dtypes[k % 4], saves[k / 4]);
    flce_problem* p = &s.problem;
    p->shape.vocab = p->shape.weight_rows = 300;
    p->has.bias = p->wants.grad_bias = k % 3 > 0;
    if (k % 2) p->memory.bound = 6 * 150 * 8; /* several chunks */
    model m = make_model(&s);
    run_ranks(&s, &m, 2, (int64_t[]){150, 300});
    run_ranks(&s, &m, 3, (int64_t[]){130, 130, 300});
    run_ranks(&s, &m, 3, (int64_t[]){1, 65, 300});
    free_model(&m);
    p->shard.ranks = 2, p->shard.classes = 600;
    p->memory.bound = 1 << 20; /* enough that the plan takes chunks, not blocks */
    flce_plan plan;
    CHECK_OK(plan_on_cpu(&s, &plan));
    CHECK(plan.dw_first_classes == 128, "the first of two GEMMs makes dW of %lld classes of 300",
          (long long)plan.dw_first_classes);
    char text[8192];
    flce_plan_text(&plan, text, sizeof text);
    CHECK(strstr(text, "two GEMMs: the first 128 classes"), "plan: %s", text);
  }
  test_set_variable("FLCE_BLOCKS", NULL);
}

static void test_options(void) {
  const flce_save saves[] = {FLCE_SAVE_LOGITS, FLCE_SAVE_GRADS, FLCE_SAVE_STATS};
  for (int k = 0; k < 3; k++)
    for (int options = 0; options < 24; options++) {
      setting s = make_setting(options % 2 ? FLCE_F64 : FLCE_F32, saves[k]);
      flce_problem* p = &s.problem;
      p->reduction = k == 1 ? FLCE_SUM : (flce_reduction)(options % 3);
      p->has.class_weight = options & 1;
      p->has.bias = p->wants.grad_bias = !(options & 2);
      p->wants.entropy = options & 4;
      p->wants.predictions = options & 8;
      p->wants.statistics = true;
      if (options >= 6) p->loss.label_smoothing = 0.2;
      if (options % 5 == 1) p->loss.softcap = 3.0;
      if (options % 5 == 2) p->loss.logit_scale = -1.5, p->loss.temperature = 0.7;
      if (options % 4 == 3) p->loss.z_loss = 0.1;
      s.token_weight = options % 3 == 1;
      s.temperature = p->has.temperature = options % 3 == 2;
      s.num_items = p->reduction == FLCE_MEAN && options % 2;
      s.upstream = k != 1;
      p->shape.weight_rows = options % 7 == 0 ? 71 : 67;
      test_ranks(&s);
    }
}

static void test_edges(void) {
  for (int k = 0; k < 6; k++) {
    setting s = make_setting(FLCE_F32, k % 2 ? FLCE_SAVE_GRADS : FLCE_SAVE_LOGITS);
    s.std = k < 2 ? 40.0 : 2.0; /* the largest logit is far from the target's */
    s.peaked = k == 2 || k == 3;
    s.all_ignored = k == 4;
    if (k == 5) s.problem.shape.tokens = s.problem.shape.rows = 0;
    test_ranks(&s);
  }
}

static void test_input(void) {
  for (int k = 0; k < 8; k++) {
    setting s =
        make_setting(k % 2 ? FLCE_BF16 : FLCE_F32, k & 2 ? FLCE_SAVE_GRADS : FLCE_SAVE_STATS);
    s.problem.shape.tokens = s.problem.shape.rows = 24;
    s.problem.shard.input_is_sharded = k & 4;
    s.problem.shard.partial_grad_input = !(k & 4);
    s.problem.shape.frozen_hidden = 8;
    test_ranks(&s);
    s.problem.shape.frozen_hidden = 0;
    s.problem.shard.partial_grad_input = false;
    s.problem.shard.wide_terms = true;
    test_ranks(&s);
    s.problem.shard.wide_terms = false;
    if (k & 4) continue;
    s.problem.shard.partial_grad_input = false;
    s.problem.backward.adds_grad_weight = s.problem.save == FLCE_SAVE_STATS;
    s.problem.backward.added_dtype = FLCE_F32;
    test_ranks(&s);
  }
}

/* All logits of a rank are -inf: its probabilities are 0, the others' are as without it. With label
 * smoothing the loss is infinite, unless the weights of these classes are 0; then they may also be
 * targets. */
static void test_hidden_shard(void) {
  for (int k = 0; k < 15; k++) {
    const flce_save saves[] = {FLCE_SAVE_LOGITS, FLCE_SAVE_GRADS, FLCE_SAVE_STATS};
    setting s = make_setting(FLCE_F32, saves[k % 3]);
    bool smooths = k / 3 == 2 || k / 3 == 4, weighs = k >= 9;
    s.problem.wants.entropy = s.problem.wants.predictions = k / 3 == 1;
    s.problem.has.class_weight = weighs;
    if (smooths) s.problem.loss.label_smoothing = 0.2;
    model m = make_model(&s);
    for (int64_t i = 0; i < s.problem.shape.tokens; i++)
      if (m.target[i] != IGNORE_INDEX) m.target[i] = weighs ? 30 + i : m.target[i] % 40;
    for (int64_t j = 40; j < 67; j++) {
      flce_store(m.bias, FLCE_F32, j, -INFINITY);
      flce_store(m.class_weight, FLCE_F32, j, 0.0);
    }
    setting whole = s;
    run one = run_all(&whole, &m, 1);
    const int64_t ends[] = {40, 67};
    group all;
    rank_call calls[2];
    run_threads(&s, &m, 2, ends, &all, calls);
    for (int r = 0; r < 2; r++) {
      double loss = flce_load(calls[r].r.t.loss, FLCE_F32, 0);
      double expected = flce_load(one.t.loss, FLCE_F32, 0);
      CHECK(isinf(expected) == (smooths && !weighs), "loss of one process %g", expected);
      CHECK(loss == expected || fabs(loss - expected) < 1e-5 * fmin(expected, 1e3),
            "loss %g, expected %g", loss, expected);
      for (int64_t i = 0; i < s.problem.shape.tokens * s.problem.shape.hidden; i++) {
        double value = flce_load(calls[r].r.t.grad_input, FLCE_F32, i);
        double exact = flce_load(one.t.grad_input, FLCE_F32, i);
        CHECK(test_close(value, exact, 1e-5), "dX[%lld] %g, expected %g", (long long)i, value,
              exact);
      }
      free_rank(&calls[r]);
    }
    free_run(&one);
    free_model(&m);
  }
}

/* Logits that reach the softcap are equal, on all ranks: the prediction is the lowest class. */
static void test_equal_caps(void) {
  for (int k = 0; k < 2; k++) {
    setting s = make_setting(k ? FLCE_F64 : FLCE_F32, FLCE_SAVE_LOGITS);
    s.std = 100.0, s.problem.loss.softcap = 1.0, s.problem.wants.predictions = true;
    model m = make_model(&s);
    run one = run_all(&s, &m, 1);
    const int64_t ends[] = {2, 30, 67};
    group all;
    rank_call calls[3];
    run_threads(&s, &m, 3, ends, &all, calls);
    CHECK(test_same(calls[0].r.t.predictions, one.t.predictions, s.problem.shape.tokens * 8),
          "predictions of %s", flce_dtype_name(s.problem.dtypes.gemm));
    for (int r = 0; r < 3; r++) free_rank(&calls[r]);
    free_run(&one);
    free_model(&m);
  }
}

/* `count` float64 numbers of a rank, `own`, against those of one process from `first` on. */
static void compare_near(const char* name, const void* made, const void* one, int64_t first,
                         int64_t count, double tolerance, const flce_problem* own) {
  for (int64_t i = 0; i < count; i++)
    CHECK(test_close(flce_load(made, FLCE_F64, i), flce_load(one, FLCE_F64, first + i), tolerance),
          "rank %lld, divergence %d: %s %lld", (long long)own->shard.rank, own->divergence.kind,
          name, (long long)i);
}

/* A divergence on ranks, each of them without a class in turn, against one process. */
static void compare_divergences(const setting* s, const model* m) {
  const int64_t v = s->problem.shape.vocab, ends[][3] = {{0, 30, v}, {30, 30, v}, {30, v, v}};
  const flce_problem* p = &s->problem;
  run one = run_all(s, m, 1);
  for (int empty = 0; empty < 3; empty++) {
    group all;
    rank_call calls[3];
    run_threads(s, m, 3, ends[empty], &all, calls);
    for (int r = 0; r < 3; r++) {
      const run* made = &calls[r].r;
      const flce_problem* own = &calls[r].s.problem;
      int64_t rows = p->reduction == FLCE_NONE ? p->shape.tokens : 1;
      CHECK(made->status == FLCE_OK, "rank %d: %s", r, flce_status_name(made->status));
      compare_near("loss", made->t.loss, one.t.loss, 0, rows, 1e-11, own);
      if (p->save == FLCE_SAVE_GRADS) {
        compare_near("dX", made->t.grad_input, one.t.grad_input, 0,
                     p->shape.tokens * p->shape.hidden, 1e-10, own);
        compare_near("dW", made->t.grad_weight, one.t.grad_weight,
                     own->shard.first_class * p->shape.hidden, own->shape.vocab * p->shape.hidden,
                     1e-10, own);
      }
      free_rank(&calls[r]);
    }
  }
  free_run(&one);
}

static void test_divergences(void) {
  for (int k = 0; k < 24; k++) {
    setting s = make_setting(FLCE_F64, k % 4 < 2 ? FLCE_SAVE_GRADS : FLCE_SAVE_NOTHING);
    flce_problem *p = &s.problem, teacher;
    p->has.bias = p->wants.grad_bias = false;
    p->divergence.kind = (flce_divergence)(1 + k / 4 % FLCE_DIVERGENCE_COUNT),
    p->divergence.beta = 0.3;
    p->divergence.hard_weight = k % 3 ? 0.0 : 0.25;
    if (k % 4 == 2) p->reduction = FLCE_NONE;
    if (k % 4 > 1) p->wants.grad_input = p->wants.grad_weight = false;
    if (k % 2) p->shape.rows = 19; /* gathered */
    teacher = *p;
    teacher.reduction = FLCE_SUM, teacher.save = FLCE_SAVE_NOTHING;
    teacher.wants.grad_input = teacher.wants.grad_weight = false;
    model m = make_model(&s);
    teacher.has.logits = k >= 12;
    teacher.shape.hidden = k >= 12 ? p->shape.vocab : 5;
    int64_t rows = p->shape.tokens * teacher.shape.hidden,
            weights = p->shape.weight_rows * teacher.shape.hidden;
    void *x = test_fill_normal(FLCE_F64, rows, 1.0), *w = test_fill_normal(FLCE_F64, weights, 1.0);
    m.teacher = (flce_tensors){.input = x, .linear_weight = w};
    p->divergence.teacher = &teacher;
    compare_divergences(&s, &m);
    free(x), free(w);
    free_model(&m);
  }
}

/* Sums in the order of the ranks, in float32 or float64, rounded once. */
static void test_sums(void) {
  static const struct {
    flce_dtype terms, out;
    double values[3], sum;
  } cases[] = {
      {FLCE_F32, FLCE_F32, {1.0, 0x1p30, -0x1p30}, 0.0},
      {FLCE_F32, FLCE_F32, {-0x1p30, 0x1p30, 1.0}, 1.0},
      {FLCE_F64, FLCE_F64, {1.0, 0x1p30, -0x1p30}, 1.0},
      {FLCE_F64, FLCE_F64, {1.0, 0x1p60, -0x1p60}, 0.0},
      {FLCE_F32, FLCE_BF16, {1.0, 0x1p-9, 0x1p-8}, 1.0 + 0x1p-7},
      {FLCE_BF16, FLCE_BF16, {1.0, 0x1p-9, 0x1p-8}, 1.0 + 0x1p-7},
      {FLCE_F32, FLCE_F16, {1.0, 0x1p-12, 0x1p-11}, 1.0 + 0x1p-10},
  };
  enum { COUNT = 5 };
  flce_cpu cpu = test_cpu(3);
  for (size_t k = 0; k < 2 * sizeof cases / sizeof *cases; k++)
    for (int rank = 0; rank < 3; rank++) {
      flce_dtype terms = cases[k / 2].terms, dtype = cases[k / 2].out;
      void *received = test_buffer(terms, 3 * COUNT), *own = test_buffer(terms, COUNT);
      void *out = test_buffer(dtype, COUNT), *copy = k % 2 ? test_buffer(dtype, COUNT) : NULL;
      for (int i = 0; i < 3 * COUNT; i++)
        flce_store(received, terms, i, i / COUNT == rank ? NAN : cases[k / 2].values[i / COUNT]);
      for (int i = 0; i < COUNT; i++) flce_store(own, terms, i, cases[k / 2].values[rank]);
      flce_sum_dx_args args = {.out = out, .copy = copy, .out_dtype = dtype};
      args.received = received, args.own = own, args.dtype = terms;
      args.ranks = 3, args.rank = rank, args.count = COUNT;
      CHECK_OK(flce_cpu_sum_partial_dx(&cpu, &args));
      for (int i = 0; i < COUNT; i++) {
        double sum = flce_load(out, dtype, i), other = copy ? flce_load(copy, dtype, i) : sum;
        CHECK(sum == cases[k / 2].sum && other == sum, "case %zu, rank %d: %g and %g, expected %g",
              k, rank, sum, other, cases[k / 2].sum);
      }
      free(received), free(own), free(out), free(copy);
    }
}

/* No class has a probability below eps: nothing is drawn, and the gradients are exact. */
static void test_samples(void) {
  for (int k = 0; k < 4; k++) {
    setting s = make_setting(k % 2 ? FLCE_BF16 : FLCE_F32, FLCE_SAVE_SAMPLES);
    s.problem.sampling.eps = 0x1p-12;
    s.std = 0.5;
    if (k % 2) s.problem.loss.label_smoothing = 0.2, s.problem.shape.frozen_hidden = 8;
    s.problem.shard.wide_terms = k % 2;
    s.problem.wants.entropy = s.upstream = k / 2;
    test_ranks(&s);
  }
}

static void check_refused(const flce_backend* b, const flce_problem* p, const char* text) {
  flce_plan plan;
  CHECK(flce_plan_call(b, p, &plan) == FLCE_INVALID_ARGUMENT && strstr(flce_last_error(), text),
        "expected \"%s\", got \"%s\"", text, flce_last_error());
}

static void test_refusals(void) {
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_plan plan;
  flce_cpu_backend(&cpu, &b);
  setting s = make_setting(FLCE_F32, FLCE_SAVE_GRADS);
  flce_problem* p = &s.problem;
  p->shard.ranks = 2, p->shard.classes = 130, p->shard.first_class = 67, p->memory.bound = 1 << 28;
  check_refused(&b, p, "expected a range within the 130 classes, got [67, 134)");
  p->shard.first_class = 63, p->shard.input_is_sharded = true;
  check_refused(&b, p, "multiple of the 2 ranks");
  p->shape.tokens = 24, p->shard.partial_grad_input = true;
  check_refused(&b, p, "reduce_input_grad: expected True with sequence=True");
  p->shard.input_is_sharded = false, p->shard.wide_terms = true;
  check_refused(&b, p, "reduce_dtype: expected None with reduce_input_grad=False");
  p->shard.partial_grad_input = false, p->dtypes.input = FLCE_F64;
  check_refused(&b, p, "reduce_dtype: expected None with a float64 input");
  p->shard.wide_terms = false, p->dtypes.input = FLCE_F32, p->shape.tokens = 23, p->shard.rank = 2;
  check_refused(&b, p, "rank: expected 0 to 1, got 2");
  p->shard.rank = 1, p->wants.predictions = true, p->shard.classes = (1 << 24) + 1;
  check_refused(&b, p, "expected at most 16777216 classes with vocab_parallel, got 16777217");
  p->dtypes.gemm = p->dtypes.accum = p->dtypes.logits = FLCE_F64;
  CHECK_OK(flce_plan_call(&b, p, &plan));
  p->dtypes.gemm = p->dtypes.accum = p->dtypes.logits = FLCE_F32;
  p->save = FLCE_SAVE_SAMPLES, p->sampling.eps = 0.25, p->shard.classes = INT64_C(1) << 31;
  p->wants.predictions = false;
  check_refused(&b, p,
                "vocab: expected at most 2147483647 with gradient=\"sampled\", got 2147483648");
  p->shard.classes = INT32_MAX, p->memory.bound = INT64_C(1) << 33;
  CHECK_OK(flce_plan_call(&b, p, &plan));
  p->backward.has_grad_entropy = p->wants.entropy = p->wants.entropy_gradient = true,
  p->loss.softcap = 3.0;
  check_refused(&b, p, "return_entropy: expected no gradient of the entropy with a softcap");
  p->backward.has_grad_entropy = p->wants.entropy = p->wants.entropy_gradient = false,
  p->loss.softcap = 0.0;
  p->wants.predictions = true, p->memory.bound = 1 << 28;
  p->save = FLCE_SAVE_GRADS, p->shard.classes = 1 << 24;
  CHECK_OK(flce_plan_call(&b, p, &plan));
  flce_tensors none = {.workspace = workspace(&plan, FLCE_IN_FORWARD)};
  CHECK(flce_forward(&b, NULL, p, &plan, &none) == FLCE_INVALID_ARGUMENT &&
            strstr(flce_last_error(), "comm: expected the collectives of 2 ranks"),
        "no collectives: %s", flce_last_error());
  free(none.workspace);
}

/* The buffer of the ranks' statistics has as many rows as are exchanged at a time: those of a
 * chunk, or all, also where a plan that is made directly has save=grads and no gradient is wanted.
 */
static void test_exchanged_rows(void) {
  for (int gradients = 0; gradients < 2; gradients++) {
    setting s = make_setting(FLCE_F32, FLCE_SAVE_GRADS);
    flce_problem* p = &s.problem;
    p->shard.ranks = 2, p->shard.classes = p->shape.vocab;
    p->wants.grad_input = p->wants.grad_weight = p->wants.grad_bias = gradients;
    p->memory.bound = 4 * p->shape.vocab * 8; /* of about four rows */
    flce_plan plan;
    CHECK_OK(plan_on_cpu(&s, &plan));
    CHECK(plan.chunks > 1, "one chunk");
    int64_t row = flce_shard_stat_count(p) * flce_size_of(flce_stat_dtype(plan.dtype));
    int64_t rows = gradients ? plan.chunk_rows : p->shape.rows;
    CHECK(plan.buffers[FLCE_BUF_SHARD_STATS].bytes >= rows * row, "%lld bytes for %lld rows",
          (long long)plan.buffers[FLCE_BUF_SHARD_STATS].bytes, (long long)rows);
  }
}

int main(void) {
  test_seed(8);
  test_saves();
  test_options();
  test_edges();
  test_set_variable("FLCE_BLOCKS", "8x64"); /* gradients by blocks */
  test_saves();
  test_options();
  test_edges();
  test_set_variable("FLCE_BLOCKS", NULL);
  test_split_dw();
  test_input();
  test_hidden_shard();
  test_equal_caps();
  test_sums();
  test_divergences();
  test_samples();
  test_refusals();
  test_exchanged_rows();
  return test_verdict();
}
