/* Harness of the C tests: counted checks, random numbers, typed buffers, a plain GEMM and two ways
 * to run a parallel loop. No torch. */
#ifndef FLCE_TESTS_TEST_H
#define FLCE_TESTS_TEST_H

#include "backend.h"
#include "cpu/convert.h"

#include <math.h>

/* Counts a check; the first failed checks of a run are printed. */
void test_check(bool passed, const char* file, int line, const char* format, ...)
    __attribute__((format(printf, 4, 5)));
#define CHECK(condition, ...) test_check((condition), __FILE__, __LINE__, __VA_ARGS__)
#define CHECK_OK(call)                                                                            \
  do {                                                                                            \
    flce_status status_ = (call);                                                                 \
    CHECK(status_ == FLCE_OK, "%s: %s, %s", #call, flce_status_name(status_), flce_last_error()); \
  } while (0)

/* |actual - expected| <= tolerance; equal infinities pass, NaN never does. */
static inline bool test_close(double actual, double expected, double tolerance) {
  return actual == expected || fabs(actual - expected) <= tolerance;
}

/* Prints the totals; returns the program's exit status. */
int test_verdict(void);

/* Repeatable random numbers. */
void test_seed(uint64_t seed);
uint64_t test_random(void);
double test_uniform(double low, double high);
double test_normal(void);

/* A buffer of exactly `count` elements, so that the sanitizer detects any access beyond it. */
void* test_buffer(flce_dtype dtype, int64_t count);
void* test_fill_normal(flce_dtype dtype, int64_t count, double scale);
/* `count` zeros. */
double* test_doubles(int64_t count);
bool test_same(const void* a, const void* b, int64_t bytes);

/* Half a ulp, relative: the error of one rounding. */
double test_epsilon(flce_dtype dtype);
/* The largest absolute error of an underflow. */
double test_tiny(flce_dtype dtype);

/* An flce_cpu with the plain GEMM and `threads` threads (1: serial). With more, each range is split
 * unevenly, so that its parts differ from the serial run's; most ranges then run part by part from
 * the last one on, the others on three threads. */
flce_cpu test_cpu(int threads);

/* Sets an environment variable for the calls that follow; NULL: unsets it. */
void test_set_variable(const char* name, const char* value);

/* Iterates over the variants that this machine supports: sets FLCE_CPU_VARIANT; false at the
 * end. */
bool test_next_variant(int* index);

#endif
