/* sample_rows: draws the entries of each row's list from its E (flce.h), a block for each row. E is
 * read once: the first sweep keeps the sums of segments of classes in shared memory, and each draw
 * then reads the one segment again in which it falls. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/row_status.cuh"
#include "cuda/common/vectors.cuh"
#include "random.h"

#include <cub/block/block_scan.cuh>

enum {
  kSampleThreads = 256,
  kSampleWarps = kSampleThreads / kWarp,
  kLaneClasses = 8,                /* classes of a segment that a lane adds */
  kSegment = kWarp * kLaneClasses, /* its 2^8 terms of at most 2^23 fit 32 bits */
  kSegmentBatch = 4,               /* segments of a warp whose loads are in flight */
  kSegments = FLCE_SAMPLE_CLASSES / kSegment,
};
constexpr uint32_t kOne = 1u << FLCE_SAMPLE_BITS;

/* The arguments of sample_rows (backend.h). */
typedef struct sample_args {
  flce_rows r;
  int32_t* lists;
  const int64_t* seed;
  int64_t first_token;
  float eps, inverse_eps;
  int pitch, most; /* of a list: int32, and pairs after the first */
} sample_args;

/* A row of E, and the factor and the threshold of its draw. */
template <typename T>
struct SampledRow {
  const T* e;
  int vocab;
  float inverse, threshold;
};

/* Loads a lane's classes [col, col + kLaneClasses); zeros beyond the vocabulary, where E may not
 * exist. Rows of E start at 128 bytes, so whole lanes are aligned. */
template <typename T>
__device__ __forceinline__ void load_lane(const SampledRow<T>& row, int col,
                                          Vec<T, kLaneClasses>& v) {
  if (col + kLaneClasses <= row.vocab) {
    load_vec<false>(row.e + col, v);
    return;
  }
#pragma unroll
  for (int i = 0; i < kLaneClasses; i++) {
    v.at[i] = col + i < row.vocab ? row.e[col + i] : from_stat<T>(0.0f);
  }
}

/* min(1, E / (eps S)) in fixed point. */
template <typename T>
__device__ __forceinline__ uint32_t fixed_of(const SampledRow<T>& row, T e) {
  return __float2uint_rn(fminf(to_stat(e) * row.inverse, 1.0f) * (float)kOne);
}

template <typename T>
__device__ __forceinline__ uint32_t fixed_sum(const SampledRow<T>& row,
                                              const Vec<T, kLaneClasses>& v) {
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kLaneClasses; i++) sum += fixed_of(row, v.at[i]);
  return sum;
}

/* Writes the sum of each segment. */
template <typename T>
__device__ __forceinline__ void sum_segments(const SampledRow<T>& row, int segments,
                                             uint64_t* sums) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  for (int first = warp * kSegmentBatch; first < segments; first += kSampleWarps * kSegmentBatch) {
    Vec<T, kLaneClasses> v[kSegmentBatch];
#pragma unroll
    for (int b = 0; b < kSegmentBatch; b++) {
      load_lane(row, (first + b) * kSegment + lane * kLaneClasses, v[b]);
    }
#pragma unroll
    for (int b = 0; b < kSegmentBatch; b++) {
      const uint32_t sum = __reduce_add_sync(0xffffffffu, fixed_sum(row, v[b]));
      if (lane == 0 && first + b < segments) sums[first + b] = sum;
    }
  }
}

/* Replaces the sums of the segments by their exclusive prefix sums; the total is the last. */
__device__ __forceinline__ void scan_segments(uint64_t* starts, int segments) {
  using Scan = cub::BlockScan<uint64_t, kSampleThreads>;
  __shared__ typename Scan::TempStorage scratch;
  uint64_t before = 0;
  for (int first = 0; first < segments; first += kSampleThreads) {
    const int s = first + (int)threadIdx.x;
    uint64_t start, total;
    Scan(scratch).ExclusiveSum(s < segments ? starts[s] : 0, start, total);
    if (s < segments) starts[s] = before + start;
    before += total;
    __syncthreads(); /* the next scan writes `scratch` */
  }
  if (threadIdx.x == 0) starts[segments] = before;
  __syncthreads();
}

/* The last segment that starts at or before `position`. */
__device__ __forceinline__ int segment_of(const uint64_t* starts, int segments, uint64_t position) {
  int low = 0, high = segments - 1;
  while (low < high) {
    const int middle = (low + high + 1) / 2;
    if (starts[middle] <= position) {
      low = middle;
    } else {
      high = middle - 1;
    }
  }
  return low;
}

