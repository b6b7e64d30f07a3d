/* The tokens ordered by target: the format, and the order of few tokens, which the kernel of
 * prepare.cu makes. target_order.cu makes that of many, grad_weight.cu reads it. */
#ifndef FLCE_CUDA_PASSES_TARGET_ORDER_CUH
#define FLCE_CUDA_PASSES_TARGET_ORDER_CUH

#include "cuda/backend.cuh"

/* [tokens] each, 256-byte aligned: sorted targets (V for those that do not count), their tokens;
 * where CUB sorts, the same unsorted and the sort's own scratch. */
typedef struct order_view {
  uint32_t *keys, *tokens, *keys_in, *tokens_in;
  void* scratch;
} order_view;

static inline int64_t order_stride(int64_t tokens) {
  return ceil_div(tokens * 4, 256) * 256;
}

static inline order_view view_order(const void* order, int64_t tokens) {
  char* base = (char*)order;
  const int64_t stride = order_stride(tokens);
  const order_view view = {(uint32_t*)base, (uint32_t*)(base + stride),
                           (uint32_t*)(base + 2 * stride), (uint32_t*)(base + 3 * stride),
                           base + 4 * stride};
  return view;
}

static inline flce_status check_order(int64_t tokens, int64_t vocab) {
  if (tokens <= INT32_MAX && vocab <= INT32_MAX) return FLCE_OK;
  return flce_fail(FLCE_UNSUPPORTED, "order_targets: at most %d tokens and classes, got %lld, %lld",
                   INT32_MAX, (long long)tokens, (long long)vocab);
}

enum { kPrepareThreads = 1024 };

/* ---- the order of few tokens ---- */

/* Up to so many tokens each counts those before it, in the kernel that makes the scalars: CUB sorts
 * as few by one block, behind another kernel, in 15 us (benchmarks/NOTES.md, 2026-11-22). */
enum { kRankedTokens = 4096, kRankedTokensOfBlock = kPrepareThreads / kWarp };

/* The target, V where it does not count. */
__device__ __forceinline__ uint32_t key_of(int64_t y, int64_t vocab, int64_t ignore_index) {
  return (uint32_t)(y != ignore_index && y >= 0 && y < vocab ? y : vocab);
}

/* A warp a token, which stands behind all of smaller keys and those before it of its own. The keys
 * come to the block at once, so that it waits for them once. */
__device__ __forceinline__ uint32_t rank_of(const int64_t* target, int tokens, int64_t vocab,
                                            int64_t ignore_index, int token, uint32_t* key) {
  __shared__ uint32_t all[kRankedTokens];
#pragma unroll
  for (int step = 0; step < kRankedTokens / kPrepareThreads; step++) {
    const int j = step * kPrepareThreads + threadIdx.x;
    if (j < tokens) all[j] = key_of(target[j], vocab, ignore_index);
  }
  __syncthreads();
  *key = token < tokens ? all[token] : 0;
  uint32_t before = 0;
#pragma unroll 4
  for (int j = threadIdx.x % kWarp; j < tokens; j += kWarp) {
    const uint32_t other = all[j];
    before += other < *key || (other == *key && j < token);
  }
  return __reduce_add_sync(0xffffffffu, before);
}

/* The kernel of prepare: tensors->scalars may be NULL, and so may `order`, which few tokens have.
 */
flce_status cuda_launch_prepare(void* self, const flce_problem* problem,
                                const flce_tensors* tensors, void* order, bool holds_weight,
                                bool overlaps);

#endif
