/* Implements test.h: checks, random data, a plain GEMM, and parallel loops on one and three
 * threads. */
#include "test.h"
#include "environment.h"

#include <float.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { FAILURES_SHOWN = 20 };

static _Atomic int64_t passed_count, failed_count; /* tests of ranks check on several threads */

void test_check(bool passed, const char* file, int line, const char* format, ...) {
  if (passed) {
    passed_count++;
    return;
  }
  if (failed_count++ >= FAILURES_SHOWN) return;
  va_list arguments;
  va_start(arguments, format);
  printf("FAILED %s:%d: ", file, line);
  vprintf(format, arguments);
  printf("\n");
  va_end(arguments);
}

int test_verdict(void) {
  printf("%lld passed, %lld failed\n", (long long)passed_count, (long long)failed_count);
  return failed_count == 0 && passed_count > 0 ? EXIT_SUCCESS : EXIT_FAILURE;
}

/* ---- data ---- */

static uint64_t random_state = 1;

void test_seed(uint64_t seed) {
  random_state = seed * 0x9e3779b97f4a7c15u + 1;
}

uint64_t test_random(void) { /* splitmix64 */
  uint64_t x = random_state += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

double test_uniform(double low, double high) {
  return low + (high - low) * (double)(test_random() >> 11) * 0x1p-53;
}

/* Normal by summing four uniform numbers of 16 bits each: with log and cos this took most of some
 * tests' time. */
double test_normal(void) {
  uint64_t bits = test_random();
  double sum = 0.0;
  for (int k = 0; k < 64; k += 16) sum += (double)(bits >> k & 0xffff) - 32767.5;
  return sum * (1.7320508075688772 * 0x1p-16);
}

void* test_buffer(flce_dtype dtype, int64_t count) {
  size_t bytes = (size_t)(count * flce_size_of(dtype));
  void* buffer = malloc(bytes > 0 ? bytes : 1);
  if (!buffer) abort();
  return buffer;
}

void* test_fill_normal(flce_dtype dtype, int64_t count, double scale) {
  void* buffer = test_buffer(dtype, count);
  for (int64_t i = 0; i < count; i++) flce_store(buffer, dtype, i, scale * test_normal());
  return buffer;
}

double* test_doubles(int64_t count) {
  return calloc((size_t)(count > 0 ? count : 1), sizeof(double));
}

bool test_same(const void* a, const void* b, int64_t bytes) {
  return memcmp(a, b, (size_t)bytes) == 0;
}

double test_epsilon(flce_dtype dtype) {
  static const double epsilons[] = {
      [FLCE_F64] = 0x1p-53, [FLCE_F32] = 0x1p-24, [FLCE_BF16] = 0x1p-8, [FLCE_F16] = 0x1p-11};
  return epsilons[dtype];
}

double test_tiny(flce_dtype dtype) {
  return dtype == FLCE_F64 ? DBL_MIN : dtype == FLCE_F16 ? 0x1p-25 : (double)FLT_MIN;
}

/* ---- GEMM ---- */

/* What AMX adds for bfloat16: it reads each row of A up to the next multiple of 32 elements beyond
 * k and multiplies the excess by zeros. After the last row nothing is read. */
static double padding_times_zero(const flce_gemm* g, int64_t i) {
  if (g->dtype != FLCE_BF16 || g->transpose_a) return 0.0;
  int64_t end = (g->k + FLCE_AMX_DEPTH - 1) / FLCE_AMX_DEPTH * FLCE_AMX_DEPTH;
  if (i == g->m - 1 && end > g->pitch_a) end = g->pitch_a;
  double sum = 0.0;
  for (int64_t k = g->k; k < end; k++) sum += 0.0 * flce_load(g->a, g->dtype, i * g->pitch_a + k);
  return sum;
}

/* Both operands are converted once, which most of the time would go to otherwise. */
static flce_status plain_gemm(void* context, const flce_gemm* g) {
  (void)context;
  double *a = test_doubles(g->k), *b = test_doubles(g->n * g->k);
  for (int64_t j = 0; j < g->n; j++)
    for (int64_t k = 0; k < g->k; k++)
      b[j * g->k + k] =
          flce_load(g->b, g->dtype, g->transpose_b ? j * g->pitch_b + k : k * g->pitch_b + j);
  for (int64_t i = 0; i < g->m; i++) {
    double padding = padding_times_zero(g, i);
    for (int64_t k = 0; k < g->k; k++)
      a[k] = flce_load(g->a, g->dtype, g->transpose_a ? k * g->pitch_a + i : i * g->pitch_a + k);
    for (int64_t j = 0; j < g->n; j++) {
      double sum = padding;
      double before = g->beta != 0.0 ? flce_load(g->c, g->c_dtype, i * g->pitch_c + j) : 0.0;
      for (int64_t k = 0; k < g->k; k++) sum += a[k] * b[j * g->k + k];
      flce_store(g->c, g->c_dtype, i * g->pitch_c + j,
                 (g->factors ? sum * g->factors[0] : ldexp(sum, g->shift)) + before);
    }
  }
  free(a), free(b);
  return FLCE_OK;
}

/* ---- threads ---- */

static void serial_for(int64_t begin, int64_t end, int64_t grain, flce_range_fn fn, void* context) {
  (void)grain;
  fn(begin, end, context);
}

typedef struct part {
  int64_t begin, end;
  flce_range_fn fn;
  void* context;
} part;

/* Two threads in addition to the caller's; they live until the process ends. */
enum { THREADS = 3 };
static struct {
  pthread_once_t once;
  pthread_barrier_t begin, end;
  part parts[THREADS];
} g_pool = {.once = PTHREAD_ONCE_INIT};

static void run_part(const part* p) {
  if (p->begin < p->end) p->fn(p->begin, p->end, p->context);
}

static void* work(void* own_part) {
  for (;;) {
    pthread_barrier_wait(&g_pool.begin);
    run_part(own_part);
    pthread_barrier_wait(&g_pool.end);
  }
  return NULL;
}

static void start_pool(void) {
  pthread_barrier_init(&g_pool.begin, NULL, THREADS);
  pthread_barrier_init(&g_pool.end, NULL, THREADS);
  for (int t = 1; t < THREADS; t++) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, work, &g_pool.parts[t]) != 0) abort();
    pthread_detach(thread);
  }
}

