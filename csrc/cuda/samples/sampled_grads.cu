/* sampled_grad_input, sampled_grad_weight and sampled_grad_bias: sums of rows of W by the lists of
 * the rows, and of rows of x by the entries of each class. Sums are in float32, in a fixed order.
 *
 * The time is that of scattered reads. A warp adds a slice of the columns, with several rows' loads
 * in flight, and the slices are the slow dimension of the grid: the blocks that run at the same
 * time read one slice of all rows, which stays in L2. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/reductions.cuh"
#include "cuda/common/row_status.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/samples/sample_order.cuh"

enum {
  kGatherThreads = 256,
  kGatherWarps = kGatherThreads / kWarp,
  kInputBatch = 8, /* rows of W whose loads a warp has in flight */
  kBatch = 4,      /* the same of x */
  kClasses = 8,    /* consecutive classes of a warp: their entries follow each other in the order */
  kBiasThreads = 256,
};
constexpr unsigned kAllLanes = 0xffffffffu;

/* v = elements [column, column + N) of a row, 0 where `wanted` is false. */
template <typename T, int N>
__device__ __forceinline__ void load_part(const T* source, int64_t index, bool wanted,
                                          Vec<T, N>& v) {
  if (wanted) {
    load_vec<false>(source + index, v);
  } else {
#pragma unroll
    for (int e = 0; e < N; e++) v.at[e] = from_stat<T>(0.0f);
  }
}

template <typename T, int N>
__device__ __forceinline__ void add_scaled(float factor, const Vec<T, N>& raw, float (&sum)[N]) {
  float v[N];
  unpack(raw, v);
#pragma unroll
  for (int e = 0; e < N; e++) sum[e] = fmaf(factor, v[e], sum[e]);
}

/* load_any and store_any without float64, which is never sampled and whose vectors would take twice
 * the registers. */
template <int N>
__device__ __forceinline__ void load_grad(const void* data, flce_dtype dtype, int64_t index,
                                          float (&v)[N]) {
  if (dtype != FLCE_F64) load_any<float, N>(data, dtype, index, v);
}
template <int N>
__device__ __forceinline__ void store_grad(void* data, flce_dtype dtype, int64_t index,
                                           const float (&v)[N]) {
  if (dtype != FLCE_F64) store_any<float, N>(data, dtype, index, v);
}

/* ---- dX ---- */

/* The arguments of sampled_grad_input (backend.h). */
typedef struct sampled_input_args {
  flce_rows r;
  void* dx;
  const void *w, *wsum;
  const int32_t* lists;
  float eps;
  flce_dtype dx_dtype;
  int pitch;            /* of the lists */
  int lanes;            /* that load a slice of one row of W; the others load other rows' */
  int64_t hidden, cols; /* elements of a row of W, of dX */
} sampled_input_args;

/* The pairs of a list from `first` on, one a lane; not beyond the list's memory. E is NaN for a
 * class beyond W. */
__device__ __forceinline__ int2 pair_of_lane(const sampled_input_args& p, const int2* pairs,
                                             int first) {
  const int m = first + (int)threadIdx.x % kWarp;
  const int2 pair = m < p.pitch / 2 - 1 ? pairs[m] : make_int2(0, 0);
  return (uint32_t)pair.x < p.r.vocab ? pair : make_int2(0, __float_as_int(NAN));
}

/* The pair with its value in place of E. */
__device__ __forceinline__ int2 valued(const sampled_input_args& p, int64_t at, int2 pair) {
  pair.y = __float_as_int(value_of_pair(p.r, at, p.eps, __int_as_float(pair.y)));
  return pair;
}

/* sum = the columns from `column` on of sum_m value_m W[class_m] of token `at`; `own`: the first
 * pairs of the list with their values, one a lane. Each group of p.lanes lanes adds every 32 /
 * p.lanes-th pair; then the groups' sums are added. */
