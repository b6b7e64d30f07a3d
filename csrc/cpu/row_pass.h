/* Shared by the row passes: the state of a pass, the sums of a row, and access to the vectors that
 * belong to rows and columns. */
#ifndef FLCE_CPU_ROW_PASS_H
#define FLCE_CPU_ROW_PASS_H

#include "cpu/convert.h"
#include "cpu/cpu.h"
#include "loss.h"

#include <math.h>

/* What a pass over rows needs: the rows, the kernels, and what the pass writes. */
typedef struct row_pass {
  const flce_rows* rows;           /* the call's view of the rows: logits, factors, outputs */
  flce_dtype dtype, stat;          /* of z; of statistics and row factors */
  const flce_row_kernels* kernels; /* plain path: kernels of z's dtype */
  /* General path: kernels that run on l (stat dtype), and those that convert between z, l and
   * out. */
  const flce_row_kernels* l_kernels;
  const flce_block_kernels *z_blocks, *l_blocks;
  bool general;   /* whether rows take the general path (rows_general.c) */
  bool write_exp; /* forward: whether exp is written to `out` */
  double scale;   /* gradient pass: the factor of exp, which z has already if z_is_exp */
  bool hide_target, z_is_exp; /* write 0 in the target's column; z holds exp(l - c) already */
} row_pass;

/* The sums of one row. c is the largest l; y is the class target, absent for probabilities. */
typedef struct row_sums {
  double offset;                   /* c, -inf before the first logit */
  double rest;                     /* sum of exp(l_j - c) over j != y */
  double l_y, slope_y;             /* of a class target: its l and dl/dz up to a factor */
  double weighted_gap, weight_sum; /* sums of w_j q_j (c - l_j) and of w_j q_j; q = (1-s) t + s/V,
                       for a class target s/V alone */
  /* Only if the entropy is wanted: `rest` without the largest column, whose term is 1, and the sum
   * of exp(l_j - c) (l_j - c) over j != y. */
  double tail, entropy_sum;
  int64_t largest; /* the first column with l = c; only if entropy or predictions are wanted */
} row_sums;

/* Where all logits are -inf the offset is 0, relative to which exp(-inf) is 0: another rank of a
 * sharded vocabulary may have finite logits in this row. */
static inline void flce_cpu_bound_offset(row_sums* sums) {
  if (sums->offset == -INFINITY) sums->offset = 0.0;
}

static inline const void* row_z(const row_pass* pass, int64_t r) {
  return flce_const_at(pass->rows->z, pass->dtype, r * pass->rows->z_pitch);
}

static inline void* row_out(const row_pass* pass, int64_t r) {
  return flce_at(pass->rows->out, pass->dtype, r * pass->rows->out_pitch);
}

/* Pointer to element j of an optional [V] vector of the stat dtype; NULL if there is none. */
static inline const void* row_from(const row_pass* pass, const void* vector, int64_t j) {
  return vector ? flce_const_at(vector, pass->stat, j) : NULL;
}

/* Element i of an optional vector of the stat dtype; 1 if there is no vector. */
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

/* `writes`: whether the pass writes `out`. FLCE_UNSUPPORTED if `out` has another dtype than z, or
 * is z with another leading dimension. */
flce_status flce_cpu_make_row_pass(const flce_rows* rows, bool writes, row_pass* pass);
/* Fills the columns of row r of `out` with `value`. */
void flce_cpu_fill_row(const row_pass* pass, int64_t r, double value);
/* Writes zeros after the row's last column, up to column `columns`, because GEMMs may read them. */
void flce_cpu_pad_row(const row_pass* pass, void* row, int64_t columns);

/* `stat` is a constant in every call, so inlining removes the switches on it. */
#define INLINE static inline __attribute__((always_inline))
#define BY_STAT(stat, function, ...) \
  ((stat) == FLCE_F64 ? function(FLCE_F64, __VA_ARGS__) : function(FLCE_F32, __VA_ARGS__))

/* FLCE_SPAN values of the stat dtype. */
typedef union span {
  double wide[FLCE_SPAN];
  float narrow[FLCE_SPAN];
} span;

/* One span: columns [begin, begin + count) of a row. */
typedef struct row_part {
  int64_t begin, count;
  span l, slope; /* final logits; the curve's slope, unless it is FLCE_LINE */
  span e;        /* exp(l - c), overwritten by the gradient */
  span t;        /* target probabilities, in the stat dtype */
} row_part;

/* rows_general.c. The map from z to l of row i, and l and slope of its columns [begin, end). */
flce_logit_map flce_cpu_map_of_row(const row_pass* pass, int64_t i);
void flce_cpu_transform(const row_pass* pass, const flce_logit_map* map, const void* z,
                        int64_t begin, int64_t end, row_part* part);

/* rows_general.c: the general path. r: the row in z and out; i: the row's index in its vectors; y:
 * its class target, -1 if the target is probabilities. */
void flce_cpu_general_sums(const row_pass* pass, int64_t r, int64_t i, int64_t y, row_sums* sums);
void flce_cpu_general_gradient(const row_pass* pass, int64_t r, int64_t i, int64_t y);

#endif
