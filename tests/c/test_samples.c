/* save=samples: the random numbers, the lists by their definition, and the mean of the gradients
 * over seeds. */
#include "engine_case.h"
#include "cpu/cpu.h"
#include "random.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

/* Outputs of Random123's kat_vectors. */
static void test_philox(void) {
  CHECK(flce_philox(0, 0) == UINT64_C(0x6627e8d5e169c58d), "philox of zeros is %016llx",
        (unsigned long long)flce_philox(0, 0));
  CHECK(flce_philox(1, 0) != flce_philox(0, 0) && flce_philox(0, 1) != flce_philox(0, 0) &&
            flce_philox(INT64_C(1) << 32, 0) != flce_philox(1, 0) &&
            flce_philox(0, INT64_C(1) << 32) != flce_philox(0, 1),
        "a word of the seed or of the counter does not count");
}

static setting sampled_setting(flce_dtype dtype, double eps) {
  setting s = make_setting(dtype, FLCE_SAVE_SAMPLES);
  s.problem.sampling.eps = eps;
  return s;
}

/* The means over seeds of dX, dW and db, and their largest distance from the exact gradients in
 * standard errors. An entry that hardly ever is drawn has no normal distribution, so a part of the
 * size of its terms is allowed too. */
typedef struct means {
  double *sum, *square;
  int64_t count;
} means;

static means open_means(int64_t count) {
  return (means){test_doubles(count), test_doubles(count), count};
}

static void add_values(means* m, const void* values, flce_dtype dtype, const double* exact) {
  for (int64_t k = 0; k < m->count; k++) {
    double off = flce_load(values, dtype, k) - exact[k];
    m->sum[k] += off;
    m->square[k] += off * off;
  }
}

static void close_means(means* m, const char* name, double seeds, double rounding,
                        const double* size, const char* text) {
  double worst = 0.0;
  for (int64_t k = 0; k < m->count; k++) {
    double mean = m->sum[k] / seeds, variance = m->square[k] / seeds - mean * mean;
    double error = sqrt(fmax(variance, 0.0) / seeds) + (0.004 + rounding) * size[k];
    worst = fmax(worst, error > 0.0 ? fabs(mean) / error : fabs(mean) > 0.0 ? INFINITY : 0.0);
  }
  CHECK(worst <= 5.0, "the mean of %s is off by %g standard errors, %s", name, worst, text);
  free(m->sum), free(m->square);
}

static void check_same(const setting* s, const model* m, const run* serial, const char* text) {
  const flce_plan* plan = &serial->plan;
  run threaded = run_all(s, m, 3);
  const flce_buffer_id made[] = {FLCE_BUF_GRAD_INPUT, FLCE_BUF_GRAD_WEIGHT, FLCE_BUF_GRAD_BIAS};
  const void* one[] = {serial->t.grad_input, serial->t.grad_weight, serial->t.grad_bias};
  const void* other[] = {threaded.t.grad_input, threaded.t.grad_weight, threaded.t.grad_bias};
  for (int k = 0; k < 3; k++)
    CHECK(!one[k] || test_same(one[k], other[k], plan->buffers[made[k]].bytes),
          "threads change gradient %d, %s", k, text);
  free_run(&threaded);
}

