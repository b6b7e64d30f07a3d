/* The backend function divergence_rows: how far the softmax of a row of logits is from that of a
 * teacher's, and dz. One thread block a row. The sums over the classes take a pass of their own
 * from the row's end to its begin, where the second pass starts: what it reads first is in the L2
 * cache. The forward KL makes loss and dz in one pass, unless the sum of its p - q has to be taken
 * out first (range_of). */
#include "cuda/backend.cuh"
#include "cuda/rows/far_rows.cuh"
#include "cuda/rows/packed_rows.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/rows/statistics.cuh"
#include "divergence.h"

#include <limits.h>

/* Where the logits come from: of any layout and with any option; both in the same dtype and
 * alignment without a bias or a softcap; packed (packed_rows.cuh). */
enum Source { kAnyRows, kSameRows, kPackedRows };

/* flce_jsd_series in both stat dtypes. */
struct Series {
  flce_jsd_series f64;
  float log_m[FLCE_SERIES_F32], value[FLCE_SERIES_F32];
};

/* The parameters of a call. */
struct divergence_params {
  row_args s, t;            /* the student's rows and the teacher's */
  const PackedRow* packing; /* [rows] or NULL: how the logits in s are packed */
  double beta, hard;
  void* partial;
  bool sums, writes, stores_bound;
  Series series;
};

/* A row of both logits. hard, soft: the weights of the hard label's cross entropy and of the
 * divergence; factor: the row's, of dz; target: the cross entropy's gradient in the label's column.
 */
template <typename Z, typename S = stat_t<Z>>
struct RowPair {
  Row<Z> s, t;
  flce_dtype teacher_dtype;
  S s_base, t_base;     /* taken from the logits first, flce_divergence_base; not of packed rows */
  S s_offset, t_offset; /* statistics, without the bases */
  S s_inv, t_inv;       /* statistics */
  S shift; /* lse of s minus that of t, without the bases; of packed rows C, in base 2 */
  S beta, hard, soft, factor, target, value, mean;
  S mass; /* sum of the rounded p */
};

template <typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ RowPair<Z> open_pair(const divergence_params& c, int64_t at) {
  const flce_rows &s = c.s.r, &t = c.t.r;
  RowPair<Z> pair = {};
  pair.s = open_row_view<kGeneral, Z>(c.s, at);
  pair.t = open_row_view<kGeneral, Z>(c.t, at);
  /* Of any dtype and alignment, as a row of probabilities may be. */
  pair.teacher_dtype = t.z_dtype;
  pair.t.probabilities = (const char*)t.z + blockIdx.x * t.z_pitch * bytes_of(t.z_dtype);
  pair.s_offset = stat_row<S>(s, FLCE_STAT_OFFSET)[at];
  pair.t_offset = stat_row<S>(t, FLCE_STAT_OFFSET)[at];
  pair.s_inv = stat_row<S>(s, FLCE_STAT_INV_SUM)[at];
  pair.t_inv = stat_row<S>(t, FLCE_STAT_INV_SUM)[at];
  /* The difference of two rounded lse would have the error of large lse. Where all l of a rank are
   * -inf INV_SUM is 0. */
  if (c.packing) {
    const PackedRow& row = c.packing[blockIdx.x];
    pair.shift = (S)((double)row.difference + (double)row.teacher_k - (double)row.k +
                     log2((double)pair.s_inv / (double)pair.t_inv));
  } else {
    const S lse = stat_row<S>(s, FLCE_STAT_LSE)[at], t_lse = stat_row<S>(t, FLCE_STAT_LSE)[at];
    pair.s_base = flce_divergence_base<S>(lse, t_lse);
    pair.t_base = flce_divergence_base<S>(t_lse, lse);
    pair.s_offset -= pair.s_base;
    pair.t_offset -= pair.t_base;
    pair.shift = pair.s_inv > 0 && pair.t_inv > 0
                     ? (S)((double)pair.s_offset - (double)pair.t_offset +
                           log((double)pair.t_inv / (double)pair.s_inv))
                     : (lse - pair.s_base) - (t_lse - pair.t_base);
  }
  pair.beta = (S)c.beta;
  pair.hard = (S)c.hard;
  pair.soft = (S)(1 - c.hard);
  if (!(c.hard > 0)) pair.s.target = INT_MIN; /* no column */
  if (!s.out) return pair;
  const S* coef = (const S*)s.coef + at;
  pair.factor = pair.s_inv > 0 ? coef[FLCE_COEF_EXP * s.stat_pitch] / pair.s_inv : 0;
  pair.target = coef[FLCE_COEF_TARGET * s.stat_pitch];
  return pair;
}

