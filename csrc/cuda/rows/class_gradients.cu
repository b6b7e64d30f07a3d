/* class_gradients: the columns of a few classes of each row of dz, from the logits of these
 * classes, which are not rounded. */
#include "cuda/backend.cuh"
#include "cuda/common/pdl.cuh"
#include "cuda/rows/row_classes.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/rows/statistics.cuh"

enum { kMostThreads = 256, kFilterBits = 4096 };

/* Bits of the ids modulo kFilterBits: of a row's ids, and of those that two or more of them share.
 * A row of different classes then needs no search for equal ones. */
struct IdFilter {
  unsigned seen[kFilterBits / 32], again[kFilterBits / 32];
};

__device__ __forceinline__ void fill_filter(const int64_t* ids, int64_t count, IdFilter& filter) {
  for (int i = threadIdx.x; i < kFilterBits / 32; i += blockDim.x)
    filter.seen[i] = filter.again[i] = 0;
  __syncthreads();
  for (int64_t k = threadIdx.x; k < count; k += blockDim.x) {
    const unsigned at = (uint64_t)ids[k] % kFilterBits, bit = 1u << at % 32;
    if (atomicOr(&filter.seen[at / 32], bit) & bit) atomicOr(&filter.again[at / 32], bit);
  }
  __syncthreads();
}

/* Sums the gradients of all classes of the row that equal that of index k, in their order, unless
 * one before k is equal: then false. `grads` may be NULL, for 0. */
template <typename S>
__device__ __forceinline__ bool sum_of_equal(const int64_t* ids, const S* grads, int64_t count,
                                             int64_t k, const IdFilter& filter, S& sum) {
  const int64_t id = ids[k];
  const unsigned at = (uint64_t)id % kFilterBits;
  sum = grads ? grads[k] : 0;
  if ((filter.again[at / 32] >> at % 32 & 1) == 0) return true;
  for (int64_t j = 0; j < k; j++) {
    if (ids[j] == id) return false;
  }
  for (int64_t j = k + 1; grads && j < count; j++) {
    if (ids[j] == id) sum += grads[j];
  }
  return true;
}

/* What dz of a row's columns is made of, by the formula of enum flce_coef_row. mean_logit: m - c.
 */
template <typename S>
struct ColumnTerms {
  S offset, row, target, smooth, soft, entropy, mean_logit;
};

template <typename S>
__device__ __forceinline__ ColumnTerms<S> column_terms_at(const flce_rows& r, int64_t at) {
  const S *coef = (const S*)r.coef + at, *stats = (const S*)r.stats + at;
  const auto coef_of = [&](int which) { return coef[which * r.stat_pitch]; };
  ColumnTerms<S> terms;
  terms.offset = stats[FLCE_STAT_OFFSET * r.stat_pitch];
  terms.row = coef_of(FLCE_COEF_EXP);
  terms.target = coef_of(FLCE_COEF_TARGET);
  terms.smooth = coef_of(FLCE_COEF_SMOOTH);
  terms.soft = coef_of(FLCE_COEF_SOFT);
  terms.entropy = coef_of(FLCE_COEF_ENTROPY);
  terms.mean_logit = 0;
  if (terms.entropy != 0) {
    terms.mean_logit =
        -log(stats[FLCE_STAT_INV_SUM * r.stat_pitch]) - stats[FLCE_STAT_ENTROPY * r.stat_pitch];
  }
  return terms;
}

/* A probability of any dtype. */
template <typename S>
__device__ __forceinline__ S probability_at(const flce_rows& r, const void* row, int64_t column) {
  switch (r.probabilities_dtype) {
    case FLCE_F64:
      return (S)((const double*)row)[column];
    case FLCE_F32:
      return (S)((const float*)row)[column];
    case FLCE_BF16:
      return (S)to_stat(((const __nv_bfloat16*)row)[column]);
    case FLCE_F16:
      return (S)to_stat(((const __half*)row)[column]);
  }
  return (S)NAN;
}

/* dz of a column whose logit of the linear layer is z, without the gradient of z itself. */
template <typename S>
__device__ __forceinline__ S gradient_of_column(const flce_rows& r, const Row<S>& row,
                                                const ColumnTerms<S>& terms, int64_t column, S z) {
  const S t = capped<false>(row.curve, row.inner_scale, z), l = row.outer_scale * t;
  const S slope = cap_slope(row.curve, t), e = exp(l - terms.offset);
  const bool is_target = column == row.target;
  S pushed = is_target ? (S)0 : e * terms.row, pull = terms.smooth;
  /* entropy_term gives 0 and not NaN where l is -inf. */
  if (terms.entropy != 0) {
    pushed -= terms.entropy * entropy_term(e, l - terms.offset, terms.mean_logit);
  }
  if (terms.soft != 0) pull += terms.soft * probability_at<S>(r, row.probabilities, column);
  if (pull != 0 && row.class_weight) pull *= row.class_weight[column];
  return (is_target ? terms.target : (S)0) + slope * (pushed - pull);
}

/* A block for each row, a thread for each of its classes: no two write the same column. r.z: the
 * logits of the classes, [][classes.count]. */
template <typename T>
__global__ void __launch_bounds__(kMostThreads)
    class_gradients(const __grid_constant__ row_args p, const float* scale) {
  using S = stat_t<T>;
  __shared__ IdFilter filter;
  const flce_rows& r = p.r;
  const int64_t count = r.classes.count;
  pdl_wait();
  const RowRef ref = row_ref_of(r, blockIdx.x);
  if (ref.kind != kRowValid) return;
  const Row<S> row = open_row_view<kGeneral, S>(p, ref.at);
  const ColumnTerms<S> terms = column_terms_at<S>(r, ref.at);
  const int64_t* ids = r.classes.ids + ref.at * count;
  const S* z = (const S*)r.classes.z + ref.at * count;
  const S* grads = r.classes.grads ? (const S*)r.classes.grads + ref.at * count : NULL;
  const S factor = scale ? (S)(1 / scale[0]) : (S)1;
  T* dz = (T*)r.out + (int64_t)blockIdx.x * r.out_pitch;
  bool invalid = false;
  fill_filter(ids, count, filter);
  for (int64_t k = threadIdx.x; k < count; k += blockDim.x) {
    const int64_t column = column_of_class(r, ids[k]);
    invalid |= column == kColumnInvalid;
    S sum;
    if (column >= 0 && sum_of_equal(ids, grads, count, k, filter, sum)) {
      dz[column] = from_stat<T>(gradient_of_column(r, row, terms, column, z[k]) + factor * sum);
    }
  }
  if (__syncthreads_or(invalid) && threadIdx.x == 0) dz[0] = from_stat<T>((S)NAN);
}

flce_status cuda_class_gradients(void* self, const flce_rows* r, const float* scale) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  FLCE_TRY(check_rows(r, "class_gradients"));
  flce_rows view = *r;
  view.z = r->classes.z; /* of the stat dtype, with the bias; rows are opened, not read */
  view.z_pitch = 0;
  const row_args args = make_args(&view);
  const int threads = threads_for(r->classes.count, kMostThreads);
  FLCE_WITH_TYPE(r->out_dtype, T, {
    FLCE_TRY(launch_dependent(self, class_gradients<T>, (unsigned)r->rows, threads,
                              "class_gradients", args, scale));
  });
  return FLCE_OK;
}
