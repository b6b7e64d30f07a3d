/* The table of tuning.h, for benchmarks/tune.py: which GEMMs ran, their candidate algorithms, the
 * time of a candidate, tuned choices. Nothing of this file runs in a call. */
#include "cuda/gemm/gemm.cuh"

#include <stdarg.h>
#include <stdio.h>

/* ---- text ---- */

/* A text that is written piece by piece, as by snprintf. */
typedef struct writer {
  char* text;
  int64_t size, /* bytes of `text` */
      used;     /* length of the whole text, also of what did not fit */
} writer;

static void append(writer* w, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const bool room = w->used < w->size;
  const int written = vsnprintf(room ? w->text + w->used : NULL,
                                room ? (size_t)(w->size - w->used) : 0, format, arguments);
  va_end(arguments);
  if (written > 0) w->used += written;
}

static void append_numbers(writer* w, const void* values, int count) {
  int64_t numbers[kKeyNumbers];
  memcpy(numbers, values, (size_t)count * sizeof(int64_t));
  for (int i = 0; i < count; i++) append(w, "%lld ", (long long)numbers[i]);
}

static flce_status read_product(const char* text, const flce_cuda* cuda, const gemm_device* device,
                                gemm_key* key) {
  int64_t numbers[1 + kProductNumbers];
  *key = {};
  if (!read_numbers(&text, numbers, 1 + kProductNumbers) || numbers[0] != device->library_version ||
      strcmp(text, device->gpu) != 0) {
    return flce_fail(FLCE_INVALID_ARGUMENT,
                     "product: expected %d numbers for cuBLASLt %lld, and the name %s",
                     1 + kProductNumbers, (long long)device->library_version, device->gpu);
  }
  memcpy(key, numbers + 1, kProductNumbers * sizeof(int64_t));
  key->factors = 0;
  key->device = cuda->device;
  const int64_t sizes[] = {key->m, key->n, key->k, key->pitch_a, key->pitch_b, key->pitch_c};
  bool fits =
      key->dtype >= 0 && key->dtype <= FLCE_F16 && key->c_dtype >= 0 && key->c_dtype <= FLCE_F16;
  for (const int64_t size : sizes) fits &= size >= 1 && size <= INT32_MAX;
  if (fits) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "product: expected sizes of 1 to %d and dtypes of 0 to %d", INT32_MAX, FLCE_F16);
}

/* Whether `bytes` bytes hold a matrix as it is stored. */
static bool holds(int64_t bytes, int64_t rows, int64_t cols, int64_t pitch, int64_t dtype) {
  const int64_t elements = (rows - 1) * pitch + cols;
  return pitch >= cols && elements * flce_size_of((flce_dtype)dtype) <= bytes;
}

static bool hold_product(const gemm_key* key, const flce_gemm_operands* given) {
  const bool ta = key->transpose_a != 0, tb = key->transpose_b != 0;
  return holds(given->a_bytes, ta ? key->k : key->m, ta ? key->m : key->k, key->pitch_a,
               key->dtype) &&
         holds(given->b_bytes, tb ? key->n : key->k, tb ? key->k : key->n, key->pitch_b,
               key->dtype) &&
         holds(given->c_bytes, key->m, key->n, key->pitch_c, key->c_dtype) &&
         (!key->bias || (given->bias && holds(given->bias_bytes, 1, key->n, key->n, key->c_dtype)));
}

/* ---- recorded GEMMs and candidates ---- */

static flce_status write_recorded(const flce_cuda* cuda, char* text, int64_t size, int64_t* used) {
  enum { kMost = 256 };
  gemm_key keys[kMost];
  const gemm_device* device;
  FLCE_TRY(open_gemm_device(cuda->device, &device));
  const int count = (int)min_of(recorded_gemms(keys, kMost), kMost);
  writer w = {text, size, 0};
  for (int i = 0; i < count; i++) {
    if (keys[i].device != cuda->device) continue;
    append_numbers(&w, &device->library_version, 1);
    append_numbers(&w, &keys[i], kProductNumbers);
    append(&w, "%s\n", device->gpu);
  }
  *used = w.used;
  return FLCE_OK;
}

/* Makes the descriptors and lists the candidates of a GEMM. The caller destroys `d`, also if this
 * fails. */
static flce_status open_product(const gemm_device* device, const gemm_key* key, gemm_descriptors* d,
                                gemm_candidates* found) {
  const char* call = "cuBLASLt descriptors";
  cublasStatus_t status = make_descriptors(device, key, d);
  if (status == CUBLAS_STATUS_SUCCESS) {
    call = "cublasLtMatmulAlgoGetHeuristic";
    status = list_candidates(device, key, d, found);
  }
  return status == CUBLAS_STATUS_SUCCESS ? FLCE_OK : gemm_refused(key, call, status);
}

static flce_status write_candidates(const flce_cuda* cuda, const char* product, char* text,
                                    int64_t size, int64_t* used) {
  const gemm_device* device;
  gemm_key key;
  FLCE_TRY(open_gemm_device(cuda->device, &device));
  FLCE_TRY(read_product(product, cuda, device, &key));
  gemm_descriptors d = {};
  gemm_candidates found;
  const flce_status status = open_product(device, &key, &d, &found);
  destroy_descriptors(device, &d);
  FLCE_TRY(status);
  writer w = {text, size, 0};
  append(&w, "%d %d\n", shipped_choice(device, &key, &found), choice(device, &key, &found));
  for (int i = 0; i < found.count; i++) {
    append_numbers(&w, &found.list[i].algorithm, kAlgorithmNumbers);
    append(&w, "%lld\n", (long long)found.list[i].workspace_bytes);
  }
  *used = w.used;
  return FLCE_OK;
}

