/* sampled_grad_input, sampled_grad_weight and sampled_grad_bias: sums of rows of W by the lists of
 * the rows, and of rows of x by the entries of each class. The time is that of the scattered reads,
 * so a thread has several rows' loads in flight. Sums are in float32, in a fixed order. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/reductions.cuh"
#include "cuda/common/row_status.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/samples/sample_order.cuh"

enum { kGatherThreads = 512, kGatherBatch = 8, kBiasThreads = 256 };

/* sum += factor_m source[row_m][h .. h + N) over the pairs (row, float32 bits of the factor). */
template <typename T, int N>
__device__ __forceinline__ void add_rows(const int2* pairs, int count, const T* source,
                                         int64_t pitch, int64_t h, float (&sum)[N]) {
  for (int first = 0; first < count; first += kGatherBatch) {
    float factor[kGatherBatch];
    Vec<T, N> raw[kGatherBatch];
#pragma unroll
    for (int b = 0; b < kGatherBatch; b++) {
      const int2 pair = pairs[min(first + b, count - 1)];
      factor[b] = __int_as_float(pair.y);
      load_vec<false>(source + pair.x * pitch + h, raw[b]);
    }
#pragma unroll
    for (int b = 0; b < kGatherBatch; b++) {
      if (first + b >= count) break;
      float v[N];
      unpack(raw[b], v);
#pragma unroll
      for (int e = 0; e < N; e++) sum[e] = fmaf(factor[b], v[e], sum[e]);
    }
  }
}

/* ---- dX ---- */

/* The arguments of sampled_grad_input (backend.h). */
typedef struct sampled_input_args {
  flce_rows r;
  void* dx;
  const void *w, *wsum;
  const int32_t* lists;
  flce_dtype dx_dtype;
  int pitch;            /* of the lists */
  int64_t hidden, cols; /* elements of a row of W, of dX */
} sampled_input_args;

/* v = elements [h, h + N) of a valid row of dX. */
template <typename T, int N>
__device__ __forceinline__ void input_elements(const sampled_input_args& p, const int2* list,
                                               int2 head, const RowFactors<float>& factors,
                                               int64_t h, float (&v)[N]) {
  const T* w = (const T*)p.w;
  Vec<T, N> raw;
  load_vec<false>(w + head.x * p.hidden + h, raw);
  add_rows<T, N>(list + 1, head.y, w, p.hidden, h, v);
  float target[N];
  unpack(raw, target);
#pragma unroll
  for (int e = 0; e < N; e++) v[e] = factors.row * v[e] + factors.target * target[e];
  if (!p.wsum) return;
#pragma unroll
  for (int e = 0; e < N; e++) v[e] -= factors.smooth * ((const float*)p.wsum)[h + e];
}

/* One thread block for each row. */
template <typename T, int N>
__global__ void __launch_bounds__(kGatherThreads)
    sampled_grad_input(const __grid_constant__ sampled_input_args p) {
  pdl_wait();
  const RowRef ref = row_ref_of(p.r, blockIdx.x);
  if (ref.kind == kRowAbsent) return;
  const int2* list = (const int2*)(p.lists + (int64_t)blockIdx.x * p.pitch);
  const int2 head = list[0];
  const RowFactors<float> factors = factors_of<float>(p.r, ref.at);
  for (int64_t h = (int64_t)threadIdx.x * N; h < p.cols; h += (int64_t)blockDim.x * N) {
    float v[N] = {};
    if (ref.kind == kRowValid) {
      input_elements<T, N>(p, list, head, factors, h, v);
    } else {
#pragma unroll
      for (int e = 0; e < N; e++) v[e] = blank_of<float>(ref);
    }
    store_any<float, N>(p.dx, p.dx_dtype, ref.at * p.cols + h, v);
  }
}

/* Threads of a block that does a row of `cols` elements, N at a time. */
static int gather_threads(int64_t cols, int n) {
  return threads_for(ceil_div(cols, n), kGatherThreads);
}

static flce_status no_gather(const char* what, flce_dtype dtype) {
  return flce_fail(FLCE_UNSUPPORTED, "%s: no CUDA kernel for operands in %s", what,
                   flce_dtype_name(dtype));
}

typedef void (*sampled_input_kernel)(const sampled_input_args);

static sampled_input_kernel input_kernel_of(flce_dtype dtype, bool aligned) {
  switch (dtype) {
    case FLCE_F32:
      return aligned ? sampled_grad_input<float, 8> : sampled_grad_input<float, 1>;
    case FLCE_BF16:
      return aligned ? sampled_grad_input<__nv_bfloat16, 8> : sampled_grad_input<__nv_bfloat16, 1>;
    case FLCE_F16:
      return aligned ? sampled_grad_input<__half, 8> : sampled_grad_input<__half, 1>;
    default:
      return NULL;
  }
}

