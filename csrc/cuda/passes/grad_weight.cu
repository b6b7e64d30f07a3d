/* finish_grad_weight and finish_grad_bias: after the GEMMs, dW and db get the terms of the targets
 * and of label smoothing, and are rounded once. The tokens of a target are found through the sorted
 * order (target_order.cuh) and summed in that order, without atomics. */
#include "cuda/common/pdl.cuh"
#include "cuda/common/reductions.cuh"
#include "cuda/common/sorted_keys.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/passes/target_order.cuh"

enum { kBiasThreads = 256 };

/* ---- dW ---- */

enum { kSliceThreads = 128, kStripeRows = 64, kTokenBatch = 4, kRowBatch = 2 };

/* The arguments of finish_grad_weight (backend.h). */
typedef struct grad_weight_args {
  void* dw;
  const void* accum;
  const void* x;
  flce_dtype dw_dtype, accum_dtype;
  const uint32_t* keys;   /* [count] sorted targets: order_view */
  const uint32_t* tokens; /* [count] their tokens: order_view */
  int64_t count;          /* N; 0 without a target term */
  int64_t vocab, hidden, x_pitch;
  const void *coef_target, *xsum, *class_weight;
} grad_weight_args;

/* sum += coef_target[i] x[i][h .. h + N) over the tokens i at positions [begin, end) of the order.
 */
template <typename X, int N, typename S = stat_t<X>>
__device__ __forceinline__ void add_tokens(const grad_weight_args& p, int64_t begin, int64_t end,
                                           int64_t h, S (&sum)[N]) {
  for (int64_t first = begin; first < end; first += kTokenBatch) {
    /* All loads are issued before the first conversion: the rows are scattered, so each load has
     * the full memory latency. */
    S coef[kTokenBatch];
    Vec<X, N> raw[kTokenBatch];
#pragma unroll
    for (int b = 0; b < kTokenBatch; b++) {
      const int64_t token = p.tokens[first + b < end ? first + b : begin];
      coef[b] = ((const S*)p.coef_target)[token];
      load_vec<false>((const X*)p.x + token * p.x_pitch + h, raw[b]);
    }
#pragma unroll
    for (int b = 0; b < kTokenBatch; b++) {
      if (first + b >= end) break;
      S v[N];
      unpack(raw[b], v);
#pragma unroll
      for (int e = 0; e < N; e++) sum[e] += coef[b] * v[e];
    }
  }
}

/* Writes elements [h, h + N) of row j of dW. On entry v and xsum are these elements of its
 * accumulator and of xsum. The row's tokens are at positions [begin, end) of the order. */
template <typename X, int N, typename S = stat_t<X>>
__device__ __forceinline__ void finish_elements(const grad_weight_args& p, int64_t j, int64_t begin,
                                                int64_t end, int64_t h, const S (&xsum)[N],
                                                S (&v)[N]) {
  S terms[N] = {};
  add_tokens<X, N>(p, begin, end, h, terms);
  const S w = p.xsum && p.class_weight ? ((const S*)p.class_weight)[j] : (S)1;
#pragma unroll
  for (int e = 0; e < N; e++) v[e] += terms[e] - w * xsum[e];
  store_any<S, N>(p.dw, p.dw_dtype, j * p.hidden + h, v);
}

/* Writes elements [h, h + N) of row j of dW if it has exactly one token, the usual case. All loads
 * are issued before the first conversion. */
template <typename X, int N, typename S = stat_t<X>>
__device__ __forceinline__ void finish_alone(const grad_weight_args& p, int64_t j, int64_t token,
                                             int64_t h) {
  Vec<X, N> raw;
  load_vec<false>((const X*)p.x + token * p.x_pitch + h, raw);
  const S coef = ((const S*)p.coef_target)[token];
  S v[N], x[N];
  load_any<S, N>(p.accum, p.accum_dtype, j * p.hidden + h, v);
  unpack(raw, x);
#pragma unroll
  for (int e = 0; e < N; e++) v[e] += coef * x[e];
  store_any<S, N>(p.dw, p.dw_dtype, j * p.hidden + h, v);
}

/* Flags of task_at. They do not collide with tokens, which are at most INT32_MAX. */
constexpr uint32_t kSharedRow = 1u << 31, kNoRow = UINT32_MAX;

/* What the block of a position of the order does; `key` is the target there. Returns the token if
 * it is the only one of its target; the token with kSharedRow if it is the first of several; kNoRow
 * if another position does the row, or if the token has no valid target. Computed from four
 * independent loads without branches, so that their latencies overlap. */
__device__ __forceinline__ uint32_t task_at(const grad_weight_args& p, int64_t position,
                                            uint32_t key) {
  const int64_t last = p.count - 1;
  const uint32_t before = p.keys[position > 0 ? position - 1 : 0];
  const uint32_t after = p.keys[position < last ? position + 1 : last];
  uint32_t task = p.tokens[position];
  if (position < last && after == key) task |= kSharedRow;
  if (key >= p.vocab || (position > 0 && before == key)) task = kNoRow;
  return task;
}

