/* The backend function divergence_rows: how far the softmax of a row of logits is from that of a
 * teacher's, and dz. One thread block a row. The sums over the classes take a pass of their own
 * from the row's end to its begin, where the second pass starts: what it reads first is in the L2
 * cache. The forward KL's gradient needs their sum, which is that of the errors of the statistics,
 * only where student and teacher are near: else one pass makes loss and dz. */
#include "cuda/backend.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/rows/statistics.cuh"
#include "divergence.h"

/* The parameters of a call; student first. */
struct divergence_params {
  row_args s, t;
  double beta, hard;
  void* partial;
  bool sums, writes;
};

/* A row of both logits. hard, soft: the hard label's weight and the divergence's, 1 - hard; target:
 * the gradient of the former in its column; factor: of the others. */
template <typename Z, typename S = stat_t<Z>>
struct RowPair {
  Row<Z> s, t;
  S s_offset, t_offset, s_inv, t_inv; /* statistics */
  S shift;                            /* lse of s minus that of t */
  S beta, hard, soft, factor, target, value, mean;
};

template <bool GENERAL, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ RowPair<Z> open_pair(const divergence_params& c, int64_t at) {
  constexpr Kind kKind = GENERAL ? kGeneral : kPlain;
  const flce_rows &s = c.s.r, &t = c.t.r;
  RowPair<Z> pair = {};
  pair.s = open_row_view<kKind, Z>(c.s, at);
  pair.t = open_row_view<kKind, Z>(c.t, at);
  pair.s_offset = stat_row<S>(s, FLCE_STAT_OFFSET)[at];
  pair.t_offset = stat_row<S>(t, FLCE_STAT_OFFSET)[at];
  pair.s_inv = stat_row<S>(s, FLCE_STAT_INV_SUM)[at];
  pair.t_inv = stat_row<S>(t, FLCE_STAT_INV_SUM)[at];
  /* The difference of two rounded lse would have the error of large lse. Where all l of a rank are
   * -inf INV_SUM is 0. */
  pair.shift = pair.s_inv > 0 && pair.t_inv > 0
                   ? (S)((double)pair.s_offset - (double)pair.t_offset +
                         log((double)pair.t_inv / (double)pair.s_inv))
                   : stat_row<S>(s, FLCE_STAT_LSE)[at] - stat_row<S>(t, FLCE_STAT_LSE)[at];
  pair.beta = (S)c.beta;
  pair.hard = (S)c.hard;
  pair.soft = (S)(1 - c.hard);
  if (!s.out) return pair;
  const S* coef = (const S*)s.coef + at;
  pair.factor = pair.s_inv > 0 ? coef[FLCE_COEF_ROW * s.stat_pitch] / pair.s_inv : 0;
  pair.target = coef[FLCE_COEF_TARGET * s.stat_pitch];
  return pair;
}

/* Logits [col, col + kVec) of a row of any alignment; -inf outside the row. */
template <bool STREAM, typename Z>
__device__ __forceinline__ void load_any_columns(const Row<Z>& row, int col, Vec<Z, kVec<Z>>& v) {
  if (is_aligned(row.z + col, 16)) {
    load_columns<STREAM>(row.z, col, row.vocab, v);
  } else {
#pragma unroll
    for (int e = 0; e < kVec<Z>; e++) {
      v.at[e] = (unsigned)(col + e) < (unsigned)row.vocab ? row.z[col + e] : (Z)-INFINITY;
    }
  }
}

/* l of a vector's columns, -inf outside the row, and slopes. */
template <bool GENERAL, typename Out, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ void pair_logits(const Row<Z>& row, const Vec<Z, kVec<Z>>& raw, int col,
                                            S (&l)[kVec<Z>], S (&slope)[kVec<Z>]) {
  if constexpr (GENERAL) {
    logits_of<sizeof(Out) == 2>(row, raw, col, l, slope);
#pragma unroll
    for (int e = 0; e < kVec<Z>; e++) {
      if ((unsigned)(col + e) >= (unsigned)row.vocab) l[e] = -infinity_of(S(0));
    }
  } else {
    unpack(raw, l);
#pragma unroll
    for (int e = 0; e < kVec<Z>; e++) l[e] *= row.scale;
  }
}

/* One vector of both logits: adds to the sums if SUMS, and makes dz if GRADS. */
template <bool SUMS, bool GRADS, flce_divergence KIND, bool GENERAL, typename Z, typename Out,
          typename S = stat_t<Z>>