/* The pair of the draw at `position` of a segment, by one warp: the class whose part of the prefix
 * sum holds the position. The lane that has it writes. */
template <typename T>
__device__ __forceinline__ void write_draw(const SampledRow<T>& row, int segment, uint32_t position,
                                           int2* pair) {
  const int lane = threadIdx.x % kWarp, col = segment * kSegment + lane * kLaneClasses;
  Vec<T, kLaneClasses> v;
  load_lane(row, col, v);
  const uint32_t own = fixed_sum(row, v);
  uint32_t end = own;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint32_t other = __shfl_up_sync(0xffffffffu, end, step);
    if (lane >= step) end += other;
  }
  uint32_t start = end - own;
  if (position < start || position >= end) return;
#pragma unroll
  for (int i = 0; i < kLaneClasses; i++) {
    const uint32_t next = start + fixed_of(row, v.at[i]);
    if (start <= position && position < next) {
      *pair = make_int2(col + i, __float_as_int(fmaxf(to_stat(v.at[i]), row.threshold)));
    }
    start = next;
  }
}

/* Writes pair 0 of a list, and zeros after its `count` entries. */
__device__ __forceinline__ void write_head_and_zeros(int2* list, int target, int count, int pitch) {
  if (threadIdx.x == 0) *list = make_int2(target, count);
  for (int m = 1 + count + (int)threadIdx.x; m < pitch / 2; m += kSampleThreads) {
    list[m] = make_int2(0, 0);
  }
}

template <typename T>
__global__ void __launch_bounds__(kSampleThreads)
    sample_rows(const __grid_constant__ sample_args p) {
  __shared__ uint64_t starts[kSegments + 1];
  pdl_wait();
  const RowRef ref = row_ref_of(p.r, blockIdx.x);
  int2* list = (int2*)(p.lists + (int64_t)blockIdx.x * p.pitch);
  if (ref.kind != kRowValid) {
    write_head_and_zeros(list, ref.kind == kRowOutOfRange ? 0 : -1, 0, p.pitch);
    return;
  }
  const float inv_sum = ((const float*)p.r.stats)[FLCE_STAT_INV_SUM * p.r.stat_pitch + ref.at];
  const SampledRow<T> row = {(const T*)p.r.out + (int64_t)blockIdx.x * p.r.out_pitch,
                             (int)p.r.vocab, inv_sum * p.inverse_eps, p.eps / inv_sum};
  const int segments = (row.vocab + kSegment - 1) / kSegment;
  sum_segments(row, segments, starts);
  __syncthreads();
  scan_segments(starts, segments);
  const uint32_t drawn = flce_philox((uint64_t)p.seed[0], (uint64_t)(p.first_token + ref.at)) >>
                         (32 - FLCE_SAMPLE_BITS);
  const uint64_t total = starts[segments];
  const uint64_t draws = total > drawn ? (total - drawn + kOne - 1) >> FLCE_SAMPLE_BITS : 0;
  const int count = (int)(draws < (uint64_t)p.most ? draws : (uint64_t)p.most);
  for (int m = threadIdx.x / kWarp; m < count; m += kSampleWarps) {
    const uint64_t position = ((uint64_t)m << FLCE_SAMPLE_BITS) + drawn;
    const int segment = segment_of(starts, segments, position);
    write_draw(row, segment, (uint32_t)(position - starts[segment]), list + 1 + m);
  }
  write_head_and_zeros(list, (int)p.r.target[ref.at], count, p.pitch);
}

flce_status cuda_sample_rows(void* self, const flce_sample_rows_args* call) {
  const flce_rows* r = call->rows;
  if (r->rows == 0) return FLCE_OK;
  FLCE_TRY(check_grid(r->rows, "sample_rows"));
  const sample_args args = {*r,
                            call->lists,
                            call->seed,
                            call->first_token,
                            (float)call->eps,
                            (float)(1.0 / call->eps),
                            (int)flce_sample_pitch(call->eps),
                            (int)flce_most_samples(call->eps)};
  const int64_t segments = ceil_div(r->vocab, kSegment);
  if (segments > kSegments || (r->out_dtype != FLCE_F32 && r->out_dtype != FLCE_BF16)) {
    return flce_fail(FLCE_UNSUPPORTED, "sample_rows: no CUDA kernel for %lld classes in %s",
                     (long long)r->vocab, flce_dtype_name(r->out_dtype));
  }
  const auto kernel = r->out_dtype == FLCE_F32 ? sample_rows<float> : sample_rows<__nv_bfloat16>;
  return launch_dependent(self, kernel, (unsigned)r->rows, kSampleThreads, "sample_rows", args);
}
