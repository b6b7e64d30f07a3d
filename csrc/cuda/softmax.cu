/* Row passes: statistics, E = exp(z - c) and gradient rows. One block walks one row. */
#include "backend.cuh"
#include "row.cuh"

/* ---- exp_rows for 16-bit E: one read ---- */

/* The offset is known before the row is: c = z_y + kAbove. The target is one of the sum's terms, so
 * the sum cannot vanish; E may rise to exp(kWindow), so a sum of 2^30 columns stays below 2^90.
 * Only a logit further than kAbove + kWindow = 86 above the target's leaves the window. */
constexpr float kAbove = 44.361420f;  /* 64 ln 2 */
constexpr float kWindow = 41.588831f; /* 60 ln 2 */

/* Multiplies what this thread wrote of the row's first `vectors` vectors, for a raised offset.
 * These E are rounded twice; the logits may be gone. */
template <typename Z, typename Out>
__device__ __forceinline__ void rescale_written(Out* out, const Row<Z>& row, int vectors,
                                                float factor) {
  constexpr int N = kVec<Z>;
  for (int v = threadIdx.x; v < vectors; v += blockDim.x) {
    const int col = column_of<Z>(v, row.lead);
#pragma unroll
    for (int e = 0; e < N; e++) {
      if ((unsigned)(col + e) >= (unsigned)row.vocab) continue;
      const float scaled = to_stat(out[col + e]) * factor;
      out[col + e] = from_stat<Out>(scaled < smallest_normal(scaled) ? 0.0f : scaled);
    }
  }
}

/* E of one vector; gives its sum, taken before E is rounded. */
template <bool BIAS, typename Z, typename Out>
__device__ __forceinline__ float write_exp(Out* out, const Row<Z>& row, const Vec<Z, kVec<Z>>& raw,
                                           int col, float shift) {
  constexpr int N = kVec<Z>;
  float z[N], sum = 0;
  logits_of<BIAS>(raw, row.bias, col, row.vocab, z);
#pragma unroll
  for (int e = 0; e < N; e++) {
    z[e] = exp_fast(z[e] - shift);
    sum += z[e];
  }
  Vec<Out, N> packed;
  pack(z, packed);
  store_columns(out, col, row.vocab, packed);
  return sum;
}

template <typename Z, typename Out, bool BIAS, bool SMOOTH>
__global__ void __launch_bounds__(kRowThreads, row_blocks(4, BIAS, SMOOTH))
    exp_rows_one_read(const __grid_constant__ flce_rows r) {
  constexpr int N = kVec<Z>;
  __shared__ float scratch[kMaxWarps];
  Out* out = (Out*)r.out + (int64_t)blockIdx.x * r.out_pitch;
  const RowKind kind = row_kind(r);
  if (kind != kRowValid) {
    fill_row(out, (int)r.vocab, from_stat<Out>(0.0f));
    write_no_statistics<float>(r, kind);
    return;
  }
  const Row<Z> row = open_row<Z>(r);
  float c = isfinite(row.z_target) ? row.z_target + kAbove : -INFINITY;
  float sum = 0, smooth = 0;
  for (int first = 0; first < row.vectors; first += kUnroll<Z> * blockDim.x) {
    const int mine = first + threadIdx.x;
    Vec<Z, N> raw[kUnroll<Z>];
    load_tile<true>(row.z, row.lead, row.vocab, mine, raw);
    float top = -INFINITY;
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      const int col = column_of<Z>(mine + u * blockDim.x, row.lead);
      float z[N];
      if constexpr (SMOOTH) {
        logits_of<BIAS>(raw[u], row.bias, col, row.vocab, z);
        smooth += smoothing_sum(row, col, z);
      }
      hide_column(raw[u], row.target - col);
      logits_of<BIAS>(raw[u], row.bias, col, row.vocab, z);
#pragma unroll
      for (int e = 0; e < N; e++) top = fmaxf(top, z[e]);
    }
    /* The barrier also separates the reads of this tile (and of z_y) from the writes below: in
     * place and with Out half of Z, tile t's E covers logits of tiles up to t, of other threads
     * too. */
    if (__syncthreads_or(top > c + kWindow)) {
      const float raised = block_max(top, scratch);
      const float factor = exp_fast(c - raised);
      rescale_written(out, row, first, factor);
      sum *= factor;
      c = raised;
    }
    /* No offset yet: every logit so far is -inf (or NaN), and exp(-inf) needs a finite shift. */
    const float shift = c == -INFINITY ? 0.0f : c;
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      const int col = column_of<Z>(mine + u * blockDim.x, row.lead);
      sum += write_exp<BIAS>(out, row, raw[u], col, shift);
    }
  }
  sum = block_sum(sum, scratch);
  if constexpr (SMOOTH) smooth = block_sum(smooth, scratch);
  if (threadIdx.x == 0) write_statistics(r, row, c, sum, smooth);
}

