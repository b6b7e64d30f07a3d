/* Pairs: a student's and a teacher's logit of one class in 32 bits, in base 2. With p and q, the
 * softmax of both, and a `shift` that is the same for all classes of a row:
 *
 *   bits 16 to 31  r = log2(p / q) - shift in float16
 *   bits 0 to 15   log2 of the larger of q and q 2^r (that is p 2^-shift) from -64 to 64, in steps
 *                  of 2^-9: either is rounded by 2^-10 of it at most, the other by |r| 2^-12 more
 *
 * The fused logits GEMM of the student makes them from the teacher's float32 logits, when the
 * student's logsumexp is not known yet. The shift is log2(p / q) of the target's class. So where
 * student and teacher are near, r is small, and p - q keeps a relative error of about 2^-12 |r| /
 * |log2(p / q)|. Where p and q are both below 2^-64 they count as about 2^-64. */
#ifndef FLCE_CUDA_ROWS_PAIRS_CUH
#define FLCE_CUDA_ROWS_PAIRS_CUH

#include <cuda_fp16.h>
#include <stdint.h>

/* Of a row, with z the teacher's logit and k an integer: log2 q = (scale z - offset) - log_sum, and
 * log2 p - shift = (log2_l - k) + above. */
struct alignas(16) PairRow {
  float scale, offset, log_sum, shift, k, above;
};

constexpr float kPairSteps = 512;       /* in a unit of log2 q */
constexpr float kPairLimit = 64;        /* of |log2| of the larger one */
constexpr float kPairInteger = 0x1p23f; /* beyond it a float's lower bits are an integer */
constexpr float kPairMost = kPairInteger + 0xffff;

/* The lower half of a pair, as the lower half of this float. */
__device__ __forceinline__ float larger_of_pair(const PairRow& row, float log2_l, float other) {
  const float p = (log2_l - row.k) + row.above, q = (other - row.offset) - row.log_sum;
  const float steps = fmaf(fmaxf(p, q), -kPairSteps, kPairInteger + kPairLimit * kPairSteps);
  return fminf(fmaxf(steps, kPairInteger), kPairMost);
}

/* r. Where both are below 2^-64 it is at least 0, so that a class that neither has adds nothing;
 * elsewhere a difference of -inf stays. */
__device__ __forceinline__ float ratio_of_pair(const PairRow& row, float log2_l, float other,
                                               float larger) {
  const float least = fmaf(larger, 0x1p100f, -kPairMost * 0x1p100f); /* 0, or below -2^100 */
  return fmaxf((log2_l - other) - row.shift, least);
}

/* The pairs of two classes, from the student's log2_l and the teacher's z, which they replace. */
__device__ __forceinline__ void make_pairs(const PairRow& row, const float (&log2_l)[2],
                                           float (&z)[2]) {
  float larger[2], ratio[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float other = row.scale * z[e];
    larger[e] = larger_of_pair(row, log2_l[e], other);
    ratio[e] = ratio_of_pair(row, log2_l[e], other, larger[e]);
  }
  const __half2 halves = __floats2half2_rn(ratio[0], ratio[1]);
  const uint32_t both = *(const uint32_t*)&halves;
  z[0] = __uint_as_float(__byte_perm(__float_as_uint(larger[0]), both, 0x5410));
  z[1] = __uint_as_float(__byte_perm(__float_as_uint(larger[1]), both, 0x7610));
}

/* log2 of the larger one, and r. */
struct PairParts {
  float larger, ratio;
};

__device__ __forceinline__ PairParts parts_of(uint32_t pair) {
  const float steps = __uint_as_float(__float_as_uint(kPairInteger) | (pair & 0xffff));
  return {fmaf(steps, -1 / kPairSteps, kPairInteger / kPairSteps + kPairLimit),
          __half2float(__ushort_as_half((unsigned short)(pair >> 16)))};
}

#endif
