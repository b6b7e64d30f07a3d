/* Backend function `order_samples`: the entries of all lists, ordered by class, by counting. */
#include "cpu/sample_order.h"

#include <string.h>

int64_t flce_cpu_sample_bytes(int64_t rows, int64_t vocab, double eps) {
  return (vocab + 1) * (int64_t)sizeof(int64_t) +
         rows * (flce_most_samples(eps) + 1) * (int64_t)sizeof(sample_entry);
}

static flce_status check_list(const int32_t* list, const flce_rows* rows, int64_t r, int64_t most) {
  int64_t i = flce_row_index(rows, r);
  int32_t target = sample_target(rows, i);
  if (flce_row_kind_at(rows, i) != FLCE_ROW_VALID) most = 0;
  if (list[0] != target)
    return flce_fail(FLCE_INVALID_ARGUMENT, "saved: expected the target %d in row %lld, got %d",
                     target, (long long)r, list[0]);
  if (list[1] < 0 || list[1] > most)
    return flce_fail(FLCE_INVALID_ARGUMENT, "saved: expected 0 to %lld pairs in row %lld, got %d",
                     (long long)most, (long long)r, list[1]);
  for (int32_t m = 1; m <= list[1]; m++)
    if (list[2 * m] < 0 || list[2 * m] >= rows->vocab)
      return flce_fail(FLCE_INVALID_ARGUMENT,
                       "saved: expected classes below %lld in row %lld, got %d",
                       (long long)rows->vocab, (long long)r, list[2 * m]);
  return FLCE_OK;
}

flce_status flce_cpu_check_lists(const int32_t* lists, const flce_rows* rows, double eps) {
  int64_t pitch = flce_sample_pitch(eps), most = flce_most_samples(eps);
  for (int64_t r = 0; r < rows->rows; r++) FLCE_TRY(check_list(lists + r * pitch, rows, r, most));
  return FLCE_OK;
}

/* Adds the classes of row r's list to counts[class + 1]. */
static void count_list(const int32_t* list, int64_t* counts) {
  if (list[0] >= 0) counts[list[0] + 1]++;
  for (int32_t m = 1; m <= list[1]; m++) counts[list[2 * m] + 1]++;
}

/* Puts the entries of row r's list, of token i, at next[class]. */
static void place_list(const flce_rows* rows, int64_t i, const int32_t* list, double eps,
                       int64_t* next, sample_entry* entries) {
  const float* coef = rows->coef;
  if (list[0] >= 0)
    entries[next[list[0]]++] =
        (sample_entry){i, (double)coef[FLCE_COEF_TARGET * rows->stat_pitch + i]};
  for (int32_t m = 1; m <= list[1]; m++) /* an absent row has no pairs, and no coef */
    entries[next[list[2 * m]]++] = (sample_entry){i, sample_factor(rows, i, list + 2 * m, eps)};
}

flce_status flce_cpu_order_samples(void* self, const flce_order_samples_args* call) {
  (void)self;
  const flce_rows* rows = call->rows;
  int64_t pitch = flce_sample_pitch(call->eps), vocab = rows->vocab;
  int64_t* start = call->order;
  FLCE_TRY(flce_cpu_check_lists(call->lists, rows, call->eps));
  memset(start, 0, (size_t)(vocab + 1) * sizeof *start);
  for (int64_t r = 0; r < rows->rows; r++) count_list(call->lists + r * pitch, start);
  for (int64_t j = 0; j < vocab; j++) start[j + 1] += start[j];
  /* Each start is moved to its class's end, which is the next class's start, then moved back. */
  sample_entry* entries = sample_entries(call->order, vocab);
  for (int64_t r = 0; r < rows->rows; r++)
    place_list(rows, flce_row_index(rows, r), call->lists + r * pitch, call->eps, start, entries);
  memmove(start + 1, start, (size_t)vocab * sizeof *start);
  start[0] = 0;
  return FLCE_OK;
}
