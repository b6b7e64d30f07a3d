/* Loss and dz of packed rows (packed_rows.cuh) whose student and teacher are far apart: what nearly
 * cancels in one class is small against the row's sums there, so the terms of divergence.h need no
 * power series. With P = p and Q = q, of the JSD P = (1 - beta) p, Q = beta q and m = p and q
 * averaged so:
 *
 *                 pull                  value
 *   forward KL    P - Q                 pull - Q log(P / Q)
 *   reverse KL    P log2(P / Q)         Q - P + pull, in nats
 *   JSD           -P log2(m / p)        pull - Q log2(m / q)
 *
 * dz is pull minus P times its sum over the sum of P, which is that of the rounded P, because both
 * nearly cancel in a class whose p is almost 1. */
#ifndef FLCE_CUDA_ROWS_FAR_ROWS_CUH
#define FLCE_CUDA_ROWS_FAR_ROWS_CUH

#include "cuda/common/reductions.cuh"
#include "cuda/common/vectors.cuh"
#include "cuda/rows/packed_rows.cuh"
#include "cuda/rows/row.cuh"
#include "divergence.h"

constexpr float kLn2 = (float)(1 / FLCE_LOG2E);
/* P and Q are kUnit of what they stand for: those of 2^-64 and absent classes are flushed to 0. */
constexpr float kUnit = 0x1p-64f, kLog2Unit = -64;

/* log2 of a class's P is that of its larger one plus p_shift plus min(r, 0), and so on. dz =
 * of_pull pull + of_p P, in the hard label's column of_pull pull + of_soft P + of_target. */
struct FarRow {
  const float* words;
  int vocab, target;
  float p_shift, q_shift, ratio_shift;
  float log2_p_share, log2_q_share; /* log2 of P / p and of Q / q, but for kUnit */
  float value, mean, p;             /* sums over the classes: value, pull, P */
  float of_pull, of_soft, of_p, of_target;
};

/* pull and P of a class; adds to the sums if SUMS. Where P or Q is 0 the ratio may be infinite. */
template <flce_divergence KIND, bool SUMS>
__device__ __forceinline__ void far_class(FarRow& row, uint32_t word, float* pull, float* p) {
  const PackedClass both = unpack_least(word);
  const float ratio = both.r + row.ratio_shift; /* log2(P / Q) */
  const float P = exp2_fast((both.log2_larger + row.p_shift) + fminf(both.r, 0));
  float Q = 0, value = 0;
  if (KIND == FLCE_FORWARD_KL || SUMS)
    Q = exp2_fast((both.log2_larger + row.q_shift) - fmaxf(both.r, 0));
  if (KIND == FLCE_FORWARD_KL) {
    *pull = P - Q;
    value = Q > 0 ? fmaf(-kLn2 * Q, ratio, *pull) : *pull;
  } else if (KIND == FLCE_REVERSE_KL) {
    /* Infinite where the teacher alone excludes the class, unless p is below what is packed. */
    *pull = P > 0 && (word & 0xffff) != 0xffff ? P * ratio : 0;
    value = fmaf(kLn2, *pull, Q - P);
  } else {
    /* log2 of P + Q over the larger of both */
    const float m = log2_fast(1 + exp2_fast(-fabsf(ratio)));
    *pull = -P * ((m + row.log2_p_share) - fmaxf(fminf(ratio, 0), -1e30f));
    value = fmaf(-Q, (m + row.log2_q_share) + fminf(fmaxf(ratio, 0), 1e30f), *pull);
  }
  *p = P;
  if (!SUMS) return;
  row.value += value;
  if (KIND == FLCE_FORWARD_KL) return;
  row.mean += *pull;
  row.p += P;
}

/* A tile of vectors from `first` on. INSIDE: all of its columns are in the row, where `out` has
 * their alignment, and none is the hard label's. `waits`: for all threads to have read it, as dz
 * overwrites the row. */
