/* Tokens ordered by target, and the passes that need them so: the target terms of dW and db, summed
 * in a fixed order without atomics. Also the index of the tokens that are not ignored. */
#include "backend.cuh"

#include <cub/device/device_radix_sort.cuh>
#include <cub/device/device_select.cuh>
#include <thrust/iterator/counting_iterator.h>

/* ---- the order ---- */

/* [tokens] each, 256-byte aligned: sorted targets (V for those that do not count), their tokens;
 * where CUB sorts, the same unsorted and the sort's own scratch. */
typedef struct order_view {
  uint32_t *keys, *tokens, *keys_in, *tokens_in;
  void* scratch;
} order_view;

enum { kOrderThreads = 256 };

/* Up to so many tokens each counts those before it, in one kernel: CUB sorts as few by one block,
 * behind one that writes its keys, in twice the time (benchmarks/NOTES.md, 2026-11-22). */
enum { kRankedTokens = 4096, kRankBatch = 4 };

static int64_t order_stride(int64_t tokens) {
  return ceil_div(tokens * 4, 256) * 256;
}

static order_view view_order(const void* order, int64_t tokens) {
  char* base = (char*)order;
  const int64_t stride = order_stride(tokens);
  const order_view view = {(uint32_t*)base, (uint32_t*)(base + stride),
                           (uint32_t*)(base + 2 * stride), (uint32_t*)(base + 3 * stride),
                           base + 4 * stride};
  return view;
}

/* Bits of the keys 0 .. vocab. */
static int key_bits(int64_t vocab) {
  int bits = 1;
  while ((vocab >> bits) != 0) bits++;
  return bits;
}

static flce_status check_order(int64_t tokens, int64_t vocab) {
  if (tokens <= INT32_MAX && vocab <= INT32_MAX) return FLCE_OK;
  return flce_fail(FLCE_UNSUPPORTED, "order_targets: at most %d tokens and classes, got %lld, %lld",
                   INT32_MAX, (long long)tokens, (long long)vocab);
}

/* With scratch NULL only `scratch_bytes` is set. The sort is stable: tokens ascend within a key. */
static flce_status sort_order(const order_view* view, void* scratch, size_t* scratch_bytes,
                              int64_t tokens, int64_t vocab, cudaStream_t stream) {
  return check_cuda(cub::DeviceRadixSort::SortPairs(scratch, *scratch_bytes, view->keys_in,
                                                    view->keys, view->tokens_in, view->tokens,
                                                    (int)tokens, 0, key_bits(vocab), stream),
                    "order_targets: sort");
}

/* Every call asks, most of them for the sizes of the call before: CUB's answer takes it longer than
 * a launch. */
flce_status cuda_order_bytes(int64_t tokens, int64_t vocab, int64_t* bytes) {
  static thread_local int64_t known_tokens = -1, known_vocab = -1, known_bytes = 0;
  static thread_local int known_device = -1;
  FLCE_TRY(check_order(tokens, vocab));
  if (tokens <= kRankedTokens) { /* CUB is not asked */
    *bytes = 2 * order_stride(tokens);
    return FLCE_OK;
  }
  int device;
  FLCE_TRY(check_cuda(cudaGetDevice(&device), "order_bytes"));
  if (device == known_device && tokens == known_tokens && vocab == known_vocab) {
    *bytes = known_bytes;
    return FLCE_OK;
  }
  const order_view none = {NULL, NULL, NULL, NULL, NULL};
  size_t scratch_bytes = 0;
  FLCE_TRY(sort_order(&none, NULL, &scratch_bytes, tokens, vocab, NULL));
  *bytes = known_bytes = 4 * order_stride(tokens) + (int64_t)scratch_bytes;
  known_device = device;
  known_tokens = tokens;
  known_vocab = vocab;
  return FLCE_OK;
}

/* The target, V where it does not count. */
__device__ __forceinline__ uint32_t key_of(int64_t y, int64_t vocab, int64_t ignore_index) {
  return (uint32_t)(y != ignore_index && y >= 0 && y < vocab ? y : vocab);
}

__global__ void __launch_bounds__(kOrderThreads)
    make_keys(uint32_t* keys, uint32_t* values, const int64_t* target, int64_t tokens,
              int64_t vocab, int64_t ignore_index) {
  const int64_t i = (int64_t)blockIdx.x * kOrderThreads + threadIdx.x;
  if (i >= tokens) return;
  keys[i] = key_of(target[i], vocab, ignore_index);
  values[i] = (uint32_t)i;
}

