/* The one wrapper of cuBLASLt. Its functions come from the library that is already in the process
 * (torch's), so that none is linked and CUDA 12 and 13 are served by one build. */
#include "backend.cuh"

#include <cublasLt.h>
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>

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
  decltype(&cublasLtMatmul) matmul;
} lt_functions;

/* Everything that an algorithm's choice depends on. Compared as bytes: it has no padding. */
typedef struct gemm_key {
  int64_t m, n, k, pitch_a, pitch_b, pitch_c, workspace_bytes;
  int32_t device, dtype, c_dtype, align_a, align_b, align_c, align_d;
  int32_t transpose_a, transpose_b, accumulate, tf32, bias;
} gemm_key;
static_assert(sizeof(gemm_key) == 7 * sizeof(int64_t) + 12 * sizeof(int32_t), "padding");

typedef struct gemm_slot {
  bool used;
  gemm_key key;
  cublasLtMatmulAlgo_t algo;
} gemm_slot;

/* Column-major views: C^T[n,m] = op(B)^T op(A)^T, so B is cuBLASLt's A. */
typedef struct gemm_descriptors {
  cublasLtMatmulDesc_t product;
  cublasLtMatrixLayout_t first, second, result;
} gemm_descriptors;

enum { kMaxDevices = 64, kSlots = 1024, kMaxAlignment = 256 };

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER; /* guards the three below */
static lt_functions g_lt;
static cublasLtHandle_t g_handles[kMaxDevices];
static gemm_slot g_slots[kSlots];

/* A lost slot only costs asking the heuristic again, so a slot has no chain. */
static gemm_slot* slot_of(const gemm_key* key) {
  uint64_t hash = 14695981039346656037u; /* FNV-1a */
  for (size_t i = 0; i < sizeof(*key); i++) {
    hash = (hash ^ ((const unsigned char*)key)[i]) * 1099511628211u;
  }
  return &g_slots[(hash >> 20) % kSlots];
}

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

/* With g_lock held. */
static flce_status load_functions(void) {
  if (g_lt.library) return FLCE_OK;
  lt_functions lt;
  lt.library = open_library();
  if (!lt.library) {
    return flce_fail(FLCE_GEMM_FAILED,
                     "neither libcublasLt.so.13 nor libcublasLt.so.12 could be loaded; a torch "
                     "build for CUDA brings one");
  }
#define FLCE_LOOK_UP(member, symbol)                         \
  lt.member = (decltype(&symbol))dlsym(lt.library, #symbol); \
  if (!lt.member) return flce_fail(FLCE_GEMM_FAILED, "libcublasLt.so has no function " #symbol)
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
  FLCE_LOOK_UP(matmul, cublasLtMatmul);
#undef FLCE_LOOK_UP
  g_lt = lt;
  return FLCE_OK;
}

/* With g_lock held. */
static flce_status load_handle(int device) {
  FLCE_TRY(load_functions());
  if (device < 0 || device >= kMaxDevices) {
    return flce_fail(FLCE_UNSUPPORTED, "device: expected 0 to %d, got %d", kMaxDevices - 1, device);
  }
  if (g_handles[device]) return FLCE_OK;
  const cublasStatus_t status = g_lt.create(&g_handles[device]);
  if (status == CUBLAS_STATUS_SUCCESS) return FLCE_OK;
  g_handles[device] = NULL;
  return flce_fail(FLCE_GEMM_FAILED, "cublasLtCreate on device %d: status %d", device, (int)status);
}

static flce_status refused(const flce_gemm* gemm, const char* call, cublasStatus_t status) {
  cudaGetLastError();
  return flce_fail(FLCE_GEMM_FAILED,
                   "%s: status %d for [%lld,%lld] = [%lld,%lld] x [%lld,%lld], %s to %s", call,
                   (int)status, (long long)gemm->m, (long long)gemm->n, (long long)gemm->m,
                   (long long)gemm->k, (long long)gemm->k, (long long)gemm->n,
                   flce_dtype_name(gemm->dtype), flce_dtype_name(gemm->c_dtype));
}

static cudaDataType_t data_type(flce_dtype dtype) {
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

static cublasComputeType_t compute_type(flce_dtype dtype, bool tf32) {
  if (dtype == FLCE_F64) return CUBLAS_COMPUTE_64F;
  return dtype == FLCE_F32 && tf32 ? CUBLAS_COMPUTE_32F_FAST_TF32 : CUBLAS_COMPUTE_32F;
}

static void destroy_descriptors(const lt_functions* lt, gemm_descriptors* d) {
  if (d->result) lt->layout_destroy(d->result);
  if (d->second) lt->layout_destroy(d->second);
  if (d->first) lt->layout_destroy(d->first);
  if (d->product) lt->desc_destroy(d->product);
}

/* Leaves in `d` what it made, also when it fails. */
static cublasStatus_t make_descriptors(const lt_functions* lt, const flce_gemm* g, bool tf32,
                                       gemm_descriptors* d) {
  const cudaDataType_t type = data_type(g->dtype), c_type = data_type(g->c_dtype);
  const cudaDataType_t scale = g->dtype == FLCE_F64 ? CUDA_R_64F : CUDA_R_32F;
  const cublasOperation_t transpose = CUBLAS_OP_T;
  cublasStatus_t status = lt->desc_create(&d->product, compute_type(g->dtype, tf32), scale);
  if (status == CUBLAS_STATUS_SUCCESS && g->transpose_b) {
    status = lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_TRANSA, &transpose, sizeof(transpose));
  }
  if (status == CUBLAS_STATUS_SUCCESS && g->transpose_a) {
    status = lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_TRANSB, &transpose, sizeof(transpose));
  }
  if (status == CUBLAS_STATUS_SUCCESS && g->bias) {
    /* Along the library's rows, which are our columns. */
    const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
    status = lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue, sizeof(epilogue));
    if (status == CUBLAS_STATUS_SUCCESS) {
      status =
          lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof(g->bias));
    }
  }
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt->layout_create(&d->first, type, g->transpose_b ? g->k : g->n,
                               g->transpose_b ? g->n : g->k, g->pitch_b);
  }
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt->layout_create(&d->second, type, g->transpose_a ? g->m : g->k,
                               g->transpose_a ? g->k : g->m, g->pitch_a);
  }
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt->layout_create(&d->result, c_type, g->n, g->m, g->pitch_c);
  }
  return status;
}

