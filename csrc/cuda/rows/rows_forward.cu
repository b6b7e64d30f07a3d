/* The backend functions stat_rows and exp_rows: the row passes of the forward. stat_rows makes the
 * statistics, exp_rows also E = exp(l - c). One thread block a row. */
#include "cuda/backend.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/rows/statistics.cuh"
#include "loss.h"

/* The largest z, bias included, of this thread's vectors of a tile. Sets the target's logit to -inf
 * before. */
template <bool BIAS, typename Z, typename S = stat_t<Z>>
__device__ __forceinline__ S hide_and_max(const Row<Z>& row, Vec<Z, kVec<Z>> (&raw)[kUnroll<Z>],
                                          int first) {
  S top = -infinity_of(S(0));
#pragma unroll
  for (int u = 0; u < kUnroll<Z>; u++) {
    const int col = column_of<Z>(first + u * blockDim.x, row.lead);
    S z[kVec<Z>];
    hide_column(raw[u], row.target - col);
    z_of<BIAS>(raw[u], row.bias, col, row.vocab, z);
#pragma unroll
    for (int e = 0; e < kVec<Z>; e++) top = fmax(top, z[e]);
  }
  return top;
}

/* The sum of reference - l_j over this thread's vectors of a tile, without the target, whose logit
 * may already be hidden. reference is l_y where that is finite. */
template <typename Z>
__device__ __forceinline__ float tile_weighted_gap(const row_args& p, const Row<Z>& row,
                                                   const Vec<Z, kVec<Z>> (&raw)[kUnroll<Z>],
                                                   int first) {
  constexpr int N = kVec<Z>;
  float weighted_gap = 0;
#pragma unroll
  for (int u = 0; u < kUnroll<Z>; u++) {
    const int col = column_of<Z>(first + u * blockDim.x, row.lead);
    float z[N];
    unpack(raw[u], z);
    const bool has_excluded = has_excluded_columns(row, col);
#pragma unroll
    for (int e = 0; e < N; e++) {
      if (!has_excluded || !is_excluded(row, col + e))
        weighted_gap += fma(-z[e], scale_of(p, 0.0f), row.reference);
    }
  }
  return weighted_gap;
}

/* ---- exp_rows for 16-bit E: the logits are read once ---- */

/* The offset is known before the row is read: c = l_y + kAbove. The target is one of the sum's
 * terms, so the sum cannot vanish. E may grow to exp(kWindow) = 2^60, so a sum of 2^30 columns
 * stays below 2^90 and float32 holds it. Only a logit that exceeds the target's by more than kAbove
 * + kWindow = 86 makes the block raise the offset. */
constexpr float kAbove = 44.361420f;  /* 64 ln 2 */
constexpr float kWindow = 41.588831f; /* 60 ln 2 */

/* After the offset was raised: multiplies the E that this thread has written of the row's first
 * `vectors` vectors by `factor`. These E are rounded twice; their logits may already be
 * overwritten. */
template <typename Z, typename Out>
__device__ __forceinline__ void rescale_written(Out* out, const Row<Z>& row, int vectors,
                                                float factor) {
  constexpr int N = kVec<Z>;
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    const int col = column_of<Z>(v, row.lead);
#pragma unroll 1 /* rare; unrolled it would take registers from the row's loop */
    for (int e = 0; e < N; e++) {
      if ((unsigned)(col + e) >= (unsigned)row.vocab) continue;
      const float scaled = to_stat(out[col + e]) * factor;
      out[col + e] = from_stat<Out>(scaled < smallest_normal(scaled) ? 0.0f : scaled);
    }
  }
}

/* Moves a thread's sums to the raised offset. */
template <Kind KIND>
__device__ __forceinline__ void raise_sums(RowSums<float>& sums, float raised, float factor) {
  if constexpr (KIND == kGeneral) {
    sums.entropy_sum = factor * (sums.entropy_sum - (raised - sums.entropy_sum_from) * sums.rest);
    sums.entropy_sum_from = raised;
  }
  sums.rest *= factor;
  sums.offset = raised;
}