/* Whether a range runs on real threads: 1 of 16 calls for each function, because synchronising them
 * costs far more than a test's range; each one where races are looked for. */
static bool takes_threads(void) {
  static uint64_t ranges;
#ifdef __SANITIZE_THREAD__
  ranges = 0; /* of which 0 takes them */
#endif
  return ranges++ * 0x9e3779b97f4a7c15u >> 60 == 0;
}

/* Splits the range in three parts (1/6, 2/6, 3/6), whatever the grain: on three threads, or one
 * after the other from the last one on. */
static void threaded_for(int64_t begin, int64_t end, int64_t grain, flce_range_fn fn,
                         void* context) {
  (void)grain;
  int64_t count = end - begin;
  int64_t edges[] = {begin, begin + count / 6, begin + count / 2, end};
  for (int t = 0; t < THREADS; t++) g_pool.parts[t] = (part){edges[t], edges[t + 1], fn, context};
  if (!takes_threads()) {
    for (int t = THREADS - 1; t >= 0; t--) run_part(&g_pool.parts[t]);
    return;
  }
  pthread_once(&g_pool.once, start_pool);
  pthread_barrier_wait(&g_pool.begin);
  run_part(&g_pool.parts[0]);
  pthread_barrier_wait(&g_pool.end);
}

flce_cpu test_cpu(int threads) {
  return (flce_cpu){.gemm = plain_gemm, .parallel_for = threads > 1 ? threaded_for : serial_for};
}

void test_set_variable(const char* name, const char* value) {
  if (value)
    setenv(name, value, 1);
  else
    unsetenv(name);
  CHECK(flce_read_environment(), "no memory for %s", name);
}

bool test_next_variant(int* index) {
  static const char* const names[] = {"scalar", "avx2", "avx512"};
  while (*index < 3) {
    const char* name = names[(*index)++];
    test_set_variable("FLCE_CPU_VARIANT", name);
    if (strcmp(flce_cpu_variant(), name) == 0) return true;
    printf("not on this machine: %s\n", name);
  }
  test_set_variable("FLCE_CPU_VARIANT", NULL);
  return false;
}
