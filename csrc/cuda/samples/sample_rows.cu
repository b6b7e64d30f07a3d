/* sample_rows: draws the entries of each row's list from its E (problem.h), a block for each row.
 * The first sweep reads E and keeps the sums of groups of classes in shared memory. Then each
 * thread makes a draw of its own: it reads again the one group in which the draw falls. With more
 * than FLCE_NARROW_CLASSES classes (WideSums) the groups are larger, and a warp makes a draw. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/reductions.cuh"
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
  kWideGroups = 4096, /* of a row of WideSums, at most */
};

/* The arguments of sample_rows (backend.h). */
typedef struct sample_args {
  flce_rows r;
  int32_t* lists;
  const int64_t* seed;
  int64_t first_token;
  float inverse_eps;
  int pitch; /* leading dimension of the lists, in int32 */
  int most;  /* pairs of a list after the first */
} sample_args;

/* A row of E, and 1 / (eps S). The columns, at most kMaxVocab, are counted in 32 bits. */
template <typename T>
struct SampledRow {
  const T* e;
  int vocab;
  float inverse_threshold;
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

/* q = min(1, |E| / (eps S)) in fixed point of FLCE_NARROW_BITS (F uint32_t) or FLCE_WIDE_BITS. */
template <typename F, typename T>
__device__ __forceinline__ F fixed_of(const SampledRow<T>& row, T e) {
  const float q = fminf(fabsf(to_stat(e)) * row.inverse_threshold, 1.0f);
  if constexpr (sizeof(F) == 4) {
    return __float2uint_rn(q * (float)(1u << FLCE_NARROW_BITS));
  } else {
    return __float2ull_rn(q * (float)(1ull << FLCE_WIDE_BITS));
  }
}

template <typename F, typename T>
__device__ __forceinline__ F fixed_sum(const SampledRow<T>& row, const Vec<T, kLaneClasses>& v) {
  F sum = 0;
#pragma unroll
  for (int i = 0; i < kLaneClasses; i++) sum += fixed_of<F>(row, v.at[i]);
  return sum;
}

/* If `position` is in the part of the prefix sums of one of the lane's classes, which begin at
 * `col` and at `start` of the sums, sets `pair` to the class and its E. Returns where they end. */
template <typename F, typename T>
__device__ __forceinline__ F find_in_lane(const SampledRow<T>& row, const Vec<T, kLaneClasses>& v,
                                          int col, F start, F position, int2& pair) {
#pragma unroll
  for (int i = 0; i < kLaneClasses; i++) {
    const F next = start + fixed_of<F>(row, v.at[i]);
    if (start <= position && position < next) {
      pair = make_int2(col + i, __float_as_int(to_stat(v.at[i])));
    }
    start = next;
  }
  return start;
}

/* The last segment or group that starts at or before `position`. */
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

/* Writes to starts[0] to starts[count] the sums of all sum_of(s) before; that of s may be in
 * starts[s]. Returns the last, the total. */
template <typename SumOf>
__device__ __forceinline__ uint64_t write_starts(uint64_t* starts, int count, SumOf sum_of) {
  using Scan = cub::BlockScan<uint64_t, kSampleThreads>;
  __shared__ typename Scan::TempStorage scratch;
  uint64_t before = 0;
  for (int first = 0; first < count; first += kSampleThreads) {
    const int s = first + (int)threadIdx.x;
    uint64_t start, total;
    Scan(scratch).ExclusiveSum(s < count ? sum_of(s) : 0, start, total);
    if (s < count) starts[s] = before + start;
    before += total;
    __syncthreads(); /* the next scan writes `scratch` */
  }
  if (threadIdx.x == 0) starts[count] = before;
  __syncthreads();
  return before;
}

/* ---- up to FLCE_NARROW_CLASSES classes ---- */

/* The sums of a row in shared memory. A group's classes are those of kGroupLanes lanes of a load;
 * its sum is below 2^32, as each class adds at most 2^23. */
template <int kGroupLanes>
struct RowSums {
  enum {
    kBits = FLCE_NARROW_BITS,
    kGroup = kGroupLanes * kLaneClasses,
    kSegment = kSegmentGroups * kGroup,
  };
  uint32_t groups[kSegments * kSegmentGroups];
  uint64_t starts[kSegments + 1]; /* prefix sums of the segments; the last is the total */
};

template <int kGroupLanes, typename T>
__device__ __forceinline__ int segments_of(const SampledRow<T>& row) {
  return (row.vocab + RowSums<kGroupLanes>::kSegment - 1) / RowSums<kGroupLanes>::kSegment;
}

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
      uint32_t sum = fixed_sum<uint32_t>(row, v[b]);
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

/* Makes the sums of a row; returns the total. */
template <typename T, int kGroupLanes>
__device__ __forceinline__ uint64_t add_up(const SampledRow<T>& row, RowSums<kGroupLanes>& sums) {
  sum_groups(row, sums);
  __syncthreads();
  return write_starts(sums.starts, segments_of<kGroupLanes>(row), [&](int s) {
    uint64_t sum = 0;
#pragma unroll 1
    for (int g = 0; g < kSegmentGroups; g++) sum += sums.groups[s * kSegmentGroups + g];
    return sum;
  });
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
      start = find_in_lane(row, v[b], col + (at + b) * kLaneClasses, start, position, pair);
    }
  }
  return pair;
}

