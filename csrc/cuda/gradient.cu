/* What stands between the row passes and the gradient GEMMs: coefficients, scaled rows, sums over
 * rows, and elementwise passes. Every sum has a fixed order. */
#include "backend.cuh"

/* ---- elementwise passes ---- */

enum { kThreads = 256 };

/* Vectors of `count` elements, kThreads a block. The last one may be short. */
template <int N>
static flce_status vector_grid(int64_t count, const char* what, unsigned* blocks) {
  const int64_t needed = ceil_div(count, (int64_t)kThreads * N);
  FLCE_TRY(check_grid(needed, what));
  *blocks = (unsigned)needed;
  return FLCE_OK;
}

/* Loads or stores min(N, count - begin) elements; whole vectors where `aligned`. */
template <int N, typename T, typename S>
__device__ __forceinline__ void load_part(const T* data, int64_t begin, int64_t count, bool aligned,
                                          S (&v)[N]) {
  if (aligned && begin + N <= count) {
    Vec<T, N> raw;
    load_vec<true>(data + begin, raw);
    unpack(raw, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = begin + e < count ? (S)to_stat(data[begin + e]) : (S)0;
  }
}

template <int N, typename T, typename S>
__device__ __forceinline__ void store_part(T* data, int64_t begin, int64_t count, bool aligned,
                                           const S (&v)[N]) {
  if (aligned && begin + N <= count) {
    store_as(data + begin, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) {
      if (begin + e < count) data[begin + e] = from_stat<T>(v[e]);
    }
  }
}

template <typename Out, typename In>
__global__ void cast_elements(Out* out, const In* in, int64_t count, bool aligned) {
  constexpr int N = 8;
  const int64_t begin = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * N;
  stat_t<In> v[N];
  load_part(in, begin, count, aligned, v);
  store_part(out, begin, count, aligned, v);
}

template <typename Accum, typename T>
__global__ void add_elements(Accum* accum, const T* block, int64_t count, bool aligned) {
  constexpr int N = 8;
  const int64_t begin = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * N;
  stat_t<Accum> sum[N], v[N];
  load_part(accum, begin, count, aligned, sum);
  load_part(block, begin, count, aligned, v);
#pragma unroll
  for (int e = 0; e < N; e++) sum[e] += v[e];
  store_part(accum, begin, count, aligned, sum);
}

template <typename Out, typename In, typename S>
__global__ void scale_elements(Out* out, const In* in, const S* grad_output, const S* scalars,
                               int64_t count, bool aligned) {
  constexpr int N = 8;
  S factor = grad_output[0];
  if (scalars) factor *= scalars[FLCE_SCALAR_INV_DENOM] / scalars[FLCE_SCALAR_UNIT];
  if ((const void*)out == (const void*)in && factor == 1) return;
  const int64_t step = (int64_t)gridDim.x * kThreads * N;
  for (int64_t begin = ((int64_t)blockIdx.x * kThreads + threadIdx.x) * N; begin < count;
       begin += step) {
    S v[N];
    load_part(in, begin, count, aligned, v);
#pragma unroll
    for (int e = 0; e < N; e++) v[e] *= factor;
    store_part(out, begin, count, aligned, v);
  }
}

static bool both_aligned(const void* a, const void* b) {
  return is_aligned(a, 16) && is_aligned(b, 16);
}

flce_status cuda_zero(void* self, void* data, int64_t bytes) {
  if (bytes == 0) return FLCE_OK;
  return check_cuda(cudaMemsetAsync(data, 0, (size_t)bytes, stream_of(self)), "zero");
}

flce_status cuda_cast(void* self, void* out, flce_dtype out_dtype, const void* in,
                      flce_dtype in_dtype, int64_t count) {
  if (count == 0) return FLCE_OK;
  unsigned blocks;
  FLCE_TRY(vector_grid<8>(count, "cast", &blocks));
  const bool aligned = both_aligned(out, in);
  FLCE_WITH_TYPE(out_dtype, Out, FLCE_WITH_TYPE(in_dtype, In, {
                   cast_elements<<<blocks, kThreads, 0, stream_of(self)>>>((Out*)out, (const In*)in,
                                                                           count, aligned);
                 }));
  FLCE_LAUNCHED("cast");
  return FLCE_OK;
}

flce_status cuda_add_block(void* self, void* accum, flce_dtype accum_dtype, const void* block,
                           flce_dtype dtype, int64_t count) {
  if (count == 0) return FLCE_OK;
  unsigned blocks;
  FLCE_TRY(vector_grid<8>(count, "add_block", &blocks));
  const bool aligned = both_aligned(accum, block);
  FLCE_WITH_TYPE(accum_dtype, Accum, FLCE_WITH_TYPE(dtype, T, {
                   add_elements<<<blocks, kThreads, 0, stream_of(self)>>>(
                       (Accum*)accum, (const T*)block, count, aligned);
                 }));
  FLCE_LAUNCHED("add_block");
  return FLCE_OK;
}

flce_status cuda_scale_grad(void* self, void* out, flce_dtype out_dtype, const void* in,
                            flce_dtype in_dtype, const void* grad_output, const void* scalars,
                            flce_dtype stat, int64_t count) {
  if (count == 0) return FLCE_OK;
  int device, processors;
  FLCE_TRY(check_cuda(cudaGetDevice(&device), "scale_grad"));
  FLCE_TRY(check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
                      "scale_grad"));
  /* No more blocks than run at once: where the factor is 1 in place, launching is all they do. */
  const int64_t needed = ceil_div(count, (int64_t)kThreads * 8);
  const unsigned blocks = (unsigned)min_of(needed, (int64_t)processors * (2048 / kThreads));
  const bool aligned = both_aligned(out, in);
  FLCE_WITH_STAT(stat, S, FLCE_WITH_TYPE(out_dtype, Out, FLCE_WITH_TYPE(in_dtype, In, {
                                           scale_elements<<<blocks, kThreads, 0, stream_of(self)>>>(
                                               (Out*)out, (const In*)in, (const S*)grad_output,
                                               (const S*)scalars, count, aligned);
                                         })));
  FLCE_LAUNCHED("scale_grad");
  return FLCE_OK;
}

