/* The classes of a row (flce_row_classes) as columns of this rank. */
#ifndef FLCE_CPU_ROW_CLASSES_H
#define FLCE_CPU_ROW_CLASSES_H

#include "cpu/cpu.h"

/* The column of class `id` on this rank; -1 if it is another rank's, no class, or `none`. *exists:
 * whether `id` is a class of the vocabulary or `none`. */
static inline int64_t flce_cpu_class_column(const flce_rows* rows, int64_t id, bool* exists) {
  const flce_row_classes* classes = &rows->classes;
  int64_t column = id - classes->first;
  bool none = id == classes->none;
  *exists = none || (id >= 0 && id < classes->all);
  return !none && *exists && column >= 0 && column < rows->vocab ? column : -1;
}

#endif
