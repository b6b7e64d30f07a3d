/* The CPU kernels: one span of one row, or one block of a vector, by dtype.
 *
 * scalar.c is the definition; avx2.c and avx512.c give the same tables with
 * vector code. Everything above works through these pointers and knows neither the dtype nor the
 * instruction set. */
#ifndef FLCE_CPU_SIMD_ROW_KERNELS_H
#define FLCE_CPU_SIMD_ROW_KERNELS_H

#include "backend.h"

/* The vector files select their instructions by #pragma GCC target, which clang ignores. */
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FLCE_CPU_X86 1
#else
#define FLCE_CPU_X86 0
#endif

/* Spans of a row. z, out: [count] dtype, out may be z. bias, weight: [count] stat dtype or NULL
 * (zeros; ones). The logit is z + bias in the stat dtype; it is at most `offset`, so that exp gets
 * no positive argument. Results below the smallest normal number of the stat dtype are written as
 * 0: denormals make a GEMM many times slower. */
typedef struct flce_row_kernels {
  /* Largest logit, -inf for none. NaN is passed over: it shows in the sums. */
  double (*max)(const void* z, const void* bias, int64_t count);
  /* out = exp(logit - offset), not written where out is NULL; returns the sum before rounding. */
  double (*exp_sum)(void* out, const void* z, const void* bias, double offset, int64_t count);
  /* sum_j weight_j (offset - logit_j) */
  double (*weighted_gap)(const void* z, const void* bias, const void* weight, double offset,
                         int64_t count);
  /* out = factor exp(logit - offset) - smooth weight */
  void (*grad_exp)(void* out, const void* z, const void* bias, double offset, double factor,
                   const void* weight, double smooth, int64_t count);
  /* out = factor z - smooth weight, for z that is exp already */
  void (*grad_linear)(void* out, const void* z, double factor, const void* weight, double smooth,
                      int64_t count);
} flce_row_kernels;

/* Blocks of a vector; acc: [count] stat dtype, x and out: [count] dtype. An element's result does
 * not depend on its place in the block. */
typedef struct flce_block_kernels {
  void (*scaled)(void* acc, double a, const void* x, int64_t count); /* acc = a x */
  void (*axpy)(void* acc, double a, const void* x, int64_t count);   /* acc += a x */
  void (*narrow)(void* out, const void* acc, int64_t count);         /* out = acc, nearest even */
} flce_block_kernels;

/* The callers hand over at most this many elements of a sum at a time and add the parts in double:
 * inside a kernel float lanes add up, at most FLCE_SPAN / 32 terms each. The span stays in L1. */
enum { FLCE_SPAN = 2048 };

/* The row kernels of a dtype (stat dtype: its own); the block kernels of an accumulator and an
 * element dtype. NULL: there are none. */
const flce_row_kernels* flce_scalar_row_kernels(flce_dtype dtype);
const flce_block_kernels* flce_scalar_block_kernels(flce_dtype stat, flce_dtype dtype);
const flce_row_kernels* flce_avx2_row_kernels(flce_dtype dtype);
const flce_block_kernels* flce_avx2_block_kernels(flce_dtype stat, flce_dtype dtype);
const flce_row_kernels* flce_avx512_row_kernels(flce_dtype dtype);
const flce_block_kernels* flce_avx512_block_kernels(flce_dtype stat, flce_dtype dtype);

#endif
