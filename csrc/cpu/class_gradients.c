/* Backend function `class_gradients`: the columns of a few classes of each row of dz, computed in
 * the stat dtype from the logits of these classes and rounded once. */
#include "cpu/row_classes.h"
#include "cpu/row_terms.h"

#include <float.h>
#include <string.h>

/* Bits of ids modulo this number: `seen` of all ids of a row, `again` of those that occur twice or
 * more. Only an id with its bit in `again` can have an equal one, so that most rows without equal
 * ids are not searched. */
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

/* What the threads read: rows whose z are the classes' logits, [][classes.count] of the stat dtype,
 * and the dtype of dz. */
typedef struct class_pass {
  flce_rows rows;
  row_pass pass;
  flce_dtype dz_dtype;
} class_pass;

/* False if an index before k has the same id. Else *sum is the sum of the gradients of all indices
 * with that id. */
static bool sum_of_equal(const flce_rows* rows, flce_dtype stat, int64_t i, int64_t k,
                         const id_filter* filter, double* sum) {
  const flce_row_classes* classes = &rows->classes;
  const int64_t* ids = classes->ids + i * classes->count;
  int64_t first = i * classes->count;
  uint64_t at = (uint64_t)ids[k] % FILTER_BITS;
  bool has_grads = classes->grads != NULL;
  *sum = has_grads ? flce_load(classes->grads, stat, first + k) : 0.0;
  if ((filter->again[at / 64] >> at % 64 & 1) == 0) return true;
  for (int64_t j = 0; j < k; j++)
    if (ids[j] == ids[k]) return false;
  for (int64_t j = k + 1; has_grads && j < classes->count; j++)
    if (ids[j] == ids[k]) *sum += flce_load(classes->grads, stat, first + j);
  return true;
}

/* dz of a column with the final logit l and the curve's slope, without the gradient of its z. */
static double gradient_of_column(const row_pass* pass, const row_terms* terms, int64_t i,
                                 int64_t column, double l, double slope) {
  const flce_rows* rows = pass->rows;
  row_terms own = *terms;
  double target = 0.0, pull = terms->smooth;
  if (flce_target_column(rows, i) == column) {
    target = row_coef(pass, FLCE_COEF_TARGET, i);
    own.row = 0.0;
  }
  if (terms->soft != 0.0)
    pull += terms->soft * flce_load(rows->probabilities, rows->probabilities_dtype,
                                    i * rows->probabilities_pitch + column);
  if (pull != 0.0) pull *= row_factor(rows->class_weight, pass->stat, column);
  return target + slope * (flce_cpu_pushed(&own, exp(l - terms->offset), l) - pull);
}

/* Writes the columns of the row's classes [part->begin, part->begin + part->count); false if one of
 * them does not exist. */
static bool write_columns(const class_pass* job, const row_terms* terms, int64_t i,
                          const row_part* part, const id_filter* filter, void* dz) {
  const row_pass* pass = &job->pass;
  const flce_row_classes* classes = &pass->rows->classes;
  double smallest = pass->stat == FLCE_F64 ? DBL_MIN : (double)FLT_MIN;
  bool all_exist = true;
  for (int64_t j = 0; j < part->count; j++) {
    int64_t k = part->begin + j;
    bool exists;
    int64_t column =
        flce_cpu_class_column(pass->rows, classes->ids[i * classes->count + k], &exists);
    double sum;
    all_exist &= exists;
    if (column < 0 || !sum_of_equal(pass->rows, pass->stat, i, k, filter, &sum)) continue;
    double slope = terms->capped ? flce_load(&part->slope, pass->stat, j) : 1.0;
    double l = flce_load(&part->l, pass->stat, j);
    double value = sum + gradient_of_column(pass, terms, i, column, l, slope);
    flce_store(dz, job->dz_dtype, column, fabs(value) < smallest ? 0.0 : value);
  }
  return all_exist;
}

static void gradients_range(int64_t begin, int64_t end, void* context) {
  const class_pass* job = context;
  const row_pass* pass = &job->pass;
  const flce_rows* rows = pass->rows;
  int64_t count = rows->classes.count;
  id_filter filter;
  row_part part;
  for (int64_t r = begin; r < end; r++) {
    int64_t i = flce_row_index(rows, r);
    if (flce_row_kind_at(rows, i) != FLCE_ROW_VALID) continue;
    void* dz = flce_at(rows->out, job->dz_dtype, r * rows->out_pitch);
    flce_logit_map map = flce_cpu_map_of_row(pass, i);
    row_terms terms = flce_cpu_row_terms(pass, &map, i);
    const void* z = flce_const_at(rows->z, pass->stat, i * count);
    bool all_exist = true;
    make_filter(rows->classes.ids + i * count, count, &filter);
    for (int64_t first = 0, next; first < count; first = next) {
      next = row_span_end(first, count);
      flce_cpu_transform(pass, &map, z, first, next, &part);
      all_exist &= write_columns(job, &terms, i, &part, &filter, dz);
    }
    if (!all_exist) flce_store(dz, job->dz_dtype, 0, NAN);
  }
}

flce_status flce_cpu_class_gradients(void* self, const flce_rows* rows, const float* scale) {
  if (scale) return flce_fail(FLCE_UNSUPPORTED, "class_gradients: no CPU gradients in float16");
  if (rows->vocab == 0) return FLCE_OK;
  class_pass job = {.rows = *rows, .dz_dtype = rows->out_dtype};
  job.rows.z = rows->classes.z;
  job.rows.z_dtype = flce_stat_dtype(rows->out_dtype);
  job.rows.bias = NULL; /* it is in these logits */
  FLCE_TRY(flce_cpu_make_row_pass(&job.rows, false, &job.pass));
  flce_cpu_parallel(self, rows->rows, rows->classes.count, gradients_range, &job);
  return FLCE_OK;
}
