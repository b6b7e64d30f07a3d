/* What the row passes share: a pass over rows, the sums of a row, access to its vectors. */
#ifndef FLCE_CPU_ROW_PASS_H
#define FLCE_CPU_ROW_PASS_H

#include "cpu/convert.h"
#include "cpu/cpu.h"

typedef struct row_pass {
  const flce_rows* rows;
  flce_dtype dtype, stat;
  const flce_row_kernels* kernels; /* of z itself: the plain path */
  /* The general path: of l and of the way between z, l and out. */
  const flce_row_kernels* l_kernels;
  const flce_block_kernels *z_blocks, *l_blocks;
  bool general;
  bool write_exp; /* of the statistics pass */
  double scale;   /* the rest: of the gradient pass */
  bool hide_target, z_is_exp;
} row_pass;

/* A row's sums, with c the largest l and y the class target (none: probabilities). */
typedef struct row_sums {
  double offset;                   /* c */
  double rest;                     /* sum of exp(l_j - c) without j = y */
  double l_y, slope_y;             /* of a class target */
  double weighted_gap, weight_sum; /* sums of w_j q_j (c - l_j) and of w_j q_j; q = (1-s) t + s/V,
                       for a class target s/V alone */
  /* Where the entropy is wanted: rest without the largest, whose term is 1, and the sum of
   * exp(l_j - c) (l_j - c) without j = y. */
  double tail, entropy_sum;
  int64_t largest; /* the lowest column of c; where entropy or predictions are wanted */
} row_sums;

static inline const void* row_z(const row_pass* pass, int64_t r) {
  return flce_const_at(pass->rows->z, pass->dtype, r * pass->rows->z_pitch);
}

static inline void* row_out(const row_pass* pass, int64_t r) {
  return flce_at(pass->rows->out, pass->dtype, r * pass->rows->out_pitch);
}

/* Element j of an optional [V] stat dtype vector, advanced by j. */
static inline const void* row_from(const row_pass* pass, const void* vector, int64_t j) {
  return vector ? flce_const_at(vector, pass->stat, j) : NULL;
}

/* Element i of an optional stat dtype vector of ones. */
static inline double row_factor(const void* vector, flce_dtype stat, int64_t i) {
  return vector ? flce_load(vector, stat, i) : 1.0;
}

static inline double row_stat(const row_pass* pass, enum flce_stat_row which, int64_t i) {
  return flce_load(pass->rows->stats, pass->stat, which * pass->rows->stat_pitch + i);
}

static inline double row_coef(const row_pass* pass, enum flce_coef_row which, int64_t i) {
  return flce_load(pass->rows->coef, pass->stat, which * pass->rows->stat_pitch + i);
}

static inline int64_t row_span_end(int64_t begin, int64_t vocab) {
  return vocab - begin > FLCE_SPAN ? begin + FLCE_SPAN : vocab;
}

/* `writes`: the pass has an `out`. FLCE_UNSUPPORTED where it has another dtype than z, or another
 * leading dimension in place. */
flce_status flce_cpu_make_row_pass(const flce_rows* rows, bool writes, row_pass* pass);
/* The columns of row r of `out`. */
void flce_cpu_fill_row(const row_pass* pass, int64_t r, double value);
/* Zeros behind a row's columns, up to `columns`: GEMMs may read them. */
void flce_cpu_pad_row(const row_pass* pass, void* row, int64_t columns);

/* rows_general.c: rows whose l is not z + bias, or of which more is wanted than the plain path has.
 * Row r of z and out, its vectors at i, y its class target or -1 for probabilities. */
void flce_cpu_general_sums(const row_pass* pass, int64_t r, int64_t i, int64_t y, row_sums* sums);
void flce_cpu_general_gradient(const row_pass* pass, int64_t r, int64_t i, int64_t y);

#endif
