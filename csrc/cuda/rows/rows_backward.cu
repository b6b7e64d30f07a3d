/* The backend function grad_rows: gradient rows (dz or E) from logits, or from rows that already
 * hold exp(l - c). One thread block a row. */
#include "cuda/backend.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/rows/statistics.cuh"
#include "loss.h"

/* What a row's gradient is made of: out_j = slope_j (exp(l_j - offset) (factor + entropy
 * (mean_logit - l_j)) - w_j (smooth + soft t_j)); if set_target, the target's column is `target`
 * instead. weighted: smooth or soft is not 0. */
template <typename S>
struct GradRow {
  S factor, offset, target, smooth, soft, entropy, mean_logit;
  bool set_target, weighted;
};

/* The terms of label smoothing and of the entropy's gradient in the target's column, which
 * FLCE_COEF_TARGET lacks. Made from the statistics and not from the target's logit, which another
 * thread of the block may already have overwritten. */
template <typename S>
__device__ __forceinline__ S target_parts(const flce_rows& r, const GradRow<S>& g, int64_t at,
                                          S w) {
  S parts = 0;
  if (g.entropy != 0) {
    const S nll = stat_row<S>(r, FLCE_STAT_NLL)[at];
    /* exp(l_y - c) (mean_logit - l_y) = exp(-nll) / inv_sum (nll - entropy). */
    const S exp_l = exp(-nll) / stat_row<S>(r, FLCE_STAT_INV_SUM)[at];
    parts -= g.entropy * entropy_term(exp_l, stat_row<S>(r, FLCE_STAT_ENTROPY)[at], nll);
  }
  if (g.smooth != 0) parts -= g.smooth * w;
  return stat_row<S>(r, FLCE_STAT_SLOPE)[at] * parts;
}

/* Takes TAIL_LSE as the offset in place of c, and adds the gradient of TAIL_LSE. The terms then
 * hold for the tail's columns, where exp(l - TAIL_LSE) is at most 1 however small the tail's
 * probability is; class_gradients overwrites the other columns. */
template <typename S>
__device__ __forceinline__ void refer_to_tail(const flce_rows& r, int64_t at, GradRow<S>& g) {
  const S *stats = (const S*)r.stats + at, *coef = (const S*)r.coef + at;
  const S tail = stats[FLCE_STAT_TAIL_LSE * r.stat_pitch];
  const S factor = coef[FLCE_COEF_TAIL * r.stat_pitch];
  if (tail == -infinity_of(tail)) return; /* there is no such column, or all have l = -inf */
  S ratio = exp(tail - g.offset);
  /* It overflows only where another rank holds the tail's large logits: then exp(l - TAIL_LSE) is 0
   * for every l of this rank. */
  if (isinf(ratio)) ratio = 0;
  const S l_y = stats[FLCE_STAT_LSE * r.stat_pitch] - stats[FLCE_STAT_NLL * r.stat_pitch];
  const S e_y = l_y < tail ? exp(l_y - tail) : (S)1;
  g.factor = g.factor * ratio + factor;
  g.entropy *= ratio;
  g.offset = tail;
  g.target += factor * stats[FLCE_STAT_SLOPE * r.stat_pitch] * e_y;
}

/* Without r.coef the row is `scale` exp(l - c), and 0 at the target if `hide_target`; if z_is_exp,
 * z already includes `scale`, and l is taken from it: its error is the relative error of z. */
template <Kind KIND, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ GradRow<S> open_grad_row(const row_args& p, const Row<Z>& row,
                                                    int64_t at, double scale, bool hide_target,
                                                    bool z_is_exp) {
  const flce_rows& r = p.r;
  GradRow<S> g = {};
  g.offset = stat_row<S>(r, FLCE_STAT_OFFSET)[at];
  g.factor = (S)(z_is_exp ? 1.0 : scale);
  const bool has_target = (unsigned)row.target < (unsigned)row.vocab;
  g.set_target = hide_target && has_target;
  if (!r.coef) return g;
  const S* coef = (const S*)r.coef + at;
  g.factor = coef[FLCE_COEF_EXP * r.stat_pitch];
  if (z_is_exp) g.factor /= (S)scale;
  g.target = coef[FLCE_COEF_TARGET * r.stat_pitch];
  g.set_target = has_target;
  if constexpr (KIND == kGeneral) {
    g.smooth = coef[FLCE_COEF_SMOOTH * r.stat_pitch];
    g.soft = coef[FLCE_COEF_SOFT * r.stat_pitch];
    if (r.wants_entropy) {
      g.entropy = coef[FLCE_COEF_ENTROPY * r.stat_pitch];
      g.mean_logit = stat_row<S>(r, FLCE_STAT_LSE)[at] - stat_row<S>(r, FLCE_STAT_ENTROPY)[at];
    }
    g.weighted = g.smooth != 0 || g.soft != 0;
    if (g.set_target) {
      const S w = row.class_weight ? row.class_weight[row.target] : 1;
      g.target += target_parts(r, g, at, w);
    }
    if (z_is_exp && g.entropy != 0) { /* l is log(scale exp(l - c)); the mean has that origin too */
      g.entropy /= (S)scale;
      g.mean_logit = log((S)scale) - log(stat_row<S>(r, FLCE_STAT_INV_SUM)[at]) -
                     stat_row<S>(r, FLCE_STAT_ENTROPY)[at];
    }
  }
  if (r.has_tail_gradient) refer_to_tail(r, at, g);
  return g;
}

