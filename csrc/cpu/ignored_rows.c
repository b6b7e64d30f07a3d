/* Backend functions `compact_rows` (lists the rows that are computed) and `blank_rows` (stores the
 * results of the ignored rows, which are not). */
#include "cpu/convert.h"
#include "cpu/cpu.h"

#include <math.h>

flce_status flce_cpu_compact_rows(void* self, const flce_problem* problem, const int64_t* target,
                                  void* index) {
  (void)self;
  int64_t* rows = index;
  int64_t count = 0;
  for (int64_t i = 0; i < problem->shape.tokens && count < problem->shape.rows; i++)
    if (target[i] != problem->loss.ignore_index) rows[count++] = i;
  while (count < problem->shape.rows) rows[count++] = -1;
  return FLCE_OK;
}

flce_status flce_cpu_blank_rows(void* self, const flce_rows* rows, int64_t bound, void* dx,
                                flce_dtype dx_dtype, int64_t hidden) {
  (void)self;
  flce_dtype stat = flce_stat_dtype(rows->z_dtype);
  bool spoilt = flce_load(rows->scalars, stat, FLCE_SCALAR_VALID) > (double)bound;
  for (int64_t i = 0; i < rows->rows; i++) {
    bool ignored = flce_row_kind_at(rows, i) == FLCE_ROW_IGNORED;
    double value = ignored ? 0.0 : NAN;
    if (!ignored && !spoilt) continue;
    if (dx)
      flce_fill(flce_at(dx, dx_dtype, i * hidden), dx_dtype, value, hidden);
    else
      flce_cpu_blank_stats(rows, stat, i, value);
  }
  return FLCE_OK;
}