static cublasStatus_t set_preferences(const lt_functions* lt, const gemm_key* key,
                                      cublasLtMatmulPreference_t preference) {
  const uint64_t workspace = (uint64_t)key->workspace_bytes;
  /* 16-bit partial sums of a split product would be rounded once per split. */
  uint32_t schemes = CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE;
  if (key->c_dtype == FLCE_F32 || key->c_dtype == FLCE_F64) {
    schemes |= CUBLASLT_REDUCTION_SCHEME_INPLACE;
  }
  const uint32_t align_a = key->align_a, align_b = key->align_b, align_c = key->align_c;
  const uint32_t align_d = key->align_d;
  const struct {
    cublasLtMatmulPreferenceAttributes_t attribute;
    const void* value;
    size_t size;
  } settings[] = {
      {CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, &workspace, sizeof(workspace)},
      {CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, &schemes, sizeof(schemes)},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, &align_b, sizeof(align_b)},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, &align_a, sizeof(align_a)},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, &align_c, sizeof(align_c)},
      {CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, &align_d, sizeof(align_d)},
  };
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++) {
    if (status != CUBLAS_STATUS_SUCCESS) break;
    status =
        lt->preference_set(preference, settings[i].attribute, settings[i].value, settings[i].size);
  }
  return status;
}

