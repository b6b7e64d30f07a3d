/* Logits product and row pass in one: what comes before and after its kernel, and where it serves.
 */
#include "product_rows.cuh"

#include "backend.cuh"
#include "coefficients.cuh"
#include "launch.cuh"
#include "statistics.cuh"

#include <stdlib.h>
#include <string.h>

enum { kDotWarps = 8, kSumRows = 32, kSumWarps = 32, kSumBatch = 8, kProbes = 4 };

constexpr double kLog2eExact = 1.4426950408889634;
constexpr double kLn2 = 0.69314718055994531;

/* ---- before: offsets ---- */

/* x_i . w of COUNT vectors, at each multiple of `step` elements; by a warp. w: of W_y, or of sum_j
 * w_j W_j. */
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

/* Where a target's -inf shows nothing of its row: from this offset a sum goes beyond the limit, or
 * is 0. */
constexpr float kUnknownOffset = -3e38f;

/* The largest zeta of a row's columns 0, step, 2 step ... from `first` on: of its target, as it
 * comes, or of probabilities, which have none, of some. By a warp. */
template <int COUNT, typename X>
__device__ __forceinline__ float top_zeta(const product_shape& shape, float scale, const X* x,
                                          const X* w, int64_t first, int step, int lane) {
  float z[COUNT], top = -INFINITY;
  dot_rows(x, w + first * shape.hidden, (int64_t)step * shape.hidden, shape.hidden, lane, z);
#pragma unroll
  for (int c = 0; c < COUNT; c++) {
    if (shape.bias) z[c] += shape.bias[first + c * step];
    const float zeta = general_zeta(shape, scale, z[c]);
    if (!(zeta <= top)) top = zeta;
  }
  return top;
}

/* `scale` makes zeta of z in rows without a temperature of their own, as general_zeta has it. */
template <typename X>
__global__ void __launch_bounds__(kDotWarps* kWarp)
    place_offsets(const __grid_constant__ flce_rows r, const product_shape shape,
                  const product_scratch s, float scale, const X* x, const X* w) {
  follow_kernels();
  const int lane = threadIdx.x % kWarp;
  const int row = blockIdx.x * kDotWarps + threadIdx.x / kWarp;
  if (blockIdx.x == 0) {
    const int clusters = (shape.rows + kProductClusterRows - 1) / kProductClusterRows;
    for (int i = threadIdx.x; i <= clusters; i += blockDim.x) s.redo[i] = 0;
  }
  if (row >= shape.rows) return;
  const Place place = place_of(r, row);
  float offset = place.kind == kRowOutOfRange ? NAN : kBlankRow;
  int column = -1;
  if (r.temperature && place.at >= 0) scale /= ((const float*)r.temperature)[place.at];
  if (place.kind == kRowValid) {
    const X* own = x + (int64_t)row * shape.hidden;
    if (r.target) column = (int)r.target[place.at];
    const float zeta = column < 0
                           ? top_zeta<kProbes>(shape, scale, own, w, 0, shape.vocab / kProbes, lane)
                           : top_zeta<1>(shape, scale, own, w, column, 0, lane);
    offset = zeta == -INFINITY ? kUnknownOffset
                               : rintf(zeta) + (r.out ? kAboveTarget : kAboveTargetForSums);
    if (s.gap) {
      float sum[1];
      dot_rows(own, (const float*)r.wsum, 0, shape.hidden, lane, sum);
      if (lane == 0) s.gap[row] = scale * sum[0];
    }
  }
  if (lane != 0) return;
  s.offset[row] = offset;
  s.scale[row] = scale;
  s.column[row] = column;
  s.top[row] = kNoTop;
}

/* ---- after: statistics ---- */

/* As end_of, from integer offsets: 2^k is exact where exp(c) is not. `above` is the target's zeta
 * over k. */
__device__ __forceinline__ RowEnd<float> end_of_product(float above, float l, float k, float rest) {
  RowEnd<float> end;
  /* A target of +inf would look like a certain one; eager gives NaN. */
  end.exp_target = l == INFINITY ? NAN : exp2f(above);
  end.sum = rest + end.exp_target;
  end.log_sum = logf(end.sum);
  const float ratio = rest / end.exp_target;
  const bool direct = end.exp_target >= smallest_normal(l) && ratio < INFINITY;
  end.nll = direct ? log1pf(ratio) : (float)kLn2 * (log2f(end.sum) - above);
  end.lse = isfinite(l) ? l + end.nll : fmaf(k, (float)kLn2, end.log_sum);
  return end;
}

