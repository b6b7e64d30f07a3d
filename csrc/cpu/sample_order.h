/* The memory format of the sampled entries ordered by class, which sample_order.c writes and
 * sampled_grads.c reads. */
#ifndef FLCE_CPU_SAMPLE_ORDER_H
#define FLCE_CPU_SAMPLE_ORDER_H

#include "cpu/convert.h"
#include "cpu/cpu.h"

#include <math.h>

/* An entry of the gradient of the logits. */
typedef struct sample_entry {
  int64_t token; /* its row of x */
  double factor; /* of that row in dW */
} sample_entry;

/* `order` begins with vocab + 1 positions: the entries of class j are [start[j], start[j + 1]). The
 * entries follow. */
static inline const int64_t* sample_starts(const void* order) {
  return order;
}
static inline sample_entry* sample_entries(const void* order, int64_t vocab) {
  return (sample_entry*)((int64_t*)order + vocab + 1);
}

/* What a pair of token i's list contributes to dz: factor_m of backend.h. */
static inline double sample_factor(const flce_rows* rows, int64_t i, const int32_t* pair,
                                   double eps) {
  const float *stats = (const float*)rows->stats + i, *coef = (const float*)rows->coef + i;
  float inv_sum = stats[FLCE_STAT_INV_SUM * rows->stat_pitch], least = (float)eps / inv_sum;
  float e = flce_float_of((uint32_t)pair[1]);
  double row = (double)coef[FLCE_COEF_EXP * rows->stat_pitch];
  if (rows->wants_entropy)
    row -= (double)coef[FLCE_COEF_ENTROPY * rows->stat_pitch] *
           ((double)stats[FLCE_STAT_ENTROPY * rows->stat_pitch] + log((double)e * (double)inv_sum));
  return row * (double)(fabsf(e) < least ? copysignf(least, e) : e);
}

/* The target in pair 0 of the list of row i of the vectors (problem.h). */
static inline int32_t sample_target(const flce_rows* rows, int64_t i) {
  switch (flce_row_kind_at(rows, i)) {
    case FLCE_ROW_VALID:
      return (int32_t)rows->target[i];
    case FLCE_ROW_OUT_OF_RANGE:
      return 0;
    case FLCE_ROW_ABSENT:
    case FLCE_ROW_IGNORED:
      break;
  }
  return -1;
}

/* FLCE_INVALID_ARGUMENT if a list is not one of these rows: it has another target, pairs in a row
 * that is not valid, a class that does not exist, or more pairs than it has room for. */
flce_status flce_cpu_check_lists(const int32_t* lists, const flce_rows* rows, double eps);

#endif
