/* Backend function `class_logits`: logits of a few classes of each row. */
#include "cpu/convert.h"
#include "cpu/row_classes.h"

#include <math.h>

typedef struct logits_job {
  const flce_class_logits_args* call;
  const flce_block_kernels* kernels; /* of the operands, in the stat dtype */
} logits_job;

enum { LANES = 8 }; /* independent sums, which the compiler keeps in vectors */

/* The dot product of the rows, from blocks that are widened to the stat dtype. */
static double dot(const logits_job* job, int64_t i, int64_t column) {
  flce_dtype dtype = job->call->dtype;
  int64_t hidden = job->call->hidden;
  double lanes[LANES] = {0.0}, sum = 0.0;
  flce_sums x, w;
  for (int64_t h = 0, next; h < hidden; h = next) {
    next = flce_block_end(h, hidden);
    int64_t count = next - h;
    job->kernels->scaled(&x, 1.0, flce_const_at(job->call->x, dtype, i * hidden + h), count);
    job->kernels->scaled(&w, 1.0, flce_const_at(job->call->w, dtype, column * hidden + h), count);
    bool wide = dtype == FLCE_F64;
    for (int64_t k = 0; k < count; k++)
      lanes[k % LANES] += wide ? x.wide[k] * w.wide[k] : (double)x.narrow[k] * (double)w.narrow[k];
  }
  for (int lane = 0; lane < LANES; lane++) sum += lanes[lane];
  return sum;
}

static void logits_range(int64_t begin, int64_t end, void* context) {
  const logits_job* job = context;
  const flce_class_logits_args* call = job->call;
  const flce_rows* rows = call->rows;
  const flce_row_classes* classes = &rows->classes;
  flce_dtype stat = flce_stat_dtype(call->dtype);
  for (int64_t i = begin; i < end; i++) {
    flce_row_kind kind = flce_row_kind_at(rows, i);
    for (int64_t k = i * classes->count; k < (i + 1) * classes->count; k++) {
      bool exists;
      int64_t column = flce_cpu_class_column(rows, classes->ids[k], &exists);
      double z = kind == FLCE_ROW_OUT_OF_RANGE || !exists ? NAN : 0.0;
      if (kind == FLCE_ROW_VALID && column >= 0) {
        z = dot(job, i, column);
        if (call->rounded == FLCE_BF16) z = (double)flce_from_bf16(flce_to_bf16((float)z));
        if (call->bias) z += flce_load(call->bias, stat, column);
      }
      if (kind == FLCE_ROW_IGNORED) z = 0.0;
      flce_store(call->out, stat, k, z);
    }
  }
}

flce_status flce_cpu_class_logits(void* self, const flce_class_logits_args* call) {
  const flce_rows* rows = call->rows;
  if (call->rounded == FLCE_F16)
    return flce_fail(FLCE_UNSUPPORTED, "class_logits: no CPU logits in float16");
  logits_job job = {.call = call};
  FLCE_TRY(flce_cpu_block_kernels(flce_stat_dtype(call->dtype), call->dtype, &job.kernels));
  flce_cpu_parallel(self, rows->rows, rows->classes.count * call->hidden, logits_range, &job);
  return FLCE_OK;
}