/* A vector's columns of both logits, or packed in `s`. INSIDE: all columns are in the row. */
template <Source FROM, bool INSIDE, bool STREAM, typename Z>
__device__ __forceinline__ void load_pair(const RowPair<Z>& pair, int col, Vec<Z, kVec<Z>>& s,
                                          Vec<Z, kVec<Z>>& t) {
  if constexpr (INSIDE) {
    load_vec<STREAM>(pair.s.z + col, s);
  } else {
    load_columns<STREAM>(pair.s.z, col, pair.s.vocab, s);
  }
  if constexpr (FROM == kPackedRows) return;
  if constexpr (FROM == kSameRows && INSIDE) {
    load_vec<STREAM>(pair.t.z + col, t);
  } else if constexpr (FROM == kSameRows) {
    load_columns<STREAM>(pair.t.z, col, pair.t.vocab, t);
  } else {
    stat_t<Z> values[kVec<Z>];
    load_probabilities(pair.t, pair.teacher_dtype, col, values);
    pack(values, t);
  }
}

/* p, q, d and the student's slopes of a vector's columns; p = q = 0 outside the row. */
template <Source FROM, bool INSIDE, typename Out, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void compare(const RowPair<Z>& pair, const Vec<Z, kVec<Z>>& raw,
                                        const Vec<Z, kVec<Z>>& teacher, int col, S (&p)[kVec<Z>],
                                        S (&q)[kVec<Z>], S (&d)[kVec<Z>], S (&slope)[kVec<Z>]) {
  constexpr int N = kVec<Z>;
  if constexpr (FROM == kPackedRows) {
#pragma unroll
    for (int e = 0; e < N; e++) {
      const bool inside = INSIDE || (unsigned)(col + e) < (unsigned)pair.s.vocab;
      const PackedClass both = unpack_class(__float_as_uint(raw.at[e]));
      q[e] = inside ? exp2_fast(both.log2_larger - fmaxf(both.r, 0)) : 0;
      p[e] = inside ? exp2_fast((both.log2_larger + pair.shift) + fminf(both.r, 0)) : 0;
      d[e] = inside ? (both.r + pair.shift) * (float)(1 / FLCE_LOG2E) : 0;
      slope[e] = 1;
    }
    return;
  }
  S l[N], other[N];
  if constexpr (FROM == kSameRows) {
    unpack(teacher, other);
    unpack(raw, l);
#pragma unroll
    for (int e = 0; e < N; e++) {
      other[e] *= pair.t.outer_scale;
      l[e] *= pair.s.outer_scale;
      slope[e] = 1;
    }
  } else {
    logits_of<sizeof(Out) == 2>(pair.t, teacher, col, other, slope);
    logits_of<sizeof(Out) == 2>(pair.s, raw, col, l, slope);
  }
#pragma unroll
  for (int e = 0; e < N; e++) {
    const bool inside = INSIDE || (unsigned)(col + e) < (unsigned)pair.s.vocab;
    const S mine = l[e] - pair.s_base, theirs = other[e] - pair.t_base;
    p[e] = inside ? exp_for<Out>(mine - pair.s_offset) * pair.s_inv : 0;
    q[e] = inside ? exp_for<Out>(theirs - pair.t_offset) * pair.t_inv : 0;
    d[e] = inside ? (mine - theirs) - pair.shift : 0;
  }
}

template <flce_divergence KIND, typename S>
__device__ __forceinline__ S terms_of(const Series& series, S beta, S p, S q, S d, S* value) {
  if constexpr (sizeof(S) == 8) {
    return flce_divergence_terms<S>(KIND, beta, series.f64.log_m, series.f64.value, p, q, d, value);
  } else {
    return flce_divergence_terms<S>(KIND, beta, series.log_m, series.value, p, q, d, value);
  }
}

/* Vectors in flight for each thread, of each of the rows that are read. */
template <Source FROM, typename Z>
constexpr int kUnrollFrom = FROM == kPackedRows ? kUnroll<Z> : kUnroll<Z> / 2;

/* A tile of both rows, from vector `first` on: adds to the sums if SUMS, and writes dz if GRADS.
 * INSIDE: all of its columns are in the row, and none is the hard label's. */
