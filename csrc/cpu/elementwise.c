/* Backend functions `fill`, `cast`, `add_block` and `scale_grads`: elementwise passes, block by
 * block. */
#include "cpu/convert.h"
#include "cpu/cpu.h"

#include <string.h>

flce_status flce_cpu_fill(void* self, void* data, int byte, int64_t bytes) {
  (void)self;
  if (bytes > 0) memset(data, byte, (size_t)bytes);
  return FLCE_OK;
}

/* ---- out = factor * in ---- */

typedef struct scale_job {
  flce_scaled array;
  const flce_block_kernels *in_kernels, *out_kernels;
  double factor;
} scale_job;

static void scale_range(int64_t begin, int64_t end, void* context) {
  const scale_job* job = context;
  const flce_scaled* array = &job->array;
  flce_sums sums;
  for (int64_t block = begin; block < end; block++) {
    int64_t first = block * FLCE_BLOCK, count = flce_block_end(first, array->count) - first;
    job->in_kernels->scaled(&sums, job->factor, flce_const_at(array->in, array->in_dtype, first),
                            count);
    job->out_kernels->narrow(flce_at(array->out, array->out_dtype, first), &sums, count);
  }
}

static flce_status scale(const void* self, flce_scaled array, double factor) {
  scale_job job = {.array = array, .factor = factor};
  bool wide = array.in_dtype == FLCE_F64 || array.out_dtype == FLCE_F64;
  flce_dtype stat = wide ? FLCE_F64 : FLCE_F32;
  /* Without elements both pointers may be NULL, hence equal, without being an in-place cast. */
  if (array.count > 0 && array.out == array.in && array.out_dtype != array.in_dtype)
    return flce_fail(FLCE_UNSUPPORTED, "expected one dtype in place, got %s for %s",
                     flce_dtype_name(array.out_dtype), flce_dtype_name(array.in_dtype));
  FLCE_TRY(flce_cpu_block_kernels(stat, array.in_dtype, &job.in_kernels));
  FLCE_TRY(flce_cpu_block_kernels(stat, array.out_dtype, &job.out_kernels));
  flce_cpu_parallel(self, flce_blocks(array.count), FLCE_BLOCK, scale_range, &job);
  return FLCE_OK;
}

flce_status flce_cpu_cast(void* self, const flce_cast_args* call) {
  /* Both are contiguous: one pass over all rows. */
  bool whole = call->out_pitch == call->cols && call->in_pitch == call->cols;
  int64_t size = flce_size_of(call->out_dtype), padding = (call->out_pitch - call->cols) * size;
  for (int64_t r = 0; r < (whole ? 1 : call->rows); r++) {
    flce_scaled row = {.out = flce_at(call->out, call->out_dtype, r * call->out_pitch),
                       .in = flce_const_at(call->in, call->in_dtype, r * call->in_pitch),
                       .out_dtype = call->out_dtype,
                       .in_dtype = call->in_dtype,
                       .count = whole ? call->rows * call->cols : call->cols};
    FLCE_TRY(scale(self, row, 1.0));
    if (!whole) memset((char*)row.out + call->cols * size, 0, (size_t)padding);
  }
  return FLCE_OK;
}

flce_status flce_cpu_scale_grads(void* self, const flce_scaled* grads, int number,
                                 const void* grad_output, const void* scalars, flce_dtype stat) {
  for (int k = 0; k < number; k++) {
    const flce_scaled* grad = &grads[k];
    bool narrow = grad->in_dtype == FLCE_F16;
    double factor = flce_load(grad_output, stat, 0);
    if (scalars)
      factor *= flce_load(scalars, stat, FLCE_SCALAR_INV_DENOM) /
                flce_load(scalars, stat, narrow ? FLCE_SCALAR_DW_SCALE : FLCE_SCALAR_LOSS_SCALE);
    if (grad->out == grad->in && factor == 1.0) continue;
    FLCE_TRY(scale(self, *grad, factor));
  }
  return FLCE_OK;
}

/* ---- accum += block ---- */

typedef struct add_job {
  const flce_add_block_args* call;
  const flce_block_kernels *accum_kernels, *block_kernels;
} add_job;

static void add_range(int64_t begin, int64_t end, void* context) {
  const add_job* job = context;
  const flce_add_block_args* call = job->call;
  flce_sums sums;
  for (int64_t r = begin; r < end; r++) {
    for (int64_t first = 0, next; first < call->cols; first = next) {
      next = flce_block_end(first, call->cols);
      void* accum = flce_at(call->accum, call->accum_dtype, r * call->cols + first);
      const void* block = flce_const_at(call->block, call->dtype, r * call->pitch + first);
      job->accum_kernels->scaled(&sums, 1.0, accum, next - first);
      job->block_kernels->axpy(&sums, 1.0, block, next - first);
      job->accum_kernels->narrow(accum, &sums, next - first);
    }
  }
}

flce_status flce_cpu_add_block(void* self, const flce_add_block_args* call) {
  flce_dtype stat = flce_stat_dtype(call->accum_dtype);
  add_job job = {.call = call};
  FLCE_TRY(flce_cpu_block_kernels(stat, call->accum_dtype, &job.accum_kernels));
  FLCE_TRY(flce_cpu_block_kernels(stat, call->dtype, &job.block_kernels));
  flce_cpu_parallel(self, call->rows, call->cols, add_range, &job);
  return FLCE_OK;
}
