/* Backend function `tail_rows`: the logsumexp of the logits of each row without a few classes. */
#include "cpu/row_classes.h"
#include "cpu/row_pass.h"

/* Sets l of the row's own classes in a span to -inf; false if one of them does not exist. */
static bool exclude_classes(const row_pass* pass, int64_t i, row_part* part) {
  const flce_row_classes* classes = &pass->rows->classes;
  bool all_exist = true;
  for (int64_t k = i * classes->count; k < (i + 1) * classes->count; k++) {
    bool exists;
    int64_t at = flce_cpu_class_column(pass->rows, classes->ids[k], &exists) - part->begin;
    all_exist &= exists;
    if (at >= 0 && at < part->count) flce_store(&part->l, pass->stat, at, -INFINITY);
  }
  return all_exist;
}

static double tail_lse(const row_pass* pass, int64_t r, int64_t i) {
  const flce_rows* rows = pass->rows;
  flce_logit_map map = flce_cpu_map_of_row(pass, i);
  double top = -INFINITY, sum = 0.0; /* of exp(l - top) */
  row_part part;
  for (int64_t begin = 0, end; begin < rows->vocab; begin = end) {
    end = row_span_end(begin, rows->vocab);
    flce_cpu_transform(pass, &map, row_z(pass, r), begin, end, &part);
    if (!exclude_classes(pass, i, &part)) return NAN;
    double largest = pass->l_kernels->max(&part.l, NULL, part.count);
    if (largest == -INFINITY) continue;
    if (largest > top) {
      sum *= exp(top - largest);
      top = largest;
    }
    sum += pass->l_kernels->exp_sum(NULL, &part.l, NULL, top, part.count);
  }
  return top == -INFINITY ? top : top + log(sum);
}

static void tail_range(int64_t begin, int64_t end, void* context) {
  const row_pass* pass = context;
  const flce_rows* rows = pass->rows;
  for (int64_t r = begin; r < end; r++) {
    int64_t i = flce_row_index(rows, r);
    flce_row_kind kind = flce_row_kind_at(rows, i);
    if (kind == FLCE_ROW_ABSENT) continue;
    double value = kind == FLCE_ROW_OUT_OF_RANGE ? NAN : 0.0;
    if (kind == FLCE_ROW_VALID) value = tail_lse(pass, r, i);
    flce_store(rows->stats, pass->stat, FLCE_STAT_TAIL_LSE * rows->stat_pitch + i, value);
  }
}

flce_status flce_cpu_tail_rows(void* self, const flce_rows* rows) {
  row_pass pass;
  FLCE_TRY(flce_cpu_make_row_pass(rows, false, &pass));
  flce_cpu_parallel(self, rows->rows, rows->vocab, tail_range, &pass);
  return FLCE_OK;
}
