/* Conversions and single kernels: every variant compared with libm and the scalar code. */
#include "cpu/cpu.h"
#include "test.h"

#include <float.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Whether `half` is the nearest value of a 16-bit dtype, ties to even; compares with both
 * neighbours in double. */
static bool rounds_right(float value, uint16_t half, float (*widen)(uint16_t)) {
  if (isnan(value)) return isnan(widen(half));
  double here = widen(half), error = fabs((double)value - here);
  if (isinf(here)) { /* correct from half a step above the largest finite value on */
    uint16_t below = (uint16_t)(half - 1), next = (uint16_t)(half - 2);
    double last = widen(below), step = fabs(last - widen(next));
    return fabs((double)value) >= fabs(last) + step / 2 && (value < 0) == (here < 0);
  }
  for (int side = -1; side <= 1; side += 2) {
    if ((half & 0x7fff) == 0 && side < 0) continue;
    double other = widen((uint16_t)(half + side));
    if (!isfinite(other)) continue;
    double distance = fabs((double)value - other);
    if (distance < error || (distance == error && (half & 1))) return false;
  }
  return true;
}

static float any_float(int64_t i) {
  uint32_t bits = (uint32_t)test_random();
  if (i % 4 == 0) bits = (bits & 0xffff0000u) | 0x8000;                 /* halfway in bfloat16 */
  if (i % 4 == 1) bits = (bits & 0xffffe000u) | 0x1000;                 /* halfway in float16 */
  if (i % 2 == 1) bits = (bits & 0x807fffffu) | (90 + bits % 60) << 23; /* in float16's range */
  return flce_float_of(bits);
}

static void test_conversions(void) {
  bool exact = true;
  for (uint32_t half = 0; half < 0x10000; half++) {
    float from_bf16 = flce_from_bf16((uint16_t)half), from_f16 = flce_from_f16((uint16_t)half);
    if (!isnan(from_bf16) && flce_to_bf16(from_bf16) != half) exact = false;
    if (!isnan(from_f16) && flce_to_f16(from_f16) != half) exact = false;
    if (isnan(from_bf16) != ((half & 0x7fff) > 0x7f80)) exact = false;
    if (isnan(from_f16) != ((half & 0x7fff) > 0x7c00)) exact = false;
  }
  CHECK(exact, "16-bit values do not survive the way through float");
  CHECK(flce_from_f16(0x3c00) == 1.0f && flce_from_f16(0x0001) == 0x1p-24f &&
            flce_from_f16(0xfbff) == -65504.0f && flce_from_bf16(0x3f80) == 1.0f,
        "known 16-bit values");
  int64_t wrong = 0;
  for (int64_t i = 0; i < 200000; i++) {
    float value = any_float(i);
    if (!rounds_right(value, flce_to_bf16(value), flce_from_bf16)) wrong++;
    if (!rounds_right(value, flce_to_f16(value), flce_from_f16)) wrong++;
  }
  CHECK(wrong == 0, "%lld floats are not rounded to the nearest even", (long long)wrong);
}

static const flce_row_kernels* row_kernels(flce_dtype dtype) {
  const flce_row_kernels* kernels = NULL;
  CHECK_OK(flce_cpu_row_kernels(dtype, &kernels));
  return kernels;
}

static const flce_block_kernels* block_kernels(flce_dtype stat, flce_dtype dtype) {
  const flce_block_kernels* kernels = NULL;
  CHECK_OK(flce_cpu_block_kernels(stat, dtype, &kernels));
  return kernels;
}

static double ulps(float actual, double expected) {
  int exponent;
  frexp(expected, &exponent);
  return fabs(actual - expected) / ldexp(1.0, exponent - 24);
}

/* exp over all its arguments, every 499th float of [-104, 0]. */
static void test_exp(void) {
  enum { BATCH = FLCE_SPAN };
  static float in[BATCH], out[BATCH];
  const flce_row_kernels* kernels = row_kernels(FLCE_F32);
  uint32_t last = flce_bits_of(-104.0f), bits = 0x80000000u;
  double worst = 0.0, worst_sum = 0.0;
  int64_t unflushed = 0;
  while (bits < last) {
    int64_t count = 0;
    for (; count < BATCH && bits < last; bits += 499) in[count++] = flce_float_of(bits);
    double returned = kernels->exp_sum(out, in, NULL, 0.0, count), sum = 0.0;
    for (int64_t i = 0; i < count; i++) {
      double expected = exp((double)in[i]);
      sum += expected;
      if (expected >= (double)FLT_MIN * 1.000001)
        worst = fmax(worst, ulps(out[i], expected));
      else if (out[i] != 0.0f && out[i] < FLT_MIN)
        unflushed++;
    }
    if (sum > 1e-30) worst_sum = fmax(worst_sum, fabs(returned - sum) / sum);
  }
  printf("%s: exp is within %.3f ulp\n", flce_cpu_variant(), worst);
  CHECK(worst <= 1.5, "%s: exp is off by %g ulp", flce_cpu_variant(), worst);
  /* A lane adds at most BATCH / 32 terms, each with half a ulp of rounding. */
  CHECK(worst_sum <= (BATCH / 32 + 4) * 0x1p-24, "%s: the sum of exp is off by %g",
        flce_cpu_variant(), worst_sum);
  CHECK(unflushed == 0, "%s: %lld denormals", flce_cpu_variant(), (long long)unflushed);

  float special[] = {-INFINITY, NAN, -0.0f, 0.0f, -1e30f, -87.4f, 0x1p-20f, 1e30f};
  kernels->exp_sum(special, special, NULL, 0.0, 8);
  CHECK(special[0] == 0.0f && isnan(special[1]) && special[2] == 1.0f && special[3] == 1.0f &&
            special[4] == 0.0f && special[5] == 0.0f && special[6] == 1.0f && special[7] == 1.0f,
        "%s: exp of -inf, NaN, -0, 0, -1e30, -87.4, and above 0", flce_cpu_variant());
}

