/* A row's factors for its gradient, from its statistics. */
#ifndef FLCE_CUDA_COEFFICIENTS_CUH
#define FLCE_CUDA_COEFFICIENTS_CUH

#include "statistics.cuh"

template <typename S>
__device__ __forceinline__ S hard_share(const flce_loss& o) {
  return (S)(1 - o.label_smoothing);
}

template <typename S>
__device__ __forceinline__ S smooth_share(const flce_rows& r) {
  const double smoothing = r.options.label_smoothing;
  return smoothing > 0 ? (S)(smoothing / (double)r.vocab) : 0;
}

/* What a row's coefficients take from memory beside its statistics. */
template <typename S>
struct RowFactors {
  S a, k;       /* of the row's gradient: dl/dz, the loss's */
  S own, rest;  /* what multiplies p is k (own + rest + mass + lse_weight lse) + others, */
  S lse_weight; /* mass with probabilities only */
  S others, entropy;
};

/* `scale` is logit_scale / temperature. */
template <typename S>
__device__ __forceinline__ RowFactors<S> factors_of(const flce_rows& r,
                                                    const flce_upstream& upstream, int64_t i,
                                                    S factor, S scale) {
  const flce_loss& o = r.options;
  const S* scalars = (const S*)r.scalars;
  const S upstream_loss = upstream.loss ? ((const S*)upstream.loss)[i * upstream.loss_stride] : 1;
  RowFactors<S> f = {};
  f.k = upstream_loss * factor * (r.token_weight ? ((const S*)r.token_weight)[i] : 1);
  f.a = r.temperature ? scale / ((const S*)r.temperature)[i] : scale;
  if (r.target) {
    f.own = hard_share<S>(o) * (r.class_weight ? ((const S*)r.class_weight)[r.target[i]] : 1);
    f.rest = o.label_smoothing > 0 ? smooth_share<S>(r) * scalars[FLCE_SCALAR_WEIGHT_TOTAL] : 0;
  }
  if (o.z_loss != 0) f.lse_weight = (S)(2 * o.z_loss) * scalars[FLCE_SCALAR_Z_SHARE];
  if (upstream.lse) f.others = ((const S*)upstream.lse)[i];
  if (upstream.entropy) f.entropy = ((const S*)upstream.entropy)[i];
  return f;
}

template <typename S>
__device__ __forceinline__ void coefficients_of(const flce_rows& r, const RowFactors<S>& f,
                                                const RowStats<S>& stats,
                                                S (&coef)[FLCE_COEF_ROWS]) {
  const S a = f.a, k = f.k, inv_sum = stats.of[FLCE_STAT_INV_SUM];
  S rest = r.target ? f.rest : stats.of[FLCE_STAT_MASS];
  if (r.options.z_loss != 0) rest += f.lse_weight * stats.of[FLCE_STAT_LSE];
  coef[FLCE_COEF_ROW] = a * ((k * (f.own + rest) + f.others) * inv_sum);
  coef[FLCE_COEF_TARGET] = 0;
  coef[FLCE_COEF_SMOOTH] = a * (k * smooth_share<S>(r));
  coef[FLCE_COEF_VALID] = 1;
  coef[FLCE_COEF_ENTROPY] = f.entropy != 0 ? a * (f.entropy * inv_sum) : (S)0;
  coef[FLCE_COEF_SOFT] = r.target ? (S)0 : a * (k * hard_share<S>(r.options));
  if (!r.target) return;
  /* r p_y - k own, as k own (p_y - 1) + (k rest + others) p_y: no cancellation where p_y is near 1.
   */
  const S nll = stats.of[FLCE_STAT_NLL];
  S target = k * (f.own * expm1(-nll));
  if (rest != 0) target += k * (rest * exp(-nll));
  if (f.others != 0) target += f.others * exp(-nll);
  coef[FLCE_COEF_TARGET] = a * (stats.of[FLCE_STAT_SLOPE] * target);
}

#endif