__device__ __forceinline__ void pair_vector(RowPair<Z>& pair, const Vec<Z, kVec<Z>>& raw_s,
                                            const Vec<Z, kVec<Z>>& raw_t, int col,
                                            Vec<Out, kVec<Z>>& packed) {
  constexpr int N = kVec<Z>;
  S l[N], other[N], slope[N], unused[N];
  pair_logits<GENERAL, Out>(pair.s, raw_s, col, l, slope);
  pair_logits<GENERAL, Out>(pair.t, raw_t, col, other, unused);
#pragma unroll
  for (int e = 0; e < N; e++) {
    const S p = exp_for<Out>(l[e] - pair.s_offset) * pair.s_inv;
    const S q = exp_for<Out>(other[e] - pair.t_offset) * pair.t_inv;
    const S d = (l[e] - other[e]) - pair.shift;
    const S pull = flce_divergence_pull<S>(KIND, pair.beta, p, q, d);
    if constexpr (SUMS) {
      pair.value += flce_divergence_value<S>(KIND, pair.beta, p, q, d);
      if (!GRADS) pair.mean += pull;
    }
    if constexpr (GRADS) {
      const S divergence = fma(-pair.mean, p, pull);
      const bool own = pair.hard > 0 && col + e == pair.s.target;
      const S g = pair.soft * divergence + (own ? 0 : pair.hard * p);
      l[e] = pair.factor * (GENERAL ? g * slope[e] : g);
      if (own) l[e] += pair.hard * pair.target;
    }
  }
  if constexpr (GRADS) pack(l, packed);
}

/* A tile of both rows, from vector `first` on. */
template <bool SUMS, bool GRADS, flce_divergence KIND, bool GENERAL, typename Z, typename Out>
__device__ __forceinline__ void pair_tile(RowPair<Z>& pair, Out* out, int first) {
  constexpr int N = kVec<Z>, U = kUnroll<Z> / 2;
#pragma unroll 1
  for (int half = 0; half < 2; half++, first += U * blockDim.x) {
    const int mine = first + threadIdx.x;
    Vec<Z, N> raw_s[U], raw_t[U];
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int col = column_of<Z>(mine + u * blockDim.x, pair.s.lead);
      load_columns<GRADS>(pair.s.z, col, pair.s.vocab, raw_s[u]);
      load_any_columns<GRADS>(pair.t, col, raw_t[u]);
    }
    if constexpr (GRADS && sizeof(Out) != sizeof(Z)) __syncthreads(); /* in place: see grad_rows */
#pragma unroll
    for (int u = 0; u < U; u++) {
      const int col = column_of<Z>(mine + u * blockDim.x, pair.s.lead);
      Vec<Out, N> packed;
      pair_vector<SUMS, GRADS, KIND, GENERAL>(pair, raw_s[u], raw_t[u], col, packed);
      if constexpr (GRADS) store_columns(out, col, pair.s.vocab, packed);
    }
  }
}

/* The largest |d| of the row's first classes, a vector in each thread. */
template <bool GENERAL, typename Out, typename Z, typename S>
__device__ __forceinline__ S distance_of(const RowPair<Z>& pair, S* scratch) {
  constexpr int N = kVec<Z>;
  const int col = column_of<Z>(threadIdx.x, pair.s.lead);
  Vec<Z, N> raw_s, raw_t;
  S l[N], other[N], slope[N], top = 0;
  load_columns<false>(pair.s.z, col, pair.s.vocab, raw_s);
  load_any_columns<false>(pair.t, col, raw_t);
  pair_logits<GENERAL, Out>(pair.s, raw_s, col, l, slope);
  pair_logits<GENERAL, Out>(pair.t, raw_t, col, other, slope);
#pragma unroll
  for (int e = 0; e < N; e++) top = fmax(top, fabs((l[e] - other[e]) - pair.shift));
  return block_max(top, scratch);
}

/* Below this distance the sum of p - q is taken out: an error of 2^-24 is 2^-19 of it. */
constexpr float kNearRow = 0x1p-5f;

/* The sums of a row over its classes, in every thread, stored or loaded as flce_divergence_args
 * says. */
