/* Loss and dz of packed rows (packed_rows.cuh) where p and q differ by much. What cancels in a
 * class where they do not is then small against the row's sums, so that no class needs the power
 * series of divergence.h. With P = a p and Q = b q, a = b = 1 or, for the JSD, a = 1 - beta and b =
 * beta, and m = P + Q, which is the JSD's mean of p and q, a class has
 *
 *                 grad_term               loss_term
 *   forward KL    P - Q                   P - Q - Q ln(P / Q)
 *   reverse KL    P log2(P / Q)           Q - P + P ln(P / Q)
 *   JSD           -P log2(m / p)          -P log2(m / p) - Q log2(m / q)
 *
 * The forward KL's gradient is grad_term. Those that take a mean have ln 2 (grad_term - P mean),
 * with mean the sum of grad_term over that of the rounded P: both nearly cancel in a class whose p
 * is almost 1. */
#ifndef FLCE_CUDA_ROWS_FAR_ROWS_CUH
#define FLCE_CUDA_ROWS_FAR_ROWS_CUH

#include "cuda/common/reductions.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/rows/packed_rows.cuh"
#include "cuda/rows/row.cuh"
#include "divergence.h"

constexpr float kLn2 = (float)(1 / FLCE_LOG2E);

/* Of a class: log2 P = (log2_larger + p_shift) + min(r, 0), log2 Q = (log2_larger + q_shift) -
 * max(r, 0), log2(P / Q) = r + ratio_shift. dz = coef_grad grad_term + coef_p P; in the column of
 * the hard label coef_p_at_target stands for coef_p, and at_target is added. */
struct FarRow {
  const float* words;
  int vocab, target;
  float p_shift, q_shift, ratio_shift;
  float log2_a, log2_b;
  float sum_loss, sum_grad, sum_p; /* over the classes: loss_term, grad_term, P */
  float coef_grad, coef_p, coef_p_at_target, at_target;
};

/* What a divergence adds to the sums and to dz. kMixes: a = 1 - beta and b = beta, else 1.
 * kGradUnit, kLossUnit: of the terms, in nats. make: the terms of a class whose ratio is
 * log2(P / Q). One without its terms here does not compile. */
template <flce_divergence KIND>
struct FarTerms;

template <>
struct FarTerms<FLCE_FORWARD_KL> {
  static constexpr bool kMixes = false;
  static constexpr float kGradUnit = 1, kLossUnit = 1;
  static __device__ __forceinline__ float make(const FarRow&, float P, float Q, float ratio,
                                               float* loss_term) {
    const float grad_term = P - Q;
    *loss_term = Q > 0 ? fmaf(-kLn2 * Q, ratio, grad_term) : grad_term;
    return grad_term;
  }
};

template <>
struct FarTerms<FLCE_REVERSE_KL> {
  static constexpr bool kMixes = false;
  static constexpr float kGradUnit = kLn2, kLossUnit = 1;
  static __device__ __forceinline__ float make(const FarRow&, float P, float Q, float ratio,
                                               float* loss_term) {
    const float grad_term = P == 0 ? 0 : P * ratio;
    *loss_term = fmaf(kLn2, grad_term, Q - P);
    return grad_term;
  }
};

template <>
struct FarTerms<FLCE_JSD> {
  static constexpr bool kMixes = true;
  static constexpr float kGradUnit = kLn2, kLossUnit = kLn2;
  static __device__ __forceinline__ float make(const FarRow& row, float P, float Q, float ratio,
                                               float* loss_term) {
    const float log2_m = log2_fast(1 + exp2_fast(-fabsf(ratio))); /* m over the larger of P and Q */
    const float grad_term = -P * ((log2_m + row.log2_a) - fmaxf(fminf(ratio, 0), -1e30f));
    *loss_term = fmaf(-Q, (log2_m + row.log2_b) + fminf(fmaxf(ratio, 0), 1e30f), grad_term);
    return grad_term;
  }
};

/* grad_term and P of a class; adds to the sums if SUMS. Where P or Q is 0 the ratio is infinite:
 * every product with it is guarded. */
template <flce_divergence KIND, bool SUMS>
__device__ __forceinline__ float far_class(FarRow& row, uint32_t word, float* p) {
  const PackedClass both = unpack_class(word);
  const float ratio = both.r + row.ratio_shift; /* log2(P / Q) */
  const float P = exp2_fast((both.log2_larger + row.p_shift) + fminf(both.r, 0));
  const float Q = exp2_fast((both.log2_larger + row.q_shift) - fmaxf(both.r, 0));
  float loss_term;
  const float grad_term = FarTerms<KIND>::make(row, P, Q, ratio, &loss_term);
  if (SUMS) row.sum_loss += loss_term;
  if (SUMS && flce_takes_mean(KIND)) {
    row.sum_grad += grad_term;
    row.sum_p += P;
  }
  *p = P;
  return grad_term;
}

/* A tile of vectors from `first` on. INSIDE: all of its columns are in the row, and none is the
 * hard label's. needs_barrier: all threads must have loaded the tile before any stores dz. */
