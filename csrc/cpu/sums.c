/* Backend functions `reduce` and `column_sum`: sums in a fixed order, block by block. */
#include "cpu/convert.h"
#include "cpu/cpu.h"

#include <string.h>

flce_status flce_cpu_reduce(void* self, void* out, const void* values, int64_t count,
                            const void* factor, flce_dtype stat, bool overlaps) {
  (void)self, (void)overlaps;
  double sum = 0.0;
  for (int64_t i = 0; i < count; i++) sum += flce_load(values, stat, i);
  flce_store(out, stat, 0, factor ? flce_load(factor, stat, 0) * sum : sum);
  return FLCE_OK;
}

enum {
  GROUP_ROWS = 256
}; /* rows that are summed on their own before the partial sums are added: it shortens the chain of
      rounding errors */

typedef struct column_job {
  const flce_block_kernels *kernels, *stat_kernels;
  void* out;
  const void *a, *weights;
  flce_dtype dtype, stat;
  int64_t pitch, rows, cols;
  bool accumulate;
} column_job;

static void sum_block(const column_job* job, int64_t first, int64_t count) {
  flce_sums sums;
  size_t bytes = (size_t)(count * flce_size_of(job->stat));
  void* out = flce_at(job->out, job->stat, first);
  if (!job->accumulate) memset(out, 0, bytes);
  for (int64_t group = 0; group < job->rows; group += GROUP_ROWS) {
    int64_t end = job->rows - group > GROUP_ROWS ? group + GROUP_ROWS : job->rows;
    memset(&sums, 0, bytes);
    for (int64_t i = group; i < end; i++) {
      double weight = job->weights ? flce_load(job->weights, job->stat, i) : 1.0;
      if (weight == 0.0) continue;
      job->kernels->axpy(&sums, weight, flce_const_at(job->a, job->dtype, i * job->pitch + first),
                         count);
    }
    job->stat_kernels->axpy(out, 1.0, &sums, count);
  }
}

static void column_range(int64_t begin, int64_t end, void* context) {
  const column_job* job = context;
  for (int64_t block = begin; block < end; block++) {
    int64_t first = block * FLCE_BLOCK;
    sum_block(job, first, flce_block_end(first, job->cols) - first);
  }
}

flce_status flce_cpu_column_sum(void* self, const flce_column_sum_args* call) {
  column_job job = {.out = call->out,
                    .a = call->a,
                    .weights = call->weights,
                    .dtype = call->a_dtype,
                    .stat = flce_stat_dtype(call->a_dtype),
                    .pitch = call->pitch,
                    .rows = call->rows,
                    .cols = call->cols,
                    .accumulate = call->accumulate};
  FLCE_TRY(flce_cpu_block_kernels(job.stat, call->a_dtype, &job.kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, job.stat, &job.stat_kernels));
  flce_cpu_parallel(self, flce_blocks(call->cols), call->rows * FLCE_BLOCK, column_range, &job);
  return FLCE_OK;
}
