/* Which rows of flce_rows are valid, ignored, out of range or absent, where a row's entries are in
 * the per-row vectors, and what is written for rows that are not valid. */
#ifndef FLCE_CUDA_COMMON_ROW_STATUS_CUH
#define FLCE_CUDA_COMMON_ROW_STATUS_CUH

#include "cuda/common/types.cuh"

/* kRowIgnored: the target is ignore_index; results are 0. kRowOutOfRange: the target is no class;
 * results are NaN. kRowAbsent: the index is -1; there is no row, and only zeros in `out` are
 * written. */
enum RowKind { kRowValid, kRowIgnored, kRowOutOfRange, kRowAbsent };

/* A computed row: its position in the per-row vectors (target, stats, loss, ...) and its kind. */
struct RowRef {
  int64_t at; /* -1: absent */
  RowKind kind;
};

/* Position of a computed row in the per-row vectors; -1: absent. */
__device__ __forceinline__ int64_t vectors_at(const flce_rows& r, int64_t row) {
  return r.index ? r.index[row] : row;
}

/* `y`: the target at `at`; not used with probabilities. */
__device__ __forceinline__ RowRef row_ref_at(const flce_rows& r, int64_t at, int64_t y) {
  if (at < 0) return {at, kRowAbsent};
  if (!r.target) return {at, kRowValid}; /* probabilities */
  if (y == r.options.ignore_index) return {at, kRowIgnored};
  const int64_t classes = r.earlier_classes + r.vocab + r.later_classes;
  return {at, y >= 0 && y < classes ? kRowValid : kRowOutOfRange};
}

__device__ __forceinline__ int64_t target_at(const flce_rows& r, int64_t at) {
  return r.target && at >= 0 ? r.target[at] : 0;
}

__device__ __forceinline__ RowRef row_ref_of(const flce_rows& r, int64_t row) {
  const int64_t at = vectors_at(r, row);
  return row_ref_at(r, at, target_at(r, at));
}

/* The result of a row that is not valid: NaN where the target is out of range, else 0. */
template <typename S>
__device__ __forceinline__ S blank_of(RowRef ref) {
  return ref.kind == kRowOutOfRange ? (S)NAN : (S)0;
}

/* Writes statistics and loss of a row that is not valid: `value`, 0 or NaN. Its prediction is
 * -1. */
template <typename S>
__device__ __forceinline__ void write_blank(const flce_rows& r, int64_t at, S value) {
  for (int which = 0; which < FLCE_STAT_COUNT; which++) {
    ((S*)r.stats)[which * r.stat_pitch + at] = value;
  }
  if (r.loss) ((S*)r.loss)[at] = value;
  if (r.predictions) r.predictions[at] = -1;
}

/* The statistics (enum flce_stat_row) from which a valid row's gradient factors are made. */
template <typename S>
struct RowStatistics {
  S lse, nll, inv_sum, slope, weight_sum;
};

/* EXP, TARGET and SMOOTH of a row (enum flce_coef_row); 1, 0, 0 without coef. */
template <typename S>
struct RowFactors {
  S row, target, smooth;
};

template <typename S>
__device__ __forceinline__ RowFactors<S> factors_of(const flce_rows& r, int64_t at) {
  if (!r.coef) return {1, 0, 0};
  const S* coef = (const S*)r.coef + at;
  return {coef[FLCE_COEF_EXP * r.stat_pitch], coef[FLCE_COEF_TARGET * r.stat_pitch],
          coef[FLCE_COEF_SMOOTH * r.stat_pitch]};
}

/* Whether blank_rows writes row `at`, and which value: 0 if it is ignored, else NaN. A row that is
 * not ignored is NaN if more rows are valid than `bound` or INV_DENOM is NaN. The count of valid
 * rows and `bound` are rounded to S in the same way, so a bound that holds is never exceeded by
 * rounding; INV_DENOM was made from the exact counts. */
template <typename S>
__device__ __forceinline__ bool is_left_out(const flce_rows& r, int64_t at, int64_t bound,
                                            S* value) {
  const bool ignored = r.target && r.target[at] == r.options.ignore_index;
  *value = ignored ? (S)0 : (S)NAN;
  const S* scalars = (const S*)r.scalars;
  return ignored || scalars[FLCE_SCALAR_VALID] > (S)bound || isnan(scalars[FLCE_SCALAR_INV_DENOM]);
}

#endif