static void test_means(setting s) {
  enum { SEEDS = 300 };
  const flce_problem* p = &s.problem;
  model m = make_model(&s);
  means dx = open_means(p->shape.tokens * p->shape.hidden),
        dw = open_means(p->shape.weight_rows * p->shape.hidden),
        db = open_means(p->shape.weight_rows);
  double rounding = 4.0 * test_epsilon(p->dtypes.gemm);
  char text[600] = "";
  for (s.seed = 0; s.seed < SEEDS; s.seed++) {
    run r = run_all(&s, &m, 1);
    describe(&s, &r, text, sizeof text);
    CHECK(r.backward_gemms == 0, "a GEMM in the backward, %s", text);
    add_values(&dx, r.t.grad_input, r.plan.grad_input_dtype, m.dx);
    add_values(&dw, r.t.grad_weight, r.plan.grad_weight_dtype, m.dw);
    if (p->wants.grad_bias) add_values(&db, r.t.grad_bias, r.plan.grad_bias_dtype, m.db);
    if (s.seed == 0) check_same(&s, &m, &r, text);
    free_run(&r);
  }
  close_means(&dx, "dX", SEEDS, rounding, m.dx_size, text);
  close_means(&dw, "dW", SEEDS, rounding, m.dw_size, text);
  if (p->wants.grad_bias) close_means(&db, "db", SEEDS, rounding, m.db_size, text);
  free_model(&m);
}

static void test_options(void) {
  const flce_dtype dtypes[] = {FLCE_F32, FLCE_BF16, FLCE_F16};
  for (int d = 0; d < 3; d++) {
    test_means(sampled_setting(dtypes[d], 0x1p-4));
    setting s = sampled_setting(dtypes[d], 0x1p-3);
    s.problem.loss.label_smoothing = 0.2;
    s.problem.loss.z_loss = 0.1;
    s.problem.has.class_weight = s.token_weight = true;
    s.temperature = s.problem.has.temperature = true;
    s.problem.reduction = FLCE_NONE;
    s.upstream = true;
    s.problem.memory.bound = 5 * 67 * 4 + 512; /* several chunks */
    test_means(s);
    s = sampled_setting(dtypes[d], 0x1p-2);
    s.problem.loss.softcap = 3.0;
    s.problem.loss.logit_scale = 1.5;
    s.problem.shape.rows = 19; /* gathered */
    s.problem.shape.weight_rows = 70;
    test_means(s);
  }
}

/* Gradients of lse and the entropy too. */
static void test_outputs(flce_dtype dtype) {
  setting s = sampled_setting(dtype, 0x1p-4);
  s.problem.wants.entropy = s.upstream = true;
  test_means(s);
  s.problem.loss.label_smoothing = 0.2;
  s.problem.loss.logit_scale = -1.5;
  s.temperature = s.problem.has.temperature = true;
  s.problem.shape.rows = 19; /* gathered */
  test_means(s);
}

/* No row is computed: every gradient is 0 or what it was, and nothing beyond it is written. */
static void test_no_rows(void) {
  const flce_dtype dtypes[] = {FLCE_F32, FLCE_BF16, FLCE_F16};
  for (int k = 0; k < 12; k++) {
    setting s = sampled_setting(dtypes[k % 3], 0x1p-4);
    s.all_ignored = true;
    s.problem.shape.rows = 0;
    if (k / 3 % 2) s.problem.dtypes.accum = FLCE_F32;
    s.problem.backward.adds_grad_weight = k >= 6;
    s.problem.backward.added_dtype = s.problem.dtypes.weight;
    model m = make_model(&s);
    run r = run_all(&s, &m, 1);
    check_run(&s, &m, &r);
    free_run(&r);
    free_model(&m);
  }
}

/* A sampled divergence, where the sum of dW over chunks would have another dtype than dW. */
static void test_divergence_without_rows(flce_dtype dtype) {
  setting s = sampled_setting(dtype, 0x1p-4);
  flce_problem *p = &s.problem, teacher;
  s.all_ignored = true;
  p->shape.rows = 0;
  p->divergence.kind = FLCE_FORWARD_KL, p->divergence.beta = 0.5;
  p->save = FLCE_SAVE_NOTHING;
  teacher = *p;
  teacher.sampling.eps = 0.0;
  teacher.wants.grad_input = teacher.wants.grad_weight = teacher.wants.grad_bias = false;
  p->save = FLCE_SAVE_GRADS, p->sampling.wanted = true, p->dtypes.accum = FLCE_F32;
  p->divergence.teacher = &teacher;
  model m = make_model(&s);
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  run r = open_run(&b, &s, &m);
  const flce_tensors same = r.t;
  r.t.teacher = &same;
  CHECK_OK(flce_forward(&b, NULL, &r.problem, &r.plan, &r.t));
  for (int64_t k = 0; k < p->shape.weight_rows * p->shape.hidden; k++)
    CHECK(flce_load(r.t.grad_weight, r.plan.grad_weight_dtype, k) == 0.0, "dW without rows");
  free_run(&r);
  free_model(&m);
}

