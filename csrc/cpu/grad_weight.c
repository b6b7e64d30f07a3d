/* Backend functions `finish_grad_weight` and `finish_grad_bias`: after the GEMMs they add the exact
 * target terms of dW and db and those of label smoothing, and round once to the output dtype. */
#include "cpu/convert.h"
#include "cpu/cpu.h"
#include "cpu/target_order.h"

#include <math.h>
#include <string.h>

/* Index of the first key whose target is `target` or larger (binary search). */
static int64_t first_key(const int64_t* keys, int64_t count, int64_t target) {
  int64_t low = 0, high = count;
  while (low < high) {
    int64_t middle = low + (high - low) / 2;
    if (key_target(keys[middle]) < target)
      low = middle + 1;
    else
      high = middle;
  }
  return low;
}

static int64_t segment_end(const int64_t* keys, int64_t count, int64_t begin, int64_t target) {
  while (begin < count && key_target(keys[begin]) == target) begin++;
  return begin;
}

typedef struct grad_weight_job {
  const flce_grad_weight_args* call;
  const flce_block_kernels *dw_kernels, *accum_kernels, *x_kernels, *stat_kernels;
  flce_dtype stat;
  const int64_t* keys; /* tokens ordered by target (target_order.h) */
  int64_t count;       /* of keys */
} grad_weight_job;

/* Finishes columns [h, next) of row j of dW; the tokens with target j are keys [begin, end). */
static void grad_weight_block(const grad_weight_job* job, int64_t j, int64_t begin, int64_t end,
                              int64_t h, int64_t next) {
  const flce_grad_weight_args* call = job->call;
  int64_t count = next - h, at = j * call->hidden + h;
  flce_sums sums;
  memset(&sums, 0, (size_t)(count * flce_size_of(job->stat)));
  for (int64_t k = begin; k < end; k++) {
    int64_t token = key_token(job->keys[k]);
    double coef = flce_load(call->coef_target, job->stat, token);
    if (coef == 0.0) continue;
    job->x_kernels->axpy(&sums, coef,
                         flce_const_at(call->x, call->dtype, token * call->x_pitch + h), count);
  }
  if (call->xsum) {
    double weight = call->class_weight ? flce_load(call->class_weight, job->stat, j) : 1.0;
    job->stat_kernels->axpy(&sums, -weight, flce_const_at(call->xsum, job->stat, h), count);
  }
  job->accum_kernels->axpy(&sums, 1.0, flce_const_at(call->accum, call->accum_dtype, at), count);
  job->dw_kernels->narrow(flce_at(call->dw, call->dw_dtype, at), &sums, count);
}

/* For passes over every row of dW: [begin, end) are row indices. */
static void all_rows_range(int64_t begin, int64_t end, void* context) {
  const grad_weight_job* job = context;
  int64_t k = first_key(job->keys, job->count, begin);
  for (int64_t j = begin; j < end; j++) {
    int64_t last = segment_end(job->keys, job->count, k, j);
    for (int64_t h = 0, next; h < job->call->hidden; h = next) {
      next = flce_block_end(h, job->call->hidden);
      grad_weight_block(job, j, k, last, h, next);
    }
    k = last;
  }
}

/* For passes over the rows of dW that are the target of some token: an index is (column block) *
 * count + key, so that the work is split evenly over tokens. The range that holds the first key of
 * a row does the whole row: one thread sums it, in a fixed order. */
static void target_rows_range(int64_t begin, int64_t end, void* context) {
  const grad_weight_job* job = context;
  for (int64_t index = begin; index < end; index++) {
    int64_t k = index % job->count, h = index / job->count * FLCE_BLOCK;
    int64_t j = key_target(job->keys[k]);
    if (k > 0 && key_target(job->keys[k - 1]) == j) continue;
    grad_weight_block(job, j, k, segment_end(job->keys, job->count, k, j), h,
                      flce_block_end(h, job->call->hidden));
  }
}

flce_status flce_cpu_finish_grad_weight(void* self, const flce_grad_weight_args* call) {
  bool in_place = call->dw == call->accum;
  if (in_place && call->dw_dtype != call->accum_dtype)
    return flce_fail(FLCE_UNSUPPORTED, "grad_weight: expected %s in place, got %s",
                     flce_dtype_name(call->accum_dtype), flce_dtype_name(call->dw_dtype));
  grad_weight_job job = {.call = call, .stat = flce_stat_dtype(call->dtype)};
  if (call->coef_target) {
    job.count = *(const int64_t*)call->order;
    job.keys = (const int64_t*)call->order + 1;
  }
  FLCE_TRY(flce_cpu_block_kernels(job.stat, call->dw_dtype, &job.dw_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, call->accum_dtype, &job.accum_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, call->dtype, &job.x_kernels));
  FLCE_TRY(flce_cpu_block_kernels(job.stat, job.stat, &job.stat_kernels));
  if (in_place && !call->xsum)
    flce_cpu_parallel(self, job.count * flce_blocks(call->hidden), FLCE_BLOCK, target_rows_range,
                      &job);
  else
    flce_cpu_parallel(self, call->vocab, call->hidden, all_rows_range, &job);
  return FLCE_OK;
}

flce_status flce_cpu_finish_grad_bias(void* self, const flce_grad_bias_args* call) {
  (void)self;
  const int64_t* keys = call->coef_target ? (const int64_t*)call->order + 1 : NULL;
  int64_t count = call->coef_target ? *(const int64_t*)call->order : 0;
  double smooth = call->smooth_total ? flce_load(call->smooth_total, call->stat, 0) : 0.0;
  for (int64_t j = 0, k = 0; j < call->vocab; j++) {
    double sum = flce_load(call->accum, call->stat, j);
    for (; k < count && key_target(keys[k]) == j; k++)
      sum += flce_load(call->coef_target, call->stat, key_token(keys[k]));
    if (call->smooth_total)
      sum -= smooth * (call->class_weight ? flce_load(call->class_weight, call->stat, j) : 1.0);
    flce_store(call->db, call->db_dtype, j, sum);
  }
  return FLCE_OK;
}