static cublasStatus_t ask_heuristic(const lt_functions* lt, cublasLtHandle_t handle,
                                    const gemm_key* key, const gemm_descriptors* d,
                                    cublasLtMatmulAlgo_t* algo) {
  enum { kCandidates = 8 };
  cublasLtMatmulPreference_t preference = NULL;
  cublasLtMatmulHeuristicResult_t results[kCandidates];
  int found = 0;
  cublasStatus_t status = lt->preference_create(&preference);
  if (status == CUBLAS_STATUS_SUCCESS) status = set_preferences(lt, key, preference);
  if (status == CUBLAS_STATUS_SUCCESS) {
    status = lt->heuristic(handle, d->product, d->first, d->second, d->result, d->result,
                           preference, kCandidates, results, &found);
  }
  if (preference) lt->preference_destroy(preference);
  if (status != CUBLAS_STATUS_SUCCESS) return status;
  for (int i = 0; i < found; i++) {
    if (results[i].state != CUBLAS_STATUS_SUCCESS) continue;
    if ((int64_t)results[i].workspaceSize > key->workspace_bytes) continue;
    *algo = results[i].algo;
    return CUBLAS_STATUS_SUCCESS;
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

static int32_t alignment_of(const void* p) {
  const uintptr_t lowest = (uintptr_t)p & (~(uintptr_t)p + 1);
  return lowest == 0 || lowest > kMaxAlignment ? kMaxAlignment : (int32_t)lowest;
}

static gemm_key key_of(const flce_cuda* cuda, const flce_gemm* g, int64_t workspace_bytes) {
  gemm_key key;
  key.m = g->m;
  key.n = g->n;
  key.k = g->k;
  key.pitch_a = g->pitch_a;
  key.pitch_b = g->pitch_b;
  key.pitch_c = g->pitch_c;
  key.workspace_bytes = workspace_bytes;
  key.device = cuda->device;
  key.dtype = g->dtype;
  key.c_dtype = g->c_dtype;
  key.align_a = alignment_of(g->a);
  key.align_b = alignment_of(g->b);
  key.align_c = alignment_of(g->c);
  /* The bias has no attribute of its own: the result's stands for what is read beside it too. */
  key.align_d = g->bias ? (int32_t)min_of(key.align_c, alignment_of(g->bias)) : key.align_c;
  key.transpose_a = g->transpose_a;
  key.transpose_b = g->transpose_b;
  key.accumulate = g->beta != 0;
  key.bias = g->bias != NULL;
  key.tf32 = cuda->allow_tf32;
  return key;
}

/* The library's functions, the device's handle, and whether `algo` was known. The lock is not held
 * over the heuristic: two threads may both ask, and agree. */
static flce_status look_up(const gemm_key* key, lt_functions* lt, cublasLtHandle_t* handle,
                           cublasLtMatmulAlgo_t* algo, bool* known) {
  pthread_mutex_lock(&g_lock);
  const flce_status status = load_handle(key->device);
  if (status == FLCE_OK) {
    const gemm_slot* slot = slot_of(key);
    *lt = g_lt;
    *handle = g_handles[key->device];
    *known = slot->used && memcmp(&slot->key, key, sizeof(*key)) == 0;
    if (*known) *algo = slot->algo;
  }
  pthread_mutex_unlock(&g_lock);
  return status;
}

static void remember(const gemm_key* key, const cublasLtMatmulAlgo_t* algo) {
  pthread_mutex_lock(&g_lock);
  gemm_slot* slot = slot_of(key);
  slot->key = *key;
  slot->algo = *algo;
  slot->used = true;
  pthread_mutex_unlock(&g_lock);
}

static flce_status check_types(const flce_gemm* g) {
  const bool narrow = g->dtype == FLCE_BF16 || g->dtype == FLCE_F16;
  if (g->c_dtype == g->dtype || (narrow && g->c_dtype == FLCE_F32)) return FLCE_OK;
  return flce_fail(FLCE_UNSUPPORTED, "gemm: no product of %s operands into %s",
                   flce_dtype_name(g->dtype), flce_dtype_name(g->c_dtype));
}

flce_status cuda_gemm(void* self, const flce_gemm* g, void* workspace, int64_t workspace_bytes) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  FLCE_TRY(check_types(g));
  if (g->m == 0 || g->n == 0) return FLCE_OK;
  if (g->k == 0) {
    if (g->beta != 0) return FLCE_OK;
    const int64_t size = flce_size_of(g->c_dtype);
    return check_cuda(cudaMemset2DAsync(g->c, g->pitch_c * size, 0, g->n * size, g->m,
                                        (cudaStream_t)cuda->stream),
                      "gemm with k = 0");
  }
  const gemm_key key = key_of(cuda, g, workspace_bytes);
  lt_functions lt;
  cublasLtHandle_t handle;
  cublasLtMatmulAlgo_t algo;
  bool known = false;
  FLCE_TRY(look_up(&key, &lt, &handle, &algo, &known));

  gemm_descriptors d = {NULL, NULL, NULL, NULL};
  const char* call = "cuBLASLt descriptors";
  cublasStatus_t status = make_descriptors(&lt, g, cuda->allow_tf32, &d);
  if (status == CUBLAS_STATUS_SUCCESS && !known) {
    call = "cublasLtMatmulAlgoGetHeuristic";
    status = ask_heuristic(&lt, handle, &key, &d, &algo);
    if (status == CUBLAS_STATUS_SUCCESS) remember(&key, &algo);
  }
  if (status == CUBLAS_STATUS_SUCCESS) {
    const float one_f32 = 1, beta_f32 = (float)g->beta;
    const double one_f64 = 1, beta_f64 = g->beta;
    const bool wide = g->dtype == FLCE_F64;
    call = "cublasLtMatmul";
    status =
        lt.matmul(handle, d.product, wide ? (const void*)&one_f64 : &one_f32, g->b, d.first, g->a,
                  d.second, wide ? (const void*)&beta_f64 : &beta_f32, g->c, d.result, g->c,
                  d.result, &algo, workspace, (size_t)workspace_bytes, (cudaStream_t)cuda->stream);
  }
  destroy_descriptors(&lt, &d);
  return status == CUBLAS_STATUS_SUCCESS ? FLCE_OK : refused(g, call, status);
}

size_t cuda_gemm_version(void) {
  pthread_mutex_lock(&g_lock);
  const size_t version = load_functions() == FLCE_OK ? g_lt.version() : 0;
  pthread_mutex_unlock(&g_lock);
  return version;
}
