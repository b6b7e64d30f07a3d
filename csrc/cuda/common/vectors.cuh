/* Vectors of elements: 16-byte loads and stores, conversion of whole vectors, and elements of a
 * dtype known at run time. */
#ifndef FLCE_CUDA_COMMON_VECTORS_CUH
#define FLCE_CUDA_COMMON_VECTORS_CUH

#include "cuda/common/types.cuh"

template <typename T, int N>
struct alignas(N * sizeof(T) < 16 ? N * sizeof(T) : 16) Vec {
  T at[N];
};

/* Elements of one 16-byte access. */
template <typename T>
constexpr int kVec = 16 / (int)sizeof(T);

/* STREAM: the data is read once, so caches may evict it first (ld.cs). Never the read-only path
 * (ld.nc), because rows are overwritten in place. */
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

/* One vector store in asm: the compiler splits a plain one into words where that saves a move. */
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

/* Two floats as bfloat16 in one word, `low` in the low half. */
__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
  const __nv_bfloat162 packed = __floats2bfloat162_rn(low, high);
  return *(const uint32_t*)&packed;
}

/* Rounds to nearest even. 16-bit elements are converted in pairs, by one instruction. */
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

/* Loads N elements of a dtype known at run time, from element `index` on. With N > 1 the address is
 * aligned to N elements, up to 16 bytes. For passes that do not justify a kernel for each type. */
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

/* The store that belongs to load_any. */
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

#endif
