/* A row's gradient from its statistics and coefficients, vector by vector. */
#ifndef FLCE_CUDA_GRAD_ROW_CUH
#define FLCE_CUDA_GRAD_ROW_CUH

#include "statistics.cuh"

/* out_j = slope_j (exp(l_j - offset) (factor + entropy (middle - l_j)) - w_j (smooth + soft t_j)),
 * and `target` instead at the target's column. */
template <typename S>
struct GradRow {
  S factor, offset, target, smooth, soft, entropy, middle;
  bool set_target, weighted;
};

/* A row's elements of the tables of statistics and coefficients; coef NULL: none. */
template <typename S>
struct RowTables {
  const S *stats, *coef;
  int64_t pitch;
  __device__ S stat(int which) const { return stats[which * pitch]; }
  __device__ S factor(int which) const { return coef[which * pitch]; }
};

template <typename S>
__device__ __forceinline__ RowTables<S> tables_at(const flce_rows& r, int64_t at) {
  return {(const S*)r.stats + at, r.coef ? (const S*)r.coef + at : NULL, r.stat_pitch};
}

/* What the target's column has beside the coefficient: its parts of smoothing and of the entropy's
 * gradient. From the statistics: the logit may be overwritten while others of the block read. */
template <typename S>
__device__ __forceinline__ S target_parts(const RowTables<S>& tables, const GradRow<S>& g, S w) {
  S parts = 0;
  if (g.entropy != 0) {
    const S nll = tables.stat(FLCE_STAT_NLL);
    /* exp(l_y - c) (middle - l_y), as exp(-nll) / inv_sum times nll - entropy. */
    const S exp_l = exp(-nll) / tables.stat(FLCE_STAT_INV_SUM);
    parts -= g.entropy * spread_of(exp_l, tables.stat(FLCE_STAT_ENTROPY), nll);
  }
  if (g.smooth != 0) parts -= g.smooth * w;
  return tables.stat(FLCE_STAT_SLOPE) * parts;
}

template <Kind KIND, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ GradRow<S> open_grad_row(const row_args& p, const Row<Z>& row,
                                                    const RowTables<S>& tables, double scale,
                                                    bool hide_target, bool z_is_exp) {
  GradRow<S> g = {};
  g.offset = tables.stat(FLCE_STAT_OFFSET);
  g.factor = (S)(z_is_exp ? 1.0 : scale);
  g.set_target = hide_target && row.target >= 0;
  if (!tables.coef) return g;
  g.factor = tables.factor(FLCE_COEF_ROW);
  if (z_is_exp) g.factor /= (S)scale;
  g.target = tables.factor(FLCE_COEF_TARGET);
  g.set_target = row.target >= 0;
  if constexpr (KIND == kGeneral) {
    g.smooth = tables.factor(FLCE_COEF_SMOOTH);
    g.soft = tables.factor(FLCE_COEF_SOFT);
    if (p.r.wants_entropy) {
      g.entropy = tables.factor(FLCE_COEF_ENTROPY);
      g.middle = tables.stat(FLCE_STAT_LSE) - tables.stat(FLCE_STAT_ENTROPY);
    }
    g.weighted = g.smooth != 0 || g.soft != 0;
    if (g.set_target) {
      const S w = row.class_weight ? row.class_weight[row.target] : 1;
      g.target += target_parts(tables, g, w);
    }
  }
  return g;
}

/* w_j times the `share` of one vector's columns. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void weigh_shares(const Row<Z>& row, int col, S (&share)[kVec<Z>]) {
  constexpr int N = kVec<Z>;
  if (!row.class_weight) return;
  S w[N];
  load_beside(row.class_weight, col, row.vocab, w);
#pragma unroll
  for (int e = 0; e < N; e++) share[e] *= w[e];
}

/* w (smooth + soft t) of one vector's columns. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void load_shares(const flce_rows& r, const Row<Z>& row,
                                            const GradRow<S>& g, int col, S (&share)[kVec<Z>]) {
  constexpr int N = kVec<Z>;
#pragma unroll
  for (int e = 0; e < N; e++) share[e] = g.smooth;
  if (row.probabilities) {
    S t[N];
    load_probabilities(row, r.probabilities_dtype, col, t);
#pragma unroll
    for (int e = 0; e < N; e++) share[e] = fma(g.soft, t[e], share[e]);
  }
  weigh_shares(row, col, share);
}

/* Gradients of one vector by the general kernel, of which `share` is taken. */
template <typename Out, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void general_gradients(const Row<Z>& row, const GradRow<S>& g,
                                                  bool z_is_exp, const Vec<Z, kVec<Z>>& raw,
                                                  int col, const S (&share)[kVec<Z>],
                                                  S (&v)[kVec<Z>]) {
  constexpr int N = kVec<Z>;
  S slope[N];
  if (z_is_exp) {
    unpack(raw, v);
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = v[e] * g.factor - share[e];
    return;
  }
  logits_of<sizeof(Out) == 2>(row, raw, col, v, slope);
#pragma unroll
  for (int e = 0; e < N; e++) {
    const S exp_l = exp_for<Out>(v[e] - g.offset);
    S product = exp_l * g.factor;
    /* An l of -inf, whose exp is 0, must not make NaN of it. */
    if (g.entropy != 0) product += g.entropy * -spread_of(exp_l, v[e], g.middle);
    v[e] = slope[e] * (product - share[e]);
  }
}

template <typename S, int N>
__device__ __forceinline__ void put_target(const GradRow<S>& g, int hit, S (&v)[N]) {
  if (!g.set_target || (unsigned)hit >= (unsigned)N) return;
#pragma unroll
  for (int e = 0; e < N; e++) {
    if (e == hit) v[e] = g.target;
  }
}

/* Gradients of one vector, which begins at column `col`. */
template <Kind KIND, typename Z, typename Out, typename S = stat_t<Z>>
__device__ __forceinline__ void grad_vector(const flce_rows& r, const Row<Z>& row,
                                            const GradRow<S>& g, bool z_is_exp,
                                            const Vec<Z, kVec<Z>>& raw, int col,
                                            Vec<Out, kVec<Z>>& packed) {
  constexpr int N = kVec<Z>;
  S v[N];
  if constexpr (KIND == kGeneral) {
    S share[N] = {};
    if (g.weighted) load_shares(r, row, g, col, share);
    general_gradients<Out>(row, g, z_is_exp, raw, col, share, v);
  } else {
    z_of<KIND == kBiased>(raw, row.bias, col, row.vocab, v);
#pragma unroll
    for (int e = 0; e < N; e++) {
      if constexpr (KIND != kExp) v[e] = exp_for<Out>(fma(v[e], row.scale, -g.offset));
      v[e] *= g.factor;
    }
  }
  put_target(g, row.target - col, v);
  pack(v, packed);
}

#endif