template <typename T, int N>
__device__ __forceinline__ void gather_list(const sampled_input_args& p, int64_t at,
                                            const int2* pairs, int count, int2 own, int64_t column,
                                            float (&sum)[N]) {
  const int lane = threadIdx.x % kWarp, groups = kWarp / p.lanes, group = lane / p.lanes;
  const bool inside = column < p.hidden;
  for (int first = 0; first < count; first += kWarp) {
    if (first > 0) own = valued(p, at, pair_of_lane(p, pairs, first));
    for (int step = 0; step < p.lanes && first + step * groups < count; step += kInputBatch) {
      float factor[kInputBatch];
      Vec<T, N> raw[kInputBatch];
#pragma unroll
      for (int b = 0; b < kInputBatch; b++) {
        if (first + (step + b) * groups >= count) break;
        const int m = (step + b) * groups + group;
        const int j = __shfl_sync(kAllLanes, own.x, m);
        factor[b] = __int_as_float(__shfl_sync(kAllLanes, own.y, m));
        const bool wanted = inside && first + m < count;
        load_part((const T*)p.w, j * p.hidden + column, wanted, raw[b]);
        if (!wanted) factor[b] = 0;
      }
#pragma unroll
      for (int b = 0; b < kInputBatch; b++) {
        if (first + (step + b) * groups < count) add_scaled(factor[b], raw[b], sum);
      }
    }
  }
  for (int distance = p.lanes; distance < kWarp; distance *= 2) {
#pragma unroll
    for (int e = 0; e < N; e++) sum[e] += __shfl_xor_sync(kAllLanes, sum[e], distance);
  }
}

/* One warp for a slice of a row. A row has few entries, so its time is that of the dependent loads:
 * the list says what kind of row it is, and is loaded together with the row's token. */
template <typename T, int N>
__global__ void __launch_bounds__(kGatherThreads, sizeof(T) == 2 ? 3 : 1)
    sampled_grad_input(const __grid_constant__ sampled_input_args p) {
  pdl_wait();
  const int lane = threadIdx.x % kWarp;
  const int64_t row = (int64_t)blockIdx.x * kGatherWarps + threadIdx.x / kWarp;
  const int64_t column = ((int64_t)blockIdx.y * p.lanes + lane % p.lanes) * N;
  if (row >= p.r.rows) return;
  const int2* list = (const int2*)(p.lists + row * p.pitch);
  const int64_t at = vectors_at(p.r, row);
  const int2 head = list[0], own = pair_of_lane(p, list + 1, 0);
  if (at < 0) return;
  const RowFactors<float> factors = factors_of<float>(p.r, at);
  const bool fits = head.x < p.r.vocab && head.y < p.pitch / 2;
  float v[N] = {};
  if (head.x >= 0 && !fits) {
#pragma unroll
    for (int e = 0; e < N; e++) v[e] = NAN;
  } else if (head.x >= 0) {
    Vec<T, N> target;
    load_part((const T*)p.w, head.x * p.hidden + column, column < p.hidden, target);
    gather_list<T, N>(p, at, list + 1, head.y, valued(p, at, own), column, v);
    const float factor = factor_of_values(p.r, at);
#pragma unroll
    for (int e = 0; e < N; e++) v[e] *= factor;
    add_scaled(factors.target, target, v);
    if (p.wsum && column < p.hidden) {
#pragma unroll
      for (int e = 0; e < N; e++) v[e] -= factors.smooth * ((const float*)p.wsum)[column + e];
    }
  }
  if (lane < p.lanes && column < p.cols) {
    store_grad<N>(p.dx, p.dx_dtype, at * p.cols + column, v);
  }
}

/* The widest slice of W that leaves room in L2. An H100's has two partitions of 25 MB, of which a
 * multiprocessor reads the far one more slowly. */
static int lanes_of(int64_t vocab, int64_t vector_bytes) {
  const int64_t kSliceBytes = 20 << 20, kLeastLanes = 8;
  int lanes = kWarp;
  while (lanes > kLeastLanes && vocab * lanes * vector_bytes > kSliceBytes) lanes /= 2;
  return lanes;
}

static flce_status refuse_dtype(const char* what, flce_dtype dtype) {
  return flce_fail(FLCE_UNSUPPORTED, "%s: no CUDA kernel for operands in %s", what,
                   flce_dtype_name(dtype));
}

