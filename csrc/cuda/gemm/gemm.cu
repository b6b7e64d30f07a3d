/* The gemm function of the CUDA backend: splits ragged sizes, finds the cached algorithm and
 * descriptors of a GEMM, and launches it. The choice of an algorithm is in heuristics.cu. */
#include "cuda/gemm/gemm.cuh"

#include <pthread.h>

/* An entry of the cache: the algorithm and the descriptors of the GEMMs with one key. */
typedef struct gemm_slot {
  bool used;                 /* key and algo are valid */
  gemm_key key;              /* of the entry */
  cublasLtMatmulAlgo_t algo; /* chosen for the key */
  gemm_descriptors d;        /* {} while a call owns them, see take() */
} gemm_slot;

/* The algorithm and descriptors of a running call, from the cache or newly made. The call owns
 * them. */
typedef struct prepared_gemm {
  bool known;                /* algo came from the cache */
  cublasLtMatmulAlgo_t algo; /* valid if known, or after choose_algorithm */
  gemm_descriptors d;        /* {} if none were cached */
} prepared_gemm;

enum { kSlots = 1024, kProbes = 4, kMaxAlignment = 256 };

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER; /* guards g_slots */
static gemm_slot g_slots[kSlots];

static bool equal(const gemm_key* a, const gemm_key* b) {
  return memcmp(a, b, sizeof(*a)) == 0;
}

/* The slot of the key, else a free one, else one to evict. Eviction only costs another call of the
 * heuristic. The caller holds g_lock. */
static gemm_slot* slot_of(const gemm_key* key) {
  int64_t numbers[kKeyNumbers];
  memcpy(numbers, key, sizeof(numbers));
  uint64_t hash = 14695981039346656037u;
  for (int i = 0; i < kKeyNumbers; i++) {
    hash = (hash ^ (uint64_t)numbers[i]) * 1099511628211u;
    hash ^= hash >> 29;
  }
  gemm_slot* first_free = NULL;
  for (int i = 0; i < kProbes; i++) {
    gemm_slot* slot = &g_slots[(hash + i) % kSlots];
    if (slot->used && equal(&slot->key, key)) return slot;
    if (!slot->used && !first_free) first_free = slot;
  }
  return first_free ? first_free : &g_slots[hash % kSlots];
}

/* Moves the descriptors from the slot to the call, because launch_gemm sets the bias address in
 * them: two threads must not share them. A second thread finds none and makes its own. */
static void take(const gemm_key* key, prepared_gemm* p) {
  pthread_mutex_lock(&g_lock);
  gemm_slot* slot = slot_of(key);
  p->known = slot->used && equal(&slot->key, key);
  if (p->known) {
    p->algo = slot->algo;
    p->d = slot->d;
    slot->d = {};
  }
  pthread_mutex_unlock(&g_lock);
}

/* Moves the call's algorithm and descriptors to the slot. Leaves in p->d what the caller has to
 * destroy: nothing, the descriptors of an evicted entry, or the call's own, if another thread has
 * filled the slot meanwhile. */
static void give_back(const gemm_key* key, prepared_gemm* p) {
  pthread_mutex_lock(&g_lock);
  gemm_slot* slot = slot_of(key);
  const bool own = slot->used && equal(&slot->key, key);
  const bool taken = own && slot->d.product; /* another thread has given descriptors back */
  if (!taken) {
    const gemm_descriptors lost = slot->d;
    slot->used = true;
    slot->key = *key;
    slot->algo = p->algo;
    slot->d = p->d;
    p->d = lost;
  }
  pthread_mutex_unlock(&g_lock);
}

/* ---- a GEMM ---- */

static int64_t alignment_of(const void* p) {
  const uintptr_t lowest = (uintptr_t)p & (~(uintptr_t)p + 1);
  return lowest == 0 || lowest > kMaxAlignment ? kMaxAlignment : (int64_t)lowest;
}

static gemm_key gemm_key_of(const flce_cuda* cuda, const flce_gemm* g, int64_t workspace_bytes) {
  gemm_key key;
  key.m = g->m;
  key.n = g->n;
  key.k = g->k;
  key.pitch_a = g->pitch_a;
  key.pitch_b = g->pitch_b;
  key.pitch_c = g->pitch_c;
  key.workspace_bytes = workspace_bytes;
  key.dtype = g->dtype;
  key.c_dtype = g->c_dtype;
  key.align_a = alignment_of(g->a);
  key.align_b = alignment_of(g->b);
  key.align_c = alignment_of(g->c);
  /* cuBLASLt has no alignment attribute for the bias, so align_d (of D) covers both. */
  key.align_d = g->bias ? min_of(key.align_c, alignment_of(g->bias)) : key.align_c;
  key.transpose_a = g->transpose_a;
  key.transpose_b = g->transpose_b;
  key.accumulate = g->beta != 0;
  key.tf32 = cuda->allow_tf32;
  key.bias = g->bias != NULL;
  key.factors = g->factors != NULL;
  key.device = cuda->device;
  return key;
}

