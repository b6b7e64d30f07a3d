/* The choice of CUDA's products: what flce.tune asks of libflce_cuda.so. */
#ifndef FLCE_TUNING_H
#define FLCE_TUNING_H

#include "flce.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Memory for a product that is to be timed; bias may be NULL. */
typedef struct flce_gemm_operands {
  const void* a;
  const void* b;
  void* c;
  const void* bias;
  void* workspace;
  int64_t workspace_bytes;
} flce_gemm_operands;

/* The choice of the algorithms of CUDA's products. A product is a line of text: the version of the
 * library that computes it, what its choice depends on (flce/tune.py: PRODUCT names the numbers),
 * the GPU's name. Texts are written as flce_plan_text writes; *used is their length. The
 * flce_cuda's device has to be the current one. */
typedef struct flce_cuda_tuning {
  /* on: forgets what was recorded, and records from now on each different product that runs. */
  void (*record)(bool on);
  /* The recorded products of the device, a line each. */
  flce_status (*recorded)(const flce_cuda* cuda, char* text, int64_t size, int64_t* used);
  /* Two indices, of the candidate that the shipped rules take and of the one that is taken, then
   * the candidates: the algorithm (gemm.cuh: gemm_algorithm) and its bytes of workspace, a line
   * each. */
  flce_status (*candidates)(const flce_cuda* cuda, const char* product, char* text, int64_t size,
                            int64_t* used);
  /* Runs a candidate `repeats` times, waits, and gives the milliseconds of one run. Refused while
   * the stream is captured. */
  flce_status (*time)(const flce_cuda* cuda, const char* product,
                      const flce_gemm_operands* operands, int64_t candidate, int64_t repeats,
                      double* milliseconds);
  /* Lines of a product with an algorithm's numbers before the name: from now on taken where it is
   * among that product's candidates. FLCE_INVALID_ARGUMENT changes nothing. */
  flce_status (*use)(const char* lines);
  const char* (*last_error)(void);
} flce_cuda_tuning;
typedef const flce_cuda_tuning* (*flce_cuda_tuning_fn)(void); /* "flce_cuda_tuning_table" */

#ifdef __cplusplus
}
#endif
#endif