/* ---- scalars ---- */

enum { kSumThreads = 1024 };

/* Power of two u with u * top in (2^13, 2^14]; 1 where there is none. */
__device__ double unit_for(double top) {
  if (!(top > 0) || top == (double)INFINITY) return 1;
  int exponent;
  const double fraction = frexp(top, &exponent); /* in [1/2, 1) */
  const int power = (fraction == 0.5 ? 15 : 14) - exponent;
  return ldexp(1.0, power < 127 ? power : 127); /* a float holds it */
}

template <typename S>
__global__ void __launch_bounds__(kSumThreads)
    prepare_scalars(const int64_t* target, int64_t tokens, int64_t vocab, int64_t ignore_index,
                    const S* class_weight, bool mean, S* scalars) {
  __shared__ double scratch[kMaxWarps];
  double valid = 0, weight = 0, total = 0, top = 0;
  for (int64_t i = threadIdx.x; i < tokens; i += kSumThreads) {
    const int64_t y = target[i];
    if (y == ignore_index) continue;
    valid += 1;
    /* A target out of range makes its own row NaN; the mean of the others stays what it is. */
    if (class_weight && y >= 0 && y < vocab) weight += (double)class_weight[y];
  }
  for (int64_t j = threadIdx.x; class_weight && j < vocab; j += kSumThreads) {
    const double w = (double)class_weight[j];
    total += w;
    top = fmax(top, fabs(w));
  }
  valid = block_sum(valid, scratch);
  weight = class_weight ? block_sum(weight, scratch) : valid;
  total = class_weight ? block_sum(total, scratch) : (double)vocab;
  top = class_weight ? block_max(top, scratch) : 1;
  if (threadIdx.x != 0) return;
  scalars[FLCE_SCALAR_VALID] = (S)valid;
  scalars[FLCE_SCALAR_INV_DENOM] = (S)(!mean ? 1 : valid == 0 ? 0 : 1 / weight);
  scalars[FLCE_SCALAR_WEIGHT_TOTAL] = (S)total;
  scalars[FLCE_SCALAR_UNIT] = (S)unit_for(top);
}

template <typename S>
__global__ void __launch_bounds__(kSumThreads)
    reduce_values(S* out, const S* values, int64_t count, const S* factor) {
  __shared__ double scratch[kMaxWarps];
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) sum += (double)values[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) out[0] = (S)(factor ? sum * (double)factor[0] : sum);
}

flce_status cuda_prepare(void* self, const flce_problem* problem, const int64_t* target,
                         const void* class_weight, void* scalars) {
  FLCE_WITH_STAT(flce_stat_dtype(problem->dtype), S, {
    prepare_scalars<<<1, kSumThreads, 0, stream_of(self)>>>(
        target, problem->tokens, problem->vocab, problem->ignore_index, (const S*)class_weight,
        problem->reduction == FLCE_MEAN, (S*)scalars);
  });
  FLCE_LAUNCHED("prepare");
  return FLCE_OK;
}

