/* The dtype in which dW is summed over many chunks: FLCE_WIDE_SUM_CHUNKS in the plan, and runs of
 * it against the definition. */
#include "core/chunks.h"
#include "engine_case.h"
#include "gpu.h"

#include <stdlib.h>

enum { ROWS_OF_A_CHUNK = 2, HIDDEN = 24, VOCAB = 64 };

/* A problem with so many chunks, in whichever pass makes dW. */
static flce_problem with_chunks(flce_dtype dtype, flce_save save, int64_t chunks) {
  flce_problem p = make_setting(dtype, save).problem;
  p.shape.tokens = p.shape.rows = chunks * ROWS_OF_A_CHUNK;
  p.shape.hidden = HIDDEN;
  p.shape.vocab = p.shape.weight_rows = VOCAB;
  p.has.probabilities = save == FLCE_SAVE_LOGITS; /* so that its backward has chunks: of dz */
  p.dtypes.logits = dtype;
  p.memory.bound = ROWS_OF_A_CHUNK * VOCAB * flce_size_of(dtype);
  p.dtypes.widens_accum = true;
  return p;
}

static flce_plan plan_of(const flce_problem* p, const flce_facts* facts) {
  flce_plan plan;
  CHECK_OK(flce_plan_make(p, facts, &plan));
  return plan;
}

static int64_t chunks_of(const flce_plan* plan) {
  return plan->strategy == FLCE_SAVE_GRADS ? plan->chunks : plan->backward_chunks;
}

/* The default is the stat dtype from FLCE_WIDE_SUM_CHUNKS chunks on, wherever dW is made; a dtype
 * that the caller names is taken. */
static void test_default(void) {
  const flce_facts facts = {.gemm_writes_f32 = true, .gemm_f16 = true, .bias_parts = 3};
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int save = FLCE_SAVE_LOGITS; save <= FLCE_SAVE_STATS; save++) {
      for (int64_t chunks = FLCE_WIDE_SUM_CHUNKS - 1; chunks <= FLCE_WIDE_SUM_CHUNKS; chunks++) {
        flce_problem p = with_chunks((flce_dtype)dtype, (flce_save)save, chunks);
        flce_dtype stat = flce_stat_dtype(p.dtypes.gemm);
        flce_plan automatic = plan_of(&p, &facts);
        p.dtypes.widens_accum = false;
        flce_plan narrow = plan_of(&p, &facts);
        p.dtypes.accum = stat;
        flce_plan wide = plan_of(&p, &facts);
        flce_dtype expected = chunks < FLCE_WIDE_SUM_CHUNKS ? p.dtypes.gemm : stat;
        CHECK(chunks_of(&automatic) == chunks, "%s: %lld chunks", flce_save_name(p.save),
              (long long)chunks_of(&automatic));
        CHECK(automatic.accum_dtype == expected && narrow.accum_dtype == p.dtypes.gemm &&
                  wide.accum_dtype == stat,
              "%s %s, %lld chunks: %s, named %s and %s", flce_save_name(p.save),
              flce_dtype_name(p.dtypes.gemm), (long long)chunks,
              flce_dtype_name(automatic.accum_dtype), flce_dtype_name(narrow.accum_dtype),
              flce_dtype_name(wide.accum_dtype));
        CHECK(chunks_of(&narrow) == chunks, "the chunks depend on who chooses the accumulator");
        /* The kernel that sums db too has a 16-bit accumulator. */
        CHECK(automatic.bias_parts == (expected == p.dtypes.gemm ? facts.bias_parts : 0),
              "bias parts");
        int64_t bytes = expected != narrow.accum_dtype ? VOCAB * HIDDEN * flce_size_of(stat) : 0;
        CHECK(automatic.buffers[FLCE_BUF_DW_ACCUM].bytes == bytes, "%lld bytes, expected %lld",
              (long long)automatic.buffers[FLCE_BUF_DW_ACCUM].bytes, (long long)bytes);
      }
    }
  }
}

