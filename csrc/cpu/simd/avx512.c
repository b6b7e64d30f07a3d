/* The row and block kernels in AVX-512: 16 floats per register; partial vectors use masks. */
#include "cpu/simd/row_kernels.h"

#if FLCE_CPU_X86
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#include <float.h>
#include <immintrin.h>
#include <math.h>

#define VARIANT(name) flce_avx512_##name
#define INLINE static inline __attribute__((always_inline))
#define LANES 16
typedef __m512 vec;

INLINE vec vec_set(float x) {
  return _mm512_set1_ps(x);
}
INLINE vec vec_add(vec a, vec b) {
  return _mm512_add_ps(a, b);
}
INLINE vec vec_sub(vec a, vec b) {
  return _mm512_sub_ps(a, b);
}
INLINE vec vec_mul(vec a, vec b) {
  return _mm512_mul_ps(a, b);
}
INLINE vec vec_max(vec a, vec b) {
  return _mm512_max_ps(a, b);
}
INLINE vec vec_min(vec a, vec b) {
  return _mm512_min_ps(a, b);
}
INLINE vec vec_fma(vec a, vec b, vec c) {
  return _mm512_fmadd_ps(a, b, c);
}
INLINE vec vec_fnma(vec a, vec b, vec c) {
  return _mm512_fnmadd_ps(a, b, c);
}

INLINE vec vec_flush(vec x) {
  __mmask16 keep = _mm512_cmp_ps_mask(_mm512_abs_ps(x), vec_set(FLT_MIN), _CMP_NLT_UQ);
  return _mm512_maskz_mov_ps(keep, x);
}

INLINE vec vec_round(vec x) {
  return _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
}

INLINE vec vec_scale(vec p, vec n, vec x, float lowest) {
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, vec_set(lowest), _CMP_NLT_UQ), p, n);
}

INLINE vec widen(__m256i half, flce_dtype dtype) {
  if (dtype == FLCE_F16) return _mm512_cvtph_ps(half);
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

INLINE __m256i narrow(vec x, flce_dtype dtype) {
  if (dtype == FLCE_F16) return _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  __m512i bits = _mm512_castps_si512(x);
  __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
  __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc00000));
  return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
}

INLINE vec vec_load(const void* data, flce_dtype dtype, int64_t j) {
  if (dtype == FLCE_F32) return _mm512_loadu_ps((const float*)data + j);
  return widen(_mm256_loadu_si256((const __m256i_u*)((const uint16_t*)data + j)), dtype);
}

INLINE void vec_store(void* data, flce_dtype dtype, int64_t j, vec x) {
  if (dtype == FLCE_F32)
    _mm512_storeu_ps((float*)data + j, x);
  else
    _mm256_storeu_si256((__m256i_u*)((uint16_t*)data + j), narrow(x, dtype));
}

INLINE vec vec_load_part(const void* data, flce_dtype dtype, int64_t j, int64_t count, float fill) {
  __mmask16 mask = (__mmask16)((1u << count) - 1);
  if (dtype == FLCE_F32) return _mm512_mask_loadu_ps(vec_set(fill), mask, (const float*)data + j);
  __m256i half = _mm256_maskz_loadu_epi16(mask, (const uint16_t*)data + j);
  return _mm512_mask_mov_ps(vec_set(fill), mask, widen(half, dtype));
}

INLINE void vec_store_part(void* data, flce_dtype dtype, int64_t j, vec x, int64_t count) {
  __mmask16 mask = (__mmask16)((1u << count) - 1);
  if (dtype == FLCE_F32)
    _mm512_mask_storeu_ps((float*)data + j, mask, x);
  else
    _mm256_mask_storeu_epi16((uint16_t*)data + j, mask, narrow(x, dtype));
}

#include "cpu/simd/vector.h"
#endif