template <bool SUMS, bool GRADS, Source FROM, bool INSIDE, flce_divergence KIND, typename Z,
          typename Out>
__device__ __forceinline__ void pair_tile(const Series& series, RowPair<Z>& pair, Out* out,
                                          int first) {
  using S = stat_t<Z>;
  constexpr int N = kVec<Z>, U = kUnrollFrom<FROM, Z>;
  const S coef_grad = pair.factor * pair.soft,
          coef_p = pair.factor * fma(-pair.soft, pair.mean, pair.hard);
  Vec<Z, N> s[U], t[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const int col = column_of<Z>(first + threadIdx.x + u * blockDim.x, pair.s.lead);
    load_pair<FROM, INSIDE, GRADS>(pair, col, s[u], t[u]);
  }
  if constexpr (GRADS && sizeof(Out) != sizeof(Z)) __syncthreads(); /* in place: see grad_rows */
#pragma unroll
  for (int u = 0; u < U; u++) {
    const int col = column_of<Z>(first + threadIdx.x + u * blockDim.x, pair.s.lead);
    S p[N], q[N], d[N], slope[N];
    compare<FROM, INSIDE, Out>(pair, s[u], t[u], col, p, q, d, slope);
#pragma unroll
    for (int e = 0; e < N; e++) {
      S value;
      const S grad_term = terms_of<KIND>(series, pair.beta, p[e], q[e], d[e], &value);
      if constexpr (SUMS) {
        pair.value += value;
        if (!GRADS) pair.mean += grad_term;
        if (!GRADS && flce_takes_mean(KIND)) pair.mass += p[e];
      }
      d[e] = fma(coef_p, p[e], coef_grad * grad_term) * slope[e];
      if (!INSIDE && col + e == pair.s.target)
        d[e] = coef_grad * fma(-pair.mean, p[e], grad_term) * slope[e] + pair.hard * pair.target;
    }
    if constexpr (GRADS) {
      Vec<Out, N> packed;
      pack(d, packed);
      store_columns(out, col, pair.s.vocab, packed);
    }
  }
}

/* All tiles of a row, from its end to its begin if only sums are made. */
template <bool SUMS, bool GRADS, Source FROM, flce_divergence KIND, typename Z, typename Out>
__device__ __forceinline__ void pass_over(const Series& series, RowPair<Z>& pair, Out* out) {
  const int step = kUnrollFrom<FROM, Z> * blockDim.x, last = (pair.s.vectors - 1) / step * step;
  const int columns = step * kVec<Z>;
  for (int done = 0; done < pair.s.vectors; done += step) {
    const int first = GRADS ? done : last - done, begin = column_of<Z>(first, pair.s.lead);
    const bool has_target = GRADS && (unsigned)pair.s.target - (unsigned)begin < (unsigned)columns;
    if (begin >= 0 && begin + columns <= pair.s.vocab && !has_target) {
      pair_tile<SUMS, GRADS, FROM, true, KIND>(series, pair, out, first);
    } else {
      pair_tile<SUMS, GRADS, FROM, false, KIND>(series, pair, out, first);
    }
  }
}

/* The sums of a row over its classes, in every thread, stored or loaded as flce_divergence_args
 * says. */
template <flce_divergence KIND, typename Z, typename S>
__device__ __forceinline__ void exchange_sums(const divergence_params& c, S* scratch,
                                              RowPair<Z>& pair) {
  S* sums[FLCE_DIVERGENCE_SUMS] = {&pair.value, &pair.mean, &pair.mass};
#pragma unroll
  for (int k = 0; k < FLCE_DIVERGENCE_SUMS; k++) {
    S* partial = (S*)c.partial + k * c.s.r.rows + blockIdx.x;
    *sums[k] = c.sums ? block_sum(*sums[k], scratch) : *partial;
    if (c.sums && c.partial && threadIdx.x == 0) *partial = *sums[k];
  }
  pair.mean = flce_divergence_mean<S>(KIND, pair.mean, pair.mass);
}

/* Of a row's first classes, a vector in each thread: whether |log(p / q)| is below 2^-5 in all, and
 * whether it is at least 1 in many. */
struct RowRange {
  bool all_near, many_far;
};

