/* What becomes of logits between the fused product and dz where the targets are bfloat16
 * probabilities: zeta - k in 16 bits, in the place of dz. A code is a multiple of 2^-9, so that p
 * is off by 2^-10 ln 2 = 7e-4 of it at the most; such a probability has been rounded by 2^-9. */
#ifndef FLCE_CUDA_PRODUCT_CODES_CUH
#define FLCE_CUDA_PRODUCT_CODES_CUH

#include "product_rows.cuh"

constexpr float kCodeSteps = 512, kCodeFloor = 96; /* code 0 stands for 96 below k and less */
/* Of a tile's sum: no term below it is beyond the largest code, 32 above k. */
constexpr float kCodeLimit = 2147483648.0f;
constexpr float kCodeInteger = 12582912.0f; /* 1.5 2^23: what is added to it is rounded */
constexpr float kCodePrefix = 8388608.0f;   /* 2^23, whose low bits count ones */
/* Codes are taken for powers from 2^-127 on: exp2_fast makes 0 of the lowest, which are p = 0. */
constexpr float kCodePower = 127;

/* Two neighbours' codes. Above the largest they wrap: the tile is done again. */
__device__ __forceinline__ uint32_t code_pair(float low, float high) {
  constexpr float kZero = kCodeInteger + kCodeFloor * kCodeSteps;
  const float a = fmaf(fmaxf(low, -kCodeFloor), kCodeSteps, kZero);
  const float b = fmaf(fmaxf(high, -kCodeFloor), kCodeSteps, kZero);
  return __byte_perm(__float_as_uint(a), __float_as_uint(b), 0x5410);
}

/* 2^(code / 512 - kCodePower) of one of a pair; the exponent is exact. */
template <int WHICH>
__device__ __forceinline__ float power_of_code(uint32_t pair) {
  const uint32_t bits = __byte_perm(pair, __float_as_uint(kCodePrefix), WHICH ? 0x7432 : 0x7410);
  constexpr float kBase = -kCodePrefix / kCodeSteps - kCodePower;
  return exp2_fast(fmaf(__uint_as_float(bits), 1 / kCodeSteps, kBase));
}

/* Rows of codes, to become dz where they are. */
struct CodeRows {
  void* rows; /* [count][pitch] */
  int64_t pitch;
  int count, vocab;
  const __nv_bfloat16* t;
  int64_t t_pitch;
  product_scratch scratch;       /* k of each */
  const float *lse, *row, *soft; /* STAT_OFFSET, COEF_ROW and COEF_SOFT of each */
  double per_l;                  /* zeta's of one in l */
};

enum { kCodeVec = 8 }; /* of a lane, next to each other */

/* A row's numbers: dz = power_of_code factor - soft t. */
struct CodeRow {
  float factor, soft;
};

/* COEF_ROW is made for exp(l - offset). From zeta - k to that in double, as both may be large; at
 * least one term of the row is near 2^(64 - k), so that 2^above is at most 2^64. */
__device__ __forceinline__ CodeRow open_code_row(const CodeRows& c, int row) {
  const double above = (double)offset_of(c.scratch, row) - (double)c.lse[row] * c.per_l;
  return {c.row[row] * exp2f((float)above + kCodePower - kCodeFloor), c.soft[row]};
}

__device__ __forceinline__ uint32_t dz_pair(const CodeRow& r, uint32_t codes, uint32_t t) {
  const float low = r.soft * __uint_as_float(t << 16);
  const float high = r.soft * __uint_as_float(t & 0xffff0000u);
  return pack_bf16(fmaf(power_of_code<0>(codes), r.factor, -low),
                   fmaf(power_of_code<1>(codes), r.factor, -high));
}

/* dz of SPAN columns of a row, from `first` on, by a warp that has UNROLL vectors of a lane under
 * way. The last vector may reach beyond the vocabulary: into what pads the row. */
template <int SPAN, int UNROLL>
__device__ __forceinline__ void finish_span(const CodeRows& c, int row, int first, int lane) {
  constexpr int kStep = kWarp * kCodeVec;
  const int end = min(first + SPAN, c.vocab);
  const CodeRow r = open_code_row(c, row);
  uint4* codes = (uint4*)((__nv_bfloat16*)c.rows + row * c.pitch);
  const uint4* t = (const uint4*)(c.t + row * c.t_pitch);
  uint4 code[UNROLL], soft[UNROLL];
  const auto load = [&](int u, int column) {
    if (column >= end) return;
    code[u] = __ldcs(codes + column / kCodeVec);
    soft[u] = __ldcs(t + column / kCodeVec);
  };
  int at = first + lane * kCodeVec;
#pragma unroll
  for (int u = 0; u < UNROLL; u++) load(u, at + u * kStep);
  while (at < end) {
#pragma unroll
    for (int u = 0; u < UNROLL && at < end; u++, at += kStep) {
      const uint4 dz =
          make_uint4(dz_pair(r, code[u].x, soft[u].x), dz_pair(r, code[u].y, soft[u].y),
                     dz_pair(r, code[u].z, soft[u].z), dz_pair(r, code[u].w, soft[u].w));
      load(u, at + UNROLL * kStep);
      __stcs(codes + at / kCodeVec, dz);
    }
  }
}

/* dz of all rows, by warp number `warp` of `warps`. */
template <int SPAN, int UNROLL>
__device__ __forceinline__ void finish_codes(const CodeRows& c, int warp, int warps) {
  const int spans = (c.vocab + SPAN - 1) / SPAN;
  for (int span = warp; span < c.count * spans; span += warps) {
    const int row = span / spans;
    finish_span<SPAN, UNROLL>(c, row, (span - row * spans) * SPAN, threadIdx.x % kWarp);
  }
}

#endif
