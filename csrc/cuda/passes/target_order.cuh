/* The format of the tokens sorted by target, and the sort of at most kCountedTokens tokens, which
 * runs in the kernel of prepare.cu. target_order.cu sorts more tokens; grad_weight.cu reads the
 * result. */
#ifndef FLCE_CUDA_PASSES_TARGET_ORDER_CUH
#define FLCE_CUDA_PASSES_TARGET_ORDER_CUH

#include "cuda/backend.cuh"

/* The parts of `order`. The arrays are [N] uint32, 256-byte aligned. A key is a target, or V if it
 * is ignored or out of range. */
typedef struct order_view {
  uint32_t *keys, /* sorted keys */
      *tokens,    /* the tokens of `keys`, ascending within a key */
      *keys_in,   /* keys of tokens 0 to N - 1; only if CUB sorts */
      *tokens_in; /* 0 to N - 1; only if CUB sorts */
  void* scratch;  /* CUB's */
} order_view;

static inline int64_t order_stride(int64_t tokens) {
  return flce_order_aligned(tokens * 4);
}

static inline order_view view_order(const void* order, int64_t tokens) {
  char* base = (char*)order;
  const int64_t stride = order_stride(tokens);
  const order_view view = {(uint32_t*)base, (uint32_t*)(base + stride),
                           (uint32_t*)(base + 2 * stride), (uint32_t*)(base + 3 * stride),
                           base + 4 * stride};
  return view;
}

enum { kPrepareThreads = 1024 };

/* ---- sorting few tokens ---- */

/* Up to kCountedTokens tokens are sorted by counting: a token's position is the number of tokens
 * with a smaller key, or with an equal key and a smaller index. This runs in the kernel that
 * computes the scalars, which overlaps the end of the logits GEMM unless the vocabulary is sharded.
 * CUB takes a kernel for each of
 * its passes, 15 to 40 us (benchmarks/NOTES.md, 2026-11-22 and 23). A warp compares several tokens
 * with each key that it loads, because the bandwidth of shared memory is the limit. */
enum {
  kCountedTokens = FLCE_COUNTED_TOKENS,
  kTokensPerWarp = 2,
  kTokensPerBlock = kTokensPerWarp * kPrepareThreads / kWarp
};

/* The sort key: the target, or V if it is ignored or out of range. */
__device__ __forceinline__ uint32_t key_of(int64_t y, int64_t vocab, int64_t ignore_index) {
  return (uint32_t)(y != ignore_index && y >= 0 && y < vocab ? y : vocab);
}

/* All keys, in shared memory; UINT32_MAX, which is no key, after the last one up to a multiple of
 * 4. Called by the whole block, so that it waits for global memory once. */
__device__ __forceinline__ const uint32_t* load_keys(const int64_t* target, int tokens,
                                                     int64_t vocab, int64_t ignore_index) {
  __shared__ alignas(16) uint32_t keys[kCountedTokens];
#pragma unroll
  for (int step = 0; step < kCountedTokens / kPrepareThreads; step++) {
    const int j = step * kPrepareThreads + threadIdx.x;
    if (j < tokens) {
      keys[j] = key_of(target[j], vocab, ignore_index);
    } else if (j < (tokens + 3) / 4 * 4) {
      keys[j] = UINT32_MAX;
    }
  }
  __syncthreads();
  return keys;
}

/* The keys and the positions in the order of the tokens from `first` on, by one warp. */
__device__ __forceinline__ void count_preceding(const uint32_t* keys, int tokens, int first,
                                                uint32_t (&key)[kTokensPerWarp],
                                                uint32_t (&positions)[kTokensPerWarp]) {
  constexpr int T = kTokensPerWarp;
  const int lane = threadIdx.x % kWarp;
#pragma unroll
  for (int t = 0; t < T; t++) {
    key[t] = keys[min(first + t, tokens - 1)];
    positions[t] = 0;
  }
  for (int quad = lane; quad < (tokens + 3) / 4; quad += kWarp) {
    const uint4 others = ((const uint4*)keys)[quad];
#pragma unroll
    for (int t = 0; t < T; t++) {
      const uint32_t limit =
          key[t] + (quad < (first + t) / 4); /* before the token's own quad equal keys count too */
      positions[t] +=
          (others.x < limit) + (others.y < limit) + (others.z < limit) + (others.w < limit);
    }
  }
#pragma unroll
  for (int t = 0; t < T; t++) {
    const int token = min(first + t, tokens - 1);
    /* Equal keys before it in its own quad. */
    if (lane < token % 4) positions[t] += keys[token / 4 * 4 + lane] == key[t];
    positions[t] = __reduce_add_sync(0xffffffffu, positions[t]);
  }
}

/* Launches the kernel of prepare.cu. tensors->scalars NULL: no scalars are computed. `order` NULL:
 * the tokens are not sorted; else there are at most kCountedTokens. */
flce_status cuda_launch_prepare(void* self, const flce_problem* problem,
                                const flce_tensors* tensors, void* order, int dw_fp16_shift,
                                bool may_overlap);

#endif