template <typename Z, typename S>
__device__ __forceinline__ void exchange_sums(const divergence_params& c, S* scratch,
                                              RowPair<Z>& pair) {
  S* partial = (S*)c.partial + blockIdx.x;
  if (c.sums) {
    pair.value = block_sum(pair.value, scratch);
    pair.mean = block_sum(pair.mean, scratch);
    if (c.partial && threadIdx.x == 0) {
      partial[FLCE_DIVERGENCE_VALUE * c.s.r.rows] = pair.value;
      partial[FLCE_DIVERGENCE_MEAN * c.s.r.rows] = pair.mean;
    }
  } else {
    pair.value = partial[FLCE_DIVERGENCE_VALUE * c.s.r.rows];
    pair.mean = partial[FLCE_DIVERGENCE_MEAN * c.s.r.rows];
  }
}

template <flce_divergence KIND, bool GENERAL, typename Z, typename Out>
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
  RowPair<Z> pair = open_pair<GENERAL, Z>(c, ref.at);
  const int step = kUnroll<Z> * blockDim.x;
  const bool one_pass = KIND == FLCE_FORWARD_KL && c.sums && out &&
                        !(distance_of<GENERAL, Out>(pair, scratch) < kNearRow);
  if (c.sums && !one_pass) {
    for (int first = (pair.s.vectors - 1) / step * step; first >= 0; first -= step) {
      pair_tile<true, false, KIND, GENERAL>(pair, out, first);
    }
  }
  if (!one_pass) exchange_sums(c, scratch, pair);
  if (out) {
    for (int first = 0; first < pair.s.vectors; first += step) {
      pair_tile<KIND == FLCE_FORWARD_KL, true, KIND, GENERAL>(pair, out, first);
    }
    pad_row(out, r.vocab, r.out_columns);
  }
  if (one_pass) exchange_sums(c, scratch, pair);
  if (!c.writes || threadIdx.x > 0) return;
  S* loss = (S*)r.loss + ref.at;
  const S token = r.token_weight ? ((const S*)r.token_weight)[ref.at] : 1;
  *loss = pair.soft * token * pair.value + (pair.hard > 0 ? pair.hard * *loss : 0);
}

/* ---- launch ---- */

typedef void (*divergence_kernel)(const divergence_params);

template <bool GENERAL, typename Z, typename Out>
static divergence_kernel kernel_of_kind(flce_divergence kind) {
  return kind == FLCE_FORWARD_KL   ? divergence_rows<FLCE_FORWARD_KL, GENERAL, Z, Out>
         : kind == FLCE_REVERSE_KL ? divergence_rows<FLCE_REVERSE_KL, GENERAL, Z, Out>
                                   : divergence_rows<FLCE_JSD, GENERAL, Z, Out>;
}

template <typename Z, typename Out>
static divergence_kernel kernel_of(flce_divergence kind, bool general) {
  return general ? kernel_of_kind<true, Z, Out>(kind) : kernel_of_kind<false, Z, Out>(kind);
}

static bool is_general(const flce_rows* r) {
  return r->bias || r->temperature || flce_caps_logits(&r->options) ||
         !flce_logits_rise(&r->options);
}

flce_status cuda_divergence_rows(void* self, const flce_divergence_args* call) {
  const flce_rows *s = call->student, *t = call->teacher;
  if (s->rows == 0) return FLCE_OK;
  FLCE_TRY(check_rows(s, "divergence_rows"));
  const flce_dtype z = s->z_dtype, out = s->out ? s->out_dtype : z;
  const bool general = is_general(s) || is_general(t);
  divergence_kernel kernel = NULL;
  if (t->z_dtype != z) return no_row_kernel(t, "divergence_rows, teacher");
  if (z == FLCE_F64 && out == z) kernel = kernel_of<double, double>(call->divergence, general);
  if (z == FLCE_F32 && out == z) kernel = kernel_of<float, float>(call->divergence, general);
  if (z == FLCE_F32 && out == FLCE_BF16)
    kernel = kernel_of<float, __nv_bfloat16>(call->divergence, general);
  if (z == FLCE_F32 && out == FLCE_F16)
    kernel = kernel_of<float, __half>(call->divergence, general);
  if (!kernel) return no_row_kernel(s, "divergence_rows");
  const divergence_params params = {make_args(s),  make_args(t), call->beta,  call->hard_weight,
                                    call->partial, call->sums,   call->writes};
  kernel<<<(unsigned)s->rows, row_threads(s), 0, stream_of(self)>>>(params);
  FLCE_LAUNCHED("divergence_rows");
  return FLCE_OK;
}
