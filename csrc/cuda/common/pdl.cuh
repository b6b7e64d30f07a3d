/* Programmatic dependent launch (PDL): kernels that may begin while the one before them ends. */
#ifndef FLCE_CUDA_COMMON_PDL_CUH
#define FLCE_CUDA_COMMON_PDL_CUH

#include "cuda/common/types.cuh"

/* From Hopper on the blocks of a launch may take their places while the kernel before it in the
 * stream ends (programmatic dependent launch): 1 us less between two small kernels. In such a
 * kernel every thread calls pdl_wait before it touches global memory or returns, or, where it
 * is launched by launch_overlapping, before it writes or returns: it waits for the results of the
 * kernels before, and lets the next one's blocks come. A kernel that did not wait would end before
 * its predecessors, and the kernel after it read what they have not written.
 * tests/check_kernels.py looks for that in the machine code. */
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Whether a device and its driver can do that. */
static inline flce_status supports_pdl(int device, int* can) {
  static int known[kMaxDevices]; /* 1 + the answer; threads that ask at once agree */
  FLCE_TRY(check_device(device));
  const int captures = 12030; /* an older driver does not take such launches into graphs */
  int major = 0, driver = 0, found = __atomic_load_n(&known[device], __ATOMIC_RELAXED);
  if (found == 0) {
    FLCE_TRY(check_cuda(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device),
                        "launch"));
    FLCE_TRY(check_cuda(cudaDriverGetVersion(&driver), "launch"));
    found = 1 + (major >= 9 && driver >= captures);
    __atomic_store_n(&known[device], found, __ATOMIC_RELAXED);
  }
  *can = found - 1;
  return FLCE_OK;
}

static inline cudaLaunchAttribute pdl_attribute(int can) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = can;
  return attribute;
}

/* Launches a kernel that calls pdl_wait later. `overlaps`: it may run at the same time as the
 * kernel before it, which is one of ours, which has waited for all before it, and writes nothing
 * that this one reads. */
template <typename... Parameters, typename... Arguments>
static inline flce_status launch_overlapping(void* self, void (*kernel)(Parameters...), dim3 blocks,
                                             int threads, const char* what, bool overlaps,
                                             Arguments... arguments) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  int can;
  FLCE_TRY(supports_pdl(cuda->device, &can));
  if (!overlaps) can = 0;
  cudaLaunchAttribute attribute = pdl_attribute(can);
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3((unsigned)threads);
  config.stream = (cudaStream_t)cuda->stream;
  config.attrs = &attribute;
  config.numAttrs = (unsigned)can;
  return check_cuda(cudaLaunchKernelEx(&config, kernel, (Parameters)arguments...), what);
}

/* Launches a kernel that calls pdl_wait first. */
template <typename... Parameters, typename... Arguments>
static inline flce_status launch_dependent(void* self, void (*kernel)(Parameters...), dim3 blocks,
                                           int threads, const char* what, Arguments... arguments) {
  return launch_overlapping(self, kernel, blocks, threads, what, true, arguments...);
}

#endif
