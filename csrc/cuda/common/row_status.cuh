/* Which rows of flce_rows are valid, and the results of those that are not. */
#ifndef FLCE_CUDA_COMMON_ROW_STATUS_CUH
#define FLCE_CUDA_COMMON_ROW_STATUS_CUH

#include "cuda/common/types.cuh"

enum RowKind { kRowValid, kRowIgnored, kRowOutOfRange, kRowAbsent };

/* Where the vectors of a computed row are, and what its target says. */
struct RowRef {
  int64_t at; /* -1: nowhere */
  RowKind kind;
};

__device__ __forceinline__ int64_t vectors_at(const flce_rows& r, int64_t row) {
  return r.index ? r.index[row] : row;
}

/* `y`: the target at `at`, where there is one. */
__device__ __forceinline__ RowRef row_ref_at(const flce_rows& r, int64_t at, int64_t y) {
  if (at < 0) return {at, kRowAbsent};
  if (!r.target) return {at, kRowValid}; /* probabilities */
  if (y == r.options.ignore_index) return {at, kRowIgnored};
  return {at, y >= 0 && y < r.vocab ? kRowValid : kRowOutOfRange};
}

__device__ __forceinline__ int64_t target_at(const flce_rows& r, int64_t at) {
  return r.target && at >= 0 ? r.target[at] : 0;
}

__device__ __forceinline__ RowRef row_ref_of(const flce_rows& r, int64_t row) {
  const int64_t at = vectors_at(r, row);
  return row_ref_at(r, at, target_at(r, at));
}

/* What stands for the results of a row that is not valid. */
template <typename S>
__device__ __forceinline__ S blank_of(RowRef place) {
  return place.kind == kRowOutOfRange ? (S)NAN : (S)0;
}

/* Statistics, loss and prediction of a row that has none: `value` is 0 or NaN. */
template <typename S>
__device__ __forceinline__ void write_blank(const flce_rows& r, int64_t at, S value) {
  for (int which = 0; which < FLCE_STAT_ROWS; which++) {
    ((S*)r.stats)[which * r.stat_pitch + at] = value;
  }
  if (r.loss) ((S*)r.loss)[at] = value;
  if (r.predictions) r.predictions[at] = -1;
}

/* What a valid row's factors for the gradient are made of: of enum flce_stat_row. */
template <typename S>
struct RowStatistics {
  S lse, nll, inv_sum, slope, weight_sum;
};

/* Whether blank_rows has to write row `at`, and what: 0 or NaN. Both counts are rounded alike, so
 * that a bound that holds is never exceeded by rounding; INV_DENOM was made of the exact ones. */
template <typename S>
__device__ __forceinline__ bool is_left_out(const flce_rows& r, int64_t at, int64_t bound,
                                            S* value) {
  const bool ignored = r.target && r.target[at] == r.options.ignore_index;
  *value = ignored ? (S)0 : (S)NAN;
  const S* scalars = (const S*)r.scalars;
  return ignored || scalars[FLCE_SCALAR_VALID] > (S)bound || isnan(scalars[FLCE_SCALAR_INV_DENOM]);
}

#endif