flce_status cuda_sampled_grad_input(void* self, const flce_sampled_input_args* call) {
  if (call->rows->rows == 0 || call->cols == 0) return FLCE_OK;
  FLCE_TRY(check_grid(call->rows->rows, "sampled_grad_input"));
  const sampled_input_args args = {*call->rows,
                                   call->dx,
                                   call->w,
                                   call->wsum,
                                   call->lists,
                                   call->dx_dtype,
                                   (int)flce_sample_pitch(call->eps),
                                   call->hidden,
                                   call->cols};
  const bool aligned =
      call->hidden % 8 == 0 && call->cols % 8 == 0 && both_aligned(call->dx, call->w);
  const auto kernel = input_kernel_of(call->dtype, aligned);
  if (!kernel) return no_gather("sampled_grad_input", call->dtype);
  return launch_dependent(self, kernel, (unsigned)call->rows->rows,
                          gather_threads(call->cols, aligned ? 8 : 1), "sampled_grad_input", args);
}

/* ---- dW ---- */

/* The arguments of sampled_grad_weight (backend.h). */
typedef struct sampled_weight_args {
  sample_order o;
  void* dw;
  const void* x;
  const float *xsum, *class_weight;
  flce_dtype dw_dtype;
  int64_t piece; /* positions of a piece of the order */
  int64_t vocab, hidden, cols;
  bool adds;
} sampled_weight_args;

/* The positions that sum_pieces adds of a piece: of the class that continues from the piece before
 * (`first`), and of the class that begins here and continues in the next (`last`). */
struct PieceParts {
  int64_t first_begin, first_end, last_begin, last_end;
};

__device__ __forceinline__ PieceParts parts_of(const sampled_weight_args& p, int64_t piece) {
  const int64_t begin = piece * p.piece, end = min(begin + p.piece, p.o.count);
  PieceParts parts = {begin, begin, end, end};
  const uint32_t first = p.o.keys[begin], last = p.o.keys[end - 1];
  if (first < p.vocab && p.o.starts[first] < begin) {
    parts.first_end = min((int64_t)p.o.starts[first + 1], end);
  }
  if (last < p.vocab && p.o.starts[last] >= begin && p.o.starts[last + 1] > end) {
    parts.last_begin = p.o.starts[last];
  }
  return parts;
}

template <typename T, int N>
__device__ __forceinline__ void store_part(const sampled_weight_args& p, int64_t part,
                                           int64_t begin, int64_t end, int64_t h) {
  if (begin == end) return;
  float sum[N] = {};
  add_rows<T, N>(p.o.entries + begin, (int)(end - begin), (const T*)p.x, p.hidden, h, sum);
  store_any<float, N>(p.o.part_sums, FLCE_F32, part * p.hidden + h, sum);
}

/* The sums of the classes that lie in several pieces; one thread block for each piece. */
template <typename T, int N>
__global__ void __launch_bounds__(kGatherThreads)
    sum_pieces(const __grid_constant__ sampled_weight_args p) {
  const int64_t piece = blockIdx.x;
  const PieceParts parts = parts_of(p, piece);
  for (int64_t h = (int64_t)threadIdx.x * N; h < p.cols; h += (int64_t)blockDim.x * N) {
    store_part<T, N>(p, 2 * piece, parts.first_begin, parts.first_end, h);
    store_part<T, N>(p, 2 * piece + 1, parts.last_begin, parts.last_end, h);
  }
}

/* sum += elements [h, h + N) of the parts of a class in pieces [first, last]. */
template <int N>
__device__ __forceinline__ void add_parts(const sampled_weight_args& p, int64_t first, int64_t last,
                                          int64_t h, float (&sum)[N]) {
  for (int64_t piece = first; piece <= last; piece++) {
    const int64_t part = 2 * piece + (piece == first ? 1 : 0);
    float v[N];
    load_any<float, N>(p.o.part_sums, FLCE_F32, part * p.hidden + h, v);
#pragma unroll
    for (int e = 0; e < N; e++) sum[e] += v[e];
  }
}

