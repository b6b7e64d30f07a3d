/* The backend functions of a sharded vocabulary: shard_targets, pack_statistics, merge_statistics
 * and sum_partial_dx. The merge of a row is in merge.h. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/reductions.cuh"
#include "cuda/common/row_status.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/rows/row.cuh"
#include "loss.h"
#include "merge.h"

enum { kThreads = 256, kPackWarps = 8 };

__global__ void __launch_bounds__(kThreads)
    shard_targets(const __grid_constant__ flce_shard_targets_args call) {
  pdl_wait();
  const int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  if (i >= call.tokens) return;
  call.out[i] = flce_shard_column(&call, call.target[i]);
}

flce_status cuda_shard_targets(void* self, const flce_shard_targets_args* call) {
  if (call->tokens == 0) return FLCE_OK;
  const int64_t blocks = ceil_div(call->tokens, kThreads);
  FLCE_TRY(check_grid(blocks, "shard_targets"));
  return launch_dependent(self, shard_targets, (unsigned)blocks, kThreads, "shard_targets", *call);
}

/* z + bias of a column of this rank. Called by a warp; every lane gets it. */
template <typename T>
__device__ __forceinline__ double z_of_column(const flce_pack_args& call, flce_dtype stat,
                                              int64_t at, int64_t column, int lane) {
  const T* x = (const T*)call.x + at * call.hidden;
  const T* w = (const T*)call.w + column * call.hidden;
  double z = 0;
  for (int64_t h = lane; h < call.hidden; h += kWarp) {
    z += (double)to_stat(x[h]) * (double)to_stat(w[h]);
  }
  z = warp_sum(z);
  return call.bias ? z + flce_stat_at(call.bias, stat, column) : z;
}

/* One warp for each row. `map` computes l from z. The row's own temperature is left out: it does
 * not change the argmax. */
template <typename T>
__global__ void __launch_bounds__(kPackWarps* kWarp)
    pack_statistics(const __grid_constant__ flce_pack_args call,
                    const __grid_constant__ flce_rows r, const flce_logit_map map) {
  using S = stat_t<T>;
  constexpr flce_dtype kStat = sizeof(S) == 8 ? FLCE_F64 : FLCE_F32;
  pdl_wait();
  const int lane = threadIdx.x % kWarp;
  const int64_t row = (int64_t)blockIdx.x * kPackWarps + threadIdx.x / kWarp;
  if (row >= r.rows) return;
  const RowRef ref = row_ref_of(r, row);
  if (ref.kind != kRowValid) return;
  double values[FLCE_SHARD_STATS] = {-INFINITY, -1, 0, 0, 0, -INFINITY, 0, -INFINITY};
  if (call.shard.count > 0) {
    const S* stats = (const S*)r.stats + ref.at;
    values[FLCE_SHARD_STAT_LSE] = stats[FLCE_STAT_LSE * r.stat_pitch];
    if (flce_holds_class(&call.shard, r.target[ref.at])) {
      values[FLCE_SHARD_STAT_NLL] = stats[FLCE_STAT_NLL * r.stat_pitch];
    }
    values[FLCE_SHARD_STAT_ENTROPY] = stats[FLCE_STAT_ENTROPY * r.stat_pitch];
    values[FLCE_SHARD_STAT_TAIL] = stats[FLCE_STAT_TAIL_LSE * r.stat_pitch];
    if (r.options.label_smoothing > 0) {
      values[FLCE_SHARD_STAT_SMOOTHING] =
          (double)((const S*)r.loss)[ref.at] * (double)call.shard.count;
      values[FLCE_SHARD_STAT_WEIGHT] = ((const S*)call.scalars)[FLCE_SCALAR_WEIGHT_TOTAL];
    }
    if (r.predictions) {
      const int64_t column = r.predictions[ref.at];
      const double z = z_of_column<T>(call, kStat, ref.at, column, lane);
      values[FLCE_SHARD_STAT_TOP] = map.outer_scale * capped<false>(map.curve, map.inner_scale, z);
      values[FLCE_SHARD_STAT_COLUMN] = (double)(call.shard.first + column);
    }
  }
#pragma unroll
  for (int k = 0; k < FLCE_SHARD_STATS; k++) {
    if (lane == 0 && k < call.count) ((S*)call.shard_stats)[k * r.rows + row] = (S)values[k];
  }
}

flce_status cuda_pack_statistics(void* self, const flce_pack_args* call) {
  const flce_rows* r = call->rows;
  if (r->rows == 0) return FLCE_OK;
  const int64_t blocks = ceil_div(r->rows, kPackWarps);
  FLCE_TRY(check_grid(blocks, "pack_statistics"));
  const flce_logit_map map = flce_logit_map_of(&r->options, r->options.temperature);
  FLCE_WITH_TYPE(call->dtype, T, {
    FLCE_TRY(launch_dependent(self, pack_statistics<T>, (unsigned)blocks, kPackWarps * kWarp,
                              "pack_statistics", *call, *r, map));
  });
  return FLCE_OK;
}

