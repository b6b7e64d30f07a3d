/* Declarations of the functions of the CUDA backend's table and of the helpers that facts and
 * describe call. backend.h specifies the functions of the table. `self`
 * is a flce_cuda; its device is the current one, and all work is queued on its stream. */
#ifndef FLCE_CUDA_BACKEND_CUH
#define FLCE_CUDA_BACKEND_CUH

#include "cuda/common/types.cuh"

static inline cudaStream_t stream_of(void* self) {
  return (cudaStream_t)((const flce_cuda*)self)->stream;
}

/* The functions of the backend table (backend.h). */
#define FLCE_DECLARE(name) std::remove_pointer_t<decltype(flce_backend::name)> cuda_##name;
FLCE_BACKEND_FUNCTIONS(FLCE_DECLARE)
FLCE_FUSED_FUNCTIONS(FLCE_DECLARE)
#undef FLCE_DECLARE

/* backend.cu: 90 for 9.0. */
flce_status cuda_capability(int device, int64_t* capability);

/* gemm/cublaslt.cu: cuBLASLt's version number, 0 if it cannot be loaded. */
size_t cuda_gemm_version(void);

/* For facts, with CUB's scratch: passes/target_order.cu, passes/ignored_rows.cu,
 * samples/sample_order.cu. */
flce_status cuda_order_bytes(int64_t tokens, int64_t vocab, int64_t* bytes);
flce_status cuda_compact_bytes(int64_t tokens, int64_t* bytes);
flce_status cuda_sample_bytes(const flce_problem* problem, int64_t* bytes);

#endif