/* part_j = w_j (smooth + soft t_j) of one vector's columns. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void load_target_parts(const flce_rows& r, const Row<Z>& row,
                                                  const GradRow<S>& g, int col,
                                                  S (&part)[kVec<Z>]) {
  constexpr int N = kVec<Z>;
#pragma unroll
  for (int e = 0; e < N; e++) part[e] = g.smooth;
  if (row.probabilities) {
    S t[N];
    load_probabilities(row, r.probabilities_dtype, col, t);
#pragma unroll
    for (int e = 0; e < N; e++) part[e] = fma(g.soft, t[e], part[e]);
  }
  if (row.class_weight) {
    S w[N];
    load_column_vector(row.class_weight, col, row.vocab, w);
#pragma unroll
    for (int e = 0; e < N; e++) part[e] *= w[e];
  }
}

/* Gradients of one vector, general kernel. */
template <typename Out, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void general_gradients(const flce_rows& r, const Row<Z>& row,
                                                  const GradRow<S>& g, bool z_is_exp,
                                                  const Vec<Z, kVec<Z>>& raw, int col,
                                                  S (&v)[kVec<Z>]) {
  constexpr int N = kVec<Z>;
  S part[N] = {}, slope[N];
  if (g.weighted) load_target_parts(r, row, g, col, part);
  if (z_is_exp) {
    unpack(raw, v);
#pragma unroll
    for (int e = 0; e < N; e++) {
      S exp_part = v[e] * g.factor;
      if (g.entropy != 0)
        exp_part += g.entropy * -entropy_term(v[e], log_for<Out>(v[e]), g.mean_logit);
      v[e] = exp_part - part[e];
    }
    return;
  }
  logits_of<sizeof(Out) == 2>(row, raw, col, v, slope);
#pragma unroll
  for (int e = 0; e < N; e++) {
    const S exp_l = exp_for<Out>(v[e] - g.offset);
    S exp_part = exp_l * g.factor;
    /* entropy_term gives 0 and not NaN where l is -inf. */
    if (g.entropy != 0) exp_part += g.entropy * -entropy_term(exp_l, v[e], g.mean_logit);
    v[e] = slope[e] * (exp_part - part[e]);
  }
}

/* Gradients of one vector, whose first column is `col`. */
template <Kind KIND, typename Z, typename Out, typename S = stat_t<Z>>
__device__ __forceinline__ void grad_vector(const flce_rows& r, const Row<Z>& row,
                                            const GradRow<S>& g, bool z_is_exp,
                                            const Vec<Z, kVec<Z>>& raw, int col,
                                            Vec<Out, kVec<Z>>& packed) {
  constexpr int N = kVec<Z>;
  const int hit = row.target - col;
  S v[N];
  if constexpr (KIND == kGeneral) {
    general_gradients<Out>(r, row, g, z_is_exp, raw, col, v);
  } else {
    z_of<KIND == kBiased>(raw, row.bias, col, row.vocab, v);
#pragma unroll
    for (int e = 0; e < N; e++) {
      if constexpr (KIND != kExp) v[e] = exp_for<Out>(fma(v[e], row.scale, -g.offset));
      v[e] *= g.factor;
    }
  }
  if (g.set_target && (unsigned)hit < (unsigned)N) {
#pragma unroll
    for (int e = 0; e < N; e++) {
      if (e == hit) v[e] = g.target;
    }
  }
  pack(v, packed);
}

