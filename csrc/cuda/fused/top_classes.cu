/* Host side of the backend function top_classes, which reads z or what the fused logits GEMM has
 * written: E and, in its scratch, the largest E of each tile. */
#include "cuda/fused/architectures.cuh"
#include "cuda/rows/row_launch.cuh"
#include "cuda/rows/top_rows.cuh"

flce_status cuda_top_classes(void* self, const flce_rows* r, void* fused_scratch) {
  if (r->rows == 0 || r->vocab == 0) return FLCE_OK;
  FLCE_TRY(check_rows(r, "top_classes"));
  if (!fused_scratch) return launch_top_classes(self, r);
  const architecture_kernels* kernels;
  FLCE_TRY(find_kernels(((const flce_cuda*)self)->device, &kernels));
  const flce_logits_gemm_sizes* sizes = &kernels->row->logits;
  const ExpTops tops = {fused_scratch_of(fused_scratch, sizes, r).exp_tops,
                        (int)tiles_of(sizes, r->vocab), (int)sizes->tile_columns};
  return launch_top_classes_of_exp(self, r, tops);
}
