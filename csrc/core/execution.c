/* The GEMMs of an execution, and their count. */
#include "core/execution.h"

#include <stdatomic.h>

static _Atomic int64_t gemm_count;
int64_t flce_gemm_count(void) {
  return atomic_load(&gemm_count);
}

void flce_count_gemm(void) {
  atomic_fetch_add(&gemm_count, 1);
}

flce_status flce_run_gemm(const execution* e, flce_gemm gemm) {
  gemm.dtype = e->plan->dtype;
  flce_count_gemm();
  CALL(e, gemm, &gemm, buffer_ptr(e, FLCE_BUF_GEMM_WORKSPACE),
       e->plan->buffers[FLCE_BUF_GEMM_WORKSPACE].bytes);
  return FLCE_OK;
}