template <typename T, int N>
static flce_status launch_input(void* self, sampled_input_args args, int64_t vocab) {
  args.lanes = lanes_of(vocab, N * (int64_t)sizeof(T));
  const dim3 blocks((unsigned)ceil_div(args.r.rows, kGatherWarps),
                    (unsigned)ceil_div(args.cols, args.lanes * N));
  return launch_dependent(self, sampled_grad_input<T, N>, blocks, kGatherThreads,
                          "sampled_grad_input", args);
}

template <typename T>
static flce_status launch_sampled_input(void* self, const sampled_input_args& args, int64_t vocab,
                                        bool vectors) {
  return vectors ? launch_input<T, 8>(self, args, vocab) : launch_input<T, 1>(self, args, vocab);
}

flce_status cuda_sampled_grad_input(void* self, const flce_sampled_input_args* call) {
  if (call->rows->rows == 0 || call->cols == 0) return FLCE_OK;
  const sampled_input_args args = {
      *call->rows, call->dx,         call->w,        call->wsum,
      call->lists, (float)call->eps, call->dx_dtype, (int)flce_sample_pitch(call->eps),
      kWarp,       call->hidden,     call->cols};
  const bool vectors =
      call->hidden % 8 == 0 && call->cols % 8 == 0 && both_aligned(call->dx, call->w);
  const int64_t vocab = call->rows->vocab;
  switch (call->dtype) {
    case FLCE_F32:
      return launch_sampled_input<float>(self, args, vocab, vectors);
    case FLCE_BF16:
      return launch_sampled_input<__nv_bfloat16>(self, args, vocab, vectors);
    case FLCE_F16:
      return launch_sampled_input<__half>(self, args, vocab, vectors);
    default:
      return refuse_dtype("sampled_grad_input", call->dtype);
  }
}

/* ---- dW ---- */

/* The arguments of sampled_grad_weight (backend.h). */
typedef struct sampled_weight_args {
  sample_order o;
  void* dw;
  const void* x;
  const float *xsum, *class_weight;
  flce_dtype dw_dtype;
  unsigned piece; /* positions of a piece of the order */
  int64_t vocab, hidden, x_pitch, cols;
  bool adds;
} sampled_weight_args;

/* Loads the factor and this lane's columns of x's row for the entries [first, first + kBatch) of
 * the order; zeros from `end` on. `own`: the lane's entry of the 32 that begin at `base`. */
template <typename T, int N>
__device__ __forceinline__ void load_entries(const sampled_weight_args& p, int2 own, unsigned base,
                                             unsigned first, unsigned end, int64_t column,
                                             float (&factor)[kBatch], Vec<T, N> (&raw)[kBatch]) {
#pragma unroll
  for (int b = 0; b < kBatch; b++) {
    const int from = (int)(first - base) + b;
    const int token = __shfl_sync(kAllLanes, own.x, from);
    factor[b] = __int_as_float(__shfl_sync(kAllLanes, own.y, from));
    load_part((const T*)p.x, token * p.x_pitch + column, first + b < end && column < p.hidden,
              raw[b]);
  }
}

/* sum += the columns from `column` on of the entries at positions [begin, end). */
template <typename T, int N>
__device__ __forceinline__ void add_entries(const sampled_weight_args& p, unsigned begin,
                                            unsigned end, int64_t column, float (&sum)[N]) {
  const int lane = threadIdx.x % kWarp;
  for (unsigned base = begin; base < end; base += kWarp) {
    const int2 own = base + lane < end ? p.o.entries[base + lane] : make_int2(0, 0);
    for (unsigned first = base; first < min(base + kWarp, end); first += kBatch) {
      float factor[kBatch];
      Vec<T, N> raw[kBatch];
      load_entries<T, N>(p, own, base, first, end, column, factor, raw);
#pragma unroll
      for (int b = 0; b < kBatch; b++) add_scaled(factor[b], raw[b], sum);
    }
  }
}

template <typename T, int N>
__device__ __forceinline__ void write_piece_part(const sampled_weight_args& p, int64_t part,
                                                 unsigned begin, unsigned end, int64_t column) {
  if (begin == end) return;
  float sum[N] = {};
  add_entries<T, N>(p, begin, end, column, sum);
  if (column < p.hidden) {
    store_any<float, N>(p.o.part_sums, FLCE_F32, part * p.hidden + column, sum);
  }
}

