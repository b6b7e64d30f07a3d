/* The parts of a simulated CUDA runtime that do nothing, for programs that run csrc/cuda/peers.cu
 * without a GPU; and its two functions. */
#ifndef FLCE_TESTS_CUDA_STUBS_H
#define FLCE_TESTS_CUDA_STUBS_H

#include "peers.h"

#include <cuda.h>
#include <cuda_runtime_api.h>

extern "C" {
void** __cudaRegisterFatBinary(void*) {
  return NULL;
}
void __cudaRegisterFatBinaryEnd(void**) {}
void __cudaUnregisterFatBinary(void**) {}
cudaError_t cudaGetLastError() {
  return cudaSuccess;
}
const char* cudaGetErrorString(cudaError_t) {
  return "it fails";
}
cudaError_t cudaDeviceGetStreamPriorityRange(int* least, int* greatest) {
  *least = *greatest = 0;
  return cudaSuccess;
}
flce_status flce_cuda_peers_begin(const flce_cuda*, const flce_peers*, flce_collective_id, void*,
                                  int64_t, int64_t);
flce_status flce_cuda_peers_wait(const flce_cuda*, flce_collective_id);
}

#endif
