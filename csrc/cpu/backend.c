/* The function table and the facts of the CPU backend, and the run-time choice of its kernels by
 * instruction set. */
#include "cpu/cpu.h"
#include "environment.h"

#include <string.h>

typedef struct variant {
  const char* name;
  const flce_row_kernels* (*row_kernels)(flce_dtype dtype);
  const flce_block_kernels* (*block_kernels)(flce_dtype stat, flce_dtype dtype);
} variant;

/* Slowest first. The variants that this processor supports are a prefix of the array. */
static const variant variants[] = {
    {"scalar", flce_scalar_row_kernels, flce_scalar_block_kernels},
#if FLCE_CPU_X86
    {"avx2", flce_avx2_row_kernels, flce_avx2_block_kernels},
    {"avx512", flce_avx512_row_kernels, flce_avx512_block_kernels},
#endif
};

static int supported_variants(void) {
#if FLCE_CPU_X86
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") ||
      !__builtin_cpu_supports("f16c"))
    return 1;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vl"))
    return 2;
  return 3;
#else
  return 1;
#endif
}

/* The fastest supported variant, or the one that `wanted`, the text of FLCE_CPU_VARIANT, names;
 * NULL if that one is unknown or not supported. */
static const variant* choose_variant(const char* wanted) {
  int supported = supported_variants();
  if (!wanted || !*wanted) return &variants[supported - 1];
  for (int i = 0; i < supported; i++)
    if (strcmp(wanted, variants[i].name) == 0) return &variants[i];
  return NULL;
}

const char* flce_cpu_variant(void) {
  const variant* chosen = choose_variant(flce_variable_text(FLCE_VARIABLE_CPU_VARIANT));
  return chosen ? chosen->name : "none";
}

static flce_status require_variant(const variant** chosen) {
  const char* wanted = flce_variable_text(FLCE_VARIABLE_CPU_VARIANT);
  *chosen = choose_variant(wanted);
  if (*chosen) return FLCE_OK;
  static const char* const expected[] = {"scalar", "scalar or avx2", "scalar, avx2 or avx512"};
  return flce_fail(FLCE_INVALID_ARGUMENT, "FLCE_CPU_VARIANT: expected %s on this machine, got %s",
                   expected[supported_variants() - 1], wanted);
}

flce_status flce_cpu_row_kernels(flce_dtype dtype, const flce_row_kernels** kernels) {
  const variant* chosen;
  FLCE_TRY(require_variant(&chosen));
  *kernels = chosen->row_kernels(dtype);
  return FLCE_OK;
}

flce_status flce_cpu_block_kernels(flce_dtype stat, flce_dtype dtype,
                                   const flce_block_kernels** kernels) {
  const variant* chosen;
  FLCE_TRY(require_variant(&chosen));
  *kernels = chosen->block_kernels(stat, dtype);
  if (*kernels) return FLCE_OK;
  return flce_fail(FLCE_UNSUPPORTED, "no CPU kernel for %s values in %s sums",
                   flce_dtype_name(dtype), flce_dtype_name(stat));
}

void flce_cpu_parallel(const void* self, int64_t count, int64_t width, flce_range_fn fn,
                       void* context) {
  const flce_cpu* cpu = self;
  if (count <= 0) return;
  int64_t grain = width > 0 ? FLCE_GRAIN / width : FLCE_GRAIN;
  cpu->parallel_for(0, count, grain > 0 ? grain : 1, fn, context);
}

flce_status flce_cpu_facts(void* self, const flce_problem* problem, flce_facts* out) {
  (void)self;
  const variant* chosen;
  FLCE_TRY(require_variant(&chosen));
  *out = (flce_facts){.order_bytes = flce_cpu_order_bytes(problem->shape.tokens),
                      .compact_bytes = problem->shape.tokens * (int64_t)sizeof(int64_t)};
  flce_facts_of_type(true, problem->dtypes.gemm, out);
  if (flce_is_sampled(problem))
    out->sample_bytes =
        flce_cpu_sample_bytes(problem->shape.rows, problem->shape.vocab, problem->sampling.eps);
  return FLCE_OK;
}

void flce_cpu_backend(flce_cpu* cpu, flce_backend* backend) {
#define FLCE_ENTRY(function) .function = flce_cpu_##function,
  *backend = (flce_backend){.name = "cpu",
                            .self = cpu,
                            .last_error = flce_last_error,
                            FLCE_BACKEND_FUNCTIONS(FLCE_ENTRY)};
#undef FLCE_ENTRY
}
