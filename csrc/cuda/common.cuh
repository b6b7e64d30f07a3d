/* What every CUDA file needs: types, vector access, reductions in a fixed order, launch checks. */
#ifndef FLCE_CUDA_COMMON_CUH
#define FLCE_CUDA_COMMON_CUH

#include "../backend.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

/* ---- errors ---- */

static inline flce_status check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return FLCE_OK;
  cudaGetLastError(); /* the error stays behind otherwise, and fails the next launch check */
  return flce_fail(FLCE_DEVICE_ERROR, "%s: %s", what, cudaGetErrorString(error));
}

/* Returns from the calling function when the launch just made was refused. */
#define FLCE_LAUNCHED(what) FLCE_TRY(check_cuda(cudaGetLastError(), what))

/* ---- types ---- */

/* Runs the statements with T standing for the element type of `dtype`. */
#define FLCE_WITH_TYPE(dtype, T, ...)                                                         \
  switch (dtype) {                                                                            \
    case FLCE_F64: {                                                                          \
      using T = double;                                                                       \
      __VA_ARGS__;                                                                            \
    } break;                                                                                  \
    case FLCE_F32: {                                                                          \
      using T = float;                                                                        \
      __VA_ARGS__;                                                                            \
    } break;                                                                                  \
    case FLCE_BF16: {                                                                         \
      using T = __nv_bfloat16;                                                                \
      __VA_ARGS__;                                                                            \
    } break;                                                                                  \
    case FLCE_F16: {                                                                          \
      using T = __half;                                                                       \
      __VA_ARGS__;                                                                            \
    } break;                                                                                  \
    default:                                                                                  \
      return flce_fail(FLCE_UNSUPPORTED, "the CUDA backend has no element type with code %d", \
                       (int)(dtype));                                                         \
  }

/* The same for the two stat dtypes. */
#define FLCE_WITH_STAT(dtype, S, ...)                                                 \
  switch (dtype) {                                                                    \
    case FLCE_F64: {                                                                  \
      using S = double;                                                               \
      __VA_ARGS__;                                                                    \
    } break;                                                                          \
    case FLCE_F32: {                                                                  \
      using S = float;                                                                \
      __VA_ARGS__;                                                                    \
    } break;                                                                          \
    default:                                                                          \
      return flce_fail(FLCE_UNSUPPORTED, "statistics are float32 or float64, got %s", \
                       flce_dtype_name(dtype));                                       \
  }

template <typename T>
struct stat_of {
  using type = float;
};
template <>
struct stat_of<double> {
  using type = double;
};
template <typename T>
using stat_t = typename stat_of<T>::type;

/* Through the stat type of the source, so that a double stays one as long as it can. */
__device__ __forceinline__ double to_stat(double v) {
  return v;
}
__device__ __forceinline__ float to_stat(float v) {
  return v;
}
__device__ __forceinline__ float to_stat(__nv_bfloat16 v) {
  return __bfloat162float(v);
}
__device__ __forceinline__ float to_stat(__half v) {
  return __half2float(v);
}

template <typename T>
__device__ __forceinline__ T from_stat(double v) {
  return (T)(float)v;
}
template <>
__device__ __forceinline__ double from_stat<double>(double v) {
  return v;
}
template <typename T>
__device__ __forceinline__ T from_stat(float v) {
  return (T)v;
}

/* ---- vectors ---- */

template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vec {
  T at[N];
};

/* Elements of one 16-byte access. */
template <typename T>
constexpr int kVec = 16 / (int)sizeof(T);

__host__ __device__ __forceinline__ bool is_aligned(const void* p, int bytes) {
  return ((uintptr_t)p & (uintptr_t)(bytes - 1)) == 0;
}

/* STREAM: read once, so the cache may drop it first. Coherent either way: rows are passed in place,
 * which the read-only path does not allow. */
