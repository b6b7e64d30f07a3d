/* The memory of the sampled entries ordered by class: sample_order.cu writes it, sampled_grads.cu
 * reads it. */
#ifndef FLCE_CUDA_SAMPLES_SAMPLE_ORDER_CUH
#define FLCE_CUDA_SAMPLES_SAMPLE_ORDER_CUH

#include "cuda/common/types.cuh"

/* What a pair of token `at`'s list contributes to dz, factor_m of backend.h, or without the
 * entropy's term that divided by EXP. A NaN stays. */
__device__ __forceinline__ float value_of_pair(const flce_rows& r, int64_t at, float eps, float e) {
  const float* stats = (const float*)r.stats + at;
  const float inv_sum = stats[FLCE_STAT_INV_SUM * r.stat_pitch], least = eps / inv_sum;
  const float value = fabsf(e) < least ? copysignf(least, e) : e;
  if (!r.wants_entropy) return value;
  const float* coef = (const float*)r.coef + at;
  const float surprise = stats[FLCE_STAT_ENTROPY * r.stat_pitch] + logf(e * inv_sum);
  return value * fmaf(-coef[FLCE_COEF_ENTROPY * r.stat_pitch], surprise,
                      coef[FLCE_COEF_EXP * r.stat_pitch]);
}

/* What its result is to be multiplied by. */
__device__ __forceinline__ float factor_of_values(const flce_rows& r, int64_t at) {
  return r.wants_entropy ? 1.0f : ((const float*)r.coef)[FLCE_COEF_EXP * r.stat_pitch + at];
}

/* The parts of `order`, 256-byte aligned; `count` is the number of slots. */
typedef struct sample_order {
  int64_t count, pieces;
  uint32_t *keys, /* [count] sorted classes */
      *slots,     /* [count] the slots of `keys`, list by list */
      *keys_in,   /* [count] classes of slots 0 to count - 1 */
      *slots_in;  /* [count] 0 to count - 1 */
  int2* entries;  /* [count] token and factor (float32 bits); in the memory of keys_in, slots_in */
  uint32_t* starts; /* [vocab + 1] the entries of class j are [starts[j], starts[j + 1]) */
  float* part_sums; /* [2 pieces][hidden] sums of a piece's first and of its last class */
  void* scratch;    /* CUB's */
  int64_t bytes;    /* before scratch */
} sample_order;

static inline sample_order view_sample_order(const void* memory, int64_t rows, double eps,
                                             int64_t vocab, int64_t hidden) {
  char* next = (char*)memory;
  const auto take = [&next](int64_t bytes) {
    char* taken = next;
    next += bytes;
    return taken;
  };
  const flce_sample_sizes sizes = flce_sample_sizes_of(rows, eps, vocab, hidden);
  sample_order o;
  o.count = sizes.count;
  o.pieces = sizes.pieces;
  o.keys = (uint32_t*)take(sizes.array_bytes);
  o.slots = (uint32_t*)take(sizes.array_bytes);
  o.keys_in = (uint32_t*)take(sizes.array_bytes);
  o.slots_in = (uint32_t*)take(sizes.array_bytes);
  o.entries = (int2*)o.keys_in;
  o.starts = (uint32_t*)take(sizes.starts_bytes);
  o.part_sums = (float*)take(sizes.sum_bytes);
  o.scratch = next;
  o.bytes = next - (char*)memory;
  return o;
}

#endif