/* narrow is bitwise equal to the scalar code for any float. */
static void test_narrow(void) {
  enum { COUNT = 20011 };
  static float in[COUNT];
  static uint16_t out[COUNT];
  for (int64_t i = 0; i < COUNT; i++) in[i] = any_float(i);
  in[0] = NAN;
  in[1] = -INFINITY;
  in[2] = flce_float_of(0x7fffffff);
  for (int d = 0; d < 2; d++) {
    flce_dtype dtype = d ? FLCE_F16 : FLCE_BF16;
    block_kernels(FLCE_F32, dtype)->narrow(out, in, COUNT);
    int64_t wrong = 0;
    for (int64_t i = 0; i < COUNT; i++) {
      if (isnan(in[i]))
        wrong += !isnan(flce_load(out, dtype, i));
      else
        wrong += out[i] != (d ? flce_to_f16(in[i]) : flce_to_bf16(in[i]));
    }
    CHECK(wrong == 0, "%s: %lld floats rounded wrongly to %s", flce_cpu_variant(), (long long)wrong,
          flce_dtype_name(dtype));
  }
}

/* scaled and axpy for each length of tail, compared with double. */
static void test_blocks(flce_dtype stat, flce_dtype dtype) {
  const flce_block_kernels* kernels = block_kernels(stat, dtype);
  double tolerance = 8.0 * test_epsilon(stat);
  for (int64_t count = 0; count <= 70; count++) {
    void* x = test_fill_normal(dtype, count, 1.0);
    void* acc = test_buffer(stat, count);
    bool right = true;
    kernels->scaled(acc, 0.75, x, count);
    for (int64_t i = 0; i < count; i++) {
      double value = flce_load(x, dtype, i);
      right &= test_close(flce_load(acc, stat, i), 0.75 * value, tolerance * fabs(value));
    }
    kernels->axpy(acc, -2.5, x, count);
    for (int64_t i = 0; i < count; i++) {
      double value = flce_load(x, dtype, i);
      right &= test_close(flce_load(acc, stat, i), -1.75 * value, tolerance * fabs(value));
    }
    CHECK(right, "%s: %s sums of %lld %s", flce_cpu_variant(), flce_dtype_name(stat),
          (long long)count, flce_dtype_name(dtype));
    free(x);
    free(acc);
  }
}

static void test_variant_choice(void) {
  flce_cpu cpu = test_cpu(1);
  flce_backend backend;
  flce_cpu_backend(&cpu, &backend);
  flce_problem problem = {.shape.tokens = 1, .shape.vocab = 1};
  flce_facts facts;
  setenv("FLCE_CPU_VARIANT", "sse9", 1);
  CHECK_OK(backend.facts(backend.self, &problem, &facts)); /* calls do not use getenv */
  test_set_variable("FLCE_CPU_VARIANT", "sse9");
  flce_status status = backend.facts(backend.self, &problem, &facts);
  CHECK(status == FLCE_INVALID_ARGUMENT, "an unknown variant gives %s", flce_status_name(status));
  CHECK(strstr(flce_last_error(), "FLCE_CPU_VARIANT: expected scalar") &&
            strstr(flce_last_error(), "got sse9"),
        "the sentence: %s", flce_last_error());
  CHECK(strcmp(flce_cpu_variant(), "none") == 0, "the variant is %s", flce_cpu_variant());
  test_set_variable("FLCE_CPU_VARIANT", NULL);
  CHECK_OK(backend.facts(backend.self, &problem, &facts));
  const flce_block_kernels* kernels;
  CHECK(flce_cpu_block_kernels(FLCE_F32, FLCE_F64, &kernels) == FLCE_UNSUPPORTED,
        "float64 values in float32 sums");
}

int main(void) {
  test_seed(1);
  test_conversions();
  test_variant_choice();
  for (int index = 0; test_next_variant(&index);) {
    test_exp();
    test_narrow();
    for (int dtype = FLCE_F64; dtype <= FLCE_F16; dtype++) test_blocks(FLCE_F64, (flce_dtype)dtype);
    for (int dtype = FLCE_F32; dtype <= FLCE_F16; dtype++) test_blocks(FLCE_F32, (flce_dtype)dtype);
  }
  return test_verdict();
}
