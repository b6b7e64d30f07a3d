/* Runs before the fused logits GEMM: finds the offset k of each row (fused_logits.cuh) from the
 * logit of its target, or, if the targets are probabilities, from the logits of a few columns. It
 * also clears the flags for a retry. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/reductions.cuh"
#include "cuda/fused/fused_logits.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/rows/statistics.cuh"

enum { kDotWarps = 8, kProbes = 4 };

/* COUNT dot products of one row of x with w, w + step, w + 2 step ..., each over `hidden`
 * elements. Called by a warp; every lane gets the sums. w points into W, or is wsum = sum_j w_j
 * W_j (step 0). */
template <int COUNT, typename X, typename T>
__device__ __forceinline__ void dot_rows(const X* x, const T* w, int64_t step, int hidden, int lane,
                                         float (&sums)[COUNT]) {
  constexpr int N = kVec<X>;
#pragma unroll
  for (int c = 0; c < COUNT; c++) sums[c] = 0;
  for (int at = lane * N; at < hidden; at += kWarp * N) {
    Vec<X, N> raw_x;
    Vec<T, N> raw_w[COUNT];
    load_vec<false>(x + at, raw_x);
#pragma unroll
    for (int c = 0; c < COUNT; c++) load_vec<false>(w + c * step + at, raw_w[c]);
    float a[N], b[N];
    unpack(raw_x, a);
#pragma unroll
    for (int c = 0; c < COUNT; c++) {
      unpack(raw_w[c], b);
#pragma unroll
      for (int e = 0; e < N; e++) sums[c] = fmaf(a[e], b[e], sums[c]);
    }
  }
#pragma unroll
  for (int c = 0; c < COUNT; c++) sums[c] = warp_sum(sums[c]);
}

/* k of a row whose target has l = -inf, which says nothing about the other columns. From this k a
 * tile's sum is either 0 or above kTileLimit, and then the tile is repeated. */
constexpr float kUnknownOffset = -3e38f;

/* The largest log2_l of COUNT columns of a row: first, first + step, ... A NaN is passed on. COUNT
 * is 1 for a class target, and kProbes columns spread over the vocabulary for probabilities. Called
 * by a warp. */
template <int COUNT, typename X>
__device__ __forceinline__ float top_log2_logit(const fused_params& params, float scale, const X* x,
                                                const X* w, int64_t first, int step, int lane) {
  float z[COUNT], top = -INFINITY;
  dot_rows(x, w + first * params.hidden, (int64_t)step * params.hidden, params.hidden, lane, z);
#pragma unroll
  for (int c = 0; c < COUNT; c++) {
    if (params.bias) z[c] += params.bias[first + c * step];
    const float log2_l = general_log2_logit(params, scale, z[c]);
    if (!(log2_l <= top)) top = log2_l;
  }
  return top;
}

/* A teacher's fused_logits, whose statistics are complete. z, sums, offset and top are by row of
 * the chunk, inv_sum and temperature by token. `scale` as of find_row_offsets. */
struct TeacherRows {
  const float* z; /* [rows][pitch]; pitch 0: no teacher */
  int64_t pitch;
  const float* sums; /* [tiles][rows] */
  const float* offset;
  const int* top;
  const float *inv_sum, *temperature;
  float scale;
  int tiles, tile_columns;
};

/* A class of nearly the largest q: the largest of the tile with the largest sum, or the target,
 * which the sums leave out. Called by a warp. */
__device__ __forceinline__ int likely_class(const TeacherRows& t, const fused_params& params,
                                            int row, int target, int lane) {
  Best<float> tile = {-1, 0};
  for (int i = lane; i < t.tiles; i += kWarp) {
    tile = better_of(tile, Best<float>{t.sums[(int64_t)i * params.rows + row], i});
  }
  const int first = warp_best(tile).column * t.tile_columns;
  const float* z = t.z + row * t.pitch;
  Best<float> best = {z[target], target};
  for (int i = first + lane; i < min(first + t.tile_columns, params.vocab); i += kWarp) {
    best = better_of(best, Best<float>{z[i], i});
  }
  return warp_best(best).column;
}

/* How a row is packed: C is log2(p / q) of `column`, of which log2_l is the student's; k: the row's
 * offset. */
__device__ __forceinline__ PackedRow open_packed_row(const TeacherRows& t, int64_t row, int64_t at,
                                                     int column, float log2_l, float k) {
  PackedRow packed = {};
  packed.scale = t.temperature ? t.scale / t.temperature[at] : t.scale;
  packed.teacher_k = offset_from(t.offset[row], t.top[row]);
  packed.log_sum = -log2f(t.inv_sum[at]);
  packed.k = k;
  /* Of a class with q below 2^-32, log2(p / q) would move the p of others out of range. */
  const float log2_q =
      (packed.scale * t.z[row * t.pitch + column] - packed.teacher_k) - packed.log_sum;
  packed.above = fmaxf(log2_q, -kPackedLimit / 2) - (log2_l - k);
  if (!isfinite(packed.above)) packed.above = 0; /* kUnknownOffset: the row is repeated */
  packed.difference = (float)((double)k - packed.above - packed.teacher_k - packed.log_sum);
  return packed;
}

/* One warp for each row. `scale` is the factor of general_log2_logit before a temperature of the
 * row's own. */
