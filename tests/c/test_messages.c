/* flce_fail: messages of every length. */
#include "flce.h"
#include "test.h"

#include <stdlib.h>
#include <string.h>

enum { MOST = 5000 };

static const char kBegin[] = "name: expected this, got ", kEnd[] = " at the end";

/* `count` characters of `character`. */
static char* repeated(const char* character, int count) {
  size_t size = strlen(character);
  char* text = malloc(count * size + 1);
  for (int i = 0; i < count; i++) memcpy(text + i * size, character, size);
  text[count * size] = 0;
  return text;
}

/* Whether a text has whole characters of UTF-8 alone, of at most two bytes. */
static bool has_whole_characters(const char* text) {
  for (; *text; text++) {
    bool first = ((unsigned char)*text & 0xe0) == 0xc0;
    if (first && ((unsigned char)*++text & 0xc0) != 0x80) return false;
    if (!first && (unsigned char)*text >= 0x80) return false;
  }
  return true;
}

static void check_message(const char* character, int count) {
  char* middle = repeated(character, count);
  flce_status status = flce_fail(FLCE_INVALID_ARGUMENT, "%s%s%s", kBegin, middle, kEnd);
  const char* message = flce_last_error();
  size_t length = strlen(message), whole = strlen(kBegin) + strlen(middle) + strlen(kEnd);
  CHECK(status == FLCE_INVALID_ARGUMENT, "the status is %s", flce_status_name(status));
  CHECK(strncmp(message, kBegin, strlen(kBegin)) == 0, "the message begins so: %.40s", message);
  CHECK(length >= strlen(kEnd) && strcmp(message + length - strlen(kEnd), kEnd) == 0,
        "the message of %zu bytes ends so: %s", whole, message + (length > 40 ? length - 40 : 0));
  CHECK(has_whole_characters(message), "%d times %s: a part of a character", count, character);
  const char* gap = strstr(message, " ... ");
  CHECK(gap ? length < whole : length == whole, "%zu bytes of %zu", length, whole);
  CHECK(gap || length < 4000, "a message of %zu bytes", length);
  free(middle);
}

/* A message that is passed on is an argument of the next one. */
static void test_passed_on(void) {
  char* middle = repeated("x", MOST);
  flce_fail(FLCE_DEVICE_ERROR, "%s%s%s", kBegin, middle, kEnd);
  char* before = repeated(flce_last_error(), 1);
  flce_fail(FLCE_DEVICE_ERROR, "%s", flce_last_error());
  CHECK(strcmp(before, flce_last_error()) == 0, "passed on: %s", flce_last_error());
  free(before);
  free(middle);
}

int main(void) {
  for (int count = 0; count < MOST; count++) {
    check_message("x", count);
    check_message("\xc3\xa9", count);
  }
  test_passed_on();
  return test_verdict();
}