/* What the caller asks for and what the plan has chosen: the engine takes the plan's strategy. */
static void test_strategy_of_the_plan(void) {
  setting s = sampled_setting(FLCE_F16, 0x1p-4);
  s.all_ignored = true;
  s.problem.shape.rows = 0;
  s.problem.sampling.wanted = true, s.problem.save = FLCE_SAVE_AUTO;
  model m = make_model(&s);
  run r = run_all(&s, &m, 1);
  CHECK(r.plan.strategy == FLCE_SAVE_SAMPLES && r.problem.save == FLCE_SAVE_AUTO, "the strategies");
  check_run(&s, &m, &r);
  free_run(&r);
  free_model(&m);
}

static void test_added(void) {
  setting s = sampled_setting(FLCE_F32, 0x1p-4);
  s.problem.backward.adds_grad_weight = true;
  s.problem.backward.added_dtype = FLCE_F32;
  test_means(s);
}

/* The lists of one row against the definition. */
static void test_lists(double eps) {
  setting s = sampled_setting(FLCE_F32, eps);
  model m = make_model(&s);
  for (s.seed = 0; s.seed < 20; s.seed++) {
    run r = run_all(&s, &m, 1);
    int64_t pitch = flce_sample_pitch(eps), most = 0;
    CHECK(pitch == r.plan.saved_pitch, "the lists have another pitch than the plan says");
    for (int64_t i = 0; i < s.problem.shape.tokens; i++) {
      const int32_t* list = (const int32_t*)r.t.saved + i * pitch;
      bool ignored = m.target[i] == IGNORE_INDEX, ascends = true;
      CHECK(list[0] == (ignored ? -1 : (int32_t)m.target[i]), "list of token %lld", (long long)i);
      for (int32_t k = 1; k <= list[1]; k++)
        ascends &= list[2 * k] != list[0] && (k == 1 || list[2 * k] > list[2 * k - 2]);
      CHECK(ascends && (!ignored || list[1] == 0), "classes of token %lld", (long long)i);
      most = list[1] > most ? list[1] : most;
    }
    CHECK(most <= (int64_t)ceil(1.0 / eps) && most > 0, "%lld entries", (long long)most);
    free_run(&r);
  }
  free_model(&m);
}

/* The tokens from `first` on in a call of their own draw what they draw in the call of all. */
static void test_a_part(int64_t first, bool gathers, int64_t max_memory) {
  setting s = sampled_setting(FLCE_F32, 0x1p-4);
  s.seed = 3;
  model m = make_model(&s), rest = m;
  run whole = run_all(&s, &m, 1);
  rest.x = (float*)m.x + first * s.problem.shape.hidden;
  rest.target = m.target + first;
  s.problem.shape.tokens -= first;
  s.problem.shape.first_token = first;
  s.problem.memory.bound = max_memory;
  int64_t valid = 0, row = 0, bytes = whole.plan.saved_pitch * (int64_t)sizeof(int32_t);
  for (int64_t i = 0; i < s.problem.shape.tokens; i++) valid += rest.target[i] != IGNORE_INDEX;
  s.problem.shape.rows = gathers ? valid : s.problem.shape.tokens;
  run part = run_all(&s, &rest, 1);
  CHECK(part.plan.gathers == gathers, "the rows are not in the order that is tested");
  for (int64_t i = 0; i < s.problem.shape.tokens; i++) {
    if (gathers && rest.target[i] == IGNORE_INDEX) continue;
    CHECK(test_same((char*)whole.t.saved + (first + i) * bytes, (char*)part.t.saved + row++ * bytes,
                    bytes),
          "token %lld of a call from token %lld on draws anew", (long long)(first + i),
          (long long)first);
  }
  free_run(&whole), free_run(&part);
  free_model(&m);
}