/* A warp places kRankBatch tokens: behind all of smaller keys, and those before it of its own. The
 * keys come to the block at once, so that it waits for them once. */
__global__ void __launch_bounds__(kOrderThreads)
    rank_targets(uint32_t* keys, uint32_t* values, const int64_t* target, int tokens, int64_t vocab,
                 int64_t ignore_index) {
  __shared__ uint32_t all[kRankedTokens];
  follow_kernels();
#pragma unroll
  for (int step = 0; step < kRankedTokens / kOrderThreads; step++) {
    const int j = step * kOrderThreads + threadIdx.x;
    if (j < tokens) all[j] = key_of(target[j], vocab, ignore_index);
  }
  __syncthreads();
  const int first = (blockIdx.x * kOrderThreads + threadIdx.x) / kWarp * kRankBatch;
  const int lane = threadIdx.x % kWarp;
  uint32_t own[kRankBatch], before[kRankBatch] = {};
#pragma unroll
  for (int b = 0; b < kRankBatch; b++) own[b] = first + b < tokens ? all[first + b] : 0;
#pragma unroll 4
  for (int j = lane; j < tokens; j += kWarp) {
    const uint32_t key = all[j];
#pragma unroll
    for (int b = 0; b < kRankBatch; b++) {
      before[b] += key < own[b] || (key == own[b] && j < first + b);
    }
  }
#pragma unroll
  for (int b = 0; b < kRankBatch; b++) {
    const uint32_t place = __reduce_add_sync(0xffffffffu, before[b]);
    if (lane == 0 && first + b < tokens) {
      keys[place] = own[b];
      values[place] = (uint32_t)(first + b);
    }
  }
}

flce_status cuda_order_targets(void* self, const flce_problem* problem, const int64_t* target,
                               void* order) {
  const int64_t tokens = problem->tokens, vocab = problem->vocab;
  const int64_t ignore_index = problem->loss.ignore_index;
  if (tokens == 0) return FLCE_OK;
  FLCE_TRY(check_order(tokens, vocab));
  const order_view view = view_order(order, tokens);
  if (tokens <= kRankedTokens) {
    const int64_t threads = ceil_div(tokens, kRankBatch) * kWarp;
    return launch_next(self, rank_targets, (unsigned)ceil_div(threads, kOrderThreads),
                       kOrderThreads, "order_targets", view.keys, view.tokens, target, (int)tokens,
                       vocab, ignore_index);
  }
  const order_view none = {NULL, NULL, NULL, NULL, NULL};
  make_keys<<<(unsigned)ceil_div(tokens, kOrderThreads), kOrderThreads, 0, stream_of(self)>>>(
      view.keys_in, view.tokens_in, target, tokens, vocab, ignore_index);
  FLCE_LAUNCHED("order_targets");
  size_t scratch_bytes = 0;
  FLCE_TRY(sort_order(&none, NULL, &scratch_bytes, tokens, vocab, NULL));
  return sort_order(&view, view.scratch, &scratch_bytes, tokens, vocab, stream_of(self));
}

/* ---- the index ---- */

struct IsCounted {
  const int64_t* target;
  int64_t ignore_index;
  __host__ __device__ bool operator()(int64_t i) const { return target[i] != ignore_index; }
};

/* [tokens] positions, their number, then the selection's own scratch. */
static int64_t index_stride(int64_t tokens) {
  return ceil_div((tokens + 1) * (int64_t)sizeof(int64_t), 256) * 256;
}

/* With scratch NULL only `scratch_bytes` is set. The selection is stable: tokens ascend. */
static flce_status select_tokens(int64_t* index, void* scratch, size_t* scratch_bytes,
                                 int64_t tokens, IsCounted is_counted, cudaStream_t stream) {
  return check_cuda(
      cub::DeviceSelect::If(scratch, *scratch_bytes, thrust::counting_iterator<int64_t>(0), index,
                            index + tokens, (int)tokens, is_counted, stream),
      "compact_rows: select");
}

/* Asked for in every call, as cuda_order_bytes is. */
flce_status cuda_compact_bytes(int64_t tokens, int64_t* bytes) {
  static thread_local int64_t known_tokens = -1, known_bytes = 0;
  static thread_local int known_device = -1;
  int device;
  FLCE_TRY(check_cuda(cudaGetDevice(&device), "compact_bytes"));
  if (device != known_device || tokens != known_tokens) {
    FLCE_TRY(check_order(tokens, 0));
    size_t scratch_bytes = 0;
    FLCE_TRY(select_tokens(NULL, NULL, &scratch_bytes, tokens, IsCounted{NULL, 0}, NULL));
    known_bytes = index_stride(tokens) + (int64_t)scratch_bytes;
    known_device = device;
    known_tokens = tokens;
  }
  *bytes = known_bytes;
  return FLCE_OK;
}