template <typename Z, typename Out, Kind KIND>
__global__ void __launch_bounds__(kRowThreads, row_blocks(sizeof(Z), KIND))
    grad_rows(const __grid_constant__ row_args p, double scale, bool hide_target, bool z_is_exp) {
  using S = stat_t<Z>;
  constexpr int N = kVec<Z>;
  const flce_rows& r = p.r;
  Out* out = (Out*)r.out + (int64_t)blockIdx.x * r.out_pitch;
  const RowRef ref = row_ref_of(r, blockIdx.x);
  if (ref.kind != kRowValid) {
    fill_row(out, (int)r.vocab, from_stat<Out>(blank_of<S>(ref)));
    pad_row(out, r.vocab, r.out_columns);
    return;
  }
  const Row<Z> row = open_row_view<KIND, Z>(p, ref.at);
  const GradRow<S> g = open_grad_row<KIND>(p, row, ref.at, scale, hide_target, z_is_exp);
  for (int first = 0; first < row.vectors; first += kUnroll<Z> * blockDim.x) {
    const int mine = first + threadIdx.x;
    Vec<Z, N> raw[kUnroll<Z>];
    load_tile<true>(row.z, row.lead, row.vocab, mine, raw);
    /* In place with Out half the size of Z, a tile's gradients overwrite logits of this tile and of
     * earlier ones, read by other threads too: all must have read this tile. With equal sizes a
     * thread overwrites only what it has read itself. */
    if constexpr (sizeof(Out) != sizeof(Z)) __syncthreads();
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      const int col = column_of<Z>(mine + u * blockDim.x, row.lead);
      Vec<Out, N> packed;
      grad_vector<KIND>(r, row, g, z_is_exp, raw[u], col, packed);
      store_columns(out, col, row.vocab, packed);
    }
  }
  pad_row(out, r.vocab, r.out_columns);
}

/* ---- probabilities without any other option ---- */

/* This thread's probabilities of a tile: the columns whose logits load_tile loads. */
template <typename T, typename Z>
__device__ __forceinline__ void load_tile_probabilities(const Row<Z>& row, int first,
                                                        float (&t)[kUnroll<Z>][kVec<Z>]) {
  constexpr int N = kVec<Z>;
  const T* side = (const T*)row.probabilities;
  const int begin = column_of<Z>(first - threadIdx.x, row.lead);
  const int end = begin + kUnroll<Z> * N * blockDim.x;
  if (begin >= 0 && end <= row.vocab && is_aligned(side + begin, min(16, N * (int)sizeof(T)))) {
    Vec<T, N> raw[kUnroll<Z>];
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      load_vec<true>(side + column_of<Z>(first + u * blockDim.x, row.lead), raw[u]);
    }
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) unpack(raw[u], t[u]);
  } else {
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      load_column_vector(side, column_of<Z>(first + u * blockDim.x, row.lead), row.vocab, t[u]);
    }
  }
}

/* grad_rows for probabilities of type T and bfloat16 gradients, without any other option. Every row
 * is valid. */
template <typename Z, typename T>
__global__ void __launch_bounds__(kRowThreads, 2)
    soft_grad_rows(const __grid_constant__ row_args p) {
  constexpr int N = kVec<Z>;
  const flce_rows& r = p.r;
  __nv_bfloat16* out = (__nv_bfloat16*)r.out + (int64_t)blockIdx.x * r.out_pitch;
  const int64_t at = vectors_at(r, blockIdx.x);
  const Row<Z> row = open_row_view<kGeneral, Z>(p, at);
  const float* coef = (const float*)r.coef + at;
  const float factor = coef[FLCE_COEF_EXP * r.stat_pitch];
  const float soft = coef[FLCE_COEF_SOFT * r.stat_pitch];
  const float offset = stat_row<float>(r, FLCE_STAT_OFFSET)[at];
  for (int first = 0; first < row.vectors; first += kUnroll<Z> * blockDim.x) {
    const int mine = first + threadIdx.x;
    Vec<Z, N> raw[kUnroll<Z>];
    float t[kUnroll<Z>][N];
    load_tile<true>(row.z, row.lead, row.vocab, mine, raw);
    load_tile_probabilities<T>(row, mine, t);
    if constexpr (sizeof(Z) != 2) __syncthreads(); /* in place: see grad_rows */
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      float v[N];
      unpack(raw[u], v);
#pragma unroll
      for (int e = 0; e < N; e++) {
        v[e] = exp_fast(fmaf(v[e], row.scale, -offset)) * factor - soft * t[u][e];
      }
      Vec<__nv_bfloat16, N> packed;
      pack(v, packed);
      store_columns(out, column_of<Z>(mine + u * blockDim.x, row.lead), row.vocab, packed);
    }
  }
  pad_row(out, r.vocab, r.out_columns);
}

