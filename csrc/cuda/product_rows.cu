/* Logits product and row pass in one: what comes before and after its kernel, and where it serves.
 */
#include "product_rows.cuh"

#include "backend.cuh"
#include "launch.cuh"
#include "statistics.cuh"

#include <stdlib.h>
#include <string.h>

enum { kDotWarps = 8, kSumRows = 32, kSumWarps = 8 };

constexpr double kLog2eExact = 1.4426950408889634;
constexpr double kLn2 = 0.69314718055994531;

/* ---- before: offsets ---- */

/* x_i W_y, by a warp. */
__device__ __forceinline__ float dot_row(const __nv_bfloat16* x, const __nv_bfloat16* w, int hidden,
                                         int lane) {
  constexpr int N = kVec<__nv_bfloat16>;
  float sum = 0;
  for (int at = lane * N; at < hidden; at += kWarp * N) {
    Vec<__nv_bfloat16, N> raw_x, raw_w;
    float a[N], b[N];
    load_vec<false>(x + at, raw_x);
    load_vec<false>(w + at, raw_w);
    unpack(raw_x, a);
    unpack(raw_w, b);
#pragma unroll
    for (int e = 0; e < N; e++) sum = fmaf(a[e], b[e], sum);
  }
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
  return sum;
}

/* A target of -inf shows nothing of its row: from this offset a sum goes beyond the limit, or is 0.
 */
constexpr float kUnknownOffset = -3e38f;

__global__ void __launch_bounds__(kDotWarps* kWarp)
    place_offsets(const __grid_constant__ flce_rows r, const product_shape shape,
                  const product_scratch s, const __nv_bfloat16* x, const __nv_bfloat16* w) {
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
  if (place.kind == kRowValid) {
    column = (int)r.target[place.at];
    const int64_t h = shape.hidden;
    float z = dot_row(x + row * h, w + column * h, shape.hidden, lane);
    if (r.bias) z += ((const float*)r.bias)[column];
    z *= shape.scale;
    offset =
        z == -INFINITY ? kUnknownOffset : rintf(z) + (r.out ? kAboveTarget : kAboveTargetForSums);
  }
  if (lane != 0) return;
  s.offset[row] = offset;
  s.column[row] = column;
  s.top[row] = kNoTop;
}

/* ---- after: statistics ---- */