flce_status cuda_compact_rows(void* self, const flce_problem* problem, const int64_t* target,
                              void* index) {
  const int64_t tokens = problem->tokens;
  if (tokens == 0) return FLCE_OK;
  int64_t bytes;
  FLCE_TRY(cuda_compact_bytes(tokens, &bytes));
  const size_t list_bytes = (size_t)tokens * sizeof(int64_t);
  FLCE_TRY(check_cuda(cudaMemsetAsync(index, 0xff, list_bytes, stream_of(self)), "compact_rows"));
  size_t scratch_bytes = (size_t)(bytes - index_stride(tokens));
  return select_tokens((int64_t*)index, (char*)index + index_stride(tokens), &scratch_bytes, tokens,
                       IsCounted{target, problem->loss.ignore_index}, stream_of(self));
}

/* First position whose key is not below `key`. */
__device__ __forceinline__ int64_t lower_bound(const uint32_t* keys, int64_t tokens, uint32_t key) {
  int64_t low = 0, high = tokens;
  while (low < high) {
    const int64_t middle = (low + high) / 2;
    if (keys[middle] < key) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

/* ---- dW ---- */

enum { kSliceThreads = 128, kStripeRows = 64, kTokenBatch = 4, kRowBatch = 2 };

typedef struct grad_weight_args {
  void* dw;
  const void* accum;
  const void* x;
  flce_dtype dw_dtype, accum_dtype;
  const uint32_t* keys;
  const uint32_t* tokens;
  int64_t count; /* of keys; 0 without a target term */
  int64_t vocab, hidden;
  const void *coef_target, *xsum, *class_weight;
} grad_weight_args;

/* Adds coef_target[i] x[i] over the tokens in positions [begin, end), in their order. */
template <typename X, int N, typename S = stat_t<X>>
__device__ __forceinline__ void add_tokens(const grad_weight_args& p, int64_t begin, int64_t end,
                                           int64_t h, S (&sum)[N]) {
  for (int64_t first = begin; first < end; first += kTokenBatch) {
    /* All loads before the first conversion: the rows lie anywhere, so each waits its full time. */
    S coef[kTokenBatch];
    Vec<X, N> raw[kTokenBatch];
#pragma unroll
    for (int b = 0; b < kTokenBatch; b++) {
      const int64_t token = p.tokens[first + b < end ? first + b : begin];
      coef[b] = ((const S*)p.coef_target)[token];
      load_vec<false>((const X*)p.x + token * p.hidden + h, raw[b]);
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

/* Elements [h, h + N) of dW's row j from `v`, those of its accumulator, and of xsum; its tokens are
 * in positions [begin, end). */
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

/* In place, target terms alone: a block for each position and slice of H, of which those at the
 * first position of a target do its row. */
template <typename X, int N>
__global__ void __launch_bounds__(kSliceThreads)
    finish_touched_rows(const __grid_constant__ grad_weight_args p) {
  using S = stat_t<X>;
  follow_kernels();
  const int64_t begin = blockIdx.x;
  const uint32_t j = p.keys[begin];
  if (j >= p.vocab || (begin > 0 && p.keys[begin - 1] == j)) return;
  const int64_t h = ((int64_t)blockIdx.y * kSliceThreads + threadIdx.x) * N;
  if (h >= p.hidden) return;
  /* Most targets stand alone; the search is for those that may have hundreds of tokens. */
  const bool alone = begin + 1 == p.count || p.keys[begin + 1] != j;
  const int64_t end = alone ? begin + 1 : lower_bound(p.keys, p.count, j + 1);
  S none[N] = {}, v[N];
  load_any<S, N>(p.accum, p.accum_dtype, j * p.hidden + h, v);
  finish_elements<X, N>(p, j, begin, end, h, none, v);
}

/* Elements [h, h + N) of kRowBatch rows from `first` on; beyond the vocabulary those of `first`. */
template <typename A, int N>
__device__ __forceinline__ void load_rows(const grad_weight_args& p, int64_t first, int64_t h,
                                          Vec<A, N> (&raw)[kRowBatch]) {
#pragma unroll
  for (int b = 0; b < kRowBatch; b++) {
    const int64_t j = first + b < p.vocab ? first + b : first;
    load_vec<true>((const A*)p.accum + j * p.hidden + h, raw[b]);
  }
}

/* Every row, kStripeRows to a block, so that the searches of a stripe run side by side. Blocks that
 * follow each other share a stripe: they read whole rows between them. The rows of a batch are
 * under way while those of the batch before are finished. */
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

/* accum is of X or of its stat type. */
template <typename X, int N>
static flce_status launch_grad_weight(void* self, const grad_weight_args& args, bool all_rows,
                                      int64_t tokens) {
  const int64_t slices = ceil_div(args.hidden, kSliceThreads * N);
  const dim3 touched((unsigned)tokens, (unsigned)slices);
  const int64_t blocks = slices * ceil_div(args.vocab, kStripeRows);
  FLCE_TRY(check_grid(all_rows ? blocks : tokens, "finish_grad_weight"));
  if (!all_rows) {
    return launch_next(self, finish_touched_rows<X, N>, touched, kSliceThreads,
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

flce_status cuda_finish_grad_weight(void* self, void* dw, flce_dtype dw_dtype, const void* accum,
                                    flce_dtype accum_dtype, const void* x, flce_dtype dtype,
                                    const void* coef_target, const void* order, int64_t tokens,
                                    const void* xsum, const void* class_weight, int64_t vocab,
                                    int64_t hidden) {
  const bool terms = coef_target && order && tokens > 0, all_rows = accum != dw || xsum;
  if (vocab == 0 || hidden == 0 || (!terms && !all_rows)) return FLCE_OK;
  FLCE_TRY(check_order(tokens, vocab));
  const order_view view = view_order(order, tokens);
  const grad_weight_args args = {
      dw,    accum,  x,           dw_dtype, accum_dtype, view.keys, view.tokens, terms ? tokens : 0,
      vocab, hidden, coef_target, xsum,     class_weight};
  const bool aligned =
      hidden % 8 == 0 && is_aligned(dw, 16) && is_aligned(accum, 16) && is_aligned(x, 16);
  FLCE_WITH_TYPE(dtype, X, {
    if (accum_dtype != dtype && accum_dtype != flce_stat_dtype(dtype)) {
      return flce_fail(FLCE_UNSUPPORTED, "finish_grad_weight: no CUDA kernel from sums in %s",
                       flce_dtype_name(accum_dtype));
    }
    return aligned ? launch_grad_weight<X, 8>(self, args, all_rows, tokens)
                   : launch_grad_weight<X, 1>(self, args, all_rows, tokens);
  });
  return FLCE_OK;
}

/* ---- db ---- */

/* The sum of coef_target over positions [begin, end), by a whole warp. */
template <typename S>
__device__ __forceinline__ S warp_segment_sum(const S* coef_target, const uint32_t* tokens,
                                              int64_t begin, int64_t end) {
  S sum = 0;
  for (int64_t q = begin + threadIdx.x % kWarp; q < end; q += kWarp) sum += coef_target[tokens[q]];
  return warp_sum(sum);
}

/* A thread a class; classes with tokens are summed one after the other by the whole warp, so that a
 * frequent one does not hold up a single thread. */
template <typename S>
__global__ void __launch_bounds__(kOrderThreads)
    finish_bias(void* db, flce_dtype db_dtype, const S* accum, const S* coef_target,
                const uint32_t* keys, const uint32_t* tokens, int64_t count, const S* smooth_total,
                const S* class_weight, int64_t vocab) {
  const int64_t j = (int64_t)blockIdx.x * kOrderThreads + threadIdx.x;
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

flce_status cuda_finish_grad_bias(void* self, void* db, flce_dtype db_dtype, const void* accum,
                                  flce_dtype stat, const void* coef_target, const void* order,
                                  int64_t tokens, const void* smooth_total,
                                  const void* class_weight, int64_t vocab) {
  const bool terms = coef_target && order && tokens > 0;
  if (vocab == 0 || (!terms && !smooth_total && accum == db)) return FLCE_OK;
  FLCE_TRY(check_order(tokens, vocab));
  const order_view view = view_order(order, tokens);
  FLCE_WITH_STAT(stat, S, {
    finish_bias<<<(unsigned)ceil_div(vocab, kOrderThreads), kOrderThreads, 0, stream_of(self)>>>(
        db, db_dtype, (const S*)accum, (const S*)coef_target, view.keys, view.tokens,
        terms ? tokens : 0, (const S*)smooth_total, (const S*)class_weight, vocab);
  });
  FLCE_LAUNCHED("finish_grad_bias");
  return FLCE_OK;
}
