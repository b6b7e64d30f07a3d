/* Names and checks of the enums of problem.h, sizes of dtypes, and the message of a thread's last
 * failure. */
#include "flce.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_TEXT = 2048 }; /* bytes of a message, with the 0 */

static _Thread_local char last_error[MOST_TEXT];

const char* flce_status_name(flce_status status) {
  static const char* const names[] = {
      [FLCE_OK] = "ok",
      [FLCE_INVALID_ARGUMENT] = "invalid argument",
      [FLCE_INVALID_TYPE] = "invalid type",
      [FLCE_TARGET_OUT_OF_RANGE] = "target out of range",
      [FLCE_OUT_OF_MEMORY] = "out of memory",
      [FLCE_UNSUPPORTED] = "unsupported",
      [FLCE_GEMM_FAILED] = "matrix product failed",
      [FLCE_DEVICE_ERROR] = "device error",
      [FLCE_COMM_FAILED] = "exchange failed",
  };
  return names[status];
}

/* Whether a byte is within a character of UTF-8, and not its first. */
static bool is_continuation(char byte) {
  return ((unsigned char)byte & 0xc0) == 0x80;
}

/* Writes a message of MOST_TEXT bytes or more with " ... " in place of its middle: what an argument
 * has to be is at its beginning, and what came at its end. */
static void shorten(char out[MOST_TEXT], const char* message, size_t length) {
  static const char gap[] = " ... ";
  const size_t part = (MOST_TEXT - sizeof gap) / 2;
  size_t head = part, tail = length - part;
  while (head > 0 && is_continuation(message[head])) head--;
  while (is_continuation(message[tail])) tail++;
  memcpy(out, message, head);
  memcpy(out + head, gap, sizeof gap - 1);
  memcpy(out + head + sizeof gap - 1, message + tail, length - tail + 1);
}

flce_status flce_fail(flce_status status, const char* format, ...) {
  /* Formatted into a copy: an argument may be last_error itself, when CALL passes on a failure. */
  char text[MOST_TEXT];
  va_list arguments, again;
  va_start(arguments, format);
  va_copy(again, arguments);
  const int length = vsnprintf(text, sizeof text, format, arguments);
  char* whole = length < MOST_TEXT ? NULL : malloc((size_t)length + 1);
  if (whole) {
    vsnprintf(whole, (size_t)length + 1, format, again);
    shorten(text, whole, (size_t)length);
    free(whole);
  }
  va_end(again);
  va_end(arguments);
  memcpy(last_error, text, sizeof last_error);
  return status;
}

const char* flce_last_error(void) {
  return last_error;
}

/* By flce_dtype. */
static const struct {
  int64_t bytes;
  const char* name;
} dtypes[] = {{8, "float64"}, {4, "float32"}, {2, "bfloat16"}, {2, "float16"}};

int64_t flce_size_of(flce_dtype dtype) {
  return dtypes[dtype].bytes;
}

const char* flce_dtype_name(flce_dtype dtype) {
  return dtypes[dtype].name;
}

flce_dtype flce_stat_dtype(flce_dtype dtype) {
  return dtype == FLCE_F64 ? FLCE_F64 : FLCE_F32;
}

const char* flce_save_name(flce_save save) {
  static const char* const names[] = {"nothing", "logits", "grads", "stats", "samples", "auto"};
  return names[save];
}

flce_status flce_check_divergence(flce_divergence kind) {
  int value = (int)kind;
  if (value > FLCE_NO_DIVERGENCE && value <= FLCE_DIVERGENCE_COUNT) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT, "divergence: expected one of flce_divergence, got %d",
                   value);
}