static flce_status gemm_refused(const gemm_key* key, const char* call, cublasStatus_t status) {
  cudaGetLastError();
  return flce_fail(
      FLCE_GEMM_FAILED, "%s: status %d for [%lld,%lld] = [%lld,%lld] x [%lld,%lld], %s to %s", call,
      (int)status, (long long)key->m, (long long)key->n, (long long)key->m, (long long)key->k,
      (long long)key->k, (long long)key->n, flce_dtype_name((flce_dtype)key->dtype),
      flce_dtype_name((flce_dtype)key->c_dtype));
}

/* Queues the GEMM. No other thread may use the descriptors meanwhile, because the bias address is
 * set in them. */
static cublasStatus_t launch_gemm(const gemm_device* device, const flce_cuda* cuda,
                                  const flce_gemm* g, const gemm_descriptors* d,
                                  const cublasLtMatmulAlgo_t* algo, void* workspace,
                                  int64_t workspace_bytes) {
  const lt_functions* lt = &device->lt;
  const double alpha_f64 = ldexp(1, g->shift), beta_f64 = g->beta;
  const float alpha_f32 = (float)alpha_f64, beta_f32 = (float)beta_f64;
  const bool wide = g->dtype == FLCE_F64;
  if (g->bias) {
    const cublasStatus_t status =
        lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof(g->bias));
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  const void* alpha = wide ? (const void*)&alpha_f64 : &alpha_f32;
  const void* beta = wide ? (const void*)&beta_f64 : &beta_f32;
  if (g->factors) {
    alpha = g->factors;
    beta = g->factors + (g->beta != 0 ? 2 : 1);
  }
  return lt->matmul(device->handle, d->product, alpha, g->b, d->first, g->a, d->second, beta, g->c,
                    d->result, g->c, d->result, algo, workspace, (size_t)workspace_bytes,
                    (cudaStream_t)cuda->stream);
}

static flce_status check_types(const flce_gemm* g) {
  const bool narrow = g->dtype == FLCE_BF16 || g->dtype == FLCE_F16;
  if (g->c_dtype == g->dtype || (narrow && g->c_dtype == FLCE_F32)) return FLCE_OK;
  return flce_fail(FLCE_UNSUPPORTED, "gemm: no product of %s operands into %s",
                   flce_dtype_name(g->dtype), flce_dtype_name(g->c_dtype));
}

static flce_status run_gemm(const flce_cuda* cuda, const flce_gemm* g, void* workspace,
                            int64_t workspace_bytes) {
  if (g->k == 0) {
    if (g->beta != 0) return FLCE_OK;
    const int64_t size = flce_size_of(g->c_dtype);
    return check_cuda(cudaMemset2DAsync(g->c, g->pitch_c * size, 0, g->n * size, g->m,
                                        (cudaStream_t)cuda->stream),
                      "gemm with k = 0");
  }
  const gemm_device* device;
  FLCE_TRY(open_gemm_device(cuda->device, &device));
  const gemm_key key = gemm_key_of(cuda, g, workspace_bytes);
  prepared_gemm p = {};
  take(&key, &p);
  const char* call = "cuBLASLt descriptors";
  cublasStatus_t status = CUBLAS_STATUS_SUCCESS;
  if (!p.d.product) status = make_descriptors(device, &key, &p.d);
  if (status == CUBLAS_STATUS_SUCCESS && !p.known) {
    call = "cublasLtMatmulAlgoGetHeuristic";
    status = choose_algorithm(device, &key, &p.d, &p.algo);
  }
  if (status == CUBLAS_STATUS_SUCCESS) {
    call = "cublasLtMatmul";
    status = launch_gemm(device, cuda, g, &p.d, &p.algo, workspace, workspace_bytes);
  }
  if (status == CUBLAS_STATUS_SUCCESS) give_back(&key, &p);
  destroy_descriptors(device, &p.d);
  return status == CUBLAS_STATUS_SUCCESS ? FLCE_OK : gemm_refused(&key, call, status);
}

/* ---- ragged sizes ---- */

/* cuBLASLt's fast kernels need the contiguous dimension of each operand and of the result to be a
 * multiple of 16 bytes, in addition to aligned pointers and leading dimensions (cuBLAS
 * documentation, 2.1.11, Tensor Core Usage). Its other kernels take up to six times as long
 * (benchmarks/NOTES.md, 2026-11-22, ragged sizes). So a GEMM with a ragged dimension is split into
 * the GEMM of its aligned part and a small GEMM of the remainder. */
enum { kFastBytes = 16 };