/* The pair of the draw at `position` of the row's prefix sums, which is below their total. */
template <typename T, int kGroupLanes>
__device__ __forceinline__ int2 draw_at(const SampledRow<T>& row, const RowSums<kGroupLanes>& sums,
                                        uint64_t position) {
  const int segment = segment_of(sums.starts, segments_of<kGroupLanes>(row), position);
  uint64_t rest = position - sums.starts[segment];
  int group = segment * kSegmentGroups;
  while (rest >= sums.groups[group]) rest -= sums.groups[group++];
  return find_in_group<T, kGroupLanes>(row, group * RowSums<kGroupLanes>::kGroup, (uint32_t)rest);
}

/* Writes `count` pairs, of the draws at `drawn` and every 2^kBits from there. */
template <typename T, int kGroupLanes>
__device__ __forceinline__ void draw_pairs(const SampledRow<T>& row,
                                           const RowSums<kGroupLanes>& sums, uint64_t drawn,
                                           int count, int2* pairs) {
  for (int m = threadIdx.x; m < count; m += kSampleThreads) {
    pairs[m] = draw_at(row, sums, ((uint64_t)m << FLCE_NARROW_BITS) + drawn);
  }
}

/* ---- any number of classes ---- */

/* The prefix sums of the groups of a row in shared memory; the last is the total. */
struct WideSums {
  enum { kBits = FLCE_WIDE_BITS };
  uint64_t starts[kWideGroups + 1];
};

/* Classes of a group: whole rounds of a warp's loads. */
template <typename T>
__device__ __forceinline__ int wide_group_of(const SampledRow<T>& row) {
  const int round = kLoads * kLoadClasses, least = (row.vocab + kWideGroups - 1) / kWideGroups;
  return (least + round - 1) / round * round;
}

/* As for RowSums; a warp adds a group. */
template <typename T>
__device__ __forceinline__ uint64_t add_up(const SampledRow<T>& row, WideSums& sums) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, size = wide_group_of(row);
  const int groups = (row.vocab + size - 1) / size;
  for (int group = warp; group < groups; group += kSampleWarps) {
    uint64_t sum = 0;
    for (int at = lane * kLaneClasses; at < size; at += kLoads * kLoadClasses) {
      Vec<T, kLaneClasses> v[kLoads];
#pragma unroll
      for (int b = 0; b < kLoads; b++) {
        load_lane(row, group * size + at + b * kLoadClasses, v[b]);
      }
#pragma unroll
      for (int b = 0; b < kLoads; b++) sum += fixed_sum<uint64_t>(row, v[b]);
    }
    sum = warp_sum(sum);
    if (lane == 0) sums.starts[group] = sum;
  }
  __syncthreads();
  return write_starts(sums.starts, groups, [&](int s) { return sums.starts[s]; });
}