/* ---- launch ---- */

typedef void (*soft_kernel)(const row_args);

template <typename Z>
static soft_kernel soft_kernel_of(flce_dtype probabilities) {
  return probabilities == FLCE_BF16  ? soft_grad_rows<Z, __nv_bfloat16>
         : probabilities == FLCE_F16 ? soft_grad_rows<Z, __half>
         : probabilities == FLCE_F32 ? soft_grad_rows<Z, float>
                                     : NULL;
}

/* The kernel for probabilities without any other option; NULL where the general one has to be
 * used. */
static soft_kernel soft_kernel_for(const flce_rows* r) {
  const flce_loss* o = &r->options;
  if (r->target || r->index || !r->coef || r->bias || r->class_weight || r->temperature ||
      r->wants_entropy || o->label_smoothing > 0 || flce_caps_logits(o) || r->has_tail_gradient ||
      r->out_dtype != FLCE_BF16) {
    return NULL;
  }
  if (r->z_dtype == FLCE_F32) return soft_kernel_of<float>(r->probabilities_dtype);
  return r->z_dtype == FLCE_BF16 ? soft_kernel_of<__nv_bfloat16>(r->probabilities_dtype) : NULL;
}

typedef void (*grad_kernel)(const row_args, double, bool, bool);

/* The plain kinds need FLCE_COEF_EXP and FLCE_COEF_TARGET alone. */
static Kind backward_kind(const flce_rows* r, bool z_is_exp) {
  const bool terms = r->coef && (r->options.label_smoothing > 0 || r->wants_entropy || !r->target);
  if (terms || flce_caps_logits(&r->options)) return kGeneral;
  if (r->temperature && !z_is_exp) return kGeneral;
  return z_is_exp ? kExp : r->bias ? kBiased : kPlain;
}

/* NULL where no kernel exists. Rows that hold exp have the dtype of the output, and their bias is
 * already in them. */
template <typename Z, typename Out>
static grad_kernel grad_kernel_of(Kind kind, bool z_is_exp) {
  if (z_is_exp && sizeof(Z) != sizeof(Out)) return NULL;
  if constexpr (sizeof(Z) == sizeof(Out)) {
    if (kind == kExp) return grad_rows<Z, Out, kExp>;
  }
  return kind == kPlain    ? grad_rows<Z, Out, kPlain>
         : kind == kBiased ? grad_rows<Z, Out, kBiased>
                           : grad_rows<Z, Out, kGeneral>;
}

flce_status cuda_grad_rows(void* self, const flce_grad_rows_args* call) {
  const flce_rows* r = call->rows;
  const bool z_is_exp = call->z_is_exp;
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  if (z_is_exp && (flce_caps_logits(&r->options) || !r->target || r->has_tail_gradient)) {
    return flce_fail(FLCE_UNSUPPORTED,
                     "grad_rows: no gradient from exp rows with a softcap, probabilities or a "
                     "tail");
  }
  FLCE_TRY(check_rows(r, "grad_rows"));
  const soft_kernel soft = soft_kernel_for(r);
  if (soft) {
    soft<<<(unsigned)r->rows, row_threads(r), 0, stream_of(self)>>>(make_args(r));
    FLCE_LAUNCHED("grad_rows");
    return FLCE_OK;
  }
  const flce_dtype z = r->z_dtype, out = r->out_dtype;
  const Kind kind = backward_kind(r, z_is_exp);
  grad_kernel kernel = NULL;
  if (z == out) {
    FLCE_WITH_TYPE(z, T, kernel = (grad_kernel_of<T, T>(kind, z_is_exp)));
  } else if (z == FLCE_F32 && out == FLCE_BF16) {
    kernel = grad_kernel_of<float, __nv_bfloat16>(kind, z_is_exp);
  } else if (z == FLCE_F32 && out == FLCE_F16) {
    kernel = grad_kernel_of<float, __half>(kind, z_is_exp);
  }
  if (!kernel) return no_row_kernel(r, z_is_exp ? "grad_rows of exp rows" : "grad_rows");
  kernel<<<(unsigned)r->rows, row_threads(r), 0, stream_of(self)>>>(make_args(r), call->scale,
                                                                    call->hide_target, z_is_exp);
  FLCE_LAUNCHED("grad_rows");
  return FLCE_OK;
}