/* Writes E of one vector; returns its sum, taken before E is rounded. */
template <bool BIAS, typename Z, typename Out>
__device__ __forceinline__ float write_exp(Out* out, const Row<Z>& row, const Vec<Z, kVec<Z>>& raw,
                                           int col, float shift) {
  constexpr int N = kVec<Z>;
  float z[N], sum = 0;
  z_of<BIAS>(raw, row.bias, col, row.vocab, z);
#pragma unroll
  for (int e = 0; e < N; e++) {
    z[e] = exp_fast(fma(z[e], row.scale, -shift));
    sum += z[e];
  }
  Vec<Out, N> packed;
  pack(z, packed);
  store_columns(out, col, row.vocab, packed);
  return sum;
}

/* Writes E of one vector, general kernel: from l, with the curve's slope in E but not in the sums.
 */
template <typename Z, typename Out>
__device__ __forceinline__ void write_exp_of(Out* out, const flce_rows& r, const Row<Z>& row,
                                             const float (&l)[kVec<Z>], int col, float shift,
                                             RowSums<float>& sums) {
  constexpr int N = kVec<Z>;
  float v[N];
#pragma unroll
  for (int e = 0; e < N; e++) {
    v[e] = exp_fast(l[e] - shift);
    sums.rest += v[e];
  }
  if (r.wants_entropy) {
#pragma unroll
    for (int e = 0; e < N; e++) sums.entropy_sum += entropy_term(v[e], l[e], sums.entropy_sum_from);
  }
  if (row.curve != FLCE_LINE) {
#pragma unroll
    for (int e = 0; e < N; e++) v[e] *= cap_slope(row.curve, l[e] * row.inverse);
  }
  Vec<Out, N> packed;
  pack(v, packed);
  store_columns(out, col, row.vocab, packed);
}

template <typename Z, typename Out, Kind KIND>
__global__ void __launch_bounds__(kRowThreads, row_blocks(4, KIND))
    exp_rows_one_read(const __grid_constant__ row_args p) {
  constexpr int N = kVec<Z>;
  __shared__ float scratch[kMaxWarps];
  const flce_rows& r = p.r;
  Out* out = (Out*)r.out + (int64_t)blockIdx.x * r.out_pitch;
  const RowRef ref = row_ref_of(r, blockIdx.x);
  if (ref.kind != kRowValid) {
    fill_row(out, (int)r.vocab, from_stat<Out>(blank_of<float>(ref)));
    pad_row(out, r.vocab, r.out_columns);
    write_no_statistics<float>(r, ref);
    return;
  }
  const Row<Z> row = open_row<KIND, true, Z>(p, ref.at);
  RowSums<float> sums = {};
  sums.offset = isfinite(row.l_target) ? row.l_target + kAbove : -INFINITY;
  sums.weighted_gap_from = sums.entropy_sum_from = row.reference;
  Best<float> best = no_best<float>();
  for (int first = 0; first < row.vectors; first += kUnroll<Z> * blockDim.x) {
    const int mine = first + threadIdx.x;
    Vec<Z, N> raw[kUnroll<Z>];
    load_tile<true>(row.z, row.lead, row.vocab, mine, raw);
    float l[kUnroll<Z>][N], top;
    if constexpr (KIND == kGeneral) {
      tile_logits<true>(row, raw, mine, l);
      top = tile_max(l);
      if (p.weighted) add_tile_weighted_gaps<false>(r, row, mine, l, sums.weighted_gap_from, sums);
      if (r.predictions && top > best.value) best = {top, column_holding(row, top, mine, l)};
    } else {
      if constexpr (KIND == kSmooth) sums.weighted_gap += tile_weighted_gap(p, row, raw, mine);
      top = row.scale * hide_and_max<KIND == kBiased>(row, raw, mine);
    }
    /* This barrier also separates the reads of this tile (and of z_y) from the writes below: in
     * place with Out half the size of Z, the E of tile t overwrites logits of tiles up to t, read
     * by other threads too. */
    if (__syncthreads_or(top > sums.offset + kWindow)) {
      const float raised = block_max(top, scratch);
      const float factor = exp_fast(sums.offset - raised);
      rescale_written(out, row, first, factor);
      raise_sums<KIND>(sums, raised, factor);
    }
    /* An offset of -inf: every logit so far is -inf (or NaN). */
    const float shift = offset_of(sums.offset);
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      const int col = column_of<Z>(mine + u * blockDim.x, row.lead);
      if constexpr (KIND == kGeneral) {
        write_exp_of(out, r, row, l[u], col, shift, sums);
      } else {
        sums.rest += write_exp<KIND == kBiased>(out, row, raw[u], col, shift);
      }
    }
  }
  pad_row(out, r.vocab, r.out_columns);
  sums.offset = offset_of(sums.offset);
  add_up<KIND>(p, sums, scratch);
  if (KIND == kGeneral && r.predictions) best = block_best(best, scratch);
  if (threadIdx.x != 0) return;
  const int64_t at = vectors_at(r, blockIdx.x); /* read again: frees a register in the loop */
  write_statistics<KIND>(p, row, at, sums);
  if (KIND == kGeneral && r.predictions) r.predictions[at] = prediction_of(row, best);
}

