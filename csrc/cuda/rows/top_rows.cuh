/* Launches of top_rows.cu. */
#ifndef FLCE_CUDA_ROWS_TOP_ROWS_CUH
#define FLCE_CUDA_ROWS_TOP_ROWS_CUH

#include "cuda/backend.cuh"

/* The largest E of each row in each column tile of the fused logits GEMM. */
struct ExpTops {
  const float* values; /* [tiles][rows], or NULL: the GEMM has not written them */
  int tiles, columns;  /* columns: of a tile, a multiple of 8 */
};

/* top_classes from the logits z; and from E in `out`. The call has rows and classes. */
flce_status launch_top_classes(void* self, const flce_rows* rows);
flce_status launch_top_classes_of_exp(void* self, const flce_rows* rows, const ExpTops& tops);

#endif
