/* Logits product and row pass in one: what its kernels share. E_ij = 2^(s z_ij - k_i), with s =
 * log2(e) logit_scale / temperature and an integer k_i, so that every sum keeps all of its digits
 * when k_i changes. */
#ifndef FLCE_CUDA_PRODUCT_ROWS_CUH
#define FLCE_CUDA_PRODUCT_ROWS_CUH

#include "common.cuh"

/* k lies this far above the target's s z. The target is one of the row's terms, so no sum can
 * vanish; what a tile of the product may come to leaves room for the sum of 2^30 columns. E keeps
 * what is 2^-62 of the target; sums alone look further down, to keep the digits of tiny losses. */
constexpr float kAboveTarget = 64, kAboveTargetForSums = 32;
constexpr float kTileLimit = 1152921504606846976.0f; /* 2^60 */
constexpr float kBlankRow = 3e38f;                   /* the k of a row without E: all are 0 */

enum {
  kProductRows = 128,                     /* of a tile: tokens */
  kProductColumns = 192,                  /* and classes */
  kProductClusterRows = 2 * kProductRows, /* of the two tiles that share W's part */
};

/* The scratch of one chunk, whose rows are those of the product. */
typedef struct product_scratch {
  float* offset; /* [rows] k */
  int* column;   /* [rows] the target, -1 for none */
  float* target; /* [rows] z of the target, its bias added */
  int* top;      /* [rows] ordered_of the largest s z where a tile went beyond its limit */
  int* redo;     /* [1 + clusters] whether any, and which kProductClusterRows have such rows */
  float* sums;   /* [tiles of V][rows] of E without the target */
} product_scratch;

typedef struct product_shape {
  int rows, vocab, hidden;
  float scale; /* s */
} product_shape;

/* Integers in the order of the floats, for atomicMax. */
__device__ __forceinline__ int ordered_of(float value) {
  const int bits = __float_as_int(value);
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}
constexpr int kNoTop = INT32_MIN;

/* k of a row: of its largest term, once that is known. */
__device__ __forceinline__ float offset_of(const product_scratch& s, int row) {
  const int top = s.top[row];
  if (top == kNoTop) return s.offset[row];
  const float value = __int_as_float(top >= 0 ? top : top ^ 0x7fffffff);
  return value > -INFINITY ? rintf(value) : s.offset[row];
}

/* x W^T -> E (unless e is NULL) and the rows' sums, by wgmma. `repeat` does again, with the offsets
 * of `top`, what an earlier call has found to be beyond its limit; it costs nothing else. */
flce_status launch_product_sm90(void* stream, int device, const product_shape* shape,
                                const product_scratch* scratch, const void* x, const void* w,
                                const float* bias, void* e, int64_t e_pitch, bool repeat);

#endif
