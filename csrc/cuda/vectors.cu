/* One number a row: scalars and sums over rows, coefficients, and the rows that are not computed.
 * Every sum has a fixed order. */
#include "backend.cuh"

enum { kVectorThreads = 256, kSumThreads = 1024 };

/* ---- scalars ---- */

/* Power of two u with u * top in (2^13, 2^14]; 1 where there is none. */
__device__ double unit_for(double top) {
  if (!(top > 0) || top == (double)INFINITY) return 1;
  int exponent;
  const double fraction = frexp(top, &exponent); /* in [1/2, 1) */
  const int power = (fraction == 0.5 ? 15 : 14) - exponent;
  return ldexp(1.0, power < 127 ? power : 127); /* a float holds it */
}

/* What the rows come to, a thread's own and then the block's. */
struct RowTotals {
  double valid, weight; /* rows, and the class weights of those */
  double factor;        /* largest |token weight / temperature| */
};

template <typename S>
__device__ __forceinline__ RowTotals total_rows(const flce_problem& p, const flce_tensors& t) {
  const S *w = (const S*)t.class_weight, *token = (const S*)t.token_weight;
  const S* temperature = (const S*)t.temperature;
  RowTotals totals = {0, 0, 0};
  for (int64_t i = threadIdx.x; i < p.tokens; i += kSumThreads) {
    if (t.target) {
      const int64_t y = t.target[i];
      if (y == p.loss.ignore_index) continue;
      /* A target out of range makes its own row NaN; the mean of the others stays what it is. */
      if (w && y >= 0 && y < p.vocab) totals.weight += (double)w[y];
    }
    totals.valid += 1;
    double factor = token ? (double)token[i] : 1;
    if (temperature) factor /= (double)temperature[i];
    totals.factor = fmax(totals.factor, fabs(factor));
  }
  return totals;
}

template <typename S>
__global__ void __launch_bounds__(kSumThreads)
    prepare_scalars(const __grid_constant__ flce_problem p,
                    const __grid_constant__ flce_tensors t) {
  __shared__ double scratch[kMaxWarps];
  const S* w = (const S*)t.class_weight;
  RowTotals rows = total_rows<S>(p, t);
  double total = 0, top = 0;
  for (int64_t j = threadIdx.x; w && j < p.vocab; j += kSumThreads) {
    total += (double)w[j];
    top = fmax(top, fabs((double)w[j]));
  }
  rows.valid = block_sum(rows.valid, scratch);
  rows.weight = w && t.target ? block_sum(rows.weight, scratch) : rows.valid;
  rows.factor = block_max(rows.factor, scratch);
  total = w ? block_sum(total, scratch) : (double)p.vocab;
  top = w ? block_max(top, scratch) : 1;
  if (threadIdx.x != 0) return;
  const bool mean = p.reduction == FLCE_MEAN, own_mean = mean && !t.num_items;
  double inv_denom = 1, z_share = 1;
  if (mean) {
    const double items = t.num_items ? (double)((const S*)t.num_items)[0] : rows.weight;
    const double count = t.num_items ? items : rows.valid;
    inv_denom = count == 0 ? 0 : 1 / items;
  }
  if (own_mean && w && t.target && rows.valid > 0) z_share = rows.weight / rows.valid;
  if (rows.valid > (double)p.rows) inv_denom = (double)NAN;
  const double bound = top * rows.factor * fabs(p.loss.logit_scale) / p.loss.temperature *
                       (1 + 128 * p.loss.z_loss * z_share);
  S* scalars = (S*)t.scalars;
  scalars[FLCE_SCALAR_VALID] = (S)rows.valid;
  scalars[FLCE_SCALAR_INV_DENOM] = (S)inv_denom;
  scalars[FLCE_SCALAR_WEIGHT_TOTAL] = (S)total;
  scalars[FLCE_SCALAR_UNIT] = (S)unit_for(bound);
  scalars[FLCE_SCALAR_Z_SHARE] = (S)z_share;
}

template <typename S>
__global__ void __launch_bounds__(kSumThreads)
    reduce_values(S* out, const S* values, int64_t count, const S* factor) {
  __shared__ double scratch[kMaxWarps];
  follow_kernels();
  double sum = 0;
  for (int64_t i = threadIdx.x; i < count; i += kSumThreads) sum += (double)values[i];
  sum = block_sum(sum, scratch);
  if (threadIdx.x == 0) out[0] = (S)(factor ? sum * (double)factor[0] : sum);
}

flce_status cuda_prepare(void* self, const flce_problem* problem, const flce_tensors* tensors) {
  FLCE_WITH_STAT(flce_stat_dtype(problem->dtype), S, {
    prepare_scalars<S><<<1, kSumThreads, 0, stream_of(self)>>>(*problem, *tensors);
  });
  FLCE_LAUNCHED("prepare");
  return FLCE_OK;
}

flce_status cuda_reduce(void* self, void* out, const void* values, int64_t count,
                        const void* factor, flce_dtype stat) {
  FLCE_WITH_STAT(stat, S, {
    FLCE_TRY(launch_next(self, reduce_values<S>, 1, kSumThreads, "reduce", (S*)out,
                         (const S*)values, count, (const S*)factor));
  });
  return FLCE_OK;
}

/* ---- row coefficients ---- */

