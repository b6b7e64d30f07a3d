/* sort_pairs: a radix sort by CUB. */
#include "cuda/common/sorted_keys.cuh"

#include <cub/device/device_radix_sort.cuh>

/* The number of bits of the keys, which are 0 to vocab. */
static inline int key_bits(int64_t vocab) {
  int bits = 1;
  while ((vocab >> bits) != 0) bits++;
  return bits;
}

/* With scratch NULL it only sets *bytes. */
static flce_status radix_sort(void* scratch, size_t* bytes, const sorted_pairs* pairs,
                              int64_t count, int64_t vocab, cudaStream_t stream) {
  return check_cuda(cub::DeviceRadixSort::SortPairs(scratch, *bytes, pairs->keys_in, pairs->keys,
                                                    pairs->values_in, pairs->values, (int)count, 0,
                                                    key_bits(vocab), stream),
                    "sort_pairs");
}

flce_status sort_pairs_bytes(int64_t count, int64_t vocab, int64_t* bytes) {
  static thread_local int64_t cached_count = -1, cached_vocab = -1, cached_bytes = 0;
  static thread_local int cached_device = -1;
  int device;
  FLCE_TRY(check_cuda(cudaGetDevice(&device), "sort_pairs"));
  if (device != cached_device || count != cached_count || vocab != cached_vocab) {
    const sorted_pairs none = {NULL, NULL, NULL, NULL};
    size_t scratch_bytes = 0;
    FLCE_TRY(radix_sort(NULL, &scratch_bytes, &none, count, vocab, NULL));
    cached_bytes = (int64_t)scratch_bytes;
    cached_device = device;
    cached_count = count;
    cached_vocab = vocab;
  }
  *bytes = cached_bytes;
  return FLCE_OK;
}

flce_status sort_pairs(const sorted_pairs* pairs, void* scratch, int64_t count, int64_t vocab,
                       cudaStream_t stream) {
  int64_t bytes;
  FLCE_TRY(sort_pairs_bytes(count, vocab, &bytes));
  size_t scratch_bytes = (size_t)bytes;
  return radix_sort(scratch, &scratch_bytes, pairs, count, vocab, stream);
}