/* One thread block for each class. */
template <typename T, int N>
__global__ void __launch_bounds__(kGatherThreads)
    sampled_grad_weight(const __grid_constant__ sampled_weight_args p) {
  pdl_wait();
  const int64_t j = blockIdx.x;
  const int64_t begin = p.o.starts[j], end = p.o.starts[j + 1];
  if (p.adds && begin == end && !p.xsum) return;
  const int64_t first = begin / p.piece, last = (end - 1) / p.piece;
  const float smooth = p.xsum ? (p.class_weight ? p.class_weight[j] : 1.0f) : 0.0f;
  for (int64_t h = (int64_t)threadIdx.x * N; h < p.cols; h += (int64_t)blockDim.x * N) {
    float v[N] = {};
    if (begin < end && first == last) {
      add_rows<T, N>(p.o.entries + begin, (int)(end - begin), (const T*)p.x, p.hidden, h, v);
    } else if (begin < end) {
      add_parts<N>(p, first, last, h, v);
    }
    if (p.xsum) {
#pragma unroll
      for (int e = 0; e < N; e++) v[e] -= smooth * p.xsum[h + e];
    }
    if (p.adds) {
      float old[N];
      load_any<float, N>(p.dw, p.dw_dtype, j * p.cols + h, old);
#pragma unroll
      for (int e = 0; e < N; e++) v[e] += old[e];
    }
    store_any<float, N>(p.dw, p.dw_dtype, j * p.cols + h, v);
  }
}

template <typename T, int N>
static flce_status launch_weight(void* self, const sampled_weight_args& args) {
  const int threads = gather_threads(args.cols, N);
  if (args.o.count > 0) {
    sum_pieces<T, N><<<(unsigned)args.o.pieces, threads, 0, stream_of(self)>>>(args);
    FLCE_LAUNCHED("sampled_grad_weight");
  }
  return launch_dependent(self, sampled_grad_weight<T, N>, (unsigned)args.vocab, threads,
                          "sampled_grad_weight", args);
}

template <typename T>
static flce_status launch_sampled_weight(void* self, const sampled_weight_args& args,
                                         bool aligned) {
  return aligned ? launch_weight<T, 8>(self, args) : launch_weight<T, 1>(self, args);
}

flce_status cuda_sampled_grad_weight(void* self, const flce_sampled_weight_args* call) {
  if (call->vocab == 0 || call->cols == 0) return FLCE_OK;
  const sample_order o =
      view_sample_order(call->order, call->rows, call->eps, call->vocab, call->hidden);
  const sampled_weight_args args = {o,
                                    call->dw,
                                    call->x,
                                    (const float*)call->xsum,
                                    (const float*)call->class_weight,
                                    call->dw_dtype,
                                    piece_size(o.count),
                                    call->vocab,
                                    call->hidden,
                                    call->cols,
                                    call->adds};
  const bool aligned =
      call->hidden % 8 == 0 && call->cols % 8 == 0 && both_aligned(call->dw, call->x);
  switch (call->dtype) {
    case FLCE_F32:
      return launch_sampled_weight<float>(self, args, aligned);
    case FLCE_BF16:
      return launch_sampled_weight<__nv_bfloat16>(self, args, aligned);
    case FLCE_F16:
      return launch_sampled_weight<__half>(self, args, aligned);
    default:
      return no_gather("sampled_grad_weight", call->dtype);
  }
}

/* ---- db ---- */

/* One warp for each class. */
__global__ void __launch_bounds__(kBiasThreads)
    sampled_grad_bias(sample_order o, void* db, flce_dtype db_dtype, const float* smooth_total,
                      const float* class_weight, int64_t vocab) {
  const int64_t j = ((int64_t)blockIdx.x * kBiasThreads + threadIdx.x) / kWarp;
  if (j >= vocab) return;
  float sum = 0;
  for (int64_t k = o.starts[j] + threadIdx.x % kWarp; k < o.starts[j + 1]; k += kWarp) {
    sum += __int_as_float(o.entries[k].y);
  }
  sum = warp_sum(sum);
  if (threadIdx.x % kWarp != 0) return;
  if (smooth_total) sum -= (class_weight ? class_weight[j] : 1.0f) * smooth_total[0];
  const float v[1] = {sum};
  store_any<float, 1>(db, db_dtype, j, v);
}

flce_status cuda_sampled_grad_bias(void* self, const flce_sampled_bias_args* call) {
  if (call->vocab == 0) return FLCE_OK;
  const sample_order o =
      view_sample_order(call->order, call->rows, call->eps, call->vocab, call->hidden);
  sampled_grad_bias<<<(unsigned)ceil_div(call->vocab * kWarp, kBiasThreads), kBiasThreads, 0,
                      stream_of(self)>>>(o, call->db, call->db_dtype,
                                         (const float*)call->smooth_total,
                                         (const float*)call->class_weight, call->vocab);
  FLCE_LAUNCHED("sampled_grad_bias");
  return FLCE_OK;
}
