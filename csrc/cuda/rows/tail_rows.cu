/* tail_rows: the logsumexp of the logits of each row without a few classes. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/rows/row_classes.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/rows/statistics.cuh"

/* Columns whose membership in the row's classes is in shared memory at a time, as bits. */
enum { kMaskColumns = 1 << 16 };

/* The sum of exp(l - shift) over a thread's columns; `top` is their largest l, and shift is top, or
 * 0 while that is -inf. */
template <typename S>
struct TailSum {
  S top, sum;
};

template <typename S, int N>
__device__ __forceinline__ void add_logits(const S (&l)[N], TailSum<S>& tail) {
  S highest = -infinity_of(S(0));
#pragma unroll
  for (int e = 0; e < N; e++) highest = fmax(highest, l[e]);
  if (highest > tail.top) {
    if (tail.sum != 0) tail.sum *= exp(offset_of(tail.top) - highest);
    tail.top = highest;
  }
  const S shift = offset_of(tail.top);
#pragma unroll
  for (int e = 0; e < N; e++) tail.sum += exp(l[e] - shift);
}

/* Sets the bits of the row's classes in columns [first, first + kMaskColumns). Returns whether this
 * thread has seen a class that does not exist. */
__device__ __forceinline__ bool mark_classes(const flce_rows& r, int64_t at, int first,
                                             unsigned* mask) {
  bool invalid = false;
  for (int i = threadIdx.x; i < kMaskColumns / 32; i += blockDim.x) mask[i] = 0;
  __syncthreads();
  for (int64_t k = threadIdx.x; k < r.classes.count; k += blockDim.x) {
    const int64_t column = column_of_class(r, r.classes.ids[at * r.classes.count + k]);
    invalid |= column == kColumnInvalid;
    const int64_t bit = column - first;
    if (column >= 0 && bit >= 0 && bit < kMaskColumns) {
      atomicOr(&mask[bit / 32], 1u << bit % 32);
    }
  }
  __syncthreads();
  return invalid;
}

/* Adds this thread's vectors of columns [first, first + kMaskColumns). */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void add_columns(const Row<Z>& row, int first, const unsigned* mask,
                                            TailSum<S>& tail) {
  constexpr int N = kVec<Z>;
  const int end = min(row.vocab - first, (int)kMaskColumns);
  for (int begin = threadIdx.x * N; begin < end; begin += blockDim.x * N) {
    Vec<Z, N> raw;
    S l[N], slope[N];
#pragma unroll
    for (int e = 0; e < N; e++) {
      const int column = first + begin + e;
      raw.at[e] = column < row.vocab ? row.z[column] : from_stat<Z>(-INFINITY);
    }
    logits_of<false>(row, raw, first + begin, l, slope);
#pragma unroll
    for (int e = 0; e < N; e++) {
      const bool excluded = mask[(begin + e) / 32] >> (begin + e) % 32 & 1;
      if (excluded || first + begin + e >= row.vocab) l[e] = -infinity_of(S(0));
    }
    add_logits(l, tail);
  }
}

/* A block for each row. */
template <typename Z>
__global__ void __launch_bounds__(kRowThreads) tail_rows(const __grid_constant__ row_args p) {
  using S = stat_t<Z>;
  __shared__ S scratch[kMaxWarps];
  __shared__ unsigned mask[kMaskColumns / 32];
  const flce_rows& r = p.r;
  pdl_wait();
  const RowRef ref = row_ref_of(r, blockIdx.x);
  if (ref.kind == kRowAbsent) return;
  S lse = blank_of<S>(ref);
  if (ref.kind == kRowValid) {
    const Row<Z> row = open_row_view<kGeneral, Z>(p, ref.at);
    TailSum<S> tail = {-infinity_of(S(0)), 0};
    bool invalid = false;
    for (int first = 0; first < row.vocab; first += kMaskColumns) {
      invalid |= mark_classes(r, ref.at, first, mask);
      add_columns(row, first, mask, tail);
      __syncthreads(); /* the next columns overwrite the mask */
    }
    const S top = block_max(tail.top, scratch), shift = offset_of(top);
    if (tail.sum != 0) tail.sum *= exp(offset_of(tail.top) - shift);
    lse = shift + log(block_sum(tail.sum, scratch));
    if (__syncthreads_or(invalid)) lse = (S)NAN;
  }
  if (threadIdx.x == 0) stat_row<S>(r, FLCE_STAT_TAIL_LSE)[ref.at] = lse;
}

flce_status cuda_tail_rows(void* self, const flce_rows* r) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  FLCE_TRY(check_rows(r, "tail_rows"));
  const row_args args = make_args(r);
  FLCE_WITH_TYPE(r->z_dtype, T, {
    FLCE_TRY(
        launch_dependent(self, tail_rows<T>, (unsigned)r->rows, row_threads(r), "tail_rows", args));
  });
  return FLCE_OK;
}
