/* class_logits: logits of a few classes of each row. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/reductions.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/rows/row_classes.cuh"

enum {
  kDotThreads = 256,
  kDotWarps = kDotThreads / kWarp,
  kLoads = 4, /* vectors of W that a lane has in flight */
};

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
