/* order_targets: sorts the tokens by target with CUB, if there are more than kCountedTokens. Fewer
 * are sorted by the kernel of prepare.cu. */
#include "cuda/passes/target_order.cuh"

#include "cuda/common/sorted_keys.cuh"

enum { kKeyThreads = 256 };

flce_status cuda_order_bytes(int64_t tokens, int64_t vocab, int64_t* bytes) {
  FLCE_TRY(flce_check_order(tokens, vocab));
  if (tokens <= kCountedTokens) { /* sorted without CUB: no scratch */
    *bytes = 2 * order_stride(tokens);
    return FLCE_OK;
  }
  int64_t scratch;
  FLCE_TRY(sort_pairs_bytes(tokens, vocab, &scratch));
  *bytes = 4 * order_stride(tokens) + scratch;
  return FLCE_OK;
}

__global__ void __launch_bounds__(kKeyThreads)
    make_keys(uint32_t* keys, uint32_t* values, const int64_t* target, int64_t tokens,
              int64_t vocab, int64_t ignore_index) {
  const int64_t i = (int64_t)blockIdx.x * kKeyThreads + threadIdx.x;
  if (i >= tokens) return;
  keys[i] = key_of(target[i], vocab, ignore_index);
  values[i] = (uint32_t)i;
}

flce_status cuda_order_targets(void* self, const flce_problem* problem, const int64_t* target,
                               void* order) {
  const int64_t tokens = problem->shape.tokens, vocab = problem->shape.vocab;
  if (tokens == 0) return FLCE_OK;
  FLCE_TRY(flce_check_order(tokens, vocab));
  if (tokens <= kCountedTokens) {
    flce_tensors tensors = {};
    tensors.target = target;
    return cuda_launch_prepare(self, problem, &tensors, order, 0, false);
  }
  const order_view view = view_order(order, tokens);
  make_keys<<<(unsigned)ceil_div(tokens, kKeyThreads), kKeyThreads, 0, stream_of(self)>>>(
      view.keys_in, view.tokens_in, target, tokens, vocab, problem->loss.ignore_index);
  FLCE_LAUNCHED("order_targets");
  /* Stable: tokens ascend within a key. */
  const sorted_pairs pairs = {view.keys_in, view.keys, view.tokens_in, view.tokens};
  return sort_pairs(&pairs, view.scratch, tokens, vocab, stream_of(self));
}