/* ---- exp_rows for float32 and float64 E: the row's maximum first, then E ---- */

template <typename T, bool BIAS>
__device__ __forceinline__ T row_max(const Row<T>& row, T* scratch) {
  constexpr int N = kVec<T>;
  T top = -infinity_of(T(0));
  for (int first = threadIdx.x; first < row.vectors; first += kUnroll<T> * blockDim.x) {
    Vec<T, N> raw[kUnroll<T>];
    load_tile<false>(row.z, row.lead, row.vocab, first, raw);
#pragma unroll
    for (int u = 0; u < kUnroll<T>; u++) {
      T z[N];
      logits_of<BIAS>(raw[u], row.bias, column_of<T>(first + u * blockDim.x, row.lead), row.vocab,
                      z);
#pragma unroll
      for (int e = 0; e < N; e++) top = fmax(top, z[e]);
    }
  }
  return block_max(top, scratch);
}

template <typename T, bool BIAS, bool SMOOTH>
__global__ void __launch_bounds__(kRowThreads, sizeof(T) == 8 || (BIAS && SMOOTH) ? 1 : 2)
    exp_rows_two_reads(const __grid_constant__ flce_rows r) {
  constexpr int N = kVec<T>;
  __shared__ T scratch[kMaxWarps];
  T* out = (T*)r.out + (int64_t)blockIdx.x * r.out_pitch;
  const RowKind kind = row_kind(r);
  if (kind != kRowValid) {
    fill_row(out, (int)r.vocab, T(0));
    write_no_statistics<T>(r, kind);
    return;
  }
  const Row<T> row = open_row<T>(r);
  const T c = row_max<T, BIAS>(row, scratch);
  T sum = 0, smooth = 0;
  /* In place a thread overwrites only what it has read itself, and z_y was read before row_max's
   * barriers. */
  for (int first = threadIdx.x; first < row.vectors; first += kUnroll<T> * blockDim.x) {
    Vec<T, N> raw[kUnroll<T>];
    load_tile<true>(row.z, row.lead, row.vocab, first, raw);
#pragma unroll
    for (int u = 0; u < kUnroll<T>; u++) {
      const int col = column_of<T>(first + u * blockDim.x, row.lead);
      T z[N];
      logits_of<BIAS>(raw[u], row.bias, col, row.vocab, z);
      if constexpr (SMOOTH) smooth += smoothing_sum(row, col, z);
#pragma unroll
      for (int e = 0; e < N; e++) {
        const bool counts = (unsigned)(col + e) < (unsigned)row.vocab && col + e != row.target;
        const T value = counts ? exp(z[e] - c) : 0;
        sum += value;
        /* A subnormal would be worthless in the products that follow, and slow on some units. */
        raw[u].at[e] = value < smallest_normal(value) ? 0 : value;
      }
      store_columns(out, col, row.vocab, raw[u]);
    }
  }
  sum = block_sum(sum, scratch);
  if constexpr (SMOOTH) smooth = block_sum(smooth, scratch);
  if (threadIdx.x == 0) write_statistics(r, row, c, sum, smooth);
}

/* ---- stat_rows ---- */

/* A running maximum and the sum of exp(z - maximum): one exp for each logit and one for each tile.
 */
