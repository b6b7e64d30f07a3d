/* Sums and maxima over a warp and over a block, in a fixed order, so that results are bitwise
 * reproducible. No atomics. */
#ifndef FLCE_CUDA_COMMON_REDUCTIONS_CUH
#define FLCE_CUDA_COMMON_REDUCTIONS_CUH

#include "cuda/common/types.cuh"

/* The sum over a warp; every lane gets it. */
template <typename S>
__device__ __forceinline__ S warp_sum(S v) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
  return v;
}

/* The maximum over a warp; every lane gets it. NaNs are ignored (fmax). */
template <typename S>
__device__ __forceinline__ S warp_max(S v) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) {
    v = fmax(v, __shfl_xor_sync(0xffffffffu, v, lane));
  }
  return v;
}

/* The sum over the block, in an order that depends only on the block's size; every thread gets it.
 * The block consists of whole warps and all its threads take part. `scratch` holds kMaxWarps
 * elements of shared memory. */
template <typename S>
__device__ __forceinline__ S block_sum(S v, S* scratch) {
  v = warp_sum(v);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = v;
  __syncthreads();
  S sum = 0;
  for (int warp = 0; warp < (int)blockDim.x / kWarp; warp++) sum += scratch[warp];
  __syncthreads(); /* the next reduction writes `scratch` */
  return sum;
}

/* The maximum over the block; as block_sum, NaNs ignored. */
template <typename S>
__device__ __forceinline__ S block_max(S v, S* scratch) {
  v = warp_max(v);
  if (threadIdx.x % kWarp == 0) scratch[threadIdx.x / kWarp] = v;
  __syncthreads();
  S top = scratch[0];
  for (int warp = 1; warp < (int)blockDim.x / kWarp; warp++) top = fmax(top, scratch[warp]);
  __syncthreads();
  return top;
}

#endif