flce_status cuda_reduce(void* self, void* out, const void* values, int64_t count,
                        const void* factor, flce_dtype stat) {
  FLCE_WITH_STAT(stat, S, {
    reduce_values<<<1, kSumThreads, 0, stream_of(self)>>>((S*)out, (const S*)values, count,
                                                          (const S*)factor);
  });
  FLCE_LAUNCHED("reduce");
  return FLCE_OK;
}

/* ---- row coefficients ---- */

template <typename S>
__global__ void row_coefficients(const __grid_constant__ flce_rows r, const S* grad_output,
                                 int64_t grad_stride, const S* factor, S* coef) {
  const int64_t i = (int64_t)blockIdx.x * kThreads + threadIdx.x;
  if (i >= r.rows) return;
  const int64_t y = r.target[i];
  const bool ignored = y == r.ignore_index, valid = !ignored && y >= 0 && y < r.vocab;
  S row = ignored ? (S)0 : (S)NAN, target = row, smooth = row, counts = row;
  if (valid) {
    const S* stats = (const S*)r.stats + i;
    const S inv_sum = stats[FLCE_STAT_INV_SUM * r.stat_pitch];
    const S nll = stats[FLCE_STAT_NLL * r.stat_pitch];
    const S* w = (const S*)r.class_weight;
    const S g = (grad_output ? grad_output[i * grad_stride] : 1) * (factor ? factor[0] : 1);
    const S hard = (S)(1 - r.label_smoothing) * (w ? w[y] : 1);
    S soft = 0;
    if (r.label_smoothing > 0) {
      smooth = (S)(r.label_smoothing / (double)r.vocab);
      soft = smooth * ((const S*)r.scalars)[FLCE_SCALAR_WEIGHT_TOTAL];
    } else {
      smooth = 0;
    }
    row = g * (hard + soft) * inv_sum;
    /* a p_y - hard, as hard (p_y - 1) + soft p_y: no cancellation where p_y is near 1. */
    target = g * (hard * expm1(-nll));
    if (soft != 0) target += g * (soft * exp(-nll));
    smooth *= g;
    counts = 1;
  }
  coef[FLCE_COEF_ROW * r.stat_pitch + i] = row;
  coef[FLCE_COEF_TARGET * r.stat_pitch + i] = target;
  coef[FLCE_COEF_SMOOTH * r.stat_pitch + i] = smooth;
  coef[FLCE_COEF_VALID * r.stat_pitch + i] = counts;
}

flce_status cuda_row_coefficients(void* self, const flce_rows* r, const void* grad_output,
                                  int64_t grad_stride, const void* factor, void* coef) {
  if (r->rows == 0) return FLCE_OK;
  unsigned blocks;
  FLCE_TRY(vector_grid<1>(r->rows, "row_coefficients", &blocks));
  FLCE_WITH_STAT(flce_stat_dtype(r->z_dtype), S, {
    row_coefficients<<<blocks, kThreads, 0, stream_of(self)>>>(
        *r, (const S*)grad_output, grad_stride, (const S*)factor, (S*)coef);
  });
  FLCE_LAUNCHED("row_coefficients");
  return FLCE_OK;
}

/* ---- passes over [rows][H] ---- */

/* A block a row; N is 8 where every row of every matrix is aligned, else 1. */
template <typename S, int N>
__global__ void scale_rows(void* out, const void* x, flce_dtype dtype, const S* coef,
                           int64_t hidden) {
  const S c = coef[blockIdx.x];
  for (int64_t h = (int64_t)threadIdx.x * N; h < hidden; h += (int64_t)blockDim.x * N) {
    const int64_t at = (int64_t)blockIdx.x * hidden + h;
    S v[N] = {};
    if (c != 0) load_any<S, N>(x, dtype, at, v);
#pragma unroll
    for (int e = 0; e < N; e++) v[e] *= c;
    store_any<S, N>(out, dtype, at, v);
  }
}

typedef struct grad_input_args {
  void* dx;
  const void *d, *w;
  flce_dtype dx_dtype, d_dtype, dtype;
  const int64_t* target;
  int64_t ignore_index, vocab, hidden, coef_pitch;
} grad_input_args;

