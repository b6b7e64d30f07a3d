/* A row's sums and what follows from them, for the kernels of the forward and for tile_statistics
 * of the fused logits GEMM: logits l of a tile in the general kernels, the sums that options need,
 * the running maximum, and the statistics, loss and prediction that one thread writes at the end of
 * a row. How logits are loaded belongs in row.cuh. */
#ifndef FLCE_CUDA_ROWS_STATISTICS_CUH
#define FLCE_CUDA_ROWS_STATISTICS_CUH

#include "cuda/rows/row.cuh"

/* Sums over the columns without the target, of a thread and then of the block. Each sum has a
 * reference of its own (offset, *_from): if that is near the row's largest l, nothing cancels. v_j
 * is w_j, with probabilities w_j q_j. */
template <typename S>
struct RowSums {
  S offset; /* c, the reference of `rest` */
  S rest;   /* sum of exp(l_j - c) */
  /* weighted_gap: sum of v_j (weighted_gap_from - l_j) */
  S weighted_gap, weighted_gap_from;
  S weight_sum; /* sum of v_j */
  /* entropy_sum: sum of exp(l_j - c) (l_j - entropy_sum_from) */
  S entropy_sum, entropy_sum_from;
};

/* The largest l so far and its lowest column. */
template <typename S>
struct Best {
  S value;
  int column;
};

template <typename S>
__device__ __forceinline__ Best<S> no_best() {
  return {-infinity_of(S(0)), INT32_MAX};
}

/* Ties go to the lower column. A NaN never wins. */
template <typename S>
__device__ __forceinline__ Best<S> better_of(Best<S> a, Best<S> b) {
  const bool second = b.value > a.value || (b.value == a.value && b.column < a.column);
  return second ? b : a;
}

/* The warp's best; every lane gets it. */
template <typename S>
__device__ __forceinline__ Best<S> warp_best(Best<S> best) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) {
    best = better_of(best, Best<S>{__shfl_xor_sync(0xffffffffu, best.value, lane),
                                   __shfl_xor_sync(0xffffffffu, best.column, lane)});
  }
  return best;
}

/* The block's best; only thread 0 gets it. `scratch` holds kMaxWarps elements of shared memory. */
template <typename S>
__device__ __forceinline__ Best<S> block_best(Best<S> best, S* scratch) {
  __shared__ int columns[kMaxWarps];
  best = warp_best(best);
  if (threadIdx.x % kWarp == 0) {
    scratch[threadIdx.x / kWarp] = best.value;
    columns[threadIdx.x / kWarp] = best.column;
  }
  __syncthreads();
  for (int warp = 1; threadIdx.x == 0 && warp < (int)blockDim.x / kWarp; warp++) {
    best = better_of(best, Best<S>{scratch[warp], columns[warp]});
  }
  __syncthreads(); /* the next reduction writes `scratch` */
  return best;
}

/* ---- vectors and tiles of the general kernels ---- */

/* Whether a vector has columns that are excluded: outside the row, or the target. */
template <typename Z>
__device__ __forceinline__ bool has_excluded_columns(const Row<Z>& row, int col) {
  return col < 0 || col + kVec<Z> > row.vocab || (unsigned)(row.target - col) < (unsigned)kVec<Z>;
}

template <typename Z>
__device__ __forceinline__ bool is_excluded(const Row<Z>& row, int col) {
  return (unsigned)col >= (unsigned)row.vocab || col == row.target;
}

/* l of a vector's columns, and the curve's slope there. */
template <bool FAST, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void logits_of(const Row<Z>& row, const Vec<Z, kVec<Z>>& raw, int col,
                                          S (&l)[kVec<Z>], S (&slope)[kVec<Z>]) {
  constexpr int N = kVec<Z>;
  if (row.bias) {
    z_of<true>(raw, row.bias, col, row.vocab, l);
  } else {
    unpack(raw, l);
  }
  if (row.curve != FLCE_LINE) {
#pragma unroll
    for (int e = 0; e < N; e++) {
      const S t = capped<FAST>(row.curve, row.inner_scale, l[e]);
      l[e] = row.outer_scale * t;
      slope[e] = cap_slope(row.curve, t);
    }
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) {
      l[e] *= row.outer_scale;
      slope[e] = 1;
    }
  }
}