/* ---- exp_rows for float32 and float64 E: reads the row for its maximum, then for E ---- */

/* Subnormals become 0: they contribute nothing to the GEMMs that follow and are slow on some
 * units. */
template <typename T>
__device__ __forceinline__ T flushed(T value) {
  return value < smallest_normal(value) ? 0 : value;
}

/* The largest l of the row, the target included. */
template <Kind KIND, typename T>
__device__ __forceinline__ T row_max(const Row<T>& row, T* scratch) {
  constexpr int N = kVec<T>;
  T top = -infinity_of(T(0));
  for (int first = threadIdx.x; first < row.vectors; first += kUnroll<T> * blockDim.x) {
    Vec<T, N> raw[kUnroll<T>];
    load_tile<false>(row.z, row.lead, row.vocab, first, raw);
    T l[kUnroll<T>][N];
    if constexpr (KIND == kGeneral) {
      tile_logits<false>(row, raw, first, l);
    } else {
#pragma unroll
      for (int u = 0; u < kUnroll<T>; u++) {
        const int col = column_of<T>(first + u * blockDim.x, row.lead);
        z_of<KIND == kBiased>(raw[u], row.bias, col, row.vocab, l[u]);
      }
    }
    top = fmax(top, tile_max(l));
  }
  if constexpr (KIND != kGeneral) return row.scale * block_max(top, scratch);
  return fmax(block_max(top, scratch), row.l_target);
}

/* Writes E of one vector and adds its sum. Excluded columns (the target, outside the row) are 0. */
template <bool BIAS, typename T>
__device__ __forceinline__ void write_exp_two_reads(T* out, const Row<T>& row, Vec<T, kVec<T>>& raw,
                                                    int col, RowSums<T>& sums) {
  constexpr int N = kVec<T>;
  T z[N];
  z_of<BIAS>(raw, row.bias, col, row.vocab, z);
#pragma unroll
  for (int e = 0; e < N; e++) {
    const T value = is_excluded(row, col + e) ? 0 : exp(fma(z[e], row.scale, -sums.offset));
    sums.rest += value;
    raw.at[e] = flushed(value);
  }
  store_columns(out, col, row.vocab, raw);
}

/* The same, general kernel; `best` is the lowest column whose l is the offset. */
template <typename T>
__device__ __forceinline__ void write_exp_of_two_reads(T* out, const row_args& p, const Row<T>& row,
                                                       Vec<T, kVec<T>>& raw, int col,
                                                       RowSums<T>& sums, int& best) {
  constexpr int N = kVec<T>;
  const T c = sums.offset;
  T l[N], slope[N];
  logits_of<false>(row, raw, col, l, slope);
  exclude_columns(row, col, l);
  if (p.weighted) add_weighted_gaps<false>(p.r, row, col, l, c, sums);
  if (p.r.predictions) {
#pragma unroll
    for (int e = N - 1; e >= 0; e--) {
      if (l[e] == c) best = min(best, col + e);
    }
  }
#pragma unroll
  for (int e = 0; e < N; e++) {
    const T value = exp(l[e] - c);
    sums.rest += value;
    if (p.r.wants_entropy) sums.entropy_sum += entropy_term(value, l[e], c);
    raw.at[e] = flushed(value * slope[e]);
  }
  store_columns(out, col, row.vocab, raw);
}

