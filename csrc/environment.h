/* The environment variables that C reads in a call (Python reads FLCE_MAX_MEMORY and FLCE_PEERS).
 * Calls do not use getenv: torch runs operators without Python's GIL, while another thread may set
 * os.environ and so be in setenv. They see copies, made when the module is loaded and by
 * flce_read_environment(). */
#ifndef FLCE_ENVIRONMENT_H
#define FLCE_ENVIRONMENT_H

#include "problem.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef enum flce_variable {
  FLCE_VARIABLE_BLOCKS,
  FLCE_VARIABLE_CHECK,
  FLCE_VARIABLE_CPU_VARIANT,
  FLCE_VARIABLE_KERNEL,
  FLCE_VARIABLE_POISON,
  FLCE_VARIABLE_COUNT
} flce_variable;

/* Copies the variables again. Not thread-safe, nor safe with a concurrent setenv: Python calls it
 * before each operator and holds the GIL (flce/operators.py). False: out of memory, and some copies
 * are old. */
bool flce_read_environment(void);

/* The copy of a variable, NULL if it was not set. The text remains valid and the same. */
const char* flce_variable_text(flce_variable variable);

/* True if FLCE_POISON=1, which is for tests: outputs and workspaces are filled with NaN before use,
 * and the CPU's bfloat16 GEMM emulates AMX, where oneDNN reads A beyond its k columns. */
bool flce_poisons(void);
enum {
  FLCE_POISON_FLOAT = 0xff, /* fill byte: NaN in every float dtype */
  FLCE_POISON_INT = 0x7f    /* fill byte of integers: 0xff would be -1, which is a valid value */
};

#ifdef __cplusplus
}
#endif
#endif
