/* The row and block kernels in plain C: the reference for the tests of the vector kernels, and the
 * implementation for other processors. Values are held in double; if the stat dtype is float32,
 * they are rounded to it after every step, as in a vector lane. */
#include "cpu/convert.h"
#include "cpu/simd/row_kernels.h"

#include <float.h>
#include <math.h>

/* `dtype` is a constant in every call, so inlining removes the switches on it. */
#define INLINE static inline __attribute__((always_inline))

INLINE double logit(const void* z, flce_dtype dtype, const void* bias, int64_t j) {
  double value = flce_load(z, dtype, j);
  if (!bias) return value;
  flce_dtype stat = flce_stat_dtype(dtype);
  double sum = value + flce_load(bias, stat, j);
  return stat == FLCE_F64 ? sum : (float)sum;
}

INLINE double flush(double value, flce_dtype dtype) {
  return fabs(value) < (dtype == FLCE_F64 ? DBL_MIN : (double)FLT_MIN) ? 0.0 : value;
}

INLINE double exp_of(double x, flce_dtype dtype) {
  if (x > 0.0) return 1.0;
  return flush(dtype == FLCE_F64 ? exp(x) : (double)expf((float)x), dtype);
}

INLINE double max_of(const void* z, flce_dtype dtype, const void* bias, int64_t count) {
  double largest = -INFINITY;
  for (int64_t j = 0; j < count; j++) {
    double x = logit(z, dtype, bias, j);
    if (x > largest) largest = x;
  }
  return largest;
}

INLINE double exp_sum_of(void* out, const void* z, flce_dtype dtype, const void* bias,
                         double offset, int64_t count) {
  double sum = 0.0;
  for (int64_t j = 0; j < count; j++) {
    double e = exp_of(logit(z, dtype, bias, j) - offset, dtype);
    sum += e;
    if (out) flce_store(out, dtype, j, e);
  }
  return sum;
}

INLINE double weighted_gap_of(const void* z, flce_dtype dtype, const void* bias, const void* weight,
                              double offset, int64_t count) {
  flce_dtype stat = flce_stat_dtype(dtype);
  double sum = 0.0;
  for (int64_t j = 0; j < count; j++)
    sum += (weight ? flce_load(weight, stat, j) : 1.0) * (offset - logit(z, dtype, bias, j));
  return sum;
}

INLINE void grad_exp_of(void* out, const void* z, flce_dtype dtype, const void* bias, double offset,
                        double factor, const void* weight, double smooth, int64_t count) {
  flce_dtype stat = flce_stat_dtype(dtype);
  for (int64_t j = 0; j < count; j++) {
    double e = exp_of(logit(z, dtype, bias, j) - offset, dtype);
    double w = weight ? flce_load(weight, stat, j) : 1.0;
    flce_store(out, dtype, j, flush(factor * e - smooth * w, dtype));
  }
}

INLINE void grad_linear_of(void* out, const void* z, flce_dtype dtype, double factor,
                           const void* weight, double smooth, int64_t count) {
  flce_dtype stat = flce_stat_dtype(dtype);
  for (int64_t j = 0; j < count; j++) {
    double w = weight ? flce_load(weight, stat, j) : 1.0;
    flce_store(out, dtype, j, flush(factor * flce_load(z, dtype, j) - smooth * w, dtype));
  }
}

INLINE void scaled_of(void* acc, flce_dtype stat, double a, const void* x, flce_dtype dtype,
                      int64_t count) {
  for (int64_t j = 0; j < count; j++) flce_store(acc, stat, j, a * flce_load(x, dtype, j));
}

INLINE void axpy_of(void* acc, flce_dtype stat, double a, const void* x, flce_dtype dtype,
                    int64_t count) {
  for (int64_t j = 0; j < count; j++)
    flce_store(acc, stat, j, flce_load(acc, stat, j) + a * flce_load(x, dtype, j));
}

