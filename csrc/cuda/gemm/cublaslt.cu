/* cuBLASLt: loading the library, a handle for each device, matmul descriptors. The functions are
 * looked up in the library that torch has already loaded. So nothing is linked against cuBLASLt,
 * and one build works with CUDA 12 and 13. */
#include "cuda/gemm/gemm.cuh"

#include <dlfcn.h>
#include <pthread.h>

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER; /* held while a device is opened */
static gemm_device g_devices[kMaxDevices];
/* Stored (release) after the gemm_device is complete, loaded (acquire) before it is read. */
static bool g_open[kMaxDevices];

static void* open_library(void) {
  static const char* const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  for (int i = 0; i < 2; i++) {
    void* library = dlopen(names[i], RTLD_NOW | RTLD_NOLOAD);
    if (library) return library;
  }
  for (int i = 0; i < 2; i++) {
    void* library = dlopen(names[i], RTLD_NOW | RTLD_LOCAL);
    if (library) return library;
  }
  return NULL;
}

static flce_status load_functions(lt_functions* lt) {
  lt->library = open_library();
  if (!lt->library) {
    return flce_fail(FLCE_GEMM_FAILED,
                     "neither libcublasLt.so.13 nor libcublasLt.so.12 could be loaded; a torch "
                     "build for CUDA brings one");
  }
#define FLCE_LOOK_UP(member, symbol)                           \
  lt->member = (decltype(&symbol))dlsym(lt->library, #symbol); \
  if (!lt->member) return flce_fail(FLCE_GEMM_FAILED, "libcublasLt.so has no function " #symbol)
  FLCE_LOOK_UP(version, cublasLtGetVersion);
  FLCE_LOOK_UP(create, cublasLtCreate);
  FLCE_LOOK_UP(desc_create, cublasLtMatmulDescCreate);
  FLCE_LOOK_UP(desc_destroy, cublasLtMatmulDescDestroy);
  FLCE_LOOK_UP(desc_set, cublasLtMatmulDescSetAttribute);
  FLCE_LOOK_UP(layout_create, cublasLtMatrixLayoutCreate);
  FLCE_LOOK_UP(layout_destroy, cublasLtMatrixLayoutDestroy);
  FLCE_LOOK_UP(preference_create, cublasLtMatmulPreferenceCreate);
  FLCE_LOOK_UP(preference_destroy, cublasLtMatmulPreferenceDestroy);
  FLCE_LOOK_UP(preference_set, cublasLtMatmulPreferenceSetAttribute);
  FLCE_LOOK_UP(heuristic, cublasLtMatmulAlgoGetHeuristic);
  FLCE_LOOK_UP(algo_get, cublasLtMatmulAlgoConfigGetAttribute);
  FLCE_LOOK_UP(matmul, cublasLtMatmul);
#undef FLCE_LOOK_UP
  return FLCE_OK;
}

/* The caller holds g_lock. */
static flce_status fill_device(int index, gemm_device* device) {
  FLCE_TRY(load_functions(&device->lt));
  cudaDeviceProp facts;
  FLCE_TRY(check_cuda(cudaGetDeviceProperties(&facts, index), "the device of a product"));
  device->sm = 10 * facts.major + facts.minor;
  const cublasStatus_t status = device->lt.create(&device->handle);
  if (status == CUBLAS_STATUS_SUCCESS) return FLCE_OK;
  cudaGetLastError();
  return flce_fail(FLCE_GEMM_FAILED, "cublasLtCreate on device %d: status %d", index, (int)status);
}

flce_status open_gemm_device(int index, const gemm_device** device) {
  FLCE_TRY(check_device(index));
  *device = &g_devices[index];
  if (__atomic_load_n(&g_open[index], __ATOMIC_ACQUIRE)) return FLCE_OK;
  pthread_mutex_lock(&g_lock);
  flce_status status = FLCE_OK;
  if (!g_open[index]) {
    status = fill_device(index, &g_devices[index]);
    __atomic_store_n(&g_open[index], status == FLCE_OK, __ATOMIC_RELEASE);
  }
  pthread_mutex_unlock(&g_lock);
  return status;
}

size_t cuda_gemm_version(void) {
  lt_functions lt;
  return load_functions(&lt) == FLCE_OK ? lt.version() : 0;
}

/* ---- descriptors ---- */

static cudaDataType_t data_type(int64_t dtype) {
  switch (dtype) {
    case FLCE_F64:
      return CUDA_R_64F;
    case FLCE_BF16:
      return CUDA_R_16BF;
    case FLCE_F16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

static cublasComputeType_t compute_type(const gemm_key* key) {
  if (key->dtype == FLCE_F64) return CUBLAS_COMPUTE_64F;
  return key->dtype == FLCE_F32 && key->tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

void destroy_descriptors(const gemm_device* device, gemm_descriptors* d) {
  if (d->result) device->lt.layout_destroy(d->result);
  if (d->second) device->lt.layout_destroy(d->second);
  if (d->first) device->lt.layout_destroy(d->first);
  if (d->product) device->lt.desc_destroy(d->product);
  *d = {};
}

cublasStatus_t make_descriptors(const gemm_device* device, const gemm_key* key,
                                gemm_descriptors* d) {
  const lt_functions* lt = &device->lt;
  const cudaDataType_t type = data_type(key->dtype), c_type = data_type(key->c_dtype);
  const cudaDataType_t scale = key->dtype == FLCE_F64 ? CUDA_R_64F : CUDA_R_32F;
  const cublasOperation_t transpose = CUBLAS_OP_T;
  cublasStatus_t status = lt->desc_create(&d->product, compute_type(key), scale);
  if (status == CUBLAS_STATUS_SUCCESS && key->transpose_b) {
    status = lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose));
  }
  if (status == CUBLAS_STATUS_SUCCESS && key->transpose_a) {
    status = lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_TRANSB, &transpose, sizeof(transpose));
  }
  if (status == CUBLAS_STATUS_SUCCESS && key->factors) {
    const cublasLtPointerMode_t mode = CUBLASLT_POINTER_MODE_DEVICE;
    status = lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_POINTER_MODE, &mode, sizeof(mode));
  }
  if (status == CUBLAS_STATUS_SUCCESS && key->bias) {
    /* cuBLASLt's bias has one element for each row; in its column-major view rows are our columns.
     */
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    status = lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    /* launch_gemm sets the real address. The heuristic gets a placeholder with the same alignment:
     * it may depend on that, and without an address it may refuse the epilogue. */
    const void* aligned = (const void*)(uintptr_t)key->align_d;
    if (status == CUBLAS_STATUS_SUCCESS) {
      status =
          lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &aligned, sizeof(aligned));
    }
  }
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt->layout_create(&d->first, type, key->transpose_b ? key->k : key->n,
                               key->transpose_b ? key->n : key->k, key->pitch_b);
  }
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt->layout_create(&d->second, type, key->transpose_a ? key->m : key->k,
                               key->transpose_a ? key->k : key->m, key->pitch_a);
  }
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt->layout_create(&d->result, c_type, key->n, key->m, key->pitch_c);
  }
  return status;
}