template <bool STREAM, typename T, int N>
__device__ __forceinline__ void load_vec(const T* p, Vec<T, N>& v) {
  if constexpr (sizeof(v) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < (int)sizeof(v) / 16; i++) {
      const uint4* q = (const uint4*)p + i;
      ((uint4*)&v)[i] = STREAM ? __ldcs(q) : *q;
    }
  } else {
    v = *(const Vec<T, N>*)p;
  }
}

/* Written out, as the compiler splits a plain store of a vector into words where that saves it a
 * move. */
__device__ __forceinline__ void store_words(void* p, uint2 v) {
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(p)), "r"(v.x),
               "r"(v.y)
               : "memory");
}
__device__ __forceinline__ void store_words(void* p, uint4 v) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(p)),
               "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w)
               : "memory");
}

template <typename T, int N>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, N>& v) {
  if constexpr (sizeof(v) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < (int)sizeof(v) / 16; i++) store_words((uint4*)p + i, ((const uint4*)&v)[i]);
  } else if constexpr (sizeof(v) == 8) {
    store_words(p, *(const uint2*)&v);
  } else {
    *(Vec<T, N>*)p = v;
  }
}

template <typename S, typename T, int N>
__device__ __forceinline__ void unpack(const Vec<T, N>& v, S (&out)[N]) {
#pragma unroll
  for (int e = 0; e < N; e++) out[e] = (S)to_stat(v.at[e]);
}

__device__ __forceinline__ void convert_pair(float a, float b, __nv_bfloat16* out) {
  *(__nv_bfloat162*)out = __floats2bfloat162_rn(a, b);
}
__device__ __forceinline__ void convert_pair(float a, float b, __half* out) {
  *(__half2*)out = __floats2half2_rn(a, b);
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
  return *(const uint32_t*)&packed;
}

/* Rounds to nearest even; in pairs for 16 bits, where one instruction converts two. */
template <typename T, typename S, int N>
__device__ __forceinline__ void pack(const S (&in)[N], Vec<T, N>& v) {
  if constexpr (sizeof(T) == 2 && sizeof(S) == 4 && N % 2 == 0) {
#pragma unroll
    for (int e = 0; e < N; e += 2) {
      convert_pair(in[e], in[e + 1], &v.at[e]);
    }
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) v.at[e] = from_stat<T>(in[e]);
  }
}

/* N elements of any type, from or to element `index` on; N > 1 wants N elements' alignment, up to
 * 16 bytes. For passes that are not worth a kernel per type. */
template <typename S, int N>
__device__ __forceinline__ void load_any(const void* data, flce_dtype dtype, int64_t index,
                                         S (&v)[N]) {
  switch (dtype) {
    case FLCE_F64: {
      Vec<double, N> raw;
      load_vec<false>((const double*)data + index, raw);
      unpack(raw, v);
    } break;
    case FLCE_F32: {
      Vec<float, N> raw;
      load_vec<false>((const float*)data + index, raw);
      unpack(raw, v);
    } break;
    case FLCE_BF16: {
      Vec<__nv_bfloat16, N> raw;
      load_vec<false>((const __nv_bfloat16*)data + index, raw);
      unpack(raw, v);
    } break;
    case FLCE_F16: {
      Vec<__half, N> raw;
      load_vec<false>((const __half*)data + index, raw);
      unpack(raw, v);
    } break;
  }
}

template <typename T, typename S, int N>
__device__ __forceinline__ void store_as(T* p, const S (&in)[N]) {
  Vec<T, N> v;
  pack(in, v);
  store_vec(p, v);
}

template <typename S, int N>
__device__ __forceinline__ void store_any(void* data, flce_dtype dtype, int64_t index,
                                          const S (&v)[N]) {
  switch (dtype) {
    case FLCE_F64:
      store_as((double*)data + index, v);
      break;
    case FLCE_F32:
      store_as((float*)data + index, v);
      break;
    case FLCE_BF16:
      store_as((__nv_bfloat16*)data + index, v);
      break;
    case FLCE_F16:
      store_as((__half*)data + index, v);
      break;
  }
}

