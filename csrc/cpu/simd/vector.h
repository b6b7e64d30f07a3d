/* The kernels of float32, bfloat16 and float16, written once over a vector type. avx2.c and
 * avx512.c include this file after they have defined, for their registers:
 *
 *   vec, LANES, VARIANT(name), INLINE
 *   vec_set, vec_add, vec_sub, vec_mul
 *   vec_max, vec_min: return the second operand if it or the first is NaN
 *   vec_fma(a, b, c) = a b + c, vec_fnma(a, b, c) = c - a b
 *   vec_flush: 0 in place of magnitudes below FLT_MIN; keeps NaN
 *   vec_round: to the nearest integer
 *   vec_scale(p, n, x, lowest) = p 2^n for integers n in [-126, 0]; 0 if x < lowest
 *   vec_load(data, dtype, j), vec_store(data, dtype, j, x)
 *   vec_load_part(data, dtype, j, count, fill), vec_store_part(data, dtype, j, x, count): the
 *   first count < LANES lanes; no byte beyond them is accessed, and the other lanes load as
 *   `fill`
 *
 * In every call the dtype, and whether an optional pointer is NULL, are constants, so inlining
 * removes the tests on them. The main loops keep four independent accumulators to hide the latency
 * of an addition. */

enum { UNROLL = 4 };

/* exp(x) for x <= 0; 1 above. Returns 0 below ln(FLT_MIN), including -inf, whatever the lanes
 * computed there; keeps NaN. exp(x) = 2^n exp(r) with n = round(x log2 e) and |r| <= ln 2 / 2; ln 2
 * is split in two parts such that n times the first is exact. The polynomial is a minimax fit with
 * the first two coefficients fixed at 1 and a relative error below 4e-9, so the error is mostly
 * rounding: less than 1.5 ulp, which is tested. */
INLINE vec vec_exp(vec x) {
  x = vec_min(vec_set(0.0f), x);
  vec n = vec_round(vec_mul(x, vec_set(0x1.715476p+0f)));
  vec r = vec_fnma(n, vec_set(0x1.62e4p-1f), x);
  r = vec_fnma(n, vec_set(0x1.7f7d1cp-20f), r);
  vec p = vec_set(0x1.6a23dp-10f);
  p = vec_fma(p, r, vec_set(0x1.123a2p-7f));
  p = vec_fma(p, r, vec_set(0x1.5558f2p-5f));
  p = vec_fma(p, r, vec_set(0x1.555492p-3f));
  p = vec_fma(p, r, vec_set(0x1.fffffcp-2f));
  p = vec_fma(p, r, vec_set(1.0f));
  p = vec_fma(p, r, vec_set(1.0f));
  return vec_scale(p, n, x, -0x1.5d58ap+6f);
}

INLINE vec load_upto(const void* data, flce_dtype dtype, int64_t j, int64_t count, float fill) {
  return count >= LANES ? vec_load(data, dtype, j) : vec_load_part(data, dtype, j, count, fill);
}

INLINE void store_upto(void* data, flce_dtype dtype, int64_t j, vec x, int64_t count) {
  if (count >= LANES)
    vec_store(data, dtype, j, x);
  else
    vec_store_part(data, dtype, j, x, count);
}

INLINE vec logit(const void* z, flce_dtype dtype, const void* bias, int64_t j) {
  vec x = vec_load(z, dtype, j);
  return bias ? vec_add(x, vec_load(bias, FLCE_F32, j)) : x;
}

INLINE vec logit_upto(const void* z, flce_dtype dtype, const void* bias, int64_t j, int64_t count,
                      float fill) {
  vec x = load_upto(z, dtype, j, count, fill);
  return bias ? vec_add(x, load_upto(bias, FLCE_F32, j, count, 0.0f)) : x;
}

INLINE double sum_lanes(const vec* parts) {
  float lanes[LANES];
  vec_store(lanes, FLCE_F32, 0, vec_add(vec_add(parts[0], parts[1]), vec_add(parts[2], parts[3])));
  double sum = 0.0;
  for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
  return sum;
}

INLINE double max_of(const void* z, flce_dtype dtype, const void* bias, int64_t count) {
  vec largest[UNROLL];
  for (int u = 0; u < UNROLL; u++) largest[u] = vec_set(-INFINITY);
  int64_t j = 0;
  for (; j + UNROLL * LANES <= count; j += UNROLL * LANES) {
#pragma GCC unroll 4
    for (int u = 0; u < UNROLL; u++)
      largest[u] = vec_max(logit(z, dtype, bias, j + u * LANES), largest[u]);
  }
  for (; j < count; j += LANES)
    largest[0] = vec_max(logit_upto(z, dtype, bias, j, count - j, -INFINITY), largest[0]);
  float lanes[LANES];
  vec_store(lanes, FLCE_F32, 0,
            vec_max(vec_max(largest[0], largest[1]), vec_max(largest[2], largest[3])));
  float result = lanes[0];
  for (int lane = 1; lane < LANES; lane++) result = lanes[lane] > result ? lanes[lane] : result;
  return result;
}

