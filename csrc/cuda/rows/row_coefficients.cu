/* row_coefficients: gradient factors of each row (enum flce_coef_row) from its statistics, one
 * thread a row. The formulas are in row_coefficients.cuh. scale_coefficients: the same times a
 * scale. */
#include "cuda/rows/row_coefficients.cuh"

#include "cuda/backend.cuh"
#include "cuda/common/reductions.cuh"
#include "merge.h"

enum { kThreads = 256, kScaleThreads = 1024 };

/* SHARDED: the vocabulary is sharded, and this rank has the classes of `shard`. */
template <typename S, bool SHARDED>
__global__ void __launch_bounds__(kThreads)
    row_coefficients(const __grid_constant__ flce_rows r,
                     const __grid_constant__ flce_upstream upstream, double scale, const S* factor,
                     S* coef, const flce_shard shard) {
  pdl_wait();
  const int64_t row = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  if (row >= r.rows) return;
  const RowRef ref = row_ref_of(r, row);
  if (ref.kind == kRowAbsent) return;
  RowStatistics<S> stats = {};
  if (ref.kind == kRowValid) stats = statistics_at<S>(r, ref.at);
  const bool elsewhere =
      SHARDED && ref.kind == kRowValid && !flce_holds_class(&shard, r.target[ref.at]);
  write_coefficients(r, upstream, ref, stats, factor ? factor[0] : (S)1, (S)scale, coef, elsewhere);
}

flce_status cuda_row_coefficients(void* self, const flce_rows* r, const flce_shard* shard,
                                  const flce_upstream* upstream, const void* factor, void* coef) {
  if (r->rows == 0) return FLCE_OK;
  const int64_t blocks = ceil_div(r->rows, kThreads);
  FLCE_TRY(check_grid(blocks, "row_coefficients"));
  const double scale = r->options.logit_scale / r->options.temperature;
  FLCE_WITH_STAT(flce_stat_dtype(r->z_dtype), S, {
    const auto kernel = shard ? row_coefficients<S, true> : row_coefficients<S, false>;
    FLCE_TRY(launch_dependent(self, kernel, (unsigned)blocks, kThreads, "row_coefficients", *r,
                              *upstream, scale, (const S*)factor, (S*)coef,
                              shard ? *shard : flce_shard{}));
  });
  return FLCE_OK;
}

/* A bound of |dz| in a row. The entropy's term p (m - l) is at most about the entropy where it is
 * negative, and 1/e where it is positive. The gradients of all classes may be of one column. */
__device__ __forceinline__ float bound_of_dz(const flce_rows& r, const float* coef, int64_t at,
                                             float top_weight) {
  const float* stats = (const float*)r.stats + at;
  const float sum = 1 / stats[FLCE_STAT_INV_SUM * r.stat_pitch];
  const auto size = [&](int which) { return fabsf(coef[which * r.stat_pitch + at]); };
  const float soft = size(FLCE_COEF_SOFT) * stats[FLCE_STAT_WEIGHT_SUM * r.stat_pitch];
  float factor = size(FLCE_COEF_EXP);
  if (r.wants_entropy) {
    factor += size(FLCE_COEF_ENTROPY) * (1 + stats[FLCE_STAT_ENTROPY * r.stat_pitch]);
  }
  float classes = 0;
  for (int64_t k = 0; r.classes.grads && k < r.classes.count; k++) {
    classes += fabsf(((const float*)r.classes.grads)[at * r.classes.count + k]);
  }
  return factor * sum + size(FLCE_COEF_TARGET) + size(FLCE_COEF_SMOOTH) * top_weight + soft +
         size(FLCE_COEF_TAIL) + classes;
}

/* One block, because all rows need the same scale. */
__global__ void __launch_bounds__(kScaleThreads)
    scale_coefficients(const __grid_constant__ flce_rows r, float* coef, float* scale,
                       int64_t weights) {
  pdl_wait();
  __shared__ float scratch[kMaxWarps];
  const float* class_weight = (const float*)r.class_weight;
  float top_weight = class_weight ? 0 : 1, top = 0;
  for (int64_t j = threadIdx.x; class_weight && j < r.vocab; j += kScaleThreads) {
    top_weight = fmaxf(top_weight, fabsf(class_weight[j]));
  }
  if (class_weight) top_weight = block_max(top_weight, scratch);
  for (int64_t row = threadIdx.x; row < r.rows; row += kScaleThreads) {
    const RowRef ref = row_ref_of(r, row);
    if (ref.kind == kRowValid) top = fmaxf(top, bound_of_dz(r, coef, ref.at, top_weight));
  }
  const float u = (float)fmin(scale_for((double)block_max(top, scratch), 12), 0x1p100);
  for (int64_t row = threadIdx.x; row < r.rows; row += kScaleThreads) {
    const RowRef ref = row_ref_of(r, row);
    for (int which = 0; ref.kind != kRowAbsent && which < FLCE_COEF_COUNT; which++) {
      if (which != FLCE_COEF_VALID) coef[which * r.stat_pitch + ref.at] *= u;
    }
  }
  for (int64_t i = threadIdx.x; i < FLCE_DZ_SCALE_NUMBERS + weights; i += kScaleThreads) {
    scale[i] = i == 2 ? 1.0f : i == 1 || i == 3 ? 0.0f : 1 / u;
  }
}

flce_status cuda_scale_coefficients(void* self, const flce_rows* r, void* coef, float* scale,
                                    int64_t weights) {
  return launch_dependent(self, scale_coefficients, 1, kScaleThreads, "scale_coefficients", *r,
                          (float*)coef, scale, weights);
}
