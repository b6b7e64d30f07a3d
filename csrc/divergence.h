/* The terms of a divergence that one class adds, for C in double and for CUDA in the stat dtype: of
 * p and q, the student's and the teacher's probability, and d = log(p / q). Where p and q are near,
 * differences are made from d by power series, with the relative error of d; beyond FLCE_NEAR the
 * subtraction itself has lost at most three bits. */
#ifndef FLCE_DIVERGENCE_H
#define FLCE_DIVERGENCE_H

#include <math.h>

#include "problem.h"

#ifdef __CUDACC__
#define FLCE_PROPERTY static __host__ __device__ __forceinline__ constexpr
#define FLCE_TERM               \
  template <typename flce_real> \
  static __device__ __forceinline__
static __device__ __forceinline__ float flce_exp(float x) {
  return __expf(x);
}
static __device__ __forceinline__ double flce_exp(double x) {
  return exp(x);
}
/* An absolute error of 2^-21, or a relative one of 2^-22 beyond [1/2, 2]. */
static __device__ __forceinline__ float flce_log(float x) {
  return __logf(x);
}
static __device__ __forceinline__ double flce_log(double x) {
  return log(x);
}
#define FLCE_IF(condition, value) (value) /* a select takes less than threads that diverge */
#else
#define FLCE_PROPERTY static inline
#define flce_log log
#define FLCE_IF(condition, value) ((condition) ? (value) : 0.0)
#define FLCE_TERM static inline __attribute__((always_inline))
#define flce_exp exp
typedef double flce_real;
#endif

#define FLCE_NEAR 0.25

/* takes_mean and largest of FLCE_DIVERGENCES; `largest` is 1 where there is no divergence. */
#define FLCE_TAKES_MEAN(NAME, text, takes_mean, largest) \
  case FLCE_##NAME:                                      \
    return takes_mean;
#define FLCE_LARGEST(NAME, text, takes_mean, largest) \
  case FLCE_##NAME:                                   \
    return largest;
FLCE_PROPERTY bool flce_takes_mean(flce_divergence kind) {
  switch (kind) {
    FLCE_DIVERGENCES(FLCE_TAKES_MEAN)
    case FLCE_NO_DIVERGENCE:
      break;
  }
  return false;
}
FLCE_PROPERTY double flce_largest_gradient(flce_divergence kind) {
  switch (kind) {
    FLCE_DIVERGENCES(FLCE_LARGEST)
    case FLCE_NO_DIVERGENCE:
      break;
  }
  return 1.0;
}
#undef FLCE_TAKES_MEAN
#undef FLCE_LARGEST

/* What is taken from a row's logits before they are compared with the other side's: of d = (l - l')
 * - (lse - lse') each difference would have the rounding error of an l that is large in one alone.
 * `own`, `other`: lse of each side. An integer, so that taking it from l near it is exact; 0 where
 * lse and lse' are near, because l - l' of near logits is exact. */
FLCE_TERM flce_real flce_divergence_base(flce_real own, flce_real other) {
  const flce_real apart = fabs(own - other);
  return apart > 1 && apart < (flce_real)INFINITY ? rint(own) : 0;
}

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

/* Of the JSD's terms about d = 0, with f(d) = m / q = beta + (1 - beta) exp(d): log f = sum
 * log_m[k] d^(k + 1), and what a class adds to the JSD is q sum value[k] d^(k + 2). The complex
 * zeros of f have |d| >= pi, so for |d| <= FLCE_NEAR each term is at most 0.08 of the one before.
 */
enum { FLCE_SERIES = 15, FLCE_SERIES_F32 = 7 };
typedef struct flce_jsd_series {
  double log_m[FLCE_SERIES], value[FLCE_SERIES];
} flce_jsd_series;

/* Without cancellation, also where beta is near 0 or 1: s = (log f)' has s' = s (1 - s), and
 * value' = -(1 - beta) exp(d) log(m / p) with log(m / p) = log f - d. */
static inline flce_jsd_series flce_jsd_series_of(double beta) {
  flce_jsd_series made;
  double s[FLCE_SERIES + 1] = {1.0 - beta}, t[FLCE_SERIES + 1] = {beta}; /* t = 1 - s */
  double inverse[FLCE_SERIES + 1] = {1.0};                               /* 1 / n! */
  for (int n = 0; n < FLCE_SERIES; n++) {
    double sum = 0.0;
    for (int k = 0; k <= n; k++) sum += s[k] * t[n - k];
    made.log_m[n] = s[n] / (n + 1);
    s[n + 1] = sum / (n + 1);
    t[n + 1] = -s[n + 1];
    inverse[n + 1] = inverse[n] / (n + 1);
  }
  for (int n = 0; n < FLCE_SERIES; n++) {
    double sum = -beta * inverse[n];
    for (int k = 1; k <= n; k++) sum += made.log_m[k] * inverse[n - k];
    made.value[n] = -(1.0 - beta) / (n + 2) * sum;
  }
  return made;
}

