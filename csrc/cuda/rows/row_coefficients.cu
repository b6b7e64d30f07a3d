/* The backend function row_coefficients: gradient factors of each row (enum flce_coef_row) from its
 * statistics, one thread a row. The formulas are in row_coefficients.cuh. */
#include "cuda/rows/row_coefficients.cuh"

#include "cuda/backend.cuh"
#include "merge.h"

enum { kThreads = 256 };

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