/* With all_near the sum of p - q, which is 0 but for the errors of the two logsumexp, is taken out
 * of the forward KL's gradient. Beyond, an error of 2^-24 in it is at most 2^-19 of the terms, and
 * packed classes are rounded by more. */
template <Source FROM, typename Out, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ RowRange range_of(const RowPair<Z>& pair, S* scratch) {
  constexpr int N = kVec<Z>;
  const int col = column_of<Z>(threadIdx.x, pair.s.lead);
  Vec<Z, N> raw, teacher;
  S p[N], q[N], d[N], slope[N], top = 0, far = 0;
  load_pair<FROM, false, false>(pair, col, raw, teacher);
  compare<FROM, false, Out>(pair, raw, teacher, col, p, q, d, slope);
#pragma unroll
  for (int e = 0; e < N; e++) {
    const S size = p[e] + q[e] > 0 ? fabs(d[e]) : 0; /* not of a class without probability */
    top = fmax(top, size);
    far += size >= 1;
  }
  top = block_max(top, scratch);
  const int columns = min((int)pair.s.vocab, N * (int)blockDim.x);
  return {top < (S)0x1p-5, 4 * block_sum(far, scratch) >= columns};
}

/* Loss and, where `out` is one, dz of a packed row by far_row, or false. Its classes are far apart
 * if many of the first ones are and a likely one, whose log2(p / q) is `shift`, is: then the class
 * of most probability is none whose p - q cancels. */
template <flce_divergence KIND, typename Out>
__device__ __forceinline__ bool compared_far(const divergence_params& c, bool many_far,
                                             RowPair<float>& pair, Out* out, float* scratch) {
  if (!many_far || !(fabsf(pair.shift) >= 0x1p-4f)) return false;
  FarRow row = {pair.s.z, (int)pair.s.vocab, (int)pair.s.target, pair.shift, 0, pair.shift};
  row.at_target = pair.hard * pair.target;
  const FarResult made =
      far_row<KIND>(row, out, c.beta, pair.factor, pair.soft, pair.hard, scratch);
  pair.value = made.loss;
  pair.mean = made.mean;
  return true;
}

/* Loss and, where `out` is one, dz of a row. */
template <Source FROM, flce_divergence KIND, typename Z, typename Out, typename S>
__device__ __forceinline__ void compare_row(const divergence_params& c, RowPair<Z>& pair, Out* out,
                                            S* scratch) {
  /* Without `sums` and `out` no logits are read: a rank without a class has none. */
  const bool in_one_pass = !flce_takes_mean(KIND) && c.sums && out;
  RowRange range = {};
  if (FROM == kPackedRows || in_one_pass) range = range_of<FROM, Out>(pair, scratch);
  if constexpr (FROM == kPackedRows) {
    if (compared_far<KIND>(c, range.many_far, pair, out, scratch)) return;
  }
  if (in_one_pass && !range.all_near) {
    pass_over<true, true, FROM, KIND>(c.series, pair, out);
    exchange_sums<KIND>(c, scratch, pair);
    return;
  }
  if (c.sums) pass_over<true, false, FROM, KIND>(c.series, pair, out);
  exchange_sums<KIND>(c, scratch, pair);
  if (out) pass_over<false, true, FROM, KIND>(c.series, pair, out);
}

template <Source FROM, flce_divergence KIND, typename Z, typename Out>
__global__ void __launch_bounds__(kRowThreads, sizeof(Z) == 8 ? 1 : 2)
    divergence_rows(const __grid_constant__ divergence_params c) {
  using S = stat_t<Z>;
  __shared__ S scratch[kMaxWarps];
  const flce_rows& r = c.s.r;
  Out* out = r.out && c.writes ? (Out*)r.out + (int64_t)blockIdx.x * r.out_pitch : NULL;
  const RowRef ref = row_ref_of(r, blockIdx.x);
  if (ref.kind != kRowValid) {
    if (out) fill_row(out, (int)r.vocab, from_stat<Out>(blank_of<S>(ref)));
    if (out) pad_row(out, r.vocab, r.out_columns);
    return;
  }
  RowPair<Z> pair = open_pair<Z>(c, ref.at);
  compare_row<FROM, KIND>(c, pair, out, scratch);
  if (out) pad_row(out, r.vocab, r.out_columns);
  if (c.stores_bound) __syncthreads(); /* all threads have read INV_SUM */
  if (!c.writes || threadIdx.x > 0) return;
  S* loss = (S*)r.loss + ref.at;
  const S token = r.token_weight ? ((const S*)r.token_weight)[ref.at] : 1;
  *loss = pair.soft * token * pair.value + (pair.hard > 0 ? pair.hard * *loss : 0);
  if (!out || !c.stores_bound) return;
  const S rest = pair.hard > 0 ? -expm1(-stat_row<S>(r, FLCE_STAT_NLL)[ref.at]) : 0; /* 1 - p_y */
  const S soft = flce_gradient_bound<S>(KIND, pair.beta, pair.value, pair.mean);
  const S bound = fabs(pair.factor) * (pair.soft * soft + 2 * pair.hard * rest);
  stat_row<S>(r, FLCE_STAT_INV_SUM)[ref.at] = bound > 0 ? 1 / bound : 0;
}