INLINE double exp_sum_of(void* out, const void* z, flce_dtype dtype, const void* bias,
                         double offset, int64_t count) {
  vec shift = vec_set((float)offset), sum[UNROLL];
  for (int u = 0; u < UNROLL; u++) sum[u] = vec_set(0.0f);
  int64_t j = 0;
  for (; j + UNROLL * LANES <= count; j += UNROLL * LANES) {
#pragma GCC unroll 4
    for (int u = 0; u < UNROLL; u++) {
      vec e = vec_exp(vec_sub(logit(z, dtype, bias, j + u * LANES), shift));
      sum[u] = vec_add(sum[u], e);
      if (out) vec_store(out, dtype, j + u * LANES, e);
    }
  }
  for (; j < count; j += LANES) {
    vec e = vec_exp(vec_sub(logit_upto(z, dtype, bias, j, count - j, -INFINITY), shift));
    sum[0] = vec_add(sum[0], e);
    if (out) store_upto(out, dtype, j, e, count - j);
  }
  return sum_lanes(sum);
}

INLINE double weighted_gap_of(const void* z, flce_dtype dtype, const void* bias, const void* weight,
                              double offset, int64_t count) {
  vec top = vec_set((float)offset), one = vec_set(1.0f), sum[UNROLL];
  for (int u = 0; u < UNROLL; u++) sum[u] = vec_set(0.0f);
  int64_t j = 0;
  for (; j + UNROLL * LANES <= count; j += UNROLL * LANES) {
#pragma GCC unroll 4
    for (int u = 0; u < UNROLL; u++) {
      vec w = weight ? vec_load(weight, FLCE_F32, j + u * LANES) : one;
      sum[u] = vec_fma(w, vec_sub(top, logit(z, dtype, bias, j + u * LANES)), sum[u]);
    }
  }
  for (; j < count; j += LANES) {
    /* Lanes beyond the end hold `offset` itself, so they add 0. */
    vec x = logit_upto(z, dtype, bias, j, count - j, (float)offset);
    vec w = weight ? load_upto(weight, FLCE_F32, j, count - j, 0.0f) : one;
    sum[0] = vec_fma(w, vec_sub(top, x), sum[0]);
  }
  return sum_lanes(sum);
}

/* The loops below carry no sum from one iteration to the next, so the processor overlaps iterations
 * without unrolling. */

INLINE vec gradient(vec e, vec factor, const void* weight, vec smooth, int64_t j, int64_t count) {
  vec product = vec_mul(factor, e);
  if (!weight) return vec_flush(vec_sub(product, smooth));
  return vec_flush(vec_fnma(smooth, load_upto(weight, FLCE_F32, j, count, 0.0f), product));
}

INLINE void grad_exp_of(void* out, const void* z, flce_dtype dtype, const void* bias, double offset,
                        double factor, const void* weight, double smooth, int64_t count) {
  vec shift = vec_set((float)offset), f = vec_set((float)factor), s = vec_set((float)smooth);
  int64_t j = 0;
  for (; j + LANES <= count; j += LANES) {
    vec e = vec_exp(vec_sub(logit(z, dtype, bias, j), shift));
    vec_store(out, dtype, j, gradient(e, f, weight, s, j, LANES));
  }
  if (j < count) {
    vec e = vec_exp(vec_sub(logit_upto(z, dtype, bias, j, count - j, -INFINITY), shift));
    vec_store_part(out, dtype, j, gradient(e, f, weight, s, j, count - j), count - j);
  }
}

INLINE void grad_linear_of(void* out, const void* z, flce_dtype dtype, double factor,
                           const void* weight, double smooth, int64_t count) {
  vec f = vec_set((float)factor), s = vec_set((float)smooth);
  for (int64_t j = 0; j < count; j += LANES) {
    vec e = load_upto(z, dtype, j, count - j, 0.0f);
    store_upto(out, dtype, j, gradient(e, f, weight, s, j, count - j), count - j);
  }
}

INLINE void scaled_of(void* acc, double a, const void* x, flce_dtype dtype, int64_t count) {
  vec factor = vec_set((float)a);
  for (int64_t j = 0; j < count; j += LANES) {
    vec product = vec_mul(factor, load_upto(x, dtype, j, count - j, 0.0f));
    store_upto(acc, FLCE_F32, j, product, count - j);
  }
}