template <flce_divergence KIND, bool SUMS, bool GRADS, bool INSIDE, typename Out>
__device__ __forceinline__ void far_tile(FarRow& row, Out* out, int first, bool needs_barrier) {
  constexpr int N = kVec<float>, U = kUnroll<float>;
  Vec<float, N> words[U];
#pragma unroll
  for (int u = 0; u < U; u++) {
    const int col = (first + threadIdx.x + u * blockDim.x) * N;
    if constexpr (INSIDE) {
      load_vec<GRADS>(row.words + col, words[u]);
    } else {
      load_columns<GRADS>(row.words, col, row.vocab, words[u]);
    }
  }
  if (needs_barrier) __syncthreads();
#pragma unroll
  for (int u = 0; u < U; u++) {
    const int col = (first + threadIdx.x + u * blockDim.x) * N;
    float dz[N];
#pragma unroll
    for (int e = 0; e < N; e++) {
      const uint32_t word = __float_as_uint(words[u].at[e]);
      float p;
      const float grad_term =
          far_class<KIND, SUMS>(row, INSIDE || col + e < row.vocab ? word : kAbsentClass, &p);
      const bool at_target = !INSIDE && col + e == row.target;
      dz[e] = row.coef_grad * grad_term +
              (at_target ? fmaf(row.coef_p_at_target, p, row.at_target) : row.coef_p * p);
    }
    if constexpr (GRADS) {
      Vec<Out, N> packed;
      pack(dz, packed);
      if constexpr (INSIDE) {
        store_vec(out + col, packed);
      } else {
        store_columns(out, col, row.vocab, packed);
      }
    }
  }
}

/* All tiles of a row, from its end to its begin if only sums are made. dz of tile t overwrites
 * words of tile t / 2, as an element takes half of a word. A barrier in tile k allows stores up to
 * tile 2 k + 1, so there is one in tiles 0, 2, 6, 14, and so on. */
template <flce_divergence KIND, bool SUMS, bool GRADS, typename Out>
__device__ __forceinline__ void far_pass(FarRow& row, Out* out) {
  static_assert(sizeof(Out) == 2, "an element of dz is half of a word");
  const int step = kUnroll<float> * blockDim.x, columns = step * kVec<float>;
  const int tiles = (row.vocab + columns - 1) / columns;
  for (int i = 0; i < tiles; i++) {
    const int tile = GRADS ? i : tiles - 1 - i, begin = tile * columns;
    const bool needs_barrier = GRADS && ((tile + 2) & (tile + 1)) == 0;
    const bool has_target = GRADS && (unsigned)row.target - (unsigned)begin < (unsigned)columns;
    if (begin + columns <= row.vocab && !has_target) {
      far_tile<KIND, SUMS, GRADS, true>(row, out, tile * step, needs_barrier);
    } else {
      far_tile<KIND, SUMS, GRADS, false>(row, out, tile * step, needs_barrier);
    }
  }
}

/* Results of a row, in nats: the loss, and `mean` of flce_divergence_mean. */
struct FarResult {
  float loss, mean;
};

template <flce_divergence KIND>
__device__ __forceinline__ FarResult reduce_sums(const FarRow& row, float a, float* scratch) {
  using Terms = FarTerms<KIND>;
  const float loss = block_sum(row.sum_loss, scratch);
  if (!flce_takes_mean(KIND)) return {Terms::kLossUnit * loss, 0};
  const float scale = Terms::kGradUnit * a;
  const float mean = scale * block_sum(row.sum_grad, scratch) / block_sum(row.sum_p, scratch);
  return {Terms::kLossUnit * loss, mean};
}

/* The results, and dz where `out` is one: the row's own memory. p_shift, q_shift and ratio_shift
 * are those for a = b = 1. factor, soft, hard: RowPair's. */
template <flce_divergence KIND, typename Out>
__device__ __forceinline__ FarResult far_row(FarRow row, Out* out, double beta, float factor,
                                             float soft, float hard, float* scratch) {
  constexpr bool kInOnePass = !flce_takes_mean(KIND);
  float a = 1;
  if (FarTerms<KIND>::kMixes) { /* 1 - beta may be below float's epsilon */
    a = (float)(1 - beta);
    row.log2_a = (float)log2(1 - beta);
    row.log2_b = (float)log2(beta);
  }
  row.p_shift += row.log2_a;
  row.q_shift += row.log2_b;
  row.ratio_shift += row.log2_a - row.log2_b;
  row.coef_grad = factor * soft * FarTerms<KIND>::kGradUnit;
  row.coef_p = factor * hard;
  if constexpr (kInOnePass) {
    if (out) {
      far_pass<KIND, true, true>(row, out);
      return reduce_sums<KIND>(row, a, scratch);
    }
  }
  far_pass<KIND, true, false>(row, out);
  const FarResult made = reduce_sums<KIND>(row, a, scratch);
  if constexpr (!kInOnePass) {
    if (!out) return made;
    row.coef_p_at_target = -factor * soft * made.mean / a;
    row.coef_p = row.coef_p_at_target + factor * hard / a;
    far_pass<KIND, false, true>(row, out);
    __syncthreads(); /* pad_row may overwrite words that other threads still read */
  }
  return made;
}

#endif
