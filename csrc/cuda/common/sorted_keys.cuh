/* Keys that cub::DeviceRadixSort sorts: their bits, and the search in the sorted array. */
#ifndef FLCE_CUDA_COMMON_SORTED_KEYS_CUH
#define FLCE_CUDA_COMMON_SORTED_KEYS_CUH

#include "cuda/common/types.cuh"

/* The number of bits of the keys, which are 0 to vocab. */
static inline int key_bits(int64_t vocab) {
  int bits = 1;
  while ((vocab >> bits) != 0) bits++;
  return bits;
}

/* The first position of the sorted `keys` whose key is >= `key`. */
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

#endif