/* The sums of the classes that lie in several pieces: part 2 k is of the class that continues from
 * the piece before k, part 2 k + 1 of the class that begins in k and continues in the next. One
 * warp for a slice of a piece. */
template <typename T, int N>
__global__ void __launch_bounds__(kGatherThreads, sizeof(T) == 2 ? 3 : 1)
    sum_pieces(const __grid_constant__ sampled_weight_args p) {
  const int64_t piece = (int64_t)blockIdx.x * kGatherWarps + threadIdx.x / kWarp;
  const int64_t column = ((int64_t)blockIdx.y * kWarp + threadIdx.x % kWarp) * N;
  if (piece >= p.o.pieces) return;
  const unsigned begin = (unsigned)piece * p.piece;
  const unsigned end = (unsigned)min((int64_t)begin + p.piece, p.o.count);
  const uint32_t first = p.o.keys[begin], last = p.o.keys[end - 1];
  if (first < p.vocab && p.o.starts[first] < begin) {
    write_piece_part<T, N>(p, 2 * piece, begin, min(p.o.starts[first + 1], end), column);
  }
  if (last < p.vocab && p.o.starts[last] >= begin && p.o.starts[last + 1] > end) {
    write_piece_part<T, N>(p, 2 * piece + 1, p.o.starts[last], end, column);
  }
}

/* Writes the columns from `column` on of class j's row of dW, and clears the sum. */
template <int N>
__device__ __forceinline__ void flush_class(const sampled_weight_args& p, int64_t j, bool is_empty,
                                            int64_t column, float (&sum)[N]) {
  if (column < p.cols && !(p.adds && is_empty && !p.xsum)) {
    if (p.xsum) {
      const float weight = p.class_weight ? p.class_weight[j] : 1.0f;
#pragma unroll
      for (int e = 0; e < N; e++) sum[e] -= weight * p.xsum[column + e];
    }
    if (p.adds) {
      float old[N];
      load_grad<N>(p.dw, p.dw_dtype, j * p.cols + column, old);
#pragma unroll
      for (int e = 0; e < N; e++) sum[e] += old[e];
    }
    store_grad<N>(p.dw, p.dw_dtype, j * p.cols + column, sum);
  }
#pragma unroll
  for (int e = 0; e < N; e++) sum[e] = 0;
}

/* The classes of a warp: lane c holds where class first + c begins. */
struct ClassRange {
  int64_t first;
  int count;
  unsigned start;
  __device__ __forceinline__ unsigned begin_of(int c) const {
    return __shfl_sync(kAllLanes, start, c);
  }
};

/* Adds the loaded entries from position `first` on to the classes that have them, and writes each
 * class that ends in the batch. `c`: the class whose sum is open, with entries [begin, end). */
template <typename T, int N>
__device__ __forceinline__ void add_batch(const sampled_weight_args& p, const ClassRange& range,
                                          unsigned first, unsigned batch_end, int last,
                                          int64_t column, const float (&factor)[kBatch],
                                          const Vec<T, N> (&raw)[kBatch], int& c, unsigned& begin,
                                          unsigned& end, float (&sum)[N]) {
  while (c < last) {
#pragma unroll
    for (int b = 0; b < kBatch; b++) {
      if (first + b >= begin && first + b < min(end, batch_end)) add_scaled(factor[b], raw[b], sum);
    }
    if (end > batch_end) return;
    flush_class(p, range.first + c, begin == end, column, sum);
    begin = end;
    c++;
    end = range.begin_of(min(c + 1, last));
  }
}

/* Classes [c, last) of the range, none of which lies in several pieces: their entries are one run
 * of the order, so that the loads of a class are in flight while the one before is added. */
