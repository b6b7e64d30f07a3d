/* Plans of drawn problems, for the GPUs that have a name, odd ones and the CPU: none is refused
 * whose max_memory holds a tile of logits. */
#include "core/chunks.h"
#include "gpu.h"
#include "test.h"

#include <string.h>

enum { DRAWS = 30000, TILE = TILE_ROWS };

static bool one_in(int64_t count) {
  return test_random() % (uint64_t)count == 0;
}

static int64_t one_of(int64_t least, int64_t most) {
  return least + (int64_t)(test_random() % (uint64_t)(most - least + 1));
}

/* Up to 2^bits, small numbers as often as large ones. */
static int64_t size_of(int bits) {
  return one_of(1, INT64_C(1) << one_of(0, bits));
}

static void draw_loss(flce_problem* p) {
  p->loss = (flce_loss){.ignore_index = -100, .logit_scale = one_in(6) ? -1.5 : 1.0};
  p->loss.temperature = one_in(6) ? 2.0 : 1.0;
  p->loss.softcap = one_in(6) ? 30.0 : 0.0;
  p->loss.label_smoothing = one_in(6) ? 0.1 : 0.0;
  p->loss.z_loss = one_in(6) ? 0.1 : 0.0;
  p->has.class_weight = one_in(4);
  p->has.temperature = one_in(6);
  p->has.probabilities = one_in(6);
  p->wants.entropy = one_in(4);
  p->wants.entropy_gradient = p->wants.entropy && one_in(2);
  p->wants.predictions = one_in(4);
  p->wants.statistics = one_in(4);
  p->wants.topk = one_in(8) ? min64(p->shape.vocab, one_of(1, FLCE_MOST_TOPK)) : 0;
  p->wants.row_classes = p->wants.topk > 0 ? flce_candidates(p->wants.topk)
                         : one_in(8)       ? one_of(1, 20)
                                           : 0;
}

static void draw_gradients(flce_problem* p) {
  p->wants.grad_input = !one_in(4);
  p->wants.grad_weight = !one_in(4);
  p->wants.grad_bias = p->has.bias && !one_in(4);
  p->shape.frozen_hidden = one_in(6) && p->shape.hidden > 8 ? 8 : 0;
  p->save = (flce_save)one_of(FLCE_SAVE_NOTHING, FLCE_SAVE_AUTO);
  p->sampling.wanted = p->save == FLCE_SAVE_SAMPLES;
  p->sampling.eps = p->sampling.wanted ? 0x1p-6 : 0.0;
  if (p->save == FLCE_SAVE_GRADS && p->reduction == FLCE_NONE) p->reduction = FLCE_MEAN;
  p->backward.adds_grad_weight = one_in(4) && p->wants.grad_weight && p->save != FLCE_SAVE_GRADS;
  p->graph.accumulates = p->backward.adds_grad_weight;
  p->backward.added_dtype = one_in(2) ? p->dtypes.weight : flce_stat_dtype(p->dtypes.weight);
  p->backward.consumes_saved = one_in(2);
}

static flce_problem draw(void) {
  flce_problem p = {.shape.tokens = one_in(50) ? 0 : size_of(24)};
  flce_dtype dtype = (flce_dtype)one_of(FLCE_F64, FLCE_F16), stat = flce_stat_dtype(dtype);
  p.shape.hidden = size_of(14), p.shape.vocab = size_of(18);
  p.shape.rows = p.shape.tokens;
  p.shape.weight_rows = p.shape.vocab + (one_in(4) ? 3 : 0);
  p.dtypes.gemm = dtype;
  p.dtypes.input = p.dtypes.weight = p.dtypes.bias = one_in(6) ? FLCE_F32 : dtype;
  p.dtypes.accum = one_in(2) ? dtype : stat;
  p.dtypes.logits = one_in(2) ? dtype : stat;
  p.reduction = (flce_reduction)one_of(FLCE_NONE, FLCE_SUM);
  p.has.bias = one_in(3);
  p.has.unaligned_operand = one_in(6);
  draw_loss(&p);
  draw_gradients(&p);
  if (!p.has.probabilities && one_in(3)) p.shape.rows = one_of(0, p.shape.tokens);
  return p;
}

/* Makes it a divergence from a head or from given logits; false where its options exclude that. */
static bool add_teacher(flce_problem* p, flce_problem* teacher) {
  if (!one_in(4) || p->save == FLCE_SAVE_SAMPLES || p->save == FLCE_SAVE_LOGITS) return false;
  p->loss.label_smoothing = p->loss.z_loss = 0.0;
  p->has.class_weight = p->has.probabilities = p->wants.entropy = p->wants.entropy_gradient = false;
  p->wants.predictions = p->wants.statistics = p->backward.adds_grad_weight = p->graph.accumulates =
      false;
  p->wants.topk = p->wants.row_classes = 0;
  p->divergence.kind = (flce_divergence)one_of(1, FLCE_DIVERGENCE_COUNT);
  p->divergence.beta = 0.5;
  *teacher = *p;
  teacher->save = FLCE_SAVE_NOTHING;
  teacher->wants.grad_input = teacher->wants.grad_weight = teacher->wants.grad_bias = false;
  teacher->shape.frozen_hidden = 0;
  teacher->dtypes.accum = teacher->dtypes.gemm;
  teacher->has.logits = one_in(2);
  teacher->shape.hidden = teacher->has.logits ? p->shape.weight_rows : size_of(14);
  p->divergence.teacher = teacher;
  return true;
}

