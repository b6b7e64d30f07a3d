/* The memory format of the tokens ordered by target, which target_order.c writes and grad_weight.c
 * reads. */
#ifndef FLCE_CPU_TARGET_ORDER_H
#define FLCE_CPU_TARGET_ORDER_H

#include <stdint.h>

/* Layout of `order`, int64: [0] is the count; [1 .. count] are the keys target << 32 | token,
 * ascending; `tokens` further elements are scratch for the sort. */
enum { FLCE_TOKEN_BITS = 32 };

static inline int64_t key_target(int64_t key) {
  return key >> FLCE_TOKEN_BITS;
}
static inline int64_t key_token(int64_t key) {
  return key & (((int64_t)1 << FLCE_TOKEN_BITS) - 1);
}

#endif
