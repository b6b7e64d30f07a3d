/* The rows of architectures.h: a GPU whose row has no kernels plans without them, by cuBLASLt and
 * the row kernels, as one without a row; sizes of tiles come from the row. */
#include "architectures.h"
#include "gpu.h"
#include "test.h"

#include <string.h>

/* A GPU to come with a row of its own. */
typedef struct dummy_gpu {
  flce_gpu gpu;
  const flce_architecture* row; /* NULL: none */
  const char* kernel;           /* FLCE_KERNEL */
} dummy_gpu;

static flce_status facts_of_dummy(void* self, const flce_problem* problem, flce_facts* facts) {
  const dummy_gpu* dummy = self;
  return flce_gpu_facts(&dummy->gpu, dummy->row, dummy->kernel, problem, facts);
}

static flce_plan plan_on(const flce_architecture* row, const char* kernel,
                         const flce_problem* problem, flce_facts* facts) {
  dummy_gpu dummy = {
      .gpu = {"to come", 110, 132, INT64_C(80) << 30, 0, 0}, .row = row, .kernel = kernel};
  flce_backend backend;
  flce_gpu_backend(&dummy.gpu, &backend);
  backend.self = &dummy;
  backend.facts = facts_of_dummy;
  flce_plan plan;
  memset(&plan, 0, sizeof plan);
  CHECK_OK(facts_of_dummy(&dummy, problem, facts));
  CHECK_OK(flce_plan_step(&backend, problem, &plan));
  return plan;
}

/* A training step whose sizes the kernels of every row serve; `divides` its rows into chunks. */
static flce_problem problem_of(flce_dtype dtype, bool divides) {
  flce_problem p = {
      .shape.tokens = 8192, .shape.hidden = 4096, .shape.vocab = 128256, .shape.rows = 8192};
  p.shape.weight_rows = p.shape.vocab;
  p.dtypes.gemm = p.dtypes.input = p.dtypes.weight = p.dtypes.bias = p.dtypes.accum = dtype;
  p.dtypes.logits = flce_stat_dtype(dtype);
  p.reduction = FLCE_MEAN;
  p.has.bias = true;
  p.wants.grad_input = p.wants.grad_weight = p.wants.grad_bias = true;
  p.save = FLCE_SAVE_GRADS;
  p.loss = (flce_loss){.ignore_index = -100, .logit_scale = 1.0, .temperature = 1.0};
  p.memory.bound = INT64_C(1) << (divides ? 30 : 34);
  p.memory.kept = INT64_C(10) << 30;
  return p;
}

/* One row a GPU, and capabilities that do exist. */
static void test_rows(void) {
  for (int i = 0; i < FLCE_ARCHITECTURES; i++) {
    const flce_architecture* row = &flce_architectures[i];
    CHECK(row->capability >= 80, "row %d has no capability", i);
    CHECK(flce_architecture_of(row->capability) == row, "row %d is not the first", i);
    const flce_logits_gemm_sizes* gemm = &row->logits;
    if (gemm->tile_columns == 0) continue;
    CHECK(gemm->tile_rows > 0 && gemm->cluster_rows % gemm->tile_rows == 0, "row %d: tiles", i);
  }
  CHECK(flce_architecture_of(80) == NULL && flce_architecture_of(0) == NULL, "a row for 8.0");
}

static void test_without_kernels(void) {
  const flce_architecture dummy = {.capability = 110};
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int choice = 0; choice < 6; choice++) {
      const char* kernel = choice % 3 == 0 ? "auto" : choice % 3 == 1 ? "gemm" : "fused";
      flce_problem p = problem_of((flce_dtype)dtype, choice / 3);
      flce_facts with, without;
      flce_plan plan = plan_on(&dummy, kernel, &p, &with);
      flce_plan bare = plan_on(NULL, kernel, &p, &without);
      CHECK(with.fused_row_bytes == 0 && with.bias_parts == 0, "%s: a kernel for its row", kernel);
      CHECK(!with.skips_rows && !with.fused_writes_z && !with.fused_packs, "%s: facts", kernel);
      CHECK(!plan.fuses_rows && plan.bias_parts == 0, "%s: the plan fuses", kernel);
      CHECK(plan.buffers[FLCE_BUF_FUSED].bytes == 0, "%s: scratch of a kernel", kernel);
      CHECK(plan.chunks == bare.chunks && plan.peak_bytes == bare.peak_bytes, "%s: plan", kernel);
    }
  }
}

