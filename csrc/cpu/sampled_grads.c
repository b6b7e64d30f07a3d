/* Backend functions `sampled_grad_input`, `sampled_grad_weight` and `sampled_grad_bias`: sums of
 * rows of W by the lists of the rows, and of rows of x by the entries of each class. */
#include "cpu/sample_order.h"

#include <string.h>

typedef struct sampled_input_job {
  const flce_sampled_input_args* call;
  const flce_block_kernels *dx_kernels, *w_kernels, *stat_kernels;
  int64_t pitch; /* of the lists */
} sampled_input_job;

/* Row i of dX from row r's list. */
static void input_row(const sampled_input_job* job, int64_t r, int64_t i) {
  const flce_sampled_input_args* call = job->call;
  const flce_rows* rows = call->rows;
  const int32_t* list = call->lists + r * job->pitch;
  const float* coef = (const float*)rows->coef + i;
  double target = (double)coef[FLCE_COEF_TARGET * rows->stat_pitch];
  double smooth = (double)coef[FLCE_COEF_SMOOTH * rows->stat_pitch];
  flce_sums sums;
  for (int64_t h = 0, next; h < call->cols; h = next) {
    next = flce_block_end(h, call->cols);
    int64_t count = next - h;
    const void* y = flce_const_at(call->w, call->dtype, list[0] * call->hidden + h);
    job->w_kernels->scaled(&sums, target, y, count);
    for (int32_t m = 1; m <= list[1]; m++) {
      double factor = sample_factor(rows, i, list + 2 * m, call->eps);
      const void* w = flce_const_at(call->w, call->dtype, list[2 * m] * call->hidden + h);
      job->w_kernels->axpy(&sums, factor, w, count);
    }
    if (call->wsum) job->stat_kernels->axpy(&sums, -smooth, (const float*)call->wsum + h, count);
    job->dx_kernels->narrow(flce_at(call->dx, call->dx_dtype, i * call->cols + h), &sums, count);
  }
}

static void input_range(int64_t begin, int64_t end, void* context) {
  const sampled_input_job* job = context;
  const flce_sampled_input_args* call = job->call;
  for (int64_t r = begin; r < end; r++) {
    int64_t i = flce_row_index(call->rows, r);
    flce_row_kind kind = flce_row_kind_at(call->rows, i);
    if (kind == FLCE_ROW_VALID)
      input_row(job, r, i);
    else if (kind != FLCE_ROW_ABSENT)
      flce_fill(flce_at(call->dx, call->dx_dtype, i * call->cols), call->dx_dtype,
                kind == FLCE_ROW_IGNORED ? 0.0 : NAN, call->cols);
  }
}

flce_status flce_cpu_sampled_grad_input(void* self, const flce_sampled_input_args* call) {
  sampled_input_job job = {.call = call, .pitch = flce_sample_pitch(call->eps)};
  FLCE_TRY(flce_cpu_check_lists(call->lists, call->rows, call->eps));
  FLCE_TRY(flce_cpu_block_kernels(FLCE_F32, call->dx_dtype, &job.dx_kernels));
  FLCE_TRY(flce_cpu_block_kernels(FLCE_F32, call->dtype, &job.w_kernels));
  FLCE_TRY(flce_cpu_block_kernels(FLCE_F32, FLCE_F32, &job.stat_kernels));
  flce_cpu_parallel(self, call->rows->rows, call->cols, input_range, &job);
  return FLCE_OK;
}

typedef struct sampled_weight_job {
  const flce_sampled_weight_args* call;
  const flce_block_kernels *dw_kernels, *x_kernels, *stat_kernels;
} sampled_weight_job;

/* Columns [h, h + count) of row j of dW, from entries [begin, end). */
static void weight_block(const sampled_weight_job* job, int64_t j, int64_t begin, int64_t end,
                         int64_t h, int64_t count) {
  const flce_sampled_weight_args* call = job->call;
  const sample_entry* entries = sample_entries(call->order, call->vocab);
  flce_sums sums;
  memset(&sums, 0, (size_t)count * sizeof(float));
  for (int64_t k = begin; k < end; k++) {
    const void* x = flce_const_at(call->x, call->dtype, entries[k].token * call->x_pitch + h);
    job->x_kernels->axpy(&sums, entries[k].factor, x, count);
  }
  if (call->xsum) {
    double weight = call->class_weight ? (double)((const float*)call->class_weight)[j] : 1.0;
    job->stat_kernels->axpy(&sums, -weight, (const float*)call->xsum + h, count);
  }
  void* dw = flce_at(call->dw, call->dw_dtype, j * call->cols + h);
  if (call->adds) job->dw_kernels->axpy(&sums, 1.0, dw, count);
  job->dw_kernels->narrow(dw, &sums, count);
}

static void weight_range(int64_t first, int64_t last, void* context) {
  const sampled_weight_job* job = context;
  const flce_sampled_weight_args* call = job->call;
  const int64_t* start = sample_starts(call->order);
  for (int64_t j = first; j < last; j++) {
    if (call->adds && start[j] == start[j + 1] && !call->xsum) continue;
    for (int64_t h = 0, next; h < call->cols; h = next) {
      next = flce_block_end(h, call->cols);
      weight_block(job, j, start[j], start[j + 1], h, next - h);
    }
  }
}

flce_status flce_cpu_sampled_grad_weight(void* self, const flce_sampled_weight_args* call) {
  sampled_weight_job job = {.call = call};
  FLCE_TRY(flce_cpu_block_kernels(FLCE_F32, call->dw_dtype, &job.dw_kernels));
  FLCE_TRY(flce_cpu_block_kernels(FLCE_F32, call->dtype, &job.x_kernels));
  FLCE_TRY(flce_cpu_block_kernels(FLCE_F32, FLCE_F32, &job.stat_kernels));
  flce_cpu_parallel(self, call->vocab, call->cols, weight_range, &job);
  return FLCE_OK;
}

flce_status flce_cpu_sampled_grad_bias(void* self, const flce_sampled_bias_args* call) {
  (void)self;
  const int64_t* start = sample_starts(call->order);
  const sample_entry* entries = sample_entries(call->order, call->vocab);
  const float *total = call->smooth_total, *weight = call->class_weight;
  for (int64_t j = 0; j < call->vocab; j++) {
    double sum = total ? -(double)total[0] * (weight ? (double)weight[j] : 1.0) : 0.0;
    for (int64_t k = start[j]; k < start[j + 1]; k++) sum += entries[k].factor;
    flce_store(call->db, call->db_dtype, j, sum);
  }
  return FLCE_OK;
}
