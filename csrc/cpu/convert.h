/* Conversion of one element of any dtype to and from double, in portable C. */
#ifndef FLCE_CPU_CONVERT_H
#define FLCE_CPU_CONVERT_H

#include "flce.h"

#include <string.h>

static inline uint32_t flce_bits_of(float value) {
  uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  return bits;
}

static inline float flce_float_of(uint32_t bits) {
  float value;
  memcpy(&value, &bits, sizeof value);
  return value;
}

static inline float flce_from_bf16(uint16_t half) {
  return flce_float_of((uint32_t)half << 16);
}

static inline uint16_t flce_to_bf16(float value) {
  if (value != value) return 0x7fc0; /* the rounding below could turn a NaN into -0 */
  uint32_t bits = flce_bits_of(value);
  return (uint16_t)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

static inline float flce_from_f16(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000) << 16;
  uint32_t exponent = (half >> 10) & 31, mantissa = half & 0x3ff;
  if (exponent == 0) return flce_float_of(flce_bits_of((float)mantissa * 0x1p-24f) | sign);
  if (exponent == 31) return flce_float_of(sign | 0x7f800000 | mantissa << 13);
  return flce_float_of(sign | (exponent + 112) << 23 | mantissa << 13);
}

static inline uint16_t flce_to_f16(float value) {
  uint32_t bits = flce_bits_of(value);
  uint32_t sign = (bits >> 16) & 0x8000, magnitude = bits & 0x7fffffff;
  if (magnitude > 0x7f800000) return (uint16_t)(sign | 0x7e00);
  if (magnitude >= 0x477ff000)
    return (uint16_t)(sign | 0x7c00); /* 65520 and above rounds to infinity */
  if (magnitude < 0x38800000) {
    /* Subnormal in float16: adding 0.5, whose last float32 bit is 2^-24, rounds to a multiple of
     * the smallest float16 subnormal. */
    float shifted = flce_float_of(magnitude) + 0.5f;
    return (uint16_t)(sign | (flce_bits_of(shifted) - flce_bits_of(0.5f)));
  }
  uint32_t rebased = magnitude - (112u << 23);
  return (uint16_t)(sign | ((rebased + 0xfff + ((rebased >> 13) & 1)) >> 13));
}

static inline double flce_load(const void* data, flce_dtype dtype, int64_t i) {
  switch (dtype) {
    case FLCE_F64:
      return ((const double*)data)[i];
    case FLCE_F32:
      return ((const float*)data)[i];
    case FLCE_BF16:
      return flce_from_bf16(((const uint16_t*)data)[i]);
    case FLCE_F16:
      return flce_from_f16(((const uint16_t*)data)[i]);
  }
  return 0.0;
}

static inline void flce_store(void* data, flce_dtype dtype, int64_t i, double value) {
  switch (dtype) {
    case FLCE_F64:
      ((double*)data)[i] = value;
      break;
    case FLCE_F32:
      ((float*)data)[i] = (float)value;
      break;
    case FLCE_BF16:
      ((uint16_t*)data)[i] = flce_to_bf16((float)value);
      break;
    case FLCE_F16:
      ((uint16_t*)data)[i] = flce_to_f16((float)value);
      break;
  }
}

/* The address of element i. */
static inline void* flce_at(void* data, flce_dtype dtype, int64_t i) {
  return (char*)data + i * flce_size_of(dtype);
}
static inline const void* flce_const_at(const void* data, flce_dtype dtype, int64_t i) {
  return (const char*)data + i * flce_size_of(dtype);
}

static inline void flce_fill(void* data, flce_dtype dtype, double value, int64_t count) {
  if (value == 0.0)
    memset(data, 0, (size_t)(count * flce_size_of(dtype)));
  else
    for (int64_t i = 0; i < count; i++) flce_store(data, dtype, i, value);
}

#endif
