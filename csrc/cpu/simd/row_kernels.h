/* The tables of CPU kernels, by dtype. A kernel processes one span of one row, or one block of a
 * vector.
 *
 * scalar.c is the reference; avx2.c and avx512.c fill the same tables with vector code. The rest of
 * the CPU backend calls the kernels through these pointers and depends neither on the dtype nor on
 * the instruction set. */
#ifndef FLCE_CPU_SIMD_ROW_KERNELS_H
#define FLCE_CPU_SIMD_ROW_KERNELS_H

#include "backend.h"

/* The vector files select their instruction set by #pragma GCC target, which clang ignores. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FLCE_CPU_X86 1
#else
#define FLCE_CPU_X86 0
#endif

/* Kernels on a span of a row. z, out: [count] of `dtype`; out may alias z. bias, weight: [count] of
 * the stat dtype, or NULL for zeros and ones respectively. The logit is z + bias in the stat dtype.
 * It is at most `offset` but for roundings: in exp a logit above it, which was computed again by a
 * GEMM that sums in another order, counts as `offset`. Results below the smallest normal number of
 * the stat dtype are written as 0, because subnormals make a GEMM many times slower. */
typedef struct flce_row_kernels {
  /* The largest logit; -inf if count is 0. NaN is skipped: it becomes visible in the sums. */
  double (*max)(const void* z, const void* bias, int64_t count);
  /* out = exp(logit - offset), unless out is NULL. Returns the sum, taken before rounding to
   * `dtype`. */
  double (*exp_sum)(void* out, const void* z, const void* bias, double offset, int64_t count);
  /* sum_j weight_j (offset - logit_j) */
  double (*weighted_gap)(const void* z, const void* bias, const void* weight, double offset,
                         int64_t count);
  /* out = factor exp(logit - offset) - smooth weight */
  void (*grad_exp)(void* out, const void* z, const void* bias, double offset, double factor,
                   const void* weight, double smooth, int64_t count);
  /* out = factor z - smooth weight, where z holds exp(logit - offset) already */
  void (*grad_linear)(void* out, const void* z, double factor, const void* weight, double smooth,
                      int64_t count);
} flce_row_kernels;

/* Kernels on a block of a vector. acc: [count] of the stat dtype; x, out: [count] of `dtype`. The
 * result of an element does not depend on its position in the block. */
typedef struct flce_block_kernels {
  void (*scaled)(void* acc, double a, const void* x, int64_t count); /* acc = a x */
  void (*axpy)(void* acc, double a, const void* x, int64_t count);   /* acc += a x */
  void (*narrow)(void* out, const void* acc,
                 int64_t count); /* out = acc, rounded to nearest even */
} flce_block_kernels;

/* Columns of a span. The callers pass at most this many elements of a sum at a time and add the
 * partial sums in double; inside a kernel float32 lanes accumulate at most FLCE_SPAN / 32 terms
 * each. The span stays in L1. */
enum { FLCE_SPAN = 2048 };

/* The row kernels of a dtype, with its own stat dtype, and the block kernels of an accumulator
 * dtype and an element dtype, NULL for float64 elements in float32. */
const flce_row_kernels* flce_scalar_row_kernels(flce_dtype dtype);
const flce_block_kernels* flce_scalar_block_kernels(flce_dtype stat, flce_dtype dtype);
const flce_row_kernels* flce_avx2_row_kernels(flce_dtype dtype);
const flce_block_kernels* flce_avx2_block_kernels(flce_dtype stat, flce_dtype dtype);
const flce_row_kernels* flce_avx512_row_kernels(flce_dtype dtype);
const flce_block_kernels* flce_avx512_block_kernels(flce_dtype stat, flce_dtype dtype);

#endif
