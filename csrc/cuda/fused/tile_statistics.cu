/* Runs after the fused logits GEMM: adds up the sums of a row's tiles and makes its statistics,
 * loss, prediction and gradient factors. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/fused/fused_logits.cuh"
#include "cuda/rows/row_coefficients.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/rows/statistics.cuh"

enum { kSumRows = 32, kSumWarps = 32, kSumBatch = 8 };

constexpr double kLn2 = 0.69314718055994531;

/* Like end_of (rows/statistics.cuh), but with an integer offset in base 2: 2^k is exact where
 * exp(c) is not. `above` is the target's log2_l minus k, `l` the target's l, `rest` the sum over
 * the other columns of 2^(log2_l - k). */
__device__ __forceinline__ RowEnd<float> end_of_fused_row(float above, float l, float k,
                                                          float rest) {
  RowEnd<float> end;
  /* A target with l = +inf would look like one of probability 1. Eager gives NaN. */
  end.exp_target = l == INFINITY ? NAN : exp2f(above);
  end.sum = rest + end.exp_target;
  end.log_sum = logf(end.sum);
  const float ratio = rest / end.exp_target;
  const bool direct = end.exp_target >= smallest_normal(l) && ratio < INFINITY;
  end.nll = direct ? log1pf(ratio) : (float)kLn2 * (log2f(end.sum) - above);
  end.lse = isfinite(l) ? l + end.nll : fmaf(k, (float)kLn2, end.log_sum);
  return end;
}

/* The per-tile sums that a block adds up, by their arrays in fused_scratch; a NULL array counts as
 * 0. */
enum TileNumber { kRest, kWeightedGap, kWeightSum, kEntropySum, kTileNumbers };

/* Partial sums of a block, [warps][rows]: each warp adds every kSumWarps-th tile. */
typedef double TileParts[kTileNumbers][kSumWarps][kSumRows];

__device__ __forceinline__ void add_tiles(const float* numbers, int rows, int row, int tiles,
                                          double (&parts)[kSumWarps][kSumRows]) {
  if (!numbers) return;
  const int warp = threadIdx.x / kSumRows;
  double sum = 0;
  for (int first = warp; first < tiles; first += kSumWarps * kSumBatch) {
    /* all loads are in flight before the first addition; no branch, so tiles past the end are
     * loaded clamped */
    float part[kSumBatch];
#pragma unroll
    for (int b = 0; b < kSumBatch; b++) {
      const int tile = min(first + b * kSumWarps, tiles - 1);
      part[b] = numbers[(int64_t)tile * rows + min(row, rows - 1)];
    }
#pragma unroll
    for (int b = 0; b < kSumBatch; b++) sum += first + b * kSumWarps < tiles ? (double)part[b] : 0;
  }
  parts[warp][threadIdx.x % kSumRows] = sum;
}

/* Called by the thread of the first warp that has the row. */
__device__ __forceinline__ double total_of(const float* numbers,
                                           const double (&parts)[kSumWarps][kSumRows]) {
  double sum = 0;
  for (int warp = 0; numbers && warp < kSumWarps; warp++) sum += parts[warp][threadIdx.x];
  return sum;
}

/* The largest log2_l of a row's tiles. One thread loops over all tiles: predictions are requested
 * too rarely to do better. */
__device__ __forceinline__ Best<float> best_of_tiles(const fused_scratch& s, int rows, int row,
                                                     int tiles) {
  Best<float> best = no_best<float>();
  for (int tile = 0; tile < tiles; tile++) {
    const int64_t at = (int64_t)tile * rows + row;
    best = better_of(best, Best<float>{s.tops[at], s.columns[at]});
  }
  return best;
}

/* A row's sums over all tiles; `rest` leaves the target out. */
struct TileSums {
  double rest, weighted_gap, weight_sum, entropy_sum;
};

/* Converts the sums over log2_l to sums over l, and changes their reference to the target's l, or
 * to 0 where that is not finite. `reference` is the log2_l to which the tiles' sums are relative.
 */
__device__ __forceinline__ void set_references(const row_args& p, const fused_scratch& s,
                                               float reference, float l_target,
                                               const TileSums& tiles, RowSums<float>& sums) {
  const double total = (double)((const float*)p.r.scalars)[FLCE_SCALAR_WEIGHT_TOTAL];
  const float from = isfinite(l_target) ? l_target : 0;
  const double above = (double)from - kLn2 * (double)reference;
  sums.weighted_gap_from = sums.entropy_sum_from = from;
  if (s.tile_weighted_gaps) sums.weighted_gap = (float)(above * total - kLn2 * tiles.weighted_gap);
  if (s.row_weighted_gaps)
    sums.weighted_gap = (float)((double)from * total - kLn2 * tiles.weighted_gap);
  if (s.entropy_sums)
    sums.entropy_sum = (float)(kLn2 * tiles.entropy_sum - above * (double)sums.rest);
}

/* Statistics of a row with probabilities; its sums are relative to lse itself. lse and the sum of t
 * z are made from the same z with the same scale, because in a row that is all but certain they
 * cancel to nearly nothing. */
__device__ __forceinline__ RowStatistics<float> write_soft_row(const row_args& p,
                                                               const Row<float>& view, int64_t at,
                                                               float scale, float k,
                                                               const TileSums& tiles) {
  const double unit = (double)p.scale_f32 / (double)scale; /* l per unit of log2_l */
  const double lse = unit * ((double)k + log2(tiles.rest));
  RowSums<float> sums = {};
  RowEnd<float> end = {};
  end.lse = sums.offset = sums.weighted_gap_from = (float)lse;
  end.log_sum = (float)(lse - (double)end.lse);
  end.sum = expf(end.log_sum);
  sums.weight_sum = (float)tiles.weight_sum;
  sums.weighted_gap =
      (float)((double)end.lse * tiles.weight_sum - (double)p.scale_f32 * tiles.weighted_gap);
  return write_statistics<kGeneral>(p, view, at, sums, end);
}