/* ---- reductions ---- */

enum { kWarp = 32, kMaxWarps = 32 };

/* The sum over a warp, in every lane. */
template <typename S>
__device__ __forceinline__ S warp_sum(S v) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
  return v;
}

/* The same for the maximum. A NaN is passed over. */
template <typename S>
__device__ __forceinline__ S warp_max(S v) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) {
    v = fmax(v, __shfl_xor_sync(0xffffffffu, v, lane));
  }
  return v;
}

/* The sum over the block, in an order that only the block's size decides; every thread gets it.
 * All threads of whole warps take part. */
template <typename S>
__device__ __forceinline__ S block_sum(S v, S* scratch) {
  v = warp_sum(v);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = v;
  __syncthreads();
  S sum = 0;
  for (int warp = 0; warp < (int)blockDim.x / kWarp; warp++) sum += scratch[warp];
  __syncthreads(); /* the next reduction writes `scratch` */
  return sum;
}

template <typename S>
__device__ __forceinline__ S block_max(S v, S* scratch) {
  v = warp_max(v);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = v;
  __syncthreads();
  S top = scratch[0];
  for (int warp = 1; warp < (int)blockDim.x / kWarp; warp++) top = fmax(top, scratch[warp]);
  __syncthreads();
  return top;
}

/* ---- rows ---- */

enum RowKind { kRowValid, kRowIgnored, kRowOutOfRange, kRowAbsent };

/* Where the vectors of a computed row are, and what its target says. */
struct Place {
  int64_t at; /* -1: nowhere */
  RowKind kind;
};

__device__ __forceinline__ int64_t vectors_at(const flce_rows& r, int64_t row) {
  return r.index ? r.index[row] : row;
}

/* `y`: the target at `at`, where there is one. */
__device__ __forceinline__ Place place_at(const flce_rows& r, int64_t at, int64_t y) {
  if (at < 0) return {at, kRowAbsent};
  if (!r.target) return {at, kRowValid}; /* probabilities */
  if (y == r.options.ignore_index) return {at, kRowIgnored};
  return {at, y >= 0 && y < r.vocab ? kRowValid : kRowOutOfRange};
}

__device__ __forceinline__ int64_t target_at(const flce_rows& r, int64_t at) {
  return r.target && at >= 0 ? r.target[at] : 0;
}

__device__ __forceinline__ Place place_of(const flce_rows& r, int64_t row) {
  const int64_t at = vectors_at(r, row);
  return place_at(r, at, target_at(r, at));
}

/* What stands for the results of a row that is not valid. */
template <typename S>
__device__ __forceinline__ S blank_of(Place place) {
  return place.kind == kRowOutOfRange ? (S)NAN : (S)0;
}

/* Statistics, loss and prediction of a row that has none: `value` is 0 or NaN. */
template <typename S>
__device__ __forceinline__ void write_blank(const flce_rows& r, int64_t at, S value) {
  for (int which = 0; which < FLCE_STAT_ROWS; which++) {
    ((S*)r.stats)[which * r.stat_pitch + at] = value;
  }
  if (r.loss) ((S*)r.loss)[at] = value;
  if (r.predictions) r.predictions[at] = -1;
}

/* What a valid row's factors for the gradient are made of: of enum flce_stat_row. */
template <typename S>
struct RowStatistics {
  S lse, nll, inv_sum, slope, mass;
};

/* Whether blank_rows has to write row `at`, and what: 0 or NaN. Both counts are rounded alike, so
 * that a bound that holds is never exceeded by rounding; INV_DENOM was made of the exact ones. */
template <typename S>
__device__ __forceinline__ bool is_left_out(const flce_rows& r, int64_t at, int64_t bound,
                                            S* value) {
  const bool ignored = r.target && r.target[at] == r.options.ignore_index;
  *value = ignored ? (S)0 : (S)NAN;
  const S* scalars = (const S*)r.scalars;
  return ignored || scalars[FLCE_SCALAR_VALID] > (S)bound || isnan(scalars[FLCE_SCALAR_INV_DENOM]);
}

