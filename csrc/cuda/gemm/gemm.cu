/* Runs a product: looks up what was prepared for one of its kind, and queues it. */
#include "cuda/gemm/gemm.cuh"

#include <pthread.h>

/* What a product of one key needs beside its pointers. */
typedef struct gemm_slot {
  bool used;
  gemm_key key;
  cublasLtMatmulAlgo_t algo;
  gemm_descriptors d; /* {} while a call has them */
} gemm_slot;

/* A call's own, taken from a slot or made. */
typedef struct prepared_gemm {
  bool known; /* the algorithm is */
  cublasLtMatmulAlgo_t algo;
  gemm_descriptors d;
  int64_t generation; /* of the slots when it was taken */
} prepared_gemm;

enum { kSlots = 1024, kProbes = 4, kMaxAlignment = 256, kRecorded = 256 };

static pthread_mutex_t g_lock = PTHREAD_MUTEX_INITIALIZER; /* guards all below */
static gemm_slot g_slots[kSlots];
static int64_t g_generation; /* moves on when every choice is to be made anew */
static bool g_recording;
static gemm_key g_recorded[kRecorded];
static int g_recorded_count;

static bool equal(const gemm_key* a, const gemm_key* b) {
  return memcmp(a, b, sizeof(*a)) == 0;
}

/* ---- slots: every function with g_lock held ---- */

/* The key's own slot, else a free one, else the one to give up: a lost slot only costs asking the
 * heuristic again. */
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

static void record(const gemm_key* key) {
  for (int i = 0; i < g_recorded_count; i++) {
    if (equal(&g_recorded[i], key)) return;
  }
  if (g_recorded_count < kRecorded) g_recorded[g_recorded_count++] = *key;
}

/* ---- what a call takes and gives back ---- */

/* Descriptors change owner, so no two calls ever set the bias of the same ones: a second thread
 * that finds none makes its own. */
static void take(const gemm_key* key, prepared_gemm* p) {
  pthread_mutex_lock(&g_lock);
  if (g_recording) record(key);
  p->generation = g_generation;
  gemm_slot* slot = slot_of(key);
  p->known = slot->used && equal(&slot->key, key);
  if (p->known) {
    p->algo = slot->algo;
    p->d = slot->d;
    slot->d = {};
  }
  pthread_mutex_unlock(&g_lock);
}

/* Leaves in p->d what nobody wants: nothing, another product's descriptors, or p's own. */
static void give_back(const gemm_key* key, prepared_gemm* p) {
  pthread_mutex_lock(&g_lock);
  gemm_slot* slot = slot_of(key);
  const bool own = slot->used && equal(&slot->key, key);
  const bool taken = own && slot->d.product; /* by another thread, meanwhile */
  if (p->generation == g_generation && !taken) {
    const gemm_descriptors lost = slot->d;
    slot->used = true;
    slot->key = *key;
    slot->algo = p->algo;
    slot->d = p->d;
    p->d = lost;
  }
  pthread_mutex_unlock(&g_lock);
}

void forget_gemm_slots(void) {
  pthread_mutex_lock(&g_lock);
  g_generation++;
  for (int i = 0; i < kSlots; i++)
    g_slots[i].used = false; /* its descriptors go when it is reused */
  pthread_mutex_unlock(&g_lock);
}

void record_gemms(bool on) {
  pthread_mutex_lock(&g_lock);
  g_recording = on;
  if (on) g_recorded_count = 0;
  pthread_mutex_unlock(&g_lock);
}

int recorded_gemms(gemm_key* keys, int size) {
  pthread_mutex_lock(&g_lock);
  const int count = g_recorded_count;
  memcpy(keys, g_recorded, (size_t)min_of(count, size) * sizeof(*keys));
  pthread_mutex_unlock(&g_lock);
  return count;
}

/* ---- a product ---- */

static int64_t alignment_of(const void* p) {
  const uintptr_t lowest = (uintptr_t)p & (~(uintptr_t)p + 1);
  return lowest == 0 || lowest > kMaxAlignment ? kMaxAlignment : (int64_t)lowest;
}

gemm_key gemm_key_of(const flce_cuda* cuda, const flce_gemm* g, int64_t workspace_bytes) {
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
  /* The bias has no attribute of its own: the result's stands for what is read beside it too. */
  key.align_d = g->bias ? min_of(key.align_c, alignment_of(g->bias)) : key.align_c;
  key.transpose_a = g->transpose_a;
  key.transpose_b = g->transpose_b;
  key.accumulate = g->beta != 0;
  key.tf32 = cuda->allow_tf32;
  key.bias = g->bias != NULL;
  key.device = cuda->device;
  return key;
}

