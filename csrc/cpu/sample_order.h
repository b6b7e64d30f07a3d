/* The memory format of the sampled entries ordered by class, which sample_order.c writes and
 * sampled_grads.c reads. */
#ifndef FLCE_CPU_SAMPLE_ORDER_H
#define FLCE_CPU_SAMPLE_ORDER_H

#include "flce.h"

/* An entry of the gradient of the logits. */
typedef struct sample_entry {
  int64_t token; /* its row of x */
  double factor; /* of that row in dW */
} sample_entry;

/* `order` begins with vocab + 1 positions: the entries of class j are [start[j], start[j + 1]). The
 * entries follow. */
static inline const int64_t* sample_starts(const void* order) {
  return order;
}
static inline sample_entry* sample_entries(const void* order, int64_t vocab) {
  return (sample_entry*)((int64_t*)order + vocab + 1);
}

/* FLCE_INVALID_ARGUMENT if a list has a class beyond `vocab`, or more pairs than it has room for.
 */
flce_status flce_cpu_check_lists(const int32_t* lists, int64_t rows, int64_t vocab, double eps);

#endif
