/* The fused logits GEMM: constants, scratch and parameters that its kernels share. The row pass
 * happens in the GEMM's epilogue, so each tile needs a row's offset before the row's maximum is
 * known: row_offsets.cu takes it from the target's logit, the architecture's logits_gemm.cu makes E
 * and the sums of each tile, tile_statistics.cu adds up the tiles, and a tile that overflowed is
 * computed again from a better offset. Tiles have the sizes of the architecture's row in
 * architectures.h.
 *
 * Notation: log2_l = log2(e) l, and E_ij = 2^(log2_l_ij - k_i) with an integer k_i, so that a
 * change of k_i is exact: every sum keeps all of its digits. */
#ifndef FLCE_CUDA_FUSED_FUSED_LOGITS_CUH
#define FLCE_CUDA_FUSED_FUSED_LOGITS_CUH

#include "cuda/rows/packed_rows.cuh"
#include "cuda/rows/row.cuh"

/* k is this far above the target's log2_l: kAboveTarget where E is written, kAboveTargetForSums
 * where only sums are made. The target is one of the row's terms, so the row's sum cannot vanish.
 * kTileLimit, the largest sum accepted of a tile, leaves room for the sum of 2^30 columns in
 * float32. E keeps what is at least 2^-66 of the target's term; sums alone reach further down, to
 * keep the digits of tiny losses. kAboveTarget is not 64: exponents around 2^-64 differ in seven
 * bits when E crosses it, and so many toggling bits in the GEMMs of dX and dW cost 2 % of a step
 * (benchmarks/NOTES.md, 2026-11-22, exponents). */
constexpr float kAboveTarget = 60, kAboveTargetForSums = 32;
constexpr float kTileLimit = 1152921504606846976.0f; /* 2^60 */
constexpr double kLog2eExact = FLCE_LOG2E;
constexpr float kBlankRow = 3e38f; /* k of a row whose E is all 0: ignored or absent */

/* Scratch of one chunk; its rows are the rows of the GEMM. Arrays [tiles of V][rows] hold one
 * number of each tile and row. They leave the target's column out, except tile_weighted_gaps. In
 * entropy_sums, and with class targets in tile_weighted_gaps, log2_l counts relative to k -
 * kAboveTarget, which is near the target's. */
typedef struct fused_scratch {
  /* [rows] or NULL: how the logits of each row are packed, from find_row_offsets; tile_statistics
   * replaces it in rows that were repeated */
  PackedRow* packing;
  float* offset; /* [rows] k; kBlankRow or NaN for rows that are not valid */
  float* scale;  /* [rows] general kernels: factor from the curve to log2_l */
  float* target; /* [rows] the target's z with its bias; general kernels: its log2_l */
  int* column;   /* [rows] the target's column, -1 for none */
  /* [rows] ordered_of(the largest log2_l) where a tile exceeded the limit, else kNoTop */
  int* top;
  /* [1 + row clusters] flags of the overflow retry: whether any tile needs it, and for each row
   * cluster whether its tiles do */
  int* retry;
  float* sums; /* [tiles of V][rows] sum of 2^(log2_l - k) */
  /* [tiles of V][rows] or NULL: sum of w_j log2_l_j, the target included; with probabilities sum of
   * t_j z_j */
  float* tile_weighted_gaps;
  /* [rows] or NULL: sum of w_j log2_l_j over all columns, not relative, from wsum of flce_rows */
  float* row_weighted_gaps;
  float* weight_sums;  /* [tiles of V][rows] or NULL: sum of t_j */
  float* entropy_sums; /* [tiles of V][rows] or NULL: sum of 2^(log2_l - k) log2_l */
  float* tops;         /* [tiles of V][rows] or NULL: the largest log2_l */
  int* columns;        /* [tiles of V][rows] or NULL: the lowest column that has it */
  float* exp_tops;     /* [tiles of V][rows] or NULL: the largest E, for top_classes */
} fused_scratch;

/* Parameters of the three kernels. kGeneral and kScaled read scratch.scale, kGeneral alone
 * inner_scale, curve and class_weight. */
