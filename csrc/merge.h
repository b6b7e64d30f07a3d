/* The statistics of a row of a divided vocabulary from those of the ranks (enum flce_part), for C
 * and CUDA. In double precision, and in the order of the ranks: all ranks get the same bits. */
#ifndef FLCE_MERGE_H
#define FLCE_MERGE_H

#include <math.h>

#include "backend.h"
#include "random.h"

static FLCE_HOST_DEVICE double flce_stat_at(const void* values, flce_dtype stat, int64_t i) {
  return stat == FLCE_F64 ? ((const double*)values)[i] : (double)((const float*)values)[i];
}

/* An element of an optional vector; 1 without one. */
static FLCE_HOST_DEVICE double flce_factor_at(const void* values, flce_dtype stat, int64_t i) {
  return values ? flce_stat_at(values, stat, i) : 1.0;
}

static FLCE_HOST_DEVICE double flce_part_at(const flce_merge_args* call, flce_dtype stat,
                                            int64_t rank, enum flce_part part, int64_t row) {
  return flce_stat_at(call->parts, stat, (rank * call->count + part) * call->rows->rows + row);
}

static FLCE_HOST_DEVICE bool flce_holds_class(const flce_shard* shard, int64_t class_) {
  return class_ >= shard->first && class_ - shard->first < shard->count;
}

/* A row in the whole vocabulary. With L_r the LSE of rank r, lse - L_r is never negative and is
 * the sum of (L - L_r), L being the largest, and `above` = lse - L: neither cancels. */
typedef struct flce_merged {
  double largest, above; /* lse is their sum */
  double nll;            /* NaN if no rank has the target's class */
  double entropy, gap;   /* gap: sum_j w_j (lse - l_j) */
  int64_t prediction;    /* 0 if no l is greater than -inf */
} flce_merged;

/* lse minus the LSE of a rank. */
static FLCE_HOST_DEVICE double flce_above_rank(const flce_merged* merged, double lse) {
  return (merged->largest - lse) + merged->above;
}

/* nll in the whole vocabulary from `nll` among the classes of a rank with this LSE. */
static FLCE_HOST_DEVICE double flce_merged_nll(const flce_merged* merged, double lse, double nll) {
  double above = flce_above_rank(merged, lse);
  return lse == -INFINITY ? above : nll + above; /* nll is NaN where lse is -inf */
}

static FLCE_HOST_DEVICE void flce_merge_others(const flce_merge_args* call, flce_dtype stat,
                                               int64_t row, flce_merged* merged) {
  double best = -INFINITY;
  for (int64_t r = 0; r < call->ranks; r++) {
    double lse = flce_part_at(call, stat, r, FLCE_PART_LSE, row);
    double above = flce_above_rank(merged, lse), share = exp(-above);
    double weight = flce_part_at(call, stat, r, FLCE_PART_WEIGHT, row);
    double top = flce_part_at(call, stat, r, FLCE_PART_TOP, row);
    int64_t column = (int64_t)flce_part_at(call, stat, r, FLCE_PART_COLUMN, row);
    if (share != 0.0)
      merged->entropy += share * (flce_part_at(call, stat, r, FLCE_PART_ENTROPY, row) + above);
    /* Weights that sum to 0 may still have a gap; l of -inf with such weights has none. */
    if (lse != -INFINITY)
      merged->gap += flce_part_at(call, stat, r, FLCE_PART_GAP, row) + weight * above;
    else if (weight != 0.0)
      merged->gap += weight * (double)INFINITY;
    if (top > best || (top == best && top > -INFINITY && column < merged->prediction)) {
      best = top;
      merged->prediction = column;
    }
  }
}

/* `row`: of the parts. */
static FLCE_HOST_DEVICE flce_merged flce_merge_row(const flce_merge_args* call, flce_dtype stat,
                                                   int64_t row) {
  flce_merged merged;
  double rest = 0.0;
  int64_t top = 0;
  merged.largest = -INFINITY;
  merged.nll = NAN;
  merged.entropy = merged.gap = 0.0;
  merged.prediction = 0;
  for (int64_t r = 0; r < call->ranks; r++) {
    double lse = flce_part_at(call, stat, r, FLCE_PART_LSE, row);
    if (!(lse > merged.largest || isnan(lse))) continue;
    merged.largest = lse;
    top = r;
  }
  for (int64_t r = 0; r < call->ranks; r++)
    if (r != top) rest += exp(flce_part_at(call, stat, r, FLCE_PART_LSE, row) - merged.largest);
  merged.above = log1p(rest);
  for (int64_t r = 0; r < call->ranks; r++) {
    double nll = flce_part_at(call, stat, r, FLCE_PART_NLL, row);
    if (nll < 0.0) continue;
    merged.nll = flce_merged_nll(&merged, flce_part_at(call, stat, r, FLCE_PART_LSE, row), nll);
  }
  if (call->count > FLCE_PART_ENTROPY) flce_merge_others(call, stat, row, &merged);
  return merged;
}

/* The loss of a valid row at position `at`, as in flce_rows.loss. */
static FLCE_HOST_DEVICE double flce_merged_loss(const flce_rows* rows, flce_dtype stat, int64_t at,
                                                const flce_merged* merged) {
  const flce_loss* options = &rows->options;
  double lse = merged->largest + merged->above;
  double factor =
      (1.0 - options->label_smoothing) * flce_factor_at(rows->class_weight, stat, rows->target[at]);
  /* A class of weight 0 adds 0, even where its l is -inf; a NaN stays. */
  double loss = factor == 0.0 && merged->nll == (double)INFINITY ? 0.0 : factor * merged->nll;
  if (options->label_smoothing > 0.0)
    loss += options->label_smoothing / (double)rows->vocab * merged->gap;
  if (options->z_loss != 0.0)
    loss += options->z_loss * flce_stat_at(rows->scalars, stat, FLCE_SCALAR_Z_SHARE) * lse * lse;
  return flce_factor_at(rows->token_weight, stat, at) * loss;
}

#endif
