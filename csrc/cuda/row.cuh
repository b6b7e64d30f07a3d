/* How a block walks one row: tiles of kUnroll 16-byte vectors a thread, from the 16-byte boundary
 * at or before the row's first logit, so that rows of any pitch and any vocabulary are read in
 * whole vectors except for the two at the ends. Columns are counted in 32 bits (kMaxVocab). */
#ifndef FLCE_CUDA_ROW_CUH
#define FLCE_CUDA_ROW_CUH

#include "common.cuh"

enum { kRowThreads = 512, kMaxVocab = 1 << 30 };

/* Vectors in flight for each thread: 16 logits, which leaves room for three blocks on an SM. */
template <typename Z>
constexpr int kUnroll = sizeof(Z) == 2 ? 2 : 4;

/* Blocks of an SM that a row kernel's registers must leave room for: as many as spill nothing. */
constexpr int row_blocks(size_t z_size, bool bias, bool smooth) {
  return z_size == 8 || (bias && smooth) ? 1 : bias || smooth ? 2 : 3;
}

constexpr float kLog2e = 1.44269504f;

__device__ __forceinline__ float infinity_of(float) {
  return INFINITY;
}
__device__ __forceinline__ double infinity_of(double) {
  return (double)INFINITY;
}
__device__ __forceinline__ float smallest_normal(float) {
  return 1.17549435e-38f;
}
__device__ __forceinline__ double smallest_normal(double) {
  return 2.2250738585072014e-308;
}

/* 2^x within 2^-22 of its value, results below 2^-126 flushed to 0. */
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* exp(x) for x <= 60: the product's rounding adds |x| 2^-24, so terms that matter (x near the row's
 * largest) are right to a few 2^-22, far below the rounding of a 16-bit result. */
__device__ __forceinline__ float exp_fast(float x) {
  return exp2_fast(x * kLog2e);
}
__device__ __forceinline__ double exp_fast(double x) {
  return exp(x);
}

/* exp(x) as good as Out can hold. */
template <typename Out, typename S>
__device__ __forceinline__ S exp_for(S x) {
  if constexpr (sizeof(Out) >= 4) {
    return exp(x);
  } else {
    return exp_fast(x);
  }
}

/* ---- access ---- */

/* Elements between the 16-byte boundary at or before `row` and `row`. */
template <typename Z>
__device__ __forceinline__ int lead_of(const Z* row) {
  return (int)(((uintptr_t)row & 15) / sizeof(Z));
}

/* First column of vector `v` of a row; negative in the first vector of a row with a lead. */
template <typename Z>
__device__ __forceinline__ int column_of(int v, int lead) {
  return v * kVec<Z> - lead;
}

template <typename Z>
__device__ __forceinline__ int vectors_of(int lead, int vocab) {
  return (lead + vocab + kVec<Z> - 1) / kVec<Z>;
}

/* Logits [col, col + kVec) of a row, `outside` beyond its ends. */
template <bool STREAM, typename Z>
__device__ __forceinline__ void load_columns(const Z* row, int col, int vocab, Vec<Z, kVec<Z>>& v) {
  constexpr int N = kVec<Z>;
  if (col >= 0 && col + N <= vocab) {
    load_vec<STREAM>(row + col, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) {
      v.at[e] = (unsigned)(col + e) < (unsigned)vocab ? row[col + e] : from_stat<Z>(-INFINITY);
    }
  }
}

/* This thread's vectors first + u blockDim. The tiles inside the row, all but the outermost, are
 * read without a branch between the accesses. */
template <bool STREAM, typename Z>
__device__ __forceinline__ void load_tile(const Z* row, int lead, int vocab, int first,
                                          Vec<Z, kVec<Z>> (&raw)[kUnroll<Z>]) {
  const int begin = column_of<Z>(first - threadIdx.x, lead);
  const int end = begin + kUnroll<Z> * kVec<Z> * blockDim.x;
  if (begin >= 0 && end <= vocab) {
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      load_vec<STREAM>(row + column_of<Z>(first + u * blockDim.x, lead), raw[u]);
    }
  } else {
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      load_columns<STREAM>(row, column_of<Z>(first + u * blockDim.x, lead), vocab, raw[u]);
    }
  }
}

/* The same of a vector beside the row (bias, class weights), whose alignment is its own. */
template <typename S, int N>
__device__ __forceinline__ void load_beside(const S* side, int col, int vocab, S (&v)[N]) {
  if (col >= 0 && col + N <= vocab && is_aligned(side + col, 16)) {
    Vec<S, N> raw;
    load_vec<false>(side + col, raw);
    unpack(raw, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = (unsigned)(col + e) < (unsigned)vocab ? side[col + e] : 0;
  }
}

template <typename Out, int N>
__device__ __forceinline__ void store_columns(Out* row, int col, int vocab, const Vec<Out, N>& v) {
  if (col >= 0 && col + N <= vocab && is_aligned(row + col, sizeof(v) < 16 ? sizeof(v) : 16)) {
    store_vec(row + col, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) {
      if ((unsigned)(col + e) < (unsigned)vocab) row[col + e] = v.at[e];
    }
  }
}

template <typename Out>
__device__ __forceinline__ void fill_row(Out* row, int vocab, Out value) {
  constexpr int N = kVec<Out>;
  const int lead = lead_of(row), vectors = vectors_of<Out>(lead, vocab);
  Vec<Out, N> v;
#pragma unroll
  for (int e = 0; e < N; e++) v.at[e] = value;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) {
    store_columns(row, column_of<Out>(i, lead), vocab, v);
  }
}