/* The numbers of a row's tiles that a block adds up: of product_scratch, NULL for 0. */
enum TileNumber { kRest, kGap, kMass, kSpread, kTileNumbers };

/* [warps][rows] of a block: its warps take every kSumWarps-th tile. */
typedef double TileParts[kTileNumbers][kSumWarps][kSumRows];

__device__ __forceinline__ void add_tiles(const float* numbers, int rows, int row, int tiles,
                                          double (&parts)[kSumWarps][kSumRows]) {
  if (!numbers) return;
  const int warp = threadIdx.x / kSumRows;
  double sum = 0;
  for (int first = warp; first < tiles; first += kSumWarps * kSumBatch) {
    float part[kSumBatch]; /* all under way before the first is added, so none is left out */
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

/* By a thread of the first warp for its row. */
__device__ __forceinline__ double total_of(const float* numbers,
                                           const double (&parts)[kSumWarps][kSumRows]) {
  double sum = 0;
  for (int warp = 0; numbers && warp < kSumWarps; warp++) sum += parts[warp][threadIdx.x];
  return sum;
}

/* The largest of a row's tiles, by one thread: predictions are rare enough for that. */
__device__ __forceinline__ Best<float> best_of_tiles(const product_scratch& s, int rows, int row,
                                                     int tiles) {
  Best<float> best = no_best<float>();
  for (int tile = 0; tile < tiles; tile++) {
    const int64_t at = (int64_t)tile * rows + row;
    best = better_of(best, Best<float>{s.tops[at], s.columns[at]});
  }
  return best;
}

/* The tiles' sums of a row. */
struct TileSums {
  double rest, gap, mass, spread;
};

/* What sums of zeta become as sums of l, taken from the target's, or from 0 where that is not
 * finite. `middle` is what the tiles' are taken from, of the row's zeta. */
__device__ __forceinline__ void set_references(const row_args& p, const product_scratch& s,
                                               float middle, float l_target, const TileSums& tiles,
                                               RowSums<float>& sums) {
  const double total = (double)((const float*)p.r.scalars)[FLCE_SCALAR_WEIGHT_TOTAL];
  const float from = isfinite(l_target) ? l_target : 0;
  const double above = (double)from - kLn2 * (double)middle;
  sums.gap_from = sums.spread_from = from;
  if (s.gaps) sums.gap = (float)(above * total - kLn2 * tiles.gap);
  if (s.gap) sums.gap = (float)((double)from * total - kLn2 * tiles.gap);
  if (s.spreads) sums.spread = (float)(kLn2 * tiles.spread - above * (double)sums.rest);
}

/* Statistics of a row of probabilities, taken from lse itself. It and the sum of t z are made from
 * the same z, with the same scale: of a row that is all but certain nothing is left of either. */
__device__ __forceinline__ RowStatistics<float> write_soft_row(const row_args& p,
                                                               const Row<float>& view, int64_t at,
                                                               float scale, float k,
                                                               const TileSums& tiles) {
  const double unit = (double)p.scale_f32 / (double)scale; /* of one in zeta */
  const double lse = unit * ((double)k + log2(tiles.rest));
  RowSums<float> sums = {};
  RowEnd<float> end = {};
  end.lse = sums.offset = sums.gap_from = (float)lse;
  end.log_sum = (float)(lse - (double)end.lse);
  end.sum = expf(end.log_sum);
  sums.mass = (float)tiles.mass;
  sums.gap = (float)((double)end.lse * tiles.mass - (double)p.scale_f32 * tiles.gap);
  return write_statistics<kGeneral>(p, view, at, sums, end);
}

/* What a row's statistics are made of beside its sums: its place in the vectors, its target there,
 * and numbers of product_scratch. */
struct ProductRow {
  int64_t at, y;
  int column, top;
  float offset, target;
};

/* Loads alone, no branches: they come while the sums are made. */
__device__ __forceinline__ ProductRow open_product_row(const flce_rows& r, const product_scratch& s,
                                                       int row) {
  const int64_t at = vectors_at(r, row);
  return {at, target_at(r, at), s.column[row], s.top[row], s.offset[row], s.target[row]};
}

/* Statistics of a valid row, of its tiles' sums. By one thread. */
template <Kind KIND>
__device__ __forceinline__ RowStatistics<float> finish_row(const row_args& p,
                                                           const product_shape& shape,
                                                           const product_scratch& s, int row,
                                                           const ProductRow& own, int tiles,
                                                           TileSums& sum) {
  constexpr bool kIsGeneral = KIND == kGeneral;
  if (KIND != kPlain && s.gap) sum.gap = s.gap[row];
  const float k = offset_from(own.offset, own.top);
  Row<float> view = {};
  view.class_weight = (const float*)p.r.class_weight;
  view.target = own.column;
  if constexpr (KIND == kSoft) {
    return write_soft_row(p, view, own.at, shape.scale, k, sum);
  }
  view.l_target = kIsGeneral ? own.target * (float)kLn2 : p.scale_f32 * own.target;
  const float above = kIsGeneral ? own.target - k : fmaf(own.target, shape.scale, -k);
  RowSums<float> sums = {};
  sums.offset = k * (float)kLn2;
  sums.rest = (float)sum.rest;
  if constexpr (kIsGeneral) view.height = shape.gain != 0 ? s.scale[row] * (float)kLn2 : 0;
  if constexpr (KIND != kPlain) {
    set_references(p, s, k - kAboveTarget, view.l_target, sum, sums);
  }
  if (kIsGeneral && s.tops) {
    Best<float> best = best_of_tiles(s, shape.rows, row, tiles);
    best.value *= (float)kLn2;
    p.r.predictions[own.at] = prediction_of(view, best);
  }
  const RowEnd<float> end = end_of_product(above, view.l_target, k, sums.rest);
  return write_statistics<KIND>(p, view, own.at, sums, end);
}

template <Kind KIND>
__global__ void __launch_bounds__(kSumRows* kSumWarps, 1)
    sum_tiles(const __grid_constant__ row_args p, const product_shape shape,
              const product_scratch s, int tiles, const float* factor, float* coef) {
  __shared__ TileParts parts;
  follow_kernels();
  const int row = blockIdx.x * kSumRows + threadIdx.x % kSumRows;
  ProductRow own = {};
  if (threadIdx.x < kSumRows) own = open_product_row(p.r, s, min(row, shape.rows - 1));
  const float unit = coef ? factor[0] : 0;
  const float* numbers[kTileNumbers] = {s.sums, s.gaps, s.masses, s.spreads};
#pragma unroll
  for (int n = 0; n < kTileNumbers; n++) add_tiles(numbers[n], shape.rows, row, tiles, parts[n]);
  __syncthreads();
  if (threadIdx.x >= kSumRows || row >= shape.rows) return;
  TileSums sum = {total_of(s.sums, parts[kRest]), total_of(s.gaps, parts[kGap]),
                  total_of(s.masses, parts[kMass]), total_of(s.spreads, parts[kSpread])};
  const Place place = place_at(p.r, own.at, own.y);
  if (place.kind == kRowAbsent) return;
  RowStatistics<float> stats = {};
  if (place.kind == kRowValid) {
    stats = finish_row<KIND>(p, shape, s, row, own, tiles, sum);
  } else {
    write_blank(p.r, place.at, blank_of<float>(place));
  }
  if (coef) write_coefficients<float>(p.r, flce_upstream{}, place, stats, unit, p.scale_f32, coef);
}

/* ---- where it serves ---- */

static int64_t tiles_of(int64_t vocab) {
  return ceil_div(vocab, kProductColumns);
}

/* Tiles' numbers of each row at the most: product_scratch_of takes them. */
static int64_t number_count(const flce_problem* p) {
  const bool soft = p->has_probabilities;
  return 1 + (soft || p->loss.label_smoothing > 0) + soft + p->wants_entropy +
         2 * p->wants_predictions;
}

/* Of product_scratch: the numbers, the five vectors, and redo, which has at most two elements more
 * than one a row. */
static int64_t scratch_row_bytes(int64_t vocab, int64_t numbers) {
  return 4 * (numbers * tiles_of(vocab) + 8);
}

/* In memory of facts.product_row_bytes for each row. */
static product_scratch product_scratch_of(void* memory, const flce_rows* r) {
  const int64_t rows = r->rows, size = tiles_of(r->vocab) * rows;
  float* next = (float*)memory;
  const auto take = [&next](bool wanted, int64_t count) {
    float* taken = wanted ? next : NULL;
    if (wanted) next += count;
    return taken;
  };
  product_scratch s;
  s.sums = take(true, size);
  const bool smooth = r->options.label_smoothing > 0, soft = !r->target;
  s.gaps = take(soft || (smooth && !r->wsum), size);
  s.gap = take(!soft && smooth && r->wsum, rows);
  s.masses = take(soft, size);
  s.spreads = take(r->wants_entropy, size);
  s.tops = take(r->predictions, size);
  s.columns = (int*)take(r->predictions, size);
  s.offset = take(true, rows);
  s.scale = take(true, rows);
  s.target = take(true, rows);
  s.column = (int*)take(true, rows);
  s.top = (int*)take(true, rows);
  s.redo = (int*)next;
  return s;
}

/* FLCE_KERNEL: "auto", by measured limits; "gemm": cuBLASLt and separate row passes; "fused": the
 * kernels of sm_90 wherever they can serve, also where others are faster. */
enum KernelChoice { kAutoKernel, kGemmKernel, kFusedKernel };

static flce_status asked_kernel(KernelChoice* choice) {
  const char* text = getenv("FLCE_KERNEL");
  const bool is_auto = !text || !*text || strcmp(text, "auto") == 0;
  *choice = is_auto ? kAutoKernel : strcmp(text, "fused") == 0 ? kFusedKernel : kGemmKernel;
  if (*choice != kGemmKernel || strcmp(text, "gemm") == 0) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "FLCE_KERNEL: expected \"auto\", \"gemm\" or \"fused\", got \"%s\"", text);
}

/* By dtypes and sizes alone: the same in a forward and its backward. */
static bool suits_hopper(const flce_problem* p) {
  return (p->dtype == FLCE_BF16 || p->dtype == FLCE_F16) && p->vocab <= kMaxVocab &&
         p->tokens <= INT32_MAX / 2;
}
/* To find the rows takes some 40 us, 2 % of a step of kLeast logits; to gather x, what a product of
 * some twenty classes takes. Both also where an address or FLCE_KERNEL then lets nothing skip. */
static bool is_worth_finding_rows(const flce_problem* p) {
  const double kLeast = 1 << 27;
  const int64_t kLeastVocab = 8192;
  return !p->has_probabilities && p->vocab >= kLeastVocab &&
         (double)p->tokens * (double)p->vocab >= kLeast;
}

/* A product over fewer does not hide what it takes to write z and to make the sums beside it: at
 * 768 a product and a pass are 1.06 times as fast, at 1024 as fast, at 2048 0.95 times. */
constexpr int64_t kLeastHidden = 1024;

/* A cluster always computes 256 rows. A step (H = 4096, V = 128256) over the three GEMMs alone, by
 * this product and by cuBLASLt with a row pass: 64 rows 1.34x and 1.08x, 128 rows 1.23x and 1.09x,
 * 192 rows 1.06x and 1.04x, 256 rows 1.05x and 1.08x (benchmarks/NOTES.md, 2026-11-22). */
constexpr int64_t kLeastRows = 193;

/* Whether the product's kernels have what the loss needs: beside probabilities little else. */
static bool product_suits(const flce_problem* p) {
  const flce_loss* o = &p->loss;
  const bool rises = (float)(o->logit_scale / o->temperature * kLog2eExact) > 0;
  const bool others = o->label_smoothing > 0 || o->softcap > 0 || !rises || p->has_class_weight ||
                      p->has_temperature || p->wants_entropy || p->wants_predictions;
  return !p->unaligned && !(p->has_probabilities && others);
}

flce_status cuda_hopper_facts(int capability, const flce_problem* p, flce_facts* facts) {
  facts->product_row_bytes = facts->product_tile_rows = facts->weight_parts = 0;
  facts->skips_rows = facts->product_gives_z = false;
  KernelChoice choice;
  FLCE_TRY(asked_kernel(&choice));
  if (capability != 90 || !suits_hopper(p)) return FLCE_OK;
  const bool is_bf16 = p->dtype == FLCE_BF16, always = choice == kFusedKernel;
  facts->skips_rows = is_bf16 && is_worth_finding_rows(p);
  if (choice == kGemmKernel) return FLCE_OK;
  if (is_bf16 && !p->weight_unaligned) facts->weight_parts = cuda_weight_parts(p->hidden);
  if (product_suits(p) && (always || p->rows >= kLeastRows)) {
    facts->product_row_bytes = scratch_row_bytes(p->vocab, number_count(p));
    facts->product_tile_rows = kProductClusterRows;
    facts->product_gives_z = always || p->hidden >= kLeastHidden;
  }
  return FLCE_OK;
}

/* A scale below 0 makes the smallest z the largest l, and hidden ones +inf; one of 0, NaN. */
static product_shape product_shape_of(const flce_gemm* g, const flce_rows* r) {
  const row_args args = make_args(r);
  product_shape shape = {};
  const flce_loss* o = &r->options;
  shape.rows = (int)r->rows;
  shape.vocab = (int)r->vocab;
  shape.hidden = (int)g->k;
  shape.columns = (int)(g->c ? r->z_columns : r->out_columns);
  shape.half = g->dtype == FLCE_F16;
  shape.scale = (float)((o->softcap > 0 ? args.height : args.scale) * kLog2eExact);
  shape.general = (o->label_smoothing > 0 && !r->wsum) || o->softcap > 0 || !(shape.scale > 0) ||
                  r->temperature || r->wants_entropy || r->predictions || (r->target && g->c) ||
                  (r->target && shape.half);
  shape.gain = (float)args.gain;
  shape.bias = (const float*)r->bias;
  shape.class_weight = (const float*)r->class_weight;
  shape.index = r->index;
  shape.probabilities = r->probabilities;
  shape.probabilities_dtype = r->probabilities_dtype;
  shape.probabilities_pitch = r->probabilities_pitch;
  return shape;
}

/* Where the product writes what it makes of the logits, and its leading dimension. */
static ProductResult result_of(const flce_gemm* g, const flce_rows* r, void** out, int64_t* pitch) {
  *out = g->c ? g->c : r->out;
  *pitch = g->c ? g->pitch_c : r->out_pitch;
  return g->c ? kLogitResult : r->out ? kExpResult : kNoResult;
}

static flce_status run_product(void* self, const flce_gemm* g, const flce_rows* r,
                               const product_shape* shape, const product_scratch* s, bool repeat) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  void* out;
  int64_t pitch;
  const ProductResult result = result_of(g, r, &out, &pitch);
  return launch_product_sm90(cuda->stream, cuda->device, shape, s, g->a, g->b, result, out, pitch,
                             repeat);
}

