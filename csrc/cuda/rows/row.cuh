/* How a thread block reads and writes one row of logits: vectors and tiles of columns, fast exp and
 * tanh, and the Row that holds a row's pointers and scales. Sums and statistics belong in
 * statistics.cuh.
 *
 * A tile is kUnroll 16-byte vectors a thread. Tiles begin at the 16-byte boundary at or before the
 * row's first logit, so that rows of any pitch and any vocabulary are read in whole vectors, except
 * the vectors at the two ends. Columns are counted in 32 bits (kMaxVocab). */
#ifndef FLCE_CUDA_ROWS_ROW_CUH
#define FLCE_CUDA_ROWS_ROW_CUH

#include "cuda/common/reductions.cuh"
#include "cuda/common/row_status.cuh"
#include "cuda/common/vectors.cuh"
#include "loss.h"

enum { kRowThreads = 512 };

/* Vectors in flight for each thread: 16 logits of 16 or 32 bits, which leaves registers for three
 * blocks on an SM. */
template <typename Z>
constexpr int kUnroll = sizeof(Z) == 2 ? 2 : 4;

/* Versions of a row kernel. kGeneral tests the options at run time, uniformly over a block. The
 * others are compiled for a loss without options, except for what their name says and a positive
 * factor of z. */
enum Kind {
  kPlain,
  kBiased,
  kExp, /* grad_rows only: z already holds exp(l - c) */
  /* forwards that write 16 bits: plain with label smoothing; in exp_rows without class weights */
  kSmooth,
  kGeneral,
  /* fused logits GEMM only: plain, with or without a bias, and with probabilities; and the same
   * with class targets and a factor of z for each row */
  kSoft,
  kScaled
};

/* Blocks on an SM for which a row kernel's registers must leave room: as many as possible without
 * spills. */