template <typename Z, bool BIAS, bool SMOOTH>
__global__ void __launch_bounds__(kRowThreads, row_blocks(sizeof(Z), BIAS, SMOOTH))
    stat_rows(const __grid_constant__ flce_rows r) {
  using S = stat_t<Z>;
  constexpr int N = kVec<Z>;
  __shared__ S scratch[kMaxWarps];
  const RowKind kind = row_kind(r);
  if (kind != kRowValid) {
    write_no_statistics<S>(r, kind);
    return;
  }
  const Row<Z> row = open_row<Z>(r);
  const S none = -infinity_of(S(0));
  S top = none, shift = 0, sum = 0, smooth = 0;
  for (int first = threadIdx.x; first < row.vectors; first += kUnroll<Z> * blockDim.x) {
    Vec<Z, N> raw[kUnroll<Z>];
    load_tile<true>(row.z, row.lead, row.vocab, first, raw);
    S highest = top;
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      const int col = column_of<Z>(first + u * blockDim.x, row.lead);
      S z[N];
      if constexpr (SMOOTH) {
        logits_of<BIAS>(raw[u], row.bias, col, row.vocab, z);
        smooth += smoothing_sum(row, col, z);
      }
      hide_column(raw[u], row.target - col);
      logits_of<BIAS>(raw[u], row.bias, col, row.vocab, z);
#pragma unroll
      for (int e = 0; e < N; e++) highest = fmax(highest, z[e]);
    }
    if (highest > top) {
      sum *= exp_fast(top - highest); /* top = -inf: the sum is 0, and stays 0 */
      top = shift = highest;
    }
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      S z[N];
      logits_of<BIAS>(raw[u], row.bias, column_of<Z>(first + u * blockDim.x, row.lead), row.vocab,
                      z);
#pragma unroll
      for (int e = 0; e < N; e++) sum += exp_fast(z[e] - shift);
    }
  }
  const S c = fmax(block_max(top, scratch), row.z_target);
  /* A thread that saw only -inf has the sum 0 (NaN if it saw a NaN) for any offset. */
  sum = block_sum(top == none ? sum : sum * exp_fast(top - c), scratch);
  if constexpr (SMOOTH) smooth = block_sum(smooth, scratch);
  if (threadIdx.x == 0) write_statistics(r, row, c, sum, smooth);
}

/* ---- grad_rows ---- */

enum Source { kFromLogits, kFromBiasedLogits, kFromExp };

/* out_j = factor exp(z_j - offset) - smooth w_j, and `target` instead at the target's column. */
template <typename S>
struct GradRow {
  S factor, offset, target, smooth;
  int target_column;
  bool set_target;
};

template <typename S>
__device__ __forceinline__ GradRow<S> open_grad_row(const flce_rows& r, int64_t i, double scale,
                                                    bool hide_target, bool z_is_exp) {
  GradRow<S> g;
  g.offset = stat_row<S>(r, FLCE_STAT_OFFSET)[i];
  g.target_column = (int)r.target[i];
  g.factor = (S)(z_is_exp ? 1.0 : scale);
  g.target = g.smooth = 0;
  g.set_target = hide_target;
  if (r.coef) {
    const S* coef = (const S*)r.coef + i;
    g.factor = coef[FLCE_COEF_ROW * r.stat_pitch];
    if (z_is_exp) g.factor /= (S)scale;
    g.smooth = coef[FLCE_COEF_SMOOTH * r.stat_pitch];
    const S* w = (const S*)r.class_weight;
    g.target = coef[FLCE_COEF_TARGET * r.stat_pitch];
    if (g.smooth != 0) g.target -= g.smooth * (w ? w[g.target_column] : 1);
    g.set_target = true;
  }
  return g;
}

