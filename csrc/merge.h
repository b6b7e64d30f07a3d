/* The statistics of a row of a sharded vocabulary from those of the ranks (enum flce_shard_stat),
 * for C and CUDA. In double precision, and in the order of the ranks: all ranks get the same bits.
 */
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

static FLCE_HOST_DEVICE double flce_shard_stat_at(const flce_merge_args* call, flce_dtype stat,
                                                  int64_t rank, enum flce_shard_stat item,
                                                  int64_t row) {
  return flce_stat_at(call->shard_stats, stat,
                      (rank * call->count + item) * call->rows->rows + row);
}

static FLCE_HOST_DEVICE bool flce_holds_class(const flce_shard* shard, int64_t class_) {
  return class_ >= shard->first && class_ - shard->first < shard->count;
}

/* A column of this rank for the target y, which may be out of range: its own column, a substitute
 * (backend_args.h), FLCE_SHARD_IGNORED or FLCE_SHARD_OUT_OF_RANGE. */
static FLCE_HOST_DEVICE int64_t flce_shard_column(const flce_shard_targets_args* call, int64_t y) {
  int64_t count = call->shard.count;
  if (y == call->ignore_index) return FLCE_SHARD_IGNORED;
  if (y < 0 || y >= call->classes) return FLCE_SHARD_OUT_OF_RANGE;
  if (flce_holds_class(&call->shard, y)) return y - call->shard.first;
  return count > 0 ? y % count : 0;
}

/* A row in the whole vocabulary. L_r: the LSE of rank r; L: the largest. lse - L_r is computed as
 * (L - L_r) + (lse - L): both terms are >= 0, so no digits cancel. */
typedef struct flce_merged {
  double largest, log_ratio; /* L and lse - L */
  double nll;                /* NaN if no rank has the target's class */
  double entropy;
  double smoothing_sum; /* sum_j w_j (lse - l_j) */
  double tail;          /* TAIL_LSE; 0 if it was not exchanged */
  int64_t prediction;   /* 0 if no l is greater than -inf */
} flce_merged;

/* lse minus the LSE of a rank, `shard_lse`. */
static FLCE_HOST_DEVICE double flce_lse_minus_shard(const flce_merged* merged, double shard_lse) {
  return (merged->largest - shard_lse) + merged->log_ratio;
}

/* nll in the whole vocabulary from `nll` among the classes of a rank. */
static FLCE_HOST_DEVICE double flce_merged_nll(const flce_merged* merged, double shard_lse,
                                               double nll) {
  double difference = flce_lse_minus_shard(merged, shard_lse);
  /* nll is NaN where shard_lse is -inf */
  return shard_lse == -INFINITY ? difference : nll + difference;
}

static FLCE_HOST_DEVICE double flce_merged_tail(const flce_merge_args* call, flce_dtype stat,
                                                int64_t row) {
  double largest = -INFINITY, sum = 0.0;
  for (int64_t r = 0; r < call->ranks; r++) {
    double lse = flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_TAIL, row);
    if (!(lse <= largest)) largest = lse; /* also if it is NaN */
  }
  for (int64_t r = 0; r < call->ranks && largest != -INFINITY; r++)
    sum += exp(flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_TAIL, row) - largest);
  return largest == -INFINITY ? largest : largest + log(sum);
}

static FLCE_HOST_DEVICE void flce_merge_others(const flce_merge_args* call, flce_dtype stat,
                                               int64_t row, flce_merged* merged) {
  double best = -INFINITY;
  if (call->count > FLCE_SHARD_STAT_TAIL) merged->tail = flce_merged_tail(call, stat, row);
  for (int64_t r = 0; r < call->ranks; r++) {
    double lse = flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_LSE, row);
    double difference = flce_lse_minus_shard(merged, lse), fraction = exp(-difference);
    double weight = flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_WEIGHT, row);
    double top = flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_TOP, row);
    int64_t column = (int64_t)flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_COLUMN, row);
    if (fraction != 0.0)
      merged->entropy +=
          fraction * (flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_ENTROPY, row) + difference);
    /* Weights that sum to 0 may still have a sum of w_j l_j, but not where all l are -inf. */
    if (lse != -INFINITY)
      merged->smoothing_sum +=
          flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_SMOOTHING, row) + weight * difference;
    else if (weight != 0.0)
      merged->smoothing_sum += weight * (double)INFINITY;
    if (top > best || (top == best && top > -INFINITY && column < merged->prediction)) {
      best = top;
      merged->prediction = column;
    }
  }
}

/* `row`: of call->shard_stats. */
static FLCE_HOST_DEVICE flce_merged flce_merge_row(const flce_merge_args* call, flce_dtype stat,
                                                   int64_t row) {
  flce_merged merged;
  double rest = 0.0;
  int64_t top = 0;
  merged.largest = -INFINITY;
  merged.nll = NAN;
  merged.entropy = merged.smoothing_sum = merged.tail = 0.0;
  merged.prediction = 0;
  for (int64_t r = 0; r < call->ranks; r++) {
    double lse = flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_LSE, row);
    if (!(lse > merged.largest || isnan(lse))) continue;
    merged.largest = lse;
    top = r;
  }
  for (int64_t r = 0; r < call->ranks && merged.largest != -INFINITY; r++)
    if (r != top)
      rest += exp(flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_LSE, row) - merged.largest);
  merged.log_ratio = log1p(rest);
  for (int64_t r = 0; r < call->ranks; r++) {
    double nll = flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_NLL, row);
    if (nll < 0.0) continue;
    merged.nll =
        flce_merged_nll(&merged, flce_shard_stat_at(call, stat, r, FLCE_SHARD_STAT_LSE, row), nll);
  }
  if (call->count > FLCE_SHARD_STAT_ENTROPY) flce_merge_others(call, stat, row, &merged);
  return merged;
}

/* The loss of a valid row at position `at`, as in flce_rows.loss. */
static FLCE_HOST_DEVICE double flce_merged_loss(const flce_rows* rows, flce_dtype stat, int64_t at,
                                                const flce_merged* merged) {
  const flce_loss* options = &rows->options;
  double lse = merged->largest + merged->log_ratio;
  double factor =
      (1.0 - options->label_smoothing) * flce_factor_at(rows->class_weight, stat, rows->target[at]);
  /* A class of weight 0 adds 0, even where its l is -inf; a NaN stays. */
  double loss = factor == 0.0 && merged->nll == (double)INFINITY ? 0.0 : factor * merged->nll;
  if (options->label_smoothing > 0.0)
    loss += options->label_smoothing / (double)rows->vocab * merged->smoothing_sum;
  if (options->z_loss != 0.0)
    loss += options->z_loss * flce_stat_at(rows->scalars, stat, FLCE_SCALAR_Z_FACTOR) * lse * lse;
  return flce_factor_at(rows->token_weight, stat, at) * loss;
}

#endif