/* ---- launch ---- */

typedef void (*divergence_kernel)(const divergence_params);

static Series make_series(double beta) {
  Series made = {flce_jsd_series_of(beta), {}, {}};
  for (int k = 0; k < FLCE_SERIES_F32; k++) {
    made.log_m[k] = (float)made.f64.log_m[k];
    made.value[k] = (float)made.f64.value[k];
  }
  return made;
}

template <Source FROM, typename Z, typename Out>
static divergence_kernel kernel_of(flce_divergence kind) {
#define FLCE_KERNEL(NAME, ...) , divergence_rows<FROM, FLCE_##NAME, Z, Out>
  static const divergence_kernel kernels[] = {NULL FLCE_DIVERGENCES(FLCE_KERNEL)};
#undef FLCE_KERNEL
  return kernels[kind];
}

template <Source FROM>
static divergence_kernel kernel_for(flce_divergence kind, flce_dtype z, flce_dtype out) {
  if constexpr (FROM == kPackedRows) {
    return out == FLCE_BF16  ? kernel_of<FROM, float, __nv_bfloat16>(kind)
           : out == FLCE_F16 ? kernel_of<FROM, float, __half>(kind)
                             : NULL;
  } else {
    if (z == FLCE_F64) return out == z ? kernel_of<FROM, double, double>(kind) : NULL;
    if (z != FLCE_F32) return NULL;
    return out == FLCE_F32    ? kernel_of<FROM, float, float>(kind)
           : out == FLCE_BF16 ? kernel_of<FROM, float, __nv_bfloat16>(kind)
           : out == FLCE_F16  ? kernel_of<FROM, float, __half>(kind)
                              : NULL;
  }
}

flce_status cuda_divergence_rows(void* self, const flce_divergence_args* call) {
  const flce_rows *s = call->student, *t = call->teacher;
  if (s->rows == 0) return FLCE_OK;
  FLCE_TRY(flce_check_divergence(call->divergence)); /* it is an index */
  FLCE_TRY(check_rows(s, "divergence_rows"));
  const flce_dtype z = s->z_dtype, out = s->out ? s->out_dtype : z;
  const int64_t size = flce_size_of(z), apart = (s->z_pitch - t->z_pitch) * size;
  const bool maps =
      s->bias || t->bias || flce_caps_logits(&s->options) || flce_caps_logits(&t->options);
  const bool same =
      !maps && t->z_dtype == z && apart % 16 == 0 && ((uintptr_t)s->z - (uintptr_t)t->z) % 16 == 0;
  const divergence_kernel kernel = call->packing ? kernel_for<kPackedRows>(call->divergence, z, out)
                                   : same        ? kernel_for<kSameRows>(call->divergence, z, out)
                                                 : kernel_for<kAnyRows>(call->divergence, z, out);
  const bool packs_well = is_aligned(s->z, 16) && s->z_pitch % 4 == 0 && call->sums &&
                          !call->partial &&
                          (!s->out || (s->out == s->z && s->out_pitch == 2 * s->z_pitch));
  if (!kernel || (call->packing && !packs_well)) return no_row_kernel(s, "divergence_rows");
  const divergence_params params = {make_args(s),
                                    make_args(t),
                                    (const PackedRow*)call->packing,
                                    call->beta,
                                    call->hard_weight,
                                    call->partial,
                                    call->sums,
                                    call->writes,
                                    call->stores_bound,
                                    make_series(call->beta)};
  kernel<<<(unsigned)s->rows, row_threads(s), 0, stream_of(self)>>>(params);
  FLCE_LAUNCHED("divergence_rows");
  return FLCE_OK;
}