template <typename T, Kind KIND>
__global__ void __launch_bounds__(kRowThreads, sizeof(T) == 8 ? 1 : 2)
    exp_rows_two_reads(const __grid_constant__ row_args p) {
  constexpr int N = kVec<T>;
  __shared__ T scratch[kMaxWarps];
  const flce_rows& r = p.r;
  T* out = (T*)r.out + (int64_t)blockIdx.x * r.out_pitch;
  const RowRef ref = row_ref_of(r, blockIdx.x);
  if (ref.kind != kRowValid) {
    fill_row(out, (int)r.vocab, blank_of<T>(ref));
    pad_row(out, r.vocab, r.out_columns);
    write_no_statistics<T>(r, ref);
    return;
  }
  const Row<T> row = open_row<KIND, false, T>(p, ref.at);
  RowSums<T> sums = {};
  sums.offset = offset_of(row_max<KIND>(row, scratch));
  sums.weighted_gap_from = sums.entropy_sum_from = sums.offset;
  int lowest = INT32_MAX; /* column that holds the offset */
  /* In place: a thread overwrites only what it has read itself, and z_y was read before the
   * barriers in row_max. */
  for (int first = threadIdx.x; first < row.vectors; first += kUnroll<T> * blockDim.x) {
    Vec<T, N> raw[kUnroll<T>];
    load_tile<true>(row.z, row.lead, row.vocab, first, raw);
#pragma unroll
    for (int u = 0; u < kUnroll<T>; u++) {
      const int col = column_of<T>(first + u * blockDim.x, row.lead);
      if constexpr (KIND == kGeneral) {
        write_exp_of_two_reads(out, p, row, raw[u], col, sums, lowest);
      } else {
        write_exp_two_reads<KIND == kBiased>(out, row, raw[u], col, sums);
      }
    }
  }
  pad_row(out, r.vocab, r.out_columns);
  add_up<KIND>(p, sums, scratch);
  Best<T> best = lowest == INT32_MAX ? no_best<T>() : Best<T>{sums.offset, lowest};
  if (KIND == kGeneral && r.predictions) best = block_best(best, scratch);
  if (threadIdx.x != 0) return;
  const int64_t at = vectors_at(r, blockIdx.x); /* read again: frees a register in the loop */
  write_statistics<KIND>(p, row, at, sums);
  if (KIND == kGeneral && r.predictions) r.predictions[at] = prediction_of(row, best);
}

/* ---- stat_rows ---- */

/* One read of the row, with a running maximum and the sum of exp(l - maximum): one exp for each
 * logit and one for each tile that raises the maximum. */
template <typename Z, Kind KIND>
__global__ void __launch_bounds__(kRowThreads, row_blocks(sizeof(Z), KIND))
    stat_rows(const __grid_constant__ row_args p) {
  using S = stat_t<Z>;
  constexpr int N = kVec<Z>;
  constexpr bool kFast = sizeof(Z) == 2;
  __shared__ S scratch[kMaxWarps];
  __shared__ S parked; /* l_target, kept out of registers during the row's loop */
  const flce_rows& r = p.r;
  pad_row((Z*)r.z + (int64_t)blockIdx.x * r.z_pitch, r.vocab, r.z_columns);
  const RowRef ref = row_ref_of(r, blockIdx.x);
  if (ref.kind != kRowValid) {
    write_no_statistics<S>(r, ref);
    return;
  }
  Row<Z> row = open_row<KIND, kFast, Z>(p, ref.at);
  if (KIND == kGeneral && threadIdx.x == 0) parked = row.l_target;
  const S none = -infinity_of(S(0)), unit = KIND == kGeneral ? S(1) : row.scale;
  Running<S> run = {none, 0};
  RowSums<S> sums = {};
  int lowest = INT32_MAX; /* column that holds run.top */
  for (int first = threadIdx.x; first < row.vectors; first += kUnroll<Z> * blockDim.x) {
    Vec<Z, N> raw[kUnroll<Z>];
    load_tile<true>(row.z, row.lead, row.vocab, first, raw);
    S l[kUnroll<Z>][N], highest;
    if constexpr (KIND == kGeneral) {
      tile_logits<kFast>(row, raw, first, l);
      highest = tile_max(l);
    } else {
      highest = fmax(run.top, hide_and_max<KIND == kBiased>(row, raw, first));
    }
    if (highest > run.top) {
      if (KIND == kGeneral && r.predictions) lowest = column_holding(row, highest, first, l);
      raise_top<KIND>(run, sums, highest, unit);
    }
    if (KIND == kGeneral && p.weighted)
      add_tile_weighted_gaps<true>(r, row, first, l, run.shift, sums);
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      if constexpr (KIND == kGeneral) {
        add_exps(l[u], run.shift, r.wants_entropy, sums);
      } else {
        const int col = column_of<Z>(first + u * blockDim.x, row.lead);
        z_of<KIND == kBiased>(raw[u], row.bias, col, row.vocab, l[u]);
#pragma unroll
        for (int e = 0; e < N; e++) sums.rest += exp_fast(fma(l[u][e], unit, -run.shift));
      }
    }
  }
  sums.offset = unit * block_max(run.top, scratch);
  if constexpr (KIND == kGeneral) row.l_target = parked;
  if (row.target >= 0) sums.offset = fmax(sums.offset, row.l_target);
  sums.offset = offset_of(sums.offset);
  rebase_sums<KIND>(run, sums, unit);
  add_up<KIND>(p, sums, scratch);
  Best<S> best = {run.top, lowest};
  if (KIND == kGeneral && r.predictions) best = block_best(best, scratch);
  if (threadIdx.x != 0) return;
  const int64_t at = vectors_at(r, blockIdx.x); /* read again: frees a register in the loop */
  write_statistics<KIND>(p, row, at, sums);
  if (KIND == kGeneral && r.predictions) r.predictions[at] = prediction_of(row, best);
}