/* Logits as the statistics see them. */
template <bool BIAS, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void logits_of(const Vec<Z, kVec<Z>>& raw, const S* bias, int col,
                                          int vocab, S (&v)[kVec<Z>]) {
  unpack(raw, v);
  if constexpr (BIAS) {
    S b[kVec<Z>];
    load_beside(bias, col, vocab, b);
#pragma unroll
    for (int e = 0; e < kVec<Z>; e++) v[e] += b[e];
  }
}

/* Puts -inf where the target stands: exp gives 0 there, in the row and in its sum. */
template <typename Z>
__device__ __forceinline__ void hide_column(Vec<Z, kVec<Z>>& raw, int hit) {
  if ((unsigned)hit >= (unsigned)kVec<Z>) return;
#pragma unroll
  for (int e = 0; e < kVec<Z>; e++) {
    if (e == hit) raw.at[e] = from_stat<Z>(-INFINITY);
  }
}

/* ---- rows ---- */

/* One row of flce_rows as a block sees it. */
template <typename Z>
struct Row {
  using S = stat_t<Z>;
  int64_t index;
  const Z* z;
  const S* bias;
  const S* class_weight;
  int vocab, target, lead, vectors;
  S z_target;
  S reference; /* of the smoothing sum: z_target, 0 where that is not finite */
};

enum RowKind { kRowValid, kRowIgnored, kRowOutOfRange };

/* The kind of this block's row. */
__device__ __forceinline__ RowKind row_kind(const flce_rows& r) {
  const int64_t y = r.target[blockIdx.x];
  if (y == r.ignore_index) return kRowIgnored;
  return y >= 0 && y < r.vocab ? kRowValid : kRowOutOfRange;
}

template <typename Z>
__device__ __forceinline__ Row<Z> open_row(const flce_rows& r) {
  using S = stat_t<Z>;
  Row<Z> row;
  row.index = blockIdx.x;
  row.z = (const Z*)r.z + row.index * r.z_pitch;
  row.bias = (const S*)r.bias;
  row.class_weight = (const S*)r.class_weight;
  row.vocab = (int)r.vocab;
  row.target = (int)r.target[row.index];
  row.lead = lead_of(row.z);
  row.vectors = vectors_of<Z>(row.lead, row.vocab);
  row.z_target = to_stat(row.z[row.target]) + (r.bias ? row.bias[row.target] : 0);
  row.reference = isfinite(row.z_target) ? row.z_target : 0;
  return row;
}

/* Adds w_j (reference - z_j) over the columns of one vector, the target left out. */
template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ S smoothing_sum(const Row<Z>& row, int col, const S (&z)[kVec<Z>]) {
  constexpr int N = kVec<Z>;
  S w[N], sum = 0;
#pragma unroll
  for (int e = 0; e < N; e++) w[e] = 1;
  if (row.class_weight) load_beside(row.class_weight, col, row.vocab, w);
#pragma unroll
  for (int e = 0; e < N; e++) {
    const bool counts = (unsigned)(col + e) < (unsigned)row.vocab && col + e != row.target;
    if (counts) sum += w[e] * (row.reference - z[e]);
  }
  return sum;
}

template <typename S>
__device__ __forceinline__ S* stat_row(const flce_rows& r, int which) {
  return (S*)r.stats + which * r.stat_pitch;
}

/* Statistics and loss of a row from its offset c, sum_rest (exp(z - c) summed without the target)
 * and the smoothing sum. By one thread. */
template <typename Z, typename S = stat_t<Z>>
__device__ void write_statistics(const flce_rows& r, const Row<Z>& row, S c, S sum_rest, S smooth) {
  const S z = row.z_target, inf = infinity_of(z);
  /* A target of +inf would look like a certain one; eager gives NaN. */
  const S e_target = z == inf ? z - z : exp(z - c);
  const S sum = sum_rest + e_target;
  /* The first form keeps every digit of a tiny loss; the second serves where exp(z - c) has lost
   * its own. A NaN ends in the second. */
  const S ratio = sum_rest / e_target;
  const bool direct = e_target >= smallest_normal(z) && ratio < inf;
  const S nll = direct ? log1p(ratio) : log(sum) + (c - z);
  const S lse = isfinite(z) ? z + nll : c + log(sum);

  const S* w = row.class_weight;
  const S w_target = w ? w[row.target] : 1;
  S loss = (S)(1 - r.label_smoothing) * w_target * nll;
  if (r.label_smoothing > 0) {
    const S total = ((const S*)r.scalars)[FLCE_SCALAR_WEIGHT_TOTAL];
    const S own = w_target * (row.reference - z);
    loss += (S)(r.label_smoothing / (double)r.vocab) *
            (total * (isfinite(z) ? nll : lse) + (smooth + own));
  }
  stat_row<S>(r, FLCE_STAT_LSE)[row.index] = lse;
  stat_row<S>(r, FLCE_STAT_NLL)[row.index] = nll;
  stat_row<S>(r, FLCE_STAT_OFFSET)[row.index] = c;
  stat_row<S>(r, FLCE_STAT_INV_SUM)[row.index] = 1 / sum;
  ((S*)r.loss)[row.index] = loss;
}

/* The same of a row without a target: zeros where it is ignored, else NaN. */
template <typename S>
__device__ __forceinline__ void write_no_statistics(const flce_rows& r, RowKind kind) {
  if (threadIdx.x != 0) return;
  const S value = kind == kRowIgnored ? (S)0 : (S)NAN;
  for (int which = 0; which < FLCE_STAT_ROWS; which++) stat_row<S>(r, which)[blockIdx.x] = value;
  ((S*)r.loss)[blockIdx.x] = value;
}

#endif