/* Resident threads of a multiprocessor: fewer on 8.6, 8.9 and 12.x than on the others. */
#if __CUDA_ARCH__ == 860 || __CUDA_ARCH__ == 890 || __CUDA_ARCH__ >= 1200
constexpr int kThreadsAtOnce = 1536;
#else
constexpr int kThreadsAtOnce = 2048;
#endif

/* finish_grad_weight in place with target terms only. The grid is [positions of the order][slices
 * of H]; the blocks at the first position of a target do its row, the others return. The launch
 * bounds keep registers few, so that the blocks of 2048 tokens are resident at once. */
template <typename X, int N>
__global__ void __launch_bounds__(kSliceThreads,
                                  sizeof(X) == 8 ? 1 : kThreadsAtOnce / kSliceThreads)
    finish_touched_rows(const __grid_constant__ grad_weight_args p) {
  using S = stat_t<X>;
  pdl_wait();
  const int64_t begin = blockIdx.x;
  const uint32_t j = p.keys[begin], task = task_at(p, begin, j);
  const int64_t h = ((int64_t)blockIdx.y * kSliceThreads + threadIdx.x) * N;
  if (task == kNoRow || h >= p.hidden) return;
  if (task < kSharedRow) return finish_alone<X, N>(p, j, task, h);
  S terms[N] = {}, v[N];
  add_tokens<X, N>(p, begin, lower_bound(p.keys, p.count, j + 1), h, terms);
  load_any<S, N>(p.accum, p.accum_dtype, j * p.hidden + h, v);
#pragma unroll
  for (int e = 0; e < N; e++) v[e] += terms[e];
  store_any<S, N>(p.dw, p.dw_dtype, j * p.hidden + h, v);
}

/* Loads elements [h, h + N) of kRowBatch rows of accum from `first` on. Rows beyond the vocabulary
 * are replaced by row `first`. */
template <typename A, int N>
__device__ __forceinline__ void load_rows(const grad_weight_args& p, int64_t first, int64_t h,
                                          Vec<A, N> (&raw)[kRowBatch]) {
#pragma unroll
  for (int b = 0; b < kRowBatch; b++) {
    const int64_t j = first + b < p.vocab ? first + b : first;
    load_vec<true>((const A*)p.accum + j * p.hidden + h, raw[b]);
  }
}

/* finish_grad_weight of every row. A block does one slice of H of kStripeRows rows, a stripe, whose
 * binary searches run in parallel. Consecutive blocks do the slices of one stripe, so together they
 * read whole rows. The loads of a batch of rows are in flight while the previous batch is
 * finished. */
template <typename X, typename A, int N>
__global__ void __launch_bounds__(kSliceThreads)
    finish_all_rows(const __grid_constant__ grad_weight_args p, int slices) {
  using S = stat_t<X>;
  __shared__ int64_t bounds[kStripeRows + 1];
  const int64_t stripe = (int64_t)(blockIdx.x / slices) * kStripeRows;
  const int64_t h = ((int64_t)(blockIdx.x % slices) * kSliceThreads + threadIdx.x) * N;
  Vec<A, N> raw[kRowBatch];
  if (h < p.hidden) load_rows(p, stripe, h, raw);
  if (threadIdx.x <= kStripeRows) {
    bounds[threadIdx.x] = lower_bound(p.keys, p.count, (uint32_t)(stripe + threadIdx.x));
  }
  __syncthreads();
  if (h >= p.hidden) return;
  S xsum[N] = {};
#pragma unroll
  for (int e = 0; p.xsum && e < N; e++) xsum[e] = ((const S*)p.xsum)[h + e];
#pragma unroll 1
  for (int first = 0; first < kStripeRows && stripe + first < p.vocab; first += kRowBatch) {
    const int64_t next = stripe + first + kRowBatch;
    Vec<A, N> ahead[kRowBatch];
    if (first + kRowBatch < kStripeRows && next < p.vocab) load_rows(p, next, h, ahead);
#pragma unroll
    for (int b = 0; b < kRowBatch; b++) {
      const int r = first + b;
      if (stripe + r >= p.vocab) break;
      S v[N];
      unpack(raw[b], v);
      finish_elements<X, N>(p, stripe + r, bounds[r], bounds[r + 1], h, xsum, v);
      raw[b] = ahead[b];
    }
  }
}

/* X is the dtype of x. accum_dtype is X or X's stat dtype. */
template <typename X, int N>
static flce_status launch_grad_weight(void* self, const grad_weight_args& args, bool all_rows,
                                      int64_t tokens) {
  const int64_t slices = ceil_div(args.hidden, kSliceThreads * N);
  const dim3 touched((unsigned)tokens, (unsigned)slices);
  const int64_t blocks = slices * ceil_div(args.vocab, kStripeRows);
  FLCE_TRY(check_grid(all_rows ? blocks : tokens, "finish_grad_weight"));
  if (!all_rows) {
    return launch_dependent(self, finish_touched_rows<X, N>, touched, kSliceThreads,
                            "finish_grad_weight", args);
  } else if (flce_size_of(args.accum_dtype) == (int64_t)sizeof(X)) {
    finish_all_rows<X, X, N>
        <<<(unsigned)blocks, kSliceThreads, 0, stream_of(self)>>>(args, (int)slices);
  } else {
    finish_all_rows<X, stat_t<X>, N>
        <<<(unsigned)blocks, kSliceThreads, 0, stream_of(self)>>>(args, (int)slices);
  }
  FLCE_LAUNCHED("finish_grad_weight");
  return FLCE_OK;
}

