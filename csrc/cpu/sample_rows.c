/* Backend function `sample_rows`: draws the entries of each row's list from its E (problem.h). */
#include "cpu/sample_order.h"
#include "random.h"

#include <string.h>

typedef struct sample_job {
  const flce_sample_rows_args* call;
  int64_t pitch, most; /* of a list: int32, and pairs after the first */
} sample_job;

/* Draws row r of the chunk, token i of the vectors, into its list. */
static void sample_row(const sample_job* job, int64_t r, int64_t i, int32_t* list) {
  const flce_sample_rows_args* call = job->call;
  const flce_rows* rows = call->rows;
  const int64_t one = INT64_C(1) << call->bits;
  float inv_sum = ((const float*)rows->stats)[FLCE_STAT_INV_SUM * rows->stat_pitch + i];
  float inverse = inv_sum * (float)(1.0 / call->eps);
  uint64_t random = flce_philox((uint64_t)call->seed[0], (uint64_t)(call->first_token + i));
  int64_t drawn = (int64_t)(random >> (64 - call->bits)), sum = 0;
  int32_t count = 0;
  const void* e = flce_const_at(rows->out, rows->out_dtype, r * rows->out_pitch);
  for (int64_t j = 0; j < rows->vocab && count < job->most; j++) {
    float value = (float)flce_load(e, rows->out_dtype, j);
    sum += llrintf(fminf(fabsf(value) * inverse, 1.0f) * (float)one);
    if (sum <= drawn) continue;
    drawn += one;
    count++;
    list[2 * count] = (int32_t)j;
    list[2 * count + 1] = (int32_t)flce_bits_of(value);
  }
  list[1] = count;
}

static void sample_range(int64_t begin, int64_t end, void* context) {
  const sample_job* job = context;
  const flce_rows* rows = job->call->rows;
  for (int64_t r = begin; r < end; r++) {
    int64_t i = flce_row_index(rows, r);
    int32_t* list = job->call->lists + r * job->pitch;
    memset(list, 0, (size_t)job->pitch * sizeof *list);
    list[0] = sample_target(rows, i);
    if (flce_row_kind_at(rows, i) == FLCE_ROW_VALID) sample_row(job, r, i, list);
  }
}

flce_status flce_cpu_sample_rows(void* self, const flce_sample_rows_args* call) {
  sample_job job = {
      .call = call, .pitch = flce_sample_pitch(call->eps), .most = flce_most_samples(call->eps)};
  flce_cpu_parallel(self, call->rows->rows, call->rows->vocab, sample_range, &job);
  return FLCE_OK;
}
