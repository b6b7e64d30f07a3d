/* Logits product and row pass in one: what its kernels share. E_ij = 2^(zeta_ij - k_i), with log2_l
 * = log2(e) l and an integer k_i, so that every sum keeps all of its digits when k_i changes. */
#ifndef FLCE_CUDA_SM90_FUSED_LOGITS_CUH
#define FLCE_CUDA_SM90_FUSED_LOGITS_CUH

#include "cuda/rows/row.cuh"

/* k lies this far above the target's log2_l. The target is one of the row's terms, so no sum can
 * vanish; what a tile of the product may come to leaves room for the sum of 2^30 columns. E keeps
 * what is 2^-66 of the target; sums alone look further down, to keep the digits of tiny losses. Not
 * 64: exponents around 2^-64 differ in seven bits where E crosses it, and what toggles so much in
 * the products of dX and dW costs 2 % of a step (benchmarks/NOTES.md, 2026-11-22, exponents). */
constexpr float kAboveTarget = 60, kAboveTargetForSums = 32;
constexpr float kTileLimit = 1152921504606846976.0f; /* 2^60 */
constexpr double kLog2eExact = 1.4426950408889634;
constexpr float kBlankRow = 3e38f; /* the k of a row without E: all are 0 */

enum {
  kTileRows = 128,              /* of a tile: tokens */
  kTileColumns = 192,           /* and classes */
  kClusterRows = 2 * kTileRows, /* of the two tiles that share W's part */
};

/* The scratch of one chunk, whose rows are those of the product. A tile's numbers are those of its
 * columns without the target; log2_l is taken from k - kAboveTarget, which is near the target's. */
typedef struct fused_scratch {
  float* offset; /* [rows] k */
  float* scale;  /* [rows] general: what makes log2_l of z, or of the softcap's tanh */
  float* target; /* [rows] the target's z, its bias added; general: its log2_l */
  int* column;   /* [rows] the target, -1 for none */
  int* top;      /* [rows] ordered_of the largest log2_l where a tile went beyond its limit */
  int* redo;     /* [1 + clusters] whether any, and which kClusterRows have such rows */
  float* sums;   /* [tiles of V][rows] of 2^(log2_l - k); so are the next, each of them or NULL */
  float* weighted_gaps; /* of w_j zeta_j, the target included; of probabilities, of t_j z_j; or */
  float* weighted_gap;  /* [rows] that of all columns from 0, with flce_rows' wsum; or NULL */
  float* weight_sums;   /* of t_j */
  float* entropy_sums;  /* of 2^(log2_l - k) log2_l */
  float* tops;          /* the largest log2_l, */
  int* columns;         /* and its lowest column */
} fused_scratch;

typedef struct fused_params {
  int rows, vocab, hidden;
  int columns;       /* of the result, zero-padding included */
  bool half;         /* x and W are float16, else bfloat16 */
  bool general;      /* scratch.scale is read; the rest is the general kernel's */
  float scale;       /* log2_l = scale z where that is not */
  float inner_scale; /* log2_l = scratch.scale tanh(inner_scale z); 0: log2_l = scratch.scale z */
  const float* bias;
  const float* class_weight;
  const int64_t* index;      /* of flce_rows */
  const void* probabilities; /* t of flce_rows, or NULL */
  flce_dtype probabilities_dtype;
  int64_t probabilities_pitch;
} fused_params;

/* Where the product puts what it has made of each logit: nowhere, or E, or z with the bias added.
 */
enum FusedResult { kNoResult, kExpResult, kLogitResult };

/* Integers in the order of the floats, for atomicMax. */
__device__ __forceinline__ int ordered_of(float value) {
  const int bits = __float_as_int(value);
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}
constexpr int kNoTop = INT32_MIN;

/* k of a row, of its numbers in fused_scratch: of its largest term, once that is known. */
__device__ __forceinline__ float offset_from(float offset, int top) {
  if (top == kNoTop) return offset;
  const float value = __int_as_float(top >= 0 ? top : top ^ 0x7fffffff);
  return value > -INFINITY ? rintf(value) : offset;
}

__device__ __forceinline__ float offset_of(const fused_scratch& s, int row) {
  return offset_from(s.offset[row], s.top[row]);
}

__device__ __forceinline__ float general_log2_logit(const fused_params& shape, float scale,
                                                    float z) {
  return scale * (shape.inner_scale != 0 ? tanh_of<true>(shape.inner_scale * z) : z);
}

/* x W^T -> the tiles' numbers and `out`, which is [rows][pitch] of float32 for z, else of 16 bits,
 * by wgmma. `repeat` does again, with the offsets of `top`, what an earlier call has found to be
 * beyond its limit; it costs nothing else. z, which knows no offset, is not made again. */
flce_status launch_logits_gemm_sm90(void* stream, int device, const fused_params* shape,
                                    const fused_scratch* scratch, const void* x, const void* w,
                                    FusedResult result, void* out, int64_t pitch, bool repeat);

static inline int64_t tiles_of(int64_t vocab) {
  return ceil_div(vocab, kTileColumns);
}

/* row_offsets.cu: offsets, scales and targets of the rows, into `scratch`. */
flce_status launch_row_offsets(void* self, const flce_gemm* gemm, const flce_rows* rows,
                               const fused_params* shape, const fused_scratch* scratch);
/* tile_statistics.cu: statistics, losses and, unless `coef` is NULL, the rows' factors, from the
 * tiles' numbers. */
flce_status launch_tile_statistics(void* self, const flce_rows* rows, const fused_params* shape,
                                   const fused_scratch* scratch, const void* factor, void* coef);

#endif
