/* class_logits and class_gradients: logits of a few classes of each row, and their gradients. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/reductions.cuh"
#include "cuda/common/row_status.cuh"
#include "cuda/common/vectors.cuh"

enum {
  kDotThreads = 256,
  kDotWarps = kDotThreads / kWarp,
  kLoads = 4, /* vectors of W that a lane has in flight */
  kMostGradThreads = 256,
  kFilterBits = 4096,
};

/* Where a class of a row is: its column on this rank, or one of these. */
enum { kColumnElsewhere = -1, kColumnInvalid = -2 };

__device__ __forceinline__ int64_t column_of_class(const flce_rows& r, int64_t id) {
  if (id == r.classes.none) return kColumnElsewhere;
  if (id < 0 || id >= r.classes.all) return kColumnInvalid;
  const int64_t column = id - r.classes.first;
  return column >= 0 && column < r.vocab ? column : kColumnElsewhere;
}

/* ---- logits ---- */

/* The arguments of class_logits (backend.h). */
typedef struct class_logits_args {
  flce_rows r;
  void* out;
  const void *x, *w, *bias;
  int64_t hidden;
  flce_dtype rounded;
} class_logits_args;

/* The sum of x[k] w[k] over a warp's lanes, which read N elements at a time. */
template <typename T, int N, typename S = stat_t<T>>
__device__ __forceinline__ S warp_dot(const T* x, const T* w, int64_t hidden) {
  const int lane = threadIdx.x % kWarp;
  S sum = 0;
  for (int64_t first = 0; first < hidden; first += kLoads * kWarp * N) {
    Vec<T, N> a[kLoads], b[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      const int64_t k = first + (i * kWarp + lane) * N;
      if (k >= hidden) continue;
      load_vec<false>(w + k, b[i]);
      load_vec<false>(x + k, a[i]);
    }
#pragma unroll
    for (int i = 0; i < kLoads; i++) {
      if (first + (i * kWarp + lane) * N >= hidden) continue;
      S u[N], v[N];
      unpack(a[i], u);
      unpack(b[i], v);
#pragma unroll
      for (int e = 0; e < N; e++) sum = fma(u[e], v[e], sum);
    }
  }
  return warp_sum(sum);
}

/* z as the logits GEMM rounds it. */
template <typename T, typename S>
__device__ __forceinline__ S rounded_to(S z, flce_dtype dtype) {
  const bool rounds = sizeof(T) == 2 && dtype != FLCE_F32;
  return rounds ? (S)to_stat(from_stat<T>(z)) : z;
}

/* A block for each row, a warp for every kDotWarps-th of its classes. */
template <typename T, int N>
__global__ void __launch_bounds__(kDotThreads)
    class_logits(const __grid_constant__ class_logits_args p) {
  using S = stat_t<T>;
  pdl_wait();
  const int64_t row = blockIdx.x, count = p.r.classes.count;
  const RowRef ref = row_ref_of(p.r, row);
  const int64_t* ids = p.r.classes.ids + row * count;
  S* out = (S*)p.out + row * count;
  for (int64_t k = threadIdx.x / kWarp; k < count; k += kDotWarps) {
    const int64_t column = column_of_class(p.r, ids[k]);
    S z = blank_of<S>(ref);
    if (ref.kind == kRowValid && column >= 0) {
      z = warp_dot<T, N>((const T*)p.x + row * p.hidden, (const T*)p.w + column * p.hidden,
                         p.hidden);
      z = rounded_to<T>(z, p.rounded);
      if (p.bias) z += ((const S*)p.bias)[column];
    }
    if (ref.kind == kRowValid && column == kColumnInvalid) z = (S)NAN;
    if (threadIdx.x % kWarp == 0) out[k] = z;
  }
}

