/* Backend functions `scale_rows` (scales rows of x before the GEMM of dW) and `finish_grad_input`
 * (finishes rows of dX after its GEMM). */
#include "cpu/convert.h"
#include "cpu/cpu.h"

#include <math.h>
#include <string.h>

typedef struct scale_rows_job {
  const flce_scale_rows_args* call;
  const flce_block_kernels* kernels;
  flce_dtype stat;
} scale_rows_job;

static void scale_rows_range(int64_t begin, int64_t end, void* context) {
  const scale_rows_job* job = context;
  const flce_scale_rows_args* call = job->call;
  flce_sums sums;
  int64_t size = flce_size_of(call->dtype);
  size_t bytes = (size_t)(call->hidden * size);
  for (int64_t r = begin; r < end; r++) {
    int64_t i = call->index ? call->index[r] : r;
    double coef = i < 0 ? 0.0 : call->coef ? flce_load(call->coef, job->stat, i) : 1.0;
    void* out = flce_at(call->out, call->dtype, r * call->out_pitch);
    memset((char*)out + bytes, 0, (size_t)(call->out_pitch * size) - bytes);
    if (coef == 0.0) {
      memset(out, 0, bytes);
      continue;
    }
    const void* x = flce_const_at(call->x, call->dtype, i * call->hidden);
    if (!call->coef) {
      memcpy(out, x, bytes);
      continue;
    }
    for (int64_t h = 0, next; h < call->hidden; h = next) {
      next = flce_block_end(h, call->hidden);
      job->kernels->scaled(&sums, coef, flce_const_at(x, call->dtype, h), next - h);
      job->kernels->narrow(flce_at(out, call->dtype, h), &sums, next - h);
    }
  }
}

flce_status flce_cpu_scale_rows(void* self, const flce_scale_rows_args* call) {
  scale_rows_job job = {.call = call, .stat = flce_stat_dtype(call->dtype)};
  FLCE_TRY(flce_cpu_block_kernels(job.stat, call->dtype, &job.kernels));
  flce_cpu_parallel(self, call->rows, call->hidden, scale_rows_range, &job);
  return FLCE_OK;
}

typedef struct grad_input_job {
  const flce_grad_input_args* call;
  const flce_block_kernels *dx_kernels, *d_kernels, *w_kernels, *stat_kernels;
  flce_dtype stat;
} grad_input_job;

/* Computes row i of dX from row r of D. */
static void grad_input_row(const grad_input_job* job, int64_t r, int64_t i) {
  const flce_grad_input_args* call = job->call;
  const flce_rows* rows = call->rows;
  int64_t pitch = rows->stat_pitch, hidden = call->hidden, cols = call->cols;
  double row = 1.0, target = 0.0, smooth = 0.0;
  if (rows->coef) {
    row = flce_load(rows->coef, job->stat, FLCE_COEF_EXP * pitch + i);
    target = flce_load(rows->coef, job->stat, FLCE_COEF_TARGET * pitch + i);
    smooth = flce_load(rows->coef, job->stat, FLCE_COEF_SMOOTH * pitch + i);
  }
  int64_t w_row = rows->coef && rows->target ? rows->target[i] : -1;
  flce_sums sums;
  for (int64_t h = 0, next; h < cols; h = next) {
    next = flce_block_end(h, cols);
    int64_t count = next - h;
    job->d_kernels->scaled(&sums, row, flce_const_at(call->d, call->d_dtype, r * hidden + h),
                           count);
    if (w_row >= 0)
      job->w_kernels->axpy(&sums, target, flce_const_at(call->w, call->dtype, w_row * hidden + h),
                           count);
    if (rows->coef && call->wsum)
      job->stat_kernels->axpy(&sums, -smooth, flce_const_at(call->wsum, job->stat, h), count);
    job->dx_kernels->narrow(flce_at(call->dx, call->dx_dtype, i * cols + h), &sums, count);
  }
}

static void grad_input_range(int64_t begin, int64_t end, void* context) {
  const grad_input_job* job = context;
  const flce_grad_input_args* call = job->call;
  for (int64_t r = begin; r < end; r++) {
    int64_t i = flce_row_index(call->rows, r);
    flce_row_kind kind = flce_row_kind_at(call->rows, i);
    if (kind == FLCE_ROW_VALID)
      grad_input_row(job, r, i);
    else if (kind != FLCE_ROW_ABSENT)
      flce_fill(flce_at(call->dx, call->dx_dtype, i * call->cols), call->dx_dtype,
                kind == FLCE_ROW_IGNORED ? 0.0 : NAN, call->cols);
  }
}

flce_status flce_cpu_finish_grad_input(void* self, const flce_grad_input_args* call) {
  grad_input_job job = {.call = call, .stat = flce_stat_dtype(call->dtype)};
  bool alike = !call->rows->index && call->hidden == call->cols && call->dx_dtype == call->d_dtype;
  if (call->dx == call->d && !alike)
    return flce_fail(FLCE_UNSUPPORTED,
                     "grad_input: expected rows, columns and dtype of d in place, got others");
  FLCE_TRY(flce_cpu_block_kernels(job.stat, call->dx_dtype, &job.dx_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, call->d_dtype, &job.d_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, call->dtype, &job.w_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, job.stat, &job.stat_kernels));
  flce_cpu_parallel(self, call->rows->rows, call->hidden, grad_input_range, &job);
  if (!call->scaled_x) return FLCE_OK;
  const void* coef =
      flce_const_at(call->rows->coef, job.stat, FLCE_COEF_EXP * call->rows->stat_pitch);
  const flce_scale_rows_args scaled = {.out = call->scaled_x,
                                       .x = call->x,
                                       .coef = coef,
                                       .index = call->rows->index,
                                       .dtype = call->dtype,
                                       .out_pitch = call->hidden,
                                       .rows = call->rows->rows,
                                       .hidden = call->hidden};
  return flce_cpu_scale_rows(self, &scaled);
}