template <typename S, int N>
__global__ void finish_grad_input(const __grid_constant__ grad_input_args p, const S* coef,
                                  const S* wsum) {
  const int64_t i = blockIdx.x, y = p.target[i];
  const bool ignored = y == p.ignore_index, valid = !ignored && y >= 0 && y < p.vocab;
  const S row = coef[FLCE_COEF_ROW * p.coef_pitch + i];
  const S target = coef[FLCE_COEF_TARGET * p.coef_pitch + i];
  const S smooth = coef[FLCE_COEF_SMOOTH * p.coef_pitch + i];
  for (int64_t h = (int64_t)threadIdx.x * N; h < p.hidden; h += (int64_t)blockDim.x * N) {
    S v[N];
    if (valid) {
      S w[N];
      load_any<S, N>(p.d, p.d_dtype, i * p.hidden + h, v);
      load_any<S, N>(p.w, p.dtype, y * p.hidden + h, w);
#pragma unroll
      for (int e = 0; e < N; e++) v[e] = row * v[e] + target * w[e];
      if (wsum) {
#pragma unroll
        for (int e = 0; e < N; e++) v[e] -= smooth * wsum[h + e];
      }
    } else {
#pragma unroll
      for (int e = 0; e < N; e++) v[e] = ignored ? (S)0 : (S)NAN;
    }
    store_any<S, N>(p.dx, p.dx_dtype, i * p.hidden + h, v);
  }
}

flce_status cuda_scale_rows(void* self, void* out, const void* x, flce_dtype dtype,
                            const void* coef, int64_t rows, int64_t hidden) {
  if (rows == 0 || hidden == 0) return FLCE_OK;
  FLCE_TRY(check_grid(rows, "scale_rows"));
  const bool aligned = hidden % 8 == 0 && both_aligned(out, x);
  const int threads = threads_for(ceil_div(hidden, aligned ? 8 : 1), 512);
  FLCE_WITH_STAT(flce_stat_dtype(dtype), S, {
    void (*kernel)(void*, const void*, flce_dtype, const S*, int64_t) =
        aligned ? scale_rows<S, 8> : scale_rows<S, 1>;
    kernel<<<(unsigned)rows, threads, 0, stream_of(self)>>>(out, x, dtype, (const S*)coef, hidden);
  });
  FLCE_LAUNCHED("scale_rows");
  return FLCE_OK;
}

flce_status cuda_finish_grad_input(void* self, void* dx, flce_dtype dx_dtype, const void* d,
                                   flce_dtype d_dtype, const void* w, flce_dtype dtype,
                                   const flce_rows* r, const void* wsum, int64_t hidden) {
  if (r->rows == 0 || hidden == 0) return FLCE_OK;
  FLCE_TRY(check_grid(r->rows, "finish_grad_input"));
  const grad_input_args args = {
      dx,           d, w, dx_dtype, d_dtype, dtype, r->target, r->ignore_index, r->vocab, hidden,
      r->stat_pitch};
  const bool aligned = hidden % 8 == 0 && both_aligned(dx, d) && is_aligned(w, 16);
  const int threads = threads_for(ceil_div(hidden, aligned ? 8 : 1), 512);
  FLCE_WITH_STAT(flce_stat_dtype(dtype), S, {
    void (*kernel)(const grad_input_args, const S*, const S*) =
        aligned ? finish_grad_input<S, 8> : finish_grad_input<S, 1>;
    kernel<<<(unsigned)r->rows, threads, 0, stream_of(self)>>>(args, (const S*)r->coef,
                                                               (const S*)wsum);
  });
  FLCE_LAUNCHED("finish_grad_input");
  return FLCE_OK;
}

/* ---- column sums ---- */

enum { kColumnThreads = 128, kColumnBlocks = 1024, kRowsAtLeast = 32, kBatch = 4 };

/* Row ranges that are summed apart. A function of the sizes alone, so that a sum's order is; about
 * kColumnBlocks blocks in all, more than run at once, and few enough that the partial sums are
 * small beside the matrix. */
static int64_t row_splits(int64_t rows, int64_t cols, flce_dtype dtype) {
  const int64_t tiles = ceil_div(cols, kColumnThreads * (16 / flce_size_of(dtype)));
  return max_of(1, min_of(ceil_div(kColumnBlocks, tiles), ceil_div(rows, kRowsAtLeast)));
}

int64_t cuda_column_sum_bytes(int64_t rows, int64_t cols, flce_dtype a_dtype) {
  if (rows == 0 || cols == 0) return 0;
  return row_splits(rows, cols, a_dtype) * cols * flce_size_of(flce_stat_dtype(a_dtype));
}

