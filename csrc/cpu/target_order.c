/* Backend function `order_targets`: sorts the tokens by target class, in a fixed order, for the
 * target terms of dW and db. */
#include "cpu/target_order.h"

#include "cpu/cpu.h"

#include <string.h>

enum { DIGIT_BITS = 11 };

int64_t flce_cpu_order_bytes(int64_t tokens) {
  return (1 + 2 * tokens) * (int64_t)sizeof(int64_t);
}

/* Radix sort on the bits of the target, lowest digit first. It is stable, and the keys arrive in
 * token order, so the token bits need no pass. */
static void sort_keys(int64_t* keys, int64_t* spare, int64_t count, int64_t vocab) {
  enum { DIGITS = 1 << DIGIT_BITS };
  int64_t *from = keys, *to = spare;
  for (int shift = FLCE_TOKEN_BITS; (vocab - 1) >> (shift - FLCE_TOKEN_BITS) > 0;
       shift += DIGIT_BITS) {
    int64_t next[DIGITS] = {0};
    for (int64_t k = 0; k < count; k++) next[(from[k] >> shift) & (DIGITS - 1)]++;
    for (int64_t digit = 0, start = 0; digit < DIGITS; digit++) {
      int64_t size = next[digit];
      next[digit] = start;
      start += size;
    }
    for (int64_t k = 0; k < count; k++) to[next[(from[k] >> shift) & (DIGITS - 1)]++] = from[k];
    int64_t* swap = from;
    from = to;
    to = swap;
  }
  if (from != keys) memcpy(keys, from, (size_t)count * sizeof *keys);
}

flce_status flce_cpu_order_targets(void* self, const flce_problem* problem, const int64_t* target,
                                   void* order) {
  (void)self;
  if (problem->shape.tokens > UINT32_MAX || problem->shape.vocab > INT32_MAX)
    return flce_fail(FLCE_UNSUPPORTED,
                     "expected tokens < 2^32 and vocab < 2^31 on the CPU, got %lld, %lld",
                     (long long)problem->shape.tokens, (long long)problem->shape.vocab);
  int64_t* keys = (int64_t*)order + 1;
  int64_t count = 0;
  for (int64_t i = 0; i < problem->shape.tokens; i++) {
    int64_t y = target[i];
    if (y == problem->loss.ignore_index || y < 0 || y >= problem->shape.vocab) continue;
    keys[count++] = y << FLCE_TOKEN_BITS | i;
  }
  sort_keys(keys, keys + problem->shape.tokens, count, problem->shape.vocab);
  *(int64_t*)order = count;
  return FLCE_OK;
}
