/* What the files of the plan share: sizes, and the loops whose chunks chunks.c chooses. */
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

enum { TILE_ROWS = 128 }; /* token rows of a GEMM tile: chunks are whole tiles where they can be */

/* One of the call's two loops over chunks. */
typedef struct chunk_loop {
  int64_t row_bytes; /* of a chunk's row in the budget */
  int64_t max_rows;  /* of a chunk, whatever the budget */
  int64_t tile_rows; /* that the loop's kernels take at a time */
  bool makes_logits, makes_dx, makes_dw;
  bool overlaps_dw; /* dW's GEMM reads and writes dW during its mainloop */
} chunk_loop;

/* Rows of a chunk and their number for the budget of `problem`, whose hidden size is the plan's.
 * FLCE_INVALID_ARGUMENT where the budget holds no row. */
flce_status choose_chunk_rows(const flce_problem* problem, const flce_facts* facts,
                              const chunk_loop* loop, flce_dtype dtype, int64_t* chunk_rows,
                              int64_t* chunks);

#endif
