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
  const flce_block_kernels *in_kernels, *out_kernels;
  void* out;
  const void* in;
  flce_dtype out_dtype, in_dtype;
  double factor;
  int64_t count; /* elements */
} scale_job;

static void scale_range(int64_t begin, int64_t end, void* context) {
  const scale_job* job = context;
  flce_sums sums;
  for (int64_t block = begin; block < end; block++) {
    int64_t first = block * FLCE_BLOCK, count = flce_block_end(first, job->count) - first;
    job->in_kernels->scaled(&sums, job->factor, flce_const_at(job->in, job->in_dtype, first),
                            count);
    job->out_kernels->narrow(flce_at(job->out, job->out_dtype, first), &sums, count);
  }
}

static flce_status scale(void* self, scale_job* job) {
  bool wide = job->in_dtype == FLCE_F64 || job->out_dtype == FLCE_F64;
  flce_dtype stat = wide ? FLCE_F64 : FLCE_F32;
  /* Without elements both pointers may be NULL, hence equal, without being an in-place cast. */
  if (job->count > 0 && job->out == job->in && job->out_dtype != job->in_dtype)
    return flce_fail(FLCE_UNSUPPORTED, "expected one dtype in place, got %s for %s",
                     flce_dtype_name(job->out_dtype), flce_dtype_name(job->in_dtype));
  FLCE_TRY(flce_cpu_block_kernels(stat, job->in_dtype, &job->in_kernels));
  FLCE_TRY(flce_cpu_block_kernels(stat, job->out_dtype, &job->out_kernels));
  flce_cpu_parallel(self, flce_blocks(job->count), FLCE_BLOCK, scale_range, job);
  return FLCE_OK;
}

flce_status flce_cpu_cast(void* self, const flce_cast_args* call) {
  /* Both are contiguous: one pass over all rows. */
  bool whole = call->out_pitch == call->cols && call->in_pitch == call->cols;
  int64_t size = flce_size_of(call->out_dtype), padding = (call->out_pitch - call->cols) * size;
  for (int64_t r = 0; r < (whole ? 1 : call->rows); r++) {
    scale_job job = {.out = flce_at(call->out, call->out_dtype, r * call->out_pitch),
                     .in = flce_const_at(call->in, call->in_dtype, r * call->in_pitch),
                     .out_dtype = call->out_dtype,
                     .in_dtype = call->in_dtype,
                     .factor = 1.0,
                     .count = whole ? call->rows * call->cols : call->cols};
    FLCE_TRY(scale(self, &job));
    if (!whole) memset((char*)job.out + call->cols * size, 0, (size_t)padding);
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
    scale_job job = {.out = grad->out,
                     .in = grad->in,
                     .out_dtype = grad->out_dtype,
                     .in_dtype = grad->in_dtype,
                     .factor = factor,
                     .count = grad->count};
    FLCE_TRY(scale(self, &job));
  }
  return FLCE_OK;
}

/* ---- accum += block ---- */

typedef struct add_job {
  const flce_block_kernels *accum_kernels, *block_kernels;
  void* accum;
  const void* block;
  flce_dtype accum_dtype, dtype;
  int64_t pitch, cols; /* leading dimension of `block`; columns of both */
} add_job;

static void add_range(int64_t begin, int64_t end, void* context) {
  const add_job* job = context;
  flce_sums sums;
  for (int64_t r = begin; r < end; r++) {
    for (int64_t first = 0, next; first < job->cols; first = next) {
      next = flce_block_end(first, job->cols);
      void* accum = flce_at(job->accum, job->accum_dtype, r * job->cols + first);
      const void* block = flce_const_at(job->block, job->dtype, r * job->pitch + first);
      job->accum_kernels->scaled(&sums, 1.0, accum, next - first);
      job->block_kernels->axpy(&sums, 1.0, block, next - first);
      job->accum_kernels->narrow(accum, &sums, next - first);
    }
  }
}

flce_status flce_cpu_add_block(void* self, const flce_add_block_args* call) {
  flce_dtype stat = flce_stat_dtype(call->accum_dtype);
  add_job job = {.accum = call->accum,
                 .block = call->block,
                 .accum_dtype = call->accum_dtype,
                 .dtype = call->dtype,
                 .pitch = call->pitch,
                 .cols = call->cols};
  FLCE_TRY(flce_cpu_block_kernels(stat, call->accum_dtype, &job.accum_kernels));
  FLCE_TRY(flce_cpu_block_kernels(stat, call->dtype, &job.block_kernels));
  flce_cpu_parallel(self, call->rows, call->cols, add_range, &job);
  return FLCE_OK;
}