template <typename X>
static flce_status launch_offsets(void* self, const flce_gemm* g, const flce_rows* r,
                                  const product_shape* shape, const product_scratch* s) {
  const unsigned blocks = (unsigned)ceil_div(r->rows, kDotWarps);
  return launch_next(self, place_offsets<X>, blocks, kDotWarps * kWarp, "place_offsets", *r, *shape,
                     *s, shape->scale, (const X*)g->a, (const X*)g->b);
}

flce_status cuda_product_rows(void* self, const flce_gemm* g, const flce_rows* r, void* scratch) {
  if (r->rows == 0) return FLCE_OK;
  FLCE_TRY(check_rows(r, "product_rows"));
  const product_shape shape = product_shape_of(g, r);
  const product_scratch s = product_scratch_of(scratch, r);
  const auto launch = shape.half ? launch_offsets<__half> : launch_offsets<__nv_bfloat16>;
  FLCE_TRY(launch(self, g, r, &shape, &s));
  return run_product(self, g, r, &shape, &s, false);
}

flce_status cuda_product_statistics(void* self, const flce_gemm* g, const flce_rows* r,
                                    const void* factor, void* coef, void* scratch) {
  if (r->rows == 0) return FLCE_OK;
  const product_shape shape = product_shape_of(g, r);
  const product_scratch s = product_scratch_of(scratch, r);
  FLCE_TRY(run_product(self, g, r, &shape, &s, true));
  const unsigned blocks = (unsigned)ceil_div(r->rows, kSumRows);
  const auto kernel = shape.probabilities ? sum_tiles<kSoft>
                      : shape.general     ? sum_tiles<kGeneral>
                      : s.gap             ? sum_tiles<kSmooth>
                                          : sum_tiles<kPlain>;
  return launch_next(self, kernel, blocks, kSumRows * kSumWarps, "sum_tiles", make_args(r), shape,
                     s, (int)tiles_of(r->vocab), (const float*)factor, (float*)coef);
}