/* Sets l to -inf outside the row and at the target. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void exclude_columns(const Row<Z>& row, int col, S (&l)[kVec<Z>]) {
  if (!has_excluded_columns(row, col)) return;
#pragma unroll
  for (int e = 0; e < kVec<Z>; e++) {
    if (is_excluded(row, col + e)) l[e] = -infinity_of(S(0));
  }
}

/* l of this thread's vectors of a tile, -inf in excluded columns. */
template <bool FAST, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void tile_logits(const Row<Z>& row,
                                            const Vec<Z, kVec<Z>> (&raw)[kUnroll<Z>], int first,
                                            S (&l)[kUnroll<Z>][kVec<Z>]) {
#pragma unroll
  for (int u = 0; u < kUnroll<Z>; u++) {
    const int col = column_of<Z>(first + u * blockDim.x, row.lead);
    S slope[kVec<Z>];
    logits_of<FAST>(row, raw[u], col, l[u], slope);
    exclude_columns(row, col, l[u]);
  }
}

template <typename S, int U, int N>
__device__ __forceinline__ S tile_max(const S (&l)[U][N]) {
  S top = -infinity_of(S(0));
#pragma unroll
  for (int u = 0; u < U; u++) {
#pragma unroll
    for (int e = 0; e < N; e++) top = fmax(top, l[u][e]);
  }
  return top;
}

/* The lowest of this thread's columns of a tile whose l is `value`; one of them has it. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ int column_holding(const Row<Z>& row, S value, int first,
                                              const S (&l)[kUnroll<Z>][kVec<Z>]) {
  int column = INT32_MAX;
#pragma unroll
  for (int u = kUnroll<Z> - 1; u >= 0; u--) {
    const int col = column_of<Z>(first + u * blockDim.x, row.lead);
#pragma unroll
    for (int e = kVec<Z> - 1; e >= 0; e--) {
      if (l[u][e] == value) column = col + e;
    }
  }
  return column;
}

/* A vector of the row's target probabilities; 0 outside the row. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void load_probabilities(const Row<Z>& row, flce_dtype dtype, int col,
                                                   S (&t)[kVec<Z>]) {
  switch (dtype) {
    case FLCE_F64:
      load_column_vector((const double*)row.probabilities, col, row.vocab, t);
      break;
    case FLCE_F32:
      load_column_vector((const float*)row.probabilities, col, row.vocab, t);
      break;
    case FLCE_BF16:
      load_column_vector((const __nv_bfloat16*)row.probabilities, col, row.vocab, t);
      break;
    case FLCE_F16:
      load_column_vector((const __half*)row.probabilities, col, row.vocab, t);
      break;
  }
}

/* Adds one vector to weighted_gap and weight_sum. A column of weight 0 adds nothing, even where its
 * l is -inf. PROBABILITIES: the row may have them. */
template <bool PROBABILITIES, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void add_weighted_gaps(const flce_rows& r, const Row<Z>& row, int col,
                                                  const S (&l)[kVec<Z>], S from, RowSums<S>& sums) {
  constexpr int N = kVec<Z>;
  S w[N];
#pragma unroll
  for (int e = 0; e < N; e++) w[e] = 1;
  if (row.class_weight) load_column_vector(row.class_weight, col, row.vocab, w);
  if (PROBABILITIES && row.probabilities) {
    S t[N];
    load_probabilities(row, r.probabilities_dtype, col, t);
#pragma unroll
    for (int e = 0; e < N; e++) w[e] *= fma(row.hard, t[e], row.per_class);
  }
  if (has_excluded_columns(row, col)) {
#pragma unroll
    for (int e = 0; e < N; e++) {
      if (is_excluded(row, col + e)) w[e] = 0;
    }
  }
#pragma unroll
  for (int e = 0; e < N; e++) {
    sums.weight_sum += w[e];
    if (w[e] != 0) sums.weighted_gap += w[e] * (from - l[e]);
  }
}

