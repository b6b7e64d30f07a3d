/* Backend functions `reduce` and `column_sum`: sums in a fixed order, block by block. */
#include "cpu/convert.h"
#include "cpu/cpu.h"

#include <string.h>

flce_status flce_cpu_reduce(void* self, void* out, const void* values, int64_t count,
                            const void* factor, flce_dtype stat, bool may_overlap) {
  (void)self;
  (void)may_overlap;
  double sum = 0.0;
  for (int64_t i = 0; i < count; i++) sum += flce_load(values, stat, i);
  flce_store(out, stat, 0, factor ? flce_load(factor, stat, 0) * sum : sum);
  return FLCE_OK;
}

/* Rows that are summed on their own before the partial sums are added: it shortens the chain of
 * rounding errors. */
enum { GROUP_ROWS = 256 };

typedef struct column_job {
  const flce_column_sum_args* call;
  const flce_block_kernels *kernels, *stat_kernels;
  flce_dtype stat;
} column_job;

static void sum_block(const column_job* job, int64_t first, int64_t count) {
  const flce_column_sum_args* call = job->call;
  flce_sums sums;
  size_t bytes = (size_t)(count * flce_size_of(job->stat));
  void* out = flce_at(call->out, job->stat, first);
  if (!call->accumulate) memset(out, 0, bytes);
  for (int64_t group = 0; group < call->rows; group += GROUP_ROWS) {
    int64_t end = call->rows - group > GROUP_ROWS ? group + GROUP_ROWS : call->rows;
    memset(&sums, 0, bytes);
    for (int64_t i = group; i < end; i++) {
      double weight = call->weights ? flce_load(call->weights, job->stat, i) : 1.0;
      if (weight == 0.0) continue;
      job->kernels->axpy(&sums, weight,
                         flce_const_at(call->a, call->a_dtype, i * call->pitch + first), count);
    }
    job->stat_kernels->axpy(out, 1.0, &sums, count);
  }
}

static void column_range(int64_t begin, int64_t end, void* context) {
  const column_job* job = context;
  for (int64_t block = begin; block < end; block++) {
    int64_t first = block * FLCE_BLOCK;
    sum_block(job, first, flce_block_end(first, job->call->cols) - first);
  }
}

flce_status flce_cpu_column_sum(void* self, const flce_column_sum_args* call) {
  column_job job = {.call = call, .stat = flce_stat_dtype(call->a_dtype)};
  FLCE_TRY(flce_cpu_block_kernels(job.stat, call->a_dtype, &job.kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, job.stat, &job.stat_kernels));
  flce_cpu_parallel(self, flce_blocks(call->cols), call->rows * FLCE_BLOCK, column_range, &job);
  return FLCE_OK;
}
