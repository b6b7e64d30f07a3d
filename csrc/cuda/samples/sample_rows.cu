/* sample_rows: draws the entries of each row's list from its E (problem.h), a block for each row.
 * The first sweep reads E and keeps the sums of groups of classes in shared memory. Then each
 * thread makes a draw of its own: it reads again the one group in which the draw falls. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/row_status.cuh"
#include "cuda/common/vectors.cuh"
#include "random.h"

#include <cub/block/block_scan.cuh>

enum {
  kSampleThreads = 256,
  kSampleWarps = kSampleThreads / kWarp,
  kLaneClasses = 8, /* classes of a 16-byte load of bfloat16 */
  kLoads = 4,       /* of a thread, in flight */
  kLoadClasses = kWarp * kLaneClasses,
  kSegmentGroups = 8, /* groups whose sums are added before the prefix sums */
  kSegments = 1024,   /* of a row, at most */
};
constexpr uint32_t kFixedOne = 1u << FLCE_SAMPLE_BITS;

/* The arguments of sample_rows (backend.h). */
typedef struct sample_args {
  flce_rows r;
  int32_t* lists;
  const int64_t* seed;
  int64_t first_token;
  float eps, inverse_eps;
  int pitch; /* leading dimension of the lists, in int32 */
  int most;  /* pairs of a list after the first */
} sample_args;

/* A row of E, and the factor and the threshold of its draw. */
template <typename T>
struct SampledRow {
  const T* e;
  int vocab;
  float inverse_threshold, threshold;
};

/* Loads a lane's classes [col, col + kLaneClasses); zeros beyond the vocabulary, where E may not
 * exist. Rows of E are aligned to 128 bytes, so a lane's loads are aligned. */
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
  return __float2uint_rn(fminf(to_stat(e) * row.inverse_threshold, 1.0f) * (float)kFixedOne);
}

template <typename T>
__device__ __forceinline__ uint32_t fixed_sum(const SampledRow<T>& row,
                                              const Vec<T, kLaneClasses>& v) {
  uint32_t sum = 0;
#pragma unroll
  for (int i = 0; i < kLaneClasses; i++) sum += fixed_of(row, v.at[i]);
  return sum;
}

/* The sums of a row in shared memory. A group's classes are those of kGroupLanes lanes of a load;
 * its sum is below 2^32, as each class adds at most 2^23. */
template <int kGroupLanes>
struct RowSums {
  enum { kGroup = kGroupLanes * kLaneClasses, kSegment = kSegmentGroups * kGroup };
  uint32_t groups[kSegments * kSegmentGroups];
  uint64_t starts[kSegments + 1]; /* prefix sums of the segments; the last is the total */
};

/* Writes the sums of the groups up to the end of the last segment. */
template <typename T, int kGroupLanes>
__device__ __forceinline__ void sum_groups(const SampledRow<T>& row, RowSums<kGroupLanes>& sums) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp;
  static_assert(kLoads * kLoadClasses % RowSums<kGroupLanes>::kSegment == 0, "whole segments");
  for (int first = warp * kLoads * kLoadClasses; first < row.vocab;
       first += kSampleWarps * kLoads * kLoadClasses) {
    const int col = first + lane * kLaneClasses;
    Vec<T, kLaneClasses> v[kLoads];
#pragma unroll
    for (int b = 0; b < kLoads; b++) load_lane(row, col + b * kLoadClasses, v[b]);
#pragma unroll
    for (int b = 0; b < kLoads; b++) {
      uint32_t sum = fixed_sum(row, v[b]);
#pragma unroll
      for (int step = 1; step < kGroupLanes; step *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, step);
      }
      if (lane % kGroupLanes == 0) {
        sums.groups[(col + b * kLoadClasses) / RowSums<kGroupLanes>::kGroup] = sum;
      }
    }
  }
}