/* The same for this thread's vectors of a tile. */
template <bool PROBABILITIES, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void add_tile_weighted_gaps(const flce_rows& r, const Row<Z>& row,
                                                       int first, const S (&l)[kUnroll<Z>][kVec<Z>],
                                                       S from, RowSums<S>& sums) {
#pragma unroll
  for (int u = 0; u < kUnroll<Z>; u++) {
    add_weighted_gaps<PROBABILITIES>(r, row, column_of<Z>(first + u * blockDim.x, row.lead), l[u],
                                     from, sums);
  }
}

/* exp(l - c) (l - from), with exp_l = exp(l - c); 0 where l is -inf and exp_l is 0. */
template <typename S>
__device__ __forceinline__ S entropy_term(S exp_l, S l, S from) {
  return exp_l * fmax(l - from, -largest_finite(l));
}

/* ---- a running maximum ---- */

/* A thread's running maximum: of l in the general kernel, of z in the plain ones. `unit` is l per
 * unit of it (1, or scale). */
template <typename S>
struct Running {
  S top, shift; /* shift = unit top, the reference of the thread's sums; 0 while top is -inf */
};

/* Raises the running maximum to `highest` and moves the sums to the new reference. */
template <Kind KIND, typename S>
__device__ __forceinline__ void raise_top(Running<S>& run, RowSums<S>& sums, S highest, S unit) {
  const S raised = unit * highest;
  const S factor = exp_fast(fma(run.top, unit, -raised)); /* a top of -inf: factor and sums are 0 */
  if constexpr (KIND == kGeneral) {
    const S step = raised - run.shift;
    sums.entropy_sum = factor * (sums.entropy_sum - step * sums.rest);
    sums.weighted_gap += step * sums.weight_sum;
  }
  sums.rest *= factor;
  run.top = highest;
  run.shift = raised;
}

/* Moves a thread's sums to the block's offset. A thread that has seen only -inf has the sum 0 for
 * any offset (NaN if it has seen a NaN). */
template <Kind KIND, typename S>
__device__ __forceinline__ void rebase_sums(const Running<S>& run, RowSums<S>& sums, S unit) {
  const S none = -infinity_of(S(0)), c = sums.offset;
  const S factor = run.top == none ? 1 : exp_fast(fma(run.top, unit, -c));
  if constexpr (KIND == kGeneral) {
    const S step = c - run.shift;
    if (run.top != none) sums.entropy_sum = factor * (sums.entropy_sum - step * sums.rest);
    sums.weighted_gap += step * sums.weight_sum;
    sums.weighted_gap_from = sums.entropy_sum_from = c;
  }
  sums.rest *= factor;
}

/* Adds exp(l - shift) of one vector to the sums, and the entropy's terms if `entropy`. */
template <typename S, int N>
__device__ __forceinline__ void add_exps(const S (&l)[N], S shift, bool entropy, RowSums<S>& sums) {
  if (entropy) {
#pragma unroll
    for (int e = 0; e < N; e++) {
      const S value = exp_fast(l[e] - shift);
      sums.rest += value;
      sums.entropy_sum += entropy_term(value, l[e], shift);
    }
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) sums.rest += exp_fast(l[e] - shift);
  }
}

/* ---- the end of a row ---- */

/* The row's offset c: its largest l, but 0 where that is -inf, so that every exp(l - c) is 0. */
template <typename S>
__device__ __forceinline__ S offset_of(S top) {
  return top == -infinity_of(top) ? 0 : top;
}

