/* The plan's chunks: their rows from max_memory, waves of tiles on a GPU, and the buffers that
 * follow from them. */
#include "engine_case.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void test_plan(void) {
  setting s = make_setting(FLCE_F32, FLCE_SAVE_GRADS);
  flce_plan plan;
  s.problem.memory.bound = 8 * 80 * 4;
  CHECK_OK(plan_on_cpu(&s, &plan));
  char text[4096], small[16];
  int64_t length = flce_plan_text(&plan, text, sizeof text);
  CHECK(length == (int64_t)strlen(text), "length %lld of a text of %zu", (long long)length,
        strlen(text));
  CHECK(strstr(text, "save=grads form=exp kernel=gemm dtype=float32") &&
            strstr(text, "chunk_rows=8 chunks=3") &&
            strstr(text, "forward_gemms=9 backward_gemms=0") && strstr(text, "grad_weight"),
        "plan: %s", text);
  CHECK(flce_plan_text(&plan, small, sizeof small) == length && strlen(small) == 15 &&
            strncmp(small, text, 15) == 0,
        "a short buffer: %s", small);
  CHECK(flce_plan_text(&plan, NULL, 0) == length, "no buffer");
}

/* The copy of gathered rows counts towards max_memory, and stays small without a bound. */
static void test_plan_of_gathered_rows(void) {
  setting s = make_setting(FLCE_F32, FLCE_SAVE_NOTHING);
  flce_problem* p = &s.problem;
  p->shape.tokens = p->shape.rows = 100000;
  p->wants.grad_input = p->wants.grad_weight = p->wants.grad_bias = false;
  const flce_facts facts = {.fused_row_bytes = 100, .fused_tile_rows = 256, .skips_rows = true};
  flce_plan plan;
  int64_t row_bytes = 100 + p->shape.hidden * 4, budgets[] = {INT64_MAX, 1000 * row_bytes};
  for (int k = 0; k < 2; k++) {
    p->memory.bound = budgets[k];
    CHECK_OK(flce_plan_make(p, &facts, &plan));
    int64_t copy = plan.buffers[FLCE_BUF_GATHERED_X].bytes;
    int64_t numbers = plan.buffers[FLCE_BUF_FUSED].bytes;
    CHECK(plan.gathers && plan.chunk_rows <= 4096 && copy == plan.chunk_rows * p->shape.hidden * 4,
          "a copy of %lld bytes for chunks of %lld rows", (long long)copy,
          (long long)plan.chunk_rows);
    CHECK(numbers > 0 && copy + numbers <= p->memory.bound, "%lld + %lld bytes", (long long)copy,
          (long long)numbers);
  }
  p->save = FLCE_SAVE_STATS;
  p->wants.grad_weight = true;
  CHECK_OK(flce_plan_make(p, &facts, &plan));
  CHECK(plan.backward_gathered_x == FLCE_BUF_SCALED_X &&
            !(plan.buffers[FLCE_BUF_GATHERED_X].lifetime & FLCE_IN_BACKWARD),
        "the backward has two copies of x");
}

static int64_t rows_of_chunks(int64_t tokens, int64_t hidden, int64_t vocab, bool makes_dx,
                              flce_save save, int64_t fused_tile_rows) {
  const flce_facts facts = {.gemm_writes_f32 = true,
                            .gemm_f16 = true,
                            .fused_row_bytes = fused_tile_rows > 0 ? 100 : 0,
                            .fused_tile_rows = fused_tile_rows,
                            .multiprocessors = 132,
                            .gemm_workspace_bytes = 32 << 20};
  flce_problem p = make_setting(FLCE_BF16, save).problem;
  p.shape.tokens = p.shape.rows = tokens;
  p.shape.hidden = hidden;
  p.shape.vocab = p.shape.weight_rows = vocab;
  p.dtypes.logits = FLCE_BF16;
  p.wants.grad_input = makes_dx;
  p.memory.bound = INT64_C(1) << 30;
  flce_plan plan;
  CHECK_OK(flce_plan_make(&p, &facts, &plan));
  CHECK(plan.chunk_rows * plan.z_pitch * 2 <= p.memory.bound, "beyond the budget");
  return save == FLCE_SAVE_STATS ? plan.backward_chunk_rows : plan.chunk_rows;
}