/* One thread for each row. */
template <typename S>
__global__ void __launch_bounds__(kThreads)
    merge_statistics(const __grid_constant__ flce_merge_args given,
                     const __grid_constant__ flce_rows r) {
  constexpr flce_dtype kStat = sizeof(S) == 8 ? FLCE_F64 : FLCE_F32;
  pdl_wait();
  const int64_t row = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  if (row >= r.rows) return;
  flce_merge_args call = given;
  call.rows = &r; /* `given` has the host's address */
  const RowRef ref = row_ref_of(r, row);
  if (ref.kind == kRowAbsent) return;
  if (ref.kind != kRowValid) {
    write_blank(r, ref.at, blank_of<S>(ref));
    return;
  }
  const flce_merged merged = flce_merge_row(&call, kStat, row);
  const double lse = flce_shard_stat_at(&call, kStat, call.rank, FLCE_SHARD_STAT_LSE, row);
  S* stats = (S*)r.stats + ref.at;
  double inv_sum = 0, nll = merged.nll;
  if (lse != -INFINITY) {
    inv_sum = stats[FLCE_STAT_INV_SUM * r.stat_pitch] * exp(-flce_lse_minus_shard(&merged, lse));
  } else { /* all l of this rank are -inf, or it has none: exp(l - 0) is 0 */
    stats[FLCE_STAT_OFFSET * r.stat_pitch] = 0;
  }
  if (call.shard.count == 0) {
    stats[FLCE_STAT_SLOPE * r.stat_pitch] = stats[FLCE_STAT_WEIGHT_SUM * r.stat_pitch] = 0;
  } else if (!flce_holds_class(&call.shard, r.target[ref.at])) {
    nll = flce_merged_nll(&merged, lse, stats[FLCE_STAT_NLL * r.stat_pitch]);
  }
  stats[FLCE_STAT_LSE * r.stat_pitch] = (S)(merged.largest + merged.log_ratio);
  stats[FLCE_STAT_NLL * r.stat_pitch] = (S)nll;
  stats[FLCE_STAT_INV_SUM * r.stat_pitch] = (S)inv_sum;
  stats[FLCE_STAT_ENTROPY * r.stat_pitch] = r.wants_entropy ? (S)merged.entropy : (S)0;
  stats[FLCE_STAT_TAIL_LSE * r.stat_pitch] = (S)merged.tail;
  ((S*)r.loss)[ref.at] = (S)flce_merged_loss(&r, kStat, ref.at, &merged);
  if (r.predictions) r.predictions[ref.at] = merged.prediction;
}

flce_status cuda_merge_statistics(void* self, const flce_merge_args* call) {
  const flce_rows* r = call->rows;
  if (r->rows == 0) return FLCE_OK;
  const int64_t blocks = ceil_div(r->rows, kThreads);
  FLCE_TRY(check_grid(blocks, "merge_statistics"));
  FLCE_WITH_STAT(flce_stat_dtype(r->z_dtype), S, {
    FLCE_TRY(launch_dependent(self, merge_statistics<S>, (unsigned)blocks, kThreads,
                              "merge_statistics", *call, *r));
  });
  return FLCE_OK;
}

/* Each thread sums 16 bytes of every term, or one element if VECTOR is false. OUT: dtype of the
 * sum.
 */
template <typename T, typename OUT, bool VECTOR>
__global__ void __launch_bounds__(kThreads)
    sum_partial_dx(const __grid_constant__ flce_sum_dx_args call) {
  constexpr int N = VECTOR ? kVec<T> : 1;
  using S = stat_t<T>;
  pdl_wait();
  const int64_t first = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * N;
  if (first >= call.count) return;
  S sum[N] = {};
  for (int64_t rank = 0; rank < call.ranks; rank++) {
    Vec<T, N> raw;
    S term[N];
    const T* from =
        rank == call.rank ? (const T*)call.own : (const T*)call.received + rank * call.count;
    load_vec<true>(from + first, raw);
    unpack(raw, term);
#pragma unroll
    for (int e = 0; e < N; e++) sum[e] += term[e];
  }
  Vec<OUT, N> out;
  pack(sum, out);
  store_vec((OUT*)call.out + first, out);
  if (call.copy) store_vec((OUT*)call.copy + first, out);
}

template <typename T, typename OUT>
static flce_status launch_sum(void* self, const flce_sum_dx_args* call) {
  const bool vector = call->count % kVec<T> == 0 && both_aligned(call->out, call->received) &&
                      both_aligned(call->own, call->copy);
  const int64_t blocks = ceil_div(call->count, (int64_t)kThreads * (vector ? kVec<T> : 1));
  FLCE_TRY(check_grid(blocks, "sum_partial_dx"));
  const auto kernel = vector ? sum_partial_dx<T, OUT, true> : sum_partial_dx<T, OUT, false>;
  return launch_dependent(self, kernel, (unsigned)blocks, kThreads, "sum_partial_dx", *call);
}

flce_status cuda_sum_partial_dx(void* self, const flce_sum_dx_args* call) {
  if (call->count == 0) return FLCE_OK;
  if (call->dtype == FLCE_F32 && call->out_dtype == FLCE_BF16)
    return launch_sum<float, __nv_bfloat16>(self, call);
  if (call->dtype == FLCE_F32 && call->out_dtype == FLCE_F16)
    return launch_sum<float, __half>(self, call);
  FLCE_WITH_TYPE(call->dtype, T, { return launch_sum<T, T>(self, call); });
  return FLCE_OK;
}