template <typename X>
__global__ void __launch_bounds__(kDotWarps* kWarp)
    find_row_offsets(const __grid_constant__ flce_rows r, const fused_params params,
                     const fused_scratch s, const TeacherRows t, int cluster_rows, float scale,
                     const X* x, const X* w) {
  pdl_wait();
  const int lane = threadIdx.x % kWarp;
  const int row = blockIdx.x * kDotWarps + threadIdx.x / kWarp;
  if (blockIdx.x == 0) {
    const int clusters = (params.rows + cluster_rows - 1) / cluster_rows;
    for (int i = threadIdx.x; i <= clusters; i += blockDim.x) s.retry[i] = 0;
  }
  if (row >= params.rows) return;
  const RowRef ref = row_ref_of(r, row);
  float offset = ref.kind == kRowOutOfRange ? NAN : kBlankRow;
  int column = -1;
  if (r.temperature && ref.at >= 0) scale /= ((const float*)r.temperature)[ref.at];
  if (ref.kind == kRowValid) {
    const X* own = x + (int64_t)row * params.hidden;
    if (r.target) column = (int)r.target[ref.at];
    const float log2_l =
        column < 0 ? top_log2_logit<kProbes>(params, scale, own, w, 0, params.vocab / kProbes, lane)
                   : top_log2_logit<1>(params, scale, own, w, column, 0, lane);
    offset = log2_l == -INFINITY ? kUnknownOffset
                                 : rintf(log2_l) + (r.out ? kAboveTarget : kAboveTargetForSums);
    if (t.pitch > 0) {
      const int likely = likely_class(t, params, row, column, lane);
      const float other = top_log2_logit<1>(params, scale, own, w, likely, 0, lane);
      if (other > log2_l) offset = rintf(other) + kAboveTargetForSums;
      /* kPackedTileLimit allows for a target that exceeds the likely class by 2^16. */
      const bool by_target = log2_l - other > 16;
      const PackedRow packed = open_packed_row(t, row, ref.at, by_target ? column : likely,
                                               by_target ? log2_l : other, offset);
      if (lane == 0) s.packing[row] = packed;
    }
    if (s.row_weighted_gaps) {
      float sum[1];
      dot_rows(own, (const float*)r.wsum, 0, params.hidden, lane, sum);
      if (lane == 0) s.row_weighted_gaps[row] = scale * sum[0];
    }
  }
  if (lane != 0) return;
  if (t.pitch > 0 && ref.kind != kRowValid) s.packing[row] = PackedRow{};
  s.offset[row] = offset;
  s.scale[row] = scale;
  s.column[row] = column;
  s.top[row] = kNoTop;
}

template <typename X>
static flce_status launch_offsets(void* self, const flce_logits_gemm_sizes* sizes,
                                  const flce_gemm* g, const flce_rows* r,
                                  const fused_params* params, const fused_scratch* s) {
  const unsigned blocks = (unsigned)ceil_div(r->rows, kDotWarps);
  TeacherRows t = {};
  if (r->teacher) {
    const row_args other = make_args(&r->teacher->rows);
    const fused_scratch scratch = fused_scratch_of(r->teacher->scratch, sizes, &r->teacher->rows);
    t.z = (const float*)r->teacher->gemm.c;
    t.pitch = r->teacher->gemm.pitch_c;
    t.sums = scratch.sums;
    t.offset = scratch.offset;
    t.top = scratch.top;
    t.inv_sum = (const float*)other.r.stats + FLCE_STAT_INV_SUM * other.r.stat_pitch;
    t.temperature = (const float*)other.r.temperature;
    t.scale = (float)(other.outer_scale * kLog2eExact);
    t.tiles = (int)tiles_of(sizes, r->vocab);
    t.tile_columns = (int)sizes->tile_columns;
  }
  return launch_dependent(self, find_row_offsets<X>, blocks, kDotWarps * kWarp, "find_row_offsets",
                          *r, *params, *s, t, (int)sizes->cluster_rows, params->scale,
                          (const X*)g->a, (const X*)g->b);
}

/* A thread for each row. */
__global__ void __launch_bounds__(kDotWarps* kWarp)
    take_known_offsets(const __grid_constant__ flce_rows r, const fused_params params,
                       const fused_scratch s, int cluster_rows, float scale) {
  pdl_wait();
  const int row = blockIdx.x * blockDim.x + threadIdx.x;
  if (row >= params.rows) return;
  if (row % cluster_rows == 0) s.retry[1 + row / cluster_rows] = 0;
  if (row == 0) s.retry[0] = 0;
  const RowRef ref = row_ref_of(r, row);
  float offset = ref.kind == kRowOutOfRange ? NAN : kBlankRow;
  if (ref.kind == kRowValid) offset = stat_row<float>(r, FLCE_STAT_OFFSET)[ref.at] * kLog2e;
  if (r.temperature && ref.at >= 0) scale /= ((const float*)r.temperature)[ref.at];
  s.offset[row] = offset;
  s.scale[row] = scale;
  int64_t column = -1;
  if (ref.kind == kRowValid && r.target) column = r.target[ref.at] - r.earlier_classes;
  s.column[row] = column >= 0 && column < r.vocab ? (int)column : -1;
  s.top[row] = kNoTop;
}

flce_status launch_known_offsets(void* self, const flce_logits_gemm_sizes* sizes,
                                 const flce_rows* r, const fused_params* params,
                                 const fused_scratch* s) {
  const int threads = kDotWarps * kWarp;
  return launch_dependent(self, take_known_offsets, (unsigned)ceil_div(r->rows, threads), threads,
                          "take_known_offsets", *r, *params, *s, (int)sizes->cluster_rows,
                          params->scale);
}

flce_status launch_row_offsets(void* self, const flce_logits_gemm_sizes* sizes, const flce_gemm* g,
                               const flce_rows* r, const fused_params* params,
                               const fused_scratch* s) {
  const auto launch = params->half ? launch_offsets<__half> : launch_offsets<__nv_bfloat16>;
  return launch(self, sizes, g, r, params, s);
}