/* Gradients of one vector, which begins at column `col`. */
template <Source SOURCE, bool SMOOTH, typename Z, typename Out, typename S = stat_t<Z>>
__device__ __forceinline__ void grad_vector(const flce_rows& r, const GradRow<S>& g,
                                            const Vec<Z, kVec<Z>>& raw, int col,
                                            Vec<Out, kVec<Z>>& packed) {
  constexpr int N = kVec<Z>;
  const int hit = g.target_column - col, vocab = (int)r.vocab;
  S v[N];
  logits_of<SOURCE == kFromBiasedLogits>(raw, (const S*)r.bias, col, vocab, v);
#pragma unroll
  for (int e = 0; e < N; e++) {
    if constexpr (SOURCE != kFromExp) v[e] = exp_for<Out>(v[e] - g.offset);
    v[e] *= g.factor;
  }
  if constexpr (SMOOTH) {
    S w[N];
#pragma unroll
    for (int e = 0; e < N; e++) w[e] = 1;
    if (r.class_weight) load_beside((const S*)r.class_weight, col, vocab, w);
#pragma unroll
    for (int e = 0; e < N; e++) v[e] -= g.smooth * w[e];
  }
  if (g.set_target && (unsigned)hit < (unsigned)N) {
#pragma unroll
    for (int e = 0; e < N; e++) {
      if (e == hit) v[e] = g.target;
    }
  }
  pack(v, packed);
}

template <typename Z, typename Out, Source SOURCE, bool SMOOTH>
__global__ void __launch_bounds__(kRowThreads,
                                  row_blocks(sizeof(Z), SOURCE == kFromBiasedLogits, SMOOTH))
    grad_rows(const __grid_constant__ flce_rows r, double scale, bool hide_target) {
  using S = stat_t<Z>;
  constexpr int N = kVec<Z>;
  Out* out = (Out*)r.out + (int64_t)blockIdx.x * r.out_pitch;
  const RowKind kind = row_kind(r);
  if (kind != kRowValid) {
    const bool nan = kind == kRowOutOfRange && r.coef;
    fill_row(out, (int)r.vocab, from_stat<Out>(nan ? (S)NAN : (S)0));
    return;
  }
  const GradRow<S> g = open_grad_row<S>(r, blockIdx.x, scale, hide_target, SOURCE == kFromExp);
  const Z* z = (const Z*)r.z + (int64_t)blockIdx.x * r.z_pitch;
  const int vocab = (int)r.vocab, lead = lead_of(z), vectors = vectors_of<Z>(lead, vocab);
  for (int first = 0; first < vectors; first += kUnroll<Z> * blockDim.x) {
    const int mine = first + threadIdx.x;
    Vec<Z, N> raw[kUnroll<Z>];
    load_tile<true>(z, lead, vocab, mine, raw);
    /* In place with Out half of Z a tile's gradients cover logits of tiles up to it, of other
     * threads too; with equal sizes a thread overwrites only what it has read itself. */
    if constexpr (sizeof(Out) != sizeof(Z)) __syncthreads();
#pragma unroll
    for (int u = 0; u < kUnroll<Z>; u++) {
      const int col = column_of<Z>(mine + u * blockDim.x, lead);
      Vec<Out, N> packed;
      grad_vector<SOURCE, SMOOTH>(r, g, raw[u], col, packed);
      store_columns(out, col, vocab, packed);
    }
  }
}

/* ---- launches ---- */

typedef void (*row_kernel)(const flce_rows);
typedef void (*grad_kernel)(const flce_rows, double, bool);

static flce_status check_rows(const flce_rows* r, const char* what) {
  if (r->vocab > kMaxVocab) {
    return flce_fail(FLCE_UNSUPPORTED, "%s: at most %d columns, got %lld", what, kMaxVocab,
                     (long long)r->vocab);
  }
  return check_grid(r->rows, what);
}

/* Enough threads for one tile a row, in steps of whole warps. */
static int row_threads(const flce_rows* r) {
  const int64_t logits = 16; /* of a thread in one tile: kUnroll vectors; fewer for float64 */
  return threads_for(ceil_div(r->vocab, logits), kRowThreads);
}

static flce_status launch_rows(void* self, const flce_rows* r, row_kernel kernel,
                               const char* what) {
  FLCE_TRY(check_rows(r, what));
  kernel<<<(unsigned)r->rows, row_threads(r), 0, stream_of(self)>>>(*r);
  FLCE_LAUNCHED(what);
  return FLCE_OK;
}

static flce_status no_row_kernel(const flce_rows* r, const char* what) {
  return flce_fail(FLCE_UNSUPPORTED, "%s: no CUDA kernel from %s to %s", what,
                   flce_dtype_name(r->z_dtype), flce_dtype_name(r->out_dtype));
}

