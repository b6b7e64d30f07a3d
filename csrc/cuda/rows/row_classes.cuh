/* The classes of a row (flce_row_classes) as columns of this rank. */
#ifndef FLCE_CUDA_ROWS_ROW_CLASSES_CUH
#define FLCE_CUDA_ROWS_ROW_CLASSES_CUH

#include "cuda/common/row_status.cuh"

/* Where a class of a row is: its column on this rank, or one of these. */
enum { kColumnElsewhere = -1, kColumnInvalid = -2 };

__device__ __forceinline__ int64_t column_of_class(const flce_rows& r, int64_t id) {
  if (id == r.classes.none) return kColumnElsewhere;
  if (id < 0 || id >= r.classes.all) return kColumnInvalid;
  const int64_t column = id - r.classes.first;
  return column >= 0 && column < r.vocab ? column : kColumnElsewhere;
}

#endif
