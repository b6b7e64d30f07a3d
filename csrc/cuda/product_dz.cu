/* Statistics and dz of bfloat16 probabilities: the fused product makes codes, and a pass dz of
 * them. Large chunks are done in two parts: while the product makes the codes of the second, idle
 * warps of its blocks do the first one's pass. */
#include "backend.cuh"
#include "launch.cuh"
#include "product_codes.cuh"

enum { kFinishWarps = 8, kFinishSpan = 4096, kFinishVectors = 4 };

__global__ void __launch_bounds__(kFinishWarps* kWarp)
    finish_code_rows(const __grid_constant__ CodeRows c) {
  follow_kernels();
  const int warp = blockIdx.x * kFinishWarps + threadIdx.x / kWarp;
  finish_codes<kFinishSpan, kFinishVectors>(c, warp, gridDim.x * kFinishWarps);
}

/* ---- parts ---- */

/* `count` of the rows, from `first` on. */
static flce_rows part_of(const flce_rows* r, int64_t first, int64_t count) {
  const auto from = [first](const void* vector) {
    return vector ? (const void*)((const float*)vector + first) : NULL;
  };
  flce_rows part = *r;
  part.rows = count;
  part.probabilities = (const __nv_bfloat16*)r->probabilities + first * r->probabilities_pitch;
  part.token_weight = from(r->token_weight);
  part.stats = (void*)from(r->stats);
  part.loss = (void*)from(r->loss);
  part.out = (__nv_bfloat16*)r->out + first * r->out_pitch;
  return part;
}

static CodeRows codes_of(const flce_rows* r, const product_scratch* scratch, const void* coef,
                         int shift) {
  const int64_t pitch = r->stat_pitch;
  CodeRows c = {};
  c.rows = r->out;
  c.pitch = r->out_pitch;
  c.count = (int)r->rows;
  c.vocab = (int)r->vocab;
  c.columns = (int)r->out_columns;
  c.t = (const __nv_bfloat16*)r->probabilities;
  c.t_pitch = r->probabilities_pitch;
  c.sums = scratch->target;
  c.inv_sum = (const float*)r->stats + FLCE_STAT_INV_SUM * pitch;
  c.row = (const float*)coef + FLCE_COEF_ROW * pitch;
  c.soft = (const float*)coef + FLCE_COEF_SOFT * pitch;
  c.unit = (float)ldexp(1, shift);
  return c;
}

/* Rows of the first part. A pass beside a product takes half of its own time from that, if the
 * product is long enough to feed it: at H = 4096 a step is 0.8 % faster with halves, at 2304 no
 * faster, at 2048 2 % slower. Each part ends with a wave of tiles that is not full. */
static int64_t first_rows(const flce_rows* r, int64_t hidden) {
  const int64_t kLeastHidden = 4096, kLeastLogits = 1 << 28;
  if (hidden < kLeastHidden || r->rows * r->vocab < kLeastLogits) return r->rows;
  return ceil_div(r->rows, 2 * kProductClusterRows) * kProductClusterRows;
}

flce_status cuda_product_dz(void* self, const flce_gemm* g, const flce_rows* r, const void* factor,
                            void* coef, int shift, void* scratch) {
  if (r->rows == 0) return FLCE_OK;
  FLCE_TRY(check_rows(r, "product_dz"));
  const int64_t part_rows = first_rows(r, g->k);
  CodeRows before = {};
  for (int64_t first = 0; first < r->rows; first += before.count) {
    const flce_rows part = part_of(r, first, min_of(part_rows, r->rows - first));
    float* part_coef = (float*)coef + first;
    flce_gemm product = *g;
    product.m = part.rows;
    product.a = (const __nv_bfloat16*)g->a + first * g->pitch_a;
    const product_shape shape = product_shape_of(&product, &part);
    const product_scratch s = product_scratch_of(scratch, &part, true);
    scratch = s.redo + 1 + ceil_div(part.rows, kProductClusterRows);
    FLCE_TRY(
        launch_product(self, &product, &part, &shape, &s, kCodeResult, first > 0 ? &before : NULL));
    FLCE_TRY(launch_statistics(self, &product, &part, &shape, &s, kCodeResult, factor, part_coef));
    before = codes_of(&part, &s, part_coef, shift);
  }
  const int64_t spans = before.count * ceil_div(before.columns, kFinishSpan);
  return launch_next(self, finish_code_rows, (unsigned)ceil_div(spans, kFinishWarps),
                     kFinishWarps * kWarp, "finish_code_rows", before);
}
