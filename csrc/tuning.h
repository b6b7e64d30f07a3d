/* The interface of libflce_cuda.so to benchmarks/tune.py: which GEMMs ran, the time of each of
 * their cuBLASLt algorithms, and the choice among them. Nothing of it runs in a call. */
#ifndef FLCE_TUNING_H
#define FLCE_TUNING_H

#include "flce.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Device memory of a GEMM to be timed, with the shapes, pitches and alignments of that GEMM. */
typedef struct flce_gemm_operands {
  const void* a;    /* flce_gemm.a */
  const void* b;    /* flce_gemm.b */
  void* c;          /* flce_gemm.c */
  const void* bias; /* flce_gemm.bias; may be NULL if the GEMM has none */
  void* workspace;  /* scratch of the GEMM */
  int64_t a_bytes, b_bytes, c_bytes, bias_bytes, workspace_bytes; /* of this memory */
} flce_gemm_operands;

/* The functions of the tuner. A GEMM is identified by a line of text, here called a product: the
 * version of cuBLASLt, the numbers on which the choice of an algorithm depends (PRODUCT in
 * benchmarks/tune.py names them), the name of the GPU. Functions with `text` write at most `size`
 * bytes, as snprintf does, and set *used to the length of the whole text. The device of the
 * flce_cuda has to be the current one. */
typedef struct flce_cuda_tuning {
  /* True: clears the record and starts recording each distinct GEMM that runs. False: stops. */
  void (*record)(bool on);
  /* Writes the recorded products of the device, one line each. */
  flce_status (*recorded)(const flce_cuda* cuda, char* text, int64_t size, int64_t* used);
  /* Writes a line of two indices, of the candidate that the shipped rules choose and of the one
   * that is used now, then one line for each candidate: its algorithm (gemm_algorithm in gemm.cuh)
   * and its bytes of workspace. */
  flce_status (*candidates)(const flce_cuda* cuda, const char* product, char* text, int64_t size,
                            int64_t* used);
  /* Runs a candidate `repeats` times, synchronizes, and returns the milliseconds of one run.
   * FLCE_UNSUPPORTED while the stream is captured into a graph. */
  flce_status (*time)(const flce_cuda* cuda, const char* product,
                      const flce_gemm_operands* operands, int64_t candidate, int64_t repeats,
                      double* milliseconds);
  /* Sets tuned choices. Each line is a product with the numbers of an algorithm before the GPU's
   * name. From now on that GEMM uses the algorithm, if it is among its candidates.
   * FLCE_INVALID_ARGUMENT if a line is malformed; nothing changes then. */
  flce_status (*use)(const char* lines);
  const char* (*last_error)(void); /* the message of this thread's last failure in the library */
} flce_cuda_tuning;
/* Exported as "flce_cuda_tuning_table". */
typedef const flce_cuda_tuning* (*flce_cuda_tuning_fn)(void);

#ifdef __cplusplus
}
#endif
#endif
