/* Shared by the files of this folder, which run GEMMs by cuBLASLt: cublaslt.cu loads the library
 * and makes its objects, heuristics.cu chooses an algorithm, gemm.cu runs a GEMM, tuning.cu
 * implements tuning.h for benchmarks/tune.py. */
#ifndef FLCE_CUDA_GEMM_GEMM_CUH
#define FLCE_CUDA_GEMM_GEMM_CUH

#include "cuda/backend.cuh"
#include "tuning.h"

#include <cublasLt.h>
#include <string.h>

/* ---- cublaslt.cu ---- */

/* The functions of cuBLASLt that are used. */
typedef struct lt_functions {
  void* library; /* from dlopen */
  decltype(&cublasLtGetVersion) version;
  decltype(&cublasLtCreate) create;
  decltype(&cublasLtMatmulDescCreate) desc_create;
  decltype(&cublasLtMatmulDescDestroy) desc_destroy;
  decltype(&cublasLtMatmulDescSetAttribute) desc_set;
  decltype(&cublasLtMatrixLayoutCreate) layout_create;
  decltype(&cublasLtMatrixLayoutDestroy) layout_destroy;
  decltype(&cublasLtMatmulPreferenceCreate) preference_create;
  decltype(&cublasLtMatmulPreferenceDestroy) preference_destroy;
  decltype(&cublasLtMatmulPreferenceSetAttribute) preference_set;
  decltype(&cublasLtMatmulAlgoGetHeuristic) heuristic;
  decltype(&cublasLtMatmulAlgoConfigGetAttribute) algo_get;
  decltype(&cublasLtMatmul) matmul;
} lt_functions;

enum { kGpuName = 64 };

/* A device and its cuBLASLt handle. Immutable once open_gemm_device has returned it. */
typedef struct gemm_device {
  lt_functions lt;
  cublasLtHandle_t handle;
  int sm;                  /* 90 for compute capability 9.0 */
  char gpu[kGpuName];      /* name of the GPU, truncated */
  int64_t library_version; /* 130102 for cuBLASLt 13.1.2 */
} gemm_device;

/* Opens the device on its first use; thread-safe. It has to be the current device. */
flce_status open_gemm_device(int index, const gemm_device** device);

/* Identifies a GEMM: everything on which the choice of its algorithm depends, and everything that
 * its descriptors hold except the address of the bias. All fields are int64_t, because a key is
 * compared, hashed and written as kKeyNumbers numbers. The align_ fields are the largest powers of
 * two, up to 256 bytes, that divide the addresses; `accumulate` is beta != 0, `factors` whether the
 * result's factor is in the device's memory. */
typedef struct gemm_key {
  int64_t m, n, k, pitch_a, pitch_b, pitch_c, workspace_bytes;
  int64_t dtype, c_dtype, align_a, align_b, align_c, align_d;
  int64_t transpose_a, transpose_b, accumulate, tf32, bias;
  int64_t factors, device; /* last, because the text of a GEMM (tuning.h) leaves them out */
} gemm_key;
enum { kKeyNumbers = 20, kProductNumbers = kKeyNumbers - 2 };
static_assert(sizeof(gemm_key) == kKeyNumbers * sizeof(int64_t), "numbers alone");

/* cuBLASLt's descriptors. It sees our row-major matrices as column-major transposes and computes
 * C^T[n,m] = op(B)^T op(A)^T. So our B is its A (`first`), and our A its B (`second`). */
typedef struct gemm_descriptors {
  cublasLtMatmulDesc_t product;
  cublasLtMatrixLayout_t first, second, result;
} gemm_descriptors;

/* `d` starts zeroed. If this fails, `d` holds what was made so far, for destroy_descriptors. */
cublasStatus_t make_descriptors(const gemm_device* device, const gemm_key* key,
                                gemm_descriptors* d);
void destroy_descriptors(const gemm_device* device, gemm_descriptors* d);

/* ---- heuristics.cu ---- */

/* An algorithm of cuBLASLt as numbers that identify it in every process with the same GPU and
 * library version. Some candidates differ only in properties that cuBLASLt does not expose: `nth`
 * is the number of earlier candidates with the same configuration. */
typedef struct gemm_algorithm {
  int64_t id, tile, stages, cluster, splits, reduction, swizzle, inner, custom, nth;
} gemm_algorithm;
enum { kAlgorithmNumbers = 10 };
static_assert(sizeof(gemm_algorithm) == kAlgorithmNumbers * sizeof(int64_t), "numbers alone");

enum { kCandidates = 16 };

typedef struct gemm_candidate {
  cublasLtMatmulAlgo_t algo; /* as cuBLASLt takes it */
  gemm_algorithm algorithm;  /* the same as numbers */
  int64_t workspace_bytes;   /* that it needs */
} gemm_candidate;

/* The algorithms that may run a GEMM, in the order of cuBLASLt's heuristic. At least one, else
 * list_candidates returns CUBLAS_STATUS_NOT_SUPPORTED. */
typedef struct gemm_candidates {
  int count;
  gemm_candidate list[kCandidates];
} gemm_candidates;
cublasStatus_t list_candidates(const gemm_device* device, const gemm_key* key,
                               const gemm_descriptors* d, gemm_candidates* found);

/* The index of the candidate that the shipped rules choose, and of the one that is used: the tuned
 * one if there is one, else the shipped choice. */
int shipped_choice(const gemm_device* device, const gemm_key* key, const gemm_candidates* found);
int choice(const gemm_device* device, const gemm_key* key, const gemm_candidates* found);

/* Adds tuned choices, one line each: the library's version, kProductNumbers of a key,
 * kAlgorithmNumbers of an algorithm, the GPU's name. A later line for the same GEMM replaces an
 * earlier one. FLCE_INVALID_ARGUMENT if a line is malformed; nothing changes then. */
flce_status import_choices(const char* lines);

/* Reads `count` numbers, each followed by a blank, and advances *text past them. False if there are
 * fewer. */
bool read_numbers(const char** text, int64_t* numbers, int count);

/* ---- gemm.cu ---- */

gemm_key gemm_key_of(const flce_cuda* cuda, const flce_gemm* gemm, int64_t workspace_bytes);
/* Queues the GEMM. No other thread may use the descriptors meanwhile, because the bias address is
 * set in them. */
cublasStatus_t launch_gemm(const gemm_device* device, const flce_cuda* cuda, const flce_gemm* gemm,
                           const gemm_descriptors* d, const cublasLtMatmulAlgo_t* algo,
                           void* workspace, int64_t workspace_bytes);
flce_status gemm_refused(const gemm_key* key, const char* call, cublasStatus_t status);
/* Clears the cache of chosen algorithms, so that new tuned choices take effect. */
void forget_gemm_slots(void);

/* True: clears the record and starts recording each distinct GEMM that runs. False: stops. */
void record_gemms(bool on);
/* Copies at most `size` of the recorded keys; returns how many there are. */
int recorded_gemms(gemm_key* keys, int size);

#endif
