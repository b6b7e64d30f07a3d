/* The random numbers of the sampled gradient, for C and CUDA. Counter-based, so that a row's number
 * depends on the seed and the token alone, not on chunks, threads or order. */
#ifndef FLCE_RANDOM_H
#define FLCE_RANDOM_H

#include <stdint.h>

#ifdef __CUDACC__
#define FLCE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define FLCE_HOST_DEVICE inline
#endif

/* The first output word (upper half) and the second one (lower half) of Philox4x32-10 (Salmon et
 * al., "Parallel random numbers: as easy as 1, 2, 3", SC11) with key `seed` and counter (low word
 * of `counter`, its high word, 0, 0). */
static FLCE_HOST_DEVICE uint64_t flce_philox(uint64_t seed, uint64_t counter) {
  uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);
  uint32_t c0 = (uint32_t)counter, c1 = (uint32_t)(counter >> 32), c2 = 0, c3 = 0;
  for (int round = 0; round < 10; round++) {
    const uint64_t product0 = UINT64_C(0xd2511f53) * c0, product1 = UINT64_C(0xcd9e8d57) * c2;
    c0 = (uint32_t)(product1 >> 32) ^ c1 ^ key0;
    c2 = (uint32_t)(product0 >> 32) ^ c3 ^ key1;
    c1 = (uint32_t)product1;
    c3 = (uint32_t)product0;
    key0 += 0x9e3779b9u;
    key1 += 0xbb67ae85u;
  }
  return (uint64_t)c0 << 32 | c1;
}

#endif