/* A row with one of both kernels, in other sizes than any real row. */
static void test_sizes_of_the_row(void) {
  flce_architecture row = {.capability = 110};
  row.logits = (flce_logits_gemm_sizes){.tile_rows = 64,
                                        .tile_columns = 96,
                                        .cluster_rows = 320,
                                        .least_rows = 500,
                                        .least_hidden = 4096};
  flce_problem p = problem_of(FLCE_BF16, true);
  flce_facts facts;
  flce_plan plan = plan_on(&row, "auto", &p, &facts);
  CHECK(plan.fuses_rows && plan.bias_parts == 0 && !facts.skips_rows, "the logits GEMM alone");
  CHECK(facts.fused_tile_rows == 320 && facts.fused_writes_z, "rows of a cluster, H");
  CHECK(facts.fused_row_bytes == 4 * (flce_ceil_div(p.shape.vocab, 96) + 8),
        "a number of each tile");
  p.wants.topk = 20;
  p.wants.row_classes = FLCE_CANDIDATES(20);
  plan_on(&row, "auto", &p, &facts);
  CHECK(facts.fused_row_bytes == 4 * (2 * flce_ceil_div(p.shape.vocab, 96) + 8),
        "with topk also the largest E of each tile");
  p.wants.topk = FLCE_MOST_TOPK; /* more candidates than half of the tiles */
  p.wants.row_classes = FLCE_CANDIDATES(FLCE_MOST_TOPK);
  plan_on(&row, "auto", &p, &facts);
  CHECK(facts.fused_row_bytes == 4 * (flce_ceil_div(p.shape.vocab, 96) + 8), "with a large topk");
  p.wants.topk = p.wants.row_classes = 0;
  CHECK(plan.chunks > 1 && plan.chunk_rows % 320 == 0, "%lld rows", (long long)plan.chunk_rows);
  p.shape.rows = p.shape.tokens = 499;
  CHECK(!plan_on(&row, "auto", &p, &facts).fuses_rows, "fewer than least_rows");
  CHECK(plan_on(&row, "fused", &p, &facts).fuses_rows, "FLCE_KERNEL=fused");

  row.logits = (flce_logits_gemm_sizes){0};
  row.weight = (flce_weight_gemm_sizes){.tile_columns = 512, .most_bias_parts = 16};
  p = problem_of(FLCE_BF16, false);
  plan = plan_on(&row, "auto", &p, &facts);
  CHECK(!plan.fuses_rows && facts.bias_parts == 8, "dW's GEMM alone: 4096 of H by 512");
  row.weight.most_bias_parts = 3;
  plan_on(&row, "auto", &p, &facts);
  CHECK(facts.bias_parts == 3, "most_bias_parts");
}

/* Fused kernels read whole vectors, and with probabilities they implement no other option.
 * FLCE_KERNEL does not change this. */
static void test_what_is_not_fused(void) {
  const flce_architecture row = {
      .capability = 110, .logits = {.tile_rows = 64, .tile_columns = 96, .cluster_rows = 64}};
  enum {
    NOTHING,
    CLASS_WEIGHT,
    TEMPERATURE,
    SMOOTHING,
    SOFTCAP,
    FALLING,
    ENTROPY,
    PREDICTIONS,
    ALL
  };
  for (int k = 0; k < 4 * ALL; k++) {
    const int option = k / 4;
    flce_problem p = problem_of(FLCE_BF16, false);
    p.has.unaligned_operand = k % 2;
    p.has.probabilities = k / 2 % 2;
    p.has.class_weight = option == CLASS_WEIGHT;
    p.has.temperature = option == TEMPERATURE;
    p.loss.label_smoothing = option == SMOOTHING ? 0.1 : 0.0;
    p.loss.softcap = option == SOFTCAP ? 30.0 : 0.0;
    p.loss.logit_scale = option == FALLING ? -1.0 : 1.0;
    p.wants.entropy = option == ENTROPY;
    p.wants.predictions = option == PREDICTIONS;
    bool serves = !p.has.unaligned_operand && (option == NOTHING || !p.has.probabilities);
    for (int forced = 0; forced < 2; forced++) {
      flce_facts facts;
      plan_on(&row, forced ? "fused" : "auto", &p, &facts);
      CHECK((facts.fused_row_bytes > 0) == serves, "option %d, unaligned %d, probabilities %d",
            option, p.has.unaligned_operand, p.has.probabilities);
    }
  }
}

int main(void) {
  test_rows();
  test_without_kernels();
  test_sizes_of_the_row();
  test_what_is_not_fused();
  return test_verdict();
}
