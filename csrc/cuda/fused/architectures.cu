/* The table of the architectures' kernels. */
#include "cuda/fused/architectures.cuh"

#include "cuda/backend.cuh"

/* By the index of the row. */
static constexpr architecture_kernels kKernels[] = {
    {&flce_architectures[FLCE_SM90], launch_logits_gemm_sm90, launch_grad_weight_gemm_sm90},
};
static_assert(sizeof(kKernels) / sizeof(*kKernels) == FLCE_ARCHITECTURES, "kernels for each row");

/* Whether the plan expects the kernels that there are, and top_classes can read a tile's columns of
 * E by vectors of 16 bytes. */
static constexpr bool fit_rows() {
  for (int i = 0; i < FLCE_ARCHITECTURES; i++) {
    const architecture_kernels& kernels = kKernels[i];
    if (kernels.row != &flce_architectures[i]) return false;
    if ((kernels.logits_gemm != nullptr) != (kernels.row->logits.tile_columns > 0)) return false;
    if (kernels.row->logits.tile_columns % 8 != 0) return false;
    if ((kernels.grad_weight_gemm != nullptr) != (kernels.row->weight.tile_columns > 0))
      return false;
  }
  return true;
}
static_assert(fit_rows(), "the kernels of a row, and NULL for those whose sizes are 0");

flce_status find_kernels(int device, const architecture_kernels** kernels) {
  int64_t capability;
  FLCE_TRY(cuda_capability(device, &capability));
  for (const architecture_kernels& one : kKernels) {
    *kernels = &one;
    if (one.row->capability == capability) return FLCE_OK;
  }
  return flce_fail(FLCE_UNSUPPORTED, "no GEMMs of flce's own for compute capability %lld",
                   (long long)capability);
}
