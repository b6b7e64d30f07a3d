/* Backend functions `class_logits` and `class_gradients`: logits of a few classes of each row, and
 * their gradients. */
#include "cpu/convert.h"
#include "cpu/cpu.h"

#include <math.h>
#include <string.h>

/* The column of class `id` on this rank; -1 if it is another rank's or there is none. `exists`:
 * whether it may be given. */
static int64_t column_of(const flce_rows* rows, int64_t id, bool* exists) {
  const flce_row_classes* classes = &rows->classes;
  int64_t column = id - classes->first;
  bool none = id == classes->none;
  *exists = none || (id >= 0 && id < classes->all);
  return !none && *exists && column >= 0 && column < rows->vocab ? column : -1;
}

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
      int64_t column = column_of(rows, classes->ids[k], &exists);
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

/* ---- gradients ---- */

/* The ids of a row modulo this number, as bits: those of two or more of its classes show which ones
 * may be equal, so that rows of different classes need no search. */
enum { FILTER_BITS = 4096 };

typedef struct id_filter {
  uint64_t seen[FILTER_BITS / 64], again[FILTER_BITS / 64];
} id_filter;

static void make_filter(const int64_t* ids, int64_t count, id_filter* filter) {
  memset(filter, 0, sizeof *filter);
  for (int64_t k = 0; k < count; k++) {
    uint64_t at = (uint64_t)ids[k] % FILTER_BITS, bit = (uint64_t)1 << at % 64;
    filter->again[at / 64] |= filter->seen[at / 64] & bit;
    filter->seen[at / 64] |= bit;
  }
}

/* The sum of the gradients of all classes of the row that equal that of index k, if k is the first
 * of them; else 0. Summed here, because a 16-bit dz would round after each. */
static double sum_of_equal(const int64_t* ids, const void* grads, flce_dtype stat, int64_t count,
                           int64_t k, const id_filter* filter) {
  uint64_t at = (uint64_t)ids[k] % FILTER_BITS;
  double sum = flce_load(grads, stat, k);
  if ((filter->again[at / 64] >> at % 64 & 1) == 0) return sum;
  for (int64_t j = 0; j < k; j++)
    if (ids[j] == ids[k]) return 0.0;
  for (int64_t j = k + 1; j < count; j++)
    if (ids[j] == ids[k]) sum += flce_load(grads, stat, j);
  return sum;
}

static void gradients_range(int64_t begin, int64_t end, void* context) {
  const flce_rows* rows = context;
  const flce_row_classes* classes = &rows->classes;
  flce_dtype stat = flce_stat_dtype(rows->out_dtype);
  int64_t count = classes->count;
  id_filter filter;
  for (int64_t r = begin; r < end; r++) {
    int64_t i = flce_row_index(rows, r);
    if (flce_row_kind_at(rows, i) != FLCE_ROW_VALID) continue;
    void* dz = flce_at(rows->out, rows->out_dtype, r * rows->out_pitch);
    const int64_t* ids = classes->ids + i * count;
    const void* grads = flce_const_at(classes->grads, stat, i * count);
    bool all_exist = true;
    make_filter(ids, count, &filter);
    for (int64_t k = 0; k < count; k++) {
      bool exists;
      int64_t column = column_of(rows, ids[k], &exists);
      all_exist &= exists;
      if (column < 0) continue;
      double sum = sum_of_equal(ids, grads, stat, count, k, &filter);
      flce_store(dz, rows->out_dtype, column, flce_load(dz, rows->out_dtype, column) + sum);
    }
    if (!all_exist) flce_store(dz, rows->out_dtype, 0, NAN);
  }
}

flce_status flce_cpu_class_gradients(void* self, const flce_rows* rows, const float* scale) {
  if (scale) return flce_fail(FLCE_UNSUPPORTED, "class_gradients: no CPU gradients in float16");
  if (rows->vocab == 0) return FLCE_OK;
  flce_cpu_parallel(self, rows->rows, rows->classes.count, gradients_range, (void*)rows);
  return FLCE_OK;
}
