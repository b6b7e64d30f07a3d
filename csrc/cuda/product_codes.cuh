/* What becomes of logits between the fused product and dz where the targets are bfloat16
 * probabilities: zeta - k in 16 bits, in the place of dz. A code is a multiple of 2^-9, which
 * rounds the logit by 2^-10 ln 2 = 7e-4 at the most, and p is the softmax of logits so rounded: its
 * error is at most 7e-4 p (1 - p) for the own logit's rounding, and nothing is left of it in rows
 * that are certain of a class. */
#ifndef FLCE_CUDA_PRODUCT_CODES_CUH
#define FLCE_CUDA_PRODUCT_CODES_CUH

#include "product_rows.cuh"

/* Code 0 is 96 below k or less: k is 60 above the largest logit that was looked at, or at the row's
 * largest, so that it stands for 2^-36 of the row's largest term at the most. */
constexpr float kCodeSteps = 512, kCodeFloor = 96;
/* Of a tile's sum: no term below it is beyond the largest code, 32 above k. */
constexpr float kCodeLimit = 2147483648.0f;
/* 1.5 2^23, to which what is added is rounded, and there the code 0. */
constexpr float kCodeZero = 12582912.0f + kCodeFloor * kCodeSteps;
constexpr float kCodePrefix = 8388608.0f; /* 2^23, whose low bits count ones */
/* Codes are taken for powers from 2^-127 on: exp2_fast makes 0 of the lowest, which are p = 0. */
constexpr float kCodePower = 127;

/* zeta - k as a float whose low 16 bits are its code. Above the largest they wrap: the tile is done
 * again. */
__device__ __forceinline__ float code_of(float above) {
  return fmaf(fmaxf(above, -kCodeFloor), kCodeSteps, kCodeZero);
}

/* 2^(zeta - k) as such a float has it; the exponent is exact. */
__device__ __forceinline__ float coded_exp(float code) {
  return exp2_fast(fmaf(code, 1 / kCodeSteps, -kCodeZero / kCodeSteps));
}

__device__ __forceinline__ uint32_t pack_codes(float low, float high) {
  return __byte_perm(__float_as_uint(low), __float_as_uint(high), 0x5410);
}

/* 2^(code / 512 - kCodePower) of one of a pair; the exponent is exact here too, and the mantissa is
 * that of coded_exp. */
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
  int columns; /* of rows, zero-padding included */
  const __nv_bfloat16* t;
  int64_t t_pitch;
  const float* sums;                 /* of coded_exp, of each */
  const float *inv_sum, *row, *soft; /* STAT_INV_SUM, COEF_ROW and COEF_SOFT of each */
  float unit;                        /* that dz is held in */
};

enum { kCodeVec = 8 }; /* of a lane, next to each other */

/* A row's numbers: dz = power_of_code factor - soft t. */
struct CodeRow {
  float factor, soft;
};

/* The sum is at least 2^-65, of a logit that was looked at. */
__device__ __forceinline__ CodeRow open_code_row(const CodeRows& c, int row) {
  const float of_p = c.unit * (c.row[row] / c.inv_sum[row]);
  constexpr float kScale = 0x1p31f; /* 2^(kCodePower - kCodeFloor) */
  return {of_p * (kScale / c.sums[row]), c.unit * c.soft[row]};
}

__device__ __forceinline__ uint32_t dz_pair(const CodeRow& r, uint32_t codes, uint32_t t) {
  const float low = r.soft * __uint_as_float(t << 16);
  const float high = r.soft * __uint_as_float(t & 0xffff0000u);
  return pack_bf16(fmaf(power_of_code<0>(codes), r.factor, -low),
                   fmaf(power_of_code<1>(codes), r.factor, -high));
}

/* The first `count` of a vector's eight, which may be none, and zeros. */
__device__ __forceinline__ uint4 first_of(uint4 v, int count) {
  uint32_t* pairs = (uint32_t*)&v;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (2 * i >= count) pairs[i] = 0;
    if (2 * i + 1 == count) pairs[i] &= 0xffffu;
  }
  return v;
}

/* dz of SPAN columns of a row, from `first` on, by a warp that has UNROLL vectors of a lane under
 * way. */
template <int SPAN, int UNROLL>
__device__ __forceinline__ void finish_span(const CodeRows& c, int row, int first, int lane) {
  constexpr int kStep = kWarp * kCodeVec;
  const int end = min(first + SPAN, c.columns);
  const CodeRow r = open_code_row(c, row);
  uint4* codes = (uint4*)((__nv_bfloat16*)c.rows + row * c.pitch);
  const uint4* t = (const uint4*)(c.t + row * c.t_pitch);
  uint4 code[UNROLL], soft[UNROLL];
  const auto load = [&](int u, int column) {
    if (column >= end) return;
    code[u] = __ldcs(codes + column / kCodeVec);
    soft[u] = column < c.vocab ? __ldcs(t + column / kCodeVec) : make_uint4(0, 0, 0, 0);
  };
  int at = first + lane * kCodeVec;
#pragma unroll
  for (int u = 0; u < UNROLL; u++) load(u, at + u * kStep);
  while (at < end) {
#pragma unroll
    for (int u = 0; u < UNROLL && at < end; u++, at += kStep) {
      uint4 dz = make_uint4(dz_pair(r, code[u].x, soft[u].x), dz_pair(r, code[u].y, soft[u].y),
                            dz_pair(r, code[u].z, soft[u].z), dz_pair(r, code[u].w, soft[u].w));
      if (at + kCodeVec > c.vocab) dz = first_of(dz, c.vocab - at);
      load(u, at + UNROLL * kStep);
      __stcs(codes + at / kCodeVec, dz);
    }
  }
}

/* dz of all rows, by warp number `warp` of `warps`. */
template <int SPAN, int UNROLL>
__device__ __forceinline__ void finish_codes(const CodeRows& c, int warp, int warps) {
  const int spans = (c.columns + SPAN - 1) / SPAN;
  for (int span = warp; span < c.count * spans; span += warps) {
    const int row = span / spans;
    finish_span<SPAN, UNROLL>(c, row, (span - row * spans) * SPAN, threadIdx.x % kWarp);
  }
}

#endif
