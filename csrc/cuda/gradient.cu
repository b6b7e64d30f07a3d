/* What stands between the row passes and the gradient GEMMs: scaled rows, sums over rows, and
 * elementwise passes. Every sum has a fixed order. */
#include "backend.cuh"

#include <type_traits>

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
__device__ __forceinline__ void scale_array(Out* out, const In* in, int64_t count, bool aligned,
                                            S factor) {
  constexpr int N = 8;
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

/* Arrays of one pair of types, for one launch. */
typedef struct scaled_arrays {
  flce_scaled array[FLCE_GRADIENTS];
  int number;
  bool aligned;
} scaled_arrays;

template <typename Out, typename In, typename S>
__global__ void scale_elements(const __grid_constant__ scaled_arrays arrays, const S* grad_output,
                               const S* scalars) {
  follow_kernels();
  S factor = grad_output[0];
  const int unit = std::is_same_v<In, __half> ? FLCE_SCALAR_WEIGHT_UNIT : FLCE_SCALAR_UNIT;
  if (scalars) factor *= scalars[FLCE_SCALAR_INV_DENOM] / scalars[unit];
  for (int which = 0; which < arrays.number; which++) {
    const flce_scaled& a = arrays.array[which];
    scale_array((Out*)a.out, (const In*)a.in, a.count, arrays.aligned, factor);
  }
}

static bool both_aligned(const void* a, const void* b) {
  return is_aligned(a, 16) && is_aligned(b, 16);
}

flce_status cuda_fill(void* self, void* data, int byte, int64_t bytes) {
  if (bytes == 0) return FLCE_OK;
  return check_cuda(cudaMemsetAsync(data, byte, (size_t)bytes, stream_of(self)), "fill");
}

/* ---- rows of another leading dimension: one thread block for each ---- */

/* Copies `cols` elements of each row, and zero-fills the others up to out_pitch. */
template <typename U>
__global__ void __launch_bounds__(kThreads)
    copy_rows(U* out, int64_t out_pitch, const U* in, int64_t in_pitch, int64_t cols) {
  out += blockIdx.x * out_pitch;
  in += blockIdx.x * in_pitch;
  for (int64_t i = threadIdx.x; i < out_pitch; i += kThreads) out[i] = i < cols ? in[i] : U{};
}

/* Through S, which holds both types. */
template <typename S>
__global__ void __launch_bounds__(kThreads)
    cast_rows(void* out, flce_dtype out_dtype, int64_t out_pitch, const void* in,
              flce_dtype in_dtype, int64_t in_pitch, int64_t cols) {
  for (int64_t i = threadIdx.x; i < out_pitch; i += kThreads) {
    S v[1] = {0};
    if (i < cols) load_any<S, 1>(in, in_dtype, blockIdx.x * in_pitch + i, v);
    store_any<S, 1>(out, out_dtype, blockIdx.x * out_pitch + i, v);
  }
}

template <typename U>
static void launch_copy(void* self, void* out, int64_t out_bytes, const void* in, int64_t in_bytes,
                        int64_t rows, int64_t col_bytes) {
  constexpr int64_t size = sizeof(U);
  copy_rows<U><<<(unsigned)rows, kThreads, 0, stream_of(self)>>>(
      (U*)out, out_bytes / size, (const U*)in, in_bytes / size, col_bytes / size);
}

/* By the largest unit that divides all addresses and sizes. */
static void copy_bytes(void* self, void* out, int64_t out_bytes, const void* in, int64_t in_bytes,
                       int64_t rows, int64_t col_bytes) {
  const uint64_t all =
      (uintptr_t)out | (uintptr_t)in | (uint64_t)(out_bytes | in_bytes | col_bytes);
  const auto launch = all % 16 == 0  ? launch_copy<uint4>
                      : all % 8 == 0 ? launch_copy<uint2>
                      : all % 4 == 0 ? launch_copy<uint32_t>
                                     : launch_copy<uint16_t>;
  launch(self, out, out_bytes, in, in_bytes, rows, col_bytes);
}

flce_status cuda_cast(void* self, void* out, flce_dtype out_dtype, int64_t out_pitch,
                      const void* in, flce_dtype in_dtype, int64_t in_pitch, int64_t rows,
                      int64_t cols) {
  const int64_t count = rows * cols, out_size = flce_size_of(out_dtype),
                in_size = flce_size_of(in_dtype);
  if (rows == 0 || out_pitch == 0) return FLCE_OK;
  if (out_pitch != cols || in_pitch != cols) {
    FLCE_TRY(check_grid(rows, "cast"));
    const bool wide = out_size == 8 || in_size == 8;
    const auto cast = wide ? cast_rows<double> : cast_rows<float>;
    if (out_dtype == in_dtype) {
      copy_bytes(self, out, out_pitch * out_size, in, in_pitch * in_size, rows, cols * in_size);
    } else {
      cast<<<(unsigned)rows, kThreads, 0, stream_of(self)>>>(out, out_dtype, out_pitch, in,
                                                             in_dtype, in_pitch, cols);
    }
    FLCE_LAUNCHED("cast");
    return FLCE_OK;
  }
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

/* accum[cols] += block[pitch], one thread block for each row. */
template <typename S>
__global__ void __launch_bounds__(kThreads)
    add_rows(void* accum, flce_dtype accum_dtype, const void* block, flce_dtype dtype,
             int64_t pitch, int64_t cols) {
  for (int64_t i = threadIdx.x; i < cols; i += kThreads) {
    S sum[1], v[1];
    load_any<S, 1>(accum, accum_dtype, blockIdx.x * cols + i, sum);
    load_any<S, 1>(block, dtype, blockIdx.x * pitch + i, v);
    sum[0] += v[0];
    store_any<S, 1>(accum, accum_dtype, blockIdx.x * cols + i, sum);
  }
}

flce_status cuda_add_block(void* self, void* accum, flce_dtype accum_dtype, const void* block,
                           flce_dtype dtype, int64_t pitch, int64_t rows, int64_t cols) {
  const int64_t count = rows * cols;
  if (count == 0) return FLCE_OK;
  if (pitch != cols) {
    FLCE_TRY(check_grid(rows, "add_block"));
    FLCE_WITH_STAT(flce_stat_dtype(accum_dtype), S, {
      add_rows<S><<<(unsigned)rows, kThreads, 0, stream_of(self)>>>(accum, accum_dtype, block,
                                                                    dtype, pitch, cols);
    });
    FLCE_LAUNCHED("add_block");
    return FLCE_OK;
  }
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

/* The arrays that follow `first` with its types, aligned as it is. */
static scaled_arrays alike(const flce_scaled* first, const flce_scaled* end) {
  scaled_arrays arrays = {};
  arrays.aligned = both_aligned(first->out, first->in);
  for (const flce_scaled* a = first; a < end; a++) {
    if (a->out_dtype != first->out_dtype || a->in_dtype != first->in_dtype) break;
    if (both_aligned(a->out, a->in) != arrays.aligned) break;
    arrays.array[arrays.number++] = *a;
  }
  return arrays;
}

static flce_status scale_alike(void* self, const scaled_arrays& arrays, const void* grad_output,
                               const void* scalars, flce_dtype stat) {
  int64_t count = 0;
  for (int which = 0; which < arrays.number; which++) {
    count = max_of(count, arrays.array[which].count);
  }
  if (count == 0) return FLCE_OK;
  int device, processors;
  FLCE_TRY(check_cuda(cudaGetDevice(&device), "scale_grads"));
  FLCE_TRY(check_cuda(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device),
                      "scale_grads"));
  /* No more blocks than run at once: where the factor is 1 in place, launching is all they do. */
  const int64_t needed = ceil_div(count, (int64_t)kThreads * 8);
  const unsigned blocks = (unsigned)min_of(needed, (int64_t)processors * (2048 / kThreads));
  const flce_scaled& first = arrays.array[0];
  FLCE_WITH_STAT(stat, S,
                 FLCE_WITH_TYPE(first.out_dtype, Out, FLCE_WITH_TYPE(first.in_dtype, In, {
                                  FLCE_TRY(launch_next(self, scale_elements<Out, In, S>, blocks,
                                                       kThreads, "scale_grads", arrays,
                                                       (const S*)grad_output, (const S*)scalars));
                                })));
  return FLCE_OK;
}

flce_status cuda_scale_grads(void* self, const flce_scaled* grads, int number,
                             const void* grad_output, const void* scalars, flce_dtype stat) {
  for (const flce_scaled *grad = grads, *end = grads + number; grad < end;) {
    const scaled_arrays arrays = alike(grad, end);
    FLCE_TRY(scale_alike(self, arrays, grad_output, scalars, stat));
    grad += arrays.number;
  }
  return FLCE_OK;
}

/* ---- passes over [rows][H] ---- */

/* A block a row; N is 8 where every row of every matrix is aligned, else 1. */
template <typename S, int N>
__global__ void scale_rows(void* out, int64_t out_pitch, const void* x, flce_dtype dtype,
                           const S* coef, const int64_t* index, int64_t hidden) {
  follow_kernels();
  const int64_t i = index ? index[blockIdx.x] : blockIdx.x;
  const S c = i < 0 ? (S)0 : coef ? coef[i] : (S)1;
  for (int64_t h = (int64_t)threadIdx.x * N; h < out_pitch; h += (int64_t)blockDim.x * N) {
    S v[N] = {};
    if (c != 0 && h < hidden) load_any<S, N>(x, dtype, i * hidden + h, v);
#pragma unroll
    for (int e = 0; e < N; e++) v[e] *= c;
    store_any<S, N>(out, dtype, (int64_t)blockIdx.x * out_pitch + h, v);
  }
}

typedef struct grad_input_args {
  flce_rows r;
  void *dx, *scaled_x;
  const void *d, *w, *x, *wsum;
  flce_dtype dx_dtype, d_dtype, dtype;
  int64_t hidden, cols; /* elements of a row: of dX `cols`, of all others `hidden` */
} grad_input_args;

/* A row's factors, 1 and 0 where there are none. */
template <typename S>
struct RowFactors {
  S row, target, smooth;
};

template <typename S>
__device__ __forceinline__ RowFactors<S> factors_of(const flce_rows& r, int64_t at) {
  if (!r.coef) return {1, 0, 0};
  const S* coef = (const S*)r.coef + at;
  return {coef[FLCE_COEF_ROW * r.stat_pitch], coef[FLCE_COEF_TARGET * r.stat_pitch],
          coef[FLCE_COEF_SMOOTH * r.stat_pitch]};
}

/* Elements [h, h + N) of a valid row of dX, from D there and the target's row of W. */
template <typename T, int N, typename S = stat_t<T>>
__device__ __forceinline__ void grad_input_part(const grad_input_args& p, int64_t at,
                                                const RowFactors<S>& factors, int64_t h,
                                                S (&v)[N]) {
  Vec<T, N> raw = {};
  if (p.r.coef) load_vec<false>((const T*)p.w + p.r.target[at] * p.hidden + h, raw);
  load_any<S, N>(p.d, p.d_dtype, (int64_t)blockIdx.x * p.hidden + h, v);
  if (!p.r.coef) return;
  S w[N];
  unpack(raw, w);
#pragma unroll
  for (int e = 0; e < N; e++) v[e] = factors.row * v[e] + factors.target * w[e];
  if (p.wsum) {
#pragma unroll
    for (int e = 0; e < N; e++) v[e] -= factors.smooth * ((const S*)p.wsum)[h + e];
  }
}

/* A block a row. Loads come before what waits for one of them: they are most of its time. */
template <typename T, int N, typename S = stat_t<T>>
__global__ void finish_grad_input(const __grid_constant__ grad_input_args p) {
  follow_kernels();
  const Place place = place_of(p.r, blockIdx.x);
  const bool is_there = place.kind != kRowAbsent, scales = p.scaled_x && is_there;
  RowFactors<S> factors = {};
  if (is_there) factors = factors_of<S>(p.r, place.at);
  for (int64_t h = (int64_t)threadIdx.x * N; h < p.hidden; h += (int64_t)blockDim.x * N) {
    Vec<T, N> raw = {};
    if (scales) load_vec<false>((const T*)p.x + place.at * p.hidden + h, raw);
    S v[N];
    if (place.kind == kRowValid) {
      grad_input_part<T, N>(p, place.at, factors, h, v);
    } else {
#pragma unroll
      for (int e = 0; e < N; e++) v[e] = blank_of<S>(place);
    }
    if (is_there && h < p.cols) store_any<S, N>(p.dx, p.dx_dtype, place.at * p.cols + h, v);
    if (!p.scaled_x) continue;
    unpack(raw, v);
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = factors.row == 0 ? 0 : v[e] * factors.row;
    store_any<S, N>(p.scaled_x, p.dtype, (int64_t)blockIdx.x * p.hidden + h, v);
  }
}

/* dX's rows that compact_rows leaves out. */
template <typename S, int N>
__global__ void blank_grad_input(const __grid_constant__ flce_rows r, int64_t bound, void* dx,
                                 flce_dtype dx_dtype, int64_t hidden) {
  S value;
  if (!is_left_out(r, blockIdx.x, bound, &value)) return;
  for (int64_t h = (int64_t)threadIdx.x * N; h < hidden; h += (int64_t)blockDim.x * N) {
    S v[N];
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = value;
    store_any<S, N>(dx, dx_dtype, (int64_t)blockIdx.x * hidden + h, v);
  }
}

flce_status cuda_scale_rows(void* self, void* out, int64_t out_pitch, const void* x,
                            flce_dtype dtype, const void* coef, const int64_t* index, int64_t rows,
                            int64_t hidden) {
  if (rows == 0 || hidden == 0) return FLCE_OK;
  FLCE_TRY(check_grid(rows, "scale_rows"));
  const bool aligned = hidden % 8 == 0 && out_pitch % 8 == 0 && both_aligned(out, x);
  const int threads = threads_for(ceil_div(out_pitch, aligned ? 8 : 1), 512);
  FLCE_WITH_STAT(flce_stat_dtype(dtype), S, {
    auto kernel = aligned ? scale_rows<S, 8> : scale_rows<S, 1>;
    FLCE_TRY(launch_next(self, kernel, (unsigned)rows, threads, "scale_rows", out, out_pitch, x,
                         dtype, (const S*)coef, index, hidden));
  });
  return FLCE_OK;
}

flce_status cuda_finish_grad_input(void* self, void* dx, flce_dtype dx_dtype, const void* d,
                                   flce_dtype d_dtype, const void* w, flce_dtype dtype,
                                   const flce_rows* r, const void* wsum, const void* x,
                                   void* scaled_x, int64_t hidden, int64_t cols) {
  if (r->rows == 0 || hidden == 0) return FLCE_OK;
  FLCE_TRY(check_grid(r->rows, "finish_grad_input"));
  if (r->coef && !r->target) {
    return flce_fail(FLCE_UNSUPPORTED, "finish_grad_input: no target terms with probabilities");
  }
  if (dx == d && (r->index || hidden != cols)) {
    return flce_fail(FLCE_UNSUPPORTED, "finish_grad_input: expected rows in place to stay there");
  }
  const grad_input_args args = {*r,   dx,       scaled_x, d,     w,      x,
                                wsum, dx_dtype, d_dtype,  dtype, hidden, cols};
  const bool aligned = hidden % 8 == 0 && cols % 8 == 0 && both_aligned(dx, d) &&
                       is_aligned(w, 16) && (!scaled_x || both_aligned(scaled_x, x));
  const int threads = threads_for(ceil_div(hidden, aligned ? 8 : 1), 512);
  FLCE_WITH_TYPE(dtype, T, {
    auto kernel = aligned ? finish_grad_input<T, 8> : finish_grad_input<T, 1>;
    FLCE_TRY(launch_next(self, kernel, (unsigned)r->rows, threads, "finish_grad_input", args));
  });
  return FLCE_OK;
}

flce_status cuda_blank_grad_input(void* self, const flce_rows* r, int64_t bound, void* dx,
                                  flce_dtype dx_dtype, int64_t hidden) {
  if (r->rows == 0 || hidden == 0) return FLCE_OK;
  FLCE_TRY(check_grid(r->rows, "blank_rows"));
  const bool aligned = hidden % 8 == 0 && is_aligned(dx, 16);
  const int threads = threads_for(ceil_div(hidden, aligned ? 8 : 1), 512);
  FLCE_WITH_STAT(flce_stat_dtype(r->z_dtype), S, {
    auto kernel = aligned ? blank_grad_input<S, 8> : blank_grad_input<S, 1>;
    kernel<<<(unsigned)r->rows, threads, 0, stream_of(self)>>>(*r, bound, dx, dx_dtype, hidden);
  });
  FLCE_LAUNCHED("blank_rows");
  return FLCE_OK;
}

/* ---- column sums ---- */

enum { kColumnThreads = 128, kColumnBlocks = 1024, kRowsAtLeast = 32, kBatch = 8 };

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
__global__ void __launch_bounds__(kColumnThreads, sizeof(T) == 8 ? 1 : 8)
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
    return accumulate ? FLCE_OK : cuda_fill(self, out, 0, cols * flce_size_of(stat));
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