/* ---- launches ---- */

typedef void (*row_kernel)(const row_args);

static flce_status launch_rows(void* self, const flce_rows* r, row_kernel kernel,
                               const char* what) {
  FLCE_TRY(check_rows(r, what));
  kernel<<<(unsigned)r->rows, row_threads(r), 0, stream_of(self)>>>(make_args(r));
  FLCE_LAUNCHED(what);
  return FLCE_OK;
}

/* The plain kinds find the largest l as the largest z, which needs a scale > 0. */
static Kind forward_kind(const flce_rows* r) {
  const flce_loss* o = &r->options;
  const bool smooth = o->label_smoothing > 0;
  const bool general = (smooth && (r->class_weight || r->bias)) || flce_caps_logits(o) ||
                       !flce_logits_rise(o) || r->temperature || r->wants_entropy ||
                       r->predictions || !r->target;
  return general ? kGeneral : smooth ? kSmooth : r->bias ? kBiased : kPlain;
}

template <typename Z>
static row_kernel stat_kernel(Kind kind) {
  return kind == kPlain    ? stat_rows<Z, kPlain>
         : kind == kBiased ? stat_rows<Z, kBiased>
                           : stat_rows<Z, kGeneral>;
}

template <typename Z, typename Out>
static row_kernel one_read_kernel(Kind kind) {
  return kind == kPlain    ? exp_rows_one_read<Z, Out, kPlain>
         : kind == kBiased ? exp_rows_one_read<Z, Out, kBiased>
         : kind == kSmooth ? exp_rows_one_read<Z, Out, kSmooth>
                           : exp_rows_one_read<Z, Out, kGeneral>;
}

template <typename T>
static row_kernel two_reads_kernel(Kind kind) {
  return kind == kPlain    ? exp_rows_two_reads<T, kPlain>
         : kind == kBiased ? exp_rows_two_reads<T, kBiased>
                           : exp_rows_two_reads<T, kGeneral>;
}

flce_status cuda_stat_rows(void* self, const flce_rows* r) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  row_kernel kernel = NULL;
  FLCE_WITH_TYPE(r->z_dtype, Z, kernel = stat_kernel<Z>(forward_kind(r)));
  return launch_rows(self, r, kernel, "stat_rows");
}

flce_status cuda_exp_rows(void* self, const flce_rows* r) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  if (!r->target) {
    return flce_fail(FLCE_UNSUPPORTED, "exp_rows: no CUDA kernel for target probabilities");
  }
  const flce_dtype z = r->z_dtype, out = r->out_dtype;
  const Kind kind = forward_kind(r);
  row_kernel kernel = NULL;
  if (z == FLCE_F32 && out == FLCE_BF16) kernel = one_read_kernel<float, __nv_bfloat16>(kind);
  if (z == FLCE_BF16 && out == FLCE_BF16) {
    kernel = one_read_kernel<__nv_bfloat16, __nv_bfloat16>(kind);
  }
  if (z == FLCE_F32 && out == FLCE_F32) kernel = two_reads_kernel<float>(kind);
  if (z == FLCE_F64 && out == FLCE_F64) kernel = two_reads_kernel<double>(kind);
  if (!kernel) return no_row_kernel(r, "exp_rows");
  return launch_rows(self, r, kernel, "exp_rows");
}
