/* Pairs: a student's and a teacher's logit of one class in 32 bits, in base 2. With p and q, the
 * softmax of both:
 *
 *   bits 0 to 14   -log2 q in steps of 2^-9, at most 64; so q is rounded by 2^-10 of it at most
 *   bits 15 to 31  log2 p - log2 q - shift, `shift` being the same for all classes of a row: a
 *                  float of sign, 5 bits of exponent and 11 of fraction, from 2^-23 to 2^8
 *
 * The fused logits GEMM of the student makes them from the teacher's float32 logits, when the
 * student's logsumexp is not known yet. Where student and teacher are near, their difference keeps
 * a relative error of 2^-12, because `shift` is the difference of one class's logits. `shift` is
 * off by what log2(p / q) is for that class: rounding p costs less than 2^-12 of that. */
#ifndef FLCE_CUDA_ROWS_PAIRS_CUH
#define FLCE_CUDA_ROWS_PAIRS_CUH

#include <stdint.h>

/* Of a row: -log2 q = offset - scale z + log_sum for a teacher's logit z. */
struct alignas(16) PairRow {
  float scale, offset, log_sum, shift;
};

constexpr float kLeastLog2Q = -64, kPairSteps = 512; /* steps in a unit of log2 q */
constexpr uint32_t kPairQ = 0x7fff, kPairDifference = 0x7fff8000, kPairSign = 0x80000000;

/* A teacher's log2_l, raised to where q is 2^-64: p is made from q and their difference. */
__device__ __forceinline__ float bounded_log2_logit(const PairRow& row, float z) {
  return fmaxf(row.scale * z, row.offset + row.log_sum + kLeastLog2Q);
}

__device__ __forceinline__ uint32_t pair_of(uint32_t steps, float difference) {
  const float bounded = fminf(fmaxf(difference, -255), 255);
  const uint32_t bits = __float_as_uint(bounded * 0x1p-103f) + 0x800;
  return ((bits << 3) & kPairDifference) | (bits & kPairSign) | steps;
}

/* Of a student's log2_l and a teacher's z. */
__device__ __forceinline__ uint32_t make_pair(const PairRow& row, float log2_l, float z) {
  const float other = bounded_log2_logit(row, z);
  const float log2_q = (row.offset - other) + row.log_sum;
  const uint32_t steps = min(__float2uint_rn(log2_q * kPairSteps), kPairQ);
  return pair_of(steps, (log2_l - other) - row.shift);
}

__device__ __forceinline__ float pair_log2_q(uint32_t pair) {
  return (float)(pair & kPairQ) * (-1 / kPairSteps);
}

/* log2(p / q) - shift. */
__device__ __forceinline__ float pair_difference(uint32_t pair) {
  return __uint_as_float(((pair & kPairDifference) >> 3) | (pair & kPairSign)) * 0x1p103f;
}

/* The pair with another shift, where the student's log2_l is `above` + `shift` + the teacher's
 * logsumexp. */
__device__ __forceinline__ uint32_t shifted_pair(uint32_t pair, float above) {
  return pair_of(pair & kPairQ, above - pair_log2_q(pair));
}

#endif
