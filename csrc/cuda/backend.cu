/* The CUDA backend's facts and table of functions, and the exports flce_cuda_backend and
 * flce_cuda_describe of libflce_cuda.so. The functions of the table are defined in the files that
 * backend.cuh names. */
#include "cuda/backend.cuh"

#include <stdio.h>

/* ---- facts ---- */

/* Bytes of cuBLASLt's workspace. NVIDIA recommends 32 MiB from Hopper on, 8 MiB before. The GEMMs
 * of a small problem need less: split-K keeps at most kPartials partial results. */
static int64_t gemm_workspace(const flce_problem* p, int major) {
  const int64_t mib = 1 << 20, kPartials = 16;
  const int64_t cap = (major >= 9 ? 32 : 8) * mib;
  const double most = fmax((double)p->tokens * (double)p->vocab,
                           (double)p->hidden * fmax((double)p->tokens, (double)p->vocab));
  const double wanted = most * (double)(kPartials * flce_size_of(flce_stat_dtype(p->dtype)));
  if (wanted >= (double)cap) return cap;
  return max_of(mib, ceil_div((int64_t)wanted, 256) * 256);
}

/* Scratch of the three uses of column_sum: E [N][V], W [V][H] and x [N][H]. */
static int64_t column_sum_scratch(const flce_problem* p) {
  const int64_t e = cuda_column_sum_bytes(p->tokens, p->vocab, p->dtype);
  const int64_t w = cuda_column_sum_bytes(p->vocab, p->hidden, p->dtype);
  const int64_t x = cuda_column_sum_bytes(p->tokens, p->hidden, p->dtype);
  return max_of(e, max_of(w, x));
}

/* The problem with H rounded up to `alignment`. If that changes H, x and W are copied to the
 * workspace, where they are aligned. dW and the saved rows are not copied, so weight_unaligned
 * stays. */
static flce_problem pad_hidden(const flce_problem* given, int64_t alignment) {
  flce_problem problem = *given;
  problem.hidden = ceil_div(given->hidden, alignment) * alignment;
  if (problem.hidden != given->hidden) problem.unaligned = false;
  return problem;
}

flce_status cuda_facts(void* self, const flce_problem* given, flce_facts* facts) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  flce_facts_of_type(false, given->dtype, facts);
  const flce_problem padded = pad_hidden(given, facts->hidden_alignment), *problem = &padded;
  int major, minor, multiprocessors;
  FLCE_TRY(check_cuda(
      cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, cuda->device), "facts"));
  FLCE_TRY(check_cuda(
      cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, cuda->device), "facts"));
  FLCE_TRY(check_cuda(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, cuda->device),
      "facts"));
  facts->multiprocessors = multiprocessors;
  facts->gemm_workspace_bytes = gemm_workspace(problem, major);
  facts->column_sum_bytes = column_sum_scratch(problem);
  facts->compact_bytes = facts->sample_bytes = 0;
  if (problem->save == FLCE_SAVE_SAMPLES) {
    FLCE_TRY(cuda_sample_bytes(problem, &facts->sample_bytes));
  }
  FLCE_TRY(cuda_sm90_facts(10 * major + minor, problem, facts));
  if (problem->rows < problem->tokens || facts->skips_rows ||
      problem->gathers) { /* rows may be gathered */
    FLCE_TRY(cuda_compact_bytes(problem->tokens, &facts->compact_bytes));
  }
  return cuda_order_bytes(problem->tokens, problem->vocab, &facts->order_bytes);
}

/* ---- exports ---- */

extern "C" FLCE_EXPORT flce_status flce_cuda_backend(flce_cuda* cuda, flce_backend* backend) {
  if (!cuda || !backend) {
    return flce_fail(FLCE_INVALID_ARGUMENT, "flce_cuda_backend: expected two pointers, got NULL");
  }
  *backend = {};
  backend->name = "cuda";
  backend->self = cuda;
  backend->last_error = flce_last_error;
#define FLCE_ENTRY(function) backend->function = cuda_##function;
  FLCE_BACKEND_FUNCTIONS(FLCE_ENTRY)
  FLCE_FUSED_FUNCTIONS(FLCE_ENTRY)
#undef FLCE_ENTRY
  return FLCE_OK;
}

extern "C" FLCE_EXPORT uint64_t flce_cuda_headers(void) {
  return FLCE_HEADERS;
}

extern "C" FLCE_EXPORT const char* flce_cuda_describe(void) {
  static thread_local char text[512];
  const int archs[] = {__CUDA_ARCH_LIST__};
  int used = snprintf(text, sizeof(text), "flce_cuda %s, nvcc %d.%d, architectures", FLCE_VERSION,
                      __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__);
  for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++) {
    used += snprintf(text + used, sizeof(text) - used, " %d", archs[i] / 10);
  }
  int driver = 0, device = 0;
  cudaDeviceProp prop;
  cudaDriverGetVersion(&driver);
  used += snprintf(text + used, sizeof(text) - used, "\nCUDA driver %d, cuBLASLt %zu", driver,
                   cuda_gemm_version());
  if (cudaGetDevice(&device) == cudaSuccess &&
      cudaGetDeviceProperties(&prop, device) == cudaSuccess) {
    snprintf(text + used, sizeof(text) - used, "\ndevice %d: %s, sm_%d%d, %d SMs, %zu MiB", device,
             prop.name, prop.major, prop.minor, prop.multiProcessorCount,
             prop.totalGlobalMem >> 20);
  } else {
    cudaGetLastError();
    snprintf(text + used, sizeof(text) - used, "\nno device");
  }
  return text;
}
