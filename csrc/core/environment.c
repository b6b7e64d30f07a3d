/* Copies of the environment variables that calls depend on. */
#include "environment.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

/* A value that a variable has had. It is never freed, because a call of another thread may be
 * reading it. */
typedef struct past_value {
  struct past_value* next;
  char text[];
} past_value;

static past_value* past_values;
static _Atomic(const char*) copies[FLCE_VARIABLE_COUNT];

/* The stored text that equals `text`; it is stored first if there is none. NULL: out of memory. */
static const char* lasting_copy(const char* text) {
  for (const past_value* value = past_values; value; value = value->next)
    if (strcmp(value->text, text) == 0) return value->text;
  size_t size = strlen(text) + 1;
  past_value* value = malloc(sizeof *value + size);
  if (!value) return NULL;
  memcpy(value->text, text, size);
  value->next = past_values;
  past_values = value;
  return value->text;
}

bool flce_read_environment(void) {
  const char* const texts[] = {[FLCE_VARIABLE_BLOCKS] = getenv("FLCE_BLOCKS"),
                               [FLCE_VARIABLE_CHECK] = getenv("FLCE_CHECK"),
                               [FLCE_VARIABLE_CPU_VARIANT] = getenv("FLCE_CPU_VARIANT"),
                               [FLCE_VARIABLE_KERNEL] = getenv("FLCE_KERNEL"),
                               [FLCE_VARIABLE_POISON] = getenv("FLCE_POISON")};
  for (int i = 0; i < FLCE_VARIABLE_COUNT; i++) {
    const char* copy = texts[i] ? lasting_copy(texts[i]) : NULL;
    if (texts[i] && !copy) return false;
    copies[i] = copy;
  }
  return true;
}

__attribute__((constructor)) static void read_when_loaded(void) {
  (void)flce_read_environment();
}

const char* flce_variable_text(flce_variable variable) {
  return copies[variable];
}

bool flce_poisons(void) {
  const char* text = flce_variable_text(FLCE_VARIABLE_POISON);
  return text && strcmp(text, "1") == 0;
}
