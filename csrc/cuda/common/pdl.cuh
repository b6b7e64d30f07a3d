/* Programmatic dependent launch (PDL): a kernel may start while the one before it in the stream
 * ends. The device side (pdl_wait) and the launches. */
#ifndef FLCE_CUDA_COMMON_PDL_CUH
#define FLCE_CUDA_COMMON_PDL_CUH

#include "cuda/common/types.cuh"

/* From Hopper on, the blocks of a PDL launch may start while the kernel before it in the stream
 * ends: 1 us less between two small kernels. pdl_wait waits until the kernels before have completed
 * and their writes are visible, then allows the next kernel's blocks to start.
 *
 * Every thread of such a kernel must call it before it accesses global memory or returns; if the
 * kernel was launched by launch_overlapping, before it writes or returns. A kernel that does not
 * wait could end before its predecessors, and the kernel after it would then read what they have
 * not written yet. tests/check_kernels.py checks the machine code for this. */
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

/* Whether the device and its driver support PDL. */
static inline flce_status supports_pdl(int device, int* can) {
  /* 1 + the answer, 0 until queried; threads that query at the same time store the same value */
  static int known[kMaxDevices];
  FLCE_TRY(check_device(device));
  const int captures = 12030; /* an older driver cannot capture PDL launches into a CUDA graph */
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

/* The launch attribute of PDL; `can` is 1 or 0. */
static inline cudaLaunchAttribute pdl_attribute(int can) {
  cudaLaunchAttribute attribute = {};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = can;
  return attribute;
}

/* Launches a kernel that reads before it calls pdl_wait. `may_overlap`: it may run at the same time
 * as the kernel before it. That one must be ours, must have called pdl_wait, and must write nothing
 * that this kernel reads before its own pdl_wait. Without `may_overlap` it is an ordinary launch.
 */
template <typename... Parameters, typename... Arguments>
static inline flce_status launch_overlapping(void* self, void (*kernel)(Parameters...), dim3 blocks,
                                             int threads, const char* what, bool may_overlap,
                                             Arguments... arguments) {
  const flce_cuda* cuda = (const flce_cuda*)self;
  int can;
  FLCE_TRY(supports_pdl(cuda->device, &can));
  if (!may_overlap) can = 0;
  cudaLaunchAttribute attribute = pdl_attribute(can);
  cudaLaunchConfig_t config = {};
  config.gridDim = blocks;
  config.blockDim = dim3((unsigned)threads);
  config.stream = (cudaStream_t)cuda->stream;
  config.attrs = &attribute;
  config.numAttrs = (unsigned)can;
  return check_cuda(cudaLaunchKernelEx(&config, kernel, (Parameters)arguments...), what);
}

/* Launches a kernel that calls pdl_wait before any access to global memory. */
template <typename... Parameters, typename... Arguments>
static inline flce_status launch_dependent(void* self, void (*kernel)(Parameters...), dim3 blocks,
                                           int threads, const char* what, Arguments... arguments) {
  return launch_overlapping(self, kernel, blocks, threads, what, true, arguments...);
}

#endif
