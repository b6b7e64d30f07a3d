/* prepare: the scalars of a call (enum flce_scalar). The same kernel also sorts the tokens by
 * target if there are at most kCountedTokens; more are sorted in target_order.cu. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/common/reductions.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/passes/target_order.cuh"
#include "divergence.h"

/* ---- scalars ---- */

/* Totals over valid rows, of one thread or of the block. */
struct RowTotals {
  double valid,  /* number of rows that are not ignored */
      weight;    /* sum of the class weights of their targets */
  double factor; /* largest |token weight / temperature| of a row */
};

template <typename S>
__device__ __forceinline__ RowTotals total_rows(const flce_problem& p, const flce_tensors& t) {
  const S *w = (const S*)t.class_weight, *token = (const S*)t.token_weight;
  const S* temperature = (const S*)t.temperature;
  RowTotals totals = {0, 0, 0};
  for (int64_t i = threadIdx.x; i < p.shape.tokens; i += kPrepareThreads) {
    if (t.target) {
      const int64_t y = t.target[i];
      if (y == p.loss.ignore_index) continue;
      /* An out-of-range target makes only its own row NaN, not INV_DENOM: its weight is left out.
       */
      if (w && y >= 0 && y < p.shape.vocab) totals.weight += (double)w[y];
    }
    totals.valid += 1;
    double factor = token ? (double)token[i] : 1;
    if (temperature) factor /= (double)temperature[i];
    totals.factor = fmax(totals.factor, fabs(factor));
  }
  return totals;
}

/* The totals of the block's threads; *total and *top are the sum and the largest absolute value of
 * the class weights over the vocabulary. */
template <typename S>
__device__ __forceinline__ RowTotals total_of_block(const flce_problem& p, const flce_tensors& t,
                                                    double* total, double* top) {
  __shared__ double scratch[kMaxWarps];
  const S* w = (const S*)t.class_weight;
  RowTotals rows = total_rows<S>(p, t);
  *total = *top = 0;
  for (int64_t j = threadIdx.x; w && j < p.shape.vocab; j += kPrepareThreads) {
    *total += (double)w[j];
    *top = fmax(*top, fabs((double)w[j]));
  }
  rows.valid = block_sum(rows.valid, scratch);
  rows.weight = w && t.target ? block_sum(rows.weight, scratch) : rows.valid;
  rows.factor = block_max(rows.factor, scratch);
  *total = w ? block_sum(*total, scratch) : (double)p.shape.vocab;
  *top = w ? block_max(*top, scratch) : 1;
  return rows;
}

/* dw_fp16_shift: flce_plan.dw_fp16_shift. If it is not 0, find_largest has written max |x| to
 * INPUT_SCALE, which the caller then overwrites with the scale. */
template <typename S>
__device__ __forceinline__ void make_scalars(const flce_problem& p, const flce_tensors& t,
                                             int dw_fp16_shift, S (&scalars)[FLCE_SCALAR_COUNT]) {
  double total, top;
  const RowTotals rows = total_of_block<S>(p, t, &total, &top);
  const bool mean = p.reduction == FLCE_MEAN, own_mean = mean && !t.num_items;
  double inv_denom = 1, z_factor = 1;
  if (mean) {
    const double items = t.num_items ? (double)((const S*)t.num_items)[0] : rows.weight;
    inv_denom = rows.valid == 0 ? 0 : 1 / items;
    if (t.num_items) inv_denom = items != 0 ? 1 / items : rows.valid == 0 ? 0 : (double)NAN;
  }
  if (own_mean && t.class_weight && t.target && rows.valid > 0) z_factor = rows.weight / rows.valid;
  if (rows.valid > (double)p.shape.rows) inv_denom = (double)NAN;
  const double bound = top * rows.factor * fabs(p.loss.logit_scale) / p.loss.temperature *
                       (1 + 128 * p.loss.z_loss * z_factor) *
                       flce_largest_gradient(p.divergence.kind);
  scalars[FLCE_SCALAR_VALID] = (S)rows.valid;
  scalars[FLCE_SCALAR_INV_DENOM] = (S)inv_denom;
  scalars[FLCE_SCALAR_WEIGHT_TOTAL] = (S)total;
  double loss_scale = inv_denom != 0 && isfinite(inv_denom) ? inv_denom : 1;
  const double most = ldexp(1.0, FLCE_MAX_SCALE_EXPONENT);
  loss_scale = fmin(fmax(loss_scale * scale_for(bound * fabs(loss_scale), 14), -most), most);
  double input_scale = 1, dw_scale = loss_scale;
  if (dw_fp16_shift != 0) {
    const double largest = (double)((const S*)t.scalars)[FLCE_SCALAR_INPUT_SCALE];
    input_scale = fmin(scale_for(largest, 13), ldexp(1.0, FLCE_MAX_INPUT_EXPONENT));
    dw_scale = ldexp(loss_scale * input_scale, dw_fp16_shift);
  }
  scalars[FLCE_SCALAR_LOSS_SCALE] = (S)loss_scale;
  scalars[FLCE_SCALAR_INPUT_SCALE] = (S)input_scale;
  scalars[FLCE_SCALAR_DW_SCALE] = (S)dw_scale;
  scalars[FLCE_SCALAR_Z_FACTOR] = (S)z_factor;
}