template <flce_divergence KIND, bool SUMS, bool GRADS, bool INSIDE, typename Out>
__device__ __forceinline__ void far_tile(FarRow& row, Out* out, int first, bool waits) {
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
  if (waits) __syncthreads();
#pragma unroll
  for (int u = 0; u < U; u++) {
    const int col = (first + threadIdx.x + u * blockDim.x) * N;
    float dz[N];
#pragma unroll
    for (int e = 0; e < N; e++) {
      const uint32_t word = __float_as_uint(words[u].at[e]);
      float p, pull;
      far_class<KIND, SUMS>(row, INSIDE || col + e < row.vocab ? word : kAbsentClass, &pull, &p);
      const bool target = !INSIDE && col + e == row.target;
      dz[e] = row.of_pull * pull + (target ? fmaf(row.of_soft, p, row.of_target) : row.of_p * p);
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

/* All tiles of a row, from its end to its begin if only sums are made. dz takes half of a word, so
 * what tile 2 k + 1 writes is words of tiles up to k: after all threads have read tile k, the block
 * need not wait before tile 2 k + 2. */
template <flce_divergence KIND, bool SUMS, bool GRADS, typename Out>
__device__ __forceinline__ void far_pass(FarRow& row, Out* out) {
  static_assert(sizeof(Out) == 2, "dz takes half of a word");
  const int step = kUnroll<float> * blockDim.x, columns = step * kVec<float>;
  const int tiles = (row.vocab + columns - 1) / columns;
  const bool aligned = !GRADS || is_aligned(out, kVec<float> * sizeof(Out));
  for (int i = 0; i < tiles; i++) {
    const int tile = GRADS ? i : tiles - 1 - i, begin = tile * columns;
    const bool waits = GRADS && ((tile + 2) & (tile + 1)) == 0;
    const bool has_target = GRADS && (unsigned)(row.target - begin) < (unsigned)columns;
    if (aligned && begin + columns <= row.vocab && !has_target) {
      far_tile<KIND, SUMS, GRADS, true>(row, out, tile * step, waits);
    } else {
      far_tile<KIND, SUMS, GRADS, false>(row, out, tile * step, waits);
    }
  }
}

/* From the sums of all threads: the loss, and `mean`, the sum of flce_divergence_terms, in nats.
 * p_share: P / p but for kUnit. */
template <flce_divergence KIND>
__device__ __forceinline__ void finish_sums(FarRow& row, float p_share, float* scratch) {
  row.value = block_sum(row.value, scratch) * ((KIND == FLCE_JSD ? kLn2 : 1) / kUnit);
  if (KIND == FLCE_FORWARD_KL) return;
  row.mean = block_sum(row.mean, scratch) * kLn2 * p_share / block_sum(row.p, scratch);
}

/* Loss and, where `out` is one, dz of a row, whose fields up to ratio_shift are those for P = p and
 * Q = q. factor, soft, hard: RowPair's. */
template <flce_divergence KIND, typename Out>
__device__ __forceinline__ void far_row(FarRow& row, Out* out, float beta, float factor, float soft,
                                        float hard, float* scratch) {
  const float p_share = KIND == FLCE_JSD ? 1 - beta : 1;
  if (KIND == FLCE_JSD) {
    row.log2_p_share = log2f(p_share);
    row.log2_q_share = log2f(beta);
  }
  row.p_shift += row.log2_p_share + kLog2Unit;
  row.q_shift += row.log2_q_share + kLog2Unit;
  row.ratio_shift += row.log2_p_share - row.log2_q_share;
  factor /= kUnit;
  row.of_pull = factor * soft * (KIND == FLCE_FORWARD_KL ? 1 : kLn2);
  row.of_p = factor * hard;
  if (KIND == FLCE_FORWARD_KL && out) {
    far_pass<KIND, true, true>(row, out);
    return finish_sums<KIND>(row, p_share, scratch);
  }
  far_pass<KIND, true, false>(row, out);
  finish_sums<KIND>(row, p_share, scratch);
  if (!out) return;
  row.of_soft = -factor * soft * row.mean / p_share;
  row.of_p = row.of_soft + factor * hard / p_share;
  far_pass<KIND, false, true>(row, out);
  __syncthreads(); /* what follows the last column may be words of a tile that has not been read */
}

#endif
