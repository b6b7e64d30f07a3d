/* order_targets: sorts the tokens by target with CUB, if there are more than kRankedTokens. Fewer
 * are sorted by the kernel of prepare.cu. */
#include "cuda/passes/target_order.cuh"

#include "cuda/common/sorted_keys.cuh"

#include <cub/device/device_radix_sort.cuh>

enum { kKeyThreads = 256 };

/* The sort is stable, so tokens ascend within a key. With scratch NULL it only sets
 * *scratch_bytes. */
static flce_status sort_order(const order_view* view, void* scratch, size_t* scratch_bytes,
                              int64_t tokens, int64_t vocab, cudaStream_t stream) {
  return check_cuda(cub::DeviceRadixSort::SortPairs(scratch, *scratch_bytes, view->keys_in,
                                                    view->keys, view->tokens_in, view->tokens,
                                                    (int)tokens, 0, key_bits(vocab), stream),
                    "order_targets: sort");
}

/* Called in every call, mostly with the sizes of the previous call. The last answer is cached,
 * because CUB's size query takes longer than a kernel launch. */
flce_status cuda_order_bytes(int64_t tokens, int64_t vocab, int64_t* bytes) {
  static thread_local int64_t known_tokens = -1, known_vocab = -1, known_bytes = 0;
  static thread_local int known_device = -1;
  FLCE_TRY(check_order(tokens, vocab));
  if (tokens <= kRankedTokens) { /* sorted without CUB: no scratch */
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
  const int64_t tokens = problem->tokens, vocab = problem->vocab;
  if (tokens == 0) return FLCE_OK;
  FLCE_TRY(check_order(tokens, vocab));
  if (tokens <= kRankedTokens) {
    flce_tensors tensors = {};
    tensors.target = target;
    return cuda_launch_prepare(self, problem, &tensors, order, false, false);
  }
  const order_view none = {NULL, NULL, NULL, NULL, NULL}, view = view_order(order, tokens);
  make_keys<<<(unsigned)ceil_div(tokens, kKeyThreads), kKeyThreads, 0, stream_of(self)>>>(
      view.keys_in, view.tokens_in, target, tokens, vocab, problem->loss.ignore_index);
  FLCE_LAUNCHED("order_targets");
  size_t scratch_bytes = 0;
  FLCE_TRY(sort_order(&none, NULL, &scratch_bytes, tokens, vocab, NULL));
  return sort_order(&view, view.scratch, &scratch_bytes, tokens, vocab, stream_of(self));
}