template <typename Z>
static row_kernel stat_kernel(const flce_rows* r) {
  if (r->label_smoothing > 0) {
    return r->bias ? stat_rows<Z, true, true> : stat_rows<Z, false, true>;
  }
  return r->bias ? stat_rows<Z, true, false> : stat_rows<Z, false, false>;
}

template <typename Z, typename Out>
static row_kernel one_read_kernel(const flce_rows* r) {
  if (r->label_smoothing > 0) {
    return r->bias ? exp_rows_one_read<Z, Out, true, true> : exp_rows_one_read<Z, Out, false, true>;
  }
  return r->bias ? exp_rows_one_read<Z, Out, true, false> : exp_rows_one_read<Z, Out, false, false>;
}

template <typename T>
static row_kernel two_reads_kernel(const flce_rows* r) {
  if (r->label_smoothing > 0) {
    return r->bias ? exp_rows_two_reads<T, true, true> : exp_rows_two_reads<T, false, true>;
  }
  return r->bias ? exp_rows_two_reads<T, true, false> : exp_rows_two_reads<T, false, false>;
}

/* NULL where there is none: z that holds exp has the type of what it becomes. Its bias is in it. */
template <typename Z, typename Out>
static grad_kernel grad_kernel_of(const flce_rows* r, bool z_is_exp) {
  const bool smooth = r->coef && r->label_smoothing > 0;
  if (z_is_exp) {
    if constexpr (sizeof(Z) == sizeof(Out)) {
      return smooth ? grad_rows<Z, Out, kFromExp, true> : grad_rows<Z, Out, kFromExp, false>;
    }
    return NULL;
  }
  if (r->bias) {
    return smooth ? grad_rows<Z, Out, kFromBiasedLogits, true>
                  : grad_rows<Z, Out, kFromBiasedLogits, false>;
  }
  return smooth ? grad_rows<Z, Out, kFromLogits, true> : grad_rows<Z, Out, kFromLogits, false>;
}

flce_status cuda_stat_rows(void* self, const flce_rows* r) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  row_kernel kernel = NULL;
  FLCE_WITH_TYPE(r->z_dtype, Z, kernel = stat_kernel<Z>(r));
  return launch_rows(self, r, kernel, "stat_rows");
}

flce_status cuda_exp_rows(void* self, const flce_rows* r) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  const flce_dtype z = r->z_dtype, out = r->out_dtype;
  row_kernel kernel = NULL;
  if (z == FLCE_F32 && out == FLCE_BF16) kernel = one_read_kernel<float, __nv_bfloat16>(r);
  if (z == FLCE_BF16 && out == FLCE_BF16) kernel = one_read_kernel<__nv_bfloat16, __nv_bfloat16>(r);
  if (z == FLCE_F32 && out == FLCE_F32) kernel = two_reads_kernel<float>(r);
  if (z == FLCE_F64 && out == FLCE_F64) kernel = two_reads_kernel<double>(r);
  if (!kernel) return no_row_kernel(r, "exp_rows");
  return launch_rows(self, r, kernel, "exp_rows");
}

flce_status cuda_grad_rows(void* self, const flce_rows* r, double scale, bool hide_target,
                           bool z_is_exp) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  const flce_dtype z = r->z_dtype, out = r->out_dtype;
  grad_kernel kernel = NULL;
  if (z == out) {
    FLCE_WITH_TYPE(z, T, kernel = (grad_kernel_of<T, T>(r, z_is_exp)));
  } else if (z == FLCE_F32 && out == FLCE_BF16) {
    kernel = grad_kernel_of<float, __nv_bfloat16>(r, z_is_exp);
  } else if (z == FLCE_F32 && out == FLCE_F16) {
    kernel = grad_kernel_of<float, __half>(r, z_is_exp);
  }
  if (!kernel) return no_row_kernel(r, z_is_exp ? "grad_rows of exp rows" : "grad_rows");
  FLCE_TRY(check_rows(r, "grad_rows"));
  kernel<<<(unsigned)r->rows, row_threads(r), 0, stream_of(self)>>>(*r, scale, hide_target);
  FLCE_LAUNCHED("grad_rows");
  return FLCE_OK;
}