/* Writes the prefix sums. */
template <int kGroupLanes>
__device__ __forceinline__ void scan_segments(RowSums<kGroupLanes>& sums, int segments) {
  using Scan = cub::BlockScan<uint64_t, kSampleThreads>;
  __shared__ typename Scan::TempStorage scratch;
  uint64_t before = 0;
  for (int first = 0; first < segments; first += kSampleThreads) {
    const int s = first + (int)threadIdx.x;
    uint64_t sum = 0, start, total;
    for (int g = 0; g < kSegmentGroups && s < segments; g++) {
      sum += sums.groups[s * kSegmentGroups + g];
    }
    Scan(scratch).ExclusiveSum(sum, start, total);
    if (s < segments) sums.starts[s] = before + start;
    before += total;
    __syncthreads(); /* the next scan writes `scratch` */
  }
  if (threadIdx.x == 0) sums.starts[segments] = before;
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

/* The pair of the draw at `position` of the group whose classes begin at `col`: the class whose
 * part of the prefix sum holds the position. */
template <typename T, int kGroupLanes>
__device__ __forceinline__ int2 find_in_group(const SampledRow<T>& row, int col,
                                              uint32_t position) {
  static_assert(kGroupLanes % kLoads == 0, "whole rounds of loads");
  int2 pair = make_int2(0, 0);
  uint32_t start = 0;
  for (int at = 0; at < kGroupLanes; at += kLoads) {
    Vec<T, kLaneClasses> v[kLoads];
#pragma unroll
    for (int b = 0; b < kLoads; b++) load_lane(row, col + (at + b) * kLaneClasses, v[b]);
#pragma unroll
    for (int b = 0; b < kLoads; b++) {
#pragma unroll
      for (int i = 0; i < kLaneClasses; i++) {
        const uint32_t next = start + fixed_of(row, v[b].at[i]);
        if (start <= position && position < next) {
          pair = make_int2(col + (at + b) * kLaneClasses + i,
                           __float_as_int(fmaxf(to_stat(v[b].at[i]), row.threshold)));
        }
        start = next;
      }
    }
  }
  return pair;
}

/* The pair of the draw at `position` of the row's prefix sums, which is below their total. */
template <typename T, int kGroupLanes>
__device__ __forceinline__ int2 draw_at(const SampledRow<T>& row, const RowSums<kGroupLanes>& sums,
                                        int segments, uint64_t position) {
  const int segment = segment_of(sums.starts, segments, position);
  uint64_t rest = position - sums.starts[segment];
  int group = segment * kSegmentGroups;
  while (rest >= sums.groups[group]) rest -= sums.groups[group++];
  return find_in_group<T, kGroupLanes>(row, group * RowSums<kGroupLanes>::kGroup, (uint32_t)rest);
}

/* Writes pair 0 of a list, and zeros after its `count` entries. */
__device__ __forceinline__ void write_head_and_zeros(int2* list, int target, int count, int pitch) {
  if (threadIdx.x == 0) *list = make_int2(target, count);
  for (int m = 1 + count + (int)threadIdx.x; m < pitch / 2; m += kSampleThreads) {
    list[m] = make_int2(0, 0);
  }
}

template <typename T, int kGroupLanes>
__global__ void __launch_bounds__(kSampleThreads)
    sample_rows(const __grid_constant__ sample_args p) {
  __shared__ RowSums<kGroupLanes> sums;
  pdl_wait();
  const RowRef ref = row_ref_of(p.r, blockIdx.x);
  int2* list = (int2*)(p.lists + (int64_t)blockIdx.x * p.pitch);
  if (ref.kind != kRowValid) {
    /* The target that problem.h gives such a list. */
    write_head_and_zeros(list, ref.kind == kRowOutOfRange ? 0 : -1, 0, p.pitch);
    return;
  }
  const float inv_sum = ((const float*)p.r.stats)[FLCE_STAT_INV_SUM * p.r.stat_pitch + ref.at];
  const SampledRow<T> row = {(const T*)p.r.out + (int64_t)blockIdx.x * p.r.out_pitch,
                             (int)p.r.vocab, inv_sum * p.inverse_eps, p.eps / inv_sum};
  const int kSegment = RowSums<kGroupLanes>::kSegment;
  const int segments = (row.vocab + kSegment - 1) / kSegment;
  sum_groups(row, sums);
  __syncthreads();
  scan_segments(sums, segments);
  const uint32_t drawn = flce_philox((uint64_t)p.seed[0], (uint64_t)(p.first_token + ref.at)) >>
                         (32 - FLCE_SAMPLE_BITS);
  const uint64_t total = sums.starts[segments];
  const uint64_t draws = total > drawn ? (total - drawn + kFixedOne - 1) >> FLCE_SAMPLE_BITS : 0;
  const int count = (int)(draws < (uint64_t)p.most ? draws : (uint64_t)p.most);
  for (int m = threadIdx.x; m < count; m += kSampleThreads) {
    list[1 + m] = draw_at(row, sums, segments, ((uint64_t)m << FLCE_SAMPLE_BITS) + drawn);
  }
  write_head_and_zeros(list, (int)p.r.target[ref.at], count, p.pitch);
}

/* The kernel with the smallest groups whose sums fit. */
template <typename T>
static flce_status launch_sample_rows(void* self, const sample_args& args) {
  static_assert(FLCE_SAMPLE_CLASSES <= kSegments * RowSums<16>::kSegment, "the sums fit");
  const bool small = args.r.vocab <= kSegments * RowSums<4>::kSegment;
  const auto kernel = small ? sample_rows<T, 4> : sample_rows<T, 16>;
  return launch_dependent(self, kernel, (unsigned)args.r.rows, kSampleThreads, "sample_rows", args);
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
  if (r->vocab <= FLCE_SAMPLE_CLASSES && r->out_dtype == FLCE_F32) {
    return launch_sample_rows<float>(self, args);
  }
  if (r->vocab <= FLCE_SAMPLE_CLASSES && r->out_dtype == FLCE_BF16) {
    return launch_sample_rows<__nv_bfloat16>(self, args);
  }
  return flce_fail(FLCE_UNSUPPORTED, "sample_rows: no CUDA kernel for %lld classes in %s",
                   (long long)r->vocab, flce_dtype_name(r->out_dtype));
}