template <typename T, int N>
__device__ __forceinline__ void load_row_part(const T* row, int64_t col, int64_t cols,
                                              Vec<T, N>& v) {
  if (col + N <= cols) {
    load_vec<true>(row + col, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) v.at[e] = col + e < cols ? row[col + e] : from_stat<T>(0.0f);
  }
}

template <typename T, int N>
__global__ void __launch_bounds__(kColumnThreads)
    column_partials(const T* a, int64_t pitch, int64_t rows, int64_t cols, int64_t rows_per_split,
                    const stat_t<T>* weights, stat_t<T>* partials) {
  using S = stat_t<T>;
  const int64_t col = ((int64_t)blockIdx.x * kColumnThreads + threadIdx.x) * N;
  if (col >= cols) return;
  const int64_t begin = blockIdx.y * rows_per_split;
  const int64_t end = begin + rows_per_split < rows ? begin + rows_per_split : rows;
  S sum[N] = {};
  for (int64_t first = begin; first < end; first += kBatch) {
    /* All loads before the first conversion, which waits for its own. */
    S w[kBatch];
    Vec<T, N> raw[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      const int64_t i = first + b;
      w[b] = i < end ? (weights ? weights[i] : (S)1) : (S)0;
      load_row_part(a + (i < end ? i : begin) * pitch, col, cols, raw[b]);
    }
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      if (w[b] == 0) continue;
      S v[N];
      unpack(raw[b], v);
#pragma unroll
      for (int e = 0; e < N; e++) sum[e] += w[b] * v[e];
    }
  }
#pragma unroll
  for (int e = 0; e < N; e++) {
    if (col + e < cols) partials[blockIdx.y * cols + col + e] = sum[e];
  }
}

/* kWarp columns a block; its warps share the splits, and are added in their order. */
template <typename S>
__global__ void __launch_bounds__(kThreads)
    add_partials(S* out, const S* partials, int64_t splits, int64_t cols, bool accumulate) {
  constexpr int kWarps = kThreads / kWarp;
  __shared__ S sums[kWarps][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int64_t col = (int64_t)blockIdx.x * kWarp + lane;
  S sum = 0;
  if (col < cols) {
#pragma unroll 4
    for (int64_t split = warp; split < splits; split += kWarps) sum += partials[split * cols + col];
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || col >= cols) return;
  for (int other = 1; other < kWarps; other++) sum += sums[other][lane];
  out[col] = accumulate ? out[col] + sum : sum;
}

template <typename T>
static void launch_partials(cudaStream_t stream, const void* a, int64_t pitch, int64_t rows,
                            int64_t cols, int64_t splits, const void* weights, void* scratch) {
  const int64_t rows_per_split = ceil_div(rows, splits);
  const bool aligned = is_aligned(a, 16) && pitch * sizeof(T) % 16 == 0;
  constexpr int N = 16 / sizeof(T);
  const dim3 grid((unsigned)ceil_div(cols, kColumnThreads * (aligned ? N : 1)), (unsigned)splits);
  auto kernel = aligned ? column_partials<T, N> : column_partials<T, 1>;
  kernel<<<grid, kColumnThreads, 0, stream>>>((const T*)a, pitch, rows, cols, rows_per_split,
                                              (const stat_t<T>*)weights, (stat_t<T>*)scratch);
}

flce_status cuda_column_sum(void* self, void* out, const void* a, flce_dtype a_dtype, int64_t pitch,
                            int64_t rows, int64_t cols, const void* weights, bool accumulate,
                            void* scratch) {
  if (cols == 0) return FLCE_OK;
  FLCE_TRY(check_grid(cols, "column_sum"));
  const flce_dtype stat = flce_stat_dtype(a_dtype);
  if (rows == 0) {
    return accumulate ? FLCE_OK : cuda_zero(self, out, cols * flce_size_of(stat));
  }
  const int64_t splits = row_splits(rows, cols, a_dtype);
  FLCE_WITH_TYPE(
      a_dtype, T,
      launch_partials<T>(stream_of(self), a, pitch, rows, cols, splits, weights, scratch));
  FLCE_LAUNCHED("column_sum");
  FLCE_WITH_STAT(stat, S, {
    add_partials<<<(unsigned)ceil_div(cols, kWarp), kThreads, 0, stream_of(self)>>>(
        (S*)out, (const S*)scratch, splits, cols, accumulate);
  });
  FLCE_LAUNCHED("column_sum");
  return FLCE_OK;
}
