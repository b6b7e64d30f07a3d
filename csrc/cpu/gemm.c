/* Backend function `gemm`: calls the GEMM that the binding passes in (torch's), in column blocks if
 * that is faster. */
#include "cpu/convert.h"
#include "cpu/cpu.h"
#include "environment.h"

#include <math.h>

enum {
  GEMM_BLOCK_COLUMNS = 4096,    /* of a block; each block starts the threads anew */
  GEMM_BLOCKED_ROWS = 256,      /* the most rows for which blocks pay */
  GEMM_BLOCKED_BYTES = 32 << 20 /* the minimum size of W in bytes for which they do */
};

/* Some versions of MKL pack all of W^T before they multiply. If W exceeds the caches it then passes
 * through memory three times, which the few rows of a small chunk cannot hide. With blocks the
 * packed part stays in the cache (benchmarks/NOTES.md, 2026-11-21, 2026-11-26). For float32 only:
 * oneDNN's bfloat16 GEMM gains nothing. */
static bool is_worth_blocking(const flce_gemm* g) {
  return g->transpose_b && g->dtype == FLCE_F32 && g->m <= GEMM_BLOCKED_ROWS &&
         g->n * g->k * flce_size_of(FLCE_F32) >= GEMM_BLOCKED_BYTES;
}

/* Whether everything that AMX reads after row i of A (the row's padding, then the next row) is
 * finite. */
static bool row_tail_is_finite(const flce_gemm* g, int64_t i) {
  int64_t end = (g->k + FLCE_AMX_DEPTH - 1) / FLCE_AMX_DEPTH * FLCE_AMX_DEPTH;
  if (i == g->m - 1 && end > g->pitch_a) end = g->pitch_a;
  for (int64_t k = g->k; k < end; k++)
    if (!isfinite(flce_load(g->a, g->dtype, i * g->pitch_a + k))) return false;
  return true;
}

/* Sets to NaN the result rows for which AMX would give NaN: it multiplies what follows a row of A
 * by zeros. Used with FLCE_POISON=1. */
static void emulate_amx_overread(const flce_gemm* g) {
  if (g->dtype != FLCE_BF16 || g->transpose_a) return;
  for (int64_t i = 0; i < g->m; i++)
    if (!row_tail_is_finite(g, i))
      flce_fill(flce_at(g->c, g->c_dtype, i * g->pitch_c), g->c_dtype, NAN, g->n);
}

flce_status flce_cpu_gemm(void* self, const flce_gemm* g, void* workspace,
                          int64_t workspace_bytes) {
  (void)workspace;
  (void)workspace_bytes;
  const flce_cpu* cpu = self;
  if (g->m == 0 || g->n == 0) return FLCE_OK;
  if (!is_worth_blocking(g)) {
    FLCE_TRY(cpu->gemm(cpu->gemm_context, g));
    if (flce_poisons()) emulate_amx_overread(g);
    return FLCE_OK;
  }
  for (int64_t j = 0; j < g->n; j += GEMM_BLOCK_COLUMNS) {
    int64_t left = g->n - j;
    flce_gemm block = *g;
    block.n = left < GEMM_BLOCK_COLUMNS ? left : GEMM_BLOCK_COLUMNS;
    block.b = (const float*)g->b + j * g->pitch_b;
    block.c = (float*)g->c + j;
    FLCE_TRY(cpu->gemm(cpu->gemm_context, &block));
  }
  return FLCE_OK;
}
