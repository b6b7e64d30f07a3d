/* The terms of a divergence that one class adds, for C in double and for CUDA in the stat dtype: of
 * p and q, the student's and the teacher's probability, and d = log(p / q). Where p and q are near,
 * differences are made from d by power series, with the relative error of d; beyond kNear the
 * subtraction itself has lost at most three bits. */
#ifndef FLCE_DIVERGENCE_H
#define FLCE_DIVERGENCE_H

#include <math.h>

#include "problem.h"

#ifdef __CUDACC__
#define FLCE_TERM               \
  template <typename flce_real> \
  static __device__ __forceinline__
static __device__ __forceinline__ float flce_exp(float x) {
  return __expf(x);
}
static __device__ __forceinline__ double flce_exp(double x) {
  return exp(x);
}
/* Of x from 0.04 to 0.95: an absolute error of 2^-21. */
static __device__ __forceinline__ float flce_log(float x) {
  return __logf(x);
}
static __device__ __forceinline__ double flce_log(double x) {
  return log(x);
}
static __device__ __forceinline__ float flce_quotient(float x, float y) {
  return __fdividef(x, y);
}
static __device__ __forceinline__ double flce_quotient(double x, double y) {
  return x / y;
}
#define FLCE_IF(condition, value) (value) /* a select takes less than threads that diverge */
#else
#define flce_log log
#define flce_quotient(x, y) ((x) / (y))
#define FLCE_IF(condition, value) ((condition) ? (value) : 0.0)
#define FLCE_TERM static inline __attribute__((always_inline))
#define flce_exp exp
typedef double flce_real;
#endif

#define FLCE_NEAR 0.25

/* (exp(x) - 1 - x) / x^2 for |x| <= FLCE_NEAR: the sum of x^(k - 2) / k! up to 1/14!, or 1/7!. */
FLCE_TERM flce_real flce_square_part(flce_real x) {
  const bool wide = sizeof(flce_real) == 8;
  double inverse = wide ? 1.0 / 87178291200.0 : 1.0 / 5040.0;
  flce_real sum = 0;
  for (int k = wide ? 14 : 7; k >= 2; k--) {
    sum = sum * x + (flce_real)inverse;
    inverse *= k;
  }
  return sum;
}

/* log(1 + w (exp(x) - 1)) for x <= 0 and 0 < w < 1. Near 0 it is 2 artanh(u), u = flce_quotient(y,
 * 2 + y), with |u| <= 1/8; the first term left out is below 2^-60, or 2^-27, of it. */
FLCE_TERM flce_real flce_log_mean(flce_real w, flce_real x) {
  const bool far = x < (flce_real)-FLCE_NEAR;
  const flce_real logarithm = FLCE_IF(far, flce_log((1 - w) + w * flce_exp(x)));
  const flce_real y = w * (x + x * x * flce_square_part(x)), u = flce_quotient(y, 2 + y);
  const flce_real square = u * u;
  const int last = sizeof(flce_real) == 8 ? 9 : 3;
  flce_real sum = 0;
  for (int k = last; k >= 0; k--) sum = sum * square + (flce_real)(2.0 / (2 * k + 1));
  return far ? logarithm : u * sum;
}

/* log(m / p) and, in *a, log(m / q). */
FLCE_TERM flce_real flce_log_mixture(flce_real beta, flce_real d, flce_real* a) {
  const flce_real mean = flce_log_mean(d > 0 ? beta : 1 - beta, -(flce_real)fabs(d));
  *a = d > 0 ? mean + d : mean;
  return d > 0 ? mean : mean - d;
}

/* Returns p times the derivative of the divergence by p, up to a constant: dz is this minus p times
 * its sum over the classes. Of the forward KL p - q, whose sum is that of the errors of the
 * statistics. *value: the term of FLCE_DIVERGENCE_VALUE, never negative, because terms that cancel
 * over all classes are added (p, q and m have the same sum). A factor 0 hides a logarithm that is
 * not finite. */
FLCE_TERM flce_real flce_divergence_terms(flce_divergence kind, flce_real beta, flce_real p,
                                          flce_real q, flce_real d, flce_real* value) {
  const bool near = fabs(d) <= (flce_real)FLCE_NEAR;
  const flce_real p_d = p > 0 ? p * d : 0, q_d = q > 0 ? q * d : 0;
  if (kind == FLCE_FORWARD_KL) {
    const flce_real square = FLCE_IF(near, q_d * d * flce_square_part(d));
    *value = near ? square : p - q - q_d;
    return near ? q_d + square : p - q;
  }
  if (kind == FLCE_REVERSE_KL) {
    const flce_real square = FLCE_IF(near, p_d * d * flce_square_part(-d));
    *value = near ? square : q - p + p_d;
    return p_d;
  }
  flce_real a, b = flce_log_mixture(beta, d, &a);
  const flce_real of_q = q > 0 ? beta * q * a : 0, of_p = p > 0 ? (1 - beta) * p * b : 0;
  const flce_real square =
      FLCE_IF(near, of_q * a * flce_square_part(a) + of_p * b * flce_square_part(b));
  *value = near ? square : -of_q - of_p;
  return -of_p;
}

/* An upper bound of sum_j |g_j| (divergence_rows, backend.h) from a row's sums. Forward KL:
 * sum |p - q| <= sqrt(2 KL(q || p)), Pinsker's inequality. Reverse KL, D = KL(p || q) and
 * g = p (d - D): by the log sum inequality the negative terms of D sum to at least -TV(p, q) >=
 * -min(1, sqrt(D / 2)), so sum p |d| <= D + 2 min(1, sqrt(D / 2)); the other term adds D. JSD:
 * 1 - beta times that of p and m, `mean` being (1 - beta) KL(p || m). Where p and q are near,
 * `mean` has lost digits to cancellation; up to higher orders it is then beta `value`, whose terms
 * do not cancel, and the larger of both is taken. */
FLCE_TERM flce_real flce_gradient_bound(flce_divergence kind, flce_real beta, flce_real value,
                                        flce_real mean) {
  if (kind == FLCE_FORWARD_KL) return (flce_real)fmin(2.0, sqrt(2.0 * (double)value));
  const double w = kind == FLCE_JSD ? 1.0 - (double)beta : 1.0;
  const double t = kind == FLCE_JSD ? fmax((double)mean, (double)(beta * value)) : (double)value;
  return (flce_real)(2.0 * (t + w * fmin(1.0, sqrt(t / (2.0 * w)))));
}

#endif
