/* Shared by the files of the CPU backend: access to the chosen kernels, the parallel loop, and the
 * functions of the backend table. */
#ifndef FLCE_CPU_CPU_H
#define FLCE_CPU_CPU_H

#include "cpu/simd/row_kernels.h"

/* The minimum number of elements for a thread: with fewer, starting the thread costs more than it
 * saves. */
enum { FLCE_GRAIN = 32768 };

/* Elements of the accumulator block on a thread's stack, through which values pass when they are
 * converted from one dtype to another. */
enum { FLCE_BLOCK = 1024 };
typedef union flce_sums {
  double wide[FLCE_BLOCK];
  float narrow[FLCE_BLOCK];
} flce_sums;

static inline int64_t flce_block_end(int64_t begin, int64_t count) {
  return count - begin > FLCE_BLOCK ? begin + FLCE_BLOCK : count;
}
static inline int64_t flce_blocks(int64_t count) {
  return (count + FLCE_BLOCK - 1) / FLCE_BLOCK;
}

/* The index of row r of a pass in the rows' vectors; -1 if row r is unused. */
static inline int64_t flce_row_index(const flce_rows* rows, int64_t r) {
  return rows->index ? rows->index[r] : r;
}

typedef enum flce_row_kind {
  FLCE_ROW_ABSENT,
  FLCE_ROW_IGNORED,
  FLCE_ROW_OUT_OF_RANGE,
  FLCE_ROW_VALID
} flce_row_kind;

static inline flce_row_kind flce_row_kind_at(const flce_rows* rows, int64_t i) {
  if (i < 0) return FLCE_ROW_ABSENT;
  if (!rows->target) return FLCE_ROW_VALID;
  int64_t y = rows->target[i];
  if (y == rows->options.ignore_index) return FLCE_ROW_IGNORED;
  int64_t classes = rows->earlier_classes + rows->vocab + rows->later_classes;
  return y >= 0 && y < classes ? FLCE_ROW_VALID : FLCE_ROW_OUT_OF_RANGE;
}

/* The column of a row's target; -1 for probabilities, and where it is not among the columns. */
static inline int64_t flce_target_column(const flce_rows* rows, int64_t i) {
  if (!rows->target) return -1;
  int64_t column = rows->target[i] - rows->earlier_classes;
  return column >= 0 && column < rows->vocab ? column : -1;
}

/* backend.c. They return FLCE_INVALID_ARGUMENT if FLCE_CPU_VARIANT names a variant that is unknown
 * or not supported here; the second FLCE_UNSUPPORTED, with the dtypes in the message, if it has no
 * such kernel. */
flce_status flce_cpu_row_kernels(flce_dtype dtype, const flce_row_kernels** kernels);
flce_status flce_cpu_block_kernels(flce_dtype stat, flce_dtype dtype,
                                   const flce_block_kernels** kernels);
/* Runs fn over [0, count) in ranges of at least FLCE_GRAIN elements; an index has `width` elements.
 * The result of an index must not depend on the range that it falls in. */
void flce_cpu_parallel(const void* self, int64_t count, int64_t width, flce_range_fn fn,
                       void* context);

/* The functions of the backend table (backend.h). */
#define FLCE_DECLARE(name) __typeof__(*((flce_backend*)0)->name) flce_cpu_##name;
FLCE_BACKEND_FUNCTIONS(FLCE_DECLARE)
#undef FLCE_DECLARE

/* rows_forward.c */
void flce_cpu_blank_stats(const flce_rows* rows, flce_dtype stat, int64_t i, double value);
/* For facts: target_order.c, sample_order.c. */
int64_t flce_cpu_order_bytes(int64_t tokens);
int64_t flce_cpu_sample_bytes(int64_t rows, int64_t vocab, double eps);

#endif