/* `scale` is logit_scale / temperature. */
template <typename S>
__device__ __forceinline__ void coefficients_of(const flce_rows& r, const flce_upstream& upstream,
                                                int64_t i, S factor, S scale,
                                                S (&coef)[FLCE_COEF_ROWS]) {
  const flce_loss& o = r.options;
  const S *stats = (const S*)r.stats + i, *scalars = (const S*)r.scalars;
  const S inv_sum = stats[FLCE_STAT_INV_SUM * r.stat_pitch];
  const S upstream_loss = upstream.loss ? ((const S*)upstream.loss)[i * upstream.loss_stride] : 1;
  const S k = upstream_loss * factor * (r.token_weight ? ((const S*)r.token_weight)[i] : 1);
  const S a = r.temperature ? scale / ((const S*)r.temperature)[i] : scale;
  const S share = o.label_smoothing > 0 ? (S)(o.label_smoothing / (double)r.vocab) : 0;
  const S hard = (S)(1 - o.label_smoothing);
  /* What multiplies p: k (own + rest) + others. */
  S own = 0, rest, others = 0;
  if (r.target) {
    own = hard * (r.class_weight ? ((const S*)r.class_weight)[r.target[i]] : 1);
    rest = share != 0 ? share * scalars[FLCE_SCALAR_WEIGHT_TOTAL] : 0;
  } else {
    rest = stats[FLCE_STAT_MASS * r.stat_pitch];
  }
  if (o.z_loss != 0) {
    rest += (S)(2 * o.z_loss) * scalars[FLCE_SCALAR_Z_SHARE] * stats[FLCE_STAT_LSE * r.stat_pitch];
  }
  if (upstream.lse) others = ((const S*)upstream.lse)[i];
  coef[FLCE_COEF_ROW] = a * ((k * (own + rest) + others) * inv_sum);
  coef[FLCE_COEF_TARGET] = 0;
  coef[FLCE_COEF_SMOOTH] = a * (k * share);
  coef[FLCE_COEF_VALID] = 1;
  coef[FLCE_COEF_ENTROPY] =
      upstream.entropy ? a * (((const S*)upstream.entropy)[i] * inv_sum) : (S)0;
  coef[FLCE_COEF_SOFT] = r.target ? (S)0 : a * (k * hard);
  if (!r.target) return;
  /* r p_y - k own, as k own (p_y - 1) + (k rest + others) p_y: no cancellation where p_y is near 1.
   */
  const S nll = stats[FLCE_STAT_NLL * r.stat_pitch];
  S target = k * (own * expm1(-nll));
  if (rest != 0) target += k * (rest * exp(-nll));
  if (others != 0) target += others * exp(-nll);
  coef[FLCE_COEF_TARGET] = a * (stats[FLCE_STAT_SLOPE * r.stat_pitch] * target);
}

template <typename S>
__global__ void __launch_bounds__(kVectorThreads)
    row_coefficients(const __grid_constant__ flce_rows r,
                     const __grid_constant__ flce_upstream upstream, double scale, const S* factor,
                     S* coef) {
  follow_kernels();
  const int64_t row = (int64_t)blockIdx.x * kVectorThreads + threadIdx.x;
  if (row >= r.rows) return;
  const Place place = place_of(r, row);
  if (place.kind == kRowAbsent) return;
  S values[FLCE_COEF_ROWS];
#pragma unroll
  for (int which = 0; which < FLCE_COEF_ROWS; which++) values[which] = blank_of<S>(place);
  if (place.kind == kRowValid) {
    coefficients_of(r, upstream, place.at, factor ? factor[0] : (S)1, (S)scale, values);
  }
#pragma unroll
  for (int which = 0; which < FLCE_COEF_ROWS; which++) {
    coef[which * r.stat_pitch + place.at] = values[which];
  }
}

flce_status cuda_row_coefficients(void* self, const flce_rows* r, const flce_upstream* upstream,
                                  const void* factor, void* coef) {
  if (r->rows == 0) return FLCE_OK;
  const int64_t blocks = ceil_div(r->rows, kVectorThreads);
  FLCE_TRY(check_grid(blocks, "row_coefficients"));
  const double scale = r->options.logit_scale / r->options.temperature;
  FLCE_WITH_STAT(flce_stat_dtype(r->z_dtype), S, {
    FLCE_TRY(launch_next(self, row_coefficients<S>, (unsigned)blocks, kVectorThreads,
                         "row_coefficients", *r, *upstream, scale, (const S*)factor, (S*)coef));
  });
  return FLCE_OK;
}

/* ---- rows that are not computed ---- */

template <typename S>
__global__ void __launch_bounds__(kVectorThreads)
    blank_vectors(const __grid_constant__ flce_rows r, int64_t bound) {
  const int64_t i = (int64_t)blockIdx.x * kVectorThreads + threadIdx.x;
  S value;
  if (i < r.rows && is_left_out(r, i, bound, &value)) write_blank(r, i, value);
}

flce_status cuda_blank_rows(void* self, const flce_rows* r, int64_t bound, void* dx,
                            flce_dtype dx_dtype, int64_t hidden) {
  if (r->rows == 0) return FLCE_OK;
  if (dx) return cuda_blank_grad_input(self, r, bound, dx, dx_dtype, hidden);
  const int64_t blocks = ceil_div(r->rows, kVectorThreads);
  FLCE_TRY(check_grid(blocks, "blank_rows"));
  FLCE_WITH_STAT(flce_stat_dtype(r->z_dtype), S, {
    blank_vectors<S><<<(unsigned)blocks, kVectorThreads, 0, stream_of(self)>>>(*r, bound);
  });
  FLCE_LAUNCHED("blank_rows");
  return FLCE_OK;
}