typedef struct fused_params {
  int rows, vocab, hidden;
  int columns;  /* columns of the result, zero padding included */
  bool half;    /* x and W are float16; else bfloat16 */
  bool general; /* a factor for each row, z as the result, or an option: kGeneral or kScaled */
  bool scaled;  /* kScaled may replace kGeneral where z or packed logits are written */
  float scale;  /* not general: log2_l = scale z */
  /* general: log2_l = scratch.scale curve(inner_scale z) */
  flce_curve curve;
  float inner_scale;
  const float* bias;
  const float* class_weight;
  const int64_t* index;      /* flce_rows.index */
  const void* probabilities; /* flce_rows.probabilities (t), or NULL */
  flce_dtype probabilities_dtype;
  int64_t probabilities_pitch;
} fused_params;

/* What the epilogue writes: nothing, E in bfloat16, E and exp_tops, z with the bias added in
 * float32, or the packed logits of student and teacher in place of the teacher's z. */
enum FusedResult {
  kNoResult,
  kExpResult,
  kExpTopsResult,
  kLogitResult,
  kPackedResult,
  kFusedResults
};

__host__ __device__ constexpr bool stores_exp(FusedResult result) {
  return result == kExpResult || result == kExpTopsResult;
}

/* Maps a float to an int of the same order, for atomicMax. */
__device__ __forceinline__ int ordered_of(float value) {
  const int bits = __float_as_int(value);
  return bits >= 0 ? bits : bits ^ 0x7fffffff;
}
/* Initial value of scratch.top: below every float. */
constexpr int kNoTop = INT32_MIN;

/* k of a row: the one it began with, or, after a tile overflowed, its largest log2_l. */
__device__ __forceinline__ float offset_from(float offset, int top) {
  if (top == kNoTop) return offset;
  const float value = __int_as_float(top >= 0 ? top : top ^ 0x7fffffff);
  return value > -INFINITY ? rintf(value) : offset;
}

__device__ __forceinline__ float offset_of(const fused_scratch& s, int row) {
  return offset_from(s.offset[row], s.top[row]);
}

/* The limit where logits are packed: log2_l - k is then at most 15, and PackedRow.above at most
 * 48.5, so that no p 2^-C exceeds kPackedLimit. */
constexpr float kPackedTileLimit = 32768; /* 2^15 */

/* How a row is packed after its tiles have exceeded the limit: k is its largest log2_l, which is at
 * most log2(V) below its logsumexp, and C at most that. */
__device__ __forceinline__ PackedRow packed_row_from(PackedRow row, float k, int top) {
  if (top == kNoTop) return row;
  row.k = k;
  row.above = 0;
  row.difference = (k - row.teacher_k) - row.log_sum;
  return row;
}

/* log2_l of a logit in the general kernels; `scale` is scratch.scale of its row. */
__device__ __forceinline__ float general_log2_logit(const fused_params& params, float scale,
                                                    float z) {
  return scale * capped<true>(params.curve, params.inner_scale, z);
}

/* fused_logits.cu: divides the scratch, which has facts.fused_row_bytes for each row. */
fused_scratch fused_scratch_of(void* memory, const flce_logits_gemm_sizes* sizes,
                               const flce_rows* rows);

/* Column tiles of the vocabulary. */
static inline int64_t tiles_of(const flce_logits_gemm_sizes* sizes, int64_t vocab) {
  return ceil_div(vocab, sizes->tile_columns);
}

/* row_offsets.cu: offset, scale and target column of each row and, with a teacher, how it is
 * packed, into `scratch`; clears top and retry. */
flce_status launch_row_offsets(void* self, const flce_logits_gemm_sizes* sizes,
                               const flce_gemm* gemm, const flce_rows* rows,
                               const fused_params* params, const fused_scratch* scratch);
/* row_offsets.cu: the same where the rows' statistics are known, for fused_exp. */
flce_status launch_known_offsets(void* self, const flce_logits_gemm_sizes* sizes,
                                 const flce_rows* rows, const fused_params* params,
                                 const fused_scratch* scratch);
/* tile_statistics.cu: from the sums of `tiles` tiles the statistics and losses of the rows and,
 * unless `coef` is NULL, their gradient factors. */
flce_status launch_tile_statistics(void* self, int64_t tiles, const flce_rows* rows,
                                   const fused_params* params, const fused_scratch* scratch,
                                   const void* factor, void* coef);

#endif