FLCE_TERM flce_real flce_polynomial(const flce_real* coefficients, int count, flce_real x) {
  flce_real sum = 0;
  for (int k = count - 1; k >= 0; k--) sum = sum * x + coefficients[k];
  return sum;
}

/* As flce_divergence_terms, for the JSD. log_m, series: of flce_jsd_series. */
FLCE_TERM flce_real flce_jsd_terms(flce_real beta, const flce_real* log_m, const flce_real* series,
                                   flce_real p, flce_real q, flce_real d, flce_real* value) {
  const bool wide = sizeof(flce_real) == 8, near = fabs(d) <= (flce_real)FLCE_NEAR;
  const int terms = wide ? FLCE_SERIES : FLCE_SERIES_F32;
  /* log m minus the larger of log p and log q */
  const flce_real w = d > 0 ? beta : 1 - beta;
  const flce_real mean = FLCE_IF(!near, flce_log((1 - w) + w * flce_exp(-(flce_real)fabs(d))));
  const flce_real rest = FLCE_IF(near, flce_polynomial(log_m + 1, terms - 1, d));
  const flce_real a = d > 0 ? mean + d : mean, far = d > 0 ? mean : mean - d;
  const flce_real b = near ? d * (d * rest - beta) : far;
  const flce_real of_p = p == 0 ? 0 : (1 - beta) * p * b, of_q = q == 0 ? 0 : beta * q * a;
  const flce_real square = FLCE_IF(near, q * d * d * flce_polynomial(series, terms, d));
  *value = near ? square : -of_q - of_p;
  return -of_p;
}

/* Returns p times the derivative of the divergence by p, up to a constant times p: dz is this minus
 * p times its sum over the classes. Of the forward KL p - q, whose sum is 0 but for the errors of
 * the statistics. *value: the term of FLCE_DIVERGENCE_VALUE, to which p - q or q - p is added:
 * their sums are 0, and no term is negative then. A factor 0 hides a logarithm that is not finite.
 * log_m, series: of flce_jsd_series, read for the JSD. */
FLCE_TERM flce_real flce_divergence_terms(flce_divergence kind, flce_real beta,
                                          const flce_real* log_m, const flce_real* series,
                                          flce_real p, flce_real q, flce_real d, flce_real* value) {
  const bool near = fabs(d) <= (flce_real)FLCE_NEAR;
  const flce_real p_d = p > 0 ? p * d : 0, q_d = q > 0 ? q * d : 0;
  flce_real square;
  switch (kind) {
    case FLCE_FORWARD_KL:
      square = FLCE_IF(near, q_d * d * flce_square_part(d));
      *value = near ? square : p - q - q_d;
      return near ? q_d + square : p - q;
    case FLCE_REVERSE_KL:
      square = FLCE_IF(near, p_d * d * flce_square_part(-d));
      *value = near ? square : q - p + p_d;
      return p_d;
    case FLCE_JSD:
      return flce_jsd_terms(beta, log_m, series, p, q, d, value);
    case FLCE_NO_DIVERGENCE:
      break;
  }
  return *value = NAN;
}

/* MEAN of a row's dz (divergence_rows, backend.h): `sum`, that of flce_divergence_terms over the
 * classes, divided by `mass`, that of the rounded p. In a class whose p is almost 1 its term minus
 * p MEAN nearly cancels: both need the same rounding of p. */
FLCE_TERM flce_real flce_divergence_mean(flce_divergence kind, flce_real sum, flce_real mass) {
  return flce_takes_mean(kind) && mass > 0 ? sum / mass : sum;
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
  double w = 1.0, t = (double)value;
  switch (kind) {
    case FLCE_FORWARD_KL:
      return (flce_real)fmin(2.0, sqrt(2.0 * (double)value));
    case FLCE_JSD:
      w = 1.0 - (double)beta;
      t = fmax((double)mean, (double)(beta * value));
      break;
    case FLCE_REVERSE_KL:
      break;
    case FLCE_NO_DIVERGENCE:
      return NAN;
  }
  return (flce_real)(2.0 * (t + w * fmin(1.0, sqrt(t / (2.0 * w)))));
}

#endif
