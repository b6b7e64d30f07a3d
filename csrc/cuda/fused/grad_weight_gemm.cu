/* The backend function grad_weight_gemm: the architecture's GEMM of dW, and what it leaves out,
 * operands without elements. */
#include "cuda/backend.cuh"
#include "cuda/fused/architectures.cuh"

flce_status cuda_grad_weight_gemm(void* self, const flce_gemm* g, const int64_t* index,
                                  const void* coef, void* sums, bool adds_sums) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  const architecture_kernels* kernels;
  if (g->m == 0 || g->n == 0) return FLCE_OK;
  FLCE_TRY(find_kernels(cuda->device, &kernels));
  if (g->k > 0) {
    return kernels->grad_weight_gemm(cuda->stream, cuda->device, g, index, coef, sums, adds_sums);
  }
  const int64_t parts = flce_bias_parts(&kernels->row->weight, g->n);
  FLCE_TRY(cuda_fill(self, sums, 0, adds_sums ? 0 : parts * g->m * (int64_t)sizeof(float)));
  return cuda_gemm(self, g, NULL, 0);
}
