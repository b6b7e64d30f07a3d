/* The CUDA backend's facts and table of functions, and the exports flce_cuda_backend and
 * flce_cuda_describe of libflce_cuda.so. The functions of the table are defined in the files that
 * backend.cuh names. */
#include "cuda/backend.cuh"

#include <stdio.h>

/* ---- facts ---- */

flce_status cuda_capability(int device, int64_t* capability) {
  int major, minor;
  FLCE_TRY(check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                      "compute capability"));
  FLCE_TRY(check_cuda(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, device),
                      "compute capability"));
  *capability = 10 * major + minor;
  return FLCE_OK;
}

flce_status cuda_facts(void* self, const flce_problem* problem, flce_facts* facts) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  flce_gpu gpu = {};
  int multiprocessors;
  FLCE_TRY(cuda_capability(cuda->device, &gpu.capability));
  FLCE_TRY(check_cuda(
      cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, cuda->device),
      "facts"));
  gpu.multiprocessors = multiprocessors;
  FLCE_TRY(
      flce_gpu_facts(&gpu, flce_architecture_of(gpu.capability), cuda->kernel, problem, facts));
  /* With CUB's own sizes of its scratch in place of estimates. */
  if (facts->sample_bytes > 0) {
    FLCE_TRY(cuda_sample_bytes(problem, &facts->sample_bytes));
  }
  if (facts->compact_bytes > 0) {
    FLCE_TRY(cuda_compact_bytes(problem->shape.tokens, &facts->compact_bytes));
  }
  return cuda_order_bytes(problem->shape.tokens, problem->shape.vocab, &facts->order_bytes);
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

/* Of NVIDIA's drivers for Linux, the first that runs what a toolkit of this major version has
 * built: table of "CUDA minor version compatibility" in the toolkit's release notes. */
static const int kFirstDriver = CUDART_VERSION >= 13000 ? 580 : 525;

/* What was built. tools/cuda_library.py finds this text in the file of a library, which it cannot
 * load if that is for another machine. */
#define FLCE_TEXT(...) FLCE_TEXT_OF(__VA_ARGS__)
#define FLCE_TEXT_OF(...) #__VA_ARGS__
__attribute__((used)) static const char kBuilt[] =
    "flce_cuda built by nvcc " FLCE_TEXT(__CUDACC_VER_MAJOR__) "." FLCE_TEXT(
        __CUDACC_VER_MINOR__) " for " FLCE_TEXT(__CUDA_ARCH_LIST__) ";";

/* Why no GPU can be used, "" if one can. A driver serves every toolkit of its major version. */
static void why_unusable(char* text, size_t size) {
  int driver = 0, devices = 0;
  cudaDriverGetVersion(&driver);
  if (driver == 0) {
    snprintf(text, size, "no NVIDIA driver is installed");
  } else if (driver / 1000 < CUDART_VERSION / 1000) {
    snprintf(text, size, "the driver is for CUDA %d.%d, driver %d or later is needed",
             driver / 1000, driver % 1000 / 10, kFirstDriver);
  } else {
    const cudaError_t error = cudaGetDeviceCount(&devices);
    if (error != cudaSuccess || devices == 0) {
      snprintf(text, size, "no GPU: %s", cudaGetErrorString(error ? error : cudaErrorNoDevice));
    } else {
      text[0] = 0;
    }
  }
  cudaGetLastError();
}

/* A line for what was built, one for the driver, one for the GPU or for why none can be used. */
extern "C" FLCE_EXPORT const char* flce_cuda_describe(void) {
  static thread_local char text[768];
  const int archs[] = {__CUDA_ARCH_LIST__};
  int used = snprintf(text, sizeof(text), "flce_cuda %s, nvcc %d.%d, driver %d or later, GPUs",
                      FLCE_VERSION, __CUDACC_VER_MAJOR__, __CUDACC_VER_MINOR__, kFirstDriver);
  for (size_t i = 0; i < sizeof(archs) / sizeof(archs[0]); i++) {
    used += snprintf(text + used, sizeof(text) - used, " sm_%d", archs[i] / 10);
  }
  char why[256];
  why_unusable(why, sizeof(why));
  if (why[0]) {
    snprintf(text + used, sizeof(text) - used, "\nnot usable: %s", why);
    return text;
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
  }
  return text;
}