constexpr int row_blocks(size_t z_size, Kind kind) {
  return z_size == 8 ? 1 : kind == kPlain || kind == kExp || kind == kSmooth ? 3 : 2;
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
__device__ __forceinline__ float largest_finite(float) {
  return 3.40282347e38f;
}
__device__ __forceinline__ double largest_finite(double) {
  return 1.7976931348623157e308;
}

/* 2^x with a relative error of at most 2^-22; results below 2^-126 are flushed to 0. */
__device__ __forceinline__ float exp2_fast(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* log2(x) to 2^-22 for x in [1/2, 2], relative beyond; -inf where x is below 2^-126. */
__device__ __forceinline__ float log2_fast(float x) {
  float y;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

/* exp(x) for x <= 60. Rounding x log2(e) adds a relative error of |x| 2^-24, so terms that
 * matter (x near the row's largest) are right to a few 2^-22, far below the rounding of a 16-bit
 * result. */
__device__ __forceinline__ float exp_fast(float x) {
  return exp2_fast(x * kLog2e);
}
__device__ __forceinline__ double exp_fast(double x) {
  return exp(x);
}

/* exp(x) to the precision of Out. */
template <typename Out, typename S>
__device__ __forceinline__ S exp_for(S x) {
  if constexpr (sizeof(Out) >= 4) {
    return exp(x);
  } else {
    return exp_fast(x);
  }
}

/* log(x) to the precision of Out; -inf for 0. */
template <typename Out, typename S>
__device__ __forceinline__ S log_for(S x) {
  if constexpr (sizeof(Out) >= 4) {
    return log(x);
  } else {
    return __logf(x);
  }
}

/* tanh(u); FAST for 16-bit results: 1 - 2 / (1 + e^2u), with an absolute error below 2^-21. Most of
 * it is the quotient's 2 ulp where that is between 1 and 2 (u <= 0). The error of e^2u itself, a
 * relative |2u| 2^-24 + 2^-22, enters with a factor of at most 1/2, which vanishes with e^2u or 1 /
 * e^2u. */
template <bool FAST>
__device__ __forceinline__ float tanh_of(float u) {
  if constexpr (FAST) {
    return 1 - __fdividef(2, 1 + exp2_fast(u * (2 * kLog2e)));
  } else {
    return tanhf(u);
  }
}
template <bool FAST>
__device__ __forceinline__ double tanh_of(double u) {
  return tanh(u);
}

/* curve(inner_scale z), inner_scale being 1 for FLCE_LINE. The switches over curves have no
 * default, so that the compiler says which one lacks the next. */
template <bool FAST, typename S>
__device__ __forceinline__ S capped(flce_curve curve, S inner_scale, S z) {
  switch (curve) {
    case FLCE_LINE:
      return z;
    case FLCE_TANH:
      return tanh_of<FAST>(inner_scale * z);
  }
  __builtin_unreachable();
}

/* The curve's slope where it is t; 0 where l is -inf or rounding makes t exceed 1. */
template <typename S>
__device__ __forceinline__ S cap_slope(flce_curve curve, S t) {
  switch (curve) {
    case FLCE_LINE:
      return 1;
    case FLCE_TANH:
      return fmax(1 - t * t, (S)0);
  }
  __builtin_unreachable();
}

/* ---- vectors and tiles of a row ---- */

/* Elements between the 16-byte boundary at or before `row` and `row`. */
template <typename Z>
__device__ __forceinline__ int lead_of(const Z* row) {
  return (int)(((uintptr_t)row & 15) / sizeof(Z));
}

/* First column of vector `v` of a row. Negative for vector 0 if the row begins inside it (lead >
 * 0). */
template <typename Z>
__device__ __forceinline__ int column_of(int v, int lead) {
  return v * kVec<Z> - lead;
}

/* 16-byte vectors that cover a row. */
template <typename Z>
__device__ __forceinline__ int vectors_of(int lead, int vocab) {
  return (lead + vocab + kVec<Z> - 1) / kVec<Z>;
}

/* Logits [col, col + kVec) of a row; -inf outside the row. STREAM: as load_vec. */
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

/* This thread's vectors first + u blockDim of a tile; `first` includes threadIdx. Tiles that lie
 * inside the row, all but the outermost, are loaded without a branch between the loads. */
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

/* The same columns of a per-column array (bias, class weights, a row of probabilities), which has
 * an alignment of its own; 0 outside the row. Float64 with 16-bit logits is loaded by elements:
 * whole vectors would need too many registers. */
template <typename T, typename S, int N>
__device__ __forceinline__ void load_column_vector(const T* side, int col, int vocab, S (&v)[N]) {
  constexpr int kAlign = sizeof(T) * N < 16 ? sizeof(T) * N : 16;
  constexpr bool kWhole = sizeof(T) * N <= 32;
  if (kWhole && col >= 0 && col + N <= vocab && is_aligned(side + col, kAlign)) {
    Vec<T, N> raw;
    load_vec<false>(side + col, raw);
    unpack(raw, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) {
      v[e] = (unsigned)(col + e) < (unsigned)vocab ? (S)to_stat(side[col + e]) : (S)0;
    }
  }
}

/* Stores [col, col + N) of a row, without the columns outside it. */
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

/* `value` into all columns of a row. */
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

/* Zeros into columns vocab..columns - 1, which a GEMM may read. Where the row overwrites its
 * logits, the whole block must have read them before. */
template <typename T>
__device__ __forceinline__ void pad_row(T* row, int64_t vocab, int64_t columns) {
  for (int64_t col = vocab + threadIdx.x; col < columns; col += blockDim.x) {
    row[col] = from_stat<T>(0.0f);
  }
}

/* z of a vector's columns, bias included. */
template <bool BIAS, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void z_of(const Vec<Z, kVec<Z>>& raw, const S* bias, int col, int vocab,
                                     S (&v)[kVec<Z>]) {
  unpack(raw, v);
  if constexpr (BIAS) {
    S b[kVec<Z>];
    load_column_vector(bias, col, vocab, b);
#pragma unroll
    for (int e = 0; e < kVec<Z>; e++) v[e] += b[e];
  }
}

/* Sets the target's logit to -inf; `hit` is its element in the vector, if it is in it. Its exp is
 * then 0, in the row and in the row's sum. */
template <typename Z>
__device__ __forceinline__ void hide_column(Vec<Z, kVec<Z>>& raw, int hit) {
  if ((unsigned)hit >= (unsigned)kVec<Z>) return;
#pragma unroll
  for (int e = 0; e < kVec<Z>; e++) {
    if (e == hit) raw.at[e] = from_stat<Z>(-INFINITY);
  }
}

/* ---- rows ---- */

/* The parameters of a row kernel: flce_rows, and what the host computes once from its options. */
struct row_args {
  flce_rows r;
  double scale;    /* logit_scale / temperature */
  float scale_f32; /* the same, rounded */
  /* flce_logit_map_of the options, without a temperature of the row's own */
  flce_curve curve;
  double inner_scale, outer_scale;
  double hard;      /* 1 - s */
  double per_class; /* s / V */
  bool weighted;    /* the loss sums over all columns: label smoothing or probabilities */
};

/* One row of flce_rows as a block sees it. lead: elements before the row in its first vector;
 * vectors: 16-byte vectors that cover the row. */
template <typename Z>
struct Row {
  using S = stat_t<Z>;
  const Z* z;
  const S *bias, *class_weight;
  const void* probabilities;
  /* target: its column, -1 with probabilities; of a block of the classes it may be another's */
  int vocab, target, lead, vectors;
  S scale; /* all but the general kernels: l = scale z */
  /* General kernels: l = outer_scale curve(inner_scale z), inverse = 1 / outer_scale. */
  flce_curve curve;
  S inner_scale, outer_scale, inverse;
  S hard, per_class; /* 1 - s, s / V */
  S l_target;
  S reference; /* reference of sums over l: l_target, or 0 where that is not finite */
};

template <typename S>
__device__ __forceinline__ S* stat_row(const flce_rows& r, int which) {
  return (S*)r.stats + which * r.stat_pitch;
}

/* logit_scale / temperature in stat dtype. Read at each use, so that it takes no register in the
 * plain kernels. */
__device__ __forceinline__ float scale_of(const row_args& p, float) {
  return p.scale_f32;
}
__device__ __forceinline__ double scale_of(const row_args& p, double) {
  return p.scale;
}

/* l of one logit z. FAST: for 16-bit results. */
template <bool FAST, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ S logit_of(const Row<Z>& row, S z) {
  return row.outer_scale * capped<FAST>(row.curve, row.inner_scale, z);
}

__device__ __forceinline__ int64_t bytes_of(flce_dtype dtype) {
  return dtype == FLCE_F64 ? 8 : dtype == FLCE_F32 ? 4 : 2;
}

/* Opens a row without reading its target's logit: grad_rows does not need that, and it may already
 * be overwritten. `at`: the row's position in the per-row vectors. */
template <Kind KIND, typename Z>
__device__ __forceinline__ Row<Z> open_row_view(const row_args& p, int64_t at) {
  using S = stat_t<Z>;
  const flce_rows& r = p.r;
  Row<Z> row = {};
  row.z = (const Z*)r.z + (int64_t)blockIdx.x * r.z_pitch;
  row.bias = (const S*)r.bias;
  row.class_weight = (const S*)r.class_weight;
  row.vocab = (int)r.vocab;
  row.target = KIND == kGeneral && !r.target ? -1 : (int)(r.target[at] - r.earlier_classes);
  row.lead = lead_of(row.z);
  row.vectors = vectors_of<Z>(row.lead, row.vocab);
  row.scale = scale_of(p, S(0));
  if constexpr (KIND == kGeneral) {
    row.curve = p.curve;
    row.inner_scale = (S)p.inner_scale;
    row.outer_scale = (S)p.outer_scale;
    if (r.temperature) row.outer_scale /= ((const S*)r.temperature)[at];
    row.inverse = 1 / row.outer_scale;
    row.hard = (S)p.hard;
    row.per_class = (S)p.per_class;
    if (r.probabilities) {
      row.probabilities = (const char*)r.probabilities +
                          at * r.probabilities_pitch * bytes_of(r.probabilities_dtype);
    }
  }
  return row;
}

/* Opens a row and reads its target's logit. */
template <Kind KIND, bool FAST, typename Z>
__device__ __forceinline__ Row<Z> open_row(const row_args& p, int64_t at) {
  using S = stat_t<Z>;
  Row<Z> row = open_row_view<KIND, Z>(p, at);
  if (KIND == kGeneral && row.target < 0) return row;
  const S z = (S)to_stat(row.z[row.target]) + (row.bias ? row.bias[row.target] : 0);
  row.l_target = KIND == kGeneral ? logit_of<FAST>(row, z) : row.scale * z;
  row.reference = isfinite(row.l_target) ? row.l_target : 0;
  return row;
}

#endif
