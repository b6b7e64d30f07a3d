/* Packed rows: log p and log q of each class in 32 bits, p being the student's softmax and q the
 * teacher's. In base 2, with p' = p 2^-C and a constant C of the row:
 *
 *   bits 16 to 31  r = log2(p' / q) in float16
 *   bits 0 to 15   (64 - log2 of the larger of p' and q) 512, an unsigned integer: 0xffff is the
 *                  smallest, and stands for p = q = 0
 *
 * So the larger of p' and q is off by a factor of 2^(2^-10) at most, the smaller by |r| 2^-11 more
 * in log2. The epilogue of the student's fused logits GEMM packs a row when the student's logsumexp
 * is not known yet: C is log2(p / q) of a class that the teacher deems likely (row_offsets.cu), so
 * that r is small where student and teacher are near, and p - q keeps a relative error of about
 * 2^-11 |r| / |log2(p / q)|. */
#ifndef FLCE_CUDA_ROWS_PACKED_ROWS_CUH
#define FLCE_CUDA_ROWS_PACKED_ROWS_CUH

#include <cuda_fp16.h>
#include <stdint.h>

#include "gpu.h"

/* How a row is packed, from the student's log2_l and the teacher's z. k and teacher_k are the
 * integer offsets of both rows' sums.
 *
 *   log2 q  = (scale z - teacher_k) - log_sum
 *   log2 p' = (log2_l - k) + above
 *   r       = (log2_l - scale z) - difference */
struct alignas(16) PackedRow {
  float scale, teacher_k, log_sum, difference, k, above;
};
static_assert(sizeof(PackedRow) == FLCE_PACKED_ROW_FLOATS * sizeof(float), "scratch of a row");

constexpr float kPackedSteps = 512;           /* in 1 of log2 */
constexpr float kPackedLimit = 64;            /* of |log2| of the larger one */
constexpr uint32_t kAbsentClass = 0xfc00ffff; /* p = q = 0, r = -inf: on neither side */
/* Adding 2^23 rounds to an integer, which is then the low bits of the fraction. */
constexpr float kRoundingBias = 0x1p23f;

/* The lower half of a word, in the lower half of this float. */
__device__ __forceinline__ float encoded_larger(const PackedRow& row, float log2_l,
                                                float teacher_log2_l) {
  const float p = (log2_l - row.k) + row.above, q = (teacher_log2_l - row.teacher_k) - row.log_sum;
  const float steps = fmaf(fmaxf(p, q), -kPackedSteps, kRoundingBias + kPackedLimit * kPackedSteps);
  return fminf(fmaxf(steps, kRoundingBias), kRoundingBias + 0xffff);
}

/* The words of two classes, which replace the teacher's z. */
__device__ __forceinline__ void pack_classes(const PackedRow& row, const float (&log2_l)[2],
                                             float (&z)[2]) {
  float larger[2], r[2];
#pragma unroll
  for (int e = 0; e < 2; e++) {
    const float teacher_log2_l = row.scale * z[e];
    larger[e] = encoded_larger(row, log2_l[e], teacher_log2_l);
    /* fmaxf drops the NaN of -inf minus -inf. That of a NaN logit is in the row's statistics. */
    r[e] = fmaxf((log2_l[e] - teacher_log2_l) - row.difference, -INFINITY);
  }
  const __half2 halves = __floats2half2_rn(r[0], r[1]);
  const uint32_t both = *(const uint32_t*)&halves;
  z[0] = __uint_as_float(__byte_perm(__float_as_uint(larger[0]), both, 0x5410));
  z[1] = __uint_as_float(__byte_perm(__float_as_uint(larger[1]), both, 0x7610));
}

/* log2 of the larger one, -inf for p = q = 0; and r. */
struct PackedClass {
  float log2_larger, r;
};

__device__ __forceinline__ PackedClass unpack_class(uint32_t word) {
  const uint32_t steps = word & 0xffff;
  const float log2 = fmaf(__uint_as_float(__float_as_uint(kRoundingBias) | steps),
                          -1 / kPackedSteps, kRoundingBias / kPackedSteps + kPackedLimit);
  return {steps == 0xffff ? -INFINITY : log2,
          __half2float(__ushort_as_half((unsigned short)(word >> 16)))};
}

#endif
