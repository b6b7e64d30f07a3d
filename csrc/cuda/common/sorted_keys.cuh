/* Sorting pairs by their 32-bit keys, and the search in the sorted keys. */
#ifndef FLCE_CUDA_COMMON_SORTED_KEYS_CUH
#define FLCE_CUDA_COMMON_SORTED_KEYS_CUH

#include "cuda/common/types.cuh"

/* [count] keys and their values, in and out; count is at most INT32_MAX. Keys are 0 to vocab. */
typedef struct sorted_pairs {
  const uint32_t* keys_in;
  uint32_t* keys;
  const uint32_t* values_in;
  uint32_t* values;
} sorted_pairs;

/* The scratch bytes of sort_pairs. The last answer is cached, because CUB's query takes longer than
 * a kernel launch. */
flce_status sort_pairs_bytes(int64_t count, int64_t vocab, int64_t* bytes);

/* Stable: values of equal keys stay in their order. */
flce_status sort_pairs(const sorted_pairs* pairs, void* scratch, int64_t count, int64_t vocab,
                       cudaStream_t stream);

/* The first position of the sorted `keys` whose key is >= `key`. */
__device__ __forceinline__ int64_t lower_bound(const uint32_t* keys, int64_t count, uint32_t key) {
  int64_t low = 0, high = count;
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

#endif