/* Adds up the sums of all threads of the block. */
template <Kind KIND, typename S>
__device__ __forceinline__ void add_up(const row_args& p, RowSums<S>& sums, S* scratch) {
  sums.rest = block_sum(sums.rest, scratch);
  if constexpr (KIND == kSmooth) sums.weighted_gap = block_sum(sums.weighted_gap, scratch);
  if constexpr (KIND == kGeneral) {
    if (p.weighted) {
      sums.weighted_gap = block_sum(sums.weighted_gap, scratch);
      sums.weight_sum = block_sum(sums.weight_sum, scratch);
    }
    if (p.r.wants_entropy) sums.entropy_sum = block_sum(sums.entropy_sum, scratch);
  }
}

/* Whether the targets are probabilities. */
template <Kind KIND, typename Z>
__device__ __forceinline__ bool has_no_target(const Row<Z>& row) {
  return KIND == kGeneral && row.target < 0;
}

/* Statistics that follow from a row's sums: exp_target is exp(l_y - c); sum is sum_j exp(l_j - c),
 * the target included; log_sum is log(sum); nll is lse - l_y; lse is the logsumexp. With
 * probabilities exp_target and nll are 0. */
template <typename S>
struct RowEnd {
  S exp_target, sum, log_sum, nll, lse;
};

/* `c` is the row's offset, `rest` the sum without the target. */
template <Kind KIND, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ RowEnd<S> end_of(const Row<Z>& row, S c, S rest) {
  const S l = row.l_target, inf = infinity_of(l);
  RowEnd<S> end;
  if (has_no_target<KIND>(row)) {
    end.exp_target = end.nll = 0;
    end.sum = rest;
    end.log_sum = log(rest);
    end.lse = c + end.log_sum;
    return end;
  }
  /* A target with l = +inf would look like one of probability 1. Eager gives NaN. */
  end.exp_target = l == inf ? l - l : exp(l - c);
  end.sum = rest + end.exp_target;
  end.log_sum = log(end.sum);
  /* log1p keeps every digit of a tiny loss. The other form serves where exp(l - c) is subnormal or
   * 0 or the ratio overflows. A NaN takes the other form and stays NaN. */
  const S ratio = rest / end.exp_target;
  const bool direct = end.exp_target >= smallest_normal(l) && ratio < inf;
  end.nll = direct ? log1p(ratio) : end.log_sum + (c - l);
  end.lse = isfinite(l) ? l + end.nll : c + end.log_sum;
  return end;
}

/* lse - from, where `from` is a sum's reference: l_target, c, or 0 (row.reference). */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ S lse_above(const Row<Z>& row, const RowEnd<S>& end, S c, S from) {
  if (row.target >= 0 && from == row.l_target) return end.nll;
  return from == c ? end.log_sum : end.lse; /* else `from` is 0 */
}

/* The row's loss, times its token weight. */
template <Kind KIND, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ S loss_of(const row_args& p, const Row<Z>& row, int64_t at,
                                     const RowSums<S>& sums, const RowEnd<S>& end) {
  const flce_rows& r = p.r;
  const S* scalars = (const S*)r.scalars;
  S loss;
  if (has_no_target<KIND>(row)) {
    loss = sums.weighted_gap + sums.weight_sum * end.log_sum;
  } else {
    const S w = row.class_weight ? row.class_weight[row.target] : 1;
    const S factor = (S)p.hard * w;
    /* A class of weight 0 adds 0, even where its l is -inf; a NaN stays. */
    loss = factor == 0 && end.nll == infinity_of(factor) ? 0 : factor * end.nll;
    if ((KIND == kGeneral && p.weighted) || KIND == kSmooth) {
      const S own = w != 0 ? w * (sums.weighted_gap_from - row.l_target) : 0;
      const S above = lse_above(row, end, sums.offset, sums.weighted_gap_from);
      loss +=
          (S)p.per_class * (scalars[FLCE_SCALAR_WEIGHT_TOTAL] * above + (sums.weighted_gap + own));
    }
  }
  if (r.options.z_loss != 0) {
    loss += (S)r.options.z_loss * scalars[FLCE_SCALAR_Z_FACTOR] * (end.lse * end.lse);
  }
  return r.token_weight ? loss * ((const S*)r.token_weight)[at] : loss;
}