static void test_parts(void) {
  const int64_t one_row = 80 * 4;
  for (int k = 0; k < 4; k++)
    for (int64_t first = 0; first <= 14; first += 7)
      test_a_part(first, k & 1, k & 2 ? one_row : 1 << 20);
  setting s = sampled_setting(FLCE_F32, 0x1p-4);
  flce_facts facts = {0};
  flce_plan plan;
  const int64_t refused[] = {-1, INT64_MAX};
  for (size_t k = 0; k < 2; k++) {
    s.problem.shape.first_token = refused[k];
    CHECK(flce_plan_make(&s.problem, &facts, &plan) == FLCE_INVALID_ARGUMENT &&
              strstr(flce_last_error(), "first_token: expected 0 to 9223372036854775784, got"),
          "first_token %lld: %s", (long long)refused[k], flce_last_error());
  }
}

/* ---- rows of as many classes as there may be ---- */

enum { BLOCK = 1 << 22 };

/* `count` elements of bfloat16, a repeated block: only the block has memory. */
static uint16_t* repeated(const uint16_t* block, int64_t count) {
  size_t bytes = BLOCK * sizeof *block;
  int file = memfd_create("block", 0);
  CHECK(write(file, block, bytes) == (ssize_t)bytes, "the file of the block");
  size_t all = ((size_t)count + BLOCK - 1) / BLOCK * bytes;
  char* row = mmap(NULL, all, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  for (size_t at = 0; at < all; at += bytes) {
    void* part = mmap(row + at, bytes, PROT_READ, MAP_SHARED | MAP_FIXED, file, 0);
    CHECK(part == row + at, "block at %zu bytes is not mapped", at);
  }
  close(file);
  return (uint16_t*)row;
}

/* The class of the position `drawn` of the prefix sums, `ends` of a block. */
static int64_t class_at(const int64_t* ends, int64_t drawn) {
  int64_t block = drawn / ends[BLOCK - 1], rest = drawn % ends[BLOCK - 1], low = 0,
          high = BLOCK - 1;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (ends[middle] <= rest)
      low = middle + 1;
    else
      high = middle;
  }
  return block * BLOCK + low;
}