INLINE void narrow_of(void* out, flce_dtype dtype, const void* acc, flce_dtype stat,
                      int64_t count) {
  for (int64_t j = 0; j < count; j++) flce_store(out, dtype, j, flce_load(acc, stat, j));
}

#define ROW_KERNELS(name, dtype)                                                                 \
  static double max_##name(const void* z, const void* bias, int64_t count) {                     \
    return max_of(z, dtype, bias, count);                                                        \
  }                                                                                              \
  static double exp_sum_##name(void* out, const void* z, const void* bias, double offset,        \
                               int64_t count) {                                                  \
    return exp_sum_of(out, z, dtype, bias, offset, count);                                       \
  }                                                                                              \
  static double gap_##name(const void* z, const void* bias, const void* weight, double offset,   \
                           int64_t count) {                                                      \
    return weighted_gap_of(z, dtype, bias, weight, offset, count);                               \
  }                                                                                              \
  static void grad_exp_##name(void* out, const void* z, const void* bias, double offset,         \
                              double factor, const void* weight, double smooth, int64_t count) { \
    grad_exp_of(out, z, dtype, bias, offset, factor, weight, smooth, count);                     \
  }                                                                                              \
  static void grad_linear_##name(void* out, const void* z, double factor, const void* weight,    \
                                 double smooth, int64_t count) {                                 \
    grad_linear_of(out, z, dtype, factor, weight, smooth, count);                                \
  }                                                                                              \
  static const flce_row_kernels rows_##name = {max_##name, exp_sum_##name, gap_##name,           \
                                               grad_exp_##name, grad_linear_##name};

#define BLOCK_KERNELS(name, stat, dtype)                                         \
  static void scaled_##name(void* acc, double a, const void* x, int64_t count) { \
    scaled_of(acc, stat, a, x, dtype, count);                                    \
  }                                                                              \
  static void axpy_##name(void* acc, double a, const void* x, int64_t count) {   \
    axpy_of(acc, stat, a, x, dtype, count);                                      \
  }                                                                              \
  static void narrow_##name(void* out, const void* acc, int64_t count) {         \
    narrow_of(out, dtype, acc, stat, count);                                     \
  }                                                                              \
  static const flce_block_kernels blocks_##name = {scaled_##name, axpy_##name, narrow_##name};

ROW_KERNELS(f64, FLCE_F64)
ROW_KERNELS(f32, FLCE_F32)
ROW_KERNELS(bf16, FLCE_BF16)
ROW_KERNELS(f16, FLCE_F16)

BLOCK_KERNELS(f64_f64, FLCE_F64, FLCE_F64)
BLOCK_KERNELS(f64_f32, FLCE_F64, FLCE_F32)
BLOCK_KERNELS(f64_bf16, FLCE_F64, FLCE_BF16)
BLOCK_KERNELS(f64_f16, FLCE_F64, FLCE_F16)
BLOCK_KERNELS(f32_f32, FLCE_F32, FLCE_F32)
BLOCK_KERNELS(f32_bf16, FLCE_F32, FLCE_BF16)
BLOCK_KERNELS(f32_f16, FLCE_F32, FLCE_F16)

const flce_row_kernels* flce_scalar_row_kernels(flce_dtype dtype) {
  static const flce_row_kernels* const kernels[] = {&rows_f64, &rows_f32, &rows_bf16, &rows_f16};
  return kernels[dtype];
}

const flce_block_kernels* flce_scalar_block_kernels(flce_dtype stat, flce_dtype dtype) {
  static const flce_block_kernels* const kernels[][4] = {
      [FLCE_F64] = {&blocks_f64_f64, &blocks_f64_f32, &blocks_f64_bf16, &blocks_f64_f16},
      [FLCE_F32] = {NULL, &blocks_f32_f32, &blocks_f32_bf16, &blocks_f32_f16}};
  return kernels[stat][dtype];
}
