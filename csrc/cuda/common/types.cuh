/* What every CUDA file needs: error checks, dispatch on dtypes, conversion of elements, and sizes.
 * Vectors of elements are in vectors.cuh. */
#ifndef FLCE_CUDA_COMMON_TYPES_CUH
#define FLCE_CUDA_COMMON_TYPES_CUH

#include "gpu.h"

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#include <math.h>
#include <stdint.h>

/* ---- errors ---- */

static inline flce_status check_cuda(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return FLCE_OK;
  cudaGetLastError(); /* clears the error, which would otherwise fail the next launch check */
  return flce_fail(FLCE_DEVICE_ERROR, "%s: %s", what, cudaGetErrorString(error));
}

/* Returns from the calling function if the last launch failed. */
#define FLCE_LAUNCHED(what) FLCE_TRY(check_cuda(cudaGetLastError(), what))

/* The power of two u, at most 2^127, with u * top in (2^(high - 1), 2^high]; 1 if top is not a
 * positive finite number. */
static __device__ __forceinline__ double scale_for(double top, int high) {
  if (!(top > 0) || top == (double)INFINITY) return 1;
  int exponent;
  const double fraction = frexp(top, &exponent); /* in [1/2, 1) */
  const int power = (fraction == 0.5 ? high + 1 : high) - exponent;
  return ldexp(1.0, power < 127 ? power : 127); /* at most 2^127, which a float can hold */
}

/* ---- types ---- */

/* Runs the statements with T as the element type of `dtype`. */
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

/* To the stat dtype of the source: float64 stays float64, all else becomes float32. */
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

/* From a stat dtype to an element. A double goes through float to the 16-bit types. */
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

/* ---- sizes ---- */

enum { kWarp = 32, kMaxWarps = 32 };

__host__ __device__ __forceinline__ bool is_aligned(const void* p, int bytes) {
  return ((uintptr_t)p & (uintptr_t)(bytes - 1)) == 0;
}

static inline bool both_aligned(const void* a, const void* b) {
  return is_aligned(a, 16) && is_aligned(b, 16);
}

static inline int64_t ceil_div(int64_t a, int64_t b) {
  return (a + b - 1) / b;
}
static inline int64_t min_of(int64_t a, int64_t b) {
  return a < b ? a : b;
}
static inline int64_t max_of(int64_t a, int64_t b) {
  return a > b ? a : b;
}

/* Threads of a block for `items` pieces of work: whole warps, at least one, at most `most`
 * threads. */
static inline int threads_for(int64_t items, int most) {
  return (int)min_of(most, max_of(kWarp, ceil_div(items, kWarp) * kWarp));
}

/* Devices for which results of queries are cached. */
enum { kMaxDevices = 64 };

static inline flce_status check_device(int index) {
  if (index >= 0 && index < kMaxDevices) return FLCE_OK;
  return flce_fail(FLCE_UNSUPPORTED, "device: expected 0 to %d, got %d", kMaxDevices - 1, index);
}

enum { kMaxVocab = FLCE_MAX_VOCAB };

/* A grid's x dimension is at most 2^31 - 1. */
static inline flce_status check_grid(int64_t blocks, const char* what) {
  if (blocks <= INT32_MAX) return FLCE_OK;
  return flce_fail(FLCE_UNSUPPORTED, "%s: at most %d blocks in a launch, got %lld", what, INT32_MAX,
                   (long long)blocks);
}

#endif