/* Bytes of TILE rows of logits, both the student's and the teacher's. */
static int64_t tile_bytes(const flce_problem* p) {
  int64_t row = round_up(p->shape.vocab * flce_size_of(flce_stat_dtype(p->dtypes.gemm)), 128);
  return TILE * row * (p->divergence.teacher && !p->divergence.teacher->has.logits ? 2 : 1);
}

static void check_plan(const flce_backend* backend, const flce_problem* p) {
  flce_plan plan;
  flce_status status = flce_plan_step(backend, p, &plan);
  CHECK(status == FLCE_OK || status == FLCE_UNSUPPORTED,
        "%s, %lld tokens, %lld rows, H %lld, V %lld, %s, save %s: %s", backend->name,
        (long long)p->shape.tokens, (long long)p->shape.rows, (long long)p->shape.hidden,
        (long long)p->shape.vocab, flce_dtype_name(p->dtypes.gemm), flce_save_name(p->save),
        flce_last_error());
  if (status != FLCE_OK) return;
  const flce_buffer* logits = &plan.buffers[FLCE_BUF_LOGITS];
  CHECK(plan.chunks * plan.chunk_rows >= p->shape.rows, "%lld chunks of %lld rows for %lld",
        (long long)plan.chunks, (long long)plan.chunk_rows, (long long)p->shape.rows);
  CHECK(logits->bytes <= p->memory.bound, "logits of %lld bytes, max_memory %lld",
        (long long)logits->bytes, (long long)p->memory.bound);
}

/* With a max_memory of one tile to a few, and with the defaults of a large GPU. */
static void check_problem(const flce_backend* backend, flce_problem p) {
  int64_t tile = tile_bytes(&p);
  p.memory.bound = p.memory.kept = tile * one_of(1, 4) + one_of(0, tile);
  check_plan(backend, &p);
  p.memory.bound_is_default = true;
  p.memory.bound = INT64_C(1) << 30;
  p.memory.kept = INT64_C(10) << 30;
  if (tile <= p.memory.bound / 4 * 3) check_plan(backend, &p);
}

/* What heads over pixels, bytes and bases have: more memory in numbers of rows than in logits. */
static void test_few_classes(const flce_backend* backend) {
  const struct {
    int64_t tokens, rows, vocab;
    flce_dtype dtype;
  } cases[] = {{4000000, 4000000, 32, FLCE_BF16},
               {2000000, 2000000, 48, FLCE_BF16},
               {1200000, 1200000, 64, FLCE_BF16},
               {8000000, 8000000, 16, FLCE_BF16},
               {5000000, 91950, 1000, FLCE_F16}};
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    flce_problem p = {
        .shape.tokens = cases[k].tokens, .shape.rows = cases[k].rows, .shape.hidden = 256};
    p.shape.vocab = p.shape.weight_rows = cases[k].vocab;
    p.dtypes.gemm = p.dtypes.input = p.dtypes.weight = p.dtypes.bias = p.dtypes.accum =
        cases[k].dtype;
    p.dtypes.logits = FLCE_F32;
    p.reduction = FLCE_MEAN;
    p.wants.grad_input = p.wants.grad_weight = true;
    p.save = FLCE_SAVE_AUTO;
    p.loss = (flce_loss){.ignore_index = -100, .logit_scale = 1.0, .temperature = 1.0};
    p.memory.bound_is_default = true;
    p.memory.bound = INT64_C(1) << 30;
    p.memory.kept = INT64_C(10) << 30;
    flce_plan plan;
    CHECK_OK(flce_plan_step(backend, &p, &plan));
    CHECK(plan.chunks <= 64, "case %zu: %lld chunks", k, (long long)plan.chunks);
    int64_t size =
        p.dtypes.gemm == FLCE_F16 ? 6 : 2; /* float16 gradients are kept in float32, too */
    int64_t outputs = (p.shape.tokens + p.shape.vocab) * p.shape.hidden * size;
    int64_t most = 3 * p.shape.tokens * 128 + (64 << 20);
    CHECK(plan.peak_bytes <= outputs + most, "case %zu: %lld bytes", k, (long long)plan.peak_bytes);
  }
}

int main(void) {
  test_seed(12);
  int named;
  const flce_gpu* gpus = flce_gpus(&named);
  flce_gpu all[16] = {{"a GPU of one multiprocessor", 80, 1, 8, 0, 0},
                      {"a GPU to come", 130, 400, INT64_C(1) << 39, 0, 0}};
  memcpy(all + 2, gpus, (size_t)named * sizeof *gpus);
  flce_cpu cpu = test_cpu(1);
  flce_backend backends[17];
  flce_cpu_backend(&cpu, &backends[0]);
  for (int k = 0; k < named + 2; k++) flce_gpu_backend(&all[k], &backends[1 + k]);
  for (int k = 1; k < named + 3; k++) test_few_classes(&backends[k]);
  for (int draws = 0; draws < DRAWS; draws++) {
    flce_problem p = draw(), teacher;
    if (p.sampling.wanted && p.dtypes.gemm == FLCE_F64) continue;
    if (!add_teacher(&p, &teacher) && p.sampling.wanted &&
        (p.has.probabilities || p.loss.softcap > 0.0))
      continue;
    check_problem(&backends[one_of(0, named + 2)], p);
  }
  return test_verdict();
}
