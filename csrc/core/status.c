/* Names of the enums of problem.h, sizes of dtypes, the message of a thread's last failure, and
 * FLCE_POISON. */
#include "flce.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static _Thread_local char last_error[512];

const char* flce_status_name(flce_status status) {
  switch (status) {
    case FLCE_OK:
      return "ok";
    case FLCE_INVALID_ARGUMENT:
      return "invalid argument";
    case FLCE_INVALID_TYPE:
      return "invalid type";
    case FLCE_TARGET_OUT_OF_RANGE:
      return "target out of range";
    case FLCE_OUT_OF_MEMORY:
      return "out of memory";
    case FLCE_UNSUPPORTED:
      return "unsupported";
    case FLCE_GEMM_FAILED:
      return "matrix product failed";
    case FLCE_DEVICE_ERROR:
      return "device error";
    case FLCE_COMM_FAILED:
      return "exchange failed";
  }
  return "unknown status";
}

bool flce_poisons(void) {
  const char* asked = getenv("FLCE_POISON");
  return asked && strcmp(asked, "1") == 0;
}

flce_status flce_fail(flce_status status, const char* format, ...) {
  /* Formatted into a copy: an argument may be last_error itself, when CALL passes on a failure. */
  char text[sizeof last_error];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  memcpy(last_error, text, sizeof last_error);
  return status;
}

const char* flce_last_error(void) {
  return last_error;
}

int64_t flce_size_of(flce_dtype dtype) {
  switch (dtype) {
    case FLCE_F64:
      return 8;
    case FLCE_F32:
      return 4;
    case FLCE_BF16:
    case FLCE_F16:
      return 2;
  }
  return 0;
}

const char* flce_dtype_name(flce_dtype dtype) {
  switch (dtype) {
    case FLCE_F64:
      return "float64";
    case FLCE_F32:
      return "float32";
    case FLCE_BF16:
      return "bfloat16";
    case FLCE_F16:
      return "float16";
  }
  return "unknown dtype";
}

flce_dtype flce_stat_dtype(flce_dtype dtype) {
  return dtype == FLCE_F64 ? FLCE_F64 : FLCE_F32;
}

const char* flce_save_name(flce_save save) {
  switch (save) {
    case FLCE_SAVE_NOTHING:
      return "nothing";
    case FLCE_SAVE_LOGITS:
      return "logits";
    case FLCE_SAVE_GRADS:
      return "grads";
    case FLCE_SAVE_STATS:
      return "stats";
    case FLCE_SAVE_SAMPLES:
      return "samples";
    case FLCE_SAVE_AUTO:
      return "auto";
  }
  return "unknown strategy";
}