/* The entropy of the row's probabilities. Rounding may make it negative: then 0. A NaN stays. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ S entropy_of(const Row<Z>& row, const RowSums<S>& sums,
                                        const RowEnd<S>& end) {
  const S from = sums.entropy_sum_from;
  S entropy_sum = sums.entropy_sum;
  if (row.target >= 0) entropy_sum += entropy_term(end.exp_target, row.l_target, from);
  const S entropy = lse_above(row, end, sums.offset, from) - entropy_sum / end.sum;
  return entropy < 0 ? 0 : entropy;
}

/* Writes the statistics and the loss of a row. Called by one thread. `at`: the row's position in
 * the per-row vectors. */
template <Kind KIND, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ RowStatistics<S> write_statistics(const row_args& p, const Row<Z>& row,
                                                             int64_t at, const RowSums<S>& sums,
                                                             const RowEnd<S>& end) {
  const flce_rows& r = p.r;
  S entropy = 0, slope = has_no_target<KIND>(row) ? 0 : 1;
  if constexpr (KIND == kGeneral) {
    if (r.wants_entropy) entropy = entropy_of(row, sums, end);
    if (row.target >= 0) slope = cap_slope(row.curve, row.l_target / row.outer_scale);
  }
  const RowStatistics<S> made = {end.lse, end.nll, 1 / end.sum, slope,
                                 has_no_target<KIND>(row) ? sums.weight_sum : 0};
  stat_row<S>(r, FLCE_STAT_LSE)[at] = made.lse;
  stat_row<S>(r, FLCE_STAT_NLL)[at] = made.nll;
  stat_row<S>(r, FLCE_STAT_OFFSET)[at] = sums.offset;
  stat_row<S>(r, FLCE_STAT_INV_SUM)[at] = made.inv_sum;
  stat_row<S>(r, FLCE_STAT_ENTROPY)[at] = entropy;
  stat_row<S>(r, FLCE_STAT_SLOPE)[at] = made.slope;
  stat_row<S>(r, FLCE_STAT_WEIGHT_SUM)[at] = made.weight_sum;
  stat_row<S>(r, FLCE_STAT_TAIL_LSE)[at] = 0; /* tail_rows writes it where it is wanted */
  if (r.loss) ((S*)r.loss)[at] = loss_of<KIND>(p, row, at, sums, end);
  return made;
}

/* The same, from sums whose reference is the row's offset c. */
template <Kind KIND, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void write_statistics(const row_args& p, const Row<Z>& row, int64_t at,
                                                 const RowSums<S>& sums) {
  write_statistics<KIND>(p, row, at, sums, end_of<KIND>(row, sums.offset, sums.rest));
}

/* The predicted class; `best` leaves the target's column out. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ int64_t prediction_of(const Row<Z>& row, Best<S> best) {
  if (row.target >= 0) best = better_of(best, Best<S>{row.l_target, row.target});
  /* Where all l are -inf (or NaN), class 0. */
  return best.value > -infinity_of(S(0)) ? best.column : 0;
}

/* Blank statistics of a row that is not valid; an absent row has none. Called by the whole
 * block. */
template <typename S>
__device__ __forceinline__ void write_no_statistics(const flce_rows& r, RowRef ref) {
  if (threadIdx.x != 0 || ref.kind == kRowAbsent) return;
  write_blank(r, ref.at, blank_of<S>(ref));
}

#endif
