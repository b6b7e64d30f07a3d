/* What the files of the GEMMs share: cublaslt.cu holds cuBLASLt and its objects,
 * heuristics.cu chooses an algorithm, gemm.cu runs a GEMM, tuning.cu serves flce.tune. */
#ifndef FLCE_CUDA_GEMM_GEMM_CUH
#define FLCE_CUDA_GEMM_GEMM_CUH

#include "cuda/backend.cuh"
#include "tuning.h"

#include <cublasLt.h>
#include <string.h>

/* ---- cublaslt.cu ---- */

typedef struct lt_functions {
  void* library;
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

/* A device as its products need it; it stays as it is once it is open. */
typedef struct gemm_device {
  lt_functions lt;
  cublasLtHandle_t handle;
  int sm;                  /* 90 for compute capability 9.0 */
  char gpu[kGpuName];      /* its name, cut to fit */
  int64_t library_version; /* 130102 for cuBLASLt 13.1.2 */
} gemm_device;

/* The device has to be the current one. */
flce_status open_gemm_device(int index, const gemm_device** device);

/* Everything that an algorithm's choice depends on, and all that descriptors hold but the address
 * of the bias. int64_t alone: it is compared, hashed and written as kKeyNumbers numbers. */
typedef struct gemm_key {
  int64_t m, n, k, pitch_a, pitch_b, pitch_c, workspace_bytes;
  int64_t dtype, c_dtype, align_a, align_b, align_c, align_d;
  int64_t transpose_a, transpose_b, accumulate, tf32, bias;
  int64_t device; /* last: no part of a product's text */
} gemm_key;
enum { kKeyNumbers = 19, kProductNumbers = kKeyNumbers - 1 };
static_assert(sizeof(gemm_key) == kKeyNumbers * sizeof(int64_t), "numbers alone");

/* Column-major views: C^T[n,m] = op(B)^T op(A)^T, so B is cuBLASLt's A. */
typedef struct gemm_descriptors {
  cublasLtMatmulDesc_t product;
  cublasLtMatrixLayout_t first, second, result;
} gemm_descriptors;

/* Leaves in `d`, which starts zeroed, what it made, also when it fails. */
cublasStatus_t make_descriptors(const gemm_device* device, const gemm_key* key,
                                gemm_descriptors* d);
void destroy_descriptors(const gemm_device* device, gemm_descriptors* d);

/* ---- heuristics.cu ---- */

/* An algorithm by its configuration, which serves for every process with this GPU and library.
 * `nth`: how many candidates before it have the same configuration, as some differ in what the
 * library does not tell. */
typedef struct gemm_algorithm {
  int64_t id, tile, stages, cluster, splits, reduction, swizzle, inner, custom, nth;
} gemm_algorithm;
enum { kAlgorithmNumbers = 10 };
static_assert(sizeof(gemm_algorithm) == kAlgorithmNumbers * sizeof(int64_t), "numbers alone");

enum { kCandidates = 16 };

typedef struct gemm_candidate {
  cublasLtMatmulAlgo_t algo;
  gemm_algorithm algorithm;
  int64_t workspace_bytes;
} gemm_candidate;

/* A product's candidates in the heuristic's order, those alone that may run: at least one, or
 * CUBLAS_STATUS_NOT_SUPPORTED. */
typedef struct gemm_candidates {
  int count;
  gemm_candidate list[kCandidates];
} gemm_candidates;
cublasStatus_t list_candidates(const gemm_device* device, const gemm_key* key,
                               const gemm_descriptors* d, gemm_candidates* found);

/* Which candidate the shipped rules take; which one is taken: the tuned one, else that. */
int shipped_choice(const gemm_device* device, const gemm_key* key, const gemm_candidates* found);
int choice(const gemm_device* device, const gemm_key* key, const gemm_candidates* found);

/* Adds tuned choices, a line each: the library's version, a key's kProductNumbers, an algorithm's
 * kAlgorithmNumbers, the GPU's name. A later line for the same product replaces an earlier one.
 * Nothing changes where a line is not of that form: FLCE_INVALID_ARGUMENT. */
flce_status import_choices(const char* lines);

/* `count` numbers from *text on, which moves behind them; false where there are fewer. */
bool read_numbers(const char** text, int64_t* numbers, int count);

/* ---- gemm.cu ---- */

gemm_key gemm_key_of(const flce_cuda* cuda, const flce_gemm* gemm, int64_t workspace_bytes);
/* Queues the product; the descriptors are the caller's alone while this runs. */
cublasStatus_t launch_gemm(const gemm_device* device, const flce_cuda* cuda, const flce_gemm* gemm,
                           const gemm_descriptors* d, const cublasLtMatmulAlgo_t* algo,
                           void* workspace, int64_t workspace_bytes);
flce_status gemm_refused(const gemm_key* key, const char* call, cublasStatus_t status);
/* Every choice is made anew from now on. */
void forget_gemm_slots(void);

/* on: forgets what was recorded, and records from now on each different product that runs. */
void record_gemms(bool on);
/* Copies at most `size` of the recorded products; gives how many there are. */
int recorded_gemms(gemm_key* keys, int size);

#endif
