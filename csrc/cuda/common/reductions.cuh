/* Sums and maxima over a warp and a block, in a fixed order. */
#ifndef FLCE_CUDA_COMMON_REDUCTIONS_CUH
#define FLCE_CUDA_COMMON_REDUCTIONS_CUH

#include "cuda/common/types.cuh"

/* The sum over a warp, in every lane. */
template <typename S>
__device__ __forceinline__ S warp_sum(S v) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) v += __shfl_xor_sync(0xffffffffu, v, lane);
  return v;
}

/* The same for the maximum. A NaN is passed over. */
template <typename S>
__device__ __forceinline__ S warp_max(S v) {
#pragma unroll
  for (int lane = kWarp / 2; lane > 0; lane /= 2) {
    v = fmax(v, __shfl_xor_sync(0xffffffffu, v, lane));
  }
  return v;
}

/* The sum over the block, in an order that only the block's size decides; every thread gets it.
 * All threads of whole warps take part. */
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