/* As end_of, from integer offsets: 2^k is exact where exp(c) is not. */
__device__ __forceinline__ RowEnd<float> end_of_product(float z, float l, float scale, float k,
                                                        float rest) {
  const float above = fmaf(z, scale, -k);
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

/* Each warp adds every kSumWarps-th tile of kSumRows rows, the first one then the warps. */
__global__ void __launch_bounds__(kSumRows* kSumWarps)
    sum_tiles(const __grid_constant__ row_args p, const product_shape shape,
              const product_scratch s, int tiles) {
  __shared__ double sums[kSumWarps][kSumRows];
  const int lane = threadIdx.x % kSumRows, warp = threadIdx.x / kSumRows;
  const int row = blockIdx.x * kSumRows + lane;
  double sum = 0;
  if (row < shape.rows) {
    for (int tile = warp; tile < tiles; tile += kSumWarps) {
      sum += (double)s.sums[(int64_t)tile * shape.rows + row];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || row >= shape.rows) return;
  for (int other = 1; other < kSumWarps; other++) sum += sums[other][lane];
  const Place place = place_of(p.r, row);
  if (place.kind != kRowValid) {
    if (place.kind != kRowAbsent) write_blank(p.r, place.at, blank_of<float>(place));
    return;
  }
  Row<float> view = {};
  view.class_weight = (const float*)p.r.class_weight;
  view.target = s.column[row];
  view.l_target = p.scale_f32 * s.target[row];
  RowSums<float> totals = {};
  const float k = offset_of(s, row);
  totals.offset = k * (float)kLn2;
  totals.rest = (float)sum;
  const RowEnd<float> end =
      end_of_product(s.target[row], view.l_target, shape.scale, k, totals.rest);
  write_statistics<kPlain>(p, view, place.at, totals, end);
}

/* ---- where it serves ---- */

static int64_t tiles_of(int64_t vocab) {
  return ceil_div(vocab, kProductColumns);
}

/* Of product_scratch: sums, offset, column, target, top, and redo, which has at most two elements
 * more than one a row. */
static int64_t scratch_row_bytes(int64_t vocab) {
  return 4 * (tiles_of(vocab) + 7);
}

static product_scratch place_scratch(void* memory, int64_t rows, int64_t vocab) {
  product_scratch s;
  s.sums = (float*)memory;
  s.offset = s.sums + tiles_of(vocab) * rows;
  s.target = s.offset + rows;
  s.column = (int*)(s.target + rows);
  s.top = s.column + rows;
  s.redo = s.top + rows;
  return s;
}

/* FLCE_KERNEL: "auto", or "gemm" for the product by cuBLASLt and a row pass everywhere. */
static flce_status fused_is_asked(bool* asked) {
  const char* text = getenv("FLCE_KERNEL");
  *asked = !text || !*text || strcmp(text, "auto") == 0;
  if (*asked || strcmp(text, "gemm") == 0) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT, "FLCE_KERNEL: expected \"auto\" or \"gemm\", got \"%s\"",
                   text);
}

flce_status cuda_product_row_bytes(int device, const flce_problem* p, int64_t* bytes) {
  *bytes = 0;
  bool asked;
  FLCE_TRY(fused_is_asked(&asked));
  const flce_loss* o = &p->loss;
  const bool plain = o->label_smoothing == 0 && o->softcap == 0 && o->logit_scale > 0 &&
                     !p->has_temperature && !p->has_probabilities && !p->wants_entropy &&
                     !p->wants_predictions;
  const bool fits = p->dtype == FLCE_BF16 && p->hidden % 8 == 0 && !p->unaligned &&
                    p->vocab <= kMaxVocab && p->tokens <= INT32_MAX / 2;
  if (!asked || !plain || !fits) return FLCE_OK;
  int major, minor;
  FLCE_TRY(check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                      "facts"));
  FLCE_TRY(check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
                      "facts"));
  if (major == 9 && minor == 0) *bytes = scratch_row_bytes(p->vocab);
  return FLCE_OK;
}

flce_status cuda_product_rows(void* self, const flce_gemm* g, const flce_rows* r, void* scratch) {
  if (r->rows == 0) return FLCE_OK;
  FLCE_TRY(check_rows(r, "product_rows"));
  const flce_cuda* cuda = (const flce_cuda*)self;
  const row_args args = make_args(r);
  const product_shape shape = {(int)r->rows, (int)r->vocab, (int)g->k,
                               (float)(args.scale * kLog2eExact)};
  const product_scratch s = place_scratch(scratch, r->rows, r->vocab);
  const float* bias = (const float*)r->bias;
  place_offsets<<<(unsigned)ceil_div(r->rows, kDotWarps), kDotWarps * kWarp, 0, stream_of(self)>>>(
      *r, shape, s, (const __nv_bfloat16*)g->a, (const __nv_bfloat16*)g->b);
  FLCE_LAUNCHED("place_offsets");
  for (int repeat = 0; repeat < 2; repeat++) {
    FLCE_TRY(launch_product_sm90(cuda->stream, cuda->device, &shape, &s, g->a, g->b, bias, r->out,
                                 r->out_pitch, repeat));
  }
  sum_tiles<<<(unsigned)ceil_div(r->rows, kSumRows), kSumRows * kSumWarps, 0, stream_of(self)>>>(
      args, shape, s, (int)tiles_of(r->vocab));
  FLCE_LAUNCHED("sum_tiles");
  return FLCE_OK;
}