/* The list of a row with 2^31 - 1 classes against the definition; E is from 1 to 2. */
static void test_large_row(void) {
  const int64_t vocab = INT32_MAX;
  const double eps = 0x1p-6, one = 0x1p40;
  int bits = flce_sample_bits(vocab);
  CHECK(bits == 40 && flce_sample_bits(1 << 20) == 23, "%d bits", bits);
  uint16_t* block = malloc(BLOCK * sizeof *block);
  double exact = 0.0;
  for (int64_t j = 0; j < BLOCK; j++) {
    flce_store(block, FLCE_BF16, j, test_uniform(1.0, 2.0));
    exact += flce_load(block, FLCE_BF16, j);
  }
  uint16_t* e = repeated(block, vocab);
  int64_t *ends = malloc(BLOCK * sizeof *ends), sum = 0;
  float inv_sum = (float)(BLOCK / (exact * (double)vocab)), least = 1.0f;
  for (int64_t j = 0; j < BLOCK; j++) {
    float q = (float)flce_load(block, FLCE_BF16, j) * (inv_sum * (float)(1.0 / eps));
    ends[j] = sum += llrint((double)q * one);
    least = fminf(q, least);
  }
  CHECK(least * one >= 0x1p14, "the least q is %g", least);
  double total = (double)sum / one * (double)vocab / BLOCK;
  CHECK(fabs(total * eps - 1.0) <= (double)vocab * eps * 0x1p-41 + 0x1p-21, "sum of q %.9g", total);
  float stats[FLCE_STAT_COUNT] = {[FLCE_STAT_INV_SUM] = inv_sum};
  int64_t target = 1, seed = 5;
  int32_t* list = malloc((size_t)flce_sample_pitch(eps) * sizeof *list);
  flce_rows rows = {.rows = 1, .vocab = vocab, .target = &target, .stats = stats};
  rows.out = e, rows.out_dtype = FLCE_BF16, rows.out_pitch = vocab, rows.stat_pitch = 1;
  rows.options.ignore_index = IGNORE_INDEX;
  flce_cpu cpu = test_cpu(1);
  CHECK_OK(flce_cpu_sample_rows(
      &cpu, &(flce_sample_rows_args){
                .rows = &rows, .lists = list, .eps = eps, .bits = bits, .seed = &seed}));
  int64_t drawn = (int64_t)(flce_philox((uint64_t)seed, 0) >> 24), m = 0;
  for (; class_at(ends, drawn) < vocab; m++, drawn += INT64_C(1) << 40) {
    int64_t j = class_at(ends, drawn);
    CHECK(m < list[1] && list[2 * m + 2] == j, "draw %lld", (long long)m);
    CHECK(test_same(list + 2 * m + 3, &(float){(float)flce_load(e, FLCE_BF16, j)}, 4),
          "E of class %lld", (long long)j);
  }
  CHECK(m == list[1] && m >= 63, "%lld draws, got %d", (long long)m, list[1]);
  munmap(e, ((size_t)vocab + BLOCK - 1) / BLOCK * BLOCK * sizeof *e);
  free(block), free(ends), free(list);
}

/* Where sampling pays on a GPU: large vocabularies, the larger the finer eps is. */
static void test_sampled_time(void) {
  static const struct {
    int64_t tokens, vocab;
    double eps, least, most;
  } cases[] = {
      {8192, 128256, 0x1p-6, 0.05, 0.15}, /* measured on an H200: 0.10 */
      {8192, 128256, 0x1p-8, 0.3, 0.4},   /* 0.32 */
      {8192, 32000, 0x1p-6, 0.3, 0.4},    /* 0.35 */
      {8192, 8192, 0x1p-6, 1.0, 2.0},     {64, 128256, 0x1p-6, 0.1, 1.0},
  };
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    setting s = sampled_setting(FLCE_BF16, cases[k].eps);
    flce_problem* p = &s.problem;
    p->shape.tokens = p->shape.rows = cases[k].tokens;
    p->shape.hidden = 4096;
    p->shape.vocab = p->shape.weight_rows = cases[k].vocab;
    p->memory.bound = 1 << 30;
    const flce_facts facts = {.gemm_writes_f32 = true, .multiprocessors = 132};
    flce_plan plan;
    CHECK_OK(flce_plan_make(p, &facts, &plan));
    CHECK(plan.sampled_time >= cases[k].least && plan.sampled_time <= cases[k].most,
          "case %zu: sampled_time %g", k, plan.sampled_time);
    p->save = FLCE_SAVE_LOGITS;
    CHECK_OK(flce_plan_make(p, &facts, &plan));
    CHECK(plan.sampled_time == 0.0, "exact gradients have a sampled_time");
  }
}

int main(void) {
  test_seed(7);
  test_sampled_time();
  test_philox();
  for (int index = 0; test_next_variant(&index);) {
    test_lists(0x1p-4);
    test_outputs(FLCE_F32);
  }
  test_outputs(FLCE_BF16);
  test_outputs(FLCE_F16);
  test_lists(1.0);
  test_lists(0x1p-12);
  test_options();
  test_added();
  test_no_rows();
  test_parts();
  test_divergence_without_rows(FLCE_BF16);
  test_divergence_without_rows(FLCE_F16);
  test_strategy_of_the_plan();
  test_large_row();
  return test_verdict();
}