/* The least multiply-adds of a GEMM that is split: 25 us at the full rate of an H200. In smaller
 * ones the slow kernel loses about as much as the second launch costs. */
static const double kLeastToSplit = 0x1p33;

static bool is_worth_splitting(const flce_cuda* cuda, const flce_gemm* g) {
  const bool tensor_cores =
      flce_size_of(g->dtype) == 2 || (g->dtype == FLCE_F32 && cuda->allow_tf32);
  return tensor_cores && (double)g->m * (double)g->n * (double)g->k >= kLeastToSplit;
}

/* The elements of a row of `size` elements beyond the last multiple of 16 bytes. 0 if the rows do
 * not start at multiples of 16 bytes, because no part would be aligned then. */
static int64_t rest_of(int64_t size, const void* data, int64_t pitch, flce_dtype dtype) {
  const int64_t bytes = flce_size_of(dtype), unit = kFastBytes / bytes;
  if (size <= unit || !is_aligned(data, kFastBytes) || pitch * bytes % kFastBytes != 0) return 0;
  return size % unit;
}

/* The address of element `elements` of `data`; NULL stays NULL. */
static const void* elements_on(const void* data, int64_t elements, flce_dtype dtype) {
  return data ? (const char*)data + elements * flce_size_of(dtype) : NULL;
}

/* The GEMM of the first m - rest rows of the result, or, if `last`, of the other `rest`. */
static flce_gemm part_of_rows(const flce_gemm* g, int64_t rest, bool last) {
  flce_gemm part = *g;
  const int64_t first = g->m - rest;
  part.m = last ? rest : first;
  if (!last) return part;
  part.a = elements_on(g->a, g->transpose_a ? first : first * g->pitch_a, g->dtype);
  part.c = (void*)elements_on(g->c, first * g->pitch_c, g->c_dtype);
  return part;
}

/* The GEMM of the first n - rest columns of the result, or, if `last`, of the other `rest`. */
static flce_gemm part_of_columns(const flce_gemm* g, int64_t rest, bool last) {
  flce_gemm part = *g;
  const int64_t first = g->n - rest;
  part.n = last ? rest : first;
  if (!last) return part;
  part.b = elements_on(g->b, g->transpose_b ? first * g->pitch_b : first, g->dtype);
  part.c = (void*)elements_on(g->c, first, g->c_dtype);
  part.bias = elements_on(g->bias, first, g->c_dtype);
  return part;
}

/* If `last`, the GEMM over the last `rest` of k, else over the others, with beta = 1. The last part
 * runs first, so that the smaller part is the one that is rounded twice. */
static flce_gemm part_of_k(const flce_gemm* g, int64_t rest, bool last) {
  flce_gemm part = *g;
  const int64_t first = g->k - rest;
  part.k = last ? rest : first;
  if (!last) {
    part.beta = 1;
    return part;
  }
  part.a = elements_on(g->a, g->transpose_a ? first * g->pitch_a : first, g->dtype);
  part.b = elements_on(g->b, g->transpose_b ? first : first * g->pitch_b, g->dtype);
  part.bias = NULL;
  return part;
}

typedef flce_gemm (*gemm_part)(const flce_gemm* g, int64_t rest, bool last);

/* The function that splits the GEMM, and the size of the last part in *rest; NULL if no dimension
 * is ragged. cuda_gemm splits the first part again, if another dimension of it is ragged. */
static gemm_part split_of(const flce_gemm* g, int64_t* rest) {
  *rest = g->transpose_a ? rest_of(g->m, g->a, g->pitch_a, g->dtype) : 0;
  if (*rest > 0) return part_of_rows;
  *rest = g->transpose_b ? 0 : rest_of(g->n, g->b, g->pitch_b, g->dtype);
  if (*rest == 0) *rest = rest_of(g->n, g->c, g->pitch_c, g->c_dtype);
  if (*rest > 0) return part_of_columns;
  *rest = g->transpose_a ? 0 : rest_of(g->k, g->a, g->pitch_a, g->dtype);
  if (*rest == 0 && g->transpose_b) *rest = rest_of(g->k, g->b, g->pitch_b, g->dtype);
  return *rest > 0 ? part_of_k : NULL;
}

flce_status cuda_gemm(void* self, const flce_gemm* g, void* workspace, int64_t workspace_bytes) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  FLCE_TRY(check_types(g));
  if (g->m == 0 || g->n == 0) return FLCE_OK;
  int64_t rest = 0;
  const gemm_part split = is_worth_splitting(cuda, g) ? split_of(g, &rest) : NULL;
  if (!split) return run_gemm(cuda, g, workspace, workspace_bytes);
  const flce_gemm last = split(g, rest, true), first = split(g, rest, false);
  FLCE_TRY(run_gemm(cuda, &last, workspace, workspace_bytes));
  return cuda_gemm(self, &first, workspace, workspace_bytes);
}
