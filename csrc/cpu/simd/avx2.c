/* The row and block kernels in AVX2 with FMA and F16C: 8 floats per register; partial vectors go
 * through a stack buffer. */
#include "cpu/simd/row_kernels.h"

#if FLCE_CPU_X86
#pragma GCC target("avx2,fma,f16c")
#include <float.h>
#include <immintrin.h>
#include <math.h>
#include <string.h>

#define VARIANT(name) flce_avx2_##name
#define INLINE static inline __attribute__((always_inline))
#define LANES 8
typedef __m256 vec;

INLINE vec vec_set(float x) {
  return _mm256_set1_ps(x);
}
INLINE vec vec_add(vec a, vec b) {
  return _mm256_add_ps(a, b);
}
INLINE vec vec_sub(vec a, vec b) {
  return _mm256_sub_ps(a, b);
}
INLINE vec vec_mul(vec a, vec b) {
  return _mm256_mul_ps(a, b);
}
INLINE vec vec_max(vec a, vec b) {
  return _mm256_max_ps(a, b);
}
INLINE vec vec_min(vec a, vec b) {
  return _mm256_min_ps(a, b);
}
INLINE vec vec_fma(vec a, vec b, vec c) {
  return _mm256_fmadd_ps(a, b, c);
}
INLINE vec vec_fnma(vec a, vec b, vec c) {
  return _mm256_fnmadd_ps(a, b, c);
}

INLINE vec vec_flush(vec x) {
  vec magnitude = _mm256_andnot_ps(vec_set(-0.0f), x);
  return _mm256_and_ps(x, _mm256_cmp_ps(magnitude, vec_set(FLT_MIN), _CMP_NLT_UQ));
}

INLINE vec vec_round(vec x) {
  return _mm256_round_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

/* 2^n is built from its bit pattern; n is in [-126, 0] in the lanes that the mask keeps. */
INLINE vec vec_scale(vec p, vec n, vec x, float lowest) {
  __m256i biased = _mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127));
  vec power = _mm256_castsi256_ps(_mm256_slli_epi32(biased, 23));
  return _mm256_and_ps(vec_mul(p, power), _mm256_cmp_ps(x, vec_set(lowest), _CMP_NLT_UQ));
}

INLINE vec widen(__m128i half, flce_dtype dtype) {
  if (dtype == FLCE_F16) return _mm256_cvtph_ps(half);
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
}

INLINE __m128i narrow(vec x, flce_dtype dtype) {
  if (dtype == FLCE_F16) return _mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m256i bits = _mm256_castps_si256(x);
  __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
  __m256i rounded = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
  __m256i nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
  rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc00000), nan);
  __m256i high = _mm256_srli_epi32(rounded, 16);
  return _mm_packus_epi32(_mm256_castsi256_si128(high), _mm256_extracti128_si256(high, 1));
}

INLINE vec vec_load(const void* data, flce_dtype dtype, int64_t j) {
  if (dtype == FLCE_F32) return _mm256_loadu_ps((const float*)data + j);
  return widen(_mm_loadu_si128((const __m128i_u*)((const uint16_t*)data + j)), dtype);
}

INLINE void vec_store(void* data, flce_dtype dtype, int64_t j, vec x) {
  if (dtype == FLCE_F32)
    _mm256_storeu_ps((float*)data + j, x);
  else
    _mm_storeu_si128((__m128i_u*)((uint16_t*)data + j), narrow(x, dtype));
}

INLINE vec vec_load_part(const void* data, flce_dtype dtype, int64_t j, int64_t count, float fill) {
  size_t size = dtype == FLCE_F32 ? 4 : 2;
  float buffer[LANES] = {0};
  memcpy(buffer, (const char*)data + (size_t)j * size, (size_t)count * size);
  __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  __m256i inside = _mm256_cmpgt_epi32(_mm256_set1_epi32((int)count), lane);
  return _mm256_blendv_ps(vec_set(fill), vec_load(buffer, dtype, 0), _mm256_castsi256_ps(inside));
}

INLINE void vec_store_part(void* data, flce_dtype dtype, int64_t j, vec x, int64_t count) {
  size_t size = dtype == FLCE_F32 ? 4 : 2;
  float buffer[LANES];
  vec_store(buffer, dtype, 0, x);
  memcpy((char*)data + (size_t)j * size, buffer, (size_t)count * size);
}

#include "cpu/simd/vector.h"
#endif