/* What sums nothing in 16 bits over chunks has nothing to widen. */
static void test_no_sum(void) {
  const flce_facts facts = {.gemm_writes_f32 = true, .gemm_f16 = true};
  flce_problem p = with_chunks(FLCE_BF16, FLCE_SAVE_GRADS, 100);
  p.wants.grad_weight = false;
  CHECK(plan_of(&p, &facts).accum_dtype == FLCE_BF16, "dW is not wanted");
  p = with_chunks(FLCE_BF16, FLCE_SAVE_LOGITS, 100);
  p.has.probabilities = false; /* E is kept: the backward is one GEMM over all rows */
  p.dtypes.logits = FLCE_F32;
  p.memory.bound *= 2;
  flce_plan plan = plan_of(&p, &facts);
  CHECK(plan.chunks == 100 && plan.backward_chunks == 1 && plan.accum_dtype == FLCE_BF16,
        "chunks of the forward count for dW, which the backward makes");
  p = with_chunks(FLCE_BF16, FLCE_SAVE_SAMPLES, 100);
  p.sampling.eps = 0.25;
  p.dtypes.accum = FLCE_BF16;
  plan = plan_of(&p, &facts);
  CHECK(plan.accum_dtype == FLCE_BF16 && plan.buffers[FLCE_BUF_DW_ACCUM].bytes == 0,
        "sampled gradients have no accumulator");
}

/* float16 gradients that are made before grad_output is known: dW is kept in float16 whatever the
 * chunks are, as a compiled graph expects. A wider sum of it takes its accumulator and no more. */
static void test_float16(void) {
  const flce_facts facts = {.gemm_writes_f32 = true, .gemm_f16 = true};
  flce_problem p = with_chunks(FLCE_F16, FLCE_SAVE_GRADS, FLCE_WIDE_SUM_CHUNKS);
  flce_plan automatic = plan_of(&p, &facts);
  CHECK(automatic.accum_dtype == FLCE_F32 && automatic.grad_weight_dtype == FLCE_F16 &&
            automatic.dw_fp16_shift != 0,
        "dW is kept in %s", flce_dtype_name(automatic.grad_weight_dtype));
  p.dtypes.widens_accum = false;
  flce_plan narrow = plan_of(&p, &facts);
  int64_t accumulator = VOCAB * HIDDEN * flce_size_of(FLCE_F32); /* a multiple of 256 bytes */
  CHECK(automatic.forward_peak_bytes == narrow.forward_peak_bytes + accumulator &&
            automatic.backward_peak_bytes == narrow.backward_peak_bytes,
        "%lld and %lld bytes, in float16 %lld and %lld", (long long)automatic.forward_peak_bytes,
        (long long)automatic.backward_peak_bytes, (long long)narrow.forward_peak_bytes,
        (long long)narrow.backward_peak_bytes);
  p.dtypes.accum = FLCE_F32;
  flce_plan named = plan_of(&p, &facts);
  CHECK(named.grad_weight_dtype == FLCE_F32 && named.dw_fp16_shift == 0, "float32 by name");
}

/* A GPU's chunks depend on the cost of accumulating; widening does not move them. Blocks of so many
 * rows that their chunks are few need no wide sum. */
static void test_chunks_of_a_gpu(void) {
  flce_gpu gpu;
  flce_backend b;
  CHECK_OK(flce_find_gpu("h100", &gpu));
  flce_gpu_backend(&gpu, &b);
  const int64_t tokens[] = {8192, 30000, 32768, 65536, 350208};
  for (int saves = 0; saves < 2; saves++) {
    for (size_t k = 0; k < sizeof tokens / sizeof *tokens; k++) {
      flce_problem p = make_setting(FLCE_BF16, FLCE_SAVE_AUTO).problem;
      p.shape.tokens = p.shape.rows = tokens[k];
      p.shape.hidden = 4096;
      p.shape.vocab = p.shape.weight_rows = 128256;
      p.memory.bound_is_default = saves;
      p.memory.bound = INT64_C(1) << 30;
      flce_plan narrow, automatic;
      CHECK_OK(flce_plan_call(&b, &p, &narrow));
      p.dtypes.widens_accum = true;
      CHECK_OK(flce_plan_call(&b, &p, &automatic));
      /* With dX first, the forward's chunks are other ones, in the memory of dW. */
      bool same = narrow.chunks == automatic.chunks && narrow.chunk_rows == automatic.chunk_rows;
      CHECK(same || automatic.blocks == FLCE_BLOCKS_DX_FIRST, "%lld tokens: %lld and %lld chunks",
            (long long)tokens[k], (long long)narrow.chunks, (long long)automatic.chunks);
      bool blocks = automatic.block_classes > 0;
      int64_t rows = blocks ? automatic.block_rows : automatic.chunk_rows;
      int64_t chunks = (tokens[k] + rows - 1) / rows;
      bool wide = chunks >= FLCE_WIDE_SUM_CHUNKS;
      CHECK(!(blocks && (saves || wide)), "blocks of %lld rows", (long long)rows);
      CHECK((automatic.accum_dtype == FLCE_F32) == wide, "%lld chunks: %s", (long long)chunks,
            flce_dtype_name(automatic.accum_dtype));
      int64_t more = wide ? 4 * p.shape.vocab * p.shape.hidden : 0;
      CHECK(automatic.buffers[FLCE_BUF_DW_ACCUM].bytes == more, "accumulator of %lld chunks",
            (long long)chunks);
    }
  }
}

