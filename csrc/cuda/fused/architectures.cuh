/* The kernels of the architectures that have GEMMs of their own: the launches that a row of
 * architectures.h stands for. */
#ifndef FLCE_CUDA_FUSED_ARCHITECTURES_CUH
#define FLCE_CUDA_FUSED_ARCHITECTURES_CUH

#include "architectures.h"
#include "cuda/fused/fused_logits.cuh"

/* z = x W^T; writes the tiles' sums to `scratch`, and E or z to `out`, which is [rows][pitch] of
 * bfloat16 for E and of float32 for z. Packed logits replace the teacher's z in `out`. `retry`:
 * computes again, from the offsets in scratch.top, the row clusters in which an earlier call
 * exceeded the limit; if there are none the kernel returns at once. */
typedef flce_status logits_gemm_launch(void* stream, int device, const fused_params* params,
                                       const fused_scratch* scratch, const void* x, const void* w,
                                       FusedResult result, void* out, int64_t pitch, bool retry);

/* grad_weight_gemm of backend.h, with a k of at least 1 and a dW that is not empty. */
typedef flce_status grad_weight_launch(void* stream, int device, const flce_gemm* gemm,
                                       const int64_t* index, const void* coef, void* sums,
                                       bool adds_sums);

/* A launch is NULL where the row has sizes of 0. */
typedef struct architecture_kernels {
  const flce_architecture* row;
  logits_gemm_launch* logits_gemm;
  grad_weight_launch* grad_weight_gemm;
} architecture_kernels;

/* Those of the device. FLCE_UNSUPPORTED if it has none. */
flce_status find_kernels(int device, const architecture_kernels** kernels);

/* csrc/cuda/sm90 */
logits_gemm_launch launch_logits_gemm_sm90;
grad_weight_launch launch_grad_weight_gemm_sm90;

#endif