/* The sum over the warp's lanes before this one. */
__device__ __forceinline__ uint64_t warp_sum_before(uint64_t own) {
  const int lane = threadIdx.x % kWarp;
  uint64_t sum = own;
#pragma unroll
  for (int step = 1; step < kWarp; step *= 2) {
    const uint64_t other = __shfl_up_sync(0xffffffffu, sum, step);
    if (lane >= step) sum += other;
  }
  return sum - own;
}

/* As for RowSums; a warp makes a draw: it adds its group again, load by load, to the one in which
 * the draw falls. */
template <typename T>
__device__ __forceinline__ void draw_pairs(const SampledRow<T>& row, const WideSums& sums,
                                           uint64_t drawn, int count, int2* pairs) {
  const int warp = threadIdx.x / kWarp, lane = threadIdx.x % kWarp, size = wide_group_of(row);
  const int groups = (row.vocab + size - 1) / size;
  for (int m = warp; m < count; m += kSampleWarps) {
    const uint64_t position = ((uint64_t)m << FLCE_WIDE_BITS) + drawn;
    const int group = segment_of(sums.starts, groups, position);
    uint64_t end = sums.starts[group]; /* where the sums of the warp's last load end */
    for (int col = group * size + lane * kLaneClasses; end <= position; col += kLoadClasses) {
      Vec<T, kLaneClasses> v;
      load_lane(row, col, v);
      const uint64_t own = fixed_sum<uint64_t>(row, v);
      const uint64_t start = end + warp_sum_before(own);
      int2 pair = make_int2(-1, 0);
      end = __shfl_sync(0xffffffffu, find_in_lane(row, v, col, start, position, pair), kWarp - 1);
      if (pair.x >= 0) pairs[m] = pair;
    }
  }
}

/* ---- a row ---- */

/* Writes pair 0 of a list, and zeros after its `count` entries. */
__device__ __forceinline__ void write_head_and_zeros(int2* list, int target, int count, int pitch) {
  if (threadIdx.x == 0) *list = make_int2(target, count);
  for (int m = 1 + count + (int)threadIdx.x; m < pitch / 2; m += kSampleThreads) {
    list[m] = make_int2(0, 0);
  }
}

template <typename T, typename Sums>
__global__ void __launch_bounds__(kSampleThreads)
    sample_rows(const __grid_constant__ sample_args p) {
  __shared__ Sums sums;
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
                             (int)p.r.vocab, inv_sum * p.inverse_eps};
  const uint64_t total = add_up(row, sums);
  const uint64_t drawn =
      flce_philox((uint64_t)p.seed[0], (uint64_t)(p.first_token + ref.at)) >> (64 - Sums::kBits);
  const uint64_t one = UINT64_C(1) << Sums::kBits;
  const uint64_t draws = total > drawn ? (total - drawn + one - 1) >> Sums::kBits : 0;
  const int count = (int)(draws < (uint64_t)p.most ? draws : (uint64_t)p.most);
  draw_pairs(row, sums, drawn, count, list + 1);
  write_head_and_zeros(list, (int)p.r.target[ref.at], count, p.pitch);
}

/* The kernel with the smallest groups whose sums fit. */
template <typename T>
static flce_status launch_sample_rows(void* self, const sample_args& args, int bits) {
  static_assert(FLCE_NARROW_CLASSES <= kSegments * RowSums<16>::kSegment, "the sums fit");
  const bool small = args.r.vocab <= kSegments * RowSums<4>::kSegment;
  const auto kernel = bits == FLCE_WIDE_BITS ? sample_rows<T, WideSums>
                      : small                ? sample_rows<T, RowSums<4>>
                                             : sample_rows<T, RowSums<16>>;
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
                            (float)(1.0 / call->eps),
                            (int)flce_sample_pitch(call->eps),
                            (int)flce_most_samples(call->eps)};
  if (r->vocab <= kMaxVocab && r->out_dtype == FLCE_F32) {
    return launch_sample_rows<float>(self, args, call->bits);
  }
  if (r->vocab <= kMaxVocab && r->out_dtype == FLCE_BF16) {
    return launch_sample_rows<__nv_bfloat16>(self, args, call->bits);
  }
  return flce_fail(FLCE_UNSUPPORTED, "sample_rows: no CUDA kernel for %lld classes in %s",
                   (long long)r->vocab, flce_dtype_name(r->out_dtype));
}