/* The plan of a rank of two that has `vocab` of the 100 classes. */
static flce_plan plan_of_rank(int rank, int64_t vocab, flce_save save, int64_t tokens) {
  flce_cpu cpu = test_cpu(1);
  flce_backend b;
  flce_cpu_backend(&cpu, &b);
  flce_problem p = make_setting(FLCE_BF16, save).problem;
  p.shape.tokens = p.shape.rows = tokens;
  p.shape.vocab = p.shape.weight_rows = vocab;
  p.shard.ranks = 2, p.shard.rank = rank;
  p.shard.first_class = rank ? 100 - vocab : 0;
  p.shard.classes = 100;
  p.dtypes.widens_accum = true;
  p.memory.bound = ROWS_OF_A_CHUNK * 64 * 2; /* of the 50 classes of an equal share */
  flce_plan plan;
  CHECK_OK(flce_plan_call(&b, &p, &plan));
  return plan;
}

/* The ranks take one dtype, that of an equal share, also where the backward's chunks differ. */
static void test_ranks(void) {
  for (int save = FLCE_SAVE_GRADS; save <= FLCE_SAVE_STATS; save++) {
    for (int64_t chunks = FLCE_WIDE_SUM_CHUNKS - 1; chunks <= FLCE_WIDE_SUM_CHUNKS; chunks++) {
      flce_dtype expected = chunks < FLCE_WIDE_SUM_CHUNKS ? FLCE_BF16 : FLCE_F32;
      for (int64_t first = 0; first <= 100; first += 10) {
        flce_plan a = plan_of_rank(0, first, (flce_save)save, chunks * ROWS_OF_A_CHUNK);
        flce_plan b = plan_of_rank(1, 100 - first, (flce_save)save, chunks * ROWS_OF_A_CHUNK);
        CHECK(a.accum_dtype == expected && b.accum_dtype == expected,
              "%s, %lld and %lld chunks, %lld classes: %s and %s", flce_save_name(a.strategy),
              (long long)chunks_of(&a), (long long)chunks_of(&b), (long long)first,
              flce_dtype_name(a.accum_dtype), flce_dtype_name(b.accum_dtype));
      }
    }
  }
}

/* Runs of a chunk for each row: copies of x and W, frozen columns, padding, a gradient to add to,
 * float16 with and without a GEMM of its own. */
static void test_runs(void) {
  for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) {
    for (int save = FLCE_SAVE_LOGITS; save <= FLCE_SAVE_STATS; save++) {
      for (int k = 0; k < 16; k++) {
        setting s = make_setting((flce_dtype)dtype, (flce_save)save);
        flce_problem* p = &s.problem;
        p->dtypes.widens_accum = true;
        p->memory.bound = 128 * 8;
        p->has.probabilities = save == FLCE_SAVE_LOGITS;
        p->loss.label_smoothing = k & 1 ? 0.1 : 0.0;
        p->shape.frozen_hidden = k & 2 ? 8 : 0;
        p->shape.weight_rows += k & 4 ? 5 : 0;
        p->backward.adds_grad_weight = k & 8 && save != FLCE_SAVE_GRADS;
        p->backward.added_dtype = k & 1 ? flce_stat_dtype(p->dtypes.gemm) : p->dtypes.gemm;
        if (k & 8 && save == FLCE_SAVE_GRADS) p->wants.grad_input = false;
        test_setting(&s);
      }
    }
  }
}

int main(void) {
  test_seed(21);
  test_default();
  test_no_sum();
  test_float16();
  test_chunks_of_a_gpu();
  test_ranks();
  test_runs();
  return test_verdict();
}