/* What a row's statistics need in addition to its sums: its position in the per-row vectors, its
 * target there, and its entries of fused_scratch. */
struct FusedRow {
  int64_t at, y;
  int column, top;
  float offset, target;
};

/* Only loads, no branch on their values: they are in flight while the tiles are summed. */
__device__ __forceinline__ FusedRow open_fused_row(const flce_rows& r, const fused_scratch& s,
                                                   int row) {
  const int64_t at = vectors_at(r, row);
  return {at, target_at(r, at), s.column[row], s.top[row], s.offset[row], s.target[row]};
}

/* Statistics of a valid row from its tiles' sums. Called by one thread. */
template <Kind KIND>
__device__ __forceinline__ RowStatistics<float> finish_row(const row_args& p,
                                                           const fused_params& params,
                                                           const fused_scratch& s, int row,
                                                           const FusedRow& own, int tiles,
                                                           TileSums& sum) {
  constexpr bool kIsGeneral = KIND == kGeneral;
  if (KIND != kPlain && s.row_weighted_gaps) sum.weighted_gap = s.row_weighted_gaps[row];
  const float k = offset_from(own.offset, own.top);
  if (kIsGeneral && s.packing) s.packing[row] = packed_row_from(s.packing[row], k, own.top);
  Row<float> view = {};
  view.class_weight = (const float*)p.r.class_weight;
  view.target = own.column;
  if constexpr (KIND == kSoft) {
    return write_soft_row(p, view, own.at, params.scale, k, sum);
  }
  view.l_target = kIsGeneral ? own.target * (float)kLn2 : p.scale_f32 * own.target;
  const float above = kIsGeneral ? own.target - k : fmaf(own.target, params.scale, -k);
  RowSums<float> sums = {};
  sums.offset = k * (float)kLn2;
  sums.rest = (float)sum.rest;
  if constexpr (kIsGeneral) {
    view.curve = params.curve;
    view.outer_scale = s.scale[row] * (float)kLn2;
  }
  if constexpr (KIND != kPlain) {
    set_references(p, s, k - kAboveTarget, view.l_target, sum, sums);
  }
  if (kIsGeneral && s.tops) {
    Best<float> best = best_of_tiles(s, params.rows, row, tiles);
    best.value *= (float)kLn2;
    p.r.predictions[own.at] = prediction_of(view, best);
  }
  const RowEnd<float> end = end_of_fused_row(above, view.l_target, k, sums.rest);
  return write_statistics<KIND>(p, view, own.at, sums, end);
}

/* One block for kSumRows rows: a lane for each row, the tiles divided among the warps, the end of a
 * row by one thread of the first warp. `coef` NULL: no gradient factors. */
template <Kind KIND>
__global__ void __launch_bounds__(kSumRows* kSumWarps, 1)
    tile_statistics(const __grid_constant__ row_args p, const fused_params params,
                    const fused_scratch s, int tiles, const float* factor, float* coef) {
  __shared__ TileParts parts;
  pdl_wait();
  const int row = blockIdx.x * kSumRows + threadIdx.x % kSumRows;
  FusedRow own = {};
  if (threadIdx.x < kSumRows) own = open_fused_row(p.r, s, min(row, params.rows - 1));
  const float unit = coef ? factor[0] : 0;
  const float* numbers[kTileNumbers] = {s.sums, s.tile_weighted_gaps, s.weight_sums,
                                        s.entropy_sums};
#pragma unroll
  for (int n = 0; n < kTileNumbers; n++) add_tiles(numbers[n], params.rows, row, tiles, parts[n]);
  __syncthreads();
  if (threadIdx.x >= kSumRows || row >= params.rows) return;
  TileSums sum = {
      total_of(s.sums, parts[kRest]), total_of(s.tile_weighted_gaps, parts[kWeightedGap]),
      total_of(s.weight_sums, parts[kWeightSum]), total_of(s.entropy_sums, parts[kEntropySum])};
  const RowRef ref = row_ref_at(p.r, own.at, own.y);
  if (ref.kind == kRowAbsent) return;
  RowStatistics<float> stats = {};
  if (ref.kind == kRowValid) {
    stats = finish_row<KIND>(p, params, s, row, own, tiles, sum);
  } else {
    write_blank(p.r, ref.at, blank_of<float>(ref));
  }
  if (coef) write_coefficients<float>(p.r, flce_upstream{}, ref, stats, unit, p.scale_f32, coef);
}

flce_status launch_tile_statistics(void* self, int64_t tiles, const flce_rows* r,
                                   const fused_params* params, const fused_scratch* s,
                                   const void* factor, void* coef) {
  const unsigned blocks = (unsigned)ceil_div(r->rows, kSumRows);
  const auto kernel = params->probabilities  ? tile_statistics<kSoft>
                      : params->general      ? tile_statistics<kGeneral>
                      : s->row_weighted_gaps ? tile_statistics<kSmooth>
                                             : tile_statistics<kPlain>;
  return launch_dependent(self, kernel, blocks, kSumRows * kSumWarps, "tile_statistics",
                          make_args(r), *params, *s, (int)tiles, (const float*)factor,
                          (float*)coef);
}
