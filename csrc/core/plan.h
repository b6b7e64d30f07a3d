/* For the files of csrc/core: integer helpers, the description of a chunk loop, and what the plan
 * and shards.c have to agree on. */
#ifndef FLCE_PLAN_H
#define FLCE_PLAN_H

#include "backend.h"

static inline int64_t min64(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
static inline int64_t round_up(int64_t a, int64_t b) {
  return b > 1 ? ceil_div(a, b) * b : a;
}

/* Multiply-adds of 16-bit operands in the time in which the memory moves one byte: 80 on an H200,
 * within a third of that on other GPUs of compute capability 8.0 and later. */
static const double kAddsPerByte = 80.0;

/* Of a GEMM's tiles: chunks are whole tiles if they are larger. */
enum { TILE_ROWS = 128 };

/* check.c: FLCE_INVALID_ARGUMENT if a size, dtype or option is out of its range. */
flce_status flce_check_problem(const flce_problem* problem);
flce_status flce_check_shard(const flce_problem* problem); /* called by flce_check_problem too */

/* ---- a sharded vocabulary ---- */

/* Whether the ranks' terms of dX are exchanged and summed. */
static inline bool sums_input(const flce_problem* problem) {
  return flce_is_sharded(problem) && problem->want_grad_input && !problem->partial_grad_input &&
         problem->tokens > 0;
}
/* Elements of the rows of dX that one rank sums. */
static inline int64_t summed_elements(const flce_problem* problem) {
  return ceil_div(problem->tokens, problem->ranks) * problem->hidden;
}
/* Whether a backward reads x: for dW and db, or to compute the logits again. */
static inline bool backward_reads_input(const flce_problem* problem) {
  return problem->want_grad_weight || problem->save == FLCE_SAVE_STATS;
}

/* The loop over chunks of the forward or of the backward. */
typedef struct chunk_loop {
  int64_t row_bytes; /* bytes that a row of a chunk takes of max_memory */
  int64_t max_rows;  /* upper bound of a chunk's rows, whatever max_memory is */
  int64_t tile_rows; /* rows that the loop's kernels compute at a time */
  bool makes_logits, /* the loop runs the logits GEMM */
      makes_dx,      /* the loop runs dX's GEMM */
      makes_dw;      /* the loop runs dW's GEMM */
  bool overlaps_dw;  /* dW's GEMM reads and writes dW during its mainloop */
} chunk_loop;

/* Chooses the rows of a chunk and the number of chunks. `problem` has the plan's hidden size and
 * accum_dtype. FLCE_INVALID_ARGUMENT if max_memory is less than one row. */
flce_status choose_chunk_rows(const flce_problem* problem, const flce_facts* facts,
                              const chunk_loop* loop, flce_dtype dtype, int64_t* chunk_rows,
                              int64_t* chunks);

#endif
