/* Backend function `top_classes`: the classes of each row with the largest logits. */
#include "cpu/convert.h"
#include "cpu/cpu.h"
#include "loss.h"

#include <math.h>
#include <stdlib.h>

typedef struct candidate {
  double value;
  int64_t column;
} candidate;

/* Whether `a` comes after `b` in the output. */
static bool is_after(candidate a, candidate b) {
  return a.value < b.value || (a.value == b.value && a.column > b.column);
}

/* Sinks element i of a heap whose root comes after all others. */
static void sink(candidate* heap, int64_t count, int64_t i) {
  for (int64_t child; (child = 2 * i + 1) < count; i = child) {
    if (child + 1 < count && is_after(heap[child + 1], heap[child])) child++;
    if (!is_after(heap[child], heap[i])) return;
    candidate moved = heap[i];
    heap[i] = heap[child];
    heap[child] = moved;
  }
}

static candidate candidate_of(const flce_rows* rows, int64_t r, int64_t column) {
  double z = flce_load(rows->z, rows->z_dtype, r * rows->z_pitch + column);
  if (rows->bias) z += flce_load(rows->bias, flce_stat_dtype(rows->z_dtype), column);
  double value = flce_logits_rise(&rows->options) ? z : -z;
  return (candidate){isnan(value) ? INFINITY : value, column};
}

/* The row's classes, by a heap of `count` candidates. */
static void top_of_row(const flce_rows* rows, int64_t r, int64_t* ids, candidate* heap) {
  int64_t count = rows->classes.count, used = rows->vocab < count ? rows->vocab : count;
  for (int64_t j = 0; j < used; j++) heap[j] = candidate_of(rows, r, j);
  for (int64_t i = used / 2; i-- > 0;) sink(heap, used, i);
  for (int64_t j = used; j < rows->vocab; j++) {
    candidate next = candidate_of(rows, r, j);
    if (!is_after(heap[0], next)) continue;
    heap[0] = next;
    sink(heap, used, 0);
  }
  for (int64_t k = count; k-- > used;) ids[k] = -1;
  for (int64_t k = used; k-- > 0;) {
    ids[k] = rows->classes.first + heap[0].column;
    heap[0] = heap[k];
    sink(heap, k, 0);
  }
}

static void top_range(int64_t begin, int64_t end, void* context) {
  const flce_rows* rows = context;
  candidate heap[FLCE_CANDIDATES(FLCE_MOST_TOPK)];
  for (int64_t r = begin; r < end; r++) {
    int64_t i = flce_row_index(rows, r);
    if (i < 0) continue;
    int64_t* ids = rows->classes.ids + i * rows->classes.count;
    bool valid = flce_row_kind_at(rows, i) == FLCE_ROW_VALID;
    for (int64_t k = 0; !valid && k < rows->classes.count; k++) ids[k] = -1;
    if (valid) top_of_row(rows, r, ids, heap);
  }
}

flce_status flce_cpu_top_classes(void* self, const flce_rows* rows, void* fused_scratch) {
  if (fused_scratch)
    return flce_fail(FLCE_UNSUPPORTED, "top_classes: the CPU has no fused logits GEMM");
  flce_cpu_parallel(self, rows->rows, rows->vocab, top_range, (void*)rows);
  return FLCE_OK;
}
