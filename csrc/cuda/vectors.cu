/* One number a row: the sum over rows, coefficients, and the rows that are not computed. */
#include "backend.cuh"
#include "coefficients.cuh"

enum { kVectorThreads = 256, kSumThreads = 1024 };

/* ---- the sum over rows ---- */

/* Reads before it waits: launched to overlap a kernel, it needs none of what that one writes. */
template <typename S>
__global__ void __launch_bounds__(kSumThreads)
    reduce_values(S* out, const S* values, int64_t count, const S* factor) {
  __shared__ double scratch[kMaxWarps];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) sum += (double)values[i];
  sum = block_sum(sum, scratch);
  if (factor) sum *= (double)factor[0];
  follow_kernels();
  if (threadIdx.x == 0) out[0] = (S)sum;
}

flce_status cuda_reduce(void* self, void* out, const void* values, int64_t count,
                        const void* factor, flce_dtype stat, bool overlaps) {
  FLCE_WITH_STAT(stat, S, {
    FLCE_TRY(launch_overlapping(self, reduce_values<S>, 1, kSumThreads, "reduce", overlaps, (S*)out,
                                (const S*)values, count, (const S*)factor));
  });
  return FLCE_OK;
}

/* ---- row coefficients ---- */

template <typename S>
__global__ void __launch_bounds__(kVectorThreads)
    row_coefficients(const __grid_constant__ flce_rows r,
                     const __grid_constant__ flce_upstream upstream, double scale, const S* factor,
                     S* coef) {
  follow_kernels();
  const int64_t row = (int64_t)blockIdx.x * kVectorThreads + threadIdx.x;
  if (row >= r.rows) return;
  const Place place = place_of(r, row);
  if (place.kind == kRowAbsent) return;
  RowStatistics<S> stats = {};
  if (place.kind == kRowValid) stats = statistics_at<S>(r, place.at);
  write_coefficients(r, upstream, place, stats, factor ? factor[0] : (S)1, (S)scale, coef);
}

flce_status cuda_row_coefficients(void* self, const flce_rows* r, const flce_upstream* upstream,
                                  const void* factor, void* coef) {
  if (r->rows == 0) return FLCE_OK;
  const int64_t blocks = ceil_div(r->rows, kVectorThreads);
  FLCE_TRY(check_grid(blocks, "row_coefficients"));
  const double scale = r->options.logit_scale / r->options.temperature;
  FLCE_WITH_STAT(flce_stat_dtype(r->z_dtype), S, {
    FLCE_TRY(launch_next(self, row_coefficients<S>, (unsigned)blocks, kVectorThreads,
                         "row_coefficients", *r, *upstream, scale, (const S*)factor, (S*)coef));
  });
  return FLCE_OK;
}

/* ---- rows that are not computed ---- */

template <typename S>
__global__ void __launch_bounds__(kVectorThreads)
    blank_vectors(const __grid_constant__ flce_rows r, int64_t bound) {
  const int64_t i = (int64_t)blockIdx.x * kVectorThreads + threadIdx.x;
  S value;
  if (i < r.rows && is_left_out(r, i, bound, &value)) write_blank(r, i, value);
}

flce_status cuda_blank_rows(void* self, const flce_rows* r, int64_t bound, void* dx,
                            flce_dtype dx_dtype, int64_t hidden) {
  if (r->rows == 0) return FLCE_OK;
  if (dx) return cuda_blank_grad_input(self, r, bound, dx, dx_dtype, hidden);
  const int64_t blocks = ceil_div(r->rows, kVectorThreads);
  FLCE_TRY(check_grid(blocks, "blank_rows"));
  FLCE_WITH_STAT(flce_stat_dtype(r->z_dtype), S, {
    blank_vectors<S><<<(unsigned)blocks, kVectorThreads, 0, stream_of(self)>>>(*r, bound);
  });
  FLCE_LAUNCHED("blank_rows");
  return FLCE_OK;
}
