/* The format of the targets' order, which prepare.cu makes and order.cu reads. */
#ifndef FLCE_CUDA_ORDER_CUH
#define FLCE_CUDA_ORDER_CUH

#include "backend.cuh"

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

#endif