/* ---- sizes ---- */

static inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
static inline int64_t min_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static inline int64_t max_of(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* Threads for `items` pieces of work: whole warps, between one and `most`. */
static inline int threads_for(int64_t items, int most) {
  return (int)min_of(most, max_of(kWarp, ceil_div(items, kWarp) * kWarp));
}

/* Devices that something is kept for. */
enum { kMaxDevices = 64 };

static inline flce_status check_device(int index) {
  if (index >= 0 && index < kMaxDevices) return FLCE_OK;
  return flce_fail(FLCE_UNSUPPORTED, "device: expected 0 to %d, got %d", kMaxDevices - 1, index);
}

/* A grid's first dimension ends at 2^31 - 1. */
static inline flce_status check_grid(int64_t blocks, const char* what) {
  if (blocks <= INT32_MAX) return FLCE_OK;
  return flce_fail(FLCE_UNSUPPORTED, "%s: at most %d blocks in a launch, got %lld", what, INT32_MAX,
                   (long long)blocks);
}

/* ---- kernels that follow each other closely ---- */

/* From Hopper on the blocks of a launch may take their places while the kernel before it in the
 * stream ends (programmatic dependent launch): 1 us less between two small kernels. In such a
 * kernel every thread calls follow_kernels before it touches global memory or returns, or, where it
 * is launched by launch_overlapping, before it writes or returns: it waits for the results of the
 * kernels before, and lets the next one's blocks come. A kernel that did not wait would end before
 * its predecessors, and the kernel after it read what they have not written.
 * tests/check_kernels.py looks for that in the machine code. */
__device__ __forceinline__ void follow_kernels() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Whether a device and its driver can do that. */
static inline flce_status can_follow(int device, int* can) {
  static int known[kMaxDevices]; /* 1 + the answer; threads that ask at once agree */
  FLCE_TRY(check_device(device));
  const int captures = 12030; /* an older driver does not take such launches into graphs */
  int major = 0, driver = 0, found = __atomic_load_n(&known[device], __ATOMIC_RELAXED);
  if (found == 0) {
    FLCE_TRY(check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                        "launch"));
    FLCE_TRY(check_cuda(cudaDriverGetVersion(&driver), "launch"));
    found = 1 + (major >= 9 && driver >= captures);
    __atomic_store_n(&known[device], found, __ATOMIC_RELAXED);
  }
  *can = found - 1;
  return FLCE_OK;
}

static inline cudaLaunchAttribute following(int can) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = can;
  return attribute;
}

/* Launches a kernel that calls follow_kernels later. `overlaps`: it may run at the same time as the
 * kernel before it, which is one of ours, which has waited for all before it, and writes nothing
 * that this one reads. */
template <typename... Parameters, typename... Arguments>
static inline flce_status launch_overlapping(void* self, void (*kernel)(Parameters...), dim3 blocks,
                                             int threads, const char* what, bool overlaps,
                                             Arguments... arguments) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  int can;
  FLCE_TRY(can_follow(cuda->device, &can));
  if (!overlaps) can = 0;
  cudaLaunchAttribute attribute = following(can);
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3((unsigned)threads);
  config.stream = (cudaStream_t)cuda->stream;
  config.attrs = &attribute;
  config.numAttrs = (unsigned)can;
  return check_cuda(cudaLaunchKernelEx(&config, kernel, (Parameters)arguments...), what);
}

/* Launches a kernel that calls follow_kernels first. */
template <typename... Parameters, typename... Arguments>
static inline flce_status launch_next(void* self, void (*kernel)(Parameters...), dim3 blocks,
                                      int threads, const char* what, Arguments... arguments) {
  return launch_overlapping(self, kernel, blocks, threads, what, true, arguments...);
}

#endif