/* ---- time ---- */

/* The milliseconds of one GEMM, from CUDA events around `repeats` launches. Synchronizes. */
static flce_status time_launches(const gemm_device* device, const flce_cuda* cuda,
                                 const flce_gemm* g, const gemm_descriptors* d,
                                 const cublasLtMatmulAlgo_t* algo, void* workspace,
                                 const gemm_key* key, int64_t repeats, double* milliseconds) {
  const cudaStream_t stream = (cudaStream_t)cuda->stream;
  cudaEvent_t start = NULL, stop = NULL;
  float elapsed = 0;
  cublasStatus_t launched = CUBLAS_STATUS_SUCCESS;
  cudaError_t error = cudaEventCreate(&start);
  if (error == cudaSuccess) error = cudaEventCreate(&stop);
  if (error == cudaSuccess) error = cudaEventRecord(start, stream);
  for (int64_t i = 0; i < repeats && error == cudaSuccess; i++) {
    if (launched != CUBLAS_STATUS_SUCCESS) break;
    launched = launch_gemm(device, cuda, g, d, algo, workspace, key->workspace_bytes);
  }
  if (error == cudaSuccess) error = cudaEventRecord(stop, stream);
  if (error == cudaSuccess) error = cudaEventSynchronize(stop);
  if (error == cudaSuccess) error = cudaEventElapsedTime(&elapsed, start, stop);
  if (stop) cudaEventDestroy(stop);
  if (start) cudaEventDestroy(start);
  FLCE_TRY(check_cuda(error, "timing a product"));
  if (launched != CUBLAS_STATUS_SUCCESS) return gemm_refused(key, "cublasLtMatmul", launched);
  *milliseconds = (double)elapsed / (double)repeats;
  return FLCE_OK;
}

/* Fills `g` from the key and the pointers of `given`. FLCE_INVALID_ARGUMENT if these have other
 * alignments, bias or workspace than the key, or less memory than it needs. */
static flce_status bind_product(const flce_cuda* cuda, const gemm_key* key,
                                const flce_gemm_operands* given, flce_gemm* g) {
  if (!hold_product(key, given)) {
    return flce_fail(FLCE_INVALID_ARGUMENT, "operands: expected the sizes of the product");
  }
  g->m = key->m;
  g->n = key->n;
  g->k = key->k;
  g->transpose_a = key->transpose_a != 0;
  g->transpose_b = key->transpose_b != 0;
  g->a = given->a;
  g->b = given->b;
  g->c = given->c;
  g->pitch_a = key->pitch_a;
  g->pitch_b = key->pitch_b;
  g->pitch_c = key->pitch_c;
  g->dtype = (flce_dtype)key->dtype;
  g->c_dtype = (flce_dtype)key->c_dtype;
  g->beta = key->accumulate ? 1.0 : 0.0;
  g->bias = key->bias ? given->bias : NULL;
  const gemm_key bound = gemm_key_of(cuda, g, given->workspace_bytes);
  if (memcmp(&bound, key, sizeof(*key)) == 0) return FLCE_OK;
  return flce_fail(FLCE_INVALID_ARGUMENT,
                   "operands: expected the alignments, bias and workspace of the product");
}

static flce_status time_candidate(const flce_cuda* cuda, const char* product,
                                  const flce_gemm_operands* operands, int64_t candidate,
                                  int64_t repeats, double* milliseconds) {
  const gemm_device* device;
  gemm_key key;
  flce_gemm g = {};
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  FLCE_TRY(check_cuda(cudaStreamIsCapturing((cudaStream_t)cuda->stream, &capture), "capture"));
  if (capture != cudaStreamCaptureStatusNone) {
    return flce_fail(FLCE_UNSUPPORTED, "a product cannot be timed while a graph is captured");
  }
  FLCE_TRY(open_gemm_device(cuda->device, &device));
  FLCE_TRY(read_product(product, cuda, device, &key));
  flce_cuda own = *cuda;
  own.allow_tf32 = key.tf32 != 0;
  FLCE_TRY(bind_product(&own, &key, operands, &g));
  gemm_descriptors d = {};
  gemm_candidates found;
  flce_status status = open_product(device, &key, &d, &found);
  if (status == FLCE_OK && (candidate < 0 || candidate >= found.count || repeats < 1)) {
    status = flce_fail(FLCE_INVALID_ARGUMENT,
                       "expected a candidate of 0 to %d and at least one repeat, got %lld and %lld",
                       found.count - 1, (long long)candidate, (long long)repeats);
  }
  if (status == FLCE_OK) {
    status = time_launches(device, cuda, &g, &d, &found.list[candidate].algo, operands->workspace,
                           &key, repeats, milliseconds);
  }
  destroy_descriptors(device, &d);
  return status;
}

/* ---- exports ---- */

static flce_status use_choices(const char* lines) {
  FLCE_TRY(import_choices(lines));
  forget_gemm_slots();
  return FLCE_OK;
}

extern "C" FLCE_EXPORT const flce_cuda_tuning* flce_cuda_tuning_table(void) {
  static const flce_cuda_tuning table = {
      .record = record_gemms,
      .recorded = write_recorded,
      .candidates = write_candidates,
      .time = time_candidate,
      .use = use_choices,
      .last_error = flce_last_error,
  };
  return &table;
}