flce_status cuda_class_logits(void* self, const flce_class_logits_args* call) {
  const flce_rows* r = call->rows;
  if (r->rows == 0 || r->classes.count == 0) return FLCE_OK;
  FLCE_TRY(check_grid(r->rows, "class_logits"));
  const class_logits_args args = {*r,         call->out,    call->x,      call->w,
                                  call->bias, call->hidden, call->rounded};
  FLCE_WITH_TYPE(call->dtype, T, {
    constexpr int N = kVec<T>;
    const bool vectors = call->hidden % N == 0 && both_aligned(call->x, call->w);
    const auto kernel = vectors ? class_logits<T, N> : class_logits<T, 1>;
    FLCE_TRY(launch_dependent(self, kernel, (unsigned)r->rows, kDotThreads, "class_logits", args));
  });
  return FLCE_OK;
}

/* ---- gradients ---- */

/* Bits of the ids modulo kFilterBits: of a row's ids, and of those that two or more of them share.
 * A row of different classes then needs no search for equal ones. */
struct IdFilter {
  unsigned seen[kFilterBits / 32], again[kFilterBits / 32];
};

__device__ __forceinline__ void fill_filter(const int64_t* ids, int64_t count, IdFilter& filter) {
  for (int i = threadIdx.x; i < kFilterBits / 32; i += blockDim.x)
    filter.seen[i] = filter.again[i] = 0;
  __syncthreads();
  for (int64_t k = threadIdx.x; k < count; k += blockDim.x) {
    const unsigned at = (uint64_t)ids[k] % kFilterBits, bit = 1u << at % 32;
    if (atomicOr(&filter.seen[at / 32], bit) & bit) atomicOr(&filter.again[at / 32], bit);
  }
  __syncthreads();
}

/* The sum of the gradients of all classes of the row that equal that of index k, in their order, if
 * k is the first of them. Summed here, because a 16-bit dz would round after each. */
template <typename S>
__device__ __forceinline__ bool sum_of_equal(const int64_t* ids, const S* grads, int64_t count,
                                             int64_t k, const IdFilter& filter, S& sum) {
  const int64_t id = ids[k];
  const unsigned at = (uint64_t)id % kFilterBits;
  sum = grads[k];
  if ((filter.again[at / 32] >> at % 32 & 1) == 0) return true;
  for (int64_t j = 0; j < k; j++) {
    if (ids[j] == id) return false;
  }
  for (int64_t j = k + 1; j < count; j++) {
    if (ids[j] == id) sum += grads[j];
  }
  return true;
}

/* A block for each row, a thread for each of its classes: no two write the same column. */
template <typename T>
__global__ void __launch_bounds__(kMostGradThreads)
    class_gradients(const __grid_constant__ flce_rows r, const float* scale) {
  using S = stat_t<T>;
  __shared__ IdFilter filter;
  const int64_t count = r.classes.count;
  pdl_wait();
  const RowRef ref = row_ref_of(r, blockIdx.x);
  if (ref.kind != kRowValid) return;
  const int64_t* ids = r.classes.ids + ref.at * count;
  const S* grads = (const S*)r.classes.grads + ref.at * count;
  const S factor = scale ? (S)(1 / scale[0]) : (S)1;
  T* dz = (T*)r.out + (int64_t)blockIdx.x * r.out_pitch;
  bool invalid = false;
  fill_filter(ids, count, filter);
  for (int64_t k = threadIdx.x; k < count; k += blockDim.x) {
    const int64_t column = column_of_class(r, ids[k]);
    invalid |= column == kColumnInvalid;
    S sum;
    if (column >= 0 && sum_of_equal(ids, grads, count, k, filter, sum))
      dz[column] = from_stat<T>((S)to_stat(dz[column]) + factor * sum);
  }
  if (__syncthreads_or(invalid) && threadIdx.x == 0) dz[0] = from_stat<T>((S)NAN);
}

flce_status cuda_class_gradients(void* self, const flce_rows* r, const float* scale) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  FLCE_TRY(check_grid(r->rows, "class_gradients"));
  const int threads = threads_for(r->classes.count, kMostGradThreads);
  FLCE_WITH_TYPE(r->out_dtype, T, {
    FLCE_TRY(launch_dependent(self, class_gradients<T>, (unsigned)r->rows, threads,
                              "class_gradients", *r, scale));
  });
  return FLCE_OK;
}