INLINE void axpy_of(void* acc, double a, const void* x, flce_dtype dtype, int64_t count) {
  vec factor = vec_set((float)a);
  for (int64_t j = 0; j < count; j += LANES) {
    vec sum = load_upto(acc, FLCE_F32, j, count - j, 0.0f);
    sum = vec_fma(factor, load_upto(x, dtype, j, count - j, 0.0f), sum);
    store_upto(acc, FLCE_F32, j, sum, count - j);
  }
}

INLINE void narrow_of(void* out, flce_dtype dtype, const void* acc, int64_t count) {
  for (int64_t j = 0; j < count; j += LANES)
    store_upto(out, dtype, j, load_upto(acc, FLCE_F32, j, count - j, 0.0f), count - j);
}

#define KERNELS(name, dtype)                                                                     \
  static double max_##name(const void* z, const void* bias, int64_t count) {                     \
    return bias ? max_of(z, dtype, bias, count) : max_of(z, dtype, NULL, count);                 \
  }                                                                                              \
  static double exp_sum_##name(void* out, const void* z, const void* bias, double offset,        \
                               int64_t count) {                                                  \
    if (out)                                                                                     \
      return bias ? exp_sum_of(out, z, dtype, bias, offset, count)                               \
                  : exp_sum_of(out, z, dtype, NULL, offset, count);                              \
    return bias ? exp_sum_of(NULL, z, dtype, bias, offset, count)                                \
                : exp_sum_of(NULL, z, dtype, NULL, offset, count);                               \
  }                                                                                              \
  static double gap_##name(const void* z, const void* bias, const void* weight, double offset,   \
                           int64_t count) {                                                      \
    return weight ? weighted_gap_of(z, dtype, bias, weight, offset, count)                       \
                  : weighted_gap_of(z, dtype, bias, NULL, offset, count);                        \
  }                                                                                              \
  static void grad_exp_##name(void* out, const void* z, const void* bias, double offset,         \
                              double factor, const void* weight, double smooth, int64_t count) { \
    if (weight)                                                                                  \
      grad_exp_of(out, z, dtype, bias, offset, factor, weight, smooth, count);                   \
    else if (bias)                                                                               \
      grad_exp_of(out, z, dtype, bias, offset, factor, NULL, smooth, count);                     \
    else                                                                                         \
      grad_exp_of(out, z, dtype, NULL, offset, factor, NULL, smooth, count);                     \
  }                                                                                              \
  static void grad_linear_##name(void* out, const void* z, double factor, const void* weight,    \
                                 double smooth, int64_t count) {                                 \
    if (weight)                                                                                  \
      grad_linear_of(out, z, dtype, factor, weight, smooth, count);                              \
    else                                                                                         \
      grad_linear_of(out, z, dtype, factor, NULL, smooth, count);                                \
  }                                                                                              \
  static void scaled_##name(void* acc, double a, const void* x, int64_t count) {                 \
    scaled_of(acc, a, x, dtype, count);                                                          \
  }                                                                                              \
  static void axpy_##name(void* acc, double a, const void* x, int64_t count) {                   \
    axpy_of(acc, a, x, dtype, count);                                                            \
  }                                                                                              \
  static void narrow_##name(void* out, const void* acc, int64_t count) {                         \
    narrow_of(out, dtype, acc, count);                                                           \
  }                                                                                              \
  static const flce_row_kernels rows_##name = {max_##name, exp_sum_##name, gap_##name,           \
                                               grad_exp_##name, grad_linear_##name};             \
  static const flce_block_kernels blocks_##name = {scaled_##name, axpy_##name, narrow_##name};

KERNELS(f32, FLCE_F32)
KERNELS(bf16, FLCE_BF16)
KERNELS(f16, FLCE_F16)

/* float64 has the scalar kernels with libm's exp: it is meant for checks against a reference, where
 * an error within half a ulp matters more than time. */
const flce_row_kernels* VARIANT(row_kernels)(flce_dtype dtype) {
  static const flce_row_kernels* const kernels[] = {
      [FLCE_F32] = &rows_f32, [FLCE_BF16] = &rows_bf16, [FLCE_F16] = &rows_f16};
  return dtype == FLCE_F64 ? flce_scalar_row_kernels(dtype) : kernels[dtype];
}

const flce_block_kernels* VARIANT(block_kernels)(flce_dtype stat, flce_dtype dtype) {
  static const flce_block_kernels* const kernels[] = {
      [FLCE_F32] = &blocks_f32, [FLCE_BF16] = &blocks_bf16, [FLCE_F16] = &blocks_f16};
  return stat == FLCE_F64 ? flce_scalar_block_kernels(stat, dtype) : kernels[dtype];
}