template <typename T, int N>
__device__ __forceinline__ void add_run(const sampled_weight_args& p, const ClassRange& range,
                                        int c, int last, int64_t column) {
  const int lane = threadIdx.x % kWarp;
  const unsigned run_end = range.begin_of(last);
  unsigned begin = range.begin_of(c), end = range.begin_of(c + 1), base = begin;
  float sum[N] = {};
  do { /* once if there are no entries: to write zeros */
    const int2 own = base + lane < run_end ? p.o.entries[base + lane] : make_int2(0, 0);
    unsigned first = base;
    do {
      float factor[kBatch];
      Vec<T, N> raw[kBatch];
      load_entries<T, N>(p, own, base, first, run_end, column, factor, raw);
      add_batch<T, N>(p, range, first, min(first + kBatch, run_end), last, column, factor, raw, c,
                      begin, end, sum);
      first += kBatch;
    } while (first < min(base + kWarp, run_end));
    base += kWarp;
  } while (base < run_end);
}

/* One warp for a slice of kClasses classes. */
template <typename T, int N>
__global__ void __launch_bounds__(kGatherThreads, sizeof(T) == 2 ? 3 : 1)
    sampled_grad_weight(const __grid_constant__ sampled_weight_args p) {
  pdl_wait();
  const int lane = threadIdx.x % kWarp;
  const int64_t column = ((int64_t)blockIdx.y * kWarp + lane) * N;
  ClassRange range;
  range.first = ((int64_t)blockIdx.x * kGatherWarps + threadIdx.x / kWarp) * kClasses;
  if (range.first >= p.vocab) return;
  range.count = (int)min((int64_t)kClasses, p.vocab - range.first);
  range.start = p.o.starts[range.first + min(lane, range.count)];
  const unsigned next = __shfl_down_sync(kAllLanes, range.start, 1);
  const bool splits =
      lane < range.count && range.start < next && range.start / p.piece != (next - 1) / p.piece;
  const unsigned split = __ballot_sync(kAllLanes, splits) | 1u << range.count;
  for (int c = 0; c < range.count;) {
    const int run = __ffs(split >> c) - 1;
    if (run > 0) {
      add_run<T, N>(p, range, c, c + run, column);
      c += run;
      continue;
    }
    const unsigned first = range.begin_of(c) / p.piece,
                   last = (range.begin_of(c + 1) - 1) / p.piece;
    float sum[N] = {};
    for (unsigned piece = first; piece <= last && column < p.hidden; piece++) {
      const int64_t part = 2 * (int64_t)piece + (piece == first ? 1 : 0);
      float v[N];
      load_any<float, N>(p.o.part_sums, FLCE_F32, part * p.hidden + column, v);
#pragma unroll
      for (int e = 0; e < N; e++) sum[e] += v[e];
    }
    flush_class(p, range.first + c, false, column, sum);
    c++;
  }
}

template <typename T, int N>
static flce_status launch_weight(void* self, const sampled_weight_args& args) {
  const unsigned slices = (unsigned)ceil_div(args.cols, kWarp * N);
  if (args.o.count > 0) {
    const dim3 blocks((unsigned)ceil_div(args.o.pieces, kGatherWarps), slices);
    sum_pieces<T, N><<<blocks, kGatherThreads, 0, stream_of(self)>>>(args);
    FLCE_LAUNCHED("sampled_grad_weight");
  }
  const dim3 blocks((unsigned)ceil_div(args.vocab, kGatherWarps * kClasses), slices);
  return launch_dependent(self, sampled_grad_weight<T, N>, blocks, kGatherThreads,
                          "sampled_grad_weight", args);
}

template <typename T>
static flce_status launch_sampled_weight(void* self, const sampled_weight_args& args,
                                         bool vectors) {
  return vectors ? launch_weight<T, 8>(self, args) : launch_weight<T, 1>(self, args);
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
                                    (unsigned)flce_sample_piece(o.count),
                                    call->vocab,
                                    call->hidden,
                                    call->x_pitch,
                                    call->cols,
                                    call->adds};
  const bool vectors =
      call->x_pitch % 8 == 0 && call->cols % 8 == 0 && both_aligned(call->dw, call->x);
  switch (call->dtype) {
    case FLCE_F32:
      return launch_sampled_weight<float>(self, args, vectors);
    case FLCE_BF16:
      return launch_sampled_weight<__nv_bfloat16>(self, args, vectors);
    case FLCE_F16:
      return launch_sampled_weight<__half>(self, args, vectors);
    default:
      return refuse_dtype("sampled_grad_weight", call->dtype);
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