/* Block 0 computes the scalars, unless t.scalars is NULL; the others sort the tokens. When it
 * overlaps the previous kernel, which is one of ours (PDL), it reads its inputs before pdl_wait:
 * they are the caller's, and were complete before that kernel started. */
template <typename S>
__global__ void __launch_bounds__(kPrepareThreads)
    prepare_call(const __grid_constant__ flce_problem p, const __grid_constant__ flce_tensors t,
                 int dw_fp16_shift, uint32_t* keys, uint32_t* values) {
  const int scalar_blocks = t.scalars ? 1 : 0;
  const bool sorts = (int)blockIdx.x >= scalar_blocks;
  const int warp = (blockIdx.x - scalar_blocks) * (kPrepareThreads / kWarp) + threadIdx.x / kWarp;
  const int first = warp * kTokensPerWarp, tokens = (int)p.shape.tokens;
  S scalars[FLCE_SCALAR_COUNT] = {};
  uint32_t key[kTokensPerWarp] = {}, positions[kTokensPerWarp] = {};
  if (sorts) {
    const uint32_t* all = load_keys(t.target, tokens, p.shape.vocab, p.loss.ignore_index);
    count_preceding(all, tokens, first, key, positions);
  } else {
    make_scalars<S>(p, t, dw_fp16_shift, scalars);
  }
  pdl_wait();
#pragma unroll
  for (int i = 0; i < kTokensPerWarp; i++) {
    if (sorts && threadIdx.x % kWarp == 0 && first + i < tokens) {
      keys[positions[i]] = key[i];
      values[positions[i]] = (uint32_t)(first + i);
    }
  }
  if (!sorts && threadIdx.x == 0) {
#pragma unroll
    for (int which = 0; which < FLCE_SCALAR_COUNT; which++) ((S*)t.scalars)[which] = scalars[which];
  }
}

flce_status cuda_launch_prepare(void* self, const flce_problem* problem,
                                const flce_tensors* tensors, void* order, int dw_fp16_shift,
                                bool may_overlap) {
  const order_view none = {}, view = order ? view_order(order, problem->shape.tokens) : none;
  const int64_t sorting = order ? ceil_div(problem->shape.tokens, kTokensPerBlock) : 0;
  const unsigned blocks = (unsigned)((tensors->scalars ? 1 : 0) + sorting);
  FLCE_WITH_STAT(flce_stat_dtype(problem->dtypes.gemm), S, {
    FLCE_TRY(launch_overlapping(self, prepare_call<S>, blocks, kPrepareThreads, "prepare",
                                may_overlap, *problem, *tensors, dw_fp16_shift, view.keys,
                                view.tokens));
  });
  return FLCE_OK;
}

/* ---- the largest |x| ---- */

enum { kLargestThreads = 256, kLargestBlocks = 1024 };

/* *largest = the bits of max |x| over the rows that are not ignored; starts at 0. The bits of
 * non-negative floats have the order of their values, and NaN is above all, so an integer atomicMax
 * is exact and does not depend on the order. */
template <int N>
__global__ void __launch_bounds__(kLargestThreads)
    find_largest(const __grid_constant__ flce_problem p, const void* x, const int64_t* target,
                 int* largest) {
  uint32_t top = 0;
  for (int64_t row = blockIdx.x; row < p.shape.tokens; row += gridDim.x) {
    if (target && target[row] == p.loss.ignore_index) continue;
    for (int64_t h = threadIdx.x * N; h < p.shape.hidden; h += kLargestThreads * N) {
      float v[N];
      load_any<float, N>(x, p.dtypes.input, row * p.shape.hidden + h, v);
#pragma unroll
      for (int e = 0; e < N; e++) top = max(top, __float_as_uint(fabsf(v[e])));
    }
  }
  top = __reduce_max_sync(0xffffffffu, top);
  if (threadIdx.x % kWarp == 0) atomicMax(largest, (int)top);
}

static flce_status launch_largest(void* self, const flce_problem* p, const flce_tensors* t) {
  int* largest = (int*)((float*)t->scalars + FLCE_SCALAR_INPUT_SCALE);
  FLCE_TRY(cuda_fill(self, largest, 0, sizeof(*largest)));
  if (p->shape.tokens == 0) return FLCE_OK;
  const bool aligned = p->shape.hidden % 8 == 0 && is_aligned(t->input, 16);
  const auto kernel = aligned ? find_largest<8> : find_largest<1>;
  const unsigned blocks = (unsigned)min_of(p->shape.tokens, kLargestBlocks);
  kernel<<<blocks, kLargestThreads, 0, stream_of(self)>>>(*p, t->input, t->target, largest);
  FLCE_LAUNCHED("prepare: largest input");
  return FLCE_OK;
}

flce_status cuda_prepare(void* self, const flce_problem* problem, const flce_tensors* tensors,
                         void* order, int dw_fp16_shift, bool may_overlap) {
  const bool few = problem->shape.tokens <= kCountedTokens;
  if (order) FLCE_TRY(flce_check_order(problem->shape.tokens, problem->shape.vocab));
  if (dw_fp16_shift != 0) FLCE_TRY(launch_largest(self, problem, tensors));
  /* The kernel reads find_largest's result before pdl_wait, so it must not overlap it. */
  FLCE_TRY(cuda_launch_prepare(self, problem, tensors, few ? order : NULL, dw_fp16_shift,
                               may_overlap && dw_fp16_shift == 0));
  if (!order || few) return FLCE_OK;
  return cuda_order_targets(self, problem, tensors->target, order);
}