flce_status cuda_finish_grad_weight(void* self, const flce_grad_weight_args* call) {
  const bool terms = call->coef_target && call->order && call->tokens > 0,
             all_rows = call->accum != call->dw || call->xsum;
  if (call->vocab == 0 || call->hidden == 0 || (!terms && !all_rows)) return FLCE_OK;
  FLCE_TRY(flce_check_order(call->tokens, call->vocab));
  const order_view view = view_order(call->order, call->tokens);
  const grad_weight_args args = {
      call->dw,          call->accum,       call->x,       call->dw_dtype,
      call->accum_dtype, view.keys,         view.tokens,   terms ? call->tokens : 0,
      call->vocab,       call->hidden,      call->x_pitch, call->coef_target,
      call->xsum,        call->class_weight};
  const bool aligned = call->hidden % 8 == 0 && call->x_pitch % 8 == 0 &&
                       is_aligned(call->dw, 16) && is_aligned(call->accum, 16) &&
                       is_aligned(call->x, 16);
  FLCE_WITH_TYPE(call->dtype, X, {
    if (call->accum_dtype != call->dtype && call->accum_dtype != flce_stat_dtype(call->dtype)) {
      return flce_fail(FLCE_UNSUPPORTED, "finish_grad_weight: no CUDA kernel from sums in %s",
                       flce_dtype_name(call->accum_dtype));
    }
    return aligned ? launch_grad_weight<X, 8>(self, args, all_rows, call->tokens)
                   : launch_grad_weight<X, 1>(self, args, all_rows, call->tokens);
  });
  return FLCE_OK;
}

/* ---- db ---- */

/* The sum of coef_target over the tokens at positions [begin, end). Called by a whole warp; begin
 * and end are the same in all lanes. */
template <typename S>
__device__ __forceinline__ S warp_segment_sum(const S* coef_target, const uint32_t* tokens,
                                              int64_t begin, int64_t end) {
  S sum = 0;
  for (int64_t q = begin + threadIdx.x % kWarp; q < end; q += kWarp) sum += coef_target[tokens[q]];
  return warp_sum(sum);
}

/* finish_grad_bias, one thread for each class. The classes of a warp that have tokens are summed
 * one after the other by the whole warp, because a single thread would be slow for a frequent
 * class. */
template <typename S>
__global__ void __launch_bounds__(kBiasThreads)
    finish_bias(void* db, flce_dtype db_dtype, const S* accum, const S* coef_target,
                const uint32_t* keys, const uint32_t* tokens, int64_t count, const S* smooth_total,
                const S* class_weight, int64_t vocab) {
  const int64_t j = (int64_t)blockIdx.x * kBiasThreads + threadIdx.x;
  int64_t begin = 0, end = 0;
  if (j < vocab) {
    begin = lower_bound(keys, count, (uint32_t)j);
    end = lower_bound(keys, count, (uint32_t)j + 1);
  }
  S terms = 0;
  for (unsigned left = __ballot_sync(0xffffffffu, begin < end); left != 0; left &= left - 1) {
    const int lane = __ffs(left) - 1;
    const S sum = warp_segment_sum(coef_target, tokens, __shfl_sync(0xffffffffu, begin, lane),
                                   __shfl_sync(0xffffffffu, end, lane));
    if ((int)threadIdx.x % kWarp == lane) terms = sum;
  }
  if (j >= vocab) return;
  if (smooth_total) terms -= (class_weight ? class_weight[j] : (S)1) * smooth_total[0];
  const S v[1] = {accum[j] + terms};
  store_any<S, 1>(db, db_dtype, j, v);
}

flce_status cuda_finish_grad_bias(void* self, const flce_grad_bias_args* call) {
  const bool terms = call->coef_target && call->order && call->tokens > 0;
  if (call->vocab == 0 || (!terms && !call->smooth_total && call->accum == call->db))
    return FLCE_OK;
  FLCE_TRY(flce_check_order(call->tokens, call->vocab));
  const order_view view = view_order(call->order, call->tokens);
  FLCE_WITH_STAT(call->stat, S, {
    finish_bias<<<(unsigned)ceil_div(call->vocab, kBiasThreads), kBiasThreads, 0,
                  stream_of(self)>>>(call->db, call->db_dtype, (const S*)call->accum,
                                     (const S*)call->coef_target, view.keys, view.tokens,
                                     terms ? call->tokens : 0, (const S*)call->smooth_total,
                                     (const S*)call->class_weight, call->vocab);
  });
  FLCE_LAUNCHED("finish_grad_bias");
  return FLCE_OK;
}