flce_status gemm_refused(const gemm_key* key, const char* call, cublasStatus_t status) {
  cudaGetLastError();
  return flce_fail(
      FLCE_GEMM_FAILED, "%s: status %d for [%lld,%lld] = [%lld,%lld] x [%lld,%lld], %s to %s", call,
      (int)status, (long long)key->m, (long long)key->n, (long long)key->m, (long long)key->k,
      (long long)key->k, (long long)key->n, flce_dtype_name((flce_dtype)key->dtype),
      flce_dtype_name((flce_dtype)key->c_dtype));
}

cublasStatus_t launch_gemm(const gemm_device* device, const flce_cuda* cuda, const flce_gemm* g,
                           const gemm_descriptors* d, const cublasLtMatmulAlgo_t* algo,
                           void* workspace, int64_t workspace_bytes) {
  const lt_functions* lt = &device->lt;
  const double alpha_f64 = ldexp(1, g->shift), beta_f64 = g->beta;
  const float alpha_f32 = (float)alpha_f64, beta_f32 = (float)beta_f64;
  const bool wide = g->dtype == FLCE_F64;
  if (g->bias) {
    const cublasStatus_t status =
        lt->desc_set(d->product, CUBLASLT_MATMUL_DESC_BIAS_POINTER, &g->bias, sizeof(g->bias));
    if (status != CUBLAS_STATUS_SUCCESS) return status;
  }
  return lt->matmul(device->handle, d->product, wide ? (const void*)&alpha_f64 : &alpha_f32, g->b,
                    d->first, g->a, d->second, wide ? (const void*)&beta_f64 : &beta_f32, g->c,
                    d->result, g->c, d->result, algo, workspace, (size_t)workspace_bytes,
                    (cudaStream_t)cuda->stream);
}

static cublasStatus_t choose_algorithm(const gemm_device* device, const gemm_key* key,
                                       prepared_gemm* p) {
  gemm_candidates found;
  const cublasStatus_t status = list_candidates(device, key, &p->d, &found);
  if (status == CUBLAS_STATUS_SUCCESS) p->algo = found.list[choice(device, key, &found)].algo;
  return status;
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
    status = choose_algorithm(device, &key, &p);
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
 * documentation, 2.1.11, Tensor Core Usage); others take up to six times as long
 * (benchmarks/NOTES.md, 2026-11-22, ragged sizes). A dimension that is not is split into its
 * aligned part and a small GEMM of the remainder. */
enum { kFastBytes = 16 };

/* Multiply-adds from which on a GEMM is split, 25 us at the fast rate of an H200: below, what the
 * slow kernel loses is near what the second launch takes. */
static const double kLeastToSplit = 0x1p33;

static bool is_worth_splitting(const flce_cuda* cuda, const flce_gemm* g) {
  const bool tensor_cores =
      flce_size_of(g->dtype) == 2 || (g->dtype == FLCE_F32 && cuda->allow_tf32);
  return tensor_cores && (double)g->m * (double)g->n * (double)g->k >= kLeastToSplit;
}

/* Elements of a row of `size` behind the last whole 16 bytes; 0 where rows do not begin at
 * multiples of 16 bytes: no part would be aligned. */
static int64_t rest_of(int64_t size, const void* data, int64_t pitch, flce_dtype dtype) {
  const int64_t bytes = flce_size_of(dtype), unit = kFastBytes / bytes;
  if (size <= unit || !is_aligned(data, kFastBytes) || pitch * bytes % kFastBytes != 0) return 0;
  return size % unit;
}

static const void* elements_on(const void* data, int64_t elements, flce_dtype dtype) {
  return data ? (const char*)data + elements * flce_size_of(dtype) : NULL;
}

/* The first m - rest rows of the result, or the last. */
static flce_gemm part_of_rows(const flce_gemm* g, int64_t rest, bool last) {
  flce_gemm part = *g;
  const int64_t first = g->m - rest;
  part.m = last ? rest : first;
  if (!last) return part;
  part.a = elements_on(g->a, g->transpose_a ? first : first * g->pitch_a, g->dtype);
  part.c = (void*)elements_on(g->c, first * g->pitch_c, g->c_dtype);
  return part;
}

/* The first n - rest columns of the result, or the last. */
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

/* The sum over the last `rest` of k, or over the others, which is added to it: so the smaller part
 * is what is rounded twice. */
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

/* The dimension to split and the size of its last part; NULL where the GEMM is fast as it is. */
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
