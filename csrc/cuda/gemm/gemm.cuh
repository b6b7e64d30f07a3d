/* Shared by the files of this folder, which run GEMMs by cuBLASLt: cublaslt.cu loads the library
 * and makes its objects, heuristics.cu chooses an algorithm, gemm.cu runs a GEMM. */
#ifndef FLCE_CUDA_GEMM_GEMM_CUH
#define FLCE_CUDA_GEMM_GEMM_CUH

#include "cuda/backend.cuh"

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

/* A device and its cuBLASLt handle. Immutable once open_gemm_device has returned it. */
typedef struct gemm_device {
  lt_functions lt;
  cublasLtHandle_t handle;
  int sm; /* 90 for compute capability 9.0 */
} gemm_device;

/* Opens the device on its first use; thread-safe. It has to be the current device. */
flce_status open_gemm_device(int index, const gemm_device** device);

/* Identifies a GEMM: everything on which the choice of its algorithm depends, and everything that
 * its descriptors hold except the address of the bias. All fields are int64_t, because a key is
 * compared and hashed as kKeyNumbers numbers. The align_ fields are the largest powers of
 * two, up to 256 bytes, that divide the addresses; `accumulate` is beta != 0, `factors` whether the
 * result's factor is in the device's memory. */
typedef struct gemm_key {
  int64_t m, n, k, pitch_a, pitch_b, pitch_c, workspace_bytes;
  int64_t dtype, c_dtype, align_a, align_b, align_c, align_d;
  int64_t transpose_a, transpose_b, accumulate, tf32, bias;
  int64_t factors, device;
} gemm_key;
enum { kKeyNumbers = 20 };
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

/* The algorithm for a GEMM, among the candidates of cuBLASLt's heuristic.
 * CUBLAS_STATUS_NOT_SUPPORTED if there is none. */
cublasStatus_t choose_algorithm(const gemm_device* device, const gemm_key* key,
                                const gemm_descriptors* d, cublasLtMatmulAlgo_t* algo);

#endif
