/* The choice of the rows of a chunk, and the integer helpers of the plan. */
#ifndef FLCE_CHUNKS_H
#define FLCE_CHUNKS_H

#include "flce.h"

static inline int64_t max64(int64_t a, int64_t b) {
  return a > b ? a : b;
}

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
/* The same of other GEMMs, and on CPUs. */
static const double kSlowAddsPerByte = 8.0;

/* Rows of a GEMM's tile. A chunk of more rows is a multiple of it. */
enum { TILE_ROWS = 128 };

/* The effort of a GEMM with an m x n result on a CPU, or on a GPU of operands that are not 16-bit:
 * its multiply-adds, and its operands and its result through the memory; a sum is read, too. */
static inline double plain_gemm_effort(int64_t m, int64_t n, int64_t k, int64_t size, bool sums) {
  double rows = (double)m, columns = (double)n, depth = (double)k;
  double moved = rows * depth + depth * columns + (sums ? 2.0 : 1.0) * rows * columns;
  return rows * columns * depth + moved * (double)size * kSlowAddsPerByte;
}

/* An output tile shape of a GEMM. */
typedef struct gemm_tile {
  int64_t rows, columns;
  double effort; /* time of an element of the tile, relative to the largest tiles */
} gemm_tile;

/* Those of cuBLASLt's kernels for 16-bit operands. */
enum { FLCE_GEMM_TILES = 6 };
extern const gemm_tile flce_gemm_tiles[FLCE_GEMM_TILES];

/* The loop over chunks of the forward or of the backward. */
typedef struct chunk_loop {
  flce_dtype dtype;       /* of the GEMMs' operands */
  int64_t hidden;         /* the plan's */
  flce_dtype accum_dtype; /* in which dW is summed over chunks */
  int64_t max_memory;     /* upper bound of the bytes of a chunk's rows */
  /* With the default memory.bound: smaller chunks than fit, where they cost little time. */
  bool prefers_small_chunks;
  int64_t row_bytes;    /* bytes that a row of a chunk takes of max_memory */
  int64_t logits_bytes; /* of a row of logits alone, of which max_memory has to hold one */
  int64_t max_rows;     /* upper bound of a chunk's rows, whatever max_memory is; at least 1 */
  int64_t tile_rows;    /* rows that the loop's kernels compute at a time */
  bool makes_logits,    /* the loop runs the logits GEMM */
      makes_dx,         /* the loop runs dX's GEMM */
      makes_dw;         /* the loop runs dW's GEMM */
  bool overlaps_dw;     /* dW's GEMM reads and writes dW during its mainloop */
} chunk_loop;

/* Whether the device's GEMMs of this dtype are those of the model of time: 16-bit on a GPU. */
bool flce_is_modelled(const flce_facts* facts, flce_dtype dtype);

/* The modelled time of all chunks of a loop, in multiply-adds. */
double flce_chunks_effort(const flce_problem* problem, const flce_facts* facts,
                          const chunk_loop* loop, int64_t chunk_rows);

/* Chooses the rows of a chunk and the number of chunks. FLCE_INVALID_ARGUMENT if the loop's
 * max_memory is less than one row of logits. */
flce_status choose_chunk_rows(const flce_problem* problem, const flce_facts* facts,
                              const chunk_loop* loop, int64_t* chunk_rows, int64_t* chunks);

#endif
