/* A row's gradient factors (enum flce_coef_row) from its statistics: the formulas, shared by the
 * kernel row_coefficients and by tile_statistics of the fused logits GEMM. */
#ifndef FLCE_CUDA_ROWS_ROW_COEFFICIENTS_CUH
#define FLCE_CUDA_ROWS_ROW_COEFFICIENTS_CUH

#include "cuda/common/pdl.cuh"
#include "cuda/common/row_status.cuh"

/* Factors of a valid row; `i` is its position in the per-row vectors. `scale` is logit_scale /
 * temperature, without a temperature of the row's own. `elsewhere`: the target is another rank's
 * class; its substitute column has no one-hot term. */
template <typename S>
__device__ __forceinline__ void coefficients_of(const flce_rows& r, const flce_upstream& upstream,
                                                int64_t i, const RowStatistics<S>& stats, S factor,
                                                S scale, bool elsewhere,
                                                S (&coef)[FLCE_COEF_COUNT]) {
  const flce_loss& o = r.options;
  const S* scalars = (const S*)r.scalars;
  const S upstream_loss = upstream.loss ? ((const S*)upstream.loss)[i * upstream.loss_stride] : 1;
  const S k = upstream_loss * factor * (r.token_weight ? ((const S*)r.token_weight)[i] : 1);
  const S a = r.temperature ? scale / ((const S*)r.temperature)[i] : scale;
  const S per_class = o.label_smoothing > 0 ? (S)(o.label_smoothing / (double)r.vocab) : 0;
  const S hard = (S)(1 - o.label_smoothing);
  /* The factor of p is k (own + rest) + others. */
  S own = 0, rest, others = 0;
  if (r.target) {
    own = hard * (r.class_weight ? ((const S*)r.class_weight)[r.target[i]] : 1);
    rest = per_class != 0 ? per_class * scalars[FLCE_SCALAR_WEIGHT_TOTAL] : 0;
  } else {
    rest = stats.weight_sum;
  }
  if (o.z_loss != 0) {
    rest += (S)(2 * o.z_loss) * scalars[FLCE_SCALAR_Z_FACTOR] * stats.lse;
  }
  if (upstream.lse) others = ((const S*)upstream.lse)[i];
  coef[FLCE_COEF_EXP] = a * ((k * (own + rest) + others) * stats.inv_sum);
  coef[FLCE_COEF_TARGET] = 0;
  coef[FLCE_COEF_SMOOTH] = a * (k * per_class);
  coef[FLCE_COEF_VALID] = r.input_scale ? ((const S*)r.input_scale)[0] : (S)1;
  coef[FLCE_COEF_ENTROPY] =
      upstream.entropy ? a * (((const S*)upstream.entropy)[i] * stats.inv_sum) : (S)0;
  coef[FLCE_COEF_SOFT] = r.target ? (S)0 : a * (k * hard);
  coef[FLCE_COEF_TAIL] = upstream.tail ? a * ((const S*)upstream.tail)[i] : (S)0;
  if (!r.target) return;
  /* With r the factor of p: r p_y - k own, computed as k own (p_y - 1) + (k rest + others) p_y to
   * avoid cancellation where p_y is near 1. */
  S target = k * (own * (elsewhere ? exp(-stats.nll) : expm1(-stats.nll)));
  if (rest != 0) target += k * (rest * exp(-stats.nll));
  if (others != 0) target += others * exp(-stats.nll);
  if (upstream.entropy && upstream.entropy_in_target) {
    const S entropy = ((const S*)r.stats)[FLCE_STAT_ENTROPY * r.stat_pitch + i];
    const S p = exp(-stats.nll), g = ((const S*)upstream.entropy)[i];
    if (p > 0) target += g * (p * (stats.nll - entropy)); /* m - l_y = nll - entropy */
  }
  coef[FLCE_COEF_TARGET] = a * (stats.slope * target);
  if (!upstream.of_dz) return;
  coef[FLCE_COEF_EXP] = 1;
  coef[FLCE_COEF_TARGET] = 0;
}

/* Reads the statistics that a row pass has written. */
template <typename S>
__device__ __forceinline__ RowStatistics<S> statistics_at(const flce_rows& r, int64_t at) {
  const S* stats = (const S*)r.stats + at;
  return {stats[FLCE_STAT_LSE * r.stat_pitch], stats[FLCE_STAT_NLL * r.stat_pitch],
          stats[FLCE_STAT_INV_SUM * r.stat_pitch], stats[FLCE_STAT_SLOPE * r.stat_pitch],
          stats[FLCE_STAT_WEIGHT_SUM * r.stat_pitch]};
}

/* Writes the factors of a row that is present; blank values if it is not valid, and then `stats` is
 * not read. `elsewhere`: as in coefficients_of. Called by one thread. */
template <typename S>
__device__ __forceinline__ void write_coefficients(const flce_rows& r,
                                                   const flce_upstream& upstream, RowRef ref,
                                                   const RowStatistics<S>& stats, S factor, S scale,
                                                   S* coef, bool elsewhere = false) {
  S values[FLCE_COEF_COUNT];
#pragma unroll
  for (int which = 0; which < FLCE_COEF_COUNT; which++) values[which] = blank_of<S>(ref);
  if (ref.kind == kRowValid)
    coefficients_of(r, upstream, ref.at, stats, factor, scale, elsewhere, values);
#pragma unroll
  for (int which = 0; which < FLCE_COEF_COUNT; which++) {
    coef[which * r.stat_pitch + ref.at] = values[which];
  }
}

#endif