/* 26 x 8 tiles of dX leave half of a second wave of 132 empty; 16 x 8 fill one wave. */
static void test_chunks_fill_waves(void) {
  CHECK(rows_of_chunks(16384, 2048, 151936, true, FLCE_SAVE_GRADS, 0) == 2048, "two waves");
  CHECK(rows_of_chunks(16384, 2048, 151936, true, FLCE_SAVE_STATS, 0) == 2048, "in the backward");
  CHECK(rows_of_chunks(16384, 2048, 151936, false, FLCE_SAVE_GRADS, 0) == 3328, "no dX");
  CHECK(rows_of_chunks(8192, 4096, 128256, true, FLCE_SAVE_GRADS, 0) == 4096, "full already");
  CHECK(rows_of_chunks(8192, 2304, 512000, true, FLCE_SAVE_GRADS, 0) == 896, "63 tiles, split");
  CHECK(rows_of_chunks(8192, 2304, 512000, true, FLCE_SAVE_GRADS, 256) == 1024, "whole clusters");
}

/* Without max_memory the engine uses smaller chunks, of whole tiles, if the launches of one more
 * chunk cost less than 1 % of the total. */
static void test_small_chunks(void) {
  const struct {
    int64_t tokens, hidden, vocab, least, most;
  } cases[] = {
      {8192, 4096, 128256, 2048, 2048},
      {65536, 4096, 128256, 2048, 2048}, /* whatever the number of tokens */
      {32768, 768, 128256, 2560, 8192},  /* with smaller H a chunk has less work */
      {8192, 4096, 32000, 8192, 8192},   /* with smaller V too */
      {4096, 16384, 128256, 2048, 2048}, /* with larger H dW takes more than the launches */
      {65536, 1024, 4096, 32768, 32768}, /* a chunk with dX and x takes no more than all logits */
      {32768, 4096, 8192, 8192, 12288},
      {8192, 768, 4096, 8192, 8192}, /* unless these are small */
      {512, 64, 1000, 512, 512},
  };
  const flce_facts facts = {.gemm_writes_f32 = true,
                            .fused_row_bytes = 100,
                            .fused_tile_rows = 256,
                            .multiprocessors = 132,
                            .gemm_workspace_bytes = 32 << 20};
  for (size_t k = 0; k < sizeof cases / sizeof *cases; k++) {
    flce_problem p = make_setting(FLCE_BF16, FLCE_SAVE_GRADS).problem;
    p.shape.tokens = p.shape.rows = cases[k].tokens;
    p.shape.hidden = cases[k].hidden;
    p.shape.vocab = p.shape.weight_rows = cases[k].vocab;
    p.wants.grad_bias = false;
    p.memory.bound = INT64_C(1) << 30;
    flce_plan bound, saving;
    CHECK_OK(flce_plan_make(&p, &facts, &bound));
    p.memory.bound_is_default = true;
    CHECK_OK(flce_plan_make(&p, &facts, &saving));
    CHECK(saving.chunk_rows >= cases[k].least && saving.chunk_rows <= cases[k].most,
          "case %zu: %lld rows", k, (long long)saving.chunk_rows);
    CHECK(saving.peak_bytes <= bound.peak_bytes, "case %zu: more than within 1 GiB", k);
    int64_t logits = p.shape.tokens * p.shape.vocab * 2,
            outputs = (p.shape.tokens + p.shape.vocab) * p.shape.hidden * 2;
    CHECK(p.shape.vocab > 8192 || logits < 128 << 20 ||
              saving.peak_bytes <= 1.02 * (logits + outputs),
          "case %zu: %lld bytes", k, (long long)saving.peak_bytes);
    CHECK(saving.chunks == 1 || saving.chunk_rows % facts.fused_tile_rows == 0, "case %zu", k);
    p.memory.bound = 512 * saving.z_pitch * 2;
    CHECK_OK(flce_plan_make(&p, &facts, &saving));
    CHECK(saving.chunk_rows <= 512, "a bound: %lld rows", (long long)saving.chunk_rows);
  }
}

int main(void) {
  test_plan();
  test_plan_of_gathered_rows();
  test_chunks_fill_waves();
  test_small_chunks();
  return test_verdict();
}
